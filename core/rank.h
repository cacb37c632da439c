/* One rank: a device, its memory, the frozen model on it, and the execution of plans. */
#ifndef QL_RANK_H
#define QL_RANK_H

#include "core/dataset.h"
#include "core/memory.h"
#include "core/optim.h"
#include "core/plan.h"

/* What a rank is at. In a plan every action is a beat; elsewhere beats are fewer. */
typedef enum { QL_AT_REST, QL_AT_OPENING, QL_AT_LOADING, QL_AT_STEP, QL_AT_EVAL, QL_AT_SAVING, QL_AT_TEXT } ql_phase;

/* Where a rank stands, written by it and read by the supervisor; in shared memory. */
typedef struct {
    volatile int64_t beat;     /* actions done: progress, for deadlines */
    volatile int phase;        /* ql_phase */
    volatile ql_action doing;  /* the action at work in a plan; when loading, its layer */
    volatile int step;         /* optimizer step at work, from 1 */
    int64_t entered;           /* collectives entered: stopping ranks agree on where (exec.c) */
    int64_t messages[4];       /* between stages, begun: by kind from QL_DO_SEND_H */
    int at_stop;               /* 1: this rank has seen the stop and waits for the others */
    int waits_for;             /* 1 + the rank without which a collective does not go on; 0 none, or only the device knows */
    int64_t bytes[QL_CATS];
    ql_dev_memory mem;
    char name[96];
} ql_rank_state;

/* What ranks of a session share; mapped before the fork. */
typedef struct {
    volatile int stop;         /* 1: end at the next action */
    volatile int abort;        /* 1: a rank died or failed: leave all waits */
    ql_rank_state rank[QL_MAX_WORLD];
    int64_t save_at;           /* the step after which the clock asks for a checkpoint (save_minutes) */
} ql_shared;

typedef struct {
    const ql_backend *be;
    int device, rank, world;
    ql_shared *shared;
    void *comm_shared;         /* for the comm table */
    int64_t comm_bytes;
    char *host_base;           /* host-resident layers, one copy for all ranks; NULL when there are none */
    int64_t host_bytes;
    int64_t timeout_ms;
    int64_t device_limit;      /* bytes this rank may take; 0: what is free */
    /* Called with progress of loading; may be NULL. */
    void (*progress)(void *ctx, const char *what, int64_t done, int64_t total);
    void *ctx;
    /* Called behind each action of a plan; may be NULL. For measurements. */
    void (*acted)(void *ctx, const ql_action *a);
} ql_rank_setup;

enum { QL_AHEAD = 4 }; /* layers that the host runs ahead of the device */

typedef struct ql_rank {
    ql_rank_setup set;
    const ql_spec *spec;
    ql_dev *dev;
    ql_comm *comm;
    ql_stream *compute, *side, *link;          /* side: gathers and copies; link: between the stages of a pipeline */
    ql_queue q;
    ql_mem *mem;
    ql_arena arena;
    ql_event *slot_full[QL_GATHER_SLOTS], *slot_free[QL_GATHER_SLOTS];
    ql_event *saved[2], *loaded[2], *staged, *ready, *landed, *pace[QL_AHEAD];
    char *host_h;                              /* saved activations, pinned */
    char *host_state;                          /* offloaded optimizer states, pinned */
    int64_t host_h_bytes, host_state_bytes;
    int64_t version;                           /* of the adapters */
    int stack;                                 /* gradient buffers in use */
    int heads;                                 /* losses of the plan at work so far */
    ql_batch batch;
    ql_optim optim;
    ql_micro *micro;                           /* (flights) */
    char unpinned[512];                        /* why host-resident layers are not pinned; "" where they are */
    ql_nf4 packed[QL_LINEARS];                 /* of the layer at work, where a few rows read it as it rests */
} ql_rank;

ql_status ql_rank_open(const ql_rank_setup *set, const ql_spec *spec, ql_rank **out);
void ql_rank_close(ql_rank *r);
/* Frozen weights to their places. Every rank reads its own ranges; host layers are filled by the ranks in turn. */
ql_status ql_rank_load(ql_rank *r);
/* Adapters, F32 flat, spec->lora->elements; a set also clears nothing else. In a pipeline all ranks get them together. */
ql_status ql_rank_set_adapters(ql_rank *r, const float *flat);
ql_status ql_rank_get_adapters(ql_rank *r, float *flat);
/* All ranks together: `bytes` in `all` of everyone, of which [at, at + n) are this rank's `mine` and no other's (multiples of 4; any mix of
 * host and device addresses). No float is added: what the others have there is zero, and the bits are summed as integers. */
ql_status ql_rank_share(ql_rank *r, void *all, int64_t bytes, const void *mine, int64_t at, int64_t n);

/* One optimizer step's (or evaluation's) data: micro-batch k is examples order[(first + k)·batch …) of n. */
typedef struct {
    const ql_dataset *data;
    const int32_t *order;
    int64_t n, first, batch;
    int g;                                     /* micro-batches there are */
    int32_t pad_id;
    uint32_t step;                             /* from 1 */
    int64_t items;                             /* targets of all micro-batches */
} ql_step_data;

typedef struct {
    float loss, norm, lr, loss_scale;
    int skipped, steps, skips;
} ql_step_result;

/* Targets of the micro-batches of a step: the loss denominator, known before it starts. */
int64_t ql_step_items(const ql_step_data *d);
int64_t ql_step_tokens(const ql_step_data *d);

/* Runs a plan of train actions. QL_ESTOP: the step was dropped, nothing has changed. */
ql_status ql_rank_step(ql_rank *r, const ql_plan *p, const ql_step_data *d, ql_step_result *out);
/* Forward and loss of the plan's micro-batches; losses[mb] gets Σ nll of those this rank has (all ranks' after it). */
ql_status ql_rank_forward(ql_rank *r, const ql_plan *p, const ql_step_data *d, float *losses);
ql_status ql_rank_measure(ql_rank *r);
/* What a rank measured last. */
void ql_rank_figures(const ql_rank_state *s, int64_t bytes[QL_CATS], ql_dev_memory *mem);
/* "B 3 mb 1 of step 7", "loading layer 3", "saving after step 20": for messages. */
void ql_rank_where(const ql_rank_state *s, char *buf, size_t size);
void ql_rank_at(ql_rank *r, ql_phase phase);

/* While loading, all ranks together: what a lazy device gets at first use, it gets here. */
ql_status ql_exec_warm(ql_rank *r);

/* exec.c, shared with generate.c */
ql_status ql_exec_batch(ql_rank *r, int flight, const ql_batch *b, int train, uint32_t step);
/* Between actions: QL_ESTOP when all ranks drop what they do, here. */
ql_status ql_exec_stop_point(ql_rank *r);
/* Before something in which other ranks must take part. */
void ql_exec_enter(ql_rank *r);
ql_status ql_exec_gather(ql_rank *r, int64_t layer, int slot);
ql_status ql_exec_layer(ql_rank *r, ql_micro *mb, int64_t layer, int slot, ql_layer *out);

#endif
