/* Ranks as threads of one process, from placing to the last checkpoint: the same bits as ever, and where one stops or fails, all leave.
 * Under `make tsan` a sanitizer watches what they share. (Forked ranks share less, and are what runs really are: test_exact.c.) */
#include "core/ckpt.h"
#include "tests/exact/exact.h"
#include "tests/threads.h"

typedef struct {
    const exact_setting *setting;
    const char *dir;
    ql_status ended[QL_MAX_WORLD];
} threads_job;

static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER; /* the test's own helpers are not made for threads */

static ql_status body(ql_rank_setup *setup, void *arg)
{
    threads_job *job = arg;
    ql_task *task = NULL;
    char log[QL_PATH_MAX];
    ql_launch launch = {.be = setup->be};
    ql_events_setup nobody = {.fd = -1};
    ql_rank_process p = {.rank = setup->rank, .world = setup->world, .shared = setup->shared, .launch = &launch, .setup = *setup};
    ql_status st = QL_OK;
    pthread_mutex_lock(&opening);
    st = exact_task(job->setting, &task);
    pthread_mutex_unlock(&opening);
    QL_GO(st);
    QL_GO(ql_events_open(&nobody, &p.out));
    QL_GO(ql_path_join(log, job->dir, "events.jsonl"));
    if (setup->rank == 0) QL_GO(ql_events_log(p.out, log));
    st = job->ended[setup->rank] = exact_worker(&p, task);
out:
    ql_events_close(p.out);
    ql_task_close(task);
    return st == QL_ESTOP ? QL_OK : st;
}

/* The steps of the log; adapters of all ranks must be the same. */
static ql_status take(const exact_setting *s, const char *dir, exact_outcome *o)
{
    char log[QL_PATH_MAX], *text = NULL, *save = NULL;
    size_t n = 0;
    QL_TRY(ql_path_join(log, dir, "events.jsonl"));
    QL_TRY(ql_file_read(log, 1 << 22, &text, &n));
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        json_t *e = json_loads(line, 0, NULL);
        exact_take(o, e);
        json_decref(e);
    }
    free(text);
    for (int r = 1; r < s->world; r++)
        if (memcmp(exact_mem->adapters[0], exact_mem->adapters[r], (size_t)o->elements * 4) != 0)
            QL_FAIL(QL_EINTERNAL, "rank %d ended with other adapters than rank 0", r);
    return QL_OK;
}

static ql_status train(const exact_setting *s, const char *dir, const char *resume, threads_job *job, exact_outcome *o)
{
    ql_task *t = NULL;
    memset(job, 0, sizeof *job);
    job->setting = s, job->dir = dir;
    if (!exact_mem) exact_mem = mmap(NULL, sizeof *exact_mem, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    memset(exact_mem, 0, offsetof(exact_shared, adapters));
    QL_TRY(exact_place());
    QL_TRY(exact_task(s, &t));
    o->elements = t->lora->elements;
    exact_now.command = json_pack("{s:s,s:s,s:i,s:s?}", "cmd", "train", "run", dir, "steps", EXACT_STEPS, "resume", resume);
    ql_status st = run_threads(&t->spec, s->world, body, job);
    json_decref(exact_now.command);
    ql_task_close(t);
    return st;
}

/* One run in full; o->adapters is the caller's to free. */
static ql_status run(const exact_setting *s, const char *dir, const char *resume, exact_outcome *o)
{
    threads_job job;
    QL_TRY(train(s, dir, resume, &job, o));
    QL_TRY(take(s, dir, o));
    o->adapters = malloc((size_t)o->elements * 4);
    if (!o->adapters) QL_FAIL(QL_ENOMEM, "no memory");
    memcpy(o->adapters, exact_mem->adapters[0], (size_t)o->elements * 4);
    return QL_OK;
}

/* The job of a setting on one rank, everything resident and kept. */
static exact_setting alone(const exact_setting *s)
{
    return (exact_setting){.model = s->model, .dtype = s->dtype, .adam = s->adam, .packed = s->packed, .world = 1, .keep = QL_KEEP_ALL};
}

TEST(threads_give_the_same_bits)
{
    static const exact_setting cases[] = {
        {.world = 2, .store = 1, .save = 1, .paged = 1},
        {.model = 1, .dtype = 1, .adam = 1, .packed = 1, .world = 4, .store = 4, .schedule = QL_BREADTH, .keep = 3, .save = 2},
        {.model = 2, .dtype = 2, .world = 2, .store = 2, .keep = 1, .paged = 1},
        {.model = 3, .adam = 2, .world = 2, .store = 6, .keep = 2},
        {.model = 2, .dtype = 1, .world = 4, .schedule = QL_PIPE_AHEAD, .store = 2, .save = 2, .keep = 3, .paged = 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        exact_setting one = alone(&cases[i]);
        exact_outcome want = {0}, got = {0};
        char name[256];
        exact_describe(&cases[i], name, sizeof name);
        CHECK_OK(run(&one, tmp_dir("one"), NULL, &want));
        CHECK_OK(run(&cases[i], tmp_dir("many"), NULL, &got));
        CHECK_INT(got.steps, EXACT_STEPS);
        ql_status st = exact_differs(&cases[i], &want, &got);
        free(want.adapters);
        free(got.adapters);
        CHECK_MSG(st == QL_OK, "%s: %s", name, ql_error());
    }
}

/* ---- at some collective of rank 1 --------------------------------------------------------------- */

typedef enum { AT_STOP, AT_FAILURE } at_what;
static struct {
    at_what what;
    int call, seen;
    ql_shared *shared;
} at;
static const ql_backend *real;
static ql_comm_table comm_table;

static ql_status open_here(ql_dev *d, const ql_comm_setup *s, ql_comm **out)
{
    at.shared = (ql_shared *)((char *)(uintptr_t)s->abort - offsetof(ql_shared, abort));
    return real->comm->open(d, s, out);
}

static ql_status gather_here(ql_comm *c, ql_stream *s, ql_tensor out, ql_tensor in)
{
    if (++at.seen == at.call) {
        if (at.what == AT_FAILURE) QL_FAIL(QL_EPEER, "made to fail: all_gather %d", at.call);
        __atomic_store_n(&at.shared->stop, 1, __ATOMIC_RELEASE);
    }
    return real->comm->all_gather(c, s, out, in);
}

/* A pipeline gathers nothing: there its sends count. */
static ql_status send_here(ql_comm *c, ql_stream *s, ql_tensor x, int to)
{
    if (++at.seen == at.call) {
        if (at.what == AT_FAILURE) QL_FAIL(QL_EPEER, "made to fail: send %d", at.call);
        __atomic_store_n(&at.shared->stop, 1, __ATOMIC_RELEASE);
    }
    return real->comm->send(c, s, x, to);
}

static const ql_backend *watched(int rank, const ql_backend *be)
{
    static ql_backend mine;
    if (rank != 1) return be;
    real = be;
    comm_table = *be->comm;
    comm_table.open = open_here, comm_table.all_gather = gather_here, comm_table.send = send_here;
    mine = (ql_backend){be->name, be->dev, be->ops, &comm_table};
    return &mine;
}

static void stop_and_resume(exact_setting s)
{
    exact_setting one = alone(&s), two = {.model = s.model, .world = 2, .store = 2};
    exact_outcome want = {0};
    CHECK_OK(run(&one, tmp_dir("one"), NULL, &want));
    for (int call = 20; call < 80; call += 29) {
        exact_outcome got = {0};
        threads_job job;
        char dir[QL_PATH_MAX], checkpoint[QL_PATH_MAX];
        snprintf(dir, sizeof dir, "%s", tmp_dir("stopped"));
        exact_wrap = watched;
        at.what = AT_STOP, at.call = call, at.seen = 0;
        ql_status st = train(&s, dir, NULL, &job, &got);
        exact_wrap = NULL;
        CHECK_OK(st);
        for (int r = 0; r < s.world; r++) CHECK_INT(job.ended[r], QL_ESTOP);
        CHECK_OK(ql_ckpt_find(dir, checkpoint));
        CHECK_OK(run(&two, dir, checkpoint, &got)); /* another world and store go on */
        st = exact_differs(&s, &want, &got);
        free(got.adapters);
        CHECK_MSG(st == QL_OK, "stopped at call %d: %s", call, ql_error());
    }
    free(want.adapters);
}

TEST(a_stop_is_agreed_on_and_resumed) { stop_and_resume((exact_setting){.world = 4, .store = 1, .save = 1, .paged = 1}); }
TEST(stages_agree_on_a_stop) { stop_and_resume((exact_setting){.model = 2, .world = 4, .schedule = QL_PIPE_AHEAD}); }

static void failure(exact_setting s)
{
    for (int call = 1; call < 80; call += call < 3 ? 2 : 29) { /* two are made while loading */
        exact_outcome got = {0};
        threads_job job;
        double from = ql_now();
        exact_wrap = watched;
        at.what = AT_FAILURE, at.call = call, at.seen = 0;
        ql_status st = train(&s, tmp_dir("failed"), NULL, &job, &got);
        exact_wrap = NULL;
        CHECK_FAILS(st, QL_EPEER, "rank");
        CHECK_MSG(strstr(exact_mem->why[1], "made to fail"), "rank 1 says: %s", exact_mem->why[1]);
        for (int r = 0; r < s.world; r++) CHECK(job.ended[r] != QL_OK && exact_mem->why[r][0]);
        CHECK(ql_now() - from < 120); /* under a sanitizer, too */
    }
}

TEST(a_failure_ends_all) { failure((exact_setting){.world = 4, .store = 1}); }
TEST(a_failure_ends_all_stages) { failure((exact_setting){.model = 2, .world = 4, .schedule = QL_PIPE}); }

int main(int argc, char **argv)
{
    static const test_entry tests[] = {T(threads_give_the_same_bits), T(a_stop_is_agreed_on_and_resumed), T(a_failure_ends_all),
                                       T(stages_agree_on_a_stop), T(a_failure_ends_all_stages)};
    ql_backend_cpu_start(argv);
    return test_run(tests, (int)(sizeof tests / sizeof *tests), argc, argv);
}
