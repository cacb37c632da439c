/* Proves a plan by running it on paper: what every action needs is there when it comes. */
#include "core/plan.h"

#include <stdlib.h>
#include <string.h>

enum { NOT_SEEN = 0, H_DEVICE = 1, H_HOST = 2 };

typedef struct {
    const ql_choice *c;
    const ql_plan *p;
    int i;                              /* the action at hand */
    int slot_layer[QL_GATHER_SLOTS];    /* layer in a slot; −1 free */
    int held;                           /* layer in the scratch */
    int stack, pieces;                  /* gradient buffers */
    int done[QL_MAX_ACCUM];             /* 0; 1 batch; 2 head; 3 backward complete */
    int8_t *h;                          /* (g, layers + 1): where h is */
    int8_t *at;                         /* (g): next layer forward, then backward */
    int16_t *next;                      /* (g): the layer expected next */
    int live;                           /* micro-batches with activations */
    int reduced, stepped;
} sim;

static ql_status bad(const sim *s, const char *why)
{
    char text[96];
    ql_action_print(&s->p->a[s->i], text, sizeof text);
    QL_FAIL(QL_EINTERNAL, "plan of rank %d, action %d (%s): %s", s->p->rank, s->i, text, why);
}

static int8_t *h_of(sim *s, int mb, int layer)
{
    return &s->h[(int64_t)mb * (s->c->layers + 1) + layer];
}

static ql_status base_ready(sim *s, const ql_action *a)
{
    int st = s->c->store[a->layer];
    if (st == QL_STORE_RESIDENT16) return QL_OK;
    if (st == QL_STORE_RESIDENT || s->held == a->layer) {
        s->held = a->layer;
        return QL_OK;
    }
    if (a->slot < 0 || s->slot_layer[a->slot] != a->layer) return bad(s, "computes on a layer that was not gathered");
    s->held = a->layer;
    return QL_OK;
}

static ql_status do_forward(sim *s, const ql_action *a)
{
    if (a->mb < 0 || s->done[a->mb] != 1) return bad(s, "before its batch");
    if (s->next[a->mb] != a->layer) return bad(s, "layers out of order");
    if (*h_of(s, a->mb, a->layer) != H_DEVICE) return bad(s, "its input is not on the device");
    QL_TRY(base_ready(s, a));
    *h_of(s, a->mb, a->layer + 1) = H_DEVICE;
    s->next[a->mb]++;
    return QL_OK;
}

static ql_status do_backward(sim *s, const ql_action *a)
{
    if (a->mb < 0 || s->done[a->mb] != 2) return bad(s, "before its loss");
    if (s->next[a->mb] != a->layer) return bad(s, "layers out of order");
    if (*h_of(s, a->mb, a->layer) != H_DEVICE) return bad(s, "its input is not on the device");
    if (s->stack < 1) return bad(s, "no gradient buffer");
    QL_TRY(base_ready(s, a));
    if (a->what == QL_DO_R) {
        if (s->at[a->mb]) return bad(s, "recomputed twice");
        s->at[a->mb] = 1;
        return QL_OK;
    }
    if (s->c->keep[a->layer] != QL_KEEP_ALL && !s->at[a->mb]) return bad(s, "not recomputed");
    s->at[a->mb] = 0;
    if (s->next[a->mb]-- == s->c->first) {
        s->done[a->mb] = 3;
        s->live--;
    }
    return QL_OK;
}

static ql_status do_store(sim *s, const ql_action *a)
{
    if (a->what == QL_DO_RELEASE) {
        if (s->slot_layer[a->slot] < 0) return bad(s, "releases an empty slot");
        s->slot_layer[a->slot] = -1;
        return QL_OK;
    }
    if (a->slot < 0 || a->slot >= QL_GATHER_SLOTS || s->slot_layer[a->slot] >= 0) return bad(s, "the slot is taken");
    if (s->c->store[a->layer] != QL_STORE_SHARDED && s->c->store[a->layer] != QL_STORE_HOST) return bad(s, "gathers a resident layer");
    s->slot_layer[a->slot] = a->layer;
    return QL_OK;
}

static ql_status do_batch(sim *s, const ql_action *a)
{
    if (a->mb < 0 || a->mb >= s->p->g || s->done[a->mb]) return bad(s, "not a micro-batch of this step, or twice");
    if (s->c->train && ++s->live > ql_plan_flights(s->c)) return bad(s, "more micro-batches alive than activations are kept for");
    s->done[a->mb] = 1;
    s->next[a->mb] = 0;
    *h_of(s, a->mb, 0) = H_DEVICE;
    return QL_OK;
}

static ql_status do_head(sim *s, const ql_action *a)
{
    if (a->mb < 0 && ql_plan_head_world(s->c) > 1) return QL_OK; /* for the others' rows */
    if (a->mb < 0 || s->done[a->mb] != 1 || s->next[a->mb] != s->c->layers) return bad(s, "before the last layer");
    s->done[a->mb] = 2;
    s->next[a->mb] = (int16_t)(s->c->layers - 1);
    if (s->c->train && s->c->first >= s->c->layers) s->done[a->mb] = 3;
    return QL_OK;
}

static ql_status do_move(sim *s, const ql_action *a)
{
    int8_t *h = h_of(s, a->mb, a->layer);
    if (*h != (a->what == QL_DO_SAVE ? H_DEVICE : H_HOST)) return bad(s, "is not where it should be");
    *h = a->what == QL_DO_SAVE ? H_HOST : H_DEVICE;
    return QL_OK;
}

static ql_status do_sum(sim *s, const ql_action *a)
{
    switch ((ql_do)a->what) {
    case QL_DO_PIECE:
        if (++s->stack > ql_plan_grad_buffers(s->c)) return bad(s, "more gradient buffers than counted");
        return QL_OK;
    case QL_DO_JOIN:
        if (--s->stack < 1) return bad(s, "joins what is not there");
        return QL_OK;
    case QL_DO_REDUCE:
        if (s->stack > 1) return bad(s, "gradient buffers left");
        s->reduced++;
        return QL_OK;
    default:
        if (s->reduced != 1 || s->stepped++) return bad(s, "not after one reduction");
        return QL_OK;
    }
}

static ql_status act(sim *s, const ql_action *a)
{
    switch ((ql_do)a->what) {
    case QL_DO_GATHER:
    case QL_DO_RELEASE: return do_store(s, a);
    case QL_DO_BATCH: return do_batch(s, a);
    case QL_DO_F: return do_forward(s, a);
    case QL_DO_HEAD: return do_head(s, a);
    case QL_DO_R:
    case QL_DO_B: return do_backward(s, a);
    case QL_DO_SAVE:
    case QL_DO_LOAD: return do_move(s, a);
    default: return do_sum(s, a);
    }
}

static ql_status finish(sim *s)
{
    const ql_choice *c = s->c;
    int from = (int)ql_min64(ql_plan_first(c, s->p->rank), s->p->g);
    int to = (int)ql_min64(ql_plan_first(c, s->p->rank + 1), s->p->g);
    s->i = s->p->count - 1;
    for (int mb = 0; mb < s->p->g; mb++) {
        int want = mb >= from && mb < to ? (c->train ? 3 : 2) : 0;
        if (s->done[mb] != want) QL_FAIL(QL_EINTERNAL, "plan of rank %d: micro-batch %d is not done once", s->p->rank, mb);
    }
    for (int i = 0; i < QL_GATHER_SLOTS; i++)
        if (s->slot_layer[i] >= 0 && c->train)
            QL_FAIL(QL_EINTERNAL, "plan of rank %d: layer %d is gathered and never used", s->p->rank, s->slot_layer[i]);
    if (c->train && !s->stepped) QL_FAIL(QL_EINTERNAL, "plan of rank %d has no step", s->p->rank);
    return QL_OK;
}

ql_status ql_plan_check(const ql_choice *c, const ql_plan *p)
{
    ql_status st = QL_OK;
    sim *s = calloc(1, sizeof *s);
    int8_t *h = calloc((size_t)c->g * (size_t)(c->layers + 1) + 1, 1), *at = calloc((size_t)c->g + 1, 1);
    int16_t *next = calloc((size_t)c->g + 1, sizeof *next);
    if (!s || !h || !at || !next) {
        st = ql_fail(QL_ENOMEM, "plan check: no memory");
        goto out;
    }
    *s = (sim){.c = c, .p = p, .held = -1, .h = h, .at = at, .next = next};
    for (int i = 0; i < QL_GATHER_SLOTS; i++) s->slot_layer[i] = -1;
    for (s->i = 0; s->i < p->count; s->i++) QL_GO(act(s, &p->a[s->i]));
    st = finish(s);
out:
    free(s);
    free(h);
    free(at);
    free(next);
    return st;
}

/* ---- all ranks together ----------------------------------------------------------------------- */

int ql_plan_meets(const ql_choice *c, const ql_action *a)
{
    if (c->world == 1) return 0;
    return a->what == QL_DO_REDUCE || a->what == QL_DO_STEP || (a->what == QL_DO_HEAD && ql_plan_head_world(c) > 1) ||
           (a->what == QL_DO_GATHER && c->store[a->layer] == QL_STORE_SHARDED);
}

static const ql_action *next_meeting(const ql_choice *c, const ql_plan *p, int *i)
{
    while (*i < p->count && !ql_plan_meets(c, &p->a[*i])) ++*i;
    return *i < p->count ? &p->a[*i] : NULL;
}

static ql_status same_meetings(const ql_choice *c, const ql_plan *p, const ql_plan *q)
{
    for (int i = 0, k = 0;; i++, k++) {
        const ql_action *a = next_meeting(c, p, &i), *b = next_meeting(c, q, &k);
        char x[96] = "its end", y[96] = "its end";
        if (!a && !b) return QL_OK;
        if (a && b && a->what == b->what && a->layer == b->layer) continue;
        if (a) ql_action_print(a, x, sizeof x);
        if (b) ql_action_print(b, y, sizeof y);
        QL_FAIL(QL_EINTERNAL, "plans of ranks %d and %d would wait for each other: action %d is %s, action %d is %s", p->rank, q->rank, i, x, k, y);
    }
}

ql_status ql_plan_check_world(const ql_choice *c, const ql_plan *of_rank)
{
    for (int r = 0; r < c->world; r++) {
        QL_TRY(ql_plan_check(c, &of_rank[r]));
        if (r > 0) QL_TRY(same_meetings(c, &of_rank[0], &of_rank[r]));
    }
    return QL_OK;
}

ql_status ql_plan_prove(const ql_choice *c, int rank, int g, ql_plan *out)
{
    ql_plan all[QL_MAX_WORLD] = {{0}};
    ql_status st = QL_OK;
    for (int r = 0; r < c->world; r++) QL_GO(ql_plan_build(c, r, g, &all[r]));
    QL_GO(ql_plan_check_world(c, all));
    *out = all[rank];
    all[rank] = (ql_plan){0};
out:
    for (int r = 0; r < c->world; r++) ql_plan_free(&all[r]);
    return st;
}
