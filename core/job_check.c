/* Conflicts between settings: each is fine alone. */
#include "core/job.h"
#include "core/schedule.h"

#include <math.h>
#include <string.h>
#include <strings.h>

static bool is(const ql_job *job, const char *name, const char *value)
{
    const char *v = ql_job_str(job, name);
    return v && strcmp(v, value) == 0;
}

/* dtype, bnb_4bit_compute_dtype, FSDP2's param_dtype, fp16 and bf16 name one thing. */
static ql_status check_dtype(const ql_job *job)
{
    const char *first = NULL, *first_name = NULL;
    const struct {
        const char *name, *value;
    } said[] = {
        {"dtype", ql_job_str(job, "dtype")},
        {"bnb_4bit_compute_dtype", ql_job_str(job, "bnb_4bit_compute_dtype")},
        {"param_dtype", ql_job_str(job, "param_dtype")},
        {"fp16", ql_job_bool(job, "fp16") ? "float16" : "auto"},
        {"bf16", ql_job_bool(job, "bf16") ? "bfloat16" : "auto"},
    };
    for (size_t i = 0; i < sizeof said / sizeof *said; i++) {
        if (strcmp(said[i].value, "auto") == 0) continue;
        if (first && strcmp(first, said[i].value))
            QL_FAIL(QL_EINVAL, "%s says %s and %s says %s: keep one of them", first_name, first, said[i].name, said[i].value);
        first = said[i].value, first_name = said[i].name;
    }
    const char *r = ql_job_str(job, "residual_dtype"), *o = ql_job_str(job, "output_dtype");
    if (strcmp(r, "auto") && strcmp(o, "auto") && strcmp(r, o))
        QL_FAIL(QL_EINVAL, "residual_dtype says %s and output_dtype says %s: keep one of them", r, o);
    return QL_OK;
}

static ql_status check_lora(const ql_job *job)
{
    const json_t *t = ql_job_get(job, "target_modules");
    bool layers = !json_is_null(ql_job_get(job, "layers_to_transform"));
    if (!layers && !json_is_null(ql_job_get(job, "layers_pattern")))
        QL_FAIL(QL_EINVAL, "layers_pattern is set without layers_to_transform: set both");
    if (layers && json_is_string(t) && strcasecmp(json_string_value(t), "all-linear"))
        QL_FAIL(QL_EINVAL, "layers_to_transform cannot be combined with a regex in target_modules: list the names, or put the layers into the regex");
    return QL_OK;
}

static ql_status check_data(const ql_job *job)
{
    if (ql_job_bool(job, "assistant_only_loss") && ql_job_bool(job, "train_on_responses"))
        QL_FAIL(QL_EINVAL, "assistant_only_loss and train_on_responses both choose the trained tokens: keep one");
    if (ql_job_is_set(job, "order_file") && is(job, "train_sampling_strategy", "sequential"))
        QL_FAIL(QL_EINVAL, "order_file and train_sampling_strategy sequential both choose the order: keep one");
    return QL_OK;
}

static ql_status positive_steps(const ql_job *job, const char *strategy, const char *steps)
{
    const json_t *v = ql_job_get(job, steps);
    if (is(job, strategy, "steps") && json_is_number(v) && json_number_value(v) <= 0)
        QL_FAIL(QL_EINVAL, "%s steps needs %s above 0, found %g", strategy, steps, json_number_value(v));
    return QL_OK;
}

/* As transformers: the best model can be found only among checkpoints that were evaluated. */
static ql_status check_best(const ql_job *job)
{
    const char *e = ql_job_str(job, "eval_strategy"), *s = ql_job_str(job, "save_strategy");
    const json_t *es = ql_job_get(job, "eval_steps"), *ls = ql_job_get(job, "logging_steps"), *ss = ql_job_get(job, "save_steps");
    double every = json_number_value(json_is_null(es) ? ls : es), save = json_number_value(ss), q;
    if (strcmp(s, "best") == 0) {
        if (strcmp(e, "no")) return QL_OK;
        QL_FAIL(QL_EINVAL, "save_strategy best needs eval_strategy steps or epoch");
    }
    if (!ql_job_bool(job, "load_best_model_at_end")) return QL_OK;
    if (strcmp(e, "no") == 0 || strcmp(e, s))
        QL_FAIL(QL_EINVAL, "load_best_model_at_end needs eval_strategy and save_strategy to be the same (steps or epoch), found %s and %s", e, s);
    if (strcmp(e, "steps")) return QL_OK;
    if ((every < 1) != (save < 1))
        QL_FAIL(QL_EINVAL, "load_best_model_at_end: eval_steps %g and save_steps %g must both be steps or both be parts", every, save);
    q = save / every;
    if (fabs(q - nearbyint(q)) > 1e-9 || q < 1)
        QL_FAIL(QL_EINVAL, "load_best_model_at_end needs save_steps to be a multiple of eval_steps, found %g and %g", save, every);
    return QL_OK;
}

static ql_status check_records(const ql_job *job)
{
    QL_TRY(positive_steps(job, "logging_strategy", "logging_steps"));
    QL_TRY(positive_steps(job, "save_strategy", "save_steps"));
    QL_TRY(positive_steps(job, "eval_strategy", "eval_steps"));
    if ((!is(job, "eval_strategy", "no") || ql_job_bool(job, "eval_on_start")) && !ql_job_str(job, "eval_dataset"))
        QL_FAIL(QL_EINVAL, "%s needs an eval_dataset", ql_job_bool(job, "eval_on_start") ? "eval_on_start" : "eval_strategy");
    if (is(job, "eval_strategy", "steps") && !ql_job_is_set(job, "eval_steps") && ql_job_float(job, "logging_steps") <= 0)
        QL_FAIL(QL_EINVAL, "eval_strategy steps needs eval_steps above 0");
    return check_best(job);
}

/* One store for all layers was named: which? */
static bool store_is(const ql_job *job, const char *kind)
{
    const json_t *v = ql_job_get(job, "store");
    return json_is_string(v) && strcmp(json_string_value(v), kind) == 0;
}

static ql_status check_memory(const ql_job *job)
{
    ql_fsdp f;
    QL_TRY(ql_fsdp_parse(ql_job_get(job, "fsdp"), ql_job_get(job, "fsdp_config"), &f, NULL));
    if (f.checkpoint_set && f.checkpoint && is(job, "gradient_checkpointing", "true"))
        QL_FAIL(QL_EINVAL, "gradient_checkpointing and fsdp_config's activation_checkpointing are both on: keep one");
    if (f.checkpoint_set && f.checkpoint && is(job, "gradient_checkpointing", "false") && ql_job_is_set(job, "gradient_checkpointing"))
        QL_FAIL(QL_EINVAL, "gradient_checkpointing is off and fsdp_config's activation_checkpointing is on: keep one");
    if (f.forward_set && ql_job_is_set(job, "forward_prefetch") && f.forward != (bool)ql_job_bool(job, "forward_prefetch"))
        QL_FAIL(QL_EINVAL, "forward_prefetch and fsdp_config's forward_prefetch differ: keep one");
    if (f.backward_set && ql_job_is_set(job, "backward_prefetch") && f.backward != (bool)ql_job_bool(job, "backward_prefetch"))
        QL_FAIL(QL_EINVAL, "backward_prefetch and fsdp_config's backward_prefetch differ: keep one");
    if (f.mode == QL_FSDP_ON && f.reshard && !f.offload && (store_is(job, "resident") || store_is(job, "resident16")))
        QL_FAIL(QL_EINVAL, "fsdp shards the base and store %s does not: keep one", ql_job_str(job, "store"));
    if (f.mode == QL_FSDP_OFF && store_is(job, "sharded")) QL_FAIL(QL_EINVAL, "fsdp is off and store is sharded: keep one");
    return QL_OK;
}

/* A stage has its layers whole, or streams them from the host. */
static ql_status check_pipeline(const ql_job *job)
{
    ql_fsdp f;
    const char *p = ql_job_str(job, "pipeline");
    if (is(job, "pipeline", "off") || is(job, "pipeline", "auto")) return QL_OK;
    QL_TRY(ql_fsdp_parse(ql_job_get(job, "fsdp"), ql_job_get(job, "fsdp_config"), &f, NULL));
    if ((f.mode == QL_FSDP_ON && f.reshard && !f.offload) || store_is(job, "sharded"))
        QL_FAIL(QL_EINVAL, "pipeline %s gives each device layers of its own, %s shares every layer: keep one (--fsdp false, or --pipeline off; "
                "fsdp_config's cpu_offload and store host go with a pipeline)", p, store_is(job, "sharded") ? "store sharded" : "fsdp");
    if (is(job, "breadth", "true"))
        QL_FAIL(QL_EINVAL, "pipeline %s and breadth are two orders of the same work: keep one", p);
    return QL_OK;
}

static ql_status check_devices(const ql_job *job)
{
    ql_devices d;
    QL_TRY(ql_devices_parse(ql_job_str(job, "devices"), &d));
    if (ql_job_bool(job, "use_cpu") && d.kind == QL_DEVICES_CUDA)
        QL_FAIL(QL_EINVAL, "use_cpu and devices '%s' disagree: keep one", ql_job_str(job, "devices"));
    return QL_OK;
}

ql_status ql_job_check(const ql_job *job)
{
    ql_lr lr;
    QL_TRY(check_dtype(job));
    QL_TRY(check_lora(job));
    QL_TRY(check_data(job));
    QL_TRY(check_records(job));
    QL_TRY(check_memory(job));
    QL_TRY(check_pipeline(job));
    QL_TRY(ql_lr_init(ql_job_str(job, "lr_scheduler_type"), ql_job_get(job, "lr_scheduler_kwargs"), ql_job_float(job, "learning_rate"), &lr));
    return check_devices(job);
}
