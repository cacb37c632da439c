#include "tests/ops/ref.h"

#include <math.h>
#include <stdlib.h>

void ref_matmul(double *out, const double *a, const double *b, ql_trans trans, double alpha,
                const double *c, const double *bias, int64_t m, int64_t n, int64_t k)
{
    for (int64_t i = 0; i < m; i++) {
        for (int64_t j = 0; j < n; j++) {
            double s = 0;
            for (int64_t x = 0; x < k; x++)
                s += (trans == QL_TN ? a[x * m + i] : a[i * k + x]) *
                     (trans == QL_NT ? b[j * k + x] : b[x * n + j]);
            out[i * n + j] = alpha * s + (c ? c[i * n + j] : 0) + (bias ? bias[j] : 0);
        }
    }
}

static double inverse_rms(const double *x, double eps, int64_t n)
{
    double s = 0;
    for (int64_t j = 0; j < n; j++) s += x[j] * x[j];
    return 1 / sqrt(s / (double)n + eps);
}

void ref_rmsnorm(double *y, const double *x, const double *w, double eps, int64_t rows, int64_t n)
{
    for (int64_t i = 0; i < rows; i++) {
        double inv = inverse_rms(x + i * n, eps, n);
        for (int64_t j = 0; j < n; j++) y[i * n + j] = w[j] * x[i * n + j] * inv;
    }
}

void ref_rmsnorm_dx(double *dx, const double *dy, const double *x, const double *w, double eps,
                    const double *dres, int64_t rows, int64_t n)
{
    for (int64_t i = 0; i < rows; i++, dx += n, dy += n, x += n) {
        double inv = inverse_rms(x, eps, n), mean = 0;
        for (int64_t j = 0; j < n; j++) mean += x[j] * inv * w[j] * dy[j] / (double)n;
        for (int64_t j = 0; j < n; j++)
            dx[j] = inv * (w[j] * dy[j] - x[j] * inv * mean) + (dres ? dres[i * n + j] : 0);
    }
}

void ref_rope(double *x, int64_t rows, int64_t cols, int64_t D, const double *pos,
              const double *freq, double scale, int sign)
{
    for (int64_t t = 0; t < rows; t++) {
        for (int64_t c = 0; c < cols; c += D) {
            for (int64_t i = 0; i < D / 2; i++) {
                double angle = (double)((float)pos[t] * (float)freq[i]) * sign;
                double *p = x + t * cols + c + i, *r = p + D / 2, a = *p, b = *r;
                *p = (a * cos(angle) - b * sin(angle)) * scale;
                *r = (b * cos(angle) + a * sin(angle)) * scale;
            }
        }
    }
}

void ref_swiglu(double *h, const double *gu, int64_t rows, int64_t F)
{
    for (int64_t t = 0; t < rows; t++)
        for (int64_t j = 0; j < F; j++) {
            double g = gu[t * 2 * F + j];
            h[t * F + j] = g / (1 + exp(-g)) * gu[t * 2 * F + F + j];
        }
}

void ref_swiglu_dx(double *dgu, const double *dh, const double *gu, int64_t rows, int64_t F)
{
    for (int64_t t = 0; t < rows; t++)
        for (int64_t j = 0; j < F; j++) {
            double g = gu[t * 2 * F + j], u = gu[t * 2 * F + F + j], s = 1 / (1 + exp(-g)),
                   d = dh[t * F + j];
            dgu[t * 2 * F + j] = d * u * s * (1 + g * (1 - s));
            dgu[t * 2 * F + F + j] = d * g * s;
        }
}

/* The probabilities of one query and head over its document's keys; returns the log-sum. */
static double probabilities(double *p, const double *q, const double *k, const ref_attn *a,
                            int64_t doc, int64_t h, int64_t i)
{
    int64_t pos = i + a->k_len[doc] - a->q_len[doc], g = h / (a->H / a->G);
    double top = -INFINITY, sum = 0;
    for (int64_t j = 0; j < a->k_len[doc]; j++) {
        const double *x = q + ((a->q_start[doc] + i) * a->H + h) * a->D;
        const double *y = k + ((a->k_start[doc] + j) * a->G + g) * a->D;
        p[j] = 0;
        for (int64_t d = 0; d < a->D; d++) p[j] += x[d] * y[d] * a->scale;
        if (j > pos || (a->window > 0 && j <= pos - a->window)) p[j] = -INFINITY;
        top = fmax(top, p[j]);
    }
    for (int64_t j = 0; j < a->k_len[doc]; j++) sum += p[j] > -INFINITY ? exp(p[j] - top) : 0;
    for (int64_t j = 0; j < a->k_len[doc]; j++) p[j] = p[j] > -INFINITY ? exp(p[j] - top) / sum : 0;
    return sum > 0 ? top + log(sum) : -INFINITY;
}

/* Rows outside every document are NaN: they must not be written. */
void ref_attention(double *o, double *lse, const double *q, const double *k, const double *v,
                   const ref_attn *a)
{
    double *p = calloc((size_t)a->tk + 1, sizeof *p);
    for (int64_t i = 0; i < a->tq * a->H * a->D; i++) o[i] = NAN;
    for (int64_t i = 0; i < a->tq * a->H; i++) lse[i] = NAN;
    for (int64_t doc = 0; doc < a->docs; doc++)
        for (int64_t i = 0; i < a->q_len[doc]; i++)
            for (int64_t h = 0; h < a->H; h++) {
                int64_t row = (a->q_start[doc] + i) * a->H + h, g = h / (a->H / a->G);
                lse[row] = probabilities(p, q, k, a, doc, h, i);
                for (int64_t d = 0; d < a->D; d++) {
                    double s = 0;
                    for (int64_t j = 0; j < a->k_len[doc]; j++)
                        s += p[j] * v[((a->k_start[doc] + j) * a->G + g) * a->D + d];
                    o[row * a->D + d] = s;
                }
            }
    free(p);
}

/* One query and head's share: dq of its row, added to dk and dv. */
static void query_dx(double *dq, double *dk, double *dv, const double *dout, const double *q,
                     const double *k, const double *v, const ref_attn *a, int64_t doc, int64_t h,
                     int64_t i, double *p, double *dp)
{
    int64_t row = ((a->q_start[doc] + i) * a->H + h) * a->D, g = h / (a->H / a->G),
            n = a->k_len[doc];
    double mean = 0;
    probabilities(p, q, k, a, doc, h, i);
    for (int64_t j = 0; j < n; j++) {
        dp[j] = 0;
        for (int64_t d = 0; d < a->D; d++)
            dp[j] += dout[row + d] * v[((a->k_start[doc] + j) * a->G + g) * a->D + d];
        mean += p[j] * dp[j];
    }
    for (int64_t d = 0; d < a->D; d++) dq[row + d] = 0;
    for (int64_t j = 0; j < n; j++) {
        int64_t key = ((a->k_start[doc] + j) * a->G + g) * a->D;
        double ds = p[j] * (dp[j] - mean) * a->scale;
        for (int64_t d = 0; d < a->D; d++) {
            dq[row + d] += ds * k[key + d];
            dk[key + d] += ds * q[row + d];
            dv[key + d] += p[j] * dout[row + d];
        }
    }
}

void ref_attention_dx(double *dq, double *dk, double *dv, const double *dout, const double *q,
                      const double *k, const double *v, const ref_attn *a)
{
    double *p = calloc(2 * (size_t)a->tk + 2, sizeof *p), *dp = p + a->tk + 1;
    for (int64_t i = 0; i < a->tq * a->H * a->D; i++) dq[i] = NAN;
    for (int64_t i = 0; i < a->tk * a->G * a->D; i++) dk[i] = dv[i] = NAN;
    for (int64_t doc = 0; doc < a->docs; doc++) {
        int64_t first = a->k_start[doc] * a->G * a->D;
        for (int64_t x = 0; x < a->k_len[doc] * a->G * a->D; x++) dk[first + x] = dv[first + x] = 0;
        for (int64_t i = 0; i < a->q_len[doc]; i++)
            for (int64_t h = 0; h < a->H; h++)
                query_dx(dq, dk, dv, dout, q, k, v, a, doc, h, i, p, dp);
    }
    free(p);
}

double ref_ce(const double *logits, int64_t n, int64_t target, double smoothing, double *lse,
              double *dlogits)
{
    double top = -INFINITY, s = 0, mean = 0;
    for (int64_t j = 0; j < n; j++) top = fmax(top, logits[j]);
    for (int64_t j = 0; j < n; j++) s += exp(logits[j] - top), mean += logits[j] / (double)n;
    *lse = top + log(s);
    for (int64_t j = 0; j < n; j++)
        dlogits[j] = target < 0 ? 0
                                : exp(logits[j] - *lse) - (j == target ? 1 - smoothing : 0) -
                                      smoothing / (double)n;
    return target < 0 ? 0 : (1 - smoothing) * (*lse - logits[target]) + smoothing * (*lse - mean);
}

double ref_sum(const double *x, int64_t n)
{
    double s = 0;
    for (int64_t i = 0; i < n; i++) s += x[i];
    return s;
}
