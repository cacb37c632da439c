/* Flash attention's gradients on Hopper's warpgroup products, for compute capability 9.0 alone: one kernel owns rows of
 * dQ, the other rows of dK and dV, so that every sum has one order. */
#include "kernels/cuda/attn90.h"

/* ---- dQ: 128 queries of one head, 64 a consumer, against 128 keys at a time ------------------------- */

/* k is read twice, first and last in a tile's time, v in the middle: k has a stage more. */
template <int DTYPE_, int DP_>
struct dq90 {
    typedef regs90<40, 232> REGS;
    enum { DTYPE = DTYPE_, DP = DP_, BM = 128, BN = 128, K_STAGES = 3, V_STAGES = 2, Q = BM * DP * 2, KV = BN * DP * 2 };
    enum { BARS = 2 + 2 * K_STAGES + 2 * V_STAGES, BYTES = 2 * Q + (K_STAGES + V_STAGES) * KV + BARS * 8 + 1024 };
};
template <class C>
struct dq_smem {
    unsigned q, g, k, v, bars; /* q and dout (g); stages of k and v */
    __device__ explicit dq_smem(const void *memory)
    {
        q = (smem_address(memory) + 1023) & ~1023u;
        g = q + C::Q, k = g + C::Q, v = k + C::K_STAGES * C::KV, bars = v + C::V_STAGES * C::KV;
    }
    /* first those that 128 copying threads arrive at, then those of the consumers' warps */
    __device__ unsigned full_q() const { return bars; }
    __device__ unsigned full_k(int s) const { return bars + 8 * (1 + s); }
    __device__ unsigned full_v(int s) const { return full_k(C::K_STAGES + s); }
    __device__ unsigned empty_q() const { return full_v(C::V_STAGES); }
    __device__ unsigned empty_k(int s) const { return empty_q() + 8 * (1 + s); }
    __device__ unsigned empty_v(int s) const { return empty_k(C::K_STAGES + s); }
};

template <class C>
static __device__ __forceinline__ void dq_produce(const attn_args &a, const dq_smem<C> &s, int heads, int docs)
{
    flight f = {0, 0};
    unsigned n = 0, pieces = 0;
    q_work w;
    for (int round = 0; q_next<C>(a, heads, docs, round, &w); round++) {
        if (!w.live || w.last < w.first) continue;
        const char *kp = (const char *)a.k + (w.doc.k0 * a.k_ld + w.kv * a.d) * 2;
        const char *vp = (const char *)a.v + (w.doc.k0 * a.v_ld + w.kv * a.d) * 2;
        const char *qp = (const char *)a.q + (w.doc.q0 * a.q_ld + w.h * a.d) * 2;
        const char *gp = (const char *)a.dout + (w.doc.q0 * a.dout_ld + w.h * a.d) * 2;
        flight_wait(f, s.empty_q(), (pieces++ & 1) ^ 1);
        panels_load<C::DP, C::BM>(s.q, qp, a.q_ld, w.m0, w.doc.q_len, a.d);
        panels_load<C::DP, C::BM>(s.g, gp, a.dout_ld, w.m0, w.doc.q_len, a.d);
        flight_add(f, s.full_q());
        for (int tile = w.last; tile >= w.first; tile--, n++) {
            int ks = (int)(n % C::K_STAGES), vs = (int)(n % C::V_STAGES);
            flight_wait(f, s.empty_k(ks), (n / C::K_STAGES & 1) ^ 1);
            panels_load<C::DP, C::BN>(s.k + ks * C::KV, kp, a.k_ld, tile * C::BN, w.doc.k_len, a.d);
            flight_add(f, s.full_k(ks));
            flight_wait(f, s.empty_v(vs), (n / C::V_STAGES & 1) ^ 1);
            panels_load<C::DP, C::BN>(s.v + vs * C::KV, vp, a.v_ld, tile * C::BN, w.doc.k_len, a.d);
            flight_add(f, s.full_v(vs));
        }
    }
    flight_flush(f);
}

/* s ← p = exp(scale·s − lse), rows g and g + 8 from query i0, keys from j0. */
template <class C>
static __device__ __forceinline__ void dq_weights(float (&s)[C::BN / 2], const doc_view &v, int i0, int j0, float scale2,
                                                  const float lse2[2])
{
    int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < C::BN / 2; i++) s[i] = exp2_fast(fmaf(s[i], scale2, -lse2[i / 2 % 2]));
    if (sees_all(v, i0, 16, j0, C::BN)) return;
#pragma unroll
    for (int i = 0; i < C::BN / 2; i++)
        if (!sees(v, i0 + g + i / 2 % 2 * 8, j0 + i / 4 * 8 + 2 * t + i % 2)) s[i] = 0.f;
}
/* w ← p∘(dp − delta), rounded. */
template <class C>
static __device__ __forceinline__ void dq_slopes(unsigned (&w)[C::BN / 4], const float (&p)[C::BN / 2],
                                                 const float (&dp)[C::BN / 2], const float delta[2])
{
#pragma unroll
    for (int i = 0; i < C::BN / 2; i += 2)
        w[i / 2] = cu_pair(p[i] * (dp[i] - delta[i / 2 % 2]), p[i + 1] * (dp[i + 1] - delta[i / 2 % 2]), C::DTYPE);
}

/* While dp is computed the exponentials are; a tile's last product goes together with the next one's first. */
template <class C>
static __device__ __forceinline__ void dq_consume(const attn_args &a, const dq_smem<C> &sm, int heads, int docs, int mine)
{
    constexpr int DP = C::DP, BN = C::BN, KS = C::K_STAGES, VS = C::V_STAGES;
    int lane = (int)threadIdx.x % 32, g = lane / 4, warp = (int)threadIdx.x / 32 % 4;
    unsigned n = 0, pieces = 0, sq = sm.q + mine * 64 * 128, sg = sm.g + mine * 64 * 128;
    float scale2 = a.scale * LOG2E, by[2] = {a.scale, a.scale};
    q_work w;
    auto k_at = [&](unsigned i) { return sm.k + (int)(i % KS) * C::KV; };
    auto v_at = [&](unsigned i) { return sm.v + (int)(i % VS) * C::KV; };
    for (int round = 0; q_next<C>(a, heads, docs, round, &w); round++) {
        if (!w.live) continue;
        int i0 = w.m0 + mine * 64 + warp * 16;
        float s[BN / 2], dp[BN / 2], dq[DP / 2], lse2[2], delta[2];
        unsigned ds[BN / 4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int i = i0 + half * 8 + g;
            lse2[half] = i < w.doc.q_len ? a.lse[(w.doc.q0 + i) * a.lse_ld + w.h] * LOG2E : 0.f;
            delta[half] = i < w.doc.q_len ? a.delta[(w.doc.q0 + i) * a.delta_ld + w.h] : 0.f;
        }
#pragma unroll
        for (int i = 0; i < DP / 2; i++) dq[i] = 0;
        if (w.last >= w.first) {
            bar_wait(sm.full_q(), pieces++ & 1);
            bar_wait(sm.full_k((int)(n % KS)), n / KS & 1);
            wg_begin();
            product_nt<C::DTYPE, DP, C::BM, BN>(s, sq, k_at(n));
            wg_commit();
            wg_wait<0>();
            wg_done(s);
            for (int tile = w.last; tile > w.first; tile--, n++) {
                bar_wait(sm.full_v((int)(n % VS)), n / VS & 1);
                wg_begin();
                product_nt<C::DTYPE, DP, C::BM, BN>(dp, sg, v_at(n));
                wg_commit();
                dq_weights<C>(s, w.doc, i0, tile * BN, scale2, lse2);
                wg_wait<0>();
                wg_done(dp);
                release(sm.empty_v((int)(n % VS)));
                dq_slopes<C>(ds, s, dp, delta);
                bar_wait(sm.full_k((int)((n + 1) % KS)), (n + 1) / KS & 1);
                wg_begin();
                product_nt<C::DTYPE, DP, C::BM, BN>(s, sq, k_at(n + 1));
                product_nn<C::DTYPE, DP, BN>(dq, ds, k_at(n));
                wg_commit();
                wg_wait<0>();
                wg_done(s), wg_done(dq);
                release(sm.empty_k((int)(n % KS)));
            }
            bar_wait(sm.full_v((int)(n % VS)), n / VS & 1);
            wg_begin();
            product_nt<C::DTYPE, DP, C::BM, BN>(dp, sg, v_at(n));
            wg_commit();
            dq_weights<C>(s, w.doc, i0, w.first * BN, scale2, lse2);
            wg_wait<0>();
            wg_done(dp);
            release(sm.empty_v((int)(n % VS))), release(sm.empty_q());
            dq_slopes<C>(ds, s, dp, delta);
            wg_begin();
            product_nn<C::DTYPE, DP, BN>(dq, ds, k_at(n));
            wg_commit();
            wg_wait<0>();
            wg_done(dq);
            release(sm.empty_k((int)(n % KS)));
            n++;
        }
        rows_store<C::DTYPE, DP>((char *)a.dq + (w.doc.q0 * a.dq_ld + w.h * a.d) * 2, a.dq_ld, i0, w.doc.q_len, a.d, dq, by);
    }
}

template <class C>
static __global__ void __launch_bounds__(THREADS, 1) attn90_dq(const __grid_constant__ attn_args a, int heads, int docs)
{
    extern __shared__ unsigned char memory[];
    dq_smem<C> s(memory);
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::BARS; i++) bar_init(s.bars + 8 * i, i < C::BARS / 2 ? 128 : CONSUMER_WARPS);
    }
    __syncthreads();
    int wg = warpgroup();
    if (wg == 0) {
        regs_down<C::REGS::FEW>();
        dq_produce<C>(a, s, heads, docs);
    } else {
        regs_up<C::REGS::MANY>();
        dq_consume<C>(a, s, heads, docs, wg - 1);
    }
}

/* ---- dK, dV: 128 keys of one key/value head, 64 a consumer, against 64 queries at a time. Everything is transposed:
 * sᵀ = k qᵀ, dv += pᵀ dout, dk += dsᵀ q. The group's query heads are dealt to a cluster of blocks, which add their sums
 * through each other's shared memory, in the blocks' order. ------------------------------------------- */

template <int DTYPE_, int DP_>
struct dkv90 {
    typedef regs90<24, 240> REGS;
    enum { DTYPE = DTYPE_, DP = DP_, BM = 128, BN = 64, STAGES = 3, KV = BM * DP * 2, Q = BN * DP * 2 };
    enum { SHARE = BM * DP * 4 };
    enum { BARS = 2 + 2 * STAGES + 2 * CONSUMER_WARPS, BYTES = 2 * KV + STAGES * (2 * Q + BN * 8) + SHARE + BARS * 8 + 1024 };
};
template <class C>
struct dkv_smem {
    unsigned k, v, q, share, rows, bars;
    __device__ explicit dkv_smem(const void *memory)
    {
        k = (smem_address(memory) + 1023) & ~1023u;
        v = k + C::KV, q = v + C::KV, share = q + C::STAGES * 2 * C::Q, rows = share + C::SHARE;
        bars = rows + C::STAGES * C::BN * 8;
    }
    __device__ unsigned q_at(unsigned n) const { return q + n % C::STAGES * 2 * C::Q; }
    __device__ unsigned g_at(unsigned n) const { return q_at(n) + C::Q; }
    __device__ unsigned rows_at(unsigned n) const { return rows + n % C::STAGES * C::BN * 8; } /* lse, then delta */
    /* barriers of 128 copying threads, of the consumers' warps, of one warp of every block of the cluster */
    __device__ unsigned full_kv() const { return bars; }
    __device__ unsigned full(unsigned n) const { return bars + 8 * (1 + n % C::STAGES); }
    __device__ unsigned empty_kv() const { return bars + 8 * (1 + C::STAGES); }
    __device__ unsigned empty(unsigned n) const { return empty_kv() + 8 * (1 + n % C::STAGES); }
    __device__ unsigned shared_full(int warp) const { return bars + 8 * (2 + 2 * C::STAGES + warp); }
    __device__ unsigned shared_empty(int warp) const { return shared_full(CONSUMER_WARPS + warp); }
};

struct dkv_work {
    doc_view doc;
    int kv, j0, lo, tiles, steps; /* query tiles from lo on, for each of this block's heads */
    bool live;
};
template <class C>
static __device__ __forceinline__ bool dkv_next(const attn_args &a, int kv_heads, int docs, int cluster, int round,
                                                dkv_work *w)
{
    int n = (int)gridDim.x / cluster, me = (int)blockIdx.x / cluster, rank = (int)blockIdx.x % cluster;
    int items = a.tiles * docs * kv_heads, item = dealt(round, n, me);
    if (round * n >= items) return false;
    /* the first keys are seen by most queries */
    int level = item / (docs * kv_heads), rest = item - level * docs * kv_heads, doc = rest / kv_heads;
    w->kv = rest - doc * kv_heads, w->j0 = level * C::BM;
    w->live = item < items;
    if (!w->live) return true;
    w->doc = doc_of(a, doc);
    w->live = w->j0 < w->doc.k_len;
    w->lo = max(0, w->j0 - w->doc.off) / C::BN;
    int end = (int)min((int64_t)w->doc.q_len, (int64_t)w->j0 + C::BM - 1 - w->doc.off + w->doc.window);
    w->tiles = max(0, (end + C::BN - 1) / C::BN - w->lo);
    w->steps = w->tiles * ((a.group - rank + cluster - 1) / cluster);
    return true;
}

template <class C>
static __device__ __forceinline__ void dkv_produce(const attn_args &a, const dkv_smem<C> &s, int kv_heads, int docs,
                                                   int cluster)
{
    flight f = {0, 0};
    unsigned n = 0, pieces = 0;
    int rank = (int)blockIdx.x % cluster, which = (int)threadIdx.x / C::BN, row = (int)threadIdx.x % C::BN;
    dkv_work w;
    for (int round = 0; dkv_next<C>(a, kv_heads, docs, cluster, round, &w); round++) {
        if (!w.live || w.steps == 0) continue;
        flight_wait(f, s.empty_kv(), (pieces++ & 1) ^ 1);
        panels_load<C::DP, C::BM>(s.k, (const char *)a.k + (w.doc.k0 * a.k_ld + w.kv * a.d) * 2, a.k_ld, w.j0, w.doc.k_len,
                                  a.d);
        panels_load<C::DP, C::BM>(s.v, (const char *)a.v + (w.doc.k0 * a.v_ld + w.kv * a.d) * 2, a.v_ld, w.j0, w.doc.k_len,
                                  a.d);
        flight_add(f, s.full_kv());
        int h = w.kv * a.group + rank;
        for (int step = 0, tile = 0; step < w.steps; step++, n++) {
            int i = (w.lo + tile) * C::BN;
            bool live = i + row < w.doc.q_len;
            int64_t at = w.doc.q0 + (live ? i + row : 0);
            const float *from = which ? a.delta + at * a.delta_ld + h : a.lse + at * a.lse_ld + h;
            flight_wait(f, s.empty(n), (n / C::STAGES & 1) ^ 1);
            panels_load<C::DP, C::BN>(s.q_at(n), (const char *)a.q + (w.doc.q0 * a.q_ld + h * a.d) * 2, a.q_ld, i,
                                      w.doc.q_len, a.d);
            panels_load<C::DP, C::BN>(s.g_at(n), (const char *)a.dout + (w.doc.q0 * a.dout_ld + h * a.d) * 2, a.dout_ld, i,
                                      w.doc.q_len, a.d);
            copy4(s.rows_at(n) + threadIdx.x * 4, from, live);
            flight_add(f, s.full(n));
            if (++tile == w.tiles) tile = 0, h += cluster;
        }
    }
    flight_flush(f);
}

/* s ← p = exp(scale·s − lse): rows are keys from j0, columns queries from i0, whose lse lies at `rows`. */
template <class C>
static __device__ __forceinline__ void dkv_weights(float (&s)[C::BN / 2], const doc_view &v, int i0, int j0, float scale2,
                                                   unsigned rows)
{
    int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < C::BN / 8; n++) {
        float2 lse = shared_pair(rows + (n * 8 + 2 * t) * 4);
        float x = -lse.x * LOG2E, y = -lse.y * LOG2E;
#pragma unroll
        for (int e = 0; e < 4; e++) s[4 * n + e] = exp2_fast(fmaf(s[4 * n + e], scale2, e % 2 ? y : x));
    }
    if (sees_all(v, i0, C::BN, j0, 16)) return;
#pragma unroll
    for (int i = 0; i < C::BN / 2; i++)
        if (!sees(v, i0 + i / 4 * 8 + 2 * t + i % 2, j0 + g + i / 2 % 2 * 8)) s[i] = 0.f;
}
/* w ← p∘(dp − delta), rounded; the queries' delta lies at `rows`. */
template <class C>
static __device__ __forceinline__ void dkv_slopes(unsigned (&w)[C::BN / 4], const float (&p)[C::BN / 2],
                                                  const float (&dp)[C::BN / 2], unsigned rows)
{
    int t = (int)threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < C::BN / 8; n++) {
        float2 delta = shared_pair(rows + (n * 8 + 2 * t) * 4);
#pragma unroll
        for (int i = 4 * n; i < 4 * n + 4; i += 2)
            w[i / 2] = cu_pair(p[i] * (dp[i] - delta.x), p[i + 1] * (dp[i + 1] - delta.y), C::DTYPE);
    }
}

/* The cluster's sum of acc, times by, as rows of `to`. A warp shares its accumulator in 2·DP/32 units (32 columns of rows g
 * or of rows g + 8), takes every cluster'th unit from the same warp of all blocks, adds and stores it. turns: how often
 * this was done before. */
template <class C>
static __device__ __forceinline__ void dkv_store(const dkv_smem<C> &sm, const float (&acc)[C::DP / 2], float by, char *to,
                                                 int64_t ld, int first, int n, int d, int cluster, unsigned &turns)
{
    constexpr int UNITS = C::DP / 16;
    const float both[2] = {by, by};
    if (cluster == 1) {
        rows_store<C::DTYPE, C::DP>(to, ld, first, n, d, acc, both);
        return;
    }
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32 - 4, rank = (int)blockIdx.x % cluster;
    unsigned mine = sm.share + warp * (UNITS * 1024) + lane * 16; /* (unit, half of its 8 values, lane, 4 values) */
    bar_wait_cluster(sm.shared_empty(warp), (turns & 1) ^ 1);
#pragma unroll
    for (int u = 0; u < UNITS; u++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const float *x = acc + u / 2 * 16 + j * 8 + u % 2 * 2;
            shared_put4(mine + u * 1024 + j * 512, make_float4(x[0], x[1], x[4], x[5]));
        }
    __syncwarp();
    if (lane < cluster) bar_arrive_at(sm.shared_full(warp), lane);
    bar_wait_cluster(sm.shared_full(warp), turns & 1);
    for (int u = rank; u < UNITS; u += cluster) {
        float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        for (int p = 0; p < cluster; p += 2) { /* two or four blocks */
            float4 x[4];
#pragma unroll
            for (int i = 0; i < 4; i++) x[i] = shared_get4(mine + u * 1024 + i % 2 * 512, p + i / 2);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float *o = v + i % 2 * 4;
                o[0] += x[i].x, o[1] += x[i].y, o[2] += x[i].z, o[3] += x[i].w;
            }
        }
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] *= by;
        int row = first + lane / 4 + u % 2 * 8;
        row_store<C::DTYPE>(to + row * ld * 2, row < n, u / 2, d, v);
    }
    __syncwarp();
    if (lane < cluster) bar_arrive_at(sm.shared_empty(warp), lane);
    turns++;
}

/* The next tile's first product is under way together with this one's last. */
template <class C>
static __device__ __forceinline__ void dkv_consume(const attn_args &a, const dkv_smem<C> &sm, int kv_heads, int docs,
                                                   int cluster, int mine)
{
    constexpr int DP = C::DP, BM = C::BM, BN = C::BN, T = C::DTYPE;
    int warp = (int)threadIdx.x / 32 % 4;
    unsigned n = 0, pieces = 0, turns = 0, sk = sm.k + mine * 64 * 128, sv = sm.v + mine * 64 * 128;
    float scale2 = a.scale * LOG2E;
    dkv_work w;
    for (int round = 0; dkv_next<C>(a, kv_heads, docs, cluster, round, &w); round++) {
        if (!w.live) continue;
        int jw = w.j0 + mine * 64 + warp * 16;
        float s[BN / 2], dp[BN / 2], dk[DP / 2], dv[DP / 2];
        unsigned p[BN / 4], ds[BN / 4];
#pragma unroll
        for (int i = 0; i < DP / 2; i++) dk[i] = dv[i] = 0;
        if (w.steps > 0) {
            bar_wait(sm.full_kv(), pieces++ & 1);
            bar_wait(sm.full(n), n / C::STAGES & 1);
            wg_begin();
            product_nt<T, DP, BM, BN>(s, sk, sm.q_at(n));
            wg_commit();
            int i0 = w.lo * BN, end = i0 + w.tiles * BN;
            for (int step = 1; step < w.steps; step++, n++) {
                wg_begin();
                product_nt<T, DP, BM, BN>(dp, sv, sm.g_at(n));
                wg_commit();
                wg_wait<1>();
                wg_done(s);
                dkv_weights<C>(s, w.doc, i0, jw, scale2, sm.rows_at(n));
                round_pairs<T, BN>(p, s);
                wg_begin();
                product_nn<T, DP, BN>(dv, p, sm.g_at(n));
                wg_commit();
                wg_wait<1>();
                wg_done(dp);
                dkv_slopes<C>(ds, s, dp, sm.rows_at(n) + BN * 4);
                bar_wait(sm.full(n + 1), (n + 1) / C::STAGES & 1);
                wg_begin();
                product_nn<T, DP, BN>(dk, ds, sm.q_at(n));
                wg_commit();
                product_nt<T, DP, BM, BN>(s, sk, sm.q_at(n + 1));
                wg_commit();
                wg_wait<1>();
                wg_done(dv), wg_done(dk);
                release(sm.empty(n));
                if ((i0 += BN) == end) i0 = w.lo * BN;
            }
            wg_begin();
            product_nt<T, DP, BM, BN>(dp, sv, sm.g_at(n));
            wg_commit();
            wg_wait<1>();
            wg_done(s);
            dkv_weights<C>(s, w.doc, i0, jw, scale2, sm.rows_at(n));
            round_pairs<T, BN>(p, s);
            wg_begin();
            product_nn<T, DP, BN>(dv, p, sm.g_at(n));
            wg_commit();
            wg_wait<1>();
            wg_done(dp);
            release(sm.empty_kv());
            dkv_slopes<C>(ds, s, dp, sm.rows_at(n) + BN * 4);
            wg_begin();
            product_nn<T, DP, BN>(dk, ds, sm.q_at(n));
            wg_commit();
            wg_wait<0>();
            wg_done(dv), wg_done(dk);
            release(sm.empty(n));
            n++;
        }
        dkv_store<C>(sm, dv, 1.f, (char *)a.dv + (w.doc.k0 * a.dv_ld + w.kv * a.d) * 2, a.dv_ld, jw, w.doc.k_len, a.d, cluster,
                     turns);
        dkv_store<C>(sm, dk, a.scale, (char *)a.dk + (w.doc.k0 * a.dk_ld + w.kv * a.d) * 2, a.dk_ld, jw, w.doc.k_len, a.d,
                     cluster, turns);
    }
}

template <class C>
static __global__ void __launch_bounds__(THREADS, 1)
    attn90_dkv(const __grid_constant__ attn_args a, int kv_heads, int docs, int cluster)
{
    extern __shared__ unsigned char memory[];
    dkv_smem<C> s(memory);
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::BARS; i++)
            bar_init(s.bars + 8 * i, i < 1 + C::STAGES ? 128 : i < 2 + 2 * C::STAGES ? CONSUMER_WARPS : (unsigned)cluster);
        bars_shown();
    }
    cluster_sync(); /* nobody arrives at a barrier that is not there yet */
    int wg = warpgroup();
    if (wg == 0) {
        regs_down<C::REGS::FEW>();
        dkv_produce<C>(a, s, kv_heads, docs, cluster);
    } else {
        regs_up<C::REGS::MANY>();
        dkv_consume<C>(a, s, kv_heads, docs, cluster, wg - 1);
    }
    cluster_sync(); /* nobody leaves while another reads its memory */
}

/* ---- choice ---- */

static ql_status items_ok(int64_t items)
{
    if (items >= (int64_t)1 << 30)
        QL_FAIL(QL_EINVAL, "cuda: attention_dx over %lld tiles is too much for one call", (long long)items);
    return QL_OK;
}

template <class C>
static ql_status run_dq(const ql_queue *q, attn_args args, const ql_attn *a)
{
    args.tiles = (int)ql_ceil_div(a->q_max, C::BM);
    int64_t items = a->heads * a->docs * args.tiles;
    QL_TRY(items_ok(items));
    return cu_launch(q, "attention_dx (dq)", attn90_dq<C>, (unsigned)ql_min64(items, q->stream->dev->sms), THREADS, C::BYTES,
                     args, (int)a->heads, (int)a->docs);
}

/* Two heads a block, as far as clusters of four allow: it depends on the group alone, as the sums' order does. */
static int cluster_of(int group)
{
    return group == 1 ? 1 : group <= 4 ? 2 : 4;
}

template <class C>
static ql_status run_dkv(const ql_queue *q, attn_args args, const ql_attn *a)
{
    static int resident[5]; /* clusters of each size that a device holds at once; asked for once */
    int cluster = cluster_of(args.group);
    args.tiles = (int)ql_ceil_div(a->k_max, C::BM);
    int64_t items = a->kv_heads * a->docs * args.tiles;
    QL_TRY(items_ok(items));
    if (items == 0) return QL_OK;
    QL_TRY(cu_use(q->stream->dev));
    QL_TRY(cu_prepare(q->stream->dev, (const void *)attn90_dkv<C>, "attention_dx (dk, dv)", THREADS, C::BYTES));
    cudaLaunchAttribute attr = {};
    cudaLaunchConfig_t cfg = {};
    attr.id = cudaLaunchAttributeClusterDimension;
    attr.val.clusterDim.x = (unsigned)cluster, attr.val.clusterDim.y = attr.val.clusterDim.z = 1;
    cfg.gridDim = dim3((unsigned)(q->stream->dev->sms / cluster * cluster)), cfg.blockDim = dim3(THREADS);
    cfg.dynamicSmemBytes = C::BYTES, cfg.stream = q->stream->s, cfg.attrs = &attr, cfg.numAttrs = 1;
    if (!resident[cluster]) {
        int n = 0;
        QL_TRY(cu_check(cudaOccupancyMaxActiveClusters(&n, attn90_dkv<C>, &cfg), "attention_dx (dk, dv)"));
        resident[cluster] = n > 0 ? n : 1;
    }
    cfg.gridDim = dim3((unsigned)(ql_min64(items, resident[cluster]) * cluster));
    return cu_check(cudaLaunchKernelEx(&cfg, attn90_dkv<C>, args, (int)a->kv_heads, (int)a->docs, cluster),
                    "attention_dx (dk, dv)");
}

template <int DTYPE, int DP>
static ql_status run_both(const ql_queue *q, const attn_args *args, const ql_attn *a)
{
    QL_TRY((run_dkv<dkv90<DTYPE, DP>>(q, *args, a)));
    return run_dq<dq90<DTYPE, DP>>(q, *args, a);
}

ql_status cu_attention_dx90(const ql_queue *q, const attn_args *args, const ql_attn *a, ql_dtype dtype)
{
    bool small = a->head_dim <= 64;
    if (dtype == QL_F16) return small ? run_both<QL_F16, 64>(q, args, a) : run_both<QL_F16, 128>(q, args, a);
    return small ? run_both<QL_BF16, 64>(q, args, a) : run_both<QL_BF16, 128>(q, args, a);
}
