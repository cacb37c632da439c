/* Learning-rate schedules as transformers has them: a factor of the base rate at every executed step. */
#ifndef QL_SCHEDULE_H
#define QL_SCHEDULE_H

#include "kernels/base.h"

#include <jansson.h>

typedef enum {
    QL_LR_LINEAR,
    QL_LR_COSINE,
    QL_LR_RESTARTS,
    QL_LR_POLYNOMIAL,
    QL_LR_CONSTANT,
    QL_LR_CONSTANT_WARMUP,
    QL_LR_INVERSE_SQRT,
    QL_LR_COSINE_MIN,        /* cosine_with_min_lr */
    QL_LR_COSINE_WARMUP_MIN, /* cosine_warmup_with_min_lr */
    QL_LR_STABLE,            /* warmup_stable_decay */
    QL_LR_KINDS
} ql_lr_kind;

typedef enum { QL_RAMP_LINEAR, QL_RAMP_COSINE, QL_RAMP_SQRT } ql_ramp;

typedef struct {
    ql_lr_kind kind;
    double lr;                       /* the base rate */
    double cycles, power, lr_end;    /* num_cycles, power, lr_end */
    double min_rate;                 /* min_lr/lr, min_lr_rate, min_lr_ratio */
    double warmup_rate;              /* cosine_warmup_with_min_lr: warmup_lr_rate; < 0: none */
    double timescale;                /* inverse_sqrt; 0: the warm-up, else 10,000 */
    int64_t stable, decay;           /* warmup_stable_decay: stable < 0: what is left */
    ql_ramp up, down;                /* warmup_stable_decay: warmup_type, decay_type */
    int64_t warmup, total;           /* W and N: set once the number of steps is known */
} ql_lr;

/* kwargs: lr_scheduler_kwargs, an object, null or NULL. A key that the schedule does not have is an error. */
ql_status ql_lr_init(const char *type, const json_t *kwargs, double lr, ql_lr *out) QL_MUST_USE;
/* The factor at scheduler step s, counted from 0: a skipped fp16 step does not count. */
double ql_lr_factor(const ql_lr *s, int64_t step);
/* out[k] = the rate of the k-th executed step, for k < n. */
void ql_lr_table(const ql_lr *s, int64_t n, float *out);

#endif
