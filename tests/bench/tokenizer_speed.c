/* tokenizer_speed FOLDER TEXT [IDS]: our tokenizer's MB/s on one thread, best of three, in pieces of 2000 characters as
 * tests/text/bench_tokenizer.py cuts them; the time to open it and its memory. IDS: a file for all ids (int32). */
#include "core/file.h"
#include "core/tokenizer.h"
#include "tests/bench/memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { PIECE = 2000 };

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Bytes of the next piece: PIECE characters of valid UTF-8. */
static size_t piece(const char *p, size_t left)
{
    size_t n = 0;
    for (int k = 0; k < PIECE && n < left; k++)
        do n++;
        while (n < left && ((unsigned char)p[n] & 0xc0) == 0x80);
    return n;
}

static ql_status measure(const char *folder, const char *path, const char *out)
{
    ql_tok *t = NULL;
    char *text = NULL;
    size_t size = 0, tokens = 0;
    double best = 1e9, before = (double)private_bytes() / 1048576, began = now();
    ql_ids ids = {0}, all = {0};
    ql_status st = QL_OK;
    QL_GO(ql_tok_open(folder, &t));
    double opened = now() - began, memory = (double)private_bytes() / 1048576 - before;
    QL_GO(ql_file_read(path, (int64_t)1 << 30, &text, &size));
    for (int k = 0; k < 3; k++) {
        double from = now();
        tokens = 0;
        for (size_t at = 0, n; at < size; at += n) {
            n = piece(text + at, size - at);
            ids.len = 0;
            QL_GO(ql_tok_encode(t, text + at, n, 0, &ids));
            tokens += ids.len;
            if (k || !out) continue;
            QL_GO(ql_ids_reserve(&all, ids.len));
            for (size_t i = 0; i < ids.len; i++) all.data[all.len++] = ids.data[i];
        }
        best = now() - from < best ? now() - from : best;
    }
    printf("qlora        %8.1f MB/s   %zu tokens, opened in %.2f s, %.0f MiB\n", (double)size / best / 1e6, tokens, opened, memory);
    if (out) st = ql_file_save(out, all.data, all.len * sizeof *all.data);
out:
    ql_ids_free(&ids);
    ql_ids_free(&all);
    free(text);
    ql_tok_close(t);
    return st;
}

int main(int argc, char **argv)
{
    if (argc < 3 || argc > 4 || measure(argv[1], argv[2], argv[3]) != QL_OK) {
        fprintf(stderr, "%s\n", argc < 3 || argc > 4 ? "usage: tokenizer_speed FOLDER TEXT [IDS]" : ql_error());
        return 1;
    }
    return 0;
}
