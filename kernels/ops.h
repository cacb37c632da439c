/* The compute table. Every backend (cpu, cuda, null) fills the same struct; the engine calls the checked
 * wrappers ql_<op>(q, …) of ops.c, which test shapes and dtypes and then call q->ops-><op>(q, …).
 *
 * Rules. Nothing allocates or synchronises inside an op; scratch comes from q->work. Counts are int64_t.
 * The result of an op is a function of its arguments alone (shapes, leading dimensions, values), never of
 * addresses, of what ran before, or of the number of ranks; no atomics on floats.
 * "float" below means F32, F16 or BF16; 16-bit results are rounded once, to nearest even, from fp32
 * unless said otherwise. Sums are fp32 at least. T tokens, C hidden, H query heads, G key/value heads,
 * D head size, F ffn, V vocabulary, N×K weight (out, in), r LoRA rank. */
#ifndef QL_OPS_H
#define QL_OPS_H

#include "kernels/base.h"
#include "kernels/dev.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ql_ops ql_ops;

/* The workspace every queue brings: enough for any op at any shape. */
#define QL_WORK_BYTES ((int64_t)64 << 20)

typedef struct {
    const ql_ops *ops;
    ql_stream *stream;
    void *work; /* QL_WORK_BYTES of device memory, used by one op at a time */
} ql_queue;

/* ---- 4-bit weights ---------------------------------------------------------------------------- */

enum { QL_MAX_PARTS = 16 };

/* A blockwise 4-bit matrix (bitsandbytes' layout: flat blocks of `block` weights, row-major, two
 * weights a byte, first in the high nibble) in up to QL_MAX_PARTS pieces, as ranks hold it. Piece p holds
 * the flat weights [p·part, min((p+1)·part, N·K)); part is a multiple of block·block2 (of block if not
 * nested). value(e) = code[nibble(e)] · scale(e/block), one fp32 multiply;
 * scale(b) = fl(fl(code2[absmax8[b]] · absmax2[b/block2]) + offset): two roundings, no FMA. */
typedef struct {
    int64_t rows, cols;                   /* N, K */
    int64_t part;                         /* weights per piece */
    int parts;
    int block, block2;                    /* 64 and 256; powers of two; block2 = 0: not nested */
    const uint8_t *packed[QL_MAX_PARTS];  /* (part/2) */
    const void *absmax[QL_MAX_PARTS];     /* nested: u8 (part/block); else f32 */
    const float *absmax2[QL_MAX_PARTS];   /* nested: f32 (part/block/block2) */
    const float *code, *code2;            /* (16), (256) fp32 tables in device memory */
    float offset;
    ql_dtype state;                       /* values are rounded to this dtype first, then to the output's */
} ql_nf4;

/* ---- attention -------------------------------------------------------------------------------- */

/* Ragged causal attention over n documents. Document d has queries [q_start, q_start + q_len) of the
 * query rows and keys [k_start, k_start + k_len) of the key rows; its last query stands at its last key, so
 * query i is at position i + k_len − q_len and sees keys j ≤ that position, and only the last `window` of
 * them if window > 0. Query head h uses key/value head h/(H/G). Rows outside every document are neither
 * read nor written. */
typedef struct {
    int64_t heads, kv_heads, head_dim; /* H, G, D; D ≤ 128, a multiple of 8 */
    int64_t window;                    /* 0: unlimited */
    float scale;
    int64_t docs;
    const int32_t *q_start, *q_len, *k_start, *k_len; /* (docs) each, device memory */
    int64_t q_max, k_max;              /* the longest q_len and k_len: grid bounds */
} ql_attn;

/* ---- dropout ---------------------------------------------------------------------------------- */

/* Philox4x32-10. Element (t, c) uses word c%4 of the block with
 *   counter = {c/4, position(t), row(t), layer·16 + site}, key = {seed low, seed high ^ step}
 * where token[t] = row(t)·2³² + position(t): the sample's number in the optimizer step's global order and
 * the position in the sample. It is kept iff word ≥ (uint32)(p·2³²), and scaled by 1/(1−p). */
typedef struct {
    uint64_t seed;
    uint32_t step, layer, site;
    float p;
    const int64_t *token; /* (T) device memory */
} ql_drop;

/* ---- optimizer -------------------------------------------------------------------------------- */

enum { QL_OPT_BLOCK = 4096 }; /* adapters are padded to it; every cut and partial sum is at it */

/* The step's scalars, in device memory (one struct, 64 bytes): nothing of it needs the host in mid-step.
 * The host writes inv_items before the step and reads the rest after it. */
typedef struct {
    float loss_scale; /* fp16: GradScaler's; else 1 */
    float inv_items;  /* 1 / number of target tokens of the whole optimizer step */
    float norm;       /* of the unscaled gradient, before clipping */
    float mul;        /* what a gradient is multiplied by: coef / loss_scale */
    float lr;         /* of this step */
    int32_t skipped;  /* 1: a gradient was not finite (only where scaling != 0), nothing is updated */
    int32_t steps;    /* executed optimizer steps so far, this one included */
    int32_t growth;   /* GradScaler's growth tracker */
    int32_t skips;    /* skipped steps so far */
    int32_t pad[7];
} ql_ctl;

typedef struct {
    float max_norm;      /* ≤ 0: no clipping */
    int32_t scaling;     /* 1: fp16 loss scaling is on */
    float growth_factor, backoff_factor;
    int32_t growth_interval;
    const float *lr;     /* (n_lr) device: lr of the k-th executed step; the last one repeats */
    int64_t n_lr;
} ql_clip;

typedef enum { QL_ADAM_TORCH, QL_ADAM_BNB } ql_adam_kind; /* the order of operations: torch.optim.AdamW's, or bitsandbytes' */
typedef struct {
    ql_adam_kind kind;
    float beta1, beta2, eps, weight_decay;
} ql_adam;

/* ---- matmul ----------------------------------------------------------------------------------- */

typedef enum {
    QL_NN, /* a (M, K) · b (K, N)  */
    QL_NT, /* a (M, K) · b (N, K)ᵀ */
    QL_TN, /* a (K, M)ᵀ · b (K, N) */
} ql_trans;

/* A tensor with data == NULL is "none"; QL_NONE is one. */
#define QL_NONE ((ql_tensor){0})

enum { QL_MAX_CONVERT = 16, QL_MAX_DEQUANT = 8 }; /* matrices of one call */
enum { QL_FEW_ROWS = 8, QL_FEW_MATS = 3 }; /* of nf4_matmul */

struct ql_ops {
    const char *name;

    /* ---- copies and conversions ---- */
    /* out[i] = in[i], same shape, float → float, for n ≤ 16 pairs of any shapes and dtypes in one launch. */
    ql_status (*convert)(const ql_queue *q, const ql_tensor *out, const ql_tensor *in, int n);
    /* out[i][j] = value, float. */
    ql_status (*fill)(const ql_queue *q, ql_tensor out, float value);
    /* out = a + b, F32, same shape; out may be a or b. The only float addition of a reduction. */
    ql_status (*add)(const ql_queue *q, ql_tensor out, ql_tensor a, ql_tensor b);
    /* out (n, C)[i] = in[index[i]] (float → float); index (1, n) I32, −1 gives zeros. `in` may be pinned host
     * memory: the embedding, and rows that have a target. */
    ql_status (*gather_rows)(const ql_queue *q, ql_tensor out, ql_tensor in, ql_tensor index);
    /* out[index[i]] = in[i]; index distinct, −1 skips. Other rows of out stay. */
    ql_status (*scatter_rows)(const ql_queue *q, ql_tensor out, ql_tensor in, ql_tensor index);
    /* flag (1,1) I32 |= 1 if any element of in (float) is NaN or infinite. */
    ql_status (*check_finite)(const ql_queue *q, ql_tensor flag, ql_tensor in);

    /* ---- 4-bit weights ---- */
    /* out[i] (w[i].rows, w[i].cols; any ld ≥ cols) = dequantised w[i], for n ≤ 8 matrices in one launch. */
    ql_status (*nf4_dequant)(const ql_queue *q, const ql_tensor *out, const ql_nf4 *w, int n);
    /* in (N, K) float, contiguous, N·K = cols of a flat piece → packed (1, ⌈NK/2⌉) U8, absmax (1, ⌈NK/64⌉) F32;
     * block 64, the number of midpoints between codes that x·r lies above (r = 1/absmax: rcp.approx.ftz on CUDA, 1.0f/x on the CPU). */
    ql_status (*nf4_quant)(const ql_queue *q, ql_tensor packed, ql_tensor absmax, ql_tensor in);
    /* Second level: absmax (1, n) F32 → code (1, n) U8, absmax2 (1, ⌈n/256⌉) F32 with the 256-entry table code2
     * (the entry that bitsandbytes' binary search finds for (absmax − offset)/absmax2). */
    ql_status (*scale_quant)(const ql_queue *q, ql_tensor code, ql_tensor absmax2, ql_tensor absmax, ql_tensor code2,
                             float offset);

    /* ---- matmul ---- */
    /* out (M, N) = alpha · op(a) op(b) [+ c] [+ bias]. a and b have one float dtype; out has it too or is F32; c
     * (M, N) has out's dtype and may be out itself (accumulate) or another tensor (residual); bias (1, N) has
     * a's dtype. fp32 accumulation (no TF32 for F32). Adapters are extra columns of a and b: y = [x | s·xAᵀ][W | B]ᵀ. */
    ql_status (*matmul)(const ql_queue *q, ql_tensor out, ql_tensor a, ql_tensor b, ql_trans trans, float alpha,
                        ql_tensor c, ql_tensor bias);

    /* ---- norm, rotation, activation ---- */
    /* Groups of w.cols columns: w (1, C) F32, x (T, nC) float, y (T, nC) float. Per group of a row, with
     * i = 1/√(mean(x²) + eps): y = round(w · round(x·i)), both roundings to y's dtype. y may be x. */
    ql_status (*rmsnorm)(const ql_queue *q, ql_tensor y, ql_tensor x, ql_tensor w, float eps);
    /* dx = [dres +] i·(w∘dy − n·mean(n∘w∘dy)), n = x·i. dres: QL_NONE or (T, nC) of dx's dtype, may be dx; dx may be dy
     * if the dtypes are the same. */
    ql_status (*rmsnorm_dx)(const ql_queue *q, ql_tensor dx, ql_tensor dy, ql_tensor x, ql_tensor w, float eps,
                            ql_tensor dres);
    /* In place on x (T, nD): for i < D/2, angle = fl(pos·freq[i]), (x_i, x_{i+D/2}) ← rotation by ±angle, times scale;
     * sign −1 is the gradient. pos (1, T) I32, freq (1, D/2) F32. */
    ql_status (*rope)(const ql_queue *q, ql_tensor x, int64_t head_dim, ql_tensor pos, ql_tensor freq, float scale,
                      int sign);
    /* h (T, F) = silu(g)·u with gu = [g | u] (T, 2F). */
    ql_status (*swiglu)(const ql_queue *q, ql_tensor h, ql_tensor gu);
    /* dgu = [dh·u·σ(g)(1 + g(1 − σ(g))) | dh·silu(g)]; dgu may be gu. h: QL_NONE, or receives silu(g)·u as well (it may be
     * dh: each element is read before it is written). */
    ql_status (*swiglu_dx)(const ql_queue *q, ql_tensor dgu, ql_tensor dh, ql_tensor gu, ql_tensor h);
    /* out = drop(in) and out += drop(in), float, same shape and dtype; the mask is a function of ql_drop and (t, c). */
    ql_status (*dropout)(const ql_queue *q, ql_tensor out, ql_tensor in, const ql_drop *d);
    ql_status (*dropout_add)(const ql_queue *q, ql_tensor out, ql_tensor in, const ql_drop *d);

    /* ---- attention ---- */
    /* q (Tq, H·D), k, v (Tk, G·D), o (Tq, H·D) of one float dtype; lse (Tq, H) F32 = log Σ exp(scale·q·k). A query that sees
     * no key gives o = 0, lse = −inf. */
    ql_status (*attention)(const ql_queue *q, ql_tensor o, ql_tensor lse, ql_tensor qt, ql_tensor k, ql_tensor v,
                           const ql_attn *a);
    /* Only with q_len = k_len (training). delta (Tq, H) F32 is scratch (Σ do∘o). dq, dk, dv have q's dtype; deterministic. */
    ql_status (*attention_dx)(const ql_queue *q, ql_tensor dq, ql_tensor dk, ql_tensor dv, ql_tensor dout, ql_tensor o,
                              ql_tensor lse, ql_tensor delta, ql_tensor qt, ql_tensor k, ql_tensor v, const ql_attn *a);

    /* ---- loss ---- */
    /* One fixed piece [v0, v0 + n) of the vocabulary: logits (R, n) float → stats (R, 4) F32 = {max, Σ exp(l − max), the target's
     * logit or 0, Σ l}. target (1, R) I32, −100 = none. */
    ql_status (*ce_stats)(const ql_queue *q, ql_tensor stats, ql_tensor logits, ql_tensor target, int64_t v0);
    /* a ← a combined with b (both (R, 4)): m = max, s = s_a·exp(m_a − m) + s_b·exp(m_b − m), sums added. Pieces combine by halving. */
    ql_status (*ce_join)(const ql_queue *q, ql_tensor a, ql_tensor b);
    /* lse (1, R) = m + log s; nll (1, R) = (1−ε)(lse − target logit) + ε(lse − Σl/vocab), 0 where target is −100. */
    ql_status (*ce_loss)(const ql_queue *q, ql_tensor nll, ql_tensor lse, ql_tensor stats, ql_tensor target, float smoothing,
                         int64_t vocab);
    /* logits (R, n) in place ← (exp(l − lse) − (1−ε)·[v = target] − ε/vocab) · loss_scale · inv_items (ctl, device), 0 where target is −100. */
    ql_status (*ce_grad)(const ql_queue *q, ql_tensor logits, ql_tensor lse, ql_tensor target, int64_t v0, float smoothing,
                         int64_t vocab, const ql_ctl *ctl);
    /* out (1,1) F32 = Σ in (1, n) F32 by halving over n rounded up to a power of two (missing = 0). */
    ql_status (*sum)(const ql_queue *q, ql_tensor out, ql_tensor in);

    /* ---- optimizer: flat F32 vectors (1, n), n a multiple of QL_OPT_BLOCK ---- */
    /* part (1, n/4096) F32: Σ g² of each block, by halving inside the block. */
    ql_status (*norm_parts)(const ql_queue *q, ql_tensor part, ql_tensor g);
    /* From the partials of ALL blocks, combined as `sum` does: norm = √Σ / loss_scale; skipped = scaling and not finite;
     * coef = max_norm > 0 ? min(1, max_norm/(norm + 1e-6)) : 1; mul = coef/loss_scale; lr = table[steps]; then steps, skips and GradScaler's
     * scale and growth are advanced. mul uses the scale before the update. */
    ql_status (*clip)(const ql_queue *q, ql_ctl *ctl, ql_tensor part, const ql_clip *c);
    /* One AdamW step on p with gradient g·mul; nothing if ctl->skipped. t = ctl->steps. */
    ql_status (*adamw)(const ql_queue *q, ql_tensor p, ql_tensor m, ql_tensor v, ql_tensor g, const ql_ctl *ctl, const ql_adam *a);
    /* bitsandbytes' blockwise 8-bit states: m8, v8 (1, n) U8 with absmax m2, v2 (1, n/256) F32; code1 signed, code2 unsigned (256). */
    ql_status (*adamw8)(const ql_queue *q, ql_tensor p, ql_tensor m8, ql_tensor v8, ql_tensor m2, ql_tensor v2, ql_tensor g,
                        ql_tensor code1, ql_tensor code2, const ql_ctl *ctl, const ql_adam *a);

    /* ---- few rows: text, a token at a time ---- */
    /* out (M, ΣN) = a (M, K) [w_0 … w_n−1]ᵀ [+ c] [+ bias] for M ≤ QL_FEW_ROWS and n ≤ QL_FEW_MATS matrices side by side, as matmul would
     * on nf4_dequant's values in a's dtype. Where that has 16 bits, the codes may be rounded to it instead and a block's scale
     * be put to the block's sum in fp32: values as near to code · scale. w is read as it rests, 4 bits a weight, and is written
     * nowhere; that may begin before the op ahead in the queue is over, which must not write it. A row's result depends neither on M nor on n. */
    ql_status (*nf4_matmul)(const ql_queue *q, ql_tensor out, ql_tensor a, const ql_nf4 *w, int n, ql_tensor c, ql_tensor bias);
};

/* The checked wrappers (ops.c): same names, ql_ in front. */
ql_status ql_convert(const ql_queue *q, ql_tensor out, ql_tensor in);
ql_status ql_convert_all(const ql_queue *q, const ql_tensor *out, const ql_tensor *in, int n);
ql_status ql_fill(const ql_queue *q, ql_tensor out, float value);
ql_status ql_add(const ql_queue *q, ql_tensor out, ql_tensor a, ql_tensor b);
ql_status ql_gather_rows(const ql_queue *q, ql_tensor out, ql_tensor in, ql_tensor index);
ql_status ql_scatter_rows(const ql_queue *q, ql_tensor out, ql_tensor in, ql_tensor index);
ql_status ql_check_finite(const ql_queue *q, ql_tensor flag, ql_tensor in);
ql_status ql_nf4_dequant(const ql_queue *q, const ql_tensor *out, const ql_nf4 *w, int n);
ql_status ql_nf4_matmul(const ql_queue *q, ql_tensor out, ql_tensor a, const ql_nf4 *w, int n, ql_tensor c, ql_tensor bias);
ql_status ql_nf4_quant(const ql_queue *q, ql_tensor packed, ql_tensor absmax, ql_tensor in);
ql_status ql_scale_quant(const ql_queue *q, ql_tensor code, ql_tensor absmax2, ql_tensor absmax, ql_tensor code2, float offset);
ql_status ql_matmul(const ql_queue *q, ql_tensor out, ql_tensor a, ql_tensor b, ql_trans trans, float alpha, ql_tensor c,
                    ql_tensor bias);
ql_status ql_rmsnorm(const ql_queue *q, ql_tensor y, ql_tensor x, ql_tensor w, float eps);
ql_status ql_rmsnorm_dx(const ql_queue *q, ql_tensor dx, ql_tensor dy, ql_tensor x, ql_tensor w, float eps, ql_tensor dres);
ql_status ql_rope(const ql_queue *q, ql_tensor x, int64_t head_dim, ql_tensor pos, ql_tensor freq, float scale, int sign);
ql_status ql_swiglu(const ql_queue *q, ql_tensor h, ql_tensor gu);
ql_status ql_swiglu_dx(const ql_queue *q, ql_tensor dgu, ql_tensor dh, ql_tensor gu, ql_tensor h);
ql_status ql_dropout(const ql_queue *q, ql_tensor out, ql_tensor in, const ql_drop *d);
ql_status ql_dropout_add(const ql_queue *q, ql_tensor out, ql_tensor in, const ql_drop *d);
ql_status ql_attention(const ql_queue *q, ql_tensor o, ql_tensor lse, ql_tensor qt, ql_tensor k, ql_tensor v, const ql_attn *a);
ql_status ql_attention_dx(const ql_queue *q, ql_tensor dq, ql_tensor dk, ql_tensor dv, ql_tensor dout, ql_tensor o, ql_tensor lse,
                          ql_tensor delta, ql_tensor qt, ql_tensor k, ql_tensor v, const ql_attn *a);
ql_status ql_ce_stats(const ql_queue *q, ql_tensor stats, ql_tensor logits, ql_tensor target, int64_t v0);
ql_status ql_ce_join(const ql_queue *q, ql_tensor a, ql_tensor b);
ql_status ql_ce_loss(const ql_queue *q, ql_tensor nll, ql_tensor lse, ql_tensor stats, ql_tensor target, float smoothing,
                     int64_t vocab);
ql_status ql_ce_grad(const ql_queue *q, ql_tensor logits, ql_tensor lse, ql_tensor target, int64_t v0, float smoothing,
                     int64_t vocab, const ql_ctl *ctl);
ql_status ql_sum(const ql_queue *q, ql_tensor out, ql_tensor in);
ql_status ql_norm_parts(const ql_queue *q, ql_tensor part, ql_tensor g);
ql_status ql_clip_step(const ql_queue *q, ql_ctl *ctl, ql_tensor part, const ql_clip *c);
ql_status ql_adamw(const ql_queue *q, ql_tensor p, ql_tensor m, ql_tensor v, ql_tensor g, const ql_ctl *ctl, const ql_adam *a);
ql_status ql_adamw8(const ql_queue *q, ql_tensor p, ql_tensor m8, ql_tensor v8, ql_tensor m2, ql_tensor v2, ql_tensor g,
                    ql_tensor code1, ql_tensor code2, const ql_ctl *ctl, const ql_adam *a);

#ifdef __cplusplus
}
#endif
#endif
