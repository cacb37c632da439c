/* PEFT's adapter folders. */
#include "core/file.h"
#include "core/hub.h"
#include "core/json.h"
#include "core/lora.h"
#include "kernels/half.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const int64_t CONFIG_MAX = 16 << 20;
enum { NAME_ROOM = 128, CHUNK = 65536 };

typedef enum { PART_A, PART_B } part;

static void tensor_name(char out[NAME_ROOM], const ql_lora_target *t, part p)
{
    snprintf(out, NAME_ROOM, "base_model.model.model.layers.%lld.%s.lora_%c.weight",
             (long long)t->layer, ql_linear_module(t->linear), p == PART_A ? 'A' : 'B');
}

static ql_status put(ql_st_writer *w, int64_t i, const float *x, int64_t n, ql_dtype dtype)
{
    if (dtype == QL_F32) return ql_st_put(w, i, x, 4 * n);
    uint16_t buf[CHUNK];
    for (int64_t at = 0; at < n; at += CHUNK) {
        int64_t k = ql_min64(CHUNK, n - at);
        for (int64_t j = 0; j < k; j++) ql_float_put(buf, dtype, j, x[at + j]);
        QL_TRY(ql_st_put(w, i, buf, 2 * k));
    }
    return QL_OK;
}

static ql_status save_tensors(const ql_lora *l, const float *flat, ql_dtype dtype, const char *path)
{
    static const char *const meta[] = {"format", "pt", NULL};
    ql_status st = QL_OK;
    ql_st_writer *w = NULL;
    int64_t n = 2 * l->count;
    ql_st_decl *d = calloc((size_t)n, sizeof *d);
    char(*names)[NAME_ROOM] = calloc((size_t)n, sizeof *names);
    if (!d || !names) {
        st = ql_fail(QL_ENOMEM, "no memory for writing %s", path);
        goto out;
    }
    for (int64_t i = 0; i < n; i++) {
        const ql_lora_target *t = &l->target[i / 2];
        part p = i % 2 ? PART_B : PART_A;
        tensor_name(names[i], t, p);
        d[i] = (ql_st_decl){
            names[i], dtype, 2, {p == PART_A ? t->r : t->n, p == PART_A ? t->k : t->r}};
    }
    QL_GO(ql_st_create(path, d, n, meta, &w));
    for (int64_t i = 0; i < l->count; i++) {
        const ql_lora_target *t = &l->target[i];
        QL_GO(put(w, 2 * i, flat + t->a, t->r * t->k, dtype));
        QL_GO(put(w, 2 * i + 1, flat + t->b, t->n * t->r, dtype));
    }
    QL_GO(ql_st_commit(w));
out:
    ql_st_writer_close(w);
    free(names);
    free(d);
    return st;
}

static ql_status save_card(const ql_lora *l, const char *folder)
{
    char path[QL_PATH_MAX], text[QL_PATH_MAX + 512];
    /* A folder of this machine is no base that the hub knows: it refuses cards that name one. */
    const char *base = l->cfg.base && ql_hub_is_repo(l->cfg.base) ? l->cfg.base : "";
    json_t *quoted = json_string(base);
    char *name = quoted ? json_dumps(quoted, JSON_ENCODE_ANY) : NULL;
    json_decref(quoted);
    if (!name || strlen(name) > QL_PATH_MAX) {
        free(name);
        QL_FAIL(QL_EINVAL, "a base model's name of %zu bytes cannot be written", strlen(base));
    }
    int n = snprintf(text, sizeof text,
                     "---\n%s%s%slibrary_name: peft\npipeline_tag: "
                     "text-generation\ntags:\n- lora\n---\n\n"
                     "LoRA adapter: rank %lld, alpha %g, %lld parameters. Load it with "
                     "`PeftModel.from_pretrained(base, folder)`.\n",
                     *base ? "base_model: " : "", *base ? name : "", *base ? "\n" : "", (long long)l->cfg.r, l->cfg.alpha, (long long)l->params);
    free(name);
    QL_TRY(ql_path_join(path, folder, "README.md"));
    return ql_file_save(path, text, (size_t)n);
}

ql_status ql_lora_save(const ql_lora *l, const float *flat, ql_dtype dtype, const char *folder)
{
    char path[QL_PATH_MAX];
    if (!ql_dtype_float(dtype))
        QL_FAIL(QL_EINVAL, "an adapter cannot be saved as %s", ql_dtype_name(dtype));
    QL_TRY(ql_path_mkdirs(folder));
    QL_TRY(ql_path_join(path, folder, "adapter_model.safetensors"));
    QL_TRY(save_tensors(l, flat, dtype, path));
    QL_TRY(ql_path_join(path, folder, "adapter_config.json"));
    json_t *o = ql_lora_config_json(&l->cfg);
    ql_status st = ql_json_save(path, o);
    json_decref(o);
    QL_TRY(st);
    return save_card(l, folder);
}

ql_status ql_lora_open(const char *folder, const ql_config *m, ql_lora **out)
{
    char path[QL_PATH_MAX];
    json_t *o = NULL;
    ql_lora_config c = {0};
    QL_TRY(ql_path_join(path, folder, "adapter_config.json"));
    if (!ql_path_is_file(path))
        QL_FAIL(QL_EINVAL, "%s has no adapter_config.json: not a PEFT adapter", folder);
    QL_TRY(ql_json_load(path, CONFIG_MAX, &o));
    ql_status st = ql_lora_config_parse(o, "adapter_config.json", &c);
    json_decref(o);
    QL_TRY(st);
    c.saved = true;
    st = ql_lora_build(m, &c, out);
    if (st != QL_OK) ql_error_prefix("adapter_config.json: ");
    return st;
}

/* A tensor that is not this adapter's; says what it seems to be. */
static ql_status unexpected(const char *name, const char *missing)
{
    const char *kind = "is not part of the adapter that adapter_config.json describes";
    if (strstr(name, "lora_magnitude_vector"))
        kind = "belongs to DoRA, which is not supported";
    else if (strstr(name, ".lora_B.bias"))
        kind = "belongs to lora_bias, which is not supported";
    else if (strstr(name, "lora_embedding_"))
        kind = "is an embedding's adapter, which is not supported";
    else if (!strstr(name, ".lora_"))
        kind = "belongs to modules_to_save, which is not supported";
    QL_FAIL(QL_ENOSUP, "adapter_model.safetensors: tensor '%.200s' %s%s%s%s", name, kind,
            missing ? "; '" : "", missing ? missing : "", missing ? "' is missing" : "");
}

static ql_status check_names(const ql_lora *l, const ql_st *st)
{
    char name[NAME_ROOM], missing[NAME_ROOM];
    const char *lost = NULL;
    int64_t found = 0, n = ql_st_count(st);
    unsigned char *used = calloc((size_t)n + 1, 1);
    if (!used) QL_FAIL(QL_ENOMEM, "no memory for an adapter's table");
    for (int64_t i = 0; i < 2 * l->count; i++) {
        tensor_name(name, &l->target[i / 2], i % 2 ? PART_B : PART_A);
        const ql_st_tensor *t = ql_st_find(st, name);
        if (t) {
            used[t - ql_st_at(st, 0)] = 1;
            found++;
        } else if (!lost) {
            memcpy(missing, name, sizeof missing);
            lost = missing;
        }
    }
    const char *extra = NULL;
    for (int64_t i = 0; i < n && !extra; i++)
        if (!used[i]) extra = ql_st_at(st, i)->name;
    free(used);
    if (extra) return unexpected(extra, lost);
    if (lost)
        QL_FAIL(QL_EINVAL,
                "adapter_model.safetensors: tensor '%s' is missing (%lld of %lld are there)", lost,
                (long long)found, (long long)(2 * l->count));
    return QL_OK;
}

static ql_status read_part(const ql_st *st, const ql_lora_target *t, part p, float *flat)
{
    char name[NAME_ROOM], shape[256];
    int64_t rows = p == PART_A ? t->r : t->n, cols = p == PART_A ? t->k : t->r;
    float *out = flat + (p == PART_A ? t->a : t->b);
    tensor_name(name, t, p);
    const ql_st_tensor *x = ql_st_find(st, name);
    if (!ql_dtype_float(x->dtype))
        QL_FAIL(QL_EINVAL,
                "adapter_model.safetensors: tensor '%s' has dtype %s; supported: float32, "
                "float16, bfloat16",
                name, ql_dtype_name(x->dtype));
    if (x->ndim != 2 || x->shape[0] != rows || x->shape[1] != cols)
        QL_FAIL(QL_EINVAL,
                "adapter_model.safetensors: tensor '%s' has shape %s, expected [%lld, %lld]", name,
                ql_st_shape(shape, sizeof shape, x->shape, x->ndim), (long long)rows,
                (long long)cols);
    for (int64_t i = 0; i < x->count; i++) {
        out[i] = ql_float_get(x->data, x->dtype, i);
        if (!isfinite(out[i]))
            QL_FAIL(QL_EINVAL,
                    "adapter_model.safetensors: tensor '%s' has a value that is not finite at "
                    "[%lld, %lld]",
                    name, (long long)(i / cols), (long long)(i % cols));
    }
    return QL_OK;
}

ql_status ql_lora_read(const ql_lora *l, const char *folder, float *flat)
{
    char path[QL_PATH_MAX], bin[QL_PATH_MAX];
    ql_status s = QL_OK;
    ql_st *st = NULL;
    QL_TRY(ql_path_join(path, folder, "adapter_model.safetensors"));
    QL_TRY(ql_path_join(bin, folder, "adapter_model.bin"));
    if (!ql_path_is_file(path) && ql_path_is_file(bin))
        QL_FAIL(QL_ENOSUP, "%s holds adapter_model.bin only; adapter_model.safetensors is needed",
                folder);
    QL_TRY(ql_st_open(path, &st));
    s = check_names(l, st);
    if (s == QL_OK) memset(flat, 0, (size_t)l->elements * sizeof *flat);
    for (int64_t i = 0; s == QL_OK && i < l->count; i++) {
        s = read_part(st, &l->target[i], PART_A, flat);
        if (s == QL_OK) s = read_part(st, &l->target[i], PART_B, flat);
    }
    ql_st_close(st);
    return s;
}
