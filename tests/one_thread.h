/* Programs that fork ranks: BLAS must have no threads before. */
#ifndef QL_TEST_ONE_THREAD_H
#define QL_TEST_ONE_THREAD_H

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Starts the program again where its environment allows more; the library reads it when it is loaded. */
static void one_blas_thread(char **argv)
{
    const char *threads = getenv("OPENBLAS_NUM_THREADS");
    if (threads && strcmp(threads, "1") == 0) return;
    setenv("OPENBLAS_NUM_THREADS", "1", 1);
    execv("/proc/self/exe", argv);
}

#endif
