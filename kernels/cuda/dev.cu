/* The device table: memory, streams, events and copies through the CUDA runtime; totals through NVML. */
#include "kernels/cuda/cu.h"

#include <nvml.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- NVML: optional, everything it would tell is −1 without it ---- */

static struct {
    int state; /* 0 not tried, 1 usable, −1 missing */
    nvmlReturn_t (*init)(void);
    nvmlReturn_t (*by_bus)(const char *, nvmlDevice_t *);
    nvmlReturn_t (*memory)(nvmlDevice_t, nvmlMemory_t *);
    nvmlReturn_t (*processes)(nvmlDevice_t, unsigned *, nvmlProcessInfo_t *);
    nvmlReturn_t (*temperature)(nvmlDevice_t, nvmlTemperatureSensors_t, unsigned *);
    nvmlReturn_t (*power)(nvmlDevice_t, unsigned *);
    nvmlReturn_t (*utilisation)(nvmlDevice_t, nvmlUtilization_t *);
    nvmlReturn_t (*clock)(nvmlDevice_t, nvmlClockType_t, unsigned *);
    nvmlReturn_t (*driver)(char *, unsigned);
} nvml;

static int nvml_open(void)
{
    void *lib;
    if (nvml.state) return nvml.state == 1;
    int failed_before = ql_error_code() != QL_OK;
    int ok = cu_library("libnvidia-ml.so.1", &lib) == QL_OK && cu_symbol(lib, "nvmlInit_v2", &nvml.init) == QL_OK &&
             cu_symbol(lib, "nvmlDeviceGetHandleByPciBusId_v2", &nvml.by_bus) == QL_OK &&
             cu_symbol(lib, "nvmlDeviceGetMemoryInfo", &nvml.memory) == QL_OK &&
             cu_symbol(lib, "nvmlDeviceGetComputeRunningProcesses_v3", &nvml.processes) == QL_OK &&
             cu_symbol(lib, "nvmlDeviceGetTemperature", &nvml.temperature) == QL_OK &&
             cu_symbol(lib, "nvmlDeviceGetPowerUsage", &nvml.power) == QL_OK &&
             cu_symbol(lib, "nvmlDeviceGetUtilizationRates", &nvml.utilisation) == QL_OK &&
             cu_symbol(lib, "nvmlDeviceGetClockInfo", &nvml.clock) == QL_OK &&
             cu_symbol(lib, "nvmlSystemGetDriverVersion", &nvml.driver) == QL_OK && nvml.init() == NVML_SUCCESS;
    if (!ok && !failed_before) ql_error_clear(); /* a missing NVML is not a failure */
    nvml.state = ok ? 1 : -1;
    return ok;
}

/* ---- open ---- */

/* CUDA works with drivers of its own major version or newer. */
static ql_status driver_too_old(void)
{
    int has = 0;
    char name[80] = "";
    const char *needs = CUDART_VERSION >= 13000 ? "580" : "525";
    cudaDriverGetVersion(&has);
    if (nvml_open()) nvml.driver(name, sizeof name);
    QL_FAIL(QL_ENOSUP, "cuda: the NVIDIA driver here%s%s is too old: it knows CUDA %d.%d, this build was made with CUDA %d.%d and needs driver %s or newer. "
            "Update the driver, or build with this machine's own toolkit: `pip install ./magics` in a clone of the repository",
            *name ? ", " : "", name, has / 1000, has % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10, needs);
}

static ql_status dev_count(int *n)
{
    int k = 0;
    cudaError_t e = cudaGetDeviceCount(&k);
    if (e == cudaErrorNoDevice) {
        *n = 0;
        return QL_OK;
    }
    if (e == cudaErrorInsufficientDriver) return driver_too_old();
    QL_TRY(cu_check(e, "counting devices"));
    *n = k;
    return QL_OK;
}

static void dev_close(ql_dev *d)
{
    if (!d) return;
    cu_matmul_close(d->matmul);
    while (d->allocs) {
        cu_alloc *a = d->allocs;
        d->allocs = a->next;
        cudaFree(a->p);
        free(a);
    }
    free(d);
}

/* Which way through the kernels exists is fixed when they are compiled: a build for compute capability 7.5 alone runs on a
 * newer card from its PTX and has there what a T4 has. */
static ql_status code_of(ql_dev *d)
{
    cudaFuncAttributes a;
    cudaError_t e = cudaFuncGetAttributes(&a, cu_any_kernel());
    if (e == cudaErrorNoKernelImageForDevice || e == cudaErrorInvalidDeviceFunction) {
        cudaGetLastError();
        QL_FAIL(QL_ENOSUP, "cuda: this build has no code for %s: build it with %d%d in CUDA_ARCH", d->prop.name, d->prop.major,
                d->prop.minor);
    }
    QL_TRY(cu_check(e, "the code for this device"));
    if (a.ptxVersion < 80) d->arch = 75;
    return QL_OK;
}

static ql_status dev_open(int index, ql_dev **out)
{
    ql_status st = QL_OK;
    int n = 0;
    char bus[32] = "";
    ql_dev *d = (ql_dev *)calloc(1, sizeof *d);
    if (!d) QL_FAIL(QL_ENOMEM, "cuda: out of host memory");
    QL_GO(dev_count(&n));
    if (index < 0 || index >= n) {
        st = ql_fail(QL_EINVAL, "cuda: device %d of %d", index, n);
        goto out;
    }
    d->index = index;
    QL_GO(cu_use(d));
    QL_GO(cu_check(cudaGetDeviceProperties(&d->prop, index), "device properties"));
    d->arch = d->prop.major * 10 + d->prop.minor;
    d->sms = d->prop.multiProcessorCount;
    if (d->arch < 75) {
        st = ql_fail(QL_ENOSUP, "cuda: %s has compute capability %d.%d; 7.5 is the oldest supported", d->prop.name,
                     d->prop.major, d->prop.minor);
        goto out;
    }
    QL_GO(cu_check(cudaFree(NULL), "creating the context"));
    QL_GO(code_of(d));
    QL_GO(cu_check(cudaDeviceGetPCIBusId(bus, sizeof bus, index), "PCI id"));
    if (nvml_open()) {
        nvmlDevice_t h;
        if (nvml.by_bus(bus, &h) == NVML_SUCCESS) d->nvml = h;
    }
    *out = d;
    d = NULL;
out:
    dev_close(d);
    return st;
}

static ql_status dev_info(ql_dev *d, ql_dev_info *out)
{
    ql_dev_info i = {};
    size_t free_bytes = 0, total = 0;
    char blas[64] = "", nccl[64] = "";
    int runtime = 0;
    QL_TRY(cu_use(d));
    QL_TRY(cu_check(cudaMemGetInfo(&free_bytes, &total), "memory"));
    snprintf(i.name, sizeof i.name, "%.95s", d->prop.name);
    QL_TRY(cu_check(cudaDeviceGetPCIBusId(i.id, sizeof i.id, d->index), "PCI id"));
    i.arch = d->arch, i.sms = d->sms, i.bf16 = d->arch >= 80;
    i.total_bytes = (int64_t)total, i.free_bytes = (int64_t)free_bytes;
    if (nvml_open()) nvml.driver(i.driver, sizeof i.driver);
    /* Missing libraries are told by name, not as an error: `info` is where one looks for them. */
    if (cu_matmul_version(blas, sizeof blas) != QL_OK) snprintf(blas, sizeof blas, "no cuBLAS"), ql_error_clear();
    if (cu_comm_version(nccl, sizeof nccl) != QL_OK) snprintf(nccl, sizeof nccl, "no NCCL"), ql_error_clear();
    cudaRuntimeGetVersion(&runtime);
    snprintf(i.libs, sizeof i.libs, "CUDA %d.%d · %s · %s%s", runtime / 1000, runtime % 1000 / 10, blas, nccl,
             CU_T4 ? " · T4 build" : "");
    *out = i;
    return QL_OK;
}

static ql_status dev_memory(ql_dev *d, ql_dev_memory *out)
{
    ql_dev_memory m = {d->allocated, d->peak, -1, -1, -1, -1, -1, -1, -1};
    size_t free_bytes = 0, total = 0;
    QL_TRY(cu_use(d));
    QL_TRY(cu_check(cudaMemGetInfo(&free_bytes, &total), "memory"));
    m.total = (int64_t)total, m.used = (int64_t)(total - free_bytes);
    if (d->nvml) {
        nvmlDevice_t h = (nvmlDevice_t)d->nvml;
        nvmlProcessInfo_t p[64];
        nvmlUtilization_t u;
        nvmlMemory_t whole;
        unsigned n = 64, value;
        /* NVML's figures, which nvidia-smi shows; not for a part of a GPU (MIG), whose handle is the whole one's. */
        if (nvml.memory(h, &whole) == NVML_SUCCESS && whole.total >= total && whole.total - total < total / 16)
            m.total = (int64_t)whole.total, m.used = (int64_t)whole.used;
        /* Inside a container the driver counts processes under other ids; a single one is ours then. */
        if (nvml.processes(h, &n, p) == NVML_SUCCESS)
            for (unsigned i = 0; i < n; i++)
                if ((p[i].pid == (unsigned)getpid() || n == 1) && p[i].usedGpuMemory != (unsigned long long)-1)
                    m.process = (int64_t)p[i].usedGpuMemory;
        if (nvml.temperature(h, NVML_TEMPERATURE_GPU, &value) == NVML_SUCCESS) m.temperature_c = (int)value;
        if (nvml.power(h, &value) == NVML_SUCCESS) m.power_w = (int)(value / 1000);
        if (nvml.utilisation(h, &u) == NVML_SUCCESS) m.utilisation = (int)u.gpu;
        if (nvml.clock(h, NVML_CLOCK_SM, &value) == NVML_SUCCESS) m.clock_mhz = (int)value;
    }
    *out = m;
    return QL_OK;
}

/* Whether peer access is possible; it is never enabled here (NCCL and its settings decide). */
static ql_status dev_peer(int a, int b, int *out)
{
    int can = 0;
    QL_TRY(cu_check(cudaDeviceCanAccessPeer(&can, a, b), "peer access"));
    *out = can;
    return QL_OK;
}

/* ---- memory ---- */

static ql_status dev_alloc(ql_dev *d, int64_t bytes, void **out)
{
    void *p = NULL;
    QL_TRY(cu_use(d));
    cu_alloc *a = (cu_alloc *)malloc(sizeof *a);
    if (!a) QL_FAIL(QL_ENOMEM, "cuda: out of host memory");
    cudaError_t e = cudaMalloc(&p, (size_t)ql_max64(bytes, 1));
    if (e != cudaSuccess) {
        size_t free_bytes = 0, total = 0;
        free(a);
        cudaGetLastError();
        if (e != cudaErrorMemoryAllocation) return cu_check(e, "cudaMalloc");
        cudaMemGetInfo(&free_bytes, &total);
        QL_FAIL(QL_ENOMEM, "cuda: no %lld bytes of device memory: %zu of %zu are free", (long long)bytes, free_bytes,
                total);
    }
    a->p = p, a->bytes = bytes, a->next = d->allocs;
    d->allocs = a;
    d->allocated += bytes;
    d->peak = ql_max64(d->peak, d->allocated);
    *out = p;
    return QL_OK;
}

static void dev_free(ql_dev *d, void *p)
{
    if (!p || cu_use(d) != QL_OK) return;
    for (cu_alloc **at = &d->allocs; *at; at = &(*at)->next) {
        if ((*at)->p != p) continue;
        cu_alloc *a = *at;
        *at = a->next;
        d->allocated -= a->bytes;
        free(a);
        break;
    }
    cudaFree(p);
}

static ql_status dev_host_alloc(ql_dev *d, int64_t bytes, void **out)
{
    void *p = NULL;
    QL_TRY(cu_use(d));
    cudaError_t e = cudaHostAlloc(&p, (size_t)ql_max64(bytes, 1), cudaHostAllocPortable | cudaHostAllocMapped);
    if (e == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        QL_FAIL(QL_ENOMEM, "cuda: no %lld bytes of page-locked host memory: %s", (long long)bytes, cudaGetErrorString(e));
    }
    QL_TRY(cu_check(e, "cudaHostAlloc"));
    *out = p;
    return QL_OK;
}

static void dev_host_free(ql_dev *d, void *p)
{
    if (p && cu_use(d) == QL_OK) cudaFreeHost(p);
}

static ql_status dev_pin(ql_dev *d, void *p, int64_t bytes)
{
    QL_TRY(cu_use(d));
    cudaError_t e = cudaHostRegister(p, (size_t)bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (e == cudaErrorMemoryAllocation || e == cudaErrorNotSupported || e == cudaErrorNotPermitted ||
        e == cudaErrorInvalidValue || e == cudaErrorUnknown || e == cudaErrorOperatingSystem) {
        cudaGetLastError();
        QL_FAIL(QL_ENOSUP, "cuda: %lld bytes of host memory cannot be pinned: %s", (long long)bytes, cudaGetErrorString(e));
    }
    return cu_check(e, "cudaHostRegister");
}

static void dev_unpin(ql_dev *d, void *p)
{
    if (p && cu_use(d) == QL_OK && cudaHostUnregister(p) != cudaSuccess) cudaGetLastError();
}

/* ---- streams and events ---- */

static ql_status dev_stream_open(ql_dev *d, ql_stream **out)
{
    QL_TRY(cu_use(d));
    ql_stream *s = (ql_stream *)calloc(1, sizeof *s);
    if (!s) QL_FAIL(QL_ENOMEM, "cuda: out of host memory");
    s->dev = d;
    ql_status st = cu_check(cudaStreamCreateWithFlags(&s->s, cudaStreamNonBlocking), "creating a stream");
    if (st != QL_OK)
        free(s);
    else
        *out = s;
    return st;
}

static void dev_stream_close(ql_stream *s)
{
    if (!s) return;
    if (cu_use(s->dev) == QL_OK) cudaStreamDestroy(s->s);
    free(s);
}

static ql_status dev_sync(ql_stream *s)
{
    QL_TRY(cu_use(s->dev));
    return cu_check(cudaStreamSynchronize(s->s), "waiting for the stream (the fault is in what was queued before)");
}

static ql_status dev_event_open(ql_dev *d, ql_event **out)
{
    QL_TRY(cu_use(d));
    ql_event *e = (ql_event *)calloc(1, sizeof *e);
    if (!e) QL_FAIL(QL_ENOMEM, "cuda: out of host memory");
    e->dev = d;
    ql_status st = cu_check(cudaEventCreate(&e->e), "creating an event");
    if (st != QL_OK)
        free(e);
    else
        *out = e;
    return st;
}

static void dev_event_close(ql_event *e)
{
    if (!e) return;
    if (cu_use(e->dev) == QL_OK) cudaEventDestroy(e->e);
    free(e);
}

static ql_status dev_record(ql_stream *s, ql_event *e)
{
    QL_TRY(cu_use(s->dev));
    return cu_check(cudaEventRecord(e->e, s->s), "recording an event");
}

static ql_status dev_wait(ql_stream *s, ql_event *e)
{
    QL_TRY(cu_use(s->dev));
    return cu_check(cudaStreamWaitEvent(s->s, e->e, 0), "waiting for an event");
}

static ql_status dev_done(ql_event *e, int *out)
{
    QL_TRY(cu_use(e->dev));
    cudaError_t r = cudaEventQuery(e->e);
    if (r == cudaErrorNotReady) cudaGetLastError();
    if (r != cudaSuccess && r != cudaErrorNotReady) return cu_check(r, "querying an event");
    *out = r == cudaSuccess;
    return QL_OK;
}

static ql_status dev_elapsed(ql_event *a, ql_event *b, double *ms)
{
    float t = 0;
    QL_TRY(cu_use(a->dev));
    QL_TRY(cu_check(cudaEventSynchronize(b->e), "waiting for an event"));
    QL_TRY(cu_check(cudaEventElapsedTime(&t, a->e, b->e), "time between events"));
    *ms = t;
    return QL_OK;
}

/* ---- copies ---- */

static ql_status dev_copy(ql_stream *s, void *dst, const void *src, int64_t bytes)
{
    if (bytes <= 0) return QL_OK;
    QL_TRY(cu_use(s->dev));
    return cu_check(cudaMemcpyAsync(dst, src, (size_t)bytes, cudaMemcpyDefault, s->s), "copy");
}

static ql_status dev_copy2d(ql_stream *s, void *dst, int64_t dst_pitch, const void *src, int64_t src_pitch,
                            int64_t width_bytes, int64_t rows)
{
    if (width_bytes <= 0 || rows <= 0) return QL_OK;
    QL_TRY(cu_use(s->dev));
    return cu_check(cudaMemcpy2DAsync(dst, (size_t)dst_pitch, src, (size_t)src_pitch, (size_t)width_bytes,
                                      (size_t)rows, cudaMemcpyDefault, s->s), "copy2d");
}

static ql_status dev_set(ql_stream *s, void *dst, int byte, int64_t bytes)
{
    if (bytes <= 0) return QL_OK;
    QL_TRY(cu_use(s->dev));
    return cu_check(cudaMemsetAsync(dst, byte, (size_t)bytes, s->s), "set");
}

const ql_dev_table cu_dev_table = {
    dev_count,       dev_open,         dev_close,   dev_info, dev_memory,    dev_peer,        dev_alloc,
    dev_free,        dev_host_alloc,   dev_host_free, dev_pin, dev_unpin,    dev_stream_open, dev_stream_close,
    dev_sync,        dev_event_open,   dev_event_close, dev_record, dev_wait, dev_done,       dev_elapsed,
    dev_copy,        dev_copy2d,       dev_set,     1,
};
