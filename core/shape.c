/* Sizes: the groups of linears, and the buffers that layers need. */
#include "core/layer.h"

#include <string.h>

enum { COL_PAD = 8 }; /* adapter columns start at multiples of 8: 16 bytes in 16 bit */

static const struct {
    ql_linear first;
    int count;
} groups[QL_GROUPS] = {
    [QL_G_QKV] = {QL_Q, 3}, [QL_G_O] = {QL_O, 1}, [QL_G_GU] = {QL_GATE, 2}, [QL_G_DOWN] = {QL_DOWN, 1}};

static void group_init(ql_shape *s, ql_group g)
{
    ql_group_shape *gs = &s->group[g];
    memset(gs, 0, sizeof *gs);
    gs->first = groups[g].first;
    gs->count = groups[g].count;
    for (int m = 0; m < gs->count; m++) {
        int64_t n, k;
        ql_linear_shape(s->cfg, gs->first + (ql_linear)m, &n, &k);
        gs->row[m] = gs->n;
        gs->n += n;
        gs->k = k;
        for (int64_t i = 0; i < s->cfg->layers; i++) {
            const ql_lora_target *t = s->lora ? ql_lora_find(s->lora, i, gs->first + (ql_linear)m) : NULL;
            int64_t rank = t ? t->r : 0;
            if (i > 0 && rank != gs->rank[m]) s->mixed_ranks = 1;
            gs->rank[m] = ql_max64(gs->rank[m], rank);
        }
        gs->col[m] = gs->r;
        gs->r += ql_round_up(gs->rank[m], COL_PAD);
    }
}

ql_status ql_shape_init(ql_shape *s, const ql_config *cfg, const ql_lora *lora, ql_dtype dtype, ql_dtype res,
                        double dropout, uint64_t seed, int64_t rows)
{
    memset(s, 0, sizeof *s);
    if (cfg->head_dim > 128 || cfg->head_dim % 8)
        QL_FAIL(QL_ENOSUP, "head size %lld: attention takes multiples of 8 up to 128", (long long)cfg->head_dim);
    if (rows <= 0) QL_FAIL(QL_EINTERNAL, "micro-batch of %lld rows", (long long)rows);
    s->cfg = cfg, s->lora = lora, s->dtype = dtype, s->res = res;
    s->drop = (float)dropout, s->seed = seed, s->rows = rows;
    for (int g = 0; g < QL_GROUPS; g++) group_init(s, (ql_group)g);
    s->first = lora && lora->count > 0 ? lora->target[0].layer : cfg->layers;
    return QL_OK;
}

static int64_t heads_dim(const ql_shape *s)
{
    return s->cfg->heads * s->cfg->head_dim;
}

static int64_t qk_dim(const ql_shape *s)
{
    return (s->cfg->heads + s->cfg->kv_heads) * s->cfg->head_dim;
}

ql_status ql_act_carve_h(const ql_shape *s, ql_arena *a, ql_tensor *out)
{
    return ql_arena_mat(a, QL_CAT_ACT, s->res, s->rows, s->cfg->hidden, s->cfg->hidden, out);
}

static ql_status carve_gu(const ql_shape *s, ql_arena *a, ql_act *out)
{
    const ql_group_shape *g = &s->group[QL_G_GU];
    return ql_arena_mat(a, QL_CAT_ACT, s->dtype, s->rows, g->n, g->n + g->r, &out->gu);
}

ql_status ql_act_carve_missing(const ql_shape *s, ql_arena *a, ql_keep keep, ql_act *out)
{
    if (keep == QL_KEEP_NO_MLP) return carve_gu(s, a, out);
    return keep == QL_KEEP_INPUT ? ql_act_carve(s, a, QL_KEEP_ALL, out) : QL_OK;
}

ql_status ql_act_carve(const ql_shape *s, ql_arena *a, ql_keep keep, ql_act *out)
{
    const ql_config *c = s->cfg;
    const ql_group_shape *g = s->group;
    int64_t t = s->rows, hd = heads_dim(s);
    if (keep == QL_KEEP_INPUT) return QL_OK;
    QL_TRY(ql_arena_mat(a, QL_CAT_ACT, s->dtype, t, g[QL_G_QKV].n, g[QL_G_QKV].n, &out->qkv));
    if (c->qk_norm) QL_TRY(ql_arena_mat(a, QL_CAT_ACT, s->dtype, t, qk_dim(s), qk_dim(s), &out->qk));
    QL_TRY(ql_arena_mat(a, QL_CAT_ACT, s->dtype, t, hd, hd + g[QL_G_O].r, &out->o));
    QL_TRY(ql_arena_mat(a, QL_CAT_ACT, QL_F32, t, c->heads, c->heads, &out->lse));
    QL_TRY(ql_arena_mat(a, QL_CAT_ACT, s->res, t, c->hidden, c->hidden, &out->h2));
    for (int i = 0; i < QL_GROUPS; i++)
        if (i != QL_G_O && g[i].r)
            QL_TRY(ql_arena_mat(a, QL_CAT_ACT, s->dtype, t, g[i].r, g[i].r, &out->xa[i]));
    return keep == QL_KEEP_ALL ? carve_gu(s, a, out) : QL_OK;
}

ql_status ql_work_carve(const ql_shape *s, ql_arena *a, ql_work *w)
{
    const ql_group_shape *g = s->group;
    int64_t t = s->rows, c = s->cfg->hidden, f = s->cfg->ffn, hd = heads_dim(s), rmax = 0, kmax = 0;
    int64_t ext = ql_max64(g[QL_G_O].r, g[QL_G_DOWN].r), xr = ql_max64(g[QL_G_QKV].r, g[QL_G_GU].r);
    for (int i = 0; i < QL_GROUPS; i++) {
        rmax = ql_max64(rmax, g[i].r);
        kmax = ql_max64(kmax, g[i].k);
    }
    QL_TRY(ql_arena_mat(a, QL_CAT_WORK, s->dtype, t, c, c + xr, &w->x));
    QL_TRY(ql_arena_mat(a, QL_CAT_WORK, s->dtype, t, f, f + g[QL_G_DOWN].r, &w->a));
    QL_TRY(ql_arena_mat(a, QL_CAT_WORK, s->res, t, c, c + ext, &w->dh));
    w->dy = w->dh;
    if (s->res != s->dtype) QL_TRY(ql_arena_mat(a, QL_CAT_WORK, s->dtype, t, c, c + ext, &w->dy));
    QL_TRY(ql_arena_mat(a, QL_CAT_WORK, s->dtype, t, g[QL_G_QKV].n, g[QL_G_QKV].n + g[QL_G_QKV].r, &w->dqkv));
    QL_TRY(ql_arena_mat(a, QL_CAT_WORK, s->dtype, t, ql_max64(c, hd), ql_max64(c, hd), &w->dx));
    QL_TRY(ql_arena_mat(a, QL_CAT_WORK, QL_F32, t, s->cfg->heads, s->cfg->heads, &w->delta));
    w->xd = w->dxa = QL_NONE;
    if (s->drop > 0) {
        QL_TRY(ql_arena_mat(a, QL_CAT_WORK, s->dtype, t, kmax, kmax, &w->xd));
        QL_TRY(ql_arena_mat(a, QL_CAT_WORK, s->dtype, t, kmax, kmax, &w->dxa));
    }
    return QL_OK;
}

ql_status ql_scratch_carve(const ql_shape *s, ql_arena *a, ql_scratch *out)
{
    for (int i = 0; i < QL_GROUPS; i++) {
        const ql_group_shape *g = &s->group[i];
        QL_TRY(ql_arena_mat(a, QL_CAT_SCRATCH, s->dtype, g->n + g->r, g->k + g->r, g->k + g->r, &out->w[i]));
    }
    out->layer = -1;
    out->version = -1;
    return QL_OK;
}
