/* One optimizer step of one rank as data: a flat array of actions. Builders write it, plan_check.c proves it, exec.c runs it with
 * one switch, `plan` prints it. */
#ifndef QL_PLAN_H
#define QL_PLAN_H

#include "core/store.h"

typedef enum {
    QL_DO_GATHER,  /* layer's stored parts → gather slot (collective for sharded, a copy for host) */
    QL_DO_RELEASE, /* the slot may be filled again once the compute so far is done */
    QL_DO_BATCH,   /* micro-batch mb to the device, its embedding rows into h[0] */
    QL_DO_F,       /* h[layer+1] = block(h[layer]) */
    QL_DO_HEAD,    /* loss of mb and the gradient of h[L]; where ranks share the head all do it together, mb −1 on one without */
    QL_DO_R,       /* recompute what backward of the layer lacks */
    QL_DO_B,       /* gradient of h[layer+1] → of h[layer]; adapter gradients added */
    QL_DO_SAVE,    /* h[layer] to host memory */
    QL_DO_LOAD,    /* and back */
    QL_DO_PIECE,   /* a piece of the summation tree begins: a zeroed gradient buffer on the stack */
    QL_DO_JOIN,    /* the two top gradient buffers become one */
    QL_DO_REDUCE,  /* between ranks: each gets its shard of the summed gradient */
    QL_DO_STEP,    /* norm, clip, AdamW on the shard, adapters gathered */
    /* Between the stages of a pipeline; `layer` is the boundary. Those that stand side by side are posted as one group, which goes
     * its way beside the compute until LAND. */
    QL_DO_SEND_H,  /* h[layer] of mb to the next stage */
    QL_DO_RECV_H,  /* h[layer] of mb from the stage before */
    QL_DO_SEND_DH, /* gradient of h[layer] to the stage before */
    QL_DO_RECV_DH, /* and from the next one */
    QL_DO_LAND,    /* what was posted is here, or gone: compute waits for it */
    QL_DOS
} ql_do;

typedef struct {
    uint8_t what;     /* ql_do */
    int16_t mb;       /* micro-batch of the optimizer step, global index; −1 none */
    int16_t layer;    /* −1 none */
    int16_t slot;     /* gather slot; −1 none */
} ql_action;

/* Pipelines: ranks are stages with layers of their own, all see every micro-batch, in the order one forward, one backward (1F1B). AHEAD: a
 * stage recomputes for the next backward before its gradient arrives. One rank alone runs them as a loop. */
typedef enum { QL_LOOP, QL_BREADTH, QL_PIPE, QL_PIPE_AHEAD, QL_SCHEDULES } ql_schedule;

enum { QL_MAX_LAYERS = 256, QL_MAX_WORLD = QL_MAX_DEVICES, QL_MAX_ACCUM = 4096, QL_GATHER_SLOTS = 2 };

/* What the planner decides; the same on every rank. */
typedef struct {
    int world, layers, first;        /* first: lowest layer with an adapter */
    int g, pieces;                   /* micro-batches of an optimizer step; P */
    ql_schedule schedule;
    uint8_t store[QL_MAX_LAYERS];    /* ql_store_kind */
    uint8_t keep[QL_MAX_LAYERS];     /* ql_keep */
    uint8_t save[QL_MAX_LAYERS];     /* 1: h[layer] rests on the host between forward and backward */
    int train;                       /* 0: forward and loss only (eval) */
    int16_t cut[QL_MAX_WORLD + 1];   /* pipelines: rank r has layers [cut[r], cut[r + 1]) */
} ql_choice;

typedef struct {
    int rank;
    int g;                           /* micro-batches really there: a last group may be short */
    int count, capacity;
    ql_action *a;
} ql_plan;

/* gcd(g, exact_worlds): equal contiguous pieces of the summation tree. */
int ql_plan_pieces(int g, int exact_worlds);
/* Are the layers divided among the ranks? */
int ql_plan_piped(const ql_choice *c);
/* The layers [lo, hi) that a rank computes: all of them but in a pipeline. */
void ql_plan_stage(const ql_choice *c, int rank, int *lo, int *hi);
/* Micro-batches [first, end) of a rank: contiguous ranges; in a pipeline all of them. */
int ql_plan_first(const ql_choice *c, int rank);
int ql_plan_end(const ql_choice *c, int rank);
/* Gradient buffers that a rank's stack needs: 1 + log2(pieces per rank), or 1. */
int ql_plan_grad_buffers(const ql_choice *c);
/* Ranks that share the head: all, where weights of layers move too and the head's 8 pieces divide evenly; else 1, each has it whole. */
int ql_plan_head_world(const ql_choice *c);
/* h, kept activations: how many micro-batches are alive at once. */
int ql_plan_flights(const ql_choice *c, int rank);
/* Does the rank recompute this layer before the gradient arrives? Such layers have activations of their own for one micro-batch. */
int ql_plan_ahead(const ql_choice *c, int rank, int layer);
/* Is the action a send or a receive between stages? */
int ql_plan_link(const ql_action *a);
const char *ql_schedule_name(ql_schedule s); /* "loop", "breadth", "1f1b", "recompute_ahead" */

ql_status ql_plan_build(const ql_choice *c, int rank, int g, ql_plan *out);
void ql_plan_free(ql_plan *p);
/* Proves a plan: every layer gathered before use and never computed on while sharded, slots never overfull, actions in an order in
 * which each has its inputs, the gradients added in the tree that every world has, every micro-batch counted once. */
ql_status ql_plan_check(const ql_choice *c, const ql_plan *p);
/* Proves the plans of all ranks of a step together: each by itself, and that all meet in the same collectives in the same order, so
 * that none waits for another that never comes. */
ql_status ql_plan_check_world(const ql_choice *c, const ql_plan *of_rank);
/* Builds all ranks' plans for g micro-batches, proves them together, and gives this rank's. */
ql_status ql_plan_prove(const ql_choice *c, int rank, int g, ql_plan *out);
/* Must the other ranks take part in this action? */
int ql_plan_meets(const ql_choice *c, const ql_action *a);
/* One line per action, "F 3 mb 0 slot 1". Returns what snprintf would. */
int ql_action_print(const ql_action *a, char *buf, size_t size);
/* All of them. Caller frees. */
ql_status ql_plan_text(const ql_plan *p, char **out);
const char *ql_do_name(ql_do d);

#endif
