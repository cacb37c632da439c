/* config.json → ql_config, in both spellings: rope_scaling, rope_theta, torch_dtype (the older) and
 * rope_parameters, dtype. What is absent has the default of the family's config class. */
#include "core/model.h"

#include "core/file.h"
#include "core/json.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const int64_t CONFIG_MAX = 16 << 20;
/* Bounds that keep every product of dimensions far inside int64. */
static const int64_t HIDDEN_MAX = 1 << 20, LAYERS_MAX = 1024, HEADS_MAX = 4096, HEAD_DIM_MAX = 1024,
                     FFN_MAX = 1 << 22, VOCAB_MAX = 1 << 24, POS_MAX = 1 << 30, ID_MAX = 1 << 30;

typedef struct {
    const char *type, *class_name;
    int64_t head_dim; /* where config.json has none; 0: hidden / heads */
    int64_t bos, eos; /* -1: none */
    int64_t window;   /* where config.json has no sliding_window key; Mistral only */
    int64_t max_positions;
} family;

static const family families[QL_ARCHS] = {
    [QL_LLAMA] = {"llama", "LlamaForCausalLM", 0, 1, 2, 0, 2048},
    [QL_MISTRAL] = {"mistral", "MistralForCausalLM", 0, 1, 2, 4096, 131072},
    [QL_QWEN2] = {"qwen2", "Qwen2ForCausalLM", 0, -1, -1, 0, 32768},
    [QL_QWEN3] = {"qwen3", "Qwen3ForCausalLM", 128, -1, -1, 0, 32768},
};

#define SUPPORTED "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"

typedef struct {
    const json_t *o;
    const char *what;
    ql_config *c;
} reader;

const char *ql_arch_name(ql_arch a)
{
    return (unsigned)a < QL_ARCHS ? families[a].type : "?";
}

const char *ql_arch_class(ql_arch a)
{
    return (unsigned)a < QL_ARCHS ? families[a].class_name : "?";
}

static bool given(const json_t *o, const char *key)
{
    const json_t *v = json_object_get(o, key);
    return v && !json_is_null(v);
}

static ql_status read_arch(reader *r)
{
    const char *type = NULL;
    const json_t *list = json_object_get(r->o, "architectures");
    const json_t *first = json_array_get(list, 0);
    if (!given(r->o, "model_type") && given(r->o, "peft_type"))
        QL_FAIL(QL_EINVAL, "%s: a PEFT adapter, not a model: load its base model first", r->what);
    QL_TRY(ql_json_str(r->o, r->what, "model_type", &type));
    for (int a = 0; a < QL_ARCHS; a++) {
        if (strcmp(type, families[a].type) != 0) continue;
        if (first && (!json_is_string(first) ||
                      strcmp(json_string_value(first), families[a].class_name) != 0))
            QL_FAIL(QL_ENOSUP, "%s: architecture %s is not supported; supported: " SUPPORTED,
                    r->what, ql_json_show(first));
        r->c->arch = (ql_arch)a;
        return QL_OK;
    }
    QL_FAIL(QL_ENOSUP,
            "%s: architecture %s (model_type '%.60s') is not supported; supported: " SUPPORTED,
            r->what, first ? ql_json_show(first) : "unnamed", type);
}

static ql_status read_sizes(reader *r)
{
    ql_config *c = r->c;
    const json_t *o = r->o;
    const char *what = r->what;
    QL_TRY(ql_json_int(o, what, "hidden_size", 1, HIDDEN_MAX, &c->hidden));
    QL_TRY(ql_json_int(o, what, "num_hidden_layers", 1, LAYERS_MAX, &c->layers));
    QL_TRY(ql_json_int(o, what, "num_attention_heads", 1, HEADS_MAX, &c->heads));
    QL_TRY(ql_json_int(o, what, "intermediate_size", 1, FFN_MAX, &c->ffn));
    QL_TRY(ql_json_int(o, what, "vocab_size", 1, VOCAB_MAX, &c->vocab));
    c->kv_heads = c->arch == QL_MISTRAL ? 8 : c->heads;
    if (json_is_null(json_object_get(o, "num_key_value_heads"))) c->kv_heads = c->heads;
    QL_TRY(ql_json_opt_int(o, what, "num_key_value_heads", 1, HEADS_MAX, &c->kv_heads));
    if (c->heads % c->kv_heads != 0)
        QL_FAIL(QL_EINVAL,
                "%s: num_attention_heads %lld is not a multiple of num_key_value_heads %lld", what,
                (long long)c->heads, (long long)c->kv_heads);
    c->head_dim = families[c->arch].head_dim;
    QL_TRY(ql_json_opt_int(o, what, "head_dim", 1, HEAD_DIM_MAX, &c->head_dim));
    if (c->head_dim == 0) {
        if (c->hidden % c->heads != 0)
            QL_FAIL(QL_EINVAL,
                    "%s: hidden_size %lld is not a multiple of num_attention_heads %lld, and "
                    "there is no head_dim",
                    what, (long long)c->hidden, (long long)c->heads);
        c->head_dim = c->hidden / c->heads;
    }
    if (c->head_dim % 2 != 0 || c->head_dim > HEAD_DIM_MAX)
        QL_FAIL(QL_EINVAL, "%s: a head size of %lld; RoPE needs an even one of at most %lld", what,
                (long long)c->head_dim, (long long)HEAD_DIM_MAX);
    c->max_positions = families[c->arch].max_positions;
    QL_TRY(ql_json_opt_int(o, what, "max_position_embeddings", 1, POS_MAX, &c->max_positions));
    c->eps = 1e-6;
    return ql_json_opt_num(o, what, "rms_norm_eps", 0.0, 1.0, &c->eps);
}

static ql_status read_flags(reader *r)
{
    ql_config *c = r->c;
    const char *act = "silu";
    bool attention_bias = false;
    double dropout = 0.0, partial = 1.0;
    QL_TRY(ql_json_opt_str(r->o, r->what, "hidden_act", &act));
    if (strcmp(act, "silu") != 0 && strcmp(act, "swish") != 0)
        QL_FAIL(QL_ENOSUP, "%s: hidden_act '%.60s' is not supported; supported: silu", r->what,
                act);
    QL_TRY(ql_json_opt_num(r->o, r->what, "attention_dropout", 0.0, 1.0, &dropout));
    if (dropout != 0.0)
        QL_FAIL(QL_ENOSUP, "%s: attention_dropout %g is not supported; set it to 0", r->what,
                dropout);
    QL_TRY(ql_json_opt_num(r->o, r->what, "partial_rotary_factor", 0.0, 1.0, &partial));
    if (partial != 1.0)
        QL_FAIL(QL_ENOSUP, "%s: partial_rotary_factor %g is not supported; supported: 1", r->what,
                partial);
    QL_TRY(ql_json_opt_bool(r->o, r->what, "tie_word_embeddings", &c->tied));
    if (c->arch == QL_LLAMA || c->arch == QL_QWEN3)
        QL_TRY(ql_json_opt_bool(r->o, r->what, "attention_bias", &attention_bias));
    if (c->arch == QL_LLAMA) QL_TRY(ql_json_opt_bool(r->o, r->what, "mlp_bias", &c->mlp_bias));
    c->qkv_bias = attention_bias || c->arch == QL_QWEN2;
    c->o_bias = attention_bias;
    c->qk_norm = c->arch == QL_QWEN3;
    return QL_OK;
}

/* Qwen's layer_types: some full layers, then sliding ones, as max_window_layers makes them. */
static ql_status read_layer_types(reader *r, const json_t *list)
{
    ql_config *c = r->c;
    if (!json_is_array(list) || json_array_size(list) != (size_t)c->layers)
        QL_FAIL(QL_EINVAL, "%s: layer_types must be a list of %lld names", r->what,
                (long long)c->layers);
    int64_t from = c->layers;
    for (int64_t i = 0; i < c->layers; i++) {
        const json_t *v = json_array_get(list, (size_t)i);
        const char *s = json_string_value(v);
        bool sliding = s && strcmp(s, "sliding_attention") == 0;
        if (!sliding && (!s || strcmp(s, "full_attention") != 0))
            QL_FAIL(QL_ENOSUP,
                    "%s: layer_types: %s is not supported; supported: full_attention, "
                    "sliding_attention",
                    r->what, ql_json_show(v));
        if (sliding && from == c->layers) from = i;
        if (!sliding && from < i)
            QL_FAIL(QL_ENOSUP,
                    "%s: layer_types: full_attention in layer %lld after sliding_attention in "
                    "layer %lld is not supported",
                    r->what, (long long)i, (long long)from);
    }
    if (from < c->layers && c->window == 0)
        QL_FAIL(QL_EINVAL,
                "%s: layer_types has sliding_attention, but there is no sliding_window in use",
                r->what);
    c->window_from = from;
    return QL_OK;
}

static ql_status read_window(reader *r)
{
    ql_config *c = r->c;
    bool use = false;
    int64_t from = 28;
    c->window_from = 0;
    if (c->arch == QL_LLAMA) return QL_OK;
    if (c->arch == QL_MISTRAL) {
        if (!json_object_get(r->o, "sliding_window")) c->window = families[c->arch].window;
        return ql_json_opt_int(r->o, r->what, "sliding_window", 1, POS_MAX, &c->window);
    }
    QL_TRY(ql_json_opt_bool(r->o, r->what, "use_sliding_window", &use));
    if (use) {
        if (!json_object_get(r->o, "sliding_window")) c->window = 4096;
        QL_TRY(ql_json_opt_int(r->o, r->what, "sliding_window", 1, POS_MAX, &c->window));
    }
    QL_TRY(ql_json_opt_int(r->o, r->what, "max_window_layers", 0, POS_MAX, &from));
    c->window_from = ql_min64(from, c->layers);
    if (given(r->o, "layer_types"))
        QL_TRY(read_layer_types(r, json_object_get(r->o, "layer_types")));
    if (c->window_from == c->layers) c->window = 0;
    if (c->window == 0) c->window_from = 0;
    return QL_OK;
}

static double yarn_scale(double factor, double mscale)
{
    return factor <= 1.0 ? 1.0 : 0.1 * mscale * log(factor) + 1.0;
}

static ql_status read_yarn(const json_t *d, const char *what, ql_rope_config *p)
{
    double mscale = 0.0, all_dim = 0.0;
    p->beta_fast = 32.0, p->beta_slow = 1.0, p->truncate = true;
    QL_TRY(ql_json_opt_num(d, what, "beta_fast", 1e-6, 1e9, &p->beta_fast));
    QL_TRY(ql_json_opt_num(d, what, "beta_slow", 1e-6, 1e9, &p->beta_slow));
    QL_TRY(ql_json_opt_num(d, what, "mscale", 0.0, 1e6, &mscale));
    QL_TRY(ql_json_opt_num(d, what, "mscale_all_dim", 0.0, 1e6, &all_dim));
    QL_TRY(ql_json_opt_bool(d, what, "truncate", &p->truncate));
    if (mscale != 0.0 && all_dim != 0.0)
        p->attention_scaling = yarn_scale(p->factor, mscale) / yarn_scale(p->factor, all_dim);
    else
        p->attention_scaling = yarn_scale(p->factor, 1.0);
    return ql_json_opt_num(d, what, "attention_factor", 0.0, 1e6, &p->attention_scaling);
}

static ql_status read_rope_type(const json_t *d, const char *what, ql_rope_type *out)
{
    static const char *const names[] = {[QL_ROPE_DEFAULT] = "default",
                                        [QL_ROPE_LINEAR] = "linear",
                                        [QL_ROPE_LLAMA3] = "llama3",
                                        [QL_ROPE_YARN] = "yarn"};
    const char *type = "default";
    QL_TRY(ql_json_opt_str(d, what, "type", &type));
    QL_TRY(ql_json_opt_str(d, what, "rope_type", &type));
    for (int i = 0; i < (int)(sizeof names / sizeof *names); i++) {
        if (strcmp(type, names[i]) == 0) {
            *out = (ql_rope_type)i;
            return QL_OK;
        }
    }
    QL_FAIL(QL_ENOSUP,
            "%s: rope type '%.60s' is not supported; supported: default, linear, llama3, yarn",
            what, type);
}

/* d: the object rope_scaling or rope_parameters; NULL: none. */
static ql_status read_rope_scaling(reader *r, const json_t *d, const char *what)
{
    ql_rope_config *p = &r->c->rope;
    double partial = 1.0;
    if (!json_is_object(d))
        QL_FAIL(QL_EINVAL, "%s must be an object, found %s", what, ql_json_show(d));
    if (json_is_object(json_object_get(d, "full_attention")))
        QL_FAIL(QL_ENOSUP, "%s: RoPE parameters per layer type are not supported", what);
    QL_TRY(read_rope_type(d, what, &p->type));
    QL_TRY(ql_json_opt_num(d, what, "rope_theta", 2.0, 1e15, &p->theta));
    QL_TRY(ql_json_opt_num(d, what, "partial_rotary_factor", 0.0, 1.0, &partial));
    if (partial != 1.0)
        QL_FAIL(QL_ENOSUP, "%s: partial_rotary_factor %g is not supported; supported: 1", what,
                partial);
    if (p->type == QL_ROPE_DEFAULT) return QL_OK;
    QL_TRY(ql_json_num(d, what, "factor", 1.0, 1e6, &p->factor));
    if (p->type == QL_ROPE_LINEAR) return QL_OK;
    p->original = r->c->max_positions;
    QL_TRY(ql_json_opt_int(d, what, "original_max_position_embeddings", 1, POS_MAX, &p->original));
    QL_TRY(ql_json_opt_int(r->o, r->what, "original_max_position_embeddings", 1, POS_MAX,
                           &p->original));
    if (p->type == QL_ROPE_YARN) return read_yarn(d, what, p);
    QL_TRY(ql_json_num(d, what, "low_freq_factor", 1e-6, 1e6, &p->low_freq));
    QL_TRY(ql_json_num(d, what, "high_freq_factor", 1e-6, 1e6, &p->high_freq));
    if (p->high_freq <= p->low_freq)
        QL_FAIL(QL_EINVAL, "%s: high_freq_factor %g must be greater than low_freq_factor %g", what,
                p->high_freq, p->low_freq);
    return QL_OK;
}

static ql_status read_rope(reader *r)
{
    ql_rope_config *p = &r->c->rope;
    char what[128];
    *p = (ql_rope_config){
        .type = QL_ROPE_DEFAULT, .theta = 10000.0, .factor = 1.0, .attention_scaling = 1.0};
    QL_TRY(ql_json_opt_num(r->o, r->what, "rope_theta", 2.0, 1e15, &p->theta));
    static const char *const keys[] = {"rope_scaling", "rope_parameters"};
    for (int i = 0; i < 2; i++) {
        if (!given(r->o, keys[i])) continue;
        snprintf(what, sizeof what, "%.60s: %s", r->what, keys[i]);
        return read_rope_scaling(r, json_object_get(r->o, keys[i]), what);
    }
    return QL_OK;
}

static ql_status read_ids(reader *r)
{
    ql_config *c = r->c;
    const family *f = &families[c->arch];
    const json_t *eos = json_object_get(r->o, "eos_token_id");
    c->bos = json_object_get(r->o, "bos_token_id") ? -1 : f->bos;
    c->pad = -1;
    QL_TRY(ql_json_opt_int(r->o, r->what, "bos_token_id", -1, ID_MAX, &c->bos));
    QL_TRY(ql_json_opt_int(r->o, r->what, "pad_token_id", -1, ID_MAX, &c->pad));
    if (!eos && f->eos >= 0) c->eos[c->eos_count++] = f->eos;
    if (!eos || json_is_null(eos)) return QL_OK;
    if (!json_is_array(eos)) {
        QL_TRY(ql_json_int(r->o, r->what, "eos_token_id", -1, ID_MAX, &c->eos[0]));
        c->eos_count = c->eos[0] >= 0;
        return QL_OK;
    }
    size_t n = json_array_size(eos), room = sizeof c->eos / sizeof *c->eos;
    if (n > room)
        QL_FAIL(QL_ENOSUP, "%s: %zu eos_token_ids; at most %zu are supported", r->what, n, room);
    for (size_t i = 0; i < n; i++) {
        const json_t *v = json_array_get(eos, i);
        int64_t id = json_integer_value(v);
        if (!json_is_integer(v) || id < 0 || id > ID_MAX)
            QL_FAIL(QL_EINVAL, "%s: 'eos_token_id' has %s, which is not a token id", r->what,
                    ql_json_show(v));
        c->eos[c->eos_count++] = id;
    }
    return QL_OK;
}

static ql_status read_dtype(reader *r)
{
    const char *s = NULL;
    QL_TRY(ql_json_opt_str(r->o, r->what, "torch_dtype", &s));
    QL_TRY(ql_json_opt_str(r->o, r->what, "dtype", &s));
    r->c->dtype = QL_F32;
    if (!s || strcmp(s, "auto") == 0) return QL_OK;
    if (strncmp(s, "torch.", 6) == 0) s += 6;
    for (int d = QL_F32; d <= QL_BF16; d++) {
        if (strcmp(s, ql_dtype_name((ql_dtype)d)) == 0) {
            r->c->dtype = (ql_dtype)d;
            return QL_OK;
        }
    }
    QL_FAIL(QL_ENOSUP, "%s: dtype '%.60s' is not supported; supported: float32, float16, bfloat16",
            r->what, s);
}

static ql_status read_skip_list(const json_t *list, const char *what, ql_quant_config *q)
{
    size_t n = json_array_size(list);
    if (!json_is_array(list) || n > 100000)
        QL_FAIL(QL_EINVAL, "%s: llm_int8_skip_modules must be a list of names", what);
    q->skip = calloc(n + 1, sizeof *q->skip);
    if (!q->skip) QL_FAIL(QL_ENOMEM, "no memory for llm_int8_skip_modules");
    for (size_t i = 0; i < n; i++) {
        const json_t *v = json_array_get(list, i);
        if (!json_is_string(v))
            QL_FAIL(QL_EINVAL, "%s: llm_int8_skip_modules has %s, which is not a name", what,
                    ql_json_show(v));
        q->skip[i] = strdup(json_string_value(v));
        if (!q->skip[i]) QL_FAIL(QL_ENOMEM, "no memory for llm_int8_skip_modules");
        q->skips++;
    }
    return QL_OK;
}

static ql_status read_quant(reader *r)
{
    ql_quant_config *q = &r->c->quant;
    const json_t *d = json_object_get(r->o, "quantization_config");
    const char *method = "bitsandbytes", *type = "fp4";
    char what[128];
    bool four = false, eight = false;
    if (!d || json_is_null(d)) return QL_OK;
    snprintf(what, sizeof what, "%.60s: quantization_config", r->what);
    if (!json_is_object(d))
        QL_FAIL(QL_EINVAL, "%s must be an object, found %s", what, ql_json_show(d));
    QL_TRY(ql_json_opt_str(d, what, "quant_method", &method));
    if (strcmp(method, "bitsandbytes") != 0)
        QL_FAIL(QL_ENOSUP,
                "%s: quant_method '%.60s' is not supported; supported: bitsandbytes (4 bits), "
                "or weights in 16 or 32 bits",
                what, method);
    QL_TRY(ql_json_opt_bool(d, what, "_load_in_4bit", &four));
    QL_TRY(ql_json_opt_bool(d, what, "load_in_4bit", &four));
    QL_TRY(ql_json_opt_bool(d, what, "_load_in_8bit", &eight));
    QL_TRY(ql_json_opt_bool(d, what, "load_in_8bit", &eight));
    if (eight)
        QL_FAIL(QL_ENOSUP,
                "%s: an 8-bit base (load_in_8bit) is not supported; supported: "
                "load_in_4bit, or weights in 16 or 32 bits",
                what);
    if (!four) return QL_OK;
    QL_TRY(ql_json_opt_str(d, what, "bnb_4bit_quant_type", &type));
    if (strcmp(type, "nf4") != 0 && strcmp(type, "fp4") != 0)
        QL_FAIL(QL_ENOSUP, "%s: bnb_4bit_quant_type '%.60s' is not supported; supported: nf4, fp4",
                what, type);
    q->present = true;
    q->fp4 = strcmp(type, "fp4") == 0;
    QL_TRY(ql_json_opt_bool(d, what, "bnb_4bit_use_double_quant", &q->nested));
    if (!given(d, "llm_int8_skip_modules")) return QL_OK;
    return read_skip_list(json_object_get(d, "llm_int8_skip_modules"), what, q);
}

ql_status ql_config_parse(const char *text, size_t n, const char *what, ql_config *out)
{
    static ql_status (*const steps[])(reader *) = {read_arch, read_sizes, read_flags, read_window,
                                                   read_rope, read_ids,   read_dtype, read_quant};
    json_t *o = NULL;
    ql_config c = {0};
    ql_status st = ql_json_parse(text, n, what, &o);
    reader r = {o, what, &c};
    for (size_t i = 0; st == QL_OK && i < sizeof steps / sizeof *steps; i++) st = steps[i](&r);
    json_decref(o);
    if (st == QL_OK)
        *out = c;
    else
        ql_config_free(&c);
    return st;
}

ql_status ql_config_load(const char *path, ql_config *out)
{
    char file[QL_PATH_MAX], *text = NULL;
    size_t n = 0;
    if (ql_path_is_dir(path)) {
        QL_TRY(ql_path_join(file, path, "config.json"));
        if (!ql_path_is_file(file)) {
            char adapter[QL_PATH_MAX];
            QL_TRY(ql_path_join(adapter, path, "adapter_config.json"));
            if (ql_path_is_file(adapter))
                QL_FAIL(QL_EINVAL, "%s is a PEFT adapter, not a model: load its base model first",
                        path);
            QL_FAIL(QL_EINVAL, "%s has no config.json: not a model folder", path);
        }
        path = file;
    }
    QL_TRY(ql_file_read(path, CONFIG_MAX, &text, &n));
    const char *slash = strrchr(path, '/');
    ql_status st = ql_config_parse(text, n, slash ? slash + 1 : path, out);
    free(text);
    return st;
}

void ql_config_free(ql_config *c)
{
    if (!c) return;
    for (int i = 0; i < c->quant.skips; i++) free(c->quant.skip[i]);
    free(c->quant.skip);
    c->quant.skip = NULL;
    c->quant.skips = 0;
}

int64_t ql_config_window(const ql_config *c, int64_t layer)
{
    return layer >= c->window_from ? c->window : 0;
}

/* low and high of YaRN's ramp: the dimension that turns `turns` times within the original length.
 */
static double yarn_dim(const ql_config *c, double turns)
{
    const double two_pi = 6.283185307179586;
    return (double)c->head_dim * log((double)c->rope.original / (turns * two_pi)) /
           (2.0 * log(c->rope.theta));
}

static void yarn_inv_freq(const ql_config *c, const float *turn, float *out)
{
    const ql_rope_config *p = &c->rope;
    double low = yarn_dim(c, p->beta_fast), high = yarn_dim(c, p->beta_slow);
    if (p->truncate) low = floor(low), high = ceil(high);
    low = fmax(low, 0.0);
    high = fmin(high, (double)c->head_dim - 1.0);
    if (low == high) high += 0.001;
    for (int64_t i = 0; i < c->head_dim / 2; i++) {
        float ramp = ((float)i - (float)low) / (float)(high - low);
        ramp = ramp < 0.0f ? 0.0f : ramp > 1.0f ? 1.0f : ramp;
        float keep = 1.0f - ramp;
        float own = 1.0f / turn[i], stretched = 1.0f / ((float)p->factor * turn[i]);
        out[i] = stretched * (1.0f - keep) + own * keep;
    }
}

static float llama3_inv_freq(const ql_rope_config *p, float inv)
{
    float length = (float)p->original, factor = (float)p->factor;
    float wave = 6.2831855f / inv;
    float low = (float)((double)p->original / p->low_freq);
    float high = (float)((double)p->original / p->high_freq);
    if (wave > low) return inv / factor;
    if (wave < high) return inv;
    float smooth = (length / wave - (float)p->low_freq) / (float)(p->high_freq - p->low_freq);
    return (1.0f - smooth) * inv / factor + smooth * inv;
}

void ql_rope_inv_freq(const ql_config *c, float *out)
{
    const ql_rope_config *p = &c->rope;
    float turn[512]; /* theta^(2i/D); head_dim is at most 1024 */
    for (int64_t i = 0; i < c->head_dim / 2; i++)
        turn[i] =
            (float)pow((double)(float)p->theta, (double)((float)(2 * i) / (float)c->head_dim));
    if (p->type == QL_ROPE_YARN) {
        yarn_inv_freq(c, turn, out);
        return;
    }
    for (int64_t i = 0; i < c->head_dim / 2; i++) {
        float inv = 1.0f / turn[i];
        if (p->type == QL_ROPE_LINEAR) inv /= (float)p->factor;
        if (p->type == QL_ROPE_LLAMA3) inv = llama3_inv_freq(p, inv);
        out[i] = inv;
    }
}

int64_t ql_config_params(const ql_config *c)
{
    int64_t per_layer = 2 * c->hidden + (c->qk_norm ? 2 * c->head_dim : 0);
    for (int w = 0; w < QL_LINEARS; w++) {
        int64_t n, k;
        ql_linear_shape(c, (ql_linear)w, &n, &k);
        per_layer += n * k + (ql_linear_bias(c, (ql_linear)w) ? n : 0);
    }
    return c->layers * per_layer + c->hidden + c->vocab * c->hidden * (c->tied ? 1 : 2);
}

static const char *const modules[QL_LINEARS] = {
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj",    "mlp.up_proj",      "mlp.down_proj"};

const char *ql_linear_module(ql_linear w)
{
    return (unsigned)w < QL_LINEARS ? modules[w] : "?";
}

const char *ql_linear_name(ql_linear w)
{
    return (unsigned)w < QL_LINEARS ? strchr(modules[w], '.') + 1 : "?";
}

void ql_linear_shape(const ql_config *c, ql_linear w, int64_t *rows, int64_t *cols)
{
    int64_t q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    const int64_t shape[QL_LINEARS][2] = {
        [QL_Q] = {q, c->hidden},         [QL_K] = {kv, c->hidden},
        [QL_V] = {kv, c->hidden},        [QL_O] = {c->hidden, q},
        [QL_GATE] = {c->ffn, c->hidden}, [QL_UP] = {c->ffn, c->hidden},
        [QL_DOWN] = {c->hidden, c->ffn}};
    *rows = shape[w][0], *cols = shape[w][1];
}

bool ql_linear_bias(const ql_config *c, ql_linear w)
{
    if (w == QL_O) return c->o_bias;
    return w < QL_O ? c->qkv_bias : c->mlp_bias;
}

bool ql_linear_named(const char *part, int64_t layer, ql_linear w)
{
    char full[96], entry[96];
    snprintf(full, sizeof full, "model.layers.%lld.%s.", (long long)layer, ql_linear_module(w));
    int n = snprintf(entry, sizeof entry, "%s.", part);
    return n > 1 && n < (int)sizeof entry && strstr(full, entry);
}

bool ql_config_skips(const ql_config *c, int64_t layer, ql_linear w)
{
    bool hit = false;
    for (int i = 0; i < c->quant.skips; i++) hit |= ql_linear_named(c->quant.skip[i], layer, w);
    return hit;
}
