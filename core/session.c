/* The engine process: one thread, no device, no BLAS. Takes commands, prepares data, starts ranks, relays their events, and answers
 * for them when they die. */
#include "core/session.h"

#include "core/bench.h"
#include "core/cost.h"
#include "core/devices.h"
#include "core/file.h"
#include "core/generate.h"
#include "core/json.h"
#include "core/launch.h"
#include "core/merge.h"
#include "core/prepare.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Without progress for so long a run has ended. Between the actions of plans (opening files, loading, saving) beats are few and take ten
 * times as long; so do waits inside a rank, so that it is the supervisor who judges. */
enum { DEADLINE_MS = 30000, SLOW = 10, LAST_WORDS_MS = 1200 };

typedef struct {
    const ql_session_setup *set;
    ql_lines *in;
    ql_events *out;
    ql_ranks *ranks;
    ql_task *placed;           /* what the ranks hold, or are asked to */
    ql_launch launch;
    int device[QL_MAX_WORLD];
    ql_place place;            /* measured before the ranks took their memory */
    char place_key[256];       /* of which settings */
    json_t *probe;
    char missing[512];
    int ended;                 /* the front end has gone */
    int stop;                  /* asked for while a command runs */
    double ticked;             /* the last progress of a merge */
} session;

static int is(const char *a, const char *b)
{
    return a && strcmp(a, b) == 0;
}

/* ---- commands that arrive while one runs ------------------------------------------------------- */

static ql_status listen(session *s, int ms)
{
    ql_lines_state state = QL_LINES_NONE;
    json_t *c = NULL;
    if (s->ended) { /* nothing comes any more, and asking would not wait */
        usleep((useconds_t)ms * 1000);
        return QL_OK;
    }
    ql_status st = ql_lines_next(s->in, ms, &state, &c);
    if (st == QL_EINVAL) ql_error_clear();
    if (state == QL_LINES_END) s->ended = s->stop = 1;
    if (state == QL_LINES_ONE && st == QL_OK) {
        const char *name = json_string_value(json_object_get(c, "cmd"));
        if (name && strcmp(name, "stop") == 0)
            s->stop = 1;
        else
            ql_events_emit(s->out, "log", json_pack("{s:s,s:s}", "level", "warning", "text", "a command is running; only stop is heard"));
        json_decref(c);
    }
    return QL_OK;
}

static ql_status on_prepare(void *ctx, const char *what, int64_t done, int64_t total)
{
    session *s = ctx;
    QL_TRY(listen(s, 0));
    ql_events_emit(s->out, "progress", json_pack("{s:s,s:I,s:I}", "what", what, "done", (json_int_t)done, "total", (json_int_t)total));
    return s->stop ? QL_ESTOP : QL_OK;
}

/* ---- placing ---------------------------------------------------------------------------------- */

static void drop_ranks(session *s)
{
    ql_ranks_stop(s->ranks);
    s->ranks = NULL;
    ql_task_close(s->placed);
    s->placed = NULL;
    s->place_key[0] = 0;
}

/* The place is measured once per set of device settings, while no rank holds memory. */
static ql_status find_place(session *s, const ql_args *a, const ql_job *job)
{
    char key[sizeof s->place_key], backend[16];
    char *limit = json_dumps(ql_job_get(job, "device_memory"), JSON_ENCODE_ANY);
    const char *devices = ql_job_str(job, "devices");
    snprintf(key, sizeof key, "%s|%s|%lld", devices ? devices : "", limit ? limit : "", (long long)a->host_memory);
    free(limit);
    if (s->ranks && strcmp(key, s->place_key) == 0) return QL_OK;
    drop_ranks(s);
    json_decref(s->probe);
    s->probe = NULL;
    QL_TRY(ql_devices_probe(s->set->cuda_library, &s->probe, s->missing, sizeof s->missing));
    QL_TRY(ql_devices_pick(a, s->probe, s->missing, &s->place, backend, s->device));
    s->launch.be = ql_backend_cpu();
    if (strcmp(backend, "cuda") == 0) QL_TRY(ql_backend_cuda(s->set->cuda_library, &s->launch.be));
    memcpy(s->place_key, key, sizeof key);
    return QL_OK;
}

/* Ranks of which one has died while nothing ran are no use: the next command starts fresh ones. */
static void drop_broken_ranks(session *s)
{
    if (s->ranks && !ql_ranks_whole(s->ranks)) drop_ranks(s);
}

/* As set; else 30 s, or 20 times what the longest action should take. */
static int64_t deadline_ms(const ql_task *t)
{
    if (!t) return DEADLINE_MS;
    double longest = 1000 * ql_cost_action(&t->spec) / ql_rates_of(t->place.arch).flops;
    return t->args.deadline_ms ? t->args.deadline_ms : ql_max64(DEADLINE_MS, (int64_t)(20 * longest));
}

static ql_status place(session *s, json_t *command, const ql_prepared *data)
{
    ql_task_inputs in = {.job = json_object_get(command, "job"),
                         .train = data->train[0] ? data->train : NULL,
                         .eval = data->eval[0] ? data->eval : NULL,
                         .adapter = json_string_value(json_object_get(command, "adapter")),
                         .resume = json_string_value(json_object_get(command, "resume")),
                         .weights = QL_WEIGHTS_MAPPED,
                         .place = s->place};
    ql_task *t = NULL;
    QL_TRY(ql_task_open(&in, &t));
    /* Text comes from the weights as they are on the devices, whatever was placed for training. */
    if (s->ranks && is(json_string_value(json_object_get(command, "cmd")), "generate") && ql_task_same_model(s->placed, t)) {
        json_object_set_new(command, "as_placed", json_true());
        ql_task_close(t);
        return QL_OK;
    }
    int64_t timeout = SLOW * deadline_ms(t) + DEADLINE_MS;
    if (s->ranks && ql_task_same_place(s->placed, t) && timeout <= s->launch.timeout_ms) {
        ql_task_close(s->placed);
        s->placed = t;
        return QL_OK;
    }
    char key[sizeof s->place_key];
    memcpy(key, s->place_key, sizeof key);
    drop_ranks(s);
    memcpy(s->place_key, key, sizeof key);
    s->placed = t;
    s->launch.task = t;
    s->launch.device = s->device;
    s->launch.timeout_ms = timeout;
    return ql_ranks_start(&s->launch, ql_worker_main, &s->ranks);
}

/* ---- running ---------------------------------------------------------------------------------- */

typedef struct {
    int done[QL_MAX_WORLD];    /* this rank's command has ended */
    int left;
    int unplaced;              /* stopped before all ranks had their weights: they end, and that is no error */
    json_t *end;               /* the closing event: rank 0's, or the first error */
    int told;                  /* … it is, and not what another rank said meanwhile */
    char name[16];
    int64_t beat;
    double moved;              /* when the beat last changed */
    double deadline;
} relay;

static void take_event(session *s, relay *r, int rank, json_t *e)
{
    char name[32];
    const char *ev = json_string_value(json_object_get(e, "ev"));
    snprintf(name, sizeof name, "%s", ev ? ev : "");
    json_object_del(e, "ev");
    json_object_del(e, "t");
    if (is(name, "done") || is(name, "stopped") || is(name, "error")) {
        if (!r->done[rank]) r->left--;
        r->done[rank] = 1;
        int error = is(name, "error") && !r->unplaced, at = ql_ranks_shared(s->ranks)->rank[rank].phase;
        if (is(name, "stopped") && (at == QL_AT_OPENING || at == QL_AT_LOADING)) {
            /* Another rank may be waiting for this one in a collective already. */
            r->unplaced = 1;
            ql_ranks_shared(s->ranks)->abort = 1;
            json_decref(r->end);
            r->end = NULL;
        }
        /* "another rank failed" is an echo: the rank that it comes from has the words. */
        int echo = error && is(json_string_value(json_object_get(e, "status")), ql_status_name(QL_EPEER));
        if (error) ql_ranks_shared(s->ranks)->abort = 1;
        int theirs = r->unplaced && is(name, "error"); /* of a rank that waited for one that will not come */
        if (!theirs && (!r->end || (error && !is(r->name, "error")) || (rank == 0 && !is(r->name, "error")) ||
            (error && !echo && is(json_string_value(json_object_get(r->end, "status")), ql_status_name(QL_EPEER))))) {
            json_decref(r->end);
            r->end = json_incref(e);
            r->told = rank == 0 || error;
            memcpy(r->name, name, sizeof r->name - 1);
        }
        json_decref(e);
        return;
    }
    ql_events_emit(s->out, name, e);
}

/* The end of a run whose rank cannot say so itself. fmt: rank, its device, `why`, where. */
static void end_for(session *s, relay *r, int rank, const char *why, const char *advice)
{
    char text[1024], where[96];
    const ql_rank_state *k = &ql_ranks_shared(s->ranks)->rank[rank];
    ql_rank_where(k, where, sizeof where);
    snprintf(text, sizeof text, "rank %d (%s) %s, at %s. %s", rank, k->name, why, where, advice);
    json_decref(r->end);
    r->told = 1;
    r->end = json_pack("{s:s,s:s,s:i,s:i,s:s}", "status", ql_status_name(QL_EPEER), "text", text, "rank", rank, "step", k->step, "action",
                       where);
    strcpy(r->name, "error");
}

/* Everything a rank has said so far. Returns 1 if there was something. */
static int drain(session *s, relay *r, int rank)
{
    int some = 0;
    while (!r->done[rank]) {
        ql_lines_state state = QL_LINES_NONE;
        json_t *e = NULL;
        if (ql_lines_next(ql_ranks_lines(s->ranks, rank), 0, &state, &e) != QL_OK) ql_error_clear();
        if (state != QL_LINES_ONE || !e) break;
        take_event(s, r, rank, e);
        some = 1;
    }
    return some;
}

/* The rank on which the others wait: it waits for none itself, has entered the fewest collectives, done the least. −1: all are done. */
static int furthest_behind(const session *s, const relay *r)
{
    int found = -1;
    int64_t least[3] = {0};
    for (int i = 0; i < ql_ranks_world(s->ranks); i++) {
        const ql_rank_state *k = &ql_ranks_shared(s->ranks)->rank[i];
        int64_t key[3] = {__atomic_load_n(&k->waits_for, __ATOMIC_RELAXED) || __atomic_load_n(&k->at_stop, __ATOMIC_RELAXED),
                          __atomic_load_n(&k->entered, __ATOMIC_RELAXED), k->beat};
        int at = 0;
        if (r->done[i]) continue;
        while (at < 2 && key[at] == least[at]) at++;
        if (found >= 0 && key[at] >= least[at]) continue;
        found = i;
        memcpy(least, key, sizeof key);
    }
    return found;
}

/* Have all ranks stood still for too long? The one furthest behind is named. */
static void check_progress(session *s, relay *r, double still)
{
    const ql_shared *sh = ql_ranks_shared(s->ranks);
    double deadline = r->deadline;
    int slow = furthest_behind(s, r);
    char why[160];
    for (int i = 0; i < ql_ranks_world(s->ranks); i++)
        if (!r->done[i] && sh->rank[i].phase != QL_AT_STEP && sh->rank[i].phase != QL_AT_EVAL) deadline = SLOW * r->deadline;
    if (slow < 0 || still <= deadline || sh->abort) return;
    ql_ranks_shared(s->ranks)->abort = 1;
    if (r->told) return;
    snprintf(why, sizeof why, "is furthest behind, and no rank finished an action for %.1f s", still);
    end_for(s, r, slow, why, "`--deadline_ms` allows more. The next command starts fresh ranks");
}

static void check_ranks(session *s, relay *r)
{
    char how[128];
    int dead = ql_ranks_dead(s->ranks, how, sizeof how);
    double now = ql_now();
    if (dead >= 0) drain(s, r, dead); /* its last words, which say more than its status */
    if (dead >= 0 && !r->done[dead]) {
        char why[160], lost[400];
        r->left--;
        r->done[dead] = 1;
        snprintf(why, sizeof why, "died: %s", how);
        const char *cut = s->placed ? ql_st_cut(s->placed->model->files) : NULL;
        if (cut) snprintf(lost, sizeof lost, "%.300s was cut short while it was in use: it has to be whole again before the next command", cut);
        if (!ql_ranks_shared(s->ranks)->abort && !r->told)
            end_for(s, r, dead, why, cut ? lost : "`resume` goes on from the run's last checkpoint. The next command starts fresh ranks");
        ql_ranks_shared(s->ranks)->abort = 1;
    }
    int64_t beat = ql_ranks_beat(s->ranks);
    if (beat != r->beat) r->beat = beat, r->moved = now;
    check_progress(s, r, now - r->moved);
}

/* Events of the ranks until each has ended its command; a stop is passed on, a death ends all. */
static void run_relay(session *s, relay *r)
{
    double aborted = 0;
    while (r->left > 0) {
        int some = 0;
        for (int i = 0; i < ql_ranks_world(s->ranks); i++) some |= drain(s, r, i);
        ql_ranks_push(s->ranks);
        listen(s, some ? 0 : 20);
        if (s->stop) ql_ranks_shared(s->ranks)->stop = 1;
        check_ranks(s, r);
        if (ql_ranks_shared(s->ranks)->abort) {
            if (!aborted) aborted = ql_now();
            if (ql_now() - aborted > LAST_WORDS_MS / 1000.0) break; /* what is left is killed */
        }
    }
}

static ql_status run_on_ranks(session *s, json_t *command)
{
    relay r = {.left = ql_ranks_world(s->ranks), .moved = ql_now(), .beat = ql_ranks_beat(s->ranks)};
    r.deadline = (double)deadline_ms(s->placed) / 1000;
    ql_ranks_shared(s->ranks)->stop = 0;
    /* A rank that dies just now does not take it: the relay sees that, and says how. */
    ql_status sent = ql_ranks_send(s->ranks, command);
    if (sent != QL_OK && sent != QL_EIO) {
        drop_ranks(s);
        return sent;
    }
    ql_error_clear();
    run_relay(s, &r);
    if (!r.end) r.end = json_pack("{s:s,s:s}", "status", ql_status_name(QL_EPEER), "text", "the ranks ended without a word");
    if (!r.name[0]) strcpy(r.name, "error");
    if (r.end) json_object_set(r.end, "id", json_object_get(command, "id"));
    /* The answer first: ranks that do not leave by themselves take a second to end. */
    int failed = is(r.name, "error") || ql_ranks_shared(s->ranks)->abort;
    ql_status st = ql_events_emit(s->out, r.name, r.end);
    if (failed) drop_ranks(s);
    return st;
}

static ql_status prepare(session *s, json_t *command, const ql_job *job, ql_prepared *data)
{
    char cache[QL_PATH_MAX];
    const char *dir = ql_job_str(job, "output_dir");
    memset(data, 0, sizeof *data);
    const char *ready = json_string_value(json_object_get(command, "train_data"));
    if (is(json_string_value(json_object_get(command, "cmd")), "generate")) return ql_generate_prepare(job, command);
    if (ready) { /* tokenised by somebody else */
        snprintf(data->train, sizeof data->train, "%s", ready);
        return QL_OK;
    }
    QL_TRY(ql_path_join(cache, dir ? dir : "runs", ".cache"));
    QL_TRY(ql_path_mkdirs(cache));
    ql_events_emit(s->out, "state", json_pack("{s:s,s:s}", "state", "tokenising", "text", ""));
    QL_TRY(ql_prepare(job, cache, on_prepare, s, data));
    if (data->train[0]) json_object_set_new(command, "train_data", json_string(data->train));
    if (data->eval[0]) json_object_set_new(command, "eval_data", json_string(data->eval));
    return QL_OK;
}

static ql_status open_log(session *s, const json_t *command)
{
    const char *run = json_string_value(json_object_get(command, "run"));
    char path[QL_PATH_MAX];
    if (!run || !is(json_string_value(json_object_get(command, "cmd")), "train")) return QL_OK; /* the record is of training alone */
    QL_TRY(ql_path_mkdirs(run));
    QL_TRY(ql_path_join(path, run, "events.jsonl"));
    return ql_events_log(s->out, path);
}

/* A fresh run's job, for whoever asks about the run before its first checkpoint. Of a run that goes on it stays what the checkpoint has. */
static ql_status note_job(const json_t *command, const ql_job *job)
{
    const char *run = json_string_value(json_object_get(command, "run"));
    char path[QL_PATH_MAX];
    if (!run || !is(json_string_value(json_object_get(command, "cmd")), "train") || json_object_get(command, "resume")) return QL_OK;
    json_t *o = ql_job_json(job);
    ql_status st = o ? ql_path_join(path, run, "job.json") : ql_fail(QL_ENOMEM, "no memory for a job");
    if (st == QL_OK) st = ql_json_save(path, o);
    json_decref(o);
    return st;
}

static ql_status run_command(session *s, json_t *command)
{
    ql_job *job = NULL;
    ql_args args;
    ql_prepared data;
    ql_status st = ql_job_from_json(json_object_get(command, "job"), &job);
    QL_GO(st);
    QL_GO(ql_args_from_job(job, &args));
    QL_GO(open_log(s, command));
    QL_GO(prepare(s, command, job, &data));
    QL_GO(find_place(s, &args, job));
    json_object_set_new(command, "place", json_pack("{s:i,s:I,s:I,s:i,s:b}", "world", s->place.world, "capacity", (json_int_t)s->place.capacity,
                                                    "host", (json_int_t)s->place.host, "arch", s->place.arch, "bf16", s->place.bf16));
    QL_GO(place(s, command, &data));
    QL_GO(note_job(command, job));
    QL_GO(run_on_ranks(s, command));
out:
    ql_job_free(job);
    return st;
}

/* What the devices hold: as the ranks measure it, or the driver's figures where nothing of ours is there. */
static ql_status memory(session *s, json_t *command)
{
    json_t *list = json_array(), *o;
    size_t i;
    ql_status st = QL_OK;
    if (s->ranks) {
        json_decref(list);
        return run_on_ranks(s, command);
    }
    json_decref(s->probe);
    s->probe = NULL;
    QL_GO(ql_devices_probe(s->set->cuda_library, &s->probe, s->missing, sizeof s->missing));
    json_array_foreach(s->probe, i, o)
    {
        /* A CPU rank's memory is its process': there is none. */
        json_int_t total = json_integer_value(json_object_get(o, "total")), left = json_integer_value(json_object_get(o, "free"));
        json_int_t used = is(json_string_value(json_object_get(o, "backend")), "cpu") ? 0 : total - left;
        json_array_append_new(list, json_pack("{s:i,s:O,s:{s:I},s:i,s:i,s:i,s:I,s:I}", "rank", (int)i, "name", json_object_get(o, "name"), "bytes",
                                              "others", used, "arena", 0, "peak", 0, "process", 0, "used", used, "total", total));
    }
    ql_events_emit(s->out, "done", json_pack("{s:O?,s:{s:O,s:i}}", "id", json_object_get(command, "id"), "result", "devices", list, "host", 0));
out:
    json_decref(list);
    return st;
}

/* The machine's figures need its devices for themselves: what was placed goes, and is placed again by the next command. */
static ql_status bench(session *s, json_t *command)
{
    ql_job *job = NULL;
    ql_args args;
    ql_status st = QL_OK;
    QL_GO(ql_job_from_json(json_object_get(command, "job"), &job));
    QL_GO(ql_args_from_job(job, &args));
    drop_ranks(s);
    QL_GO(find_place(s, &args, job));
    s->launch.task = NULL;
    s->launch.world = s->place.world;
    s->launch.device = s->device;
    s->launch.timeout_ms = SLOW * DEADLINE_MS;
    QL_GO(ql_ranks_start(&s->launch, ql_bench_main, &s->ranks));
    st = run_on_ranks(s, command);
    drop_ranks(s);
out:
    ql_job_free(job);
    return st;
}

static ql_status on_merge(void *ctx, const char *what, int64_t done, int64_t total)
{
    session *s = ctx;
    double now = ql_now();
    if (now - s->ticked < 0.2 && done < total) return QL_OK;
    s->ticked = now;
    return on_prepare(ctx, what, done, total);
}

static ql_status merge(session *s, const json_t *command)
{
    json_t *result = NULL;
    QL_TRY(ql_merge(command, on_merge, s, &result));
    return ql_events_emit(s->out, "done", json_pack("{s:O?,s:o}", "id", json_object_get(command, "id"), "result", result));
}

static void answer_error(session *s, const json_t *command, ql_status st)
{
    json_t *e = st == QL_ESTOP ? json_pack("{s:O?,s:i,s:n}", "id", json_object_get(command, "id"), "step", 0, "checkpoint")
                               : json_pack("{s:O?,s:s,s:s}", "id", json_object_get(command, "id"), "status", ql_status_name(st), "text", ql_error());
    if (e) ql_events_emit(s->out, st == QL_ESTOP ? "stopped" : "error", e);
    ql_error_clear();
}

static void take_command(session *s, json_t *c)
{
    const char *name = json_string_value(json_object_get(c, "cmd"));
    ql_status st = QL_OK;
    s->stop = 0;
    ql_error_clear();
    drop_broken_ranks(s);
    if (is(name, "train") || is(name, "eval") || is(name, "generate") || is(name, "verify")) {
        st = run_command(s, c);
    } else if (is(name, "memory")) {
        st = memory(s, c);
    } else if (is(name, "bench")) {
        st = bench(s, c);
    } else if (is(name, "merge")) {
        st = merge(s, c);
    } else if (is(name, "unload")) {
        int held = s->ranks != NULL;
        drop_ranks(s);
        ql_events_emit(s->out, "done", json_pack("{s:O?,s:{s:b}}", "id", json_object_get(c, "id"), "result", "held", held));
    } else if (!is(name, "stop")) {
        st = ql_fail(QL_EINVAL, "engine: unknown command '%s'", name ? name : "");
    }
    if (st != QL_OK) answer_error(s, c, st);
    if (ql_events_log(s->out, NULL) != QL_OK) ql_error_clear();
}

ql_status ql_session_run(const ql_session_setup *set)
{
    session s = {.set = set};
    ql_events_setup ev = {.fd = set->fd};
    ql_status st = QL_OK;
    signal(SIGPIPE, SIG_IGN);
    QL_GO(ql_lines_open(set->fd, &s.in));
    QL_GO(ql_events_open(&ev, &s.out));
    QL_GO(ql_events_emit(s.out, "ready", json_pack("{s:s,s:i}", "version", QL_VERSION, "pid", (int)getpid())));
    while (!s.ended) {
        ql_lines_state state = QL_LINES_NONE;
        json_t *c = NULL;
        ql_events_flush(s.out, 0, NULL);
        if (ql_lines_next(s.in, 500, &state, &c) != QL_OK) {
            answer_error(&s, NULL, QL_EINVAL);
            continue;
        }
        if (state == QL_LINES_END) break;
        if (state == QL_LINES_ONE) take_command(&s, c);
        json_decref(c);
        drop_broken_ranks(&s);
    }
out:
    drop_ranks(&s);
    json_decref(s.probe);
    ql_events_close(s.out);
    ql_lines_close(s.in);
    return st;
}
