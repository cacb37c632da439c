/* Token by token from the model as it is on the devices: the layers' own forward with a key/value cache, several sequences side by
 * side. A new token is one row: nothing before it is run again. */
#ifndef QL_DECODE_H
#define QL_DECODE_H

#include "core/bpe.h"
#include "core/rank.h"
#include "core/sampler.h"

/* transformers' settings, names and order: the penalty on the logits, then temperature, top-k, top-p. */
typedef struct {
    int64_t max_new;            /* tokens */
    double repetition_penalty;  /* 1: none; logits of tokens in prompt and answer are divided by it, multiplied where negative */
    double temperature;         /* 0: the likeliest */
    int64_t top_k;              /* 0: all */
    double top_p;               /* 1: all */
    uint64_t seed;              /* sequence i draws from seed + i, whatever the others are */
} ql_sampling;

typedef struct {
    const int32_t *prompt;      /* borrowed, not empty */
    int64_t len;
    ql_ids out;                 /* the answer, without the token that ended it; ql_ids_free */
} ql_sequence;

typedef struct {
    ql_sampling how;
    const int32_t *stop;        /* tokens that end an answer */
    int stops;
    /* After each token of sequence i, which is in its `out` already; may be NULL. */
    ql_status (*token)(void *user, int i);
    void *user;
    const char *save_logits;    /* NULL, or a file for the V fp32 logits after the last prompt (rank 0 writes it) */
} ql_decoding;

/* Sequences that go side by side: rows of a matrix product. All ranks together; QL_ESTOP between two tokens. */
enum { QL_DECODE_ROWS = QL_FEW_ROWS };
ql_status ql_decode(ql_rank *r, const ql_decoding *d, ql_sequence *seq, int n);

/* The next token of one row of logits (V), which the penalty changes. `seen`: (V) marks, all `mark` − 1 or less at first; order: (V)
 * scratch. For tests of the rules without a model. */
typedef struct {
    const ql_sampling *how;
    int32_t *seen, mark, *order;
    ql_mt random;
} ql_sampler;
int32_t ql_sampler_next(ql_sampler *s, float *row, int64_t vocab, const int32_t *prompt, int64_t n_prompt, const ql_ids *answer);

#endif
