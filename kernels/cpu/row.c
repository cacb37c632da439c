/* Rows of fp16 and bf16 to fp32 and back, in loops that vectorise; the bits are half.h's. */
#include "kernels/cpu/cpu.h"

#include <math.h>

#if defined(__F16C__) && defined(__AVX__)
#include <immintrin.h>

/* The machine's conversions round as half.h does and keep NaN payloads as it does. */
static int64_t widen_f16(float *restrict dst, const uint16_t *restrict src, int64_t n)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(src + i))));
    return i;
}
static int64_t narrow_f16(uint16_t *restrict dst, const float *restrict src, int64_t n)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(dst + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT));
    return i;
}
#else
static int64_t widen_f16(float *restrict dst, const uint16_t *restrict src, int64_t n)
{
    (void)dst, (void)src, (void)n;
    return 0;
}
static int64_t narrow_f16(uint16_t *restrict dst, const float *restrict src, int64_t n)
{
    (void)dst, (void)src, (void)n;
    return 0;
}
#endif

void ql_cpu_widen(float *restrict dst, const void *restrict src, ql_dtype t, int64_t n)
{
    const uint16_t *restrict h = src;
    if (t == QL_F32)
        memcpy(dst, src, (size_t)n * sizeof(float));
    else if (t == QL_BF16)
        for (int64_t i = 0; i < n; i++) dst[i] = ql_bf16_to_f32(h[i]);
    else
        for (int64_t i = widen_f16(dst, h, n); i < n; i++) dst[i] = ql_f16_to_f32(h[i]);
}

void ql_cpu_narrow(void *restrict dst, ql_dtype t, const float *restrict src, int64_t n)
{
    uint16_t *restrict h = dst;
    if (t == QL_F32)
        memcpy(dst, src, (size_t)n * sizeof(float));
    else if (t == QL_BF16)
        for (int64_t i = 0; i < n; i++) h[i] = ql_f32_to_bf16(src[i]);
    else
        for (int64_t i = narrow_f16(h, src, n); i < n; i++) h[i] = ql_f32_to_f16(src[i]);
}

void ql_cpu_round(float *x, ql_dtype t, int64_t n)
{
    uint16_t h[256];
    if (t == QL_F32) return;
    for (int64_t i = 0; i < n; i += 256) {
        int64_t k = ql_min64(256, n - i);
        ql_cpu_narrow(h, t, x + i, k);
        ql_cpu_widen(x + i, h, t, k);
    }
}

float ql_cpu_halve(float *x, int64_t n)
{
    int64_t half = 1;
    while (half < n) half *= 2;
    for (half /= 2; half > 0; half /= 2) {
        for (int64_t i = 0; i + half < n; i++) x[i] += x[i + half];
        n = ql_min64(n, half);
    }
    return x[0];
}

float ql_cpu_total(const float *x, int64_t n)
{
    enum { L = 32 };
    float acc[L] = {0};
    int64_t i = 0;
    for (; i + L <= n; i += L)
        for (int j = 0; j < L; j++) acc[j] += x[i + j];
    for (int j = 0; i + j < n; j++) acc[j] += x[i + j];
    return ql_cpu_halve(acc, L);
}

float ql_cpu_max(const float *x, int64_t n)
{
    enum { L = 32 };
    float acc[L];
    for (int j = 0; j < L; j++) acc[j] = -INFINITY;
    int64_t i = 0;
    for (; i + L <= n; i += L)
        for (int j = 0; j < L; j++) acc[j] = x[i + j] > acc[j] ? x[i + j] : acc[j];
    for (int j = 0; i + j < n; j++) acc[j] = x[i + j] > acc[j] ? x[i + j] : acc[j];
    for (int j = 1; j < L; j++) acc[0] = acc[j] > acc[0] ? acc[j] : acc[0];
    return acc[0];
}

const float *ql_cpu_panel(ql_tensor t, int64_t r, int64_t rows, int64_t c, int64_t cols,
                          float *work, int *ld)
{
    if (t.dtype == QL_F32) {
        *ld = (int)t.ld;
        return ql_cpu_at(t, r, c);
    }
    for (int64_t i = 0; i < rows; i++) ql_cpu_load(work + i * cols, t, r + i, c, cols);
    *ld = (int)cols;
    return work;
}
