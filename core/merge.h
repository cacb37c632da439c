/* An adapter put into its model: 16-bit safetensors that need no adapter any more. */
#ifndef QL_MERGE_H
#define QL_MERGE_H

#include "core/file.h"

#include <jansson.h>

/* Called a few times a second; a status other than QL_OK stops. done, total: weights. */
typedef ql_status (*ql_merge_tick)(void *ctx, const char *what, int64_t done, int64_t total);

/* {"model":FOLDER,"adapter":FOLDER,"original":FOLDER|null,"out":FOLDER,"dtype":"auto"|"float16"|"bfloat16"}. Every adapted W becomes
 * round(W + s·B A), the sum in fp32 and rounded once. W is the original's where one is given, else the model's own (its 4-bit weights
 * decoded). Tensor by tensor; nothing is visible under its name before it is whole. {"path","decoded","bytes","tensors","merged","dtype"} */
ql_status ql_merge(const json_t *command, ql_merge_tick tick, void *ctx, json_t **out) QL_MUST_USE;

#endif
