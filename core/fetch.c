/* What a name on the hub stands for: which of its files are wanted, and where they are. */
#include "core/hub.h"
#include "core/model.h"
#include "core/qlora.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_PATTERNS = 64 };

/* Not *.safetensors: some repositories hold the same weights again as consolidated.safetensors. */
static const char *const model_files[] = {"config.json",        "generation_config.json",       "tokenizer*.json",
                                          "chat_template.*",    "special_tokens_map.json",      "added_tokens.json",
                                          "model*.safetensors", "model.safetensors.index.json"};
static const char *const adapter_files[] = {"adapter_config.json", "adapter_model.safetensors"};
static const char *const data_files[] = {"*.jsonl", "*.ndjson", "*.json", "*.csv", "*.tsv", "*.txt"};

/* A repository's name, or a folder of the cache: its repository and the commit. */
static int read_name(const char *name, char repo[256], char commit[64])
{
    const char *at = strstr(name, "/snapshots/");
    commit[0] = 0;
    if (at && ql_hub_name(name, repo, 256)) {
        snprintf(commit, 64, "%.*s", (int)strcspn(at + 11, "/"), at + 11);
        return 1;
    }
    return ql_hub_is_repo(name) && snprintf(repo, 256, "%s", name) < 256;
}

int ql_fetch_named(const char *name)
{
    char repo[256], commit[64];
    return read_name(name, repo, commit);
}

static size_t patterns_of(const json_t *files, ql_fetch_what what, const char *list[MAX_PATTERNS])
{
    size_t n = 0;
    if (json_is_string(files)) list[n++] = json_string_value(files);
    for (size_t i = 0; i < json_array_size(files) && n < MAX_PATTERNS; i++)
        if (json_is_string(json_array_get(files, i))) list[n++] = json_string_value(json_array_get(files, i));
    if (n) return n;
    static const struct {
        const char *const *names;
        size_t n;
    } usual[] = {[QL_FETCH_MODEL] = {model_files, sizeof model_files / sizeof *model_files},
                 [QL_FETCH_DATA] = {data_files, sizeof data_files / sizeof *data_files},
                 [QL_FETCH_ADAPTER] = {adapter_files, sizeof adapter_files / sizeof *adapter_files}};
    for (; n < usual[what].n; n++) list[n] = usual[what].names[n];
    return n;
}

/* The headers of all weight files can be read: a snapshot that Python left with its configuration alone is not whole. Nothing says
 * which files a data set has. */
static ql_status whole(const char *folder, ql_fetch_what what)
{
    ql_model *m = NULL;
    ql_status st = QL_OK;
    if (what == QL_FETCH_ADAPTER) {
        char path[QL_PATH_MAX];
        for (size_t i = 0; i < sizeof adapter_files / sizeof *adapter_files; i++) {
            QL_TRY(ql_path_join(path, folder, adapter_files[i]));
            if (!ql_path_is_file(path)) QL_FAIL(QL_EINVAL, "%s is missing", adapter_files[i]);
        }
    } else if (what == QL_FETCH_MODEL) {
        st = ql_model_open(folder, &m);
        ql_model_close(m);
    }
    return st;
}

ql_status ql_fetch(const ql_hub_access *hub, ql_fetch_what what, const char *name, const char *revision, const json_t *files,
                   char **folder)
{
    char path[QL_PATH_MAX], repo[256], commit[64];
    const char *list[MAX_PATTERNS];
    if (!hub || !hub->cache) QL_FAIL(QL_EINVAL, "%s: no folder for downloads is known (HF_HOME)", name);
    if (!read_name(name, repo, commit)) QL_FAIL(QL_EINVAL, "'%.100s' is no repository's name (organisation/name)", name);
    size_t n = patterns_of(files, what, list);
    ql_hub_options o = {.kind = what == QL_FETCH_DATA ? QL_HUB_DATASET : QL_HUB_MODEL, .cache_dir = hub->cache,
                        .endpoint = hub->endpoint, .revision = commit[0] ? commit : revision, .token = hub->token,
                        .offline = true, .progress = hub->progress, .user = hub->user};
    /* A model that is here whole is taken as it is, without a question to the network; of a data set the hub is asked, since nothing
     * says which files it has. */
    if (hub->offline) {
        QL_TRY(ql_hub_snapshot(&o, repo, list, n, path));
        if (whole(path, what) != QL_OK)
            return ql_error_prefix("%s is in the cache only in part, and HF_HUB_OFFLINE forbids to fetch the rest: ", repo), QL_EINVAL;
    } else if (what == QL_FETCH_DATA || ql_hub_snapshot(&o, repo, list, n, path) != QL_OK || whole(path, what) != QL_OK) {
        ql_error_clear();
        o.offline = false;
        QL_TRY(ql_hub_snapshot(&o, repo, list, n, path));
    }
    if (!(*folder = strdup(path))) QL_FAIL(QL_ENOMEM, "no memory for a path");
    return QL_OK;
}
