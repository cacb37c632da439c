/* Verbs that look back: plot, save. */
#include "magics/session.h"
#include "magics/view.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- plot
 * ------------------------------------------------------------------------------------------ */

static int ends_with(const char *s, const char *end)
{
    size_t n = strlen(s), k = strlen(end);
    return n >= k && strcmp(s + n - k, end) == 0;
}

static ql_status write_file(const char *path, const void *data, size_t n)
{
    FILE *f = fopen(path, "we");
    if (!f) QL_FAIL(QL_EIO, "%s: %s", path, strerror(errno));
    int bad = fwrite(data, 1, n, f) != n;
    bad |= fclose(f) != 0;
    if (bad) QL_FAIL(QL_EIO, "%s: %s", path, strerror(errno));
    return QL_OK;
}

static ql_status save_chart(ql_magics *m, const json_t *chart, const char *path)
{
    ql_buf b = {0};
    ql_status st = QL_OK;
    if (ends_with(path, ".png")) {
        if (m->host.chart) QL_GO(m->host.chart(m->host.self, chart, &b));
        if (b.len == 0)
            QL_GO(ql_fail(QL_ENOSUP,
                          "%s: PNG needs matplotlib in this notebook's Python; .svg needs nothing",
                          path));
    } else if (ends_with(path, ".svg")) {
        QL_GO(ql_chart_svg(chart, &b));
    } else {
        QL_GO(ql_fail(QL_EINVAL, "--save takes a name that ends in .svg or .png, not '%s'", path));
    }
    st = write_file(path, b.data, b.len);
out:
    ql_buf_free(&b);
    return st;
}

static ql_status collect_runs(ql_magics *m, const ql_call *call, json_t *runs)
{
    for (int i = 0; i < (call->n_args ? call->n_args : 1); i++) {
        json_t *r;
        QL_TRY(ql_session_run_report(m, call->n_args ? call->args[i] : NULL, &r));
        json_array_append_new(runs, r);
    }
    return QL_OK;
}

ql_status ql_verb_plot(ql_magics *m, const ql_call *call, json_t **out)
{
    const char *metric = ql_call_str(call, "metric", "loss"),
               *file = ql_call_str(call, "save", NULL);
    json_t *runs = json_array(), *chart = NULL, *bundle = NULL, *data = NULL;
    ql_status st = runs ? QL_OK : ql_fail(QL_ENOMEM, "out of memory");
    QL_GO(st);
    QL_GO(collect_runs(m, call, runs));
    size_t n = json_array_size(runs);
    if (strcmp(metric, "memory") == 0) {
        if (n > 1) QL_GO(ql_fail(QL_EINVAL, "--metric memory draws one run"));
        if (json_array_size(json_object_get(json_array_get(runs, 0), "memory")) == 0)
            QL_GO(ql_fail(QL_EINVAL, "%s has no memory records",
                          ql_jstr(json_array_get(runs, 0), "name", "the run")));
        chart = ql_chart_memory(json_array_get(runs, 0));
    } else {
        chart = ql_chart_runs(runs, metric, n == 2 || ql_call_flag(call, "diff"));
    }
    if (!chart) QL_GO(ql_fail(QL_ENOMEM, "no memory for a chart"));
    if (file) QL_GO(save_chart(m, chart, file));
    data = json_pack("{s:O, s:O, s:s}", "runs", runs, "chart", chart, "metric", metric);
    QL_GO(ql_chart_bundle(&m->host, chart, chart, &bundle));
    st = ql_result("plot", "qlora plot", json_incref(data), json_incref(bundle), out);
out:
    json_decref(runs);
    json_decref(chart);
    json_decref(data);
    json_decref(bundle);
    return st;
}

/* ---- save
 * ------------------------------------------------------------------------------------------- */

ql_status ql_session_folders(const char *name)
{
    char path[4096];
    struct stat s;
    if ((size_t)snprintf(path, sizeof path, "%s", name) >= sizeof path) QL_FAIL(QL_EINVAL, "%.60s…: too long a path", name);
    for (char *p = path + 1;; p++) {
        char c = *p;
        if (c && c != '/') continue;
        *p = 0;
        int e = mkdir(path, 0777) < 0 ? errno : 0;
        if (e == EEXIST) e = stat(path, &s) == 0 && S_ISDIR(s.st_mode) ? 0 : ENOTDIR;
        *p = c;
        if (e) QL_FAIL(QL_EIO, "%s: %s", path, strerror(e));
        if (!c) return QL_OK;
    }
}

/* Under another name first, so that a broken copy never carries the real one. */
static ql_status copy_file(const char *from, const char *to)
{
    char *part = NULL, block[65536];
    int in = open(from, O_RDONLY | O_CLOEXEC), out = -1;
    ssize_t n = 0;
    ql_status st = in < 0 ? ql_fail(QL_EIO, "%s: %s", from, strerror(errno)) : QL_OK;
    if (st == QL_OK && asprintf(&part, "%s.part", to) < 0)
        part = NULL, st = ql_fail(QL_ENOMEM, "out of memory");
    if (st == QL_OK && (out = open(part, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)) < 0)
        st = ql_fail(QL_EIO, "%s: %s", part, strerror(errno));
    while (st == QL_OK && (n = read(in, block, sizeof block)) > 0)
        for (ssize_t k = 0, w; k < n && st == QL_OK; k += w > 0 ? w : 0)
            if ((w = write(out, block + k, (size_t)(n - k))) < 0 && errno != EINTR)
                st = ql_fail(QL_EIO, "%s: %s", part, strerror(errno));
    if (st == QL_OK && n < 0) st = ql_fail(QL_EIO, "%s: %s", from, strerror(errno));
    if (out >= 0 && close(out) < 0 && st == QL_OK)
        st = ql_fail(QL_EIO, "%s: %s", part, strerror(errno));
    if (st == QL_OK && rename(part, to) < 0) st = ql_fail(QL_EIO, "%s: %s", to, strerror(errno));
    if (st != QL_OK && out >= 0) unlink(part);
    if (in >= 0) close(in);
    free(part);
    return st;
}

/* The folder that holds the adapter: the run's own, or its last checkpoint where it did not finish.
 */
ql_status ql_session_adapter_folder(const char *path, char **folder)
{
    json_t *report = NULL;
    struct stat s;
    ql_status st = QL_OK;
    char *file = NULL;
    if (asprintf(&file, "%s/adapter_model.safetensors", path) < 0)
        QL_FAIL(QL_ENOMEM, "out of memory");
    int here = stat(file, &s) == 0;
    free(file);
    const char *from = path;
    if (!here) {
        QL_GO(ql_run_report(path, &report));
        const json_t *all = json_object_get(report, "checkpoints");
        from = ql_jstr(json_array_get(all, json_array_size(all) - 1), "path", NULL);
        if (!from && ql_run_trains(path))
            QL_GO(ql_fail(QL_EINVAL, "%s has no adapter yet: it is being trained elsewhere (another notebook or terminal); a checkpoint comes every save_steps, and at Stop", path));
        if (!from)
            QL_GO(ql_fail(QL_EINVAL, "%s has no adapter: it ended before its first checkpoint (every save_steps, and at Stop)", path));
    }
    if (!(*folder = strdup(from))) st = ql_fail(QL_ENOMEM, "out of memory");
out:
    json_decref(report);
    return st;
}

static json_t *save_view(const char *folder, const char *base, double bytes, json_t *data)
{
    ql_view v = {0};
    ql_buf code = {0};
    ql_view_title(&v, folder, "adapter_model.safetensors (%s), adapter_config.json",
                  ql_fmt_bytes(bytes).s);
    ql_buf_put(&code,
               "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n");
    ql_buf_printf(&code,
                  "model = PeftModel.from_pretrained(\n    "
                  "AutoModelForCausalLM.from_pretrained(\"%s\"),\n    \"%s\")",
                  base, folder);
    ql_view_code(&v, ql_buf_str(&code));
    ql_push_note(&v, data);
    ql_buf_free(&code);
    return ql_view_bundle(&v, data);
}

/* transformers puts an adapter that lies beside a model's weights on top of them when it loads them: a merged model would have it twice. */
static ql_status no_model_there(const char *folder)
{
    char *file = NULL;
    if (asprintf(&file, "%s/config.json", folder) < 0) QL_FAIL(QL_ENOMEM, "out of memory");
    int there = access(file, F_OK) == 0;
    free(file);
    if (there)
        QL_FAIL(QL_EINVAL, "save: %s holds a model (config.json), to which transformers would add the adapter whenever it loads it: "
                           "another folder, please", folder);
    return QL_OK;
}

ql_status ql_verb_save(ql_magics *m, const ql_call *call, json_t **out)
{
    static const char *const files[] = {"adapter_model.safetensors", "adapter_config.json"},
                      *const pushed[] = {"adapter_model.safetensors", "adapter_config.json", "README.md", NULL};
    json_t *data = NULL, *config = NULL;
    char *path = NULL, *from = NULL, *to = NULL, *a = NULL, *b = NULL;
    struct stat s = {0};
    ql_status st = QL_OK;
    QL_TRY(ql_session_may_push(m, call));
    QL_TRY(ql_session_run_path(m, ql_call_str(call, "run", NULL), &path));
    QL_GO(ql_session_adapter_folder(path, &from));
    if (!(to = strdup(call->n_args && *call->args[0] ? call->args[0] : from)))
        QL_GO(ql_fail(QL_ENOMEM, "out of memory"));
    if (strcmp(from, to) != 0) {
        QL_GO(no_model_there(to));
        QL_GO(ql_session_folders(to));
    }
    for (size_t i = 0; i < 2; i++) {
        free(a);
        free(b);
        a = b = NULL;
        if (asprintf(&a, "%s/%s", from, files[i]) < 0 || asprintf(&b, "%s/%s", to, files[i]) < 0)
            QL_GO(ql_fail(QL_ENOMEM, "out of memory"));
        if (strcmp(from, to) != 0) QL_GO(copy_file(a, b));
        if (i == 0 && stat(b, &s) < 0) QL_GO(ql_fail(QL_EIO, "%s: %s", b, strerror(errno)));
    }
    config = ql_read_json_file(b);
    if (!config) QL_GO(ql_error_code());
    const char *base = ql_jstr(config, "base_model_name_or_path", ql_job_str(m->job, "model"));
    data = json_pack("{s:s, s:s, s:I}", "path", to, "from", from, "bytes", (json_int_t)s.st_size);
    if (!data) QL_GO(ql_fail(QL_EINVAL, "save: names must be UTF-8"));
    QL_GO(ql_session_push(m, call, from, pushed, data));
    st = ql_result("saved", to, json_incref(data), save_view(to, base ? base : "MODEL", (double)s.st_size, data), out);
out:
    json_decref(data);
    json_decref(config);
    free(path);
    free(from);
    free(to);
    free(a);
    free(b);
    return st;
}
