/* BPE below the tokenizer: vocabulary, merges, the pre-token matcher. Over bytes (Llama 3, Qwen), or over pieces (Llama 2,
 * Mistral): characters, and bytes of those that the vocabulary lacks. core/tokenizer.h is the interface that others use. */
#ifndef QL_BPE_H
#define QL_BPE_H

#include "core/unicode.h"

/* A growable run of token ids. {0} is empty. */
typedef struct {
    int32_t *data;
    size_t len, cap;
} ql_ids;

ql_status ql_ids_reserve(ql_ids *v, size_t more);
ql_status ql_ids_push(ql_ids *v, int32_t id);
void ql_ids_free(ql_ids *v);

/* A fast 64-bit hash; not for anyone who wants to collide. */
uint64_t ql_hash(uint64_t seed, const void *data, size_t n);

typedef struct ql_bpe ql_bpe;

#define QL_SPACE "\xe2\x96\x81" /* ▁, which stands for " " in pieces */

ql_status ql_bpe_new(bool pieces, int32_t n_ids, size_t n_tokens, size_t n_merges, ql_bpe **out);
void ql_bpe_free(ql_bpe *b);

/* A token as the file spells it (byte-level alphabet, or pieces). Tokens with characters outside that alphabet
 * are kept for decoding and never come out of the merges. */
ql_status ql_bpe_add_token(ql_bpe *b, const char *key, size_t n, int32_t id);
/* Ends the vocabulary; call before the first merge. Tokens added later are for decoding only. */
ql_status ql_bpe_seal(ql_bpe *b, bool ignore_merges);
/* The next merge in rank order. */
ql_status ql_bpe_add_merge(ql_bpe *b, const char *left, size_t nl, const char *right, size_t nr);

/* The text a token stands for, a piece's spelling (any id below n_ids; *n = 0 for unknown ones), -1: no such token. */
const char *ql_bpe_bytes(const ql_bpe *b, int32_t id, size_t *n);
int32_t ql_bpe_find(const ql_bpe *b, const char *bytes, size_t n);
int32_t ql_bpe_find_key(const ql_bpe *b, const char *key, size_t n); /* by the file's spelling */

/* Appends the ids of one pre-token. Not for two threads at once (it has a cache). */
ql_status ql_bpe_encode(ql_bpe *b, const char *p, size_t n, ql_ids *out);

/* Whether no merge crosses the border before a ▁ behind another character: there a text may be cut without any difference. */
bool ql_bpe_cuts(const ql_bpe *b);
/* How many bytes at p the token has that encode made of them. */
size_t ql_bpe_covers(const ql_bpe *b, int32_t id, const char *p);

/* Length of the pre-token at p: the Llama-3 and Qwen expression, which differ in how many digits stay
 * together (3 and 1). */
size_t ql_bpe_pretoken(const unsigned char *p, const unsigned char *end, int digits);

#endif
