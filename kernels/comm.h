/* The collectives table, and the backend that joins the three tables. Only data movement, integers and
 * maxima: no collective adds floats, because a reduction's order must not depend on the number of ranks.
 * All ranks make the same calls in the same order on one communicator and one stream. */
#ifndef QL_COMM_H
#define QL_COMM_H

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ql_comm ql_comm;

/* How ranks of one machine meet. `shared` is a MAP_SHARED block that existed before the fork, zeroed,
 * ql_comm_shared_bytes(world) long; cuda puts its NCCL id there, cpu its mailboxes. */
typedef struct {
    int rank, world;
    void *shared;
    int64_t shared_bytes;
    const volatile int *abort;  /* in shared memory: when it is not 0, waiting ends with QL_EPEER */
    int64_t timeout_ms;         /* a wait longer than this without progress of the peer is QL_EPEER */
    int *waits_for;             /* in shared memory, may be NULL: 1 + the rank that this one waits for, 0 none. Only where the host waits */
} ql_comm_setup;

typedef struct {
    int64_t (*shared_bytes)(int world);
    ql_status (*open)(ql_dev *d, const ql_comm_setup *setup, ql_comm **out);
    void (*close)(ql_comm *c);
    /* Makes every wait of this rank return QL_EPEER from now on, from any thread. Does not wait. */
    void (*cancel)(ql_comm *c);

    /* out = the ranks' `in` one after another: out.rows·cols = world · in.rows·cols, both contiguous, one dtype. In place if in is
     * out's own part. */
    ql_status (*all_gather)(ql_comm *c, ql_stream *s, ql_tensor out, ql_tensor in);
    /* Part p of in (its p-th of world equal pieces) goes to rank p; part p of out comes from rank p. Not in place. */
    ql_status (*all_to_all)(ql_comm *c, ql_stream *s, ql_tensor out, ql_tensor in);
    /* In place, elementwise: I32 or I64 sum, I32 maximum. */
    ql_status (*all_sum)(ql_comm *c, ql_stream *s, ql_tensor x);
    ql_status (*all_max)(ql_comm *c, ql_stream *s, ql_tensor x);
    ql_status (*send)(ql_comm *c, ql_stream *s, ql_tensor x, int to);
    ql_status (*recv)(ql_comm *c, ql_stream *s, ql_tensor x, int from);
    /* Several sends and receives as one: begin, calls, end. After end they may still be under way: `land` ends that. A device does it in
     * the order of its stream, where land is nothing; on a host, which computes meanwhile, it waits, or with `over` set only moves what
     * can be moved and says whether that was all. Whatever comes next on this communicator lands them too. */
    ql_status (*group_begin)(ql_comm *c);
    ql_status (*group_end)(ql_comm *c);
    ql_status (*land)(ql_comm *c, int *over);
    ql_status (*barrier)(ql_comm *c, ql_stream *s);
    /* Bytes this rank has given to other ranks so far. */
    int64_t (*bytes_sent)(ql_comm *c);
} ql_comm_table;

typedef struct {
    const char *name; /* "cpu", "cuda", "null" */
    const ql_dev_table *dev;
    const ql_ops *ops;
    const ql_comm_table *comm;
} ql_backend;

const ql_backend *ql_backend_cpu(void);
/* First in main: starts the program again where its BLAS was loaded with threads (none may exist before ranks are forked), or without
 * the kernels that this processor could use. */
void ql_backend_cpu_start(char **argv);
const ql_backend *ql_backend_null(void);
/* Opens libqlora-cuda.so (beside the program, or on the library path) at run time. QL_ENOSUP says what is missing: the file, the
 * driver, cuBLAS, NCCL. Touches no device. */
ql_status ql_backend_cuda(const char *library, const ql_backend **out);
/* Before it: colon-separated directories where cuBLAS, NCCL and NVML may lie besides the system's search; a Python
 * site-packages folder stands for its nvidia/<package>/lib. main makes the list; the environment is its business. */
void ql_backend_cuda_search(const char *dirs);
/* What the shared object exports. */
typedef ql_status (*ql_backend_entry)(const ql_backend **out);
#define QL_BACKEND_ENTRY  "ql_cuda_backend"
#define QL_BACKEND_SEARCH "ql_cuda_search" /* void (const char *dirs) */

/* What the null backend counted: calls per op, flops of matmul and attention, bytes moved, bytes allocated. */
typedef struct {
    int64_t calls, flops, bytes, allocated, peak;
} ql_null_counts;
ql_null_counts ql_null_take(void); /* returns and resets */
/* How many devices the null backend has, of how many bytes each: 8 of 1 TiB unless said otherwise. For devices opened later. */
void ql_null_configure(int devices, int64_t bytes);

#ifdef __cplusplus
}
#endif
#endif
