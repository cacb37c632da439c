#include "core/chat.h"
#include "core/jinja.h"
#include "tests/test.h"
#include "tests/text/gen.h"

#include <time.h>

/* Templates ask for the date: it is always that of the fixtures, noon of 3 March 2025. */
time_t time(time_t *t)
{
    if (t) *t = 1741003200;
    return 1741003200;
}

static ql_status read_all(const char *path, ql_str *out)
{
    FILE *f = fopen(path, "rb");
    if (!f) return ql_fail(QL_EIO, "%s: cannot be read", path);
    QL_TRY(ql_str_reserve(out, 1 << 16));
    for (size_t n; (n = fread(out->data + out->len, 1, 1 << 16, f));) {
        out->len += n;
        if (ql_str_reserve(out, 1 << 16)) break;
    }
    out->data[out->len] = 0;
    fclose(f);
    return QL_OK;
}

/* FNV of the text and of the spans in characters, as make_chats.py computes it. */
static uint64_t hash_of(const ql_chat_text *t)
{
    uint64_t h = gen_hash(GEN_HASH_INIT, t->text.data, t->text.len);
    for (size_t i = 0; i < t->n_spans; i++) {
        char s[64];
        int at[2] = {0, 0};
        for (size_t k = 0; k < t->spans[i].end; k++) {
            bool first = (t->text.data[k] & 0xc0) != 0x80;
            at[0] += first && k < t->spans[i].start, at[1] += first;
        }
        h = gen_hash(h, s, (size_t)snprintf(s, sizeof s, "%d:%d;", at[0], at[1]));
    }
    return h;
}

/* Every published template over 60 conversations, against what transformers and jinja2 make of them. */
TEST(templates_render_as_jinja2_does)
{
    static json_t *cases[100];
    ql_str lines = {0}, template = {0};
    ql_chat *chat = NULL;
    ql_chat_text t = {0};
    ql_tok_names names = {.bos_token = "<s>", .eos_token = "</s>"};
    char name[64], last[64] = "", hash[32], path[128];
    int i, prompt, checked = 0, n = 0;
    size_t bytes;
    CHECK_OK(read_all("tests/text/data/chats.jsonl", &lines));
    for (char *p = lines.data, *e; n < 100 && (e = strchr(p, '\n')); p = e + 1)
        cases[n++] = json_loadb(p, (size_t)(e - p), 0, NULL);
    CHECK_INT(n, 60);
    FILE *f = fopen("tests/text/data/chats.expected", "r");
    CHECK(f);
    while (fscanf(f, "%63s %d %d %zu %31s", name, &i, &prompt, &bytes, hash) == 5) {
        if (strcmp(name, last) != 0) {
            ql_chat_close(chat);
            chat = NULL;
            ql_str_clear(&template);
            snprintf(path, sizeof path, "tests/text/templates/%s", name);
            CHECK_OK(read_all(path, &template));
            CHECK_OK(ql_chat_open(template.data, &names, &chat));
            snprintf(last, sizeof last, "%s", name);
        }
        ql_status st = ql_chat_render(chat, json_object_get(cases[i], "messages"),
                                      json_object_get(cases[i], "tools"), json_object_get(cases[i], "extra"),
                                      prompt ? QL_CHAT_PROMPT : 0, &t);
        char got[32] = "error";
        if (st == QL_OK) snprintf(got, sizeof got, "%016lx", hash_of(&t));
        CHECK_MSG(strcmp(got, hash) == 0, "%s %d %d: %s, expected %s (%zu bytes, not %zu) [%s]\n%s", name, i,
                  prompt, got, hash, t.text.len, bytes, ql_error(), st ? "" : t.text.data);
        ql_error_clear();
        checked++;
    }
    CHECK(checked >= 60 * 2 * 27);
    fclose(f), ql_chat_close(chat), ql_chat_text_free(&t), ql_str_free(&lines), ql_str_free(&template);
    for (i = 0; i < n; i++) json_decref(cases[i]);
}

static ql_status try(const char *template, const char *context, ql_str *out)
{
    ql_jinja *t = NULL;
    json_t *c = json_loads(context, 0, NULL);
    ql_str_clear(out);
    ql_status st = ql_jinja_compile(template, strlen(template), &t);
    if (st == QL_OK) st = ql_jinja_render(t, c, NULL, NULL, out);
    ql_jinja_free(t);
    json_decref(c);
    return st;
}

TEST(what_is_not_supported_is_named_with_its_line)
{
    ql_str s = {0};
    CHECK_FAILS(try("a\n{% include 'x' %}", "{}", &s), QL_ENOSUP, "line 2: the statement {% include %}");
    CHECK_FAILS(try("\n\n{{ x | pprint }}", "{}", &s), QL_ENOSUP, "line 3: the filter 'pprint'");
    CHECK_FAILS(try("{{ x is weird }}", "{}", &s), QL_ENOSUP, "'is weird'");
    CHECK_FAILS(try("{% for a in b recursive %}{% endfor %}", "{}", &s), QL_ENOSUP, "recursive");
    CHECK_FAILS(try("{{ 'a'.encode() }}", "{}", &s), QL_EINVAL, "'encode' of str");
    CHECK_FAILS(try("{{ lipsum() }}", "{}", &s), QL_EINVAL, "'lipsum'");
    CHECK_FAILS(try("{{ f(*a) }}", "{}", &s), QL_ENOSUP, "arguments");
    ql_str_free(&s);
}

TEST(mistakes_are_found)
{
    ql_str s = {0};
    CHECK_FAILS(try("{% if x %}", "{}", &s), QL_EINVAL, "the template's end");
    CHECK_FAILS(try("{% endif %}", "{}", &s), QL_ENOSUP, "endif");
    CHECK_FAILS(try("{{ 'abc }}", "{}", &s), QL_EINVAL, "string has no end");
    CHECK_FAILS(try("{{ 1", "{}", &s), QL_EINVAL, "no }}");
    CHECK_FAILS(try("{# x", "{}", &s), QL_EINVAL, "no end #}");
    CHECK_FAILS(try("{{ 1 + }}", "{}", &s), QL_EINVAL, "an expression");
    CHECK_FAILS(try("{{ a.b }}", "{}", &s), QL_EINVAL, "'a' is undefined");
    CHECK_FAILS(try("{{ 'a' + 1 }}", "{}", &s), QL_EINVAL, "str and int");
    CHECK_FAILS(try("{{ 1 // 0 }}", "{}", &s), QL_EINVAL, "division by zero");
    CHECK_FAILS(try("\n{{ raise_exception('no!') }}", "{}", &s), QL_EINVAL, "the template says: no!");
    ql_str_free(&s);
}

TEST(runaway_templates_end)
{
    static char deep[3000];
    ql_str s = {0};
    CHECK_FAILS(try("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{}", &s), QL_EINVAL, "deep");
    CHECK_FAILS(try("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "{}", &s),
                QL_ENOMEM, "256 MB");
    CHECK_FAILS(try("{% set ns = namespace(s='x') %}{% for a in range(99) %}{% set ns.s = ns.s + ns.s %}"
                    "{% endfor %}", "{}", &s), QL_ENOMEM, "256 MB");
    memset(deep, '(', sizeof deep - 1);
    memcpy(deep, "{{ ", 3);
    CHECK_FAILS(try(deep, "{}", &s), QL_EINVAL, "");
    memset(deep + 3, '-', sizeof deep - 4);
    CHECK_FAILS(try(deep, "{}", &s), QL_EINVAL, "");
    deep[0] = '{', deep[1] = '{', deep[2] = ' ';
    for (int i = 0; i < 900; i++) memcpy(deep + 3 + 3 * i, "not ", 4);
    memcpy(deep + 2700, " 1 }}", 6);
    CHECK_FAILS(try(deep, "{}", &s), QL_EINVAL, "");
    ql_str_free(&s);
}

/* Expected: CPython 3.11's print([s]). */
TEST(what_python_does_not_print_is_escaped)
{
    static const char *const pairs[][2] = {
        {"\xf0\x9f\x91\xa8\xe2\x80\x8d\xf0\x9f\x91\xa9", "['\xf0\x9f\x91\xa8\\u200d\xf0\x9f\x91\xa9']"}, /* a family of emoji */
        {"a\xc2\xa0" "b\xc2\xad\xc2\x85", "['a\\xa0b\\xad\\x85']"},
        {"\xe3\x80\x80\xe2\x80\xa8\xef\xbb\xbf\xee\x80\x80", "['\\u3000\\u2028\\ufeff\\ue000']"},
        {"\xf3\xa0\x80\x81\xf3\xa0\x84\x80\xf4\x8f\xbf\xbf", "['\\U000e0001\xf3\xa0\x84\x80\\U0010ffff']"},
        {"\xc3\xa9 \xe6\x97\xa5'\\\n\x01\x7f", "[\"\xc3\xa9 \xe6\x97\xa5'\\\\\\n\\x01\\x7f\"]"},
    };
    ql_str s = {0};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        json_t *c = json_pack("{s:[s]}", "x", pairs[i][0]);
        char *text = json_dumps(c, 0);
        CHECK_OK(try("{{ x }}", text, &s));
        CHECK_STR(s.data, pairs[i][1]);
        free(text), json_decref(c);
    }
    ql_str_free(&s);
}

TEST(what_a_set_block_sets_stays_inside)
{
    ql_str s = {0};
    CHECK_OK(try("{% set x = 1 %}{% set y %}{% set x = 2 %}{{ x }}{% endset %}{{ x }}{{ y }}", "{}", &s));
    CHECK_STR(s.data, "12");
    CHECK_OK(try("{% set y | replace('a', z) %}{% set z = 'b' %}a{% endset %}{{ y }}{{ z is defined }}", "{}", &s));
    CHECK_STR(s.data, "bFalse");
    ql_str_free(&s);
}

/* Without marks, spans come from rendering prefixes. */
TEST(spans_by_prefixes)
{
    ql_tok_names names = {.bos_token = "<s>", .eos_token = "</s>"};
    json_t *m = json_loads("[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"assistant\",\"content\":\"b\"},"
                           "{\"role\":\"user\",\"content\":\"c\"},{\"role\":\"assistant\",\"content\":\"d\"}]",
                           0, NULL);
    ql_chat_text t = {0};
    ql_chat *c = NULL;
    const char *plain =
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}";
    CHECK_OK(ql_chat_open(plain, &names, &c));
    CHECK_OK(ql_chat_render(c, m, NULL, NULL, QL_CHAT_SPANS, &t));
    CHECK_STR(t.text.data, "<user>a</><assistant>b</><user>c</><assistant>d</>");
    CHECK_INT(t.n_spans, 2);
    CHECK(memcmp(t.text.data + t.spans[0].start, "b</>", 4) == 0 && t.spans[0].end - t.spans[0].start == 4);
    CHECK(memcmp(t.text.data + t.spans[1].start, "d</>", 4) == 0 && t.spans[1].end == t.text.len);
    ql_chat_close(c);
    CHECK_OK(ql_chat_open("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", &names, &c));
    CHECK_FAILS(ql_chat_render(c, m, NULL, NULL, QL_CHAT_SPANS, &t), QL_ENOSUP, "cannot be told apart");
    ql_chat_close(c), ql_chat_text_free(&t), json_decref(m);
}

/* With templates whose turns show by their headers: spans run from behind each of the assistant's headers to the next header. */
TEST(spans_of_published_templates)
{
    static const struct {
        const char *name, *assistant, *any;
        int refused; /* Qwen3: what was thought before a call shows until the next question is asked */
    } all[] = {{"qwen2_5", "<|im_start|>assistant\n", "<|im_start|>", 0},
               {"qwen3", "<|im_start|>assistant\n", "<|im_start|>", 1},
               {"qwen3_instruct_2507", "<|im_start|>assistant\n", "<|im_start|>", 0},
               {"llama3_1", "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|start_header_id|>", 0}};
    ql_tok_names names = {.bos_token = "<s>", .eos_token = "</s>"};
    ql_str lines = {0};
    CHECK_OK(read_all("tests/text/data/chats.jsonl", &lines));
    for (int k = 0; k < 4; k++) {
        ql_chat *chat = NULL;
        ql_chat_text t = {0};
        ql_str template = {0};
        char path[128];
        int refused = 0, good = 0;
        snprintf(path, sizeof path, "tests/text/templates/%s.jinja", all[k].name);
        CHECK_OK(read_all(path, &template));
        CHECK_OK(ql_chat_open(template.data, &names, &chat));
        for (char *p = lines.data, *e; (e = strchr(p, '\n')); p = e + 1) {
            json_t *c = json_loadb(p, (size_t)(e - p), 0, NULL);
            ql_status st = ql_chat_render(chat, json_object_get(c, "messages"), json_object_get(c, "tools"), json_object_get(c, "extra"), QL_CHAT_SPANS, &t);
            size_t n = 0;
            refused += st == QL_ENOSUP;
            for (const char *at = t.text.data; st == QL_OK && (at = strstr(at, all[k].assistant)); n++) {
                at += strlen(all[k].assistant);
                const char *end = strstr(at, all[k].any);
                size_t from = (size_t)(at - t.text.data), to = end ? (size_t)(end - t.text.data) : t.text.len;
                CHECK_MSG(n < t.n_spans && t.spans[n].start == from && t.spans[n].end == to, "%s: span %zu\n%s", all[k].name, n, t.text.data);
            }
            if (st == QL_OK) CHECK_INT(t.n_spans, n);
            good += st == QL_OK;
            ql_error_clear();
            json_decref(c);
        }
        CHECK_INT(refused, all[k].refused);
        CHECK(good >= 50);
        ql_chat_close(chat), ql_chat_text_free(&t), ql_str_free(&template);
    }
    ql_str_free(&lines);
}

TEST(builtin_templates)
{
    const char *name[] = {"chatml", "alpaca", "llama-3", "mistral"};
    const char *want[] = {"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n",
                          "<s>### Instruction:\nhi\n\n### Response:\nyo</s>\n\n",
                          "<s><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
                          "<|start_header_id|>assistant<|end_header_id|>\n\nyo<|eot_id|>",
                          "<s>[INST] hi [/INST] yo</s>"};
    ql_tok_names names = {.bos_token = "<s>", .eos_token = "</s>"};
    json_t *m = json_loads("[{\"role\":\"user\",\"content\":\"hi\"},{\"role\":\"assistant\",\"content\":\"yo\"}]",
                           0, NULL);
    ql_chat_text t = {0};
    for (int i = 0; i < 4; i++) {
        ql_chat *c = NULL;
        CHECK_OK(ql_chat_open(ql_chat_builtin(name[i]), &names, &c));
        CHECK_OK(ql_chat_render(c, m, NULL, NULL, QL_CHAT_SPANS, &t));
        CHECK_STR(t.text.data, want[i]);
        CHECK_INT(t.n_spans, 1);
        ql_chat_close(c);
    }
    CHECK(!ql_chat_builtin("vicuna"));
    char *given = NULL;
    CHECK_OK(ql_chat_template("alpaca", &given));
    CHECK_STR(given, ql_chat_builtin("alpaca"));
    free(given);
    CHECK_OK(ql_chat_template("{{ messages }}", &given));
    CHECK_STR(given, "{{ messages }}");
    free(given);
    CHECK_OK(ql_chat_template("tests/text/templates/own_generation.jinja", &given));
    CHECK(strstr(given, "{%"));
    free(given);
    CHECK_FAILS(ql_chat_template("tests/text/nothing.jinja", &given), QL_EINVAL, "no template, no file");
    CHECK_FAILS(ql_chat_template("tests", &given), QL_EINVAL, "no file");
    ql_chat_text_free(&t), json_decref(m);
}

TEST_MAIN(T(templates_render_as_jinja2_does), T(what_is_not_supported_is_named_with_its_line),
          T(mistakes_are_found), T(runaway_templates_end), T(what_python_does_not_print_is_escaped),
          T(what_a_set_block_sets_stays_inside), T(spans_by_prefixes),
          T(spans_of_published_templates), T(builtin_templates))
