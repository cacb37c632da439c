/* Text from the model as it is on the devices. */
#ifndef QL_GENERATE_H
#define QL_GENERATE_H

#include "core/train.h"

ql_status ql_generate_run(ql_worker *w, const json_t *command, json_t **out);

#endif
