#include "core/json.h"
#include "core/nf4.h"
#include "kernels/half.h"
#include "tests/tmp.h"

/* FIPS 180-4, for the published hashes of the 8-bit maps. */
static uint32_t rotr(uint32_t x, int n)
{
    return x >> n | x << (32 - n);
}

static bool prime(int n)
{
    for (int d = 2; d * d <= n; d++)
        if (n % d == 0) return false;
    return true;
}

static void sha256_block(uint32_t h[8], const unsigned char *p)
{
    uint32_t w[64], s[8];
    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)p[4 * i] << 24 | (uint32_t)p[4 * i + 1] << 16 |
               (uint32_t)p[4 * i + 2] << 8 | p[4 * i + 3];
    for (int i = 16; i < 64; i++)
        w[i] = w[i - 16] + w[i - 7] + (rotr(w[i - 15], 7) ^ rotr(w[i - 15], 18) ^ w[i - 15] >> 3) +
               (rotr(w[i - 2], 17) ^ rotr(w[i - 2], 19) ^ w[i - 2] >> 10);
    memcpy(s, h, sizeof s);
    for (int i = 0, n = 2; i < 64; i++, n++) {
        while (!prime(n)) n++;
        double root = cbrt((double)n); /* the constants are fractions of the primes' cube roots */
        uint32_t k = (uint32_t)((root - floor(root)) * 4294967296.0);
        uint32_t t1 = s[7] + (rotr(s[4], 6) ^ rotr(s[4], 11) ^ rotr(s[4], 25)) +
                      ((s[4] & s[5]) ^ (~s[4] & s[6])) + k + w[i];
        uint32_t t2 = (rotr(s[0], 2) ^ rotr(s[0], 13) ^ rotr(s[0], 22)) +
                      ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
        memmove(s + 1, s, 7 * sizeof *s);
        s[4] += t1;
        s[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++) h[i] += s[i];
}

static const char *sha256(const void *data, size_t n)
{
    static char hex[65];
    uint32_t h[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                     0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    size_t full = n / 64 * 64, rest = n - full, total = rest < 56 ? 64 : 128;
    unsigned char last[128] = {0};
    for (size_t i = 0; i < full; i += 64) sha256_block(h, (const unsigned char *)data + i);
    memcpy(last, (const unsigned char *)data + full, rest);
    last[rest] = 0x80;
    for (int i = 0; i < 8; i++)
        last[total - 1 - (size_t)i] = (unsigned char)((uint64_t)n * 8 >> (8 * i));
    for (size_t i = 0; i < total; i += 64) sha256_block(h, last + i);
    for (int i = 0; i < 8; i++) snprintf(hex + 8 * i, 9, "%08x", h[i]);
    return hex;
}

TEST(dynamic_maps_have_the_published_hashes)
{
    float map[256];
    CHECK_STR(sha256("abc", 3), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    ql_dynamic_map_signed(map);
    CHECK_STR(sha256(map, sizeof map),
              "e732639a65f497b4ad684bb166a4467708255edd5207757de8b8f0c7e1fda89c");
    CHECK(map[127] == 0.0f && map[255] == 1.0f);
    ql_dynamic_map_unsigned(map);
    CHECK_STR(sha256(map, sizeof map),
              "305f002cc11278fb769d13b25b9fd0c7c83c8402c40a878fe086f4039fde6398");
}

/* The search finds the nearest entry; a tie stays where the walk ended. */
TEST(dynamic_code_is_nearest)
{
    float map[256];
    ql_dynamic_map_signed(map);
    for (int i = 0; i < 256; i++) CHECK_INT(ql_dynamic_code(map, map[i]), i);
    for (int i = 0; i < 20001; i++) {
        float y = (float)(i - 10000) / 10000.0f, best = INFINITY;
        for (int k = 0; k < 256; k++) best = fminf(best, fabsf(map[k] - y));
        float d = fabsf(map[ql_dynamic_code(map, y)] - y);
        CHECK_MSG(d <= best + 1e-7f, "y %g: distance %g, best %g", (double)y, (double)d,
                  (double)best);
    }
    CHECK_INT(ql_dynamic_code(map, NAN), 0);
}

TEST(edges)
{
    float x[131] = {0}, absmax[3];
    uint8_t packed[66];
    for (int i = 64; i < 131; i++) x[i] = i % 2 ? -2.0f : 0.5f;
    ql_nf4_quantise(x, 131, packed, absmax);
    CHECK(packed[0] == 0x00 && packed[31] == 0x00 && absmax[0] == 0.0f);
    CHECK(absmax[1] == 2.0f && packed[32] == 0xa0); /* 0.25 → code 10, -1 → 0 */
    CHECK(packed[65] == 0xa7);                      /* the odd end: code of 0 in the low nibble */
    /* Ties go to the lower code: the midpoint of 1.0 and 0.7229…, and its upper neighbour. */
    float t[3] = {1.0f, 0.8614784181118011f, nextafterf(0.8614784181118011f, 1.0f)};
    ql_nf4_quantise(t, 3, packed, absmax);
    CHECK(packed[0] == 0xfe && packed[1] == 0xf7);
    /* All scales equal: their differences are 0, the code 0, and dequantisation gives the offset.
     */
    float same[300], nested[2], offset = 0, map[256];
    uint8_t codes[300];
    for (int i = 0; i < 300; i++) same[i] = 0.375f;
    ql_dynamic_map_signed(map);
    ql_nested_quantise(same, 300, map, codes, nested, &offset);
    CHECK(offset == 0.375f && codes[0] == 0 && codes[299] == 0 && nested[1] == 0.0f);
}

/* Golden folders: quantising the 16-bit weights gives bitsandbytes' tensors, byte for byte. */
static void compare_linear(const ql_weight *plain, const ql_weight *want, ql_scales scales)
{
    ql_nf4_host q;
    int64_t n = plain->rows * plain->cols;
    float *x = malloc((size_t)n * sizeof *x);
    CHECK(x);
    ql_weight_read(plain, NULL, 0, n, x, QL_F32);
    CHECK_OK(ql_nf4_make(x, plain->rows, plain->cols, plain->dtype, scales, &q));
    CHECK_MSG(memcmp(q.packed, want->data, (size_t)want->bytes) == 0, "%s: codes differ",
              want->name);
    size_t size = scales == QL_SCALES_NESTED ? 1 : 4;
    CHECK_MSG(memcmp(q.w.absmax, want->absmax, (size_t)want->blocks * size) == 0,
              "%s: scales differ", want->name);
    if (scales == QL_SCALES_NESTED) {
        CHECK(q.w.nested_offset == want->nested_offset);
        CHECK(memcmp(q.nested, want->nested_absmax, (size_t)ql_ceil_div(want->blocks, 256) * 4) ==
              0);
        CHECK(memcmp(q.nested_map, want->nested_map, 1024) == 0);
    }
    CHECK(memcmp(ql_nf4_map, want->quant_map, sizeof ql_nf4_map) == 0);
    ql_nf4_free(&q);
    free(x);
}

TEST(golden_folders_byte_for_byte)
{
    static const char *const cases[] = {"llama", "mistral", "qwen2", "qwen3"};
    int compared = 0;
    for (int i = 0; i < 4; i++) {
        char p[256];
        ql_model *a = NULL, *b = NULL;
        snprintf(p, sizeof p, "tests/golden/%s/model", cases[i]);
        CHECK_OK(ql_model_open(p, &a));
        snprintf(p, sizeof p, "tests/golden/%s/model-nf4", cases[i]);
        CHECK_OK(ql_model_open(p, &b));
        ql_scales scales = b->cfg.quant.nested ? QL_SCALES_NESTED : QL_SCALES_F32;
        for (int64_t l = 0; l < a->cfg.layers; l++) {
            for (int w = 0; w < QL_LINEARS; w++) {
                if (b->block[l].w[w].kind == QL_PLAIN) continue;
                compare_linear(&a->block[l].w[w], &b->block[l].w[w], scales);
                if (test_bad) return;
                compared++;
            }
        }
        ql_model_close(a);
        ql_model_close(b);
    }
    CHECK(compared > 50);
}

/* Fixtures of bitsandbytes itself: what it dequantises from the stored codes and scales. */
typedef struct {
    const ql_st *st;
    const char *name;
} fixture;

static const ql_st_tensor *part(fixture f, const char *suffix)
{
    char full[256];
    snprintf(full, sizeof full, "%s%s", f.name, suffix);
    return ql_st_find(f.st, full);
}

static void compare_dequant(const ql_weight *w, const ql_st_tensor *want, const char *name)
{
    float *absmax = malloc((size_t)w->blocks * sizeof *absmax);
    char *out = malloc((size_t)want->bytes);
    CHECK(absmax && out);
    ql_weight_absmax(w, absmax);
    ql_weight_read(w, absmax, 0, want->count, out, want->dtype);
    int64_t bad = 0;
    for (int64_t i = 0; i < want->bytes; i++) bad += out[i] != ((const char *)want->data)[i];
    CHECK_MSG(bad == 0, "%s: %lld of %lld bytes differ", name, (long long)bad,
              (long long)want->bytes);
    free(absmax), free(out);
}

static void check_fixture(fixture f)
{
    const ql_st_tensor *packed = part(f, ".packed"), *absmax = part(f, ".absmax"),
                       *dq = part(f, ".dequant"), *dqn = part(f, ".dequant_nested"),
                       *codes = part(f, ".absmax8"), *nested = part(f, ".nested_absmax"),
                       *offset = part(f, ".nested_offset"),
                       *map = ql_st_find(f.st, "nested_quant_map"),
                       *qmap = ql_st_find(f.st, "quant_map");
    CHECK_MSG(packed && absmax && dq && map && qmap, "%s: incomplete", f.name);
    ql_weight w = {.kind = QL_NF4,
                   .rows = 1,
                   .cols = dq->count,
                   .dtype = dq->dtype,
                   .data = packed->data,
                   .bytes = packed->bytes,
                   .block = 64,
                   .blocks = absmax->count,
                   .absmax = absmax->data};
    memcpy(w.quant_map, strncmp(f.name, "fp4", 3) == 0 ? ql_fp4_map : (const float *)qmap->data,
           sizeof w.quant_map);
    compare_dequant(&w, dq, f.name);
    if (!dqn || test_bad) return;
    CHECK_MSG(codes && nested && offset, "%s: incomplete", f.name);
    w.absmax = codes->data, w.nested_block = 256, w.nested_absmax = nested->data,
    w.nested_map = map->data;
    w.nested_offset = ql_float_get(offset->data, QL_F32, 0);
    compare_dequant(&w, dqn, f.name);
}

static int check_fixtures(const char *path)
{
    ql_st *st = NULL;
    int n = 0;
    if (ql_st_open(path, &st) != QL_OK) return -1;
    for (int64_t i = 0; i < ql_st_count(st); i++) {
        const char *name = ql_st_at(st, i)->name, *end = strstr(name, ".packed");
        if (!end || end[7]) continue;
        char stem[128];
        snprintf(stem, sizeof stem, "%.*s", (int)(end - name), name);
        if (!part((fixture){st, stem}, ".dequant")) continue;
        check_fixture((fixture){st, stem});
        if (test_bad) break;
        n++;
    }
    ql_st_close(st);
    return n;
}

TEST(dequantised_values_of_bitsandbytes)
{
    int n = check_fixtures("tests/golden/nf4_cpu.safetensors");
    if (test_bad) return;
    CHECK(n >= 10);
}

TEST(maps_of_bitsandbytes)
{
    ql_st *st = NULL;
    float map[256];
    CHECK_OK(ql_st_open("tests/golden/nf4_cpu.safetensors", &st));
    ql_dynamic_map_signed(map);
    CHECK(memcmp(ql_st_find(st, "nested_quant_map")->data, map, sizeof map) == 0);
    CHECK(memcmp(ql_st_find(st, "quant_map")->data, ql_nf4_map, sizeof ql_nf4_map) == 0);
    ql_st_close(st);
}

/* A weight written with ql_nf4_decls opens as one: names, state JSON and all. */
TEST(written_tensors_open_in_a_model)
{
    enum { C = 48, F = 40, V = 10, LINEARS = QL_LINEARS };
    const char *dir = tmp_dir("written");
    static char names[64][256], part_names[QL_NF4_TENSORS][256];
    ql_st_decl d[64];
    const void *data[64];
    static float x[C * F * 2];
    static uint16_t zero[C * 64];
    ql_nf4_host q[LINEARS];
    ql_config c = {.hidden = C, .heads = 3, .kv_heads = 3, .head_dim = 16, .ffn = F};
    int n = 0;
    for (int i = 0; i < C * F * 2; i++) x[i] = ql_float_round(sinf((float)i) * 0.1f, QL_BF16);
    for (int w = 0; w < LINEARS; w++) {
        int64_t rows, cols;
        char name[128];
        ql_linear_shape(&c, (ql_linear)w, &rows, &cols);
        snprintf(name, sizeof name, "model.layers.0.%s.weight", ql_linear_module((ql_linear)w));
        CHECK_OK(
            ql_nf4_make(x, rows, cols, QL_BF16, w % 2 ? QL_SCALES_NESTED : QL_SCALES_F32, &q[w]));
        int k = ql_nf4_decls(&q[w], name, part_names, d + n, data + n);
        for (int i = 0; i < k; i++, n++) {
            memcpy(names[n], part_names[i], 256);
            d[n].name = names[n];
        }
    }
    const ql_st_decl rest[] = {{"model.embed_tokens.weight", QL_BF16, 2, {V, C}},
                               {"model.norm.weight", QL_BF16, 1, {C}},
                               {"model.layers.0.input_layernorm.weight", QL_BF16, 1, {C}},
                               {"model.layers.0.post_attention_layernorm.weight", QL_BF16, 1, {C}}};
    for (int i = 0; i < 4; i++, n++) d[n] = rest[i], data[n] = zero;
    char p[QL_PATH_MAX];
    ql_st_writer *w = NULL;
    CHECK_OK(ql_path_join(p, dir, "model.safetensors"));
    CHECK_OK(ql_st_create(p, d, n, NULL, &w));
    for (int i = 0; i < n; i++) {
        int64_t bytes = (int64_t)ql_dtype_size(d[i].dtype);
        for (int k = 0; k < d[i].ndim; k++) bytes *= d[i].shape[k];
        CHECK_OK(ql_st_put(w, i, data[i], bytes));
    }
    CHECK_OK(ql_st_commit(w));
    ql_st_writer_close(w);
    tmp_text(dir, "config.json",
             "{\"model_type\":\"llama\",\"hidden_size\":48,\"intermediate_size\":40,\"num_hidden_"
             "layers\":1,"
             "\"num_attention_heads\":3,\"vocab_size\":10,\"tie_word_embeddings\":true}");
    ql_model *m = NULL;
    CHECK_OK(ql_model_open(dir, &m));
    for (int i = 0; i < LINEARS; i++) {
        const ql_weight *a = &m->block[0].w[i], *b = &q[i].w;
        CHECK(a->kind == QL_NF4 && a->dtype == QL_BF16 && a->nested_offset == b->nested_offset);
        CHECK(a->nested_block == b->nested_block &&
              memcmp(a->data, b->data, (size_t)b->bytes) == 0);
        ql_nf4_free(&q[i]);
    }
    ql_model_close(m);
}

TEST_MAIN(T(dynamic_maps_have_the_published_hashes), T(dynamic_code_is_nearest), T(edges),
          T(golden_folders_byte_for_byte), T(dequantised_values_of_bitsandbytes),
          T(maps_of_bitsandbytes), T(written_tensors_open_in_a_model))
