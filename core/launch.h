/* Ranks as processes: forked before any device is touched, watched, stopped, and never left behind. */
#ifndef QL_LAUNCH_H
#define QL_LAUNCH_H

#include "core/event.h"
#include "core/rank.h"
#include "core/task.h"

typedef struct ql_ranks ql_ranks;

typedef struct {
    const ql_backend *be;
    const ql_task *task;       /* what they place; lives until they are started; NULL: they bring their own memory */
    int world;                 /* where there is no task */
    const int *device;         /* (world) */
    int64_t timeout_ms;        /* of waits between ranks */
} ql_launch;

/* What a rank process has. */
typedef struct {
    int rank, world;
    ql_shared *shared;
    const ql_launch *launch;
    ql_rank_setup setup;
    ql_lines *in;              /* commands, JSON lines */
    ql_events *out;
} ql_rank_process;

/* Forks world processes; each runs `body` and exits with its status. */
ql_status ql_ranks_start(const ql_launch *l, int (*body)(ql_rank_process *p), ql_ranks **out);
/* Ends them: asks, waits a second, then kills. */
void ql_ranks_stop(ql_ranks *r);

int ql_ranks_world(const ql_ranks *r);
ql_shared *ql_ranks_shared(ql_ranks *r);
ql_lines *ql_ranks_lines(ql_ranks *r, int rank);
int ql_ranks_fd(const ql_ranks *r, int rank);
/* What a rank does not take at once goes with ql_ranks_push. An error leaves some ranks with the command and others without. */
ql_status ql_ranks_send(ql_ranks *r, const json_t *command);
void ql_ranks_push(ql_ranks *r);
/* A rank that has died: its number, and how ("signal 9 (Killed)", "exit status 1"); −1 all alive. */
int ql_ranks_dead(ql_ranks *r, char *how, size_t size);
/* Are all alive, and were they whenever somebody looked? Ranks of which one is gone are of no more use. */
int ql_ranks_whole(ql_ranks *r);
/* Actions done by all ranks together: progress. */
int64_t ql_ranks_beat(const ql_ranks *r);

#endif
