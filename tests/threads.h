/* Ranks as threads of the test: what they share is then in one process, where a sanitizer can watch it (make tsan). */
#ifndef QL_TEST_THREADS_H
#define QL_TEST_THREADS_H

#include "core/rank.h"
#include "tests/test.h"

#include <pthread.h>

typedef struct {
    ql_rank_setup setup;       /* rank, world and what they share */
    void *arg;                 /* the test's */
    ql_status (*body)(ql_rank_setup *setup, void *arg);
    ql_status st;
    char why[600];
} thread_rank;

static void *thread_main(void *p)
{
    thread_rank *t = p;
    ql_error_clear();
    t->st = t->body(&t->setup, t->arg);
    if (t->st != QL_OK) {
        snprintf(t->why, sizeof t->why, "rank %d: %s: %s", t->setup.rank, ql_status_name(t->st), ql_error());
        __atomic_store_n(&t->setup.shared->abort, 1, __ATOMIC_RELEASE);
    }
    return NULL;
}

/* Runs body in `world` ranks; the error is that of the rank which failed first, not of those that saw it fail. */
static inline ql_status run_threads(const ql_spec *spec, int world, ql_status (*body)(ql_rank_setup *setup, void *arg), void *arg)
{
    const ql_backend *be = ql_backend_cpu();
    thread_rank ranks[QL_MAX_WORLD];
    pthread_t thread[QL_MAX_WORLD];
    ql_mem *m = NULL;
    QL_TRY(ql_mem_open(spec, 0, &m));
    int64_t host = ql_mem_host_base(m), comm = ql_round_up(be->comm->shared_bytes(world), 4096);
    ql_mem_close(m);
    ql_shared *shared = calloc(1, sizeof *shared);
    void *block = aligned_alloc(4096, (size_t)comm), *base = host ? aligned_alloc(4096, (size_t)ql_round_up(host, 4096)) : NULL;
    if (!shared || !block || (host && !base)) QL_FAIL(QL_ENOMEM, "no memory for %d ranks", world);
    memset(block, 0, (size_t)comm);
    for (int r = 0; r < world; r++) {
        ranks[r] = (thread_rank){.arg = arg, .body = body};
        ranks[r].setup = (ql_rank_setup){.be = be, .rank = r, .world = world, .shared = shared, .comm_shared = block, .comm_bytes = comm,
                                         .host_base = base, .host_bytes = host, .timeout_ms = 60000};
        if (pthread_create(&thread[r], NULL, thread_main, &ranks[r])) QL_FAIL(QL_ENOMEM, "no thread for rank %d", r);
    }
    const thread_rank *bad = NULL;
    for (int r = 0; r < world; r++) {
        pthread_join(thread[r], NULL);
        if (ranks[r].st != QL_OK && (!bad || (bad->st == QL_EPEER && ranks[r].st != QL_EPEER))) bad = &ranks[r];
    }
    free(shared);
    free(block);
    free(base);
    return bad ? ql_fail(bad->st, "%s", bad->why) : QL_OK;
}

#endif
