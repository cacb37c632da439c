#include "core/decode.h"

#include "core/file.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CACHE_BYTES = 512 << 20 }; /* sequences go side by side while their keys and values fit in so much */

/* ---- sampling --------------------------------------------------------------------------------- */

/* The first of the greatest. */
static int32_t likeliest(const float *row, int64_t n)
{
    enum { LANES = 16 };
    float top[LANES];
    int64_t i = 0;
    for (int k = 0; k < LANES; k++) top[k] = -INFINITY;
    for (; i + LANES <= n; i += LANES)
        for (int k = 0; k < LANES; k++) top[k] = row[i + k] > top[k] ? row[i + k] : top[k];
    for (; i < n; i++) top[0] = row[i] > top[0] ? row[i] : top[0];
    for (int k = 1; k < LANES; k++) top[0] = top[k] > top[0] ? top[k] : top[0];
    for (i = 0; i < n; i++)
        if (row[i] == top[0]) return (int32_t)i;
    return 0; /* not a number anywhere */
}

/* Once for each different token of prompt and answer. */
static void penalise(ql_sampler *s, float *row, int64_t vocab, const int32_t *id, int64_t n)
{
    float p = (float)s->how->repetition_penalty;
    for (int64_t i = 0; i < n; i++) {
        if (id[i] < 0 || id[i] >= vocab || s->seen[id[i]] == s->mark) continue;
        s->seen[id[i]] = s->mark;
        float *x = row + id[i];
        *x = *x < 0 ? *x * p : *x / p;
    }
}

/* What a token weighs: its share, or 1 where there is no temperature. */
static double weight(float logit, double top, double temperature)
{
    return temperature > 0 ? exp(((double)logit - top) / temperature) : 1;
}
static double weight_of(const float *row, const int32_t *id, int64_t n, double top, double temperature)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += weight(row[id[i]], top, temperature);
    return sum;
}

/* A number that is greater for a greater logit; the least of all for what is not a number. */
static uint32_t height(float logit)
{
    uint32_t bits;
    memcpy(&bits, &logit, sizeof bits);
    if (isnan(logit)) return 0;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* The likeliest of id[0 … n), as few as weigh `least` together, go to its front in their order: lower ids are taken first among equals.
 * The height where they end is found 11 bits at a time, from the weights by height. */
static int64_t take_likeliest(const float *row, int32_t *id, int64_t n, double least, double top, double temperature)
{
    enum { BINS = 2048 };
    static const int shift[] = {21, 10, 0};
    double bin[BINS], above = 0;
    uint32_t end = 0;
    int64_t taken = 0;
    for (int s = 0; s < 3; s++) {
        int b = BINS - 1;
        memset(bin, 0, sizeof bin);
        for (int64_t i = 0; i < n; i++) {
            uint32_t h = height(row[id[i]]);
            if (s == 0 || h >> shift[s - 1] == end >> shift[s - 1])
                bin[h >> shift[s] & (BINS - 1)] += weight(row[id[i]], top, temperature);
        }
        while (b > 0 && above + bin[b] < least) above += bin[b--];
        end |= (uint32_t)b << shift[s];
    }
    for (int64_t i = 0; i < n; i++) {
        uint32_t h = height(row[id[i]]);
        if (h < end || (h == end && above >= least)) continue;
        if (h == end) above += weight(row[id[i]], top, temperature);
        id[taken++] = id[i];
    }
    return taken;
}

int32_t ql_sampler_next(ql_sampler *s, float *row, int64_t vocab, const int32_t *prompt, int64_t n_prompt, const ql_ids *answer)
{
    const ql_sampling *h = s->how;
    if (h->repetition_penalty != 1) {
        s->mark++;
        penalise(s, row, vocab, prompt, n_prompt);
        penalise(s, row, vocab, answer->data, (int64_t)answer->len);
    }
    int32_t first = likeliest(row, vocab), *id = s->order;
    if (h->temperature <= 0) return first;
    double top = (double)row[first];
    int64_t n = vocab;
    for (int64_t i = 0; i < n; i++) id[i] = (int32_t)i;
    if (h->top_k > 0 && h->top_k < n) n = take_likeliest(row, id, n, (double)h->top_k, top, 0);
    double mass = weight_of(row, id, n, top, h->temperature);
    if (h->top_p < 1) {
        n = take_likeliest(row, id, n, fmax(h->top_p * mass, DBL_MIN), top, h->temperature);
        mass = weight_of(row, id, n, top, h->temperature);
    }
    double at = (double)ql_mt_next(&s->random) / 4294967296.0 * mass;
    for (int64_t i = 0; i < n; i++)
        if ((at -= weight(row[id[i]], top, h->temperature)) < 0) return id[i];
    return first;
}

/* ---- forward ---------------------------------------------------------------------------------- */

typedef struct {
    ql_rank *r;
    const ql_decoding *d;
    ql_tensor *k, *v;           /* (L) caches: (rows, G·D) */
    void *cache, *logits_mem;   /* device memory */
    int64_t rows;               /* of a cache */
    float *logits;              /* host: (world of the head · QL_DECODE_ROWS, its columns) */
    float *row;                 /* host: (V) */
    int32_t *ids, *pos, *slot, *target; /* host: (rows of a micro-batch) each */
    int64_t *token;
    ql_sampler pick;
} decoder;

/* What goes in for one sequence. */
typedef struct {
    const int32_t *ids;
    int64_t n;                  /* new tokens */
    int64_t had;                /* rows that its part of the cache holds already */
    int64_t base;               /* its first row in the caches */
} feed;

static int64_t longest_feed(const feed *f, int count)
{
    int64_t n = 0;
    for (int i = 0; i < count; i++) n = ql_max64(n, f[i].n);
    return n;
}

/* Where the new rows of all sequences stand. */
static int64_t lay_out(decoder *g, const feed *f, int count, ql_batch *b, int32_t meta[5][QL_DECODE_ROWS])
{
    int64_t at = 0, longest = 0;
    for (int i = 0; i < count; i++) {
        meta[0][i] = (int32_t)at, meta[1][i] = (int32_t)f[i].n;
        meta[2][i] = (int32_t)f[i].base, meta[3][i] = (int32_t)(f[i].had + f[i].n);
        for (int64_t t = 0; t < f[i].n; t++, at++) {
            g->ids[at] = f[i].ids[t];
            g->pos[at] = (int32_t)(f[i].had + t);
            g->slot[at] = (int32_t)(f[i].base + f[i].had + t);
        }
        meta[4][i] = (int32_t)(at - 1);
        b->doc_max = ql_max64(b->doc_max, f[i].n);
        longest = ql_max64(longest, f[i].had + f[i].n);
    }
    for (int i = count; i < QL_DECODE_ROWS; i++) meta[4][i] = -1;
    b->tokens = at;
    int few = longest_feed(f, count) == 1; /* a token each */
    b->T = few ? QL_DECODE_ROWS : ql_round_up(at, g->r->spec->round);
    for (; at < b->T; at++) g->ids[at] = 0, g->pos[at] = 0, g->slot[at] = -1;
    return longest;
}

static ql_status stage(decoder *g, const feed *f, int count)
{
    ql_rank *r = g->r;
    const ql_dev_table *dev = r->set.be->dev;
    ql_stage *sg = &r->mem->stage[0];
    int32_t meta[5][QL_DECODE_ROWS] = {{0}}; /* start, len, k_start, k_len of each sequence; its last row */
    ql_batch b = {.rows = 1, .docs = count, .ids = g->ids, .target = g->target, .position = g->pos, .token = g->token,
                  .doc_start = meta[0], .doc_len = meta[1]};
    int64_t longest = lay_out(g, f, count, &b, meta);
    QL_TRY(ql_exec_batch(r, 0, &b, 0, 0));
    ql_micro *mb = &r->micro[0];
    mb->slot = ql_vec(sg->dev + sg->at_slot, QL_I32, b.T);
    mb->k_start = (const int32_t *)(const void *)(sg->dev + sg->at_kstart);
    mb->k_len = (const int32_t *)(const void *)(sg->dev + sg->at_klen);
    mb->k_longest = longest;
    QL_TRY(dev->copy(r->compute, sg->dev + sg->at_slot, g->slot, b.T * 4));
    QL_TRY(dev->copy(r->compute, sg->dev + sg->at_kstart, meta[2], count * 4));
    QL_TRY(dev->copy(r->compute, sg->dev + sg->at_klen, meta[3], count * 4));
    QL_TRY(dev->copy(r->compute, sg->dev + sg->at_index, meta[4], QL_DECODE_ROWS * 4));
    return dev->sync(r->compute);
}

/* The hidden rows at a boundary between the stages of a pipeline; nothing overlaps here. */
static ql_status pass_on(ql_rank *r, int64_t layer, int64_t rows, int peer)
{
    ql_tensor h = ql_mem_h(r->mem, 0, layer), x = ql_vec(h.data, h.dtype, rows * h.ld);
    const ql_comm_table *comm = r->set.be->comm;
    return peer > r->set.rank ? comm->send(r->comm, r->compute, x, peer) : comm->recv(r->comm, r->compute, x, peer);
}

/* Logits of each sequence's last row, on every rank's host. */
static ql_status last_logits(decoder *g, const ql_micro *mb, int count)
{
    ql_rank *r = g->r;
    ql_mem *m = r->mem;
    ql_head_peers peers = {.be = r->set.be, .comm = r->comm};
    int64_t mine = m->head.count * m->head.piece, all = m->head.world * QL_DECODE_ROWS, used = count * mine * 4;
    ql_tensor out = ql_mat(g->logits_mem, QL_F32, all, mine, mine), index = ql_vec(m->stage[0].dev + m->stage[0].at_index, QL_I32, QL_DECODE_ROWS);
    if (ql_mem_has_head(m)) QL_TRY(ql_head_logits(&m->head, &m->shape, &r->q, &peers, ql_rows(ql_mem_h(m, 0, m->hi), 0, mb->rows), index, out));
    if (ql_plan_piped(&r->spec->choice)) return ql_rank_share(r, g->logits, used, out.data, 0, ql_mem_has_head(m) ? used : 0);
    for (int64_t at = 0; at < all * mine; at += QL_DECODE_ROWS * mine)
        QL_TRY(r->set.be->dev->copy(r->compute, g->logits + at, (float *)out.data + at, used));
    return r->set.be->dev->sync(r->compute);
}

/* The new rows through all layers; logits of each sequence's last one, on the host. */
static ql_status forward(decoder *g, const feed *f, int count)
{
    ql_rank *r = g->r;
    ql_mem *m = r->mem;
    const ql_dev_table *dev = r->set.be->dev;
    const ql_choice *c = &r->spec->choice;
    ql_exec_enter(r);
    QL_TRY(stage(g, f, count));
    ql_micro *mb = &r->micro[0];
    if (!ql_mem_has_embedding(m)) QL_TRY(pass_on(r, m->lo, mb->rows, r->set.rank - 1));
    for (int64_t l = m->lo; l < m->hi; l++) {
        ql_layer ly;
        int s = (int)(l % QL_GATHER_SLOTS), moved = c->store[l] == QL_STORE_SHARDED || c->store[l] == QL_STORE_HOST;
        if (moved) QL_TRY(ql_exec_gather(r, l, s));
        QL_TRY(ql_exec_layer(r, mb, l, s, &ly));
        ly.cache_k = g->k[l], ly.cache_v = g->v[l];
        ql_act act = m->shared;
        act.h = ql_mem_h(m, 0, l);
        act.qk = QL_NONE; /* what a backward reads */
        for (int i = 0; i < QL_GROUPS; i++) act.xa[i] = QL_NONE;
        QL_TRY(ql_layer_forward(&ly, &act, ql_mem_h(m, 0, l + 1)));
        if (moved) QL_TRY(dev->record(r->compute, r->slot_free[s])); /* its bytes may have been read until here */
    }
    if (!ql_mem_has_head(m)) QL_TRY(pass_on(r, m->hi, mb->rows, r->set.rank + 1));
    QL_TRY(last_logits(g, mb, count));
    r->set.shared->rank[r->set.rank].beat++;
    return QL_OK;
}

/* The logits (V) of the i-th sequence of the last forward, from the blocks that the head's ranks made. */
static float *logits_of(decoder *g, int i)
{
    const ql_head *h = &g->r->mem->head;
    int64_t mine = h->count * h->piece;
    if (h->world == 1) return g->logits + i * mine;
    for (int p = 0; p < h->world && p * mine < h->vocab; p++)
        memcpy(g->row + p * mine, g->logits + (p * QL_DECODE_ROWS + i) * mine, (size_t)ql_min64(mine, h->vocab - p * mine) * sizeof *g->row);
    return g->row;
}

/* ---- sequences side by side ------------------------------------------------------------------- */

typedef struct {
    ql_sequence *s;
    int number;                 /* in the command */
    int64_t base, had;          /* of the cache */
    int over;
    ql_mt random;
} flow;

/* Takes a token for one sequence from its logits. */
static ql_status take(decoder *g, flow *f, int row)
{
    const ql_decoding *d = g->d;
    float *logits = logits_of(g, row);
    g->pick.random = f->random;
    int32_t id = ql_sampler_next(&g->pick, logits, g->r->mem->head.vocab, f->s->prompt, f->s->len, &f->s->out);
    f->random = g->pick.random;
    if (!isfinite(logits[id]))
        QL_FAIL(QL_EINVAL, "generate: prompt %d, token %zu: the model's logits are not finite. In float16 numbers end at 65504: `config --residual_dtype float32`, or "
                "`--dtype bfloat16` from compute capability 8.0 on; or the adapter is of a run that diverged: `generate --run none` asks the model without it",
                f->number + 1, f->s->out.len + 1);
    for (int i = 0; i < d->stops; i++) f->over |= d->stop[i] == id;
    if (f->over) return QL_OK;
    QL_TRY(ql_ids_push(&f->s->out, id));
    f->over = (int64_t)f->s->out.len >= d->how.max_new;
    return d->token ? d->token(d->user, f->number) : QL_OK;
}

static ql_status read_prompt(decoder *g, flow *f, int last)
{
    const ql_decoding *d = g->d;
    int64_t chunk = g->r->spec->rows;
    for (; f->had < f->s->len; f->had += ql_min64(chunk, f->s->len - f->had)) {
        feed in = {f->s->prompt + f->had, ql_min64(chunk, f->s->len - f->had), f->had, f->base};
        QL_TRY(ql_exec_stop_point(g->r));
        QL_TRY(forward(g, &in, 1));
    }
    if (last && d->save_logits && g->r->set.rank == 0)
        QL_TRY(ql_file_save(d->save_logits, logits_of(g, 0), (size_t)g->r->mem->head.vocab * sizeof *g->row));
    f->over = d->how.max_new < 1;
    return f->over ? QL_OK : take(g, f, 0);
}

/* Room for the keys and values of these rows; QL_ENOMEM where the device has none. */
static ql_status take_cache(decoder *g, int64_t rows)
{
    ql_rank *r = g->r;
    const ql_config *c = &r->spec->model->cfg;
    int64_t w = c->kv_heads * c->head_dim, es = (int64_t)ql_dtype_size(r->spec->dtype), one = ql_round_up(rows * w * es, 256);
    char *p;
    if (rows <= g->rows) return QL_OK;
    if (g->cache) r->set.be->dev->free(r->dev, g->cache);
    g->cache = NULL, g->rows = 0;
    QL_TRY(r->set.be->dev->alloc(r->dev, ql_max64(256, 2 * one * (r->mem->hi - r->mem->lo)), &g->cache));
    p = g->cache;
    for (int64_t l = r->mem->lo; l < r->mem->hi; l++, p += 2 * one) {
        g->k[l] = ql_mat(p, r->spec->dtype, rows, w, w);
        g->v[l] = ql_mat(p + one, r->spec->dtype, rows, w, w);
    }
    g->rows = rows;
    return QL_OK;
}

/* The prompts one after another, then one token of each at a time. */
static ql_status side_by_side(decoder *g, flow *f, int n, int last)
{
    for (int i = 0; i < n; i++) QL_TRY(read_prompt(g, &f[i], last && i == n - 1));
    for (;;) {
        feed in[QL_DECODE_ROWS];
        flow *who[QL_DECODE_ROWS];
        int count = 0;
        for (int i = 0; i < n; i++) {
            const ql_ids *out = &f[i].s->out;
            if (f[i].over) continue;
            in[count] = (feed){out->data + out->len - 1, 1, f[i].had, f[i].base};
            who[count++] = &f[i];
        }
        if (!count) return QL_OK;
        QL_TRY(ql_exec_stop_point(g->r));
        QL_TRY(forward(g, in, count));
        for (int i = 0; i < count; i++) {
            who[i]->had++;
            QL_TRY(take(g, who[i], i));
        }
    }
}

static ql_status open_decoder(decoder *g, ql_rank *r, const ql_decoding *d)
{
    const ql_config *c = &r->spec->model->cfg;
    const ql_head *h = &r->mem->head;
    size_t rows = (size_t)r->spec->rows, vocab = (size_t)c->vocab;
    int64_t all = h->world * QL_DECODE_ROWS * h->count * h->piece;
    *g = (decoder){.r = r, .d = d, .pick = {.how = &d->how}};
    g->k = calloc((size_t)c->layers, sizeof *g->k);
    g->v = calloc((size_t)c->layers, sizeof *g->v);
    g->row = calloc(vocab, sizeof *g->row);
    g->logits = calloc((size_t)all, sizeof *g->logits);
    g->pick.seen = calloc(vocab, sizeof *g->pick.seen);
    g->pick.order = calloc(vocab, sizeof *g->pick.order);
    g->ids = calloc(rows, sizeof *g->ids);
    g->pos = calloc(rows, sizeof *g->pos);
    g->slot = calloc(rows, sizeof *g->slot);
    g->target = calloc(rows, sizeof *g->target);
    g->token = calloc(rows, sizeof *g->token);
    if (!g->k || !g->v || !g->row || !g->logits || !g->pick.seen || !g->pick.order || !g->ids || !g->pos || !g->slot || !g->target || !g->token)
        QL_FAIL(QL_ENOMEM, "generate: no memory");
    for (size_t i = 0; i < rows; i++) g->target[i] = -100;
    return r->set.be->dev->alloc(r->dev, all * 4, &g->logits_mem);
}

static void close_decoder(decoder *g)
{
    const ql_dev_table *dev = g->r->set.be->dev;
    if (g->cache) dev->free(g->r->dev, g->cache);
    if (g->logits_mem) dev->free(g->r->dev, g->logits_mem);
    void *host[] = {g->k, g->v, g->row, g->logits, g->pick.seen, g->pick.order, g->ids, g->pos, g->slot, g->target, g->token};
    for (size_t i = 0; i < sizeof host / sizeof *host; i++) free(host[i]);
}

/* How many of these sequences go together, and the rows of cache that they take: a function of the model and the sequences alone, so
 * that all ranks agree. */
static int together(const ql_rank *r, const ql_decoding *d, ql_sequence *seq, int n, int first, flow *f, int64_t *rows)
{
    const ql_config *c = &r->spec->model->cfg;
    int64_t one = 2 * c->layers * c->kv_heads * c->head_dim * (int64_t)ql_dtype_size(r->spec->dtype);
    int count = 0;
    *rows = 0;
    for (; count < QL_DECODE_ROWS && first + count < n; count++) {
        ql_sequence *s = seq + first + count;
        int64_t more = ql_round_up(s->len + d->how.max_new, 64);
        if (count && (*rows + more) * one > CACHE_BYTES) break;
        f[count] = (flow){.s = s, .number = first + count, .base = *rows};
        ql_mt_seed(&f[count].random, d->how.seed + (uint64_t)(first + count));
        *rows += more;
    }
    return count;
}

ql_status ql_decode(ql_rank *r, const ql_decoding *d, ql_sequence *seq, int n)
{
    decoder g;
    ql_status st = open_decoder(&g, r, d);
    QL_GO(st);
    for (int at = 0, count; at < n; at += count) {
        flow f[QL_DECODE_ROWS];
        int64_t rows = 0;
        count = together(r, d, seq, n, at, f, &rows);
        if (rows > INT32_MAX) QL_GO(ql_fail(QL_ENOSUP, "generate: %lld tokens at a time, at most %d go: fewer max_new_tokens, or shorter prompts", (long long)rows, INT32_MAX));
        QL_GO(take_cache(&g, rows));
        QL_GO(side_by_side(&g, f, count, at + count == n));
    }
out:
    close_decoder(&g);
    return st;
}
