#include "core/bench.h"

#include "core/hash.h"
#include "core/nf4.h"
#include "core/train.h"
#include "kernels/half.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MIB ((int64_t)1 << 20)

/* Sizes: large enough to hide launches on a GPU, small enough for a second or two on a CPU. */
typedef struct {
    int64_t copy, link, gather;  /* bytes */
    int64_t n;                   /* matmul: n³ */
    int64_t rows, cols;          /* of the 4-bit weight */
    ql_dtype dtype;
} sizes;

typedef struct decoder decoder;

typedef struct {
    ql_rank_process *p;
    const ql_backend *be;
    ql_dev *dev;
    ql_stream *stream;
    ql_comm *comm;
    ql_queue q;
    void *mem;                   /* device memory for everything below, one thing at a time */
    int64_t mem_bytes;
    char *pinned;
    sizes size;
    double copy_rate;            /* GB/s of a device copy: what the decoder is held against */
    decoder *decoder;
    json_t *rows, *seconds, *weight; /* weight: what another program needs to decode the same one */
    char text[4096];             /* to paste */
    size_t used;
} bench;

/* ---- results ----------------------------------------------------------------------------------- */

static void say(bench *b, const char *fmt, ...) QL_PRINTF(2, 3);
static void say(bench *b, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(b->text + b->used, sizeof b->text - b->used, fmt, args);
    va_end(args);
    if (n > 0) b->used = b->used + (size_t)n < sizeof b->text ? b->used + (size_t)n : sizeof b->text - 1;
}

/* each: every device's figure, NULL where there is one. */
static void row(bench *b, const char *name, double value, const char *unit, double of_peak, const double *each, const char *text)
{
    json_t *o = json_pack("{s:s,s:f,s:s,s:s}", "name", name, "value", value, "unit", unit, "text", text), *list = json_array();
    if (o && of_peak > 0) json_object_set_new(o, "of_peak", json_real(of_peak));
    say(b, "%-24s %10.4g %s", name, value, unit);
    for (int i = 0; each && i < b->p->world; i++) {
        json_array_append_new(list, json_real(each[i]));
        say(b, "%s%.4g", i ? ", " : "  each: ", each[i]);
    }
    if (each) json_object_set(o, "each", list);
    json_decref(list);
    say(b, "%s%s\n", *text ? "  " : "", text);
    json_array_append_new(b->rows, o);
}

static ql_status sync_all(bench *b)
{
    if (b->comm) QL_TRY(b->be->comm->barrier(b->comm, b->stream));
    return b->be->dev->sync(b->stream);
}

/* Every rank's number on every rank. */
static ql_status share(bench *b, double mine, double all[QL_MAX_WORLD])
{
    int64_t w = b->p->world, n = (int64_t)sizeof mine;
    char *x = b->q.work;
    all[0] = mine;
    if (!b->comm) return QL_OK;
    ql_tensor own = ql_vec(x + b->p->rank * n, QL_U8, n);
    QL_TRY(b->be->dev->copy(b->stream, own.data, &mine, n));
    QL_TRY(b->be->comm->all_gather(b->comm, b->stream, ql_vec(x, QL_U8, n * w), own));
    QL_TRY(b->be->dev->copy(b->stream, all, x, n * w));
    return b->be->dev->sync(b->stream);
}

/* A figure of every device: the slowest is the row's value. */
static ql_status rank_row(bench *b, const char *name, double mine, const char *unit, double peak, const char *text)
{
    double all[QL_MAX_WORLD], least;
    QL_TRY(share(b, mine, all));
    least = all[0];
    for (int i = 1; i < b->p->world; i++) least = all[i] < least ? all[i] : least;
    row(b, name, least, unit, peak > 0 ? least / peak : 0, b->p->world > 1 ? all : NULL, text);
    return QL_OK;
}

/* Before each part: a stop that any rank has seen ends all of them here, where nobody waits. */
static ql_status next_part(bench *b, const char *what, int part, int parts)
{
    double all[QL_MAX_WORLD];
    QL_TRY(share(b, b->p->shared->stop ? 1 : 0, all));
    for (int i = 0; i < b->p->world; i++)
        if (all[i] > 0) return QL_ESTOP;
    b->p->shared->rank[b->p->rank].beat++;
    if (b->p->rank == 0)
        QL_TRY(ql_events_emit(b->p->out, "progress", json_pack("{s:s,s:i,s:i}", "what", what, "done", part, "total", parts)));
    return sync_all(b);
}

/* ---- parts ------------------------------------------------------------------------------------- */

typedef ql_status (*work)(bench *b, int k);

/* Seconds of one call: as many as take `least` seconds together, after one that does not count. */
static ql_status time_of(bench *b, work f, double least, double *seconds)
{
    QL_TRY(f(b, 0));
    QL_TRY(sync_all(b));
    for (int n = 1;; n *= 2) {
        double from = ql_now();
        for (int k = 0; k < n; k++) QL_TRY(f(b, k));
        QL_TRY(b->be->dev->sync(b->stream));
        *seconds = (ql_now() - from) / n;
        b->p->shared->rank[b->p->rank].beat++;
        /* Collectives inside f: all ranks must make the same number of calls. */
        double all[QL_MAX_WORLD], most = 0;
        QL_TRY(share(b, *seconds * n, all));
        for (int i = 0; i < b->p->world; i++) most = all[i] > most ? all[i] : most;
        if (most >= least || n >= 1 << 20) return QL_OK;
    }
}

static ql_status do_copy(bench *b, int k)
{
    (void)k;
    return b->be->dev->copy(b->stream, (char *)b->mem + b->size.copy, b->mem, b->size.copy);
}
static ql_status do_up(bench *b, int k)
{
    (void)k;
    return b->be->dev->copy(b->stream, b->mem, b->pinned, b->size.link);
}
static ql_status do_down(bench *b, int k)
{
    (void)k;
    return b->be->dev->copy(b->stream, b->pinned, b->mem, b->size.link);
}
static ql_status do_gather(bench *b, int k)
{
    int64_t n = b->size.gather / b->p->world;
    (void)k;
    return b->be->comm->all_gather(b->comm, b->stream, ql_vec(b->mem, QL_U8, n * b->p->world),
                                   ql_vec((char *)b->mem + b->p->rank * n, QL_U8, n));
}

static ql_status copies(bench *b)
{
    double s, n = (double)b->size.copy;
    QL_TRY(time_of(b, do_copy, 0.3, &s));
    b->copy_rate = 2 * n / s / 1e9;
    return rank_row(b, "device copy", b->copy_rate, "GB/s", 0, "read and written");
}

static ql_status links(bench *b)
{
    double s, n = (double)b->size.link;
    QL_TRY(time_of(b, do_up, 0.3, &s));
    QL_TRY(rank_row(b, "host to device", n / s / 1e9, "GB/s", 0, b->p->world > 1 ? "all at once" : ""));
    QL_TRY(time_of(b, do_down, 0.3, &s));
    return rank_row(b, "device to host", n / s / 1e9, "GB/s", 0, b->p->world > 1 ? "all at once" : "");
}

static ql_status gathers(bench *b)
{
    double s, w = b->p->world;
    char text[80];
    if (!b->comm) return QL_OK;
    QL_TRY(time_of(b, do_gather, 0.3, &s));
    snprintf(text, sizeof text, "%lld MiB in %.3f ms, received by each device", (long long)(b->size.gather / MIB), s * 1e3);
    return rank_row(b, "all-gather", (double)b->size.gather * (w - 1) / w / s / 1e9, "GB/s", 0, text);
}

/* ---- matmul under load ------------------------------------------------------------------------- */

static ql_status do_matmul(bench *b, int k)
{
    int64_t n = b->size.n, bytes = n * n * (int64_t)ql_dtype_size(b->size.dtype);
    ql_tensor x = ql_mat(b->mem, b->size.dtype, n, n, n), y = x, z = x;
    (void)k;
    y.data = (char *)b->mem + bytes;
    z.data = (char *)b->mem + 2 * bytes;
    return ql_matmul(&b->q, z, x, y, QL_NT, 1.0f, QL_NONE, QL_NONE);
}

/* Values like a model's: real ones, since zeros draw no power. */
static ql_status fill(bench *b)
{
    int64_t n = b->size.n * b->size.n, es = (int64_t)ql_dtype_size(b->size.dtype), half = ql_min64(n, 1 << 20);
    char *host = malloc((size_t)(half * es));
    uint32_t u = 1;
    ql_status st = QL_OK;
    if (!host) QL_FAIL(QL_ENOMEM, "bench: no host memory");
    for (int64_t i = 0; i < half; i++) {
        u = u * 1664525u + 1013904223u;
        ql_float_put(host, b->size.dtype, i, ((float)(u >> 8) / 8388608.0f - 1.0f) * 0.1f);
    }
    for (int64_t at = 0; at < 2 * n && st == QL_OK; at += half)
        st = b->be->dev->copy(b->stream, (char *)b->mem + at * es, host, ql_min64(half, 2 * n - at) * es);
    if (st == QL_OK) st = b->be->dev->sync(b->stream);
    free(host);
    return st;
}

/* A second of products: how many, and what the device says of itself. */
static ql_status one_second(bench *b, double until, int64_t *done, double *took)
{
    double from = ql_now(), now = from;
    int64_t n = 0;
    while (now < until && !b->p->shared->stop) {
        for (int k = 0; k < 4; k++) QL_TRY(do_matmul(b, k));
        QL_TRY(b->be->dev->sync(b->stream));
        n += 4;
        now = ql_now();
    }
    b->p->shared->rank[b->p->rank].beat++;
    *done = n, *took = now - from;
    return QL_OK;
}

static ql_status loaded(bench *b, int64_t seconds)
{
    double flops = 2.0 * (double)b->size.n * (double)b->size.n * (double)b->size.n, total = 0, spent = 0, first = 0, last = 0;
    char text[200];
    QL_TRY(fill(b));
    QL_TRY(do_matmul(b, 0));
    QL_TRY(sync_all(b));
    double from = ql_now();
    for (int64_t t = 1; t <= seconds && !b->p->shared->stop; t++) {
        int64_t n;
        double took;
        ql_dev_memory m;
        QL_TRY(one_second(b, from + (double)t, &n, &took));
        if (!n) continue;
        QL_TRY(b->be->dev->memory(b->dev, &m));
        double rate = (double)n * flops / took / 1e12;
        if (first == 0) first = rate;
        last = rate, total += (double)n, spent += took;
        json_array_append_new(b->seconds, json_pack("{s:I,s:f,s:i,s:i,s:i}", "t", (json_int_t)t, "tflops", rate, "clock", m.clock_mhz, "power",
                                                    m.power_w, "temperature", m.temperature_c));
        if (b->p->rank == 0)
            QL_TRY(ql_events_emit(b->p->out, "progress", json_pack("{s:s,s:I,s:I}", "what", "matmul", "done", (json_int_t)t, "total",
                                                                   (json_int_t)seconds)));
    }
    snprintf(text, sizeof text, "%s %lld × %lld × %lld for %lld s: %.4g in the first second, %.4g in the last", ql_dtype_name(b->size.dtype),
             (long long)b->size.n, (long long)b->size.n, (long long)b->size.n, (long long)seconds, first, last);
    return rank_row(b, "matmul", spent > 0 ? total * flops / spent / 1e12 : 0, "TFLOP/s", 0, text);
}

/* ---- the 4-bit decoder ------------------------------------------------------------------------- */

/* A random weight with nested scales, on the host and on the device. */
struct decoder {
    ql_weight w;
    uint8_t *packed, *codes;
    float *nested, map[256], *absmax;
    uint16_t *want, *got;
    ql_nf4 fused, plain;   /* one kernel; scales decoded beforehand */
    ql_tensor out, wide;   /* F16; F32 */
};

static void decoder_free(decoder *d)
{
    free(d->packed);
    free(d->codes);
    free(d->nested);
    free(d->absmax);
    free(d->want);
    free(d->got);
}

static ql_status decoder_make(const bench *b, decoder *d)
{
    int64_t n = b->size.rows * b->size.cols, blocks = n / QL_NF4_BLOCK, groups = blocks / QL_NESTED_BLOCK;
    uint32_t u = 7;
    d->packed = malloc((size_t)(n / 2));
    d->codes = malloc((size_t)blocks);
    d->nested = malloc((size_t)groups * 4);
    d->absmax = malloc((size_t)blocks * 4);
    d->want = malloc((size_t)n * 2);
    d->got = malloc((size_t)n * 2);
    if (!d->packed || !d->codes || !d->nested || !d->absmax || !d->want || !d->got) QL_FAIL(QL_ENOMEM, "bench: no host memory");
    for (int64_t i = 0; i < n / 2; i++) d->packed[i] = (uint8_t)((u = u * 1664525u + 1013904223u) >> 24);
    for (int64_t i = 0; i < blocks; i++) d->codes[i] = (uint8_t)((u = u * 1664525u + 1013904223u) >> 24);
    for (int64_t i = 0; i < groups; i++) d->nested[i] = 0.01f + (float)((u = u * 1664525u + 1013904223u) >> 8) * 1e-9f;
    ql_dynamic_map_signed(d->map);
    d->w = (ql_weight){.name = "bench", .rows = b->size.rows, .cols = b->size.cols, .kind = QL_NF4, .dtype = QL_F16, .data = d->packed,
                       .bytes = n / 2, .block = QL_NF4_BLOCK, .blocks = blocks, .absmax = d->codes, .nested_block = QL_NESTED_BLOCK,
                       .nested_absmax = d->nested, .nested_map = d->map, .nested_offset = 0.03f};
    memcpy(d->w.quant_map, ql_nf4_map, sizeof d->w.quant_map);
    ql_weight_absmax(&d->w, d->absmax);
    ql_weight_read(&d->w, d->absmax, 0, n, d->want, QL_F16);
    return QL_OK;
}

static ql_status decoder_place(bench *b, decoder *d)
{
    int64_t n = b->size.rows * b->size.cols, blocks = n / QL_NF4_BLOCK, groups = blocks / QL_NESTED_BLOCK;
    char *at = b->mem;
    const struct {
        const void *data;
        int64_t bytes;
    } put[] = {{d->packed, n / 2}, {d->codes, blocks}, {d->nested, groups * 4}, {ql_nf4_map, 64}, {d->map, 1024}, {d->absmax, blocks * 4}};
    char *place[6];
    for (int i = 0; i < 6; i++) {
        place[i] = at;
        QL_TRY(b->be->dev->copy(b->stream, at, put[i].data, put[i].bytes));
        at += ql_round_up(put[i].bytes, 256);
    }
    d->fused = (ql_nf4){.rows = b->size.rows, .cols = b->size.cols, .part = n, .parts = 1, .block = QL_NF4_BLOCK, .block2 = QL_NESTED_BLOCK,
                        .code = (float *)(void *)place[3], .code2 = (float *)(void *)place[4], .offset = d->w.nested_offset, .state = QL_F16};
    d->fused.packed[0] = (uint8_t *)place[0];
    d->fused.absmax[0] = place[1];
    d->fused.absmax2[0] = (float *)(void *)place[2];
    d->plain = d->fused;
    d->plain.block2 = 0, d->plain.state = QL_F32;
    d->plain.absmax[0] = place[5];
    d->plain.absmax2[0] = NULL;
    d->out = ql_mat(at, QL_F16, b->size.rows, b->size.cols, b->size.cols);
    d->wide = ql_mat(at + n * 2, QL_F32, b->size.rows, b->size.cols, b->size.cols);
    return b->be->dev->sync(b->stream);
}

static ql_status do_fused(bench *b, int k)
{
    (void)k;
    return ql_nf4_dequant(&b->q, &b->decoder->out, &b->decoder->fused, 1);
}
/* What a decoder without fusion does at best: scales are values already, values become fp32 in memory, then 16-bit. */
static ql_status do_naive(bench *b, int k)
{
    (void)k;
    QL_TRY(ql_nf4_dequant(&b->q, &b->decoder->wide, &b->decoder->plain, 1));
    return ql_convert(&b->q, b->decoder->out, b->decoder->wide);
}

static ql_status same_bits(bench *b, decoder *d, int64_t *differ)
{
    int64_t n = b->size.rows * b->size.cols;
    QL_TRY(b->be->dev->copy(b->stream, d->got, d->out.data, n * 2));
    QL_TRY(b->be->dev->sync(b->stream));
    *differ = 0;
    for (int64_t i = 0; i < n; i++) *differ += d->got[i] != d->want[i];
    return QL_OK;
}

static ql_status decoders(bench *b)
{
    decoder d = {0};
    int64_t n = b->size.rows * b->size.cols, moved = n / 2 + n / QL_NF4_BLOCK + n / QL_NF4_BLOCK / 64 + n * 2, wrong_one, wrong_two;
    double one, two;
    char text[200];
    ql_status st = QL_OK;
    QL_GO(decoder_make(b, &d));
    QL_GO(decoder_place(b, &d));
    b->decoder = &d;
    QL_GO(time_of(b, do_fused, 0.3, &one));
    QL_GO(same_bits(b, &d, &wrong_one));
    QL_GO(time_of(b, do_naive, 0.3, &two));
    QL_GO(same_bits(b, &d, &wrong_two));
    snprintf(text, sizeof text, "%lld × %lld in %.3f ms; %s", (long long)b->size.rows, (long long)b->size.cols, one * 1e3,
             wrong_one ? "NOT the host's bits" : "same bits as the host's decoder");
    QL_GO(rank_row(b, "NF4 in one kernel", (double)moved / one / 1e9, "GB/s", b->copy_rate, text));
    snprintf(text, sizeof text, "%.3f ms: scales decoded beforehand, fp32 in memory, then a cast; %s", two * 1e3,
             wrong_two ? "NOT the host's bits" : "same bits");
    QL_GO(rank_row(b, "NF4 naive", (double)moved / two / 1e9, "GB/s", b->copy_rate, text));
    b->weight = json_pack("{s:I,s:I,s:I,s:I,s:f}", "rows", (json_int_t)b->size.rows, "cols", (json_int_t)b->size.cols, "bytes", (json_int_t)moved,
                          "crc32", (json_int_t)ql_crc32(d.want, (size_t)n * 2), "copy", b->copy_rate);
    QL_GO(rank_row(b, "one kernel over naive", two / one, "times", 0, ""));
    if (wrong_one || wrong_two)
        st = ql_fail(QL_EINTERNAL, "bench: the NF4 decoder of %s gives %lld (naive: %lld) of %lld values other bits than the host's", b->be->name,
                     (long long)wrong_one, (long long)wrong_two, (long long)n);
out:
    b->decoder = NULL;
    decoder_free(&d);
    return st;
}

/* ---- all of it --------------------------------------------------------------------------------- */

static void pick_sizes(bench *b, const ql_dev_info *info)
{
    int cpu = info->arch == 0;
    b->size = cpu ? (sizes){64 * MIB, 64 * MIB, 16 * MIB, 512, 1024, 1024, QL_F32}
                  : (sizes){512 * MIB, 256 * MIB, 64 * MIB, info->arch >= 80 ? 8192 : 4096, 4096, 14336, QL_F16};
    int64_t n = b->size.rows * b->size.cols, product = 3 * b->size.n * b->size.n * (int64_t)ql_dtype_size(b->size.dtype);
    b->mem_bytes = ql_max64(ql_max64(2 * b->size.copy, product), n * 7 + 4 * MIB);
}

static ql_status open_all(bench *b, ql_dev_info *info)
{
    const ql_rank_setup *set = &b->p->setup;
    void *p = NULL;
    QL_TRY(b->be->dev->open(set->device, &b->dev));
    QL_TRY(b->be->dev->info(b->dev, info));
    snprintf(b->p->shared->rank[b->p->rank].name, sizeof b->p->shared->rank[0].name, "%s", info->name);
    pick_sizes(b, info);
    QL_TRY(b->be->dev->stream_open(b->dev, &b->stream));
    QL_TRY(b->be->dev->alloc(b->dev, QL_WORK_BYTES, &b->q.work));
    b->q.ops = b->be->ops, b->q.stream = b->stream;
    QL_TRY(b->be->dev->alloc(b->dev, b->mem_bytes, &b->mem));
    QL_TRY(b->be->dev->set(b->stream, b->mem, 1, b->mem_bytes));
    QL_TRY(b->be->dev->host_alloc(b->dev, b->size.link, &p));
    b->pinned = p;
    memset(b->pinned, 1, (size_t)b->size.link);
    if (b->p->world == 1) return QL_OK;
    ql_comm_setup c = {.rank = set->rank, .world = set->world, .shared = set->comm_shared, .shared_bytes = set->comm_bytes,
                       .abort = &set->shared->abort, .timeout_ms = set->timeout_ms};
    return b->be->comm->open(b->dev, &c, &b->comm);
}

static void close_all(bench *b)
{
    const ql_dev_table *dev = b->be->dev;
    if (b->comm) b->be->comm->close(b->comm);
    if (b->pinned) dev->host_free(b->dev, b->pinned);
    if (b->mem) dev->free(b->dev, b->mem);
    if (b->q.work) dev->free(b->dev, b->q.work);
    if (b->stream) dev->stream_close(b->stream);
    if (b->dev) dev->close(b->dev);
}

static void per_second(bench *b)
{
    static const struct {
        const char *key, *name;
    } line[] = {{"tflops", "TFLOP/s"}, {"clock", "MHz"}, {"power", "W"}, {"temperature", "°C"}};
    for (size_t k = 0; k < sizeof line / sizeof *line; k++) {
        const json_t *first = json_object_get(json_array_get(b->seconds, 0), line[k].key);
        if (!first || json_number_value(first) < 0) continue; /* the device does not say */
        say(b, "matmul, each second, %s:", line[k].name);
        for (size_t i = 0; i < json_array_size(b->seconds); i++)
            say(b, " %.4g", json_number_value(json_object_get(json_array_get(b->seconds, i), line[k].key)));
        say(b, "\n");
    }
}

static ql_status run(bench *b, const json_t *command, json_t **out)
{
    const json_t *s = json_object_get(command, "seconds");
    int64_t seconds = ql_max64(1, ql_min64(json_is_integer(s) ? json_integer_value(s) : 10, 3600));
    ql_dev_info info;
    char device[256];
    enum { PARTS = 5 };
    QL_TRY(open_all(b, &info));
    snprintf(device, sizeof device, "%d × %s", b->p->world, info.name);
    say(b, "qlora bench, %s%s%s, %s\n", device, info.driver[0] ? ", driver " : "", info.driver, info.libs);
    QL_TRY(next_part(b, "device copy", 0, PARTS));
    QL_TRY(copies(b));
    QL_TRY(next_part(b, "NF4", 1, PARTS));
    QL_TRY(decoders(b));
    QL_TRY(next_part(b, "host links", 2, PARTS));
    QL_TRY(links(b));
    QL_TRY(next_part(b, "all-gather", 3, PARTS));
    QL_TRY(gathers(b));
    QL_TRY(next_part(b, "matmul", 4, PARTS));
    QL_TRY(loaded(b, seconds));
    QL_TRY(next_part(b, "done", PARTS, PARTS));
    per_second(b);
    *out = json_pack("{s:s,s:s,s:O,s:O,s:O,s:s}", "device", device, "backend", b->be->name, "rows", b->rows, "seconds", b->seconds, "weight",
                     b->weight, "text", b->text);
    return *out ? QL_OK : ql_fail(QL_ENOMEM, "no memory for the result");
}

int ql_bench_main(ql_rank_process *p)
{
    int status = 0;
    for (json_t *c; (c = ql_lines_wait(p->in));) {
        json_t *out = NULL;
        bench b = {.p = p, .be = p->launch->be, .rows = json_array(), .seconds = json_array()};
        ql_status st = run(&b, c, &out);
        close_all(&b);
        json_decref(b.rows);
        json_decref(b.seconds);
        json_decref(b.weight);
        ql_worker_finish(p, c, st, out);
        json_decref(c);
        if (st != QL_OK && st != QL_ESTOP) {
            status = 1;
            break;
        }
    }
    return status;
}
