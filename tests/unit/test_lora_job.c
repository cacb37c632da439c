/* A job that starts from an adapter: the adapter's table holds, settings that differ are refused by name. */
#include "core/job.h"
#include "core/lora_job.h"
#include "kernels/half.h"
#include "tests/tmp.h"

static const ql_config model = {.arch = QL_LLAMA, .hidden = 64, .layers = 2, .heads = 4, .kv_heads = 2, .head_dim = 16, .ffn = 96, .vocab = 100};

static const char settings[] = "{\"r\": 4, \"lora_alpha\": 6, \"lora_dropout\": 0.25, \"use_rslora\": true, \"target_modules\": [\"q_proj\", \"down_proj\"],"
                               " \"rank_pattern\": {\"layers.1.*.q_proj\": 3}, \"alpha_pattern\": {\"down_proj\": 5}}";

/* An adapter folder with values that are all different. */
static ql_lora *adapter(const char *folder, const char *text, float **flat)
{
    ql_lora_config c = {0};
    ql_lora *l = NULL;
    json_t *o = json_loads(text, 0, NULL);
    if (ql_lora_config_parse(o, "test", &c) != QL_OK || ql_lora_build(&model, &c, &l) != QL_OK) exit(99);
    json_decref(o);
    *flat = calloc((size_t)l->elements, 4);
    ql_lora_init(l, 99, *flat);
    for (int64_t i = 0; i < l->count; i++)
        for (int64_t k = 0; k < l->target[i].n * l->target[i].r; k++) (*flat)[l->target[i].b + k] = 0.001f * (float)(k % 1000 + i + 1);
    if (ql_lora_save(l, *flat, QL_F32, folder) != QL_OK) exit(99);
    return l;
}

static ql_job *job_of(const char *folder, const char *more)
{
    ql_job *j = NULL;
    json_t *o = json_loads(more, 0, NULL);
    json_object_set_new(o, "adapter", json_string(folder));
    if (ql_job_from_json(o, &j) != QL_OK) exit(99);
    json_decref(o);
    return j;
}

static int same_table(const ql_lora *a, const ql_lora *b)
{
    if (a->count != b->count || a->elements != b->elements) return 0;
    for (int64_t i = 0; i < a->count; i++) {
        const ql_lora_target *x = &a->target[i], *y = &b->target[i];
        if (x->layer != y->layer || x->linear != y->linear || x->r != y->r || x->a != y->a || x->b != y->b || ql_f32_bits(x->scale) != ql_f32_bits(y->scale))
            return 0;
    }
    return 1;
}

TEST(the_adapters_settings_and_values_hold)
{
    char folder[QL_PATH_MAX];
    float *flat, *first;
    ql_lora *was, *l = NULL;
    snprintf(folder, sizeof folder, "%s", tmp_dir("adapter"));
    was = adapter(folder, settings, &flat);
    ql_job *j = job_of(folder, "{}");
    CHECK_OK(ql_lora_of_job(j, NULL, &model, &l));
    CHECK(same_table(was, l));
    CHECK_CLOSE(l->cfg.dropout, 0.25, 0);
    first = malloc((size_t)l->elements * 4);
    CHECK_OK(ql_lora_first(l, j, first));
    CHECK(memcmp(first, flat, (size_t)l->elements * 4) == 0);
    free(first);
    ql_lora_close(l);
    ql_job_free(j);
    /* Dropout is the run's own, and the adapter's settings may be said again. */
    j = job_of(folder, "{\"lora_dropout\": 0.5, \"r\": 4, \"lora_alpha\": 6.0, \"target_modules\": [\"down_proj\", \"q_proj\"], \"use_rslora\": true,"
                       " \"rank_pattern\": {\"layers.1.*.q_proj\": 3}}");
    CHECK_OK(ql_lora_of_job(j, NULL, &model, &l));
    CHECK(same_table(was, l));
    CHECK_CLOSE(l->cfg.dropout, 0.5, 0);
    ql_lora_close(l);
    ql_job_free(j);
    ql_lora_close(was);
    free(flat);
}

TEST(settings_that_differ_are_refused_by_name)
{
    static const struct {
        const char *more, *part;
    } k[] = {
        {"{\"r\": 16}", "r is 16 in the job and 4 in "},
        {"{\"lora_alpha\": 16}", "lora_alpha is 16 in the job and 6 in "},
        {"{\"target_modules\": \"all-linear\"}", "target_modules is [\"q_proj\""},
        {"{\"target_modules\": [\"q_proj\"]}", "target_modules is [\"q_proj\"] in the job"},
        {"{\"use_rslora\": false}", "use_rslora is false in the job and true in "},
        {"{\"rank_pattern\": {}}", "rank_pattern is {} in the job"},
        {"{\"alpha_pattern\": {\"down_proj\": 7}}", "alpha_pattern is {\"down_proj\""},
        {"{\"exclude_modules\": [\"o_proj\"]}", "exclude_modules is [\"o_proj\"] in the job and null in "},
        {"{\"target_modules\": [\"q_proj\", \"down_proj\"], \"layers_to_transform\": [0]}", "layers_to_transform is [0] in the job and null in "},
    };
    char folder[QL_PATH_MAX];
    float *flat;
    ql_lora *l = NULL;
    snprintf(folder, sizeof folder, "%s", tmp_dir("adapter"));
    ql_lora_close(adapter(folder, settings, &flat));
    free(flat);
    for (size_t i = 0; i < sizeof k / sizeof *k; i++) {
        ql_job *j = job_of(folder, k[i].more);
        CHECK_FAILS(ql_lora_of_job(j, NULL, &model, &l), QL_EINVAL, k[i].part);
        ql_job_free(j);
    }
}

/* PEFT writes all-linear as the list of names. */
TEST(all_linear_is_the_list_of_names)
{
    char folder[QL_PATH_MAX];
    float *flat;
    ql_lora *l = NULL;
    snprintf(folder, sizeof folder, "%s", tmp_dir("all"));
    ql_lora_close(adapter(folder, "{\"r\": 2, \"target_modules\": \"all-linear\"}", &flat));
    free(flat);
    ql_job *j = job_of(folder, "{\"target_modules\": \"all-linear\"}");
    CHECK_OK(ql_lora_of_job(j, NULL, &model, &l));
    CHECK_INT(l->count, 2 * QL_LINEARS);
    ql_lora_close(l);
    ql_job_free(j);
}

/* A run goes on from its checkpoint, whether what it started from is still there or not. */
TEST(a_checkpoint_stands_in)
{
    char folder[QL_PATH_MAX], checkpoint[QL_PATH_MAX];
    float *flat;
    ql_lora *l = NULL;
    snprintf(folder, sizeof folder, "%s/gone", tmp_dir("adapter"));
    snprintf(checkpoint, sizeof checkpoint, "%s", tmp_dir("checkpoint"));
    ql_lora *was = adapter(checkpoint, settings, &flat);
    ql_job *j = job_of(folder, "{}");
    CHECK_OK(ql_lora_of_job(j, checkpoint, &model, &l));
    CHECK(same_table(was, l));
    CHECK_FAILS(ql_lora_first(l, j, flat), QL_EIO, "gone");
    ql_lora_close(l);
    CHECK_FAILS(ql_lora_of_job(j, NULL, &model, &l), QL_EINVAL, "not a PEFT adapter");
    ql_job_free(j);
    ql_lora_close(was);
    free(flat);
    /* Without an adapter the settings decide, as ever. */
    CHECK_OK(ql_job_new(&j));
    CHECK_OK(ql_lora_of_job(j, checkpoint, &model, &l));
    CHECK_INT(l->cfg.r, 16);
    CHECK_INT(l->count, 2 * QL_LINEARS);
    ql_lora_close(l);
    ql_job_free(j);
}

TEST(names_that_people_know_it_by)
{
    static const char *const names[] = {"init_adapter", "adapter_name_or_path", "adapter_path", "lora_model_dir"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        ql_job *j = NULL;
        CHECK_OK(ql_job_new(&j));
        CHECK_OK(ql_job_set_text(j, names[i], "runs/run-1"));
        CHECK_STR(ql_job_str(j, "adapter"), "runs/run-1");
        ql_job_free(j);
    }
}

/* What `config` takes with a note that it has no effect has none: training does not refuse it later. */
TEST(what_has_no_effect_is_not_refused_later)
{
    static const char *const noted[] = {
        "{\"ensure_weight_tying\": true}", "{\"inference_mode\": true}", "{\"runtime_config\": {\"ephemeral_gpu_offload\": true}}",
        "{\"auto_mapping\": {\"base_model_class\": \"X\"}}", "{\"peft_version\": \"0.99\"}", "{\"megatron_core\": \"other\"}",
        "{\"qalora_group_size\": 32}", "{\"autocast_adapter_dtype\": false}", "{\"base_model_name_or_path\": \"me/x\"}",
        "{\"task_type\": \"CAUSAL_LM\", \"peft_type\": \"LORA\"}"};
    for (size_t i = 0; i < sizeof noted / sizeof *noted; i++) {
        json_t *o = json_loads(noted[i], 0, NULL), *group;
        ql_job *j = NULL;
        ql_lora_config c = {0};
        CHECK_OK(ql_job_from_json(o, &j));
        CHECK_OK(ql_job_check(j));
        group = ql_job_group(j, "lora");
        CHECK_OK(ql_lora_config_parse(group, noted[i], &c));
        ql_lora_config_free(&c);
        json_decref(group);
        json_decref(o);
        ql_job_free(j);
    }
}

TEST_MAIN(T(what_has_no_effect_is_not_refused_later), T(the_adapters_settings_and_values_hold), T(settings_that_differ_are_refused_by_name), T(all_linear_is_the_list_of_names),
          T(a_checkpoint_stands_in), T(names_that_people_know_it_by))
