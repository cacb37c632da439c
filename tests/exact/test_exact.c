/* The exactness contract over forked ranks: a job's losses, gradient norms and adapters are the same bits for every number of ranks,
 * store, schedule, recomputation, offload and resume. Here every pair of settings meets at least once; `test_exact product` (make
 * exact) runs every way to run a job. `exact_cuda --backend=cuda` does the same with a GPU to a rank and fewer jobs. */
#include "core/sampler.h"
#include "tests/each_op.h"
#include "tests/exact/exact.h"

/* ---- references: the job on one rank, everything resident and kept ----------------------------- */

typedef struct {
    exact_setting job;
    exact_outcome out;
} reference;
static reference references[256];
static int reference_count;

static ql_status reference_of(const exact_setting *s, const exact_outcome **out)
{
    exact_setting job = {.model = s->model, .dtype = s->dtype, .adam = s->adam, .packed = s->packed, .group = s->group, .pieces = s->pieces, .world = 1,
                         .keep = QL_KEEP_ALL};
    for (int i = 0; i < reference_count; i++)
        if (memcmp(&references[i].job, &job, sizeof job) == 0) {
            *out = &references[i].out;
            return QL_OK;
        }
    if (reference_count == (int)(sizeof references / sizeof *references)) QL_FAIL(QL_EINTERNAL, "too many references");
    reference *r = &references[reference_count];
    QL_TRY(exact_run(&job, &r->out));
    r->job = job;
    reference_count++;
    *out = &r->out;
    return QL_OK;
}

/* The setting against its reference, in fp16 where a device has no bf16; the text of a failure begins with the setting. */
static ql_status compare(const exact_setting *asked)
{
    const exact_outcome *want = NULL;
    exact_outcome got = {0};
    exact_setting s = *asked;
    char name[256], why[1024];
    if (s.dtype == 1 && !exact_on.place.bf16) s.dtype = 2;
    exact_describe(&s, name, sizeof name);
    ql_status st = reference_of(&s, &want);
    if (st == QL_OK) st = exact_run(&s, &got);
    if (st == QL_OK) st = exact_differs(&s, want, &got);
    free(got.adapters);
    if (st == QL_OK) return QL_OK;
    snprintf(why, sizeof why, "%s", ql_error());
    ql_error_clear();
    return ql_fail(st, "%s: %s", name, why);
}

/* ---- all pairs -------------------------------------------------------------------------------- */

enum { FACTORS = 11, JOB_FACTORS = 4, WORLD = 4, STORE = 5, SCHEDULE = 6 };
static int levels[FACTORS] = {EXACT_MODELS, 3, 3, 2, 3, EXACT_STORES, QL_SCHEDULES, 4, 3, 2, 3};

/* A GPU's ranks take seconds to start: there the jobs are these, each in place of a model, and worlds as many as there are devices for. */
static const exact_setting gpu_jobs[EXACT_MODELS] = {{.model = 0}, {.model = 1, .dtype = 2, .adam = 2},
                                                     {.model = 2, .dtype = 1, .adam = 1, .packed = 1}, {.model = 3, .dtype = 1}};

static exact_setting setting_of(const int v[FACTORS])
{
    exact_setting s = {.model = v[0], .dtype = v[1], .adam = v[2], .packed = v[3]};
    if (exact_on.place.arch) s = gpu_jobs[v[0]];
    s.world = 1 << v[4], s.store = v[5], s.schedule = v[6], s.keep = v[7], s.save = v[8], s.paged = v[9], s.resume = v[10];
    return s;
}

static ql_status set_levels(void)
{
    QL_TRY(exact_place());
    if (!exact_on.place.arch) return QL_OK;
    levels[1] = levels[2] = levels[3] = 1;
    levels[4] = exact_world(4) == 4 ? 3 : exact_world(4);
    if (exact_on.devices == 1)
        printf("# one GPU: NOTHING OF test_exact WAS RUN ON SEVERAL; sharded layers were resident ones\n");
    else
        printf("# %d GPUs: up to %d ranks\n", exact_on.devices, exact_world(4));
    return QL_OK;
}

typedef struct {
    uint8_t seen[FACTORS][FACTORS][8][8];
    uint32_t random;
    int never; /* pairs that no row has */
} pairs;

/* Does a row really bring a and b together? A pipeline of one rank is a loop, and what cannot be shared among ranks is resident: such a
 * row stands for the two settings that make it so, and for nothing else of them. */
static int meets(const int v[FACTORS], int a, int b)
{
    const uint8_t *store = exact_stores[v[STORE]];
    int alone = v[WORLD] == 0, piped = v[SCHEDULE] >= QL_PIPE;
    if (alone && piped) return a == WORLD && b == SCHEDULE;
    if ((!alone && !piped) || (a != STORE && b != STORE)) return 1;
    if (store[0] != QL_STORE_SHARDED && store[1] != QL_STORE_SHARDED) return 1;
    return alone ? a == WORLD : b == SCHEDULE;
}

static int news(const pairs *p, const int v[FACTORS])
{
    int n = 0;
    for (int a = 0; a < FACTORS; a++)
        for (int b = a + 1; b < FACTORS; b++) n += !p->seen[a][b][v[a]][v[b]] && meets(v, a, b);
    return n;
}

static int next_random(pairs *p, int n)
{
    p->random = p->random * 1664525 + 1013904223;
    return (int)((p->random >> 8) % (uint32_t)n);
}

static int first_missing(const pairs *p, int at[4])
{
    for (int a = 0; a < FACTORS; a++)
        for (int b = a + 1; b < FACTORS; b++)
            for (int x = 0; x < levels[a]; x++)
                for (int y = 0; y < levels[b]; y++)
                    if (!p->seen[a][b][x][y]) {
                        at[0] = a, at[1] = b, at[2] = x, at[3] = y;
                        return 1;
                    }
    return 0;
}

/* The best of many random rows; each begins with a pair that is still missing. 0 when none is. */
static int next_row(pairs *p, int best[FACTORS])
{
    int at[4], most = 0;
    while (most == 0 && first_missing(p, at)) {
        for (int i = 0; i < 400; i++) {
            int v[FACTORS];
            for (int f = 0; f < FACTORS; f++) v[f] = next_random(p, levels[f]);
            v[at[0]] = at[2], v[at[1]] = at[3];
            int n = meets(v, at[0], at[1]) ? news(p, v) : 0;
            if (n > most) {
                most = n;
                memcpy(best, v, sizeof v);
            }
        }
        if (most == 0) p->seen[at[0]][at[1]][at[2]][at[3]] = 1, p->never++;
    }
    for (int a = 0; most && a < FACTORS; a++)
        for (int b = a + 1; b < FACTORS; b++) p->seen[a][b][best[a]][best[b]] |= (uint8_t)meets(best, a, b);
    return most;
}

TEST(every_pair_of_settings_gives_the_same_bits)
{
    static pairs p = {.random = 1};
    int v[FACTORS], runs = 0;
    CHECK_OK(set_levels());
    for (; next_row(&p, v); runs++) {
        exact_setting s = setting_of(v);
        CHECK_OK(compare(&s));
    }
    int stores = 0; /* what cannot be shared among ranks is no store of its own */
    for (int i = 0; i < EXACT_STORES; i++)
        stores += levels[WORLD] > 1 || (exact_stores[i][0] != QL_STORE_SHARDED && exact_stores[i][1] != QL_STORE_SHARDED);
    CHECK(runs >= stores * EXACT_MODELS && runs < 80);
    CHECK(p.never == 0 || levels[WORLD] == 1); /* one GPU shares nothing */
}

/* Losses must move, or equal bits say nothing. */
TEST(runs_learn)
{
    exact_setting s = {.world = 1};
    const exact_outcome *o = NULL;
    CHECK_OK(reference_of(&s, &o));
    float first, last;
    memcpy(&first, &o->loss[0], 4);
    memcpy(&last, &o->loss[EXACT_STEPS - 1], 4);
    CHECK(isfinite(first) && last < first - 0.05f);
    for (int i = 1; i < EXACT_STEPS; i++) CHECK(o->loss[i] != o->loss[i - 1] && o->norm[i] != o->norm[i - 1]);
    exact_setting half = {.world = 1, .dtype = 2};
    CHECK_OK(reference_of(&half, &o));
    CHECK(o->skipped > 0 && o->skipped < EXACT_STEPS / 2);
}

/* Groups that leave pieces of unequal size, and a world of which not every step keeps all ranks busy. */
TEST(odd_groups_are_exact_where_they_say_so)
{
    static const struct {
        int group, world, exact;
    } cases[] = {{6, 2, 1}, {12, 4, 1}, {4, 4, 1}, {2, 2, 1}, {6, 3, 0}, {9, 3, 0}, {5, 5, 0}, {12, 6, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        exact_setting s = {.group = cases[i].group, .world = cases[i].world, .store = 1};
        exact_outcome o = {0};
        CHECK_OK(exact_place());
        if (cases[i].world > exact_on.devices) continue;
        if (cases[i].exact) {
            CHECK_OK(compare(&s));
            continue;
        }
        CHECK_OK(exact_run(&s, &o));
        free(o.adapters);
        int said = 0;
        for (int k = 0; k < o.why.n; k++) said |= strstr(o.why.text[k], "not bit-exact") != NULL;
        CHECK_MSG(said, "group %d on %d ranks does not say that it is not bit-exact", cases[i].group, cases[i].world);
    }
}

/* As many as one machine has: a short last group leaves half of them without work. */
TEST(eight_ranks_are_exact)
{
    exact_setting cases[] = {{.world = 8, .store = 1}, {.model = 1, .dtype = 1, .adam = 1, .world = 8, .store = 4, .schedule = 1, .keep = 3,
                             .save = 2, .paged = 1, .resume = 2}, {.model = 2, .packed = 1, .world = 8, .store = 2, .keep = 1, .resume = 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) cases[i].pieces = 8;
    CHECK_OK(exact_place());
    if (exact_on.devices < 8) NOT_RUN("%d GPUs", exact_on.devices);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) CHECK_OK(compare(&cases[i]));
}

/* Pipelines of 2 to 8 stages, some of them without a layer, of which some learn nothing. */
TEST(pipelines_are_exact)
{
    exact_setting cases[] = {
        {.model = 2, .world = 2, .schedule = QL_PIPE, .keep = QL_KEEP_ALL},
        {.model = 2, .world = 2, .schedule = QL_PIPE, .keep = QL_KEEP_INPUT, .store = 2},
        {.model = 2, .world = 2, .schedule = QL_PIPE_AHEAD, .keep = QL_KEEP_INPUT},
        {.model = 0, .world = 4, .schedule = QL_PIPE, .keep = QL_KEEP_ALL},
        {.model = 3, .dtype = 2, .world = 4, .schedule = QL_PIPE_AHEAD, .keep = 3, .save = 2, .store = 4},
        {.model = 1, .dtype = 1, .adam = 1, .world = 2, .schedule = QL_PIPE_AHEAD, .keep = 3, .store = 2, .paged = 1, .resume = 2},
        {.model = 2, .packed = 1, .world = 8, .schedule = QL_PIPE_AHEAD, .keep = QL_KEEP_INPUT, .resume = 1},
        {.model = 2, .world = 3, .group = 6, .schedule = QL_PIPE, .keep = 1, .save = 1},
    };
    CHECK_OK(exact_place());
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (cases[i].world > exact_on.devices) printf("# %d stages: NOT RUN with %d GPUs\n", cases[i].world, exact_on.devices);
        else CHECK_OK(compare(&cases[i]));
    }
}

/* ---- bytes ------------------------------------------------------------------------------------ */

/* Micro-batches of optimizer step s: 20 an epoch. */
static int group_at(int step)
{
    int per[] = {8, 8, 4};
    return per[step % 3];
}

/* Rows with a target of micro-batch mb of step s, as they are rounded up. */
static int64_t target_rows(const ql_dataset *d, int64_t round, int step, int mb)
{
    int32_t order[39];
    int64_t tokens, targets, at = 2 * (step % 3 * EXACT_GROUP + mb);
    if (ql_sampler_order(11, step / 3, 39, order) != QL_OK) return -1;
    ql_batch_measure(d, order + at, ql_min64(2, 39 - at), round, &tokens, &targets);
    return ql_max64(round, ql_round_up(targets, round));
}

/* A loss by a shared head: normed rows and targets to all, statistics to all, fp32 gradients back to the owners; as many rows as the
 * largest of the micro-batches has. */
static int64_t head_bytes(const ql_dataset *d, int64_t round, const exact_setting *s, int step, int k)
{
    int64_t most = 0, hidden = 128, per_rank = EXACT_GROUP / s->world;
    for (int r = 0; r < s->world; r++)
        if (r * per_rank + k < group_at(step)) most = ql_max64(most, target_rows(d, round, step, (int)(r * per_rank) + k));
    return (s->world - 1) * most * (hidden * 4 + 4 + s->world * 16 + hidden * 4);
}

/* What a rank sends in a run, from the formulas of the design: (2L − 1) gathers of this rank's part in the first pass over the layers,
 * the layer at the turn and the layer at the seam being held (a pass is a micro-batch's, in breadth that of a piece of two); per step the gradients' all-to-all and the adapters' all-gather, the
 * partial norms, the losses. */
static int64_t expected_bytes(const exact_outcome *o, const exact_setting *s, const ql_dataset *d)
{
    int64_t sent = 0, others = s->world - 1, layers = o->choice.layers, per_rank = EXACT_GROUP / s->world;
    for (int step = 0; step < EXACT_STEPS; step++) {
        int64_t rounds = ql_min64(group_at(step), per_rank), passes = s->schedule == QL_BREADTH ? (rounds + 1) / 2 : rounds;
        for (int64_t l = 0; s->store == 1 && l < layers; l++) {
            int64_t times = 2 * passes - (l == layers - 1 ? passes : 0) - (l == 0 ? passes - 1 : 0);
            sent += others * times * o->part[l];
        }
        for (int k = 0; s->store > 0 && k < rounds; k++) sent += head_bytes(d, o->round, s, step, k);
        sent += others * o->shard * 4;                /* gradients: a shard to each other rank */
        sent += others * o->shard / QL_OPT_BLOCK * 4; /* partial norms */
        sent += others * o->shard * 4;                /* adapters */
        sent += others * per_rank * 4;                /* losses */
        if (step % (EXACT_STEPS / 2) == EXACT_STEPS / 2 - 1) sent += others * o->shard * 8; /* a checkpoint: both moments */
    }
    return sent;
}

/* A stage sends h up and its gradient down, with the 8 adapter columns that stand behind its rows; per step the partial norms and the
 * losses, which all have in full; with a checkpoint its part of adapters and moments, and of the adapters again at the end. */
static int64_t stage_bytes(const exact_outcome *o, const exact_setting *s, const ql_dataset *d, int rank)
{
    int64_t sent = 0, others = s->world - 1, hidden = 128, tokens, targets;
    int32_t order[39];
    for (int step = 0; step < EXACT_STEPS; step++) {
        if (ql_sampler_order(11, step / 3, 39, order) != QL_OK) return -1;
        for (int mb = 0; mb < group_at(step); mb++) {
            int64_t at = 2 * (step % 3 * EXACT_GROUP + mb);
            ql_batch_measure(d, order + at, ql_min64(2, 39 - at), o->round, &tokens, &targets);
            sent += (rank < s->world - 1 ? tokens * hidden * 4 : 0) + (o->choice.first < o->choice.cut[rank] ? tokens * (hidden + 8) * 4 : 0);
        }
        sent += others * (o->elements / QL_OPT_BLOCK * 4 + group_at(step) * 4);
        if (step % (EXACT_STEPS / 2) == EXACT_STEPS / 2 - 1) sent += others * o->elements * 12;
    }
    return sent + others * o->elements * 4;
}

TEST(stages_send_what_the_design_says)
{
    char path[QL_PATH_MAX];
    ql_dataset *d = NULL;
    CHECK_OK(exact_place());
    CHECK_OK(exact_data(path));
    CHECK_OK(ql_dataset_open(path, QL_PACK_NONE, 64, &d));
    for (int world = 2; world <= exact_world(4); world *= 2) {
        exact_setting s = {.model = 0, .world = world, .schedule = QL_PIPE_AHEAD};
        exact_outcome o;
        CHECK_OK(exact_run(&s, &o));
        free(o.adapters);
        for (int r = 0; r < world; r++)
            CHECK_MSG(exact_mem->sent[r] == stage_bytes(&o, &s, d, r), "stage %d of %d sent %lld bytes, expected %lld", r, world,
                      (long long)exact_mem->sent[r], (long long)stage_bytes(&o, &s, d, r));
    }
    ql_dataset_close(d);
}

TEST(ranks_send_what_the_design_says)
{
    char path[QL_PATH_MAX];
    ql_dataset *d = NULL;
    CHECK_OK(exact_place());
    if (exact_on.devices == 1) NOT_RUN("one GPU");
    CHECK_OK(exact_data(path));
    CHECK_OK(ql_dataset_open(path, QL_PACK_NONE, 64, &d));
    for (int world = 2; world <= exact_world(4); world *= 2)
        for (int way = 0; way < 4; way++) {
            int store = way < 3 ? way : 1;
            exact_setting s = {.world = world, .store = store, .schedule = way < 3 ? QL_LOOP : QL_BREADTH};
            exact_outcome o;
            CHECK_OK(exact_run(&s, &o));
            free(o.adapters);
            for (int r = 0; r < world; r++)
                CHECK_MSG(exact_mem->sent[r] == expected_bytes(&o, &s, d), "world %d store %d schedule %d rank %d sent %lld bytes, expected %lld",
                          world, store, s.schedule, r, (long long)exact_mem->sent[r], (long long)expected_bytes(&o, &s, d));
        }
    ql_dataset_close(d);
}

/* ---- what a step calls, loading has called ------------------------------------------------------ */

/* Bits of exact_mem->called; sends and receives have one for each peer, ops one for each. */
#define OP_BIT(name, ...) OP_##name,
enum { CALLED_GATHER, CALLED_EXCHANGE, CALLED_SUM, CALLED_MAX, CALLED_SEND = 8, CALLED_RECV = 16, CALLED_OP = 24 };
enum { EACH_OP(OP_BIT) OPS };
static struct {
    const ql_backend *real;
    int rank;
} watched;

static void called(int what)
{
    int phase = exact_me->phase;
    if (phase == QL_AT_LOADING) exact_mem->called[watched.rank][0] |= 1ull << what;
    if (phase == QL_AT_STEP || phase == QL_AT_EVAL) exact_mem->called[watched.rank][1] |= 1ull << what;
}

#define WATCH(name, what, params, args) \
    static ql_status watch_##name params { called(what); return watched.real->comm->name args; }
WATCH(all_gather, CALLED_GATHER, (ql_comm *c, ql_stream *s, ql_tensor out, ql_tensor in), (c, s, out, in))
WATCH(all_to_all, CALLED_EXCHANGE, (ql_comm *c, ql_stream *s, ql_tensor out, ql_tensor in), (c, s, out, in))
WATCH(all_sum, CALLED_SUM, (ql_comm *c, ql_stream *s, ql_tensor x), (c, s, x))
WATCH(all_max, CALLED_MAX, (ql_comm *c, ql_stream *s, ql_tensor x), (c, s, x))
WATCH(send, CALLED_SEND + to, (ql_comm *c, ql_stream *s, ql_tensor x, int to), (c, s, x, to))
WATCH(recv, CALLED_RECV + from, (ql_comm *c, ql_stream *s, ql_tensor x, int from), (c, s, x, from))

#define WATCH_OP(name, params, args, ...) \
    static ql_status watch_##name params { called(CALLED_OP + OP_##name); return watched.real->ops->name args; }
EACH_OP(WATCH_OP)
#define OP_NAME(name, ...) #name,
static const char *const op_name[] = {EACH_OP(OP_NAME)};

static const ql_backend *watching(int rank, const ql_backend *be)
{
    static ql_backend mine;
    static ql_comm_table table;
    static ql_ops ops;
    watched.real = be, watched.rank = rank;
    table = *be->comm;
    table.all_gather = watch_all_gather, table.all_to_all = watch_all_to_all, table.all_sum = watch_all_sum;
    table.all_max = watch_all_max, table.send = watch_send, table.recv = watch_recv;
    ops = *be->ops;
#define WATCHED(name, ...) ops.name = watch_##name;
    EACH_OP(WATCHED)
    mine = (ql_backend){be->name, be->dev, &ops, &table};
    return &mine;
}

TEST(nothing_is_new_to_a_step)
{
    CHECK_OK(exact_place());
    if (exact_on.devices == 1) printf("# one GPU: ops alone were watched\n");
    for (int way = 0; way < (exact_on.devices == 1 ? 3 : 5); way++) {
        int world = exact_world(way & 1 ? 2 : 4);
        exact_setting s = {.world = world, .store = way, .schedule = way == 3 ? QL_PIPE : way == 4 ? QL_PIPE_AHEAD : QL_LOOP};
        exact_outcome o = {0};
        char name[256];
        exact_describe(&s, name, sizeof name);
        exact_wrap = watching;
        ql_status st = exact_run(&s, &o);
        exact_wrap = NULL;
        free(o.adapters);
        CHECK_OK(st);
        for (int r = 0; r < world; r++) {
            uint64_t before = exact_mem->called[r][0], in = exact_mem->called[r][1], ops = in & ~before;
            uint32_t some = (uint32_t)in & ((1u << CALLED_OP) - 1);
            CHECK_MSG(in && (some || world == 1) && !(some & ~before), "%s: rank %d calls %x in steps and %x while loading", name, r, some, (uint32_t)before & ((1u << CALLED_OP) - 1));
            for (int i = 0; i < OPS; i++) CHECK_MSG(!(ops >> (CALLED_OP + i) & 1), "%s: rank %d calls %s first in a step", name, r, op_name[i]);
        }
    }
}

/* ---- the product ------------------------------------------------------------------------------ */

/* Every way to run a job, each with the next one of all jobs. */
static int every = 1, first; /* `test_exact product 37`: each 37th way only; `product 2 1`: the second of two halves */

TEST(product)
{
    int jobs = 1, ways = 1, runs = 0;
    double began = ql_now();
    for (int f = 0; f < FACTORS; f++) {
        if (f < JOB_FACTORS)
            jobs *= levels[f];
        else
            ways *= levels[f];
    }
    for (int i = first; i < ways; i += every) {
        int v[FACTORS];
        for (int f = 0, k = i % jobs, w = i; f < FACTORS; f++) {
            int *from = f < JOB_FACTORS ? &k : &w;
            v[f] = *from % levels[f];
            *from /= levels[f];
        }
        exact_setting s = setting_of(v);
        if (s.world == 1 && s.schedule >= QL_PIPE) continue; /* a loop */
        CHECK_OK(compare(&s));
        if (++runs % 100 == 0) fprintf(stderr, "%d ways, up to %d of %d, %.0f minutes\n", runs, i + 1, ways, (ql_now() - began) / 60);
    }
    printf("%d ways to run a job, %d jobs in turn: %.1f minutes\n", runs, jobs, (ql_now() - began) / 60);
}

static const test_entry tests[] = {T(every_pair_of_settings_gives_the_same_bits), T(runs_learn), T(odd_groups_are_exact_where_they_say_so),
                                   T(eight_ranks_are_exact), T(pipelines_are_exact), T(ranks_send_what_the_design_says),
                                   T(stages_send_what_the_design_says), T(nothing_is_new_to_a_step)};
static const test_entry all[] = {T(product)};

int main(int argc, char **argv)
{
    ql_backend_cpu_start(argv);
    /* Forked ranks close the engine's descriptor: nothing of this program may have that number. */
    FILE *hold = fopen("/dev/null", "r");
    if (argc > 2 && atoi(argv[2]) > 0) every = atoi(argv[2]);
    if (argc > 3 && atoi(argv[3]) > 0) first = atoi(argv[3]);
    int failed = argc > 1 && strcmp(argv[1], "product") == 0 ? test_run(all, 1, 1, argv)
                                                              : test_run(tests, (int)(sizeof tests / sizeof *tests), argc, argv);
    for (int i = 0; i < reference_count; i++) free(references[i].out.adapters);
    if (hold) fclose(hold);
    return failed;
}
