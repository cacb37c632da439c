#ifndef QL_BENCH_MEMORY_H
#define QL_BENCH_MEMORY_H

#include <stdint.h>
#include <stdio.h>

/* Memory of this process that is no file's: what a stream must not grow. */
static int64_t private_bytes(void)
{
    char line[256];
    long kib = 0;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "RssAnon: %ld", &kib) == 1) break;
    if (f) fclose(f);
    return (int64_t)kib * 1024;
}

#endif
