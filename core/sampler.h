/* The order in which examples are trained on: Hugging Face's, bit for bit. */
#ifndef QL_SAMPLER_H
#define QL_SAMPLER_H

#include "kernels/base.h"

/* torch's CPU generator: MT19937, seeded by the low 32 bits. */
typedef struct {
    uint32_t state[624];
    int at;
} ql_mt;
void ql_mt_seed(ql_mt *g, uint64_t seed);
uint32_t ql_mt_next(ql_mt *g);

/* order[0 … n-1] of one epoch: torch.randperm(n) of a generator seeded with seed + epoch. n < 2^32/20,
 * beyond which torch takes another path. */
ql_status ql_sampler_order(uint64_t seed, int64_t epoch, int64_t n, int32_t *order) QL_MUST_USE;

/* The same from a file of sample numbers, one a line, from 0: epoch e takes lines [e·n, (e+1)·n), and begins again where the file
 * ends. */
ql_status ql_sampler_file(const char *path, int64_t epoch, int64_t n, int32_t *order) QL_MUST_USE;

#endif
