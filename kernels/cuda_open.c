/* Opens the CUDA backend's shared object at run time, so that one build runs with and without a GPU. */
#include "kernels/comm.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define LIBRARY "libqlora-cuda.so"

static char search_dirs[8192];

void ql_backend_cuda_search(const char *dirs)
{
    snprintf(search_dirs, sizeof search_dirs, "%s", dirs ? dirs : "");
}

/* The library beside the running program or one folder up (tests); "" when that is not known or not there. */
static void beside_program(char *path, size_t size)
{
    char self[4096];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    self[n > 0 ? n : 0] = path[0] = 0;
    for (int up = 0; up < 2; up++) {
        char *slash = strrchr(self, '/');
        if (!slash) return;
        *slash = 0;
        if ((size_t)snprintf(path, size, "%s/" LIBRARY, self) < size && access(path, R_OK) == 0) return;
        path[0] = 0;
    }
}

/* What the loader's message means, and what to do. */
static const char *advice(const char *why)
{
    if (strstr(why, "libcuda.so"))
        return "the NVIDIA driver is missing: this machine has no GPU, or the driver is not installed";
    if (strstr(why, "libcublas")) return "cuBLAS is missing: install the CUDA toolkit's libraries, or pip's nvidia-cublas";
    if (strstr(why, "libnccl")) return "NCCL is missing: install libnccl2, or pip's nvidia-nccl, or set NCCL_HOME at build time";
    if (strstr(why, "libcudart")) return "the CUDA runtime is missing: install the CUDA toolkit's libraries";
    if (strstr(why, LIBRARY)) return "this build has no CUDA backend: make CUDA=1, or put the library beside the program";
    return "the library does not load here";
}

ql_status ql_backend_cuda(const char *library, const ql_backend **out)
{
    char path[4096];
    beside_program(path, sizeof path);
    if (!library) library = path[0] ? path : LIBRARY;
    void *so = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!so) {
        const char *why = dlerror();
        QL_FAIL(QL_ENOSUP, "cuda: %s (%s)", advice(why ? why : ""), why ? why : library);
    }
    /* Stays open for the life of the process: the driver's threads may run its code. */
    void *symbol = dlsym(so, QL_BACKEND_ENTRY);
    if (!symbol) {
        dlclose(so);
        QL_FAIL(QL_ENOSUP, "cuda: %s is no backend of this program: it lacks %s", library, QL_BACKEND_ENTRY);
    }
    void *search = dlsym(so, QL_BACKEND_SEARCH);
    if (search) {
        void (*set)(const char *);
        memcpy(&set, &search, sizeof set);
        set(search_dirs);
    }
    ql_backend_entry entry;
    memcpy(&entry, &symbol, sizeof entry); /* ISO C has no cast from object to function pointers */
    return entry(out);
}
