#include "core/plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int ql_plan_pieces(int g, int exact_worlds)
{
    int a = g, b = exact_worlds;
    while (b) {
        int t = a % b;
        a = b, b = t;
    }
    return a;
}

int ql_plan_piped(const ql_choice *c)
{
    return c->world > 1 && (c->schedule == QL_PIPE || c->schedule == QL_PIPE_AHEAD);
}

void ql_plan_stage(const ql_choice *c, int rank, int *lo, int *hi)
{
    *lo = ql_plan_piped(c) ? c->cut[rank] : 0;
    *hi = ql_plan_piped(c) ? c->cut[rank + 1] : c->layers;
}

int ql_plan_first(const ql_choice *c, int rank)
{
    return ql_plan_piped(c) ? 0 : (int)((int64_t)c->g * rank / c->world);
}

int ql_plan_end(const ql_choice *c, int rank)
{
    return ql_plan_piped(c) ? c->g : (int)((int64_t)c->g * (rank + 1) / c->world);
}

static int pieces_per_rank(const ql_choice *c)
{
    if (ql_plan_piped(c)) return c->pieces;
    return c->pieces % c->world ? 1 : c->pieces / c->world;
}

int ql_plan_grad_buffers(const ql_choice *c)
{
    int n = 1;
    for (int p = pieces_per_rank(c); p > 1; p /= 2) n++;
    return n;
}

static int moves(const ql_choice *c, int layer)
{
    return c->store[layer] == QL_STORE_SHARDED || c->store[layer] == QL_STORE_HOST;
}

int ql_plan_head_world(const ql_choice *c)
{
    if (c->world == 1 || 8 % c->world || ql_plan_piped(c)) return 1;
    for (int l = 0; l < c->layers; l++)
        if (moves(c, l)) return c->world;
    return 1;
}

int ql_plan_flights(const ql_choice *c, int rank)
{
    if (ql_plan_piped(c)) return (int)ql_min64(c->g, c->world - rank); /* 1F1B: a stage is at most so far ahead of its own backward */
    return c->schedule == QL_BREADTH ? (c->g + c->world - 1) / c->world : 1;
}

int ql_plan_ahead(const ql_choice *c, int rank, int layer)
{
    if (c->schedule != QL_PIPE_AHEAD || !ql_plan_piped(c) || !c->train) return 0;
    /* The last stage waits for no gradient. An input that rests on the host is fetched once, for recompute and gradient together. */
    return rank < c->world - 1 && layer >= c->cut[rank] && layer < c->cut[rank + 1] && layer >= c->first &&
           c->keep[layer] != QL_KEEP_ALL && !c->save[layer];
}

int ql_plan_link(const ql_action *a)
{
    return a->what >= QL_DO_SEND_H && a->what <= QL_DO_RECV_DH;
}

const char *ql_schedule_name(ql_schedule s)
{
    static const char *const names[QL_SCHEDULES] = {"loop", "breadth", "1f1b", "recompute_ahead"};
    return (unsigned)s < QL_SCHEDULES ? names[s] : "?";
}

void ql_plan_free(ql_plan *p)
{
    if (!p) return;
    free(p->a);
    memset(p, 0, sizeof *p);
}

/* ---- builders --------------------------------------------------------------------------------- */

typedef struct {
    const ql_choice *c;
    ql_plan *p;
    ql_status st;
    int slot;              /* next gather slot */
    int held;              /* layer whose base the scratch holds; −1 none */
    int pending, pending_slot; /* gathered ahead, not used yet; −1 none */
    int joined[16], depth; /* levels of the gradient stack */
} builder;

static void add(builder *b, ql_do what, int mb, int layer, int slot)
{
    ql_plan *p = b->p;
    if (b->st != QL_OK) return;
    if (p->count == p->capacity) {
        int cap = p->capacity ? 2 * p->capacity : 1024;
        ql_action *a = realloc(p->a, (size_t)cap * sizeof *a);
        if (!a) {
            b->st = ql_fail(QL_ENOMEM, "plan: no memory for %d actions", cap);
            return;
        }
        p->a = a;
        p->capacity = cap;
    }
    p->a[p->count++] = (ql_action){(uint8_t)what, (int16_t)mb, (int16_t)layer, (int16_t)slot};
}

static void gather(builder *b, int layer)
{
    if (b->pending >= 0 || layer < 0 || layer >= b->c->layers || layer == b->held || !moves(b->c, layer)) return;
    add(b, QL_DO_GATHER, -1, layer, b->slot);
    b->pending = layer;
    b->pending_slot = b->slot;
    b->slot = (b->slot + 1) % QL_GATHER_SLOTS;
}

/* The layer's base is about to be used; `next` comes after it and is fetched meanwhile. Returns the slot to release, −1 none. */
static int need(builder *b, int layer, int next)
{
    int slot = -1;
    if (moves(b->c, layer) && b->held != layer) {
        if (b->pending != layer) gather(b, layer);
        slot = b->pending_slot;
        b->pending = -1;
    }
    /* A resident layer is dequantised in place of what the scratch held. RESIDENT16 layers have their own. */
    if (b->c->store[layer] != QL_STORE_RESIDENT16) b->held = layer;
    if (next != layer) gather(b, next);
    return slot;
}

static void release(builder *b, int slot)
{
    if (slot >= 0) add(b, QL_DO_RELEASE, -1, -1, slot);
}

/* mb −1: this rank has no work here, but the others gather and so does it. */
static void forward(builder *b, int mb, int layer, int next)
{
    int slot = need(b, layer, next);
    if (mb >= 0) add(b, QL_DO_F, mb, layer, slot);
    release(b, slot);
    if (mb >= 0 && b->c->train && b->c->save[layer] && layer >= b->c->first) add(b, QL_DO_SAVE, mb, layer, -1);
}

static void load(builder *b, int mb, int layer)
{
    if (layer >= b->c->first && b->c->save[layer]) add(b, QL_DO_LOAD, mb, layer, -1);
}

static void backward(builder *b, int mb, int layer, int next)
{
    int slot = need(b, layer, next);
    if (mb >= 0) {
        load(b, mb, layer - 1); /* while this layer computes */
        if (b->c->keep[layer] != QL_KEEP_ALL) add(b, QL_DO_R, mb, layer, slot);
        add(b, QL_DO_B, mb, layer, b->c->keep[layer] != QL_KEEP_ALL ? -1 : slot);
    }
    release(b, slot);
}

/* A piece of the tree is done: two neighbours of one level join. */
static void piece_done(builder *b)
{
    while (b->depth > 1 && b->joined[b->depth - 1] == b->joined[b->depth - 2]) {
        add(b, QL_DO_JOIN, -1, -1, -1);
        b->depth--;
        b->joined[b->depth - 1]++;
    }
}

static void piece_begin(builder *b)
{
    add(b, QL_DO_PIECE, -1, -1, -1);
    b->joined[b->depth++] = 0;
}

/* Is mb the first of a piece? Where the world does not divide the pieces, each rank's range is one. */
static int begins_piece(const ql_choice *c, int rank, int mb)
{
    if (!ql_plan_piped(c) && c->pieces % c->world) return mb == ql_plan_first(c, rank);
    return mb % (c->g / c->pieces) == 0;
}

static int shares(const ql_choice *c)
{
    for (int l = 0; c->world > 1 && l < c->layers; l++)
        if (c->store[l] == QL_STORE_SHARDED) return 1;
    return ql_plan_head_world(c) > 1;
}

static int last(const ql_choice *c, int rank, int g)
{
    return (int)ql_min64(ql_plan_end(c, rank), g);
}

/* End of the micro-batches from lo that share a pass over the layers: one in a loop; in breadth those of one piece. */
static int pass_end(const builder *b, int rank, int lo, int to)
{
    int hi = lo + 1;
    while (b->c->schedule == QL_BREADTH && hi < to && !begins_piece(b->c, rank, hi)) hi++;
    return (int)ql_min64(hi, to);
}

static int passes(const builder *b, int rank, int g)
{
    int n = 0, to = last(b->c, rank, g);
    for (int lo = ql_plan_first(b->c, rank); lo < to; lo = pass_end(b, rank, lo, to)) n++;
    return n;
}

/* All layers forward, the loss, all layers backward, for the micro-batches [lo, hi): each layer for all of them, then the next, which
 * divides gathers and dequantisations by their number. lo = hi: only the gathers. heads: losses of this pass, in which ranks that
 * share the head take part with or without rows of their own. */
static void pass(builder *b, int lo, int hi, int heads, int more)
{
    const ql_choice *c = b->c;
    int n = hi > lo ? hi - lo : 1, top = c->layers - 1;
    for (int mb = lo; mb < hi; mb++) add(b, QL_DO_BATCH, mb, -1, -1);
    for (int l = 0; l <= top; l++)
        for (int i = 0; i < n; i++)
            forward(b, hi > lo ? lo + i : -1, l, i + 1 < n ? l : l < top ? l + 1 : c->train ? l : more ? 0 : l);
    for (int mb = lo; mb < hi; mb++) {
        if (c->train) load(b, mb, top);
        add(b, QL_DO_HEAD, mb, -1, -1);
    }
    for (int i = hi - lo; i < heads; i++) add(b, QL_DO_HEAD, -1, -1, -1);
    for (int l = top; c->train && l >= c->first; l--)
        for (int i = 0; i < n; i++)
            backward(b, hi > lo ? lo + i : -1, l, i + 1 < n ? l : l > c->first ? l - 1 : more ? 0 : l);
}

static void build(builder *b, int rank, int g)
{
    const ql_choice *c = b->c;
    int lo = (int)ql_min64(ql_plan_first(c, rank), g), to = last(c, rank, g), most = 0, from = lo, at[QL_MAX_WORLD];
    for (int r = 0; r < c->world; r++) {
        most = (int)ql_max64(most, passes(b, r, g));
        at[r] = (int)ql_min64(ql_plan_first(c, r), g);
    }
    if (!shares(c)) most = passes(b, rank, g);
    for (int i = 0; i < most; i++) {
        int hi = lo < to ? pass_end(b, rank, lo, to) : lo;
        if (c->train && hi > lo && begins_piece(c, rank, lo)) {
            if (lo > from) piece_done(b);
            piece_begin(b);
        }
        int heads = 0;
        for (int r = 0; ql_plan_head_world(c) > 1 && r < c->world; r++) {
            int end = at[r] < last(c, r, g) ? pass_end(b, r, at[r], last(c, r, g)) : at[r];
            heads = (int)ql_max64(heads, end - at[r]);
            at[r] = end;
        }
        pass(b, lo, hi, heads, i + 1 < most);
        lo = hi;
    }
}

/* ---- a pipeline -------------------------------------------------------------------------------- */

typedef struct {
    builder *b;
    int rank, lo, hi;
    int posted;            /* a group is under way */
    int forward, backward; /* micro-batches so far */
} stage;

static int learns(const stage *s) { return s->b->c->train && s->b->c->first < s->hi; } /* it, or a stage below, has a backward */
static int last_stage(const stage *s) { return s->rank == s->b->c->world - 1; }
static int receives(const stage *s, int back) { return back ? !last_stage(s) : s->rank > 0; }

static void post(stage *s, ql_do what, int mb, int layer)
{
    add(s->b, what, mb, layer, -1);
    s->posted = 1;
}

static void land(stage *s)
{
    if (s->posted) add(s->b, QL_DO_LAND, -1, -1, -1);
    s->posted = 0;
}

/* A unit is a stage's forward or backward of one micro-batch. Its input was posted behind the unit before. */
static void forward_unit(stage *s)
{
    const ql_choice *c = s->b->c;
    int mb = s->forward++;
    add(s->b, QL_DO_BATCH, mb, -1, -1);
    if (receives(s, 0)) land(s);
    for (int l = s->lo; l < s->hi; l++) {
        add(s->b, QL_DO_F, mb, l, -1);
        if (c->train && c->save[l] && l >= c->first) add(s->b, QL_DO_SAVE, mb, l, -1);
    }
    if (last_stage(s)) {
        add(s->b, QL_DO_HEAD, mb, -1, -1);
        return;
    }
    land(s); /* one group at a time is under way */
    post(s, QL_DO_SEND_H, mb, s->hi);
}

static void backward_unit(stage *s)
{
    const ql_choice *c = s->b->c;
    int mb = s->backward++, low = (int)ql_max64(s->lo, c->first);
    if (begins_piece(c, s->rank, mb)) {
        if (mb > 0) piece_done(s->b);
        piece_begin(s->b);
    }
    for (int l = low; l < s->hi; l++)
        if (ql_plan_ahead(c, s->rank, l)) add(s->b, QL_DO_R, mb, l, -1);
    if (s->hi > low) load(s->b, mb, s->hi - 1);
    if (receives(s, 1)) land(s);
    for (int l = s->hi - 1; l >= low; l--) {
        if (l > low) load(s->b, mb, l - 1);
        if (c->keep[l] != QL_KEEP_ALL && !ql_plan_ahead(c, s->rank, l)) add(s->b, QL_DO_R, mb, l, -1);
        add(s->b, QL_DO_B, mb, l, -1);
    }
    if (c->first >= s->lo) return;
    land(s);
    post(s, QL_DO_SEND_DH, mb, s->lo);
}

/* 1F1B: as many forwards first as there are stages behind, then a forward and a backward in turn, then the backwards that are left. */
static void units(stage *s, int g)
{
    const ql_choice *c = s->b->c;
    int warm = (int)ql_min64(g, c->world - 1 - s->rank), n = learns(s) ? 2 * g : g;
    for (int i = 0; i < n; i++) {
        int back = learns(s) && i >= warm && ((i - warm) % 2 || s->forward == g);
        if (receives(s, back)) {
            int mb = back ? s->backward : s->forward;
            /* Behind the send of the unit before, as one group with it: neighbours that send to each other do not wait in turn. */
            post(s, back ? QL_DO_RECV_DH : QL_DO_RECV_H, mb, back ? s->hi : s->lo);
        }
        back ? backward_unit(s) : forward_unit(s);
    }
    land(s);
}

static const ql_action *computes_on(const ql_action *a)
{
    return a->what == QL_DO_F || a->what == QL_DO_R || a->what == QL_DO_B ? a : NULL;
}

/* The units' actions again, each layer's base fetched while the action before computes. */
static void with_gathers(builder *b, const ql_plan *raw)
{
    for (int i = 0, k = 0; i < raw->count; i++) {
        const ql_action *a = &raw->a[i];
        if (!computes_on(a)) {
            add(b, (ql_do)a->what, a->mb, a->layer, a->slot);
            continue;
        }
        for (k = (int)ql_max64(k, i + 1); k < raw->count && !computes_on(&raw->a[k]);) k++;
        int slot = need(b, a->layer, k < raw->count ? raw->a[k].layer : -1);
        add(b, (ql_do)a->what, a->mb, a->layer, slot);
        release(b, slot);
    }
}

static void build_stage(builder *b, int rank, int g)
{
    ql_plan raw = {.rank = rank, .g = g}, *to = b->p;
    stage s = {.b = b, .rank = rank};
    ql_plan_stage(b->c, rank, &s.lo, &s.hi);
    b->p = &raw;
    units(&s, g);
    b->p = to;
    with_gathers(b, &raw);
    ql_plan_free(&raw);
}

ql_status ql_plan_build(const ql_choice *c, int rank, int g, ql_plan *out)
{
    ql_plan p = {.rank = rank, .g = g};
    builder b = {.c = c, .p = &p, .st = QL_OK, .held = -1, .pending = -1};
    if (c->layers > QL_MAX_LAYERS || c->g > QL_MAX_ACCUM || c->world > QL_MAX_WORLD)
        QL_FAIL(QL_ENOSUP, "plan: %d layers, %d micro-batches, %d ranks: at most %d, %d, %d", c->layers, c->g, c->world,
                (int)QL_MAX_LAYERS, (int)QL_MAX_ACCUM, (int)QL_MAX_WORLD);
    if (ql_plan_piped(c))
        build_stage(&b, rank, g);
    else
        build(&b, rank, g);
    if (c->train) {
        if (b.depth) piece_done(&b);
        /* A short last group leaves nodes of unequal level: they join from the top, which is the tree without the missing leaves. */
        for (; b.depth > 1; b.depth--) add(&b, QL_DO_JOIN, -1, -1, -1);
        if (!ql_plan_piped(c)) add(&b, QL_DO_REDUCE, -1, -1, -1); /* a stage's gradients are whole */
        add(&b, QL_DO_STEP, -1, -1, -1);
    }
    if (b.st != QL_OK) {
        ql_plan_free(&p);
        return b.st;
    }
    *out = p;
    return QL_OK;
}

const char *ql_do_name(ql_do d)
{
    static const char *const names[QL_DOS] = {"GATHER", "RELEASE", "BATCH", "F",    "HEAD",   "R",    "B",       "SAVE",    "LOAD",
                                              "PIECE",  "JOIN",    "REDUCE", "STEP", "SEND_H", "RECV_H", "SEND_DH", "RECV_DH", "LAND"};
    return (unsigned)d < QL_DOS ? names[d] : "?";
}

int ql_action_print(const ql_action *a, char *buf, size_t size)
{
    char layer[24] = "", mb[24] = "", slot[24] = "";
    if (a->layer >= 0) snprintf(layer, sizeof layer, " %d", a->layer);
    if (a->mb >= 0) snprintf(mb, sizeof mb, " mb %d", a->mb);
    if (a->slot >= 0) snprintf(slot, sizeof slot, " slot %d", a->slot);
    return snprintf(buf, size, "%s%s%s%s", ql_do_name((ql_do)a->what), layer, mb, slot);
}

ql_status ql_plan_text(const ql_plan *p, char **out)
{
    enum { LINE = 64 };
    size_t n = 0;
    char *text = malloc((size_t)p->count * LINE + 1);
    if (!text) QL_FAIL(QL_ENOMEM, "no memory for a plan of %d lines", p->count);
    text[0] = 0;
    for (int i = 0; i < p->count; i++) {
        n += (size_t)ql_action_print(&p->a[i], text + n, LINE - 1);
        text[n++] = '\n';
    }
    text[n] = 0;
    *out = text;
    return QL_OK;
}
