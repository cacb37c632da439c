/* A rank process: takes commands, places what they need, runs them. */
#include "core/generate.h"
#include "core/train.h"
#include "core/verify.h"

#include <stdlib.h>
#include <string.h>

ql_status ql_worker_emit(ql_worker *w, const char *event, json_t *fields)
{
    if (!fields) QL_FAIL(QL_ENOMEM, "no memory for an event");
    if (w->p->rank != 0) {
        json_decref(fields);
        return QL_OK;
    }
    return ql_events_emit(w->p->out, event, fields);
}

ql_status ql_worker_say(ql_worker *w, const char *state, const char *text)
{
    return ql_worker_emit(w, "state", json_pack("{s:s,s:s}", "state", state, "text", text));
}

/* ---- memory ----------------------------------------------------------------------------------- */

static json_t *rank_memory(const ql_rank_state *s, int rank)
{
    json_t *bytes = json_object();
    int64_t arena = 0, by_cat[QL_CATS];
    ql_dev_memory mem;
    ql_rank_figures(s, by_cat, &mem);
    for (int c = 0; c < QL_CATS; c++) {
        arena += by_cat[c];
        if (by_cat[c]) json_object_set_new(bytes, ql_cat_name((ql_cat)c), json_integer(by_cat[c]));
    }
    /* Outside our arena, so that the categories add up to what the driver says is in use: this process' context, libraries and
     * communicator; other processes and the driver. Where it does not count by process, all of that is one. */
    int64_t process = ql_max64(mem.process, arena), others = mem.used - process;
    if (process > arena) json_object_set_new(bytes, "runtime", json_integer(process - arena));
    if (others > 0) json_object_set_new(bytes, mem.process < 0 ? "outside" : "others", json_integer(others));
    return json_pack("{s:i,s:s,s:o,s:I,s:I,s:I,s:I,s:I,s:i,s:i}", "rank", rank, "name", s->name, "bytes", bytes, "arena", (json_int_t)arena,
                     "peak", (json_int_t)mem.peak, "process", (json_int_t)mem.process, "used", (json_int_t)mem.used, "total",
                     (json_int_t)mem.total, "temperature", mem.temperature_c, "power", mem.power_w);
}

ql_status ql_worker_memory(const ql_worker *w, json_t **out)
{
    int64_t device, host = 0;
    QL_TRY(ql_mem_bytes(w->rank->spec, &device, &host));
    json_t *list = json_array();
    for (int i = 0; i < w->p->world; i++) json_array_append_new(list, rank_memory(&w->p->shared->rank[i], i));
    *out = json_pack("{s:o,s:I}", "devices", list, "host", (json_int_t)host);
    return *out ? QL_OK : ql_fail(QL_ENOMEM, "no memory for the figures");
}

static ql_status memory_run(ql_worker *w, json_t **out)
{
    ql_rank *r = w->rank;
    if (!r) QL_FAIL(QL_EINTERNAL, "memory: nothing is placed");
    QL_TRY(ql_rank_measure(r));
    /* Rank 0 speaks for all: only when all have measured. */
    if (r->comm) QL_TRY(r->set.be->comm->barrier(r->comm, r->compute));
    QL_TRY(r->set.be->dev->sync(r->compute));
    return ql_worker_memory(w, out);
}

/* ---- commands --------------------------------------------------------------------------------- */

static void on_progress(void *ctx, const char *what, int64_t done, int64_t total)
{
    ql_worker *w = ctx;
    if (ql_worker_emit(w, "progress", json_pack("{s:s,s:I,s:I}", "what", what, "done", (json_int_t)done, "total", (json_int_t)total)))
        ql_error_clear();
}

/* "place" of a command: what the supervisor found out about the devices. */
static ql_place place_of(const json_t *c)
{
    const json_t *p = json_object_get(c, "place");
    ql_place out = {.world = (int)json_integer_value(json_object_get(p, "world")),
                    .capacity = json_integer_value(json_object_get(p, "capacity")),
                    .host = json_integer_value(json_object_get(p, "host")),
                    .arch = (int)json_integer_value(json_object_get(p, "arch")),
                    .bf16 = json_is_true(json_object_get(p, "bf16"))};
    return out;
}

static ql_status take_task(ql_worker *w, const json_t *c)
{
    ql_task_inputs in = {.job = json_object_get(c, "job"),
                         .train = json_string_value(json_object_get(c, "train_data")),
                         .eval = json_string_value(json_object_get(c, "eval_data")),
                         .adapter = json_string_value(json_object_get(c, "adapter")),
                         .resume = json_string_value(json_object_get(c, "resume")),
                         .weights = QL_WEIGHTS_MAPPED,
                         .place = place_of(c)};
    ql_task *t = NULL;
    QL_TRY(ql_task_open(&in, &t));
    if (w->task != w->placed) ql_task_close(w->task);
    w->task = t;
    w->order_epoch = -1;
    if (w->rank && ql_task_same_place(w->placed, t)) {
        /* Weights stay; everything else is the new task's. */
        ql_task_close(w->placed);
        w->placed = t;
        w->rank->spec = &t->spec;
        w->rank->mem->spec = &t->spec;
        w->rank->mem->shape.cfg = &t->model->cfg;
        w->rank->mem->shape.lora = t->lora;
        w->rank->mem->shape.seed = t->spec.seed;
        return QL_OK;
    }
    ql_rank_close(w->rank);
    w->rank = NULL;
    w->holds[0] = 0;
    if (w->placed) ql_task_close(w->placed);
    w->placed = NULL;
    QL_TRY(ql_worker_say(w, "placing", ""));
    w->p->setup.progress = on_progress;
    w->p->setup.ctx = w;
    QL_TRY(ql_rank_open(&w->p->setup, &t->spec, &w->rank));
    w->placed = t;
    if (w->rank->unpinned[0])
        QL_TRY(ql_worker_emit(w, "log", json_pack("{s:s,s:o}", "level", "warning", "text", json_sprintf(
                                  "layers that rest in host memory arrive more slowly: %s", w->rank->unpinned))));
    return ql_rank_load(w->rank);
}

static ql_status run_command(ql_worker *w, const json_t *c, const char *name, json_t **out)
{
    if (strcmp(name, "memory") == 0) return memory_run(w, out);
    if (!json_is_true(json_object_get(c, "as_placed"))) QL_TRY(take_task(w, c));
    if (strcmp(name, "verify") == 0) return ql_verify_run(w, c, out);
    if (strcmp(name, "train") == 0) return ql_train_run(w, c, out);
    if (strcmp(name, "eval") == 0) return ql_eval_run(w, c, out);
    if (strcmp(name, "generate") == 0) return ql_generate_run(w, c, out);
    QL_FAIL(QL_EINVAL, "rank: unknown command '%s'", name);
}

void ql_worker_finish(ql_rank_process *p, const json_t *c, ql_status st, json_t *out)
{
    json_t *id = json_object_get(c, "id");
    json_t *o = out && json_is_object(out) ? out : json_object();
    if (st == QL_OK) {
        json_t *e = json_pack("{s:O?,s:o}", "id", id, "result", o);
        if (e) ql_events_emit(p->out, "done", e);
    } else if (st == QL_ESTOP) {
        json_object_set(o, "id", id);
        if (!json_object_get(o, "step")) json_object_set_new(o, "step", json_integer(0));
        if (!json_object_get(o, "checkpoint")) json_object_set_new(o, "checkpoint", json_null());
        ql_events_emit(p->out, "stopped", o);
    } else {
        const ql_rank_state *me = &p->shared->rank[p->rank];
        char where[96];
        ql_rank_where(me, where, sizeof where);
        json_decref(o);
        json_t *e = json_pack("{s:O?,s:s,s:s,s:i,s:i,s:s}", "id", id, "status", ql_status_name(st), "text", ql_error(), "rank", p->rank,
                              "step", me->step, "action", where);
        if (e) ql_events_emit(p->out, "error", e);
    }
    ql_events_flush(p->out, 5000, NULL);
}

int ql_worker_main(ql_rank_process *p)
{
    ql_worker w = {.p = p, .order_epoch = -1};
    int status = 0;
    for (json_t *c; (c = ql_lines_wait(p->in));) {
        json_t *out = NULL;
        const char *name = json_string_value(json_object_get(c, "cmd"));
        p->shared->rank[p->rank].step = 0;
        p->shared->rank[p->rank].phase = QL_AT_REST;
        ql_status st = run_command(&w, c, name ? name : "", &out);
        ql_worker_finish(p, c, st, out);
        json_decref(c);
        if (st != QL_OK && st != QL_ESTOP) {
            /* A rank that failed is not used again: its device, or its place in the collectives, is in doubt. */
            status = 1;
            break;
        }
    }
    ql_rank_close(w.rank);
    if (w.task != w.placed) ql_task_close(w.task);
    ql_task_close(w.placed);
    free(w.order);
    return status;
}
