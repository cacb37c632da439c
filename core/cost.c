#include "core/cost.h"

#include "core/pipe.h"

typedef enum {
    COST_F,      /* forward */
    COST_R,      /* recompute all that backward needs: all but down_proj */
    COST_R_MLP,  /* recompute gate and up only */
    COST_B       /* gradient of the input; the adapters' own gradients are under 1 % of it */
} pass;

/* Products of a layer: 2 · N · K per token each. Attention, causal: of the S² / 2 scores 2 · D for q·k and 2 · D for p·v, per head;
 * backward does five such products where forward does two. */
static double linear(const ql_config *c, ql_linear from, ql_linear to)
{
    double sum = 0;
    for (int w = from; w <= (int)to; w++) {
        int64_t n, k;
        ql_linear_shape(c, (ql_linear)w, &n, &k);
        sum += 2.0 * (double)n * (double)k;
    }
    return sum;
}

/* Operations of one decoder layer for `rows` tokens in documents of `length`. */
static double layer_cost(const ql_config *c, int64_t rows, int64_t length, pass what)
{
    double attention = 2.0 * (double)length * (double)(c->heads * c->head_dim), token = 0;
    switch (what) {
    case COST_F: token = linear(c, QL_Q, QL_DOWN) + attention; break;
    case COST_R: token = linear(c, QL_Q, QL_UP) + attention; break;
    case COST_R_MLP: token = linear(c, QL_GATE, QL_UP); break;
    case COST_B: token = linear(c, QL_Q, QL_DOWN) + 2.5 * attention; break;
    }
    return token * (double)rows;
}

/* The head's two products for `rows` targets; without backward the first one only. */
static double head_cost(const ql_config *c, int64_t rows, int train)
{
    return (train ? 4.0 : 2.0) * (double)rows * (double)c->vocab * (double)c->hidden;
}

/* Forward, recompute and gradient of one micro-batch in layer l, in operations. */
static double layer_flops(const ql_spec *s, int l, int64_t length)
{
    const ql_config *c = &s->model->cfg;
    double sum = layer_cost(c, s->rows, length, COST_F);
    if (!s->choice.train || l < s->choice.first) return sum;
    sum += layer_cost(c, s->rows, length, COST_B);
    if (s->choice.keep[l] == QL_KEEP_INPUT) sum += layer_cost(c, s->rows, length, COST_R);
    if (s->choice.keep[l] == QL_KEEP_NO_MLP) sum += layer_cost(c, s->rows, length, COST_R_MLP);
    return sum;
}

/* One micro-batch through all layers and back. */
static double micro_flops(const ql_spec *s, int64_t length)
{
    const ql_config *c = &s->model->cfg;
    const ql_choice *ch = &s->choice;
    double sum = head_cost(c, s->rows, ch->train);
    for (int l = 0; l < ch->layers; l++) sum += layer_flops(s, l, length);
    return sum;
}

double ql_cost_step_flops(const ql_spec *s, int64_t length)
{
    return s->choice.g * micro_flops(s, length);
}

/* Seconds that gathers and copies of layers take in one pass over them; the layer at the turn is held. */
static double pass_seconds(const ql_spec *s, const ql_mem *m, const ql_rates *r)
{
    const ql_choice *ch = &s->choice;
    double sum = 0;
    for (int l = 0; l < ch->layers; l++) {
        double times = ch->train && l >= ch->first && l < ch->layers - 1 ? 2 : 1;
        if (ch->store[l] == QL_STORE_SHARDED) sum += times * (double)((ch->world - 1) * m->blob[l].part_bytes) / r->link;
        if (ch->store[l] == QL_STORE_HOST) sum += times * (double)m->blob[l].part_bytes / r->host;
    }
    return sum;
}

/* The stages as one layer each: what a stage computes, or what it fetches from the host where that takes longer. */
static double pipe_seconds(const ql_spec *s, const ql_mem *m, int64_t length, const ql_rates *r)
{
    const ql_choice *ch = &s->choice;
    const ql_config *cfg = &s->model->cfg;
    ql_choice c = {.world = ch->world, .layers = ch->world, .g = ch->g, .pieces = 1, .schedule = ch->schedule, .train = ch->train};
    c.first = ch->world;
    ql_pipe_times t = {.head = head_cost(cfg, s->rows, ch->train) / r->flops};
    ql_pipe_result out;
    t.message = (double)(s->rows * cfg->hidden) * (double)ql_dtype_size(s->res) / r->link;
    for (int w = 0; w < ch->world; w++) {
        double host = 0, saved = 0;
        c.cut[w + 1] = (int16_t)(w + 1);
        c.store[w] = QL_STORE_RESIDENT;
        c.keep[w] = QL_KEEP_ALL;
        for (int l = ch->cut[w]; l < ch->cut[w + 1]; l++) {
            int learns = ch->train && l >= ch->first, keep = ch->keep[l];
            t.f[w] += layer_cost(cfg, s->rows, length, COST_F) / r->flops;
            if (ch->store[l] == QL_STORE_HOST) host += (double)m->blob[l].part_bytes / r->host;
            if (!learns) continue;
            t.b[w] += layer_cost(cfg, s->rows, length, COST_B) / r->flops;
            if (keep != QL_KEEP_ALL) t.r[w] += layer_cost(cfg, s->rows, length, keep == QL_KEEP_INPUT ? COST_R : COST_R_MLP) / r->flops;
            if (ch->save[l]) saved += (double)(s->rows * cfg->hidden) * (double)ql_dtype_size(s->res) / r->host;
        }
        if (t.r[w] > 0) c.keep[w] = QL_KEEP_INPUT;
        if (t.b[w] > 0 && c.first > w) c.first = w;
        t.f[w] = t.f[w] > host + saved ? t.f[w] : host + saved;
        if (t.b[w] > 0) t.b[w] = t.b[w] > host + saved ? t.b[w] : host + saved;
    }
    return ql_pipe_run(&c, c.g, &t, &out) == QL_OK ? out.seconds : 0;
}

double ql_cost_step(const ql_spec *s, int64_t length, const ql_rates *r)
{
    const ql_choice *ch = &s->choice;
    int micros = (ch->g + ch->world - 1) / ch->world, passes = micros, saved = 0;
    ql_mem *m = NULL;
    if (ql_mem_open(s, 0, &m) != QL_OK) return 0;
    if (ql_plan_piped(ch)) {
        double seconds = pipe_seconds(s, m, length, r);
        if (s->state_host) seconds += 2.0 * (double)m->n / ch->world * (s->state == QL_ADAM_F32 ? 8 : 2) / r->host;
        ql_mem_close(m);
        return seconds;
    }
    if (ch->schedule == QL_BREADTH) passes = ch->pieces % ch->world ? 1 : ch->pieces / ch->world;
    for (int l = 0; l < ch->layers; l++) saved += ch->save[l];
    double compute = micros * micro_flops(s, length) / r->flops;
    double moved = passes * pass_seconds(s, m, r);
    moved += micros * 2.0 * saved * (double)(s->rows * s->model->cfg.hidden) * (double)ql_dtype_size(s->res) / r->host;
    if (ql_plan_head_world(ch) > 1) /* rows to all, fp32 gradients back */
        compute += micros * (double)(ch->world - 1) * (double)(s->rows * s->model->cfg.hidden) * (double)(ql_dtype_size(s->dtype) + 4) / r->link;
    double update = (double)(ch->world - 1) * 8.0 * (double)m->shard / r->link;
    if (s->state_host) update += 2.0 * (double)m->shard * (s->state == QL_ADAM_F32 ? 8 : 2) / r->host;
    ql_mem_close(m);
    return (compute > moved ? compute : moved) + update;
}

/* ---- a pipeline ------------------------------------------------------------------------------- */

void ql_cost_cut(ql_spec *s, int64_t length)
{
    enum { N = QL_MAX_LAYERS + 1, W = QL_MAX_WORLD + 1 };
    ql_choice *c = &s->choice;
    int least = c->layers >= c->world, from[W][N];
    double upto[N] = {0}, slowest[W][N], squares[W][N], head = head_cost(&s->model->cfg, s->rows, c->train);
    for (int l = 0; l < c->layers; l++) upto[l + 1] = upto[l] + layer_flops(s, l, length);
    /* The first w stages have n layers: the slowest of them as quick as can be, then the most even. */
    for (int w = 0; w <= c->world; w++)
        for (int n = 0; n <= c->layers; n++) {
            slowest[w][n] = squares[w][n] = w == 0 && n == 0 ? 0 : 1e300;
            for (int k = 0; w > 0 && k <= n - least; k++) {
                double mine = upto[n] - upto[k] + (w == c->world ? head : 0);
                double max = slowest[w - 1][k] > mine ? slowest[w - 1][k] : mine, sq = squares[w - 1][k] + mine * mine;
                if (slowest[w - 1][k] >= 1e300 || max > slowest[w][n] || (max >= slowest[w][n] && sq >= squares[w][n])) continue;
                slowest[w][n] = max, squares[w][n] = sq, from[w][n] = k;
            }
        }
    c->cut[c->world] = (int16_t)c->layers;
    for (int w = c->world; w > 0; w--) c->cut[w - 1] = (int16_t)from[w][c->cut[w]];
}

double ql_cost_action(const ql_spec *s)
{
    const ql_config *c = &s->model->cfg;
    double layer = layer_cost(c, s->rows, s->rows, COST_B), head = head_cost(c, s->rows, s->choice.train);
    return layer > head ? layer : head;
}

ql_rates ql_rates_of(int arch)
{
    /* Sustained half-precision products; all-gather without direct access between devices where that is the rule. T4: 65 nominal, 24
     * to 32 at its 70 W; H200: measured. Others: 60 % of nominal. */
    static const struct {
        int arch;
        ql_rates rates;
    } table[] = {
        {100, {1400e12, 300e9, 55e9}}, {90, {700e12, 233e9, 55e9}}, {89, {90e12, 10e9, 20e9}}, {86, {70e12, 10e9, 20e9}},
        {80, {190e12, 120e9, 20e9}},   {75, {25e12, 6e9, 10e9}},    {70, {70e12, 6e9, 10e9}},  {1, {10e12, 6e9, 10e9}},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (arch >= table[i].arch) return table[i].rates;
    return (ql_rates){50e9, 4e9, 8e9};
}
