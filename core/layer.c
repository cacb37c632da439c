#include "core/layer.h"

static ql_tensor top(ql_tensor t, int64_t rows)
{
    t.rows = rows;
    return t;
}

/* Rows [0, T) and columns [c, c + n) of a buffer that may be wider than its view. */
static ql_tensor part(ql_tensor t, int64_t rows, int64_t c, int64_t n)
{
    return ql_cols(top(t, rows), c, n);
}

/* ---- the scratch ------------------------------------------------------------------------------ */

static ql_group group_of(const ql_shape *s, ql_linear l)
{
    for (int g = 0; g < QL_GROUPS; g++)
        if (l >= s->group[g].first && l < s->group[g].first + (ql_linear)s->group[g].count) return (ql_group)g;
    return QL_G_QKV;
}

ql_tensor ql_scratch_base(const ql_shape *s, const ql_scratch *w, ql_linear l)
{
    ql_group g = group_of(s, l);
    const ql_group_shape *gs = &s->group[g];
    int m = (int)(l - gs->first);
    int64_t next = m + 1 < gs->count ? gs->row[m + 1] : gs->n;
    return ql_cols(ql_rows(w->w[g], gs->row[m], next - gs->row[m]), 0, gs->k);
}

/* A list of conversions that go as few launches. */
typedef struct {
    ql_tensor out[QL_MAX_CONVERT], in[QL_MAX_CONVERT];
    int n;
} conversions;

static ql_status convert_later(const ql_queue *q, conversions *c, ql_tensor out, ql_tensor in)
{
    if (c->n == QL_MAX_CONVERT) {
        QL_TRY(ql_convert_all(q, c->out, c->in, c->n));
        c->n = 0;
    }
    c->out[c->n] = out, c->in[c->n++] = in;
    return QL_OK;
}

/* A (r, K) into rows N + col, B (N_m, r) into the member's rows at columns K + col. What they do not cover is zero since
 * the scratch was taken; only where ranks differ between layers is it cleared again. */
ql_status ql_scratch_adapters(const ql_shape *s, const ql_queue *q, ql_scratch *w, int64_t layer, float *flat)
{
    conversions all = {.n = 0};
    for (int i = 0; i < QL_GROUPS; i++) {
        const ql_group_shape *g = &s->group[i];
        if (!g->r) continue;
        if (s->mixed_ranks) {
            QL_TRY(ql_fill(q, ql_cols(ql_rows(w->w[i], g->n, g->r), 0, g->k), 0));
            QL_TRY(ql_fill(q, ql_cols(ql_rows(w->w[i], 0, g->n), g->k, g->r), 0));
        }
        for (int m = 0; m < g->count; m++) {
            const ql_lora_target *t = ql_lora_find(s->lora, layer, g->first + (ql_linear)m);
            if (!t) continue;
            ql_tensor a = ql_cols(ql_rows(w->w[i], g->n + g->col[m], t->r), 0, g->k);
            ql_tensor b = ql_cols(ql_rows(w->w[i], g->row[m], t->n), g->k + g->col[m], t->r);
            QL_TRY(convert_later(q, &all, a, ql_mat(flat + t->a - s->flat_at, QL_F32, t->r, t->k, t->k)));
            QL_TRY(convert_later(q, &all, b, ql_mat(flat + t->b - s->flat_at, QL_F32, t->n, t->r, t->r)));
        }
    }
    return ql_convert_all(q, all.out, all.in, all.n);
}

/* ---- adapters --------------------------------------------------------------------------------- */

/* Members of a group that stand side by side with one scale are one product. Calls f for each such run of adapter columns. */
typedef struct {
    int64_t col, cols;
    float scale;
} run;

static int scale_runs(const ql_layer *l, ql_group g, run out[3])
{
    const ql_group_shape *gs = &l->shape->group[g];
    int n = 0;
    for (int m = 0; m < gs->count; m++) {
        const ql_lora_target *t = ql_lora_find(l->shape->lora, l->layer, gs->first + (ql_linear)m);
        int64_t end = m + 1 < gs->count ? gs->col[m + 1] : gs->r;
        if (end == gs->col[m]) continue;
        float scale = t ? t->scale : n ? out[n - 1].scale : 1;
        if (n && out[n - 1].scale == scale)
            out[n - 1].cols = end - out[n - 1].col;
        else
            out[n++] = (run){gs->col[m], end - gs->col[m], scale};
    }
    return n;
}

static int dropping(const ql_layer *l)
{
    return l->shape->drop > 0 && l->mb->train;
}

static ql_drop drop_key(const ql_layer *l, ql_group g)
{
    ql_drop d = {l->shape->seed, l->mb->step, (uint32_t)l->layer, (uint32_t)g, l->shape->drop, l->mb->token};
    return d;
}

/* What the group's adapters read: x (T, K), or its dropped copy. */
static ql_status adapter_input(const ql_layer *l, ql_group g, ql_tensor x, ql_tensor *out)
{
    *out = x;
    if (!dropping(l)) return QL_OK;
    ql_drop d = drop_key(l, g);
    *out = part(l->work->xd, x.rows, 0, x.cols);
    return ql_dropout(l->q, *out, x, &d);
}

/* xa (T, R) = s · drop(x) (T, K) Aᵀ, written behind x's K columns. */
static ql_status adapter_down(const ql_layer *l, ql_group g, ql_tensor x)
{
    const ql_group_shape *gs = &l->shape->group[g];
    ql_tensor in, rows = ql_rows(l->w->w[g], gs->n, gs->r);
    run r[3];
    if (!gs->r) return QL_OK;
    QL_TRY(adapter_input(l, g, part(x, x.rows, 0, gs->k), &in));
    int n = scale_runs(l, g, r);
    for (int i = 0; i < n; i++)
        QL_TRY(ql_matmul(l->q, part(x, x.rows, gs->k + r[i].col, r[i].cols), in,
                         part(ql_rows(rows, r[i].col, r[i].cols), r[i].cols, 0, gs->k), QL_NT, r[i].scale, QL_NONE,
                         QL_NONE));
    return QL_OK;
}

/* The same of a few rows: y = x Wᵀ [+ res] [+ bias] with W as it rests, then y += xa Bᵀ. */
static ql_status project_few(const ql_layer *l, ql_group g, ql_tensor y, ql_tensor x, ql_tensor res)
{
    const ql_group_shape *gs = &l->shape->group[g];
    QL_TRY(ql_nf4_matmul(l->q, y, part(x, x.rows, 0, gs->k), &l->packed[gs->first], gs->count, res, l->small->bias[g]));
    if (!gs->r) return QL_OK;
    return ql_matmul(l->q, y, part(x, x.rows, gs->k, gs->r), part(l->w->w[g], gs->n, gs->k, gs->r), QL_NT, 1, y, QL_NONE);
}

/* y (T, N) = [x | xa] [W | B]ᵀ [+ res] [+ bias]. x has its adapter columns filled. */
static ql_status project(const ql_layer *l, ql_group g, ql_tensor y, ql_tensor x, ql_tensor res)
{
    const ql_group_shape *gs = &l->shape->group[g];
    if (l->packed) return project_few(l, g, y, x, res);
    return ql_matmul(l->q, y, part(x, x.rows, 0, gs->k + gs->r),
                     part(l->w->w[g], gs->n, 0, gs->k + gs->r), QL_NT, 1, res, l->small->bias[g]);
}

/* dx (T, K) = dy W + drop(dyb A), dyb (T, R) = s · dy B behind dy's columns: [dy | dyb] [W ; A] in one product where nothing is
 * dropped. dx == NONE: only dyb. */
static ql_status project_dx(const ql_layer *l, ql_group g, ql_tensor dx, ql_tensor dy)
{
    const ql_group_shape *gs = &l->shape->group[g];
    run r[3];
    int n = scale_runs(l, g, r);
    for (int i = 0; i < n; i++)
        QL_TRY(ql_matmul(l->q, part(dy, dy.rows, gs->n + r[i].col, r[i].cols), part(dy, dy.rows, 0, gs->n),
                         part(l->w->w[g], gs->n, gs->k + r[i].col, r[i].cols), QL_NN, r[i].scale, QL_NONE, QL_NONE));
    if (!ql_tensor_set(dx)) return QL_OK;
    if (!dropping(l) || !gs->r)
        return ql_matmul(l->q, dx, part(dy, dy.rows, 0, gs->n + gs->r), part(l->w->w[g], gs->n + gs->r, 0, gs->k), QL_NN, 1,
                         QL_NONE, QL_NONE);
    ql_tensor dxa = part(l->work->dxa, dy.rows, 0, gs->k);
    ql_drop d = drop_key(l, g);
    QL_TRY(ql_matmul(l->q, dx, part(dy, dy.rows, 0, gs->n), part(l->w->w[g], gs->n, 0, gs->k), QL_NN, 1, QL_NONE, QL_NONE));
    QL_TRY(ql_matmul(l->q, dxa, part(dy, dy.rows, gs->n, gs->r),
                     part(ql_rows(l->w->w[g], gs->n, gs->r), gs->r, 0, gs->k), QL_NN, 1, QL_NONE, QL_NONE));
    return ql_dropout_add(l->q, dx, dxa, &d);
}

/* dA (r, K) += dybᵀ drop(x);  dB (N, r) += dyᵀ xa (xa carries the scale). x (T, K), dy with dyb behind it, xa (T, R). */
static ql_status adapter_grad(const ql_layer *l, ql_group g, ql_tensor x, ql_tensor dy, ql_tensor xa, float *grad)
{
    const ql_group_shape *gs = &l->shape->group[g];
    int64_t from = l->shape->flat_at;
    ql_tensor in;
    if (!gs->r) return QL_OK;
    QL_TRY(adapter_input(l, g, x, &in));
    for (int m = 0; m < gs->count; m++) {
        const ql_lora_target *t = ql_lora_find(l->shape->lora, l->layer, gs->first + (ql_linear)m);
        if (!t) continue;
        ql_tensor da = ql_mat(grad + t->a - from, QL_F32, t->r, t->k, t->k), db = ql_mat(grad + t->b - from, QL_F32, t->n, t->r, t->r);
        QL_TRY(ql_matmul(l->q, da, part(dy, dy.rows, gs->n + gs->col[m], t->r), in, QL_TN, 1, da, QL_NONE));
        QL_TRY(ql_matmul(l->q, db, part(dy, dy.rows, gs->row[m], t->n), part(xa, dy.rows, gs->col[m], t->r), QL_TN, 1, db,
                         QL_NONE));
    }
    return QL_OK;
}

/* ---- attention -------------------------------------------------------------------------------- */

static ql_attn attn_args(const ql_layer *l)
{
    const ql_config *c = l->shape->cfg;
    const ql_micro *mb = l->mb;
    int cached = ql_tensor_set(l->cache_k);
    ql_attn a = {.heads = c->heads,
                 .kv_heads = c->kv_heads,
                 .head_dim = c->head_dim,
                 .window = ql_config_window(c, l->layer),
                 .scale = (float)(1.0 / __builtin_sqrt((double)c->head_dim)),
                 .docs = mb->docs,
                 .q_start = mb->start,
                 .q_len = mb->len,
                 .k_start = cached ? mb->k_start : mb->start,
                 .k_len = cached ? mb->k_len : mb->len,
                 .q_max = mb->longest,
                 .k_max = cached ? mb->k_longest : mb->longest};
    return a;
}

typedef struct {
    ql_tensor q, k, v, qk; /* views of (T, (H + 2G)·D) */
} heads;

static heads split(const ql_layer *l, ql_tensor qkv)
{
    const ql_config *c = l->shape->cfg;
    int64_t hd = c->heads * c->head_dim, gd = c->kv_heads * c->head_dim, t = l->mb->rows;
    heads h = {part(qkv, t, 0, hd), part(qkv, t, hd, gd), part(qkv, t, hd + gd, gd), part(qkv, t, 0, hd + gd)};
    return h;
}

/* From h to o: x = norm(h); [q k v] = x W; norm of q and k where the model has it; rotation; attention. */
static ql_status attention_part(const ql_layer *l, ql_act *act)
{
    const ql_shape *s = l->shape;
    const ql_config *c = s->cfg;
    int64_t t = l->mb->rows, hd = c->heads * c->head_dim;
    ql_tensor x = top(l->work->x, t), qkv = top(act->qkv, t);
    QL_TRY(ql_rmsnorm(l->q, x, top(act->h, t), l->small->norm_attn, (float)c->eps));
    QL_TRY(adapter_down(l, QL_G_QKV, x));
    QL_TRY(project(l, QL_G_QKV, qkv, x, QL_NONE));
    if (ql_tensor_set(act->xa[QL_G_QKV]))
        QL_TRY(ql_convert(l->q, top(act->xa[QL_G_QKV], t), part(x, t, s->group[QL_G_QKV].k, s->group[QL_G_QKV].r)));
    heads h = split(l, qkv);
    if (c->qk_norm) {
        if (ql_tensor_set(act->qk)) QL_TRY(ql_convert(l->q, top(act->qk, t), h.qk));
        QL_TRY(ql_rmsnorm(l->q, h.q, h.q, l->small->q_norm, (float)c->eps));
        QL_TRY(ql_rmsnorm(l->q, h.k, h.k, l->small->k_norm, (float)c->eps));
    }
    QL_TRY(ql_rope(l->q, h.qk, c->head_dim, l->mb->pos, l->freq, (float)c->rope.attention_scaling, 1));
    ql_tensor o = part(act->o, t, 0, hd);
    /* Rows outside every document must be finite for the products over all rows that follow. */
    if (l->mb->padded) QL_TRY(ql_fill(l->q, o, 0));
    ql_attn a = attn_args(l);
    if (ql_tensor_set(l->cache_k)) {
        QL_TRY(ql_scatter_rows(l->q, l->cache_k, h.k, l->mb->slot));
        QL_TRY(ql_scatter_rows(l->q, l->cache_v, h.v, l->mb->slot));
        h.k = l->cache_k, h.v = l->cache_v;
    }
    return ql_attention(l->q, o, top(act->lse, t), h.q, h.k, h.v, &a);
}

/* From h2 to gate and up. */
static ql_status gate_up_part(const ql_layer *l, ql_act *act)
{
    const ql_shape *s = l->shape;
    int64_t t = l->mb->rows;
    ql_tensor x = top(l->work->x, t);
    QL_TRY(ql_rmsnorm(l->q, x, top(act->h2, t), l->small->norm_ffn, (float)s->cfg->eps));
    QL_TRY(adapter_down(l, QL_G_GU, x));
    if (ql_tensor_set(act->xa[QL_G_GU]))
        QL_TRY(ql_convert(l->q, top(act->xa[QL_G_GU], t), part(x, t, s->group[QL_G_GU].k, s->group[QL_G_GU].r)));
    return project(l, QL_G_GU, part(act->gu, t, 0, s->group[QL_G_GU].n), x, QL_NONE);
}

/* down_proj's input and its adapter columns. */
static ql_status swiglu_part(const ql_layer *l, ql_act *act)
{
    const ql_group_shape *gu = &l->shape->group[QL_G_GU], *down = &l->shape->group[QL_G_DOWN];
    int64_t t = l->mb->rows;
    ql_tensor a = top(l->work->a, t);
    QL_TRY(ql_swiglu(l->q, a, part(act->gu, t, 0, gu->n)));
    QL_TRY(adapter_down(l, QL_G_DOWN, a));
    if (!ql_tensor_set(act->xa[QL_G_DOWN])) return QL_OK;
    return ql_convert(l->q, top(act->xa[QL_G_DOWN], t), part(a, t, down->k, down->r));
}

static ql_status o_part(const ql_layer *l, ql_act *act)
{
    int64_t t = l->mb->rows;
    QL_TRY(adapter_down(l, QL_G_O, top(act->o, t)));
    return project(l, QL_G_O, top(act->h2, t), top(act->o, t), top(act->h, t));
}

ql_status ql_layer_forward(const ql_layer *l, ql_act *act, ql_tensor out)
{
    int64_t t = l->mb->rows;
    QL_TRY(attention_part(l, act));
    QL_TRY(o_part(l, act));
    QL_TRY(gate_up_part(l, act));
    QL_TRY(swiglu_part(l, act));
    return project(l, QL_G_DOWN, top(out, t), top(l->work->a, t), top(act->h2, t));
}

ql_status ql_layer_recompute(const ql_layer *l, ql_act *act, ql_keep have)
{
    if (have == QL_KEEP_ALL) return QL_OK;
    if (have == QL_KEEP_NO_MLP) return gate_up_part(l, act);
    QL_TRY(attention_part(l, act));
    QL_TRY(o_part(l, act));
    QL_TRY(gate_up_part(l, act));
    return swiglu_part(l, act);
}

/* ---- backward --------------------------------------------------------------------------------- */

/* The residual gradient in the compute dtype, with room for adapter columns behind it. */
static ql_status residual_dy(const ql_layer *l)
{
    int64_t t = l->mb->rows;
    if (l->shape->res == l->shape->dtype) return QL_OK; /* dy is dh */
    return ql_convert(l->q, top(l->work->dy, t), top(l->work->dh, t));
}

/* dh ← dh + gradient through gate, up and down. */
static ql_status mlp_backward(const ql_layer *l, ql_act *act, float *grad)
{
    const ql_shape *s = l->shape;
    const ql_group_shape *gu = &s->group[QL_G_GU];
    const ql_work *w = l->work;
    int64_t t = l->mb->rows, c = s->cfg->hidden;
    ql_tensor a = top(w->a, t), dgu = part(act->gu, t, 0, gu->n), dh = top(w->dh, t), dy = top(w->dy, t);
    QL_TRY(residual_dy(l));
    QL_TRY(project_dx(l, QL_G_DOWN, a, dy));            /* a = gradient of swiglu's output */
    QL_TRY(ql_swiglu_dx(l->q, dgu, a, dgu, a));         /* gu → dgu in place; a = swiglu's output again */
    QL_TRY(adapter_grad(l, QL_G_DOWN, a, dy, act->xa[QL_G_DOWN], grad));
    ql_tensor dx = part(w->dx, t, 0, c), x = top(w->x, t);
    QL_TRY(project_dx(l, QL_G_GU, dx, top(act->gu, t)));
    if (gu->r) {
        QL_TRY(ql_rmsnorm(l->q, x, top(act->h2, t), l->small->norm_ffn, (float)s->cfg->eps));
        QL_TRY(adapter_grad(l, QL_G_GU, x, top(act->gu, t), act->xa[QL_G_GU], grad));
    }
    return ql_rmsnorm_dx(l->q, dh, dx, top(act->h2, t), l->small->norm_ffn, (float)s->cfg->eps, dh);
}

/* dh ← dh + gradient through attention. */
static ql_status attention_backward(const ql_layer *l, ql_act *act, float *grad)
{
    const ql_shape *s = l->shape;
    const ql_config *cfg = s->cfg;
    const ql_work *w = l->work;
    int64_t t = l->mb->rows, c = cfg->hidden, hd = cfg->heads * cfg->head_dim;
    ql_tensor dh = top(w->dh, t), dy = top(w->dy, t), d_o = part(w->dx, t, 0, hd), dqkv = top(w->dqkv, t);
    ql_tensor o = part(act->o, t, 0, hd);
    QL_TRY(residual_dy(l));
    QL_TRY(project_dx(l, QL_G_O, d_o, dy));
    QL_TRY(adapter_grad(l, QL_G_O, o, dy, part(act->o, t, hd, s->group[QL_G_O].r), grad));
    heads f = split(l, act->qkv), d = split(l, dqkv);
    if (l->mb->padded) QL_TRY(ql_fill(l->q, dqkv, 0));
    ql_attn a = attn_args(l);
    QL_TRY(ql_attention_dx(l->q, d.q, d.k, d.v, d_o, o, top(act->lse, t), top(w->delta, t), f.q, f.k, f.v, &a));
    QL_TRY(ql_rope(l->q, d.qk, cfg->head_dim, l->mb->pos, l->freq, (float)cfg->rope.attention_scaling, -1));
    if (cfg->qk_norm) {
        heads before = split(l, act->qk);
        QL_TRY(ql_rmsnorm_dx(l->q, d.q, d.q, before.q, l->small->q_norm, (float)cfg->eps, QL_NONE));
        QL_TRY(ql_rmsnorm_dx(l->q, d.k, d.k, before.k, l->small->k_norm, (float)cfg->eps, QL_NONE));
    }
    int lowest = l->layer <= s->first; /* nothing below it learns: its input needs no gradient */
    ql_tensor dx = part(w->dx, t, 0, c), x = top(w->x, t);
    QL_TRY(project_dx(l, QL_G_QKV, lowest ? QL_NONE : dx, dqkv));
    if (s->group[QL_G_QKV].r) {
        QL_TRY(ql_rmsnorm(l->q, x, top(act->h, t), l->small->norm_attn, (float)cfg->eps));
        QL_TRY(adapter_grad(l, QL_G_QKV, x, dqkv, act->xa[QL_G_QKV], grad));
    }
    if (lowest) return QL_OK;
    return ql_rmsnorm_dx(l->q, dh, dx, top(act->h, t), l->small->norm_attn, (float)cfg->eps, dh);
}

ql_status ql_layer_backward(const ql_layer *l, ql_act *act, float *grad)
{
    QL_TRY(mlp_backward(l, act, grad));
    return attention_backward(l, act, grad);
}
