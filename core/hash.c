#include "core/hash.h"

#include <stdio.h>
#include <string.h>

static uint32_t rotl(uint32_t x, int n)
{
    return x << n | x >> (32 - n);
}
static uint32_t rotr(uint32_t x, int n)
{
    return x >> n | x << (32 - n);
}

/* FIPS 180-4: the first 32 bits of the cube roots' fractions of the first 64 primes. */
static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static void block256(uint32_t h[8], const uint32_t in[16])
{
    uint32_t w[64], v[8];
    memcpy(w, in, 16 * sizeof *w);
    for (int i = 16; i < 64; i++)
        w[i] = w[i - 16] + w[i - 7] + (rotr(w[i - 15], 7) ^ rotr(w[i - 15], 18) ^ w[i - 15] >> 3) +
               (rotr(w[i - 2], 17) ^ rotr(w[i - 2], 19) ^ w[i - 2] >> 10);
    memcpy(v, h, sizeof v);
    for (int i = 0; i < 64; i++) {
        uint32_t a = v[0], e = v[4];
        uint32_t t = v[7] + (rotr(e, 6) ^ rotr(e, 11) ^ rotr(e, 25)) + ((e & v[5]) ^ (~e & v[6])) + K[i] + w[i];
        uint32_t u = (rotr(a, 2) ^ rotr(a, 13) ^ rotr(a, 22)) + ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
        memmove(v + 1, v, 7 * sizeof *v);
        v[4] += t, v[0] = t + u;
    }
    for (int i = 0; i < 8; i++) h[i] += v[i];
}

static void block1(uint32_t h[8], const uint32_t in[16])
{
    static const uint32_t k[4] = {0x5a827999, 0x6ed9eba1, 0x8f1bbcdc, 0xca62c1d6};
    uint32_t w[80], a = h[0], b = h[1], c = h[2], d = h[3], e = h[4];
    memcpy(w, in, 16 * sizeof *w);
    for (int i = 16; i < 80; i++) w[i] = rotl(w[i - 3] ^ w[i - 8] ^ w[i - 14] ^ w[i - 16], 1);
    for (int i = 0; i < 80; i++) {
        uint32_t f = i < 20 ? (b & c) | (~b & d) : i >= 40 && i < 60 ? (b & c) | (b & d) | (c & d) : b ^ c ^ d;
        uint32_t t = rotl(a, 5) + f + e + k[i / 20] + w[i];
        e = d, d = c, c = rotl(b, 30), b = a, a = t;
    }
    h[0] += a, h[1] += b, h[2] += c, h[3] += d, h[4] += e;
}

static void one_block(ql_sha *s, const unsigned char *p)
{
    uint32_t w[16];
    for (int i = 0; i < 16; i++, p += 4)
        w[i] = (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
    if (s->kind == QL_SHA1) block1(s->h, w);
    else block256(s->h, w);
}

void ql_sha_begin(ql_sha *s, ql_sha_kind kind)
{
    static const uint32_t start[2][8] = {
        {0x67452301, 0xefcdab89, 0x98badcfe, 0x10325476, 0xc3d2e1f0, 0, 0, 0},
        {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19}};
    *s = (ql_sha){.kind = kind};
    memcpy(s->h, start[kind], sizeof s->h);
}

void ql_sha_add(ql_sha *s, const void *data, size_t n)
{
    const unsigned char *p = data;
    s->bytes += n;
    while (n) {
        if (!s->used && n >= 64) {
            one_block(s, p);
            p += 64, n -= 64;
            continue;
        }
        size_t k = 64 - s->used < n ? 64 - s->used : n;
        memcpy(s->block + s->used, p, k);
        s->used += k, p += k, n -= k;
        if (s->used == 64) one_block(s, s->block), s->used = 0;
    }
}

void ql_sha_end(ql_sha *s, char hex[65])
{
    uint64_t bits = s->bytes * 8;
    unsigned char tail[8];
    for (int i = 0; i < 8; i++) tail[i] = (unsigned char)(bits >> (56 - 8 * i));
    ql_sha_add(s, "\x80", 1);
    while (s->used != 56) ql_sha_add(s, "", 1);
    ql_sha_add(s, tail, 8);
    for (int i = 0; i < (s->kind == QL_SHA1 ? 5 : 8); i++) snprintf(hex + 8 * i, 9, "%08x", s->h[i]);
}

/* ---- XXH64 (the published algorithm, little-endian machines) ------------------------------------ */

static const uint64_t P1 = 0x9e3779b185ebca87u, P2 = 0xc2b2ae3d27d4eb4fu, P3 = 0x165667b19e3779f9u, P4 = 0x85ebca77c2b2ae63u,
                      P5 = 0x27d4eb2f165667c5u;

static uint64_t rotl64(uint64_t x, int n)
{
    return x << n | x >> (64 - n);
}

static uint64_t read64(const unsigned char *p)
{
    uint64_t v;
    memcpy(&v, p, 8);
    return v;
}

static uint64_t lane(uint64_t v, uint64_t x)
{
    return rotl64(v + x * P2, 31) * P1;
}

uint64_t ql_hash64(uint64_t seed, const void *data, size_t n)
{
    const unsigned char *p = data, *end = n ? p + n : p;
    uint64_t h = seed + P5;
    if (n >= 32) {
        uint64_t v[4] = {seed + P1 + P2, seed + P2, seed, seed - P1};
        for (; end - p >= 32; p += 32)
            for (int i = 0; i < 4; i++) v[i] = lane(v[i], read64(p + 8 * i));
        h = rotl64(v[0], 1) + rotl64(v[1], 7) + rotl64(v[2], 12) + rotl64(v[3], 18);
        for (int i = 0; i < 4; i++) h = (h ^ lane(0, v[i])) * P1 + P4;
    }
    h += n;
    for (; end - p >= 8; p += 8) h = rotl64(h ^ lane(0, read64(p)), 27) * P1 + P4;
    if (end - p >= 4) {
        uint32_t u;
        memcpy(&u, p, 4);
        h = rotl64(h ^ u * P1, 23) * P2 + P3;
        p += 4;
    }
    for (; p < end; p++) h = rotl64(h ^ *p * P5, 11) * P1;
    h = (h ^ h >> 33) * P2;
    h = (h ^ h >> 29) * P3;
    return h ^ h >> 32;
}

/* ---- CRC-32 -------------------------------------------------------------------------------------- */

uint32_t ql_crc32(const void *data, size_t n)
{
    uint32_t table[256], crc = 0xffffffffu;
    const unsigned char *p = data;
    for (uint32_t i = 0; i < 256; i++) {
        table[i] = i;
        for (int k = 0; k < 8; k++) table[i] = table[i] & 1 ? 0xedb88320u ^ table[i] >> 1 : table[i] >> 1;
    }
    for (size_t i = 0; i < n; i++) crc = table[(crc ^ p[i]) & 255] ^ crc >> 8;
    return ~crc;
}
