/* ops_cuda: the same test without the CPU backend and its BLAS, for machines that have a GPU and
 * little else. */
#include "tests/ops/ops.h"

#include <string.h>

const char *const test_default[] = {"cuda", NULL};

void test_start(char **argv)
{
    (void)argv;
}

ql_status test_backend(const char *name, const ql_backend **out)
{
    if (strcmp(name, "cuda") == 0) return ql_backend_cuda(NULL, out);
    QL_FAIL(QL_ENOSUP, "this program has the cuda backend only");
}
