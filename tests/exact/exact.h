/* Training runs over forked ranks, on the CPU or (--backend=cuda) one to a GPU, for tests of what must not change the bits: the
 * supervisor's own start of processes, each of which places its part, trains, saves and resumes with the engine's functions; only the
 * planner's choices are made here. */
#ifndef QL_TEST_EXACT_H
#define QL_TEST_EXACT_H

#include "core/cost.h"
#include "core/file.h"
#include "core/train.h"
#include "tests/backend.h"
#include "tests/tmp.h"

#include <signal.h>
#include <sys/mman.h>

enum { EXACT_STEPS = 10, EXACT_GROUP = 8 };

/* The first six are the job: what is computed. The others are how, and must not matter. */
typedef struct {
    int model;    /* exact_models */
    int dtype;    /* 0 fp32, 1 bf16, 2 fp16 with loss scaling */
    int adam;     /* 0 torch's, 1 with 8-bit states, 2 bitsandbytes' 32-bit */
    int packed;
    int group;    /* micro-batches of a step; 0: EXACT_GROUP */
    int pieces;   /* exact_worlds; 0: 4, so that a piece has two micro-batches, which breadth takes through a layer together */
    int world;    /* 1, 2, 4 … */
    int store;    /* exact_stores */
    int schedule; /* ql_schedule */
    int keep;     /* ql_keep, or 3: by layer */
    int save;     /* 0 none, 1 all, 2 every second layer */
    int paged;    /* optimizer states on the host */
    int resume;   /* 0 no, 1 in the middle, 2 after a first half run in another way */
} exact_setting;

static const struct {
    const char *name, *path, *more; /* `more`: further settings */
} exact_models[] = {
    {"llama", "tests/golden/llama/model-nf4", "{}"},
    {"qwen3", "tests/golden/qwen3/model-nf4", "{\"lora_dropout\": 0.1, \"target_modules\": [\"q_proj\", \"v_proj\", \"down_proj\"]}"},
    {"tiny", "notebooks/tiny", "{\"bnb_4bit_use_double_quant\": true}"},
    {"top", "notebooks/tiny", "{\"layers_to_transform\": [2, 3], \"target_modules\": [\"q_proj\", \"o_proj\", \"gate_proj\", \"down_proj\"]}"},
};
static const uint8_t exact_stores[][2] = {
    {QL_STORE_RESIDENT, QL_STORE_RESIDENT},     {QL_STORE_SHARDED, QL_STORE_SHARDED}, {QL_STORE_HOST, QL_STORE_HOST},
    {QL_STORE_RESIDENT16, QL_STORE_RESIDENT16}, {QL_STORE_SHARDED, QL_STORE_HOST},    {QL_STORE_HOST, QL_STORE_RESIDENT16},
    {QL_STORE_RESIDENT, QL_STORE_SHARDED},
};
enum { EXACT_MODELS = 4, EXACT_STORES = 7 };

/* Written by the ranks, read by the test: in shared memory. */
typedef struct {
    int ended[QL_MAX_WORLD];
    int64_t sent[QL_MAX_WORLD];          /* bytes, while training */
    int64_t allocated[QL_MAX_WORLD], peak[QL_MAX_WORLD], counted[QL_MAX_WORLD]; /* device bytes: the table's, memory.c's */
    int64_t base[QL_MAX_WORLD], gather[QL_MAX_WORLD];                           /* of these */
    char why[QL_MAX_WORLD][512];
    double struck;                                                              /* when a fault was made: test_faults.c */
    uint64_t called[QL_MAX_WORLD][2];                                           /* ops and collectives while loading, and in steps: test_exact.c */
    float adapters[QL_MAX_WORLD][1 << 20];
} exact_shared;

typedef struct {
    int steps;
    uint32_t loss[EXACT_STEPS], norm[EXACT_STEPS];
    int skipped;                         /* steps with non-finite gradients */
    int64_t elements;
    float *adapters;
    ql_reasons why;
    ql_choice choice;
    int64_t part[QL_MAX_LAYERS];         /* bytes of a layer's part */
    int64_t shard;                       /* elements */
    int64_t round;                       /* token counts are multiples of it */
} exact_outcome;

/* Where runs happen. */
static struct {
    const ql_backend *be;
    int devices; /* ranks there may be */
    ql_place place;
} exact_on;

static exact_shared *exact_mem;
static struct {
    ql_task *task;
    json_t *command;
} exact_now; /* what forked ranks inherit */
static const ql_backend *(*exact_wrap)(int rank, const ql_backend *be); /* NULL, or another backend for a rank */
static const ql_rank_state *exact_me;                                   /* where this rank stands */

static inline void exact_describe(const exact_setting *s, char *buf, size_t size)
{
    static const char *const dtypes[] = {"fp32", "bf16", "fp16"}, *const adams[] = {"adamw", "adam8", "bnb"};
    static const char *const schedules[] = {"loop", "breadth", "1f1b", "ahead"};
    static const char *const keeps[] = {"recompute", "no-mlp", "keep", "mixed"};
    snprintf(buf, size, "%s %s %s %s G %d, world %d store %s+%s %s %s save %d%s%s", exact_models[s->model].name, dtypes[s->dtype],
             adams[s->adam], s->packed ? "packed" : "padded", s->group ? s->group : EXACT_GROUP, s->world,
             ql_store_name((ql_store_kind)exact_stores[s->store][0]), ql_store_name((ql_store_kind)exact_stores[s->store][1]),
             schedules[s->schedule], keeps[s->keep], s->save, s->paged ? " paged" : "",
             s->resume == 1 ? " resumed" : s->resume == 2 ? " resumed elsewhere" : "");
}

/* The processor has all its kernels at once; here it does as a GPU does while loading. */
static inline const ql_backend *exact_lazy(const ql_backend *be)
{
    static ql_backend mine;
    static ql_dev_table dev;
    mine = *be, dev = *be->dev;
    dev.lazy = 1, mine.dev = &dev;
    return &mine;
}

static inline ql_status exact_place(void)
{
    backend_place p = {0};
    const ql_backend *be = NULL;
    if (exact_on.be) return QL_OK;
    QL_TRY(backend_get(&be));
    exact_on.place = (ql_place){.capacity = (int64_t)8 << 30, .host = (int64_t)8 << 30, .bf16 = 1};
    exact_on.devices = QL_MAX_WORLD;
    if (strcmp(be->name, "cuda") == 0) {
        QL_TRY(backend_ask(be, &p));
        exact_on.devices = p.devices;
        exact_on.place.bf16 = p.info.bf16, exact_on.place.arch = p.info.arch;
    }
    exact_on.be = exact_lazy(be);
    return QL_OK;
}

/* The largest of 1, 2, 4 … that is neither above n nor above the devices. */
static inline int exact_world(int n)
{
    int w = 1;
    while (2 * w <= n && 2 * w <= exact_on.devices) w *= 2;
    return w;
}

/* ---- data ------------------------------------------------------------------------------------- */

/* 39 documents of 5 to 62 tokens, a third of the labels masked, one of them wholly: 20 micro-batches of two, the last of one. */
static inline ql_status exact_data(char path[QL_PATH_MAX])
{
    ql_dataset_writer *w = NULL;
    uint32_t x = 12345;
    snprintf(path, QL_PATH_MAX, "%s", tmp_path("exact.data"));
    if (access(path, R_OK) == 0) return QL_OK;
    QL_TRY(ql_dataset_create(path, &w));
    for (int d = 0; d < 39; d++) {
        int32_t ids[64];
        uint8_t trained[64];
        int n = 5 + d * 37 % 58;
        for (int i = 0; i < n; i++) {
            x = x * 1664525 + 1013904223;
            ids[i] = (int32_t)(3 + (x >> 8) % 250);
            trained[i] = (uint8_t)(d != 7 && i >= n / 3);
        }
        QL_TRY(ql_dataset_add(w, ids, trained, (size_t)n));
    }
    ql_status st = ql_dataset_commit(w, NULL);
    ql_dataset_writer_close(w);
    return st;
}

/* ---- in a rank -------------------------------------------------------------------------------- */

static ql_status exact_train(ql_rank_process *p, ql_worker *w)
{
    ql_mem *m;
    ql_arena counted;
    ql_dev_memory dm;
    json_t *out = NULL;
    exact_me = &p->setup.shared->rank[p->rank];
    if (exact_wrap) p->setup.be = exact_wrap(p->rank, p->setup.be);
    QL_TRY(ql_rank_open(&p->setup, &w->task->spec, &w->rank));
    m = w->rank->mem;
    QL_TRY(ql_rank_load(w->rank));
    const ql_comm_table *comm = p->setup.be->comm;
    int64_t before = w->rank->comm ? comm->bytes_sent(w->rank->comm) : 0;
    ql_status st = ql_train_run(w, exact_now.command, &out);
    json_decref(out);
    QL_TRY(st);
    exact_mem->sent[p->rank] = w->rank->comm ? comm->bytes_sent(w->rank->comm) - before : 0;
    QL_TRY(p->setup.be->dev->memory(w->rank->dev, &dm));
    QL_TRY(ql_mem_count(w->rank->spec, p->rank, &counted));
    exact_mem->allocated[p->rank] = dm.allocated;
    exact_mem->peak[p->rank] = dm.peak;
    exact_mem->counted[p->rank] = counted.used;
    exact_mem->base[p->rank] = counted.by_cat[QL_CAT_BASE], exact_mem->gather[p->rank] = counted.by_cat[QL_CAT_GATHER];
    if (m->n > (int64_t)(sizeof exact_mem->adapters[0] / 4)) QL_FAIL(QL_EINTERNAL, "%lld adapter elements", (long long)m->n);
    return ql_rank_get_adapters(w->rank, exact_mem->adapters[p->rank]);
}

static ql_status exact_worker(ql_rank_process *p, ql_task *task)
{
    ql_worker w = {.p = p, .task = task, .placed = task, .order_epoch = -1};
    ql_status st = exact_train(p, &w);
    if (st != QL_OK && st != QL_ESTOP) {
        snprintf(exact_mem->why[p->rank], sizeof exact_mem->why[0], "rank %d: %s: %s", p->rank, ql_status_name(st), ql_error());
        __atomic_store_n(&p->shared->abort, 1, __ATOMIC_RELEASE);
    }
    ql_rank_close(w.rank);
    free(w.order);
    ql_events_flush(p->out, 5000, NULL);
    __atomic_store_n(&exact_mem->ended[p->rank], 1, __ATOMIC_RELEASE);
    return st;
}

static int exact_body(ql_rank_process *p)
{
    return exact_worker(p, exact_now.task) == QL_OK ? 0 : 1;
}

/* ---- in the test ------------------------------------------------------------------------------ */

static inline ql_status exact_task(const exact_setting *s, ql_task **out)
{
    static const char *const dtypes[] = {"float32", "bfloat16", "float16"};
    static const char *const optims[] = {"adamw_torch", "adamw_8bit", "paged_adamw_32bit"};
    char data[QL_PATH_MAX];
    int group = s->group ? s->group : EXACT_GROUP, batch = s->packed ? 1 : 2;
    json_t *more = json_loads(exact_models[s->model].more, 0, NULL);
    json_t *job = json_pack("{s:s,s:s,s:i,s:i,s:f,s:s,s:i,s:b,s:s,s:i,s:i,s:i,s:f,s:i,s:f,s:i}", "model", exact_models[s->model].path, "dtype",
                            dtypes[s->dtype], "per_device_train_batch_size", batch, "gradient_accumulation_steps", group / s->world,
                            "lora_dropout", 0.05, "optim", optims[s->adam], "max_length", s->packed ? 96 : 64, "packing",
                            s->packed, "save_strategy", "steps", "save_steps", EXACT_STEPS / 2, "max_steps", EXACT_STEPS, "r", 8,
                            "learning_rate", 1e-3, "seed", 11, "weight_decay", 0.01, "exact_worlds", s->pieces ? s->pieces : 4);
    json_object_update(job, more);
    json_decref(more);
    QL_TRY(exact_data(data));
    ql_task_inputs in = {.job = job, .train = data, .weights = QL_WEIGHTS_MAPPED, .place = exact_on.place};
    in.place.world = s->world;
    ql_status st = ql_task_open(&in, out);
    json_decref(job);
    if (st != QL_OK) return st;
    (*out)->spec.state_host = s->paged;
    if (s->dtype == 2) (*out)->args.loss_scale = 1 << 26; /* too much: the first steps are skipped */
    ql_choice *c = &(*out)->spec.choice;
    c->schedule = (ql_schedule)s->schedule;
    for (int l = 0; l < c->layers; l++) {
        c->store[l] = exact_stores[s->store][l % 2];
        if ((s->world == 1 || ql_plan_piped(c)) && c->store[l] == QL_STORE_SHARDED) c->store[l] = QL_STORE_RESIDENT;
        c->keep[l] = (uint8_t)(s->keep == 3 ? (l + 1) % 3 : s->keep);
        c->save[l] = (uint8_t)(s->save == 1 || (s->save == 2 && l % 2));
    }
    if (ql_plan_piped(c)) ql_cost_cut(&(*out)->spec, 64);
    return QL_OK;
}

static inline void exact_take(exact_outcome *o, const json_t *e)
{
    const char *ev = json_string_value(json_object_get(e, "ev"));
    int64_t step = json_integer_value(json_object_get(e, "step"));
    if (!ev || strcmp(ev, "step") != 0 || step < 1 || step > EXACT_STEPS) return;
    float norm = (float)json_number_value(json_object_get(e, "grad_norm"));
    o->loss[step - 1] = (uint32_t)strtoul(json_string_value(json_object_get(e, "loss_bits")), NULL, 16);
    memcpy(&o->norm[step - 1], &norm, 4);
    o->skipped += json_is_true(json_object_get(e, "skipped"));
    o->steps++;
}

/* Of ranks that failed the one with words of its own, not one that only saw another fail: all have had their say before one is picked. */
static inline int exact_culprit(ql_ranks *r, int seen)
{
    char how[128];
    for (int ms = 0, left = 1; left && ms < 20000; ms++, usleep(1000)) {
        int dead = ql_ranks_dead(r, how, sizeof how);
        if (dead >= 0 && !__atomic_load_n(&exact_mem->ended[dead], __ATOMIC_ACQUIRE)) break;
        left = 0;
        for (int i = 0; i < ql_ranks_world(r); i++) left |= !__atomic_load_n(&exact_mem->ended[i], __ATOMIC_ACQUIRE);
    }
    for (int i = 0; i < ql_ranks_world(r); i++)
        if (exact_mem->why[i][0] && !strstr(exact_mem->why[i], "rank failed")) return i;
    return seen;
}

/* Reads what the ranks say until all have ended; a rank that dies, or a minute, is the end too. */
static inline ql_status exact_listen(ql_ranks *r, exact_outcome *o)
{
    double until = ql_now() + 60;
    char how[128];
    for (int all = 0; !all;) {
        all = 1;
        for (int i = 0; i < ql_ranks_world(r); i++) all &= exact_mem->ended[i];
        for (ql_lines_state state = QL_LINES_ONE; state == QL_LINES_ONE;) {
            json_t *e = NULL;
            state = QL_LINES_NONE;
            if (ql_lines_next(ql_ranks_lines(r, 0), all ? 0 : 20, &state, &e) != QL_OK) break;
            if (state == QL_LINES_ONE) exact_take(o, e);
            json_decref(e);
        }
        for (int i = 0; i < ql_ranks_world(r); i++)
            if (exact_mem->why[i][0]) QL_FAIL(QL_EPEER, "%s", exact_mem->why[exact_culprit(r, i)]);
        int dead = ql_ranks_dead(r, how, sizeof how);
        if (dead >= 0 && !exact_mem->ended[dead]) QL_FAIL(QL_EPEER, "rank %d died: %s", dead, how);
        if (ql_now() > until) QL_FAIL(QL_EPEER, "the ranks hang");
    }
    return QL_OK;
}

static inline ql_status exact_one(const exact_setting *s, const char *dir, int steps, const char *resume, exact_outcome *o)
{
    int device[QL_MAX_WORLD] = {0};
    ql_ranks *ranks = NULL;
    ql_status st = QL_OK;
    QL_TRY(exact_place());
    if (s->world > exact_on.devices) QL_FAIL(QL_EINVAL, "%d ranks on %d devices", s->world, exact_on.devices);
    ql_launch launch = {.be = exact_on.be, .device = device, .timeout_ms = 30000};
    for (int i = 0; i < s->world && exact_on.place.arch; i++) device[i] = i;
    QL_GO(exact_task(s, &exact_now.task));
    launch.task = exact_now.task;
    exact_now.command = json_pack("{s:s,s:s,s:i,s:s?}", "cmd", "train", "run", dir, "steps", steps, "resume", resume);
    if (!exact_mem) exact_mem = mmap(NULL, sizeof *exact_mem, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    memset(exact_mem, 0, offsetof(exact_shared, adapters));
    o->elements = exact_now.task->lora->elements;
    o->why = exact_now.task->why;
    o->choice = exact_now.task->spec.choice;
    ql_mem *m = NULL;
    QL_GO(ql_mem_open(&exact_now.task->spec, 0, &m));
    for (int l = 0; l < o->choice.layers; l++) o->part[l] = m->blob[l].part_bytes;
    o->shard = m->shard;
    o->round = exact_now.task->spec.round;
    ql_mem_close(m);
    QL_GO(ql_ranks_start(&launch, exact_body, &ranks));
    st = exact_listen(ranks, o);
out:
    ql_ranks_stop(ranks);
    ql_task_close(exact_now.task);
    json_decref(exact_now.command);
    exact_now.task = NULL, exact_now.command = NULL;
    return st;
}

/* Bytes at the device table, not of the arena that the plan carved: one allocation, as counted before the start; of each layer what its
 * store leaves here, and two slots of the largest layer that has to come. */
static inline ql_status exact_bytes(const exact_setting *s, const exact_outcome *o)
{
    for (int r = 0; r < s->world; r++) {
        int64_t base = 0, slot = 0, counted = exact_mem->counted[r];
        int wide = 0;
        int lo, hi;
        ql_plan_stage(&o->choice, r, &lo, &hi);
        for (int l = lo; l < hi; l++) {
            ql_store_kind k = (ql_store_kind)o->choice.store[l];
            if (k == QL_STORE_RESIDENT || k == QL_STORE_SHARDED) base += o->part[l];
            if (k != QL_STORE_RESIDENT) slot = ql_max64(slot, o->part[l] * (k == QL_STORE_SHARDED ? s->world : 1));
            wide |= k == QL_STORE_RESIDENT16;
        }
        if (exact_mem->allocated[r] != counted || exact_mem->peak[r] != counted)
            QL_FAIL(QL_EINTERNAL, "rank %d holds %lld bytes, %lld at its peak; counted were %lld", r, (long long)exact_mem->allocated[r],
                    (long long)exact_mem->peak[r], (long long)counted);
        if (wide ? exact_mem->base[r] <= base : exact_mem->base[r] != base)
            QL_FAIL(QL_EINTERNAL, "rank %d has %lld bytes of the base; its layers have %lld", r, (long long)exact_mem->base[r], (long long)base);
        if (exact_mem->gather[r] != 2 * slot)
            QL_FAIL(QL_EINTERNAL, "rank %d has %lld bytes for gathers; two slots are %lld", r, (long long)exact_mem->gather[r], (long long)(2 * slot));
    }
    return QL_OK;
}

/* Runs a setting in full; o->adapters is the caller's to free. All ranks must end with the same adapters. */
static inline ql_status exact_run(const exact_setting *s, exact_outcome *o)
{
    char dir[QL_PATH_MAX], checkpoint[QL_PATH_MAX];
    exact_setting first = *s;
    memset(o, 0, sizeof *o);
    QL_TRY(exact_place());
    snprintf(dir, sizeof dir, "%s", tmp_dir("run"));
    if (s->resume == 2) {
        /* From a pipeline to ranks that have all layers, from these to a pipeline; from one rank, too. */
        first.world = s->world == 4 ? 1 : exact_world(4);
        first.store = (s->store + 1) % EXACT_STORES;
        first.schedule = (s->schedule + 2) % QL_SCHEDULES;
        first.paged = !s->paged;
    }
    if (s->resume) {
        QL_TRY(exact_one(&first, dir, EXACT_STEPS / 2, NULL, o));
        snprintf(checkpoint, sizeof checkpoint, "%.4000s/checkpoint-%d", dir, EXACT_STEPS / 2);
    }
    QL_TRY(exact_one(s, dir, EXACT_STEPS, s->resume ? checkpoint : NULL, o));
    if (o->steps != EXACT_STEPS) QL_FAIL(QL_EINTERNAL, "%d steps were made, not %d", o->steps, EXACT_STEPS);
    QL_TRY(exact_bytes(s, o));
    for (int r = 1; r < s->world; r++)
        if (memcmp(exact_mem->adapters[0], exact_mem->adapters[r], (size_t)o->elements * 4) != 0)
            QL_FAIL(QL_EINTERNAL, "rank %d ended with other adapters than rank 0", r);
    o->adapters = malloc((size_t)o->elements * 4);
    if (!o->adapters) QL_FAIL(QL_ENOMEM, "no memory");
    memcpy(o->adapters, exact_mem->adapters[0], (size_t)o->elements * 4);
    return QL_OK;
}

static inline ql_status exact_differs(const exact_setting *s, const exact_outcome *want, const exact_outcome *got)
{
    ql_task *t = NULL;
    char what[128] = "";
    for (int i = 0; i < EXACT_STEPS; i++) {
        if (want->loss[i] != got->loss[i])
            QL_FAIL(QL_EINTERNAL, "loss of step %d is %08x, the reference has %08x", i + 1, got->loss[i], want->loss[i]);
        if (want->norm[i] != got->norm[i])
            QL_FAIL(QL_EINTERNAL, "gradient norm of step %d is %08x, the reference has %08x", i + 1, got->norm[i], want->norm[i]);
    }
    if (memcmp(want->adapters, got->adapters, (size_t)want->elements * 4) == 0) return QL_OK;
    QL_TRY(exact_task(s, &t));
    for (int64_t i = 0; i < t->lora->count && !what[0]; i++) {
        const ql_lora_target *a = &t->lora->target[i];
        for (int b = 0; b < 2 && !what[0]; b++) {
            int64_t at = b ? a->b : a->a, n = b ? a->b_len : a->a_len;
            if (memcmp(want->adapters + at, got->adapters + at, (size_t)n * 4) == 0) continue;
            int64_t k = at;
            while (memcmp(&want->adapters[k], &got->adapters[k], 4) == 0) k++;
            snprintf(what, sizeof what, "layer %lld %s.lora_%c [%lld]: %a, the reference has %a", (long long)a->layer,
                     ql_linear_name(a->linear), b ? 'B' : 'A', (long long)(k - at), (double)got->adapters[k], (double)want->adapters[k]);
        }
    }
    ql_task_close(t);
    QL_FAIL(QL_EINTERNAL, "adapters differ, first in %s", what);
}

#endif
