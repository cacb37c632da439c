/* The bytes of every layer as every device gathers it, against what the model's file says. */
#include "core/verify.h"

#include "core/hash.h"
#include "core/nf4.h"
#include "kernels/half.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What a rank found out about a layer; exchanged as bytes. */
typedef struct {
    uint64_t device, file; /* hashes; file: of the rank that read it, else 0 */
    int64_t differ;        /* codes that differ by one step (quantised here by the device's reciprocal) */
    int64_t wrong;         /* anything else that differs */
} finding;

typedef struct {
    ql_verify *of;
    ql_worker *w;
    ql_rank *r;
    ql_task *t;
    char *host;            /* a gathered layer */
    char *piece;           /* one of its pieces, put together */
    finding *mine, *all;   /* (L), (world, L) */
} gathered;

static const ql_dev_table *dev_of(const gathered *v)
{
    return v->r->set.be->dev;
}

/* Who reads layer l's file: in turn, or the stage that has it. */
static int owner_of(const gathered *v, int64_t l)
{
    int lo, hi, r = 0;
    if (!ql_plan_piped(&v->t->spec.choice)) return (int)(l % v->r->set.world);
    for (; r < v->r->set.world - 1; r++) {
        ql_plan_stage(&v->t->spec.choice, r, &lo, &hi);
        if (l < hi) break;
    }
    return r;
}

/* Where piece k of a linear lies in a part, its bytes there, and its bytes in the file; 0 where there is no such piece. */
static int64_t piece_of(const ql_blob_linear *l, int k, int64_t *at, int64_t *per)
{
    int64_t n = l->rows * l->cols, es = l->nf4 ? 0 : (int64_t)ql_dtype_size(l->dtype);
    if (k == 0) {
        *at = l->at_packed, *per = l->nf4 ? l->part / 2 : l->part * es;
        return l->nf4 ? (n + 1) / 2 : n * es;
    }
    if (!l->nf4 || (k == 2 && !l->nested)) return 0;
    int64_t blocks = ql_ceil_div(n, l->block), one = l->nested ? 1 : 4;
    if (k == 1) {
        *at = l->at_absmax, *per = l->part / l->block * one;
        return blocks * one;
    }
    *at = l->at_nested, *per = l->part / l->block / l->nested * 4;
    return ql_ceil_div(blocks, l->nested) * 4;
}

/* A layer to host memory by the way that training takes it: the gather of sharded and host layers included. */
static ql_status pull(gathered *v, int64_t l)
{
    ql_rank *r = v->r;
    const ql_blob *b = &r->mem->blob[l];
    const void *from = r->mem->base[l];
    if (v->t->spec.choice.store[l] != QL_STORE_RESIDENT) {
        QL_TRY(ql_exec_gather(r, l, 0));
        from = r->mem->slot[0];
    }
    QL_TRY(dev_of(v)->copy(r->side, v->host, from, b->parts * b->part_bytes));
    return dev_of(v)->sync(r->side);
}

/* Piece k of linear i, its parts one after another. */
static const char *assemble(const gathered *v, const ql_blob *b, int i, int k, int64_t *bytes)
{
    int64_t at = 0, per = 1;
    *bytes = piece_of(&b->lin[i], k, &at, &per);
    for (int64_t p = 0; p * per < *bytes && p < b->parts; p++)
        memcpy(v->piece + p * per, v->host + p * b->part_bytes + at, (size_t)ql_min64(per, *bytes - p * per));
    return v->piece;
}

/* A RESIDENT16 layer holds values: (N, K) of the compute dtype, without the adapter columns. */
static ql_status pull_values(gathered *v, int64_t l, int i, int64_t *bytes)
{
    ql_rank *r = v->r;
    ql_tensor t = ql_scratch_base(&r->mem->shape, &r->mem->own[l], (ql_linear)i);
    int64_t es = (int64_t)ql_dtype_size(t.dtype);
    *bytes = t.rows * t.cols * es;
    QL_TRY(dev_of(v)->copy2d(r->side, v->piece, t.cols * es, t.data, t.ld * es, t.cols * es, t.rows));
    return dev_of(v)->sync(r->side);
}

/* What the file says a linear is: its own bytes, or what the host makes of plain values. */
typedef struct {
    const void *data[QL_VERIFY_PIECES];
    ql_nf4_host made;
    const ql_weight *w;
} source;

static ql_status source_open(const gathered *v, int64_t l, int i, source *s)
{
    const ql_weight *w = &v->t->model->block[l].w[i];
    const ql_blob_linear *x = &v->r->mem->blob[l].lin[i];
    memset(s, 0, sizeof *s);
    s->w = w;
    if (!x->from_plain) {
        s->data[0] = w->data, s->data[1] = w->absmax, s->data[2] = w->nested_absmax;
        return QL_OK;
    }
    int64_t n = w->rows * w->cols;
    float *values = malloc((size_t)n * 4);
    if (!values) QL_FAIL(QL_ENOMEM, "verify: no host memory for %s", w->name);
    for (int64_t k = 0; k < n; k++) values[k] = ql_float_round(ql_float_get(w->data, w->dtype, k), x->dtype);
    ql_status st = ql_nf4_make(values, w->rows, w->cols, x->dtype, x->nested ? QL_SCALES_NESTED : QL_SCALES_F32, &s->made);
    free(values);
    QL_TRY(st);
    s->w = &s->made.w;
    s->data[0] = s->made.w.data, s->data[1] = s->made.w.absmax, s->data[2] = s->made.w.nested_absmax;
    return QL_OK;
}

static void source_close(const gathered *v, int64_t l, int i, source *s)
{
    const ql_weight *w = &v->t->model->block[l].w[i];
    ql_nf4_free(&s->made);
    ql_model_done_with(v->t->model, w->data, w->bytes);
}

/* The values of a linear by the host's decoder. Caller frees. */
static ql_status source_values(const gathered *v, const source *s, void **out)
{
    const ql_weight *w = s->w;
    ql_weight copy = *w;
    int64_t n = w->rows * w->cols;
    ql_dtype to = v->t->spec.dtype;
    float *absmax = malloc((size_t)(w->blocks ? w->blocks : 1) * 4);
    void *x = malloc((size_t)n * ql_dtype_size(to));
    if (!absmax || !x) {
        free(absmax);
        free(x);
        QL_FAIL(QL_ENOMEM, "verify: no host memory for %s", w->name ? w->name : "a weight");
    }
    if (w->kind != QL_PLAIN) ql_weight_absmax(w, absmax);
    if (w->kind != QL_PLAIN && v->t->spec.quant.direct) copy.dtype = to;
    ql_weight_read(&copy, absmax, 0, n, x, to);
    free(absmax);
    *out = x;
    return QL_OK;
}

/* The device's reciprocal is an approximation, as bitsandbytes' is: a value that lies on the edge of two codes may get the other one. */
static void count_codes(finding *f, const char *a, const char *b, int64_t bytes)
{
    for (int64_t k = 0; k < bytes; k++) {
        int x = (unsigned char)a[k], y = (unsigned char)b[k];
        if (x == y) continue;
        int high = abs((x >> 4) - (y >> 4)), low = abs((x & 15) - (y & 15));
        f->differ += (high == 1) + (low == 1);
        f->wrong += (high > 1) + (low > 1);
    }
}

static ql_status find_stored(gathered *v, int64_t l, int owner, finding *f)
{
    const ql_blob *b = &v->r->mem->blob[l];
    ql_status st = QL_OK;
    QL_TRY(pull(v, l));
    for (int i = 0; i < QL_LINEARS && st == QL_OK; i++) {
        source s = {0};
        if (owner) st = source_open(v, l, i, &s);
        for (int k = 0; k < QL_VERIFY_PIECES && st == QL_OK; k++) {
            int64_t bytes;
            const char *piece = assemble(v, b, i, k, &bytes);
            if (!bytes) continue;
            f->device = ql_hash64(f->device, piece, (size_t)bytes);
            if (!owner) continue;
            f->file = ql_hash64(f->file, s.data[k], (size_t)bytes);
            if (memcmp(piece, s.data[k], (size_t)bytes) == 0) continue;
            if (k == 0 && b->lin[i].from_plain)
                count_codes(f, piece, s.data[k], bytes);
            else
                f->wrong++;
        }
        if (owner) source_close(v, l, i, &s);
    }
    return st;
}

static ql_status find_values(gathered *v, int64_t l, int owner, finding *f)
{
    ql_status st = QL_OK;
    for (int i = 0; i < QL_LINEARS && st == QL_OK; i++) {
        source s = {0};
        void *want = NULL;
        int64_t bytes;
        QL_TRY(pull_values(v, l, i, &bytes));
        f->device = ql_hash64(f->device, v->piece, (size_t)bytes);
        if (!owner) continue;
        st = source_open(v, l, i, &s);
        if (st == QL_OK) st = source_values(v, &s, &want);
        if (st == QL_OK) {
            f->file = ql_hash64(f->file, want, (size_t)bytes);
            f->wrong += memcmp(want, v->piece, (size_t)bytes) != 0;
        }
        free(want);
        source_close(v, l, i, &s);
    }
    return st;
}

static ql_status take_buffers(gathered *v)
{
    int64_t layer = 0, piece = 1, n = v->t->model->cfg.layers;
    for (int64_t l = 0; l < n; l++) {
        const ql_blob *b = &v->r->mem->blob[l];
        layer = ql_max64(layer, b->parts * b->part_bytes);
        for (int i = 0; i < QL_LINEARS; i++) piece = ql_max64(piece, ql_max64(ql_verify_bytes(&b->lin[i]), b->lin[i].rows * b->lin[i].cols * 4));
    }
    v->host = malloc((size_t)layer);
    v->piece = malloc((size_t)piece);
    v->mine = calloc((size_t)n, sizeof *v->mine);
    v->all = calloc((size_t)(n * v->r->set.world), sizeof *v->all);
    if (!v->host || !v->piece || !v->mine || !v->all)
        QL_FAIL(QL_ENOMEM, "verify: no host memory for a layer of %lld bytes", (long long)layer);
    return QL_OK;
}

/* A layer is right when every device gathered the same bytes and they are the file's. One whose codes were made here may differ
 * from the host's in a few codes by one step: no more than one in ten thousand. */
static int layer_right(const gathered *v, int64_t l, int64_t n, int64_t *differ)
{
    int owner = owner_of(v, l), piped = ql_plan_piped(&v->t->spec.choice);
    const finding *file = &v->all[owner * n + l];
    int64_t weights = 0;
    for (int i = 0; i < QL_LINEARS; i++) weights += v->r->mem->blob[l].lin[i].rows * v->r->mem->blob[l].lin[i].cols;
    *differ = file->differ;
    for (int i = 0; i < v->r->set.world; i++)
        if ((!piped || i == owner) && v->all[i * n + l].device != file->device) return 0;
    return !file->wrong && (file->device == file->file || (file->differ > 0 && file->differ * 10000 <= weights));
}

static void report_layers(gathered *v)
{
    int64_t n = v->t->model->cfg.layers, good = 0, differ = 0, first = -1;
    uint64_t sum = 0;
    int store[QL_STORES] = {0}, k = 0;
    char how[160] = "", note[120] = "";
    for (int64_t l = 0; l < n; l++) {
        const finding *f = &v->all[owner_of(v, l) * n + l];
        int64_t d;
        int ok = layer_right(v, l, n, &d);
        char a[20], b[20];
        snprintf(a, sizeof a, "%016llx", (unsigned long long)f->device);
        snprintf(b, sizeof b, "%016llx", (unsigned long long)f->file);
        json_array_append_new(v->of->layers, json_pack("{s:I,s:s,s:s,s:b}", "layer", (json_int_t)l, "hash", a, "file", b, "ok", ok));
        good += ok, differ += d;
        if (!ok && first < 0) first = l;
        sum = ql_hash64(sum, &f->device, sizeof f->device);
        store[v->t->spec.choice.store[l]]++;
    }
    for (int i = 0; i < QL_STORES; i++)
        if (store[i])
            k += snprintf(how + k, sizeof how - (size_t)k, "%s%d %s", k ? ", " : "", store[i], ql_store_name((ql_store_kind)i));
    if (differ) snprintf(note, sizeof note, "; %lld codes lie on an edge and differ by one step", (long long)differ);
    if (first >= 0) snprintf(note, sizeof note, "; layer %lld is the first that differs", (long long)first);
    ql_verify_check(v->of, "layers as gathered", good == n, "%lld of %lld are the file's bytes on %s (%s)%s; XXH64 of all %016llx",
                    (long long)good, (long long)n, ql_plan_piped(&v->t->spec.choice) ? "their stage" : "every device", how, note, (unsigned long long)sum);
}

static ql_status gather_all(gathered *v)
{
    int64_t n = v->t->model->cfg.layers;
    ql_rank_state *me = &v->w->p->shared->rank[v->r->set.rank];
    QL_TRY(take_buffers(v));
    for (int64_t l = 0; l < n; l++) {
        QL_TRY(ql_exec_stop_point(v->r));
        ql_exec_enter(v->r);
        int owner = owner_of(v, l) == v->r->set.rank, here = owner || !ql_plan_piped(&v->t->spec.choice);
        if (here && v->t->spec.choice.store[l] == QL_STORE_RESIDENT16)
            QL_TRY(find_values(v, l, owner, &v->mine[l]));
        else if (here)
            QL_TRY(find_stored(v, l, owner, &v->mine[l]));
        me->beat++;
        QL_TRY(ql_worker_emit(v->w, "progress", json_pack("{s:s,s:I,s:I}", "what", "hash layers", "done", (json_int_t)(l + 1), "total",
                                                          (json_int_t)n)));
    }
    ql_exec_enter(v->r);
    QL_TRY(ql_verify_share(v->of, v->mine, n * (int64_t)sizeof *v->mine, v->all));
    report_layers(v);
    return QL_OK;
}

ql_status ql_verify_layers(ql_verify *v)
{
    gathered g = {.of = v, .w = v->w, .r = v->r, .t = v->t};
    ql_status st = gather_all(&g);
    free(g.host);
    free(g.piece);
    free(g.mine);
    free(g.all);
    return st;
}
