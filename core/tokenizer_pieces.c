/* Tokenizers over pieces, as SentencePiece's were written down for Llama 2, Mistral 7B, TinyLlama and Zephyr: a space is spelled
 * ▁, the whole text is one word for the merges, and a character that the vocabulary lacks is its bytes, <0xE6><0x97><0xA5>. */
#include "core/tokenizer_parts.h"

#include <string.h>

static const char *text_of(const json_t *j, const char *key)
{
    const char *s = json_string_value(json_object_get(j, key));
    return s ? s : "(none)";
}

static bool is(const json_t *j, const char *key, const char *text)
{
    return strcmp(text_of(j, key), text) == 0;
}

static bool replaces(const json_t *j, const char *from, const char *to)
{
    return is(j, "type", "Replace") && is(json_object_get(j, "pattern"), "String", from) && is(j, "content", to);
}

/* ---- reading ----------------------------------------------------------------------------------- */

/* Prepend ▁ (or not) and Replace " " by ▁: files until 2024. */
static ql_status read_normalizer(ql_tok *t, const json_t *j)
{
    const json_t *list = json_object_get(j, "normalizers");
    size_t n = json_array_size(list);
    if (!j || json_is_null(j) || (is(j, "type", "Sequence") && n == 0)) return QL_OK;
    t->normalizes = true;
    if (replaces(j, " ", QL_SPACE) || (n == 1 && replaces(json_array_get(list, 0), " ", QL_SPACE))) return QL_OK;
    const json_t *a = json_array_get(list, 0), *b = json_array_get(list, 1);
    if (n != 2 || !is(a, "type", "Prepend") || !is(a, "prepend", QL_SPACE) || !replaces(b, " ", QL_SPACE))
        QL_FAIL(QL_ENOSUP, "the normalizer %s%s%s%s%s is not supported beside byte_fallback: only Prepend " QL_SPACE
                           " and Replace \" \" by " QL_SPACE " are", text_of(j, "type"), n ? " of " : "",
                n ? text_of(a, "type") : "", n > 1 ? ", " : "", n > 1 ? text_of(b, "type") : "");
    t->prepend = PREPEND_ALWAYS;
    return QL_OK;
}

static ql_status read_scheme(const json_t *j, prepending *scheme)
{
    const json_t *given = json_object_get(j, "prepend_scheme");
    *scheme = PREPEND_ALWAYS;
    if (!is(j, "replacement", QL_SPACE))
        QL_FAIL(QL_ENOSUP, "Metaspace writes %.20s for a space; only " QL_SPACE " is supported", text_of(j, "replacement"));
    if (is(j, "prepend_scheme", "first")) *scheme = PREPEND_FIRST;
    else if (is(j, "prepend_scheme", "never")) *scheme = PREPEND_NEVER;
    else if (given && !is(j, "prepend_scheme", "always"))
        QL_FAIL(QL_ENOSUP, "Metaspace's prepend_scheme %.40s is not supported", text_of(j, "prepend_scheme"));
    if (json_is_false(json_object_get(j, "add_prefix_space")) && *scheme != PREPEND_NEVER)
        QL_FAIL(QL_EINVAL, "Metaspace's add_prefix_space false needs the prepend_scheme never");
    return QL_OK;
}

/* Metaspace where there is no normalizer: files since. */
static ql_status read_pre_tokenizer(ql_tok *t, const json_t *j)
{
    if (t->normalizes && (!j || json_is_null(j))) return QL_OK;
    if (t->normalizes || !is(j, "type", "Metaspace"))
        QL_FAIL(QL_ENOSUP, "the pre-tokenizer %s is not supported beside byte_fallback: only a normalizer that writes " QL_SPACE
                           ", or Metaspace without a normalizer, is", text_of(j, "type"));
    QL_TRY(read_scheme(j, &t->prepend));
    t->split = !json_is_false(json_object_get(j, "split"));
    return QL_OK;
}

static ql_status read_decoder(ql_tok *t, const json_t *j)
{
    const json_t *list = json_object_get(j, "decoders"), *strip = json_array_get(list, 3);
    size_t n = json_array_size(list);
    if (is(j, "type", "Metaspace")) {
        prepending scheme;
        QL_TRY(read_scheme(j, &scheme));
        t->strip = scheme != PREPEND_NEVER;
        return QL_OK;
    }
    t->bytes = true, t->strip = n == 4;
    if (!is(j, "type", "Sequence") || n < 3 || n > 4 || !replaces(json_array_get(list, 0), QL_SPACE, " ") ||
        !is(json_array_get(list, 1), "type", "ByteFallback") || !is(json_array_get(list, 2), "type", "Fuse") ||
        (strip && (!is(strip, "type", "Strip") || !is(strip, "content", " ") ||
                   json_integer_value(json_object_get(strip, "start")) != 1 ||
                   json_integer_value(json_object_get(strip, "stop")) != 0)))
        QL_FAIL(QL_ENOSUP, "the decoder %s is not supported beside byte_fallback: only Metaspace, or the Sequence of Replace "
                           QL_SPACE " by \" \", ByteFallback, Fuse and perhaps Strip of one \" \" on the left, is",
                text_of(j, "type"));
    return QL_OK;
}

ql_status ql_pieces_read(ql_tok *t, const json_t *root)
{
    t->pieces = true;
    QL_TRY(read_normalizer(t, json_object_get(root, "normalizer")));
    QL_TRY(read_pre_tokenizer(t, json_object_get(root, "pre_tokenizer")));
    return read_decoder(t, json_object_get(root, "decoder"));
}

/* ---- encoding ---------------------------------------------------------------------------------- */

static bool space_at(const char *p, size_t n)
{
    return n >= 3 && memcmp(p, QL_SPACE, 3) == 0;
}

ql_status ql_pieces_spell(const ql_tok *t, const char *text, size_t n, bool first, ql_str *out, bool *prepended)
{
    size_t spaces = 0;
    for (size_t i = 0; i < n; i++) spaces += text[i] == ' ';
    *prepended = n && (t->prepend == PREPEND_ALWAYS || (t->prepend == PREPEND_FIRST && first)) &&
                 (t->normalizes || (text[0] != ' ' && !space_at(text, n)));
    QL_TRY(ql_str_reserve(out, n + 2 * spaces + 3));
    if (*prepended) QL_TRY(ql_str_add(out, QL_SPACE, 3));
    for (const char *p = text, *end = text + n, *q; p < end; p = q + 1) {
        q = memchr(p, ' ', (size_t)(end - p));
        if (!q) return ql_str_add(out, p, (size_t)(end - p));
        QL_TRY(ql_str_add(out, p, (size_t)(q - p)));
        QL_TRY(ql_str_add(out, QL_SPACE, 3));
    }
    return QL_OK;
}

void ql_pieces_ends(const char *text, size_t n, bool prepended, int32_t *ends, size_t n_ends)
{
    size_t at = 0, spelled = prepended ? 3 : 0;
    for (size_t i = 0; i < n_ends; i++) {
        for (; at < n && spelled < (size_t)ends[i]; at++) spelled += text[at] == ' ' ? 3 : 1;
        ends[i] = (int32_t)at;
    }
}

size_t ql_pieces_word(const ql_tok *t, const char *p, const char *end)
{
    const char *q = p + 1;
    if (!t->split && !ql_bpe_cuts(t->bpe)) return (size_t)(end - p);
    while ((q = memmem(q, (size_t)(end - q), QL_SPACE, 3)) && !t->split && q - p >= 3 && space_at(q - 3, 3)) q += 3;
    return (size_t)((q ? q : end) - p);
}

/* ---- decoding ---------------------------------------------------------------------------------- */

static int hex(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* The byte that a token <0x…> stands for, or -1. */
static int byte_of(const char *p, size_t n)
{
    if (n != 6 || memcmp(p, "<0x", 3) != 0 || p[5] != '>' || hex(p[3]) < 0 || hex(p[4]) < 0) return -1;
    return 16 * hex(p[3]) + hex(p[4]);
}

/* Bytes in a row are text together, or each of them is none. */
static ql_status end_bytes(ql_str *bytes, unsigned flags, ql_str *out)
{
    size_t n = bytes->len;
    bool good = n == 0 || ql_utf8_valid(bytes->data, n) == n;
    if (n && (good || flags & QL_TOK_STREAM)) QL_TRY(ql_utf8_repair(bytes->data, n, out));
    else
        for (size_t i = 0; i < n; i++) QL_TRY(ql_str_add(out, "\xef\xbf\xbd", 3));
    ql_str_clear(bytes);
    return QL_OK;
}

static ql_status add_piece(const char *p, size_t n, const char *space, ql_str *out)
{
    const char *end = p + n, *q;
    while ((q = memmem(p, (size_t)(end - p), QL_SPACE, 3))) {
        QL_TRY(ql_str_add(out, p, (size_t)(q - p)));
        QL_TRY(ql_str_puts(out, space));
        p = q + 3;
    }
    return ql_str_add(out, p, (size_t)(end - p));
}

/* The library decodes an added token as its normalizer leaves it. */
static const char *spelling(const ql_tok *t, int32_t id, size_t *n)
{
    const char *p = ql_bpe_bytes(t->bpe, id, n);
    for (size_t i = 0; p && t->special[id] & 2 && i < t->n_added; i++)
        if (t->added[i].id == id) return *n = t->added[i].text.len, t->added[i].text.data;
    return p;
}

ql_status ql_pieces_decode(const ql_tok *t, const int32_t *ids, size_t n, unsigned flags, ql_str *out)
{
    ql_str bytes = {0};
    ql_status st = QL_OK;
    size_t start = out->len, len;
    bool strip = t->strip && !(flags & QL_TOK_INSIDE), first = true;
    QL_GO(ql_str_reserve(out, 1));
    for (size_t i = 0; i < n; i++) {
        const char *p = spelling(t, ids[i], &len);
        if (!p || (!(flags & QL_TOK_SPECIALS) && ql_tok_is_special(t, ids[i]))) continue;
        int byte = t->bytes ? byte_of(p, len) : -1;
        if (byte >= 0) {
            char c = (char)byte;
            QL_GO(ql_str_add(&bytes, &c, 1));
            continue;
        }
        QL_GO(end_bytes(&bytes, flags, out));
        QL_GO(add_piece(p, len, !t->bytes && strip && first ? "" : " ", out)); /* Metaspace leaves out all of the first token's */
        first = false;
    }
    QL_GO(end_bytes(&bytes, flags, out));
    if (t->bytes && strip && out->len > start && out->data[start] == ' ') {
        memmove(out->data + start, out->data + start + 1, out->len - start); /* the NUL too */
        out->len--;
    }
out:
    ql_str_free(&bytes);
    return st;
}
