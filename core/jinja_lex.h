/* Between core/jinja_lex.c and core/jinja_parse.c. */
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
    int depth;
    bool generation;
} jparser;

#define FAIL_AT(line, code, fmt, ...) return ql_fail(code, "line %d: " fmt, line, __VA_ARGS__)

/* Fills tok (the caller frees it) with the tokens of p … end; the last one is T_END. */
ql_status ql_jlex(jparser *s);

#endif
