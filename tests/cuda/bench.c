/* bench_cuda [PART]: the ceilings of a GPU, and every op of the CUDA backend at the 8B model's shapes against its ceiling, through the
 * backend's three tables alone. Parts: ceilings nf4 few text matmul attention small. Prints Markdown: what, time, rate, share of the ceiling,
 * which is a device copy for what moves bytes and a product of 8192 cubed for what multiplies. */
#include "kernels/comm.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CEILING = 8192, KINDS = 3, C = 4096, F = 14336, H = 32, G = 8, D = 128 };

static const ql_backend *backend;
static ql_dev *dev;
static ql_queue q;
static ql_event *e0, *e1;
static double copy_rate;            /* GB/s of a large device copy, read + write */
static double product_rate[KINDS]; /* TFLOP/s of 8192³ by dtype */
static const char *const names[KINDS] = {"f32", "f16", "bf16"};

static void must(ql_status s, const char *what)
{
    if (s == QL_OK) return;
    printf("FAIL bench: %s: %s\n", what, ql_error());
    exit(1);
}

static void *get(int64_t bytes)
{
    void *p = NULL;
    must(backend->dev->alloc(dev, bytes, &p), "alloc");
    return p;
}
static void put_back(void *p)
{
    backend->dev->free(dev, p);
}

/* Uniform in (−x, x). One block of random numbers is repeated: no kernel here depends on values. */
static ql_tensor random_mat(ql_dtype t, int64_t rows, int64_t cols, int64_t ld, float x)
{
    enum { N = 1 << 20 };
    static float *host;
    int64_t n = rows * ld;
    ql_tensor out = ql_mat(get(n * (int64_t)ql_dtype_size(t)), t, rows, cols, ld);
    void *block = get(N * 4);
    uint64_t s = 88172645463325252u;
    if (!host) host = malloc(N * sizeof *host);
    if (!host) exit(1);
    for (int i = 0; i < N; i++) {
        s ^= s << 13, s ^= s >> 7, s ^= s << 17;
        host[i] = x * ((float)(s >> 40) / 8388608.0f - 1.0f);
    }
    must(backend->dev->copy(q.stream, block, host, N * 4), "copy");
    must(backend->dev->sync(q.stream), "sync");
    for (int64_t at = 0; at < n; at += N) {
        int64_t k = ql_min64(N, n - at);
        must(ql_convert(&q, ql_vec((char *)out.data + at * (int64_t)ql_dtype_size(t), t, k), ql_vec(block, QL_F32, k)),
             "convert");
    }
    must(backend->dev->sync(q.stream), "sync");
    put_back(block);
    return out;
}

typedef ql_status (*body)(void *ctx, int round);

/* Milliseconds of one call: the best of five batches of at least 10 ms each. */
static double time_of(body f, void *ctx)
{
    double best = 1e30, ms = 0;
    int n = 3, round = 0;
    for (int i = 0; i < 3; i++) must(f(ctx, round++), "run");
    for (int batch = -1; batch < 5; batch++) {
        must(backend->dev->record(q.stream, e0), "record");
        for (int i = 0; i < n; i++) must(f(ctx, round++), "run");
        must(backend->dev->record(q.stream, e1), "record");
        must(backend->dev->elapsed(e0, e1, &ms), "elapsed");
        if (batch < 0) {
            n = (int)fmax(6, fmin(400, ceil(10 / (ms / n)) + 5)) / 6 * 6;
            continue;
        }
        best = fmin(best, ms / n);
    }
    return best;
}

static void head(const char *part)
{
    printf("\n| %s | ms | rate | of its ceiling |\n|---|---|---|---|\n", part);
}

static void line(const char *what, ql_dtype t, double ms, double bytes, double flops)
{
    double share = bytes > 0 && copy_rate > 0 ? 100 * bytes / ms * 1e-6 / copy_rate : 0;
    if (flops > 0 && product_rate[t] > 0) share = 100 * flops / ms * 1e-9 / product_rate[t];
    printf("| %s | %.4f | ", what, ms);
    if (bytes > 0) printf("%.0f GB/s", bytes / ms * 1e-6);
    if (flops > 0) printf("%.1f TFLOP/s", flops / ms * 1e-9);
    if (share > 0)
        printf(" | %.1f %% |\n", share);
    else
        printf(" | |\n");
    fflush(stdout);
}

/* ---- copy ---- */

typedef struct {
    char *a[6], *b[6];
    int64_t bytes;
} copies;

static ql_status run_copy(void *ctx, int round)
{
    copies *c = ctx;
    return backend->dev->copy(q.stream, c->b[round % 6], c->a[round % 6], c->bytes);
}

/* Time of a copy that reads and writes `bytes` in all, six pairs of buffers in rotation. */
static double copy_ms(int64_t bytes)
{
    copies c = {.bytes = bytes / 2};
    for (int i = 0; i < 6; i++) c.a[i] = get(c.bytes), c.b[i] = get(c.bytes);
    double ms = time_of(run_copy, &c);
    for (int i = 0; i < 6; i++) put_back(c.a[i]), put_back(c.b[i]);
    return ms;
}

static void bench_copy(void)
{
    double bytes = 1 << 30, ms = copy_ms((int64_t)bytes);
    line("device copy, 512 MiB read, 512 MiB written", QL_F32, ms, bytes, 0);
    copy_rate = bytes / ms * 1e-6;
}

static void bench_links(void)
{
    copies c = {.bytes = 256 << 20};
    char *host = NULL, *there = get(c.bytes);
    must(backend->dev->host_alloc(dev, c.bytes, (void **)&host), "pinned memory");
    for (int down = 0; down < 2; down++) {
        for (int i = 0; i < 6; i++) c.a[i] = down ? there : host, c.b[i] = down ? host : there;
        double rate = copy_rate;
        copy_rate = 0; /* not its ceiling: a ceiling itself */
        line(down ? "device to pinned host, 256 MiB" : "pinned host to device, 256 MiB", QL_F32, time_of(run_copy, &c), (double)c.bytes, 0);
        copy_rate = rate;
    }
    backend->dev->host_free(dev, host), put_back(there);
}

/* ---- 4-bit weights ---- */

typedef struct {
    ql_nf4 w[18];
    ql_tensor out[6], x; /* x, then out: of nf4_matmul */
    ql_tensor code, code2;
    int side; /* matrices side by side */
} weights;

static ql_status run_nf4(void *ctx, int round)
{
    weights *x = ctx;
    return ql_nf4_dequant(&q, &x->out[round % 6], &x->w[round % 6], 1);
}
static ql_status run_few(void *ctx, int round)
{
    weights *x = ctx;
    return ql_nf4_matmul(&q, x->out[round % 6], x->x, &x->w[round % 6 * x->side], x->side, QL_NONE, QL_NONE);
}

static void weights_open(weights *x, ql_dtype t, int64_t rows, int64_t cols, int side)
{
    int64_t n = rows * cols;
    *x = (weights){.side = side};
    x->code = random_mat(QL_F32, 1, 16, 16, 1), x->code2 = random_mat(QL_F32, 1, 256, 256, 1);
    for (int i = 0; i < 6 * side; i++) {
        ql_tensor absmax2 = random_mat(QL_F32, 1, ql_ceil_div(n, 64 * 256), ql_ceil_div(n, 64 * 256), 1);
        /* packed and absmax8: any bytes; those of random floats are varied enough */
        ql_tensor packed = random_mat(QL_F32, 1, n / 8, n / 8, 1), absmax = random_mat(QL_F32, 1, n / 256, n / 256, 1);
        x->w[i] = (ql_nf4){.rows = rows, .cols = cols, .part = n, .parts = 1, .block = 64, .block2 = 256};
        x->w[i].packed[0] = packed.data, x->w[i].absmax[0] = absmax.data, x->w[i].absmax2[0] = absmax2.data;
        x->w[i].code = x->code.data, x->w[i].code2 = x->code2.data, x->w[i].offset = 0.03f, x->w[i].state = t;
    }
}

static void weights_close(weights *x)
{
    for (int i = 0; i < 6 && x->out[i].data; i++) put_back(x->out[i].data);
    for (int i = 0; i < 6 * x->side; i++) {
        put_back((void *)(uintptr_t)x->w[i].packed[0]);
        put_back((void *)(uintptr_t)x->w[i].absmax[0]), put_back((void *)(uintptr_t)x->w[i].absmax2[0]);
    }
    put_back(x->code.data), put_back(x->code2.data);
}

static void bench_nf4(ql_dtype t, int64_t rows, int64_t cols, double bar)
{
    char what[96];
    weights x;
    int64_t n = rows * cols, ld = cols + 16;
    weights_open(&x, t, rows, cols, 1);
    for (int i = 0; i < 6; i++) x.out[i] = random_mat(t, rows, cols, ld, 1);
    double ms = time_of(run_nf4, &x), bytes = (double)n * (0.5 + 1.0 / 64 + 4.0 / 64 / 256 + 2);
    double copy = copy_ms((int64_t)bytes), share = 100 * copy / ms;
    snprintf(what, sizeof what, "nf4_dequant %s %lldx%lld", names[t], (long long)rows, (long long)cols);
    printf("| %s | %.4f | %.0f GB/s | %.1f %% of a copy of the same bytes, bar %.0f: %s |\n", what, ms, bytes / ms * 1e-6, share, bar,
           share >= bar ? "met" : "MISSED");
    fflush(stdout);
    weights_close(&x);
}

/* m rows against the packed bytes and scales, which are all that has to be read. */
static void bench_few(ql_dtype t, int64_t m, const char *name, int side, int64_t rows, int64_t cols, double bar)
{
    weights x;
    weights_open(&x, t, rows, cols, side);
    x.x = random_mat(t, m, cols, cols, 1);
    for (int i = 0; i < 6; i++) x.out[i] = random_mat(t, m, side * rows, side * rows, 1);
    double ms = time_of(run_few, &x), bytes = side * (double)rows * (double)cols * (0.5 + 1.0 / 64 + 4.0 / 64 / 256);
    double share = 100 * copy_ms((int64_t)bytes) / ms;
    printf("| nf4_matmul %s %s %lld × %lldx%lld | %.4f | %.0f GB/s | %.1f %% of a copy of the same bytes (%.1f of a long one), bar %.0f: %s |\n", names[t], name,
           (long long)m, (long long)(side * rows), (long long)cols, ms, bytes / ms * 1e-6, share, 100 * bytes / ms * 1e-6 / copy_rate, bar,
           share >= bar ? "met" : "MISSED");
    fflush(stdout);
    put_back(x.x.data);
    weights_close(&x);
}

/* ---- matmul ---- */

typedef struct {
    ql_tensor out, a, b, c, bias;
    ql_trans trans;
} product;

static ql_status run_matmul(void *ctx, int round)
{
    product *p = ctx;
    (void)round;
    return ql_matmul(&q, p->out, p->a, p->b, p->trans, 1, p->c, p->bias);
}

/* pad: adapter columns behind K, part of the product and of the row stride. */
static void bench_matmul(const char *name, ql_dtype t, int64_t m, int64_t n, int64_t k, int64_t pad, ql_trans trans,
                         int residual)
{
    static const char *const kinds[] = {"NN", "NT", "TN"};
    char what[96];
    k += pad;
    product p = {.trans = trans, .c = QL_NONE, .bias = QL_NONE};
    p.a = trans == QL_TN ? random_mat(t, k, m, m, 1) : random_mat(t, m, k, k, 1);
    p.b = trans == QL_NT ? random_mat(t, n, k, k, 0.05f) : random_mat(t, k, n, n, 0.05f);
    p.out = random_mat(t, m, n, n, 1);
    if (residual) p.c = random_mat(t, m, n, n, 1);
    double ms = time_of(run_matmul, &p);
    snprintf(what, sizeof what, "matmul %s %s %s M %lld N %lld K %lld%s", names[t], kinds[trans], name, (long long)m,
             (long long)n, (long long)k, residual ? " +c" : "");
    double flops = 2.0 * (double)m * (double)n * (double)k;
    if (m == CEILING && n == CEILING && k == CEILING) product_rate[t] = 0; /* the ceiling itself */
    line(what, t, ms, 0, flops);
    if (m == CEILING && n == CEILING && k == CEILING) product_rate[t] = flops / ms * 1e-9;
    put_back(p.a.data), put_back(p.b.data), put_back(p.out.data);
    if (residual) put_back(p.c.data);
}

static void bench_matmuls(ql_dtype best)
{
    for (int64_t m = 2048; m <= 8192; m *= 4)
        for (ql_dtype t = best; t >= QL_F16; t--) {
            if (t != best && m == 8192) continue;
            bench_matmul("qkv", t, m, 6144, C, 48, QL_NT, 0);
            bench_matmul("o", t, m, C, C, 16, QL_NT, 1);
            bench_matmul("gate_up", t, m, 2 * F, C, 32, QL_NT, 0);
            bench_matmul("down", t, m, C, F, 16, QL_NT, 1);
            bench_matmul("gate_up dx", t, m, C, 2 * F, 32, QL_NN, 0);
            bench_matmul("down dx", t, m, F, C, 16, QL_NN, 0);
            bench_matmul("head piece", t, m, 16032, C, 0, QL_NT, 0);
            bench_matmul("head piece dx", t, m, C, 16032, 0, QL_NN, 0);
            bench_matmul("x A", t, m, 32, C, 0, QL_NT, 0);
            bench_matmul("dA", t, 16, C, m, 0, QL_TN, 0);
            bench_matmul("dB", t, F, 16, m, 0, QL_TN, 0);
        }
}

/* ---- attention ---- */

typedef struct {
    ql_tensor q, k, v, o, lse, dout, delta, dq, dk, dv;
    ql_attn a;
} attn;

static ql_status run_fwd(void *ctx, int round)
{
    attn *x = ctx;
    (void)round;
    return ql_attention(&q, x->o, x->lse, x->q, x->k, x->v, &x->a);
}
static ql_status run_bwd(void *ctx, int round)
{
    attn *x = ctx;
    (void)round;
    return ql_attention_dx(&q, x->dq, x->dk, x->dv, x->dout, x->o, x->lse, x->delta, x->q, x->k, x->v, &x->a);
}

static int64_t flops_pairs(int64_t s)
{
    return s * (s + 1) / 2;
}

static void bench_attention(ql_dtype t, int64_t docs, int64_t s, int64_t heads, int64_t kv, int64_t d)
{
    char what[96];
    int64_t n = docs * s, wide = (heads + 2 * kv) * d;
    int32_t *meta = malloc((size_t)docs * 2 * sizeof *meta), *on_dev = get(docs * 8);
    attn x;
    if (!meta) exit(1);
    for (int64_t i = 0; i < docs; i++) meta[i] = (int32_t)(i * s), meta[docs + i] = (int32_t)s;
    must(backend->dev->copy(q.stream, on_dev, meta, docs * 8), "copy");
    must(backend->dev->sync(q.stream), "sync");
    x.a = (ql_attn){heads, kv, d, 0, 1 / sqrtf((float)d), docs, on_dev, on_dev + docs, on_dev, on_dev + docs, s, s};
    ql_tensor qkv = random_mat(t, n, wide, wide, 1), dqkv = random_mat(t, n, wide, wide, 1);
    x.q = ql_cols(qkv, 0, heads * d), x.k = ql_cols(qkv, heads * d, kv * d), x.v = ql_cols(qkv, (heads + kv) * d, kv * d);
    x.dq = ql_cols(dqkv, 0, heads * d), x.dk = ql_cols(dqkv, heads * d, kv * d);
    x.dv = ql_cols(dqkv, (heads + kv) * d, kv * d);
    x.o = random_mat(t, n, heads * d, heads * d, 1), x.dout = random_mat(t, n, heads * d, heads * d, 1);
    x.lse = random_mat(QL_F32, n, heads, heads, 1), x.delta = random_mat(QL_F32, n, heads, heads, 1);
    double flops = 4.0 * (double)docs * (double)flops_pairs(s) * (double)heads * (double)d;
    snprintf(what, sizeof what, "attention %s %lldx%lld H %lld G %lld D %lld fwd", names[t], (long long)docs, (long long)s,
             (long long)heads, (long long)kv, (long long)d);
    line(what, t, time_of(run_fwd, &x), 0, flops);
    memcpy(what + strlen(what) - 3, "bwd", 3);
    line(what, t, time_of(run_bwd, &x), 0, 2.5 * flops);
    put_back(qkv.data), put_back(dqkv.data), put_back(x.o.data), put_back(x.dout.data), put_back(x.lse.data);
    put_back(x.delta.data), put_back(on_dev);
    free(meta);
}

/* ---- a layer of text ---- */

enum { KEYS = 1024 }; /* of each sequence */

typedef struct {
    weights qkv, o, gu, down;
    ql_tensor h, h2, x, heads, seen, wide, a, norm, pos, freq, slot, k, v, lse;
    ql_attn attn;
} text;

static ql_status few_of(weights *w, int round, ql_tensor out, ql_tensor x, ql_tensor c)
{
    return ql_nf4_matmul(&q, out, x, &w->w[round % 6 * w->side], w->side, c, QL_NONE);
}

/* What core/layer.c does for a token of each sequence, where there are no adapters. */
static ql_status run_text(void *ctx, int round)
{
    text *x = ctx;
    QL_TRY(ql_rmsnorm(&q, x->x, x->h, x->norm, 1e-5f));
    QL_TRY(few_of(&x->qkv, round, x->heads, x->x, QL_NONE));
    QL_TRY(ql_rope(&q, ql_cols(x->heads, 0, (H + G) * D), D, x->pos, x->freq, 1, 1));
    QL_TRY(ql_scatter_rows(&q, x->k, ql_cols(x->heads, H * D, G * D), x->slot));
    QL_TRY(ql_scatter_rows(&q, x->v, ql_cols(x->heads, (H + G) * D, G * D), x->slot));
    QL_TRY(ql_attention(&q, x->seen, x->lse, ql_cols(x->heads, 0, H * D), x->k, x->v, &x->attn));
    QL_TRY(few_of(&x->o, round, x->h2, x->seen, x->h));
    QL_TRY(ql_rmsnorm(&q, x->x, x->h2, x->norm, 1e-5f));
    QL_TRY(few_of(&x->gu, round, x->wide, x->x, QL_NONE));
    QL_TRY(ql_swiglu(&q, x->a, x->wide));
    return few_of(&x->down, round, x->h, x->a, x->h2);
}

static void bench_text(ql_dtype t, int64_t m)
{
    enum { ROWS = 8 };
    int32_t meta[5][ROWS], *on_dev = get(sizeof meta);
    text x = {.attn = {H, G, D, 0, 1 / sqrtf((float)D), m, on_dev, on_dev + ROWS, on_dev + 2 * ROWS, on_dev + 3 * ROWS, 1, KEYS}};
    for (int i = 0; i < ROWS; i++)
        meta[0][i] = i, meta[1][i] = 1, meta[2][i] = i * KEYS, meta[3][i] = KEYS, meta[4][i] = i * KEYS + KEYS - 1;
    must(backend->dev->copy(q.stream, on_dev, meta, sizeof meta), "copy");
    must(backend->dev->sync(q.stream), "sync");
    x.slot = ql_vec(on_dev + 4 * ROWS, QL_I32, m), x.pos = ql_vec(on_dev + 3 * ROWS, QL_I32, m);
    weights_open(&x.qkv, t, (H + 2 * G) * D / 3, C, 3), weights_open(&x.o, t, C, C, 1);
    weights_open(&x.gu, t, F, C, 2), weights_open(&x.down, t, C, F, 1);
    ql_tensor *all[] = {&x.h, &x.h2, &x.x, &x.heads, &x.seen, &x.wide, &x.a, &x.k, &x.v};
    const int64_t cols[] = {C, C, C, (H + 2 * G) * D, C, 2 * F, F, G * D, G * D};
    for (int i = 0; i < 9; i++) *all[i] = random_mat(t, i < 7 ? m : m * KEYS, cols[i], cols[i], 1);
    x.norm = random_mat(QL_F32, 1, C, C, 1), x.freq = random_mat(QL_F32, 1, D / 2, D / 2, 1), x.lse = random_mat(QL_F32, m, H, H, 1);
    double ms = time_of(run_text, &x), n = (double)C * ((H + 2 * G) * D + C + 3 * F), bytes = n * (0.5 + 1.0 / 64 + 4.0 / 64 / 256);
    char what[96];
    snprintf(what, sizeof what, "a layer of the 8B, %lld row%s, %d keys each %s", (long long)m, m > 1 ? "s" : "", KEYS, names[t]);
    line(what, t, ms, bytes, 0);
    for (int i = 0; i < 9; i++) put_back(all[i]->data);
    put_back(x.norm.data), put_back(x.freq.data), put_back(x.lse.data), put_back(on_dev);
    weights_close(&x.qkv), weights_close(&x.o), weights_close(&x.gu), weights_close(&x.down);
}

/* ---- memory-bound ops ---- */

typedef struct {
    ql_tensor a, b, c, w, pos, freq, y[6];
    ql_ctl *ctl;
    ql_drop drop;
    ql_adam adam;
} small;

static ql_status run_norm(void *v, int r) { small *x = v; (void)r; return ql_rmsnorm(&q, x->b, x->a, x->w, 1e-5f); }
static ql_status run_norm_dx(void *v, int r)
{
    small *x = v;
    (void)r;
    return ql_rmsnorm_dx(&q, x->c, x->b, x->a, x->w, 1e-5f, x->c);
}
static ql_status run_rope(void *v, int r) { small *x = v; (void)r; return ql_rope(&q, x->a, D, x->pos, x->freq, 1, 1); }
static ql_status run_swiglu(void *v, int r) { small *x = v; (void)r; return ql_swiglu(&q, x->b, x->a); }
static ql_status run_swiglu_dx(void *v, int r) { small *x = v; (void)r; return ql_swiglu_dx(&q, x->a, x->b, x->a, x->b); }
static ql_status run_drop(void *v, int r) { small *x = v; (void)r; return ql_dropout(&q, x->b, x->a, &x->drop); }
static ql_status run_stats(void *v, int r) { small *x = v; (void)r; return ql_ce_stats(&q, x->b, x->a, x->pos, 0); }
static ql_status run_grad(void *v, int r)
{
    small *x = v;
    (void)r;
    return ql_ce_grad(&q, x->a, x->w, x->pos, 0, 0, 128256, x->ctl);
}
static ql_status run_adam(void *v, int r)
{
    small *x = v;
    (void)r;
    return ql_adamw(&q, x->y[0], x->y[1], x->y[2], x->y[3], x->ctl, &x->adam);
}
static ql_status run_adam8(void *v, int r)
{
    small *x = v;
    (void)r;
    return ql_adamw8(&q, x->y[0], x->a, x->b, x->y[4], x->y[5], x->y[3], x->pos, x->freq, x->ctl, &x->adam);
}
static ql_status run_parts(void *v, int r) { small *x = v; (void)r; return ql_norm_parts(&q, x->w, x->y[3]); }

static void bench_small(ql_dtype t)
{
    const int64_t T = 8192, N = (int64_t)42 << 20;
    double e = (double)ql_dtype_size(t), tokens = (double)T;
    char what[64];
    small x = {.adam = {QL_ADAM_TORCH, 0.9f, 0.999f, 1e-8f, 0.01f}};
    x.ctl = get(256), x.pos = ql_vec(get(T * 8), QL_I32, T);
    must(backend->dev->set(q.stream, x.ctl, 0, 256), "set");
    must(backend->dev->set(q.stream, x.pos.data, 0, T * 8), "set");
    x.freq = random_mat(QL_F32, 1, D / 2, D / 2, 1);
    x.a = random_mat(t, T, C, C, 1), x.b = random_mat(t, T, C, C, 1), x.c = random_mat(t, T, C, C, 1);
    x.w = random_mat(QL_F32, 1, C, C, 1);
    x.drop = (ql_drop){1, 2, 3, 4, 0.1f, x.pos.data};
#define LINE(name, f, bytes) snprintf(what, sizeof what, "%s %s", name, names[t]), line(what, t, time_of(f, &x), bytes, 0)
    LINE("rmsnorm 8192x4096", run_norm, 2 * e * tokens * C);
    LINE("rmsnorm_dx 8192x4096 + dres", run_norm_dx, 4 * e * tokens * C);
    LINE("rope 8192x32x128", run_rope, 2 * e * tokens * C);
    LINE("dropout 8192x4096", run_drop, 2 * e * tokens * C);
    put_back(x.a.data), put_back(x.b.data), put_back(x.c.data), put_back(x.w.data);
    x.a = random_mat(t, T, 2 * F, 2 * F, 1), x.b = random_mat(t, T, F, F, 1);
    LINE("swiglu 8192x14336", run_swiglu, 3 * e * tokens * F);
    LINE("swiglu_dx 8192x14336, in place", run_swiglu_dx, 6 * e * tokens * F);
    put_back(x.a.data), put_back(x.b.data);
    x.a = random_mat(t, T, 16032, 16032, 1), x.b = random_mat(QL_F32, T, 4, 4, 1), x.w = random_mat(QL_F32, 1, T, T, 1);
    LINE("ce_stats 8192x16032", run_stats, e * tokens * 16032);
    LINE("ce_grad 8192x16032", run_grad, 2 * e * tokens * 16032);
    put_back(x.a.data), put_back(x.b.data), put_back(x.w.data);
    if (t == QL_BF16) {
        for (int i = 0; i < 4; i++) x.y[i] = random_mat(QL_F32, 1, N, N, 1);
        x.w = random_mat(QL_F32, 1, N / 4096, N / 4096, 1);
        double n = (double)N;
        LINE("norm_parts 44 M", run_parts, 4 * n);
        LINE("adamw 44 M", run_adam, 28 * n);
        x.a = ql_vec(get(N), QL_U8, N), x.b = ql_vec(get(N), QL_U8, N);
        x.y[4] = random_mat(QL_F32, 1, N / 256, N / 256, 1), x.y[5] = random_mat(QL_F32, 1, N / 256, N / 256, 1);
        x.pos = random_mat(QL_F32, 1, 256, 256, 1), x.freq = random_mat(QL_F32, 1, 256, 256, 1);
        LINE("adamw8 44 M", run_adam8, 16 * n);
        for (int i = 0; i < 6; i++) put_back(x.y[i].data);
        put_back(x.a.data), put_back(x.b.data), put_back(x.w.data);
    }
#undef LINE
}

int main(int argc, char **argv)
{
    const char *only = argc > 1 ? argv[1] : "";
    ql_dev_info info;
    must(ql_backend_cuda(NULL, &backend), "backend");
    must(backend->dev->open(0, &dev), "open");
    must(backend->dev->info(dev, &info), "info");
    printf("%s · compute capability %d.%d · %d SMs · driver %s · %s\n", info.name, info.arch / 10, info.arch % 10,
           info.sms, info.driver, info.libs);
    must(backend->dev->stream_open(dev, &q.stream), "stream");
    must(backend->dev->event_open(dev, &e0), "event");
    must(backend->dev->event_open(dev, &e1), "event");
    q.ops = backend->ops, q.work = get(QL_WORK_BYTES);
    ql_dtype t = info.bf16 ? QL_BF16 : QL_F16;
#define PART(name) (!*only || !strcmp(only, name))
    head("ceilings");
    bench_copy();
    bench_links();
    for (ql_dtype u = t; u >= QL_F16; u--) bench_matmul("ceiling", u, CEILING, CEILING, CEILING, 0, QL_NT, 0);
    if (PART("nf4")) {
        head("4-bit weights, six buffers in rotation");
        for (ql_dtype u = t; u >= QL_F16; u--) {
            bench_nf4(u, 28672, 4096, 93), bench_nf4(u, 14336, 4096, 93);
            bench_nf4(u, 4096, 4096, 98), bench_nf4(u, 1024, 4096, 108);
        }
    }
    if (PART("few")) {
        head("few rows, weights read as they rest, six buffers in rotation");
        for (int64_t m = 1; m <= 8; m *= 8) {
            bench_few(t, m, "8B qkv", 3, 2048, 4096, 70), bench_few(t, m, "8B o", 1, 4096, 4096, 70);
            bench_few(t, m, "8B gate_up", 2, 14336, 4096, 70), bench_few(t, m, "8B down", 1, 4096, 14336, 70);
            bench_few(t, m, "70B gate_up", 2, 28672, 8192, 70), bench_few(t, m, "70B down", 1, 8192, 28672, 70);
        }
    }
    if (PART("text")) {
        head("a token of text, without adapters: 4-bit weights against a long copy");
        bench_text(t, 1), bench_text(t, 8);
    }
    if (PART("small")) head("ops that move bytes"), bench_small(t);
    if (PART("attention")) {
        head("attention");
        bench_attention(t, 1, 2048, H, G, D), bench_attention(t, 4, 2048, H, G, D), bench_attention(t, 1, 8192, H, G, D);
        if (t != QL_F16) bench_attention(QL_F16, 4, 2048, H, G, D);
        bench_attention(t, 4, 2048, H, G, 64);
    }
    if (PART("matmul")) head("products"), bench_matmuls(t);
    backend->dev->event_close(e0), backend->dev->event_close(e1);
    put_back(q.work);
    backend->dev->stream_close(q.stream);
    backend->dev->close(dev);
    return 0;
}
