/* Cases of matmul, norm, rotation, activation, dropout. */
#include "tests/ops/runs.h"

#include "kernels/philox.h"

#include <math.h>

/* how: trans (bits 0-1), c (4: another tensor, 8: out itself), 16: bias, 32: alpha is 0.5. */
void run_matmul(ctx *c, const op_case *p)
{
    ql_trans trans = (ql_trans)(p->how & 3);
    int64_t m = p->m, n = p->n, k = p->k;
    tens *out = make(c, "out", p->how & 8 ? INOUT : OUT, p->b, m, n, p->pad);
    tens *a = trans == QL_TN ? make(c, "a", IN, p->a, k, m, 2 * p->pad)
                             : make(c, "a", IN, p->a, m, k, 2 * p->pad);
    tens *b = trans == QL_NT ? make(c, "b", IN, p->a, n, k, p->pad)
                             : make(c, "b", IN, p->a, k, n, p->pad);
    tens *add = p->how & 8 ? out : p->how & 4 ? make(c, "c", IN, p->b, m, n, 3 * p->pad) : NULL;
    tens *bias = p->how & 16 ? make(c, "bias", IN, p->a, 1, n, 0) : NULL;
    double *ref = doubles(c, c->bench ? 1 : m * n);
    float alpha = p->how & 32 ? 0.5f : 1.0f;
    c->flops = 2.0 * (double)m * (double)n * (double)k;
    RUN(c, ql_matmul(&c->q, out->t, a->t, b->t, trans, alpha, add ? add->t : QL_NONE,
                     bias ? bias->t : QL_NONE));
    if (!live(c)) return;
    ref_matmul(ref, a->v, b->v, trans, (double)alpha, add ? add->v : NULL, bias ? bias->v : NULL, m,
               n, k);
    expect(c, out, ref, bar_of(p->b, 2e-6));
}

/* One huge activation a row, as trained models have them, where the norm's weight is next to nothing. */
static void plant(tens *x, tens *w)
{
    for (int64_t i = 0; i < x->t.rows; i++)
        x->v[i * x->t.cols + 3] = (i % 2 ? -1 : 1) * (x->t.dtype == QL_F16 ? 6e4 : 1e5);
    w->v[3] = 0;
}

/* n columns in k groups; how 1: y is x; + 2: huge activations. */
void run_rmsnorm(ctx *c, const op_case *p)
{
    tens *x = make(c, "x", p->how & 1 ? INOUT : IN, p->a, p->m, p->n * p->k, p->pad);
    tens *y = p->how & 1 ? x : make(c, "y", OUT, p->b, p->m, p->n * p->k, 2 * p->pad);
    tens *w = make(c, "w", IN, QL_F32, 1, p->n, 0);
    double *ref = doubles(c, p->m * p->n * p->k);
    if (p->how & 2) plant(x, w);
    RUN(c, ql_rmsnorm(&c->q, y->t, x->t, w->t, 1e-5f));
    if (!live(c)) return;
    ref_rmsnorm(ref, x->v, w->v, (double)1e-5f, 0, 1);
    for (int64_t i = 0; i < p->m * p->k; i++)
        ref_rmsnorm(ref + i * p->n, x->v + i * p->n, w->v, (double)1e-5f, 1, p->n);
    expect(c, y, ref, bar_of(p->b, 1e-6));
}

/* how 0: alone; 1: dres; 2: dx is dres; 3: dx is dy; + 4: huge activations. a: x's and dy's dtype, b: dx's. */
void run_rmsnorm_dx(ctx *c, const op_case *p)
{
    int64_t n = p->n * p->k;
    int how = p->how & 3;
    tens *dx = make(c, "dx", how >= 2 ? INOUT : OUT, p->b, p->m, n, p->pad);
    tens *dy = how == 3 ? dx : make(c, "dy", IN, p->a, p->m, n, 0);
    tens *x = make(c, "x", IN, p->a, p->m, n, 2 * p->pad),
         *w = make(c, "w", IN, QL_F32, 1, p->n, 0);
    tens *dres = how == 2 ? dx : how == 1 ? make(c, "dres", IN, p->b, p->m, n, p->pad) : NULL;
    double *ref = doubles(c, p->m * n);
    if (p->how & 4) plant(x, w);
    RUN(c, ql_rmsnorm_dx(&c->q, dx->t, dy->t, x->t, w->t, 1e-5f, dres ? dres->t : QL_NONE));
    for (int64_t i = 0; live(c) && i < p->m * p->k; i++)
        ref_rmsnorm_dx(ref + i * p->n, dy->v + i * p->n, x->v + i * p->n, w->v, (double)1e-5f,
                       dres ? dres->v + i * p->n : NULL, 1, p->n);
    expect(c, dx, ref, bar_of(p->b, 2e-6));
}

/* k heads of n; how 0: forward; 1: back. */
void run_rope(ctx *c, const op_case *p)
{
    tens *x = make(c, "x", INOUT, p->a, p->m, p->n * p->k, p->pad);
    tens *pos = make(c, "pos", IN, QL_I32, 1, p->m, 0),
         *freq = make(c, "freq", IN, QL_F32, 1, p->n / 2, 0);
    double *ref = doubles(c, p->m * p->n * p->k), scale = p->how ? 1.0 : 1.25;
    for (int64_t t = 0; t < p->m; t++) pos->v[t] = (double)(t % 7 == 3 ? 131071 - t : t);
    for (int64_t i = 0; i < p->n / 2; i++)
        freq->v[i] = pow(500000, -2.0 * (double)i / (double)p->n);
    RUN(c, ql_rope(&c->q, x->t, p->n, pos->t, freq->t, (float)scale, p->how ? -1 : 1));
    for (int64_t i = 0; live(c) && i < p->m * p->n * p->k; i++) ref[i] = x->v[i];
    if (live(c)) ref_rope(ref, p->m, p->n * p->k, p->n, pos->v, freq->v, scale, p->how ? -1 : 1);
    expect(c, x, ref, bar_of(p->a, 1e-6));
}

static void wide_gates(tens *gu)
{
    const double odd[] = {0.0, -88, 88, -104, 120, -1e4, 1e4, 20, -20};
    for (int64_t i = 0; i < 9 && i < gu->t.cols / 2; i++) gu->v[i] = odd[i];
    for (int64_t i = 9; i < gu->t.rows * gu->t.cols; i++) gu->v[i] *= 4;
}

void run_swiglu(ctx *c, const op_case *p)
{
    tens *h = make(c, "h", OUT, p->b, p->m, p->n, p->pad),
         *gu = make(c, "gu", IN, p->a, p->m, 2 * p->n, 2 * p->pad);
    double *ref = doubles(c, p->m * p->n);
    wide_gates(gu);
    for (int64_t i = 0; i < 9 && i < p->n; i++)
        gu->v[p->n + i] *= 0.01; /* else the fp16 sum is theirs alone */
    RUN(c, ql_swiglu(&c->q, h->t, gu->t));
    if (live(c)) ref_swiglu(ref, gu->v, p->m, p->n);
    expect(c, h, ref, bar_of(p->b, 1e-6));
}

/* how bit 0: dgu is gu; bit 1: h wanted; bit 2: h is dh. */
void run_swiglu_dx(ctx *c, const op_case *p)
{
    tens *gu = make(c, "gu", p->how & 1 ? INOUT : IN, p->a, p->m, 2 * p->n, p->pad);
    tens *dgu = p->how & 1 ? gu : make(c, "dgu", OUT, p->b, p->m, 2 * p->n, 2 * p->pad);
    tens *dh = make(c, "dh", p->how & 4 ? INOUT : IN, p->b, p->m, p->n, p->pad);
    tens *h = p->how & 4 ? dh : p->how & 2 ? make(c, "h", OUT, p->b, p->m, p->n, p->pad) : NULL;
    double *ref = doubles(c, p->m * 2 * p->n), *ref_h = doubles(c, p->m * p->n);
    for (int64_t i = 0; i < p->m * 2 * p->n; i++) gu->v[i] *= 4;
    RUN(c, ql_swiglu_dx(&c->q, dgu->t, dh->t, gu->t, h ? h->t : QL_NONE));
    if (!live(c)) return;
    ref_swiglu_dx(ref, dh->v, gu->v, p->m, p->n);
    ref_swiglu(ref_h, gu->v, p->m, p->n);
    expect(c, dgu, ref, bar_of(p->b, 1e-6));
    if (h) expect(c, h, ref_h, bar_of(p->b, 1e-6));
}

/* how bit 0: add to out; bit 1: in place. Exact: the mask is a function of the counters. k: 1/p. */
void run_dropout(ctx *c, const op_case *p)
{
    tens *in = make(c, "in", p->how & 2 ? INOUT : IN, p->a, p->m, p->n, p->pad);
    tens *out =
        p->how & 2 ? in : make(c, "out", p->how & 1 ? INOUT : OUT, p->a, p->m, p->n, 2 * p->pad);
    tens *token = make(c, "token", IN, QL_I64, 1, p->m, 0);
    double *ref = doubles(c, p->m * p->n);
    ql_drop d = {.seed = 0x123456789ABCDEFu,
                 .step = 77,
                 .layer = 5,
                 .site = 3,
                 .p = p->k ? 1.0f / (float)p->k : 0};
    for (int64_t t = 0; t < p->m; t++)
        token->v[t] = (double)(t / 3) * 4294967296.0 + (double)(t % 3);
    d.token = token->t.data;
    RUN(c, p->how & 1 ? ql_dropout_add(&c->q, out->t, in->t, &d)
                      : ql_dropout(&c->q, out->t, in->t, &d));
    for (int64_t t = 0; live(c) && t < p->m; t++)
        for (int64_t j = 0; j < p->n; j++) {
            ql_philox4 counter = {
                {(uint32_t)(j / 4), (uint32_t)(t % 3), (uint32_t)(t / 3), 5 * 16 + 3}};
            uint32_t word = ql_philox(counter, 0x89ABCDEFu, 0x01234567u ^ 77u).x[j % 4];
            double x = in->v[t * p->n + j] / (1 - (double)d.p),
                   old = p->how & 1 ? out->v[t * p->n + j] : 0;
            ref[t * p->n + j] = old + ((double)word >= floor((double)d.p * 4294967296.0) ? x : 0);
        }
    expect(c, out, ref, bar_of(p->a, 1e-6));
}
