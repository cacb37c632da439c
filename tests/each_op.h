/* Every op that a step may call: EACH_OP(W) is W(name, parameters, arguments, three numbers that tell a call's size) for each of them. */
#ifndef QL_TESTS_EACH_OP_H
#define QL_TESTS_EACH_OP_H

#define Q const ql_queue *q
#define X ql_tensor
#define EACH_OP(W) \
    W(convert, (Q, const X *o, const X *in, int n), (q, o, in, n), n, o->rows, o->cols) \
    W(fill, (Q, X o, float v), (q, o, v), o.rows, o.cols, 0) \
    W(add, (Q, X o, X a, X b), (q, o, a, b), o.rows, o.cols, 0) \
    W(gather_rows, (Q, X o, X in, X i), (q, o, in, i), o.rows, o.cols, 0) \
    W(scatter_rows, (Q, X o, X in, X i), (q, o, in, i), in.rows, in.cols, 0) \
    W(nf4_dequant, (Q, const X *o, const ql_nf4 *w, int n), (q, o, w, n), n, o->rows, o->cols) \
    W(nf4_matmul, (Q, X o, X a, const ql_nf4 *w, int n, X c, X bi), (q, o, a, w, n, c, bi), o.rows, o.cols, a.cols) \
    W(matmul, (Q, X o, X a, X b, ql_trans t, float al, X c, X bi), (q, o, a, b, t, al, c, bi), o.rows, o.cols, (t == QL_TN ? -a.rows : a.cols)) \
    W(rmsnorm, (Q, X y, X x, X w, float e), (q, y, x, w, e), x.rows, x.cols, 0) \
    W(rmsnorm_dx, (Q, X dx, X dy, X x, X w, float e, X r), (q, dx, dy, x, w, e, r), x.rows, x.cols, 0) \
    W(rope, (Q, X x, int64_t d, X p, X f, float s, int sg), (q, x, d, p, f, s, sg), x.rows, x.cols, sg) \
    W(swiglu, (Q, X h, X gu), (q, h, gu), h.rows, h.cols, 0) \
    W(swiglu_dx, (Q, X dgu, X dh, X gu, X h), (q, dgu, dh, gu, h), dh.rows, dh.cols, 0) \
    W(dropout, (Q, X o, X in, const ql_drop *d), (q, o, in, d), o.rows, o.cols, 0) \
    W(dropout_add, (Q, X o, X in, const ql_drop *d), (q, o, in, d), o.rows, o.cols, 0) \
    W(attention, (Q, X o, X l, X a, X k, X v, const ql_attn *at), (q, o, l, a, k, v, at), o.rows, o.cols, at->docs) \
    W(attention_dx, (Q, X dq, X dk, X dv, X dout, X o, X l, X de, X a, X k, X v, const ql_attn *at), \
      (q, dq, dk, dv, dout, o, l, de, a, k, v, at), o.rows, o.cols, at->docs) \
    W(ce_stats, (Q, X s, X l, X t, int64_t v0), (q, s, l, t, v0), l.rows, l.cols, 0) \
    W(ce_join, (Q, X a, X b), (q, a, b), a.rows, a.cols, 0) \
    W(ce_loss, (Q, X n, X l, X s, X t, float sm, int64_t v), (q, n, l, s, t, sm, v), s.rows, 0, 0) \
    W(ce_grad, (Q, X l, X ls, X t, int64_t v0, float sm, int64_t v, const ql_ctl *c), (q, l, ls, t, v0, sm, v, c), l.rows, l.cols, 0) \
    W(sum, (Q, X o, X in), (q, o, in), in.cols, 0, 0) \
    W(norm_parts, (Q, X p, X g), (q, p, g), g.cols, 0, 0) \
    W(clip, (Q, ql_ctl *c, X p, const ql_clip *cl), (q, c, p, cl), p.cols, 0, 0) \
    W(adamw, (Q, X p, X m, X v, X g, const ql_ctl *c, const ql_adam *a), (q, p, m, v, g, c, a), p.cols, 0, 0) \
    W(adamw8, (Q, X p, X m, X v, X m2, X v2, X g, X c1, X c2, const ql_ctl *c, const ql_adam *a), (q, p, m, v, m2, v2, g, c1, c2, c, a), p.cols, 0, 0)

#endif
