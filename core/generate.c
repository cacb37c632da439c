/* Text from the weights being trained. The supervisor turns prompts into ids, all ranks compute the same tokens (decode.c), rank 0
 * turns them into text as they come. */
#include "core/generate.h"

#include "core/chat.h"
#include "core/decode.h"
#include "core/file.h"
#include "core/json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_PROMPTS = 4096, MAX_NEW = 1 << 20 };

/* ---- in the supervisor ------------------------------------------------------------------------ */

/* A number of the command, or what it is without one. */
static ql_status number(const json_t *command, const char *name, double least, double most, double otherwise, double *out)
{
    const json_t *v = json_object_get(command, name);
    *out = otherwise;
    if (!v || json_is_null(v)) return QL_OK;
    if (!json_is_number(v) || !(json_number_value(v) >= least && json_number_value(v) <= most))
        QL_FAIL(QL_EINVAL, "generate: %s must be a number from %.12g to %.12g, found %s", name, least, most, ql_json_show(v));
    *out = json_number_value(v);
    return QL_OK;
}

static ql_status read_sampling(const json_t *command, ql_sampling *s)
{
    double n, k, seed;
    QL_TRY(number(command, "max_new_tokens", 0, MAX_NEW, 64, &n));
    QL_TRY(number(command, "temperature", 0, 1e6, 0, &s->temperature));
    QL_TRY(number(command, "top_p", 0, 1, 1, &s->top_p));
    QL_TRY(number(command, "top_k", 0, 1e9, 0, &k));
    QL_TRY(number(command, "repetition_penalty", 1e-3, 1e3, 1, &s->repetition_penalty));
    QL_TRY(number(command, "seed", 0, 9e15, 0, &seed));
    s->max_new = (int64_t)n, s->top_k = (int64_t)k, s->seed = (uint64_t)seed;
    return QL_OK;
}

typedef struct {
    ql_tok *tok;               /* NULL where the model has none and all prompts are ids */
    ql_model *model;           /* its headers */
    json_t *ids, *stops;
} preparing;

static ql_status add_ids(preparing *p, const int32_t *id, size_t n)
{
    json_t *all = p->ids, *list = json_array();
    int64_t vocab = p->model->cfg.vocab, beyond = -1;
    for (size_t i = 0; i < n; i++) {
        if (id[i] < 0 || id[i] >= vocab) beyond = (int64_t)i;
        json_array_append_new(list, json_integer(id[i]));
    }
    if (json_array_append_new(all, list)) QL_FAIL(QL_ENOMEM, "generate: no memory for the prompts");
    if (!n) QL_FAIL(QL_EINVAL, "generate: prompt %zu is empty", json_array_size(all));
    if (beyond >= 0)
        QL_FAIL(QL_EINVAL, "generate: prompt %zu has token id %d; the model's vocabulary ends at %lld: is this its own tokenizer?",
                json_array_size(all), (int)id[beyond], (long long)vocab - 1);
    return QL_OK;
}

/* A prompt is a text, or token ids. */
static ql_status add_prompt(preparing *p, const json_t *prompt)
{
    ql_ids ids = {0};
    ql_status st = QL_OK;
    size_t i;
    json_t *v;
    if (json_is_string(prompt)) {
        QL_GO(ql_tok_encode(p->tok, json_string_value(prompt), json_string_length(prompt), QL_TOK_SPECIALS, &ids));
    } else {
        json_array_foreach((json_t *)(uintptr_t)prompt, i, v)
        {
            if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) > INT32_MAX)
                QL_GO(ql_fail(QL_EINVAL, "generate: a prompt is a text, or a list of token ids"));
            QL_GO(ql_ids_push(&ids, (int32_t)json_integer_value(v)));
        }
    }
    QL_GO(add_ids(p, ids.data, ids.len));
out:
    ql_ids_free(&ids);
    return st;
}

static ql_status add_chats(preparing *p, const char *given, const json_t *chats)
{
    ql_tok *tok = p->tok;
    ql_chat *chat = NULL;
    ql_chat_text t = {0};
    ql_ids ids = {0};
    ql_status st = QL_OK;
    size_t i;
    json_t *messages;
    char *text = NULL;
    if (given) QL_TRY(ql_chat_template(given, &text));
    const char *jinja = text ? text : ql_tok_info(tok)->chat_template;
    if (!jinja) QL_FAIL(QL_EINVAL, "generate: this model has no chat template: give a plain prompt, or `config --chat_template chatml`");
    QL_GO(ql_chat_open(jinja, ql_tok_info(tok), &chat));
    json_array_foreach((json_t *)(uintptr_t)chats, i, messages)
    {
        ids.len = 0;
        QL_GO(ql_chat_render(chat, messages, NULL, NULL, QL_CHAT_PROMPT, &t));
        QL_GO(ql_tok_encode(tok, t.text.data, t.text.len, 0, &ids)); /* the template has BOS already */
        QL_GO(add_ids(p, ids.data, ids.len));
    }
out:
    free(text);
    ql_chat_close(chat);
    ql_chat_text_free(&t);
    ql_ids_free(&ids);
    return st;
}

/* Whether a model's tokenizer is needed: not where all prompts are ids and it has none. */
static int only_ids(const json_t *command)
{
    size_t i;
    json_t *p;
    json_array_foreach(json_object_get(command, "prompts"), i, p) if (!json_is_array(p)) return 0;
    return json_array_size(json_object_get(command, "messages")) == 0;
}

ql_status ql_generate_prepare(const ql_job *job, json_t *command)
{
    const char *model = ql_job_str(job, "model");
    const json_t *prompts = json_object_get(command, "prompts"), *chats = json_object_get(command, "messages");
    preparing p = {.ids = json_array(), .stops = json_array()};
    ql_sampling s;
    json_t *prompt;
    size_t i;
    ql_status st = read_sampling(command, &s);
    QL_GO(st);
    if (!model) QL_GO(ql_fail(QL_EINVAL, "no model: `load NAME` first"));
    QL_GO(ql_model_open_config(model, &p.model));
    st = ql_tok_open(model, &p.tok);
    if (st != QL_OK && only_ids(command)) {
        ql_error_clear();
        st = QL_OK;
    }
    QL_GO(st);
    json_array_foreach((json_t *)(uintptr_t)prompts, i, prompt) QL_GO(add_prompt(&p, prompt));
    if (json_array_size(chats)) QL_GO(add_chats(&p, ql_job_str(job, "chat_template"), chats));
    if (json_array_size(p.ids) < 1 || json_array_size(p.ids) > MAX_PROMPTS)
        QL_GO(ql_fail(QL_EINVAL, "generate: %zu prompts; from 1 to %d go", json_array_size(p.ids), (int)MAX_PROMPTS));
    const ql_config *cfg = &p.model->cfg;
    const ql_ids *stops = p.tok ? ql_tok_stops(p.tok) : NULL;
    for (size_t k = 0; stops && k < stops->len; k++) json_array_append_new(p.stops, json_integer(stops->data[k]));
    for (int k = 0; !stops && k < cfg->eos_count; k++) json_array_append_new(p.stops, json_integer(cfg->eos[k]));
    json_object_set(command, "ids", p.ids);
    json_object_set(command, "stop", p.stops);
out:
    json_decref(p.ids);
    json_decref(p.stops);
    ql_model_close(p.model);
    ql_tok_close(p.tok);
    return st;
}

/* ---- on a rank -------------------------------------------------------------------------------- */

typedef struct {
    ql_worker *w;
    ql_tok *tok;               /* rank 0: for text; NULL where the model has none */
    ql_decoding d;
    int32_t *stop, *prompts;
    ql_sequence *seq;
    size_t *said;              /* bytes of each answer that the front end has */
    int n;
    const char *variant;
    ql_str text;
} gen;

static ql_status on_token(void *user, int i)
{
    gen *g = user;
    const ql_ids *out = &g->seq[i].out;
    if (!g->tok) return QL_OK;
    g->text.len = 0;
    QL_TRY(ql_tok_decode(g->tok, out->data, out->len, QL_TOK_STREAM, &g->text));
    size_t n = ql_tok_steady(g->text.data, g->text.len), from = g->said[i];
    if (n <= from) return QL_OK;
    g->said[i] = n;
    json_t *s = json_stringn(g->text.data + from, n - from);
    if (!s) s = json_string("\xef\xbf\xbd");
    return ql_worker_emit(g->w, "token", json_pack("{s:i,s:s,s:o}", "prompt", i, "variant", g->variant, "text", s));
}

static ql_status open_gen(gen *g, ql_worker *w, const json_t *c)
{
    const json_t *all = json_object_get(c, "ids"), *stops = json_object_get(c, "stop"), *one, *v;
    size_t i, k, total = 0, at = 0;
    memset(g, 0, sizeof *g);
    g->w = w;
    QL_TRY(read_sampling(c, &g->d.how));
    g->d.save_logits = json_string_value(json_object_get(c, "logits"));
    g->d.token = w->p->rank == 0 ? on_token : NULL;
    g->d.user = g;
    g->n = (int)json_array_size(all);
    json_array_foreach((json_t *)(uintptr_t)all, i, one) total += json_array_size(one);
    g->seq = calloc((size_t)g->n + 1, sizeof *g->seq);
    g->said = calloc((size_t)g->n + 1, sizeof *g->said);
    g->prompts = calloc(total + 1, sizeof *g->prompts);
    g->stop = calloc(json_array_size(stops) + 1, sizeof *g->stop);
    if (!g->seq || !g->said || !g->prompts || !g->stop) QL_FAIL(QL_ENOMEM, "generate: no memory");
    json_array_foreach((json_t *)(uintptr_t)stops, i, v) g->stop[g->d.stops++] = (int32_t)json_integer_value(v);
    g->d.stop = g->stop;
    json_array_foreach((json_t *)(uintptr_t)all, i, one)
    {
        g->seq[i].prompt = g->prompts + at, g->seq[i].len = (int64_t)json_array_size(one);
        json_array_foreach((json_t *)(uintptr_t)one, k, v) g->prompts[at++] = (int32_t)json_integer_value(v);
    }
    if (w->p->rank == 0 && ql_tok_open(w->task->model->path, &g->tok) != QL_OK) ql_error_clear();
    w->p->shared->rank[w->p->rank].at_stop = 0;
    return QL_OK;
}

static void close_gen(gen *g)
{
    for (int i = 0; g->seq && i < g->n; i++) ql_ids_free(&g->seq[i].out);
    free(g->seq);
    free(g->said);
    free(g->prompts);
    free(g->stop);
    ql_str_free(&g->text);
    ql_tok_close(g->tok);
}

/* All prompts with the adapters as they are: their texts and ids into the lists. */
static ql_status answer(gen *g, const char *variant, json_t *texts, json_t *tokens)
{
    g->variant = variant;
    memset(g->said, 0, (size_t)g->n * sizeof *g->said);
    for (int i = 0; i < g->n; i++) g->seq[i].out.len = 0;
    QL_TRY(ql_decode(g->w->rank, &g->d, g->seq, g->n));
    for (int i = 0; i < g->n; i++) {
        const ql_ids *out = &g->seq[i].out;
        json_t *ids = json_array();
        g->text.len = 0;
        if (g->tok) QL_TRY(ql_tok_decode(g->tok, out->data, out->len, 0, &g->text));
        json_array_append_new(texts, json_stringn(g->text.len ? g->text.data : "", g->text.len));
        for (size_t k = 0; k < out->len; k++) json_array_append_new(ids, json_integer(out->data[k]));
        json_array_append_new(tokens, ids);
    }
    return QL_OK;
}

/* The adapter in the folder, or none: B is zero, the base itself. */
static ql_status with_adapter(gen *g, const char *folder, const char *variant, json_t *texts, json_t *tokens)
{
    const ql_lora *l = g->w->task->lora;
    float *flat = calloc((size_t)l->elements, sizeof *flat);
    ql_status st = QL_OK;
    if (!flat) QL_FAIL(QL_ENOMEM, "generate: no memory for the adapters");
    if (folder) QL_GO(ql_lora_read(l, folder, flat));
    QL_GO(ql_rank_set_adapters(g->w->rank, flat));
    QL_GO(answer(g, variant, texts, tokens));
out:
    free(flat);
    return st;
}

ql_status ql_generate_run(ql_worker *w, const json_t *command, json_t **out)
{
    const char *adapter = json_string_value(json_object_get(command, "adapter"));
    json_t *texts = json_array(), *tokens = json_array(), *base = json_array(), *base_tokens = json_array();
    float *held = calloc((size_t)w->task->lora->elements, sizeof *held);
    gen g;
    ql_status st = open_gen(&g, w, command);
    QL_GO(st);
    if (!held) QL_GO(ql_fail(QL_ENOMEM, "generate: no memory for the adapters"));
    QL_GO(ql_worker_say(w, "generating", ""));
    ql_rank_at(w->rank, QL_AT_TEXT);
    QL_GO(ql_rank_get_adapters(w->rank, held));
    if (json_is_true(json_object_get(command, "compare"))) st = with_adapter(&g, NULL, "base", base, base_tokens);
    if (st == QL_OK) st = with_adapter(&g, adapter, "adapter", texts, tokens);
    /* What training left there comes back. */
    ql_status back = ql_rank_set_adapters(w->rank, held);
    QL_GO(st == QL_OK ? back : st);
    *out = json_pack("{s:O,s:O,s:O,s:O}", "texts", texts, "base", base, "tokens", tokens, "base_tokens", base_tokens);
out:
    close_gen(&g);
    json_decref(texts);
    json_decref(base);
    json_decref(tokens);
    json_decref(base_tokens);
    free(held);
    return st;
}
