/* GPUs that are not there, for what only looks at devices. $FAKE_GPUS: how many; $FAKE_PEERS=all: each may read the others. */
#include "kernels/comm.h"

#include <stdio.h>
#include <stdlib.h>

struct ql_dev {
    int index;
};

static ql_status fake_count(int *n)
{
    *n = atoi(getenv("FAKE_GPUS"));
    return QL_OK;
}

static ql_status fake_open(int index, ql_dev **out)
{
    *out = malloc(sizeof **out);
    (*out)->index = index;
    return QL_OK;
}

static void fake_close(ql_dev *d)
{
    free(d);
}

static ql_status fake_info(ql_dev *d, ql_dev_info *out)
{
    *out = (ql_dev_info){.name = "Fake T4", .arch = 75, .sms = 40, .total_bytes = (int64_t)15 << 30, .free_bytes = (int64_t)14 << 30,
                         .driver = "560.35.03"};
    snprintf(out->id, sizeof out->id, "00000000:%02X:00.0", (unsigned)d->index + 4);
    snprintf(out->libs, sizeof out->libs, "CUDA 12.8 · cuBLAS 12.8.4 · %s", getenv("FAKE_NO_NCCL") ? "no NCCL" : "NCCL 2.25.1");
    return QL_OK;
}

static ql_status fake_peer(int a, int b, int *out)
{
    *out = getenv("FAKE_PEERS") != NULL && a != b;
    return QL_OK;
}

ql_status ql_cuda_backend(const ql_backend **out);
ql_status ql_cuda_backend(const ql_backend **out)
{
    static const ql_dev_table table = {.count = fake_count, .open = fake_open, .close = fake_close, .info = fake_info, .peer = fake_peer};
    static const ql_backend backend = {"cuda", &table, NULL, NULL};
    *out = &backend;
    return QL_OK;
}
