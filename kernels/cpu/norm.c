/* RMSNorm, its gradient, and rotary positions. */
#include "kernels/cpu/cpu.h"

#include <math.h>

/* Rows of the workspace that a group of a row needs: x, y, dres as fp32. */
typedef struct {
    float *x, *y, *r;
} scratch;

static scratch scratch_of(const ql_queue *q, int64_t n)
{
    float *w = q->work;
    return (scratch){w, w + n, w + 2 * n};
}

static ql_status fits(const char *op, int64_t n)
{
    if (n > QL_WORK_BYTES / 16)
        QL_FAIL(QL_EINVAL, "%s: %lld columns, at most %lld", op, (long long)n,
                (long long)QL_WORK_BYTES / 16);
    return QL_OK;
}

static float inverse_rms(const float *x, int64_t n, float eps)
{
    return 1.0f / sqrtf(ql_cpu_dot(x, x, n) / (float)n + eps);
}

QL_CPU_OP(rmsnorm, ql_tensor y, ql_tensor x, ql_tensor w, float eps)
{
    int64_t n = w.cols;
    QL_TRY(fits("rmsnorm", n));
    scratch s = scratch_of(q, n);
    const float *restrict wt = w.data;
    for (int64_t t = 0; t < x.rows; t++) {
        for (int64_t c = 0; c < x.cols; c += n) {
            const float *xs = ql_cpu_read(x, t, c, n, s.x);
            float *restrict ys = s.y, inv = inverse_rms(xs, n, eps);
            for (int64_t j = 0; j < n; j++) ys[j] = xs[j] * inv;
            ql_cpu_round(ys, y.dtype, n);
            for (int64_t j = 0; j < n; j++) ys[j] *= wt[j];
            ql_cpu_store(y, t, c, ys, n);
        }
    }
    return QL_OK;
}

QL_CPU_OP(rmsnorm_dx, ql_tensor dx, ql_tensor dy, ql_tensor x, ql_tensor w, float eps,
          ql_tensor dres)
{
    int64_t n = w.cols;
    QL_TRY(fits("rmsnorm_dx", n));
    scratch s = scratch_of(q, n);
    const float *restrict wt = w.data;
    for (int64_t t = 0; t < x.rows; t++) {
        for (int64_t c = 0; c < x.cols; c += n) {
            const float *xs = ql_cpu_read(x, t, c, n, s.x);
            float *restrict g = s.y; /* w∘dy, then dx */
            ql_cpu_load(g, dy, t, c, n);
            for (int64_t j = 0; j < n; j++) g[j] *= wt[j];
            float inv = inverse_rms(xs, n, eps);
            float mean = ql_cpu_dot(xs, g, n) * inv / (float)n, k = inv * mean;
            for (int64_t j = 0; j < n; j++) g[j] = inv * (g[j] - xs[j] * k);
            if (ql_tensor_set(dres)) {
                const float *r = ql_cpu_read(dres, t, c, n, s.r);
                for (int64_t j = 0; j < n; j++) g[j] += r[j];
            }
            ql_cpu_store(dx, t, c, g, n);
        }
    }
    return QL_OK;
}

/* sin and cos of an angle below 2^20 quarter turns, rounded from double: the quarter turns come off
 * in two parts of π/2, the first short enough that k times it is exact; then the Taylor series on
 * [−π/4, π/4]. */
static void sin_cos(double x, float *s, float *c)
{
    double k = (x * 0.63661977236758134308 + 6755399441055744.0) - 6755399441055744.0;
    double r = (x - k * 1.5707963267341256142) - k * 6.0771005063039e-11;
    double z = r * r;
    double sn =
        r + r * z *
                (-1.0 / 6 +
                 z * (1.0 / 120 + z * (-1.0 / 5040 + z * (1.0 / 362880 + z * (-1.0 / 39916800)))));
    double cs =
        1.0 - z * 0.5 +
        z * z *
            (1.0 / 24 +
             z * (-1.0 / 720 + z * (1.0 / 40320 + z * (-1.0 / 3628800 + z * (1.0 / 479001600)))));
    int32_t quarter = (int32_t)k & 3;
    double a = quarter & 1 ? cs : sn, b = quarter & 1 ? sn : cs;
    *s = (float)(quarter & 2 ? -a : a);
    *c = (float)(quarter == 1 || quarter == 2 ? -b : b);
}

QL_CPU_OP(rope, ql_tensor x, int64_t head_dim, ql_tensor pos, ql_tensor freq, float scale, int sign)
{
    int64_t half = head_dim / 2;
    QL_TRY(fits("rope", head_dim));
    float *restrict sn = q->work, *restrict cs = sn + half, *restrict v = cs + half;
    const float *restrict f = freq.data;
    for (int64_t t = 0; t < x.rows; t++) {
        float p = (float)((const int32_t *)pos.data)[t];
        for (int64_t i = 0; i < half; i++) {
            float angle = p * f[i];
            sin_cos((double)angle, &sn[i], &cs[i]);
            sn[i] *= sign < 0 ? -scale : scale;
            cs[i] *= scale;
        }
        for (int64_t c = 0; c < x.cols; c += head_dim) {
            ql_cpu_load(v, x, t, c, head_dim);
            for (int64_t i = 0; i < half; i++) {
                float a = v[i], b = v[i + half];
                v[i] = a * cs[i] - b * sn[i];
                v[i + half] = b * cs[i] + a * sn[i];
            }
            ql_cpu_store(x, t, c, v, head_dim);
        }
    }
    return QL_OK;
}
