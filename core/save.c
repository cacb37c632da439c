#include "core/save.h"

#include "core/json.h"

#include <stdlib.h>
#include <string.h>

static void state_free(ql_ckpt_state *s)
{
    free(s->adapters);
    free(s->m);
    free(s->v);
    free(s->m8);
    free(s->v8);
    free(s->m2);
    free(s->v2);
}

/* Buffers for all ranks' shards: padded, so that whole shards can be copied in. */
static ql_status state_new(const ql_rank *r, ql_ckpt_optimizer kind, ql_ckpt_state *s)
{
    size_t n = (size_t)r->mem->padded;
    memset(s, 0, sizeof *s);
    s->optimizer = kind;
    s->adapters = calloc(n, 4);
    int ok = s->adapters != NULL, small = kind == QL_CKPT_8BIT;
    if (kind != QL_CKPT_NONE) {
        s->m = calloc(n, 4);
        s->v = calloc(n, 4);
        ok = ok && s->m && s->v;
    }
    if (small) {
        s->m8 = calloc(n, 1);
        s->v8 = calloc(n, 1);
        s->m2 = calloc(n / 256, 4);
        s->v2 = calloc(n / 256, 4);
        ok = ok && s->m8 && s->v8 && s->m2 && s->v2;
    }
    if (ok) return QL_OK;
    state_free(s);
    QL_FAIL(QL_ENOMEM, "no host memory for a checkpoint of %lld adapter elements", (long long)r->mem->n);
}

static ql_ckpt_optimizer kind_of(const ql_worker *w)
{
    if (w->task->args.save_only_model) return QL_CKPT_NONE;
    return w->rank->spec->state == QL_ADAM_8BIT ? QL_CKPT_8BIT : QL_CKPT_F32;
}

static ql_ckpt_of what(const ql_worker *w)
{
    const ql_task *t = w->task;
    ql_ckpt_of of = {t->lora, &t->model->cfg, t->job, &t->args, &t->steps, t->model->path};
    return of;
}

/* This rank's shard of a state in `mine`, `unit` bytes for 256 elements → all ranks' in `all` on rank 0, through the exchange buffer. */
static ql_status collect(ql_worker *w, void *all, const void *mine, int64_t unit)
{
    ql_rank *r = w->rank;
    const ql_mem *m = r->mem;
    int64_t bytes = m->shard / 256 * unit;
    if (ql_plan_piped(&r->spec->choice)) return ql_rank_share(r, all, m->padded / 256 * unit, mine, m->mine / 256 * unit, bytes);
    const ql_dev_table *dev = r->set.be->dev;
    char *x = (char *)r->mem->exchange;
    if (r->set.world == 1) {
        memcpy(all, mine, (size_t)bytes);
        return QL_OK;
    }
    QL_TRY(dev->copy(r->compute, x + r->set.rank * bytes, mine, bytes));
    QL_TRY(r->set.be->comm->all_gather(r->comm, r->compute, ql_vec(x, QL_U8, bytes * r->set.world),
                                       ql_vec(x + r->set.rank * bytes, QL_U8, bytes)));
    if (r->set.rank == 0) QL_TRY(dev->copy(r->compute, all, x, bytes * r->set.world));
    return dev->sync(r->compute);
}

/* 32-bit states of small tensors, kept compactly beside 8-bit ones, to and from their places in the shard. */
typedef enum { SPREAD, COMPACT } direction;
static void small_states(const ql_mem *m, float *shard, float *small, direction d)
{
    for (int i = 0; i < m->run_count; i++) {
        const ql_state_run *run = &m->runs[i];
        float *a = shard + (run->at - m->mine), *b = small + run->small;
        if (run->kind != QL_ADAM_F32) continue;
        memcpy(d == SPREAD ? a : b, d == SPREAD ? b : a, (size_t)run->n * 4);
    }
}

static ql_status collect_optimizer(ql_worker *w, ql_ckpt_state *s)
{
    const ql_mem *m = w->rank->mem;
    ql_optim_state *o = NULL;
    float *shard = NULL;
    ql_status st = QL_OK;
    QL_GO(ql_optim_state_new(w->rank, &o));
    QL_GO(ql_optim_get(w->rank, o));
    s->ctl = o->ctl;
    if (s->optimizer == QL_CKPT_F32) {
        QL_GO(collect(w, s->m, o->m, 1024));
        QL_GO(collect(w, s->v, o->v, 1024));
    } else if (s->optimizer == QL_CKPT_8BIT) {
        QL_GO(collect(w, s->m8, o->m8, 256));
        QL_GO(collect(w, s->v8, o->v8, 256));
        QL_GO(collect(w, s->m2, o->m2, 4));
        QL_GO(collect(w, s->v2, o->v2, 4));
        shard = calloc((size_t)m->shard + 1, 4);
        if (!shard) QL_GO(ql_fail(QL_ENOMEM, "no host memory for a checkpoint"));
        small_states(m, shard, o->m, SPREAD);
        QL_GO(collect(w, s->m, shard, 1024));
        small_states(m, shard, o->v, SPREAD);
        QL_GO(collect(w, s->v, shard, 1024));
    }
out:
    free(shard);
    ql_optim_state_free(o);
    return st;
}

/* A run's job as it is now: what goes on with its last checkpoint. */
static ql_status save_job(const ql_worker *w, const char *run)
{
    char path[QL_PATH_MAX];
    json_t *job = ql_job_json(w->task->job);
    ql_status st = job ? ql_path_join(path, run, "job.json") : ql_fail(QL_ENOMEM, "no memory for a job");
    if (st == QL_OK) st = ql_json_save(path, job);
    json_decref(job);
    return st;
}

ql_status ql_save_checkpoint(ql_worker *w, const char *run, ql_history *h, char path[QL_PATH_MAX])
{
    ql_ckpt_state s;
    ql_ckpt_of of = what(w);
    ql_status st = QL_OK;
    int64_t step = ql_history_done(h);
    char name[64];
    ql_rank_at(w->rank, QL_AT_SAVING);
    QL_TRY(state_new(w->rank, kind_of(w), &s));
    QL_GO(collect_optimizer(w, &s));
    QL_GO(ql_rank_get_adapters(w->rank, s.adapters));
    if (w->p->rank == 0) {
        QL_GO(ql_ckpt_save(run, &of, &s, h, path));
        QL_GO(save_job(w, run));
        QL_GO(ql_ckpt_rotate(run, w->task->args.save_total_limit, ql_history_best_path(h), step));
    } else {
        snprintf(name, sizeof name, "checkpoint-%lld", (long long)step);
        QL_GO(ql_path_join(path, run, name));
        QL_GO(ql_history_saved(h, step, path));
    }
    w->p->shared->rank[w->p->rank].beat++;
out:
    state_free(&s);
    return st;
}

ql_status ql_save_final(ql_worker *w, const char *run, ql_history *h, int trained)
{
    const ql_task *t = w->task;
    ql_status st = QL_OK;
    float *flat = NULL;
    ql_rank_at(w->rank, QL_AT_SAVING);
    flat = calloc((size_t)t->lora->elements, 4);
    if (!flat) QL_GO(ql_fail(QL_ENOMEM, "no host memory for the adapter"));
    QL_GO(ql_rank_get_adapters(w->rank, flat));
    if (w->p->rank != 0) goto out;
    QL_GO(ql_path_mkdirs(run));
    QL_GO(ql_lora_save(t->lora, flat, t->args.save_dtype, run));
    QL_GO(ql_history_save(h, run));
    if (trained) QL_GO(save_job(w, run));
out:
    free(flat);
    return st;
}

/* Every rank reads the file and takes its shard. */
static ql_status put_optimizer(ql_worker *w, ql_ckpt_state *s)
{
    const ql_mem *m = w->rank->mem;
    int64_t at = m->mine;
    ql_optim_state *o = NULL;
    ql_status st = QL_OK;
    QL_GO(ql_optim_state_new(w->rank, &o));
    o->ctl = s->ctl;
    if (s->optimizer == QL_CKPT_F32) {
        memcpy(o->m, s->m + at, (size_t)m->shard * 4);
        memcpy(o->v, s->v + at, (size_t)m->shard * 4);
    } else {
        memcpy(o->m8, s->m8 + at, (size_t)m->shard);
        memcpy(o->v8, s->v8 + at, (size_t)m->shard);
        memcpy(o->m2, s->m2 + at / 256, (size_t)m->shard / 64);
        memcpy(o->v2, s->v2 + at / 256, (size_t)m->shard / 64);
        small_states(m, s->m + at, o->m, COMPACT);
        small_states(m, s->v + at, o->v, COMPACT);
    }
    QL_GO(ql_optim_put(w->rank, o));
out:
    ql_optim_state_free(o);
    return st;
}

ql_status ql_save_resume(ql_worker *w, const char *path, ql_history *h)
{
    ql_ckpt_state s;
    ql_ckpt_of of = what(w);
    json_t *notes = NULL, *note;
    size_t i;
    ql_status st = QL_OK;
    QL_TRY(state_new(w->rank, w->rank->spec->state == QL_ADAM_8BIT ? QL_CKPT_8BIT : QL_CKPT_F32, &s));
    QL_GO(ql_ckpt_load(path, &of, &s, h, &notes));
    QL_GO(ql_rank_set_adapters(w->rank, s.adapters));
    QL_GO(put_optimizer(w, &s));
    json_array_foreach(notes, i, note)
        QL_GO(ql_worker_emit(w, "log", json_pack("{s:s,s:O}", "level", "warning", "text", note)));
out:
    json_decref(notes);
    state_free(&s);
    return st;
}

ql_status ql_save_load_best(ql_worker *w, ql_history *h)
{
    const char *best = ql_history_best_path(h);
    ql_rank *r = w->rank;
    float *flat;
    if (!ql_history_best_step(h)) return QL_OK;
    /* The best may be the last one, which the first rank is still writing. */
    if (r->comm) QL_TRY(r->set.be->comm->barrier(r->comm, r->compute));
    QL_TRY(r->set.be->dev->sync(r->compute));
    if (!best || !ql_path_is_dir(best))
        return ql_worker_emit(w, "log", json_pack("{s:s,s:o}", "level", "warning", "text",
                                                  json_sprintf("load_best_model_at_end: the best evaluation was at step %lld, whose checkpoint is not "
                                                               "there: the adapter is the last step's",
                                                               (long long)ql_history_best_step(h))));
    flat = calloc((size_t)w->task->lora->elements, 4);
    if (!flat) QL_FAIL(QL_ENOMEM, "no host memory for the best adapter");
    ql_status st = ql_lora_read(w->task->lora, best, flat);
    if (st == QL_OK) st = ql_rank_set_adapters(r, flat);
    free(flat);
    return st;
}
