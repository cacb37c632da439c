/* A job's settings as the engine reads them: once, typed, with fractions and epochs resolved as soon as the data's length is
 * known. */
#ifndef QL_ARGS_H
#define QL_ARGS_H

#include "core/job.h"
#include "core/schedule.h"
#include "kernels/ops.h"

/* Settings that may be left to the planner. */
typedef enum { QL_PICK_AUTO = -1, QL_PICK_NO, QL_PICK_YES } ql_pick;
typedef enum { QL_EVERY_NO, QL_EVERY_STEPS, QL_EVERY_EPOCH, QL_EVERY_BEST } ql_every;
typedef enum { QL_PIPELINE_AUTO, QL_PIPELINE_OFF, QL_PIPELINE_1F1B, QL_PIPELINE_AHEAD } ql_pipeline;
typedef enum { QL_ORDER_RANDOM, QL_ORDER_SEQUENTIAL } ql_order;
typedef enum { QL_TOKENS_NO, QL_TOKENS_YES } ql_token_count;

/* dtypes: QL_DTYPES where the setting is auto. Strings belong to the job, and live as long as it. */
typedef struct {
    /* model */
    const char *model;
    ql_dtype dtype, residual_dtype;
    bool load_in_4bit, double_quant, dequant_direct;
    /* what a micro-batch is, and the order of them */
    int64_t batch, eval_batch, accumulation, max_length;
    uint64_t seed, data_seed;
    ql_order order;
    const char *order_file;
    bool drop_last;
    /* the update */
    double epochs;         /* num_train_epochs */
    int64_t max_steps;     /* -1: by epochs */
    double warmup_steps, warmup_ratio;
    ql_lr lr;              /* warmup and total still open: ql_steps_plan's */
    ql_adam adam;
    bool adam_8bit, adam_paged; /* 8-bit states; states rest in host memory */
    ql_clip clip;          /* scaling 0, lr NULL: the engine knows dtype and steps */
    float loss_scale;      /* where an fp16 run begins */
    double label_smoothing;
    bool unshifted;        /* loss_denominator: labels that count, not targets (transformers before mid-2026) */
    /* where things rest */
    ql_devices devices;
    ql_fsdp fsdp;
    const json_t *store;   /* for ql_store_parse */
    ql_pick checkpointing, activation_offload, breadth;
    ql_pipeline pipeline;
    int64_t device_memory[QL_MAX_DEVICES]; /* 0: what the device says */
    int64_t host_memory;                   /* 0: what the machine says */
    int exact_worlds;
    int64_t deadline_ms;   /* 0: by the plan */
    /* records */
    ql_every log_every, eval_every, save_every;
    double logging_steps, eval_steps, save_steps, eval_delay;
    bool eval_steps_set;   /* eval_steps was given; else it is logging_steps */
    bool log_first, nan_filter, eval_on_start, save_only_model, load_best, greater_is_better;
    bool track_best;       /* metric_for_best_model is set, or load_best, or save_strategy best */
    ql_token_count count_tokens;
    double save_minutes;      /* 0: none */
    int64_t save_total_limit; /* 0: no limit */
    ql_dtype save_dtype;
} ql_args;

/* Checks the job as a whole (ql_job_check) and reads it. */
ql_status ql_args_from_job(const ql_job *job, ql_args *out) QL_MUST_USE;

/* ---- steps ---------------------------------------------------------------------------------------- */

/* Optimizer step s (from 0) takes micro-batches [first, first + count) of its epoch, at most `group` of them; the last step of an
 * epoch may be short. All of it follows from the data and from group = accumulation · world, never from the world alone. */
typedef struct {
    int64_t rows, batches; /* samples and micro-batches of an epoch */
    int64_t group;         /* G: micro-batches of an optimizer step, over all devices */
    int64_t updates;       /* optimizer steps of an epoch */
    int64_t max_steps;     /* N */
    int64_t epochs;        /* passes begun */
    int64_t warmup;        /* W */
    int64_t logging_steps, eval_steps, save_steps; /* at least 1 */
} ql_steps;

/* rows: samples (packed rows) of the training set. transformers' arithmetic: updates = ceil(batches / G), N = ceil(epochs · updates)
 * or max_steps, W = warmup_steps or ceil(N · ratio). Unlike accelerate, dataloader_drop_last leaves out only a short last
 * micro-batch, not the whole ones that do not fill all devices: the data must not depend on their number. */
ql_status ql_steps_plan(const ql_args *a, int64_t rows, int64_t world, ql_steps *out) QL_MUST_USE;

typedef struct {
    int64_t epoch, first, count; /* micro-batches [first, first + count) of epoch */
} ql_step_at;
ql_step_at ql_steps_at(const ql_steps *p, int64_t step);
/* What records call epoch once `done` steps are made: 1.5 is the middle of the second. */
double ql_steps_epoch(const ql_steps *p, int64_t done);

enum { QL_DUE_LOG = 1, QL_DUE_EVAL = 2, QL_DUE_SAVE = 4, QL_DUE_STOP = 8 };
/* What is to be done, in this order, once `done` steps are made (transformers' DefaultFlowCallback). save_strategy best is the
 * history's to decide: it needs the evaluation's result. */
unsigned ql_steps_due(const ql_args *a, const ql_steps *p, int64_t done);

#endif
