#include "core/head.h"

#include <string.h>

void ql_head_init(ql_head *h, const ql_shape *s, int64_t chunk, double smoothing, int rank, int world)
{
    memset(h, 0, sizeof *h);
    h->vocab = s->cfg->vocab;
    h->hidden = s->cfg->hidden;
    h->piece = ql_round_up(ql_ceil_div(h->vocab, QL_PIECES), 8);
    h->chunk = ql_min64(chunk, s->rows);
    h->smoothing = (float)smoothing;
    h->rank = world > 1 ? rank : 0;
    h->world = world;
    h->count = QL_PIECES / world;
    h->first = h->rank * h->count;
}

int64_t ql_head_rows(const ql_head *h, int p)
{
    return ql_max64(0, ql_min64(h->piece, h->vocab - p * h->piece));
}

ql_status ql_head_carve(ql_head *h, const ql_shape *s, ql_arena *a)
{
    int64_t c = h->hidden, n = h->chunk, w = h->world;
    int shared = w > 1;
    QL_TRY(ql_arena_mat(a, QL_CAT_HEAD, s->dtype, h->count * h->piece, c, c, &h->w));
    QL_TRY(ql_arena_mat(a, QL_CAT_HEAD, QL_F32, 1, c, c, &h->norm));
    QL_TRY(ql_arena_mat(a, QL_CAT_WORK, s->res, n, c, c, &h->hs));
    QL_TRY(ql_arena_mat(a, QL_CAT_WORK, s->dtype, w * n, c, c, &h->xs));
    QL_TRY(ql_arena_mat(a, QL_CAT_WORK, s->dtype, w * h->count * n, h->piece, h->piece, &h->logits));
    QL_TRY(ql_arena_mat(a, QL_CAT_WORK, s->res, n, c, c, &h->dhs));
    QL_TRY(ql_arena_mat(a, QL_CAT_WORK, QL_F32, w * w * n, 4, 4, &h->stats));
    QL_TRY(ql_arena_mat(a, QL_CAT_WORK, QL_F32, w * n, c, c, &h->dx));
    h->part = h->dx;
    if (shared) {
        QL_TRY(ql_arena_mat(a, QL_CAT_WORK, QL_F32, w * n, c, c, &h->part));
        QL_TRY(ql_arena_mat(a, QL_CAT_WORK, QL_I32, 1, w * n, w * n, &h->target));
        QL_TRY(ql_arena_mat(a, QL_CAT_WORK, QL_F32, 1, n, n, &h->other));
    }
    for (int i = 0, levels = h->count; levels > 1; i++, levels /= 2) {
        QL_TRY(ql_arena_mat(a, QL_CAT_WORK, QL_F32, n, 4, 4, &h->up_stats[i]));
        QL_TRY(ql_arena_mat(a, QL_CAT_WORK, QL_F32, n, c, c, &h->up_dx[i]));
    }
    QL_TRY(ql_arena_mat(a, QL_CAT_WORK, QL_F32, 1, w * n, w * n, &h->lse));
    return ql_arena_mat(a, QL_CAT_WORK, QL_F32, 1, s->rows, s->rows, &h->nll);
}

/* ---- the tree --------------------------------------------------------------------------------- */

/* Leaves in order, joined as a balanced tree: two entries of one level become one of the next, so 4 buffers do for 8 leaves. What the
 * vocabulary's end leaves over joins from the top. A rank's pieces are a subtree, so ranks' results combine by the same rule. */
typedef enum { JOIN_STATS, JOIN_SUM } join_kind;
typedef struct {
    const ql_queue *q;
    join_kind kind;
    ql_tensor at[QL_PIECES];
    int level[QL_PIECES], depth;
} tree;

static ql_status join_top(tree *t)
{
    ql_tensor a = t->at[t->depth - 2], b = t->at[t->depth - 1];
    t->depth--;
    return t->kind == JOIN_STATS ? ql_ce_join(t->q, a, b) : ql_add(t->q, a, a, b);
}

static ql_status push(tree *t, ql_tensor leaf)
{
    t->at[t->depth] = leaf;
    t->level[t->depth++] = 0;
    while (t->depth > 1 && t->level[t->depth - 2] == t->level[t->depth - 1]) {
        QL_TRY(join_top(t));
        t->level[t->depth - 1]++;
    }
    return QL_OK;
}

static ql_status finish(tree *t)
{
    while (t->depth > 1) QL_TRY(join_top(t));
    return QL_OK;
}

/* ---- one chunk -------------------------------------------------------------------------------- */

/* The rows of a chunk: m[r] of rank r's, blocks of `most`. */
typedef struct {
    ql_head *h;
    const ql_shape *s;
    const ql_queue *q;
    const ql_head_peers *peers;
    const ql_micro *mb;
    int64_t at, m[QL_PIECES], most;
} chunk;

/* Rank r's rows in a buffer that has a block of `most` rows for each. */
static ql_tensor block(const chunk *c, ql_tensor t, int r)
{
    return ql_rows(t, r * c->most, c->m[r]);
}

static ql_tensor target_of(const chunk *c, int r)
{
    if (c->h->world == 1) return ql_cols(c->mb->target, c->at, c->m[r]);
    return ql_cols(c->h->target, r * c->most, c->m[r]);
}

static ql_tensor lse_of(const chunk *c, int r)
{
    return ql_cols(c->h->lse, r * c->most, c->m[r]);
}

static ql_tensor piece_w(const ql_head *h, int p)
{
    return ql_rows(h->w, (p - h->first) * h->piece, ql_head_rows(h, p));
}

static ql_tensor piece_logits(const chunk *c, int r, int p)
{
    const ql_head *h = c->h;
    return ql_cols(ql_rows(h->logits, (r * h->count + p - h->first) * h->chunk, c->m[r]), 0, ql_head_rows(h, p));
}

/* Statistics that rank `by`'s pieces have of rank r's rows. */
static ql_tensor stats_of(const chunk *c, int by, int r)
{
    return ql_rows(c->h->stats, (by * c->h->world + r) * c->most, c->m[r]);
}

/* Pieces of this rank: those before the vocabulary's end. */
static int piece_end(const ql_head *h, int rank)
{
    int p = rank * h->count;
    while (p < (rank + 1) * h->count && ql_head_rows(h, p) > 0) p++;
    return p;
}

static ql_status share(const chunk *c, ql_tensor all, ql_tensor mine)
{
    return c->peers->be->comm->all_gather(c->peers->comm, c->q->stream, all, mine);
}

/* Everybody's rows and targets, on every rank. */
static ql_status share_rows(const chunk *c)
{
    ql_head *h = c->h;
    int64_t n = c->h->world * c->most;
    ql_tensor t = ql_cols(h->target, h->rank * c->most, c->most);
    if (c->m[h->rank])
        QL_TRY(c->peers->be->dev->copy(c->q->stream, t.data, ql_cols(c->mb->target, c->at, c->m[h->rank]).data, c->m[h->rank] * 4));
    QL_TRY(share(c, ql_rows(h->xs, 0, n), ql_rows(h->xs, h->rank * c->most, c->most)));
    return share(c, ql_cols(h->target, 0, n), t);
}

/* Logits of rank r's rows by this rank's pieces, and their statistics. */
static ql_status piece_stats(const chunk *c, int r)
{
    ql_head *h = c->h;
    tree t = {.q = c->q, .kind = JOIN_STATS};
    for (int p = h->first; p < piece_end(h, h->rank); p++) {
        ql_tensor l = piece_logits(c, r, p), out = t.depth ? ql_rows(h->up_stats[t.depth - 1], 0, c->m[r]) : stats_of(c, h->rank, r);
        QL_TRY(ql_matmul(c->q, l, block(c, h->xs, r), piece_w(h, p), QL_NT, 1, QL_NONE, QL_NONE));
        QL_TRY(ql_ce_stats(c->q, out, l, target_of(c, r), p * h->piece));
        QL_TRY(push(&t, out));
    }
    return finish(&t);
}

/* All pieces' statistics of rank r's rows → their lse, and losses. */
static ql_status row_losses(const chunk *c, int r)
{
    ql_head *h = c->h;
    tree t = {.q = c->q, .kind = JOIN_STATS};
    for (int by = 0; by < h->world; by++)
        if (piece_end(h, by) > by * h->count) QL_TRY(push(&t, stats_of(c, by, r)));
    QL_TRY(finish(&t));
    ql_tensor nll = r == h->rank ? ql_cols(h->nll, c->at, c->m[r]) : ql_cols(h->other, 0, c->m[r]);
    return ql_ce_loss(c->q, nll, lse_of(c, r), stats_of(c, 0, r), target_of(c, r), h->smoothing, h->vocab);
}

/* This rank's pieces' part of the gradient of rank r's rows. */
static ql_status piece_grad(const chunk *c, int r, const ql_ctl *ctl)
{
    ql_head *h = c->h;
    tree t = {.q = c->q, .kind = JOIN_SUM};
    for (int p = h->first; p < piece_end(h, h->rank); p++)
        QL_TRY(ql_ce_grad(c->q, piece_logits(c, r, p), lse_of(c, r), target_of(c, r), p * h->piece, h->smoothing, h->vocab, ctl));
    for (int p = h->first; p < piece_end(h, h->rank); p++) {
        ql_tensor out = t.depth ? ql_rows(h->up_dx[t.depth - 1], 0, c->m[r]) : block(c, h->dx, r);
        QL_TRY(ql_matmul(c->q, out, piece_logits(c, r, p), piece_w(h, p), QL_NN, 1, QL_NONE, QL_NONE));
        QL_TRY(push(&t, out));
    }
    return finish(&t);
}

/* The parts of this rank's rows together, through the norm, to their places in dh. */
static ql_status own_grad(const chunk *c, ql_tensor dh)
{
    ql_head *h = c->h;
    int64_t n = c->m[h->rank];
    tree t = {.q = c->q, .kind = JOIN_SUM};
    for (int by = 0; by < h->world; by++)
        if (piece_end(h, by) > by * h->count) QL_TRY(push(&t, ql_rows(h->part, by * c->most, n)));
    QL_TRY(finish(&t));
    QL_TRY(ql_rmsnorm_dx(c->q, ql_rows(h->dhs, 0, n), ql_rows(h->part, 0, n), ql_rows(h->hs, 0, n), h->norm, (float)c->s->cfg->eps, QL_NONE));
    return ql_scatter_rows(c->q, dh, ql_rows(h->dhs, 0, n), ql_cols(c->mb->index, c->at, n));
}

static ql_status chunk_loss(const chunk *c, ql_head_want want, ql_tensor hidden, ql_tensor dh, const ql_ctl *ctl)
{
    ql_head *h = c->h;
    int64_t n = c->m[h->rank], all = h->world * c->most;
    if (n) {
        QL_TRY(ql_gather_rows(c->q, ql_rows(h->hs, 0, n), hidden, ql_cols(c->mb->index, c->at, n)));
        QL_TRY(ql_rmsnorm(c->q, block(c, h->xs, h->rank), ql_rows(h->hs, 0, n), h->norm, (float)c->s->cfg->eps));
    }
    if (h->world > 1) QL_TRY(share_rows(c));
    for (int r = 0; r < h->world; r++)
        if (c->m[r]) QL_TRY(piece_stats(c, r));
    if (h->world > 1)
        QL_TRY(share(c, ql_rows(h->stats, 0, h->world * all), ql_rows(h->stats, h->rank * all, all)));
    for (int r = 0; r < h->world; r++)
        if (c->m[r]) QL_TRY(row_losses(c, r));
    if (want == QL_HEAD_LOSS) return QL_OK;
    for (int r = 0; r < h->world; r++)
        if (c->m[r]) QL_TRY(piece_grad(c, r, ctl));
    if (h->world > 1) QL_TRY(c->peers->be->comm->all_to_all(c->peers->comm, c->q->stream, ql_rows(h->part, 0, all), ql_rows(h->dx, 0, all)));
    return n ? own_grad(c, dh) : QL_OK;
}

ql_status ql_head_loss(ql_head *h, const ql_shape *s, const ql_queue *q, const ql_head_peers *peers, ql_head_want want, const ql_micro *mb,
                       ql_tensor hidden, ql_tensor dh, ql_tensor loss, const ql_ctl *ctl)
{
    int64_t rows[QL_PIECES] = {0}, longest = 0;
    for (int r = 0; r < h->world; r++) {
        rows[r] = h->world > 1 ? peers->rows[r] : mb->index.cols;
        longest = ql_max64(longest, rows[r]);
    }
    if (mb && rows[h->rank] != mb->index.cols)
        QL_FAIL(QL_EINTERNAL, "the head expects %lld rows with a target and gets %lld", (long long)rows[h->rank], (long long)mb->index.cols);
    if (mb && want == QL_HEAD_GRAD) QL_TRY(ql_fill(q, dh, 0));
    for (int64_t at = 0; at < longest; at += h->chunk) {
        chunk c = {.h = h, .s = s, .q = q, .peers = peers, .mb = mb, .at = at};
        for (int r = 0; r < h->world; r++) {
            c.m[r] = ql_max64(0, ql_min64(h->chunk, rows[r] - at));
            c.most = ql_max64(c.most, c.m[r]);
        }
        QL_TRY(chunk_loss(&c, want, hidden, dh, ctl));
    }
    return mb ? ql_sum(q, loss, ql_cols(h->nll, 0, rows[h->rank])) : QL_OK;
}

ql_status ql_head_logits(ql_head *h, const ql_shape *s, const ql_queue *q, const ql_head_peers *peers, ql_tensor hidden, ql_tensor index,
                         ql_tensor out)
{
    int64_t n = index.cols, from = h->world > 1 ? h->first : 0, mine = h->count * h->piece;
    ql_tensor hs = ql_rows(h->hs, 0, n), xs = ql_rows(h->xs, 0, n);
    if (h->world > 1 && (out.rows != h->world * n || out.cols != mine))
        QL_FAIL(QL_EINTERNAL, "a shared head makes logits in %d blocks of (%lld, %lld)", h->world, (long long)n, (long long)mine);
    ql_tensor own = ql_rows(out, h->rank * n, n);
    QL_TRY(ql_gather_rows(q, hs, hidden, index));
    QL_TRY(ql_rmsnorm(q, xs, hs, h->norm, (float)s->cfg->eps));
    for (int p = h->first; p < piece_end(h, h->rank); p++)
        QL_TRY(ql_matmul(q, ql_cols(own, (p - from) * h->piece, ql_head_rows(h, p)), xs, piece_w(h, p), QL_NT, 1, QL_NONE, QL_NONE));
    return h->world == 1 ? QL_OK : peers->be->comm->all_gather(peers->comm, q->stream, out, own);
}
