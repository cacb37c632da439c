/* RMSNorm, its gradient, RoPE. */
#include "kernels/cuda/cu.h"

/* A team of `team` threads (a power of two) holds one group of C columns in registers, NC chunks of 8 a thread (1, some or
 * most): a warp as long as that is enough, so that nothing waits for a barrier; else a block. The shape and the dtypes alone decide
 * team and NC, hence the order of the sums. Wider groups are read twice. */
enum { SMALL = 128, WIDEST = 512 };

struct norm_shape {
    int team, nc, threads; /* nc 0: too wide to be held */
};

static norm_shape norm_plan(int64_t c, int some, int most)
{
    norm_shape s = {1, 1, SMALL};
    int64_t chunks = ql_ceil_div(c, 8);
    while (s.team < 32 && s.team < chunks) s.team *= 2;
    if (s.team < chunks) s.nc = some;
    if (some * s.team < chunks) s.nc = most;
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

/* Which group this team has, and where it starts. */
struct norm_place {
    int lane;
    bool live;
    int64_t row, col;
};
static __device__ __forceinline__ norm_place place_of(int c, int groups, int64_t total, int team)
{
    norm_place p;
    int64_t g = (int64_t)blockIdx.x * (blockDim.x / team) + threadIdx.x / team;
    p.lane = (int)threadIdx.x & (team - 1), p.live = g < total;
    p.row = g / groups, p.col = (g - p.row * groups) * c;
    return p;
}
static __device__ __forceinline__ cu_view weight_view(const float *w)
{
    cu_view t = {(void *)w, 0, QL_F32, ((uintptr_t)w & 15) == 0};
    return t;
}

/* DT: the dtype of every tensor but w, known to the compiler; ANY: told at run time, one by one. */
enum { ANY = -1 };

template <int NC, int DT>
static __global__ void __launch_bounds__(WIDEST)
    norm_fwd(cu_view y, cu_view x, const float *__restrict__ w, int c, int groups, int64_t total, int team, float eps)
{
    __shared__ float part[WIDEST / 32];
    norm_place p = place_of(c, groups, total, team);
    cu_view wt = weight_view(w);
    cu_raw r[NC];
    float s = 0, v[8];
    if (DT != ANY) x.dtype = y.dtype = DT;
    if (groups > 1 && c % 8) x.vec = 0, y.vec = 0;
#pragma unroll
    for (int k = 0; k < NC; k++) {
        int j = (k * team + p.lane) * 8;
        r[k] = cu_load(x, p.row * x.ld + p.col + j, p.live ? c - j : 0);
    }
#pragma unroll
    for (int k = 0; k < NC; k++) {
        cu_unpack(v, r[k], x.dtype);
#pragma unroll
        for (int e = 0; e < 8; e++) s = fmaf(v[e], v[e], s);
    }
    float inv = rsqrtf(team_sum(s, team, part) / (float)c + eps);
#pragma unroll
    for (int k = 0; k < NC; k++) {
        int j = (k * team + p.lane) * 8;
        float ww[8];
        if (!p.live || j >= c) continue;
        cu_unpack(ww, cu_load(wt, j, c - j), QL_F32);
        cu_unpack(v, r[k], x.dtype);
#pragma unroll
        for (int e = 0; e < 8; e++) v[e] = ww[e] * cu_round(v[e] * inv, y.dtype);
        cu_store(y, p.row * y.ld + p.col + j, v, c - j);
    }
}

static __global__ void __launch_bounds__(WIDEST)
    norm_fwd_wide(cu_view y, cu_view x, const float *__restrict__ w, int c, int groups, int64_t total, float eps)
{
    __shared__ float part[WIDEST / 32];
    norm_place p = place_of(c, groups, total, WIDEST);
    cu_view wt = weight_view(w);
    float s = 0, v[8], ww[8];
    if (groups > 1 && c % 8) x.vec = 0, y.vec = 0;
    for (int j = p.lane * 8; j < c; j += WIDEST * 8) {
        cu_unpack(v, cu_load(x, p.row * x.ld + p.col + j, c - j), x.dtype);
#pragma unroll
        for (int e = 0; e < 8; e++) s = fmaf(v[e], v[e], s);
    }
    float inv = rsqrtf(team_sum(s, WIDEST, part) / (float)c + eps);
    for (int j = p.lane * 8; j < c; j += WIDEST * 8) {
        cu_unpack(ww, cu_load(wt, j, c - j), QL_F32);
        cu_unpack(v, cu_load(x, p.row * x.ld + p.col + j, c - j), x.dtype);
#pragma unroll
        for (int e = 0; e < 8; e++) v[e] = ww[e] * cu_round(v[e] * inv, y.dtype);
        cu_store(y, p.row * y.ld + p.col + j, v, c - j);
    }
}

/* With A = Σ x² and B = Σ x∘w∘dy: i = 1/√(A/C + eps), dx = [dres +] i·(w∘dy − x·i·i·B/C). dres is read before the sums
 * are known, so that its way is not waited for. */
template <int NC, int DT>
static __global__ void __launch_bounds__(WIDEST)
    norm_bwd(cu_view dx, cu_view dy, cu_view x, const float *__restrict__ w, cu_view dres, int c, int groups,
             int64_t total, int team, float eps)
{
    __shared__ float part_a[WIDEST / 32], part_b[WIDEST / 32];
    norm_place p = place_of(c, groups, total, team);
    cu_view wt = weight_view(w);
    cu_raw rx[NC], rd[NC], rr[NC];
    float a = 0, b = 0, v[8], d[8], ww[8];
    if (DT != ANY) x.dtype = dx.dtype = dy.dtype = dres.dtype = DT;
    if (groups > 1 && c % 8) x.vec = 0, dx.vec = 0, dy.vec = 0, dres.vec = 0;
#pragma unroll
    for (int k = 0; k < NC; k++) {
        int j = (k * team + p.lane) * 8, n = p.live ? c - j : 0;
        rx[k] = cu_load(x, p.row * x.ld + p.col + j, n);
        rd[k] = cu_load(dy, p.row * dy.ld + p.col + j, n);
        rr[k] = cu_load(dres, p.row * dres.ld + p.col + j, dres.p ? n : 0);
    }
#pragma unroll
    for (int k = 0; k < NC; k++) {
        int j = (k * team + p.lane) * 8;
        cu_unpack(ww, cu_load(wt, j, c - j), QL_F32);
        cu_unpack(v, rx[k], x.dtype), cu_unpack(d, rd[k], dy.dtype);
#pragma unroll
        for (int e = 0; e < 8; e++) a = fmaf(v[e], v[e], a), b = fmaf(v[e], ww[e] * d[e], b);
    }
    a = team_sum(a, team, part_a);
    b = team_sum(b, team, part_b);
    float inv = rsqrtf(a / (float)c + eps), f = inv * inv * (b / (float)c);
#pragma unroll
    for (int k = 0; k < NC; k++) {
        int j = (k * team + p.lane) * 8;
        float o[8];
        if (!p.live || j >= c) continue;
        cu_unpack(ww, cu_load(wt, j, c - j), QL_F32);
        cu_unpack(o, rr[k], dres.dtype), cu_unpack(v, rx[k], x.dtype), cu_unpack(d, rd[k], dy.dtype);
#pragma unroll
        for (int e = 0; e < 8; e++) o[e] += inv * (ww[e] * d[e] - v[e] * f);
        cu_store(dx, p.row * dx.ld + p.col + j, o, c - j);
    }
}

static __global__ void __launch_bounds__(WIDEST)
    norm_bwd_wide(cu_view dx, cu_view dy, cu_view x, const float *__restrict__ w, cu_view dres, int c, int groups,
                  int64_t total, float eps)
{
    __shared__ float part_a[WIDEST / 32], part_b[WIDEST / 32];
    norm_place p = place_of(c, groups, total, WIDEST);
    cu_view wt = weight_view(w);
    float a = 0, b = 0, v[8], d[8], ww[8], o[8];
    if (groups > 1 && c % 8) x.vec = 0, dx.vec = 0, dy.vec = 0, dres.vec = 0;
    for (int j = p.lane * 8; j < c; j += WIDEST * 8) {
        cu_unpack(ww, cu_load(wt, j, c - j), QL_F32);
        cu_unpack(v, cu_load(x, p.row * x.ld + p.col + j, c - j), x.dtype);
        cu_unpack(d, cu_load(dy, p.row * dy.ld + p.col + j, c - j), dy.dtype);
#pragma unroll
        for (int e = 0; e < 8; e++) a = fmaf(v[e], v[e], a), b = fmaf(v[e], ww[e] * d[e], b);
    }
    a = team_sum(a, WIDEST, part_a);
    b = team_sum(b, WIDEST, part_b);
    float inv = rsqrtf(a / (float)c + eps), f = inv * inv * (b / (float)c);
    for (int j = p.lane * 8; j < c; j += WIDEST * 8) {
        cu_unpack(ww, cu_load(wt, j, c - j), QL_F32);
        cu_unpack(v, cu_load(x, p.row * x.ld + p.col + j, c - j), x.dtype);
        cu_unpack(d, cu_load(dy, p.row * dy.ld + p.col + j, c - j), dy.dtype);
        cu_unpack(o, cu_load(dres, p.row * dres.ld + p.col + j, dres.p ? c - j : 0), dres.dtype);
#pragma unroll
        for (int e = 0; e < 8; e++) o[e] += inv * (ww[e] * d[e] - v[e] * f);
        cu_store(dx, p.row * dx.ld + p.col + j, o, c - j);
    }
}

/* The 16-bit dtype that all n tensors have, or ANY. */
static int one_dtype(const ql_tensor *t, int n)
{
    for (int i = 0; i < n; i++)
        if (ql_tensor_set(t[i]) && t[i].dtype != t[0].dtype) return ANY;
    return t[0].dtype == QL_F32 ? ANY : (int)t[0].dtype;
}

template <int DT, int SOME, int MOST>
static ql_status run_fwd(const ql_queue *q, ql_tensor y, ql_tensor x, ql_tensor w, float eps)
{
    int groups = (int)(x.cols / w.cols), c = (int)w.cols;
    int64_t total = x.rows * groups;
    norm_shape s = norm_plan(c, SOME, MOST);
    const float *wp = (const float *)w.data;
    if (s.nc == 0)
        return cu_launch(q, "rmsnorm", norm_fwd_wide, cu_blocks(total, 1), WIDEST, 0, cu_see(y), cu_see(x), wp, c, groups,
                         total, eps);
    auto kernel = s.nc == 1 ? norm_fwd<1, DT> : s.nc == SOME ? norm_fwd<SOME, DT> : norm_fwd<MOST, DT>;
    return cu_launch(q, "rmsnorm", kernel, cu_blocks(total, s.threads / s.team), (unsigned)s.threads, 0, cu_see(y),
                     cu_see(x), wp, c, groups, total, s.team, eps);
}

ql_status cu_rmsnorm(const ql_queue *q, ql_tensor y, ql_tensor x, ql_tensor w, float eps)
{
    ql_tensor all[] = {y, x};
    int dt = one_dtype(all, 2);
    return dt == QL_BF16  ? run_fwd<QL_BF16, 4, 16>(q, y, x, w, eps)
           : dt == QL_F16 ? run_fwd<QL_F16, 4, 16>(q, y, x, w, eps)
                          : run_fwd<ANY, 4, 8>(q, y, x, w, eps);
}

template <int DT, int SOME, int MOST>
static ql_status run_bwd(const ql_queue *q, ql_tensor dx, ql_tensor dy, ql_tensor x, ql_tensor w, float eps,
                         ql_tensor dres)
{
    int groups = (int)(x.cols / w.cols), c = (int)w.cols;
    int64_t total = x.rows * groups;
    norm_shape s = norm_plan(c, SOME, MOST);
    const float *wp = (const float *)w.data;
    if (s.nc == 0)
        return cu_launch(q, "rmsnorm_dx", norm_bwd_wide, cu_blocks(total, 1), WIDEST, 0, cu_see(dx), cu_see(dy), cu_see(x),
                         wp, cu_see(dres), c, groups, total, eps);
    auto kernel = s.nc == 1 ? norm_bwd<1, DT> : s.nc == SOME ? norm_bwd<SOME, DT> : norm_bwd<MOST, DT>;
    return cu_launch(q, "rmsnorm_dx", kernel, cu_blocks(total, s.threads / s.team), (unsigned)s.threads, 0, cu_see(dx),
                     cu_see(dy), cu_see(x), wp, cu_see(dres), c, groups, total, s.team, eps);
}

ql_status cu_rmsnorm_dx(const ql_queue *q, ql_tensor dx, ql_tensor dy, ql_tensor x, ql_tensor w, float eps,
                        ql_tensor dres)
{
    ql_tensor all[] = {dx, dy, x, dres};
    int dt = one_dtype(all, 4);
    return dt == QL_BF16  ? run_bwd<QL_BF16, 4, 4>(q, dx, dy, x, w, eps, dres)
           : dt == QL_F16 ? run_bwd<QL_F16, 4, 4>(q, dx, dy, x, w, eps, dres)
                          : run_bwd<ANY, 2, 2>(q, dx, dy, x, w, eps, dres);
}

/* ---- RoPE: a block has a few tokens; their sines are computed once and used by every head ---- */

enum { ROPE_THREADS = 256, ROPE_AHEAD = 2 /* pieces a thread has under way */ };

template <int DT>
static __global__ void __launch_bounds__(ROPE_THREADS)
    rope_rows(cu_view x, int heads, int half, int tokens, int64_t rows, const int *__restrict__ pos,
              const float *__restrict__ freq, float scale, float sign)
{
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
    return cu_launch(q, "rope", kernel, cu_blocks(x.rows, tokens), ROPE_THREADS,
                     (size_t)(2 * tokens * half) * sizeof(float), cu_see(x), (int)(x.cols / head_dim), half, tokens,
                     x.rows, (const int *)pos.data, (const float *)freq.data, scale, (float)sign);
}
