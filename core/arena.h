/* Device memory: one block per rank, taken before the first step and carved once. The same carving code
 * runs without memory to count bytes (memory for a plan) and with memory (a run), so that the plan's
 * number is the allocation's. */
#ifndef QL_ARENA_H
#define QL_ARENA_H

#include "kernels/base.h"

typedef enum {
    QL_CAT_BASE,       /* the frozen layers as stored: NF4 or 16 bit */
    QL_CAT_HEAD,       /* head, norms, biases, tables */
    QL_CAT_GATHER,     /* slots that sharded or host-resident layers pass through */
    QL_CAT_SCRATCH,    /* one dequantised layer */
    QL_CAT_ADAPTER,    /* fp32 adapters */
    QL_CAT_GRAD,       /* their gradients */
    QL_CAT_OPTIM,      /* optimizer states */
    QL_CAT_ACT,        /* activations kept from forward to backward */
    QL_CAT_WORK,       /* buffers of one layer, of the loss, of the ops */
    QL_CATS
} ql_cat;

const char *ql_cat_name(ql_cat c); /* "base", "head", … */

typedef struct {
    char *base;               /* NULL: counting */
    int64_t size, used;       /* of the block */
    int64_t by_cat[QL_CATS];
} ql_arena;

/* bytes rounded up to 256; NULL when counting. Running over the end of a real arena is QL_EINTERNAL: counting
 * and carving have to agree. */
ql_status ql_arena_take(ql_arena *a, ql_cat cat, int64_t bytes, void **out);
/* rows × ld elements viewed as (rows, cols). */
ql_status ql_arena_mat(ql_arena *a, ql_cat cat, ql_dtype t, int64_t rows, int64_t cols, int64_t ld, ql_tensor *out);

#endif
