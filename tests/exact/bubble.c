/* `make bubble`: the share of a pipeline's time in which its stages compute nothing. On paper, where forward, recompute and gradient take
 * alike; and measured: real steps over forked CPU ranks by the clock, beside what paper says for the processor time that their actions took,
 * which does not depend on what else the machine does. */
#include "core/cost.h"
#include "core/pipe.h"
#include "core/train.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { MICRO = 8, STEPS = 8, ACTIONS = 2048 };

typedef struct {
    uint8_t what;
    int16_t layer;
    double from, to, worked; /* wall clock; processor time */
} event;

typedef struct {
    int ended[QL_MAX_WORLD];
    char why[QL_MAX_WORLD][512];
    int n[QL_MAX_WORLD][STEPS];
    event e[QL_MAX_WORLD][STEPS][ACTIONS];
} shared;

static shared *sh;
static ql_task *task;
static struct {
    int rank, step;
    double last, worked;
} here; /* in a rank */

/* ---- on paper --------------------------------------------------------------------------------- */

static ql_status paper(int stages, int m, int keep, ql_schedule schedule, double *bubble)
{
    ql_choice c = {.world = stages, .layers = stages, .g = m, .pieces = 1, .schedule = schedule, .train = 1};
    ql_pipe_times t = {.head = 0};
    ql_pipe_result r;
    for (int s = 0; s < stages; s++) {
        t.f[s] = t.r[s] = t.b[s] = 1;
        c.store[s] = QL_STORE_RESIDENT, c.keep[s] = (uint8_t)keep, c.cut[s + 1] = (int16_t)(s + 1);
    }
    QL_TRY(ql_pipe_run(&c, m, &t, &r));
    *bubble = 100 * r.bubble;
    return QL_OK;
}

static ql_status paper_table(void)
{
    printf("Share of the stages' time in which they compute nothing.\n\n"
           "On paper: forward, recompute and gradient of a stage take alike, messages\nnothing.\n\n"
           "stages  micro-batches  1F1B, all kept  1F1B, recomputed  recompute ahead\n");
    for (int stages = 2; stages <= 4; stages += 2)
        for (int m = 4; m <= 16; m *= 2) {
            double kept, again, ahead;
            QL_TRY(paper(stages, m, QL_KEEP_ALL, QL_PIPE, &kept));
            QL_TRY(paper(stages, m, QL_KEEP_INPUT, QL_PIPE, &again));
            QL_TRY(paper(stages, m, QL_KEEP_INPUT, QL_PIPE_AHEAD, &ahead));
            printf("%6d  %13d  %13.1f%%  %15.1f%%  %14.1f%%\n", stages, m, kept, again, ahead);
        }
    return QL_OK;
}

/* ---- in a rank -------------------------------------------------------------------------------- */

static double processor_time(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void acted(void *ctx, const ql_action *a)
{
    (void)ctx;
    int *n = &sh->n[here.rank][here.step];
    double now = ql_now(), worked = processor_time();
    if (*n < ACTIONS) sh->e[here.rank][here.step][(*n)++] = (event){a->what, a->layer, here.last, now, worked - here.worked};
    here.last = now, here.worked = worked;
}

static ql_status steps(ql_rank_process *p, ql_rank **out)
{
    ql_optim o = {.adam = task->args.adam, .clip = task->args.clip};
    ql_step_data d = {.data = task->train, .n = ql_dataset_size(task->train), .batch = 1, .g = MICRO};
    float *lr = calloc((size_t)task->spec.steps, sizeof *lr), *flat = calloc((size_t)task->lora->elements, sizeof *flat);
    int32_t *order = calloc((size_t)d.n, sizeof *order);
    ql_plan plan = {0};
    ql_status st = QL_OK;
    for (int32_t i = 0; i < d.n; i++) order[i] = i;
    d.order = order;
    d.items = ql_step_items(&d);
    here.rank = p->rank;
    p->setup.acted = acted;
    QL_GO(ql_rank_open(&p->setup, &task->spec, out));
    QL_GO(ql_rank_load(*out));
    ql_lora_init(task->lora, 1, flat);
    QL_GO(ql_optim_init(*out, &o, lr, 1));
    QL_GO(ql_rank_set_adapters(*out, flat));
    QL_GO(ql_plan_prove(&task->spec.choice, p->rank, MICRO, &plan));
    for (here.step = 0; here.step < STEPS; here.step++) {
        ql_step_result r;
        d.step = (uint32_t)here.step + 1;
        here.last = ql_now(), here.worked = processor_time();
        QL_GO(ql_rank_step(*out, &plan, &d, &r));
    }
out:
    ql_plan_free(&plan);
    free(lr);
    free(flat);
    free(order);
    return st;
}

static int body(ql_rank_process *p)
{
    ql_rank *r = NULL;
    ql_status st = steps(p, &r);
    if (st != QL_OK) snprintf(sh->why[p->rank], sizeof sh->why[0], "rank %d: %s", p->rank, ql_error());
    if (st != QL_OK) p->shared->abort = 1;
    ql_rank_close(r);
    sh->ended[p->rank] = 1;
    return st != QL_OK;
}

/* ---- by the clock ----------------------------------------------------------------------------- */

static int computes(int what)
{
    return what == QL_DO_F || what == QL_DO_R || what == QL_DO_B || what == QL_DO_HEAD || what == QL_DO_BATCH || what == QL_DO_PIECE || what == QL_DO_JOIN;
}

typedef struct {
    double seconds, bubble; /* from the first stage's first action to the last one's last, before the update */
} measured;

static measured one_step(int world, int step)
{
    double from = 1e300, to = 0, busy = 0;
    for (int r = 0; r < world; r++)
        for (int i = 0; i < sh->n[r][step]; i++) {
            const event *e = &sh->e[r][step][i];
            if (!computes(e->what)) continue;
            from = e->from < from ? e->from : from, to = e->to > to ? e->to : to;
            busy += e->to - e->from;
        }
    return (measured){to - from, 1 - busy / (world * (to - from))};
}

/* Mean processor times of one step's actions, for paper. */
static void mean_times(int world, int step, ql_pipe_times *t)
{
    int n[3][QL_MAX_LAYERS] = {{0}}, heads = 0;
    double *of[3] = {t->f, t->r, t->b};
    static const int what[3] = {QL_DO_F, QL_DO_R, QL_DO_B};
    memset(t, 0, sizeof *t);
    for (int r = 0; r < world; r++)
        for (int i = 0; i < sh->n[r][step]; i++) {
            const event *e = &sh->e[r][step][i];
            for (int k = 0; k < 3; k++)
                if (e->what == what[k]) of[k][e->layer] += e->worked, n[k][e->layer]++;
            if (e->what == QL_DO_HEAD) t->head += e->worked, heads++;
        }
    for (int l = 0; l < task->spec.choice.layers; l++)
        for (int k = 0; k < 3; k++) of[k][l] /= n[k][l] ? n[k][l] : 1;
    t->head /= heads ? heads : 1;
}

static ql_status run(const char *folder, int world, const char *schedule)
{
    char data[4096];
    int device[QL_MAX_WORLD] = {0}, best = 1;
    ql_ranks *ranks = NULL;
    ql_status st = QL_OK;
    json_t *job = json_pack("{s:s,s:s,s:s,s:i,s:i,s:i,s:i,s:b,s:i}", "model", folder, "dtype", "float32", "pipeline", schedule,
                            "per_device_train_batch_size", 1, "gradient_accumulation_steps", MICRO / world, "max_length", 96, "max_steps",
                            STEPS + 1, "gradient_checkpointing", 1, "r", 8);
    snprintf(data, sizeof data, "%.4000s/train.data", folder);
    ql_task_inputs in = {.job = job, .train = data, .weights = QL_WEIGHTS_MAPPED,
                         .place = {.world = world, .capacity = (int64_t)8 << 30, .host = (int64_t)8 << 30, .bf16 = 1}};
    memset(sh, 0, sizeof *sh);
    QL_GO(ql_task_open(&in, &task));
    ql_launch launch = {.be = ql_backend_cpu(), .task = task, .device = device, .timeout_ms = 60000};
    QL_GO(ql_ranks_start(&launch, body, &ranks));
    for (int left = world; left;) {
        char how[128];
        usleep(50000);
        left = world;
        for (int r = 0; r < world; r++) left -= sh->ended[r];
        int dead = ql_ranks_dead(ranks, how, sizeof how);
        if (dead >= 0 && !sh->ended[dead]) QL_GO(ql_fail(QL_EPEER, "rank %d died: %s", dead, how));
    }
    for (int r = 0; r < world; r++)
        if (sh->why[r][0]) QL_GO(ql_fail(QL_EPEER, "%s", sh->why[r]));
    /* The quickest step: what else this machine did is least in it. The first one warms up. */
    for (int s = 2; s < STEPS; s++)
        if (one_step(world, s).seconds < one_step(world, best).seconds) best = s;
    ql_pipe_times t;
    ql_pipe_result r;
    measured m = one_step(world, best);
    mean_times(world, best, &t);
    QL_GO(ql_pipe_run(&task->spec.choice, MICRO, &t, &r));
    printf("%6d  %-15s  %9.1f ms%c %7.1f%%  %9.1f ms  %8.1f%%\n", world, schedule, 1e3 * m.seconds,
           world > sysconf(_SC_NPROCESSORS_ONLN) ? '*' : ' ', 100 * m.bubble, 1e3 * r.seconds, 100 * r.bubble);
    fflush(stdout);
out:
    ql_ranks_stop(ranks);
    ql_task_close(task);
    json_decref(job);
    task = NULL;
    return st;
}

static ql_status clock_table(const char *folder)
{
    static const char *const schedules[] = {"1f1b", "recompute_ahead"};
    printf("\nMeasured: all layers of %s,\n%d micro-batches of 96 tokens, every layer recomputed, a CPU rank on one of %ld\n"
           "cores; the quickest of %d steps. Beside it the same plan on paper, with the\n"
           "processor time of that step's actions: as on as many cores, all free.\n\n"
           "                              by the clock          by processor time\n"
           "stages  pipeline                 step      idle          step       idle\n",
           folder, MICRO, sysconf(_SC_NPROCESSORS_ONLN), STEPS - 1);
    for (int world = 2; world <= 4; world += 2)
        for (size_t i = 0; i < 2; i++) QL_TRY(run(folder, world, schedules[i]));
    if (sysconf(_SC_NPROCESSORS_ONLN) < 4) printf("* more stages than cores: they take turns, and the clock's is no pipeline\n");
    return QL_OK;
}

int main(int argc, char **argv)
{
    ql_backend_cpu_start(argv);
    FILE *hold = fopen("/dev/null", "r"); /* ranks close the engine's descriptor */
    sh = mmap(NULL, sizeof *sh, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ql_status st = sh == MAP_FAILED ? ql_fail(QL_ENOMEM, "no shared memory") : paper_table();
    if (st == QL_OK && argc > 1) st = clock_table(argv[1]);
    if (st != QL_OK) fprintf(stderr, "bubble: %s\n", ql_error());
    if (hold) fclose(hold);
    return st != QL_OK;
}
