/* Attention without tensor cores: F32 (parity), bf16 on a T4, and strides that 16-byte loads cannot take. A warp per
 * query and head, or per key and key/value head; simple rather than fast. */
#include "kernels/cuda/cu.h"

enum { WARPS = 4, THREADS = WARPS * 32, E = 4 /* 128 / 32 elements of a head a lane */ };

struct plain_args {
    cu_view q, k, v, o, dout, dq, dk, dv;
    float *lse, *delta;
    int64_t lse_ld, delta_ld;
    ql_attn a;
};

static __device__ __forceinline__ void row_load(float x[E], const cu_view &t, int64_t row, int head, int d)
{
#pragma unroll
    for (int e = 0; e < E; e++) {
        int j = (int)threadIdx.x % 32 + 32 * e;
        x[e] = j < d ? cu_get(t, row * t.ld + head * d + j) : 0.f;
    }
}
static __device__ __forceinline__ void row_store(const cu_view &t, int64_t row, int head, int d, const float x[E])
{
#pragma unroll
    for (int e = 0; e < E; e++) {
        int j = (int)threadIdx.x % 32 + 32 * e;
        if (j < d) cu_put(t, row * t.ld + head * d + j, x[e]);
    }
}
static __device__ __forceinline__ float dot(const float a[E], const float b[E])
{
    float s = 0;
#pragma unroll
    for (int e = 0; e < E; e++) s = fmaf(a[e], b[e], s);
    return cu_warp_sum(s);
}

static __global__ void __launch_bounds__(THREADS) plain_fwd(const plain_args p)
{
    int doc = (int)blockIdx.z, h = (int)blockIdx.y, i = (int)blockIdx.x * WARPS + (int)threadIdx.x / 32;
    int d = (int)p.a.head_dim, kv = h / (int)(p.a.heads / p.a.kv_heads), ql = p.a.q_len[doc], kl = p.a.k_len[doc];
    if (i >= ql) return;
    int last = min(i + kl - ql, kl - 1), first = p.a.window > 0 ? max(0, i + kl - ql - (int)p.a.window + 1) : 0;
    int64_t row = p.a.q_start[doc] + i, k0 = p.a.k_start[doc];
    float x[E], y[E], o[E] = {0}, m = -INFINITY, l = 0;
    row_load(x, p.q, row, h, d);
    for (int j = first; j <= last; j++) {
        row_load(y, p.k, k0 + j, kv, d);
        float s = dot(x, y) * p.a.scale, top = fmaxf(m, s), old = expf(m - top), w = expf(s - top);
        row_load(y, p.v, k0 + j, kv, d);
        l = l * old + w, m = top;
#pragma unroll
        for (int e = 0; e < E; e++) o[e] = o[e] * old + w * y[e];
    }
#pragma unroll
    for (int e = 0; e < E; e++) o[e] = l > 0 ? o[e] / l : 0.f;
    row_store(p.o, row, h, d, o);
    if (threadIdx.x % 32 == 0) p.lse[row * p.lse_ld + h] = l > 0 ? m + logf(l) : -INFINITY;
}

static __global__ void __launch_bounds__(THREADS) plain_dq(const plain_args p)
{
    int doc = (int)blockIdx.z, h = (int)blockIdx.y, i = (int)blockIdx.x * WARPS + (int)threadIdx.x / 32;
    int d = (int)p.a.head_dim, kv = h / (int)(p.a.heads / p.a.kv_heads), ql = p.a.q_len[doc], kl = p.a.k_len[doc];
    if (i >= ql) return;
    int last = min(i + kl - ql, kl - 1), first = p.a.window > 0 ? max(0, i + kl - ql - (int)p.a.window + 1) : 0;
    int64_t row = p.a.q_start[doc] + i, k0 = p.a.k_start[doc];
    float x[E], g[E], y[E], z[E], dq[E] = {0};
    float lse = p.lse[row * p.lse_ld + h], delta = p.delta[row * p.delta_ld + h];
    row_load(x, p.q, row, h, d), row_load(g, p.dout, row, h, d);
    for (int j = first; j <= last; j++) {
        row_load(y, p.k, k0 + j, kv, d), row_load(z, p.v, k0 + j, kv, d);
        float w = expf(dot(x, y) * p.a.scale - lse), ds = w * (dot(g, z) - delta) * p.a.scale;
#pragma unroll
        for (int e = 0; e < E; e++) dq[e] = fmaf(ds, y[e], dq[e]);
    }
    row_store(p.dq, row, h, d, dq);
}

static __global__ void __launch_bounds__(THREADS) plain_dkv(const plain_args p)
{
    int doc = (int)blockIdx.z, kv = (int)blockIdx.y, j = (int)blockIdx.x * WARPS + (int)threadIdx.x / 32;
    int d = (int)p.a.head_dim, each = (int)(p.a.heads / p.a.kv_heads), ql = p.a.q_len[doc], kl = p.a.k_len[doc];
    if (j >= kl) return;
    int off = kl - ql, first = max(0, j - off), last = p.a.window > 0 ? min(ql - 1, j - off + (int)p.a.window - 1) : ql - 1;
    int64_t row = p.a.k_start[doc] + j, q0 = p.a.q_start[doc];
    float y[E], z[E], x[E], g[E], dk[E] = {0}, dv[E] = {0};
    row_load(y, p.k, row, kv, d), row_load(z, p.v, row, kv, d);
    for (int h = kv * each; h < (kv + 1) * each; h++)
        for (int i = first; i <= last; i++) {
            row_load(x, p.q, q0 + i, h, d), row_load(g, p.dout, q0 + i, h, d);
            float w = expf(dot(x, y) * p.a.scale - p.lse[(q0 + i) * p.lse_ld + h]);
            float ds = w * (dot(g, z) - p.delta[(q0 + i) * p.delta_ld + h]) * p.a.scale;
#pragma unroll
            for (int e = 0; e < E; e++) dk[e] = fmaf(ds, x[e], dk[e]), dv[e] = fmaf(w, g[e], dv[e]);
        }
    row_store(p.dk, row, kv, d, dk);
    row_store(p.dv, row, kv, d, dv);
}

ql_status cu_attention_plain(const ql_queue *q, ql_tensor o, ql_tensor lse, ql_tensor qt, ql_tensor k, ql_tensor v,
                             const ql_attn *a)
{
    plain_args p = {};
    p.q = cu_see(qt), p.k = cu_see(k), p.v = cu_see(v), p.o = cu_see(o);
    p.lse = (float *)lse.data, p.lse_ld = lse.ld, p.a = *a;
    return cu_launch(q, "attention", plain_fwd, dim3(cu_blocks(a->q_max, WARPS), (unsigned)a->heads, (unsigned)a->docs),
                     THREADS, 0, p);
}

ql_status cu_attention_plain_dx(const ql_queue *q, ql_tensor dq, ql_tensor dk, ql_tensor dv, ql_tensor dout,
                                ql_tensor lse, ql_tensor delta, ql_tensor qt, ql_tensor k, ql_tensor v,
                                const ql_attn *a)
{
    plain_args p = {};
    p.q = cu_see(qt), p.k = cu_see(k), p.v = cu_see(v), p.dout = cu_see(dout);
    p.dq = cu_see(dq), p.dk = cu_see(dk), p.dv = cu_see(dv);
    p.lse = (float *)lse.data, p.lse_ld = lse.ld, p.delta = (float *)delta.data, p.delta_ld = delta.ld, p.a = *a;
    QL_TRY(cu_launch(q, "attention_dx", plain_dq,
                     dim3(cu_blocks(a->q_max, WARPS), (unsigned)a->heads, (unsigned)a->docs), THREADS, 0, p));
    return cu_launch(q, "attention_dx", plain_dkv,
                     dim3(cu_blocks(a->k_max, WARPS), (unsigned)a->kv_heads, (unsigned)a->docs), THREADS, 0, p);
}

/* A block per query; 16 lanes a head, 8 elements a lane. */
static __global__ void __launch_bounds__(THREADS)
    delta_rows(float *delta, int64_t ld, cu_view dout, cu_view o, const ql_attn a)
{
    int doc = (int)blockIdx.y, i = (int)blockIdx.x, lane = (int)threadIdx.x % 16, d = (int)a.head_dim;
    if (i >= a.q_len[doc]) return;
    int64_t row = a.q_start[doc] + i;
    for (int h0 = 0; h0 < a.heads; h0 += THREADS / 16) {
        int h = h0 + (int)threadIdx.x / 16, n = h < a.heads ? d - lane * 8 : 0;
        int64_t at = (int64_t)h * d + lane * 8;
        cu_raw ra = cu_load(dout, row * dout.ld + at, n), rb = cu_load(o, row * o.ld + at, n);
        float x[8], y[8], s = 0;
        cu_unpack(x, ra, dout.dtype), cu_unpack(y, rb, o.dtype);
#pragma unroll
        for (int e = 0; e < 8; e++) s = fmaf(x[e], y[e], s);
        for (int w = 8; w > 0; w >>= 1) s += __shfl_xor_sync(0xffffffffu, s, w);
        if (lane == 0 && h < a.heads) delta[row * ld + h] = s;
    }
}

ql_status cu_attention_delta(const ql_queue *q, ql_tensor delta, ql_tensor dout, ql_tensor o, const ql_attn *a)
{
    return cu_launch(q, "attention's delta", delta_rows, dim3((unsigned)a->q_max, (unsigned)a->docs), THREADS, 0,
                     (float *)delta.data, delta.ld, cu_see(dout), cu_see(o), *a);
}
