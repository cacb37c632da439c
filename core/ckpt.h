/* Checkpoints: checkpoint-N folders that are whole or not there, and the way back from one. An ordinary PEFT folder
 * (adapter_model.safetensors in F32, adapter_config.json, tokenizer files), trainer_state.json, and what a bit-exact resume needs:
 *
 *   optimizer.safetensors  <tensor>.m, <tensor>.v: F32 of the tensor's own shape; or U8 codes of the padded tensor with
 *                          <tensor>.m.absmax, <tensor>.v.absmax per 256. By tensor: any world size and store can read them.
 *   engine_state.json      {"version", "step", "optimizer", "scaler": {…}, "data": {…}, "model": {…}, "history": {…}, "job": {…}}
 *
 * Everything works on host memory that the engine hands over. */
#ifndef QL_CKPT_H
#define QL_CKPT_H

#include "core/file.h"
#include "core/history.h"
#include "core/lora.h"

typedef enum { QL_CKPT_NONE, QL_CKPT_F32, QL_CKPT_8BIT } ql_ckpt_optimizer;

/* The whole flat vectors, all ranks' shards together, lora->elements long. */
typedef struct {
    float *adapters;
    ql_ckpt_optimizer optimizer; /* NONE: save_only_model, cannot be resumed */
    float *m, *v;     /* F32. 8BIT: only tensors under 4,096 elements, at their flat places; NULL if there are none */
    uint8_t *m8, *v8; /* 8BIT: codes (elements) */
    float *m2, *v2;   /* 8BIT: scales (elements / 256) */
    ql_ctl ctl;       /* loss_scale, steps, growth, skips */
} ql_ckpt_state;

/* What a checkpoint belongs to. */
typedef struct {
    const ql_lora *lora;
    const ql_config *model;
    const ql_job *job;
    const ql_args *args;
    const ql_steps *steps;
    const char *tokenizer; /* folder with tokenizer files, copied as they are; NULL: none */
} ql_ckpt_of;

/* Writes run/checkpoint-N for N = the history's steps, and tells the history. path: where it is. On failure (disk full) earlier
 * checkpoints are untouched, and nothing of this one is left. */
ql_status ql_ckpt_save(const char *run, const ql_ckpt_of *of, const ql_ckpt_state *s, ql_history *h, char path[QL_PATH_MAX]) QL_MUST_USE;

/* ---- which there are (whole ones only; 0 or NULL where there is none) ------------------------------ */

typedef struct {
    int64_t step;
    bool resumable; /* has optimizer state */
    char path[QL_PATH_MAX];
} ql_ckpt_entry;
/* By step. Caller frees *out. A folder that is not there has none. */
ql_status ql_ckpt_list(const char *run, ql_ckpt_entry **out, int *n) QL_MUST_USE;
/* which: a checkpoint, or a run's folder: its latest that can be resumed. Mends (ckpt_names.h). */
ql_status ql_ckpt_find(const char *which, char path[QL_PATH_MAX]) QL_MUST_USE;

/* Keeps the newest `limit` (0: all), and always the newest and `best` (a path; NULL: none), as transformers does. newest: the step that was
 * just saved; checkpoints beyond it are of a course that was left by resuming an earlier one, and go first. */
ql_status ql_ckpt_rotate(const char *run, int64_t limit, const char *best, int64_t newest) QL_MUST_USE;
/* save_total_limit 1 at the end of a run: only the best is left. */
ql_status ql_ckpt_keep_only(const char *run, const char *best) QL_MUST_USE;

/* ---- resume --------------------------------------------------------------------------------------- */

/* Fills s: its buffers are the caller's, its `optimizer` says what is expected. Continues h (new, empty). A checkpoint of another
 * model, adapter or optimizer is refused by name. notes: array of what differs and is only worth a word (learning_rate: 2e-4 in
 * the checkpoint, 1e-4 now). */
ql_status ql_ckpt_load(const char *path, const ql_ckpt_of *of, ql_ckpt_state *s, ql_history *h, json_t **notes) QL_MUST_USE;

#endif
