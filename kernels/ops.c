/* The checked wrappers: shapes, dtypes and aliasing are tested here, once for every backend, and
 * the messages name the op, the tensor, what was found and what is needed. Empty work returns at
 * once. */
#include "kernels/ops.h"

#include <limits.h>
#include <stdio.h>

enum {
    F32 = 1 << QL_F32,
    U8 = 1 << QL_U8,
    I32 = 1 << QL_I32,
    FLOAT = 1 << QL_F32 | 1 << QL_F16 | 1 << QL_BF16,
};
#define ANY        (-1)
#define ONE(dtype) (1 << (dtype))

typedef struct {
    const char *name;
    ql_tensor t;
} arg;
#define ARG(t) ((arg){#t, t})

static bool empty(ql_tensor t)
{
    return t.rows == 0 || t.cols == 0;
}

static bool contiguous(ql_tensor t)
{
    return t.rows <= 1 || t.ld == t.cols;
}

static ql_status bad_dtype(const char *op, arg a, int dtypes)
{
    char list[96] = "";
    int n = 0;
    for (int d = 0; d < QL_DTYPES; d++)
        if (dtypes & ONE(d))
            n += snprintf(list + n, sizeof list - (size_t)n, "%s%s", n ? " or " : "",
                          ql_dtype_name((ql_dtype)d));
    return ql_fail(QL_EINVAL, "%s: %s is %s, needed is %s", op, a.name, ql_dtype_name(a.t.dtype),
                   list);
}

/* a is a sound view of one of the dtypes, of this shape (ANY: of any). */
static ql_status want(const char *op, arg a, int64_t rows, int64_t cols, int dtypes)
{
    ql_tensor t = a.t;
    int64_t size = (int64_t)ql_dtype_size(t.dtype);
    if (size == 0 || !(dtypes & ONE(t.dtype))) return bad_dtype(op, a, dtypes);
    if (t.rows < 0 || t.cols < 0 || t.ld < t.cols || (t.ld > 0 && t.rows > INT64_MAX / 8 / t.ld))
        QL_FAIL(QL_EINVAL, "%s: %s is (%lld, %lld) with a row stride of %lld, which is no tensor",
                op, a.name, (long long)t.rows, (long long)t.cols, (long long)t.ld);
    if ((rows != ANY && t.rows != rows) || (cols != ANY && t.cols != cols))
        QL_FAIL(QL_EINVAL, "%s: %s is (%lld, %lld), needed is (%lld, %lld)%s", op, a.name,
                (long long)t.rows, (long long)t.cols, (long long)rows, (long long)cols,
                rows == ANY || cols == ANY ? ", where -1 is any" : "");
    if (!empty(t) && !t.data)
        QL_FAIL(QL_EINVAL, "%s: %s (%lld, %lld) has no memory", op, a.name, (long long)t.rows,
                (long long)t.cols);
    if ((uintptr_t)t.data % (uintptr_t)size)
        QL_FAIL(QL_EINVAL, "%s: %s at %p is not aligned to its %lld-byte elements", op, a.name,
                t.data, (long long)size);
    return QL_OK;
}

static ql_status want_flat(const char *op, arg a)
{
    if (!contiguous(a.t))
        QL_FAIL(QL_EINVAL, "%s: %s has a row stride of %lld for %lld columns, needed is contiguous",
                op, a.name, (long long)a.t.ld, (long long)a.t.cols);
    return QL_OK;
}

static bool same_view(ql_tensor a, ql_tensor b)
{
    return a.data == b.data && a.dtype == b.dtype && a.rows == b.rows && a.cols == b.cols &&
           (a.ld == b.ld || a.rows <= 1);
}

/* Whether two views share a byte. Views of one row stride may interleave (columns of one buffer);
 * for other pairs the whole spans count. */
static bool overlap(ql_tensor a, ql_tensor b)
{
    if (empty(a) || empty(b)) return false;
    if ((uintptr_t)b.data < (uintptr_t)a.data) {
        ql_tensor t = a;
        a = b, b = t;
    }
    int64_t sa = (int64_t)ql_dtype_size(a.dtype), sb = (int64_t)ql_dtype_size(b.dtype);
    uintptr_t delta = (uintptr_t)b.data - (uintptr_t)a.data;
    if (delta >= (uintptr_t)(((a.rows - 1) * a.ld + a.cols) * sa)) return false;
    if (a.rows > 1 && (a.ld * sa == b.ld * sb || b.rows == 1)) {
        int64_t pitch = a.ld * sa, col = (int64_t)(delta % (uintptr_t)pitch);
        return !(col >= a.cols * sa && col + b.cols * sb <= pitch);
    }
    return true;
}

static ql_status apart(const char *op, arg a, arg b)
{
    if (overlap(a.t, b.t)) QL_FAIL(QL_EINVAL, "%s: %s overlaps %s", op, a.name, b.name);
    return QL_OK;
}

static ql_status same_or_apart(const char *op, arg a, arg b)
{
    if (!same_view(a.t, b.t) && overlap(a.t, b.t))
        QL_FAIL(QL_EINVAL, "%s: %s overlaps %s in part: it may be the same tensor or another one",
                op, a.name, b.name);
    return QL_OK;
}

/* ---- copies and conversions ------------------------------------------------------------------ */

ql_status ql_convert(const ql_queue *q, ql_tensor out, ql_tensor in)
{
    return ql_convert_all(q, &out, &in, 1);
}

ql_status ql_convert_all(const ql_queue *q, const ql_tensor *outs, const ql_tensor *ins, int n)
{
    ql_tensor to[QL_MAX_CONVERT], from[QL_MAX_CONVERT];
    int work = 0;
    if (n < 0 || n > QL_MAX_CONVERT)
        QL_FAIL(QL_EINVAL, "convert: %d matrices, at most %d go in one call", n, QL_MAX_CONVERT);
    for (int i = 0; i < n; i++) {
        ql_tensor out = outs[i], in = ins[i];
        QL_TRY(want("convert", ARG(out), ANY, ANY, FLOAT));
        QL_TRY(want("convert", ARG(in), out.rows, out.cols, FLOAT));
        if (!empty(out)) to[work] = out, from[work++] = in;
    }
    for (int i = 0; i < work; i++)
        for (int j = 0; j < work; j++) {
            QL_TRY(apart("convert", (arg){"out", to[i]}, (arg){"in", from[j]}));
            if (j < i) QL_TRY(apart("convert", (arg){"out", to[i]}, (arg){"another out", to[j]}));
        }
    return work ? q->ops->convert(q, to, from, work) : QL_OK;
}

ql_status ql_fill(const ql_queue *q, ql_tensor out, float value)
{
    QL_TRY(want("fill", ARG(out), ANY, ANY, FLOAT));
    return empty(out) ? QL_OK : q->ops->fill(q, out, value);
}

ql_status ql_add(const ql_queue *q, ql_tensor out, ql_tensor a, ql_tensor b)
{
    QL_TRY(want("add", ARG(out), ANY, ANY, F32));
    QL_TRY(want("add", ARG(a), out.rows, out.cols, F32));
    QL_TRY(want("add", ARG(b), out.rows, out.cols, F32));
    QL_TRY(same_or_apart("add", ARG(out), ARG(a)));
    QL_TRY(same_or_apart("add", ARG(out), ARG(b)));
    return empty(out) ? QL_OK : q->ops->add(q, out, a, b);
}

ql_status ql_gather_rows(const ql_queue *q, ql_tensor out, ql_tensor in, ql_tensor index)
{
    QL_TRY(want("gather_rows", ARG(in), ANY, ANY, FLOAT));
    QL_TRY(want("gather_rows", ARG(out), ANY, in.cols, FLOAT));
    QL_TRY(want("gather_rows", ARG(index), 1, out.rows, I32));
    QL_TRY(apart("gather_rows", ARG(out), ARG(in)));
    QL_TRY(apart("gather_rows", ARG(out), ARG(index)));
    return empty(out) ? QL_OK : q->ops->gather_rows(q, out, in, index);
}

ql_status ql_scatter_rows(const ql_queue *q, ql_tensor out, ql_tensor in, ql_tensor index)
{
    QL_TRY(want("scatter_rows", ARG(in), ANY, ANY, FLOAT));
    QL_TRY(want("scatter_rows", ARG(out), ANY, in.cols, FLOAT));
    QL_TRY(want("scatter_rows", ARG(index), 1, in.rows, I32));
    QL_TRY(apart("scatter_rows", ARG(out), ARG(in)));
    QL_TRY(apart("scatter_rows", ARG(out), ARG(index)));
    return empty(in) || empty(out) ? QL_OK : q->ops->scatter_rows(q, out, in, index);
}

ql_status ql_check_finite(const ql_queue *q, ql_tensor flag, ql_tensor in)
{
    QL_TRY(want("check_finite", ARG(flag), 1, 1, I32));
    QL_TRY(want("check_finite", ARG(in), ANY, ANY, FLOAT));
    QL_TRY(apart("check_finite", ARG(flag), ARG(in)));
    return empty(in) ? QL_OK : q->ops->check_finite(q, flag, in);
}

/* ---- 4-bit weights --------------------------------------------------------------------------- */

static bool power_of_two(int64_t x)
{
    return x > 0 && (x & (x - 1)) == 0;
}

static ql_status want_nf4(const char *op, const ql_nf4 *w, int i)
{
    if (w->rows < 0 || w->cols < 0 || (w->cols > 0 && w->rows > INT64_MAX / 8 / w->cols))
        QL_FAIL(QL_EINVAL, "%s: w[%d] is (%lld, %lld), which is no matrix", op, i,
                (long long)w->rows, (long long)w->cols);
    int64_t total = w->rows * w->cols;
    if (!power_of_two(w->block) || w->block < 16 || w->block > 4096 ||
        (w->block2 != 0 && !power_of_two(w->block2)))
        QL_FAIL(QL_EINVAL,
                "%s: w[%d] has blocks of %d and %d: needed are powers of two, 16 to 4096 the first",
                op, i, w->block, w->block2);
    int64_t grain = (int64_t)w->block * (w->block2 ? w->block2 : 1);
    if (w->parts < 1 || w->parts > QL_MAX_PARTS || w->part < 1 ||
        w->part > INT64_MAX / QL_MAX_PARTS || w->parts * w->part < total)
        QL_FAIL(QL_EINVAL, "%s: w[%d] has %d pieces (at most %d) of %lld weights for %lld", op, i,
                w->parts, QL_MAX_PARTS, (long long)w->part, (long long)total);
    if (w->part % grain)
        QL_FAIL(QL_EINVAL, "%s: w[%d] has pieces of %lld weights, needed is a multiple of %lld", op,
                i, (long long)w->part, (long long)grain);
    if (!w->code || (w->block2 && !w->code2))
        QL_FAIL(QL_EINVAL, "%s: w[%d] has no table %s", op, i, w->code ? "code2" : "code");
    if (!ql_dtype_float(w->state))
        QL_FAIL(QL_EINVAL, "%s: w[%d] has the state dtype %s, needed is a float one", op, i,
                ql_dtype_name(w->state));
    for (int p = 0; p < w->parts && p * w->part < total; p++)
        if (!w->packed[p] || !w->absmax[p] || (w->block2 && !w->absmax2[p]))
            QL_FAIL(QL_EINVAL, "%s: w[%d] lacks the data of piece %d", op, i, p);
    return QL_OK;
}

ql_status ql_nf4_dequant(const ql_queue *q, const ql_tensor *outs, const ql_nf4 *w, int n)
{
    if (n < 0 || n > QL_MAX_DEQUANT)
        QL_FAIL(QL_EINVAL, "nf4_dequant: %d matrices, at most %d go in one call", n, QL_MAX_DEQUANT);
    int work = 0;
    for (int i = 0; i < n; i++) {
        ql_tensor out = outs[i];
        QL_TRY(want_nf4("nf4_dequant", &w[i], i));
        QL_TRY(want("nf4_dequant", ARG(out), w[i].rows, w[i].cols, FLOAT));
        for (int j = 0; j < i; j++)
            QL_TRY(apart("nf4_dequant", ARG(out), (arg){"another out", outs[j]}));
        work |= !empty(out);
    }
    return work ? q->ops->nf4_dequant(q, outs, w, n) : QL_OK;
}

ql_status ql_nf4_quant(const ql_queue *q, ql_tensor packed, ql_tensor absmax, ql_tensor in)
{
    QL_TRY(want("nf4_quant", ARG(in), ANY, ANY, FLOAT));
    QL_TRY(want_flat("nf4_quant", ARG(in)));
    int64_t n = in.rows * in.cols;
    QL_TRY(want("nf4_quant", ARG(packed), 1, ql_ceil_div(n, 2), U8));
    QL_TRY(want("nf4_quant", ARG(absmax), 1, ql_ceil_div(n, 64), F32));
    QL_TRY(apart("nf4_quant", ARG(packed), ARG(in)));
    QL_TRY(apart("nf4_quant", ARG(absmax), ARG(in)));
    QL_TRY(apart("nf4_quant", ARG(packed), ARG(absmax)));
    return n == 0 ? QL_OK : q->ops->nf4_quant(q, packed, absmax, in);
}

ql_status ql_scale_quant(const ql_queue *q, ql_tensor code, ql_tensor absmax2, ql_tensor absmax,
                         ql_tensor code2, float offset)
{
    QL_TRY(want("scale_quant", ARG(absmax), 1, ANY, F32));
    QL_TRY(want("scale_quant", ARG(code), 1, absmax.cols, U8));
    QL_TRY(want("scale_quant", ARG(absmax2), 1, ql_ceil_div(absmax.cols, 256), F32));
    QL_TRY(want("scale_quant", ARG(code2), 1, 256, F32));
    QL_TRY(apart("scale_quant", ARG(code), ARG(absmax)));
    QL_TRY(apart("scale_quant", ARG(absmax2), ARG(absmax)));
    return absmax.cols == 0 ? QL_OK : q->ops->scale_quant(q, code, absmax2, absmax, code2, offset);
}

ql_status ql_nf4_matmul(const ql_queue *q, ql_tensor out, ql_tensor a, const ql_nf4 *w, int n, ql_tensor c,
                        ql_tensor bias)
{
    const char *op = "nf4_matmul";
    int64_t rows = 0;
    if (n < 1 || n > QL_FEW_MATS) QL_FAIL(QL_EINVAL, "%s: %d matrices, 1 to %d go side by side", op, n, QL_FEW_MATS);
    for (int i = 0; i < n; i++) {
        QL_TRY(want_nf4(op, &w[i], i));
        QL_TRY(want(op, ARG(a), ANY, w[i].cols, FLOAT));
        rows += w[i].rows;
    }
    QL_TRY(want(op, ARG(out), a.rows, rows, ONE(a.dtype) | F32));
    if (a.rows > QL_FEW_ROWS || w->cols < 1 || w->cols * QL_FEW_ROWS * 4 > QL_WORK_BYTES)
        QL_FAIL(QL_EINVAL, "%s: (%lld, %lld) is more than %d rows, or too wide", op, (long long)a.rows, (long long)a.cols, QL_FEW_ROWS);
    QL_TRY(apart(op, ARG(out), ARG(a)));
    if (ql_tensor_set(c)) {
        QL_TRY(want(op, ARG(c), a.rows, rows, ONE(out.dtype)));
        QL_TRY(same_or_apart(op, ARG(out), ARG(c)));
    }
    if (ql_tensor_set(bias)) {
        QL_TRY(want(op, ARG(bias), 1, rows, ONE(a.dtype)));
        QL_TRY(apart(op, ARG(out), ARG(bias)));
    }
    return empty(out) ? QL_OK : q->ops->nf4_matmul(q, out, a, w, n, c, bias);
}

/* ---- matmul ---------------------------------------------------------------------------------- */

ql_status ql_matmul(const ql_queue *q, ql_tensor out, ql_tensor a, ql_tensor b, ql_trans trans,
                    float alpha, ql_tensor c, ql_tensor bias)
{
    if (trans != QL_NN && trans != QL_NT && trans != QL_TN)
        QL_FAIL(QL_EINVAL, "matmul: %d is no transposition", (int)trans);
    QL_TRY(want("matmul", ARG(a), ANY, ANY, FLOAT));
    int64_t m = trans == QL_TN ? a.cols : a.rows, k = trans == QL_TN ? a.rows : a.cols;
    int one = ONE(a.dtype);
    if (trans == QL_NT)
        QL_TRY(want("matmul", ARG(b), ANY, k, one));
    else
        QL_TRY(want("matmul", ARG(b), k, ANY, one));
    int64_t n = trans == QL_NT ? b.rows : b.cols;
    QL_TRY(want("matmul", ARG(out), m, n, one | F32));
    if (k < 1 || m > INT_MAX || n > INT_MAX || k > INT_MAX || a.ld > INT_MAX || b.ld > INT_MAX ||
        out.ld > INT_MAX)
        QL_FAIL(QL_EINVAL, "matmul: (%lld, %lld) x (%lld, %lld) is outside 1 to %d", (long long)m,
                (long long)k, (long long)k, (long long)n, INT_MAX);
    QL_TRY(apart("matmul", ARG(out), ARG(a)));
    QL_TRY(apart("matmul", ARG(out), ARG(b)));
    if (ql_tensor_set(c)) {
        QL_TRY(want("matmul", ARG(c), m, n, ONE(out.dtype)));
        QL_TRY(same_or_apart("matmul", ARG(out), ARG(c)));
    }
    if (ql_tensor_set(bias)) {
        QL_TRY(want("matmul", ARG(bias), 1, n, one));
        QL_TRY(apart("matmul", ARG(out), ARG(bias)));
    }
    return empty(out) ? QL_OK : q->ops->matmul(q, out, a, b, trans, alpha, c, bias);
}

/* ---- norm, rotation, activation -------------------------------------------------------------- */

static ql_status want_norm(const char *op, ql_tensor x, ql_tensor w, float eps)
{
    QL_TRY(want(op, ARG(w), 1, ANY, F32));
    QL_TRY(want(op, ARG(x), ANY, ANY, FLOAT));
    if (w.cols < 1 || x.cols % w.cols)
        QL_FAIL(QL_EINVAL, "%s: x has %lld columns, needed is a multiple of w's %lld", op,
                (long long)x.cols, (long long)w.cols);
    if (!(eps >= 0)) QL_FAIL(QL_EINVAL, "%s: eps is %g, needed is 0 or more", op, (double)eps);
    return QL_OK;
}

ql_status ql_rmsnorm(const ql_queue *q, ql_tensor y, ql_tensor x, ql_tensor w, float eps)
{
    QL_TRY(want_norm("rmsnorm", x, w, eps));
    QL_TRY(want("rmsnorm", ARG(y), x.rows, x.cols, FLOAT));
    QL_TRY(same_or_apart("rmsnorm", ARG(y), ARG(x)));
    QL_TRY(apart("rmsnorm", ARG(y), ARG(w)));
    return empty(y) ? QL_OK : q->ops->rmsnorm(q, y, x, w, eps);
}

ql_status ql_rmsnorm_dx(const ql_queue *q, ql_tensor dx, ql_tensor dy, ql_tensor x, ql_tensor w,
                        float eps, ql_tensor dres)
{
    QL_TRY(want_norm("rmsnorm_dx", x, w, eps));
    QL_TRY(want("rmsnorm_dx", ARG(dx), x.rows, x.cols, FLOAT));
    QL_TRY(want("rmsnorm_dx", ARG(dy), x.rows, x.cols, FLOAT));
    QL_TRY(same_or_apart("rmsnorm_dx", ARG(dx), ARG(dy)));
    QL_TRY(apart("rmsnorm_dx", ARG(dx), ARG(x)));
    QL_TRY(apart("rmsnorm_dx", ARG(dx), ARG(w)));
    if (ql_tensor_set(dres)) {
        QL_TRY(want("rmsnorm_dx", ARG(dres), x.rows, x.cols, ONE(dx.dtype)));
        QL_TRY(same_or_apart("rmsnorm_dx", ARG(dx), ARG(dres)));
    }
    return empty(dx) ? QL_OK : q->ops->rmsnorm_dx(q, dx, dy, x, w, eps, dres);
}

ql_status ql_rope(const ql_queue *q, ql_tensor x, int64_t head_dim, ql_tensor pos, ql_tensor freq,
                  float scale, int sign)
{
    QL_TRY(want("rope", ARG(x), ANY, ANY, FLOAT));
    if (head_dim < 2 || head_dim % 2 || x.cols % head_dim)
        QL_FAIL(QL_EINVAL,
                "rope: x has %lld columns, needed is a multiple of an even head size, not %lld",
                (long long)x.cols, (long long)head_dim);
    if (sign != 1 && sign != -1) QL_FAIL(QL_EINVAL, "rope: sign is %d, needed is 1 or -1", sign);
    QL_TRY(want("rope", ARG(pos), 1, x.rows, I32));
    QL_TRY(want("rope", ARG(freq), 1, head_dim / 2, F32));
    QL_TRY(apart("rope", ARG(x), ARG(pos)));
    QL_TRY(apart("rope", ARG(x), ARG(freq)));
    return empty(x) ? QL_OK : q->ops->rope(q, x, head_dim, pos, freq, scale, sign);
}

ql_status ql_swiglu(const ql_queue *q, ql_tensor h, ql_tensor gu)
{
    QL_TRY(want("swiglu", ARG(h), ANY, ANY, FLOAT));
    QL_TRY(want("swiglu", ARG(gu), h.rows, 2 * h.cols, FLOAT));
    QL_TRY(apart("swiglu", ARG(h), ARG(gu)));
    return empty(h) ? QL_OK : q->ops->swiglu(q, h, gu);
}

ql_status ql_swiglu_dx(const ql_queue *q, ql_tensor dgu, ql_tensor dh, ql_tensor gu, ql_tensor h)
{
    QL_TRY(want("swiglu_dx", ARG(dh), ANY, ANY, FLOAT));
    QL_TRY(want("swiglu_dx", ARG(gu), dh.rows, 2 * dh.cols, FLOAT));
    QL_TRY(want("swiglu_dx", ARG(dgu), dh.rows, 2 * dh.cols, FLOAT));
    QL_TRY(same_or_apart("swiglu_dx", ARG(dgu), ARG(gu)));
    QL_TRY(apart("swiglu_dx", ARG(dgu), ARG(dh)));
    if (ql_tensor_set(h)) {
        QL_TRY(want("swiglu_dx", ARG(h), dh.rows, dh.cols, FLOAT));
        QL_TRY(same_or_apart("swiglu_dx", ARG(h), ARG(dh)));
        QL_TRY(apart("swiglu_dx", ARG(h), ARG(gu)));
        QL_TRY(apart("swiglu_dx", ARG(h), ARG(dgu)));
    }
    return empty(dh) ? QL_OK : q->ops->swiglu_dx(q, dgu, dh, gu, h);
}

static ql_status want_drop(const char *op, ql_tensor out, ql_tensor in, const ql_drop *d)
{
    QL_TRY(want(op, ARG(in), ANY, ANY, FLOAT));
    QL_TRY(want(op, ARG(out), in.rows, in.cols, ONE(in.dtype)));
    if (!(d->p >= 0 && d->p < 1))
        QL_FAIL(QL_EINVAL, "%s: p is %g, needed is 0 <= p < 1", op, (double)d->p);
    if (d->site > 15) QL_FAIL(QL_EINVAL, "%s: site is %u, at most 15", op, (unsigned)d->site);
    if (in.rows > 0 && !d->token) QL_FAIL(QL_EINVAL, "%s: token has no memory", op);
    return QL_OK;
}

ql_status ql_dropout(const ql_queue *q, ql_tensor out, ql_tensor in, const ql_drop *d)
{
    QL_TRY(want_drop("dropout", out, in, d));
    QL_TRY(same_or_apart("dropout", ARG(out), ARG(in)));
    return empty(out) ? QL_OK : q->ops->dropout(q, out, in, d);
}

ql_status ql_dropout_add(const ql_queue *q, ql_tensor out, ql_tensor in, const ql_drop *d)
{
    QL_TRY(want_drop("dropout_add", out, in, d));
    QL_TRY(apart("dropout_add", ARG(out), ARG(in)));
    return empty(out) ? QL_OK : q->ops->dropout_add(q, out, in, d);
}

/* ---- attention ------------------------------------------------------------------------------- */

static ql_status want_attention(const char *op, ql_tensor o, ql_tensor lse, ql_tensor q,
                                ql_tensor k, ql_tensor v, const ql_attn *a)
{
    if (a->head_dim < 8 || a->head_dim > 128 || a->head_dim % 8)
        QL_FAIL(QL_EINVAL, "%s: the head size is %lld, needed is a multiple of 8 up to 128", op,
                (long long)a->head_dim);
    if (a->heads < 1 || a->kv_heads < 1 || a->heads % a->kv_heads || a->heads > INT_MAX / 128)
        QL_FAIL(QL_EINVAL, "%s: %lld query heads do not divide among %lld key heads", op,
                (long long)a->heads, (long long)a->kv_heads);
    if (a->docs < 0 || a->window < 0 || a->q_max < 0 || a->k_max < 0)
        QL_FAIL(QL_EINVAL, "%s: negative counts: docs %lld, window %lld, q_max %lld, k_max %lld",
                op, (long long)a->docs, (long long)a->window, (long long)a->q_max,
                (long long)a->k_max);
    if (a->docs > 0 && (!a->q_start || !a->q_len || !a->k_start || !a->k_len))
        QL_FAIL(QL_EINVAL, "%s: %lld documents without their starts and lengths", op,
                (long long)a->docs);
    int64_t c = a->heads * a->head_dim, ck = a->kv_heads * a->head_dim;
    QL_TRY(want(op, ARG(q), ANY, c, FLOAT));
    QL_TRY(want(op, ARG(k), ANY, ck, ONE(q.dtype)));
    QL_TRY(want(op, ARG(v), k.rows, ck, ONE(q.dtype)));
    QL_TRY(want(op, ARG(o), q.rows, c, ONE(q.dtype)));
    if (q.ld > INT_MAX || k.ld > INT_MAX || v.ld > INT_MAX || o.ld > INT_MAX)
        QL_FAIL(QL_EINVAL, "%s: a row stride is above %d", op, INT_MAX);
    return want(op, ARG(lse), q.rows, a->heads, F32);
}

ql_status ql_attention(const ql_queue *q, ql_tensor o, ql_tensor lse, ql_tensor qt, ql_tensor k,
                       ql_tensor v, const ql_attn *a)
{
    const char *op = "attention";
    QL_TRY(want_attention(op, o, lse, qt, k, v, a));
    QL_TRY(apart(op, ARG(o), ARG(qt)));
    QL_TRY(apart(op, ARG(o), ARG(k)));
    QL_TRY(apart(op, ARG(o), ARG(v)));
    QL_TRY(apart(op, ARG(o), ARG(lse)));
    return a->docs == 0 || empty(qt) ? QL_OK : q->ops->attention(q, o, lse, qt, k, v, a);
}

ql_status ql_attention_dx(const ql_queue *q, ql_tensor dq, ql_tensor dk, ql_tensor dv,
                          ql_tensor dout, ql_tensor o, ql_tensor lse, ql_tensor delta, ql_tensor qt,
                          ql_tensor k, ql_tensor v, const ql_attn *a)
{
    const char *op = "attention_dx";
    QL_TRY(want_attention(op, o, lse, qt, k, v, a));
    QL_TRY(want(op, ARG(dout), qt.rows, qt.cols, ONE(qt.dtype)));
    QL_TRY(want(op, ARG(dq), qt.rows, qt.cols, ONE(qt.dtype)));
    QL_TRY(want(op, ARG(dk), k.rows, k.cols, ONE(qt.dtype)));
    QL_TRY(want(op, ARG(dv), k.rows, k.cols, ONE(qt.dtype)));
    QL_TRY(want(op, ARG(delta), qt.rows, a->heads, F32));
    const arg outs[] = {ARG(dq), ARG(dk), ARG(dv), ARG(delta)};
    const arg ins[] = {ARG(dout), ARG(o), ARG(lse), ARG(qt), ARG(k), ARG(v)};
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < i; j++) QL_TRY(apart(op, outs[i], outs[j]));
        for (int j = 0; j < 6; j++) QL_TRY(apart(op, outs[i], ins[j]));
    }
    if (a->docs == 0 || empty(qt)) return QL_OK;
    return q->ops->attention_dx(q, dq, dk, dv, dout, o, lse, delta, qt, k, v, a);
}

/* ---- loss ------------------------------------------------------------------------------------ */

ql_status ql_ce_stats(const ql_queue *q, ql_tensor stats, ql_tensor logits, ql_tensor target,
                      int64_t v0)
{
    QL_TRY(want("ce_stats", ARG(logits), ANY, ANY, FLOAT));
    QL_TRY(want("ce_stats", ARG(stats), logits.rows, 4, F32));
    QL_TRY(want("ce_stats", ARG(target), 1, logits.rows, I32));
    QL_TRY(apart("ce_stats", ARG(stats), ARG(logits)));
    if (v0 < 0 || logits.cols < 1)
        QL_FAIL(QL_EINVAL, "ce_stats: a piece of %lld columns at %lld", (long long)logits.cols,
                (long long)v0);
    return empty(stats) ? QL_OK : q->ops->ce_stats(q, stats, logits, target, v0);
}

ql_status ql_ce_join(const ql_queue *q, ql_tensor a, ql_tensor b)
{
    QL_TRY(want("ce_join", ARG(a), ANY, 4, F32));
    QL_TRY(want("ce_join", ARG(b), a.rows, 4, F32));
    QL_TRY(apart("ce_join", ARG(a), ARG(b)));
    return empty(a) ? QL_OK : q->ops->ce_join(q, a, b);
}

static ql_status want_smoothing(const char *op, float smoothing, int64_t vocab)
{
    if (!(smoothing >= 0 && smoothing < 1) || vocab < 1)
        QL_FAIL(QL_EINVAL, "%s: smoothing %g over %lld tokens, needed is 0 <= smoothing < 1", op,
                (double)smoothing, (long long)vocab);
    return QL_OK;
}

ql_status ql_ce_loss(const ql_queue *q, ql_tensor nll, ql_tensor lse, ql_tensor stats,
                     ql_tensor target, float smoothing, int64_t vocab)
{
    QL_TRY(want("ce_loss", ARG(stats), ANY, 4, F32));
    QL_TRY(want("ce_loss", ARG(nll), 1, stats.rows, F32));
    QL_TRY(want("ce_loss", ARG(lse), 1, stats.rows, F32));
    QL_TRY(want("ce_loss", ARG(target), 1, stats.rows, I32));
    QL_TRY(apart("ce_loss", ARG(nll), ARG(lse)));
    QL_TRY(apart("ce_loss", ARG(nll), ARG(stats)));
    QL_TRY(apart("ce_loss", ARG(lse), ARG(stats)));
    QL_TRY(want_smoothing("ce_loss", smoothing, vocab));
    return stats.rows == 0 ? QL_OK : q->ops->ce_loss(q, nll, lse, stats, target, smoothing, vocab);
}

ql_status ql_ce_grad(const ql_queue *q, ql_tensor logits, ql_tensor lse, ql_tensor target,
                     int64_t v0, float smoothing, int64_t vocab, const ql_ctl *ctl)
{
    QL_TRY(want("ce_grad", ARG(logits), ANY, ANY, FLOAT));
    QL_TRY(want("ce_grad", ARG(lse), 1, logits.rows, F32));
    QL_TRY(want("ce_grad", ARG(target), 1, logits.rows, I32));
    QL_TRY(apart("ce_grad", ARG(logits), ARG(lse)));
    QL_TRY(want_smoothing("ce_grad", smoothing, vocab));
    if (v0 < 0 || v0 + logits.cols > vocab)
        QL_FAIL(QL_EINVAL, "ce_grad: columns %lld to %lld of a vocabulary of %lld", (long long)v0,
                (long long)(v0 + logits.cols), (long long)vocab);
    if (!ctl) QL_FAIL(QL_EINVAL, "ce_grad: ctl is missing");
    return empty(logits) ? QL_OK
                         : q->ops->ce_grad(q, logits, lse, target, v0, smoothing, vocab, ctl);
}

/* One level of the halving fits the workspace. */
static ql_status want_sum(const char *op, arg in)
{
    QL_TRY(want(op, in, 1, ANY, F32));
    if (in.t.cols < 1 || in.t.cols > QL_WORK_BYTES / 4)
        QL_FAIL(QL_EINVAL, "%s: %s has %lld numbers, needed are 1 to %lld", op, in.name,
                (long long)in.t.cols, (long long)(QL_WORK_BYTES / 4));
    return QL_OK;
}

ql_status ql_sum(const ql_queue *q, ql_tensor out, ql_tensor in)
{
    QL_TRY(want("sum", ARG(out), 1, 1, F32));
    QL_TRY(want_sum("sum", ARG(in)));
    QL_TRY(apart("sum", ARG(out), ARG(in)));
    return q->ops->sum(q, out, in);
}

/* ---- optimizer ------------------------------------------------------------------------------- */

static ql_status want_blocks(const char *op, arg a)
{
    QL_TRY(want(op, a, 1, ANY, F32));
    if (a.t.cols % QL_OPT_BLOCK)
        QL_FAIL(QL_EINVAL, "%s: %s has %lld numbers, needed is a multiple of %d", op, a.name,
                (long long)a.t.cols, QL_OPT_BLOCK);
    return QL_OK;
}

ql_status ql_norm_parts(const ql_queue *q, ql_tensor part, ql_tensor g)
{
    QL_TRY(want_blocks("norm_parts", ARG(g)));
    QL_TRY(want("norm_parts", ARG(part), 1, g.cols / QL_OPT_BLOCK, F32));
    QL_TRY(apart("norm_parts", ARG(part), ARG(g)));
    return empty(g) ? QL_OK : q->ops->norm_parts(q, part, g);
}

ql_status ql_clip_step(const ql_queue *q, ql_ctl *ctl, ql_tensor part, const ql_clip *c)
{
    QL_TRY(want_sum("clip", ARG(part)));
    if (!ctl) QL_FAIL(QL_EINVAL, "clip: ctl is missing");
    if (!c->lr || c->n_lr < 1) QL_FAIL(QL_EINVAL, "clip: the table of learning rates is empty");
    if (c->scaling && (c->growth_interval < 1 || !(c->growth_factor >= 1) ||
                       !(c->backoff_factor > 0 && c->backoff_factor <= 1)))
        QL_FAIL(QL_EINVAL, "clip: loss scaling grows by %g every %d steps and backs off by %g",
                (double)c->growth_factor, (int)c->growth_interval, (double)c->backoff_factor);
    return q->ops->clip(q, ctl, part, c);
}

static ql_status want_adam(const char *op, ql_tensor p, ql_tensor g, const ql_ctl *ctl,
                           const ql_adam *a)
{
    QL_TRY(want_blocks(op, ARG(p)));
    QL_TRY(want(op, ARG(g), 1, p.cols, F32));
    QL_TRY(apart(op, ARG(p), ARG(g)));
    if (!ctl) QL_FAIL(QL_EINVAL, "%s: ctl is missing", op);
    if (!(a->beta1 >= 0 && a->beta1 < 1 && a->beta2 >= 0 && a->beta2 < 1 && a->eps >= 0) ||
        (a->kind != QL_ADAM_TORCH && a->kind != QL_ADAM_BNB))
        QL_FAIL(QL_EINVAL, "%s: kind %d, betas %g %g, eps %g", op, (int)a->kind, (double)a->beta1,
                (double)a->beta2, (double)a->eps);
    return QL_OK;
}

ql_status ql_adamw(const ql_queue *q, ql_tensor p, ql_tensor m, ql_tensor v, ql_tensor g,
                   const ql_ctl *ctl, const ql_adam *a)
{
    QL_TRY(want_adam("adamw", p, g, ctl, a));
    QL_TRY(want("adamw", ARG(m), 1, p.cols, F32));
    QL_TRY(want("adamw", ARG(v), 1, p.cols, F32));
    const arg all[] = {ARG(p), ARG(m), ARG(v), ARG(g)};
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < i; j++) QL_TRY(apart("adamw", all[i], all[j]));
    return empty(p) ? QL_OK : q->ops->adamw(q, p, m, v, g, ctl, a);
}

ql_status ql_adamw8(const ql_queue *q, ql_tensor p, ql_tensor m8, ql_tensor v8, ql_tensor m2,
                    ql_tensor v2, ql_tensor g, ql_tensor code1, ql_tensor code2, const ql_ctl *ctl,
                    const ql_adam *a)
{
    QL_TRY(want_adam("adamw8", p, g, ctl, a));
    QL_TRY(want("adamw8", ARG(m8), 1, p.cols, U8));
    QL_TRY(want("adamw8", ARG(v8), 1, p.cols, U8));
    QL_TRY(want("adamw8", ARG(m2), 1, p.cols / 256, F32));
    QL_TRY(want("adamw8", ARG(v2), 1, p.cols / 256, F32));
    QL_TRY(want("adamw8", ARG(code1), 1, 256, F32));
    QL_TRY(want("adamw8", ARG(code2), 1, 256, F32));
    const arg all[] = {ARG(p), ARG(m8), ARG(v8), ARG(m2), ARG(v2), ARG(g)};
    for (int i = 0; i < 6; i++)
        for (int j = 0; j < i; j++) QL_TRY(apart("adamw8", all[i], all[j]));
    return empty(p) ? QL_OK : q->ops->adamw8(q, p, m8, v8, m2, v2, g, code1, code2, ctl, a);
}
