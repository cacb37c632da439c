/* The CPU collectives, over forked ranks. */
#include "tests/test.h"

#include "kernels/comm.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    int rank, world;
    ql_comm *c;
    const ql_comm_table *t;
    int *flags; /* shared ints: 0 is abort, the rest are the test's */
} seat;
/* Returns NULL or what went wrong. */
typedef const char *(*body)(seat *s);

static char *shared;
static size_t shared_size;

static void share(int world)
{
    shared_size = (size_t)ql_backend_cpu()->comm->shared_bytes(world) + 4096;
    shared = mmap(NULL, shared_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

static pid_t start_rank(int rank, int world, int64_t timeout_ms, body f)
{
    pid_t pid = fork();
    if (pid != 0) return pid;
    seat s = {.rank = rank, .world = world, .t = ql_backend_cpu()->comm};
    ql_comm_setup setup = {
        .rank = rank, .world = world, .shared = shared + 4096, .timeout_ms = timeout_ms};
    s.flags = (int *)(void *)shared;
    setup.shared_bytes = (int64_t)shared_size - 4096, setup.abort = s.flags;
    const char *why = s.t->open(NULL, &setup, &s.c) == QL_OK ? f(&s) : ql_error();
    if (why) fprintf(stderr, "rank %d of %d: %s [%s]\n", rank, world, why, ql_error());
    s.t->close(s.c);
    _exit(why ? 1 : 0);
}

/* Runs f in `world` ranks; true if all were content. victim ≥ 0: that rank is killed after 100 ms.
 */
static int run_ranks(int world, int64_t timeout_ms, body f, int victim)
{
    pid_t pid[8];
    int good = 0, status;
    share(world);
    for (int r = 0; r < world; r++) pid[r] = start_rank(r, world, timeout_ms, f);
    if (victim >= 0) {
        usleep(100000);
        kill(pid[victim], SIGKILL);
    }
    for (int r = 0; r < world; r++)
        good += waitpid(pid[r], &status, 0) == pid[r] && (status == 0 || r == victim);
    munmap(shared, shared_size);
    return good == world;
}

static uint32_t value(int rank, int64_t i)
{
    return (uint32_t)rank * 1000003u + (uint32_t)i * 7u;
}

static uint32_t *numbers(int rank, int64_t n)
{
    uint32_t *x = malloc((size_t)n * sizeof *x + 1);
    for (int64_t i = 0; i < n; i++) x[i] = value(rank, i);
    return x;
}

/* Odd sizes below and far above a mailbox, twice each, so that rings wrap. */
static const int64_t sizes[] = {0, 1, 1000, 32767, 100003, 1, 100003};
enum { SIZES = sizeof sizes / sizeof *sizes };

static const char *gathers(seat *s)
{
    int64_t sent = 0;
    for (int k = 0; k < SIZES; k++) {
        int64_t n = sizes[k];
        uint32_t *in = numbers(s->rank, n), *out = malloc((size_t)(n * s->world) * 4 + 1);
        ql_tensor to = ql_vec(out, QL_I32, n * s->world);
        if (s->t->all_gather(s->c, NULL, to, ql_vec(in, QL_I32, n)) != QL_OK) return "all_gather";
        for (int64_t i = 0; i < n * s->world; i++)
            if (out[i] != value((int)(i / n), i % n)) return "all_gather: wrong value";
        /* In place: in is out's own part. */
        memset(out, 0, (size_t)(n * s->world) * 4);
        memcpy(out + s->rank * n, in, (size_t)n * 4);
        if (s->t->all_gather(s->c, NULL, to, ql_cols(to, s->rank * n, n)) != QL_OK)
            return "in place";
        for (int64_t i = 0; i < n * s->world; i++)
            if (out[i] != value((int)(i / n), i % n)) return "all_gather in place: wrong value";
        sent += 2 * (s->world - 1) * n * 4;
        free(in), free(out);
    }
    return s->t->bytes_sent(s->c) == sent ? NULL : "bytes_sent";
}

static const char *scatters(seat *s)
{
    int64_t sent = 0;
    for (int k = 0; k < SIZES; k++) {
        int64_t n = sizes[k] * s->world;
        uint32_t *in = numbers(s->rank, n), *out = malloc((size_t)n * 4 + 1);
        if (s->t->all_to_all(s->c, NULL, ql_vec(out, QL_F32, n), ql_vec(in, QL_F32, n)) != QL_OK)
            return "all_to_all";
        for (int64_t i = 0; i < n; i++)
            if (out[i] != value((int)(i / sizes[k]), s->rank * sizes[k] + i % sizes[k]))
                return "all_to_all: wrong value";
        sent += (s->world - 1) * sizes[k] * 4;
        free(in), free(out);
    }
    return s->t->bytes_sent(s->c) == sent ? NULL : "bytes_sent";
}

static const char *reductions(seat *s)
{
    enum { N = 20011 };
    static int32_t x[N], y[N];
    static int64_t z[N];
    int ranks = s->world * (s->world - 1) / 2;
    for (int i = 0; i < N; i++)
        x[i] = y[i] = (s->rank == i % s->world ? 1 : -1) * i, z[i] = ((int64_t)s->rank << 33) + i;
    if (s->t->all_sum(s->c, NULL, ql_vec(x, QL_I32, N)) ||
        s->t->all_max(s->c, NULL, ql_vec(y, QL_I32, N)) ||
        s->t->all_sum(s->c, NULL, ql_vec(z, QL_I64, N)) || s->t->barrier(s->c, NULL))
        return "reduction";
    for (int i = 0; i < N; i++)
        if (x[i] != (2 - s->world) * i || y[i] != i ||
            z[i] != ((int64_t)ranks << 33) + (int64_t)s->world * i)
            return "reduction: wrong value";
    if (s->t->all_sum(s->c, NULL, ql_vec(x, QL_F32, N)) != QL_EINVAL)
        return "floats must be refused";
    ql_error_clear();
    return s->t->bytes_sent(s->c) == (s->world - 1) * (4 + 4 + 8) * N ? NULL : "bytes_sent";
}

/* Every rank to every other one at once, two messages each, all larger than a mailbox. */
static const char *groups(seat *s)
{
    enum { N = 70001 };
    uint32_t *in = numbers(s->rank, 2 * N), *out = calloc(2 * N * 8, 4);
    if (s->t->group_begin(s->c)) return "begin";
    for (int p = 0; p < s->world; p++)
        for (int m = 0; m < 2 && p != s->rank; m++) {
            if (s->t->send(s->c, NULL, ql_vec(in + m * N, QL_I32, N), p)) return "send";
            if (s->t->recv(s->c, NULL, ql_vec(out + (2 * p + m) * N, QL_I32, N), p)) return "recv";
        }
    if (s->t->group_end(s->c)) return "end";
    if (s->t->land(s->c, NULL)) return "land";
    for (int p = 0; p < s->world; p++)
        for (int64_t i = 0; i < 2 * N && p != s->rank; i++)
            if (out[2 * p * N + i] != value(p, i)) return "wrong value";
    /* A small message is buffered: a ring of sends before receives does not lock. */
    int next = (s->rank + 1) % s->world, before = (s->rank + s->world - 1) % s->world;
    if (s->world > 1 && s->t->send(s->c, NULL, ql_vec(in, QL_I32, 10), next)) return "ring send";
    if (s->world > 1 && s->t->recv(s->c, NULL, ql_vec(out, QL_I32, 10), before)) return "ring recv";
    if (s->world > 1 && out[9] != value(before, 9)) return "ring value";
    free(in), free(out);
    return NULL;
}

TEST(collectives_of_any_size)
{
    for (int world = 1; world <= 8; world += world < 4 ? 1 : 4) {
        CHECK(run_ranks(world, 60000, gathers, -1));
        CHECK(run_ranks(world, 60000, scatters, -1));
        CHECK(run_ranks(world, 60000, reductions, -1));
        CHECK(run_ranks(world, 60000, groups, -1));
    }
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Gathers for ever; the failure must name the rank in flags[1], within the deadline. */
static const char *until_failure(seat *s)
{
    enum { N = 50000 };
    static uint32_t in[N], out[N * 8];
    double last = seconds();
    for (;;) {
        ql_status st =
            s->t->all_gather(s->c, NULL, ql_vec(out, QL_I32, N * s->world), ql_vec(in, QL_I32, N));
        if (st == QL_OK) {
            last = seconds();
            continue;
        }
        if (st != QL_EPEER) return "another status";
        if (seconds() - last > 10) return "too late";
        ql_error_clear();
        double again = seconds();
        if (s->t->barrier(s->c, NULL) != QL_EPEER || seconds() - again > 0.8)
            return "a later call must fail at once";
        ql_error_clear();
        return NULL;
    }
}

TEST(killed_rank_is_noticed)
{
    for (int victim = 0; victim < 3; victim++) CHECK(run_ranks(3, 1000, until_failure, victim));
}

static const char *names_the_dead(seat *s)
{
    char x[64] = {0};
    if (s->rank == 1) return NULL; /* leaves without a word */
    double start = seconds();
    if (s->t->recv(s->c, NULL, ql_vec(x, QL_U8, 64), 1) != QL_EPEER) return "no failure";
    if (!strstr(ql_error(), "rank 1 made no progress in send"))
        return "the text does not name rank 1";
    double waited = seconds() - start;
    ql_error_clear();
    return waited > 0.19 && waited < 5 ? NULL : "not at the deadline";
}

TEST(deadline_names_the_rank)
{
    CHECK(run_ranks(2, 200, names_the_dead, -1));
}

static const char *aborted(seat *s)
{
    if (s->rank == 0) {
        usleep(100000);
        s->flags[0] = 1;
        return NULL;
    }
    double start = seconds();
    if (s->t->barrier(s->c, NULL) != QL_EPEER || seconds() - start > 20)
        return "the abort flag is not seen";
    ql_error_clear();
    return NULL;
}

TEST(abort_flag_ends_waiting)
{
    CHECK(run_ranks(3, 60000, aborted, -1));
}

static void *cancel_soon(void *arg)
{
    seat *s = arg;
    usleep(50000);
    s->t->cancel(s->c);
    return NULL;
}

static const char *cancelled(seat *s)
{
    pthread_t t;
    if (s->rank == 0) return usleep(500000), NULL;
    double start = seconds();
    if (pthread_create(&t, NULL, cancel_soon, s)) return "thread";
    ql_status st = s->t->barrier(s->c, NULL);
    pthread_join(t, NULL);
    if (st != QL_EPEER || seconds() - start > 20) return "cancel does not end the wait";
    ql_error_clear();
    return NULL;
}

TEST(cancel_ends_waiting)
{
    CHECK(run_ranks(2, 60000, cancelled, -1));
}

static const char *out_of_step(seat *s)
{
    int32_t x[8] = {0}, y[16];
    ql_status st = s->rank == 0
                       ? s->t->all_sum(s->c, NULL, ql_vec(x, QL_I32, 8))
                       : s->t->all_gather(s->c, NULL, ql_vec(y, QL_I32, 16), ql_vec(x, QL_I32, 8));
    if (st != QL_EINTERNAL) return "no failure";
    if (!strstr(ql_error(), s->rank ? "sent all_sum" : "sent all_gather")) return "text";
    ql_error_clear();
    return NULL;
}

TEST(different_calls_are_an_error)
{
    CHECK(run_ranks(2, 60000, out_of_step, -1));
}

TEST(setup_is_checked)
{
    const ql_comm_table *t = ql_backend_cpu()->comm;
    ql_comm *c = NULL;
    ql_comm_setup s = {.rank = 0, .world = 9};
    CHECK_FAILS(t->open(NULL, &s, &c), QL_EINVAL, "rank 0 of 9");
    s.world = 2;
    CHECK_FAILS(t->open(NULL, &s, &c), QL_EINVAL, "a shared block of 0 bytes");
    CHECK(c == NULL);
    t->close(NULL);
}

TEST_MAIN(T(collectives_of_any_size), T(killed_rank_is_noticed), T(deadline_names_the_rank),
          T(abort_flag_ends_waiting), T(cancel_ends_waiting), T(different_calls_are_an_error),
          T(setup_is_checked))
