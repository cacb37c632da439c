/* plan and memory: bytes by category, as bars, rows and alternatives. */
#include "magics/view.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NONE ((double)NAN)

static const char *bytes_or_dash(double v, ql_short *s)
{
    *s = ql_fmt_bytes(v);
    return isfinite(v) ? s->s : "-";
}

enum { PARTS_MAX = 24 };

static int by_bytes(const void *a, const void *b)
{
    double x = ((const ql_part *)a)->bytes, y = ((const ql_part *)b)->bytes;
    return (x < y) - (x > y);
}

/* The categories of all devices, largest first, so that bars and legend agree. */
static int categories(const json_t *devices, ql_part *parts)
{
    int n = 0;
    size_t i;
    const json_t *d, *v;
    const char *key;
    json_array_foreach((json_t *)devices, i, d)
        json_object_foreach(json_object_get(d, "bytes"), key, v)
    {
        int k = 0;
        while (k < n && strcmp(parts[k].name, key) != 0) k++;
        if (k == n && n == PARTS_MAX) continue;
        if (k == n) parts[n++] = (ql_part){key, 0, ql_category_colour(key)};
        if (json_number_value(v) > parts[k].bytes) parts[k].bytes = json_number_value(v);
    }
    qsort(parts, (size_t)n, sizeof *parts, by_bytes);
    while (n > 0 && !(parts[n - 1].bytes > 0)) n--;
    return n;
}

/* "0: Tesla T4"; a page-wide table cuts long names, HTML does not. */
static void device_cell(ql_table *t, const json_t *d, size_t i, size_t columns)
{
    const char *name = ql_jstr(d, "name", "");
    size_t fit = ql_text_fit(name, (int)columns);
    ql_buf text = {0}, html = {0};
    if (fit < strlen(name)) fit = ql_text_fit(name, (int)columns - 1);
    ql_buf_printf(&text, "%lld%s%.*s%s", (long long)ql_jint(d, "rank", (int64_t)i), *name ? ": " : "", (int)fit, name, name[fit] ? "…" : "");
    ql_buf_printf(&html, "%lld%s", (long long)ql_jint(d, "rank", (int64_t)i), *name ? ": " : "");
    ql_buf_html(&html, name);
    ql_table_cell2(t, ql_buf_str(&text), ql_buf_str(&html));
    ql_buf_free(&text);
    ql_buf_free(&html);
}

static void device_bars(ql_view *v, const json_t *devices, const char *whole, const char *total)
{
    ql_part parts[PARTS_MAX];
    int n = categories(devices, parts);
    ql_buf names = {0};
    ql_table t;
    size_t i;
    const json_t *d;
    ql_table_begin(&t, "device|bytes|total>", &names);
    json_array_foreach((json_t *)devices, i, d)
    {
        ql_part mine[PARTS_MAX];
        ql_buf text = {0}, html = {0};
        double sum = 0;
        for (int k = 0; k < n; k++) {
            mine[k] = parts[k];
            mine[k].bytes = ql_jnum(json_object_get(d, "bytes"), parts[k].name, 0);
            sum += mine[k].bytes;
        }
        double cap = ql_jnum(d, whole, NONE), shown = ql_jnum(d, total, sum);
        ql_bar(&text, &html, mine, n, cap);
        device_cell(&t, d, i, 16);
        ql_table_cell2(&t, ql_buf_str(&text), ql_buf_str(&html));
        if (isfinite(cap))
            ql_table_cell(&t, "%s / %s", ql_fmt_bytes(shown).s, ql_fmt_bytes(cap).s);
        else
            ql_table_cell(&t, "%s", ql_fmt_bytes(shown).s);
        ql_buf_free(&text);
        ql_buf_free(&html);
    }
    ql_table_end(v, &t);
    ql_buf_free(&names);
}

/* A row per category, a column per device: the legend of the bars, and the numbers. More devices than a page has room for go on in the
 * next table: in a pipeline the last one is the one unlike the others. */
static void category_table(ql_view *v, const json_t *devices)
{
    static const char *const shades[] = {"█", "▓", "▒", "░"};
    enum { ACROSS = 6 };
    ql_part parts[PARTS_MAX];
    int n = categories(devices, parts);
    size_t count = json_array_size(devices);
    for (size_t from = 0; n > 0 && from < count; from += ACROSS) {
        size_t end = count - from < ACROSS ? count : from + ACROSS;
        ql_buf names = {0}, spec = {0};
        ql_table t;
        ql_buf_put(&spec, "|category");
        for (size_t i = from; i < end; i++) ql_buf_printf(&spec, "|%zu>", i);
        ql_table_begin(&t, ql_buf_str(&spec), &names);
        for (int k = 0; k < n; k++) {
            char box[120];
            snprintf(box, sizeof box, "<span style=\"display:inline-block;width:12px;height:12px;background-color:%s\"></span>", parts[k].colour);
            ql_table_cell2(&t, shades[k % 4], box);
            ql_table_cell(&t, "%s", parts[k].name);
            for (size_t i = from; i < end; i++)
                ql_table_cell(&t, "%s", ql_fmt_bytes(ql_jnum(json_object_get(json_array_get(devices, i), "bytes"), parts[k].name, 0)).s);
        }
        ql_table_end(v, &t);
        ql_buf_free(&names);
        ql_buf_free(&spec);
    }
}

static void alternatives(ql_view *v, const json_t *list)
{
    ql_buf names = {0};
    ql_table t;
    size_t i;
    const json_t *a;
    ql_short s;
    if (json_array_size(list) == 0) return;
    ql_table_begin(&t, "instead|per device>|host>|step>|longest>|", &names);
    json_array_foreach((json_t *)list, i, a)
    {
        int fits = json_is_true(json_object_get(a, "fits"));
        double longest = ql_jnum(a, "longest", NONE), seconds = ql_jnum(a, "seconds", NONE);
        ql_table_cell(&t, "%s", ql_jstr(a, "name", ""));
        ql_table_cell(&t, "%s", bytes_or_dash(ql_jnum(a, "per_device", NONE), &s));
        ql_table_cell(&t, "%s", bytes_or_dash(ql_jnum(a, "host", NONE), &s));
        if (isfinite(seconds))
            ql_table_cell(&t, seconds < 99.95 ? "%#.3g s" : "%.0f s", seconds);
        else
            ql_table_cell(&t, "-");
        ql_table_cell(&t, "%s", isfinite(longest) ? ql_fmt_count(longest).s : "-");
        ql_table_cell(&t, "%s%s%s", fits ? "fits" : "does not fit",
                      *ql_jstr(a, "why", "") ? ": " : "", ql_jstr(a, "why", ""));
    }
    ql_table_end(v, &t);
    ql_view_note(v, "per device: the least that each way takes, every layer recomputed");
    ql_buf_free(&names);
}

static void chosen_words(const json_t *chosen, ql_buf *b)
{
    /* Numbers with their unit; a zero says nothing. */
    static const struct {
        const char *key, *one, *many;
    } units[] = {{"kept", "1 layer keeps its activations", "layers keep their activations"},
                 {"partly_recomputed", "1 partly recomputed", "partly recomputed"},
                 {"recomputed", "1 recomputed", "recomputed"},
                 {"offloaded", "1 offloaded", "offloaded"},
                 {"world", "1 device", "devices"},
                 {"micro_batches", "1 micro-batch", "micro-batches"},
                 {"samples_per_step", "1 sample a step", "samples a step"},
                 {"rows", "1 token a micro-batch", "tokens a micro-batch"}};
    const char *key;
    const json_t *v;
    if (*ql_jstr(chosen, "name", "")) {
        ql_buf_put(b, ql_jstr(chosen, "name", ""));
        return;
    }
    json_object_foreach((json_t *)chosen, key, v)
    {
        size_t k = 0;
        if (json_is_object(v) || json_is_array(v) || json_is_null(v) || json_is_false(v)) continue;
        if (json_is_integer(v) && json_integer_value(v) == 0) continue;
        ql_buf_put(b, b->len ? ", " : "");
        while (k < sizeof units / sizeof *units && strcmp(units[k].key, key) != 0) k++;
        if (k < sizeof units / sizeof *units && json_is_integer(v)) {
            if (json_integer_value(v) == 1)
                ql_buf_put(b, units[k].one);
            else
                ql_buf_printf(b, "%s %s", ql_fmt_count(json_number_value(v)).s, units[k].many);
            continue;
        }
        for (const char *c = key; *c && strcmp(key, "dtype") != 0; c++) ql_buf_add(b, *c == '_' ? " " : c, 1);
        ql_buf_put(b, strcmp(key, "dtype") == 0 ? "" : " ");
        ql_view_setting(b, v);
    }
}

json_t *ql_view_plan(const json_t *p, const char *on)
{
    ql_view v = {0};
    ql_buf b = {0};
    const json_t *devices = json_object_get(p, "devices"), *text;
    size_t i;
    int fits = json_is_true(json_object_get(p, "fits"));
    chosen_words(json_object_get(p, "chosen"), &b);
    ql_view_title(&v, fits ? "fits" : "does not fit", "%s%s%s", on ? on : "",
                  on && b.len ? ", " : "", ql_buf_str(&b));
    device_bars(&v, devices, "capacity", "total");
    category_table(&v, devices);
    if (ql_jnum(p, "host", 0) > 0)
        ql_view_note(&v, "host memory: %s", ql_fmt_bytes(ql_jnum(p, "host", 0)).s);
    if (ql_jnum(p, "longest", 0) > 0)
        ql_view_note(&v, "longest sequence that fits: %s tokens",
                     ql_fmt_count(ql_jnum(p, "longest", 0)).s);
    json_array_foreach(json_object_get(p, "why"), i, text) if (json_is_string(text))
        ql_view_note(&v, "%s", json_string_value(text));
    alternatives(&v, json_object_get(p, "alternatives"));
    ql_buf_clear(&b);
    json_array_foreach(json_object_get(p, "exact_worlds"), i, text)
        ql_buf_printf(&b, "%s%lld", b.len ? ", " : "", (long long)json_integer_value(text));
    if (b.len) ql_view_note(&v, "same bits on %s device%s", ql_buf_str(&b), strcmp(ql_buf_str(&b), "1") ? "s" : "");
    json_array_foreach(json_object_get(p, "actions"), i, text)
    {
        ql_view_title(&v, "rank", "%zu, one optimizer step", i);
        ql_view_code(&v, json_string_value(text));
    }
    ql_buf_free(&b);
    return ql_view_bundle(&v, p);
}

static int has_category(const json_t *devices, const char *name)
{
    for (size_t i = 0; i < json_array_size(devices); i++)
        if (ql_jnum(json_object_get(json_array_get(devices, i), "bytes"), name, 0) > 0) return 1;
    return 0;
}

json_t *ql_view_memory(const json_t *ev)
{
    ql_view v = {0};
    const json_t *devices = json_object_get(ev, "devices"), *d;
    ql_buf names = {0};
    ql_table t;
    size_t i;
    ql_short s;
    ql_view_title(&v, "device memory", "now");
    device_bars(&v, devices, "total", "used");
    category_table(&v, devices);
    ql_table_begin(&t, "device|our arena>|peak>|this process>|in use>|total>", &names);
    json_array_foreach((json_t *)devices, i, d)
    {
        static const char *const keys[] = {"arena", "peak", "process", "used", "total"};
        device_cell(&t, d, i, 20);
        for (size_t k = 0; k < 5; k++)
            ql_table_cell(&t, "%s", bytes_or_dash(ql_jnum(d, keys[k], NONE), &s));
    }
    if (json_array_size(devices) > 0) ql_table_end(&v, &t);
    if (has_category(devices, "runtime"))
        ql_view_note(&v, "runtime: what the ranks' processes hold beside our arena (context, libraries, communicator)");
    if (has_category(devices, "others")) ql_view_note(&v, "others: other processes, and the driver");
    if (has_category(devices, "outside")) ql_view_note(&v, "outside: all that is not our arena; the driver does not say whose");
    if (ql_jnum(ev, "host", 0) > 0)
        ql_view_note(&v, "host memory: %s", ql_fmt_bytes(ql_jnum(ev, "host", 0)).s);
    ql_buf_free(&names);
    return ql_view_bundle(&v, ev);
}
