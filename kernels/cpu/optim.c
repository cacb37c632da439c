/* The gradient's norm, clipping and loss scaling, AdamW in fp32 and with 8-bit states. */
#include "kernels/cpu/cpu.h"

#include <math.h>

QL_CPU_OP(norm_parts, ql_tensor part, ql_tensor g)
{
    (void)q;
    float sq[QL_OPT_BLOCK];
    for (int64_t b = 0; b < part.cols; b++) {
        const float *x = (const float *)g.data + b * QL_OPT_BLOCK;
        for (int j = 0; j < QL_OPT_BLOCK; j++) sq[j] = x[j] * x[j];
        ((float *)part.data)[b] = ql_cpu_halve(sq, QL_OPT_BLOCK);
    }
    return QL_OK;
}

/* torch's GradScaler.update. */
static void update_scale(ql_ctl *ctl, const ql_clip *c)
{
    if (ctl->skipped) {
        ctl->loss_scale *= c->backoff_factor;
        ctl->growth = 0;
    } else if (++ctl->growth >= c->growth_interval) {
        float grown = ctl->loss_scale * c->growth_factor;
        if (isfinite(grown)) ctl->loss_scale = grown;
        ctl->growth = 0;
    }
}

QL_CPU_OP(clip, ql_ctl *ctl, ql_tensor part, const ql_clip *c)
{
    memcpy(q->work, part.data, (size_t)part.cols * sizeof(float));
    float norm = sqrtf(ql_cpu_halve(q->work, part.cols)) / ctl->loss_scale, coef = 1.0f;
    if (c->max_norm > 0) {
        coef = c->max_norm / (norm + 1e-6f);
        coef = coef > 1.0f ? 1.0f : coef; /* a NaN stays one, as in torch */
    }
    ctl->norm = norm;
    ctl->mul = coef / ctl->loss_scale;
    ctl->skipped = c->scaling && !isfinite(norm);
    ctl->lr = c->lr[ql_max64(0, ql_min64(ctl->steps, c->n_lr - 1))];
    if (ctl->skipped)
        ctl->skips++;
    else
        ctl->steps++;
    if (c->scaling) update_scale(ctl, c);
    return QL_OK;
}

/* 1 − β^t. */
static double correction(float beta, int32_t t)
{
    return 1.0 - pow((double)beta, (double)t);
}

static void adamw_torch(float *restrict p, float *restrict m, float *restrict v,
                        const float *restrict g, int64_t n, const ql_ctl *ctl, const ql_adam *a)
{
    float mul = ctl->mul, w1 = 1.0f - a->beta1, b2 = a->beta2, w2 = 1.0f - b2;
    float root = (float)sqrt(correction(a->beta2, ctl->steps));
    float step = (float)((double)ctl->lr / correction(a->beta1, ctl->steps));
    float keep = 1.0f - ctl->lr * a->weight_decay, eps = a->eps;
    for (int64_t i = 0; i < n; i++) {
        float x = g[i] * mul;
        m[i] = m[i] + (x - m[i]) * w1;
        v[i] = v[i] * b2 + x * x * w2;
        p[i] = p[i] * keep - step * (m[i] / (sqrtf(v[i]) / root + eps));
    }
}

/* bitsandbytes' order: the epsilon is scaled, and the decay comes after the update. */
static void adamw_bnb(float *restrict p, float *restrict m, float *restrict v,
                      const float *restrict g, int64_t n, const ql_ctl *ctl, const ql_adam *a)
{
    float mul = ctl->mul, b1 = a->beta1, w1 = 1.0f - b1, b2 = a->beta2, w2 = 1.0f - b2;
    float c1 = (float)correction(b1, ctl->steps), c2 = (float)sqrt(correction(b2, ctl->steps));
    float step = -ctl->lr * c2 / c1, eps = a->eps * c2;
    float keep = a->weight_decay > 0 ? 1.0f - ctl->lr * a->weight_decay : 1.0f;
    for (int64_t i = 0; i < n; i++) {
        float x = g[i] * mul;
        m[i] = m[i] * b1 + w1 * x;
        v[i] = v[i] * b2 + w2 * x * x;
        p[i] = (p[i] + step * (m[i] / (sqrtf(v[i]) + eps))) * keep;
    }
}

QL_CPU_OP(adamw, ql_tensor p, ql_tensor m, ql_tensor v, ql_tensor g, const ql_ctl *ctl,
          const ql_adam *a)
{
    (void)q;
    if (ctl->skipped) return QL_OK;
    (a->kind == QL_ADAM_TORCH ? adamw_torch : adamw_bnb)(p.data, m.data, v.data, g.data, p.cols,
                                                         ctl, a);
    return QL_OK;
}

/* ---- 8-bit states: blocks of 256, dequantised, updated and quantised anew -------------------- */

enum { B8 = 256 };

typedef struct {
    float mul, b1, w1, b2, w2, step, eps, keep;
    const float *code1, *code2;
} adam8;

static void adam8_block(const adam8 *k, float *p, uint8_t *m8, uint8_t *v8, float *m2, float *v2,
                        const float *g)
{
    float m[B8], v[B8], a[B8], b[B8], top1 = 0, top2 = 0;
    for (int i = 0; i < B8; i++) {
        bool finite = isfinite(g[i]); /* else the states restart at 0 and the weight stays */
        float x = g[i] * k->mul;
        m[i] = finite ? k->code1[m8[i]] * *m2 * k->b1 + k->w1 * x : 0.0f;
        v[i] = finite ? k->code2[v8[i]] * *v2 * k->b2 + k->w2 * x * x : 0.0f;
        if (finite) p[i] = (p[i] + k->step * (m[i] / (sqrtf(v[i]) + k->eps))) * k->keep;
    }
    for (int i = 0; i < B8; i++) {
        top1 = fmaxf(top1, fabsf(m[i]));
        top2 = fmaxf(top2, v[i]);
    }
    for (int i = 0; i < B8; i++) a[i] = m[i] / top1, b[i] = v[i] / top2;
    ql_cpu_nearest(m8, k->code1, a, -1.0f, B8);
    ql_cpu_nearest(v8, k->code2, b, 0.0f, B8);
    for (int i = 0; i < B8; i++) {
        /* The sign survives the rounding; the wrap-around of an all-zero block is bitsandbytes'
         * own. */
        int fix = m[i] > 0 ? 1 : -1;
        if (!signbit(k->code1[m8[i]]) != !signbit(m[i])) m8[i] = (uint8_t)(m8[i] + fix);
    }
    *m2 = top1;
    *v2 = top2;
}

QL_CPU_OP(adamw8, ql_tensor p, ql_tensor m8, ql_tensor v8, ql_tensor m2, ql_tensor v2, ql_tensor g,
          ql_tensor code1, ql_tensor code2, const ql_ctl *ctl, const ql_adam *a)
{
    (void)q;
    if (ctl->skipped) return QL_OK;
    float c1 = (float)correction(a->beta1, ctl->steps),
          c2 = (float)sqrt(correction(a->beta2, ctl->steps));
    adam8 k = {.mul = ctl->mul,
               .b1 = a->beta1,
               .w1 = 1.0f - a->beta1,
               .b2 = a->beta2,
               .w2 = 1.0f - a->beta2,
               .step = -ctl->lr * c2 / c1,
               .eps = c2 * a->eps,
               .keep = a->weight_decay > 0 ? 1.0f - ctl->lr * a->weight_decay : 1.0f,
               .code1 = code1.data,
               .code2 = code2.data};
    for (int64_t b = 0; b < p.cols / B8; b++)
        adam8_block(&k, (float *)p.data + b * B8, (uint8_t *)m8.data + b * B8,
                    (uint8_t *)v8.data + b * B8, (float *)m2.data + b, (float *)v2.data + b,
                    (const float *)g.data + b * B8);
    return QL_OK;
}
