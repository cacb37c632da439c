#include "core/sampler.h"
#include "tests/test.h"

/* From torch 2: g = torch.Generator(); g.manual_seed(seed); torch.randperm(n, generator=g). */
TEST(order_equals_torch_randperm)
{
    static const int32_t a[] = {2, 6, 1, 8, 4, 5, 0, 9, 3, 7};
    static const int32_t b[] = {10, 5, 3, 14, 2, 11, 8, 7, 12, 1, 15, 9, 0, 16, 13, 4, 6};
    static const int32_t c[] = {7, 0, 3, 4, 1, 5, 2, 6};
    int32_t o[1000];
    int64_t sum = 0;
    CHECK_OK(ql_sampler_order(42, 0, 10, o));
    for (int i = 0; i < 10; i++) CHECK_INT(o[i], a[i]);
    CHECK_OK(ql_sampler_order(3406, 1, 17, o));
    for (int i = 0; i < 17; i++) CHECK_INT(o[i], b[i]);
    CHECK_OK(ql_sampler_order(((uint64_t)1 << 40) + 7, 0, 8, o));
    for (int i = 0; i < 8; i++) CHECK_INT(o[i], c[i]);
    CHECK_OK(ql_sampler_order(3407, 0, 1000, o));
    for (int i = 0; i < 1000; i++) sum += (i + 1) * (int64_t)o[i];
    CHECK_INT(sum, 250605672);
    CHECK_INT(o[16], 688);
}

TEST(small_and_impossible_sizes)
{
    int32_t o[1] = {7};
    CHECK_OK(ql_sampler_order(1, 0, 0, o));
    CHECK_INT(o[0], 7);
    CHECK_OK(ql_sampler_order(1, 0, 1, o));
    CHECK_INT(o[0], 0);
    CHECK_FAILS(ql_sampler_order(1, 0, -1, o), QL_ENOSUP, "-1");
    CHECK_FAILS(ql_sampler_order(1, 0, (int64_t)1 << 31, o), QL_ENOSUP, "fewer than");
}

TEST_MAIN(T(order_equals_torch_randperm), T(small_and_impossible_sizes))
