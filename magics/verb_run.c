/* Verbs that make runs: train, resume, baseline. */
#include "magics/session.h"
#include "magics/view.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- a run
 * ------------------------------------------------------------------------------------------ */

typedef struct {
    ql_magics *m;
    ql_job *job;        /* borrowed */
    const char *name;   /* of the run */
    const char *path;   /* its folder */
    const char *resume; /* checkpoint, NULL: fresh */
    int64_t steps;      /* 0: all */
    int every;
    const json_t *before, *against;
} run_request;

static void spark(const json_t *history, int columns, ql_buf *b)
{
    size_t n = json_array_size(history), k = 0;
    double *y = calloc(n + 1, sizeof *y);
    for (size_t i = 0; y && i < n; i++)
        if (json_object_get(json_array_get(history, i), "loss"))
            y[k++] = ql_jnum(json_array_get(history, i), "loss", (double)NAN);
    if (y && k > 1 && columns > 3) {
        ql_buf_put(b, " ");
        ql_sparkline(b, y, (int)k, columns < 16 ? columns : 16);
    }
    free(y);
}

static double edge_loss(const json_t *history, int last)
{
    size_t n = json_array_size(history);
    for (size_t i = 0; i < n; i++) {
        double v = ql_jnum(json_array_get(history, last ? n - 1 - i : i), "loss", (double)NAN);
        if (isfinite(v)) return v;
    }
    return (double)NAN;
}

/* "run-1: 60 steps in 00:41, loss 3.2101 → 1.0450, 5,210 tokens/s"; resumed: "60 steps, the last 20 in 00:14" */
static void run_line(const char *name, const json_t *record, const json_t *result, ql_buf *b)
{
    const json_t *history = json_object_get(record, "history");
    int64_t step = ql_jint(record, "step", 0), from = ql_jint(json_object_get(record, "start"), "resumed", 0);
    double seconds = ql_jnum(result, "train_runtime", (double)NAN),
           speed = ql_jnum(result, "tokens_per_second", (double)NAN);
    ql_buf_printf(b, "%s: %lld step%s", name, (long long)step, step == 1 ? "" : "s");
    /* Time and speed are those of the steps that were done here. */
    if (isfinite(seconds) && step > from && from > 0) ql_buf_printf(b, ", the last %lld", (long long)(step - from));
    if (isfinite(seconds) && step > from) ql_buf_printf(b, " in %s", ql_fmt_time(seconds).s);
    if (isfinite(edge_loss(history, 0)))
        ql_buf_printf(b, ", loss %.4f → %.4f", edge_loss(history, 0), edge_loss(history, 1));
    if (isfinite(speed) && step > from) ql_buf_printf(b, ", %s tokens/s", ql_fmt_count(speed).s);
}

/* The record of a run, as its result and as `last`: what was seen, what the engine says, where it
 * is. */
static json_t *run_data(const run_request *q, const ql_live *live, const json_t *result,
                        const char *state)
{
    json_t *d = ql_live_record(live);
    json_object_set_new(d, "name", ql_text_json(q->name, strlen(q->name)));
    json_object_set_new(d, "path", ql_text_json(q->path, strlen(q->path)));
    json_object_set_new(d, "state", json_string(state));
    json_object_set_new(d, "job", ql_job_json(q->job));
    static const char *const keys[] = {"train_loss", "train_runtime", "tokens_per_second",
                                       "adapter", "checkpoint"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (json_object_get(result, keys[i]))
            json_object_set(d, keys[i], json_object_get(result, keys[i]));
    return d;
}

static ql_status remember(ql_magics *m, const run_request *q, json_t *data)
{
    ql_buf line = {0};
    json_t *r = NULL;
    run_line(q->name, data, data, &line);
    spark(json_object_get(data, "history"), QL_VIEW_COLUMNS - 1 - ql_text_width(ql_buf_str(&line)),
          &line);
    ql_status st = ql_result("run", ql_buf_str(&line), data, NULL, &r);
    ql_buf_free(&line);
    QL_TRY(st);
    char *path = strdup(q->path);
    if (!path) {
        json_decref(r);
        QL_FAIL(QL_ENOMEM, "out of memory");
    }
    json_decref(m->last);
    m->last = r;
    free(m->last_path);
    m->last_path = path;
    return QL_OK;
}

/* What makes a name one word of a line. */
static const char *quote_of(const char *name)
{
    return strpbrk(name, " \t#;'") ? "\"" : "";
}

static const char *base_of(const char *path)
{
    const char *slash = path ? strrchr(path, '/') : NULL;
    return slash ? slash + 1 : path;
}

/* Where a run has checkpoints beyond this one, which it left by resuming an earlier one: the last of them, which the run's name alone
 * stands for. */
static char *beyond(const char *run, const char *checkpoint)
{
    char *last = NULL;
    if (!checkpoint) return NULL;
    if (ql_run_checkpoint(run, &last) != QL_OK) ql_error_clear();
    const char *a = last ? strrchr(last, '-') : NULL, *b = strrchr(checkpoint, '-');
    if (a && b && strtoll(a + 1, NULL, 10) > strtoll(b + 1, NULL, 10)) return last;
    free(last);
    return NULL;
}

/* "resume run-1": a run's name is enough where its folder is where names are looked up, and its last checkpoint is meant. */
static void resume_words(const run_request *q, const char *checkpoint, ql_buf *b)
{
    char usual[4096], *other = beyond(q->path, checkpoint);
    snprintf(usual, sizeof usual, "%s/%s", q->m->runs, q->name);
    const char *run = other ? checkpoint : strcmp(usual, q->path) == 0 ? q->name : q->path, *quote = quote_of(run);
    ql_buf_printf(b, "%%qlora resume %s%s%s", quote, run, quote);
    free(other);
}

static void warn_beyond(ql_magics *m, const char *run, const char *checkpoint)
{
    char *last = beyond(run, checkpoint);
    ql_buf line = {0}, b = {0};
    if (!last) return;
    ql_buf_printf(&line, "! %s has checkpoints beyond %s: the run's name alone goes on from %s", run, base_of(checkpoint), base_of(last));
    ql_view_wrap(&b, ql_buf_str(&line), QL_VIEW_COLUMNS, 2);
    ql_buf_put(&b, "\n");
    m->host.print(m->host.self, ql_buf_str(&b));
    ql_buf_free(&line);
    ql_buf_free(&b);
    free(last);
}

/* How many of the shared steps have the same loss: by the bits that the engine reports, else by
 * value. */
static void compare(const json_t *a, const json_t *b, int64_t *shared, int64_t *same, double *worst)
{
    size_t i, k;
    const json_t *x, *y;
    *shared = *same = 0;
    *worst = 0;
    json_array_foreach((json_t *)a, i, x)
    {
        if (!json_object_get(x, "loss")) continue;
        json_array_foreach((json_t *)b, k, y)
        {
            if (!json_object_get(y, "loss") || ql_jint(x, "step", -1) != ql_jint(y, "step", -2))
                continue;
            const char *p = ql_jstr(x, "loss_bits", NULL), *r = ql_jstr(y, "loss_bits", NULL);
            double d = fabs(ql_jnum(x, "loss", (double)NAN) - ql_jnum(y, "loss", (double)NAN));
            ++*shared;
            *same += p && r ? strcmp(p, r) == 0
                            : json_equal((json_t *)json_object_get(x, "loss"),
                                         (json_t *)json_object_get(y, "loss"));
            if (d > *worst) *worst = d;
        }
    }
}

/* "20/20 losses: same bits" */
static void verdict(const json_t *report, const json_t *record, ql_buf *b)
{
    int64_t shared, same;
    double worst;
    compare(json_object_get(report, "history"), json_object_get(record, "history"), &shared, &same,
            &worst);
    if (shared == 0)
        ql_buf_printf(b, "no step in common with %s", ql_jstr(report, "name", "the run"));
    else
        ql_buf_printf(b, "%lld/%lld losses: same bits", (long long)same, (long long)shared);
    if (same < shared) ql_buf_printf(b, "; largest difference %s", ql_fmt_num(worst, 3).s);
}

static void final_note(const run_request *q, ql_status st, const json_t *result,
                       const json_t *record, ql_buf *b)
{
    const json_t *start = json_object_get(record, "start");
    int64_t resumed = ql_jint(start, "resumed", 0);
    if (st == QL_OK && q->resume && resumed >= ql_jint(start, "max_steps", resumed + 1)) {
        ql_buf_printf(b, "nothing to resume: %s is done, step %lld of %lld; on from there: ", q->name, (long long)resumed,
                      (long long)ql_jint(start, "max_steps", resumed));
        resume_words(q, q->resume, b);
        ql_buf_put(b, " --max_steps N");
    } else if (st == QL_OK) {
        ql_buf_printf(b, "done: ");
        run_line(q->name, record, result, b);
        ql_buf_printf(b, "; in %s", ql_jstr(result, "adapter", q->path));
        if (q->against) {
            ql_buf_put(b, "\n");
            verdict(q->against, record, b);
        }
    } else if (st != QL_OK && ql_jstr(result, "checkpoint", NULL)) {
        ql_buf_printf(b, "%s at step %lld; checkpoint %s; go on with ", st == QL_ESTOP ? "stopped" : "ended",
                      (long long)ql_jint(result, "step", 0), ql_jstr(result, "checkpoint", ""));
        resume_words(q, ql_jstr(result, "checkpoint", NULL), b);
    } else if (st == QL_ESTOP && result) {
        ql_buf_printf(b, "stopped before the first step of %s", q->name);
    } else {
        const json_t *all = json_object_get(record, "checkpoints");
        const char *path = ql_jstr(json_array_get(all, json_array_size(all) - 1), "path", q->resume);
        int64_t step = ql_jint(record, "step", 0);
        if (step > 0) ql_buf_printf(b, "ended at step %lld", (long long)step);
        else ql_buf_put(b, "ended before its first step");
        if (path) {
            ql_buf_printf(b, "; last checkpoint %s; go on with ", path);
            resume_words(q, path, b);
        } else if (step > 0) {
            ql_buf_put(b, ", without a checkpoint: --save_steps N writes one every N steps");
        }
    }
}

/* Runs it with a live view; *data: the run's record, also when it was stopped or failed (NULL: it
 * never began). */
static ql_status run_job(const run_request *q, json_t **data)
{
    ql_magics *m = q->m;
    ql_live *live = NULL;
    json_t *result = NULL;
    ql_buf note = {0};
    ql_live_options o = {.host = &m->host,
                         .follow = m->follow,
                         .lines_every = q->every > 0 ? q->every : m->lines_every,
                         .name = q->name,
                         .number = ++m->displays,
                         .steps = q->steps,
                         .before = q->before,
                         .against = q->against};
    json_t *cmd =
        json_pack("{s:s, s:o, s:s}", "cmd", "train", "job", ql_job_json(q->job), "run", q->path);
    ql_status st = cmd ? ql_live_open(&o, &live) : ql_fail(QL_EINVAL, "a run's path must be UTF-8");
    QL_GO(st);
    if (q->resume) json_object_set_new(cmd, "resume", json_string(q->resume));
    if (q->steps > 0) json_object_set_new(cmd, "steps", json_integer(q->steps));
    st = ql_client_command(m->client, cmd, ql_live_event, ql_live_tick, live, &result);
    const char *state = st == QL_OK ? "done" : st == QL_ESTOP ? "stopped" : "failed";
    *data = run_data(q, live, result, state);
    final_note(q, st, result, *data, &note);
    /* The view's last state must not hide why the run ended. */
    ql_status shown = ql_live_finish(live, state, ql_buf_str(&note));
    if (st == QL_OK) st = shown;
    if (st == QL_ESTOP) {
        char why[600]; /* the engine was killed: that comes first; otherwise the note says it all */
        snprintf(why, sizeof why, "%.590s", result ? "" : ql_error());
        ql_error_clear();
        st = ql_fail(QL_ESTOP, "%s%s%s", why, *why ? " " : "", ql_buf_str(&note));
    } else if (st != QL_OK && ql_jint(*data, "step", 0) > 0) { /* what is left of it, and how to go on */
        char why[1500];
        snprintf(why, sizeof why, "%s", ql_error());
        ql_error_clear();
        st = ql_fail(st, "%s\n%s %s", why, q->name, ql_buf_str(&note));
    }
out:
    ql_live_close(live);
    json_decref(cmd);
    json_decref(result);
    ql_buf_free(&note);
    return st;
}

/* The next free runs/run-N, made at once: another notebook in this folder takes the one after it. */
static ql_status claim(ql_magics *m, char *name, size_t size, char **path)
{
    for (int i = 0; i < 1000; i++) {
        QL_TRY(ql_run_next_name(m->runs, name, size));
        QL_TRY(ql_session_folders(m->runs));
        if (asprintf(path, "%s/%s", m->runs, name) < 0) QL_FAIL(QL_ENOMEM, "out of memory");
        if (mkdir(*path, 0777) == 0) return QL_OK;
        ql_status st = errno == EEXIST ? QL_OK : ql_fail(QL_EIO, "%s: %s", *path, strerror(errno));
        free(*path);
        *path = NULL;
        QL_TRY(st);
    }
    QL_FAIL(QL_EIO, "%s: no name of a run is free", m->runs);
}

/* The name and folder of a new run: output_dir, or runs/RUN_NAME, or runs/run-N. */
static ql_status new_run(ql_magics *m, const ql_job *job, char *name, size_t size, char **path)
{
    const char *dir = ql_job_str(job, "output_dir"), *given = ql_job_str(job, "run_name");
    struct stat s;
    if (given && *given) {
        if (strlen(given) >= size || strchr(given, '/'))
            QL_FAIL(QL_EINVAL, "run_name '%.60s' cannot be a folder's name", given);
        snprintf(name, size, "%s", given);
    } else if (dir && *dir) {
        const char *slash = strrchr(dir, '/');
        snprintf(name, size, "%s", slash && slash[1] ? slash + 1 : dir);
    } else {
        return claim(m, name, size, path);
    }
    if ((dir && *dir ? asprintf(path, "%s", dir) : asprintf(path, "%s/%s", m->runs, name)) < 0)
        QL_FAIL(QL_ENOMEM, "out of memory");
    char *events = NULL;
    int used = asprintf(&events, "%s/events.jsonl", *path) > 0 && stat(events, &s) == 0;
    free(events);
    if (!used) return QL_OK;
    ql_status st =
        ql_fail(QL_EINVAL, "%s already holds a run: choose another run_name, or %%qlora resume %s%s%s",
                *path, quote_of(name), name, quote_of(name));
    free(*path);
    *path = NULL;
    return st;
}

static ql_status need_job(const ql_magics *m, const ql_job *job)
{
    QL_TRY(ql_session_need_model(m));
    if (!ql_job_str(job, "data"))
        QL_FAIL(QL_EINVAL, "no data yet: %%qlora data FILE, or a variable's name");
    return ql_job_check(job);
}

/* Runs the request, remembers it as the last run, and answers with it. */
static ql_status run_and_answer(const run_request *q, json_t **out)
{
    json_t *data = NULL;
    ql_status st = run_job(q, &data);
    if (data && (st == QL_OK || ql_jint(data, "step", 0) > 0 || st == QL_ESTOP)) {
        ql_status kept = remember(q->m, q, data);
        if (st == QL_OK) st = kept;
        if (st == QL_OK) *out = json_incref(q->m->last);
    } else {
        json_decref(data);
    }
    return st;
}

ql_status ql_verb_train(ql_magics *m, const ql_call *call, json_t **out)
{
    ql_job *job = NULL;
    char name[128], *path = NULL;
    ql_status st = QL_OK;
    QL_TRY(ql_job_copy(m->job, &job));
    QL_GO(ql_session_apply(m, call, job));
    QL_GO(need_job(m, job));
    QL_GO(new_run(m, job, name, sizeof name, &path));
    run_request q = {.m = m,
                     .job = job,
                     .name = name,
                     .path = path,
                     .every = (int)ql_call_int(call, "every", 0)};
    st = run_and_answer(&q, out);
    if (st != QL_OK) rmdir(path); /* empty: it never began */
out:
    ql_job_free(job);
    free(path);
    return st;
}

/* ---- resume
 * ------------------------------------------------------------------------------------------- */

ql_status ql_verb_resume(ql_magics *m, const ql_call *call, json_t **out)
{
    char *path = NULL, *whole = NULL, *checkpoint = NULL;
    json_t *report = NULL;
    ql_job *job = NULL;
    ql_status st = QL_OK;
    QL_TRY(ql_session_run_path(m, call->n_args ? call->args[0] : NULL, &path));
    if (!(whole = strdup(path))) QL_GO(ql_fail(QL_ENOMEM, "out of memory"));
    ql_session_cut_checkpoint(path);
    QL_GO(ql_run_report(path, &report));
    QL_GO(ql_run_checkpoint(whole, &checkpoint));
    QL_GO(ql_session_run_job(m, path, &job));
    QL_GO(ql_session_apply(m, call, job));
    QL_GO(ql_job_check(job));
    warn_beyond(m, path, checkpoint);
    run_request q = {.m = m,
                     .job = job,
                     .name = base_of(path),
                     .path = path,
                     .resume = checkpoint,
                     .every = (int)ql_call_int(call, "every", 0),
                     .before = json_object_get(report, "log_history")};
    st = run_and_answer(&q, out);
out:
    ql_job_free(job);
    json_decref(report);
    free(path);
    free(whole);
    free(checkpoint);
    return st;
}

/* ---- baseline
 * ----------------------------------------------------------------------------------------- */

/* The same samples per step on one device: its share of micro-batches is everybody's. */
static ql_status one_device(ql_job *job, const json_t *start)
{
    const char *devices = ql_job_str(job, "devices");
    int64_t world = ql_jint(start, "world", 1);
    int64_t g = ql_job_int(job, "gradient_accumulation_steps");
    if (world > 1 && g > INT64_MAX / world)
        QL_FAIL(QL_EINVAL, "gradient_accumulation_steps %lld is too large", (long long)g);
    /* "auto" was the processor where there was no GPU. */
    int cpu = strcmp(ql_jstr(start, "backend", ""), "cpu") == 0 || (devices && strncmp(devices, "cpu", 3) == 0) || ql_job_bool(job, "use_cpu");
    const char *one = cpu ? "cpu" : "0";
    char first[16] = "";
    /* "2,3" or "cuda:2,3": the first of those the run had. */
    if (!cpu && devices) {
        const char *p = strncmp(devices, "cuda:", 5) == 0 ? devices + 5 : devices;
        size_t n = strspn(p, "0123456789");
        if (n > 0 && n < sizeof first)
            snprintf(first, sizeof first, "%.*s", (int)n, p), one = first;
    }
    json_t *v = json_integer(g * (world > 0 ? world : 1)), *d = json_string(one);
    ql_status st = ql_job_set(job, "gradient_accumulation_steps", v);
    if (st == QL_OK) st = ql_job_set(job, "devices", d);
    if (st == QL_OK) st = ql_job_set(job, "use_cpu", json_null());
    if (st == QL_OK) st = ql_job_set_text(job, "fsdp", "false");
    if (st == QL_OK) st = ql_job_set(job, "store", json_null());
    if (st == QL_OK) st = ql_job_set_text(job, "pipeline", "off");
    if (st == QL_OK) st = ql_job_set(job, "run_name", json_null());
    if (st == QL_OK) st = ql_job_set(job, "output_dir", json_null());
    json_decref(v);
    json_decref(d);
    return st;
}

/* A free name: run-1-baseline, run-1-baseline-2 … */
static ql_status baseline_name(ql_magics *m, const char *of, char *name, size_t size, char **path)
{
    struct stat s;
    int fit = (int)strnlen(of, 80);
    while (fit > 0 && ((unsigned char)of[fit] & 0xc0) == 0x80) fit--; /* half a character is no UTF-8 */
    for (int i = 1; i < 1000; i++) {
        if (i == 1)
            snprintf(name, size, "%.*s-baseline", fit, of);
        else
            snprintf(name, size, "%.*s-baseline-%d", fit, of, i);
        if (asprintf(path, "%s/%s", m->runs, name) < 0) QL_FAIL(QL_ENOMEM, "out of memory");
        if (stat(*path, &s) < 0) return QL_OK;
        free(*path);
        *path = NULL;
    }
    QL_FAIL(QL_EINVAL, "there are 1,000 baselines of %s already", of);
}

static ql_status baseline_answer(const run_request *q, const json_t *report, json_t *data,
                                 json_t **out)
{
    int64_t shared, same;
    double worst;
    ql_buf b = {0};
    compare(json_object_get(report, "history"), json_object_get(data, "history"), &shared, &same,
            &worst);
    verdict(report, data, &b);
    json_object_set_new(data, "baseline",
                        json_pack("{s:O, s:I, s:I, s:f, s:o}", "of",
                                  json_object_get(report, "name"), "shared", (json_int_t)shared,
                                  "same", (json_int_t)same, "worst", worst, "verdict",
                                  ql_buf_json(&b)));
    ql_buf_clear(&b);
    ql_buf_printf(&b, "%s: ", q->name);
    verdict(report, data, &b);
    ql_status st = ql_result("run", ql_buf_str(&b), json_incref(data), NULL, out);
    ql_buf_free(&b);
    return st;
}

/* The steps that the baseline will do, so that both curves end together. */
static void cut_history(json_t *report, int64_t steps)
{
    json_t *kept = json_array(), *r;
    size_t i;
    json_array_foreach(json_object_get(report, "history"), i, r) if (ql_jint(r, "step", 0) <= steps)
        json_array_append(kept, r);
    json_object_set_new(report, "history", kept);
}

ql_status ql_verb_baseline(ql_magics *m, const ql_call *call, json_t **out)
{
    json_t *report = NULL, *data = NULL;
    ql_job *job = NULL;
    char name[128], line[300], *path = NULL, *theirs = NULL;
    ql_status st = QL_OK;
    const char *of = call->n_args ? call->args[0] : NULL;
    if (ql_call_int(call, "steps", 20) < 1) QL_FAIL(QL_EINVAL, "--steps takes a whole number from 1 on");
    QL_TRY(ql_session_run_path(m, of, &theirs));
    ql_session_cut_checkpoint(theirs); /* how many devices it had stands in the run's record alone */
    QL_GO(ql_session_run_report(m, theirs, &report));
    QL_GO(ql_session_run_job(m, theirs, &job));
    QL_GO(one_device(job, json_object_get(report, "start")));
    QL_GO(baseline_name(m, ql_jstr(report, "name", "run"), name, sizeof name, &path));
    snprintf(line, sizeof line,
             "baseline: one device, gradient_accumulation_steps %lld: the same samples a step\n",
             (long long)ql_job_int(job, "gradient_accumulation_steps"));
    m->host.print(m->host.self, line);
    cut_history(report, ql_call_int(call, "steps", 20));
    run_request q = {.m = m,
                     .job = job,
                     .name = name,
                     .path = path,
                     .steps = ql_call_int(call, "steps", 20),
                     .against = report};
    st = run_job(&q, &data);
    if (st == QL_OK) st = baseline_answer(&q, report, data, out);
out:
    ql_job_free(job);
    json_decref(report);
    json_decref(data);
    free(path);
    free(theirs);
    return st;
}
