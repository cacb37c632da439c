/* The adapters of a job: fresh ones by its settings, or those of a PEFT folder that it starts from (`adapter`). */
#ifndef QL_LORA_JOB_H
#define QL_LORA_JOB_H

#include "core/lora.h"
#include "core/qlora.h"

/* The table. `folder` stands in for the job's `adapter` where a run goes on (its checkpoint has the same table); NULL otherwise. An
 * adapter's own r, lora_alpha, target_modules … hold; such a setting of the job that differs is refused by name. lora_dropout is
 * the job's where it is set: it is no part of the weights. */
ql_status ql_lora_of_job(const ql_job *job, const char *folder, const ql_config *m, ql_lora **out) QL_MUST_USE;
/* What a run begins with: the values of the job's `adapter`, or fresh ones from its seed. */
ql_status ql_lora_first(const ql_lora *l, const ql_job *job, float *flat) QL_MUST_USE;

#endif
