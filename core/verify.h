/* Proofs about a run, from the bytes on the devices. */
#ifndef QL_VERIFY_H
#define QL_VERIFY_H

#include "core/train.h"

/* {"cmd":"verify","job":{…},"run":PATH} → {"checks":[{"name","ok","text"}…], "layers":[{"layer","hash","file","ok"}…]}:
 *   - what each device holds of the base, against the whole;
 *   - the bytes of every layer as every device gathers it, against what the model's file says;
 *   - norms, biases and the head on every device, against the file;
 *   - the saved adapter against the one on the devices, by its bits and by the loss on a fixed batch;
 *   - the run's first loss done again from the seed, and its record of losses.
 * Adapters on the devices are afterwards what they were, or the run's. Every rank calls it. */
ql_status ql_verify_run(ql_worker *w, const json_t *command, json_t **out);

/* What a rank holds of norms, biases and the head. */
typedef struct {
    int64_t bytes, vectors, wrong;  /* wrong: values that are not the file's */
    uint64_t small;                 /* of the vectors' bytes, summed over them */
    uint64_t piece[QL_PIECES];      /* of the head's pieces */
    int has[QL_PIECES];
    char name[96];                  /* the first tensor with a wrong value */
} ql_verify_rest;
ql_status ql_verify_rest_of(ql_rank *r, ql_verify_rest *out);

#endif
