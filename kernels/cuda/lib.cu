/* The backend's entry, errors, and the libraries that are opened at run time. */
#include "kernels/cuda/cu.h"

#include <dlfcn.h>
#include <glob.h>
#include <stdio.h>
#include <string.h>

static char search_dirs[8192];
static thread_local int current = -1;

ql_status cu_check(cudaError_t e, const char *what)
{
    if (e == cudaSuccess) return QL_OK;
    return ql_fail(e == cudaErrorMemoryAllocation ? QL_ENOMEM : QL_EDEVICE, "cuda: %s: %s (%s)", what,
                   cudaGetErrorString(e), cudaGetErrorName(e));
}

ql_status cu_use(const ql_dev *d)
{
    if (current == d->index) return QL_OK;
    QL_TRY(cu_check(cudaSetDevice(d->index), "cudaSetDevice"));
    current = d->index;
    return QL_OK;
}

/* The directories of main's list, each as itself, as a prefix (lib, lib64) and as a Python site-packages folder
 * (nvidia/<package>/lib). Calls try(path, ctx) on each file that exists until it answers 1. */
static int each_candidate(const char *soname, int (*attempt)(const char *path, void *ctx), void *ctx)
{
    static const char *const shapes[] = {"%s/%s", "%s/lib/%s", "%s/lib64/%s", "%s/nvidia/*/lib/%s"};
    char dirs[sizeof search_dirs], pattern[4096];
    char *save = NULL;
    snprintf(dirs, sizeof dirs, "%s", search_dirs);
    for (char *d = strtok_r(dirs, ":", &save); d; d = strtok_r(NULL, ":", &save)) {
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
            glob_t found;
            int taken = 0;
            if ((size_t)snprintf(pattern, sizeof pattern, shapes[i], d, soname) >= sizeof pattern) continue;
            if (glob(pattern, 0, NULL, &found) != 0) continue;
            for (size_t k = 0; k < found.gl_pathc && !taken; k++) taken = attempt(found.gl_pathv[k], ctx);
            globfree(&found);
            if (taken) return 1;
        }
    }
    return 0;
}

struct open_try {
    void *handle;
    char error[512];
};

static int try_open(const char *path, void *ctx)
{
    open_try *t = (open_try *)ctx;
    t->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!t->handle) snprintf(t->error, sizeof t->error, "%s", dlerror());
    return t->handle != NULL;
}

ql_status cu_library(const char *names, void **out)
{
    open_try t = {NULL, ""};
    char list[256], *save = NULL;
    snprintf(list, sizeof list, "%s", names);
    for (char *n = strtok_r(list, ":", &save); n && !t.handle; n = strtok_r(NULL, ":", &save))
        if (!each_candidate(n, try_open, &t)) try_open(n, &t);
    if (!t.handle)
        QL_FAIL(QL_ENOSUP, "cuda: none of %s can be opened (%s); searched %s%sthe system's path. Set LD_LIBRARY_PATH, "
                "or install the pip package that holds it", names, t.error, search_dirs, *search_dirs ? " and " : "");
    *out = t.handle;
    return QL_OK;
}

ql_status cu_symbol(void *library, const char *name, void *out)
{
    void *p = dlsym(library, name);
    if (!p) QL_FAIL(QL_ENOSUP, "cuda: %s is missing in the library: it is too old (%s)", name, dlerror());
    memcpy(out, &p, sizeof p);
    return QL_OK;
}

ql_status cu_prepare(const ql_dev *d, const void *kernel, const char *name, unsigned threads, size_t smem)
{
    enum { MAX = 512 };
    static struct {
        const void *kernel;
        int device;
        size_t smem;
        unsigned threads;
    } seen[MAX];
    static int n;
    cudaFuncAttributes a;
    int i = 0;
    while (i < n && !(seen[i].kernel == kernel && seen[i].device == d->index)) i++;
    if (i < n && seen[i].smem >= smem && seen[i].threads >= threads) return QL_OK;
    if (CU_T4) {
        QL_TRY(cu_check(cudaFuncGetAttributes(&a, kernel), name));
        size_t shared = a.sharedSizeBytes + smem, regs = (size_t)ql_round_up(a.numRegs, 8) * threads;
        if (shared > 64 * 1024 || threads > 1024 || regs > 65536)
            QL_FAIL(QL_EINTERNAL, "cuda: %s does not fit a T4: %zu bytes of shared memory (65536), %u threads (1024), "
                    "%zu registers (65536)", name, shared, threads, regs);
    }
    if (smem > 48 * 1024)
        QL_TRY(cu_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem), name));
    if (i == n && n < MAX) n++;
    if (i < MAX) seen[i].kernel = kernel, seen[i].device = d->index, seen[i].smem = smem, seen[i].threads = threads;
    return QL_OK;
}

const ql_ops cu_ops_table = {
    "cuda",          cu_convert,      cu_fill,         cu_add,          cu_gather_rows, cu_scatter_rows,
    cu_check_finite, cu_nf4_dequant,  cu_nf4_quant,    cu_scale_quant,  cu_matmul_op,   cu_rmsnorm,
    cu_rmsnorm_dx,   cu_rope,         cu_swiglu,       cu_swiglu_dx,    cu_dropout,     cu_dropout_add,
    cu_attention,    cu_attention_dx, cu_ce_stats,     cu_ce_join,      cu_ce_loss,     cu_ce_grad,
    cu_sum,          cu_norm_parts,   cu_clip,         cu_adamw,        cu_adamw8,
    cu_nf4_matmul,
};

extern "C" {
__attribute__((visibility("default"))) void ql_cuda_search(const char *dirs);
__attribute__((visibility("default"))) ql_status ql_cuda_backend(const ql_backend **out);

/* Before ql_cuda_backend: colon-separated directories to look for cuBLAS, NCCL and NVML in. */
void ql_cuda_search(const char *dirs)
{
    snprintf(search_dirs, sizeof search_dirs, "%s", dirs ? dirs : "");
}

/* Touches no device: a supervisor may ask before it forks. cuBLAS has to be there; NCCL only for several ranks. */
ql_status ql_cuda_backend(const ql_backend **out)
{
    static const ql_backend backend = {"cuda", &cu_dev_table, &cu_ops_table, &cu_comm_table};
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (!driver) QL_FAIL(QL_ENOSUP, "cuda: no driver: libcuda.so.1 is not on this machine");
    dlclose(driver);
    *out = &backend;
    return QL_OK;
}
}

ql_status cu_resident(const ql_dev *d, const void *kernel, unsigned threads, int *out)
{
    enum { MAX = 64 };
    static struct {
        const void *kernel;
        unsigned threads;
        int device, blocks;
    } seen[MAX];
    static int n;
    for (int i = 0; i < n; i++) {
        if (seen[i].kernel != kernel || seen[i].threads != threads || seen[i].device != d->index) continue;
        *out = seen[i].blocks;
        return QL_OK;
    }
    int blocks = 0;
    QL_TRY(cu_use(d));
    QL_TRY(cu_check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, (int)threads, 0), "occupancy"));
    *out = blocks > 0 ? blocks : 1;
    if (n < MAX) seen[n].kernel = kernel, seen[n].threads = threads, seen[n].device = d->index, seen[n++].blocks = *out;
    return QL_OK;
}
