/* What is looked at before training: samples with their trained tokens, lengths, and signs of trouble. */
#include "core/data.h"

#include <stdlib.h>
#include <string.h>

static size_t characters(const ql_str *s)
{
    size_t n = 0;
    for (size_t i = 0; i < s->len; i++) n += (s->data[i] & 0xc0) != 0x80;
    return n;
}

/* The first token is nobody's label: nothing comes before it. */
static bool trained(const uint32_t *t, int64_t i)
{
    return i > 0 && !(t[i] & QL_MASKED);
}

/* A sample's text (its ids where there is no tokenizer), and the spans that are trained on, or not, in it. */
static ql_status sample(const ql_dataset *d, const ql_tok *tok, int64_t i, json_t **out)
{
    int64_t n;
    const uint32_t *t = ql_dataset_document(d, i, &n);
    ql_str s = {0};
    json_t *spans = json_array(), *o = NULL;
    int32_t *ids = malloc((size_t)(n + 1) * sizeof *ids);
    ql_status st = spans && ids ? QL_OK : ql_fail(QL_ENOMEM, "no memory for a sample");
    bool bad = false;
    size_t from = 0;
    for (int64_t a = 0, b; a < n && st == QL_OK && !bad; a = b) {
        for (b = a; b < n && trained(t, b) == trained(t, a); b++) ids[b] = (int32_t)(t[b] & ~QL_MASKED);
        if (tok) st = ql_tok_decode(tok, ids + a, (size_t)(b - a), QL_TOK_SPECIALS | (a ? QL_TOK_INSIDE : 0), &s);
        for (int64_t k = a; !tok && k < b && st == QL_OK; k++) st = ql_str_printf(&s, k ? " %d" : "%d", (int)ids[k]);
        size_t to = characters(&s);
        bad = json_array_append_new(spans, json_pack("[I,I,b]", (json_int_t)from, (json_int_t)to,
                                                     trained(t, a))) != 0;
        from = to;
    }
    if (st == QL_OK && !bad) o = json_pack("{s:s%,s:O,s:I}", "text", s.data ? s.data : "", s.len, "spans", spans,
                                           "tokens", (json_int_t)n);
    if (st == QL_OK && !o) st = ql_fail(QL_ENOMEM, "no memory for a sample");
    if (st == QL_OK) *out = o;
    json_decref(spans), ql_str_free(&s), free(ids);
    return st;
}

typedef struct {
    int64_t two_bos, no_eos, trained;
    int64_t bucket[32]; /* lengths in [64·2^(k−1), 64·2^k) */
} counts;

static bool stops(const ql_tok *tok, uint32_t id)
{
    const ql_ids *s = ql_tok_stops(tok);
    for (size_t i = 0; i < s->len; i++)
        if (id == (uint32_t)s->data[i]) return true;
    return false;
}

static void count(const ql_dataset *d, const ql_tok *tok, counts *c)
{
    const ql_tok_names *names = ql_tok_info(tok);
    for (int64_t i = 0, n; i < ql_dataset_documents(d); i++) {
        const uint32_t *t = ql_dataset_document(d, i, &n);
        int k = 0;
        bool eos = false;
        if (names->bos >= 0 && n > 1 && (t[0] & ~QL_MASKED) == (uint32_t)names->bos && (t[1] & ~QL_MASKED) == (t[0] & ~QL_MASKED))
            c->two_bos++;
        /* Templates may end with a line end behind the end token. */
        for (int64_t j = n - 1; j >= 0 && j >= n - 3; j--)
            eos |= stops(tok, t[j]); /* and it is trained on */
        c->no_eos += names->eos >= 0 && !eos;
        for (int64_t j = 1; j < n; j++) c->trained += trained(t, j);
        while (k < 31 && n >= (int64_t)64 << k) k++;
        c->bucket[k]++;
    }
}

static json_t *histogram(const counts *c)
{
    json_t *list = json_array();
    int last = 31;
    while (last > 0 && !c->bucket[last]) last--;
    for (int k = 0; k <= last; k++)
        json_array_append_new(list, json_pack("{s:I,s:I,s:I}", "from", k ? (json_int_t)64 << (k - 1) : 0, "to",
                                              (json_int_t)64 << k, "count", (json_int_t)c->bucket[k]));
    return list;
}

static void warn(json_t *list, ql_str *s, ql_status st)
{
    if (st == QL_OK) json_array_append_new(list, json_string(s->data));
    ql_str_clear(s);
}

static json_t *warnings(const ql_dataset *d, const counts *c, const ql_tok_names *names)
{
    const json_t *about = ql_dataset_about(d);
    json_t *list = json_array();
    ql_str s = {0};
    int64_t docs = ql_dataset_documents(d), cut = json_integer_value(json_object_get(about, "truncated"));
    int64_t not_utf8 = json_integer_value(json_object_get(about, "not_utf8"));
    int64_t odd = json_integer_value(json_object_get(about, "prompt_not_prefix"));
    if (c->two_bos)
        warn(list, &s, ql_str_printf(&s, "%lld sample%s with two %s: the text brings one and the tokenizer adds one",
                                     (long long)c->two_bos, c->two_bos == 1 ? " begins" : "s begin", names->bos_token));
    if (c->no_eos > cut)
        warn(list, &s, ql_str_printf(&s, "%lld sample%s not end with a trained %s: the model may not learn to stop",
                                     (long long)(c->no_eos - cut), c->no_eos - cut == 1 ? " does" : "s do", names->eos_token));
    if (names->eos < 0)
        warn(list, &s, ql_str_printf(&s, "the tokenizer names no eos_token: nothing marks where samples end"));
    if (cut)
        warn(list, &s, ql_str_printf(&s, "%lld of %lld sample%s (%.1f %%) %s", (long long)cut, (long long)docs, docs == 1 ? "" : "s",
                                     100.0 * (double)cut / (double)docs,
                                     cut == 1 ? "was cut to max_length and loses its end" : "were cut to max_length and lose their end"));
    if (not_utf8)
        warn(list, &s, ql_str_printf(&s, "%lld row%s not in UTF-8: letters are lost there. Save the data anew (iconv -f LATIN1 -t UTF-8)",
                                     (long long)not_utf8, not_utf8 == 1 ? "" : "s"));
    if (odd)
        warn(list, &s, ql_str_printf(&s, "in %lld sample%s the prompt's tokens are not how the sample begins: what is trained "
                                         "on begins where they part, inside the prompt; end prompts before a space", (long long)odd, odd == 1 ? "" : "s"));
    if (c->trained * 20 < ql_dataset_tokens(d))
        warn(list, &s, ql_str_printf(&s, "only %.1f %% of all tokens are trained on",
                                     100.0 * (double)c->trained / (double)ql_dataset_tokens(d)));
    ql_str_free(&s);
    return list;
}

ql_status ql_data_lint(const ql_dataset *d, const ql_tok *tok, int n_samples, json_t **out)
{
    counts c = {0};
    const ql_tok_names *names = ql_tok_info(tok);
    const json_t *about = ql_dataset_about(d);
    json_t *o = json_deep_copy(about), *samples = json_array();
    ql_status st = QL_OK;
    int64_t size = ql_dataset_size(d), longest = ql_dataset_longest(d);
    bool bad = !o || !samples;
    if (bad) goto out;
    count(d, tok, &c);
    for (int64_t i = 0; i < n_samples && i < ql_dataset_documents(d); i++) {
        json_t *one = NULL;
        QL_GO(sample(d, tok, i, &one));
        bad |= json_array_append_new(samples, one) != 0;
    }
    bad |= json_object_set_new(o, "examples", json_integer(size)) != 0;
    bad |= json_object_set_new(o, "documents", json_integer(ql_dataset_documents(d))) != 0;
    bad |= json_object_set_new(o, "tokens", json_integer(ql_dataset_tokens(d))) != 0;
    bad |= json_object_set_new(o, "trained_tokens", json_integer(c.trained)) != 0;
    bad |= json_object_set_new(o, "longest", json_integer(longest)) != 0;
    bad |= json_object_set_new(o, "histogram", histogram(&c)) != 0;
    bad |= json_object_set_new(o, "warnings", warnings(d, &c, names)) != 0;
    bad |= json_object_set(o, "samples", samples) != 0;
    if (!bad) *out = o, o = NULL;
out:
    if (bad && st == QL_OK) st = ql_fail(QL_ENOMEM, "no memory for a report");
    json_decref(o), json_decref(samples);
    return st;
}
