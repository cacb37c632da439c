/* PEFT's rules for choosing modules, on module paths ("model.layers.0.self_attn.q_proj"). */
#ifndef QL_LORA_MATCH_H
#define QL_LORA_MATCH_H

#include "core/lora.h"

typedef struct ql_matcher ql_matcher;

/* Compiles all patterns of c, which must outlive it. */
ql_status ql_matcher_make(const ql_lora_config *c, ql_matcher **out) QL_MUST_USE;
void ql_matcher_close(ql_matcher *m);

/* target_modules, layers_to_transform and exclude_modules. `all-linear` is the caller's to widen:
 * here it matches everything. */
ql_status ql_matcher_selects(ql_matcher *m, const char *path, bool *out) QL_MUST_USE;
/* rank_pattern's and alpha_pattern's value for the path, else c's own. */
ql_status ql_matcher_rank(ql_matcher *m, const char *path, int64_t *r) QL_MUST_USE;
ql_status ql_matcher_alpha(ql_matcher *m, const char *path, double *alpha) QL_MUST_USE;
/* The first entry of the target list that has matched no path so far; NULL: none. */
const char *ql_matcher_unused(const ql_matcher *m);

#endif
