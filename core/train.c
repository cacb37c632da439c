#include "core/train.h"

#include "core/file.h"
#include "core/history.h"
#include "core/lora_job.h"
#include "core/sampler.h"
#include "core/save.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

double ql_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* One training run at work. */
typedef struct {
    ql_worker *w;
    ql_task *t;
    ql_rank *r;
    const char *dir;           /* runs/<name> */
    ql_history *history;
    int64_t from, done, until; /* optimizer steps: what this command went on from, −1 for nothing; made; where it ends */
    double began, last_memory, last_save;
    int64_t tokens;            /* trained on in this session */
    char checkpoint[QL_PATH_MAX];
    int64_t checkpoint_step;
    int lost;                  /* said that the adapters hold no numbers any more */
} run;

static int first_rank(const run *x)
{
    return x->w->p->rank == 0;
}

/* ---- data order ------------------------------------------------------------------------------- */

static ql_status order_of(ql_worker *w, int64_t epoch)
{
    const ql_task *t = w->task;
    int64_t n = ql_dataset_size(t->train);
    if (w->order && w->order_epoch == epoch && w->order_n == n) return QL_OK;
    int32_t *o = realloc(w->order, (size_t)n * sizeof *o);
    if (!o) QL_FAIL(QL_ENOMEM, "no memory for the order of %lld samples", (long long)n);
    w->order = o;
    w->order_n = n, w->order_epoch = epoch;
    if (t->args.order_file) return ql_sampler_file(t->args.order_file, epoch, n, o);
    if (t->args.order == QL_ORDER_SEQUENTIAL) {
        for (int64_t i = 0; i < n; i++) o[i] = (int32_t)i;
        return QL_OK;
    }
    return ql_sampler_order(t->args.data_seed, epoch, n, o);
}

/* bfd packs rows that are never padded, and whose documents' first labels are masked; wrapped rows are rows like any other. */
static int padding_free(const ql_task *t)
{
    const char *how = ql_job_str(t->job, "packing_strategy");
    return ql_dataset_packed(t->train) && !(how && strcmp(how, "wrapped") == 0);
}

/* Samples of the step whose first label counts. Nothing predicts it, but older transformers divide by it too. */
static int64_t first_labels(const ql_step_data *d)
{
    int64_t n = 0, len, end = ql_min64(d->n, (d->first + d->g) * d->batch);
    for (int64_t at = d->first * d->batch; at < end; at++) {
        const uint32_t *tok = ql_dataset_part(d->data, d->order[at], 0, &len);
        n += len > 0 && !(tok[0] & QL_MASKED);
    }
    return n;
}

ql_status ql_train_data(ql_worker *w, int64_t step, ql_step_data *d)
{
    const ql_task *t = w->task;
    ql_step_at at = ql_steps_at(&t->steps, step);
    QL_TRY(order_of(w, at.epoch));
    *d = (ql_step_data){.data = t->train, .order = w->order, .n = t->steps.rows, .first = at.first, .batch = t->args.batch,
                        .g = (int)at.count, .pad_id = t->pad_id, .step = (uint32_t)(step + 1)};
    d->items = ql_step_items(d);
    if (t->args.unshifted && !padding_free(t)) d->items += first_labels(d);
    return QL_OK;
}

/* ---- evaluation ------------------------------------------------------------------------------- */

/* The task's eval set with the adapters as they are; loss as Hugging Face's prediction loop has it. */
static ql_status eval_loss(ql_worker *w, double *loss, int64_t *samples, int64_t *batches)
{
    const ql_task *t = w->task;
    ql_choice c = w->rank->spec->choice;
    int64_t n = ql_dataset_size(t->eval), b = t->args.eval_batch, all = ql_ceil_div(n, b), seen = 0;
    float *nll = malloc((size_t)c.g * sizeof *nll);
    int32_t *order = malloc((size_t)n * sizeof *order);
    ql_status st = QL_OK;
    double sum = 0;
    if (!nll || !order) {
        st = ql_fail(QL_ENOMEM, "no memory to evaluate %lld samples", (long long)n);
        goto out;
    }
    for (int64_t i = 0; i < n; i++) order[i] = (int32_t)i;
    c.train = 0;
    if (!ql_plan_piped(&c)) c.schedule = QL_LOOP;
    for (int64_t at = 0; at < all; at += c.g) {
        ql_plan p;
        ql_step_data d = {.data = t->eval, .order = order, .n = n, .first = at, .batch = b, .g = (int)ql_min64(c.g, all - at),
                          .pad_id = t->pad_id, .step = 0};
        QL_GO(ql_plan_build(&c, w->p->rank, d.g, &p));
        st = ql_rank_forward(w->rank, &p, &d, nll);
        ql_plan_free(&p);
        if (st != QL_OK) goto out;
        /* Each batch's mean, weighted by its samples: transformers' prediction loop. */
        for (int k = 0; k < d.g; k++) {
            int64_t targets = 0, tokens = 0, from = (at + k) * b, rows = ql_min64(b, n - from);
            ql_batch_measure(t->eval, order + from, rows, 64, &tokens, &targets);
            if (targets) sum += (double)nll[k] / (double)targets * (double)rows;
            if (targets) seen += rows;
        }
    }
    *loss = seen ? sum / (double)seen : 0;
    *samples = n;
    *batches = all;
out:
    free(nll);
    free(order);
    return st;
}

static ql_status evaluate(run *x, int *best)
{
    ql_eval_record e = {0};
    double from = ql_now();
    if (!x->t->eval) return QL_OK;
    QL_TRY(ql_worker_say(x->w, "evaluating", ""));
    QL_TRY(eval_loss(x->w, &e.loss, &e.samples, &e.batches));
    e.seconds = ql_now() - from;
    QL_TRY(ql_history_eval(x->history, &e, best));
    const json_t *all = ql_history_records(x->history);
    return ql_worker_emit(x->w, "eval", json_deep_copy(json_array_get(all, json_array_size(all) - 1)));
}

/* ---- checkpoints ------------------------------------------------------------------------------ */

static ql_status save(run *x)
{
    QL_TRY(ql_worker_say(x->w, "saving", ""));
    QL_TRY(ql_save_checkpoint(x->w, x->dir, x->history, x->checkpoint));
    x->checkpoint_step = x->done;
    x->last_save = ql_now();
    return ql_worker_emit(x->w, "checkpoint", json_pack("{s:I,s:s}", "step", (json_int_t)x->done, "path", x->checkpoint));
}

/* ---- records ---------------------------------------------------------------------------------- */

static ql_status report_memory(run *x, int force)
{
    double now = ql_now();
    /* Twice a second, later every ten: a night's figures stay few thousand. */
    if (!force && now - x->last_memory < fmin(10, fmax(0.5, (now - x->began) / 400))) return QL_OK;
    x->last_memory = now;
    json_t *figures = NULL;
    QL_TRY(ql_rank_measure(x->r));
    if (!first_rank(x)) return QL_OK;
    QL_TRY(ql_worker_memory(x->w, &figures));
    return ql_worker_emit(x->w, "memory", figures);
}

/* Tokens of a step as transformers counts them: whole input_ids, so with padding to the longest of a micro-batch. Packed by bfd there is none. */
static int64_t step_inputs(const run *x, const ql_step_data *d)
{
    int64_t n = 0, end = ql_min64(d->n, (d->first + d->g) * d->batch);
    if (padding_free(x->t)) return ql_step_tokens(d);
    for (int64_t at = d->first * d->batch; at < end; at += d->batch) {
        int64_t rows = ql_min64(d->batch, end - at), longest = 0;
        for (int64_t i = 0; i < rows; i++) longest = ql_max64(longest, ql_dataset_length(d->data, d->order[at + i]));
        n += rows * longest;
    }
    return n;
}

/* Trainer.floating_point_ops: six a token and parameter, embeddings left out, adapters counted. */
static double step_flos(const run *x, const ql_step_data *d)
{
    const ql_config *c = &x->t->model->cfg;
    return 6.0 * (double)step_inputs(x, d) * (double)(ql_config_params(c) - c->vocab * c->hidden + x->t->lora->params);
}

/* A step that was made from a gradient that is none: whatever comes later, nothing is learned. Said once. */
static ql_status report_lost(run *x, const ql_step_result *s)
{
    if (x->lost || s->skipped || (isfinite(s->loss) && isfinite(s->norm))) return QL_OK;
    x->lost = 1;
    return ql_worker_emit(x->w, "log", json_pack("{s:s,s:o}", "level", "warning", "text", json_sprintf(
                              "step %lld: loss %g, gradient norm %g: the adapter holds no numbers any more and learns nothing from here on. Stop, and train "
                              "with a lower learning_rate (here %g), more warmup_steps or max_grad_norm 1", (long long)x->done, fabs((double)s->loss),
                              fabs((double)s->norm), x->t->args.lr.lr))); /* a NaN without its sign */
}

static ql_status report_step(run *x, const ql_step_data *d, const ql_step_result *s, double seconds)
{
    char bits[16];
    uint32_t u;
    int64_t tokens = ql_step_tokens(d);
    memcpy(&u, &s->loss, 4);
    snprintf(bits, sizeof bits, "%08x", u);
    x->tokens += tokens;
    double lr = ql_task_lr_at(x->t, s->skipped ? s->steps : s->steps - 1);
    ql_step_record rec = {.step = x->done, .loss = (double)s->loss, .grad_norm = (double)s->norm, .lr = lr, .tokens = tokens, .flos = step_flos(x, d)};
    ql_history_step(x->history, &rec);
    json_t *o = json_pack("{s:I,s:f,s:I,s:f,s:f,s:f,s:b,s:s}", "step", (json_int_t)x->done, "epoch",
                          ql_steps_epoch(&x->t->steps, x->done), "tokens", (json_int_t)tokens, "seconds", seconds, "tokens_per_second",
                          seconds > 0 ? (double)tokens / seconds : 0.0, "loss_scale", (double)s->loss_scale, "skipped", s->skipped,
                          "loss_bits", bits);
    if (!o) QL_FAIL(QL_ENOMEM, "no memory for a record");
    QL_TRY(ql_json_set_number(o, "loss", (double)s->loss));
    QL_TRY(ql_json_set_number(o, "grad_norm", (double)s->norm));
    QL_TRY(ql_json_set_number(o, "learning_rate", lr));
    QL_TRY(ql_worker_emit(x->w, "step", o));
    return report_lost(x, s);
}

static ql_status report_start(run *x, int64_t resumed)
{
    const ql_task *t = x->t;
    json_t *devices = json_array(), *why = json_array();
    char trainable[256];
    for (int i = 0; i < x->w->p->world; i++) {
        const ql_rank_state *s = &x->w->p->shared->rank[i];
        int64_t bytes[QL_CATS];
        ql_dev_memory mem;
        ql_rank_figures(s, bytes, &mem);
        json_array_append_new(devices, json_pack("{s:i,s:s,s:I}", "rank", i, "name", s->name, "total", (json_int_t)mem.total));
    }
    for (int i = 0; i < t->why.n; i++) json_array_append_new(why, json_string(t->why.text[i]));
    const char *adapter = ql_job_str(t->job, "adapter");
    if (adapter && !resumed) json_array_append_new(why, json_sprintf("adapters start from %s", adapter));
    ql_lora_summary(t->lora, &t->model->cfg, trainable, sizeof trainable);
    return ql_worker_emit(x->w, "start",
                          json_pack("{s:s,s:I,s:f,s:i,s:s,s:s,s:s,s:I,s:s,s:I,s:o,s:o}", "run", x->dir, "max_steps",
                                    (json_int_t)t->steps.max_steps, "epochs", ql_steps_epoch(&t->steps, t->steps.max_steps), "world",
                                    x->w->p->world, "backend", x->w->p->launch->be->name, "dtype", ql_dtype_name(t->spec.dtype), "schedule",
                                    ql_schedule_name(t->spec.choice.schedule), "resumed", (json_int_t)resumed, "trainable",
                                    trainable, "samples_per_step", (json_int_t)(t->args.batch * t->steps.group), "devices", devices, "text",
                                    why));
}

/* ---- the run ---------------------------------------------------------------------------------- */

/* Fresh adapters from the seed, or those of `adapter`, and empty optimizer states; or all that a checkpoint has. */
static ql_status begin(run *x, const char *resume)
{
    ql_task *t = x->t;
    ql_optim o = {.adam = t->args.adam, .clip = t->args.clip};
    float *lr = NULL, *flat = calloc((size_t)t->lora->elements, sizeof *flat);
    ql_status st = QL_OK;
    if (!flat) QL_FAIL(QL_ENOMEM, "no memory for the adapters");
    o.clip.scaling = t->spec.dtype == QL_F16;
    QL_GO(ql_task_lr(t, &lr));
    QL_GO(ql_optim_init(x->r, &o, lr, o.clip.scaling ? t->args.loss_scale : 1));
    if (resume) {
        QL_GO(ql_save_resume(x->w, resume, x->history));
        x->from = x->done = ql_history_done(x->history);
    } else {
        QL_GO(ql_lora_first(t->lora, t->job, flat));
        QL_GO(ql_rank_set_adapters(x->r, flat));
    }
out:
    free(lr);
    free(flat);
    return st;
}

/* save_minutes. A checkpoint needs all ranks, and their clocks differ: the first one names the next step, and the others read that after
 * this step's collectives, which the first has entered after it wrote. */
static int clock_due(run *x)
{
    int64_t *at = &x->w->p->shared->save_at;
    double minutes = x->t->args.save_minutes;
    if (minutes <= 0) return 0;
    if (__atomic_load_n(at, __ATOMIC_ACQUIRE) == x->done) return 1;
    if (first_rank(x) && ql_now() - x->last_save >= 60 * minutes) __atomic_store_n(at, x->done + 1, __ATOMIC_RELEASE);
    return 0;
}

static ql_status evaluate_and_save(run *x, unsigned due)
{
    int best = 0;
    if (due & QL_DUE_EVAL) QL_TRY(evaluate(x, &best));
    if ((due & QL_DUE_SAVE) || (best && x->t->args.save_every == QL_EVERY_BEST)) QL_TRY(save(x));
    return report_memory(x, due & QL_DUE_EVAL ? 1 : 0);
}

static ql_status after_step(run *x)
{
    unsigned due = ql_steps_due(&x->t->args, &x->t->steps, x->done);
    if (clock_due(x)) due |= QL_DUE_SAVE;
    if (due & QL_DUE_LOG) QL_TRY(ql_history_log(x->history, ql_now() - x->began));
    return evaluate_and_save(x, due);
}

/* A stop in the middle of an evaluation leaves a checkpoint without its record: it is made up for. */
static ql_status after_resume(run *x)
{
    unsigned due = ql_steps_due(&x->t->args, &x->t->steps, x->done);
    return due & QL_DUE_EVAL && !ql_history_evaluated(x->history) ? evaluate_and_save(x, due) : QL_OK;
}

static ql_status steps(run *x)
{
    ql_plan p = {0};
    int g = -1;
    ql_status st = QL_OK;
    while (x->done < x->until) {
        ql_step_data d;
        ql_step_result s;
        double from = ql_now();
        QL_GO(ql_train_data(x->w, x->done, &d));
        if (d.g != g) {
            ql_plan_free(&p);
            QL_GO(ql_plan_prove(&x->t->spec.choice, x->w->p->rank, d.g, &p));
            g = d.g;
        }
        QL_GO(ql_rank_step(x->r, &p, &d, &s));
        x->done++;
        QL_GO(report_step(x, &d, &s, ql_now() - from));
        QL_GO(after_step(x));
    }
out:
    ql_plan_free(&p);
    return st;
}

static ql_status finish(run *x, json_t **out)
{
    double seconds = ql_now() - x->began;
    if (x->t->args.load_best) QL_TRY(ql_save_load_best(x->w, x->history));
    QL_TRY(ql_history_end(x->history, seconds));
    QL_TRY(ql_save_final(x->w, x->dir, x->history, x->done > x->from));
    if (x->w->p->rank == 0 && x->t->args.save_total_limit == 1 && ql_history_best_path(x->history))
        QL_TRY(ql_ckpt_keep_only(x->dir, ql_history_best_path(x->history)));
    json_t *o = json_pack("{s:s,s:I,s:f,s:f,s:s,s:O}", "run", x->dir, "step", (json_int_t)x->done, "train_runtime", seconds,
                          "tokens_per_second", seconds > 0 ? (double)x->tokens / seconds : 0.0, "adapter", x->dir, "log_history",
                          ql_history_records(x->history));
    if (!o) QL_FAIL(QL_ENOMEM, "no memory for the result");
    *out = o;
    return ql_json_set_number(o, "train_loss", ql_history_train_loss(x->history));
}

ql_status ql_train_run(ql_worker *w, const json_t *command, json_t **out)
{
    run x = {.w = w, .t = w->task, .r = w->rank, .dir = json_string_value(json_object_get(command, "run")), .from = -1};
    const char *resume = json_string_value(json_object_get(command, "resume"));
    const json_t *n = json_object_get(command, "steps");
    ql_status st = QL_OK;
    if (!x.dir) QL_FAIL(QL_EINVAL, "train: no run folder");
    if (!w->task->train) QL_FAIL(QL_EINVAL, "train: no data: `data …` first");
    QL_GO(ql_history_new(&x.t->args, &x.t->steps, &x.history));
    QL_GO(begin(&x, resume));
    x.until = x.t->steps.max_steps;
    w->holds[0] = 0;
    if (json_is_integer(n)) x.until = ql_min64(x.until, json_integer_value(n));
    QL_GO(ql_rank_measure(x.r));
    if (x.r->comm) QL_GO(x.r->set.be->comm->barrier(x.r->comm, x.r->compute)); /* the first rank tells what all have measured */
    QL_GO(report_start(&x, x.done));
    QL_GO(ql_worker_say(w, "training", ""));
    x.began = x.last_save = ql_now();
    QL_GO(report_memory(&x, 1));
    if (x.t->args.eval_on_start && !resume) QL_GO(evaluate(&x, &(int){0}));
    st = resume ? after_resume(&x) : QL_OK;
    if (st == QL_OK) st = steps(&x);
    if (st == QL_ESTOP) {
        /* The unfinished step is dropped; the last finished one becomes a checkpoint. */
        w->p->shared->rank[w->p->rank].beat++;
        if (x.done > 0 && x.checkpoint_step != x.done) QL_GO(save(&x));
        *out = json_pack("{s:I,s:s?}", "step", (json_int_t)x.done, "checkpoint", x.done > 0 ? x.checkpoint : NULL);
        snprintf(w->holds, sizeof w->holds, "%s", x.dir);
        st = QL_ESTOP;
        goto out;
    }
    if (st == QL_OK) {
        QL_GO(report_memory(&x, 1));
        st = finish(&x, out);
        if (st == QL_OK) snprintf(w->holds, sizeof w->holds, "%s", x.dir);
    }
out:
    ql_history_free(x.history);
    return st;
}

ql_status ql_eval_run(ql_worker *w, const json_t *command, json_t **out)
{
    const char *adapter = json_string_value(json_object_get(command, "adapter"));
    double loss = 0, from = ql_now();
    int64_t samples = 0, batches = 0;
    float *flat = NULL;
    ql_status st = QL_OK;
    if (!w->task->eval) QL_FAIL(QL_EINVAL, "eval: no evaluation data: `data … --eval_dataset FILE` first");
    flat = calloc((size_t)w->task->lora->elements, sizeof *flat);
    if (!flat) QL_FAIL(QL_ENOMEM, "no memory for the adapters");
    w->holds[0] = 0;
    if (adapter) QL_GO(ql_lora_read(w->task->lora, adapter, flat)); /* none: B is zero, the base itself */
    QL_GO(ql_rank_set_adapters(w->rank, flat));
    QL_GO(ql_worker_say(w, "evaluating", ""));
    QL_GO(eval_loss(w, &loss, &samples, &batches));
    double s = ql_now() - from;
    *out = json_pack("{s:f,s:f,s:f,s:I}", "eval_runtime", s, "eval_samples_per_second", (double)samples / s, "eval_steps_per_second",
                     (double)batches / s, "samples", (json_int_t)samples);
    if (!*out) QL_GO(ql_fail(QL_ENOMEM, "no memory for the result"));
    QL_GO(ql_json_set_number(*out, "eval_loss", loss)); /* a NaN is null with a word beside it */
out:
    free(flat);
    return st;
}
