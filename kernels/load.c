/* Opens the CUDA backend, a shared object, at run time: one build runs with and without a GPU. */
#include "kernels/comm.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define LIBRARY "libqlora-cuda.so"

static char search[8192];

void ql_backend_cuda_search(const char *dirs)
{
    snprintf(search, sizeof search, "%s", dirs ? dirs : "");
}

/* Beside the program, one folder up (tests), then the library path. */
static void *open_beside(const char *library)
{
    static const char *const places[] = {"%.*s/" LIBRARY, "%.*s/../" LIBRARY};
    char self[PATH_MAX], path[PATH_MAX + sizeof LIBRARY + 8];
    if (library) return dlopen(library, RTLD_NOW | RTLD_LOCAL);
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    for (size_t i = 0; n > 0 && i < sizeof places / sizeof *places; i++) {
        self[n] = 0;
        const char *slash = strrchr(self, '/');
        if (!slash) break;
        snprintf(path, sizeof path, places[i], (int)(slash - self), self);
        if (access(path, R_OK) == 0) return dlopen(path, RTLD_NOW | RTLD_LOCAL);
    }
    return dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
}

static void *symbol(void *lib, const char *name, size_t bytes, void *out)
{
    void *p = dlsym(lib, name);
    if (p) memcpy(out, &p, bytes);
    return p;
}

ql_status ql_backend_cuda(const char *library, const ql_backend **out)
{
    ql_backend_entry entry;
    void (*set_search)(const char *);
    void *lib = open_beside(library);
    if (!lib) QL_FAIL(QL_ENOSUP, "cuda: %s cannot be opened: %s", library ? library : LIBRARY, dlerror());
    if (!symbol(lib, QL_BACKEND_ENTRY, sizeof entry, &entry) ||
        !symbol(lib, QL_BACKEND_SEARCH, sizeof set_search, &set_search)) {
        ql_status st = ql_fail(QL_ENOSUP, "cuda: %s", dlerror());
        dlclose(lib);
        return st;
    }
    set_search(search);
    return entry(out);
}
