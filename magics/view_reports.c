/* One view per report: what load, config, data, plan, memory, eval, generate, verify and
 * bench say. */
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

/* ---- load
 * -------------------------------------------------------------------------------------------- */

static void pair(ql_table *t, const char *name, const char *value)
{
    if (!*value) return;
    ql_table_cell(t, "%s", name);
    ql_table_cell(t, "%s", value);
}

json_t *ql_view_model(const json_t *m)
{
    ql_view v = {0};
    ql_buf names = {0}, b = {0};
    ql_table t;
    const char *name = ql_jstr(m, "name", ql_jstr(m, "model", "model"));
    double n = ql_jnum(m, "parameters", NONE), bytes = ql_jnum(m, "bytes", NONE);
    if (isfinite(n)) ql_buf_printf(&b, "%s parameters", ql_fmt_count(n).s);
    if (isfinite(bytes))
        ql_buf_printf(&b, "%s%s on disk", b.len ? ", " : "", ql_fmt_bytes(bytes).s);
    ql_view_title(&v, name, "%s", ql_buf_str(&b));
    ql_table_begin(&t, "|", &names);
    pair(&t, "architecture", ql_jstr(m, "arch", ""));
    ql_buf_clear(&b);
    static const char *const keys[] = {"layers", "hidden", "heads", "kv_heads", "vocab"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (isfinite(ql_jnum(m, keys[i], NONE)))
            ql_buf_printf(&b, "%s%s %s", b.len ? ", " : "", ql_fmt_count(ql_jnum(m, keys[i], 0)).s,
                          keys[i]);
    pair(&t, "shape", ql_buf_str(&b));
    const json_t *q = json_object_get(m, "quantised");
    pair(&t, "stored as",
         json_is_string(q)  ? json_string_value(q)
         : json_is_true(q)  ? "NF4 (bitsandbytes)"
         : json_is_false(q) ? "16-bit"
                            : "");
    pair(&t, "adapters", ql_jstr(m, "trainable", ""));
    pair(&t, "folder", ql_jstr(m, "path", ""));
    ql_table_end(&v, &t);
    ql_view_note(&v, "Nothing is on a device yet: %%qlora plan shows where it will rest.");
    ql_buf_free(&names);
    ql_buf_free(&b);
    return ql_view_bundle(&v, m);
}

/* ---- config
 * ------------------------------------------------------------------------------------------- */

static void setting_text(const json_t *value, ql_buf *b)
{
    if (json_is_string(value)) {
        ql_buf_put(b, json_string_value(value));
    } else if (json_is_real(value)) {
        ql_buf_put(b, ql_fmt_num(json_real_value(value), 6).s);
    } else {
        char *s = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
        ql_buf_put(b, s ? s : "null");
        free(s);
    }
}

static void config_rows(ql_table *t, const ql_job *job, int all)
{
    const ql_setting *s;
    const char *group = NULL; /* named once */
    int n = ql_settings(&s);
    for (int i = 0; i < n; i++) {
        int set = ql_job_is_set(job, s[i].name);
        if (!set && !s[i].theirs && !all) continue;
        if (!set && (s[i].refused || s[i].note)) continue;
        ql_buf b = {0};
        setting_text(ql_job_get(job, s[i].name), &b);
        size_t fit = ql_text_fit(ql_buf_str(&b), 44);
        ql_table_cell(t, "%s", group && strcmp(group, s[i].group) == 0 ? "" : s[i].group);
        group = s[i].group;
        if (set) {
            ql_buf h = {0};
            ql_buf_put(&h, "<b>");
            ql_buf_html(&h, s[i].name);
            ql_buf_put(&h, "</b>");
            ql_table_cell2(t, s[i].name, ql_buf_str(&h));
            ql_buf_free(&h);
        } else {
            ql_table_cell(t, "%s", s[i].name);
        }
        ql_table_cell(t, "%.*s%s", (int)fit, ql_buf_str(&b), fit < b.len ? "…" : "");
        ql_table_cell(t, "%s", set ? "set" : s[i].theirs ? "(here)" : "");
        ql_buf_free(&b);
    }
}

json_t *ql_view_config(const ql_job *job, const json_t *model, const json_t *notes, int64_t world,
                       int all)
{
    ql_view v = {0};
    ql_buf names = {0};
    ql_table t;
    const json_t *text;
    size_t i;
    int64_t batch = ql_job_int(job, "per_device_train_batch_size"),
            g = ql_job_int(job, "gradient_accumulation_steps");
    const char *name = ql_job_str(job, "model");
    if (world > 0)
        ql_view_title(&v, "settings", "%s%s%lld × %lld × %lld devices = %lld samples per step",
                      name ? name : "", name ? ", " : "", (long long)batch, (long long)g,
                      (long long)world, (long long)(batch * g * world));
    else
        ql_view_title(&v, "settings", "%s%s%lld × %lld samples per step and device",
                      name ? name : "", name ? ", " : "", (long long)batch, (long long)g);
    ql_table_begin(&t, "|setting|value|", &names);
    config_rows(&t, job, all);
    ql_table_end(&v, &t);
    if (*ql_jstr(model, "trainable", "")) ql_view_note(&v, "%s", ql_jstr(model, "trainable", ""));
    json_array_foreach((json_t *)notes, i, text) if (json_is_string(text))
        ql_view_note(&v, "%s", json_string_value(text));
    ql_view_note(&v, "set: by you. (here): a default that differs from transformers' or PEFT's.");
    ql_buf_free(&names);
    json_t *data = ql_job_json(job), *bundle = ql_view_bundle(&v, data);
    json_decref(data);
    return bundle;
}

/* ---- data
 * ---------------------------------------------------------------------------------------------- */

/* Where the character (code point) begins; the text's end for those behind it. */
static size_t byte_of(const char *text, json_int_t character)
{
    size_t at = 0;
    for (json_int_t k = -1; text[at]; at++)
        if (((unsigned char)text[at] & 0xc0) != 0x80 && ++k == character) return at;
    return at;
}

/* Parts that are trained on stand on a tint; in text between ‹ ›. Spans count characters. */
static void sample(ql_view *v, const json_t *s)
{
    const char *text = ql_jstr(s, "text", "");
    size_t n = strlen(text), at = 0, i, shown = byte_of(text, 2400);
    const json_t *span;
    ql_buf t = {0}, h = {0};
    ql_buf_put(&h, "<pre style=\"white-space:pre-wrap;word-break:normal;overflow-wrap:break-word;margin:4px 0;line-height:1.35\">");
    json_array_foreach(json_object_get(s, "spans"), i, span)
    {
        if (!json_is_array(span)) continue;
        size_t a = byte_of(text, json_integer_value(json_array_get(span, 0))),
               b = byte_of(text, json_integer_value(json_array_get(span, 1)));
        int trained = json_is_true(json_array_get(span, 2)) ||
                      json_integer_value(json_array_get(span, 2)) != 0;
        if (a < at || b < a || a >= shown) continue;
        if (b > shown) b = shown;
        char *gap = strndup(text + at, a - at), *part = strndup(text + a, b - a);
        ql_buf_put(&t, gap ? gap : "");
        ql_buf_html(&h, gap ? gap : "");
        ql_buf_put(&t, trained ? "‹" : "");
        ql_buf_put(&t, part ? part : "");
        ql_buf_put(&t, trained ? "›" : "");
        if (trained) ql_buf_put(&h, "<span style=\"background-color:rgba(16,150,118,0.22)\">");
        ql_buf_html(&h, part ? part : "");
        if (trained) ql_buf_put(&h, "</span>");
        free(gap);
        free(part);
        at = b;
    }
    if (at < shown) {
        char *rest = strndup(text + at, shown - at);
        ql_buf_put(&t, rest ? rest : "");
        ql_buf_html(&h, rest ? rest : "");
        free(rest);
    }
    ql_buf_printf(&h, "%s</pre>", shown < n ? " …" : "");
    ql_buf_put(&t, shown < n ? " …\n" : "\n");
    for (const char *p = ql_buf_str(&t); *p;) {
        size_t line = strcspn(p, "\n");
        size_t fit = ql_text_fit(p, 76);
        int cut = fit < line;
        if (cut) { /* long lines are cut into page-wide ones: at a blank, where there is one */
            for (line = fit; line > fit / 2 && p[line] != ' ';) line--;
            if (p[line] != ' ') line = fit;
        }
        ql_buf_printf(&v->text, "  | %.*s\n", (int)line, p);
        p += line + (p[line] == '\n' || (cut && p[line] == ' '));
    }
    ql_buf_put(&v->html, ql_buf_str(&h));
    ql_buf_free(&t);
    ql_buf_free(&h);
}

/* Bins of token counts, each twice as wide as the one before. */
static void histogram(ql_view *v, const json_t *h)
{
    size_t n = json_array_size(h);
    double *y = calloc(n + 1, sizeof *y);
    ql_buf b = {0};
    for (size_t i = 0; y && i < n; i++) {
        const json_t *bin = json_array_get(h, i);
        y[i] = ql_jnum(bin, "count", 0);
        if (y[i] > 0)
            ql_buf_printf(&b, "%s%s–%s: %s", b.len ? ", " : "", ql_fmt_count(ql_jnum(bin, "from", 0)).s,
                          ql_fmt_count(ql_jnum(bin, "to", 0) - 1).s, ql_fmt_count(y[i]).s);
    }
    if (n > 2 && b.len) {
        ql_buf_put(&b, "  ");
        ql_sparkline(&b, y, (int)n, 24);
    }
    if (b.len) ql_view_note(v, "rows by their tokens: %s", ql_buf_str(&b));
    free(y);
    ql_buf_free(&b);
}

/* "1 row", "2,000 rows" */
static void some(ql_buf *b, double n, const char *what)
{
    ql_buf_printf(b, "%s %s%s", ql_fmt_count(n).s, what, n == 1 ? "" : "s");
}

json_t *ql_view_data(const json_t *r)
{
    ql_view v = {0};
    ql_buf b = {0};
    const json_t *value;
    const char *key;
    size_t i;
    double tokens = ql_jnum(r, "tokens", NONE), trained = ql_jnum(r, "trained_tokens", NONE);
    some(&b, ql_jnum(r, "rows", NONE), "row");
    ql_buf_put(&b, ", ");
    some(&b, tokens, "token");
    if (isfinite(trained) && tokens > 0)
        ql_buf_printf(&b, ", %s of them trained on (%.0f %%)", ql_fmt_count(trained).s,
                      100 * trained / tokens);
    ql_view_title(&v, ql_jstr(r, "name", "data"), "%s", ql_buf_str(&b));
    histogram(&v, json_object_get(r, "histogram"));
    json_object_foreach(json_object_get(r, "skipped"), key,
                        value) if (json_is_number(value) && json_number_value(value) > 0)
    {
        const char *first = ql_jstr(json_object_get(r, "first"), key, "");
        ql_buf_clear(&b);
        some(&b, json_number_value(value), "row");
        ql_buf_printf(&b, " left out: %s%s%s", key, *first ? "; the first: " : "", first);
        ql_view_warn(&v, ql_buf_str(&b));
    }
    json_array_foreach(json_object_get(r, "warnings"), i, value) if (json_is_string(value))
        ql_view_warn(&v, json_string_value(value));
    json_array_foreach(json_object_get(r, "samples"), i, value) sample(&v, value);
    if (json_array_size(json_object_get(r, "samples")) > 0)
        ql_view_note(&v, "Marked parts are trained on.");
    ql_buf_free(&b);
    return ql_view_bundle(&v, r);
}

/* ---- plan and memory: bytes by category
 * ---------------------------------------------------------------- */

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

/* A row per category, a column per device: the legend of the bars, and the numbers. */
static void category_table(ql_view *v, const json_t *devices)
{
    static const char *const shades[] = {"█", "▓", "▒", "░"};
    ql_part parts[PARTS_MAX];
    int n = categories(devices, parts);
    size_t shown = json_array_size(devices) < 6 ? json_array_size(devices) : 6;
    ql_buf names = {0}, spec = {0};
    ql_table t;
    ql_buf_put(&spec, "|category");
    for (size_t i = 0; i < shown; i++) ql_buf_printf(&spec, "|%zu>", i);
    ql_table_begin(&t, ql_buf_str(&spec), &names);
    for (int k = 0; k < n; k++) {
        char box[120];
        snprintf(
            box, sizeof box,
            "<span "
            "style=\"display:inline-block;width:12px;height:12px;background-color:%s\"></span>",
            parts[k].colour);
        ql_table_cell2(&t, shades[k % 4], box);
        ql_table_cell(&t, "%s", parts[k].name);
        for (size_t i = 0; i < shown; i++)
            ql_table_cell(&t, "%s",
                          ql_fmt_bytes(ql_jnum(json_object_get(json_array_get(devices, i), "bytes"),
                                               parts[k].name, 0))
                              .s);
    }
    if (n > 0) ql_table_end(v, &t);
    ql_buf_free(&names);
    ql_buf_free(&spec);
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
        setting_text(v, b);
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

/* ---- eval, verify, bench, generate
 * ----------------------------------------------------------------------- */

json_t *ql_view_eval(const json_t *r)
{
    ql_view v = {0};
    double loss = ql_jnum(r, "eval_loss", NONE);
    char text[80];
    snprintf(text, sizeof text, isfinite(loss) ? "eval_loss %.4f" : "eval_loss -", loss);
    if (isfinite(ql_jnum(r, "eval_runtime", NONE)))
        ql_view_title(&v, text, "perplexity %s, %s", ql_fmt_num(exp(loss), 4).s,
                      ql_fmt_time(ql_jnum(r, "eval_runtime", 0)).s);
    else
        ql_view_title(&v, text, "perplexity %s", ql_fmt_num(exp(loss), 4).s);
    return ql_view_bundle(&v, r);
}

json_t *ql_view_verify(const json_t *r)
{
    ql_view v = {0};
    ql_buf names = {0};
    ql_table t;
    size_t i, bad = 0;
    const json_t *c, *checks = json_object_get(r, "checks");
    json_array_foreach((json_t *)checks, i, c) bad += !json_is_true(json_object_get(c, "ok"));
    ql_view_title(&v, bad ? "not verified" : "verified", "%zu of %zu checks hold",
                  json_array_size(checks) - bad, json_array_size(checks));
    ql_table_begin(&t, "|check|", &names);
    json_array_foreach((json_t *)checks, i, c)
    {
        int ok = json_is_true(json_object_get(c, "ok"));
        ql_table_cell2(&t, ok ? "✓" : "✗",
                       ok ? "<span style=\"color:#109676\">&#10003;</span>"
                          : "<span style=\"color:#c22a5b\">&#10007;</span>");
        ql_table_cell(&t, "%s", ql_jstr(c, "name", ""));
        ql_table_cell(&t, "%s", ql_jstr(c, "text", ""));
    }
    ql_table_end(&v, &t);
    ql_buf_free(&names);
    return ql_view_bundle(&v, r);
}

/* The block to paste, its lines cut to a page's width. */
static void paste(ql_view *v, const char *text)
{
    ql_buf b = {0};
    for (const char *p = text; *p;) {
        size_t n = strcspn(p, "\n");
        char *line = strndup(p, n);
        ql_view_wrap(&b, line ? line : "", QL_VIEW_COLUMNS - 2, 6);
        ql_buf_put(&b, "\n");
        free(line);
        p += n + (p[n] == '\n');
    }
    ql_view_note(v, "To paste:");
    ql_view_code(v, ql_buf_str(&b));
    ql_buf_free(&b);
}

json_t *ql_view_bench(const json_t *r)
{
    ql_view v = {0};
    ql_buf names = {0};
    ql_table t;
    size_t i, k;
    const json_t *c, *x;
    int several = 0;
    ql_view_title(&v, "bench", "%s", ql_jstr(r, "device", ""));
    json_array_foreach(json_object_get(r, "rows"), i, c) several |= json_array_size(json_object_get(c, "each")) > 0;
    ql_table_begin(&t, several ? "what|measured>|of a copy>|each device" : "what|measured>|of a copy>", &names);
    json_array_foreach(json_object_get(r, "rows"), i, c)
    {
        double part = ql_jnum(c, "of_peak", NONE);
        ql_buf each = {0};
        ql_table_cell(&t, "%s", ql_jstr(c, "name", ""));
        ql_table_cell(&t, "%s %s", ql_fmt_num(ql_jnum(c, "value", NONE), 4).s,
                      ql_jstr(c, "unit", ""));
        ql_table_cell(&t, isfinite(part) ? "%.0f %%" : "", part * 100);
        json_array_foreach(json_object_get(c, "each"), k, x)
            ql_buf_printf(&each, "%s%s", k ? "  " : "", ql_fmt_num(json_number_value(x), 4).s);
        if (several) ql_table_cell(&t, "%s", ql_buf_str(&each));
        ql_buf_free(&each);
    }
    ql_table_end(&v, &t);
    json_array_foreach(json_object_get(r, "rows"), i, c)
        if (*ql_jstr(c, "text", "")) ql_view_note(&v, "%s: %s", ql_jstr(c, "name", ""), ql_jstr(c, "text", ""));
    paste(&v, ql_jstr(r, "text", ""));
    ql_buf_free(&names);
    return ql_view_bundle(&v, r);
}

static void generated(ql_view *v, const char *label, const char *prompt, const char *text)
{
    ql_buf b = {0};
    if (*label) ql_view_note(v, "%s", label);
    ql_buf_printf(&b, "%s%s", prompt, text);
    ql_buf_put(&v->html, "<pre style=\"white-space:pre-wrap;word-break:normal;overflow-wrap:break-word;margin:2px 0 8px "
                         "0;line-height:1.35\"><span style=\"opacity:0.65\">");
    ql_buf_html(&v->html, prompt);
    ql_buf_put(&v->html, "</span>");
    ql_buf_html(&v->html, text);
    ql_buf_put(&v->html, "</pre>");
    ql_buf_put(&v->text, ql_buf_str(&b));
    ql_buf_put(&v->text, "\n");
    ql_buf_free(&b);
}

json_t *ql_view_generated(const json_t *prompts, const json_t *r)
{
    ql_view v = {0};
    const json_t *texts = json_object_get(r, "texts"), *base = json_object_get(r, "base"), *p;
    int both = json_array_size(base) > 0;
    size_t i;
    json_array_foreach((json_t *)prompts, i, p)
    {
        const char *prompt = json_string_value(p), *a = json_string_value(json_array_get(texts, i)),
                   *b = json_string_value(json_array_get(base, i));
        if (i > 0) ql_buf_put(&v.text, "\n");
        prompt = prompt ? prompt : "";
        if (a || !both) generated(&v, both ? "with the adapter" : "", prompt, a ? a : "");
        if (b) generated(&v, "without it", prompt, b);
    }
    return ql_view_bundle(&v, r);
}
