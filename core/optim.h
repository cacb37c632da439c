/* Summed gradients to changed adapters: the reduction between ranks, norm, clip, AdamW on this rank's shard, and the adapters
 * gathered again. One way for any world size: with one rank the shard is everything. */
#ifndef QL_OPTIM_H
#define QL_OPTIM_H

#include "core/memory.h"

typedef struct {
    ql_adam adam;
    ql_clip clip;                 /* clip.lr is set by ql_optim_init */
} ql_optim;

struct ql_rank;

/* Empty states, ctl and the learning-rate table (spec->steps values). */
ql_status ql_optim_init(struct ql_rank *r, const ql_optim *o, const float *lr, float loss_scale);
/* The gradient of all ranks, this rank's shard of it, in mem->grad[0] (at the shard's place). `present[r]`: rank r had work. */
ql_status ql_optim_reduce(struct ql_rank *r, const uint8_t *present);
ql_status ql_optim_step(struct ql_rank *r);
/* The step's ops once, for what a device gets at their first call; adapters, states and ctl are to be set after it. */
ql_status ql_optim_warm(struct ql_rank *r);

/* This rank's states to and from the host: for checkpoints. Buffers hold the shard's elements (m, v: F32, or 8-bit codes and their
 * scales per 256, and 32-bit ones of small tensors). */
typedef struct {
    int64_t n, small_n;
    float *m, *v, *m2, *v2;
    uint8_t *m8, *v8;
    ql_ctl ctl;
} ql_optim_state;
ql_status ql_optim_state_new(const struct ql_rank *r, ql_optim_state **out);
void ql_optim_state_free(ql_optim_state *s);
ql_status ql_optim_get(struct ql_rank *r, ql_optim_state *s);
ql_status ql_optim_put(struct ql_rank *r, const ql_optim_state *s);

#endif
