/* Jinja source → tokens; and the memory of templates. */
#include "core/jinja_lex.h"

#include <stdlib.h>

/* ---- memory ------------------------------------------------------------------------------------ */

struct jchunk {
    jchunk *next;
    size_t used, size;
    _Alignas(16) char data[];
};

void *ql_jalloc(jarena *a, size_t n)
{
    n = (n + 15) & ~(size_t)15;
    if (!a->head || a->head->size - a->head->used < n) {
        size_t size = n > 65536 / 4 ? n : 65536;
        if (n > a->limit || a->total > a->limit - n) {
            ql_fail(QL_ENOMEM, "a template may not take more than %zu MB of memory", a->limit >> 20);
            return NULL;
        }
        jchunk *c = calloc(1, sizeof *c + size);
        if (!c) {
            ql_fail(QL_ENOMEM, "no memory for a template");
            return NULL;
        }
        c->size = size, a->total += size;
        c->next = a->head, a->head = c;
    }
    void *p = a->head->data + a->head->used;
    a->head->used += n;
    return p;
}

void ql_jarena_free(jarena *a)
{
    while (a->head) {
        jchunk *next = a->head->next;
        free(a->head);
        a->head = next;
    }
}

/* ---- tokens ------------------------------------------------------------------------------------ */

static ql_status emit(jparser *s, ttype type, int op, const char *p, size_t n)
{
    if (s->n == s->cap) {
        size_t cap = s->cap ? 2 * s->cap : 256;
        jtoken *t = realloc(s->tok, cap * sizeof *t);
        if (!t) QL_FAIL(QL_ENOMEM, "no memory for a template");
        s->tok = t, s->cap = cap;
    }
    s->tok[s->n++] = (jtoken){type, s->line, op, {p, n}};
    return QL_OK;
}

static bool blank(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}
static bool digit(char c)
{
    return c >= '0' && c <= '9';
}
static bool letter(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

static void advance(jparser *s, const char *to)
{
    for (; s->p < to; s->p++) s->line += *s->p == '\n';
}

static bool looking_at(const jparser *s, const char *z)
{
    size_t n = strlen(z);
    return (size_t)(s->end - s->p) >= n && memcmp(s->p, z, n) == 0;
}

/* Text up to the next tag; the tag's sign and kind decide what of its end is left out. */
static ql_status lex_data(jparser *s)
{
    const char *q = s->p, *stop;
    while (q < s->end && !(*q == '{' && q + 1 < s->end && strchr("{%#", q[1]))) q++;
    stop = q;
    if (q < s->end) {
        char sign = q + 2 < s->end ? q[2] : 0;
        if (sign == '-') {
            while (stop > s->p && blank(stop[-1])) stop--;
        } else if (sign != '+' && q[1] != '{') { /* lstrip_blocks */
            const char *l = q;
            while (l > s->p && (l[-1] == ' ' || (l[-1] >= '\t' && l[-1] <= '\r' && l[-1] != '\n'))) l--;
            if ((l > s->p && l[-1] == '\n') || (l == s->p && s->line_starting)) stop = l;
        }
    }
    if (stop > s->p) QL_TRY(emit(s, T_DATA, 0, s->p, (size_t)(stop - s->p)));
    advance(s, q);
    return QL_OK;
}

/* Behind a tag's last brace at p: what the sign before the brace takes away of the text that follows. */
static void after_tag(jparser *s, const char *p, char sign, bool is_block)
{
    const char *from = p;
    if (sign == '-') {
        while (p < s->end && blank(*p)) p++;
    } else if (is_block && sign != '+' && p < s->end && *p == '\n') { /* trim_blocks */
        p++;
    }
    s->line_starting = p > from && p[-1] == '\n';
    advance(s, p);
}

static ql_status lex_comment(jparser *s)
{
    int line = s->line;
    const char *q = s->p + 2;
    while (q + 1 < s->end && !(q[0] == '#' && q[1] == '}')) q++;
    if (q + 1 >= s->end) FAIL_AT(line, QL_EINVAL, "%s", "a comment {# has no end #}");
    after_tag(s, q + 2, q > s->p + 2 ? q[-1] : 0, true);
    return QL_OK;
}

static ql_status lex_string(jparser *s)
{
    const char *q = s->p + 1;
    while (q < s->end && *q != *s->p) q += *q == '\\' ? 2 : 1;
    if (q >= s->end) FAIL_AT(s->line, QL_EINVAL, "%s", "a string has no end");
    char *out = ql_jalloc(s->mem, (size_t)(q - s->p));
    size_t n = 0;
    if (!out) return QL_ENOMEM;
    for (const char *c = s->p + 1; c < q; c++) {
        static const char names[] = "n\nt\tr\rb\bf\fv\va\a\\\\''\"\"";
        if (*c != '\\' || c + 1 >= q) {
            out[n++] = *c;
            continue;
        }
        const char *e = NULL;
        for (size_t i = 0; i + 1 < sizeof names - 1 && !e; i += 2)
            if (names[i] == c[1]) e = names + i + 1;
        int hex = c[1] == 'x' ? 2 : c[1] == 'u' ? 4 : c[1] == 'U' ? 8 : 0;
        if (e) {
            out[n++] = *e, c++;
        } else if (c[1] == '\n') {
            c++;
        } else if (hex && q - c >= 2 + hex) {
            char digits[9] = {0}, *bad;
            memcpy(digits, c + 2, (size_t)hex);
            unsigned long v = strtoul(digits, &bad, 16);
            if (*bad || v > 0x10ffff || (v >= 0xd800 && v < 0xe000))
                FAIL_AT(s->line, QL_EINVAL, "\\%c%s is not a character", c[1], digits);
            n += (size_t)ql_utf8_put((uint32_t)v, out + n);
            c += 1 + hex;
        } else if (hex || digit(c[1]) || c[1] == 'N') {
            FAIL_AT(s->line, QL_ENOSUP, "the escape \\%c is not supported here", c[1]);
        } else {
            out[n++] = *c;
        }
    }
    QL_TRY(emit(s, T_STR, 0, out, n));
    advance(s, q + 1);
    return QL_OK;
}

static ql_status lex_number(jparser *s)
{
    const char *q = s->p;
    ttype type = T_INT;
    while (q < s->end && (digit(*q) || *q == '_')) q++;
    if (q + 1 < s->end && *q == '.' && digit(q[1])) {
        type = T_FLOAT;
        for (q++; q < s->end && digit(*q);) q++;
    }
    if (q < s->end && (*q == 'e' || *q == 'E')) {
        const char *e = q + 1;
        if (e < s->end && (*e == '+' || *e == '-')) e++;
        if (e < s->end && digit(*e)) {
            type = T_FLOAT;
            for (q = e; q < s->end && digit(*q);) q++;
        }
    }
    if (q - s->p > 40 || (q < s->end && letter(*q)))
        FAIL_AT(s->line, QL_EINVAL, "'%.20s' is not a number", s->p);
    QL_TRY(emit(s, type, 0, s->p, (size_t)(q - s->p)));
    s->p = q;
    return QL_OK;
}

/* The inside of {{ … }} and {% … %}. */
static ql_status lex_tag(jparser *s)
{
    bool block = s->p[1] == '%';
    int open = s->line, nested = 0;
    char close = block ? '%' : '}';
    QL_TRY(emit(s, block ? T_BLOCK : T_VAR, 0, s->p, 2));
    s->p += 2;
    if (s->p < s->end && (*s->p == '-' || *s->p == '+')) s->p++;
    while (s->p < s->end) {
        char c = *s->p, d = s->p + 1 < s->end ? s->p[1] : 0, e = s->p + 2 < s->end ? s->p[2] : 0;
        bool sign = (c == '-' || (c == '+' && block)) && d == close && e == '}' && !nested;
        if (sign || (c == close && d == '}' && !nested)) {
            QL_TRY(emit(s, block ? T_BLOCK_END : T_VAR_END, 0, s->p, 2));
            after_tag(s, s->p + (sign ? 3 : 2), sign ? c : 0, block);
            return QL_OK;
        }
        if (blank(c)) {
            advance(s, s->p + 1);
        } else if (c == '"' || c == '\'') {
            QL_TRY(lex_string(s));
        } else if (digit(c)) {
            QL_TRY(lex_number(s));
        } else if (letter(c)) {
            const char *q = s->p;
            while (q < s->end && (letter(*q) || digit(*q))) q++;
            QL_TRY(emit(s, T_NAME, 0, s->p, (size_t)(q - s->p)));
            s->p = q;
        } else {
            int two = (unsigned char)c << 8 | (unsigned char)d;
            bool pair = two == OP_EQ || two == OP_NE || two == OP_LE || two == OP_GE || two == OP_POW ||
                        two == OP_FLOOR;
            if (!pair && !strchr("+-*/%~<>=.,:|()[]{}", c))
                FAIL_AT(s->line, QL_EINVAL, "'%.8s' is not expected in a tag", s->p);
            nested += strchr("([{", c) ? 1 : strchr(")]}", c) ? -1 : 0;
            QL_TRY(emit(s, T_OP, pair ? two : (unsigned char)c, s->p, pair ? 2 : 1));
            s->p += pair ? 2 : 1;
        }
    }
    FAIL_AT(open, QL_EINVAL, "%s", block ? "{% has no %}" : "{{ has no }}");
}

static const char *skip_blanks(const jparser *s, const char *q)
{
    while (q < s->end && blank(*q)) q++;
    return q;
}

/* Behind "{%", an optional sign, the word, and the tag's end: how its text reads; p NULL where it is another tag. */
typedef struct {
    const char *p;   /* behind "%}" */
    char open, close; /* signs */
} bare_tag;

static bare_tag read_bare(const jparser *s, const char *q, const char *word)
{
    bare_tag t = {0}, none = {0};
    size_t n = strlen(word);
    q += 2;
    if (q < s->end && (*q == '-' || *q == '+')) t.open = *q++;
    q = skip_blanks(s, q);
    if ((size_t)(s->end - q) < n || memcmp(q, word, n) != 0) return none;
    q = skip_blanks(s, q + n);
    if (q < s->end && (*q == '-' || *q == '+')) t.close = *q++;
    if (s->end - q < 2 || q[0] != '%' || q[1] != '}') return none;
    t.p = q + 2;
    return t;
}

/* {% raw %} … {% endraw %}: text as it stands. Only a '-' takes away what follows the first tag; the second is like other blocks. */
static ql_status lex_raw(jparser *s, bare_tag raw)
{
    int line = s->line;
    bare_tag end = {0};
    const char *from = raw.close == '-' ? skip_blanks(s, raw.p) : raw.p, *q = from;
    for (; q + 1 < s->end && !end.p; q += !end.p)
        if (q[0] == '{' && q[1] == '%') end = read_bare(s, q, "endraw");
    if (!end.p) FAIL_AT(line, QL_EINVAL, "%s", "{% raw %} has no {% endraw %}");
    const char *stop = q, *l = q;
    if (end.open == '-') {
        while (stop > from && blank(stop[-1])) stop--;
    } else if (end.open != '+') {
        while (l > from && blank(l[-1]) && l[-1] != '\n') l--;
        if ((l > from || from[-1] == '\n') && (l == from || l[-1] == '\n')) stop = l;
    }
    if (stop > from) QL_TRY(emit(s, T_DATA, 0, from, (size_t)(stop - from)));
    advance(s, end.p);
    after_tag(s, end.p, end.close, true);
    return QL_OK;
}

ql_status ql_jlex(jparser *s)
{
    s->line = 1, s->line_starting = true;
    while (s->p < s->end) {
        QL_TRY(lex_data(s));
        if (s->p >= s->end) break;
        bare_tag raw = looking_at(s, "{%") ? read_bare(s, s->p, "raw") : (bare_tag){0};
        if (raw.p && raw.close != '+') QL_TRY(lex_raw(s, raw));
        else if (looking_at(s, "{#")) QL_TRY(lex_comment(s));
        else QL_TRY(lex_tag(s));
    }
    return emit(s, T_END, 0, s->end, 0);
}
