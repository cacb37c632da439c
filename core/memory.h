/* Everything a rank holds on its device, carved by one function: without memory it counts, with memory it hands out. */
#ifndef QL_MEMORY_H
#define QL_MEMORY_H

#include "core/head.h"
#include "core/plan.h"
#include "core/store.h"

typedef enum { QL_ADAM_F32, QL_ADAM_8BIT } ql_state_kind;

/* What fixes a job's memory and arithmetic; the same on every rank. */
typedef struct {
    const ql_model *model;     /* headers are enough to count */
    const ql_lora *lora;
    ql_dtype dtype, res;       /* compute; residual stream */
    double dropout, smoothing;
    uint64_t seed;
    int64_t round;             /* token counts round up to this: 64 on a GPU, so that shapes are few and fit its tiles; 16 on a CPU */
    int64_t rows;              /* tokens of the longest micro-batch, a multiple of it */
    int64_t docs;              /* most documents in a micro-batch */
    int64_t head_chunk;
    int64_t steps;             /* entries of the learning-rate table */
    ql_quant quant;
    ql_state_kind state;       /* of the optimizer */
    int state_host;            /* optimizer states rest on the host ("paged") */
    ql_choice choice;
} ql_spec;

/* A run of the flat vector whose tensors have one kind of state: bitsandbytes keeps 32-bit states for tensors under 4096
 * elements. */
typedef struct {
    int64_t at, n;
    ql_state_kind kind;
    int64_t small;             /* offset in the 32-bit states when the others are 8-bit */
} ql_state_run;

/* Device copy of a micro-batch, and the pinned host block it comes from. */
typedef struct {
    char *dev, *host;
    int64_t bytes;
    int64_t at_pos, at_token, at_start, at_len, at_index, at_target, at_slot, at_kstart, at_klen, at_rows; /* byte offsets */
} ql_stage;

typedef struct {
    const ql_spec *spec;
    int rank;
    int lo, hi;                /* this rank's layers: tables below have all, memory these */
    ql_shape shape;
    /* frozen */
    ql_blob *blob;             /* (L) */
    ql_tables *tables;         /* (L) */
    void **base;               /* (L) device bytes: all parts, or this rank's; NULL for host layers */
    ql_scratch *own;           /* (L) RESIDENT16 layers' own scratch */
    ql_small *small;           /* (L) */
    ql_tensor freq;            /* (1, D/2) */
    void *slot[QL_GATHER_SLOTS];
    int64_t slot_bytes;
    ql_scratch scratch;
    void *temp;                /* for quantising on load: the scratch, or memory beside it where that is too small */
    int64_t temp_bytes;
    ql_head head;
    /* Adapters: n elements, `padded` to whole shards. This rank's optimizer has [mine, mine + shard), whole 4096 blocks; its adapters and
     * gradients are [held_at, held_at + held): all of them, in a pipeline the stage's own, which are its shard too. */
    int64_t n, shard, padded, mine, held_at, held;
    float *adapters, *grad[8], *exchange;
    int grads;
    ql_state_run *runs;
    int run_count;
    int64_t small_n;           /* elements with 32-bit states beside 8-bit ones */
    float *m, *v, *m2, *v2, *code1, *code2;
    uint8_t *m8, *v8;
    int64_t window;            /* elements of state on the device at a time (state_host) */
    float *parts, *lr, *losses;
    ql_ctl *ctl;
    /* activations: flights × layers */
    int flights;
    ql_act *act;               /* kept activations of (flight, layer) */
    ql_act shared;             /* of the layer at work, where not kept */
    ql_act *ahead;             /* (L) recomputed before the gradient arrives: of one micro-batch; nothing in other layers */
    ql_tensor *h;              /* (flight, layer + 1) */
    ql_tensor *dh;             /* (flight); in a pipeline two, by turns */
    ql_work work;
    void *op_work;             /* QL_WORK_BYTES */
    ql_stage *stage;           /* (flight) */
    int32_t *flag;
} ql_mem;

/* Host-side tables, without device memory: blobs, state runs, sizes. */
ql_status ql_mem_open(const ql_spec *spec, int rank, ql_mem **out);
void ql_mem_close(ql_mem *m);
/* Ends of a pipeline. */
int ql_mem_has_head(const ql_mem *m);
int ql_mem_has_embedding(const ql_mem *m);
/* Takes everything from the arena (counting or real). */
ql_status ql_mem_carve(ql_mem *m, ql_arena *a);
/* Bytes of this rank, by category. */
ql_status ql_mem_count(const ql_spec *spec, int rank, ql_arena *out);
/* Bytes of the host: one copy of host-resident layers for all ranks; this rank's saved activations and optimizer states. */
int64_t ql_mem_host_base(const ql_mem *m);
int64_t ql_mem_host_rank(const ql_mem *m);
/* Where a host-resident layer begins in the shared block. */
int64_t ql_mem_host_at(const ql_mem *m, int64_t layer);
/* Bytes of the fullest rank's device, and of the host for all ranks. */
ql_status ql_mem_bytes(const ql_spec *spec, int64_t *device, int64_t *host);

ql_act *ql_mem_act(ql_mem *m, int flight, int64_t layer);
ql_tensor ql_mem_h(const ql_mem *m, int flight, int64_t layer);
/* The gradient of micro-batch mb's residual stream. */
ql_tensor ql_mem_dh(const ql_mem *m, int flight, int mb);

#endif
