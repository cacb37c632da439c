/* The null backend's ops and collectives: they compute and send nothing, and count. */
#include "kernels/null/null.h"

#include <stdlib.h>

struct ql_comm {
    int rank, world;
    int64_t sent;
};

/* ---- ops ----------------------------------------------------------------------------------------
 */

static int64_t size_of(ql_tensor t)
{
    return t.data ? t.rows * t.cols * (int64_t)ql_dtype_size(t.dtype) : 0;
}

/* One call that moved these tensors (a list that ends with one without data). */
static ql_status count(int64_t work, const ql_tensor *t)
{
    int64_t bytes = 0;
    for (; t->data; t++) bytes += size_of(*t);
    atomic_fetch_add(&ql_null_calls, 1);
    atomic_fetch_add(&ql_null_flops, work);
    atomic_fetch_add(&ql_null_bytes, bytes);
    return QL_OK;
}
#define COUNT(work, ...) return (void)q, count(work, (const ql_tensor[]){__VA_ARGS__, QL_NONE})
#define OP(name, ...)    static ql_status null_##name(const ql_queue *q, __VA_ARGS__)

OP(convert, const ql_tensor *out, const ql_tensor *in, int n)
{
    (void)q;
    atomic_fetch_add(&ql_null_calls, 1);
    for (int i = 0; i < n; i++) atomic_fetch_add(&ql_null_bytes, size_of(out[i]) + size_of(in[i]));
    return QL_OK;
}
OP(fill, ql_tensor out, float value)
{
    (void)value;
    COUNT(0, out);
}
OP(add, ql_tensor out, ql_tensor a, ql_tensor b)
{
    COUNT(0, out, a, b);
}
OP(gather_rows, ql_tensor out, ql_tensor in, ql_tensor index)
{
    in.rows = out.rows;
    COUNT(0, out, in, index);
}
OP(scatter_rows, ql_tensor out, ql_tensor in, ql_tensor index)
{
    out.rows = in.rows;
    COUNT(0, out, in, index);
}
OP(check_finite, ql_tensor flag, ql_tensor in)
{
    COUNT(0, flag, in);
}

OP(nf4_dequant, const ql_tensor *out, const ql_nf4 *w, int n)
{
    (void)q;
    atomic_fetch_add(&ql_null_calls, 1);
    for (int i = 0; i < n; i++) {
        int64_t weights = w[i].rows * w[i].cols, blocks = ql_ceil_div(weights, w[i].block);
        int64_t scales = w[i].block2 ? blocks + 4 * ql_ceil_div(blocks, w[i].block2) : 4 * blocks;
        atomic_fetch_add(&ql_null_bytes, size_of(out[i]) + ql_ceil_div(weights, 2) + scales);
    }
    return QL_OK;
}
OP(nf4_matmul, ql_tensor out, ql_tensor a, const ql_nf4 *w, int n, ql_tensor c, ql_tensor bias)
{
    int64_t all = 0;
    for (int i = 0; i < n; i++) {
        int64_t weights = w[i].rows * w[i].cols, blocks = ql_ceil_div(weights, w[i].block);
        int64_t scales = w[i].block2 ? blocks + 4 * ql_ceil_div(blocks, w[i].block2) : 4 * blocks;
        atomic_fetch_add(&ql_null_bytes, ql_ceil_div(weights, 2) + scales);
        all += weights;
    }
    atomic_fetch_add(&ql_null_bytes, size_of(c) + size_of(bias));
    COUNT(2 * out.rows * all, out, a);
}
OP(nf4_quant, ql_tensor packed, ql_tensor absmax, ql_tensor in)
{
    COUNT(0, packed, absmax, in);
}
OP(scale_quant, ql_tensor code, ql_tensor absmax2, ql_tensor absmax, ql_tensor code2, float offset)
{
    (void)offset;
    COUNT(0, code, absmax2, absmax, code2);
}

OP(matmul, ql_tensor out, ql_tensor a, ql_tensor b, ql_trans trans, float alpha, ql_tensor c,
   ql_tensor bias)
{
    (void)alpha;
    int64_t k = trans == QL_TN ? a.rows : a.cols;
    atomic_fetch_add(&ql_null_bytes, size_of(c) + size_of(bias));
    COUNT(2 * out.rows * out.cols * k, out, a, b);
}

OP(rmsnorm, ql_tensor y, ql_tensor x, ql_tensor w, float eps)
{
    (void)eps;
    COUNT(0, y, x, w);
}
OP(rmsnorm_dx, ql_tensor dx, ql_tensor dy, ql_tensor x, ql_tensor w, float eps, ql_tensor dres)
{
    (void)eps;
    COUNT(0, dx, dy, x, w, dres);
}
OP(rope, ql_tensor x, int64_t head_dim, ql_tensor pos, ql_tensor freq, float scale, int sign)
{
    (void)head_dim, (void)scale, (void)sign;
    COUNT(0, x, x, pos, freq);
}
OP(swiglu, ql_tensor h, ql_tensor gu)
{
    COUNT(0, h, gu);
}
OP(swiglu_dx, ql_tensor dgu, ql_tensor dh, ql_tensor gu, ql_tensor h)
{
    COUNT(0, dgu, dh, gu, h);
}
OP(dropout, ql_tensor out, ql_tensor in, const ql_drop *d)
{
    (void)d;
    COUNT(0, out, in);
}
OP(dropout_add, ql_tensor out, ql_tensor in, const ql_drop *d)
{
    (void)d;
    COUNT(0, out, out, in);
}

/* The documents' lengths are in device memory that nobody can read: every row is taken to be in a
 * document of k_max keys, of which it sees half, or its window. */
static int64_t attention_flops(ql_tensor qt, const ql_attn *a)
{
    int64_t keys = a->k_max > a->q_max ? a->k_max - a->q_max / 2 : (a->k_max + 1) / 2;
    if (a->window > 0) keys = ql_min64(keys, a->window);
    return 4 * qt.rows * qt.cols * keys;
}
OP(attention, ql_tensor o, ql_tensor lse, ql_tensor qt, ql_tensor k, ql_tensor v, const ql_attn *a)
{
    COUNT(attention_flops(qt, a), o, lse, qt, k, v);
}
OP(attention_dx, ql_tensor dq, ql_tensor dk, ql_tensor dv, ql_tensor dout, ql_tensor o,
   ql_tensor lse, ql_tensor delta, ql_tensor qt, ql_tensor k, ql_tensor v, const ql_attn *a)
{
    COUNT(5 * attention_flops(qt, a) / 2, dq, dk, dv, dout, o, lse, delta, qt, k, v);
}

OP(ce_stats, ql_tensor stats, ql_tensor logits, ql_tensor target, int64_t v0)
{
    (void)v0;
    COUNT(0, stats, logits, target);
}
OP(ce_join, ql_tensor a, ql_tensor b)
{
    COUNT(0, a, a, b);
}
OP(ce_loss, ql_tensor nll, ql_tensor lse, ql_tensor stats, ql_tensor target, float smoothing,
   int64_t vocab)
{
    (void)smoothing, (void)vocab;
    COUNT(0, nll, lse, stats, target);
}
OP(ce_grad, ql_tensor logits, ql_tensor lse, ql_tensor target, int64_t v0, float smoothing,
   int64_t vocab, const ql_ctl *ctl)
{
    (void)v0, (void)smoothing, (void)vocab, (void)ctl;
    COUNT(0, logits, logits, lse, target);
}
OP(sum, ql_tensor out, ql_tensor in)
{
    COUNT(0, out, in);
}

OP(norm_parts, ql_tensor part, ql_tensor g)
{
    COUNT(0, part, g);
}
OP(clip, ql_ctl *ctl, ql_tensor part, const ql_clip *c)
{
    (void)ctl, (void)c;
    COUNT(0, part);
}
OP(adamw, ql_tensor p, ql_tensor m, ql_tensor v, ql_tensor g, const ql_ctl *ctl, const ql_adam *a)
{
    (void)ctl, (void)a;
    COUNT(0, p, p, m, m, v, v, g);
}
OP(adamw8, ql_tensor p, ql_tensor m8, ql_tensor v8, ql_tensor m2, ql_tensor v2, ql_tensor g,
   ql_tensor code1, ql_tensor code2, const ql_ctl *ctl, const ql_adam *a)
{
    (void)code1, (void)code2, (void)ctl, (void)a;
    COUNT(0, p, p, m8, m8, v8, v8, m2, m2, v2, v2, g);
}

#define FILL(name) .name = null_##name
static const ql_ops null_ops = {
    .name = "null",
    FILL(convert),
    FILL(fill),
    FILL(add),
    FILL(gather_rows),
    FILL(scatter_rows),
    FILL(check_finite),
    FILL(nf4_dequant),
    FILL(nf4_matmul),
    FILL(nf4_quant),
    FILL(scale_quant),
    FILL(matmul),
    FILL(rmsnorm),
    FILL(rmsnorm_dx),
    FILL(rope),
    FILL(swiglu),
    FILL(swiglu_dx),
    FILL(dropout),
    FILL(dropout_add),
    FILL(attention),
    FILL(attention_dx),
    FILL(ce_stats),
    FILL(ce_join),
    FILL(ce_loss),
    FILL(ce_grad),
    FILL(sum),
    FILL(norm_parts),
    FILL(clip),
    FILL(adamw),
    FILL(adamw8),
};

/* ---- collectives: nothing arrives, everything is counted ------------------------------------- */

static int64_t null_shared_bytes(int world)
{
    (void)world;
    return 64;
}

static ql_status null_comm_open(ql_dev *d, const ql_comm_setup *s, ql_comm **out)
{
    (void)d;
    if (s->world < 1 || s->rank < 0 || s->rank >= s->world)
        QL_FAIL(QL_EINVAL, "comm: rank %d of %d", s->rank, s->world);
    ql_comm *c = calloc(1, sizeof *c);
    if (!c) QL_FAIL(QL_ENOMEM, "comm: no memory");
    c->rank = s->rank, c->world = s->world;
    *out = c;
    return QL_OK;
}

static void null_comm_close(ql_comm *c)
{
    free(c);
}

static void null_cancel(ql_comm *c)
{
    (void)c;
}

static ql_status sent(ql_comm *c, int64_t bytes)
{
    c->sent += bytes;
    atomic_fetch_add(&ql_null_calls, 1);
    return QL_OK;
}

static ql_status null_all_gather(ql_comm *c, ql_stream *s, ql_tensor out, ql_tensor in)
{
    (void)s, (void)out;
    return sent(c, (c->world - 1) * size_of(in));
}

static ql_status null_all_to_all(ql_comm *c, ql_stream *s, ql_tensor out, ql_tensor in)
{
    (void)s, (void)out;
    return sent(c, (c->world - 1) * (size_of(in) / c->world));
}

static ql_status null_reduce(ql_comm *c, ql_stream *s, ql_tensor x)
{
    (void)s;
    return sent(c, (c->world - 1) * size_of(x));
}

static ql_status null_send(ql_comm *c, ql_stream *s, ql_tensor x, int to)
{
    (void)s, (void)to;
    return sent(c, size_of(x));
}

static ql_status null_recv(ql_comm *c, ql_stream *s, ql_tensor x, int from)
{
    (void)s, (void)x, (void)from;
    return sent(c, 0);
}

static ql_status null_group(ql_comm *c)
{
    (void)c;
    return QL_OK;
}

static ql_status null_land(ql_comm *c, int *over)
{
    (void)c;
    if (over) *over = 1;
    return QL_OK;
}

static ql_status null_barrier(ql_comm *c, ql_stream *s)
{
    (void)s;
    return sent(c, 0);
}

static int64_t null_bytes_sent(ql_comm *c)
{
    return c->sent;
}

static const ql_comm_table null_comm = {
    .shared_bytes = null_shared_bytes,
    .open = null_comm_open,
    .close = null_comm_close,
    .cancel = null_cancel,
    .all_gather = null_all_gather,
    .all_to_all = null_all_to_all,
    .all_sum = null_reduce,
    .all_max = null_reduce,
    .send = null_send,
    .recv = null_recv,
    .group_begin = null_group,
    .group_end = null_group,
    .land = null_land,
    .barrier = null_barrier,
    .bytes_sent = null_bytes_sent,
};

const ql_backend *ql_backend_null(void)
{
    static const ql_backend backend = {"null", &ql_null_dev, &null_ops, &null_comm};
    return &backend;
}
