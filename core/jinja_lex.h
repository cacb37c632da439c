/* Between core/jinja_lex.c, core/jinja_expr.c and core/jinja_parse.c. */
#ifndef QL_JINJA_LEX_H
#define QL_JINJA_LEX_H

#include "core/jinja_ast.h"

typedef enum { T_DATA, T_VAR, T_VAR_END, T_BLOCK, T_BLOCK_END, T_NAME, T_STR, T_INT, T_FLOAT, T_OP,
               T_END } ttype;
typedef struct {
    ttype type;
    int line, op;
    jtext text;
} jtoken;

typedef struct {
    jarena *mem;
    const char *p, *end;
    int line;
    bool line_starting; /* the last token ended a line */
    jtoken *tok;
    size_t n, cap, at;
    int depth, macros; /* nested */
    bool generation;
} jparser;

#define FAIL_AT(line, code, fmt, ...) return ql_fail(code, "line %d: " fmt, line, __VA_ARGS__)

/* Fills tok (the caller frees it) with the tokens of p … end; the last one is T_END. */
ql_status ql_jlex(jparser *s);

/* ---- the tokens at hand ------------------------------------------------------------------------- */

static inline jtoken *cur(jparser *s)
{
    return s->tok + s->at;
}
static inline jtoken *peek(jparser *s)
{
    return s->tok + (s->at + 1 < s->n ? s->at + 1 : s->at);
}
static inline bool is_op(jparser *s, int op)
{
    return cur(s)->type == T_OP && cur(s)->op == op;
}
static inline bool is_name(const jtoken *t, const char *name)
{
    return t->type == T_NAME && jtext_is(t->text, name);
}
static inline bool eat_op(jparser *s, int op)
{
    bool yes = is_op(s, op);
    s->at += yes;
    return yes;
}
static inline bool eat_name(jparser *s, const char *name)
{
    bool yes = is_name(cur(s), name);
    s->at += yes;
    return yes;
}

/* ---- the parser, in core/jinja_expr.c and core/jinja_parse.c ------------------------------------- */

enum { JDEPTH = 100 }; /* of what is nested, and links of a chain */

ql_status ql_junexpected(jparser *s, const char *wanted); /* an error */
ql_status ql_jwant(jparser *s, int op);
ql_status ql_jnode_new(jparser *s, jkind kind, jnode **out);

ql_status ql_jparse_expr(jparser *s, jnode **out);
ql_status ql_jparse_plain(jparser *s, jnode **out);  /* without "if", which a loop has for itself */
ql_status ql_jparse_tuple(jparser *s, jnode **out);  /* a, b, c without parentheses is one too */
ql_status ql_jparse_filter(jparser *s, jnode **io);  /* behind '|' */

#endif
