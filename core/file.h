/* Files: paths, whole-file reads, and writes that are there completely or not at all. */
#ifndef QL_FILE_H
#define QL_FILE_H

#include "kernels/base.h"

#include <sys/types.h>

enum { QL_PATH_MAX = 4096 };

/* out = dir/name; fails where it does not fit. */
ql_status ql_path_join(char out[QL_PATH_MAX], const char *dir, const char *name) QL_MUST_USE;
bool ql_path_is_dir(const char *path);
bool ql_path_is_file(const char *path);
/* Makes the folder and those above it; one that is there is fine. */
ql_status ql_path_mkdirs(const char *path) QL_MUST_USE;
/* The folder and all that is in it, or the file. false, and errno: something is left. What is not there is fine. */
bool ql_path_remove(const char *path);
/* The names in a folder reach the disk. */
ql_status ql_path_sync(const char *folder) QL_MUST_USE;

/* The whole file, NUL-terminated behind *size bytes; refused above max bytes. Caller frees. */
ql_status ql_file_read(const char *path, int64_t max, char **out, size_t *size) QL_MUST_USE;

/* A file that appears under its name only at commit: written beside it, fsync, rename, fsync of the
 * folder. A process killed anywhere in between leaves the previous file. */
typedef struct ql_file ql_file;
ql_status ql_file_create(const char *path, ql_file **out) QL_MUST_USE;
ql_status ql_file_write_at(ql_file *f, const void *data, size_t n, off_t at) QL_MUST_USE;
ql_status ql_file_commit(ql_file *f) QL_MUST_USE; /* still to be closed */
void ql_file_close(ql_file *f); /* not committed: the unfinished file is removed */

/* create, write, commit, close in one. */
ql_status ql_file_save(const char *path, const void *data, size_t n) QL_MUST_USE;
/* Those of these n files that the one folder has, into the other. */
ql_status ql_file_copy(const char *from, const char *to, const char *const *names, size_t n) QL_MUST_USE;

#endif
