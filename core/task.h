/* A job made concrete: model, adapters, data, steps, and the spec that ranks run. Front ends (plan), the supervisor and every rank make
 * it with the same function from the same inputs, so they agree without exchanging it. */
#ifndef QL_TASK_H
#define QL_TASK_H

#include "core/args.h"
#include "core/choose.h"
#include "core/dataset.h"
#include "core/memory.h"

typedef enum { QL_WEIGHTS_MAPPED, QL_WEIGHTS_HEADERS } ql_weights; /* headers: config.json is enough, for plans */

typedef struct {
    const json_t *job;
    const char *train, *eval;  /* tokenised datasets; NULL none (plans assume full rows) */
    const char *adapter;       /* PEFT folder whose settings replace the job's; NULL */
    const char *resume;        /* checkpoint that a run goes on from; NULL */
    ql_weights weights;
    ql_place place;            /* where it is to run */
    int anyway;                /* 1: one that does not fit, too: to be shown */
} ql_task_inputs;

typedef struct {
    ql_job *job;
    ql_args args;
    ql_model *model;
    ql_lora *lora;
    ql_dataset *train, *eval;
    ql_steps steps;
    int32_t pad_id;
    ql_place place;
    ql_spec spec;
    ql_reasons why;            /* of the planner's choices */
    char lacks[512];           /* anyway: the refusal of what does not fit; else "" */
} ql_task;

ql_status ql_task_open(const ql_task_inputs *in, ql_task **out);
void ql_task_close(ql_task *t);
/* Rates of all steps (spec.steps). Caller frees. */
ql_status ql_task_lr(const ql_task *t, float **out);
/* The rate of executed step `step` (from 0) before its rounding to fp32: what records show. */
double ql_task_lr_at(const ql_task *t, int64_t step);
/* Whether ranks that hold `a` can run `b` without placing anything again. */
int ql_task_same_model(const ql_task *a, const ql_task *b); /* model, adapters' table, dtypes */
int ql_task_same_place(const ql_task *a, const ql_task *b);

#endif
