/* RMSNorm, its gradient, RoPE. */
#include "kernels/cuda/cu.h"

/* A team of `team` threads (a power of two) holds one group of C columns in registers, NC chunks of 8 a thread;
 * small groups share a block. The shape alone decides team and NC, hence the order of the sums. */
struct norm_shape {
    int team, nc, threads;
};

static ql_status norm_plan(int64_t c, norm_shape *out)
{
    norm_shape s = {1, 1, 256};
    int64_t chunks = ql_ceil_div(c, 8);
    while (s.team < 256 && s.team < chunks) s.team *= 2;
    while (s.nc < 4 && (int64_t)s.nc * s.team < chunks) s.nc *= 2;
    if ((int64_t)s.nc * s.team < chunks) s.team = s.threads = 512;
    if ((int64_t)s.nc * s.team < chunks)
        QL_FAIL(QL_ENOSUP, "cuda: rmsnorm of %lld columns; 16384 at most", (long long)c);
    *out = s;
    return QL_OK;
}

/* Sum over a team; `part` has one slot a warp. Every thread of the block calls it. */
static __device__ __forceinline__ float team_sum(float v, int team, float *part)
{
    if (team <= 32) {
        for (int o = team / 2; o > 0; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
        return v;
    }
    v = cu_warp_sum(v);
    int warp = (int)threadIdx.x / 32, warps = team / 32, first = warp / warps * warps;
    if (threadIdx.x % 32 == 0) part[warp] = v;
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < warps; i++) sum += part[first + i];
    return sum;
}

template <int NC>
static __global__ void __launch_bounds__(NC < 4 ? 256 : 512)
    norm_fwd(cu_view y, cu_view x, const float *__restrict__ w, int c, int groups, int64_t total, int team, float eps)
{
    __shared__ float part[32];
    int lane = (int)threadIdx.x & (team - 1);
    int64_t g = (int64_t)blockIdx.x * (blockDim.x / team) + threadIdx.x / team;
    bool live = g < total;
    int64_t row = g / groups, col = (g - row * groups) * c;
    cu_view wt = {(void *)w, 0, QL_F32, ((uintptr_t)w & 15) == 0};
    cu_raw r[NC];
    float s = 0, v[8];
    if (groups > 1 && c % 8) x.vec = 0, y.vec = 0;
#pragma unroll
    for (int k = 0; k < NC; k++) {
        int j = (k * team + lane) * 8;
        r[k] = cu_load(x, row * x.ld + col + j, live ? c - j : 0);
    }
#pragma unroll
    for (int k = 0; k < NC; k++) {
        cu_unpack(v, r[k], x.dtype);
#pragma unroll
        for (int e = 0; e < 8; e++) s = fmaf(v[e], v[e], s);
    }
    s = team_sum(s, team, part);
    float inv = rsqrtf(s / (float)c + eps);
#pragma unroll
    for (int k = 0; k < NC; k++) {
        int j = (k * team + lane) * 8;
        float ww[8];
        if (!live || j >= c) continue;
        cu_unpack(ww, cu_load(wt, j, c - j), QL_F32);
        cu_unpack(v, r[k], x.dtype);
#pragma unroll
        for (int e = 0; e < 8; e++) v[e] = ww[e] * cu_round(v[e] * inv, y.dtype);
        cu_store(y, row * y.ld + col + j, v, c - j);
    }
}

/* With A = Σ x² and B = Σ x∘w∘dy: i = 1/√(A/C + eps), dx = [dres +] i·(w∘dy − x·i·i·B/C). */
template <int NC>
static __global__ void __launch_bounds__(NC < 4 ? 256 : 512)
    norm_bwd(cu_view dx, cu_view dy, cu_view x, const float *__restrict__ w, cu_view dres, int c, int groups,
             int64_t total, int team, float eps)
{
    __shared__ float part_a[32], part_b[32];
    int lane = (int)threadIdx.x & (team - 1);
    int64_t g = (int64_t)blockIdx.x * (blockDim.x / team) + threadIdx.x / team;
    bool live = g < total;
    int64_t row = g / groups, col = (g - row * groups) * c;
    cu_view wt = {(void *)w, 0, QL_F32, ((uintptr_t)w & 15) == 0};
    cu_raw rx[NC], rd[NC];
    float a = 0, b = 0, v[8], d[8], ww[8];
    if (groups > 1 && c % 8) x.vec = 0, dx.vec = 0, dy.vec = 0, dres.vec = 0;
#pragma unroll
    for (int k = 0; k < NC; k++) {
        int j = (k * team + lane) * 8;
        rx[k] = cu_load(x, row * x.ld + col + j, live ? c - j : 0);
        rd[k] = cu_load(dy, row * dy.ld + col + j, live ? c - j : 0);
    }
#pragma unroll
    for (int k = 0; k < NC; k++) {
        int j = (k * team + lane) * 8;
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
        int j = (k * team + lane) * 8;
        float o[8] = {0};
        if (!live || j >= c) continue;
        if (dres.p) cu_unpack(o, cu_load(dres, row * dres.ld + col + j, c - j), dres.dtype);
        cu_unpack(ww, cu_load(wt, j, c - j), QL_F32);
        cu_unpack(v, rx[k], x.dtype), cu_unpack(d, rd[k], dy.dtype);
#pragma unroll
        for (int e = 0; e < 8; e++) o[e] += inv * (ww[e] * d[e] - v[e] * f);
        cu_store(dx, row * dx.ld + col + j, o, c - j);
    }
}

ql_status cu_rmsnorm(const ql_queue *q, ql_tensor y, ql_tensor x, ql_tensor w, float eps)
{
    norm_shape s = {};
    int groups = (int)(x.cols / w.cols), c = (int)w.cols;
    int64_t total = x.rows * groups;
    QL_TRY(norm_plan(c, &s));
    auto kernel = s.nc == 1 ? norm_fwd<1> : s.nc == 2 ? norm_fwd<2> : norm_fwd<4>;
    return cu_launch(q, "rmsnorm", kernel, cu_blocks(total, s.threads / s.team), (unsigned)s.threads, 0, cu_see(y),
                     cu_see(x), (const float *)w.data, c, groups, total, s.team, eps);
}

ql_status cu_rmsnorm_dx(const ql_queue *q, ql_tensor dx, ql_tensor dy, ql_tensor x, ql_tensor w, float eps,
                        ql_tensor dres)
{
    norm_shape s = {};
    int groups = (int)(x.cols / w.cols), c = (int)w.cols;
    int64_t total = x.rows * groups;
    QL_TRY(norm_plan(c, &s));
    auto kernel = s.nc == 1 ? norm_bwd<1> : s.nc == 2 ? norm_bwd<2> : norm_bwd<4>;
    return cu_launch(q, "rmsnorm_dx", kernel, cu_blocks(total, s.threads / s.team), (unsigned)s.threads, 0, cu_see(dx),
                     cu_see(dy), cu_see(x), (const float *)w.data, cu_see(dres), c, groups, total, s.team, eps);
}

/* ---- RoPE: a block per token; its sines are computed once and used by every head ---- */

enum { ROPE_THREADS = 256 };

static __global__ void __launch_bounds__(ROPE_THREADS)
    rope_rows(cu_view x, int heads, int half, const int *__restrict__ pos, const float *__restrict__ freq, float scale,
              float sign)
{
    extern __shared__ float table[]; /* (half) cos, (half) sin */
    int64_t row = blockIdx.x, base = row * x.ld;
    float p = (float)pos[row];
    for (int i = (int)threadIdx.x; i < half; i += ROPE_THREADS) {
        float s, c;
        sincosf(__fmul_rn(p, freq[i]), &s, &c);
        table[i] = c * scale, table[half + i] = s * sign * scale;
    }
    __syncthreads();
    int per = (half + 7) / 8;
    if (half % 8) x.vec = 0;
    for (int i = (int)threadIdx.x; i < heads * per; i += ROPE_THREADS) {
        int h = i / per, j = (i - h * per) * 8, n = half - j;
        int64_t at = base + (int64_t)h * 2 * half + j;
        float a[8], b[8];
        cu_raw ra = cu_load(x, at, n), rb = cu_load(x, at + half, n);
        cu_unpack(a, ra, x.dtype), cu_unpack(b, rb, x.dtype);
#pragma unroll
        for (int e = 0; e < 8; e++) {
            if (e >= n) break;
            float c = table[j + e], s = table[half + j + e], lo = a[e];
            a[e] = lo * c - b[e] * s;
            b[e] = b[e] * c + lo * s;
        }
        cu_store(x, at, a, n);
        cu_store(x, at + half, b, n);
    }
}

ql_status cu_rope(const ql_queue *q, ql_tensor x, int64_t head_dim, ql_tensor pos, ql_tensor freq, float scale,
                  int sign)
{
    int half = (int)(head_dim / 2);
    return cu_launch(q, "rope", rope_rows, (unsigned)x.rows, ROPE_THREADS, (size_t)head_dim * sizeof(float), cu_see(x),
                     (int)(x.cols / head_dim), half, (const int *)pos.data, (const float *)freq.data, scale,
                     (float)sign);
}
