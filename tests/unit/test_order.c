#include "core/sampler.h"
#include "tests/tmp.h"

TEST(an_order_from_a_file)
{
    const char *path = tmp_path("order.txt");
    int32_t o[4];
    tmp_write(path, "3\n1\r\n 0\n2\n2\n0", 14);
    CHECK_OK(ql_sampler_file(path, 0, 4, o));
    CHECK(o[0] == 3 && o[1] == 1 && o[2] == 0 && o[3] == 2);
    CHECK_OK(ql_sampler_file(path, 1, 4, o)); /* lines 5, 6, and again from the first */
    CHECK(o[0] == 2 && o[1] == 0 && o[2] == 3 && o[3] == 1);
    CHECK_OK(ql_sampler_file(path, 3000000001, 4, o));
    CHECK(o[0] == 2 && o[1] == 0 && o[2] == 3 && o[3] == 1);
    CHECK_FAILS(ql_sampler_file(path, 0, 3, o), QL_EINVAL, "line 1: '3' is no sample's number from 0 to 2");
    tmp_write(path, "0\n\n1\n", 5);
    CHECK_FAILS(ql_sampler_file(path, 0, 3, o), QL_EINVAL, "line 2");
    tmp_write(path, "0\n-1\n99999999999999999999\n", 26);
    CHECK_FAILS(ql_sampler_file(path, 0, 3, o), QL_EINVAL, "line 2");
    tmp_write(path, "0\0\n", 3);
    CHECK_FAILS(ql_sampler_file(path, 0, 3, o), QL_EINVAL, "order_file");
    tmp_write(path, "", 0);
    CHECK_FAILS(ql_sampler_file(path, 0, 3, o), QL_EINVAL, "is empty");
    CHECK_FAILS(ql_sampler_file("/nowhere", 0, 3, o), QL_EIO, "/nowhere");
}

TEST_MAIN(T(an_order_from_a_file))
