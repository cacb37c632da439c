/* Charts as data: which curves, in which panels. view_svg.c and the Python host draw them. */
#include "magics/view.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SMOOTH_FROM = 80, POINTS_MAX = 1200, WIDTH = 720 };

typedef struct {
    double *x, *y;
    int n;
} points;

static void points_free(points *p)
{
    free(p->x);
    free(p->y);
    memset(p, 0, sizeof *p);
}

typedef enum { HOLES, VALUES } skipped_steps;

/* The records of a history that have `key`, in their order; a skipped step is a hole, or its value.
 */
static points points_of(const json_t *history, const char *key, skipped_steps skipped)
{
    points p = {0};
    size_t i, n = json_array_size(history);
    const json_t *r;
    p.x = calloc(n + 1, sizeof *p.x);
    p.y = calloc(n + 1, sizeof *p.y);
    if (!p.x || !p.y) return points_free(&p), p;
    json_array_foreach((json_t *)history, i, r)
    {
        const json_t *v = json_object_get(r, key);
        if (!v || !json_is_number(json_object_get(r, "step"))) continue;
        p.x[p.n] = ql_jnum(r, "step", 0);
        p.y[p.n++] =
            json_is_number(v) && (skipped == VALUES || !json_is_true(json_object_get(r, "skipped")))
                ? json_number_value(v)
                : (double)NAN;
    }
    return p;
}

/* A centred mean (no lag behind the curve), narrower at the ends; holes are left out of it. */
static points smoothed(const points *p)
{
    points s = {0};
    int half = p->n / 100 > 3 ? p->n / 100 : 3;
    double sum = 0;
    int count = 0, from = 0, to = 0; /* of [from, to) */
    s.x = calloc((size_t)p->n + 1, sizeof *s.x);
    s.y = calloc((size_t)p->n + 1, sizeof *s.y);
    if (!s.x || !s.y) return points_free(&s), s;
    for (int i = 0; i < p->n; i++) {
        int h = half < i ? half : i;
        if (h > p->n - 1 - i) h = p->n - 1 - i;
        for (; to < i + h + 1; to++)
            if (isfinite(p->y[to])) sum += p->y[to], count++;
        for (; to > i + h + 1; to--)
            if (isfinite(p->y[to - 1])) sum -= p->y[to - 1], count--;
        for (; from < i - h; from++)
            if (isfinite(p->y[from])) sum -= p->y[from], count--;
        s.x[i] = p->x[i];
        s.y[i] = count ? sum / count : (double)NAN;
    }
    s.n = p->n;
    return s;
}

/* Long curves keep the lowest and the highest point of each stretch, so that no spike is lost. */
static points thinned(const points *p)
{
    points t = {0};
    int stretches = POINTS_MAX / 2;
    t.x = calloc((size_t)(p->n < POINTS_MAX ? p->n : POINTS_MAX) + 2, sizeof *t.x);
    t.y = calloc((size_t)(p->n < POINTS_MAX ? p->n : POINTS_MAX) + 2, sizeof *t.y);
    if (!t.x || !t.y) return points_free(&t), t;
    for (int s = 0; p->n > POINTS_MAX && s < stretches; s++) {
        int from = (int)((int64_t)s * p->n / stretches),
            to = (int)((int64_t)(s + 1) * p->n / stretches);
        int lo = from, hi = from;
        for (int i = from; i < to; i++) {
            if (!isfinite(p->y[lo]) || p->y[i] < p->y[lo]) lo = i;
            if (!isfinite(p->y[hi]) || p->y[i] > p->y[hi]) hi = i;
        }
        int a = lo < hi ? lo : hi, b = lo < hi ? hi : lo;
        t.x[t.n] = p->x[a], t.y[t.n++] = p->y[a];
        if (b != a) t.x[t.n] = p->x[b], t.y[t.n++] = p->y[b];
    }
    for (int i = 0; p->n <= POINTS_MAX && i < p->n; i++) t.x[t.n] = p->x[i], t.y[t.n++] = p->y[i];
    return t;
}

static json_t *real(double v)
{
    return isfinite(v) ? json_real(v) : json_null();
}

static void add_series(json_t *panel, const char *name, const points *p, const char *colour,
                       const char *kind)
{
    points t = thinned(p);
    json_t *x = json_array(), *y = json_array();
    for (int i = 0; i < t.n; i++) {
        json_array_append_new(x, real(t.x[i]));
        json_array_append_new(y, real(t.y[i]));
    }
    json_array_append_new(json_object_get(panel, "series"),
                          json_pack("{s:s, s:o, s:o, s:s, s:s}", "name", name, "x", x, "y", y,
                                    "colour", colour, "kind", kind));
    points_free(&t);
}

static json_t *new_panel(json_t *chart, const char *ylabel, double weight)
{
    json_t *p = json_pack("{s:s, s:f, s:[]}", "ylabel", ylabel, "weight", weight, "series");
    json_array_append_new(json_object_get(chart, "panels"), p);
    return p;
}

static json_t *new_chart(const char *title, const char *xlabel, int height)
{
    return json_pack("{s:s, s:s, s:i, s:i, s:[]}", "title", title, "xlabel", xlabel, "width",
                     (int)WIDTH, "height", height, "panels");
}

static const char *metric_label(const char *metric)
{
    if (strcmp(metric, "grad_norm") == 0) return "gradient norm";
    if (strcmp(metric, "learning_rate") == 0) return "learning rate";
    if (strcmp(metric, "tokens_per_second") == 0) return "tokens per second";
    return metric;
}

/* fp16 steps whose gradients overflowed: crosses on the last loss before them. */
static void add_skipped(json_t *panel, const json_t *history, const char *metric)
{
    points p = points_of(history, metric, HOLES), s = {0};
    const json_t *r;
    size_t i;
    double level = (double)NAN;
    s.x = calloc((size_t)p.n + 1, sizeof *s.x);
    s.y = calloc((size_t)p.n + 1, sizeof *s.y);
    for (int k = 0; k < p.n && !isfinite(level); k++) level = p.y[k];
    json_array_foreach((json_t *)history, i, r)
    {
        if (!s.x || !s.y || s.n >= p.n) break;
        if (json_is_true(json_object_get(r, "skipped"))) {
            s.x[s.n] = ql_jnum(r, "step", 0);
            s.y[s.n++] = isfinite(level) ? level : 0;
        } else if (isfinite(ql_jnum(r, metric, (double)NAN))) {
            level = ql_jnum(r, metric, 0);
        }
    }
    if (s.n > 0) add_series(panel, "skipped", &s, "#8c98a5", "cross");
    points_free(&p);
    points_free(&s);
}

/* One curve. Alone it is smoothed where it is long; beside others it is drawn as it is, and the
 * first one as a wide band, so that a second one with the same values stays visible on it. */
static void add_run(json_t *panel, const json_t *run, const char *metric, size_t index, size_t runs)
{
    const json_t *history = json_object_get(run, "history");
    const char *name = ql_jstr(run, "name", "run"), *colour = ql_colour((int)index);
    int gradients = strcmp(metric, "loss") == 0 || strcmp(metric, "grad_norm") == 0;
    points p = points_of(history, metric, gradients ? HOLES : VALUES);
    if (runs == 1 && p.n >= SMOOTH_FROM && strcmp(metric, "learning_rate") != 0) {
        points s = smoothed(&p);
        add_series(panel, name, &p, colour, "faint");
        add_series(panel, name, &s, colour, "line");
        points_free(&s);
    } else {
        add_series(panel, name, &p, colour, runs > 1 && index == 0 ? "wide" : "line");
    }
    points_free(&p);
    if (strcmp(metric, "loss") != 0) return;
    points e = points_of(history, "eval_loss", HOLES);
    if (e.n > 0) add_series(panel, "eval", &e, colour, "dots");
    points_free(&e);
    if (index + 1 == runs) add_skipped(panel, history, metric);
}

/* b − a where both have the step. Returns how many were shared; *same: how many equal to the last
 * bit. */
static int difference(const points *a, const points *b, points *d, int *same)
{
    int n = 0;
    d->x = calloc((size_t)b->n + 1, sizeof *d->x);
    d->y = calloc((size_t)b->n + 1, sizeof *d->y);
    *same = 0;
    for (int i = 0, k = 0; d->x && d->y && i < b->n; i++) {
        while (k < a->n && a->x[k] < b->x[i]) k++;
        if (k == a->n || a->x[k] > b->x[i]) continue;
        double v = b->y[i] - a->y[k];
        d->x[n] = b->x[i];
        d->y[n++] = v;
        *same += v == 0;
    }
    return d->n = n;
}

static void add_differences(json_t *chart, const json_t *runs, const char *metric)
{
    json_t *panel = new_panel(chart, "difference", 0.5);
    points first = points_of(json_object_get(json_array_get(runs, 0), "history"), metric, VALUES);
    int shared = 0, same = 0;
    json_object_set_new(panel, "zero", json_true());
    for (size_t i = 1; i < json_array_size(runs); i++) {
        const json_t *run = json_array_get(runs, i);
        points p = points_of(json_object_get(run, "history"), metric, VALUES), d = {0};
        int equal;
        char label[800];
        const char *mine = ql_jstr(run, "name", "run"), *theirs = ql_jstr(json_array_get(runs, 0), "name", "run");
        shared += difference(&first, &p, &d, &equal);
        same += equal;
        snprintf(label, sizeof label, "%.*s − %.*s", (int)ql_text_fit(mine, 80), mine, (int)ql_text_fit(theirs, 80), theirs);
        add_series(panel, label, &d, ql_colour((int)i), "line");
        points_free(&p);
        points_free(&d);
    }
    char text[96];
    if (shared == 0)
        snprintf(text, sizeof text, "no step in common");
    else if (same == shared) /* and no scale, which would only raise the question how small a one is seen */
        snprintf(text, sizeof text, "%d of %d: no difference", same, shared), json_object_set_new(panel, "flat", json_true());
    else
        snprintf(text, sizeof text, "%d of %d steps equal", same, shared);
    json_object_set_new(panel, "text", json_string(text));
    points_free(&first);
}

json_t *ql_chart_runs(const json_t *runs, const char *metric, int diff)
{
    int both = diff && json_array_size(runs) > 1;
    json_t *chart = new_chart(metric_label(metric), "step", both ? 400 : 280);
    json_t *panel = new_panel(chart, "", 1);
    if (strcmp(metric, "tokens_per_second") == 0 || strcmp(metric, "learning_rate") == 0)
        json_object_set_new(panel, "floor", json_true());
    for (size_t i = 0; i < json_array_size(runs); i++)
        add_run(panel, json_array_get(runs, i), metric, i, json_array_size(runs));
    if (both) add_differences(chart, runs, metric);
    return chart;
}

ql_status ql_chart_bundle(const ql_host *host, const json_t *chart, const json_t *data,
                          json_t **bundle)
{
    ql_view v = {0};
    ql_buf png = {0}, svg = {0};
    ql_status st = QL_OK;
    int width = (int)ql_jint(chart, "width", WIDTH), height = (int)ql_jint(chart, "height", 280);
    ql_chart_text(chart, &v.text);
    if (host && host->chart) QL_GO(host->chart(host->self, chart, &png));
    if (png.len > 0) {
        ql_buf text = {0};
        ql_buf_base64(&text, png.data, png.len);
        json_t *b = ql_view_bundle(&v, data);
        json_object_set_new(json_object_get(b, "data"), "image/png", ql_buf_json(&text));
        json_object_set_new(json_object_get(b, "metadata"), "image/png",
                            json_pack("{s:i, s:i}", "width", width, "height", height));
        ql_buf_free(&text);
        *bundle = b;
    } else {
        QL_GO(ql_chart_svg(chart, &svg));
        ql_buf_printf(&v.html, "<img width=\"%d\" height=\"%d\" alt=\"", width, height);
        ql_buf_html(&v.html, ql_jstr(chart, "title", "chart"));
        ql_buf_put(&v.html, "\" src=\"data:image/svg+xml;base64,");
        ql_buf_base64(&v.html, ql_buf_str(&svg), svg.len);
        ql_buf_put(&v.html, "\">");
        *bundle = ql_view_bundle(&v, data);
    }
out:
    ql_buf_free(&png);
    ql_buf_free(&svg);
    ql_view_free(&v);
    return st;
}
