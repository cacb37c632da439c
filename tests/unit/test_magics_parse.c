#include "magics/buf.h"
#include "magics/parse.h"
#include "tests/test.h"

/* Words joined by | so that a case reads in one line. */
static const char *words(const char *line)
{
    static char all[1024];
    ql_line l;
    all[0] = 0;
    if (ql_line_parse(line, &l) != QL_OK) {
        snprintf(all, sizeof all, "error: %s", ql_error());
        ql_error_clear();
        return all;
    }
    for (int i = 0; i < l.n; i++) {
        if (i) strcat(all, "|");
        strcat(all, l.words[i].text);
    }
    if (l.silent) strcat(all, " silent");
    ql_line_free(&l);
    return all;
}

TEST(line_words)
{
    CHECK_STR(words(""), "");
    CHECK_STR(words("  load   tiny "), "load|tiny");
    CHECK_STR(words("load \"my model\" --dtype nf4 --seed=7"),
              "load|my model|--dtype|nf4|--seed=7");
    CHECK_STR(words("generate 'a \\n b' \"a\\nb \\\"c\\\"\""), "generate|a \\n b|a\nb \"c\"");
    CHECK_STR(words("generate don't"), "generate|don't");
    CHECK_STR(words("config --name=\"a b\"c"), "config|--name=a bc");
    CHECK_STR(words("config --target_modules [\"q_proj\", \"v_proj\"]"),
              "config|--target_modules|[\"q_proj\", \"v_proj\"]");
    CHECK_STR(words("config --fsdp_config={\"a\": [1, \"}\"]} --x"),
              "config|--fsdp_config={\"a\": [1, \"}\"]}|--x");
    CHECK_STR(words("load \"\""), "load|");
}

/* As in a shell: at the beginning of a word or of an option's value, and not in quotes. */
TEST(the_home_folder)
{
    char *was = getenv("HOME") ? strdup(getenv("HOME")) : NULL;
    setenv("HOME", "/home/me", 1);
    CHECK_STR(words("load ~/m"), "load|/home/me/m");
    CHECK_STR(words("save ~ --run=~/r ;"), "save|~|--run=/home/me/r silent");
    CHECK_STR(words("load '~/m' a~/b ~you/c \"~/d\" ~~"), "load|~/m|a~/b|~you/c|~/d|~~");
    unsetenv("HOME");
    CHECK_STR(words("load ~/m"), "load|~/m");
    if (was) setenv("HOME", was, 1);
    free(was);
}

TEST(line_comment_and_semicolon)
{
    CHECK_STR(words("train --max_steps 20 # only a try"), "train|--max_steps|20");
    CHECK_STR(words("# nothing"), "");
    CHECK_STR(words("load a#b"), "load|a#b");
    CHECK_STR(words("generate \"# no comment\""), "generate|# no comment");
    CHECK_STR(words("train;"), "train silent");
    CHECK_STR(words("train --max_steps 20 ;"), "train|--max_steps|20 silent");
    CHECK_STR(words("train ;  # why"), "train silent");
    CHECK_STR(words("generate \"a;\""), "generate|a;");
}

TEST(line_errors)
{
    CHECK_STR(words("load \"abc"), "error: column 6: this \" has no closing \"");
    CHECK_STR(words("x [1, 2"), "error: column 3: this [ is never closed");
    CHECK_STR(words("config --lr {lr}"),
              "error: column 13: {lr} was not filled in: there is no variable lr in this notebook");
    CHECK_STR(words("save runs/{names[0]}/x"),
              "error: column 11: {names[0]} was not filled in: there is no variable "
              "names[0] in this notebook");
}

TEST(line_positions)
{
    ql_line l;
    CHECK_OK(ql_line_parse("a  --b=c '--d'", &l));
    CHECK_INT(l.words[1].column, 4);
    CHECK_INT(l.words[1].equals, 3);
    CHECK_INT(l.words[1].quoted, 0);
    CHECK_INT(l.words[2].quoted, 1);
    CHECK_INT(l.words[2].equals, -1);
    ql_line_free(&l);
}

/* A body as one JSON value: top-level entries by key. */
static const char *body(const char *text)
{
    static char all[2048];
    ql_body b;
    if (ql_body_parse(text, &b) != QL_OK) {
        snprintf(all, sizeof all, "error: %s", ql_error());
        ql_error_clear();
        return all;
    }
    json_t *root = json_object();
    for (int i = 0; i < b.n; i++) {
        json_t *v;
        if (b.entries[i].parent >= 0) continue;
        if (ql_body_value(&b, i, &v) == QL_OK) {
            json_object_set_new(root, b.entries[i].key, v);
        } else {
            json_object_set_new(root, b.entries[i].key, json_string(ql_error()));
            ql_error_clear();
        }
    }
    char *s = json_dumps(root, JSON_COMPACT);
    snprintf(all, sizeof all, "%s", s);
    free(s);
    json_decref(root);
    ql_body_free(&b);
    return all;
}

TEST(body_lines)
{
    CHECK_STR(body("r: 64\nlora_alpha: 128   # twice\n\n# a comment\nfp16: true\nseed = 3407\n"),
              "{\"r\":64,\"lora_alpha\":128,\"fp16\":true,\"seed\":3407}");
    CHECK_STR(body("a: \"1 # x\"\nb: 'c'\nd: C:/x#y\n"),
              "{\"a\":\"1 # x\",\"b\":\"c\",\"d\":\"C:/x#y\"}");
    CHECK_STR(body("lora:\n  r: 8\n  target_modules:\n    - q_proj\n    - v_proj\nseed: 1\n"),
              "{\"lora\":{\"r\":8,\"target_modules\":[\"q_proj\",\"v_proj\"]},\"seed\":1}");
    CHECK_STR(body("fsdp_config: {\"a\": [1]}\n"), "{\"fsdp_config\":{\"a\":[1]}}");
    CHECK_STR(body("url: https://x.y/z\n"), "{\"url\":\"https://x.y/z\"}");
    CHECK_STR(body(""), "{}");
}

TEST(body_json)
{
    ql_body b;
    CHECK_STR(body(" {\"r\": 8,\n \"x\": {\"y\": null}}"), "{\"r\":8,\"x\":{\"y\":null}}");
    CHECK_OK(ql_body_parse("{\"r\": 8,\n\n \"x\": 1}", &b));
    CHECK_INT(b.entries[1].line, 3);
    ql_body_free(&b);
    CHECK_STR(body("{\"r\": 8,\n 5}"), "error: line 2, column 2: string or '}' expected near '5'");
}

TEST(body_errors)
{
    CHECK_STR(body("r 8"), "error: line 1: expected `key: value`, found 'r 8'");
    CHECK_STR(body("a: 1\n: 2"), "error: line 2: there is no name in front of the ':'");
    CHECK_STR(body("a: 1\n  b: 2"), "error: line 2: its indentation fits no line above");
    CHECK_STR(body("a:\n    b: 2\n  c: 3"), "error: line 3: its indentation fits no line above");
    CHECK_STR(body("- a"), "error: line 1: a list item that stands under no key");
    CHECK_STR(body("a: \"x"), "error: line 1: column 1: this \" has no closing \"");
    CHECK_STR(body("a: \"x\" y"), "error: line 1: 'y' stands behind the closing quote");
    CHECK_STR(body("a:\n  - b\n  c: 1"), "{\"a\":\"line 3: 'a' mixes list items and keys\"}");
    CHECK(strstr(body("lr: {lr}"), "error: line 1: {lr} is not filled in inside a %%qlora cell"));
}

TEST(formats)
{
    CHECK_STR(ql_fmt_bytes(96).s, "96 B");
    CHECK_STR(ql_fmt_bytes(5.63 * 1073741824.0).s, "5.63 GiB");
    CHECK_STR(ql_fmt_bytes(812.0 * 1048576).s, "812 MiB");
    CHECK_STR(ql_fmt_count(12345).s, "12,345");
    CHECK_STR(ql_fmt_count(41943040).s, "41.9 M");
    CHECK_STR(ql_fmt_count(8.03e9).s, "8.03 B");
    CHECK_STR(ql_fmt_time(41).s, "00:41");
    CHECK_STR(ql_fmt_time(11264).s, "3:07:44");
    CHECK_STR(ql_fmt_num(0.0002, 3).s, "2e-4");
    CHECK_STR(ql_fmt_num(0.000195, 3).s, "1.95e-4");
    CHECK_STR(ql_fmt_num(-1e-10, 1).s, "-1e-10");
    CHECK_STR(ql_fmt_num(0, 3).s, "0");
    CHECK_STR(ql_fmt_num(0.5, 3).s, "0.5");
    CHECK_STR(ql_fmt_num(0.00002, 3).s, "2e-5");
    CHECK_STR(ql_fmt_num(1.5e7, 3).s, "1.5e7");
    CHECK_STR(ql_fmt_num((double)NAN, 3).s, "-");
}

TEST(repairs_utf8)
{
    json_t *v = ql_text_json("a\xc3\xa9\xff\xe2\x82", 6);
    CHECK_STR(json_string_value(v), "a\xc3\xa9\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");
    json_decref(v);
    CHECK_INT(ql_text_width("a\xc3\xa9"), 2);
    CHECK_INT(ql_text_fit("a\xc3\xa9x", 2), 3);
}

TEST(distance)
{
    CHECK_INT(ql_text_distance("trian", "train", 3), 1);
    CHECK_INT(ql_text_distance("lora_rnak", "lora_rank", 3), 1);
    CHECK_INT(ql_text_distance("load", "save", 3), 4);
    CHECK_INT(ql_text_distance("a", "abcdef", 2), 3);
}

TEST_MAIN(T(line_words), T(the_home_folder), T(line_comment_and_semicolon), T(line_errors), T(line_positions),
          T(body_lines), T(body_json), T(body_errors), T(formats), T(repairs_utf8), T(distance))
