/* The table of tensors: every name that config.json implies is looked up and checked against the
 * shape it must have; every tensor of the files must have been asked for. */
#include "core/model.h"

#include "core/file.h"
#include "core/json.h"
#include "kernels/half.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAME_ROOM = 96, PER_LAYER = 2 * QL_LINEARS + 4, STATE_MAX = 4096 };

typedef struct {
    ql_model *m;
    unsigned char *used; /* by index of m->files' tensors */
    size_t names_at;     /* fill of m->names */
} binder;

/* The file that holds t, without folders. */
static const char *file_of(const binder *b, const ql_st_tensor *t)
{
    const char *p = ql_st_path(b->m->files, t->file), *slash = strrchr(p, '/');
    return slash ? slash + 1 : p;
}

static const ql_st_tensor *find(binder *b, const char *name)
{
    const ql_st_tensor *t = ql_st_find(b->m->files, name);
    if (t) b->used[t - ql_st_at(b->m->files, 0)] = 1;
    return t;
}

static const ql_st_tensor *find_suffix(binder *b, const char *name, const char *suffix)
{
    char full[2 * NAME_ROOM];
    snprintf(full, sizeof full, "%s%s", name, suffix);
    return find(b, full);
}

/* A model made from a config has no file to borrow names from. */
static const char *keep_name(binder *b, const char *name)
{
    char *p = b->m->names + b->names_at;
    size_t n = strlen(name) + 1;
    memcpy(p, name, n);
    b->names_at += n;
    return p;
}

static ql_status missing(const binder *b, const char *name)
{
    QL_FAIL(QL_EINVAL, "%s: tensor '%s' is missing (config.json asks for it%s)", b->m->path, name,
            strcmp(name, "lm_head.weight") == 0 ? ": its tie_word_embeddings is not true" : "");
}

static ql_status check_shape(const binder *b, const ql_st_tensor *t, int ndim, int64_t rows,
                             int64_t cols)
{
    int64_t want[2] = {rows, cols};
    const int64_t *w = ndim == 1 ? &want[1] : want;
    bool same = t->ndim == ndim;
    char e[64], f[256];
    for (int i = 0; same && i < ndim; i++) same = t->shape[i] == w[i];
    if (same) return QL_OK;
    bool rows_only =
        t->ndim == 2 && ndim == 2 && t->shape[1] == cols && strstr(t->name, "embed_tokens");
    QL_FAIL(QL_EINVAL, "%s: tensor '%s' has shape %s, config.json asks for %s%s", file_of(b, t),
            t->name, ql_st_shape(f, sizeof f, t->shape, t->ndim), ql_st_shape(e, sizeof e, w, ndim),
            rows_only ? " (a resized embedding? vocab_size must be its number of rows)" : "");
}

static ql_status check_float(const binder *b, const ql_st_tensor *t)
{
    if (ql_dtype_float(t->dtype)) return QL_OK;
    QL_FAIL(QL_ENOSUP, "%s: tensor '%s' has dtype %s; supported here: float32, float16, bfloat16%s",
            file_of(b, t), t->name, ql_dtype_name(t->dtype),
            strcmp(t->name, "lm_head.weight") == 0 ? " (a quantised head is not supported)" : "");
}

static ql_status bind_param(binder *b, const char *name, int ndim, int64_t rows, int64_t cols,
                            ql_param *out)
{
    out->rows = rows, out->cols = cols;
    if (!b->m->files) {
        out->name = keep_name(b, name);
        out->dtype = b->m->cfg.dtype;
        return QL_OK;
    }
    const ql_st_tensor *t = find(b, name);
    if (!t) return missing(b, name);
    QL_TRY(check_float(b, t));
    QL_TRY(check_shape(b, t, ndim, rows, cols));
    out->name = t->name;
    out->dtype = t->dtype;
    out->data = t->data;
    return QL_OK;
}

/* A tensor that belongs to a quantised weight: dtype and number of elements are known. */
static ql_status bind_part(binder *b, const ql_weight *w, const char *suffix, ql_dtype dtype,
                           int64_t count, const void **out)
{
    const ql_st_tensor *t = find_suffix(b, w->name, suffix);
    if (!t) {
        char full[2 * NAME_ROOM];
        snprintf(full, sizeof full, "%s%s", w->name, suffix);
        QL_FAIL(QL_EINVAL, "%s: tensor '%s' is missing (the weight is quantised)", b->m->path,
                full);
    }
    if (t->dtype != dtype || t->count != count)
        QL_FAIL(QL_EINVAL, "%s: tensor '%s' has %lld elements of %s, expected %lld of %s",
                file_of(b, t), t->name, (long long)t->count, ql_dtype_name(t->dtype),
                (long long)count, ql_dtype_name(dtype));
    *out = t->data;
    return QL_OK;
}

static bool block_size(int64_t n)
{
    return n >= 32 && n <= 4096 && (n & (n - 1)) == 0;
}

static ql_status state_dtype(const char *what, const char *s, ql_dtype *out)
{
    if (strncmp(s, "torch.", 6) == 0) s += 6;
    for (int d = QL_F32; d <= QL_BF16; d++) {
        if (strcmp(s, ql_dtype_name((ql_dtype)d)) == 0) {
            *out = (ql_dtype)d;
            return QL_OK;
        }
    }
    QL_FAIL(QL_ENOSUP, "%s: dtype '%.60s' is not supported; supported: float32, float16, bfloat16",
            what, s);
}

/* bitsandbytes' packed quant_state: JSON in a tensor of bytes, keys in any order. */
static ql_status read_state(const json_t *o, const char *what, ql_weight *w)
{
    const char *type = NULL, *dtype = NULL, *nested_dtype = "float32";
    const json_t *shape = json_object_get(o, "shape");
    double offset = 0.0;
    QL_TRY(ql_json_str(o, what, "quant_type", &type));
    if (strcmp(type, w->kind == QL_NF4 ? "nf4" : "fp4") != 0)
        QL_FAIL(QL_EINVAL, "%s: quant_type '%.60s' does not match the tensor's name", what, type);
    QL_TRY(ql_json_int(o, what, "blocksize", 32, 4096, &w->block));
    if (!block_size(w->block))
        QL_FAIL(QL_EINVAL, "%s: blocksize %lld is not a power of two", what, (long long)w->block);
    QL_TRY(ql_json_str(o, what, "dtype", &dtype));
    QL_TRY(state_dtype(what, dtype, &w->dtype));
    if (json_array_size(shape) != 2 || json_integer_value(json_array_get(shape, 0)) != w->rows ||
        json_integer_value(json_array_get(shape, 1)) != w->cols)
        QL_FAIL(QL_EINVAL, "%s: shape %s, config.json asks for [%lld, %lld]", what,
                ql_json_show(shape), (long long)w->rows, (long long)w->cols);
    QL_TRY(ql_json_opt_int(o, what, "nested_blocksize", 32, 4096, &w->nested_block));
    if (w->nested_block == 0) return QL_OK;
    if (!block_size(w->nested_block))
        QL_FAIL(QL_EINVAL, "%s: nested_blocksize %lld is not a power of two", what,
                (long long)w->nested_block);
    QL_TRY(ql_json_opt_str(o, what, "nested_dtype", &nested_dtype));
    if (strcmp(nested_dtype, "float32") != 0)
        QL_FAIL(QL_ENOSUP, "%s: nested_dtype '%.60s' is not supported; supported: float32", what,
                nested_dtype);
    QL_TRY(ql_json_num(o, what, "nested_offset", -(double)FLT_MAX, (double)FLT_MAX, &offset));
    w->nested_offset = (float)offset;
    return QL_OK;
}

static ql_status bind_state(binder *b, const ql_st_tensor *t, ql_weight *w)
{
    json_t *o = NULL;
    char what[QL_PATH_MAX];
    snprintf(what, sizeof what, "%s: tensor '%s'", file_of(b, t), t->name);
    if (t->dtype != QL_U8 || t->bytes > STATE_MAX)
        QL_FAIL(QL_EINVAL, "%s must be at most %d bytes of uint8, found %lld of %s", what,
                STATE_MAX, (long long)t->count, ql_dtype_name(t->dtype));
    QL_TRY(ql_json_parse(t->data, (size_t)t->bytes, what, &o));
    ql_status st = read_state(o, what, w);
    json_decref(o);
    return st;
}

static ql_status bind_quantised(binder *b, const ql_st_tensor *t, const ql_st_tensor *state,
                                ql_weight *w)
{
    const void *map = NULL;
    int64_t n = w->rows * w->cols;
    QL_TRY(bind_state(b, state, w));
    /* quant_storage may be any dtype: the same bytes under another name. */
    if (t->bytes != ql_ceil_div(n, 2))
        QL_FAIL(QL_EINVAL, "%s: tensor '%s' has %lld bytes; [%lld, %lld] in 4 bits needs %lld",
                file_of(b, t), t->name, (long long)t->bytes, (long long)w->rows, (long long)w->cols,
                (long long)ql_ceil_div(n, 2));
    w->data = t->data;
    w->bytes = t->bytes;
    w->blocks = ql_ceil_div(n, w->block);
    QL_TRY(bind_part(b, w, ".absmax", w->nested_block ? QL_U8 : QL_F32, w->blocks, &w->absmax));
    QL_TRY(bind_part(b, w, ".quant_map", QL_F32, 16, &map));
    for (int i = 0; i < 16; i++) {
        w->quant_map[i] = ql_float_get(map, QL_F32, i);
        if (!isfinite(w->quant_map[i]))
            QL_FAIL(QL_EINVAL, "%s: tensor '%s.quant_map': entry %d is not finite", file_of(b, t),
                    w->name, i);
    }
    if (w->nested_block == 0) return QL_OK;
    QL_TRY(bind_part(b, w, ".nested_absmax", QL_F32, ql_ceil_div(w->blocks, w->nested_block),
                     &w->nested_absmax));
    return bind_part(b, w, ".nested_quant_map", QL_F32, 256, &w->nested_map);
}

/* From a config alone: what its quantization_config promises. */
static void promise(binder *b, const char *name, ql_weight *w)
{
    const ql_config *c = &b->m->cfg;
    int64_t n = w->rows * w->cols;
    w->name = keep_name(b, name);
    w->dtype = c->dtype;
    w->kind = QL_PLAIN;
    w->bytes = n * (int64_t)ql_dtype_size(c->dtype);
    if (!c->quant.present || w->skip) return;
    w->kind = c->quant.fp4 ? QL_FP4 : QL_NF4;
    w->bytes = ql_ceil_div(n, 2);
    w->block = 64;
    w->blocks = ql_ceil_div(n, w->block);
    w->nested_block = c->quant.nested ? 256 : 0;
}

static ql_status bind_weight(binder *b, const char *name, ql_weight *w)
{
    if (!b->m->files) {
        promise(b, name, w);
        return QL_OK;
    }
    const ql_st_tensor *t = find(b, name);
    if (!t) return missing(b, name);
    const ql_st_tensor *nf4 = find_suffix(b, name, ".quant_state.bitsandbytes__nf4");
    const ql_st_tensor *fp4 = find_suffix(b, name, ".quant_state.bitsandbytes__fp4");
    w->name = t->name;
    if (nf4 && fp4)
        QL_FAIL(QL_EINVAL, "%s: tensor '%s' has both an nf4 and an fp4 quant_state", file_of(b, t),
                name);
    if (nf4 || fp4) {
        w->kind = nf4 ? QL_NF4 : QL_FP4;
        return bind_quantised(b, t, nf4 ? nf4 : fp4, w);
    }
    if (t->dtype == QL_I8)
        QL_FAIL(QL_ENOSUP,
                "%s: tensor '%s' is int8: an 8-bit base is not supported; supported: "
                "bitsandbytes 4-bit, or weights in 16 or 32 bits",
                file_of(b, t), name);
    if (t->dtype == QL_U8)
        QL_FAIL(QL_EINVAL,
                "%s: tensor '%s' is uint8, but has no quant_state.bitsandbytes__nf4 or __fp4",
                file_of(b, t), name);
    QL_TRY(check_float(b, t));
    QL_TRY(check_shape(b, t, 2, w->rows, w->cols));
    w->kind = QL_PLAIN;
    w->dtype = t->dtype;
    w->data = t->data;
    w->bytes = t->bytes;
    return QL_OK;
}

static ql_status bind_layer_param(binder *b, int64_t layer, const char *module, int64_t cols,
                                  ql_param *out)
{
    char name[NAME_ROOM];
    snprintf(name, sizeof name, "model.layers.%lld.%s", (long long)layer, module);
    return bind_param(b, name, 1, 1, cols, out);
}

static ql_status bind_layer(binder *b, int64_t layer)
{
    const ql_config *c = &b->m->cfg;
    ql_block *k = &b->m->block[layer];
    char name[NAME_ROOM];
    for (int i = 0; i < QL_LINEARS; i++) {
        ql_linear l = (ql_linear)i;
        ql_weight *w = &k->w[i];
        ql_linear_shape(c, l, &w->rows, &w->cols);
        w->skip = ql_config_skips(c, layer, l);
        snprintf(name, sizeof name, "model.layers.%lld.%s.weight", (long long)layer,
                 ql_linear_module(l));
        QL_TRY(bind_weight(b, name, w));
        if (!ql_linear_bias(c, l)) continue;
        snprintf(name, sizeof name, "%s.bias", ql_linear_module(l));
        QL_TRY(bind_layer_param(b, layer, name, w->rows, &k->bias[i]));
    }
    QL_TRY(bind_layer_param(b, layer, "input_layernorm.weight", c->hidden, &k->norm_attn));
    QL_TRY(bind_layer_param(b, layer, "post_attention_layernorm.weight", c->hidden, &k->norm_ffn));
    if (!c->qk_norm) return QL_OK;
    QL_TRY(bind_layer_param(b, layer, "self_attn.q_norm.weight", c->head_dim, &k->q_norm));
    return bind_layer_param(b, layer, "self_attn.k_norm.weight", c->head_dim, &k->k_norm);
}

static bool ends_with(const char *s, const char *end)
{
    size_t n = strlen(s), k = strlen(end);
    return n >= k && strcmp(s + n - k, end) == 0;
}

/* A tensor nobody asked for means that config.json describes another model (a bias, a layer, an
 * adapter would be dropped in silence). Buffers of old files and a tied head's copy are harmless.
 */
static ql_status check_all_used(const binder *b)
{
    const ql_model *m = b->m;
    for (int64_t i = 0; i < ql_st_count(m->files); i++) {
        const ql_st_tensor *t = ql_st_at(m->files, i);
        if (b->used[i] || ends_with(t->name, ".rotary_emb.inv_freq")) continue;
        if (m->cfg.tied && strncmp(t->name, "lm_head.weight", 14) == 0) continue;
        QL_FAIL(QL_ENOSUP,
                "%s: tensor '%.200s' is not part of a %s of %lld layers as config.json "
                "describes it",
                file_of(b, t), t->name, ql_arch_class(m->cfg.arch), (long long)m->cfg.layers);
    }
    return QL_OK;
}

static ql_status bind_all(ql_model *m)
{
    const ql_config *c = &m->cfg;
    binder b = {m, NULL, 0};
    ql_status st = QL_OK;
    if (m->files)
        b.used = calloc((size_t)ql_st_count(m->files) + 1, 1);
    else
        m->names = malloc((size_t)(c->layers * PER_LAYER + 3) * NAME_ROOM);
    m->block = calloc((size_t)c->layers, sizeof *m->block);
    if (!m->block || (m->files ? !b.used : !m->names)) {
        st = ql_fail(QL_ENOMEM, "no memory for the table of %lld layers", (long long)c->layers);
        goto out;
    }
    QL_GO(bind_param(&b, "model.embed_tokens.weight", 2, c->vocab, c->hidden, &m->embed));
    for (int64_t l = 0; l < c->layers; l++) QL_GO(bind_layer(&b, l));
    QL_GO(bind_param(&b, "model.norm.weight", 1, 1, c->hidden, &m->norm));
    if (c->tied)
        m->head = m->embed;
    else
        QL_GO(bind_param(&b, "lm_head.weight", 2, c->vocab, c->hidden, &m->head));
    if (m->files) QL_GO(check_all_used(&b));
out:
    free(b.used);
    return st;
}

typedef enum { WITH_FILES, CONFIG_ONLY } open_kind;

static ql_status open_model(const char *path, open_kind kind, ql_model **out)
{
    ql_status st = QL_OK;
    ql_model *m = calloc(1, sizeof *m);
    if (!m) QL_FAIL(QL_ENOMEM, "no memory for opening %s", path);
    m->path = strdup(path);
    if (!m->path) {
        st = ql_fail(QL_ENOMEM, "no memory for opening %s", path);
        goto out;
    }
    if (kind == WITH_FILES && !ql_path_is_dir(path)) {
        st = ql_fail(QL_EINVAL, "%s is not a folder with config.json and safetensors", path);
        goto out;
    }
    QL_GO(ql_config_load(path, &m->cfg));
    if (kind == WITH_FILES) QL_GO(ql_st_open(path, &m->files));
    QL_GO(bind_all(m));
    *out = m;
    m = NULL;
out:
    ql_model_close(m);
    return st;
}

ql_status ql_model_open(const char *folder, ql_model **out)
{
    return open_model(folder, WITH_FILES, out);
}

ql_status ql_model_open_config(const char *path, ql_model **out)
{
    return open_model(path, CONFIG_ONLY, out);
}

void ql_model_skip(ql_model *m, const json_t *names)
{
    size_t n = json_is_array(names) ? json_array_size(names) : 1;
    if (!names || json_is_null(names) || m->cfg.quant.present) return;
    for (int64_t l = 0; l < m->cfg.layers; l++)
        for (int i = 0; i < QL_LINEARS; i++) {
            bool *skip = &m->block[l].w[i].skip;
            *skip = false;
            for (size_t k = 0; k < n; k++) {
                const char *part = json_string_value(json_is_array(names) ? json_array_get(names, k) : names);
                *skip |= part && ql_linear_named(part, l, (ql_linear)i);
            }
        }
}

void ql_model_close(ql_model *m)
{
    if (!m) return;
    ql_config_free(&m->cfg);
    ql_st_close(m->files);
    free(m->block);
    free(m->names);
    free(m->path);
    free(m);
}

void ql_model_done_with(const ql_model *m, const void *p, int64_t n)
{
    if (m->files && p) ql_st_done_with(m->files, p, n);
}
