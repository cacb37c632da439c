/* Plain references in double: contiguous arrays, no blocking, no cleverness. */
#ifndef QL_TEST_REF_H
#define QL_TEST_REF_H

#include "kernels/ops.h"

typedef struct {
    int64_t H, G, D, window, docs, tq, tk;
    double scale;
    const int32_t *q_start, *q_len, *k_start, *k_len;
} ref_attn;

void ref_matmul(double *out, const double *a, const double *b, ql_trans trans, double alpha,
                const double *c, const double *bias, int64_t m, int64_t n, int64_t k);
void ref_rmsnorm(double *y, const double *x, const double *w, double eps, int64_t rows, int64_t n);
void ref_rmsnorm_dx(double *dx, const double *dy, const double *x, const double *w, double eps,
                    const double *dres, int64_t rows, int64_t n);
void ref_rope(double *x, int64_t rows, int64_t cols, int64_t D, const double *pos,
              const double *freq, double scale, int sign);
void ref_swiglu(double *h, const double *gu, int64_t rows, int64_t F);
void ref_swiglu_dx(double *dgu, const double *dh, const double *gu, int64_t rows, int64_t F);
void ref_attention(double *o, double *lse, const double *q, const double *k, const double *v,
                   const ref_attn *a);
void ref_attention_dx(double *dq, double *dk, double *dv, const double *dout, const double *q,
                      const double *k, const double *v, const ref_attn *a);
/* One row: nll and lse of logits (n); dlogits = d nll / d logits. */
double ref_ce(const double *logits, int64_t n, int64_t target, double smoothing, double *lse,
              double *dlogits);

double ref_sum(const double *x, int64_t n);

#endif
