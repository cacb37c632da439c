/* Tab: verbs, options, values. Reads the tables and looks at folders; never starts anything. */
#include "magics/session.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { OFFERS_MAX = 400 };

static void offer(json_t *out, const char *prefix, const char *word)
{
    if (strncmp(word, prefix, strlen(prefix)) == 0 && json_array_size(out) < OFFERS_MAX)
        json_array_append_new(out, ql_text_json(word, strlen(word)));
}

static int is_folder(const char *path)
{
    struct stat s;
    return stat(path, &s) == 0 && S_ISDIR(s.st_mode);
}

/* Entries of a folder whose name begins with `start`, each with `lead` in front; folders end in
 * '/'. */
static void offer_folder(json_t *out, const char *folder, const char *start, const char *lead,
                         int folders_only)
{
    DIR *d = opendir(folder);
    for (struct dirent *e; d && (e = readdir(d));) {
        char full[4096], word[4096];
        if (e->d_name[0] == '.' && start[0] != '.') continue;
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
        if (strncmp(e->d_name, start, strlen(start)) != 0) continue;
        snprintf(full, sizeof full, "%s/%s", folder, e->d_name);
        int folder_here = is_folder(full);
        if (folders_only && !folder_here) continue;
        snprintf(word, sizeof word, "%s%s%s", lead, e->d_name,
                 folder_here && !folders_only ? "/" : "");
        offer(out, "", word);
    }
    if (d) closedir(d);
}

static void offer_paths(json_t *out, const char *prefix)
{
    const char *slash = strrchr(prefix, '/');
    char folder[4096] = ".", lead[4096] = "";
    if (slash) {
        snprintf(lead, sizeof lead, "%.*s", (int)(slash - prefix) + 1, prefix);
        snprintf(folder, sizeof folder, "%s", slash == prefix ? "/" : lead);
    }
    offer_folder(out, folder, slash ? slash + 1 : prefix, lead, 0);
}

/* ~/.cache/huggingface/hub holds models--org--name. */
static void offer_cached(json_t *out, const char *hub, const char *kind, const char *prefix)
{
    DIR *d = hub ? opendir(hub) : NULL;
    size_t n = strlen(kind);
    for (struct dirent *e; d && (e = readdir(d));) {
        char name[512];
        if (strncmp(e->d_name, kind, n) != 0) continue;
        snprintf(name, sizeof name, "%.400s", e->d_name + n);
        char *dashes = strstr(name, "--");
        if (dashes) {
            *dashes = '/';
            memmove(dashes + 1, dashes + 2, strlen(dashes + 2) + 1);
        }
        offer(out, prefix, name);
    }
    if (d) closedir(d);
}

static void offer_choices(json_t *out, const char *choices, const char *prefix)
{
    char word[128];
    for (const char *p = choices; p && *p;) {
        size_t n = strcspn(p, "|");
        snprintf(word, sizeof word, "%.*s", (int)n, p);
        offer(out, prefix, word);
        p += n + (p[n] == '|');
    }
}

static int takes(const ql_setting *s, const char *word)
{
    ql_job *job = NULL;
    int yes = ql_job_new(&job) == QL_OK && ql_job_set_text(job, s->name, word) == QL_OK;
    ql_error_clear();
    ql_job_free(job);
    return yes;
}

/* Of a setting's words those that it does not refuse. */
static void offer_words(json_t *out, const ql_setting *s, const char *words, const char *prefix)
{
    json_t *all = json_array(), *w;
    size_t i;
    offer_choices(all, words, prefix);
    json_array_foreach(all, i, w) if (takes(s, json_string_value(w))) json_array_append(out, w);
    json_decref(all);
}

static void offer_verbs(json_t *out, const char *prefix)
{
    int n;
    const ql_verb *v = ql_verbs(&n);
    for (int i = 0; i < n; i++) offer(out, prefix, v[i].name);
}

static void offer_arg(ql_magics *m, json_t *out, ql_arg kind, const char *choices,
                      const char *prefix)
{
    switch (kind) {
    case QL_ARG_CHOICE: offer_choices(out, choices, prefix); break;
    case QL_ARG_FLAG: offer_choices(out, "true|false", prefix); break;
    case QL_ARG_PATH: offer_paths(out, prefix); break;
    case QL_ARG_VERB: offer_verbs(out, prefix); break;
    case QL_ARG_RUN:
        offer_folder(out, m->runs, prefix, "", 1);
        if (*prefix) offer_paths(out, prefix);
        break;
    case QL_ARG_MODEL:
    case QL_ARG_DATA:
        if (m->bundled && !strchr(prefix, '/'))
            offer_folder(out, m->bundled, prefix, "", kind == QL_ARG_MODEL);
        offer_cached(out, m->hub, kind == QL_ARG_MODEL ? "models--" : "datasets--", prefix);
        if (!strchr(prefix, '/')) offer_folder(out, "/kaggle/input", prefix, "/kaggle/input/", 0);
        offer_paths(out, prefix);
        break;
    default: break;
    }
}

static void offer_setting(ql_magics *m, json_t *out, const ql_setting *s, const char *prefix)
{
    if (s->type == QL_SET_BOOL)
        offer_words(out, s, "true|false", prefix);
    else if (s->choices)
        offer_words(out, s, s->choices, prefix);
    else if (strcmp(s->name, "adapter") == 0)
        offer_arg(m, out, QL_ARG_RUN, NULL, prefix);
    else if (strcmp(s->name, "devices") == 0) {
        const json_t *list = json_object_get(m->devices, "devices")
                                 ? json_object_get(m->devices, "devices")
                                 : m->devices,
                     *d;
        size_t i;
        offer_words(out, s, "auto|cpu|cpu:2", prefix);
        json_array_foreach((json_t *)list, i, d)
        {
            char number[24];
            snprintf(number, sizeof number, "%zu", i);
            if (strcmp(ql_jstr(d, "backend", ""), "cuda") == 0) offer(out, prefix, number);
        }
    } else if (strcmp(s->name, "fsdp") == 0 || strcmp(s->name, "store") == 0) {
        offer_words(out, s,
                    s->name[0] == 'f' ? "auto|true|false|full_shard"
                                      : "auto|resident|resident16|sharded|host",
                    prefix);
    } else if (strcmp(s->name, "target_modules") == 0) {
        offer_words(out, s, "all-linear|q_proj,v_proj|q_proj,k_proj,v_proj,o_proj", prefix);
    } else if (strcmp(s->group, "data") == 0 && s->type == QL_SET_STR &&
               strchr("dec", s->name[0])) {
        offer_arg(m, out, QL_ARG_DATA, NULL, prefix);
    } else if (strcmp(s->name, "model") == 0) {
        offer_arg(m, out, QL_ARG_MODEL, NULL, prefix);
    } else if (strcmp(s->name, "output_dir") == 0) {
        offer_paths(out, prefix);
    }
}

static void offer_options(json_t *out, const ql_verb *verb, const char *prefix)
{
    char word[128];
    const ql_setting *s;
    int n = verb->takes == QL_TAKES_NONE ? 0 : ql_settings(&s);
    for (const ql_option *o = verb->options; o && o->name; o++) {
        snprintf(word, sizeof word, "--%s", o->name);
        offer(out, prefix, word);
    }
    /* What is refused, and what is accepted without effect, is not worth offering. */
    for (int i = 0; i < n; i++) {
        if (s[i].refused || s[i].note) continue;
        snprintf(word, sizeof word, "--%s", s[i].name);
        offer(out, prefix, word);
    }
}

/* The value of --name that stands (or begins) at the cursor. */
static void offer_value(ql_magics *m, json_t *out, const ql_verb *verb, const char *name,
                        const char *prefix)
{
    char key[128];
    snprintf(key, sizeof key, "%s", name);
    for (char *p = key; *p; p++)
        if (*p == '-') *p = '_';
    const ql_option *o = ql_option_find(verb, key);
    const ql_setting *s = o || verb->takes == QL_TAKES_NONE ? NULL : ql_setting_find(key);
    if (o)
        offer_arg(m, out, o->type, o->choices, prefix);
    else if (s)
        offer_setting(m, out, s, prefix);
}

static int by_text(const void *a, const void *b)
{
    return strcmp(json_string_value(*(json_t *const *)a), json_string_value(*(json_t *const *)b));
}

static json_t *sorted(json_t *list)
{
    size_t n = json_array_size(list);
    json_t **items = calloc(n + 1, sizeof *items), *out = json_array();
    for (size_t i = 0; items && i < n; i++) items[i] = json_array_get(list, i);
    if (items) qsort(items, n, sizeof *items, by_text);
    for (size_t i = 0; items && i < n; i++)
        if (i == 0 || !json_equal(items[i], items[i - 1])) json_array_append(out, items[i]);
    free(items);
    json_decref(list);
    return out;
}

json_t *ql_magics_complete(ql_magics *m, const char *text)
{
    json_t *out = json_array();
    char *line = strdup(text + strspn(text, " \t")), *words[64];
    int n = 0;
    if (!line) return out;
    char *p = line + strspn(line, "%");
    if (p > line && strncmp(p, "qlora", 5) == 0) p += 5;
    size_t len = strlen(p);
    int fresh = len == 0 || p[len - 1] == ' ' || p[len - 1] == '\t';
    for (char *save = NULL, *w = strtok_r(p, " \t", &save); w && n < 62;
         w = strtok_r(NULL, " \t", &save))
        words[n++] = w;
    static char none[] = "";
    if (fresh) words[n++] = none;
    const char *at = words[n - 1], *before = n > 2 ? words[n - 2] : "";
    const ql_verb *verb = n > 1 ? ql_verb_find(words[0]) : NULL;
    char *equals = strncmp(at, "--", 2) == 0 ? strchr(at, '=') : NULL;
    if (n == 1) {
        offer_verbs(out, at);
    } else if (verb && equals) {
        json_t *values = json_array(), *v;
        size_t i;
        *equals = 0;
        offer_value(m, values, verb, at + 2, equals + 1);
        json_array_foreach(values, i, v)
        {
            ql_buf b = {0};
            ql_buf_printf(&b, "%s=%s", at, json_string_value(v));
            json_array_append_new(out, ql_buf_json(&b));
            ql_buf_free(&b);
        }
        json_decref(values);
    } else if (verb && strncmp(at, "--", 2) == 0) {
        offer_options(out, verb, at);
    } else if (verb) {
        if (strncmp(before, "--", 2) == 0 && !strchr(before, '='))
            offer_value(m, out, verb, before + 2, at);
        if (json_array_size(out) == 0) offer_arg(m, out, verb->arg, NULL, at);
        if (!*at) offer_options(out, verb, "--");
    }
    free(line);
    return sorted(out);
}
