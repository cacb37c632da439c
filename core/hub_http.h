/* The requests of core/hub.c: libcurl, tries and pauses, what an answer means. */
#ifndef QL_HUB_HTTP_H
#define QL_HUB_HTTP_H

#include "core/hub.h"
#include "core/json.h"
#include "core/unicode.h"

/* A repository, and how far its download is. */
typedef struct {
    const ql_hub_options *o;
    const char *repo, *revision;
    char endpoint[512];     /* without a slash at its end */
    char site[512];         /* for people: without the name and password that may stand in it */
    void *curl;             /* libcurl's handle */
    char root[QL_PATH_MAX]; /* cache_dir/models--org--name */
    char commit[64];
    json_t *info;
    int64_t total, done; /* bytes of all wanted files; of those that are finished */
} hub;

/* One request's answer. */
typedef struct {
    hub *h;
    ql_str *text; /* into memory, or */
    int fd;       /* into a file */
    const char *name;
    int64_t at, size; /* written so far; the size it must have, −1 unknown */
    long retry_after, limit_reset; /* seconds; −1: not said */
    char code[32];                 /* the hub's name for what is wrong (X-Error-Code) */
    bool too_long, stopped;
    int io_error;       /* errno of a failed write */
    int64_t asked_from; /* resumed from here */
    bool checked;
} answer;

/* Opens libcurl and a handle; close takes NULL. */
ql_status ql_http_open(hub *h) QL_MUST_USE;
void ql_http_close(hub *h);
/* Asks until there is an answer that trying again would not change. A try that brought bytes is no failure. */
ql_status ql_http_get(hub *h, const char *url, answer *a) QL_MUST_USE;
const char *ql_hub_site(const hub *h); /* "datasets/" or "" */

#endif
