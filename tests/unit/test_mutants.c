/* Plans with one action left out, done twice, or swapped with the next: each is refused at the action that it breaks, or it runs, within the
 * memory that was counted, to the same bits. */
#include "core/cost.h"
#include "tests/golden/golden.h"
#include "tests/threads.h"

enum { WORLD = 2, BATCH = 1, GROUP = 4, STEPS = 2, MUTANTS_MAX = 2048 };
typedef enum { DROPPED, DOUBLED, SWAPPED, MUTATIONS } mutation;
static const char *const mutation_names[] = {"left out", "twice", "swapped with the next"};

static const struct {
    const char *name;
    ql_schedule schedule;
    uint8_t store[2];
    int keep, save;
} modes[] = {
    {"sharded", QL_LOOP, {QL_STORE_SHARDED, QL_STORE_SHARDED}, QL_KEEP_INPUT, 1},
    {"breadth", QL_BREADTH, {QL_STORE_SHARDED, QL_STORE_HOST}, QL_KEEP_NO_MLP, 0},
    {"resident", QL_LOOP, {QL_STORE_RESIDENT, QL_STORE_RESIDENT16}, QL_KEEP_ALL, 1},
    {"pipeline", QL_PIPE, {QL_STORE_HOST, QL_STORE_RESIDENT}, QL_KEEP_INPUT, 0},
    {"recompute ahead", QL_PIPE_AHEAD, {QL_STORE_RESIDENT, QL_STORE_HOST}, QL_KEEP_NO_MLP, 0},
};

typedef struct {
    uint32_t loss[STEPS], norm[STEPS];
    uint64_t adapters; /* of this rank's, hashed */
} outcome;

typedef struct {
    ql_plan plan;
    int rank;          /* whose plan it replaces */
    char what[160];
    outcome out[WORLD];
} mutant;

typedef struct {
    gold g;
    ql_plan plan[WORLD];
    mutant *mutants;
    int count, refused;
} job;

/* ---- making them ------------------------------------------------------------------------------ */

static ql_plan mutate(const ql_plan *p, int i, mutation m)
{
    ql_plan q = *p;
    q.capacity = p->count + 1;
    q.a = malloc((size_t)q.capacity * sizeof *q.a);
    memcpy(q.a, p->a, (size_t)p->count * sizeof *q.a);
    if (m == DROPPED) {
        memmove(q.a + i, q.a + i + 1, (size_t)(--q.count - i) * sizeof *q.a);
    } else if (m == DOUBLED) {
        memmove(q.a + i + 1, q.a + i, (size_t)(q.count++ - i) * sizeof *q.a);
    } else {
        ql_action t = q.a[i];
        q.a[i] = q.a[i + 1];
        q.a[i + 1] = t;
    }
    return q;
}

/* The action that an error names; −1: the plan as a whole (something is missing at its end). */
static int named(const char *error)
{
    const char *p = strstr(error, "action ");
    return p ? atoi(p + 7) : -1;
}

/* Where a broken plan may be noticed: not before the mutation. Work that is done twice is noticed where it is; what only takes something
 * twice (a buffer, a reduction, a meeting) where that is missing or too much. */
static int right(const ql_action *a, mutation m, int i, int at)
{
    int work = a->what == QL_DO_BATCH || a->what == QL_DO_F || (a->what == QL_DO_HEAD && a->mb >= 0) || a->what == QL_DO_R ||
               a->what == QL_DO_B || a->what == QL_DO_SAVE || a->what == QL_DO_LOAD || a->what == QL_DO_GATHER || a->what == QL_DO_RELEASE;
    if (at < 0) return m != DOUBLED;
    return m == DOUBLED && work ? at == i + 1 : at >= i;
}

static void try_mutant(job *j, const ql_choice *c, int rank, int i, mutation m)
{
    char text[96];
    ql_plan all[WORLD], q = mutate(&j->plan[rank], i, m);
    memcpy(all, j->plan, sizeof all);
    all[rank] = q;
    ql_action_print(&j->plan[rank].a[i], text, sizeof text);
    ql_status st = ql_plan_check_world(c, all);
    if (st != QL_OK) {
        int at = named(ql_error());
        CHECK_MSG(right(&j->plan[rank].a[i], m, i, at), "rank %d, action %d (%s) %s: refused at %d: %s", rank, i, text, mutation_names[m], at, ql_error());
        ql_error_clear();
        j->refused++;
        ql_plan_free(&q);
        return;
    }
    CHECK(j->count < MUTANTS_MAX);
    mutant *x = &j->mutants[j->count++];
    *x = (mutant){.plan = q, .rank = rank};
    snprintf(x->what, sizeof x->what, "rank %d, action %d (%s) %s", rank, i, text, mutation_names[m]);
}

/* ---- running them ------------------------------------------------------------------------------ */

static uint64_t hash_of(const void *data, size_t n)
{
    uint64_t h = 1469598103934665603u;
    for (size_t i = 0; i < n; i++) h = (h ^ ((const unsigned char *)data)[i]) * 1099511628211u;
    return h;
}

static ql_status run_one(job *j, ql_rank *r, const ql_plan *p, outcome *out)
{
    float lr[20], *flat = malloc((size_t)r->mem->n * 4);
    ql_optim o = gold_optim(&j->g, lr);
    ql_status st = QL_OK;
    if (!flat) QL_FAIL(QL_ENOMEM, "no memory");
    QL_GO(gold_adapters(&j->g, r));
    QL_GO(ql_optim_init(r, &o, lr, 1));
    for (int i = 0; i < STEPS; i++) {
        ql_step_data d = gold_step(&j->g, i, BATCH);
        ql_step_result s;
        QL_GO(ql_rank_step(r, p, &d, &s));
        memcpy(&out->loss[i], &s.loss, 4);
        memcpy(&out->norm[i], &s.norm, 4);
    }
    QL_GO(ql_rank_get_adapters(r, flat));
    out->adapters = hash_of(flat, (size_t)r->mem->n * 4);
out:
    free(flat);
    return st;
}

static ql_status body(ql_rank_setup *setup, void *arg)
{
    job *j = arg;
    ql_rank *r = NULL;
    ql_dev_memory dm;
    ql_arena counted;
    ql_status st = QL_OK;
    QL_GO(ql_rank_open(setup, &j->g.spec, &r));
    QL_GO(ql_rank_load(r));
    for (int k = 0; k < j->count; k++) {
        mutant *m = &j->mutants[k];
        st = run_one(j, r, m->rank == setup->rank ? &m->plan : &j->plan[setup->rank], &m->out[setup->rank]);
        if (st != QL_OK) {
            char why[400];
            snprintf(why, sizeof why, "%s", ql_error());
            ql_error_clear();
            QL_GO(ql_fail(st, "%s: %s", m->what, why));
        }
    }
    QL_GO(setup->be->dev->memory(r->dev, &dm));
    QL_GO(ql_mem_count(&j->g.spec, setup->rank, &counted));
    if (dm.peak != counted.used) st = ql_fail(QL_EINTERNAL, "%lld bytes were taken, %lld counted", (long long)dm.peak, (long long)counted.used);
out:
    ql_rank_close(r);
    return st;
}

static void choose(job *j, size_t k)
{
    ql_choice *c = &j->g.spec.choice;
    c->world = WORLD, c->schedule = modes[k].schedule;
    c->g = GROUP, c->pieces = ql_plan_pieces(GROUP, c->schedule == QL_BREADTH ? WORLD : 8); /* breadth: two at a time */
    for (int l = 0; l < c->layers; l++) {
        c->store[l] = modes[k].store[l % 2];
        c->keep[l] = (uint8_t)modes[k].keep;
        c->save[l] = (uint8_t)modes[k].save;
    }
    if (ql_plan_piped(c)) ql_cost_cut(&j->g.spec, j->g.spec.rows);
}

static int alike(const ql_action *a, const ql_action *b)
{
    return a->what == b->what && a->mb == b->mb && a->layer == b->layer && a->slot == b->slot;
}

static void all_of(job *j, size_t k)
{
    const ql_choice *c = &j->g.spec.choice;
    choose(j, k);
    for (int r = 0; r < WORLD; r++) CHECK_OK(ql_plan_prove(c, r, GROUP, &j->plan[r]));
    /* The first one is the plan as it is. */
    j->mutants[j->count++] = (mutant){.plan = mutate(&j->plan[0], 0, SWAPPED), .rank = 0, .what = "as it is"};
    memcpy(j->mutants[0].plan.a, j->plan[0].a, (size_t)j->plan[0].count * sizeof *j->plan[0].a);
    for (int r = 0; r < WORLD; r++)
        for (int i = 0; i < j->plan[r].count && !test_bad; i++)
            for (int m = 0; m < MUTATIONS && !test_bad; m++) {
                const ql_action *a = &j->plan[r].a[i];
                if (m == SWAPPED && (i + 1 == j->plan[r].count || alike(a, a + 1))) continue;
                try_mutant(j, c, r, i, (mutation)m);
            }
    if (test_bad) return;
    CHECK(j->refused > 3 * j->count / 2 && j->count > 10);
    CHECK_OK(run_threads(&j->g.spec, WORLD, body, j));
    for (int i = 1; i < j->count; i++)
        CHECK_MSG(memcmp(j->mutants[i].out, j->mutants[0].out, sizeof j->mutants[0].out) == 0, "%s: %s: accepted, and other bits", modes[k].name,
                  j->mutants[i].what);
    printf("%s: %d mutants refused, %d run to the same bits\n", modes[k].name, j->refused, j->count - 1);
}

static void run(size_t k)
{
    job j = {.g = {.name = "llama", .folder = "model-nf4", .variant = "nf4"}};
    CHECK_OK(gold_open(&j.g));
    j.mutants = calloc(MUTANTS_MAX, sizeof *j.mutants);
    all_of(&j, k);
    for (int i = 0; i < j.count; i++) ql_plan_free(&j.mutants[i].plan);
    for (int r = 0; r < WORLD; r++) ql_plan_free(&j.plan[r]);
    free(j.mutants);
    gold_close(&j.g);
}

TEST(sharded) { run(0); }
TEST(breadth) { run(1); }
TEST(resident) { run(2); }
TEST(pipeline) { run(3); }
TEST(recompute_ahead) { run(4); }

TEST_MAIN(T(sharded), T(breadth), T(resident), T(pipeline), T(recompute_ahead))
