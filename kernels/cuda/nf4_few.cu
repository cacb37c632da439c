/* Products of a few rows with 4-bit weights as they rest: what a token of text costs. Each weight is read once, decoded in registers and
 * given to tensor cores; nothing is written but the result.
 *
 * A byte is looked up whole: a table of 256 pairs of codes in the dtype of x, a copy of it in each bank of shared memory, gives
 * the tensor cores' register of two weights. Each block of 64 has a sum of its own, and its scale is put to that. The warps of a thread
 * block have the same rows, a tile of 16 in each turn, and each its own columns, whose x it keeps in registers. A warp's weights come to
 * stages of its own in shared memory while turns before are at work, or to registers where there is no room for that (!STAGED); scales the
 * warps decode for each other, a row each, two turns ahead. Sums meet only when many tiles are done, so that weights never stop coming in. */
#include "kernels/cuda/mma.h"

enum {
    WARPS = 16, THREADS = 32 * WARPS,
    TILE = 16,                   /* weight rows of a turn */
    BLOCK = 64, PAIR = 128,      /* weights of a scale; of two */
    HELD = 2,                    /* pairs of a row that a warp has at a time */
    CODE2_BYTES = QL_FEW_MATS * 256 * 4,
    STAGES = 2,                  /* turns that weights are asked for ahead; scales, which all warps wait for, two more */
    STAGE = TILE * HELD * PAIR / 2,
    SLOTS = 4,                   /* turns whose scales are there: from the one before, for warps that are late, to two ahead */
    ROW = 2 * HELD * WARPS + 2,  /* floats from a row's scales to the next's: eight rows lie in different banks */
    SLOT = TILE * ROW,
    MOST = 64,                   /* tiles between two meetings at most */
};

struct few {
    ql_nf4 w[QL_FEW_MATS];       /* absmax2: where scales are not nested, each one's next */
    int first[QL_FEW_MATS + 1];  /* tiles before each matrix */
    const unsigned short *x;
    int64_t x_ld;
    cu_view out, c, bias;
    int m, n, nested;
    int word_log, scale_log; /* blocks of a word of absmax, of one of absmax2 */
    unsigned stride;         /* flat weights from a tile of a thread block to its next */
    int passes, wide, group; /* passes over a tile, that many pairs each; tiles between two meetings */
    int lanes;               /* of a weight row that have sums of rows of x, two each */
};

/* Shared memory in bytes, in its order: table, stages, codes of scales, scales, barriers, and then sums. From an entry of the table to the next
 * it is 128 or, which needs one instruction less to get at, 256. */
template <bool STAGED>
struct few_room {
    enum { ENTRY = STAGED ? 256 : 128, TABLE = 256 * ENTRY, RING = STAGED ? STAGES * WARPS * STAGE : 0 };
    enum { FIXED = TABLE + RING + CODE2_BYTES + SLOTS * (SLOT * 4 + 8) };
};
/* Floats of a warp's sums of a tile. */
static __host__ __device__ inline int few_each(int lanes)
{
    return TILE / 2 * lanes * 4;
}

/* A place among the tiles that this thread block has, every gridDim.x-th: those from `first` on until the next meeting, all of these once for
 * each pass. e: the flat weight of the matrix that this lane takes there; stop: where e is not a stride further. */
struct few_walk {
    int tile, first, stop, pass, mat, live;
    unsigned e;
};

/* Of a tile what a lane decodes: of rows g and g + 8, of each block of a pair, the quarter t. */
struct few_bits {
    uint2 of[HELD][2][2]; /* pair, row, block */
};

static __device__ __forceinline__ int few_pairs(const few &f, int pass)
{
    return min(f.wide, (int)f.w[0].cols / PAIR - pass * f.wide);
}
/* Of so many pairs a warp's: the first and how many. */
static __device__ __forceinline__ int few_from(int wide)
{
    return (int)((unsigned)wide * (threadIdx.x / 32) / WARPS);
}
static __device__ __forceinline__ int few_live(int wide)
{
    return (int)((unsigned)wide * (threadIdx.x / 32 + 1) / WARPS) - few_from(wide);
}

/* Where the tiles until the meeting after `first` end. */
static __device__ __forceinline__ int few_end(const few &f, int first)
{
    return min(first + f.group * (int)gridDim.x, f.first[f.n]);
}

/* Where a lane is in tile w.tile. For SCALES: of its warp's row the pass' lane-th pair, the last where there is none: x is zeros there, and a
 * scale has to be a number. Else in its warp's pairs: STAGED, 16 bytes of row lane / 8 and of every fourth further; or the quarter lane % 4 of the
 * first block of row lane / 4. live: pairs that there are, or whether the lane's is. */
template <bool STAGED, bool SCALES>
static __device__ __forceinline__ void few_place(few_walk &w, const few &f)
{
    int lane = (int)threadIdx.x % 32, wide = few_pairs(f, w.pass);
    w.mat = (f.n > 1 && w.tile >= f.first[1]) + (f.n > 2 && w.tile >= f.first[2]);
    w.stop = min(few_end(f, w.first), f.first[w.mat + 1]);
    int row = SCALES ? (int)threadIdx.x / 32 : STAGED ? lane / 8 : lane / 4;
    int column = SCALES ? min(lane, wide - 1) * PAIR : few_from(wide) * PAIR + (STAGED ? lane % 8 * 32 : lane % 4 * (BLOCK / 4));
    w.live = STAGED ? lane % 8 / 4 < few_live(wide) : few_live(wide);
    w.e = (unsigned)((w.tile - f.first[w.mat]) * TILE + row) * (unsigned)f.w[0].cols + (unsigned)(w.pass * f.wide * PAIR + column);
}
/* The tile after; after the last, the last once more, with nothing to be taken. */
template <bool STAGED, bool SCALES>
static __device__ __forceinline__ void few_step(few_walk &w, const few &f)
{
    if ((w.tile += (int)gridDim.x) < w.stop) {
        w.e += f.stride;
        return;
    }
    int end = few_end(f, w.first);
    if (w.tile >= end) {
        if (w.pass + 1 == f.passes && end == f.first[f.n]) {
            w.tile -= (int)gridDim.x, w.stop = 0, w.live = 0;
            return;
        }
        if (++w.pass == f.passes) w.first += f.group * (int)gridDim.x, w.pass = 0;
        w.tile = w.first;
    }
    few_place<STAGED, SCALES>(w, f);
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

/* ---- what comes in ---- */

static __device__ __forceinline__ uint2 shared2(unsigned address)
{
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
    return v;
}

/* The words that a pair's two scales are made of: the one that has both codes, and their scale; or the two scales. */
struct few_raw {
    unsigned x, y;
    int mat;
};
template <bool MANY>
static __device__ __forceinline__ void few_ask(few_raw &raw, const few &f, const few_walk &at)
{
    static_assert(WARPS == TILE && HELD * WARPS == 32, "a warp has a row's scales, a lane those of a pair");
    const ql_nf4 &w = f.w[at.mat];
    unsigned e = at.e;
    int p = piece_of<MANY>(w, e);
    raw.x = __ldg((const unsigned *)w.absmax[p] + (e / BLOCK >> f.word_log));
    raw.y = __ldg((const unsigned *)w.absmax2[p] + (e / BLOCK >> f.scale_log));
    raw.mat = at.mat;
}

template <bool MANY>
static __device__ __forceinline__ void few_load(few_bits &b, const few &f, const few_walk &at)
{
    const ql_nf4 &w = f.w[at.mat];
#pragma unroll
    for (int i = 0; i < 4 * HELD; i++) {
        unsigned e = at.e + (unsigned)(i / 2 % 2 * 8) * (unsigned)f.w[0].cols + (unsigned)(i / 4 * PAIR + i % 2 * BLOCK);
        if (i / 4 < at.live) {
            int p = piece_of<MANY>(w, e);
            b.of[i / 4][i / 2 % 2][i % 2] = __ldg((const uint2 *)(w.packed[p] + e / 2));
        }
    }
}

/* A tile's weights to a warp's stage: 128 bytes of each row, in 32-byte blocks whose places are exclusive-ored with the row, so that the
 * quarters of four rows lie in different banks. */
static __device__ __forceinline__ unsigned few_landing(void)
{
    unsigned lane = threadIdx.x % 32, row = lane / 8;
    return row * 128 + (lane % 8 * 16 ^ row * 32);
}
static __device__ __forceinline__ unsigned few_taken(void)
{
    unsigned lane = threadIdx.x % 32, g = lane / 4;
    return g * 128 + (g % 4 * 32) + lane % 4 * 8;
}
template <bool MANY>
static __device__ __forceinline__ void few_fetch(unsigned to, const few &f, const few_walk &at)
{
    const ql_nf4 &w = f.w[at.mat];
    const uint8_t *from = w.packed[0] + at.e / 2;
#pragma unroll
    for (int r = 0; r < TILE; r += 4, from += 2 * f.w[0].cols) {
        if (MANY && at.live) {
            unsigned e = at.e + (unsigned)r * (unsigned)f.w[0].cols;
            int p = piece_of<MANY>(w, e);
            from = w.packed[p] + e / 2;
        }
#if !CU_SM75
        if (at.live) asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to + r * 128), "l"(from) : "memory");
#endif
    }
#if !CU_SM75
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
/* All but the youngest fetch has landed. */
static __device__ __forceinline__ void few_landed(void)
{
#if !CU_SM75
    asm volatile("cp.async.wait_group 1;" ::: "memory");
#endif
    __syncwarp();
}
/* `from` lies in a stage that is 128-byte aligned. */
static __device__ __forceinline__ void few_take(few_bits &b, unsigned from)
{
#pragma unroll
    for (int i = 0; i < 4 * HELD; i++) b.of[i / 4][i / 2 % 2][i % 2] = shared2((from ^ (i / 4 * 64 + i % 2 * 32)) + i / 2 % 2 * 1024);
}

/* half: which half of the word has the codes, in bits; the same in every tile. */
static __device__ __forceinline__ void few_put_scales(float *to, const few_raw &raw, const few &f, const float *code2, int half)
{
    float x = __uint_as_float(raw.x), y = __uint_as_float(raw.y);
    if (f.nested) {
        const float *codes = code2 + raw.mat * 256;
        float offset = f.w[raw.mat].offset;
        unsigned pair = raw.x >> half;
        x = __fadd_rn(__fmul_rn(codes[pair & 255], y), offset), y = __fadd_rn(__fmul_rn(codes[pair >> 8 & 255], y), offset);
    }
    *(float2 *)to = make_float2(x, y);
}

/* x of pairs [from, from + live) as few_use wants it; zeros also where there is no pair. */
static __device__ __forceinline__ void few_load_x(unsigned x[HELD][16], const few &f, int from, int live)
{
    int lane = (int)threadIdx.x % 32, t = lane % 4, row = lane / 4;
#pragma unroll
    for (int i = 0; i < HELD; i++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint4 v = make_uint4(0, 0, 0, 0);
            int column = (from + i) * PAIR + k / 2 * BLOCK + t * (BLOCK / 4) + k % 2 * 8;
            if (row < f.m && i < live) v = *(const uint4 *)(f.x + row * f.x_ld + column);
            x[i][4 * k] = v.x, x[i][4 * k + 1] = v.y, x[i][4 * k + 2] = v.z, x[i][4 * k + 3] = v.w;
        }
}

/* An entry's two codes, asked for before the weights are, and the table that is made of them. */
struct few_codes {
    float high, low;
};
static __device__ __forceinline__ few_codes few_ask_codes(const few &f)
{
    int entry = (int)threadIdx.x / 2;
    few_codes c = {__ldg(f.w[0].code + (entry >> 4)), __ldg(f.w[0].code + (entry & 15))};
    return c;
}
template <int DTYPE, bool STAGED>
static __device__ __forceinline__ void few_tables(const few &f, const few_codes &c, char *table, float *code2)
{
    static_assert(THREADS == 2 * 256, "two threads fill an entry of the table");
    unsigned pair = cu_pair(c.high, c.low, DTYPE);
    uint4 *to = (uint4 *)(table + threadIdx.x / 2 * few_room<STAGED>::ENTRY) + threadIdx.x % 2;
    for (int i = 0; i < 8; i += 2) to[i] = make_uint4(pair, pair, pair, pair);
    for (int i = (int)threadIdx.x; f.nested && i < f.n * 256; i += THREADS) code2[i] = __ldg(f.w[i / 256].code2 + i % 256);
}

/* ---- turns: STAGED, a warp is at most one ahead of the others (none with __syncthreads, which took up to a fifth longer) ---- */

static __device__ __forceinline__ void turns_open(unsigned bars)
{
    if (threadIdx.x < SLOTS) bar_init(bars + 8 * threadIdx.x, THREADS);
}
/* This thread has put its scales of the turn of this slot, and is done with the one two before it. */
template <bool STAGED>
static __device__ __forceinline__ void turn_ready(unsigned bars, int slot)
{
    if (STAGED) bar_arrive(bars + slot * 8);
}
/* All threads have. */
template <bool STAGED>
static __device__ __forceinline__ void turn_begin(unsigned bars, int slot, unsigned phase)
{
    if (!STAGED) __syncthreads();
    while (STAGED && !bar_over(bars + slot * 8, phase)) {}
}

/* ---- what is done with it ---- */

/* Two weights: byte i of the word, in this lane's bank. */
template <bool STAGED>
static __device__ __forceinline__ unsigned few_pair(const char *table, unsigned lane4, unsigned word, int i)
{
    unsigned at = STAGED ? __byte_perm(word, lane4, 0x5504u | (unsigned)i << 4)
                               : ((i == 0 ? word << 7 : word >> (8 * i - 7)) & 0x7f80u) | lane4;
    return *(const unsigned *)(table + at);
}

/* out (+)= a tile's weights times x: (16 weight rows, 8 rows of x). Which column is where does not matter as long as weights
 * and x agree: four of a lane's in each product. scales: of row g. */
template <int DTYPE, bool STAGED>
static __device__ __forceinline__ void few_use(float4 *out, bool live, bool more, const few_bits &b, const unsigned x[HELD][16], const char *table,
                                               const float *scales)
{
    unsigned lane4 = threadIdx.x % 32 * 4;
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        float2 scale[2] = {*(const float2 *)(scales + 2 * i), *(const float2 *)(scales + 8 * ROW + 2 * i)};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float part[4] = {}, s0 = h ? scale[0].y : scale[0].x, s8 = h ? scale[1].y : scale[1].x;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                unsigned a[4];
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    a[2 * k] = few_pair<STAGED>(table, lane4, j < 2 ? b.of[i][0][h].x : b.of[i][0][h].y, j % 2 * 2 + k);
                    a[2 * k + 1] = few_pair<STAGED>(table, lane4, j < 2 ? b.of[i][1][h].x : b.of[i][1][h].y, j % 2 * 2 + k);
                }
                mma16<DTYPE>(part, a, x[i][8 * h + 2 * j], x[i][8 * h + 2 * j + 1]);
            }
            sum[0] = fmaf(s0, part[0], sum[0]), sum[1] = fmaf(s0, part[1], sum[1]);
            sum[2] = fmaf(s8, part[2], sum[2]), sum[3] = fmaf(s8, part[3], sum[3]);
        }
    }
    if (!live) return;
    if (more) sum[0] += out->x, sum[1] += out->y, sum[2] += out->z, sum[3] += out->w;
    *out = make_float4(sum[0], sum[1], sum[2], sum[3]);
}

/* The sums of this block's tiles of [first, end) over the warps, in their order. */
static __device__ __forceinline__ void few_finish(const few &f, const float *sums, int first, int end)
{
    int rows = 2 * f.lanes, each = few_each(f.lanes);
    for (int i = (int)threadIdx.x;; i += THREADS) {
        int m = i % rows, row = i / rows % TILE, turn = i / (rows * TILE), tile = first + turn * (int)gridDim.x;
        const float *from = sums + turn * WARPS * each + (row % 8 * f.lanes + m / 2) * 4 + row / 8 * 2 + m % 2;
        int64_t n = (int64_t)tile * TILE + row;
        float y = 0;
        if (tile >= end) return;
        if (m >= f.m) continue;
#pragma unroll
        for (int g = 0; g < WARPS; g++) y += from[g * each];
        if (f.bias.p) y += cu_get(f.bias, n);
        if (f.c.p) y += cu_get(f.c, m * f.c.ld + n);
        cu_put(f.out, m * f.out.ld + n, y);
    }
}

template <int I>
struct few_const {
    enum { SLOT_I = I };
};

/* A thread block has every gridDim.x-th tile, and a slot each of four turns. The order of a sum is given by the shape of the matrix alone. */
template <int DTYPE, bool MANY, bool STAGED>
static __device__ __forceinline__ void few_run(const few &f, unsigned char *memory)
{
    typedef few_room<STAGED> ROOM;
    char *table = (char *)memory;
    float *code2 = (float *)(table + ROOM::TABLE + ROOM::RING), *slots = code2 + CODE2_BYTES / 4, *sums = slots + SLOTS * (SLOT + 2);
    unsigned bars = smem_address(slots + SLOTS * SLOT), x[HELD][16], phase = 0;
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    int tile = (int)blockIdx.x, first = tile, pass = 0; /* of this turn */
    int half = (warp * ((int)f.w[0].cols / PAIR) + lane) % 2 * 16, each = few_each(f.lanes);
    unsigned stages = smem_address(table + ROOM::TABLE) + warp * STAGES * STAGE, landing = stages + few_landing(), taken = stages + few_taken();
    float *put_to = slots + warp * ROW + 2 * lane, *scales = NULL; /* in slot 0 */
    float4 *sums_to = (float4 *)(sums + warp * each) + lane / 4 * f.lanes + lane % 4, *to = sums_to;
    few_walk ahead = {tile, tile}, scale = {tile, tile};
    few_bits bits = {};
    few_raw raw[2];
    auto fetch = [&](int stage) {
        if (STAGED) few_fetch<MANY>(landing + stage * STAGE, f, ahead);
        else few_load<MANY>(bits, f, ahead);
        few_step<STAGED, false>(ahead, f);
    };
    auto ask = [&](int i) { few_ask<MANY>(raw[i], f, scale), few_step<STAGED, true>(scale, f); };
    auto put = [&](int slot) { few_put_scales(put_to + slot * SLOT, raw[slot % 2], f, code2, half), turn_ready<STAGED>(bars, slot); };
    auto load_x = [&]() {
        int wide = few_pairs(f, pass), from = few_from(wide);
        scales = slots + lane / 4 * ROW + 2 * from;
        few_load_x(x, f, pass * f.wide + from, few_live(wide));
    };
    few_codes codes = few_ask_codes(f);
    few_place<STAGED, false>(ahead, f), few_place<STAGED, true>(scale, f);
    fetch(0);
    if (STAGED) fetch(1);
    ask(0), ask(1);
    cu_ops_ahead();
    load_x();
    turns_open(bars);
    few_tables<DTYPE, STAGED>(f, codes, table, code2);
    __syncthreads();
    put(0), put(1);
    ask(0), ask(1);
    auto turn = [&](auto at) { /* false after the last */
        constexpr int slot = decltype(at)::SLOT_I, stage = slot % STAGES;
        if (STAGED) {
            few_landed();
            few_take(bits, taken + stage * STAGE);
            __syncwarp(); /* all lanes have what the stage held */
            fetch(stage);
        }
        turn_begin<STAGED>(bars, slot, phase);
        few_use<DTYPE, STAGED>(to, lane % 4 < f.lanes, pass > 0, bits, x, table, scales + slot * SLOT);
        if (!STAGED) fetch(0);
        put((slot + 2) % SLOTS), ask(slot % 2);
        to += WARPS * each / 4;
        if ((tile += (int)gridDim.x) < few_end(f, first)) return true;
        int done = first, end = few_end(f, first);
        bool over = ++pass == f.passes;
        if (over) first += f.group * (int)gridDim.x, pass = 0;
        if (f.passes > 1 && first < f.first[f.n]) load_x();
        if (over) {
            __syncthreads(); /* all warps' sums are there */
            few_finish(f, sums, done, end);
            if (end == f.first[f.n]) return false;
            __syncthreads(); /* and read, before they are written over */
        }
        tile = first, to = sums_to;
        return true;
    };
    while (turn(few_const<0>()) && turn(few_const<1>()) && turn(few_const<2>()) && turn(few_const<3>())) phase ^= 1;
}
template <int DTYPE, bool MANY, bool STAGED>
static __global__ void __launch_bounds__(THREADS, 1) few_rows(const __grid_constant__ few f)
{
    extern __shared__ __align__(128) unsigned char memory[];
#if defined(__CUDA_ARCH__)
    if constexpr (!STAGED || __CUDA_ARCH__ >= 900) few_run<DTYPE, MANY, STAGED>(f, memory);
#endif
}
/* Is there room, and was this compiled for such a device? */
static bool few_staged(const ql_dev *d, size_t room)
{
#ifdef __CUDA_ARCH_LIST__
    static const int built[] = {__CUDA_ARCH_LIST__};
#else
    static const int built[] = {0};
#endif
    bool ok = false;
    for (int arch : built) ok |= arch >= 900 && arch <= d->arch * 10;
    return ok && room >= 200 << 10;
}
template <bool STAGED>
static void (*few_kernel(ql_dtype dtype, bool many))(few)
{
    if (dtype == QL_F16) return many ? few_rows<QL_F16, true, STAGED> : few_rows<QL_F16, false, STAGED>;
    return many ? few_rows<QL_BF16, true, STAGED> : few_rows<QL_BF16, false, STAGED>;
}

/* Any shape, alignment and dtype: a warp per weight row. */
static __global__ void __launch_bounds__(256) few_any(const __grid_constant__ ql_nf4 w, cu_view x, int rows, int block_log, int block2_log, cu_view out,
                                                      cu_view c, cu_view bias)
{
    int lane = (int)threadIdx.x % 32;
    int64_t n = (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
    if (n >= w.rows) return;
    float acc[QL_FEW_ROWS] = {};
    for (int64_t k = lane; k < w.cols; k += 32) {
        int64_t e = n * w.cols + k;
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

/* Can matrices go side by side? Their codes are one table, their scales of one kind. */
static bool alike(const ql_nf4 *w, int n)
{
    bool ok = true;
    for (int i = 1; i < n; i++) ok &= w[i].code == w->code && w[i].block2 == w->block2;
    return ok;
}
/* What few_rows does: whole tiles of whole pairs, none of which lies in two pieces. */
static bool fast(const ql_dev *d, ql_tensor a, const ql_nf4 *w)
{
    bool ok = a.dtype == QL_F16 || (a.dtype == QL_BF16 && d->arch >= 80);
    ok &= (uintptr_t)a.data % 16 == 0 && (a.rows == 1 || a.ld % 8 == 0);
    ok &= w->block == BLOCK && w->cols % PAIR == 0 && w->rows % TILE == 0 && w->rows * w->cols < (int64_t)1 << 31;
    ok &= w->block2 ? w->block2 % 4 == 0 : w->parts == 1 || w->part % PAIR == 0;
    for (int p = 0; p < w->parts; p++) ok &= (uintptr_t)w->packed[p] % 16 == 0 && (uintptr_t)w->absmax[p] % 4 == 0;
    return ok;
}

static ql_status few_launch(const ql_queue *q, ql_tensor out, ql_tensor a, const ql_nf4 *w, int n, ql_tensor c, ql_tensor bias)
{
    const ql_dev *d = q->stream->dev;
    few f = {};
    bool many = false;
    f.x = (const unsigned short *)a.data, f.x_ld = a.ld;
    f.out = cu_see(out), f.c = cu_see(c), f.bias = cu_see(bias);
    f.m = (int)a.rows, f.n = n, f.lanes = (f.m + 1) / 2;
    f.nested = w->block2 > 0, f.word_log = f.nested ? 2 : 0, f.scale_log = f.nested ? cu_log2(w->block2) : 0;
    for (int i = 0; i < n; i++) {
        f.w[i] = w[i], f.first[i + 1] = f.first[i] + (int)(w[i].rows / TILE), many |= w[i].parts > 1;
        for (int p = 0; !f.nested && p < w[i].parts; p++) f.w[i].absmax2[p] = (const float *)w[i].absmax[p] + 1;
    }
    int64_t pairs = a.cols / PAIR, grid = ql_min64(f.first[n], d->sms), tiles = ql_ceil_div(f.first[n], grid);
    f.passes = (int)ql_ceil_div(pairs, HELD * WARPS), f.wide = (int)ql_min64(pairs, HELD * WARPS);
    size_t room = CU_T4 ? 64 << 10 : d->prop.sharedMemPerBlockOptin, sums = (size_t)(WARPS * few_each(f.lanes) * 4);
    bool staged = few_staged(d, room);
    size_t fixed = staged ? (size_t)few_room<true>::FIXED : (size_t)few_room<false>::FIXED;
    int64_t most = ql_min64(MOST, (int64_t)((room - fixed) / sums));
    f.stride = (unsigned)(grid * TILE * a.cols);
    f.group = (int)ql_ceil_div(tiles, ql_ceil_div(tiles, most)); /* meetings as rare as there is room for, evenly apart */
    auto kernel = staged ? few_kernel<true>(a.dtype, many) : few_kernel<false>(a.dtype, many);
    return cu_launch_early(q, "nf4_matmul", kernel, (unsigned)grid, THREADS, fixed + (size_t)f.group * sums, f);
}

ql_status cu_nf4_matmul(const ql_queue *q, ql_tensor out, ql_tensor a, const ql_nf4 *w, int n, ql_tensor c, ql_tensor bias)
{
    bool side_by_side = alike(w, n);
    for (int i = 0; i < n; i++) side_by_side &= fast(q->stream->dev, a, &w[i]);
    if (side_by_side) return few_launch(q, out, a, w, n, c, bias);
    /* Each alone: a matrix' result is the same whatever its neighbours are. */
    for (int64_t i = 0, at = 0; i < n; at += w[i++].rows) {
        ql_tensor to = ql_cols(out, at, w[i].rows), ci = c.data ? ql_cols(c, at, w[i].rows) : c, bi = bias.data ? ql_cols(bias, at, w[i].rows) : bias;
        if (fast(q->stream->dev, a, &w[i])) {
            QL_TRY(few_launch(q, to, a, &w[i], 1, ci, bi));
            continue;
        }
        QL_TRY(cu_launch(q, "nf4_matmul", few_any, cu_blocks(w[i].rows, 8), 256, 0, w[i], cu_see(a), (int)a.rows, cu_log2(w[i].block),
                         w[i].block2 ? cu_log2(w[i].block2) : 0, cu_see(to), cu_see(ci), cu_see(bi)));
    }
    return QL_OK;
}
