/* What of the model is no decoder linear and lies on the devices: norms, biases, the head. Each value against the file's, in the dtype
 * that it rests in. Embedding rows come from the file itself with every batch. */
#include "core/verify.h"

#include "core/hash.h"
#include "kernels/half.h"

#include <stdlib.h>
#include <string.h>

enum { CHUNK = 4 << 20 };

typedef struct {
    ql_rank *r;
    char *held, *want; /* (CHUNK) bytes */
    ql_verify_rest *out;
} rest;

/* `to` (rows, cols) on the device against rows [from, …) of the file's tensor; the bytes are chained into *hash. */
static ql_status compare(rest *x, const ql_param *p, int64_t from, ql_tensor to, uint64_t *hash)
{
    const ql_dev_table *dev = x->r->set.be->dev;
    int64_t es = (int64_t)ql_dtype_size(to.dtype), row = to.cols * es, chunk = ql_max64(1, CHUNK / row), wrong = 0;
    if (row > CHUNK) QL_FAIL(QL_ENOSUP, "verify: a row of %s has %lld bytes", p->name, (long long)row);
    for (int64_t at = 0; at < to.rows; at += chunk) {
        int64_t n = ql_min64(chunk, to.rows - at);
        QL_TRY(dev->copy2d(x->r->side, x->held, row, (char *)to.data + at * to.ld * es, to.ld * es, row, n));
        QL_TRY(dev->sync(x->r->side));
        for (int64_t i = 0; i < n * to.cols; i++)
            ql_float_put(x->want, to.dtype, i, ql_float_get(p->data, p->dtype, (from + at) * to.cols + i));
        *hash = ql_hash64(*hash, x->held, (size_t)(n * row));
        for (int64_t i = 0; i < n * to.cols; i++) wrong += memcmp(x->held + i * es, x->want + i * es, (size_t)es) != 0;
        x->r->set.shared->rank[x->r->set.rank].beat++;
    }
    ql_model_done_with(x->r->spec->model, (const char *)p->data + from * to.cols * (int64_t)ql_dtype_size(p->dtype),
                       to.rows * to.cols * (int64_t)ql_dtype_size(p->dtype));
    if (wrong && !x->out->wrong) strncpy(x->out->name, p->name, sizeof x->out->name - 1);
    x->out->wrong += wrong;
    x->out->bytes += to.rows * row;
    return QL_OK;
}

/* Summed, since stages of a pipeline have different ones. */
static ql_status vector(rest *x, const ql_param *p, ql_tensor to)
{
    uint64_t hash = 0;
    if (!ql_tensor_set(to) || !p->data) return QL_OK;
    QL_TRY(compare(x, p, 0, to, &hash));
    x->out->small += hash;
    x->out->vectors++;
    return QL_OK;
}

static ql_status layer(rest *x, int64_t l)
{
    const ql_block *b = &x->r->spec->model->block[l];
    const ql_small *s = &x->r->mem->small[l];
    QL_TRY(vector(x, &b->norm_attn, s->norm_attn));
    QL_TRY(vector(x, &b->norm_ffn, s->norm_ffn));
    QL_TRY(vector(x, &b->q_norm, s->q_norm));
    QL_TRY(vector(x, &b->k_norm, s->k_norm));
    for (int g = 0; g < QL_GROUPS; g++) {
        const ql_group_shape *gs = &x->r->mem->shape.group[g];
        for (int i = 0; ql_tensor_set(s->bias[g]) && i < gs->count; i++) {
            const ql_param *p = &b->bias[gs->first + (ql_linear)i];
            if (p->data) QL_TRY(vector(x, p, ql_cols(s->bias[g], gs->row[i], p->cols)));
        }
    }
    return QL_OK;
}

static ql_status head(rest *x)
{
    const ql_mem *m = x->r->mem;
    const ql_model *model = x->r->spec->model;
    if (!ql_mem_has_head(m)) return QL_OK;
    QL_TRY(vector(x, &model->norm, m->head.norm));
    for (int p = m->head.first; p < m->head.first + m->head.count; p++) {
        int64_t n = ql_head_rows(&m->head, p);
        x->out->has[p] = 1;
        if (n > 0) QL_TRY(compare(x, &model->head, p * m->head.piece, ql_rows(m->head.w, (p - m->head.first) * m->head.piece, n), &x->out->piece[p]));
    }
    return QL_OK;
}

ql_status ql_verify_rest_of(ql_rank *r, ql_verify_rest *out)
{
    rest x = {.r = r, .held = malloc(CHUNK), .want = malloc(CHUNK), .out = out};
    ql_status st = QL_OK;
    memset(out, 0, sizeof *out);
    if (!x.held || !x.want) QL_GO(ql_fail(QL_ENOMEM, "verify: no host memory"));
    for (int64_t l = r->mem->lo; l < r->mem->hi; l++) QL_GO(layer(&x, l));
    QL_GO(head(&x));
out:
    free(x.held);
    free(x.want);
    return st;
}
