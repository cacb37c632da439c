/* Flash attention on tensor cores (m16n8k16, on sm_75 m16n8k8): forward, and backward as two kernels, one that owns
 * rows of dQ and one that owns rows of dK and dV, so that nothing is added by more than one block. */
#include "kernels/cuda/attn.h"

/* ---- forward -------------------------------------------------------------------------------------- */

/* WARPS·16·MT queries of one head against BN keys at a time. Shared memory: q, then STAGES × (k, v). */
template <int DTYPE_, int DP_, int MT_, int BN_, int WARPS_, int STAGES_, int SM75_>
struct config {
    enum {
        DTYPE = DTYPE_, DP = DP_, MT = MT_, BN = BN_, WARPS = WARPS_, STAGES = STAGES_, SM75 = SM75_,
        BM = WARPS_ * 16 * MT_, THREADS = WARPS_ * 32,
    };
};

template <class C>
static __device__ __forceinline__ void fwd_body(const attn_args &a)
{
    extern __shared__ __align__(1024) unsigned char memory[];
    constexpr int DP = C::DP, MT = C::MT, BN = C::BN, NT = BN / 8, ROW = DP * 2;
    int h = (int)blockIdx.x, kv = h / a.group, m0 = (int)(gridDim.z - 1 - blockIdx.z) * C::BM;
    doc_view v = doc_of(a, (int)blockIdx.y);
    if (m0 >= v.q_len) return;
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int wrow = warp * 16 * MT, i0 = m0 + wrow;
    const char *qp = (const char *)a.q + (v.q0 * a.q_ld + h * a.d) * 2;
    const char *kp = (const char *)a.k + (v.k0 * a.k_ld + kv * a.d) * 2;
    const char *vp = (const char *)a.v + (v.k0 * a.v_ld + kv * a.d) * 2;
    unsigned sq = smem_address(memory), sk = sq + C::BM * ROW;
    auto load = [&](int tile, int stage) {
        unsigned to = sk + stage * 2 * BN * ROW;
        tile_load<DP, BN, C::THREADS>(to, kp, a.k_ld, tile * BN, v.k_len, a.d);
        tile_load<DP, BN, C::THREADS>(to + BN * ROW, vp, a.v_ld, tile * BN, v.k_len, a.d);
    };
    int hi = min(v.k_len, min(m0 + C::BM, v.q_len) + v.off), lo = max(0, m0 + v.off - v.window + 1);
    int last = hi > lo ? (hi - 1) / BN : -1, first = hi > lo ? lo / BN : 0;

    float o[MT][DP / 8][4], top[MT][2], sum[MT][2];
#pragma unroll
    for (int m = 0; m < MT; m++) {
        top[m][0] = top[m][1] = -INFINITY, sum[m][0] = sum[m][1] = 0;
#pragma unroll
        for (int n = 0; n < DP / 8; n++) o[m][n][0] = o[m][n][1] = o[m][n][2] = o[m][n][3] = 0;
    }
    tile_load<DP, C::BM, C::THREADS>(sq, qp, a.q_ld, m0, v.q_len, a.d);
    if (C::STAGES == 2 && last >= first) load(last, last & 1);
    float scale2 = a.scale * LOG2E;
    for (int tile = last; tile >= first; tile--) {
        int stage = C::STAGES == 2 ? tile & 1 : 0;
        if (C::STAGES == 1) {
            if (tile < last) __syncthreads();
            load(tile, 0);
        }
        copy_wait();
        __syncthreads();
        if (C::STAGES == 2 && tile > first) load(tile - 1, (tile - 1) & 1);
        unsigned ks = sk + stage * 2 * BN * ROW;
        float s[MT][NT][4] = {};
        tile_nt<C::DTYPE, DP, MT, NT>(s, sq, wrow, ks, 0);
        if (!sees_all(v, i0, 16 * MT, tile * BN, BN)) {
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        if (!sees(v, i0 + m * 16 + g + e / 2 * 8, tile * BN + n * 8 + 2 * t + e % 2))
                            s[m][n][e] = -INFINITY;
        }
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float mx = top[m][half];
#pragma unroll
                for (int n = 0; n < NT; n++) mx = fmaxf(mx, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
                mx = fmaxf(mx, __shfl_xor_sync(0xffffffffu, mx, 1));
                mx = fmaxf(mx, __shfl_xor_sync(0xffffffffu, mx, 2));
                float base = mx == -INFINITY ? 0.f : mx * scale2, old = exp2_fast(top[m][half] * scale2 - base), l = 0;
                top[m][half] = mx;
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; e++) {
                        s[m][n][e] = exp2_fast(fmaf(s[m][n][e], scale2, -base));
                        l += s[m][n][e];
                    }
                sum[m][half] = sum[m][half] * old + l;
#pragma unroll
                for (int n = 0; n < DP / 8; n++) o[m][n][2 * half] *= old, o[m][n][2 * half + 1] *= old;
            }
        tile_nn<C::DTYPE, DP, MT, NT>(o, s, ks + BN * ROW, 0);
    }
    copy_wait();
    if (last < first) __syncthreads(); /* q may still be arriving in rows that are reused below */
    float by[MT][2];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float l = sum[m][half];
            int i = i0 + m * 16 + half * 8 + g;
            l += __shfl_xor_sync(0xffffffffu, l, 1);
            l += __shfl_xor_sync(0xffffffffu, l, 2);
            by[m][half] = l > 0 ? 1.f / l : 0.f;
            if (t == 0 && i < v.q_len)
                a.lse[(v.q0 + i) * a.lse_ld + h] = l > 0 ? top[m][half] * a.scale + __logf(l) : -INFINITY;
        }
    tile_store<C::DTYPE, DP, MT>((char *)a.o + (v.q0 * a.o_ld + h * a.d) * 2, a.o_ld, i0, v.q_len, a.d, o, by, sq, wrow);
}

template <class C>
static __global__ void __launch_bounds__(C::THREADS, 2) attn_fwd(const attn_args a)
{
    if constexpr (C::SM75 == CU_SM75) fwd_body<C>(a);
}

/* ---- dQ: a block owns BM queries of one head ------------------------------------------------------- */

template <class C>
static __device__ __forceinline__ void dq_body(const attn_args &a)
{
    extern __shared__ __align__(1024) unsigned char memory[];
    constexpr int DP = C::DP, MT = C::MT, BN = C::BN, NT = BN / 8, ROW = DP * 2;
    int h = (int)blockIdx.x, kv = h / a.group, m0 = (int)(gridDim.z - 1 - blockIdx.z) * C::BM;
    doc_view v = doc_of(a, (int)blockIdx.y);
    if (m0 >= v.q_len) return;
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int wrow = warp * 16 * MT, i0 = m0 + wrow;
    const char *kp = (const char *)a.k + (v.k0 * a.k_ld + kv * a.d) * 2;
    const char *vp = (const char *)a.v + (v.k0 * a.v_ld + kv * a.d) * 2;
    unsigned sq = smem_address(memory), sg = sq + C::BM * ROW, sk = sg + C::BM * ROW;
    auto load = [&](int tile, int stage) {
        unsigned to = sk + stage * 2 * BN * ROW;
        tile_load<DP, BN, C::THREADS>(to, kp, a.k_ld, tile * BN, v.k_len, a.d);
        tile_load<DP, BN, C::THREADS>(to + BN * ROW, vp, a.v_ld, tile * BN, v.k_len, a.d);
    };
    int hi = min(v.k_len, min(m0 + C::BM, v.q_len) + v.off), lo = max(0, m0 + v.off - v.window + 1);
    int last = hi > lo ? (hi - 1) / BN : -1, first = hi > lo ? lo / BN : 0;
    float dq[MT][DP / 8][4] = {}, lse2[MT][2], delta[MT][2], by[MT][2], scale2 = a.scale * LOG2E;

    tile_load<DP, C::BM, C::THREADS>(sq, (const char *)a.q + (v.q0 * a.q_ld + h * a.d) * 2, a.q_ld, m0, v.q_len, a.d);
    tile_load<DP, C::BM, C::THREADS>(sg, (const char *)a.dout + (v.q0 * a.dout_ld + h * a.d) * 2, a.dout_ld, m0, v.q_len,
                                     a.d);
    if (C::STAGES == 2 && last >= first) load(last, last & 1);
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int i = i0 + m * 16 + half * 8 + g;
            lse2[m][half] = i < v.q_len ? a.lse[(v.q0 + i) * a.lse_ld + h] * LOG2E : 0.f;
            delta[m][half] = i < v.q_len ? a.delta[(v.q0 + i) * a.delta_ld + h] : 0.f;
            by[m][half] = a.scale;
        }
    for (int tile = last; tile >= first; tile--) {
        int stage = C::STAGES == 2 ? tile & 1 : 0;
        if (C::STAGES == 1) {
            if (tile < last) __syncthreads();
            load(tile, 0);
        }
        copy_wait();
        __syncthreads();
        if (C::STAGES == 2 && tile > first) load(tile - 1, (tile - 1) & 1);
        unsigned ks = sk + stage * 2 * BN * ROW;
        float s[MT][NT][4] = {}, ds[MT][NT][4] = {};
        tile_nt<C::DTYPE, DP, MT, NT>(s, sq, wrow, ks, 0);
        tile_nt<C::DTYPE, DP, MT, NT>(ds, sg, wrow, ks + BN * ROW, 0);
        bool all = sees_all(v, i0, 16 * MT, tile * BN, BN);
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float p = exp2_fast(fmaf(s[m][n][e], scale2, -lse2[m][e / 2]));
                    if (!all && !sees(v, i0 + m * 16 + g + e / 2 * 8, tile * BN + n * 8 + 2 * t + e % 2)) p = 0.f;
                    ds[m][n][e] = p * (ds[m][n][e] - delta[m][e / 2]);
                }
        tile_nn<C::DTYPE, DP, MT, NT>(dq, ds, ks, 0);
    }
    copy_wait();
    if (last < first) __syncthreads();
    tile_store<C::DTYPE, DP, MT>((char *)a.dq + (v.q0 * a.dq_ld + h * a.d) * 2, a.dq_ld, i0, v.q_len, a.d, dq, by, sq,
                                 wrow);
}

template <class C>
static __global__ void __launch_bounds__(C::THREADS, C::SM75 ? 1 : 2) attn_dq(const attn_args a)
{
    if constexpr (C::SM75 == CU_SM75) dq_body<C>(a);
}

/* ---- dK, dV: a block owns BM keys of one key/value head, and goes over the group's heads and their queries, BN at a
 * time. Everything is transposed: sᵀ = k qᵀ, dv += pᵀ dout, dk += dsᵀ q. ------------------------------ */

template <class C>
static __device__ __forceinline__ void dkv_body(const attn_args &a)
{
    extern __shared__ __align__(1024) unsigned char memory[];
    constexpr int DP = C::DP, MT = C::MT, BN = C::BN, NT = BN / 8, ROW = DP * 2, STAGE = 2 * BN * ROW + 2 * BN * 4;
    int kv = (int)blockIdx.x, j0 = (int)blockIdx.z * C::BM; /* the first keys are seen by most queries: they start first */
    doc_view v = doc_of(a, (int)blockIdx.y);
    if (j0 >= v.k_len) return;
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int wrow = warp * 16 * MT, jw = j0 + wrow;
    unsigned sk = smem_address(memory), sv = sk + C::BM * ROW, sq = sv + C::BM * ROW;
    int lo = max(0, j0 - v.off) / BN;
    int end = (int)min((int64_t)v.q_len, (int64_t)j0 + C::BM - 1 - v.off + v.window);
    int tiles = max(0, (end + BN - 1) / BN - lo), steps = tiles * a.group;
    auto load = [&](int step, int stage) {
        unsigned to = sq + stage * STAGE;
        int h = kv * a.group + step / tiles, i = (lo + step % tiles) * BN;
        tile_load<DP, BN, C::THREADS>(to, (const char *)a.q + (v.q0 * a.q_ld + h * a.d) * 2, a.q_ld, i, v.q_len, a.d);
        tile_load<DP, BN, C::THREADS>(to + BN * ROW, (const char *)a.dout + (v.q0 * a.dout_ld + h * a.d) * 2, a.dout_ld,
                                      i, v.q_len, a.d);
        if (threadIdx.x < 2 * BN) {
            int which = (int)threadIdx.x / BN, r = (int)threadIdx.x % BN;
            bool live = i + r < v.q_len;
            const float *from = which ? a.delta + (v.q0 + (live ? i + r : 0)) * a.delta_ld + h
                                      : a.lse + (v.q0 + (live ? i + r : 0)) * a.lse_ld + h;
            copy4(to + 2 * BN * ROW + threadIdx.x * 4, from, live);
        }
    };
    float dk[MT][DP / 8][4] = {}, dv[MT][DP / 8][4] = {}, scale2 = a.scale * LOG2E;

    tile_load<DP, C::BM, C::THREADS>(sk, (const char *)a.k + (v.k0 * a.k_ld + kv * a.d) * 2, a.k_ld, j0, v.k_len, a.d);
    tile_load<DP, C::BM, C::THREADS>(sv, (const char *)a.v + (v.k0 * a.v_ld + kv * a.d) * 2, a.v_ld, j0, v.k_len, a.d);
    if (C::STAGES == 2 && steps > 0) load(0, 0);
    for (int step = 0; step < steps; step++) {
        int stage = C::STAGES == 2 ? step & 1 : 0, i = (lo + step % tiles) * BN;
        if (C::STAGES == 1) {
            if (step) __syncthreads();
            load(step, 0);
        }
        copy_wait();
        __syncthreads();
        if (C::STAGES == 2 && step + 1 < steps) load(step + 1, (step + 1) & 1);
        unsigned qs = sq + stage * STAGE, gs = qs + BN * ROW;
        const float *rows = (const float *)(memory + (qs - sk) + 2 * BN * ROW); /* lse (BN), delta (BN) */
        float s[MT][NT][4] = {}, ds[MT][NT][4] = {};
        tile_nt<C::DTYPE, DP, MT, NT>(s, sk, wrow, qs, 0);
        bool all = sees_all(v, i, BN, jw, 16 * MT) && i + BN <= v.q_len;
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < NT; n++) {
                float2 lse = *(const float2 *)(rows + n * 8 + 2 * t);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    int ii = i + n * 8 + 2 * t + e % 2;
                    float p = exp2_fast(fmaf(s[m][n][e], scale2, -(e % 2 ? lse.y : lse.x) * LOG2E));
                    if (!all && !(ii < v.q_len && sees(v, ii, jw + m * 16 + g + e / 2 * 8))) p = 0.f;
                    s[m][n][e] = p;
                }
            }
        tile_nn<C::DTYPE, DP, MT, NT>(dv, s, gs, 0);
        tile_nt<C::DTYPE, DP, MT, NT>(ds, sv, wrow, gs, 0);
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < NT; n++) {
                float2 delta = *(const float2 *)(rows + BN + n * 8 + 2 * t);
#pragma unroll
                for (int e = 0; e < 4; e++) ds[m][n][e] = s[m][n][e] * (ds[m][n][e] - (e % 2 ? delta.y : delta.x));
            }
        tile_nn<C::DTYPE, DP, MT, NT>(dk, ds, qs, 0);
    }
    copy_wait();
    __syncthreads();
    float by[MT][2], one[MT][2];
#pragma unroll
    for (int m = 0; m < MT; m++) by[m][0] = by[m][1] = a.scale, one[m][0] = one[m][1] = 1.f;
    tile_store<C::DTYPE, DP, MT>((char *)a.dk + (v.k0 * a.dk_ld + kv * a.d) * 2, a.dk_ld, jw, v.k_len, a.d, dk, by, sk,
                                 wrow);
    tile_store<C::DTYPE, DP, MT>((char *)a.dv + (v.k0 * a.dv_ld + kv * a.d) * 2, a.dv_ld, jw, v.k_len, a.d, dv, one, sk,
                                 wrow);
}

template <class C>
static __global__ void __launch_bounds__(C::THREADS, C::SM75 ? 1 : 2) attn_dkv(const attn_args a)
{
    if constexpr (C::SM75 == CU_SM75) dkv_body<C>(a);
}

/* ---- choice --------------------------------------------------------------------------------------- */

/*                       dtype DP  MT BN WARPS STAGES SM75; the shared memory follows in bytes() */
template <int T, int DP> using fwd80 = config<T, DP, 2, 64, 4, 2, 0>;
template <int T, int DP> using dq80 = config<T, DP, 2, 32, 4, 2, 0>;
template <int T, int DP> using dkv80 = config<T, DP, 1, 64, 4, 2, 0>;
template <int DP> using fwd75 = config<QL_F16, DP, 1, 32, 4, 1, 1>;
template <int DP> using dq75 = config<QL_F16, DP, 1, 32, 4, 1, 1>;
template <int DP> using dkv75 = config<QL_F16, DP, 1, 32, 4, 1, 1>;

/* `fixed` tiles of BM rows stay, two of BN rows (and `extra` bytes) stream through every stage. */
template <class C>
static size_t bytes(int fixed, size_t extra)
{
    return (size_t)C::DP * 2 * (fixed * C::BM + 2 * C::STAGES * C::BN) + C::STAGES * extra;
}

template <class C>
static ql_status run_fwd(const ql_queue *q, const attn_args *args, const ql_attn *a)
{
    dim3 grid((unsigned)a->heads, (unsigned)a->docs, cu_blocks(a->q_max, C::BM));
    return cu_launch(q, "attention", attn_fwd<C>, grid, C::THREADS, bytes<C>(1, 0), *args);
}
template <class Q, class KV>
static ql_status run_bwd(const ql_queue *q, const attn_args *args, const ql_attn *a)
{
    dim3 q_grid((unsigned)a->heads, (unsigned)a->docs, cu_blocks(a->q_max, Q::BM));
    dim3 k_grid((unsigned)a->kv_heads, (unsigned)a->docs, cu_blocks(a->k_max, KV::BM));
    QL_TRY(cu_launch(q, "attention_dx (dk, dv)", attn_dkv<KV>, k_grid, KV::THREADS, bytes<KV>(2, 2 * KV::BN * 4), *args));
    return cu_launch(q, "attention_dx (dq)", attn_dq<Q>, q_grid, Q::THREADS, bytes<Q>(2, 0), *args);
}

/* Tensor cores want 16-bit elements the device multiplies, and rows that 16-byte loads can read. */
static bool tensor_cores(const ql_queue *q, const ql_tensor *t, int n)
{
    if (t[0].dtype == QL_F32 || (t[0].dtype == QL_BF16 && q->stream->dev->arch < 80)) return false;
    for (int i = 0; i < n; i++)
        if (t[i].ld % 8 || (uintptr_t)t[i].data % 16) return false;
    return true;
}

static ql_status grid_ok(const ql_attn *a)
{
    if (a->docs > 65535 || a->q_max > 65535LL * 64 || a->k_max > 65535LL * 64)
        QL_FAIL(QL_EINVAL, "cuda: attention over %lld documents of up to %lld tokens; 65535 documents at most",
                (long long)a->docs, (long long)ql_max64(a->q_max, a->k_max));
    return QL_OK;
}

static attn_args args_of(ql_tensor qt, ql_tensor k, ql_tensor v, ql_tensor lse, const ql_attn *a)
{
    attn_args x = {};
    x.q = qt.data, x.k = k.data, x.v = v.data, x.lse = (float *)lse.data;
    x.q_ld = qt.ld, x.k_ld = k.ld, x.v_ld = v.ld, x.lse_ld = lse.ld;
    x.q_start = a->q_start, x.q_len = a->q_len, x.k_start = a->k_start, x.k_len = a->k_len;
    x.d = (int)a->head_dim, x.group = (int)(a->heads / a->kv_heads);
    x.window = (int)ql_min64(a->window, 0x3fffffff), x.scale = a->scale;
    return x;
}

ql_status cu_attention(const ql_queue *q, ql_tensor o, ql_tensor lse, ql_tensor qt, ql_tensor k, ql_tensor v,
                       const ql_attn *a)
{
    ql_tensor all[] = {qt, k, v, o};
    QL_TRY(grid_ok(a));
    if (!tensor_cores(q, all, 4)) return cu_attention_plain(q, o, lse, qt, k, v, a);
    attn_args x = args_of(qt, k, v, lse, a);
    x.o = o.data, x.o_ld = o.ld;
#ifdef QL_SM90A
    if (q->stream->dev->arch == 90) return cu_attention90(q, &x, a, qt.dtype);
#endif
    bool small = a->head_dim <= 64;
    if (q->stream->dev->arch < 80) return small ? run_fwd<fwd75<64>>(q, &x, a) : run_fwd<fwd75<128>>(q, &x, a);
    if (qt.dtype == QL_F16)
        return small ? run_fwd<fwd80<QL_F16, 64>>(q, &x, a) : run_fwd<fwd80<QL_F16, 128>>(q, &x, a);
    return small ? run_fwd<fwd80<QL_BF16, 64>>(q, &x, a) : run_fwd<fwd80<QL_BF16, 128>>(q, &x, a);
}

ql_status cu_attention_dx(const ql_queue *q, ql_tensor dq, ql_tensor dk, ql_tensor dv, ql_tensor dout, ql_tensor o,
                          ql_tensor lse, ql_tensor delta, ql_tensor qt, ql_tensor k, ql_tensor v, const ql_attn *a)
{
    ql_tensor all[] = {qt, k, v, dout, dq, dk, dv};
    QL_TRY(grid_ok(a));
    QL_TRY(cu_attention_delta(q, delta, dout, o, a));
    if (!tensor_cores(q, all, 7)) return cu_attention_plain_dx(q, dq, dk, dv, dout, lse, delta, qt, k, v, a);
    attn_args x = args_of(qt, k, v, lse, a);
    x.dout = dout.data, x.dout_ld = dout.ld, x.delta = (const float *)delta.data, x.delta_ld = delta.ld;
    x.dq = dq.data, x.dk = dk.data, x.dv = dv.data, x.dq_ld = dq.ld, x.dk_ld = dk.ld, x.dv_ld = dv.ld;
#ifdef QL_SM90A
    if (q->stream->dev->arch == 90) return cu_attention_dx90(q, &x, a, qt.dtype);
#endif
    bool small = a->head_dim <= 64;
    if (q->stream->dev->arch < 80)
        return small ? run_bwd<dq75<64>, dkv75<64>>(q, &x, a) : run_bwd<dq75<128>, dkv75<128>>(q, &x, a);
    if (qt.dtype == QL_F16)
        return small ? run_bwd<dq80<QL_F16, 64>, dkv80<QL_F16, 64>>(q, &x, a)
                     : run_bwd<dq80<QL_F16, 128>, dkv80<QL_F16, 128>>(q, &x, a);
    return small ? run_bwd<dq80<QL_BF16, 64>, dkv80<QL_BF16, 64>>(q, &x, a)
                 : run_bwd<dq80<QL_BF16, 128>, dkv80<QL_BF16, 128>>(q, &x, a);
}
