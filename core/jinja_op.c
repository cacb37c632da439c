/* Jinja's operators on values. */
#include "core/jinja_ast.h"

#include <math.h>

enum { TEXT_MAX = 256 << 20 };

static bool numeric(const jvalue *v, double *out)
{
    if (v->type == V_INT) *out = (double)v->i;
    else if (v->type == V_FLOAT) *out = v->f;
    else if (v->type == V_BOOL) *out = v->b;
    else return false;
    return true;
}

static ql_status contains(jrun *r, const jvalue *x, const jvalue *in, bool *out)
{
    *out = false;
    if (in->type == V_STR && x->type == V_STR) {
        *out = x->s.n == 0 || memmem(in->s.p, in->s.n, x->s.p, x->s.n);
    } else if (in->type == V_DICT) {
        *out = x->type == V_STR && ql_jdict_find(in->dict, x->s);
    } else if (ql_jis_list(in)) {
        size_t i = 0;
        while (i < in->list->n && !*out) *out = ql_jequal(x, in->list->v + i++);
        if (in->type == V_ITER) in->list->v += i, in->list->n -= i, in->list->cap = in->list->n;
    } else if (in->type != V_UNDEFINED) {
        return ql_jfail(r, "'in' needs a string, list or dict, not %s", ql_jtype_name(in));
    }
    return QL_OK;
}

ql_status ql_jcompare(jrun *r, int op, const jvalue *a, const jvalue *b, bool *out)
{
    double x, y;
    int order;
    if (op == OP_EQ || op == OP_NE) return *out = ql_jequal(a, b) == (op == OP_EQ), QL_OK;
    if (op == OP_IN || op == OP_NOT_IN) {
        QL_TRY(contains(r, a, b, out));
        *out = *out == (op == OP_IN);
        return QL_OK;
    }
    if (a->type == V_INT && b->type == V_INT) {
        order = a->i < b->i ? -1 : a->i > b->i;
    } else if (numeric(a, &x) && numeric(b, &y)) {
        order = x < y ? -1 : x > y;
    } else if (a->type == V_STR && b->type == V_STR) {
        order = memcmp(a->s.p, b->s.p, a->s.n < b->s.n ? a->s.n : b->s.n);
        if (!order) order = a->s.n < b->s.n ? -1 : a->s.n > b->s.n;
    } else {
        return ql_jfail(r, "%s and %s cannot be ordered", ql_jtype_name(a), ql_jtype_name(b));
    }
    *out = op == '<' ? order < 0 : op == '>' ? order > 0 : op == OP_LE ? order <= 0 : order >= 0;
    return QL_OK;
}

static ql_status integers(jrun *r, int op, int64_t x, int64_t y, jvalue *out)
{
    bool over = false;
    int64_t z = 0;
    if ((op == OP_FLOOR || op == '%') && !y) return ql_jfail(r, "division by zero");
    if ((op == OP_FLOOR || op == '%') && y == -1) {
        over = x == INT64_MIN;
        z = op == '%' || over ? 0 : -x;
    } else if (op == OP_FLOOR || op == '%') { /* towards minus infinity */
        int64_t q = x / y - (x % y != 0 && (x < 0) != (y < 0));
        z = op == '%' ? x - q * y : q;
    } else if (op == '+') {
        over = __builtin_add_overflow(x, y, &z);
    } else if (op == '-') {
        over = __builtin_sub_overflow(x, y, &z);
    } else {
        over = __builtin_mul_overflow(x, y, &z);
    }
    if (over) return ql_jfail(r, "an integer is too large");
    *out = jv_int(z);
    return QL_OK;
}

static ql_status join_values(jrun *r, const jvalue *a, const jvalue *b, jvalue *out)
{
    ql_str s = {0};
    ql_status st = ql_jstring(r, a, false, 0, &s);
    if (st == QL_OK) st = ql_jstring(r, b, false, 0, &s);
    if (st == QL_OK) return ql_jtake(r, &s, out);
    ql_str_free(&s);
    return st;
}

static ql_status repeat(jrun *r, jtext s, int64_t times, jvalue *out)
{
    if (times < 1 || !s.n) return *out = jv_str("", 0), QL_OK;
    if (times > TEXT_MAX / (int64_t)s.n) return ql_jfail(r, "%lld times a text of %zu bytes is too much", (long long)times, s.n);
    char *p = ql_jalloc(&r->mem, s.n * (size_t)times + 1);
    if (!p) return QL_ENOMEM;
    for (int64_t i = 0; i < times; i++) memcpy(p + (size_t)i * s.n, s.p, s.n);
    r->steps += times;
    *out = jv_str(p, s.n * (size_t)times);
    return QL_OK;
}

ql_status ql_jbinary(jrun *r, int op, const jvalue *a, const jvalue *b, jvalue *out)
{
    double x, y;
    jvalue ints[2];
    if (op == '~') return join_values(r, a, b, out);
    for (int i = 0; i < 2; i++) { /* True and False are 1 and 0 to arithmetic */
        const jvalue **v = i ? &b : &a;
        if ((*v)->type == V_BOOL) ints[i] = jv_int((*v)->b), *v = ints + i;
    }
    if (op == '+' && a->type == V_STR && b->type == V_STR) {
        char *p = ql_jalloc(&r->mem, a->s.n + b->s.n + 1);
        if (!p) return QL_ENOMEM;
        memcpy(p, a->s.p, a->s.n);
        memcpy(p + a->s.n, b->s.p, b->s.n);
        *out = jv_str(p, a->s.n + b->s.n);
        return QL_OK;
    }
    if (op == '+' && a->type == b->type && (a->type == V_LIST || a->type == V_TUPLE)) {
        QL_TRY(ql_jlist_new(r, out));
        out->type = a->type;
        for (size_t i = 0; i < a->list->n; i++) QL_TRY(ql_jlist_add(r, out->list, a->list->v[i]));
        for (size_t i = 0; i < b->list->n; i++) QL_TRY(ql_jlist_add(r, out->list, b->list->v[i]));
        return QL_OK;
    }
    if (op == '*' && a->type == V_STR && b->type == V_INT) return repeat(r, a->s, b->i, out);
    if (op == '*' && a->type == V_INT && b->type == V_STR) return repeat(r, b->s, a->i, out);
    for (int i = 0; i < 2; i++) {
        const jvalue *v = i ? b : a;
        if (v->type == V_UNDEFINED) return ql_jfail(r, "'%.*s' is undefined", (int)v->s.n, v->s.p);
    }
    if (a->type == V_INT && b->type == V_INT && op != '/' && op != OP_POW)
        return integers(r, op, a->i, b->i, out);
    if (!numeric(a, &x) || !numeric(b, &y) || op == OP_POW)
        return ql_jfail(r, "'%c' of %s and %s is not supported", op > 255 ? op >> 8 : op, ql_jtype_name(a),
                        ql_jtype_name(b));
    if ((op == '/' || op == OP_FLOOR || op == '%') && y == 0) return ql_jfail(r, "division by zero");
    double z = op == '+' ? x + y : op == '-' ? x - y : op == '*' ? x * y : op == '/' ? x / y : floor(x / y);
    if (op == '%') { /* exact, with the divisor's sign */
        z = fmod(x, y);
        if (z != 0 && (z < 0) != (y < 0)) z += y;
    }
    *out = (jvalue){.type = V_FLOAT, .f = z};
    return QL_OK;
}
