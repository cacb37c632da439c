/* Inside core/tokenizer.c and core/tokenizer_read.c. */
#ifndef QL_TOKENIZER_PARTS_H
#define QL_TOKENIZER_PARTS_H

#include "core/tokenizer.h"

#include <jansson.h>
#include <pthread.h>

typedef struct {
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

struct ql_tok {
    ql_bpe *bpe;
    int32_t size;
    int digits;
    bool nfc;
    added *added;
    size_t n_added;
    matcher raw, normal;
    uint8_t *special; /* by id */
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

#endif
