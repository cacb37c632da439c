#include "core/task.h"

#include "core/hub.h"
#include "core/lora_job.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEAD_CHUNK = 1024, DOCS_WITHOUT_DATA = 64 };

void ql_task_close(ql_task *t)
{
    if (!t) return;
    ql_dataset_close(t->train);
    ql_dataset_close(t->eval);
    ql_lora_close(t->lora);
    ql_model_close(t->model);
    ql_job_free(t->job);
    free(t);
}

/* Longest micro-batch (tokens) and most documents in one, over any order of the examples. */
static void batch_bounds(const ql_dataset *d, int64_t batch, int64_t round, int64_t *rows, int64_t *docs)
{
    int64_t parts = 1, length = 1, n = ql_dataset_size(d), b = ql_min64(batch, n);
    for (int64_t i = 0; i < n; i++) {
        parts = ql_max64(parts, ql_dataset_parts(d, i));
        length = ql_max64(length, ql_dataset_length(d, i));
    }
    *rows = ql_max64(*rows, ql_dataset_packed(d) ? ql_round_up(b * length, round) : b * ql_round_up(length, round));
    *docs = ql_max64(*docs, b * parts);
}

static ql_status open_adapters(ql_task *t, const ql_task_inputs *in)
{
    if (in->adapter) return ql_lora_open(in->adapter, &t->model->cfg, &t->lora);
    QL_TRY(ql_lora_of_job(t->job, in->resume, &t->model->cfg, &t->lora));
    /* What PEFT's AutoPeftModel looks for: the hub's name where the folder is a download, else the folder. */
    char name[256];
    char *base = strdup(ql_hub_name(t->args.model, name, sizeof name) ? name : t->args.model);
    if (!base) QL_FAIL(QL_ENOMEM, "no memory for a name");
    free(t->lora->cfg.base);
    t->lora->cfg.base = base;
    return QL_OK;
}

/* fp16 on a T4, bf16 where it is in hardware, fp32 on a CPU; the residual stream of Qwen in fp16 needs more range. */
static void pick_dtypes(ql_task *t, const ql_place *p)
{
    ql_spec *s = &t->spec;
    s->dtype = t->args.dtype;
    if (s->dtype == QL_DTYPES) s->dtype = p->arch == 0 ? QL_F32 : p->bf16 ? QL_BF16 : QL_F16;
    s->res = t->args.residual_dtype;
    if (s->res == QL_DTYPES) {
        int qwen = t->model->cfg.arch == QL_QWEN2 || t->model->cfg.arch == QL_QWEN3;
        s->res = qwen && s->dtype == QL_F16 ? QL_F32 : s->dtype;
    }
}

static ql_status open_data(ql_task *t, const ql_task_inputs *in)
{
    const ql_args *a = &t->args;
    int pack = ql_job_bool(t->job, "packing"), eval_pack = ql_job_get(t->job, "eval_packing") && !json_is_null(ql_job_get(t->job, "eval_packing"))
                                                                 ? ql_job_bool(t->job, "eval_packing")
                                                                 : pack;
    const char *how = ql_job_str(t->job, "packing_strategy");
    ql_packing kind = how && strcmp(how, "wrapped") == 0 ? QL_PACK_WRAPPED : QL_PACK_BFD;
    ql_spec *s = &t->spec;
    if (in->train) QL_TRY(ql_dataset_open(in->train, pack ? kind : QL_PACK_NONE, a->max_length, &t->train));
    if (in->eval) QL_TRY(ql_dataset_open(in->eval, eval_pack ? kind : QL_PACK_NONE, a->max_length, &t->eval));
    s->round = in->place.arch ? 64 : 16;
    s->rows = 64, s->docs = 1;
    if (t->train) batch_bounds(t->train, a->batch, s->round, &s->rows, &s->docs);
    if (t->eval) batch_bounds(t->eval, a->eval_batch, s->round, &s->rows, &s->docs);
    if (!t->train && !t->eval) {
        s->rows = a->batch * ql_round_up(a->max_length, s->round);
        s->docs = pack ? DOCS_WITHOUT_DATA * a->batch : a->batch;
    }
    s->docs = ql_round_up(s->docs, 16);
    /* Positions and rows are 32-bit numbers. */
    if (s->rows > INT32_MAX)
        QL_FAIL(QL_ENOSUP, "a micro-batch of %lld tokens: at most %d. A smaller --per_device_train_batch_size, --per_device_eval_batch_size or "
                "--max_length", (long long)s->rows, (int)INT32_MAX);
    int64_t samples = t->train ? ql_dataset_size(t->train) : a->batch * a->accumulation * in->place.world;
    QL_TRY(ql_steps_plan(a, samples, in->place.world, &t->steps));
    if (t->steps.group > QL_MAX_ACCUM)
        QL_FAIL(QL_ENOSUP, "--gradient_accumulation_steps %lld on %d devices are %lld micro-batches a step: at most %d. A larger "
                "--per_device_train_batch_size makes fewer", (long long)a->accumulation, in->place.world, (long long)t->steps.group, (int)QL_MAX_ACCUM);
    return QL_OK;
}

static void fill_spec(ql_task *t, const ql_task_inputs *in)
{
    ql_spec *s = &t->spec;
    const ql_args *a = &t->args;
    ql_choice *c = &s->choice;
    s->model = t->model;
    s->lora = t->lora;
    s->dropout = t->lora->cfg.dropout;
    s->smoothing = a->label_smoothing;
    s->seed = a->seed;
    s->head_chunk = HEAD_CHUNK;
    s->steps = t->steps.max_steps;
    s->quant = (ql_quant){a->load_in_4bit, a->double_quant, a->dequant_direct};
    s->state = a->adam_8bit ? QL_ADAM_8BIT : QL_ADAM_F32;
    s->state_host = a->adam_paged || a->fsdp.offload;
    c->world = in->place.world;
    c->layers = (int)t->model->cfg.layers;
    c->first = (int)t->lora->target[0].layer;
    c->g = (int)t->steps.group;
    c->pieces = ql_plan_pieces(c->g, a->exact_worlds);
    c->train = 1;
}

ql_status ql_task_open(const ql_task_inputs *in, ql_task **out)
{
    ql_status st = QL_OK;
    const char *path;
    ql_task *t = calloc(1, sizeof *t);
    if (!t) QL_FAIL(QL_ENOMEM, "no memory for a job");
    t->place = in->place;
    QL_GO(ql_job_from_json(in->job, &t->job));
    QL_GO(ql_args_from_job(t->job, &t->args));
    path = t->args.model;
    if (!path) {
        st = ql_fail(QL_EINVAL, "no model: `load NAME` first");
        goto out;
    }
    if (in->weights == QL_WEIGHTS_MAPPED)
        QL_GO(ql_model_open(path, &t->model));
    else
        QL_GO(ql_model_open_config(path, &t->model));
    ql_model_skip(t->model, ql_job_get(t->job, "llm_int8_skip_modules"));
    QL_GO(open_adapters(t, in));
    pick_dtypes(t, &in->place);
    QL_GO(open_data(t, in));
    t->pad_id = (int32_t)ql_max64(0, t->model->cfg.pad >= 0 ? t->model->cfg.pad : t->model->cfg.eos_count ? t->model->cfg.eos[0] : 0);
    fill_spec(t, in);
    st = ql_choose(&t->spec, &t->args, &in->place, &t->why);
    if (st == QL_ENOMEM && in->anyway) {
        snprintf(t->lacks, sizeof t->lacks, "%s", ql_error());
        ql_error_clear();
        st = QL_OK;
    }
out:
    if (st == QL_OK)
        *out = t;
    else
        ql_task_close(t);
    return st;
}

static ql_lr schedule_of(const ql_task *t)
{
    ql_lr lr = t->args.lr;
    lr.warmup = t->steps.warmup;
    lr.total = t->steps.max_steps;
    return lr;
}

double ql_task_lr_at(const ql_task *t, int64_t step)
{
    ql_lr lr = schedule_of(t);
    return lr.lr * ql_lr_factor(&lr, step);
}

ql_status ql_task_lr(const ql_task *t, float **out)
{
    ql_lr lr = schedule_of(t);
    float *v = malloc((size_t)t->spec.steps * sizeof *v);
    if (!v) QL_FAIL(QL_ENOMEM, "no memory for %lld learning rates", (long long)t->spec.steps);
    ql_lr_table(&lr, t->spec.steps, v);
    *out = v;
    return QL_OK;
}

int ql_task_same_model(const ql_task *a, const ql_task *b)
{
    const ql_spec *x = &a->spec, *y = &b->spec;
    if (strcmp(a->args.model, b->args.model) != 0 || a->lora->elements != b->lora->elements || a->lora->count != b->lora->count) return 0;
    for (int64_t i = 0; i < a->lora->count; i++)
        if (memcmp(&a->lora->target[i], &b->lora->target[i], sizeof a->lora->target[i]) != 0) return 0;
    if (a->model->files && b->model->files && ql_st_stamp(a->model->files) != ql_st_stamp(b->model->files)) return 0;
    if (!json_equal(ql_job_get(a->job, "llm_int8_skip_modules"), ql_job_get(b->job, "llm_int8_skip_modules"))) return 0;
    return x->dtype == y->dtype && x->res == y->res && memcmp(&x->quant, &y->quant, sizeof x->quant) == 0;
}

int ql_task_same_place(const ql_task *a, const ql_task *b)
{
    const ql_spec *x = &a->spec, *y = &b->spec;
    return ql_task_same_model(a, b) && x->dropout == y->dropout && x->smoothing == y->smoothing && x->seed == y->seed &&
           x->rows == y->rows && x->round == y->round && x->docs == y->docs && x->head_chunk == y->head_chunk && x->steps == y->steps && x->state == y->state &&
           x->state_host == y->state_host && memcmp(&x->choice, &y->choice, sizeof x->choice) == 0;
}
