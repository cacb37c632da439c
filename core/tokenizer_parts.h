/* Inside core/tokenizer.c, core/tokenizer_read.c and core/tokenizer_pieces.c. */
#ifndef QL_TOKENIZER_PARTS_H
#define QL_TOKENIZER_PARTS_H

#include "core/tokenizer.h"

#include <jansson.h>
#include <pthread.h>

typedef struct {
    ql_str name; /* in the file */
    ql_str text; /* what is looked for: normalised for tokens that are matched after the normalizer */
    int32_t id;
    bool special, normalized, lstrip, rstrip, single_word;
} added;

/* Added tokens that are looked for together, sorted by first byte, longer ones first. */
typedef struct {
    const added **list;
    size_t n;
    uint32_t first[257]; /* list[first[c]] … list[first[c+1]-1] begin with byte c */
} matcher;

typedef enum { PREPEND_NEVER, PREPEND_FIRST, PREPEND_ALWAYS } prepending; /* ▁ in front of what lies between added tokens */

struct ql_tok {
    ql_bpe *bpe;
    int32_t size;
    int digits;
    bool nfc;
    bool pieces; /* else byte-level: digits and nfc are for that, the next five for pieces */
    bool normalizes;  /* the normalizer makes ▁ of spaces, before normalized added tokens are looked for; else the pre-tokenizer */
    bool split;       /* words end before every ▁ */
    bool bytes, strip; /* the decoder joins byte tokens; takes the space at the beginning away. Without `bytes`: Metaspace */
    prepending prepend;
    added *added;
    size_t n_added;
    matcher raw, normal;
    uint8_t *special; /* by id: 1, special; 2, decoded as its normalised text, which is not the file's */
    ql_ids prefix, suffix, stops;
    ql_tok_names names;
    json_t *config; /* keeps the names' strings alive */
    char *jinja;
    uint64_t hash;
    pthread_mutex_t lock;
    /* Of the call under way: */
    ql_ids *ends;
    size_t at; /* where the piece being encoded begins in the text */
};

/* core/tokenizer_pieces.c */
ql_status ql_pieces_read(ql_tok *t, const json_t *root);
/* Appends the text with ▁, the first one of a text's own accord where *prepended. first: nothing of the text comes before. */
ql_status ql_pieces_spell(const ql_tok *t, const char *text, size_t n, bool first, ql_str *out, bool *prepended);
/* Ends of tokens in the text as it is, for those in the text as spelled. */
void ql_pieces_ends(const char *text, size_t n, bool prepended, int32_t *ends, size_t n_ends);
size_t ql_pieces_word(const ql_tok *t, const char *p, const char *end);
ql_status ql_pieces_decode(const ql_tok *t, const int32_t *ids, size_t n, unsigned flags, ql_str *out);

#endif
