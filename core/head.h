/* Final norm, head and loss, in chunks of rows that have a target, so that the (T, V) logits never exist. The vocabulary is
 * always cut into 8 fixed pieces, one product each, and everything that sums over the vocabulary combines the pieces by halving:
 * the bits do not depend on how many ranks share the head.
 *
 * Where layers are sharded or streamed the head is shared too: rank r of W holds pieces [8r/W, 8(r+1)/W). All ranks then do a chunk
 * together: the rows of each go to all (all-gather), each computes its pieces of the logits for everybody's rows, the statistics go to
 * all, and each rank's partial input gradients go back to the owner of the rows (all-to-all), who adds them as the tree has them. */
#ifndef QL_HEAD_H
#define QL_HEAD_H

#include "core/layer.h"
#include "kernels/comm.h"

enum { QL_PIECES = 8 };

typedef struct {
    int64_t vocab, hidden, piece;   /* rows of a piece, a multiple of 8; the last pieces may be short or empty */
    int64_t chunk;                  /* rows per chunk, fixed by the job */
    float smoothing;
    int rank, world;                /* of those that share the head; world 1: whole */
    int first, count;               /* pieces this rank holds */
    ql_tensor w;                    /* (count · piece, C) dtype: rows from first · piece */
    ql_tensor norm;                 /* (1, C) F32 */
    /* buffers; "by owner": one block for the rows of each rank, in order */
    ql_tensor hs;                   /* (chunk, C) res: this rank's rows, gathered */
    ql_tensor xs;                   /* (world · chunk, C) dtype: normed rows, by owner */
    ql_tensor target;               /* (1, world · chunk) I32, by owner; none when whole */
    ql_tensor logits;               /* (world · count · chunk, piece) dtype: blocks (chunk, piece) by owner, then piece */
    ql_tensor stats;                /* (world · world · chunk, 4) F32: by the rank of the pieces, then by owner */
    ql_tensor dx;                   /* (world · chunk, C) F32: this rank's pieces' part of the gradient, by owner */
    ql_tensor part;                 /* (world · chunk, C) F32: of this rank's rows, by the rank of the pieces; = dx when whole */
    ql_tensor up_stats[3], up_dx[3]; /* (chunk, 4), (chunk, C) F32: the tree's stack above its first entry */
    ql_tensor lse;                  /* (1, world · chunk) */
    ql_tensor nll;                  /* (1, rows): every target's loss of the micro-batch */
    ql_tensor other;                /* (1, chunk): of rows of others, for nobody; none when whole */
    ql_tensor dhs;                  /* (chunk, C) res */
} ql_head;

/* Who takes part in a loss. */
typedef struct {
    const ql_backend *be;
    ql_comm *comm;
    int64_t rows[QL_PIECES];        /* of mb->index on each rank; 0: that rank has no micro-batch */
} ql_head_peers;

/* world: 1, or a divisor of 8 that shares the head. */
void ql_head_init(ql_head *h, const ql_shape *s, int64_t chunk, double smoothing, int rank, int world);
ql_status ql_head_carve(ql_head *h, const ql_shape *s, ql_arena *a);
/* Rows of piece p (0 where the vocabulary ends before it). */
int64_t ql_head_rows(const ql_head *h, int p);

/* hidden (T, C) res → loss (1,1) F32 = Σ nll of the micro-batch; with dh set (work's (T, C) res), also the gradient times
 * loss_scale · inv_items, zero in rows without target. When shared: on all ranks together, mb NULL on one that has none; `grad` says
 * whether the gradient is wanted, the same everywhere. peers: NULL when whole. */
typedef enum { QL_HEAD_LOSS, QL_HEAD_GRAD } ql_head_want;
ql_status ql_head_loss(ql_head *h, const ql_shape *s, const ql_queue *q, const ql_head_peers *peers, ql_head_want want, const ql_micro *mb,
                       ql_tensor hidden, ql_tensor dh, ql_tensor loss, const ql_ctl *ctl);
/* Logits (n, V) F32 of n ≤ chunk rows of hidden, for generation. When shared: out (world · n, count · piece), a block for each rank's
 * pieces, the same on all ranks. */
ql_status ql_head_logits(ql_head *h, const ql_shape *s, const ql_queue *q, const ql_head_peers *peers, ql_tensor hidden, ql_tensor index,
                         ql_tensor out);

#endif
