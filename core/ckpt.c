/* Writing checkpoints. */
#include "core/ckpt.h"
#include "core/ckpt_names.h"
#include "core/file.h"
#include "core/json.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- tensors -------------------------------------------------------------------------------------- */

void ql_ckpt_tensor_at(const ql_lora *l, int64_t i, ql_ckpt_tensor *out)
{
    const ql_lora_target *t = &l->target[i / 2];
    bool b = i % 2;
    *out = b ? (ql_ckpt_tensor){t->b, t->b_len, t->n, t->r, ""} : (ql_ckpt_tensor){t->a, t->a_len, t->r, t->k, ""};
    snprintf(out->name, sizeof out->name, "base_model.model.model.layers.%lld.%s.lora_%c.weight", (long long)t->layer,
             ql_linear_module(t->linear), b ? 'B' : 'A');
}

static ql_ckpt_part part_f32(const char *name, const char *suffix, const ql_ckpt_tensor *t, float *base)
{
    ql_ckpt_part p = {.dtype = QL_F32, .ndim = 2, .shape = {t->rows, t->cols}, .data = base ? base + t->at : NULL,
                      .bytes = 4 * t->rows * t->cols, .padded = 4 * t->len};
    snprintf(p.name, sizeof p.name, "%.140s.%s", name, suffix);
    return p;
}

/* Codes and scales cover the padding too. */
static ql_ckpt_part part_flat(const char *name, const char *suffix, ql_dtype dtype, int64_t n, void *data)
{
    ql_ckpt_part p = {.dtype = dtype, .ndim = 1, .shape = {n, 0}, .data = data, .bytes = n * (int64_t)ql_dtype_size(dtype)};
    p.padded = p.bytes;
    snprintf(p.name, sizeof p.name, "%.140s.%s", name, suffix);
    return p;
}

int ql_ckpt_parts(const ql_ckpt_state *s, const ql_ckpt_tensor *t, ql_ckpt_part out[QL_CKPT_PARTS])
{
    int64_t scales = t->len / QL_CKPT_BLOCK, at = t->at / QL_CKPT_BLOCK;
    if (s->optimizer == QL_CKPT_NONE) return 0;
    if (s->optimizer == QL_CKPT_F32 || t->rows * t->cols < QL_CKPT_SMALL) {
        out[0] = part_f32(t->name, "m", t, s->m);
        out[1] = part_f32(t->name, "v", t, s->v);
        return 2;
    }
    out[0] = part_flat(t->name, "m", QL_U8, t->len, s->m8 + t->at);
    out[1] = part_flat(t->name, "v", QL_U8, t->len, s->v8 + t->at);
    out[2] = part_flat(t->name, "m.absmax", QL_F32, scales, s->m2 + at);
    out[3] = part_flat(t->name, "v.absmax", QL_F32, scales, s->v2 + at);
    return 4;
}

static ql_status save_optimizer(const ql_ckpt_of *of, const ql_ckpt_state *s, const char *dir)
{
    static const char *const meta[] = {"format", "pt", NULL};
    char path[QL_PATH_MAX];
    ql_status st = QL_OK;
    ql_st_writer *w = NULL;
    int64_t count = 2 * of->lora->count, n = 0;
    ql_ckpt_part *part = calloc((size_t)(count * QL_CKPT_PARTS) + 1, sizeof *part);
    ql_st_decl *decl = calloc((size_t)(count * QL_CKPT_PARTS) + 1, sizeof *decl);
    if (!part || !decl) QL_GO(ql_fail(QL_ENOMEM, "optimizer.safetensors: out of memory"));
    for (int64_t i = 0; i < count; i++) {
        ql_ckpt_tensor t;
        ql_ckpt_tensor_at(of->lora, i, &t);
        n += ql_ckpt_parts(s, &t, part + n);
    }
    for (int64_t i = 0; i < n; i++) {
        if (!part[i].data) QL_GO(ql_fail(QL_EINTERNAL, "optimizer state of '%s' was not handed over", part[i].name));
        decl[i] = (ql_st_decl){part[i].name, part[i].dtype, part[i].ndim, {part[i].shape[0], part[i].shape[1]}};
    }
    QL_GO(ql_path_join(path, dir, "optimizer.safetensors"));
    QL_GO(ql_st_create(path, decl, n, meta, &w));
    for (int64_t i = 0; i < n; i++) QL_GO(ql_st_put(w, i, part[i].data, part[i].bytes));
    QL_GO(ql_st_commit(w));
out:
    ql_st_writer_close(w);
    free(decl);
    free(part);
    return st;
}

/* ---- engine_state.json ---------------------------------------------------------------------------- */

const char *ql_ckpt_optimizer_name(ql_ckpt_optimizer o)
{
    static const char *const names[] = {"none", "adamw (32-bit states)", "adamw (8-bit states)"};
    return names[o];
}

json_t *ql_ckpt_model(const ql_config *c)
{
    return json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "arch", ql_arch_name(c->arch), "hidden", (json_int_t)c->hidden, "layers",
                     (json_int_t)c->layers, "heads", (json_int_t)c->heads, "kv_heads", (json_int_t)c->kv_heads, "head_dim",
                     (json_int_t)c->head_dim, "ffn", (json_int_t)c->ffn, "vocab", (json_int_t)c->vocab);
}

static json_t *engine_state(const ql_ckpt_of *of, const ql_ckpt_state *s, const ql_history *h)
{
    const ql_steps *p = of->steps;
    const ql_args *a = of->args;
    int64_t step = ql_history_done(h);
    ql_step_at next = ql_steps_at(p, step);
    return json_pack("{s:i, s:I, s:s, s:{s:f, s:I, s:I, s:I}, s:{s:I, s:I, s:I, s:I, s:I, s:I, s:I}, s:o, s:o, s:o}", "version", QL_CKPT_VERSION,
                     "step", (json_int_t)step, "optimizer", ql_ckpt_optimizer_name(s->optimizer), "scaler", "loss_scale",
                     (double)s->ctl.loss_scale, "steps", (json_int_t)s->ctl.steps, "growth", (json_int_t)s->ctl.growth, "skips",
                     (json_int_t)s->ctl.skips, "data", "rows", (json_int_t)p->rows, "batches", (json_int_t)p->batches, "group",
                     (json_int_t)p->group, "epoch", (json_int_t)next.epoch, "first", (json_int_t)next.first, "seed", (json_int_t)a->seed,
                     "data_seed", (json_int_t)a->data_seed, "model", ql_ckpt_model(of->model), "history", ql_history_rest(h), "job",
                     ql_job_json(of->job));
}

static ql_status save_state(const ql_ckpt_of *of, const ql_ckpt_state *s, const ql_history *h, const char *dir)
{
    char path[QL_PATH_MAX];
    json_t *o = engine_state(of, s, h);
    ql_status st = o ? ql_path_join(path, dir, "engine_state.json") : ql_fail(QL_ENOMEM, "engine_state.json: out of memory");
    if (st == QL_OK) st = ql_json_save(path, o);
    json_decref(o);
    return st;
}

/* ---- tokenizer files ------------------------------------------------------------------------------ */

static ql_status copy_tokenizer(const char *from, const char *to)
{
    static const char *const files[] = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
                                        "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json"};
    return ql_file_copy(from, to, files, sizeof files / sizeof *files);
}

/* ---- the folder ----------------------------------------------------------------------------------- */

/* temp becomes final. A checkpoint of the same step (of a run that went on from an earlier one) changes places with it in one
 * move; on file systems without that there are two, and ql_ckpt_mend undoes the first if the second never came. */
static ql_status put_in_place(const char *run, const char *temp, const char *final, int64_t step)
{
    char old[QL_PATH_MAX], name[64];
    snprintf(name, sizeof name, ".checkpoint-%lld.old", (long long)step);
    QL_TRY(ql_path_join(old, run, name));
    ql_path_remove(old);
    if (ql_path_is_dir(final)) {
        if (renameat2(AT_FDCWD, temp, AT_FDCWD, final, RENAME_EXCHANGE) == 0) {
            QL_TRY(ql_path_sync(run));
            ql_path_remove(temp); /* the old one now */
            return QL_OK;
        }
        if (rename(final, old) != 0) QL_FAIL(QL_EIO, "cannot rename %s: %s", final, strerror(errno));
    }
    if (rename(temp, final) != 0) {
        int err = errno;
        if (ql_path_is_dir(old)) rename(old, final);
        QL_FAIL(QL_EIO, "cannot rename %s to %s: %s", temp, final, strerror(err));
    }
    QL_TRY(ql_path_sync(run));
    ql_path_remove(old);
    return QL_OK;
}

static ql_status fill(const char *dir, const ql_ckpt_of *of, const ql_ckpt_state *s, const ql_history *h)
{
    QL_TRY(ql_lora_save(of->lora, s->adapters, QL_F32, dir));
    if (s->optimizer != QL_CKPT_NONE) QL_TRY(save_optimizer(of, s, dir));
    if (of->tokenizer) QL_TRY(copy_tokenizer(of->tokenizer, dir));
    QL_TRY(ql_history_save(h, dir));
    QL_TRY(save_state(of, s, h, dir));
    return ql_path_sync(dir);
}

ql_status ql_ckpt_save(const char *run, const ql_ckpt_of *of, const ql_ckpt_state *s, ql_history *h, char path[QL_PATH_MAX])
{
    char temp[QL_PATH_MAX], name[64];
    int64_t step = ql_history_done(h);
    ql_status st;
    QL_TRY(ql_path_mkdirs(run));
    ql_ckpt_mend(run);
    ql_ckpt_sweep(run);
    snprintf(name, sizeof name, ".checkpoint-%lld.tmp", (long long)step);
    QL_TRY(ql_path_join(temp, run, name));
    QL_TRY(ql_path_join(path, run, name + 1));
    path[strlen(path) - 4] = 0;
    st = ql_path_mkdirs(temp);
    /* trainer_state.json names the best checkpoint, which may be this one */
    if (st == QL_OK) st = ql_history_saved(h, step, path);
    if (st == QL_OK) st = fill(temp, of, s, h);
    if (st == QL_OK) st = put_in_place(run, temp, path, step);
    if (st != QL_OK) {
        ql_path_remove(temp);
        ql_error_prefix("checkpoint-%lld was not written, earlier ones are untouched (--save_total_limit keeps fewer of them): ", (long long)step);
    }
    return st;
}
