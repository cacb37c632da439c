/* Run folders as they are found again: names, histories, checkpoints. */
#include "core/ckpt.h"
#include "core/qlora.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

/* "prefix-12" → 12; -1 for any other name. */
static int64_t numbered(const char *name, const char *prefix)
{
    size_t n = strlen(prefix);
    char *end;
    if (strncmp(name, prefix, n) != 0 || !isdigit((unsigned char)name[n])) return -1;
    errno = 0;
    long long v = strtoll(name + n, &end, 10);
    return *end || errno ? -1 : v;
}

ql_status ql_run_next_name(const char *dir, char *buf, size_t size)
{
    int64_t last = 0;
    DIR *d = opendir(dir);
    if (!d && errno != ENOENT) QL_FAIL(QL_EIO, "%s: %s", dir, strerror(errno));
    for (struct dirent *e; d && (e = readdir(d));) {
        int64_t n = numbered(e->d_name, "run-");
        if (n > last && n < INT32_MAX) last = n;
    }
    if (d) closedir(d);
    if ((size_t)snprintf(buf, size, "run-%lld", (long long)last + 1) >= size)
        QL_FAIL(QL_EINVAL, "a run's name does not fit");
    return QL_OK;
}

int ql_run_trains(const char *path)
{
    char file[QL_PATH_MAX];
    if ((size_t)snprintf(file, sizeof file, "%s/events.jsonl", path) >= sizeof file) return 0;
    int fd = open(file, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    int locked = flock(fd, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    close(fd);
    return locked;
}

ql_status ql_run_checkpoint(const char *path, char **out)
{
    char found[QL_PATH_MAX];
    ql_status st = ql_ckpt_find(path, found);
    if (st != QL_OK && ql_run_trains(path)) {
        ql_error_clear();
        QL_FAIL(QL_EINVAL, "%s is being trained elsewhere (another notebook or terminal) and has no checkpoint to go on from yet; stop it there first", path);
    }
    QL_TRY(st);
    char *copy = strdup(found);
    if (!copy) QL_FAIL(QL_ENOMEM, "no memory for a path");
    *out = copy;
    return QL_OK;
}

static int by_step(const void *a, const void *b)
{
    int64_t x = numbered(*(char *const *)a, "checkpoint-"),
            y = numbered(*(char *const *)b, "checkpoint-");
    return (x > y) - (x < y);
}

/* [{"step", "path"}] of the checkpoints under a run, other programs' too, in order of their steps. */
static ql_status find_checkpoints(const char *path, json_t *out)
{
    char **names = NULL;
    size_t n = 0;
    ql_status st = QL_OK;
    DIR *d = opendir(path);
    for (struct dirent *e; d && (e = readdir(d));) {
        if (numbered(e->d_name, "checkpoint-") < 0) continue;
        char **more = realloc(names, (n + 1) * sizeof *more);
        if (more) names = more;
        if (!more || !(names[n] = strdup(e->d_name))) QL_GO(ql_fail(QL_ENOMEM, "out of memory"));
        n++;
    }
    if (n > 1) qsort(names, n, sizeof *names, by_step);
    for (size_t i = 0; i < n; i++) {
        char full[4096];
        snprintf(full, sizeof full, "%s/%s", path, names[i]);
        json_array_append_new(out, json_pack("{s:I, s:s}", "step",
                                             (json_int_t)numbered(names[i], "checkpoint-"), "path",
                                             full));
    }
out:
    if (d) closedir(d);
    for (size_t i = 0; i < n; i++) free(names[i]);
    free(names);
    return st;
}

/* What a resumed run does again replaces what it did before. */
static void drop_after(json_t *history, json_int_t step)
{
    for (size_t i = json_array_size(history); i-- > 0;)
        if (json_integer_value(json_object_get(json_array_get(history, i), "step")) > step)
            json_array_remove(history, i);
}

static void replay(json_t *report, json_t *ev)
{
    const char *kind = json_string_value(json_object_get(ev, "ev"));
    json_t *history = json_object_get(report, "log_history");
    if (!kind) return;
    if (strcmp(kind, "start") == 0) {
        drop_after(history, json_integer_value(json_object_get(ev, "resumed")));
        json_object_set(report, "start", ev);
    } else if (strcmp(kind, "step") == 0 || strcmp(kind, "eval") == 0) {
        json_object_del(ev, "ev");
        json_array_append(history, ev);
    } else if (strcmp(kind, "memory") == 0) {
        json_object_del(ev, "ev");
        json_array_append(json_object_get(report, "memory"), ev);
    }
}

/* A line that is no JSON is the last one of a killed process, or damage: what can be read is kept.
 */
static int read_events(const char *path, json_t *report)
{
    char file[4096], *line = NULL;
    size_t cap = 0;
    ssize_t n;
    snprintf(file, sizeof file, "%s/events.jsonl", path);
    FILE *f = fopen(file, "re");
    if (!f) return 0;
    while ((n = getline(&line, &cap, f)) > 0) {
        json_t *ev = json_loadb(line, (size_t)n, 0, NULL);
        if (json_is_object(ev)) replay(report, ev);
        json_decref(ev);
    }
    free(line);
    fclose(f);
    return json_array_size(json_object_get(report, "log_history")) > 0;
}

static ql_status read_state(const char *file, json_t *report)
{
    json_error_t err;
    json_t *state = json_load_file(file, 0, &err), *history = json_object_get(state, "log_history");
    ql_status st = QL_OK;
    if (!state)
        st = ql_fail(QL_EINVAL, "%s: %s (line %d)", file, err.text, err.line);
    else if (!json_is_array(history))
        st = ql_fail(QL_EINVAL, "%s: no log_history in it", file);
    else
        json_object_set(report, "log_history", history);
    json_decref(state);
    return st;
}

/* The folder of a trainer's state: the path's own, or that of its last checkpoint (as transformers
 * writes it). */
static ql_status find_state(const char *path, const json_t *checkpoints, json_t *report)
{
    char file[4096];
    struct stat s;
    snprintf(file, sizeof file, "%s/trainer_state.json", path);
    if (stat(file, &s) == 0) return read_state(file, report);
    size_t n = json_array_size(checkpoints);
    if (n == 0) QL_FAIL(QL_EINVAL, "%s: neither events.jsonl nor trainer_state.json in it", path);
    snprintf(file, sizeof file, "%s/trainer_state.json",
             json_string_value(json_object_get(json_array_get(checkpoints, n - 1), "path")));
    return read_state(file, report);
}

ql_status ql_run_report(const char *path, json_t **out)
{
    struct stat s;
    ql_status st = QL_OK;
    if (stat(path, &s) < 0) QL_FAIL(QL_EINVAL, "%s: %s", path, strerror(errno));
    json_t *report =
        json_pack("{s:s, s:[], s:[], s:[]}", "path", path, "log_history", "checkpoints", "memory");
    if (!report) QL_FAIL(QL_EINVAL, "a run's path must be UTF-8");
    if (!S_ISDIR(s.st_mode)) {
        QL_GO(read_state(path, report));
    } else {
        json_t *checkpoints = json_object_get(report, "checkpoints");
        QL_GO(find_checkpoints(path, checkpoints));
        if (!read_events(path, report)) QL_GO(find_state(path, checkpoints, report));
    }
    const json_t *history = json_object_get(report, "log_history");
    json_int_t step = 0;
    for (size_t i = 0; i < json_array_size(history); i++) {
        json_int_t k = json_integer_value(json_object_get(json_array_get(history, i), "step"));
        if (k > step) step = k;
    }
    json_object_set_new(report, "step", json_integer(step));
    *out = report;
    report = NULL;
out:
    json_decref(report);
    return st;
}
