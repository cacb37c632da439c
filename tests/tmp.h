/* A temporary folder per test program, removed at its end, and small files in it. */
#ifndef QL_TEST_TMP_H
#define QL_TEST_TMP_H

#include "core/file.h"
#include "tests/test.h"

#include <ftw.h>
#include <sys/stat.h>
#include <unistd.h>

static char tmp_root[QL_PATH_MAX];
static long tmp_owner;

static inline int tmp_remove(const char *path, const struct stat *s, int type, struct FTW *f)
{
    (void)s, (void)type, (void)f;
    return remove(path);
}

static inline void tmp_clean(void)
{
    if (tmp_owner == (long)getpid()) nftw(tmp_root, tmp_remove, 16, FTW_DEPTH | FTW_PHYS);
}

/* The path of `name` in a fresh folder of this program; slots rotate, so a few are valid at once.
 */
static inline const char *tmp_path(const char *name)
{
    static char paths[16][QL_PATH_MAX];
    static int next;
    if (!tmp_root[0]) {
        const char *t = getenv("TMPDIR");
        snprintf(tmp_root, sizeof tmp_root, "%s/qlora-test-XXXXXX", t ? t : "/tmp");
        if (!mkdtemp(tmp_root)) perror("mkdtemp"), exit(99);
        tmp_owner = (long)getpid();
        atexit(tmp_clean);
    }
    char *p = paths[next++ % 16];
    if (ql_path_join(p, tmp_root, name) != QL_OK) exit(99);
    return p;
}

/* An empty folder of that name. */
static inline const char *tmp_dir(const char *name)
{
    const char *p = tmp_path(name);
    nftw(p, tmp_remove, 16, FTW_DEPTH | FTW_PHYS);
    if (ql_path_mkdirs(p) != QL_OK) exit(99);
    return p;
}

static inline void tmp_write(const char *path, const void *data, size_t n)
{
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(data, 1, n, f) != n || fclose(f) != 0) perror(path), exit(99);
}

static inline void tmp_text(const char *dir, const char *name, const char *text)
{
    char p[QL_PATH_MAX];
    if (ql_path_join(p, dir, name) != QL_OK) exit(99);
    tmp_write(p, text, strlen(text));
}

/* A safetensors file from its header's text and `data` bytes of zeros; header_size < 0: the true
 * one. */
static inline void tmp_safetensors(const char *path, const char *header, long long header_size,
                                   size_t data)
{
    size_t n = strlen(header);
    unsigned long long h = header_size < 0 ? n : (unsigned long long)header_size;
    char *buf = calloc(1, 8 + n + data);
    if (!buf) exit(99);
    for (int i = 0; i < 8; i++) buf[i] = (char)(h >> (8 * i) & 0xff);
    memcpy(buf + 8, header, n);
    tmp_write(path, buf, 8 + n + data);
    free(buf);
}

#endif
