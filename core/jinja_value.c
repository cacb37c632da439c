/* Jinja values: Python's truth, equality, text and JSON forms. */
#include "core/jinja_ast.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

enum { DEPTH = 64 };

ql_status ql_jfail(jrun *r, const char *fmt, ...)
{
    char text[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return ql_fail(QL_EINVAL, "line %d: %s", r->line, text);
}

const char *ql_jtype_name(const jvalue *v)
{
    static const char *const names[] = {"undefined", "None", "bool",  "int",       "float", "str",
                                        "list",      "tuple", "dict", "namespace", "loop",  "macro",
                                        "range",     "a dict's view", "generator", "method", "function"};
    return names[v->type];
}

bool ql_jtruth(const jvalue *v)
{
    switch (v->type) {
    case V_UNDEFINED:
    case V_NONE: return false;
    case V_BOOL: return v->b;
    case V_INT: return v->i != 0;
    case V_FLOAT: return v->f != 0;
    case V_STR: return v->s.n > 0;
    case V_LIST:
    case V_TUPLE:
    case V_RANGE:
    case V_VIEW: return v->list->n > 0;
    case V_DICT: return v->dict->n > 0;
    default: return true;
    }
}

static bool number(const jvalue *v, double *out)
{
    if (v->type == V_BOOL) *out = v->b;
    else if (v->type == V_INT) *out = (double)v->i;
    else if (v->type == V_FLOAT) *out = v->f;
    else return false;
    return true;
}

static bool equal(const jvalue *a, const jvalue *b, int depth)
{
    double x, y;
    if (depth > DEPTH) return false;
    if ((a->type == V_INT) && (b->type == V_INT)) return a->i == b->i;
    if (number(a, &x) && number(b, &y)) return x == y;
    if (a->type != b->type) return false;
    switch (a->type) {
    case V_UNDEFINED:
    case V_NONE: return true;
    case V_STR: return a->s.n == b->s.n && memcmp(a->s.p, b->s.p, a->s.n) == 0;
    case V_LIST:
    case V_TUPLE:
    case V_RANGE:
        if (a->list->n != b->list->n) return false;
        for (size_t i = 0; i < a->list->n; i++)
            if (!equal(a->list->v + i, b->list->v + i, depth + 1)) return false;
        return true;
    case V_DICT:
        if (a->dict->n != b->dict->n) return false;
        for (size_t i = 0; i < a->dict->n; i++) {
            const jvalue *v = ql_jdict_find(b->dict, a->dict->key[i]);
            if (!v || !equal(a->dict->v + i, v, depth + 1)) return false;
        }
        return true;
    default: return a->dict == b->dict;
    }
}

bool ql_jequal(const jvalue *a, const jvalue *b)
{
    return equal(a, b, 0);
}

/* ---- containers -------------------------------------------------------------------------------- */

ql_status ql_jlist_new(jrun *r, jvalue *out)
{
    jlist *l = ql_jalloc(&r->mem, sizeof *l);
    if (!l) return QL_ENOMEM;
    *out = (jvalue){.type = V_LIST, .list = l};
    return QL_OK;
}

ql_status ql_jlist_add(jrun *r, jlist *l, jvalue v)
{
    if (l->n == l->cap) {
        size_t cap = l->cap ? 2 * l->cap : 8;
        jvalue *p = ql_jalloc(&r->mem, cap * sizeof *p);
        if (!p) return QL_ENOMEM;
        if (l->n) memcpy(p, l->v, l->n * sizeof *p);
        l->v = p, l->cap = cap;
    }
    l->v[l->n++] = v;
    return QL_OK;
}

ql_status ql_jdict_new(jrun *r, jvalue *out)
{
    jdict *d = ql_jalloc(&r->mem, sizeof *d);
    if (!d) return QL_ENOMEM;
    *out = (jvalue){.type = V_DICT, .dict = d};
    return QL_OK;
}

jvalue *ql_jdict_find(const jdict *d, jtext key)
{
    for (size_t i = 0; i < d->n; i++)
        if (d->key[i].n == key.n && memcmp(d->key[i].p, key.p, key.n) == 0) return d->v + i;
    return NULL;
}

ql_status ql_jdict_set(jrun *r, jdict *d, jtext key, jvalue v)
{
    jvalue *old = ql_jdict_find(d, key);
    if (old) {
        *old = v;
        return QL_OK;
    }
    if (d->n == d->cap) {
        size_t cap = d->cap ? 2 * d->cap : 8;
        jtext *k = ql_jalloc(&r->mem, cap * sizeof *k);
        jvalue *p = ql_jalloc(&r->mem, cap * sizeof *p);
        if (!k || !p) return QL_ENOMEM;
        if (d->n) memcpy(k, d->key, d->n * sizeof *k), memcpy(p, d->v, d->n * sizeof *p);
        d->key = k, d->v = p, d->cap = cap;
    }
    d->key[d->n] = key, d->v[d->n++] = v;
    return QL_OK;
}

/* Strings are borrowed from the JSON value, which outlives the rendering. */
ql_status ql_jfrom_json(jrun *r, const json_t *j, int depth, jvalue *out)
{
    if (depth > DEPTH) QL_FAIL(QL_EINVAL, "data nested deeper than %d levels", DEPTH);
    switch (json_typeof(j)) {
    case JSON_NULL: *out = jv_none(); return QL_OK;
    case JSON_TRUE:
    case JSON_FALSE: *out = jv_bool(json_is_true(j)); return QL_OK;
    case JSON_INTEGER: *out = jv_int(json_integer_value(j)); return QL_OK;
    case JSON_REAL: *out = (jvalue){.type = V_FLOAT, .f = json_real_value(j)}; return QL_OK;
    case JSON_STRING: *out = jv_str(json_string_value(j), json_string_length(j)); return QL_OK;
    case JSON_ARRAY:
        QL_TRY(ql_jlist_new(r, out));
        for (size_t i = 0; i < json_array_size(j); i++) {
            jvalue v;
            QL_TRY(ql_jfrom_json(r, json_array_get(j, i), depth + 1, &v));
            QL_TRY(ql_jlist_add(r, out->list, v));
        }
        return QL_OK;
    case JSON_OBJECT: break;
    }
    QL_TRY(ql_jdict_new(r, out));
    json_t *o = (json_t *)(uintptr_t)j;
    for (void *it = json_object_iter(o); it; it = json_object_iter_next(o, it)) {
        const char *key = json_object_iter_key(it);
        jvalue v;
        QL_TRY(ql_jfrom_json(r, json_object_iter_value(it), depth + 1, &v));
        /* JSON keys are unique: no search. */
        QL_TRY(ql_jdict_set(r, out->dict, (jtext){key, strlen(key)}, v));
    }
    return QL_OK;
}

bool ql_jis_list(const jvalue *v)
{
    return v->type == V_LIST || v->type == V_TUPLE || v->type == V_RANGE || v->type == V_VIEW || v->type == V_ITER;
}

ql_status ql_jitems(jrun *r, const jvalue *v, jlist **out)
{
    jvalue list;
    if (ql_jis_list(v) && v->type != V_ITER) {
        *out = v->list;
        return QL_OK;
    }
    QL_TRY(ql_jlist_new(r, &list));
    *out = list.list;
    if (v->type == V_ITER) {
        *list.list = *v->list;
        *v->list = (jlist){0};
        return QL_OK;
    }
    if (v->type == V_STR) {
        for (size_t i = 0; i < v->s.n;) {
            int len;
            ql_utf8_get((const unsigned char *)v->s.p + i, &len);
            QL_TRY(ql_jlist_add(r, *out, jv_str(v->s.p + i, (size_t)len)));
            i += (size_t)len;
        }
    } else if (v->type == V_DICT) {
        for (size_t i = 0; i < v->dict->n; i++)
            QL_TRY(ql_jlist_add(r, *out, jv_str(v->dict->key[i].p, v->dict->key[i].n)));
    } else if (v->type != V_UNDEFINED) {
        return ql_jfail(r, "'%s' is not iterable", ql_jtype_name(v));
    }
    return QL_OK;
}

int64_t ql_jlength(const jvalue *v)
{
    switch (v->type) {
    case V_UNDEFINED: return 0;
    case V_STR: return (int64_t)ql_jchars(v->s);
    case V_LIST:
    case V_TUPLE:
    case V_RANGE:
    case V_VIEW: return (int64_t)v->list->n;
    case V_DICT: return (int64_t)v->dict->n;
    default: return -1;
    }
}

/* ---- text -------------------------------------------------------------------------------------- */

size_t ql_jchars(jtext s)
{
    size_t n = 0;
    for (size_t i = 0; i < s.n; i++) n += (s.p[i] & 0xc0) != 0x80;
    return n;
}

static size_t char_at(jtext s, size_t k)
{
    size_t i = 0;
    while (i < s.n && ((s.p[i] & 0xc0) == 0x80 || k-- > 0)) i++;
    return i;
}

jtext ql_jsubstr(jtext s, size_t from, size_t to)
{
    size_t a = char_at(s, from), b = char_at(s, to);
    return (jtext){s.p + a, b > a ? b - a : 0};
}

static bool strips(jtext s, size_t at, const jtext *chars, int len, uint32_t c)
{
    if (!chars) return (ql_uni(c) & QL_UNI_CLASS) == QL_UNI_SPACE || (c >= 0x1c && c <= 0x1f);
    for (size_t i = 0; i + (size_t)len <= chars->n; i++)
        if (memcmp(chars->p + i, s.p + at, (size_t)len) == 0) return true;
    return false;
}

jtext ql_jstrip(jtext s, const jtext *chars, int sides)
{
    int len;
    while (sides & 1 && s.n) {
        uint32_t c = ql_utf8_get((const unsigned char *)s.p, &len);
        if (!strips(s, 0, chars, len, c)) break;
        s.p += len, s.n -= (size_t)len;
    }
    while (sides & 2 && s.n) {
        uint32_t c = ql_utf8_before((const unsigned char *)s.p + s.n, &len);
        if (!strips(s, s.n - (size_t)len, chars, len, c)) break;
        s.n -= (size_t)len;
    }
    return s;
}

/* The shortest digits that read back as the same double, in Python's notation. */
static ql_status put_float(double f, bool json, ql_str *out)
{
    char digits[40];
    if (isnan(f)) return ql_str_puts(out, json ? "NaN" : "nan");
    if (isinf(f)) return ql_str_printf(out, "%s%s", f < 0 ? "-" : "", json ? "Infinity" : "inf");
    for (int prec = 1; prec <= 17; prec++) {
        snprintf(digits, sizeof digits, "%.*e", prec - 1, f);
        if (strtod(digits, NULL) == f) break;
    }
    char *e = strchr(digits, 'e');
    int exp10 = atoi(e + 1), sig = (int)(e - digits) - (digits[0] == '-');
    sig -= sig > 1; /* the point */
    if (exp10 < -4 || exp10 >= 16)
        return ql_str_printf(out, "%.*se%c%02d", (int)(e - digits), digits, exp10 < 0 ? '-' : '+', abs(exp10));
    return ql_str_printf(out, "%.*f", sig - 1 > exp10 ? sig - 1 - exp10 : 1, f);
}

/* What Python's repr() writes as its number: control and format characters, spaces but " ", and private ones. Those that no
 * Unicode has named yet stay as they are: Pythons differ in them. */
static bool is_hidden(uint32_t c)
{
    static const uint32_t ranges[][2] = {
        {0x7f, 0x9f},       {0xad, 0xad},       {0x600, 0x605},     {0x61c, 0x61c},     {0x6dd, 0x6dd},     {0x70f, 0x70f},
        {0x890, 0x891},     {0x8e2, 0x8e2},     {0x180e, 0x180e},   {0x200b, 0x200f},   {0x202a, 0x202e},   {0x2060, 0x206f},
        {0xe000, 0xf8ff},   {0xfeff, 0xfeff},   {0xfff9, 0xfffb},   {0x110bd, 0x110bd}, {0x110cd, 0x110cd}, {0x13430, 0x1343f},
        {0x1bca0, 0x1bca3}, {0x1d173, 0x1d17a}, {0xe0000, 0xe00ff}, {0xe01f0, 0x10ffff}};
    if (c < 0x7f) return c < 32;
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++)
        if (c >= ranges[i][0] && c <= ranges[i][1]) return true;
    return (ql_uni(c) & QL_UNI_CLASS) == QL_UNI_SPACE;
}

static ql_status put_repr_char(const char *p, int *len, char quote, ql_str *out)
{
    uint32_t c = ql_utf8_get((const unsigned char *)p, len);
    if (c == (unsigned char)quote || c == '\\') return ql_str_printf(out, "\\%c", (int)c);
    if (c == '\n' || c == '\r' || c == '\t') return ql_str_printf(out, "\\%c", c == '\n' ? 'n' : c == '\r' ? 'r' : 't');
    if (!is_hidden(c)) return ql_str_add(out, p, (size_t)*len);
    return ql_str_printf(out, c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x", c);
}

static ql_status put_repr(jtext s, ql_str *out)
{
    char quote = memchr(s.p, '\'', s.n) && !memchr(s.p, '"', s.n) ? '"' : '\'';
    QL_TRY(ql_str_add(out, &quote, 1));
    for (size_t i = 0; i < s.n;) {
        int len;
        QL_TRY(put_repr_char(s.p + i, &len, quote, out));
        i += (size_t)len;
    }
    return ql_str_add(out, &quote, 1);
}

ql_status ql_jstring(jrun *r, const jvalue *v, bool repr, int depth, ql_str *out)
{
    if (depth > DEPTH) return ql_jfail(r, "a value is nested deeper than %d levels", DEPTH);
    switch (v->type) {
    case V_UNDEFINED: return repr ? ql_str_puts(out, "Undefined") : QL_OK;
    case V_NONE: return ql_str_puts(out, "None");
    case V_BOOL: return ql_str_puts(out, v->b ? "True" : "False");
    case V_INT: return ql_str_printf(out, "%lld", (long long)v->i);
    case V_FLOAT: return put_float(v->f, false, out);
    case V_STR: return repr ? put_repr(v->s, out) : ql_str_add(out, v->s.p, v->s.n);
    case V_LIST:
    case V_TUPLE:
        QL_TRY(ql_str_puts(out, v->type == V_LIST ? "[" : "("));
        for (size_t i = 0; i < v->list->n; i++) {
            if (i) QL_TRY(ql_str_puts(out, ", "));
            QL_TRY(ql_jstring(r, v->list->v + i, true, depth + 1, out));
        }
        return ql_str_puts(out, v->type == V_LIST ? "]" : v->list->n == 1 ? ",)" : ")");
    case V_DICT:
        QL_TRY(ql_str_puts(out, "{"));
        for (size_t i = 0; i < v->dict->n; i++) {
            if (i) QL_TRY(ql_str_puts(out, ", "));
            QL_TRY(put_repr(v->dict->key[i], out));
            QL_TRY(ql_str_puts(out, ": "));
            QL_TRY(ql_jstring(r, v->dict->v + i, true, depth + 1, out));
        }
        return ql_str_puts(out, "}");
    default: return ql_jfail(r, "a %s cannot be printed", ql_jtype_name(v));
    }
}

static ql_status put_json_string(jtext s, ql_str *out)
{
    QL_TRY(ql_str_puts(out, "\""));
    for (size_t i = 0, from = 0; i <= s.n; i++) {
        unsigned char c = i < s.n ? (unsigned char)s.p[i] : '"';
        if (c >= 32 && c != '"' && c != '\\') continue;
        QL_TRY(ql_str_add(out, s.p + from, i - from));
        from = i + 1;
        if (i == s.n) break;
        static const char names[] = "\"\"\\\\\nn\rr\tt\bb\ff";
        const char *e = NULL;
        for (size_t k = 0; k + 1 < sizeof names - 1 && !e; k += 2)
            if (names[k] == (char)c) e = names + k + 1;
        if (e) QL_TRY(ql_str_printf(out, "\\%c", *e));
        else QL_TRY(ql_str_printf(out, "\\u%04x", c));
    }
    return ql_str_puts(out, "\"");
}

static ql_status new_line(int indent, int depth, ql_str *out)
{
    if (indent < 0) return QL_OK;
    QL_TRY(ql_str_puts(out, "\n"));
    for (int i = 0; i < indent * depth; i++) QL_TRY(ql_str_add(out, " ", 1));
    return QL_OK;
}

ql_status ql_jdump(jrun *r, const jvalue *v, int indent, int depth, ql_str *out)
{
    bool dict = v->type == V_DICT, list = v->type == V_LIST || v->type == V_TUPLE;
    if (depth > DEPTH) return ql_jfail(r, "a value is nested deeper than %d levels", DEPTH);
    if (v->type == V_NONE) return ql_str_puts(out, "null");
    if (v->type == V_BOOL) return ql_str_puts(out, v->b ? "true" : "false");
    if (v->type == V_STR) return put_json_string(v->s, out);
    if (v->type == V_FLOAT) return put_float(v->f, true, out);
    if (v->type == V_INT) return ql_jstring(r, v, false, 0, out);
    if (!dict && !list) return ql_jfail(r, "a value that is %s cannot become JSON", ql_jtype_name(v));
    size_t n = dict ? v->dict->n : v->list->n;
    QL_TRY(ql_str_puts(out, dict ? "{" : "["));
    for (size_t i = 0; i < n; i++) {
        if (i) QL_TRY(ql_str_puts(out, indent < 0 ? ", " : ","));
        QL_TRY(new_line(indent, depth + 1, out));
        if (dict) {
            QL_TRY(put_json_string(v->dict->key[i], out));
            QL_TRY(ql_str_puts(out, ": "));
        }
        QL_TRY(ql_jdump(r, dict ? v->dict->v + i : v->list->v + i, indent, depth + 1, out));
    }
    if (n) QL_TRY(new_line(indent, depth, out));
    return ql_str_puts(out, dict ? "}" : "]");
}

ql_status ql_jtake(jrun *r, ql_str *s, jvalue *out)
{
    char *p = ql_jalloc(&r->mem, s->len + 1);
    if (p && s->len) memcpy(p, s->data, s->len);
    *out = jv_str(p, s->len);
    ql_str_free(s);
    return p ? QL_OK : QL_ENOMEM;
}
