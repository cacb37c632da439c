#include "core/job.h"
#include "tests/tmp.h"

static ql_job *fresh(void)
{
    ql_job *j = NULL;
    if (ql_job_new(&j) != QL_OK) abort();
    return j;
}

static ql_status set_json(ql_job *j, const char *name, const char *json)
{
    json_t *v = json_loads(json, JSON_DECODE_ANY, NULL);
    ql_status st = v ? ql_job_set(j, name, v) : QL_EINTERNAL;
    json_decref(v);
    return st;
}

TEST(table_is_sound)
{
    const ql_setting *s;
    int n = ql_settings(&s);
    static const char *const groups[] = {"model", "lora", "data", "train", "eval", "save", "memory", "devices"};
    CHECK(n > 150);
    for (int i = 0; i < n; i++) {
        json_t *d = json_loads(s[i].def, JSON_DECODE_ANY, NULL);
        int in = 0;
        CHECK_MSG(d, "%s: default is not JSON", s[i].name);
        for (size_t g = 0; g < sizeof groups / sizeof *groups; g++) in |= strcmp(groups[g], s[i].group) == 0;
        CHECK_MSG(in, "%s: group %s", s[i].name, s[i].group);
        CHECK_MSG(ql_setting_find(s[i].name) == &s[i], "%s is there twice or hidden", s[i].name);
        CHECK_MSG(s[i].help && *s[i].help, "%s has no help", s[i].name);
        CHECK_MSG((s[i].type == QL_SET_CHOICE) == (s[i].choices != NULL), "%s: choices", s[i].name);
        /* a default can be said */
        ql_job *j = fresh();
        CHECK_MSG(ql_job_set(j, s[i].name, d) == QL_OK, "%s: %s", s[i].name, ql_error());
        CHECK(json_is_null(d) || s[i].refused || ql_job_is_set(j, s[i].name));
        if (s[i].theirs) {
            json_t *t = json_loads(s[i].theirs, JSON_DECODE_ANY, NULL);
            CHECK_MSG(t && !json_equal(t, d), "%s: theirs", s[i].name);
            json_decref(t);
        }
        for (const char *a = s[i].alias; a && *a; a += strcspn(a, "|"), a += *a == '|') {
            char one[64];
            snprintf(one, sizeof one, "%.*s", (int)strcspn(a, "|"), a);
            CHECK_MSG(ql_setting_find(one) == &s[i], "alias %s of %s", one, s[i].name);
        }
        ql_job_free(j);
        json_decref(d);
    }
}

/* Every field of TrainingArguments, SFTConfig, LoraConfig and BitsAndBytesConfig is honoured, noted or refused: none is unknown. */
TEST(upstream_names_are_known)
{
    json_t *f = json_load_file("tests/golden/names.json", 0, NULL), *v;
    size_t i;
    CHECK(json_array_size(json_object_get(f, "names")) > 150);
    json_array_foreach(json_object_get(f, "names"), i, v)
        CHECK_MSG(ql_setting_find(json_string_value(v)), "'%s' is not known", json_string_value(v));
    json_decref(f);
}

TEST(defaults_of_qlora)
{
    ql_job *j = fresh();
    CHECK_INT(ql_job_int(j, "r"), 16);
    CHECK(ql_job_float(j, "learning_rate") == 2e-4);
    CHECK_STR(ql_job_str(j, "target_modules"), "all-linear");
    CHECK_STR(ql_job_str(j, "dtype"), "auto");
    CHECK_INT(ql_job_int(j, "per_device_train_batch_size"), 2);
    CHECK_INT(ql_job_int(j, "max_seq_length"), 1024);
    CHECK(ql_job_float(j, "max_grad_norm") == 1.0);
    CHECK(ql_job_str(j, "run_name") == NULL);
    CHECK(ql_job_get(j, "nonsense") == NULL);
    CHECK(!ql_job_is_set(j, "r"));
    ql_job_free(j);
}

TEST(values_in_every_form)
{
    ql_job *j = fresh();
    CHECK_OK(ql_job_set_text(j, "learning_rate", "1e-3"));
    CHECK(ql_job_float(j, "lr") == 1e-3);
    CHECK_OK(ql_job_set_text(j, "max_steps", "60"));
    CHECK_OK(set_json(j, "max_steps", "61.0"));
    CHECK(json_is_integer(ql_job_get(j, "max_steps")));
    CHECK_INT(ql_job_int(j, "max_steps"), 61);
    CHECK_OK(ql_job_set_text(j, "max_seq_length", "2048"));
    CHECK_INT(ql_job_int(j, "max_length"), 2048);
    CHECK_OK(ql_job_set_text(j, "target_modules", "q_proj, v_proj"));
    CHECK_INT(json_array_size(ql_job_get(j, "target_modules")), 2);
    CHECK_OK(ql_job_set_text(j, "target_modules", "q_proj"));
    CHECK_INT(json_array_size(ql_job_get(j, "target_modules")), 1);
    CHECK_OK(ql_job_set_text(j, "target_modules", ".*\\.(q|v)_proj"));
    CHECK_STR(ql_job_str(j, "target_modules"), ".*\\.(q|v)_proj");
    CHECK_OK(ql_job_set_text(j, "target_modules", "all-linear"));
    CHECK_STR(ql_job_str(j, "target_modules"), "all-linear");
    CHECK_OK(ql_job_set_text(j, "device_memory", "15GiB, 12GiB"));
    CHECK_STR(json_string_value(json_array_get(ql_job_get(j, "device_memory"), 1)), "12GiB");
    CHECK_OK(ql_job_set_text(j, "device_memory", "15 GiB"));
    CHECK_STR(ql_job_str(j, "device_memory"), "15 GiB");
    CHECK_OK(ql_job_set_text(j, "layers_to_transform", "0,3"));
    CHECK_INT(json_integer_value(json_array_get(ql_job_get(j, "layers_to_transform"), 1)), 3);
    CHECK_OK(ql_job_set_text(j, "fp16", "True"));
    CHECK(ql_job_bool(j, "fp16"));
    CHECK_OK(ql_job_set_text(j, "dtype", "torch.bfloat16"));
    CHECK_STR(ql_job_str(j, "torch_dtype"), "bfloat16");
    CHECK_OK(ql_job_set_text(j, "dtype", "fp16"));
    CHECK_STR(ql_job_str(j, "dtype"), "float16");
    CHECK_OK(set_json(j, "gradient_checkpointing", "true"));
    CHECK(ql_job_bool(j, "gradient_checkpointing"));
    CHECK_OK(ql_job_set_text(j, "gradient_checkpointing", "auto"));
    CHECK_STR(ql_job_str(j, "gradient_checkpointing"), "auto");
    CHECK_OK(ql_job_set_text(j, "lr_scheduler_kwargs", "{\"num_cycles\": 2}"));
    CHECK_OK(ql_job_set_text(j, "fsdp", "full_shard offload auto_wrap"));
    CHECK_OK(ql_job_set_text(j, "device_memory", "15GiB"));
    CHECK_OK(ql_job_set_text(j, "pipeline", "off"));
    CHECK_OK(set_json(j, "pipeline", "false"));
    CHECK_STR(ql_job_str(j, "pipeline"), "off");
    CHECK_OK(ql_job_set_text(j, "warmup_steps", "0.1"));
    CHECK_OK(ql_job_set_text(j, "max_steps", "null"));
    CHECK_INT(ql_job_int(j, "max_steps"), -1);
    CHECK(!ql_job_is_set(j, "max_steps"));
    ql_job_free(j);
}

TEST(bad_values_name_the_setting)
{
    static const struct {
        const char *name, *json;
        ql_status code;
        const char *part;
    } bad[] = {
        {"r", "0", QL_EINVAL, "r: must be a whole number from 1 to 1024, found 0"},
        {"r", "2.5", QL_EINVAL, "r: must be a whole number, found 2.5"},
        {"r", "\"16\"", QL_EINVAL, "found \"16\""},
        {"r", "99999999999", QL_EINVAL, "from 1 to 1024"},
        {"learning_rate", "-1", QL_EINVAL, "learning_rate: must be a number from 0 to 1000"},
        {"lora_dropout", "1.0", QL_EINVAL, "lora_dropout"},
        {"lora_alpha", "0", QL_EINVAL, "lora_alpha: must be a number from 1e-06 to 1000000, found 0"},
        {"alpha_pattern", "{\"q_proj\": 0}", QL_EINVAL, "regex → alpha (above 0)"},
        {"fp16", "1", QL_EINVAL, "true or false"},
        {"lora_alfa", "16", QL_EINVAL, "there is no setting 'lora_alfa'; did you mean 'lora_alpha'"},
        {"optim", "\"adamw_torch_fussed\"", QL_EINVAL, "did you mean 'adamw_torch_fused'"},
        {"optim", "\"lion_8bit\"", QL_EINVAL, "must be one of adamw_torch"},
        {"lr_scheduler_type", "\"reduce_lr_on_plateau\"", QL_EINVAL, "found \"reduce_lr_on_plateau\""},
        {"use_dora", "true", QL_ENOSUP, "DoRA is not supported"},
        {"modules_to_save", "[\"lm_head\"]", QL_ENOSUP, "modules_to_save is refused"},
        {"load_in_8bit", "true", QL_ENOSUP, "LLM.int8"},
        {"deepspeed", "\"ds.json\"", QL_ENOSUP, "fsdp"},
        {"neftune_noise_alpha", "5", QL_ENOSUP, "NEFTune"},
        {"pipeline", "\"gpipe\"", QL_EINVAL, "must be one of auto, off, 1f1b, recompute_ahead"},
        {"loss_denominator", "\"mean\"", QL_EINVAL, "shifted, hf_unshifted"},
        {"llm_int8_skip_modules", "[\"model.layers.*.mlp\"]", QL_EINVAL, "without wildcards"},
        {"llm_int8_skip_modules", "[1]", QL_EINVAL, "down_proj"},
        {"packing_strategy", "\"bfd_split\"", QL_ENOSUP, "wrapped"},
        {"ignore_data_skip", "true", QL_ENOSUP, "where the run stopped"},
        {"bias", "\"all\"", QL_ENOSUP, "only adapters are trained"},
        {"reduce_dtype", "\"bfloat16\"", QL_ENOSUP, "float32 only"},
        {"bnb_4bit_quant_type", "\"fp4\"", QL_ENOSUP, "NF4"},
        {"task_type", "\"SEQ_CLS\"", QL_ENOSUP, "task_type: 'SEQ_CLS' is not supported; CAUSAL_LM is"},
        {"peft_type", "\"IA3\"", QL_ENOSUP, "'IA3' is not supported; LORA is"},
        {"init_lora_weights", "\"pissa\"", QL_ENOSUP, "'pissa' is not supported"},
        {"rank_pattern", "{\"q_proj\": 0}", QL_EINVAL, "rank (1 to 1024)"},
        {"target_modules", "[]", QL_EINVAL, "target_modules"},
        {"target_modules", "[1]", QL_EINVAL, "target_modules"},
        {"layers_to_transform", "[-1]", QL_EINVAL, "layer's number"},
        {"devices", "\"cpu:0\"", QL_EINVAL, "cpu:N"},
        {"devices", "\"0,0\"", QL_EINVAL, "named twice"},
        {"store", "\"everywhere\"", QL_EINVAL, "'everywhere'"},
        {"store", "\"3-1:host\"", QL_EINVAL, "'3-1'"},
        {"fsdp", "\"hybrid_shard\"", QL_ENOSUP, "hybrid_shard"},
        {"fsdp_config", "{\"cpu_offlod\": true}", QL_EINVAL, "did you mean 'cpu_offload'"},
        {"fsdp_config", "{\"param_dtype\": \"bfloat16\"}", QL_EINVAL, "'param_dtype' is not known; it takes reshard_after_forward"},
        {"fsdp_config", "{\"reshard_after_forward\": 4}", QL_ENOSUP, "smaller group"},
        {"fsdp_config", "{\"fsdp_sharding_strategy\": \"HYBRID_SHARD\"}", QL_ENOSUP, "'HYBRID_SHARD' is not supported"},
        {"fsdp_config", "{\"fsdp_backward_prefetch\": \"BACKWARD_POST\"}", QL_ENOSUP, "'BACKWARD_POST' is not supported"},
        {"fsdp_config", "{\"activation_checkpointing\": \"yes\"}", QL_EINVAL, "'activation_checkpointing' must be true or false"},
        {"fsdp_config", "{\"xla\": true}", QL_ENOSUP, "xla"},
        {"fsdp_config", "\"nowhere/fsdp.json\"", QL_EIO, "fsdp.json"},
        {"fsdp", "\"full_shard warp\"", QL_EINVAL, "'warp' is none of auto, true, false, full_shard"},
        {"fsdp", "[\"full_shard\", 1]", QL_EINVAL, "words such as full_shard"},
        {"activation_offloading", "\"maybe\"", QL_EINVAL, "must be one of auto, true, false"},
        {"param_dtype", "\"float64\"", QL_EINVAL, "must be one of auto"},
        {"output_dtype", "\"float8\"", QL_EINVAL, "must be one of auto"},
        {"forward_prefetch", "\"ahead\"", QL_EINVAL, "forward_prefetch: must be true or false"},
        {"exact_worlds", "6", QL_EINVAL, "power of two"},
        {"logging_steps", "1.5", QL_EINVAL, "whole number of steps"},
        {"max_steps", "0", QL_EINVAL, "-1"},
        {"device_memory", "15", QL_EINVAL, "15GiB"},
        {"device_memory", "\"15 parsecs\"", QL_EINVAL, "15GiB"},
        {"run_name", "\"../x\"", QL_EINVAL, "folder's name"},
        {"metric_for_best_model", "\"bleu\"", QL_ENOSUP, "eval_loss"},
        {"hub_token", "\"hf_secret\"", QL_ENOSUP, "HF_TOKEN"},
        {"lr_scheduler_kwargs", "[1]", QL_EINVAL, "object"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        ql_job *j = fresh();
        CHECK_FAILS(set_json(j, bad[i].name, bad[i].json), bad[i].code, bad[i].part);
        CHECK(!ql_job_is_set(j, bad[i].name));
        ql_job_free(j);
    }
    ql_job *j = fresh();
    CHECK_FAILS(ql_job_set_text(j, "learning_rate", "fast"), QL_EINVAL, "found 'fast'");
    CHECK_FAILS(ql_job_set_text(j, "learning_rate", "inf"), QL_EINVAL, "learning_rate");
    CHECK_FAILS(ql_job_set_text(j, "learning_rate", "1e999"), QL_EINVAL, "learning_rate");
    CHECK_FAILS(ql_job_set_text(j, "seed", "99999999999999999999"), QL_EINVAL, "seed");
    CHECK_FAILS(ql_job_set_text(j, "fp16", "maybe"), QL_EINVAL, "true or false");
    CHECK_FAILS(ql_job_set_text(j, "rank_pattern", "{\"a\": 1"), QL_EINVAL, "valid JSON");
    CHECK_FAILS(ql_job_set_text(j, "model", "\xff\xfe"), QL_EINVAL, "UTF-8");
    ql_job_free(j);
}

TEST(hostile_json_is_refused)
{
    ql_job *j = fresh();
    json_t *deep = json_array(), *nul = json_stringn("a\0b", 3);
    for (int i = 0; i < 500; i++) {
        json_t *outer = json_array();
        json_array_append_new(outer, deep);
        deep = outer;
    }
    CHECK_FAILS(ql_job_set(j, "target_modules", deep), QL_EINVAL, "nested deeper");
    CHECK_FAILS(ql_job_set(j, "model", nul), QL_EINVAL, "NUL");
    json_decref(deep);
    json_decref(nul);
    ql_job_free(j);
}

TEST(what_upstream_says_by_default_is_harmless)
{
    ql_job *j = fresh();
    CHECK_OK(set_json(j, "use_dora", "false"));
    CHECK_OK(set_json(j, "modules_to_save", "null"));
    CHECK_OK(set_json(j, "load_in_8bit", "false"));
    CHECK_OK(set_json(j, "loftq_config", "{}"));
    CHECK_OK(set_json(j, "report_to", "\"none\""));
    json_t *notes = ql_job_notes(j);
    CHECK_INT(json_array_size(notes), 0);
    json_decref(notes);
    ql_job_free(j);
}

TEST(notes_of_what_has_no_effect)
{
    ql_job *j = fresh();
    CHECK_OK(set_json(j, "report_to", "\"wandb\""));
    CHECK_OK(set_json(j, "torch_compile", "true"));
    CHECK_OK(set_json(j, "fsdp_config", "{\"state_dict_type\": \"FULL_STATE_DICT\", \"fsdp_cpu_offload\": true}"));
    json_t *notes = ql_job_notes(j);
    CHECK_INT(json_array_size(notes), 3);
    CHECK(strstr(json_string_value(json_array_get(notes, 0)), "report_to: accepted, nothing is sent"));
    CHECK(strstr(json_string_value(json_array_get(notes, 2)), "fsdp_config state_dict_type"));
    json_decref(notes);
    ql_job_free(j);
}

/* Settings that another one leaves without effect. */
TEST(notes_of_what_waits_for_another)
{
    static const struct {
        const char *job, *note;
    } k[] = {
        {"{\"eval_steps\": 10}", "eval_steps: has no effect while eval_strategy is no"},
        {"{\"eval_steps\": 10, \"eval_strategy\": \"epoch\"}", "eval_steps: has no effect while eval_strategy is epoch"},
        {"{\"save_steps\": 10, \"save_strategy\": \"no\"}", "save_steps: has no effect while save_strategy is no"},
        {"{\"num_train_epochs\": 2, \"max_steps\": 5}", "num_train_epochs: has no effect, max_steps wins"},
        {"{\"warmup_ratio\": 0.1, \"warmup_steps\": 5}", "warmup_ratio: has no effect, warmup_steps wins"},
        {"{\"eval_steps\": 10, \"eval_strategy\": \"steps\", \"save_steps\": 10, \"num_train_epochs\": 2, \"warmup_ratio\": 0.1}", NULL},
    };
    for (size_t i = 0; i < sizeof k / sizeof *k; i++) {
        json_t *given = json_loads(k[i].job, 0, NULL);
        ql_job *j = NULL;
        CHECK_OK(ql_job_from_json(given, &j));
        json_t *notes = ql_job_notes(j);
        CHECK_INT(json_array_size(notes), k[i].note != NULL);
        if (k[i].note) CHECK(strstr(json_string_value(json_array_get(notes, 0)), k[i].note));
        json_decref(notes);
        json_decref(given);
        ql_job_free(j);
    }
}

/* What is on without a choice is said where it is turned off, under each of its names. */
TEST(prefetch_is_always_on_and_said_so)
{
    static const char *const cases[][2] = {{"forward_prefetch", "false"}, {"backward_prefetch", "false"},
                                           {"fsdp_config", "{\"forward_prefetch\": false}"},
                                           {"fsdp_config", "{\"backward_prefetch\": \"NO_PREFETCH\"}"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ql_job *j = fresh();
        CHECK_OK(set_json(j, cases[i][0], cases[i][1]));
        json_t *notes = ql_job_notes(j);
        CHECK_INT(json_array_size(notes), 1);
        CHECK(strstr(json_string_value(json_array_get(notes, 0)), "always on here, it costs no memory"));
        json_decref(notes);
        ql_job_free(j);
    }
}

/* transformers' file form of fsdp_config, with accelerate's spelling of the keys: the job has what was in it. */
TEST(fsdp_config_from_a_file)
{
    ql_job *j = fresh(), *k = NULL;
    ql_fsdp f;
    const char *dir = tmp_dir("fsdp");
    char path[QL_PATH_MAX];
    tmp_text(dir, "fsdp.json", "{\"fsdp_sharding_strategy\": \"SHARD_GRAD_OP\", \"fsdp_offload_params\": true, \"xla\": false, \"version\": 2,"
                               " \"fsdp_transformer_layer_cls_to_wrap\": [\"LlamaDecoderLayer\"], \"activation_checkpointing\": true}");
    CHECK_OK(ql_path_join(path, dir, "fsdp.json"));
    CHECK_OK(ql_job_set_text(j, "fsdp_config", path));
    CHECK_OK(ql_job_set_text(j, "fsdp", "full_shard auto_wrap"));
    CHECK(json_is_object(ql_job_get(j, "fsdp_config")));
    CHECK_OK(ql_fsdp_parse(ql_job_get(j, "fsdp"), ql_job_get(j, "fsdp_config"), &f, NULL));
    CHECK(f.mode == QL_FSDP_ON && !f.reshard && f.offload && f.checkpoint_set && f.checkpoint);
    json_t *o = ql_job_json(j);
    CHECK(remove(path) == 0);
    CHECK_OK(ql_job_from_json(o, &k)); /* the file is not needed again */
    tmp_text(dir, "fsdp.json", "{\"cpu_offlod\": true}");
    CHECK_FAILS(ql_job_set_text(j, "fsdp_config", path), QL_EINVAL, "did you mean 'cpu_offload'");
    json_decref(o);
    ql_job_free(j);
    ql_job_free(k);
}

/* Names and values that are refused are not what anybody is sent to. */
TEST(what_is_refused_is_not_proposed)
{
    const ql_setting *s;
    int n = ql_settings(&s);
    char near[160], quoted[160];
    for (int i = 0; i < n; i++) {
        if (!s[i].refused) continue;
        snprintf(quoted, sizeof quoted, "'%s'", s[i].name);
        CHECK_MSG(!strstr(ql_setting_nearest(s[i].name, near, sizeof near), quoted), "%s is proposed", s[i].name);
    }
    ql_job *j = fresh();
    CHECK_FAILS(set_json(j, "bias", "\"al\""), QL_EINVAL, "bias: must be one of none, found");
    CHECK_FAILS(set_json(j, "reduce_dtype", "\"float23\""), QL_EINVAL, "did you mean 'float32'? It must be one of float32, found");
    ql_job_free(j);
}

TEST(jobs_travel_as_json)
{
    ql_job *j = fresh(), *k = NULL, *l = NULL;
    CHECK_OK(ql_job_set_text(j, "lora_r", "8"));
    CHECK_OK(ql_job_set_text(j, "fp16", "true"));
    CHECK_OK(ql_job_set_text(j, "store", "0-3:resident,4-7:host"));
    json_t *o = ql_job_json(j);
    CHECK_INT(json_object_size(o), 3);
    CHECK_OK(ql_job_from_json(o, &k));
    CHECK_OK(ql_job_copy(k, &l));
    ql_job_free(k);
    json_t *p = ql_job_json(l);
    CHECK(json_equal(o, p));
    json_object_set_new(o, "rr", json_integer(4));
    k = NULL;
    CHECK_FAILS(ql_job_from_json(o, &k), QL_EINVAL, "there is no setting 'rr'");
    CHECK(k == NULL);
    json_decref(p);
    json_t *g = ql_job_group(l, "lora");
    CHECK_INT(json_integer_value(json_object_get(g, "r")), 8);
    CHECK(json_object_get(g, "target_modules") && !json_object_get(g, "use_dora"));
    json_decref(g);
    json_decref(o);
    ql_job_free(j);
    ql_job_free(l);
    CHECK_FAILS(ql_job_from_json(NULL, &k), QL_EINVAL, "object");
    ql_job_free(NULL);
}

TEST(nearest_names)
{
    char b[160];
    CHECK_STR(ql_setting_nearest("lerning_rate", b, sizeof b), "did you mean 'learning_rate'?");
    CHECK_STR(ql_setting_nearest("max_lenght", b, sizeof b), "did you mean 'max_length'?");
    CHECK_STR(ql_setting_nearest("batchsize", b, sizeof b), "did you mean 'per_device_train_batch_size'?");
    CHECK_STR(ql_setting_nearest("num-train-epochs", b, sizeof b), "did you mean 'num_train_epochs'?");
    CHECK_STR(ql_setting_nearest("qwertyuiop", b, sizeof b), "");
    CHECK_STR(ql_setting_nearest("", b, sizeof b), "");
}

TEST(conflicts)
{
    static const struct {
        const char *job, *part; /* part NULL: fine */
    } cases[] = {
        {"{}", NULL},
        {"{\"fp16\":true,\"bf16\":true}", "fp16 says float16 and bf16 says bfloat16"},
        {"{\"fp16\":true,\"dtype\":\"float16\"}", NULL},
        {"{\"bf16\":true,\"dtype\":\"float16\"}", "keep one"},
        {"{\"bnb_4bit_compute_dtype\":\"bfloat16\",\"fp16\":true}", "bnb_4bit_compute_dtype says bfloat16"},
        {"{\"gradient_checkpointing\":true,\"fsdp_config\":{\"activation_checkpointing\":true}}", "both on"},
        {"{\"fsdp_config\":{\"activation_checkpointing\":true}}", NULL},
        {"{\"layers_pattern\":\"layers\"}", "layers_to_transform"},
        {"{\"layers_to_transform\":[0],\"target_modules\":\".*q_proj\"}", "regex"},
        {"{\"layers_to_transform\":[0]}", NULL},
        {"{\"eval_strategy\":\"steps\"}", "eval_dataset"},
        {"{\"eval_strategy\":\"steps\",\"eval_dataset\":\"e.jsonl\"}", NULL},
        {"{\"logging_steps\":0}", "logging_steps above 0"},
        {"{\"logging_steps\":0,\"logging_strategy\":\"no\"}", NULL},
        {"{\"load_best_model_at_end\":true}", "to be the same"},
        {"{\"load_best_model_at_end\":true,\"eval_strategy\":\"steps\",\"eval_dataset\":\"e\",\"eval_steps\":3,\"save_steps\":10}", "multiple"},
        {"{\"load_best_model_at_end\":true,\"eval_strategy\":\"steps\",\"eval_dataset\":\"e\",\"eval_steps\":5,\"save_steps\":10}", NULL},
        {"{\"load_best_model_at_end\":true,\"eval_strategy\":\"steps\",\"eval_dataset\":\"e\",\"eval_steps\":0.1,\"save_steps\":0.3}", NULL},
        {"{\"save_strategy\":\"best\"}", "eval_strategy"},
        {"{\"fsdp\":true,\"store\":\"resident\"}", "fsdp shards"},
        {"{\"fsdp\":false,\"store\":\"sharded\"}", "fsdp is off"},
        {"{\"param_dtype\":\"bfloat16\",\"fp16\":true}", "param_dtype says bfloat16 and fp16"},
        {"{\"residual_dtype\":\"float32\",\"output_dtype\":\"float16\"}", "keep one"},
        {"{\"use_cpu\":true,\"devices\":\"cuda:0\"}", "disagree"},
        {"{\"use_cpu\":true,\"devices\":\"cpu:2\"}", NULL},
        {"{\"lr_scheduler_type\":\"cosine_with_min_lr\"}", "one of min_lr and min_lr_rate"},
        {"{\"lr_scheduler_kwargs\":{\"num_cycles\":2}}", "linear has no 'num_cycles'"},
        {"{\"assistant_only_loss\":true,\"train_on_responses\":true}", "keep one"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        json_t *o = json_loads(cases[i].job, 0, NULL);
        ql_job *j = NULL;
        CHECK_OK(ql_job_from_json(o, &j));
        if (cases[i].part) CHECK_FAILS(ql_job_check(j), QL_EINVAL, cases[i].part);
        else CHECK_OK(ql_job_check(j));
        ql_job_free(j);
        json_decref(o);
    }
}

TEST(forms)
{
    ql_devices d;
    ql_store_kind k[8];
    ql_fsdp f;
    int64_t n;
    CHECK_OK(ql_devices_parse("auto", &d));
    CHECK(d.kind == QL_DEVICES_AUTO);
    CHECK_OK(ql_devices_parse("cpu:4", &d));
    CHECK(d.kind == QL_DEVICES_CPU && d.count == 4);
    CHECK_OK(ql_devices_parse("cuda:1,0", &d));
    CHECK(d.kind == QL_DEVICES_CUDA && d.count == 2 && d.index[0] == 1 && d.index[1] == 0);
    CHECK_OK(ql_devices_parse("0, 1", &d));
    CHECK(d.count == 2);
    CHECK_OK(ql_devices_parse("cuda", &d));
    CHECK(d.kind == QL_DEVICES_CUDA && d.count == 0);
    CHECK_FAILS(ql_devices_parse("", &d), QL_EINVAL, "devices");
    CHECK_FAILS(ql_devices_parse("0,", &d), QL_EINVAL, "devices");
    CHECK_FAILS(ql_devices_parse("cpu:99999999999", &d), QL_EINVAL, "devices");
    CHECK_OK(ql_devices_parse("cpu:8", &d));
    CHECK_OK(ql_devices_parse("0,1,2,3,4,5,6,15", &d));
    CHECK(d.count == 8 && d.index[7] == 15);
    CHECK_FAILS(ql_devices_parse("cpu:9", &d), QL_ENOSUP, "9 CPU ranks, at most 8");
    CHECK_FAILS(ql_devices_parse("0,1,2,3,4,5,6,7,8,9", &d), QL_ENOSUP, "10 GPUs, at most 8");

    json_t *s = json_string("0-2:resident, 5:host");
    CHECK_OK(ql_store_parse(s, 8, k));
    CHECK(k[0] == QL_STORE_RESIDENT && k[2] == QL_STORE_RESIDENT && k[3] == QL_STORE_AUTO && k[5] == QL_STORE_HOST);
    CHECK_FAILS(ql_store_parse(s, 4, k), QL_EINVAL, "layer 5");
    json_decref(s);

    s = json_string("15 GiB");
    CHECK_OK(ql_bytes_parse(s, "device_memory", &n));
    CHECK(n == (int64_t)15 << 30);
    json_decref(s);

    s = json_string("full_shard offload auto_wrap");
    json_t *c = json_pack("{s:b,s:s}", "reshard_after_forward", 0, "backward_prefetch", "BACKWARD_PRE");
    CHECK_OK(ql_fsdp_parse(s, c, &f, NULL));
    CHECK(f.mode == QL_FSDP_ON && f.offload && !f.reshard && f.backward_set && f.backward && !f.forward_set);
    json_decref(s);
    json_decref(c);
    s = json_string("");
    CHECK_OK(ql_fsdp_parse(s, NULL, &f, NULL));
    CHECK(f.mode == QL_FSDP_OFF);
    json_decref(s);
}

TEST_MAIN(T(table_is_sound), T(upstream_names_are_known), T(defaults_of_qlora), T(values_in_every_form), T(bad_values_name_the_setting), T(hostile_json_is_refused),
          T(what_upstream_says_by_default_is_harmless), T(notes_of_what_has_no_effect), T(notes_of_what_waits_for_another),
          T(prefetch_is_always_on_and_said_so),
          T(fsdp_config_from_a_file), T(what_is_refused_is_not_proposed), T(jobs_travel_as_json), T(nearest_names), T(conflicts),
          T(forms))
