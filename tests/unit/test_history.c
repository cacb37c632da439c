#include "core/history.h"
#include "core/json.h"
#include "tests/tmp.h"

typedef struct {
    ql_job *job;
    ql_args args;
    ql_steps steps;
    ql_history *h;
} run;

static void open_run(run *to, json_t *job, int64_t rows)
{
    run r = {0};
    json_t *o = json_deep_copy(job);
    if (json_object_get(o, "eval_strategy")) json_object_set_new(o, "eval_dataset", json_string("e"));
    if (ql_job_from_json(o, &r.job) != QL_OK || ql_args_from_job(r.job, &r.args) != QL_OK ||
        ql_steps_plan(&r.args, rows, 1, &r.steps) != QL_OK)
        fprintf(stderr, "%s\n", ql_error()), exit(98);
    json_decref(o);
    *to = r; /* the history points into it */
    if (ql_history_new(&to->args, &to->steps, &to->h) != QL_OK) exit(98);
}

static void close_run(run *r)
{
    ql_history_free(r->h);
    ql_job_free(r->job);
}

/* Equal, but for speeds, and numbers to 2e-6: transformers sums losses in fp32. "" or where they differ. */
static const char *differ(const json_t *a, const json_t *b, const char *at)
{
    static char where[256];
    const char *key, *d;
    json_t *v;
    size_t i;
    if (strstr(at, "runtime") || strstr(at, "per_second")) return json_is_number(a) && json_is_number(b) ? "" : "speed";
    if (json_is_number(a) && json_is_number(b) && json_is_real(a) == json_is_real(b)) {
        double x = json_number_value(a), y = json_number_value(b);
        if (fabs(x - y) <= 2e-6 * fabs(y)) return "";
    } else if (json_is_object(a) && json_is_object(b) && json_object_size(a) == json_object_size(b)) {
        json_object_foreach((json_t *)b, key, v) {
            if (*(d = differ(json_object_get(a, key), v, key))) return d;
        }
        return "";
    } else if (json_is_array(a) && json_is_array(b) && json_array_size(a) == json_array_size(b)) {
        json_array_foreach((json_t *)b, i, v) {
            if (*(d = differ(json_array_get(a, i), v, at))) return d;
        }
        return "";
    } else if (json_equal(a, b)) {
        return "";
    }
    char *x = a ? json_dumps(a, JSON_ENCODE_ANY | JSON_COMPACT) : NULL, *y = b ? json_dumps(b, JSON_ENCODE_ANY | JSON_COMPACT) : NULL;
    snprintf(where, sizeof where, "%s: %.100s, expected %.100s", at, x ? x : "nothing", y ? y : "nothing");
    free(x);
    free(y);
    return where;
}

/* The next eval_loss that transformers saw at this step. */
static double eval_loss(const json_t *log, int64_t step)
{
    size_t i;
    json_t *r;
    json_array_foreach((json_t *)log, i, r) {
        json_t *l = json_object_get(r, "eval_loss");
        if (l && json_integer_value(json_object_get(r, "step")) == step) return json_number_value(l);
    }
    return NAN;
}

/* Drives the history through one recorded run; the state at each checkpoint is compared. Returns what differs. */
static const char *replay(const json_t *fix, bool resume)
{
    const json_t *log = json_object_get(fix, "log_history"), *losses = json_object_get(fix, "losses");
    run r;
    open_run(&r, json_object_get(fix, "job"), json_integer_value(json_object_get(fix, "rows")));
    const char *d = "";
    char name[64], dir[QL_PATH_MAX];
    for (int64_t s = 1; s <= r.steps.max_steps && !*d; s++) {
        const json_t *micro = json_array_get(losses, (size_t)s - 1);
        ql_step_record rec = {.step = s, .lr = json_number_value(json_array_get(json_object_get(fix, "rates"), (size_t)s - 1)),
                              .grad_norm = json_number_value(json_array_get(json_object_get(fix, "norms"), (size_t)s - 1)),
                              .tokens = 18 * (int64_t)json_array_size(micro), .flos = 267840.0 * (double)json_array_size(micro)};
        size_t i;
        json_t *l;
        json_array_foreach((json_t *)micro, i, l) rec.loss += json_is_null(l) ? NAN : json_number_value(l);
        ql_history_step(r.h, &rec);
        unsigned due = ql_steps_due(&r.args, &r.steps, s);
        if (due & QL_DUE_LOG && ql_history_log(r.h, 1.0) != QL_OK) d = ql_error();
        if (due & QL_DUE_EVAL) {
            ql_eval_record e = {eval_loss(log, s), 0.5, 6, 1};
            int best;
            if (ql_history_eval(r.h, &e, &best) != QL_OK) d = ql_error();
        }
        if (due & QL_DUE_SAVE && !*d) {
            snprintf(name, sizeof name, "checkpoint-%lld", (long long)s);
            json_t *want = json_loads(json_string_value(json_object_get(json_object_get(fix, "states"), name)), 0, NULL), *got = NULL;
            char path[QL_PATH_MAX];
            snprintf(dir, sizeof dir, "%s", tmp_dir(name));
            snprintf(path, sizeof path, "out/%s", name);
            if (ql_history_saved(r.h, s, path) != QL_OK || ql_history_save(r.h, dir) != QL_OK) d = ql_error();
            if (ql_path_join(path, dir, "trainer_state.json") != QL_OK) d = ql_error();
            if (!*d && ql_json_load(path, 1 << 20, &got) != QL_OK) d = ql_error();
            if (!*d) d = differ(got, want, name);
            json_decref(want);
            json_decref(got);
            if (resume && !*d) { /* a fresh history goes on from here */
                json_t *rest = ql_history_rest(r.h);
                ql_history_free(r.h);
                r.h = NULL;
                if (ql_history_new(&r.args, &r.steps, &r.h) != QL_OK || ql_history_resume(r.h, dir, rest) != QL_OK) d = ql_error();
                json_decref(rest);
            }
        }
    }
    if (!*d && ql_history_end(r.h, 2.0) != QL_OK) d = ql_error();
    if (!*d) d = differ(ql_history_records(r.h), log, "log_history");
    close_run(&r);
    return d;
}

static void replay_all(bool resume)
{
    json_t *f = json_load_file("tests/golden/state.json", 0, NULL), *fix;
    size_t i;
    CHECK(json_array_size(json_object_get(f, "runs")) == 3);
    json_array_foreach(json_object_get(f, "runs"), i, fix) {
        const char *d = replay(fix, resume);
        CHECK_MSG(!*d, "run %zu: %s", i, d);
    }
    json_decref(f);
}

TEST(records_as_transformers)
{
    replay_all(false);
}

TEST(a_resume_at_every_checkpoint_changes_nothing)
{
    replay_all(true);
}

TEST(the_file_as_python_writes_it)
{
    json_t *f = json_load_file("tests/golden/state.json", 0, NULL), *fix, *v;
    const char *name;
    size_t i;
    json_array_foreach(json_object_get(f, "runs"), i, fix) {
        json_object_foreach(json_object_get(fix, "states"), name, v) {
            json_t *o = json_loads(json_string_value(v), 0, NULL);
            char *text = ql_json_python(o);
            CHECK_STR(text, json_string_value(v));
            free(text);
            json_decref(o);
        }
    }
    json_decref(f);
    json_t *o = json_pack("{s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:s,s:[],s:{},s:n}", "a", 1e-5, "b", 2e-4, "c", 1e16, "d", 123456789012345680.0, "e",
                          0.1, "f", -0.0, "g", 150000.0, "h", "é\"\n\\U\\u00C9\x01", "i", "j", "k");
    char *text = ql_json_python(o);
    CHECK_STR(text, "{\n  \"a\": 1e-05,\n  \"b\": 0.0002,\n  \"c\": 1e+16,\n  \"d\": 1.2345678901234568e+17,\n  \"e\": 0.1,\n  \"f\": -0.0,\n"
                    "  \"g\": 150000.0,\n  \"h\": \"\\u00e9\\\"\\n\\\\U\\\\u00C9\\u0001\",\n  \"i\": [],\n  \"j\": {},\n  \"k\": null\n}\n");
    free(text);
    json_decref(o);
}

TEST(losses_that_are_none)
{
    json_t *job = json_pack("{s:i, s:i, s:b}", "max_steps", 4, "logging_steps", 2, "logging_nan_inf_filter", 0);
    run r;
    open_run(&r, job, 8);
    ql_step_record a = {1, 2.0, 1, 1e-3, 10, 0}, b = {2, NAN, INFINITY, 1e-3, 10, 0};
    ql_history_step(r.h, &a);
    ql_history_step(r.h, &b);
    CHECK_OK(ql_history_log(r.h, 1));
    CHECK_OK(ql_history_log(r.h, 1)); /* nothing new: no record */
    const json_t *rec = json_array_get(ql_history_records(r.h), 0);
    CHECK_INT(json_array_size(ql_history_records(r.h)), 1);
    CHECK(json_is_null(json_object_get(rec, "loss")) && json_is_null(json_object_get(rec, "grad_norm")));
    CHECK(isnan(ql_history_train_loss(r.h)));
    json_t *rest = ql_history_rest(r.h);
    char dir[QL_PATH_MAX];
    snprintf(dir, sizeof dir, "%s", tmp_dir("nan"));
    CHECK_OK(ql_history_save(r.h, dir));
    ql_history_free(r.h);
    CHECK_OK(ql_history_new(&r.args, &r.steps, &r.h));
    CHECK_OK(ql_history_resume(r.h, dir, rest));
    CHECK(isnan(ql_history_train_loss(r.h)) && ql_history_done(r.h) == 2);
    json_decref(rest);
    json_decref(job);
    close_run(&r);
}

/* As in transformers: eval_on_start is a record, and no model that could be the best. */
TEST(the_best_is_one_that_was_trained)
{
    json_t *job = json_loads("{\"max_steps\":4,\"eval_on_start\":true,\"eval_strategy\":\"steps\",\"eval_steps\":1,\"eval_dataset\":\"x\","
                             "\"metric_for_best_model\":\"loss\"}", 0, NULL);
    static const double losses[] = {1.0, 3.0, 2.0, 2.5};
    static const int better[] = {0, 1, 1, 0};
    run r;
    open_run(&r, job, 8);
    for (int i = 0; i < 4; i++) {
        int best = -1;
        if (i) ql_history_step(r.h, &(ql_step_record){i, 1, 1, 1e-3, 10, 0});
        CHECK_OK(ql_history_eval(r.h, &(ql_eval_record){.loss = losses[i], .seconds = 1, .samples = 1, .batches = 1}, &best));
        CHECK_MSG(best == better[i], "evaluation %d", i);
        CHECK(ql_history_evaluated(r.h));
    }
    CHECK_INT(ql_history_best_step(r.h), 2);
    ql_history_step(r.h, &(ql_step_record){4, 1, 1, 1e-3, 10, 0});
    CHECK(!ql_history_evaluated(r.h));
    json_decref(job);
    close_run(&r);
}

TEST(broken_states_are_named)
{
    json_t *job = json_object();
    run r;
    open_run(&r, job, 8);
    char dir[QL_PATH_MAX];
    snprintf(dir, sizeof dir, "%s", tmp_dir("broken"));
    CHECK_FAILS(ql_history_resume(r.h, dir, NULL), QL_EIO, "trainer_state.json");
    tmp_text(dir, "trainer_state.json", "{\"global_step\": 3}");
    CHECK_FAILS(ql_history_resume(r.h, dir, NULL), QL_EINVAL, "'log_history' must be a list");
    tmp_text(dir, "trainer_state.json", "{\"global_step\": -3, \"log_history\": []}");
    CHECK_FAILS(ql_history_resume(r.h, dir, NULL), QL_EINVAL, "global_step");
    tmp_text(dir, "trainer_state.json", "{\"global_step\": 3, ");
    CHECK_FAILS(ql_history_resume(r.h, dir, NULL), QL_EINVAL, "bad JSON");
    json_decref(job);
    close_run(&r);
}

TEST_MAIN(T(the_best_is_one_that_was_trained), T(records_as_transformers), T(a_resume_at_every_checkpoint_changes_nothing), T(the_file_as_python_writes_it), T(losses_that_are_none),
          T(broken_states_are_named))
