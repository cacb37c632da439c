#include "core/json.h"

#include "core/file.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEPTH_MAX = 100 };

/* Nesting is checked on the text, so that no parser recurses on behalf of a hostile file. */
static bool too_deep(const char *s, size_t n)
{
    int depth = 0;
    bool in_string = false;
    for (size_t i = 0; i < n; i++) {
        char c = s[i];
        if (in_string) {
            if (c == '\\')
                i++;
            else if (c == '"')
                in_string = false;
        } else if (c == '"') {
            in_string = true;
        } else if (c == '[' || c == '{') {
            if (++depth > DEPTH_MAX) return true;
        } else if (c == ']' || c == '}') {
            depth--;
        }
    }
    return false;
}

ql_status ql_json_parse(const char *text, size_t n, const char *what, json_t **out)
{
    json_error_t e;
    if (too_deep(text, n))
        QL_FAIL(QL_EINVAL, "%s: JSON nested deeper than %d levels", what, DEPTH_MAX);
    json_t *v = json_loadb(text, n, JSON_REJECT_DUPLICATES, &e);
    if (!v)
        QL_FAIL(QL_EINVAL, "%s: bad JSON at line %d, column %d: %s", what, e.line, e.column,
                e.text);
    if (!json_is_object(v)) {
        json_decref(v);
        QL_FAIL(QL_EINVAL, "%s: must be a JSON object", what);
    }
    *out = v;
    return QL_OK;
}

ql_status ql_json_load(const char *path, int64_t max, json_t **out)
{
    char *text = NULL;
    size_t n = 0;
    const char *slash = strrchr(path, '/');
    QL_TRY(ql_file_read(path, max, &text, &n));
    ql_status st = ql_json_parse(text, n, slash ? slash + 1 : path, out);
    free(text);
    return st;
}

ql_status ql_json_save(const char *path, const json_t *v)
{
    char *text = json_dumps(v, JSON_INDENT(2));
    if (!text) QL_FAIL(QL_ENOMEM, "cannot encode %s as JSON", path);
    size_t n = strlen(text);
    text[n] = '\n'; /* in place of the NUL: n + 1 bytes are written */
    ql_status st = ql_file_save(path, text, n + 1);
    free(text);
    return st;
}

const char *ql_json_show(const json_t *v)
{
    static _Thread_local char buf[64];
    char *s = v ? json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(12)) : NULL;
    int n = snprintf(buf, sizeof buf, "%s", s ? s : "nothing");
    if (n >= (int)sizeof buf) {
        /* Cut before a whole UTF-8 character. */
        size_t cut = sizeof buf - 4;
        while (cut > 0 && ((unsigned char)buf[cut] & 0xc0) == 0x80) cut--;
        memcpy(buf + cut, "...", 4);
    }
    free(s);
    return buf;
}

static bool given(const json_t *o, const char *key)
{
    const json_t *v = json_object_get(o, key);
    return v && !json_is_null(v);
}

ql_status ql_json_int(const json_t *o, const char *what, const char *key, int64_t lo, int64_t hi,
                      int64_t *out)
{
    const json_t *v = json_object_get(o, key);
    int64_t x = json_integer_value(v);
    /* Python writes some whole numbers as 1.0. */
    if (json_is_real(v)) {
        double d = json_real_value(v);
        if (d == floor(d) && fabs(d) < 0x1p53)
            x = (int64_t)d;
        else
            v = json_false();
    }
    if (!json_is_number(v) || x < lo || x > hi)
        QL_FAIL(QL_EINVAL, "%s: '%s' must be an integer from %lld to %lld, found %s", what, key,
                (long long)lo, (long long)hi, ql_json_show(json_object_get(o, key)));
    *out = x;
    return QL_OK;
}

ql_status ql_json_num(const json_t *o, const char *what, const char *key, double lo, double hi,
                      double *out)
{
    const json_t *v = json_object_get(o, key);
    double x = json_number_value(v);
    if (!json_is_number(v) || !(x >= lo && x <= hi))
        QL_FAIL(QL_EINVAL, "%s: '%s' must be a number from %g to %g, found %s", what, key, lo, hi,
                ql_json_show(v));
    *out = x;
    return QL_OK;
}

ql_status ql_json_bool(const json_t *o, const char *what, const char *key, bool *out)
{
    const json_t *v = json_object_get(o, key);
    if (!json_is_boolean(v))
        QL_FAIL(QL_EINVAL, "%s: '%s' must be true or false, found %s", what, key, ql_json_show(v));
    *out = json_is_true(v);
    return QL_OK;
}

ql_status ql_json_str(const json_t *o, const char *what, const char *key, const char **out)
{
    const json_t *v = json_object_get(o, key);
    if (!json_is_string(v))
        QL_FAIL(QL_EINVAL, "%s: '%s' must be a string, found %s", what, key, ql_json_show(v));
    *out = json_string_value(v);
    return QL_OK;
}

ql_status ql_json_opt_int(const json_t *o, const char *what, const char *key, int64_t lo,
                          int64_t hi, int64_t *out)
{
    return given(o, key) ? ql_json_int(o, what, key, lo, hi, out) : QL_OK;
}

ql_status ql_json_opt_num(const json_t *o, const char *what, const char *key, double lo, double hi,
                          double *out)
{
    return given(o, key) ? ql_json_num(o, what, key, lo, hi, out) : QL_OK;
}

ql_status ql_json_opt_bool(const json_t *o, const char *what, const char *key, bool *out)
{
    return given(o, key) ? ql_json_bool(o, what, key, out) : QL_OK;
}

ql_status ql_json_opt_str(const json_t *o, const char *what, const char *key, const char **out)
{
    return given(o, key) ? ql_json_str(o, what, key, out) : QL_OK;
}
