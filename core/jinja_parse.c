/* Jinja tokens → tree: statements; and a template as a whole. */
#include "core/jinja_lex.h"

#include <stdlib.h>

enum { TEMPLATE_MAX = 1 << 20 };

static ql_status parse_body(jparser *s, const char *const *ends, jnode **out);

static ql_status end_tag(jparser *s)
{
    if (cur(s)->type != T_BLOCK_END) return ql_junexpected(s, "'%}'");
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
    QL_TRY(ql_jnode_new(s, N_IF, out));
    QL_TRY(ql_jparse_tuple(s, &(*out)->a));
    QL_TRY(parse_until(s, ends, &(*out)->b));
    if (++s->depth > JDEPTH) FAIL_AT(cur(s)->line, QL_ENOSUP, "%s", "blocks are nested too deeply");
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
        if (cur(s)->type != T_NAME) return ql_junexpected(s, "a name");
        QL_TRY(ql_jnode_new(s, N_NAME, tail));
        (*tail)->text = cur(s)->text;
        s->at++;
        if (eat_op(s, '.')) {
            jnode *attr, *name = *tail;
            if (cur(s)->type != T_NAME) return ql_junexpected(s, "a name");
            QL_TRY(ql_jnode_new(s, N_ATTR, &attr));
            attr->a = name, attr->text = cur(s)->text;
            *tail = attr;
            s->at++;
        }
        tail = &(*tail)->next;
    } while (eat_op(s, ',') && !is_op(s, ')'));
    return paren ? ql_jwant(s, ')') : QL_OK;
}

static ql_status parse_for(jparser *s, jnode **out)
{
    static const char *const ends[] = {"else", "endfor", NULL};
    QL_TRY(ql_jnode_new(s, N_FOR, out));
    jnode *n = *out;
    QL_TRY(parse_target(s, &n->a));
    if (n->a->kind != N_NAME) return ql_junexpected(s, "a plain name to loop with");
    if (!eat_name(s, "in")) return ql_junexpected(s, "'in'");
    QL_TRY(ql_jparse_plain(s, &n->b));
    if (is_op(s, ',')) FAIL_AT(n->line, QL_ENOSUP, "%s", "a loop over an unparenthesised tuple is not supported");
    if (eat_name(s, "if")) QL_TRY(ql_jparse_expr(s, &n->e));
    if (is_name(cur(s), "recursive")) FAIL_AT(n->line, QL_ENOSUP, "%s", "recursive loops are not supported");
    QL_TRY(parse_until(s, ends, &n->c));
    if (eat_name(s, "else")) QL_TRY(parse_until(s, ends + 1, &n->d));
    s->at++;
    return QL_OK;
}

/* | filter | filter(…) of what a block writes. */
static ql_status parse_caught(jparser *s, jnode **out)
{
    QL_TRY(ql_jnode_new(s, N_CAUGHT, out));
    for (int links = 0; eat_op(s, '|'); links++) {
        if (links > JDEPTH) FAIL_AT(cur(s)->line, QL_ENOSUP, "%s", "an expression is too long");
        QL_TRY(ql_jparse_filter(s, out));
    }
    return QL_OK;
}

static ql_status parse_filter_block(jparser *s, jnode **out)
{
    static const char *const ends[] = {"endfilter", NULL};
    QL_TRY(ql_jnode_new(s, N_FILTERBLOCK, out));
    QL_TRY(ql_jnode_new(s, N_CAUGHT, &(*out)->c));
    QL_TRY(ql_jparse_filter(s, &(*out)->c));
    for (int links = 0; eat_op(s, '|'); links++) {
        if (links > JDEPTH) FAIL_AT(cur(s)->line, QL_ENOSUP, "%s", "an expression is too long");
        QL_TRY(ql_jparse_filter(s, &(*out)->c));
    }
    QL_TRY(parse_until(s, ends, &(*out)->b));
    s->at++;
    return QL_OK;
}

/* {% with a = 1, b = 2 %}: the values are of the scope outside. */
static ql_status parse_with(jparser *s, jnode **out)
{
    static const char *const ends[] = {"endwith", NULL};
    QL_TRY(ql_jnode_new(s, N_WITH, out));
    for (jnode **tail = &(*out)->a; cur(s)->type == T_NAME; tail = &(*tail)->next) {
        QL_TRY(ql_jnode_new(s, N_SET, tail));
        QL_TRY(ql_jnode_new(s, N_NAME, &(*tail)->a));
        (*tail)->a->text = cur(s)->text;
        s->at++;
        QL_TRY(ql_jwant(s, '='));
        QL_TRY(ql_jparse_expr(s, &(*tail)->b));
        if (!eat_op(s, ',')) break;
    }
    QL_TRY(parse_until(s, ends, &(*out)->b));
    s->at++;
    return QL_OK;
}

static ql_status parse_set(jparser *s, jnode **out)
{
    static const char *const ends[] = {"endset", NULL};
    QL_TRY(ql_jnode_new(s, N_SET, out));
    QL_TRY(parse_target(s, &(*out)->a));
    if (eat_op(s, '=')) return ql_jparse_tuple(s, &(*out)->b);
    if (is_op(s, '|')) QL_TRY(parse_caught(s, &(*out)->c));
    (*out)->kind = N_SETBLOCK;
    QL_TRY(parse_until(s, ends, &(*out)->b));
    s->at++;
    return QL_OK;
}

static ql_status parse_macro(jparser *s, jnode **out)
{
    static const char *const ends[] = {"endmacro", NULL};
    QL_TRY(ql_jnode_new(s, N_MACRO, out));
    if (cur(s)->type != T_NAME) return ql_junexpected(s, "a macro's name");
    (*out)->text = cur(s)->text;
    s->at++;
    QL_TRY(ql_jwant(s, '('));
    jnode **tail = &(*out)->a;
    while (!is_op(s, ')')) {
        if (cur(s)->type != T_NAME) return ql_junexpected(s, "a parameter's name");
        QL_TRY(ql_jnode_new(s, N_NAME, tail));
        (*tail)->text = cur(s)->text;
        s->at++;
        if (eat_op(s, '=')) QL_TRY(ql_jparse_expr(s, &(*tail)->a));
        tail = &(*tail)->next;
        if (!eat_op(s, ',')) break;
    }
    QL_TRY(ql_jwant(s, ')'));
    s->macros++;
    QL_TRY(parse_until(s, ends, &(*out)->b));
    s->macros--;
    s->at++;
    return QL_OK;
}

static ql_status parse_statement(jparser *s, jnode **out)
{
    static const char *const ends[] = {"endgeneration", NULL};
    jtoken *t = cur(s);
    if (t->type != T_NAME) return ql_junexpected(s, "the name of a statement");
    s->at++;
    if (jtext_is(t->text, "if")) return parse_if(s, out);
    if (jtext_is(t->text, "for")) return parse_for(s, out);
    if (jtext_is(t->text, "set")) return parse_set(s, out);
    if (jtext_is(t->text, "with")) return parse_with(s, out);
    if (jtext_is(t->text, "filter")) return parse_filter_block(s, out);
    if (jtext_is(t->text, "macro")) return parse_macro(s, out);
    if (jtext_is(t->text, "break")) return ql_jnode_new(s, N_BREAK, out);
    if (jtext_is(t->text, "continue")) return ql_jnode_new(s, N_CONTINUE, out);
    if (jtext_is(t->text, "generation")) {
        s->generation = true;
        QL_TRY(ql_jnode_new(s, N_GENERATION, out));
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
    if (++s->depth > JDEPTH) FAIL_AT(cur(s)->line, QL_ENOSUP, "%s", "blocks are nested too deeply");
    for (jnode **tail = out;; tail = &(*tail)->next) {
        jtoken *t = cur(s);
        if (t->type == T_END) {
            if (ends) return ql_junexpected(s, ends[1] ? ends[1] : ends[0]);
            break;
        }
        if (t->type == T_DATA) {
            QL_TRY(ql_jnode_new(s, N_TEXT, tail));
            (*tail)->text = t->text;
            s->at++;
        } else if (t->type == T_VAR) {
            s->at++;
            QL_TRY(ql_jnode_new(s, N_OUTPUT, tail));
            QL_TRY(ql_jparse_tuple(s, &(*tail)->a));
            if (cur(s)->type != T_VAR_END) return ql_junexpected(s, "'}}'");
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
