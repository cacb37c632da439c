/* A running command as it is seen: takes the engine's events, keeps what the run's result needs,
 * and shows it at most twice a second: bar, table and meters under one display id, the curve under
 * another. */
#ifndef QL_LIVE_H
#define QL_LIVE_H

#include "magics/view.h"

typedef struct {
    const ql_host *host;
    ql_follow follow;
    int lines_every;       /* 0: chosen from the number of steps */
    const char *name;      /* of the run; "" where there is none (generate, eval) */
    int number;            /* distinguishes display ids */
    int64_t steps;         /* where this call ends, if before the schedule does; 0: all of it */
    const json_t *before;  /* history of the steps before a resume, or NULL */
    const json_t *against; /* another run's report drawn beside it (baseline), or NULL */
} ql_live_options;

typedef struct ql_live ql_live;

ql_status ql_live_open(const ql_live_options *options, ql_live **out);
ql_status ql_live_event(void *live, const json_t *event); /* a ql_client_event */
void ql_live_tick(void *live);                            /* a ql_client_tick */
/* The last state, final: how is "done", "stopped" or "failed"; note: one line under it, or NULL. */
ql_status ql_live_finish(ql_live *l, const char *how, const char *note);
void ql_live_close(ql_live *l);

/* What was gathered: {"history": [step and eval records], "memory": [events], "start": {…},
 * "checkpoints": […], "step": n, "warnings": […]}; a new reference. */
json_t *ql_live_record(const ql_live *l);

#endif
