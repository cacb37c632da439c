#include "core/data.h"
#include "tests/test.h"

#include <sys/stat.h>
#include <unistd.h>

static char dir[64];

/* A file in the test's folder; returns its path (one of four, in turn). */
static const char *file(const char *name, const char *text)
{
    static char path[4][128];
    static int turn;
    char *p = path[turn = (turn + 1) % 4];
    if (!dir[0]) {
        snprintf(dir, sizeof dir, "/tmp/qlora-data-XXXXXX");
        if (!mkdtemp(dir)) return "";
    }
    snprintf(p, 128, "%s/%s", dir, name);
    FILE *f = fopen(p, "wb");
    if (!f) return "";
    fwrite(text, 1, strlen(text), f);
    fclose(f);
    return p;
}

static ql_status open_one(const char *path, const char *split, ql_table **out)
{
    return ql_table_open(&path, 1, split, out);
}

/* Value of a string column of row i; "" where the row is broken. */
static const char *cell(ql_table *t, int64_t i, const char *key)
{
    static char s[256];
    json_t *row = NULL;
    s[0] = 0;
    if (ql_table_get(t, i, &row) == QL_OK && json_is_string(json_object_get(row, key)))
        snprintf(s, sizeof s, "%s", json_string_value(json_object_get(row, key)));
    json_decref(row);
    return s;
}

TEST(formats_are_read)
{
    ql_table *t = NULL;
    CHECK_OK(open_one(file("a.jsonl", "{\"text\":\"one\"}\r\n\n  \n{\"text\":\"two\"}"), NULL, &t));
    CHECK_INT(ql_table_count(t), 2);
    CHECK_STR(cell(t, 1, "text"), "two");
    ql_table_close(t);
    CHECK_OK(open_one(file("a.json", " [ {\"text\":\"o[n\\\"e\"} ,\n{\"text\":\"two\",\"x\":[{}]}, {\"text\":\"3\"}]"), NULL, &t));
    CHECK_INT(ql_table_count(t), 3);
    CHECK_STR(cell(t, 0, "text"), "o[n\"e");
    CHECK_STR(cell(t, 2, "text"), "3");
    ql_table_close(t);
    CHECK_OK(open_one(file("b.json", "{\"version\":\"1\",\"data\":[{\"text\":\"x\"},{\"text\":\"y\"}]}"), NULL, &t));
    CHECK_INT(ql_table_count(t), 2);
    CHECK_STR(cell(t, 1, "text"), "y");
    ql_table_close(t);
    CHECK_OK(open_one(file("c.json", "{\"text\":\"x\"}\n{\"text\":\"y\"}\n"), NULL, &t));
    CHECK_INT(ql_table_count(t), 2);
    ql_table_close(t);
    CHECK_OK(open_one(file("a.csv", "\xef\xbb\xbftext,\"n,m\"\r\n\"a \"\"b\"\"\nc\",1\r\nplain, 2\n,\n"), NULL, &t));
    CHECK_INT(ql_table_count(t), 3);
    CHECK_STR(cell(t, 0, "text"), "a \"b\"\nc");
    CHECK_STR(cell(t, 0, "n,m"), "1");
    CHECK_STR(cell(t, 1, "n,m"), " 2");
    CHECK_STR(cell(t, 2, "text"), "");
    ql_table_close(t);
    CHECK_OK(open_one(file("a.tsv", "text\tn\n\t\n \n\n\t2\n"), NULL, &t)); /* two rows without a text, two blank lines */
    CHECK_INT(ql_table_count(t), 2);
    CHECK_STR(cell(t, 1, "n"), "2");
    ql_table_close(t);
    CHECK_OK(open_one(file("mac.csv", "text,n\rone,1\r\"two\rlines\",2\r"), NULL, &t));
    CHECK_INT(ql_table_count(t), 2);
    CHECK_STR(cell(t, 1, "text"), "two\rlines");
    ql_table_close(t);
    /* What Python's json writes and JSON does not have. */
    CHECK_OK(open_one(file("nan.jsonl", "{\"text\":\"NaN \\\"\",\"x\":[NaN,-Infinity],\"y\":Infinity,\"n\":1}\n{\"text\":NaN,\"z\":Nan}\n"), NULL, &t));
    CHECK_STR(cell(t, 0, "text"), "NaN \"");
    json_t *row = NULL;
    CHECK_OK(ql_table_get(t, 0, &row));
    CHECK(json_is_null(json_object_get(row, "y")) && json_is_integer(json_object_get(row, "n")));
    json_decref(row);
    CHECK_FAILS(ql_table_get(t, 1, &row), QL_EINVAL, "nan.jsonl, row 2");
    ql_table_close(t);
    CHECK_OK(open_one(file("list.json", "[\"one\", \"two, three\", 3]"), NULL, &t));
    CHECK_STR(cell(t, 1, "text"), "two, three");
    CHECK_FAILS(ql_table_get(t, 2, &row), QL_EINVAL, "row 3: not an object");
    ql_table_close(t);
    /* The mark of Windows' editors is no text, whatever the format. */
    CHECK_OK(open_one(file("m.jsonl", "\xef\xbb\xbf{\"text\":\"one\"}\n"), NULL, &t));
    CHECK_STR(cell(t, 0, "text"), "one");
    ql_table_close(t);
    CHECK_OK(open_one(file("m.json", "\xef\xbb\xbf[{\"text\":\"one\"}]"), NULL, &t));
    CHECK_STR(cell(t, 0, "text"), "one");
    ql_table_close(t);
    CHECK_OK(open_one(file("m.txt", "\xef\xbb\xbfone"), NULL, &t));
    CHECK_STR(cell(t, 0, "text"), "one");
    ql_table_close(t);
    CHECK_OK(open_one(file("a.txt", "first\r\n\nsecond \xff\n"), NULL, &t));
    CHECK_INT(ql_table_count(t), 2);
    CHECK_STR(cell(t, 0, "text"), "first");
    CHECK_STR(cell(t, 1, "text"), "second \xef\xbf\xbd");
    ql_table_close(t);
}

TEST(a_comma_that_is_missing_is_told)
{
    ql_table *t = NULL;
    json_t *row = NULL;
    CHECK_OK(open_one(file("comma.json", "[{\"text\":\"a\"}\n{\"text\":\"b\"} ,\n{\"text\":\"c\"}\n]\n"), NULL, &t));
    CHECK_INT(ql_table_count(t), 2);
    CHECK_FAILS(ql_table_get(t, 0, &row), QL_EINVAL, "comma.json, row 1: end of file expected near '{'");
    CHECK_STR(cell(t, 1, "text"), "c");
    ql_table_close(t);
}

TEST(long_integers_change_nothing_else)
{
    ql_table *t = NULL;
    json_t *row = NULL;
    CHECK_OK(open_one(file("long.jsonl", "{\"x\":18446744073709551615,\"k\":3,\"y\":NaN}\n{\"y\":[NaN,-99999999999999999999],\"k\":3}\n"
                                         "{\"k\":-9223372036854775808,\"t\":\"18446744073709551615\",\"x\":[12345678901234567890]}\n"), NULL, &t));
    for (int i = 0; i < 3; i++) {
        CHECK_OK(ql_table_get(t, i, &row));
        CHECK(json_is_integer(json_object_get(row, "k")));
        CHECK_INT(json_integer_value(json_object_get(row, "k")), i < 2 ? 3 : INT64_MIN);
        json_decref(row);
    }
    CHECK_STR(cell(t, 2, "t"), "18446744073709551615");
    CHECK_OK(ql_table_get(t, 0, &row));
    CHECK(json_real_value(json_object_get(row, "x")) == 18446744073709551616.0);
    json_decref(row), ql_table_close(t);
}

TEST(a_json_file_of_one_line_or_of_lines)
{
    static const char *const texts[] = {
        "{\"text\":\"a\",\"score\":NaN}\n{\"text\":\"b\",\"score\":1}\n", "{\"text\":\"a\xff\"}\n{\"text\":\"b\"}\n",
        "{\"version\":1,\"train\":[{\"text\":\"a\"},{\"text\":\"b\"}]}", "{\"data\":[{\"text\":\"a\"},{\"text\":\"b\"}]}\n",
        "{\"train\":[{}],\"text\":\"a\"}\n{\"text\":\"b\"}\n", "{\"rows\":[\"a\",\"b\"]}"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        ql_table *t = NULL;
        CHECK_OK(open_one(file("line.json", texts[i]), NULL, &t));
        CHECK_INT(ql_table_count(t), 2);
        CHECK_STR(cell(t, 1, "text"), "b");
        ql_table_close(t);
    }
}

TEST(splits_globs_and_folders)
{
    ql_table *t = NULL;
    char text[400] = "", glob[128];
    for (int i = 0; i < 25; i++) snprintf(text + 14 * i, 15, "{\"text\":\"%02d\"}\n", i);
    const char *path = file("part-1.jsonl", text);
    CHECK_OK(open_one(path, "train[:10%]", &t)); /* 2.5 rounds to even */
    CHECK_INT(ql_table_count(t), 2);
    ql_table_close(t);
    CHECK_OK(open_one(path, "train[-5:]", &t));
    CHECK_INT(ql_table_count(t), 5);
    CHECK_STR(cell(t, 0, "text"), "20");
    ql_table_close(t);
    CHECK_OK(open_one(path, "train[30%:12]", &t)); /* 7.5 → 8 */
    CHECK_INT(ql_table_count(t), 4);
    CHECK_STR(cell(t, 0, "text"), "08");
    ql_table_close(t);
    t = NULL;
    CHECK_FAILS(open_one(path, "train[5:5]", &t), QL_EINVAL, "empty");
    CHECK_FAILS(open_one(path, "train[x:5]", &t), QL_EINVAL, "'x'");
    CHECK_FAILS(open_one(path, "train[:10%]+train[90%:]", &t), QL_ENOSUP, "only one part");
    CHECK_FAILS(open_one(file("open.csv", "text,n\na,1\n\"b,2\nc,3\n"), NULL, &t), QL_EINVAL, "a field of row 2 is never closed");
    CHECK_FAILS(open_one(file("wide.csv", "\xff\xfet"), NULL, &t), QL_ENOSUP, "UTF-16");
    CHECK_FAILS(open_one(file("two.json", "[{\"text\":\"a\"}]\n[{\"text\":\"b\"}]"), NULL, &t), QL_EINVAL, "more behind its array of 1 rows");
    CHECK_FAILS(open_one(path, "train[10%", &t), QL_EINVAL, "train[from:to]");
    file("part-2.jsonl", "{\"text\":\"last\"}\n");
    snprintf(glob, sizeof glob, "%s/part-*.jsonl", dir);
    CHECK_OK(open_one(glob, NULL, &t));
    CHECK_INT(ql_table_count(t), 26);
    CHECK_STR(cell(t, 25, "text"), "last");
    CHECK(ql_table_memory(t) <= 8 * 26);
    ql_table_close(t);
    snprintf(glob, sizeof glob, "%s/d", dir);
    CHECK(mkdir(glob, 0700) == 0);
    file("d/train-0.jsonl", "{\"text\":\"t\"}");
    file("d/test-0.jsonl", "{\"text\":\"e\"}");
    CHECK_OK(open_one(glob, "test", &t));
    CHECK_STR(cell(t, 0, "text"), "e");
    ql_table_close(t);
    CHECK_OK(open_one(glob, NULL, &t));
    CHECK_INT(ql_table_count(t), 1);
    ql_table_close(t);
    CHECK_FAILS(open_one(glob, "validation", &t), QL_EINVAL, "split 'validation'");
    file("d/dev.jsonl", "{\"text\":\"v\"}");
    CHECK_OK(open_one(glob, "validation", &t));
    CHECK_STR(cell(t, 0, "text"), "v");
    ql_table_close(t);
    char latest[160];
    snprintf(latest, sizeof latest, "%s/l", dir);
    CHECK(mkdir(latest, 0700) == 0);
    file("l/latest.jsonl", "{\"text\":\"l\"}"); /* not a test's */
    file("l/README.md", "no row");
    CHECK_OK(open_one(latest, NULL, &t));
    CHECK_INT(ql_table_count(t), 1);
    CHECK_STR(cell(t, 0, "text"), "l");
    ql_table_close(t);
    /* Hub data sets have folders in them, and notes about themselves. */
    char inner[160];
    snprintf(inner, sizeof inner, "%s/h", dir);
    CHECK(mkdir(inner, 0700) == 0);
    file("h/dataset_infos.json", "{\"a\":{}}");
    for (int i = 0; i < 2; i++) {
        snprintf(inner, sizeof inner, i ? "%s/h/test" : "%s/h/data", dir);
        CHECK(mkdir(inner, 0700) == 0);
    }
    file("h/data/b.jsonl", "{\"text\":\"second\"}");
    file("h/data/a.jsonl", "{\"text\":\"first\"}");
    file("h/test/c.jsonl", "{\"text\":\"third\"}");
    snprintf(inner, sizeof inner, "%s/h", dir);
    CHECK_OK(open_one(inner, NULL, &t));
    CHECK_INT(ql_table_count(t), 2);
    CHECK_STR(cell(t, 0, "text"), "first");
    ql_table_close(t);
    CHECK_OK(open_one(inner, "test", &t));
    CHECK_INT(ql_table_count(t), 1);
    CHECK_STR(cell(t, 0, "text"), "third");
    ql_table_close(t);
    t = NULL;
    CHECK_FAILS(open_one("/nowhere/x.jsonl", NULL, &t), QL_EINVAL, "no such file");
    CHECK_FAILS(open_one(file("x.parquet", "PAR1"), NULL, &t), QL_ENOSUP, "variable's name");
    CHECK_FAILS(open_one(file("e.jsonl", "\n"), NULL, &t), QL_EINVAL, "no rows");
    CHECK_FAILS(open_one(file("cut.json", "[{\"a\":1},"), NULL, &t), QL_EINVAL, "cut off");
    CHECK_FAILS(open_one(file("scalar.json", "17"), NULL, &t), QL_EINVAL, "neither");
}

TEST(rows_are_pushed_by_a_front_end)
{
    ql_table *t = NULL;
    json_t *row = json_pack("{s:s}", "text", "a\nb");
    uint64_t h[2], h2[2];
    CHECK_OK(ql_table_new(NULL, &t));
    CHECK_OK(ql_table_push(t, row));
    CHECK_STR(cell(t, 0, "text"), "a\nb");
    CHECK_OK(ql_table_hash(t, h));
    CHECK_OK(ql_table_push_lines(t, "{\"text\":\"c\"}\n{\"text\":\"d\"}\n", 26));
    CHECK_INT(ql_table_count(t), 3);
    CHECK_STR(cell(t, 2, "text"), "d");
    CHECK_OK(ql_table_hash(t, h2));
    CHECK(h[0] != h2[0] && h[1] != h2[1]);
    ql_table_close(t), json_decref(row);
}

/* One row through the formatter: its text with [ ] round what is trained. */
static ql_status show(const char *model, const char *row, ql_data_options *o, ql_str *out, ql_example *e)
{
    char path[128];
    ql_tok *tok = NULL;
    ql_formatter *f = NULL;
    json_t *j = json_loads(row, 0, NULL);
    snprintf(path, sizeof path, "tests/text/data/%s", model);
    ql_status st = ql_tok_open(path, &tok);
    ql_str_clear(out);
    if (st == QL_OK) st = ql_formatter_new(tok, j, o, &f);
    if (st == QL_OK) st = ql_format_row(f, j, e);
    for (size_t i = 0; st == QL_OK && i < e->ids.len; i++) {
        size_t n;
        const char *p = ql_tok_bytes(tok, e->ids.data[i], &n);
        if (e->trained[i] && !(i && e->trained[i - 1])) st = ql_str_puts(out, "[");
        if (st == QL_OK) st = ql_str_add(out, p, n);
        if (e->trained[i] && (i + 1 == e->ids.len || !e->trained[i + 1])) st = ql_str_puts(out, "]");
    }
    ql_formatter_free(f), ql_tok_close(tok), json_decref(j);
    return st;
}

#define SHOWS(model, row, want)                                                                    \
    do {                                                                                           \
        CHECK_OK(show(model, row, &o, &s, &e));                                                    \
        CHECK_STR(s.data, want);                                                                   \
    } while (0)

TEST(rows_become_masked_ids)
{
    ql_data_options o = {0};
    ql_str s = {0};
    ql_example e = {0};
    const char *chat = "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"},{\"role\":\"assistant\",\"content\":\"yo\"}]}";
    SHOWS("qwen", "{\"text\":\"plain\"}", "[plain<|im_end|>]");
    SHOWS("qwen", "{\"text\":\"plain<|im_end|>\"}", "[plain<|im_end|>]");
    SHOWS("llama", "{\"text\":\"plain\"}", "[<|begin_of_text|>plain<|eot_id|>]");
    SHOWS("qwen", "{\"prompt\":\"2+2=\",\"completion\":\" 4\"}", "2+2=[ 4<|im_end|>]");
    SHOWS("qwen", chat, "[<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n]");
    SHOWS("llama", chat, "[<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
                         "<|start_header_id|>assistant<|end_header_id|>\n\nyo<|eot_id|>]");
    SHOWS("qwen", "{\"conversations\":[{\"from\":\"human\",\"value\":\"hi\"},{\"from\":\"gpt\",\"value\":\"yo\"}]}",
          "[<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n]");
    SHOWS("qwen", "{\"instruction\":\"add\",\"input\":\"1 1\",\"output\":\"2\"}",
          "<|im_start|>user\nadd\n\n1 1<|im_end|>\n<|im_start|>assistant\n[2<|im_end|>\n]");
    /* A text made from them stands beside them: as TRL takes it. */
    SHOWS("qwen", "{\"instruction\":\"add\",\"output\":\"2\",\"text\":\"add: 2\"}", "[add: 2<|im_end|>]");
    SHOWS("qwen", "{\"conversations\":[{\"role\":\"user\",\"content\":\"hi\"}],\"text\":\"said: hi\"}", "[said: hi<|im_end|>]");
    SHOWS("qwen", "{\"prompt\":\"2+2=\",\"completion\":\" 4\",\"text\":\"x\"}", "2+2=[ 4<|im_end|>]");
    SHOWS("qwen", "{\"text\":\"<human>: hi <bot>: yo\"}", "[<human>: hi <bot>: yo<|im_end|>]");
    /* A token that reaches over the border is the completion's. */
    SHOWS("qwen", "{\"prompt\":\"x  \",\"completion\":\"42\"}", "x[  42<|im_end|>]");
    CHECK(e.prompt_not_prefix);
    SHOWS("qwen", "{\"prompt\":\"x<|im_end|>\",\"completion\":\"\"}", "x<|im_end|>[<|im_end|>]");
    /* Both kinds of columns: prompt and completion, as TRL has it; a prompt alone says nothing. */
    SHOWS("qwen", "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"prompt\":\"a\",\"completion\":\" b\"}", "a[ b<|im_end|>]");
    SHOWS("qwen", "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"prompt\":\"a\"}", "[<|im_start|>user\nhi<|im_end|>\n]");
    SHOWS("qwen", "{\"messages\":[{\"from\":\"human\",\"value\":\"hi\"},{\"from\":\"gpt\",\"value\":\"yo\"}]}",
          "[<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n]");
    o.loss_on = QL_LOSS_RESPONSES;
    SHOWS("qwen", "{\"prompt\":[{\"role\":\"user\",\"content\":\"a\"}],\"completion\":[{\"role\":\"assistant\",\"content\":\"b\"},"
                  "{\"role\":\"tool\",\"content\":\"c\"},{\"role\":\"assistant\",\"content\":\"d\"}]}",
          "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>\n]<|im_start|>tool\nc<|im_end|>\n"
          "<|im_start|>assistant\n[d<|im_end|>\n]");
    SHOWS("qwen", chat, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[yo<|im_end|>\n]");
    SHOWS("llama", chat, "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
                         "<|start_header_id|>assistant<|end_header_id|>\n\n[yo<|eot_id|>]");
    SHOWS("qwen", "{\"text\":\"<human>: hi\\n<bot>: yo\\n<human>: so\\n<bot>: la\"}",
          "<human>: hi\n<bot>:[ yo\n]<human>: so\n<bot>:[ la<|im_end|>]");
    /* NFC moves bytes; the mask follows. */
    SHOWS("qwen", "{\"messages\":[{\"role\":\"user\",\"content\":\"cafe\xcc\x81 e\xcc\x81\"},{\"role\":\"assistant\","
                  "\"content\":\"ne\xcc\x81\"}]}",
          "<|im_start|>user\ncaf\xc3\xa9 \xc3\xa9<|im_end|>\n<|im_start|>assistant\n[n\xc3\xa9<|im_end|>\n]");
    o.loss_on = QL_LOSS_ALL;
    SHOWS("qwen", "{\"prompt\":\"a\",\"completion\":\"b\"}", "[ab<|im_end|>]");
    o.loss_on = QL_LOSS_AUTO, o.text_field = "body";
    SHOWS("qwen", "{\"body\":\"x y\"}", "[x y<|im_end|>]");
    /* Tokenised elsewhere: 64 is 'a'. Nothing is added, padding goes. */
    SHOWS("qwen", "{\"input_ids\":[64,65,66]}", "[abc]");
    SHOWS("qwen", "{\"input_ids\":[64,65,66,67],\"labels\":[-100,65,-100,67]}", "a[b]c[d]");
    SHOWS("qwen", "{\"input_ids\":[64,65,0,0],\"attention_mask\":[1,1,0,0],\"labels\":[64,65,-100,-100]}", "[ab]");
    o.max_length = 2;
    SHOWS("qwen", "{\"body\":\"x y z\"}", "[x y]");
    CHECK(e.truncated);
    ql_str_free(&s), ql_example_free(&e);
}

/* Over pieces: the mask follows the text, whose spaces are longer in tokens, and a ▁ put in front of an answer is said with it. */
TEST(rows_become_masked_pieces)
{
    ql_data_options o = {.chat_template = "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}"
                                          "{% else %}{% generation %}{{ m.content + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"};
    ql_str s = {0};
    ql_example e = {0};
    static const char chat[] = "{\"messages\":[{\"role\":\"user\",\"content\":\"a  b\"},{\"role\":\"assistant\",\"content\":\"\\ue001 yo\"},"
                               "{\"role\":\"user\",\"content\":\"c\"},{\"role\":\"assistant\",\"content\":\" so \\ue000\"}]}";
    o.loss_on = QL_LOSS_RESPONSES, o.eos_token = "</s>";
    SHOWS("mistral", chat, "<s>[INST]▁a▁▁b[/INST][<0xEE><0x80><0x81>▁yo</s>][INST]▁c[/INST][▁so▁<0xEE><0x80><0x80></s>]");
    SHOWS("llama2", chat, "<s>[INST]▁▁a▁▁b[/INST][▁<0xEE><0x80><0x81>▁yo</s>][INST]▁▁c[/INST][▁▁so▁<0xEE><0x80><0x80></s>]");
    o.loss_on = QL_LOSS_AUTO, o.chat_template = NULL;
    SHOWS("mistral", "{\"text\":\"plain text\"}", "[<s>▁plain▁text</s>]");
    SHOWS("mistral", "{\"prompt\":\"2+2=\",\"completion\":\" 4\"}", "<s>▁2+2=[▁4</s>]");
    ql_str_free(&s), ql_example_free(&e);
}

/* As many turns as a text has. */
TEST(many_turns_of_plain_text)
{
    ql_data_options o = {.loss_on = QL_LOSS_RESPONSES};
    ql_tok *t = NULL;
    ql_formatter *f = NULL;
    ql_example e = {0};
    ql_str s = {0};
    size_t answers = 0;
    for (int i = 0; i < 100; i++) CHECK_OK(ql_str_puts(&s, "<human>: x <bot>: y "));
    json_t *row = json_pack("{s:s}", "text", s.data);
    CHECK_OK(ql_tok_open("tests/text/data/qwen", &t));
    CHECK_OK(ql_formatter_new(t, row, &o, &f));
    CHECK_OK(ql_format_row(f, row, &e));
    for (size_t i = 1; i < e.ids.len; i++) answers += e.trained[i] && !e.trained[i - 1];
    CHECK_INT(answers, 100);
    ql_formatter_free(f), ql_tok_close(t), ql_example_free(&e), ql_str_free(&s), json_decref(row);
}

TEST(causes_are_named)
{
    ql_data_options o = {0};
    ql_str s = {0};
    ql_example e = {0};
    CHECK_FAILS(show("qwen", "{\"question\":\"a\",\"answer\":\"b\"}", &o, &s, &e), QL_EINVAL, "'question', 'answer'");
    CHECK_FAILS(show("qwen", "{\"messages\":\"[]\"}", &o, &s, &e), QL_EINVAL, "'messages' must hold a list of messages; in the first row it is text");
    CHECK_FAILS(show("qwen", "{\"text\":{\"0\":\"a\"}}", &o, &s, &e), QL_EINVAL, "orient=\"records\"");
    CHECK_FAILS(show("qwen", "{\"conversations\":[{\"from\":\"human\",\"value\":\"a\"},{\"from\":\"gpt\",\"value\":null}]}", &o, &s, &e), QL_EINVAL,
                "turn 2, from 'gpt', has no text");
    CHECK_FAILS(show("flags", "{\"messages\":[]}", &o, &s, &e), QL_EINVAL, "no chat template");
    CHECK_FAILS(show("qwen", "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"tools\":\"[{\"}", &o, &s, &e), QL_EINVAL, "'tools'");
    CHECK_FAILS(show("qwen", "{\"input_ids\":[1,-2]}", &o, &s, &e), QL_EINVAL, "input_ids[1]");
    CHECK_FAILS(show("qwen", "{\"input_ids\":[1,2.5]}", &o, &s, &e), QL_EINVAL, "input_ids[1]");
    CHECK_FAILS(show("qwen", "{\"input_ids\":[1,2],\"labels\":[1]}", &o, &s, &e), QL_EINVAL, "labels must be a list as long");
    CHECK_FAILS(show("qwen", "{\"input_ids\":[1,2],\"labels\":[1,3]}", &o, &s, &e), QL_EINVAL, "labels[1] is 3");
    CHECK_FAILS(show("qwen", "{\"input_ids\":[1,2],\"attention_mask\":[0,1]}", &o, &s, &e), QL_EINVAL, "padding on the right");
    CHECK_FAILS(show("qwen", "{\"input_ids\":[1,2],\"labels\":[-100,-100]}", &o, &s, &e), QL_EINVAL, "no token to train on");
    o.loss_on = QL_LOSS_RESPONSES;
    CHECK_FAILS(show("qwen", "{\"text\":\"a\"}", &o, &s, &e), QL_EINVAL, "no responses");
    CHECK_FAILS(show("qwen", "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]}", &o, &s, &e), QL_EINVAL,
                "no response");
    CHECK_STR(e.reason, "all labels masked");
    o.max_length = 3;
    CHECK_FAILS(show("qwen", "{\"prompt\":\"a b c d\",\"completion\":\"e\"}", &o, &s, &e), QL_EINVAL, "max_length 3");
    o.chat_template = "{% nonsense %}";
    CHECK_FAILS(show("qwen", "{\"messages\":[]}", &o, &s, &e), QL_ENOSUP, "nonsense");
    ql_str_free(&s), ql_example_free(&e);
}

TEST(tokenised_in_a_thread_and_cached)
{
    ql_table *t = NULL;
    ql_tok *tok = NULL;
    ql_tokenising *k = NULL;
    ql_dataset *d = NULL;
    json_t *report = NULL;
    int64_t done, total;
    CHECK_OK(ql_tok_open("tests/text/data/qwen", &tok));
    const char *path = file("rows.jsonl", "{\"prompt\":\"p\",\"completion\":\"one\"}\nnot json\n{\"prompt\":\"q\"}\n"
                                          "{\"prompt\":\"a b c d e f g\",\"completion\":\"x\"}\n"
                                          "{\"prompt\":\"r\",\"completion\":\"one two three four\"}\n");
    char cache[80];
    snprintf(cache, sizeof cache, "%s/cache", dir);
    ql_data_options o = {.max_length = 5, .cache_dir = cache};
    for (int again = 0; again < 2; again++) {
        CHECK_OK(open_one(path, NULL, &t));
        CHECK_OK(ql_tokenise_start(t, tok, &o, &k));
        CHECK_OK(ql_tokenise_wait(k, &d));
        ql_tokenise_progress(k, &done, &total);
        CHECK_INT(done, 5);
        CHECK_INT(total, 5);
        CHECK_INT(ql_tokenise_cached(k), again);
        CHECK_INT(ql_dataset_size(d), 2);
        const json_t *skipped = json_object_get(ql_dataset_about(d), "skipped");
        CHECK_INT(json_integer_value(json_object_get(skipped, "broken row")), 1);
        CHECK_INT(json_integer_value(json_object_get(skipped, "no text")), 1);
        CHECK_INT(json_integer_value(json_object_get(skipped, "all labels masked after truncation")), 1);
        CHECK_INT(json_integer_value(json_object_get(ql_dataset_about(d), "truncated")), 1);
        ql_tokenise_free(k), ql_table_close(t);
        if (!again) ql_dataset_close(d);
    }
    CHECK_OK(ql_data_lint(d, tok, 1, &report));
    const json_t *s = json_array_get(json_object_get(report, "samples"), 0);
    CHECK_STR(json_string_value(json_object_get(s, "text")), "pone<|im_end|>");
    CHECK_INT(json_integer_value(json_array_get(json_array_get(json_object_get(s, "spans"), 0), 1)), 1);
    CHECK_INT(json_integer_value(json_object_get(json_array_get(json_object_get(report, "histogram"), 0), "count")), 2);
    CHECK(json_array_size(json_object_get(report, "warnings")) == 1);
    ql_dataset_close(d), json_decref(report);
    CHECK_OK(open_one(file("bad.jsonl", "{\"prompt\":\"a b c d e f\",\"completion\":\"x\"}\n"), NULL, &t));
    CHECK_OK(ql_tokenise_start(t, tok, &o, &k));
    d = NULL;
    CHECK_FAILS(ql_tokenise_wait(k, &d), QL_EINVAL, "1 x all labels masked after truncation");
    CHECK(!d);
    ql_tokenise_free(k), ql_table_close(t), ql_tok_close(tok);
}

/* Rows with nothing in them say nothing about the others, and text that is not UTF-8 is warned of. */
TEST(the_first_row_with_something_in_it_counts)
{
    static const struct {
        const char *rows, *kind;
    } cases[] = {{"{\"text\":null}\n{\"text\":\"caf\xe9\"}\n", "text"},
                 {"{\"text\":\"\"}\n{\"text\":\"<human>: a <bot>: b\"}\n", "OIG text"},
                 {"{\"conversations\":[]}\n{\"conversations\":[{\"from\":\"human\",\"value\":\"a\"}]}\n", "ShareGPT"},
                 {"{\"instruction\":null,\"output\":null}\n{\"instruction\":\"a\",\"output\":\"b\"}\n", "Alpaca"}};
    ql_tok *tok = NULL;
    ql_data_options o = {0};
    CHECK_OK(ql_tok_open("tests/text/data/qwen", &tok));
    for (int i = 0; i < 4; i++) {
        ql_table *t = NULL;
        ql_tokenising *k = NULL;
        ql_dataset *d = NULL;
        json_t *report = NULL;
        CHECK_OK(open_one(file("first.jsonl", cases[i].rows), NULL, &t));
        CHECK_OK(ql_tokenise_start(t, tok, &o, &k));
        CHECK_OK(ql_tokenise_wait(k, &d));
        CHECK_OK(ql_data_lint(d, tok, 0, &report));
        CHECK_INT(ql_dataset_size(d), 1);
        CHECK_STR(json_string_value(json_object_get(report, "kind")), cases[i].kind);
        CHECK_INT(json_integer_value(json_object_get(json_object_get(report, "skipped"), "empty")), 1);
        const char *warning = json_string_value(json_array_get(json_object_get(report, "warnings"), 0));
        CHECK((warning && strstr(warning, "1 row not in UTF-8")) == (i == 0));
        ql_dataset_close(d), ql_tokenise_free(k), ql_table_close(t), json_decref(report);
    }
    ql_tok_close(tok);
}

static int cached(const char *text, ql_tok *tok, const ql_data_options *o)
{
    ql_table *t = NULL;
    ql_tokenising *k = NULL;
    ql_dataset *d = NULL;
    int yes = -1;
    if (open_one(file("cached.jsonl", text), NULL, &t) == QL_OK && ql_tokenise_start(t, tok, o, &k) == QL_OK && ql_tokenise_wait(k, &d) == QL_OK)
        yes = ql_tokenise_cached(k);
    ql_dataset_close(d), ql_tokenise_free(k), ql_table_close(t);
    return yes;
}

/* Found again by what is in the file, the tokenizer and the settings; not by the file's name, size or date. */
TEST(the_cache_goes_by_content)
{
    ql_tok *tok = NULL, *other = NULL;
    char cache[80];
    const char *one = "{\"prompt\":\"p\",\"completion\":\"one\"}\n", *two = "{\"prompt\":\"p\",\"completion\":\"two\"}\n";
    CHECK_OK(ql_tok_open("tests/text/data/qwen", &tok));
    CHECK_OK(ql_tok_open("tests/text/data/llama", &other));
    snprintf(cache, sizeof cache, "%s/by-content", dir);
    ql_data_options o = {.max_length = 9, .cache_dir = cache};
    CHECK_INT(cached(one, tok, &o), 0);
    CHECK_INT(cached(two, tok, &o), 0);
    CHECK_INT(cached(one, tok, &o), 1);
    CHECK_INT(cached(two, tok, &o), 1);
    CHECK_INT(cached(one, other, &o), 0);
    o.max_length = 8;
    CHECK_INT(cached(one, tok, &o), 0);
    o.loss_on = QL_LOSS_ALL;
    CHECK_INT(cached(one, tok, &o), 0);
    o.eos_token = "<|endoftext|>";
    CHECK_INT(cached(one, tok, &o), 0);
    o.chat_template = "{{ messages }}";
    CHECK_INT(cached(one, tok, &o), 0);
    CHECK_INT(cached(one, tok, &o), 1);
    ql_tok_close(tok), ql_tok_close(other);
}

/* pad = eos: the real end token keeps its label, padding has none. */
TEST(pad_may_be_eos)
{
    ql_table *t = NULL;
    ql_tok *tok = NULL;
    ql_tokenising *k = NULL;
    ql_dataset *d = NULL;
    ql_batch b = {0};
    const int32_t e[] = {0, 1};
    ql_data_options o = {0};
    CHECK_OK(ql_tok_open("tests/text/data/qwen", &tok));
    CHECK_OK(open_one(file("p.jsonl", "{\"text\":\"a b c\"}\n{\"text\":\"a\"}\n"), NULL, &t));
    CHECK_OK(ql_tokenise_start(t, tok, &o, &k));
    CHECK_OK(ql_tokenise_wait(k, &d));
    int32_t eos = ql_tok_info(tok)->eos;
    CHECK_OK(ql_batch_fill(&b, d, e, 2, 0, eos, 8));
    CHECK_INT(b.labels[8 + 1], eos);
    CHECK_INT(b.target[8], eos);
    CHECK_INT(b.ids[8 + 2], eos);
    CHECK_INT(b.labels[8 + 2], -100);
    CHECK_INT(b.target[8 + 1], -100);
    ql_batch_free(&b), ql_dataset_close(d), ql_tokenise_free(k), ql_table_close(t), ql_tok_close(tok);
}

TEST(long_samples_are_split_when_asked)
{
    ql_table *t = NULL;
    ql_tok *tok = NULL;
    ql_tokenising *k = NULL;
    ql_dataset *d = NULL;
    ql_data_options o = {.max_length = 3, .packing = QL_PACK_BFD_SPLIT};
    CHECK_OK(ql_tok_open("tests/text/data/qwen", &tok));
    CHECK_OK(open_one(file("s.jsonl", "{\"text\":\"1 2 3 4\"}\n"), NULL, &t)); /* 1, space, 2 … 4, end: 8 */
    CHECK_OK(ql_tokenise_start(t, tok, &o, &k));
    CHECK_OK(ql_tokenise_wait(k, &d));
    CHECK_INT(ql_dataset_documents(d), 3);
    CHECK_INT(ql_dataset_tokens(d), 8);
    CHECK_INT(ql_dataset_size(d), 3);
    CHECK_INT(json_integer_value(json_object_get(ql_dataset_about(d), "truncated")), 0);
    ql_dataset_close(d), ql_tokenise_free(k), ql_table_close(t), ql_tok_close(tok);
}

TEST(clean_up)
{
    char cmd[128];
    snprintf(cmd, sizeof cmd, "rm -rf '%s'", dir);
    CHECK(!dir[0] || system(cmd) == 0);
}

TEST_MAIN(T(formats_are_read), T(a_comma_that_is_missing_is_told), T(long_integers_change_nothing_else),
          T(a_json_file_of_one_line_or_of_lines), T(splits_globs_and_folders), T(rows_are_pushed_by_a_front_end),
          T(rows_become_masked_ids), T(rows_become_masked_pieces), T(many_turns_of_plain_text), T(causes_are_named), T(tokenised_in_a_thread_and_cached), T(the_first_row_with_something_in_it_counts), T(the_cache_goes_by_content),
          T(pad_may_be_eos), T(long_samples_are_split_when_asked), T(clean_up))
