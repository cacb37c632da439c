/* The pieces all views are made of: titles, notes, tables, bars. */
#include "magics/view.h"

#include <ctype.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define QUIET "opacity:0.65"

const char *ql_jstr(const json_t *o, const char *key, const char *def)
{
    const char *s = json_string_value(json_object_get(o, key));
    return s ? s : def;
}

double ql_jnum(const json_t *o, const char *key, double def)
{
    const json_t *v = json_object_get(o, key);
    return json_is_number(v) ? json_number_value(v) : def;
}

int64_t ql_jint(const json_t *o, const char *key, int64_t def)
{
    double x = ql_jnum(o, key, (double)NAN);
    return fabs(x) < 9e18 ? (int64_t)x : def; /* NaN fails the test, too */
}

/* ---- lines
 * ----------------------------------------------------------------------------------------- */

static char *vtext(const char *fmt, va_list ap)
{
    char *s = NULL;
    return vasprintf(&s, fmt, ap) < 0 ? NULL : s;
}

void ql_view_wrap(ql_buf *b, const char *text, int columns, int indent)
{
    int at = 0, first = 1;
    while (*text) {
        if (*text == '\n') {
            ql_buf_put(b, "\n");
            ql_buf_pad(b, ' ', indent);
            at = indent, first = 1;
            text++;
            continue;
        }
        size_t blanks = strspn(text, " "), n = strcspn(text + blanks, " \n");
        char *word = strndup(text + blanks, n);
        int w = word ? ql_text_width(word) : (int)n;
        if (!first && at + (int)blanks + w > columns) {
            ql_buf_put(b, "\n");
            ql_buf_pad(b, ' ', indent);
            at = indent;
            blanks = 0;
        }
        ql_buf_pad(b, ' ', (int)blanks);
        ql_buf_put(b, word ? word : "");
        at += (int)blanks + w;
        first = 0;
        text += strspn(text, " ") + n;
        free(word);
    }
}

void ql_view_title(ql_view *v, const char *what, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    char *rest = vtext(fmt, ap);
    va_end(ap);
    ql_buf b = {0};
    ql_buf_put(&b, what);
    if (rest && *rest) ql_buf_printf(&b, " · %s", rest);
    ql_view_wrap(&v->text, ql_buf_str(&b), QL_VIEW_COLUMNS, 2);
    ql_buf_put(&v->text, "\n");
    ql_buf_put(&v->html, "<div style=\"margin:4px 0\"><b>");
    ql_buf_html(&v->html, what);
    ql_buf_put(&v->html, "</b>");
    if (rest && *rest) {
        ql_buf_put(&v->html, " <span style=\"" QUIET "\">&nbsp;");
        ql_buf_html(&v->html, rest);
        ql_buf_put(&v->html, "</span>");
    }
    ql_buf_put(&v->html, "</div>\n");
    ql_buf_free(&b);
    free(rest);
}

void ql_view_note(ql_view *v, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    char *s = vtext(fmt, ap);
    va_end(ap);
    if (!s) return;
    ql_view_wrap(&v->text, s, QL_VIEW_COLUMNS, 2);
    ql_buf_put(&v->text, "\n");
    ql_buf_put(&v->html, "<div style=\"margin:2px 0;" QUIET "\">");
    ql_buf_html(&v->html, s);
    ql_buf_put(&v->html, "</div>\n");
    free(s);
}

void ql_view_warn(ql_view *v, const char *text)
{
    ql_buf b = {0};
    ql_buf_printf(&b, "! %s", text);
    ql_view_wrap(&v->text, ql_buf_str(&b), QL_VIEW_COLUMNS, 2);
    ql_buf_put(&v->text, "\n");
    ql_buf_put(&v->html,
               "<div style=\"margin:2px 0\"><span style=\"color:#c2410c\">&#9888;</span> ");
    ql_buf_html(&v->html, text);
    ql_buf_put(&v->html, "</div>\n");
    ql_buf_free(&b);
}

void ql_view_code(ql_view *v, const char *text)
{
    for (const char *p = text; *p;) {
        size_t n = strcspn(p, "\n");
        ql_buf_printf(&v->text, "  %.*s\n", (int)n, p);
        p += n + (p[n] == '\n');
    }
    ql_buf_put(&v->html, "<pre style=\"margin:4px 0;font-family:monospace\">");
    ql_buf_html(&v->html, text);
    ql_buf_put(&v->html, "</pre>\n");
}

void ql_view_setting(ql_buf *b, const json_t *value)
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

void ql_view_both(ql_view *v, const char *text, const char *html)
{
    ql_buf_put(&v->text, text);
    ql_buf_put(&v->html, html);
}

json_t *ql_view_bundle(ql_view *v, const json_t *data)
{
    while (v->text.len > 0 && v->text.data[v->text.len - 1] == '\n')
        v->text.data[--v->text.len] = 0;
    json_t *mimes = json_pack("{s:o}", "text/plain", ql_buf_json(&v->text));
    if (mimes && v->html.len) json_object_set_new(mimes, "text/html", ql_buf_json(&v->html));
    if (mimes && data) json_object_set(mimes, QL_MIME, (json_t *)data);
    ql_view_free(v);
    return json_pack("{s:o, s:{}}", "data", mimes, "metadata");
}

void ql_view_free(ql_view *v)
{
    ql_buf_free(&v->text);
    ql_buf_free(&v->html);
}

json_t *ql_view_text(const char *text, const json_t *data)
{
    ql_view v = {0};
    ql_buf_put(&v.text, text);
    ql_buf_put(&v.html, "<pre style=\"line-height:1.35;font-family:monospace\">");
    ql_buf_html(&v.html, text);
    ql_buf_put(&v.html, "</pre>");
    return ql_view_bundle(&v, data);
}

/* ---- tables
 * ---------------------------------------------------------------------------------------- */

void ql_table_begin(ql_table *t, const char *spec, ql_buf *names)
{
    memset(t, 0, sizeof *t);
    ql_buf_clear(names);
    ql_buf_put(names, spec);
    t->plain = 1;
    for (char *p = names->data; p && t->columns < QL_TABLE_COLUMNS;) {
        char *bar = strchr(p, '|');
        if (bar) *bar = 0;
        size_t n = strlen(p);
        int i = t->columns++;
        t->align[i] = n > 0 && p[n - 1] == '>' ? QL_RIGHT : QL_LEFT;
        if (t->align[i] == QL_RIGHT) p[n - 1] = 0;
        t->head[i] = p;
        if (*p) t->plain = 0;
        p = bar ? bar + 1 : NULL;
    }
}

static void table_put(ql_table *t, char *text, char *html)
{
    if (t->filled == 0) {
        size_t n = (size_t)(t->rows + 1) * (size_t)t->columns;
        char **a = realloc(t->text, n * sizeof *a);
        if (a) t->text = a;
        char **b = a ? realloc(t->html, n * sizeof *b) : NULL;
        if (b) t->html = b;
        if (!b)
            t->failed = 1;
        else
            t->rows++;
    }
    if (t->failed || !text) {
        t->failed = 1;
        free(text);
        free(html);
        return;
    }
    size_t i = (size_t)(t->rows - 1) * (size_t)t->columns + (size_t)t->filled;
    t->text[i] = text;
    t->html[i] = html;
    t->filled = (t->filled + 1) % t->columns;
}

void ql_table_cell(ql_table *t, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    table_put(t, vtext(fmt, ap), NULL);
    va_end(ap);
}

void ql_table_cell2(ql_table *t, const char *text, const char *html)
{
    table_put(t, strdup(text), strdup(html));
}

static void table_html(const ql_table *t, ql_buf *b)
{
    ql_buf_put(b, "<table border=\"1\" class=\"dataframe\">\n");
    for (int r = t->plain ? 0 : -1; r < t->rows; r++) {
        if (r < 0)
            ql_buf_put(b, "<thead>");
        else if (r == 0)
            ql_buf_put(b, "<tbody>\n");
        ql_buf_put(b, "<tr style=\"text-align: right;\">");
        for (int c = 0; c < t->columns; c++) {
            const char *tag = r < 0 ? "th" : "td";
            size_t i = r < 0 ? 0 : (size_t)r * (size_t)t->columns + (size_t)c;
            /* Short cells stay on one line; long ones may wrap. */
            int narrow = r >= 0 && ql_text_width(t->text[i]) <= 40;
            ql_buf_printf(b, "<%s style=\"text-align:%s%s\">", tag,
                          t->align[c] == QL_RIGHT ? "right" : "left",
                          narrow ? ";white-space:nowrap" : "");
            if (r < 0)
                ql_buf_html(b, t->head[c]);
            else if (t->html[i])
                ql_buf_put(b, t->html[i]);
            else
                ql_buf_html(b, t->text[i]);
            ql_buf_printf(b, "</%s>", tag);
        }
        ql_buf_put(b, r < 0 ? "</tr></thead>\n" : "</tr>\n");
    }
    ql_buf_put(b, "</tbody></table>\n");
}

/* Widths that fit the page: the widest column gives way, and its cells are wrapped. Returns that
 * column, or -1. */
static int table_widths(const ql_table *t, int *width)
{
    int total = 2 * (t->columns - 1), widest = 0;
    for (int c = 0; c < t->columns; c++) {
        width[c] = ql_text_width(t->head[c]);
        for (int r = 0; r < t->rows; r++) {
            int w = ql_text_width(t->text[(size_t)r * (size_t)t->columns + (size_t)c]);
            if (w > width[c]) width[c] = w;
        }
        total += width[c];
        if (width[c] >= width[widest]) widest = c;
    }
    if (total <= QL_VIEW_COLUMNS) return -1;
    width[widest] -= total - QL_VIEW_COLUMNS;
    if (width[widest] < 8) width[widest] = 8;
    return widest;
}

static void table_line(const ql_table *t, const int *width, int wrapped, const char *const *cells,
                       ql_buf *b)
{
    ql_buf part = {0};
    const char *rest = NULL;
    if (wrapped >= 0) {
        ql_view_wrap(&part, cells[wrapped], width[wrapped], 0);
        rest = ql_buf_str(&part);
    }
    for (int line = 0; line == 0 || (rest && *rest); line++) {
        int last = t->columns;
        while (line > 0 && last > wrapped + 1) last--; /* later lines hold the wrapped cell alone */
        for (int c = 0; c < last; c++) {
            const char *s = c == wrapped ? rest : line == 0 ? cells[c] : "";
            size_t n = c == wrapped ? strcspn(s, "\n") : strlen(s);
            char *piece = strndup(s, n);
            size_t fit = piece ? ql_text_fit(piece, width[c]) : 0;
            if (piece && c == wrapped && fit < n) n = fit; /* one long word: cut, the rest below */
            int pad = piece ? width[c] - ql_text_width(piece) : 0;
            if (c == wrapped && piece) piece[n] = 0, pad = width[c] - ql_text_width(piece);
            if (t->align[c] == QL_RIGHT) ql_buf_pad(b, ' ', pad);
            ql_buf_put(b, piece ? piece : "");
            if (t->align[c] == QL_LEFT && c + 1 < last) ql_buf_pad(b, ' ', pad);
            if (c + 1 < last) ql_buf_put(b, "  ");
            if (c == wrapped) rest += n + (rest[n] == '\n');
            free(piece);
        }
        while (b->len > 0 && b->data[b->len - 1] == ' ') b->data[--b->len] = 0;
        ql_buf_put(b, "\n");
    }
    ql_buf_free(&part);
}

static void table_text(const ql_table *t, ql_buf *b)
{
    int width[QL_TABLE_COLUMNS];
    int wrapped = table_widths(t, width);
    if (!t->plain) {
        table_line(t, width, wrapped, (const char *const *)t->head, b);
        for (int c = 0; c < t->columns; c++) {
            for (int i = 0; i < width[c]; i++) ql_buf_put(b, "─");
            ql_buf_put(b, c + 1 < t->columns ? "  " : "\n");
        }
    }
    for (int r = 0; r < t->rows; r++)
        table_line(t, width, wrapped, (const char *const *)t->text + (size_t)r * (size_t)t->columns,
                   b);
}

void ql_table_end(ql_view *v, ql_table *t)
{
    while (t->filled != 0 && !t->failed) ql_table_cell(t, "%s", "");
    if (!t->failed) {
        table_text(t, &v->text);
        table_html(t, &v->html);
    }
    for (int i = 0; i < t->rows * t->columns && t->text; i++) {
        if (t->filled != 0 && i >= (t->rows - 1) * t->columns + t->filled) break;
        free(t->text[i]);
        free(t->html[i]);
    }
    free(t->text);
    free(t->html);
    memset(t, 0, sizeof *t);
}

/* ---- bars, colours, sparklines
 * ----------------------------------------------------------------------- */

const char *ql_colour(int i)
{
    static const char *const lines[] = {"#2f5bd7", "#e2572b", "#109676", "#a23ba8",
                                        "#b07a12", "#5d6b7b", "#c22a5b", "#3a9ad9"};
    return lines[(unsigned)i % (sizeof lines / sizeof *lines)];
}

const char *ql_category_colour(const char *category)
{
    /* One colour per kind of memory wherever it is drawn; names as in the engine's memory events.
     */
    static const struct {
        const char *part, *colour;
    } known[] = {{"base", "#2f5bd7"},    {"weight", "#2f5bd7"},  {"embed", "#6c8be8"},
                 {"head", "#6c8be8"},    {"gather", "#9db4f2"},  {"scale", "#9db4f2"},
                 {"adapter", "#109676"}, {"lora", "#109676"},    {"grad", "#66c2a8"},
                 {"optim", "#b07a12"},   {"activ", "#e2572b"},   {"saved", "#e2572b"},
                 {"logit", "#f19b7e"},   {"scratch", "#e3c3e8"}, {"work", "#c98bd0"},
                 {"buffer", "#c98bd0"},  {"kv", "#a23ba8"},      {"comm", "#a23ba8"},
                 {"batch", "#d6b15e"},   {"runtime", "#5d6b7b"}, {"outside", "#5d6b7b"},
                 {"other", "#8c98a5"}};
    unsigned sum = 0;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcasestr(category, known[i].part)) return known[i].colour;
    for (const char *p = category; *p; p++) sum = sum * 31 + (unsigned char)*p;
    return ql_colour((int)(sum % 8));
}

void ql_bar(ql_buf *text, ql_buf *html, const ql_part *parts, int n, double whole)
{
    static const char *const shades[] = {"█", "▓", "▒", "░"};
    enum { CELLS = 36, PIXELS = 360 };
    double sum = 0;
    int filled = 0, pixels = 0;
    for (int i = 0; i < n; i++) sum += parts[i].bytes;
    /* A sliver of a large device shows nothing: then the bar is the parts' shares, and the numbers
     * tell the rest. */
    if (!(whole > 0) || sum > whole || sum < whole / 50) whole = sum > 0 ? sum : 1;
    sum = 0;
    ql_buf_put(html, "<div "
                     "style=\"white-space:nowrap;line-height:14px;height:14px;width:360px;"
                     "background-color:#e3e6ea\">");
    for (int i = 0; i < n; i++) {
        sum += parts[i].bytes;
        int cells = (int)lround(sum / whole * CELLS), end = (int)lround(sum / whole * PIXELS);
        for (; filled < cells; filled++) ql_buf_put(text, shades[i % 4]);
        if (end > pixels) {
            ql_buf_printf(html, "<span title=\"");
            ql_buf_html(html, parts[i].name);
            ql_buf_printf(
                html,
                " %s\" "
                "style=\"display:inline-block;height:14px;width:%dpx;background-color:%s\"></span>",
                ql_fmt_bytes(parts[i].bytes).s, end - pixels, parts[i].colour);
            pixels = end;
        }
    }
    for (; filled < CELLS; filled++) ql_buf_put(text, "·");
    ql_buf_put(html, "</div>");
}

void ql_sparkline(ql_buf *text, const double *y, int n, int columns)
{
    static const char *const bars[] = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
    double lo = INFINITY, hi = -INFINITY;
    for (int i = 0; i < n; i++)
        if (isfinite(y[i])) lo = fmin(lo, y[i]), hi = fmax(hi, y[i]);
    if (columns > n) columns = n;
    for (int c = 0; c < columns; c++) {
        double sum = 0;
        int k = 0;
        for (int i = (int)((int64_t)c * n / columns); i < (int)((int64_t)(c + 1) * n / columns);
             i++)
            if (isfinite(y[i])) sum += y[i], k++;
        ql_buf_put(text,
                   k ? bars[hi > lo ? (int)fmin(7, (sum / k - lo) / (hi - lo) * 8) : 3] : " ");
    }
}
