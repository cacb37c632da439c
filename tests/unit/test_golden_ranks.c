/* The engine on two and four ranks against transformers, peft and bitsandbytes, in every mode of a run: the loss, every adapter gradient
 * and 20 optimizer steps are as close to theirs as one rank's are (test_golden.c). */
#include "core/cost.h"
#include "tests/golden/golden.h"
#include "tests/threads.h"

/* A step is four rows: micro-batches of one, so that each of two ranks has two. */
enum { BATCH = 1, GROUP = 4, STEPS = 20 };

static const struct {
    const char *name;
    int world;
    ql_schedule schedule;
    uint8_t store[2]; /* of even and odd layers */
    int keep;         /* ql_keep, or 3: by layer */
    int save;         /* layer inputs rest on the host */
    int state_host;
} modes[] = {
    {"loop", 2, QL_LOOP, {QL_STORE_RESIDENT, QL_STORE_RESIDENT}, QL_KEEP_ALL, 0, 0},
    {"recomputed", 2, QL_LOOP, {QL_STORE_RESIDENT, QL_STORE_RESIDENT}, QL_KEEP_INPUT, 0, 0},
    {"dequantised once", 2, QL_LOOP, {QL_STORE_RESIDENT16, QL_STORE_RESIDENT}, QL_KEEP_NO_MLP, 0, 0},
    {"sharded", 2, QL_LOOP, {QL_STORE_SHARDED, QL_STORE_SHARDED}, 3, 0, 0},
    {"host", 2, QL_LOOP, {QL_STORE_HOST, QL_STORE_HOST}, 3, 0, 0},
    {"breadth", 2, QL_BREADTH, {QL_STORE_SHARDED, QL_STORE_HOST}, QL_KEEP_INPUT, 0, 0},
    {"activations offloaded", 2, QL_LOOP, {QL_STORE_RESIDENT, QL_STORE_SHARDED}, QL_KEEP_INPUT, 1, 0},
    {"optimizer offloaded", 2, QL_LOOP, {QL_STORE_SHARDED, QL_STORE_RESIDENT}, QL_KEEP_ALL, 0, 1},
    {"1f1b", 2, QL_PIPE, {QL_STORE_RESIDENT, QL_STORE_RESIDENT}, QL_KEEP_ALL, 0, 0},
    {"recompute ahead", 2, QL_PIPE_AHEAD, {QL_STORE_RESIDENT, QL_STORE_RESIDENT}, QL_KEEP_INPUT, 0, 0},
    {"stages streamed from the host", 2, QL_PIPE_AHEAD, {QL_STORE_HOST, QL_STORE_HOST}, QL_KEEP_NO_MLP, 0, 1},
    {"four stages", 4, QL_PIPE_AHEAD, {QL_STORE_RESIDENT16, QL_STORE_HOST}, 3, 1, 0},
    {"all of it on four", 4, QL_BREADTH, {QL_STORE_SHARDED, QL_STORE_HOST}, 3, 1, 1},
};

typedef struct {
    gold g;
    ql_plan plan[QL_MAX_WORLD];
    float *grad, *adapters;     /* (elements, padded to the shards of all ranks) */
    float first;                /* loss of the first step */
    ql_step_result step[STEPS];
} job;

static ql_status read_back(ql_rank *r, float *to, const float *from, int64_t n)
{
    QL_TRY(r->set.be->dev->copy(r->compute, to, from, n * 4));
    return r->set.be->dev->sync(r->compute);
}

/* One step up to the reduction: each rank has its shard of the gradient. */
static ql_status first_step(job *j, ql_rank *r)
{
    ql_optim o = {.adam = {QL_ADAM_TORCH, 0.9f, 0.999f, 1e-8f, 0.01f}, .clip = {.max_norm = 1}};
    float lr[STEPS] = {0};
    ql_plan p = j->plan[r->set.rank];
    ql_step_data d = gold_step(&j->g, 0, BATCH);
    ql_step_result s;
    QL_TRY(ql_optim_init(r, &o, lr, 1));
    p.count--; /* all but STEP */
    QL_TRY(ql_rank_step(r, &p, &d, &s));
    if (r->set.rank == 0) j->first = s.loss;
    const ql_mem *m = r->mem;
    return read_back(r, j->grad + m->mine, m->grad[0] + m->mine - m->held_at, m->shard);
}

static ql_status all_steps(job *j, ql_rank *r)
{
    float lr[STEPS];
    ql_optim o = gold_optim(&j->g, lr);
    QL_TRY(ql_optim_init(r, &o, lr, 1));
    for (int i = 0; i < STEPS; i++) {
        ql_step_data d = gold_step(&j->g, i, BATCH);
        ql_step_result s;
        QL_TRY(ql_rank_step(r, &j->plan[r->set.rank], &d, &s));
        if (r->set.rank == 0) j->step[i] = s;
    }
    /* Every rank has all adapters, a stage its own; here each gives its part of them. */
    const ql_mem *m = r->mem;
    return read_back(r, j->adapters + m->mine, m->adapters + m->mine - m->held_at, m->shard);
}

static ql_status body(ql_rank_setup *setup, void *arg)
{
    job *j = arg;
    ql_rank *r = NULL;
    ql_status st = QL_OK;
    QL_GO(ql_rank_open(setup, &j->g.spec, &r));
    QL_GO(ql_rank_load(r));
    QL_GO(gold_adapters(&j->g, r));
    QL_GO(first_step(j, r));
    QL_GO(all_steps(j, r));
out:
    ql_rank_close(r);
    return st;
}

static void choose(job *j, size_t k)
{
    ql_spec *s = &j->g.spec;
    ql_choice *c = &s->choice;
    s->state_host = modes[k].state_host;
    c->world = modes[k].world, c->schedule = modes[k].schedule;
    c->g = GROUP, c->pieces = ql_plan_pieces(GROUP, c->world); /* in breadth a rank's micro-batches go together */
    for (int l = 0; l < c->layers; l++) {
        c->store[l] = modes[k].store[l % 2];
        c->keep[l] = (uint8_t)(modes[k].keep == 3 ? l % 3 : modes[k].keep);
        c->save[l] = (uint8_t)modes[k].save;
    }
    if (ql_plan_piped(c)) ql_cost_cut(s, s->rows);
}

static void check_tensors(job *j, const char *what, const float *got, double bound)
{
    for (int64_t i = 0; i < 2 * j->g.lora->count; i++) {
        char name[256];
        int64_t at;
        const ql_st_tensor *want = gold_tensor(&j->g, what, i, &at, name);
        CHECK_MSG(want, "%s: no %s", j->g.name, name);
        double e = relative(got + at, want->data, want->count);
        CHECK_MSG(e < bound, "%s: %s differs by %.2e", j->g.name, name, e);
    }
}

static void check(job *j, const char *mode)
{
    double loss = json_number_value(json_object_get(json_object_get(j->g.info, j->g.variant), "loss"));
    CHECK_MSG(fabs((double)j->first - loss) < 1e-6 * loss, "%s %s: loss %.8f, expected %.8f", j->g.name, mode, (double)j->first, loss);
    check_tensors(j, "grad", j->grad, 1e-5);
    for (int i = 0; i < STEPS && !test_bad; i++) {
        loss = gold_figure(&j->g, "losses", i);
        double norm = gold_figure(&j->g, "grad_norms", i);
        CHECK_MSG(fabs((double)j->step[i].loss - loss) < 1e-5 * loss, "%s %s step %d: loss %.8f, expected %.8f", j->g.name, mode, i,
                  (double)j->step[i].loss, loss);
        CHECK_MSG(fabs((double)j->step[i].norm - norm) < 1e-4 * norm, "%s %s step %d: norm %.8f, expected %.8f", j->g.name, mode, i,
                  (double)j->step[i].norm, norm);
    }
    if (!test_bad) check_tensors(j, "final", j->adapters, 1e-3);
}

static void run(const char *family)
{
    for (size_t k = 0; k < sizeof modes / sizeof *modes && !test_bad; k++) {
        job j = {.g = {.name = family, .folder = "model-nf4", .variant = "nf4"}};
        CHECK_OK(gold_open(&j.g));
        choose(&j, k);
        size_t room = (size_t)j.g.lora->elements + QL_MAX_WORLD * QL_OPT_BLOCK;
        j.grad = calloc(room, 4), j.adapters = calloc(room, 4);
        for (int r = 0; r < modes[k].world; r++) CHECK_OK(ql_plan_prove(&j.g.spec.choice, r, GROUP, &j.plan[r]));
        ql_status st = run_threads(&j.g.spec, modes[k].world, body, &j);
        CHECK_MSG(st == QL_OK, "%s %s: %s", family, modes[k].name, ql_error());
        check(&j, modes[k].name);
        for (int r = 0; r < modes[k].world; r++) ql_plan_free(&j.plan[r]);
        free(j.grad);
        free(j.adapters);
        gold_close(&j.g);
    }
}

TEST(llama) { run("llama"); }
TEST(mistral) { run("mistral"); }
TEST(qwen2) { run("qwen2"); }
TEST(qwen3) { run("qwen3"); }

TEST_MAIN(T(llama), T(mistral), T(qwen2), T(qwen3))
