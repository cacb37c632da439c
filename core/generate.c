/* Text from the weights being trained: the layers' own forward with a key/value cache, one prompt at a time. All ranks compute the same
 * tokens; rank 0 says them. */
#include "core/generate.h"

#include "core/chat.h"
#include "core/file.h"
#include "core/json.h"
#include "core/sampler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int64_t max_new;
    double temperature, top_p;
    int64_t top_k;
    ql_mt random;
} sampling;

typedef struct {
    ql_worker *w;
    ql_rank *r;
    ql_tok *tok;
    ql_chat *chat;
    sampling s;
    ql_tensor *k, *v;          /* (L) caches */
    void *cache;               /* device memory of all of them */
    int64_t rows;              /* of a cache */
    ql_tensor logits;          /* (1, V) F32, device */
    void *logits_mem;
    float *row;                /* (V) host */
    int *rank_of;              /* (V) host: sorting */
    int64_t eos[16]; /* generation_config.json's, beside config.json's */
    int eos_count;
    const char *save_logits;   /* file for the logits after the (last) prompt; NULL */
} gen;

/* ---- sampling --------------------------------------------------------------------------------- */

static const float *sort_row;
static int by_logit(const void *a, const void *b)
{
    float x = sort_row[*(const int *)a], y = sort_row[*(const int *)b];
    if (x != y) return x < y ? 1 : -1;
    return *(const int *)a - *(const int *)b;
}

static int32_t greedy(const float *row, int64_t n)
{
    int64_t best = 0;
    for (int64_t i = 1; i < n; i++)
        if (row[i] > row[best]) best = i;
    return (int32_t)best;
}

/* Temperature, then top-k, then top-p, as transformers orders them. */
static int32_t draw(gen *g, int64_t n)
{
    sampling *s = &g->s;
    if (s->temperature <= 0) return greedy(g->row, n);
    for (int64_t i = 0; i < n; i++) g->rank_of[i] = (int)i;
    sort_row = g->row;
    qsort(g->rank_of, (size_t)n, sizeof *g->rank_of, by_logit);
    int64_t keep = s->top_k > 0 ? ql_min64(s->top_k, n) : n, used = 0;
    double top = (double)g->row[g->rank_of[0]], sum = 0, mass = 0;
    for (int64_t i = 0; i < keep; i++) sum += exp(((double)g->row[g->rank_of[i]] - top) / s->temperature);
    for (used = 0; used < keep && (used == 0 || mass < s->top_p * sum); used++)
        mass += exp(((double)g->row[g->rank_of[used]] - top) / s->temperature);
    double at = (double)ql_mt_next(&s->random) / 4294967296.0 * mass;
    for (int64_t i = 0; i < used; i++) {
        at -= exp(((double)g->row[g->rank_of[i]] - top) / s->temperature);
        if (at < 0) return g->rank_of[i];
    }
    return g->rank_of[used - 1];
}

/* ---- forward ---------------------------------------------------------------------------------- */

/* n tokens from position `at` through all layers; logits of the last one. */
static ql_status forward(gen *g, const int32_t *ids, int64_t n, int64_t at)
{
    ql_rank *r = g->r;
    ql_mem *m = r->mem;
    const ql_dev_table *dev = r->set.be->dev;
    int64_t t = ql_round_up(n, r->spec->round), layers = r->spec->choice.layers;
    int32_t *buf = calloc((size_t)t * 4 + 8, sizeof *buf), *pos = buf + t, *slot = buf + 2 * t, *target = buf + 3 * t;
    int64_t *token = calloc((size_t)t, sizeof *token);
    int32_t start = 0, len = (int32_t)n, last = (int32_t)(n - 1), kstart = 0, klen = (int32_t)(at + n);
    ql_status st = QL_OK;
    ql_exec_enter(r);
    if (!buf || !token) QL_GO(ql_fail(QL_ENOMEM, "generate: no memory"));
    for (int64_t i = 0; i < t; i++) {
        buf[i] = i < n ? ids[i] : 0;
        pos[i] = (int32_t)(i < n ? at + i : 0);
        slot[i] = (int32_t)(i < n ? at + i : -1);
        target[i] = -100;
    }
    ql_batch b = {.T = t, .rows = 1, .docs = 1, .tokens = n, .doc_max = n, .ids = buf, .target = target, .position = pos, .token = token,
                  .doc_start = &start, .doc_len = &len};
    QL_GO(ql_exec_batch(r, 0, &b, 0, 0));
    ql_micro *mb = &r->micro[0];
    ql_stage *sg = &m->stage[0];
    mb->slot = ql_vec(sg->dev + sg->at_slot, QL_I32, t);
    mb->k_start = (const int32_t *)(const void *)(sg->dev + sg->at_kstart);
    mb->k_len = (const int32_t *)(const void *)(sg->dev + sg->at_klen);
    mb->k_longest = klen;
    QL_GO(dev->copy(r->compute, sg->dev + sg->at_slot, slot, t * 4));
    QL_GO(dev->copy(r->compute, sg->dev + sg->at_kstart, &kstart, 4));
    QL_GO(dev->copy(r->compute, sg->dev + sg->at_klen, &klen, 4));
    QL_GO(dev->copy(r->compute, sg->dev + sg->at_index, &last, 4));
    QL_GO(dev->sync(r->compute));
    for (int64_t l = 0; l < layers; l++) {
        ql_layer ly;
        int s = (int)(l % QL_GATHER_SLOTS), moved = r->spec->choice.store[l] == QL_STORE_SHARDED || r->spec->choice.store[l] == QL_STORE_HOST;
        if (moved) QL_GO(ql_exec_gather(r, l, s));
        QL_GO(ql_exec_layer(r, mb, l, s, &ly));
        if (moved) QL_GO(dev->record(r->compute, r->slot_free[s]));
        ly.cache_k = g->k[l], ly.cache_v = g->v[l];
        ql_act act = m->shared;
        act.h = ql_mem_h(m, 0, l);
        QL_GO(ql_layer_forward(&ly, &act, ql_mem_h(m, 0, l + 1)));
    }
    ql_head_peers peers = {.be = r->set.be, .comm = r->comm};
    QL_GO(ql_head_logits(&m->head, &m->shape, &r->q, &peers, ql_rows(ql_mem_h(m, 0, layers), 0, t), ql_vec(sg->dev + sg->at_index, QL_I32, 1),
                         g->logits));
    QL_GO(dev->copy(r->compute, g->row, g->logits.data, r->spec->model->cfg.vocab * 4));
    QL_GO(dev->sync(r->compute));
    r->set.shared->rank[r->set.rank].beat++;
out:
    free(buf);
    free(token);
    return st;
}

/* ---- one prompt ------------------------------------------------------------------------------- */

static int ends(const gen *g, int32_t id)
{
    const ql_config *c = &g->r->spec->model->cfg;
    for (int i = 0; i < c->eos_count; i++)
        if (c->eos[i] == id) return 1;
    for (int i = 0; i < g->eos_count; i++)
        if (g->eos[i] == id) return 1;
    return id == ql_tok_info(g->tok)->eos;
}

/* Whole characters only: a token may end inside one. */
static size_t whole(const char *s, size_t n)
{
    size_t k = n, back = 0;
    while (back < 4 && k > 0 && ((unsigned char)s[k - 1] & 0xc0) == 0x80) k--, back++;
    if (k == 0) return n;
    unsigned char c = (unsigned char)s[k - 1];
    size_t need = c >= 0xf0 ? 4 : c >= 0xe0 ? 3 : c >= 0xc0 ? 2 : 1;
    return need > back + 1 ? k - 1 : n;
}

static ql_status say(gen *g, int prompt, const char *variant, const char *text, size_t n)
{
    json_t *s = json_stringn(text, n);
    if (!s) s = json_string("\xef\xbf\xbd");
    return ql_worker_emit(g->w, "token", json_pack("{s:i,s:s,s:o}", "prompt", prompt, "variant", variant, "text", s));
}

static ql_status tokens(gen *g, const ql_ids *prompt, int index, const char *variant, ql_ids *out)
{
    int64_t chunk = g->r->spec->rows, at = 0, vocab = ql_min64(g->r->spec->model->cfg.vocab, ql_tok_size(g->tok));
    ql_str text = {0};
    size_t said = 0;
    ql_status st = QL_OK;
    for (; at < (int64_t)prompt->len; at += chunk) {
        QL_GO(ql_exec_stop_point(g->r));
        QL_GO(forward(g, prompt->data + at, ql_min64(chunk, (int64_t)prompt->len - at), at));
    }
    at = (int64_t)prompt->len;
    if (g->save_logits && g->w->p->rank == 0) QL_GO(ql_file_save(g->save_logits, g->row, (size_t)g->r->spec->model->cfg.vocab * sizeof *g->row));
    for (int64_t i = 0; i < g->s.max_new; i++) {
        QL_GO(ql_exec_stop_point(g->r));
        int32_t id = draw(g, vocab);
        if (ends(g, id)) break;
        QL_GO(ql_ids_push(out, id));
        text.len = 0;
        QL_GO(ql_tok_decode(g->tok, out->data, out->len, 0, &text));
        size_t n = whole(text.data, text.len);
        if (n > said) QL_GO(say(g, index, variant, text.data + said, n - said));
        said = n > said ? n : said;
        if (i + 1 < g->s.max_new) QL_GO(forward(g, &id, 1, at++));
    }
out:
    ql_str_free(&text);
    return st;
}

/* ---- the command ------------------------------------------------------------------------------ */

static ql_status take_cache(gen *g, int64_t rows)
{
    ql_rank *r = g->r;
    const ql_config *c = &r->spec->model->cfg;
    int64_t w = c->kv_heads * c->head_dim, es = (int64_t)ql_dtype_size(r->spec->dtype), one = ql_round_up(rows * w * es, 256);
    char *p;
    if (rows <= g->rows) return QL_OK;
    if (g->cache) r->set.be->dev->free(r->dev, g->cache);
    g->cache = NULL, g->rows = 0;
    QL_TRY(r->set.be->dev->alloc(r->dev, 2 * one * c->layers, &g->cache));
    p = g->cache;
    for (int64_t l = 0; l < c->layers; l++) {
        g->k[l] = ql_mat(p + 2 * l * one, r->spec->dtype, rows, w, w);
        g->v[l] = ql_mat(p + (2 * l + 1) * one, r->spec->dtype, rows, w, w);
    }
    g->rows = rows;
    return QL_OK;
}

static ql_status prompt_ids(gen *g, const json_t *prompt, const json_t *messages, ql_ids *out)
{
    ql_chat_text t = {0};
    ql_status st;
    if (json_is_string(prompt)) {
        const char *s = json_string_value(prompt);
        return ql_tok_encode(g->tok, s, json_string_length(prompt), QL_TOK_SPECIALS, out);
    }
    if (!g->chat) {
        const char *tpl = ql_job_str(g->w->task->job, "chat_template");
        if (!tpl) tpl = ql_tok_info(g->tok)->chat_template;
        if (!tpl) QL_FAIL(QL_EINVAL, "generate: this model has no chat template: give a plain prompt, or `config --chat_template chatml`");
        const char *built = ql_chat_builtin(tpl);
        QL_TRY(ql_chat_open(built ? built : tpl, ql_tok_info(g->tok), &g->chat));
    }
    st = ql_chat_render(g->chat, messages, NULL, NULL, QL_CHAT_PROMPT, &t);
    if (st == QL_OK) st = ql_tok_encode(g->tok, t.text.data, t.text.len, 0, out);
    ql_chat_text_free(&t);
    return st;
}

static ql_status one(gen *g, const json_t *prompt, const json_t *messages, int index, const char *variant, json_t *texts)
{
    ql_ids in = {0}, out = {0};
    ql_str text = {0};
    ql_status st = QL_OK;
    QL_GO(prompt_ids(g, prompt, messages, &in));
    if (in.len == 0) QL_GO(ql_fail(QL_EINVAL, "generate: the prompt is empty"));
    QL_GO(take_cache(g, ql_round_up((int64_t)in.len + g->s.max_new, 64)));
    QL_GO(tokens(g, &in, index, variant, &out));
    QL_GO(ql_tok_decode(g->tok, out.data, out.len, 0, &text));
    json_array_append_new(texts, json_stringn(text.data ? text.data : "", text.len));
out:
    ql_ids_free(&in);
    ql_ids_free(&out);
    ql_str_free(&text);
    return st;
}

static ql_status all(gen *g, const json_t *command, const char *variant, json_t *texts)
{
    const json_t *prompts = json_object_get(command, "prompts"), *messages = json_object_get(command, "messages"), *p;
    json_int_t seed = json_integer_value(json_object_get(command, "seed"));
    size_t i;
    ql_mt_seed(&g->s.random, (uint64_t)seed);
    json_array_foreach(prompts, i, p) QL_TRY(one(g, p, NULL, (int)i, variant, texts));
    if (json_is_array(messages) && json_array_size(messages)) QL_TRY(one(g, NULL, messages, (int)json_array_size(prompts), variant, texts));
    return QL_OK;
}

/* generation_config.json may name more tokens that end an answer (Llama 3's <|eot_id|>). */
static void read_stops(gen *g, const char *folder)
{
    char path[QL_PATH_MAX];
    json_t *o = NULL, *v;
    size_t i;
    if (ql_path_join(path, folder, "generation_config.json") == QL_OK && ql_path_is_file(path) && ql_json_load(path, 1 << 20, &o) == QL_OK) {
        const json_t *e = json_object_get(o, "eos_token_id");
        if (json_is_integer(e)) g->eos[g->eos_count++] = json_integer_value(e);
        json_array_foreach(e, i, v) if (json_is_integer(v) && g->eos_count < 16) g->eos[g->eos_count++] = json_integer_value(v);
    }
    json_decref(o);
    ql_error_clear(); /* without it config.json's stand */
}

static ql_status open_gen(gen *g, ql_worker *w, const json_t *c)
{
    const ql_config *cfg = &w->task->model->cfg;
    const json_t *t = json_object_get(c, "temperature"), *p = json_object_get(c, "top_p"), *n = json_object_get(c, "max_new_tokens");
    memset(g, 0, sizeof *g);
    g->w = w, g->r = w->rank;
    g->save_logits = json_string_value(json_object_get(c, "logits"));
    g->s.max_new = json_is_integer(n) ? json_integer_value(n) : 64;
    g->s.temperature = json_is_number(t) ? json_number_value(t) : 0;
    g->s.top_p = json_is_number(p) ? json_number_value(p) : 1;
    g->s.top_k = json_integer_value(json_object_get(c, "top_k"));
    g->k = calloc((size_t)cfg->layers, sizeof *g->k);
    g->v = calloc((size_t)cfg->layers, sizeof *g->v);
    g->row = calloc((size_t)cfg->vocab, sizeof *g->row);
    g->rank_of = calloc((size_t)cfg->vocab, sizeof *g->rank_of);
    if (!g->k || !g->v || !g->row || !g->rank_of) QL_FAIL(QL_ENOMEM, "generate: no memory");
    QL_TRY(ql_tok_open(w->task->model->path, &g->tok));
    read_stops(g, w->task->model->path);
    int64_t wide = QL_PIECES * w->rank->mem->head.piece; /* the vocabulary in whole pieces */
    QL_TRY(w->rank->set.be->dev->alloc(w->rank->dev, wide * 4, &g->logits_mem));
    g->logits = ql_mat(g->logits_mem, QL_F32, 1, wide, wide);
    w->p->shared->rank[w->p->rank].at_stop = 0;
    return QL_OK;
}

static void close_gen(gen *g)
{
    const ql_dev_table *dev = g->r->set.be->dev;
    if (g->cache) dev->free(g->r->dev, g->cache);
    if (g->logits_mem) dev->free(g->r->dev, g->logits_mem);
    free(g->k);
    free(g->v);
    free(g->row);
    free(g->rank_of);
    ql_chat_close(g->chat);
    ql_tok_close(g->tok);
}

ql_status ql_generate_run(ql_worker *w, const json_t *command, json_t **out)
{
    const char *adapter = json_string_value(json_object_get(command, "adapter"));
    json_t *texts = json_array(), *base = json_array();
    float *flat = calloc((size_t)w->task->lora->elements, 4);
    gen g;
    ql_status st = open_gen(&g, w, command);
    QL_GO(st);
    if (!flat) QL_GO(ql_fail(QL_ENOMEM, "generate: no memory"));
    QL_GO(ql_worker_say(w, "generating", ""));
    ql_rank_at(w->rank, QL_AT_TEXT);
    if (adapter) {
        QL_GO(ql_lora_read(w->task->lora, adapter, flat));
        QL_GO(ql_rank_set_adapters(w->rank, flat));
    }
    if (json_is_true(json_object_get(command, "compare"))) {
        /* The base is the model with adapters of zero; what was there comes back. */
        QL_GO(ql_rank_get_adapters(w->rank, flat));
        float *zero = calloc((size_t)w->task->lora->elements, 4);
        if (!zero) QL_GO(ql_fail(QL_ENOMEM, "generate: no memory"));
        st = ql_rank_set_adapters(w->rank, zero);
        free(zero);
        QL_GO(st);
        st = all(&g, command, "base", base);
        ql_status back = ql_rank_set_adapters(w->rank, flat);
        if (st == QL_OK) st = back;
        QL_GO(st);
    }
    QL_GO(all(&g, command, "adapter", texts));
    *out = json_pack("{s:O,s:O}", "texts", texts, "base", base);
out:
    close_gen(&g);
    json_decref(texts);
    json_decref(base);
    free(flat);
    return st;
}
