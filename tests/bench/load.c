/* load MODEL_FOLDER [cpu|cuda]: loading a model of make_model's onto one device with nothing of it in the page cache, against reading its
 * files once (what `cat` does) with nothing in the page cache. Prints Markdown rows. */
#include "core/devices.h"
#include "core/train.h"
#include "core/rank.h"
#include "core/task.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef ql_status (*visit)(const char *path, void *ctx);

static ql_status each_file(const char *folder, visit f, void *ctx)
{
    DIR *d = opendir(folder);
    char path[4096];
    ql_status st = QL_OK;
    if (!d) QL_FAIL(QL_EIO, "%s: no such folder", folder);
    for (struct dirent *e; st == QL_OK && (e = readdir(d));) {
        size_t n = strlen(e->d_name);
        if (n < 12 || strcmp(e->d_name + n - 12, ".safetensors") != 0) continue;
        snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
        st = f(path, ctx);
    }
    closedir(d);
    return st;
}

typedef struct {
    int64_t bytes, kept; /* kept: pages that stay in the page cache after being dropped, as bytes */
} dropped;

static ql_status drop(const char *path, void *ctx)
{
    dropped *d = ctx;
    struct stat s;
    int fd = open(path, O_RDONLY);
    if (fd < 0 || fstat(fd, &s)) QL_FAIL(QL_EIO, "%s: cannot be opened", path);
    fsync(fd);
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    size_t pages = (size_t)(s.st_size + 4095) / 4096;
    unsigned char *here = malloc(pages + 1);
    void *map = mmap(NULL, (size_t)s.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (here && map != MAP_FAILED && mincore(map, (size_t)s.st_size, here) == 0)
        for (size_t i = 0; i < pages; i++) d->kept += (here[i] & 1) * 4096;
    if (map != MAP_FAILED) munmap(map, (size_t)s.st_size);
    free(here);
    close(fd);
    d->bytes += s.st_size;
    return QL_OK;
}

static ql_status read_through(const char *path, void *ctx)
{
    enum { BLOCK = 128 << 10 }; /* cat's */
    static char buf[BLOCK];
    int64_t *sum = ctx;
    int fd = open(path, O_RDONLY);
    if (fd < 0) QL_FAIL(QL_EIO, "%s: cannot be opened", path);
    posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL); /* as cat */
    for (ssize_t n; (n = read(fd, buf, BLOCK)) > 0;) *sum += n;
    close(fd);
    return QL_OK;
}

static ql_status cold(const char *folder, dropped *d)
{
    memset(d, 0, sizeof *d);
    QL_TRY(each_file(folder, drop, d));
    if (d->kept > d->bytes / 50)
        QL_FAIL(QL_ENOSUP, "%.1f of %.1f GB stay in the page cache: this file system cannot be measured cold", (double)d->kept * 1e-9, (double)d->bytes * 1e-9);
    return QL_OK;
}

static ql_status place(const char *folder, const char *where, ql_task **task, const ql_backend **be, int *device)
{
    char backend[16], missing[512];
    int devices[QL_MAX_WORLD];
    json_t *probe = NULL, *job = json_pack("{s:s,s:s,s:i,s:i}", "model", folder, "devices", strcmp(where, "cuda") == 0 ? "cuda:0" : where,
                                           "max_steps", 1, "max_length", 256);
    ql_job *j = NULL;
    ql_args args;
    ql_task_inputs in = {.job = job, .weights = QL_WEIGHTS_MAPPED};
    QL_TRY(ql_job_from_json(job, &j));
    QL_TRY(ql_args_from_job(j, &args));
    QL_TRY(ql_devices_probe(NULL, &probe, missing, sizeof missing));
    QL_TRY(ql_devices_pick(&args, probe, missing, &in.place, backend, devices));
    QL_TRY(ql_task_open(&in, task));
    *device = devices[0];
    *be = ql_backend_cpu();
    json_decref(probe);
    return strcmp(backend, "cuda") == 0 ? ql_backend_cuda(NULL, be) : QL_OK;
}

static ql_status measure(const char *folder, const char *where)
{
    dropped d;
    int64_t bytes = 0;
    double began, cat, load[2];
    ql_task *t = NULL;
    const ql_backend *be = NULL;
    int device = 0;
    ql_rank *r = NULL;
    QL_TRY(place(folder, where, &t, &be, &device));
    QL_TRY(cold(folder, &d));
    began = ql_now();
    QL_TRY(each_file(folder, read_through, &bytes));
    cat = ql_now() - began;
    printf("| read %.2f GB, page cache cold (cat) | %.2f s | %.2f GB/s | |\n", (double)bytes * 1e-9, cat, (double)bytes * 1e-9 / cat);
    for (int warm = 0; warm < 2; warm++) {
        ql_rank_setup set = {.be = be, .device = device, .world = 1, .shared = calloc(1, sizeof(ql_shared)), .timeout_ms = 10000};
        if (!set.shared) QL_FAIL(QL_ENOMEM, "no memory");
        QL_TRY(ql_rank_open(&set, &t->spec, &r));
        if (!warm) QL_TRY(cold(folder, &d));
        began = ql_now();
        QL_TRY(ql_rank_load(r));
        load[warm] = ql_now() - began;
        ql_rank_close(r);
        free(set.shared);
        printf("| load %s | %.2f s | %.2f GB/s | %s%.0f %% of cat%s |\n", warm ? "page cache warm" : "page cache cold", load[warm], (double)bytes * 1e-9 / load[warm],
               warm ? "(" : "", 100 * cat / load[warm], warm ? ")" : load[0] <= cat / 0.8 ? ", bar 80: met" : ", bar 80: MISSED");
    }
    ql_task_close(t);
    return QL_OK;
}

int main(int argc, char **argv)
{
    const char *dirs = getenv("LD_LIBRARY_PATH");
    if (argc < 2) {
        fprintf(stderr, "usage: load MODEL_FOLDER [cpu|cuda]\n");
        return 2;
    }
    ql_backend_cuda_search(dirs ? dirs : "");
    if (measure(argv[1], argc > 2 ? argv[2] : "cpu") != QL_OK) {
        printf("| loading was not measured | %.300s |||\n", ql_error());
        return 1;
    }
    return 0;
}
