/* Ragged causal attention, forward and backward, in blocks of QB queries × KB keys: the products by
 * BLAS, the softmax streaming over the key blocks. Everything is fp32; 16-bit rows are widened
 * block by block. */
#include "kernels/cpu/cpu.h"

#include <cblas.h>
#include <math.h>

enum {
    QB = 64,
    KB = 256,
    D_MAX = 128,
    /* 16-bit dk and dv are summed over query blocks and heads in fp32 here, behind the blocks. */
    SUM_FLOATS = 15 << 20,
};

/* The workspace's blocks. */
typedef struct {
    float q[QB * D_MAX], k[KB * D_MAX], v[KB * D_MAX], o[QB * D_MAX], d[QB * D_MAX]; /* rows of D */
    float s[QB * KB], ds[QB * KB]; /* rows of KB */
    float m[QB], l[QB];
} blocks;

/* One document and head. Query i stands at position i + off. */
typedef struct {
    const ql_attn *a;
    blocks *w;
    int64_t q0, q_len, k0, k_len, off;
    int64_t qc, kc; /* the head's first column in q and in k */
    int D;
} head;

static head head_of(const ql_attn *a, blocks *w, int64_t doc, int64_t h)
{
    head x = {.a = a, .w = w, .D = (int)a->head_dim};
    x.q0 = a->q_start[doc], x.q_len = a->q_len[doc];
    x.k0 = a->k_start[doc], x.k_len = a->k_len[doc];
    x.off = x.k_len - x.q_len;
    x.qc = h * a->head_dim, x.kc = h / (a->heads / a->kv_heads) * a->head_dim;
    return x;
}

/* The documents are device data that no wrapper can see. */
static ql_status inside(const char *op, const ql_attn *a, int64_t tq, int64_t tk)
{
    for (int64_t d = 0; d < a->docs; d++) {
        int64_t q0 = a->q_start[d], ql = a->q_len[d], k0 = a->k_start[d], kl = a->k_len[d];
        if (q0 < 0 || ql < 0 || k0 < 0 || kl < 0 || q0 + ql > tq || k0 + kl > tk || ql > a->q_max ||
            kl > a->k_max)
            QL_FAIL(QL_EINVAL,
                    "%s: document %lld has queries %lld+%lld of %lld (at most %lld) and keys "
                    "%lld+%lld of %lld "
                    "(at most %lld)",
                    op, (long long)d, (long long)q0, (long long)ql, (long long)tq,
                    (long long)a->q_max, (long long)k0, (long long)kl, (long long)tk,
                    (long long)a->k_max);
    }
    return QL_OK;
}

/* The keys [*lo, *hi) that query i sees, cut to the block [j0, j1) and counted from j0; lo ≥ hi:
 * none. */
static void seen(const head *x, int64_t i, int64_t j0, int64_t j1, int64_t *lo, int64_t *hi)
{
    int64_t pos = i + x->off, first = x->a->window > 0 ? pos - x->a->window + 1 : 0;
    *lo = ql_max64(first, j0) - j0;
    *hi = ql_min64(pos + 1, j1) - j0;
}

/* The key blocks that queries [i0, i1) see: [*j0, *j1), *j0 a multiple of KB. */
static void range(const head *x, int64_t i0, int64_t i1, int64_t *j0, int64_t *j1)
{
    int64_t first = x->a->window > 0 ? ql_max64(0, i0 + x->off - x->a->window + 1) : 0;
    *j0 = first / KB * KB;
    *j1 = ql_min64(x->k_len, i1 + x->off);
}

/* c (m × n, row stride ldc) = alpha · op(a) op(b) + beta · c. */
static void mul(int ta, int tb, int64_t m, int64_t n, int64_t k, float alpha, const float *a,
                int lda, const float *b, int ldb, float beta, float *c, int ldc)
{
    cblas_sgemm(CblasRowMajor, ta ? CblasTrans : CblasNoTrans, tb ? CblasTrans : CblasNoTrans,
                (int)m, (int)n, (int)k, alpha, a, lda, b, ldb, beta, c, ldc);
}

/* ---- forward ------------------------------------------------------------------------------------
 */

/* Row r of s becomes exp(s − m) over [lo, hi) and 0 elsewhere; m, l and the row of o are carried
 * over. */
static void soften(blocks *w, int64_t r, int64_t lo, int64_t hi, int64_t n, int D)
{
    float *restrict s = w->s + r * KB, *restrict o = w->o + r * D;
    if (lo >= hi) {
        memset(s, 0, (size_t)n * sizeof *s);
        return;
    }
    float m = ql_cpu_max(s + lo, hi - lo);
    if (!(m > w->m[r])) m = w->m[r];
    float base = m > -INFINITY ? m : 0.0f, carry = ql_cpu_exp(w->m[r] - base);
    for (int64_t j = lo; j < hi; j++) s[j] = ql_cpu_exp(s[j] - base);
    for (int64_t j = 0; j < lo; j++) s[j] = 0;
    for (int64_t j = hi; j < n; j++) s[j] = 0;
    w->l[r] = w->l[r] * carry + ql_cpu_total(s + lo, hi - lo);
    w->m[r] = m;
    for (int j = 0; j < D; j++) o[j] *= carry;
}

static void forward(const head *x, ql_tensor o, ql_tensor lse, int64_t h, ql_tensor q, ql_tensor k,
                    ql_tensor v, int64_t i0)
{
    blocks *w = x->w;
    int D = x->D, ldq = 0, ldk = 0, ldv = 0;
    int64_t i1 = ql_min64(i0 + QB, x->q_len), n = i1 - i0, j0, end;
    const float *qs = ql_cpu_panel(q, x->q0 + i0, n, x->qc, D, w->q, &ldq);
    memset(w->o, 0, (size_t)(n * D) * sizeof(float));
    for (int64_t r = 0; r < n; r++) w->m[r] = -INFINITY, w->l[r] = 0;
    range(x, i0, i1, &j0, &end);
    for (; j0 < end; j0 += KB) {
        int64_t j1 = ql_min64(j0 + KB, end), kn = j1 - j0, lo, hi;
        const float *ks = ql_cpu_panel(k, x->k0 + j0, kn, x->kc, D, w->k, &ldk);
        const float *vs = ql_cpu_panel(v, x->k0 + j0, kn, x->kc, D, w->v, &ldv);
        mul(0, 1, n, kn, D, x->a->scale, qs, ldq, ks, ldk, 0.0f, w->s, KB);
        for (int64_t r = 0; r < n; r++) {
            seen(x, i0 + r, j0, j1, &lo, &hi);
            soften(w, r, lo, hi, kn, D);
        }
        mul(0, 0, n, D, kn, 1.0f, w->s, KB, vs, ldv, 1.0f, w->o, D);
    }
    for (int64_t r = 0; r < n; r++) {
        float *row = w->o + r * D, inv = w->l[r] > 0 ? 1.0f / w->l[r] : w->l[r];
        for (int j = 0; j < D; j++) row[j] *= inv;
        ql_cpu_store(o, x->q0 + i0 + r, x->qc, row, D);
        *(float *)ql_cpu_at(lse, x->q0 + i0 + r, h) = w->m[r] + logf(w->l[r]);
    }
}

QL_CPU_OP(attention, ql_tensor o, ql_tensor lse, ql_tensor qt, ql_tensor k, ql_tensor v,
          const ql_attn *a)
{
    QL_TRY(inside("attention", a, qt.rows, k.rows));
    for (int64_t doc = 0; doc < a->docs; doc++) {
        for (int64_t h = 0; h < a->heads; h++) {
            head x = head_of(a, q->work, doc, h);
            for (int64_t i = 0; i < x.q_len; i += QB) forward(&x, o, lse, h, qt, k, v, i);
        }
    }
    return QL_OK;
}

/* ---- backward -----------------------------------------------------------------------------------
 */

typedef struct {
    ql_tensor dq, dout, o, lse, delta, q, k, v;
    float *dk, *dv; /* fp32 sums of the document's key head, and their row strides */
    int ldk, ldv;
} grads;

/* Row r: p = exp(s − lse) over [lo, hi), ds = p (dp − delta) · scale; 0 elsewhere. */
static void soften_dx(blocks *w, int64_t r, int64_t lo, int64_t hi, int64_t n, float lse,
                      float delta, float scale)
{
    float *restrict s = w->s + r * KB, *restrict ds = w->ds + r * KB;
    lo = ql_min64(lo, n), hi = ql_max64(hi, lo);
    for (int64_t j = 0; j < lo; j++) s[j] = ds[j] = 0;
    for (int64_t j = lo; j < hi; j++) {
        s[j] = ql_cpu_exp(s[j] - lse);
        ds[j] = s[j] * (ds[j] - delta) * scale;
    }
    for (int64_t j = hi; j < n; j++) s[j] = ds[j] = 0;
}

static void backward(const head *x, const grads *g, int64_t h, int64_t i0)
{
    blocks *w = x->w;
    int D = x->D, ldq = 0, ldk = 0, ldv = 0, ldo = 0;
    int64_t i1 = ql_min64(i0 + QB, x->q_len), n = i1 - i0, j0, end;
    const float *qs = ql_cpu_panel(g->q, x->q0 + i0, n, x->qc, D, w->q, &ldq);
    const float *dout = ql_cpu_panel(g->dout, x->q0 + i0, n, x->qc, D, w->d, &ldo);
    for (int64_t r = 0; r < n; r++) {
        const float *o = ql_cpu_read(g->o, x->q0 + i0 + r, x->qc, D, w->o);
        w->m[r] = *(const float *)ql_cpu_at(g->lse, x->q0 + i0 + r, h);
        w->l[r] = ql_cpu_dot(o, dout + r * ldo, D);
        *(float *)ql_cpu_at(g->delta, x->q0 + i0 + r, h) = w->l[r];
    }
    memset(w->o, 0, (size_t)(n * D) * sizeof(float)); /* dq from here on */
    range(x, i0, i1, &j0, &end);
    for (; j0 < end; j0 += KB) {
        int64_t j1 = ql_min64(j0 + KB, end), kn = j1 - j0, lo, hi;
        const float *ks = ql_cpu_panel(g->k, x->k0 + j0, kn, x->kc, D, w->k, &ldk);
        const float *vs = ql_cpu_panel(g->v, x->k0 + j0, kn, x->kc, D, w->v, &ldv);
        mul(0, 1, n, kn, D, x->a->scale, qs, ldq, ks, ldk, 0.0f, w->s, KB);
        mul(0, 1, n, kn, D, 1.0f, dout, ldo, vs, ldv, 0.0f, w->ds, KB);
        for (int64_t r = 0; r < n; r++) {
            seen(x, i0 + r, j0, j1, &lo, &hi);
            soften_dx(w, r, lo, hi, kn, w->m[r], w->l[r], x->a->scale);
        }
        mul(1, 0, kn, D, n, 1.0f, w->s, KB, dout, ldo, 1.0f, g->dv + j0 * g->ldv, g->ldv);
        mul(1, 0, kn, D, n, 1.0f, w->ds, KB, qs, ldq, 1.0f, g->dk + j0 * g->ldk, g->ldk);
        mul(0, 0, n, D, kn, 1.0f, w->ds, KB, ks, ldk, 1.0f, w->o, D);
    }
    for (int64_t r = 0; r < n; r++) ql_cpu_store(g->dq, x->q0 + i0 + r, x->qc, w->o + r * D, D);
}

/* Where the key head's sums are: fp32 results themselves, else the workspace. */
static void sums_start(grads *g, const head *x, ql_tensor dk, ql_tensor dv, float *work)
{
    bool direct = dk.dtype == QL_F32;
    g->ldk = direct ? (int)dk.ld : x->D;
    g->ldv = direct ? (int)dv.ld : x->D;
    g->dk = direct ? ql_cpu_at(dk, x->k0, x->kc) : work;
    g->dv = direct ? ql_cpu_at(dv, x->k0, x->kc) : work + x->k_len * x->D;
    for (int64_t i = 0; i < x->k_len; i++) {
        memset(g->dk + i * g->ldk, 0, (size_t)x->D * sizeof(float));
        memset(g->dv + i * g->ldv, 0, (size_t)x->D * sizeof(float));
    }
}

static void sums_end(const grads *g, const head *x, ql_tensor dk, ql_tensor dv, const float *work)
{
    for (int64_t i = 0; g->dk == work && i < x->k_len; i++) {
        ql_cpu_store(dk, x->k0 + i, x->kc, g->dk + i * g->ldk, x->D);
        ql_cpu_store(dv, x->k0 + i, x->kc, g->dv + i * g->ldv, x->D);
    }
}

QL_CPU_OP(attention_dx, ql_tensor dq, ql_tensor dk, ql_tensor dv, ql_tensor dout, ql_tensor o,
          ql_tensor lse, ql_tensor delta, ql_tensor qt, ql_tensor k, ql_tensor v, const ql_attn *a)
{
    _Static_assert(sizeof(blocks) + SUM_FLOATS * sizeof(float) <= (size_t)QL_WORK_BYTES,
                   "workspace");
    float *work = (float *)q->work + sizeof(blocks) / sizeof(float);
    int64_t group = a->heads / a->kv_heads;
    grads g = {.dq = dq, .dout = dout, .o = o, .lse = lse, .delta = delta, .q = qt, .k = k, .v = v};
    QL_TRY(inside("attention_dx", a, qt.rows, k.rows));
    for (int64_t doc = 0; doc < a->docs; doc++) {
        if (a->q_len[doc] != a->k_len[doc])
            QL_FAIL(QL_EINVAL,
                    "attention_dx: document %lld has %d queries for %d keys, needed are as many",
                    (long long)doc, (int)a->q_len[doc], (int)a->k_len[doc]);
        if (dk.dtype != QL_F32 && 2 * a->k_len[doc] * a->head_dim > SUM_FLOATS)
            QL_FAIL(QL_ENOSUP,
                    "attention_dx: document %lld has %d tokens; in %s the CPU sums at most %lld",
                    (long long)doc, (int)a->k_len[doc], ql_dtype_name(dk.dtype),
                    (long long)(SUM_FLOATS / 2 / a->head_dim));
        for (int64_t h = 0; h < a->heads; h++) {
            head x = head_of(a, q->work, doc, h);
            if (h % group == 0) sums_start(&g, &x, dk, dv, work);
            for (int64_t i = 0; i < x.q_len; i += QB) backward(&x, &g, h, i);
            if (h % group == group - 1) sums_end(&g, &x, dk, dv, work);
        }
    }
    return QL_OK;
}
