/* Text ↔ token ids from a model folder's tokenizer.json: byte-level BPE with the Llama-3 or Qwen pre-tokenizer, and BPE
 * over pieces with bytes to fall back on (Llama 2, Mistral 7B, TinyLlama, Zephyr). Everything else is refused by name.
 * Safe to use from several threads. */
#ifndef QL_TOKENIZER_H
#define QL_TOKENIZER_H

#include "core/bpe.h"

typedef struct ql_tok ql_tok;

enum {
    QL_TOK_SPECIALS = 1, /* encode: what the post-processor adds (BOS); decode: keep special tokens */
    QL_TOK_INSIDE = 2,   /* decode: text comes before, so a space at the beginning stays */
    QL_TOK_STREAM = 4,   /* decode: more ids may come, and must not change the characters that are whole (Mistral's decoder
                          * makes U+FFFD of all bytes in a row that has a bad one) */
};

/* Reads tokenizer.json, tokenizer_config.json, special_tokens_map.json and chat_template.jinja; only
 * the first must be there. */
ql_status ql_tok_open(const char *folder, ql_tok **out);
/* From the text of a tokenizer.json alone. */
ql_status ql_tok_parse(const char *json, size_t n, ql_tok **out);
void ql_tok_close(ql_tok *t);

/* Appends ids. Ill-formed UTF-8 counts as U+FFFD. */
ql_status ql_tok_encode(ql_tok *t, const char *text, size_t n, unsigned flags, ql_ids *out);
/* The same, and where each token ends in the text (bytes; len of ends = len of out afterwards when both
 * were empty). Exact unless NFC changes the text, which ql_tok_normalize does beforehand. */
ql_status ql_tok_encode_ends(ql_tok *t, const char *text, size_t n, unsigned flags, ql_ids *out, ql_ids *ends);
/* Appends the text as the normalizer leaves it. */
ql_status ql_tok_normalize(const ql_tok *t, const char *text, size_t n, ql_str *out);
uint64_t ql_tok_hash(const ql_tok *t); /* of what tokenizer.json says; 0 for NULL */
/* Appends text; ill-formed UTF-8 becomes U+FFFD. Unknown ids are left out. */
ql_status ql_tok_decode(const ql_tok *t, const int32_t *ids, size_t n, unsigned flags, ql_str *out);
/* How much of a decoded text tokens to come leave as it is: a character may span tokens, and is U+FFFD until it is whole. */
size_t ql_tok_steady(const char *text, size_t n);
/* The bytes of one token; ▁ is not yet a space in them. NULL: no such id. */
const char *ql_tok_bytes(const ql_tok *t, int32_t id, size_t *n);

int32_t ql_tok_size(const ql_tok *t); /* highest id + 1 */
int32_t ql_tok_find(const ql_tok *t, const char *token); /* by its spelling in the file; -1: none */
bool ql_tok_is_special(const ql_tok *t, int32_t id);
/* Ids that encode adds in front of and behind a text with QL_TOK_SPECIALS. */
const ql_ids *ql_tok_prefix(const ql_tok *t);
const ql_ids *ql_tok_suffix(const ql_tok *t);

/* -1 and NULL where the files name none. pad is not replaced by eos here. */
typedef struct {
    int32_t bos, eos, pad, unk;
    const char *bos_token, *eos_token, *pad_token, *unk_token;
    const char *chat_template;
} ql_tok_names;
const ql_tok_names *ql_tok_info(const ql_tok *t); /* NULL: a model without a tokenizer, no names */
/* What ends an answer: eos, and those of config.json and generation_config.json (Llama 3's <|eot_id|>). NULL: none. */
const ql_ids *ql_tok_stops(const ql_tok *t);

#endif
