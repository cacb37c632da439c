#include "core/ahead.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Asked for a piece at a time, two turns before its use. Nothing is mapped: a process' memory must not grow by what it is going to read. */
enum { PIECE = 8 << 20, TURNS = 2 };

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

static void *read_ahead(void *arg)
{
    ql_ahead *a = arg;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    for (int64_t i = 0; i < a->count; i++) {
        uintptr_t at = (uintptr_t)a->range[i].at / page * page, end = (uintptr_t)a->range[i].at + (uintptr_t)a->range[i].bytes;
        for (; at < end; at += PIECE) {
            if (!wait_for_turn(a, a->range[i].turn)) return NULL;
            /* Advice only: what is refused (a file cut short, say) is read, or reported, where it is used. */
            (void)madvise((void *)at, end - at < PIECE ? end - at : PIECE, MADV_WILLNEED);
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
