/* fp32 ↔ fp16 and bf16: round to nearest even, subnormals, infinities and NaN exact. Plain integer
 * arithmetic, the same bits with every compiler and on every machine. */
#ifndef QL_HALF_H
#define QL_HALF_H

#include "kernels/base.h"

#include <string.h>

static inline uint32_t ql_f32_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}
static inline float ql_f32_from_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static inline float ql_bf16_to_f32(uint16_t h)
{
    return ql_f32_from_bits((uint32_t)h << 16);
}
static inline uint16_t ql_f32_to_bf16(float x)
{
    uint32_t u = ql_f32_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40u); /* quiet NaN */
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

static inline float ql_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, mag = h & 0x7fffu;
    if (mag >= 0x7c00u) return ql_f32_from_bits(sign | 0x7f800000u | (mag & 0x3ffu) << 13);
    if (mag >= 0x400u) return ql_f32_from_bits(sign | ((mag << 13) + 0x38000000u));
    /* Subnormal: mag · 2^-24 is exact in fp32. */
    return ql_f32_from_bits(sign | ql_f32_bits((float)mag * 0x1p-24f));
}
static inline uint16_t ql_f32_to_f16(float x)
{
    uint32_t u = ql_f32_bits(x), sign = (u >> 16) & 0x8000u, mag = u & 0x7fffffffu;
    if (mag > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((mag >> 13) & 0x3ffu));
    if (mag >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* ≥ 65520 rounds to infinity */
    if (mag >= 0x38800000u) {                                  /* ≥ 2^-14: normal */
        mag -= 0x38000000u;
        return (uint16_t)(sign | ((mag + 0xfffu + ((mag >> 13) & 1u)) >> 13));
    }
    /* Subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits of the sum. */
    float sum = ql_f32_from_bits(mag) + 0.5f;
    return (uint16_t)(sign | (ql_f32_bits(sum) - 0x3f000000u));
}

/* Element i of a float array of any dtype; p needs no alignment (file data). */
static inline float ql_float_get(const void *p, ql_dtype dtype, int64_t i)
{
    uint16_t h;
    float x;
    if (dtype == QL_F32) {
        memcpy(&x, (const char *)p + 4 * i, 4);
        return x;
    }
    memcpy(&h, (const char *)p + 2 * i, 2);
    return dtype == QL_F16 ? ql_f16_to_f32(h) : ql_bf16_to_f32(h);
}
static inline void ql_float_put(void *p, ql_dtype dtype, int64_t i, float x)
{
    if (dtype == QL_F32) {
        memcpy((char *)p + 4 * i, &x, 4);
        return;
    }
    uint16_t h = dtype == QL_F16 ? ql_f32_to_f16(x) : ql_f32_to_bf16(x);
    memcpy((char *)p + 2 * i, &h, 2);
}
/* The value that x has after storage in dtype. */
static inline float ql_float_round(float x, ql_dtype dtype)
{
    if (dtype == QL_F16) return ql_f16_to_f32(ql_f32_to_f16(x));
    if (dtype == QL_BF16) return ql_bf16_to_f32(ql_f32_to_bf16(x));
    return x;
}

#endif
