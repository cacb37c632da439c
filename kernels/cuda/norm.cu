/* RMSNorm, its gradient, RoPE. */
#include "kernels/cuda/cu.h"

/* A team of `team` threads (a power of two) holds one group of C columns in registers, NC chunks of 8 a thread (1 or `most`):
 * a warp where that is enough, so that nothing waits for a barrier; else a block. A team keeps its share of w, takes
 * group after group and reads the next one before it sums this one. The shape and the dtypes alone decide team and NC,
 * hence the order of the sums. Wider groups are read twice. */
enum { SMALL = 128, WIDEST = 512 };

struct norm_shape {
    int team, nc, threads; /* nc 0: too wide to be held */
};

static norm_shape norm_plan(int64_t c, int most)
{
    norm_shape s = {1, 1, SMALL};
    int64_t chunks = ql_ceil_div(c, 8);
    while (s.team < 32 && s.team < chunks) s.team *= 2;
    if (s.team < chunks) s.nc = most;
    while (s.team < WIDEST && (int64_t)s.nc * s.team < chunks) s.team *= 2;
    if ((int64_t)s.nc * s.team < chunks) s.nc = 0;
    if (s.team > 32) s.threads = s.team;
    return s;
}

/* Sum over a team; `part` has one slot a warp. A team of more than a warp is the whole block. */
static __device__ __forceinline__ float team_sum(float v, int team, float *part)
{
    if (team <= 32) {
        for (int o = team / 2; o > 0; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
        return v;
    }
    v = cu_warp_sum(v);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < team / 32; i++) sum += part[i];
    return sum;
}

/* Groups of c columns, `groups` in a row of the matrix, `total` in all. */
struct norm_groups {
    int c, groups, team;
    int64_t total;
};
/* Where group g starts. */
struct norm_place {
    bool live;
    int64_t row, col;
};
static __device__ __forceinline__ norm_place place_of(const norm_groups &n, int64_t g)
{
    norm_place p;
    p.live = g < n.total, p.row = n.groups > 1 ? g / n.groups : g, p.col = (g - p.row * n.groups) * n.c;
    return p;
}
static __device__ __forceinline__ cu_view weight_view(const float *w)
{
    cu_view t = {(void *)w, 0, QL_F32, ((uintptr_t)w & 15) == 0};
    return t;
}

/* DT: the dtype of every tensor but w, known to the compiler; ANY: told at run time, one by one. VEC: every row of every
 * tensor can be read 16 bytes at a time and has a multiple of 8 columns, so that no other way has to be compiled in. */
enum { ANY = -1 };

template <int VEC>
static __device__ __forceinline__ cu_raw chunk_load(cu_view t, int64_t i, int n)
{
    if (!VEC) return cu_load(t, i, n);
    cu_raw r = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
    t.vec = 1;
    return n > 0 ? cu_load(t, i, 8) : r;
}
template <int VEC>
static __device__ __forceinline__ void chunk_store(cu_view t, int64_t i, const float v[8], int n)
{
    if (VEC) t.vec = 1, n = 8;
    cu_store(t, i, v, n);
}
/* A lane's NC chunks of the group at p. */
template <int NC, int VEC>
static __device__ __forceinline__ void group_load(cu_raw (&r)[NC], const cu_view &t, const norm_groups &n, const norm_place &p,
                                                  int lane)
{
#pragma unroll
    for (int k = 0; k < NC; k++) {
        int j = (k * n.team + lane) * 8;
        r[k] = chunk_load<VEC>(t, p.row * t.ld + p.col + j, p.live ? n.c - j : 0);
    }
}
template <int NC, int VEC>
static __device__ __forceinline__ void weight_load(float (&ww)[NC][8], const float *w, const norm_groups &n, int lane)
{
    cu_view wt = weight_view(w);
#pragma unroll
    for (int k = 0; k < NC; k++) {
        int j = (k * n.team + lane) * 8;
        cu_unpack(ww[k], chunk_load<VEC>(wt, j, n.c - j), QL_F32);
    }
}

template <int NC, int DT, int VEC>
static __global__ void __launch_bounds__(WIDEST)
    norm_fwd(cu_view y, cu_view x, const float *__restrict__ w, const norm_groups n, float eps)
{
    cu_ops_ahead();
    __shared__ float part[2][WIDEST / 32];
    int per = (int)blockDim.x / n.team, lane = (int)threadIdx.x & (n.team - 1), turn = 0;
    cu_raw r[NC], next[NC];
    float ww[NC][8], v[8];
    if (DT != ANY) x.dtype = y.dtype = DT;
    if (n.groups > 1 && n.c % 8) x.vec = 0, y.vec = 0;
    int64_t first = (int64_t)blockIdx.x * per, step = (int64_t)gridDim.x * per;
    norm_place p = place_of(n, first + threadIdx.x / n.team);
    group_load<NC, VEC>(next, x, n, p, lane);
    weight_load<NC, VEC>(ww, w, n, lane);
    for (; first < n.total; first += step, turn ^= 1) {
        float s = 0;
        norm_place after = place_of(n, first + step + threadIdx.x / n.team);
#pragma unroll
        for (int k = 0; k < NC; k++) r[k] = next[k];
        group_load<NC, VEC>(next, x, n, after, lane);
#pragma unroll
        for (int k = 0; k < NC; k++) {
            cu_unpack(v, r[k], x.dtype);
#pragma unroll
            for (int e = 0; e < 8; e++) s = fmaf(v[e], v[e], s);
        }
        float inv = rsqrtf(team_sum(s, n.team, part[turn]) / (float)n.c + eps);
#pragma unroll
        for (int k = 0; k < NC; k++) {
            int j = (k * n.team + lane) * 8;
            if (!p.live || j >= n.c) continue;
            cu_unpack(v, r[k], x.dtype);
#pragma unroll
            for (int e = 0; e < 8; e++) v[e] = ww[k][e] * cu_round(v[e] * inv, y.dtype);
            chunk_store<VEC>(y, p.row * y.ld + p.col + j, v, n.c - j);
        }
        p = after;
    }
}

static __global__ void __launch_bounds__(WIDEST)
    norm_fwd_wide(cu_view y, cu_view x, const float *__restrict__ w, const norm_groups n, float eps)
{
    cu_ops_ahead();
    __shared__ float part[WIDEST / 32];
    norm_place p = place_of(n, blockIdx.x);
    cu_view wt = weight_view(w);
    int lane = (int)threadIdx.x, c = n.c;
    float s = 0, v[8], ww[8];
    if (n.groups > 1 && c % 8) x.vec = 0, y.vec = 0;
    for (int j = lane * 8; j < c; j += WIDEST * 8) {
        cu_unpack(v, cu_load(x, p.row * x.ld + p.col + j, c - j), x.dtype);
#pragma unroll
        for (int e = 0; e < 8; e++) s = fmaf(v[e], v[e], s);
    }
    float inv = rsqrtf(team_sum(s, WIDEST, part) / (float)c + eps);
    for (int j = lane * 8; j < c; j += WIDEST * 8) {
        cu_unpack(ww, cu_load(wt, j, c - j), QL_F32);
        cu_unpack(v, cu_load(x, p.row * x.ld + p.col + j, c - j), x.dtype);
#pragma unroll
        for (int e = 0; e < 8; e++) v[e] = ww[e] * cu_round(v[e] * inv, y.dtype);
        cu_store(y, p.row * y.ld + p.col + j, v, c - j);
    }
}

/* With A = Σ x² and B = Σ x∘w∘dy: i = 1/√(A/C + eps), dx = [dres +] i·(w∘dy − x·i·i·B/C). dres is read before the sums
 * are known, so that its way is not waited for. */
template <int NC, int DT, int VEC>
static __global__ void __launch_bounds__(WIDEST)
    norm_bwd(cu_view dx, cu_view dy, cu_view x, const float *__restrict__ w, cu_view dres, const norm_groups n, float eps)
{
    __shared__ float part_a[WIDEST / 32], part_b[WIDEST / 32];
    int lane = (int)threadIdx.x & (n.team - 1);
    norm_place p = place_of(n, (int64_t)blockIdx.x * (blockDim.x / n.team) + threadIdx.x / n.team), none = p;
    cu_raw rx[NC], rd[NC], rr[NC];
    float ww[NC][8], a = 0, b = 0, v[8], d[8];
    if (DT != ANY) x.dtype = dx.dtype = dy.dtype = dres.dtype = DT;
    if (n.groups > 1 && n.c % 8) x.vec = 0, dx.vec = 0, dy.vec = 0, dres.vec = 0;
    none.live = p.live && dres.p;
    group_load<NC, VEC>(rx, x, n, p, lane);
    group_load<NC, VEC>(rd, dy, n, p, lane);
    group_load<NC, VEC>(rr, dres, n, none, lane);
    weight_load<NC, VEC>(ww, w, n, lane);
#pragma unroll
    for (int k = 0; k < NC; k++) {
        cu_unpack(v, rx[k], x.dtype), cu_unpack(d, rd[k], dy.dtype);
#pragma unroll
        for (int e = 0; e < 8; e++) a = fmaf(v[e], v[e], a), b = fmaf(v[e], ww[k][e] * d[e], b);
    }
    a = team_sum(a, n.team, part_a);
    b = team_sum(b, n.team, part_b);
    float inv = rsqrtf(a / (float)n.c + eps), f = inv * inv * (b / (float)n.c);
#pragma unroll
    for (int k = 0; k < NC; k++) {
        int j = (k * n.team + lane) * 8;
        float o[8];
        if (!p.live || j >= n.c) continue;
        cu_unpack(o, rr[k], dres.dtype), cu_unpack(v, rx[k], x.dtype), cu_unpack(d, rd[k], dy.dtype);
#pragma unroll
        for (int e = 0; e < 8; e++) o[e] += inv * (ww[k][e] * d[e] - v[e] * f);
        chunk_store<VEC>(dx, p.row * dx.ld + p.col + j, o, n.c - j);
    }
}

static __global__ void __launch_bounds__(WIDEST)
    norm_bwd_wide(cu_view dx, cu_view dy, cu_view x, const float *__restrict__ w, cu_view dres, const norm_groups n,
                  float eps)
{
    __shared__ float part_a[WIDEST / 32], part_b[WIDEST / 32];
    norm_place p = place_of(n, blockIdx.x);
    cu_view wt = weight_view(w);
    int lane = (int)threadIdx.x, c = n.c;
    float a = 0, b = 0, v[8], d[8], ww[8], o[8];
    if (n.groups > 1 && c % 8) x.vec = 0, dx.vec = 0, dy.vec = 0, dres.vec = 0;
    for (int j = lane * 8; j < c; j += WIDEST * 8) {
        cu_unpack(ww, cu_load(wt, j, c - j), QL_F32);
        cu_unpack(v, cu_load(x, p.row * x.ld + p.col + j, c - j), x.dtype);
        cu_unpack(d, cu_load(dy, p.row * dy.ld + p.col + j, c - j), dy.dtype);
#pragma unroll
        for (int e = 0; e < 8; e++) a = fmaf(v[e], v[e], a), b = fmaf(v[e], ww[e] * d[e], b);
    }
    a = team_sum(a, WIDEST, part_a);
    b = team_sum(b, WIDEST, part_b);
    float inv = rsqrtf(a / (float)c + eps), f = inv * inv * (b / (float)c);
    for (int j = lane * 8; j < c; j += WIDEST * 8) {
        cu_unpack(ww, cu_load(wt, j, c - j), QL_F32);
        cu_unpack(v, cu_load(x, p.row * x.ld + p.col + j, c - j), x.dtype);
        cu_unpack(d, cu_load(dy, p.row * dy.ld + p.col + j, c - j), dy.dtype);
        cu_unpack(o, cu_load(dres, p.row * dres.ld + p.col + j, dres.p ? c - j : 0), dres.dtype);
#pragma unroll
        for (int e = 0; e < 8; e++) o[e] += inv * (ww[e] * d[e] - v[e] * f);
        cu_store(dx, p.row * dx.ld + p.col + j, o, c - j);
    }
}

/* What the kernels are compiled for: the 16-bit dtype that all tensors have, or ANY; whether all go 16 bytes at a time. */
struct norm_kind {
    int dtype, vec;
};
static norm_kind kind_of(const ql_tensor *t, int n, ql_tensor w)
{
    norm_kind k = {t[0].dtype == QL_F32 ? ANY : (int)t[0].dtype, w.cols % 8 == 0 && (uintptr_t)w.data % 16 == 0};
    for (int i = 0; i < n; i++) {
        if (!ql_tensor_set(t[i])) continue;
        if (t[i].dtype != t[0].dtype) k.dtype = ANY;
        k.vec &= cu_see(t[i]).vec;
    }
    return k;
}
static norm_groups groups_of(ql_tensor x, ql_tensor w, const norm_shape &s)
{
    norm_groups n = {(int)w.cols, (int)(x.cols / w.cols), s.team, x.rows * (x.cols / w.cols)};
    return n;
}

template <int DT, int VEC, int MOST>
static ql_status run_fwd(const ql_queue *q, ql_tensor y, ql_tensor x, ql_tensor w, float eps)
{
    norm_shape s = norm_plan(w.cols, MOST);
    norm_groups n = groups_of(x, w, s);
    const float *wp = (const float *)w.data;
    if (s.nc == 0)
        return cu_launch_early(q, "rmsnorm", norm_fwd_wide, cu_blocks(n.total, 1), WIDEST, 0, cu_see(y), cu_see(x), wp, n, eps);
    auto kernel = s.nc == 1 ? norm_fwd<1, DT, VEC> : norm_fwd<MOST, DT, VEC>;
    int fit = 0;
    QL_TRY(cu_resident(q->stream->dev, (const void *)kernel, (unsigned)s.threads, &fit));
    unsigned blocks = (unsigned)ql_min64(ql_ceil_div(n.total, s.threads / s.team), (int64_t)fit * q->stream->dev->sms);
    return cu_launch_early(q, "rmsnorm", kernel, blocks, (unsigned)s.threads, 0, cu_see(y), cu_see(x), wp, n, eps);
}

ql_status cu_rmsnorm(const ql_queue *q, ql_tensor y, ql_tensor x, ql_tensor w, float eps)
{
    ql_tensor all[] = {y, x};
    norm_kind k = kind_of(all, 2, w);
    if (!k.vec) return run_fwd<ANY, 0, 4>(q, y, x, w, eps);
    return k.dtype == QL_BF16  ? run_fwd<QL_BF16, 1, 4>(q, y, x, w, eps)
           : k.dtype == QL_F16 ? run_fwd<QL_F16, 1, 4>(q, y, x, w, eps)
                               : run_fwd<ANY, 1, 4>(q, y, x, w, eps);
}

template <int DT, int VEC, int MOST>
static ql_status run_bwd(const ql_queue *q, ql_tensor dx, ql_tensor dy, ql_tensor x, ql_tensor w, float eps,
                         ql_tensor dres)
{
    norm_shape s = norm_plan(w.cols, MOST);
    norm_groups n = groups_of(x, w, s);
    const float *wp = (const float *)w.data;
    if (s.nc == 0)
        return cu_launch(q, "rmsnorm_dx", norm_bwd_wide, cu_blocks(n.total, 1), WIDEST, 0, cu_see(dx), cu_see(dy), cu_see(x),
                         wp, cu_see(dres), n, eps);
    auto kernel = s.nc == 1 ? norm_bwd<1, DT, VEC> : norm_bwd<MOST, DT, VEC>;
    return cu_launch(q, "rmsnorm_dx", kernel, cu_blocks(n.total, s.threads / s.team), (unsigned)s.threads, 0, cu_see(dx),
                     cu_see(dy), cu_see(x), wp, cu_see(dres), n, eps);
}

ql_status cu_rmsnorm_dx(const ql_queue *q, ql_tensor dx, ql_tensor dy, ql_tensor x, ql_tensor w, float eps,
                        ql_tensor dres)
{
    ql_tensor all[] = {dx, dy, x, dres};
    norm_kind k = kind_of(all, 4, w);
    /* registers hold two chunks of wide elements; alignment does not decide how many, as it must not decide a result */
    if (!k.vec && k.dtype == ANY) return run_bwd<ANY, 0, 2>(q, dx, dy, x, w, eps, dres);
    if (!k.vec) return run_bwd<ANY, 0, 4>(q, dx, dy, x, w, eps, dres);
    return k.dtype == QL_BF16  ? run_bwd<QL_BF16, 1, 4>(q, dx, dy, x, w, eps, dres)
           : k.dtype == QL_F16 ? run_bwd<QL_F16, 1, 4>(q, dx, dy, x, w, eps, dres)
                               : run_bwd<ANY, 1, 2>(q, dx, dy, x, w, eps, dres);
}

/* ---- RoPE: a block has a few tokens; their sines are computed once and used by every head ---- */

enum { ROPE_THREADS = 256, ROPE_AHEAD = 2 /* pieces a thread has under way */ };

template <int DT>
static __global__ void __launch_bounds__(ROPE_THREADS)
    rope_rows(cu_view x, int heads, int half, int tokens, int64_t rows, const int *__restrict__ pos,
              const float *__restrict__ freq, float scale, float sign)
{
    cu_ops_ahead();
    extern __shared__ float table[]; /* (tokens, half) cos, (tokens, half) sin */
    int64_t row0 = (int64_t)blockIdx.x * tokens;
    int here = (int)(rows - row0 < tokens ? rows - row0 : tokens), per = (half + 7) / 8, of_row = heads * per;
    int items = here * of_row;
    if (DT != ANY) x.dtype = DT;
    if (half % 8) x.vec = 0;
    cu_raw lo[ROPE_AHEAD], hi[ROPE_AHEAD];
    /* Piece i: token i / of_row, then head, then 8 columns of its lower half. */
    auto at = [&](int i, int &token, int &j) {
        token = i / of_row;
        int in = i - token * of_row, h = in / per;
        j = (in - h * per) * 8;
        return (row0 + token) * x.ld + (int64_t)h * 2 * half + j;
    };
    auto load = [&](int first) {
#pragma unroll
        for (int k = 0; k < ROPE_AHEAD; k++) {
            int i = first + k * ROPE_THREADS, token, j;
            if (i >= items) break;
            int64_t p = at(i, token, j);
            lo[k] = cu_load(x, p, half - j), hi[k] = cu_load(x, p + half, half - j);
        }
    };
    load((int)threadIdx.x);
    for (int i = (int)threadIdx.x; i < here * half; i += ROPE_THREADS) {
        float s, c;
        int token = i / half;
        sincosf(__fmul_rn((float)pos[row0 + token], freq[i - token * half]), &s, &c);
        table[i] = c * scale, table[tokens * half + i] = s * sign * scale;
    }
    __syncthreads();
    for (int first = (int)threadIdx.x; first < items; first += ROPE_AHEAD * ROPE_THREADS) {
#pragma unroll
        for (int k = 0; k < ROPE_AHEAD; k++) {
            int i = first + k * ROPE_THREADS, token, j;
            if (i >= items) break;
            int64_t p = at(i, token, j);
            float a[8], b[8];
            const float *cs = table + token * half + j, *sn = cs + tokens * half;
            cu_unpack(a, lo[k], x.dtype), cu_unpack(b, hi[k], x.dtype);
#pragma unroll
            for (int e = 0; e < 8; e++) {
                float c = j + e < half ? cs[e] : 0.f, s = j + e < half ? sn[e] : 0.f, old = a[e];
                a[e] = old * c - b[e] * s;
                b[e] = b[e] * c + old * s;
            }
            cu_store(x, p, a, half - j), cu_store(x, p + half, b, half - j);
        }
        load(first + ROPE_AHEAD * ROPE_THREADS);
    }
}

ql_status cu_rope(const ql_queue *q, ql_tensor x, int64_t head_dim, ql_tensor pos, ql_tensor freq, float scale,
                  int sign)
{
    int half = (int)(head_dim / 2), tokens = 1;
    while (tokens < 4 && 2 * tokens * half <= ROPE_THREADS) tokens *= 2;
    auto kernel = x.dtype == QL_BF16 ? rope_rows<QL_BF16> : x.dtype == QL_F16 ? rope_rows<QL_F16> : rope_rows<ANY>;
    return cu_launch_early(q, "rope", kernel, cu_blocks(x.rows, tokens), ROPE_THREADS,
                           (size_t)(2 * tokens * half) * sizeof(float), cu_see(x), (int)(x.cols / head_dim), half, tokens,
                           x.rows, (const int *)pos.data, (const float *)freq.data, scale, (float)sign);
}
