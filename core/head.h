/* Final norm, head and loss, in chunks of rows that have a target, so that the (T, V) logits never exist. The vocabulary is
 * always cut into 8 fixed pieces, one product each, and everything that sums over the vocabulary combines the pieces by halving:
 * the bits do not depend on how many ranks share the head. */
#ifndef QL_HEAD_H
#define QL_HEAD_H

#include "core/layer.h"
#include "kernels/comm.h"

enum { QL_PIECES = 8 };

typedef struct {
    int64_t vocab, hidden, piece;   /* rows of a piece, a multiple of 8; the last pieces may be short or empty */
    int64_t chunk;                  /* rows per chunk, fixed by the job */
    float smoothing;
    int first, count;               /* pieces this rank holds */
    ql_tensor w;                    /* (count · piece, C) dtype: rows from first · piece */
    ql_tensor norm;                 /* (1, C) F32 */
    /* buffers */
    ql_tensor hs, xs;               /* (chunk, C) res and dtype: gathered rows, normed */
    ql_tensor logits;               /* (chunk, count · piece) dtype, one piece after another as (chunk, piece) blocks */
    ql_tensor stats[4];             /* (chunk, 4): the tree's stack */
    ql_tensor dx[4];                /* (chunk, C) F32: the tree's stack */
    ql_tensor lse;                  /* (1, chunk) */
    ql_tensor nll;                  /* (1, rows): every target's loss of the micro-batch */
    ql_tensor dhs;                  /* (chunk, C) res */
} ql_head;

void ql_head_init(ql_head *h, const ql_shape *s, int64_t chunk, double smoothing, int first, int count);
ql_status ql_head_carve(ql_head *h, const ql_shape *s, ql_arena *a);
/* Rows of piece p (0 where the vocabulary ends before it). */
int64_t ql_head_rows(const ql_head *h, int p);

/* hidden (T, C) res → loss (1,1) F32 = Σ nll of the micro-batch; with dh set (work's (T, C) res), also the gradient times
 * loss_scale · inv_items, zero in rows without target. */
ql_status ql_head_loss(ql_head *h, const ql_shape *s, const ql_queue *q, const ql_micro *mb, ql_tensor hidden, ql_tensor dh,
                       ql_tensor loss, const ql_ctl *ctl);
/* Logits (n, V) F32 of n ≤ chunk rows of hidden, for generation. */
ql_status ql_head_logits(ql_head *h, const ql_shape *s, const ql_queue *q, ql_tensor hidden, ql_tensor index, ql_tensor out);

#endif
