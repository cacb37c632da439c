/* Reads a mapped file ahead of its use. A copy to a device that meets a page which is not there waits for that page alone; here a thread
 * asks for large pieces in the order of their use, so that they come as fast as the disk gives them while the layer before is copied. */
#ifndef QL_AHEAD_H
#define QL_AHEAD_H

#include "kernels/base.h"

typedef struct {
    const void *at;
    int64_t bytes;
    int64_t turn;              /* when it is used: the layer, say; never less than the range before it */
} ql_ahead_range;

typedef struct ql_ahead ql_ahead;

/* Ranges of the first turns begin at once. The ranges are copied; the mapping must outlive the reader. */
ql_status ql_ahead_open(const ql_ahead_range *range, int64_t count, ql_ahead **out);
/* This turn is at work now: those soon after it may come. */
void ql_ahead_turn(ql_ahead *a, int64_t turn);
void ql_ahead_close(ql_ahead *a);

#endif
