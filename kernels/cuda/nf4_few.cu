/* Products of a few rows with 4-bit weights as they rest: what a token of text costs. Each weight is read once, decoded in registers and
 * given to tensor cores; nothing is written but the result.
 *
 * A byte is looked up whole: a table of 256 pairs of codes in the dtype of x, a copy of it in each bank of shared memory, gives
 * the tensor cores' register of two weights. A weight row's four lanes hold two blocks of 64 at a time, lanes 0 and 1 the first:
 * x is given to the product with zeros where the other block is, so each block has a sum of its own, and its scale is put to that. The
 * warps of a thread block have the same rows and each its own columns, whose x it keeps in registers; they meet only when
 * many tiles of rows are done, so that weights never stop coming in. */
#include "kernels/cuda/mma.h"

enum {
    WARPS = 16, THREADS = 32 * WARPS,
    TILE = 16,                   /* weight rows */
    BLOCK = 64, PAIR = 128,      /* weights of a scale; of a lane's 16 bytes and its neighbours' */
    HELD = 2,                    /* pairs of a row that a warp has at a time: lane t of the row has the scale of the t-th block */
    TABLE = CU_SM75 ? 128 : 256, /* bytes from an entry to the next: the larger needs one instruction less to get at */
    CODE2_BYTES = QL_FEW_MATS * 256 * 4,
    MOST = 20,                   /* tiles between two meetings at most */
};

/* Of up to four rows of x two lanes of a weight row have its sums, of more all four. */
template <bool WIDE>
struct few_sums {
    enum { LANES = WIDE ? 4 : 2, EACH = 8 * LANES * 4, ALL = WARPS * EACH, BYTES = ALL * 4 }; /* floats of a warp's part of a tile's */
};

struct few {
    ql_nf4 w[QL_FEW_MATS];
    int first[QL_FEW_MATS + 1]; /* tiles before each matrix */
    const unsigned short *x;
    int64_t x_ld;
    cu_view out, c, bias;
    int m, n, block2_log;
    int passes, wide, group; /* passes over a tile, that many pairs each; tiles between two meetings */
};

/* The i-th of the tiles that this thread block has, of [first, last) until the next meeting: all of these once for each pass. */
struct few_walk {
    int i, first, last, pass;
};

struct few_bits { /* a lane's quarter of each pair of weight rows g and g + 8 of a tile, and what one scale of each row is made of */
    uint4 bits[HELD][2];
    float absmax[2];
    unsigned code[2];
};

static __device__ __forceinline__ void few_start(few_walk &w, const few &f, int first, int count)
{
    w.first = w.i = first, w.last = min(first + f.group, count), w.pass = 0;
}
static __device__ __forceinline__ void few_step(few_walk &w, const few &f, int count)
{
    if (++w.i < w.last) return;
    w.i = w.first;
    if (++w.pass == f.passes) few_start(w, f, w.last, count);
}

static __device__ __forceinline__ int few_matrix(const few &f, int tile)
{
    return (f.n > 1 && tile >= f.first[1]) + (f.n > 2 && tile >= f.first[2]);
}

/* Of a walk: its tile, its pass' pairs, and a warp's part of these. */
static __device__ __forceinline__ int few_tile(const few_walk &w, int count)
{
    return (int)(blockIdx.x + (unsigned)min(w.i, count - 1) * gridDim.x);
}
static __device__ __forceinline__ int few_wide(const few_walk &w, const few &f, int count)
{
    return w.i < count ? min(f.wide, (int)f.w[0].cols / PAIR - w.pass * f.wide) : 0;
}
static __device__ __forceinline__ int few_from(int wide, int warp)
{
    return wide * warp / WARPS;
}
static __device__ __forceinline__ int few_live(int wide, int warp)
{
    return few_from(wide, warp + 1) - few_from(wide, warp);
}

/* Two weights: byte i of the word, in this lane's bank. */
static __device__ __forceinline__ unsigned few_pair(const char *table, unsigned lane4, unsigned word, int i)
{
    unsigned at = TABLE == 256 ? __byte_perm(word, lane4, 0x5504u | (unsigned)i << 4)
                               : ((i == 0 ? word << 7 : word >> (8 * i - 7)) & 0x7f80u) | lane4;
    return *(const unsigned *)(table + at);
}

/* Each time anew: kept in registers, both halves of x would push out what is under way. */
static __device__ __forceinline__ unsigned few_and(unsigned a, unsigned b)
{
    unsigned r;
    asm volatile("and.b32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

static __device__ __forceinline__ float few_shuffle(float v, int from)
{
    return __shfl_sync(0xffffffffu, v, from);
}

/* out (+)= what a fetch of a tile brought, times x: (16 weight rows, 8 rows of x). Which column is where does not matter as long as weights
 * and x agree: lane t of a row has columns 32·t on of the pair, four of them in each product. Of up to four rows x has the first
 * block's columns in its rows 0 to 3 and the second's in rows 4 to 7, zeros elsewhere: one product gives the sums of both. Of more
 * rows (WIDE) it takes two. The sums, and their bits, are the same. */
template <int DTYPE, bool WIDE>
static __device__ __forceinline__ void few_use(float4 *out, bool more, const few &f, int mat, const few_bits &b, const unsigned x[HELD][16],
                                               const char *table, const float *code2)
{
    int lane = (int)threadIdx.x % 32, t = lane % 4, quad = lane - t;
    float scale[2], sum[1 + WIDE][4] = {};
#pragma unroll
    for (int r = 0; r < 2; r++) scale[r] = __fadd_rn(__fmul_rn(code2[mat * 256 + (int)b.code[r]], b.absmax[r]), f.w[mat].offset);
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        float part[1 + WIDE][4] = {};
#pragma unroll
        for (int j = 0; j < 8; j++) {
            unsigned a[4], x0 = x[i][2 * j], x1 = x[i][2 * j + 1];
            unsigned upper = ((const unsigned *)&b.bits[i][0])[j / 2], lower = ((const unsigned *)&b.bits[i][1])[j / 2];
#pragma unroll
            for (int k = 0; k < 2; k++) {
                a[2 * k] = few_pair(table, (unsigned)lane * 4, upper, j % 2 * 2 + k);
                a[2 * k + 1] = few_pair(table, (unsigned)lane * 4, lower, j % 2 * 2 + k);
            }
            if (WIDE) {
                unsigned second = t < 2 ? 0 : ~0u;
                mma16<DTYPE>(part[0], a, few_and(x0, ~second), few_and(x1, ~second)), mma16<DTYPE>(part[WIDE], a, few_and(x0, second), few_and(x1, second));
            } else {
                mma16<DTYPE>(part[0], a, x0, x1);
            }
        }
#pragma unroll
        for (int h = 0; h <= WIDE; h++) {
            int from = quad + 2 * i + (WIDE ? h : t / 2);
            float s0 = few_shuffle(scale[0], from), s8 = few_shuffle(scale[1], from);
            sum[h][0] = fmaf(s0, part[h][0], sum[h][0]), sum[h][1] = fmaf(s0, part[h][1], sum[h][1]);
            sum[h][2] = fmaf(s8, part[h][2], sum[h][2]), sum[h][3] = fmaf(s8, part[h][3], sum[h][3]);
        }
    }
#pragma unroll
    for (int k = 0; k < 4; k++) sum[0][k] += WIDE ? sum[WIDE][k] : few_shuffle(sum[0][k], lane ^ 2);
    if (t >= few_sums<WIDE>::LANES) return;
    out += ((int)threadIdx.x / 4) * few_sums<WIDE>::LANES + t;
    if (more) sum[0][0] += out->x, sum[0][1] += out->y, sum[0][2] += out->z, sum[0][3] += out->w;
    *out = make_float4(sum[0][0], sum[0][1], sum[0][2], sum[0][3]);
}

/* x of pairs [from, from + live) as few_use wants it; zeros also where there is no pair. */
template <bool WIDE>
static __device__ __forceinline__ void few_load_x(unsigned x[HELD][16], const few &f, int from, int live)
{
    int lane = (int)threadIdx.x % 32, t = lane % 4, row = WIDE ? lane / 4 : lane / 4 % 4;
    bool mine = row < f.m && (WIDE || lane / 16 == t / 2);
#pragma unroll
    for (int i = 0; i < HELD; i++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint4 v = make_uint4(0, 0, 0, 0);
            if (mine && i < live) v = *(const uint4 *)(f.x + row * f.x_ld + (from + i) * PAIR + t * (PAIR / 4) + k * 8);
            x[i][4 * k] = v.x, x[i][4 * k + 1] = v.y, x[i][4 * k + 2] = v.z, x[i][4 * k + 3] = v.w;
        }
}

/* The sums of tiles [first, last) over the warps, in their order. */
template <bool WIDE>
static __device__ __forceinline__ void few_finish(const few &f, const float *sums, int first, int last)
{
    enum { ROWS = 2 * few_sums<WIDE>::LANES };
    for (int i = (int)threadIdx.x; i < (last - first) * TILE * ROWS; i += THREADS) {
        int m = i % ROWS, row = i / ROWS % TILE, tile = i / (ROWS * TILE);
        const float *from = sums + tile * few_sums<WIDE>::ALL + (row % 8 * few_sums<WIDE>::LANES + m / 2) * 4 + row / 8 * 2 + m % 2;
        int64_t n = (int64_t)(blockIdx.x + (unsigned)(first + tile) * gridDim.x) * TILE + row;
        float y = 0;
        if (m >= f.m) continue;
#pragma unroll
        for (int g = 0; g < WARPS; g++) y += from[g * few_sums<WIDE>::EACH];
        if (f.bias.p) y += cu_get(f.bias, n);
        if (f.c.p) y += cu_get(f.c, m * f.c.ld + n);
        cu_put(f.out, m * f.out.ld + n, y);
    }
}

/* An entry's two codes, asked for before the weights are, and the table that is made of them. */
struct few_codes {
    float high, low;
};
static __device__ __forceinline__ few_codes few_ask(const few &f)
{
    int entry = (int)threadIdx.x / 2;
    few_codes c = {__ldg(f.w[0].code + (entry >> 4)), __ldg(f.w[0].code + (entry & 15))};
    return c;
}
template <int DTYPE>
static __device__ __forceinline__ void few_tables(const few &f, const few_codes &c, char *table, float *code2)
{
    static_assert(THREADS == 2 * 256, "two threads fill an entry of the table");
    unsigned pair = cu_pair(c.high, c.low, DTYPE);
    uint4 *to = (uint4 *)(table + threadIdx.x / 2 * TABLE) + threadIdx.x % 2;
    for (int i = 0; i < 8; i += 2) to[i] = make_uint4(pair, pair, pair, pair);
    for (int i = (int)threadIdx.x; i < f.n * 256; i += THREADS) code2[i] = f.w[0].block2 ? __ldg(f.w[i / 256].code2 + i % 256) : 1;
}

/* Weights are read once: they need not stay in L1, and the row's next ones may come to L2 with these. One instruction, so that
 * nothing waits for what it brings before that is used. */
static __device__ __forceinline__ void few_stream(uint4 &v, const uint8_t *p, bool live)
{
    asm("{\n.reg .pred p;\nsetp.ne.s32 p, %5, 0;\n@p ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "l"(p), "r"((int)live));
}

/* The piece that holds flat weight e, and the place in it. */
template <bool MANY>
static __device__ __forceinline__ int piece_of(const ql_nf4 &w, unsigned &e)
{
    int p = 0;
    if (MANY)
        for (; e >= (unsigned)w.part; p++) e -= (unsigned)w.part;
    return p;
}

/* Pairs [from, from + live) of this lane's two rows of a tile; where there are none, some scale all the same: x is zeros there, and
 * the scale has to be a number. */
template <bool MANY>
static __device__ __forceinline__ void few_fetch(few_bits &b, const few &f, int tile, int from, int live)
{
    int mat = few_matrix(f, tile), lane = (int)threadIdx.x % 32, t = lane % 4;
    const ql_nf4 &w = f.w[mat];
    unsigned cols = (unsigned)w.cols, at = (unsigned)((tile - f.first[mat]) * TILE + lane / 4) * cols + (unsigned)from * PAIR;
#pragma unroll
    for (int r = 0; r < 2; r++, at += 8 * cols) {
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            unsigned e = at + (unsigned)i * PAIR + (unsigned)t * (PAIR / 4);
            int p = i < live ? piece_of<MANY>(w, e) : 0;
            few_stream(b.bits[i][r], w.packed[p] + e / 2, i < live);
        }
        unsigned e = at + (unsigned)max(0, min(t, 2 * live - 1)) * BLOCK;
        int p = piece_of<MANY>(w, e);
        unsigned block = e / BLOCK;
        b.code[r] = __ldg((const uint8_t *)w.absmax[p] + block);
        b.absmax[r] = __ldg(w.absmax2[p] + (block >> f.block2_log));
    }
}

/* A thread block has every gridDim.x-th tile. The order of a sum is given by the shape of the matrix alone. */
template <int DTYPE, bool MANY, bool WIDE>
static __global__ void __launch_bounds__(THREADS, 1) few_rows(const __grid_constant__ few f)
{
    extern __shared__ uint4 memory[];
    char *table = (char *)memory;
    float *code2 = (float *)(table + 256 * TABLE), *sums = code2 + CODE2_BYTES / 4;
    int warp = (int)threadIdx.x / 32, count = (f.first[f.n] - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
    unsigned x[HELD][16];
    few_walk now, ahead;
    few_bits one = {}, other = {};
    few_start(now, f, 0, count);
    ahead = now;
    auto fetch = [&](few_bits &bits) {
        int wide = few_wide(ahead, f, count), from = ahead.pass * f.wide + few_from(wide, warp);
        few_fetch<MANY>(bits, f, few_tile(ahead, count), min(from, (int)f.w[0].cols / PAIR - 1), few_live(wide, warp));
        few_step(ahead, f, count);
    };
    auto load_x = [&]() {
        int wide = few_wide(now, f, count);
        few_load_x<WIDE>(x, f, now.pass * f.wide + few_from(wide, warp), few_live(wide, warp));
    };
    few_codes codes = few_ask(f);
    fetch(one);
    load_x();
    few_tables<DTYPE>(f, codes, table, code2);
    fetch(other);
    __syncthreads();
    auto turn = [&](few_bits &bits) { /* decodes what came and asks for what is two tiles on; false after the last */
        int pass = now.pass, first = now.first, last = now.last;
        few_use<DTYPE, WIDE>((float4 *)sums + (now.i - first) * (few_sums<WIDE>::BYTES / 16), pass > 0, f, few_matrix(f, few_tile(now, count)), bits, x, table, code2);
        fetch(bits);
        few_step(now, f, count);
        if (now.pass == pass && now.first == first) return true;
        if (now.first != first) {
            __syncthreads(); /* all warps' sums are there */
            few_finish<WIDE>(f, sums, first, last);
            if (now.i >= count) return false;
            __syncthreads(); /* and read, before they are written over */
        }
        load_x();
        return true;
    };
    while (turn(one) && turn(other)) {}
}

/* Any shape, alignment and dtype: a warp per weight row. */
static __global__ void __launch_bounds__(256) few_any(const __grid_constant__ ql_nf4 w, cu_view x, int rows, int block_log, int block2_log, cu_view out,
                                                      cu_view c, cu_view bias, int n0)
{
    int lane = (int)threadIdx.x % 32;
    int64_t row = (int64_t)blockIdx.x * 8 + threadIdx.x / 32, n = n0 + row;
    if (row >= w.rows) return;
    float acc[QL_FEW_ROWS] = {};
    for (int64_t k = lane; k < w.cols; k += 32) {
        int64_t e = row * w.cols + k;
        int p = (int)(e / w.part);
        e -= p * w.part;
        int64_t block = e >> block_log;
        unsigned byte = w.packed[p][e >> 1], nibble = e & 1 ? byte & 15 : byte >> 4;
        float scale = w.block2 ? __fadd_rn(__fmul_rn(w.code2[((const uint8_t *)w.absmax[p])[block]], w.absmax2[p][block >> block2_log]), w.offset)
                               : ((const float *)w.absmax[p])[block];
        float v = cu_round(cu_round(__fmul_rn(w.code[nibble], scale), w.state), x.dtype);
#pragma unroll
        for (int m = 0; m < QL_FEW_ROWS; m++)
            if (m < rows) acc[m] = fmaf(v, cu_get(x, m * x.ld + k), acc[m]);
    }
#pragma unroll
    for (int m = 0; m < QL_FEW_ROWS; m++) {
        float y = cu_warp_sum(acc[m]);
        if (lane || m >= rows) continue;
        if (bias.p) y += cu_get(bias, n);
        if (c.p) y += cu_get(c, m * c.ld + n);
        cu_put(out, m * out.ld + n, y);
    }
}

/* What few_rows does: whole tiles of whole pairs, of matrices whose codes are one table. */
static bool fast(const ql_dev *d, ql_tensor a, const ql_nf4 *w, int n)
{
    bool ok = a.dtype == QL_F16 || (a.dtype == QL_BF16 && d->arch >= 80);
    ok &= (uintptr_t)a.data % 16 == 0 && (a.rows == 1 || a.ld % 8 == 0);
    for (int i = 0; i < n; i++) {
        ok &= w[i].block == BLOCK && w[i].cols % PAIR == 0 && w[i].rows % TILE == 0 && w[i].rows * w[i].cols < (int64_t)1 << 31;
        ok &= w[i].code == w[0].code && w[i].block2 == w[0].block2;
        for (int p = 0; p < w[i].parts; p++) ok &= (uintptr_t)w[i].packed[p] % 16 == 0;
    }
    return ok;
}

static ql_status few_slowly(const ql_queue *q, ql_tensor out, ql_tensor a, const ql_nf4 *w, int n, ql_tensor c, ql_tensor bias)
{
    for (int i = 0, at = 0; i < n; at += (int)w[i++].rows)
        QL_TRY(cu_launch(q, "nf4_matmul", few_any, cu_blocks(w[i].rows, 8), 256, 0, w[i], cu_see(a), (int)a.rows, cu_log2(w[i].block),
                         w[i].block2 ? cu_log2(w[i].block2) : 0, cu_see(out), cu_see(c), cu_see(bias), at));
    return QL_OK;
}

template <int DTYPE, bool MANY>
static void (*pick(int64_t rows))(few)
{
    return rows > 4 ? few_rows<DTYPE, MANY, true> : few_rows<DTYPE, MANY, false>;
}

ql_status cu_nf4_matmul(const ql_queue *q, ql_tensor out, ql_tensor a, const ql_nf4 *w, int n, ql_tensor c, ql_tensor bias)
{
    const ql_dev *d = q->stream->dev;
    few f = {};
    bool many = false;
    if (!fast(d, a, w, n)) return few_slowly(q, out, a, w, n, c, bias);
    f.x = (const unsigned short *)a.data, f.x_ld = a.ld;
    f.out = cu_see(out), f.c = cu_see(c), f.bias = cu_see(bias);
    f.m = (int)a.rows, f.n = n, f.block2_log = w->block2 ? cu_log2(w->block2) : 0;
    for (int i = 0; i < n; i++) {
        f.w[i] = w[i], f.first[i + 1] = f.first[i] + (int)(w[i].rows / TILE), many |= w[i].parts > 1;
        /* A scale that is not nested is 1 · itself + 0. */
        for (int p = 0; !w->block2 && p < w[i].parts; p++) f.w[i].absmax2[p] = (const float *)w[i].absmax[p];
        if (!w->block2) f.w[i].offset = 0;
    }
    int64_t pairs = a.cols / PAIR;
    f.passes = (int)ql_ceil_div(pairs, HELD * WARPS), f.wide = (int)ql_min64(pairs, HELD * WARPS);
    auto kernel = a.dtype == QL_F16 ? (many ? pick<QL_F16, true> : pick<QL_F16, false>)(a.rows) : (many ? pick<QL_BF16, true> : pick<QL_BF16, false>)(a.rows);
    size_t fixed = (d->arch < 80 ? 128 : 256) * 256 + CODE2_BYTES, sums = a.rows > 4 ? (size_t)few_sums<true>::BYTES : (size_t)few_sums<false>::BYTES;
    size_t room = CU_T4 ? 64 << 10 : d->prop.sharedMemPerBlockOptin;
    int64_t grid = ql_min64(f.first[n], d->sms), tiles = ql_ceil_div(f.first[n], grid);
    int64_t most = ql_min64(MOST, (int64_t)((room - fixed) / sums));
    f.group = (int)ql_ceil_div(tiles, ql_ceil_div(tiles, most)); /* meetings as rare as there is room for, evenly apart */
    return cu_launch(q, "nf4_matmul", kernel, (unsigned)grid, THREADS, fixed + (size_t)f.group * sums, f);
}
