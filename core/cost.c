#include "core/cost.h"

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

double ql_cost_layer(const ql_config *c, int64_t rows, int64_t length, ql_cost what)
{
    double attention = 2.0 * (double)length * (double)(c->heads * c->head_dim), token = 0;
    switch (what) {
    case QL_COST_F: token = linear(c, QL_Q, QL_DOWN) + attention; break;
    case QL_COST_R: token = linear(c, QL_Q, QL_UP) + attention; break;
    case QL_COST_R_MLP: token = linear(c, QL_GATE, QL_UP); break;
    case QL_COST_B: token = linear(c, QL_Q, QL_DOWN) + 2.5 * attention; break;
    }
    return token * (double)rows;
}

double ql_cost_head(const ql_config *c, int64_t rows, int train)
{
    return (train ? 4.0 : 2.0) * (double)rows * (double)c->vocab * (double)c->hidden;
}

double ql_cost_action(const ql_spec *s)
{
    const ql_config *c = &s->model->cfg;
    double layer = ql_cost_layer(c, s->rows, s->rows, QL_COST_B), head = ql_cost_head(c, s->rows, s->choice.train);
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
