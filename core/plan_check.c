/* Proves a plan by running it on paper: what every action needs is there when it comes. */
#include "core/plan.h"

#include <stdlib.h>
#include <string.h>

enum { NOT_SEEN = 0, H_DEVICE = 1, H_HOST = 2 };
/* What a stage has of a micro-batch's traffic. */
enum { H_ASKED = 1, DH_ASKED = 2, H_SENT = 4, DH_SENT = 8, H_GONE = 16, DH_GONE = 32 };
enum { GROUP = 4 };

typedef struct {
    const ql_choice *c;
    const ql_plan *p;
    int i;                              /* the action at hand */
    int slot_layer[QL_GATHER_SLOTS];    /* layer in a slot; −1 free */
    int held;                           /* layer in the scratch */
    int stack, pieces;                  /* gradient buffers; pieces begun */
    struct {
        int piece, level;               /* first piece of a subtree of 2^level; level 0: the piece alone */
    } tree[16];                         /* (stack) */
    int ended;                          /* micro-batches whose backward is complete */
    int16_t last[QL_MAX_LAYERS];        /* micro-batch + 1 whose gradients of the layer were added last */
    int done[QL_MAX_ACCUM];             /* 0; 1 batch; 2 head; 3 backward complete */
    int8_t *h;                          /* (g, layers + 1): where h is */
    int16_t *next;                      /* (g): the layer expected next */
    int live;                           /* micro-batches with activations */
    int reduced, stepped;
    int piped, lo, hi, flights;         /* this rank's layers */
    int shared_mb, shared_layer;        /* what the buffers of the layer at work were recomputed for; −1 nothing */
    int ahead_mb;
    int8_t ahead[QL_MAX_LAYERS];        /* recomputed ahead, for ahead_mb */
    uint8_t link[QL_MAX_ACCUM];         /* traffic */
    ql_action group[GROUP];             /* under way */
    int posted, messages[4];            /* of each kind so far */
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

static int last_rank(const sim *s) { return !s->piped || s->p->rank == s->c->world - 1; }
static int learns(const sim *s) { return s->c->train && s->c->first < s->hi; }

/* Nothing of mb needs this rank any more: its activations are free. */
static void end_of(sim *s, int mb)
{
    s->done[mb] = 3;
    s->live--;
    s->ended++;
}

/* The gradient of h[hi] is here. */
static void begin_backward(sim *s, int mb)
{
    s->done[mb] = 2;
    s->next[mb] = (int16_t)(s->hi - 1);
    if (s->c->train && s->next[mb] < (int)ql_max64(s->lo, s->c->first)) end_of(s, mb);
}

/* May the gradient buffer of mb be written? Two take turns. */
static int dh_free(const sim *s, int mb)
{
    int before = mb - (int)ql_min64(2, s->flights);
    if (!s->piped || before < 0) return 1;
    return s->done[before] == 3 && (s->c->first >= s->lo || s->link[before] & DH_GONE);
}

static ql_status base_ready(sim *s, const ql_action *a)
{
    if (a->layer < s->lo || a->layer >= s->hi) return bad(s, "is another stage's layer");
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
    int before = a->mb - s->flights;
    if (s->piped && !last_rank(s) && a->layer == s->hi - 1 && before >= 0 && !(s->link[before] & H_GONE))
        return bad(s, "writes over what is being sent");
    *h_of(s, a->mb, a->layer + 1) = H_DEVICE;
    s->next[a->mb]++;
    s->shared_mb = -1;
    return QL_OK;
}

/* Fills the buffers that all layers share, just before the gradient; or the layer's own, where a stage runs ahead of the gradient. */
static ql_status do_recompute(sim *s, const ql_action *a)
{
    int ahead = ql_plan_ahead(s->c, s->p->rank, a->layer);
    if (s->c->keep[a->layer] == QL_KEEP_ALL) return bad(s, "recomputes what is kept");
    if (ahead && (s->done[a->mb] != 1 || s->next[a->mb] != s->hi)) return bad(s, "before its forward");
    if (!ahead && s->done[a->mb] != 2) return bad(s, "before its loss");
    if (!ahead && s->next[a->mb] != a->layer) return bad(s, "layers out of order");
    if (*h_of(s, a->mb, a->layer) != H_DEVICE) return bad(s, "its input is not on the device");
    QL_TRY(base_ready(s, a));
    if (!ahead) {
        if (s->shared_mb == a->mb && s->shared_layer == a->layer) return bad(s, "recomputed twice");
        s->shared_mb = a->mb, s->shared_layer = a->layer;
        return QL_OK;
    }
    for (int l = s->lo; l < s->hi; l++)
        if (s->ahead[l] && (s->ahead_mb != a->mb || l == a->layer)) return bad(s, "recomputed over what is not used yet");
    s->ahead[a->layer] = 1;
    s->ahead_mb = a->mb;
    return QL_OK;
}

/* Gradients are added in the order of the micro-batches, each to the buffer of its piece: the sum is one tree for all worlds. */
static ql_status in_its_piece(sim *s, const ql_action *a)
{
    const ql_choice *c = s->c;
    int first = ql_plan_first(c, s->p->rank), even = s->piped || c->pieces % c->world == 0;
    int piece = even ? (a->mb - first) / (c->g / c->pieces) : 0, top = s->stack - 1;
    if (s->tree[top].level != 0 || s->tree[top].piece != piece) return bad(s, "not into the buffer of its piece");
    if (s->last[a->layer] > a->mb) return bad(s, "gradients out of order");
    s->last[a->layer] = (int16_t)(a->mb + 1);
    return QL_OK;
}

static ql_status do_backward(sim *s, const ql_action *a)
{
    if (a->mb < 0 || s->stack < 1) return bad(s, "no gradient buffer");
    if (a->what == QL_DO_R) return do_recompute(s, a);
    if (s->done[a->mb] != 2) return bad(s, "before its loss");
    if (s->next[a->mb] != a->layer) return bad(s, "layers out of order");
    if (*h_of(s, a->mb, a->layer) != H_DEVICE) return bad(s, "its input is not on the device");
    QL_TRY(base_ready(s, a));
    QL_TRY(in_its_piece(s, a));
    int have = ql_plan_ahead(s->c, s->p->rank, a->layer) ? s->ahead[a->layer] && s->ahead_mb == a->mb
                                                         : s->shared_mb == a->mb && s->shared_layer == a->layer;
    if (s->c->keep[a->layer] != QL_KEEP_ALL && !have) return bad(s, "not recomputed");
    s->ahead[a->layer] = 0;
    s->shared_mb = -1;
    if (--s->next[a->mb] < (int)ql_max64(s->lo, s->c->first)) end_of(s, a->mb);
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
    if (s->c->train && ++s->live > s->flights) return bad(s, "more micro-batches alive than activations are kept for");
    s->done[a->mb] = 1;
    s->next[a->mb] = (int16_t)s->lo;
    if (!s->piped || s->p->rank == 0) *h_of(s, a->mb, 0) = H_DEVICE;
    return QL_OK;
}

static ql_status do_head(sim *s, const ql_action *a)
{
    if (a->mb < 0 && ql_plan_head_world(s->c) > 1) return QL_OK; /* for the others' rows */
    if (!last_rank(s)) return bad(s, "the head is on the last stage");
    if (a->mb < 0 || s->done[a->mb] != 1 || s->next[a->mb] != s->c->layers || *h_of(s, a->mb, s->hi) != H_DEVICE)
        return bad(s, "before the last layer");
    if (s->c->train && !dh_free(s, a->mb)) return bad(s, "writes over a gradient that is being sent");
    begin_backward(s, a->mb);
    return QL_OK;
}

/* ---- between stages --------------------------------------------------------------------------- */

static ql_status do_post(sim *s, const ql_action *a)
{
    int up = a->what == QL_DO_SEND_H || a->what == QL_DO_RECV_DH, first = s->i == 0 || !ql_plan_link(&s->p->a[s->i - 1]);
    if (!s->piped || a->mb < 0 || a->mb >= s->p->g) return bad(s, "there is no other stage");
    if (up ? last_rank(s) || a->layer != s->hi : s->p->rank == 0 || a->layer != s->lo) return bad(s, "there is no such boundary");
    if (first && s->posted) return bad(s, "posted while others are under way");
    if (s->posted == GROUP) return bad(s, "too many at once");
    uint8_t *l = &s->link[a->mb], bit = 0;
    int before = a->mb - s->flights;
    switch ((ql_do)a->what) {
    case QL_DO_RECV_H:
        bit = H_ASKED;
        if (before >= 0 && (s->c->train ? s->done[before] != 3 : s->done[before] != 2 && s->next[before] != s->hi))
            return bad(s, "its buffer is still used");
        break;
    case QL_DO_SEND_H:
        bit = H_SENT;
        if (s->done[a->mb] != 1 || s->next[a->mb] != s->hi || *h_of(s, a->mb, s->hi) != H_DEVICE) return bad(s, "before it is there");
        if (s->c->train && !learns(s)) end_of(s, a->mb);
        break;
    case QL_DO_RECV_DH:
        bit = DH_ASKED;
        if (!learns(s) || !(*l & H_SENT) || !dh_free(s, a->mb)) return bad(s, "too early");
        break;
    default:
        bit = DH_SENT;
        if (!s->c->train || s->done[a->mb] != 3 || s->c->first >= s->lo) return bad(s, "before it is there");
        break;
    }
    if (*l & bit || s->messages[a->what - QL_DO_SEND_H]++ != a->mb) return bad(s, "a second time, or out of order");
    *l |= bit;
    s->group[s->posted++] = *a;
    return QL_OK;
}

static ql_status do_land(sim *s)
{
    if (!s->posted) return bad(s, "nothing is under way");
    while (s->posted) {
        const ql_action *a = &s->group[--s->posted];
        if (a->what == QL_DO_RECV_H) *h_of(s, a->mb, s->lo) = H_DEVICE;
        if (a->what == QL_DO_RECV_DH) begin_backward(s, a->mb);
        if (a->what == QL_DO_SEND_H) s->link[a->mb] |= H_GONE;
        if (a->what == QL_DO_SEND_DH) s->link[a->mb] |= DH_GONE;
    }
    return QL_OK;
}

/* ---- the rest --------------------------------------------------------------------------------- */

static ql_status do_move(sim *s, const ql_action *a)
{
    int8_t *h = h_of(s, a->mb, a->layer);
    if (*h != (a->what == QL_DO_SAVE ? H_DEVICE : H_HOST)) return bad(s, "is not where it should be");
    *h = a->what == QL_DO_SAVE ? H_HOST : H_DEVICE;
    return QL_OK;
}

/* Has every micro-batch of this rank given its gradients? */
static int all_ended(const sim *s)
{
    return s->ended == ql_min64(ql_plan_end(s->c, s->p->rank), s->p->g) - ql_min64(ql_plan_first(s->c, s->p->rank), s->p->g);
}

/* Neighbours of one level, halves of the same subtree; at the end, where a last group was short, what is left from the top down. */
static ql_status do_join(sim *s)
{
    if (--s->stack < 1) return bad(s, "joins what is not there");
    int top = s->stack, level = s->tree[top].level, even = level < 30 && level == s->tree[top - 1].level;
    if (even && s->tree[top - 1].piece % (2 << level) != 0) return bad(s, "joins parts of different subtrees");
    if (!even && !all_ended(s)) return bad(s, "joins unequal parts before the last gradient");
    s->tree[top - 1].level = even ? level + 1 : 30;
    return QL_OK;
}

static ql_status do_sum(sim *s, const ql_action *a)
{
    switch ((ql_do)a->what) {
    case QL_DO_PIECE:
        if (++s->stack > ql_plan_grad_buffers(s->c) || s->stack > 16) return bad(s, "more gradient buffers than counted");
        s->tree[s->stack - 1].piece = s->pieces++;
        s->tree[s->stack - 1].level = 0;
        return QL_OK;
    case QL_DO_JOIN: return do_join(s);
    case QL_DO_REDUCE:
        if (s->piped) return bad(s, "a stage's gradients are whole");
        s->reduced++;
        if (!all_ended(s)) return bad(s, "before the last gradient");
        return s->stack > 1 ? bad(s, "gradient buffers left") : QL_OK;
    default:
        if (s->stack > 1) return bad(s, "gradient buffers left");
        if (!all_ended(s)) return bad(s, "before the last gradient");
        if (s->posted) return bad(s, "something is under way");
        if (s->reduced != !s->piped || s->stepped++) return bad(s, "not after one reduction");
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
    case QL_DO_SEND_H:
    case QL_DO_RECV_H:
    case QL_DO_SEND_DH:
    case QL_DO_RECV_DH: return do_post(s, a);
    case QL_DO_LAND: return do_land(s);
    default: return do_sum(s, a);
    }
}

static ql_status finish(sim *s)
{
    const ql_choice *c = s->c;
    int from = (int)ql_min64(ql_plan_first(c, s->p->rank), s->p->g);
    int to = (int)ql_min64(ql_plan_end(c, s->p->rank), s->p->g);
    int sends_h = !last_rank(s), sends_dh = s->piped && c->train && c->first < s->lo;
    s->i = s->p->count - 1;
    if (s->posted) QL_FAIL(QL_EINTERNAL, "plan of rank %d ends while something is under way", s->p->rank);
    for (int mb = 0; mb < s->p->g; mb++) {
        int want = mb >= from && mb < to ? (c->train ? 3 : sends_h ? 1 : 2) : 0;
        int sent = (!sends_h || s->link[mb] & H_SENT) && (!sends_dh || s->link[mb] & DH_SENT);
        if (s->done[mb] != want || !sent) QL_FAIL(QL_EINTERNAL, "plan of rank %d: micro-batch %d is not done once", s->p->rank, mb);
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
    int8_t *h = calloc((size_t)c->g * (size_t)(c->layers + 1) + 1, 1);
    int16_t *next = calloc((size_t)c->g + 1, sizeof *next);
    if (!s || !h || !next) {
        st = ql_fail(QL_ENOMEM, "plan check: no memory");
        goto out;
    }
    *s = (sim){.c = c, .p = p, .held = -1, .h = h, .next = next, .shared_mb = -1, .piped = ql_plan_piped(c)};
    s->flights = ql_plan_flights(c, p->rank);
    ql_plan_stage(c, p->rank, &s->lo, &s->hi);
    for (int i = 0; i < QL_GATHER_SLOTS; i++) s->slot_layer[i] = -1;
    for (s->i = 0; s->i < p->count; s->i++) QL_GO(act(s, &p->a[s->i]));
    st = finish(s);
out:
    free(s);
    free(h);
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

/* Sends and receives as a device may run them: a group begins when the one before has ended, and ends when the other side has begun the
 * same messages. No rank's compute waits for more than that, so if all groups end like this, all plans do. */
typedef struct {
    const ql_plan *p;
    int at, end;    /* the group under way: actions [at, end) */
    int begun[4];   /* messages of each kind; each kind goes in the order of its micro-batches */
} runner;

static int met(const runner *all, int rank, const ql_action *a)
{
    static const int other[] = {1, 0, 3, 2}; /* a send's receive */
    int kind = a->what - QL_DO_SEND_H, up = a->what == QL_DO_SEND_H || a->what == QL_DO_RECV_DH;
    return all[up ? rank + 1 : rank - 1].begun[other[kind]] > a->mb;
}

/* To the end of the group under way, or into the next one. 0: it waits. */
static int run_on(runner *all, int rank)
{
    runner *k = &all[rank];
    for (int i = k->at; i < k->end; i++)
        if (!met(all, rank, &k->p->a[i])) return 0;
    k->at = k->end;
    while (k->at < k->p->count && !ql_plan_link(&k->p->a[k->at])) k->at++;
    for (k->end = k->at; k->end < k->p->count && ql_plan_link(&k->p->a[k->end]); k->end++)
        k->begun[k->p->a[k->end].what - QL_DO_SEND_H]++;
    return k->end > k->at;
}

static ql_status stages_meet(const ql_choice *c, const ql_plan *of_rank)
{
    runner all[QL_MAX_WORLD];
    for (int r = 0; r < c->world; r++) all[r] = (runner){.p = &of_rank[r]};
    for (int moved = 1; moved;) {
        moved = 0;
        for (int r = 0; r < c->world; r++)
            while (run_on(all, r)) moved = 1;
    }
    for (int r = 0; r < c->world; r++) {
        char x[96];
        if (all[r].at == all[r].p->count) continue;
        ql_action_print(&all[r].p->a[all[r].at], x, sizeof x);
        QL_FAIL(QL_EINTERNAL, "plans would wait for each other: rank %d at action %d (%s), for ever", r, all[r].at, x);
    }
    return QL_OK;
}

ql_status ql_plan_check_world(const ql_choice *c, const ql_plan *of_rank)
{
    for (int r = 0; r < c->world; r++) {
        QL_TRY(ql_plan_check(c, &of_rank[r]));
        if (r > 0) QL_TRY(same_meetings(c, &of_rank[0], &of_rank[r]));
    }
    return ql_plan_piped(c) ? stages_meet(c, of_rank) : QL_OK;
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
