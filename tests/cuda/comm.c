/* comm_cuda: the collectives of the CUDA backend over as many ranks as there are GPUs, a forked process to each, against expected bytes;
 * a rank that is killed; a /dev/shm that is too small. comm_cuda --bench: what an all-gather and an all-to-all reach, and what NCCL
 * takes of a GPU's memory, by NCCL's settings. */
#include "tests/backend.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <time.h>

enum { RANKS = 8 };

typedef struct {
    volatile int abort, started;
    char why[RANKS][600];
    double rate[RANKS][2];  /* GB/s received: all_gather, all_to_all */
    int64_t memory[RANKS];  /* bytes of the process on its GPU that NCCL took */
    _Alignas(64) char room[4096]; /* the comm table's */
} meeting_place;

typedef struct {
    int rank, world;
    const ql_backend *be;
    const ql_comm_table *t;
    ql_dev *dev;
    ql_stream *s;
    ql_comm *c;
} seat;
typedef ql_status (*body)(seat *s);
typedef struct {
    const char *name, *value;
} setting;

static meeting_place *shared;
static const ql_backend *be;
static int devices;

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static ql_status ground(void)
{
    backend_place p = {0};
    if (be) return QL_OK;
    test_backend = "cuda";
    const ql_backend *b = NULL;
    QL_TRY(backend_get(&b));
    QL_TRY(backend_ask(b, &p));
    devices = p.devices;
    be = b;
    return QL_OK;
}

/* ---- ranks ------------------------------------------------------------------------------------ */

static ql_status in_rank(int rank, int world, body f)
{
    seat s = {.rank = rank, .world = world, .be = be, .t = be->comm};
    ql_comm_setup set = {.rank = rank, .world = world, .shared = shared->room, .shared_bytes = sizeof shared->room, .abort = &shared->abort,
                         .timeout_ms = 10000};
    ql_dev_memory before, after;
    QL_TRY(be->dev->open(rank, &s.dev));
    QL_TRY(be->dev->stream_open(s.dev, &s.s));
    QL_TRY(be->dev->memory(s.dev, &before));
    QL_TRY(s.t->open(s.dev, &set, &s.c));
    QL_TRY(f(&s));
    QL_TRY(be->dev->sync(s.s));
    QL_TRY(be->dev->memory(s.dev, &after));
    shared->memory[rank] = after.process - before.process - (after.allocated - before.allocated);
    s.t->close(s.c);
    be->dev->stream_close(s.s);
    be->dev->close(s.dev);
    return QL_OK;
}

static pid_t start(int rank, int world, body f, const setting *env)
{
    fflush(NULL);
    pid_t pid = fork();
    if (pid != 0) return pid;
    for (; env && env->name; env++) setenv(env->name, env->value, 1);
    ql_status st = in_rank(rank, world, f);
    if (st != QL_OK) {
        snprintf(shared->why[rank], sizeof shared->why[rank], "rank %d of %d: %s: %s", rank, world, ql_status_name(st), ql_error());
        shared->abort = 1;
    }
    _exit(st == QL_OK ? 0 : 1);
}

/* Waits for the ranks, at most 60 s; a death of `victim` raises the flag that the supervisor would raise. */
static ql_status run(int world, body f, const setting *env, int victim)
{
    pid_t pid[RANKS];
    int status, left = world, bad = 0;
    double until = seconds() + 60;
    if (!shared) shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    memset(shared, 0, sizeof *shared);
    for (int r = 0; r < world; r++) pid[r] = start(r, world, f, env);
    while (left) {
        if (victim >= 0 && pid[victim] && shared->started == world) {
            usleep(50000);
            kill(pid[victim], SIGKILL);
            shared->started = 0;
        }
        for (int r = 0; r < world; r++) {
            if (!pid[r] || waitpid(pid[r], &status, WNOHANG) != pid[r]) continue;
            pid[r] = 0, left--;
            if (r == victim) shared->abort = 1;
            bad += status != 0 && r != victim;
        }
        if (seconds() > until) {
            for (int r = 0; r < world; r++)
                if (pid[r]) kill(pid[r], SIGKILL);
            QL_FAIL(QL_EPEER, "the ranks hang");
        }
        usleep(1000);
    }
    for (int r = 0; r < world; r++)
        if (shared->why[r][0] && !strstr(shared->why[r], "another rank failed")) QL_FAIL(QL_EINTERNAL, "%s", shared->why[r]);
    if (bad) QL_FAIL(QL_EINTERNAL, "%d ranks of %d failed: %s", bad, world, shared->why[0]);
    return QL_OK;
}

static uint32_t value(int rank, int64_t i)
{
    return (uint32_t)rank * 1000003u + (uint32_t)i * 7u + 1;
}

/* n numbers of this rank, and room for `room` more, on the device. */
static ql_status numbers(seat *s, int64_t n, int64_t room, uint32_t **in, uint32_t **out)
{
    uint32_t *host = malloc((size_t)n * 4 + 4);
    if (!host) QL_FAIL(QL_ENOMEM, "no memory");
    for (int64_t i = 0; i < n; i++) host[i] = value(s->rank, i);
    QL_TRY(s->be->dev->alloc(s->dev, n * 4, (void **)in));
    QL_TRY(s->be->dev->alloc(s->dev, room * 4, (void **)out));
    QL_TRY(s->be->dev->copy(s->s, *in, host, n * 4));
    QL_TRY(s->be->dev->set(s->s, *out, 0xEE, room * 4));
    QL_TRY(s->be->dev->sync(s->s));
    free(host);
    return QL_OK;
}

static ql_status fetch(seat *s, const void *from, int64_t bytes, void **out)
{
    void *host = malloc((size_t)bytes + 4);
    if (!host) QL_FAIL(QL_ENOMEM, "no memory");
    QL_TRY(s->be->dev->copy(s->s, host, from, bytes));
    QL_TRY(s->be->dev->sync(s->s));
    *out = host;
    return QL_OK;
}

#define WRONG(what, n) QL_FAIL(QL_EINTERNAL, "%s of %lld elements: wrong value", what, (long long)(n))

/* Odd sizes, small and of many megabytes. */
static const int64_t sizes[] = {1, 1000, 32767, 100003, (6 << 20) + 5};
enum { SIZES = sizeof sizes / sizeof *sizes };

static ql_status gathers(seat *s)
{
    int64_t sent = 0;
    for (int k = 0; k < SIZES; k++) {
        int64_t n = sizes[k], all = n * s->world;
        uint32_t *in = NULL, *out = NULL, *got = NULL;
        QL_TRY(numbers(s, n, all, &in, &out));
        for (int round = 0; round < 2; round++) { /* the second time in place */
            ql_tensor to = ql_vec(out, QL_I32, all), from = round ? ql_cols(to, s->rank * n, n) : ql_vec(in, QL_I32, n);
            if (round) QL_TRY(s->be->dev->set(s->s, out, 0, all * 4));
            if (round) QL_TRY(s->be->dev->copy(s->s, from.data, in, n * 4));
            QL_TRY(s->t->all_gather(s->c, s->s, to, from));
            QL_TRY(fetch(s, out, all * 4, (void **)&got));
            for (int64_t i = 0; i < all; i++)
                if (got[i] != value((int)(i / n), i % n)) WRONG(round ? "all_gather in place" : "all_gather", n);
            free(got);
            sent += (s->world - 1) * n * 4;
        }
        s->be->dev->free(s->dev, in), s->be->dev->free(s->dev, out);
    }
    if (s->t->bytes_sent(s->c) != sent) QL_FAIL(QL_EINTERNAL, "bytes_sent");
    return QL_OK;
}

static ql_status exchanges(seat *s)
{
    for (int k = 0; k < SIZES; k++) {
        int64_t n = sizes[k] * s->world;
        uint32_t *in = NULL, *out = NULL, *got = NULL;
        QL_TRY(numbers(s, n, n, &in, &out));
        QL_TRY(s->t->all_to_all(s->c, s->s, ql_vec(out, QL_F32, n), ql_vec(in, QL_F32, n)));
        QL_TRY(fetch(s, out, n * 4, (void **)&got));
        for (int64_t i = 0; i < n; i++)
            if (got[i] != value((int)(i / sizes[k]), s->rank * sizes[k] + i % sizes[k])) WRONG("all_to_all", sizes[k]);
        free(got);
        s->be->dev->free(s->dev, in), s->be->dev->free(s->dev, out);
    }
    return QL_OK;
}

/* Sums that need all 64 bits, maxima with signs; floats are refused. */
static ql_status reductions(seat *s)
{
    enum { N = 20011 };
    static int32_t x[N], y[N];
    static int64_t z[N];
    void *dx = NULL, *dy = NULL, *dz = NULL;
    int32_t *gx = NULL, *gy = NULL;
    int64_t *gz = NULL, ranks = s->world * (s->world - 1) / 2;
    const ql_dev_table *d = s->be->dev;
    for (int i = 0; i < N; i++) x[i] = y[i] = (s->rank == i % s->world ? 1 : -1) * i, z[i] = ((int64_t)s->rank << 33) + i;
    QL_TRY(d->alloc(s->dev, sizeof x, &dx));
    QL_TRY(d->alloc(s->dev, sizeof y, &dy));
    QL_TRY(d->alloc(s->dev, sizeof z, &dz));
    QL_TRY(d->copy(s->s, dx, x, sizeof x));
    QL_TRY(d->copy(s->s, dy, y, sizeof y));
    QL_TRY(d->copy(s->s, dz, z, sizeof z));
    QL_TRY(s->t->all_sum(s->c, s->s, ql_vec(dx, QL_I32, N)));
    QL_TRY(s->t->all_max(s->c, s->s, ql_vec(dy, QL_I32, N)));
    QL_TRY(s->t->all_sum(s->c, s->s, ql_vec(dz, QL_I64, N)));
    QL_TRY(s->t->barrier(s->c, s->s));
    QL_TRY(fetch(s, dx, sizeof x, (void **)&gx));
    QL_TRY(fetch(s, dy, sizeof y, (void **)&gy));
    QL_TRY(fetch(s, dz, sizeof z, (void **)&gz));
    for (int i = 0; i < N; i++)
        if (gx[i] != (2 - s->world) * i || gy[i] != i || gz[i] != (ranks << 33) + (int64_t)s->world * i) WRONG("all_sum, all_max", N);
    if (s->t->all_sum(s->c, s->s, ql_vec(dx, QL_F32, N)) != QL_EINVAL) QL_FAIL(QL_EINTERNAL, "a sum of floats must be refused");
    ql_error_clear();
    free(gx), free(gy), free(gz);
    return QL_OK;
}

/* Two messages from each rank to each other one as one group, then a ring. */
static ql_status groups(seat *s)
{
    enum { N = 70001 };
    uint32_t *in = NULL, *out = NULL, *got = NULL;
    int next = (s->rank + 1) % s->world, before = (s->rank + s->world - 1) % s->world;
    if (s->world == 1) return QL_OK;
    QL_TRY(numbers(s, 2 * N, 2 * N * RANKS, &in, &out));
    QL_TRY(s->t->group_begin(s->c));
    for (int p = 0; p < s->world; p++)
        for (int m = 0; m < 2 && p != s->rank; m++) {
            QL_TRY(s->t->send(s->c, s->s, ql_vec(in + m * N, QL_I32, N), p));
            QL_TRY(s->t->recv(s->c, s->s, ql_vec(out + (2 * p + m) * N, QL_I32, N), p));
        }
    QL_TRY(s->t->group_end(s->c));
    QL_TRY(s->t->land(s->c, NULL));
    QL_TRY(fetch(s, out, 2 * N * s->world * 4, (void **)&got));
    for (int p = 0; p < s->world; p++)
        for (int64_t i = 0; i < 2 * N && p != s->rank; i++)
            if (got[2 * p * N + i] != value(p, i)) WRONG("a group of sends", N);
    free(got);
    QL_TRY(s->t->group_begin(s->c));
    QL_TRY(s->t->send(s->c, s->s, ql_vec(in, QL_I32, 10), next));
    QL_TRY(s->t->recv(s->c, s->s, ql_vec(out, QL_I32, 10), before));
    QL_TRY(s->t->group_end(s->c));
    QL_TRY(s->t->land(s->c, NULL));
    QL_TRY(fetch(s, out, 40, (void **)&got));
    if (got[9] != value(before, 9)) WRONG("a ring", 10);
    free(got);
    if (s->t->send(s->c, s->s, ql_vec(in, QL_I32, 10), s->world) != QL_EINVAL) QL_FAIL(QL_EINTERNAL, "a send to nobody must be refused");
    ql_error_clear();
    return QL_OK;
}

static ql_status everything(seat *s)
{
    QL_TRY(gathers(s));
    QL_TRY(exchanges(s));
    QL_TRY(reductions(s));
    return groups(s);
}

static const setting no_peers[] = {{"NCCL_P2P_DISABLE", "1"}, {NULL, NULL}};

TEST(collectives_move_the_right_bytes)
{
    CHECK_OK(ground());
    for (int world = 1; world <= devices && world <= RANKS; world *= 2) CHECK_OK(run(world, everything, NULL, -1));
    if (devices == 1) printf("# one GPU: NO COLLECTIVE WENT BETWEEN GPUS\n");
}

TEST(collectives_through_host_memory)
{
    CHECK_OK(ground());
    if (devices == 1) NOT_RUN("one GPU");
    CHECK_OK(run(2, everything, no_peers, -1));
}

/* ---- failures --------------------------------------------------------------------------------- */

static ql_status for_ever(seat *s)
{
    enum { N = 4 << 20 };
    uint32_t *in = NULL, *out = NULL;
    double last = seconds();
    QL_TRY(numbers(s, N, N * s->world, &in, &out));
    QL_TRY(s->t->barrier(s->c, s->s));
    __atomic_add_fetch(&shared->started, 1, __ATOMIC_SEQ_CST);
    for (;;) {
        ql_status st = s->t->all_gather(s->c, s->s, ql_vec(out, QL_I32, (int64_t)N * s->world), ql_vec(in, QL_I32, N));
        if (st == QL_OK) st = s->t->barrier(s->c, s->s);
        if (st == QL_OK) {
            last = seconds();
            continue;
        }
        if (st != QL_EPEER || seconds() - last > 3) QL_FAIL(QL_EINTERNAL, "status %s after %.1f s", ql_status_name(st), seconds() - last);
        ql_error_clear();
        double again = seconds();
        if (s->t->barrier(s->c, s->s) != QL_EPEER || seconds() - again > 0.1) QL_FAIL(QL_EINTERNAL, "a later call must fail at once");
        _exit(0); /* as ranks do: nothing is closed any more */
    }
}

TEST(a_killed_rank_ends_the_others)
{
    CHECK_OK(ground());
    if (devices == 1) NOT_RUN("one GPU");
    for (int victim = 0; victim < 2; victim++) {
        CHECK_OK(run(2, for_ever, NULL, victim));
        CHECK_OK(run(2, for_ever, no_peers, victim));
    }
    CHECK_OK(run(2, everything, NULL, -1)); /* the devices are as good as before */
}

static ql_status opens_only(seat *s)
{
    return s->t->barrier(s->c, s->s);
}

/* In a mount namespace of its own, so that nobody else sees it. */
TEST(a_small_dev_shm_is_named)
{
    CHECK_OK(ground());
    if (devices == 1) NOT_RUN("one GPU");
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) || mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=64k"))
            _exit(77);
        ql_status st = run(2, opens_only, no_peers, -1);
        if (st != QL_OK && strstr(ql_error(), "/dev/shm is too small")) _exit(0);
        fprintf(stderr, "%s\n", st == QL_OK ? "64 KiB of /dev/shm were enough" : ql_error());
        _exit(1);
    }
    int status = 0;
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77) NOT_RUN("this system lets nobody mount");
    CHECK_MSG(status == 0, "NCCL without room in /dev/shm did not fail with its name (status %d)", status);
}

/* ---- figures ---------------------------------------------------------------------------------- */

enum { PART = 64 << 20, TIMES = 20 };

static ql_status measured(seat *s)
{
    const ql_dev_table *d = s->be->dev;
    ql_event *a = NULL, *b = NULL;
    void *in = NULL, *out = NULL;
    double ms = 0;
    QL_TRY(d->alloc(s->dev, (int64_t)PART * s->world, &in));
    QL_TRY(d->alloc(s->dev, (int64_t)PART * s->world, &out));
    QL_TRY(d->event_open(s->dev, &a));
    QL_TRY(d->event_open(s->dev, &b));
    for (int what = 0; what < 2; what++)
        for (int i = -3; i <= TIMES; i++) {
            if (i == 0) QL_TRY(d->record(s->s, a));
            if (i == TIMES) {
                QL_TRY(d->record(s->s, b));
                QL_TRY(d->elapsed(a, b, &ms));
                shared->rate[s->rank][what] = (double)PART * (s->world - 1) * TIMES / ms * 1e-6;
                break;
            }
            if (what == 0)
                QL_TRY(s->t->all_gather(s->c, s->s, ql_vec(out, QL_U8, (int64_t)PART * s->world), ql_vec(in, QL_U8, PART)));
            else
                QL_TRY(s->t->all_to_all(s->c, s->s, ql_vec(out, QL_U8, (int64_t)PART * s->world), ql_vec(in, QL_U8, (int64_t)PART * s->world)));
        }
    d->event_close(a), d->event_close(b);
    d->free(s->dev, in), d->free(s->dev, out);
    return QL_OK;
}

static int bench(void)
{
    static const struct {
        const char *name;
        setting env[4];
    } cases[] = {
        {"the engine's settings", {{NULL, NULL}}},
        {"NCCL_MAX_CTAS=32", {{"NCCL_MAX_CTAS", "32"}, {NULL, NULL}}},
        {"NCCL_MAX_CTAS=16", {{"NCCL_MAX_CTAS", "16"}, {NULL, NULL}}},
        {"NCCL_MAX_CTAS=8", {{"NCCL_MAX_CTAS", "8"}, {NULL, NULL}}},
        {"NCCL_MAX_CTAS=4", {{"NCCL_MAX_CTAS", "4"}, {NULL, NULL}}},
        {"NCCL_MAX_CTAS=8 NCCL_BUFFSIZE=1M", {{"NCCL_MAX_CTAS", "8"}, {"NCCL_BUFFSIZE", "1048576"}, {NULL, NULL}}},
        {"NCCL_MAX_CTAS=4 NCCL_BUFFSIZE=1M", {{"NCCL_MAX_CTAS", "4"}, {"NCCL_BUFFSIZE", "1048576"}, {NULL, NULL}}},
        {"NCCL_MAX_CTAS=8 NCCL_PROTO=Simple", {{"NCCL_MAX_CTAS", "8"}, {"NCCL_PROTO", "Simple"}, {NULL, NULL}}},
        {"NCCL_CUMEM_ENABLE=0", {{"NCCL_CUMEM_ENABLE", "0"}, {NULL, NULL}}},
        {"NCCL_P2P_DISABLE=1", {{"NCCL_P2P_DISABLE", "1"}, {NULL, NULL}}},
        {"NCCL_P2P_DISABLE=1 NCCL_MAX_CTAS=4", {{"NCCL_P2P_DISABLE", "1"}, {"NCCL_MAX_CTAS", "4"}, {NULL, NULL}}},
    };
    if (ground() != QL_OK || devices == 1) {
        printf("NCCL was not measured: %s\n", devices == 1 ? "one GPU" : ql_error());
        return devices != 1;
    }
    printf("| NCCL, 2 ranks, 64 MiB each | all-gather GB/s | all-to-all GB/s | MiB of each GPU |\n|---|---|---|---|\n");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (run(2, measured, cases[i].env, -1) != QL_OK) {
            printf("| %s | %.300s |||\n", cases[i].name, ql_error());
            ql_error_clear();
            continue;
        }
        printf("| %s | %.1f | %.1f | %lld |\n", cases[i].name, shared->rate[0][0], shared->rate[0][1], (long long)(shared->memory[0] >> 20));
        fflush(stdout);
    }
    return 0;
}

int main(int argc, char **argv)
{
    static const test_entry all[] = {T(collectives_move_the_right_bytes), T(collectives_through_host_memory),
                                     T(a_killed_rank_ends_the_others), T(a_small_dev_shm_is_named)};
    if (argc == 2 && strcmp(argv[1], "--bench") == 0) return bench();
    return test_run(all, (int)(sizeof all / sizeof *all), argc, argv);
}
