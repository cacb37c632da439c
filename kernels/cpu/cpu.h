/* Inside the CPU backend: the device's struct, rows of any float dtype as fp32, sums, exp. */
#ifndef QL_CPU_H
#define QL_CPU_H

#include "kernels/comm.h"
#include "kernels/half.h"

extern const ql_dev_table ql_cpu_dev;
extern const ql_ops ql_cpu_ops;
extern const ql_comm_table ql_cpu_comm;

/* Elementwise ops work on pieces of a row that stay in the first-level cache. */
enum { QL_CPU_PIECE = 1024 };

/* ---- rows --------------------------------------------------------------------------------------
 */

void ql_cpu_widen(float *restrict dst, const void *restrict src, ql_dtype t, int64_t n);
void ql_cpu_narrow(void *restrict dst, ql_dtype t, const float *restrict src, int64_t n);
/* x[i] = the value it has after storage in t. */
void ql_cpu_round(float *x, ql_dtype t, int64_t n);

static inline void *ql_cpu_at(ql_tensor t, int64_t row, int64_t col)
{
    return (char *)t.data + (row * t.ld + col) * (int64_t)ql_dtype_size(t.dtype);
}
/* The n elements of t from (row, col) as fp32: in place if they are, else widened into tmp. */
static inline const float *ql_cpu_read(ql_tensor t, int64_t row, int64_t col, int64_t n, float *tmp)
{
    if (t.dtype == QL_F32) return ql_cpu_at(t, row, col);
    ql_cpu_widen(tmp, ql_cpu_at(t, row, col), t.dtype, n);
    return tmp;
}
/* Copies, so that the result may be written over the source. */
static inline void ql_cpu_load(float *dst, ql_tensor t, int64_t row, int64_t col, int64_t n)
{
    ql_cpu_widen(dst, ql_cpu_at(t, row, col), t.dtype, n);
}
static inline void ql_cpu_store(ql_tensor t, int64_t row, int64_t col, const float *src, int64_t n)
{
    ql_cpu_narrow(ql_cpu_at(t, row, col), t.dtype, src, n);
}

/* Rows [r, r+rows) × columns [c, c+cols) of t as fp32 for BLAS: a pointer and its row stride. */
const float *ql_cpu_panel(ql_tensor t, int64_t r, int64_t rows, int64_t c, int64_t cols,
                          float *work, int *ld);

/* ---- numbers -----------------------------------------------------------------------------------
 */

/* Σ a∘b in 32 lanes, combined by halving: the order depends on n alone. */
static inline float ql_cpu_dot(const float *a, const float *b, int64_t n)
{
    enum { L = 32 };
    float acc[L] = {0};
    int64_t i = 0;
    for (; i + L <= n; i += L)
        for (int j = 0; j < L; j++) acc[j] += a[i + j] * b[i + j];
    for (int j = 0; i + j < n; j++) acc[j] += a[i + j] * b[i + j];
    for (int h = L / 2; h > 0; h /= 2)
        for (int j = 0; j < h; j++) acc[j] += acc[j + h];
    return acc[0];
}

/* a·b + c, in one rounding where the machine can. */
static inline float ql_cpu_fma(float a, float b, float c)
{
#ifdef __FMA__
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

/* e^x within 2 ulp, subnormal results included, NaN kept; no branch, so that loops vectorise.
 * x = n·ln 2 + r with |r| ≤ ln 2 / 2; ln 2 in two parts, the first short enough that n·hi is exact.
 */
static inline float ql_cpu_exp(float x)
{
    float c = x < -104.0f ? -104.0f : x;
    c = c > 89.0f ? 89.0f : c;
    float n = ql_cpu_fma(c, 1.44269504f, 12582912.0f) - 12582912.0f; /* to the nearest integer */
    float r = ql_cpu_fma(n, 2.12194440e-4f, ql_cpu_fma(n, -0.693359375f, c));
    float p = ql_cpu_fma(1.0f / 5040, r, 1.0f / 720);
    p = ql_cpu_fma(p, r, 1.0f / 120);
    p = ql_cpu_fma(p, r, 1.0f / 24);
    p = ql_cpu_fma(p, r, 1.0f / 6);
    p = ql_cpu_fma(p, r, 0.5f);
    p = ql_cpu_fma(p * r, r, r) + 1.0f;
    /* 2^n as two factors, because n reaches from −151 to 129. */
    int32_t k = (int32_t)n, h = k >> 1;
    return p * ql_f32_from_bits((uint32_t)(h + 127) << 23) *
           ql_f32_from_bits((uint32_t)(k - h + 127) << 23);
}

/* code[i] = the nearest to y[i] of 256 sorted values in [least, 1], by bitsandbytes' walk; n ≤ 256.
 */
void ql_cpu_nearest(uint8_t *code, const float *table, const float *y, float least, int n);

/* Σ of x[0], x[1] … by halving over n rounded up to a power of two, missing elements 0: first x[i]
 * + x[i + half]. x is overwritten. */
float ql_cpu_halve(float *x, int64_t n);
/* Σ of x in 32 lanes combined by halving; the largest x, −∞ of none (a NaN is passed over). */
float ql_cpu_total(const float *x, int64_t n);
float ql_cpu_max(const float *x, int64_t n);

/* ---- the ops, by file ---------------------------------------------------------------------------
 */

#define QL_CPU_OP(name, ...) ql_status ql_cpu_##name(const ql_queue *q, __VA_ARGS__)

QL_CPU_OP(convert, const ql_tensor *out, const ql_tensor *in, int n);
QL_CPU_OP(fill, ql_tensor out, float value);
QL_CPU_OP(add, ql_tensor out, ql_tensor a, ql_tensor b);
QL_CPU_OP(gather_rows, ql_tensor out, ql_tensor in, ql_tensor index);
QL_CPU_OP(scatter_rows, ql_tensor out, ql_tensor in, ql_tensor index);
QL_CPU_OP(check_finite, ql_tensor flag, ql_tensor in);
QL_CPU_OP(nf4_dequant, const ql_tensor *out, const ql_nf4 *w, int n);
QL_CPU_OP(nf4_matmul, ql_tensor out, ql_tensor a, const ql_nf4 *w, int n, ql_tensor c, ql_tensor bias);
QL_CPU_OP(nf4_quant, ql_tensor packed, ql_tensor absmax, ql_tensor in);
QL_CPU_OP(scale_quant, ql_tensor code, ql_tensor absmax2, ql_tensor absmax, ql_tensor code2,
          float offset);
QL_CPU_OP(matmul, ql_tensor out, ql_tensor a, ql_tensor b, ql_trans trans, float alpha, ql_tensor c,
          ql_tensor bias);
QL_CPU_OP(rmsnorm, ql_tensor y, ql_tensor x, ql_tensor w, float eps);
QL_CPU_OP(rmsnorm_dx, ql_tensor dx, ql_tensor dy, ql_tensor x, ql_tensor w, float eps,
          ql_tensor dres);
QL_CPU_OP(rope, ql_tensor x, int64_t head_dim, ql_tensor pos, ql_tensor freq, float scale,
          int sign);
QL_CPU_OP(swiglu, ql_tensor h, ql_tensor gu);
QL_CPU_OP(swiglu_dx, ql_tensor dgu, ql_tensor dh, ql_tensor gu, ql_tensor h);
QL_CPU_OP(dropout, ql_tensor out, ql_tensor in, const ql_drop *d);
QL_CPU_OP(dropout_add, ql_tensor out, ql_tensor in, const ql_drop *d);
QL_CPU_OP(attention, ql_tensor o, ql_tensor lse, ql_tensor qt, ql_tensor k, ql_tensor v,
          const ql_attn *a);
QL_CPU_OP(attention_dx, ql_tensor dq, ql_tensor dk, ql_tensor dv, ql_tensor dout, ql_tensor o,
          ql_tensor lse, ql_tensor delta, ql_tensor qt, ql_tensor k, ql_tensor v, const ql_attn *a);
QL_CPU_OP(ce_stats, ql_tensor stats, ql_tensor logits, ql_tensor target, int64_t v0);
QL_CPU_OP(ce_join, ql_tensor a, ql_tensor b);
QL_CPU_OP(ce_loss, ql_tensor nll, ql_tensor lse, ql_tensor stats, ql_tensor target, float smoothing,
          int64_t vocab);
QL_CPU_OP(ce_grad, ql_tensor logits, ql_tensor lse, ql_tensor target, int64_t v0, float smoothing,
          int64_t vocab, const ql_ctl *ctl);
QL_CPU_OP(sum, ql_tensor out, ql_tensor in);
QL_CPU_OP(norm_parts, ql_tensor part, ql_tensor g);
QL_CPU_OP(clip, ql_ctl *ctl, ql_tensor part, const ql_clip *c);
QL_CPU_OP(adamw, ql_tensor p, ql_tensor m, ql_tensor v, ql_tensor g, const ql_ctl *ctl,
          const ql_adam *a);
QL_CPU_OP(adamw8, ql_tensor p, ql_tensor m8, ql_tensor v8, ql_tensor m2, ql_tensor v2, ql_tensor g,
          ql_tensor code1, ql_tensor code2, const ql_ctl *ctl, const ql_adam *a);

#endif
