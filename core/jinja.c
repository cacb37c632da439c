/* Runs a parsed template. */
#include "core/jinja_ast.h"

#include <math.h>
#include <stdlib.h>
#include <time.h>

/* Steps and output that no conversation needs; a template that takes more is broken or hostile. */
enum { DEPTH = 1000, STEPS = 2000000, OUTPUT_MAX = 256 << 20 };

typedef enum { GO_ON, BREAK, CONTINUE } flow;

static ql_status eval(jrun *r, const jnode *n, jvalue *out);
static ql_status run(jrun *r, const jnode *n, flow *f);

static ql_status step(jrun *r, const jnode *n)
{
    r->line = n->line;
    if (r->depth > DEPTH) return ql_jfail(r, "the template is nested too deeply");
    if (++r->steps > STEPS) return ql_jfail(r, "the template takes too many steps; does it loop for ever?");
    return QL_OK;
}

/* ---- names and attributes ---------------------------------------------------------------------- */

/* What transformers' environment defines. Those that cannot be called here are defined all the same. */
static const char *const functions[] = {"raise_exception", "strftime_now", "range", "namespace", "dict", "cycler", "joiner", "lipsum"};

static jvalue lookup(const jrun *r, jtext name)
{
    for (const jscope *s = r->scope; s; s = s->up) {
        const jvalue *v = ql_jdict_find(&s->vars, name);
        if (v) return *v;
    }
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (jtext_is(name, functions[i])) return (jvalue){.type = V_FUNCTION, .s = name};
    return (jvalue){.type = V_UNDEFINED, .s = name};
}

static void loop_attr(const jloop *l, jtext name, jvalue *out)
{
    size_t at = l->at, n = l->items->n;
    if (jtext_is(name, "index")) *out = jv_int((int64_t)at + 1);
    if (jtext_is(name, "index0")) *out = jv_int((int64_t)at);
    if (jtext_is(name, "revindex")) *out = jv_int((int64_t)(n - at));
    if (jtext_is(name, "revindex0")) *out = jv_int((int64_t)(n - at) - 1);
    if (jtext_is(name, "first")) *out = jv_bool(at == 0);
    if (jtext_is(name, "last")) *out = jv_bool(at + 1 == n);
    if (jtext_is(name, "length")) *out = jv_int((int64_t)n);
    if (jtext_is(name, "depth")) *out = jv_int(1); /* loops are never recursive here */
    if (jtext_is(name, "depth0")) *out = jv_int(0);
    if (jtext_is(name, "cycle") || jtext_is(name, "changed")) *out = (jvalue){.type = V_METHOD, .s = name};
    if (jtext_is(name, "previtem") && at) *out = l->items->v[at - 1];
    if (jtext_is(name, "nextitem") && at + 1 < n) *out = l->items->v[at + 1];
}

ql_status ql_jattr(jrun *r, const jvalue *v, jtext name, jvalue *out)
{
    const jvalue *found = NULL;
    if (v->type == V_UNDEFINED)
        return ql_jfail(r, "'%.*s' is undefined (its '%.*s' was asked for)", (int)v->s.n, v->s.p, (int)name.n,
                        name.p);
    if (v->type == V_MACRO) return ql_jfail(r, "'%.*s' of a macro is not supported", (int)name.n, name.p);
    *out = (jvalue){.type = V_UNDEFINED, .s = name};
    if (ql_jhas_method(v, name)) { /* before a key of that name, as getattr is before getitem */
        *out = (jvalue){.type = V_METHOD, .s = name};
        return QL_OK;
    }
    if (v->type == V_DICT || v->type == V_NAMESPACE) found = ql_jdict_find(v->dict, name);
    if (found) *out = *found;
    if (v->type == V_LOOP) loop_attr(v->loop, name, out);
    return QL_OK;
}

ql_status ql_jitem(jrun *r, const jvalue *v, const jvalue *key, jvalue *out)
{
    if (key->type == V_STR) {
        const jvalue *found = v->type == V_DICT ? ql_jdict_find(v->dict, key->s) : NULL;
        if (!found) return ql_jattr(r, v, key->s, out);
        *out = *found;
        return QL_OK;
    }
    *out = (jvalue){.type = V_UNDEFINED, .s = {"item", 4}};
    if (v->type == V_UNDEFINED) return ql_jfail(r, "'%.*s' is undefined", (int)v->s.n, v->s.p);
    int64_t n = v->type == V_VIEW ? -1 : ql_jlength(v), i = key->type == V_BOOL ? key->b : key->i;
    if ((key->type != V_INT && key->type != V_BOOL) || v->type == V_DICT || n < 0) return QL_OK;
    if (i < 0) i += n;
    if (i < 0 || i >= n) return QL_OK;
    if (v->type == V_STR) {
        jtext c = ql_jsubstr(v->s, (size_t)i, (size_t)i + 1);
        *out = jv_str(c.p, c.n);
    } else {
        *out = v->list->v[i];
    }
    return QL_OK;
}

/* Python's slice: bounds clipped as its step's sign asks. */
static ql_status slice(jrun *r, const jnode *n, const jvalue *v, jvalue *out)
{
    const jnode *part[] = {n->b, n->c, n->d};
    int64_t at[3], len = ql_jlength(v);
    bool given[3];
    if (v->type == V_DICT || v->type == V_VIEW || len < 0 || v->type == V_UNDEFINED)
        return ql_jfail(r, "a value that is %s cannot be sliced", ql_jtype_name(v));
    for (int i = 0; i < 3; i++) {
        jvalue x = jv_none();
        if (part[i]) QL_TRY(eval(r, part[i], &x));
        if (x.type != V_INT && x.type != V_NONE) return ql_jfail(r, "slice bounds must be integers");
        given[i] = x.type == V_INT;
        at[i] = given[i] ? x.i : 0;
    }
    int64_t by = given[2] ? at[2] : 1, lo = by < 0 ? -1 : 0, hi = by < 0 ? len - 1 : len;
    if (!by) return ql_jfail(r, "a slice's step must not be 0");
    for (int i = 0; i < 2; i++) {
        if (at[i] < 0) at[i] = at[i] < -len ? lo : at[i] + len;
        at[i] = given[i] ? ql_max64(lo, ql_min64(at[i], hi)) : (i == 0) == (by > 0) ? lo : hi;
    }
    if (v->type == V_STR && by == 1) {
        jtext s = ql_jsubstr(v->s, (size_t)at[0], (size_t)at[1]);
        *out = jv_str(s.p, s.n);
        return QL_OK;
    }
    if (v->type == V_STR) return ql_jfail(r, "a string can only be sliced with step 1");
    QL_TRY(ql_jlist_new(r, out));
    out->type = v->type;
    if (by > len) by = len + 1; /* no overflow of i + by */
    if (by < -len) by = -len - 1;
    for (int64_t i = at[0]; by > 0 ? i < at[1] : i > at[1]; i += by)
        QL_TRY(ql_jlist_add(r, out->list, v->list->v[i]));
    return QL_OK;
}

/* ---- calls ------------------------------------------------------------------------------------- */

static ql_status eval_args(jrun *r, const jnode *n, jargs *a)
{
    *a = (jargs){0};
    for (; n; n = n->next) {
        jvalue v;
        QL_TRY(eval(r, n->a, &v));
        if (a->n + a->n_kw == 8) return ql_jfail(r, "more than 8 arguments are not supported");
        if (n->text.n) a->kw[a->n_kw] = n->text, a->kwv[a->n_kw++] = v;
        else a->pos[a->n++] = v;
    }
    return QL_OK;
}

static ql_status push_scope(jrun *r, jscope *up)
{
    jscope *s = ql_jalloc(&r->mem, sizeof *s);
    if (!s) return QL_ENOMEM;
    s->up = up;
    r->scope = s;
    return QL_OK;
}

/* Runs a body with its output caught as a string. */
static ql_status capture(jrun *r, const jnode *body, jvalue *out)
{
    ql_str s = {0}, *saved = r->out;
    flow f = GO_ON;
    r->out = &s;
    ql_status st = run(r, body, &f);
    r->out = saved;
    if (st == QL_OK) return ql_jtake(r, &s, out);
    ql_str_free(&s);
    return st;
}

static ql_status call_macro(jrun *r, const struct jmacro *macro, const jargs *a, jvalue *out)
{
    const jnode *m = macro->node;
    jscope *saved = r->scope;
    int i = 0, named = 0;
    QL_TRY(push_scope(r, macro->scope));
    jscope *own = r->scope;
    for (const jnode *p = m->a; p; p = p->next, i++) {
        char name[64];
        jvalue v = {.type = V_UNDEFINED, .s = p->text};
        if (p->text.n >= sizeof name) return ql_jfail(r, "a parameter's name is too long");
        memcpy(name, p->text.p, p->text.n);
        name[p->text.n] = 0;
        const jvalue *given = ql_jarg(a, i, name);
        named += given && i >= a->n;
        if (given) v = *given;
        else if (p->a) QL_TRY(eval(r, p->a, &v));
        QL_TRY(ql_jdict_set(r, &own->vars, p->text, v));
    }
    if (a->n > i || named < a->n_kw)
        return ql_jfail(r, "macro '%.*s' takes %d arguments, and not these", (int)m->text.n, m->text.p, i);
    QL_TRY(capture(r, m->b, out));
    r->scope = saved;
    return QL_OK;
}

static ql_status make_range(jrun *r, const jargs *a, jvalue *out)
{
    int64_t v[3] = {0, 0, 1};
    for (int i = 0; i < a->n && i < 3; i++) {
        if (a->pos[i].type != V_INT) return ql_jfail(r, "range needs integers");
        v[i] = a->pos[i].i;
    }
    if (a->n == 1) v[1] = v[0], v[0] = 0;
    if (a->n < 1 || a->n > 3 || !v[2]) return ql_jfail(r, "range needs one to three integers, and a step");
    for (int i = 0; i < 3; i++)
        if (v[i] > 100000 || v[i] < -100000) return ql_jfail(r, "range is limited to 100,000");
    QL_TRY(ql_jlist_new(r, out));
    out->type = V_RANGE;
    for (int64_t i = v[0]; v[2] > 0 ? i < v[1] : i > v[1]; i += v[2])
        QL_TRY(ql_jlist_add(r, out->list, jv_int(i)));
    return QL_OK;
}

static ql_status now(jrun *r, const jargs *a, jvalue *out)
{
    char format[128], text[512];
    time_t t = time(NULL);
    struct tm tm;
    if (a->n != 1 || a->pos[0].type != V_STR || a->pos[0].s.n >= sizeof format)
        return ql_jfail(r, "strftime_now needs one short string");
    memcpy(format, a->pos[0].s.p, a->pos[0].s.n);
    format[a->pos[0].s.n] = 0;
    localtime_r(&t, &tm);
    ql_str s = {0};
    QL_TRY(ql_str_add(&s, text, strftime(text, sizeof text, format, &tm)));
    return ql_jtake(r, &s, out);
}

static ql_status call_function(jrun *r, jtext name, const jargs *a, jvalue *out)
{
    if (jtext_is(name, "raise_exception")) {
        bool said = a->n == 1 && a->pos[0].type == V_STR;
        return ql_fail(QL_EINVAL, "the template says: %.*s", said ? (int)ql_min64((int64_t)a->pos[0].s.n, 500) : 1,
                       said ? a->pos[0].s.p : "?");
    }
    if (jtext_is(name, "namespace") || jtext_is(name, "dict")) {
        QL_TRY(ql_jdict_new(r, out));
        if (a->n) return ql_jfail(r, "%.*s takes its values by name", (int)name.n, name.p);
        for (int i = 0; i < a->n_kw; i++) QL_TRY(ql_jdict_set(r, out->dict, a->kw[i], a->kwv[i]));
        if (name.n == 9) out->type = V_NAMESPACE;
        return QL_OK;
    }
    if (jtext_is(name, "range")) return make_range(r, a, out);
    if (jtext_is(name, "strftime_now")) return now(r, a, out);
    return ql_jfail(r, "the function '%.*s' is not supported", (int)name.n, name.p);
}

static ql_status call(jrun *r, const jnode *n, jvalue *out)
{
    jargs a;
    jvalue f;
    if (n->a->kind == N_ATTR) {
        bool known;
        QL_TRY(eval(r, n->a->a, &f));
        QL_TRY(eval_args(r, n->b, &a));
        r->line = n->line;
        if (f.type == V_UNDEFINED) return ql_jfail(r, "'%.*s' is undefined", (int)f.s.n, f.s.p);
        QL_TRY(ql_jmethod(r, &f, n->a->text, &a, out, &known));
        if (!known)
            return ql_jfail(r, "the method '%.*s' of %s is not supported", (int)n->a->text.n, n->a->text.p,
                            ql_jtype_name(&f));
        return QL_OK;
    }
    QL_TRY(eval(r, n->a, &f));
    QL_TRY(eval_args(r, n->b, &a));
    r->line = n->line;
    if (f.type == V_MACRO) return call_macro(r, f.macro, &a, out);
    if (f.type == V_FUNCTION) return call_function(r, f.s, &a, out);
    if (f.type == V_UNDEFINED) return ql_jfail(r, "'%.*s' is undefined", (int)f.s.n, f.s.p);
    return ql_jfail(r, "a value that is %s cannot be called", ql_jtype_name(&f));
}

/* ---- expressions ------------------------------------------------------------------------------- */

static ql_status eval_list(jrun *r, const jnode *n, jvalue *out)
{
    QL_TRY(ql_jlist_new(r, out));
    out->type = n->kind == N_LIST ? V_LIST : V_TUPLE;
    for (const jnode *x = n->b; x; x = x->next) {
        jvalue v;
        QL_TRY(eval(r, x, &v));
        QL_TRY(ql_jlist_add(r, out->list, v));
    }
    return QL_OK;
}

static ql_status eval_dict(jrun *r, const jnode *n, jvalue *out)
{
    QL_TRY(ql_jdict_new(r, out));
    for (const jnode *x = n->b; x; x = x->next) {
        jvalue k, v;
        QL_TRY(eval(r, x->a, &k));
        QL_TRY(eval(r, x->b, &v));
        if (k.type != V_STR) return ql_jfail(r, "dict keys must be strings");
        QL_TRY(ql_jdict_set(r, out->dict, k.s, v));
    }
    return QL_OK;
}

static ql_status eval_compare(jrun *r, const jnode *n, jvalue *out)
{
    jvalue left, right;
    bool yes = true;
    QL_TRY(eval(r, n->a, &left));
    for (const jnode *c = n->b; c && yes; c = c->next) {
        QL_TRY(eval(r, c->a, &right));
        QL_TRY(ql_jcompare(r, c->op, &left, &right, &yes));
        left = right;
    }
    *out = jv_bool(yes);
    return QL_OK;
}

static ql_status eval_two(jrun *r, const jnode *n, jvalue *out)
{
    jvalue a, b;
    jargs args;
    bool yes;
    QL_TRY(eval(r, n->a, &a));
    switch (n->kind) {
    case N_ATTR: r->line = n->line; return ql_jattr(r, &a, n->text, out);
    case N_ITEM:
        QL_TRY(eval(r, n->b, &b));
        r->line = n->line;
        return ql_jitem(r, &a, &b, out);
    case N_SLICE: return slice(r, n, &a, out);
    case N_FILTER:
        QL_TRY(eval_args(r, n->b, &args));
        r->line = n->line;
        return ql_jfilter(r, n->text, &a, &args, out);
    case N_TEST:
        QL_TRY(eval_args(r, n->b, &args));
        QL_TRY(ql_jtest(r, n->text, &a, &args, &yes));
        *out = jv_bool(yes != n->op);
        return QL_OK;
    case N_AND:
    case N_OR:
        *out = a;
        return ql_jtruth(&a) == (n->kind == N_AND) ? eval(r, n->b, out) : QL_OK;
    case N_NOT: *out = jv_bool(!ql_jtruth(&a)); return QL_OK;
    case N_NEG:
        if (a.type == V_FLOAT) return *out = (jvalue){.type = V_FLOAT, .f = n->op == '-' ? -a.f : a.f}, QL_OK;
        b = jv_int(0);
        return ql_jbinary(r, n->op, &b, &a, out);
    default:
        QL_TRY(eval(r, n->b, &b));
        r->line = n->line;
        return ql_jbinary(r, n->op, &a, &b, out);
    }
}

static ql_status eval_one(jrun *r, const jnode *n, jvalue *out)
{
    jvalue cond;
    QL_TRY(step(r, n));
    switch (n->kind) {
    case N_STR: *out = jv_str(n->text.p, n->text.n); return QL_OK;
    case N_INT: *out = jv_int(n->i); return QL_OK;
    case N_FLOAT: *out = (jvalue){.type = V_FLOAT, .f = n->f}; return QL_OK;
    case N_BOOL: *out = jv_bool(n->i != 0); return QL_OK;
    case N_NONE: *out = jv_none(); return QL_OK;
    case N_CAUGHT: *out = r->caught; return QL_OK;
    case N_NAME: *out = lookup(r, n->text); return QL_OK;
    case N_LIST:
    case N_TUPLE: return eval_list(r, n, out);
    case N_DICT: return eval_dict(r, n, out);
    case N_CALL: return call(r, n, out);
    case N_COMPARE: return eval_compare(r, n, out);
    case N_COND:
        QL_TRY(eval(r, n->a, &cond));
        if (ql_jtruth(&cond)) return eval(r, n->b, out);
        *out = (jvalue){.type = V_UNDEFINED, .s = {"inline if", 9}};
        return n->c ? eval(r, n->c, out) : QL_OK;
    default: return eval_two(r, n, out);
    }
}

/* The depth counts C frames, whatever nests; an error ends the rendering, so it need not be undone. */
static ql_status eval(jrun *r, const jnode *n, jvalue *out)
{
    r->depth++;
    QL_TRY(eval_one(r, n, out));
    /* Long values cost more than one step each time they are looked at. */
    if (out->type == V_STR) r->steps += (int64_t)(out->s.n >> 8);
    else if (out->type == V_LIST || out->type == V_TUPLE) r->steps += (int64_t)(out->list->n >> 2);
    r->depth--;
    return QL_OK;
}

/* ---- statements -------------------------------------------------------------------------------- */

static ql_status assign(jrun *r, const jnode *target, const jvalue *v)
{
    jlist *items = NULL;
    size_t n = 0, i = 0;
    for (const jnode *t = target; t; t = t->next) n++;
    if (n > 1) {
        QL_TRY(ql_jitems(r, v, &items));
        if (items->n != n) return ql_jfail(r, "%zu values for %zu names", items->n, n);
    }
    for (const jnode *t = target; t; t = t->next, i++) {
        jvalue x = items ? items->v[i] : *v;
        if (t->kind == N_NAME) {
            QL_TRY(ql_jdict_set(r, &r->scope->vars, t->text, x));
            continue;
        }
        jvalue ns = lookup(r, t->a->text);
        if (ns.type != V_NAMESPACE)
            return ql_jfail(r, "'%.*s' is not a namespace", (int)t->a->text.n, t->a->text.p);
        QL_TRY(ql_jdict_set(r, ns.dict, t->text, x));
    }
    return QL_OK;
}

/* The items that pass the loop's filter. */
static ql_status loop_items(jrun *r, const jnode *n, jlist **out)
{
    jvalue v, kept, yes;
    jlist *all;
    jscope *saved = r->scope;
    QL_TRY(eval(r, n->b, &v));
    r->line = n->line;
    QL_TRY(ql_jitems(r, &v, out));
    if (!n->e) return QL_OK;
    all = *out;
    QL_TRY(ql_jlist_new(r, &kept));
    for (size_t i = 0; i < all->n; i++) {
        QL_TRY(push_scope(r, saved));
        QL_TRY(assign(r, n->a, all->v + i));
        QL_TRY(eval(r, n->e, &yes));
        if (ql_jtruth(&yes)) QL_TRY(ql_jlist_add(r, kept.list, all->v[i]));
    }
    r->scope = saved;
    *out = kept.list;
    return QL_OK;
}

static ql_status run_for(jrun *r, const jnode *n)
{
    jscope *saved = r->scope;
    jlist *items;
    flow f = GO_ON;
    QL_TRY(loop_items(r, n, &items));
    jloop *loop = ql_jalloc(&r->mem, sizeof *loop);
    if (!loop) return QL_ENOMEM;
    loop->items = items;
    for (; loop->at < items->n && f != BREAK; loop->at++) {
        jvalue l = {.type = V_LOOP, .loop = loop};
        f = GO_ON;
        QL_TRY(step(r, n));
        QL_TRY(push_scope(r, saved));
        QL_TRY(ql_jdict_set(r, &r->scope->vars, (jtext){"loop", 4}, l));
        QL_TRY(assign(r, n->a, items->v + loop->at));
        QL_TRY(run(r, n->c, &f));
    }
    r->scope = saved;
    if (items->n || !n->d) return QL_OK;
    QL_TRY(push_scope(r, saved));
    QL_TRY(run(r, n->d, &f));
    r->scope = saved;
    return QL_OK;
}

static ql_status output(jrun *r, const jnode *n)
{
    jvalue v;
    QL_TRY(eval(r, n->a, &v));
    r->line = n->line;
    if (r->out->len > OUTPUT_MAX) return ql_jfail(r, "the template writes too much");
    return ql_jstring(r, &v, false, 0, r->out);
}

static ql_status run_generation(jrun *r, const jnode *n, flow *f)
{
    size_t start = r->out->len;
    jscope *saved = r->scope;
    QL_TRY(push_scope(r, saved)); /* a call block: what it sets stays inside */
    QL_TRY(run(r, n->b, f));
    r->scope = saved;
    if (!r->span || r->out != r->main) return QL_OK;
    return r->span(r->user, start, r->out->len);
}

static ql_status run_with(jrun *r, const jnode *n, flow *f)
{
    jscope *saved = r->scope;
    QL_TRY(push_scope(r, saved));
    jscope *own = r->scope;
    for (const jnode *s = n->a; s; s = s->next) {
        jvalue v;
        r->scope = saved;
        QL_TRY(eval(r, s->b, &v));
        r->scope = own;
        QL_TRY(assign(r, s->a, &v));
    }
    QL_TRY(run(r, n->b, f));
    r->scope = saved;
    return QL_OK;
}

/* What the body writes, through the filters. What it sets stays inside. */
static ql_status filtered(jrun *r, const jnode *n, jvalue *out)
{
    jscope *saved = r->scope;
    QL_TRY(push_scope(r, saved));
    QL_TRY(capture(r, n->b, out));
    r->caught = *out;
    if (n->c) QL_TRY(eval(r, n->c, out));
    r->scope = saved;
    return QL_OK;
}

static ql_status run_filter_block(jrun *r, const jnode *n)
{
    jvalue v;
    QL_TRY(filtered(r, n, &v));
    return ql_jstring(r, &v, false, 0, r->out);
}

static ql_status run_one(jrun *r, const jnode *n, flow *f)
{
    jvalue v;
    QL_TRY(step(r, n));
    switch (n->kind) {
    case N_TEXT: return ql_str_add(r->out, n->text.p, n->text.n);
    case N_OUTPUT: return output(r, n);
    case N_IF:
        QL_TRY(eval(r, n->a, &v));
        return run(r, ql_jtruth(&v) ? n->b : n->c, f);
    case N_FOR: return run_for(r, n);
    case N_SET:
        QL_TRY(eval(r, n->b, &v));
        return assign(r, n->a, &v);
    case N_SETBLOCK:
        QL_TRY(filtered(r, n, &v));
        return assign(r, n->a, &v);
    case N_WITH: return run_with(r, n, f);
    case N_FILTERBLOCK: return run_filter_block(r, n);
    case N_MACRO:
        v = (jvalue){.type = V_MACRO, .macro = ql_jalloc(&r->mem, sizeof *v.macro)};
        if (!v.macro) return QL_ENOMEM;
        *v.macro = (struct jmacro){n, r->scope};
        return ql_jdict_set(r, &r->scope->vars, n->text, v);
    case N_BREAK: *f = BREAK; return QL_OK;
    case N_CONTINUE: *f = CONTINUE; return QL_OK;
    case N_GENERATION: return run_generation(r, n, f);
    default: return ql_fail(QL_EINTERNAL, "an expression where a statement belongs");
    }
}

static ql_status run(jrun *r, const jnode *n, flow *f)
{
    r->depth++;
    for (; n && *f == GO_ON; n = n->next) QL_TRY(run_one(r, n, f));
    r->depth--;
    return QL_OK;
}

ql_status ql_jinja_render(const ql_jinja *t, const json_t *context, ql_jinja_span *span, void *user, ql_str *out)
{
    jrun r = {.t = t, .out = out, .main = out, .span = span, .user = user};
    jvalue vars;
    flow f = GO_ON;
    ql_status st = QL_OK;
    r.mem.limit = 256 << 20;
    if (!json_is_object(context)) QL_FAIL(QL_EINTERNAL, "a template's variables are not an object");
    QL_GO(ql_jfrom_json(&r, context, 0, &vars));
    QL_GO(push_scope(&r, NULL));
    r.scope->vars = *vars.dict;
    QL_GO(run(&r, t->body, &f));
    QL_GO(ql_str_reserve(out, 0));
out:
    if (st != QL_OK) ql_error_prefix("chat template: ");
    ql_jarena_free(&r.mem);
    return st;
}
