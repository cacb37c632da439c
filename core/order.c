/* A data order that is given, line by line. */
#include "core/file.h"
#include "core/sampler.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

/* The number on a line of digits; -1: none. */
static int64_t number(const char *p, size_t n)
{
    int64_t v = 0;
    while (n && isspace((unsigned char)p[n - 1])) n--;
    while (n && isspace((unsigned char)*p)) p++, n--;
    if (!n || n > 10) return -1;
    for (size_t i = 0; i < n; i++) {
        if (!isdigit((unsigned char)p[i])) return -1;
        v = v * 10 + (p[i] - '0');
    }
    return v;
}

ql_status ql_sampler_file(const char *path, int64_t epoch, int64_t n, int32_t *order)
{
    char *text = NULL;
    size_t size = 0, at = 0;
    int64_t lines = 0, line = 0;
    ql_status st = QL_OK;
    QL_TRY(ql_file_read(path, (int64_t)1 << 30, &text, &size));
    for (size_t i = 0; i < size; i++) lines += text[i] == '\n';
    lines += size && text[size - 1] != '\n';
    if (!lines) QL_GO(ql_fail(QL_EINVAL, "order_file %s is empty", path));
    for (int64_t skip = epoch % lines * (n % lines) % lines; skip; skip--) at += strcspn(text + at, "\n") + 1, line++;
    for (int64_t i = 0; i < n; i++, line++) {
        if (at >= size) at = 0, line = 0;
        size_t len = strcspn(text + at, "\n");
        int64_t v = number(text + at, len);
        if (v < 0 || v >= n)
            QL_GO(ql_fail(QL_EINVAL, "order_file %s line %lld: '%.*s' is no sample's number from 0 to %lld", path, (long long)line + 1,
                          (int)(len < 40 ? len : 40), text + at, (long long)n - 1));
        order[i] = (int32_t)v;
        at += len + 1;
    }
out:
    free(text);
    return st;
}
