#include "core/args.h"

#include <math.h>
#include <string.h>

/* The position of the setting's value among words. */
static int word(const ql_job *job, const char *name, const char *const *words, int n)
{
    const char *v = ql_job_str(job, name);
    for (int i = 0; v && i < n; i++)
        if (strcmp(words[i], v) == 0) return i;
    return -1;
}

static bool is(const ql_job *job, const char *name, const char *value)
{
    return word(job, name, &value, 1) == 0;
}

static ql_dtype dtype(const ql_job *job, const char *name)
{
    static const char *const words[] = {"float32", "float16", "bfloat16"};
    static const ql_dtype types[] = {QL_F32, QL_F16, QL_BF16};
    int i = word(job, name, words, 3);
    return i < 0 ? QL_DTYPES : types[i];
}

static ql_pick pick(const ql_job *job, const char *name)
{
    static const char *const words[] = {"false", "true"};
    return (ql_pick)word(job, name, words, 2);
}

static ql_every every(const ql_job *job, const char *name)
{
    static const char *const words[] = {"no", "steps", "epoch", "best"};
    return (ql_every)word(job, name, words, 4);
}

static void read_model(const ql_job *job, ql_args *a)
{
    a->model = ql_job_str(job, "model");
    a->dtype = dtype(job, "dtype");
    if (a->dtype == QL_DTYPES) a->dtype = dtype(job, "bnb_4bit_compute_dtype"); /* ql_job_check: they do not differ */
    if (a->dtype == QL_DTYPES) a->dtype = dtype(job, "param_dtype");
    if (a->dtype == QL_DTYPES && ql_job_bool(job, "fp16")) a->dtype = QL_F16;
    if (a->dtype == QL_DTYPES && ql_job_bool(job, "bf16")) a->dtype = QL_BF16;
    a->residual_dtype = dtype(job, "residual_dtype");
    if (a->residual_dtype == QL_DTYPES) a->residual_dtype = dtype(job, "output_dtype");
    a->load_in_4bit = ql_job_bool(job, "load_in_4bit");
    a->double_quant = ql_job_bool(job, "bnb_4bit_use_double_quant");
    a->dequant_direct = is(job, "dequant_via", "direct");
}

static void read_data(const ql_job *job, ql_args *a)
{
    a->batch = ql_job_int(job, "per_device_train_batch_size");
    a->eval_batch = ql_job_int(job, "per_device_eval_batch_size");
    a->accumulation = ql_job_int(job, "gradient_accumulation_steps");
    a->max_length = ql_job_int(job, "max_length");
    a->seed = (uint64_t)ql_job_int(job, "seed");
    a->data_seed = ql_job_is_set(job, "data_seed") ? (uint64_t)ql_job_int(job, "data_seed") : a->seed;
    a->order = is(job, "train_sampling_strategy", "sequential") ? QL_ORDER_SEQUENTIAL : QL_ORDER_RANDOM;
    a->order_file = ql_job_str(job, "order_file");
    a->drop_last = ql_job_bool(job, "dataloader_drop_last");
}

static ql_status read_update(const ql_job *job, ql_args *a)
{
    const char *optim = ql_job_str(job, "optim");
    bool torch = strncmp(optim, "adamw_torch", 11) == 0;
    a->epochs = ql_job_float(job, "num_train_epochs");
    a->max_steps = ql_job_int(job, "max_steps");
    a->warmup_steps = ql_job_float(job, "warmup_steps");
    a->warmup_ratio = ql_job_float(job, "warmup_ratio");
    a->adam = (ql_adam){torch ? QL_ADAM_TORCH : QL_ADAM_BNB, (float)ql_job_float(job, "adam_beta1"), (float)ql_job_float(job, "adam_beta2"),
                        (float)ql_job_float(job, "adam_epsilon"), (float)ql_job_float(job, "weight_decay")};
    a->adam_8bit = strstr(optim, "8bit") != NULL;
    a->adam_paged = strncmp(optim, "paged_", 6) == 0 || a->fsdp.offload;
    /* the defaults of torch's GradScaler */
    a->clip = (ql_clip){.max_norm = (float)ql_job_float(job, "max_grad_norm"), .growth_factor = 2, .backoff_factor = 0.5f, .growth_interval = 2000};
    a->loss_scale = 65536;
    a->unshifted = is(job, "loss_denominator", "hf_unshifted");
    a->label_smoothing = ql_job_float(job, "label_smoothing_factor");
    return ql_lr_init(ql_job_str(job, "lr_scheduler_type"), ql_job_get(job, "lr_scheduler_kwargs"), ql_job_float(job, "learning_rate"), &a->lr);
}

static ql_status read_memory(const ql_job *job, ql_args *a)
{
    static const char *const pipelines[] = {"auto", "off", "1f1b", "recompute_ahead"};
    const json_t *dm = ql_job_get(job, "device_memory"), *hm = ql_job_get(job, "host_memory");
    QL_TRY(ql_devices_parse(ql_job_str(job, "devices"), &a->devices));
    if (ql_job_bool(job, "use_cpu") && a->devices.kind == QL_DEVICES_AUTO) a->devices = (ql_devices){.kind = QL_DEVICES_CPU, .count = 1};
    QL_TRY(ql_fsdp_parse(ql_job_get(job, "fsdp"), ql_job_get(job, "fsdp_config"), &a->fsdp, NULL));
    a->store = ql_job_get(job, "store");
    a->checkpointing = a->fsdp.checkpoint_set && !ql_job_is_set(job, "gradient_checkpointing") ? (ql_pick)a->fsdp.checkpoint
                                                                                               : pick(job, "gradient_checkpointing");
    a->activation_offload = pick(job, "activation_offloading");
    a->breadth = pick(job, "breadth");
    a->pipeline = (ql_pipeline)word(job, "pipeline", pipelines, 4);
    a->exact_worlds = (int)ql_job_int(job, "exact_worlds");
    a->deadline_ms = ql_job_int(job, "deadline_ms");
    if (!json_is_null(hm)) QL_TRY(ql_bytes_parse(hm, "host_memory", &a->host_memory));
    if (json_is_null(dm)) return QL_OK;
    for (size_t i = 0; i < QL_MAX_DEVICES; i++) { /* one size for all, or one each, the last for those unnamed */
        size_t n = json_array_size(dm);
        const json_t *v = json_is_array(dm) ? json_array_get(dm, i < n ? i : n - 1) : dm;
        QL_TRY(ql_bytes_parse(v, "device_memory", &a->device_memory[i]));
    }
    return QL_OK;
}

static void read_records(const ql_job *job, ql_args *a)
{
    a->log_every = every(job, "logging_strategy");
    a->eval_every = every(job, "eval_strategy");
    a->save_every = every(job, "save_strategy");
    a->logging_steps = ql_job_float(job, "logging_steps");
    a->eval_steps_set = ql_job_is_set(job, "eval_steps");
    a->eval_steps = a->eval_steps_set ? ql_job_float(job, "eval_steps") : a->logging_steps;
    a->save_steps = ql_job_float(job, "save_steps");
    a->eval_delay = ql_job_float(job, "eval_delay");
    a->log_first = ql_job_bool(job, "logging_first_step");
    a->nan_filter = ql_job_bool(job, "logging_nan_inf_filter");
    a->eval_on_start = ql_job_bool(job, "eval_on_start");
    a->save_only_model = ql_job_bool(job, "save_only_model");
    a->load_best = ql_job_bool(job, "load_best_model_at_end");
    a->greater_is_better = ql_job_bool(job, "greater_is_better"); /* null: the only metric is a loss */
    a->track_best = a->load_best || a->save_every == QL_EVERY_BEST || ql_job_is_set(job, "metric_for_best_model");
    a->count_tokens = ql_job_bool(job, "include_num_input_tokens_seen") ? QL_TOKENS_YES : QL_TOKENS_NO;
    a->save_minutes = ql_job_float(job, "save_minutes");
    a->save_total_limit = ql_job_int(job, "save_total_limit");
    a->save_dtype = dtype(job, "save_dtype");
}

ql_status ql_args_from_job(const ql_job *job, ql_args *out)
{
    ql_args a = {0};
    QL_TRY(ql_job_check(job));
    read_model(job, &a);
    read_data(job, &a);
    QL_TRY(read_memory(job, &a));
    QL_TRY(read_update(job, &a));
    read_records(job, &a);
    *out = a;
    return QL_OK;
}

/* ---- steps ---------------------------------------------------------------------------------------- */

/* Below 1 a part of all steps, else whole. At least 1. */
static int64_t steps_of(double x, int64_t max_steps)
{
    double n = x < 1 ? ceil((double)max_steps * x) : x;
    return n >= 1 ? (int64_t)n : 1;
}

ql_status ql_steps_plan(const ql_args *a, int64_t rows, int64_t world, ql_steps *out)
{
    ql_steps p = {.rows = rows, .group = a->accumulation * world};
    double n;
    if (world < 1) QL_FAIL(QL_EINTERNAL, "a world of %lld", (long long)world);
    p.batches = a->drop_last ? rows / a->batch : ql_ceil_div(rows, a->batch);
    if (p.batches < 1)
        QL_FAIL(QL_EINVAL, "the training set has %lld sample%s: not one batch of %lld%s", (long long)rows, rows == 1 ? "" : "s", (long long)a->batch,
                rows > 0 ? " (dataloader_drop_last leaves out a short one)" : "");
    p.updates = ql_ceil_div(p.batches, p.group);
    n = a->max_steps > 0 ? (double)a->max_steps : ceil(a->epochs * (double)p.updates);
    if (n > 1e8) /* every step's rate is in memory */
        QL_FAIL(QL_EINVAL, "%.0f optimizer steps are more than 100000000: set a lower %s", n, a->max_steps > 0 ? "max_steps" : "num_train_epochs");
    p.max_steps = (int64_t)n;
    p.epochs = ql_ceil_div(p.max_steps, p.updates);
    if (a->warmup_steps >= 1) p.warmup = (int64_t)a->warmup_steps;
    else p.warmup = (int64_t)ceil((double)p.max_steps * (a->warmup_steps > 0 ? a->warmup_steps : a->warmup_ratio));
    p.logging_steps = steps_of(a->logging_steps, p.max_steps);
    p.eval_steps = steps_of(a->eval_steps, p.max_steps);
    p.save_steps = steps_of(a->save_steps, p.max_steps);
    *out = p;
    return QL_OK;
}

ql_step_at ql_steps_at(const ql_steps *p, int64_t step)
{
    ql_step_at at = {.epoch = step / p->updates, .first = step % p->updates * p->group};
    at.count = ql_min64(p->group, p->batches - at.first);
    return at;
}

double ql_steps_epoch(const ql_steps *p, int64_t done)
{
    if (done <= 0) return 0;
    ql_step_at last = ql_steps_at(p, done - 1);
    return (double)last.epoch + (double)(last.first + last.count) / (double)p->batches;
}

unsigned ql_steps_due(const ql_args *a, const ql_steps *p, int64_t done)
{
    unsigned due = 0;
    bool last = done >= p->max_steps, epoch_end = last || done % p->updates == 0;
    double epoch = ql_steps_epoch(p, done);
    if (done == 1 && a->log_first) due |= QL_DUE_LOG;
    if (a->log_every == QL_EVERY_STEPS && done % p->logging_steps == 0) due |= QL_DUE_LOG;
    if (a->log_every == QL_EVERY_EPOCH && epoch_end) due |= QL_DUE_LOG;
    if (a->eval_every == QL_EVERY_STEPS && (last || done % p->eval_steps == 0) && a->eval_delay <= (double)done) due |= QL_DUE_EVAL;
    if (a->eval_every == QL_EVERY_EPOCH && epoch_end && a->eval_delay <= epoch) due |= QL_DUE_EVAL;
    if (a->save_every == QL_EVERY_STEPS && (last || done % p->save_steps == 0)) due |= QL_DUE_SAVE;
    if (a->save_every == QL_EVERY_EPOCH && epoch_end) due |= QL_DUE_SAVE;
    return last ? due | QL_DUE_STOP : due;
}
