/* A job: the settings that were given, each checked when it is set, and together by ql_job_check. */
#include "core/job.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct ql_job {
    json_t *set;      /* canonical name → value, in the order given */
    json_t *defaults; /* name → default, shared by all, never changed */
};

/* ---- life ----------------------------------------------------------------------------------------- */

/* Read once for the process, never changed and never freed. */
static json_t *all_defaults;
static const char *bad_default;
static pthread_once_t defaults_once = PTHREAD_ONCE_INIT;

static void load_defaults(void)
{
    const ql_setting *s;
    int n = ql_settings(&s);
    json_t *d = json_object();
    for (int i = 0; i < n && !bad_default; i++) {
        json_t *v = json_loads(s[i].def, JSON_DECODE_ANY, NULL);
        if (!v || json_object_set_new(d, s[i].name, v)) bad_default = s[i].name;
    }
    all_defaults = d;
}

static ql_status get_defaults(json_t **out)
{
    pthread_once(&defaults_once, load_defaults);
    if (bad_default) QL_FAIL(QL_EINTERNAL, "settings: the default of '%s' cannot be read", bad_default);
    *out = json_incref(all_defaults);
    return QL_OK;
}

static ql_status new_job(json_t *set, json_t *defaults, ql_job **out)
{
    ql_job *j = calloc(1, sizeof *j);
    if (!j || !set || !defaults) {
        free(j);
        json_decref(set);
        json_decref(defaults);
        QL_FAIL(QL_ENOMEM, "job: out of memory");
    }
    j->set = set;
    j->defaults = defaults;
    *out = j;
    return QL_OK;
}

ql_status ql_job_new(ql_job **out)
{
    json_t *d = NULL;
    QL_TRY(get_defaults(&d));
    return new_job(json_object(), d, out);
}

ql_status ql_job_copy(const ql_job *job, ql_job **out)
{
    return new_job(json_deep_copy(job->set), json_incref(job->defaults), out);
}

void ql_job_free(ql_job *job)
{
    if (!job) return;
    json_decref(job->set);
    json_decref(job->defaults);
    free(job);
}

/* ---- setting -------------------------------------------------------------------------------------- */

const char *ql_setting_nearest(const char *name, char *buf, size_t size)
{
    const ql_setting *s;
    const char *words[512];
    int n = ql_settings(&s), count = 0;
    const char *alias = NULL;
    for (int i = 0; i < n && count < 512; i++)
        if (!s[i].refused) words[count++] = s[i].name;
    ql_nearest(name, words, count, buf, size);
    if (size == 0 || buf[0]) return buf;
    for (int i = 0; i < n && !alias; i++) { /* no name is near: is an alias? */
        char list[256], near[128], *save = NULL;
        if (!s[i].alias || s[i].refused) continue;
        snprintf(list, sizeof list, "%s", s[i].alias);
        for (char *a = strtok_r(list, "|", &save); a; a = strtok_r(NULL, "|", &save)) {
            const char *one = a;
            if (*ql_nearest(name, &one, 1, near, sizeof near)) alias = s[i].name;
        }
    }
    if (alias) snprintf(buf, size, "did you mean '%s'?", alias);
    return buf;
}

static ql_status find(const char *name, const ql_setting **out)
{
    char near[160];
    *out = ql_setting_find(name);
    if (*out) return QL_OK;
    ql_setting_nearest(name, near, sizeof near);
    QL_FAIL(QL_EINVAL, "there is no setting '%.60s'%s%s", name, *near ? "; " : "", near);
}

static bool same_as_default(const ql_job *job, const ql_setting *s, const json_t *v)
{
    const json_t *d = json_object_get(job->defaults, s->name);
    if (json_is_number(v) && json_is_number(d)) return json_number_value(v) == json_number_value(d);
    return json_equal(v, d);
}

ql_status ql_job_set(ql_job *job, const char *name, json_t *value)
{
    const ql_setting *s;
    json_t *v = NULL;
    QL_TRY(find(name, &s));
    if (!value || json_is_null(value)) {
        json_object_del(job->set, s->name);
        return QL_OK;
    }
    if (s->refused) { /* said as upstream's own default it is harmless */
        if (same_as_default(job, s, value)) return QL_OK;
        QL_FAIL(QL_ENOSUP, "%s is refused: %s", s->name, s->refused);
    }
    QL_TRY(ql_setting_read(s, value, &v));
    if (json_object_set_new(job->set, s->name, v)) QL_FAIL(QL_ENOMEM, "job: out of memory");
    return QL_OK;
}

ql_status ql_job_set_text(ql_job *job, const char *name, const char *text)
{
    const ql_setting *s;
    json_t *v = NULL;
    QL_TRY(find(name, &s));
    if (strcmp(text, "null") == 0 || strcmp(text, "None") == 0) return ql_job_set(job, name, NULL);
    QL_TRY(ql_setting_parse(s, text, &v));
    ql_status st = ql_job_set(job, name, v);
    json_decref(v);
    return st;
}

/* ---- reading -------------------------------------------------------------------------------------- */

const json_t *ql_job_get(const ql_job *job, const char *name)
{
    const ql_setting *s = ql_setting_find(name);
    const json_t *v = s ? json_object_get(job->set, s->name) : NULL;
    return v || !s ? v : json_object_get(job->defaults, s->name);
}

int ql_job_is_set(const ql_job *job, const char *name)
{
    const ql_setting *s = ql_setting_find(name);
    return s && json_object_get(job->set, s->name) != NULL;
}

int64_t ql_job_int(const ql_job *job, const char *name)
{
    const json_t *v = ql_job_get(job, name);
    return json_is_integer(v) ? json_integer_value(v) : (int64_t)json_number_value(v);
}

double ql_job_float(const ql_job *job, const char *name)
{
    return json_number_value(ql_job_get(job, name));
}

int ql_job_bool(const ql_job *job, const char *name)
{
    return json_is_true(ql_job_get(job, name));
}

const char *ql_job_str(const ql_job *job, const char *name)
{
    const json_t *v = ql_job_get(job, name);
    return json_is_boolean(v) ? (json_is_true(v) ? "true" : "false") : json_string_value(v);
}

json_t *ql_job_json(const ql_job *job)
{
    return json_deep_copy(job->set);
}

json_t *ql_job_group(const ql_job *job, const char *group)
{
    const ql_setting *s;
    int n = ql_settings(&s);
    json_t *o = json_object();
    for (int i = 0; o && i < n; i++) {
        if (s[i].refused || strcmp(s[i].group, group)) continue;
        if (json_object_set_new(o, s[i].name, json_deep_copy(ql_job_get(job, s[i].name)))) {
            json_decref(o);
            return NULL;
        }
    }
    return o;
}

ql_status ql_job_from_json(const json_t *object, ql_job **out)
{
    ql_job *job = NULL;
    const char *key;
    json_t *v;
    ql_status st = QL_OK;
    if (!json_is_object(object)) QL_FAIL(QL_EINVAL, "job: an object of settings is expected");
    QL_TRY(ql_job_new(&job));
    json_object_foreach((json_t *)object, key, v) QL_GO(ql_job_set(job, key, v));
    *out = job;
    job = NULL;
out:
    ql_job_free(job);
    return st;
}

/* What another setting leaves without effect; NULL: none. */
static json_t *idle(const ql_job *job, const char *name)
{
    static const char *const wait[][2] = {{"eval_steps", "eval_strategy"}, {"save_steps", "save_strategy"}};
    for (size_t i = 0; i < sizeof wait / sizeof *wait; i++) {
        const char *now = ql_job_str(job, wait[i][1]);
        if (strcmp(name, wait[i][0]) == 0 && strcmp(now, "steps"))
            return json_sprintf("%s: has no effect while %s is %s; --%s steps goes by it", name, wait[i][1], now, wait[i][1]);
    }
    if (strcmp(name, "num_train_epochs") == 0 && ql_job_int(job, "max_steps") > 0)
        return json_sprintf("num_train_epochs: has no effect, max_steps wins");
    if (strcmp(name, "warmup_ratio") == 0 && ql_job_float(job, "warmup_steps") > 0)
        return json_sprintf("warmup_ratio: has no effect, warmup_steps wins");
    return NULL;
}

json_t *ql_job_notes(const ql_job *job)
{
    json_t *notes = json_array(), *v;
    const char *key;
    ql_fsdp f;
    if (!notes) return NULL;
    json_object_foreach(job->set, key, v) {
        const ql_setting *s = ql_setting_find(key);
        if (!s || same_as_default(job, s, v)) continue;
        json_t *text = s->note ? json_sprintf("%s: %s", s->name, s->note) : idle(job, s->name);
        if (text) json_array_append_new(notes, text);
    }
    if (ql_fsdp_parse(ql_job_get(job, "fsdp"), ql_job_get(job, "fsdp_config"), &f, notes) != QL_OK) ql_error_clear();
    return notes;
}
