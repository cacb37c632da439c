#include "magics/buf.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int reserve(ql_buf *b, size_t more)
{
    if (b->failed || more > SIZE_MAX / 4 - b->len) return b->failed = 1, 0;
    size_t need = b->len + more + 1, cap = b->cap ? b->cap : 256;
    if (need <= b->cap) return 1;
    while (cap < need) cap *= 2;
    char *p = realloc(b->data, cap);
    if (!p) return b->failed = 1, 0;
    b->data = p;
    b->cap = cap;
    return 1;
}

void ql_buf_add(ql_buf *b, const void *text, size_t n)
{
    if (n == 0 || !reserve(b, n)) return;
    memcpy(b->data + b->len, text, n);
    b->len += n;
    b->data[b->len] = 0;
}

void ql_buf_put(ql_buf *b, const char *text)
{
    ql_buf_add(b, text, strlen(text));
}

void ql_buf_printf(ql_buf *b, const char *fmt, ...)
{
    va_list ap, again;
    va_start(ap, fmt);
    va_copy(again, ap);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    if (n > 0 && reserve(b, (size_t)n)) {
        vsnprintf(b->data + b->len, (size_t)n + 1, fmt, again);
        b->len += (size_t)n;
    }
    va_end(again);
}

void ql_buf_pad(ql_buf *b, char c, int n)
{
    if (n <= 0 || !reserve(b, (size_t)n)) return;
    memset(b->data + b->len, c, (size_t)n);
    b->len += (size_t)n;
    b->data[b->len] = 0;
}

void ql_buf_html(ql_buf *b, const char *text)
{
    for (const char *p = text; *p; p++) {
        switch (*p) {
        case '&': ql_buf_put(b, "&amp;"); break;
        case '<': ql_buf_put(b, "&lt;"); break;
        case '>': ql_buf_put(b, "&gt;"); break;
        case '"': ql_buf_put(b, "&quot;"); break;
        default: /* XML, so an SVG, may not hold other control characters: a browser would show nothing of it */
            if ((unsigned char)*p >= ' ' || *p == '\n' || *p == '\t') ql_buf_add(b, p, 1);
            else ql_buf_put(b, "\xef\xbf\xbd");
        }
    }
}

void ql_buf_base64(ql_buf *b, const void *data, size_t n)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const unsigned char *p = data;
    for (size_t i = 0; i < n; i += 3) {
        unsigned v = (unsigned)p[i] << 16;
        if (i + 1 < n) v |= (unsigned)p[i + 1] << 8;
        if (i + 2 < n) v |= p[i + 2];
        char four[4] = {digits[v >> 18], digits[v >> 12 & 63],
                        i + 1 < n ? digits[v >> 6 & 63] : '=', i + 2 < n ? digits[v & 63] : '='};
        ql_buf_add(b, four, 4);
    }
}

void ql_buf_clear(ql_buf *b)
{
    b->len = 0;
    if (b->data) b->data[0] = 0;
}

void ql_buf_free(ql_buf *b)
{
    free(b->data);
    memset(b, 0, sizeof *b);
}

const char *ql_buf_str(const ql_buf *b)
{
    return b->data ? b->data : "";
}

json_t *ql_buf_json(const ql_buf *b)
{
    return ql_text_json(ql_buf_str(b), b->len);
}

/* Length of the valid UTF-8 sequence at p (at most n bytes), 0 if there is none. */
static size_t utf8_len(const unsigned char *p, size_t n)
{
    size_t want = p[0] < 0x80                   ? 1
                  : p[0] >= 0xc2 && p[0] < 0xe0 ? 2
                  : (p[0] & 0xf0) == 0xe0       ? 3
                  : p[0] >= 0xf0 && p[0] < 0xf5 ? 4
                                                : 0;
    if (want == 0 || want > n) return 0;
    for (size_t i = 1; i < want; i++)
        if ((p[i] & 0xc0) != 0x80) return 0;
    if (want == 3 && ((p[0] == 0xe0 && p[1] < 0xa0) || (p[0] == 0xed && p[1] > 0x9f))) return 0;
    if (want == 4 && ((p[0] == 0xf0 && p[1] < 0x90) || (p[0] == 0xf4 && p[1] > 0x8f))) return 0;
    return want;
}

json_t *ql_text_json(const char *text, size_t n)
{
    json_t *v = json_stringn(text, n); /* NULL for broken UTF-8 */
    if (v) return v;
    ql_buf b = {0};
    for (size_t i = 0; i < n;) {
        size_t k = utf8_len((const unsigned char *)text + i, n - i);
        ql_buf_add(&b, k ? text + i : "\xef\xbf\xbd", k ? k : 3);
        i += k ? k : 1;
    }
    v = json_stringn(ql_buf_str(&b), b.len);
    ql_buf_free(&b);
    return v;
}

/* Of the code point that begins here: 2 where it is as wide as it is high (East Asian letters, emoji), 0 where it joins the one before;
 * and for the bytes that follow a first one. */
static int columns_of(const char *text)
{
    static const uint32_t wide[][2] = {{0x1100, 0x115f}, {0x2e80, 0x303e}, {0x3041, 0xa4cf}, {0xac00, 0xd7a3}, {0xf900, 0xfaff},
                                       {0xfe30, 0xfe6f}, {0xff00, 0xff60}, {0xffe0, 0xffe6}, {0x1f300, 0x1faff}, {0x20000, 0x3fffd}};
    static const uint32_t none[][2] = {{0x300, 0x36f}, {0x200b, 0x200d}, {0xfe00, 0xfe0f}};
    const unsigned char *p = (const unsigned char *)text;
    int n = *p >= 0xf0 ? 3 : *p >= 0xe0 ? 2 : *p >= 0xc0, follow = 0;
    uint32_t c = n ? *p & (0x3fu >> n) : *p;
    if ((*p & 0xc0) == 0x80) return 0;
    while (follow < n && (p[follow + 1] & 0xc0) == 0x80) c = c << 6 | (p[++follow] & 0x3f);
    if (follow < n) return 1;
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++)
        if (c >= wide[i][0] && c <= wide[i][1]) return 2;
    for (size_t i = 0; i < sizeof none / sizeof *none; i++)
        if (c >= none[i][0] && c <= none[i][1]) return 0;
    return 1;
}

int ql_text_width(const char *text)
{
    int n = 0;
    for (; *text; text++) n += columns_of(text);
    return n;
}

size_t ql_text_fit(const char *text, int columns)
{
    size_t i = 0;
    for (int n = 0; text[i]; i++) {
        int w = columns_of(text + i);
        if (w && n + w > columns && (i || columns < 1)) break;
        n += w;
    }
    return i;
}

ql_short ql_fmt_bytes(double bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    ql_short r;
    int u = 0;
    double x = bytes;
    while (fabs(x) >= 1023.995 && u < 4) x /= 1024, u++;
    int digits = u == 0 ? 0 : fabs(x) < 9.995 ? 2 : fabs(x) < 99.95 ? 1 : 0;
    snprintf(r.s, sizeof r.s, "%.*f %s", digits, x, units[u]);
    return r;
}

ql_short ql_fmt_count(double n)
{
    ql_short r;
    if (!isfinite(n)) {
        snprintf(r.s, sizeof r.s, "-");
    } else if (fabs(n) >= 1e9) {
        snprintf(r.s, sizeof r.s, "%.2f B", n / 1e9);
    } else if (fabs(n) >= 1e6) {
        snprintf(r.s, sizeof r.s,
                 fabs(n) >= 99.95e6   ? "%.0f M"
                 : fabs(n) >= 9.995e6 ? "%.1f M"
                                      : "%.2f M",
                 n / 1e6);
    } else {
        long long v = llround(n);
        if (llabs(v) >= 1000)
            snprintf(r.s, sizeof r.s, "%lld,%03lld", v / 1000, llabs(v) % 1000);
        else
            snprintf(r.s, sizeof r.s, "%lld", v);
    }
    return r;
}

ql_short ql_fmt_time(double seconds)
{
    ql_short r;
    if (!isfinite(seconds) || seconds < 0 || seconds > 1e9) {
        snprintf(r.s, sizeof r.s, "-");
        return r;
    }
    long long s = llround(seconds);
    if (s >= 3600)
        snprintf(r.s, sizeof r.s, "%lld:%02lld:%02lld", s / 3600, s / 60 % 60, s % 60);
    else
        snprintf(r.s, sizeof r.s, "%02lld:%02lld", s / 60, s % 60);
    return r;
}

ql_short ql_fmt_num(double x, int digits)
{
    ql_short r;
    if (!isfinite(x)) {
        snprintf(r.s, sizeof r.s, "-");
        return r;
    }
    int small = x != 0 && fabs(x) < 1e-2;
    snprintf(r.s, sizeof r.s, small ? "%.*e" : "%.*g", small ? digits - 1 : digits, x);
    /* "2.00e-04" → "2e-4", "1.5e+07" → "1.5e7" */
    char *e = strchr(r.s, 'e');
    if (e) {
        char *m = e;
        while (strchr(r.s, '.') && (m[-1] == '0' || m[-1] == '.') && m > r.s + 1)
            if (*--m == '.') break;
        memmove(m, e, strlen(e) + 1);
        e = m;
        char *from = e + 1, *to = e + 1;
        if (*from == '-')
            from++, to++;
        else if (*from == '+')
            from++;
        while (*from == '0' && from[1]) from++;
        memmove(to, from, strlen(from) + 1);
    }
    return r;
}

int ql_text_distance(const char *a, const char *b, int limit)
{
    enum { LONGEST = 64 };
    int n = (int)strnlen(a, LONGEST + 1), m = (int)strnlen(b, LONGEST + 1);
    int d[3][LONGEST + 1];
    if (n > LONGEST || m > LONGEST || abs(n - m) > limit) return limit + 1;
    for (int j = 0; j <= m; j++) d[0][j] = j;
    for (int i = 1; i <= n; i++) {
        int *row = d[i % 3], *up = d[(i + 2) % 3], *up2 = d[(i + 1) % 3];
        row[0] = i;
        for (int j = 1; j <= m; j++) {
            int best = up[j - 1] + (a[i - 1] != b[j - 1]);
            if (up[j] + 1 < best) best = up[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] &&
                up2[j - 2] + 1 < best)
                best = up2[j - 2] + 1;
            row[j] = best;
        }
    }
    return d[n % 3][m] > limit ? limit + 1 : d[n % 3][m];
}
