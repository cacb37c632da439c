/* Cross-entropy over pieces of the vocabulary, and the fixed sum. */
#include "kernels/cpu/cpu.h"

#include <math.h>

enum { MAX, SUM, TARGET, TOTAL }; /* the columns of stats */
enum { NO_TARGET = -100 };

QL_CPU_OP(ce_stats, ql_tensor stats, ql_tensor logits, ql_tensor target, int64_t v0)
{
    (void)q;
    float tmp[QL_CPU_PIECE], e[QL_CPU_PIECE];
    const int32_t *want = target.data;
    for (int64_t r = 0; r < logits.rows; r++) {
        float *s = ql_cpu_at(stats, r, 0), m = -INFINITY, sum = 0, total = 0;
        for (int64_t c = 0; c < logits.cols; c += QL_CPU_PIECE) {
            int64_t n = ql_min64(QL_CPU_PIECE, logits.cols - c);
            float top = ql_cpu_max(ql_cpu_read(logits, r, c, n, tmp), n);
            m = top > m ? top : m;
        }
        float base = m > -INFINITY ? m : 0; /* a row of −∞ has the sum 0, not NaN */
        for (int64_t c = 0; c < logits.cols; c += QL_CPU_PIECE) {
            int64_t n = ql_min64(QL_CPU_PIECE, logits.cols - c);
            const float *l = ql_cpu_read(logits, r, c, n, tmp);
            for (int64_t j = 0; j < n; j++) e[j] = ql_cpu_exp(l[j] - base);
            sum += ql_cpu_total(e, n);
            total += ql_cpu_total(l, n);
        }
        int64_t t = want[r] - v0;
        bool here = want[r] != NO_TARGET && t >= 0 && t < logits.cols;
        s[MAX] = m, s[SUM] = sum, s[TOTAL] = total;
        s[TARGET] = here ? ql_float_get(ql_cpu_at(logits, r, 0), logits.dtype, t) : 0.0f;
    }
    return QL_OK;
}

QL_CPU_OP(ce_join, ql_tensor a, ql_tensor b)
{
    (void)q;
    for (int64_t r = 0; r < a.rows; r++) {
        float *x = ql_cpu_at(a, r, 0);
        const float *y = ql_cpu_at(b, r, 0);
        float m = x[MAX] > y[MAX] ? x[MAX] : y[MAX], base = m > -INFINITY ? m : 0;
        x[SUM] = x[SUM] * ql_cpu_exp(x[MAX] - base) + y[SUM] * ql_cpu_exp(y[MAX] - base);
        x[MAX] = m;
        x[TARGET] += y[TARGET];
        x[TOTAL] += y[TOTAL];
    }
    return QL_OK;
}

QL_CPU_OP(ce_loss, ql_tensor nll, ql_tensor lse, ql_tensor stats, ql_tensor target, float smoothing,
          int64_t vocab)
{
    (void)q;
    const int32_t *want = target.data;
    float *restrict loss = nll.data, *restrict log_sum = lse.data;
    for (int64_t r = 0; r < stats.rows; r++) {
        const float *s = ql_cpu_at(stats, r, 0);
        float l = s[MAX] + logf(s[SUM]);
        log_sum[r] = l;
        loss[r] = (1.0f - smoothing) * (l - s[TARGET]);
        if (smoothing > 0) loss[r] += smoothing * (l - s[TOTAL] / (float)vocab);
        if (want[r] == NO_TARGET) loss[r] = 0;
    }
    return QL_OK;
}

QL_CPU_OP(ce_grad, ql_tensor logits, ql_tensor lse, ql_tensor target, int64_t v0, float smoothing,
          int64_t vocab, const ql_ctl *ctl)
{
    (void)q;
    float x[QL_CPU_PIECE];
    const int32_t *want = target.data;
    float scale = ctl->loss_scale * ctl->inv_items, even = smoothing / (float)vocab;
    for (int64_t r = 0; r < logits.rows; r++) {
        float l = ((const float *)lse.data)[r];
        int64_t t = want[r] - v0;
        for (int64_t c = 0; c < logits.cols; c += QL_CPU_PIECE) {
            int64_t n = ql_min64(QL_CPU_PIECE, logits.cols - c);
            if (want[r] == NO_TARGET) {
                memset(x, 0, sizeof x);
            } else {
                ql_cpu_load(x, logits, r, c, n);
                for (int64_t j = 0; j < n; j++) x[j] = ql_cpu_exp(x[j] - l) - even;
                if (t >= c && t < c + n) x[t - c] -= 1.0f - smoothing;
                for (int64_t j = 0; j < n; j++) x[j] *= scale;
            }
            ql_cpu_store(logits, r, c, x, n);
        }
    }
    return QL_OK;
}

QL_CPU_OP(sum, ql_tensor out, ql_tensor in)
{
    memcpy(q->work, in.data, (size_t)in.cols * sizeof(float));
    *(float *)out.data = ql_cpu_halve(q->work, in.cols);
    return QL_OK;
}
