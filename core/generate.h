/* Text from the model as it is on the devices. */
#ifndef QL_GENERATE_H
#define QL_GENERATE_H

#include "core/train.h"

/* In the supervisor: checks a generate command and puts the prompts' token ids into it ("ids", "stop"), so that what is wrong
 * with a prompt costs no device anything. */
ql_status ql_generate_prepare(const ql_job *job, json_t *command);
/* On every rank; rank 0 says the tokens. */
ql_status ql_generate_run(ql_worker *w, const json_t *command, json_t **out);

#endif
