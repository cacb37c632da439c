/* Collectives through NCCL (nothing newer than 2.25): one non-blocking communicator; every wait of the host looks at
 * the abort flag, the cancel flag and the clock. A communicator that failed is never aborted or destroyed, since that
 * may hang: its process is about to end. One rank alone needs no NCCL. */
#include "kernels/cuda/cu.h"

#include <nccl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define NCCL_FUNCTIONS(X)                                                                                             \
    X(ncclGetVersion)                                                                                                 \
    X(ncclGetUniqueId)                                                                                                \
    X(ncclCommInitRankConfig)                                                                                         \
    X(ncclCommFinalize)                                                                                               \
    X(ncclCommDestroy)                                                                                                \
    X(ncclCommGetAsyncError)                                                                                          \
    X(ncclGetErrorString)                                                                                             \
    X(ncclGetLastError)                                                                                               \
    X(ncclGroupStart)                                                                                                 \
    X(ncclGroupEnd)                                                                                                   \
    X(ncclAllGather)                                                                                                  \
    X(ncclAllReduce)                                                                                                  \
    X(ncclSend)                                                                                                       \
    X(ncclRecv)

static struct {
    bool open;
#define DECLARE(f) decltype(&f) f##_;
    NCCL_FUNCTIONS(DECLARE)
#undef DECLARE
} nc;

/* In the shared block. */
struct meeting {
    volatile int ready; /* rank 0 has written id */
    int pad[15];
    ncclUniqueId id;
};

struct ql_comm {
    ql_dev *dev;
    int rank, world, groups;
    const volatile int *abort;
    int64_t timeout_ms, sent;
    volatile int cancelled, broken;
    ncclComm_t nccl;
    void *token; /* 4 bytes of device memory for the barrier */
};

static ql_status nccl_open(void)
{
    void *lib = NULL;
    if (nc.open) return QL_OK;
    /* From 2.24 on NCCL shares host memory through the driver, which between GPUs without peer access, T4s among them, ends the
     * first collective with error 217, and in containers without NUMA as well. /dev/shm always works, where it is large enough. */
    setenv("NCCL_CUMEM_HOST_ENABLE", "0", 0);
    QL_TRY(cu_library("libnccl.so.2", &lib));
#define LOAD(f) QL_TRY(cu_symbol(lib, #f, &nc.f##_));
    NCCL_FUNCTIONS(LOAD)
#undef LOAD
    nc.open = true;
    return QL_OK;
}

ql_status cu_comm_version(char *text, size_t bytes)
{
    int v = 0;
    QL_TRY(nccl_open());
    if (nc.ncclGetVersion_(&v) != ncclSuccess) QL_FAIL(QL_EDEVICE, "cuda: NCCL does not tell its version");
    snprintf(text, bytes, "NCCL %d.%d.%d", v / 10000, v / 100 % 100, v % 100);
    return QL_OK;
}

/* ---- waiting ---- */

static int64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static ql_status stopped(ql_comm *c, const char *what, int64_t since, int64_t limit)
{
    if (c->cancelled) QL_FAIL(QL_EPEER, "rank %d: %s: cancelled", c->rank, what);
    if (c->abort && *c->abort) QL_FAIL(QL_EPEER, "rank %d: %s: another rank failed", c->rank, what);
    if (limit > 0 && now_ms() - since > limit)
        QL_FAIL(QL_EPEER, "rank %d: %s: no progress for %lld ms: a peer is stuck or gone", c->rank, what,
                (long long)limit);
    return QL_OK;
}

static void pause_a_bit(int round)
{
    if (round < 200)
        sched_yield();
    else
        usleep(round < 2000 ? 20 : 500);
}

static ql_status nccl_check(ql_comm *c, ncclResult_t r, const char *what)
{
    if (r == ncclSuccess) return QL_OK;
    c->broken = 1;
    const char *detail = nc.ncclGetLastError_(c->nccl);
    const char *why = !detail ? ""
                      : strstr(detail, "shared memory") ? " (/dev/shm is too small or full: enlarge it, e.g. docker run --shm-size=1g)"
                      : strstr(detail, "out of memory") || strstr(detail, "Failed to CUDA malloc") || strstr(detail, "Failed to CUDA calloc")
                          ? " (NCCL's buffers found no room on the GPU: a smaller --device_memory leaves some)" : "";
    return ql_fail(r == ncclRemoteError ? QL_EPEER : QL_EDEVICE, "rank %d: NCCL %s: %s; %s%s", c->rank, what,
                   nc.ncclGetErrorString_(r), detail ? detail : "", why);
}

/* A non-blocking communicator answers "in progress": wait until it has queued what it was asked. */
static ql_status settle(ql_comm *c, ncclResult_t r, const char *what, int64_t limit)
{
    int64_t since = now_ms();
    for (int round = 0; r == ncclInProgress; round++) {
        ncclResult_t asked = nc.ncclCommGetAsyncError_(c->nccl, &r);
        if (asked != ncclSuccess) r = asked;
        if (r != ncclInProgress) break;
        ql_status st = stopped(c, what, since, limit);
        if (st != QL_OK) {
            c->broken = 1;
            return st;
        }
        pause_a_bit(round);
    }
    return nccl_check(c, r, what);
}

/* Before a call: a cancelled or broken communicator is not touched any more. */
static ql_status usable(ql_comm *c, const char *what)
{
    if (c->broken) QL_FAIL(QL_EPEER, "rank %d: %s: the communicator has failed before", c->rank, what);
    QL_TRY(stopped(c, what, 0, 0));
    return cu_use(c->dev);
}

/* ---- open and close ---- */

static int64_t comm_shared_bytes(int world)
{
    (void)world;
    return (int64_t)sizeof(meeting);
}

static void comm_close(ql_comm *c)
{
    if (!c) return;
    if (c->nccl && !c->broken && !c->cancelled && !(c->abort && *c->abort) && cu_use(c->dev) == QL_OK) {
        ncclResult_t r = nc.ncclCommFinalize_(c->nccl);
        int64_t since = now_ms();
        for (int round = 0; r == ncclInProgress && now_ms() - since < 5000 && !(c->abort && *c->abort); round++) {
            pause_a_bit(round);
            if (nc.ncclCommGetAsyncError_(c->nccl, &r) != ncclSuccess) break;
        }
        if (r == ncclSuccess) nc.ncclCommDestroy_(c->nccl);
    }
    if (c->token && cu_use(c->dev) == QL_OK) cudaFree(c->token);
    free(c);
}

static void comm_cancel(ql_comm *c)
{
    if (c) c->cancelled = 1;
}

static ql_status meet(ql_comm *c, meeting *m, int64_t limit)
{
    if (c->rank == 0) {
        QL_TRY(nccl_check(c, nc.ncclGetUniqueId_(&m->id), "ncclGetUniqueId"));
        __sync_synchronize();
        m->ready = 1;
        return QL_OK;
    }
    int64_t since = now_ms();
    for (int round = 0; !m->ready; round++) {
        QL_TRY(stopped(c, "waiting for rank 0's NCCL id", since, limit));
        pause_a_bit(round);
    }
    __sync_synchronize();
    return QL_OK;
}

static ql_status comm_open(ql_dev *d, const ql_comm_setup *setup, ql_comm **out)
{
    ql_status st = QL_OK;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    /* Opening loads NCCL's kernels: it gets a minute even where steps may take less. */
    int64_t limit = setup->timeout_ms > 0 ? ql_max64(setup->timeout_ms, 60000) : 0;
    ql_comm *c = (ql_comm *)calloc(1, sizeof *c);
    if (!c) QL_FAIL(QL_ENOMEM, "cuda: out of host memory");
    c->dev = d, c->rank = setup->rank, c->world = setup->world;
    c->abort = setup->abort, c->timeout_ms = setup->timeout_ms;
    QL_GO(cu_use(d));
    /* NCCL's neighbour, not the arena's: outside what the device table counts, as NCCL's own memory is. */
    QL_GO(cu_check(cudaMalloc(&c->token, 256), "memory for the barrier"));
    QL_GO(cu_check(cudaMemset(c->token, 0, 256), "clearing the barrier's token"));
    if (c->world > 1) {
        if (setup->shared_bytes < comm_shared_bytes(c->world)) {
            st = ql_fail(QL_EINVAL, "cuda: the ranks' shared block has %lld bytes, needed are %lld",
                         (long long)setup->shared_bytes, (long long)comm_shared_bytes(c->world));
            goto out;
        }
        QL_GO(nccl_open());
        QL_GO(meet(c, (meeting *)setup->shared, limit));
        config.blocking = 0;
        QL_GO(settle(c, nc.ncclCommInitRankConfig_(&c->nccl, c->world, ((meeting *)setup->shared)->id, c->rank, &config),
                     "opening the communicator", limit));
    }
    *out = c;
    c = NULL;
out:
    if (c) c->broken = 1;
    comm_close(c);
    return st;
}

/* ---- collectives ---- */

static size_t bytes_of(ql_tensor t)
{
    return (size_t)(t.rows * t.cols) * ql_dtype_size(t.dtype);
}

static ql_status contiguous(const char *op, ql_tensor t)
{
    if (t.rows > 1 && t.ld != t.cols)
        QL_FAIL(QL_EINVAL, "cuda: %s: the tensor has a row stride of %lld for %lld columns, needed is contiguous", op,
                (long long)t.ld, (long long)t.cols);
    return QL_OK;
}

static ql_status self_copy(ql_stream *s, void *dst, const void *src, size_t bytes)
{
    if (dst == src || bytes == 0) return QL_OK;
    return cu_check(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, s->s), "copying the own part");
}

static ql_status comm_all_gather(ql_comm *c, ql_stream *s, ql_tensor out, ql_tensor in)
{
    size_t bytes = bytes_of(in);
    QL_TRY(usable(c, "all_gather"));
    QL_TRY(contiguous("all_gather", out));
    QL_TRY(contiguous("all_gather", in));
    if (out.dtype != in.dtype || bytes_of(out) != bytes * (size_t)c->world)
        QL_FAIL(QL_EINVAL, "cuda: all_gather of %zu bytes a rank over %d ranks into %zu", bytes, c->world, bytes_of(out));
    if (c->world == 1) return self_copy(s, out.data, in.data, bytes);
    c->sent += (int64_t)bytes * (c->world - 1);
    return settle(c, nc.ncclAllGather_(in.data, out.data, bytes, ncclUint8, c->nccl, s->s), "all_gather", c->timeout_ms);
}

static ql_status comm_group_begin(ql_comm *c)
{
    QL_TRY(usable(c, "group"));
    if (c->world > 1) QL_TRY(nccl_check(c, nc.ncclGroupStart_(), "group"));
    c->groups++;
    return QL_OK;
}

static ql_status comm_group_end(ql_comm *c)
{
    c->groups--;
    if (c->world == 1) return QL_OK;
    return settle(c, nc.ncclGroupEnd_(), "a group of sends and receives", c->timeout_ms);
}

/* The stream has them in order. */
static ql_status comm_land(ql_comm *c, int *over)
{
    if (over) *over = 1;
    return usable(c, "land");
}

/* Inside a group the calls only collect; group_end waits. */
static ql_status queued(ql_comm *c, ncclResult_t r, const char *what)
{
    if (c->groups && r == ncclInProgress) return QL_OK;
    return settle(c, r, what, c->timeout_ms);
}

static ql_status peer_ok(ql_comm *c, const char *op, int peer)
{
    if (peer < 0 || peer >= c->world || peer == c->rank)
        QL_FAIL(QL_EINVAL, "cuda: %s between rank %d and %d of %d", op, c->rank, peer, c->world);
    return QL_OK;
}

static ql_status comm_send(ql_comm *c, ql_stream *s, ql_tensor x, int to)
{
    QL_TRY(usable(c, "send"));
    QL_TRY(contiguous("send", x));
    QL_TRY(peer_ok(c, "send", to));
    c->sent += (int64_t)bytes_of(x);
    return queued(c, nc.ncclSend_(x.data, bytes_of(x), ncclUint8, to, c->nccl, s->s), "send");
}

static ql_status comm_recv(ql_comm *c, ql_stream *s, ql_tensor x, int from)
{
    QL_TRY(usable(c, "recv"));
    QL_TRY(contiguous("recv", x));
    QL_TRY(peer_ok(c, "recv", from));
    return queued(c, nc.ncclRecv_(x.data, bytes_of(x), ncclUint8, from, c->nccl, s->s), "recv");
}

static ql_status comm_all_to_all(ql_comm *c, ql_stream *s, ql_tensor out, ql_tensor in)
{
    QL_TRY(usable(c, "all_to_all"));
    QL_TRY(contiguous("all_to_all", out));
    QL_TRY(contiguous("all_to_all", in));
    int64_t n = in.rows * in.cols, each = n / c->world;
    size_t bytes = (size_t)each * ql_dtype_size(in.dtype);
    if (out.dtype != in.dtype || out.rows * out.cols != n || n % c->world)
        QL_FAIL(QL_EINVAL, "cuda: all_to_all of %lld elements into %lld over %d ranks", (long long)n,
                (long long)(out.rows * out.cols), c->world);
    QL_TRY(self_copy(s, (char *)out.data + (size_t)c->rank * bytes, (const char *)in.data + (size_t)c->rank * bytes,
                     bytes));
    if (c->world == 1) return QL_OK;
    QL_TRY(comm_group_begin(c));
    for (int p = 0; p < c->world; p++) {
        if (p == c->rank) continue;
        QL_TRY(comm_send(c, s, ql_vec((char *)in.data + (size_t)p * bytes, QL_U8, (int64_t)bytes), p));
        QL_TRY(comm_recv(c, s, ql_vec((char *)out.data + (size_t)p * bytes, QL_U8, (int64_t)bytes), p));
    }
    return comm_group_end(c);
}

static ql_status all_reduce(ql_comm *c, ql_stream *s, ql_tensor x, ncclRedOp_t op, const char *what)
{
    QL_TRY(usable(c, what));
    QL_TRY(contiguous(what, x));
    if (x.dtype != QL_I32 && !(x.dtype == QL_I64 && op == ncclSum))
        QL_FAIL(QL_EINVAL, "cuda: %s of %s; only integers are reduced", what, ql_dtype_name(x.dtype));
    if (c->world == 1) return QL_OK;
    c->sent += (int64_t)bytes_of(x) * (c->world - 1);
    return settle(c, nc.ncclAllReduce_(x.data, x.data, (size_t)(x.rows * x.cols),
                                       x.dtype == QL_I32 ? ncclInt32 : ncclInt64, op, c->nccl, s->s), what,
                  c->timeout_ms);
}

static ql_status comm_all_sum(ql_comm *c, ql_stream *s, ql_tensor x)
{
    return all_reduce(c, s, x, ncclSum, "all_sum");
}

static ql_status comm_all_max(ql_comm *c, ql_stream *s, ql_tensor x)
{
    return all_reduce(c, s, x, ncclMax, "all_max");
}

/* All ranks' streams have come here, and the host knows it. */
static ql_status comm_barrier(ql_comm *c, ql_stream *s)
{
    int64_t before = c->sent, since = now_ms();
    QL_TRY(comm_all_max(c, s, ql_vec(c->token, QL_I32, 1)));
    c->sent = before;
    for (int round = 0;; round++) {
        cudaError_t e = cudaStreamQuery(s->s);
        if (e == cudaSuccess) return QL_OK;
        if (e != cudaErrorNotReady) return cu_check(e, "barrier");
        cudaGetLastError();
        QL_TRY(stopped(c, "barrier", since, c->timeout_ms));
        pause_a_bit(round);
    }
}

static int64_t comm_bytes_sent(ql_comm *c)
{
    return c->sent;
}

const ql_comm_table cu_comm_table = {
    comm_shared_bytes, comm_open, comm_close, comm_cancel,      comm_all_gather, comm_all_to_all, comm_all_sum,
    comm_all_max,      comm_send, comm_recv,  comm_group_begin, comm_group_end,  comm_land,       comm_barrier,    comm_bytes_sent,
};
