/* UTF-8, character classes and NFC. Text here is always valid UTF-8; ql_utf8_repair makes it so. */
#ifndef QL_UNICODE_H
#define QL_UNICODE_H

#include "kernels/base.h"

/* A growable run of bytes; data is always followed by a NUL that len does not count. {0} is empty. */
typedef struct {
    char *data;
    size_t len, cap;
} ql_str;

ql_status ql_str_reserve(ql_str *s, size_t more);
ql_status ql_str_add(ql_str *s, const char *p, size_t n);
ql_status ql_str_puts(ql_str *s, const char *z);
ql_status ql_str_printf(ql_str *s, const char *fmt, ...) QL_PRINTF(2, 3);
void ql_str_clear(ql_str *s);
void ql_str_free(ql_str *s);

/* ql_uni_flags' bits. The first two are a class: at most one of letter (\p{L}), number (\p{N}), space
 * (White_Space). WORD is \w as Rust's regex has it. MAYBE: NFC may change text that contains it. */
enum { QL_UNI_LETTER = 1, QL_UNI_NUMBER = 2, QL_UNI_SPACE = 3, QL_UNI_CLASS = 3, QL_UNI_WORD = 4,
       QL_UNI_MAYBE = 8 };

/* The tables: 256 code points a page, two of them a byte (the lower one in the low nibble). */
extern const uint8_t ql_uni_page[], ql_uni_flags[];
extern const uint32_t ql_uni_ccc[];                         /* first, count - 1, combining class */
extern const uint32_t ql_uni_decomp[], ql_uni_decomp_text[]; /* code point, offset << 3 | length */
extern const uint32_t ql_uni_comp[];                        /* first, second, composite; sorted */
extern const int ql_uni_ccc_n, ql_uni_decomp_n, ql_uni_comp_n;

static inline unsigned ql_uni(uint32_t c)
{
    unsigned b = ql_uni_flags[(size_t)ql_uni_page[c >> 8] * 128 + ((c & 255) >> 1)];
    return c & 1 ? b >> 4 : b & 15;
}

/* The character at p (p < end, valid UTF-8) and how many bytes it takes. */
static inline uint32_t ql_utf8_get(const unsigned char *p, int *len)
{
    uint32_t c = p[0];
    if (c < 0x80) return *len = 1, c;
    if (c < 0xe0) return *len = 2, (c & 31) << 6 | (p[1] & 63u);
    if (c < 0xf0) return *len = 3, (c & 15) << 12 | (p[1] & 63u) << 6 | (p[2] & 63u);
    return *len = 4, (c & 7) << 18 | (p[1] & 63u) << 12 | (p[2] & 63u) << 6 | (p[3] & 63u);
}
/* The character that ends before p, and its length. */
static inline uint32_t ql_utf8_before(const unsigned char *p, int *len)
{
    const unsigned char *q = p - 1;
    while ((*q & 0xc0) == 0x80) q--;
    return ql_utf8_get(q, len);
}
int ql_utf8_put(uint32_t c, char out[4]); /* returns the length */

/* Length of the longest valid prefix. */
size_t ql_utf8_valid(const char *p, size_t n);
/* Appends the text with each maximal ill-formed part replaced by U+FFFD (Unicode's recommended
 * practice, what Python's errors="replace" and Rust's from_utf8_lossy do). */
ql_status ql_utf8_repair(const char *p, size_t n, ql_str *out);

/* False only for text that NFC surely leaves alone. */
bool ql_nfc_maybe(const char *p, size_t n);
/* Appends the text in Normalisation Form C. */
ql_status ql_nfc(const char *p, size_t n, ql_str *out);

#endif
