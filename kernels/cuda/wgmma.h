/* Hopper's building blocks (compute_90a): warpgroup products m64nNk16 out of swizzled tiles in shared memory, barriers
 * between a producer and consumers.
 *
 * A tile is ROWS rows of DP 16-bit elements, cut into panels of 64 columns: (panel, row, 64 columns). A row of a panel is
 * 128 bytes, whose eight 16-byte chunks are swizzled by the row: chunk c of row r lies at c ^ (r & 7). Panels start at
 * multiples of 1024 bytes. That is the 128-byte swizzle which the matrix descriptors name:
 *   as an operand whose summed dimension runs along the columns (K-major), 8-row groups are 1024 bytes apart, and 16
 *   columns further is 32 bytes further, inside the swizzle;
 *   as an operand B whose summed dimension runs along the rows (N-major), panels are `leading` bytes apart, 8-row groups
 *   1024 bytes, and 16 rows further is 2048 bytes further. */
#ifndef QL_CUDA_WGMMA_H
#define QL_CUDA_WGMMA_H

#include "kernels/cuda/mma.h"

template <int ROWS>
static __device__ __forceinline__ unsigned panel_at(int row, int chunk)
{
    return (unsigned)(chunk / 8 * ROWS * 128 + row * 128 + ((chunk % 8 ^ (row & 7)) << 4));
}

/* Address, leading and stride offset in units of 16 bytes; 1 << 62: the 128-byte swizzle. In a cluster the bits of a shared
 * address from 24 on name the block: they do not belong here, where the next field begins. */
static __device__ __forceinline__ uint64_t desc_n_major(unsigned address, unsigned leading)
{
    return (uint64_t)(address >> 4 & 0x3fff) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
static __device__ __forceinline__ uint64_t desc_k_major(unsigned address)
{
    return desc_n_major(address, 16); /* the leading offset is not used */
}
/* The descriptor `bytes` further. */
static __device__ __forceinline__ uint64_t desc_add(uint64_t d, unsigned bytes)
{
    return d + (bytes >> 4);
}

#define WG_F4(d, i)  "+f"((d)[i]), "+f"((d)[(i) + 1]), "+f"((d)[(i) + 2]), "+f"((d)[(i) + 3])
#define WG_F16(d, i) WG_F4(d, i), WG_F4(d, (i) + 4), WG_F4(d, (i) + 8), WG_F4(d, (i) + 12)
#define WG_OUT32(d)  WG_F16(d, 0), WG_F16(d, 16)
#define WG_OUT64(d)  WG_F16(d, 0), WG_F16(d, 16), WG_F16(d, 32), WG_F16(d, 48)
#define WG_REGS32                                                                                                     \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                                         \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"
#define WG_REGS64                                                                                                     \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                                         \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"                                                \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"                                                \
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"
/* The numbers of the operands behind the accumulators: a, b, accumulate, "B is N-major". */
#define WG_SS(n, type, regs, outs, a, b, c, tb)                                                                       \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" c ", 0;\n"                                                      \
                 "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " " regs ", %" a ", %" b              \
                 ", p, 1, 1, 0, %" tb ";\n}"                                                                          \
                 : outs(d)                                                                                            \
                 : "l"(x), "l"(y), "r"(accumulate), "n"(TB))
#define WG_RS(n, type, regs, outs, a, b, c, tb)                                                                       \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" c ", 0;\n"                                                      \
                 "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " " regs ", {" a "}, %" b             \
                 ", p, 1, 1, %" tb ";\n}"                                                                             \
                 : outs(d)                                                                                            \
                 : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(y), "r"(accumulate), "n"(TB))

/* d (64, N) [+]= A (64, 16) · B (N, 16)ᵀ, A and B in shared memory. TB 1: B is N-major. */
template <int DTYPE, int N, int TB>
static __device__ __forceinline__ void wgmma(float (&d)[N / 2], uint64_t x, uint64_t y, int accumulate)
{
    static_assert(N == 64 || N == 128, "one of the shapes in use");
    if constexpr (N == 64 && DTYPE == QL_BF16) WG_SS("64", "bf16", WG_REGS32, WG_OUT32, "32", "33", "34", "35");
    if constexpr (N == 64 && DTYPE == QL_F16) WG_SS("64", "f16", WG_REGS32, WG_OUT32, "32", "33", "34", "35");
    if constexpr (N == 128 && DTYPE == QL_BF16) WG_SS("128", "bf16", WG_REGS64, WG_OUT64, "64", "65", "66", "67");
    if constexpr (N == 128 && DTYPE == QL_F16) WG_SS("128", "f16", WG_REGS64, WG_OUT64, "64", "65", "66", "67");
}
/* The same with A in registers: rows g and g + 8 of a warp's 16, columns 2t and 2t + 1, then 8 columns further. */
template <int DTYPE, int N, int TB>
static __device__ __forceinline__ void wgmma(float (&d)[N / 2], const unsigned *x, uint64_t y, int accumulate)
{
    static_assert(N == 64 || N == 128, "one of the shapes in use");
    if constexpr (N == 64 && DTYPE == QL_BF16)
        WG_RS("64", "bf16", WG_REGS32, WG_OUT32, "%32,%33,%34,%35", "36", "37", "38");
    if constexpr (N == 64 && DTYPE == QL_F16)
        WG_RS("64", "f16", WG_REGS32, WG_OUT32, "%32,%33,%34,%35", "36", "37", "38");
    if constexpr (N == 128 && DTYPE == QL_BF16)
        WG_RS("128", "bf16", WG_REGS64, WG_OUT64, "%64,%65,%66,%67", "68", "69", "70");
    if constexpr (N == 128 && DTYPE == QL_F16)
        WG_RS("128", "f16", WG_REGS64, WG_OUT64, "%64,%65,%66,%67", "68", "69", "70");
}

/* Before the first product of a batch: what was written to its registers is seen. */
static __device__ __forceinline__ void wg_begin(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
static __device__ __forceinline__ void wg_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* All batches but the last LEFT are done. The compiler does not know that a batch writes registers after its issue: every
 * accumulator goes through wg_done between the wait and its first use. */
template <int LEFT>
static __device__ __forceinline__ void wg_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
template <int N>
static __device__ __forceinline__ void wg_done(float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

/* The share of registers that the warpgroup needs. */
template <int N>
static __device__ __forceinline__ void regs_up(void)
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
static __device__ __forceinline__ void regs_down(void)
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

/* ---- barriers, as in mma.h ---- */

/* Waits are microseconds; one that does not end is a broken kernel, which shall be an error and not a hang. */
static __device__ __forceinline__ void bar_wait(unsigned bar, unsigned parity)
{
    for (unsigned tries = 0, over = 0; !over; tries++) {
        BAR_ASK("try_wait", over, bar, parity);
        if (tries > 1u << 22) __trap();
    }
}

/* ---- clusters: blocks that run at once and read each other's shared memory ---- */

static __device__ __forceinline__ void cluster_sync(void)
{
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
/* Barriers just made are seen by the cluster. */
static __device__ __forceinline__ void bars_shown(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/* What lies at this address in the shared memory of the cluster's block `rank`. */
static __device__ __forceinline__ unsigned address_in(unsigned address, int rank)
{
    unsigned r;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
    return r;
}
static __device__ __forceinline__ void bar_arrive_at(unsigned bar, int rank)
{
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(address_in(bar, rank)) : "memory");
}
/* bar_wait for what other blocks wrote before they arrived. */
static __device__ __forceinline__ void bar_wait_cluster(unsigned bar, unsigned parity)
{
    for (unsigned tries = 0, over = 0; !over; tries++) {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(over)
                     : "r"(bar), "r"(parity)
                     : "memory");
        if (tries > 1u << 22) __trap();
    }
}
static __device__ __forceinline__ float4 shared_get4(unsigned address, int rank)
{
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address_in(address, rank))
                 : "memory");
    return v;
}
static __device__ __forceinline__ void shared_put4(unsigned address, float4 v)
{
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
static __device__ __forceinline__ float2 shared_pair(unsigned address)
{
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
    return v;
}

/* ---- a producer's cp.async copies: batches that arrive at their barriers when they have landed ---- */

/* Batches land in order; the two youngest are left under way. Products read shared memory by another path than the one
 * copies write it by, hence the proxy fence between. */
struct flight {
    unsigned old, young; /* barriers of the last two batches; 0: none */
};
static __device__ __forceinline__ void flight_land(unsigned bar)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    if (bar) bar_arrive(bar);
}
static __device__ __forceinline__ void flight_add(flight &f, unsigned bar)
{
    asm volatile("cp.async.commit_group;\ncp.async.wait_group 2;" ::: "memory");
    flight_land(f.old);
    f.old = f.young, f.young = bar;
}
static __device__ __forceinline__ void flight_flush(flight &f)
{
    asm volatile("cp.async.wait_all;" ::: "memory");
    flight_land(f.old);
    flight_land(f.young);
    f.old = f.young = 0;
}
/* Waits for an empty stage. Whoever has to wait lands everything first, because the consumers may need it: hence a question
 * that does not sleep. */
static __device__ __forceinline__ void flight_wait(flight &f, unsigned bar, unsigned parity)
{
    if (bar_over(bar, parity)) return;
    flight_flush(f);
    bar_wait(bar, parity);
}

/* ROWS rows of one head by 128 threads, from row `first` of which n are there; d ≤ DP columns, the rest zeros. */
template <int DP, int ROWS>
static __device__ __forceinline__ void panels_load(unsigned tile, const char *from, int64_t ld, int first, int n, int d)
{
    constexpr int CHUNKS = DP / 8, DOWN = 128 / CHUNKS;
    static_assert(DOWN % 8 == 0 && ROWS % DOWN == 0, "panels_load's shape");
    int row = (int)threadIdx.x % 128 / CHUNKS, chunk = (int)threadIdx.x % CHUNKS;
    int left = chunk * 8 < d ? n - first - row : 0;
    const char *p = from + ((first + row) * ld + chunk * 8) * 2;
    unsigned to = tile + panel_at<ROWS>(row, chunk);
#pragma unroll 8
    for (int i = 0; i < ROWS / DOWN; i++) {
        bool live = i * DOWN < left;
        copy16(to + i * DOWN * 128, live ? p : from, live);
        p += DOWN * ld * 2;
    }
}

#endif
