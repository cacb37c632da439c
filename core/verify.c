#include "core/verify.h"

#include "core/hash.h"
#include "core/lora_job.h"
#include "core/nf4.h"
#include "core/qlora.h"
#include "kernels/half.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PIECES = 3 /* packed or plain values · scales · scales of scales */ };

/* What a rank found out about a layer; exchanged as bytes. */
typedef struct {
    uint64_t device, file; /* hashes; file: of the rank that read it, else 0 */
    int64_t differ;        /* codes that differ by one step (quantised here by the device's reciprocal) */
    int64_t wrong;         /* anything else that differs */
} finding;

typedef struct {
    ql_worker *w;
    ql_rank *r;
    ql_task *t;
    json_t *checks, *layers;
    char *host;            /* a gathered layer */
    char *piece;           /* one of its pieces, put together */
    finding *mine, *all;   /* (L), (world, L) */
} verify;

static const ql_dev_table *dev_of(const verify *v)
{
    return v->r->set.be->dev;
}

static void check(verify *v, const char *name, int ok, const char *fmt, ...) QL_PRINTF(4, 5);
static void check(verify *v, const char *name, int ok, const char *fmt, ...)
{
    char text[600];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    json_array_append_new(v->checks, json_pack("{s:s,s:b,s:s}", "name", name, "ok", ok, "text", text));
}

/* Every rank's `bytes` at `mine` → all ranks' at `all`, through the ops' workspace. */
static ql_status share(verify *v, const void *mine, int64_t bytes, void *all)
{
    ql_rank *r = v->r;
    char *x = r->mem->op_work;
    if (r->set.world == 1) {
        memcpy(all, mine, (size_t)bytes);
        return QL_OK;
    }
    if (bytes * r->set.world > QL_WORK_BYTES) QL_FAIL(QL_ENOSUP, "verify: %lld bytes of findings", (long long)bytes);
    ql_tensor own = ql_vec(x + r->set.rank * bytes, QL_U8, bytes);
    QL_TRY(dev_of(v)->copy(r->compute, own.data, mine, bytes));
    QL_TRY(r->set.be->comm->all_gather(r->comm, r->compute, ql_vec(x, QL_U8, bytes * r->set.world), own));
    QL_TRY(dev_of(v)->copy(r->compute, all, x, bytes * r->set.world));
    return dev_of(v)->sync(r->compute);
}

/* ---- bytes of the base per device ---------------------------------------------------------------- */

static const char *gib(double bytes, char *buf, size_t size)
{
    if (bytes >= (1 << 30))
        snprintf(buf, size, "%.3f GiB", bytes / (1 << 30));
    else
        snprintf(buf, size, "%.3f MiB", bytes / (1 << 20));
    return buf;
}

/* Bytes of a linear as the file (or quantising) makes them: no padding. */
static int64_t linear_bytes(const ql_blob_linear *l)
{
    int64_t n = l->rows * l->cols;
    if (!l->nf4) return n * (int64_t)ql_dtype_size(l->dtype);
    int64_t blocks = ql_ceil_div(n, l->block);
    return (n + 1) / 2 + blocks * (l->nested ? 1 : 4) + (l->nested ? ql_ceil_div(blocks, l->nested) * 4 : 0);
}

/* Who reads layer l's file: in turn, or the stage that has it. */
static int owner_of(const verify *v, int64_t l)
{
    int lo, hi, r = 0;
    if (!ql_plan_piped(&v->t->spec.choice)) return (int)(l % v->r->set.world);
    for (; r < v->r->set.world - 1; r++) {
        ql_plan_stage(&v->t->spec.choice, r, &lo, &hi);
        if (l < hi) break;
    }
    return r;
}

/* What a device has to hold by the stores of its layers, and how much more padding and cuts may add. */
static void base_expected(const verify *v, int rank, int64_t *whole, double *want, double *slack)
{
    const ql_mem *m = v->r->mem;
    int lo, hi;
    ql_plan_stage(&v->t->spec.choice, rank, &lo, &hi);
    *whole = 0, *want = *slack = 0;
    for (int64_t l = 0; l < v->t->model->cfg.layers; l++) {
        const ql_blob *b = &m->blob[l];
        int64_t bytes = 0, wide = 0;
        double spare = 0;
        for (int i = 0; i < QL_LINEARS; i++) {
            const ql_blob_linear *x = &b->lin[i];
            bytes += linear_bytes(x);
            wide += x->rows * x->cols * (int64_t)ql_dtype_size(v->t->spec.dtype);
            /* A part is whole blocks (and groups of scales), or whole rows; its pieces begin at multiples of 256. */
            double unit = x->nf4 ? (double)x->block * (double)(x->nested ? x->nested : 1) : (double)x->cols * 4;
            spare += unit + PIECES * 256 + 256;
        }
        *whole += bytes;
        if (l < lo || l >= hi) continue;
        *slack += spare;
        switch ((ql_store_kind)v->t->spec.choice.store[l]) {
        case QL_STORE_RESIDENT: *want += (double)bytes; break;
        case QL_STORE_SHARDED: *want += (double)bytes / v->r->set.world; break;
        case QL_STORE_HOST: break;
        default: *want += (double)wide; *slack += (double)wide * 0.25 + (1 << 20); break; /* rows carry adapter columns */
        }
    }
}

static ql_status check_base(verify *v)
{
    char text[480] = "", a[32], b[32];
    int64_t whole;
    double want = 0, slack;
    int ok = 1, world = v->r->set.world, n = 0;
    int64_t mine, held[QL_MAX_WORLD];
    QL_TRY(ql_rank_measure(v->r));
    mine = v->w->p->shared->rank[v->r->set.rank].bytes[QL_CAT_BASE];
    QL_TRY(share(v, &mine, (int64_t)sizeof mine, held));
    for (int i = 0; i < world; i++) {
        double has = (double)held[i];
        base_expected(v, i, &whole, &want, &slack);
        ok &= has >= want - 1 && has <= want + slack;
        if (n < 400)
            n += snprintf(text + n, sizeof text - (size_t)n, "%s%s (%.1f %%)", n ? " + " : "", gib(has, a, sizeof a), 100 * has / (double)whole);
    }
    base_expected(v, 0, &whole, &want, &slack);
    check(v, "base bytes", ok, "%s of %s on %d device%s; the stores ask for %.1f %% %s%s", text, gib((double)whole, b, sizeof b), world,
          world > 1 ? "s" : "", 100 * want / (double)whole, ql_plan_piped(&v->t->spec.choice) ? "on the first stage" : "each",
          (double)mine > 1.05 * want ? ", the rest pads parts to whole groups of 16,384 weights" : "");
    return QL_OK;
}

/* ---- layers as they are gathered ----------------------------------------------------------------- */

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
static ql_status pull(verify *v, int64_t l)
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
static const char *assemble(const verify *v, const ql_blob *b, int i, int k, int64_t *bytes)
{
    int64_t at = 0, per = 1;
    *bytes = piece_of(&b->lin[i], k, &at, &per);
    for (int64_t p = 0; p * per < *bytes && p < b->parts; p++)
        memcpy(v->piece + p * per, v->host + p * b->part_bytes + at, (size_t)ql_min64(per, *bytes - p * per));
    return v->piece;
}

/* A RESIDENT16 layer holds values: (N, K) of the compute dtype, without the adapter columns. */
static ql_status pull_values(verify *v, int64_t l, int i, int64_t *bytes)
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
    const void *data[PIECES];
    ql_nf4_host made;
    const ql_weight *w;
} source;

static ql_status source_open(const verify *v, int64_t l, int i, source *s)
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

static void source_close(const verify *v, int64_t l, int i, source *s)
{
    const ql_weight *w = &v->t->model->block[l].w[i];
    ql_nf4_free(&s->made);
    ql_model_done_with(v->t->model, w->data, w->bytes);
}

/* The values of a linear by the host's decoder. Caller frees. */
static ql_status source_values(const verify *v, const source *s, void **out)
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

static ql_status find_stored(verify *v, int64_t l, int owner, finding *f)
{
    const ql_blob *b = &v->r->mem->blob[l];
    ql_status st = QL_OK;
    QL_TRY(pull(v, l));
    for (int i = 0; i < QL_LINEARS && st == QL_OK; i++) {
        source s = {0};
        if (owner) st = source_open(v, l, i, &s);
        for (int k = 0; k < PIECES && st == QL_OK; k++) {
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

static ql_status find_values(verify *v, int64_t l, int owner, finding *f)
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

static ql_status take_buffers(verify *v)
{
    int64_t layer = 0, piece = 1, n = v->t->model->cfg.layers;
    for (int64_t l = 0; l < n; l++) {
        const ql_blob *b = &v->r->mem->blob[l];
        layer = ql_max64(layer, b->parts * b->part_bytes);
        for (int i = 0; i < QL_LINEARS; i++) piece = ql_max64(piece, ql_max64(linear_bytes(&b->lin[i]), b->lin[i].rows * b->lin[i].cols * 4));
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
static int layer_right(const verify *v, int64_t l, int64_t n, int64_t *differ)
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

static void report_layers(verify *v)
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
        json_array_append_new(v->layers, json_pack("{s:I,s:s,s:s,s:b}", "layer", (json_int_t)l, "hash", a, "file", b, "ok", ok));
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
    check(v, "layers as gathered", good == n, "%lld of %lld are the file's bytes on %s (%s)%s; XXH64 of all %016llx",
          (long long)good, (long long)n, ql_plan_piped(&v->t->spec.choice) ? "their stage" : "every device", how, note, (unsigned long long)sum);
}

static ql_status check_layers(verify *v)
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
    QL_TRY(share(v, v->mine, n * (int64_t)sizeof *v->mine, v->all));
    report_layers(v);
    return QL_OK;
}

/* Ranks that hold the same hold the same bits; the hash is that of the whole, whoever holds which part. */
static ql_status check_rest(verify *v)
{
    int world = v->r->set.world, piped = ql_plan_piped(&v->t->spec.choice), ok = 1;
    ql_verify_rest mine, all[QL_MAX_WORLD];
    uint64_t small = 0, sum = 0, piece[QL_PIECES] = {0};
    int64_t wrong = 0, vectors = 0;
    char size[32];
    const char *name = "";
    QL_TRY(ql_verify_rest_of(v->r, &mine));
    ql_exec_enter(v->r);
    QL_TRY(share(v, &mine, (int64_t)sizeof mine, all));
    for (int i = 0; i < world; i++) {
        if (i == 0 || piped) small += all[i].small, vectors += all[i].vectors;
        ok &= piped || all[i].small == small;
        for (int p = 0; p < QL_PIECES; p++) {
            if (!all[i].has[p]) continue;
            ok &= !piece[p] || piece[p] == all[i].piece[p];
            piece[p] = all[i].piece[p];
        }
        if (all[i].wrong && !wrong) name = all[i].name;
        wrong += all[i].wrong;
    }
    sum = ql_hash64(small, piece, sizeof piece);
    check(v, "head and norms", ok && !wrong, "%lld norms and biases and the head, %s on this device, are the file's values%s%s%s; XXH64 of all %016llx. "
          "Embedding rows come from the file itself", (long long)vectors, gib((double)mine.bytes, size, sizeof size), wrong ? ": NOT so, first " : "",
          name, ok || wrong ? "" : ": NOT so, devices differ", (unsigned long long)sum);
    return QL_OK;
}

/* ---- adapters and losses --------------------------------------------------------------------------- */

/* Loss of a step's micro-batches with the adapters as they are. d->step 0: without dropout. */
static ql_status loss_of(verify *v, const ql_step_data *d, float *loss)
{
    ql_choice c = v->t->spec.choice;
    ql_plan p;
    float *nll = malloc((size_t)c.g * sizeof *nll);
    if (!nll) QL_FAIL(QL_ENOMEM, "verify: no memory for losses");
    c.train = 0;
    if (!ql_plan_piped(&c)) c.schedule = QL_LOOP;
    ql_status st = ql_plan_build(&c, v->r->set.rank, d->g, &p);
    if (st == QL_OK) {
        double sum = 0;
        st = ql_rank_forward(v->r, &p, d, nll);
        ql_plan_free(&p);
        /* As ql_rank_step does it, to the bit. */
        for (int i = 0; st == QL_OK && i < d->g; i++) sum += nll[i];
        *loss = (float)(d->items > 0 ? sum / (double)d->items : 0);
    }
    free(nll);
    return st;
}

/* The fixed batch: the first step's data, without dropout; of the evaluation set where there is no other. */
static ql_status fixed_batch(verify *v, ql_step_data *d, int32_t **order)
{
    const ql_dataset *data = v->t->train ? v->t->train : v->t->eval;
    int64_t n = ql_dataset_size(data), b = v->t->train ? v->t->args.batch : v->t->args.eval_batch;
    int32_t *o = malloc((size_t)n * sizeof *o);
    if (!o) QL_FAIL(QL_ENOMEM, "verify: no memory for the order of %lld samples", (long long)n);
    for (int64_t i = 0; i < n; i++) o[i] = (int32_t)i;
    *d = (ql_step_data){.data = data, .order = o, .n = n, .batch = b, .pad_id = v->t->pad_id,
                        .g = (int)ql_min64(v->t->spec.choice.g, ql_ceil_div(n, b))};
    d->items = ql_step_items(d);
    *order = o;
    return QL_OK;
}

/* The folder that holds the run's adapter: its own, or the last checkpoint's. 0: there is none. */
static int adapter_folder(const json_t *report, const char *run, char out[QL_PATH_MAX])
{
    char file[QL_PATH_MAX];
    const json_t *all = json_object_get(report, "checkpoints");
    const char *last = json_string_value(json_object_get(json_array_get(all, json_array_size(all) - 1), "path"));
    if (ql_path_join(file, run, "adapter_model.safetensors") == QL_OK && ql_path_is_file(file))
        return snprintf(out, QL_PATH_MAX, "%s", run) < QL_PATH_MAX;
    ql_error_clear();
    return last && snprintf(out, QL_PATH_MAX, "%s", last) < QL_PATH_MAX;
}

/* All ranks' numbers: the first, and whether they agree. */
static ql_status agree(verify *v, uint64_t x, int *same)
{
    uint64_t all[QL_MAX_WORLD];
    QL_TRY(share(v, &x, (int64_t)sizeof x, all));
    *same = 1;
    for (int i = 0; i < v->r->set.world; i++) *same &= all[i] == x;
    return QL_OK;
}

static int64_t empty_tensors(const ql_lora *l, const float *flat)
{
    int64_t empty = 0;
    for (int64_t i = 0; i < l->count; i++) {
        const ql_lora_target *t = &l->target[i];
        int64_t k = 0;
        while (k < t->n * t->r && flat[t->b + k] == 0) k++;
        empty += k == t->n * t->r;
    }
    return empty;
}

/* The file's values are the devices' bits, on every device, and give the same loss. */
static ql_status check_held(verify *v, const float *file, float *held, const ql_step_data *d, float reloaded)
{
    const ql_lora *l = v->t->lora;
    float loss = 0;
    int64_t differ = 0;
    int same, ranks;
    /* A file of fewer bits holds rounded values: those are what it can be compared with. */
    for (int64_t i = 0; i < l->elements; i++) held[i] = ql_float_round(held[i], v->t->args.save_dtype);
    for (int64_t i = 0; i < l->elements; i++) differ += ql_f32_bits(held[i]) != ql_f32_bits(file[i]);
    QL_TRY(agree(v, ql_hash64(0, held, (size_t)l->elements * 4), &ranks));
    QL_TRY(ql_rank_set_adapters(v->r, held));
    QL_TRY(loss_of(v, d, &loss));
    same = ql_f32_bits(loss) == ql_f32_bits(reloaded);
    check(v, "adapter reloaded", same && !differ && ranks,
          "%lld of %lld values of the file are the bits on %s; loss on a fixed batch %.6f (%08x) from the devices, %.6f (%08x) from the file",
          (long long)(l->elements - differ), (long long)l->elements, ranks ? (v->r->set.world > 1 ? "all devices" : "the device") : "one device, and the devices differ",
          (double)loss, ql_f32_bits(loss), (double)reloaded, ql_f32_bits(reloaded));
    return QL_OK;
}

static ql_status check_adapter(verify *v, const char *folder, const char *run, const ql_step_data *d)
{
    const ql_lora *l = v->t->lora;
    size_t bytes = (size_t)l->elements * 4;
    float *file = calloc(1, bytes), *held = calloc(1, bytes), with = 0, without = 0;
    ql_status st = QL_OK;
    if (!file || !held) QL_GO(ql_fail(QL_ENOMEM, "verify: no host memory for the adapters"));
    QL_GO(ql_rank_get_adapters(v->r, held));
    QL_GO(ql_lora_read(l, folder, file));
    int64_t empty = empty_tensors(l, file);
    QL_GO(ql_rank_set_adapters(v->r, file));
    QL_GO(loss_of(v, d, &with));
    if (strcmp(v->w->holds, run) == 0) {
        float *copy = malloc(bytes);
        if (!copy) QL_GO(ql_fail(QL_ENOMEM, "verify: no host memory for the adapters"));
        memcpy(copy, held, bytes);
        st = check_held(v, file, copy, d, with);
        free(copy);
        QL_GO(st);
    }
    float *zero = calloc(1, bytes);
    if (!zero) QL_GO(ql_fail(QL_ENOMEM, "verify: no host memory for the adapters"));
    st = ql_rank_set_adapters(v->r, zero);
    free(zero);
    QL_GO(st);
    QL_GO(loss_of(v, d, &without));
    check(v, "adapter file", empty == 0 && isfinite(with) && ql_f32_bits(with) != ql_f32_bits(without),
          "%lld pairs of tensors, %lld of them untrained; loss on a fixed batch %.6f (%08x) with it, %.6f without", (long long)l->count,
          (long long)empty, (double)with, ql_f32_bits(with), (double)without);
    QL_GO(ql_rank_set_adapters(v->r, strcmp(v->w->holds, run) == 0 ? held : file));
out:
    free(file);
    free(held);
    return st;
}

/* The run's first loss, done again: the adapters it began with, the same samples, the same dropout. */
static ql_status check_first(verify *v, const json_t *report)
{
    const ql_task *t = v->t;
    const json_t *start = json_object_get(report, "start"), *first = NULL, *e;
    size_t i, bytes = (size_t)t->lora->elements * 4;
    json_array_foreach((json_t *)(uintptr_t)json_object_get(report, "log_history"), i, e)
        if (json_integer_value(json_object_get(e, "step")) == 1 && json_object_get(e, "loss_bits")) first = e;
    const char *bits = json_string_value(json_object_get(first, "loss_bits"));
    if (!t->train || !bits || json_integer_value(json_object_get(start, "samples_per_step")) != t->args.batch * t->steps.group) return QL_OK;
    float *held = calloc(1, bytes), *fresh = calloc(1, bytes), loss = 0;
    ql_step_data d;
    char now[16];
    ql_status st = QL_OK;
    if (!held || !fresh) QL_GO(ql_fail(QL_ENOMEM, "verify: no host memory for the adapters"));
    QL_GO(ql_rank_get_adapters(v->r, held));
    QL_GO(ql_lora_first(t->lora, t->job, fresh));
    QL_GO(ql_rank_set_adapters(v->r, fresh));
    QL_GO(ql_train_data(v->w, 0, &d));
    QL_GO(loss_of(v, &d, &loss));
    QL_GO(ql_rank_set_adapters(v->r, held));
    snprintf(now, sizeof now, "%08x", ql_f32_bits(loss));
    check(v, "first loss again", strcmp(now, bits) == 0, "step 1 done again: %.6f (%s) now on %d device%s, %s in the run's record of %lld",
          (double)loss, now, v->r->set.world, v->r->set.world > 1 ? "s" : "", bits, (long long)json_integer_value(json_object_get(start, "world")));
out:
    free(held);
    free(fresh);
    return st;
}

/* The record of losses: every step once, each a number. */
static void check_history(verify *v, const json_t *report)
{
    const json_t *e, *history = json_object_get(report, "log_history");
    double first = (double)NAN, last = (double)NAN;
    int64_t n = 0, holes = 0, at = 0, bad = 0;
    size_t i;
    json_array_foreach((json_t *)(uintptr_t)history, i, e)
    {
        const json_t *loss = json_object_get(e, "loss");
        int64_t step = json_integer_value(json_object_get(e, "step"));
        if (!loss) continue;
        bad += !json_is_number(loss) && !json_is_true(json_object_get(e, "skipped"));
        holes += step != at + 1 && json_object_get(e, "loss_bits");
        at = step;
        if (json_is_number(loss)) last = json_number_value(loss);
        if (n++ == 0) first = last;
    }
    if (n == 0) return;
    check(v, "losses", bad == 0 && holes == 0, "%lld records up to step %lld, %.4f to %.4f; %lld not a number, %lld out of order", (long long)n,
          (long long)at, first, last, (long long)bad, (long long)holes);
}

static ql_status check_run(verify *v, const char *run)
{
    char folder[QL_PATH_MAX];
    json_t *report = NULL;
    int32_t *order = NULL;
    ql_step_data d;
    ql_status st = QL_OK;
    if (!run) return QL_OK;
    QL_TRY(ql_run_report(run, &report));
    if ((v->t->train || v->t->eval) && adapter_folder(report, run, folder)) {
        QL_GO(fixed_batch(v, &d, &order));
        QL_GO(check_adapter(v, folder, run, &d));
        QL_GO(check_first(v, report));
    }
    check_history(v, report);
out:
    free(order);
    json_decref(report);
    return st;
}

ql_status ql_verify_run(ql_worker *w, const json_t *command, json_t **out)
{
    verify v = {.w = w, .r = w->rank, .t = w->task, .checks = json_array(), .layers = json_array()};
    ql_status st = QL_OK;
    w->p->shared->rank[w->p->rank].at_stop = 0;
    QL_GO(ql_worker_say(w, "verifying", ""));
    QL_GO(check_base(&v));
    QL_GO(check_layers(&v));
    QL_GO(check_rest(&v));
    QL_GO(check_run(&v, json_string_value(json_object_get(command, "run"))));
    *out = json_pack("{s:O,s:O}", "checks", v.checks, "layers", v.layers);
    if (!*out) st = ql_fail(QL_ENOMEM, "no memory for the result");
out:
    json_decref(v.checks);
    json_decref(v.layers);
    free(v.host);
    free(v.piece);
    free(v.mine);
    free(v.all);
    return st;
}
