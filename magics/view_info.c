/* What `info` says: devices, how they are joined, the host, what is missing. */
#include "magics/view.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NONE ((double)NAN)

static const char *bytes_or_dash(double v, ql_short *s)
{
    *s = ql_fmt_bytes(v);
    return isfinite(v) ? s->s : "-";
}

/* ---- devices ------------------------------------------------------------------------------------ */

static int any_pcie(const json_t *devices)
{
    for (size_t i = 0; i < json_array_size(devices); i++)
        if (json_object_get(json_array_get(devices, i), "pcie")) return 1;
    return 0;
}

/* The slot's generation, not the present one: a GPU at rest slows its link down. */
static void pcie_cell(ql_table *t, const json_t *p)
{
    int64_t gen = ql_jint(p, "max_generation", 0), width = ql_jint(p, "width", 0), most = ql_jint(p, "max_width", 0);
    if (gen <= 0 || width <= 0)
        ql_table_cell(t, "%s", "");
    else if (most > width)
        ql_table_cell(t, "%lld.0 x%lld of x%lld", (long long)gen, (long long)width, (long long)most);
    else
        ql_table_cell(t, "%lld.0 x%lld", (long long)gen, (long long)width);
}

static void devices_table(ql_view *v, const json_t *devices)
{
    ql_buf names = {0};
    ql_table t;
    size_t i;
    const json_t *d;
    ql_short total, left;
    int pcie = any_pcie(devices);
    ql_table_begin(&t, pcie ? ">|device|arch|memory>|free>|PCIe|id" : ">|device|arch|memory>|free>|id", &names);
    json_array_foreach((json_t *)devices, i, d)
    {
        ql_table_cell(&t, "%zu", i);
        ql_table_cell(&t, "%s", ql_jstr(d, "name", "?"));
        if (ql_jint(d, "arch", 0) > 0)
            ql_table_cell(&t, "sm_%d", (int)ql_jint(d, "arch", 0));
        else
            ql_table_cell(&t, "%s", ql_jstr(d, "arch", ql_jstr(d, "backend", "")));
        ql_table_cell(&t, "%s", bytes_or_dash(ql_jnum(d, "total", NONE), &total));
        ql_table_cell(&t, "%s", bytes_or_dash(ql_jnum(d, "free", NONE), &left));
        if (pcie) pcie_cell(&t, json_object_get(d, "pcie"));
        ql_table_cell(&t, "%.20s", ql_jstr(d, "id", ""));
    }
    ql_table_end(v, &t);
    ql_buf_free(&names);
}

/* ---- links: pairs that are joined alike are one row --------------------------------------------- */

static void way_words(const json_t *link, ql_buf *b)
{
    int64_t n = ql_jint(link, "nvlinks", 0);
    double each = ql_jnum(link, "nvlink_gbs", 0);
    const char *path = ql_jstr(link, "path", "");
    ql_buf_clear(b);
    if (n > 0) {
        ql_buf_printf(b, "NVLink × %lld", (long long)n);
        if (each > 0) ql_buf_printf(b, ", %.0f GB/s each way", each * (double)n);
    } else {
        ql_buf_printf(b, "PCIe%s%s", *path ? " through " : "", path);
    }
}

static void access_words(const json_t *link, ql_buf *b)
{
    const char *why = ql_jstr(link, "why", "");
    int yes = json_is_true(json_object_get(link, "p2p"));
    ql_buf_clear(b);
    ql_buf_printf(b, "%s%s%s", yes ? "yes" : "no", *why ? ": " : "", why);
}

static int alike(const json_t *a, const json_t *b)
{
    static const char *const keys[] = {"path", "nvlinks", "nvlink_gbs", "p2p", "why"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (!json_equal(json_object_get(a, keys[i]), json_object_get(b, keys[i]))) return 0;
    return 1;
}

typedef struct {
    const json_t *link;
    long long from, to;
    int shown;
} joint;

static joint *joints(const json_t *devices, size_t *n)
{
    size_t count = json_array_size(devices), i, k;
    joint *all = calloc(count * count + 1, sizeof *all);
    const json_t *d, *l;
    *n = 0;
    if (!all) return NULL;
    json_array_foreach((json_t *)devices, i, d)
    {
        json_array_foreach(json_object_get(d, "links"), k, l) if (*n < count * count)
        {
            joint *j = &all[(*n)++];
            *j = (joint){l, (long long)ql_jint(d, "index", (int64_t)i), (long long)ql_jint(l, "to", 0), 0};
        }
    }
    return all;
}

static void links_table(ql_view *v, const json_t *devices)
{
    size_t n = 0;
    joint *all = joints(devices, &n);
    ql_buf names = {0}, pairs = {0}, way = {0}, access = {0};
    ql_table t;
    ql_table_begin(&t, "between|joined by|peer access", &names);
    for (size_t i = 0; i < n; i++) {
        size_t same = 0;
        if (all[i].shown) continue;
        ql_buf_clear(&pairs);
        for (size_t k = i; k < n; k++) {
            if (!alike(all[i].link, all[k].link)) continue;
            ql_buf_printf(&pairs, "%s%lld–%lld", same++ ? ", " : "", all[k].from, all[k].to);
            all[k].shown = 1;
        }
        way_words(all[i].link, &way);
        access_words(all[i].link, &access);
        if (same == n && n > 1)
            ql_table_cell(&t, "all %zu pairs", n);
        else
            ql_table_cell(&t, "%s", ql_buf_str(&pairs));
        ql_table_cell(&t, "%s", ql_buf_str(&way));
        ql_table_cell(&t, "%s", ql_buf_str(&access));
    }
    if (n > 0) ql_table_end(v, &t);
    ql_buf_free(&names);
    ql_buf_free(&pairs);
    ql_buf_free(&way);
    ql_buf_free(&access);
    free(all);
}

/* ---- the host ------------------------------------------------------------------------------------ */

/* What the devices' backends say of driver and libraries: the first GPU speaks for all. */
static void backend_rows(ql_table *t, const json_t *devices)
{
    const char *seen[2] = {"", ""};
    for (size_t i = 0; i < json_array_size(devices); i++) {
        const json_t *d = json_array_get(devices, i);
        const char *backend = ql_jstr(d, "backend", ""), *driver = ql_jstr(d, "driver", ""), *libs = ql_jstr(d, "libs", "");
        if (strcmp(backend, seen[0]) == 0 || strcmp(backend, seen[1]) == 0 || !*libs) continue;
        seen[*seen[0] ? 1 : 0] = backend;
        ql_table_cell(t, "%s", strcmp(backend, "cpu") == 0 ? "CPU backend" : "CUDA backend");
        ql_table_cell(t, "%s%s%s%s", *driver ? "driver " : "", driver, *driver ? " · " : "", libs);
    }
}

static void library_rows(ql_table *t, const json_t *libraries)
{
    ql_buf there = {0}, missing = {0};
    const char *key;
    const json_t *version;
    json_object_foreach((json_t *)libraries, key, version)
    {
        if (json_is_string(version))
            ql_buf_printf(&there, "%s%s %s", there.len ? ", " : "", key, json_string_value(version));
        else
            ql_buf_printf(&missing, "%s%s", missing.len ? ", " : "", key);
    }
    if (there.len) {
        ql_table_cell(t, "libraries");
        ql_table_cell(t, "%s", ql_buf_str(&there));
    }
    if (missing.len) {
        ql_table_cell(t, "not there");
        ql_table_cell(t, "%s; nothing here needs them", ql_buf_str(&missing));
    }
    ql_buf_free(&there);
    ql_buf_free(&missing);
}

static void host_table(ql_view *v, const json_t *info)
{
    const json_t *memory = json_object_get(info, "memory"), *disk;
    ql_buf names = {0};
    ql_table t;
    size_t i;
    double limit = ql_jnum(memory, "limit", NONE);
    ql_table_begin(&t, "|", &names);
    ql_table_cell(&t, "processor");
    ql_table_cell(&t, "%s, %lld threads", ql_jstr(info, "cpu", "CPU"), (long long)ql_jint(info, "cores", 0));
    ql_table_cell(&t, "memory");
    ql_table_cell(&t, "%s free of %s%s%s", ql_fmt_bytes(ql_jnum(memory, "available", 0)).s, ql_fmt_bytes(ql_jnum(memory, "total", 0)).s,
                  isfinite(limit) ? "; this container may use " : "", isfinite(limit) ? ql_fmt_bytes(limit).s : "");
    json_array_foreach(json_object_get(info, "disks"), i, disk)
    {
        if (!json_is_object(disk)) continue;
        ql_table_cell(&t, "%s", ql_jstr(disk, "name", ""));
        ql_table_cell(&t, "%s free of %s", ql_fmt_bytes(ql_jnum(disk, "free", 0)).s, ql_fmt_bytes(ql_jnum(disk, "total", 0)).s);
    }
    backend_rows(&t, json_object_get(info, "devices"));
    library_rows(&t, json_object_get(info, "libraries"));
    ql_table_cell(&t, "engine");
    ql_table_cell(&t, "%s", ql_jstr(info, "engine", ""));
    ql_table_end(v, &t);
    ql_buf_free(&names);
}

/* ---- what is missing, and how to get it ---------------------------------------------------------- */

static void warnings(ql_view *v, const json_t *info)
{
    const json_t *devices = json_object_get(info, "devices"), *text;
    const char *libs = ql_jstr(json_array_get(devices, 0), "libs", "");
    size_t i, gpus = 0;
    json_array_foreach(json_object_get(info, "missing"), i, text) if (json_is_string(text)) ql_view_warn(v, json_string_value(text));
    for (i = 0; i < json_array_size(devices); i++) gpus += strcmp(ql_jstr(json_array_get(devices, i), "backend", ""), "cuda") == 0;
    if (gpus && strstr(libs, "no cuBLAS"))
        ql_view_warn(v, "cuBLAS is missing, and nothing trains on a GPU without it: install the CUDA toolkit's libraries, or pip's nvidia-cublas");
    if (gpus > 1 && strstr(libs, "no NCCL"))
        ql_view_warn(v, "NCCL is missing, so only one GPU can be used: install libnccl2, or pip's nvidia-nccl, or set NCCL_HOME");
    json_array_foreach(json_object_get(info, "disks"), i, text)
        if (gpus > 1 && strcmp(ql_jstr(text, "path", ""), "/dev/shm") == 0 && ql_jnum(text, "free", 0) < (64 << 20))
            ql_view_warn(v, "/dev/shm has less than 64 MiB free, and NCCL needs it between GPUs without peer access: docker run --shm-size=1g");
}

json_t *ql_view_info(const json_t *info)
{
    ql_view v = {0};
    const json_t *devices = json_object_get(info, "devices");
    ql_view_title(&v, "qlora", "%s", ql_jstr(info, "version", ""));
    if (json_array_size(devices) > 0) devices_table(&v, devices);
    links_table(&v, devices);
    host_table(&v, info);
    warnings(&v, info);
    return ql_view_bundle(&v, info);
}
