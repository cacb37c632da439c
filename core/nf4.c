#include "core/nf4.h"

#include "kernels/half.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const float ql_nf4_map[16] = {-1.0f,
                              -0.6961928009986877f,
                              -0.5250730514526367f,
                              -0.39491748809814453f,
                              -0.28444138169288635f,
                              -0.18477343022823334f,
                              -0.09105003625154495f,
                              0.0f,
                              0.07958029955625534f,
                              0.16093020141124725f,
                              0.24611230194568634f,
                              0.33791524171829224f,
                              0.44070982933044434f,
                              0.5626170039176941f,
                              0.7229568362236023f,
                              1.0f};

/* Bit 3 is the sign; the magnitudes are e2m1-like steps over 12. */
const float ql_fp4_map[16] = {
    0.0f,  0.005208333333f,  0.66666667f,  1.0f,  0.33333333f,  0.5f,  0.16666667f,  0.25f,
    -0.0f, -0.005208333333f, -0.66666667f, -1.0f, -0.33333333f, -0.5f, -0.16666667f, -0.25f};

/* ---- the dynamic 8-bit map ----------------------------------------------------------------------
 */

/* Entry j of torch's fp32 linspace(0.1, 1, n): from both ends, each with one rounding. */
static float linspace(int j, int n)
{
    float step = (1.0f - 0.1f) / (float)(n - 1);
    return j < n / 2 ? fmaf(step, (float)j, 0.1f) : fmaf(-step, (float)(n - 1 - j), 1.0f);
}

static int ascending(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Decades 1e-6 … 1, each with twice the steps of the one below; the entries are the steps' means.
 */
static int decades(float *out, int first_steps, int signs)
{
    int n = 0;
    for (int i = 0; i < 7; i++) {
        int steps = first_steps << i;
        float scale = (float)pow(10.0, i - 6);
        for (int j = 0; j < steps; j++) {
            float mean = (linspace(j, steps + 1) + linspace(j + 1, steps + 1)) / 2.0f;
            out[n++] = scale * mean;
            if (signs == 2) out[n++] = -(scale * mean);
        }
    }
    return n;
}

static void finish_map(float out[256], int n)
{
    out[n++] = 0.0f;
    out[n++] = 1.0f;
    qsort(out, (size_t)n, sizeof *out, ascending);
}

void ql_dynamic_map_signed(float out[256])
{
    finish_map(out, decades(out, 1, 2));
}

void ql_dynamic_map_unsigned(float out[256])
{
    finish_map(out, decades(out, 2, 1));
}

uint8_t ql_dynamic_code(const float map[256], float y)
{
    int pivot = 127, lo = 0, hi = 255;
    float lower = -1.0f, upper = 1.0f;
    for (int step = 64; step >= 1; step /= 2) {
        if (y > map[pivot])
            lo = pivot, lower = map[pivot], pivot += step;
        else
            hi = pivot, upper = map[pivot], pivot -= step;
    }
    if (hi == 255) upper = map[255];
    if (lo == 0) lower = map[0];
    float v = map[pivot];
    if (y > v) return (uint8_t)(y > (upper + v) * 0.5f ? hi : pivot);
    return (uint8_t)(y < (lower + v) * 0.5f ? lo : pivot);
}

/* ---- quantise
 * ------------------------------------------------------------------------------------ */

static float flush(float x)
{
    return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x;
}

/* bitsandbytes' thresholds: the midpoints of neighbouring codes, as its source spells them. The
 * last one is an ulp below the midpoint in fp32, so they cannot be computed from the codes. */
static const float nf4_bar[15] = {
    -0.8480964004993439f,  -0.6106329262256622f,  -0.4599952697753906f,   -0.33967943489551544f,
    -0.23460740596055984f, -0.13791173323988914f, -0.045525018125772476f, 0.03979014977812767f,
    0.1202552504837513f,   0.2035212516784668f,   0.2920137718319893f,    0.3893125355243683f,
    0.5016634166240692f,   0.6427869200706482f,   0.8614784181118011f};

/* The number of thresholds below y: a tie goes to the lower code. NaN (a block of zeros) gives 0.
 */
static unsigned nf4_code(float y)
{
    unsigned code = 0;
    for (int i = 0; i < 15; i++) code += y > nf4_bar[i];
    return code;
}

void ql_nf4_quantise(const float *x, int64_t n, uint8_t *packed, float *absmax)
{
    for (int64_t b = 0; b * QL_NF4_BLOCK < n; b++) {
        int64_t first = b * QL_NF4_BLOCK, end = ql_min64(first + QL_NF4_BLOCK, n);
        float top = 0.0f;
        for (int64_t i = first; i < end; i++) top = fmaxf(top, fabsf(x[i]));
        float r = flush(1.0f / flush(top));
        for (int64_t i = first; i < end; i += 2) {
            unsigned hi = nf4_code(flush(flush(x[i]) * r));
            /* The element that an odd n lacks counts as zero. */
            unsigned lo = i + 1 < end ? nf4_code(flush(flush(x[i + 1]) * r)) : 7;
            packed[i / 2] = (uint8_t)(hi << 4 | lo);
        }
        absmax[b] = top;
    }
}

void ql_nested_quantise(const float *absmax, int64_t n, const float map[256], uint8_t *codes,
                        float *nested, float *offset)
{
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) sum += (double)absmax[i];
    float mean = (float)(sum / (double)n);
    for (int64_t b = 0; b * QL_NESTED_BLOCK < n; b++) {
        int64_t first = b * QL_NESTED_BLOCK, end = ql_min64(first + QL_NESTED_BLOCK, n);
        float top = 0.0f;
        for (int64_t i = first; i < end; i++) top = fmaxf(top, fabsf(absmax[i] - mean));
        float r = 1.0f / top;
        for (int64_t i = first; i < end; i++)
            codes[i] = ql_dynamic_code(map, (absmax[i] - mean) * r);
        nested[b] = top;
    }
    *offset = mean;
}

/* ---- dequantise
 * ---------------------------------------------------------------------------------- */

void ql_weight_absmax(const ql_weight *w, float *out)
{
    const uint8_t *codes = w->absmax;
    for (int64_t i = 0; i < w->blocks; i++) {
        if (w->nested_block == 0) {
            out[i] = ql_float_get(w->absmax, QL_F32, i);
            continue;
        }
        float v = ql_float_get(w->nested_map, QL_F32, codes[i]);
        v *= ql_float_get(w->nested_absmax, QL_F32, i / w->nested_block);
        out[i] = v + w->nested_offset;
    }
}

void ql_weight_read(const ql_weight *w, const float *absmax, int64_t first, int64_t n, void *out,
                    ql_dtype dtype)
{
    const uint8_t *codes = w->data;
    for (int64_t i = 0; i < n; i++) {
        int64_t e = first + i;
        if (w->kind == QL_PLAIN) {
            ql_float_put(out, dtype, i, ql_float_get(w->data, w->dtype, e));
            continue;
        }
        unsigned code = e % 2 ? codes[e / 2] & 15u : (unsigned)codes[e / 2] >> 4;
        float v = w->quant_map[code] * absmax[e / w->block];
        ql_float_put(out, dtype, i, ql_float_round(v, w->dtype));
    }
}

/* ---- bitsandbytes' tensors
 * ----------------------------------------------------------------------- */

/* Python's repr of a double: the fewest digits that read back the same, and ".0" on whole numbers.
 */
static void repr(char out[40], double x)
{
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(out, 40, "%.*g", digits, x);
        if (strtod(out, NULL) == x) break;
    }
    if (!strpbrk(out, ".en")) strcat(out, ".0");
}

static void write_state(ql_nf4_host *q)
{
    const ql_weight *w = &q->w;
    char offset[40];
    int n = snprintf(
        q->state, sizeof q->state,
        "{\"quant_type\": \"nf4\", \"blocksize\": %lld, \"dtype\": \"%s\", \"shape\": [%lld, %lld]",
        (long long)w->block, ql_dtype_name(w->dtype), (long long)w->rows, (long long)w->cols);
    if (w->nested_block) {
        repr(offset, (double)w->nested_offset);
        n += snprintf(
            q->state + n, sizeof q->state - (size_t)n,
            ", \"nested_blocksize\": %lld, \"nested_dtype\": \"float32\", \"nested_offset\": %s",
            (long long)w->nested_block, offset);
    }
    snprintf(q->state + n, sizeof q->state - (size_t)n, "}");
}

ql_status ql_nf4_make(const float *x, int64_t rows, int64_t cols, ql_dtype dtype, ql_scales scales,
                      ql_nf4_host *out)
{
    int64_t n = rows * cols, blocks = ql_ceil_div(n, QL_NF4_BLOCK),
            groups = ql_ceil_div(blocks, QL_NESTED_BLOCK);
    ql_nf4_host q = {.w = {.rows = rows, .cols = cols, .kind = QL_NF4, .dtype = dtype}};
    q.packed = malloc((size_t)ql_ceil_div(n, 2));
    q.absmax = malloc((size_t)blocks * sizeof *q.absmax);
    q.codes = malloc((size_t)blocks);
    q.nested = malloc((size_t)groups * sizeof *q.nested);
    q.nested_map = malloc(256 * sizeof *q.nested_map);
    if (!q.packed || !q.absmax || !q.codes || !q.nested || !q.nested_map) {
        ql_nf4_free(&q);
        QL_FAIL(QL_ENOMEM, "no memory for quantising [%lld, %lld]", (long long)rows,
                (long long)cols);
    }
    ql_nf4_quantise(x, n, q.packed, q.absmax);
    q.w.data = q.packed, q.w.bytes = ql_ceil_div(n, 2);
    q.w.block = QL_NF4_BLOCK, q.w.blocks = blocks;
    q.w.absmax = q.absmax;
    memcpy(q.w.quant_map, ql_nf4_map, sizeof q.w.quant_map);
    if (scales == QL_SCALES_NESTED) {
        ql_dynamic_map_signed(q.nested_map);
        ql_nested_quantise(q.absmax, blocks, q.nested_map, q.codes, q.nested, &q.w.nested_offset);
        q.w.absmax = q.codes;
        q.w.nested_block = QL_NESTED_BLOCK;
        q.w.nested_absmax = q.nested;
        q.w.nested_map = q.nested_map;
    }
    write_state(&q);
    *out = q;
    return QL_OK;
}

void ql_nf4_free(ql_nf4_host *q)
{
    if (!q) return;
    free(q->packed);
    free(q->codes);
    free(q->absmax);
    free(q->nested);
    free(q->nested_map);
    memset(q, 0, sizeof *q);
}

int ql_nf4_decls(const ql_nf4_host *q, const char *name, char names[QL_NF4_TENSORS][256],
                 ql_st_decl decl[QL_NF4_TENSORS], const void *data[QL_NF4_TENSORS])
{
    const ql_weight *w = &q->w;
    const struct {
        const char *suffix;
        ql_dtype dtype;
        int64_t count;
        const void *data;
    } parts[QL_NF4_TENSORS] = {
        {"", QL_U8, w->bytes, w->data},
        {".absmax", w->nested_block ? QL_U8 : QL_F32, w->blocks, w->absmax},
        {".quant_map", QL_F32, 16, w->quant_map},
        {".quant_state.bitsandbytes__nf4", QL_U8, (int64_t)strlen(q->state), q->state},
        {".nested_absmax", QL_F32, ql_ceil_div(w->blocks, QL_NESTED_BLOCK), w->nested_absmax},
        {".nested_quant_map", QL_F32, 256, w->nested_map},
    };
    int n = w->nested_block ? QL_NF4_TENSORS : QL_NF4_TENSORS - 2;
    for (int i = 0; i < n; i++) {
        snprintf(names[i], 256, "%s%s", name, parts[i].suffix);
        decl[i] = (ql_st_decl){names[i], parts[i].dtype, 1, {parts[i].count}};
        data[i] = parts[i].data;
    }
    decl[0].ndim = 2;
    decl[0].shape[1] = 1;
    return n;
}
