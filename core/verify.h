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

/* ---- its parts ---------------------------------------------------------------------------------------- */

typedef struct {
    ql_worker *w;
    ql_rank *r;
    ql_task *t;
    json_t *checks, *layers; /* of the result */
} ql_verify;

/* Adds to the checks. */
void ql_verify_check(ql_verify *v, const char *name, int ok, const char *fmt, ...) QL_PRINTF(4, 5);
/* Every rank's `bytes` at `mine` → all ranks' at `all`, through the ops' workspace. */
ql_status ql_verify_share(ql_verify *v, const void *mine, int64_t bytes, void *all);
/* Bytes of a linear as the file (or quantising) makes them: no padding. */
int64_t ql_verify_bytes(const ql_blob_linear *l);
enum { QL_VERIFY_PIECES = 3 /* packed or plain values · scales · scales of scales */ };

ql_status ql_verify_layers(ql_verify *v);                    /* verify_layers.c */
ql_status ql_verify_adapters(ql_verify *v, const char *run); /* verify_adapters.c; run NULL: nothing to do */

/* What a rank holds of norms, biases and the head (verify_rest.c). */
typedef struct {
    int64_t bytes, vectors, wrong;  /* wrong: values that are not the file's */
    uint64_t small;                 /* of the vectors' bytes, summed over them */
    uint64_t piece[QL_PIECES];      /* of the head's pieces */
    int has[QL_PIECES];
    char name[96];                  /* the first tensor with a wrong value */
} ql_verify_rest;
ql_status ql_verify_rest_of(ql_rank *r, ql_verify_rest *out);

#endif
