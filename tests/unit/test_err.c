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

TEST_MAIN(T(first_error_wins), T(dtypes_have_sizes_and_names))
