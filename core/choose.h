/* The planner: picks store, activations and schedule from memory, and says why. Everything it may pick gives the same bits. */
#ifndef QL_CHOOSE_H
#define QL_CHOOSE_H

#include "core/args.h"
#include "core/memory.h"

/* Where a job is to run. */
typedef struct {
    int world;
    int64_t capacity;          /* bytes of the smallest device for the arena */
    int64_t host;              /* bytes of host memory for offloading, all ranks together */
    int arch;                  /* compute capability of the weakest device; 0 CPU */
    int bf16;                  /* all devices have it */
} ql_place;

enum { QL_REASONS = 8, QL_REASON_TEXT = 200 };
typedef struct {
    int n;
    char text[QL_REASONS][QL_REASON_TEXT];
} ql_reasons;

/* Fills spec->choice (store, keep, save, schedule) for the job's settings; those left to auto are chosen so that it fits, and then
 * is fast: fewest bytes moved, then fewest layers recomputed, then layers kept dequantised. QL_ENOMEM with the nearest settings that fit
 * when nothing does; the choice is then the smallest there is. */
ql_status ql_choose(ql_spec *spec, const ql_args *args, const ql_place *place, ql_reasons *why);

#endif
