/* What the writer and the reader of checkpoints share. */
#ifndef QL_CKPT_NAMES_H
#define QL_CKPT_NAMES_H

#include "core/ckpt.h"

enum {
    QL_CKPT_NAME = 160,
    QL_CKPT_PARTS = 4,       /* of one adapter tensor */
    QL_CKPT_BLOCK = 256,     /* 8-bit states per scale */
    QL_CKPT_SMALL = 4096,    /* elements below which a tensor's states stay 32-bit */
    QL_CKPT_VERSION = 1
};

/* Adapter tensor i of 2 · lora->count (A and B of each target in turn) as a run of the flat vector. */
typedef struct {
    int64_t at, len;         /* padded */
    int64_t rows, cols;
    char name[QL_CKPT_NAME]; /* PEFT's */
} ql_ckpt_tensor;
void ql_ckpt_tensor_at(const ql_lora *l, int64_t i, ql_ckpt_tensor *out);

/* One tensor of the file and where its bytes are in the state. F32 states have the tensor's shape; 8-bit ones are padded. */
typedef struct {
    char name[QL_CKPT_NAME];
    ql_dtype dtype;
    int ndim;
    int64_t shape[2];
    void *data;              /* NULL: the state has no such buffer */
    int64_t bytes, padded;   /* padded: bytes in the state, the rest is zero */
} ql_ckpt_part;
/* Returns how many parts tensor t has. */
int ql_ckpt_parts(const ql_ckpt_state *s, const ql_ckpt_tensor *t, ql_ckpt_part out[QL_CKPT_PARTS]);

/* {"arch", "hidden", …}: what makes a model the same. New reference. */
json_t *ql_ckpt_model(const ql_config *c);
const char *ql_ckpt_optimizer_name(ql_ckpt_optimizer o);

/* ".checkpoint-N.old" without checkpoint-N: a save was killed between two renames, and the old one comes back. Only for the process
 * that writes checkpoints, or when none does. */
void ql_ckpt_mend(const char *run);
/* What a killed save or removal left, of any step, goes. Only for the process that writes checkpoints. */
void ql_ckpt_sweep(const char *run);

#endif
