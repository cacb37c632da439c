#include "core/rank.h"

#include "core/ahead.h"
#include "kernels/half.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const ql_dev_table *dev_of(const ql_rank *r)
{
    return r->set.be->dev;
}

/* ---- opening ---------------------------------------------------------------------------------- */

static ql_status open_events(ql_rank *r)
{
    const ql_dev_table *dev = dev_of(r);
    for (int i = 0; i < QL_GATHER_SLOTS; i++) {
        QL_TRY(dev->event_open(r->dev, &r->slot_full[i]));
        QL_TRY(dev->event_open(r->dev, &r->slot_free[i]));
        QL_TRY(dev->record(r->compute, r->slot_free[i]));
    }
    for (int i = 0; i < 2; i++) {
        QL_TRY(dev->event_open(r->dev, &r->saved[i]));
        QL_TRY(dev->record(r->side, r->saved[i]));
        QL_TRY(dev->event_open(r->dev, &r->loaded[i]));
    }
    for (int i = 0; i < QL_AHEAD; i++) {
        QL_TRY(dev->event_open(r->dev, &r->pace[i]));
        QL_TRY(dev->record(r->compute, r->pace[i]));
    }
    QL_TRY(dev->event_open(r->dev, &r->ready));
    QL_TRY(dev->event_open(r->dev, &r->landed));
    QL_TRY(dev->event_open(r->dev, &r->staged));
    return dev->record(r->compute, r->staged);
}

static ql_status open_comm(ql_rank *r)
{
    ql_comm_setup c = {.rank = r->set.rank, .world = r->set.world, .shared = r->set.comm_shared, .shared_bytes = r->set.comm_bytes,
                       .abort = &r->set.shared->abort, .timeout_ms = r->set.timeout_ms,
                       .waits_for = &r->set.shared->rank[r->set.rank].waits_for};
    if (r->set.world == 1) return QL_OK;
    return r->set.be->comm->open(r->dev, &c, &r->comm);
}

static ql_status too_large(const ql_rank *r, const ql_arena *need, const ql_dev_info *info)
{
    char text[512];
    int n = 0;
    for (int c = 0; c < QL_CATS; c++)
        if (need->by_cat[c])
            n += snprintf(text + n, sizeof text - (size_t)n, "%s%s %.2f", n ? ", " : "", ql_cat_name((ql_cat)c),
                          (double)need->by_cat[c] / (1 << 30));
    return ql_fail(QL_ENOMEM,
                   "rank %d (%s) needs %.2f GiB, %.2f are free (GiB: %s). `plan` shows what fits: shorter --max_length, a smaller batch, "
                   "--fsdp true, --fsdp_config '{\"cpu_offload\": true}' or --activation_offloading true take less",
                   r->set.rank, info->name, (double)need->used / (1 << 30), (double)info->free_bytes / (1 << 30), text);
}

static ql_status take_memory(ql_rank *r)
{
    const ql_dev_table *dev = dev_of(r);
    ql_dev_info info;
    ql_arena need;
    QL_TRY(dev->info(r->dev, &info));
    snprintf(r->set.shared->rank[r->set.rank].name, sizeof info.name, "%s", info.name);
    QL_TRY(ql_mem_count(r->spec, r->set.rank, &need));
    if (r->set.device_limit && r->set.device_limit < info.free_bytes) info.free_bytes = r->set.device_limit;
    if (need.used > info.free_bytes) return too_large(r, &need, &info);
    void *base = NULL;
    QL_TRY(dev->alloc(r->dev, need.used, &base));
    r->arena = (ql_arena){.base = base, .size = need.used};
    QL_TRY(ql_mem_open(r->spec, r->set.rank, &r->mem));
    QL_TRY(ql_mem_carve(r->mem, &r->arena));
    if (r->arena.used != need.used)
        QL_FAIL(QL_EINTERNAL, "memory was counted as %lld bytes and carved as %lld", (long long)need.used, (long long)r->arena.used);
    /* Scratch and staging are zero from here: what adapters and short batches leave out stays zero. */
    QL_TRY(dev->set(r->compute, base, 0, need.used));
    return dev->sync(r->compute);
}

static const char pin_more[] = "`ulimit -l unlimited` (docker run --ulimit memlock=-1) lets more be pinned; with less offloaded, or a smaller "
                               "--host_memory to plan with, less has to be";

static ql_status host_alloc(ql_rank *r, int64_t bytes, const char *what, void **out)
{
    ql_status st = dev_of(r)->host_alloc(r->dev, bytes, out);
    if (st != QL_OK) ql_error_prefix("no %.2f GiB of pinned host memory for %s (%s): ", (double)bytes / (1 << 30), what, pin_more);
    return st;
}

static ql_status take_host(ql_rank *r)
{
    const ql_dev_table *dev = dev_of(r);
    ql_mem *m = r->mem;
    const ql_param *e = &r->spec->model->embed;
    int64_t rows = r->spec->rows * e->cols * (int64_t)ql_dtype_size(e->dtype);
    void *p = NULL;
    if (!ql_mem_has_embedding(m)) rows = 0;
    for (int f = 0; f < m->flights; f++) {
        QL_TRY(host_alloc(r, m->stage[f].at_rows + rows, "batches", &p));
        m->stage[f].host = p;
        memset(p, 0, (size_t)m->stage[f].at_rows);
    }
    int64_t state = r->spec->state_host && r->spec->choice.train ? (r->spec->state == QL_ADAM_F32 ? 8 * m->shard : 2 * m->shard + m->shard / 32) : 0;
    r->host_h_bytes = ql_mem_host_rank(m) - state;
    if (r->host_h_bytes > 0) {
        QL_TRY(host_alloc(r, r->host_h_bytes, "offloaded activations", &p));
        r->host_h = p;
    }
    r->host_state_bytes = state;
    if (state > 0) {
        QL_TRY(host_alloc(r, state, "paged optimizer states", &p));
        r->host_state = p;
    }
    /* One copy of host-resident layers for all ranks, pinned by each. Where the system refuses to pin, copies are slower, that is all. */
    if (r->set.host_base && dev->pin(r->dev, r->set.host_base, r->set.host_bytes) != QL_OK) {
        snprintf(r->unpinned, sizeof r->unpinned, "%.300s; %s", ql_error(), pin_more);
        ql_error_clear();
    }
    return QL_OK;
}

ql_status ql_rank_open(const ql_rank_setup *set, const ql_spec *spec, ql_rank **out)
{
    ql_status st = QL_OK;
    ql_rank *r = calloc(1, sizeof *r);
    if (!r) QL_FAIL(QL_ENOMEM, "no memory for rank %d", set->rank);
    r->set = *set;
    ql_rank_at(r, QL_AT_OPENING);
    r->spec = spec;
    const ql_dev_table *dev = dev_of(r);
    QL_GO(dev->open(set->device, &r->dev));
    QL_GO(dev->stream_open(r->dev, &r->compute));
    QL_GO(dev->stream_open(r->dev, &r->side));
    if (ql_plan_piped(&spec->choice)) QL_GO(dev->stream_open(r->dev, &r->link));
    QL_GO(open_events(r));
    QL_GO(take_memory(r));
    QL_GO(take_host(r));
    QL_GO(open_comm(r));
    r->q = (ql_queue){set->be->ops, r->compute, r->mem->op_work};
    r->micro = calloc((size_t)r->mem->flights, sizeof *r->micro);
    if (!r->micro) st = ql_fail(QL_ENOMEM, "no memory for rank %d", set->rank);
out:
    if (st == QL_OK)
        *out = r;
    else
        ql_rank_close(r);
    return st;
}

void ql_rank_close(ql_rank *r)
{
    if (!r) return;
    const ql_dev_table *dev = dev_of(r);
    if (r->comm) r->set.be->comm->close(r->comm);
    for (int i = 0; i < QL_GATHER_SLOTS; i++) {
        if (r->slot_full[i]) dev->event_close(r->slot_full[i]);
        if (r->slot_free[i]) dev->event_close(r->slot_free[i]);
    }
    for (int i = 0; i < 2; i++) {
        if (r->saved[i]) dev->event_close(r->saved[i]);
        if (r->loaded[i]) dev->event_close(r->loaded[i]);
    }
    for (int i = 0; i < QL_AHEAD; i++)
        if (r->pace[i]) dev->event_close(r->pace[i]);
    if (r->ready) dev->event_close(r->ready);
    if (r->landed) dev->event_close(r->landed);
    if (r->staged) dev->event_close(r->staged);
    for (int f = 0; r->mem && f < r->mem->flights; f++)
        if (r->mem->stage[f].host) dev->host_free(r->dev, r->mem->stage[f].host);
    if (r->host_h) dev->host_free(r->dev, r->host_h);
    if (r->host_state) dev->host_free(r->dev, r->host_state);
    if (r->arena.base) dev->free(r->dev, r->arena.base);
    if (r->compute) dev->stream_close(r->compute);
    if (r->side) dev->stream_close(r->side);
    if (r->link) dev->stream_close(r->link);
    if (r->dev) dev->close(r->dev);
    ql_batch_free(&r->batch);
    ql_mem_close(r->mem);
    free(r->micro);
    free(r);
}

/* ---- loading ---------------------------------------------------------------------------------- */

static double value_of(const ql_param *p, int64_t i)
{
    switch (p->dtype) {
    case QL_F32: {
        float f;
        memcpy(&f, (const char *)p->data + 4 * i, 4);
        return f;
    }
    case QL_F16:
    case QL_BF16: {
        uint16_t h;
        memcpy(&h, (const char *)p->data + 2 * i, 2);
        return p->dtype == QL_F16 ? ql_f16_to_f32(h) : ql_bf16_to_f32(h);
    }
    default: return 0;
    }
}

/* A vector of the file as F32 on the device; NaN and infinities are refused by name. */
static ql_status load_vector(ql_rank *r, const ql_param *p, ql_tensor to)
{
    int64_t n = p->cols * p->rows;
    float *v = malloc((size_t)n * 4);
    ql_status st = QL_OK;
    if (!v) QL_FAIL(QL_ENOMEM, "%s: no memory", p->name);
    for (int64_t i = 0; i < n; i++) {
        v[i] = (float)value_of(p, i);
        if (!(v[i] - v[i] == 0)) {
            st = ql_fail(QL_EINVAL, "%s holds NaN or infinite values: the file is damaged", p->name);
            goto out;
        }
    }
    if (to.dtype == QL_F32) {
        QL_GO(dev_of(r)->copy(r->compute, to.data, v, n * 4));
    } else {
        ql_tensor temp = ql_vec(r->mem->op_work, QL_F32, n);
        QL_GO(dev_of(r)->copy(r->compute, temp.data, v, n * 4));
        QL_GO(ql_convert(&r->q, to, temp));
    }
    QL_GO(dev_of(r)->sync(r->compute));
out:
    free(v);
    return st;
}

static ql_status load_small(ql_rank *r, int64_t l)
{
    const ql_block *b = &r->spec->model->block[l];
    ql_small *s = &r->mem->small[l];
    QL_TRY(load_vector(r, &b->norm_attn, s->norm_attn));
    QL_TRY(load_vector(r, &b->norm_ffn, s->norm_ffn));
    if (ql_tensor_set(s->q_norm)) QL_TRY(load_vector(r, &b->q_norm, s->q_norm));
    if (ql_tensor_set(s->k_norm)) QL_TRY(load_vector(r, &b->k_norm, s->k_norm));
    for (int g = 0; g < QL_GROUPS; g++) {
        const ql_group_shape *gs = &r->mem->shape.group[g];
        for (int i = 0; ql_tensor_set(s->bias[g]) && i < gs->count; i++) {
            const ql_param *p = &b->bias[gs->first + (ql_linear)i];
            if (p->data) QL_TRY(load_vector(r, p, ql_cols(s->bias[g], gs->row[i], p->cols)));
        }
    }
    return QL_OK;
}

/* Rows [from, from + to.rows) of a matrix of the file, in chunks through the workspace, into the compute dtype. */
static ql_status load_matrix(ql_rank *r, const ql_param *p, int64_t from, ql_tensor to)
{
    int64_t row = p->cols * (int64_t)ql_dtype_size(p->dtype), chunk = ql_max64(1, QL_WORK_BYTES / row);
    ql_tensor flag = ql_vec(r->mem->flag, QL_I32, 1);
    int32_t bad = 0;
    QL_TRY(dev_of(r)->set(r->compute, flag.data, 0, 4));
    for (int64_t at = 0; at < to.rows; at += chunk) {
        int64_t n = ql_min64(chunk, to.rows - at);
        const char *src = (const char *)p->data + (from + at) * row;
        ql_tensor raw = ql_mat(r->mem->op_work, p->dtype, n, p->cols, p->cols);
        QL_TRY(dev_of(r)->copy(r->compute, raw.data, src, n * row));
        QL_TRY(ql_convert(&r->q, ql_rows(to, at, n), raw));
        QL_TRY(ql_check_finite(&r->q, flag, ql_rows(to, at, n)));
        QL_TRY(dev_of(r)->sync(r->compute));
        ql_model_done_with(r->spec->model, src, n * row);
    }
    QL_TRY(dev_of(r)->copy(r->compute, &bad, flag.data, 4));
    QL_TRY(dev_of(r)->sync(r->compute));
    if (bad)
        QL_FAIL(QL_EINVAL, "%s holds NaN or infinite values (as %s): the file is damaged, or this dtype is too narrow for it", p->name,
                ql_dtype_name(to.dtype));
    return QL_OK;
}

/* The pieces of the head that this rank holds, as far as the vocabulary goes. */
static ql_status load_head(ql_rank *r)
{
    const ql_head *h = &r->mem->head;
    int64_t from = h->first * h->piece, n = ql_min64(h->vocab, from + h->count * h->piece) - from;
    return n > 0 ? load_matrix(r, &r->spec->model->head, from, ql_rows(h->w, 0, n)) : QL_OK;
}

static ql_status load_layer(ql_rank *r, ql_loader *ld, int64_t l)
{
    ql_mem *m = r->mem;
    const ql_blob *b = &m->blob[l];
    void *parts[1] = {m->slot[0]};
    switch ((ql_store_kind)r->spec->choice.store[l]) {
    case QL_STORE_RESIDENT: return ql_store_load(ld, l, b, 0, 1, m->base[l], &m->tables[l]);
    case QL_STORE_SHARDED: return ql_store_load(ld, l, b, r->set.rank, 1, m->base[l], &m->tables[l]);
    case QL_STORE_HOST: {
        /* Ranks take turns in filling the shared copy; all need the tables. */
        char *own = r->set.host_base + ql_mem_host_at(m, l);
        int mine = ql_plan_piped(&r->spec->choice) || l % r->set.world == r->set.rank;
        return ql_store_load(ld, l, b, 0, mine ? 1 : 0, own, &m->tables[l]);
    }
    default:
        QL_TRY(ql_store_load(ld, l, b, 0, 1, m->slot[0], &m->tables[l]));
        return ql_store_dequant(&m->shape, &r->q, b, &m->tables[l], parts, &r->spec->quant, &m->own[l], l);
    }
}

/* What this rank is going to read of the file, in that order: of a shared layer its own part, of host layers those that it fills. */
static ql_status read_ahead(ql_rank *r, ql_ahead **out)
{
    const ql_mem *m = r->mem;
    const ql_model *model = r->spec->model;
    const ql_head *h = &m->head;
    int64_t n = 0, head_row = model->head.cols * (int64_t)ql_dtype_size(model->head.dtype), from = h->first * h->piece;
    ql_ahead_range *range = calloc((size_t)((m->hi - m->lo) * QL_LINEARS + 1), sizeof *range);
    if (!range) QL_FAIL(QL_ENOMEM, "no memory for what is read ahead");
    for (int64_t l = m->lo; l < m->hi; l++)
        for (int i = 0; i < QL_LINEARS; i++) {
            const ql_weight *w = &model->block[l].w[i];
            ql_store_kind store = (ql_store_kind)r->spec->choice.store[l];
            int shared = store == QL_STORE_SHARDED && w->kind != QL_PLAIN;
            int64_t part = m->blob[l].lin[i].part / 2, at = shared ? ql_min64(r->set.rank * part, w->bytes) : 0;
            if (store == QL_STORE_HOST && !ql_plan_piped(&r->spec->choice) && l % r->set.world != r->set.rank) continue;
            range[n++] = (ql_ahead_range){(const char *)w->data + at, shared ? ql_min64(part, w->bytes - at) : w->bytes, l};
        }
    if (ql_mem_has_head(m) && from < h->vocab)
        range[n++] = (ql_ahead_range){(const char *)model->head.data + from * head_row,
                                      (ql_min64(h->vocab, from + h->count * h->piece) - from) * head_row, m->hi};
    ql_status st = ql_ahead_open(range, n, out);
    free(range);
    return st;
}

/* A word with each neighbour. */
static ql_status warm_links(ql_rank *r)
{
    const ql_comm_table *comm = r->set.be->comm;
    char *work = r->mem->op_work;
    QL_TRY(comm->group_begin(r->comm));
    for (int peer = r->set.rank - 1; peer <= r->set.rank + 1; peer += 2) {
        if (peer < 0 || peer >= r->set.world) continue;
        QL_TRY(comm->send(r->comm, r->link, ql_vec(work, QL_U8, 256), peer));
        QL_TRY(comm->recv(r->comm, r->link, ql_vec(work + 256 * (1 + peer), QL_U8, 256), peer));
    }
    QL_TRY(comm->group_end(r->comm));
    QL_TRY(comm->land(r->comm, NULL));
    QL_TRY(dev_of(r)->record(r->link, r->landed));
    return dev_of(r)->wait(r->compute, r->landed);
}

/* Each collective that a step of this plan has, once. NCCL makes connections, buffers and code for a call when it first comes, and by its
 * size not always the same: here, where a lack of room ends the loading, and not in a step. A call of a few bytes, and one of a layer's. */
static ql_status warm_collectives(ql_rank *r)
{
    const ql_comm_table *comm = r->set.be->comm;
    const ql_mem *m = r->mem;
    int64_t most = QL_WORK_BYTES / 2 / r->set.world, size[] = {256, ql_min64(m->blob[0].part_bytes, most) / 256 * 256};
    char *work = m->op_work;
    if (r->link) QL_TRY(warm_links(r));
    for (int i = 0; i < 2; i++) {
        ql_tensor all = ql_vec(work, QL_U8, size[i] * r->set.world), other = ql_vec(work + QL_WORK_BYTES / 2, QL_U8, all.cols);
        if (r->link) {
            QL_TRY(comm->all_sum(r->comm, r->compute, ql_vec(work, QL_I32, size[i] / 4)));
        } else {
            QL_TRY(comm->all_gather(r->comm, r->compute, all, ql_cols(all, r->set.rank * size[i], size[i])));
            QL_TRY(comm->all_to_all(r->comm, r->compute, other, all));
        }
    }
    /* The host waits here, and leaves when another rank fails. Ranks fill the shared copy of host layers in turn, too: from here on all
     * may read it. */
    return comm->barrier(r->comm, r->compute);
}

ql_status ql_rank_load(ql_rank *r)
{
    ql_mem *m = r->mem;
    const ql_model *model = r->spec->model;
    int64_t n = m->hi - m->lo;
    float freq[128];
    ql_ahead *ahead = NULL;
    ql_status st = QL_OK;
    ql_loader ld = {r->set.be, &r->q, model, &r->spec->quant, m->temp, m->temp_bytes};
    ql_rope_inv_freq(&model->cfg, freq);
    QL_GO(dev_of(r)->copy(r->compute, m->freq.data, freq, model->cfg.head_dim / 2 * 4));
    QL_GO(dev_of(r)->sync(r->compute));
    ql_rank_at(r, QL_AT_LOADING);
    QL_GO(read_ahead(r, &ahead));
    for (int64_t l = m->lo; l < m->hi; l++) {
        ql_ahead_turn(ahead, l);
        r->set.shared->rank[r->set.rank].doing = (ql_action){.mb = -1, .layer = (int16_t)l, .slot = -1};
        QL_GO(load_small(r, l));
        QL_GO(load_layer(r, &ld, l));
        r->set.shared->rank[r->set.rank].beat++;
        if (ql_flag(&r->set.shared->abort)) QL_GO(ql_fail(QL_EPEER, "another rank failed"));
        if (ql_flag(&r->set.shared->stop)) QL_GO(QL_ESTOP);
        if (r->set.progress) r->set.progress(r->set.ctx, "load", l - m->lo + 1, n + 1);
    }
    ql_ahead_turn(ahead, m->hi);
    if (ql_mem_has_head(m)) {
        QL_GO(load_vector(r, &model->norm, m->head.norm));
        QL_GO(load_head(r));
    }
    /* Quantising wrote over the scratch: what lies outside base and adapters has to be zero. */
    for (int g = 0; g < QL_GROUPS; g++) {
        ql_tensor w = m->scratch.w[g];
        QL_GO(dev_of(r)->set(r->compute, w.data, 0, w.rows * w.ld * (int64_t)ql_dtype_size(w.dtype)));
    }
    QL_GO(dev_of(r)->sync(r->compute));
    QL_GO(ql_exec_warm(r));
    if (r->comm) QL_GO(warm_collectives(r));
    if (r->set.progress) r->set.progress(r->set.ctx, "load", n + 1, n + 1);
out:
    ql_ahead_close(ahead);
    return st;
}

/* ---- adapters, figures ------------------------------------------------------------------------ */

ql_status ql_rank_set_adapters(ql_rank *r, const float *flat)
{
    QL_TRY(dev_of(r)->copy(r->compute, r->mem->adapters, flat + r->mem->held_at, ql_min64(r->mem->held, r->mem->n) * 4));
    r->version++;
    return dev_of(r)->sync(r->compute);
}

ql_status ql_rank_get_adapters(ql_rank *r, float *flat)
{
    const ql_mem *m = r->mem;
    if (ql_plan_piped(&r->spec->choice)) return ql_rank_share(r, flat, m->n * 4, m->adapters, m->held_at * 4, m->held * 4);
    QL_TRY(dev_of(r)->copy(r->compute, flat, m->adapters, m->n * 4));
    return dev_of(r)->sync(r->compute);
}

ql_status ql_rank_share(ql_rank *r, void *all, int64_t bytes, const void *mine, int64_t at, int64_t n)
{
    const ql_dev_table *dev = dev_of(r);
    char *work = r->mem->op_work;
    for (int64_t from = 0; from < bytes; from += QL_WORK_BYTES) {
        int64_t len = ql_min64(QL_WORK_BYTES, bytes - from), lo = ql_max64(from, at), hi = ql_min64(from + len, at + n);
        QL_TRY(dev->set(r->compute, work, 0, len));
        if (hi > lo) QL_TRY(dev->copy(r->compute, work + lo - from, (const char *)mine + lo - at, hi - lo));
        if (r->comm) QL_TRY(r->set.be->comm->all_sum(r->comm, r->compute, ql_vec(work, QL_I32, len / 4)));
        QL_TRY(dev->copy(r->compute, (char *)all + from, work, len));
        QL_TRY(dev->sync(r->compute));
    }
    return QL_OK;
}

void ql_rank_at(ql_rank *r, ql_phase phase)
{
    r->set.shared->rank[r->set.rank].phase = phase;
}

void ql_rank_where(const ql_rank_state *s, char *buf, size_t size)
{
    ql_action a = s->doing;
    char action[64];
    ql_action_print(&a, action, sizeof action);
    switch ((ql_phase)s->phase) {
    case QL_AT_OPENING: snprintf(buf, size, "taking memory"); break;
    case QL_AT_LOADING: snprintf(buf, size, "loading layer %d", a.layer); break;
    case QL_AT_STEP: snprintf(buf, size, "%s of step %d", action, s->step); break;
    case QL_AT_EVAL: snprintf(buf, size, "%s of an evaluation", action); break;
    case QL_AT_SAVING: snprintf(buf, size, "saving after step %d", s->step); break;
    case QL_AT_TEXT: snprintf(buf, size, "generating"); break;
    default: snprintf(buf, size, "starting"); break;
    }
}

/* Figures that one rank writes while others read them: word by word, each of them whole. */
static void copy_words(void *to, const void *from, size_t size)
{
    int32_t *t = to;
    const int32_t *f = from;
    for (size_t i = 0; i < size / 4; i++) __atomic_store_n(&t[i], __atomic_load_n(&f[i], __ATOMIC_RELAXED), __ATOMIC_RELAXED);
}

ql_status ql_rank_measure(ql_rank *r)
{
    ql_rank_state *s = &r->set.shared->rank[r->set.rank];
    ql_dev_memory mem;
    QL_TRY(dev_of(r)->memory(r->dev, &mem));
    copy_words(s->bytes, r->arena.by_cat, sizeof s->bytes);
    copy_words(&s->mem, &mem, sizeof mem);
    return QL_OK;
}

void ql_rank_figures(const ql_rank_state *s, int64_t bytes[QL_CATS], ql_dev_memory *mem)
{
    copy_words(bytes, s->bytes, sizeof s->bytes);
    copy_words(mem, &s->mem, sizeof *mem);
}
