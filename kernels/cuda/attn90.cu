/* Flash attention's forward on Hopper's warpgroup products, for compute capability 9.0 alone (this file is compiled for
 * sm_90a and nothing else). */
#include "kernels/cuda/attn90.h"

/* ---- forward: 128 queries of one head, 64 a consumer, against 128 keys at a time -------------------- */

template <int DTYPE_, int DP_>
struct fwd90 {
    typedef regs90<40, 232> REGS;
    enum { DTYPE = DTYPE_, DP = DP_, BM = 128, BN = 128, STAGES = 3, Q = BM * DP * 2, KV = BN * DP * 2 };
    enum { BARS = 2 + 4 * STAGES, BYTES = Q + 2 * STAGES * KV + BARS * 8 + 1024 };
};
template <class C>
struct fwd_smem {
    unsigned q, k, v, bars;
    __device__ explicit fwd_smem(const void *memory)
    {
        q = (smem_address(memory) + 1023) & ~1023u;
        k = q + C::Q, v = k + C::STAGES * C::KV, bars = v + C::STAGES * C::KV;
    }
    __device__ unsigned full_q() const { return bars; }
    __device__ unsigned empty_q() const { return bars + 8; }
    __device__ unsigned full_k(int s) const { return bars + 16 + 8 * s; }
    __device__ unsigned full_v(int s) const { return full_k(C::STAGES + s); }
    __device__ unsigned empty_k(int s) const { return full_k(2 * C::STAGES + s); }
    __device__ unsigned empty_v(int s) const { return full_k(3 * C::STAGES + s); }
};

template <class C>
static __device__ __forceinline__ void fwd_produce(const attn_args &a, const fwd_smem<C> &s, int heads, int docs)
{
    flight f = {0, 0};
    unsigned n = 0, pieces = 0; /* tiles and pieces so far: they give stage and parity */
    q_work w;
    for (int round = 0; q_next<C>(a, heads, docs, round, &w); round++) {
        if (!w.live || w.last < w.first) continue;
        const char *kp = (const char *)a.k + (w.doc.k0 * a.k_ld + w.kv * a.d) * 2;
        const char *vp = (const char *)a.v + (w.doc.k0 * a.v_ld + w.kv * a.d) * 2;
        const char *qp = (const char *)a.q + (w.doc.q0 * a.q_ld + w.h * a.d) * 2;
        flight_wait(f, s.empty_q(), (pieces & 1) ^ 1);
        panels_load<C::DP, C::BM>(s.q, qp, a.q_ld, w.m0, w.doc.q_len, a.d);
        flight_add(f, s.full_q());
        pieces++;
        for (int tile = w.last; tile >= w.first; tile--, n++) {
            int st = (int)(n % C::STAGES);
            unsigned parity = (n / C::STAGES & 1) ^ 1;
            flight_wait(f, s.empty_k(st), parity);
            panels_load<C::DP, C::BN>(s.k + st * C::KV, kp, a.k_ld, tile * C::BN, w.doc.k_len, a.d);
            flight_add(f, s.full_k(st));
            flight_wait(f, s.empty_v(st), parity);
            panels_load<C::DP, C::BN>(s.v + st * C::KV, vp, a.v_ld, tile * C::BN, w.doc.k_len, a.d);
            flight_add(f, s.full_v(st));
        }
    }
    flight_flush(f);
}

/* s ← exp(scale·s − max), rows g and g + 8; old ← what earlier sums and outputs are multiplied by. */
template <class C>
static __device__ __forceinline__ void fwd_softmax(float (&s)[C::BN / 2], const doc_view &v, int i0, int j0, float scale2,
                                                   float top[2], float sum[2], float old[2])
{
    int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if (!sees_all(v, i0, 16, j0, C::BN)) {
#pragma unroll
        for (int n = 0; n < C::BN / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (!sees(v, i0 + g + e / 2 * 8, j0 + n * 8 + 2 * t + e % 2)) s[4 * n + e] = -INFINITY;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float mx = top[half], l = 0;
#pragma unroll
        for (int n = 0; n < C::BN / 8; n++) mx = fmaxf(mx, fmaxf(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]));
        mx = fmaxf(mx, __shfl_xor_sync(0xffffffffu, mx, 1));
        mx = fmaxf(mx, __shfl_xor_sync(0xffffffffu, mx, 2));
        float base = mx == -INFINITY ? 0.f : mx * scale2;
        old[half] = exp2_fast(top[half] * scale2 - base);
        top[half] = mx;
#pragma unroll
        for (int n = 0; n < C::BN / 8; n++)
#pragma unroll
            for (int e = 4 * n + 2 * half; e < 4 * n + 2 * half + 2; e++) {
                s[e] = exp2_fast(fmaf(s[e], scale2, -base));
                l += s[e];
            }
        sum[half] = sum[half] * old[half] + l;
    }
}

/* The next tile's scores are under way while this tile's weights multiply v. */
template <class C>
static __device__ __forceinline__ void fwd_consume(const attn_args &a, const fwd_smem<C> &sm, int heads, int docs, int mine)
{
    constexpr int DP = C::DP, BN = C::BN;
    int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = (int)threadIdx.x / 32 % 4;
    unsigned n = 0, pieces = 0;
    float scale2 = a.scale * LOG2E;
    q_work w;
    for (int round = 0; q_next<C>(a, heads, docs, round, &w); round++) {
        if (!w.live) continue;
        int i0 = w.m0 + mine * 64 + warp * 16;
        float s[BN / 2], o[DP / 2], top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0}, old[2];
        unsigned p[BN / 4], sq = sm.q + mine * 64 * 128;
#pragma unroll
        for (int i = 0; i < DP / 2; i++) o[i] = 0;
        if (w.last >= w.first) {
            int st = (int)(n % C::STAGES);
            bar_wait(sm.full_q(), pieces++ & 1);
            bar_wait(sm.full_k(st), n / C::STAGES & 1);
            wg_begin();
            product_nt<C::DTYPE, DP, C::BM, BN>(s, sq, sm.k + st * C::KV);
            wg_commit();
            wg_wait<0>();
            wg_done(s);
            release(sm.empty_k(st));
            if (w.last == w.first) release(sm.empty_q());
            fwd_softmax<C>(s, w.doc, i0, w.last * BN, scale2, top, sum, old);
            round_pairs<C::DTYPE, BN>(p, s);
            for (int tile = w.last - 1; tile >= w.first; tile--, n++) {
                int here = (int)(n % C::STAGES), next = (int)((n + 1) % C::STAGES);
                bar_wait(sm.full_k(next), (n + 1) / C::STAGES & 1);
                wg_begin();
                product_nt<C::DTYPE, DP, C::BM, BN>(s, sq, sm.k + next * C::KV);
                wg_commit();
                bar_wait(sm.full_v(here), n / C::STAGES & 1);
                wg_begin();
                product_nn<C::DTYPE, DP, BN>(o, p, sm.v + here * C::KV);
                wg_commit();
                wg_wait<1>();
                wg_done(s);
                release(sm.empty_k(next));
                if (tile == w.first) release(sm.empty_q());
                fwd_softmax<C>(s, w.doc, i0, tile * BN, scale2, top, sum, old);
                wg_wait<0>();
                wg_done(o);
                release(sm.empty_v(here));
#pragma unroll
                for (int i = 0; i < DP / 2; i++) o[i] *= old[i / 2 % 2];
                round_pairs<C::DTYPE, BN>(p, s);
            }
            st = (int)(n % C::STAGES);
            bar_wait(sm.full_v(st), n / C::STAGES & 1);
            wg_begin();
            product_nn<C::DTYPE, DP, BN>(o, p, sm.v + st * C::KV);
            wg_commit();
            wg_wait<0>();
            wg_done(o);
            release(sm.empty_v(st));
            n++;
        }
        float by[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float l = sum[half];
            int i = i0 + half * 8 + g;
            l += __shfl_xor_sync(0xffffffffu, l, 1);
            l += __shfl_xor_sync(0xffffffffu, l, 2);
            by[half] = l > 0 ? 1.f / l : 0.f;
            if (t == 0 && i < w.doc.q_len)
                a.lse[(w.doc.q0 + i) * a.lse_ld + w.h] = l > 0 ? top[half] * a.scale + __logf(l) : -INFINITY;
        }
        rows_store<C::DTYPE, DP>((char *)a.o + (w.doc.q0 * a.o_ld + w.h * a.d) * 2, a.o_ld, i0, w.doc.q_len, a.d, o, by);
    }
}

template <class C>
static __global__ void __launch_bounds__(THREADS, 1) attn90_fwd(const __grid_constant__ attn_args a, int heads, int docs)
{
    cu_ops_ahead();
    extern __shared__ unsigned char memory[];
    fwd_smem<C> s(memory);
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::BARS; i++) /* full_q, empty_q, full_k and full_v, empty_k and empty_v */
            bar_init(s.bars + 8 * i, i == 0 || (i >= 2 && i < 2 + 2 * C::STAGES) ? 128 : CONSUMER_WARPS);
    }
    __syncthreads();
    int wg = warpgroup();
    if (wg == 0) {
        regs_down<C::REGS::FEW>();
        fwd_produce<C>(a, s, heads, docs);
    } else {
        regs_up<C::REGS::MANY>();
        fwd_consume<C>(a, s, heads, docs, wg - 1);
    }
}

template <class C>
static ql_status run_fwd(const ql_queue *q, attn_args args, const ql_attn *a)
{
    args.tiles = (int)ql_ceil_div(a->q_max, C::BM);
    int64_t items = a->heads * a->docs * args.tiles;
    if (items >= (int64_t)1 << 30) QL_FAIL(QL_EINVAL, "cuda: attention over %lld tiles is too much for one call", (long long)items);
    return cu_launch_early(q, "attention", attn90_fwd<C>, (unsigned)ql_min64(items, q->stream->dev->sms), THREADS, C::BYTES, args,
                           (int)a->heads, (int)a->docs);
}

ql_status cu_attention90(const ql_queue *q, const attn_args *args, const ql_attn *a, ql_dtype dtype)
{
    bool small = a->head_dim <= 64;
    if (dtype == QL_F16)
        return small ? run_fwd<fwd90<QL_F16, 64>>(q, *args, a) : run_fwd<fwd90<QL_F16, 128>>(q, *args, a);
    return small ? run_fwd<fwd90<QL_BF16, 64>>(q, *args, a) : run_fwd<fwd90<QL_BF16, 128>>(q, *args, a);
}
