#include "core/launch.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

struct ql_ranks {
    int world;
    pid_t supervisor;
    pid_t pid[QL_MAX_WORLD];
    int fd[QL_MAX_WORLD];
    ql_lines *lines[QL_MAX_WORLD];
    ql_events *events[QL_MAX_WORLD];
    ql_shared *shared;
    void *comm;
    int64_t comm_bytes;
    char *host;                /* host-resident layers */
    int64_t host_bytes;
};

/* ---- in the rank ------------------------------------------------------------------------------ */

/* The main thread may be stuck in a collective whose peer is gone: then this thread ends the process. */
static void *watch(void *arg)
{
    const ql_shared *sh = arg;
    while (!ql_flag(&sh->abort)) usleep(100 * 1000);
    usleep(500 * 1000); /* time for the main thread to leave by itself, with its own words */
    _exit(4);
}

static void rank_main(ql_ranks *all, const ql_launch *l, int rank, int (*body)(ql_rank_process *p))
{
    pthread_t watcher;
    ql_rank_process p = {.rank = rank, .world = all->world, .shared = all->shared, .launch = l};
    ql_events_setup out = {.fd = all->fd[rank]};
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != all->supervisor) _exit(3); /* it died before that was said */
    signal(SIGINT, SIG_IGN);
    p.setup = (ql_rank_setup){.be = l->be, .device = l->device[rank], .rank = rank, .world = all->world, .shared = all->shared,
                              .comm_shared = all->comm, .comm_bytes = all->comm_bytes, .host_base = all->host,
                              .host_bytes = all->host_bytes, .timeout_ms = l->timeout_ms};
    int status = 3;
    if (pthread_create(&watcher, NULL, watch, all->shared) == 0 && ql_lines_open(all->fd[rank], &p.in) == QL_OK &&
        ql_events_open(&out, &p.out) == QL_OK)
        status = body(&p);
    if (p.out) ql_events_flush(p.out, 2000, NULL);
    _exit(status);
}

/* ---- in the supervisor ------------------------------------------------------------------------ */

static ql_status map_shared(int64_t bytes, void **out)
{
    void *p = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) QL_FAIL(QL_ENOMEM, "no shared memory of %lld bytes for the ranks: %s", (long long)bytes, strerror(errno));
    *out = p;
    return QL_OK;
}

static ql_status take_shared(ql_ranks *r, const ql_launch *l)
{
    void *p = NULL;
    ql_mem *m = NULL;
    QL_TRY(map_shared((int64_t)sizeof *r->shared, &p));
    r->shared = p;
    r->comm_bytes = l->be->comm->shared_bytes(r->world);
    QL_TRY(map_shared(ql_max64(r->comm_bytes, 4096), &r->comm));
    if (!l->task) return QL_OK;
    QL_TRY(ql_mem_open(&l->task->spec, 0, &m));
    r->host_bytes = ql_mem_host_base(m);
    ql_mem_close(m);
    if (!r->host_bytes) return QL_OK;
    /* One copy for all ranks, in memory that has no name and goes with the processes. Touched here, so that a lack of memory is an error
     * now and no signal later. */
    QL_TRY(map_shared(r->host_bytes, &p));
    r->host = p;
    if (madvise(r->host, (size_t)r->host_bytes, MADV_POPULATE_WRITE) && errno == ENOMEM)
        QL_FAIL(QL_ENOMEM, "host memory: %.2f GiB for offloaded layers are not there", (double)r->host_bytes / (1 << 30));
    return QL_OK;
}

static ql_status start_one(ql_ranks *r, const ql_launch *l, int rank, int (*body)(ql_rank_process *p))
{
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair)) QL_FAIL(QL_EIO, "rank %d: no socket: %s", rank, strerror(errno));
    fflush(NULL);
    pid_t pid = fork();
    if (pid < 0) {
        close(pair[0]);
        close(pair[1]);
        QL_FAIL(QL_ENOMEM, "rank %d: no process: %s", rank, strerror(errno));
    }
    if (pid == 0) {
        /* Ends of the other ranks must close with the supervisor, not with this process. */
        for (int i = 0; i < rank; i++) close(r->fd[i]);
        close(pair[0]);
        close(QL_ENGINE_FD);
        r->fd[rank] = pair[1];
        rank_main(r, l, rank, body);
    }
    close(pair[1]);
    r->fd[rank] = pair[0];
    r->pid[rank] = pid;
    ql_events_setup ev = {.fd = pair[0]};
    QL_TRY(ql_lines_open(pair[0], &r->lines[rank]));
    return ql_events_open(&ev, &r->events[rank]);
}

ql_status ql_ranks_start(const ql_launch *l, int (*body)(ql_rank_process *p), ql_ranks **out)
{
    ql_status st = QL_OK;
    ql_ranks *r = calloc(1, sizeof *r);
    if (!r) QL_FAIL(QL_ENOMEM, "no memory for ranks");
    for (int i = 0; i < QL_MAX_WORLD; i++) r->fd[i] = -1;
    r->world = l->task ? l->task->spec.choice.world : l->world;
    r->supervisor = getpid();
    QL_GO(take_shared(r, l));
    for (int i = 0; i < r->world; i++) QL_GO(start_one(r, l, i, body));
out:
    if (st == QL_OK)
        *out = r;
    else
        ql_ranks_stop(r);
    return st;
}

static int reap(ql_ranks *r, int ms)
{
    for (int waited = 0;; waited += 10) {
        int alive = 0;
        for (int i = 0; i < r->world; i++)
            if (r->pid[i] > 0) {
                if (waitpid(r->pid[i], NULL, WNOHANG) == r->pid[i])
                    r->pid[i] = 0;
                else
                    alive++;
            }
        if (!alive || waited >= ms) return alive;
        usleep(10 * 1000);
    }
}

void ql_ranks_stop(ql_ranks *r)
{
    if (!r) return;
    if (r->shared) r->shared->stop = 1;
    for (int i = 0; i < r->world; i++) {
        ql_events_close(r->events[i]);
        ql_lines_close(r->lines[i]);
        if (r->fd[i] >= 0) close(r->fd[i]); /* end of input: the rank closes its device and leaves */
    }
    int failed = r->shared && r->shared->abort; /* then they have had their time */
    if (reap(r, failed ? 200 : 1000)) {
        if (r->shared) r->shared->abort = 1;
        if (failed || reap(r, 1000)) {
            for (int i = 0; i < r->world; i++)
                if (r->pid[i] > 0) kill(r->pid[i], SIGKILL);
            reap(r, 5000);
        }
    }
    if (r->shared) munmap(r->shared, sizeof *r->shared);
    if (r->comm) munmap(r->comm, (size_t)ql_max64(r->comm_bytes, 4096));
    if (r->host) munmap(r->host, (size_t)r->host_bytes);
    free(r);
}

int ql_ranks_world(const ql_ranks *r) { return r->world; }
ql_shared *ql_ranks_shared(ql_ranks *r) { return r->shared; }
ql_lines *ql_ranks_lines(ql_ranks *r, int rank) { return r->lines[rank]; }
int ql_ranks_fd(const ql_ranks *r, int rank) { return r->fd[rank]; }

ql_status ql_ranks_send(ql_ranks *r, const json_t *command)
{
    for (int i = 0; i < r->world; i++) {
        json_t *copy = json_deep_copy(command);
        if (!copy) QL_FAIL(QL_ENOMEM, "no memory for a command");
        QL_TRY(ql_events_emit(r->events[i], "command", copy));
    }
    return QL_OK;
}

void ql_ranks_push(ql_ranks *r)
{
    /* A rank that is gone is told by its end, not by its socket. */
    for (int i = 0; i < r->world; i++)
        if (ql_events_flush(r->events[i], 0, NULL) != QL_OK) ql_error_clear();
}

int ql_ranks_dead(ql_ranks *r, char *how, size_t size)
{
    for (int i = 0; i < r->world; i++) {
        int status = 0;
        if (r->pid[i] <= 0 || waitpid(r->pid[i], &status, WNOHANG) != r->pid[i]) continue;
        r->pid[i] = 0;
        if (WIFSIGNALED(status))
            snprintf(how, size, "signal %d (%s%s)", WTERMSIG(status), strsignal(WTERMSIG(status)),
                     WTERMSIG(status) == SIGKILL ? ", as the system does where host memory runs out" : "");
        else
            snprintf(how, size, "exit status %d", WEXITSTATUS(status));
        return i;
    }
    return -1;
}

int ql_ranks_whole(ql_ranks *r)
{
    char how[128];
    int whole = ql_ranks_dead(r, how, sizeof how) < 0;
    for (int i = 0; i < r->world; i++) whole &= r->pid[i] > 0;
    return whole;
}

int64_t ql_ranks_beat(const ql_ranks *r)
{
    int64_t n = 0;
    for (int i = 0; i < r->world; i++) n += r->shared->rank[i].beat;
    return n;
}
