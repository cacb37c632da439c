/* Jinja's filters and tests, as far as chat templates use them. */
#include "core/jinja_ast.h"

#include <errno.h>
#include <stdlib.h>

const jvalue *ql_jarg(const jargs *a, int i, const char *keyword)
{
    if (i < a->n) return a->pos + i;
    for (int k = 0; keyword && k < a->n_kw; k++)
        if (jtext_is(a->kw[k], keyword)) return a->kwv + k;
    return NULL;
}

const jtext *ql_jtext_arg(const jargs *a, int i, const char *keyword)
{
    const jvalue *v = ql_jarg(a, i, keyword);
    return v && v->type == V_STR ? &v->s : NULL;
}

int64_t ql_jint_arg(const jargs *a, int i, const char *keyword)
{
    const jvalue *v = ql_jarg(a, i, keyword);
    return v && v->type == V_INT ? v->i : -1;
}

/* ---- tests ------------------------------------------------------------------------------------- */

static const char *const tests[] = {
    "defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number", "integer",
    "float", "boolean", "true", "false", "even", "odd", "divisibleby", "equalto", "eq", "==", "ne", "!=", "lt", "lessthan", "<",
    "gt", "greaterthan", ">", "le", "<=", "ge", ">=", "in", "callable", "sameas"};

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
    } ops[] = {{"equalto", OP_EQ}, {"eq", OP_EQ},  {"==", OP_EQ}, {"ne", OP_NE},  {"!=", OP_NE},
               {"lt", '<'},        {"lessthan", '<'}, {"<", '<'}, {"gt", '>'},    {"greaterthan", '>'}, {">", '>'},
               {"le", OP_LE},      {"<=", OP_LE}, {"ge", OP_GE}, {">=", OP_GE}, {"in", OP_IN}};
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
    bool list = t == V_LIST || t == V_TUPLE || t == V_RANGE;
    *out = false;
    if (jtext_is(name, "defined")) *out = t != V_UNDEFINED;
    else if (jtext_is(name, "undefined")) *out = t == V_UNDEFINED;
    else if (jtext_is(name, "none")) *out = t == V_NONE;
    else if (jtext_is(name, "string")) *out = t == V_STR;
    else if (jtext_is(name, "mapping")) *out = t == V_DICT;
    else if (jtext_is(name, "iterable")) *out = ql_jis_list(v) || t == V_STR || t == V_DICT || t == V_UNDEFINED || t == V_LOOP;
    else if (jtext_is(name, "sequence")) *out = list || t == V_STR || t == V_DICT || t == V_UNDEFINED;
    else if (jtext_is(name, "number")) *out = t == V_INT || t == V_FLOAT || t == V_BOOL;
    else if (jtext_is(name, "integer")) *out = t == V_INT;
    else if (jtext_is(name, "float")) *out = t == V_FLOAT;
    else if (jtext_is(name, "boolean")) *out = t == V_BOOL;
    else if (jtext_is(name, "true")) *out = t == V_BOOL && v->b;
    else if (jtext_is(name, "false")) *out = t == V_BOOL && !v->b;
    else if (jtext_is(name, "callable")) *out = t == V_MACRO || t == V_METHOD || t == V_FUNCTION || t == V_UNDEFINED;
    else if (jtext_is(name, "even") && t == V_INT) *out = v->i % 2 == 0;
    else if (jtext_is(name, "odd") && t == V_INT) *out = v->i % 2 != 0;
    else if (jtext_is(name, "divisibleby") && t == V_INT && ql_jint_arg(a, 0, NULL) > 0)
        *out = v->i % ql_jint_arg(a, 0, NULL) == 0;
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

/* What map(attribute=…), selectattr and rejectattr look at: a dotted path, of which numbers are positions. `other` (may be NULL)
 * stands for what is missing. */
static ql_status attribute(jrun *r, const jvalue *v, const jvalue *what, const jvalue *other, jvalue *out)
{
    jtext path = what->type == V_STR ? what->s : (jtext){0};
    *out = *v;
    if (what->type != V_STR) {
        QL_TRY(ql_jitem(r, v, what, out));
        if (out->type == V_UNDEFINED && other) *out = *other;
    }
    while (path.n) {
        const char *dot = memchr(path.p, '.', path.n);
        size_t n = dot ? (size_t)(dot - path.p) : path.n, digits = 0;
        jvalue next, key = jv_str(path.p, n);
        while (digits < n && path.p[digits] >= '0' && path.p[digits] <= '9') digits++;
        if (n && digits == n) key = jv_int(strtoll(path.p, NULL, 10));
        QL_TRY(ql_jitem(r, out, &key, &next));
        *out = next.type == V_UNDEFINED && other ? *other : next;
        path.p += n + (dot != NULL), path.n -= n + (dot != NULL);
    }
    return QL_OK;
}

/* A list of r's that a filter gives item by item. */
static ql_status new_iter(jrun *r, jvalue *out)
{
    QL_TRY(ql_jlist_new(r, out));
    out->type = V_ITER;
    return QL_OK;
}

/* select, reject, selectattr, rejectattr: [attribute,] [test, arguments …] */
static ql_status pick(jrun *r, jtext name, const jvalue *v, const jargs *a, jvalue *out)
{
    bool attr = name.n == 10, keep = name.p[0] == 's';
    int at = attr;
    jlist *items;
    jargs rest = {0};
    const jvalue *path = attr ? ql_jarg(a, 0, NULL) : NULL;
    if (!ql_jtruth(v)) return new_iter(r, out); /* as Jinja has it: none, 0 and the like have no items */
    QL_TRY(ql_jitems(r, v, &items));
    if (attr && !path) return ql_jfail(r, "%.*s needs the name of an attribute", (int)name.n, name.p);
    const jtext *test = a->n > at ? ql_jtext_arg(a, at, NULL) : NULL;
    if (a->n > at && (!test || !ql_jtest_known(*test)))
        return ql_jfail(r, "%.*s: that test is not supported", (int)name.n, name.p);
    for (int i = at + 1; i < a->n; i++) rest.pos[rest.n++] = a->pos[i];
    QL_TRY(new_iter(r, out));
    for (size_t i = 0; i < items->n; i++) {
        jvalue x = items->v[i];
        bool yes;
        if (attr) QL_TRY(attribute(r, items->v + i, path, NULL, &x));
        if (test) QL_TRY(ql_jtest(r, *test, &x, &rest, &yes));
        else yes = ql_jtruth(&x);
        if (yes == keep) QL_TRY(ql_jlist_add(r, out->list, items->v[i]));
    }
    return QL_OK;
}

static ql_status map(jrun *r, const jvalue *v, const jargs *a, jvalue *out)
{
    jlist *items;
    const jtext *name = ql_jtext_arg(a, 0, NULL);
    const jvalue *path = ql_jarg(a, 99, "attribute"), *other = ql_jarg(a, 99, "default");
    jargs rest = {0};
    if (other && other->type == V_NONE) other = NULL;
    if (!ql_jtruth(v)) return new_iter(r, out);
    QL_TRY(ql_jitems(r, v, &items));
    QL_TRY(new_iter(r, out));
    if (path ? a->n || a->n_kw > 1 + (ql_jarg(a, 99, "default") != NULL) : a->n_kw || !name || !ql_jfilter_known(*name))
        return ql_jfail(r, "map needs attribute= (and default=), or the name of a supported filter");
    for (int i = 1; i < a->n; i++) rest.pos[rest.n++] = a->pos[i];
    for (size_t i = 0; i < items->n; i++) {
        jvalue x;
        QL_TRY(path ? attribute(r, items->v + i, path, other, &x) : ql_jfilter(r, *name, items->v + i, &rest, &x));
        QL_TRY(ql_jlist_add(r, out->list, x));
    }
    return QL_OK;
}

/* The digits of a number as Python's int() and float() read them: no hexadecimals, and nothing behind. */
static ql_status read_digits(jrun *r, jtext s, char out[64], bool *whole)
{
    size_t n = 0;
    s = ql_jstrip(s, NULL, 3);
    *whole = s.n > 0;
    for (size_t i = 0; i < s.n; i++) {
        char c = s.p[i];
        if (c & 0x80) return ql_jfail(r, "digits beyond ASCII are not supported");
        if (c == 'n' || c == 'N' || n > 60) return ql_jfail(r, "'%.20s' as a number is not supported", s.p);
        if (c == '_' && i && s.p[i - 1] >= '0' && s.p[i - 1] <= '9' && i + 1 < s.n && s.p[i + 1] >= '0' && s.p[i + 1] <= '9') continue;
        if (!(c >= '0' && c <= '9') && !strchr("+-.eE", c)) *whole = false;
        out[n++] = c;
    }
    out[n] = 0;
    return QL_OK;
}

/* int and float: what cannot be read is the default. */
static ql_status to_number(jrun *r, const jvalue *v, bool integer, const jargs *a, jvalue *out)
{
    char digits[64], *end = NULL;
    const jvalue *other = ql_jarg(a, 0, "default");
    double f = v->type == V_FLOAT ? v->f : v->type == V_BOOL ? v->b : v->type == V_INT ? (double)v->i : 0;
    bool good = v->type == V_FLOAT || v->type == V_BOOL || v->type == V_INT;
    if (v->type == V_UNDEFINED) return ql_jfail(r, "'%.*s' is undefined", (int)v->s.n, v->s.p);
    if (a->n > 1 || a->n_kw > (other && !a->n)) return ql_jfail(r, "%s: only a default is supported", integer ? "int" : "float");
    if (v->type == V_INT && integer) return *out = *v, QL_OK;
    if (v->type == V_STR) {
        QL_TRY(read_digits(r, v->s, digits, &good));
        if (good && integer && !strpbrk(digits, ".eE")) {
            errno = 0;
            long long i = strtoll(digits, &end, 10);
            if (errno) return ql_jfail(r, "a number is too large for an integer");
            if (!*end) return *out = jv_int(i), QL_OK;
        }
        f = good ? strtod(digits, &end) : 0;
        good = good && end > digits && !*end;
    }
    if (!good) {
        *out = other ? *other : integer ? jv_int(0) : (jvalue){.type = V_FLOAT, .f = 0};
        return QL_OK;
    }
    if (integer && !(f > -9e18 && f < 9e18)) return ql_jfail(r, "a number is too large for an integer");
    *out = integer ? jv_int((int64_t)f) : (jvalue){.type = V_FLOAT, .f = f};
    return QL_OK;
}

static ql_status tojson(jrun *r, const jvalue *v, const jargs *a, jvalue *out)
{
    ql_str s = {0};
    int64_t indent = ql_jint_arg(a, 99, "indent");
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

/* first, last: nothing of an empty list. An iterator loses the item; it has no last one. */
static ql_status one_item(jrun *r, jtext name, const jvalue *v, jvalue *out)
{
    bool first = jtext_is(name, "first");
    jlist *items = v->list;
    if (v->type == V_ITER && !first) return ql_jfail(r, "a generator has no last item");
    if (v->type != V_ITER) QL_TRY(ql_jitems(r, v, &items));
    *out = (jvalue){.type = V_UNDEFINED, .s = name};
    if (!items->n) return QL_OK;
    *out = items->v[first ? 0 : items->n - 1];
    if (v->type == V_ITER) items->v++, items->n--, items->cap = items->n;
    return QL_OK;
}

/* Equal to unique, which takes upper and lower case for the same. */
static ql_status same_item(jrun *r, const jvalue *a, const jvalue *b, bool *same)
{
    jvalue x = *a, y = *b;
    if (x.type == V_STR) QL_TRY(ql_jcase(r, x.s, J_LOWER, &x));
    if (y.type == V_STR) QL_TRY(ql_jcase(r, y.s, J_LOWER, &y));
    *same = ql_jequal(&x, &y);
    return QL_OK;
}

static ql_status list_filter(jrun *r, jtext name, const jvalue *v, const jargs *a, jvalue *out)
{
    jlist *items;
    const jtext *sep = ql_jtext_arg(a, 0, "d");
    bool unique = jtext_is(name, "unique"), reverse = jtext_is(name, "reverse");
    if (jtext_is(name, "first") || jtext_is(name, "last")) return one_item(r, name, v, out);
    QL_TRY(ql_jitems(r, v, &items));
    if (jtext_is(name, "join")) {
        if (ql_jarg(a, 1, "attribute")) return ql_jfail(r, "join's attribute is not supported");
        if (ql_jarg(a, 0, "d") && !sep) return ql_jfail(r, "join needs a string to put between");
        return ql_jjoin(r, sep ? *sep : (jtext){"", 0}, items, out);
    }
    if (unique && (a->n || a->n_kw)) return ql_jfail(r, "unique's options are not supported");
    QL_TRY(ql_jlist_new(r, out));
    /* What reverse makes of an iterator is a list. */
    if (unique || (reverse && v->type != V_ITER)) out->type = V_ITER;
    for (size_t i = 0; i < items->n; i++) {
        bool seen = false;
        for (size_t k = 0; unique && k < out->list->n && !seen; k++) {
            QL_TRY(same_item(r, out->list->v + k, items->v + i, &seen));
        }
        if (!seen)
            QL_TRY(ql_jlist_add(r, out->list, items->v[reverse ? items->n - 1 - i : i]));
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
    QL_TRY(ql_jdict_items(r, v->dict, J_ITEMS, out));
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
    const jtext *x = ql_jtext_arg(a, 0, NULL), *y = ql_jtext_arg(a, 1, NULL);
    if (v->type != V_STR) { /* soft_str */
        ql_status st = ql_jstring(r, v, false, 0, &s);
        if (st != QL_OK) {
            ql_str_free(&s);
            return st;
        }
        QL_TRY(ql_jtake(r, &s, &t));
    }
    *out = t;
    if (jtext_is(name, "upper")) return ql_jcase(r, t.s, J_UPPER, out);
    if (jtext_is(name, "lower")) return ql_jcase(r, t.s, J_LOWER, out);
    if (jtext_is(name, "capitalize")) return ql_jcase(r, t.s, J_CAPITALIZE, out);
    if (jtext_is(name, "title")) return ql_jcase(r, t.s, J_WORDS, out);
    if (jtext_is(name, "trim")) {
        jtext u = ql_jstrip(t.s, ql_jtext_arg(a, 0, "chars"), 3);
        *out = jv_str(u.p, u.n);
    }
    if (jtext_is(name, "replace")) {
        if (!x || !y) return ql_jfail(r, "replace needs two strings");
        return ql_jreplace(r, t.s, *x, *y, ql_jint_arg(a, 2, "count"), out);
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
        if (v->type == V_DICT) {
            QL_TRY(ql_jdict_items(r, v->dict, J_ITEMS, out));
            out->type = V_ITER;
            return QL_OK;
        }
        return none ? new_iter(r, out) : ql_jfail(r, "items needs a dict, not %s", ql_jtype_name(v));
    }
    if (name.n >= 6 && (memcmp(name.p, "select", 6) == 0 || memcmp(name.p, "reject", 6) == 0))
        return pick(r, name, v, a, out);
    if (jtext_is(name, "map")) return map(r, v, a, out);
    if (jtext_is(name, "dictsort")) return dict_sort(r, v, a, out);
    if (jtext_is(name, "int") || jtext_is(name, "float")) return to_number(r, v, name.n == 3, a, out);
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
