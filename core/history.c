#include "core/history.h"
#include "core/file.h"
#include "core/json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct ql_history {
    const ql_args *args;
    const ql_steps *steps;
    json_t *records;
    int64_t done, logged;      /* steps made; those of them that a record covers */
    int64_t begun;             /* steps made before this session */
    double sum, total;         /* of losses since the last record; of those before it, in this session */
    double norm, lr;           /* of the last step */
    int64_t tokens, begun_tokens;
    double flos;
    bool has_best;
    double best;
    int64_t best_step;
    char *best_path;
};

ql_status ql_history_new(const ql_args *args, const ql_steps *steps, ql_history **out)
{
    ql_history *h = calloc(1, sizeof *h);
    if (!h || !(h->records = json_array())) {
        free(h);
        QL_FAIL(QL_ENOMEM, "history: out of memory");
    }
    h->args = args;
    h->steps = steps;
    *out = h;
    return QL_OK;
}

void ql_history_free(ql_history *h)
{
    if (!h) return;
    json_decref(h->records);
    free(h->best_path);
    free(h);
}

/* As Python's round: the nearest decimal of the exact value. */
static double rounded(double x, int digits)
{
    char text[400];
    snprintf(text, sizeof text, "%.*f", digits, x);
    return strtod(text, NULL);
}

/* JSON's number, or null for what is none. */
static json_t *real(double x)
{
    return isfinite(x) ? json_real(x) : json_null();
}

static int put_real(json_t *o, const char *key, double x)
{
    return json_object_set_new(o, key, real(x));
}

/* prefix_runtime, prefix_samples_per_second …; negative counts are left out. */
static int put_speed(json_t *o, const char *prefix, double seconds, double samples, double steps, double tokens)
{
    char key[64];
    const struct {
        const char *name;
        double n;
    } rates[] = {{"samples", samples}, {"steps", steps}, {"tokens", tokens}};
    snprintf(key, sizeof key, "%s_runtime", prefix);
    int bad = put_real(o, key, rounded(seconds, 4));
    for (int i = 0; i < 3 && seconds > 0; i++) {
        if (rates[i].n < 0) continue;
        snprintf(key, sizeof key, "%s_%s_per_second", prefix, rates[i].name);
        bad |= put_real(o, key, rounded(rates[i].n / seconds, 3));
    }
    return bad;
}

/* epoch and step end every record. Takes over o. */
static ql_status append(ql_history *h, json_t *o, int bad, double log_seconds)
{
    bad |= put_real(o, "epoch", ql_steps_epoch(h->steps, h->done));
    if (h->args->count_tokens == QL_TOKENS_YES) {
        bad |= json_object_set_new(o, "num_input_tokens_seen", json_integer(h->tokens));
        if (log_seconds >= 0) bad |= put_speed(o, "train", log_seconds, -1, -1, (double)(h->tokens - h->begun_tokens));
    }
    bad |= json_object_set_new(o, "step", json_integer(h->done));
    bad |= json_array_append_new(h->records, o);
    return bad ? ql_fail(QL_ENOMEM, "history: out of memory") : QL_OK;
}

void ql_history_step(ql_history *h, const ql_step_record *r)
{
    h->done = r->step;
    h->norm = r->grad_norm;
    h->lr = r->lr;
    h->flos += r->flos;
    if (h->args->count_tokens == QL_TOKENS_YES) h->tokens += r->tokens;
    /* transformers puts the mean so far in the place of a loss that is none (its step counter is not yet advanced) */
    if (h->args->nan_filter && !isfinite(r->loss)) h->sum += h->sum / (double)(h->done - h->logged);
    else h->sum += r->loss;
}

ql_status ql_history_log(ql_history *h, double seconds)
{
    int bad;
    json_t *o;
    if (h->done <= h->logged) return QL_OK;
    o = json_object();
    bad = put_real(o, "loss", h->sum / (double)(h->done - h->logged));
    bad |= put_real(o, "grad_norm", h->norm);
    bad |= put_real(o, "learning_rate", h->lr);
    QL_TRY(append(h, o, bad, seconds));
    h->total += h->sum;
    h->sum = 0;
    h->logged = h->done;
    return QL_OK;
}

ql_status ql_history_eval(ql_history *h, const ql_eval_record *r, int *best)
{
    json_t *o = json_object();
    int bad = put_real(o, "eval_loss", r->loss);
    bad |= put_speed(o, "eval", r->seconds, (double)r->samples, (double)r->batches, -1);
    QL_TRY(append(h, o, bad, -1));
    *best = 0;
    if (!h->args->track_best || !isfinite(r->loss) || !h->done) return QL_OK; /* before the first step there is nothing to save */
    if (h->has_best && !(h->args->greater_is_better ? r->loss > h->best : r->loss < h->best)) return QL_OK;
    h->has_best = true;
    h->best = r->loss;
    if (h->args->save_every != QL_EVERY_NO) h->best_step = h->done;
    *best = 1;
    return QL_OK;
}

bool ql_history_evaluated(const ql_history *h)
{
    bool done = false;
    for (size_t i = json_array_size(h->records); i-- > 0 && !done;) {
        const json_t *r = json_array_get(h->records, i);
        if (json_integer_value(json_object_get(r, "step")) != h->done) break;
        done = json_object_get(r, "eval_loss") != NULL;
    }
    return done;
}

ql_status ql_history_saved(ql_history *h, int64_t step, const char *path)
{
    char *copy;
    if (!h->best_step || step != h->best_step) return QL_OK;
    copy = strdup(path);
    if (!copy) QL_FAIL(QL_ENOMEM, "history: out of memory");
    free(h->best_path);
    h->best_path = copy;
    return QL_OK;
}

const char *ql_history_best_path(const ql_history *h)
{
    return h->best_path;
}

int64_t ql_history_best_step(const ql_history *h)
{
    return h->best_step;
}

double ql_history_train_loss(const ql_history *h)
{
    double steps = (double)(h->done - h->begun);
    return (h->total + h->sum) / (steps > 0 ? steps : 0.001);
}

ql_status ql_history_end(ql_history *h, double seconds)
{
    const ql_args *a = h->args;
    const ql_steps *p = h->steps;
    double steps = (double)(h->done - h->begun);
    /* samples of the whole plan, and this session's share of them */
    double all = a->max_steps > 0 ? (double)p->max_steps * (double)(a->batch * p->group) : (double)p->rows * a->epochs;
    json_t *o = json_object();
    int bad = put_speed(o, "train", seconds, all * steps / (double)p->max_steps, steps, -1);
    bad |= put_real(o, "total_flos", h->flos);
    bad |= put_real(o, "train_loss", ql_history_train_loss(h));
    return append(h, o, bad, -1);
}

const json_t *ql_history_records(const ql_history *h)
{
    return h->records;
}

int64_t ql_history_done(const ql_history *h)
{
    return h->done;
}

/* ---- trainer_state.json --------------------------------------------------------------------------- */

static json_t *state(const ql_history *h)
{
    const ql_args *a = h->args;
    const ql_steps *p = h->steps;
    bool evals = a->eval_every == QL_EVERY_STEPS || a->eval_steps_set;
    return json_pack(
        "{s:o, s:o, s:o, s:f, s:I, s:I, s:b, s:b, s:b, s:O, s:I, s:I, s:I, s:I, s:I, s:f, s:I, s:n, s:n,"
        " s:{s:{s:{s:b, s:b, s:b, s:b, s:b}, s:{}}}}",
        "best_global_step", h->best_step ? json_integer(h->best_step) : json_null(),
        "best_metric", h->has_best ? json_real(h->best) : json_null(),
        "best_model_checkpoint", h->best_path ? json_string(h->best_path) : json_null(),
        "epoch", ql_steps_epoch(p, h->done), "eval_steps", (json_int_t)(evals ? p->eval_steps : 500), "global_step", (json_int_t)h->done,
        "is_hyper_param_search", 0, "is_local_process_zero", 1, "is_world_process_zero", 1, "log_history", h->records, "logging_steps",
        (json_int_t)p->logging_steps, "max_steps", (json_int_t)p->max_steps, "num_input_tokens_seen", (json_int_t)h->tokens,
        "num_train_epochs", (json_int_t)p->epochs, "save_steps", (json_int_t)p->save_steps, "total_flos", h->flos, "train_batch_size",
        (json_int_t)a->batch, "trial_name", "trial_params", "stateful_callbacks", "TrainerControl", "args", "should_epoch_stop", 0,
        "should_evaluate", 0, "should_log", 0, "should_save", 1, "should_training_stop", h->done >= p->max_steps, "attributes");
}

ql_status ql_history_save(const ql_history *h, const char *folder)
{
    char path[QL_PATH_MAX];
    json_t *o = state(h);
    char *text = o ? ql_json_python(o) : NULL;
    ql_status st = QL_OK;
    json_decref(o);
    if (!text) QL_FAIL(QL_ENOMEM, "trainer_state.json: out of memory");
    QL_GO(ql_path_join(path, folder, "trainer_state.json"));
    QL_GO(ql_file_save(path, text, strlen(text)));
out:
    free(text);
    return st;
}

/* ---- resume --------------------------------------------------------------------------------------- */

json_t *ql_history_rest(const ql_history *h)
{
    return json_pack("{s:I, s:o, s:o, s:I}", "logged", (json_int_t)h->logged, "loss_sum", real(h->sum), "loss_total", real(h->total), "begun",
                     (json_int_t)h->begun);
}

static ql_status read_rest(ql_history *h, const json_t *rest)
{
    const char *what = "engine_state.json history";
    double nan_sum = NAN; /* null: the sum was none */
    h->sum = nan_sum, h->total = nan_sum;
    QL_TRY(ql_json_int(rest, what, "logged", 0, h->done, &h->logged));
    QL_TRY(ql_json_int(rest, what, "begun", 0, h->done, &h->begun));
    QL_TRY(ql_json_opt_num(rest, what, "loss_sum", -HUGE_VAL, HUGE_VAL, &h->sum));
    return ql_json_opt_num(rest, what, "loss_total", -HUGE_VAL, HUGE_VAL, &h->total);
}

/* Where the best checkpoint is now: a run's folder may have moved, and its checkpoints with it. false: nowhere. */
static bool find_best(const char *said, const char *folder, char out[QL_PATH_MAX])
{
    char run[QL_PATH_MAX];
    const char *name = strrchr(said, '/');
    size_t n = strlen(folder);
    if (ql_path_is_dir(said)) return snprintf(out, QL_PATH_MAX, "%s", said) < QL_PATH_MAX;
    while (n > 1 && folder[n - 1] == '/') n--;
    while (n > 0 && folder[n - 1] != '/') n--;
    if (n >= sizeof run) return false;
    snprintf(run, sizeof run, "%.*s", (int)n, folder);
    return ql_path_join(out, n ? run : ".", name ? name + 1 : said) == QL_OK && ql_path_is_dir(out);
}

static ql_status read_best(ql_history *h, const char *folder, const json_t *o)
{
    const char *what = "trainer_state.json", *said = NULL;
    char path[QL_PATH_MAX];
    h->has_best = json_is_number(json_object_get(o, "best_metric"));
    QL_TRY(ql_json_opt_num(o, what, "best_metric", -HUGE_VAL, HUGE_VAL, &h->best));
    QL_TRY(ql_json_opt_int(o, what, "best_global_step", 0, h->done, &h->best_step));
    QL_TRY(ql_json_opt_str(o, what, "best_model_checkpoint", &said));
    return said && find_best(said, folder, path) ? ql_history_saved(h, h->best_step, path) : QL_OK;
}

ql_status ql_history_resume(ql_history *h, const char *folder, const json_t *rest)
{
    const char *what = "trainer_state.json";
    char path[QL_PATH_MAX];
    json_t *o = NULL, *log;
    ql_status st = QL_OK;
    QL_TRY(ql_path_join(path, folder, what));
    QL_TRY(ql_json_load(path, 256 << 20, &o));
    log = json_object_get(o, "log_history");
    if (!json_is_array(log)) QL_GO(ql_fail(QL_EINVAL, "%s: 'log_history' must be a list", path));
    QL_GO(ql_json_int(o, what, "global_step", 0, (int64_t)1e12, &h->done));
    QL_GO(ql_json_opt_int(o, what, "num_input_tokens_seen", 0, INT64_MAX / 2, &h->tokens));
    QL_GO(ql_json_opt_num(o, what, "total_flos", 0, HUGE_VAL, &h->flos));
    QL_GO(read_best(h, folder, o));
    h->begun = h->logged = h->done;
    h->begun_tokens = h->tokens;
    h->sum = h->total = 0;
    if (rest) QL_GO(read_rest(h, rest));
    json_decref(h->records);
    h->records = json_incref(log);
out:
    json_decref(o);
    if (st != QL_OK) ql_error_prefix("%s: ", folder);
    return st;
}
