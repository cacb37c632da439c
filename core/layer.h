/* A decoder block as straight lists of ops: forward, recompute, backward. The four groups of linears share
 * one idea: an adapter is extra columns. With R adapter columns, a group's scratch is one matrix
 *
 *      W_ext (N + R, K + R) = [ W  (N, K) | B (N, R) ]      B block-diagonal over the group's members
 *                             [ A  (R, K) |   unused ]
 *
 * so that forward is y (T, N) = [x | s·xAᵀ] [W | B]ᵀ and backward dx (T, K) = [dy | s·dyB] [W ; A]: one GEMM each,
 * and R/K = 0.4 % more work instead of extra passes over x and y. */
#ifndef QL_LAYER_H
#define QL_LAYER_H

#include "core/arena.h"
#include "core/lora.h"
#include "core/model.h"
#include "kernels/ops.h"

typedef enum { QL_G_QKV, QL_G_O, QL_G_GU, QL_G_DOWN, QL_GROUPS } ql_group;

typedef struct {
    ql_linear first;
    int count;          /* members: linears first … first+count−1 */
    int64_t n, k, r;    /* r: adapter columns, a multiple of 8, 0 if no layer adapts this group */
    int64_t row[3];     /* first row of a member in W */
    int64_t col[3], rank[3]; /* its adapter columns; the largest rank any layer has there */
} ql_group_shape;

/* What the job fixes for every layer and micro-batch. */
typedef struct {
    const ql_config *cfg;
    const ql_lora *lora;
    ql_group_shape group[QL_GROUPS];
    ql_dtype dtype;     /* of compute and of stored activations */
    ql_dtype res;       /* of the residual stream: dtype or F32 */
    float drop;         /* lora_dropout; 0 in eval */
    uint64_t seed;
    int64_t rows;       /* the longest micro-batch */
    int mixed_ranks;    /* ranks differ between layers: unused adapter columns are cleared for each layer */
    int64_t first;      /* lowest layer with an adapter: nothing below it has a backward */
    int64_t flat_at;    /* element of the flat vectors at which this rank's adapters and gradients begin */
} ql_shape;

ql_status ql_shape_init(ql_shape *s, const ql_config *cfg, const ql_lora *lora, ql_dtype dtype, ql_dtype res,
                        double dropout, uint64_t seed, int64_t rows);

/* Small frozen tensors of a layer, on the device at all times. */
typedef struct {
    ql_tensor norm_attn, norm_ffn;    /* (1, C) F32 */
    ql_tensor q_norm, k_norm;         /* (1, D) F32 or none */
    ql_tensor bias[QL_GROUPS];        /* (1, N) dtype or none; zeros where a member has no bias */
} ql_small;

/* One micro-batch on the device. Rows [T real …) are padding: in no document, without target. */
typedef struct {
    int64_t rows;                     /* T, rounded up (ql_spec.round) */
    int padded;                       /* some row is in no document */
    ql_tensor pos;                    /* (1, T) I32: position in the document */
    const int64_t *token;             /* (T): row of the sample in the step · 2³² + position, for dropout */
    int64_t docs, longest;
    const int32_t *start, *len;       /* (docs) */
    ql_tensor index, target;          /* (1, n) I32: rows that have a target, padded with −1 / −100 and rounded up */
    int64_t targets;                  /* real ones */
    uint32_t step;                    /* optimizer step, for dropout */
    int train;                        /* dropout on */
    /* Generation: keys and values of new rows go to rows `slot` (1, T) I32 of the layer's cache, and document d sees the k_len[d]
     * rows from k_start[d]. Unset in training: keys are the rows themselves. */
    ql_tensor slot;
    const int32_t *k_start, *k_len;
    int64_t k_longest;
} ql_micro;

/* What forward leaves for backward. */
typedef struct {
    ql_tensor h;                      /* (T, C) res: the block's input */
    ql_tensor qkv;                    /* (T, Nqkv): after rotation */
    ql_tensor qk;                     /* (T, (H+G)·D): q and k before their norm (qk_norm models) */
    ql_tensor o, lse;                 /* (T, H·D + R_o): attention's output and its adapter columns; (T, H) F32 */
    ql_tensor h2;                     /* (T, C) res: after attention */
    ql_tensor gu;                     /* (T, 2F + R_gu) */
    ql_tensor xa[QL_GROUPS];          /* (T, R): s·xAᵀ of qkv, gate/up, down (o's stand behind o) */
} ql_act;

typedef enum {
    QL_KEEP_INPUT,   /* only h: recompute everything but down_proj */
    QL_KEEP_NO_MLP,  /* all but gate/up: recompute that product */
    QL_KEEP_ALL,
} ql_keep;

/* Buffers of the layer at work. */
typedef struct {
    ql_tensor x;      /* (T, C + max(R_qkv, R_gu)): normed input */
    ql_tensor a;      /* (T, F + R_down): down_proj's input, then its gradient */
    ql_tensor dh;     /* (T, C + max(R_o, R_down)) res: gradient of the residual stream */
    ql_tensor dy;     /* the same in dtype where res differs, else dh itself */
    ql_tensor dqkv;   /* (T, Nqkv + R_qkv) */
    ql_tensor dx;     /* (T, max(C, H·D)) */
    ql_tensor xd, dxa;/* (T, max K): dropped input, adapter's input gradient; none without dropout */
    ql_tensor delta;  /* (T, H) F32 */
} ql_work;

/* One dequantised layer with its adapters in place. */
typedef struct {
    ql_tensor w[QL_GROUPS]; /* (N + R, K + R) */
    int64_t layer;          /* whose base it holds, −1 none */
    int64_t version;        /* of the adapters in it; they change at every optimizer step */
} ql_scratch;

ql_status ql_act_carve(const ql_shape *s, ql_arena *a, ql_keep keep, ql_act *out); /* without h */
ql_status ql_act_carve_missing(const ql_shape *s, ql_arena *a, ql_keep keep, ql_act *out); /* what `keep` leaves out */
ql_status ql_act_carve_h(const ql_shape *s, ql_arena *a, ql_tensor *out);
ql_status ql_work_carve(const ql_shape *s, ql_arena *a, ql_work *out);
ql_status ql_scratch_carve(const ql_shape *s, ql_arena *a, ql_scratch *out);

/* Where the base rows of a linear go in the scratch. */
ql_tensor ql_scratch_base(const ql_shape *s, const ql_scratch *w, ql_linear l);
/* Writes a layer's adapters (F32, flat from flat_at on) beside and below the base. */
ql_status ql_scratch_adapters(const ql_shape *s, const ql_queue *q, ql_scratch *w, int64_t layer, float *flat);

typedef struct {
    const ql_shape *shape;
    const ql_queue *q;
    const ql_micro *mb;
    int64_t layer;
    const ql_small *small;
    const ql_scratch *w;
    const ql_nf4 *packed;    /* (QL_LINEARS) where a few rows read the base as it rests, and w holds the adapters alone; else NULL */
    const ql_work *work;
    ql_tensor freq;          /* (1, D/2) F32 */
    ql_tensor cache_k, cache_v; /* (rows, G·D) or none */
} ql_layer;

/* out (T, C) = block(act->h); fills act. `out` may be act->h where that is not kept. */
ql_status ql_layer_forward(const ql_layer *l, ql_act *act, ql_tensor out);
/* Fills what act lacks for backward: the same ops on the same values, so the same bits. Stops at gate/up: down_proj is not
 * done again. */
ql_status ql_layer_recompute(const ql_layer *l, ql_act *act, ql_keep have);
/* work->dh: gradient of the block's output → gradient of its input (not for the lowest adapted layer); adapter gradients are
 * added to `grad` (F32, flat from flat_at on). Uses up act->gu. */
ql_status ql_layer_backward(const ql_layer *l, ql_act *act, float *grad);

#endif
