/* 4-bit weights: bitsandbytes' blockwise NF4, both ways, and the second quantisation of its scales.
 */
#include "kernels/cpu/cpu.h"

#include <math.h>

/* ---- dequantise ------------------------------------------------------------------------------ */

typedef struct {
    const ql_nf4 *w;
    float pair[256][2]; /* the two code values of a byte */
    ql_tensor out;
} job;

/* The fp32 scale of a block of piece p; two roundings where it is nested. */
static float scale_of(const ql_nf4 *w, int p, int64_t block)
{
    if (!w->block2) return ((const float *)w->absmax[p])[block];
    float s = w->code2[((const uint8_t *)w->absmax[p])[block]] * w->absmax2[p][block / w->block2];
    return s + w->offset;
}

/* Blocks [b0, b1) of piece p: the flat weights are cut into runs inside one row of out. */
static void piece(const job *j, int p, int64_t b0, int64_t b1)
{
    enum { MAX = 4096 };
    const ql_nf4 *w = j->w;
    float v[MAX];
    int64_t total = w->rows * w->cols;
    for (int64_t b = b0; b < b1; b++) {
        int64_t e = p * w->part + b * w->block, n = ql_min64(w->block, total - e);
        const uint8_t *bytes = w->packed[p] + b * w->block / 2;
        float s = scale_of(w, p, b);
        for (int64_t i = 0; 2 * i < n; i++) memcpy(v + 2 * i, j->pair[bytes[i]], 2 * sizeof(float));
        for (int64_t i = 0; i < n; i++) v[i] *= s;
        ql_cpu_round(v, w->state, n);
        int64_t row = e / w->cols, col = e % w->cols;
        for (int64_t i = 0; i < n; row++, col = 0) {
            int64_t run = ql_min64(n - i, w->cols - col);
            ql_cpu_store(j->out, row, col, v + i, run);
            i += run;
        }
    }
}

QL_CPU_OP(nf4_dequant, const ql_tensor *out, const ql_nf4 *w, int n)
{
    (void)q;
    for (int i = 0; i < n; i++) {
        job j = {.w = &w[i], .out = out[i]};
        for (int b = 0; b < 256; b++)
            j.pair[b][0] = w[i].code[b >> 4], j.pair[b][1] = w[i].code[b & 15];
        int64_t total = w[i].rows * w[i].cols;
        for (int p = 0; p < w[i].parts && p * w[i].part < total; p++)
            piece(&j, p, 0, ql_ceil_div(ql_min64(w[i].part, total - p * w[i].part), w[i].block));
    }
    return QL_OK;
}

/* ---- few rows ---------------------------------------------------------------------------------- */

enum { BLOCK_MAX = 4096, STRIP = 256, LANES = 16 };

/* The values of the block that holds flat weight e, in the dtype that products have them in. */
static void block_values(const job *j, int64_t e, ql_dtype dtype, float *v)
{
    const ql_nf4 *w = j->w;
    int64_t total = w->rows * w->cols, p = e / w->part, b = (e - p * w->part) / w->block;
    int64_t n = ql_min64(w->block, total - p * w->part - b * w->block);
    const uint8_t *bytes = w->packed[p] + b * w->block / 2;
    float s = scale_of(w, (int)p, b);
    for (int64_t i = 0; 2 * i < n; i++) memcpy(v + 2 * i, j->pair[bytes[i]], 2 * sizeof(float));
    for (int64_t i = 0; i < n; i++) v[i] *= s;
    ql_cpu_round(v, w->state, n);
    if (dtype != w->state) ql_cpu_round(v, dtype, n);
}

/* acc += v∘x in LANES lanes; which lane a product goes to depends on its place in the row alone. */
static void add_products(float *restrict acc, const float *restrict v, const float *restrict x, int64_t at, int64_t n)
{
    int64_t i = 0;
    for (; i < n && (at + i) % LANES; i++) acc[(at + i) % LANES] += v[i] * x[i];
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; l++) acc[l] += v[i + l] * x[i + l];
    for (; i < n; i++) acc[(at + i) % LANES] += v[i] * x[i];
}

/* out (M, N) = x (M, K) wᵀ [+ c] [+ bias] of one matrix; x is dense. */
static void few_rows(ql_tensor out, const float *x, ql_dtype dtype, const ql_nf4 *w, ql_tensor c, ql_tensor bias)
{
    job j = {.w = w};
    float v[BLOCK_MAX], y[QL_FEW_ROWS][STRIP], other[STRIP];
    int64_t rows = out.rows, k = w->cols;
    for (int b = 0; b < 256; b++) j.pair[b][0] = w->code[b >> 4], j.pair[b][1] = w->code[b & 15];
    for (int64_t n0 = 0; n0 < w->rows; n0 += STRIP) {
        int64_t nn = ql_min64(STRIP, w->rows - n0);
        for (int64_t n = 0; n < nn; n++) {
            float acc[QL_FEW_ROWS][LANES] = {{0}};
            for (int64_t at = 0; at < k;) {
                int64_t e = (n0 + n) * k + at, in = e % w->part % w->block, m = ql_min64(w->block - in, k - at);
                block_values(&j, e, dtype, v);
                for (int64_t r = 0; r < rows; r++) add_products(acc[r], v + in, x + r * k + at, at, m);
                at += m;
            }
            for (int64_t r = 0; r < rows; r++) {
                for (int h = LANES / 2; h; h /= 2)
                    for (int l = 0; l < h; l++) acc[r][l] += acc[r][l + h];
                y[r][n] = acc[r][0];
            }
        }
        for (int64_t r = 0; r < rows; r++) {
            const float *p = ql_tensor_set(bias) ? ql_cpu_read(bias, 0, n0, nn, other) : NULL;
            for (int64_t n = 0; p && n < nn; n++) y[r][n] += p[n];
            p = ql_tensor_set(c) ? ql_cpu_read(c, r, n0, nn, other) : NULL;
            for (int64_t n = 0; p && n < nn; n++) y[r][n] += p[n];
            ql_cpu_store(out, r, n0, y[r], nn);
        }
    }
}

QL_CPU_OP(nf4_matmul, ql_tensor out, ql_tensor a, const ql_nf4 *w, int n, ql_tensor c, ql_tensor bias)
{
    float *x = q->work;
    for (int64_t r = 0; r < a.rows; r++) ql_cpu_load(x + r * a.cols, a, r, 0, a.cols);
    for (int64_t i = 0, at = 0; i < n; at += w[i++].rows)
        few_rows(ql_cols(out, at, w[i].rows), x, a.dtype, &w[i], ql_tensor_set(c) ? ql_cols(c, at, w[i].rows) : c,
                 ql_tensor_set(bias) ? ql_cols(bias, at, w[i].rows) : bias);
    return QL_OK;
}

/* ---- quantise -------------------------------------------------------------------------------- */

/* The midpoints of neighbouring NF4 codes; a value's code is the number of them below it. */
static const float nf4_bar[15] = {
    -0.8480964004993439f,  -0.6106329262256622f,  -0.4599952697753906f,   -0.33967943489551544f,
    -0.23460740596055984f, -0.13791173323988914f, -0.045525018125772476f, 0.03979014977812767f,
    0.1202552504837513f,   0.2035212516784668f,   0.2920137718319893f,    0.3893125355243683f,
    0.5016634166240692f,   0.6427869200706482f,   0.8614784181118011f};

static float flush(float x)
{
    return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x;
}

/* y = x/absmax with subnormal operands and results taken as zeros, as bitsandbytes' build for GPUs
 * does; an all-zero block is 0·∞ = NaN there, no comparison holds, and its codes are 0. */
static void quant_block(uint8_t *packed, float *absmax, const float *x, int64_t n)
{
    int code[64] = {0};
    float a = 0;
    for (int64_t i = 0; i < n; i++) a = fmaxf(a, fabsf(x[i]));
    float r = flush(1.0f / flush(a));
    for (int64_t i = 0; i < n; i++) {
        float y = flush(flush(x[i]) * r);
        for (int k = 0; k < 15; k++) code[i] += y > nf4_bar[k];
    }
    /* Half a byte is left over: it holds the code of 0. */
    if (n % 2) code[n] = 7;
    for (int64_t i = 0; i < n; i += 2) packed[i / 2] = (uint8_t)(code[i] << 4 | code[i + 1]);
    *absmax = flush(a);
}

QL_CPU_OP(nf4_quant, ql_tensor packed, ql_tensor absmax, ql_tensor in)
{
    (void)q;
    int64_t total = in.rows * in.cols;
    in = ql_vec(in.data, in.dtype, total);
    float x[64];
    for (int64_t e = 0; e < total; e += 64) {
        int64_t n = ql_min64(64, total - e);
        ql_cpu_load(x, in, 0, e, n);
        quant_block((uint8_t *)packed.data + e / 2, (float *)absmax.data + e / 64, x, n);
    }
    return QL_OK;
}

/* The walk goes to a neighbour of y in the table, then takes the nearer of it and the last entry
 * seen on y's other side; ties stay. All elements take a step at once, so that the loops vectorise.
 */
void ql_cpu_nearest(uint8_t *code, const float *table, const float *y, float least, int n)
{
    enum { MAX = 256 };
    int32_t pivot[MAX], low[MAX], high[MAX];
    for (int i = 0; i < n; i++) pivot[i] = 127, low[i] = -1, high[i] = 255;
    for (int step = 64; step > 0; step /= 2) {
        for (int i = 0; i < n; i++) {
            bool up = y[i] > table[pivot[i]];
            low[i] = up ? pivot[i] : low[i];
            high[i] = up ? high[i] : pivot[i];
            pivot[i] += up ? step : -step;
        }
    }
    for (int i = 0; i < n; i++) {
        float v = table[pivot[i]], below = low[i] < 0 ? least : table[low[i] < 0 ? 0 : low[i]];
        float above = high[i] == 255 ? 1.0f : table[high[i]];
        int32_t up = y[i] > (above + v) * 0.5f ? high[i] : pivot[i];
        int32_t down = y[i] < (below + v) * 0.5f ? (low[i] < 0 ? 0 : low[i]) : pivot[i];
        code[i] = (uint8_t)(y[i] > v ? up : down);
    }
}

QL_CPU_OP(scale_quant, ql_tensor code, ql_tensor absmax2, ql_tensor absmax, ql_tensor code2,
          float offset)
{
    (void)q;
    const float *x = absmax.data;
    float y[256];
    for (int64_t e = 0; e < absmax.cols; e += 256) {
        int64_t n = ql_min64(256, absmax.cols - e);
        float a = 0;
        for (int64_t i = 0; i < n; i++) a = fmaxf(a, fabsf(x[e + i] - offset));
        float r = 1.0f / a;
        for (int64_t i = 0; i < n; i++) y[i] = (x[e + i] - offset) * r;
        ql_cpu_nearest((uint8_t *)code.data + e, code2.data, y, *(const float *)code2.data, (int)n);
        ((float *)absmax2.data)[e / 256] = a;
    }
    return QL_OK;
}
