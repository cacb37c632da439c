/* What a name on the hub stands for: which of its files are wanted. */
#include "core/hub.h"
#include "core/qlora.h"

#include <stdlib.h>
#include <string.h>

int ql_fetch_named(const char *name)
{
    return ql_hub_is_repo(name);
}

ql_status ql_fetch(const ql_hub_access *hub, ql_fetch_what what, const char *name, const char *revision, char **folder)
{
    static const char *const model[] = {"config.json",      "generation_config.json",       "tokenizer*.json",
                                        "chat_template.*",  "special_tokens_map.json",      "added_tokens.json",
                                        "model*.safetensors", "model.safetensors.index.json"};
    static const char *const data[] = {"*.jsonl", "*.json", "*.csv", "*.txt"};
    char path[QL_PATH_MAX];
    if (!hub || !hub->cache) QL_FAIL(QL_EINVAL, "%s: no folder for downloads is known (HF_HOME)", name);
    ql_hub_options o = {.kind = what == QL_FETCH_DATA ? QL_HUB_DATASET : QL_HUB_MODEL, .cache_dir = hub->cache,
                        .endpoint = hub->endpoint, .revision = revision, .token = hub->token, .offline = hub->offline != 0,
                        .progress = hub->progress, .user = hub->user};
    QL_TRY(what == QL_FETCH_DATA ? ql_hub_snapshot(&o, name, data, sizeof data / sizeof *data, path)
                                 : ql_hub_snapshot(&o, name, model, sizeof model / sizeof *model, path));
    if (!(*folder = strdup(path))) QL_FAIL(QL_ENOMEM, "no memory for a path");
    return QL_OK;
}
