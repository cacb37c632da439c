/* wgmma_check: the warpgroup products of kernels/cuda/wgmma.h by themselves, on small integers whose products are exact:
 * one line for each operand form, and where it differs from the host's sums, which elements and how. */
#include "kernels/cuda/wgmma.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 128 };

/* c (64, N) for form 0: A B^T with both K-major (DP columns); 1: P B with P (64, 128) in registers, B (128, DP) N-major. */
template <int DP, int FORM>
static __global__ void __launch_bounds__(128) product(float *c, const __nv_bfloat16 *a, const __nv_bfloat16 *b, int a_row)
{
    extern __shared__ unsigned char memory[];
    constexpr int N = FORM ? DP : 128;
    unsigned sa = (smem_address(memory) + 1023) & ~1023u, sb = sa + ROWS * DP * 2;
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row = threadIdx.x / 32 * 16 + g;
    float d[N / 2];
    panels_load<DP, ROWS>(sa, (const char *)a, DP, 0, ROWS, DP);
    panels_load<DP, ROWS>(sb, (const char *)b, DP, 0, ROWS, DP);
    flight f = {0, 0};
    flight_add(f, 0);
    flight_flush(f);
    __syncthreads();
    for (int i = 0; i < N / 2; i++) d[i] = 1000;
    wg_begin();
    if constexpr (FORM == 0) {
        uint64_t da = desc_k_major(sa + a_row * 128), db = desc_k_major(sb);
#pragma unroll
        for (int k = 0; k < DP / 16; k++)
            wgmma<QL_BF16, N, 0>(d, desc_add(da, k / 4 * ROWS * 128 + k % 4 * 32),
                                 desc_add(db, k / 4 * ROWS * 128 + k % 4 * 32), k > 0);
        wg_commit();
    } else {
        uint64_t db = desc_n_major(sb, ROWS * 128);
        unsigned p[32];
        const unsigned *w = (const unsigned *)a; /* a (64, 128), two columns a word */
#pragma unroll
        for (int k = 0; k < 8; k++) {
            p[4 * k] = w[row * 64 + 8 * k + t], p[4 * k + 1] = w[(row + 8) * 64 + 8 * k + t];
            p[4 * k + 2] = w[row * 64 + 8 * k + 4 + t], p[4 * k + 3] = w[(row + 8) * 64 + 8 * k + 4 + t];
        }
        wg_begin();
#pragma unroll
        for (int k = 0; k < 8; k++) wgmma<QL_BF16, N, 1>(d, p + 4 * k, desc_add(db, k * 2048), k > 0);
        wg_commit();
    }
    wg_wait<0>();
    wg_done(d);
#pragma unroll
    for (int n = 0; n < N / 8; n++)
        for (int e = 0; e < 4; e++) c[(row + e / 2 * 8) * N + n * 8 + 2 * t + e % 2] = d[4 * n + e];
}

static int failures;

template <int DP, int FORM>
static void check(const char *name, int a_row, int unit)
{
    enum { N = FORM ? DP : 128, K = FORM ? 128 : DP };
    static float a[ROWS][128], b[ROWS][128];
    static __nv_bfloat16 ha[ROWS * 128], hb[ROWS * 128];
    static float got[64 * 128];
    __nv_bfloat16 *da, *db;
    float *dc;
    unsigned s = 7;
    int a_cols = FORM ? 128 : DP, bad = 0;
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < 128; j++) {
            s = s * 1664525u + 1013904223u;
            a[i][j] = unit ? (float)(i % 64 == j % 64) : (float)((int)(s >> 24) % 9 - 4);
            s = s * 1664525u + 1013904223u;
            b[i][j] = unit ? (float)(i + j) : (float)((int)(s >> 24) % 9 - 4);
        }
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < 128; j++) {
            if (j < a_cols) ha[i * a_cols + j] = __float2bfloat16(a[i][j]);
            if (j < DP) hb[i * DP + j] = __float2bfloat16(b[i][j]);
        }
    cudaMalloc((void **)&da, sizeof ha), cudaMalloc((void **)&db, sizeof hb), cudaMalloc((void **)&dc, sizeof got);
    cudaMemcpy(da, ha, sizeof ha, cudaMemcpyHostToDevice), cudaMemcpy(db, hb, sizeof hb, cudaMemcpyHostToDevice);
    cudaMemset(dc, 0xff, sizeof got);
    size_t smem = 2 * ROWS * DP * 2 + 1024;
    cudaFuncSetAttribute(product<DP, FORM>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem);
    product<DP, FORM><<<1, 128, smem>>>(dc, da, db, a_row);
    cudaError_t e = cudaDeviceSynchronize();
    cudaMemcpy(got, dc, sizeof got, cudaMemcpyDeviceToHost);
    for (int i = 0; i < 64; i++)
        for (int j = 0; j < N; j++) {
            float want = 0;
            for (int k = 0; k < K; k++)
                want += FORM ? a[i][k] * (float)hb[k * DP + j] : a[a_row + i][k] * (float)hb[j * DP + k];
            if (got[i * N + j] != want && bad++ < 6)
                printf("# %s [%d][%d]: %g, expected %g\n", name, i, j, (double)got[i * N + j], (double)want);
        }
    printf("%s %s: %s, %d of %d differ\n", bad || e ? "not ok" : "ok", name, cudaGetErrorString(e), bad, 64 * N);
    failures += bad || e;
    cudaFree(da), cudaFree(db), cudaFree(dc);
}

int main(void)
{
    check<128, 0>("K-major, 128 columns, A a unit matrix", 0, 1);
    check<128, 0>("K-major, 128 columns", 0, 0);
    check<128, 0>("K-major, 128 columns, A from row 64", 64, 0);
    check<64, 0>("K-major, 64 columns", 0, 0);
    check<128, 1>("N-major, 128 columns, A a unit matrix", 0, 1);
    check<128, 1>("N-major, 128 columns", 0, 0);
    check<64, 1>("N-major, 64 columns", 0, 0);
    return failures;
}
