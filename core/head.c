#include "core/head.h"

#include <string.h>

void ql_head_init(ql_head *h, const ql_shape *s, int64_t chunk, double smoothing, int first, int count)
{
    memset(h, 0, sizeof *h);
    h->vocab = s->cfg->vocab;
    h->hidden = s->cfg->hidden;
    h->piece = ql_round_up(ql_ceil_div(h->vocab, QL_PIECES), 8);
    h->chunk = ql_min64(chunk, s->rows);
    h->smoothing = (float)smoothing;
    h->first = first;
    h->count = count;
}

int64_t ql_head_rows(const ql_head *h, int p)
{
    return ql_max64(0, ql_min64(h->piece, h->vocab - p * h->piece));
}

ql_status ql_head_carve(ql_head *h, const ql_shape *s, ql_arena *a)
{
    int64_t c = h->hidden, n = h->chunk;
    QL_TRY(ql_arena_mat(a, QL_CAT_HEAD, s->dtype, h->count * h->piece, c, c, &h->w));
    QL_TRY(ql_arena_mat(a, QL_CAT_HEAD, QL_F32, 1, c, c, &h->norm));
    QL_TRY(ql_arena_mat(a, QL_CAT_WORK, s->res, n, c, c, &h->hs));
    QL_TRY(ql_arena_mat(a, QL_CAT_WORK, s->dtype, n, c, c, &h->xs));
    QL_TRY(ql_arena_mat(a, QL_CAT_WORK, s->dtype, h->count * n, h->piece, h->piece, &h->logits));
    QL_TRY(ql_arena_mat(a, QL_CAT_WORK, s->res, n, c, c, &h->dhs));
    for (int i = 0; i < 4; i++) {
        QL_TRY(ql_arena_mat(a, QL_CAT_WORK, QL_F32, n, 4, 4, &h->stats[i]));
        QL_TRY(ql_arena_mat(a, QL_CAT_WORK, QL_F32, n, c, c, &h->dx[i]));
    }
    QL_TRY(ql_arena_mat(a, QL_CAT_WORK, QL_F32, 1, n, n, &h->lse));
    return ql_arena_mat(a, QL_CAT_WORK, QL_F32, 1, s->rows, s->rows, &h->nll);
}

/* Piece p as rows of the weight, and its block of the logits buffer (n rows). */
static ql_tensor piece_w(const ql_head *h, int p)
{
    return ql_rows(h->w, (p - h->first) * h->piece, ql_head_rows(h, p));
}

static ql_tensor piece_logits(const ql_head *h, int p, int64_t n)
{
    return ql_cols(ql_rows(h->logits, (p - h->first) * h->chunk, n), 0, ql_head_rows(h, p));
}

static ql_status piece_stats(ql_head *h, const ql_queue *q, int p, ql_tensor x, ql_tensor target, int *depth)
{
    int64_t n = x.rows;
    ql_tensor l = piece_logits(h, p, n);
    QL_TRY(ql_matmul(q, l, x, piece_w(h, p), QL_NT, 1, QL_NONE, QL_NONE));
    QL_TRY(ql_ce_stats(q, ql_rows(h->stats[(*depth)++], 0, n), l, target, p * h->piece));
    return QL_OK;
}

/* Joins the two top entries of a stack of (n, …) buffers. */
typedef enum { JOIN_STATS, JOIN_SUM } join_kind;
static ql_status join_top(const ql_queue *q, ql_tensor *stack, int *depth, int64_t n, join_kind kind)
{
    ql_tensor a = ql_rows(stack[*depth - 2], 0, n), b = ql_rows(stack[*depth - 1], 0, n);
    (*depth)--;
    return kind == JOIN_STATS ? ql_ce_join(q, a, b) : ql_add(q, a, a, b);
}

/* The pieces in order, joined as a balanced tree: two entries of one level become one of the next, so 4 buffers do for 8 leaves.
 * Pieces past the vocabulary's end are left out. */
typedef ql_status (*leaf_fn)(ql_head *h, const ql_queue *q, int p, ql_tensor x, ql_tensor target, int *depth);
static ql_status tree(ql_head *h, const ql_queue *q, leaf_fn leaf, ql_tensor *stack, join_kind kind, ql_tensor x,
                      ql_tensor target)
{
    int depth = 0, level[4];
    for (int p = 0; p < QL_PIECES && ql_head_rows(h, p) > 0; p++) {
        level[depth] = 0;
        QL_TRY(leaf(h, q, p, x, target, &depth));
        while (depth > 1 && level[depth - 2] == level[depth - 1]) {
            QL_TRY(join_top(q, stack, &depth, x.rows, kind));
            level[depth - 1]++;
        }
    }
    while (depth > 1) QL_TRY(join_top(q, stack, &depth, x.rows, kind));
    return QL_OK;
}

static ql_status piece_grad(ql_head *h, const ql_queue *q, int p, ql_tensor x, ql_tensor target, int *depth)
{
    (void)target;
    return ql_matmul(q, ql_rows(h->dx[(*depth)++], 0, x.rows), piece_logits(h, p, x.rows), piece_w(h, p), QL_NN, 1, QL_NONE,
                     QL_NONE);
}

/* Rows [at, at + n) of the micro-batch's targets: gather, norm, logits, loss, gradient, scatter. */
static ql_status chunk_loss(ql_head *h, const ql_shape *s, const ql_queue *q, const ql_micro *mb, ql_tensor hidden,
                            ql_tensor dh, const ql_ctl *ctl, int64_t at, int64_t n)
{
    ql_tensor index = ql_cols(mb->index, at, n), target = ql_cols(mb->target, at, n);
    ql_tensor hs = ql_rows(h->hs, 0, n), xs = ql_rows(h->xs, 0, n), lse = ql_cols(h->lse, 0, n);
    float eps = (float)s->cfg->eps;
    QL_TRY(ql_gather_rows(q, hs, hidden, index));
    QL_TRY(ql_rmsnorm(q, xs, hs, h->norm, eps));
    QL_TRY(tree(h, q, piece_stats, h->stats, JOIN_STATS, xs, target));
    QL_TRY(ql_ce_loss(q, ql_cols(h->nll, at, n), lse, ql_rows(h->stats[0], 0, n), target, h->smoothing, h->vocab));
    if (!ql_tensor_set(dh)) return QL_OK;
    for (int p = 0; p < QL_PIECES && ql_head_rows(h, p) > 0; p++)
        QL_TRY(ql_ce_grad(q, piece_logits(h, p, n), lse, target, p * h->piece, h->smoothing, h->vocab, ctl));
    QL_TRY(tree(h, q, piece_grad, h->dx, JOIN_SUM, xs, target));
    QL_TRY(ql_rmsnorm_dx(q, ql_rows(h->dhs, 0, n), ql_rows(h->dx[0], 0, n), hs, h->norm, eps, QL_NONE));
    return ql_scatter_rows(q, dh, ql_rows(h->dhs, 0, n), index);
}

ql_status ql_head_loss(ql_head *h, const ql_shape *s, const ql_queue *q, const ql_micro *mb, ql_tensor hidden, ql_tensor dh,
                       ql_tensor loss, const ql_ctl *ctl)
{
    int64_t n = mb->index.cols;
    if (ql_tensor_set(dh)) QL_TRY(ql_fill(q, dh, 0));
    for (int64_t at = 0; at < n; at += h->chunk)
        QL_TRY(chunk_loss(h, s, q, mb, hidden, dh, ctl, at, ql_min64(h->chunk, n - at)));
    return ql_sum(q, loss, ql_cols(h->nll, 0, n));
}

ql_status ql_head_logits(ql_head *h, const ql_shape *s, const ql_queue *q, ql_tensor hidden, ql_tensor index, ql_tensor out)
{
    int64_t n = index.cols;
    ql_tensor hs = ql_rows(h->hs, 0, n), xs = ql_rows(h->xs, 0, n);
    QL_TRY(ql_gather_rows(q, hs, hidden, index));
    QL_TRY(ql_rmsnorm(q, xs, hs, h->norm, (float)s->cfg->eps));
    for (int p = 0; p < QL_PIECES && ql_head_rows(h, p) > 0; p++)
        QL_TRY(ql_matmul(q, ql_cols(ql_rows(out, 0, n), p * h->piece, ql_head_rows(h, p)), xs, piece_w(h, p), QL_NT, 1, QL_NONE,
                         QL_NONE));
    return QL_OK;
}
