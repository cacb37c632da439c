/* attn_check [TOKENS]: the tensor-core attention of the CUDA backend against its plain fp32 one, tile by tile, so that a wrong kernel says
 * where it is wrong. TOKENS leaves out cases with more queries, for sanitizers. A line per case and tensor; a failed one prints the error
 * of each 64 rows × 32 columns. */
#include "kernels/comm.h"
#include "kernels/half.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const ql_backend *backend;
static ql_dev *dev;
static ql_queue q;
static int failures, most = 1 << 30;

static void must(ql_status s, const char *what)
{
    if (s == QL_OK) return;
    printf("not ok attn_check: %s: %s\n", what, ql_error());
    exit(1);
}

/* The same values in a 16-bit dtype and in F32, and room for both results. */
typedef struct {
    ql_tensor half, full;
} pair;

static pair pair_of(ql_dtype t, int64_t rows, int64_t cols, uint64_t seed)
{
    int64_t n = rows * cols, es = (int64_t)ql_dtype_size(t);
    char *h = malloc((size_t)(n * es));
    float *f = malloc((size_t)n * sizeof *f);
    void *dh = NULL, *df = NULL;
    if (!h || !f) exit(1);
    for (int64_t i = 0; i < n; i++) {
        seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
        float x = seed ? (float)(seed >> 40) / 8388608.0f - 1.0f : 0;
        ql_float_put(h, t, i, x);
        f[i] = ql_float_get(h, t, i);
    }
    must(backend->dev->alloc(dev, n * es, &dh), "alloc");
    must(backend->dev->alloc(dev, n * 4, &df), "alloc");
    must(backend->dev->copy(q.stream, dh, h, n * es), "copy");
    must(backend->dev->copy(q.stream, df, f, n * 4), "copy");
    must(backend->dev->sync(q.stream), "sync");
    free(h), free(f);
    return (pair){ql_mat(dh, t, rows, cols, cols), ql_mat(df, QL_F32, rows, cols, cols)};
}

static void pair_free(pair p)
{
    backend->dev->free(dev, p.half.data), backend->dev->free(dev, p.full.data);
}

static float *fetch(ql_tensor t)
{
    int64_t n = t.rows * t.cols, es = (int64_t)ql_dtype_size(t.dtype);
    char *h = malloc((size_t)(n * es));
    float *f = malloc((size_t)n * sizeof *f);
    if (!h || !f) exit(1);
    must(backend->dev->copy(q.stream, h, t.data, n * es), "copy");
    must(backend->dev->sync(q.stream), "run");
    for (int64_t i = 0; i < n; i++) f[i] = ql_float_get(h, t.dtype, i);
    free(h);
    return f;
}

static void compare(const char *name, const char *what, ql_tensor got, ql_tensor ref, double bar)
{
    float *a = fetch(got), *b = fetch(ref);
    double err = 0, size = 0, worst = 0;
    int64_t tiles_r = ql_ceil_div(got.rows, 64), tiles_c = ql_ceil_div(got.cols, 32), at_r = 0, at_c = 0;
    double *map = calloc((size_t)(tiles_r * tiles_c), sizeof *map);
    if (!map) exit(1);
    for (int64_t i = 0; i < got.rows; i++)
        for (int64_t j = 0; j < got.cols; j++) {
            double d = fabs((double)a[i * got.cols + j] - (double)b[i * got.cols + j]);
            if (isnan(d)) d = 1e30;
            err += d * d, size += (double)b[i * got.cols + j] * (double)b[i * got.cols + j];
            if (d > worst) worst = d, at_r = i, at_c = j;
            map[i / 64 * tiles_c + j / 32] = fmax(map[i / 64 * tiles_c + j / 32], d);
        }
    /* what ought to be 0 (one key's gradients) is rounding of fp32: a reference below 1e-4 an element counts as 1e-4 */
    double rel = sqrt(err / fmax(size, (double)(got.rows * got.cols) * 1e-8));
    int bad = !(rel <= bar);
    printf("%s %s.%s: relative error %.2e (bar %.0e), worst %.3g at [%lld][%lld]: %g, expected %g\n", bad ? "not ok" : "ok",
           name, what, rel, bar, worst, (long long)at_r, (long long)at_c, (double)a[at_r * got.cols + at_c],
           (double)b[at_r * got.cols + at_c]);
    for (int64_t r = 0; bad && r < tiles_r && r < 10; r++) {
        printf("#  rows %4lld:", (long long)(64 * r));
        for (int64_t c = 0; c < tiles_c && c < 16; c++) printf(" %8.1e", map[r * tiles_c + c]);
        putchar('\n');
    }
    fflush(stdout);
    failures += bad;
    free(a), free(b), free(map);
}

/* The same bits once more? */
static void repeats(const char *name, const char *what, ql_tensor t, const float *before)
{
    float *now = fetch(t);
    int bad = memcmp(before, now, (size_t)(t.rows * t.cols) * sizeof *now) != 0;
    printf("%s %s.%s: the same bits twice\n", bad ? "not ok" : "ok", name, what);
    failures += bad;
    free(now);
}

/* n documents of these query and key lengths, one behind the other with `gap` rows between. */
static void check(const char *name, ql_dtype t, int64_t heads, int64_t kv, int64_t d, int64_t window, int n,
                  const int32_t *q_len, const int32_t *k_len, int32_t gap)
{
    int32_t meta[64], *on_dev = NULL, tq = 0, tk = 0, q_max = 0, k_max = 0, training = 1;
    for (int i = 0; i < n; i++) {
        meta[i] = tq, meta[n + i] = q_len[i], meta[2 * n + i] = tk, meta[3 * n + i] = k_len[i];
        tq += q_len[i] + gap, tk += k_len[i] + gap;
        if (q_len[i] > q_max) q_max = q_len[i];
        if (k_len[i] > k_max) k_max = k_len[i];
        training &= q_len[i] == k_len[i];
    }
    if (tq > most) return;
    must(backend->dev->alloc(dev, 16 * n, (void **)&on_dev), "alloc");
    must(backend->dev->copy(q.stream, on_dev, meta, 16 * n), "copy");
    ql_attn a = {heads, kv, d, window, 1 / sqrtf((float)d), n, on_dev, on_dev + n, on_dev + 2 * n, on_dev + 3 * n, q_max, k_max};
    pair qt = pair_of(t, tq, heads * d, 1), k = pair_of(t, tk, kv * d, 2), v = pair_of(t, tk, kv * d, 3);
    pair o = pair_of(t, tq, heads * d, 0), dout = pair_of(t, tq, heads * d, 5), dq = pair_of(t, tq, heads * d, 0);
    pair dk = pair_of(t, tk, kv * d, 0), dv = pair_of(t, tk, kv * d, 0);
    pair lse = pair_of(QL_F32, tq, heads, 0), delta = pair_of(QL_F32, tq, heads, 0);
    double bar = t == QL_F16 ? 2e-3 : 1e-2;
    must(ql_attention(&q, o.half, lse.half, qt.half, k.half, v.half, &a), "attention");
    must(ql_attention(&q, o.full, lse.full, qt.full, k.full, v.full, &a), "attention");
    compare(name, "o", o.half, o.full, bar);
    compare(name, "lse", lse.half, lse.full, 1e-4);
    if (training) {
        /* both gradients from the same o and lse, so that only the gradient is compared */
        must(ql_attention_dx(&q, dq.half, dk.half, dv.half, dout.half, o.half, lse.full, delta.half, qt.half, k.half, v.half,
                             &a), "attention_dx");
        must(ql_attention_dx(&q, dq.full, dk.full, dv.full, dout.full, o.full, lse.full, delta.full, qt.full, k.full, v.full,
                             &a), "attention_dx");
        compare(name, "dq", dq.half, dq.full, bar), compare(name, "dk", dk.half, dk.full, bar);
        compare(name, "dv", dv.half, dv.full, bar);
        float *first[] = {fetch(dq.half), fetch(dk.half), fetch(dv.half)};
        must(ql_attention_dx(&q, dq.half, dk.half, dv.half, dout.half, o.half, lse.full, delta.half, qt.half, k.half, v.half,
                             &a), "attention_dx");
        repeats(name, "dq", dq.half, first[0]), repeats(name, "dk", dk.half, first[1]);
        repeats(name, "dv", dv.half, first[2]);
        for (int i = 0; i < 3; i++) free(first[i]);
    }
    pair_free(qt), pair_free(k), pair_free(v), pair_free(o), pair_free(dout), pair_free(dq), pair_free(dk), pair_free(dv);
    pair_free(lse), pair_free(delta), backend->dev->free(dev, on_dev);
}

#define LENS(...) (const int32_t[]){__VA_ARGS__}
int main(int argc, char **argv)
{
    ql_dev_info info;
    if (argc > 1) most = atoi(argv[1]);
    void *work = NULL;
    must(ql_backend_cuda(NULL, &backend), "backend");
    must(backend->dev->open(0, &dev), "open");
    must(backend->dev->info(dev, &info), "info");
    must(backend->dev->stream_open(dev, &q.stream), "stream");
    must(backend->dev->alloc(dev, QL_WORK_BYTES, &work), "alloc");
    q.ops = backend->ops, q.work = work;
    for (ql_dtype t = QL_F16; t <= QL_BF16; t++) {
        if (t == QL_BF16 && !info.bf16) continue;
        for (int64_t d = 64; d <= 128; d += 64) {
            char name[64];
#define CHECK(what, ...) snprintf(name, sizeof name, "%s.d%d.%s", t == QL_F16 ? "f16" : "bf16", (int)d, what), check(name, t, __VA_ARGS__)
            CHECK("one tile", 1, 1, d, 0, 1, LENS(128), LENS(128), 0);
            CHECK("two tiles", 1, 1, d, 0, 1, LENS(256), LENS(256), 0);
            CHECK("one key", 1, 1, d, 0, 1, LENS(1), LENS(1), 0);
            CHECK("odd", 2, 1, d, 0, 1, LENS(333), LENS(333), 0);
            CHECK("grouped", 8, 2, d, 0, 1, LENS(640), LENS(640), 0);
            CHECK("seven a group", 14, 2, d, 0, 2, LENS(300, 129), LENS(300, 129), 0);
            CHECK("three a group", 3, 1, d, 0, 1, LENS(400), LENS(400), 0);
            CHECK("eight a group", 16, 2, d, 0, 1, LENS(777), LENS(777), 0);
            CHECK("ragged", 4, 2, d, 0, 5, LENS(1, 200, 63, 129, 64), LENS(1, 200, 63, 129, 64), 3);
            CHECK("window", 4, 1, d, 100, 2, LENS(500, 77), LENS(500, 77), 0);
            CHECK("cache", 4, 2, d, 0, 3, LENS(1, 70, 130), LENS(300, 70, 511), 2);
            CHECK("many", 16, 4, d, 0, 3, LENS(1024, 900, 1500), LENS(1024, 900, 1500), 0);
        }
    }
    backend->dev->free(dev, work);
    backend->dev->stream_close(q.stream);
    backend->dev->close(dev);
    printf("%s attn_check finished\n", failures ? "not ok" : "ok");
    return failures;
}
