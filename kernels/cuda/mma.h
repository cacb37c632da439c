/* Tensor-core building blocks for 16-bit tiles in shared memory: m16n8k16 on sm_80+, two m16n8k8 on sm_75 (fp16).
 * The registers of an m16n8k16 fragment are those of two m16n8k8 ones, so everything above mma16() is one code. */
#ifndef QL_CUDA_MMA_H
#define QL_CUDA_MMA_H

#include "kernels/cuda/cu.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define CU_SM75 1
#else
#define CU_SM75 0
#endif

/* c (16, 8) += a (16, 16) · b (16, 8) */
template <int DTYPE>
static __device__ __forceinline__ void mma16(float c[4], const unsigned a[4], const unsigned b0, const unsigned b1)
{
#if CU_SM75
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[2]), "r"(a[3]), "r"(b1));
#else
    if constexpr (DTYPE == QL_F16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

static __device__ __forceinline__ unsigned smem_address(const void *p)
{
    return (unsigned)__cvta_generic_to_shared(p);
}
static __device__ __forceinline__ void ldmatrix(unsigned r[4], unsigned address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
static __device__ __forceinline__ void ldmatrix_t(unsigned r[4], unsigned address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/* A tile is rows of DP 16-bit elements, cut into 16-byte chunks whose place is swizzled by the row so that the 8 rows
 * of an ldmatrix lie in different banks. Byte offset of (row, chunk): */
template <int DP>
static __device__ __forceinline__ unsigned tile_at(int row, int chunk)
{
    return (unsigned)(row * DP * 2 + ((chunk ^ (row & 7)) << 4));
}

/* 16 bytes from global to shared memory, zeros if !live. sm_80+: asynchronous, see copy_wait. */
static __device__ __forceinline__ void copy16(unsigned to, const void *from, bool live)
{
#if CU_SM75
    uint4 v = make_uint4(0, 0, 0, 0);
    if (live) v = *(const uint4 *)from;
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
#else
    int bytes = live ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
#endif
}
static __device__ __forceinline__ void copy4(unsigned to, const void *from, bool live)
{
#if CU_SM75
    unsigned v = live ? *(const unsigned *)from : 0;
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
#else
    int bytes = live ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
#endif
}
static __device__ __forceinline__ void copy_wait(void)
{
#if !CU_SM75
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

/* ---- barriers in shared memory, sm_80+: a phase is over when `count` threads have arrived; phases have parities 0, 1, 0 … ---- */

static __device__ __forceinline__ void bar_init(unsigned bar, unsigned count)
{
#if !CU_SM75
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
#endif
}
static __device__ __forceinline__ void bar_arrive(unsigned bar)
{
#if !CU_SM75
    asm volatile("{\n.reg .b64 s;\nmbarrier.arrive.shared::cta.b64 s, [%0];\n}" ::"r"(bar) : "memory");
#endif
}
/* Whether the last phase of this parity is over; of a fresh barrier the one of parity 1 is. test_wait tells at once,
 * try_wait (sm_90+) may sleep for microseconds before it says no. */
#define BAR_ASK(how, over, bar, parity)                                                                               \
    asm volatile("{\n.reg .pred p;\nmbarrier." how ".parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"   \
                 : "=r"(over)                                                                                         \
                 : "r"(bar), "r"(parity)                                                                              \
                 : "memory")
static __device__ __forceinline__ bool bar_over(unsigned bar, unsigned parity)
{
    unsigned over = 1;
#if !CU_SM75
    BAR_ASK("test_wait", over, bar, parity);
#endif
    return over != 0;
}

/* ROWS rows of one head, from row `first` of which `n` are there; d ≤ DP columns, the rest zeros. */
template <int DP, int ROWS, int THREADS>
static __device__ __forceinline__ void tile_load(unsigned tile, const void *from, int64_t ld, int first, int n, int d)
{
    /* A thread keeps its chunk and goes down a multiple of 8 rows at a time, so its place in the swizzle stays. */
    constexpr int CHUNKS = DP / 8, DOWN = THREADS / CHUNKS;
    static_assert(DOWN % 8 == 0 && ROWS % DOWN == 0, "tile_load's shape");
    int row = (int)threadIdx.x / CHUNKS, chunk = (int)threadIdx.x % CHUNKS, left = chunk * 8 < d ? n - first - row : 0;
    const char *p = (const char *)from + ((first + row) * ld + chunk * 8) * 2;
    unsigned to = tile + tile_at<DP>(row, chunk);
#pragma unroll
    for (int i = 0; i < ROWS / DOWN; i++) {
        bool live = i * DOWN < left;
        copy16(to + i * DOWN * DP * 2, live ? p + (int64_t)(i * DOWN) * ld * 2 : (const char *)from, live);
    }
}

/* acc (16·MT, 8·NT) += A (16·MT rows at row_a) · B (8·NT rows at row_b)ᵀ over the DP columns of both tiles. */
template <int DTYPE, int DP, int MT, int NT>
static __device__ __forceinline__ void tile_nt(float acc[MT][NT][4], unsigned a, int row_a, unsigned b, int row_b)
{
    int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < DP / 16; k++) {
        unsigned fa[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++) ldmatrix(fa[m], a + tile_at<DP>(row_a + m * 16 + lane % 16, 2 * k + lane / 16));
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            unsigned fb[4];
            ldmatrix(fb, b + tile_at<DP>(row_b + n * 8 + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
#pragma unroll
            for (int m = 0; m < MT; m++) {
                mma16<DTYPE>(acc[m][n], fa[m], fb[0], fb[1]);
                mma16<DTYPE>(acc[m][n + 1], fa[m], fb[2], fb[3]);
            }
        }
    }
}

/* acc (16·MT, DP) += P (16·MT, 8·KT) · B (8·KT rows of the tile at row_b, DP); P is an accumulator, rounded here. */
template <int DTYPE, int DP, int MT, int KT>
static __device__ __forceinline__ void tile_nn(float acc[MT][DP / 8][4], const float p[MT][KT][4], unsigned b, int row_b)
{
    int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < KT / 2; k++) {
        unsigned fa[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++) {
            fa[m][0] = cu_pair(p[m][2 * k][0], p[m][2 * k][1], DTYPE);
            fa[m][1] = cu_pair(p[m][2 * k][2], p[m][2 * k][3], DTYPE);
            fa[m][2] = cu_pair(p[m][2 * k + 1][0], p[m][2 * k + 1][1], DTYPE);
            fa[m][3] = cu_pair(p[m][2 * k + 1][2], p[m][2 * k + 1][3], DTYPE);
        }
#pragma unroll
        for (int n = 0; n < DP / 8; n += 2) {
            unsigned fb[4];
            ldmatrix_t(fb, b + tile_at<DP>(row_b + k * 16 + lane % 16, n + lane / 16));
#pragma unroll
            for (int m = 0; m < MT; m++) {
                mma16<DTYPE>(acc[m][n], fa[m], fb[0], fb[1]);
                mma16<DTYPE>(acc[m][n + 1], fa[m], fb[2], fb[3]);
            }
        }
    }
}

/* Stores 16·MT rows of an accumulator, times `by`, as one head's rows: through the warp's own rows of a tile that
 * nobody else reads any more, so that global stores are 16 bytes wide. */
template <int DTYPE, int DP, int MT>
static __device__ __forceinline__ void tile_store(void *to, int64_t ld, int first, int n, int d,
                                                  const float acc[MT][DP / 8][4], const float by[MT][2], unsigned tile,
                                                  int row)
{
    int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    constexpr int CHUNKS = DP / 8;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                unsigned v = cu_pair(acc[m][c][2 * half] * by[m][half], acc[m][c][2 * half + 1] * by[m][half], DTYPE);
                unsigned at = tile + tile_at<DP>(row + m * 16 + half * 8 + g, c) + t * 4;
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
            }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < MT * 16 * CHUNKS / 32; i++) {
        int at = i * 32 + lane, r = at / CHUNKS, c = at % CHUNKS;
        uint4 v;
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(tile + tile_at<DP>(row + r, c))
                     : "memory");
        if (first + r < n && c * 8 < d) *(uint4 *)((char *)to + ((int64_t)(first + r) * ld + c * 8) * 2) = v;
    }
}

static __device__ __forceinline__ float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#endif
