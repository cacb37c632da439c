/* Tokenised examples, and batches of them. A dataset is a file that every rank maps: written once by
 * ql_dataset_writer_* (core/data.h does that from text), found again by its name. */
#ifndef QL_DATASET_H
#define QL_DATASET_H

#include "core/bpe.h"

#include <jansson.h>

typedef enum { QL_PACK_NONE, QL_PACK_BFD, QL_PACK_BFD_SPLIT, QL_PACK_WRAPPED } ql_packing;

/* ---- writing ----------------------------------------------------------------------------------- */

typedef struct ql_dataset_writer ql_dataset_writer;
ql_status ql_dataset_create(const char *path, ql_dataset_writer **out) QL_MUST_USE;
/* Optional: how many examples there will be at most, so that the index takes 8 bytes each. */
ql_status ql_dataset_reserve(ql_dataset_writer *w, size_t examples) QL_MUST_USE;
/* One example; trained[i] = 0 masks token i's label. */
ql_status ql_dataset_add(ql_dataset_writer *w, const int32_t *ids, const uint8_t *trained,
                         size_t n) QL_MUST_USE;
/* Atomic; `about` (may be NULL) is kept beside the tokens: counts of what was skipped, and so on. */
ql_status ql_dataset_commit(ql_dataset_writer *w, const json_t *about) QL_MUST_USE;
void ql_dataset_writer_close(ql_dataset_writer *w);

/* ---- reading ----------------------------------------------------------------------------------- */

typedef struct ql_dataset ql_dataset;
/* packing makes examples of max_length out of several documents: QL_PACK_BFD and _SPLIT by best fit
 * (documents stay whole and apart; _SPLIT: long ones were stored in pieces), QL_PACK_WRAPPED by cutting one long row. */
ql_status ql_dataset_open(const char *path, ql_packing packing, int64_t max_length,
                          ql_dataset **out) QL_MUST_USE;
void ql_dataset_close(ql_dataset *d);

const char *ql_dataset_path(const ql_dataset *d);
int64_t ql_dataset_size(const ql_dataset *d); /* examples: what the sampler permutes */
int64_t ql_dataset_documents(const ql_dataset *d);
int64_t ql_dataset_tokens(const ql_dataset *d);
int64_t ql_dataset_length(const ql_dataset *d, int64_t example); /* in tokens */
int64_t ql_dataset_longest(const ql_dataset *d);
const json_t *ql_dataset_about(const ql_dataset *d); /* borrowed */
/* Document i as stored: id | QL_MASKED where the label is masked. */
#define QL_MASKED 0x80000000u
const uint32_t *ql_dataset_document(const ql_dataset *d, int64_t i, int64_t *n);
/* The documents that make up an example (several when packed), and the k-th of them. */
int64_t ql_dataset_parts(const ql_dataset *d, int64_t example);
const uint32_t *ql_dataset_part(const ql_dataset *d, int64_t example, int64_t k, int64_t *n);
bool ql_dataset_packed(const ql_dataset *d);

/* ---- batches ----------------------------------------------------------------------------------- */

/* A micro-batch. Unpacked: `rows` rows of S = T/rows tokens, the longest rounded up to `multiple`, padded
 * on the right. Packed: one ragged row of all documents, rounded up. Padding is outside every document,
 * so attention skips it. Buffers are reused from fill to fill. */
typedef struct {
    int64_t T, rows, docs;
    int64_t targets;   /* labels that count: target ≠ −100 */
    int64_t tokens;    /* without padding */
    int64_t doc_max;   /* longest document */
    int32_t *ids;      /* (T) */
    int32_t *labels;   /* (T) as Hugging Face has them: unshifted, −100 = masked */
    int32_t *target;   /* (T) the next token's label; −100 at the end of each document and in padding */
    int32_t *position; /* (T) restarts at each document */
    int64_t *token;    /* (T) row(t)·2³² + position(t), for dropout */
    int32_t *doc_start, *doc_len; /* (docs) */
    int64_t cap, doc_cap;         /* of the buffers */
} ql_batch;

/* Examples e[0 … n-1]. first_row numbers e[0] in the optimizer step's global order. */
ql_status ql_batch_fill(ql_batch *b, const ql_dataset *d, const int32_t *e, int64_t n,
                        int64_t first_row, int32_t pad_id, int64_t multiple) QL_MUST_USE;
/* T and the number of targets of such a batch without making it. */
void ql_batch_measure(const ql_dataset *d, const int32_t *e, int64_t n, int64_t multiple, int64_t *T,
                      int64_t *targets);
void ql_batch_free(ql_batch *b);

#endif
