/* Cases of the ops that move data: copies, 4-bit weights. */
#include "tests/ops/runs.h"

#include "kernels/half.h"

#include <math.h>
#include <string.h>

/* What x is after storage in t. */
static double stored(double x, ql_dtype t)
{
    return (double)ql_float_round((float)x, t);
}

void run_convert(ctx *c, const op_case *p)
{
    tens *out = make(c, "out", OUT, p->b, p->m, p->n, p->pad),
         *in = make(c, "in", IN, p->a, p->m, p->n, 2 * p->pad);
    /* Ties, subnormals, overflow, infinities beside ordinary values. */
    const double odd[] = {65504,         65519.99,   65520,      1e30,     -1e-7,     6e-8,
                          2.9e-8,        0.0,        -0.0,       INFINITY, -INFINITY, 1.00048828125,
                          1.00146484375, 1.00390625, 1.01171875, 3.4e38,   1e-40};
    for (int64_t i = 0; i < p->m * p->n && i < 17; i++) in->v[i] = odd[i];
    double *ref = doubles(c, p->m * p->n);
    RUN(c, ql_convert(&c->q, out->t, in->t));
    for (int64_t i = 0; live(c) && i < p->m * p->n; i++) ref[i] = stored(in->v[i], p->b);
    expect_exact(c, out, ref);
}

/* Sixteen matrices of one call: every pair of dtypes, m + i rows of n − 2·i columns. */
void run_convert_all(ctx *c, const op_case *p)
{
    const ql_dtype kinds[] = {QL_F32, QL_F16, QL_BF16};
    tens *out[QL_MAX_CONVERT], *in[QL_MAX_CONVERT];
    ql_tensor to[QL_MAX_CONVERT], from[QL_MAX_CONVERT];
    for (int i = 0; i < QL_MAX_CONVERT; i++) {
        int64_t rows = p->m + i, cols = ql_max64(0, p->n - 2 * i);
        out[i] = make(c, "out", OUT, kinds[i % 3], rows, cols, p->pad);
        in[i] = make(c, "in", IN, kinds[i / 3 % 3], rows, cols, i % 2);
        to[i] = out[i]->t, from[i] = in[i]->t;
    }
    RUN(c, ql_convert_all(&c->q, to, from, QL_MAX_CONVERT));
    for (int i = 0; live(c) && i < QL_MAX_CONVERT; i++) {
        int64_t n = out[i]->t.rows * out[i]->t.cols;
        double *ref = doubles(c, n);
        for (int64_t k = 0; k < n; k++) ref[k] = stored(in[i]->v[k], out[i]->t.dtype);
        expect_exact(c, out[i], ref);
    }
}

void run_fill(ctx *c, const op_case *p)
{
    tens *out = make(c, "out", OUT, p->a, p->m, p->n, p->pad);
    double *ref = doubles(c, p->m * p->n);
    RUN(c, ql_fill(&c->q, out->t, 0.3f));
    for (int64_t i = 0; i < p->m * p->n; i++) ref[i] = stored(0.3f, p->a);
    expect_exact(c, out, ref);
}

/* how 0: another out; 1: out is a; 2: out is b; 3: all three one. */
void run_add(ctx *c, const op_case *p)
{
    tens *out = make(c, "out", p->how ? INOUT : OUT, QL_F32, p->m, p->n, p->pad);
    tens *a = p->how & 1 ? out : make(c, "a", IN, QL_F32, p->m, p->n, 0);
    tens *b = p->how & 2 ? out : make(c, "b", IN, QL_F32, p->m, p->n, 2 * p->pad);
    double *ref = doubles(c, p->m * p->n);
    RUN(c, ql_add(&c->q, out->t, a->t, b->t));
    for (int64_t i = 0; live(c) && i < p->m * p->n; i++)
        ref[i] = (double)((float)a->v[i] + (float)b->v[i]);
    expect_exact(c, out, ref);
}

/* k rows of `in`, m indices. */
void run_gather(ctx *c, const op_case *p)
{
    tens *out = make(c, "out", OUT, p->b, p->m, p->n, p->pad),
         *in = make(c, "in", IN, p->a, p->k, p->n, 2 * p->pad);
    tens *index = make(c, "index", IN, QL_I32, 1, p->m, 0);
    double *ref = doubles(c, p->m * p->n);
    for (int64_t i = 0; i < p->m; i++) index->v[i] = floor(rnd(c, -1, (double)p->k));
    if (p->m > 1) index->v[1] = -1;
    RUN(c, ql_gather_rows(&c->q, out->t, in->t, index->t));
    for (int64_t i = 0; live(c) && i < p->m; i++)
        for (int64_t j = 0; j < p->n; j++)
            ref[i * p->n + j] =
                index->v[i] < 0 ? 0 : stored(in->v[(int64_t)index->v[i] * p->n + j], p->b);
    expect_exact(c, out, ref);
}

/* m rows into k ≥ m. */
void run_scatter(ctx *c, const op_case *p)
{
    tens *out = make(c, "out", OUT, p->b, p->k, p->n, p->pad),
         *in = make(c, "in", IN, p->a, p->m, p->n, 2 * p->pad);
    tens *index = make(c, "index", IN, QL_I32, 1, p->m, 0);
    double *ref = doubles(c, p->k * p->n);
    /* Distinct rows in an order that is not theirs; one is skipped. */
    for (int64_t i = 0; i < p->m; i++) index->v[i] = (double)(p->k - 1 - i);
    if (p->m > 1) index->v[1] = -1;
    RUN(c, ql_scatter_rows(&c->q, out->t, in->t, index->t));
    for (int64_t i = 0; i < p->k * p->n; i++) ref[i] = NAN;
    for (int64_t i = 0; live(c) && i < p->m; i++)
        for (int64_t j = 0; j < p->n && index->v[i] >= 0; j++)
            ref[(int64_t)index->v[i] * p->n + j] = stored(in->v[i * p->n + j], p->b);
    expect_exact(c, out, ref);
}

/* how 0: finite; 1: one NaN at the end; 2: one infinity in the middle; 3: finite, the flag was set
 * before. */
void run_finite(ctx *c, const op_case *p)
{
    tens *flag = make(c, "flag", INOUT, QL_I32, 1, 1, 0),
         *in = make(c, "in", IN, p->a, p->m, p->n, p->pad);
    int64_t n = p->m * p->n;
    flag->v[0] = p->how == 3;
    if (p->how == 1) in->v[n - 1] = NAN;
    if (p->how == 2) in->v[n / 2] = -INFINITY;
    if (p->how == 0) in->v[0] = stored(65504, p->a);
    double ref = p->how != 0;
    RUN(c, ql_check_finite(&c->q, flag->t, in->t));
    expect_exact(c, flag, &ref);
}

/* ---- 4-bit weights --------------------------------------------------------------------------- */

/* The NF4 code and a sorted table of 256, signed or not, shaped like the dynamic map.
 */
static const double nf4_code[16] = {-1.0,
                                    -0.6961928009986877,
                                    -0.5250730514526367,
                                    -0.39491748809814453,
                                    -0.28444138169288635,
                                    -0.18477343022823334,
                                    -0.09105003625154495,
                                    0.0,
                                    0.07958029955625534,
                                    0.16093020141124725,
                                    0.24611230194568634,
                                    0.33791524171829224,
                                    0.44070982933044434,
                                    0.5626170039176941,
                                    0.7229568362236023,
                                    1.0};

/* bitsandbytes' dynamic map, signed or unsigned, ascending. */
void dynamic_map(double *code, bool is_signed)
{
    int n = 0;
    for (int i = 0; i < 7; i++) {
        int points = (1 << (is_signed ? i : i + 1)) + 1;
        float step = (1.0f - 0.1f) / (float)(points - 1), power = (float)pow(10, i - 6), prev = 0;
        for (int j = 0; j < points; j++) {
            float b = j < points / 2 ? fmaf(step, (float)j, 0.1f)
                                     : fmaf(-step, (float)(points - 1 - j), 1.0f);
            if (j > 0) {
                code[n++] = (double)(power * ((prev + b) / 2));
                if (is_signed) code[n] = -code[n - 1], n++;
            }
            prev = b;
        }
    }
    code[n++] = 0, code[n++] = 1;
    for (int i = 1; i < n; i++)
        for (int j = i; j > 0 && code[j] < code[j - 1]; j--) {
            double t = code[j];
            code[j] = code[j - 1], code[j - 1] = t;
        }
}

/* One matrix of (m, n) in k pieces; how bit 0: nested; bits 1-2: state dtype. */
static void nf4_matrix(ctx *c, const op_case *p, ql_nf4 *w, tens **out, double **ref, int64_t rows)
{
    int64_t total = rows * p->n, block2 = p->how & 1 ? 256 : 0, grain = 64 * (block2 ? block2 : 1);
    *w = (ql_nf4){
        .rows = rows, .cols = p->n, .block = 64, .block2 = (int)block2, .parts = (int)p->k};
    w->state = (ql_dtype)(p->how >> 1 & 3);
    w->part = ql_round_up(ql_ceil_div(total, p->k), grain);
    *out = make(c, "out", OUT, p->a, rows, p->n, p->pad);
    *ref = doubles(c, total);
    tens *code = make(c, "code", IN, QL_F32, 1, 16, 0),
         *code2 = make(c, "code2", IN, QL_F32, 1, 256, 0);
    memcpy(code->v, nf4_code, sizeof nf4_code);
    dynamic_map(code2->v, true);
    w->code = code->t.data, w->code2 = code2->t.data, w->offset = block2 ? 0.0421f : 0.0f;
    for (int i = 0; i < w->parts && i * w->part < total; i++) {
        int64_t n = ql_min64(w->part, total - i * w->part), blocks = ql_ceil_div(n, 64);
        tens *packed = make(c, "packed", IN, QL_U8, 1, ql_ceil_div(n, 2), 0);
        tens *absmax = make(c, "absmax", IN, block2 ? QL_U8 : QL_F32, 1, blocks, 0);
        tens *absmax2 = make(c, "absmax2", IN, QL_F32, 1, ql_ceil_div(blocks, 256), 0);
        for (int64_t j = 0; j < packed->t.cols; j++) packed->v[j] = floor(rnd(c, 0, 256));
        for (int64_t j = 0; j < blocks; j++)
            absmax->v[j] = block2 ? floor(rnd(c, 0, 256)) : rnd(c, 0, 0.1);
        for (int64_t j = 0; j < absmax2->t.cols; j++) absmax2->v[j] = rnd(c, 0, 0.05);
        w->packed[i] = packed->t.data, w->absmax[i] = absmax->t.data,
        w->absmax2[i] = absmax2->t.data;
        for (int64_t e = 0; !c->bench && e < n; e++) {
            int byte = (int)packed->v[e / 2], nibble = e % 2 ? byte & 15 : byte >> 4;
            float s = (float)absmax->v[e / 64];
            if (block2) {
                /* Two roundings: the volatile keeps a compiler from fusing them. */
                volatile float scaled =
                    (float)code2->v[(int)absmax->v[e / 64]] * (float)absmax2->v[e / 64 / 256];
                s = scaled + w->offset;
            }
            (*ref)[i * w->part + e] =
                stored(stored((double)((float)nf4_code[nibble] * s), w->state), p->a);
        }
    }
}

void run_dequant(ctx *c, const op_case *p)
{
    ql_nf4 w[2];
    tens *out[2];
    double *ref[2];
    int n = p->k < 3 ? 2 : 1; /* more pieces leave no room for a second matrix in the case */
    for (int i = 0; i < n; i++) nf4_matrix(c, p, &w[i], &out[i], &ref[i], p->m + i);
    ql_tensor outs[2] = {out[0]->t, n > 1 ? out[1]->t : out[0]->t};
    RUN(c, ql_nf4_dequant(&c->q, outs, w, n));
    for (int i = 0; i < n; i++) expect_exact(c, out[i], ref[i]);
}

/* The product, and once more its first row with the first matrix alone: the same bits. */
static ql_status few_twice(ctx *c, ql_tensor out, ql_tensor alone, ql_tensor a, const ql_nf4 *w, int n, ql_tensor add, ql_tensor bias)
{
    QL_TRY(ql_nf4_matmul(&c->q, out, a, w, n, add, bias));
    if (c->bench) return QL_OK;
    if (add.data) add = ql_cols(ql_rows(add, 0, 1), 0, w->rows);
    if (bias.data) bias = ql_cols(bias, 0, w->rows);
    return ql_nf4_matmul(&c->q, alone, ql_rows(a, 0, 1), w, 1, add, bias);
}

/* (m, n) in k pieces; how + 8 c, + 16 bias, + 32·(rows − 1), + 256 also (m + 16, n), + 512 also (m + 32, n) with codes of its own. */
void run_few(ctx *c, const op_case *p)
{
    ql_nf4 w[QL_FEW_MATS];
    tens *values;
    double *some, *weights = doubles(c, QL_FEW_MATS * (p->m + 16 * QL_FEW_MATS) * p->n);
    int64_t rows = 1 + (p->how >> 5 & 7), m = 0;
    int n = 1 + (p->how >> 8);
    for (int i = 0; i < n; m += w[i++].rows) {
        nf4_matrix(c, p, &w[i], &values, &some, p->m + 16 * i);
        memcpy(weights + m * p->n, some, (size_t)(w[i].rows * p->n) * sizeof *some);
        if (i == 1) w[1].code = w[0].code;
    }
    tens *out = make(c, "y", OUT, p->b, rows, m, p->pad), *a = make(c, "a", IN, p->a, rows, p->n, 2 * p->pad);
    tens *add = p->how & 8 ? make(c, "c", IN, p->b, rows, m, 3 * p->pad) : NULL, *bias = p->how & 16 ? make(c, "bias", IN, p->a, 1, m, 0) : NULL;
    double *ref = doubles(c, rows * m);
    c->flops = 2.0 * (double)rows * (double)m * (double)p->n;
    tens *alone = make(c, "alone", OUT, p->b, 1, p->m, 0);
    RUN(c, few_twice(c, out->t, alone->t, a->t, w, n, add ? add->t : QL_NONE, bias ? bias->t : QL_NONE));
    if (!live(c)) return;
    ref_matmul(ref, a->v, weights, QL_NT, 1, add ? add->v : NULL, bias ? bias->v : NULL, rows, m, p->n);
    expect(c, out, ref, bar_of(p->a, 2e-6)); /* a's: its codes are rounded before or after the scale */
    expect_exact(c, alone, out->got);
}

static const double nf4_bars[15] = {
    -0.8480964004993439,  -0.6106329262256622,  -0.4599952697753906,   -0.33967943489551544,
    -0.23460740596055984, -0.13791173323988914, -0.045525018125772476, 0.03979014977812767,
    0.1202552504837513,   0.2035212516784668,   0.2920137718319893,    0.3893125355243683,
    0.5016634166240692,   0.6427869200706482,   0.8614784181118011};

/* Codes are demanded exactly except where y is within 2 ulp of a threshold: the reciprocal is
 * approximate on GPUs. how 1: a block of zeros, a constant one, huge and tiny ones first. */
void run_quant(ctx *c, const op_case *p)
{
    int64_t n = p->m * p->n, blocks = ql_ceil_div(n, 64);
    tens *packed = make(c, "packed", OUT, QL_U8, 1, ql_ceil_div(n, 2), 0);
    tens *absmax = make(c, "absmax", OUT, QL_F32, 1, blocks, 0),
         *in = make(c, "in", IN, p->a, p->m, p->n, 0);
    double *ref = doubles(c, blocks);
    for (int64_t i = 0; p->how == 1 && i < n && i < 256; i++)
        in->v[i] = i < 64 ? 0 : i < 128 ? 0.25 : i < 192 ? in->v[i] * 6e4 : in->v[i] * 1e-6;
    RUN(c, ql_nf4_quant(&c->q, packed->t, absmax->t, in->t));
    for (int64_t b = 0; live(c) && b < blocks; b++) {
        for (int64_t i = b * 64; i < n && i < b * 64 + 64; i++)
            ref[b] = fmax(ref[b], fabs(in->v[i]));
        for (int64_t i = b * 64; i < b * 64 + 64 && i < 2 * packed->t.cols; i++) {
            int byte = (int)packed->got[i / 2], got = i % 2 ? byte & 15 : byte >> 4, lo = 0, hi = 0;
            double y = i >= n ? 0 : in->v[i] / ref[b];
            for (int k = 0; k < 15; k++) {
                double slack =
                    p->a == QL_F32 || c->b->name[1] == 'u' ? 2.4e-7 * fabs(nf4_bars[k]) : 0;
                lo += y > nf4_bars[k] + slack, hi += y > nf4_bars[k] - slack;
            }
            if (ref[b] == 0) lo = hi = i < n ? 0 : 7;
            if (got < lo || got > hi)
                fail(c, "code[%lld] is %d, expected %d to %d of %g", (long long)i, got, lo, hi, y);
        }
    }
    expect_exact(c, absmax, ref);
}

/* The nearest entry (ties stay), by looking at all of them. how 1: all scales equal. */
void run_scale_quant(ctx *c, const op_case *p)
{
    int64_t n = p->n, blocks = ql_ceil_div(n, 256);
    tens *code = make(c, "code", OUT, QL_U8, 1, n, 0),
         *absmax2 = make(c, "absmax2", OUT, QL_F32, 1, blocks, 0);
    tens *absmax = make(c, "absmax", IN, QL_F32, 1, n, 0),
         *table = make(c, "code2", IN, QL_F32, 1, 256, 0);
    double *ref = doubles(c, blocks);
    const float offset = 0.5f;
    dynamic_map(table->v, true);
    for (int64_t i = 0; i < n; i++) absmax->v[i] = p->how == 1 ? 0.5 : 0.5 + 0.1 * absmax->v[i];
    RUN(c, ql_scale_quant(&c->q, code->t, absmax2->t, absmax->t, table->t, offset));
    for (int64_t i = 0; live(c) && i < n; i++)
        ref[i / 256] = fmax(ref[i / 256], fabs((double)((float)absmax->v[i] - offset)));
    for (int64_t i = 0; live(c) && i < n; i++) {
        double y = (double)((float)absmax->v[i] - offset) / ref[i / 256], best = 1e9;
        int got = (int)code->got[i];
        for (int k = 0; k < 256; k++) best = fmin(best, fabs(table->v[k] - y));
        if (p->how == 1 ? got != 0 : fabs(table->v[got] - y) > best + 3e-7)
            fail(c, "code[%lld] is %d (%g) for %g", (long long)i, got, table->v[got], y);
    }
    expect_exact(c, absmax2, ref);
}
