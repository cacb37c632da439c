/* Run folders: names, histories of engines and of transformers, resumed runs. */
#include "core/qlora.h"
#include "tests/test.h"

#include <sys/stat.h>
#include <unistd.h>

static char dir[64];

static const char *in(const char *name)
{
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

static void put(const char *name, const char *text)
{
    FILE *f = fopen(in(name), "w");
    if (f) fputs(text, f), fclose(f);
}

static void fresh(void)
{
    snprintf(dir, sizeof dir, "/tmp/qlora-runs-XXXXXX");
    if (!mkdtemp(dir)) exit(9);
}

TEST(next_name)
{
    char name[32];
    fresh();
    CHECK_OK(ql_run_next_name(in("nowhere"), name, sizeof name));
    CHECK_STR(name, "run-1");
    mkdir(in("run-2"), 0700), mkdir(in("run-x"), 0700), mkdir(in("run-10"), 0700),
        mkdir(in("other"), 0700);
    CHECK_OK(ql_run_next_name(dir, name, sizeof name));
    CHECK_STR(name, "run-11");
}

TEST(events_of_a_resumed_run)
{
    json_t *r;
    fresh();
    mkdir(in("checkpoint-10"), 0700), mkdir(in("checkpoint-2"), 0700),
        mkdir(in("checkpoint-tmp"), 0700);
    put("events.jsonl",
        "{\"ev\":\"start\",\"resumed\":0}\n"
        "{\"ev\":\"step\",\"step\":1,\"loss\":3.0}\n{\"ev\":\"step\",\"step\":2,\"loss\":2.0}\n"
        "{\"ev\":\"step\",\"step\":3,\"loss\":9.0}\nnot json\n"
        "{\"ev\":\"start\",\"resumed\":2}\n{\"ev\":\"step\",\"step\":3,\"loss\":1.0}\n{\"ev\":"
        "\"memory\",\"devices\":[]}\n{\"ev\":\"st");
    CHECK_OK(ql_run_report(dir, &r));
    json_t *h = json_object_get(r, "log_history"), *c = json_object_get(r, "checkpoints");
    CHECK_INT(json_array_size(h), 3);
    CHECK_CLOSE(json_number_value(json_object_get(json_array_get(h, 2), "loss")), 1.0, 0);
    CHECK_INT(json_integer_value(json_object_get(r, "step")), 3);
    CHECK_INT(json_array_size(json_object_get(r, "memory")), 1);
    CHECK_INT(json_array_size(c), 2);
    CHECK_INT(json_integer_value(json_object_get(json_array_get(c, 1), "step")), 10);
    json_decref(r);
}

TEST(state_of_a_trainer)
{
    json_t *r;
    fresh();
    put("trainer_state.json",
        "{\"log_history\":[{\"step\":5,\"loss\":2.5},{\"step\":5,\"eval_loss\":2.0}]}");
    CHECK_OK(ql_run_report(in("trainer_state.json"), &r));
    CHECK_INT(json_array_size(json_object_get(r, "log_history")), 2);
    json_decref(r);
    mkdir(in("out"), 0700), mkdir(in("out/checkpoint-5"), 0700);
    put("out/checkpoint-5/trainer_state.json", "{\"log_history\":[{\"step\":5,\"loss\":2.5}]}");
    CHECK_OK(ql_run_report(in("out"), &r));
    CHECK_INT(json_integer_value(json_object_get(r, "step")), 5);
    json_decref(r);
}

TEST(broken_folders)
{
    json_t *r;
    fresh();
    CHECK_FAILS(ql_run_report(in("nowhere"), &r), QL_EINVAL, "No such file");
    CHECK_FAILS(ql_run_report(dir, &r), QL_EINVAL, "neither events.jsonl nor trainer_state.json");
    put("trainer_state.json", "{\"log_history\":5}");
    CHECK_FAILS(ql_run_report(dir, &r), QL_EINVAL, "no log_history");
    put("trainer_state.json", "{");
    CHECK_FAILS(ql_run_report(dir, &r), QL_EINVAL, "trainer_state.json");
}

TEST_MAIN(T(next_name), T(events_of_a_resumed_run), T(state_of_a_trainer), T(broken_folders))
