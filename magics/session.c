#include "magics/session.h"
#include "magics/view.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char *dup_or_null(const char *s)
{
    return s ? strdup(s) : NULL;
}

ql_status ql_magics_open(const ql_magics_options *o, const ql_host *host, ql_magics **out)
{
    ql_magics *m = calloc(1, sizeof *m);
    ql_status st = QL_OK;
    if (!m) QL_FAIL(QL_ENOMEM, "out of memory");
    m->host = *host;
    m->engine = strdup(o->engine ? o->engine : "");
    m->runs = strdup(o->runs ? o->runs : "runs");
    m->bundled = dup_or_null(o->bundled);
    m->hub = dup_or_null(o->hub);
    m->follow = o->follow;
    m->lines_every = o->lines_every;
    if (!m->engine || !m->runs) QL_GO(ql_fail(QL_ENOMEM, "out of memory"));
    QL_GO(ql_job_new(&m->job));
    QL_GO(ql_client_open(m->engine, o->ready_ms, &m->host, &m->client));
    *out = m;
    return QL_OK;
out:
    ql_magics_close(m);
    return st;
}

void ql_magics_forked(ql_magics *m)
{
    ql_client_forked(m->client);
}

void ql_magics_close(ql_magics *m)
{
    if (!m) return;
    ql_client_close(m->client);
    ql_job_free(m->job);
    json_decref(m->model);
    json_decref(m->devices);
    json_decref(m->last);
    free(m->last_path);
    free(m->engine);
    free(m->runs);
    free(m->bundled);
    free(m->hub);
    free(m);
}

ql_status ql_magics_run(ql_magics *m, const char *line, const char *body, json_t **out)
{
    ql_call call;
    json_t *result = NULL;
    ql_error_clear();
    QL_TRY(ql_call_bind(line, body, &call));
    /* A stop pressed before this cell began is not meant for it. */
    m->host.interrupts(m->host.self);
    ql_status st = call.verb->run(m, &call, &result);
    if (st == QL_OK && call.line.silent) {
        json_decref(result);
        result = NULL;
    }
    if (st == QL_OK)
        *out = result;
    else
        json_decref(result);
    ql_call_free(&call);
    return st;
}

const json_t *ql_magics_last(const ql_magics *m)
{
    return m->last;
}

ql_status ql_result(const char *kind, const char *repr, json_t *data, json_t *bundle, json_t **out)
{
    json_t *r =
        json_pack("{s:s, s:o, s:o, s:o}", "kind", kind, "repr", ql_text_json(repr, strlen(repr)),
                  "data", data ? data : json_object(), "bundle", bundle ? bundle : json_null());
    if (!r) QL_FAIL(QL_ENOMEM, "no memory for a result");
    *out = r;
    return QL_OK;
}

/* Both forms of `--devices`: the array alone, or an object that holds it. */
ql_status ql_session_devices(ql_magics *m, json_t **borrowed)
{
    if (!m->devices) QL_TRY(ql_client_devices(m->client, &m->devices));
    json_t *inside = json_object_get(m->devices, "devices");
    *borrowed = inside ? inside : m->devices;
    return QL_OK;
}

int64_t ql_session_world(const ql_magics *m, const ql_job *job)
{
    const char *devices = ql_job_str(job, "devices");
    if (!devices) return 0;
    if (strncmp(devices, "cpu", 3) == 0)
        return devices[3] == ':' ? strtoll(devices + 4, NULL, 10) : 1;
    if (devices[strcspn(devices, "0123456789")]) {
        int64_t n = 1;
        for (const char *p = devices; *p; p++) n += *p == ',';
        return n;
    }
    const json_t *inside = json_object_get(m->devices, "devices");
    return (int64_t)json_array_size(inside ? inside : m->devices);
}

ql_status ql_session_need_model(const ql_magics *m)
{
    const char *model = ql_job_str(m->job, "model");
    if (!model || !*model)
        QL_FAIL(QL_EINVAL, "no model yet: %%qlora load MODEL (`tiny` comes along)");
    return QL_OK;
}

static int exists(const char *path)
{
    struct stat s;
    return stat(path, &s) == 0;
}

ql_status ql_session_eval_data(const ql_job *job)
{
    const char *file = ql_job_str(job, "eval_dataset");
    if (!file) QL_FAIL(QL_EINVAL, "no evaluation data: %%qlora config --eval_dataset FILE");
    if (!exists(file) && !ql_fetch_named(file)) QL_FAIL(QL_EINVAL, "eval_dataset '%s': there is no such file or folder", file);
    return QL_OK;
}

char *ql_session_bundled(const ql_magics *m, const char *name)
{
    char *path = NULL;
    if (m->bundled && *name && !strchr(name, '/') && name[0] != '.') { /* before a folder of that name here, which is ./NAME */
        if (asprintf(&path, "%s/%s", m->bundled, name) < 0) return NULL;
        if (exists(path)) return path;
        free(path);
    }
    return strdup(name);
}

/* Among what Tab would offer after `line`. */
static void suggest(ql_magics *m, const char *line, const char *name, char *near, size_t size)
{
    json_t *all = ql_magics_complete(m, line);
    const char *names[256];
    int n = 0;
    for (size_t i = 0; i < json_array_size(all) && n < 256; i++)
        if (strncmp(json_string_value(json_array_get(all, i)), "--", 2) != 0)
            names[n++] = json_string_value(json_array_get(all, i));
    ql_verb_nearest(name, names, n, near, size);
    if (!near[0] && n > 0) snprintf(near, size, "there is '%s'", names[n - 1]);
    json_decref(all);
}

ql_status ql_session_no_such(ql_magics *m, ql_fetch_what what, const char *name)
{
    char near[160];
    suggest(m, what == QL_FETCH_MODEL ? "load " : "data ", name, near, sizeof near);
    const char *guess = strncmp(near, "did", 3) == 0 ? near : "";
    if (what == QL_FETCH_MODEL)
        QL_FAIL(QL_EINVAL, "no model '%s': there is no such folder, and names on the hub are organisation/name%s%s", name, *guess ? "; " : "", guess);
    QL_FAIL(QL_EINVAL, "no data '%s': there is no such file, folder or variable%s%s", name, *guess ? "; " : "", guess);
}

/* Runs of an earlier kernel are not taken unasked: the newest is named. */
static ql_status no_run_yet(ql_magics *m)
{
    json_t *all = ql_magics_complete(m, "plot ");
    struct timespec newest = {0};
    char name[256] = "", file[4096];
    struct stat s;
    for (size_t i = 0; i < json_array_size(all); i++) {
        const char *run = json_string_value(json_array_get(all, i));
        snprintf(file, sizeof file, "%s/%s/events.jsonl", m->runs, run);
        if (stat(file, &s) < 0 || s.st_mtim.tv_sec < newest.tv_sec) continue;
        if (s.st_mtim.tv_sec == newest.tv_sec && s.st_mtim.tv_nsec < newest.tv_nsec) continue;
        newest = s.st_mtim;
        snprintf(name, sizeof name, "%s", run);
    }
    json_decref(all);
    if (*name) QL_FAIL(QL_EINVAL, "no run since this notebook was started; the newest in %s/ is '%s': give its name (of save, merge and generate: --run %s)", m->runs, name,
                       name);
    QL_FAIL(QL_EINVAL, "there is no run yet: %%qlora train makes one");
}

ql_status ql_session_run_path(ql_magics *m, const char *name, char **path)
{
    char *p = NULL, near[120];
    if (!name) {
        if (!m->last_path) return no_run_yet(m);
        if (!(*path = strdup(m->last_path))) QL_FAIL(QL_ENOMEM, "out of memory");
        return QL_OK;
    }
    if (asprintf(&p, "%s/%s", m->runs, name) < 0) QL_FAIL(QL_ENOMEM, "out of memory");
    if (exists(p) && *name) {
        *path = p;
        return QL_OK;
    }
    free(p);
    if (exists(name)) {
        if (!(*path = strdup(name))) QL_FAIL(QL_ENOMEM, "out of memory");
        return QL_OK;
    }
    if (m->host.variable) { /* r, after r = %qlora train */
        json_t *found = NULL;
        QL_TRY(m->host.variable(m->host.self, name, "", &found));
        const char *of = ql_jstr(found, "run", NULL);
        int is_run = of != NULL;
        if (is_run) *path = strdup(of);
        json_decref(found);
        if (is_run && !*path) QL_FAIL(QL_ENOMEM, "out of memory");
        if (is_run) return QL_OK;
    }
    suggest(m, "plot ", name, near, sizeof near);
    QL_FAIL(QL_EINVAL, "no run '%s' under %s, and no such file%s%s", name, m->runs,
            near[0] ? "; " : "", near);
}

ql_status ql_session_run_report(ql_magics *m, const char *name, json_t **out)
{
    char *path = NULL;
    json_t *r = NULL;
    QL_TRY(ql_session_run_path(m, name, &path));
    ql_status st = ql_run_report(path, &r);
    if (st == QL_OK) {
        size_t n = strlen(path);
        while (n > 1 && path[n - 1] == '/') path[--n] = 0;
        const char *base = strrchr(path, '/');
        char *folder = NULL;
        base = base ? base + 1 : path;
        /* A bare trainer_state.json is known by its folder. */
        if (strcmp(base, "trainer_state.json") == 0 && base > path + 1) {
            folder = strndup(path, (size_t)(base - path) - 1);
            base = folder && strrchr(folder, '/') ? strrchr(folder, '/') + 1
                   : folder                       ? folder
                                                  : path;
        }
        json_object_set_new(r, "name", ql_text_json(base, strlen(base)));
        json_object_set(r, "history", json_object_get(r, "log_history"));
        json_object_del(r, "log_history");
        free(folder);
        *out = r;
    }
    free(path);
    return st;
}

json_t *ql_read_json_file(const char *path)
{
    json_error_t err;
    json_t *v = json_load_file(path, JSON_REJECT_DUPLICATES, &err);
    if (!v && err.line < 0)
        ql_fail(QL_EINVAL, "%s: %s", path, access(path, F_OK) ? "there is no such file" : "it cannot be read");
    else if (!v)
        ql_fail(QL_EINVAL, "%s: %s (line %d)", path, err.text, err.line);
    return v;
}

/* What came from the hub and is not on this machine (any more) is fetched again, as the same commit. */
static ql_status relocate(ql_magics *m, ql_job *job, const char *setting, ql_fetch_what what)
{
    const char *was = ql_job_str(job, setting), *in = was ? strstr(was, "/snapshots/") : NULL;
    const json_t *files = what == QL_FETCH_DATA ? ql_job_get(job, "data_files") : NULL;
    char *folder = NULL, *path = NULL;
    if (!in || exists(was) || !ql_fetch_named(was)) return QL_OK;
    in += strlen("/snapshots/");
    in += strcspn(in, "/"); /* a file in the folder */
    QL_TRY(ql_session_fetch(m, what, was, NULL, files, &folder));
    ql_status st = asprintf(&path, "%s%s", folder, in) < 0 ? ql_fail(QL_ENOMEM, "out of memory") : QL_OK;
    json_t *v = st == QL_OK ? ql_text_json(path, strlen(path)) : NULL;
    if (st == QL_OK) st = ql_job_set(job, setting, v);
    if (st == QL_OK) free(path);
    json_decref(v);
    free(folder);
    return st;
}

void ql_session_cut_checkpoint(char *path)
{
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/') path[--n] = 0;
    char *slash = strrchr(path, '/');
    if (slash && strncmp(slash + 1, "checkpoint-", 11) == 0) *slash = 0;
}

ql_status ql_session_run_job(ql_magics *m, const char *path, ql_job **job)
{
    char file[4112], run[4096];
    snprintf(run, sizeof run, "%s", path);
    ql_session_cut_checkpoint(run);
    snprintf(file, sizeof file, "%s/job.json", run);
    if (!exists(file)) return ql_job_copy(m->job, job);
    json_t *v = ql_read_json_file(file);
    if (!v) return ql_error_code();
    ql_status st = ql_job_from_json(v, job);
    if (st != QL_OK) ql_error_prefix("%s: ", file);
    json_decref(v);
    QL_TRY(st);
    st = relocate(m, *job, "model", QL_FETCH_MODEL);
    if (st == QL_OK) st = relocate(m, *job, "data", QL_FETCH_DATA);
    if (st == QL_OK) return QL_OK;
    ql_job_free(*job);
    *job = NULL;
    return st;
}

ql_status ql_session_text_job(ql_magics *m, const char *run, ql_job **job)
{
    char *path = NULL;
    if (!run || strcmp(run, "none") == 0 || ql_job_str(m->job, "model")) {
        QL_TRY(ql_session_need_model(m));
        return ql_job_copy(m->job, job);
    }
    QL_TRY(ql_session_run_path(m, run, &path));
    ql_status st = ql_session_run_job(m, path, job);
    free(path);
    if (st != QL_OK || ql_job_str(*job, "model")) return st;
    ql_job_free(*job);
    *job = NULL;
    return ql_session_need_model(m);
}

ql_status ql_session_adapter(ql_magics *m, const char *run, const ql_job *job, json_t **adapter)
{
    char *path = NULL, *folder = NULL;
    if ((run && strcmp(run, "none") == 0) || (!run && !m->last_path)) {
        const char *first = run ? NULL : ql_job_str(job, "adapter");
        *adapter = first ? json_string(first) : json_null();
        return QL_OK;
    }
    QL_TRY(ql_session_run_path(m, run, &path));
    ql_status st = ql_session_adapter_folder(path, &folder);
    if (st == QL_OK) *adapter = ql_text_json(folder, strlen(folder));
    free(path);
    free(folder);
    return st;
}

/* Of a run, its own adapter or its last checkpoint's; else a folder; else a name on the hub. */
static ql_status adapter_path(ql_magics *m, const char *name, char **folder)
{
    char *run = NULL, *path = NULL;
    if (asprintf(&run, "%s/%s", m->runs, name) < 0) QL_FAIL(QL_ENOMEM, "out of memory");
    int here = exists(run) || exists(name);
    free(run);
    if (!here && ql_fetch_named(name)) return ql_session_fetch(m, QL_FETCH_ADAPTER, name, NULL, NULL, folder);
    ql_status st = ql_session_run_path(m, name, &path);
    if (st == QL_OK) st = ql_session_adapter_folder(path, folder);
    if (st != QL_OK) ql_error_prefix("adapter: ");
    free(path);
    return st;
}

/* A setting that the call changed, through what its name means: then it is a path. */
static ql_status name_to_path(ql_magics *m, ql_job *job, const char *setting, const char *before)
{
    char *path = NULL;
    const char *name = ql_job_str(job, setting);
    if (!name || strcmp(name, before) == 0) return QL_OK;
    if (strcmp(setting, "adapter") == 0) {
        QL_TRY(adapter_path(m, name, &path));
    } else {
        char *eval = NULL; /* of a bundled name, as for data */
        if (ql_session_data(m, name, job, &path) != QL_OK) {
            ql_error_prefix("%s: ", setting);
            return ql_error_code();
        }
        if (strcmp(path, name) && asprintf(&eval, "%s/eval.jsonl", path) > 0 && exists(eval)) {
            free(path);
            path = eval;
        } else {
            free(eval);
        }
    }
    json_t *v = ql_text_json(path, strlen(path));
    ql_status st = ql_job_set(job, setting, v);
    json_decref(v);
    free(path);
    return st;
}

/* What the call has set without effect, as `config` notes it in its view. */
static void say_notes(ql_magics *m, const json_t *before, const json_t *after)
{
    size_t i, k;
    json_t *text, *old;
    json_array_foreach((json_t *)after, i, text) {
        ql_buf b = {0};
        char *line = NULL;
        int known = 0;
        json_array_foreach((json_t *)before, k, old) known |= json_equal(old, text);
        if (known || asprintf(&line, "! %s", json_string_value(text)) < 0) continue;
        ql_view_wrap(&b, line, QL_VIEW_COLUMNS, 2);
        ql_buf_put(&b, "\n");
        m->host.print(m->host.self, ql_buf_str(&b));
        ql_buf_free(&b);
        free(line);
    }
}

ql_status ql_session_apply(ql_magics *m, const ql_call *call, ql_job *job)
{
    static const char *const named[] = {"adapter", "eval_dataset"};
    char before[2][4096];
    for (size_t i = 0; i < 2; i++) {
        const char *was = ql_job_str(job, named[i]);
        snprintf(before[i], sizeof before[i], "%s", was ? was : "");
    }
    json_t *noted = ql_job_notes(job), *notes = NULL;
    ql_status st = ql_call_apply(call, job);
    for (size_t i = 0; i < 2 && st == QL_OK; i++) st = name_to_path(m, job, named[i], before[i]);
    if (st == QL_OK && call->verb->run != ql_verb_config) say_notes(m, noted, notes = ql_job_notes(job));
    json_decref(noted);
    json_decref(notes);
    return st;
}
