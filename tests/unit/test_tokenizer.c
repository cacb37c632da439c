#include "core/tokenizer.h"
#include "tests/test.h"
#include "tests/text/gen.h"

#define DATA "tests/text/data/"

/* Ids and decoded text of 60,000 strings against the hashes that the tokenizers library's have. */
static int compare(const char *name)
{
    char path[256];
    uint64_t want, h;
    ql_tok *t = NULL;
    ql_ids ids = {0};
    ql_str s = {0}, back = {0};
    int blocks = 0, bad = 0;
    snprintf(path, sizeof path, DATA "%s/hashes", name);
    FILE *f = fopen(path, "r");
    snprintf(path, sizeof path, DATA "%s", name);
    if (!f || ql_tok_open(path, &t)) {
        if (f) fclose(f);
        return -1;
    }
    for (; fscanf(f, "%16lx", &want) == 1; blocks++) {
        h = GEN_HASH_INIT;
        for (uint64_t i = 0; i < 1000; i++) {
            uint64_t k = (uint64_t)blocks * 1000 + i;
            gen_string(k, &s);
            ids.len = 0, ql_str_clear(&back);
            if (ql_tok_encode(t, s.data, s.len, k % 2 ? QL_TOK_SPECIALS : 0, &ids)) bad++;
            if (ql_tok_decode(t, ids.data, ids.len, k % 3 ? QL_TOK_SPECIALS : 0, &back)) bad++;
            h = gen_hash(h, ids.data, ids.len * sizeof *ids.data);
            h = gen_hash(h, back.data, back.len);
        }
        bad += h != want;
    }
    fclose(f);
    ql_tok_close(t);
    ql_ids_free(&ids), ql_str_free(&s), ql_str_free(&back);
    return bad ? -bad : blocks * 1000;
}

TEST(ids_equal_the_library_llama)
{
    CHECK_INT(compare("llama"), 60000);
}
TEST(ids_equal_the_library_qwen)
{
    CHECK_INT(compare("qwen"), 60000);
}
TEST(ids_equal_the_library_flags)
{
    CHECK_INT(compare("flags"), 60000);
}

/* A small complete tokenizer.json with one part replaced. */
#define SPLIT(re)                                                                                  \
    "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"" re "\"},\"behavior\":\"Isolated\","            \
    "\"invert\":false}"
#define QWEN                                                                                       \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}| "              \
    "?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+"
#define MODEL                                                                                      \
    "{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2},\"merges\":[\"a b\"],"                 \
    "\"byte_fallback\":false}"
#define BYTES "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}"

static ql_status parse(const char *model, const char *norm, const char *split, const char *post,
                       const char *added, ql_tok **out)
{
    char json[4096];
    snprintf(json, sizeof json,
             "{\"added_tokens\":[%s],\"normalizer\":%s,\"pre_tokenizer\":{\"type\":\"Sequence\","
             "\"pretokenizers\":[%s," BYTES "]},\"post_processor\":%s,\"decoder\":" BYTES
             ",\"model\":%s}",
             added, norm, split, post, model);
    return ql_tok_parse(json, strlen(json), out);
}

TEST(what_is_not_supported_is_named)
{
    ql_tok *t = NULL;
    CHECK_OK(parse(MODEL, "null", SPLIT(QWEN), "null", "", &t));
    ql_tok_close(t);
    t = NULL;
    CHECK_FAILS(parse("{\"type\":\"Unigram\"}", "null", SPLIT(QWEN), "null", "", &t), QL_ENOSUP,
                "Unigram");
    CHECK_FAILS(parse("{\"type\":\"BPE\",\"vocab\":{},\"merges\":[],\"byte_fallback\":true}", "null",
                      SPLIT(QWEN), "null", "", &t), QL_ENOSUP, "byte_fallback");
    CHECK_FAILS(parse(MODEL, "{\"type\":\"NFKC\"}", SPLIT(QWEN), "null", "", &t), QL_ENOSUP, "NFKC");
    CHECK_FAILS(parse(MODEL, "null", SPLIT("\\\\w+"), "null", "", &t), QL_ENOSUP, "\\w+");
    CHECK_FAILS(parse(MODEL, "null", "{\"type\":\"Digits\"}", "null", "", &t), QL_ENOSUP, "Digits");
    CHECK_FAILS(parse(MODEL, "null", SPLIT(QWEN), "{\"type\":\"BertProcessing\"}", "", &t), QL_ENOSUP,
                "BertProcessing");
    CHECK(!t);
}

TEST(broken_files_are_refused)
{
    ql_tok *t = NULL;
    CHECK_FAILS(ql_tok_parse("{\"a\":\n1,}", 8, &t), QL_EINVAL, "tokenizer.json: line 2");
    CHECK_FAILS(ql_tok_parse("[]", 2, &t), QL_EINVAL, "model");
    CHECK_FAILS(parse("{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[\"a c\"]}", "null", SPLIT(QWEN),
                      "null", "", &t), QL_EINVAL, "merge 0");
    CHECK_FAILS(parse("{\"type\":\"BPE\",\"vocab\":{\"a\":-1},\"merges\":[]}", "null", SPLIT(QWEN), "null",
                      "", &t), QL_EINVAL, "id");
    CHECK_FAILS(parse("{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":0},\"merges\":[]}", "null", SPLIT(QWEN),
                      "null", "", &t), QL_EINVAL, "two tokens");
    CHECK_FAILS(parse(MODEL, "null", SPLIT(QWEN), "null", "{\"id\":99999999,\"content\":\"x\"}", &t),
                QL_EINVAL, "id");
    CHECK_FAILS(ql_tok_open("tests/text/nowhere", &t), QL_EINVAL, "no tokenizer.json");
    CHECK(!t);
}

/* Added tokens that are white space themselves, beside others that take it along: ids of tokenizers 0.23. */
TEST(white_space_is_taken_once)
{
    static const struct {
        const char *text;
        int32_t ids[4];
        size_t n;
    } cases[] = {{"a   b", {0, 3, 1}, 3}, {"a  <t>   b", {0, 3, 4, 1}, 4}, {" <t>", {3, 4}, 2}};
    ql_tok *t = NULL;
    CHECK_OK(parse(MODEL, "null", SPLIT(QWEN), "null",
                   "{\"id\":3,\"content\":\" \",\"lstrip\":true,\"rstrip\":true},"
                   "{\"id\":4,\"content\":\"<t>\",\"lstrip\":true,\"rstrip\":true}", &t));
    for (size_t i = 0; i < 3; i++) {
        ql_ids ids = {0};
        CHECK_OK(ql_tok_encode(t, cases[i].text, strlen(cases[i].text), 0, &ids));
        CHECK_INT(ids.len, cases[i].n);
        for (size_t k = 0; k < ids.len && k < cases[i].n; k++) CHECK_INT(ids.data[k], cases[i].ids[k]);
        ql_ids_free(&ids);
    }
    ql_tok_close(t);
}

/* Text that is shown token by token, as far as it stands, is the whole text in the end. */
TEST(text_that_comes_token_by_token)
{
    static const char text[] = "na\xc3\xafve \xe6\x97\xa5\xe6\x9c\xac \xf0\x9f\x91\xa8\xe2\x80\x8d\xf0\x9f\x91\xa9 \xef\xbf\xbd!";
    ql_tok *t = NULL;
    ql_ids ids = {0};
    ql_str shown = {0}, now = {0};
    CHECK_OK(ql_tok_open("tests/text/data/qwen", &t));
    CHECK_OK(ql_tok_encode(t, text, strlen(text), 0, &ids));
    CHECK(ids.len > 12); /* characters in pieces */
    for (size_t i = 1; i <= ids.len; i++) {
        ql_str_clear(&now);
        CHECK_OK(ql_tok_decode(t, ids.data, i, 0, &now));
        size_t n = ql_tok_steady(now.data, now.len);
        if (n > shown.len) CHECK_OK(ql_str_add(&shown, now.data + shown.len, n - shown.len));
    }
    CHECK_STR(shown.data, text);
    ql_tok_close(t), ql_ids_free(&ids), ql_str_free(&shown), ql_str_free(&now);
}

/* A word of a million letters: the heap, not the quadratic scan. */
TEST(a_very_long_word)
{
    ql_tok *t = NULL;
    ql_ids ids = {0};
    size_t n = 1000001;
    char *s = malloc(n);
    CHECK(s);
    for (size_t i = 0; i < n; i++) s[i] = i % 2 ? 'b' : 'a';
    CHECK_OK(parse(MODEL, "null", SPLIT(QWEN), "null", "", &t));
    CHECK_OK(ql_tok_encode(t, s, n, 0, &ids));
    CHECK_INT(ids.len, n / 2 + 1);
    CHECK_INT(ids.data[0], 2);
    CHECK_INT(ids.data[n / 2], 0);
    ql_tok_close(t), ql_ids_free(&ids), free(s);
}

TEST(names_come_from_the_configuration)
{
    ql_tok *t = NULL;
    CHECK_OK(ql_tok_open("tests/text/data/llama", &t));
    const ql_tok_names *n = ql_tok_info(t);
    CHECK_STR(n->eos_token, "<|eot_id|>");
    CHECK_STR(n->bos_token, "<|begin_of_text|>");
    CHECK_INT(n->eos, ql_tok_find(t, "<|eot_id|>"));
    CHECK_INT(n->pad, -1);
    CHECK(n->pad_token == NULL);
    CHECK(strstr(n->chat_template, "<|start_header_id|>"));
    CHECK(ql_tok_is_special(t, n->eos));
    CHECK_INT(ql_tok_prefix(t)->len, 1);
    CHECK_INT(ql_tok_prefix(t)->data[0], n->bos);
    ql_tok_close(t);
}

/* Of tokenizer, model and generation_config.json together, each once. */
TEST(what_ends_an_answer)
{
    ql_tok *t = NULL;
    CHECK_OK(ql_tok_open("notebooks/tiny", &t));
    const ql_ids *s = ql_tok_stops(t);
    CHECK_INT(s->len, 2);
    CHECK_INT(s->data[0], ql_tok_find(t, "<|end_of_text|>"));
    CHECK_INT(s->data[1], ql_tok_find(t, "<|eot_id|>"));
    ql_tok_close(t);
    CHECK_OK(ql_tok_open("tests/text/data/flags", &t)); /* names no end token, has no model beside it */
    CHECK_INT(ql_tok_stops(t)->len, 0);
    ql_tok_close(t);
}

TEST_MAIN(T(ids_equal_the_library_llama), T(ids_equal_the_library_qwen),
          T(ids_equal_the_library_flags), T(what_is_not_supported_is_named),
          T(broken_files_are_refused), T(white_space_is_taken_once), T(text_that_comes_token_by_token), T(a_very_long_word), T(names_come_from_the_configuration),
          T(what_ends_an_answer))
