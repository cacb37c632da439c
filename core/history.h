/* What a run records: transformers' log_history and trainer_state.json, key for key. */
#ifndef QL_HISTORY_H
#define QL_HISTORY_H

#include "core/args.h"

typedef struct ql_history ql_history;

/* args and steps must outlive it. */
ql_status ql_history_new(const ql_args *args, const ql_steps *steps, ql_history **out) QL_MUST_USE;
void ql_history_free(ql_history *h);

/* An optimizer step was made, or skipped by the loss scaler. */
typedef struct {
    int64_t step;      /* steps made, this one included: from 1 */
    double loss;       /* Σ nll / items of the step; may be NaN */
    double grad_norm;  /* before clipping */
    double lr;         /* the rate it was made with */
    int64_t tokens;    /* input tokens, padding included, as transformers counts them */
    double flos;
} ql_step_record;
void ql_history_step(ql_history *h, const ql_step_record *r);

/* Writes the record of the steps since the last one: {"loss", "grad_norm", "learning_rate", "epoch", "step"}; nothing when there
 * were none. seconds: since training began. */
ql_status ql_history_log(ql_history *h, double seconds) QL_MUST_USE;

typedef struct {
    double loss, seconds;
    int64_t samples, batches;
} ql_eval_record;
/* {"eval_loss", "eval_runtime", …}. *best: this is the best so far since the first step, by what metric_for_best_model asks (0 when nothing is tracked). */
ql_status ql_history_eval(ql_history *h, const ql_eval_record *r, int *best) QL_MUST_USE;
/* The steps made so far are evaluated. */
bool ql_history_evaluated(const ql_history *h);

/* A checkpoint of this step now exists; path is what best_model_checkpoint will say when it is the best. Also after a resume. */
ql_status ql_history_saved(ql_history *h, int64_t step, const char *path) QL_MUST_USE;
/* The best step's folder; NULL: none, it was not saved, or it was gone when the run was resumed. Borrowed. */
const char *ql_history_best_path(const ql_history *h);
int64_t ql_history_best_step(const ql_history *h); /* 0: none */

/* The last record, {"train_runtime", …, "train_loss"}: of this session's steps. */
ql_status ql_history_end(ql_history *h, double seconds) QL_MUST_USE;

const json_t *ql_history_records(const ql_history *h); /* log_history, borrowed */
double ql_history_train_loss(const ql_history *h);
int64_t ql_history_done(const ql_history *h);          /* steps made */

/* folder/trainer_state.json, as transformers writes it. */
ql_status ql_history_save(const ql_history *h, const char *folder) QL_MUST_USE;
/* What trainer_state.json does not hold and a resume needs, so that records after it are those of a run that never stopped. */
json_t *ql_history_rest(const ql_history *h);
/* Continues from folder/trainer_state.json; rest: of ql_history_rest, or NULL. */
ql_status ql_history_resume(ql_history *h, const char *folder, const json_t *rest) QL_MUST_USE;

/* JSON as Python's json.dumps(v, indent=2, sort_keys=True) writes it, floats in their shortest form. Caller frees. */
char *ql_json_python(const json_t *v);

#endif
