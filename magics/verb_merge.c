/* merge: a run's adapter put into its model, and what that changes. */
#include "magics/session.h"
#include "magics/view.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char prompt[] = "The capital of France is";

/* Logits after the prompt, V of them, by a file that goes at once. NULL and an error text where it cannot be done. */
static float *logits_of(ql_magics *m, const ql_job *job, const char *adapter, const char *folder, int64_t *n)
{
    char *file = NULL;
    float *v = NULL;
    json_t *result = NULL, *cmd = NULL;
    if (asprintf(&file, "%s/.logits", folder) < 0) return NULL;
    cmd = json_pack("{s:s, s:o, s:s?, s:[s], s:i, s:s}", "cmd", "generate", "job", ql_job_json(job), "adapter", adapter, "prompts", prompt,
                    "max_new_tokens", 0, "logits", file);
    if (cmd && ql_session_ask(m, cmd, "logits", &result, NULL) == QL_OK) {
        FILE *f = fopen(file, "re");
        long size = f && fseek(f, 0, SEEK_END) == 0 ? ftell(f) : 0;
        v = size > 0 ? malloc((size_t)size) : NULL;
        if (v) rewind(f);
        if (v && fread(v, 1, (size_t)size, f) != (size_t)size) {
            free(v);
            v = NULL;
        }
        *n = size / (long)sizeof *v;
        if (f) fclose(f);
    }
    unlink(file);
    json_decref(cmd);
    json_decref(result);
    free(file);
    return v;
}

static int64_t best(const float *v, int64_t n)
{
    int64_t k = 0;
    for (int64_t i = 1; i < n; i++)
        if (v[i] > v[k]) k = i;
    return k;
}

/* {"max","mean","same_token"} of two rows of logits, into the result. */
static void difference(json_t *data, const float *a, const float *b, int64_t n)
{
    double most = 0, sum = 0;
    for (int64_t i = 0; i < n; i++) {
        double d = fabs((double)a[i] - (double)b[i]);
        most = d > most ? d : most, sum += d;
    }
    json_object_set_new(data, "logits", json_pack("{s:s, s:f, s:f, s:b}", "prompt", prompt, "max", most, "mean", n ? sum / (double)n : 0.0,
                                                  "same_token", best(a, n) == best(b, n)));
}

/* The adapter over its base beside the merged model alone, in the same compute dtype. What cannot be placed here is said, and is no
 * failure of the merge. */
static ql_status compare(ql_magics *m, const ql_job *job, const char *adapter, const char *folder, json_t *data)
{
    ql_job *whole = NULL;
    int64_t n = 0, k = 0;
    json_t *path = ql_text_json(folder, strlen(folder));
    float *a = NULL, *b = NULL;
    ql_status st = QL_OK;
    QL_GO(ql_job_copy(job, &whole));
    QL_GO(ql_job_set(whole, "model", path));
    QL_GO(ql_job_set_text(whole, "load_in_4bit", "false"));
    a = logits_of(m, job, adapter, folder, &n);
    b = a ? logits_of(m, whole, NULL, folder, &k) : NULL;
    if (a && b && n == k) difference(data, a, b, n);
    else if (ql_error_code() == QL_ESTOP) st = QL_ESTOP;
    else {
        json_object_set_new(data, "not_compared", ql_text_json(ql_error(), strlen(ql_error())));
        ql_error_clear();
    }
out:
    ql_job_free(whole);
    json_decref(path);
    free(a);
    free(b);
    return st;
}

static json_t *view(const json_t *r)
{
    ql_view v = {0};
    ql_buf code = {0};
    const json_t *d = json_object_get(r, "logits");
    const char *folder = ql_jstr(r, "path", "");
    ql_view_title(&v, folder, "%s, %s, %lld tensors, %lld of them merged", ql_fmt_bytes(ql_jnum(r, "bytes", 0)).s, ql_jstr(r, "dtype", ""),
                  (long long)ql_jint(r, "tensors", 0), (long long)ql_jint(r, "merged", 0));
    if (d)
        ql_view_note(&v, "logits after “%s”, merged model against base with adapter: largest difference %s, mean %s, %s next token", prompt,
                     ql_fmt_num(ql_jnum(d, "max", 0), 3).s, ql_fmt_num(ql_jnum(d, "mean", 0), 3).s,
                     json_is_true(json_object_get(d, "same_token")) ? "the same" : "ANOTHER");
    if (json_is_true(json_object_get(r, "in_4bit")) && !json_is_true(json_object_get(r, "decoded")))
        ql_view_note(&v, "the weights are the 16-bit ones; the adapter was trained over their 4-bit form, which is most of the difference");
    if (*ql_jstr(r, "not_compared", "")) ql_view_warn(&v, ql_jstr(r, "not_compared", ""));
    ql_buf_printf(&code, "from transformers import AutoModelForCausalLM\nmodel = AutoModelForCausalLM.from_pretrained(\"%s\", dtype=\"auto\")", folder);
    ql_view_code(&v, ql_buf_str(&code));
    ql_push_note(&v, r);
    ql_buf_free(&code);
    return ql_view_bundle(&v, r);
}

ql_status ql_verb_merge(ql_magics *m, const ql_call *call, json_t **out)
{
    const char *original = ql_call_str(call, "original", NULL), *folder = call->args[0];
    char *run = NULL, *adapter = NULL, *from = NULL;
    ql_job *job = NULL;
    json_t *cmd = NULL, *result = NULL;
    static const char *const pushed[] = {"*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.md", NULL};
    ql_status st = QL_OK;
    QL_TRY(ql_session_may_push(m, call));
    QL_TRY(ql_session_run_path(m, ql_call_str(call, "run", NULL), &run));
    QL_GO(ql_session_adapter_folder(run, &adapter));
    QL_GO(ql_session_run_job(m, run, &job));
    if (original) QL_GO(ql_session_fetch(m, QL_FETCH_MODEL, original, NULL, NULL, &from));
    cmd = json_pack("{s:s, s:s?, s:s, s:s?, s:s, s:s}", "cmd", "merge", "model", ql_job_str(job, "model"), "adapter", adapter, "original", from,
                    "out", folder, "dtype", ql_call_str(call, "dtype", "auto"));
    if (!cmd) QL_GO(ql_fail(QL_EINVAL, "merge: names must be UTF-8"));
    QL_GO(ql_session_ask(m, cmd, "merge", &result, NULL));
    json_object_set_new(result, "in_4bit", json_boolean(ql_job_bool(job, "load_in_4bit")));
    QL_GO(compare(m, job, adapter, folder, result));
    QL_GO(ql_session_push(m, call, folder, pushed, result));
    st = ql_result("merged", folder, json_incref(result), view(result), out);
out:
    ql_job_free(job);
    json_decref(cmd);
    json_decref(result);
    free(run);
    free(adapter);
    free(from);
    return st;
}
