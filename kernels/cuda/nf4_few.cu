/* Products of a few rows with 4-bit weights as they rest: what a token of text costs. Each weight is read once, decoded
 * in registers and given to tensor cores; nothing is written but the result.
 *
 * A lane decodes whole blocks of 64 weights, each weight through a table of 16 in shared memory. */
#include "kernels/cuda/mma.h"

enum {
    GROUPS = 8,                            /* warps that share a tile of 16 weight rows, each with its own columns */
    SETS = 4,                              /* such groups of a block, with tiles of their own */
    THREADS = 32 * GROUPS * SETS,
    CHUNK = 256, STRIDE = GROUPS * CHUNK,  /* columns of a warp, and of a block, at a time */
    MOST = 2,                              /* tiles of a warp */
    STRIDE_BYTES = QL_FEW_ROWS * STRIDE * 2,
    WIDE = 4,                              /* strides of x in shared memory, where there is so much of it */
};
static_assert(GROUPS * SETS * MOST * 32 * 16 <= STRIDE_BYTES, "the sums lie where x lay");

struct few {
    ql_nf4 w;
    const unsigned short *x;
    int64_t x_ld;
    unsigned part; /* weights of a piece; of the only one, more than there are */
    cu_view out, c, bias;
    int m, block_log, block2_log, tiles, per_item, slice; /* per_item: tiles of a block at a time; slice: columns of x */
};

struct few_bits { /* a lane's blocks of two rows, and what their scales are made of */
    uint4 bits[2][2];
    float absmax[2];
    unsigned code[2];
};

/* The piece that holds flat weight e, and the place in it. */
static __device__ __forceinline__ int piece_of(const few &f, unsigned &e)
{
    int p = 0;
    for (; e >= f.part; p++) e -= f.part;
    return p;
}

static __device__ __forceinline__ void few_load(few_bits &b, const few &f, int row, int k)
{
    bool live = k < (int)f.w.cols;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        unsigned e = (unsigned)min(row + 8 * r, (int)f.w.rows - 1) * (unsigned)f.w.cols + (unsigned)(live ? k : 0);
        int p = piece_of(f, e);
        const uint4 *from = (const uint4 *)(f.w.packed[p] + e / 2);
        unsigned block = e >> 6;
        b.bits[r][0] = __ldg(from), b.bits[r][1] = __ldg(from + 1);
        if (f.w.block2) {
            b.code[r] = __ldg((const uint8_t *)f.w.absmax[p] + block);
            b.absmax[r] = __ldg(f.w.absmax2[p] + (block >> f.block2_log));
        } else {
            b.absmax[r] = __ldg((const float *)f.w.absmax[p] + block);
        }
    }
}

static __device__ __forceinline__ unsigned permute(unsigned a, unsigned b, unsigned which)
{
    unsigned r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(which));
    return r;
}

/* Weights 4·half … 4·half + 3 of a word as two pairs. high, low: four times its bytes' high and low nibbles; a byte's first
 * weight is the high one. */
template <int DTYPE, bool ROUND>
static __device__ __forceinline__ void few_decode(unsigned out[2], const float *code, unsigned high, unsigned low, int half,
                                                  float scale, int state)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        unsigned byte = 0x4440u | (unsigned)(2 * half + i);
        float a = *(const float *)((const char *)code + permute(high, 0, byte));
        float b = *(const float *)((const char *)code + permute(low, 0, byte));
        a = __fmul_rn(a, scale), b = __fmul_rn(b, scale);
        if (ROUND) a = cu_round(a, state), b = cu_round(b, state);
        out[i] = cu_pair(a, b, DTYPE);
    }
}

/* acc (16 weight rows, 8 rows of x) += what a lane's two blocks and x's chunk give. Which column a product's summand is at
 * does not matter as long as both factors agree: lane t of a row has columns 64·t on, four of them at a time. */
template <int DTYPE, bool ROUND>
static __device__ __forceinline__ void few_multiply(float acc[4], const few &f, const few_bits &b, const float *code,
                                                    const float *code2, const uint4 *x, bool live)
{
    float scale[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        scale[r] = b.absmax[r];
        if (f.w.block2) scale[r] = __fadd_rn(__fmul_rn(code2[b.code[r]], scale[r]), f.w.offset);
        if (!live) scale[r] = 0;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint4 xs = x[i * 32];
        const unsigned k[4] = {xs.x, xs.y, xs.z, xs.w};
        unsigned high[2], low[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            unsigned word = ((const unsigned *)b.bits[r])[i];
            high[r] = word >> 2 & 0x3c3c3c3cu, low[r] = word << 2 & 0x3c3c3c3cu;
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            unsigned upper[2], lower[2], a[4];
            few_decode<DTYPE, ROUND>(upper, code, high[0], low[0], half, scale[0], f.w.state);
            few_decode<DTYPE, ROUND>(lower, code, high[1], low[1], half, scale[1], f.w.state);
            a[0] = upper[0], a[1] = lower[0], a[2] = upper[1], a[3] = lower[1];
            mma16<DTYPE>(acc, a, k[2 * half], k[2 * half + 1]);
        }
    }
}

/* x's slice from column k0 on, in the order that few_multiply reads it: (chunk, 8 columns of each lane's 64, lane). */
static __device__ __forceinline__ void few_stage(uint4 *to, const few &f, int k0)
{
    int per_row = f.slice / 8;
    for (int i = (int)threadIdx.x; i < QL_FEW_ROWS * per_row; i += THREADS) {
        int row = i / per_row, k = (i - row * per_row) * 8;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (row < f.m && k0 + k < (int)f.w.cols) v = *(const uint4 *)(f.x + row * f.x_ld + k0 + k);
        to[(k / CHUNK * 8 + k % 64 / 8) * 32 + row * 4 + k % CHUNK / 64] = v;
    }
}

/* An item is per_item tiles. A warp's partial sums run over its own columns in order; those of the eight warps are added in
 * the warps' order: neither depends on the number of rows of x, nor on the slice, nor on how many SMs there are. */
template <int DTYPE, bool ROUND>
static __global__ void __launch_bounds__(THREADS, 1) few_rows(const __grid_constant__ few f)
{
    extern __shared__ uint4 memory[];
    __shared__ float code[16]; /* 16 banks: no two lanes ever wait for each other */
    __shared__ float code2[256];
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, group = warp % GROUPS, set = warp / GROUPS;
    int cols = (int)f.w.cols, mine = group * CHUNK + lane % 4 * 64;
    if (threadIdx.x < 16) code[threadIdx.x] = f.w.code[threadIdx.x];
    if (f.w.block2 && threadIdx.x < 256) code2[threadIdx.x] = f.w.code2[threadIdx.x];
    for (int first = (int)blockIdx.x * f.per_item; first < f.tiles; first += (int)gridDim.x * f.per_item) {
        int tiles = (min(first + f.per_item, f.tiles) - first - set + SETS - 1) / SETS, row = (first + set) * 16 + lane / 4;
        float acc[MOST][4] = {};
        for (int k0 = 0; k0 < cols; k0 += STRIDE) {
            few_bits b;
            int k = k0 + mine;
            if (tiles > 0) few_load(b, f, row, k); /* under way while x is copied */
            if (k0 % f.slice == 0) {
                __syncthreads(); /* nobody reads the last slice, or the sums that lay here, any more */
                few_stage(memory, f, k0);
                __syncthreads();
            }
            const uint4 *x = memory + (k0 % f.slice / CHUNK + group) * 256 + lane;
#pragma unroll
            for (int i = 0; i < MOST; i++) {
                if (i >= tiles) break;
                if (i > 0) few_load(b, f, row + 16 * SETS * i, k);
                few_multiply<DTYPE, ROUND>(acc[i], f, b, code, code2, x, k < cols);
            }
        }
        __syncthreads();
        float4 *sums = (float4 *)memory;
#pragma unroll
        for (int i = 0; i < MOST; i++) sums[(warp * MOST + i) * 32 + lane] = make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
        __syncthreads();
        for (int i = (int)threadIdx.x; i < f.per_item * 128; i += THREADS) {
            int tile = i / 128, e = i % 128, m = e / 4 % 4 * 2 + e % 2, n = (first + tile) * 16 + e / 16 + e / 2 % 2 * 8;
            const float *from = (const float *)(sums + (tile % SETS * GROUPS * MOST + tile / SETS) * 32) + e;
            float y = 0;
            for (int g = 0; g < GROUPS; g++) y += from[g * MOST * 128];
            if (m >= f.m || n >= (int)f.w.rows || first + tile >= f.tiles) continue;
            if (f.bias.p) y += cu_get(f.bias, n);
            if (f.c.p) y += cu_get(f.c, m * f.c.ld + n);
            cu_put(f.out, m * f.out.ld + n, y);
        }
    }
}

/* Any shape, alignment and dtype: a warp per weight row. */
static __global__ void __launch_bounds__(256) few_any(const __grid_constant__ few f, cu_view x)
{
    int lane = (int)threadIdx.x % 32;
    int64_t n = (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
    if (n >= f.w.rows) return;
    float acc[QL_FEW_ROWS] = {};
    for (int64_t k = lane; k < f.w.cols; k += 32) {
        int64_t e = n * f.w.cols + k;
        int p = (int)(e / f.w.part);
        e -= p * f.w.part;
        int64_t block = e >> f.block_log;
        unsigned byte = f.w.packed[p][e >> 1], nibble = e & 1 ? byte & 15 : byte >> 4;
        float scale = f.w.block2 ? __fadd_rn(__fmul_rn(f.w.code2[((const uint8_t *)f.w.absmax[p])[block]],
                                                       f.w.absmax2[p][block >> f.block2_log]), f.w.offset)
                                 : ((const float *)f.w.absmax[p])[block];
        float v = cu_round(cu_round(__fmul_rn(f.w.code[nibble], scale), f.w.state), x.dtype);
#pragma unroll
        for (int m = 0; m < QL_FEW_ROWS; m++)
            if (m < f.m) acc[m] = fmaf(v, cu_get(x, m * x.ld + k), acc[m]);
    }
#pragma unroll
    for (int m = 0; m < QL_FEW_ROWS; m++) {
        float y = cu_warp_sum(acc[m]);
        if (lane || m >= f.m) continue;
        if (f.bias.p) y += cu_get(f.bias, n);
        if (f.c.p) y += cu_get(f.c, m * f.c.ld + n);
        cu_put(f.out, m * f.out.ld + n, y);
    }
}

static bool fast(ql_tensor a, const ql_nf4 *w)
{
    bool ok = a.dtype != QL_F32 && w->block == 64 && w->cols % 64 == 0 && w->rows * w->cols < (int64_t)1 << 31;
    ok &= (uintptr_t)a.data % 16 == 0 && (a.rows == 1 || a.ld % 8 == 0);
    for (int p = 0; p < w->parts; p++) ok &= (uintptr_t)w->packed[p] % 16 == 0;
    return ok;
}

template <int DTYPE>
static void (*pick(const ql_nf4 *w))(few)
{
    return w->state != DTYPE && w->state != QL_F32 ? few_rows<DTYPE, true> : few_rows<DTYPE, false>;
}

ql_status cu_nf4_matmul(const ql_queue *q, ql_tensor out, ql_tensor a, const ql_nf4 *w, ql_tensor c, ql_tensor bias)
{
    const ql_dev *d = q->stream->dev;
    few f = {*w, (const unsigned short *)a.data, a.ld, w->parts > 1 ? (unsigned)w->part : 0xffffffffu, cu_see(out), cu_see(c), cu_see(bias), (int)a.rows, cu_log2(w->block),
             w->block2 ? cu_log2(w->block2) : 0, 0, 0, 0};
    if (!fast(a, w) || (a.dtype == QL_BF16 && d->arch < 80))
        return cu_launch(q, "nf4_matmul", few_any, cu_blocks(w->rows, 8), 256, 0, f, cu_see(a));
    /* as many rounds as it takes with full blocks, then the tiles dealt evenly */
    int64_t tiles = ql_ceil_div(w->rows, 16), rounds = ql_ceil_div(tiles, (int64_t)d->sms * SETS * MOST);
    f.tiles = (int)tiles, f.per_item = (int)ql_ceil_div(tiles, (int64_t)d->sms * rounds);
    f.slice = (int)ql_min64(ql_round_up(w->cols, STRIDE), d->prop.sharedMemPerBlockOptin >= WIDE * STRIDE_BYTES && !CU_T4 ? WIDE * STRIDE : STRIDE);
    auto kernel = a.dtype == QL_F16 ? pick<QL_F16>(w) : pick<QL_BF16>(w);
    return cu_launch(q, "nf4_matmul", kernel, (unsigned)ql_min64(ql_ceil_div(tiles, f.per_item), d->sms), THREADS,
                     (size_t)f.slice / STRIDE * STRIDE_BYTES, f);
}
