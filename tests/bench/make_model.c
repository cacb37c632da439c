/* make_model SHAPE FOLDER [TOKENS]: a pre-quantised bitsandbytes folder of a real model's shape with random values, written at disk speed
 * (there is no hub here), and FOLDER/train.data, a tokenised data set of random tokens: samples of TOKENS (default 2048), none masked.
 * Shapes: 1b 8b 32b 70b (Llama 3.2 1B, 3.1 8B, Qwen2.5 32B, Llama 3.1 70B), tiny, stages (8 small layers, for `make bubble`). */
#include "core/dataset.h"
#include "core/file.h"
#include "core/model.h"
#include "core/nf4.h"
#include "core/safetensors.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    const char *name, *type, *class;
    int64_t hidden, layers, heads, kv, dim, ffn, vocab;
    int tied, bias;
    double theta, eps;
} shape;

static const shape shapes[] = {
    {"stages", "llama", "LlamaForCausalLM", 256, 8, 4, 4, 64, 768, 512, 0, 0, 5e5, 1e-5},
    {"tiny", "llama", "LlamaForCausalLM", 256, 4, 4, 2, 64, 768, 1024, 0, 0, 5e5, 1e-5},
    {"1b", "llama", "LlamaForCausalLM", 2048, 16, 32, 8, 64, 8192, 128256, 1, 0, 5e5, 1e-5},
    {"8b", "llama", "LlamaForCausalLM", 4096, 32, 32, 8, 128, 14336, 128256, 0, 0, 5e5, 1e-5},
    {"32b", "qwen2", "Qwen2ForCausalLM", 5120, 64, 40, 8, 128, 27648, 152064, 0, 1, 1e6, 1e-6},
    {"70b", "llama", "LlamaForCausalLM", 8192, 80, 64, 8, 128, 28672, 128256, 0, 0, 5e5, 1e-5},
};

enum { POOL = 64 << 20 };
static uint8_t *pool;              /* random bytes */
static uint64_t seed = 88172645463325252u;

static uint64_t next(void)
{
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return seed;
}

static const char *const linears[QL_LINEARS] = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                                                "mlp.gate_proj",    "mlp.up_proj",      "mlp.down_proj"};

static void linear_shape(const shape *s, int i, int64_t *n, int64_t *k)
{
    int64_t q = s->heads * s->dim, kv = s->kv * s->dim;
    const int64_t rows[] = {q, kv, kv, s->hidden, s->ffn, s->ffn, s->hidden};
    const int64_t cols[] = {s->hidden, s->hidden, s->hidden, q, s->hidden, s->hidden, s->ffn};
    *n = rows[i], *k = cols[i];
}

typedef enum { BYTES, CODES, SCALES, MAP4, MAP8, STATE, BF16_WEIGHT, BF16_ONES } content;
typedef struct {
    char name[256], state[256];
    content what;
} item;

static ql_st_decl *decls;
static item *items;
static int64_t count;

static void add(content what, ql_dtype t, int64_t a, int64_t b, const char *state, const char *fmt, const char *prefix, const char *suffix)
{
    item *it = &items[count];
    it->what = what;
    snprintf(it->name, sizeof it->name, fmt, prefix, suffix);
    if (state) snprintf(it->state, sizeof it->state, "%s", state);
    decls[count] = (ql_st_decl){it->name, t, b ? 2 : 1, {a, b}};
    count++;
}

static void declare(const shape *s)
{
    char p[96], m[128], state[256];
    for (int64_t l = 0; l < s->layers; l++) {
        snprintf(p, sizeof p, "model.layers.%" PRId64 ".", l);
        for (int i = 0; i < QL_LINEARS; i++) {
            int64_t n, k;
            linear_shape(s, i, &n, &k);
            int64_t blocks = n * k / 64;
            snprintf(m, sizeof m, "%s%s", p, linears[i]);
            int len = snprintf(state, sizeof state,
                               "{\"quant_type\": \"nf4\", \"blocksize\": 64, \"dtype\": \"bfloat16\", \"shape\": [%" PRId64 ", %" PRId64
                               "], \"nested_blocksize\": 256, \"nested_dtype\": \"float32\", \"nested_offset\": 0.03}", n, k);
            add(BYTES, QL_U8, n * k / 2, 1, NULL, "%s%s", m, ".weight");
            add(CODES, QL_U8, blocks, 0, NULL, "%s%s", m, ".weight.absmax");
            add(MAP4, QL_F32, 16, 0, NULL, "%s%s", m, ".weight.quant_map");
            add(SCALES, QL_F32, (blocks + 255) / 256, 0, NULL, "%s%s", m, ".weight.nested_absmax");
            add(MAP8, QL_F32, 256, 0, NULL, "%s%s", m, ".weight.nested_quant_map");
            add(STATE, QL_U8, len, 0, state, "%s%s", m, ".weight.quant_state.bitsandbytes__nf4");
            if (s->bias && i < 3) add(BF16_WEIGHT, QL_BF16, n, 0, NULL, "%s%s", m, ".bias");
        }
        add(BF16_ONES, QL_BF16, s->hidden, 0, NULL, "%s%s", p, "input_layernorm.weight");
        add(BF16_ONES, QL_BF16, s->hidden, 0, NULL, "%s%s", p, "post_attention_layernorm.weight");
    }
    add(BF16_WEIGHT, QL_BF16, s->vocab, s->hidden, NULL, "%s%s", "model.embed_tokens", ".weight");
    add(BF16_ONES, QL_BF16, s->hidden, 0, NULL, "%s%s", "model.norm", ".weight");
    if (!s->tied) add(BF16_WEIGHT, QL_BF16, s->vocab, s->hidden, NULL, "%s%s", "lm_head", ".weight");
}

/* Small bf16 values around ±0.02: random sign and mantissa, exponents of 2^-6 … 2^-7. */
static void fill_bf16(uint16_t *p, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint16_t r = (uint16_t)next();
        p[i] = (uint16_t)((r & 0x8000) | (0x3c00 + ((r >> 7) & 1) * 0x80) | (r & 0x7f));
    }
}

static ql_status put(ql_st_writer *w, int64_t i, int64_t bytes, const uint8_t *from, size_t have)
{
    for (int64_t at = 0; at < bytes; at += (int64_t)have) QL_TRY(ql_st_put(w, i, from, ql_min64((int64_t)have, bytes - at)));
    return QL_OK;
}

static ql_status write_item(ql_st_writer *w, int64_t i, uint8_t *weights, uint8_t *ones)
{
    const ql_st_decl *d = &decls[i];
    float map8[256], scales[4096];
    int64_t n = d->shape[0] * (d->ndim > 1 ? d->shape[1] : 1), bytes = n * (int64_t)ql_dtype_size(d->dtype);
    switch (items[i].what) {
    case BYTES: {
        /* A different stretch of the pool for every tensor. */
        size_t off = (size_t)(next() % (POOL / 2));
        return put(w, i, bytes, pool + off, POOL / 2);
    }
    case CODES: return put(w, i, bytes, pool + next() % (POOL / 2), POOL / 2);
    case SCALES:
        for (int k = 0; k < 4096; k++) scales[k] = 0.01f + 0.005f * (float)(next() % 1000) / 1000;
        return put(w, i, bytes, (const uint8_t *)scales, sizeof scales);
    case MAP4: return ql_st_put(w, i, ql_nf4_map, 64);
    case MAP8: ql_dynamic_map_signed(map8); return ql_st_put(w, i, map8, sizeof map8);
    case STATE: return ql_st_put(w, i, items[i].state, bytes);
    case BF16_WEIGHT: return put(w, i, bytes, weights, POOL / 2);
    default: return put(w, i, bytes, ones, 1 << 20);
    }
}

static ql_status write_model(const shape *s, const char *folder)
{
    char path[QL_PATH_MAX];
    ql_st_writer *w = NULL;
    int64_t most = s->layers * (QL_LINEARS * 7 + 2) + 3;
    uint8_t *weights = malloc(POOL / 2), *ones = malloc(1 << 20);
    ql_status st = QL_OK;
    pool = malloc(POOL);
    decls = calloc((size_t)most, sizeof *decls);
    items = calloc((size_t)most, sizeof *items);
    if (!pool || !decls || !items || !weights || !ones) QL_FAIL(QL_ENOMEM, "no memory");
    for (size_t i = 0; i < POOL; i += 8) {
        uint64_t r = next();
        memcpy(pool + i, &r, 8);
    }
    fill_bf16((uint16_t *)(void *)weights, POOL / 4);
    for (size_t i = 0; i < 1 << 19; i++) ((uint16_t *)(void *)ones)[i] = 0x3f80;
    declare(s);
    QL_TRY(ql_path_join(path, folder, "model.safetensors"));
    const char *meta[] = {"format", "pt", NULL};
    QL_GO(ql_st_create(path, decls, count, meta, &w));
    for (int64_t i = 0; i < count; i++) QL_GO(write_item(w, i, weights, ones));
    QL_GO(ql_st_commit(w));
out:
    ql_st_writer_close(w);
    free(weights);
    free(ones);
    free(pool);
    free(decls);
    free(items);
    return st;
}

static ql_status write_config(const shape *s, const char *folder)
{
    char path[QL_PATH_MAX], text[4096];
    int n = snprintf(text, sizeof text,
                     "{\"architectures\": [\"%s\"], \"model_type\": \"%s\", \"hidden_size\": %" PRId64 ", \"num_hidden_layers\": %" PRId64
                     ", \"num_attention_heads\": %" PRId64 ", \"num_key_value_heads\": %" PRId64 ", \"head_dim\": %" PRId64
                     ", \"intermediate_size\": %" PRId64 ", \"vocab_size\": %" PRId64 ", \"tie_word_embeddings\": %s, \"rope_theta\": %g, "
                     "\"rms_norm_eps\": %g, \"hidden_act\": \"silu\", \"max_position_embeddings\": 131072, \"torch_dtype\": \"bfloat16\", "
                     "\"bos_token_id\": 1, \"eos_token_id\": 2, \"quantization_config\": {\"quant_method\": \"bitsandbytes\", "
                     "\"load_in_4bit\": true, \"bnb_4bit_quant_type\": \"nf4\", \"bnb_4bit_use_double_quant\": true, "
                     "\"bnb_4bit_compute_dtype\": \"bfloat16\"}}\n",
                     s->class, s->type, s->hidden, s->layers, s->heads, s->kv, s->dim, s->ffn, s->vocab, s->tied ? "true" : "false", s->theta,
                     s->eps);
    QL_TRY(ql_path_join(path, folder, "config.json"));
    return ql_file_save(path, text, (size_t)n);
}

static ql_status write_data(const shape *s, const char *folder, int64_t tokens)
{
    char path[QL_PATH_MAX];
    ql_dataset_writer *w = NULL;
    int32_t *ids = malloc((size_t)tokens * sizeof *ids);
    uint8_t *trained = malloc((size_t)tokens);
    ql_status st = QL_OK;
    if (!ids || !trained) QL_FAIL(QL_ENOMEM, "no memory");
    memset(trained, 1, (size_t)tokens);
    QL_TRY(ql_path_join(path, folder, "train.data"));
    QL_GO(ql_dataset_create(path, &w));
    for (int row = 0; row < 256; row++) {
        for (int64_t i = 0; i < tokens; i++) ids[i] = (int32_t)(next() % (uint64_t)s->vocab);
        QL_GO(ql_dataset_add(w, ids, trained, (size_t)tokens));
    }
    QL_GO(ql_dataset_commit(w, NULL));
out:
    ql_dataset_writer_close(w);
    free(ids);
    free(trained);
    return st;
}

int main(int argc, char **argv)
{
    const shape *s = NULL;
    for (size_t i = 0; argc > 2 && i < sizeof shapes / sizeof *shapes; i++)
        if (strcmp(shapes[i].name, argv[1]) == 0) s = &shapes[i];
    if (!s) {
        fprintf(stderr, "usage: make_model 1b|8b|32b|70b|tiny|stages FOLDER [TOKENS]\n");
        return 2;
    }
    int64_t tokens = argc > 3 ? strtoll(argv[3], NULL, 10) : 2048;
    /* With a model there already, only the data is made anew. */
    char path[QL_PATH_MAX];
    ql_status st = ql_path_mkdirs(argv[2]);
    if (st == QL_OK) st = write_config(s, argv[2]);
    if (st == QL_OK) st = ql_path_join(path, argv[2], "model.safetensors");
    if (st == QL_OK && !ql_path_is_file(path)) st = write_model(s, argv[2]);
    if (st == QL_OK) st = write_data(s, argv[2], tokens);
    if (st != QL_OK) fprintf(stderr, "make_model: %s\n", ql_error());
    return st != QL_OK;
}
