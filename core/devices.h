/* What this machine has: devices asked for by a process that ends afterwards, so that the asker never opens one. */
#ifndef QL_DEVICES_H
#define QL_DEVICES_H

#include "core/choose.h"
#include "kernels/comm.h"

#include <jansson.h>

/* [{"name","id","backend","index","arch","total","free","driver","libs","peers":[…]}…], cuda devices first, then "cpu". `missing` says why
 * there is no cuda; "" when there is. GPUs have {"pcie":{"generation","width","max_generation","max_width"},"links":[{"to","path",
 * "nvlinks","nvlink_gbs","p2p","why"}…]}: how they are joined to those after them. */
ql_status ql_devices_probe(const char *cuda_library, json_t **out, char *missing, size_t size);
/* The devices of a job ("auto", "cuda:0,1", "cpu:4") out of a probe: backend, indices, and the place for the planner: what a GPU has free
 * or the user lets it have, less what the driver and libraries are going to take, more where GPUs are each other's "peers" and
 * NCCL_P2P_DISABLE is not set. */
ql_status ql_devices_pick(const ql_args *a, const json_t *probe, const char *missing, ql_place *place, char backend[16],
                          int device[QL_MAX_WORLD]);
int64_t ql_host_free(void); /* bytes that may still be taken: MemAvailable, or less where a control group says so */

#endif
