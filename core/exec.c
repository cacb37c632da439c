/* Runs plans: one switch over actions. The host issues work and runs ahead of the device by two actions of a layer at most, so that
 * a stop takes effect soon. */
#include "core/rank.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const ql_dev_table *dev_of(const ql_rank *r)
{
    return r->set.be->dev;
}

/* The host waits for an event, in naps: the device is busy for milliseconds, and two cores may serve four ranks. */
static ql_status await(const ql_rank *r, ql_event *e)
{
    for (int done = 0;;) {
        QL_TRY(dev_of(r)->done(e, &done));
        if (done) return QL_OK;
        usleep(20);
    }
}

/* ---- micro-batches ---------------------------------------------------------------------------- */

static void stage_rows(const ql_rank *r, char *to, const ql_batch *b)
{
    const ql_param *e = &r->spec->model->embed;
    size_t row = (size_t)e->cols * ql_dtype_size(e->dtype);
    for (int64_t t = 0; t < b->T; t++) {
        int64_t id = b->ids[t] >= 0 && b->ids[t] < e->rows ? b->ids[t] : 0;
        memcpy(to + (size_t)t * row, (const char *)e->data + (size_t)id * row, row);
    }
}

/* Rows that have a target, and those targets, padded with −1 and −100 and rounded up, never none. */
static int64_t stage_targets(const ql_batch *b, int64_t round, int32_t *index, int32_t *target)
{
    int64_t n = 0;
    for (int64_t t = 0; t < b->T; t++) {
        if (b->target[t] == -100) continue;
        index[n] = (int32_t)t;
        target[n++] = b->target[t];
    }
    int64_t end = ql_max64(round, ql_round_up(n, round));
    for (int64_t i = n; i < end; i++) index[i] = -1, target[i] = -100;
    return end;
}

static ql_status batch_fits(const ql_rank *r, const ql_batch *b)
{
    const ql_spec *s = r->spec;
    if (b->T > s->rows || (b->T % s->round && b->T != QL_FEW_ROWS))
        QL_FAIL(QL_EINTERNAL, "a micro-batch of %lld tokens; memory was taken for %lld", (long long)b->T, (long long)s->rows);
    if (b->docs > s->docs)
        QL_FAIL(QL_EINTERNAL, "a micro-batch of %lld documents; memory was taken for %lld", (long long)b->docs, (long long)s->docs);
    /* The file may be another than was prepared: nothing behind the embedding may be read. */
    int64_t vocab = s->model->cfg.vocab;
    for (int64_t t = 0; t < b->T; t++)
        if (b->ids[t] < 0 || b->ids[t] >= vocab)
            QL_FAIL(QL_EINVAL, "token id %d in the data; the model's vocabulary ends at %lld: is this its own tokenizer?",
                    (int)b->ids[t], (long long)vocab - 1);
    return QL_OK;
}

ql_status ql_exec_batch(ql_rank *r, int flight, const ql_batch *b, int train, uint32_t step)
{
    const ql_dev_table *dev = dev_of(r);
    ql_stage *st = &r->mem->stage[flight];
    ql_micro *mb = &r->micro[flight];
    const ql_param *e = &r->spec->model->embed;
    QL_TRY(batch_fits(r, b));
    /* The block was last read by the copies of the batch before: wait for them before writing over it. */
    QL_TRY(await(r, r->staged));
    int64_t n = stage_targets(b, r->spec->round, (int32_t *)(void *)(st->host + st->at_index), (int32_t *)(void *)(st->host + st->at_target));
    memcpy(st->host + st->at_token, b->token, (size_t)b->T * 8);
    memcpy(st->host + st->at_pos, b->position, (size_t)b->T * 4);
    memcpy(st->host + st->at_start, b->doc_start, (size_t)b->docs * 4);
    memcpy(st->host + st->at_len, b->doc_len, (size_t)b->docs * 4);
    if (ql_mem_has_embedding(r->mem)) stage_rows(r, st->host + st->at_rows, b);
    QL_TRY(dev->copy(r->compute, st->dev, st->host, st->bytes));
    memset(mb, 0, sizeof *mb);
    mb->rows = b->T;
    mb->padded = b->tokens < b->T;
    mb->pos = ql_vec(st->dev + st->at_pos, QL_I32, b->T);
    mb->token = (const int64_t *)(const void *)(st->dev + st->at_token);
    mb->docs = b->docs;
    mb->longest = b->doc_max;
    mb->start = (const int32_t *)(const void *)(st->dev + st->at_start);
    mb->len = (const int32_t *)(const void *)(st->dev + st->at_len);
    mb->index = ql_vec(st->dev + st->at_index, QL_I32, n);
    mb->target = ql_vec(st->dev + st->at_target, QL_I32, n);
    mb->targets = b->targets;
    mb->train = train;
    mb->step = step;
    /* Embedding rows as the file has them, through a buffer that no layer uses yet, into the residual stream's dtype: at once, unless
     * they are wider than that buffer's. */
    if (!ql_mem_has_embedding(r->mem)) return dev->record(r->compute, r->staged);
    const ql_tensor *a = &r->mem->work.a;
    int64_t row = e->cols * (int64_t)ql_dtype_size(e->dtype), most = ql_max64(1, a->rows * a->ld * (int64_t)ql_dtype_size(a->dtype) / row);
    for (int64_t at = 0; at < b->T; at += most) {
        ql_tensor h = ql_rows(ql_mem_h(r->mem, flight, 0), at, ql_min64(most, b->T - at)), raw = ql_mat(a->data, e->dtype, h.rows, e->cols, e->cols);
        QL_TRY(dev->copy(r->compute, raw.data, st->host + st->at_rows + at * row, h.rows * row));
        QL_TRY(ql_convert(&r->q, h, raw));
    }
    return dev->record(r->compute, r->staged);
}

static ql_status do_batch(ql_rank *r, const ql_action *a, const ql_step_data *d, int flight)
{
    int64_t at = (d->first + a->mb) * d->batch, n = ql_min64(d->batch, d->n - at);
    int64_t first_row = (int64_t)a->mb * d->batch;
    QL_TRY(ql_batch_fill(&r->batch, d->data, d->order + at, n, first_row, d->pad_id, r->spec->round));
    return ql_exec_batch(r, flight, &r->batch, r->spec->choice.train && d->step > 0, d->step);
}

/* ---- layers ----------------------------------------------------------------------------------- */

/* few: the products to come are of QL_FEW_ROWS rows; where they can, they read the bytes as they rest, and *packed is set. */
static ql_status place_base(ql_rank *r, int64_t layer, int slot, int few, ql_scratch **out, const ql_nf4 **packed)
{
    const ql_choice *c = &r->spec->choice;
    ql_mem *m = r->mem;
    void *parts[QL_MAX_PARTS];
    *out = c->store[layer] == QL_STORE_RESIDENT16 ? &m->own[layer] : &m->scratch;
    *packed = NULL;
    few = few && c->store[layer] != QL_STORE_RESIDENT16;
    if ((*out)->layer == layer && !few) return QL_OK;
    if (c->store[layer] == QL_STORE_RESIDENT) {
        parts[0] = m->base[layer];
    } else {
        if (slot < 0) QL_FAIL(QL_EINTERNAL, "layer %lld is used without its gather", (long long)layer);
        QL_TRY(dev_of(r)->wait(r->compute, r->slot_full[slot]));
        for (int p = 0; p < m->blob[layer].parts; p++) parts[p] = (char *)m->slot[slot] + p * m->blob[layer].part_bytes;
    }
    if (few && ql_store_views(&m->shape, &m->blob[layer], &m->tables[layer], parts, &r->spec->quant, r->packed)) {
        *packed = r->packed;   /* whatever the scratch holds: bits do not depend on what ran before */
        (*out)->version = -1;  /* its adapters become this layer's, its base may be another's */
        return QL_OK;
    }
    return ql_store_dequant(&m->shape, &r->q, &m->blob[layer], &m->tables[layer], parts, &r->spec->quant, *out, layer);
}

ql_status ql_exec_layer(ql_rank *r, ql_micro *mb, int64_t layer, int slot, ql_layer *out)
{
    ql_mem *m = r->mem;
    ql_scratch *w = NULL;
    const ql_nf4 *packed;
    QL_TRY(place_base(r, layer, slot, mb->rows <= QL_FEW_ROWS, &w, &packed));
    if (w->version != r->version) {
        QL_TRY(ql_scratch_adapters(&m->shape, &r->q, w, layer, m->adapters));
        w->version = packed ? -1 : r->version;
    }
    *out = (ql_layer){.packed = packed,
                      .shape = &m->shape, .q = &r->q, .mb = mb, .layer = layer, .small = &m->small[layer], .w = w,
                      .work = &m->work, .freq = m->freq, .cache_k = QL_NONE, .cache_v = QL_NONE};
    return QL_OK;
}

/* The activations of (flight, layer): kept ones, the shared ones for what is not kept, or the layer's own where it is recomputed ahead. */
static ql_act act_of(const ql_rank *r, int flight, int64_t layer)
{
    ql_mem *m = r->mem;
    const ql_act *lacks = ql_tensor_set(m->ahead[layer].gu) ? &m->ahead[layer] : &m->shared;
    ql_act a = *lacks;
    ql_keep keep = r->spec->choice.train && layer >= m->shape.first ? (ql_keep)r->spec->choice.keep[layer] : QL_KEEP_INPUT;
    if (keep != QL_KEEP_INPUT) {
        a = *ql_mem_act(m, flight, layer);
        if (keep == QL_KEEP_NO_MLP) a.gu = lacks->gu;
    }
    a.h = ql_mem_h(m, flight, layer);
    return a;
}

static ql_work work_of(const ql_rank *r, int flight, int mb)
{
    ql_work w = r->mem->work;
    int same = w.dy.data == w.dh.data;
    w.dh = ql_mem_dh(r->mem, flight, mb);
    if (same) w.dy = w.dh;
    return w;
}

static int saves(const ql_rank *r, int64_t layer)
{
    return layer >= 0 && r->spec->choice.train && layer >= r->mem->shape.first && r->spec->choice.save[layer];
}

static ql_status do_forward(ql_rank *r, const ql_action *a, int flight)
{
    ql_layer l;
    QL_TRY(ql_exec_layer(r, &r->micro[flight], a->layer, a->slot, &l));
    ql_act act = act_of(r, flight, a->layer);
    /* The output may go where an input rests that is on its way to the host. */
    if (saves(r, a->layer - 1)) QL_TRY(dev_of(r)->wait(r->compute, r->saved[(a->layer - 1) & 1]));
    return ql_layer_forward(&l, &act, ql_mem_h(r->mem, flight, a->layer + 1));
}

/* h[layer] between device and host, on the side stream. */
static ql_status do_move(ql_rank *r, const ql_action *a, int flight)
{
    const ql_dev_table *dev = dev_of(r);
    ql_tensor h = ql_rows(ql_mem_h(r->mem, flight, a->layer), 0, r->micro[flight].rows);
    int64_t per = r->spec->rows * h.ld * (int64_t)ql_dtype_size(h.dtype), at = 0, all = 0;
    for (int64_t l = r->mem->lo; l < r->mem->hi; l++) {
        if (l == a->layer) at = all;
        all += r->spec->choice.save[l] ? per : 0;
    }
    char *host = r->host_h + flight * all + at;
    int64_t bytes = h.rows * h.ld * (int64_t)ql_dtype_size(h.dtype);
    QL_TRY(dev->record(r->compute, r->ready));
    QL_TRY(dev->wait(r->side, r->ready));
    if (a->what == QL_DO_SAVE) {
        QL_TRY(dev->copy(r->side, host, h.data, bytes));
        return dev->record(r->side, r->saved[a->layer & 1]);
    }
    QL_TRY(dev->copy(r->side, h.data, host, bytes));
    return dev->record(r->side, r->loaded[a->layer & 1]);
}

/* A layer input that rested on the host must have arrived. */
static ql_status input_here(ql_rank *r, int64_t layer)
{
    return saves(r, layer) ? dev_of(r)->wait(r->compute, r->loaded[layer & 1]) : QL_OK;
}

static ql_status do_recompute(ql_rank *r, const ql_action *a, int flight)
{
    ql_layer l;
    QL_TRY(ql_exec_layer(r, &r->micro[flight], a->layer, a->slot, &l));
    QL_TRY(input_here(r, a->layer));
    ql_act act = act_of(r, flight, a->layer);
    return ql_layer_recompute(&l, &act, (ql_keep)r->spec->choice.keep[a->layer]);
}

static ql_status do_backward(ql_rank *r, const ql_action *a, int flight)
{
    ql_layer l;
    ql_work w = work_of(r, flight, a->mb);
    QL_TRY(ql_exec_layer(r, &r->micro[flight], a->layer, a->slot, &l));
    l.work = &w;
    QL_TRY(input_here(r, a->layer));
    ql_act act = act_of(r, flight, a->layer);
    return ql_layer_backward(&l, &act, r->mem->grad[r->stack - 1]);
}

ql_status ql_exec_gather(ql_rank *r, int64_t layer, int slot)
{
    const ql_dev_table *dev = dev_of(r);
    ql_mem *m = r->mem;
    const ql_blob *b = &m->blob[layer];
    QL_TRY(dev->wait(r->side, r->slot_free[slot]));
    if (r->spec->choice.store[layer] == QL_STORE_HOST) {
        QL_TRY(dev->copy(r->side, m->slot[slot], r->set.host_base + ql_mem_host_at(m, layer), b->part_bytes));
    } else if (r->set.world > 1) {
        /* Packed bytes as bytes: 4 bits a weight on the wire. */
        QL_TRY(r->set.be->comm->all_gather(r->comm, r->side, ql_vec(m->slot[slot], QL_U8, b->parts * b->part_bytes),
                                           ql_vec(m->base[layer], QL_U8, b->part_bytes)));
    } else {
        QL_TRY(dev->copy(r->side, m->slot[slot], m->base[layer], b->part_bytes));
    }
    return dev->record(r->side, r->slot_full[slot]);
}

/* Rows with a target of the micro-batches that the ranks bring to the k-th loss of this plan. */
static void rows_of_all(const ql_rank *r, const ql_plan *p, const ql_step_data *d, int k, ql_head_peers *out)
{
    const ql_choice *c = &r->spec->choice;
    *out = (ql_head_peers){.be = r->set.be, .comm = r->comm};
    for (int i = 0; i < c->world && i < QL_PIECES; i++) {
        int mb = ql_plan_first(c, i) + k;
        int64_t t, targets, at = (d->first + mb) * d->batch;
        if (mb >= ql_min64(ql_plan_end(c, i), p->g)) continue;
        ql_batch_measure(d->data, d->order + at, ql_min64(d->batch, d->n - at), r->spec->round, &t, &targets);
        out->rows[i] = ql_max64(r->spec->round, ql_round_up(targets, r->spec->round));
    }
}

static ql_status do_head(ql_rank *r, const ql_action *a, const ql_plan *p, const ql_step_data *d, int flight)
{
    ql_mem *m = r->mem;
    ql_micro *mb = a->mb < 0 ? NULL : &r->micro[flight];
    ql_head_want want = r->spec->choice.train && d->step > 0 ? QL_HEAD_GRAD : QL_HEAD_LOSS;
    ql_tensor h = mb ? ql_rows(ql_mem_h(m, flight, r->spec->choice.layers), 0, mb->rows) : QL_NONE;
    ql_tensor dh = mb && want == QL_HEAD_GRAD ? ql_rows(ql_mem_dh(m, flight, a->mb), 0, mb->rows) : QL_NONE;
    ql_tensor loss = mb ? ql_vec(m->losses + a->mb, QL_F32, 1) : QL_NONE;
    ql_head_peers peers;
    if (m->head.world == 1) return ql_head_loss(&m->head, &m->shape, &r->q, NULL, want, mb, h, dh, loss, m->ctl);
    rows_of_all(r, p, d, r->heads++, &peers);
    return ql_head_loss(&m->head, &m->shape, &r->q, &peers, want, mb, h, dh, loss, m->ctl);
}

/* ---- between stages --------------------------------------------------------------------------- */

/* h of the boundary; or the gradient, with the room for adapter columns behind its rows: one run of memory. What is asked for before its
 * batch is here has the rows that the data give it. */
static ql_tensor message(const ql_rank *r, const ql_action *a, const ql_step_data *d)
{
    int h = a->what == QL_DO_SEND_H || a->what == QL_DO_RECV_H, flight = a->mb % r->mem->flights;
    int64_t at = (d->first + a->mb) * d->batch, rows, targets;
    ql_tensor t = h ? ql_mem_h(r->mem, flight, a->layer) : ql_mem_dh(r->mem, flight, a->mb);
    ql_batch_measure(d->data, d->order + at, ql_min64(d->batch, d->n - at), r->spec->round, &rows, &targets);
    return ql_vec(t.data, t.dtype, rows * t.ld);
}

static int group_end(const ql_plan *p, int i)
{
    while (i < p->count && ql_plan_link(&p->a[i])) i++;
    return i;
}

/* The group that begins with action i, on a stream of its own: behind what has been computed, beside what comes. */
static ql_status do_links(ql_rank *r, const ql_plan *p, int i, const ql_step_data *d)
{
    const ql_dev_table *dev = dev_of(r);
    const ql_comm_table *comm = r->set.be->comm;
    int end = group_end(p, i);
    QL_TRY(dev->record(r->compute, r->ready));
    QL_TRY(dev->wait(r->link, r->ready));
    QL_TRY(comm->group_begin(r->comm));
    for (; i < end; i++) {
        const ql_action *a = &p->a[i];
        int up = a->what == QL_DO_SEND_H || a->what == QL_DO_RECV_DH, send = a->what == QL_DO_SEND_H || a->what == QL_DO_SEND_DH;
        int peer = r->set.rank + (up ? 1 : -1);
        ql_tensor x = message(r, a, d);
        QL_TRY(send ? comm->send(r->comm, r->link, x, peer) : comm->recv(r->comm, r->link, x, peer));
    }
    QL_TRY(comm->group_end(r->comm));
    return dev->record(r->link, r->landed);
}

static ql_status do_land(ql_rank *r)
{
    QL_TRY(r->set.be->comm->land(r->comm, NULL));
    return dev_of(r)->wait(r->compute, r->landed);
}

/* ---- before the first step -------------------------------------------------------------------- */

/* A document of token 0 and a token of padding, as long as a micro-batch may be; as many targets as the head takes at a time. */
static ql_status longest_batch(ql_rank *r)
{
    int64_t n = r->spec->rows, targets = ql_min64(n, r->spec->head_chunk);
    int64_t *token = calloc(1, (size_t)n * 20 + 8);
    int32_t *ids = (int32_t *)(void *)(token + n), start = 0, len = (int32_t)n - 1;
    if (!token) QL_FAIL(QL_ENOMEM, "no memory for a micro-batch of %lld tokens", (long long)n);
    ql_batch b = {.T = n, .rows = 1, .docs = 1, .targets = targets, .tokens = n - 1, .doc_max = n - 1, .token = token,
                  .ids = ids, .target = ids + n, .position = ids + 2 * n, .doc_start = &start, .doc_len = &len};
    for (int64_t t = 0; t < n; t++) token[t] = t, b.position[t] = (int32_t)t, b.target[t] = t < targets ? 0 : -100;
    ql_status st = ql_exec_batch(r, 0, &b, r->spec->choice.train, 1);
    free(token);
    return st;
}

static ql_status clear(ql_rank *r, ql_tensor t)
{
    return dev_of(r)->set(r->compute, t.data, 0, t.rows * t.ld * (int64_t)ql_dtype_size(t.dtype));
}

/* A GPU gets kernels, and cuBLAS its plan for a shape, when they are first called for, some milliseconds each. So a layer, the head and
 * the optimizer run once on the longest of micro-batches, all ranks together, and no step waits for that. What they work on are zeros
 * where nothing lies yet; what they leave is written anew before anybody reads it. */
ql_status ql_exec_warm(ql_rank *r)
{
    const ql_dev_table *dev = dev_of(r);
    ql_mem *m = r->mem;
    int train = r->spec->choice.train, layers = r->spec->choice.layers;
    int64_t layer = ql_max64(m->lo, train ? m->shape.first : 0);
    ql_action a = {.what = QL_DO_F, .layer = (int16_t)layer, .slot = 0};
    ql_tensor h = ql_mem_h(m, 0, layers), dh = train ? ql_mem_dh(m, 0, 0) : QL_NONE;
    if (!dev->lazy) return QL_OK;
    QL_TRY(dev->set(r->compute, m->ctl, 0, (int64_t)sizeof *m->ctl));
    QL_TRY(dev->set(r->compute, m->adapters, 0, m->held * 4));
    if (layer < m->hi) {
        QL_TRY(clear(r, ql_mem_h(m, 0, layer)));
        if (m->slot[0]) QL_TRY(dev->set(r->compute, m->slot[0], 0, m->blob[layer].parts * m->blob[layer].part_bytes));
    }
    QL_TRY(longest_batch(r));
    ql_micro *mb = &r->micro[0];
    if (layer < m->hi) QL_TRY(do_forward(r, &a, 0));
    if (ql_mem_has_head(m) || m->head.world > 1) {
        ql_head_peers peers = {.be = r->set.be, .comm = r->comm};
        for (int i = 0; i < r->set.world; i++) peers.rows[i] = mb->index.cols;
        QL_TRY(clear(r, h));
        QL_TRY(ql_head_loss(&m->head, &m->shape, &r->q, m->head.world > 1 ? &peers : NULL, train ? QL_HEAD_GRAD : QL_HEAD_LOSS, mb,
                            ql_rows(h, 0, mb->rows), train ? ql_rows(dh, 0, mb->rows) : dh, ql_vec(m->losses, QL_F32, 1), m->ctl));
    } else if (train) {
        QL_TRY(clear(r, dh));
    }
    if (train) {
        QL_TRY(dev->set(r->compute, m->grad[0], 0, m->held * 4));
        r->stack = 1, a.what = QL_DO_B;
        if (layer < m->hi) QL_TRY(do_backward(r, &a, 0));
        QL_TRY(ql_optim_warm(r));
    }
    r->stack = 0, r->version++;
    m->scratch.layer = m->scratch.version = -1; /* what it has may be of zeros */
    return dev->sync(r->compute);
}

/* ---- the step --------------------------------------------------------------------------------- */

static ql_status do_sum(ql_rank *r, const ql_action *a, int g)
{
    ql_mem *m = r->mem;
    uint8_t present[QL_MAX_WORLD];
    switch ((ql_do)a->what) {
    case QL_DO_PIECE: return dev_of(r)->set(r->compute, m->grad[r->stack++], 0, m->held * 4);
    case QL_DO_JOIN: {
        ql_tensor to = ql_vec(m->grad[r->stack - 2], QL_F32, m->held);
        r->stack--;
        return m->held ? ql_add(&r->q, to, to, ql_vec(m->grad[r->stack], QL_F32, m->held)) : QL_OK;
    }
    case QL_DO_REDUCE:
        for (int i = 0; i < r->set.world; i++) present[i] = ql_plan_first(&r->spec->choice, i) < g;
        return ql_optim_reduce(r, present);
    default:
        r->version++; /* the adapters in every scratch are old from here on */
        return ql_optim_step(r);
    }
}

static ql_status run_action(ql_rank *r, const ql_action *a, const ql_plan *p, const ql_step_data *d, int flight)
{
    switch ((ql_do)a->what) {
    case QL_DO_GATHER: return ql_exec_gather(r, a->layer, a->slot);
    case QL_DO_RELEASE: return dev_of(r)->record(r->compute, r->slot_free[a->slot]);
    case QL_DO_BATCH: return do_batch(r, a, d, flight);
    case QL_DO_F: return do_forward(r, a, flight);
    case QL_DO_HEAD: return do_head(r, a, p, d, flight);
    case QL_DO_R: return do_recompute(r, a, flight);
    case QL_DO_B: return do_backward(r, a, flight);
    case QL_DO_SAVE:
    case QL_DO_LOAD: return do_move(r, a, flight);
    case QL_DO_SEND_H:
    case QL_DO_RECV_H:
    case QL_DO_SEND_DH:
    case QL_DO_RECV_DH: return do_links(r, p, (int)(a - p->a), d);
    case QL_DO_LAND: return do_land(r);
    default: return do_sum(r, a, p->g);
    }
}

/* A stop is seen between actions, by each rank at another moment; one that left at once could leave its peers in a collective for ever.
 * So each rank counts the collectives that it has entered, where all can see it. A rank that wants to stop goes on as long as another has
 * entered more, and leaves when all stand at the same number and want to: a rank counts before it may wait, so whoever is waiting is
 * ahead of those it waits for, and they come.
 * Between the stages of a pipeline it is the same for each kind of message: a stage goes on as long as a neighbour has begun more of
 * theirs. What a stage must do for that may put it ahead of another neighbour, which then follows; all stand still when every message
 * that one side has begun, the other has too. */
void ql_exec_enter(ql_rank *r)
{
    ql_rank_state *me = &r->set.shared->rank[r->set.rank];
    __atomic_store_n(&me->entered, me->entered + 1, __ATOMIC_SEQ_CST);
}

/* Before the group of actions [i, end). */
static void enter_links(ql_rank *r, const ql_plan *p, int i, int end)
{
    ql_rank_state *me = &r->set.shared->rank[r->set.rank];
    for (; i < end; i++) {
        int64_t *n = &me->messages[p->a[i].what - QL_DO_SEND_H];
        __atomic_store_n(n, *n + 1, __ATOMIC_SEQ_CST);
    }
}

/* Messages that rank a has begun beyond those of rank a + 1: above 0 in one direction, below in the other; both 0 when they stand alike. */
static void links_between(const ql_shared *sh, int a, int64_t ahead[2])
{
    const int64_t *x = sh->rank[a].messages, *y = sh->rank[a + 1].messages;
    enum { SEND_H, RECV_H, SEND_DH, RECV_DH };
    ahead[0] = __atomic_load_n(&x[SEND_H], __ATOMIC_SEQ_CST) - __atomic_load_n(&y[RECV_H], __ATOMIC_SEQ_CST);
    ahead[1] = __atomic_load_n(&x[RECV_DH], __ATOMIC_SEQ_CST) - __atomic_load_n(&y[SEND_DH], __ATOMIC_SEQ_CST);
}

/* Must this rank go on for a neighbour's sake? *alike: no message of any rank waits for its other side. */
static int links_wanted(const ql_rank *r, int *alike)
{
    int wanted = 0;
    *alike = 1;
    for (int a = 0; a + 1 < r->set.world; a++) {
        int64_t ahead[2];
        links_between(r->set.shared, a, ahead);
        *alike &= ahead[0] == 0 && ahead[1] == 0;
        if (a + 1 == r->set.rank) wanted |= ahead[0] > 0 || ahead[1] > 0;
        if (a == r->set.rank) wanted |= ahead[0] < 0 || ahead[1] < 0;
    }
    return wanted;
}

ql_status ql_exec_stop_point(ql_rank *r)
{
    ql_shared *sh = r->set.shared;
    ql_rank_state *me = &sh->rank[r->set.rank];
    if (ql_flag(&sh->abort)) QL_FAIL(QL_EPEER, "another rank failed");
    if (!ql_flag(&sh->stop)) return QL_OK;
    __atomic_store_n(&me->at_stop, 1, __ATOMIC_SEQ_CST);
    for (;;) {
        int together, over;
        /* A neighbour may need the rest of what this rank has begun to send. */
        if (r->link) QL_TRY(r->set.be->comm->land(r->comm, &over));
        if (links_wanted(r, &together)) {
            __atomic_store_n(&me->at_stop, 0, __ATOMIC_SEQ_CST);
            return QL_OK;
        }
        for (int k = 0; k < r->set.world; k++) {
            int waits = __atomic_load_n(&sh->rank[k].at_stop, __ATOMIC_SEQ_CST);
            int64_t entered = __atomic_load_n(&sh->rank[k].entered, __ATOMIC_SEQ_CST);
            if (entered > me->entered) {
                __atomic_store_n(&me->at_stop, 0, __ATOMIC_SEQ_CST);
                return QL_OK;
            }
            together &= waits && entered == me->entered;
        }
        if (together) return QL_ESTOP;
        if (ql_flag(&sh->abort)) QL_FAIL(QL_EPEER, "another rank failed");
        usleep(500);
    }
}

/* Keeps the host at most QL_AHEAD layers ahead of the device. */
static ql_status pace(ql_rank *r, const ql_action *a, int *layers_done)
{
    if (a->what != QL_DO_F && a->what != QL_DO_B) return QL_OK;
    ql_event *e = r->pace[(*layers_done)++ % QL_AHEAD];
    QL_TRY(await(r, e));
    return dev_of(r)->record(r->compute, e);
}

static ql_status run_plan(ql_rank *r, const ql_plan *p, const ql_step_data *d)
{
    ql_status st = QL_OK;
    int from = ql_plan_first(&r->spec->choice, r->set.rank), layers_done = 0;
    ql_rank_state *me = &r->set.shared->rank[r->set.rank];
    r->stack = 0, r->heads = 0;
    __atomic_store_n(&me->at_stop, 0, __ATOMIC_SEQ_CST);
    ql_rank_at(r, d->step > 0 ? QL_AT_STEP : QL_AT_EVAL);
    for (int i = 0; i < p->count; i++) {
        const ql_action *a = &p->a[i];
        me->doing = *a;
        /* From STEP on nothing is dropped any more. */
        if (a->what != QL_DO_STEP && (st = ql_exec_stop_point(r)) != QL_OK) break;
        if (ql_plan_meets(&r->spec->choice, a)) ql_exec_enter(r);
        if (ql_plan_link(a)) enter_links(r, p, i, group_end(p, i));
        int flight = a->mb < 0 ? 0 : (a->mb - from) % r->mem->flights;
        QL_TRY(run_action(r, a, p, d, flight));
        QL_TRY(pace(r, a, &layers_done));
        if (ql_plan_link(a)) i = group_end(p, i) - 1; /* they went together */
        if (r->set.acted) r->set.acted(r->set.ctx, a);
        me->beat++;
    }
    if (st != QL_OK && st != QL_ESTOP) return st;
    if (r->link) QL_TRY(do_land(r)); /* a stop may have come before it */
    QL_TRY(dev_of(r)->sync(r->side));
    QL_TRY(dev_of(r)->sync(r->compute));
    return st;
}

/* Every rank's losses on every rank: each has its own contiguous range. */
static ql_status gather_losses(ql_rank *r, const ql_plan *p, float *losses)
{
    const ql_choice *c = &r->spec->choice;
    const ql_dev_table *dev = dev_of(r);
    int from = ql_plan_first(c, r->set.rank), most = 0;
    memset(losses, 0, (size_t)c->g * sizeof *losses);
    if (ql_plan_piped(c)) return ql_rank_share(r, losses, (int64_t)p->g * 4, r->mem->losses, 0, ql_mem_has_head(r->mem) ? (int64_t)p->g * 4 : 0);
    if (r->set.world == 1) {
        QL_TRY(dev->copy(r->compute, losses, r->mem->losses, (int64_t)p->g * 4));
        return dev->sync(r->compute);
    }
    for (int i = 0; i < r->set.world; i++) most = (int)ql_max64(most, ql_plan_end(c, i) - ql_plan_first(c, i));
    /* Through the workspace: [mine | everybody's], `most` each. */
    float *mine = r->mem->op_work, *all = mine + ql_round_up(most, 64);
    float host[QL_MAX_ACCUM];
    int own = ql_plan_end(c, r->set.rank) - from;
    QL_TRY(dev->copy(r->compute, mine, r->mem->losses + from, (int64_t)own * 4));
    QL_TRY(r->set.be->comm->all_gather(r->comm, r->compute, ql_vec(all, QL_F32, (int64_t)most * r->set.world),
                                       ql_vec(mine, QL_F32, most)));
    if (most * r->set.world > QL_MAX_ACCUM) QL_FAIL(QL_ENOSUP, "%d micro-batches: at most %d", c->g, (int)QL_MAX_ACCUM);
    QL_TRY(dev->copy(r->compute, host, all, (int64_t)most * r->set.world * 4));
    QL_TRY(dev->sync(r->compute));
    for (int i = 0; i < r->set.world; i++)
        for (int k = ql_plan_first(c, i); k < ql_plan_end(c, i); k++) losses[k] = host[i * most + k - ql_plan_first(c, i)];
    return QL_OK;
}

ql_status ql_rank_step(ql_rank *r, const ql_plan *p, const ql_step_data *d, ql_step_result *out)
{
    const ql_dev_table *dev = dev_of(r);
    float losses[QL_MAX_ACCUM], inv = d->items > 0 ? (float)(1.0 / (double)d->items) : 0;
    ql_ctl ctl;
    r->set.shared->rank[r->set.rank].step = (int)d->step;
    QL_TRY(dev->copy(r->compute, &r->mem->ctl->inv_items, &inv, 4));
    QL_TRY(dev->sync(r->compute));
    QL_TRY(run_plan(r, p, d));
    QL_TRY(gather_losses(r, p, losses));
    QL_TRY(dev->copy(r->compute, &ctl, r->mem->ctl, (int64_t)sizeof ctl));
    QL_TRY(dev->sync(r->compute));
    double sum = 0;
    for (int i = 0; i < p->g; i++) sum += losses[i];
    *out = (ql_step_result){(float)(d->items > 0 ? sum / (double)d->items : 0), ctl.norm, ctl.lr, ctl.loss_scale, ctl.skipped,
                            ctl.steps, ctl.skips};
    return QL_OK;
}

ql_status ql_rank_forward(ql_rank *r, const ql_plan *p, const ql_step_data *d, float *losses)
{
    QL_TRY(run_plan(r, p, d));
    ql_exec_enter(r);
    return gather_losses(r, p, losses);
}

int64_t ql_step_items(const ql_step_data *d)
{
    int64_t n = 0, t, targets;
    for (int k = 0; k < d->g; k++) {
        int64_t at = (d->first + k) * d->batch;
        ql_batch_measure(d->data, d->order + at, ql_min64(d->batch, d->n - at), 64, &t, &targets);
        n += targets;
    }
    return n;
}

int64_t ql_step_tokens(const ql_step_data *d)
{
    int64_t n = 0;
    int64_t at = d->first * d->batch, end = ql_min64(d->n, (d->first + d->g) * d->batch);
    for (; at < end; at++) n += ql_dataset_length(d->data, d->order[at]);
    return n;
}
