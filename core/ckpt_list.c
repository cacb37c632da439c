/* Which checkpoints a run has, and which are removed. */
#include "core/ckpt.h"
#include "core/ckpt_names.h"
#include "core/file.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* N of "checkpoint-N"; -1: another name. */
static int64_t step_of(const char *name)
{
    int64_t n = 0;
    const char *p = name + 11;
    if (strncmp(name, "checkpoint-", 11) || !*p || strlen(p) > 15) return -1;
    for (; *p; p++) {
        if (!isdigit((unsigned char)*p)) return -1;
        n = n * 10 + (*p - '0');
    }
    return n;
}

static bool has(const char *dir, const char *name)
{
    char path[QL_PATH_MAX];
    return ql_path_join(path, dir, name) == QL_OK && ql_path_is_file(path);
}

static const char *const parts[] = {"adapter_model.safetensors", "adapter_config.json", "trainer_state.json", "engine_state.json"};
static const char *const optimizer = "optimizer.safetensors";
enum { PARTS = sizeof parts / sizeof *parts };

/* Our folders appear under their name only when whole; one from elsewhere, or damaged, lacks something. */
static bool whole(const char *dir)
{
    bool all = true;
    for (size_t i = 0; i < PARTS; i++) all = all && has(dir, parts[i]);
    return all;
}

static int by_step(const void *a, const void *b)
{
    const ql_ckpt_entry *x = a, *y = b;
    return x->step < y->step ? -1 : x->step > y->step;
}

static ql_status add(ql_ckpt_entry **list, int *n, const char *run, const char *name)
{
    ql_ckpt_entry e = {.step = step_of(name)}, *grown;
    if (e.step < 0) return QL_OK;
    QL_TRY(ql_path_join(e.path, run, name));
    if (!whole(e.path)) return QL_OK;
    e.resumable = has(e.path, optimizer);
    grown = realloc(*list, (size_t)(*n + 1) * sizeof **list);
    if (!grown) QL_FAIL(QL_ENOMEM, "checkpoints of %s: out of memory", run);
    *list = grown;
    grown[(*n)++] = e;
    return QL_OK;
}

/* Calls f for each ".checkpoint-N" with this end in the run, with its path and that of its checkpoint-N. */
static void each_hidden(const char *run, const char *end, void (*f)(const char *hidden, const char *plain))
{
    struct dirent *e;
    DIR *d = opendir(run);
    while (d && (e = readdir(d))) {
        char hidden[QL_PATH_MAX], plain[QL_PATH_MAX], name[64];
        size_t n = strlen(e->d_name), k = strlen(end);
        if (e->d_name[0] != '.' || n <= k + 1 || n >= sizeof name || strcmp(e->d_name + n - k, end)) continue;
        snprintf(name, sizeof name, "%.*s", (int)(n - k - 1), e->d_name + 1);
        if (step_of(name) < 0 || strlen(run) + n + 2 > QL_PATH_MAX) continue;
        if (ql_path_join(hidden, run, e->d_name) == QL_OK && ql_path_join(plain, run, name) == QL_OK) f(hidden, plain);
    }
    if (d) closedir(d);
}

static void restore(const char *hidden, const char *plain)
{
    if (!ql_path_is_dir(plain)) rename(hidden, plain);
}

void ql_ckpt_mend(const char *run)
{
    each_hidden(run, ".old", restore);
}

static void clear(const char *hidden, const char *plain)
{
    (void)plain;
    ql_path_remove(hidden);
}

static void clear_old(const char *hidden, const char *plain)
{
    if (whole(plain)) ql_path_remove(hidden);
}

void ql_ckpt_sweep(const char *run)
{
    each_hidden(run, ".tmp", clear);
    each_hidden(run, ".gone", clear);
    each_hidden(run, ".old", clear_old);
}

ql_status ql_ckpt_list(const char *run, ql_ckpt_entry **out, int *n)
{
    ql_ckpt_entry *list = NULL;
    int count = 0;
    ql_status st = QL_OK;
    struct dirent *e;
    DIR *d = opendir(run);
    *out = NULL, *n = 0;
    if (!d && (errno == ENOENT || errno == ENOTDIR)) return QL_OK;
    if (!d) QL_FAIL(QL_EIO, "the folder %s cannot be read: %s", run, strerror(errno));
    while (st == QL_OK && (e = readdir(d))) st = add(&list, &count, run, e->d_name);
    closedir(d);
    if (st != QL_OK) {
        free(list);
        return st;
    }
    if (count) qsort(list, (size_t)count, sizeof *list, by_step);
    *out = list, *n = count;
    return QL_OK;
}

/* What a folder lacks that has something of a checkpoint. */
static ql_status not_whole(const char *path)
{
    for (size_t i = 0; i < PARTS; i++)
        if (!has(path, parts[i]))
            QL_FAIL(QL_EINVAL, "%s is not whole: it has no %s. Name an earlier checkpoint; where adapter_model.safetensors is there, "
                    "train --adapter starts from it", path, parts[i]);
    QL_FAIL(QL_EINVAL, "%s has no optimizer state (save_only_model): it can be loaded as an adapter, but not resumed", path);
}

ql_status ql_ckpt_find(const char *which, char path[QL_PATH_MAX])
{
    ql_ckpt_entry *list = NULL;
    int n = 0, found = -1, some = 0;
    if (!ql_path_is_dir(which)) QL_FAIL(QL_EINVAL, "there is no checkpoint %s", which);
    if (whole(which) && has(which, optimizer)) {
        snprintf(path, QL_PATH_MAX, "%s", which);
        return QL_OK;
    }
    ql_ckpt_mend(which);
    QL_TRY(ql_ckpt_list(which, &list, &n));
    for (int i = 0; i < n; i++)
        if (list[i].resumable) found = i;
    if (found >= 0) snprintf(path, QL_PATH_MAX, "%s", list[found].path);
    free(list);
    if (found >= 0) return QL_OK;
    if (n) QL_FAIL(QL_EINVAL, "the checkpoints in %s have no optimizer state (save_only_model): none can be resumed; train --adapter starts from one", which);
    for (size_t i = 0; i < PARTS; i++) some |= has(which, parts[i]) && strcmp(parts[i], "adapter_config.json") != 0;
    if (some && !has(which, "events.jsonl")) return not_whole(which);
    QL_FAIL(QL_EINVAL, "%s has no whole checkpoint to go on from: train again", which);
}

/* First out of sight under another name, so that a kill leaves no half checkpoint behind. */
static ql_status remove_checkpoint(const char *run, const ql_ckpt_entry *e)
{
    char hidden[QL_PATH_MAX], name[64];
    snprintf(name, sizeof name, ".checkpoint-%lld.gone", (long long)e->step);
    QL_TRY(ql_path_join(hidden, run, name));
    ql_path_remove(hidden);
    if (rename(e->path, hidden) != 0) QL_FAIL(QL_EIO, "%s cannot be removed: %s", e->path, strerror(errno));
    if (!ql_path_remove(hidden)) QL_FAIL(QL_EIO, "%s cannot be removed: %s", hidden, strerror(errno));
    return QL_OK;
}

static bool same_path(const char *a, const char *b)
{
    char x[QL_PATH_MAX], y[QL_PATH_MAX];
    return a && b && realpath(a, x) && realpath(b, y) && strcmp(x, y) == 0;
}

ql_status ql_ckpt_rotate(const char *run, int64_t limit, const char *best, int64_t newest)
{
    ql_ckpt_entry *list = NULL, *e;
    int n = 0, upto = 0;
    int64_t left, keep = limit;
    ql_status st = QL_OK;
    if (limit <= 0) return QL_OK;
    QL_TRY(ql_ckpt_list(run, &list, &n));
    while (upto < n && list[upto].step <= newest) upto++;
    for (int i = 0; i + 1 < n; i++) /* the newest and the best are never removed, even with limit 1 */
        if (same_path(list[(upto + i) % n].path, best) && keep < 2) keep = 2;
    left = n;
    for (int i = 0; st == QL_OK && i + 1 < n && left > keep; i++) {
        e = &list[(upto + i) % n];
        if (same_path(e->path, best)) continue;
        st = remove_checkpoint(run, e);
        left--;
    }
    free(list);
    return st;
}

ql_status ql_ckpt_keep_only(const char *run, const char *best)
{
    ql_ckpt_entry *list = NULL;
    int n = 0, there = 0;
    ql_status st = QL_OK;
    QL_TRY(ql_ckpt_list(run, &list, &n));
    for (int i = 0; i < n; i++) there |= same_path(list[i].path, best);
    for (int i = 0; there && st == QL_OK && i < n; i++)
        if (!same_path(list[i].path, best)) st = remove_checkpoint(run, &list[i]);
    free(list);
    return st;
}
