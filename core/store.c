#include "core/store.h"

#include "core/nf4.h"

#include <stdlib.h>
#include <string.h>

enum { PART_ALIGN = 256, CHUNK = 1 << 20 /* weights quantised at a time: a multiple of 64·256 */ };

/* ---- layout ----------------------------------------------------------------------------------- */

static int64_t absmax_bytes(const ql_blob_linear *l)
{
    return l->part / l->block * (l->nested ? 1 : 4);
}

static void linear_init(ql_blob_linear *l, const ql_weight *w, const ql_quant *quant, ql_dtype model_dtype, int parts)
{
    int64_t total = w->rows * w->cols;
    memset(l, 0, sizeof *l);
    l->rows = w->rows, l->cols = w->cols;
    l->nf4 = w->kind != QL_PLAIN || (quant->quantise && !w->skip);
    l->from_plain = l->nf4 && w->kind == QL_PLAIN;
    if (!l->nf4) {
        l->dtype = w->dtype;
        l->part = ql_ceil_div(w->rows, parts) * w->cols; /* whole rows */
        return;
    }
    l->block = l->from_plain ? QL_NF4_BLOCK : w->block;
    l->nested = l->from_plain ? (quant->nested ? QL_NESTED_BLOCK : 0) : w->nested_block;
    l->dtype = l->from_plain ? model_dtype : w->dtype;
    int64_t unit = l->block * (l->nested ? l->nested : 1);
    l->part = ql_round_up(ql_ceil_div(total, parts), unit);
}

ql_status ql_blob_init(ql_blob *b, const ql_block *block, const ql_quant *quant, ql_dtype model_dtype, int parts)
{
    int64_t at = 0;
    if (parts < 1 || parts > QL_MAX_PARTS)
        QL_FAIL(QL_ENOSUP, "%d ranks: at most %d can share a layer", parts, (int)QL_MAX_PARTS);
    memset(b, 0, sizeof *b);
    b->parts = parts;
    for (int i = 0; i < QL_LINEARS; i++) {
        ql_blob_linear *l = &b->lin[i];
        linear_init(l, &block->w[i], quant, model_dtype, parts);
        l->at_packed = at;
        at += ql_round_up(l->nf4 ? l->part / 2 : l->part * (int64_t)ql_dtype_size(l->dtype), PART_ALIGN);
        if (!l->nf4) continue;
        l->at_absmax = at;
        at += ql_round_up(absmax_bytes(l), PART_ALIGN);
        l->at_nested = at;
        if (l->nested) at += ql_round_up(l->part / l->block / l->nested * 4, PART_ALIGN);
    }
    b->part_bytes = at;
    return QL_OK;
}

ql_status ql_tables_carve(const ql_blob *b, ql_arena *a, ql_tables *out)
{
    memset(out, 0, sizeof *out);
    for (int i = 0; i < QL_LINEARS; i++) {
        void *p = NULL;
        if (!b->lin[i].nf4) continue;
        QL_TRY(ql_arena_take(a, QL_CAT_HEAD, 16 * 4, &p));
        out->code[i] = p;
        if (!b->lin[i].nested) continue;
        QL_TRY(ql_arena_take(a, QL_CAT_HEAD, 256 * 4, &p));
        out->code2[i] = p;
    }
    return QL_OK;
}

/* ---- loading ---------------------------------------------------------------------------------- */

/* Temporary device memory of one weight while it is quantised: packed | absmax fp32 | codes | nested | chunk as in the file |
 * chunk in the model's dtype | a flag and the 256-entry table. */
typedef struct {
    int64_t packed, absmax, codes, nested, raw, cast, flag, table, end;
} temp_layout;

static temp_layout temp_for(const ql_blob_linear *l)
{
    int64_t n = l->rows * l->cols, blocks = ql_ceil_div(n, l->block), chunk = ql_min64(CHUNK, ql_round_up(n, 2));
    int64_t nested = l->nested ? ql_ceil_div(blocks, l->nested) : 0;
    temp_layout t;
    t.packed = 0;
    t.absmax = ql_round_up((n + 1) / 2, PART_ALIGN);
    t.codes = t.absmax + ql_round_up(blocks * 4, PART_ALIGN);
    t.nested = t.codes + ql_round_up(blocks, PART_ALIGN);
    t.raw = t.nested + ql_round_up(nested * 4, PART_ALIGN);
    t.cast = t.raw + ql_round_up(chunk * 4, PART_ALIGN);
    t.flag = t.cast + ql_round_up(chunk * 4, PART_ALIGN);
    t.table = t.flag + PART_ALIGN;
    t.end = t.table + 256 * 4;
    return t;
}

int64_t ql_store_temp_bytes(const ql_blob *b)
{
    int64_t most = 0;
    for (int i = 0; i < QL_LINEARS; i++)
        if (b->lin[i].from_plain) most = ql_max64(most, temp_for(&b->lin[i]).end);
    return most;
}

/* Bytes [from, from + n) of a source that is `have` bytes long; beyond its end nothing is written. */
static ql_status copy_range(const ql_loader *ld, char *dst, const char *src, int64_t have, int64_t from, int64_t n)
{
    if (from >= have) return QL_OK;
    return ld->be->dev->copy(ld->q->stream, dst, src + from, ql_min64(n, have - from));
}

typedef struct {
    const void *packed, *absmax, *nested; /* whole tensors, host or device */
} sources;

static ql_status copy_parts(const ql_loader *ld, const ql_blob *b, const ql_blob_linear *l, int part, int n, char *dst,
                            const sources *src)
{
    int64_t total = l->rows * l->cols;
    for (int p = part; p < part + n; p++, dst += b->part_bytes) {
        if (!l->nf4) {
            int64_t es = (int64_t)ql_dtype_size(l->dtype);
            QL_TRY(copy_range(ld, dst + l->at_packed, src->packed, total * es, p * l->part * es, l->part * es));
            continue;
        }
        int64_t blocks = ql_ceil_div(total, l->block), per = l->part / l->block, es = l->nested ? 1 : 4;
        QL_TRY(copy_range(ld, dst + l->at_packed, src->packed, (total + 1) / 2, p * l->part / 2, l->part / 2));
        QL_TRY(copy_range(ld, dst + l->at_absmax, src->absmax, blocks * es, p * per * es, per * es));
        if (l->nested)
            QL_TRY(copy_range(ld, dst + l->at_nested, src->nested, ql_ceil_div(blocks, l->nested) * 4,
                              p * (per / l->nested) * 4, per / l->nested * 4));
    }
    return QL_OK;
}

/* Plain weights to NF4 on the device, in chunks, as the file would have been quantised: cast to the model's dtype first. */
static ql_status quantise(const ql_loader *ld, const ql_weight *w, const ql_blob_linear *l, float *code2, float *offset,
                          sources *out)
{
    const ql_dev_table *dev = ld->be->dev;
    temp_layout t = temp_for(l);
    int64_t n = l->rows * l->cols, blocks = ql_ceil_div(n, l->block);
    int64_t es = (int64_t)ql_dtype_size(w->dtype);
    ql_status st = QL_OK;
    float *host = NULL;
    int32_t bad = 0;
    ql_tensor flag = ql_vec(ld->temp + t.flag, QL_I32, 1);
    if (t.end > ld->temp_bytes)
        QL_FAIL(QL_EINTERNAL, "%s: quantising needs %lld bytes of scratch, there are %lld", w->name, (long long)t.end,
                (long long)ld->temp_bytes);
    QL_GO(dev->set(ld->q->stream, flag.data, 0, 4));
    for (int64_t at = 0; at < n; at += CHUNK) {
        int64_t m = ql_min64(CHUNK, n - at);
        ql_tensor raw = ql_vec(ld->temp + t.raw, w->dtype, m), cast = ql_vec(ld->temp + t.cast, l->dtype, m);
        QL_GO(dev->copy(ld->q->stream, raw.data, (const char *)w->data + at * es, m * es));
        QL_GO(ql_convert(ld->q, cast, raw));
        QL_GO(ql_check_finite(ld->q, flag, cast));
        QL_GO(ql_nf4_quant(ld->q, ql_vec(ld->temp + t.packed + at / 2, QL_U8, (m + 1) / 2),
                           ql_vec(ld->temp + t.absmax + at / l->block * 4, QL_F32, ql_ceil_div(m, l->block)), cast));
        /* The next chunk reuses raw and cast; the copy from pageable memory may still read the file. */
        QL_GO(dev->sync(ld->q->stream));
        ql_model_done_with(ld->model, (const char *)w->data + at * es, m * es);
    }
    QL_GO(dev->copy(ld->q->stream, &bad, flag.data, 4));
    QL_GO(dev->sync(ld->q->stream));
    if (bad) {
        st = ql_fail(QL_EINVAL, "%s holds NaN or infinite values (as %s): the file is damaged, or its dtype is too narrow", w->name,
                     ql_dtype_name(l->dtype));
        goto out;
    }
    *out = (sources){ld->temp + t.packed, ld->temp + t.absmax, NULL};
    if (!l->nested) goto out;
    host = malloc((size_t)blocks * 4);
    if (!host) {
        st = ql_fail(QL_ENOMEM, "%s: no memory for %lld scales", w->name, (long long)blocks);
        goto out;
    }
    QL_GO(dev->copy(ld->q->stream, host, ld->temp + t.absmax, blocks * 4));
    QL_GO(dev->sync(ld->q->stream));
    /* One serial sum in double over all scales of the weight, whatever the number of ranks. */
    double sum = 0;
    for (int64_t i = 0; i < blocks; i++) sum += host[i];
    *offset = (float)(sum / (double)blocks);
    QL_GO(ql_scale_quant(ld->q, ql_vec(ld->temp + t.codes, QL_U8, blocks),
                         ql_vec(ld->temp + t.nested, QL_F32, ql_ceil_div(blocks, l->nested)),
                         ql_vec(ld->temp + t.absmax, QL_F32, blocks), ql_vec(code2, QL_F32, 256), *offset));
    *out = (sources){ld->temp + t.packed, ld->temp + t.codes, ld->temp + t.nested};
out:
    free(host);
    return st;
}

static ql_status load_linear(const ql_loader *ld, const ql_weight *w, const ql_blob *b, int i, int part, int n, char *dst,
                             ql_tables *t)
{
    const ql_blob_linear *l = &b->lin[i];
    const ql_dev_table *dev = ld->be->dev;
    sources src = {w->data, w->absmax, w->nested_absmax};
    float nf4[16], map[256];
    if (l->nf4) {
        if (l->from_plain)
            memcpy(nf4, ql_nf4_map, sizeof nf4);
        else
            memcpy(nf4, w->quant_map, sizeof nf4);
        QL_TRY(dev->copy(ld->q->stream, t->code[i], nf4, sizeof nf4));
    }
    if (l->nf4 && l->nested) {
        if (l->from_plain)
            ql_dynamic_map_signed(map);
        else
            memcpy(map, w->nested_map, sizeof map);
        QL_TRY(dev->copy(ld->q->stream, t->code2[i], map, sizeof map));
        t->offset[i] = w->nested_offset;
    }
    if (l->from_plain) QL_TRY(quantise(ld, w, l, t->code2[i], &t->offset[i], &src));
    QL_TRY(copy_parts(ld, b, l, part, n, dst, &src));
    QL_TRY(dev->sync(ld->q->stream)); /* nf4 and map are this frame's; temp is reused by the next linear */
    if (l->from_plain) return QL_OK;
    ql_model_done_with(ld->model, w->data, w->bytes);
    if (w->absmax) ql_model_done_with(ld->model, w->absmax, w->blocks * (w->nested_block ? 1 : 4));
    return QL_OK;
}

static const float *codes(const ql_blob *b, const ql_weight *w, int i)
{
    return b->lin[i].from_plain ? ql_nf4_map : w[i].quant_map;
}

ql_status ql_store_load(const ql_loader *ld, int64_t l, const ql_blob *b, int part, int n, void *dst, ql_tables *t)
{
    const ql_weight *w = ld->model->block[l].w;
    for (int i = 0; i < QL_LINEARS; i++) {
        int same = 0;
        QL_TRY(load_linear(ld, &w[i], b, i, part, n, dst, t));
        while (same < i && !(b->lin[i].nf4 && b->lin[same].nf4 && memcmp(codes(b, w, same), codes(b, w, i), 16 * sizeof(float)) == 0)) same++;
        t->code_of[i] = same;
    }
    return QL_OK;
}

/* ---- use -------------------------------------------------------------------------------------- */

static ql_nf4 nf4_view(const ql_blob *b, int i, const ql_tables *t, void *const *parts, const ql_quant *quant, ql_dtype out)
{
    const ql_blob_linear *l = &b->lin[i];
    ql_nf4 w = {.rows = l->rows, .cols = l->cols, .part = l->part, .parts = b->parts, .block = (int)l->block,
                .block2 = (int)l->nested, .code = t->code[t->code_of[i]], .code2 = t->code2[i], .offset = t->offset[i],
                .state = quant->direct ? out : l->dtype};
    for (int p = 0; p < b->parts; p++) {
        char *base = parts[p];
        w.packed[p] = (const uint8_t *)(base + l->at_packed);
        w.absmax[p] = base + l->at_absmax;
        w.absmax2[p] = l->nested ? (const float *)(void *)(base + l->at_nested) : NULL;
    }
    return w;
}

int ql_store_views(const ql_shape *s, const ql_blob *b, const ql_tables *t, void *const *parts, const ql_quant *quant, ql_nf4 out[QL_LINEARS])
{
    for (int i = 0; i < QL_LINEARS; i++) {
        if (!b->lin[i].nf4) return 0;
        out[i] = nf4_view(b, i, t, parts, quant, s->dtype);
    }
    return 1;
}

ql_status ql_store_dequant(const ql_shape *s, const ql_queue *q, const ql_blob *b, const ql_tables *t, void *const *parts,
                           const ql_quant *quant, ql_scratch *w, int64_t layer)
{
    ql_tensor out[QL_LINEARS];
    ql_nf4 in[QL_LINEARS];
    int n = 0;
    if (w->layer == layer) return QL_OK;
    w->layer = -1;
    for (int i = 0; i < QL_LINEARS; i++) {
        const ql_blob_linear *l = &b->lin[i];
        ql_tensor to = ql_scratch_base(s, w, (ql_linear)i);
        if (l->nf4) {
            out[n] = to;
            in[n++] = nf4_view(b, i, t, parts, quant, s->dtype);
            continue;
        }
        int64_t per = l->part / l->cols; /* rows of a part */
        for (int p = 0; p < b->parts && p * per < l->rows; p++) {
            int64_t rows = ql_min64(per, l->rows - p * per);
            ql_tensor from = ql_mat((char *)parts[p] + l->at_packed, l->dtype, rows, l->cols, l->cols);
            QL_TRY(ql_convert(q, ql_rows(to, p * per, rows), from));
        }
    }
    if (n) QL_TRY(ql_nf4_dequant(q, out, in, n));
    w->layer = layer;
    w->version = -1;
    return QL_OK;
}
