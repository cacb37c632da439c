/* The engine in fp32 on one CPU rank against transformers, peft and bitsandbytes (tests/golden): logits, loss, every adapter
 * gradient, and 20 optimizer steps. */
#include "core/file.h"
#include "core/json.h"
#include "core/rank.h"
#include "core/sampler.h"
#include "core/schedule.h"
#include "tests/backend.h"

#include <sys/mman.h>
#include <unistd.h>

typedef struct {
    const char *name, *folder, *variant; /* "llama", "model-nf4", "nf4" */
    json_t *info;
    ql_model *model;
    ql_lora *lora;
    ql_dataset *data;
    ql_st *batches, *expected;
    ql_spec spec;
    ql_shared *shared;
    ql_rank *rank;
    int32_t order[512];
    char path[512];
    int quantise;
} gold;

static int64_t shape_of(const ql_st_tensor *t, int i)
{
    return t->shape[i];
}

/* The fixture's batches as a dataset: rows in order, labels −100 masked. */
static ql_status make_data(gold *g)
{
    const ql_st_tensor *ids = ql_st_find(g->batches, "input_ids"), *mask = ql_st_find(g->batches, "attention_mask");
    const ql_st_tensor *labels = ql_st_find(g->batches, "labels");
    int64_t rows = shape_of(ids, 0) * shape_of(ids, 1) * shape_of(ids, 2), t = shape_of(ids, 3);
    ql_dataset_writer *w = NULL;
    char file[600];
    snprintf(file, sizeof file, "build/tests/golden-%s-%d.data", g->name, (int)getpid());
    QL_TRY(ql_dataset_create(file, &w));
    for (int64_t r = 0; r < rows; r++) {
        const int32_t *id = (const int32_t *)ids->data + r * t, *m = (const int32_t *)mask->data + r * t;
        const int32_t *l = (const int32_t *)labels->data + r * t;
        uint8_t trained[512];
        int64_t n = 0;
        for (; n < t && m[n]; n++) trained[n] = l[n] != -100;
        QL_TRY(ql_dataset_add(w, id, trained, (size_t)n));
        g->order[r] = (int32_t)r;
    }
    QL_TRY(ql_dataset_commit(w, NULL));
    ql_dataset_writer_close(w);
    QL_TRY(ql_dataset_open(file, QL_PACK_NONE, 0, &g->data));
    unlink(file);
    return QL_OK;
}

static const char *in(gold *g, const char *name)
{
    snprintf(g->path, sizeof g->path, "tests/golden/%s/%s", g->name, name);
    return g->path;
}

static ql_status make_spec(gold *g)
{
    ql_spec *s = &g->spec;
    memset(s, 0, sizeof *s);
    s->model = g->model, s->lora = g->lora;
    s->dtype = s->res = QL_F32;
    s->round = 64, s->rows = 192 /* more than any batch needs */, s->docs = 8, s->head_chunk = 64, s->steps = 20;
    s->quant = (ql_quant){g->quantise, json_is_true(json_object_get(g->info, "double_quant")), 0};
    s->state = QL_ADAM_F32;
    ql_choice *c = &s->choice;
    c->world = 1, c->layers = (int)g->model->cfg.layers, c->first = (int)g->lora->target[0].layer;
    c->g = 2, c->pieces = ql_plan_pieces(2, 8), c->train = 1;
    for (int l = 0; l < c->layers; l++) {
        c->store[l] = QL_STORE_RESIDENT;
        c->keep[l] = (uint8_t)(l % 3);
    }
    return QL_OK;
}

static ql_status start(gold *g)
{
    char name[64];
    ql_rank_setup set = {.world = 1, .timeout_ms = 1000};
    QL_TRY(backend_get(&set.be));
    QL_TRY(ql_json_load(in(g, "case.json"), 1 << 20, &g->info));
    QL_TRY(ql_model_open(in(g, g->folder), &g->model));
    QL_TRY(ql_lora_open(in(g, "adapter"), &g->model->cfg, &g->lora));
    QL_TRY(ql_st_open(in(g, "batches.safetensors"), &g->batches));
    snprintf(name, sizeof name, "expected-%s.safetensors", g->variant);
    QL_TRY(ql_st_open(in(g, name), &g->expected));
    QL_TRY(make_data(g));
    QL_TRY(make_spec(g));
    g->shared = calloc(1, sizeof *g->shared);
    set.shared = g->shared;
    QL_TRY(ql_rank_open(&set, &g->spec, &g->rank));
    QL_TRY(ql_rank_load(g->rank));
    float *flat = calloc((size_t)g->lora->elements, 4);
    ql_status st = ql_lora_read(g->lora, in(g, "adapter"), flat);
    if (st == QL_OK) st = ql_rank_set_adapters(g->rank, flat);
    free(flat);
    return st;
}

static void finish(gold *g)
{
    ql_rank_close(g->rank);
    free(g->shared);
    ql_dataset_close(g->data);
    ql_st_close(g->batches);
    ql_st_close(g->expected);
    ql_lora_close(g->lora);
    ql_model_close(g->model);
    json_decref(g->info);
}

/* n floats of the device, on the host. Caller frees. */
static float *read_back(gold *g, const float *p, int64_t n)
{
    const ql_dev_table *dev = g->rank->set.be->dev;
    float *out = malloc((size_t)n * 4);
    if (out && (dev->copy(g->rank->compute, out, p, n * 4) != QL_OK || dev->sync(g->rank->compute) != QL_OK)) memset(out, 0xff, (size_t)n * 4);
    return out;
}

static double relative(const float *a, const float *b, int64_t n)
{
    double d = 0, r = 0;
    for (int64_t i = 0; i < n; i++) {
        double x = (double)a[i] - (double)b[i];
        d += x * x;
        r += (double)b[i] * (double)b[i];
    }
    return sqrt(d / (r > 0 ? r : 1));
}

static double relative_to(gold *g, const float *p, const ql_st_tensor *want)
{
    float *host = read_back(g, p, want->count);
    double e = host ? relative(host, want->data, want->count) : 1e9;
    free(host);
    return e;
}

static ql_step_data step_data(gold *g, int step)
{
    ql_step_data d = {.data = g->data, .order = g->order, .n = ql_dataset_size(g->data), .first = 2 * step, .batch = 2, .g = 2,
                      .pad_id = 0, .step = (uint32_t)step + 1};
    d.items = ql_step_items(&d);
    return d;
}

static void check_logits(gold *g)
{
    const ql_st_tensor *want = ql_st_find(g->expected, "logits");
    int64_t v = g->model->cfg.vocab, at = 0;
    ql_step_data d = step_data(g, 0);
    ql_choice c = g->spec.choice;
    c.train = 0;
    d.step = 0;
    float *got = calloc((size_t)want->count, 4);
    for (int mb = 0; mb < 2; mb++) {
        ql_plan p;
        float losses[2];
        ql_step_data one = d;
        one.first += mb;
        c.g = 1;
        CHECK_OK(ql_plan_build(&c, 0, 1, &p));
        CHECK_OK(ql_rank_forward(g->rank, &p, &one, losses));
        ql_plan_free(&p);
        const ql_batch *b = &g->rank->batch;
        int32_t index[128];
        int64_t n = 0;
        for (int64_t k = 0; k < b->docs; k++)
            for (int32_t i = 0; i < b->doc_len[k]; i++) index[n++] = b->doc_start[k] + i;
        const ql_dev_table *dev = g->rank->set.be->dev;
        void *dindex = NULL, *dout = NULL;
        CHECK_OK(dev->alloc(g->rank->dev, n * v * 4, &dout));
        CHECK_OK(dev->alloc(g->rank->dev, (int64_t)sizeof index, &dindex));
        CHECK_OK(dev->copy(g->rank->compute, dindex, index, n * 4));
        ql_tensor out = ql_mat(dout, QL_F32, n, v, v), h = ql_mem_h(g->rank->mem, 0, c.layers);
        for (int64_t i = 0; i < n; i += 64) {
            int64_t m = ql_min64(64, n - i);
            CHECK_OK(ql_head_logits(&g->rank->mem->head, &g->rank->mem->shape, &g->rank->q, NULL, h, ql_vec((int32_t *)dindex + i, QL_I32, m),
                                    ql_rows(out, i, m)));
        }
        CHECK_OK(dev->copy(g->rank->compute, got + at, dout, n * v * 4));
        CHECK_OK(dev->sync(g->rank->compute));
        dev->free(g->rank->dev, dout);
        dev->free(g->rank->dev, dindex);
        at += n * v;
    }
    CHECK_INT(at, want->count);
    double e = relative(got, want->data, want->count);
    free(got);
    CHECK_MSG(e < 1e-5, "%s %s: logits differ by %.2e", g->name, g->variant, e);
}

static void check_gradients(gold *g)
{
    ql_plan p;
    ql_step_result r;
    ql_step_data d = step_data(g, 0);
    ql_optim o = {.adam = {QL_ADAM_TORCH, 0.9f, 0.999f, 1e-8f, 0.01f}, .clip = {.max_norm = 1}};
    float lr[20] = {0};
    CHECK_OK(ql_optim_init(g->rank, &o, lr, 1));
    CHECK_OK(ql_plan_build(&g->spec.choice, 0, 2, &p));
    CHECK_OK(ql_plan_check(&g->spec.choice, &p));
    p.count--; /* all but STEP */
    CHECK_INT(d.items, json_integer_value(json_array_get(json_object_get(g->info, "num_items"), 0)));
    CHECK_OK(ql_rank_step(g->rank, &p, &d, &r));
    ql_plan_free(&p);
    double loss = json_number_value(json_object_get(json_object_get(g->info, g->variant), "loss"));
    CHECK_MSG(fabs((double)r.loss - loss) < 1e-6 * loss, "%s %s: loss %.8f, expected %.8f", g->name, g->variant, (double)r.loss, loss);
    for (int64_t i = 0; i < 2 * g->lora->count; i++) {
        const ql_lora_target *t = &g->lora->target[i / 2];
        char name[256];
        snprintf(name, sizeof name, "grad.base_model.model.model.layers.%d.%s.lora_%s.weight", (int)t->layer,
                 ql_linear_module(t->linear), i & 1 ? "B" : "A");
        const ql_st_tensor *want = ql_st_find(g->expected, name);
        CHECK_MSG(want, "%s: no %s", g->name, name);
        double e = relative_to(g, g->rank->mem->grad[0] + (i & 1 ? t->b : t->a), want);
        CHECK_MSG(e < 1e-5, "%s %s: %s differs by %.2e", g->name, g->variant, name, e);
    }
}

static void check_training(gold *g)
{
    json_t *tr = json_object_get(g->info, "train"), *want = json_object_get(g->info, g->variant);
    ql_optim o = {.adam = {QL_ADAM_TORCH, (float)json_number_value(json_object_get(tr, "adam_beta1")),
                           (float)json_number_value(json_object_get(tr, "adam_beta2")),
                           (float)json_number_value(json_object_get(tr, "adam_epsilon")),
                           (float)json_number_value(json_object_get(tr, "weight_decay"))},
                  .clip = {.max_norm = (float)json_number_value(json_object_get(tr, "max_grad_norm"))}};
    float lr[20];
    double worst = 0;
    for (int i = 0; i < 20; i++) lr[i] = (float)json_number_value(json_array_get(json_object_get(want, "learning_rates"), (size_t)i));
    CHECK_OK(ql_optim_init(g->rank, &o, lr, 1));
    for (int i = 0; i < 20; i++) {
        ql_plan p;
        ql_step_result r;
        ql_step_data d = step_data(g, i);
        CHECK_OK(ql_plan_build(&g->spec.choice, 0, 2, &p));
        CHECK_OK(ql_rank_step(g->rank, &p, &d, &r));
        ql_plan_free(&p);
        double loss = json_number_value(json_array_get(json_object_get(want, "losses"), (size_t)i));
        double norm = json_number_value(json_array_get(json_object_get(want, "grad_norms"), (size_t)i));
        worst = fmax(worst, fabs((double)r.loss - loss) / loss);
        CHECK_MSG(fabs((double)r.loss - loss) < 1e-5 * loss, "%s %s step %d: loss %.8f, expected %.8f", g->name, g->variant, i,
                  (double)r.loss, loss);
        CHECK_MSG(fabs((double)r.norm - norm) < 1e-4 * norm, "%s %s step %d: norm %.8f, expected %.8f", g->name, g->variant, i,
                  (double)r.norm, norm);
    }
    for (int64_t i = 0; i < 2 * g->lora->count; i++) {
        const ql_lora_target *t = &g->lora->target[i / 2];
        char name[256];
        snprintf(name, sizeof name, "final.base_model.model.model.layers.%d.%s.lora_%s.weight", (int)t->layer,
                 ql_linear_module(t->linear), i & 1 ? "B" : "A");
        const ql_st_tensor *w = ql_st_find(g->expected, name);
        double e = relative_to(g, g->rank->mem->adapters + (i & 1 ? t->b : t->a), w);
        CHECK_MSG(e < 1e-3, "%s %s: %s differs by %.2e after 20 steps", g->name, g->variant, name, e);
    }
}

static void run(const char *name, const char *folder, const char *variant, int quantise)
{
    gold g = {.name = name, .folder = folder, .variant = variant, .quantise = quantise};
    CHECK_OK(start(&g));
    check_logits(&g);
    if (!test_bad) check_gradients(&g);
    if (!test_bad) check_training(&g);
    finish(&g);
}

#define FAMILY(f)                                                                                                              \
    TEST(f##_as_it_is) { run(#f, "model", "lora", 0); }                                                                        \
    TEST(f##_prequantised) { run(#f, "model-nf4", "nf4", 0); }                                                                 \
    TEST(f##_quantised_on_load) { run(#f, "model", "nf4", 1); }

FAMILY(llama)
FAMILY(mistral)
FAMILY(qwen2)
TEST(qwen3_as_it_is) { run("qwen3", "model", "lora", 0); }
TEST(qwen3_prequantised) { run("qwen3", "model-nf4", "nf4", 0); }

TEST_MAIN(T(llama_as_it_is), T(llama_prequantised), T(llama_quantised_on_load), T(mistral_as_it_is), T(mistral_prequantised),
          T(mistral_quantised_on_load), T(qwen2_as_it_is), T(qwen2_prequantised), T(qwen2_quantised_on_load), T(qwen3_as_it_is),
          T(qwen3_prequantised))
