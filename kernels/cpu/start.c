/* How this process' BLAS is loaded: it reads its wishes from the environment at that moment and never again. */
#include "kernels/comm.h"

#include <cblas.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A BLAS that does not know a processor newer than itself takes kernels for one of twenty years ago, several times slower than those
 * that it has. The name of better ones; NULL: its own choice stands. */
static const char *better_kernels(void)
{
#ifdef __x86_64__
    const char *taken = openblas_get_corename();
    if (strcmp(taken, "Prescott") && strcmp(taken, "Barcelona")) return NULL;
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return NULL;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512cd"))
        return "Haswell";
    return __builtin_cpu_supports("avx512bf16") ? "Cooperlake" : "SkylakeX";
#else
    return NULL;
#endif
}

void ql_backend_cpu_start(char **argv)
{
    const char *threads = getenv("OPENBLAS_NUM_THREADS"), *kernels = getenv("OPENBLAS_CORETYPE") ? NULL : better_kernels();
    if (threads && strcmp(threads, "1") == 0 && !kernels) return;
    setenv("OPENBLAS_NUM_THREADS", "1", 1);
    if (kernels) setenv("OPENBLAS_CORETYPE", kernels, 1);
    execv("/proc/self/exe", argv);
}
