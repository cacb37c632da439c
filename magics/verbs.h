/* The table of verbs. Parsing, help, `?` and completion read it; a verb exists nowhere else. */
#ifndef QL_VERBS_H
#define QL_VERBS_H

#include "magics/magics.h"
#include "magics/parse.h"

/* What an argument or an option's value is, for checks and completion. */
typedef enum {
    QL_ARG_NONE,
    QL_ARG_TEXT,
    QL_ARG_INT,
    QL_ARG_FLOAT,
    QL_ARG_FLAG,
    QL_ARG_CHOICE,
    QL_ARG_PATH,
    QL_ARG_RUN,
    QL_ARG_MODEL,
    QL_ARG_DATA,
    QL_ARG_VERB
} ql_arg;

typedef struct {
    const char *name;
    ql_arg type;
    const char *def;     /* shown in help; NULL: none */
    const char *choices; /* QL_ARG_CHOICE: "a|b" */
    const char *help;
} ql_option;

typedef enum { QL_BODY_NONE, QL_BODY_SETTINGS, QL_BODY_TEXT } ql_body_kind;
/* Settings that a verb takes as options: none, kept for what follows, or for this call alone. */
typedef enum { QL_TAKES_NONE, QL_TAKES_KEPT, QL_TAKES_ONCE } ql_takes;

typedef struct ql_call ql_call;

typedef struct {
    const char *name;
    const char *args; /* as in the usage line: "MODEL", "[RUN …]" */
    ql_arg arg;
    int min_args, max_args; /* max < 0: any number */
    ql_body_kind body;
    ql_takes takes;
    const ql_option *options; /* ends with a NULL name; may be NULL */
    ql_status (*run)(ql_magics *m, const ql_call *call, json_t **out);
    const char *help;     /* one line */
    const char *more;     /* a paragraph, or NULL */
    const char *examples; /* lines */
} ql_verb;

/* One call, taken apart by its verb's options. */
struct ql_call {
    const ql_verb *verb;
    ql_line line;
    const char **args; /* point into line */
    int n_args;
    json_t *options;  /* verb options given: name → string, number or true/false */
    json_t *settings; /* array of {"name", "text" or "value", "where"} in the order given */
    const char *body; /* QL_BODY_TEXT; NULL: none */
};

const ql_verb *ql_verbs(int *n);
const ql_verb *ql_verb_find(const char *name);
const ql_option *ql_option_find(const ql_verb *verb, const char *name);

ql_status ql_call_bind(const char *line, const char *body, ql_call *out);
void ql_call_free(ql_call *call);

/* Options of a call, with what stands where it was not given. */
int64_t ql_call_int(const ql_call *c, const char *name, int64_t def);
double ql_call_float(const ql_call *c, const char *name, double def);
int ql_call_flag(const ql_call *c, const char *name);
const char *ql_call_str(const ql_call *c, const char *name, const char *def);

/* Sets the call's settings on a job; errors say where they stood. */
ql_status ql_call_apply(const ql_call *c, ql_job *job);

/* "did you mean 'train'?" or "" . names: n names, get(i). */
const char *ql_verb_nearest(const char *word, const char *const *names, int n, char *buf,
                            size_t size);

#endif
