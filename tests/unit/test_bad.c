/* The corpus of broken input (tests/bad/): every entry has its message, none crashes or leaks. */
#include "core/json.h"
#include "core/lora.h"
#include "core/model.h"
#include "tests/tmp.h"

typedef struct {
    const char *name, *header;
    long long size;
    size_t data;
    const char *message;
} bad_safetensors;
typedef struct {
    const char *name, *text, *message;
} bad_text;
typedef enum { SAME, GONE, CHANGED, ADDED } change;
typedef struct {
    const char *name, *tensor;
    change change;
    ql_dtype dtype;
    int ndim;
    int64_t shape[2];
    const char *message;
} bad_tensor;

#include "tests/bad/adapter.h"
#include "tests/bad/config.h"
#include "tests/bad/model.h"
#include "tests/bad/safetensors.h"

#define COUNT(a) ((int)(sizeof(a) / sizeof *(a)))

/* Like CHECK_FAILS, but names the entry. */
#define CHECK_BAD(call, entry)                                                                     \
    do {                                                                                           \
        ql_status s_ = (call);                                                                     \
        CHECK_MSG(s_ == QL_EINVAL || s_ == QL_ENOSUP, "'%s' is accepted, or fails as '%s': %s",    \
                  (entry)->name, ql_status_name(s_), ql_error());                                  \
        CHECK_MSG(strstr(ql_error(), (entry)->message), "'%s': '%s' is not in: %s", (entry)->name, \
                  (entry)->message, ql_error());                                                   \
        ql_error_clear();                                                                          \
    } while (0)

TEST(safetensors)
{
    const char *p = tmp_path("bad.safetensors");
    for (int i = 0; i < COUNT(bad_safetensors_files); i++) {
        const bad_safetensors *b = &bad_safetensors_files[i];
        ql_st *st = NULL;
        tmp_safetensors(p, b->header, b->size, b->data);
        CHECK_BAD(ql_st_open(p, &st), b);
        CHECK(st == NULL);
    }
}

TEST(indexes)
{
    const char *dir = tmp_dir("indexes");
    char p[QL_PATH_MAX];
    static const char *const shards[][2] = {
        {"a.safetensors", "xy"}, {"b.safetensors", "zw"}, {"dup.safetensors", "yx"}};
    for (int i = 0; i < 3; i++) {
        char header[256];
        snprintf(header, sizeof header,
                 "{\"%c\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
                 "\"%c%s\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}",
                 shards[i][1][0], shards[i][1][1], i == 1 ? "2" : "");
        CHECK_OK(ql_path_join(p, dir, shards[i][0]));
        tmp_safetensors(p, header, -1, 2);
    }
    for (int i = 0; i < COUNT(bad_indexes); i++) {
        ql_st *st = NULL;
        tmp_text(dir, "model.safetensors.index.json", bad_indexes[i].text);
        CHECK_BAD(ql_st_open(dir, &st), &bad_indexes[i]);
    }
    ql_st *st = NULL;
    tmp_text(dir, "model.safetensors.index.json",
             "{\"weight_map\":{\"x\":\"a.safetensors\",\"y\":\"a.safetensors\",\"z\":\"b."
             "safetensors\"}}");
    CHECK_OK(ql_st_open(dir, &st));
    ql_st_close(st);
}

TEST(folders)
{
    const char *dir = tmp_dir("folders");
    ql_st *st = NULL;
    ql_model *m = NULL;
    CHECK_FAILS(ql_model_open(dir, &m), QL_EINVAL, "has no config.json: not a model folder");
    CHECK_FAILS(ql_model_open(tmp_path("nowhere"), &m), QL_EINVAL, "is not a folder");
    CHECK_FAILS(ql_st_open(dir, &st), QL_EINVAL, "has neither model.safetensors nor");
    CHECK_FAILS(ql_st_open(tmp_path("nowhere"), &st), QL_EIO, "No such file");
    tmp_text(dir, "pytorch_model.bin", "x");
    CHECK_FAILS(ql_st_open(dir, &st), QL_ENOSUP, "holds pytorch_model.bin only");
    tmp_text(dir, "adapter_config.json", "{}");
    CHECK_FAILS(ql_model_open(dir, &m), QL_EINVAL, "is a PEFT adapter, not a model");
    CHECK(mkfifo(tmp_path("folders/model.safetensors"), 0600) == 0);
    CHECK_FAILS(ql_st_open(tmp_path("folders/model.safetensors"), &st), QL_EINVAL,
                "not a regular file");
}

TEST(configs)
{
    static const char sizes[] =
        "\"hidden_size\":64,\"intermediate_size\":96,\"num_hidden_layers\":2,"
        "\"num_attention_heads\":4,\"vocab_size\":100";
    for (int i = 0; i < COUNT(bad_configs); i++) {
        const bad_text *b = &bad_configs[i];
        char text[4096], all[512];
        ql_config c;
        const char *at = strstr(b->text, "%s"), *given = at ? at + 2 : "";
        /* The sizes that the entry itself does not set: duplicate keys would be refused first. */
        all[0] = 0;
        char copy[512], *save = NULL;
        memcpy(copy, sizes, sizeof sizes);
        for (char *part = strtok_r(copy, ",", &save); part; part = strtok_r(NULL, ",", &save)) {
            char key[64];
            snprintf(key, sizeof key, "%.*s", (int)(strchr(part, ':') - part), part);
            if (strstr(given, key)) continue;
            strcat(all, all[0] ? "," : "");
            strcat(all, part);
        }
        if (at)
            snprintf(text, sizeof text, "%.*s%s%s", (int)(at - b->text), b->text, all, given);
        else
            snprintf(text, sizeof text, "%s", b->text);
        CHECK_BAD(ql_config_parse(text, strlen(text), "config.json", &c), b);
    }
}

/* ---- a whole tiny model with one change
 * ---------------------------------------------------------- */

#define STATE                                                                                      \
    "{\"quant_type\":\"nf4\",\"blocksize\":64,\"dtype\":\"bfloat16\",\"shape\":[32,48],"           \
    "\"nested_blocksize\":256,\"nested_dtype\":\"float32\",\"nested_offset\":0.5}"
#define P    "model.layers.0."
#define DOWN P "mlp.down_proj.weight"

static const ql_st_decl whole[] = {
    {"model.embed_tokens.weight", QL_BF16, 2, {10, 32}},
    {"model.norm.weight", QL_BF16, 1, {32}},
    {P "input_layernorm.weight", QL_BF16, 1, {32}},
    {P "post_attention_layernorm.weight", QL_BF16, 1, {32}},
    {P "self_attn.q_proj.weight", QL_BF16, 2, {32, 32}},
    {P "self_attn.k_proj.weight", QL_BF16, 2, {16, 32}},
    {P "self_attn.v_proj.weight", QL_BF16, 2, {16, 32}},
    {P "self_attn.o_proj.weight", QL_BF16, 2, {32, 32}},
    {P "mlp.gate_proj.weight", QL_BF16, 2, {48, 32}},
    {P "mlp.up_proj.weight", QL_BF16, 2, {48, 32}},
    {P "self_attn.rotary_emb.inv_freq", QL_F32, 1, {4}},
    {DOWN, QL_U8, 2, {768, 1}},
    {DOWN ".absmax", QL_U8, 1, {24}},
    {DOWN ".quant_map", QL_F32, 1, {16}},
    {DOWN ".nested_absmax", QL_F32, 1, {1}},
    {DOWN ".nested_quant_map", QL_F32, 1, {256}},
    {DOWN ".quant_state.bitsandbytes__nf4", QL_U8, 1, {sizeof STATE - 1}},
};

/* The model with a changed tensor (b, may be NULL) or another quant_state (text, may be NULL). */
static ql_status write_model(const char *dir, const bad_tensor *b, const char *text)
{
    static const char zero[8192];
    ql_st_decl d[COUNT(whole) + 1];
    int n = 0;
    char p[QL_PATH_MAX];
    ql_status st = QL_OK;
    ql_st_writer *w = NULL;
    for (int i = 0; i < COUNT(whole); i++) {
        bool hit = b && strcmp(b->tensor, whole[i].name) == 0;
        if (hit && b->change == GONE) continue;
        d[n] = whole[i];
        if (hit) d[n] = (ql_st_decl){b->tensor, b->dtype, b->ndim, {b->shape[0], b->shape[1]}};
        if (text && strstr(whole[i].name, "quant_state")) d[n].shape[0] = (int64_t)strlen(text);
        n++;
    }
    if (b && b->change == ADDED)
        d[n++] = (ql_st_decl){b->tensor, b->dtype, b->ndim, {b->shape[0], b->shape[1]}};
    QL_TRY(ql_path_join(p, dir, "model.safetensors"));
    QL_GO(ql_st_create(p, d, n, NULL, &w));
    for (int i = 0; i < n; i++) {
        int64_t bytes = (int64_t)ql_dtype_size(d[i].dtype);
        for (int k = 0; k < d[i].ndim; k++) bytes *= d[i].shape[k];
        bool changed = b && strcmp(b->tensor, d[i].name) == 0;
        const void *data = zero;
        if (strstr(d[i].name, "__nf4") && !changed) data = text ? text : STATE;
        QL_GO(ql_st_put(w, i, data, bytes));
    }
    QL_GO(ql_st_commit(w));
out:
    ql_st_writer_close(w);
    return st;
}

#define CONFIG(more)                                                                               \
    "{\"model_type\":\"llama\",\"hidden_size\":32,\"intermediate_size\":48,\"num_hidden_layers\":1,"   \
    "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"vocab_size\":10" more "}"

static const char *model_dir(void)
{
    const char *dir = tmp_dir("whole");
    tmp_text(dir, "config.json", CONFIG(",\"tie_word_embeddings\":true"));
    return dir;
}

TEST(tensors)
{
    const char *dir = model_dir();
    ql_model *m = NULL;
    CHECK_OK(write_model(dir, NULL, NULL));
    CHECK_OK(ql_model_open(dir, &m)); /* whole, it opens */
    ql_model_close(m);
    m = NULL;
    tmp_text(dir, "config.json", CONFIG("")); /* nothing is said of the head: it has weights of its own */
    CHECK_FAILS(ql_model_open(dir, &m), QL_EINVAL, "'lm_head.weight' is missing (config.json asks for it: its tie_word_embeddings is not true)");
    tmp_text(dir, "config.json", CONFIG(",\"tie_word_embeddings\":true"));
    for (int i = 0; i < COUNT(bad_tensors); i++) {
        CHECK_OK(write_model(dir, &bad_tensors[i], NULL));
        CHECK_BAD(ql_model_open(dir, &m), &bad_tensors[i]);
    }
    for (int i = 0; i < COUNT(bad_states); i++) {
        CHECK_OK(write_model(dir, NULL, bad_states[i].text));
        CHECK_BAD(ql_model_open(dir, &m), &bad_states[i]);
    }
    CHECK(m == NULL);
}

/* Cut at every length, and with every bit of the header flipped, the file opens or fails, no more.
 */
TEST(every_cut_and_every_flip)
{
    const char *p = tmp_path("sweep.safetensors");
    static const char header[] =
        "{\"__metadata__\":{\"format\":\"pt\"},\"a\":{\"dtype\":\"F16\",\"shape\":[2,2],"
        "\"data_offsets\":[0,8]},\"bc\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[8,9]}}";
    enum { N = 8 + sizeof header - 1 + 9 };
    char whole_file[N] = {0}, file[N];
    int opened = 0;
    whole_file[0] = (char)(sizeof header - 1);
    memcpy(whole_file + 8, header, sizeof header - 1);
    for (int n = 0; n <= N; n++) {
        ql_st *st = NULL;
        tmp_write(p, whole_file, (size_t)n);
        ql_status s = ql_st_open(p, &st);
        CHECK_MSG((s == QL_OK) == (n == N), "cut at %d of %d: %s", n, N, ql_error());
        CHECK(s == QL_OK || ql_error()[0]);
        ql_error_clear();
        ql_st_close(st);
    }
    for (int bit = 0; bit < 8 * (N - 9); bit++) {
        ql_st *st = NULL;
        memcpy(file, whole_file, N);
        file[bit / 8] = (char)(file[bit / 8] ^ (1 << bit % 8));
        tmp_write(p, file, N);
        opened += ql_st_open(p, &st) == QL_OK;
        ql_error_clear();
        ql_st_close(st);
    }
    CHECK_MSG(opened > 0 && opened < 8 * (N - 9) / 3, "%d flips of %d are accepted", opened,
              8 * (N - 9));
}

TEST(adapters)
{
    ql_config m = {.arch = QL_LLAMA,
                   .hidden = 64,
                   .layers = 2,
                   .heads = 4,
                   .kv_heads = 2,
                   .head_dim = 16,
                   .ffn = 96,
                   .vocab = 100};
    const char *dir = tmp_dir("adapters");
    ql_lora *l = NULL;
    CHECK_FAILS(ql_lora_open(dir, &m, &l), QL_EINVAL,
                "has no adapter_config.json: not a PEFT adapter");
    for (int i = 0; i < COUNT(bad_adapters); i++) {
        tmp_text(dir, "adapter_config.json", bad_adapters[i].text);
        CHECK_BAD(ql_lora_open(dir, &m, &l), &bad_adapters[i]);
    }
    /* In a job a name that matches nothing is an error even beside others; in a saved adapter it is
     * not. */
    static const char some[] = "{\"target_modules\":[\"q_proj\",\"query_key_value\"]}";
    json_t *o = NULL;
    ql_lora_config c = {0};
    CHECK_OK(ql_json_parse(some, sizeof some - 1, "job", &o));
    CHECK_OK(ql_lora_config_parse(o, "job", &c));
    json_decref(o);
    CHECK_FAILS(ql_lora_build(&m, &c, &l), QL_EINVAL,
                "'query_key_value' matches no module; there are q_proj");
    tmp_text(dir, "adapter_config.json", some);
    CHECK_OK(ql_lora_open(dir, &m, &l));
    ql_lora_close(l);
}

/* adapter_model.safetensors against a config of q_proj in one layer, r 2: one change each. */
TEST(adapter_tensors)
{
#define A   "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
#define B   "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
#define T_A "\"" A "\":{\"dtype\":\"F32\",\"shape\":[2,64],\"data_offsets\":[0,512]}"
#define T_B "\"" B "\":{\"dtype\":\"F32\",\"shape\":[64,2],\"data_offsets\":[512,1024]}"
#define EXTRA(name)                                                                                \
    "{" T_A "," T_B ",\"" name "\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[1024,1028]}" \
                               "}"
    static const struct {
        const char *name, *header;
        size_t data;
        const char *message;
    } k[] = {
        {"misspelt",
         "{" T_A
         ",\"base_model.model.model.layers.0.self_attn.q_proj.lora_b.weight\":{\"dtype\":\"F32\","
         "\"shape\":[64,2],\"data_offsets\":[512,1024]}}",
         1024,
         "q_proj.lora_b.weight' is not part of the adapter that adapter_config.json describes; '" B
         "' is missing"},
        {"missing", "{" T_A "}", 512, "tensor '" B "' is missing (1 of 2 are there)"},
        {"empty", "{}", 0, "tensor '" A "' is missing (0 of 2 are there)"},
        {"DoRA", EXTRA("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"),
         1028, "belongs to DoRA, which is not supported"},
        {"bias", EXTRA("base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias"), 1028,
         "belongs to lora_bias"},
        {"saved module", EXTRA("base_model.model.lm_head.weight"), 1028,
         "belongs to modules_to_save"},
        {"embedding", EXTRA("base_model.model.model.embed_tokens.lora_embedding_A"), 1028,
         "is an embedding's adapter"},
        {"wrong rank",
         "{\"" A "\":{\"dtype\":\"F32\",\"shape\":[3,64],\"data_offsets\":[0,768]},\"" B
         "\":{\"dtype\":\"F32\",\"shape\":[64,2],\"data_offsets\":[768,1280]}}",
         1280, "'" A "' has shape [3, 64], expected [2, 64]"},
        {"integers",
         "{\"" A "\":{\"dtype\":\"I32\",\"shape\":[2,64],\"data_offsets\":[0,512]}," T_B "}", 1024,
         "has dtype int32; supported: float32"},
    };
    ql_config m = {.arch = QL_LLAMA,
                   .hidden = 64,
                   .layers = 1,
                   .heads = 4,
                   .kv_heads = 2,
                   .head_dim = 16,
                   .ffn = 96,
                   .vocab = 100};
    const char *dir = tmp_dir("tensors");
    char p[QL_PATH_MAX];
    static float flat[2 * QL_LORA_PAD];
    ql_lora *l = NULL;
    tmp_text(dir, "adapter_config.json", "{\"r\":2,\"target_modules\":[\"q_proj\"]}");
    CHECK_OK(ql_path_join(p, dir, "adapter_model.safetensors"));
    CHECK_OK(ql_lora_open(dir, &m, &l));
    CHECK_FAILS(ql_lora_read(l, dir, flat), QL_EIO, "cannot open");
    tmp_text(dir, "adapter_model.bin", "x");
    CHECK_FAILS(ql_lora_read(l, dir, flat), QL_ENOSUP, "holds adapter_model.bin only");
    for (int i = 0; i < COUNT(k); i++) {
        tmp_safetensors(p, k[i].header, -1, k[i].data);
        CHECK_BAD(ql_lora_read(l, dir, flat), &k[i]);
    }
    tmp_safetensors(p, "{" T_A "," T_B "}", -1, 1024);
    CHECK_OK(ql_lora_read(l, dir, flat));
    /* One NaN in B, at element 5 of 128. */
    FILE *f = fopen(p, "r+b");
    CHECK(f && fseek(f, -512 + 5 * 4, SEEK_END) == 0 && fwrite("\0\0\xc0\x7f", 1, 4, f) == 4 &&
          fclose(f) == 0);
    CHECK_FAILS(ql_lora_read(l, dir, flat), QL_EINVAL,
                "'" B "' has a value that is not finite at [2, 1]");
    ql_lora_close(l);
}

TEST(the_corpus_is_large_enough)
{
    CHECK(COUNT(bad_safetensors_files) + COUNT(bad_indexes) + COUNT(bad_configs) +
              COUNT(bad_tensors) + COUNT(bad_states) + COUNT(bad_adapters) >=
          150);
}

TEST_MAIN(T(safetensors), T(indexes), T(folders), T(configs), T(tensors),
          T(every_cut_and_every_flip), T(adapters), T(adapter_tensors),
          T(the_corpus_is_large_enough))
