/* safetensors: reading by mmap (one file, or shards with an index), atomic writing as a stream.
 * Every header is checked before anything is handed out: length, JSON, dtypes, shapes without
 * overflow, offsets that tile the data without hole or overlap. */
#ifndef QL_SAFETENSORS_H
#define QL_SAFETENSORS_H

#include "kernels/base.h"

enum { QL_ST_DIMS = 8 };

typedef struct {
    const char *name;
    ql_dtype dtype;
    int ndim;
    int64_t shape[QL_ST_DIMS];
    int64_t count, bytes; /* elements; count · size of dtype */
    const void *data;     /* in the mapped file; aligned only as its writer chose */
    int file;             /* ql_st_path(st, file) */
} ql_st_tensor;

typedef struct ql_st ql_st;

/* path: a .safetensors file, or a folder with model.safetensors or model.safetensors.index.json. */
ql_status ql_st_open(const char *path, ql_st **out) QL_MUST_USE;
/* The folder holds weights in some form, whole or not. */
bool ql_st_any(const char *dir);
void ql_st_close(ql_st *st);

int64_t ql_st_count(const ql_st *st);
const ql_st_tensor *ql_st_at(const ql_st *st, int64_t i);             /* sorted by name */
const ql_st_tensor *ql_st_find(const ql_st *st, const char *name);    /* NULL: not there */
int ql_st_files(const ql_st *st);
const char *ql_st_path(const ql_st *st, int file);
/* Another one when any of the files was written anew. */
uint64_t ql_st_stamp(const ql_st *st);
/* A file that is shorter than when it was opened: who reads what it lacks is ended by SIGBUS. NULL: none. */
const char *ql_st_cut(const ql_st *st);
/* __metadata__ of the first file; NULL: not there. */
const char *ql_st_meta(const ql_st *st, const char *key);
/* Gives the pages of [p, p + n) back; they stay in the page cache. */
void ql_st_done_with(const ql_st *st, const void *p, int64_t n);
/* safetensors' own spelling: "F32", "BF16" … */
const char *ql_st_dtype_name(ql_dtype t);
/* "[2, 3]" for messages. */
const char *ql_st_shape(char *buf, size_t size, const int64_t *shape, int ndim);

typedef struct {
    const char *name;
    ql_dtype dtype;
    int ndim;
    int64_t shape[QL_ST_DIMS];
} ql_st_decl;

typedef struct ql_st_writer ql_st_writer;

/* Declares all n tensors, then takes their bytes in any order and in pieces; needs no memory for
 * them. meta: key, value, …, NULL. Nothing is visible at path before commit. */
ql_status ql_st_create(const char *path, const ql_st_decl *decls, int64_t n,
                       const char *const *meta, ql_st_writer **out) QL_MUST_USE;
/* Appends to tensor i of decls. */
ql_status ql_st_put(ql_st_writer *w, int64_t i, const void *data, int64_t bytes) QL_MUST_USE;
/* Refused while a tensor lacks bytes. */
ql_status ql_st_commit(ql_st_writer *w) QL_MUST_USE;
void ql_st_writer_close(ql_st_writer *w); /* not committed: the previous file stays */

#endif
