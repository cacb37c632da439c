/* A pipeline on paper: the plans of all stages run against the clock, with given times for what they do. */
#ifndef QL_PIPE_H
#define QL_PIPE_H

#include "core/plan.h"

/* Seconds, or any other unit. */
typedef struct {
    double f[QL_MAX_LAYERS], r[QL_MAX_LAYERS], b[QL_MAX_LAYERS]; /* forward, recompute, gradient of a layer */
    double head;                                                 /* loss and its gradient */
    double fetch[QL_MAX_LAYERS];                                 /* a layer's bytes from the host, beside the compute */
    double message;                                              /* h, or its gradient, to the neighbour */
} ql_pipe_times;

typedef struct {
    double seconds;                /* from the first action to the last */
    double busy[QL_MAX_WORLD];     /* of each stage */
    double bubble;                 /* share of all stages' time in which they compute nothing */
} ql_pipe_result;

/* g micro-batches of a step. */
ql_status ql_pipe_run(const ql_choice *c, int g, const ql_pipe_times *t, ql_pipe_result *out);

#endif
