/* qlora-engine with a fault in one of its ranks, for tests/py/test_ranks.py:
 *   faulty_engine kill|segv|oom|stall RANK ACTION STEP    at the first thing that ACTION ("GATHER", "B" …) of optimizer step STEP does
 *   faulty_engine kill RANK saving N                      at the Nth file that a checkpoint gives its name, or brings to the disk
 *   faulty_engine stop RANK evaluation N                  in the middle of the Nth evaluation, as if a person had asked for it
 * The engine is the real one; its CPU backend passes through here, and so do the calls that put files in their places (linked with --wrap). */
#include "core/qlora.h"
#include "core/rank.h"
#include "core/session.h"
#include "tests/one_thread.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct {
    const char *how, *action;
    int rank, at;
    int me, files, evaluations, evaluating; /* in a rank */
    ql_shared *shared;
} fault = {.me = -1};

static const ql_backend *real;
static ql_dev_table dev;
static ql_ops ops;
static ql_comm_table comm;
static ql_backend faulty;

static ql_status strike(void)
{
    if (strcmp(fault.how, "kill") == 0) kill(getpid(), SIGKILL);
    if (strcmp(fault.how, "segv") == 0) kill(getpid(), SIGSEGV);
    while (strcmp(fault.how, "stall") == 0) pause();
    return ql_fail(QL_ENOMEM, "made to fail: no memory");
}

static int here(void)
{
    const ql_rank_state *s = fault.shared && fault.me == fault.rank ? &fault.shared->rank[fault.me] : NULL;
    if (s && strcmp(fault.how, "stop") == 0) {
        int now = s->phase == QL_AT_EVAL;
        fault.evaluations += now && !fault.evaluating;
        fault.evaluating = now;
        if (now && fault.evaluations == fault.at) fault.shared->stop = 1, fault.at = 0;
        return 0;
    }
    return s && s->phase == QL_AT_STEP && s->step == fault.at && strcmp(ql_do_name((ql_do)s->doing.what), fault.action) == 0;
}

#define HOOK(table, name, params, args) \
    static ql_status on_##name params { return here() ? strike() : real->table->name args; }
HOOK(dev, record, (ql_stream *s, ql_event *e), (s, e))
HOOK(dev, wait, (ql_stream *s, ql_event *e), (s, e))
HOOK(dev, copy, (ql_stream *s, void *dst, const void *src, int64_t bytes), (s, dst, src, bytes))
HOOK(dev, set, (ql_stream *s, void *dst, int byte, int64_t bytes), (s, dst, byte, bytes))
HOOK(ops, add, (const ql_queue *q, ql_tensor out, ql_tensor a, ql_tensor b), (q, out, a, b))
HOOK(ops, rmsnorm, (const ql_queue *q, ql_tensor y, ql_tensor x, ql_tensor w, float eps), (q, y, x, w, eps))
HOOK(comm, all_gather, (ql_comm *c, ql_stream *s, ql_tensor out, ql_tensor in), (c, s, out, in))
HOOK(comm, all_to_all, (ql_comm *c, ql_stream *s, ql_tensor out, ql_tensor in), (c, s, out, in))
HOOK(comm, send, (ql_comm *c, ql_stream *s, ql_tensor x, int to), (c, s, x, to))
HOOK(comm, recv, (ql_comm *c, ql_stream *s, ql_tensor x, int from), (c, s, x, from))

static ql_status on_open(ql_dev *d, const ql_comm_setup *s, ql_comm **out)
{
    fault.shared = (ql_shared *)((char *)(uintptr_t)s->abort - offsetof(ql_shared, abort));
    fault.me = s->rank;
    return real->comm->open(d, s, out);
}

const ql_backend *__real_ql_backend_cpu(void);
const ql_backend *__wrap_ql_backend_cpu(void);
const ql_backend *__wrap_ql_backend_cpu(void)
{
    real = __real_ql_backend_cpu();
    dev = *real->dev, ops = *real->ops, comm = *real->comm;
    dev.record = on_record, dev.wait = on_wait, dev.copy = on_copy, dev.set = on_set;
    ops.add = on_add, ops.rmsnorm = on_rmsnorm;
    comm.open = on_open, comm.all_gather = on_all_gather, comm.all_to_all = on_all_to_all, comm.send = on_send, comm.recv = on_recv;
    faulty = (ql_backend){real->name, &dev, &ops, &comm};
    return &faulty;
}

/* Before a file is brought to the disk, and before it gets its name. */
static void at_file(void)
{
    if (fault.me != fault.rank || strcmp(fault.action, "saving") != 0 || ++fault.files != fault.at) return;
    if (strike() != QL_OK) ql_error_clear();
}

int __real_fsync(int fd);
int __wrap_fsync(int fd);
int __wrap_fsync(int fd)
{
    at_file();
    return __real_fsync(fd);
}
int __real_rename(const char *from, const char *to);
int __wrap_rename(const char *from, const char *to);
int __wrap_rename(const char *from, const char *to)
{
    at_file();
    return __real_rename(from, to);
}

int main(int argc, char **argv)
{
    one_blas_thread(argv);
    if (argc != 5) return 2;
    fault.how = argv[1], fault.rank = atoi(argv[2]), fault.action = argv[3], fault.at = atoi(argv[4]);
    return ql_session_run(&(ql_session_setup){.fd = QL_ENGINE_FD}) == QL_OK ? 0 : 1;
}
