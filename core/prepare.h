/* From a job's data settings to tokenised files that every rank maps. */
#ifndef QL_PREPARE_H
#define QL_PREPARE_H

#include "core/data.h"
#include "core/qlora.h"

typedef struct {
    char train[4096], eval[4096]; /* tokenised; "" none */
} ql_prepared;

/* Called every 100 ms or so while text is being tokenised; a status other than QL_OK stops it. */
typedef ql_status (*ql_prepare_tick)(void *ctx, const char *what, int64_t done, int64_t total);

/* Tokenises what is not cached under cache_dir. */
ql_status ql_prepare(const ql_job *job, const char *cache_dir, ql_prepare_tick tick, void *ctx, ql_prepared *out);
/* The training set itself, for reports. tok is opened for it (close both). */
ql_status ql_prepare_train(const ql_job *job, const char *cache_dir, ql_tok **tok, ql_dataset **out);

#endif
