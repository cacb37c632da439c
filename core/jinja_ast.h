/* Inside core/jinja*.c: memory, syntax tree, values. */
#ifndef QL_JINJA_AST_H
#define QL_JINJA_AST_H

#include "core/jinja.h"

#include <string.h>

/* Everything a template or a rendering allocates, freed at once. */
typedef struct jchunk jchunk;
typedef struct {
    jchunk *head;
    size_t total, limit;
} jarena;
void *ql_jalloc(jarena *a, size_t n); /* zeroed; NULL with the error set */
void ql_jarena_free(jarena *a);

typedef struct {
    const char *p;
    size_t n;
} jtext;
static inline bool jtext_is(jtext t, const char *z)
{
    return t.n == strlen(z) && memcmp(t.p, z, t.n) == 0;
}

typedef enum {
    /* statements */
    N_TEXT, N_OUTPUT, N_IF, N_FOR, N_SET, N_SETBLOCK, N_WITH, N_FILTERBLOCK, N_MACRO, N_BREAK, N_CONTINUE, N_GENERATION,
    /* expressions */
    N_STR, N_INT, N_FLOAT, N_BOOL, N_NONE, N_NAME, N_LIST, N_TUPLE, N_DICT, N_ATTR, N_ITEM, N_SLICE,
    N_CALL, N_FILTER, N_TEST, N_CAUGHT, N_BIN, N_AND, N_OR, N_NOT, N_NEG, N_COMPARE, N_COND,
} jkind;

/* Operators: one character, or two as first·256 + second; words by their initial. */
enum { OP_EQ = '=' << 8 | '=', OP_NE = '!' << 8 | '=', OP_LE = '<' << 8 | '=', OP_GE = '>' << 8 | '=',
       OP_POW = '*' << 8 | '*', OP_FLOOR = '/' << 8 | '/', OP_IN = 'i', OP_NOT_IN = 'n' };

/* One node. Lists (bodies, arguments, items) are chained by next.
 *   IF       a condition, b body, c else body          FOR   a targets, b iterable, c body, d else, e filter
 *   SET      a targets (NAME or ATTR), b value          SETBLOCK a target, b body, c filters of what it caught
 *   WITH     a SETs, b body                             FILTERBLOCK b body, c filters; their innermost value is a CAUGHT
 *   MACRO    text name, a parameters (NAME; a default), b body
 *   DICT     b pairs (each a key, b value)              ATTR  a, text    ITEM a[b]    SLICE a[b:c:d]
 *   CALL     a, b arguments (text = keyword, or empty; each wraps its value in a)
 *   FILTER   a, text, b arguments                       TEST  a, text, b arguments, op 1 = "is not"
 *   COMPARE  a, b chain (each op, a operand)            COND  a condition, b then, c else */
typedef struct jnode jnode;
struct jnode {
    jkind kind;
    int line, op;
    jtext text;
    int64_t i;
    double f;
    jnode *a, *b, *c, *d, *e, *next;
};

struct ql_jinja {
    jarena mem;
    jnode *body;
    bool generation;
};

/* ---- values ------------------------------------------------------------------------------------ */

/* Three more kinds of list: what range gives, what dict.keys() and the like give, and what filters such as select give,
 * whose items come once and which is always true. METHOD and FUNCTION: the name of something of Python's, without a call. */
typedef enum { V_UNDEFINED, V_NONE, V_BOOL, V_INT, V_FLOAT, V_STR, V_LIST, V_TUPLE, V_DICT, V_NAMESPACE,
               V_LOOP, V_MACRO, V_RANGE, V_VIEW, V_ITER, V_METHOD, V_FUNCTION } jtype;

typedef struct jvalue jvalue;
typedef struct {
    jvalue *v;
    size_t n, cap;
} jlist;
typedef struct {
    jtext *key;
    jvalue *v;
    size_t n, cap;
} jdict;
typedef struct {
    const jlist *items;
    size_t at;
} jloop;
struct jvalue {
    jtype type;
    union {
        bool b;
        int64_t i;
        double f;
        jtext s; /* V_STR; V_UNDEFINED: the name */
        jlist *list;
        jdict *dict;
        const jloop *loop;
        struct jmacro *macro;
    };
};

typedef struct jscope jscope;
struct jscope {
    jdict vars;
    jscope *up;
};

struct jmacro {
    const jnode *node;
    jscope *scope; /* where it was defined: what it sees */
};

/* A rendering under way. */
typedef struct {
    const ql_jinja *t;
    jarena mem;
    ql_str *out, *main;
    ql_jinja_span *span;
    void *user;
    jscope *scope;
    jvalue caught; /* what a block wrote, for its filters */
    int depth, line;
    int64_t steps;
} jrun;

/* "line N: …" of the node being run. */
ql_status ql_jfail(jrun *r, const char *fmt, ...) QL_PRINTF(2, 3);

static inline jvalue jv_none(void)
{
    return (jvalue){.type = V_NONE};
}
static inline jvalue jv_bool(bool b)
{
    return (jvalue){.type = V_BOOL, .b = b};
}
static inline jvalue jv_int(int64_t i)
{
    return (jvalue){.type = V_INT, .i = i};
}
static inline jvalue jv_str(const char *p, size_t n)
{
    return (jvalue){.type = V_STR, .s = {p, n}};
}

const char *ql_jtype_name(const jvalue *v); /* as Python calls it */
bool ql_jtruth(const jvalue *v);
bool ql_jequal(const jvalue *a, const jvalue *b);
ql_status ql_jlist_new(jrun *r, jvalue *out);
ql_status ql_jlist_add(jrun *r, jlist *l, jvalue v);
ql_status ql_jdict_new(jrun *r, jvalue *out);
jvalue *ql_jdict_find(const jdict *d, jtext key);
ql_status ql_jdict_set(jrun *r, jdict *d, jtext key, jvalue v);
ql_status ql_jfrom_json(jrun *r, const json_t *j, int depth, jvalue *out);
/* Python's str() and, inside containers or with repr, repr(). */
ql_status ql_jstring(jrun *r, const jvalue *v, bool repr, int depth, ql_str *out);
/* json.dumps; indent −1: one line. */
ql_status ql_jdump(jrun *r, const jvalue *v, int indent, int depth, ql_str *out);
/* A finished buffer as a string value; frees the buffer. */
ql_status ql_jtake(jrun *r, ql_str *s, jvalue *out);
/* The items of whatever has some: of a string its characters, of a dict its keys, of undefined none. They are what is left of a
 * V_ITER, which has none then. */
ql_status ql_jitems(jrun *r, const jvalue *v, jlist **out);
/* True for what holds a jlist. */
bool ql_jis_list(const jvalue *v);
/* How many elements, −1: it has no length. */
int64_t ql_jlength(const jvalue *v);
size_t ql_jchars(jtext s);                          /* code points */
jtext ql_jsubstr(jtext s, size_t from, size_t to);  /* in code points */
jtext ql_jstrip(jtext s, const jtext *chars, int sides); /* 1 left, 2 right; chars NULL: white space */

/* Arguments of a call, evaluated. */
typedef struct {
    jvalue pos[8];
    int n;
    jtext kw[8];
    jvalue kwv[8];
    int n_kw;
} jargs;
/* Argument i, or the one of that keyword; NULL where it was not given. */
const jvalue *ql_jarg(const jargs *a, int i, const char *keyword);

const jtext *ql_jtext_arg(const jargs *a, int i, const char *keyword); /* NULL also where it is no string */
int64_t ql_jint_arg(const jargs *a, int i, const char *keyword);       /* -1: not given, or no integer */

/* Strings. TITLE is str.title; WORDS what the filter makes of it: capitals behind white space and brackets. */
typedef enum { J_UPPER, J_LOWER, J_CAPITALIZE, J_TITLE, J_WORDS } jcasing;
ql_status ql_jcase(jrun *r, jtext s, jcasing how, jvalue *out);
ql_status ql_jreplace(jrun *r, jtext s, jtext from, jtext to, int64_t count, jvalue *out);
ql_status ql_jjoin(jrun *r, jtext sep, const jlist *l, jvalue *out);
typedef enum { J_KEYS, J_VALUES, J_ITEMS } jdict_part;
ql_status ql_jdict_items(jrun *r, const jdict *d, jdict_part what, jvalue *out); /* a list */

bool ql_jfilter_known(jtext name);
bool ql_jtest_known(jtext name);
ql_status ql_jfilter(jrun *r, jtext name, const jvalue *v, const jargs *a, jvalue *out);
ql_status ql_jtest(jrun *r, jtext name, const jvalue *v, const jargs *a, bool *out);
/* v.name(…) of a string or dict; *known false where there is no such method. */
ql_status ql_jmethod(jrun *r, const jvalue *v, jtext name, const jargs *a, jvalue *out, bool *known);
bool ql_jhas_method(const jvalue *v, jtext name);
ql_status ql_jattr(jrun *r, const jvalue *v, jtext name, jvalue *out);             /* v.name */
ql_status ql_jitem(jrun *r, const jvalue *v, const jvalue *key, jvalue *out);      /* v[key] */
ql_status ql_jbinary(jrun *r, int op, const jvalue *a, const jvalue *b, jvalue *out);
ql_status ql_jcompare(jrun *r, int op, const jvalue *a, const jvalue *b, bool *out);

#endif
