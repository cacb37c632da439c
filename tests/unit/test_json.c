#include "core/json.h"
#include "tests/tmp.h"

#include <errno.h>
#include <float.h>
#include <sys/stat.h>

static json_t *obj(const char *text)
{
    json_t *o = NULL;
    return ql_json_parse(text, strlen(text), "x.json", &o) == QL_OK ? o : NULL;
}

TEST(getters)
{
    json_t *o = obj(
        "{\"a\": 3, \"b\": -3, \"c\": 1.5, \"d\": \"s\", \"e\": true, \"f\": null, \"g\": 2.0}");
    int64_t i = 7;
    double d = 0;
    bool b = false;
    const char *s = NULL;
    CHECK_OK(ql_json_int(o, "x.json", "a", 1, 9, &i));
    CHECK_INT(i, 3);
    CHECK_OK(ql_json_int(o, "x.json", "g", 1, 9, &i));
    CHECK_INT(i, 2);
    CHECK_FAILS(ql_json_int(o, "x.json", "b", 1, 9, &i), QL_EINVAL,
                "x.json: 'b' must be an integer from 1 to 9, found -3");
    CHECK_FAILS(ql_json_int(o, "x.json", "c", 1, 9, &i), QL_EINVAL, "found 1.5");
    CHECK_FAILS(ql_json_int(o, "x.json", "z", 1, 9, &i), QL_EINVAL, "found nothing");
    CHECK_FAILS(ql_json_int(o, "x.json", "e", 0, 9, &i), QL_EINVAL, "found true");
    CHECK_OK(ql_json_num(o, "x.json", "c", 0, 2, &d));
    CHECK_CLOSE(d, 1.5, 0);
    CHECK_FAILS(ql_json_num(o, "x.json", "d", 0, 2, &d), QL_EINVAL, "found \"s\"");
    CHECK_OK(ql_json_bool(o, "x.json", "e", &b));
    CHECK(b);
    CHECK_FAILS(ql_json_bool(o, "x.json", "a", &b), QL_EINVAL, "must be true or false, found 3");
    CHECK_OK(ql_json_str(o, "x.json", "d", &s));
    CHECK_STR(s, "s");
    i = 7;
    CHECK_OK(ql_json_opt_int(o, "x.json", "f", 0, 1, &i));
    CHECK_OK(ql_json_opt_int(o, "x.json", "nope", 0, 1, &i));
    CHECK_INT(i, 7);
    CHECK_FAILS(ql_json_opt_int(o, "x.json", "d", 0, 1, &i), QL_EINVAL, "'d' must be an integer");
    json_decref(o);
}

TEST(bad_text)
{
    json_t *o = NULL;
    char deep[2048];
    CHECK_FAILS(ql_json_parse("[1]", 3, "x", &o), QL_EINVAL, "must be a JSON object");
    CHECK_FAILS(ql_json_parse("{\"a\":1,\"a\":2}", 13, "x", &o), QL_EINVAL, "bad JSON at line 1");
    CHECK_FAILS(ql_json_parse("{\"a\":NaN}", 9, "x", &o), QL_EINVAL, "bad JSON");
    CHECK_FAILS(ql_json_parse("{\"a\\u0000b\":1}", 14, "x", &o), QL_EINVAL, "bad JSON");
    CHECK_FAILS(ql_json_parse("{\"a\":\"\xff\"}", 9, "x", &o), QL_EINVAL, "bad JSON");
    CHECK_FAILS(ql_json_parse("", 0, "x", &o), QL_EINVAL, "bad JSON");
    CHECK_FAILS(ql_json_parse("{} x", 4, "x", &o), QL_EINVAL, "bad JSON");
    CHECK_FAILS(ql_json_parse("{\"a\":99999999999999999999}", 26, "x", &o), QL_EINVAL, "bad JSON");
    memset(deep, '[', sizeof deep);
    CHECK_FAILS(ql_json_parse(deep, sizeof deep, "x", &o), QL_EINVAL, "deeper than 100");
    CHECK(o == NULL);
}

TEST(files)
{
    const char *p = tmp_path("a.json"), *missing = tmp_path("none.json");
    json_t *o = obj("{\"b\": 1, \"a\": [0.1, null]}"), *back = NULL;
    char *text = NULL;
    size_t n = 0;
    CHECK_OK(ql_json_save(p, o));
    CHECK_OK(ql_file_read(p, 100, &text, &n));
    CHECK(strncmp(text, "{\n  \"b\": 1,\n  \"a\": [\n    0.1", 27) == 0 && text[n - 1] == '\n');
    free(text);
    CHECK_OK(ql_json_load(p, 1000, &back));
    CHECK(json_equal(o, back));
    json_decref(back);
    CHECK_FAILS(ql_json_load(p, 10, &back), QL_EINVAL, "at most 10 are accepted");
    CHECK_FAILS(ql_json_load(missing, 10, &back), QL_EIO, "No such file");
    CHECK_FAILS(ql_json_load(tmp_dir("dir"), 10, &back), QL_EINVAL, "not a regular file");
    CHECK_FAILS(ql_json_save(tmp_path("no/such/x.json"), o), QL_EIO, "cannot create");
    json_decref(o);
}

TEST(folders)
{
    CHECK_OK(ql_path_mkdirs(tmp_path("a/b//c/")));
    CHECK(ql_path_is_dir(tmp_path("a/b/c")) && !ql_path_is_file(tmp_path("a/b")));
    CHECK_OK(ql_path_mkdirs(tmp_path("a/b/c")));
    tmp_write(tmp_path("a/file"), "x", 1);
    CHECK_FAILS(ql_path_mkdirs(tmp_path("a/file/d")), QL_EIO, "cannot make the folder");
    CHECK_FAILS(ql_path_mkdirs(""), QL_EINVAL, "empty name");
    int err = mkdir("/sys/qlora", 0777) != 0 ? errno : 0; /* the reason is mkdir's own: not permitted, or read-only */
    if (err) CHECK_FAILS(ql_path_mkdirs("/sys/qlora"), QL_EIO, strerror(err));
}

TEST(show_is_cut_between_characters)
{
    json_t *v = json_string("äääääääääääääääääääääääääääääääääääääääääääääääääääääääääää");
    json_t *cut = json_loads(ql_json_show(v), JSON_DECODE_ANY, NULL);
    const char *s = ql_json_show(v);
    json_t *valid = json_string(s); /* NULL where s is not UTF-8 */
    CHECK(cut == NULL && valid != NULL && strlen(s) < 64 && strcmp(s + strlen(s) - 3, "...") == 0);
    CHECK_STR(ql_json_show(NULL), "nothing");
    json_decref(v);
    json_decref(valid);
}

TEST_MAIN(T(getters), T(bad_text), T(files), T(folders), T(show_is_cut_between_characters))
