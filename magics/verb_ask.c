/* Verbs with one answer from the engine: eval, verify, bench, memory, unload. */
#include "magics/session.h"
#include "magics/view.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

ql_status ql_session_ask(ql_magics *m, json_t *cmd, const char *name, json_t **result, json_t **record)
{
    ql_live *live = NULL;
    ql_live_options o = {
        .host = &m->host, .follow = m->follow, .name = name, .number = ++m->displays};
    QL_TRY(ql_live_open(&o, &live));
    ql_status st = ql_client_command(m->client, cmd, ql_live_event, ql_live_tick, live, result);
    ql_status shown = ql_live_finish(live,
                                     st == QL_OK      ? "done"
                                     : st == QL_ESTOP ? "stopped"
                                                      : "failed",
                                     NULL);
    if (st == QL_OK) st = shown;
    if (record && st == QL_OK) *record = ql_live_record(live);
    ql_live_close(live);
    return st;
}

ql_status ql_verb_eval(ql_magics *m, const ql_call *call, json_t **out)
{
    json_t *cmd = NULL, *adapter = NULL, *result = NULL;
    ql_job *job = NULL;
    char line[80];
    ql_status st = QL_OK;
    const char *run = call->n_args ? call->args[0] : NULL;
    QL_GO(ql_session_text_job(m, run, &job));
    QL_GO(ql_session_apply(m, call, job));
    QL_GO(ql_job_check(job));
    QL_GO(ql_session_eval_data(job));
    QL_GO(ql_session_adapter(m, run, job, &adapter));
    cmd = json_pack("{s:s, s:o, s:O}", "cmd", "eval", "job", ql_job_json(job), "adapter", adapter);
    QL_GO(ql_session_ask(m, cmd, "eval", &result, NULL));
    snprintf(line, sizeof line, "eval_loss %.4f", ql_jnum(result, "eval_loss", (double)NAN));
    st = ql_result("eval", line, json_incref(result), ql_view_eval(result), out);
out:
    ql_job_free(job);
    json_decref(cmd);
    json_decref(adapter);
    json_decref(result);
    return st;
}

ql_status ql_verb_verify(ql_magics *m, const ql_call *call, json_t **out)
{
    json_t *cmd = NULL, *result = NULL;
    ql_job *job = NULL;
    char *path = NULL, *folder = NULL;
    ql_status st = QL_OK;
    QL_TRY(ql_session_run_path(m, call->n_args ? call->args[0] : NULL, &path));
    QL_GO(ql_session_run_job(m, path, &job));
    cmd = json_pack("{s:s, s:o, s:s}", "cmd", "verify", "job", ql_job_json(job), "run", path);
    if (!cmd) QL_GO(ql_fail(QL_EINVAL, "a run's path must be UTF-8"));
    if (ql_job_str(job, "adapter")) { /* the run's own table: what it started from may be gone */
        QL_GO(ql_session_adapter_folder(path, &folder));
        json_object_set_new(cmd, "adapter", json_string(folder));
    }
    QL_GO(ql_session_ask(m, cmd, "verify", &result, NULL));
    st = ql_result("verify", "qlora verify", json_incref(result), ql_view_verify(result), out);
out:
    ql_job_free(job);
    json_decref(cmd);
    json_decref(result);
    free(path);
    free(folder);
    return st;
}

/* The same weight through the notebook's bitsandbytes, as one more row and line. */
static void add_bitsandbytes(const ql_host *host, json_t *result)
{
    json_t *weight = json_object_get(result, "weight"), *r = NULL;
    if (!host->bitsandbytes || !weight) return;
    json_object_set(weight, "backend", json_object_get(result, "backend"));
    r = host->bitsandbytes(host->self, weight);
    double seconds = ql_jnum(r, "seconds", 0), copy = ql_jnum(weight, "copy", 0);
    if (seconds > 0) {
        double rate = ql_jnum(weight, "bytes", 0) / seconds / 1e9;
        int same = ql_jint(r, "crc32", -1) == ql_jint(weight, "crc32", -2);
        char text[120];
        ql_buf line = {0};
        snprintf(text, sizeof text, "%.3f ms on one device, by bitsandbytes %.20s; %s", seconds * 1e3, ql_jstr(r, "version", "?"),
                 same ? "same bits" : "NOT the same bits");
        json_t *row = json_pack("{s:s, s:f, s:s, s:s}", "name", "NF4 in bitsandbytes", "value", rate, "unit", "GB/s", "text", text);
        if (copy > 0) json_object_set_new(row, "of_peak", json_real(rate / copy));
        json_array_append_new(json_object_get(result, "rows"), row);
        ql_buf_printf(&line, "%s%-24s %10.4g GB/s  %s\n", ql_jstr(result, "text", ""), "NF4 in bitsandbytes", rate, text);
        json_object_set_new(result, "text", ql_buf_json(&line));
        ql_buf_free(&line);
    }
    json_decref(r);
}

ql_status ql_verb_bench(ql_magics *m, const ql_call *call, json_t **out)
{
    json_t *result = NULL,
           *cmd = json_pack("{s:s, s:o, s:I}", "cmd", "bench", "job", ql_job_json(m->job),
                            "seconds", (json_int_t)ql_call_int(call, "seconds", 60));
    ql_status st = ql_session_ask(m, cmd, "bench", &result, NULL);
    if (st == QL_OK) {
        add_bitsandbytes(&m->host, result);
        st = ql_result("bench", "qlora bench", json_incref(result), ql_view_bench(result), out);
    }
    json_decref(cmd);
    json_decref(result);
    return st;
}

/* Without a run: what the devices hold now. With one: its bytes over time. */
ql_status ql_verb_memory(ql_magics *m, const ql_call *call, json_t **out)
{
    json_t *result = NULL, *record = NULL, *cmd = NULL, *chart = NULL, *bundle = NULL,
           *report = NULL;
    ql_status st = QL_OK;
    if (call->n_args > 0) {
        QL_TRY(ql_session_run_report(m, call->args[0], &report));
        if (json_array_size(json_object_get(report, "memory")) == 0)
            QL_GO(ql_fail(QL_EINVAL, "%s has no memory records", call->args[0]));
        chart = ql_chart_memory(report);
        QL_GO(ql_chart_bundle(&m->host, chart, chart, &bundle));
        st = ql_result("memory", "qlora memory", json_incref(report), json_incref(bundle), out);
        goto out;
    }
    cmd = json_pack("{s:s}", "cmd", "memory");
    QL_GO(ql_session_ask(m, cmd, "memory", &result, &record));
    const json_t *events = json_object_get(record, "memory");
    json_t *last = json_array_get(events, json_array_size(events) - 1);
    if (!last) last = result;
    st = ql_result("memory", "qlora memory", json_incref(last), ql_view_memory(last), out);
out:
    json_decref(cmd);
    json_decref(result);
    json_decref(record);
    json_decref(chart);
    json_decref(bundle);
    json_decref(report);
    return st;
}

ql_status ql_verb_unload(ql_magics *m, const ql_call *call, json_t **out)
{
    json_t *result = NULL, *cmd = json_pack("{s:s}", "cmd", "unload");
    (void)call;
    ql_status st = ql_client_running(m->client) ? ql_client_command(m->client, cmd, NULL, NULL, NULL, &result) : QL_OK;
    int held = json_is_true(json_object_get(result, "held"));
    const char *text = held ? "devices freed" : "nothing was loaded";
    ql_view v = {0};
    ql_view_title(&v, text, held ? "model, settings and runs stay" : "");
    json_t *data = json_pack("{s:s}", "text", text);
    if (st == QL_OK) st = ql_result("text", text, json_incref(data), ql_view_bundle(&v, data), out);
    else ql_view_free(&v);
    json_decref(data);
    json_decref(cmd);
    json_decref(result);
    return st;
}
