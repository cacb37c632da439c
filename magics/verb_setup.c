/* Verbs that set things up and look at them: info, load, config, data, plan, help. */
#include "magics/session.h"
#include "magics/view.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

/* ---- info --------------------------------------------------------------------------------------
 */

static double meminfo(const char *key)
{
    char line[256];
    double kib = (double)NAN;
    FILE *f = fopen("/proc/meminfo", "re");
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, key, strlen(key)) == 0) kib = strtod(line + strlen(key) + 1, NULL);
    if (f) fclose(f);
    return kib * 1024;
}

/* The container's limit, where there is one: the machine's own figure does not help then. */
static double cgroup_limit(void)
{
    static const char *const files[] = {"/sys/fs/cgroup/memory.max",
                                        "/sys/fs/cgroup/memory/memory.limit_in_bytes"};
    double v = (double)NAN;
    for (int i = 0; i < 2 && !isfinite(v); i++) {
        FILE *f = fopen(files[i], "re");
        if (f && fscanf(f, "%lf", &v) != 1) v = (double)NAN;
        if (f) fclose(f);
    }
    return v < 1e15 ? v : (double)NAN;
}

static json_t *space(const char *name, const char *path)
{
    struct statvfs s;
    if (statvfs(path, &s) < 0) return json_null();
    return json_pack("{s:s, s:s, s:f, s:f}", "name", name, "path", path, "free",
                     (double)s.f_bavail * (double)s.f_frsize, "total",
                     (double)s.f_blocks * (double)s.f_frsize);
}

static const char *cpu_name(const json_t *devices)
{
    size_t i;
    const json_t *d;
    json_array_foreach((json_t *)devices, i, d) if (strcmp(ql_jstr(d, "backend", ""), "cpu") == 0) return ql_jstr(d, "name", "CPU");
    return "CPU";
}

ql_status ql_verb_info(ql_magics *m, const ql_call *call, json_t **out)
{
    json_t *devices = NULL, *missing = json_array(),
           *libraries = m->host.libraries ? m->host.libraries(m->host.self) : NULL;
    (void)call;
    /* Asked anew: a device may have been freed, or the driver installed, since. */
    json_decref(m->devices);
    m->devices = NULL;
    ql_status st = ql_session_devices(m, &devices);
    if (st == QL_ESTOP) {
        json_decref(missing);
        json_decref(libraries);
        return st;
    }
    if (st != QL_OK) {
        json_array_append_new(missing, ql_text_json(ql_error(), strlen(ql_error())));
        ql_error_clear();
    }
    const char *lacks = json_string_value(json_object_get(m->devices, "missing"));
    if (lacks && *lacks) {
        ql_buf b = {0};
        ql_buf_printf(&b, "No GPU: %s. Everything runs on the CPU here.", strncmp(lacks, "cuda: ", 6) == 0 ? lacks + 6 : lacks);
        json_array_append_new(missing, ql_buf_json(&b));
        ql_buf_free(&b);
    }
    double limit = cgroup_limit();
    json_t *memory =
        json_pack("{s:f, s:f}", "total", meminfo("MemTotal"), "available", meminfo("MemAvailable"));
    if (isfinite(limit)) json_object_set_new(memory, "limit", json_real(limit));
    json_t *data = json_pack(
        "{s:s, s:s, s:s, s:i, s:o, s:[o,o], s:o}", "version", QL_VERSION, "engine", m->engine,
        "cpu", cpu_name(devices), "cores", (int)sysconf(_SC_NPROCESSORS_ONLN), "memory", memory, "disks",
        space("this folder", "."), space("/dev/shm", "/dev/shm"), "missing", missing);
    if (json_is_object(m->devices)) json_object_update_missing(data, m->devices);
    json_object_set(data, "devices", devices ? devices : json_null());
    if (libraries) json_object_set_new(data, "libraries", libraries);
    return ql_result("info", "qlora info", data, ql_view_info(data), out);
}

/* ---- load --------------------------------------------------------------------------------------
 */

ql_status ql_verb_load(ql_magics *m, const ql_call *call, json_t **out)
{
    ql_job *job = NULL;
    json_t *report = NULL;
    char *path = NULL;
    ql_status st = QL_OK;
    json_t *value = NULL;
    const char *had = ql_job_str(m->job, "adapter");
    QL_TRY(ql_job_copy(m->job, &job));
    QL_GO(ql_session_apply(m, call, job));
    QL_GO(ql_session_fetch(m, QL_FETCH_MODEL, call->args[0], ql_job_str(job, "revision"), NULL, &path));
    value = ql_text_json(path, strlen(path));
    /* An adapter that was set for another model is not meant for this one. */
    if (had && !json_equal(ql_job_get(m->job, "model"), value) && strcmp(had, ql_job_str(job, "adapter")) == 0)
        QL_GO(ql_job_set(job, "adapter", NULL));
    QL_GO(ql_job_set(job, "model", value));
    QL_GO(ql_model_report(job, &report));
    if (!json_object_get(report, "name"))
        json_object_set_new(report, "name", ql_text_json(call->args[0], strlen(call->args[0])));
    /* Everything succeeded: only now does the notebook's job change. */
    ql_job_free(m->job);
    m->job = job;
    job = NULL;
    json_decref(m->model);
    m->model = json_incref(report);
    st = ql_result("model", call->args[0], json_incref(report), ql_view_model(report), out);
out:
    ql_job_free(job);
    json_decref(report);
    json_decref(value);
    free(path);
    return st;
}

/* ---- config -------------------------------------------------------------------------------------
 */

static ql_status config_load(const char *file, ql_job **job)
{
    json_t *v = ql_read_json_file(file);
    if (!v) return ql_error_code();
    ql_status st =
        json_is_object(v) ? QL_OK : ql_fail(QL_EINVAL, "%s: not an object of settings", file);
    const char *key;
    json_t *value;
    if (st == QL_OK) json_object_foreach(v, key, value)
        {
            /* A run's job.json and transformers' own dumps may hold names that mean nothing here.
             */
            st = ql_job_set(*job, key, value);
            if (st != QL_OK) {
                ql_error_prefix("%s: ", file);
                break;
            }
        }
    json_decref(v);
    return st;
}

/* Back to the defaults; what was loaded stays. */
static ql_status config_reset(const ql_job *old, ql_job **job)
{
    static const char *const keep[] = {"model", "revision", "data", "eval_dataset"};
    ql_job *fresh;
    QL_TRY(ql_job_new(&fresh));
    for (size_t i = 0; i < sizeof keep / sizeof *keep; i++) {
        const json_t *v = ql_job_get(old, keep[i]);
        ql_status st =
            v && ql_job_is_set(old, keep[i]) ? ql_job_set(fresh, keep[i], (json_t *)v) : QL_OK;
        if (st != QL_OK) {
            ql_job_free(fresh);
            return st;
        }
    }
    ql_job_free(*job);
    *job = fresh;
    return QL_OK;
}

/* Under another name first: what stood in the file is not lost where the disk is full. What is no file (/dev/stdout) has no other name. */
static ql_status config_save(const char *file, const json_t *settings)
{
    struct stat s;
    char *part = NULL;
    int whole = lstat(file, &s) < 0 || S_ISREG(s.st_mode), bad;
    if (asprintf(&part, "%s%s", file, whole ? ".part" : "") < 0) QL_FAIL(QL_ENOMEM, "out of memory");
    errno = 0;
    bad = json_dump_file(settings, part, JSON_INDENT(2)) < 0 || (whole && rename(part, file) < 0);
    ql_status st = bad ? ql_fail(QL_EIO, "%s cannot be written: %s", file, strerror(errno ? errno : EIO)) : QL_OK;
    if (bad && whole) unlink(part);
    free(part);
    return st;
}

ql_status ql_verb_config(ql_magics *m, const ql_call *call, json_t **out)
{
    ql_job *job = NULL;
    json_t *data = NULL, *notes = NULL, *open = NULL;
    const char *from = ql_call_str(call, "load", NULL), *to = ql_call_str(call, "save", NULL);
    ql_status st = QL_OK;
    QL_TRY(ql_job_copy(m->job, &job));
    if (ql_call_flag(call, "reset")) QL_GO(config_reset(m->job, &job));
    if (from) QL_GO(config_load(from, &job));
    QL_GO(ql_session_apply(m, call, job));
    /* Before there is data a setting may wait for it (eval_strategy for an eval_dataset): said, not
     * refused. */
    if (ql_job_check(job) != QL_OK) {
        if (ql_job_str(job, "data")) QL_GO(ql_error_code());
        open = ql_text_json(ql_error(), strlen(ql_error()));
        ql_error_clear();
    }
    data = ql_job_json(job);
    if (!data) QL_GO(ql_fail(QL_ENOMEM, "out of memory"));
    if (to) QL_GO(config_save(to, data));
    /* The adapters' sizes depend on the settings: PEFT's line is made anew. */
    if (m->model) {
        json_t *report = NULL;
        QL_GO(ql_model_report(job, &report));
        json_decref(m->model);
        m->model = report;
    }
    ql_job_free(m->job);
    m->job = job;
    job = NULL;
    notes = ql_job_notes(m->job);
    if (open) json_array_append(notes, open);
    st = ql_result("config", "qlora config", json_incref(data),
                   ql_view_config(m->job, m->model, notes, ql_session_world(m, m->job),
                                  ql_call_flag(call, "all")),
                   out);
out:
    ql_job_free(job);
    json_decref(data);
    json_decref(notes);
    json_decref(open);
    return st;
}

/* ---- data ---------------------------------------------------------------------------------------
 */

static int identifier(const char *s)
{
    if (!isalpha((unsigned char)*s) && *s != '_') return 0;
    while (isalnum((unsigned char)*s) || *s == '_') s++;
    return *s == 0;
}

/* A bundled folder holds its own split: train.jsonl, and eval.jsonl, which is taken unless another
 * was set. */
static ql_status bundled_data(ql_job *job, char **path)
{
    char *train = NULL, *eval = NULL;
    ql_status st = QL_OK;
    if (asprintf(&train, "%s/train.jsonl", *path) < 0) QL_FAIL(QL_ENOMEM, "out of memory");
    if (asprintf(&eval, "%s/eval.jsonl", *path) < 0) {
        free(train);
        QL_FAIL(QL_ENOMEM, "out of memory");
    }
    if (access(train, R_OK) == 0) {
        free(*path);
        *path = train;
        train = NULL;
        json_t *v = ql_text_json(eval, strlen(eval));
        if (access(eval, R_OK) == 0 && !ql_job_is_set(job, "eval_dataset"))
            st = ql_job_set(job, "eval_dataset", v);
        json_decref(v);
    }
    free(train);
    free(eval);
    return st;
}

/* A bare name that is a variable of the notebook, and also a file, a folder or bundled data here, could mean either. */
static ql_status one_meaning(ql_magics *m, const char *name)
{
    json_t *found = NULL;
    char *bundled = ql_session_bundled(m, name);
    int here = access(name, F_OK) == 0, ours = bundled && strcmp(bundled, name) != 0;
    free(bundled);
    if (!here && !ours) return QL_OK;
    QL_TRY(m->host.variable(m->host.self, name, "", &found)); /* only asks whether it has rows */
    int both = found && !json_is_null(found) && !json_object_get(found, "run");
    json_decref(found);
    if (both)
        QL_FAIL(QL_EINVAL, "%s is a variable of this notebook and also %s: give one another name%s%s%s", name, here ? "a file here" : "bundled data",
                here ? " (or say ./" : "", here ? name : "", here ? " for the file)" : "");
    return QL_OK;
}

/* A variable's rows are written to a file of theirs; other names are files, folders or on the hub. */
ql_status ql_session_data(ql_magics *m, const char *name, const ql_job *job, char **path)
{
    json_t *found = NULL;
    if (m->host.variable && identifier(name)) {
        QL_TRY(one_meaning(m, name));
        QL_TRY(m->host.variable(m->host.self, name, m->runs, &found));
    }
    const char *file = ql_jstr(found, "path", NULL);
    ql_status st = QL_OK;
    if (!file) st = ql_session_fetch(m, QL_FETCH_DATA, name, NULL, ql_job_get(job, "data_files"), path);
    else if (!(*path = strdup(file))) st = ql_fail(QL_ENOMEM, "out of memory");
    json_decref(found);
    return st;
}

ql_status ql_verb_data(ql_magics *m, const ql_call *call, json_t **out)
{
    ql_job *job = NULL;
    char *path = NULL;
    json_t *value = NULL, *report = NULL;
    ql_status st = QL_OK;
    QL_TRY(ql_job_copy(m->job, &job));
    QL_GO(ql_session_apply(m, call, job)); /* first: data_files says what is fetched */
    if (call->n_args > 0) {
        QL_GO(ql_session_data(m, call->args[0], job, &path));
        if (strcmp(path, call->args[0]) != 0) QL_GO(bundled_data(job, &path));
        value = ql_text_json(path, strlen(path));
        QL_GO(ql_job_set(job, "data", value));
    }
    if (!ql_job_str(job, "data"))
        QL_GO(ql_fail(QL_EINVAL, "no data yet: %%qlora data FILE, or a variable's name"));
    QL_GO(ql_session_need_model(m));
    QL_GO(ql_data_report(job, (int)ql_min64(ql_call_int(call, "show", 1), 50), &report));
    ql_job_free(m->job);
    m->job = job;
    job = NULL;
    json_object_set_new(
        report, "name",
        ql_text_json(call->n_args ? call->args[0] : ql_job_str(m->job, "data"),
                     strlen(call->n_args ? call->args[0] : ql_job_str(m->job, "data"))));
    st = ql_result("data", "qlora data", json_incref(report), ql_view_data(report), out);
out:
    ql_job_free(job);
    json_decref(value);
    json_decref(report);
    free(path);
    return st;
}

/* ---- plan ---------------------------------------------------------------------------------------
 */

/* "2xT4", "8xA100-80", "2x15GiB" → devices that are not here. */
static ql_status made_up(const char *text, json_t **out)
{
    /* What nvidia-smi shows as total, in MiB. */
    static const struct {
        const char *name;
        int arch; /* compute capability */
        double mib;
    } known[] = {
        {"T4", 75, 15360},      {"V100-16", 70, 16384}, {"V100", 70, 32768},
        {"P100", 60, 16384},    {"L4", 89, 23034},      {"A10G", 86, 23028},
        {"A10", 86, 23028},     {"A100-80", 80, 81920}, {"A100", 80, 40960},
        {"H100", 90, 81559},    {"H200", 90, 143771},   {"RTX3090", 86, 24576},
        {"RTX4090", 89, 24564}, {"RTX4080", 89, 16376}, {"L40S", 89, 46068}};
    char *x, *end;
    long n = strtol(text, &x, 10);
    if (x == text)
        n = 1;
    else if (*x != 'x' && *x != 'X')
        QL_FAIL(QL_EINVAL, "--on takes 2xT4 or 2x15GiB, not '%s'", text);
    else
        x++;
    if (n < 1 || n > 8) QL_FAIL(QL_EINVAL, "--on takes 1 to 8 devices, not %ld", n);
    const char *name = x;
    int arch = 80;
    double bytes = strtod(x, &end) * 1073741824.0;
    if (end == x ||
        !(strcasecmp(end, "gib") == 0 || strcasecmp(end, "gb") == 0 || strcasecmp(end, "g") == 0)) {
        bytes = 0;
        for (size_t i = 0; i < sizeof known / sizeof *known; i++)
            if (strcasecmp(known[i].name, x) == 0)
                bytes = known[i].mib * 1048576, name = known[i].name, arch = known[i].arch;
    }
    if (arch < 75) QL_FAIL(QL_ENOSUP, "--on: %s has compute capability %d.%d; 7.5 is the oldest supported", name, arch / 10, arch % 10);
    if (!(bytes > 0) || bytes > 1e13) {
        ql_buf b = {0};
        const char *names[sizeof known / sizeof *known];
        char near[96];
        int count = 0;
        for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
            if (known[i].arch < 75) continue;
            ql_buf_printf(&b, "%s%s", count ? ", " : "", known[i].name);
            names[count++] = known[i].name;
        }
        ql_verb_nearest(x, names, count, near, sizeof near);
        ql_status st = ql_fail(QL_EINVAL, "--on: no device '%s' is known%s%s%s; there are %s, or a size: 2x15GiB", x, near[0] ? " (" : "", near,
                               near[0] ? ")" : "", ql_buf_str(&b));
        ql_buf_free(&b);
        return st;
    }
    json_t *all = json_array();
    int joined = name != x && (arch == 80 || arch == 90); /* A100, H100: several come with NVLink */
    for (int i = 0; i < (int)n; i++) {
        json_t *peers = json_array();
        for (int k = 0; joined && k < (int)n; k++)
            if (k != i) json_array_append_new(peers, json_integer(k));
        json_array_append_new(all,
                              json_pack("{s:s, s:s, s:s, s:i, s:I, s:I, s:i, s:b, s:o}", "name", name,
                                        "id", "made-up", "backend", "cuda", "index", i, "total",
                                        (json_int_t)bytes, "free", (json_int_t)bytes, "arch", arch,
                                        "bf16", arch >= 80, "peers", peers));
    }
    *out = all;
    return QL_OK;
}

ql_status ql_verb_plan(ql_magics *m, const ql_call *call, json_t **out)
{
    const char *on = ql_call_str(call, "on", NULL);
    json_t *devices = NULL, *mine = NULL, *report = NULL, *actions = NULL;
    ql_job *job = NULL;
    ql_status st = QL_OK;
    QL_TRY(ql_session_need_model(m));
    QL_GO(ql_job_copy(m->job, &job));
    QL_GO(ql_session_apply(m, call, job));
    QL_GO(ql_job_check(job));
    if (on) { /* all of them, whatever the job runs on here */
        QL_GO(made_up(on, &mine));
        QL_GO(ql_job_set(job, "devices", NULL));
        QL_GO(ql_job_set(job, "use_cpu", NULL));
    } else
        QL_GO(ql_session_devices(m, &devices));
    QL_GO(ql_plan_report(job, mine ? mine : devices, &report));
    if (ql_call_flag(call, "actions") && json_is_true(json_object_get(report, "fits"))) {
        QL_GO(ql_plan_actions(job, mine ? mine : devices, &actions));
        json_object_set(report, "actions", actions);
    }
    st = ql_result("plan", "qlora plan", json_incref(report), ql_view_plan(report, on), out);
out:
    ql_job_free(job);
    json_decref(mine);
    json_decref(report);
    json_decref(actions);
    return st;
}

/* ---- help ---------------------------------------------------------------------------------------
 */

static void help_all(ql_view *v)
{
    int n;
    ql_buf names = {0};
    ql_table t;
    const ql_verb *verbs = ql_verbs(&n);
    ql_view_title(v, "%qlora VERB [arguments] [--option value]", "QLoRA fine-tuning, version %s",
                  QL_VERSION);
    ql_table_begin(&t, "|", &names);
    for (int i = 0; i < n; i++) {
        ql_table_cell(&t, "%s %s", verbs[i].name, verbs[i].args);
        ql_table_cell(&t, "%s", verbs[i].help);
    }
    ql_table_end(v, &t);
    ql_view_note(v,
                 "A first run: %%qlora load tiny, %%qlora data tiny, %%qlora plan, %%qlora train. "
                 "%%qlora help VERB or SETTING tells more; Tab completes.");
    ql_buf_free(&names);
}

static void help_verb(ql_view *v, const ql_verb *verb)
{
    ql_buf names = {0};
    ql_table t;
    char usage[160];
    snprintf(usage, sizeof usage, "%%qlora %s%s%s", verb->name, *verb->args ? " " : "", verb->args);
    ql_view_title(v, usage, "%s", verb->help);
    if (verb->more) ql_view_note(v, "%s", verb->more);
    if (verb->options) {
        ql_table_begin(&t, "option|default|", &names);
        for (const ql_option *o = verb->options; o->name; o++) {
            ql_table_cell(&t, "--%s", o->name);
            ql_table_cell(&t, "%s", o->def ? o->def : "");
            ql_buf words = {0};
            ql_buf_printf(&words, "%s%s", o->help, o->choices ? ": " : "");
            for (const char *p = o->choices; p && *p; p++)
                ql_buf_add(&words, *p == '|' ? ", " : p, *p == '|' ? 2 : 1);
            ql_table_cell(&t, "%s", ql_buf_str(&words));
            ql_buf_free(&words);
        }
        ql_table_end(v, &t);
    }
    if (verb->takes == QL_TAKES_KEPT)
        ql_view_note(v, "Takes every setting as an option, too, and keeps it: %%qlora config --all "
                        "lists them.");
    if (verb->takes == QL_TAKES_ONCE)
        ql_view_note(v, "Takes every setting as an option, for this call alone: %%qlora config "
                        "--all lists them.");
    ql_view_code(v, verb->examples);
    ql_buf_free(&names);
}

static void help_setting(ql_view *v, const ql_setting *s)
{
    static const char *const types[] = {"true or false", "a whole number", "a number",
                                        "text",          "one of",         "JSON, or words"};
    ql_view_title(v, s->name, "%s", s->help);
    ql_view_note(v, "%s%s%s; default %s%s%s%s", types[s->type], s->choices ? " " : "",
                 s->choices ? s->choices : "", s->def, s->theirs ? " (here; upstream " : "",
                 s->theirs ? s->theirs : "", s->theirs ? ")" : "");
    if (s->alias) ql_view_note(v, "also: %s", s->alias);
    if (s->note) ql_view_note(v, "%s", s->note);
    if (s->refused) ql_view_warn(v, s->refused);
}

static ql_status help_view(const char *topic, ql_view *v)
{
    const ql_verb *verb = topic ? ql_verb_find(topic) : NULL;
    const ql_setting *s =
        topic && !verb ? ql_setting_find(topic + (strncmp(topic, "--", 2) == 0 ? 2 : 0)) : NULL;
    if (!topic) {
        help_all(v);
    } else if (verb) {
        help_verb(v, verb);
    } else if (s) {
        help_setting(v, s);
    } else {
        const char *names[64];
        char near[160];
        int n;
        const ql_verb *verbs = ql_verbs(&n);
        for (int i = 0; i < n && i < 64; i++) names[i] = verbs[i].name;
        ql_verb_nearest(topic, names, n, near, sizeof near);
        if (!near[0]) ql_setting_nearest(topic, near, sizeof near);
        QL_FAIL(QL_EINVAL, "neither a verb nor a setting: '%s'%s%s", topic, near[0] ? "; " : "",
                near);
    }
    return QL_OK;
}

ql_status ql_magics_help(const char *topic, ql_buf *out)
{
    ql_view v = {0};
    ql_error_clear();
    ql_status st = help_view(topic, &v);
    if (st == QL_OK) ql_buf_put(out, ql_buf_str(&v.text));
    ql_view_free(&v);
    return st;
}

ql_status ql_verb_help(ql_magics *m, const ql_call *call, json_t **out)
{
    ql_view v = {0};
    (void)m;
    ql_status st = help_view(call->n_args ? call->args[0] : NULL, &v);
    if (st == QL_OK) st = ql_result("help", "qlora help", NULL, ql_view_bundle(&v, NULL), out);
    ql_view_free(&v);
    return st;
}
