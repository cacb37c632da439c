/* SHA-256 and SHA-1 of what is downloaded: the hub names large files by one, small ones by git's other. A fast hash to compare what
 * two places hold. */
#ifndef QL_HASH_H
#define QL_HASH_H

#include "kernels/base.h"

typedef enum { QL_SHA1, QL_SHA256 } ql_sha_kind;

typedef struct {
    ql_sha_kind kind;
    uint32_t h[8];
    uint64_t bytes;
    unsigned char block[64];
    size_t used;
} ql_sha;

void ql_sha_begin(ql_sha *s, ql_sha_kind kind);
void ql_sha_add(ql_sha *s, const void *data, size_t n);
void ql_sha_end(ql_sha *s, char hex[65]); /* 40 or 64 digits */

/* XXH64: for bytes that nobody forges, at the speed of memory. Runs are chained by giving one's hash as the next one's seed. */
uint64_t ql_hash64(uint64_t seed, const void *data, size_t n);

/* As zlib and PNG have it: what other programs can be asked for. */
uint32_t ql_crc32(const void *data, size_t n);

#endif
