#include "core/file.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct ql_file {
    int fd;
    bool committed;
    char path[QL_PATH_MAX], temp[QL_PATH_MAX];
};

ql_status ql_path_join(char out[QL_PATH_MAX], const char *dir, const char *name)
{
    size_t n = strlen(dir);
    const char *sep = n == 0 || dir[n - 1] == '/' ? "" : "/";
    if (snprintf(out, QL_PATH_MAX, "%s%s%s", dir, sep, name) >= QL_PATH_MAX)
        QL_FAIL(QL_EINVAL, "path too long (at most %d bytes): %.200s…/%.200s", QL_PATH_MAX - 1, dir, name);
    return QL_OK;
}

bool ql_path_is_dir(const char *path)
{
    struct stat s;
    return stat(path, &s) == 0 && S_ISDIR(s.st_mode);
}

bool ql_path_is_file(const char *path)
{
    struct stat s;
    return stat(path, &s) == 0 && S_ISREG(s.st_mode);
}

ql_status ql_path_mkdirs(const char *path)
{
    char p[QL_PATH_MAX];
    if (!path[0]) QL_FAIL(QL_EINVAL, "a folder with an empty name");
    QL_TRY(ql_path_join(p, path, ""));
    for (char *c = p + 1; *c; c++) {
        if (*c != '/') continue;
        *c = 0;
        int err = mkdir(p, 0777) != 0 ? errno : 0;
        if (err && !ql_path_is_dir(p)) QL_FAIL(QL_EIO, "cannot make the folder %s: %s", p, strerror(err));
        *c = '/';
    }
    return QL_OK;
}

static int remove_one(const char *path, const struct stat *s, int type, struct FTW *f)
{
    (void)s, (void)type, (void)f;
    return remove(path);
}

bool ql_path_remove(const char *path)
{
    return nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS) == 0 || errno == ENOENT;
}

ql_status ql_path_sync(const char *folder)
{
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) QL_FAIL(QL_EIO, "cannot open the folder %s: %s", folder, strerror(errno));
    /* EINVAL: a file system that cannot sync folders; the data itself is synced. */
    int rc = fsync(fd), err = errno;
    close(fd);
    if (rc != 0 && err != EINVAL) QL_FAIL(QL_EIO, "cannot sync the folder %s: %s", folder, strerror(err));
    return QL_OK;
}

static ql_status read_all(int fd, const char *path, char *buf, size_t n)
{
    for (size_t got = 0; got < n;) {
        ssize_t k = read(fd, buf + got, n - got);
        if (k < 0 && errno == EINTR) continue;
        if (k < 0) QL_FAIL(QL_EIO, "cannot read %s: %s", path, strerror(errno));
        if (k == 0) QL_FAIL(QL_EIO, "%s became shorter while it was read", path);
        got += (size_t)k;
    }
    return QL_OK;
}

ql_status ql_file_read(const char *path, int64_t max, char **out, size_t *size)
{
    ql_status st = QL_OK;
    char *buf = NULL;
    struct stat s;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) QL_FAIL(QL_EIO, "cannot open %s: %s", path, strerror(errno));
    if (fstat(fd, &s) != 0 || !S_ISREG(s.st_mode)) {
        st = ql_fail(QL_EINVAL, "%s is not a regular file", path);
        goto out;
    }
    if (s.st_size > max) {
        st = ql_fail(QL_EINVAL, "%s has %lld bytes; at most %lld are accepted", path,
                     (long long)s.st_size, (long long)max);
        goto out;
    }
    buf = malloc((size_t)s.st_size + 1);
    if (!buf) {
        st = ql_fail(QL_ENOMEM, "no memory for the %lld bytes of %s", (long long)s.st_size, path);
        goto out;
    }
    QL_GO(read_all(fd, path, buf, (size_t)s.st_size));
    buf[s.st_size] = 0;
    *out = buf, *size = (size_t)s.st_size;
    buf = NULL;
out:
    free(buf);
    close(fd);
    return st;
}

ql_status ql_file_create(const char *path, ql_file **out)
{
    ql_file *f = calloc(1, sizeof *f);
    if (!f) QL_FAIL(QL_ENOMEM, "no memory for writing %s", path);
    f->fd = -1;
    if (snprintf(f->path, sizeof f->path, "%s", path) >= QL_PATH_MAX ||
        snprintf(f->temp, sizeof f->temp, "%s.%ld.tmp", path, (long)getpid()) >= QL_PATH_MAX) {
        free(f);
        QL_FAIL(QL_EINVAL, "path too long (at most %d bytes): %.200s…", QL_PATH_MAX - 1, path);
    }
    f->fd = open(f->temp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (f->fd < 0) {
        ql_status st = ql_fail(QL_EIO, "cannot create %s: %s", f->temp, strerror(errno));
        free(f);
        return st;
    }
    *out = f;
    return QL_OK;
}

ql_status ql_file_write_at(ql_file *f, const void *data, size_t n, off_t at)
{
    const char *p = data;
    while (n) {
        ssize_t k = pwrite(f->fd, p, n, at);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) {
            int err = k < 0 ? errno : ENOSPC;
            bool full = err == ENOSPC || err == EDQUOT || err == EFBIG;
            QL_FAIL(QL_EIO, "cannot write %zu bytes at %lld of %s: %s%s", n, (long long)at, f->path, strerror(err),
                    full ? ": make room there, or choose another folder" : "");
        }
        p += k, at += k, n -= (size_t)k;
    }
    return QL_OK;
}

/* The rename itself must reach the disk too: fsync of the folder that holds the name. */
static ql_status sync_folder(const char *path)
{
    char dir[QL_PATH_MAX];
    snprintf(dir, sizeof dir, "%s", path);
    char *slash = strrchr(dir, '/');
    if (!slash) snprintf(dir, sizeof dir, ".");
    else if (slash == dir) dir[1] = 0;
    else *slash = 0;
    return ql_path_sync(dir);
}

ql_status ql_file_commit(ql_file *f)
{
    if (fsync(f->fd) != 0) QL_FAIL(QL_EIO, "cannot sync %s: %s", f->temp, strerror(errno));
    if (rename(f->temp, f->path) != 0)
        QL_FAIL(QL_EIO, "cannot rename %s to %s: %s", f->temp, f->path, strerror(errno));
    f->committed = true;
    return sync_folder(f->path);
}

void ql_file_close(ql_file *f)
{
    if (!f) return;
    if (f->fd >= 0) close(f->fd);
    if (!f->committed) unlink(f->temp);
    free(f);
}

ql_status ql_file_save(const char *path, const void *data, size_t n)
{
    ql_file *f = NULL;
    ql_status st = QL_OK;
    QL_GO(ql_file_create(path, &f));
    QL_GO(ql_file_write_at(f, data, n, 0));
    QL_GO(ql_file_commit(f));
out:
    ql_file_close(f);
    return st;
}

ql_status ql_file_copy(const char *from, const char *to, const char *const *names, size_t n)
{
    char a[QL_PATH_MAX], b[QL_PATH_MAX];
    for (size_t i = 0; i < n; i++) {
        char *text = NULL;
        size_t size = 0;
        QL_TRY(ql_path_join(a, from, names[i]));
        QL_TRY(ql_path_join(b, to, names[i]));
        if (!ql_path_is_file(a)) continue;
        QL_TRY(ql_file_read(a, 1 << 30, &text, &size));
        ql_status st = ql_file_save(b, text, size);
        free(text);
        QL_TRY(st);
    }
    return QL_OK;
}
