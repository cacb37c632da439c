#include "core/event.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { QUEUE_DEFAULT = 8 << 20, DEADLINE_DEFAULT = 30000, READ_CHUNK = 65536, LOCK_WAIT = 5000 };

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int left_of(double end)
{
    double ms = (end - now()) * 1e3;
    return ms <= 0 ? 0 : ms > 1e9 ? 1000000000 : (int)ceil(ms);
}

/* ---- writing -------------------------------------------------------------------------------------- */

struct ql_events {
    int fd, log_fd, deadline_ms;
    size_t limit;
    char *queue;         /* bytes [at, at + n) wait */
    size_t at, n, room;
    bool gone;           /* the reader: nothing is queued any more */
    double start;
    char *log_path;
};

ql_status ql_events_open(const ql_events_setup *set, ql_events **out)
{
    ql_events *e = calloc(1, sizeof *e);
    if (!e) QL_FAIL(QL_ENOMEM, "events: out of memory");
    e->fd = set->fd;
    e->log_fd = -1;
    e->limit = set->queue_bytes ? set->queue_bytes : QUEUE_DEFAULT;
    e->deadline_ms = set->deadline_ms ? set->deadline_ms : DEADLINE_DEFAULT;
    e->start = now();
    *out = e;
    return QL_OK;
}

/* Writes at most n bytes without waiting: > 0 written, 0 no room, < 0 errno. A write of PIPE_BUF bytes does not block a pipe
 * that poll calls writable. */
static ssize_t put_some(int fd, const char *p, size_t n)
{
    ssize_t k = send(fd, p, n, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (k < 0 && errno == ENOTSOCK) {
        struct pollfd f = {.fd = fd, .events = POLLOUT};
        if (poll(&f, 1, 0) <= 0) return 0;
        k = write(fd, p, n < PIPE_BUF ? n : PIPE_BUF);
    }
    if (k >= 0) return k;
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR || errno == ENOBUFS ? 0 : -errno;
}

static ql_status reader_gone(ql_events *e, const char *why)
{
    e->gone = true;
    e->n = 0;
    QL_FAIL(QL_EIO, "events: the front end %s", why);
}

/* Hands over until `keep` bytes wait at most, or the reader has taken nothing for timeout_ms. */
static ql_status drain(ql_events *e, size_t keep, int timeout_ms)
{
    double end = now() + timeout_ms * 1e-3;
    if (e->gone) QL_FAIL(QL_EIO, "events: the front end has gone");
    while (e->n > keep) {
        ssize_t k = put_some(e->fd, e->queue + e->at, e->n);
        if (k < 0) return reader_gone(e, "has gone");
        if (k > 0) {
            e->at += (size_t)k, e->n -= (size_t)k;
            end = now() + timeout_ms * 1e-3; /* slow is fine, dead is not */
            continue;
        }
        struct pollfd f = {.fd = e->fd, .events = POLLOUT};
        int ms = left_of(end);
        if (ms == 0) break;
        poll(&f, 1, ms);
    }
    if (e->n == 0) e->at = 0;
    return QL_OK;
}

static ql_status enqueue(ql_events *e, const char *line, size_t n)
{
    if (e->at && e->at + e->n + n > e->room) {
        memmove(e->queue, e->queue + e->at, e->n);
        e->at = 0;
    }
    if (e->n + n > e->room) {
        size_t room = e->room ? e->room : 4096;
        while (room < e->n + n) room *= 2;
        char *q = realloc(e->queue, room);
        if (!q) QL_FAIL(QL_ENOMEM, "events: no memory for %zu bytes of lines", room);
        e->queue = q, e->room = room;
    }
    memcpy(e->queue + e->at + e->n, line, n);
    e->n += n;
    return QL_OK;
}

static ql_status write_all(int fd, const char *p, size_t n)
{
    while (n) {
        ssize_t k = write(fd, p, n);
        if (k < 0 && errno == EINTR) continue;
        if (k < 0) QL_FAIL(QL_EIO, "%s", strerror(errno));
        p += k, n -= (size_t)k;
    }
    return QL_OK;
}

static ql_status send_line(ql_events *e, const char *line, size_t n)
{
    if (e->fd < 0) return QL_OK;
    if (e->gone) QL_FAIL(QL_EIO, "events: the front end has gone");
    QL_TRY(enqueue(e, line, n));
    QL_TRY(drain(e, 0, 0));
    if (e->n <= e->limit) return QL_OK;
    QL_TRY(drain(e, e->limit, e->deadline_ms));
    if (e->n > e->limit) return reader_gone(e, "has read nothing for too long");
    return QL_OK;
}

/* name and t come first, for people who read the file. */
static char *line_of(ql_events *e, const char *name, json_t *fields)
{
    json_t *o = json_pack("{s:s, s:f}", "ev", name, "t", round((now() - e->start) * 1e3) / 1e3);
    char *text = NULL, *line = NULL;
    if (o && (!fields || json_object_update(o, fields) == 0)) text = json_dumps(o, JSON_COMPACT);
    json_decref(o);
    if (text) {
        size_t n = strlen(text);
        line = realloc(text, n + 2);
        if (!line) free(text);
        else memcpy(line + n, "\n", 2);
    }
    return line;
}

static void drop_log(ql_events *e)
{
    if (e->log_fd >= 0) {
        flock(e->log_fd, LOCK_UN); /* ranks that were forked meanwhile hold the file open */
        close(e->log_fd);
    }
    e->log_fd = -1;
    free(e->log_path);
    e->log_path = NULL;
}

/* The file is a copy: when it cannot be written the run goes on, and says so once. */
static ql_status write_log(ql_events *e, const char *line)
{
    char text[512];
    if (e->log_fd < 0 || write_all(e->log_fd, line, strlen(line)) == QL_OK) return QL_OK;
    snprintf(text, sizeof text, "%.300s cannot be written (%.100s): it ends here, the run goes on", e->log_path, ql_error());
    ql_error_clear();
    drop_log(e);
    return ql_events_emit(e, "log", json_pack("{s:s, s:s}", "level", "warning", "text", text));
}

ql_status ql_events_emit(ql_events *e, const char *name, json_t *fields)
{
    char *line = line_of(e, name, fields);
    ql_status st = QL_OK, logged;
    json_decref(fields);
    if (!line) QL_FAIL(QL_EINTERNAL, "events: '%s' is not JSON, or there is no memory for it", name);
    logged = write_log(e, line);
    st = send_line(e, line, strlen(line));
    free(line);
    return st != QL_OK ? st : logged;
}

ql_status ql_events_flush(ql_events *e, int timeout_ms, size_t *left)
{
    ql_status st = e->fd < 0 ? QL_OK : drain(e, 0, timeout_ms);
    if (left) *left = e->n;
    return st;
}

/* One writer: two that train in one folder take each other's checkpoints away. An engine whose front end has just gone may need a
 * moment to leave; a file system without locks has none. */
static ql_status lock_log(int fd, const char *path)
{
    double end = now() + LOCK_WAIT * 1e-3;
    while (flock(fd, LOCK_EX | LOCK_NB) != 0 && (errno == EWOULDBLOCK || errno == EINTR)) {
        if (now() > end)
            QL_FAIL(QL_EINVAL, "%s is being written by another process: this run is trained or resumed elsewhere (another notebook or terminal); "
                               "stop it there first", path);
        poll(NULL, 0, 50);
    }
    return QL_OK;
}

ql_status ql_events_log(ql_events *e, const char *path)
{
    char last = '\n';
    int fd;
    char *copy;
    drop_log(e);
    if (!path) return QL_OK;
    fd = open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (fd < 0) QL_FAIL(QL_EIO, "%s cannot be opened: %s", path, strerror(errno));
    if (lock_log(fd, path) != QL_OK) {
        close(fd);
        return ql_error_code();
    }
    copy = strdup(path);
    off_t size = lseek(fd, 0, SEEK_END);
    if (size > 0 && pread(fd, &last, 1, size - 1) != 1) last = '\n';
    if (!copy || (last != '\n' && write_all(fd, "\n", 1) != QL_OK)) { /* a line cut by a crash stays alone */
        ql_status st = copy ? QL_EIO : QL_ENOMEM;
        free(copy);
        close(fd);
        QL_FAIL(st, "%s cannot be written", path);
    }
    e->log_fd = fd;
    e->log_path = copy;
    return QL_OK;
}

void ql_events_close(ql_events *e)
{
    if (!e) return;
    while (e->fd >= 0 && !e->gone && e->n) {
        ssize_t k = put_some(e->fd, e->queue + e->at, e->n);
        if (k <= 0) break;
        e->at += (size_t)k, e->n -= (size_t)k;
    }
    drop_log(e);
    free(e->queue);
    free(e);
}

ql_status ql_json_set_number(json_t *o, const char *key, double x)
{
    char text[128];
    int bad;
    if (isfinite(x)) {
        bad = json_object_set_new(o, key, json_real(x));
    } else {
        snprintf(text, sizeof text, "%.100s_text", key);
        bad = json_object_set_new(o, key, json_null());
        bad |= json_object_set_new(o, text, json_string(isnan(x) ? "nan" : x > 0 ? "inf" : "-inf"));
    }
    if (bad) QL_FAIL(QL_ENOMEM, "events: out of memory");
    return QL_OK;
}

/* ---- reading -------------------------------------------------------------------------------------- */

struct ql_lines {
    int fd;
    char *buf;       /* bytes [at, at + n) are unread; the first `seen` of them hold no newline */
    size_t at, n, seen, room;
    bool skipping;   /* in a line that is too long */
    bool end;
};

ql_status ql_lines_open(int fd, ql_lines **out)
{
    ql_lines *r = calloc(1, sizeof *r);
    if (!r) QL_FAIL(QL_ENOMEM, "lines: out of memory");
    r->fd = fd;
    *out = r;
    return QL_OK;
}

void ql_lines_close(ql_lines *r)
{
    if (!r) return;
    free(r->buf);
    free(r);
}

/* Length of the first whole line, newline included; 0: none. */
static size_t whole(ql_lines *r)
{
    char *nl = r->n > r->seen ? memchr(r->buf + r->at + r->seen, '\n', r->n - r->seen) : NULL;
    r->seen = nl ? (size_t)(nl - (r->buf + r->at)) : r->n;
    return nl ? r->seen + 1 : 0;
}

static void take(ql_lines *r, size_t n)
{
    r->at += n, r->n -= n, r->seen = 0;
    if (r->n == 0) r->at = 0;
}

static bool blank(const char *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (p[i] != ' ' && p[i] != '\t' && p[i] != '\r' && p[i] != '\n') return false;
    return true;
}

static ql_status parse(const char *p, size_t n, json_t **out)
{
    json_error_t err;
    json_t *v = json_loadb(p, n, JSON_REJECT_DUPLICATES, &err);
    if (!v) QL_FAIL(QL_EINVAL, "a line of %zu bytes is not JSON: %.120s (at byte %d)", n, err.text, err.position);
    if (!json_is_object(v)) {
        json_decref(v);
        QL_FAIL(QL_EINVAL, "a line of %zu bytes is JSON but no object", n);
    }
    *out = v;
    return QL_OK;
}

/* One read of what is there. */
static ql_status fill(ql_lines *r)
{
    ssize_t k;
    if (r->at && r->at + r->n + READ_CHUNK > r->room) {
        memmove(r->buf, r->buf + r->at, r->n);
        r->at = 0;
    }
    if (r->n + READ_CHUNK > r->room) {
        size_t room = r->room ? 2 * r->room : 2 * READ_CHUNK;
        char *b = realloc(r->buf, room);
        if (!b) QL_FAIL(QL_ENOMEM, "lines: no memory for a line of %zu bytes", r->n);
        r->buf = b, r->room = room;
    }
    k = read(r->fd, r->buf + r->at + r->n, READ_CHUNK);
    if (k > 0) r->n += (size_t)k;
    else if (k == 0 || (errno != EINTR && errno != EAGAIN && errno != EWOULDBLOCK)) r->end = true; /* a reset is an end */
    return QL_OK;
}

/* What the buffer holds: a line, an error, or nothing yet (NONE). */
static ql_status from_buffer(ql_lines *r, ql_lines_state *state, json_t **out)
{
    ql_status st;
    size_t n;
    *state = QL_LINES_NONE;
    while ((n = whole(r))) {
        const char *p = r->buf + r->at;
        bool skip = r->skipping || blank(p, n);
        r->skipping = false;
        st = skip ? QL_OK : n > QL_LINE_MAX ? ql_fail(QL_EINVAL, "a line of %zu bytes is longer than %d", n, QL_LINE_MAX) : parse(p, n, out);
        take(r, n);
        if (skip) continue;
        if (st == QL_OK) *state = QL_LINES_ONE;
        return st;
    }
    if (r->skipping) take(r, r->n);
    if (r->n > QL_LINE_MAX) {
        take(r, r->n);
        r->skipping = true;
        QL_FAIL(QL_EINVAL, "a line is longer than %d bytes: skipped", QL_LINE_MAX);
    }
    return QL_OK;
}

ql_status ql_lines_next(ql_lines *r, int timeout_ms, ql_lines_state *state, json_t **out)
{
    double end = now() + timeout_ms * 1e-3;
    for (;;) {
        QL_TRY(from_buffer(r, state, out));
        if (*state == QL_LINES_ONE) return QL_OK;
        if (r->end) {
            size_t n = r->n;
            bool cut = n && !r->skipping && !blank(r->buf + r->at, n);
            *state = QL_LINES_END;
            take(r, n);
            if (cut) QL_FAIL(QL_EINVAL, "input ends in the middle of a line (%zu bytes)", n);
            return QL_OK;
        }
        struct pollfd f = {.fd = r->fd, .events = POLLIN};
        int k = poll(&f, 1, timeout_ms < 0 ? -1 : left_of(end));
        if (k <= 0) return QL_OK; /* NONE: time is up, or a signal */
        QL_TRY(fill(r));
    }
}

json_t *ql_lines_wait(ql_lines *r)
{
    for (;;) {
        json_t *c = NULL;
        ql_lines_state state;
        ql_error_clear();
        if (ql_lines_next(r, -1, &state, &c) != QL_OK) continue;
        if (state == QL_LINES_END) return NULL;
        if (state == QL_LINES_ONE) return c;
    }
}
