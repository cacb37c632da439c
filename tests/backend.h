/* The backend a test program was asked for, and device memory for it. A backend that cannot be had is a failure. */
#ifndef QL_TEST_BACKEND_H
#define QL_TEST_BACKEND_H

#include "kernels/comm.h"
#include "tests/test.h"

#include <sys/wait.h>
#include <unistd.h>

static inline ql_status backend_get(const ql_backend **out)
{
    if (strcmp(test_backend, "cuda") == 0) {
        const char *dirs = getenv("LD_LIBRARY_PATH");
        ql_backend_cuda_search(dirs ? dirs : "");
        return ql_backend_cuda(getenv("QLORA_CUDA_LIBRARY"), out);
    }
    *out = ql_backend_cpu();
    return QL_OK;
}

typedef struct {
    int devices;
    ql_dev_info info; /* of device 0 */
} backend_place;

/* Asked in a process that ends: ranks are forked before any device is opened. */
static inline ql_status backend_ask(const ql_backend *be, backend_place *out)
{
    backend_place p = {0};
    int fd[2], status = 0;
    if (pipe(fd)) QL_FAIL(QL_EIO, "no pipe");
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        ql_dev *d = NULL;
        int ok = be->dev->count(&p.devices) == QL_OK && p.devices > 0 && be->dev->open(0, &d) == QL_OK && be->dev->info(d, &p.info) == QL_OK;
        if (!ok) fprintf(stderr, "%s: %s\n", be->name, ql_error());
        _exit(ok && write(fd[1], &p, sizeof p) == (ssize_t)sizeof p ? 0 : 1);
    }
    close(fd[1]);
    ssize_t n = pid > 0 ? read(fd[0], &p, sizeof p) : 0;
    close(fd[0]);
    if (pid > 0) waitpid(pid, &status, 0);
    if (n != (ssize_t)sizeof p) QL_FAIL(QL_EDEVICE, "%s: no device answers", be->name);
    *out = p;
    return QL_OK;
}

typedef struct {
    const ql_backend *be;
    ql_dev *dev;
    ql_stream *stream;
    ql_queue q;
    void *mem[64];
    int count;
} test_dev;

static inline ql_status dev_get(test_dev *d)
{
    memset(d, 0, sizeof *d);
    QL_TRY(backend_get(&d->be));
    QL_TRY(d->be->dev->open(0, &d->dev));
    QL_TRY(d->be->dev->stream_open(d->dev, &d->stream));
    d->q = (ql_queue){d->be->ops, d->stream, NULL};
    return d->be->dev->alloc(d->dev, QL_WORK_BYTES, &d->q.work);
}

/* A vector of n elements on the device, filled from host (NULL: zeros). */
static inline ql_status dev_vec(test_dev *d, ql_dtype t, int64_t n, const void *host, ql_tensor *out)
{
    int64_t bytes = n * (int64_t)ql_dtype_size(t);
    void *p = NULL;
    if (d->count == 64) QL_FAIL(QL_EINTERNAL, "too many vectors");
    QL_TRY(d->be->dev->alloc(d->dev, bytes, &p));
    d->mem[d->count++] = p;
    QL_TRY(host ? d->be->dev->copy(d->stream, p, host, bytes) : d->be->dev->set(d->stream, p, 0, bytes));
    QL_TRY(d->be->dev->sync(d->stream));
    *out = ql_vec(p, t, n);
    return QL_OK;
}

static inline ql_status dev_read(test_dev *d, ql_tensor t, void *host)
{
    QL_TRY(d->be->dev->copy(d->stream, host, t.data, t.cols * (int64_t)ql_dtype_size(t.dtype)));
    return d->be->dev->sync(d->stream);
}

static inline void dev_free(test_dev *d)
{
    while (d->count > 0) d->be->dev->free(d->dev, d->mem[--d->count]);
}

static inline void dev_put(test_dev *d)
{
    dev_free(d);
    if (d->q.work) d->be->dev->free(d->dev, d->q.work);
    if (d->stream) d->be->dev->stream_close(d->stream);
    if (d->dev) d->be->dev->close(d->dev);
}

#endif
