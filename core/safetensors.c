/* Reading: one mapping per file, one table of all tensors sorted by name, a binary search. */
#include "core/safetensors.h"

#include "core/file.h"
#include "core/hash.h"
#include "core/json.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { HEADER_MAX = 100000000, NAME_MAX_LEN = 1024, FILES_MAX = 100000 };
static const int64_t INDEX_MAX = 100000000;

typedef struct {
    char *path;
    const char *base; /* path without folders, for messages */
    char *map;
    size_t size;
    int64_t id[4]; /* device, inode, time of the last change in ns, size */
    json_t *header; /* owns the names of its tensors */
} st_file;

struct ql_st {
    st_file *file;
    int files;
    ql_st_tensor *tensor;
    int64_t count;
};

const char *ql_st_dtype_name(ql_dtype t)
{
    static const char *const names[QL_DTYPES] = {"F32", "F16", "BF16", "U8",
                                                 "I8",  "I32", "I64",  "BOOL"};
    return (unsigned)t < QL_DTYPES ? names[t] : "?";
}

const char *ql_st_shape(char *buf, size_t size, const int64_t *shape, int ndim)
{
    size_t n = 0;
    buf[0] = 0;
    for (int i = 0; i < ndim && n < size; i++)
        n += (size_t)snprintf(buf + n, size - n, "%s%lld", i ? ", " : "[", (long long)shape[i]);
    if (n < size) snprintf(buf + n, size - n, ndim ? "]" : "[]");
    return buf;
}

static ql_status map_file(st_file *f)
{
    struct stat s;
    int fd = open(f->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) QL_FAIL(QL_EIO, "cannot open %s: %s", f->path, strerror(errno));
    if (fstat(fd, &s) != 0 || !S_ISREG(s.st_mode)) {
        close(fd);
        QL_FAIL(QL_EINVAL, "%s is not a regular file", f->path);
    }
    if (s.st_size < 10) {
        close(fd);
        QL_FAIL(QL_EINVAL, "%s: too short for a safetensors file (%lld bytes)", f->base,
                (long long)s.st_size);
    }
    f->size = (size_t)s.st_size;
    f->id[0] = (int64_t)s.st_dev, f->id[1] = (int64_t)s.st_ino, f->id[3] = s.st_size;
    f->id[2] = s.st_mtim.tv_sec * 1000000000 + s.st_mtim.tv_nsec;
    void *p = mmap(NULL, f->size, PROT_READ, MAP_PRIVATE, fd, 0);
    int err = errno;
    close(fd);
    if (p == MAP_FAILED) QL_FAIL(QL_EIO, "cannot map %s: %s", f->path, strerror(err));
    f->map = p;
    return QL_OK;
}

static ql_status read_dtype(const char *base, const char *name, const json_t *v, ql_dtype *out)
{
    const char *s = json_string_value(v);
    for (int i = 0; s && i < QL_DTYPES; i++) {
        if (strcmp(s, ql_st_dtype_name((ql_dtype)i)) == 0) {
            *out = (ql_dtype)i;
            return QL_OK;
        }
    }
    if (!s) QL_FAIL(QL_EINVAL, "%s: tensor '%s' has no dtype", base, name);
    QL_FAIL(QL_ENOSUP,
            "%s: tensor '%s' has dtype %.20s; supported: F32, F16, BF16, U8, I8, I32, I64, BOOL",
            base, name, s);
}

static ql_status read_shape(const char *base, const json_t *v, ql_st_tensor *t)
{
    size_t n = json_array_size(v);
    if (!json_is_array(v)) QL_FAIL(QL_EINVAL, "%s: tensor '%s' has no shape", base, t->name);
    if (n > QL_ST_DIMS)
        QL_FAIL(QL_ENOSUP, "%s: tensor '%s' has %zu dimensions; at most %d are supported", base,
                t->name, n, QL_ST_DIMS);
    t->ndim = (int)n;
    t->count = 1;
    for (size_t i = 0; i < n; i++) {
        const json_t *d = json_array_get(v, i);
        t->shape[i] = json_integer_value(d);
        if (!json_is_integer(d) || t->shape[i] < 0)
            QL_FAIL(QL_EINVAL, "%s: tensor '%s': bad dimension %s", base, t->name, ql_json_show(d));
        if (__builtin_mul_overflow(t->count, t->shape[i], &t->count))
            QL_FAIL(QL_EINVAL, "%s: tensor '%s': the product of its shape overflows", base,
                    t->name);
    }
    if (__builtin_mul_overflow(t->count, (int64_t)ql_dtype_size(t->dtype), &t->bytes))
        QL_FAIL(QL_EINVAL, "%s: tensor '%s': its size overflows", base, t->name);
    return QL_OK;
}

static ql_status read_tensor(const st_file *f, int number, int64_t data_at, const char *name,
                             const json_t *v, ql_st_tensor *t)
{
    const json_t *off = json_object_get(v, "data_offsets");
    const json_t *b = json_array_get(off, 0), *e = json_array_get(off, 1);
    int64_t begin = json_integer_value(b), end = json_integer_value(e);
    int64_t data_size = (int64_t)f->size - data_at;
    t->name = name;
    t->file = number;
    if (!json_is_object(v)) QL_FAIL(QL_EINVAL, "%s: '%s' is not a tensor entry", f->base, name);
    if (name[0] == 0 || strlen(name) > NAME_MAX_LEN)
        QL_FAIL(QL_EINVAL, "%s: a tensor name of %zu bytes", f->base, strlen(name));
    QL_TRY(read_dtype(f->base, name, json_object_get(v, "dtype"), &t->dtype));
    QL_TRY(read_shape(f->base, json_object_get(v, "shape"), t));
    if (json_array_size(off) != 2 || !json_is_integer(b) || !json_is_integer(e))
        QL_FAIL(QL_EINVAL, "%s: tensor '%s' needs data_offsets [begin, end]", f->base, name);
    if (begin < 0 || end < begin || end > data_size)
        QL_FAIL(QL_EINVAL,
                "%s: tensor '%s': data_offsets [%lld, %lld] lie outside the %lld bytes of data%s",
                f->base, name, (long long)begin, (long long)end, (long long)data_size,
                end > data_size ? ": the file is cut short, get it again" : "");
    if (end - begin != t->bytes)
        QL_FAIL(QL_EINVAL,
                "%s: tensor '%s': shape and dtype need %lld bytes, data_offsets span %lld", f->base,
                name, (long long)t->bytes, (long long)(end - begin));
    t->data = f->map + data_at + begin;
    return QL_OK;
}

static int by_data(const void *a, const void *b)
{
    const ql_st_tensor *x = a, *y = b;
    if (x->data != y->data) return x->data < y->data ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const ql_st_tensor *)a)->name, ((const ql_st_tensor *)b)->name);
}

/* The tensors must tile the data: no hole, no overlap, nothing behind the last. */
static ql_status check_tiling(const st_file *f, int64_t data_at, ql_st_tensor *t, int64_t n)
{
    const char *at = f->map + data_at;
    const char *prev = "the header";
    qsort(t, (size_t)n, sizeof *t, by_data);
    for (int64_t i = 0; i < n; i++) {
        const char *p = t[i].data;
        if (p < at)
            QL_FAIL(QL_EINVAL, "%s: tensors '%s' and '%s' overlap by %lld bytes", f->base, prev,
                    t[i].name, (long long)(at - p));
        if (p > at)
            QL_FAIL(QL_EINVAL, "%s: a hole of %lld bytes before tensor '%s'", f->base,
                    (long long)(p - at), t[i].name);
        at = p + t[i].bytes;
        prev = t[i].name;
    }
    if (at != f->map + f->size)
        QL_FAIL(QL_EINVAL, "%s: %lld bytes behind the last tensor belong to none", f->base,
                (long long)(f->map + f->size - at));
    return QL_OK;
}

static ql_status check_metadata(const st_file *f, json_t *meta)
{
    const char *key;
    json_t *v;
    if (!json_is_object(meta))
        QL_FAIL(QL_EINVAL, "%s: __metadata__ must map strings to strings", f->base);
    json_object_foreach(meta, key, v)
    {
        if (!json_is_string(v))
            QL_FAIL(QL_EINVAL, "%s: __metadata__ '%.60s' must be a string, found %s", f->base, key,
                    ql_json_show(v));
    }
    return QL_OK;
}

static ql_status parse_header(st_file *f, uint64_t *header_size)
{
    uint64_t n = 0;
    for (int i = 7; i >= 0; i--) n = n << 8 | (unsigned char)f->map[i];
    if (n > HEADER_MAX)
        QL_FAIL(QL_EINVAL, "%s: a header of %llu bytes; at most %d are allowed", f->base,
                (unsigned long long)n, HEADER_MAX);
    if (n > f->size - 8)
        QL_FAIL(QL_EINVAL,
                "%s: the header says %llu bytes, but only %zu follow: the file is cut short",
                f->base, (unsigned long long)n, f->size - 8);
    if (n < 2 || f->map[8] != '{')
        QL_FAIL(QL_EINVAL, "%s: the header does not start with '{': not a safetensors file",
                f->base);
    *header_size = n;
    return ql_json_parse(f->map + 8, (size_t)n, f->base, &f->header);
}

/* Appends the tensors of st->file[number]. */
static ql_status add_file(ql_st *st, int number)
{
    st_file *f = &st->file[number];
    const char *name;
    json_t *v;
    uint64_t n = 0;
    QL_TRY(map_file(f));
    QL_TRY(parse_header(f, &n));
    int64_t data_at = 8 + (int64_t)n, first = st->count;
    size_t room = (size_t)first + json_object_size(f->header) + 1;
    ql_st_tensor *grown = realloc(st->tensor, room * sizeof *grown);
    if (!grown) QL_FAIL(QL_ENOMEM, "no memory for the tensor table of %s", f->base);
    st->tensor = grown;
    json_object_foreach(f->header, name, v)
    {
        if (strcmp(name, "__metadata__") == 0) {
            QL_TRY(check_metadata(f, v));
            continue;
        }
        ql_st_tensor *t = &st->tensor[st->count];
        memset(t, 0, sizeof *t);
        QL_TRY(read_tensor(f, number, data_at, name, v, t));
        st->count++;
    }
    return check_tiling(f, data_at, st->tensor + first, st->count - first);
}

static ql_status add_path(ql_st *st, const char *dir, const char *name)
{
    char path[QL_PATH_MAX];
    if (dir)
        QL_TRY(ql_path_join(path, dir, name));
    else if (snprintf(path, sizeof path, "%s", name) >= QL_PATH_MAX)
        QL_FAIL(QL_EINVAL, "path too long: %.200s…", name);
    st_file *grown = realloc(st->file, (size_t)(st->files + 1) * sizeof *grown);
    if (!grown) QL_FAIL(QL_ENOMEM, "no memory for a table of %d files", st->files + 1);
    st->file = grown;
    st_file *f = &st->file[st->files];
    memset(f, 0, sizeof *f);
    f->path = strdup(path);
    if (!f->path) QL_FAIL(QL_ENOMEM, "no memory for a path");
    st->files++;
    const char *slash = strrchr(f->path, '/');
    f->base = slash ? slash + 1 : f->path;
    return add_file(st, st->files - 1);
}

static ql_status finish(ql_st *st)
{
    qsort(st->tensor, (size_t)st->count, sizeof *st->tensor, by_name);
    for (int64_t i = 1; i < st->count; i++) {
        const ql_st_tensor *a = &st->tensor[i - 1], *b = &st->tensor[i];
        if (strcmp(a->name, b->name) == 0)
            QL_FAIL(QL_EINVAL, "tensor '%s' is in both %s and %s", a->name, st->file[a->file].base,
                    st->file[b->file].base);
    }
    return QL_OK;
}

/* A shard is a plain name inside the folder. (The file itself may be a symbolic link: that is how
 * the Hugging Face cache stores its snapshots.) */
static ql_status check_shard_name(const char *tensor, const char *name)
{
    if (!name || !name[0] || strchr(name, '/') || strcmp(name, "..") == 0 || strcmp(name, ".") == 0)
        QL_FAIL(QL_EINVAL,
                "model.safetensors.index.json: tensor '%.200s' points to '%.200s', which is not a "
                "file name "
                "inside the folder",
                tensor, name ? name : "(no string)");
    return QL_OK;
}

static int by_string(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Each shard once, in order of name. names (n) are borrowed from the index. */
static ql_status add_shards(ql_st *st, const char *dir, const char **names, size_t n)
{
    char path[QL_PATH_MAX];
    size_t missing = 0, shards = 0;
    const char *first = NULL;
    qsort(names, n, sizeof *names, by_string);
    for (size_t i = 0; i < n; i++) {
        if (i && strcmp(names[i], names[i - 1]) == 0) continue;
        QL_TRY(ql_path_join(path, dir, names[i]));
        shards++;
        if (!ql_path_is_file(path)) {
            if (!missing++) first = names[i];
        }
    }
    if (missing)
        QL_FAIL(QL_EINVAL,
                "%s: %zu of %zu shards are missing, the first is %s: finish the download", dir,
                missing, shards, first);
    if (shards > FILES_MAX) QL_FAIL(QL_EINVAL, "%s: %zu shards", dir, shards);
    for (size_t i = 0; i < n; i++) {
        if (i && strcmp(names[i], names[i - 1]) == 0) continue;
        QL_TRY(add_path(st, dir, names[i]));
    }
    return QL_OK;
}

static ql_status open_index(ql_st *st, const char *dir, const char *index)
{
    ql_status s = QL_OK;
    json_t *o = NULL, *v;
    const char **names = NULL, *key;
    size_t n = 0;
    s = ql_json_load(index, INDEX_MAX, &o);
    if (s != QL_OK) return s;
    json_t *map = json_object_get(o, "weight_map");
    if (!json_is_object(map) || json_object_size(map) == 0) {
        s = ql_fail(QL_EINVAL, "model.safetensors.index.json: no weight_map");
        goto out;
    }
    names = malloc(json_object_size(map) * sizeof *names);
    if (!names) {
        s = ql_fail(QL_ENOMEM, "no memory for the list of shards");
        goto out;
    }
    json_object_foreach(map, key, v)
    {
        s = check_shard_name(key, json_string_value(v));
        if (s != QL_OK) goto out;
        names[n++] = json_string_value(v);
    }
    s = add_shards(st, dir, names, n);
    if (s == QL_OK) s = finish(st);
    if (s != QL_OK) goto out;
    json_object_foreach(map, key, v)
    {
        const ql_st_tensor *t = ql_st_find(st, key);
        if (!t || strcmp(st->file[t->file].base, json_string_value(v)) != 0) {
            s = ql_fail(QL_EINVAL, "model.safetensors.index.json: tensor '%.200s' is not in %.200s",
                        key, json_string_value(v));
            goto out;
        }
    }
out:
    free(names);
    json_decref(o);
    return s;
}

static ql_status open_dir(ql_st *st, const char *dir)
{
    char path[QL_PATH_MAX];
    QL_TRY(ql_path_join(path, dir, "model.safetensors"));
    if (ql_path_is_file(path)) {
        QL_TRY(add_path(st, dir, "model.safetensors"));
        return finish(st);
    }
    QL_TRY(ql_path_join(path, dir, "model.safetensors.index.json"));
    if (ql_path_is_file(path)) return open_index(st, dir, path);
    QL_TRY(ql_path_join(path, dir, "pytorch_model.bin"));
    if (ql_path_is_file(path))
        QL_FAIL(QL_ENOSUP,
                "%s holds pytorch_model.bin only; safetensors are needed (save it again with "
                "model.save_pretrained)",
                dir);
    QL_FAIL(QL_EINVAL, "%s has neither model.safetensors nor model.safetensors.index.json", dir);
}

bool ql_st_any(const char *dir)
{
    struct dirent *e;
    bool any = false;
    DIR *d = opendir(dir);
    while (d && !any && (e = readdir(d)))
        any = strstr(e->d_name, ".safetensors") || strncmp(e->d_name, "pytorch_model", 13) == 0;
    if (d) closedir(d);
    return any;
}

ql_status ql_st_open(const char *path, ql_st **out)
{
    ql_st *st = calloc(1, sizeof *st);
    ql_status s;
    if (!st) QL_FAIL(QL_ENOMEM, "no memory for opening %s", path);
    if (ql_path_is_dir(path)) {
        s = open_dir(st, path);
    } else {
        s = add_path(st, NULL, path);
        if (s == QL_OK) s = finish(st);
    }
    if (s != QL_OK) {
        ql_st_close(st);
        return s;
    }
    *out = st;
    return QL_OK;
}

uint64_t ql_st_stamp(const ql_st *st)
{
    uint64_t h = 0;
    for (int i = 0; i < st->files; i++) h = ql_hash64(h, st->file[i].id, sizeof st->file[i].id);
    return h;
}

const char *ql_st_cut(const ql_st *st)
{
    struct stat s;
    for (int i = 0; st && i < st->files; i++) {
        const st_file *f = &st->file[i];
        if (stat(f->path, &s) == 0 && (int64_t)s.st_ino == f->id[1] && s.st_size < (off_t)f->size) return f->path;
    }
    return NULL;
}

void ql_st_close(ql_st *st)
{
    if (!st) return;
    for (int i = 0; i < st->files; i++) {
        if (st->file[i].map) munmap(st->file[i].map, st->file[i].size);
        json_decref(st->file[i].header);
        free(st->file[i].path);
    }
    free(st->file);
    free(st->tensor);
    free(st);
}

int64_t ql_st_count(const ql_st *st)
{
    return st->count;
}

const ql_st_tensor *ql_st_at(const ql_st *st, int64_t i)
{
    return &st->tensor[i];
}

const ql_st_tensor *ql_st_find(const ql_st *st, const char *name)
{
    int64_t lo = 0, hi = st->count;
    while (lo < hi) {
        int64_t mid = lo + (hi - lo) / 2;
        int c = strcmp(name, st->tensor[mid].name);
        if (c == 0) return &st->tensor[mid];
        if (c < 0)
            hi = mid;
        else
            lo = mid + 1;
    }
    return NULL;
}

int ql_st_files(const ql_st *st)
{
    return st->files;
}

const char *ql_st_path(const ql_st *st, int file)
{
    return st->file[file].path;
}

const char *ql_st_meta(const ql_st *st, const char *key)
{
    return json_string_value(
        json_object_get(json_object_get(st->file[0].header, "__metadata__"), key));
}

void ql_st_done_with(const ql_st *st, const void *p, int64_t n)
{
    /* Whole pages inside the range only: its neighbours may be in use. */
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t a = ((uintptr_t)p + page - 1) / page * page,
              b = ((uintptr_t)p + (uintptr_t)n) / page * page;
    for (int i = 0; i < st->files; i++) {
        uintptr_t lo = (uintptr_t)st->file[i].map, hi = lo + st->file[i].size;
        if (a >= lo && b <= hi && a < b) (void)madvise((void *)a, b - a, MADV_DONTNEED);
    }
}
