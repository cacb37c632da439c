#include "core/memory.h"

#include <stdlib.h>
#include <string.h>

enum { STATE_WINDOW = 4 << 20 /* elements of offloaded optimizer state on the device at a time */, SMALL_TENSOR = 4096 };

/* ---- host-side tables ------------------------------------------------------------------------- */

static int64_t layers(const ql_mem *m)
{
    return m->spec->model->cfg.layers;
}

static int parts_of(const ql_mem *m, int64_t l)
{
    return m->spec->choice.store[l] == QL_STORE_SHARDED ? m->spec->choice.world : 1;
}

/* Is the k-th run of one kind? Tensors in flat order; padding belongs to its tensor. */
static ql_status state_runs(ql_mem *m)
{
    const ql_lora *lora = m->spec->lora;
    int64_t lo = m->mine, hi = lo + m->shard;
    if (!lora) return QL_OK;
    m->runs = calloc((size_t)(2 * lora->count + 1), sizeof *m->runs);
    if (!m->runs) QL_FAIL(QL_ENOMEM, "optimizer: no memory for %lld tensors", (long long)lora->count);
    for (int64_t i = 0; i < 2 * lora->count; i++) {
        const ql_lora_target *t = &lora->target[i / 2];
        int64_t at = i & 1 ? t->b : t->a, len = i & 1 ? t->b_len : t->a_len, real = t->r * (i & 1 ? t->n : t->k);
        int64_t from = ql_max64(at, lo), to = ql_min64(at + len, hi);
        ql_state_kind kind = m->spec->state == QL_ADAM_8BIT && real >= SMALL_TENSOR ? QL_ADAM_8BIT : QL_ADAM_F32;
        if (from >= to) continue;
        ql_state_run *last = m->run_count ? &m->runs[m->run_count - 1] : NULL;
        if (!last || last->kind != kind || last->at + last->n != from) {
            last = &m->runs[m->run_count++];
            *last = (ql_state_run){from, 0, kind, m->small_n};
        }
        last->n += to - from;
        if (m->spec->state == QL_ADAM_8BIT && kind == QL_ADAM_F32) m->small_n += to - from;
    }
    return QL_OK;
}

static ql_status tables(ql_mem *m)
{
    const ql_spec *s = m->spec;
    size_t n = (size_t)layers(m), f = (size_t)m->flights;
    m->blob = calloc(n, sizeof *m->blob);
    m->tables = calloc(n, sizeof *m->tables);
    m->base = calloc(n, sizeof *m->base);
    m->own = calloc(n, sizeof *m->own);
    m->small = calloc(n, sizeof *m->small);
    m->act = calloc(n * f, sizeof *m->act);
    m->h = calloc((n + 1) * f, sizeof *m->h);
    m->dh = calloc(f, sizeof *m->dh);
    m->ahead = calloc(n, sizeof *m->ahead);
    m->stage = calloc(f, sizeof *m->stage);
    if (!m->blob || !m->tables || !m->base || !m->own || !m->small || !m->act || !m->h || !m->dh || !m->ahead || !m->stage)
        QL_FAIL(QL_ENOMEM, "no memory for the tables of %lld layers", (long long)n);
    for (int64_t l = 0; l < (int64_t)n; l++) {
        QL_TRY(ql_blob_init(&m->blob[l], &s->model->block[l], &s->quant, s->model->cfg.dtype, parts_of(m, l)));
        if (l >= m->lo && l < m->hi && (s->choice.store[l] == QL_STORE_SHARDED || s->choice.store[l] == QL_STORE_HOST))
            m->slot_bytes = ql_max64(m->slot_bytes, m->blob[l].part_bytes * m->blob[l].parts);
    }
    return QL_OK;
}

/* Where the adapters of a layer and those above it begin in the flat vector. */
static int64_t adapters_from(const ql_mem *m, int layer)
{
    const ql_lora *lora = m->spec->lora;
    for (int64_t i = 0; lora && i < lora->count; i++)
        if (lora->target[i].layer >= layer) return lora->target[i].a;
    return m->n;
}

/* Equal shards; in a pipeline each stage has what its layers have. */
static void divide_adapters(ql_mem *m)
{
    const ql_choice *c = &m->spec->choice;
    m->n = m->spec->lora ? m->spec->lora->elements : 0;
    m->shard = ql_ceil_div(m->n / QL_OPT_BLOCK, c->world) * QL_OPT_BLOCK;
    m->padded = m->held = m->shard * c->world;
    m->mine = m->rank * m->shard;
    if (ql_plan_piped(c)) {
        m->mine = m->held_at = adapters_from(m, m->lo);
        m->shard = m->held = adapters_from(m, m->hi) - m->mine;
        m->padded = m->n;
    }
    m->window = ql_min64(STATE_WINDOW, m->shard);
    m->shape.flat_at = m->held_at;
}

ql_status ql_mem_open(const ql_spec *spec, int rank, ql_mem **out)
{
    ql_status st = QL_OK;
    const ql_choice *c = &spec->choice;
    ql_mem *m = calloc(1, sizeof *m);
    if (!m) QL_FAIL(QL_ENOMEM, "no memory for a rank's tables");
    m->spec = spec;
    m->rank = rank;
    m->flights = ql_plan_flights(c, rank);
    ql_plan_stage(c, rank, &m->lo, &m->hi);
    m->grads = c->train ? ql_plan_grad_buffers(c) : 0;
    QL_GO(ql_shape_init(&m->shape, &spec->model->cfg, spec->lora, spec->dtype, spec->res, spec->dropout, spec->seed, spec->rows));
    divide_adapters(m);
    if (m->grads > (int)(sizeof m->grad / sizeof *m->grad)) {
        st = ql_fail(QL_ENOSUP, "%d gradient buffers: exact_worlds %d is too large", m->grads, c->pieces);
        goto out;
    }
    QL_GO(tables(m));
    QL_GO(state_runs(m));
    ql_head_init(&m->head, &m->shape, spec->head_chunk, spec->smoothing, rank, ql_plan_head_world(c));
out:
    if (st == QL_OK)
        *out = m;
    else
        ql_mem_close(m);
    return st;
}

void ql_mem_close(ql_mem *m)
{
    if (!m) return;
    free(m->blob);
    free(m->tables);
    free(m->base);
    free(m->own);
    free(m->small);
    free(m->act);
    free(m->h);
    free(m->dh);
    free(m->ahead);
    free(m->stage);
    free(m->runs);
    free(m);
}

/* ---- device memory ---------------------------------------------------------------------------- */

static ql_status carve_small(ql_mem *m, ql_arena *a, int64_t l)
{
    const ql_config *c = &m->spec->model->cfg;
    ql_small *s = &m->small[l];
    QL_TRY(ql_arena_mat(a, QL_CAT_HEAD, QL_F32, 1, c->hidden, c->hidden, &s->norm_attn));
    QL_TRY(ql_arena_mat(a, QL_CAT_HEAD, QL_F32, 1, c->hidden, c->hidden, &s->norm_ffn));
    if (c->qk_norm) {
        QL_TRY(ql_arena_mat(a, QL_CAT_HEAD, QL_F32, 1, c->head_dim, c->head_dim, &s->q_norm));
        QL_TRY(ql_arena_mat(a, QL_CAT_HEAD, QL_F32, 1, c->head_dim, c->head_dim, &s->k_norm));
    }
    for (int g = 0; g < QL_GROUPS; g++) {
        const ql_group_shape *gs = &m->shape.group[g];
        int any = 0;
        for (int i = 0; i < gs->count; i++) any |= ql_linear_bias(c, gs->first + (ql_linear)i);
        if (any) QL_TRY(ql_arena_mat(a, QL_CAT_HEAD, m->spec->dtype, 1, gs->n, gs->n, &s->bias[g]));
    }
    return QL_OK;
}

static ql_status carve_frozen(ql_mem *m, ql_arena *a)
{
    const ql_spec *s = m->spec;
    const ql_config *c = &s->model->cfg;
    for (int64_t l = m->lo; l < m->hi; l++) {
        const ql_blob *b = &m->blob[l];
        QL_TRY(ql_tables_carve(b, a, &m->tables[l]));
        QL_TRY(carve_small(m, a, l));
        switch ((ql_store_kind)s->choice.store[l]) {
        case QL_STORE_RESIDENT:
        case QL_STORE_SHARDED: QL_TRY(ql_arena_take(a, QL_CAT_BASE, b->part_bytes, &m->base[l])); break;
        case QL_STORE_RESIDENT16: {
            /* The blob is needed while loading only and passes through a gather slot. */
            int64_t before = a->by_cat[QL_CAT_SCRATCH];
            QL_TRY(ql_scratch_carve(&m->shape, a, &m->own[l]));
            a->by_cat[QL_CAT_BASE] += a->by_cat[QL_CAT_SCRATCH] - before;
            a->by_cat[QL_CAT_SCRATCH] = before;
            m->slot_bytes = ql_max64(m->slot_bytes, b->part_bytes);
            break;
        }
        default: break;
        }
    }
    for (int i = 0; m->slot_bytes && i < QL_GATHER_SLOTS; i++) QL_TRY(ql_arena_take(a, QL_CAT_GATHER, m->slot_bytes, &m->slot[i]));
    QL_TRY(ql_scratch_carve(&m->shape, a, &m->scratch));
    /* Quantising on load works in the largest matrix of the scratch where that is enough, as it is for real models. */
    ql_tensor largest = m->scratch.w[QL_G_GU];
    int64_t need = 0;
    m->temp = largest.data, m->temp_bytes = largest.rows * largest.ld * (int64_t)ql_dtype_size(s->dtype);
    for (int64_t l = m->lo; l < m->hi; l++) need = ql_max64(need, ql_store_temp_bytes(&m->blob[l]));
    if (need > m->temp_bytes) {
        QL_TRY(ql_arena_take(a, QL_CAT_SCRATCH, need, &m->temp));
        m->temp_bytes = need;
    }
    QL_TRY(ql_arena_mat(a, QL_CAT_HEAD, QL_F32, 1, c->head_dim / 2, c->head_dim / 2, &m->freq));
    return ql_mem_has_head(m) ? ql_head_carve(&m->head, &m->shape, a) : QL_OK;
}

static ql_status take_f32(ql_arena *a, ql_cat cat, int64_t n, float **out)
{
    void *p = NULL;
    QL_TRY(ql_arena_take(a, cat, n * 4, &p));
    *out = p;
    return QL_OK;
}

static ql_status carve_states(ql_mem *m, ql_arena *a)
{
    int64_t n = m->spec->state_host ? m->window : m->shard;
    if (m->spec->state == QL_ADAM_F32) {
        QL_TRY(take_f32(a, QL_CAT_OPTIM, n, &m->m));
        return take_f32(a, QL_CAT_OPTIM, n, &m->v);
    }
    void *p = NULL;
    QL_TRY(ql_arena_take(a, QL_CAT_OPTIM, n, &p));
    m->m8 = p;
    QL_TRY(ql_arena_take(a, QL_CAT_OPTIM, n, &p));
    m->v8 = p;
    QL_TRY(take_f32(a, QL_CAT_OPTIM, n / 256, &m->m2));
    QL_TRY(take_f32(a, QL_CAT_OPTIM, n / 256, &m->v2));
    QL_TRY(take_f32(a, QL_CAT_OPTIM, m->small_n, &m->m));
    QL_TRY(take_f32(a, QL_CAT_OPTIM, m->small_n, &m->v));
    QL_TRY(take_f32(a, QL_CAT_OPTIM, 256, &m->code1));
    return take_f32(a, QL_CAT_OPTIM, 256, &m->code2);
}

static ql_status carve_training(ql_mem *m, ql_arena *a)
{
    const ql_spec *s = m->spec;
    void *p = NULL;
    QL_TRY(take_f32(a, QL_CAT_ADAPTER, m->held, &m->adapters));
    QL_TRY(take_f32(a, QL_CAT_WORK, s->choice.g, &m->losses));
    QL_TRY(ql_arena_take(a, QL_CAT_WORK, (int64_t)sizeof(ql_ctl), &p));
    m->ctl = p;
    QL_TRY(ql_arena_take(a, QL_CAT_WORK, 256, &p));
    m->flag = p;
    if (!s->choice.train) return QL_OK;
    for (int i = 0; i < m->grads; i++) QL_TRY(take_f32(a, QL_CAT_GRAD, m->held, &m->grad[i]));
    if (s->choice.world > 1 && !ql_plan_piped(&s->choice)) QL_TRY(take_f32(a, QL_CAT_GRAD, m->padded, &m->exchange));
    QL_TRY(take_f32(a, QL_CAT_OPTIM, m->padded / QL_OPT_BLOCK, &m->parts));
    QL_TRY(take_f32(a, QL_CAT_OPTIM, s->steps, &m->lr));
    return carve_states(m, a);
}

static ql_status carve_stage(ql_mem *m, ql_arena *a, ql_stage *st)
{
    const ql_spec *s = m->spec;
    int64_t t = s->rows, d = s->docs, at = 0;
    struct {
        int64_t *at, bytes;
    } parts[] = {{&st->at_token, 8 * t}, {&st->at_pos, 4 * t},   {&st->at_index, 4 * t},  {&st->at_target, 4 * t}, {&st->at_slot, 4 * t},
                 {&st->at_start, 4 * d}, {&st->at_len, 4 * d},   {&st->at_kstart, 4 * d}, {&st->at_klen, 4 * d}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        *parts[i].at = at;
        at += ql_round_up(parts[i].bytes, 16);
    }
    st->at_rows = ql_round_up(at, 256); /* embedding rows as in the file; on the device they pass through work.a */
    st->bytes = at;
    void *p = NULL;
    QL_TRY(ql_arena_take(a, QL_CAT_WORK, at, &p));
    st->dev = p;
    return QL_OK;
}

static ql_status carve_acts(ql_mem *m, ql_arena *a)
{
    const ql_choice *c = &m->spec->choice;
    int64_t n = layers(m);
    ql_shape *s = &m->shape;
    ql_act all = {0};
    QL_TRY(ql_work_carve(s, a, &m->work));
    /* Activations of the layer at work are work; those that wait for backward are activations. */
    int64_t before = a->by_cat[QL_CAT_ACT];
    QL_TRY(ql_act_carve(s, a, QL_KEEP_ALL, &all));
    m->shared = all;
    a->by_cat[QL_CAT_WORK] += a->by_cat[QL_CAT_ACT] - before;
    a->by_cat[QL_CAT_ACT] = before;
    for (int f = 0; f < m->flights; f++) {
        QL_TRY(carve_stage(m, a, &m->stage[f]));
        ql_tensor *h = &m->h[f * (n + 1)];
        for (int64_t l = m->lo; l <= m->hi; l++) {
            /* Layers whose input need not survive alternate between two buffers: all in eval, those below the lowest
             * adapter, and those whose input rests on the host. */
            int lasting = c->train && l >= s->first && !(l < m->hi && c->save[l]);
            int64_t twin = l - 2;
            if (lasting || twin < m->lo || (c->train && twin >= s->first && !c->save[twin]))
                QL_TRY(ql_act_carve_h(s, a, &h[l]));
            else
                h[l] = h[twin];
        }
        m->dh[f] = m->work.dh;
        if (f == 1 || (f > 1 && !ql_plan_piped(c)))
            QL_TRY(ql_arena_mat(a, QL_CAT_ACT, s->res, s->rows, s->cfg->hidden, m->work.dh.ld, &m->dh[f]));
        for (int64_t l = ql_max64(s->first, m->lo); c->train && l < m->hi; l++)
            QL_TRY(ql_act_carve(s, a, (ql_keep)c->keep[l], &m->act[f * n + l]));
    }
    for (int64_t l = m->lo; l < m->hi; l++)
        if (ql_plan_ahead(c, m->rank, (int)l)) QL_TRY(ql_act_carve_missing(s, a, (ql_keep)c->keep[l], &m->ahead[l]));
    return QL_OK;
}

ql_status ql_mem_carve(ql_mem *m, ql_arena *a)
{
    QL_TRY(carve_frozen(m, a));
    QL_TRY(carve_training(m, a));
    QL_TRY(carve_acts(m, a));
    return ql_arena_take(a, QL_CAT_WORK, QL_WORK_BYTES, &m->op_work);
}

ql_status ql_mem_count(const ql_spec *spec, int rank, ql_arena *out)
{
    ql_mem *m = NULL;
    ql_arena a = {0};
    QL_TRY(ql_mem_open(spec, rank, &m));
    ql_status st = ql_mem_carve(m, &a);
    ql_mem_close(m);
    if (st == QL_OK) *out = a;
    return st;
}

/* ---- host memory ------------------------------------------------------------------------------ */

int64_t ql_mem_host_at(const ql_mem *m, int64_t layer)
{
    int64_t at = 0;
    for (int64_t l = 0; l < layer; l++)
        if (m->spec->choice.store[l] == QL_STORE_HOST) at += m->blob[l].part_bytes;
    return at;
}

int64_t ql_mem_host_base(const ql_mem *m)
{
    return ql_mem_host_at(m, layers(m));
}

int64_t ql_mem_host_rank(const ql_mem *m)
{
    const ql_spec *s = m->spec;
    int64_t bytes = 0, h = s->rows * s->model->cfg.hidden * (int64_t)ql_dtype_size(s->res);
    for (int64_t l = m->lo; l < m->hi; l++)
        if (s->choice.train && s->choice.save[l]) bytes = ql_min64(bytes + m->flights * h, INT64_MAX / 64); /* no machine has that: enough to say so */
    if (s->choice.train && s->state_host) bytes += s->state == QL_ADAM_F32 ? 8 * m->shard : 2 * m->shard + m->shard / 32;
    return bytes;
}

ql_status ql_mem_bytes(const ql_spec *spec, int64_t *device, int64_t *host)
{
    /* Without a pipeline rank 0 is as full as any: shards are equal, and its state runs cover whole blocks like the others'. */
    int world = spec->choice.world, ranks = ql_plan_piped(&spec->choice) ? world : 1;
    *device = *host = 0;
    for (int r = 0; r < ranks; r++) {
        ql_mem *m = NULL;
        ql_arena a = {0};
        QL_TRY(ql_mem_open(spec, r, &m));
        ql_status st = ql_mem_carve(m, &a);
        *device = ql_max64(*device, a.used);
        *host += world / ranks * ql_mem_host_rank(m) + (r == 0 ? ql_mem_host_base(m) : 0);
        ql_mem_close(m);
        QL_TRY(st);
    }
    return QL_OK;
}

ql_act *ql_mem_act(ql_mem *m, int flight, int64_t layer)
{
    return &m->act[flight * layers(m) + layer];
}

ql_tensor ql_mem_h(const ql_mem *m, int flight, int64_t layer)
{
    return m->h[flight * (layers(m) + 1) + layer];
}

ql_tensor ql_mem_dh(const ql_mem *m, int flight, int mb)
{
    if (ql_plan_piped(&m->spec->choice)) return m->dh[mb % (int)ql_min64(2, m->flights)];
    return m->dh[flight];
}

int ql_mem_has_head(const ql_mem *m)
{
    return !ql_plan_piped(&m->spec->choice) || m->rank == m->spec->choice.world - 1;
}

int ql_mem_has_embedding(const ql_mem *m)
{
    return !ql_plan_piped(&m->spec->choice) || m->rank == 0;
}
