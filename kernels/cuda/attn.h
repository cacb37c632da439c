/* What the attention kernels share: their arguments, documents, who sees whom. */
#ifndef QL_CUDA_ATTN_H
#define QL_CUDA_ATTN_H

#include "kernels/cuda/mma.h"

struct attn_args {
    const void *q, *k, *v, *dout;
    void *o, *dq, *dk, *dv;
    float *lse;
    const float *delta;
    int64_t q_ld, k_ld, v_ld, o_ld, dout_ld, dq_ld, dk_ld, dv_ld, lse_ld, delta_ld;
    const int *q_start, *q_len, *k_start, *k_len;
    int d, group, window, tiles; /* group: query heads per key/value head; tiles: attn90.cu's, of queries or keys */
    float scale;
};

#define LOG2E 1.4426950408889634f

/* One document as a block sees it; query i sees keys j with i + off − window < j ≤ i + off. */
struct doc_view {
    int q_len, k_len, off, window;
    int64_t q0, k0;
};
static __device__ __forceinline__ doc_view doc_of(const attn_args &a, int doc)
{
    doc_view v;
    v.q_len = a.q_len[doc], v.k_len = a.k_len[doc], v.off = v.k_len - v.q_len;
    v.window = a.window > 0 ? a.window : 0x3fffffff;
    v.q0 = a.q_start[doc], v.k0 = a.k_start[doc];
    return v;
}
static __device__ __forceinline__ bool sees(const doc_view &v, int i, int j)
{
    return j <= i + v.off && j > i + v.off - v.window && j < v.k_len;
}
/* Whether every query of [i, i + m) sees every key of [j, j + n). */
static __device__ __forceinline__ bool sees_all(const doc_view &v, int i, int m, int j, int n)
{
    return j + n - 1 <= i + v.off && j > i + m - 1 + v.off - v.window && j + n <= v.k_len;
}

/* attn90.cu, attn_bwd90.cu: the same on compute capability 9.0's warpgroup products. */
ql_status cu_attention90(const ql_queue *q, const attn_args *args, const ql_attn *a, ql_dtype dtype);
ql_status cu_attention_dx90(const ql_queue *q, const attn_args *args, const ql_attn *a, ql_dtype dtype);

#endif
