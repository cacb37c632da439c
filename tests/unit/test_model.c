#include "core/model.h"
#include "tests/tmp.h"

#include <sys/mman.h>

static const char *const cases[] = {"llama", "mistral", "qwen2", "qwen3"};

static const char *folder(const char *name, const char *sub)
{
    static char p[256];
    snprintf(p, sizeof p, "tests/golden/%s/%s", name, sub);
    return p;
}

TEST(sixteen_bit_folders)
{
    for (int i = 0; i < 4; i++) {
        ql_model *m = NULL;
        CHECK_OK(ql_model_open(folder(cases[i], "model"), &m));
        CHECK(m->cfg.arch == (ql_arch)i);
        CHECK_STR(ql_arch_name(m->cfg.arch), cases[i]);
        CHECK((m->head.data == m->embed.data) == m->cfg.tied);
        for (int64_t l = 0; l < m->cfg.layers; l++) {
            const ql_block *b = &m->block[l];
            for (int w = 0; w < QL_LINEARS; w++) {
                CHECK(b->w[w].kind == QL_PLAIN && b->w[w].data && b->w[w].dtype == m->cfg.dtype);
                CHECK((b->bias[w].data != NULL) == ql_linear_bias(&m->cfg, (ql_linear)w));
            }
            CHECK((b->q_norm.cols == m->cfg.head_dim) == m->cfg.qk_norm);
        }
        ql_model_close(m);
    }
}

TEST(quantised_folders)
{
    int plain = 0;
    for (int i = 0; i < 4; i++) {
        ql_model *m = NULL;
        CHECK_OK(ql_model_open(folder(cases[i], "model-nf4"), &m));
        CHECK(m->cfg.quant.present);
        for (int64_t l = 0; l < m->cfg.layers; l++) {
            for (int w = 0; w < QL_LINEARS; w++) {
                const ql_weight *q = &m->block[l].w[w];
                if (q->kind == QL_PLAIN) {
                    CHECK(q->skip &&
                          q->bytes == q->rows * q->cols * (int64_t)ql_dtype_size(q->dtype));
                    plain++;
                    continue;
                }
                CHECK(q->kind == QL_NF4 && q->block == 64 && q->absmax && q->dtype == m->cfg.dtype);
                CHECK_INT(q->bytes, (q->rows * q->cols + 1) / 2);
                CHECK(q->quant_map[0] == -1.0f && q->quant_map[15] == 1.0f);
                CHECK((q->nested_block == 256) == m->cfg.quant.nested);
                CHECK(!q->nested_block ||
                      (q->nested_absmax && q->nested_map && q->nested_offset > 0));
            }
        }
        ql_model_done_with(m, m->block[0].w[0].data, m->block[0].w[0].bytes);
        ql_model_close(m);
    }
    CHECK_INT(plain, 1);
}

/* The table made from the config alone has the kinds, sizes and names of the real one. */
/* llm_int8_skip_modules of a job: parts of paths that end where a name ends. */
TEST(a_jobs_own_list_of_what_stays)
{
    static const struct {
        const char *names;
        int skipped; /* of 2 layers of 7 */
    } k[] = {{"null", 0}, {"[]", 0}, {"[\"lm_head\"]", 0}, {"\"down_proj\"", 2}, {"[\"self_attn\", \"up_proj\"]", 10}, {"[\"model.layers.1\"]", 7},
             {"[\"layers.1.mlp\", \"mlp.gate\"]", 3}, {"[\"model.layers.11\", \"q_pro\"]", 0}};
    ql_model *m = NULL, *quantised = NULL;
    CHECK_OK(ql_model_open(folder("llama", "model"), &m));
    CHECK_OK(ql_model_open(folder("llama", "model-nf4"), &quantised));
    CHECK_INT(m->cfg.layers, 2);
    for (size_t i = 0; i < sizeof k / sizeof *k; i++) {
        json_t *names = json_loads(k[i].names, JSON_DECODE_ANY, NULL);
        int n = 0, changed = 0;
        for (int w = 0; w < 14; w++) m->block[w / 7].w[w % 7].skip = false;
        ql_model_skip(m, names);
        for (int w = 0; w < 14; w++) n += m->block[w / 7].w[w % 7].skip;
        CHECK_MSG(n == k[i].skipped, "%s skips %d linears, not %d", k[i].names, n, k[i].skipped);
        /* A folder that is quantised says itself what is not. */
        for (int w = 0; w < 14; w++) {
            const ql_weight *q = &quantised->block[w / 7].w[w % 7];
            bool before = q->skip;
            ql_model_skip(quantised, names);
            changed += before != q->skip;
        }
        CHECK_INT(changed, 0);
        json_decref(names);
    }
    ql_model_close(m);
    ql_model_close(quantised);
}

TEST(config_alone_promises_the_same)
{
    for (int i = 0; i < 8; i++) {
        ql_model *m = NULL, *p = NULL;
        const char *dir = folder(cases[i / 2], i % 2 ? "model-nf4" : "model");
        CHECK_OK(ql_model_open(dir, &m));
        CHECK_OK(ql_model_open_config(dir, &p));
        CHECK(p->files == NULL && p->embed.rows == m->embed.rows && p->embed.data == NULL);
        for (int64_t l = 0; l < m->cfg.layers; l++) {
            for (int w = 0; w < QL_LINEARS; w++) {
                const ql_weight *a = &m->block[l].w[w], *b = &p->block[l].w[w];
                CHECK_STR(b->name, a->name);
                CHECK(a->kind == b->kind && a->bytes == b->bytes && a->blocks == b->blocks);
                CHECK(a->nested_block == b->nested_block && a->dtype == b->dtype &&
                      a->skip == b->skip);
            }
            CHECK_STR(p->block[l].norm_ffn.name, m->block[l].norm_ffn.name);
        }
        ql_model_close(m);
        ql_model_close(p);
    }
}

/* Opening must not touch the pages of weights: a sparse 2 GiB file is opened, and none of it gets
 * in. */
TEST(opening_reads_headers_only)
{
    const char *dir = tmp_dir("big");
    char p[QL_PATH_MAX];
    const int64_t V = 1 << 20, C = 512;
    char header[4096];
    int n = snprintf(header, sizeof header, "{");
    int64_t at = 0;
    static const char *const names[] = {"model.embed_tokens.weight",
                                        "model.layers.0.self_attn.q_proj.weight",
                                        "model.layers.0.self_attn.k_proj.weight",
                                        "model.layers.0.self_attn.v_proj.weight",
                                        "model.layers.0.self_attn.o_proj.weight",
                                        "model.layers.0.mlp.gate_proj.weight",
                                        "model.layers.0.mlp.up_proj.weight",
                                        "model.layers.0.mlp.down_proj.weight",
                                        "model.layers.0.input_layernorm.weight",
                                        "model.layers.0.post_attention_layernorm.weight",
                                        "model.norm.weight"};
    tmp_text(dir, "config.json",
             "{\"model_type\":\"llama\",\"hidden_size\":512,\"intermediate_size\":64,\"num_hidden_"
             "layers\":1,"
             "\"num_attention_heads\":8,\"vocab_size\":1048576,\"tie_word_embeddings\":true}");
    for (int i = 0; i < 11; i++) {
        int64_t rows = i == 0 ? V : i < 5 ? C : i < 7 ? 64 : C, cols = i == 7 ? 64 : C;
        int64_t bytes = 2 * (i < 8 ? rows * cols : C);
        char shape[64];
        if (i < 8)
            snprintf(shape, sizeof shape, "[%lld,%lld]", (long long)rows, (long long)cols);
        else
            snprintf(shape, sizeof shape, "[%lld]", (long long)C);
        n += snprintf(header + n, sizeof header - (size_t)n,
                      "%s\"%s\":{\"dtype\":\"BF16\",\"shape\":%s,\"data_offsets\":[%lld,%lld]}",
                      i ? "," : "", names[i], shape, (long long)at, (long long)(at + bytes));
        at += bytes;
    }
    snprintf(header + n, sizeof header - (size_t)n, "}");
    CHECK_OK(ql_path_join(p, dir, "model.safetensors"));
    tmp_safetensors(p, header, -1, 0);
    CHECK(truncate(p, 8 + (off_t)strlen(header) + at) == 0);
    ql_model *m = NULL;
    CHECK_OK(ql_model_open(dir, &m));
    CHECK(m->embed.data == m->head.data);
    /* mincore over the embedding: no page of it is resident (the first may share the header's). */
    const size_t page = 4096, span = (size_t)(V * C * 2) / page - 64;
    unsigned char *in = malloc(span);
    char *from = (char *)(((uintptr_t)m->embed.data / page + 32) * page);
    CHECK(in && mincore(from, span * page, in) == 0);
    size_t resident = 0;
    for (size_t i = 0; i < span; i++) resident += in[i] & 1;
    free(in);
    CHECK_INT(resident, 0);
    ql_model_close(m);
}

TEST_MAIN(T(sixteen_bit_folders), T(quantised_folders), T(a_jobs_own_list_of_what_stays), T(config_alone_promises_the_same),
          T(opening_reads_headers_only))
