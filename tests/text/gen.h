/* Pseudo-random test strings, the same ones as gen.py makes: string i depends on i alone. They mix
 * scripts, digits, white space, contractions, emoji, control characters, special tokens, combining
 * marks, long runs and invalid UTF-8. */
#ifndef QL_TEST_GEN_H
#define QL_TEST_GEN_H

#include "core/unicode.h"

typedef struct {
    uint64_t s;
} gen;

static inline uint32_t gen_next(gen *g, uint32_t n) /* 0 … n-1; splitmix64 */
{
    uint64_t z = (g->s += 0x9e3779b97f4a7c15u);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    return (uint32_t)(z >> 32) % n;
}

static const uint32_t gen_scripts[][2] = {
    {0x61, 0x7a},     {0xc0, 0x24f},    {0x250, 0x2ff},   {0x370, 0x3ff},   {0x400, 0x52f},
    {0x531, 0x58a},   {0x591, 0x5f4},   {0x600, 0x6ff},   {0x700, 0x74f},   {0x900, 0x97f},
    {0x980, 0x9fe},   {0xa01, 0xa76},   {0xb82, 0xbfa},   {0xc00, 0xc7f},   {0xd00, 0xd7f},
    {0xe01, 0xe5b},   {0xe80, 0xedf},   {0xf00, 0xfda},   {0x1000, 0x109f}, {0x10a0, 0x10ff},
    {0x1100, 0x11ff}, {0x1200, 0x137c}, {0x13a0, 0x13fd}, {0x1780, 0x17f9}, {0x1800, 0x18aa},
    {0x1e00, 0x1fff}, {0x2000, 0x206f}, {0x2070, 0x218b}, {0x2190, 0x23ff}, {0x2460, 0x24ff},
    {0x2c00, 0x2dff}, {0x3000, 0x30ff}, {0x3100, 0x33ff}, {0x4e00, 0x9fff}, {0xa000, 0xa4c6},
    {0xac00, 0xd7a3}, {0xd7b0, 0xd7fb}, {0xf900, 0xfaff}, {0xfb00, 0xfdff}, {0xfe00, 0xffef},
    {0x10000, 0x100fa}, {0x10300, 0x103ff}, {0x11000, 0x114ff}, {0x1d100, 0x1d7ff},
    {0x1e900, 0x1e95f}, {0x1f000, 0x1faff}, {0x20000, 0x2ffff}, {0xe000, 0xe0ff}};
static const uint32_t gen_marks[][2] = {{0x300, 0x36f}, {0x591, 0x5bd}, {0x64b, 0x65f}, {0x93c, 0x94d},
                                        {0x9bc, 0x9d7}, {0x1dc0, 0x1dff}, {0x3099, 0x309a},
                                        {0x1161, 0x1175}, {0x11a8, 0x11c2}, {0x1d165, 0x1d172}};
static const uint32_t gen_spaces[] = {0x20, 0x20, 0x20, 0x20, 0xa, 0xa, 0xd, 9, 0xb, 0xc, 0x85, 0xa0,
                                      0x1680, 0x2003, 0x2028, 0x202f, 0x205f, 0x3000, 0x200b, 0x1c};
static const char *const gen_suffixes[] = {"s", "S", "t", "T", "re", "rE", "ve", "VE", "m", "ll", "LL",
                                           "d", "D", "\xc5\xbf", "x", "l", "r", "", "\xc3\x9f", "st"};
static const char *const gen_specials[] = {
    "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>",
    "<|endoftext|>", "<|start_header_id|>", "<|im_", "<|", "|>", "<tool>", "<tool>x", "[LEFT]",
    "[RIGHT]", "word", "Word", "caf\xc3\xa9", "cafe\xcc\x81", "\xe2\x84\xab"};
static const char *const gen_invalid[] = {"\x80", "\xff", "\xc3", "\xe2\x82", "\xf0\x9f\x98",
                                          "\xed\xa0\x80", "\xc0\xaf", "\xf4\x90\x80\x80", "\xe0\x80\x80",
                                          "\xf0\x80\x80\x41", "\xe2\x28\xa1"};
/* Between two strings, for tokenizers over pieces. */
static const char *const gen_more[] = {"", "\xe2\x96\x81", " \xe2\x96\x81 ", "<s>", "</s>", "[INST]", "[/INST] ", "<unk>", "<0x41>",
                                       "<0xC3><0xA9>", "  <s>  ", "<s></s>", "'s a", " caf\xc3\xa9 a", "\n", "\n\n  \n", "</"};
#define GEN_N(a) ((uint32_t)(sizeof(a) / sizeof *(a)))

static inline void gen_put(ql_str *out, uint32_t c)
{
    char u[4];
    (void)ql_str_add(out, u, (size_t)ql_utf8_put(c, u));
}

/* Word k of a script: always the same letters, so that there is something to merge. */
static inline void gen_word(ql_str *out, uint32_t script, uint32_t k)
{
    gen w = {(uint64_t)script * 1000003 + k};
    uint32_t n = 1 + gen_next(&w, 8), lo = gen_scripts[script][0], hi = gen_scripts[script][1];
    while (n--) gen_put(out, lo + gen_next(&w, hi - lo + 1));
}

static inline uint32_t gen_range(gen *g, const uint32_t (*r)[2], uint32_t n)
{
    uint32_t i = gen_next(g, n);
    return r[i][0] + gen_next(g, r[i][1] - r[i][0] + 1);
}

static inline void gen_piece(gen *g, ql_str *out)
{
    static const char punct[] = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~";
    uint32_t n, c;
    switch (gen_next(g, 20)) {
    case 0: case 1: case 2: gen_put(out, ' '); gen_word(out, 0, gen_next(g, 300)); break;
    case 3: gen_put(out, 'A' + gen_next(g, 26)); gen_word(out, 0, gen_next(g, 300)); break;
    case 4: case 5: n = gen_next(g, GEN_N(gen_scripts)); gen_word(out, n, gen_next(g, 40)); break;
    case 6: gen_put(out, gen_range(g, gen_scripts, GEN_N(gen_scripts))); break;
    case 7: c = gen_next(g, 0x10f800); gen_put(out, c < 0xd800 ? c : c + 0x800); break;
    case 8: for (n = 1 + gen_next(g, 8); n; n--) gen_put(out, '0' + gen_next(g, 10)); break;
    case 9: case 10:
        for (n = 1 + gen_next(g, 5); n; n--) gen_put(out, gen_spaces[gen_next(g, GEN_N(gen_spaces))]);
        break;
    case 11: gen_put(out, '\''); (void)ql_str_puts(out, gen_suffixes[gen_next(g, GEN_N(gen_suffixes))]);
        break;
    case 12:
        gen_put(out, 0x1f300 + gen_next(g, 0x800));
        n = gen_next(g, 4);
        if (n == 1) gen_put(out, 0xfe0f);
        if (n == 2) gen_put(out, 0x200d), gen_put(out, 0x1f300 + gen_next(g, 0x800));
        if (n == 3) gen_put(out, 0x1f3fb + gen_next(g, 5));
        break;
    case 13: c = gen_next(g, 65); gen_put(out, c < 32 ? c : c + 95); break;
    case 14: case 15: (void)ql_str_puts(out, gen_specials[gen_next(g, GEN_N(gen_specials))]); break;
    case 16:
        gen_put(out, gen_next(g, 3) ? 'a' + gen_next(g, 26) : 0x1100 + gen_next(g, 19));
        for (n = gen_next(g, 5); n; n--) gen_put(out, gen_range(g, gen_marks, GEN_N(gen_marks)));
        break;
    case 17: for (n = 1 + gen_next(g, 4); n; n--) gen_put(out, (unsigned char)punct[gen_next(g, 32)]);
        break;
    case 18: (void)ql_str_puts(out, gen_invalid[gen_next(g, GEN_N(gen_invalid))]); break;
    default:
        if (gen_next(g, 8)) break;
        c = (uint32_t)(unsigned char)"a =\n-1e\t"[gen_next(g, 8)];
        for (n = 1 + gen_next(g, 400); n; n--) gen_put(out, c);
    }
}

static inline void gen_string(uint64_t i, ql_str *out)
{
    gen g = {i * 0x2545f4914f6cdd1du + 1};
    ql_str_clear(out);
    (void)ql_str_reserve(out, 1);
    for (uint32_t n = 1 + gen_next(&g, 12); n; n--) gen_piece(&g, out);
}

static inline uint64_t gen_hash(uint64_t h, const void *data, size_t n) /* FNV-1a */
{
    const unsigned char *p = data;
    for (size_t i = 0; i < n; i++) h = (h ^ p[i]) * 0x100000001b3u;
    return h;
}
#define GEN_HASH_INIT 0xcbf29ce484222325u

#endif
