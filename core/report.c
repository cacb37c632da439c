/* What front ends ask before anything is loaded: the model, the data, the plan. */
#include "core/cost.h"
#include "core/devices.h"
#include "core/file.h"
#include "core/lora_job.h"
#include "core/prepare.h"
#include "core/qlora.h"
#include "core/task.h"

#include <stdlib.h>
#include <string.h>

/* ---- model ------------------------------------------------------------------------------------ */

static int quantised(const ql_model *m)
{
    for (int64_t l = 0; l < m->cfg.layers; l++)
        for (int i = 0; i < QL_LINEARS; i++)
            if (m->block[l].w[i].kind != QL_PLAIN) return 1;
    return 0;
}

/* Bytes of the linears as they will rest. */
static ql_status base_bytes(const ql_job *job, const ql_model *m, int64_t *out)
{
    ql_quant q = {ql_job_bool(job, "load_in_4bit"), ql_job_bool(job, "bnb_4bit_use_double_quant"), 0};
    *out = 0;
    for (int64_t l = 0; l < m->cfg.layers; l++) {
        ql_blob b;
        QL_TRY(ql_blob_init(&b, &m->block[l], &q, m->cfg.dtype, 1));
        *out += b.part_bytes;
    }
    return QL_OK;
}

ql_status ql_model_report(const ql_job *job, json_t **out)
{
    const char *path = ql_job_str(job, "model");
    ql_model *m = NULL;
    ql_lora *lora = NULL;
    ql_status st = QL_OK;
    char trainable[256];
    int64_t bytes = 0;
    if (!path) QL_FAIL(QL_EINVAL, "no model: `load NAME` first");
    /* A config.json without weights is enough for plans. */
    if (ql_path_is_dir(path) ? ql_st_any(path) : !ql_path_is_file(path) || !strstr(path, ".json")) QL_GO(ql_model_open(path, &m));
    else QL_GO(ql_model_open_config(path, &m));
    ql_model_skip(m, ql_job_get(job, "llm_int8_skip_modules"));
    QL_GO(ql_lora_of_job(job, NULL, &m->cfg, &lora));
    QL_GO(base_bytes(job, m, &bytes));
    ql_lora_summary(lora, &m->cfg, trainable, sizeof trainable);
    const ql_config *c = &m->cfg;
    *out = json_pack("{s:s,s:s,s:s,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:s,s:b,s:b,s:b,s:s,s:I}", "model", path, "path", m->path, "arch",
                     ql_arch_name(c->arch), "hidden", (json_int_t)c->hidden, "layers", (json_int_t)c->layers, "heads",
                     (json_int_t)c->heads, "kv_heads", (json_int_t)c->kv_heads, "head_dim", (json_int_t)c->head_dim, "ffn",
                     (json_int_t)c->ffn, "vocab", (json_int_t)c->vocab, "max_positions", (json_int_t)c->max_positions, "parameters",
                     (json_int_t)ql_config_params(c), "bytes", (json_int_t)bytes, "dtype", ql_dtype_name(c->dtype), "tied", c->tied,
                     "quantised", quantised(m), "weights", m->files != NULL, "trainable", trainable, "trainable_parameters",
                     (json_int_t)lora->params);
    if (!*out) st = ql_fail(QL_ENOMEM, "no memory for the model's report");
out:
    ql_lora_close(lora);
    ql_model_close(m);
    return st;
}

/* ---- data ------------------------------------------------------------------------------------- */

ql_status ql_data_report(const ql_job *job, int n_samples, json_t **out)
{
    char cache[QL_PATH_MAX];
    const char *dir = ql_job_str(job, "output_dir");
    ql_tok *tok = NULL;
    ql_dataset *d = NULL;
    QL_TRY(ql_path_join(cache, dir ? dir : "runs", ".cache"));
    QL_TRY(ql_path_mkdirs(cache));
    QL_TRY(ql_prepare_train(job, cache, &tok, &d));
    ql_status st = ql_data_lint(d, tok, n_samples, out);
    ql_dataset_close(d);
    ql_tok_close(tok);
    return st;
}

/* ---- plan ------------------------------------------------------------------------------------- */

/* The job with some settings changed (NULL: none), planned at a place. */
static ql_status plan_with(const ql_job *job, const json_t *changes, const ql_place *place, const ql_prepared *data, int anyway, ql_task **out)
{
    ql_job *copy = NULL;
    const char *key;
    json_t *v, *o = NULL;
    ql_status st = QL_OK;
    QL_GO(ql_job_copy(job, &copy));
    json_object_foreach((json_t *)(uintptr_t)changes, key, v) QL_GO(ql_job_set(copy, key, v));
    o = ql_job_json(copy);
    ql_task_inputs in = {.job = o, .train = data && data->train[0] ? data->train : NULL, .eval = data && data->eval[0] ? data->eval : NULL, .weights = QL_WEIGHTS_HEADERS, .place = *place,
                         .anyway = anyway};
    QL_GO(ql_task_open(&in, out));
out:
    json_decref(o);
    ql_job_free(copy);
    return st;
}

/* The longest max_length that fits with these settings, by halving; 0 when none does. */
static int64_t longest(const ql_job *job, const json_t *changes, const ql_place *place, int64_t most)
{
    int64_t lo = 0, hi = most / 64;
    while (lo < hi) {
        int64_t mid = (lo + hi + 1) / 2;
        ql_task *t = NULL;
        json_t *c = changes ? json_deep_copy(changes) : json_object();
        json_object_set_new(c, "max_length", json_integer(mid * 64));
        if (plan_with(job, c, place, NULL, 0, &t) == QL_OK)
            lo = mid;
        else
            hi = mid - 1;
        ql_task_close(t);
        ql_error_clear();
        json_decref(c);
    }
    return lo * 64;
}

/* What rows of alternatives do not say: what a job has set of these would make another way of each. */
static const char unless_said[] = "{\"fsdp_config\": null, \"store\": \"auto\", \"activation_offloading\": false, \"pipeline\": \"off\"}";
static const struct {
    const char *name, *changes;
    int needs_world;
} alternatives[] = {
    {"resident", "{\"fsdp\": false}", 0},
    {"sharded", "{\"fsdp\": true}", 1},
    {"sharded + offloaded activations", "{\"fsdp\": true, \"activation_offloading\": true}", 1},
    {"offloaded activations", "{\"fsdp\": false, \"activation_offloading\": true}", 0},
    {"cpu_offload", "{\"fsdp\": true, \"fsdp_config\": {\"cpu_offload\": true}}", 0},
    {"pipeline", "{\"fsdp\": false, \"breadth\": false, \"pipeline\": \"1f1b\"}", 1},
    {"pipeline, recompute ahead", "{\"fsdp\": false, \"breadth\": false, \"pipeline\": \"recompute_ahead\"}", 1},
    {"pipeline + cpu_offload", "{\"fsdp\": true, \"breadth\": false, \"pipeline\": \"recompute_ahead\", \"fsdp_config\": {\"cpu_offload\": true}}", 1},
    {"cpu_offload + offloaded activations", "{\"fsdp\": true, \"fsdp_config\": {\"cpu_offload\": true}, \"activation_offloading\": true}", 0},
};

/* Projected: operations over a rate that such a device sustains, or what has to be moved where that takes longer. */
static double seconds_of(const ql_task *t)
{
    ql_rates r = ql_rates_of(t->place.arch);
    return ql_cost_step(&t->spec, ql_job_bool(t->job, "packing") ? t->args.max_length : t->spec.rows / ql_max64(1, t->args.batch), &r);
}

static json_t *alternative(const ql_job *job, const ql_args *args, size_t i, const ql_place *place, const ql_prepared *data, int64_t most)
{
    json_t *changes = json_loads(unless_said, 0, NULL), *own = json_loads(alternatives[i].changes, 0, NULL), *o = NULL;
    ql_task *t = NULL, *here = NULL;
    ql_place room = *place;
    int64_t device = 0, host = 0;
    json_object_update(changes, own);
    json_t *small = json_deep_copy(changes);
    /* Planned with room for all: what it takes is the row, whether it fits is a column. */
    room.capacity = INT64_MAX / 4, room.host = INT64_MAX / 4;
    json_object_set_new(small, "gradient_checkpointing", json_true());
    if (args->checkpointing != QL_PICK_AUTO) json_object_set_new(changes, "gradient_checkpointing", json_boolean(args->checkpointing));
    if (plan_with(job, small, &room, data, 0, &t) == QL_OK && ql_mem_bytes(&t->spec, &device, &host) == QL_OK) {
        int fits = device <= place->capacity && host <= place->host;
        /* Where it fits, the time is that of what would be chosen: the memory that is left buys less recomputation. */
        if (fits && plan_with(job, changes, place, data, 0, &here) != QL_OK) ql_error_clear();
        o = json_pack("{s:s,s:I,s:I,s:b,s:I,s:f}", "name", alternatives[i].name, "per_device", (json_int_t)device, "host", (json_int_t)host, "fits",
                      fits, "longest", (json_int_t)longest(job, small, place, most), "seconds", seconds_of(here ? here : t));
    }
    ql_error_clear();
    ql_task_close(here);
    ql_task_close(t);
    json_decref(changes);
    json_decref(own);
    json_decref(small);
    return o;
}

static json_t *bytes_of(const ql_spec *spec, int rank, int64_t *total)
{
    ql_arena a;
    json_t *o = json_object();
    *total = 0;
    if (ql_mem_count(spec, rank, &a) != QL_OK) return o;
    for (int c = 0; c < QL_CATS; c++)
        if (a.by_cat[c]) json_object_set_new(o, ql_cat_name((ql_cat)c), json_integer(a.by_cat[c]));
    *total = a.used;
    return o;
}

static json_t *chosen_of(const ql_task *t)
{
    const ql_choice *c = &t->spec.choice;
    int store[QL_STORES] = {0}, keep[3] = {0}, saved = 0;
    for (int l = 0; l < c->layers; l++) {
        store[c->store[l]]++;
        keep[c->keep[l]]++;
        saved += c->save[l];
    }
    json_t *s = json_object();
    for (int i = 0; i < QL_STORES; i++)
        if (store[i]) json_object_set_new(s, ql_store_name((ql_store_kind)i), json_integer(store[i]));
    json_t *stages = json_array(); /* layers of each; none but in a pipeline */
    for (int r = 0; ql_plan_piped(c) && r < c->world; r++) json_array_append_new(stages, json_integer(c->cut[r + 1] - c->cut[r]));
    return json_pack("{s:o,s:s,s:o,s:i,s:i,s:i,s:i,s:s,s:i,s:i,s:I,s:I}", "layers", s, "schedule", ql_schedule_name(c->schedule), "stages", stages,
                     "kept", keep[QL_KEEP_ALL], "partly_recomputed", keep[QL_KEEP_NO_MLP], "recomputed", keep[QL_KEEP_INPUT], "offloaded", saved,
                     "dtype", ql_dtype_name(t->spec.dtype), "world", c->world, "micro_batches", c->g, "samples_per_step",
                     (json_int_t)(t->args.batch * c->g), "rows", (json_int_t)t->spec.rows);
}

static json_t *exact_worlds(const ql_choice *c)
{
    json_t *o = json_array();
    for (int w = 1; w <= c->pieces && w <= QL_MAX_WORLD; w++)
        if (c->pieces % w == 0) json_array_append_new(o, json_integer(w));
    return o;
}

/* A question about a job's plan: where it is to run, and its data. With data, its longest batch is what counts, of training or
 * evaluation; without, full rows of max_length. */
typedef struct {
    ql_args args;
    ql_place place;
    char backend[16];
    int device[QL_MAX_WORLD];
    ql_prepared data;
    char no_data[640]; /* why data that is set is not counted */
} question;

static ql_status question_open(const ql_job *job, const json_t *devices, question *q)
{
    char cache[QL_PATH_MAX];
    const char *dir = ql_job_str(job, "output_dir");
    memset(q, 0, sizeof *q);
    QL_TRY(ql_args_from_job(job, &q->args));
    QL_TRY(ql_devices_pick(&q->args, devices, "see `info`; `plan --on 2xT4` is for GPUs that are not here", &q->place, q->backend, q->device));
    if (!ql_job_str(job, "data")) return QL_OK;
    QL_TRY(ql_path_join(cache, dir ? dir : "runs", ".cache"));
    if (ql_path_mkdirs(cache) == QL_OK && ql_prepare(job, cache, NULL, NULL, &q->data) == QL_OK) return QL_OK;
    snprintf(q->no_data, sizeof q->no_data, "%s cannot be read: %.500s",
             q->data.train[0] ? "evaluation is not counted, as its data" : "full rows of max_length are counted, as the data", ql_error());
    ql_error_clear();
    return QL_OK;
}

static ql_status build_report(const ql_job *job, const question *q, const ql_task *t, json_t **out)
{
    const ql_place *place = &q->place;
    int64_t dev = 0, host = 0, most = ql_min64(t->model->cfg.max_positions > 0 ? t->model->cfg.max_positions : 131072, 131072);
    QL_TRY(ql_mem_bytes(&t->spec, &dev, &host));
    json_t *list = json_array(), *rows = json_array(), *why = json_array();
    for (int r = 0; r < place->world; r++) {
        int64_t total = 0;
        json_t *b = bytes_of(&t->spec, r, &total);
        json_array_append_new(list, json_pack("{s:i,s:s,s:i,s:o,s:I,s:I}", "rank", r, "backend", q->backend, "index", q->device[r], "bytes", b, "total",
                                              (json_int_t)total, "capacity", (json_int_t)place->capacity));
    }
    for (size_t i = 0; i < sizeof alternatives / sizeof *alternatives; i++) {
        json_t *o = !alternatives[i].needs_world || place->world > 1 ? alternative(job, &q->args, i, place, &q->data, most) : NULL;
        if (o) json_array_append_new(rows, o);
    }
    if (t->lacks[0]) json_array_append_new(why, json_string(t->lacks));
    for (int i = 0; i < t->why.n; i++) json_array_append_new(why, json_string(t->why.text[i]));
    if (q->no_data[0]) json_array_append_new(why, json_string(q->no_data));
    char said[QL_REASON_TEXT];
    snprintf(said, sizeof said, "seconds a step are projected: %.3g TFLOP a step on each device, at %.3g TFLOP/s",
             ql_cost_step_flops(&t->spec, ql_job_bool(job, "packing") ? t->args.max_length : t->spec.rows / ql_max64(1, t->args.batch)) /
                 place->world / 1e12, ql_rates_of(place->arch).flops / 1e12);
    json_array_append_new(why, json_string(said));
    *out = json_pack("{s:b,s:o,s:o,s:I,s:o,s:I,s:f,s:o,s:o}", "fits", !t->lacks[0], "chosen", chosen_of(t), "devices", list, "host", (json_int_t)host,
                     "alternatives", rows, "longest", (json_int_t)longest(job, NULL, place, most), "seconds", seconds_of(t), "why", why, "exact_worlds",
                     exact_worlds(&t->spec.choice));
    return *out ? QL_OK : ql_fail(QL_ENOMEM, "no memory for the plan");
}

ql_status ql_plan_actions(const ql_job *job, const json_t *devices, json_t **out)
{
    question q;
    ql_task *t = NULL;
    json_t *ranks = json_array();
    ql_status st = QL_OK;
    QL_GO(question_open(job, devices, &q));
    QL_GO(plan_with(job, NULL, &q.place, &q.data, 0, &t));
    for (int r = 0; r < q.place.world; r++) {
        ql_plan p;
        char *text = NULL;
        QL_GO(ql_plan_prove(&t->spec.choice, r, t->spec.choice.g, &p));
        st = ql_plan_text(&p, &text);
        ql_plan_free(&p);
        QL_GO(st);
        json_array_append_new(ranks, json_string(text));
        free(text);
    }
    *out = json_incref(ranks);
out:
    ql_task_close(t);
    json_decref(ranks);
    return st;
}

ql_status ql_plan_report(const ql_job *job, const json_t *devices, json_t **out)
{
    question q;
    ql_task *t = NULL;
    ql_status st = QL_OK;
    QL_GO(question_open(job, devices, &q));
    QL_GO(plan_with(job, NULL, &q.place, &q.data, 1, &t));
    QL_GO(build_report(job, &q, t, out));
out:
    ql_task_close(t);
    return st;
}
