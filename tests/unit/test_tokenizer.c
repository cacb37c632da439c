#include "core/chat.h"
#include "core/file.h"
#include "core/tokenizer.h"
#include "tests/test.h"
#include "tests/text/gen.h"
#include "tests/tmp.h"

#define DATA "tests/text/data/"

/* String i for tokenizers over pieces. */
static void more_string(uint64_t i, ql_str *out, ql_str *scratch)
{
    gen_string(i, out);
    gen_string(i + 7, scratch);
    (void)ql_str_puts(out, gen_more[i % GEN_N(gen_more)]);
    (void)ql_str_add(out, scratch->data, scratch->len);
}

static int decode_backwards(ql_tok *t, ql_ids *ids, unsigned flags, ql_str *out)
{
    for (size_t i = 0; i < ids->len / 2; i++) {
        int32_t id = ids->data[i];
        ids->data[i] = ids->data[ids->len - 1 - i], ids->data[ids->len - 1 - i] = id;
    }
    return ql_tok_decode(t, ids->data, ids->len, flags, out) != QL_OK;
}

/* Ids and decoded text of 60,000 strings against the hashes that the tokenizers library's have. */
static int compare(const char *name, bool pieces)
{
    char path[256];
    uint64_t want, h;
    ql_tok *t = NULL;
    ql_ids ids = {0};
    ql_str s = {0}, back = {0}, scratch = {0};
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
            if (pieces) more_string(k, &s, &scratch);
            else gen_string(k, &s);
            ids.len = 0, ql_str_clear(&back);
            if (ql_tok_encode(t, s.data, s.len, k % 2 ? QL_TOK_SPECIALS : 0, &ids)) bad++;
            if (ql_tok_decode(t, ids.data, ids.len, k % 3 ? QL_TOK_SPECIALS : 0, &back)) bad++;
            h = gen_hash(h, ids.data, ids.len * sizeof *ids.data);
            if (pieces) bad += decode_backwards(t, &ids, k % 3 ? QL_TOK_SPECIALS : 0, &back);
            h = gen_hash(h, back.data, back.len);
        }
        bad += h != want;
    }
    fclose(f);
    ql_tok_close(t);
    ql_ids_free(&ids), ql_str_free(&s), ql_str_free(&back), ql_str_free(&scratch);
    return bad ? -bad : blocks * 1000;
}

TEST(ids_equal_the_library_llama)
{
    CHECK_INT(compare("llama", false), 60000);
}
TEST(ids_equal_the_library_qwen)
{
    CHECK_INT(compare("qwen", false), 60000);
}
TEST(ids_equal_the_library_flags)
{
    CHECK_INT(compare("flags", false), 60000);
}
TEST(ids_equal_the_library_mistral)
{
    CHECK_INT(compare("mistral", true), 60000);
}
TEST(ids_equal_the_library_llama2)
{
    CHECK_INT(compare("llama2", true), 60000);
}
TEST(ids_equal_the_library_always)
{
    CHECK_INT(compare("always", true), 60000);
}
TEST(ids_equal_the_library_never)
{
    CHECK_INT(compare("never", true), 60000);
}

/* Mistral's template and its ids, as transformers and tokenizers have them. */
TEST(chats_equal_the_library_mistral)
{
    ql_tok *t = NULL;
    ql_chat *chat = NULL;
    ql_chat_text text = {0};
    char *jinja = NULL;
    size_t n, i;
    json_t *all = json_load_file(DATA "mistral/chats.json", 0, NULL), *c;
    CHECK_INT(json_array_size(all), 2);
    CHECK_OK(ql_tok_open(DATA "mistral", &t));
    CHECK_OK(ql_file_read("tests/text/templates/mistral_v2v3.jinja", 1 << 20, &jinja, &n));
    CHECK_OK(ql_chat_open(jinja, ql_tok_info(t), &chat));
    json_array_foreach(all, i, c)
    {
        const json_t *want = json_object_get(c, "ids");
        ql_ids ids = {0};
        CHECK_OK(ql_chat_render(chat, json_object_get(c, "messages"), NULL, NULL, QL_CHAT_PROMPT, &text));
        CHECK_OK(ql_tok_encode(t, text.text.data, text.text.len, 0, &ids));
        CHECK_INT(ids.len, json_array_size(want));
        for (size_t k = 0; k < ids.len; k++) CHECK_INT(ids.data[k], json_integer_value(json_array_get(want, k)));
        ql_ids_free(&ids);
    }
    ql_chat_close(chat), ql_chat_text_free(&text), ql_tok_close(t), json_decref(all), free(jinja);
}

/* Every token's end: what lies between two of them is what the token says, but for the ▁ that is put in front. */
static int misplaced(const char *name)
{
    ql_tok *t = NULL;
    ql_ids ids = {0}, ends = {0};
    ql_str s = {0}, scratch = {0}, good = {0}, back = {0};
    int bad = ql_tok_open(name, &t) != QL_OK;
    for (uint64_t k = 0; k < 3000 && !bad; k++) {
        more_string(k, &s, &scratch);
        ids.len = ends.len = 0, ql_str_clear(&good);
        bad += ql_utf8_repair(s.data, s.len, &good) || ql_tok_encode_ends(t, good.data, good.len, 0, &ids, &ends);
        bad += ends.len != ids.len || ends.data[ends.len - 1] != (int32_t)good.len;
        for (size_t i = 0, from = 0; i < ids.len && !bad; from = (size_t)ends.data[i++]) {
            size_t n = (size_t)ends.data[i] - from;
            ql_str_clear(&back);
            bad += ql_tok_decode(t, ids.data + i, 1, QL_TOK_SPECIALS | QL_TOK_INSIDE, &back) || n > good.len;
            const char *p = back.data, *e = p + back.len;
            if (!bad && back.len > n && *p == ' ') p++; /* put in front */
            if (n == 1 && (unsigned char)good.data[from] >= 0x80 && memcmp(p, "\xef\xbf\xbd", 3) == 0) continue; /* a byte */
            if (memmem(good.data + from, n, "\xe2\x96\x81", 3) || memmem(good.data + from, n, "tool", 4) ||
                memmem(good.data + from, n, "LEFT", 4) || memmem(good.data + from, n, "RIGHT", 5))
                continue; /* ▁ in the text is decoded as a space; these take white space along */
            bad += (size_t)(e - p) != n || memcmp(p, good.data + from, n) != 0;
        }
    }
    ql_tok_close(t), ql_ids_free(&ids), ql_ids_free(&ends);
    ql_str_free(&s), ql_str_free(&scratch), ql_str_free(&good), ql_str_free(&back);
    return bad;
}

TEST(ends_of_pieces)
{
    CHECK_INT(misplaced(DATA "mistral"), 0);
    CHECK_INT(misplaced(DATA "llama2"), 0);
    CHECK_INT(misplaced(DATA "never"), 0);
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
    CHECK_FAILS(parse("{\"type\":\"WordPiece\"}", "null", SPLIT(QWEN), "null", "", &t), QL_ENOSUP, "WordPiece");
    CHECK_FAILS(parse(MODEL, "{\"type\":\"NFKC\"}", SPLIT(QWEN), "null", "", &t), QL_ENOSUP, "NFKC");
    CHECK_FAILS(parse(MODEL, "null", SPLIT("\\\\w+"), "null", "", &t), QL_ENOSUP, "\\w+");
    CHECK_FAILS(parse(MODEL, "null", "{\"type\":\"Digits\"}", "null", "", &t), QL_ENOSUP, "Digits");
    CHECK_FAILS(parse(MODEL, "null", SPLIT(QWEN), "{\"type\":\"BertProcessing\"}", "", &t), QL_ENOSUP,
                "BertProcessing");
    CHECK(!t);
}

/* A small tokenizer.json over pieces: 256 bytes, ▁, a, b and what `more` adds to the vocabulary. */
#define METASPACE "{\"type\":\"Metaspace\",\"replacement\":\"\xe2\x96\x81\",\"prepend_scheme\":\"first\",\"split\":false}"
#define REPLACE "{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},\"content\":\"\xe2\x96\x81\"}"
#define JOIN                                                                                                                \
    "{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Replace\",\"pattern\":{\"String\":\"\xe2\x96\x81\"},\"content\":\" \"}," \
    "{\"type\":\"ByteFallback\"},{\"type\":\"Fuse\"},{\"type\":\"Strip\",\"content\":\" \",\"start\":1,\"stop\":0}]}"
static ql_status pieces(const char *norm, const char *pre, const char *decoder, int bytes, const char *more, const char *merges,
                        ql_tok **out)
{
    ql_str s = {0};
    ql_status st = ql_str_printf(&s, "{\"normalizer\":%s,\"pre_tokenizer\":%s,\"decoder\":%s,\"model\":{\"type\":\"BPE\","
                                     "\"byte_fallback\":true,\"merges\":[%s],\"vocab\":{\"a\":256,\"b\":257%s",
                                 norm, pre, decoder, merges, more);
    for (int i = 0; i < bytes && st == QL_OK; i++) st = ql_str_printf(&s, ",\"<0x%02X>\":%d", (unsigned)i, i);
    if (st == QL_OK) st = ql_str_puts(&s, "}}}");
    if (st == QL_OK) st = ql_tok_parse(s.data, s.len, out);
    ql_str_free(&s);
    return st;
}
#define SPACES ",\"\xe2\x96\x81\":258"

TEST(what_is_not_supported_over_pieces_is_named)
{
    ql_tok *t = NULL;
    CHECK_OK(pieces("null", METASPACE, JOIN, 256, SPACES, "", &t));
    ql_tok_close(t), t = NULL;
    CHECK_OK(pieces(REPLACE, "null", JOIN, 256, SPACES, "", &t));
    ql_tok_close(t), t = NULL;
    CHECK_FAILS(pieces("null", METASPACE, JOIN, 255, SPACES, "", &t), QL_ENOSUP, "<0xFF>");
    CHECK_FAILS(pieces("null", METASPACE, JOIN, 256, "", "", &t), QL_ENOSUP, "\xe2\x96\x81");
    CHECK_FAILS(pieces("null", "null", JOIN, 256, SPACES, "", &t), QL_ENOSUP, "pre-tokenizer");
    CHECK_FAILS(pieces(REPLACE, METASPACE, JOIN, 256, SPACES, "", &t), QL_ENOSUP, "Metaspace");
    CHECK_FAILS(pieces("{\"type\":\"NFKC\"}", "null", JOIN, 256, SPACES, "", &t), QL_ENOSUP, "NFKC");
    CHECK_FAILS(pieces("{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFKC\"}," REPLACE "]}", "null", JOIN, 256, SPACES, "", &t),
                QL_ENOSUP, "NFKC");
    CHECK_FAILS(pieces("null", SPLIT(QWEN), JOIN, 256, SPACES, "", &t), QL_ENOSUP, "Split");
    CHECK_FAILS(pieces("null", "{\"type\":\"Metaspace\",\"replacement\":\"_\"}", JOIN, 256, SPACES, "", &t), QL_ENOSUP, "writes _");
    CHECK_FAILS(pieces("null", METASPACE, BYTES, 256, SPACES, "", &t), QL_ENOSUP, "ByteLevel");
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

/* Bytes of a character show when it is whole, and stay even where the whole text's decoder then finds a bad one among them. */
TEST(pieces_that_come_token_by_token)
{
    static const char text[] = "\xe6\x97\xa5\xf0\x9f\x91\xa8 a\n\xc3\xa9";
    static const int32_t more[] = {0xff, 256};
    ql_tok *t = NULL;
    ql_ids ids = {0};
    ql_str shown = {0}, now = {0};
    CHECK_OK(pieces("null", METASPACE, JOIN, 256, SPACES, "", &t));
    CHECK_OK(ql_tok_encode(t, text, strlen(text), 0, &ids));
    CHECK_INT(ids.len, 1 + 7 + 2 + 1 + 2);
    for (size_t i = 0; i < 2; i++) CHECK_OK(ql_ids_push(&ids, more[i]));
    for (size_t i = 1; i <= ids.len; i++) {
        ql_str_clear(&now);
        CHECK_OK(ql_tok_decode(t, ids.data, i, QL_TOK_STREAM, &now));
        size_t n = ql_tok_steady(now.data, now.len);
        if (n > shown.len) CHECK_OK(ql_str_add(&shown, now.data + shown.len, n - shown.len));
        if (i == 4) CHECK_STR(shown.data, "\xe6\x97\xa5");
        if (i == 7) CHECK_STR(shown.data, "\xe6\x97\xa5");
        if (i == 8) CHECK_STR(shown.data, "\xe6\x97\xa5\xf0\x9f\x91\xa8");
    }
    CHECK_STR(shown.data, "\xe6\x97\xa5\xf0\x9f\x91\xa8 a\n\xc3\xa9\xef\xbf\xbd" "a");
    ql_str_clear(&now);
    CHECK_OK(ql_tok_decode(t, ids.data, ids.len, 0, &now));
    CHECK_STR(now.data, "\xe6\x97\xa5\xf0\x9f\x91\xa8 a\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd" "a");
    ql_tok_close(t), ql_ids_free(&ids), ql_str_free(&shown), ql_str_free(&now);
}

/* A text of a million characters is one word here. A search for the best pair among all of them, or moving the rest along
 * at each of half a million merges, would take hours. */
TEST(a_very_long_text_over_pieces)
{
    static const char *const parts[] = {"ab", " ", "\xc3\xa9", "a ", "b a"};
    static const size_t count[] = {500001, 1000000, 2000001, 1000001, 1000002};
    for (int crossing = 0; crossing < 2; crossing++) {
        ql_tok *t = NULL;
        CHECK_OK(pieces("null", METASPACE, JOIN, 256, SPACES ",\"ab\":259,\"b\xe2\x96\x81\":260,\"\xe2\x96\x81\xe2\x96\x81\":261",
                        crossing ? "\"a b\",\"b \xe2\x96\x81\"" : "\"a b\"", &t));
        for (int k = 0; k < 5; k++) {
            ql_str s = {0};
            ql_ids ids = {0};
            size_t n = k == 1 || k == 2 ? 1000000 : 500000;
            for (size_t i = 0; i < n; i++) CHECK_OK(ql_str_puts(&s, parts[k]));
            CHECK_OK(ql_tok_encode(t, s.data, s.len, 0, &ids));
            CHECK_INT(ids.len, k == 4 && crossing ? 1000001 : count[k]);
            ql_ids_free(&ids), ql_str_free(&s);
        }
        ql_tok_close(t);
    }
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

/* Expected: AutoTokenizer's, but for what it has no name for. */
TEST(which_file_names_the_tokens)
{
    static const struct {
        const char *config, *eos, *pad;
    } all[] = {{"{\"eos_token\":\"</s>\",\"pad_token\":\"<unk>\"}", "<|im_end|>", "<unk>"},
               {"{\"eos_token\":\"</s>\",\"added_tokens_decoder\":{}}", "</s>", "<s>"}, {NULL, "<|im_end|>", "<s>"}};
    for (int i = 0; i < 3; i++) {
        const char *dir = tmp_dir("names");
        char *tokenizer = NULL;
        size_t n;
        ql_tok *t = NULL;
        CHECK_OK(ql_file_read(DATA "llama2/tokenizer.json", 1 << 20, &tokenizer, &n));
        tmp_text(dir, "tokenizer.json", tokenizer);
        tmp_text(dir, "special_tokens_map.json", i ? "{\"eos_token\":\"<|im_end|>\",\"pad_token\":\"<s>\"}" : "{\"eos_token\":{\"content\":\"<|im_end|>\"}}");
        if (all[i].config) tmp_text(dir, "tokenizer_config.json", all[i].config);
        CHECK_OK(ql_tok_open(dir, &t));
        CHECK_STR(ql_tok_info(t)->eos_token, all[i].eos);
        CHECK_INT(ql_tok_info(t)->eos, ql_tok_find(t, all[i].eos));
        CHECK_STR(ql_tok_info(t)->pad_token, all[i].pad);
        ql_tok_close(t), free(tokenizer);
    }
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
          T(ids_equal_the_library_flags), T(ids_equal_the_library_mistral), T(ids_equal_the_library_llama2),
          T(ids_equal_the_library_always), T(ids_equal_the_library_never), T(chats_equal_the_library_mistral), T(ends_of_pieces),
          T(what_is_not_supported_over_pieces_is_named), T(pieces_that_come_token_by_token), T(a_very_long_text_over_pieces), T(what_is_not_supported_is_named),
          T(broken_files_are_refused), T(white_space_is_taken_once), T(text_that_comes_token_by_token), T(a_very_long_word), T(names_come_from_the_configuration),
          T(which_file_names_the_tokens), T(what_ends_an_answer))
