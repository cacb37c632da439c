/* Any bytes as a .safetensors file: it opens, and then every byte of every tensor can be read, or
 * it fails with a text. */
#include "core/safetensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static unsigned char sum;

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int fd = -1;
    static char path[64];
    ql_st *st = NULL;
    if (fd < 0) {
        fd = memfd_create("fuzz", MFD_CLOEXEC);
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    if (ftruncate(fd, 0) != 0 || pwrite(fd, data, size, 0) != (ssize_t)size) abort();
    ql_error_clear();
    if (ql_st_open(path, &st) != QL_OK) {
        if (!ql_error()[0] || st) abort();
        return 0;
    }
    int64_t total = 0;
    for (int64_t i = 0; i < ql_st_count(st); i++) {
        const ql_st_tensor *t = ql_st_at(st, i);
        const unsigned char *p = t->data;
        for (int64_t b = 0; b < t->bytes; b++) sum = (unsigned char)(sum + p[b]);
        if (ql_st_find(st, t->name) != t) abort();
        total += t->bytes;
    }
    if (total > (int64_t)size) abort();
    ql_st_close(st);
    return 0;
}
