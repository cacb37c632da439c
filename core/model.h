/* config.json → ql_config; a model folder → a table of tensors that lie in the mapped files. Reads
 * headers only: opening a 70B folder touches no page of its weights. */
#ifndef QL_MODEL_H
#define QL_MODEL_H

#include "core/safetensors.h"
#include "kernels/base.h"

#include <jansson.h>

typedef enum { QL_LLAMA, QL_MISTRAL, QL_QWEN2, QL_QWEN3, QL_ARCHS } ql_arch;
typedef enum { QL_ROPE_DEFAULT, QL_ROPE_LINEAR, QL_ROPE_LLAMA3, QL_ROPE_YARN } ql_rope_type;

typedef struct {
    ql_rope_type type;
    double theta;
    double factor;                      /* linear, llama3, yarn */
    double low_freq, high_freq;         /* llama3: low_freq_factor, high_freq_factor */
    double beta_fast, beta_slow;        /* yarn */
    bool truncate;                      /* yarn: the ramp's ends are whole numbers */
    int64_t original;                   /* llama3, yarn: original_max_position_embeddings */
    double attention_scaling;           /* multiplies cos and sin; 1 except yarn */
} ql_rope_config;

/* quantization_config of a folder (bitsandbytes, 4 bits). The tensors themselves decide what is
 * quantised; this says what to expect and which modules stay as they are. */
typedef struct {
    bool present;
    bool fp4;             /* else nf4 */
    bool nested;          /* bnb_4bit_use_double_quant */
    char **skip;          /* llm_int8_skip_modules */
    int skips;
} ql_quant_config;

typedef struct {
    ql_arch arch;
    int64_t hidden, layers, heads, kv_heads, head_dim, ffn, vocab; /* C, L, H, KV, D, F, V */
    double eps;                  /* of every RMSNorm */
    bool tied;                   /* head = embedding */
    bool qkv_bias, o_bias, mlp_bias;
    bool qk_norm;                /* per-head RMSNorm of q and k before RoPE */
    int64_t window;              /* sliding window in tokens; 0: none */
    int64_t window_from;         /* first layer with the window */
    ql_rope_config rope;
    int64_t max_positions;
    int64_t bos, pad;            /* token ids; -1: none */
    int64_t eos[8];
    int eos_count;
    ql_dtype dtype;              /* of the checkpoint: torch_dtype or dtype; F32 where unsaid */
    ql_quant_config quant;
} ql_config;

/* path: config.json or the folder that holds it. */
ql_status ql_config_load(const char *path, ql_config *out) QL_MUST_USE;
/* The same from text; `what` names it in messages. */
ql_status ql_config_parse(const char *text, size_t n, const char *what, ql_config *out) QL_MUST_USE;
void ql_config_free(ql_config *c); /* the strings it owns; takes a zeroed struct too */
const char *ql_arch_name(ql_arch a);  /* "llama", "mistral", "qwen2", "qwen3": HF's model_type */
const char *ql_arch_class(ql_arch a); /* "LlamaForCausalLM" … */
/* The window of this layer; 0: the layer sees everything. */
int64_t ql_config_window(const ql_config *c, int64_t layer);
/* out (D/2): inverse frequencies as transformers computes them, in fp32. cos and sin are then
 * multiplied by rope.attention_scaling. */
void ql_rope_inv_freq(const ql_config *c, float *out);
/* Parameters of the model as torch counts them, tied embeddings once. */
int64_t ql_config_params(const ql_config *c);

/* The linears of a decoder block, in the order of every table. */
typedef enum { QL_Q, QL_K, QL_V, QL_O, QL_GATE, QL_UP, QL_DOWN, QL_LINEARS } ql_linear;

const char *ql_linear_name(ql_linear w);   /* "q_proj" */
const char *ql_linear_module(ql_linear w); /* "self_attn.q_proj" */
/* N and K of a linear (out, in). */
void ql_linear_shape(const ql_config *c, ql_linear w, int64_t *rows, int64_t *cols);
bool ql_linear_bias(const ql_config *c, ql_linear w);
/* transformers' rule for llm_int8_skip_modules: the entry is a part of the linear's path that ends where a name ends. */
bool ql_linear_named(const char *part, int64_t layer, ql_linear w);
/* By config.json's list this linear is not quantised when we quantise on load. */
bool ql_config_skips(const ql_config *c, int64_t layer, ql_linear w);

typedef enum { QL_PLAIN, QL_NF4, QL_FP4 } ql_weight_kind;

/* A linear's weight (N, K), row-major, as it lies in the file. All pointers go into the mapped file
 * and are aligned only as its writer chose (read with memcpy or kernels/half.h); NULL in a model
 * made from a config alone. Quantised: flat blocks of `block` elements, two codes a byte, the
 * earlier one in the high nibble. */
typedef struct {
    const char *name;          /* "model.layers.0.self_attn.q_proj.weight" */
    int64_t rows, cols;        /* N, K */
    ql_weight_kind kind;
    ql_dtype dtype;            /* plain: of the data; quantised: quant_state's dtype */
    bool skip;                 /* plain: stays as it is when we quantise on load */
    const void *data;          /* plain: N·K values; quantised: ceil(N·K / 2) bytes */
    int64_t bytes;
    int64_t block, blocks;     /* quantised: 64; ceil(N·K / block) */
    const void *absmax;        /* (blocks): u8 when nested, else fp32 */
    float quant_map[16];       /* the 4-bit codes' values, from the file */
    int64_t nested_block;      /* 256; 0: absmax is not quantised itself */
    const void *nested_absmax; /* fp32 (ceil(blocks / nested_block)) */
    const void *nested_map;    /* fp32 (256) */
    float nested_offset;
} ql_weight;

/* Any other tensor: a vector is (1, n). data NULL and rows 0: the model has none. */
typedef struct {
    const char *name;
    int64_t rows, cols;
    ql_dtype dtype;
    const void *data;
} ql_param;

typedef struct {
    ql_weight w[QL_LINEARS];
    ql_param bias[QL_LINEARS]; /* (1, N) */
    ql_param norm_attn;        /* input_layernorm (1, C) */
    ql_param norm_ffn;         /* post_attention_layernorm (1, C) */
    ql_param q_norm, k_norm;   /* (1, D) */
} ql_block;

typedef struct {
    ql_config cfg;
    char *path;      /* the folder */
    ql_st *files;    /* NULL: made from a config alone */
    ql_block *block; /* cfg.layers of them */
    ql_param embed;  /* (V, C) */
    ql_param norm;   /* (1, C) */
    ql_param head;   /* (V, C); tied: equal to embed */
    char *names;     /* storage of names made here */
} ql_model;

ql_status ql_model_open(const char *folder, ql_model **out) QL_MUST_USE;
/* From config.json or its folder alone, for planning: the same table with data NULL, each linear of
 * the kind that its quantization_config promises. */
ql_status ql_model_open_config(const char *path, ql_model **out) QL_MUST_USE;
/* A job's llm_int8_skip_modules: a name, or a list of them; NULL or null: none. A folder that is quantised already keeps its own list, as
 * in transformers. */
void ql_model_skip(ql_model *m, const json_t *names);
void ql_model_close(ql_model *m);
/* The pages of [p, p + n) are no longer needed by this process. */
void ql_model_done_with(const ql_model *m, const void *p, int64_t n);

#endif
