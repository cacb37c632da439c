/* Jinja tokens → tree. */
#include "core/jinja_lex.h"

#include <errno.h>
#include <stdlib.h>

enum { DEPTH = 100, TEMPLATE_MAX = 1 << 20 };

/* ---- expressions ------------------------------------------------------------------------------- */

static jtoken *cur(jparser *s)
{
    return s->tok + s->at;
}
static jtoken *peek(jparser *s)
{
    return s->tok + (s->at + 1 < s->n ? s->at + 1 : s->at);
}
static bool is_op(jparser *s, int op)
{
    return cur(s)->type == T_OP && cur(s)->op == op;
}
static bool is_name(const jtoken *t, const char *name)
{
    return t->type == T_NAME && jtext_is(t->text, name);
}
static bool eat_op(jparser *s, int op)
{
    bool yes = is_op(s, op);
    s->at += yes;
    return yes;
}
static bool eat_name(jparser *s, const char *name)
{
    bool yes = is_name(cur(s), name);
    s->at += yes;
    return yes;
}

static ql_status unexpected(jparser *s, const char *wanted)
{
    jtoken *t = cur(s);
    bool end = t->type == T_END;
    FAIL_AT(t->line, QL_EINVAL, "expected %s, found '%.*s'", wanted, end ? 18 : (int)(t->text.n > 30 ? 30 : t->text.n),
            end ? "the template's end" : t->text.p);
}

static ql_status want_op(jparser *s, int op)
{
    char what[4] = {'\'', (char)op, '\'', 0};
    return eat_op(s, op) ? QL_OK : unexpected(s, what);
}

static ql_status new_node(jparser *s, jkind kind, jnode **out)
{
    jnode *n = ql_jalloc(s->mem, sizeof *n);
    if (!n) return QL_ENOMEM;
    n->kind = kind, n->line = cur(s)->line;
    *out = n;
    return QL_OK;
}

static ql_status parse_expr(jparser *s, jnode **out);
static ql_status parse_unary(jparser *s, int with_filter, jnode **out);

/* name=value or value, up to ')'. */
static ql_status parse_args(jparser *s, jnode **out)
{
    jnode **tail = out;
    while (!is_op(s, ')')) {
        jnode *arg;
        if (is_op(s, '*') || is_op(s, OP_POW))
            FAIL_AT(cur(s)->line, QL_ENOSUP, "%s", "* and ** arguments are not supported");
        QL_TRY(new_node(s, N_CALL, &arg));
        if (cur(s)->type == T_NAME && peek(s)->type == T_OP && peek(s)->op == '=') {
            arg->text = cur(s)->text;
            s->at += 2;
        }
        QL_TRY(parse_expr(s, &arg->a));
        *tail = arg, tail = &arg->next;
        if (!eat_op(s, ',')) break;
    }
    return want_op(s, ')');
}

static ql_status parse_items(jparser *s, int close, jnode *list)
{
    jnode **tail = &list->b;
    while (!is_op(s, close)) {
        QL_TRY(parse_expr(s, tail));
        tail = &(*tail)->next;
        if (!eat_op(s, ',')) break;
    }
    return want_op(s, close);
}

static ql_status parse_dict(jparser *s, jnode *dict)
{
    jnode **tail = &dict->b;
    while (!is_op(s, '}')) {
        jnode *pair;
        QL_TRY(new_node(s, N_DICT, &pair));
        QL_TRY(parse_expr(s, &pair->a));
        QL_TRY(want_op(s, ':'));
        QL_TRY(parse_expr(s, &pair->b));
        *tail = pair, tail = &pair->next;
        if (!eat_op(s, ',')) break;
    }
    return want_op(s, '}');
}

static ql_status parse_paren(jparser *s, jnode **out)
{
    jnode *first = NULL;
    if (!is_op(s, ')')) QL_TRY(parse_expr(s, &first));
    if (first && eat_op(s, ')')) {
        *out = first;
        return QL_OK;
    }
    QL_TRY(new_node(s, N_TUPLE, out));
    (*out)->b = first;
    if (first) {
        QL_TRY(want_op(s, ','));
        jnode rest = {0};
        QL_TRY(parse_items(s, ')', &rest));
        first->next = rest.b;
        return QL_OK;
    }
    return want_op(s, ')');
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
        bool yes = jtext_is(t->text, "true") || jtext_is(t->text, "True");
        bool no = jtext_is(t->text, "false") || jtext_is(t->text, "False");
        bool none = jtext_is(t->text, "none") || jtext_is(t->text, "None");
        QL_TRY(new_node(s, yes || no ? N_BOOL : none ? N_NONE : N_NAME, out));
        (*out)->i = yes, (*out)->text = t->text;
        s->at++;
        return QL_OK;
    }
    if (t->type == T_STR) {
        QL_TRY(new_node(s, N_STR, out));
        return parse_strings(s, *out);
    }
    if (t->type == T_INT || t->type == T_FLOAT) {
        size_t n = 0;
        QL_TRY(new_node(s, t->type == T_INT ? N_INT : N_FLOAT, out));
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
        QL_TRY(new_node(s, is_op(s, '[') ? N_LIST : N_DICT, out));
        s->at++;
        return (*out)->kind == N_LIST ? parse_items(s, ']', *out) : parse_dict(s, *out);
    }
    return unexpected(s, "an expression");
}

/* [i] or [from:to:step] */
static ql_status parse_subscript(jparser *s, jnode *n)
{
    jnode **part[] = {&n->b, &n->c, &n->d};
    int k = 0;
    n->kind = N_ITEM;
    if (!is_op(s, ':')) QL_TRY(parse_expr(s, part[k]));
    while (k < 2 && eat_op(s, ':')) {
        n->kind = N_SLICE, k++;
        if (!is_op(s, ':') && !is_op(s, ']')) QL_TRY(parse_expr(s, part[k]));
    }
    return want_op(s, ']');
}

static ql_status parse_postfix(jparser *s, jnode **io)
{
    for (int links = 0;; links++) {
        jnode *n;
        if (!is_op(s, '.') && !is_op(s, '[') && !is_op(s, '(')) return QL_OK;
        if (links > DEPTH) FAIL_AT(cur(s)->line, QL_ENOSUP, "%s", "an expression is too long");
        QL_TRY(new_node(s, N_ATTR, &n));
        n->a = *io;
        if (eat_op(s, '.')) {
            if (cur(s)->type != T_NAME && cur(s)->type != T_INT) return unexpected(s, "a name behind '.'");
            n->text = cur(s)->text;
            s->at++;
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
    QL_TRY(new_node(s, N_TEST, &n));
    n->a = *io;
    n->op = eat_name(s, "not");
    jtoken *t = cur(s);
    if (t->type != T_NAME) return unexpected(s, "the name of a test");
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
        QL_TRY(new_node(s, N_CALL, &n->b));
        QL_TRY(parse_primary(s, &n->b->a));
        QL_TRY(parse_postfix(s, &n->b->a));
    }
    *io = n;
    return QL_OK;
}

static ql_status parse_filter(jparser *s, jnode **io)
{
    jnode *n;
    jtoken *t = cur(s);
    QL_TRY(new_node(s, N_FILTER, &n));
    if (t->type != T_NAME) return unexpected(s, "the name of a filter");
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
    if (++s->depth > DEPTH) FAIL_AT(cur(s)->line, QL_ENOSUP, "%s", "expressions are nested too deeply");
    if (is_op(s, '-') || is_op(s, '+')) {
        jnode *n;
        QL_TRY(new_node(s, N_NEG, &n));
        n->op = cur(s)->op;
        s->at++;
        QL_TRY(parse_unary(s, 0, &n->a));
        *out = n;
    } else {
        QL_TRY(parse_primary(s, out));
    }
    QL_TRY(parse_postfix(s, out));
    for (int links = 0; with_filter; links++) {
        if (links > DEPTH) FAIL_AT(cur(s)->line, QL_ENOSUP, "%s", "an expression is too long");
        if (eat_op(s, '|')) QL_TRY(parse_filter(s, out));
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
        if (links > 10 * DEPTH) FAIL_AT(cur(s)->line, QL_ENOSUP, "%s", "an expression is too long");
        jnode *n;
        QL_TRY(new_node(s, N_BIN, &n));
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
            QL_TRY(new_node(s, N_COMPARE, &n));
            n->a = *out, *out = n, tail = &n->b;
        }
        QL_TRY(new_node(s, N_COMPARE, &link));
        link->op = op;
        QL_TRY(parse_binary(s, 0, &link->a));
        *tail = link, tail = &link->next;
    }
    return QL_OK;
}

static ql_status parse_not(jparser *s, jnode **out)
{
    if (!is_name(cur(s), "not")) return parse_compare(s, out);
    QL_TRY(new_node(s, N_NOT, out));
    s->at++;
    if (++s->depth > DEPTH) FAIL_AT(cur(s)->line, QL_ENOSUP, "%s", "expressions are nested too deeply");
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
        if (links > DEPTH) FAIL_AT(cur(s)->line, QL_ENOSUP, "%s", "an expression is too long");
        QL_TRY(new_node(s, kind, &n));
        s->at++;
        n->a = *out;
        QL_TRY(kind == N_OR ? parse_logic(s, N_AND, &n->b) : parse_not(s, &n->b));
        *out = n;
    }
    return QL_OK;
}

static ql_status parse_expr(jparser *s, jnode **out)
{
    if (++s->depth > DEPTH) FAIL_AT(cur(s)->line, QL_ENOSUP, "%s", "expressions are nested too deeply");
    QL_TRY(parse_logic(s, N_OR, out));
    for (int links = 0; is_name(cur(s), "if"); links++) {
        jnode *n;
        if (links > DEPTH) FAIL_AT(cur(s)->line, QL_ENOSUP, "%s", "an expression is too long");
        QL_TRY(new_node(s, N_COND, &n));
        s->at++;
        n->b = *out;
        QL_TRY(parse_logic(s, N_OR, &n->a));
        if (eat_name(s, "else")) QL_TRY(parse_expr(s, &n->c));
        *out = n;
    }
    s->depth--;
    return QL_OK;
}

/* a, b, c without parentheses is a tuple too. */
static ql_status parse_tuple(jparser *s, jnode **out)
{
    QL_TRY(parse_expr(s, out));
    if (!is_op(s, ',')) return QL_OK;
    jnode *n, **tail = &(*out)->next;
    QL_TRY(new_node(s, N_TUPLE, &n));
    n->b = *out;
    while (eat_op(s, ',')) {
        if (cur(s)->type == T_BLOCK_END || cur(s)->type == T_VAR_END) break;
        QL_TRY(parse_expr(s, tail));
        tail = &(*tail)->next;
    }
    *out = n;
    return QL_OK;
}

/* ---- statements -------------------------------------------------------------------------------- */

static ql_status parse_body(jparser *s, const char *const *ends, jnode **out);

static ql_status end_tag(jparser *s)
{
    if (cur(s)->type != T_BLOCK_END) return unexpected(s, "'%}'");
    s->at++;
    return QL_OK;
}

/* The body up to one of the ends, whose name stays current (behind its "{%"). */
static ql_status parse_until(jparser *s, const char *const *ends, jnode **out)
{
    QL_TRY(end_tag(s));
    return parse_body(s, ends, out);
}

static ql_status parse_if(jparser *s, jnode **out)
{
    static const char *const ends[] = {"elif", "else", "endif", NULL};
    QL_TRY(new_node(s, N_IF, out));
    QL_TRY(parse_tuple(s, &(*out)->a));
    QL_TRY(parse_until(s, ends, &(*out)->b));
    if (++s->depth > DEPTH) FAIL_AT(cur(s)->line, QL_ENOSUP, "%s", "blocks are nested too deeply");
    if (eat_name(s, "elif")) {
        QL_TRY(parse_if(s, &(*out)->c));
    } else if (eat_name(s, "else")) {
        QL_TRY(parse_until(s, ends + 2, &(*out)->c));
        s->at++;
    } else {
        s->at++;
    }
    s->depth--;
    return QL_OK; /* the innermost one stands before the last "%}" */
}

/* x or x, y (with or without parentheses); x.y only for set. */
static ql_status parse_target(jparser *s, jnode **out)
{
    bool paren = eat_op(s, '(');
    jnode **tail = out;
    do {
        if (cur(s)->type != T_NAME) return unexpected(s, "a name");
        QL_TRY(new_node(s, N_NAME, tail));
        (*tail)->text = cur(s)->text;
        s->at++;
        if (eat_op(s, '.')) {
            jnode *attr, *name = *tail;
            if (cur(s)->type != T_NAME) return unexpected(s, "a name");
            QL_TRY(new_node(s, N_ATTR, &attr));
            attr->a = name, attr->text = cur(s)->text;
            *tail = attr;
            s->at++;
        }
        tail = &(*tail)->next;
    } while (eat_op(s, ',') && !is_op(s, ')'));
    return paren ? want_op(s, ')') : QL_OK;
}

static ql_status parse_for(jparser *s, jnode **out)
{
    static const char *const ends[] = {"else", "endfor", NULL};
    QL_TRY(new_node(s, N_FOR, out));
    jnode *n = *out;
    QL_TRY(parse_target(s, &n->a));
    if (n->a->kind != N_NAME) return unexpected(s, "a plain name to loop with");
    if (!eat_name(s, "in")) return unexpected(s, "'in'");
    /* Not parse_expr: "if" here is the loop's filter. */
    QL_TRY(parse_logic(s, N_OR, &n->b));
    if (is_op(s, ',')) FAIL_AT(n->line, QL_ENOSUP, "%s", "a loop over an unparenthesised tuple is not supported");
    if (eat_name(s, "if")) QL_TRY(parse_expr(s, &n->e));
    if (is_name(cur(s), "recursive")) FAIL_AT(n->line, QL_ENOSUP, "%s", "recursive loops are not supported");
    QL_TRY(parse_until(s, ends, &n->c));
    if (eat_name(s, "else")) QL_TRY(parse_until(s, ends + 1, &n->d));
    s->at++;
    return QL_OK;
}

/* | filter | filter(…) of what a block writes. */
static ql_status parse_caught(jparser *s, jnode **out)
{
    QL_TRY(new_node(s, N_CAUGHT, out));
    for (int links = 0; eat_op(s, '|'); links++) {
        if (links > DEPTH) FAIL_AT(cur(s)->line, QL_ENOSUP, "%s", "an expression is too long");
        QL_TRY(parse_filter(s, out));
    }
    return QL_OK;
}

static ql_status parse_filter_block(jparser *s, jnode **out)
{
    static const char *const ends[] = {"endfilter", NULL};
    QL_TRY(new_node(s, N_FILTERBLOCK, out));
    QL_TRY(new_node(s, N_CAUGHT, &(*out)->c));
    QL_TRY(parse_filter(s, &(*out)->c));
    for (int links = 0; eat_op(s, '|'); links++) {
        if (links > DEPTH) FAIL_AT(cur(s)->line, QL_ENOSUP, "%s", "an expression is too long");
        QL_TRY(parse_filter(s, &(*out)->c));
    }
    QL_TRY(parse_until(s, ends, &(*out)->b));
    s->at++;
    return QL_OK;
}

/* {% with a = 1, b = 2 %}: the values are of the scope outside. */
static ql_status parse_with(jparser *s, jnode **out)
{
    static const char *const ends[] = {"endwith", NULL};
    QL_TRY(new_node(s, N_WITH, out));
    for (jnode **tail = &(*out)->a; cur(s)->type == T_NAME; tail = &(*tail)->next) {
        QL_TRY(new_node(s, N_SET, tail));
        QL_TRY(new_node(s, N_NAME, &(*tail)->a));
        (*tail)->a->text = cur(s)->text;
        s->at++;
        QL_TRY(want_op(s, '='));
        QL_TRY(parse_expr(s, &(*tail)->b));
        if (!eat_op(s, ',')) break;
    }
    QL_TRY(parse_until(s, ends, &(*out)->b));
    s->at++;
    return QL_OK;
}

static ql_status parse_set(jparser *s, jnode **out)
{
    static const char *const ends[] = {"endset", NULL};
    QL_TRY(new_node(s, N_SET, out));
    QL_TRY(parse_target(s, &(*out)->a));
    if (eat_op(s, '=')) return parse_tuple(s, &(*out)->b);
    if (is_op(s, '|')) QL_TRY(parse_caught(s, &(*out)->c));
    (*out)->kind = N_SETBLOCK;
    QL_TRY(parse_until(s, ends, &(*out)->b));
    s->at++;
    return QL_OK;
}

static ql_status parse_macro(jparser *s, jnode **out)
{
    static const char *const ends[] = {"endmacro", NULL};
    QL_TRY(new_node(s, N_MACRO, out));
    if (cur(s)->type != T_NAME) return unexpected(s, "a macro's name");
    (*out)->text = cur(s)->text;
    s->at++;
    QL_TRY(want_op(s, '('));
    jnode **tail = &(*out)->a;
    while (!is_op(s, ')')) {
        if (cur(s)->type != T_NAME) return unexpected(s, "a parameter's name");
        QL_TRY(new_node(s, N_NAME, tail));
        (*tail)->text = cur(s)->text;
        s->at++;
        if (eat_op(s, '=')) QL_TRY(parse_expr(s, &(*tail)->a));
        tail = &(*tail)->next;
        if (!eat_op(s, ',')) break;
    }
    QL_TRY(want_op(s, ')'));
    QL_TRY(parse_until(s, ends, &(*out)->b));
    s->at++;
    return QL_OK;
}

static ql_status parse_statement(jparser *s, jnode **out)
{
    static const char *const ends[] = {"endgeneration", NULL};
    jtoken *t = cur(s);
    if (t->type != T_NAME) return unexpected(s, "the name of a statement");
    s->at++;
    if (jtext_is(t->text, "if")) return parse_if(s, out);
    if (jtext_is(t->text, "for")) return parse_for(s, out);
    if (jtext_is(t->text, "set")) return parse_set(s, out);
    if (jtext_is(t->text, "with")) return parse_with(s, out);
    if (jtext_is(t->text, "filter")) return parse_filter_block(s, out);
    if (jtext_is(t->text, "macro")) return parse_macro(s, out);
    if (jtext_is(t->text, "break")) return new_node(s, N_BREAK, out);
    if (jtext_is(t->text, "continue")) return new_node(s, N_CONTINUE, out);
    if (jtext_is(t->text, "generation")) {
        s->generation = true;
        QL_TRY(new_node(s, N_GENERATION, out));
        QL_TRY(parse_until(s, ends, &(*out)->b));
        s->at++;
        return QL_OK;
    }
    FAIL_AT(t->line, QL_ENOSUP, "the statement {%% %.*s %%} is not supported", (int)t->text.n, t->text.p);
}

static bool at_end(jparser *s, const char *const *ends)
{
    for (; ends && *ends; ends++)
        if (is_name(peek(s), *ends)) return true;
    return false;
}

static ql_status parse_body(jparser *s, const char *const *ends, jnode **out)
{
    if (++s->depth > DEPTH) FAIL_AT(cur(s)->line, QL_ENOSUP, "%s", "blocks are nested too deeply");
    for (jnode **tail = out;; tail = &(*tail)->next) {
        jtoken *t = cur(s);
        if (t->type == T_END) {
            if (ends) return unexpected(s, ends[1] ? ends[1] : ends[0]);
            break;
        }
        if (t->type == T_DATA) {
            QL_TRY(new_node(s, N_TEXT, tail));
            (*tail)->text = t->text;
            s->at++;
        } else if (t->type == T_VAR) {
            s->at++;
            QL_TRY(new_node(s, N_OUTPUT, tail));
            QL_TRY(parse_tuple(s, &(*tail)->a));
            if (cur(s)->type != T_VAR_END) return unexpected(s, "'}}'");
            s->at++;
        } else {
            bool done = at_end(s, ends);
            s->at++;
            if (done) break;
            QL_TRY(parse_statement(s, tail));
            QL_TRY(end_tag(s));
        }
    }
    s->depth--;
    return QL_OK;
}

/* Line ends become \n, and one at the very end is dropped, as Jinja's defaults have it. */
static ql_status clean_source(jarena *mem, const char *text, size_t n, jtext *out)
{
    char *p = ql_jalloc(mem, n + 1);
    size_t k = 0;
    if (!p) return QL_ENOMEM;
    for (size_t i = 0; i < n; i++) {
        if (text[i] == '\r' && i + 1 < n && text[i + 1] == '\n') continue;
        p[k++] = text[i] == '\r' ? '\n' : text[i];
    }
    if (k && p[k - 1] == '\n') k--;
    *out = (jtext){p, k};
    return QL_OK;
}

ql_status ql_jinja_compile(const char *text, size_t n, ql_jinja **out)
{
    ql_jinja *t = calloc(1, sizeof *t);
    jparser s = {0};
    jtext source;
    ql_status st = QL_OK;
    if (!t) QL_FAIL(QL_ENOMEM, "no memory for a template");
    t->mem.limit = 256 << 20;
    if (n > TEMPLATE_MAX || ql_utf8_valid(text, n) < n) {
        st = ql_fail(QL_EINVAL, n > TEMPLATE_MAX ? "it is longer than 1 MB" : "it is not valid UTF-8");
        goto out;
    }
    QL_GO(clean_source(&t->mem, text, n, &source));
    s.mem = &t->mem, s.p = source.p, s.end = source.p + source.n;
    QL_GO(ql_jlex(&s));
    QL_GO(parse_body(&s, NULL, &t->body));
    t->generation = s.generation;
    *out = t, t = NULL;
out:
    if (st != QL_OK) ql_error_prefix("chat template: ");
    free(s.tok);
    ql_jinja_free(t);
    return st;
}

void ql_jinja_free(ql_jinja *t)
{
    if (!t) return;
    ql_jarena_free(&t->mem);
    free(t);
}

bool ql_jinja_has_generation(const ql_jinja *t)
{
    return t->generation;
}
