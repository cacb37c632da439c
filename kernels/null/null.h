/* Inside the null backend: its tables and its counters. */
#ifndef QL_NULL_H
#define QL_NULL_H

#include "kernels/comm.h"

#include <stdatomic.h>

extern const ql_dev_table ql_null_dev;

/* Of the whole process: what ql_null_take returns. */
extern atomic_llong ql_null_calls, ql_null_flops, ql_null_bytes;

#endif
