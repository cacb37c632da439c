/* Collectives of forked ranks over one shared block. Every ordered pair of ranks has a mailbox, a
 * ring of bytes with one writer and one reader; all collectives are sends and receives through
 * them, moved along together, so that no size and no order of a group can lock. Waiting sleeps on a
 * futex: it never spins. */
#include "kernels/cpu/cpu.h"

#include <errno.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    WORLD_MAX = 8,
    BOX = 1 << 17,      /* bytes of a mailbox, a power of two */
    SCRATCH = 1 << 15,  /* bytes that a reduction exchanges at a time */
    PENDING_MAX = 1024, /* sends and receives in one group */
    NAP_MS = 20,        /* the flags are looked at this often */
};

/* `put` and `got` count bytes for ever; put − got are in the ring. */
typedef struct {
    _Alignas(64) _Atomic uint64_t put;
    _Alignas(64) _Atomic uint64_t got;
    _Alignas(64) unsigned char data[BOX];
} box;

/* A rank's bell counts what was done for it; it is woken only when it says that it sleeps. */
typedef struct {
    _Alignas(64) _Atomic uint32_t bell;
    _Atomic uint32_t asleep;
} rank_slot;

typedef struct {
    rank_slot rank[WORLD_MAX];
    box boxes[]; /* (world, world): from, to */
} shared;

/* In front of every message: the two sides must be at the same call. */
typedef struct {
    uint32_t op, magic;
    int64_t bytes;
} header;

enum { SEND, RECV };
typedef struct {
    int dir, peer;
    header head;
    char *data;
    int64_t done; /* bytes moved, the header included */
} pending;

struct ql_comm {
    int rank, world;
    shared *sh;
    const volatile int *abort;
    int *waits_for;
    int64_t timeout_ms, sent;
    atomic_int cancelled;
    bool broken; /* after a failure the mailboxes are out of step for good */
    int depth;   /* of group_begin */
    int n;
    pending *list;
    char *scratch; /* (world, SCRATCH) */
};

enum op { ALL_GATHER = 1, ALL_TO_ALL, REDUCE, POINT, BARRIER };
static const char *const op_names[] = {"?",    "all_gather", "all_to_all", "all_sum or all_max",
                                       "send", "barrier"};
enum { MAGIC = 0x514c4f52 };

static int64_t cpu_shared_bytes(int world)
{
    return (int64_t)sizeof(shared) + (int64_t)world * world * (int64_t)sizeof(box);
}

static ql_status cpu_comm_open(ql_dev *d, const ql_comm_setup *s, ql_comm **out)
{
    (void)d;
    if (s->world < 1 || s->world > WORLD_MAX || s->rank < 0 || s->rank >= s->world)
        QL_FAIL(QL_EINVAL, "comm: rank %d of %d, needed are 1 to %d ranks", s->rank, s->world,
                WORLD_MAX);
    if (s->world > 1 && (!s->shared || s->shared_bytes < cpu_shared_bytes(s->world)))
        QL_FAIL(QL_EINVAL, "comm: a shared block of %lld bytes, needed are %lld",
                (long long)s->shared_bytes, (long long)cpu_shared_bytes(s->world));
    if ((uintptr_t)s->shared % 64)
        QL_FAIL(QL_EINVAL, "comm: the shared block at %p is not 64-byte aligned", s->shared);
    ql_comm *c = calloc(1, sizeof *c);
    if (!c) QL_FAIL(QL_ENOMEM, "comm: no memory");
    c->rank = s->rank, c->world = s->world, c->sh = s->shared;
    c->abort = s->abort, c->timeout_ms = s->timeout_ms, c->waits_for = s->waits_for;
    c->list = calloc(PENDING_MAX, sizeof *c->list);
    c->scratch = malloc((size_t)s->world * SCRATCH);
    if (!c->list || !c->scratch) {
        free(c->list), free(c->scratch), free(c);
        QL_FAIL(QL_ENOMEM, "comm: no memory");
    }
    *out = c;
    return QL_OK;
}

static void cpu_comm_close(ql_comm *c)
{
    if (!c) return;
    free(c->list), free(c->scratch), free(c);
}

/* ---- sleeping and waking --------------------------------------------------------------------- */

static void futex(_Atomic uint32_t *word, int op, uint32_t value, const struct timespec *t)
{
    syscall(SYS_futex, word, op, value, t, NULL, 0);
}

static void ring(ql_comm *c, int rank)
{
    rank_slot *r = &c->sh->rank[rank];
    atomic_fetch_add(&r->bell, 1);
    if (atomic_load(&r->asleep)) futex(&r->bell, FUTEX_WAKE, 1, NULL);
}

/* Until somebody rings after `seen` was read, at most a nap. */
static void nap(ql_comm *c, uint32_t seen)
{
    const struct timespec t = {.tv_nsec = NAP_MS * 1000000L};
    rank_slot *r = &c->sh->rank[c->rank];
    atomic_store(&r->asleep, 1);
    futex(&r->bell, FUTEX_WAIT, seen, &t);
    atomic_store(&r->asleep, 0);
}

static int64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* ---- moving bytes ---------------------------------------------------------------------------- */

static box *box_of(ql_comm *c, int from, int to)
{
    return &c->sh->boxes[from * c->world + to];
}

static void ring_copy(box *b, uint64_t at, void *out, const void *in, int64_t n)
{
    int64_t i = (int64_t)(at % BOX), first = ql_min64(n, BOX - i);
    if (in) {
        memcpy(b->data + i, in, (size_t)first);
        memcpy(b->data, (const char *)in + first, (size_t)(n - first));
    } else {
        memcpy(out, b->data + i, (size_t)first);
        memcpy((char *)out + first, b->data, (size_t)(n - first));
    }
}

/* Moves what can be moved of one message; returns the bytes. The header goes first and whole. */
static int64_t advance(ql_comm *c, pending *p, header *got)
{
    int64_t all = p->head.bytes + (int64_t)sizeof(header), start = p->done;
    box *b = p->dir == SEND ? box_of(c, c->rank, p->peer) : box_of(c, p->peer, c->rank);
    uint64_t put = atomic_load(&b->put), taken = atomic_load(&b->got);
    int64_t can = p->dir == SEND ? BOX - (int64_t)(put - taken) : (int64_t)(put - taken);
    if (p->done == 0) {
        if (can < (int64_t)sizeof(header)) return 0;
        ring_copy(b, p->dir == SEND ? put : taken, got, p->dir == SEND ? &p->head : NULL,
                  sizeof(header));
        p->done = (int64_t)sizeof(header);
        can -= (int64_t)sizeof(header);
        if (p->dir == RECV &&
            (got->op != p->head.op || got->bytes != p->head.bytes || got->magic != MAGIC))
            return -1;
    }
    int64_t n = ql_min64(can, all - p->done);
    char *data = p->data + (p->done - (int64_t)sizeof(header));
    uint64_t at = (p->dir == SEND ? put : taken) + (uint64_t)(p->done - start);
    if (n > 0) ring_copy(b, at, data, p->dir == SEND ? data : NULL, n);
    p->done += n;
    if (p->done == start) return 0;
    atomic_fetch_add(p->dir == SEND ? &b->put : &b->got, (uint64_t)(p->done - start));
    ring(c, p->peer);
    return p->done - start;
}

static ql_status broken(ql_comm *c, ql_status code)
{
    c->broken = true;
    c->n = 0, c->depth = 0;
    return code;
}

static ql_status still_wanted(ql_comm *c, const pending *first, int64_t idle_ms)
{
    const char *what = op_names[first->head.op];
    if (atomic_load(&c->cancelled))
        return broken(c, ql_fail(QL_EPEER, "rank %d: %s was cancelled", c->rank, what));
    if (c->abort && ql_flag(c->abort))
        return broken(c, ql_fail(QL_EPEER,
                                 "rank %d: stopped in %s with rank %d, because a rank failed",
                                 c->rank, what, first->peer));
    if (idle_ms > c->timeout_ms)
        return broken(c, ql_fail(QL_EPEER, "rank %d: rank %d made no progress in %s for %lld ms",
                                 c->rank, first->peer, what, (long long)idle_ms));
    return QL_OK;
}

/* One pass over the list: in each direction to or from a peer only the oldest message moves.
 * Returns the first one that is not done in *left, NULL if all are. */
static ql_status pass(ql_comm *c, pending **left, bool *moved)
{
    uint32_t busy[2] = {0, 0};
    *left = NULL, *moved = false;
    for (int i = 0; i < c->n; i++) {
        pending *p = &c->list[i];
        header got = {0};
        if (p->done == p->head.bytes + (int64_t)sizeof(header) || busy[p->dir] >> p->peer & 1)
            continue;
        int64_t n = advance(c, p, &got);
        if (n < 0)
            return broken(c, ql_fail(QL_EINTERNAL,
                                     "rank %d waits for %s of %lld bytes, rank %d sent %s of %lld",
                                     c->rank, op_names[p->head.op], (long long)p->head.bytes,
                                     p->peer, got.op <= BARRIER ? op_names[got.op] : "?",
                                     (long long)got.bytes));
        if (n > 0) *moved = true;
        if (p->done == p->head.bytes + (int64_t)sizeof(header)) continue;
        busy[p->dir] |= 1u << p->peer;
        if (!*left) *left = p;
    }
    return QL_OK;
}

static void wait_for(ql_comm *c, const pending *p)
{
    if (c->waits_for) __atomic_store_n(c->waits_for, p ? 1 + p->peer : 0, __ATOMIC_RELAXED);
}

/* Until everything on the list is done. */
static ql_status finish(ql_comm *c)
{
    int64_t last = now_ms();
    pending *left;
    bool moved;
    for (;;) {
        uint32_t seen = atomic_load(&c->sh->rank[c->rank].bell);
        QL_TRY(pass(c, &left, &moved));
        if (!left) break;
        if (moved) {
            last = now_ms();
            continue;
        }
        wait_for(c, left);
        nap(c, seen);
        QL_TRY(still_wanted(c, left, now_ms() - last));
    }
    wait_for(c, NULL);
    c->n = 0;
    return QL_OK;
}

static ql_status ready(ql_comm *c, const char *op)
{
    if (atomic_load(&c->cancelled) || c->broken || (c->abort && ql_flag(c->abort)))
        QL_FAIL(QL_EPEER, "rank %d: %s after a rank failed or the run was stopped", c->rank, op);
    return QL_OK;
}

static ql_status enqueue(ql_comm *c, int dir, int peer, enum op op, void *data, int64_t bytes)
{
    if (c->n == PENDING_MAX)
        return broken(c, ql_fail(QL_EINVAL, "comm: more than %d messages in a group", PENDING_MAX));
    c->list[c->n++] = (pending){dir, peer, {(uint32_t)op, MAGIC, bytes}, data, 0};
    return QL_OK;
}

/* Piece p of out ← piece `rank` of rank p's in (or all of it, with step 0); ours too. Every rank
 * sends to its successors first, so that no rank is everybody's first. */
static ql_status exchange(ql_comm *c, enum op op, char *out, char *in, int64_t step, int64_t bytes)
{
    for (int i = 1; i < c->world; i++) {
        int to = (c->rank + i) % c->world, from = (c->rank + c->world - i) % c->world;
        QL_TRY(enqueue(c, SEND, to, op, in + to * step, bytes));
        QL_TRY(enqueue(c, RECV, from, op, out + from * bytes, bytes));
    }
    char *mine = out + c->rank * bytes;
    if (mine != in + c->rank * step) memcpy(mine, in + c->rank * step, (size_t)bytes);
    return c->world > 1 ? finish(c) : QL_OK;
}

/* ---- the table ------------------------------------------------------------------------------- */

static int64_t bytes_of(ql_tensor t)
{
    return t.rows * t.cols * (int64_t)ql_dtype_size(t.dtype);
}

static ql_status flat(const char *op, const char *name, ql_tensor t)
{
    if (t.rows < 0 || t.cols < 0 || (t.rows > 1 && t.ld != t.cols) ||
        (!t.data && t.rows * t.cols > 0))
        QL_FAIL(QL_EINVAL,
                "%s: %s is (%lld, %lld) with a row stride of %lld, needed is contiguous memory", op,
                name, (long long)t.rows, (long long)t.cols, (long long)t.ld);
    return QL_OK;
}

static ql_status cpu_all_gather(ql_comm *c, ql_stream *s, ql_tensor out, ql_tensor in)
{
    (void)s;
    QL_TRY(ready(c, "all_gather"));
    QL_TRY(flat("all_gather", "out", out));
    QL_TRY(flat("all_gather", "in", in));
    if (out.dtype != in.dtype || bytes_of(out) != c->world * bytes_of(in))
        QL_FAIL(QL_EINVAL, "all_gather: out has %lld bytes, needed are %d times in's %lld",
                (long long)bytes_of(out), c->world, (long long)bytes_of(in));
    c->sent += (c->world - 1) * bytes_of(in);
    return exchange(c, ALL_GATHER, out.data, in.data, 0, bytes_of(in));
}

static ql_status cpu_all_to_all(ql_comm *c, ql_stream *s, ql_tensor out, ql_tensor in)
{
    (void)s;
    QL_TRY(ready(c, "all_to_all"));
    QL_TRY(flat("all_to_all", "out", out));
    QL_TRY(flat("all_to_all", "in", in));
    int64_t part = bytes_of(in) / c->world;
    if (out.dtype != in.dtype || bytes_of(out) != bytes_of(in) || in.rows * in.cols % c->world)
        QL_FAIL(QL_EINVAL, "all_to_all: %lld bytes to %lld bytes in %d parts",
                (long long)bytes_of(in), (long long)bytes_of(out), c->world);
    if (out.data == in.data && part > 0) QL_FAIL(QL_EINVAL, "all_to_all: out is in");
    c->sent += (c->world - 1) * part;
    return exchange(c, ALL_TO_ALL, out.data, in.data, part, part);
}

/* x[i] of this piece becomes the sum or maximum over all ranks. The types wrap as unsigned ones do.
 */
static void combine(ql_comm *c, void *x, ql_dtype t, int64_t n, bool maximum)
{
    for (int64_t i = 0; i < n; i++) {
        uint64_t sum = 0;
        int32_t top = INT32_MIN;
        for (int r = 0; r < c->world; r++) {
            const char *from = c->scratch + r * n * (int64_t)ql_dtype_size(t);
            if (t == QL_I32) {
                sum += (uint32_t)((const int32_t *)(const void *)from)[i];
                int32_t v = ((const int32_t *)(const void *)from)[i];
                top = v > top ? v : top;
            } else {
                sum += (uint64_t)((const int64_t *)(const void *)from)[i];
            }
        }
        if (maximum)
            ((int32_t *)x)[i] = top;
        else if (t == QL_I32)
            ((int32_t *)x)[i] = (int32_t)(uint32_t)sum;
        else
            ((int64_t *)x)[i] = (int64_t)sum;
    }
}

static ql_status reduce(ql_comm *c, const char *op, ql_tensor x, bool maximum)
{
    QL_TRY(ready(c, op));
    QL_TRY(flat(op, "x", x));
    if (x.dtype != QL_I32 && (maximum || x.dtype != QL_I64))
        QL_FAIL(QL_EINVAL, "%s: x is %s, needed is %s", op, ql_dtype_name(x.dtype),
                maximum ? "int32" : "int32 or int64");
    int64_t size = (int64_t)ql_dtype_size(x.dtype), step = SCRATCH / size, total = x.rows * x.cols;
    for (int64_t i = 0; i < total; i += step) {
        int64_t n = ql_min64(step, total - i);
        char *piece = (char *)x.data + i * size;
        c->sent += (c->world - 1) * n * size;
        QL_TRY(exchange(c, REDUCE, c->scratch, piece, 0, n * size));
        combine(c, piece, x.dtype, n, maximum);
    }
    return QL_OK;
}

static ql_status cpu_all_sum(ql_comm *c, ql_stream *s, ql_tensor x)
{
    (void)s;
    return reduce(c, "all_sum", x, false);
}

static ql_status cpu_all_max(ql_comm *c, ql_stream *s, ql_tensor x)
{
    (void)s;
    return reduce(c, "all_max", x, true);
}

static ql_status point(ql_comm *c, int dir, ql_tensor x, int peer)
{
    const char *op = dir == SEND ? "send" : "recv";
    QL_TRY(ready(c, op));
    QL_TRY(flat(op, "x", x));
    if (peer < 0 || peer >= c->world || peer == c->rank)
        QL_FAIL(QL_EINVAL, "%s: rank %d of %d to or from rank %d", op, c->rank, c->world, peer);
    if (dir == SEND) c->sent += bytes_of(x);
    QL_TRY(enqueue(c, dir, peer, POINT, x.data, bytes_of(x)));
    return c->depth ? QL_OK : finish(c);
}

static ql_status cpu_send(ql_comm *c, ql_stream *s, ql_tensor x, int to)
{
    (void)s;
    return point(c, SEND, x, to);
}

static ql_status cpu_recv(ql_comm *c, ql_stream *s, ql_tensor x, int from)
{
    (void)s;
    return point(c, RECV, x, from);
}

static ql_status cpu_group_begin(ql_comm *c)
{
    QL_TRY(ready(c, "group_begin"));
    c->depth++;
    return QL_OK;
}

static ql_status cpu_group_end(ql_comm *c)
{
    QL_TRY(ready(c, "group_end"));
    if (c->depth < 1) QL_FAIL(QL_EINVAL, "group_end without group_begin");
    /* What the mailboxes take, and what is in them, moves at once; the rest when this rank waits. */
    pending *left;
    bool moved;
    return --c->depth || c->n == 0 ? QL_OK : pass(c, &left, &moved);
}

static ql_status cpu_land(ql_comm *c, int *over)
{
    pending *left = NULL;
    bool moved;
    QL_TRY(ready(c, "land"));
    if (!over) return c->n ? finish(c) : QL_OK;
    if (c->n) QL_TRY(pass(c, &left, &moved));
    *over = left == NULL;
    return QL_OK;
}

static ql_status cpu_barrier(ql_comm *c, ql_stream *s)
{
    (void)s;
    char in = 0, out[WORLD_MAX];
    QL_TRY(ready(c, "barrier"));
    return exchange(c, BARRIER, out, &in, 0, 1);
}

static void cpu_cancel(ql_comm *c)
{
    atomic_store(&c->cancelled, 1);
    if (c->sh) {
        atomic_fetch_add(&c->sh->rank[c->rank].bell, 1);
        futex(&c->sh->rank[c->rank].bell, FUTEX_WAKE, 1, NULL);
    }
}

static int64_t cpu_bytes_sent(ql_comm *c)
{
    return c->sent;
}

const ql_comm_table ql_cpu_comm = {
    .shared_bytes = cpu_shared_bytes,
    .open = cpu_comm_open,
    .close = cpu_comm_close,
    .cancel = cpu_cancel,
    .all_gather = cpu_all_gather,
    .all_to_all = cpu_all_to_all,
    .all_sum = cpu_all_sum,
    .all_max = cpu_all_max,
    .send = cpu_send,
    .recv = cpu_recv,
    .group_begin = cpu_group_begin,
    .group_end = cpu_group_end,
    .land = cpu_land,
    .barrier = cpu_barrier,
    .bytes_sent = cpu_bytes_sent,
};
