/* The host as a device: one of them, memory from the heap, streams that run at once. */
#include "kernels/cpu/cpu.h"

#include <cblas.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

struct ql_dev {
    atomic_llong allocated, peak;
};
struct ql_stream {
    ql_dev *dev;
};
struct ql_event {
    struct timespec at;
    bool recorded;
};

/* Every block has its size in front, in a line of its own, so that free can count. */
enum { ALIGN = 256 };

static ql_status cpu_count(int *n)
{
    *n = 1;
    return QL_OK;
}

static ql_status cpu_open(int index, ql_dev **out)
{
    if (index != 0) QL_FAIL(QL_EINVAL, "cpu: there is no device %d: the host is device 0", index);
    ql_dev *d = calloc(1, sizeof *d);
    if (!d) QL_FAIL(QL_ENOMEM, "cpu: no memory for a device");
    /* A sum's order must not depend on the machine's cores: ranks are how more of them are used. */
    openblas_set_num_threads(1);
    *out = d;
    return QL_OK;
}

static void cpu_close(ql_dev *d)
{
    free(d);
}

/* ---- what the machine says ----------------------------------------------------------------------
 */

/* "Intel(R) Xeon(R) Processor": the marks say nothing, and fill a line of a table. */
static void without_marks(char *name)
{
    static const char *const marks[] = {"(R)", "(TM)"};
    for (size_t i = 0; i < sizeof marks / sizeof *marks; i++)
        for (char *p; (p = strstr(name, marks[i]));) memmove(p, p + strlen(marks[i]), strlen(p + strlen(marks[i])) + 1);
}

static ql_status cpu_info(ql_dev *d, ql_dev_info *out)
{
    (void)d;
    ql_dev_info i = {.name = "CPU", .id = "cpu:0", .bf16 = 1};
    char line[256];
    cpu_set_t set;
    FILE *f = fopen("/proc/cpuinfo", "re");
    while (f && fgets(line, sizeof line, f)) {
        char *value = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || !value) continue;
        value[strcspn(value, "\n")] = 0;
        snprintf(i.name, sizeof i.name, "%.90s", value + 2);
        without_marks(i.name);
        break;
    }
    if (f) fclose(f);
    i.sms = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set)
                                                        : (int)sysconf(_SC_NPROCESSORS_ONLN);
    snprintf(i.libs, sizeof i.libs, "%.150s", openblas_get_config());
    ql_host_memory("", &i.total_bytes, &i.free_bytes);
    *out = i;
    return QL_OK;
}

static ql_status cpu_memory(ql_dev *d, ql_dev_memory *out)
{
    /* What is this process' alone: pages of a mapped file are the page cache's. A block that is not touched yet counts all the same. */
    int64_t own = ql_host_number("/proc/self/status", "RssAnon:"), allocated = atomic_load(&d->allocated), total, available;
    ql_host_memory("", &total, &available);
    own = own < 0 ? allocated : ql_max64(own * 1024, allocated);
    *out = (ql_dev_memory){.allocated = allocated,
                           .peak = atomic_load(&d->peak),
                           .process = own,
                           .used = own,
                           .total = total,
                           .temperature_c = -1,
                           .power_w = -1,
                           .utilisation = -1,
                           .clock_mhz = -1};
    return QL_OK;
}

static ql_status cpu_peer(int a, int b, int *out)
{
    *out = a == 0 && b == 0;
    return QL_OK;
}

/* ---- memory -------------------------------------------------------------------------------------
 */

static ql_status cpu_alloc(ql_dev *d, int64_t bytes, void **out)
{
    enum {
        ASK = 64 << 20
    }; /* from here on the machine is asked first: it overcommits, and then kills */
    int64_t total = 0, available = 0;
    if (bytes < 0) QL_FAIL(QL_EINVAL, "cpu: %lld bytes asked", (long long)bytes);
    if (bytes > ASK) ql_host_memory("", &total, &available);
    char *p = NULL;
    if (bytes <= ASK || bytes <= available)
        p = aligned_alloc(ALIGN, (size_t)(ql_round_up(bytes, ALIGN) + ALIGN));
    if (!p) {
        ql_host_memory("", &total, &available);
        QL_FAIL(QL_ENOMEM, "cpu: %lld bytes asked, %lld of %lld are free", (long long)bytes,
                (long long)available, (long long)total);
    }
    memcpy(p, &bytes, sizeof bytes);
    long long now = atomic_fetch_add(&d->allocated, bytes) + bytes, peak = atomic_load(&d->peak);
    while (now > peak && !atomic_compare_exchange_weak(&d->peak, &peak, now)) continue;
    *out = p + ALIGN;
    return QL_OK;
}

static void cpu_free(ql_dev *d, void *p)
{
    int64_t bytes;
    if (!p) return;
    memcpy(&bytes, (char *)p - ALIGN, sizeof bytes);
    atomic_fetch_sub(&d->allocated, bytes);
    free((char *)p - ALIGN);
}

/* Host memory is not the device's: it is not counted. */
static ql_status cpu_host_alloc(ql_dev *d, int64_t bytes, void **out)
{
    (void)d;
    if (bytes < 0) QL_FAIL(QL_EINVAL, "cpu: %lld bytes of host memory asked", (long long)bytes);
    void *p = bytes > INT64_MAX - 2 * ALIGN
                  ? NULL
                  : aligned_alloc(ALIGN, (size_t)ql_round_up(bytes + 1, ALIGN));
    if (!p) QL_FAIL(QL_ENOMEM, "cpu: no %lld bytes of host memory", (long long)bytes);
    *out = p;
    return QL_OK;
}

static void cpu_host_free(ql_dev *d, void *p)
{
    (void)d;
    free(p);
}

/* Nothing moves pages away from this device: memory is as good as pinned. */
static ql_status cpu_pin(ql_dev *d, void *p, int64_t bytes)
{
    (void)d, (void)p, (void)bytes;
    return QL_OK;
}

static void cpu_unpin(ql_dev *d, void *p)
{
    (void)d, (void)p;
}

/* ---- streams and events -------------------------------------------------------------------------
 */

static ql_status cpu_stream_open(ql_dev *d, ql_stream **out)
{
    ql_stream *s = calloc(1, sizeof *s);
    if (!s) QL_FAIL(QL_ENOMEM, "cpu: no memory for a stream");
    s->dev = d;
    *out = s;
    return QL_OK;
}

static void cpu_stream_close(ql_stream *s)
{
    free(s);
}

static ql_status cpu_sync(ql_stream *s)
{
    (void)s;
    return QL_OK;
}

static ql_status cpu_event_open(ql_dev *d, ql_event **out)
{
    (void)d;
    ql_event *e = calloc(1, sizeof *e);
    if (!e) QL_FAIL(QL_ENOMEM, "cpu: no memory for an event");
    *out = e;
    return QL_OK;
}

static void cpu_event_close(ql_event *e)
{
    free(e);
}

static ql_status cpu_record(ql_stream *s, ql_event *e)
{
    (void)s;
    clock_gettime(CLOCK_MONOTONIC, &e->at);
    e->recorded = true;
    return QL_OK;
}

static ql_status cpu_wait(ql_stream *s, ql_event *e)
{
    (void)s, (void)e;
    return QL_OK;
}

static ql_status cpu_done(ql_event *e, int *out)
{
    (void)e;
    *out = 1;
    return QL_OK;
}

static ql_status cpu_elapsed(ql_event *a, ql_event *b, double *ms)
{
    if (!a->recorded || !b->recorded)
        QL_FAIL(QL_EINVAL, "cpu: elapsed: an event was never recorded");
    *ms = (double)(b->at.tv_sec - a->at.tv_sec) * 1e3 +
          (double)(b->at.tv_nsec - a->at.tv_nsec) * 1e-6;
    return QL_OK;
}

static ql_status cpu_copy(ql_stream *s, void *dst, const void *src, int64_t bytes)
{
    (void)s;
    if (bytes < 0) QL_FAIL(QL_EINVAL, "cpu: copy of %lld bytes", (long long)bytes);
    if (bytes > 0) memmove(dst, src, (size_t)bytes);
    return QL_OK;
}

static ql_status cpu_copy2d(ql_stream *s, void *dst, int64_t dst_pitch, const void *src,
                            int64_t src_pitch, int64_t width, int64_t rows)
{
    (void)s;
    if (width < 0 || rows < 0 || (rows > 1 && (dst_pitch < width || src_pitch < width)))
        QL_FAIL(QL_EINVAL, "cpu: copy of %lld rows of %lld bytes, %lld and %lld apart",
                (long long)rows, (long long)width, (long long)src_pitch, (long long)dst_pitch);
    for (int64_t i = 0; i < rows && width > 0; i++)
        memmove((char *)dst + i * dst_pitch, (const char *)src + i * src_pitch, (size_t)width);
    return QL_OK;
}

static ql_status cpu_set(ql_stream *s, void *dst, int byte, int64_t bytes)
{
    (void)s;
    if (bytes < 0) QL_FAIL(QL_EINVAL, "cpu: set of %lld bytes", (long long)bytes);
    if (bytes > 0) memset(dst, byte, (size_t)bytes);
    return QL_OK;
}

const ql_dev_table ql_cpu_dev = {
    .count = cpu_count,
    .open = cpu_open,
    .close = cpu_close,
    .info = cpu_info,
    .memory = cpu_memory,
    .peer = cpu_peer,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .host_alloc = cpu_host_alloc,
    .host_free = cpu_host_free,
    .pin = cpu_pin,
    .unpin = cpu_unpin,
    .stream_open = cpu_stream_open,
    .stream_close = cpu_stream_close,
    .sync = cpu_sync,
    .event_open = cpu_event_open,
    .event_close = cpu_event_close,
    .record = cpu_record,
    .wait = cpu_wait,
    .done = cpu_done,
    .elapsed = cpu_elapsed,
    .copy = cpu_copy,
    .copy2d = cpu_copy2d,
    .set = cpu_set,
};
