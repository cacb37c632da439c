#include "magics/client.h"
#include "magics/process.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    TICK_MS = 100,
    READY_MS = 20000,
    DEVICES_MS = 20000,
    LINE_MAX_BYTES = 256 << 20, /* a longer line is no protocol */
    GARBAGE_MAX = 100,          /* lines that are not JSON before the engine is given up */
    LOG_KEEP = 1 << 20, /* of what the engine printed; twice that may be held for a moment */
    STUCK_MS = 5000,
    SLACK_MS = 1500 /* from end of input to SIGKILL */
};

struct ql_client {
    const ql_host *host;
    char *engine, *version;
    int ready_ms;
    pid_t pid;   /* 0: none; leader of its own process group */
    pid_t owner; /* who started it: a fork() of ours must not end it */
    char cwd[4096]; /* where it was started: paths in commands may be relative */
    int fd;      /* our end of the socketpair, -1 */
    int log;     /* memfd: the engine's stdout and stderr, which therefore never block it */
    off_t dropped; /* bytes at its beginning that are no longer held */
    int wstatus; /* how it ended, once `ended` */
    int ended, eof, garbage;
    int presses; /* stops asked for in the running command */
    json_int_t last_id;
    ql_buf in; /* received; lines before `start` are done with, [start, scanned) has no newline */
    size_t start, scanned;
};

static int64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static void nap(int ms)
{
    struct timespec t = {ms / 1000, (long)(ms % 1000) * 1000000};
    nanosleep(&t, NULL);
}

/* ---- starting and ending
 * ------------------------------------------------------------------------- */

/* Looks whether the engine has ended, without waiting. */
static int reap(ql_client *c)
{
    if (c->pid <= 0 || c->ended) return c->ended;
    pid_t p = waitpid(c->pid, &c->wstatus, WNOHANG);
    if (p == c->pid || (p < 0 && errno == ECHILD)) c->ended = 1;
    return c->ended;
}

/* Ends the engine and its ranks and waits for it: end of input first, then SIGKILL to the group. */
static void engine_end(ql_client *c, int patience_ms)
{
    /* A fork of the notebook may hold the socket, too: closing it alone would be no end of input. */
    if (c->fd >= 0 && c->owner == getpid()) shutdown(c->fd, SHUT_RDWR);
    ql_process_close(&c->fd);
    if (c->pid > 0 && c->owner == getpid()) {
        int64_t until = now_ms() + patience_ms;
        while (!reap(c) && now_ms() < until) nap(5);
        kill(-c->pid, SIGKILL);
        /* A process stuck inside a driver does not die at once; it must not take the notebook
         * along. */
        for (until = now_ms() + STUCK_MS; !reap(c) && now_ms() < until;) nap(2);
    }
}

static void engine_forget(ql_client *c)
{
    ql_process_close(&c->fd);
    ql_process_close(&c->log);
    c->pid = 0;
    c->ended = c->eof = c->garbage = 0;
    c->start = c->scanned = 0;
    c->dropped = 0;
    ql_buf_clear(&c->in);
    free(c->version);
    c->version = NULL;
}

/* Gives back the memory of what the engine printed long ago. */
static void log_trim(ql_client *c)
{
    off_t old = lseek(c->log, 0, SEEK_END) - LOG_KEEP;
    if (old - c->dropped < LOG_KEEP) return;
    fallocate(c->log, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, c->dropped, old - c->dropped);
    c->dropped = old;
}

/* The engine is gone: one error that says how, and a clean slate for the next command. */
static ql_status engine_died(ql_client *c, const char *while_doing)
{
    char how[160];
    ql_buf words = {0};
    engine_end(c, 200);
    ql_process_words(c->log, &words);
    ql_process_how(c->wstatus, how, sizeof how);
    engine_forget(c);
    ql_status st = ql_fail(
        QL_EPEER,
        "the engine died during %s (%s). The notebook and its variables are intact; the next verb "
        "starts a fresh engine.%s",
        while_doing, how, ql_buf_str(&words));
    ql_buf_free(&words);
    return st;
}

/* ---- waiting and reading
 * ------------------------------------------------------------------------- */

static int wait_fd(ql_client *c, int fd, short events, int ms)
{
    struct pollfd p = {fd, events, 0};
    return c->host->wait ? c->host->wait(c->host->self, &p, 1, ms) : poll(&p, 1, ms);
}

/* The next whole line, or NULL; valid until the next fill. */
static const char *next_line(ql_client *c, size_t *n)
{
    const char *nl = c->in.len > c->scanned
                         ? memchr(c->in.data + c->scanned, '\n', c->in.len - c->scanned)
                         : NULL;
    if (!nl) {
        c->scanned = c->in.len;
        return NULL;
    }
    const char *line = c->in.data + c->start;
    *n = (size_t)(nl - line);
    c->start = c->scanned = c->start + *n + 1;
    return line;
}

/* Reads what is there, without blocking. Only a part of a line is ever moved. */
static ql_status fill(ql_client *c)
{
    char part[65536];
    if (c->start > 0) {
        c->in.len -= c->start;
        memmove(c->in.data, c->in.data + c->start, c->in.len + 1);
        c->scanned -= c->start;
        c->start = 0;
    }
    for (int i = 0; i < 64; i++) {
        ssize_t n = recv(c->fd, part, sizeof part, MSG_DONTWAIT);
        if (n > 0) {
            ql_buf_add(&c->in, part, (size_t)n);
            if (c->in.failed) QL_FAIL(QL_ENOMEM, "no memory for the engine's events");
            if ((size_t)n < sizeof part) return QL_OK;
        } else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
            c->eof = 1;
            return QL_OK;
        } else if (errno == EAGAIN) {
            return QL_OK;
        }
    }
    return QL_OK;
}

/* The next event, or *ev = NULL when nothing came within one tick or the engine is gone (c->eof).
 */
static ql_status next_event(ql_client *c, json_t **ev)
{
    *ev = NULL;
    for (int polled = 0;;) {
        size_t n_line;
        const char *line = next_line(c, &n_line);
        if (line) {
            json_t *e = json_loadb(line, n_line, JSON_REJECT_DUPLICATES, NULL);
            if (!json_is_string(json_object_get(e, "ev"))) {
                json_decref(e);
                e = NULL;
                ++c->garbage;
            }
            if (c->garbage > GARBAGE_MAX) {
                engine_end(c, 0);
                engine_forget(c);
                QL_FAIL(QL_EPEER,
                        "the engine sent %d lines that are no events; it was ended. Are the engine "
                        "and this "
                        "front end of one build?",
                        GARBAGE_MAX + 1);
            }
            if (!e) continue;
            *ev = e;
            return QL_OK;
        }
        if (c->in.len - c->start > LINE_MAX_BYTES) {
            engine_end(c, 0);
            engine_forget(c);
            QL_FAIL(QL_EPEER, "the engine sent a line of more than %d MiB; it was ended",
                    LINE_MAX_BYTES >> 20);
        }
        if (c->eof || polled) return QL_OK;
        int n = wait_fd(c, c->fd, POLLIN, TICK_MS);
        polled = n <= 0;
        if (n > 0) QL_TRY(fill(c));
        /* A rank that outlives its supervisor may hold the socket open: ask the system, too. */
        if (n <= 0 && reap(c)) {
            QL_TRY(fill(c));
            c->eof = 1;
            polled = 0;
        }
    }
}

static ql_status send_all(ql_client *c, const char *data, size_t n)
{
    while (n > 0) {
        ssize_t k = send(c->fd, data, n, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (k > 0) {
            data += k;
            n -= (size_t)k;
        } else if (k < 0 && errno == EAGAIN) {
            wait_fd(c, c->fd, POLLOUT, TICK_MS);
            if (c->host->interrupts(c->host->self) > 0)
                QL_FAIL(QL_ESTOP, "stopped before the engine took the command");
            if (reap(c)) return QL_EPEER;
        } else if (!(k < 0 && errno == EINTR)) {
            return QL_EPEER; /* it died: the reader tells how */
        }
    }
    return QL_OK;
}

static ql_status send_json(ql_client *c, const json_t *v)
{
    char *text = json_dumps(v, JSON_COMPACT);
    if (!text) QL_FAIL(QL_ENOMEM, "out of memory");
    size_t n = strlen(text);
    text[n] = '\n'; /* the NUL's place: n + 1 bytes are sent, none is read as text again */
    ql_status st = send_all(c, text, n + 1);
    free(text);
    return st;
}

/* ---- the first event
 * ------------------------------------------------------------------------------ */

static ql_status engine_start(ql_client *c)
{
    char *argv[] = {c->engine, NULL};
    int pair[2];
    engine_forget(c);
    if (!c->engine[0]) QL_FAIL(QL_EINVAL, "no engine program is known; name it in QLORA_ENGINE");
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
        QL_FAIL(QL_EIO, "socketpair: %s", strerror(errno));
    c->fd = pair[0];
    int theirs = ql_process_fd(pair[1]);
    c->log = memfd_create("qlora-engine", MFD_CLOEXEC);
    if (c->log >= 0) {
        c->log = ql_process_fd(c->log);
        fcntl(c->log, F_SETFL, O_APPEND);
    }
    int e = theirs < 0 || c->log < 0 ? errno : ql_process_spawn(argv, c->log, c->log, theirs, &c->pid);
    ql_process_close(&theirs);
    if (e) {
        c->pid = 0;
        engine_forget(c);
        return ql_process_failed(c->engine, e);
    }
    c->owner = getpid();
    if (!getcwd(c->cwd, sizeof c->cwd)) c->cwd[0] = 0;
    return QL_OK;
}

static ql_status engine_ready(ql_client *c)
{
    QL_TRY(engine_start(c));
    int64_t until = now_ms() + c->ready_ms;
    for (;;) {
        json_t *ev;
        QL_TRY(next_event(c, &ev));
        if (!ev && c->eof) return engine_died(c, "its start");
        if (!ev && now_ms() > until) {
            engine_end(c, 0);
            engine_forget(c);
            QL_FAIL(QL_EPEER, "the engine %s said nothing for %.0f s after its start; it was ended",
                    c->engine, c->ready_ms / 1000.0);
        }
        if (!ev && c->host->interrupts(c->host->self) > 0) {
            engine_end(c, 0);
            engine_forget(c);
            QL_FAIL(QL_ESTOP, "stopped while the engine was starting");
        }
        const char *kind = json_string_value(json_object_get(ev, "ev"));
        int ready = kind && strcmp(kind, "ready") == 0;
        const char *v = json_string_value(json_object_get(ev, "version"));
        if (ready && v && strcmp(v, QL_VERSION) != 0) {
            ql_status st =
                ql_fail(QL_EPEER,
                        "the engine %s is version %s, this front end is %s; install them together",
                        c->engine, v, QL_VERSION);
            json_decref(ev);
            engine_end(c, 0);
            engine_forget(c);
            return st;
        }
        if (ready && v) c->version = strdup(v);
        json_decref(ev);
        if (ready) return QL_OK;
    }
}

/* ---- one command
 * ---------------------------------------------------------------------------------- */

static ql_status killed(ql_client *c, const char *what)
{
    kill(-c->pid, SIGKILL);
    engine_end(c, 0);
    engine_forget(c);
    QL_FAIL(QL_ESTOP,
            "%s: the engine was killed at the third stop. What was checkpointed stays; the next "
            "verb starts a "
            "fresh engine.",
            what);
}

/* Stop is pressed: ask, insist in words, kill. */
static ql_status presses(ql_client *c, int more, const char *what)
{
    for (; more > 0; more--) {
        c->presses++;
        if (c->presses == 1) {
            json_t *stop = json_pack("{s:s}", "cmd", "stop");
            ql_status st = send_json(c, stop);
            json_decref(stop);
            if (st == QL_ESTOP) ql_error_clear(); /* pressed again while sending: counted below */
        } else if (c->presses == 2) {
            c->host->print(c->host->self,
                           "stopping at the next action; a third stop kills the engine\n");
        } else {
            return killed(c, what);
        }
    }
    return QL_OK;
}

static ql_status ended_by_error(const json_t *ev)
{
    static const ql_status codes[] = {QL_EINVAL, QL_ENOMEM,  QL_EIO,  QL_ENOSUP,
                                      QL_ESTOP,  QL_EDEVICE, QL_EPEER};
    const char *status = json_string_value(json_object_get(ev, "status"));
    const char *text = json_string_value(json_object_get(ev, "text"));
    const json_t *rank = json_object_get(ev, "rank"), *step = json_object_get(ev, "step");
    char where[64] = "";
    ql_status code = QL_EDEVICE;
    for (size_t i = 0; status && i < sizeof codes / sizeof *codes; i++)
        if (strcmp(status, ql_status_name(codes[i])) == 0) code = codes[i];
    if (code == QL_ESTOP) code = QL_EPEER; /* only the user's own stop is an interrupt */
    if (text && strncmp(text, "rank ", 5) == 0) /* it says where by itself */
        ;
    else if (json_is_integer(rank) && json_is_integer(step))
        snprintf(where, sizeof where, "rank %lld, step %lld: ", (long long)json_integer_value(rank),
                 (long long)json_integer_value(step));
    else if (json_is_integer(rank))
        snprintf(where, sizeof where, "rank %lld: ", (long long)json_integer_value(rank));
    QL_FAIL(code, "%s%s", where, text ? text : "the engine reported an error without a text");
}

/* Whether ev ends command id; then *st is how. */
static int ends(const json_t *ev, json_int_t id, json_t **result, ql_status *st)
{
    const char *kind = json_string_value(json_object_get(ev, "ev"));
    const json_t *eid = json_object_get(ev, "id");
    if (eid && json_integer_value(eid) != id) return 0;
    if (strcmp(kind, "done") == 0) {
        json_t *r = json_object_get(ev, "result");
        *result = r ? json_incref(r) : json_object();
        *st = QL_OK;
        return 1;
    }
    if (strcmp(kind, "stopped") == 0) {
        *result = json_incref((json_t *)ev);
        *st = ql_fail(QL_ESTOP, "stopped");
        return 1;
    }
    if (strcmp(kind, "error") == 0) {
        *st = ended_by_error(ev);
        return 1;
    }
    return 0;
}

static ql_status follow(ql_client *c, json_int_t id, const char *what, ql_client_event event,
                        ql_client_tick tick, void *self, json_t **result)
{
    ql_status mine = QL_OK, st = QL_OK;
    int64_t ticked = now_ms();
    for (;;) {
        json_t *ev;
        QL_TRY(next_event(c, &ev));
        if (!ev && c->eof) return engine_died(c, what);
        if (ev) {
            int end = ends(ev, id, result, &st);
            if (!end && event && mine == QL_OK) {
                mine = event(self, ev);
                /* The view failed (a full disk, a closed notebook): stop the work, keep the reason.
                 */
                if (mine != QL_OK) QL_TRY(presses(c, c->presses == 0, what));
            }
            json_decref(ev);
            if (end) return mine != QL_OK ? mine : st;
        }
        if (!ev || now_ms() - ticked >= TICK_MS) {
            ticked = now_ms();
            log_trim(c);
            QL_TRY(presses(c, c->host->interrupts(c->host->self), what));
            if (tick && mine == QL_OK) tick(self);
        }
    }
}

ql_status ql_client_command(ql_client *c, json_t *command, ql_client_event event,
                            ql_client_tick tick, void *self, json_t **result)
{
    const char *what = json_string_value(json_object_get(command, "cmd"));
    char name[32];
    snprintf(name, sizeof name, "%s", what ? what : "?");
    if (c->pid > 0 && c->owner != getpid())
        engine_forget(c);        /* a fork of the notebook: not its engine */
    char here[sizeof c->cwd];
    int moved = c->pid > 0 && (!getcwd(here, sizeof here) || strcmp(here, c->cwd) != 0);
    /* It died between cells, or the notebook went to another folder. */
    if (c->pid > 0 && (reap(c) || moved)) {
        engine_end(c, moved ? SLACK_MS : 0);
        engine_forget(c);
    }
    if (c->pid <= 0) QL_TRY(engine_ready(c));
    c->presses = 0;
    json_int_t id = ++c->last_id;
    if (json_object_set_new(command, "id", json_integer(id)) < 0)
        QL_FAIL(QL_ENOMEM, "out of memory");
    ql_status st = send_json(c, command);
    if (st == QL_EPEER) return engine_died(c, name);
    QL_TRY(st);
    json_t *r = NULL;
    st = follow(c, id, name, event, tick, self, &r);
    *result = r;
    return st;
}

/* ---- --devices
 * ------------------------------------------------------------------------------------ */

ql_status ql_client_devices(ql_client *c, json_t **out)
{
    char flag[] = "--devices", *argv[] = {c->engine, flag, NULL};
    int pipes[2], wstatus = 0;
    ql_buf text = {0}, words = {0};
    pid_t pid;
    ql_status st = QL_OK;
    if (!c->engine[0]) QL_FAIL(QL_EINVAL, "no engine program is known; name it in QLORA_ENGINE");
    if (pipe2(pipes, O_CLOEXEC) < 0) QL_FAIL(QL_EIO, "pipe: %s", strerror(errno));
    int log = memfd_create("qlora-devices", MFD_CLOEXEC);
    int theirs = ql_process_fd(pipes[1]);
    if (log >= 0) log = ql_process_fd(log);
    int e = theirs < 0 || log < 0 ? errno : ql_process_spawn(argv, theirs, log, -1, &pid);
    ql_process_close(&theirs);
    if (e) {
        st = ql_process_failed(c->engine, e);
        goto out;
    }
    int64_t until = now_ms() + DEVICES_MS;
    for (;;) {
        char part[4096];
        int n = wait_fd(c, pipes[0], POLLIN, TICK_MS);
        ssize_t k = n > 0 ? read(pipes[0], part, sizeof part) : -1;
        if (k > 0) ql_buf_add(&text, part, (size_t)k);
        if (k == 0) break;
        if (c->host->interrupts(c->host->self) > 0)
            st = ql_fail(QL_ESTOP, "stopped while looking for devices");
        else if (now_ms() > until || text.len > (1 << 20))
            st = ql_fail(QL_EPEER, "%s --devices does not end; it was killed", c->engine);
        if (st != QL_OK) break;
    }
    if (st != QL_OK) kill(-pid, SIGKILL);
    while (waitpid(pid, &wstatus, 0) < 0 && errno == EINTR) continue;
    QL_GO(st);
    *out = NULL;
    json_t *v = json_loadb(ql_buf_str(&text), text.len, 0, NULL);
    if (v && wstatus == 0) {
        *out = v;
    } else {
        char how[160];
        json_decref(v);
        ql_process_words(log, &words);
        st = ql_fail(QL_EPEER, "%s --devices failed (%s)%s", c->engine,
                     ql_process_how(wstatus, how, sizeof how), ql_buf_str(&words));
    }
out:
    close(pipes[0]);
    ql_process_close(&log);
    ql_buf_free(&text);
    ql_buf_free(&words);
    return st;
}

/* ---- open and close
 * -------------------------------------------------------------------------------- */

ql_status ql_client_open(const char *engine, int ready_ms, const ql_host *host, ql_client **out)
{
    ql_client *c = calloc(1, sizeof *c);
    if (!c || !(c->engine = strdup(engine ? engine : ""))) {
        free(c);
        QL_FAIL(QL_ENOMEM, "out of memory");
    }
    c->host = host;
    c->ready_ms = ready_ms > 0 ? ready_ms : READY_MS;
    c->fd = c->log = -1;
    *out = c;
    return QL_OK;
}

void ql_client_close(ql_client *c)
{
    if (!c) return;
    engine_end(c, SLACK_MS);
    engine_forget(c);
    ql_buf_free(&c->in);
    free(c->engine);
    free(c);
}

void ql_client_forked(ql_client *c)
{
    engine_forget(c);
}

int ql_client_running(const ql_client *c)
{
    return c->pid > 0 && !c->ended && c->owner == getpid();
}

const char *ql_client_version(const ql_client *c)
{
    return c->version ? c->version : "";
}
