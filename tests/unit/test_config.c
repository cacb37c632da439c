#include "core/model.h"
#include "tests/tmp.h"

static ql_status parse(const char *fmt, const char *extra, ql_config *c)
{
    char text[4096];
    snprintf(text, sizeof text, fmt, extra);
    return ql_config_parse(text, strlen(text), "config.json", c);
}

#define SIZES                                                                                      \
    "\"hidden_size\":64,\"intermediate_size\":96,\"num_hidden_layers\":4,"                         \
    "\"num_attention_heads\":4,\"vocab_size\":100"
#define LLAMA "{\"model_type\":\"llama\",\"architectures\":[\"LlamaForCausalLM\"]," SIZES "%s}"
#define QWEN2 "{\"model_type\":\"qwen2\"," SIZES ",\"num_key_value_heads\":2%s}"

TEST(defaults_of_a_bare_llama)
{
    ql_config c;
    CHECK_OK(parse(LLAMA, "", &c));
    CHECK(c.arch == QL_LLAMA && c.kv_heads == 4 && c.head_dim == 16 && !c.tied && !c.qkv_bias);
    CHECK(c.window == 0 && c.rope.type == QL_ROPE_DEFAULT && c.rope.theta == 10000.0 &&
          c.eps == 1e-6);
    CHECK(c.bos == 1 && c.eos_count == 1 && c.eos[0] == 2 && c.pad == -1 &&
          c.max_positions == 2048);
    CHECK(c.dtype == QL_F32 && !c.quant.present);
}

TEST(both_spellings)
{
    ql_config a, b;
    CHECK_OK(
        parse(LLAMA,
              ",\"rope_theta\":5e5,\"torch_dtype\":\"bfloat16\",\"max_position_embeddings\":131072,"
              "\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8.0,\"low_freq_factor\":1,"
              "\"high_freq_factor\":4.0,\"original_max_position_embeddings\":8192}",
              &a));
    CHECK_OK(parse(
        LLAMA,
        ",\"dtype\":\"bfloat16\",\"max_position_embeddings\":131072,\"rope_parameters\":"
        "{\"rope_theta\":500000.0,\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":1.0,"
        "\"high_freq_factor\":4,\"original_max_position_embeddings\":8192}",
        &b));
    CHECK(a.dtype == QL_BF16 && a.rope.type == QL_ROPE_LLAMA3 &&
          a.rope.original == 8192);
    CHECK(b.dtype == a.dtype && b.rope.type == a.rope.type && b.rope.theta == a.rope.theta);
    CHECK(a.rope.theta == 5e5 && b.rope.factor == 8.0 && b.rope.high_freq == 4.0);
    CHECK_OK(parse(
        LLAMA, ",\"rope_scaling\":{\"type\":\"linear\",\"factor\":2},\"dtype\":\"torch.float16\"",
        &a));
    CHECK(a.rope.type == QL_ROPE_LINEAR && a.dtype == QL_F16);
}

TEST(families)
{
    ql_config c;
    CHECK_OK(parse("{\"model_type\":\"mistral\"," SIZES ",\"num_key_value_heads\":2%s}", "", &c));
    CHECK(c.window == 4096 && ql_config_window(&c, 0) == 4096);
    CHECK_OK(parse("{\"model_type\":\"mistral\"," SIZES ",\"num_key_value_heads\":2%s}",
                   ",\"sliding_window\":null,\"eos_token_id\":[2,5],\"bos_token_id\":null", &c));
    CHECK(c.window == 0 && c.eos_count == 2 && c.eos[1] == 5 && c.bos == -1);
    CHECK_OK(parse(QWEN2, ",\"sliding_window\":99,\"use_sliding_window\":false", &c));
    CHECK(c.qkv_bias && !c.o_bias && c.window == 0 && !ql_linear_bias(&c, QL_O) &&
          ql_linear_bias(&c, QL_V));
    CHECK_OK(parse(
        QWEN2, ",\"sliding_window\":99,\"use_sliding_window\":true,\"max_window_layers\":3", &c));
    CHECK(ql_config_window(&c, 2) == 0 && ql_config_window(&c, 3) == 99);
    CHECK_OK(parse(
        QWEN2,
        ",\"sliding_window\":99,\"use_sliding_window\":true,\"layer_types\":["
        "\"full_attention\",\"sliding_attention\",\"sliding_attention\",\"sliding_attention\"]",
        &c));
    CHECK(ql_config_window(&c, 0) == 0 && ql_config_window(&c, 1) == 99);
    CHECK_OK(parse("{\"model_type\":\"qwen3\"," SIZES "%s}", ",\"tie_word_embeddings\":true", &c));
    CHECK(c.qk_norm && c.head_dim == 128 && !c.qkv_bias && c.tied);
    CHECK_OK(parse(LLAMA, ",\"attention_bias\":true,\"mlp_bias\":true", &c));
    CHECK(ql_linear_bias(&c, QL_O) && ql_linear_bias(&c, QL_DOWN) && c.qkv_bias);
}

/* transformers 5.23 (torch 2.13 on a CPU), its inv_freq for D = 16. */
TEST(rope_frequencies_as_transformers)
{
    static const struct {
        const char *extra;
        double scaling;
        float f[8];
    } k[] = {
        {"\"rope_theta\":5e5",
         1.0,
         {1, 0.193922758f, 0.0376060307f, 0.00729266508f, 0.00141421345f, 0.000274248188f,
          5.31829573e-05f, 1.03133852e-05f}},
        {"\"rope_scaling\":{\"rope_type\":\"linear\",\"factor\":3.0}",
         1.0,
         {0.333333343f, 0.105409257f, 0.0333333351f, 0.0105409259f, 0.00333333318f, 0.00105409266f,
          0.000333333359f, 0.000105409265f}},
        {"\"max_position_embeddings\":131072,\"rope_theta\":500000,\"rope_scaling\":{\"rope_type\":"
         "\"llama3\",\"factor\":8,\"low_freq_factor\":1,\"high_freq_factor\":4,"
         "\"original_max_position_embeddings\":8192}",
         1.0,
         {1, 0.193922758f, 0.0376060307f, 0.00729266508f, 0.000524846022f, 3.42810235e-05f,
          6.64786967e-06f, 1.28917316e-06f}},
        {"\"max_position_embeddings\":131072,\"rope_parameters\":{\"rope_theta\":1e6,\"rope_type\":"
         "\"yarn\","
         "\"factor\":4,\"original_max_position_embeddings\":32768}",
         1.138629436111989,
         {1, 0.177827939f, 0.0316227786f, 0.00421755994f, 0.000500000024f, 4.44569851e-05f,
          7.90569356e-06f, 1.40585337e-06f}},
        {"\"max_position_embeddings\":4096,\"rope_parameters\":{\"rope_theta\":1e4,\"rope_type\":"
         "\"yarn\","
         "\"factor\":4,\"original_max_position_embeddings\":1024,\"beta_fast\":16,\"beta_slow\":2,"
         "\"truncate\":false,\"mscale\":0.7,\"mscale_all_dim\":1.3}",
         0.9295234923939468,
         {1, 0.316227764f, 0.100000001f, 0.0187018048f, 0.00249999994f, 0.000790569466f,
          0.000250000012f, 7.90569466e-05f}},
    };
    for (size_t i = 0; i < sizeof k / sizeof *k; i++) {
        ql_config c;
        char extra[1024];
        float f[8];
        snprintf(extra, sizeof extra, ",%s", k[i].extra);
        CHECK_OK(parse(LLAMA, extra, &c));
        ql_rope_inv_freq(&c, f);
        CHECK_CLOSE(c.rope.attention_scaling, k[i].scaling, 1e-15);
        for (int j = 0; j < 8; j++) /* one ulp: torch's vectorised powf is not correctly rounded */
            CHECK_MSG(fabsf(f[j] - k[i].f[j]) <= 1.2e-7f * k[i].f[j],
                      "case %zu, %d: %.9g, not %.9g", i, j, (double)f[j], (double)k[i].f[j]);
    }
}

TEST(quantization_config)
{
    ql_config c;
    CHECK_OK(
        parse(LLAMA,
              ",\"quantization_config\":{\"quant_method\":\"bitsandbytes\",\"load_in_4bit\":true,"
              "\"bnb_4bit_quant_type\":\"nf4\",\"bnb_4bit_use_double_quant\":true,"
              "\"llm_int8_skip_modules\":[\"lm_head\",\"model.layers.1.mlp\",\"o_proj\"]}",
              &c));
    CHECK(c.quant.present && !c.quant.fp4 && c.quant.nested && c.quant.skips == 3);
    CHECK(ql_config_skips(&c, 1, QL_UP) && !ql_config_skips(&c, 11, QL_UP) &&
          !ql_config_skips(&c, 0, QL_UP));
    CHECK(ql_config_skips(&c, 0, QL_O) && !ql_config_skips(&c, 1, QL_Q));
    ql_config_free(&c);
    CHECK_OK(parse(LLAMA, ",\"quantization_config\":{\"load_in_4bit\":true}", &c));
    CHECK(c.quant.present && c.quant.fp4 && !c.quant.nested);
    ql_config_free(&c);
}

TEST(params_of_llama_8b)
{
    ql_config c;
    static const char text[] =
        "{\"model_type\":\"llama\",\"hidden_size\":4096,\"intermediate_size\":14336,\"num_hidden_"
        "layers\":32,"
        "\"num_attention_heads\":32,\"num_key_value_heads\":8,\"vocab_size\":128256}";
    CHECK_OK(ql_config_parse(text, sizeof text - 1, "config.json", &c));
    CHECK_INT(ql_config_params(&c), 8030261248);
}

TEST_MAIN(T(defaults_of_a_bare_llama), T(both_spellings), T(families),
          T(rope_frequencies_as_transformers), T(quantization_config), T(params_of_llama_8b))
