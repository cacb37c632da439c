/* Text ↔ ids. */
#include "core/tokenizer_parts.h"

#include <string.h>

static ql_status encode_plain(ql_tok *t, const char *text, size_t n, ql_ids *out)
{
    const unsigned char *p = (const unsigned char *)text, *end = p + n;
    while (p < end) {
        size_t len = t->pieces ? ql_pieces_word(t, (const char *)p, (const char *)end) : ql_bpe_pretoken(p, end, t->digits);
        size_t first = out->len, at = (size_t)(p - (const unsigned char *)text);
        QL_TRY(ql_bpe_encode(t->bpe, (const char *)p, len, out));
        for (size_t i = first; t->ends && i < out->len; i++) {
            at += ql_bpe_covers(t->bpe, out->data[i], text + at);
            QL_TRY(ql_ids_push(t->ends, (int32_t)(t->at + at)));
        }
        p += len;
    }
    return QL_OK;
}

static bool word_at(const char *p)
{
    int len;
    return ql_uni(ql_utf8_get((const unsigned char *)p, &len)) & QL_UNI_WORD;
}
static bool word_before(const char *p)
{
    int len;
    return ql_uni(ql_utf8_before((const unsigned char *)p, &len)) & QL_UNI_WORD;
}
static bool space_at(const char *p, int *len)
{
    return (ql_uni(ql_utf8_get((const unsigned char *)p, len)) & QL_UNI_CLASS) == QL_UNI_SPACE;
}
static bool space_before(const char *p, int *len)
{
    return (ql_uni(ql_utf8_before((const unsigned char *)p, len)) & QL_UNI_CLASS) == QL_UNI_SPACE;
}

/* The longest added token that begins at p, or NULL. */
static const added *token_at(const matcher *m, const char *p, const char *end)
{
    unsigned c = (unsigned char)*p;
    for (uint32_t i = m->first[c]; i < m->first[c + 1]; i++) {
        const ql_str *s = &m->list[i]->text;
        if (s->len <= (size_t)(end - p) && s->data[s->len - 1] == p[s->len - 1] &&
            memcmp(s->data, p, s->len) == 0)
            return m->list[i];
    }
    return NULL;
}

typedef ql_status encoder(ql_tok *t, const char *text, size_t n, ql_ids *out);

/* Cuts the added tokens of m out of the text; what is between them goes to `rest`. */
static ql_status split_added(ql_tok *t, const matcher *m, encoder *rest, const char *text, size_t n,
                             ql_ids *out)
{
    const char *p = text, *end = text + n, *done = text;
    size_t base = t->at;
    while (m->n && p < end) {
        const added *a = token_at(m, p, end);
        int len;
        if (!a) {
            p++;
            continue;
        }
        const char *start = p, *stop = p + a->text.len;
        p = stop;
        if (a->single_word &&
            ((start > text && word_before(start)) || (stop < end && word_at(stop))))
            continue;
        if (a->lstrip) {
            while (start > done && space_before(start, &len)) start -= len;
            if (start < done) start = done;
        }
        if (a->rstrip)
            while (stop < end && space_at(stop, &len)) stop += len;
        if (start >= stop) continue; /* white space that the token before has taken along */
        t->at = base + (size_t)(done - text);
        if (start > done) QL_TRY(rest(t, done, (size_t)(start - done), out));
        QL_TRY(ql_ids_push(out, a->id));
        done = stop;
        if (t->ends) QL_TRY(ql_ids_push(t->ends, (int32_t)(base + (size_t)(done - text))));
    }
    t->at = base + (size_t)(done - text);
    if (end > done) QL_TRY(rest(t, done, (size_t)(end - done), out));
    return QL_OK;
}

static ql_status split_normal(ql_tok *t, const char *text, size_t n, ql_ids *out)
{
    return split_added(t, &t->normal, encode_plain, text, n, out);
}

/* Passes the text on with ▁ for spaces. */
static ql_status encode_spelled(ql_tok *t, encoder *next, const char *text, size_t n, ql_ids *out)
{
    ql_str s = {0};
    size_t base = t->at, first = t->ends ? t->ends->len : 0;
    bool prepended;
    ql_status st = ql_pieces_spell(t, text, n, base == 0, &s, &prepended);
    t->at = 0;
    if (st == QL_OK) st = next(t, s.data, s.len, out);
    if (st == QL_OK && t->ends) {
        ql_pieces_ends(text, n, prepended, t->ends->data + first, t->ends->len - first);
        for (size_t i = first; i < t->ends->len; i++) t->ends->data[i] += (int32_t)base;
    }
    ql_str_free(&s);
    return st;
}

static ql_status spell_plain(ql_tok *t, const char *text, size_t n, ql_ids *out)
{
    return encode_spelled(t, encode_plain, text, n, out);
}

static ql_status encode_normal(ql_tok *t, const char *text, size_t n, ql_ids *out)
{
    if (t->pieces && t->normalizes) return encode_spelled(t, split_normal, text, n, out);
    if (t->pieces) return split_added(t, &t->normal, spell_plain, text, n, out);
    if (!t->nfc || !ql_nfc_maybe(text, n)) return split_normal(t, text, n, out);
    ql_str nfc = {0};
    ql_status st = ql_nfc(text, n, &nfc);
    if (st == QL_OK) st = split_normal(t, nfc.data, nfc.len, out);
    ql_str_free(&nfc);
    return st;
}

static ql_status add_all(ql_tok *t, const ql_ids *ids, size_t at, ql_ids *out)
{
    for (size_t i = 0; i < ids->len; i++) {
        QL_TRY(ql_ids_push(out, ids->data[i]));
        if (t->ends) QL_TRY(ql_ids_push(t->ends, (int32_t)at));
    }
    return QL_OK;
}

ql_status ql_tok_encode_ends(ql_tok *t, const char *text, size_t n, unsigned flags, ql_ids *out, ql_ids *ends)
{
    ql_str good = {0};
    ql_status st = QL_OK;
    if (ends && n > INT32_MAX) QL_FAIL(QL_ENOSUP, "a text of %zu bytes is too long", n);
    pthread_mutex_lock(&t->lock);
    t->ends = ends, t->at = 0;
    if (n && ql_utf8_valid(text, n) < n) {
        QL_GO(ql_utf8_repair(text, n, &good));
        text = good.data, n = good.len;
    }
    if (flags & QL_TOK_SPECIALS) QL_GO(add_all(t, &t->prefix, 0, out));
    if (n) QL_GO(split_added(t, &t->raw, encode_normal, text, n, out));
    if (flags & QL_TOK_SPECIALS) QL_GO(add_all(t, &t->suffix, n, out));
out:
    pthread_mutex_unlock(&t->lock);
    ql_str_free(&good);
    return st;
}

ql_status ql_tok_encode(ql_tok *t, const char *text, size_t n, unsigned flags, ql_ids *out)
{
    return ql_tok_encode_ends(t, text, n, flags, out, NULL);
}

ql_status ql_tok_normalize(const ql_tok *t, const char *text, size_t n, ql_str *out)
{
    ql_str good = {0};
    ql_status st = QL_OK;
    if (n) QL_GO(ql_utf8_repair(text, n, &good));
    if (t->nfc && good.len) QL_GO(ql_nfc(good.data, good.len, out));
    else QL_GO(ql_str_add(out, good.data, good.len));
out:
    ql_str_free(&good);
    return st;
}

uint64_t ql_tok_hash(const ql_tok *t)
{
    return t ? t->hash : 0;
}

/* ---- decoding and names ------------------------------------------------------------------------ */

ql_status ql_tok_decode(const ql_tok *t, const int32_t *ids, size_t n, unsigned flags, ql_str *out)
{
    ql_str raw = {0};
    ql_status st = QL_OK;
    if (t->pieces) return ql_pieces_decode(t, ids, n, flags, out);
    for (size_t i = 0; i < n; i++) {
        size_t len;
        const char *p = ql_bpe_bytes(t->bpe, ids[i], &len);
        if (!(flags & QL_TOK_SPECIALS) && ql_tok_is_special(t, ids[i])) continue;
        if (p) QL_GO(ql_str_add(&raw, p, len));
    }
    QL_GO(ql_str_reserve(out, raw.len));
    if (raw.len) QL_GO(ql_utf8_repair(raw.data, raw.len, out));
out:
    ql_str_free(&raw);
    return st;
}

size_t ql_tok_steady(const char *text, size_t n)
{
    while (n >= 3 && memcmp(text + n - 3, "\xef\xbf\xbd", 3) == 0) n -= 3;
    return n;
}

const char *ql_tok_bytes(const ql_tok *t, int32_t id, size_t *n)
{
    return ql_bpe_bytes(t->bpe, id, n);
}

int32_t ql_tok_size(const ql_tok *t)
{
    return t->size;
}

int32_t ql_tok_find(const ql_tok *t, const char *name)
{
    for (size_t i = 0; i < t->n_added; i++)
        if (strcmp(t->added[i].name.data, name) == 0)
            return t->added[i].id;
    return ql_bpe_find_key(t->bpe, name, strlen(name));
}

bool ql_tok_is_special(const ql_tok *t, int32_t id)
{
    return id >= 0 && id < t->size && t->special[id] & 1;
}

const ql_ids *ql_tok_prefix(const ql_tok *t)
{
    return &t->prefix;
}

const ql_ids *ql_tok_suffix(const ql_tok *t)
{
    return &t->suffix;
}

const ql_tok_names *ql_tok_info(const ql_tok *t)
{
    static const ql_tok_names none = {-1, -1, -1, -1, NULL, NULL, NULL, NULL, NULL};
    return t ? &t->names : &none;
}

const ql_ids *ql_tok_stops(const ql_tok *t)
{
    static const ql_ids none;
    return t ? &t->stops : &none;
}
