/* What a job's work is in floating-point operations and bytes, and how fast devices are: for deadlines, for the balance of a pipeline,
 * and for the planner's projections. Estimates only: no result depends on them. */
#ifndef QL_COST_H
#define QL_COST_H

#include "core/memory.h"

typedef struct {
    double flops;     /* a second, in large products */
    double link;      /* bytes a second that a device receives from the others in an all-gather */
    double host;      /* bytes a second from pinned host memory */
} ql_rates;
/* By compute capability (0: CPU cores), from published measurements; cautious where there are none. */
ql_rates ql_rates_of(int arch);

/* Seconds of an optimizer step with full rows in documents of `length` tokens: what is computed, or what is moved where that takes
 * longer, and the update. */
double ql_cost_step(const ql_spec *s, int64_t length, const ql_rates *r);
/* Operations of all ranks in such a step. */
double ql_cost_step_flops(const ql_spec *s, int64_t length);

/* Cuts the layers into stages for a pipeline, choice.cut: no stage is empty while there are layers enough, and the slowest is as quick as
 * can be, the head counted. */
void ql_cost_cut(ql_spec *s, int64_t length);

/* Operations of the largest single action of the job: what a deadline has to wait for. */
double ql_cost_action(const ql_spec *s);

#endif
