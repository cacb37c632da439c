/* ops [BACKEND…] [--bench] [--once] [NAME] [not:NAME]: runs the table on each backend; a NAME runs the cases whose line contains it,
 * not:NAME those that do not; --once each case once, for sanitizers. */
#include "tests/ops/ops.h"

#include "kernels/half.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

enum { GUARD = 512 };

double rnd(ctx *c, double lo, double hi)
{
    /* splitmix64 */
    uint64_t z = c->rng += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return lo + (hi - lo) * (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

void fail(ctx *c, const char *fmt, ...)
{
    va_list ap;
    if (c->why[0]) return;
    va_start(ap, fmt);
    vsnprintf(c->why, sizeof c->why, fmt, ap);
    va_end(ap);
}

bool live(const ctx *c)
{
    return c->ran && !c->bench && !c->counts && !c->why[0];
}

double bar_of(ql_dtype t, double f32)
{
    return t == QL_F32 ? f32 : t == QL_F16 ? 2e-3 : 1e-2;
}

static void must(bool ok, const char *what)
{
    if (ok) return;
    fprintf(stderr, "%s: %s\n", what, ql_error());
    exit(100);
}

/* ---- tensors ------------------------------------------------------------------------------------
 */

static void put(unsigned char *p, ql_dtype t, double x)
{
    int32_t i = (int32_t)x;
    int64_t l = (int64_t)x;
    if (ql_dtype_float(t))
        ql_float_put(p, t, 0, (float)x);
    else if (t == QL_I32)
        memcpy(p, &i, 4);
    else if (t == QL_I64)
        memcpy(p, &l, 8);
    else
        *p = (unsigned char)i;
}

static double get(const unsigned char *p, ql_dtype t)
{
    int32_t i;
    int64_t l;
    if (ql_dtype_float(t)) return (double)ql_float_get(p, t, 0);
    if (t == QL_I32) return memcpy(&i, p, 4), (double)i;
    if (t == QL_I64) return memcpy(&l, p, 8), (double)l;
    return *p;
}

static unsigned char *element(const tens *t, unsigned char *block, int64_t i, int64_t j)
{
    return block + t->start + (i * t->t.ld + j) * (int64_t)ql_dtype_size(t->t.dtype);
}

double *doubles(ctx *c, int64_t n)
{
    must(c->n < (int)(sizeof c->t / sizeof *c->t), "too many tensors in a case");
    tens *t = &c->t[c->n++];
    *t = (tens){.role = IN, .v = calloc((size_t)n + 1, sizeof(double))};
    must(t->v != NULL, "memory");
    return t->v;
}

tens *make(ctx *c, const char *name, role r, ql_dtype dt, int64_t rows, int64_t cols, int64_t pad)
{
    int64_t size = (int64_t)ql_dtype_size(dt), ld = cols + pad, n = rows * cols;
    double *v = doubles(c, n);
    tens *t = &c->t[c->n - 1];
    t->name = name, t->role = r, t->v = v;
    t->got = calloc((size_t)n + 1, sizeof(double));
    t->start = GUARD + c->shift;
    t->bytes = ql_round_up(t->start + rows * ld * size + GUARD, 16);
    t->before = malloc((size_t)t->bytes), t->after = malloc((size_t)t->bytes);
    must(t->got && t->before && t->after, "memory");
    /* Guards, gaps and outputs are NaN in every float dtype. */
    for (int64_t i = 0; i < t->bytes; i += 2) t->before[i] = 0xC5, t->before[i + 1] = 0xFF;
    if (c->b->dev->alloc(c->dev, t->bytes, &t->block) != QL_OK) must(false, name);
    t->t = ql_mat((char *)t->block + t->start, dt, rows, cols, ld);
    for (int64_t i = 0; i < n; i++) t->v[i] = rnd(c, -1, 1);
    return t;
}

static void release(ctx *c)
{
    for (int i = 0; i < c->n; i++) {
        tens *t = &c->t[i];
        if (t->block) c->b->dev->free(c->dev, t->block);
        free(t->v), free(t->got), free(t->before), free(t->after);
    }
    c->n = 0;
}

/* ---- running ------------------------------------------------------------------------------------
 */

ql_status run_start(ctx *c)
{
    for (int i = 0; i < c->n; i++) {
        tens *t = &c->t[i];
        if (!t->block) continue;
        for (int64_t x = 0; t->role != OUT && x < t->t.rows; x++)
            for (int64_t y = 0; y < t->t.cols; y++) {
                unsigned char *p = element(t, t->before, x, y);
                put(p, t->t.dtype, t->v[x * t->t.cols + y]);
                t->v[x * t->t.cols + y] = get(p, t->t.dtype);
            }
        QL_TRY(c->b->dev->copy(c->q.stream, t->block, t->before, t->bytes));
    }
    QL_TRY(c->b->dev->sync(c->q.stream));
    c->ran = false;
    c->ms = -1;
    return c->b->dev->record(c->q.stream, c->e0);
}

/* A test runs once. A bench runs once to warm up, then until 0.2 s have gone by, and keeps the best
 * of ten runs' mean. */
bool run_again(ctx *c)
{
    enum { REPS = 10 };
    static int left;
    static double best, spent;
    if (!c->bench) return c->ran ? false : (c->ran = true);
    if (!c->ran) {
        c->ran = true, left = 0, best = 1e30, spent = 0;
        return true;
    }
    if (left-- > 0) return true;
    double ms = 0;
    const ql_dev_table *d = c->b->dev;
    if (d->record(c->q.stream, c->e1) || d->sync(c->q.stream) || d->elapsed(c->e0, c->e1, &ms))
        return false;
    spent += ms;
    if (left == -1 && best < 1e29 && ms / REPS < best) best = ms / REPS;
    if (best > 1e29) best = 1e28; /* that was the warm-up */
    c->ms = best < 1e27 ? best : -1;
    if (c->ms >= 0 && spent > 200) return false;
    left = REPS - 1;
    return d->record(c->q.stream, c->e0) == QL_OK;
}

static void check_guards(ctx *c, tens *t)
{
    int64_t row = t->t.ld * (int64_t)ql_dtype_size(t->t.dtype),
            used = t->t.cols * (int64_t)ql_dtype_size(t->t.dtype);
    for (int64_t i = 0; i < t->bytes; i++) {
        int64_t at = i - t->start;
        bool inside = at >= 0 && at < t->t.rows * row && (row == 0 || at % row < used);
        if (t->before[i] != t->after[i] && !(inside && t->role != IN)) {
            fail(c, "%s: byte %lld %s was written", t->name, (long long)at,
                 inside ? "of an input" : "outside the tensor");
            return;
        }
    }
}

void run_end(ctx *c, ql_status s)
{
    if (s == QL_OK) s = c->b->dev->sync(c->q.stream);
    for (int i = 0; i < c->n && s == QL_OK && !c->bench && !c->counts; i++) {
        tens *t = &c->t[i];
        if (!t->block) continue;
        s = c->b->dev->copy(c->q.stream, t->after, t->block, t->bytes);
        if (s == QL_OK) s = c->b->dev->sync(c->q.stream);
        if (s != QL_OK) break;
        check_guards(c, t);
        for (int64_t x = 0; x < t->t.rows; x++)
            for (int64_t y = 0; y < t->t.cols; y++) {
                unsigned char *p = element(t, t->after, x, y);
                t->got[x * t->t.cols + y] = get(p, t->t.dtype);
                for (size_t k = 0; t->role != IN && k < ql_dtype_size(t->t.dtype); k++)
                    c->hash = (c->hash ^ p[k]) * 0x100000001B3u;
            }
    }
    if (s != QL_OK) fail(c, "%s: %s", ql_status_name(s), ql_error());
    ql_error_clear();
}

/* ---- expectations -------------------------------------------------------------------------------
 */

static bool untouched(ctx *c, const tens *t, int64_t i)
{
    int64_t x = i / t->t.cols, y = i % t->t.cols;
    if (memcmp(element(t, t->before, x, y), element(t, t->after, x, y),
               ql_dtype_size(t->t.dtype)) == 0)
        return true;
    fail(c, "%s[%lld][%lld] was written: %g", t->name, (long long)x, (long long)y, t->got[i]);
    return false;
}

void expect(ctx *c, const tens *t, const double *ref, double bar)
{
    double err = 0, norm = 0;
    if (!live(c)) return;
    for (int64_t i = 0; i < t->t.rows * t->t.cols; i++) {
        if (isnan(ref[i])) {
            if (!untouched(c, t, i)) return;
            continue;
        }
        if (isnan(t->got[i]) || ((isinf(ref[i]) || isinf(t->got[i])) && ref[i] != t->got[i])) {
            fail(c, "%s[%lld][%lld] is %g, expected %g", t->name, (long long)(i / t->t.cols),
                 (long long)(i % t->t.cols), t->got[i], ref[i]);
            return;
        }
        if (isinf(ref[i])) continue;
        err += (t->got[i] - ref[i]) * (t->got[i] - ref[i]);
        norm += ref[i] * ref[i];
    }
    err = norm > 0 ? sqrt(err / norm) : sqrt(err);
    if (!(err <= bar)) fail(c, "%s is off by %.3g, allowed is %.3g", t->name, err, bar);
}

void expect_exact(ctx *c, const tens *t, const double *ref)
{
    if (!live(c)) return;
    for (int64_t i = 0; i < t->t.rows * t->t.cols; i++) {
        if (isnan(ref[i])) {
            if (!untouched(c, t, i)) return;
        } else if (t->got[i] != ref[i] || signbit(t->got[i]) != signbit(ref[i])) {
            fail(c, "%s[%lld][%lld] is %.9g, expected exactly %.9g", t->name,
                 (long long)(i / t->t.cols), (long long)(i % t->t.cols), t->got[i], ref[i]);
            return;
        }
    }
}

/* ---- the table ----------------------------------------------------------------------------------
 */

static void case_name(char *s, size_t size, const ctx *c, const op_case *p)
{
    static const char *const types[] = {"f32", "f16", "bf16"};
    snprintf(s, size, "%s.%s.%s%s%s.%lldx%lldx%lld.%d%s", c->b->name, p->name, types[p->a],
             p->b != p->a ? "-" : "", p->b != p->a ? types[p->b] : "", (long long)p->m,
             (long long)p->n, (long long)p->k, p->how, p->pad ? ".ld" : "");
}

static void run_case(ctx *c, const op_case *p, int64_t shift)
{
    c->shift = shift, c->rng = 42, c->hash = 0xCBF29CE484222325u, c->ran = false, c->flops = 0;
    p->run(c, p);
}

/* Three runs, one hash. Before compute capability 8.0 the right answer to a bfloat16 product is no. */
static bool test_case(ctx *c, const op_case *p, const char *name)
{
    const int64_t shifts[3] = {0, 0, strcmp(c->b->name, "cpu") == 0 ? 8 : 16};
    uint64_t hash = 0;
    c->why[0] = 0;
    for (int i = 0; i < (c->once ? 1 : 3) && !c->why[0]; i++) {
        run_case(c, p, shifts[i]);
        release(c);
        if (i > 0 && c->hash != hash)
            fail(c, i == 1 ? "two runs differ" : "another address gives other bits");
        hash = c->hash;
    }
    bool refused = strstr(c->why, "a bfloat16 matmul needs compute capability 8.0") != NULL;
    if (!c->bf16 && strcmp(p->name, "matmul") == 0 && p->a == QL_BF16) {
        if (!refused) fail(c, "bfloat16 is not refused, though this device has none");
        if (refused) c->why[0] = 0;
    }
    if (c->why[0])
        printf("not ok %s: %s\n", name, c->why);
    else
        printf("ok %s\n", name);
    fflush(stdout);
    return !c->why[0];
}

static bool bench_case(ctx *c, const op_case *p, const char *name)
{
    double bytes = 0;
    c->why[0] = 0;
    run_case(c, p, 0);
    for (int i = 0; i < c->n; i++)
        if (c->t[i].block)
            bytes += (double)(c->t[i].t.rows * c->t[i].t.cols) *
                     (double)ql_dtype_size(c->t[i].t.dtype) * (c->t[i].role == INOUT ? 2 : 1);
    release(c);
    if (c->why[0] || c->ms <= 0) {
        printf("not ok %s: %s\n", name, c->why[0] ? c->why : "not timed");
        return false;
    }
    printf("%-52s %10.3f ms %9.2f GB/s", name, c->ms, bytes / c->ms * 1e-6);
    if (c->flops > 0) printf(" %9.3f TFLOP/s", c->flops / c->ms * 1e-9);
    putchar('\n');
    fflush(stdout);
    return true;
}

typedef struct {
    bool bench, once;
    const char *only, *without;
} options;

static int run_backend(const ql_backend *b, const options *o)
{
    bool bench = o->bench;
    ctx c = {.b = b, .bench = bench, .once = o->once, .counts = strcmp(b->name, "null") == 0};
    ql_dev_info info;
    char name[160];
    int failed = 0, gpu = strcmp(b->name, "cuda") == 0;
    must(b->dev->open(0, &c.dev) == QL_OK, "open device 0");
    must(b->dev->info(c.dev, &info) == QL_OK, "info");
    c.bf16 = info.bf16;
    must(b->dev->stream_open(c.dev, &c.q.stream) == QL_OK, "stream");
    must(b->dev->event_open(c.dev, &c.e0) == QL_OK && b->dev->event_open(c.dev, &c.e1) == QL_OK,
         "event");
    must(b->dev->alloc(c.dev, QL_WORK_BYTES, &c.q.work) == QL_OK, "workspace");
    c.q.ops = b->ops;
    for (int i = 0; i < op_case_count; i++) {
        const op_case *p = &op_cases[i];
        case_name(name, sizeof name, &c, p);
        if (p->bench != (bench ? 1 + gpu : 0) || (o->only && !strstr(name, o->only)) || (o->without && strstr(name, o->without))) continue;
        failed += bench ? !bench_case(&c, p, name) : !test_case(&c, p, name);
    }
    if (!bench && !o->only && !c.counts) failed += test_errors(&c);
    b->dev->free(c.dev, c.q.work);
    b->dev->event_close(c.e0), b->dev->event_close(c.e1);
    b->dev->stream_close(c.q.stream);
    b->dev->close(c.dev);
    return failed;
}

int main(int argc, char **argv)
{
    options o = {0};
    const char *names[8];
    const ql_backend *b;
    int n = 0, failed = 0;
    test_start(argv);
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--bench") == 0)
            o.bench = true;
        else if (strcmp(argv[i], "--once") == 0)
            o.once = true;
        else if (n < 8 &&
                 (!strcmp(argv[i], "cpu") || !strcmp(argv[i], "cuda") || !strcmp(argv[i], "null")))
            names[n++] = argv[i];
        else if (strncmp(argv[i], "not:", 4) == 0)
            o.without = argv[i] + 4;
        else
            o.only = argv[i];
    }
    if (n == 0)
        for (; test_default[n]; n++) names[n] = test_default[n];
    if (!o.bench && !o.only && !o.once) failed += test_gradients();
    for (int i = 0; i < n; i++) {
        if (test_backend(names[i], &b) == QL_OK) {
            failed += run_backend(b, &o);
        } else {
            /* Asked for by name: a backend that is not there is a failure, not a skip. */
            printf("not ok %s: %s\n", names[i], ql_error());
            ql_error_clear();
            failed++;
        }
    }
    return failed > 99 ? 99 : failed;
}
