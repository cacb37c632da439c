#include "core/dataset.h"
#include "tests/test.h"

#include <sys/stat.h>
#include <unistd.h>

/* Documents of the given lengths; token i of document d is 100·d + i, masked where i < masked[d]. */
static const char *make(const int *len, const int *masked, int n)
{
    static char path[64];
    ql_dataset_writer *w = NULL;
    snprintf(path, sizeof path, "/tmp/qlora-batch-%d", (int)getpid());
    json_t *about = json_pack("{s:i}", "rows", n);
    ql_status st = ql_dataset_create(path, &w);
    for (int d = 0; d < n && !st; d++) {
        int32_t ids[100];
        uint8_t trained[100];
        for (int i = 0; i < len[d]; i++) ids[i] = 100 * d + i, trained[i] = i >= masked[d];
        st = ql_dataset_add(w, ids, trained, (size_t)len[d]);
    }
    if (!st) st = ql_dataset_commit(w, about);
    ql_dataset_writer_close(w);
    json_decref(about);
    return st ? "" : path;
}

TEST(rows_are_padded_to_the_longest)
{
    const int len[] = {3, 5, 2}, masked[] = {0, 2, 0};
    const int32_t e[] = {1, 0};
    ql_dataset *d = NULL;
    ql_batch b = {0};
    const char *path = make(len, masked, 3);
    CHECK_OK(ql_dataset_open(path, QL_PACK_NONE, 0, &d));
    CHECK_INT(ql_dataset_size(d), 3);
    CHECK_INT(ql_dataset_longest(d), 5);
    CHECK_INT(json_integer_value(json_object_get(ql_dataset_about(d), "rows")), 3);
    CHECK_OK(ql_batch_fill(&b, d, e, 2, 10, 9, 4));
    CHECK_INT(b.T, 16);
    CHECK_INT(b.rows, 2);
    CHECK_INT(b.docs, 2);
    CHECK_INT(b.tokens, 8);
    CHECK_INT(b.targets, 3 + 2);
    CHECK_INT(b.doc_max, 5);
    static const int32_t ids[] = {100, 101, 102, 103, 104, 9, 9, 9, 0, 1, 2, 9, 9, 9, 9, 9};
    static const int32_t labels[] = {-100, -100, 102, 103, 104, -100, -100, -100,
                                     0,    1,    2,   -100, -100, -100, -100, -100};
    static const int32_t target[] = {-100, 102, 103, 104, -100, -100, -100, -100,
                                     1,    2,   -100, -100, -100, -100, -100, -100};
    for (int t = 0; t < 16; t++) {
        CHECK_INT(b.ids[t], ids[t]);
        CHECK_INT(b.labels[t], labels[t]);
        CHECK_INT(b.target[t], target[t]);
        CHECK_INT(b.position[t], t % 8);
        CHECK_INT(b.token[t], (int64_t)(10 + t / 8) << 32 | t % 8);
    }
    CHECK_INT(b.doc_start[1], 8);
    CHECK_INT(b.doc_len[1], 3);
    ql_batch_free(&b), ql_dataset_close(d), unlink(path);
}

TEST(packing_keeps_documents_apart)
{
    const int len[] = {3, 6, 2, 5, 2, 8}, masked[] = {0, 0, 0, 5, 0, 0};
    /* Longest first into the fullest bin with room, of 8: {5} {1,2} {3,0} {4}. */
    static const int32_t want[][3] = {{5, -1, -1}, {1, 2, -1}, {3, 0, -1}, {4, -1, -1}};
    ql_dataset *d = NULL;
    ql_batch b = {0};
    const char *path = make(len, masked, 6);
    CHECK_OK(ql_dataset_open(path, QL_PACK_BFD, 8, &d));
    CHECK_INT(ql_dataset_size(d), 4);
    for (int64_t e = 0; e < 4; e++)
        for (int64_t k = 0, n; k < ql_dataset_parts(d, e); k++)
            CHECK_INT(ql_dataset_part(d, e, k, &n)[0] & ~QL_MASKED, 100 * want[e][k]);
    const int32_t e[] = {1, 2};
    CHECK_OK(ql_batch_fill(&b, d, e, 2, 0, 9, 16));
    CHECK_INT(b.T, 16);
    CHECK_INT(b.rows, 1);
    CHECK_INT(b.docs, 4);
    CHECK_INT(b.doc_start[2], 8);
    CHECK_INT(b.doc_start[3], 13);
    CHECK_INT(b.doc_len[3], 3);
    CHECK_INT(b.targets, 5 + 1 + 0 + 2);
    CHECK_INT(b.labels[0], -100);
    CHECK_INT(b.labels[1], 101);
    CHECK_INT(b.target[5], -100); /* the end of a document does not predict the next one */
    CHECK_INT(b.position[6], 0);
    CHECK_INT(b.token[6], 6);
    CHECK_INT(b.token[8], (int64_t)1 << 32);
    ql_dataset_close(d);
    d = NULL;
    CHECK_FAILS(ql_dataset_open(path, QL_PACK_BFD, 7, &d), QL_EINVAL, "8 tokens");
    CHECK_OK(ql_dataset_open(path, QL_PACK_WRAPPED, 10, &d));
    CHECK_INT(ql_dataset_size(d), 3);
    CHECK_INT(ql_dataset_length(d, 2), 6);
    int64_t T, targets;
    const int32_t all[] = {0, 1, 2};
    ql_batch_measure(d, all, 3, 64, &T, &targets);
    CHECK_INT(T, 64);
    CHECK_OK(ql_batch_fill(&b, d, all, 3, 0, 9, 64));
    CHECK_INT(b.targets, targets);
    CHECK_INT(b.docs, 3);
    ql_batch_free(&b), ql_dataset_close(d), unlink(path);
}

TEST(every_document_is_packed_once)
{
    enum { N = 2000 };
    static int len[N], masked[N];
    static uint8_t seen[N];
    ql_dataset *d = NULL;
    for (int i = 0; i < N; i++) len[i] = 1 + i * 7919 % 97;
    const char *path = make(len, masked, N);
    CHECK_OK(ql_dataset_open(path, QL_PACK_BFD, 128, &d));
    int64_t tokens = 0, n;
    for (int64_t e = 0; e < ql_dataset_size(d); e++) {
        CHECK(ql_dataset_length(d, e) <= 128);
        for (int64_t k = 0; k < ql_dataset_parts(d, e); k++) {
            uint32_t doc = (ql_dataset_part(d, e, k, &n)[0] & ~QL_MASKED) / 100;
            CHECK(!seen[doc]++);
            tokens += n;
        }
    }
    CHECK_INT(tokens, ql_dataset_tokens(d));
    CHECK((double)tokens > 0.99 * 128 * (double)ql_dataset_size(d));
    ql_dataset_close(d), unlink(path);
}

TEST(damaged_files_are_refused)
{
    const int len[] = {3, 5}, masked[] = {0, 0};
    ql_dataset *d = NULL;
    ql_batch b = {0};
    const char *path = make(len, masked, 2);
    const int32_t e[] = {2};
    CHECK_OK(ql_dataset_open(path, QL_PACK_NONE, 0, &d));
    CHECK_FAILS(ql_batch_fill(&b, d, e, 1, 0, 0, 64), QL_EINTERNAL, "example 2");
    ql_dataset_close(d);
    d = NULL;
    FILE *f = fopen(path, "r+b");
    CHECK(f);
    fseek(f, 64, SEEK_SET); /* the first offset */
    fwrite("\xff", 1, 1, f);
    fclose(f);
    CHECK_FAILS(ql_dataset_open(path, QL_PACK_NONE, 0, &d), QL_EINVAL, "damaged");
    CHECK(truncate(path, 40) == 0);
    CHECK_FAILS(ql_dataset_open(path, QL_PACK_NONE, 0, &d), QL_EINVAL, "not a tokenised");
    CHECK(truncate(path, 3) == 0);
    CHECK_FAILS(ql_dataset_open(path, QL_PACK_NONE, 0, &d), QL_EINVAL, "not a tokenised");
    unlink(path);
    CHECK_FAILS(ql_dataset_open(path, QL_PACK_NONE, 0, &d), QL_EIO, "No such file");
}

TEST_MAIN(T(rows_are_padded_to_the_longest), T(packing_keeps_documents_apart),
          T(every_document_is_packed_once), T(damaged_files_are_refused))
