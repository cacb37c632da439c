/* Models and data sets from the hub, into the cache that Python's huggingface_hub uses too. Nothing is read
 * from the environment here: the front end passes HF_TOKEN, HF_HOME and so on. */
#ifndef QL_HUB_H
#define QL_HUB_H

#include "core/file.h"

typedef enum { QL_HUB_MODEL, QL_HUB_DATASET } ql_hub_kind;

/* Bytes of all files wanted; nonzero stops the download (it is resumed by the next one). */
typedef int ql_hub_progress(void *user, const char *file, int64_t done, int64_t total);

typedef struct {
    ql_hub_kind kind;
    const char *cache_dir; /* $HF_HUB_CACHE, or $HF_HOME/hub */
    const char *endpoint;  /* NULL: https://huggingface.co */
    const char *revision;  /* NULL: main */
    const char *token;     /* NULL: none. Sent to the endpoint alone; never in a message */
    bool offline;          /* HF_HUB_OFFLINE: only what is there */
    int stall_seconds;     /* 0: 30. A connection without a byte for so long is dropped and tried again */
    int retries;           /* 0: 5 in a row without progress */
    int wait_ms;           /* 0: 1000. Doubled from try to try */
    ql_hub_progress *progress;
    void *user;
} ql_hub_options;

/* True for "name/name" that could be a repository. */
bool ql_hub_is_repo(const char *repo);
/* The repository behind a folder of the cache ("…/models--org--name/snapshots/…", or datasets--); false: it is none. */
bool ql_hub_name(const char *path, char *repo, size_t size);
/* Makes sure that the files that match one of the patterns (fnmatch; n = 0: all) are there, and returns their
 * folder. What is cached is not fetched again; the hub is asked which files there are, unless offline is set. */
ql_status ql_hub_snapshot(const ql_hub_options *o, const char *repo, const char *const *patterns, size_t n,
                          char folder[QL_PATH_MAX]) QL_MUST_USE;

#endif
