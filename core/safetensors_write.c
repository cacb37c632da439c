/* Writing: the header is complete before the first byte of data, so tensors may come in any order.
 */
#include "core/safetensors.h"

#include "core/file.h"
#include "core/json.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    int64_t at, bytes, done; /* in the file; of the tensor; written so far */
} slot;

struct ql_st_writer {
    ql_file *file;
    slot *slot;
    char **name;
    int64_t n;
};

static int order(const void *a, const void *b)
{
    const ql_st_decl *x = *(const ql_st_decl *const *)a, *y = *(const ql_st_decl *const *)b;
    size_t sx = ql_dtype_size(x->dtype), sy = ql_dtype_size(y->dtype);
    if (sx != sy) return sx > sy ? -1 : 1;
    return strcmp(x->name, y->name);
}

static ql_status decl_bytes(const ql_st_decl *d, int64_t *bytes)
{
    int64_t n = (int64_t)ql_dtype_size(d->dtype);
    if (!d->name || !d->name[0] || n == 0 || d->ndim < 0 || d->ndim > QL_ST_DIMS)
        QL_FAIL(QL_EINTERNAL, "safetensors: bad declaration of '%s'", d->name ? d->name : "");
    for (int i = 0; i < d->ndim; i++) {
        if (d->shape[i] < 0 || __builtin_mul_overflow(n, d->shape[i], &n))
            QL_FAIL(QL_EINTERNAL, "safetensors: bad shape of '%s'", d->name);
    }
    *bytes = n;
    return QL_OK;
}

/* Fills the header object and w->slot[].at, relative to the data, in the file's order: larger
 * elements first, so that everything is aligned, then by name. */
static ql_status lay_out(ql_st_writer *w, const ql_st_decl *decls, const ql_st_decl **sorted,
                         json_t *header)
{
    int64_t at = 0;
    for (int64_t i = 0; i < w->n; i++) sorted[i] = &decls[i];
    qsort(sorted, (size_t)w->n, sizeof *sorted, order);
    for (int64_t i = 0; i < w->n; i++) {
        const ql_st_decl *d = sorted[i];
        slot *s = &w->slot[d - decls];
        QL_TRY(decl_bytes(d, &s->bytes));
        s->at = at;
        if (__builtin_add_overflow(at, s->bytes, &at))
            QL_FAIL(QL_EINTERNAL, "safetensors: total size overflows");
        json_t *shape = json_array();
        for (int k = 0; k < d->ndim; k++)
            (void)json_array_append_new(shape, json_integer(d->shape[k]));
        if (json_object_get(header, d->name)) {
            json_decref(shape);
            QL_FAIL(QL_EINTERNAL, "safetensors: '%s' is declared twice", d->name);
        }
        json_t *v = json_pack("{s:s, s:o, s:[I, I]}", "dtype", ql_st_dtype_name(d->dtype), "shape",
                              shape, "data_offsets", (json_int_t)s->at, (json_int_t)at);
        if (json_object_set_new(header, d->name, v) != 0)
            QL_FAIL(QL_EINVAL, "safetensors: '%.200s' cannot be written as a name", d->name);
    }
    return QL_OK;
}

static ql_status write_header(ql_st_writer *w, const json_t *header)
{
    ql_status st = QL_OK;
    char *text = json_dumps(header, JSON_COMPACT);
    if (!text) QL_FAIL(QL_ENOMEM, "no memory for the safetensors header");
    size_t n = strlen(text), padded = (n + 7) / 8 * 8;
    char *grown = realloc(text, padded + 8);
    if (!grown) {
        free(text);
        QL_FAIL(QL_ENOMEM, "no memory for the safetensors header");
    }
    text = grown;
    memmove(text + 8, text, n);
    memset(text + 8 + n, ' ', padded - n);
    for (int i = 0; i < 8; i++) text[i] = (char)((uint64_t)padded >> (8 * i) & 0xff);
    QL_GO(ql_file_write_at(w->file, text, padded + 8, 0));
    for (int64_t i = 0; i < w->n; i++) w->slot[i].at += (int64_t)padded + 8;
out:
    free(text);
    return st;
}

static ql_status copy_names(ql_st_writer *w, const ql_st_decl *decls)
{
    for (int64_t i = 0; i < w->n; i++) {
        w->name[i] = strdup(decls[i].name);
        if (!w->name[i]) QL_FAIL(QL_ENOMEM, "no memory for tensor names");
    }
    return QL_OK;
}

ql_status ql_st_create(const char *path, const ql_st_decl *decls, int64_t n,
                       const char *const *meta, ql_st_writer **out)
{
    ql_status st = QL_OK;
    json_t *header = json_object();
    ql_st_writer *w = calloc(1, sizeof *w);
    const ql_st_decl **sorted = malloc(((size_t)n + 1) * sizeof *sorted);
    if (w) {
        w->n = n;
        w->slot = calloc((size_t)n + 1, sizeof *w->slot);
        w->name = calloc((size_t)n + 1, sizeof *w->name);
    }
    if (!header || !sorted || !w || !w->slot || !w->name) {
        st = ql_fail(QL_ENOMEM, "no memory for writing %s", path);
        goto out;
    }
    if (meta && meta[0]) {
        json_t *m = json_object();
        for (int i = 0; meta[i]; i += 2)
            (void)json_object_set_new(m, meta[i], json_string(meta[i + 1]));
        (void)json_object_set_new(header, "__metadata__", m);
    }
    QL_GO(lay_out(w, decls, sorted, header));
    QL_GO(copy_names(w, decls));
    QL_GO(ql_file_create(path, &w->file));
    QL_GO(write_header(w, header));
    *out = w;
    w = NULL;
out:
    free(sorted);
    json_decref(header);
    ql_st_writer_close(w);
    return st;
}

ql_status ql_st_put(ql_st_writer *w, int64_t i, const void *data, int64_t bytes)
{
    slot *s = &w->slot[i];
    if (bytes < 0 || bytes > s->bytes - s->done)
        QL_FAIL(QL_EINTERNAL, "safetensors: %lld bytes for '%s', %lld are left", (long long)bytes,
                w->name[i], (long long)(s->bytes - s->done));
    QL_TRY(ql_file_write_at(w->file, data, (size_t)bytes, (off_t)(s->at + s->done)));
    s->done += bytes;
    return QL_OK;
}

ql_status ql_st_commit(ql_st_writer *w)
{
    for (int64_t i = 0; i < w->n; i++) {
        const slot *s = &w->slot[i];
        if (s->done != s->bytes)
            QL_FAIL(QL_EINTERNAL, "safetensors: '%s' has %lld of %lld bytes", w->name[i],
                    (long long)s->done, (long long)s->bytes);
    }
    return ql_file_commit(w->file);
}

void ql_st_writer_close(ql_st_writer *w)
{
    if (!w) return;
    ql_file_close(w->file);
    for (int64_t i = 0; w->name && i < w->n; i++) free(w->name[i]);
    free(w->name);
    free(w->slot);
    free(w);
}
