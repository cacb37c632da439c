/* Python's methods of strings and dicts, as far as chat templates use them. */
#include "core/jinja_ast.h"

static const char *find_text(jtext s, jtext what)
{
    return what.n ? memmem(s.p, s.n, what.p, what.n) : s.p;
}

/* What begins a word for the filter title; of ASCII, since other text is refused. */
static bool before_word(char c)
{
    return c == '-' || c == ' ' || (c >= '\t' && c <= '\r') || (c >= 0x1c && c <= 0x1f) || strchr("({[<", c);
}

ql_status ql_jcase(jrun *r, jtext s, jcasing how, jvalue *out)
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
        bool up = how == J_UPPER || (how != J_LOWER && first);
        if (up && c >= 'a' && c <= 'z') t.data[i] = (char)(c - 32);
        if (!up && c >= 'A' && c <= 'Z') t.data[i] = (char)(c + 32);
        bool is_letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
        first = how == J_TITLE ? !is_letter : how == J_WORDS && before_word(c);
    }
    return ql_jtake(r, &t, out);
}

ql_status ql_jreplace(jrun *r, jtext s, jtext from, jtext to, int64_t count, jvalue *out)
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

ql_status ql_jjoin(jrun *r, jtext sep, const jlist *l, jvalue *out)
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

static ql_status string_method(jrun *r, jtext s, jtext name, const jargs *a, jvalue *out, bool *known)
{
    const jtext *x = ql_jtext_arg(a, 0, NULL), *y = ql_jtext_arg(a, 1, NULL);
    if (jtext_is(name, "split"))
        return split(r, s, ql_jtext_arg(a, 0, "sep"), ql_jint_arg(a, 1, "maxsplit"), out);
    if (a->n_kw && !jtext_is(name, "replace"))
        return ql_jfail(r, "%.*s: '%.*s=' is not supported", (int)name.n, name.p, (int)a->kw[0].n, a->kw[0].p);
    bool l = jtext_is(name, "lstrip"), rs = jtext_is(name, "rstrip");
    if (l || rs || jtext_is(name, "strip")) {
        jtext t = ql_jstrip(s, x, l ? 1 : rs ? 2 : 3);
        *out = jv_str(t.p, t.n);
        return QL_OK;
    }
    if (jtext_is(name, "startswith")) return has_affix(r, s, a, false, out);
    if (jtext_is(name, "endswith")) return has_affix(r, s, a, true, out);
    if (jtext_is(name, "replace") && x && y) return ql_jreplace(r, s, *x, *y, ql_jint_arg(a, 2, "count"), out);
    if (jtext_is(name, "upper")) return ql_jcase(r, s, J_UPPER, out);
    if (jtext_is(name, "lower")) return ql_jcase(r, s, J_LOWER, out);
    if (jtext_is(name, "capitalize")) return ql_jcase(r, s, J_CAPITALIZE, out);
    if (jtext_is(name, "title")) return ql_jcase(r, s, J_TITLE, out);
    if (jtext_is(name, "join") && a->n == 1) {
        jlist *items;
        QL_TRY(ql_jitems(r, a->pos, &items));
        return ql_jjoin(r, s, items, out);
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

ql_status ql_jdict_items(jrun *r, const jdict *d, jdict_part what, jvalue *out)
{
    QL_TRY(ql_jlist_new(r, out));
    for (size_t i = 0; i < d->n; i++) {
        jvalue key = jv_str(d->key[i].p, d->key[i].n), pair;
        if (what == J_ITEMS) {
            QL_TRY(ql_jlist_new(r, &pair));
            pair.type = V_TUPLE;
            QL_TRY(ql_jlist_add(r, pair.list, key));
            QL_TRY(ql_jlist_add(r, pair.list, d->v[i]));
        }
        QL_TRY(ql_jlist_add(r, out->list, what == J_KEYS ? key : what == J_VALUES ? d->v[i] : pair));
    }
    return QL_OK;
}

/* What dict.keys(), values() and items() give: no list. */
static ql_status dict_view(jrun *r, const jdict *d, jdict_part what, jvalue *out)
{
    QL_TRY(ql_jdict_items(r, d, what, out));
    out->type = V_VIEW;
    return QL_OK;
}

static ql_status dict_method(jrun *r, const jdict *d, jtext name, const jargs *a, jvalue *out, bool *known)
{
    if (jtext_is(name, "keys")) return dict_view(r, d, J_KEYS, out);
    if (jtext_is(name, "values")) return dict_view(r, d, J_VALUES, out);
    if (jtext_is(name, "items")) return dict_view(r, d, J_ITEMS, out);
    if (jtext_is(name, "get") && a->n >= 1) {
        const jtext *key = ql_jtext_arg(a, 0, NULL);
        const jvalue *found = key ? ql_jdict_find(d, *key) : NULL, *other = ql_jarg(a, 1, NULL);
        *out = found ? *found : other ? *other : jv_none();
        return QL_OK;
    }
    *known = false;
    return QL_OK;
}

/* loop.cycle(a, b, …): the one whose turn it is. */
static ql_status cycle(jrun *r, const jloop *l, const jargs *a, jvalue *out)
{
    if (!a->n) return ql_jfail(r, "loop.cycle needs something to choose from");
    *out = a->pos[l->at % (size_t)a->n];
    return QL_OK;
}

ql_status ql_jmethod(jrun *r, const jvalue *v, jtext name, const jargs *a, jvalue *out, bool *known)
{
    *known = true;
    if (v->type == V_STR) return string_method(r, v->s, name, a, out, known);
    if (v->type == V_DICT) return dict_method(r, v->dict, name, a, out, known);
    if (v->type == V_LOOP && jtext_is(name, "cycle")) return cycle(r, v->loop, a, out);
    *known = false;
    return QL_OK;
}

/* The names that Python's str, dict and list have themselves, but for those that change them, which the sandbox hides: an
 * attribute of that name is the method. */
static const char *const str_names =
    " capitalize casefold center count encode endswith expandtabs find format format_map index isalnum isalpha isascii "
    "isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip maketrans "
    "partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip "
    "swapcase title translate upper zfill ";
static const char *const dict_names = " copy fromkeys get items keys values ";
static const char *const list_names = " copy count index ";
static const char *const tuple_names = " count index ";

bool ql_jhas_method(const jvalue *v, jtext name)
{
    const char *names = v->type == V_STR ? str_names : v->type == V_DICT ? dict_names : v->type == V_LIST ? list_names
                        : v->type == V_TUPLE ? tuple_names : "";
    for (const char *p = names; name.n && *p && (p = memmem(p, strlen(p), name.p, name.n)); p++)
        if (p[-1] == ' ' && p[name.n] == ' ') return true;
    return false;
}
