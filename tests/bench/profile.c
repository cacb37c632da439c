/* profile MODEL_FOLDER '{"setting": value, …}': where a step's time goes, op by op, and how much of gathers and host copies hides behind it.
 * Every op of the backend's table is wrapped in a pair of events on the compute stream, every transfer in a pair on its own stream; nothing
 * waits inside the step. Rank 0 tells. MODEL_FOLDER is one of make_model's. */
#include "core/devices.h"
#include "core/launch.h"
#include "tests/each_op.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST = 60000, KEYS = 512, MOVES = 4096 };

static const ql_ops *real;
static const ql_dev_table *dev;
static const ql_comm_table *comm;
static ql_stream *stream, *side;
static ql_event *begin[MOST], *end[MOST];
static ql_event *move_begin[MOVES], *move_end[MOVES];
static int64_t moved;
static int moves;
static int key_of[MOST], used, recording;
static char keys[KEYS][96];
static int key_count;

static int key(const char *text)
{
    for (int i = 0; i < key_count; i++)
        if (strcmp(keys[i], text) == 0) return i;
    if (key_count == KEYS) return KEYS - 1;
    snprintf(keys[key_count], sizeof keys[0], "%s", text);
    return key_count++;
}

static int start(const char *name, int64_t a, int64_t b, int64_t c)
{
    char text[96];
    if (!recording || used == MOST) return -1;
    snprintf(text, sizeof text, "%-13s %6lld %6lld %6lld", name, (long long)a, (long long)b, (long long)c);
    key_of[used] = key(text);
    if (dev->record(stream, begin[used]) != QL_OK) return -1;
    return used++;
}

static ql_status stop(int i, ql_status st)
{
    if (i >= 0 && st == QL_OK) return dev->record(stream, end[i]);
    return st;
}

#define WRAP(name, params, args, a, b, c)                                                                                      \
    static ql_status w_##name params                                                                                           \
    {                                                                                                                          \
        int i_ = start(#name, a, b, c);                                                                                        \
        return stop(i_, real->name args);                                                                                      \
    }
EACH_OP(WRAP)

static ql_ops wrapped(const ql_ops *o)
{
    ql_ops w = *o;
#define USE(name, ...) w.name = w_##name;
    EACH_OP(USE)
    return w;
}

/* A transfer on the side stream, between its events. */
static int start_move(const ql_stream *s, int64_t bytes)
{
    if (!recording || s != side || moves == MOVES || dev->record(side, move_begin[moves]) != QL_OK) return -1;
    moved += bytes;
    return moves++;
}

static ql_status stop_move(int i, ql_status st)
{
    return i >= 0 && st == QL_OK ? dev->record(side, move_end[i]) : st;
}

static ql_status w_copy(ql_stream *s, void *dst, const void *src, int64_t bytes)
{
    int i = start_move(s, bytes);
    return stop_move(i, dev->copy(s, dst, src, bytes));
}

static ql_status w_all_gather(ql_comm *c, ql_stream *s, X out, X in)
{
    int i = start_move(s, (out.cols - in.cols) * (int64_t)ql_dtype_size(in.dtype));
    return stop_move(i, comm->all_gather(c, s, out, in));
}

/* Milliseconds of the transfers that fall into an op of the compute stream. Both are in the order of their streams. */
static ql_status report_moves(ql_event *origin)
{
    static double from[MOST], to[MOST];
    double all = 0, hidden = 0;
    for (int i = 0; i < used; i++) {
        QL_TRY(dev->elapsed(origin, begin[i], &from[i]));
        QL_TRY(dev->elapsed(origin, end[i], &to[i]));
    }
    for (int k = 0, i = 0; k < moves; k++) {
        double a = 0, b = 0;
        QL_TRY(dev->elapsed(origin, move_begin[k], &a));
        QL_TRY(dev->elapsed(origin, move_end[k], &b));
        all += b - a;
        while (i < used && to[i] <= a) i++;
        for (int n = i; n < used && from[n] < b; n++) {
            double lo = from[n] > a ? from[n] : a, hi = to[n] < b ? to[n] : b;
            hidden += hi > lo ? hi - lo : 0;
        }
    }
    if (moves)
        printf("%d transfers of %.2f GB in %.1f ms (%.1f GB/s): %.1f %% of that time an op was running beside them\n", moves, (double)moved * 1e-9, all,
               (double)moved / all * 1e-6, 100 * hidden / all);
    return QL_OK;
}

static int by_time(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

static ql_status report(double step_ms)
{
    struct {
        double ms;
        int calls, key;
    } row[KEYS] = {{0}};
    double all = 0;
    for (int i = 0; i < key_count; i++) row[i].key = i;
    for (int i = 0; i < used; i++) {
        double ms = 0;
        QL_TRY(dev->elapsed(begin[i], end[i], &ms));
        row[key_of[i]].ms += ms;
        row[key_of[i]].calls++;
        all += ms;
    }
    qsort(row, (size_t)key_count, sizeof *row, by_time);
    printf("step %.1f ms; inside ops %.1f ms\n", step_ms, all);
    for (int i = 0; i < key_count && i < 24; i++)
        printf("%-40s %5d calls %8.2f ms %5.1f %%  %7.4f each\n", keys[row[i].key], row[i].calls, row[i].ms, 100 * row[i].ms / all, row[i].ms / row[i].calls);
    return QL_OK;
}

/* ---- in a rank ---- */

static struct {
    ql_task *task;
    ql_args args;
    volatile int *ended; /* 1 well, 2 not; shared */
} job;

static ql_status open_events(ql_rank *r)
{
    for (int i = 0; i < MOST; i++) {
        QL_TRY(dev->event_open(r->dev, &begin[i]));
        QL_TRY(dev->event_open(r->dev, &end[i]));
    }
    for (int i = 0; i < MOVES; i++) {
        QL_TRY(dev->event_open(r->dev, &move_begin[i]));
        QL_TRY(dev->event_open(r->dev, &move_end[i]));
    }
    return QL_OK;
}

static ql_status start_training(ql_rank *r)
{
    ql_optim o = {.adam = job.args.adam, .clip = job.args.clip};
    float *lr = NULL, *flat = calloc((size_t)job.task->lora->elements, 4);
    if (!flat) QL_FAIL(QL_ENOMEM, "no memory");
    QL_TRY(ql_task_lr(job.task, &lr));
    QL_TRY(ql_optim_init(r, &o, lr, 1));
    ql_lora_init(job.task->lora, 1, flat);
    return ql_rank_set_adapters(r, flat);
}

static ql_status five_steps(ql_rank *r)
{
    const ql_choice *c = &job.task->spec.choice;
    int32_t order[256];
    for (int i = 0; i < 256; i++) order[i] = i;
    for (int s = 0; s < 5; s++) {
        ql_plan p;
        ql_step_result res;
        ql_event *a, *b;
        double ms = 0;
        ql_step_data d = {.data = job.task->train, .order = order, .n = 256, .first = s * c->g, .batch = job.args.batch, .g = c->g, .step = (uint32_t)s + 1};
        d.items = ql_step_items(&d);
        QL_TRY(dev->event_open(r->dev, &a));
        QL_TRY(dev->event_open(r->dev, &b));
        QL_TRY(ql_plan_build(c, r->set.rank, c->g, &p));
        recording = s == 4;
        QL_TRY(dev->record(stream, a));
        QL_TRY(ql_rank_step(r, &p, &d, &res));
        QL_TRY(dev->record(stream, b));
        QL_TRY(dev->sync(stream));
        QL_TRY(dev->elapsed(a, b, &ms));
        recording = 0;
        if (s == 3 && r->set.rank == 0) printf("without recording: step %.1f ms\n", ms);
        if (s == 4 && r->set.rank == 0) {
            QL_TRY(report_moves(a));
            QL_TRY(report(ms));
        }
        ql_plan_free(&p);
    }
    return QL_OK;
}

static ql_status profile(ql_rank_process *p)
{
    ql_backend be = *p->setup.be;
    real = be.ops, dev = be.dev, comm = be.comm;
    ql_ops ops = wrapped(real);
    ql_dev_table table = *dev;
    ql_comm_table collectives = *comm;
    ql_rank *r = NULL;
    table.copy = w_copy, collectives.all_gather = w_all_gather;
    be = (ql_backend){be.name, &table, &ops, &collectives};
    p->setup.be = &be;
    QL_TRY(ql_rank_open(&p->setup, &job.task->spec, &r));
    QL_TRY(ql_rank_load(r));
    stream = r->compute, side = r->side;
    QL_TRY(open_events(r));
    QL_TRY(start_training(r));
    return five_steps(r);
}

static int body(ql_rank_process *p)
{
    ql_status st = profile(p);
    if (st != QL_OK) {
        fprintf(stderr, "profile: rank %d: %s\n", p->rank, ql_error());
        p->shared->abort = 1;
    }
    fflush(NULL);
    job.ended[p->rank] = st == QL_OK ? 1 : 2;
    return st == QL_OK ? 0 : 1;
}

static ql_status run(const char *folder, const char *settings)
{
    json_t *set = json_loads(settings, 0, NULL), *probe = NULL;
    char missing[512], backend[16], data[4096], how[128];
    int device[QL_MAX_WORLD], left = 1;
    ql_job *j = NULL;
    ql_launch launch = {.be = ql_backend_cpu(), .device = device, .timeout_ms = 30000};
    ql_ranks *ranks = NULL;
    if (!set) QL_FAIL(QL_EINVAL, "settings: not JSON");
    json_object_set_new(set, "model", json_string(folder));
    json_object_set_new(set, "max_length", json_integer(1 << 20));
    json_object_set_new(set, "max_steps", json_integer(8));
    snprintf(data, sizeof data, "%s/train.data", folder);
    QL_TRY(ql_job_from_json(set, &j));
    QL_TRY(ql_args_from_job(j, &job.args));
    ql_task_inputs in = {.job = set, .train = data, .weights = QL_WEIGHTS_MAPPED};
    QL_TRY(ql_devices_probe(getenv("QLORA_CUDA_LIBRARY"), &probe, missing, sizeof missing));
    QL_TRY(ql_devices_pick(&job.args, probe, missing, &in.place, backend, device));
    QL_TRY(ql_task_open(&in, &job.task));
    if (strcmp(backend, "cuda") == 0) QL_TRY(ql_backend_cuda(getenv("QLORA_CUDA_LIBRARY"), &launch.be));
    launch.task = job.task;
    for (int i = 0; i < job.task->why.n; i++) printf("%s\n", job.task->why.text[i]);
    job.ended = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    fflush(stdout);
    QL_TRY(ql_ranks_start(&launch, body, &ranks));
    while (left) {
        left = 0;
        for (int i = 0; i < ql_ranks_world(ranks); i++) left += !job.ended[i];
        int dead = ql_ranks_dead(ranks, how, sizeof how);
        if (dead >= 0 && job.ended[dead] != 1) {
            ql_ranks_shared(ranks)->abort = 1;
            QL_FAIL(QL_EPEER, "rank %d died: %s", dead, how);
        }
        usleep(20000);
    }
    ql_ranks_stop(ranks);
    return QL_OK;
}

int main(int argc, char **argv)
{
    if (argc != 3) {
        fprintf(stderr, "usage: profile MODEL_FOLDER '{\"setting\": value}'\n");
        return 2;
    }
    FILE *hold = fopen("/dev/null", "r"); /* ranks close the engine's descriptor: nothing here may have that number */
    if (run(argv[1], argv[2]) != QL_OK) {
        fprintf(stderr, "profile: %s\n", ql_error());
        return 1;
    }
    if (hold) fclose(hold);
    return 0;
}
