#include "core/ckpt.h"
#include "core/json.h"
#include "tests/tmp.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

static const char *const config_text =
    "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\",\"hidden_size\":64,\"intermediate_size\":96,\"num_hidden_layers\":2,"
    "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"vocab_size\":100,\"max_position_embeddings\":128,\"rms_norm_eps\":1e-5,"
    "\"rope_theta\":10000.0,\"torch_dtype\":\"float32\",\"tie_word_embeddings\":false,\"hidden_act\":\"silu\"}";

/* Everything a checkpoint needs, without a model. */
typedef struct {
    ql_config model;
    ql_job *job;
    ql_args args;
    ql_steps steps;
    ql_lora *lora;
    ql_ckpt_of of;
    ql_ckpt_state s;
    ql_history *h;
} world;

#define MUST(call) ((call) == QL_OK ? (void)0 : (fprintf(stderr, "%s: %s\n", #call, ql_error()), exit(98)))

static void world_history(world *w)
{
    ql_history_free(w->h);
    w->h = NULL;
    MUST(ql_history_new(&w->args, &w->steps, &w->h));
}

static world *world_open(const char *settings, int64_t rows)
{
    world *w = calloc(1, sizeof *w);
    json_t *o = json_loads(settings, 0, NULL), *lora;
    ql_lora_config c = {0};
    MUST(ql_config_parse(config_text, strlen(config_text), "config.json", &w->model));
    MUST(ql_job_from_json(o, &w->job));
    MUST(ql_args_from_job(w->job, &w->args));
    MUST(ql_steps_plan(&w->args, rows, 1, &w->steps));
    lora = ql_job_group(w->job, "lora");
    MUST(ql_lora_config_parse(lora, "job", &c));
    MUST(ql_lora_build(&w->model, &c, &w->lora));
    w->of = (ql_ckpt_of){w->lora, &w->model, w->job, &w->args, &w->steps, NULL};
    size_t n = (size_t)w->lora->elements;
    w->s.optimizer = w->args.adam_8bit ? QL_CKPT_8BIT : QL_CKPT_F32;
    w->s.adapters = calloc(n, 4), w->s.m = calloc(n, 4), w->s.v = calloc(n, 4);
    w->s.m8 = calloc(n, 1), w->s.v8 = calloc(n, 1), w->s.m2 = calloc(n / 256, 4), w->s.v2 = calloc(n / 256, 4);
    world_history(w);
    json_decref(lora);
    json_decref(o);
    return w;
}

static void world_close(world *w)
{
    ql_history_free(w->h);
    ql_lora_close(w->lora);
    ql_job_free(w->job);
    ql_config_free(&w->model);
    free(w->s.adapters), free(w->s.m), free(w->s.v), free(w->s.m8), free(w->s.v8), free(w->s.m2), free(w->s.v2);
    free(w);
}

static float value(int64_t step, int64_t i, int kind)
{
    uint32_t x = (uint32_t)(step * 2654435761 + i * 40503 + kind * 977);
    x ^= x >> 15, x *= 2246822519u, x ^= x >> 13;
    return (float)(x % 100000) / 7.0f - 5000.0f;
}

/* The state that step would leave; padding stays zero, 8-bit codes have none. */
static void world_step(world *w, int64_t step)
{
    ql_step_record r = {step, 1.0 / (double)step, 0.5, 1e-4, 10, 100};
    const ql_lora *l = w->lora;
    for (int64_t i = 0; i < 2 * l->count; i++) {
        const ql_lora_target *t = &l->target[i / 2];
        int64_t at = i % 2 ? t->b : t->a, real = t->r * (i % 2 ? t->n : t->k), len = i % 2 ? t->b_len : t->a_len;
        bool small = real < 4096;
        for (int64_t k = at; k < at + real; k++) {
            w->s.adapters[k] = value(step, k, 0);
            w->s.m[k] = w->s.optimizer == QL_CKPT_F32 || small ? value(step, k, 1) : 0;
            w->s.v[k] = w->s.optimizer == QL_CKPT_F32 || small ? value(step, k, 2) : 0;
        }
        for (int64_t k = at; k < at + len && !small && w->s.optimizer == QL_CKPT_8BIT; k++) {
            w->s.m8[k] = (uint8_t)(step + k), w->s.v8[k] = (uint8_t)(step * 3 + k);
            w->s.m2[k / 256] = value(step, k, 3), w->s.v2[k / 256] = value(step, k, 4);
        }
    }
    w->s.ctl = (ql_ctl){.loss_scale = 65536, .steps = (int32_t)step, .growth = (int32_t)(step % 7), .skips = 2};
    ql_history_step(w->h, &r);
}

static bool same_state(const world *a, const world *b)
{
    size_t n = (size_t)a->lora->elements;
    bool same = memcmp(a->s.adapters, b->s.adapters, 4 * n) == 0 && memcmp(a->s.m, b->s.m, 4 * n) == 0 && memcmp(a->s.v, b->s.v, 4 * n) == 0;
    same = same && memcmp(a->s.m8, b->s.m8, n) == 0 && memcmp(a->s.v8, b->s.v8, n) == 0;
    same = same && memcmp(a->s.m2, b->s.m2, n / 64) == 0 && memcmp(a->s.v2, b->s.v2, n / 64) == 0;
    return same && a->s.ctl.steps == b->s.ctl.steps && a->s.ctl.growth == b->s.ctl.growth && a->s.ctl.skips == b->s.ctl.skips &&
           a->s.ctl.loss_scale == b->s.ctl.loss_scale;
}

static void dirty(world *w)
{
    size_t n = (size_t)w->lora->elements;
    memset(w->s.adapters, 7, 4 * n);
    if (w->s.optimizer == QL_CKPT_F32) memset(w->s.m, 7, 4 * n), memset(w->s.v, 7, 4 * n);
}

static void round_trip(const char *settings)
{
    world *a = world_open(settings, 40), *b = world_open(settings, 40);
    char run[QL_PATH_MAX], path[QL_PATH_MAX], found[QL_PATH_MAX], want[QL_PATH_MAX];
    json_t *notes = NULL;
    snprintf(run, sizeof run, "%s", tmp_dir("round"));
    world_step(a, 40);
    CHECK_OK(ql_ckpt_save(run, &a->of, &a->s, a->h, path));
    CHECK_OK(ql_path_join(want, run, "checkpoint-40"));
    CHECK(strcmp(path, want) == 0);
    CHECK_OK(ql_ckpt_find(run, found));
    CHECK(strcmp(found, want) == 0);
    CHECK_OK(ql_ckpt_find(want, found));
    CHECK(strcmp(found, want) == 0);
    dirty(b);
    CHECK_OK(ql_ckpt_load(path, &b->of, &b->s, b->h, &notes));
    CHECK_INT(json_array_size(notes), 0);
    CHECK(same_state(a, b));
    CHECK_INT(ql_history_done(b->h), 40);
    json_decref(notes);
    world_close(a);
    world_close(b);
}

TEST(what_is_saved_comes_back)
{
    round_trip("{\"r\":64}");
    if (!test_bad) round_trip("{\"r\":4,\"use_rslora\":true,\"target_modules\":[\"q_proj\",\"v_proj\"]}");
    if (!test_bad) round_trip("{\"r\":64,\"optim\":\"adamw_8bit\"}"); /* large and small tensors */
}

TEST(a_folder_that_peft_and_people_know)
{
    world *w = world_open("{\"r\":8}", 40);
    char run[QL_PATH_MAX], tok[QL_PATH_MAX], path[QL_PATH_MAX], file[QL_PATH_MAX];
    char *text = NULL;
    size_t n = 0;
    snprintf(run, sizeof run, "%s", tmp_dir("folder"));
    snprintf(tok, sizeof tok, "%s", tmp_dir("tok"));
    tmp_text(tok, "tokenizer.json", "{\"a\":  1}\n\n");
    tmp_text(tok, "model.safetensors", "not copied");
    w->of.tokenizer = tok;
    world_step(w, 3);
    CHECK_OK(ql_ckpt_save(run, &w->of, &w->s, w->h, path));
    static const char *const files[] = {"adapter_model.safetensors", "adapter_config.json", "README.md", "optimizer.safetensors",
                                        "trainer_state.json", "engine_state.json", "tokenizer.json"};
    for (size_t i = 0; i < 7; i++) {
        CHECK_OK(ql_path_join(file, path, files[i]));
        CHECK_MSG(ql_path_is_file(file), "%s is missing", files[i]);
    }
    CHECK_OK(ql_path_join(file, path, "model.safetensors"));
    CHECK(!ql_path_is_file(file));
    CHECK_OK(ql_path_join(file, path, "tokenizer.json"));
    CHECK_OK(ql_file_read(file, 1000, &text, &n));
    CHECK_STR(text, "{\"a\":  1}\n\n");
    free(text);
    world_close(w);
}

TEST(the_same_step_is_replaced)
{
    world *w = world_open("{\"r\":8}", 40), *b = world_open("{\"r\":8}", 40);
    char run[QL_PATH_MAX], path[QL_PATH_MAX], other[QL_PATH_MAX];
    json_t *notes = NULL;
    ql_ckpt_entry *list;
    int n;
    snprintf(run, sizeof run, "%s", tmp_dir("again"));
    world_step(w, 5);
    CHECK_OK(ql_ckpt_save(run, &w->of, &w->s, w->h, path));
    w->s.adapters[0] = 123;
    CHECK_OK(ql_ckpt_save(run, &w->of, &w->s, w->h, path));
    CHECK_OK(ql_ckpt_load(path, &b->of, &b->s, b->h, &notes));
    json_decref(notes);
    CHECK(b->s.adapters[0] == 123);
    /* killed between two renames, where names cannot be exchanged: the old one comes back */
    CHECK_OK(ql_path_join(other, run, ".checkpoint-5.old"));
    CHECK(rename(path, other) == 0);
    CHECK_OK(ql_ckpt_list(run, &list, &n));
    CHECK_INT(n, 0);
    CHECK_OK(ql_ckpt_find(run, path));
    CHECK_OK(ql_ckpt_list(run, &list, &n));
    CHECK_INT(n, 1);
    free(list);
    world_close(w);
    world_close(b);
}

TEST(mismatches_are_named)
{
    static const struct {
        const char *then, *now, *part;
        int64_t rows;
    } c[] = {
        {"{\"r\":8}", "{\"r\":16}", "r is 8 in the checkpoint and 16 in the job", 40},
        {"{\"r\":8}", "{\"r\":8,\"lora_alpha\":32}", "lora_alpha of layer 0 self_attn.q_proj is 16 in the checkpoint and 32", 40},
        {"{\"r\":8}", "{\"r\":8,\"target_modules\":[\"q_proj\"]}", "in the checkpoint only", 40},
        {"{\"r\":8,\"target_modules\":[\"q_proj\"]}", "{\"r\":8}", "in the job only", 40},
        {"{\"r\":8}", "{\"r\":8,\"use_rslora\":true}", "use_rslora is false", 40},
        {"{\"r\":8}", "{\"r\":8,\"rank_pattern\":{\"v_proj\":4}}", "the rank of layer 0 self_attn.v_proj is 8", 40},
        {"{\"r\":8}", "{\"r\":8,\"optim\":\"adamw_8bit\"}", "32-bit states), the job's is adamw (8-bit", 40},
        {"{\"r\":8}", "{\"r\":8}", "there were 40 samples", 44},
        {"{\"r\":8}", "{\"r\":8,\"gradient_accumulation_steps\":2}", "micro-batches in a step", 40},
    };
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        world *a = world_open(c[i].then, 40), *b = world_open(c[i].now, c[i].rows);
        char run[QL_PATH_MAX], path[QL_PATH_MAX];
        json_t *notes = NULL;
        snprintf(run, sizeof run, "%s", tmp_dir("mismatch"));
        world_step(a, 4);
        CHECK_OK(ql_ckpt_save(run, &a->of, &a->s, a->h, path));
        CHECK_FAILS(ql_ckpt_load(path, &b->of, &b->s, b->h, &notes), QL_EINVAL, c[i].part);
        CHECK(notes == NULL);
        world_close(a);
        world_close(b);
    }
    world *a = world_open("{\"r\":8}", 40), *b = world_open("{\"r\":8,\"learning_rate\":1e-3,\"fsdp\":true}", 40);
    char run[QL_PATH_MAX], path[QL_PATH_MAX];
    json_t *notes = NULL;
    snprintf(run, sizeof run, "%s", tmp_dir("mismatch"));
    world_step(a, 4);
    CHECK_OK(ql_ckpt_save(run, &a->of, &a->s, a->h, path));
    CHECK_OK(ql_ckpt_load(path, &b->of, &b->s, b->h, &notes));
    CHECK_INT(json_array_size(notes), 1);
    CHECK(strstr(json_string_value(json_array_get(notes, 0)), "learning_rate: "));
    CHECK(strstr(json_string_value(json_array_get(notes, 0)), "0.001 now"));
    json_decref(notes);
    b->model.hidden = 128;
    world_history(b);
    CHECK_FAILS(ql_ckpt_load(path, &b->of, &b->s, b->h, &notes), QL_EINVAL, "another model: its hidden is 64, the loaded model's is 128");
    world_close(a);
    world_close(b);
}

TEST(damage_is_named)
{
    static const struct {
        const char *file, *text, *part;
    } c[] = {
        {"engine_state.json", "{", "bad JSON"},
        {"engine_state.json", "{}", "'version'"},
        {"engine_state.json", "{\"version\":99}", "version 99"},
        {"engine_state.json", "[]", "object"},
        {"trainer_state.json", "{}", "log_history"},
        {"optimizer.safetensors", "garbage", "optimizer.safetensors"},
        {"adapter_model.safetensors", "garbage", "adapter_model.safetensors"},
        {"adapter_config.json", "[]", "adapter_config.json"},
        {"adapter_config.json", "{}", "lora_alpha of layer 0"},
    };
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        world *w = world_open("{\"r\":8}", 40);
        char run[QL_PATH_MAX], path[QL_PATH_MAX];
        json_t *notes = NULL;
        snprintf(run, sizeof run, "%s", tmp_dir("damage"));
        world_step(w, 4);
        CHECK_OK(ql_ckpt_save(run, &w->of, &w->s, w->h, path));
        tmp_text(path, c[i].file, c[i].text);
        world_history(w);
        ql_status st = ql_ckpt_load(path, &w->of, &w->s, w->h, &notes);
        CHECK_MSG(st != QL_OK && strstr(ql_error(), c[i].part), "%s: %s", c[i].file, ql_error());
        ql_error_clear();
        world_close(w);
    }
}

TEST(one_missing_state_is_named)
{
    world *a = world_open("{\"r\":8,\"target_modules\":[\"q_proj\"]}", 40), *b = world_open("{\"r\":8,\"target_modules\":[\"v_proj\"]}", 40);
    char run[2][QL_PATH_MAX], path[2][QL_PATH_MAX], from[QL_PATH_MAX], to[QL_PATH_MAX];
    json_t *notes = NULL;
    for (int i = 0; i < 2; i++) {
        world *w = i ? b : a;
        snprintf(run[i], QL_PATH_MAX, "%s", tmp_dir(i ? "missing-b" : "missing-a"));
        world_step(w, 4);
        CHECK_OK(ql_ckpt_save(run[i], &w->of, &w->s, w->h, path[i]));
    }
    CHECK_OK(ql_path_join(from, path[1], "optimizer.safetensors"));
    CHECK_OK(ql_path_join(to, path[0], "optimizer.safetensors"));
    CHECK(rename(from, to) == 0);
    world_history(a);
    CHECK_FAILS(ql_ckpt_load(path[0], &a->of, &a->s, a->h, &notes), QL_EINVAL, "layers.0.self_attn.q_proj.lora_A.weight.m' is missing");
    world_close(a);
    world_close(b);
}

TEST(incomplete_folders_are_passed_over)
{
    world *w = world_open("{\"r\":8}", 40);
    char run[QL_PATH_MAX], path[QL_PATH_MAX], found[QL_PATH_MAX], junk[QL_PATH_MAX];
    ql_ckpt_entry *list = NULL;
    int n = 0;
    snprintf(run, sizeof run, "%s", tmp_dir("incomplete"));
    CHECK_FAILS(ql_ckpt_find(run, found), QL_EINVAL, "no whole checkpoint");
    CHECK_FAILS(ql_ckpt_find("/nowhere/checkpoint-1", found), QL_EINVAL, "there is no checkpoint");
    world_step(w, 4);
    CHECK_OK(ql_ckpt_save(run, &w->of, &w->s, w->h, path));
    static const char *const names[] = {"checkpoint-9", "checkpoint-x", ".checkpoint-12.tmp", "checkpoint-99999999999999999999", "checkpoint-"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        CHECK_OK(ql_path_join(junk, run, names[i]));
        CHECK_OK(ql_path_mkdirs(junk));
        tmp_text(junk, "adapter_model.safetensors", "");
    }
    CHECK_OK(ql_ckpt_find(run, found));
    CHECK(strcmp(found, path) == 0);
    w->s.optimizer = QL_CKPT_NONE; /* save_only_model */
    world_step(w, 6);
    CHECK_OK(ql_ckpt_save(run, &w->of, &w->s, w->h, junk));
    CHECK_OK(ql_ckpt_list(run, &list, &n));
    CHECK(n == 2 && list[0].step == 4 && list[0].resumable && list[1].step == 6 && !list[1].resumable);
    free(list);
    CHECK_OK(ql_ckpt_find(run, found));
    CHECK(strcmp(found, path) == 0);
    CHECK_FAILS(ql_ckpt_find(junk, found), QL_EINVAL, "not resumed");
    CHECK_OK(ql_path_join(junk, run, "checkpoint-9"));
    CHECK_FAILS(ql_ckpt_find(junk, found), QL_EINVAL, "checkpoint-9 is not whole: it has no adapter_config.json");
    char *last = NULL;
    CHECK_OK(ql_run_checkpoint(run, &last)); /* as front ends ask */
    CHECK(strcmp(last, path) == 0);
    free(last);
    world_close(w);
}

TEST(the_best_one_is_found_where_the_run_is_now)
{
    const char *settings = "{\"r\":8,\"metric_for_best_model\":\"eval_loss\",\"eval_strategy\":\"steps\",\"eval_steps\":20,\"eval_dataset\":\"x\"}";
    world *w = world_open(settings, 400);
    char run[QL_PATH_MAX], moved[QL_PATH_MAX], path[QL_PATH_MAX], best[QL_PATH_MAX];
    json_t *notes = NULL;
    int is = 0;
    snprintf(run, sizeof run, "%s", tmp_dir("best"));
    snprintf(moved, sizeof moved, "%s", tmp_path("moved"));
    for (int64_t s = 20; s <= 40; s += 20) {
        world_step(w, s);
        CHECK_OK(ql_history_eval(w->h, &(ql_eval_record){.loss = (double)s, .seconds = 1, .samples = 1, .batches = 1}, &is));
        CHECK_OK(ql_ckpt_save(run, &w->of, &w->s, w->h, path));
    }
    CHECK_OK(ql_path_join(best, run, "checkpoint-20"));
    CHECK(strcmp(ql_history_best_path(w->h), best) == 0);
    CHECK(rename(run, moved) == 0);
    CHECK_OK(ql_path_join(path, moved, "checkpoint-40/"));
    CHECK_OK(ql_path_join(best, moved, "checkpoint-20"));
    world_history(w);
    CHECK_OK(ql_ckpt_load(path, &w->of, &w->s, w->h, &notes));
    CHECK(ql_history_best_path(w->h) && strcmp(ql_history_best_path(w->h), best) == 0);
    CHECK(ql_path_remove(best));
    world_history(w);
    json_decref(notes);
    CHECK_OK(ql_ckpt_load(path, &w->of, &w->s, w->h, &notes));
    CHECK(ql_history_best_path(w->h) == NULL);
    CHECK_INT(ql_history_best_step(w->h), 20);
    json_decref(notes);
    world_close(w);
}

TEST(what_a_killed_save_left_goes)
{
    world *w = world_open("{\"r\":8}", 40);
    char run[QL_PATH_MAX], path[QL_PATH_MAX], junk[QL_PATH_MAX], file[QL_PATH_MAX];
    static const struct {
        const char *name;
        bool stays;
    } c[] = {{".checkpoint-12.tmp", false}, {".checkpoint-3.gone", false}, {".checkpoint-4.old", false}, {"checkpoint-9", true},
             {".checkpoint-x.tmp", true}, {".cache", true}, {"12.tmp", true}};
    snprintf(run, sizeof run, "%s", tmp_dir("left"));
    world_step(w, 4);
    CHECK_OK(ql_ckpt_save(run, &w->of, &w->s, w->h, path));
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        CHECK_OK(ql_path_join(junk, run, c[i].name));
        CHECK_OK(ql_path_mkdirs(junk));
        tmp_text(junk, "optimizer.safetensors", "half of it");
    }
    world_step(w, 6); /* not the steps of what was left */
    CHECK_OK(ql_ckpt_save(run, &w->of, &w->s, w->h, path));
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        CHECK_OK(ql_path_join(junk, run, c[i].name));
        CHECK_MSG(ql_path_is_dir(junk) == c[i].stays, "%s", c[i].name);
    }
    /* The old one of a step whose new one never came is kept, and comes back. */
    CHECK_OK(ql_path_join(junk, run, ".checkpoint-6.old"));
    CHECK(rename(path, junk) == 0);
    world_step(w, 8);
    CHECK_OK(ql_ckpt_save(run, &w->of, &w->s, w->h, path));
    CHECK_OK(ql_path_join(file, run, "checkpoint-6"));
    CHECK(ql_path_is_dir(file) && !ql_path_is_dir(junk));
    world_close(w);
}

static const char *steps_left(const char *run)
{
    static char text[256];
    ql_ckpt_entry *list = NULL;
    int n = 0, at = 0;
    text[0] = 0;
    if (ql_ckpt_list(run, &list, &n) != QL_OK) return ql_error();
    for (int i = 0; i < n; i++) at += sprintf(text + at, "%s%lld", i ? " " : "", (long long)list[i].step);
    free(list);
    return text;
}

TEST(rotation_keeps_the_best)
{
    world *w = world_open("{\"r\":8}", 400);
    char run[QL_PATH_MAX], path[QL_PATH_MAX], best[QL_PATH_MAX];
    snprintf(run, sizeof run, "%s", tmp_dir("rotate"));
    CHECK_OK(ql_path_join(best, run, "checkpoint-20"));
    for (int64_t s = 10; s <= 50; s += 10) {
        world_step(w, s);
        CHECK_OK(ql_ckpt_save(run, &w->of, &w->s, w->h, path));
    }
    CHECK_OK(ql_ckpt_rotate(run, 0, NULL, 50));
    CHECK_STR(steps_left(run), "10 20 30 40 50");
    CHECK_OK(ql_ckpt_rotate(run, 4, best, 50));
    CHECK_STR(steps_left(run), "20 30 40 50");
    CHECK_OK(ql_ckpt_rotate(run, 2, best, 50));
    CHECK_STR(steps_left(run), "20 50");
    CHECK_OK(ql_ckpt_rotate(run, 1, best, 50)); /* the newest is needed for a resume */
    CHECK_STR(steps_left(run), "20 50");
    CHECK_OK(ql_ckpt_keep_only(run, "/not/there"));
    CHECK_STR(steps_left(run), "20 50");
    for (int64_t s = 30; s <= 40; s += 10) { /* from 20 once more: what is beyond is of the course that was left */
        world_step(w, s);
        CHECK_OK(ql_ckpt_save(run, &w->of, &w->s, w->h, path));
    }
    CHECK_OK(ql_ckpt_rotate(run, 3, best, 40));
    CHECK_STR(steps_left(run), "20 30 40");
    world_step(w, 50);
    CHECK_OK(ql_ckpt_save(run, &w->of, &w->s, w->h, path));
    CHECK_OK(ql_ckpt_rotate(run, 1, best, 40));
    CHECK_STR(steps_left(run), "20 40");
    CHECK_OK(ql_ckpt_keep_only(run, best));
    CHECK_STR(steps_left(run), "20");
    world_close(w);
}

/* Saves checkpoint after checkpoint until it is killed. */
static void save_for_ever(const char *run, int64_t step)
{
    world *w = world_open("{\"r\":64,\"optim\":\"adamw_8bit\"}", 40);
    char path[QL_PATH_MAX];
    for (;; step++) {
        world_step(w, step);
        if (ql_ckpt_save(run, &w->of, &w->s, w->h, path) != QL_OK || ql_ckpt_rotate(run, 2, NULL, step) != QL_OK) _exit(1);
        if (step % 3 == 0 && ql_ckpt_save(run, &w->of, &w->s, w->h, path) != QL_OK) _exit(1); /* the same once more */
    }
}

TEST(killed_at_any_moment)
{
    enum { KILLS = 40 };
    world *a = world_open("{\"r\":64,\"optim\":\"adamw_8bit\"}", 40), *b = world_open("{\"r\":64,\"optim\":\"adamw_8bit\"}", 40);
    char run[QL_PATH_MAX], path[QL_PATH_MAX];
    int64_t last = 0;
    int status;
    unsigned seed = 12345;
    snprintf(run, sizeof run, "%s", tmp_dir("killed"));
    /* On a busy machine longer, until there was something to kill. */
    for (int k = 0; k < KILLS || (last <= 5 && k < 10 * KILLS); k++) {
        pid_t pid = fork();
        if (pid == 0) save_for_ever(run, last + 1);
        seed = seed * 1103515245 + 12345;
        usleep(2000 + (seed >> 8) % (k % 4 == 0 ? 120000 : 25000) * (unsigned)(1 + k / KILLS));
        CHECK(kill(pid, SIGKILL) == 0);
        CHECK(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status));
        ql_status st = ql_ckpt_find(run, path);
        if (st != QL_OK && last == 0) { /* not one was finished yet */
            ql_error_clear();
            continue;
        }
        CHECK_OK(st);
        json_t *notes = NULL;
        world_history(b);
        CHECK_OK(ql_ckpt_load(path, &b->of, &b->s, b->h, &notes));
        json_decref(notes);
        CHECK_MSG(ql_history_done(b->h) >= last, "step %lld after step %lld", (long long)ql_history_done(b->h), (long long)last);
        last = ql_history_done(b->h);
        world_history(a);
        world_step(a, last);
        CHECK(same_state(a, b));
    }
    CHECK_MSG(last > 5, "only %lld checkpoints were made", (long long)last);
    world_close(a);
    world_close(b);
}

TEST(a_full_disk_leaves_the_last_one)
{
    world *w = world_open("{\"r\":64}", 40), *b = world_open("{\"r\":64}", 40);
    char run[QL_PATH_MAX], path[QL_PATH_MAX];
    json_t *notes = NULL;
    int status;
    snprintf(run, sizeof run, "%s", tmp_dir("full"));
    world_step(w, 4);
    CHECK_OK(ql_ckpt_save(run, &w->of, &w->s, w->h, path));
    for (rlim_t limit = 0; limit < 400000; limit += limit < 20000 ? 1500 : 60000) { /* fails in one file after the other */
        pid_t pid = fork();
        if (pid == 0) {
            struct rlimit lim = {limit, limit};
            char other[QL_PATH_MAX];
            signal(SIGXFSZ, SIG_IGN);
            setrlimit(RLIMIT_FSIZE, &lim);
            world_step(w, 5);
            ql_status st = ql_ckpt_save(run, &w->of, &w->s, w->h, other);
            bool right = st == QL_EIO && strstr(ql_error(), "checkpoint-5 was not written, earlier ones are untouched") &&
                         strstr(ql_error(), "File too large: make room there");
            _exit(right ? 0 : st == QL_OK ? 2 : 1);
        }
        CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status));
        CHECK_MSG(WEXITSTATUS(status) == 0, "limit %lld: exit status %d", (long long)limit, WEXITSTATUS(status));
        CHECK_STR(steps_left(run), "4");
        char temp[QL_PATH_MAX];
        CHECK_OK(ql_path_join(temp, run, ".checkpoint-5.tmp"));
        CHECK(!ql_path_is_dir(temp));
    }
    CHECK_OK(ql_ckpt_load(path, &b->of, &b->s, b->h, &notes));
    CHECK(same_state(w, b));
    json_decref(notes);
    world_close(w);
    world_close(b);
}

TEST_MAIN(T(what_is_saved_comes_back), T(a_folder_that_peft_and_people_know), T(the_same_step_is_replaced), T(mismatches_are_named),
          T(damage_is_named), T(one_missing_state_is_named), T(incomplete_folders_are_passed_over), T(the_best_one_is_found_where_the_run_is_now), T(what_a_killed_save_left_goes), T(rotation_keeps_the_best),
          T(killed_at_any_moment), T(a_full_disk_leaves_the_last_one))
