/* qlora-engine with a fault in one of its ranks, for tests/py/test_ranks.py:
 *   faulty_engine kill|segv|oom|stall RANK ACTION STEP    at the first thing that ACTION ("GATHER", "B" …) of optimizer step STEP does
 *   faulty_engine kill|stall RANK saving N                at the Nth file that a checkpoint gives its name, or brings to the disk
 *   faulty_engine stop RANK evaluation N                  in the middle of the Nth evaluation, as if a person had asked for it
 *   faulty_engine kill|stall RANK collective N            at the Nth collective, of whatever kind
 *   faulty_engine unpinned 0 pin 0                        host memory cannot be pinned
 *   faulty_engine delay RANK … N MS                       there, too: MS later it goes on, or when the others are told to end; where it
 *                                                         was, "STEP ACTION", is in the file `delayed`
 * The engine is the real one; its CPU backend passes through here, and so do the calls that put files in their places (linked with --wrap). */
#include "core/qlora.h"
#include "core/rank.h"
#include "core/session.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct {
    const char *how, *action;
    int rank, at, ms;
    int me, files, evaluations, evaluating, meetings, delayed; /* in a rank */
    ql_shared *shared;
} fault = {.me = -1};

static const ql_backend *real;
static ql_dev_table dev;
static ql_ops ops;
static ql_comm_table comm;
static ql_backend faulty;

static ql_status delay(void)
{
    const ql_rank_state *s = &fault.shared->rank[fault.me];
    FILE *f = fault.delayed++ ? NULL : fopen("delayed", "w");
    if (!f) return QL_OK; /* once */
    fprintf(f, "%d %s", s->step, ql_do_name((ql_do)s->doing.what));
    fclose(f);
    for (int ms = 0; ms < fault.ms && !ql_flag(&fault.shared->abort); ms += 10) usleep(10 * 1000);
    return QL_OK;
}

static ql_status strike(void)
{
    if (strcmp(fault.how, "delay") == 0) return delay();
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

static int nth_meeting(void)
{
    return fault.me == fault.rank && strcmp(fault.action, "collective") == 0 && ++fault.meetings == fault.at;
}

#define HOOK(table, name, params, args) \
    static ql_status on_##name params { if (here()) QL_TRY(strike()); return real->table->name args; }
#define MEETING(name, params, args) \
    static ql_status on_##name params { if (nth_meeting() || here()) QL_TRY(strike()); return real->comm->name args; }
HOOK(dev, record, (ql_stream *s, ql_event *e), (s, e))
HOOK(dev, wait, (ql_stream *s, ql_event *e), (s, e))
HOOK(dev, copy, (ql_stream *s, void *dst, const void *src, int64_t bytes), (s, dst, src, bytes))
HOOK(dev, set, (ql_stream *s, void *dst, int byte, int64_t bytes), (s, dst, byte, bytes))
HOOK(ops, add, (const ql_queue *q, ql_tensor out, ql_tensor a, ql_tensor b), (q, out, a, b))
HOOK(ops, rmsnorm, (const ql_queue *q, ql_tensor y, ql_tensor x, ql_tensor w, float eps), (q, y, x, w, eps))
MEETING(all_gather, (ql_comm *c, ql_stream *s, ql_tensor out, ql_tensor in), (c, s, out, in))
MEETING(all_to_all, (ql_comm *c, ql_stream *s, ql_tensor out, ql_tensor in), (c, s, out, in))
MEETING(all_sum, (ql_comm *c, ql_stream *s, ql_tensor x), (c, s, x))
MEETING(send, (ql_comm *c, ql_stream *s, ql_tensor x, int to), (c, s, x, to))
MEETING(recv, (ql_comm *c, ql_stream *s, ql_tensor x, int from), (c, s, x, from))
MEETING(barrier, (ql_comm *c, ql_stream *s), (c, s))

/* What waits; one that only looks is none. */
static ql_status on_land(ql_comm *c, int *over)
{
    if ((!over && nth_meeting()) || here()) QL_TRY(strike());
    return real->comm->land(c, over);
}

static ql_status on_pin(ql_dev *d, void *p, int64_t bytes)
{
    if (strcmp(fault.how, "unpinned") == 0) return ql_fail(QL_ENOSUP, "made to fail: %lld bytes cannot be pinned", (long long)bytes);
    return real->dev->pin(d, p, bytes);
}

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
    dev.record = on_record, dev.wait = on_wait, dev.copy = on_copy, dev.set = on_set, dev.pin = on_pin;
    ops.add = on_add, ops.rmsnorm = on_rmsnorm;
    comm.open = on_open, comm.all_gather = on_all_gather, comm.all_to_all = on_all_to_all, comm.all_sum = on_all_sum;
    comm.send = on_send, comm.recv = on_recv, comm.barrier = on_barrier, comm.land = on_land;
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
    ql_backend_cpu_start(argv);
    if (argc != 5 && (argc != 6 || strcmp(argv[1], "delay") != 0)) return 2;
    if (argc == 6) fault.ms = atoi(argv[5]);
    fault.how = argv[1], fault.rank = atoi(argv[2]), fault.action = argv[3], fault.at = atoi(argv[4]);
    return ql_session_run(&(ql_session_setup){.fd = QL_ENGINE_FD}) == QL_OK ? 0 : 1;
}
