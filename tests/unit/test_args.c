#include "core/args.h"
#include "tests/test.h"

static ql_job *job_of(const char *json)
{
    json_t *o = json_loads(json, 0, NULL);
    ql_job *j = NULL;
    if (!o || ql_job_from_json(o, &j) != QL_OK) fprintf(stderr, "%s: %s\n", json, ql_error()), exit(98);
    json_decref(o);
    return j;
}

TEST(defaults)
{
    ql_job *j = job_of("{}");
    ql_args a;
    CHECK_OK(ql_args_from_job(j, &a));
    CHECK(a.dtype == QL_DTYPES && a.residual_dtype == QL_DTYPES && a.save_dtype == QL_F32);
    CHECK(a.batch == 2 && a.eval_batch == 8 && a.accumulation == 1 && a.max_length == 1024);
    CHECK(a.seed == 42 && a.data_seed == 42);
    CHECK(a.adam.kind == QL_ADAM_TORCH && !a.adam_8bit && !a.adam_paged);
    CHECK(a.clip.max_norm == 1.0f && a.clip.growth_interval == 2000 && a.loss_scale == 65536);
    CHECK(a.lr.kind == QL_LR_LINEAR && a.lr.lr == 2e-4);
    CHECK(a.checkpointing == QL_PICK_AUTO && a.fsdp.mode == QL_FSDP_AUTO);
    CHECK(a.log_every == QL_EVERY_STEPS && a.eval_every == QL_EVERY_NO && a.save_every == QL_EVERY_STEPS);
    CHECK(a.load_in_4bit && a.double_quant && a.exact_worlds == 8);
    ql_job_free(j);
}

TEST(what_is_set_arrives)
{
    ql_job *j = job_of("{\"fp16\":true,\"optim\":\"paged_adamw_8bit\",\"data_seed\":7,\"gradient_checkpointing\":true,"
                       "\"output_dtype\":\"float32\",\"device_memory\":[\"15GiB\",\"22GiB\"],\"use_cpu\":true,\"breadth\":false,"
                       "\"load_best_model_at_end\":true,\"eval_strategy\":\"epoch\",\"save_strategy\":\"epoch\",\"eval_dataset\":\"e\","
                       "\"train_sampling_strategy\":\"sequential\",\"max_grad_norm\":0}");
    ql_args a;
    CHECK_OK(ql_args_from_job(j, &a));
    CHECK(a.dtype == QL_F16 && a.adam.kind == QL_ADAM_BNB && a.adam_8bit && a.adam_paged && a.data_seed == 7);
    CHECK(a.checkpointing == QL_PICK_YES && a.residual_dtype == QL_F32 && a.breadth == QL_PICK_NO);
    CHECK(a.device_memory[0] == (int64_t)15 << 30 && a.device_memory[1] == (int64_t)22 << 30 && a.device_memory[7] == (int64_t)22 << 30);
    CHECK(a.devices.kind == QL_DEVICES_CPU && a.devices.count == 1);
    CHECK(a.load_best && a.track_best && a.order == QL_ORDER_SEQUENTIAL);
    ql_job_free(j);
    j = job_of("{\"fsdp\":\"full_shard offload\",\"fsdp_config\":{\"activation_checkpointing\":true,\"forward_prefetch\":false},\"param_dtype\":\"bfloat16\"}");
    CHECK_OK(ql_args_from_job(j, &a));
    CHECK(a.fsdp.mode == QL_FSDP_ON && a.adam_paged && a.adam.kind == QL_ADAM_TORCH && a.checkpointing == QL_PICK_YES && a.dtype == QL_BF16);
    ql_job_free(j);
    static const ql_pick picks[] = {QL_PICK_AUTO, QL_PICK_NO, QL_PICK_YES};
    static const char *const words[] = {"{\"activation_offloading\":\"auto\"}", "{\"activation_offloading\":false}", "{\"activation_offloading\":true}"};
    for (int i = 0; i < 3; i++) {
        j = job_of(words[i]);
        CHECK_OK(ql_args_from_job(j, &a));
        CHECK(a.activation_offload == picks[i]);
        ql_job_free(j);
    }
    j = job_of("{\"fp16\":true,\"bf16\":true}");
    CHECK_FAILS(ql_args_from_job(j, &a), QL_EINVAL, "keep one");
    ql_job_free(j);
}

/* transformers' numbers: rows, batch, accumulation, world, epochs, max_steps → updates, N, epochs. */
TEST(steps_as_transformers)
{
    static const struct {
        int64_t rows, world;
        const char *job;
        int64_t batches, updates, steps, epochs, warmup;
    } c[] = {
        {10, 1, "{}", 5, 5, 15, 3, 0},
        {11, 1, "{}", 6, 6, 18, 3, 0},
        {11, 1, "{\"dataloader_drop_last\":true}", 5, 5, 15, 3, 0},
        {11, 1, "{\"gradient_accumulation_steps\":4}", 6, 2, 6, 3, 0},
        {11, 2, "{\"gradient_accumulation_steps\":2}", 6, 2, 6, 3, 0},
        {11, 4, "{}", 6, 2, 6, 3, 0},
        {3, 1, "{\"gradient_accumulation_steps\":8}", 2, 1, 3, 3, 0},
        {100, 1, "{\"num_train_epochs\":0.5}", 50, 50, 25, 1, 0},
        {100, 1, "{\"num_train_epochs\":1.01}", 50, 50, 51, 2, 0},
        {100, 1, "{\"max_steps\":120}", 50, 50, 120, 3, 0},
        {100, 1, "{\"max_steps\":100,\"warmup_ratio\":0.031}", 50, 50, 100, 2, 4},
        {100, 1, "{\"max_steps\":100,\"warmup_ratio\":0.5,\"warmup_steps\":7}", 50, 50, 100, 2, 7},
        {100, 1, "{\"max_steps\":100,\"warmup_steps\":0.055}", 50, 50, 100, 2, 6},
    };
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        ql_job *j = job_of(c[i].job);
        ql_args a;
        ql_steps p;
        CHECK_OK(ql_args_from_job(j, &a));
        CHECK_OK(ql_steps_plan(&a, c[i].rows, c[i].world, &p));
        CHECK_MSG(p.batches == c[i].batches && p.updates == c[i].updates && p.max_steps == c[i].steps && p.epochs == c[i].epochs &&
                      p.warmup == c[i].warmup,
                  "case %zu: %lld batches, %lld updates, %lld steps, %lld epochs, %lld warm-up", i, (long long)p.batches,
                  (long long)p.updates, (long long)p.max_steps, (long long)p.epochs, (long long)p.warmup);
        ql_job_free(j);
    }
}

TEST(too_little_data)
{
    ql_job *j = job_of("{\"dataloader_drop_last\":true,\"per_device_train_batch_size\":4}");
    ql_args a;
    ql_steps p;
    CHECK_OK(ql_args_from_job(j, &a));
    CHECK_FAILS(ql_steps_plan(&a, 3, 1, &p), QL_EINVAL, "3 samples: not one batch of 4 (dataloader_drop_last");
    CHECK_FAILS(ql_steps_plan(&a, 1, 1, &p), QL_EINVAL, "1 sample: not one batch of 4 (dataloader_drop_last");
    CHECK_FAILS(ql_steps_plan(&a, 0, 1, &p), QL_EINVAL, "0 samples");
    a.max_steps = 1000000000000;
    CHECK_FAILS(ql_steps_plan(&a, 30, 1, &p), QL_EINVAL, "1000000000000 optimizer steps are more than 100000000: set a lower max_steps");
    a.max_steps = -1, a.epochs = 1e6;
    CHECK_FAILS(ql_steps_plan(&a, 3000, 1, &p), QL_EINVAL, "set a lower num_train_epochs");
    ql_job_free(j);
}

/* Every micro-batch of every epoch is taken once and in order, whatever splits G into accumulation · world. */
TEST(steps_cover_the_data)
{
    for (int64_t rows = 1; rows < 40; rows += 3)
        for (int64_t g = 1; g <= 8; g *= 2) {
            ql_args a = {.batch = 3, .accumulation = g, .max_steps = -1, .epochs = 2, .logging_steps = 1, .eval_steps = 1, .save_steps = 1};
            ql_args b = a;
            ql_steps p, q;
            int64_t next = 0, epoch = 0;
            CHECK_OK(ql_steps_plan(&a, rows, 1, &p));
            b.accumulation = 1;
            CHECK_OK(ql_steps_plan(&b, rows, g, &q));
            CHECK(memcmp(&p, &q, sizeof p) == 0);
            for (int64_t s = 0; s < p.max_steps; s++) {
                ql_step_at at = ql_steps_at(&p, s);
                if (at.epoch != epoch) {
                    CHECK_INT(next, p.batches);
                    next = 0, epoch = at.epoch;
                }
                CHECK_INT(at.first, next);
                CHECK(at.count >= 1 && at.count <= g);
                next += at.count;
                CHECK_CLOSE(ql_steps_epoch(&p, s + 1), (double)epoch + (double)next / (double)p.batches, 1e-15);
            }
            CHECK_INT(next, p.batches);
            CHECK(ql_steps_epoch(&p, p.max_steps) == 2.0);
        }
}

static const char *due_line(const ql_args *a, const ql_steps *p, char *buf)
{
    char *at = buf;
    for (int64_t s = 1; s <= p->max_steps; s++) {
        unsigned d = ql_steps_due(a, p, s);
        at += sprintf(at, "%s%s%s%s%s", s > 1 ? " " : "", d & QL_DUE_LOG ? "l" : "", d & QL_DUE_EVAL ? "e" : "", d & QL_DUE_SAVE ? "s" : "",
                      d & QL_DUE_STOP ? "." : d ? "" : "-");
    }
    return buf;
}

TEST(what_is_due)
{
    static const struct {
        const char *job, *line;
    } c[] = {
        {"{\"max_steps\":6,\"logging_steps\":2,\"save_steps\":4}", "- l - ls - ls."},
        {"{\"max_steps\":5,\"logging_steps\":2,\"logging_first_step\":true,\"save_strategy\":\"no\"}", "l l - l ."},
        {"{\"max_steps\":6,\"logging_strategy\":\"epoch\",\"save_strategy\":\"epoch\"}", "- - - ls - ls."},
        {"{\"max_steps\":6,\"logging_strategy\":\"no\",\"save_strategy\":\"no\",\"eval_strategy\":\"steps\",\"eval_steps\":2,\"eval_delay\":3,"
         "\"eval_dataset\":\"e\"}",
         "- - - e - e."},
        {"{\"max_steps\":5,\"logging_strategy\":\"no\",\"save_strategy\":\"no\",\"eval_strategy\":\"steps\",\"eval_steps\":2,\"eval_dataset\":\"e\"}",
         "- e - e e."},
        {"{\"max_steps\":8,\"logging_steps\":0.25,\"save_steps\":0.5,\"eval_strategy\":\"epoch\",\"eval_dataset\":\"e\",\"eval_delay\":1.5}",
         "- l - ls - l - les."},
    };
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        ql_job *j = job_of(c[i].job);
        ql_args a;
        ql_steps p;
        char buf[256];
        CHECK_OK(ql_args_from_job(j, &a));
        CHECK_OK(ql_steps_plan(&a, 8, 1, &p)); /* 4 steps an epoch */
        CHECK_STR(due_line(&a, &p, buf), c[i].line);
        ql_job_free(j);
    }
}

TEST_MAIN(T(defaults), T(what_is_set_arrives), T(steps_as_transformers), T(too_little_data), T(steps_cover_the_data), T(what_is_due))
