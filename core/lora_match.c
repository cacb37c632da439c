#define PCRE2_CODE_UNIT_WIDTH 8
#include "core/lora_match.h"

#include <pcre2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Backtracking steps a pattern may take per path: a bad regex must not hang. */
enum { MATCH_LIMIT = 200000, PATTERN_MAX = 4096 };

struct ql_matcher {
    const ql_lora_config *c;
    pcre2_match_context *limits;
    pcre2_match_data *data;
    pcre2_code *target, *exclude;
    pcre2_code **layers, **ranks, **alphas;
    unsigned char *used; /* by entry of target.names */
    int groups;          /* of the last match: the highest group that took part, plus 1 */
};

static ql_status compile(const char *what, const char *pattern, uint32_t options, pcre2_code **out)
{
    int err = 0;
    PCRE2_SIZE at = 0;
    pcre2_code *code = NULL;
    if (strlen(pattern) > PATTERN_MAX)
        QL_FAIL(QL_EINVAL, "%s: a pattern of %zu bytes; at most %d are accepted", what,
                strlen(pattern), PATTERN_MAX);
    code = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, options | PCRE2_UTF, &err, &at,
                         NULL);
    if (!code) {
        char text[200];
        pcre2_get_error_message(err, (PCRE2_UCHAR *)text, sizeof text);
        QL_FAIL(QL_EINVAL, "%s: bad pattern '%.200s' at %zu: %s", what, pattern, (size_t)at, text);
    }
    *out = code;
    return QL_OK;
}

static ql_status matches(ql_matcher *m, const pcre2_code *code, const char *what,
                         const char *pattern, const char *path, bool *out)
{
    int rc = pcre2_match(code, (PCRE2_SPTR)path, PCRE2_ZERO_TERMINATED, 0, 0, m->data, m->limits);
    if (rc < 0 && rc != PCRE2_ERROR_NOMATCH)
        QL_FAIL(QL_EINVAL, "%s: the pattern '%.200s' takes too long on '%s'", what, pattern, path);
    *out = rc >= 0;
    m->groups = rc;
    return QL_OK;
}

static ql_status compile_patterns(const char *what, const ql_pattern *p, int n, pcre2_code ***out)
{
    char full[PATTERN_MAX + 32];
    *out = calloc((size_t)n + 1, sizeof **out);
    if (!*out) QL_FAIL(QL_ENOMEM, "no memory for %s", what);
    for (int i = 0; i < n; i++) {
        if (snprintf(full, sizeof full, "(.*\\.)?(%s)$", p[i].key) >= (int)sizeof full)
            QL_FAIL(QL_EINVAL, "%s: a pattern of %zu bytes", what, strlen(p[i].key));
        QL_TRY(compile(what, full, PCRE2_ANCHORED, &(*out)[i]));
    }
    return QL_OK;
}

/* PEFT takes the first number behind a segment; with layers_pattern, behind that segment. */
static ql_status compile_layers(ql_matcher *m)
{
    const ql_lora_config *c = m->c;
    char full[PATTERN_MAX + 64];
    m->layers = calloc((size_t)c->layer_pattern_count + 1, sizeof *m->layers);
    if (!m->layers) QL_FAIL(QL_ENOMEM, "no memory for layers_pattern");
    if (c->layer_pattern_count == 0)
        return compile("layers_pattern", ".*?\\.[^.]*\\.(\\d+)\\.", PCRE2_ANCHORED, &m->layers[0]);
    for (int i = 0; i < c->layer_pattern_count; i++) {
        if (snprintf(full, sizeof full, "(?:^|.*?\\.)%s\\.(?<idx>\\d+)\\.", c->layer_patterns[i]) >=
            (int)sizeof full)
            QL_FAIL(QL_EINVAL, "layers_pattern: a pattern of %zu bytes",
                    strlen(c->layer_patterns[i]));
        QL_TRY(compile("layers_pattern", full, PCRE2_ANCHORED, &m->layers[i]));
    }
    return QL_OK;
}

static ql_status compile_all(ql_matcher *m)
{
    const ql_lora_config *c = m->c;
    const uint32_t whole = PCRE2_ANCHORED | PCRE2_ENDANCHORED;
    if (c->target.regex) QL_TRY(compile("target_modules", c->target.regex, whole, &m->target));
    if (c->exclude.regex) QL_TRY(compile("exclude_modules", c->exclude.regex, whole, &m->exclude));
    QL_TRY(compile_layers(m));
    QL_TRY(compile_patterns("rank_pattern", c->ranks, c->rank_count, &m->ranks));
    return compile_patterns("alpha_pattern", c->alphas, c->alpha_count, &m->alphas);
}

ql_status ql_matcher_make(const ql_lora_config *c, ql_matcher **out)
{
    ql_status st = QL_OK;
    ql_matcher *m = calloc(1, sizeof *m);
    if (!m) QL_FAIL(QL_ENOMEM, "no memory for target_modules");
    m->c = c;
    m->limits = pcre2_match_context_create(NULL);
    m->data = pcre2_match_data_create(64, NULL);
    m->used = calloc((size_t)c->target.count + 1, 1);
    if (!m->limits || !m->data || !m->used) {
        st = ql_fail(QL_ENOMEM, "no memory for target_modules");
        goto out;
    }
    pcre2_set_match_limit(m->limits, MATCH_LIMIT);
    pcre2_set_heap_limit(m->limits, 16384);
    QL_GO(compile_all(m));
    *out = m;
    m = NULL;
out:
    ql_matcher_close(m);
    return st;
}

static void free_codes(pcre2_code **codes, int n)
{
    for (int i = 0; codes && i < n; i++) pcre2_code_free(codes[i]);
    free(codes);
}

void ql_matcher_close(ql_matcher *m)
{
    if (!m) return;
    pcre2_code_free(m->target);
    pcre2_code_free(m->exclude);
    free_codes(m->layers, m->c->layer_pattern_count ? m->c->layer_pattern_count : 1);
    free_codes(m->ranks, m->c->rank_count);
    free_codes(m->alphas, m->c->alpha_count);
    pcre2_match_context_free(m->limits);
    pcre2_match_data_free(m->data);
    free(m->used);
    free(m);
}

typedef enum { NO, SUFFIX, EXACT } how;

/* path equals the entry, or ends with "." + entry. */
static how list_entry(const char *entry, const char *path)
{
    size_t n = strlen(path), k = strlen(entry);
    if (strcmp(path, entry) == 0) return EXACT;
    return n > k && path[n - k - 1] == '.' && strcmp(path + n - k, entry) == 0 ? SUFFIX : NO;
}

static how in_list(char *const *names, int count, const char *path, unsigned char *used)
{
    how best = NO;
    for (int i = 0; i < count; i++) {
        how h = list_entry(names[i], path);
        if (h != NO && used) used[i] = 1;
        if (h > best) best = h;
    }
    return best;
}

/* Is the path's layer one of layers_to_transform? */
static ql_status layer_chosen(ql_matcher *m, const char *path, bool *out)
{
    const ql_lora_config *c = m->c;
    int n = c->layer_pattern_count ? c->layer_pattern_count : 1;
    bool hit = false;
    for (int i = 0; i < n && !hit; i++)
        QL_TRY(matches(m, m->layers[i], "layers_pattern",
                       n && c->layer_patterns ? c->layer_patterns[i] : "", path, &hit));
    *out = false;
    if (!hit) return QL_OK;
    /* The number is the pattern's last group, and it always takes part. */
    if (m->groups < 2) QL_FAIL(QL_EINVAL, "layers_pattern: a pattern with too many groups");
    const PCRE2_SIZE *ov = pcre2_get_ovector_pointer(m->data);
    int64_t layer = strtoll(path + ov[2 * (m->groups - 1)], NULL, 10);
    for (int i = 0; i < c->layer_count; i++) *out |= c->layers[i] == layer;
    return QL_OK;
}

static ql_status excluded(ql_matcher *m, const char *path, bool *out)
{
    const ql_module_set *e = &m->c->exclude;
    if (e->regex) return matches(m, m->exclude, "exclude_modules", e->regex, path, out);
    *out = in_list(e->names, e->count, path, NULL) != NO;
    return QL_OK;
}

ql_status ql_matcher_selects(ql_matcher *m, const char *path, bool *out)
{
    const ql_lora_config *c = m->c;
    bool no = false;
    *out = false;
    how h = c->target.all_linear ? SUFFIX : in_list(c->target.names, c->target.count, path, m->used);
    QL_TRY(excluded(m, path, &no));
    if (no) return QL_OK;
    if (c->target.regex) return matches(m, m->target, "target_modules", c->target.regex, path, out);
    *out = h != NO;
    /* A full path in the list is taken whatever layers_to_transform says, as PEFT does. */
    if (h == SUFFIX && c->layer_count) return layer_chosen(m, path, out);
    return QL_OK;
}

static ql_status pattern_value(ql_matcher *m, pcre2_code *const *codes, const ql_pattern *p, int n,
                               const char *what, const char *path, double *value)
{
    for (int i = 0; i < n; i++) {
        bool hit = false;
        QL_TRY(matches(m, codes[i], what, p[i].key, path, &hit));
        if (!hit) continue;
        *value = p[i].value;
        return QL_OK;
    }
    return QL_OK;
}

ql_status ql_matcher_rank(ql_matcher *m, const char *path, int64_t *r)
{
    double value = (double)m->c->r;
    QL_TRY(pattern_value(m, m->ranks, m->c->ranks, m->c->rank_count, "rank_pattern", path, &value));
    *r = (int64_t)value;
    return QL_OK;
}

ql_status ql_matcher_alpha(ql_matcher *m, const char *path, double *alpha)
{
    *alpha = m->c->alpha;
    return pattern_value(m, m->alphas, m->c->alphas, m->c->alpha_count, "alpha_pattern", path,
                         alpha);
}

const char *ql_matcher_unused(const ql_matcher *m)
{
    for (int i = 0; i < m->c->target.count; i++)
        if (!m->used[i]) return m->c->target.names[i];
    return NULL;
}
