#include "core/sampler.h"

void ql_mt_seed(ql_mt *g, uint64_t seed)
{
    g->state[0] = (uint32_t)seed;
    for (uint32_t i = 1; i < 624; i++)
        g->state[i] = 1812433253u * (g->state[i - 1] ^ g->state[i - 1] >> 30) + i;
    g->at = 624;
}

static void refill(ql_mt *g)
{
    for (int i = 0; i < 624; i++) {
        uint32_t y = (g->state[i] & 0x80000000u) | (g->state[(i + 1) % 624] & 0x7fffffffu);
        g->state[i] = g->state[(i + 397) % 624] ^ y >> 1 ^ (y & 1 ? 0x9908b0dfu : 0);
    }
    g->at = 0;
}

uint32_t ql_mt_next(ql_mt *g)
{
    if (g->at >= 624) refill(g);
    uint32_t y = g->state[g->at++];
    y ^= y >> 11;
    y ^= y << 7 & 0x9d2c5680u;
    y ^= y << 15 & 0xefc60000u;
    return y ^ y >> 18;
}

ql_status ql_sampler_order(uint64_t seed, int64_t epoch, int64_t n, int32_t *order)
{
    ql_mt g;
    if (n < 0 || n >= (int64_t)(UINT32_MAX / 20))
        QL_FAIL(QL_ENOSUP, "%lld examples cannot be shuffled: fewer than %u are supported", (long long)n,
                UINT32_MAX / 20);
    ql_mt_seed(&g, seed + (uint64_t)epoch);
    for (int64_t i = 0; i < n; i++) order[i] = (int32_t)i;
    for (int64_t i = 0; i + 1 < n; i++) {
        int64_t j = i + (int64_t)(ql_mt_next(&g) % (uint32_t)(n - i));
        int32_t t = order[i];
        order[i] = order[j], order[j] = t;
    }
    return QL_OK;
}
