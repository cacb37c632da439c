#include "core/ahead.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* A piece is waited for at a time, `ASKED` bytes of its range are asked for; pages are there two turns before their use. They stay in the
 * page cache and not in this process, whose memory must not grow by them. */
enum { PIECE = 128 << 10, ASKED = 64 << 20, TURNS = 2 };

struct ql_ahead {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t moved;
    int64_t turn;
    int closing;
    int64_t count;
    ql_ahead_range range[];
};

/* 0: the reader is to end. */
static int wait_for_turn(ql_ahead *a, int64_t turn)
{
    pthread_mutex_lock(&a->lock);
    while (!a->closing && turn > a->turn + TURNS) pthread_cond_wait(&a->moved, &a->lock);
    int go = !a->closing;
    pthread_mutex_unlock(&a->lock);
    return go;
}

static void advise(uintptr_t from, uintptr_t to, int how)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    from = from / page * page;
    /* Advice only: what is refused (an old kernel, a file cut short) is read, or reported, where it is used. */
    if (to > from) (void)madvise((void *)from, to - from, how);
}

static void *read_ahead(void *arg)
{
    ql_ahead *a = arg;
    for (int64_t i = 0; i < a->count; i++) {
        uintptr_t at = (uintptr_t)a->range[i].at, end = at + (uintptr_t)a->range[i].bytes, asked = at;
        for (; at < end; at += PIECE) {
            if (!wait_for_turn(a, a->range[i].turn)) return NULL;
            uintptr_t ask = end - at < ASKED ? end : at + ASKED, stop = end - at < PIECE ? end : at + PIECE;
            advise(asked, ask, MADV_WILLNEED);
            asked = ask;
#ifdef MADV_POPULATE_READ
            advise(at, stop, MADV_POPULATE_READ); /* waits until they are there */
            advise(at, stop, MADV_DONTNEED);
#else
            (void)stop;
#endif
        }
    }
    return NULL;
}

ql_status ql_ahead_open(const ql_ahead_range *range, int64_t count, ql_ahead **out)
{
    ql_ahead *a = calloc(1, sizeof *a + (size_t)count * sizeof *range);
    if (!a) QL_FAIL(QL_ENOMEM, "no memory to read %lld ranges ahead", (long long)count);
    if (count) memcpy(a->range, range, (size_t)count * sizeof *range);
    a->count = count;
    a->turn = count ? range[0].turn : 0;
    pthread_mutex_init(&a->lock, NULL);
    pthread_cond_init(&a->moved, NULL);
    if (pthread_create(&a->thread, NULL, read_ahead, a)) {
        pthread_mutex_destroy(&a->lock);
        pthread_cond_destroy(&a->moved);
        free(a);
        QL_FAIL(QL_ENOMEM, "no thread to read ahead");
    }
    *out = a;
    return QL_OK;
}

void ql_ahead_turn(ql_ahead *a, int64_t turn)
{
    pthread_mutex_lock(&a->lock);
    a->turn = turn;
    pthread_cond_signal(&a->moved);
    pthread_mutex_unlock(&a->lock);
}

void ql_ahead_close(ql_ahead *a)
{
    if (!a) return;
    pthread_mutex_lock(&a->lock);
    a->closing = 1;
    pthread_cond_signal(&a->moved);
    pthread_mutex_unlock(&a->lock);
    pthread_join(a->thread, NULL);
    pthread_mutex_destroy(&a->lock);
    pthread_cond_destroy(&a->moved);
    free(a);
}
