/* JSON as Python writes it: json.dumps(v, indent=2, sort_keys=True) + "\n". */
#include "core/history.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    char *p;
    size_t n, room;
    bool bad; /* out of memory */
} text;

static void add(text *t, const char *s, size_t n)
{
    if (t->bad) return;
    if (t->n + n + 1 > t->room) {
        size_t room = 2 * (t->room + n) + 256;
        char *p = realloc(t->p, room);
        if (!p) {
            t->bad = true;
            return;
        }
        t->p = p, t->room = room;
    }
    memcpy(t->p + t->n, s, n);
    t->n += n;
    t->p[t->n] = 0;
}

static void add_text(text *t, const char *s)
{
    add(t, s, strlen(s));
}

/* repr(float): the fewest digits that read back as x; an exponent below 1e-4 and from 1e16 on. */
static void add_real(text *t, double x)
{
    char e[40], out[64];
    int digits = 1, exponent;
    do snprintf(e, sizeof e, "%.*e", digits - 1, x);
    while (strtod(e, NULL) != x && digits++ < 17);
    exponent = (int)strtol(strchr(e, 'e') + 1, NULL, 10);
    if (x == 0) {
        snprintf(out, sizeof out, "%s", signbit(x) ? "-0.0" : "0.0");
    } else if (exponent < -4 || exponent >= 16) {
        snprintf(out, sizeof out, "%s", e);
    } else {
        int decimals = digits - 1 - exponent;
        snprintf(out, sizeof out, "%.*f", decimals > 1 ? decimals : 1, x);
    }
    add_text(t, out);
}

static void indent(text *t, int depth)
{
    add(t, "\n", 1);
    for (int i = 0; i < depth; i++) add(t, "  ", 2);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static void add_value(text *t, const json_t *v, int depth);

static void add_string(text *t, const char *s)
{
    json_t *v = json_string_nocheck(s);
    char *quoted = v ? json_dumps(v, JSON_ENCODE_ANY | JSON_ENSURE_ASCII) : NULL;
    json_decref(v);
    t->bad |= !quoted;
    for (char *p = quoted; p && (p = strchr(p, '\\')); p += 2) /* Python's hexadecimal digits are small */
        for (int i = 2; p[1] == 'u' && i < 6; i++) p[i] = (char)tolower((unsigned char)p[i]);
    if (quoted) add_text(t, quoted);
    free(quoted);
}

static void add_object(text *t, const json_t *v, int depth)
{
    size_t n = json_object_size(v), i = 0;
    const char **keys = malloc((n + 1) * sizeof *keys), *key;
    json_t *e;
    if (!keys) {
        t->bad = true;
        return;
    }
    json_object_foreach((json_t *)v, key, e) keys[i++] = key;
    qsort(keys, n, sizeof *keys, by_name);
    add(t, "{", 1);
    for (i = 0; i < n; i++) {
        if (i) add(t, ",", 1);
        indent(t, depth + 1);
        add_string(t, keys[i]);
        add(t, ": ", 2);
        add_value(t, json_object_get(v, keys[i]), depth + 1);
    }
    if (n) indent(t, depth);
    add(t, "}", 1);
    free(keys);
}

static void add_array(text *t, const json_t *v, int depth)
{
    json_t *e;
    size_t i;
    add(t, "[", 1);
    json_array_foreach((json_t *)v, i, e) {
        if (i) add(t, ",", 1);
        indent(t, depth + 1);
        add_value(t, e, depth + 1);
    }
    if (json_array_size(v)) indent(t, depth);
    add(t, "]", 1);
}

static void add_value(text *t, const json_t *v, int depth)
{
    char number[32];
    switch (json_typeof(v)) {
    case JSON_OBJECT: add_object(t, v, depth); break;
    case JSON_ARRAY: add_array(t, v, depth); break;
    case JSON_STRING: add_string(t, json_string_value(v)); break;
    case JSON_INTEGER:
        snprintf(number, sizeof number, "%" JSON_INTEGER_FORMAT, json_integer_value(v));
        add_text(t, number);
        break;
    case JSON_REAL: add_real(t, json_real_value(v)); break;
    case JSON_TRUE: add_text(t, "true"); break;
    case JSON_FALSE: add_text(t, "false"); break;
    case JSON_NULL: add_text(t, "null"); break;
    }
}

char *ql_json_python(const json_t *v)
{
    text t = {0};
    add_value(&t, v, 0);
    add(&t, "\n", 1);
    if (!t.bad) return t.p;
    free(t.p);
    return NULL;
}
