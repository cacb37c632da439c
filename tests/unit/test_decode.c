/* What a generated token costs, by the null backend's counters, from every store; and the rules of sampling. */
#include "core/decode.h"
#include "tests/test.h"

#include <string.h>

/* ---- work ------------------------------------------------------------------------------------- */

/* The null backend, with its NF4 ops counted apart. */
static int64_t few_calls, dequants;
static ql_status few(const ql_queue *q, ql_tensor out, ql_tensor a, const ql_nf4 *w, int n, ql_tensor c, ql_tensor bias)
{
    few_calls += n;
    if (a.rows != QL_DECODE_ROWS) QL_FAIL(QL_EINTERNAL, "%lld rows", (long long)a.rows);
    return ql_backend_null()->ops->nf4_matmul(q, out, a, w, n, c, bias);
}
static ql_status dequant(const ql_queue *q, const ql_tensor *out, const ql_nf4 *w, int n)
{
    dequants += n;
    return ql_backend_null()->ops->nf4_dequant(q, out, w, n);
}
static const ql_backend *counted(void)
{
    static ql_ops ops;
    static ql_backend be;
    ops = *ql_backend_null()->ops;
    ops.nf4_matmul = few, ops.nf4_dequant = dequant;
    be = *ql_backend_null();
    be.ops = &ops;
    return &be;
}

typedef struct {
    ql_model *model;
    ql_lora *lora;
    ql_spec spec;
    ql_shared *shared;
    ql_rank *rank;
} setting;

static ql_status start(setting *s, const char *family, ql_store_kind store, int world)
{
    char path[256];
    memset(s, 0, sizeof *s);
    snprintf(path, sizeof path, "tests/golden/%s/model-nf4", family);
    QL_TRY(ql_model_open(path, &s->model));
    snprintf(path, sizeof path, "tests/golden/%s/adapter", family);
    QL_TRY(ql_lora_open(path, &s->model->cfg, &s->lora));
    s->spec = (ql_spec){.model = s->model, .lora = s->lora, .dtype = QL_F32, .res = QL_F32, .round = 16, .rows = 64, .docs = 16, .head_chunk = 64, .steps = 1};
    ql_choice *c = &s->spec.choice;
    c->world = world, c->layers = (int)s->model->cfg.layers, c->first = 0;
    c->g = world, c->pieces = ql_plan_pieces(world, 8), c->train = 1;
    for (int l = 0; l < c->layers; l++) c->store[l] = (uint8_t)store;
    s->shared = calloc(1, sizeof *s->shared);
    if (!s->shared) QL_FAIL(QL_ENOMEM, "no memory");
    ql_rank_setup set = {.be = counted(), .world = world, .shared = s->shared, .timeout_ms = 1000};
    ql_mem *m = NULL;
    QL_TRY(ql_mem_open(&s->spec, 0, &m));
    set.host_bytes = ql_mem_host_base(m);
    ql_mem_close(m);
    if (set.host_bytes) set.host_base = calloc(1, (size_t)set.host_bytes);
    QL_TRY(ql_rank_open(&set, &s->spec, &s->rank));
    return ql_rank_load(s->rank);
}

static void finish(setting *s)
{
    char *host = s->rank ? s->rank->set.host_base : NULL;
    ql_rank_close(s->rank);
    free(host);
    free(s->shared);
    ql_lora_close(s->lora);
    ql_model_close(s->model);
}

/* What `count` answers of n tokens cost after prompts of `len`. */
static void measure(setting *s, int count, int64_t len, int64_t n, ql_null_counts *out)
{
    static int32_t prompt[4096];
    ql_sequence seq[QL_DECODE_ROWS] = {0};
    ql_decoding d = {.how = {.max_new = n, .repetition_penalty = 1, .top_p = 1}};
    for (int i = 0; i < count; i++) seq[i] = (ql_sequence){.prompt = prompt, .len = len};
    ql_null_take();
    CHECK_OK(ql_decode(s->rank, &d, seq, count));
    for (int i = 0; i < count; i++) {
        CHECK_INT(seq[i].out.len, n);
        ql_ids_free(&seq[i].out);
    }
    *out = ql_null_take();
}

static ql_null_counts cost(setting *s, int count, int64_t len, int64_t n)
{
    ql_null_counts c = {0};
    measure(s, count, len, n, &c);
    return c;
}

/* Of one token among t rows: every product of the layers and the head's once, attention over the keys that there are. */
static int64_t token_flops(const setting *s, int64_t keys)
{
    const ql_shape *sh = &s->rank->mem->shape;
    const ql_config *c = sh->cfg;
    const ql_head *h = &s->rank->mem->head;
    int64_t t = QL_DECODE_ROWS, sum = 0, mine = ql_min64(h->vocab - h->first * h->piece, h->count * h->piece);
    for (int g = 0; g < QL_GROUPS; g++) {
        const ql_group_shape *gs = &sh->group[g];
        sum += 2 * t * gs->n * (gs->k + gs->r) + 2 * t * gs->r * gs->k;
    }
    sum *= c->layers;
    for (int64_t l = 0; l < c->layers; l++) {
        int64_t window = ql_config_window(c, l);
        sum += 4 * t * c->heads * c->head_dim * (window > 0 ? ql_min64(keys, window) : keys);
    }
    return sum + 2 * QL_DECODE_ROWS * mine * c->hidden;
}

enum { NEW = 11, SOME = 7 };

/* Of the layers that are 4-bit throughout. */
static int64_t few_linears(const setting *s)
{
    int64_t n = 0;
    for (int64_t l = 0; l < s->model->cfg.layers; l++) {
        int all = 1;
        for (int i = 0; i < QL_LINEARS; i++) all &= s->rank->mem->blob[l].lin[i].nf4;
        n += all ? QL_LINEARS : 0;
    }
    return n;
}

static void check_work(const char *family, ql_store_kind store, int world)
{
    setting s;
    CHECK_OK(start(&s, family, store, world));
    if (!s.rank) return;
    cost(&s, 1, 1, 1); /* layers at rest in 16 bit get their adapters here, once */
    static const int64_t lengths[] = {1, 50, 64, 1500};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        int64_t len = lengths[i], want = 0;
        ql_null_counts one = cost(&s, 1, len, 1), all = cost(&s, 1, len, NEW);
        for (int64_t k = 1; k < NEW; k++) want += token_flops(&s, len + k);
        CHECK_MSG(all.flops - one.flops == want, "%s, store %d, prompt of %lld: %d tokens cost %lld flops, %lld are theirs", family, (int)store,
                  (long long)len, NEW - 1, (long long)(all.flops - one.flops), (long long)want);
        /* Several at a time are the rows of the same products. */
        ql_null_counts some = cost(&s, SOME, len, 1), long_some = cost(&s, SOME, len, NEW);
        CHECK_INT(long_some.flops - some.flops, want);
        CHECK_INT(some.flops, SOME * one.flops);
        CHECK_INT(long_some.calls - some.calls, all.calls - one.calls);
    }
    /* 4-bit bytes are read as they rest: once for a token of up to eight sequences, and written nowhere. */
    int64_t want = store == QL_STORE_RESIDENT16 ? 0 : few_linears(&s);
    cost(&s, 3, 20, 1);
    int64_t before = few_calls, whole = dequants;
    cost(&s, 3, 20, NEW);
    CHECK_INT(few_calls - before, (NEW - 1) * want);
    cost(&s, 3, 20, 2 * NEW);
    CHECK_INT(few_calls - before, (3 * NEW - 2) * want);
    before = dequants - whole; /* two times the prompts */
    whole = dequants;
    cost(&s, 3, 20, 1);
    if (few_linears(&s) == s.model->cfg.layers * QL_LINEARS) CHECK_INT(before, 2 * (dequants - whole));
    finish(&s);
}

TEST(a_token_runs_no_prefix_resident) { check_work("llama", QL_STORE_RESIDENT, 1); }
TEST(a_token_runs_no_prefix_16_bit) { check_work("llama", QL_STORE_RESIDENT16, 1); }
TEST(a_token_runs_no_prefix_host) { check_work("llama", QL_STORE_HOST, 1); }
TEST(a_token_runs_no_prefix_sharded) { check_work("llama", QL_STORE_SHARDED, 2); }
TEST(a_token_runs_no_prefix_windowed) { check_work("mistral", QL_STORE_RESIDENT, 1); }
TEST(a_token_runs_no_prefix_qwen)
{
    check_work("qwen2", QL_STORE_HOST, 2);
    check_work("qwen3", QL_STORE_SHARDED, 4);
}

/* A prompt goes in at once, in pieces of a micro-batch: no row of it twice. */
TEST(a_prompt_runs_once)
{
    setting s;
    CHECK_OK(start(&s, "llama", QL_STORE_RESIDENT, 1));
    if (!s.rank) return;
    int64_t attention = 0, linear = 2 * token_flops(&s, 0) - 4 * QL_DECODE_ROWS * s.model->cfg.vocab * s.model->cfg.hidden;
    int64_t per_key = 4 * s.model->cfg.layers * s.model->cfg.heads * s.model->cfg.head_dim;
    ql_null_counts c = cost(&s, 1, 150, 1); /* 64 + 64 + 22 rows, the last as 32 */
    attention = 64 * ((64 + 1) / 2) + 64 * (128 - 32) + 32 * (150 - 11); /* the null backend's count of keys */
    CHECK_INT(c.flops, (64 + 64 + 32) / 16 * linear + attention * per_key + 3 * 2 * QL_DECODE_ROWS * s.model->cfg.vocab * s.model->cfg.hidden);
    finish(&s);
}

/* ---- sampling --------------------------------------------------------------------------------- */

enum { V = 6 };

static int32_t next(const ql_sampling *how, const float *logits, const int32_t *prompt, int64_t n, float *row)
{
    int32_t seen[V] = {0}, order[V];
    ql_sampler s = {.how = how, .seen = seen, .order = order};
    ql_ids none = {0};
    ql_mt_seed(&s.random, how->seed);
    memcpy(row, logits, V * sizeof *row);
    return ql_sampler_next(&s, row, V, prompt, n, &none);
}

TEST(the_penalty_divides_or_multiplies_once)
{
    const float logits[V] = {4, -1, 3, 2, 0, -2};
    const int32_t prompt[] = {0, 1, 0, 0, 4};
    const ql_sampling how = {.repetition_penalty = 2, .top_p = 1};
    float row[V];
    CHECK_INT(next(&how, logits, prompt, 5, row), 2);
    CHECK(row[0] == 2 && row[1] == -2 && row[2] == 3 && row[3] == 2 && row[4] == 0 && row[5] == -2);
    /* The answer counts too, and another call begins anew. */
    int32_t seen[V] = {0}, order[V], said[] = {2};
    ql_ids answer = {.data = said, .len = 1};
    ql_sampler s = {.how = &how, .seen = seen, .order = order};
    memcpy(row, logits, sizeof row);
    CHECK_INT(ql_sampler_next(&s, row, V, prompt, 0, &answer), 0);
    CHECK(row[2] == 1.5f && row[0] == 4);
    memcpy(row, logits, sizeof row);
    ql_sampler_next(&s, row, V, prompt, 5, &answer);
    CHECK(row[2] == 1.5f && row[0] == 2);
}

/* How often each token is drawn is its share of what top-k and top-p leave. */
static void shares(ql_sampling how, const double want[V])
{
    const float logits[V] = {0, logf(2), logf(4), logf(8), logf(16), logf(32)};
    float row[V];
    int count[V] = {0}, draws = 20000;
    for (how.seed = 0; how.seed < (uint64_t)draws; how.seed++) count[next(&how, logits, NULL, 0, row)]++;
    for (int i = 0; i < V; i++)
        CHECK_MSG(fabs((double)count[i] / draws - want[i]) < 0.015 && (want[i] > 0 || !count[i]), "token %d: %d of %d, expected %.3f", i, count[i],
                  draws, want[i]);
}

TEST(draws_have_their_shares)
{
    shares((ql_sampling){.repetition_penalty = 1, .temperature = 1, .top_p = 1},
           (const double[V]){1 / 63., 2 / 63., 4 / 63., 8 / 63., 16 / 63., 32 / 63.});
    shares((ql_sampling){.repetition_penalty = 1, .temperature = 1, .top_p = 1, .top_k = 2}, (const double[V]){0, 0, 0, 0, 16 / 48., 32 / 48.});
    shares((ql_sampling){.repetition_penalty = 1, .temperature = 0.5, .top_p = 1, .top_k = 3}, (const double[V]){0, 0, 0, 64 / 1344., 256 / 1344., 1024 / 1344.});
    /* 32/63 < 0.6 ≤ 48/63: two tokens. */
    shares((ql_sampling){.repetition_penalty = 1, .temperature = 1, .top_p = 0.6}, (const double[V]){0, 0, 0, 0, 16 / 48., 32 / 48.});
    shares((ql_sampling){.repetition_penalty = 1, .temperature = 1, .top_p = 0}, (const double[V]){0, 0, 0, 0, 0, 1});
    shares((ql_sampling){.repetition_penalty = 1, .temperature = 0, .top_p = 1}, (const double[V]){0, 0, 0, 0, 0, 1});
}

/* The same by the rule's letter: all tokens sorted, then cut; drawn in the order of their ids. */
static int32_t sorted_draw(const ql_sampling *how, const float *row, int n)
{
    static int order[1500];
    double sum = 0, mass = 0;
    ql_mt random;
    int keep = how->top_k > 0 && how->top_k < n ? (int)how->top_k : n, used = 0;
    for (int i = 0; i < n; i++) {
        int k = i;
        for (; k > 0 && row[order[k - 1]] < row[i]; k--) order[k] = order[k - 1];
        order[k] = i;
    }
#define SHARE(i) exp(((double)row[order[i]] - (double)row[order[0]]) / how->temperature)
    for (int i = 0; i < keep; i++) sum += SHARE(i);
    while (used < keep && (used == 0 || mass < how->top_p * sum)) mass += SHARE(used), used++;
    ql_mt_seed(&random, how->seed);
    double at = (double)ql_mt_next(&random) / 4294967296.0 * mass, top = (double)row[order[0]];
    int first = order[0];
    for (int i = 1; i < used; i++)
        for (int k = i; k > 0 && order[k - 1] > order[k]; k--) {
            int other = order[k];
            order[k] = order[k - 1], order[k - 1] = other;
        }
    for (int i = 0; i < used; i++)
        if ((at -= exp(((double)row[order[i]] - top) / how->temperature)) < 0) return order[i];
#undef SHARE
    return first;
}

TEST(draws_are_those_of_a_sort)
{
    enum { N = 1500 };
    static float row[N], scratch[N];
    static int32_t seen[N], order[N];
    const int64_t top_k[] = {1, 50, 1499, 0, N, 9999};
    const double top_p[] = {0, 0.5, 0.95, 0.9999}, temperature[] = {0.01, 0.7, 40}, spread[] = {0, 1, 12};
    ql_mt random;
    ql_ids none = {0};
    ql_mt_seed(&random, 5);
    for (int round = 0; round < 6 * 4 * 3 * 3 * 3; round++) {
        ql_sampling how = {.repetition_penalty = 1, .temperature = temperature[round % 3], .top_p = top_p[round / 3 % 4], .top_k = top_k[round / 12 % 6],
                           .seed = (uint64_t)round};
        ql_sampler s = {.how = &how, .seen = seen, .order = order};
        /* Equal logits too, and some that cannot be. */
        for (int i = 0; i < N; i++) row[i] = (float)(spread[round / 72 % 3] * (double)(ql_mt_next(&random) % 1024) / 64);
        row[7] = -INFINITY;
        ql_mt_seed(&s.random, how.seed);
        memcpy(scratch, row, sizeof row);
        CHECK_INT(ql_sampler_next(&s, scratch, N, NULL, 0, &none), sorted_draw(&how, row, N));
    }
}

TEST_MAIN(T(a_token_runs_no_prefix_resident), T(a_token_runs_no_prefix_16_bit), T(a_token_runs_no_prefix_host),
          T(a_token_runs_no_prefix_sharded), T(a_token_runs_no_prefix_windowed), T(a_token_runs_no_prefix_qwen), T(a_prompt_runs_once),
          T(the_penalty_divides_or_multiplies_once), T(draws_have_their_shares),
          T(draws_are_those_of_a_sort))
