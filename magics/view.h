/* Views: what is known, as text/plain of at most 80 columns and as HTML that survives JupyterLab's
 * sanitizer, nbconvert and GitHub (tables of class "dataframe", <progress>, <meter>, <img>, style
 * attributes). */
#ifndef QL_VIEW_H
#define QL_VIEW_H

#include "magics/buf.h"
#include "magics/magics.h"

enum { QL_VIEW_COLUMNS = 80 };
#define QL_MIME "application/vnd.qlora.v1+json"

typedef struct {
    ql_buf text, html;
} ql_view;

/* ---- pieces; each adds to both forms ---- */
void ql_view_title(ql_view *v, const char *what, const char *fmt, ...)
    QL_PRINTF(3, 4); /* bold, then quieter words */
void ql_view_note(ql_view *v, const char *fmt, ...)
    QL_PRINTF(2, 3);                             /* a quiet line; wrapped in text */
void ql_view_warn(ql_view *v, const char *text); /* a line that must be seen */
void ql_view_code(ql_view *v, const char *text); /* something to paste */
void ql_view_setting(ql_buf *b, const json_t *value); /* a setting's value as it is written */
/* A line whose two forms differ. */
void ql_view_both(ql_view *v, const char *text, const char *html);

/* text wrapped at blanks to `columns`, later lines indented. */
void ql_view_wrap(ql_buf *b, const char *text, int columns, int indent);

/* {"data": {text/plain, text/html, QL_MIME}, "metadata": {}}; data: borrowed, may be NULL. Empties
 * v. */
json_t *ql_view_bundle(ql_view *v, const json_t *data);
void ql_view_free(ql_view *v);

/* ---- tables ---- */
enum { QL_TABLE_COLUMNS = 12 };
typedef enum { QL_LEFT, QL_RIGHT } ql_align;
typedef struct {
    const char *head[QL_TABLE_COLUMNS];
    ql_align align[QL_TABLE_COLUMNS];
    int columns, rows, filled;
    int plain;           /* no header line */
    char **text, **html; /* rows × columns; html NULL: the text, escaped */
    int failed;
} ql_table;
/* spec: "step>|loss>|name": a column that ends in > stands at the right. "" heads only: no header.
 */
void ql_table_begin(ql_table *t, const char *spec, ql_buf *names);
void ql_table_cell(ql_table *t, const char *fmt, ...) QL_PRINTF(2, 3);
void ql_table_cell2(ql_table *t, const char *text, const char *html); /* its own HTML */
void ql_table_end(ql_view *v, ql_table *t); /* adds it to the view and frees it */

/* ---- small pictures in text and HTML ---- */
typedef struct {
    const char *name;
    double bytes;
    const char *colour;
} ql_part;
/* A stacked bar of parts against a whole: block characters, and coloured boxes. */
void ql_bar(ql_buf *text, ql_buf *html, const ql_part *parts, int n, double whole);
const char *ql_colour(int i); /* the house's line colours, in order */
const char *ql_category_colour(const char *category);
void ql_sparkline(ql_buf *text, const double *y, int n, int columns);

/* ---- charts: one description, drawn as PNG by the host, as SVG and as dots here ---- */
/* {"title", "width", "height", "panels": [{"ylabel", "xlabel", "weight", "zero": bool, "log": bool,
 * "floor": bool, "series": [{"name", "x": […], "y": [… or null], "colour", "kind":
 * "line"|"wide"|"faint"|"dots"|"cross"|"stack"}], "text": a note in the corner, "ymax": the axis reaches at least so far}]}
 * "stack" is filled between "low" and "y"; "label" stands in place of its name in the legend, "legend": "right" beside the chart. */
json_t *ql_chart_runs(const json_t *runs, const char *metric,
                      int diff); /* runs: [{"name","history":[…]}] */
json_t *ql_chart_memory(const json_t *run);
ql_status ql_chart_svg(const json_t *chart, ql_buf *svg);
void ql_chart_text(const json_t *chart, ql_buf *text); /* braille dots, ≤ 80 columns */
/* As a bundle: image/png where the host draws, else SVG in an <img>. */
ql_status ql_chart_bundle(const ql_host *host, const json_t *chart, const json_t *data,
                          json_t **bundle);

/* ---- one view per report ---- */
json_t *ql_view_info(const json_t *info);
json_t *ql_view_bench(const json_t *bench);
json_t *ql_view_model(const json_t *model);
json_t *ql_view_config(const ql_job *job, const json_t *model, const json_t *notes, int64_t world,
                       int all);
json_t *ql_view_data(const json_t *report);
json_t *ql_view_plan(const json_t *plan, const char *on);
json_t *ql_view_memory(const json_t *event);
json_t *ql_view_generated(const json_t *prompts, const json_t *result);
json_t *ql_view_verify(const json_t *result);
json_t *ql_view_eval(const json_t *record);
json_t *ql_view_text(const char *text, const json_t *data); /* preformatted */

/* ---- JSON without ceremony ---- */
const char *ql_jstr(const json_t *o, const char *key, const char *def);
double ql_jnum(const json_t *o, const char *key,
               double def); /* def (often NAN) when absent or null */
int64_t ql_jint(const json_t *o, const char *key, int64_t def);

#endif
