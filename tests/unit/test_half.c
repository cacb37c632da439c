#include "kernels/half.h"
#include "tests/test.h"

/* Independent references from the definitions: value = (-1)^s · 2^(e-bias) · 1.m */
static double value16(uint16_t h, int ebits, int mbits)
{
    int e = (h >> mbits) & ((1 << ebits) - 1), m = h & ((1 << mbits) - 1),
        bias = (1 << (ebits - 1)) - 1;
    double s = h & 0x8000 ? -1.0 : 1.0;
    if (e == (1 << ebits) - 1) return m ? (double)NAN : s * INFINITY;
    if (e == 0) return s * ldexp(m, 1 - bias - mbits);
    return s * ldexp(1.0 + ldexp(m, -mbits), e - bias);
}

static bool same(float x, double v)
{
    if (isnan(v)) return isnan(x);
    return (double)x == v && !signbit(x) == !signbit(v);
}

TEST(all_values_widen_exactly)
{
    for (uint32_t h = 0; h < 65536; h++) {
        CHECK_MSG(same(ql_f16_to_f32((uint16_t)h), value16((uint16_t)h, 5, 10)), "f16 %04x", h);
        CHECK_MSG(same(ql_bf16_to_f32((uint16_t)h), value16((uint16_t)h, 8, 7)), "bf16 %04x", h);
    }
}

TEST(all_values_round_trip)
{
    for (uint32_t i = 0; i < 65536; i++) {
        uint16_t h = (uint16_t)i;
        bool nan16 = (h & 0x7fff) > 0x7c00, nanb = (h & 0x7fff) > 0x7f80;
        uint16_t a = ql_f32_to_f16(ql_f16_to_f32(h)), b = ql_f32_to_bf16(ql_bf16_to_f32(h));
        CHECK_MSG(nan16 ? (a & 0x7fff) > 0x7c00 : a == h, "f16 %04x → %04x", h, a);
        CHECK_MSG(nanb ? (b & 0x7fff) > 0x7f80 : b == h, "bf16 %04x → %04x", h, b);
    }
}

/* Between any two neighbours the midpoint goes to the even one, and its fp32 neighbours to theirs.
 */
static int midpoints(uint16_t (*narrow)(float), float (*widen)(uint16_t), uint16_t max)
{
    int bad = 0;
    for (uint16_t h = 0; h < max; h++) {
        double mid = ((double)widen(h) + (double)widen((uint16_t)(h + 1))) / 2;
        uint16_t even = h & 1 ? (uint16_t)(h + 1) : h;
        float m = (float)mid;
        bad += narrow(m) != even || narrow(-m) != (even | 0x8000);
        bad += narrow(nextafterf(m, -INFINITY)) != h;
        bad += narrow(nextafterf(m, INFINITY)) != h + 1;
    }
    return bad;
}

TEST(ties_go_to_even)
{
    CHECK_INT(midpoints(ql_f32_to_f16, ql_f16_to_f32, 0x7bff), 0);
    CHECK_INT(midpoints(ql_f32_to_bf16, ql_bf16_to_f32, 0x7f7f), 0);
}

TEST(edges)
{
    CHECK_INT(ql_f32_to_f16(65519.996f), 0x7bff);
    CHECK_INT(ql_f32_to_f16(65520.0f), 0x7c00);
    CHECK_INT(ql_f32_to_f16(1e30f), 0x7c00);
    CHECK_INT(ql_f32_to_f16(-INFINITY), 0xfc00);
    CHECK_INT(ql_f32_to_f16(0x1p-25f), 0x0000); /* a tie with zero */
    CHECK_INT(ql_f32_to_f16(nextafterf(0x1p-25f, 1.0f)), 0x0001);
    CHECK_INT(ql_f32_to_f16(-1e-30f), 0x8000);
    CHECK_INT(ql_f32_to_bf16(3.4e38f), 0x7f80);
    CHECK_INT(ql_f32_to_bf16(-INFINITY), 0xff80);
    CHECK_INT(ql_f32_to_bf16(ql_f32_from_bits(0x7f800001u)) & 0x7fff, 0x7fc0);
    CHECK((ql_f32_to_f16(ql_f32_from_bits(0x7f800001u)) & 0x7fff) > 0x7c00);
}

TEST(get_and_put_need_no_alignment)
{
    char buf[32];
    for (int d = QL_F32; d <= QL_BF16; d++) {
        ql_float_put(buf + 1, (ql_dtype)d, 2, -1.5f);
        CHECK(ql_float_get(buf + 1, (ql_dtype)d, 2) == -1.5f);
    }
    CHECK(ql_float_round(1.0009765f, QL_BF16) == 1.0f);
    CHECK(ql_float_round(1.1f, QL_F32) == 1.1f);
}

TEST_MAIN(T(all_values_widen_exactly), T(all_values_round_trip), T(ties_go_to_even), T(edges),
          T(get_and_put_need_no_alignment))
