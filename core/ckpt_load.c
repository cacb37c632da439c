/* Reading checkpoints: every mismatch is named before anything is changed. */
#include "core/ckpt.h"
#include "core/ckpt_names.h"
#include "core/file.h"
#include "core/json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static ql_status check_model(const json_t *o, const ql_config *c)
{
    json_t *now = ql_ckpt_model(c), *then = json_object_get(o, "model"), *v;
    const char *key;
    ql_status st = now ? QL_OK : ql_fail(QL_ENOMEM, "checkpoint: out of memory");
    if (now && !json_is_object(then)) st = ql_fail(QL_EINVAL, "engine_state.json: 'model' must be an object");
    json_object_foreach(now, key, v) {
        if (st != QL_OK || json_equal(v, json_object_get(then, key))) continue;
        char a[64];
        snprintf(a, sizeof a, "%.60s", ql_json_show(json_object_get(then, key)));
        st = ql_fail(QL_EINVAL, "the checkpoint is of another model: its %s is %s, the loaded model's is %s", key, a, ql_json_show(v));
    }
    json_decref(now);
    return st;
}

#define OWN ": a run goes on with the adapters that it has; train --adapter starts another from them"

/* The adapter's table as the checkpoint has it, against the job's. */
static ql_status check_lora(const char *path, const ql_ckpt_of *of)
{
    ql_lora *l = NULL;
    const ql_lora *now = of->lora;
    ql_status st = QL_OK;
    QL_TRY(ql_lora_open(path, of->model, &l));
    if (l->cfg.r != now->cfg.r) QL_GO(ql_fail(QL_EINVAL, "r is %lld in the checkpoint and %lld in the job" OWN, (long long)l->cfg.r, (long long)now->cfg.r));
    if (l->cfg.rslora != now->cfg.rslora)
        QL_GO(ql_fail(QL_EINVAL, "use_rslora is %s in the checkpoint and %s in the job" OWN, l->cfg.rslora ? "true" : "false",
                      now->cfg.rslora ? "true" : "false"));
    for (int64_t layer = 0; layer < of->model->layers; layer++)
        for (int w = 0; w < QL_LINEARS; w++) {
            const ql_lora_target *a = ql_lora_find(l, layer, (ql_linear)w), *b = ql_lora_find(now, layer, (ql_linear)w);
            const char *module = ql_linear_module((ql_linear)w);
            if (!a && !b) continue;
            if (!a || !b)
                QL_GO(ql_fail(QL_EINVAL, "layer %lld %s has an adapter %s, target_modules differ" OWN, (long long)layer, module,
                              a ? "in the checkpoint only" : "in the job only"));
            if (a->r != b->r)
                QL_GO(ql_fail(QL_EINVAL, "the rank of layer %lld %s is %lld in the checkpoint and %lld in the job" OWN, (long long)layer, module,
                              (long long)a->r, (long long)b->r));
            if (a->alpha < b->alpha || a->alpha > b->alpha)
                QL_GO(ql_fail(QL_EINVAL, "lora_alpha of layer %lld %s is %g in the checkpoint and %g in the job" OWN, (long long)layer, module,
                              a->alpha, b->alpha));
        }
out:
    ql_lora_close(l);
    return st;
}

static ql_status read_part(const ql_st *st, const ql_ckpt_part *p)
{
    char have[256], want[256];
    const ql_st_tensor *t = ql_st_find(st, p->name);
    if (!t) QL_FAIL(QL_EINVAL, "optimizer.safetensors: tensor '%s' is missing", p->name);
    if (t->dtype != p->dtype || t->ndim != p->ndim || t->shape[0] != p->shape[0] || (p->ndim == 2 && t->shape[1] != p->shape[1]))
        QL_FAIL(QL_EINVAL, "optimizer.safetensors: tensor '%s' is %s %s, expected %s %s", p->name, ql_dtype_name(t->dtype),
                ql_st_shape(have, sizeof have, t->shape, t->ndim), ql_dtype_name(p->dtype), ql_st_shape(want, sizeof want, p->shape, p->ndim));
    if (!p->data) QL_FAIL(QL_EINTERNAL, "there is no room for the optimizer state '%s'", p->name);
    memcpy(p->data, t->data, (size_t)p->bytes);
    memset((char *)p->data + p->bytes, 0, (size_t)(p->padded - p->bytes));
    return QL_OK;
}

static ql_status read_optimizer(const char *path, const ql_ckpt_of *of, const ql_ckpt_state *s)
{
    char file[QL_PATH_MAX];
    ql_st *st = NULL;
    int64_t seen = 0;
    ql_status status = QL_OK;
    QL_TRY(ql_path_join(file, path, "optimizer.safetensors"));
    QL_TRY(ql_st_open(file, &st));
    for (int64_t i = 0; status == QL_OK && i < 2 * of->lora->count; i++) {
        ql_ckpt_tensor t;
        ql_ckpt_part part[QL_CKPT_PARTS];
        ql_ckpt_tensor_at(of->lora, i, &t);
        int n = ql_ckpt_parts(s, &t, part);
        for (int k = 0; status == QL_OK && k < n; k++) status = read_part(st, &part[k]);
        seen += n;
    }
    if (status == QL_OK && seen != ql_st_count(st))
        status = ql_fail(QL_EINVAL, "optimizer.safetensors: %lld tensors, expected %lld", (long long)ql_st_count(st), (long long)seen);
    ql_st_close(st);
    return status;
}

static ql_status read_scaler(const json_t *o, ql_ctl *ctl)
{
    const char *what = "engine_state.json scaler";
    const json_t *s = json_object_get(o, "scaler");
    double scale = 0;
    int64_t steps = 0, growth = 0, skips = 0;
    if (!json_is_object(s)) QL_FAIL(QL_EINVAL, "engine_state.json: 'scaler' must be an object");
    QL_TRY(ql_json_num(s, what, "loss_scale", 1e-37, 3e38, &scale));
    QL_TRY(ql_json_int(s, what, "steps", 0, INT32_MAX, &steps));
    QL_TRY(ql_json_int(s, what, "growth", 0, INT32_MAX, &growth));
    QL_TRY(ql_json_int(s, what, "skips", 0, INT32_MAX, &skips));
    *ctl = (ql_ctl){.loss_scale = (float)scale, .steps = (int32_t)steps, .growth = (int32_t)growth, .skips = (int32_t)skips};
    return QL_OK;
}

/* The place in the data follows from the step only while an epoch is cut into steps the same way. */
static ql_status check_data(const json_t *o, const ql_ckpt_of *of)
{
    const ql_steps *p = of->steps;
    const json_t *d = json_object_get(o, "data");
    const struct {
        const char *key, *text;
        int64_t now;
    } same[] = {{"rows", "samples in the training set", p->rows},
                {"batches", "micro-batches in an epoch", p->batches},
                {"group", "micro-batches in a step (gradient_accumulation_steps times devices)", p->group}};
    if (!json_is_object(d)) QL_FAIL(QL_EINVAL, "engine_state.json: 'data' must be an object");
    for (size_t i = 0; i < 3; i++) {
        int64_t then = 0;
        QL_TRY(ql_json_int(d, "engine_state.json data", same[i].key, 1, INT64_MAX / 2, &then));
        if (then != same[i].now)
            QL_FAIL(QL_EINVAL, "there were %lld %s when the checkpoint was written, there are %lld now: the place in the data is lost; "
                    "start afresh, or give what the run was given",
                    (long long)then, same[i].text, (long long)same[i].now);
    }
    return QL_OK;
}

/* Settings that differ and do not forbid a resume; where a run rests and how it is spread over devices is no difference. */
static ql_status differences(const json_t *o, const ql_job *job, json_t **out)
{
    json_t *then = json_object_get(o, "job");
    const ql_setting *s;
    int n = ql_settings(&s);
    json_t *notes = json_array();
    ql_job *old = NULL;
    ql_status st = notes ? QL_OK : ql_fail(QL_ENOMEM, "checkpoint: out of memory");
    if (st == QL_OK) st = ql_job_from_json(then, &old);
    for (int i = 0; st == QL_OK && i < n; i++) {
        const json_t *a = ql_job_get(old, s[i].name), *b = ql_job_get(job, s[i].name);
        char was[80];
        bool counts = strcmp(s[i].group, "lora") == 0 || strcmp(s[i].group, "data") == 0 || strcmp(s[i].group, "train") == 0 ||
                      strcmp(s[i].group, "model") == 0;
        /* a step's micro-batches are what counts, check_data compares them; what a run started from is past */
        if (strcmp(s[i].name, "gradient_accumulation_steps") == 0 || strcmp(s[i].name, "adapter") == 0) continue;
        if (!counts || s[i].note || s[i].refused || json_equal(a, b)) continue;
        snprintf(was, sizeof was, "%.70s", ql_json_show(a));
        json_array_append_new(notes, json_sprintf("%s: %s in the checkpoint, %s now", s[i].name, was, ql_json_show(b)));
    }
    ql_job_free(old);
    if (st == QL_OK) *out = notes;
    else json_decref(notes);
    return st;
}

static ql_status check_state(const json_t *o, const ql_ckpt_of *of, const ql_ckpt_state *s, int64_t *step)
{
    const char *what = "engine_state.json", *optimizer = NULL;
    int64_t version = 0;
    QL_TRY(ql_json_int(o, what, "version", 1, 1 << 20, &version));
    if (version != QL_CKPT_VERSION)
        QL_FAIL(QL_ENOSUP, "engine_state.json has version %lld, this engine reads %d", (long long)version, QL_CKPT_VERSION);
    QL_TRY(ql_json_int(o, what, "step", 0, (int64_t)1e12, step));
    QL_TRY(check_model(o, of->model));
    QL_TRY(ql_json_str(o, what, "optimizer", &optimizer));
    if (strcmp(optimizer, ql_ckpt_optimizer_name(s->optimizer)))
        QL_FAIL(QL_EINVAL, "the checkpoint's optimizer is %s, the job's is %s: give optim as the run had it", optimizer, ql_ckpt_optimizer_name(s->optimizer));
    return check_data(o, of);
}

ql_status ql_ckpt_load(const char *path, const ql_ckpt_of *of, ql_ckpt_state *s, ql_history *h, json_t **notes)
{
    char file[QL_PATH_MAX];
    json_t *o = NULL, *said = NULL;
    ql_ctl ctl;
    int64_t step = 0;
    ql_status st = QL_OK;
    if (!ql_path_is_dir(path)) QL_FAIL(QL_EINVAL, "there is no checkpoint %s", path);
    QL_TRY(ql_path_join(file, path, "engine_state.json"));
    if (!ql_path_is_file(file))
        QL_FAIL(QL_EINVAL, "%s has no engine_state.json: its adapter can be loaded, but a run cannot go on from it", path);
    QL_GO(ql_json_load(file, 64 << 20, &o));
    QL_GO(check_state(o, of, s, &step));
    QL_GO(read_scaler(o, &ctl));
    QL_GO(check_lora(path, of));
    QL_GO(differences(o, of->job, &said));
    QL_GO(ql_history_resume(h, path, json_object_get(o, "history")));
    if (ql_history_done(h) != step)
        QL_GO(ql_fail(QL_EINVAL, "engine_state.json is of step %lld, trainer_state.json of %lld", (long long)step, (long long)ql_history_done(h)));
    if (s->optimizer != QL_CKPT_NONE) QL_GO(read_optimizer(path, of, s));
    QL_GO(ql_lora_read(of->lora, path, s->adapters));
    s->ctl = ctl;
    *notes = said;
    said = NULL;
out:
    json_decref(said);
    json_decref(o);
    if (st != QL_OK) ql_error_prefix("%s: ", path);
    return st;
}
