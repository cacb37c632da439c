/* `%qlora` as a library. A host (the Python extension, the shell program) gives it a few callbacks
 * and the text of a cell; it gets back outputs to show and one result. One thread; only
 * ql_magics_run calls the host back, so a host may publish straight from its callbacks. */
#ifndef QL_MAGICS_H
#define QL_MAGICS_H

#include "core/qlora.h"
#include "magics/buf.h"

#include <poll.h>

typedef enum { QL_SHOW_NEW, QL_SHOW_UPDATE } ql_show_how;

/* How long work is followed: outputs that change in place, plain lines on stdout (a terminal, a
 * log), or both (a notebook run in batch, whose log keeps stdout alone). */
typedef enum { QL_FOLLOW_DISPLAY, QL_FOLLOW_LINES, QL_FOLLOW_BOTH } ql_follow;

typedef struct {
    void *self; /* handed to every callback */
    /* Shows a bundle {"data": {mime: text or JSON}, "metadata": {…}}. id: NULL, or the name by
     * which QL_SHOW_UPDATE replaces what was shown before. */
    ql_status (*show)(void *self, const json_t *bundle, const char *id, ql_show_how how);
    void (*print)(void *self, const char *text); /* whole lines for stdout */
    /* Called about every 100 ms while something runs: how often stop was pressed since the last
     * call. */
    int (*interrupts)(void *self);
    /* poll(2), with whatever locks the host holds let go. NULL: poll. */
    int (*wait)(void *self, struct pollfd *fds, nfds_t n, int timeout_ms);
    /* A chart (view.h) as PNG; leaves png empty when it cannot. NULL: charts are SVG. */
    ql_status (*chart)(void *self, const json_t *chart, ql_buf *png);
    /* The notebook's variable `name` written as JSON lines under `folder`: {"path": …, "rows": n}; without a folder {} where it
     * has rows. A run: {"run": its folder}. Null when there is no such variable. NULL: no variables here. */
    ql_status (*variable)(void *self, const char *name, const char *folder, json_t **out);
    /* The host's own libraries for `info`: {"Python": "3.12.1", "matplotlib": "3.10.0" or null, …}.
     * NULL: none. */
    json_t *(*libraries)(void *self);
    /* bench's weight through the host's bitsandbytes, {"rows","cols","backend"} → {"version","seconds","crc32"}; NULL or a null: it has
     * none. */
    json_t *(*bitsandbytes)(void *self, const json_t *weight);
    /* How to reach the hub, asked at each download: {"cache": folder, "endpoint", "token", "offline"}, all but the first may be
     * missing. NULL: names on the hub are not looked up. */
    json_t *(*hub)(void *self);
    /* Uploads a folder's files: {"folder", "repo", "private", "files": [patterns]} → {"url", "commit"}. NULL: not from here. */
    ql_status (*push)(void *self, const json_t *what, json_t **out);
    /* Every event of a training as the engine sends it (core/qlora.h), for hosts that follow it themselves. NULL: none does. */
    ql_status (*event)(void *self, const json_t *event);
} ql_host;

typedef struct {
    const char *engine;  /* program; required for what needs devices */
    const char *runs;    /* folder of the runs; NULL: "runs" */
    const char *bundled; /* folder of bundled models and data; NULL: none */
    const char *hub;     /* cache of downloaded models, for completion; NULL: none */
    ql_follow follow;
    int lines_every; /* plain lines: one every N steps, 0: chosen from the number of steps */
    int ready_ms;    /* how long the engine may take to say "ready"; 0: 20 s */
} ql_magics_options;

typedef struct ql_magics ql_magics;

ql_status ql_magics_open(const ql_magics_options *options, const ql_host *host, ql_magics **out);
void ql_magics_close(ql_magics *m); /* ends the engine; NULL is allowed */
/* In the child of a fork: lets go of the parent's engine, which would live as long as the child does. */
void ql_magics_forked(ql_magics *m);

/* Runs one cell: line without "%qlora", body of a %%qlora cell or NULL. *out is NULL after a
 * trailing ';', else {"kind": verb, "repr": one line, "data": {…}, "bundle": what to show, or null
 * when all was shown}. QL_ESTOP: the user stopped it; ql_error() says what was kept. */
ql_status ql_magics_run(ql_magics *m, const char *line, const char *body, json_t **out);

/* Words that may stand at the cursor (the end of `line`): an array of strings. The line may begin
 * with %qlora or %%qlora. */
json_t *ql_magics_complete(ql_magics *m, const char *line);

/* Help on a verb or a setting (NULL: all verbs) as plain text; for `?`. */
ql_status ql_magics_help(const char *topic, ql_buf *out);

/* The last run as in a result, borrowed; NULL when there was none. */
const json_t *ql_magics_last(const ql_magics *m);

#endif
