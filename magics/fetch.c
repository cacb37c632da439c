/* Names on the hub: fetched into its cache while a bar is shown. */
#include "magics/session.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

enum { TICK_MS = 100 };

typedef struct {
    ql_magics *m;
    const char *name;
    ql_live *live; /* NULL until there is something to fetch */
    int64_t at;    /* of the last tick, ms */
    ql_status st;  /* of showing */
} fetching;

static int64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static ql_status show(fetching *f, int64_t done, int64_t total)
{
    ql_live_options o = {.host = &f->m->host, .follow = f->m->follow, .name = f->name};
    if (!f->live) {
        o.number = ++f->m->displays;
        QL_TRY(ql_live_open(&o, &f->live));
        json_t *state = json_pack("{s:s, s:s, s:s}", "ev", "state", "state", "placing", "text", "downloading");
        ql_status st = ql_live_event(f->live, state);
        json_decref(state);
        QL_TRY(st);
    }
    json_t *ev = json_pack("{s:s, s:s, s:I, s:I}", "ev", "progress", "what", "download", "done", (json_int_t)done, "total",
                           (json_int_t)total);
    ql_status st = ql_live_event(f->live, ev);
    json_decref(ev);
    if (st == QL_OK) ql_live_tick(f->live);
    return st;
}

/* The host's wait lets go of its locks, so that a notebook's other threads get what was shown out. */
static int on_progress(void *user, const char *file, int64_t done, int64_t total)
{
    fetching *f = user;
    const ql_host *h = &f->m->host;
    (void)file;
    if (now_ms() - f->at < TICK_MS) return 0;
    f->at = now_ms();
    if (h->wait) h->wait(h->self, NULL, 0, 1);
    if (h->interrupts(h->self) > 0) return 1;
    if (total <= 0 || f->st != QL_OK) return f->st != QL_OK;
    f->st = show(f, done, total);
    return f->st != QL_OK;
}

static int on_disk(const char *name)
{
    struct stat s;
    return stat(name, &s) == 0;
}

ql_status ql_session_fetch(ql_magics *m, ql_fetch_what what, const char *name, const char *revision, const json_t *files,
                           char **path)
{
    char *bundled = ql_session_bundled(m, name);
    if (!bundled) QL_FAIL(QL_ENOMEM, "out of memory");
    if (!on_disk(bundled) && !ql_fetch_named(name) && !strpbrk(name, "*?[{")) { /* data may be a pattern */
        free(bundled);
        return ql_session_no_such(m, what, name);
    }
    if (!m->host.hub || on_disk(bundled) || !ql_fetch_named(name)) {
        *path = bundled;
        return QL_OK;
    }
    free(bundled);
    fetching f = {.m = m, .name = name};
    json_t *access = m->host.hub(m->host.self);
    ql_hub_access hub = {.cache = ql_jstr(access, "cache", NULL), .endpoint = ql_jstr(access, "endpoint", NULL),
                         .token = ql_jstr(access, "token", NULL), .offline = json_is_true(json_object_get(access, "offline")),
                         .progress = on_progress, .user = &f};
    ql_status st = ql_fetch(&hub, what, name, revision, files, path);
    json_decref(access);
    if (f.live) {
        ql_status shown = ql_live_finish(f.live, st == QL_OK ? "downloaded" : st == QL_ESTOP ? "stopped" : "failed", NULL);
        if (st == QL_OK) st = shown;
    }
    ql_live_close(f.live);
    return st;
}
