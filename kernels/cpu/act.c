/* SwiGLU, its gradient, and dropout. */
#include "kernels/cpu/cpu.h"

#include "kernels/philox.h"

QL_CPU_OP(swiglu, ql_tensor h, ql_tensor gu)
{
    (void)q;
    float tg[QL_CPU_PIECE], tu[QL_CPU_PIECE], out[QL_CPU_PIECE];
    for (int64_t t = 0; t < h.rows; t++) {
        for (int64_t c = 0; c < h.cols; c += QL_CPU_PIECE) {
            int64_t n = ql_min64(QL_CPU_PIECE, h.cols - c);
            const float *g = ql_cpu_read(gu, t, c, n, tg);
            const float *u = ql_cpu_read(gu, t, h.cols + c, n, tu);
            /* The same operations as in swiglu_dx: h has the same bits from either. */
            for (int64_t j = 0; j < n; j++) {
                float s = 1.0f / (1.0f + ql_cpu_exp(-g[j])), silu = g[j] * s;
                out[j] = silu * u[j];
            }
            ql_cpu_store(h, t, c, out, n);
        }
    }
    return QL_OK;
}

QL_CPU_OP(swiglu_dx, ql_tensor dgu, ql_tensor dh, ql_tensor gu, ql_tensor h)
{
    (void)q;
    float tg[QL_CPU_PIECE], tu[QL_CPU_PIECE], td[QL_CPU_PIECE];
    float dg[QL_CPU_PIECE], du[QL_CPU_PIECE], out[QL_CPU_PIECE];
    for (int64_t t = 0; t < dh.rows; t++) {
        for (int64_t c = 0; c < dh.cols; c += QL_CPU_PIECE) {
            int64_t n = ql_min64(QL_CPU_PIECE, dh.cols - c);
            const float *g = ql_cpu_read(gu, t, c, n, tg);
            const float *u = ql_cpu_read(gu, t, dh.cols + c, n, tu);
            const float *d = ql_cpu_read(dh, t, c, n, td);
            for (int64_t j = 0; j < n; j++) {
                float s = 1.0f / (1.0f + ql_cpu_exp(-g[j])), silu = g[j] * s;
                dg[j] = d[j] * u[j] * s * (1.0f + g[j] * (1.0f - s));
                du[j] = d[j] * silu;
                out[j] = silu * u[j];
            }
            ql_cpu_store(dgu, t, c, dg, n);
            ql_cpu_store(dgu, t, dh.cols + c, du, n);
            if (ql_tensor_set(h)) ql_cpu_store(h, t, c, out, n);
        }
    }
    return QL_OK;
}

/* mask[j] = 1/(1−p) or 0 for columns [c, c+n) of token; c is a multiple of 4. */
static void mask_of(float *mask, const ql_drop *d, int64_t token, int64_t c, int64_t n)
{
    uint32_t bar = ql_philox_bar(d->p);
    float scale = 1.0f / (1.0f - d->p);
    for (int64_t j = 0; j < n; j += 4) {
        ql_philox4 w =
            ql_philox_drop(d->seed, d->step, d->layer, d->site, token, (uint32_t)((c + j) / 4));
        for (int k = 0; k < 4; k++) mask[j + k] = w.x[k] >= bar ? scale : 0.0f;
    }
}

/* x = drop(in) over one piece of a row. A dropped element is 0 whatever it was. */
static void drop_piece(float *x, ql_tensor in, const ql_drop *d, int64_t t, int64_t c, int64_t n)
{
    float mask[QL_CPU_PIECE];
    mask_of(mask, d, d->token[t], c, n);
    ql_cpu_load(x, in, t, c, n);
    for (int64_t j = 0; j < n; j++) x[j] = mask[j] > 0 ? x[j] * mask[j] : 0.0f;
}

QL_CPU_OP(dropout, ql_tensor out, ql_tensor in, const ql_drop *d)
{
    (void)q;
    float x[QL_CPU_PIECE];
    for (int64_t t = 0; t < in.rows; t++) {
        for (int64_t c = 0; c < in.cols; c += QL_CPU_PIECE) {
            int64_t n = ql_min64(QL_CPU_PIECE, in.cols - c);
            drop_piece(x, in, d, t, c, n);
            ql_cpu_store(out, t, c, x, n);
        }
    }
    return QL_OK;
}

QL_CPU_OP(dropout_add, ql_tensor out, ql_tensor in, const ql_drop *d)
{
    (void)q;
    float x[QL_CPU_PIECE], y[QL_CPU_PIECE];
    for (int64_t t = 0; t < in.rows; t++) {
        for (int64_t c = 0; c < in.cols; c += QL_CPU_PIECE) {
            int64_t n = ql_min64(QL_CPU_PIECE, in.cols - c);
            drop_piece(x, in, d, t, c, n);
            ql_cpu_load(y, out, t, c, n);
            for (int64_t j = 0; j < n; j++) y[j] += x[j];
            ql_cpu_store(out, t, c, y, n);
        }
    }
    return QL_OK;
}
