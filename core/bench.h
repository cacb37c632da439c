/* What the machine can do, measured: memory, matmul under load, host links, collectives, the 4-bit decoder. */
#ifndef QL_BENCH_H
#define QL_BENCH_H

#include "core/launch.h"

/* The body of a rank process that answers "bench" commands. */
int ql_bench_main(ql_rank_process *p);

#endif
