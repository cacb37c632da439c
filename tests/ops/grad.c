/* The references' gradients against central differences of the references, in double: what the
 * backends are measured by is itself proven. */
#include "tests/ops/ops.h"
#include "tests/ops/ref.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { N = 512 };

static double noise(int i)
{
    return sin(i * 12.9898 + 1) * 0.9;
}

/* Σ out∘weight for the op under test, as a function of its flat input. */
typedef double (*scalar)(const double *x);

static int compare(const char *name, scalar f, const double *x, const double *grad, int n)
{
    double y[N], err = 0, norm = 0;
    const double h = 1e-5;
    memcpy(y, x, (size_t)n * sizeof *y);
    for (int i = 0; i < n; i++) {
        y[i] = x[i] + h;
        double up = f(y);
        y[i] = x[i] - h;
        double slope = (up - f(y)) / (2 * h);
        y[i] = x[i];
        err += (slope - grad[i]) * (slope - grad[i]), norm += slope * slope;
    }
    err = sqrt(err / norm);
    if (err < 1e-7)
        printf("ok gradient.%s\n", name);
    else
        printf("not ok gradient.%s: off by %.3g\n", name, err);
    return !(err < 1e-7);
}

static double weigh(const double *out, int n)
{
    double s = 0;
    for (int i = 0; i < n; i++) s += isnan(out[i]) ? 0 : out[i] * noise(1000 + i);
    return s;
}
static void weights(double *w, int n)
{
    for (int i = 0; i < n; i++) w[i] = noise(1000 + i);
}

static double f_norm(const double *x)
{
    double y[30], w[10];
    for (int i = 0; i < 10; i++) w[i] = 1 + 0.3 * noise(i + 50);
    ref_rmsnorm(y, x, w, 1e-2, 3, 10);
    return weigh(y, 30);
}
static double f_swiglu(const double *x)
{
    double h[15];
    ref_swiglu(h, x, 3, 5);
    return weigh(h, 15);
}

static const double positions[3] = {0, 5, 9000}, frequencies[3] = {1, 0.1, 0.003};
static double f_rope(const double *x)
{
    double y[36];
    memcpy(y, x, sizeof y);
    ref_rope(y, 3, 12, 6, positions, frequencies, 1.3, 1);
    return weigh(y, 36);
}

/* Two documents with a gap, four heads on two, a window; x = q (7 × 4·2) | k (7 × 2·2) | v. */
static const int32_t starts[2] = {0, 4}, lengths[2] = {3, 3};
static const ref_attn ragged = {4, 2, 2, 2, 2, 7, 7, 0.7, starts, lengths, starts, lengths};
static double f_attention(const double *x)
{
    double o[56], lse[28];
    ref_attention(o, lse, x, x + 56, x + 84, &ragged);
    return weigh(o, 56);
}

static double f_ce(const double *x)
{
    double lse, d[20];
    return ref_ce(x, 20, 7, 0.1, &lse, d);
}

int test_gradients(void)
{
    double x[N], g[N], w[N], extra[N];
    int bad = 0;
    for (int i = 0; i < N; i++) x[i] = noise(i);
    weights(w, N);
    for (int i = 0; i < 10; i++) extra[i] = 1 + 0.3 * noise(i + 50);
    ref_rmsnorm_dx(g, w, x, extra, 1e-2, NULL, 3, 10);
    bad += compare("rmsnorm", f_norm, x, g, 30);
    ref_swiglu_dx(g, w, x, 3, 5);
    bad += compare("swiglu", f_swiglu, x, g, 30);
    memcpy(g, w, 36 * sizeof *g);
    ref_rope(g, 3, 12, 6, positions, frequencies, 1.3, -1);
    bad += compare("rope", f_rope, x, g, 36);
    ref_attention_dx(g, g + 56, g + 84, w, x, x + 56, x + 84, &ragged);
    for (int i = 0; i < 112; i++) g[i] = isnan(g[i]) ? 0 : g[i]; /* rows of no document */
    bad += compare("attention", f_attention, x, g, 112);
    double lse;
    ref_ce(x, 20, 7, 0.1, &lse, g);
    bad += compare("ce", f_ce, x, g, 20);
    return bad;
}
