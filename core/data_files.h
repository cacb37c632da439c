/* The files of data: their formats, folders and splits. */
#ifndef QL_DATA_FILES_H
#define QL_DATA_FILES_H

#include "kernels/base.h"

typedef enum { QL_FILE_JSONL, QL_FILE_JSON, QL_FILE_CSV, QL_FILE_TSV, QL_FILE_TEXT } ql_data_format;
/* By the name's end; others are refused. */
ql_status ql_data_format_of(const char *path, ql_data_format *out) QL_MUST_USE;

typedef struct {
    char **name;
    size_t n;
} ql_data_names;
/* Appends the files that path stands for: itself, those that a glob finds, or those of a folder that belong to the split. */
ql_status ql_data_list(const char *path, const char *split, ql_data_names *out) QL_MUST_USE;
void ql_data_names_free(ql_data_names *l);

const char *ql_base_name(const char *path); /* behind the last slash */

#endif
