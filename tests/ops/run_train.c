/* Cases of attention, loss and optimizer. */
#include "tests/ops/runs.h"

#include "kernels/half.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- attention: m tokens in all, n = head size, k = the documents' layout, how = heads and window
 */

enum { DOCS = 8 };

typedef struct {
    ql_attn a;
    ref_attn r;
    int32_t docs[4][DOCS]; /* q_start, q_len, k_start, k_len */
    int64_t tk;
} layout;

/* k 0: one document; 1: five ragged ones with gaps around them, one maybe empty; 2: one token each
 * with long keys (decode); 3: a chunk at the end of its keys (prefill), and one with more queries
 * than keys. */
static void documents(layout *l, int64_t k, int64_t t)
{
    static const double cut[6] = {0, 0.05, 0.4, 0.41, 0.7, 0.97};
    int32_t (*d)[DOCS] = l->docs, n = (int32_t)t;
    l->a.docs = k == 1 ? 5 : k == 2 ? 4 : k == 3 ? 2 : 1;
    l->tk = k == 2 ? 40 * t : k == 3 ? 2 * t : t;
    for (int32_t i = 0; i < (int32_t)l->a.docs; i++) {
        d[0][i] = k == 1 ? (int32_t)(cut[i] * (double)t) + 1 : k == 2 ? i : i * (n / 2);
        d[1][i] = k == 1   ? (int32_t)((cut[i + 1] - cut[i]) * (double)t)
                  : k == 2 ? 1
                  : k == 3 ? n / 3
                           : n;
        d[2][i] = k == 2 ? i * 10 * n + 1 : k == 3 ? i * n : d[0][i];
        d[3][i] = k == 2 ? 7 * n + i : k == 3 ? (i ? n / 5 : n) : d[1][i];
        l->a.q_max = ql_max64(l->a.q_max, d[1][i]);
        l->a.k_max = ql_max64(l->a.k_max, d[3][i]);
    }
}

/* how: 1 H = G = 1; 2 H 4, G 2; 3 H 7, G 1; 4 (bench) H 32, G 8; +8 a window of 9. */
static void lay_out(ctx *c, const op_case *p, layout *l)
{
    static const int H[] = {0, 1, 4, 7, 32}, G[] = {0, 1, 2, 1, 8};
    memset(l, 0, sizeof *l);
    l->a = (ql_attn){.heads = H[p->how & 7], .kv_heads = G[p->how & 7], .head_dim = p->n};
    l->a.window = p->how & 8 ? 9 : 0;
    l->a.scale = (float)(1 / sqrt((double)p->n));
    documents(l, p->k, p->m);
    tens *d[4];
    for (int i = 0; i < 4; i++) {
        d[i] = make(c, "docs", IN, QL_I32, 1, l->a.docs, 0);
        for (int64_t j = 0; j < l->a.docs; j++) d[i]->v[j] = l->docs[i][j];
    }
    l->a.q_start = d[0]->t.data, l->a.q_len = d[1]->t.data;
    l->a.k_start = d[2]->t.data, l->a.k_len = d[3]->t.data;
    l->r =
        (ref_attn){l->a.heads, l->a.kv_heads,      p->n,       l->a.window, l->a.docs,  p->m,
                   l->tk,      (double)l->a.scale, l->docs[0], l->docs[1],  l->docs[2], l->docs[3]};
}

static double attention_flops(const layout *l)
{
    double s = 0;
    for (int64_t d = 0; d < l->a.docs; d++) {
        double q = l->docs[1][d], k = l->docs[3][d];
        s += 4.0 * (double)(l->a.heads * l->a.head_dim) * q * (k - (q - 1) / 2);
    }
    return s;
}

/* A NaN in every row of no document: nobody may read it. */
static void poison(tens *t, const int32_t *start, const int32_t *len, int64_t docs)
{
    for (int64_t i = 0; i < t->t.rows; i++) {
        bool in = false;
        for (int64_t d = 0; d < docs; d++) in |= i >= start[d] && i < start[d] + len[d];
        for (int64_t j = 0; !in && j < t->t.cols; j++) t->v[i * t->t.cols + j] = NAN;
    }
}

void run_attention(ctx *c, const op_case *p)
{
    layout l;
    lay_out(c, p, &l);
    int64_t n = l.a.heads * p->n, nk = l.a.kv_heads * p->n;
    tens *o = make(c, "o", OUT, p->a, p->m, n, p->pad),
         *lse = make(c, "lse", OUT, QL_F32, p->m, l.a.heads, 0);
    tens *q = make(c, "q", IN, p->a, p->m, n, 2 * p->pad),
         *k = make(c, "k", IN, p->a, l.tk, nk, p->pad);
    tens *v = make(c, "v", IN, p->a, l.tk, nk, 0);
    double *ref = doubles(c, p->m * n), *ref_lse = doubles(c, p->m * l.a.heads);
    for (int64_t i = 0; i < p->m * n; i++) q->v[i] *= 4;
    poison(q, l.docs[0], l.docs[1], l.a.docs);
    poison(k, l.docs[2], l.docs[3], l.a.docs);
    poison(v, l.docs[2], l.docs[3], l.a.docs);
    c->flops = attention_flops(&l);
    RUN(c, ql_attention(&c->q, o->t, lse->t, q->t, k->t, v->t, &l.a));
    if (!live(c)) return;
    ref_attention(ref, ref_lse, q->v, k->v, v->v, &l.r);
    expect(c, o, ref, bar_of(p->a, 2e-6));
    expect(c, lse, ref_lse, bar_of(p->a, 1e-6));
}

void run_attention_dx(ctx *c, const op_case *p)
{
    layout l;
    lay_out(c, p, &l);
    int64_t n = l.a.heads * p->n, nk = l.a.kv_heads * p->n;
    tens *dq = make(c, "dq", OUT, p->a, p->m, n, p->pad),
         *dk = make(c, "dk", OUT, p->a, l.tk, nk, 3 * p->pad);
    tens *dv = make(c, "dv", OUT, p->a, l.tk, nk, p->pad),
         *delta = make(c, "delta", OUT, QL_F32, p->m, l.a.heads, 0);
    tens *dout = make(c, "dout", IN, p->a, p->m, n, 0),
         *o = make(c, "o", IN, p->a, p->m, n, p->pad);
    tens *lse = make(c, "lse", IN, QL_F32, p->m, l.a.heads, 0);
    tens *q = make(c, "q", IN, p->a, p->m, n, 2 * p->pad),
         *k = make(c, "k", IN, p->a, l.tk, nk, p->pad);
    tens *v = make(c, "v", IN, p->a, l.tk, nk, 0);
    double *ref = doubles(c, p->m * n), *ref_k = doubles(c, l.tk * nk),
           *ref_v = doubles(c, l.tk * nk);
    for (int64_t i = 0; i < p->m * n; i++) {
        q->v[i] = (double)ql_float_round((float)(4 * q->v[i]), p->a);
        dout->v[i] = (double)ql_float_round((float)dout->v[i], p->a);
    }
    for (int64_t i = 0; i < l.tk * nk; i++) {
        k->v[i] = (double)ql_float_round((float)k->v[i], p->a);
        v->v[i] = (double)ql_float_round((float)v->v[i], p->a);
    }
    if (!c->bench) ref_attention(o->v, lse->v, q->v, k->v, v->v, &l.r);
    poison(q, l.docs[0], l.docs[1], l.a.docs);
    poison(dout, l.docs[0], l.docs[1], l.a.docs);
    poison(k, l.docs[2], l.docs[3], l.a.docs);
    poison(v, l.docs[2], l.docs[3], l.a.docs);
    c->flops = 2.5 * attention_flops(&l);
    RUN(c, ql_attention_dx(&c->q, dq->t, dk->t, dv->t, dout->t, o->t, lse->t, delta->t, q->t, k->t,
                           v->t, &l.a));
    if (!live(c)) return;
    ref_attention_dx(ref, ref_k, ref_v, dout->v, q->v, k->v, v->v, &l.r);
    expect(c, dq, ref, bar_of(p->a, 4e-6));
    expect(c, dk, ref_k, bar_of(p->a, 4e-6));
    expect(c, dv, ref_v, bar_of(p->a, 4e-6));
}

/* ---- loss: m rows, n vocabulary, k pieces of it (a power of two) ----------------------------- */

typedef struct {
    tens *stats[8], *logits, *target, *nll, *lse;
    int64_t piece, vocab;
    int pieces;
    float smoothing;
} loss;

static ql_status loss_forward(ctx *c, const loss *x)
{
    for (int i = 0; i < x->pieces; i++) {
        ql_tensor part =
            ql_cols(x->logits->t, i * x->piece, ql_min64(x->piece, x->vocab - i * x->piece));
        QL_TRY(ql_ce_stats(&c->q, x->stats[i]->t, part, x->target->t, i * x->piece));
    }
    for (int half = x->pieces / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            QL_TRY(ql_ce_join(&c->q, x->stats[i]->t, x->stats[i + half]->t));
    return ql_ce_loss(&c->q, x->nll->t, x->lse->t, x->stats[0]->t, x->target->t, x->smoothing,
                      x->vocab);
}

static void loss_inputs(ctx *c, const op_case *p, loss *x, role logits)
{
    x->vocab = p->n, x->pieces = (int)p->k, x->piece = ql_ceil_div(p->n, p->k);
    x->smoothing = p->how ? 0.1f : 0.0f;
    x->logits = make(c, "logits", logits, p->a, p->m, p->n, p->pad);
    x->target = make(c, "target", IN, QL_I32, 1, p->m, 0);
    for (int64_t i = 0; i < p->m * p->n; i++) x->logits->v[i] *= 8;
    for (int64_t i = 0; i < p->m; i++)
        x->target->v[i] = i % 4 == 2 ? -100 : floor(rnd(c, 0, (double)p->n));
    x->target->v[0] = (double)(p->n - 1);
    if (p->m > 1) x->target->v[1] = 0;
}

/* how 1: smoothing 0.1. */
void run_ce(ctx *c, const op_case *p)
{
    loss x = {0};
    double *ref = doubles(c, p->m), *ref_lse = doubles(c, p->m), *d = doubles(c, p->n);
    loss_inputs(c, p, &x, IN);
    for (int i = 0; i < x.pieces; i++) x.stats[i] = make(c, "stats", OUT, QL_F32, p->m, 4, 0);
    x.nll = make(c, "nll", OUT, QL_F32, 1, p->m, 0),
    x.lse = make(c, "lse", OUT, QL_F32, 1, p->m, 0);
    RUN(c, loss_forward(c, &x));
    for (int64_t i = 0; live(c) && i < p->m; i++)
        ref[i] = ref_ce(x.logits->v + i * p->n, p->n, (int64_t)x.target->v[i], (double)x.smoothing,
                        &ref_lse[i], d);
    expect(c, x.nll, ref, 1e-6);
    expect(c, x.lse, ref_lse, 1e-6);
}

static ql_status loss_backward(ctx *c, const loss *x, const ql_ctl *ctl)
{
    for (int i = 0; i < x->pieces; i++) {
        ql_tensor part =
            ql_cols(x->logits->t, i * x->piece, ql_min64(x->piece, x->vocab - i * x->piece));
        QL_TRY(ql_ce_grad(&c->q, part, x->lse->t, x->target->t, i * x->piece, x->smoothing,
                          x->vocab, ctl));
    }
    return QL_OK;
}

/* ql_ctl as 16 words of int32 in device memory. */
static void word_f32(tens *ctl, size_t offset, float x)
{
    ctl->v[offset / 4] = (double)(int32_t)ql_f32_bits(x);
}
static double f32_word(const tens *ctl, size_t offset)
{
    return (double)ql_f32_from_bits((uint32_t)(int32_t)ctl->got[offset / 4]);
}
static tens *make_ctl(ctx *c, role r)
{
    tens *t = make(c, "ctl", r, QL_I32, 1, 16, 0);
    memset(t->v, 0, 16 * sizeof *t->v);
    return t;
}
#define FIELD(name) offsetof(ql_ctl, name)

void run_ce_grad(ctx *c, const op_case *p)
{
    loss x = {0};
    double *ref = doubles(c, p->m * p->n);
    loss_inputs(c, p, &x, INOUT);
    x.lse = make(c, "lse", IN, QL_F32, 1, p->m, 0);
    tens *ctl = make_ctl(c, IN);
    word_f32(ctl, FIELD(loss_scale), 1024), word_f32(ctl, FIELD(inv_items), 1 / 37.0f);
    for (int64_t i = 0; !c->bench && i < p->m; i++) {
        for (int64_t j = 0; j < p->n; j++)
            x.logits->v[i * p->n + j] =
                (double)ql_float_round((float)x.logits->v[i * p->n + j], p->a);
        ref_ce(x.logits->v + i * p->n, p->n, (int64_t)x.target->v[i], (double)x.smoothing,
               &x.lse->v[i], ref + i * p->n);
        for (int64_t j = 0; j < p->n; j++) ref[i * p->n + j] *= 1024 / 37.0;
    }
    RUN(c, loss_backward(c, &x, ctl->t.data));
    expect(c, x.logits, ref, bar_of(p->a, 2e-6));
}

void run_sum(ctx *c, const op_case *p)
{
    tens *out = make(c, "out", OUT, QL_F32, 1, 1, 0), *in = make(c, "in", IN, QL_F32, 1, p->n, 0);
    for (int64_t i = 0; i < p->n; i++) in->v[i] += 1.5;
    RUN(c, ql_sum(&c->q, out->t, in->t));
    double ref = live(c) ? ref_sum(in->v, p->n) : 0;
    expect(c, out, &ref, 5e-7);
}

/* ---- optimizer: n blocks of 4096 ------------------------------------------------------------- */

void run_norm_parts(ctx *c, const op_case *p)
{
    tens *part = make(c, "part", OUT, QL_F32, 1, p->n, 0),
         *g = make(c, "g", IN, QL_F32, 1, p->n * QL_OPT_BLOCK, 0);
    double *ref = doubles(c, p->n);
    RUN(c, ql_norm_parts(&c->q, part->t, g->t));
    for (int64_t i = 0; live(c) && i < p->n * QL_OPT_BLOCK; i++)
        ref[i / QL_OPT_BLOCK] += g->v[i] * g->v[i];
    expect(c, part, ref, 5e-7);
}

/* how: 1 clipped; 2 scaling; 4 not finite; 8 the scale grows; 16 the table of lr has ended;
 * 32 a norm that needs no clipping, but less than twice. */
void run_clip(ctx *c, const op_case *p)
{
    tens *ctl = make_ctl(c, INOUT), *part = make(c, "part", IN, QL_F32, 1, p->n, 0),
         *lr = make(c, "lr", IN, QL_F32, 1, 5, 0);
    double scale = p->how & 2 ? 1024 : 1, norm, coef = 1;
    ql_clip clip = {.max_norm = p->how & 1 ? 0.25f : 0,
                    .scaling = p->how & 2,
                    .growth_factor = 2,
                    .backoff_factor = 0.5f,
                    .growth_interval = p->how & 8 ? 8 : 2000,
                    .lr = lr->t.data,
                    .n_lr = 5};
    for (int64_t i = 0; i < p->n; i++) part->v[i] = fabs(part->v[i]) * scale * scale;
    for (int64_t i = 0; p->how & 32 && i < p->n; i++) part->v[i] = 0.04 / (double)p->n;
    if (p->how & 4) part->v[p->n / 2] = INFINITY;
    word_f32(ctl, FIELD(loss_scale), (float)scale), word_f32(ctl, FIELD(inv_items), 0.125f);
    ctl->v[FIELD(steps) / 4] = p->how & 16 ? 9 : 3, ctl->v[FIELD(growth) / 4] = 7,
                          ctl->v[FIELD(skips) / 4] = 2;
    RUN(c, ql_clip_step(&c->q, ctl->t.data, part->t, &clip));
    if (!live(c)) return;
    bool skip = (p->how & 6) == 6, grow = (p->how & 14) == 10;
    norm = sqrt(ref_sum(part->v, p->n)) / scale;
    if (p->how & 1) coef = fmin(1, 0.25 / (norm + 1e-6));
    const struct {
        const char *name;
        double got, ref;
    } f[] = {{"norm", f32_word(ctl, FIELD(norm)), norm},
             {"mul", f32_word(ctl, FIELD(mul)), coef / scale},
             {"lr", f32_word(ctl, FIELD(lr)), lr->v[p->how & 16 ? 4 : 3]},
             {"loss_scale", f32_word(ctl, FIELD(loss_scale)),
              skip   ? scale / 2
              : grow ? scale * 2
                     : scale},
             {"inv_items", f32_word(ctl, FIELD(inv_items)), 0.125},
             {"skipped", ctl->got[FIELD(skipped) / 4], skip},
             {"steps", ctl->got[FIELD(steps) / 4], (p->how & 16 ? 9 : 3) + !skip},
             {"growth", ctl->got[FIELD(growth) / 4],
              skip || grow ? 0
              : p->how & 2 ? 8
                           : 7},
             {"skips", ctl->got[FIELD(skips) / 4], skip ? 3 : 2}};
    for (size_t i = 0; i < sizeof f / sizeof *f; i++)
        if (!(f[i].got == f[i].ref || fabs(f[i].got - f[i].ref) <= 1e-6 * fabs(f[i].ref)))
            fail(c, "ctl.%s is %g, expected %g", f[i].name, f[i].got, f[i].ref);
}

enum { STEPS = 5 };

static tens *adam_ctl(ctx *c, int how)
{
    tens *ctl = make_ctl(c, IN);
    word_f32(ctl, FIELD(mul), 0.5f), word_f32(ctl, FIELD(lr), 0.125f);
    ctl->v[FIELD(steps) / 4] = STEPS, ctl->v[FIELD(skipped) / 4] = (how & 2) != 0;
    return ctl;
}

/* how 1: bitsandbytes' order, else torch's; 2: the step is skipped. */
void run_adamw(ctx *c, const op_case *p)
{
    int64_t n = p->n * QL_OPT_BLOCK;
    tens *w = make(c, "p", INOUT, QL_F32, 1, n, 0), *m = make(c, "m", INOUT, QL_F32, 1, n, 0);
    tens *v = make(c, "v", INOUT, QL_F32, 1, n, 0), *g = make(c, "g", IN, QL_F32, 1, n, 0),
         *ctl = adam_ctl(c, p->how);
    double *rp = doubles(c, n), *rm = doubles(c, n), *rv = doubles(c, n);
    ql_adam a = {p->how & 1 ? QL_ADAM_BNB : QL_ADAM_TORCH, 0.9f, 0.999f, 1e-8f, 0.01f};
    for (int64_t i = 0; i < n; i++) v->v[i] = v->v[i] * v->v[i] * 0.1;
    for (int64_t i = 0; i < 100; i++) m->v[i] = v->v[i] = g->v[i] = 0;
    RUN(c, ql_adamw(&c->q, w->t, m->t, v->t, g->t, ctl->t.data, &a));
    double b1 = (double)a.beta1, b2 = (double)a.beta2, c1 = 1 - pow(b1, STEPS),
           c2 = sqrt(1 - pow(b2, STEPS)), lr = 0.125;
    for (int64_t i = 0; live(c) && i < n; i++) {
        double x = g->v[i] * 0.5, keep = 1 - lr * (double)a.weight_decay, eps = (double)a.eps;
        rm[i] = b1 * m->v[i] + (1 - b1) * x, rv[i] = b2 * v->v[i] + (1 - b2) * x * x;
        if (p->how & 1)
            rp[i] = (w->v[i] - lr * c2 / c1 * rm[i] / (sqrt(rv[i]) + eps * c2)) * keep;
        else
            rp[i] = w->v[i] * keep - lr / c1 * rm[i] / (sqrt(rv[i]) / c2 + eps);
        if (p->how & 2) rp[i] = w->v[i], rm[i] = m->v[i], rv[i] = v->v[i];
    }
    expect(c, w, rp, 1e-6);
    expect(c, m, rm, 1e-6);
    expect(c, v, rv, 1e-6);
}

/* The code of each element is a nearest one of table for s/absmax (within a rounding), of s's sign
 * if `is_signed`. */
static void expect_codes(ctx *c, const tens *code, const tens *absmax, const double *table,
                         const double *s, bool is_signed)
{
    for (int64_t i = 0; live(c) && i < code->t.cols; i++) {
        int got = (int)code->got[i];
        double top = absmax->got[i / 256], y = s[i] / top, best = 1e9;
        if (top == 0) continue; /* any code of a zero block is zero */
        for (int k = 0; k < 256; k++) best = fmin(best, fabs(table[k] - y));
        bool sign = !is_signed || s[i] == 0 || (table[got] < 0) == (s[i] < 0);
        /* An entry of the wrong sign is corrected by one place, which may be farther away. */
        double far = is_signed && fabs(y) < 2e-6 ? 4e-6 : best + 4e-7;
        if (!sign || fabs(table[got] - y) > far)
            fail(c, "%s[%lld] is %d (%g) for %g", code->name, (long long)i, got, table[got], y);
    }
}

void run_adamw8(ctx *c, const op_case *p)
{
    int64_t n = p->n * QL_OPT_BLOCK;
    tens *w = make(c, "p", INOUT, QL_F32, 1, n, 0), *m8 = make(c, "m8", INOUT, QL_U8, 1, n, 0);
    tens *v8 = make(c, "v8", INOUT, QL_U8, 1, n, 0),
         *m2 = make(c, "m2", INOUT, QL_F32, 1, n / 256, 0);
    tens *v2 = make(c, "v2", INOUT, QL_F32, 1, n / 256, 0), *g = make(c, "g", IN, QL_F32, 1, n, 0);
    tens *code1 = make(c, "code1", IN, QL_F32, 1, 256, 0),
         *code2 = make(c, "code2", IN, QL_F32, 1, 256, 0);
    tens *ctl = adam_ctl(c, p->how);
    double *rp = doubles(c, n), *rm = doubles(c, n), *rv = doubles(c, n), *am = doubles(c, n / 256),
           *av = doubles(c, n / 256);
    ql_adam a = {QL_ADAM_BNB, 0.9f, 0.999f, 1e-8f, 0.01f};
    dynamic_map(code1->v, true), dynamic_map(code2->v, false);
    for (int64_t i = 0; i < n; i++)
        m8->v[i] = floor(rnd(c, 0, 256)), v8->v[i] = floor(rnd(c, 0, 256));
    for (int64_t i = 0; i < n / 256; i++) m2->v[i] = rnd(c, 0, 0.1), v2->v[i] = rnd(c, 0, 0.1);
    for (int64_t i = 256; i < 512; i++)
        m2->v[1] = v2->v[1] = g->v[i] = 0; /* a block that stays zero */
    g->v[700] = NAN, g->v[900] = INFINITY;
    /* So near to zero that zero is the nearest code, with either sign. */
    m8->v[10] = m8->v[11] = 127, g->v[10] = 1e-8, g->v[11] = -1e-8;
    RUN(c, ql_adamw8(&c->q, w->t, m8->t, v8->t, m2->t, v2->t, g->t, code1->t, code2->t, ctl->t.data,
                     &a));
    if (!live(c)) return;
    double b1 = (double)a.beta1, b2 = (double)a.beta2, c1 = 1 - pow(b1, STEPS),
           c2 = sqrt(1 - pow(b2, STEPS)), lr = 0.125;
    for (int64_t i = 0; i < n; i++) {
        double x = g->v[i] * 0.5, old_m = code1->v[(int)m8->v[i]] * m2->v[i / 256];
        bool ok = isfinite(x);
        rm[i] = ok ? b1 * old_m + (1 - b1) * x : 0;
        rv[i] = ok ? b2 * code2->v[(int)v8->v[i]] * v2->v[i / 256] + (1 - b2) * x * x : 0;
        rp[i] = ok ? (w->v[i] - lr * c2 / c1 * rm[i] / (sqrt(rv[i]) + (double)a.eps * c2)) *
                         (1 - lr * (double)a.weight_decay)
                   : w->v[i];
        am[i / 256] = fmax(am[i / 256], fabs(rm[i])), av[i / 256] = fmax(av[i / 256], rv[i]);
    }
    if (p->how & 2) {
        expect_exact(c, w, w->v), expect_exact(c, m8, m8->v), expect_exact(c, m2, m2->v);
        return;
    }
    expect(c, w, rp, 1e-6);
    expect(c, m2, am, 1e-6);
    expect(c, v2, av, 1e-6);
    expect_codes(c, m8, m2, code1->v, rm, true);
    expect_codes(c, v8, v2, code2->v, rv, false);
}
