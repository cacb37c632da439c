/* Memory over a run's time: a panel per device, its categories stacked, their sum what the device says is in use. */
#include "magics/view.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CATEGORIES_MAX = 24, TIMES_MAX = 400, WIDTH = 720 };

/* What is drawn: which of the run's events, when, and the categories in the order of their appearance. */
typedef struct {
    const json_t *events;
    size_t *at;                       /* (n) */
    double *x;                        /* (n) seconds of training */
    size_t n, devices;
    const char *name[CATEGORIES_MAX];
    double most[CATEGORIES_MAX];      /* bytes, on any device at any time */
    int names;
    double top, host;                 /* most bytes in use on a device, and of the host's for all of them */
} history;

static const json_t *device_at(const history *h, size_t event, size_t device)
{
    return json_array_get(json_object_get(json_array_get(h->events, event), "devices"), device);
}

static double bytes_at(const history *h, size_t event, size_t device, int category)
{
    double v = ql_jnum(json_object_get(device_at(h, event, device), "bytes"), h->name[category], 0);
    return v > 0 ? v : 0;
}

static double sum_at(const history *h, size_t event, size_t device)
{
    double sum = 0;
    for (int c = 0; c < h->names; c++) sum += bytes_at(h, event, device, c);
    return sum;
}

static void find_categories(history *h)
{
    size_t i, d;
    const json_t *event, *device, *v;
    const char *key;
    json_array_foreach((json_t *)h->events, i, event)
    {
        h->host = fmax(h->host, ql_jnum(event, "host", 0));
        json_array_foreach(json_object_get(event, "devices"), d, device)
        {
            if (d + 1 > h->devices) h->devices = d + 1;
            json_object_foreach(json_object_get(device, "bytes"), key, v)
            {
                int c = 0;
                double bytes = json_number_value(v);
                while (c < h->names && strcmp(h->name[c], key) != 0) c++;
                if (!(bytes > 0) || (c == h->names && c == CATEGORIES_MAX)) continue;
                if (c == h->names) h->name[h->names++] = key;
                if (bytes > h->most[c]) h->most[c] = bytes;
            }
        }
    }
}

/* A resumed run's engine counts its time from nought again. */
static double time_of(const history *h, size_t event, double *before, double *offset)
{
    double t = ql_jnum(json_array_get(h->events, event), "t", (double)event);
    if (event > 0 && t < *before) *offset += *before - t;
    *before = t;
    return t + *offset;
}

/* Of each stretch of a long run the moment at which most was in use. */
static int choose_times(history *h)
{
    size_t all = json_array_size(h->events), stretches = all < TIMES_MAX ? all : TIMES_MAX;
    double before = 0, offset = 0, *t = calloc(all + 1, sizeof *t);
    h->at = calloc(stretches + 1, sizeof *h->at);
    h->x = calloc(stretches + 1, sizeof *h->x);
    if (!t || !h->at || !h->x) return free(t), 0;
    for (size_t i = 0; i < all; i++) t[i] = time_of(h, i, &before, &offset);
    for (size_t s = 0; s < stretches; s++) {
        size_t from = s * all / stretches, to = (s + 1) * all / stretches, best = from;
        double most = -1;
        for (size_t i = from; i < to; i++)
            for (size_t d = 0; d < h->devices; d++) {
                double sum = sum_at(h, i, d);
                if (sum > most) most = sum, best = i;
            }
        h->at[h->n] = best;
        h->x[h->n++] = t[best] - t[0];
        h->top = fmax(h->top, most);
    }
    free(t);
    return 1;
}

static void add_category(const history *h, json_t *panel, size_t device, int category, double *low, double unit)
{
    json_t *x = json_array(), *y = json_array(), *bottom = json_array();
    char label[256];
    for (size_t i = 0; i < h->n; i++) {
        double v = bytes_at(h, h->at[i], device, category);
        json_array_append_new(x, json_real(h->x[i]));
        json_array_append_new(bottom, json_real(low[i] / unit));
        low[i] += v;
        json_array_append_new(y, json_real(low[i] / unit));
    }
    snprintf(label, sizeof label, "%.*s  %s", (int)ql_text_fit(h->name[category], 40), h->name[category], ql_fmt_bytes(h->most[category]).s);
    json_array_append_new(json_object_get(panel, "series"),
                          json_pack("{s:s, s:s, s:o, s:o, s:o, s:s, s:s}", "name", h->name[category], "label", label, "x", x, "y", y, "low",
                                    bottom, "colour", ql_category_colour(h->name[category]), "kind", "stack"));
}

static void add_device(const history *h, json_t *chart, size_t device, double unit)
{
    const json_t *d = device_at(h, h->at[h->n - 1], device);
    const char *name = ql_jstr(d, "name", "device");
    double *low = calloc(h->n + 1, sizeof *low), peak = 0, total = ql_jnum(d, "total", 0);
    char text[400];
    if (!low) return;
    for (size_t i = 0; i < h->n; i++) peak = fmax(peak, sum_at(h, h->at[i], device));
    snprintf(text, sizeof text, "%lld: %.*s, at most %s%s%s", (long long)ql_jint(d, "rank", (int64_t)device), (int)ql_text_fit(name, 60), name,
             ql_fmt_bytes(peak).s, total > 0 ? " of " : "", total > 0 ? ql_fmt_bytes(total).s : "");
    json_t *panel = json_pack("{s:s, s:f, s:[], s:b, s:f, s:s}", "ylabel", "", "weight", 1.0, "series", "floor", 1, "ymax", h->top * 1.22 / unit,
                              "text", text);
    for (int c = 0; c < h->names; c++) add_category(h, panel, device, c, low, unit);
    json_array_append_new(json_object_get(chart, "panels"), panel);
    free(low);
}

json_t *ql_chart_memory(const json_t *run)
{
    history h = {.events = json_object_get(run, "memory")};
    json_t *chart = NULL;
    find_categories(&h);
    if (choose_times(&h)) {
        double unit = h.top >= 1073741824.0 ? 1073741824.0 : 1048576.0;
        int each = h.devices <= 2 ? 170 : h.devices <= 4 ? 130 : 100, list = 60 + 19 * h.names;
        int height = 90 + each * (int)(h.devices ? h.devices : 1);
        if (h.n == 1) h.x[1] = h.x[0] + 1, h.at[1] = h.at[0], h.n = 2; /* a moment alone would show nothing */
        char title[100];
        snprintf(title, sizeof title, "device memory, %s%s%s", unit > 1e9 ? "GiB" : "MiB", h.host > 0 ? "; host memory at most " : "",
                 h.host > 0 ? ql_fmt_bytes(h.host).s : "");
        chart = json_pack("{s:s, s:s, s:s, s:i, s:i, s:[]}", "title", title, "xlabel", "seconds", "legend",
                          "right", "width", (int)WIDTH, "height", height > list ? height : list, "panels");
        for (size_t d = 0; chart && h.n && d < h.devices; d++) add_device(&h, chart, d, unit);
    }
    free(h.at);
    free(h.x);
    return chart;
}
