/* The null device: memory is address space that nobody can touch, so a plan for hundreds of
 * gigabytes runs on any machine, and a stray access of the host is a fault at once. */
#include "kernels/null/null.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

atomic_llong ql_null_calls, ql_null_flops, ql_null_bytes;
static atomic_llong allocated, peak;

/* What ql_null_configure sets: devices of the process. */
static int devices = 8;
static int64_t device_bytes = (int64_t)1 << 40;

typedef struct block {
    struct block *next;
    char *p;
    int64_t bytes;
    size_t mapped;
} block;

struct ql_dev {
    int index;
    int64_t bytes, allocated, peak;
    block *blocks, *host;
};
struct ql_stream {
    ql_dev *dev;
};
struct ql_event {
    struct timespec at;
};
void ql_null_configure(int n, int64_t bytes)
{
    devices = n;
    device_bytes = bytes;
}

ql_null_counts ql_null_take(void)
{
    ql_null_counts c = {.calls = atomic_exchange(&ql_null_calls, 0),
                        .flops = atomic_exchange(&ql_null_flops, 0),
                        .bytes = atomic_exchange(&ql_null_bytes, 0),
                        .allocated = atomic_load(&allocated)};
    /* The peak starts again from what is held. */
    c.peak = atomic_exchange(&peak, c.allocated);
    return c;
}

/* ---- device -------------------------------------------------------------------------------------
 */

static ql_status null_count(int *n)
{
    *n = devices;
    return QL_OK;
}

static ql_status null_open(int index, ql_dev **out)
{
    if (index < 0 || index >= devices)
        QL_FAIL(QL_EINVAL, "null: there is no device %d of %d", index, devices);
    ql_dev *d = calloc(1, sizeof *d);
    if (!d) QL_FAIL(QL_ENOMEM, "null: no memory for a device");
    d->index = index, d->bytes = device_bytes;
    *out = d;
    return QL_OK;
}

static void unlink_block(block **list, const void *p, block *out)
{
    for (block **b = list; *b; b = &(*b)->next) {
        if ((*b)->p != p) continue;
        block *gone = *b;
        *b = gone->next;
        *out = *gone;
        munmap(gone->p, gone->mapped);
        free(gone);
        return;
    }
}

static void null_close(ql_dev *d)
{
    block gone;
    if (!d) return;
    while (d->blocks) unlink_block(&d->blocks, d->blocks->p, &gone);
    while (d->host) unlink_block(&d->host, d->host->p, &gone);
    atomic_fetch_sub(&allocated, d->allocated);
    free(d);
}

static ql_status null_info(ql_dev *d, ql_dev_info *out)
{
    ql_dev_info i = {.name = "null", .arch = 0, .sms = 1, .bf16 = 1, .total_bytes = d->bytes};
    i.free_bytes = d->bytes - d->allocated;
    snprintf(i.id, sizeof i.id, "null:%d", d->index);
    *out = i;
    return QL_OK;
}

static ql_status null_memory(ql_dev *d, ql_dev_memory *out)
{
    *out = (ql_dev_memory){.allocated = d->allocated,
                           .peak = d->peak,
                           .process = d->allocated,
                           .used = d->allocated,
                           .total = d->bytes,
                           .temperature_c = -1,
                           .power_w = -1,
                           .utilisation = -1,
                           .clock_mhz = -1};
    return QL_OK;
}

static ql_status null_peer(int a, int b, int *out)
{
    *out = a >= 0 && b >= 0 && a < devices && b < devices;
    return QL_OK;
}

static ql_status map(block **list, int64_t bytes, int protection, void **out)
{
    block *b = calloc(1, sizeof *b);
    if (!b) QL_FAIL(QL_ENOMEM, "null: no memory for a block");
    b->bytes = bytes, b->mapped = (size_t)bytes + 1;
    b->p = mmap(NULL, b->mapped, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (b->p == MAP_FAILED) {
        free(b);
        QL_FAIL(QL_ENOMEM, "null: the system refuses %lld bytes of address space",
                (long long)bytes);
    }
    b->next = *list;
    *list = b;
    *out = b->p;
    return QL_OK;
}

static ql_status null_alloc(ql_dev *d, int64_t bytes, void **out)
{
    if (bytes < 0) QL_FAIL(QL_EINVAL, "null: %lld bytes asked", (long long)bytes);
    if (bytes > d->bytes - d->allocated)
        QL_FAIL(QL_ENOMEM, "null: %lld bytes asked, %lld of %lld are free", (long long)bytes,
                (long long)(d->bytes - d->allocated), (long long)d->bytes);
    QL_TRY(map(&d->blocks, bytes, PROT_NONE, out));
    d->allocated += bytes;
    d->peak = ql_max64(d->peak, d->allocated);
    long long now = atomic_fetch_add(&allocated, bytes) + bytes, top = atomic_load(&peak);
    while (now > top && !atomic_compare_exchange_weak(&peak, &top, now)) continue;
    return QL_OK;
}

static void null_free(ql_dev *d, void *p)
{
    block gone = {0};
    if (!p) return;
    unlink_block(&d->blocks, p, &gone);
    d->allocated -= gone.bytes;
    atomic_fetch_sub(&allocated, gone.bytes);
}

/* Real memory, but no page of it exists before it is touched. */
static ql_status null_host_alloc(ql_dev *d, int64_t bytes, void **out)
{
    if (bytes < 0) QL_FAIL(QL_EINVAL, "null: %lld bytes of host memory asked", (long long)bytes);
    return map(&d->host, bytes, PROT_READ | PROT_WRITE, out);
}

static void null_host_free(ql_dev *d, void *p)
{
    block gone;
    if (p) unlink_block(&d->host, p, &gone);
}

static ql_status null_pin(ql_dev *d, void *p, int64_t bytes)
{
    (void)d, (void)p, (void)bytes;
    return QL_OK;
}

static void null_unpin(ql_dev *d, void *p)
{
    (void)d, (void)p;
}

static ql_status null_stream_open(ql_dev *d, ql_stream **out)
{
    ql_stream *s = calloc(1, sizeof *s);
    if (!s) QL_FAIL(QL_ENOMEM, "null: no memory for a stream");
    s->dev = d;
    *out = s;
    return QL_OK;
}

static void null_stream_close(ql_stream *s)
{
    free(s);
}

static ql_status null_sync(ql_stream *s)
{
    (void)s;
    return QL_OK;
}

static ql_status null_event_open(ql_dev *d, ql_event **out)
{
    (void)d;
    ql_event *e = calloc(1, sizeof *e);
    if (!e) QL_FAIL(QL_ENOMEM, "null: no memory for an event");
    *out = e;
    return QL_OK;
}

static void null_event_close(ql_event *e)
{
    free(e);
}

static ql_status null_record(ql_stream *s, ql_event *e)
{
    (void)s;
    clock_gettime(CLOCK_MONOTONIC, &e->at);
    return QL_OK;
}

static ql_status null_wait(ql_stream *s, ql_event *e)
{
    (void)s, (void)e;
    return QL_OK;
}

static ql_status null_done(ql_event *e, int *out)
{
    (void)e;
    *out = 1;
    return QL_OK;
}

static ql_status null_elapsed(ql_event *a, ql_event *b, double *ms)
{
    *ms = (double)(b->at.tv_sec - a->at.tv_sec) * 1e3 +
          (double)(b->at.tv_nsec - a->at.tv_nsec) * 1e-6;
    return QL_OK;
}

static bool on_device(const ql_stream *s, const void *p)
{
    uintptr_t at = (uintptr_t)p;
    for (const block *b = s->dev->blocks; b; b = b->next)
        if (at >= (uintptr_t)b->p && at < (uintptr_t)b->p + b->mapped) return true;
    return false;
}

/* What comes from the device is zeros; what goes there is gone. Host to host is a copy. */
static void copy_row(const ql_stream *s, void *dst, const void *src, int64_t bytes)
{
    if (bytes <= 0 || on_device(s, dst)) return;
    if (on_device(s, src))
        memset(dst, 0, (size_t)bytes);
    else
        memmove(dst, src, (size_t)bytes);
}

static ql_status null_copy(ql_stream *s, void *dst, const void *src, int64_t bytes)
{
    if (bytes < 0) QL_FAIL(QL_EINVAL, "null: copy of %lld bytes", (long long)bytes);
    atomic_fetch_add(&ql_null_bytes, bytes);
    copy_row(s, dst, src, bytes);
    return QL_OK;
}

static ql_status null_copy2d(ql_stream *s, void *dst, int64_t dst_pitch, const void *src,
                             int64_t src_pitch, int64_t width, int64_t rows)
{
    if (width < 0 || rows < 0)
        QL_FAIL(QL_EINVAL, "null: copy of %lld rows of %lld bytes", (long long)rows,
                (long long)width);
    atomic_fetch_add(&ql_null_bytes, width * rows);
    for (int64_t i = 0; i < rows; i++)
        copy_row(s, (char *)dst + i * dst_pitch, (const char *)src + i * src_pitch, width);
    return QL_OK;
}

static ql_status null_set(ql_stream *s, void *dst, int byte, int64_t bytes)
{
    if (bytes < 0) QL_FAIL(QL_EINVAL, "null: set of %lld bytes", (long long)bytes);
    atomic_fetch_add(&ql_null_bytes, bytes);
    if (bytes > 0 && !on_device(s, dst)) memset(dst, byte, (size_t)bytes);
    return QL_OK;
}

const ql_dev_table ql_null_dev = {
    .count = null_count,
    .open = null_open,
    .close = null_close,
    .info = null_info,
    .memory = null_memory,
    .peer = null_peer,
    .alloc = null_alloc,
    .free = null_free,
    .host_alloc = null_host_alloc,
    .host_free = null_host_free,
    .pin = null_pin,
    .unpin = null_unpin,
    .stream_open = null_stream_open,
    .stream_close = null_stream_close,
    .sync = null_sync,
    .event_open = null_event_open,
    .event_close = null_event_close,
    .record = null_record,
    .wait = null_wait,
    .done = null_done,
    .elapsed = null_elapsed,
    .copy = null_copy,
    .copy2d = null_copy2d,
    .set = null_set,
};
