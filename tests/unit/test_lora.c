#include "core/json.h"
#include "core/lora.h"
#include "core/safetensors.h"
#include "kernels/half.h"
#include "tests/tmp.h"

static ql_config tiny(int64_t layers)
{
    ql_config c = {.arch = QL_LLAMA,
                   .hidden = 64,
                   .layers = layers,
                   .heads = 4,
                   .kv_heads = 2,
                   .head_dim = 16,
                   .ffn = 96,
                   .vocab = 100};
    return c;
}

static ql_status make(const ql_config *m, const char *settings, ql_lora **out)
{
    json_t *o = NULL;
    ql_lora_config c = {0};
    QL_TRY(ql_json_parse(settings, strlen(settings), "job", &o));
    ql_status st = ql_lora_config_parse(o, "job", &c);
    json_decref(o);
    QL_TRY(st);
    return ql_lora_build(m, &c, out);
}

/* The chosen modules as a string: layer by layer one letter per linear, "qkvogud". */
static const char *chosen(const ql_lora *l)
{
    static char s[256];
    size_t n = 0;
    for (int64_t i = 0; i < l->layers; i++) {
        if (i) s[n++] = ' ';
        for (int w = 0; w < QL_LINEARS; w++)
            if (ql_lora_find(l, i, (ql_linear)w)) s[n++] = "qkvogud"[w];
    }
    s[n] = 0;
    return s;
}

/* The expectations are PEFT 0.21's answers for the same settings on a Llama of 3 layers. */
TEST(selection_rules)
{
    static const struct {
        const char *settings, *chosen;
    } k[] = {
        {"{}", "qv qv qv"},
        {"{\"target_modules\":\"all-linear\"}", "qkvogud qkvogud qkvogud"},
        {"{\"target_modules\":\"ALL-LINEAR\",\"exclude_modules\":[\"o_proj\",\"layers.1.mlp.up_"
         "proj\"]}",
         "qkvgud qkvgd qkvgud"},
        {"{\"target_modules\":[\"q_proj\",\"mlp.down_proj\"]}", "qd qd qd"},
        {"{\"target_modules\":[\"model.layers.1.self_attn.k_proj\"]}", " k "},
        {"{\"target_modules\":\".*layers\\\\.[02]\\\\..*(q|v)_proj\"}", "qv  qv"},
        {"{\"target_modules\":\"model.layers.0.self_attn.q_proj\"}", "q  "},
        {"{\"target_modules\":[\"q_proj\",\"v_proj\"],\"layers_to_transform\":[2,0]}", "qv  qv"},
        {"{\"target_modules\":[\"q_proj\"],\"layers_to_transform\":1,\"layers_pattern\":"
         "\"layers\"}",
         " q "},
        {"{\"target_modules\":[\"q_proj\"],\"layers_to_transform\":1,\"layers_pattern\":[\"h\","
         "\"lay(er)s\"]}",
         " q "},
        {"{\"target_modules\":[\"q_proj\",\"model.layers.0.mlp.up_proj\"],\"layers_to_transform\":["
         "1]}",
         "u q "},
        {"{\"target_modules\":\".*_proj\",\"exclude_modules\":\".*(gate|up|down)_proj\"}",
         "qkvo qkvo qkvo"},
    };
    ql_config m = tiny(3);
    ql_lora *some = NULL;
    /* PEFT wants a list for this; here all-linear is the default. */
    CHECK_OK(make(&m, "{\"target_modules\":\"all-linear\",\"layers_to_transform\":[0,2],\"exclude_modules\":[\"mlp.up_proj\"]}", &some));
    CHECK_STR(chosen(some), "qkvogd  qkvogd");
    ql_lora_close(some);
    for (size_t i = 0; i < sizeof k / sizeof *k; i++) {
        ql_lora *l = NULL;
        CHECK_OK(make(&m, k[i].settings, &l));
        CHECK_MSG(strcmp(chosen(l), k[i].chosen) == 0, "%s chooses '%s', not '%s'", k[i].settings,
                  chosen(l), k[i].chosen);
        ql_lora_close(l);
    }
}

TEST(ranks_scales_and_layout)
{
    ql_config m = tiny(2);
    ql_lora *l = NULL;
    CHECK_OK(make(&m,
                  "{\"target_modules\":\"all-linear\",\"r\":4,\"lora_alpha\":6,\"rank_pattern\":{"
                  "\"down_proj\":2,"
                  "\"layers.0.self_attn.q_proj\":70},\"alpha_pattern\":{\"^model.*o_proj\":16}}",
                  &l));
    const ql_lora_target *q = ql_lora_find(l, 0, QL_Q), *d = ql_lora_find(l, 1, QL_DOWN),
                         *o = ql_lora_find(l, 1, QL_O), *k = ql_lora_find(l, 0, QL_K);
    CHECK(q->r == 70 && d->r == 2 && o->r == 4 && ql_lora_find(l, 1, QL_Q)->r == 4);
    CHECK(q->scale == (float)(6.0 / 70) && d->scale == 3.0f && o->scale == 4.0f &&
          o->alpha == 16.0);
    CHECK(q->a == 0 && q->a_len == 8192 && q->b == 8192 && q->b_len == 8192 && k->a == 16384);
    CHECK(k->n == 32 && k->k == 64 && d->k == 96 && d->n == 64);
    CHECK_INT(l->elements % QL_LORA_PAD, 0);
    CHECK_INT(l->elements, (14 * 2 + 2) * QL_LORA_PAD);
    CHECK(ql_lora_find(l, 2, QL_Q) == NULL && ql_lora_find(NULL, 0, QL_Q) == NULL);
    ql_lora_close(l);
    CHECK_OK(make(&m, "{\"r\":16,\"lora_alpha\":8,\"use_rslora\":true}", &l));
    CHECK(ql_lora_find(l, 0, QL_V)->scale == 2.0f);
    ql_lora_close(l);
}

TEST(line_of_llama_8b)
{
    ql_config m = {.arch = QL_LLAMA,
                   .hidden = 4096,
                   .layers = 32,
                   .heads = 32,
                   .kv_heads = 8,
                   .head_dim = 128,
                   .ffn = 14336,
                   .vocab = 128256};
    ql_lora *l = NULL;
    char line[200];
    CHECK_OK(make(&m, "{\"r\":16,\"target_modules\":\"all-linear\"}", &l));
    ql_lora_summary(l, &m, line, sizeof line);
    CHECK_STR(line,
              "trainable params: 41,943,040 || all params: 8,072,204,288 || trainable%: 0.5196");
    ql_lora_close(l);
}

TEST(first_values)
{
    ql_config m = tiny(2);
    ql_lora *all = NULL, *one = NULL, *g = NULL;
    CHECK_OK(make(&m, "{\"r\":64,\"target_modules\":\"all-linear\"}", &all));
    CHECK_OK(make(&m, "{\"r\":64,\"target_modules\":[\"k_proj\"]}", &one));
    CHECK_OK(make(
        &m, "{\"r\":64,\"target_modules\":[\"k_proj\"],\"init_lora_weights\":\"gaussian\"}", &g));
    float *a = malloc((size_t)all->elements * 4), *b = malloc((size_t)one->elements * 4),
          *c = malloc((size_t)g->elements * 4);
    CHECK(a && b && c);
    ql_lora_init(all, 42, a);
    ql_lora_init(one, 42, b);
    ql_lora_init(g, 42, c);
    const ql_lora_target *x = ql_lora_find(all, 1, QL_K), *y = ql_lora_find(one, 1, QL_K);
    int64_t n = x->r * x->k;
    CHECK_MSG(memcmp(a + x->a, b + y->a, (size_t)n * 4) == 0,
              "a tensor's values depend on the other targets");
    double s = 0, s2 = 0, g2 = 0, top = 0;
    for (int64_t i = 0; i < n; i++) {
        s += (double)b[y->a + i], s2 += (double)b[y->a + i] * (double)b[y->a + i];
        g2 += (double)c[y->a + i] * (double)c[y->a + i];
        top = fmax(top, fabs((double)b[y->a + i]));
    }
    /* U(-1/8, 1/8): variance 1/192; N(0, 1/64²). 4096 values: 5 % is more than 3 sigma. */
    CHECK(top <= 0.125 && top > 0.124 && fabs(s / (double)n) < 0.005);
    CHECK_CLOSE(s2 / (double)n * 192.0, 1.0, 0.03);
    CHECK_CLOSE(g2 / (double)n * 4096.0, 1.0, 0.04);
    for (int64_t i = 0; i < one->elements; i++) {
        bool in_a = (i >= y->a && i < y->a + n) || i < n;
        CHECK_MSG(in_a ? b[i] != 0.0f : b[i] == 0.0f, "element %lld is %g", (long long)i,
                  (double)b[i]);
    }
    ql_lora_init(one, 43, b);
    CHECK(memcmp(a + x->a, b + y->a, (size_t)n * 4) != 0);
    free(a), free(b), free(c);
    ql_lora_close(all), ql_lora_close(one), ql_lora_close(g);
}

TEST(save_and_read_back)
{
    ql_config m = tiny(2);
    static const ql_dtype dtypes[] = {QL_F32, QL_F16, QL_BF16};
    for (int d = 0; d < 3; d++) {
        const char *dir = tmp_dir("adapter/deep");
        ql_lora *l = NULL, *back = NULL;
        CHECK_OK(
            make(&m,
                 "{\"r\":3,\"lora_alpha\":5,\"lora_dropout\":0.1,\"target_modules\":[\"q_proj\","
                 "\"up_proj\"],"
                 "\"use_rslora\":true,\"init_lora_weights\":false,\"rank_pattern\":{\"up_proj\":5},"
                 "\"layers_to_transform\":[1],\"base_model_name_or_path\":\"me/\\\"tiny\\\"\"}",
                 &l));
        float *x = malloc((size_t)l->elements * 4), *y = malloc((size_t)l->elements * 4);
        CHECK(x && y);
        ql_lora_init(l, 7, x);
        memset(y, 0xff, (size_t)l->elements * 4);
        CHECK_OK(ql_lora_save(l, x, dtypes[d], dir));
        CHECK_OK(ql_lora_open(dir, &m, &back));
        CHECK(back->elements == l->elements && back->count == 2 && back->target[1].r == 5);
        CHECK(back->cfg.dropout == 0.1 && back->cfg.rslora &&
              back->target[0].scale == l->target[0].scale);
        CHECK_STR(back->cfg.base, "me/\"tiny\"");
        CHECK_OK(ql_lora_read(back, dir, y));
        for (int64_t i = 0; i < l->elements; i++) CHECK(y[i] == ql_float_round(x[i], dtypes[d]));
        free(x), free(y);
        ql_lora_close(l), ql_lora_close(back);
    }
}

/* Adapters that PEFT wrote: the golden cases, one with patterns, one with rsLoRA, one on three
 * linears. */
TEST(adapters_of_peft)
{
    static const char *const cases[] = {"llama", "mistral", "qwen2", "qwen3"};
    for (int i = 0; i < 4; i++) {
        char dir[256], model[256], line[200], want[400], *text = NULL;
        size_t n = 0;
        ql_config m;
        ql_lora *l = NULL;
        snprintf(dir, sizeof dir, "tests/golden/%s/adapter", cases[i]);
        snprintf(model, sizeof model, "tests/golden/%s/model", cases[i]);
        CHECK_OK(ql_config_load(model, &m));
        CHECK_OK(ql_lora_open(dir, &m, &l));
        float *flat = malloc((size_t)l->elements * 4);
        CHECK(flat);
        CHECK_OK(ql_lora_read(l, dir, flat));
        CHECK(flat[l->target[0].a] != 0.0f && flat[l->target[0].b] != 0.0f);
        /* case.json keeps PEFT's own counts. */
        json_t *o = NULL;
        snprintf(dir, sizeof dir, "tests/golden/%s/case.json", cases[i]);
        CHECK_OK(ql_file_read(dir, 1 << 20, &text, &n));
        CHECK_OK(ql_json_parse(text, n, "case.json", &o));
        const json_t *v = json_object_get(o, "lora");
        long long t = json_integer_value(json_object_get(v, "trainable_params"));
        long long all = json_integer_value(json_object_get(v, "all_params"));
        CHECK_INT(l->params, t);
        CHECK_INT(ql_config_params(&m) + l->params, all);
        ql_lora_summary(l, &m, line, sizeof line);
        snprintf(want, sizeof want, "trainable%%: %.4f", 100.0 * (double)t / (double)all);
        CHECK(strstr(line, want) != NULL);
        json_decref(o);
        free(text), free(flat);
        ql_lora_close(l);
        ql_config_free(&m);
    }
}

TEST(a_slow_pattern_is_stopped)
{
    ql_config m = tiny(1);
    ql_lora *l = NULL;
    CHECK_FAILS(make(&m, "{\"target_modules\":\"(([a-z_.0-9]+)+)+[!?]\"}", &l), QL_EINVAL,
                "takes too long on");
}

TEST_MAIN(T(selection_rules), T(ranks_scales_and_layout), T(line_of_llama_8b), T(first_values),
          T(save_and_read_back), T(adapters_of_peft), T(a_slow_pattern_is_stopped))
