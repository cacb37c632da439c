#include "core/safetensors.h"
#include "tests/tmp.h"

#include <signal.h>
#include <sys/wait.h>
#include <time.h>

/* Two tensors, written in pieces and out of order. */
static ql_status write_two(const char *path, float base)
{
    static const ql_st_decl d[] = {{"z.half", QL_F16, 1, {3}},
                                   {"a.full", QL_F32, 2, {2, 2}},
                                   {"scalar", QL_F32, 0, {0}},
                                   {"empty", QL_F32, 1, {0}}};
    static const char *const meta[] = {"format", "pt", NULL};
    uint16_t h[3] = {1, 2, 3};
    float f[4] = {base, base, base, base};
    ql_st_writer *w = NULL;
    ql_status st = QL_OK;
    QL_GO(ql_st_create(path, d, 4, meta, &w));
    QL_GO(ql_st_put(w, 1, f, 4));
    QL_GO(ql_st_put(w, 0, h, 6));
    QL_GO(ql_st_put(w, 1, f + 1, 12));
    QL_GO(ql_st_put(w, 2, f, 4));
    QL_GO(ql_st_commit(w));
out:
    ql_st_writer_close(w);
    return st;
}

TEST(round_trip)
{
    const char *p = tmp_path("two.safetensors");
    ql_st *st = NULL;
    float x;
    CHECK_OK(write_two(p, 2.5f));
    CHECK_OK(ql_st_open(p, &st));
    CHECK_INT(ql_st_count(st), 4);
    const ql_st_tensor *a = ql_st_find(st, "a.full"), *z = ql_st_find(st, "z.half");
    CHECK(a && z && !ql_st_find(st, "a") && !ql_st_find(st, "zz"));
    CHECK(a->dtype == QL_F32 && a->ndim == 2 && a->shape[1] == 2 && a->bytes == 16);
    CHECK(z->dtype == QL_F16 && z->count == 3);
    CHECK((uintptr_t)a->data % 8 == 0 && z->data > a->data);
    memcpy(&x, (const char *)a->data + 12, 4);
    CHECK(x == 2.5f);
    CHECK_INT(ql_st_find(st, "scalar")->count, 1);
    CHECK_INT(ql_st_find(st, "empty")->bytes, 0);
    CHECK_STR(ql_st_meta(st, "format"), "pt");
    CHECK(ql_st_meta(st, "none") == NULL);
    for (int64_t i = 1; i < ql_st_count(st); i++)
        CHECK(strcmp(ql_st_at(st, i - 1)->name, ql_st_at(st, i)->name) < 0);
    ql_st_done_with(st, a->data, a->bytes);
    memcpy(&x, a->data, 4);
    CHECK(x == 2.5f);
    ql_st_close(st);
}

TEST(writer_refuses)
{
    const ql_st_decl one[] = {{"a", QL_U8, 1, {4}}, {"a", QL_U8, 1, {4}}};
    const char *p = tmp_path("w.safetensors");
    ql_st_writer *w = NULL;
    CHECK_FAILS(ql_st_create(p, one, 2, NULL, &w), QL_EINTERNAL, "declared twice");
    CHECK_FAILS(ql_st_create(tmp_path("no/w"), one, 1, NULL, &w), QL_EIO, "cannot create");
    CHECK_OK(ql_st_create(p, one, 1, NULL, &w));
    CHECK_FAILS(ql_st_put(w, 0, "12345", 5), QL_EINTERNAL, "4 are left");
    CHECK_OK(ql_st_put(w, 0, "12", 2));
    CHECK_FAILS(ql_st_commit(w), QL_EINTERNAL, "'a' has 2 of 4 bytes");
    ql_st_writer_close(w);
    CHECK(!ql_path_is_file(p));
}

TEST(unfinished_write_leaves_no_trace)
{
    const char *dir = tmp_dir("trace");
    char p[QL_PATH_MAX];
    const ql_st_decl d = {"a", QL_U8, 1, {4}};
    ql_st_writer *w = NULL;
    ql_st *st = NULL;
    CHECK_OK(ql_path_join(p, dir, "m.safetensors"));
    CHECK_OK(write_two(p, 1.0f));
    CHECK_OK(ql_st_create(p, &d, 1, NULL, &w));
    ql_st_writer_close(w);
    CHECK_OK(ql_st_open(p, &st));
    CHECK(ql_st_find(st, "a.full") != NULL);
    ql_st_close(st);
    CHECK_OK(ql_path_mkdirs(dir));
    remove(p);
    CHECK_MSG(rmdir(dir) == 0, "something was left in the folder");
}

/* A child saves version after version; SIGKILL at odd moments must leave a whole file each time. */
TEST(kill_in_the_middle_of_a_save)
{
    const char *p = tmp_path("killed.safetensors");
    CHECK_OK(write_two(p, 0.0f));
    for (int round = 0; round < 15; round++) {
        int started[2];
        char c;
        CHECK(pipe(started) == 0);
        pid_t child = fork();
        if (child == 0) {
            if (write(started[1], "x", 1) != 1) _exit(1);
            for (int v = 1;; v++)
                if (write_two(p, (float)v) != QL_OK) _exit(1);
        }
        CHECK(read(started[0], &c, 1) == 1);
        nanosleep(&(struct timespec){0, 300000 + 770000 * round}, NULL);
        kill(child, SIGKILL);
        int ws = 0;
        CHECK(waitpid(child, &ws, 0) == child);
        CHECK_MSG(WIFSIGNALED(ws), "the child could not save");
        close(started[0]), close(started[1]);
        ql_st *st = NULL;
        float f[4];
        CHECK_OK(ql_st_open(p, &st));
        memcpy(f, ql_st_find(st, "a.full")->data, sizeof f);
        CHECK(f[0] == f[1] && f[0] == f[2] && f[0] == f[3]);
        ql_st_close(st);
    }
}

/* Shards behind symbolic links, as the Hugging Face cache lays them out. */
TEST(shards_and_links)
{
    const char *root = tmp_dir("cache"), *blobs = tmp_dir("cache/blobs"),
               *snap = tmp_dir("cache/snapshots/abc");
    char p[QL_PATH_MAX];
    ql_st *st = NULL;
    CHECK(root != NULL);
    CHECK_OK(ql_path_join(p, blobs, "b1"));
    tmp_safetensors(p, "{\"x\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]}}", -1, 3);
    CHECK_OK(ql_path_join(p, blobs, "b2"));
    tmp_safetensors(p, "{\"y\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[0,8]}}   ", -1,
                    8);
    CHECK_OK(ql_path_join(p, snap, "model-1.safetensors"));
    CHECK(symlink("../../blobs/b1", p) == 0);
    CHECK_OK(ql_path_join(p, snap, "model-2.safetensors"));
    CHECK(symlink("../../blobs/b2", p) == 0);
    tmp_text(snap, "model.safetensors.index.json",
             "{\"metadata\":{\"total_size\":11},\"weight_map\":{\"x\":\"model-1.safetensors\","
             "\"y\":\"model-2.safetensors\"}}");
    CHECK_OK(ql_st_open(snap, &st));
    CHECK_INT(ql_st_files(st), 2);
    CHECK(ql_st_find(st, "x") && ql_st_find(st, "y")->file == 1);
    CHECK(strstr(ql_st_path(st, 1), "model-2.safetensors") != NULL);
    ql_st_close(st);
}

TEST_MAIN(T(round_trip), T(writer_refuses), T(unfinished_write_leaves_no_trace),
          T(kill_in_the_middle_of_a_save), T(shards_and_links))
