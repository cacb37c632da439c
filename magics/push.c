/* --push_to_hub of save and merge: the host uploads, as the hub's own client does. */
#include "magics/session.h"

ql_status ql_session_may_push(const ql_magics *m, const ql_call *call)
{
    const char *repo = ql_call_str(call, "push_to_hub", NULL);
    if (!repo) return QL_OK;
    if (!m->host.push)
        QL_FAIL(QL_EINVAL, "--push_to_hub works from Python (%%load_ext qlora), where huggingface_hub uploads; from a shell: huggingface-cli upload %s FOLDER",
                repo);
    if (!*repo) QL_FAIL(QL_EINVAL, "--push_to_hub needs the name of a repository: --push_to_hub you/my-adapter");
    return QL_OK;
}

ql_status ql_session_push(ql_magics *m, const ql_call *call, const char *folder, const char *const *patterns, json_t *data)
{
    const char *repo = ql_call_str(call, "push_to_hub", NULL);
    json_t *what = NULL, *list = NULL, *pushed = NULL;
    ql_status st = QL_OK;
    if (!repo) return QL_OK;
    list = json_array();
    for (size_t i = 0; patterns[i]; i++) json_array_append_new(list, json_string(patterns[i]));
    what = json_pack("{s:s, s:s, s:b, s:O}", "folder", folder, "repo", repo, "private", ql_call_flag(call, "private"), "files", list);
    if (!what) QL_GO(ql_fail(QL_EINVAL, "--push_to_hub: names must be UTF-8"));
    QL_GO(m->host.push(m->host.self, what, &pushed));
    json_object_set(data, "hub", pushed);
out:
    json_decref(what);
    json_decref(list);
    json_decref(pushed);
    return st;
}

void ql_push_note(ql_view *v, const json_t *data)
{
    const char *url = ql_jstr(json_object_get(data, "hub"), "url", NULL);
    if (url) ql_view_note(v, "pushed to %s", url);
}
