#include "core/merge.h"

#include "core/json.h"
#include "core/lora.h"
#include "core/nf4.h"
#include "kernels/half.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK = 1 << 20 /* weights at a time */ };

/* A tensor of the result. */
typedef struct {
    const ql_weight *w;            /* a linear, or */
    const ql_param *p;             /* anything else */
    const ql_lora_target *target;  /* NULL: no adapter */
} item;

typedef struct {
    ql_model *base, *original, *from; /* from: one of the two */
    ql_lora *lora;
    float *flat;
    item *items;
    ql_st_decl *decls;
    int64_t n, merged;
    ql_dtype dtype;
    ql_st_writer *writer;
    ql_merge_tick tick;
    void *ctx;
    int64_t done, total;
    float *values;                 /* (CHUNK, rounded up to rows) */
    void *rounded;
    int64_t room;
} merge;

/* ---- what there will be ------------------------------------------------------------------------ */

static void add(merge *m, const ql_weight *w, const ql_param *p, const ql_lora_target *t)
{
    ql_st_decl *d = &m->decls[m->n];
    int64_t rows = w ? w->rows : p->rows, cols = w ? w->cols : p->cols;
    m->items[m->n++] = (item){w, p, t};
    *d = (ql_st_decl){.name = w ? w->name : p->name, .dtype = m->dtype, .ndim = w || rows > 1 ? 2 : 1};
    d->shape[0] = d->ndim == 2 ? rows : cols;
    d->shape[1] = cols;
    m->merged += t != NULL;
    m->total += rows * cols;
}

static void add_param(merge *m, const ql_param *p)
{
    if (p->data) add(m, NULL, p, NULL);
}

static ql_status list_tensors(merge *m)
{
    const ql_model *f = m->from;
    size_t most = (size_t)f->cfg.layers * (2 * QL_LINEARS + 4) + 3;
    m->items = calloc(most, sizeof *m->items);
    m->decls = calloc(most, sizeof *m->decls);
    if (!m->items || !m->decls) QL_FAIL(QL_ENOMEM, "merge: no memory for %zu tensors", most);
    add_param(m, &f->embed);
    for (int64_t l = 0; l < f->cfg.layers; l++) {
        const ql_block *b = &f->block[l];
        add_param(m, &b->norm_attn);
        add_param(m, &b->norm_ffn);
        add_param(m, &b->q_norm);
        add_param(m, &b->k_norm);
        for (int i = 0; i < QL_LINEARS; i++) {
            add(m, &b->w[i], NULL, ql_lora_find(m->lora, l, (ql_linear)i));
            add_param(m, &b->bias[i]);
        }
    }
    add_param(m, &f->norm);
    /* A tied head is the embedding: transformers makes it so from config.json. */
    if (!f->cfg.tied && f->head.data != f->embed.data) add_param(m, &f->head);
    return QL_OK;
}

static ql_status pick_dtype(merge *m, const char *name)
{
    if (!name || strcmp(name, "auto") == 0) {
        ql_dtype own = m->from->block[0].w[0].dtype;
        m->dtype = own == QL_F16 ? QL_F16 : QL_BF16;
        return QL_OK;
    }
    if (strcmp(name, "float16") != 0 && strcmp(name, "bfloat16") != 0)
        QL_FAIL(QL_EINVAL, "merge: dtype is auto, float16 or bfloat16, not '%.40s'", name);
    m->dtype = strcmp(name, "float16") == 0 ? QL_F16 : QL_BF16;
    return QL_OK;
}

/* ---- values ------------------------------------------------------------------------------------ */

/* values (n, K) += s · B[first … first + n) A */
static void add_adapter(const merge *m, const ql_lora_target *t, int64_t first, int64_t n)
{
    const float *a = m->flat + t->a, *b = m->flat + t->b;
    for (int64_t i = 0; i < n; i++) {
        float *row = m->values + i * t->k;
        for (int64_t j = 0; j < t->r; j++) {
            float x = t->scale * b[(first + i) * t->r + j];
            const float *from = a + j * t->k;
            for (int64_t k = 0; k < t->k; k++) row[k] += x * from[k];
        }
    }
}

static ql_status put_values(merge *m, int64_t index, const char *name, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        if (!isfinite(m->values[i]) || (m->dtype == QL_F16 && fabsf(m->values[i]) >= 65520.0f))
            QL_FAIL(QL_EINVAL, "merge: %s holds %g, which %s cannot: --dtype bfloat16 can", name, (double)m->values[i], ql_dtype_name(m->dtype));
        ql_float_put(m->rounded, m->dtype, i, m->values[i]);
    }
    return ql_st_put(m->writer, index, m->rounded, n * (int64_t)ql_dtype_size(m->dtype));
}

static ql_status moved(merge *m, const char *name, int64_t n)
{
    m->done += n;
    return m->tick ? m->tick(m->ctx, name, m->done, m->total) : QL_OK;
}

static ql_status write_linear(merge *m, int64_t index)
{
    const ql_weight *w = m->items[index].w;
    const ql_lora_target *t = m->items[index].target;
    int64_t step = ql_max64(1, CHUNK / w->cols);
    float *absmax = NULL;
    ql_status st = QL_OK;
    if (w->kind != QL_PLAIN) {
        absmax = malloc((size_t)w->blocks * sizeof *absmax);
        if (!absmax) QL_FAIL(QL_ENOMEM, "merge: no memory for the scales of %s", w->name);
        ql_weight_absmax(w, absmax);
    }
    for (int64_t at = 0; at < w->rows; at += step) {
        int64_t rows = ql_min64(step, w->rows - at);
        ql_weight_read(w, absmax, at * w->cols, rows * w->cols, m->values, QL_F32);
        if (t) add_adapter(m, t, at, rows);
        QL_GO(put_values(m, index, w->name, rows * w->cols));
        QL_GO(moved(m, "merge", rows * w->cols));
    }
    ql_model_done_with(m->from, w->data, w->bytes);
out:
    free(absmax);
    return st;
}

static ql_status write_param(merge *m, int64_t index)
{
    const ql_param *p = m->items[index].p;
    int64_t n = p->rows * p->cols;
    for (int64_t at = 0; at < n; at += CHUNK) {
        int64_t k = ql_min64(CHUNK, n - at);
        for (int64_t i = 0; i < k; i++) m->values[i] = ql_float_get(p->data, p->dtype, at + i);
        QL_TRY(put_values(m, index, p->name, k));
        QL_TRY(moved(m, "merge", k));
    }
    ql_model_done_with(m->from, p->data, n * (int64_t)ql_dtype_size(p->dtype));
    return QL_OK;
}

static ql_status write_weights(merge *m, const char *folder)
{
    static const char *const meta[] = {"format", "pt", NULL};
    char path[QL_PATH_MAX];
    int64_t widest = 1;
    for (int64_t i = 0; i < m->n; i++) widest = ql_max64(widest, m->items[i].w ? m->items[i].w->cols : 1);
    m->room = ql_max64(CHUNK, widest);
    m->values = malloc((size_t)m->room * 4);
    m->rounded = malloc((size_t)m->room * 2);
    if (!m->values || !m->rounded) QL_FAIL(QL_ENOMEM, "merge: no memory");
    QL_TRY(ql_path_join(path, folder, "model.safetensors"));
    QL_TRY(ql_st_create(path, m->decls, m->n, meta, &m->writer));
    for (int64_t i = 0; i < m->n; i++) QL_TRY(m->items[i].w ? write_linear(m, i) : write_param(m, i));
    return ql_st_commit(m->writer);
}

/* ---- files beside the weights -------------------------------------------------------------------- */

static ql_status write_config(const merge *m, const char *folder)
{
    char path[QL_PATH_MAX];
    json_t *o = NULL;
    QL_TRY(ql_path_join(path, m->from->path, "config.json"));
    QL_TRY(ql_json_load(path, 16 << 20, &o));
    json_object_del(o, "quantization_config");
    if (json_object_get(o, "dtype")) json_object_set_new(o, "dtype", json_string(ql_dtype_name(m->dtype)));
    if (json_object_get(o, "torch_dtype") || !json_object_get(o, "dtype"))
        json_object_set_new(o, "torch_dtype", json_string(ql_dtype_name(m->dtype)));
    ql_status st = ql_path_join(path, folder, "config.json");
    if (st == QL_OK) st = ql_json_save(path, o);
    json_decref(o);
    return st;
}

static ql_status copy_small(const char *from, const char *to)
{
    static const char *const names[] = {"generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                                        "added_tokens.json", "chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt",
                                        "tokenizer.model"};
    return ql_file_copy(from, to, names, sizeof names / sizeof *names);
}

/* ---- the command --------------------------------------------------------------------------------- */

static const char *str(const json_t *o, const char *key)
{
    const char *s = json_string_value(json_object_get(o, key));
    return s && *s ? s : NULL;
}

/* The original must be the same network: a wrong one would give a model that is neither. */
static ql_status same_shape(const ql_config *a, const ql_config *b)
{
    if (a->arch == b->arch && a->hidden == b->hidden && a->layers == b->layers && a->heads == b->heads && a->kv_heads == b->kv_heads &&
        a->head_dim == b->head_dim && a->ffn == b->ffn && a->vocab == b->vocab)
        return QL_OK;
    QL_FAIL(QL_EINVAL, "merge: the original (%s, %lld layers of %lld, vocabulary %lld) is another model than the base (%s, %lld of %lld, %lld)",
            ql_arch_name(b->arch), (long long)b->layers, (long long)b->hidden, (long long)b->vocab, ql_arch_name(a->arch),
            (long long)a->layers, (long long)a->hidden, (long long)a->vocab);
}

static ql_status open_all(merge *m, const json_t *c)
{
    const char *model = str(c, "model"), *adapter = str(c, "adapter"), *original = str(c, "original");
    if (!model) QL_FAIL(QL_EINVAL, "merge: no model: `load NAME` first");
    if (!adapter) QL_FAIL(QL_EINVAL, "merge: no adapter: name a run, or `train` first");
    QL_TRY(ql_model_open(model, &m->base));
    m->from = m->base;
    if (original) {
        QL_TRY(ql_model_open(original, &m->original));
        m->from = m->original;
        QL_TRY(same_shape(&m->base->cfg, &m->original->cfg));
        for (int64_t l = 0; l < m->original->cfg.layers; l++)
            for (int i = 0; i < QL_LINEARS; i++)
                if (m->original->block[l].w[i].kind != QL_PLAIN)
                    QL_FAIL(QL_EINVAL, "merge: the original is 4-bit itself (%s): leave it out, or give the 16-bit model", m->original->block[l].w[i].name);
    }
    QL_TRY(ql_lora_open(adapter, &m->base->cfg, &m->lora));
    m->flat = calloc((size_t)m->lora->elements, sizeof *m->flat);
    if (!m->flat) QL_FAIL(QL_ENOMEM, "merge: no memory for the adapter");
    return ql_lora_read(m->lora, adapter, m->flat);
}

/* The result must not take the place of what it is made from. */
static ql_status elsewhere(const ql_model *m, const char *to)
{
    char here[QL_PATH_MAX], there[QL_PATH_MAX];
    if (m && realpath(m->path, here) && realpath(to, there) && strcmp(here, there) == 0)
        QL_FAIL(QL_EINVAL, "merge: %s is the model itself: another folder, please", to);
    return QL_OK;
}

/* transformers puts an adapter that lies beside a model's weights on top of them when it loads them. */
static ql_status no_adapter_there(const char *to)
{
    char path[QL_PATH_MAX];
    QL_TRY(ql_path_join(path, to, "adapter_config.json"));
    if (ql_path_is_file(path))
        QL_FAIL(QL_EINVAL, "merge: %s holds an adapter (adapter_config.json), which transformers would add to the merged weights once more: "
                           "another folder, please", to);
    return QL_OK;
}

ql_status ql_merge(const json_t *command, ql_merge_tick tick, void *ctx, json_t **out)
{
    merge m = {.tick = tick, .ctx = ctx};
    const char *to = str(command, "out");
    ql_status st = QL_OK;
    if (!to) QL_FAIL(QL_EINVAL, "merge: no folder to write to");
    QL_GO(open_all(&m, command));
    QL_GO(pick_dtype(&m, str(command, "dtype")));
    QL_GO(list_tensors(&m));
    QL_GO(ql_path_mkdirs(to));
    QL_GO(elsewhere(m.base, to));
    QL_GO(elsewhere(m.original, to));
    QL_GO(no_adapter_there(to));
    QL_GO(write_weights(&m, to));
    QL_GO(copy_small(m.base->path, to));
    QL_GO(write_config(&m, to)); /* last: without it nothing takes the folder for a model */
    *out = json_pack("{s:s,s:b,s:I,s:I,s:I,s:s}", "path", to, "decoded", m.from->block[0].w[0].kind != QL_PLAIN, "bytes", (json_int_t)(m.total * (int64_t)ql_dtype_size(m.dtype)), "tensors",
                     (json_int_t)m.n, "merged", (json_int_t)m.merged, "dtype", ql_dtype_name(m.dtype));
    if (!*out) st = ql_fail(QL_ENOMEM, "no memory for the result");
out:
    ql_st_writer_close(m.writer);
    ql_lora_close(m.lora);
    ql_model_close(m.base);
    ql_model_close(m.original);
    free(m.flat);
    free(m.items);
    free(m.decls);
    free(m.values);
    free(m.rounded);
    return st;
}
