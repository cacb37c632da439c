/* generate: text as it grows, with and without the adapter. */
#include "magics/session.h"
#include "magics/view.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GENERATE_MS = 250 };

typedef struct {
    ql_magics *m;
    json_t *prompts, *heads;  /* heads: what is shown before each answer */
    json_t *result;           /* {"texts", "base"} as it grows */
    ql_live *live;            /* loading */
    char id[40];
    int shown, some;          /* some: a piece of an answer has come */
    double at;
} generating;

static ql_status show_generated(generating *g)
{
    json_t *bundle = ql_view_generated(g->heads, g->result);
    ql_status st =
        g->m->host.show(g->m->host.self, bundle, g->id, g->shown ? QL_SHOW_UPDATE : QL_SHOW_NEW);
    g->shown = 1;
    json_decref(bundle);
    return st;
}

static ql_status on_token(void *self, const json_t *ev)
{
    generating *g = self;
    if (strcmp(ql_jstr(ev, "ev", ""), "token") != 0)
        return g->shown ? QL_OK : ql_live_event(g->live, ev);
    json_t *list = json_object_get(
        g->result, strcmp(ql_jstr(ev, "variant", "adapter"), "base") == 0 ? "base" : "texts");
    int64_t i = ql_jint(ev, "prompt", 0);
    if (i < 0 || i >= (int64_t)json_array_size(g->prompts)) return QL_OK;
    while ((int64_t)json_array_size(list) <= i) json_array_append_new(list, json_string(""));
    ql_buf b = {0};
    ql_buf_put(&b, json_string_value(json_array_get(list, (size_t)i)));
    ql_buf_put(&b, ql_jstr(ev, "text", ""));
    json_array_set_new(list, (size_t)i, ql_buf_json(&b));
    ql_buf_free(&b);
    g->some = 1;
    double t = ql_jnum(ev, "t", 0);
    if (g->m->follow == QL_FOLLOW_LINES || t - g->at < GENERATE_MS / 1000.0) return QL_OK;
    g->at = t;
    return show_generated(g);
}

static void on_generate_tick(void *self)
{
    generating *g = self;
    if (!g->shown) ql_live_tick(g->live);
}

/* All texts are there: the last state, shown by the cell's own output unless it was shown as it
 * grew. */
static ql_status generate_answer(generating *g, json_t *result, json_t **out)
{
    json_t *data = json_copy(result), *bundle = NULL;
    const char *first = json_string_value(json_array_get(json_object_get(result, "texts"), 0));
    ql_buf line = {0};
    ql_status st = QL_OK;
    json_object_set(data, "prompts", g->prompts);
    if (g->shown) {
        json_decref(g->result);
        g->result = json_incref(result);
        st = show_generated(g);
    } else {
        bundle = ql_view_generated(g->heads, result);
    }
    first = first ? first + strspn(first, " \n") : "";
    size_t fit = ql_text_fit(first, 60);
    ql_buf_add(&line, first, fit);
    if (first[fit]) ql_buf_put(&line, " …");
    for (size_t i = 0; i < line.len; i++)
        if (line.data[i] == '\n') line.data[i] = ' ';
    if (st == QL_OK) {
        st = ql_result("text", ql_buf_str(&line), data, bundle, out);
    } else {
        json_decref(data);
        json_decref(bundle);
    }
    ql_buf_free(&line);
    return st;
}

static ql_status generate_prompts(const ql_call *call, json_t **prompts)
{
    json_t *all = json_array();
    for (int i = 0; i < call->n_args; i++)
        json_array_append_new(all, ql_text_json(call->args[i], strlen(call->args[i])));
    if (call->body) {
        size_t n = strlen(call->body);
        while (n > 0 && isspace((unsigned char)call->body[n - 1])) n--;
        json_array_append_new(all, ql_text_json(call->body, n));
    }
    if (json_array_size(all) == 0) {
        json_decref(all);
        QL_FAIL(QL_EINVAL, "generate needs a prompt: %%qlora generate \"Once upon\", or a "
                           "%%%%qlora generate cell");
    }
    *prompts = all;
    return QL_OK;
}

static int is_chat(const ql_call *call)
{
    return ql_call_str(call, "system", NULL) != NULL || ql_call_flag(call, "chat");
}

/* A continuation stands right behind its prompt, a chat's answer on a line of its own. */
static json_t *heads_of(const ql_call *call, json_t *prompts)
{
    json_t *heads = json_array(), *p;
    size_t i;
    if (!is_chat(call)) {
        json_decref(heads);
        return json_incref(prompts);
    }
    json_array_foreach(prompts, i, p)
    {
        ql_buf b = {0};
        ql_buf_printf(&b, "%s\n\n", json_string_value(p));
        json_array_append_new(heads, ql_buf_json(&b));
        ql_buf_free(&b);
    }
    return heads;
}

static json_t *generate_command(const ql_job *job, const ql_call *call, const json_t *prompts,
                                json_t *adapter)
{
    json_t *cmd = json_pack(
        "{s:s, s:o, s:O, s:I, s:f, s:f, s:I, s:f, s:I, s:b}", "cmd", "generate", "job",
        ql_job_json(job), "adapter", adapter, "max_new_tokens",
        (json_int_t)ql_call_int(call, "max_new_tokens", 64), "temperature",
        ql_call_float(call, "temperature", 0), "top_p", ql_call_float(call, "top_p", 1), "top_k",
        (json_int_t)ql_call_int(call, "top_k", 0), "repetition_penalty",
        ql_call_float(call, "repetition_penalty", 1), "seed", (json_int_t)ql_call_int(call, "seed", 0),
        "compare", ql_call_flag(call, "compare") && !json_is_null(adapter)); /* else twice the base */
    const char *system = ql_call_str(call, "system", NULL);
    if (!cmd || !is_chat(call)) {
        json_object_set(cmd, "prompts", (json_t *)prompts);
        return cmd;
    }
    json_t *chats = json_array(), *p;
    size_t i;
    json_array_foreach((json_t *)prompts, i, p)
    {
        json_t *chat = json_array();
        if (system)
            json_array_append_new(chat,
                                  json_pack("{s:s, s:s}", "role", "system", "content", system));
        json_array_append_new(chat, json_pack("{s:s, s:O}", "role", "user", "content", p));
        json_array_append_new(chats, chat);
    }
    json_object_set_new(cmd, "messages", chats);
    return cmd;
}

ql_status ql_verb_generate(ql_magics *m, const ql_call *call, json_t **out)
{
    generating g = {.m = m};
    json_t *adapter = NULL, *cmd = NULL, *result = NULL;
    ql_live_options o = {
        .host = &m->host, .follow = m->follow, .name = "generate", .number = ++m->displays};
    const char *run = ql_call_str(call, "run", NULL);
    ql_job *job = NULL;
    ql_status st = QL_OK;
    QL_TRY(ql_session_text_job(m, run, &job));
    QL_GO(generate_prompts(call, &g.prompts));
    g.heads = heads_of(call, g.prompts);
    QL_GO(ql_session_adapter(m, run, job, &adapter));
    QL_GO(ql_live_open(&o, &g.live));
    cmd = generate_command(job, call, g.prompts, adapter);
    g.result = json_pack("{s:[], s:[]}", "texts", "base");
    snprintf(g.id, sizeof g.id, "qlora-text-%p-%d", (void *)m, m->displays);
    st = ql_client_command(m->client, cmd, on_token, on_generate_tick, &g, &result);
    if (st != QL_OK && g.some) show_generated(&g); /* what had come stays to be read */
    ql_status shown = ql_live_finish(g.live,
                                     st == QL_OK      ? "done"
                                     : st == QL_ESTOP ? "stopped"
                                                      : "failed",
                                     NULL);
    QL_GO(st == QL_OK ? shown : st);
    st = generate_answer(&g, result, out);
out:
    ql_job_free(job);
    json_decref(adapter);
    json_decref(cmd);
    json_decref(result);
    json_decref(g.prompts);
    json_decref(g.heads);
    json_decref(g.result);
    ql_live_close(g.live);
    return st;
}
