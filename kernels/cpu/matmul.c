/* Matmul on BLAS. fp32 operands go to sgemm as they are; 16-bit ones are widened into the workspace
 * in panels, and a 16-bit result is rounded once from an fp32 panel. Every cut depends on the shape
 * alone. */
#include "kernels/cpu/cpu.h"

#include <cblas.h>

/* The workspace: fp32 panels of a (MB × KB), b (NB × KB) and out (MB × NB). Panels are never
 * thinner than 64 rows; a longer K is summed in pieces of KB. */
enum {
    A_FLOATS = 4 << 20,
    B_FLOATS = 8 << 20,
    OUT_FLOATS = 4 << 20,
    KB = 1 << 16,
    MB = 1024,
};

typedef struct {
    ql_tensor a, b, c, bias, out;
    ql_trans trans;
    float alpha;
    float *wa, *wb, *wo;
    int64_t m, n, k;
} gemm;

/* dst (mn × nn, row stride ld) = c + bias there, or nothing; returns sgemm's beta. */
static float start(const gemm *g, float *dst, int64_t ld, int64_t m0, int64_t mn, int64_t n0,
                   int64_t nn)
{
    float tmp[QL_CPU_PIECE];
    bool has_c = ql_tensor_set(g->c), has_bias = ql_tensor_set(g->bias);
    if (!has_c && !has_bias) return 0.0f;
    for (int64_t i = 0; i < mn; i++) {
        float *d = dst + i * ld;
        if (!has_c)
            ql_cpu_load(d, g->bias, 0, n0, nn);
        else if (ql_cpu_at(g->c, m0 + i, n0) != (void *)d)
            ql_cpu_load(d, g->c, m0 + i, n0, nn);
        for (int64_t j = 0; has_c && has_bias && j < nn; j += QL_CPU_PIECE) {
            int64_t w = ql_min64(QL_CPU_PIECE, nn - j);
            const float *b = ql_cpu_read(g->bias, 0, n0 + j, w, tmp);
            for (int64_t x = 0; x < w; x++) d[j + x] += b[x];
        }
    }
    return 1.0f;
}

static void block(const gemm *g, const float *b, int ldb, int64_t m0, int64_t mn, int64_t n0,
                  int64_t nn, int64_t k0, int64_t kn)
{
    int lda = 0;
    bool direct = g->out.dtype == QL_F32, first = k0 == 0, last = k0 + kn == g->k;
    const float *a = g->trans == QL_TN ? ql_cpu_panel(g->a, k0, kn, m0, mn, g->wa, &lda)
                                       : ql_cpu_panel(g->a, m0, mn, k0, kn, g->wa, &lda);
    float *dst = direct ? ql_cpu_at(g->out, m0, n0) : g->wo, beta = 1.0f;
    int64_t ld = direct ? g->out.ld : nn;
    if (first) beta = start(g, dst, ld, m0, mn, n0, nn);
    cblas_sgemm(CblasRowMajor, g->trans == QL_TN ? CblasTrans : CblasNoTrans,
                g->trans == QL_NT ? CblasTrans : CblasNoTrans, (int)mn, (int)nn, (int)kn, g->alpha,
                a, lda, b, ldb, beta, dst, (int)ld);
    if (!direct && last)
        for (int64_t i = 0; i < mn; i++) ql_cpu_store(g->out, m0 + i, n0, dst + i * ld, nn);
}

QL_CPU_OP(matmul, ql_tensor out, ql_tensor a, ql_tensor b, ql_trans trans, float alpha, ql_tensor c,
          ql_tensor bias)
{
    float *work = q->work;
    gemm g = {.a = a, .b = b, .c = c, .bias = bias, .out = out, .trans = trans, .alpha = alpha};
    g.wa = work, g.wb = work + A_FLOATS, g.wo = work + A_FLOATS + B_FLOATS;
    g.m = out.rows, g.n = out.cols, g.k = trans == QL_TN ? a.rows : a.cols;
    if (a.dtype == QL_F32) {
        block(&g, b.data, (int)b.ld, 0, g.m, 0, g.n, 0, g.k);
        return QL_OK;
    }
    int64_t kb = ql_min64(g.k, KB);
    int64_t nb = ql_min64(g.n, ql_min64(B_FLOATS / kb, OUT_FLOATS / MB));
    int64_t mb = ql_min64(g.m, ql_min64(A_FLOATS / kb, MB));
    bool cut = kb < g.k;
    for (int64_t n0 = 0; n0 < g.n; n0 += nb) {
        int64_t nn = ql_min64(nb, g.n - n0);
        int ldb = 0;
        const float *wb = NULL;
        for (int64_t m0 = 0; m0 < g.m; m0 += mb) {
            for (int64_t k0 = 0; k0 < g.k; k0 += kb) {
                int64_t kn = ql_min64(kb, g.k - k0);
                if (!wb || cut)
                    wb = trans == QL_NT ? ql_cpu_panel(b, n0, nn, k0, kn, g.wb, &ldb)
                                        : ql_cpu_panel(b, k0, kn, n0, nn, g.wb, &ldb);
                block(&g, wb, ldb, m0, ql_min64(mb, g.m - m0), n0, nn, k0, kn);
            }
        }
    }
    return QL_OK;
}
