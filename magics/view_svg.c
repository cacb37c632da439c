/* Charts drawn here: as SVG, and as braille dots for terminals. */
#include "magics/view.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FONT  "system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',Helvetica,Arial,sans-serif"
#define INK   "#1f2933"
#define QUIET "#66727f"
#define GRID  "#e7eaee"

typedef struct {
    double lo, hi;
} range;

typedef struct {
    double x, y, w, h; /* the panel's frame, in pixels */
    range xr, yr;
} frame;

static void extend(range *r, double v)
{
    if (!isfinite(v)) return;
    r->lo = fmin(r->lo, v);
    r->hi = fmax(r->hi, v);
}

static double item(const json_t *array, size_t i)
{
    const json_t *v = json_array_get(array, i);
    return json_is_number(v) ? json_number_value(v) : (double)NAN;
}

static range x_range(const json_t *chart)
{
    range r = {INFINITY, -INFINITY};
    size_t p, s;
    const json_t *panel, *series;
    json_array_foreach(json_object_get(chart, "panels"), p, panel) json_array_foreach(
        json_object_get(panel, "series"), s,
        series) for (size_t i = 0; i < json_array_size(json_object_get(series, "x")); i++)
        extend(&r, item(json_object_get(series, "x"), i));
    extend(&r, ql_jnum(chart, "xmin", (double)NAN));
    extend(&r, ql_jnum(chart, "xmax", (double)NAN));
    if (!(r.lo <= r.hi)) r.lo = 0, r.hi = 1;
    if (r.lo == r.hi) r.lo -= 0.5 + fabs(r.lo) * 1e-9, r.hi += 0.5 + fabs(r.hi) * 1e-9;
    return r;
}

static range y_range(const json_t *panel)
{
    range r = {INFINITY, -INFINITY};
    size_t s;
    const json_t *series;
    json_array_foreach(json_object_get(panel, "series"), s,
                       series) for (size_t i = 0; i < json_array_size(json_object_get(series, "y"));
                                    i++) extend(&r, item(json_object_get(series, "y"), i));
    extend(&r, ql_jnum(panel, "ymax", (double)NAN));
    int floor_at_zero = json_is_true(json_object_get(panel, "floor"));
    if (floor_at_zero || json_is_true(json_object_get(panel, "zero"))) extend(&r, 0);
    if (!(r.lo <= r.hi)) r.lo = 0, r.hi = 1;
    double pad = (r.hi - r.lo) * 0.06;
    if (!(pad > 0)) pad = fmax(fabs(r.hi) * 0.05, 1e-6);
    if (!(floor_at_zero && r.lo == 0)) r.lo -= pad;
    r.hi += pad;
    return r;
}

/* The step of a scale with at most n ticks: 1, 2 or 5 times a power of ten. */
static double tick_step(range r, int n, int whole)
{
    double raw = (r.hi - r.lo) / n, p = pow(10, floor(log10(raw))), f = raw / p;
    double step = (f <= 1 ? 1 : f <= 2 ? 2 : f <= 5 ? 5 : 10) * p;
    return whole && step < 1 ? 1 : step;
}

static ql_short tick_text(double v, double step)
{
    ql_short s;
    double big = fmax(fabs(v), step);
    if (fabs(v) < step * 1e-6) v = 0;
    if (v == 0 || big >= 1e6 || step < 1e-3) return ql_fmt_num(v, 3);
    if (fabs(v) >= 1000 && step >= 1) return ql_fmt_count(v);
    int decimals = step >= 1 ? 0 : (int)ceil(-log10(step) - 1e-9);
    snprintf(s.s, sizeof s.s, "%.*f", decimals > 9 ? 9 : decimals, v);
    return s;
}

static double px(const frame *f, double v)
{
    return f->x + (v - f->xr.lo) / (f->xr.hi - f->xr.lo) * f->w;
}

static double py(const frame *f, double v)
{
    return f->y + f->h - (v - f->yr.lo) / (f->yr.hi - f->yr.lo) * f->h;
}

static void axes(ql_buf *b, const frame *f, const json_t *panel, const char *xlabel, int last)
{
    int flat = json_is_true(json_object_get(panel, "flat"));
    double step = flat ? 2 * f->yr.hi : tick_step(f->yr, f->h > 120 ? 5 : 3, 0); /* flat: 0 alone */
    double first = ceil(f->yr.lo / step - 1e-9) * step;
    for (int k = 0; k < 16 && first + k * step <= f->yr.hi + step * 1e-9; k++) {
        double v = first + k * step, y = py(f, v);
        ql_buf_printf(b,
                      "<line x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"" GRID "\"/>",
                      f->x, f->x + f->w, y, y);
        ql_buf_printf(b, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">%s</text>", f->x - 7,
                      y + 3.5, tick_text(v, step).s);
    }
    if (json_is_true(json_object_get(panel, "zero")))
        ql_buf_printf(b,
                      "<line x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"#aab3bd\"/>",
                      f->x, f->x + f->w, py(f, 0), py(f, 0));
    ql_buf_printf(
        b,
        "<text x=\"%.1f\" y=\"%.1f\" transform=\"rotate(-90 %.1f %.1f)\" text-anchor=\"middle\">",
        14.0, f->y + f->h / 2, 14.0, f->y + f->h / 2);
    ql_buf_html(b, ql_jstr(panel, "ylabel", ""));
    ql_buf_put(b, "</text>");
    const char *note = ql_jstr(panel, "text", NULL);
    if (note) {
        ql_buf_printf(b, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\" fill=\"" INK "\" "
                         "stroke=\"#fff\" stroke-width=\"4\" paint-order=\"stroke\">", /* no line of the grid through the words */
                      f->x + f->w - 6, f->y + 13);
        ql_buf_html(b, note);
        ql_buf_put(b, "</text>");
    }
    ql_buf_printf(b, "<line x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"#aab3bd\"/>",
                  f->x, f->x + f->w, f->y + f->h, f->y + f->h);
    if (!last) return;
    step = tick_step(f->xr, 8, 1);
    first = ceil(f->xr.lo / step - 1e-9) * step;
    for (int k = 0; k < 16 && first + k * step <= f->xr.hi + step * 1e-9; k++)
        ql_buf_printf(b, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%s</text>",
                      px(f, first + k * step), f->y + f->h + 15,
                      tick_text(first + k * step, step).s);
    ql_buf_printf(b, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">", f->x + f->w / 2,
                  f->y + f->h + 31);
    ql_buf_html(b, xlabel);
    ql_buf_put(b, "</text>");
}

static void path(ql_buf *b, const frame *f, const json_t *xs, const json_t *ys)
{
    int open = 0;
    for (size_t i = 0; i < json_array_size(xs); i++) {
        double x = item(xs, i), y = item(ys, i);
        if (!isfinite(x) || !isfinite(y)) {
            open = 0;
            continue;
        }
        ql_buf_printf(b, "%c%.1f %.1f", open ? 'L' : 'M', px(f, x), py(f, y));
        if (!open) ql_buf_put(b, "h.01"); /* so that a point without neighbours is a dot */
        open = 1;
    }
}

static void marks(ql_buf *b, const frame *f, const json_t *xs, const json_t *ys, const char *colour,
                  int cross)
{
    for (size_t i = 0; i < json_array_size(xs); i++) {
        double x = px(f, item(xs, i)), y = py(f, item(ys, i));
        if (!isfinite(x) || !isfinite(y)) continue;
        if (cross)
            ql_buf_printf(
                b, "<path d=\"M%.1f %.1fl7 7m0 -7l-7 7\" stroke=\"%s\" stroke-width=\"1.6\"/>",
                x - 3.5, y - 3.5, colour);
        else
            ql_buf_printf(b,
                          "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3.6\" fill=\"#fff\" stroke=\"%s\" "
                          "stroke-width=\"1.8\"/>",
                          x, y, colour);
    }
}

static void stack(ql_buf *b, const frame *f, const json_t *s)
{
    const json_t *xs = json_object_get(s, "x"), *ys = json_object_get(s, "y"), *low = json_object_get(s, "low");
    size_t n = json_array_size(xs);
    ql_buf_printf(b, "<path fill=\"%s\" d=\"M", ql_jstr(s, "colour", INK));
    for (size_t i = 0; i < n; i++) ql_buf_printf(b, "%s%.1f %.1f", i ? "L" : "", px(f, item(xs, i)), py(f, item(ys, i)));
    for (size_t i = n; i-- > 0;) ql_buf_printf(b, "L%.1f %.1f", px(f, item(xs, i)), py(f, item(low, i)));
    ql_buf_put(b, "Z\"/>");
}

static void draw_series(ql_buf *b, const frame *f, const json_t *s)
{
    const json_t *xs = json_object_get(s, "x"), *ys = json_object_get(s, "y");
    const char *kind = ql_jstr(s, "kind", "line"), *colour = ql_jstr(s, "colour", INK);
    if (strcmp(kind, "dots") == 0 || strcmp(kind, "cross") == 0) {
        marks(b, f, xs, ys, colour, kind[0] == 'c');
        return;
    }
    if (strcmp(kind, "stack") == 0) {
        stack(b, f, s);
        return;
    }
    int faint = strcmp(kind, "faint") == 0, wide = strcmp(kind, "wide") == 0;
    ql_buf_printf(b,
                  "<path fill=\"none\" stroke=\"%s\" stroke-width=\"%s\" stroke-opacity=\"%s\" "
                  "stroke-linejoin=\"round\" "
                  "stroke-linecap=\"round\" d=\"",
                  colour,
                  faint  ? "1"
                  : wide ? "5"
                         : "1.8",
                  faint  ? "0.28"
                  : wide ? "0.35"
                         : "1");
    path(b, f, xs, ys);
    ql_buf_put(b, "\"/>");
}

/* An earlier curve has the same name: one entry is enough. */
static int repeated(const json_t *all, size_t i)
{
    const char *name = ql_jstr(json_array_get(all, i), "name", "");
    for (size_t k = 0; k < i; k++) {
        const json_t *s = json_array_get(all, k);
        if (strcmp(ql_jstr(s, "kind", ""), "faint") != 0 &&
            strcmp(ql_jstr(s, "name", ""), name) == 0)
            return 1;
    }
    return 0;
}

/* Names at the top right, in the order of the curves, right to left. */
static void legend(ql_buf *b, const json_t *panel, double right, double y)
{
    const json_t *all = json_object_get(panel, "series");
    double x = right;
    for (size_t i = json_array_size(all); i-- > 0;) {
        const json_t *s = json_array_get(all, i);
        const char *kind = ql_jstr(s, "kind", "line"), *colour = ql_jstr(s, "colour", INK),
                   *name = ql_jstr(s, "name", "");
        if (strcmp(kind, "faint") == 0 || x < 160 || repeated(all, i)) continue;
        char label[64];
        snprintf(label, sizeof label, "%.*s", (int)ql_text_fit(name, 28), name);
        ql_buf_printf(b, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\" fill=\"" INK "\">", x, y);
        ql_buf_html(b, label);
        ql_buf_put(b, "</text>");
        x -= ql_text_width(label) * 6.3 + 8;
        if (strcmp(kind, "dots") == 0)
            ql_buf_printf(b,
                          "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3.4\" fill=\"#fff\" stroke=\"%s\" "
                          "stroke-width=\"1.8\"/>",
                          x - 6, y - 4, colour);
        else if (strcmp(kind, "cross") == 0)
            ql_buf_printf(
                b, "<path d=\"M%.1f %.1fl6 6m0 -6l-6 6\" stroke=\"%s\" stroke-width=\"1.6\"/>",
                x - 9, y - 7, colour);
        else
            ql_buf_printf(b,
                          "<path d=\"M%.1f %.1fh14\" stroke=\"%s\" stroke-width=\"%s\" "
                          "stroke-opacity=\"%s\" stroke-linecap=\"round\"/>",
                          x - 16, y - 4, colour, strcmp(kind, "wide") == 0 ? "5" : "2.4",
                          strcmp(kind, "wide") == 0 ? "0.35" : "1");
        x -= 30;
    }
}

/* Beside the chart, in the order of the stack. */
static void legend_right(ql_buf *b, const json_t *panel, double x, double y)
{
    const json_t *all = json_object_get(panel, "series");
    for (size_t i = json_array_size(all); i-- > 0; y += 18) {
        const json_t *s = json_array_get(all, i);
        ql_buf_printf(b, "<rect x=\"%.1f\" y=\"%.1f\" width=\"10\" height=\"10\" fill=\"%s\"/><text x=\"%.1f\" y=\"%.1f\" fill=\"" INK "\">",
                      x, y - 9, ql_jstr(s, "colour", INK), x + 16, y);
        ql_buf_html(b, ql_jstr(s, "label", ql_jstr(s, "name", "")));
        ql_buf_put(b, "</text>");
    }
}

ql_status ql_chart_svg(const json_t *chart, ql_buf *b)
{
    double width = ql_jnum(chart, "width", 720), height = ql_jnum(chart, "height", 280),
           weights = 0, y = 40;
    const json_t *panels = json_object_get(chart, "panels"), *panel, *series;
    size_t p, s, n = json_array_size(panels);
    json_array_foreach((json_t *)panels, p, panel) weights += ql_jnum(panel, "weight", 1);
    if (n == 0 || !(weights > 0)) QL_FAIL(QL_EINTERNAL, "a chart without panels");
    double room = height - 40 - 42 - 18.0 * (double)(n - 1);
    ql_buf_printf(b,
                  "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" "
                  "viewBox=\"0 0 %.0f %.0f\" "
                  "font-family=\"" FONT "\" font-size=\"11\" fill=\"" QUIET "\">"
                  "<rect width=\"%.0f\" height=\"%.0f\" rx=\"6\" fill=\"#ffffff\"/>",
                  width, height, width, height, width, height);
    ql_buf_put(b, "<text x=\"58\" y=\"24\" font-size=\"13\" font-weight=\"600\" fill=\"" INK "\">");
    ql_buf_html(b, ql_jstr(chart, "title", ""));
    ql_buf_put(b, "</text>");
    int beside = strcmp(ql_jstr(chart, "legend", ""), "right") == 0;
    double right = beside ? 168 : 18;
    if (beside)
        legend_right(b, json_array_get(panels, 0), width - right + 14, 52);
    else
        legend(b, json_array_get(panels, 0), width - right, 24);
    json_array_foreach((json_t *)panels, p, panel)
    {
        frame f = {58,
                   y,
                   width - 58 - right,
                   room * ql_jnum(panel, "weight", 1) / weights,
                   x_range(chart),
                   y_range(panel)};
        axes(b, &f, panel, ql_jstr(chart, "xlabel", "step"), p + 1 == n);
        json_array_foreach(json_object_get(panel, "series"), s, series) draw_series(b, &f, series);
        y += f.h + 18;
    }
    ql_buf_put(b, "</svg>");
    if (b->failed) QL_FAIL(QL_ENOMEM, "no memory for a chart");
    return QL_OK;
}

/* ---- dots
 * -------------------------------------------------------------------------------------------- */

enum { DOT_COLUMNS = 66, DOT_ROWS_MAX = 12 };

static int is_curve(const json_t *series)
{
    const char *kind = ql_jstr(series, "kind", "line");
    return strcmp(kind, "line") == 0 || strcmp(kind, "wide") == 0 || strcmp(kind, "stack") == 0;
}

static void dot(unsigned char cells[DOT_ROWS_MAX][DOT_COLUMNS], int rows, double fx, double fy)
{
    static const unsigned char bit[4][2] = {{0x01, 0x08}, {0x02, 0x10}, {0x04, 0x20}, {0x40, 0x80}};
    int x = (int)lround(fx * (DOT_COLUMNS * 2 - 1)), y = (int)lround((1 - fy) * (rows * 4 - 1));
    if (x < 0 || y < 0 || x >= DOT_COLUMNS * 2 || y >= rows * 4) return;
    cells[y / 4][x / 2] |= bit[y % 4][x % 2];
}

static void dot_series(unsigned char cells[DOT_ROWS_MAX][DOT_COLUMNS], int rows, const json_t *s,
                       range xr, range yr)
{
    const json_t *xs = json_object_get(s, "x"), *ys = json_object_get(s, "y");
    double px0 = (double)NAN, py0 = (double)NAN;
    int joined = is_curve(s);
    for (size_t i = 0; i < json_array_size(xs); i++) {
        double x = (item(xs, i) - xr.lo) / (xr.hi - xr.lo),
               y = (item(ys, i) - yr.lo) / (yr.hi - yr.lo);
        int steps = joined && isfinite(px0 + py0 + x + y)
                        ? 1 + (int)(fabs(x - px0) * DOT_COLUMNS * 2 + fabs(y - py0) * rows * 4)
                        : 1;
        for (int k = 1; k <= steps && isfinite(x + y); k++) {
            double t = (double)k / steps;
            dot(cells, rows, steps == 1 ? x : px0 + (x - px0) * t,
                steps == 1 ? y : py0 + (y - py0) * t);
        }
        px0 = x, py0 = y;
    }
}

static void dot_panel(const json_t *panel, range xr, int rows, ql_buf *text)
{
    unsigned char cells[DOT_ROWS_MAX][DOT_COLUMNS] = {{0}};
    range yr = y_range(panel);
    size_t s;
    const json_t *series;
    json_array_foreach(json_object_get(panel, "series"), s,
                       series)
    {
        int stacked = strcmp(ql_jstr(series, "kind", "line"), "stack") == 0, last = s + 1 == json_array_size(json_object_get(panel, "series"));
        if (strcmp(ql_jstr(series, "kind", "line"), "faint") != 0 && (!stacked || last)) dot_series(cells, rows, series, xr, yr); /* of a stack: the sum */
    }
    double step = (yr.hi - yr.lo) / 50; /* finer than a row: labels show what a row stands for */
    int flat = json_is_true(json_object_get(panel, "flat"));
    for (int r = 0; r < rows; r++) {
        double v = flat ? (r == rows / 2 ? 0 : (double)NAN) : r == 0 ? yr.hi : r == rows - 1 ? yr.lo : (double)NAN;
        ql_buf_printf(text, "%9s ┤",
                      isfinite(v) ? tick_text(v, pow(10, floor(log10(step)))).s : "");
        int last = DOT_COLUMNS;
        while (last > 0 && !cells[r][last - 1]) last--;
        for (int c = 0; c < last; c++) {
            char utf8[4] = {(char)0xe2, (char)(0xa0 | cells[r][c] >> 6),
                            (char)(0x80 | (cells[r][c] & 0x3f)), 0};
            ql_buf_put(text, utf8);
        }
        ql_buf_put(text, "\n");
    }
}

/* One of a list of words that wraps. */
static void text_item(ql_buf *text, int *column, const char *part)
{
    if ((*column += ql_text_width(part)) > 78) ql_buf_put(text, "\n "), *column = 1 + ql_text_width(part);
    ql_buf_put(text, part);
}

void ql_chart_text(const json_t *chart, ql_buf *text)
{
    const json_t *panels = json_object_get(chart, "panels"), *panel, *s;
    range xr = x_range(chart);
    size_t p, i;
    int column = ql_text_width(ql_jstr(chart, "title", ""));
    ql_buf_printf(text, "%s", ql_jstr(chart, "title", ""));
    json_array_foreach(json_object_get(json_array_get(panels, 0), "series"), i, s)
    {
        const char *name = ql_jstr(s, "name", "");
        double last = (double)NAN;
        const json_t *ys = json_object_get(s, "y");
        char part[96];
        if (!is_curve(s)) continue;
        if (json_object_get(s, "label")) { /* it has its figure */
            snprintf(part, sizeof part, " · %.80s", ql_jstr(s, "label", ""));
            text_item(text, &column, part);
            continue;
        }
        for (size_t k = json_array_size(ys); k-- > 0 && !isfinite(last);) last = item(ys, k);
        snprintf(part, sizeof part, " · %.*s %s", (int)ql_text_fit(name, 30), name,
                 ql_fmt_num(last, 5).s);
        text_item(text, &column, part);
    }
    ql_buf_put(text, "\n");
    json_array_foreach((json_t *)panels, p, panel)
    {
        const char *label = ql_jstr(panel, "ylabel", ""), *note = ql_jstr(panel, "text", "");
        int alike = p == 0 ? json_array_size(panels) > 1 && ql_jnum(json_array_get(panels, 1), "weight", 1) >= 1 : ql_jnum(panel, "weight", 1) >= 1; /* a panel per device, not a difference below */
        if ((p > 0 || alike) && (*label || *note)) ql_buf_printf(text, "%s%s%s\n", label, *label ? ": " : "", note);
        dot_panel(panel, xr, json_array_size(panels) > 1 && alike ? 5 : p == 0 ? 10 : 4, text);
    }
    ql_buf_pad(text, ' ', 10);
    ql_buf_put(text, "└");
    for (int c = 0; c < DOT_COLUMNS; c++) ql_buf_put(text, "─");
    ql_short lo = tick_text(xr.lo, 1), hi = tick_text(xr.hi, 1);
    const char *xlabel = ql_jstr(chart, "xlabel", "step");
    int pad = DOT_COLUMNS - ql_text_width(lo.s) - ql_text_width(hi.s) - ql_text_width(xlabel);
    ql_buf_put(text, "\n");
    ql_buf_pad(text, ' ', 11);
    ql_buf_put(text, lo.s);
    ql_buf_pad(text, ' ', pad / 2);
    ql_buf_put(text, xlabel);
    ql_buf_pad(text, ' ', pad - pad / 2);
    ql_buf_printf(text, "%s\n", hi.s);
}
