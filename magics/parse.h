/* The text of a cell, taken apart. Syntax only: what the words mean is verbs.c's business.
 *
 *   load "my model" --dtype nf4 --seed=7   # a comment
 *   train --max_steps 200;                 a trailing ; silences
 *
 * Words are split at blanks. "…" knows \" \\ \n \t, '…' is literal, and a word that opens with [ or
 * { runs to its own closing bracket, so that a JSON list needs no quoting. A {name} that IPython
 * has not expanded is an error that names it.
 *
 * The body of %%qlora config is `key: value` lines (comments, sections by indentation, `- item`
 * lists) or JSON when it starts with {. */
#ifndef QL_PARSE_H
#define QL_PARSE_H

#include "core/qlora.h"

typedef struct {
    char *text;
    int column; /* 1-based, where the word starts */
    int quoted; /* some part was quoted: then it is never an option */
    int equals; /* offset in text of the first unquoted '=', -1: none */
} ql_word;

typedef struct {
    ql_word *words;
    int n;
    int silent;
    char *raw; /* the line without its comment and ';' */
} ql_line;

ql_status ql_line_parse(const char *line, ql_line *out);
void ql_line_free(ql_line *line);

typedef struct {
    char *key;     /* NULL: an item of a list */
    char *text;    /* the value as text; "" for a section */
    json_t *value; /* JSON bodies and quoted values; NULL otherwise */
    int line;      /* 1-based */
    int parent;    /* index of the section it stands in, -1: none */
    int children;  /* how many entries name this one as their parent */
} ql_entry;

typedef struct {
    ql_entry *entries;
    int n;
} ql_body;

ql_status ql_body_parse(const char *text, ql_body *out);
void ql_body_free(ql_body *body);
/* The value of entry i as JSON: its own, its children as an object or a list, or its text read as
 * JSON where it is that (numbers, true, false, null) and as a string otherwise. A new reference. */
ql_status ql_body_value(const ql_body *body, int i, json_t **out);

#endif
