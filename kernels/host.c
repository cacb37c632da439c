/* What the host says of itself in files of its kernel. Those have no size: they are read line by line. */
#include "kernels/dev.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

int64_t ql_host_number(const char *path, const char *key)
{
    char line[256];
    long long v = -1;
    size_t n = strlen(key);
    FILE *f = fopen(path, "re");
    if (!f) return -1;
    while (v < 0 && fgets(line, sizeof line, f))
        if (strncmp(line, key, n) == 0) sscanf(line + n, " %lld", &v);
    fclose(f);
    return v;
}

/* A control group's files, second version and first. */
typedef struct {
    const char *limit, *used, *stat, *inactive, *active;
} group_files;

static int64_t number(const char *root, const char *file, const char *key)
{
    char path[4096];
    return snprintf(path, sizeof path, "%s%s", root, file) < (int)sizeof path ? ql_host_number(path, key) : -1;
}

void ql_host_memory(const char *root, int64_t *total, int64_t *available)
{
    static const group_files groups[] = {
        {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat", "inactive_file ", "active_file "},
        {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes", "/sys/fs/cgroup/memory/memory.stat",
         "total_inactive_file ", "total_active_file "}};
    int64_t all = number(root, "/proc/meminfo", "MemTotal:"), free = number(root, "/proc/meminfo", "MemAvailable:");
    *total = all < 0 ? (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE) : all * 1024;
    *available = free < 0 ? *total : free * 1024;
    for (size_t i = 0; i < sizeof groups / sizeof *groups; i++) {
        const group_files *g = &groups[i];
        int64_t limit = number(root, g->limit, ""), used = number(root, g->used, "");
        if (limit <= 0 || used < 0) continue;
        /* The page cache is counted as used, but gives way. */
        int64_t cache = ql_max64(0, number(root, g->stat, g->inactive)) + ql_max64(0, number(root, g->stat, g->active));
        *total = ql_min64(*total, limit);
        *available = ql_min64(*available, ql_max64(0, limit - ql_max64(0, used - cache)));
    }
}
