/* The saved adapter against the one on the devices, the run's first loss done again, and its record of losses. */
#include "core/verify.h"

#include "core/hash.h"
#include "core/lora_job.h"
#include "core/qlora.h"
#include "kernels/half.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Loss of a step's micro-batches with the adapters as they are. d->step 0: without dropout. */
static ql_status loss_of(ql_verify *v, const ql_step_data *d, float *loss)
{
    ql_choice c = v->t->spec.choice;
    ql_plan p;
    float *nll = malloc((size_t)c.g * sizeof *nll);
    if (!nll) QL_FAIL(QL_ENOMEM, "verify: no memory for losses");
    c.train = 0;
    if (!ql_plan_piped(&c)) c.schedule = QL_LOOP;
    ql_status st = ql_plan_build(&c, v->r->set.rank, d->g, &p);
    if (st == QL_OK) {
        double sum = 0;
        st = ql_rank_forward(v->r, &p, d, nll);
        ql_plan_free(&p);
        /* As ql_rank_step does it, to the bit. */
        for (int i = 0; st == QL_OK && i < d->g; i++) sum += nll[i];
        *loss = (float)(d->items > 0 ? sum / (double)d->items : 0);
    }
    free(nll);
    return st;
}

/* The fixed batch: the first step's data, without dropout; of the evaluation set where there is no other. */
static ql_status fixed_batch(ql_verify *v, ql_step_data *d, int32_t **order)
{
    const ql_dataset *data = v->t->train ? v->t->train : v->t->eval;
    int64_t n = ql_dataset_size(data), b = v->t->train ? v->t->args.batch : v->t->args.eval_batch;
    int32_t *o = malloc((size_t)n * sizeof *o);
    if (!o) QL_FAIL(QL_ENOMEM, "verify: no memory for the order of %lld samples", (long long)n);
    for (int64_t i = 0; i < n; i++) o[i] = (int32_t)i;
    *d = (ql_step_data){.data = data, .order = o, .n = n, .batch = b, .pad_id = v->t->pad_id,
                        .g = (int)ql_min64(v->t->spec.choice.g, ql_ceil_div(n, b))};
    d->items = ql_step_items(d);
    *order = o;
    return QL_OK;
}

/* The folder that holds the run's adapter: its own, or the last checkpoint's. 0: there is none. */
static int adapter_folder(const json_t *report, const char *run, char out[QL_PATH_MAX])
{
    char file[QL_PATH_MAX];
    const json_t *all = json_object_get(report, "checkpoints");
    const char *last = json_string_value(json_object_get(json_array_get(all, json_array_size(all) - 1), "path"));
    if (ql_path_join(file, run, "adapter_model.safetensors") == QL_OK && ql_path_is_file(file))
        return snprintf(out, QL_PATH_MAX, "%s", run) < QL_PATH_MAX;
    ql_error_clear();
    return last && snprintf(out, QL_PATH_MAX, "%s", last) < QL_PATH_MAX;
}

/* All ranks' numbers: the first, and whether they agree. */
static ql_status agree(ql_verify *v, uint64_t x, int *same)
{
    uint64_t all[QL_MAX_WORLD];
    QL_TRY(ql_verify_share(v, &x, (int64_t)sizeof x, all));
    *same = 1;
    for (int i = 0; i < v->r->set.world; i++) *same &= all[i] == x;
    return QL_OK;
}

static int64_t empty_tensors(const ql_lora *l, const float *flat)
{
    int64_t empty = 0;
    for (int64_t i = 0; i < l->count; i++) {
        const ql_lora_target *t = &l->target[i];
        int64_t k = 0;
        while (k < t->n * t->r && flat[t->b + k] == 0) k++;
        empty += k == t->n * t->r;
    }
    return empty;
}

/* The file's values are the devices' bits, on every device, and give the same loss. */
static ql_status check_held(ql_verify *v, const float *file, float *held, const ql_step_data *d, float reloaded)
{
    const ql_lora *l = v->t->lora;
    float loss = 0;
    int64_t differ = 0;
    int same, ranks;
    /* A file of fewer bits holds rounded values: those are what it can be compared with. */
    for (int64_t i = 0; i < l->elements; i++) held[i] = ql_float_round(held[i], v->t->args.save_dtype);
    for (int64_t i = 0; i < l->elements; i++) differ += ql_f32_bits(held[i]) != ql_f32_bits(file[i]);
    QL_TRY(agree(v, ql_hash64(0, held, (size_t)l->elements * 4), &ranks));
    QL_TRY(ql_rank_set_adapters(v->r, held));
    QL_TRY(loss_of(v, d, &loss));
    same = ql_f32_bits(loss) == ql_f32_bits(reloaded);
    ql_verify_check(v, "adapter reloaded", same && !differ && ranks,
                    "%lld of %lld values of the file are the bits on %s; loss on a fixed batch %.6f (%08x) from the devices, %.6f (%08x) from the file",
                    (long long)(l->elements - differ), (long long)l->elements, ranks ? (v->r->set.world > 1 ? "all devices" : "the device") : "one device, and the devices differ",
                    (double)loss, ql_f32_bits(loss), (double)reloaded, ql_f32_bits(reloaded));
    return QL_OK;
}

static ql_status check_adapter(ql_verify *v, const char *folder, const char *run, const ql_step_data *d)
{
    const ql_lora *l = v->t->lora;
    size_t bytes = (size_t)l->elements * 4;
    float *file = calloc(1, bytes), *held = calloc(1, bytes), with = 0, without = 0;
    ql_status st = QL_OK;
    if (!file || !held) QL_GO(ql_fail(QL_ENOMEM, "verify: no host memory for the adapters"));
    QL_GO(ql_rank_get_adapters(v->r, held));
    QL_GO(ql_lora_read(l, folder, file));
    int64_t empty = empty_tensors(l, file);
    QL_GO(ql_rank_set_adapters(v->r, file));
    QL_GO(loss_of(v, d, &with));
    if (strcmp(v->w->holds, run) == 0) {
        float *copy = malloc(bytes);
        if (!copy) QL_GO(ql_fail(QL_ENOMEM, "verify: no host memory for the adapters"));
        memcpy(copy, held, bytes);
        st = check_held(v, file, copy, d, with);
        free(copy);
        QL_GO(st);
    }
    float *zero = calloc(1, bytes);
    if (!zero) QL_GO(ql_fail(QL_ENOMEM, "verify: no host memory for the adapters"));
    st = ql_rank_set_adapters(v->r, zero);
    free(zero);
    QL_GO(st);
    QL_GO(loss_of(v, d, &without));
    ql_verify_check(v, "adapter file", empty == 0 && isfinite(with) && ql_f32_bits(with) != ql_f32_bits(without),
                    "%lld pairs of tensors, %lld of them untrained; loss on a fixed batch %.6f (%08x) with it, %.6f without", (long long)l->count,
                    (long long)empty, (double)with, ql_f32_bits(with), (double)without);
    QL_GO(ql_rank_set_adapters(v->r, strcmp(v->w->holds, run) == 0 ? held : file));
out:
    free(file);
    free(held);
    return st;
}

/* The run's first loss, done again: the adapters it began with, the same samples, the same dropout. */
static ql_status check_first(ql_verify *v, const json_t *report)
{
    const ql_task *t = v->t;
    const json_t *start = json_object_get(report, "start"), *first = NULL, *e;
    size_t i, bytes = (size_t)t->lora->elements * 4;
    json_array_foreach((json_t *)(uintptr_t)json_object_get(report, "log_history"), i, e)
        if (json_integer_value(json_object_get(e, "step")) == 1 && json_object_get(e, "loss_bits")) first = e;
    const char *bits = json_string_value(json_object_get(first, "loss_bits"));
    if (!t->train || !bits || json_integer_value(json_object_get(start, "samples_per_step")) != t->args.batch * t->steps.group) return QL_OK;
    float *held = calloc(1, bytes), *fresh = calloc(1, bytes), loss = 0;
    ql_step_data d;
    char now[16];
    ql_status st = QL_OK;
    if (!held || !fresh) QL_GO(ql_fail(QL_ENOMEM, "verify: no host memory for the adapters"));
    QL_GO(ql_rank_get_adapters(v->r, held));
    QL_GO(ql_lora_first(t->lora, t->job, fresh));
    QL_GO(ql_rank_set_adapters(v->r, fresh));
    QL_GO(ql_train_data(v->w, 0, &d));
    QL_GO(loss_of(v, &d, &loss));
    QL_GO(ql_rank_set_adapters(v->r, held));
    snprintf(now, sizeof now, "%08x", ql_f32_bits(loss));
    ql_verify_check(v, "first loss again", strcmp(now, bits) == 0, "step 1 done again: %.6f (%s) now on %d device%s, %s in the run's record of %lld",
                    (double)loss, now, v->r->set.world, v->r->set.world > 1 ? "s" : "", bits, (long long)json_integer_value(json_object_get(start, "world")));
out:
    free(held);
    free(fresh);
    return st;
}

/* The record of losses: every step once, each a number. */
static void check_history(ql_verify *v, const json_t *report)
{
    const json_t *e, *history = json_object_get(report, "log_history");
    double first = (double)NAN, last = (double)NAN;
    int64_t n = 0, holes = 0, at = 0, bad = 0;
    size_t i;
    json_array_foreach((json_t *)(uintptr_t)history, i, e)
    {
        const json_t *loss = json_object_get(e, "loss");
        int64_t step = json_integer_value(json_object_get(e, "step"));
        if (!loss) continue;
        bad += !json_is_number(loss) && !json_is_true(json_object_get(e, "skipped"));
        holes += step != at + 1 && json_object_get(e, "loss_bits");
        at = step;
        if (json_is_number(loss)) last = json_number_value(loss);
        if (n++ == 0) first = last;
    }
    if (n == 0) return;
    ql_verify_check(v, "losses", bad == 0 && holes == 0, "%lld record%s up to step %lld, %.4f to %.4f; %lld not a number, %lld out of order", (long long)n,
                    n == 1 ? "" : "s", (long long)at, first, last, (long long)bad, (long long)holes);
}

ql_status ql_verify_adapters(ql_verify *v, const char *run)
{
    char folder[QL_PATH_MAX];
    json_t *report = NULL;
    int32_t *order = NULL;
    ql_step_data d;
    ql_status st = QL_OK;
    if (!run) return QL_OK;
    QL_TRY(ql_run_report(run, &report));
    if ((v->t->train || v->t->eval) && adapter_folder(report, run, folder)) {
        QL_GO(fixed_batch(v, &d, &order));
        QL_GO(check_adapter(v, folder, run, &d));
        QL_GO(check_first(v, report));
    }
    check_history(v, report);
out:
    free(order);
    json_decref(report);
    return st;
}
