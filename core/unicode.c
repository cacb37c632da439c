#include "core/unicode.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- growable strings -------------------------------------------------------------------------- */

ql_status ql_str_reserve(ql_str *s, size_t more)
{
    if (more > SIZE_MAX / 4 || s->len > SIZE_MAX / 4) QL_FAIL(QL_ENOMEM, "text too long");
    size_t need = s->len + more + 1;
    if (need <= s->cap) return QL_OK;
    size_t cap = s->cap ? s->cap : 64;
    while (cap < need) cap *= 2;
    char *p = realloc(s->data, cap);
    if (!p) QL_FAIL(QL_ENOMEM, "no memory for %zu bytes of text", cap);
    p[s->len] = 0;
    s->data = p, s->cap = cap;
    return QL_OK;
}

ql_status ql_str_add(ql_str *s, const char *p, size_t n)
{
    QL_TRY(ql_str_reserve(s, n));
    if (n) memcpy(s->data + s->len, p, n);
    s->len += n;
    s->data[s->len] = 0;
    return QL_OK;
}

ql_status ql_str_puts(ql_str *s, const char *z)
{
    return ql_str_add(s, z, strlen(z));
}

ql_status ql_str_printf(ql_str *s, const char *fmt, ...)
{
    va_list ap, again;
    va_start(ap, fmt);
    va_copy(again, ap);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    ql_status st = n < 0 ? ql_fail(QL_EINTERNAL, "vsnprintf failed") : ql_str_reserve(s, (size_t)n);
    if (st == QL_OK) {
        vsnprintf(s->data + s->len, (size_t)n + 1, fmt, again);
        s->len += (size_t)n;
    }
    va_end(again);
    return st;
}

void ql_str_clear(ql_str *s)
{
    s->len = 0;
    if (s->data) s->data[0] = 0;
}

void ql_str_free(ql_str *s)
{
    free(s->data);
    *s = (ql_str){0};
}

/* ---- UTF-8 ------------------------------------------------------------------------------------- */

int ql_utf8_put(uint32_t c, char out[4])
{
    unsigned char *o = (unsigned char *)out;
    if (c < 0x80) return o[0] = (unsigned char)c, 1;
    if (c < 0x800) {
        o[0] = (unsigned char)(0xc0 | c >> 6), o[1] = (unsigned char)(0x80 | (c & 63));
        return 2;
    }
    if (c < 0x10000) {
        o[0] = (unsigned char)(0xe0 | c >> 12), o[1] = (unsigned char)(0x80 | (c >> 6 & 63));
        o[2] = (unsigned char)(0x80 | (c & 63));
        return 3;
    }
    o[0] = (unsigned char)(0xf0 | c >> 18), o[1] = (unsigned char)(0x80 | (c >> 12 & 63));
    o[2] = (unsigned char)(0x80 | (c >> 6 & 63)), o[3] = (unsigned char)(0x80 | (c & 63));
    return 4;
}

/* The well-formed sequence at p: its length, or minus the length of the maximal ill-formed part
 * (Unicode table 3-7: only the second byte's range depends on the first). */
static int sequence(const unsigned char *p, size_t n)
{
    unsigned c = p[0], lo = 0x80, hi = 0xbf;
    int len;
    if (c < 0x80) return 1;
    if (c < 0xc2 || c > 0xf4) return -1;
    len = c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
    if (c == 0xe0) lo = 0xa0;
    if (c == 0xed) hi = 0x9f;
    if (c == 0xf0) lo = 0x90;
    if (c == 0xf4) hi = 0x8f;
    for (int i = 1; i < len; i++) {
        if ((size_t)i >= n || p[i] < lo || p[i] > hi) return -i;
        lo = 0x80, hi = 0xbf;
    }
    return len;
}

size_t ql_utf8_valid(const char *text, size_t n)
{
    const unsigned char *p = (const unsigned char *)text;
    size_t i = 0;
    while (i < n) {
        uint64_t word;
        if (n - i >= 8 && (memcpy(&word, p + i, 8), !(word & 0x8080808080808080u))) {
            i += 8;
            continue;
        }
        int len = sequence(p + i, n - i);
        if (len < 0) break;
        i += (size_t)len;
    }
    return i;
}

ql_status ql_utf8_repair(const char *p, size_t n, ql_str *out)
{
    while (n) {
        size_t good = ql_utf8_valid(p, n);
        QL_TRY(ql_str_add(out, p, good));
        p += good, n -= good;
        if (!n) break;
        size_t bad = (size_t)-sequence((const unsigned char *)p, n);
        QL_TRY(ql_str_add(out, "\xef\xbf\xbd", 3));
        p += bad, n -= bad;
    }
    return QL_OK;
}

/* ---- Normalisation Form C ---------------------------------------------------------------------- */

enum { HANGUL = 0xac00, HANGUL_N = 11172, JAMO_L = 0x1100, JAMO_V = 0x1161, JAMO_T = 0x11a7 };

static unsigned combining_class(uint32_t c)
{
    if (c < 0x300) return 0;
    int lo = 0, hi = ql_uni_ccc_n - 1;
    while (lo <= hi) {
        int mid = (lo + hi) / 2;
        const uint32_t *r = ql_uni_ccc + 3 * mid;
        if (c < r[0]) hi = mid - 1;
        else if (c > r[0] + r[1]) lo = mid + 1;
        else return r[2];
    }
    return 0;
}

/* The primary composite of two characters, 0 if none. */
static uint32_t compose(uint32_t a, uint32_t b)
{
    if (a - JAMO_L < 19 && b - JAMO_V < 21) return HANGUL + ((a - JAMO_L) * 21 + b - JAMO_V) * 28;
    if (a - HANGUL < HANGUL_N && (a - HANGUL) % 28 == 0 && b - (JAMO_T + 1) < 27)
        return a + b - JAMO_T;
    int lo = 0, hi = ql_uni_comp_n - 1;
    while (lo <= hi) {
        int mid = (lo + hi) / 2;
        const uint32_t *r = ql_uni_comp + 3 * mid;
        if (a < r[0] || (a == r[0] && b < r[1])) hi = mid - 1;
        else if (a != r[0] || b != r[1]) lo = mid + 1;
        else return r[2];
    }
    return 0;
}

/* Writes the full canonical decomposition of c (at most 4 characters), returns its length. */
static int decompose(uint32_t c, uint32_t out[8])
{
    if (c - HANGUL < HANGUL_N) {
        uint32_t s = c - HANGUL, t = s % 28;
        out[0] = JAMO_L + s / 588, out[1] = JAMO_V + s % 588 / 28, out[2] = JAMO_T + t;
        return t ? 3 : 2;
    }
    int lo = 0, hi = ql_uni_decomp_n - 1;
    while (c >= 0xc0 && lo <= hi) {
        int mid = (lo + hi) / 2;
        const uint32_t *r = ql_uni_decomp + 2 * mid;
        if (c < r[0]) hi = mid - 1;
        else if (c > r[0]) lo = mid + 1;
        else {
            int n = (int)(r[1] & 7);
            memcpy(out, ql_uni_decomp_text + (r[1] >> 3), (size_t)n * sizeof *out);
            return n;
        }
    }
    out[0] = c;
    return 1;
}

bool ql_nfc_maybe(const char *text, size_t n)
{
    const unsigned char *p = (const unsigned char *)text, *end = p + n;
    while (p < end) {
        int len = 1;
        if (*p >= 0xcc && (ql_uni(ql_utf8_get(p, &len)) & QL_UNI_MAYBE)) return true;
        if (*p < 0xcc && *p >= 0x80) len = 2; /* below U+0300 nothing changes */
        p += len;
    }
    return false;
}

/* Decomposed text from one character that NFC never touches up to the next. */
typedef struct {
    uint32_t *c;
    uint8_t *ccc;
    size_t n, cap;
} cluster;

static ql_status cluster_push(cluster *k, uint32_t c, unsigned ccc)
{
    if (k->n == k->cap) {
        size_t cap = k->cap ? 2 * k->cap : 32;
        uint32_t *a = realloc(k->c, cap * sizeof *a);
        if (a) k->c = a;
        uint8_t *b = realloc(k->ccc, cap);
        if (b) k->ccc = b;
        if (!a || !b) QL_FAIL(QL_ENOMEM, "no memory to normalise text");
        k->cap = cap;
    }
    k->c[k->n] = c, k->ccc[k->n++] = (uint8_t)ccc;
    return QL_OK;
}

/* Stable counting sort by class of each run of marks: linear, so that a million marks in a row (which
 * is legal) cannot hang us. */
static ql_status sort_marks(uint32_t *c, uint8_t *ccc, size_t n)
{
    size_t sorted = 1, at[256] = {0};
    while (sorted < n && ccc[sorted - 1] <= ccc[sorted]) sorted++;
    if (sorted >= n) return QL_OK;
    uint32_t *t = malloc(n * (sizeof *t + 1));
    if (!t) QL_FAIL(QL_ENOMEM, "no memory to normalise text");
    uint8_t *tc = (uint8_t *)(t + n);
    for (size_t i = 0; i < n; i++) at[ccc[i]]++;
    for (size_t k = 0, sum = 0; k < 256; k++) {
        size_t m = at[k];
        at[k] = sum, sum += m;
    }
    for (size_t i = 0; i < n; i++) t[at[ccc[i]]] = c[i], tc[at[ccc[i]]++] = ccc[i];
    memcpy(c, t, n * sizeof *c);
    memcpy(ccc, tc, n);
    free(t);
    return QL_OK;
}

/* Sorts, composes and writes all of k. A character is kept from combining with the starter by one of
 * the same or a higher class between them, or by any starter between them. */
static ql_status cluster_flush(cluster *k, ql_str *out)
{
    size_t w = 0, starter = SIZE_MAX;
    unsigned last = 0; /* class of the last character kept behind the starter */
    for (size_t i = 0; i < k->n;) { /* sort the runs of marks */
        size_t j = i + 1;
        if (k->ccc[i]) {
            while (j < k->n && k->ccc[j]) j++;
            QL_TRY(sort_marks(k->c + i, k->ccc + i, j - i));
        }
        i = j;
    }
    for (size_t i = 0; i < k->n; i++) {
        uint32_t c = k->c[i], both = 0;
        unsigned ccc = k->ccc[i];
        if (starter != SIZE_MAX && (starter + 1 == w || (last < ccc && last)))
            both = compose(k->c[starter], c);
        if (both) {
            k->c[starter] = both;
            continue;
        }
        if (!ccc) starter = w;
        last = ccc;
        k->c[w] = c, k->ccc[w++] = (uint8_t)ccc;
    }
    for (size_t i = 0; i < w; i++) {
        char u[4];
        QL_TRY(ql_str_add(out, u, (size_t)ql_utf8_put(k->c[i], u)));
    }
    k->n = 0;
    return QL_OK;
}

ql_status ql_nfc(const char *text, size_t n, ql_str *out)
{
    const unsigned char *p = (const unsigned char *)text, *end = p + n;
    cluster k = {0};
    ql_status st = QL_OK;
    QL_GO(ql_str_reserve(out, n));
    while (p < end) {
        uint32_t d[8];
        int len, m;
        uint32_t c = ql_utf8_get(p, &len);
        /* A character that NFC never touches ends what came before it. */
        if (!(ql_uni(c) & QL_UNI_MAYBE)) QL_GO(cluster_flush(&k, out));
        m = decompose(c, d);
        for (int i = 0; i < m; i++) QL_GO(cluster_push(&k, d[i], combining_class(d[i])));
        p += len;
    }
    QL_GO(cluster_flush(&k, out));
out:
    free(k.c), free(k.ccc);
    return st;
}
