/* What attention's forward and backward on Hopper's warpgroup products share (compute_90a). A block of three warpgroups
 * stays on its SM and takes one piece of work after another: the first warpgroup copies tiles into a ring of stages, the
 * two others multiply. */
#ifndef QL_CUDA_ATTN90_H
#define QL_CUDA_ATTN90_H

#include "kernels/cuda/attn.h"
#include "kernels/cuda/wgmma.h"

/* Registers: a launch gives 3 · 168, so one producer's and two consumers' share may be 504, or the block waits for ever. */
enum { THREADS = 384, CONSUMER_WARPS = 8, LAUNCH_REGS = 168 };
template <int PRODUCER, int CONSUMER>
struct regs90 {
    static_assert(PRODUCER + 2 * CONSUMER <= 3 * LAUNCH_REGS, "more registers than a launch gives");
    enum { FEW = PRODUCER, MANY = CONSUMER };
};


/* Work is dealt heaviest first among n, forwards in one round and backwards in the next, so that all get equal sums. */
static __device__ __forceinline__ int dealt(int round, int n, int me)
{
    return round * n + (round & 1 ? n - 1 - me : me);
}

static __device__ __forceinline__ int warpgroup(void)
{
    return __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0);
}
/* A consumer warp has done with a stage: all of its lanes have, before one says so. */
static __device__ __forceinline__ void release(unsigned bar)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0) bar_arrive(bar);
}

/* acc (64, N) = A (64 rows at a, DP) · B (N rows at b, DP)ᵀ; a and b are K-major tiles of A_ROWS and N rows. */
template <int DTYPE, int DP, int A_ROWS, int N>
static __device__ __forceinline__ void product_nt(float (&acc)[N / 2], unsigned a, unsigned b)
{
    uint64_t da = desc_k_major(a), db = desc_k_major(b);
#pragma unroll
    for (int k = 0; k < DP / 16; k++)
        wgmma<DTYPE, N, 0>(acc, desc_add(da, k / 4 * A_ROWS * 128 + k % 4 * 32), desc_add(db, k / 4 * N * 128 + k % 4 * 32),
                           k > 0);
}
/* acc (64, DP) += P (64, K) · B (K rows at b, DP); P in registers, four for every 16 columns. */
template <int DTYPE, int DP, int K>
static __device__ __forceinline__ void product_nn(float (&acc)[DP / 2], const unsigned (&p)[K / 4], unsigned b)
{
    uint64_t db = desc_n_major(b, K * 128);
#pragma unroll
    for (int k = 0; k < K / 16; k++) wgmma<DTYPE, DP, 1>(acc, p + 4 * k, desc_add(db, k * 2048), 1);
}
template <int DTYPE, int N>
static __device__ __forceinline__ void round_pairs(unsigned (&p)[N / 4], const float (&s)[N / 2])
{
#pragma unroll
    for (int i = 0; i < N / 4; i++) p[i] = cu_pair(s[2 * i], s[2 * i + 1], DTYPE);
}

/* 8 values of a row: columns 32m + 8k + 2t and the next, k < 4. The four lanes of a row exchange words until each has 16
 * bytes; d columns of the row are there. */
template <int DTYPE>
static __device__ __forceinline__ void row_store(char *row, bool live, int m, int d, const float v[8])
{
    int t = (int)threadIdx.x % 4, col = (4 * m + t) * 8;
    unsigned x[4], a, b;
#pragma unroll
    for (int k = 0; k < 4; k++) x[k] = cu_pair(v[2 * k], v[2 * k + 1], DTYPE);
    a = __shfl_xor_sync(0xffffffffu, t & 1 ? x[0] : x[1], 1);
    b = __shfl_xor_sync(0xffffffffu, t & 1 ? x[2] : x[3], 1);
    if (t & 1)
        x[0] = a, x[2] = b;
    else
        x[1] = a, x[3] = b;
    a = __shfl_xor_sync(0xffffffffu, t & 2 ? x[0] : x[2], 2);
    b = __shfl_xor_sync(0xffffffffu, t & 2 ? x[1] : x[3], 2);
    uint4 w = t & 2 ? make_uint4(a, b, x[2], x[3]) : make_uint4(x[0], x[1], a, b);
    if (live && col < d) *(uint4 *)(row + col * 2) = w;
}

/* Rows g and g + 8 of this warp's 16 (from row `first`, of which n are there), times by[0] and by[1]. */
template <int DTYPE, int DP>
static __device__ __forceinline__ void rows_store(char *to, int64_t ld, int first, int n, int d, const float (&acc)[DP / 2],
                                                  const float by[2])
{
    int g = (int)threadIdx.x % 32 / 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = first + g + 8 * half;
#pragma unroll
        for (int m = 0; m < DP / 32; m++) {
            float v[8];
#pragma unroll
            for (int k = 0; k < 8; k++) v[k] = acc[16 * m + k / 2 * 4 + 2 * half + k % 2] * by[half];
            row_store<DTYPE>(to + row * ld * 2, row < n, m, d, v);
        }
    }
}

/* ---- pieces of work that own queries: BM of one head, and the key tiles they see ---- */

struct q_work {
    doc_view doc;
    int h, kv, m0, first, last;
    bool live; /* there are such queries */
};
/* This block's piece of a round; false: no round has any more. */
template <class C>
static __device__ __forceinline__ bool q_next(const attn_args &a, int heads, int docs, int round, q_work *w)
{
    int items = a.tiles * docs * heads, item = dealt(round, (int)gridDim.x, (int)blockIdx.x);
    if (round * (int)gridDim.x >= items) return false;
    int level = item / (docs * heads), rest = item - level * docs * heads, doc = rest / heads;
    w->h = rest - doc * heads, w->kv = w->h / a.group, w->m0 = (a.tiles - 1 - level) * C::BM;
    w->live = item < items;
    if (!w->live) return true;
    w->doc = doc_of(a, doc);
    w->live = w->m0 < w->doc.q_len;
    int hi = min(w->doc.k_len, min(w->m0 + C::BM, w->doc.q_len) + w->doc.off);
    int lo = max(0, w->m0 + w->doc.off - w->doc.window + 1);
    w->last = hi > lo ? (hi - 1) / C::BN : -1, w->first = hi > lo ? lo / C::BN : 0;
    return true;
}

#endif
