/* Lines of JSON between the engine and its front end (core/qlora.h has the protocol): a writer that loses no line and never
 * waits for ever, and a reader that survives whatever arrives. */
#ifndef QL_EVENT_H
#define QL_EVENT_H

#include "kernels/base.h"

#include <jansson.h>

/* ---- writing -------------------------------------------------------------------------------------- */

typedef struct ql_events ql_events;

typedef struct {
    int fd;             /* a socket, pipe or file, not closed here; -1: none */
    size_t queue_bytes; /* lines that may wait for a slow reader; 0: 8 MiB */
    int deadline_ms;    /* with a full queue, how long a reader may read nothing; 0: 30 s */
} ql_events_setup;

ql_status ql_events_open(const ql_events_setup *set, ql_events **out) QL_MUST_USE;
void ql_events_close(ql_events *e); /* what still waits is offered once more, without waiting */
/* From now on every line goes to this file too, at its end; NULL: no longer. QL_EINVAL: another process writes it. */
ql_status ql_events_log(ql_events *e, const char *path) QL_MUST_USE;

/* Sends {"ev":name, "t":seconds since open, fields…}; takes over fields (NULL: none). Does not wait while the queue has room.
 * QL_EIO: the reader has gone or reads nothing; the file still gets every line. A file that cannot be written (disk full) is left
 * with a warning event, and does not end a run. */
ql_status ql_events_emit(ql_events *e, const char *name, json_t *fields);
/* Hands over what waits: at most timeout_ms. Bytes left are in *left (may be NULL). */
ql_status ql_events_flush(ql_events *e, int timeout_ms, size_t *left);

/* o[key] = x. JSON has no NaN and no infinity: those become null, with "nan", "inf" or "-inf" as key_text beside it. */
ql_status ql_json_set_number(json_t *o, const char *key, double x);

/* ---- reading -------------------------------------------------------------------------------------- */

enum { QL_LINE_MAX = 16 << 20 };

typedef struct ql_lines ql_lines;
typedef enum {
    QL_LINES_ONE,  /* *out is an object */
    QL_LINES_NONE, /* nothing came in time, or a signal did */
    QL_LINES_END   /* the other side has closed */
} ql_lines_state;

ql_status ql_lines_open(int fd, ql_lines **out) QL_MUST_USE; /* fd is not closed here */
void ql_lines_close(ql_lines *r);
/* The next line; waits at most timeout_ms (0: not, -1: for ever). QL_EINVAL: a line that is no JSON object, or is longer than
 * QL_LINE_MAX; it has been skipped, go on with the next call. */
ql_status ql_lines_next(ql_lines *r, int timeout_ms, ql_lines_state *state, json_t **out) QL_MUST_USE;
/* The next command, however long it takes, NULL at the end of input; lines that are none are skipped, and the error text is clear. */
json_t *ql_lines_wait(ql_lines *r);

#endif
