/* Bytes as a data file of some format: every row is refused or becomes ids and a mask. */
#include "core/data.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static inline void fuzz_rows(const uint8_t *data, size_t size, const char *extension, const char *split)
{
    static ql_tok *tok;
    char path[64];
    const char *file = path;
    ql_table *t = NULL;
    ql_formatter *f = NULL;
    ql_example e = {0};
    ql_data_options o = {.max_length = 64, .loss_on = size % 2 ? QL_LOSS_RESPONSES : QL_LOSS_AUTO};
    if (!tok && ql_tok_open("tests/text/data/qwen", &tok) != QL_OK) abort();
    snprintf(path, sizeof path, "/dev/shm/qlora-fuzz-%d.%s", (int)getpid(), extension);
    FILE *out = fopen(path, "wb");
    if (!out || fwrite(data, 1, size, out) != size) abort();
    fclose(out);
    ql_error_clear();
    if (ql_table_open(&file, 1, split, &t) != QL_OK && !ql_error()[0]) abort();
    for (int64_t i = 0; t && i < ql_table_count(t); i++) {
        json_t *row = NULL;
        ql_error_clear();
        if (ql_table_get(t, i, &row) == QL_OK && (f || ql_formatter_new(tok, row, &o, &f) == QL_OK) &&
            ql_format_row(f, row, &e) == QL_OK) {
            if (!e.ids.len || e.ids.len > 64) abort();
        } else if (!ql_error()[0]) {
            abort();
        }
        json_decref(row);
    }
    ql_example_free(&e), ql_formatter_free(f), ql_table_close(t);
    unlink(path);
}
