#include "core/rank.h"

#include "core/nf4.h"

#include <stdlib.h>
#include <string.h>

static ql_tensor f32(float *p, int64_t n)
{
    return ql_vec(p, QL_F32, n);
}

/* ---- reduction -------------------------------------------------------------------------------- */

/* Each rank's stack has one buffer, the sum of its subtree. All-to-all moves shard s of every rank to rank s; the parts are then added
 * as the tree above the ranks has them, leaving out ranks without work. No collective adds. */
ql_status ql_optim_reduce(ql_rank *r, const uint8_t *present)
{
    ql_mem *m = r->mem;
    int world = r->set.world;
    ql_tensor part[QL_MAX_WORLD];
    int level[QL_MAX_WORLD], depth = 0;
    if (world == 1) return QL_OK;
    /* A rank without work joins with whatever its buffer holds; nobody adds it. */
    QL_TRY(r->set.be->comm->all_to_all(r->comm, r->compute, f32(m->exchange, m->padded), f32(m->grad[0], m->padded)));
    for (int i = 0; i < world; i++) {
        if (!present[i]) continue;
        part[depth] = f32(m->exchange + i * m->shard, m->shard);
        level[depth++] = 0;
        while (depth > 1 && level[depth - 1] == level[depth - 2]) {
            QL_TRY(ql_add(&r->q, part[depth - 2], part[depth - 2], part[depth - 1]));
            level[--depth - 1]++;
        }
    }
    for (; depth > 1; depth--) QL_TRY(ql_add(&r->q, part[depth - 2], part[depth - 2], part[depth - 1]));
    ql_tensor mine = f32(m->grad[0] + r->set.rank * m->shard, m->shard);
    return r->set.be->dev->copy(r->compute, mine.data, part[0].data, m->shard * 4);
}

/* ---- step ------------------------------------------------------------------------------------- */

/* AdamW on [at, at + n) of the flat vector with states at those offsets of their buffers. */
static ql_status adam_run(ql_rank *r, int64_t at, int64_t n, ql_state_kind kind, int64_t state, int64_t state8)
{
    ql_mem *m = r->mem;
    ql_tensor p = f32(m->adapters + at - m->held_at, n), g = f32(m->grad[0] + at - m->held_at, n);
    if (kind == QL_ADAM_F32)
        return ql_adamw(&r->q, p, f32(m->m + state, n), f32(m->v + state, n), g, m->ctl, &r->optim.adam);
    return ql_adamw8(&r->q, p, ql_vec(m->m8 + state8, QL_U8, n), ql_vec(m->v8 + state8, QL_U8, n), f32(m->m2 + state8 / 256, n / 256),
                     f32(m->v2 + state8 / 256, n / 256), g, f32(m->code1, 256), f32(m->code2, 256), m->ctl, &r->optim.adam);
}

/* Offloaded states: a piece of this rank's shard comes to the device, is used by the same op, and goes back. */
typedef struct {
    void *dev;
    char *host;
    int64_t unit; /* bytes per 256 elements */
} stream_part;

static int host_parts(const ql_rank *r, stream_part out[4])
{
    ql_mem *m = r->mem;
    char *h = r->host_state;
    int64_t n = m->shard;
    if (r->spec->state == QL_ADAM_F32) {
        out[0] = (stream_part){m->m, h, 1024};
        out[1] = (stream_part){m->v, h + 4 * n, 1024};
        return 2;
    }
    out[0] = (stream_part){m->m8, h, 256};
    out[1] = (stream_part){m->v8, h + n, 256};
    out[2] = (stream_part){m->m2, h + 2 * n, 4};
    out[3] = (stream_part){m->v2, h + 2 * n + n / 64, 4};
    return 4;
}

static ql_status stream_window(ql_rank *r, int64_t from, int64_t n, int to_device)
{
    stream_part p[4];
    int k = host_parts(r, p);
    for (int i = 0; i < k; i++) {
        char *h = p[i].host + from / 256 * p[i].unit;
        int64_t bytes = n / 256 * p[i].unit;
        QL_TRY(to_device ? r->set.be->dev->copy(r->compute, p[i].dev, h, bytes) : r->set.be->dev->copy(r->compute, h, p[i].dev, bytes));
    }
    return QL_OK;
}

static ql_status adam_offloaded(ql_rank *r)
{
    ql_mem *m = r->mem;
    int64_t base = m->mine;
    for (int64_t from = 0; from < m->shard; from += m->window) {
        int64_t end = ql_min64(m->shard, from + m->window);
        QL_TRY(stream_window(r, from, end - from, 1));
        for (int i = 0; i < m->run_count; i++) {
            const ql_state_run *run = &m->runs[i];
            int64_t a = ql_max64(run->at, base + from), b = ql_min64(run->at + run->n, base + end);
            int small = r->spec->state == QL_ADAM_8BIT && run->kind == QL_ADAM_F32;
            if (a >= b) continue;
            QL_TRY(adam_run(r, a, b - a, run->kind, small ? run->small + a - run->at : a - base - from, a - base - from));
        }
        QL_TRY(stream_window(r, from, end - from, 0));
    }
    return QL_OK;
}

static ql_status adam_resident(ql_rank *r)
{
    ql_mem *m = r->mem;
    int64_t base = m->mine;
    for (int i = 0; i < m->run_count; i++) {
        const ql_state_run *run = &m->runs[i];
        int small = r->spec->state == QL_ADAM_8BIT && run->kind == QL_ADAM_F32;
        QL_TRY(adam_run(r, run->at, run->n, run->kind, small ? run->small : run->at - base, run->at - base));
    }
    return QL_OK;
}

ql_status ql_optim_step(ql_rank *r)
{
    ql_mem *m = r->mem;
    int64_t blocks = m->shard / QL_OPT_BLOCK, at = m->mine / QL_OPT_BLOCK, all = m->padded / QL_OPT_BLOCK;
    int piped = ql_plan_piped(&r->spec->choice);
    const ql_comm_table *comm = r->set.be->comm;
    if (piped) QL_TRY(r->set.be->dev->set(r->compute, m->parts, 0, all * 4));
    if (blocks) QL_TRY(ql_norm_parts(&r->q, f32(m->parts + at, blocks), f32(m->grad[0] + m->mine - m->held_at, m->shard)));
    /* Stages have unequal parts: everybody's bits and zeros, added as integers. */
    if (piped)
        QL_TRY(comm->all_sum(r->comm, r->compute, ql_vec(m->parts, QL_I32, all)));
    else if (r->set.world > 1)
        QL_TRY(comm->all_gather(r->comm, r->compute, f32(m->parts, all), f32(m->parts + at, blocks)));
    /* The tree over all real blocks, on every rank alike: one norm, one decision to skip. */
    QL_TRY(ql_clip_step(&r->q, m->ctl, f32(m->parts, m->n / QL_OPT_BLOCK), &r->optim.clip));
    QL_TRY(r->spec->state_host ? adam_offloaded(r) : adam_resident(r));
    if (r->set.world == 1 || piped) return QL_OK;
    return comm->all_gather(r->comm, r->compute, f32(m->adapters, m->padded), f32(m->adapters + m->mine, m->shard));
}

ql_status ql_optim_warm(ql_rank *r)
{
    ql_mem *m = r->mem;
    int64_t blocks = m->shard / QL_OPT_BLOCK, at = m->mine / QL_OPT_BLOCK;
    r->optim = (ql_optim){.clip = {.lr = m->lr, .n_lr = 1}};
    ql_tensor g = f32(m->grad[0] + m->mine - m->held_at, m->shard);
    QL_TRY(r->set.be->dev->set(r->compute, m->parts, 0, m->padded / QL_OPT_BLOCK * 4));
    if (blocks) QL_TRY(ql_norm_parts(&r->q, f32(m->parts + at, blocks), g));
    if (blocks) QL_TRY(ql_add(&r->q, g, g, g));
    QL_TRY(ql_clip_step(&r->q, m->ctl, f32(m->parts, m->n / QL_OPT_BLOCK), &r->optim.clip));
    return r->spec->state_host ? adam_offloaded(r) : adam_resident(r);
}

/* ---- states ----------------------------------------------------------------------------------- */

ql_status ql_optim_init(ql_rank *r, const ql_optim *o, const float *lr, float loss_scale)
{
    const ql_dev_table *dev = r->set.be->dev;
    ql_mem *m = r->mem;
    float code1[256], code2[256];
    ql_ctl ctl = {.loss_scale = loss_scale};
    int64_t n = r->spec->state_host ? m->window : m->shard;
    r->optim = *o;
    r->optim.clip.lr = m->lr;
    r->optim.clip.n_lr = r->spec->steps;
    QL_TRY(dev->copy(r->compute, m->lr, lr, r->spec->steps * 4));
    QL_TRY(dev->copy(r->compute, m->ctl, &ctl, (int64_t)sizeof ctl));
    QL_TRY(dev->set(r->compute, m->parts, 0, m->padded / QL_OPT_BLOCK * 4));
    if (r->spec->state == QL_ADAM_F32) {
        QL_TRY(dev->set(r->compute, m->m, 0, n * 4));
        QL_TRY(dev->set(r->compute, m->v, 0, n * 4));
    } else {
        /* bitsandbytes starts both 8-bit states at code 0 with scale 0: every value is 0. */
        ql_dynamic_map_signed(code1);
        ql_dynamic_map_unsigned(code2);
        QL_TRY(dev->copy(r->compute, m->code1, code1, (int64_t)sizeof code1));
        QL_TRY(dev->copy(r->compute, m->code2, code2, (int64_t)sizeof code2));
        QL_TRY(dev->set(r->compute, m->m8, 0, n));
        QL_TRY(dev->set(r->compute, m->v8, 0, n));
        QL_TRY(dev->set(r->compute, m->m2, 0, n / 64));
        QL_TRY(dev->set(r->compute, m->v2, 0, n / 64));
        QL_TRY(dev->set(r->compute, m->m, 0, m->small_n * 4));
        QL_TRY(dev->set(r->compute, m->v, 0, m->small_n * 4));
    }
    if (r->host_state) memset(r->host_state, 0, (size_t)r->host_state_bytes); /* a stage may learn nothing */
    r->version++;
    return dev->sync(r->compute);
}

void ql_optim_state_free(ql_optim_state *s)
{
    if (!s) return;
    free(s->m);
    free(s->v);
    free(s->m2);
    free(s->v2);
    free(s->m8);
    free(s->v8);
    free(s);
}

ql_status ql_optim_state_new(const ql_rank *r, ql_optim_state **out)
{
    const ql_mem *m = r->mem;
    ql_optim_state *s = calloc(1, sizeof *s);
    if (!s) QL_FAIL(QL_ENOMEM, "no memory for optimizer states");
    s->n = m->shard;
    s->small_n = m->small_n;
    size_t n = (size_t)(r->spec->state == QL_ADAM_F32 ? m->shard : m->small_n);
    s->m = calloc(n + 1, 4);
    s->v = calloc(n + 1, 4);
    int bad = !s->m || !s->v;
    if (r->spec->state == QL_ADAM_8BIT) {
        s->m8 = calloc((size_t)m->shard + 1, 1);
        s->v8 = calloc((size_t)m->shard + 1, 1);
        s->m2 = calloc((size_t)m->shard / 256 + 1, 4);
        s->v2 = calloc((size_t)m->shard / 256 + 1, 4);
        bad |= !s->m8 || !s->v8 || !s->m2 || !s->v2;
    }
    if (bad) {
        ql_optim_state_free(s);
        QL_FAIL(QL_ENOMEM, "no memory for the optimizer states of %lld adapter elements", (long long)m->shard);
    }
    *out = s;
    return QL_OK;
}

/* Pairs (device or host_state, host buffer, bytes) of everything a state holds. */
typedef struct {
    void *there, *here;
    int64_t bytes;
} pair;

static int pairs(const ql_rank *r, const ql_optim_state *s, pair out[6])
{
    const ql_mem *m = r->mem;
    stream_part p[4];
    int k = 0, host = r->spec->state_host ? host_parts(r, p) : 0;
    if (r->spec->state == QL_ADAM_F32) {
        out[k++] = (pair){host ? (void *)p[0].host : m->m, s->m, s->n * 4};
        out[k++] = (pair){host ? (void *)p[1].host : m->v, s->v, s->n * 4};
        return k;
    }
    out[k++] = (pair){host ? (void *)p[0].host : m->m8, s->m8, s->n};
    out[k++] = (pair){host ? (void *)p[1].host : m->v8, s->v8, s->n};
    out[k++] = (pair){host ? (void *)p[2].host : m->m2, s->m2, s->n / 64};
    out[k++] = (pair){host ? (void *)p[3].host : m->v2, s->v2, s->n / 64};
    out[k++] = (pair){m->m, s->m, s->small_n * 4};
    out[k++] = (pair){m->v, s->v, s->small_n * 4};
    return k;
}

ql_status ql_optim_get(ql_rank *r, ql_optim_state *s)
{
    pair p[6];
    int n = pairs(r, s, p);
    for (int i = 0; i < n; i++) QL_TRY(r->set.be->dev->copy(r->compute, p[i].here, p[i].there, p[i].bytes));
    QL_TRY(r->set.be->dev->copy(r->compute, &s->ctl, r->mem->ctl, (int64_t)sizeof s->ctl));
    return r->set.be->dev->sync(r->compute);
}

ql_status ql_optim_put(ql_rank *r, const ql_optim_state *s)
{
    pair p[6];
    int n = pairs(r, s, p);
    for (int i = 0; i < n; i++) QL_TRY(r->set.be->dev->copy(r->compute, p[i].there, p[i].here, p[i].bytes));
    QL_TRY(r->set.be->dev->copy(r->compute, r->mem->ctl, &s->ctl, (int64_t)sizeof s->ctl));
    return r->set.be->dev->sync(r->compute);
}
