/* rows_memory FILE [MB]: writes a JSONL file of so many MB (default 1000), opens it as data and reads rows here and there: bytes of
 * memory a row by our own count and by the system's. The file is removed. */
#include "core/data.h"
#include "tests/bench/memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int64_t write_rows(const char *path, int64_t bytes)
{
    FILE *f = fopen(path, "w");
    int64_t n = 0, at = 0;
    while (f && at < bytes) {
        int k = fprintf(f, "{\"text\": \"row %lld %.*s\"}\n", (long long)n, (int)(150 + n % 100),
                        "a line of text that is about as long as the lines of instruction data are, with some words in it and a few more, so "
                        "that a gigabyte holds about four million of them; it goes on for a while, and then a little longer, until here");
        if (k < 0) break;
        at += k, n++;
    }
    if (f) fclose(f);
    return at >= bytes ? n : -1;
}

static ql_status measure(const char *path, int64_t rows)
{
    ql_table *t = NULL;
    ql_status st = QL_OK;
    const char *files[1] = {path};
    int64_t before = private_bytes();
    double from = now();
    QL_GO(ql_table_open(files, 1, NULL, &t));
    double opened = now() - from;
    if (ql_table_count(t) != rows) QL_GO(ql_fail(QL_EINTERNAL, "%lld rows, not %lld", (long long)ql_table_count(t), (long long)rows));
    for (int64_t i = 0; i < 200000; i++) {
        json_t *row = NULL;
        QL_GO(ql_table_get(t, i * 7919 % rows, &row));
        json_decref(row);
    }
    double grown = (double)(private_bytes() - before), own = (double)ql_table_memory(t);
    printf("%lld rows indexed in %.1f s; memory a row: index %.2f bytes, process %.2f bytes\n", (long long)rows, opened, own / (double)rows,
           grown / (double)rows);
    if (grown / (double)rows > 16) st = ql_fail(QL_EINTERNAL, "more than 16 bytes of memory a row");
out:
    ql_table_close(t);
    return st;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: rows_memory FILE [MB]\n");
        return 2;
    }
    int64_t rows = write_rows(argv[1], (argc > 2 ? strtoll(argv[2], NULL, 10) : 1000) * 1000000);
    ql_status st = rows > 0 ? measure(argv[1], rows) : ql_fail(QL_EIO, "%s: cannot be written", argv[1]);
    unlink(argv[1]);
    if (st != QL_OK) fprintf(stderr, "rows_memory: %s\n", ql_error());
    return st != QL_OK;
}
