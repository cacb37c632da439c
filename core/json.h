/* Small helpers over jansson: files with limits, and typed getters that name file, key and value.
 * Duplicate keys, NUL in strings, invalid UTF-8, NaN and nesting deeper than 100 are refused. */
#ifndef QL_JSON_H
#define QL_JSON_H

#include "kernels/base.h"

#include <jansson.h>

/* `what` names the source in messages ("config.json"); the result is an object. */
ql_status ql_json_parse(const char *text, size_t n, const char *what, json_t **out) QL_MUST_USE;
/* At most max bytes; messages name the file without its folder. */
ql_status ql_json_load(const char *path, int64_t max, json_t **out) QL_MUST_USE;
/* Atomic (core/file.h), indent 2, keys in their order (the first pattern of a rank_pattern holds),
 * newline at the end. */
ql_status ql_json_save(const char *path, const json_t *v) QL_MUST_USE;

/* Required values: "config.json: 'hidden_size' must be an integer from 1 to 65536, found -3". */
ql_status ql_json_int(const json_t *o, const char *what, const char *key, int64_t lo, int64_t hi,
                      int64_t *out) QL_MUST_USE;
ql_status ql_json_num(const json_t *o, const char *what, const char *key, double lo, double hi,
                      double *out) QL_MUST_USE;
ql_status ql_json_bool(const json_t *o, const char *what, const char *key, bool *out) QL_MUST_USE;
/* *out stays valid as long as o. */
ql_status ql_json_str(const json_t *o, const char *what, const char *key, const char **out)
    QL_MUST_USE;

/* Optional values: *out keeps what it holds where the key is absent or null. */
ql_status ql_json_opt_int(const json_t *o, const char *what, const char *key, int64_t lo,
                          int64_t hi, int64_t *out) QL_MUST_USE;
ql_status ql_json_opt_num(const json_t *o, const char *what, const char *key, double lo, double hi,
                          double *out) QL_MUST_USE;
ql_status ql_json_opt_bool(const json_t *o, const char *what, const char *key, bool *out)
    QL_MUST_USE;
ql_status ql_json_opt_str(const json_t *o, const char *what, const char *key, const char **out)
    QL_MUST_USE;

/* The value as a person would type it, cut at about 60 bytes: for messages. Static per thread. */
const char *ql_json_show(const json_t *v);

#endif
