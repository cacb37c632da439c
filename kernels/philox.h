/* Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), for C and
 * CUDA. Dropout's counters are laid out in ops.h, at ql_drop. */
#ifndef QL_PHILOX_H
#define QL_PHILOX_H

#include "kernels/ops.h"

#ifdef __CUDACC__
#define QL_PHILOX_FN static __host__ __device__ __forceinline__
#else
#define QL_PHILOX_FN static inline
#endif

typedef struct {
    uint32_t x[4];
} ql_philox4;

QL_PHILOX_FN ql_philox4 ql_philox(ql_philox4 c, uint32_t key0, uint32_t key1)
{
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * c.x[0], b = (uint64_t)0xCD9E8D57u * c.x[2];
        uint32_t x1 = c.x[1], x3 = c.x[3];
        c.x[0] = (uint32_t)(b >> 32) ^ x1 ^ key0;
        c.x[1] = (uint32_t)b;
        c.x[2] = (uint32_t)(a >> 32) ^ x3 ^ key1;
        c.x[3] = (uint32_t)a;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return c;
}

/* The four words of columns 4·group … 4·group + 3 for one token. */
QL_PHILOX_FN ql_philox4 ql_philox_drop(uint64_t seed, uint32_t step, uint32_t layer, uint32_t site,
                                       int64_t token, uint32_t group)
{
    ql_philox4 c;
    c.x[0] = group;
    c.x[1] = (uint32_t)(uint64_t)token;
    c.x[2] = (uint32_t)((uint64_t)token >> 32);
    c.x[3] = layer * 16u + site;
    return ql_philox(c, (uint32_t)seed, (uint32_t)(seed >> 32) ^ step);
}

/* An element is kept iff its word is at least this. */
QL_PHILOX_FN uint32_t ql_philox_bar(float p)
{
    return (uint32_t)((double)p * 4294967296.0);
}

#endif
