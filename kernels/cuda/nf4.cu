/* Blockwise 4-bit weights: dequantise many matrices in one launch, quantise as bitsandbytes' CUDA build does. */
#include "kernels/cuda/cu.h"

enum {
    THREADS = 256,
    DEPTH = 2,                     /* independent 4-byte loads of a thread */
    TILE = THREADS * DEPTH * 8,    /* weights of a block */
    MAX_WEIGHTS = 8,
};

/* One matrix, as small as it gets: eight of them and the grid fit the 4 KB of kernel arguments. */
struct weight {
    const uint8_t *packed[QL_MAX_PARTS];
    const void *absmax[QL_MAX_PARTS];
    const float *absmax2[QL_MAX_PARTS];
    const float *code, *code2;
    void *out;
    int64_t part, ld, total;  /* total = N·K */
    unsigned cols8, magic;    /* K/8 and the multiplier that divides by it */
    int shift;
    unsigned first;           /* the first block of the grid that works on it */
    float offset;
    int8_t block_log, block2_log, state, nested;
};
struct weights {
    weight w[MAX_WEIGHTS];
    int n, cut_parts, ask; /* cut_parts: a tile may lie in two pieces; ask: not all are COMMON */
};

/* fl(fl(code2[q]·absmax2) + offset): two roundings. */
static __device__ __forceinline__ float scale_of(const weight &w, int p, unsigned block)
{
    if (!w.nested) return ((const float *)w.absmax[p])[block];
    unsigned q = ((const uint8_t *)w.absmax[p])[block];
    return __fadd_rn(__fmul_rn(__ldg(w.code2 + q), w.absmax2[p][block >> w.block2_log]), w.offset);
}

template <int OUT>
static __device__ __forceinline__ void store8(void *out, int64_t at, const float v[8])
{
    cu_view t = {out, 0, OUT, 1};
    cu_store(t, at, v, 8);
}

/* As many blocks an SM as its threads allow. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define DEQUANT_BLOCKS 4
#else
#define DEQUANT_BLOCKS 8
#endif

/* What a dequantise kernel knows beforehand: COMMON is nested scales and no rounding but the output's; else it asks. */
enum { COMMON, ASK };

/* K a multiple of 8, rows 16-byte aligned, fewer than 2³¹ weights: a thread turns 4 bytes into 8 values, DEPTH times.
 * A warp reads 128 and writes 512 consecutive bytes; 8 lanes share a scale. Everything that does not depend on another
 * load is loaded first; many small blocks do better than fewer deep ones, and than blocks that stay. */
template <int OUT, int PARTS, int KIND>
static __global__ void __launch_bounds__(THREADS, DEQUANT_BLOCKS) dequant(const __grid_constant__ weights all)
{
    __shared__ float lut[16];
    int m = 0;
    while (m + 1 < all.n && blockIdx.x >= all.w[m + 1].first) m++;
    const weight &w = all.w[m];
    unsigned first = (blockIdx.x - w.first) * (TILE / 8), chunk = first + threadIdx.x, chunks = (unsigned)(w.total / 8);
    unsigned per_part = (unsigned)(w.part / 8), p0 = PARTS > 1 ? 0 : first / per_part; /* chunks of a piece */
    bool full = first + TILE / 8 <= chunks, nested = KIND == COMMON || w.nested;
    unsigned bits[DEPTH], q[DEPTH];
    float scale[DEPTH]; /* of a nested one, first absmax2 */
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
        unsigned c = chunk + k * THREADS, p = PARTS > 1 ? c / per_part : p0, in = c - p * per_part;
        if (!full && c >= chunks) continue;
        unsigned block = in >> (w.block_log - 3);
        bits[k] = __ldcs((const unsigned *)w.packed[p] + in);
        q[k] = nested ? __ldg((const uint8_t *)w.absmax[p] + block) : 0u;
        scale[k] = nested ? __ldg(w.absmax2[p] + (block >> w.block2_log)) : __ldg((const float *)w.absmax[p] + block);
    }
    if (threadIdx.x < 16) lut[threadIdx.x] = w.code[threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
        unsigned c = chunk + k * THREADS, row = (__umulhi(c, w.magic) + c) >> w.shift, col = c - row * w.cols8;
        float v[8];
        if (!full && c >= chunks) continue;
        if (nested) scale[k] = __fadd_rn(__fmul_rn(__ldg(w.code2 + q[k]), scale[k]), w.offset);
#pragma unroll
        for (int e = 0; e < 8; e++) {
            /* byte e/2; the first weight of a byte is its high nibble */
            unsigned nibble = bits[k] >> (e / 2 * 8 + (e % 2 ? 0 : 4)) & 15;
            v[e] = __fmul_rn(lut[nibble], scale[k]);
            if (KIND == ASK) v[e] = cu_round(v[e], w.state);
        }
        store8<OUT>(w.out, (int64_t)row * w.ld + col * 8, v);
    }
}

/* Any K and alignment: a thread per weight. */
static __global__ void __launch_bounds__(THREADS) dequant_any(const __grid_constant__ weight w, int64_t cols, int dtype)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= w.total) return;
    int p = (int)(i / w.part);
    int64_t in = i - p * w.part, row = i / cols;
    unsigned byte = w.packed[p][in >> 1], nibble = in & 1 ? byte & 15 : byte >> 4;
    float v = __fmul_rn(w.code[nibble], scale_of(w, p, (unsigned)(in >> w.block_log)));
    cu_view out = {w.out, w.ld, dtype, 0};
    cu_put(out, row * w.ld + (i - row * cols), cu_round(v, w.state));
}

static weight weight_of(ql_tensor out, const ql_nf4 *n)
{
    weight w = {};
    for (int p = 0; p < n->parts; p++)
        w.packed[p] = n->packed[p], w.absmax[p] = n->absmax[p], w.absmax2[p] = n->absmax2[p];
    w.code = n->code, w.code2 = n->code2, w.out = out.data;
    w.total = n->rows * n->cols, w.ld = out.ld, w.offset = n->offset;
    w.part = n->parts > 1 ? n->part : ql_round_up(w.total, n->block); /* one piece: nothing to divide by */
    w.cols8 = (unsigned)(n->cols / 8);
    w.block_log = (int8_t)cu_log2(n->block), w.nested = n->block2 != 0;
    w.block2_log = (int8_t)(n->block2 ? cu_log2(n->block2) : 0), w.state = (int8_t)n->state;
    if (w.cols8) { /* q = (mulhi(c, magic) + c) >> shift is c / cols8 for every c < 2³¹ */
        w.shift = cu_log2(w.cols8);
        w.magic = (unsigned)(((uint64_t)1 << 32) * (((uint64_t)1 << w.shift) - w.cols8) / w.cols8 + 1);
    }
    return w;
}

static bool fast(ql_tensor out, const ql_nf4 *w)
{
    bool aligned = (uintptr_t)out.data % 16 == 0 && (size_t)out.ld * ql_dtype_size(out.dtype) % 16 == 0;
    for (int p = 0; p < w->parts; p++) aligned &= (uintptr_t)w->packed[p] % 4 == 0;
    return aligned && w->cols % 8 == 0 && w->block >= 8 && w->rows * w->cols < (int64_t)1 << 31;
}

template <int OUT>
static ql_status launch_dequant(const ql_queue *q, const weights *all, unsigned blocks)
{
    auto kernel = all->cut_parts ? (all->ask ? dequant<OUT, 2, ASK> : dequant<OUT, 2, COMMON>)
                                 : (all->ask ? dequant<OUT, 1, ASK> : dequant<OUT, 1, COMMON>);
    return cu_launch(q, "nf4_dequant", kernel, blocks, THREADS, 0, *all);
}

ql_status cu_nf4_dequant(const ql_queue *q, const ql_tensor *out, const ql_nf4 *w, int n)
{
    /* Matrices of one output dtype go together; in practice that is all of them. */
    for (int dtype = QL_F32; dtype <= QL_BF16; dtype++) {
        weights all = {};
        unsigned blocks = 0;
        for (int i = 0; i < n; i++) {
            if ((int)out[i].dtype != dtype || w[i].rows * w[i].cols == 0) continue;
            weight one = weight_of(out[i], &w[i]);
            if (!fast(out[i], &w[i])) {
                QL_TRY(cu_launch(q, "nf4_dequant", dequant_any, cu_blocks(one.total, THREADS), THREADS, 0, one,
                                 w[i].cols, dtype));
                continue;
            }
            one.first = blocks;
            blocks += cu_blocks(one.total, TILE);
            all.cut_parts |= w[i].parts > 1 && w[i].part % TILE != 0;
            all.ask |= !one.nested || (one.state != dtype && one.state != QL_F32);
            all.w[all.n++] = one;
        }
        if (!all.n) continue;
        QL_TRY(dtype == QL_F32   ? launch_dequant<QL_F32>(q, &all, blocks)
               : dtype == QL_F16 ? launch_dequant<QL_F16>(q, &all, blocks)
                                 : launch_dequant<QL_BF16>(q, &all, blocks));
    }
    return QL_OK;
}

/* ---- quantise: bitsandbytes is built with --use_fast_math, so 1/absmax and the product flush denormals ---- */

static __device__ __forceinline__ float reciprocal(float x)
{
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
static __device__ __forceinline__ float times(float x, float y)
{
    float r;
    asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
    return r;
}

/* How many thresholds lie strictly below y: midpoints of neighbouring codes. A NaN gives 0. */
static __device__ __forceinline__ unsigned nf4_code(float y)
{
    const float t[15] = {-0.8480964004993439f,  -0.6106329262256622f,  -0.4599952697753906f, -0.33967943489551544f,
                         -0.23460740596055984f, -0.13791173323988914f, -0.045525018125772476f, 0.03979014977812767f,
                         0.1202552504837513f,   0.2035212516784668f,   0.2920137718319893f,  0.3893125355243683f,
                         0.5016634166240692f,   0.6427869200706482f,   0.8614784181118011f};
    unsigned c = 0;
#pragma unroll
    for (int i = 0; i < 15; i++) c += y > t[i];
    return c;
}

/* 8 threads a block of 64 weights, 8 weights each. */
static __global__ void __launch_bounds__(THREADS) quantise4(uint8_t *packed, float *absmax, cu_view in, int64_t total)
{
    int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * 8;
    int n = (int)(total - i < 8 ? (total > i ? total - i : 0) : 8);
    float v[8], m = 0;
    cu_unpack(v, cu_load(in, i, n), in.dtype);
#pragma unroll
    for (int k = 0; k < 8; k++) m = fmaxf(m, fabsf(v[k]));
    for (int o = 4; o > 0; o >>= 1) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, o));
    if (n == 0) return;
    if (i % 64 == 0) absmax[i / 64] = m < 0x1p-126f ? 0.f : m; /* a subnormal scale is flushed as well */
    float r = reciprocal(m);
    unsigned word = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) /* what is missing at the end counts as 0.0: code 7 */
        word |= (k < n ? nf4_code(times(v[k], r)) : 7u) << (k / 2 * 8 + (k % 2 ? 0 : 4));
    if (n == 8 && ((uintptr_t)packed & 3) == 0) {
        *(unsigned *)(packed + i / 2) = word;
    } else {
        for (int k = 0; k < (n + 1) / 2; k++) packed[i / 2 + k] = (uint8_t)(word >> (8 * k));
    }
}

ql_status cu_nf4_quant(const ql_queue *q, ql_tensor packed, ql_tensor absmax, ql_tensor in)
{
    int64_t total = in.rows * in.cols;
    return cu_launch(q, "nf4_quant", quantise4, cu_blocks(total, THREADS * 8), THREADS, 0, (uint8_t *)packed.data,
                     (float *)absmax.data, cu_see(in), total);
}

/* The nearest entry of an ascending table of 256 (formats 1.4 step 5); ties stay at the pivot of the walk. */
static __device__ unsigned nearest(const float *code, float y)
{
    int pivot = 127, lower_at = 0, upper_at = 255;
    float lower = -1.f, upper = 1.f, v;
    for (int step = 64; step > 0; step >>= 1) {
        v = code[pivot];
        if (y > v)
            lower_at = pivot, lower = v, pivot += step;
        else
            upper_at = pivot, upper = v, pivot -= step;
    }
    if (upper_at == 255) upper = code[255];
    if (lower_at == 0) lower = code[0];
    v = code[pivot];
    if (y > v) return (unsigned)(y > __fmul_rn(__fadd_rn(upper, v), 0.5f) ? upper_at : pivot);
    return (unsigned)(y < __fmul_rn(__fadd_rn(lower, v), 0.5f) ? lower_at : pivot);
}

/* A warp a block of 256 scales. */
static __global__ void __launch_bounds__(THREADS)
    quantise8(uint8_t *out, float *absmax2, const float *__restrict__ absmax, const float *__restrict__ code2,
              float offset, int64_t total)
{
    __shared__ float code[256];
    code[threadIdx.x] = code2[threadIdx.x];
    __syncthreads();
    int64_t block = (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    int lane = (int)threadIdx.x % 32;
    float a[8], m = 0;
    if (block * 256 >= total) return;
    for (int k = 0; k < 8; k++) {
        int64_t i = block * 256 + k * 32 + lane;
        a[k] = i < total ? __fsub_rn(absmax[i], offset) : 0.f;
        m = fmaxf(m, fabsf(a[k]));
    }
    m = cu_warp_max(m);
    if (lane == 0) absmax2[block] = m;
    float r = reciprocal(m);
    for (int k = 0; k < 8; k++) {
        int64_t i = block * 256 + k * 32 + lane;
        if (i < total) out[i] = (uint8_t)nearest(code, times(a[k], r));
    }
}

ql_status cu_scale_quant(const ql_queue *q, ql_tensor code, ql_tensor absmax2, ql_tensor absmax, ql_tensor code2,
                         float offset)
{
    int64_t n = absmax.rows * absmax.cols;
    return cu_launch(q, "scale_quant", quantise8, cu_blocks(ql_ceil_div(n, 256), THREADS / 32), THREADS, 0,
                     (uint8_t *)code.data, (float *)absmax2.data, (const float *)absmax.data,
                     (const float *)code2.data, offset, n);
}
