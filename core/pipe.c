#include "core/pipe.h"

#include <stdlib.h>
#include <string.h>

/* A stage at work. */
typedef struct {
    ql_plan plan;
    int at;
    double compute, side, link;              /* when each of its streams is free */
    double slot_free[QL_GATHER_SLOTS];
    double here[QL_MAX_LAYERS];              /* when a fetched layer has come */
    double *sent_h, *sent_dh;                /* (g): when the message is with the neighbour; below 0 not sent yet */
    int asked_h, asked_dh;                   /* micro-batches asked for and not landed; −1 none */
    double first, busy;
} stage;

static void work(stage *s, double from, double seconds)
{
    if (s->compute < from) s->compute = from;
    if (s->busy <= 0) s->first = s->compute;
    s->compute += seconds;
    s->busy += seconds;
}

static double max2(double a, double b) { return a > b ? a : b; }

/* 0: it waits for a neighbour who has not come so far. */
static int land(stage *all, int rank)
{
    stage *s = &all[rank];
    double when = s->link;
    if (s->asked_h >= 0) {
        double t = all[rank - 1].sent_h[s->asked_h];
        if (t < 0) return 0;
        when = max2(when, t);
    }
    if (s->asked_dh >= 0) {
        double t = all[rank + 1].sent_dh[s->asked_dh];
        if (t < 0) return 0;
        when = max2(when, t);
    }
    s->asked_h = s->asked_dh = -1;
    s->compute = max2(s->compute, when);
    return 1;
}

static int step(stage *all, int rank, const ql_pipe_times *t)
{
    stage *s = &all[rank];
    const ql_action *a = &s->plan.a[s->at];
    double base = a->layer >= 0 && a->layer < QL_MAX_LAYERS ? s->here[a->layer] : 0;
    switch ((ql_do)a->what) {
    case QL_DO_F: work(s, base, t->f[a->layer]); break;
    case QL_DO_R: work(s, base, t->r[a->layer]); break;
    case QL_DO_B: work(s, base, t->b[a->layer]); break;
    case QL_DO_HEAD: work(s, 0, t->head); break;
    case QL_DO_GATHER:
        s->side = max2(s->side, s->slot_free[a->slot]) + t->fetch[a->layer];
        s->here[a->layer] = s->side;
        break;
    case QL_DO_RELEASE: s->slot_free[a->slot] = s->compute; break;
    case QL_DO_RECV_H: s->asked_h = a->mb; break;
    case QL_DO_RECV_DH: s->asked_dh = a->mb; break;
    case QL_DO_SEND_H:
    case QL_DO_SEND_DH:
        s->link = max2(s->link, s->compute) + t->message;
        (a->what == QL_DO_SEND_H ? s->sent_h : s->sent_dh)[a->mb] = s->link;
        break;
    case QL_DO_LAND:
        if (!land(all, rank)) return 0;
        break;
    default: break;
    }
    s->at++;
    return 1;
}

static void run_all(stage *all, const ql_choice *c, const ql_pipe_times *t, ql_pipe_result *out)
{
    double from = 1e300, busy = 0;
    for (int moved = 1; moved;) {
        moved = 0;
        for (int r = 0; r < c->world; r++)
            while (all[r].at < all[r].plan.count && step(all, r, t)) moved = 1;
    }
    memset(out, 0, sizeof *out);
    for (int r = 0; r < c->world; r++) {
        if (all[r].busy > 0 && all[r].first < from) from = all[r].first;
        out->seconds = max2(out->seconds, all[r].compute);
        busy += out->busy[r] = all[r].busy;
    }
    out->seconds -= from < 1e300 ? from : 0;
    out->bubble = out->seconds > 0 ? 1 - busy / (out->seconds * c->world) : 0;
}

ql_status ql_pipe_run(const ql_choice *c, int g, const ql_pipe_times *t, ql_pipe_result *out)
{
    ql_status st = QL_OK;
    stage *all = calloc(QL_MAX_WORLD, sizeof *all);
    double *sent = malloc((size_t)g * 2 * QL_MAX_WORLD * sizeof *sent);
    if (!all || !sent) QL_GO(ql_fail(QL_ENOMEM, "pipeline: no memory for %d micro-batches", g));
    for (int i = 0; i < g * 2 * QL_MAX_WORLD; i++) sent[i] = -1;
    for (int r = 0; r < c->world; r++) {
        all[r].sent_h = sent + 2 * r * g, all[r].sent_dh = sent + (2 * r + 1) * g;
        all[r].asked_h = all[r].asked_dh = -1;
        QL_GO(ql_plan_build(c, r, g, &all[r].plan));
    }
    run_all(all, c, t, out);
out:
    for (int r = 0; all && r < c->world; r++) ql_plan_free(&all[r].plan);
    free(all);
    free(sent);
    return st;
}
