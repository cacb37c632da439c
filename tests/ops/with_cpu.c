#include "tests/ops/ops.h"

#include <string.h>

const char *const test_default[] = {"cpu", "null", NULL};

void test_start(char **argv)
{
    ql_backend_cpu_start(argv);
}

ql_status test_backend(const char *name, const ql_backend **out)
{
    if (strcmp(name, "cuda") == 0) return ql_backend_cuda(NULL, out);
    *out = strcmp(name, "null") == 0 ? ql_backend_null() : ql_backend_cpu();
    return QL_OK;
}
