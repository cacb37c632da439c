/* Jinja tokens → tree: expressions. */
#include "core/jinja_lex.h"

#include <errno.h>
#include <stdlib.h>

ql_status ql_junexpected(jparser *s, const char *wanted)
{
    jtoken *t = cur(s);
    bool end = t->type == T_END;
    FAIL_AT(t->line, QL_EINVAL, "expected %s, found '%.*s'", wanted, end ? 18 : (int)(t->text.n > 30 ? 30 : t->text.n),
            end ? "the template's end" : t->text.p);
}

ql_status ql_jwant(jparser *s, int op)
{
    char what[4] = {'\'', (char)op, '\'', 0};
    return eat_op(s, op) ? QL_OK : ql_junexpected(s, what);
}

ql_status ql_jnode_new(jparser *s, jkind kind, jnode **out)
{
    jnode *n = ql_jalloc(s->mem, sizeof *n);
    if (!n) return QL_ENOMEM;
    n->kind = kind, n->line = cur(s)->line;
    *out = n;
    return QL_OK;
}

static ql_status parse_unary(jparser *s, int with_filter, jnode **out);

/* name=value or value, up to ')'. */
static ql_status parse_args(jparser *s, jnode **out)
{
    jnode **tail = out;
    while (!is_op(s, ')')) {
        jnode *arg;
        if (is_op(s, '*') || is_op(s, OP_POW))
            FAIL_AT(cur(s)->line, QL_ENOSUP, "%s", "* and ** arguments are not supported");
        QL_TRY(ql_jnode_new(s, N_CALL, &arg));
        if (cur(s)->type == T_NAME && peek(s)->type == T_OP && peek(s)->op == '=') {
            arg->text = cur(s)->text;
            s->at += 2;
        }
        QL_TRY(ql_jparse_expr(s, &arg->a));
        *tail = arg, tail = &arg->next;
        if (!eat_op(s, ',')) break;
    }
    return ql_jwant(s, ')');
}

static ql_status parse_items(jparser *s, int close, jnode *list)
{
    jnode **tail = &list->b;
    while (!is_op(s, close)) {
        QL_TRY(ql_jparse_expr(s, tail));
        tail = &(*tail)->next;
        if (!eat_op(s, ',')) break;
    }
    return ql_jwant(s, close);
}

static ql_status parse_dict(jparser *s, jnode *dict)
{
    jnode **tail = &dict->b;
    while (!is_op(s, '}')) {
        jnode *pair;
        QL_TRY(ql_jnode_new(s, N_DICT, &pair));
        QL_TRY(ql_jparse_expr(s, &pair->a));
        QL_TRY(ql_jwant(s, ':'));
        QL_TRY(ql_jparse_expr(s, &pair->b));
        *tail = pair, tail = &pair->next;
        if (!eat_op(s, ',')) break;
    }
    return ql_jwant(s, '}');
}

static ql_status parse_paren(jparser *s, jnode **out)
{
    jnode *first = NULL;
    if (!is_op(s, ')')) QL_TRY(ql_jparse_expr(s, &first));
    if (first && eat_op(s, ')')) {
        *out = first;
        return QL_OK;
    }
    QL_TRY(ql_jnode_new(s, N_TUPLE, out));
    (*out)->b = first;
    if (first) {
        QL_TRY(ql_jwant(s, ','));
        jnode rest = {0};
        QL_TRY(parse_items(s, ')', &rest));
        first->next = rest.b;
        return QL_OK;
    }
    return ql_jwant(s, ')');
}

static ql_status parse_strings(jparser *s, jnode *n)
{
    ql_str all = {0};
    ql_status st = QL_OK;
    n->text = cur(s)->text;
    if (peek(s)->type != T_STR) return s->at++, QL_OK;
    for (; cur(s)->type == T_STR; s->at++) QL_GO(ql_str_add(&all, cur(s)->text.p, cur(s)->text.n));
    char *p = ql_jalloc(s->mem, all.len + 1);
    if (!p) {
        st = QL_ENOMEM;
        goto out;
    }
    memcpy(p, all.data, all.len);
    n->text = (jtext){p, all.len};
out:
    ql_str_free(&all);
    return st;
}

static ql_status parse_primary(jparser *s, jnode **out)
{
    jtoken *t = cur(s);
    char digits[64];
    if (t->type == T_NAME) {
        if (s->macros && (jtext_is(t->text, "varargs") || jtext_is(t->text, "kwargs") || jtext_is(t->text, "caller")))
            FAIL_AT(t->line, QL_ENOSUP, "'%.*s' in a macro is not supported", (int)t->text.n, t->text.p);
        bool yes = jtext_is(t->text, "true") || jtext_is(t->text, "True");
        bool no = jtext_is(t->text, "false") || jtext_is(t->text, "False");
        bool none = jtext_is(t->text, "none") || jtext_is(t->text, "None");
        QL_TRY(ql_jnode_new(s, yes || no ? N_BOOL : none ? N_NONE : N_NAME, out));
        (*out)->i = yes, (*out)->text = t->text;
        s->at++;
        return QL_OK;
    }
    if (t->type == T_STR) {
        QL_TRY(ql_jnode_new(s, N_STR, out));
        return parse_strings(s, *out);
    }
    if (t->type == T_INT || t->type == T_FLOAT) {
        size_t n = 0;
        QL_TRY(ql_jnode_new(s, t->type == T_INT ? N_INT : N_FLOAT, out));
        for (size_t i = 0; i < t->text.n; i++)
            if (t->text.p[i] != '_') digits[n++] = t->text.p[i];
        digits[n] = 0, errno = 0;
        if (t->type == T_INT) (*out)->i = strtoll(digits, NULL, 10);
        else (*out)->f = strtod(digits, NULL);
        if (errno == ERANGE) FAIL_AT(t->line, QL_ENOSUP, "the number %s is too large", digits);
        s->at++;
        return QL_OK;
    }
    if (eat_op(s, '(')) return parse_paren(s, out);
    if (is_op(s, '[') || is_op(s, '{')) {
        QL_TRY(ql_jnode_new(s, is_op(s, '[') ? N_LIST : N_DICT, out));
        s->at++;
        return (*out)->kind == N_LIST ? parse_items(s, ']', *out) : parse_dict(s, *out);
    }
    return ql_junexpected(s, "an expression");
}

/* [i] or [from:to:step] */
static ql_status parse_subscript(jparser *s, jnode *n)
{
    jnode **part[] = {&n->b, &n->c, &n->d};
    int k = 0;
    n->kind = N_ITEM;
    if (!is_op(s, ':')) QL_TRY(ql_jparse_expr(s, part[k]));
    while (k < 2 && eat_op(s, ':')) {
        n->kind = N_SLICE, k++;
        if (!is_op(s, ':') && !is_op(s, ']')) QL_TRY(ql_jparse_expr(s, part[k]));
    }
    return ql_jwant(s, ']');
}

static ql_status parse_postfix(jparser *s, jnode **io)
{
    for (int links = 0;; links++) {
        jnode *n;
        if (!is_op(s, '.') && !is_op(s, '[') && !is_op(s, '(')) return QL_OK;
        if (links > JDEPTH) FAIL_AT(cur(s)->line, QL_ENOSUP, "%s", "an expression is too long");
        QL_TRY(ql_jnode_new(s, N_ATTR, &n));
        n->a = *io;
        if (eat_op(s, '.')) {
            if (cur(s)->type == T_INT) { /* x.0 is x[0] */
                n->kind = N_ITEM;
                QL_TRY(parse_primary(s, &n->b));
            } else {
                if (cur(s)->type != T_NAME) return ql_junexpected(s, "a name behind '.'");
                n->text = cur(s)->text;
                s->at++;
            }
        } else if (eat_op(s, '[')) {
            QL_TRY(parse_subscript(s, n));
        } else {
            s->at++;
            n->kind = N_CALL;
            QL_TRY(parse_args(s, &n->b));
        }
        *io = n;
    }
}

static ql_status parse_test(jparser *s, jnode **io)
{
    jnode *n;
    QL_TRY(ql_jnode_new(s, N_TEST, &n));
    n->a = *io;
    n->op = eat_name(s, "not");
    jtoken *t = cur(s);
    if (t->type != T_NAME) return ql_junexpected(s, "the name of a test");
    if (!ql_jtest_known(t->text))
        FAIL_AT(t->line, QL_ENOSUP, "the test 'is %.*s' is not supported", (int)t->text.n, t->text.p);
    n->text = t->text;
    s->at++;
    t = cur(s);
    if (eat_op(s, '(')) {
        QL_TRY(parse_args(s, &n->b));
    } else if (t->type == T_STR || t->type == T_INT || t->type == T_FLOAT || is_op(s, '[') ||
               is_op(s, '{') ||
               (t->type == T_NAME && !is_name(t, "else") && !is_name(t, "or") && !is_name(t, "and") &&
                !is_name(t, "if") && !is_name(t, "is") && !is_name(t, "not") && !is_name(t, "in"))) {
        QL_TRY(ql_jnode_new(s, N_CALL, &n->b));
        QL_TRY(parse_primary(s, &n->b->a));
        QL_TRY(parse_postfix(s, &n->b->a));
    }
    *io = n;
    return QL_OK;
}

ql_status ql_jparse_filter(jparser *s, jnode **io)
{
    jnode *n;
    jtoken *t = cur(s);
    QL_TRY(ql_jnode_new(s, N_FILTER, &n));
    if (t->type != T_NAME) return ql_junexpected(s, "the name of a filter");
    if (!ql_jfilter_known(t->text))
        FAIL_AT(t->line, QL_ENOSUP, "the filter '%.*s' is not supported", (int)t->text.n, t->text.p);
    n->text = t->text, n->a = *io;
    s->at++;
    if (eat_op(s, '(')) QL_TRY(parse_args(s, &n->b));
    *io = n;
    return QL_OK;
}

static ql_status parse_unary(jparser *s, int with_filter, jnode **out)
{
    if (++s->depth > JDEPTH) FAIL_AT(cur(s)->line, QL_ENOSUP, "%s", "expressions are nested too deeply");
    if (is_op(s, '-') || is_op(s, '+')) {
        jnode *n;
        QL_TRY(ql_jnode_new(s, N_NEG, &n));
        n->op = cur(s)->op;
        s->at++;
        QL_TRY(parse_unary(s, 0, &n->a));
        *out = n;
    } else {
        QL_TRY(parse_primary(s, out));
    }
    QL_TRY(parse_postfix(s, out));
    for (int links = 0; with_filter; links++) {
        if (links > JDEPTH) FAIL_AT(cur(s)->line, QL_ENOSUP, "%s", "an expression is too long");
        if (eat_op(s, '|')) QL_TRY(ql_jparse_filter(s, out));
        else if (eat_name(s, "is")) QL_TRY(parse_test(s, out));
        else if (is_op(s, '(')) QL_TRY(parse_postfix(s, out));
        else break;
    }
    s->depth--;
    return QL_OK;
}

/* Left-associative operators, loosest level first; below the last comes unary. */
static const int levels[][5] = {{'+', '-'}, {'~'}, {'*', '/', OP_FLOOR, '%'}, {OP_POW}};

static ql_status parse_binary(jparser *s, int level, jnode **out)
{
    if (level == 4) return parse_unary(s, 1, out);
    QL_TRY(parse_binary(s, level + 1, out));
    for (int links = 0;; links++) {
        const int *op = levels[level];
        while (*op && !is_op(s, *op)) op++;
        if (!*op) return QL_OK;
        if (links > 10 * JDEPTH) FAIL_AT(cur(s)->line, QL_ENOSUP, "%s", "an expression is too long");
        jnode *n;
        QL_TRY(ql_jnode_new(s, N_BIN, &n));
        n->op = *op, n->a = *out;
        s->at++;
        QL_TRY(parse_binary(s, level + 1, &n->b));
        *out = n;
    }
}

static int compare_op(jparser *s)
{
    jtoken *t = cur(s);
    if (t->type == T_OP &&
        (t->op == OP_EQ || t->op == OP_NE || t->op == '<' || t->op == '>' || t->op == OP_LE || t->op == OP_GE))
        return s->at++, t->op;
    if (eat_name(s, "in")) return OP_IN;
    if (is_name(t, "not") && is_name(peek(s), "in")) return s->at += 2, OP_NOT_IN;
    return 0;
}

static ql_status parse_compare(jparser *s, jnode **out)
{
    QL_TRY(parse_binary(s, 0, out));
    jnode *n = NULL, **tail = NULL;
    for (int op; (op = compare_op(s));) {
        jnode *link;
        if (!n) {
            QL_TRY(ql_jnode_new(s, N_COMPARE, &n));
            n->a = *out, *out = n, tail = &n->b;
        }
        QL_TRY(ql_jnode_new(s, N_COMPARE, &link));
        link->op = op;
        QL_TRY(parse_binary(s, 0, &link->a));
        *tail = link, tail = &link->next;
    }
    return QL_OK;
}

static ql_status parse_not(jparser *s, jnode **out)
{
    if (!is_name(cur(s), "not")) return parse_compare(s, out);
    QL_TRY(ql_jnode_new(s, N_NOT, out));
    s->at++;
    if (++s->depth > JDEPTH) FAIL_AT(cur(s)->line, QL_ENOSUP, "%s", "expressions are nested too deeply");
    QL_TRY(parse_not(s, &(*out)->a));
    s->depth--;
    return QL_OK;
}

static ql_status parse_logic(jparser *s, jkind kind, jnode **out)
{
    const char *word = kind == N_OR ? "or" : "and";
    QL_TRY(kind == N_OR ? parse_logic(s, N_AND, out) : parse_not(s, out));
    for (int links = 0; is_name(cur(s), word); links++) {
        jnode *n;
        if (links > JDEPTH) FAIL_AT(cur(s)->line, QL_ENOSUP, "%s", "an expression is too long");
        QL_TRY(ql_jnode_new(s, kind, &n));
        s->at++;
        n->a = *out;
        QL_TRY(kind == N_OR ? parse_logic(s, N_AND, &n->b) : parse_not(s, &n->b));
        *out = n;
    }
    return QL_OK;
}

ql_status ql_jparse_plain(jparser *s, jnode **out)
{
    return parse_logic(s, N_OR, out);
}

ql_status ql_jparse_expr(jparser *s, jnode **out)
{
    if (++s->depth > JDEPTH) FAIL_AT(cur(s)->line, QL_ENOSUP, "%s", "expressions are nested too deeply");
    QL_TRY(parse_logic(s, N_OR, out));
    for (int links = 0; is_name(cur(s), "if"); links++) {
        jnode *n;
        if (links > JDEPTH) FAIL_AT(cur(s)->line, QL_ENOSUP, "%s", "an expression is too long");
        QL_TRY(ql_jnode_new(s, N_COND, &n));
        s->at++;
        n->b = *out;
        QL_TRY(parse_logic(s, N_OR, &n->a));
        if (eat_name(s, "else")) QL_TRY(ql_jparse_expr(s, &n->c));
        *out = n;
    }
    s->depth--;
    return QL_OK;
}

ql_status ql_jparse_tuple(jparser *s, jnode **out)
{
    QL_TRY(ql_jparse_expr(s, out));
    if (!is_op(s, ',')) return QL_OK;
    jnode *n, **tail = &(*out)->next;
    QL_TRY(ql_jnode_new(s, N_TUPLE, &n));
    n->b = *out;
    while (eat_op(s, ',')) {
        if (cur(s)->type == T_BLOCK_END || cur(s)->type == T_VAR_END) break;
        QL_TRY(ql_jparse_expr(s, tail));
        tail = &(*tail)->next;
    }
    *out = n;
    return QL_OK;
}
