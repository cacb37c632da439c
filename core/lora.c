/* Which linears get an adapter, where its tensors lie in the flat buffer, and their first values.
 */
#include "core/lora.h"

#include "core/lora_match.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PATH_ROOM = 96 };

static void module_path(char out[PATH_ROOM], int64_t layer, const char *module)
{
    snprintf(out, PATH_ROOM, "model.layers.%lld%s%s", (long long)layer, module[0] ? "." : "",
             module);
}

/* Modules that are no linears of a block: PEFT would adapt the head and the embedding in ways that
 * the engine does not, and fails on the others. */
static ql_status refuse_path(ql_matcher *m, const char *path)
{
    bool hit = false;
    QL_TRY(ql_matcher_selects(m, path, &hit));
    if (!hit) return QL_OK;
    QL_FAIL(QL_ENOSUP,
            "target_modules matches '%s', which cannot have an adapter here; supported: q_proj, "
            "k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj",
            path);
}

static ql_status refuse_others(ql_matcher *m, const ql_config *cfg)
{
    static const char *const top[] = {"lm_head", "model.embed_tokens", "model.norm", "model.layers",
                                      "model"};
    static const char *const inner[] = {
        "", "self_attn", "mlp", "mlp.act_fn", "input_layernorm", "post_attention_layernorm"};
    char path[PATH_ROOM];
    for (size_t i = 0; i < sizeof top / sizeof *top; i++) QL_TRY(refuse_path(m, top[i]));
    for (int64_t l = 0; l < cfg->layers; l++) {
        for (size_t i = 0; i < sizeof inner / sizeof *inner; i++) {
            module_path(path, l, inner[i]);
            QL_TRY(refuse_path(m, path));
        }
    }
    return QL_OK;
}

static void add_target(ql_lora *l, const ql_config *cfg, int64_t layer, ql_linear w, int64_t r,
                       double alpha)
{
    ql_lora_target *t = &l->target[l->count];
    t->layer = layer, t->linear = w, t->r = r, t->alpha = alpha;
    ql_linear_shape(cfg, w, &t->n, &t->k);
    t->scale = (float)(l->cfg.rslora ? alpha / sqrt((double)r) : alpha / (double)r);
    t->a = l->elements;
    t->a_len = ql_round_up(r * t->k, QL_LORA_PAD);
    t->b = t->a + t->a_len;
    t->b_len = ql_round_up(t->n * r, QL_LORA_PAD);
    l->elements = t->b + t->b_len;
    l->params += r * (t->k + t->n);
    l->index[layer * QL_LINEARS + (int64_t)w] = (int32_t)l->count++;
}

static ql_status choose(ql_lora *l, const ql_config *cfg, ql_matcher *m)
{
    char path[PATH_ROOM];
    for (int64_t layer = 0; layer < cfg->layers; layer++) {
        for (int i = 0; i < QL_LINEARS; i++) {
            ql_linear w = (ql_linear)i;
            bool hit = false;
            int64_t r = 0;
            double alpha = 0.0;
            l->index[layer * QL_LINEARS + i] = -1;
            module_path(path, layer, ql_linear_module(w));
            QL_TRY(ql_matcher_selects(m, path, &hit));
            if (!hit) continue;
            QL_TRY(ql_matcher_rank(m, path, &r));
            QL_TRY(ql_matcher_alpha(m, path, &alpha));
            add_target(l, cfg, layer, w, r, alpha);
        }
    }
    return QL_OK;
}

static ql_status check_layers(const ql_lora_config *c, const ql_config *cfg)
{
    for (int i = 0; i < c->layer_count; i++) {
        if (c->layers[i] >= cfg->layers)
            QL_FAIL(QL_EINVAL, "layers_to_transform has layer %lld; the model has layers 0 to %lld",
                    (long long)c->layers[i], (long long)cfg->layers - 1);
    }
    return QL_OK;
}

static ql_status build(ql_lora *l, const ql_config *cfg, ql_matcher *m)
{
    const ql_lora_config *c = &l->cfg;
    QL_TRY(check_layers(c, cfg));
    if (!c->target.all_linear) QL_TRY(refuse_others(m, cfg));
    QL_TRY(choose(l, cfg, m));
    const char *unused = ql_matcher_unused(m);
    if (unused && !c->saved)
        QL_FAIL(QL_EINVAL,
                "target_modules: '%.100s' matches no module; there are q_proj, k_proj, v_proj, "
                "o_proj, gate_proj, up_proj, down_proj",
                unused);
    if (l->count == 0)
        QL_FAIL(QL_EINVAL,
                "target_modules, layers_to_transform and exclude_modules together choose no "
                "module; there are q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj "
                "in %lld "
                "layers",
                (long long)cfg->layers);
    return QL_OK;
}

ql_status ql_lora_build(const ql_config *cfg, ql_lora_config *c, ql_lora **out)
{
    ql_status st = QL_OK;
    ql_matcher *m = NULL;
    ql_lora *l = calloc(1, sizeof *l);
    if (!l) {
        ql_lora_config_free(c);
        QL_FAIL(QL_ENOMEM, "no memory for the adapter table");
    }
    l->cfg = *c;
    memset(c, 0, sizeof *c);
    l->layers = cfg->layers;
    size_t n = (size_t)cfg->layers * QL_LINEARS;
    l->target = calloc(n, sizeof *l->target);
    l->index = calloc(n, sizeof *l->index);
    if (!l->target || !l->index) {
        st = ql_fail(QL_ENOMEM, "no memory for the adapter table");
        goto out;
    }
    QL_GO(ql_matcher_make(&l->cfg, &m));
    QL_GO(build(l, cfg, m));
    *out = l;
    l = NULL;
out:
    ql_matcher_close(m);
    ql_lora_close(l);
    return st;
}

void ql_lora_close(ql_lora *l)
{
    if (!l) return;
    ql_lora_config_free(&l->cfg);
    free(l->target);
    free(l->index);
    free(l);
}

const ql_lora_target *ql_lora_find(const ql_lora *l, int64_t layer, ql_linear w)
{
    if (!l || layer < 0 || layer >= l->layers) return NULL;
    int32_t i = l->index[layer * QL_LINEARS + (int64_t)w];
    return i < 0 ? NULL : &l->target[i];
}

/* splitmix64's finaliser: a bijection that mixes every bit. */
static uint64_t mix(uint64_t z)
{
    z += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* (0, 1), 53 bits, never an end. */
static double uniform(uint64_t key, uint64_t i)
{
    return ((double)(mix(key + i) >> 11) + 0.5) * 0x1p-53;
}

/* U(-bound, bound): kaiming_uniform with a = √5 has bound 1/√fan_in. */
static void fill_uniform(float *x, int64_t n, uint64_t key, double bound)
{
    for (int64_t i = 0; i < n; i++) x[i] = (float)((2.0 * uniform(key, (uint64_t)i) - 1.0) * bound);
}

static void fill_normal(float *x, int64_t n, uint64_t key, double std)
{
    const double two_pi = 6.283185307179586;
    for (int64_t i = 0; i < n; i++) {
        uint64_t j = 2 * (uint64_t)i;
        x[i] = (float)(std * sqrt(-2.0 * log(uniform(key, j))) * cos(two_pi * uniform(key, j + 1)));
    }
}

void ql_lora_init(const ql_lora *l, uint64_t seed, float *flat)
{
    memset(flat, 0, (size_t)l->elements * sizeof *flat);
    for (int64_t i = 0; i < l->count; i++) {
        const ql_lora_target *t = &l->target[i];
        /* Keyed by the place in the model: the same value whatever else is targeted. */
        uint64_t place = 2 * (uint64_t)(t->layer * QL_LINEARS + (int64_t)t->linear);
        uint64_t ka = mix(mix(seed) ^ place), kb = mix(mix(seed) ^ (place + 1));
        if (l->cfg.init == QL_INIT_GAUSSIAN)
            fill_normal(flat + t->a, t->r * t->k, ka, 1.0 / (double)t->r);
        else
            fill_uniform(flat + t->a, t->r * t->k, ka, 1.0 / sqrt((double)t->k));
        if (l->cfg.init == QL_INIT_RANDOM)
            fill_uniform(flat + t->b, t->n * t->r, kb, 1.0 / sqrt((double)t->r));
    }
}

/* 1234567 → "1,234,567". */
static void commas(char out[32], int64_t x)
{
    char digits[32];
    int n = snprintf(digits, sizeof digits, "%lld", (long long)x), k = 0;
    for (int i = 0; i < n; i++) {
        if (i && (n - i) % 3 == 0) out[k++] = ',';
        out[k++] = digits[i];
    }
    out[k] = 0;
}

void ql_lora_summary(const ql_lora *l, const ql_config *m, char *out, size_t size)
{
    char a[32], b[32];
    int64_t all = ql_config_params(m) + l->params;
    commas(a, l->params);
    commas(b, all);
    snprintf(out, size, "trainable params: %s || all params: %s || trainable%%: %.4f", a, b,
             100.0 * (double)l->params / (double)all);
}
