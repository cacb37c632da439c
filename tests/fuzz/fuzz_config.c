/* Any bytes as config.json: what is accepted keeps the promises that the engine builds on. */
#include "core/model.h"

#include <math.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(const ql_config *c)
{
    float inv[512];
    if (c->head_dim % 2 || c->head_dim / 2 > 512 || c->heads % c->kv_heads || c->layers < 1)
        abort();
    if (ql_config_params(c) <= 0 || c->window < 0 || c->window_from > c->layers) abort();
    ql_rope_inv_freq(c, inv);
    for (int64_t i = 0; i < c->head_dim / 2; i++)
        if (!isfinite(inv[i]) || inv[i] < 0.0f) abort();
    for (int w = 0; w < QL_LINEARS; w++) {
        int64_t n, k, bytes;
        ql_linear_shape(c, (ql_linear)w, &n, &k);
        if (n <= 0 || k <= 0 || __builtin_mul_overflow(n, k * 4 * c->layers, &bytes)) abort();
        (void)ql_config_skips(c, c->layers - 1, (ql_linear)w);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    ql_config c;
    ql_error_clear();
    if (ql_config_parse((const char *)data, size, "config.json", &c) == QL_OK) {
        check(&c);
        ql_config_free(&c);
    } else if (!ql_error()[0]) {
        abort();
    }
    return 0;
}
