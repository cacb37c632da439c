#include "magics/live.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { ROWS_LIVE = 8, ROWS_FINAL = 16, UPDATE_MS = 500, CURVE_MS = 1000 };

struct ql_live {
    ql_live_options o;
    json_t *history, *memory, *start, *checkpoints, *warnings;
    json_t *progress; /* the last progress event, NULL: none or over */
    char state[200];  /* "training", "placing weights" */
    char bar_id[40], curve_id[40];
    int bar_shown, curve_shown, dirty, curve_dirty, steps_here, final;
    int64_t opened, bar_at, curve_at, curve_cost; /* ms */
    double rate;                                  /* steps per second, over the last steps */
    double recent[20];                            /* engine times of the last steps, a ring */
    int64_t step, max_steps;
    const char *how, *note;
};

static int64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static const char *same(const json_t *o, const char *key)
{
    return ql_jstr(o, key, "");
}

/* ---- one line of words and numbers
 * ---------------------------------------------------------------- */

static void bar_words(const ql_live *l, ql_buf *b)
{
    double elapsed = (double)(now_ms() - l->opened) / 1000.0,
           epochs = ql_jnum(l->start, "epochs", (double)NAN);
    const json_t *last = NULL;
    for (size_t i = json_array_size(l->history); i-- > 0 && !json_object_get(last, "epoch");)
        last = json_array_get(l->history, i);
    if (l->max_steps <= 0) return;
    ql_buf_printf(b, "%lld/%lld  %s", (long long)l->step, (long long)l->max_steps,
                  ql_fmt_time(elapsed).s);
    if (!l->final && l->rate > 0)
        ql_buf_printf(b, " < %s", ql_fmt_time((double)(l->max_steps - l->step) / l->rate).s);
    if (l->rate >= 1)
        ql_buf_printf(b, ", %.2f it/s", l->rate);
    else if (l->rate > 0)
        ql_buf_printf(b, ", %.2f s/it", 1 / l->rate);
    double epoch = ql_jnum(last, "epoch", (double)NAN);
    if (isfinite(epoch) && isfinite(epochs) && epochs >= 0.1)
        ql_buf_printf(b, ", epoch %.2f/%s", epoch, ql_fmt_num(epochs, 3).s);
    else if (isfinite(epoch) && isfinite(epochs)) /* few steps of much data */
        ql_buf_printf(b, ", %.3g of %.3g %% of an epoch", 100 * epoch, 100 * epochs);
}

static void progress_words(const ql_live *l, ql_buf *b)
{
    double done = ql_jnum(l->progress, "done", 0), total = ql_jnum(l->progress, "total", 0);
    if (total > 1 << 20)
        ql_buf_printf(b, "%s of %s", ql_fmt_bytes(done).s, ql_fmt_bytes(total).s);
    else
        ql_buf_printf(b, "%.0f of %.0f", done, total);
    double elapsed = (double)(now_ms() - l->opened) / 1000.0;
    if (done > 0 && total > done && elapsed > 1)
        ql_buf_printf(b, ", %s left", ql_fmt_time(elapsed * (total - done) / done).s);
}

static void title(const ql_live *l, ql_view *v)
{
    ql_buf b = {0};
    int64_t world = ql_jint(l->start, "world", 0);
    ql_buf_put(&b, l->how ? l->how : l->state);
    const json_t *d = json_array_get(json_object_get(l->start, "devices"), 0);
    if (world > 0)
        ql_buf_printf(&b, " · %lld × %s", (long long)world,
                      ql_jstr(d, "name", ql_jstr(l->start, "backend", "device")));
    static const char *const keys[] = {"dtype", "store", "schedule"};
    for (int i = 0; i < 3; i++)
        if (*same(l->start, keys[i])) ql_buf_printf(&b, " · %s", same(l->start, keys[i]));
    if (ql_jint(l->start, "resumed", 0) > 0)
        ql_buf_printf(&b, " · from step %lld", (long long)ql_jint(l->start, "resumed", 0));
    ql_view_title(v, *l->o.name ? l->o.name : "qlora", "%s", ql_buf_str(&b));
    ql_buf_free(&b);
}

static void bar(const ql_live *l, ql_view *v)
{
    ql_buf words = {0};
    double value = (double)l->step, max = (double)l->max_steps;
    if (l->progress) {
        value = ql_jnum(l->progress, "done", 0), max = ql_jnum(l->progress, "total", 0);
        progress_words(l, &words);
    } else {
        bar_words(l, &words);
    }
    if (max > 0) {
        int cells = (int)lround(fmax(0, fmin(1, value / max)) * 24);
        ql_buf_put(&v->text, "[");
        for (int i = 0; i < 24; i++) ql_buf_put(&v->text, i < cells ? "█" : "·");
        ql_buf_printf(&v->text, "] %s\n", ql_buf_str(&words));
        ql_buf_printf(&v->html,
                      "<div style=\"margin:4px 0\"><progress value=\"%.0f\" max=\"%.0f\" "
                      "style=\"width:300px;height:18px;"
                      "vertical-align:middle\"></progress> &nbsp;",
                      value, max);
        ql_buf_html(&v->html, ql_buf_str(&words));
        ql_buf_put(&v->html, "</div>\n");
    }
    ql_buf_free(&words);
}

/* ---- the table
 * -------------------------------------------------------------------------------------- */

static void row(ql_table *t, const json_t *r, double eval)
{
    int skipped = json_is_true(json_object_get(r, "skipped"));
    ql_table_cell(t, "%lld", (long long)ql_jint(r, "step", 0));
    if (skipped)
        ql_table_cell2(t, "skipped",
                       "<i title=\"fp16 gradients overflowed: no update, the loss scale is "
                       "halved\">skipped</i>");
    else
        ql_table_cell(t, isfinite(ql_jnum(r, "loss", (double)NAN)) ? "%.4f" : "-",
                      ql_jnum(r, "loss", 0));
    if (isfinite(eval))
        ql_table_cell(t, "%.4f", eval);
    else
        ql_table_cell(t, "%s", "");
    ql_table_cell(t, "%s", ql_fmt_num(ql_jnum(r, "learning_rate", (double)NAN), 3).s);
    ql_table_cell(t, "%s", ql_fmt_num(ql_jnum(r, "grad_norm", (double)NAN), 3).s);
    ql_table_cell(t, "%s", ql_fmt_count(ql_jnum(r, "tokens_per_second", (double)NAN)).s);
}

static double eval_at(const json_t *history, size_t from, double step)
{
    const json_t *r;
    for (size_t i = from; (r = json_array_get(history, i)) && ql_jnum(r, "step", 0) <= step; i++)
        if (json_object_get(r, "eval_loss")) return ql_jnum(r, "eval_loss", (double)NAN);
    return (double)NAN;
}

static int evaluated(const ql_live *l, size_t at)
{
    double step = ql_jnum(json_array_get(l->history, at), "step", 0);
    return isfinite(eval_at(l->history, at, step));
}

/* The last ones, and the last evaluation even where it is older: the table keeps its height. */
static size_t live_rows(const ql_live *l, size_t *at, size_t n)
{
    size_t from = n > ROWS_LIVE ? n - ROWS_LIVE : 0, last = n;
    while (last > 0 && !evaluated(l, at[last - 1])) last--;
    size_t seen = last > 0 ? at[last - 1] : 0;
    memmove(at, at + from, (n - from) * sizeof *at);
    if (last > 0 && last <= from) at[0] = seen;
    return n - from;
}

/* Which of n steps are rows. In the end round numbers over the whole run and its evaluations, of
 * many some, so that a saved notebook tells the whole story. Returns how many, their places in at[]. */
static size_t choose_rows(const ql_live *l, size_t *at, size_t n)
{
    static const int64_t every[] = {1,   2,   5,    10,   20,   25,    50,     100,    200,
                                    250, 500, 1000, 2000, 5000, 10000, 100000, 1000000};
    size_t k = 0, rows = 0, evals = 0, left = 0;
    if (!l->final) return live_rows(l, at, n);
    if (n <= ROWS_FINAL) return n;
    while (k + 1 < sizeof every / sizeof *every && n / (size_t)every[k] > ROWS_FINAL - 2) k++;
    for (size_t i = 0; i < n; i++) evals += (size_t)evaluated(l, at[i]);
    left = evals;
    for (size_t i = 0; i < n; i++) {
        int64_t step = ql_jint(json_array_get(l->history, at[i]), "step", 0);
        int eval = evaluated(l, at[i]) && --left % (evals / ROWS_FINAL + 1) == 0;
        if (i == 0 || i + 1 == n || eval || (step % every[k] == 0 && step > every[k] / 4))
            at[rows++] = at[i];
    }
    return rows;
}

static void table(const ql_live *l, ql_view *v)
{
    size_t n = json_array_size(l->history), steps = 0;
    size_t *at = calloc(n + 1, sizeof *at);
    if (!at) return;
    for (size_t i = 0; i < n; i++)
        if (!json_object_get(json_array_get(l->history, i), "eval_loss")) at[steps++] = i;
    size_t rows = choose_rows(l, at, steps);
    ql_buf names = {0};
    ql_table t;
    ql_table_begin(&t, "step>|loss>|eval>|lr>|grad norm>|tokens/s>", &names);
    for (size_t k = 0; k < rows; k++) {
        const json_t *r = json_array_get(l->history, at[k]);
        row(&t, r, eval_at(l->history, at[k], ql_jnum(r, "step", 0)));
    }
    if (rows > 0) ql_table_end(v, &t);
    ql_buf_free(&names);
    free(at);
}

/* The most that was ever in use on device `i`: never under what is in use now. */
static double most_used(const ql_live *l, size_t i)
{
    const json_t *at;
    size_t k;
    double most = 0;
    json_array_foreach((json_t *)l->memory, k, at)
    {
        const json_t *d = json_array_get(json_object_get(at, "devices"), i);
        most = fmax(most, ql_jnum(d, "used", ql_jnum(d, "arena", 0)));
    }
    return most;
}

static void meters(const ql_live *l, ql_view *v)
{
    const json_t *devices = json_object_get(
                     json_array_get(l->memory, json_array_size(l->memory) - 1), "devices"),
                 *d;
    size_t i;
    if (json_array_size(devices) == 0) return;
    ql_buf names = {0};
    ql_table t;
    ql_table_begin(&t, "|||", &names);
    json_array_foreach((json_t *)devices, i, d)
    {
        double used = ql_jnum(d, "used", ql_jnum(d, "arena", 0)), total = ql_jnum(d, "total", 0);
        ql_buf text = {0}, html = {0};
        int cells = total > 0 ? (int)lround(fmin(1, used / total) * 16) : 0;
        for (int k = 0; k < 16 && total > 0; k++) ql_buf_put(&text, k < cells ? "█" : "·");
        ql_buf_printf(&html,
                      "<meter min=\"0\" max=\"%.3f\" high=\"%.3f\" value=\"%.3f\" "
                      "style=\"width:160px;height:14px;vertical-align:middle\">"
                      "</meter>",
                      total / 1e9, total * 0.93 / 1e9, used / 1e9);
        ql_table_cell(&t, "%lld: %.28s", (long long)ql_jint(d, "rank", (int64_t)i),
                      ql_jstr(d, "name", "device"));
        ql_table_cell2(&t, ql_buf_str(&text), total > 0 ? ql_buf_str(&html) : "");
        if (total > 0)
            ql_table_cell(&t, "%s / %s", ql_fmt_bytes(used).s, ql_fmt_bytes(total).s);
        else
            ql_table_cell(&t, "%s", ql_fmt_bytes(used).s);
        double degrees = ql_jnum(d, "temperature", (double)NAN),
               watts = ql_jnum(d, "power", (double)NAN);
        ql_buf_clear(&text);
        ql_buf_printf(&text, "peak %s", ql_fmt_bytes(most_used(l, i)).s);
        if (degrees >= 0) ql_buf_printf(&text, ", %.0f °C", degrees);
        if (watts >= 0) ql_buf_printf(&text, ", %.0f W", watts);
        ql_table_cell(&t, "%s", ql_buf_str(&text));
        ql_buf_free(&text);
        ql_buf_free(&html);
    }
    ql_table_end(v, &t);
    ql_buf_free(&names);
}

/* ---- showing
 * ---------------------------------------------------------------------------------------- */

static json_t *final_data(const ql_live *l)
{
    json_t *d =
        json_pack("{s:s, s:I, s:I, s:s}", "kind", "training", "step", (json_int_t)l->step,
                  "max_steps", (json_int_t)l->max_steps, "state", l->how ? l->how : l->state);
    json_object_set_new(d, "name", ql_text_json(l->o.name, strlen(l->o.name)));
    /* The whole history only once, when it is final: live updates stay small. */
    if (l->final) {
        json_object_set(d, "history", l->history);
        if (json_array_size(l->memory) > 0)
            json_object_set(d, "memory", json_array_get(l->memory, json_array_size(l->memory) - 1));
    }
    return d;
}

static ql_status show_bar(ql_live *l)
{
    ql_view v = {0};
    const json_t *text;
    size_t i;
    title(l, &v);
    bar(l, &v);
    table(l, &v);
    meters(l, &v);
    json_array_foreach(json_object_get(l->start, "text"), i,
                       text) if (i < 4 && json_is_string(text))
        ql_view_note(&v, "%s", json_string_value(text));
    json_array_foreach(l->warnings, i, text) if (i < 6) ql_view_warn(&v, json_string_value(text));
    if (l->note) {
        /* The first line says how it went; a second one is a verdict, and must be seen. */
        const char *verdict = strchr(l->note, '\n');
        ql_view_note(&v, "%.*s", verdict ? (int)(verdict - l->note) : (int)strlen(l->note),
                     l->note);
        if (verdict) ql_view_title(&v, verdict + 1, "%s", "");
    }
    json_t *data = final_data(l), *bundle = ql_view_bundle(&v, data);
    ql_status st = l->o.host->show(l->o.host->self, bundle, l->bar_id,
                                   l->bar_shown ? QL_SHOW_UPDATE : QL_SHOW_NEW);
    json_decref(bundle);
    json_decref(data);
    l->bar_shown = 1;
    l->dirty = 0;
    l->bar_at = now_ms();
    return st;
}

static ql_status show_curve(ql_live *l)
{
    int64_t from = now_ms();
    int pair = l->o.against != NULL;
    json_t *me = json_pack("{s:o, s:O}", "name", ql_text_json(l->o.name, strlen(l->o.name)),
                           "history", l->history),
           *bundle = NULL;
    json_t *runs = pair ? json_pack("[O, o]", l->o.against, me) : json_pack("[o]", me);
    json_t *chart = ql_chart_runs(runs, "loss", pair);
    json_object_set_new(chart, "xmin", json_real(1));
    if (l->max_steps > 1) json_object_set_new(chart, "xmax", json_real((double)l->max_steps));
    ql_status st = ql_chart_bundle(l->o.host, chart, NULL, &bundle);
    if (st == QL_OK)
        st = l->o.host->show(l->o.host->self, bundle, l->curve_id,
                             l->curve_shown ? QL_SHOW_UPDATE : QL_SHOW_NEW);
    json_decref(bundle);
    json_decref(chart);
    json_decref(runs);
    l->curve_shown = 1;
    l->curve_dirty = 0;
    l->curve_at = now_ms();
    l->curve_cost = l->curve_at - from;
    return st;
}

/* At most two updates a second; the curve once a second and never more than a tenth of the time. */
static ql_status refresh(ql_live *l)
{
    int64_t t = now_ms();
    if (l->o.follow == QL_FOLLOW_LINES) return QL_OK;
    if ((l->dirty || t - l->bar_at >= 1000) && t - l->bar_at >= UPDATE_MS &&
        t - l->opened >= UPDATE_MS / 2)
        QL_TRY(show_bar(l));
    if (l->curve_dirty && l->bar_shown && t - l->curve_at >= CURVE_MS &&
        t - l->curve_at >= 9 * l->curve_cost)
        QL_TRY(show_curve(l));
    return QL_OK;
}

/* ---- plain lines
 * -------------------------------------------------------------------------------------- */

static void say(const ql_live *l, const char *fmt, ...) QL_PRINTF(2, 3);
static void say(const ql_live *l, const char *fmt, ...)
{
    char line[1000];
    ql_buf b = {0};
    va_list ap;
    if (l->o.follow == QL_FOLLOW_DISPLAY) return;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    ql_view_wrap(&b, line, QL_VIEW_COLUMNS, 2);
    ql_buf_put(&b, "\n");
    l->o.host->print(l->o.host->self, ql_buf_str(&b));
    ql_buf_free(&b);
}

static int64_t lines_every(const ql_live *l)
{
    static const int64_t nice[] = {1, 2, 5, 10, 20, 50, 100, 200, 500, 1000};
    if (l->o.lines_every > 0) return l->o.lines_every;
    for (size_t i = 0; i < sizeof nice / sizeof *nice; i++)
        if (l->max_steps <= nice[i] * 25) return nice[i];
    return 1000;
}

static void say_step(const ql_live *l, const json_t *r)
{
    int width = snprintf(NULL, 0, "%lld", (long long)l->max_steps),
        skipped = json_is_true(json_object_get(r, "skipped"));
    double left = l->rate > 0 ? (double)(l->max_steps - l->step) / l->rate : (double)NAN;
    char loss[24];
    if (l->step % lines_every(l) != 0 && l->step != 1 && l->step != l->max_steps && !skipped)
        return;
    snprintf(loss, sizeof loss, isfinite(ql_jnum(r, "loss", (double)NAN)) ? "%.4f" : "-",
             ql_jnum(r, "loss", 0));
    say(l, "step %*lld/%lld  loss %-6s  lr %-7s  grad %-6s  %6s tok/s%s%s%s", width, (long long)l->step,
        (long long)l->max_steps, skipped ? "skipped" : loss,
        ql_fmt_num(ql_jnum(r, "learning_rate", (double)NAN), 3).s,
        ql_fmt_num(ql_jnum(r, "grad_norm", (double)NAN), 3).s,
        ql_fmt_count(ql_jnum(r, "tokens_per_second", (double)NAN)).s, isfinite(left) ? "  " : "",
        isfinite(left) ? ql_fmt_time(left).s : "", isfinite(left) ? " left" : "");
}

/* ---- events
 * ------------------------------------------------------------------------------------------- */

/* A record is its event without the envelope. */
static json_t *record(const json_t *event)
{
    json_t *r = json_copy((json_t *)event);
    json_object_del(r, "ev");
    json_object_del(r, "id");
    return r;
}

static void on_step(ql_live *l, const json_t *ev)
{
    int size = (int)(sizeof l->recent / sizeof *l->recent);
    double t = ql_jnum(ev, "t", (double)now_ms() / 1000.0);
    json_array_append_new(l->history, record(ev));
    l->step = ql_jint(ev, "step", l->step + 1);
    if (l->steps_here > 0) {
        int back = l->steps_here < size ? l->steps_here : size;
        double first = l->recent[(l->steps_here - back) % size];
        l->rate = t > first ? back / (t - first) : l->rate;
    }
    l->recent[l->steps_here++ % size] = t;
    l->dirty = l->curve_dirty = 1;
    say_step(l, ev);
}

static void on_start(ql_live *l, const json_t *ev)
{
    json_decref(l->start);
    l->start = record(ev);
    l->max_steps = ql_jint(ev, "max_steps", 0);
    if (l->o.steps > 0 && l->o.steps < l->max_steps) l->max_steps = l->o.steps;
    l->step = ql_jint(ev, "resumed", 0);
    if (l->o.before && json_array_size(l->history) == 0) {
        size_t i;
        const json_t *r;
        json_array_foreach((json_t *)l->o.before, i, r) if (ql_jint(r, "step", 0) <= l->step &&
                                                            !json_object_get(r, "train_runtime"))
            json_array_append(l->history, (json_t *)r);
        l->curve_dirty = json_array_size(l->history) > 0;
    }
    json_decref(l->progress);
    l->progress = NULL;
    l->dirty = 1;
    size_t i;
    const json_t *text;
    say(l, "%s: %lld step%s on %lld × %s%s%s%s%s", *l->o.name ? l->o.name : "run",
        (long long)l->max_steps, l->max_steps == 1 ? "" : "s", (long long)ql_jint(ev, "world", 1),
        ql_jstr(ev, "backend", "device"), *same(ev, "dtype") ? ", " : "", same(ev, "dtype"),
        *same(ev, "store") ? ", " : "", same(ev, "store"));
    json_array_foreach(json_object_get(ev, "text"), i, text) if (json_is_string(text))
        say(l, "  %.300s", json_string_value(text));
}

static void on_state(ql_live *l, const json_t *ev)
{
    const char *text = same(ev, "text");
    snprintf(l->state, sizeof l->state, "%.190s", *text ? text : same(ev, "state"));
    json_decref(l->progress);
    l->progress = NULL;
    l->dirty = 1;
    if (strcmp(same(ev, "state"), "training") != 0) say(l, "%s", l->state);
}

static void on_other(ql_live *l, const char *kind, const json_t *ev)
{
    if (strcmp(kind, "progress") == 0) {
        json_decref(l->progress);
        l->progress = ql_jnum(ev, "done", 0) < ql_jnum(ev, "total", 0) ? record(ev) : NULL;
        l->dirty = 1;
    } else if (strcmp(kind, "eval") == 0) {
        json_array_append_new(l->history, record(ev));
        l->dirty = l->curve_dirty = 1;
        say(l, "  eval_loss %.4f at step %lld", ql_jnum(ev, "eval_loss", (double)NAN),
            (long long)ql_jint(ev, "step", l->step));
    } else if (strcmp(kind, "memory") == 0) {
        json_array_append_new(l->memory, record(ev));
        l->dirty = 1;
    } else if (strcmp(kind, "checkpoint") == 0) {
        json_array_append_new(l->checkpoints, record(ev));
        say(l, "  checkpoint %s", same(ev, "path"));
    } else if (strcmp(kind, "log") == 0 && strcmp(same(ev, "level"), "warning") == 0) {
        if (json_array_size(l->warnings) < 100)
            json_array_append_new(l->warnings, json_string(same(ev, "text")));
        say(l, "! %.300s", same(ev, "text"));
        l->dirty = 1;
    } else if (strcmp(kind, "log") == 0) {
        say(l, "%.300s", same(ev, "text"));
    }
}

ql_status ql_live_event(void *live, const json_t *event)
{
    ql_live *l = live;
    const char *kind = same(event, "ev");
    if (l->o.host->event) QL_TRY(l->o.host->event(l->o.host->self, event));
    if (strcmp(kind, "step") == 0)
        on_step(l, event);
    else if (strcmp(kind, "start") == 0)
        on_start(l, event);
    else if (strcmp(kind, "state") == 0)
        on_state(l, event);
    else
        on_other(l, kind, event);
    return refresh(l);
}

void ql_live_tick(void *live)
{
    ql_live *l = live;
    if (refresh(l) != QL_OK)
        ql_error_clear(); /* the next event meets the same failure and reports it */
}

/* ---- life
 * -----------------------------------------------------------------------------------------------
 */

ql_status ql_live_open(const ql_live_options *options, ql_live **out)
{
    ql_live *l = calloc(1, sizeof *l);
    if (!l) QL_FAIL(QL_ENOMEM, "out of memory");
    l->o = *options;
    l->history = json_array();
    l->memory = json_array();
    l->start = json_object();
    l->checkpoints = json_array();
    l->warnings = json_array();
    l->opened = now_ms();
    snprintf(l->state, sizeof l->state, "starting");
    /* Unique over kernels and reruns: an update must never reach another cell's output. */
    snprintf(l->bar_id, sizeof l->bar_id, "qlora-%llx-%d-bar", (unsigned long long)l->opened,
             l->o.number);
    snprintf(l->curve_id, sizeof l->curve_id, "qlora-%llx-%d-curve", (unsigned long long)l->opened,
             l->o.number);
    *out = l;
    return QL_OK;
}

ql_status ql_live_finish(ql_live *l, const char *how, const char *note)
{
    l->final = 1;
    l->how = how;
    l->note = note;
    json_decref(l->progress);
    l->progress = NULL;
    ql_status st = QL_OK;
    /* An answer without a curve stands alone: "done" above it would say nothing. */
    int quiet = !note && strcmp(how, "done") == 0 && json_array_size(l->history) + json_array_size(l->warnings) == 0;
    if (quiet && l->bar_shown) {
        ql_view v = {0};
        json_t *bundle = ql_view_bundle(&v, NULL);
        st = l->o.host->show(l->o.host->self, bundle, l->bar_id, QL_SHOW_UPDATE);
        json_decref(bundle);
    } else if (l->o.follow != QL_FOLLOW_LINES && (l->bar_shown || json_array_size(l->history) > 0)) {
        st = show_bar(l);
        if (st == QL_OK && json_array_size(l->history) > 0) st = show_curve(l);
    }
    if (note) say(l, "%.900s", note);
    l->how = l->note = NULL;
    return st;
}

void ql_live_close(ql_live *l)
{
    if (!l) return;
    json_decref(l->history);
    json_decref(l->memory);
    json_decref(l->start);
    json_decref(l->checkpoints);
    json_decref(l->warnings);
    json_decref(l->progress);
    free(l);
}

json_t *ql_live_record(const ql_live *l)
{
    return json_pack("{s:O, s:O, s:O, s:O, s:O, s:I}", "history", l->history, "memory", l->memory,
                     "start", l->start, "checkpoints", l->checkpoints, "warnings", l->warnings,
                     "step", (json_int_t)l->step);
}
