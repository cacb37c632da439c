/* Growing text, and the few formats that every view uses. A ql_buf never fails half-way: when
 * memory runs out it stays valid, drops what does not fit and says so in `failed`. */
#ifndef QL_BUF_H
#define QL_BUF_H

#include "core/qlora.h"

typedef struct {
    char *data; /* NUL-terminated; NULL while empty */
    size_t len, cap;
    int failed;
} ql_buf;

void ql_buf_add(ql_buf *b, const void *text, size_t n);
void ql_buf_put(ql_buf *b, const char *text);
void ql_buf_printf(ql_buf *b, const char *fmt, ...) QL_PRINTF(2, 3);
void ql_buf_pad(ql_buf *b, char c, int n);     /* n times c; n ≤ 0: nothing */
void ql_buf_html(ql_buf *b, const char *text); /* & < > " escaped */
void ql_buf_base64(ql_buf *b, const void *data, size_t n);
void ql_buf_clear(ql_buf *b); /* empty, keeps the memory */
void ql_buf_free(ql_buf *b);
const char *ql_buf_str(const ql_buf *b); /* "" when empty */
json_t *ql_buf_json(const ql_buf *b);    /* as a JSON string; broken UTF-8 is repaired */

/* A JSON string from text that may not be UTF-8: what is broken becomes U+FFFD. */
json_t *ql_text_json(const char *text, size_t n);

/* Columns that a UTF-8 text takes in a terminal. */
int ql_text_width(const char *text);
/* The first bytes of text that fill at most `columns`, whole code points; at least one of them. */
size_t ql_text_fit(const char *text, int columns);

/* Formats into a caller's array, returned for use in an argument list. */
typedef struct {
    char s[48];
} ql_short;
ql_short ql_fmt_bytes(double bytes);  /* "5.63 GiB", "812 MiB", "96 B" */
ql_short ql_fmt_count(double n);      /* "12,345", "8.03 B", "41.9 M" above a million */
ql_short ql_fmt_time(double seconds); /* "0:41", "12:05", "3:07:44" */
ql_short
ql_fmt_num(double x,
           int digits); /* significant digits; "-" when not finite; "2e-4" style below 0.01 */

/* Edit distance with neighbour swaps, for "did you mean": a value above `limit` means "far". */
int ql_text_distance(const char *a, const char *b, int limit);

#endif
