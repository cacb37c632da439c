/* Copies, conversions, activation, dropout: one thread for 8 consecutive columns. */
#include "kernels/cuda/cu.h"

enum { THREADS = 256 };
enum { GATHER, SCATTER };

/* Several matrices in one grid: m has the blocks from first[m] on. */
struct conversions {
    cu_view out[QL_MAX_CONVERT], in[QL_MAX_CONVERT];
    cu_chunks cut[QL_MAX_CONVERT];
    unsigned first[QL_MAX_CONVERT];
    int n;
};

static __global__ void __launch_bounds__(THREADS) convert_all(const __grid_constant__ conversions all)
{
    int m = 0;
    while (m + 1 < all.n && blockIdx.x >= all.first[m + 1]) m++;
    const cu_view out = all.out[m], in = all.in[m];
    const cu_chunks cut = all.cut[m];
    unsigned i = (blockIdx.x - all.first[m]) * THREADS + threadIdx.x;
    if (i >= cut.total) return;
    unsigned row = i / cut.per_row;
    int col = (int)(i - row * cut.per_row) * 8, n = cut.cols - col;
    float v[8];
    cu_unpack(v, cu_load(in, row * in.ld + col, n), in.dtype);
    cu_store(out, row * out.ld + col, v, n);
}

ql_status cu_convert(const ql_queue *q, const ql_tensor *out, const ql_tensor *in, int n)
{
    conversions all = {};
    int64_t blocks = 0;
    for (int i = 0; i < n; i++) {
        all.out[i] = cu_see(out[i]), all.in[i] = cu_see(in[i]);
        QL_TRY(cu_cut(out[i].rows, out[i].cols, &all.cut[i]));
        all.first[i] = (unsigned)blocks;
        blocks += cu_blocks(all.cut[i].total, THREADS);
    }
    if (blocks >= (int64_t)1 << 31) QL_FAIL(QL_EINVAL, "cuda: convert of %d matrices is too large for one call", n);
    all.n = n;
    return cu_launch(q, "convert", convert_all, (unsigned)blocks, THREADS, 0, all);
}

/* GATHER: out[i] = in[index[i]], −1 gives zeros; SCATTER: out[index[i]] = in[i], −1 skips. */
template <int mode>
static __global__ void __launch_bounds__(THREADS)
    copy_rows(cu_view out, cu_view in, const int *__restrict__ index, cu_chunks cut)
{
    cu_ops_ahead();
    unsigned i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= cut.total) return;
    unsigned row = i / cut.per_row;
    int col = (int)(i - row * cut.per_row) * 8, n = cut.cols - col;
    int64_t from = row, to = row;
    float v[8] = {0};
    if (mode == GATHER) from = index[row];
    if (mode == SCATTER) to = index[row];
    if (to < 0) return;
    if (from >= 0) cu_unpack(v, cu_load(in, from * in.ld + col, n), in.dtype);
    cu_store(out, to * out.ld + col, v, n);
}

ql_status cu_gather_rows(const ql_queue *q, ql_tensor out, ql_tensor in, ql_tensor index)
{
    cu_chunks cut = {};
    QL_TRY(cu_cut(index.cols, out.cols, &cut));
    return cu_launch_early(q, "gather_rows", copy_rows<GATHER>, cu_blocks(cut.total, THREADS), THREADS, 0, cu_see(out),
                           cu_see(in), (const int *)index.data, cut);
}

ql_status cu_scatter_rows(const ql_queue *q, ql_tensor out, ql_tensor in, ql_tensor index)
{
    cu_chunks cut = {};
    QL_TRY(cu_cut(index.cols, out.cols, &cut));
    return cu_launch_early(q, "scatter_rows", copy_rows<SCATTER>, cu_blocks(cut.total, THREADS), THREADS, 0, cu_see(out),
                           cu_see(in), (const int *)index.data, cut);
}

static __global__ void __launch_bounds__(THREADS) fill_all(cu_view out, float value, cu_chunks cut)
{
    unsigned i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= cut.total) return;
    unsigned row = i / cut.per_row;
    int col = (int)(i - row * cut.per_row) * 8;
    float v[8] = {value, value, value, value, value, value, value, value};
    cu_store(out, row * out.ld + col, v, cut.cols - col);
}

ql_status cu_fill(const ql_queue *q, ql_tensor out, float value)
{
    cu_chunks cut = {};
    QL_TRY(cu_cut(out.rows, out.cols, &cut));
    return cu_launch(q, "fill", fill_all, cu_blocks(cut.total, THREADS), THREADS, 0, cu_see(out), value, cut);
}

const void *cu_any_kernel(void)
{
    return (const void *)fill_all;
}

static __global__ void __launch_bounds__(THREADS) add_all(cu_view out, cu_view a, cu_view b, cu_chunks cut)
{
    unsigned i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= cut.total) return;
    unsigned row = i / cut.per_row;
    int col = (int)(i - row * cut.per_row) * 8, n = cut.cols - col;
    float x[8], y[8];
    cu_raw ra = cu_load(a, row * a.ld + col, n), rb = cu_load(b, row * b.ld + col, n);
    cu_unpack(x, ra, a.dtype), cu_unpack(y, rb, b.dtype);
#pragma unroll
    for (int k = 0; k < 8; k++) x[k] = __fadd_rn(x[k], y[k]);
    cu_store(out, row * out.ld + col, x, n);
}

ql_status cu_add(const ql_queue *q, ql_tensor out, ql_tensor a, ql_tensor b)
{
    cu_chunks cut = {};
    QL_TRY(cu_cut(out.rows, out.cols, &cut));
    return cu_launch(q, "add", add_all, cu_blocks(cut.total, THREADS), THREADS, 0, cu_see(out), cu_see(a), cu_see(b),
                     cut);
}

static __global__ void __launch_bounds__(THREADS) find_not_finite(int *flag, cu_view in, cu_chunks cut)
{
    unsigned i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= cut.total) return;
    unsigned row = i / cut.per_row;
    int col = (int)(i - row * cut.per_row) * 8, bad = 0;
    float x[8];
    cu_unpack(x, cu_load(in, row * in.ld + col, cut.cols - col), in.dtype);
#pragma unroll
    for (int k = 0; k < 8; k++) bad |= !isfinite(x[k]);
    if (bad) atomicOr(flag, 1);
}

ql_status cu_check_finite(const ql_queue *q, ql_tensor flag, ql_tensor in)
{
    cu_chunks cut = {};
    QL_TRY(cu_cut(in.rows, in.cols, &cut));
    return cu_launch(q, "check_finite", find_not_finite, cu_blocks(cut.total, THREADS), THREADS, 0, (int *)flag.data,
                     cu_see(in), cut);
}

/* ---- SwiGLU ---- */

static __device__ __forceinline__ float sigmoid(float x)
{
    return __fdividef(1.f, 1.f + expf(-x));
}

static __global__ void __launch_bounds__(THREADS) swiglu_fwd(cu_view h, cu_view gu, cu_chunks cut)
{
    cu_ops_ahead();
    unsigned i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= cut.total) return;
    unsigned row = i / cut.per_row;
    int col = (int)(i - row * cut.per_row) * 8, n = cut.cols - col;
    cu_view ut = gu;
    float g[8], u[8];
    /* u starts cols behind g; a row of both is 16-byte aligned only if cols is too */
    ut.vec = gu.vec && cut.cols % 8 == 0;
    cu_raw rg = cu_load(gu, row * gu.ld + col, n), ru = cu_load(ut, row * gu.ld + cut.cols + col, n);
    cu_unpack(g, rg, gu.dtype), cu_unpack(u, ru, gu.dtype);
#pragma unroll
    for (int k = 0; k < 8; k++) g[k] = g[k] * sigmoid(g[k]) * u[k];
    cu_store(h, row * h.ld + col, g, n);
}

ql_status cu_swiglu(const ql_queue *q, ql_tensor h, ql_tensor gu)
{
    cu_chunks cut = {};
    QL_TRY(cu_cut(h.rows, h.cols, &cut));
    return cu_launch_early(q, "swiglu", swiglu_fwd, cu_blocks(cut.total, THREADS), THREADS, 0, cu_see(h), cu_see(gu), cut);
}

static __global__ void __launch_bounds__(THREADS)
    swiglu_bwd(cu_view dgu, cu_view dh, cu_view gu, cu_view h, cu_chunks cut)
{
    unsigned i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= cut.total) return;
    unsigned row = i / cut.per_row;
    int col = (int)(i - row * cut.per_row) * 8, n = cut.cols - col;
    cu_view ut = gu, dut = dgu;
    float g[8], u[8], d[8], act[8], dg[8], du[8];
    ut.vec = gu.vec && cut.cols % 8 == 0, dut.vec = dgu.vec && cut.cols % 8 == 0;
    cu_raw rg = cu_load(gu, row * gu.ld + col, n), ru = cu_load(ut, row * gu.ld + cut.cols + col, n),
           rd = cu_load(dh, row * dh.ld + col, n);
    cu_unpack(g, rg, gu.dtype), cu_unpack(u, ru, gu.dtype), cu_unpack(d, rd, dh.dtype);
#pragma unroll
    for (int k = 0; k < 8; k++) {
        float s = sigmoid(g[k]), silu = g[k] * s;
        act[k] = silu * u[k];
        dg[k] = d[k] * u[k] * s * (1.f + g[k] * (1.f - s));
        du[k] = d[k] * silu;
    }
    cu_store(dgu, row * dgu.ld + col, dg, n);
    cu_store(dut, row * dgu.ld + cut.cols + col, du, n);
    if (h.p) cu_store(h, row * h.ld + col, act, n);
}

ql_status cu_swiglu_dx(const ql_queue *q, ql_tensor dgu, ql_tensor dh, ql_tensor gu, ql_tensor h)
{
    cu_chunks cut = {};
    QL_TRY(cu_cut(dh.rows, dh.cols, &cut));
    return cu_launch(q, "swiglu_dx", swiglu_bwd, cu_blocks(cut.total, THREADS), THREADS, 0, cu_see(dgu), cu_see(dh),
                     cu_see(gu), cu_see(h), cut);
}

/* ---- dropout: Philox4x32-10 ---- */

/* The ten rounds' keys are made on the host: as launch arguments they cost no instruction. DT as in norm.cu. */
enum { ROUNDS = 10, ANY = -1 };
struct drop_args {
    uint2 key[ROUNDS];
    unsigned site, threshold;
    float scale;
    const int64_t *token;
};

static __device__ __forceinline__ uint4 philox(uint4 c, const uint2 key[ROUNDS])
{
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        uint64_t a = (uint64_t)0xD2511F53u * c.x, b = (uint64_t)0xCD9E8D57u * c.z;
        c = make_uint4((unsigned)(b >> 32) ^ c.y ^ key[r].x, (unsigned)b, (unsigned)(a >> 32) ^ c.w ^ key[r].y,
                       (unsigned)a);
    }
    return c;
}

template <int add, int DT>
static __global__ void __launch_bounds__(THREADS)
    drop(cu_view out, cu_view in, const __grid_constant__ drop_args a, cu_chunks cut)
{
    unsigned i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= cut.total) return;
    unsigned row = i / cut.per_row;
    int col = (int)(i - row * cut.per_row) * 8, n = cut.cols - col;
    if (DT != ANY) out.dtype = in.dtype = DT;
    cu_raw r = cu_load(in, row * in.ld + col, n), old;
    if (add) old = cu_load(out, row * out.ld + col, n);
    int64_t token = a.token[row];
    float v[8], o[8];
    cu_unpack(v, r, in.dtype);
    if (add) cu_unpack(o, old, out.dtype);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint4 c = make_uint4((unsigned)col / 4 + half, (unsigned)token, (unsigned)((uint64_t)token >> 32), a.site);
        uint4 w = philox(c, a.key);
        unsigned word[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float x = word[k] >= a.threshold ? v[4 * half + k] * a.scale : 0.f;
            v[4 * half + k] = add ? o[4 * half + k] + x : x;
        }
    }
    cu_store(out, row * out.ld + col, v, n);
}

template <int add>
static ql_status run_drop(const ql_queue *q, const char *name, ql_tensor out, ql_tensor in, const ql_drop *d)
{
    drop_args a;
    cu_chunks cut = {};
    QL_TRY(cu_cut(in.rows, in.cols, &cut));
    for (unsigned r = 0; r < ROUNDS; r++)
        a.key[r] = make_uint2((unsigned)d->seed + r * 0x9E3779B9u,
                              ((unsigned)(d->seed >> 32) ^ d->step) + r * 0xBB67AE85u);
    a.site = d->layer * 16 + d->site;
    a.threshold = (unsigned)((double)d->p * 4294967296.0);
    a.scale = 1.f / (1.f - d->p);
    a.token = d->token;
    auto kernel = in.dtype == QL_BF16 ? drop<add, QL_BF16> : in.dtype == QL_F16 ? drop<add, QL_F16> : drop<add, ANY>;
    return cu_launch(q, name, kernel, cu_blocks(cut.total, THREADS), THREADS, 0, cu_see(out), cu_see(in), a, cut);
}

ql_status cu_dropout(const ql_queue *q, ql_tensor out, ql_tensor in, const ql_drop *d)
{
    return run_drop<0>(q, "dropout", out, in, d);
}

ql_status cu_dropout_add(const ql_queue *q, ql_tensor out, ql_tensor in, const ql_drop *d)
{
    return run_drop<1>(q, "dropout_add", out, in, d);
}
