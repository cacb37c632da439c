#include "tests/test.h"

TEST(first_error_wins)
{
    CHECK(ql_fail(QL_EIO, "disk %d", 7) == QL_EIO);
    CHECK(ql_fail(QL_EINVAL, "later") == QL_EINVAL);
    CHECK_STR(ql_error(), "disk 7");
    ql_error_prefix("save: ");
    CHECK_STR(ql_error(), "save: disk 7");
    ql_error_clear();
    CHECK_STR(ql_error(), "");
    CHECK(ql_error_code() == QL_OK);
}

TEST(dtypes_have_sizes_and_names)
{
    for (int t = 0; t < QL_DTYPES; t++) {
        CHECK(ql_dtype_size((ql_dtype)t) > 0);
        CHECK(strcmp(ql_dtype_name((ql_dtype)t), "?") != 0);
    }
}

TEST(the_text_is_utf8)
{
    ql_fail(QL_EINVAL, "no file '%.4s'", "abc\u00e9"); /* cut inside the last character */
    CHECK_STR(ql_error(), "no file 'abc?'");
    ql_error_clear();
    ql_fail(QL_EINVAL, "%s", "\xe9t\xe9 \xc0\xaf \xed\xa0\x80 \xf4\x90\x80\x80 \u00e9\u20ac\U0001f600");
    CHECK_STR(ql_error(), "?t? ?? ??? ???? \u00e9\u20ac\U0001f600");
    ql_error_prefix("%.1s: ", "\u00e9");
    CHECK(strncmp(ql_error(), "?: ?t?", 6) == 0);
    ql_error_clear();
    char many[4096] = "";
    for (size_t i = 0; i + 4 < sizeof many; i += 3) memcpy(many + i, "\u20ac", 4);
    ql_fail(QL_EINVAL, "a%s", many); /* more than there is room for: 1 + 682 · 3 bytes, and none left over */
    CHECK_INT(strlen(ql_error()), 2047);
    CHECK(memcmp(ql_error() + 2044, "\u20ac", 3) == 0);
    ql_error_prefix("b"); /* now the last one is cut */
    CHECK(memcmp(ql_error() + 2042, "\u20ac??", 5) == 0 && !ql_error()[2047]);
    ql_error_clear();
}

TEST_MAIN(T(first_error_wins), T(dtypes_have_sizes_and_names), T(the_text_is_utf8))
