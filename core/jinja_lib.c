/* Jinja's filters, tests and Python's string methods, as far as chat templates use them. */
#include "core/jinja_ast.h"

#include <stdlib.h>

const jvalue *ql_jarg(const jargs *a, int i, const char *keyword)
{
    if (i < a->n) return a->pos + i;
    for (int k = 0; keyword && k < a->n_kw; k++)
        if (jtext_is(a->kw[k], keyword)) return a->kwv + k;
    return NULL;
}

static const jtext *text_arg(const jargs *a, int i, const char *keyword)
{
    const jvalue *v = ql_jarg(a, i, keyword);
    return v && v->type == V_STR ? &v->s : NULL;
}

static const char *find_text(jtext s, jtext what)
{
    return what.n ? memmem(s.p, s.n, what.p, what.n) : s.p;
}

/* ---- strings ----------------------------------------------------------------------------------- */

typedef enum { UPPER, LOWER, CAPITALIZE, TITLE } casing;

static ql_status change_case(jrun *r, jtext s, casing how, jvalue *out)
{
    ql_str t = {0};
    bool first = true;
    QL_TRY(ql_str_add(&t, s.p, s.n));
    for (size_t i = 0; i < t.len; i++) {
        char c = t.data[i];
        if (c & 0x80) {
            ql_str_free(&t);
            return ql_jfail(r, "changing the case of text beyond ASCII is not supported");
        }
        bool up = how == UPPER || (how != LOWER && first);
        if (up && c >= 'a' && c <= 'z') t.data[i] = (char)(c - 32);
        if (!up && c >= 'A' && c <= 'Z') t.data[i] = (char)(c + 32);
        bool is_letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
        first = how == TITLE && !is_letter;
    }
    return ql_jtake(r, &t, out);
}

static ql_status replace(jrun *r, jtext s, jtext from, jtext to, int64_t count, jvalue *out)
{
    ql_str t = {0};
    const char *p = s.p, *end = s.p + s.n;
    ql_status st = QL_OK;
    if (!from.n) return ql_jfail(r, "replacing the empty text is not supported");
    while (count-- != 0) {
        const char *q = memmem(p, (size_t)(end - p), from.p, from.n);
        if (!q) break;
        QL_GO(ql_str_add(&t, p, (size_t)(q - p)));
        QL_GO(ql_str_add(&t, to.p, to.n));
        p = q + from.n;
    }
    QL_GO(ql_str_add(&t, p, (size_t)(end - p)));
    return ql_jtake(r, &t, out);
out:
    ql_str_free(&t);
    return st;
}

static ql_status split(jrun *r, jtext s, const jtext *sep, int64_t max, jvalue *out)
{
    QL_TRY(ql_jlist_new(r, out));
    if (sep && !sep->n) return ql_jfail(r, "split: empty separator");
    for (;;) {
        if (!sep) s = ql_jstrip(s, NULL, 1);
        if (!sep && !s.n) return QL_OK;
        size_t cut = s.n, next = s.n;
        bool found = false;
        if (sep && max) {
            const char *q = memmem(s.p, s.n, sep->p, sep->n);
            if (q) found = true, cut = (size_t)(q - s.p), next = cut + sep->n;
        } else if (max) {
            for (size_t i = 0; i < s.n && !found;) {
                int len;
                uint32_t c = ql_utf8_get((const unsigned char *)s.p + i, &len);
                if ((ql_uni(c) & QL_UNI_CLASS) == QL_UNI_SPACE || (c >= 0x1c && c <= 0x1f))
                    found = true, cut = i, next = i + (size_t)len;
                i += (size_t)len;
            }
        }
        jtext part = {s.p, cut};
        if (!sep && !found) part = ql_jstrip(part, NULL, 2);
        QL_TRY(ql_jlist_add(r, out->list, jv_str(part.p, part.n)));
        if (!found) return QL_OK;
        s.p += next, s.n -= next, max--;
    }
}

static bool affix(jtext s, jtext x, bool at_end)
{
    return x.n <= s.n && memcmp(at_end ? s.p + s.n - x.n : s.p, x.p, x.n) == 0;
}

/* startswith, endswith: one string or a tuple of them. */
static ql_status has_affix(jrun *r, jtext s, const jargs *a, bool at_end, jvalue *out)
{
    const jvalue *v = ql_jarg(a, 0, NULL);
    bool yes = false;
    if (a->n != 1 || (v->type != V_STR && v->type != V_TUPLE))
        return ql_jfail(r, "%s needs one string", at_end ? "endswith" : "startswith");
    if (v->type == V_STR) yes = affix(s, v->s, at_end);
    for (size_t i = 0; v->type == V_TUPLE && i < v->list->n; i++)
        yes |= v->list->v[i].type == V_STR && affix(s, v->list->v[i].s, at_end);
    *out = jv_bool(yes);
    return QL_OK;
}

static ql_status join(jrun *r, jtext sep, const jlist *l, jvalue *out)
{
    ql_str t = {0};
    ql_status st = QL_OK;
    for (size_t i = 0; i < l->n; i++) {
        if (i) QL_GO(ql_str_add(&t, sep.p, sep.n));
        QL_GO(ql_jstring(r, l->v + i, false, 0, &t));
    }
    return ql_jtake(r, &t, out);
out:
    ql_str_free(&t);
    return st;
}

static int64_t count_arg(const jargs *a, int i, const char *keyword)
{
    const jvalue *v = ql_jarg(a, i, keyword);
    return v && v->type == V_INT ? v->i : -1;
}

static ql_status string_method(jrun *r, jtext s, jtext name, const jargs *a, jvalue *out, bool *known)
{
    const jtext *x = text_arg(a, 0, NULL), *y = text_arg(a, 1, NULL);
    bool l = jtext_is(name, "lstrip"), rs = jtext_is(name, "rstrip");
    if (l || rs || jtext_is(name, "strip")) {
        jtext t = ql_jstrip(s, x, l ? 1 : rs ? 2 : 3);
        *out = jv_str(t.p, t.n);
        return QL_OK;
    }
    if (jtext_is(name, "split")) return split(r, s, x, count_arg(a, 1, "maxsplit"), out);
    if (jtext_is(name, "startswith")) return has_affix(r, s, a, false, out);
    if (jtext_is(name, "endswith")) return has_affix(r, s, a, true, out);
    if (jtext_is(name, "replace") && x && y) return replace(r, s, *x, *y, count_arg(a, 2, "count"), out);
    if (jtext_is(name, "upper")) return change_case(r, s, UPPER, out);
    if (jtext_is(name, "lower")) return change_case(r, s, LOWER, out);
    if (jtext_is(name, "capitalize")) return change_case(r, s, CAPITALIZE, out);
    if (jtext_is(name, "title")) return change_case(r, s, TITLE, out);
    if (jtext_is(name, "join") && a->n == 1) {
        jlist *items;
        QL_TRY(ql_jitems(r, a->pos, &items));
        return join(r, s, items, out);
    }
    if (jtext_is(name, "find") && a->n == 1 && x) {
        const char *q = find_text(s, *x);
        *out = jv_int(q ? (int64_t)ql_jchars((jtext){s.p, (size_t)(q - s.p)}) : -1);
        return QL_OK;
    }
    if (jtext_is(name, "count") && a->n == 1 && x && x->n) {
        int64_t n = 0;
        for (const char *q; (q = find_text(s, *x)); n++) {
            s.n -= (size_t)(q - s.p) + x->n;
            s.p = q + x->n;
        }
        *out = jv_int(n);
        return QL_OK;
    }
    *known = false;
    return QL_OK;
}

static ql_status dict_items(jrun *r, const jdict *d, int what, jvalue *out)
{
    QL_TRY(ql_jlist_new(r, out));
    for (size_t i = 0; i < d->n; i++) {
        jvalue key = jv_str(d->key[i].p, d->key[i].n), pair;
        if (what == 2) {
            QL_TRY(ql_jlist_new(r, &pair));
            pair.type = V_TUPLE;
            QL_TRY(ql_jlist_add(r, pair.list, key));
            QL_TRY(ql_jlist_add(r, pair.list, d->v[i]));
        }
        QL_TRY(ql_jlist_add(r, out->list, what == 0 ? key : what == 1 ? d->v[i] : pair));
    }
    return QL_OK;
}

ql_status ql_jmethod(jrun *r, const jvalue *v, jtext name, const jargs *a, jvalue *out, bool *known)
{
    *known = true;
    if (v->type == V_STR) return string_method(r, v->s, name, a, out, known);
    if (v->type == V_DICT) {
        if (jtext_is(name, "keys")) return dict_items(r, v->dict, 0, out);
        if (jtext_is(name, "values")) return dict_items(r, v->dict, 1, out);
        if (jtext_is(name, "items")) return dict_items(r, v->dict, 2, out);
        if (jtext_is(name, "get") && a->n >= 1) {
            const jtext *key = text_arg(a, 0, NULL);
            const jvalue *found = key ? ql_jdict_find(v->dict, *key) : NULL, *other = ql_jarg(a, 1, NULL);
            *out = found ? *found : other ? *other : jv_none();
            return QL_OK;
        }
    }
    *known = false;
    return QL_OK;
}

/* ---- tests ------------------------------------------------------------------------------------- */

static const char *const tests[] = {
    "defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number", "integer",
    "float", "boolean", "true", "false", "even", "odd", "divisibleby", "equalto", "eq", "ne", "lt", "gt",
    "le", "ge", "in", "callable", "sameas", "lower", "upper"};

static bool listed(const char *const *list, size_t n, jtext name)
{
    for (size_t i = 0; i < n; i++)
        if (jtext_is(name, list[i])) return true;
    return false;
}

bool ql_jtest_known(jtext name)
{
    return listed(tests, sizeof tests / sizeof *tests, name);
}

static ql_status compare_test(jrun *r, jtext name, const jvalue *v, const jargs *a, bool *out)
{
    static const struct {
        const char *name;
        int op;
    } ops[] = {{"equalto", OP_EQ}, {"eq", OP_EQ}, {"ne", OP_NE}, {"lt", '<'},
               {"gt", '>'},        {"le", OP_LE}, {"ge", OP_GE}, {"in", OP_IN}};
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++) {
        if (!jtext_is(name, ops[i].name)) continue;
        if (a->n != 1) return ql_jfail(r, "the test '%s' needs one argument", ops[i].name);
        return ql_jcompare(r, ops[i].op, v, a->pos, out);
    }
    return ql_jfail(r, "the test '%.*s' is not supported", (int)name.n, name.p);
}

ql_status ql_jtest(jrun *r, jtext name, const jvalue *v, const jargs *a, bool *out)
{
    jtype t = v->type;
    bool list = t == V_LIST || t == V_TUPLE;
    *out = false;
    if (jtext_is(name, "defined")) *out = t != V_UNDEFINED;
    else if (jtext_is(name, "undefined")) *out = t == V_UNDEFINED;
    else if (jtext_is(name, "none")) *out = t == V_NONE;
    else if (jtext_is(name, "string")) *out = t == V_STR;
    else if (jtext_is(name, "mapping")) *out = t == V_DICT;
    else if (jtext_is(name, "iterable")) *out = list || t == V_STR || t == V_DICT || t == V_UNDEFINED || t == V_LOOP;
    else if (jtext_is(name, "sequence")) *out = list || t == V_STR || t == V_DICT || t == V_UNDEFINED;
    else if (jtext_is(name, "number")) *out = t == V_INT || t == V_FLOAT || t == V_BOOL;
    else if (jtext_is(name, "integer")) *out = t == V_INT;
    else if (jtext_is(name, "float")) *out = t == V_FLOAT;
    else if (jtext_is(name, "boolean")) *out = t == V_BOOL;
    else if (jtext_is(name, "true")) *out = t == V_BOOL && v->b;
    else if (jtext_is(name, "false")) *out = t == V_BOOL && !v->b;
    else if (jtext_is(name, "callable")) *out = t == V_MACRO;
    else if (jtext_is(name, "even") && t == V_INT) *out = v->i % 2 == 0;
    else if (jtext_is(name, "odd") && t == V_INT) *out = v->i % 2 != 0;
    else if (jtext_is(name, "divisibleby") && t == V_INT && count_arg(a, 0, NULL) > 0)
        *out = v->i % count_arg(a, 0, NULL) == 0;
    else if (jtext_is(name, "sameas") && a->n == 1 && t <= V_BOOL)
        *out = a->pos[0].type == t && ql_jequal(v, a->pos);
    else return compare_test(r, name, v, a, out);
    return QL_OK;
}

/* ---- filters ----------------------------------------------------------------------------------- */

static const char *const filters[] = {
    "trim", "tojson", "length", "count", "string", "upper", "lower", "capitalize", "title", "join",
    "default", "d", "safe", "list", "items", "first", "last", "replace", "reject", "select", "selectattr",
    "rejectattr", "map", "int", "float", "abs", "reverse", "unique", "dictsort"};

bool ql_jfilter_known(jtext name)
{
    return listed(filters, sizeof filters / sizeof *filters, name);
}

/* What map(attribute=…), selectattr and rejectattr look at: a dotted path. */
static ql_status attribute(jrun *r, const jvalue *v, jtext path, jvalue *out)
{
    *out = *v;
    while (path.n) {
        const char *dot = memchr(path.p, '.', path.n);
        size_t n = dot ? (size_t)(dot - path.p) : path.n;
        jvalue next;
        QL_TRY(ql_jattr(r, out, (jtext){path.p, n}, &next));
        *out = next;
        path.p += n + (dot != NULL), path.n -= n + (dot != NULL);
    }
    return QL_OK;
}

/* select, reject, selectattr, rejectattr: [attribute,] [test, arguments …] */
static ql_status pick(jrun *r, jtext name, const jvalue *v, const jargs *a, jvalue *out)
{
    bool attr = name.n == 10, keep = name.p[0] == 's';
    int at = attr;
    jlist *items;
    jargs rest = {0};
    const jtext *path = attr ? text_arg(a, 0, NULL) : NULL;
    if (!ql_jtruth(v)) return ql_jlist_new(r, out); /* as Jinja has it: none, 0 and the like have no items */
    QL_TRY(ql_jitems(r, v, &items));
    if (attr && !path) return ql_jfail(r, "%.*s needs the name of an attribute", (int)name.n, name.p);
    const jtext *test = a->n > at ? text_arg(a, at, NULL) : NULL;
    if (a->n > at && (!test || !ql_jtest_known(*test)))
        return ql_jfail(r, "%.*s: that test is not supported", (int)name.n, name.p);
    for (int i = at + 1; i < a->n; i++) rest.pos[rest.n++] = a->pos[i];
    QL_TRY(ql_jlist_new(r, out));
    for (size_t i = 0; i < items->n; i++) {
        jvalue x = items->v[i];
        bool yes;
        if (attr) QL_TRY(attribute(r, items->v + i, *path, &x));
        if (test) QL_TRY(ql_jtest(r, *test, &x, &rest, &yes));
        else yes = ql_jtruth(&x);
        if (yes == keep) QL_TRY(ql_jlist_add(r, out->list, items->v[i]));
    }
    return QL_OK;
}

static ql_status map(jrun *r, const jvalue *v, const jargs *a, jvalue *out)
{
    jlist *items;
    const jtext *path = text_arg(a, 99, "attribute"), *name = text_arg(a, 0, NULL);
    jargs rest = {0};
    if (!ql_jtruth(v)) return ql_jlist_new(r, out);
    QL_TRY(ql_jitems(r, v, &items));
    QL_TRY(ql_jlist_new(r, out));
    if (!path && (!name || !ql_jfilter_known(*name)))
        return ql_jfail(r, "map needs attribute= or the name of a supported filter");
    for (int i = 1; i < a->n; i++) rest.pos[rest.n++] = a->pos[i];
    for (size_t i = 0; i < items->n; i++) {
        jvalue x;
        QL_TRY(path ? attribute(r, items->v + i, *path, &x) : ql_jfilter(r, *name, items->v + i, &rest, &x));
        QL_TRY(ql_jlist_add(r, out->list, x));
    }
    return QL_OK;
}

static ql_status to_number(jrun *r, const jvalue *v, bool integer, jvalue *out)
{
    char digits[64];
    double f = v->type == V_FLOAT ? v->f : v->type == V_BOOL ? v->b : 0;
    if (v->type == V_INT && integer) return *out = *v, QL_OK;
    if (v->type == V_INT) f = (double)v->i;
    if (v->type == V_STR) {
        jtext s = ql_jstrip(v->s, NULL, 3);
        if (s.n >= sizeof digits) return ql_jfail(r, "a number of %zu digits", s.n);
        memcpy(digits, s.p, s.n);
        digits[s.n] = 0;
        if (integer && !strpbrk(digits, ".eE")) return *out = jv_int(strtoll(digits, NULL, 10)), QL_OK;
        f = strtod(digits, NULL);
    }
    if (integer && !(f > -9e18 && f < 9e18)) return ql_jfail(r, "a number is too large for an integer");
    *out = integer ? jv_int((int64_t)f) : (jvalue){.type = V_FLOAT, .f = f};
    return QL_OK;
}

static ql_status tojson(jrun *r, const jvalue *v, const jargs *a, jvalue *out)
{
    ql_str s = {0};
    int64_t indent = count_arg(a, 99, "indent");
    if (a->n) return ql_jfail(r, "tojson takes its options by name");
    for (int i = 0; i < a->n_kw; i++) {
        bool fine = jtext_is(a->kw[i], "indent") ||
                    (jtext_is(a->kw[i], "ensure_ascii") && !ql_jtruth(a->kwv + i)) ||
                    (jtext_is(a->kw[i], "sort_keys") && !ql_jtruth(a->kwv + i));
        if (!fine) return ql_jfail(r, "tojson's %.*s is not supported", (int)a->kw[i].n, a->kw[i].p);
    }
    if (indent > 32) return ql_jfail(r, "tojson: indent is too large");
    ql_status st = ql_jdump(r, v, (int)indent, 0, &s);
    if (st == QL_OK) return ql_jtake(r, &s, out);
    ql_str_free(&s);
    return st;
}

static ql_status list_filter(jrun *r, jtext name, const jvalue *v, const jargs *a, jvalue *out)
{
    jlist *items;
    const jtext *sep = text_arg(a, 0, "d");
    QL_TRY(ql_jitems(r, v, &items));
    if (jtext_is(name, "join")) {
        if (ql_jarg(a, 1, "attribute")) return ql_jfail(r, "join's attribute is not supported");
        return join(r, sep ? *sep : (jtext){"", 0}, items, out);
    }
    if (jtext_is(name, "first") || jtext_is(name, "last")) {
        *out = (jvalue){.type = V_UNDEFINED, .s = name};
        if (items->n) *out = items->v[name.n == 5 ? 0 : items->n - 1];
        return QL_OK;
    }
    QL_TRY(ql_jlist_new(r, out));
    for (size_t i = 0; i < items->n; i++) {
        bool seen = false;
        for (size_t k = 0; jtext_is(name, "unique") && k < out->list->n && !seen; k++)
            seen = ql_jequal(out->list->v + k, items->v + i);
        if (!seen)
            QL_TRY(ql_jlist_add(r, out->list, items->v[name.n == 7 ? items->n - 1 - i : i]));
    }
    return QL_OK;
}

static int by_key(const jvalue *a, const jvalue *b)
{
    const jvalue *x = a->list->v, *y = b->list->v;
    for (size_t i = 0; i < x->s.n && i < y->s.n; i++) {
        char c = x->s.p[i], d = y->s.p[i];
        if (c >= 'A' && c <= 'Z') c = (char)(c + 32);
        if (d >= 'A' && d <= 'Z') d = (char)(d + 32);
        if (c != d) return c < d ? -1 : 1;
    }
    if (x->s.n != y->s.n) return x->s.n < y->s.n ? -1 : 1;
    return 0;
}

/* (key, value) pairs by key, upper and lower case alike. */
static ql_status dict_sort(jrun *r, const jvalue *v, const jargs *a, jvalue *out)
{
    if (v->type != V_DICT || a->n || a->n_kw) return ql_jfail(r, "dictsort sorts a dict by its keys; its options are not supported");
    QL_TRY(dict_items(r, v->dict, 2, out));
    for (size_t i = 0; i < v->dict->n; i++)
        for (size_t k = 0; k < v->dict->key[i].n; k++)
            if (v->dict->key[i].p[k] & 0x80) return ql_jfail(r, "dictsort of keys beyond ASCII is not supported");
    for (size_t i = 1; i < out->list->n; i++) { /* stable; dicts of templates are short */
        jvalue x = out->list->v[i];
        size_t k = i;
        for (; k && by_key(&out->list->v[k - 1], &x) > 0; k--) out->list->v[k] = out->list->v[k - 1];
        out->list->v[k] = x;
        r->steps += (int64_t)(i - k);
    }
    return QL_OK;
}

static ql_status text_filter(jrun *r, jtext name, const jvalue *v, const jargs *a, jvalue *out)
{
    ql_str s = {0};
    jvalue t = *v;
    const jtext *x = text_arg(a, 0, NULL), *y = text_arg(a, 1, NULL);
    if (v->type != V_STR) { /* soft_str */
        ql_status st = ql_jstring(r, v, false, 0, &s);
        if (st != QL_OK) {
            ql_str_free(&s);
            return st;
        }
        QL_TRY(ql_jtake(r, &s, &t));
    }
    *out = t;
    if (jtext_is(name, "upper")) return change_case(r, t.s, UPPER, out);
    if (jtext_is(name, "lower")) return change_case(r, t.s, LOWER, out);
    if (jtext_is(name, "capitalize")) return change_case(r, t.s, CAPITALIZE, out);
    if (jtext_is(name, "title")) return change_case(r, t.s, TITLE, out);
    if (jtext_is(name, "trim")) {
        jtext u = ql_jstrip(t.s, text_arg(a, 0, "chars"), 3);
        *out = jv_str(u.p, u.n);
    }
    if (jtext_is(name, "replace")) {
        if (!x || !y) return ql_jfail(r, "replace needs two strings");
        return replace(r, t.s, *x, *y, count_arg(a, 2, "count"), out);
    }
    return QL_OK; /* string, safe */
}

ql_status ql_jfilter(jrun *r, jtext name, const jvalue *v, const jargs *a, jvalue *out)
{
    bool none = v->type == V_UNDEFINED;
    *out = *v;
    if (jtext_is(name, "default") || jtext_is(name, "d")) {
        const jvalue *other = ql_jarg(a, 0, "default_value"), *falsy = ql_jarg(a, 1, "boolean");
        if (none || (falsy && ql_jtruth(falsy) && !ql_jtruth(v))) *out = other ? *other : jv_str("", 0);
        return QL_OK;
    }
    if (jtext_is(name, "tojson")) return tojson(r, v, a, out);
    if (jtext_is(name, "length") || jtext_is(name, "count")) {
        *out = jv_int(ql_jlength(v));
        return out->i < 0 ? ql_jfail(r, "a value that is %s has no length", ql_jtype_name(v)) : QL_OK;
    }
    if (jtext_is(name, "items")) {
        if (v->type == V_DICT) return dict_items(r, v->dict, 2, out);
        return none ? ql_jlist_new(r, out) : ql_jfail(r, "items needs a dict, not %s", ql_jtype_name(v));
    }
    if (name.n >= 6 && (memcmp(name.p, "select", 6) == 0 || memcmp(name.p, "reject", 6) == 0))
        return pick(r, name, v, a, out);
    if (jtext_is(name, "map")) return map(r, v, a, out);
    if (jtext_is(name, "dictsort")) return dict_sort(r, v, a, out);
    if (jtext_is(name, "int") || jtext_is(name, "float")) return to_number(r, v, name.n == 3, out);
    if (jtext_is(name, "abs")) {
        if (v->type == V_INT) out->i = v->i < 0 ? -v->i : v->i;
        else if (v->type == V_FLOAT) out->f = v->f < 0 ? -v->f : v->f;
        else return ql_jfail(r, "abs needs a number");
        return QL_OK;
    }
    if (jtext_is(name, "reverse") && v->type == V_STR)
        return ql_jfail(r, "reversing a string is not supported");
    if (jtext_is(name, "join") || jtext_is(name, "first") || jtext_is(name, "last") ||
        jtext_is(name, "list") || jtext_is(name, "reverse") || jtext_is(name, "unique"))
        return list_filter(r, name, v, a, out);
    return text_filter(r, name, v, a, out);
}
