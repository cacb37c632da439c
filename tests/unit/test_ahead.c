/* The reader ahead: pages of a cold file are there before their use, no further than they may, and closing does not wait for the rest. */
#include "core/ahead.h"
#include "tests/tmp.h"

#include <fcntl.h>
#include <sys/mman.h>

enum { PART = 4 << 20, PARTS = 8 };

typedef struct {
    char *map;
    size_t bytes;
    int cold; /* the file system lets go of what it has read */
} file;

static int64_t resident(const file *f, int64_t from, int64_t n)
{
    static unsigned char pages[PART * PARTS / 4096 + 1];
    int64_t here = 0, page = sysconf(_SC_PAGESIZE);
    if (mincore(f->map + from, (size_t)n, pages)) return -1;
    for (int64_t i = 0; i < n / page; i++) here += pages[i] & 1;
    return here * page;
}

static ql_status cold_file(file *f)
{
    char path[64];
    snprintf(path, sizeof path, "build/ahead-%d.bin", (int)getpid());
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (fd < 0) QL_FAIL(QL_EIO, "%s", path);
    unlink(path);
    f->bytes = (size_t)PART * PARTS;
    char *text = malloc(PART);
    for (int i = 0; i < PARTS; i++) {
        memset(text, 'a' + i, PART);
        if (write(fd, text, PART) != PART) QL_FAIL(QL_EIO, "disk full");
    }
    free(text);
    if (fsync(fd) || posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED)) QL_FAIL(QL_EIO, "fsync");
    f->map = mmap(NULL, f->bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (f->map == MAP_FAILED) QL_FAIL(QL_EIO, "mmap");
    f->cold = resident(f, 0, (int64_t)f->bytes) < (int64_t)f->bytes / 4;
    return QL_OK;
}

TEST(pages_come_before_their_turn)
{
    file f;
    ql_ahead *a = NULL;
    ql_ahead_range r[PARTS];
    CHECK_OK(cold_file(&f));
    if (!f.cold) SKIP("this file system keeps what it was told to drop");
    for (int i = 0; i < PARTS; i++) r[i] = (ql_ahead_range){f.map + (int64_t)i * PART + 100, PART - 200, i};
    CHECK_OK(ql_ahead_open(r, PARTS, &a));
    for (int turn = 0; turn < PARTS; turn++) {
        ql_ahead_turn(a, turn);
        int last = turn + 2 < PARTS ? turn + 2 : PARTS - 1;
        for (int k = 0; k < 6000 && resident(&f, (int64_t)last * PART, PART) < PART; k++) usleep(10000);
        CHECK_INT(resident(&f, 0, (int64_t)(last + 1) * PART), (int64_t)(last + 1) * PART);
        /* The kernel's own reading ahead goes a little further. */
        if (last + 1 < PARTS) CHECK(resident(&f, (int64_t)(last + 1) * PART, (int64_t)(PARTS - last - 1) * PART) < PART);
    }
    CHECK(f.map[PART + 5] == 'b');
    ql_ahead_close(a);
    munmap(f.map, f.bytes);
}

TEST(closing_waits_for_nothing)
{
    file f;
    ql_ahead *a = NULL;
    CHECK_OK(cold_file(&f));
    ql_ahead_range r[] = {{f.map, PART, 0}, {f.map + PART, PART, 100}};
    CHECK_OK(ql_ahead_open(r, 2, &a));
    ql_ahead_close(a); /* turn 100 never comes */
    CHECK_OK(ql_ahead_open(r, 0, &a));
    ql_ahead_close(a);
    ql_ahead_close(NULL);
    munmap(f.map, f.bytes);
}

TEST_MAIN(T(pages_come_before_their_turn), T(closing_waits_for_nothing))
