/* Commands as a rank runs them: train, eval. (generate.h, verify.h have theirs.) */
#ifndef QL_TRAIN_H
#define QL_TRAIN_H

#include "core/file.h"
#include "core/launch.h"

/* A rank process between commands: the device with the model on it stays. */
typedef struct {
    ql_rank_process *p;
    ql_task *task;             /* of the command at hand */
    ql_task *placed;           /* what the device holds; may be `task` */
    ql_rank *rank;             /* NULL: nothing placed */
    int32_t *order;            /* an epoch's examples */
    int64_t order_epoch, order_n;
    char holds[QL_PATH_MAX];   /* the run whose adapters are on the device as training left them; "" other ones */
} ql_worker;

/* The body of a rank process. */
int ql_worker_main(ql_rank_process *p);

/* Every rank says how its command ended; the supervisor waits for all of them. Takes out (may be NULL). */
void ql_worker_finish(ql_rank_process *p, const json_t *command, ql_status st, json_t *out);

/* Both end with the result of their "done" event. QL_ESTOP: *out says {"step","checkpoint"}. */
ql_status ql_train_run(ql_worker *w, const json_t *command, json_t **out);
ql_status ql_eval_run(ql_worker *w, const json_t *command, json_t **out);

/* What step `step` (from 0) is trained on. */
ql_status ql_train_data(ql_worker *w, int64_t step, ql_step_data *d);
/* The figures of all ranks as they last measured them (ql_rank_measure): the fields of a "memory" event. */
ql_status ql_worker_memory(const ql_worker *w, json_t **out);

ql_status ql_worker_emit(ql_worker *w, const char *event, json_t *fields); /* rank 0 only speaks */
ql_status ql_worker_say(ql_worker *w, const char *state, const char *text);
double ql_now(void); /* seconds, monotonic */

#endif
