/* One view per report: what load, config, data, eval, generate, verify and bench say. */
#include "magics/view.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NONE ((double)NAN)

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
        ql_buf_printf(&b, "%sbase of %s once placed", b.len ? ", " : "", ql_fmt_bytes(bytes).s);
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
         : json_is_false(q) ? ql_jstr(m, "dtype", "16-bit")
                            : "");
    pair(&t, "adapters", ql_jstr(m, "trainable", ""));
    pair(&t, "folder", ql_jstr(m, "path", ""));
    ql_table_end(&v, &t);
    if (json_is_false(json_object_get(m, "weights")))
        ql_view_warn(&v, "config.json alone, without weights: enough for %qlora plan, not for a run.");
    ql_view_note(&v, "Nothing is on a device yet: %%qlora plan shows where it will rest.");
    ql_buf_free(&names);
    ql_buf_free(&b);
    return ql_view_bundle(&v, m);
}

/* ---- config
 * ------------------------------------------------------------------------------------------- */

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
        ql_view_setting(&b, ql_job_get(job, s[i].name));
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
        ql_view_title(&v, "settings", "%s%s%lld × %lld × %lld device%s = %lld sample%s per step",
                      name ? name : "", name ? ", " : "", (long long)batch, (long long)g, (long long)world,
                      world == 1 ? "" : "s", (long long)(batch * g * world), batch * g * world == 1 ? "" : "s");
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

/* Control characters as their pictures, one for one: a terminal would obey them, and a NUL would end the text. Caller frees. */
static char *visible(const json_t *s)
{
    const char *p = json_string_value(s);
    ql_buf b = {0};
    for (size_t i = 0, n = json_string_length(s); i < n; i++) {
        unsigned char c = (unsigned char)p[i], picture[3] = {0xe2, 0x90, (unsigned char)(c == 0x7f ? 0xa1 : 0x80 + c)};
        if ((c < ' ' && c != '\n' && c != '\t') || c == 0x7f) ql_buf_add(&b, picture, sizeof picture);
        else ql_buf_add(&b, p + i, 1);
    }
    return b.data ? b.data : strdup("");
}

/* Parts that are trained on stand on a tint; in text between ‹ ›. Spans count characters. */
static void sample(ql_view *v, const json_t *s)
{
    char *text = visible(json_object_get(s, "text"));
    size_t n = text ? strlen(text) : 0, at = 0, i, shown = text ? byte_of(text, 2400) : 0;
    const json_t *span;
    ql_buf t = {0}, h = {0};
    ql_buf_put(&h, "<pre style=\"white-space:pre-wrap;word-break:normal;overflow-wrap:break-word;margin:4px 0;line-height:1.35\">");
    json_array_foreach(json_object_get(s, "spans"), i, span)
    {
        if (!text || !json_is_array(span)) continue;
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
    free(text);
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
