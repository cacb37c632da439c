/* Proofs about a run, from the bytes on the devices. */
#ifndef QL_VERIFY_H
#define QL_VERIFY_H

#include "core/train.h"

/* {"cmd":"verify","job":{…},"run":PATH} → {"checks":[{"name","ok","text"}…], "layers":[{"layer","hash","file","ok"}…]}:
 *   - what each device holds of the base, against the whole;
 *   - the bytes of every layer as every device gathers it, against what the model's file says;
 *   - the saved adapter against the one on the devices, by its bits and by the loss on a fixed batch;
 *   - the run's first loss done again from the seed, and its record of losses.
 * Adapters on the devices are afterwards what they were, or the run's. Every rank calls it. */
ql_status ql_verify_run(ql_worker *w, const json_t *command, json_t **out);

#endif
