/* The fixtures of tests/golden, opened: model, adapter, batches as a dataset, and what transformers, peft and bitsandbytes make of them. */
#ifndef QL_TEST_GOLDEN_H
#define QL_TEST_GOLDEN_H

#include "core/file.h"
#include "core/json.h"
#include "core/rank.h"
#include "core/sampler.h"
#include "core/schedule.h"
#include "tests/backend.h"

#include <unistd.h>

typedef struct {
    const char *name, *folder, *variant; /* "llama", "model-nf4", "nf4" */
    json_t *info;
    ql_model *model;
    ql_lora *lora;
    ql_dataset *data;
    ql_st *batches, *expected;
    ql_spec spec;
    int32_t order[512];
    char path[512];
    int quantise;
} gold;

static inline int64_t shape_of(const ql_st_tensor *t, int i)
{
    return t->shape[i];
}

/* The fixture's batches as a dataset: rows in order, labels −100 masked. */
static inline ql_status make_data(gold *g)
{
    const ql_st_tensor *ids = ql_st_find(g->batches, "input_ids"), *mask = ql_st_find(g->batches, "attention_mask");
    const ql_st_tensor *labels = ql_st_find(g->batches, "labels");
    int64_t rows = shape_of(ids, 0) * shape_of(ids, 1) * shape_of(ids, 2), t = shape_of(ids, 3);
    ql_dataset_writer *w = NULL;
    char file[600];
    snprintf(file, sizeof file, "%s/golden-%s-%d.data", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp", g->name, (int)getpid());
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

static inline const char *in(gold *g, const char *name)
{
    snprintf(g->path, sizeof g->path, "tests/golden/%s/%s", g->name, name);
    return g->path;
}

static inline ql_status make_spec(gold *g)
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

static inline ql_status gold_open(gold *g)
{
    char name[64];
    QL_TRY(ql_json_load(in(g, "case.json"), 1 << 20, &g->info));
    QL_TRY(ql_model_open(in(g, g->folder), &g->model));
    ql_model_skip(g->model, json_object_get(g->info, "keep"));
    QL_TRY(ql_lora_open(in(g, "adapter"), &g->model->cfg, &g->lora));
    QL_TRY(ql_st_open(in(g, "batches.safetensors"), &g->batches));
    snprintf(name, sizeof name, "expected-%s.safetensors", g->variant);
    QL_TRY(ql_st_open(in(g, name), &g->expected));
    QL_TRY(make_data(g));
    return make_spec(g);
}

static inline void gold_close(gold *g)
{
    ql_dataset_close(g->data);
    ql_st_close(g->batches);
    ql_st_close(g->expected);
    ql_lora_close(g->lora);
    ql_model_close(g->model);
    json_decref(g->info);
}

/* The fixture's adapters, to a rank. */
static inline ql_status gold_adapters(gold *g, ql_rank *r)
{
    char path[512];
    float *flat = calloc((size_t)g->lora->elements, 4);
    if (!flat) QL_FAIL(QL_ENOMEM, "no memory for the adapters");
    snprintf(path, sizeof path, "tests/golden/%s/adapter", g->name);
    ql_status st = ql_lora_read(g->lora, path, flat);
    if (st == QL_OK) st = ql_rank_set_adapters(r, flat);
    free(flat);
    return st;
}

static inline double relative(const float *a, const float *b, int64_t n)
{
    double d = 0, r = 0;
    for (int64_t i = 0; i < n; i++) {
        double x = (double)a[i] - (double)b[i];
        d += x * x;
        r += (double)b[i] * (double)b[i];
    }
    return sqrt(d / (r > 0 ? r : 1));
}

/* Step `step` (from 0) of the fixture as micro-batches of `batch` rows. */
static inline ql_step_data gold_step(gold *g, int step, int batch)
{
    ql_step_data d = {.data = g->data, .order = g->order, .n = ql_dataset_size(g->data), .first = 4 / batch * step, .batch = batch,
                      .g = 4 / batch, .pad_id = 0, .step = (uint32_t)step + 1};
    d.items = ql_step_items(&d);
    return d;
}

/* The expected gradient ("grad") or value after 20 steps ("final") of adapter tensor i: A of target i / 2, or its B. */
static inline const ql_st_tensor *gold_tensor(gold *g, const char *what, int64_t i, int64_t *at, char name[256])
{
    const ql_lora_target *t = &g->lora->target[i / 2];
    snprintf(name, 256, "%s.base_model.model.model.layers.%d.%s.lora_%s.weight", what, (int)t->layer, ql_linear_module(t->linear),
             i & 1 ? "B" : "A");
    *at = i & 1 ? t->b : t->a;
    return ql_st_find(g->expected, name);
}

/* The optimizer of the fixture's 20 steps, and its rates. */
static inline ql_optim gold_optim(gold *g, float lr[20])
{
    json_t *tr = json_object_get(g->info, "train"), *want = json_object_get(g->info, g->variant);
    for (int i = 0; i < 20; i++) lr[i] = (float)json_number_value(json_array_get(json_object_get(want, "learning_rates"), (size_t)i));
    return (ql_optim){.adam = {QL_ADAM_TORCH, (float)json_number_value(json_object_get(tr, "adam_beta1")),
                               (float)json_number_value(json_object_get(tr, "adam_beta2")),
                               (float)json_number_value(json_object_get(tr, "adam_epsilon")),
                               (float)json_number_value(json_object_get(tr, "weight_decay"))},
                      .clip = {.max_norm = (float)json_number_value(json_object_get(tr, "max_grad_norm"))}};
}

/* "losses" or "grad_norms" of the 20 steps. */
static inline double gold_figure(gold *g, const char *what, int step)
{
    return json_number_value(json_array_get(json_object_get(json_object_get(g->info, g->variant), what), (size_t)step));
}

#endif
