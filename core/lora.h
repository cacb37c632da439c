/* LoRA adapters: PEFT's settings and rules, the table of adapter tensors in one flat fp32 buffer,
 * and PEFT's files. */
#ifndef QL_LORA_H
#define QL_LORA_H

#include "core/model.h"
#include "kernels/base.h"

#include <jansson.h>

/* Adapter tensors are padded to this many elements, and optimizer shards are cut only there. */
enum { QL_LORA_PAD = 4096 };

typedef enum { QL_INIT_KAIMING, QL_INIT_GAUSSIAN, QL_INIT_RANDOM } ql_lora_init_kind;

/* target_modules and exclude_modules: a list of names, or one pattern. */
typedef struct {
    char **names; /* list form; NULL: none */
    int count;
    char *regex; /* string form, matched against the whole module path */
    bool all_linear;
} ql_module_set;

typedef struct {
    char *key; /* a regex for the end of the module path */
    double value;
} ql_pattern;

/* The settings of PEFT's LoraConfig that the engine honours. */
typedef struct {
    int64_t r;
    double alpha, dropout;
    bool rslora;
    ql_lora_init_kind init;
    ql_module_set target, exclude;
    int64_t *layers; /* layers_to_transform; NULL: all */
    int layer_count;
    char **layer_patterns; /* layers_pattern */
    int layer_pattern_count;
    ql_pattern *ranks, *alphas; /* rank_pattern, alpha_pattern, in the order given */
    int rank_count, alpha_count;
    char *base; /* base_model_name_or_path; may be NULL */
    bool saved; /* read from an adapter's folder: names that match nothing are let pass, as PEFT
                   does */
} ql_lora_config;

/* From an object with PEFT's keys: adapter_config.json, or the settings of a job. Absent keys have
 * PEFT's defaults; target_modules absent means PEFT's choice for these families, q_proj and v_proj.
 * What the engine does not do (DoRA, modules_to_save, bias, …) is refused by name. */
ql_status ql_lora_config_parse(const json_t *o, const char *what, ql_lora_config *out) QL_MUST_USE;
void ql_lora_config_free(ql_lora_config *c);
/* adapter_config.json's object, target_modules as suffixes. New reference. */
json_t *ql_lora_config_json(const ql_lora_config *c);

/* One adapted linear. y += scale · B (A x): A (r, K) and B (N, r), row-major, at their offsets of
 * the flat buffer; what lies between len and the padded length is zero and stays so. */
typedef struct {
    int64_t layer;
    ql_linear linear;
    int64_t n, k, r;
    float scale;
    double alpha;
    int64_t a, a_len; /* offset; padded length (elements); A itself is r · K */
    int64_t b, b_len;
} ql_lora_target;

typedef struct {
    ql_lora_config cfg;
    ql_lora_target *target; /* by layer, then linear */
    int64_t count;
    int32_t *index; /* (layers, QL_LINEARS): target's number or -1 */
    int64_t layers;
    int64_t elements; /* of the flat buffer, padding included; a multiple of QL_LORA_PAD */
    int64_t params;   /* without padding: trainable parameters */
} ql_lora;

/* Takes over *c (zeroed), on failure too. Fails when nothing is targeted, naming what there is. */
ql_status ql_lora_build(const ql_config *m, ql_lora_config *c, ql_lora **out) QL_MUST_USE;
void ql_lora_close(ql_lora *l);
/* NULL: this linear has no adapter. */
const ql_lora_target *ql_lora_find(const ql_lora *l, int64_t layer, ql_linear w);

/* Fresh values into flat (l->elements). Each value depends on (seed, tensor, index) alone. */
void ql_lora_init(const ql_lora *l, uint64_t seed, float *flat);

/* PEFT's line "trainable params: … || all params: … || trainable%: …". */
void ql_lora_summary(const ql_lora *l, const ql_config *m, char *out, size_t size);

/* adapter_config.json, adapter_model.safetensors (dtype F32, F16 or BF16) and README.md. */
ql_status ql_lora_save(const ql_lora *l, const float *flat, ql_dtype dtype,
                       const char *folder) QL_MUST_USE;
/* The adapter of a PEFT folder for this model: its table, then its values into flat
 * (l->elements). Missing, extra and misspelt keys are errors that name them. */
ql_status ql_lora_open(const char *folder, const ql_config *m, ql_lora **out) QL_MUST_USE;
ql_status ql_lora_read(const ql_lora *l, const char *folder, float *flat) QL_MUST_USE;

#endif
