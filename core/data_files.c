/* Which files a path stands for. */
#include "core/data_files.h"

#include "core/file.h"

#include <dirent.h>
#include <errno.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

const char *ql_base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static bool ends_with(const char *s, const char *tail)
{
    size_t n = strlen(s), k = strlen(tail);
    return n >= k && strcasecmp(s + n - k, tail) == 0;
}

ql_status ql_data_format_of(const char *path, ql_data_format *out)
{
    static const struct {
        const char *ext;
        ql_data_format f;
    } known[] = {{".jsonl", QL_FILE_JSONL}, {".ndjson", QL_FILE_JSONL}, {".json", QL_FILE_JSON}, {".csv", QL_FILE_CSV},
                 {".tsv", QL_FILE_TSV},     {".txt", QL_FILE_TEXT},     {".md", QL_FILE_TEXT}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (ends_with(path, known[i].ext)) return *out = known[i].f, QL_OK;
    QL_FAIL(QL_ENOSUP, "%s: only .jsonl, .json, .csv, .tsv and .txt are read here; open anything else in Python "
                       "(datasets, pandas) and give the variable's name instead of a file", ql_base_name(path));
}

void ql_data_names_free(ql_data_names *l)
{
    for (size_t i = 0; i < l->n; i++) free(l->name[i]);
    free(l->name);
    *l = (ql_data_names){0};
}

static ql_status add_name(ql_data_names *l, const char *name)
{
    char **p = realloc(l->name, (l->n + 1) * sizeof *p);
    if (p) l->name = p;
    if (!p || !(p[l->n] = strdup(name))) QL_FAIL(QL_ENOMEM, "no memory for the names of files");
    l->n++;
    return QL_OK;
}

/* The files of a folder and of those in it, by their paths below it. */
static ql_status list_folder(const char *folder, const char *below, int depth, ql_data_names *out)
{
    enum { DEEPEST = 8 };
    char path[QL_PATH_MAX], rest[QL_PATH_MAX];
    struct dirent *e;
    ql_status st = QL_OK;
    QL_TRY(ql_path_join(path, folder, below));
    DIR *d = opendir(path);
    if (!d) QL_FAIL(QL_EIO, "%s: %s", path, strerror(errno));
    while (st == QL_OK && (e = readdir(d))) {
        if (e->d_name[0] == '.') continue;
        if (*below) QL_GO(ql_path_join(rest, below, e->d_name));
        else snprintf(rest, sizeof rest, "%s", e->d_name);
        QL_GO(ql_path_join(path, folder, rest));
        if (ql_path_is_dir(path)) {
            if (depth < DEEPEST) st = list_folder(folder, rest, depth + 1, out);
            continue;
        }
        QL_GO(add_name(out, rest));
    }
out:
    closedir(d);
    return st;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* The names of splits, as the datasets library knows them: one means all of its line. */
static const char *const splits[][4] = {{"train", "training"}, {"validation", "valid", "val", "dev"}, {"test", "testing", "eval", "evaluation"}};

static bool is_letter(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

/* The word stands in the name by itself: "test" is not in "latest". */
static bool has_word(const char *name, const char *word)
{
    for (const char *p = name; (p = strcasestr(p, word)); p++)
        if ((p == name || !is_letter(p[-1])) && !is_letter(p[strlen(word)])) return true;
    return false;
}

static bool has_split(const char *name, const char *const words[4])
{
    bool found = false;
    for (int i = 0; i < 4 && words[i]; i++) found |= has_word(name, words[i]);
    return found;
}

/* 2: named after the split (or in a folder that is). 1: for train, what no other split's name is in. */
static int file_rank(const char *name, const char *split)
{
    static const char *const about[] = {"dataset_infos.json", "dataset_info.json", "state.json", "README.md", "README.txt", "LICENSE.txt"};
    ql_data_format f;
    int own = -1, other = -1;
    if (ql_data_format_of(name, &f) != QL_OK) {
        ql_error_clear();
        return 0;
    }
    for (size_t i = 0; i < sizeof about / sizeof *about; i++)
        if (strcmp(ql_base_name(name), about[i]) == 0) return 0;
    for (int i = 0; i < 3; i++) {
        for (int k = 0; k < 4 && splits[i][k]; k++)
            if (strcmp(split, splits[i][k]) == 0) own = i;
    }
    if (own >= 0 ? has_split(name, splits[own]) : has_word(name, split)) return 2;
    for (int i = 0; i < 3; i++)
        if (i != own && has_split(name, splits[i])) other = i;
    return own == 0 && other < 0;
}

static ql_status of_folder(const char *path, const char *split, ql_data_names *out)
{
    ql_data_names l = {0};
    int best = 0;
    ql_status st = list_folder(path, "", 0, &l);
    QL_GO(st);
    if (l.n) qsort(l.name, l.n, sizeof *l.name, by_name);
    for (size_t i = 0; i < l.n; i++) {
        int k = file_rank(l.name[i], split);
        if (k > best) best = k;
    }
    if (!best) QL_GO(ql_fail(QL_EINVAL, "%s: no data files of split '%s' in this folder", path, split));
    for (size_t i = 0; i < l.n; i++) {
        char file[QL_PATH_MAX];
        if (file_rank(l.name[i], split) != best) continue;
        QL_GO(ql_path_join(file, path, l.name[i]));
        QL_GO(add_name(out, file));
    }
out:
    ql_data_names_free(&l);
    return st;
}

ql_status ql_data_list(const char *path, const char *split, ql_data_names *out)
{
    if (ql_path_is_dir(path)) return of_folder(path, split, out);
    if (ql_path_is_file(path)) return add_name(out, path);
    glob_t g = {0};
    ql_status st = QL_OK;
    int rc = glob(path, 0, NULL, &g);
    if (rc == GLOB_NOSPACE) st = ql_fail(QL_ENOMEM, "no memory for the files of %s", path);
    else if (rc || !g.gl_pathc) st = ql_fail(QL_EINVAL, "%s: there is no such file, and no file matches it", path);
    for (size_t i = 0; i < g.gl_pathc && st == QL_OK; i++) st = add_name(out, g.gl_pathv[i]);
    globfree(&g);
    return st;
}
