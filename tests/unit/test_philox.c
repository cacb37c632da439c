/* Philox4x32-10 against the known answers of its authors (Random123, kat_vectors), and dropout's
 * counters. */
#include "tests/test.h"

#include "kernels/philox.h"

TEST(known_answers)
{
    static const struct {
        uint32_t counter[4], key[2], out[4];
    } kat[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (int i = 0; i < 3; i++) {
        ql_philox4 c;
        memcpy(c.x, kat[i].counter, sizeof c.x);
        c = ql_philox(c, kat[i].key[0], kat[i].key[1]);
        CHECK(memcmp(c.x, kat[i].out, sizeof c.x) == 0);
    }
}

TEST(dropout_counters)
{
    ql_philox4 c = {{7, 5, 3, 2 * 16 + 1}};
    ql_philox4 a = ql_philox(c, 0x89abcdef, 0x01234567 ^ 9);
    ql_philox4 b = ql_philox_drop(0x0123456789abcdef, 9, 2, 1, ((int64_t)3 << 32) + 5, 7);
    CHECK(memcmp(&a, &b, sizeof a) == 0);
    CHECK_INT(ql_philox_bar(0.0f), 0);
    CHECK_INT(ql_philox_bar(0.5f), 0x80000000u);
}

TEST_MAIN(T(known_answers), T(dropout_counters))
