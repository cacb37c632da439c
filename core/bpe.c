#include "core/bpe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A cached pre-token: one cache line. Longer ones are not cached. */
enum { KEY_MAX = 21, CACHED_IDS = 8, CACHE_BITS = 15 };
typedef struct {
    uint8_t len, n; /* len = 0: empty */
    char key[KEY_MAX + 1];
    uint32_t hash;
    int32_t ids[CACHED_IDS];
} cached;

typedef struct {
    uint32_t left, right, rank;
    int32_t id;
} merge;

typedef struct {
    size_t off;
    uint32_t len;
    uint8_t known;
} token;

typedef struct {
    uint32_t rank, at;
    int32_t id;
} candidate;

typedef struct {
    int32_t id, prev, next;
} symbol;

struct ql_bpe {
    ql_str text; /* every token's bytes */
    token *tokens;
    int32_t n_ids;
    int32_t *table; /* bytes → id; open addressing, -1 is empty */
    size_t table_mask;
    merge *merges; /* (left, right) → rank, id; id -1 is empty */
    size_t merge_mask, merge_room;
    uint32_t n_merges;
    int32_t byte_id[256]; /* -1: the vocabulary lacks this byte, which is then dropped */
    bool pieces, ignore_merges, sealed;
    bool crosses; /* some merge joins a ▁ to another character before it */
    cached *cache;
    symbol *sym; /* scratch of long pre-tokens */
    candidate *heap;
    size_t sym_cap, heap_len, heap_cap;
};

ql_status ql_ids_reserve(ql_ids *v, size_t more)
{
    if (more > SIZE_MAX / 16 || v->len > SIZE_MAX / 16) QL_FAIL(QL_ENOMEM, "too many tokens");
    if (v->len + more <= v->cap) return QL_OK;
    size_t cap = v->cap ? v->cap : 64;
    while (cap < v->len + more) cap *= 2;
    int32_t *p = realloc(v->data, cap * sizeof *p);
    if (!p) QL_FAIL(QL_ENOMEM, "no memory for %zu tokens", cap);
    v->data = p, v->cap = cap;
    return QL_OK;
}

ql_status ql_ids_push(ql_ids *v, int32_t id)
{
    if (v->len == v->cap) QL_TRY(ql_ids_reserve(v, 1));
    v->data[v->len++] = id;
    return QL_OK;
}

void ql_ids_free(ql_ids *v)
{
    free(v->data);
    *v = (ql_ids){0};
}

__extension__ typedef unsigned __int128 wide;

static uint64_t mix(uint64_t h, uint64_t w)
{
    wide m = (wide)(h ^ w) * 0x9e3779b97f4a7c15u;
    return (uint64_t)m ^ (uint64_t)(m >> 64);
}

uint64_t ql_hash(uint64_t seed, const void *data, size_t n)
{
    const char *p = data;
    uint64_t h = 0x243f6a8885a308d3u ^ n ^ seed, w;
    for (; n >= 8; p += 8, n -= 8) {
        memcpy(&w, p, 8);
        h = mix(h, w);
    }
    w = 0;
    memcpy(&w, p, n);
    return mix(mix(h, w), 0x13198a2e03707344u);
}

static size_t power_above(size_t n)
{
    size_t p = 16;
    while (p < n) p *= 2;
    return p;
}

ql_status ql_bpe_new(bool pieces, int32_t n_ids, size_t n_tokens, size_t n_merges, ql_bpe **out)
{
    ql_bpe *b = calloc(1, sizeof *b);
    if (!b) QL_FAIL(QL_ENOMEM, "no memory for a tokenizer");
    size_t slots = power_above(2 * n_tokens + 1), pairs = power_above(2 * n_merges + 1);
    b->pieces = pieces, b->n_ids = n_ids;
    b->tokens = calloc((size_t)n_ids + 1, sizeof *b->tokens);
    b->table = malloc(slots * sizeof *b->table);
    b->merges = malloc(pairs * sizeof *b->merges);
    b->cache = calloc((size_t)1 << CACHE_BITS, sizeof *b->cache);
    if (!b->tokens || !b->table || !b->merges || !b->cache) {
        ql_bpe_free(b);
        QL_FAIL(QL_ENOMEM, "no memory for a vocabulary of %zu tokens", n_tokens);
    }
    b->table_mask = slots - 1, b->merge_mask = pairs - 1, b->merge_room = n_merges;
    for (size_t i = 0; i < slots; i++) b->table[i] = -1;
    for (size_t i = 0; i < pairs; i++) b->merges[i].id = -1;
    *out = b;
    return QL_OK;
}

void ql_bpe_free(ql_bpe *b)
{
    if (!b) return;
    ql_str_free(&b->text);
    free(b->tokens), free(b->table), free(b->merges), free(b->cache), free(b->sym), free(b->heap);
    free(b);
}

/* The byte that a character of the byte-level alphabet stands for, -1 for characters outside it.
 * Printable Latin-1 stands for itself; the other 68 bytes, in order, for U+0100 on. */
static int alphabet_byte(uint32_t c)
{
    if ((c >= 33 && c <= 126) || (c >= 161 && c <= 172) || (c >= 174 && c <= 255)) return (int)c;
    if (c >= 0x100 && c < 0x144) {
        c -= 0x100;
        return (int)(c < 33 ? c : c < 67 ? c - 33 + 127 : 173);
    }
    return -1;
}

/* Appends the bytes that key stands for; false when a character is outside the alphabet. */
static ql_status key_bytes(const ql_bpe *b, const char *key, size_t n, ql_str *out, bool *inside)
{
    const unsigned char *p = (const unsigned char *)key, *end = p + n;
    size_t start = out->len;
    *inside = true;
    if (b->pieces) return ql_str_add(out, key, n);
    QL_TRY(ql_str_reserve(out, n));
    for (int len; p < end; p += len) {
        int byte = alphabet_byte(ql_utf8_get(p, &len));
        if (byte < 0) {
            *inside = false;
            out->len = start;
            return ql_str_add(out, key, n);
        }
        out->data[out->len++] = (char)byte;
    }
    return QL_OK;
}

/* The slot where these bytes are, or the empty one where they belong. */
static size_t find_slot(const ql_bpe *b, const char *p, size_t n)
{
    size_t i = ql_hash(0, p, n) & b->table_mask;
    for (; b->table[i] >= 0; i = (i + 1) & b->table_mask) {
        const token *t = b->tokens + b->table[i];
        if (t->len == n && memcmp(b->text.data + t->off, p, n) == 0) break;
    }
    return i;
}

int32_t ql_bpe_find(const ql_bpe *b, const char *bytes, size_t n)
{
    return b->table[find_slot(b, bytes, n)];
}

int32_t ql_bpe_find_key(const ql_bpe *b, const char *key, size_t n)
{
    ql_str s = {0};
    bool inside;
    int32_t id = -1;
    if (key_bytes(b, key, n, &s, &inside) == QL_OK && inside) id = ql_bpe_find(b, s.data, s.len);
    ql_str_free(&s);
    return id;
}

ql_status ql_bpe_add_token(ql_bpe *b, const char *key, size_t n, int32_t id)
{
    bool inside;
    if (id < 0 || id >= b->n_ids || n > UINT32_MAX / 2)
        QL_FAIL(QL_EINVAL, "token '%.40s' has the impossible id %d", key, id);
    size_t off = b->text.len;
    QL_TRY(key_bytes(b, key, n, &b->text, &inside));
    token t = {off, (uint32_t)(b->text.len - off), 1};
    if (b->tokens[id].known) {
        if (b->tokens[id].len == t.len &&
            memcmp(b->text.data + b->tokens[id].off, b->text.data + off, t.len) == 0)
            return QL_OK; /* an added token that the vocabulary has too */
        QL_FAIL(QL_EINVAL, "two tokens have the id %d: '%.40s' is the second", id, key);
    }
    b->tokens[id] = t;
    if (inside && n && !b->sealed) { /* what is only an added token is no result of BPE */
        size_t slot = find_slot(b, b->text.data + off, t.len);
        if (b->table[slot] < 0) b->table[slot] = id;
    }
    return QL_OK;
}

ql_status ql_bpe_seal(ql_bpe *b, bool ignore_merges)
{
    b->ignore_merges = ignore_merges;
    b->sealed = true;
    for (int i = 0; i < 256; i++) {
        char c = (char)i, name[8];
        snprintf(name, sizeof name, "<0x%02X>", (unsigned)i);
        b->byte_id[i] = b->pieces ? ql_bpe_find(b, name, 6) : ql_bpe_find(b, &c, 1);
        if (b->pieces && b->byte_id[i] < 0)
            QL_FAIL(QL_ENOSUP, "the BPE model has byte_fallback without the token %s, which is not supported: all 256 bytes "
                               "must be there", name);
    }
    if (b->pieces && ql_bpe_find(b, QL_SPACE, 3) < 0)
        QL_FAIL(QL_ENOSUP, "the BPE model has byte_fallback without the token " QL_SPACE ", which is not supported");
    return QL_OK;
}

bool ql_bpe_cuts(const ql_bpe *b)
{
    return !b->crosses && !b->ignore_merges;
}

size_t ql_bpe_covers(const ql_bpe *b, int32_t id, const char *p)
{
    size_t n;
    ql_bpe_bytes(b, id, &n);
    if (!b->pieces || id != b->byte_id[(unsigned char)*p]) return n;
    return *p == '<' && ql_bpe_find(b, "<", 1) >= 0 ? n : 1; /* merges could make "<0x3C>" of a text that says so */
}

const char *ql_bpe_bytes(const ql_bpe *b, int32_t id, size_t *n)
{
    *n = 0;
    if (id < 0 || id >= b->n_ids || !b->tokens[id].known) return NULL;
    *n = b->tokens[id].len;
    return b->text.data + b->tokens[id].off;
}

static merge *find_merge(const ql_bpe *b, int32_t left, int32_t right)
{
    uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    size_t i = mix(key, 0xa4093822299f31d0u) & b->merge_mask;
    for (; b->merges[i].id >= 0; i = (i + 1) & b->merge_mask)
        if (b->merges[i].left == (uint32_t)left && b->merges[i].right == (uint32_t)right) break;
    return b->merges + i;
}

ql_status ql_bpe_add_merge(ql_bpe *b, const char *left, size_t nl, const char *right, size_t nr)
{
    ql_str s = {0};
    ql_status st = QL_OK;
    bool in1, in2;
    QL_GO(key_bytes(b, left, nl, &s, &in1));
    size_t cut = s.len;
    QL_GO(key_bytes(b, right, nr, &s, &in2));
    int32_t l = in1 ? ql_bpe_find(b, s.data, cut) : -1;
    int32_t r = in2 ? ql_bpe_find(b, s.data + cut, s.len - cut) : -1;
    int32_t both = in1 && in2 ? ql_bpe_find(b, s.data, s.len) : -1;
    if (l < 0 || r < 0 || both < 0) {
        st = ql_fail(QL_EINVAL, "merge %u ('%.30s' '%.30s'): %s is not in the vocabulary", b->n_merges,
                     left, right, l < 0 ? "the left part" : r < 0 ? "the right part" : "the result");
        goto out;
    }
    merge *m = find_merge(b, l, r);
    /* A pair listed twice has the later rank, as a dictionary that is filled in order would. */
    if (m->id < 0 && b->merge_room == 0) {
        st = ql_fail(QL_EINTERNAL, "more merges than announced");
        goto out;
    }
    if (m->id < 0) b->merge_room--;
    *m = (merge){(uint32_t)l, (uint32_t)r, b->n_merges++, both};
    if (nr >= 3 && memcmp(right, QL_SPACE, 3) == 0 && (nl < 3 || memcmp(left + nl - 3, QL_SPACE, 3) != 0)) b->crosses = true;
out:
    ql_str_free(&s);
    return st;
}

/* ---- merging ----------------------------------------------------------------------------------- */

/* Few symbols: look for the best pair by scanning. Lowest rank first, the leftmost among equals. */
enum { SCAN_MAX = 32 };

static size_t merge_scan(const ql_bpe *b, int32_t *id, size_t n)
{
    uint32_t rank[SCAN_MAX]; /* of the pair (i, i+1) */
    int32_t result[SCAN_MAX];
    for (size_t i = 0; i + 1 < n; i++) {
        const merge *m = find_merge(b, id[i], id[i + 1]);
        rank[i] = m->id < 0 ? UINT32_MAX : m->rank;
        result[i] = m->id;
    }
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++)
            if (rank[i] < rank[best]) best = i;
        if (rank[best] == UINT32_MAX) break;
        id[best] = result[best];
        n--;
        memmove(id + best + 1, id + best + 2, (n - best - 1) * sizeof *id);
        memmove(rank + best, rank + best + 1, (n - best - 1) * sizeof *rank);
        memmove(result + best, result + best + 1, (n - best - 1) * sizeof *result);
        for (size_t i = best ? best - 1 : 0; i <= best && i + 1 < n; i++) {
            const merge *m = find_merge(b, id[i], id[i + 1]);
            rank[i] = m->id < 0 ? UINT32_MAX : m->rank;
            result[i] = m->id;
        }
    }
    return n;
}

static bool before(const candidate *a, const candidate *b)
{
    return a->rank != b->rank ? a->rank < b->rank : a->at < b->at;
}

static ql_status heap_push(ql_bpe *b, candidate c)
{
    if (b->heap_len == b->heap_cap) {
        size_t cap = b->heap_cap ? 2 * b->heap_cap : 256;
        candidate *p = realloc(b->heap, cap * sizeof *p);
        if (!p) QL_FAIL(QL_ENOMEM, "no memory to tokenise a very long word");
        b->heap = p, b->heap_cap = cap;
    }
    size_t i = b->heap_len++;
    while (i && before(&c, b->heap + (i - 1) / 2)) {
        b->heap[i] = b->heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    b->heap[i] = c;
    return QL_OK;
}

static candidate heap_pop(ql_bpe *b)
{
    candidate top = b->heap[0], last = b->heap[--b->heap_len];
    size_t i = 0, n = b->heap_len;
    for (size_t k; (k = 2 * i + 1) < n; i = k) {
        if (k + 1 < n && before(b->heap + k + 1, b->heap + k)) k++;
        if (!before(b->heap + k, &last)) break;
        b->heap[i] = b->heap[k];
    }
    b->heap[i] = last;
    return top;
}

static ql_status push_pair(ql_bpe *b, int32_t at)
{
    int32_t next = b->sym[at].next;
    if (next < 0) return QL_OK;
    const merge *m = find_merge(b, b->sym[at].id, b->sym[next].id);
    if (m->id < 0) return QL_OK;
    return heap_push(b, (candidate){m->rank, (uint32_t)at, m->id});
}

/* Many symbols: a linked list and a heap of pairs; an entry whose pair is gone is passed over. */
static ql_status merge_heap(ql_bpe *b, int32_t *id, size_t *len)
{
    size_t n = *len, count = 0;
    if (n > INT32_MAX / 2) QL_FAIL(QL_EINVAL, "a word of %zu bytes is too long to tokenise", n);
    if (n > b->sym_cap) {
        symbol *s = realloc(b->sym, n * sizeof *s);
        if (!s) QL_FAIL(QL_ENOMEM, "no memory to tokenise a word of %zu bytes", n);
        b->sym = s, b->sym_cap = n;
    }
    for (size_t i = 0; i < n; i++) b->sym[i] = (symbol){id[i], (int32_t)i - 1, (int32_t)i + 1};
    b->sym[n - 1].next = -1;
    b->heap_len = 0;
    for (size_t i = 0; i < n; i++) QL_TRY(push_pair(b, (int32_t)i));
    while (b->heap_len) {
        candidate c = heap_pop(b);
        symbol *s = b->sym + c.at;
        if (s->id < 0 || s->next < 0) continue;
        const merge *m = find_merge(b, s->id, b->sym[s->next].id);
        if (m->id != c.id) continue;
        symbol *gone = b->sym + s->next;
        s->id = c.id;
        s->next = gone->next;
        gone->id = -1;
        if (s->next >= 0) b->sym[s->next].prev = (int32_t)c.at;
        if (s->prev >= 0) QL_TRY(push_pair(b, s->prev));
        QL_TRY(push_pair(b, (int32_t)c.at));
    }
    for (int32_t i = 0; i >= 0; i = b->sym[i].next) id[count++] = b->sym[i].id;
    *len = count;
    return QL_OK;
}

/* What the merges begin with: at most n ids. */
static size_t first_ids(const ql_bpe *b, const char *p, size_t n, int32_t *id)
{
    size_t k = 0;
    int len = 1;
    for (const char *end = p + n; p < end; p += len) {
        if (b->pieces) {
            ql_utf8_get((const unsigned char *)p, &len);
            int32_t whole = ql_bpe_find(b, p, (size_t)len);
            if (whole >= 0) {
                id[k++] = whole;
                continue;
            }
        }
        for (int i = 0; i < len; i++)
            if (b->byte_id[(unsigned char)p[i]] >= 0) id[k++] = b->byte_id[(unsigned char)p[i]];
    }
    return k;
}

ql_status ql_bpe_encode(ql_bpe *b, const char *p, size_t n, ql_ids *out)
{
    cached *slot = NULL;
    uint32_t hash = 0;
    if (!n) return QL_OK;
    if (n <= KEY_MAX) {
        uint64_t h = ql_hash(0, p, n);
        hash = (uint32_t)(h >> 32);
        slot = b->cache + (h & ((1u << CACHE_BITS) - 1));
        if (slot->hash == hash && slot->len == n && memcmp(slot->key, p, n) == 0) {
            QL_TRY(ql_ids_reserve(out, CACHED_IDS));
            memcpy(out->data + out->len, slot->ids, sizeof slot->ids);
            out->len += slot->n;
            return QL_OK;
        }
    }
    size_t start = out->len;
    int32_t whole = b->ignore_merges ? ql_bpe_find(b, p, n) : -1;
    if (whole >= 0) {
        QL_TRY(ql_ids_push(out, whole));
    } else {
        QL_TRY(ql_ids_reserve(out, n));
        int32_t *id = out->data + start;
        size_t k = first_ids(b, p, n, id);
        if (k <= SCAN_MAX) k = merge_scan(b, id, k);
        else QL_TRY(merge_heap(b, id, &k));
        out->len += k;
    }
    if (slot && out->len - start <= CACHED_IDS) {
        slot->len = (uint8_t)n, slot->n = (uint8_t)(out->len - start), slot->hash = hash;
        memcpy(slot->key, p, n);
        if (slot->n) memcpy(slot->ids, out->data + start, slot->n * sizeof *slot->ids);
    }
    return QL_OK;
}

/* ---- the pre-token matcher --------------------------------------------------------------------- */

static inline unsigned class_at(const unsigned char *p, int *len)
{
    if (*p < 0x80) {
        *len = 1;
        return ql_uni(*p) & QL_UNI_CLASS;
    }
    return ql_uni(ql_utf8_get(p, len)) & QL_UNI_CLASS;
}

static const unsigned char *skip_letters(const unsigned char *p, const unsigned char *end)
{
    for (int len; p < end && class_at(p, &len) == QL_UNI_LETTER;) p += len;
    return p;
}

/* (?i:'s|'t|'re|'ve|'m|'ll|'d) at an apostrophe: its length or 0. U+017F folds to s. */
static size_t contraction(const unsigned char *p, const unsigned char *end)
{
    if (end - p < 2) return 0;
    unsigned a = p[1] | 32u, c = end - p > 2 ? p[2] | 32u : 0;
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    if ((a == 'r' && c == 'e') || (a == 'v' && c == 'e') || (a == 'l' && c == 'l')) return 3;
    if (end - p > 2 && p[1] == 0xc5 && p[2] == 0xbf) return 3;
    return 0;
}

/* \s*[\r\n]+|\s+(?!\S)|\s+ at a white space. */
static size_t spaces(const unsigned char *p, const unsigned char *end)
{
    const unsigned char *q = p, *line = NULL, *last = p;
    for (int len; q < end && class_at(q, &len) == QL_UNI_SPACE; q += len) {
        if (*q == '\r' || *q == '\n') line = q + 1;
        last = q;
    }
    if (line) return (size_t)(line - p);
    return (size_t)((q == end || last == p ? q : last) - p);
}

size_t ql_bpe_pretoken(const unsigned char *p, const unsigned char *end, int digits)
{
    const unsigned char *q = p;
    int len, len2;
    if (*p == '\'') {
        size_t n = contraction(p, end);
        if (n) return n;
    }
    unsigned k = class_at(p, &len);
    if (k == QL_UNI_LETTER) return (size_t)(skip_letters(p, end) - p);
    if (k == QL_UNI_NUMBER) {
        for (; digits-- && q < end && class_at(q, &len) == QL_UNI_NUMBER;) q += len;
        return (size_t)(q - p);
    }
    unsigned next = p + len < end ? class_at(p + len, &len2) : QL_UNI_SPACE;
    if (next == QL_UNI_LETTER && *p != '\r' && *p != '\n')
        return (size_t)(skip_letters(p + len, end) - p);
    if (k == 0 || (*p == ' ' && next == 0)) {
        q = p + len;
        while (q < end && class_at(q, &len) == 0) q += len;
        while (q < end && (*q == '\r' || *q == '\n')) q++;
        return (size_t)(q - p);
    }
    return spaces(p, end);
}
