/* variants: ways to dequantise one nested NF4 matrix (bf16, one piece), side by side on one card, before one of them is
 * chosen for kernels/cuda/nf4.cu. Each line: variant, shape, row stride, time, share of a device copy of the same
 * bytes. Every variant's output is compared with the first one's. */
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct args {
    const unsigned *packed;
    const uint8_t *absmax;
    const float *absmax2, *code, *code2;
    __nv_bfloat16 *out;
    unsigned cols8, magic, chunks; /* chunk: 8 weights, 4 bytes */
    int shift, ld;
    float offset;
};

#define MUST(x)                                                                                                       \
    do {                                                                                                              \
        cudaError_t e_ = (x);                                                                                         \
        if (e_ != cudaSuccess) {                                                                                      \
            printf("FAIL variants: %s: %s\n", #x, cudaGetErrorString(e_));                                            \
            exit(1);                                                                                                  \
        }                                                                                                             \
    } while (0)

enum { THREADS = 256 };

static __device__ __forceinline__ void put(const args &a, const float *lut, unsigned c, unsigned bits, float scale)
{
    unsigned row = (__umulhi(c, a.magic) + c) >> a.shift, col = c - row * a.cols8;
    unsigned w[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
        float hi = __fmul_rn(lut[bits >> (8 * e + 4) & 15], scale), lo = __fmul_rn(lut[bits >> (8 * e) & 15], scale);
        __nv_bfloat162 h = __floats2bfloat162_rn(hi, lo);
        w[e] = *(unsigned *)&h;
    }
    *(uint4 *)(a.out + (int64_t)row * a.ld + col * 8) = make_uint4(w[0], w[1], w[2], w[3]);
}
static __device__ __forceinline__ float scale_of(const args &a, const float *code2, unsigned q, float absmax2)
{
    return __fadd_rn(__fmul_rn(code2[q], absmax2), a.offset);
}

/* DEPTH 4-byte loads a thread, a block per tile; code2 through the L1. */
template <int DEPTH>
static __global__ void __launch_bounds__(THREADS, DEPTH <= 2 ? 8 : DEPTH <= 4 ? 6 : 4) lean(const __grid_constant__ args a)
{
    __shared__ float lut[16];
    unsigned c = blockIdx.x * (THREADS * DEPTH) + threadIdx.x, bits[DEPTH], q[DEPTH];
    float s2[DEPTH];
    bool full = (blockIdx.x + 1) * (THREADS * DEPTH) <= a.chunks;
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
        unsigned i = c + k * THREADS;
        if (full || i < a.chunks) {
            bits[k] = __ldcs(a.packed + i), q[k] = __ldg(a.absmax + i / 8), s2[k] = __ldg(a.absmax2 + i / 2048);
        }
    }
    if (threadIdx.x < 16) lut[threadIdx.x] = a.code[threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
        unsigned i = c + k * THREADS;
        if (full || i < a.chunks) put(a, lut, i, bits[k], scale_of(a, a.code2, q[k], s2[k]));
    }
}

/* 16-byte loads; a warp turns them round in shared memory. The 16 scales of a warp's 1024 weights are made once each. */
template <int DEPTH>
static __global__ void __launch_bounds__(THREADS, DEPTH <= 1 ? 8 : 6) turned(const __grid_constant__ args a)
{
    __shared__ float lut[16];
    __shared__ uint4 words[THREADS / 32][DEPTH][32];
    __shared__ float scales[THREADS / 32][DEPTH][16];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned first = (blockIdx.x * (THREADS / 32) + warp) * (DEPTH * 128), q[DEPTH];
    float s2[DEPTH];
    uint4 v[DEPTH];
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
        unsigned c = first + k * 128;
        if (c + lane * 4 < a.chunks) v[k] = __ldcs((const uint4 *)(a.packed + c) + lane);
        if (lane < 16 && c + lane * 8 < a.chunks)
            q[k] = __ldg(a.absmax + c / 8 + lane), s2[k] = __ldg(a.absmax2 + c / 2048);
    }
    if (threadIdx.x < 16) lut[threadIdx.x] = a.code[threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
        words[warp][k][lane] = v[k];
        if (lane < 16) scales[warp][k][lane] = scale_of(a, a.code2, q[k] & 255, s2[k]);
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < DEPTH; k++)
#pragma unroll
        for (int s = 0; s < 4; s++) {
            unsigned c = first + k * 128 + s * 32 + lane;
            if (c < a.chunks)
                put(a, lut, c, ((const unsigned *)words[warp][k])[s * 32 + lane], scales[warp][k][(s * 32 + lane) / 8]);
        }
}

/* Blocks that stay: each has an equal run of 256-chunk pieces and loads AHEAD pieces ahead; both tables in shared memory. */
template <int AHEAD>
static __global__ void __launch_bounds__(THREADS, 8) stays(const __grid_constant__ args a)
{
    __shared__ float lut[16], code2[256];
    unsigned pieces = (a.chunks + THREADS - 1) / THREADS;
    unsigned at = (unsigned)((uint64_t)pieces * blockIdx.x / gridDim.x), end = (unsigned)((uint64_t)pieces * (blockIdx.x + 1) / gridDim.x);
    unsigned bits[AHEAD], q[AHEAD];
    float s2[AHEAD];
    auto load = [&](int k, unsigned piece) {
        unsigned i = piece * THREADS + threadIdx.x;
        if (piece < end && i < a.chunks)
            bits[k] = __ldcs(a.packed + i), q[k] = __ldg(a.absmax + i / 8), s2[k] = __ldg(a.absmax2 + i / 2048);
    };
#pragma unroll
    for (int k = 0; k < AHEAD; k++) load(k, at + k);
    if (threadIdx.x < 16) lut[threadIdx.x] = a.code[threadIdx.x];
    code2[threadIdx.x] = a.code2[threadIdx.x];
    __syncthreads();
    for (; at < end; at += AHEAD) {
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            unsigned i = (at + k) * THREADS + threadIdx.x;
            bool live = at + k < end && i < a.chunks;
            unsigned b = bits[k];
            float s = live ? scale_of(a, code2, q[k] & 255, s2[k]) : 0.f;
            load(k, at + k + AHEAD);
            if (live) put(a, lut, i, b, s);
        }
    }
}

struct set {
    args a[6];
    int64_t n;
};

typedef void (*launch)(const args &a, int sms);
template <int D>
static void run_lean(const args &a, int)
{
    lean<D><<<(a.chunks + THREADS * D - 1) / (THREADS * D), THREADS>>>(a);
}
template <int D>
static void run_turned(const args &a, int)
{
    turned<D><<<(a.chunks + THREADS * 4 * D - 1) / (THREADS * 4 * D), THREADS>>>(a);
}
template <int D>
static void run_stays(const args &a, int sms)
{
    stays<D><<<sms * 8, THREADS>>>(a);
}
static void run_copy(const args &a, int)
{
    int64_t bytes = (int64_t)a.chunks * 8 * 2 + (int64_t)a.chunks * 4;
    MUST(cudaMemcpyAsync(a.out, (const char *)a.out + 512 * 1024 * 1024, bytes / 2, cudaMemcpyDeviceToDevice));
}

static double time_of(launch f, const set *s, int sms)
{
    cudaEvent_t e0, e1;
    float ms, best = 1e30f;
    MUST(cudaEventCreate(&e0));
    MUST(cudaEventCreate(&e1));
    for (int batch = 0; batch < 6; batch++) {
        MUST(cudaEventRecord(e0));
        for (int i = 0; i < 120; i++) f(s->a[i % 6], sms);
        MUST(cudaEventRecord(e1));
        MUST(cudaEventSynchronize(e1));
        MUST(cudaEventElapsedTime(&ms, e0, e1));
        if (batch && ms < best) best = ms;
    }
    MUST(cudaGetLastError());
    return best / 120;
}

static void *device(int64_t bytes, int fill)
{
    void *p;
    unsigned char *h = (unsigned char *)malloc(bytes);
    unsigned s = 12345u + (unsigned)fill;
    MUST(cudaMalloc(&p, bytes));
    for (int64_t i = 0; i < bytes; i++) h[i] = (unsigned char)((s = s * 1664525u + 1013904223u) >> 24);
    if (fill == 2)
        for (int64_t i = 0; i < bytes / 4; i++) ((float *)h)[i] = (float)(i % 251) / 251.f - 0.3f;
    MUST(cudaMemcpy(p, h, bytes, cudaMemcpyHostToDevice));
    free(h);
    return p;
}

int main(void)
{
    const struct {
        const char *name;
        launch f;
    } all[] = {{"lean 4", run_lean<4>},     {"lean 2", run_lean<2>},     {"lean 8", run_lean<8>},
               {"turned 1", run_turned<1>}, {"turned 2", run_turned<2>}, {"stays 4", run_stays<4>},
               {"stays 2", run_stays<2>}};
    const int shapes[4] = {28672, 14336, 4096, 1024}, K = 4096;
    cudaDeviceProp prop;
    MUST(cudaGetDeviceProperties(&prop, 0));
    int64_t most = (int64_t)28672 * K;
    set s;
    for (int i = 0; i < 6; i++) {
        args a = {};
        a.packed = (const unsigned *)device(most / 2, 1), a.absmax = (const uint8_t *)device(most / 64, 1);
        a.absmax2 = (const float *)device(most / 4096, 2), a.code = (const float *)device(64, 2);
        a.code2 = (const float *)device(1024, 2), a.offset = 0.03f;
        /* rows of every stride, and what a copy reads: 512 MiB further */
        MUST(cudaMalloc((void **)&a.out, (int64_t)1 << 30));
        a.cols8 = K / 8, a.shift = 9, a.magic = 1; /* K/8 = 2⁹: the magic number of a power of two */
        s.a[i] = a;
    }
    for (int h = 0; h < 4; h++)
        for (int pad = 0; pad <= 64; pad += pad ? 48 : 16) {
            int64_t n = (int64_t)shapes[h] * K, bytes = (int64_t)shapes[h] * (K + pad) * 2;
            double moved = (double)n * (0.5 + 1.0 / 64 + 4.0 / 64 / 256 + 2);
            for (int i = 0; i < 6; i++) s.a[i].chunks = (unsigned)(n / 8), s.a[i].ld = K + pad;
            double copy = time_of(run_copy, &s, 0) * moved / ((double)n * 2.5);
            char *first = (char *)malloc(bytes), *mine = (char *)malloc(bytes);
            for (size_t v = 0; v < sizeof all / sizeof *all; v++) {
                MUST(cudaMemset(s.a[0].out, 0, bytes));
                all[v].f(s.a[0], prop.multiProcessorCount);
                MUST(cudaMemcpy(v ? mine : first, s.a[0].out, bytes, cudaMemcpyDeviceToHost));
                bool same = v == 0 || memcmp(first, mine, bytes) == 0;
                double ms = time_of(all[v].f, &s, prop.multiProcessorCount);
                printf("%-9s %5dx%d ld %d  %8.4f ms %6.0f GB/s %5.1f %% of copy%s\n", all[v].name, shapes[h], K, K + pad, ms,
                       moved / ms * 1e-6, 100 * copy / ms, same ? "" : "  FAIL: differs");
                fflush(stdout);
            }
            free(first), free(mine);
        }
    printf("PASS variants finished\n");
    return 0;
}
