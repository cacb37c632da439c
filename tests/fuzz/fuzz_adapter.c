/* Any bytes as adapter_config.json of a small Llama: the adapter table is sound, and what we write
 * of it reads back as the same. */
#include "core/json.h"
#include "core/lora.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const ql_config model = {.arch = QL_LLAMA,
                                .hidden = 64,
                                .layers = 2,
                                .heads = 4,
                                .kv_heads = 2,
                                .head_dim = 16,
                                .ffn = 96,
                                .vocab = 100};

static ql_status build(const json_t *o, ql_lora **out)
{
    ql_lora_config c = {0};
    QL_TRY(ql_lora_config_parse(o, "adapter_config.json", &c));
    return ql_lora_build(&model, &c, out);
}

static void check(const ql_lora *l)
{
    int64_t at = 0;
    if (l->count < 1 || l->count > model.layers * QL_LINEARS) abort();
    for (int64_t i = 0; i < l->count; i++) {
        const ql_lora_target *t = &l->target[i];
        if (t->a != at || t->b != at + t->a_len || t->a_len < t->r * t->k || t->b_len < t->n * t->r)
            abort();
        if (t->a_len % QL_LORA_PAD || t->b_len % QL_LORA_PAD ||
            ql_lora_find(l, t->layer, t->linear) != t)
            abort();
        at = t->b + t->b_len;
    }
    if (at != l->elements) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    json_t *o = NULL;
    ql_lora *l = NULL, *again = NULL;
    ql_error_clear();
    ql_status st = ql_json_parse((const char *)data, size, "adapter_config.json", &o);
    if (st == QL_OK) st = build(o, &l);
    json_decref(o);
    if (st != QL_OK) {
        if (!ql_error()[0]) abort();
        return 0;
    }
    check(l);
    o = ql_lora_config_json(&l->cfg);
    if (!o || build(o, &again) != QL_OK) abort();
    if (again->count != l->count || again->elements != l->elements || again->params != l->params)
        abort();
    for (int64_t i = 0; i < l->count; i++)
        if (again->target[i].scale != l->target[i].scale) abort();
    json_decref(o);
    ql_lora_close(l);
    ql_lora_close(again);
    return 0;
}
