#ifndef QL_SESSION_H
#define QL_SESSION_H

#include "kernels/base.h"

typedef struct {
    int fd;                    /* commands in, events out */
    const char *cuda_library;  /* path of libqlora-cuda.so; NULL: beside the program */
} ql_session_setup;

/* Serves commands until the other side closes. */
ql_status ql_session_run(const ql_session_setup *set);

#endif
