/* Rows → a tokenised data set, in a thread of its own, kept under a hash of everything that matters. */
#include "core/data.h"

#include "core/file.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <string.h>

struct ql_tokenising {
    ql_table *rows;
    ql_tok *tok;
    ql_data_options o;
    char path[QL_PATH_MAX];
    bool temporary, cached, started, joined;
    pthread_t thread;
    atomic_llong done;
    atomic_bool stop;
    int64_t total;
    json_t *skipped, *first;
    int64_t examples, tokens, trained, truncated, odd_prompts;
    int32_t top; /* the largest id */
    ql_row_kind kind;
    ql_status status;
    char error[2048];
};

static uint64_t hash_text(uint64_t h, const char *s)
{
    return s ? ql_hash(h, s, strlen(s) + 1) : ql_hash(h, "", 0);
}

static ql_status choose_path(ql_tokenising *t)
{
    char name[64];
    uint64_t h[2];
    const ql_tok_names *names = ql_tok_info(t->tok);
    if (!t->o.cache_dir) {
        snprintf(t->path, sizeof t->path, "/tmp/qlora-tokens-XXXXXX");
        int fd = mkstemp(t->path);
        if (fd < 0) QL_FAIL(QL_EIO, "%s: cannot be made", t->path);
        close(fd);
        t->temporary = true;
        return QL_OK;
    }
    QL_TRY(ql_table_hash(t->rows, h));
    enum { RULES = 5 }; /* changes when the same row becomes other tokens or another mask, or more is told about them */
    int64_t numbers[] = {RULES, t->o.packing == QL_PACK_WRAPPED ? 0 : t->o.max_length, t->o.packing == QL_PACK_BFD_SPLIT, t->o.loss_on, (int64_t)ql_tok_hash(t->tok)};
    for (int k = 0; k < 2; k++) {
        h[k] = ql_hash(h[k], numbers, sizeof numbers);
        h[k] = hash_text(h[k], t->o.text_field);
        h[k] = hash_text(h[k], t->o.chat_template ? t->o.chat_template : names->chat_template);
        h[k] = hash_text(h[k], t->o.eos_token ? t->o.eos_token : names->eos_token);
        h[k] = hash_text(h[k], names->bos_token);
    }
    snprintf(name, sizeof name, "tokens-%016llx%016llx", (unsigned long long)h[0], (unsigned long long)h[1]);
    QL_TRY(ql_path_mkdirs(t->o.cache_dir));
    return ql_path_join(t->path, t->o.cache_dir, name);
}

static ql_status count_skipped(ql_tokenising *t, const char *reason)
{
    json_t *n = json_object_get(t->skipped, reason);
    bool bad = json_object_set_new(t->skipped, reason, json_integer(json_integer_value(n) + 1)) != 0;
    if (!n) bad |= json_object_set_new(t->first, reason, json_string(ql_error())) != 0;
    ql_error_clear();
    return bad ? ql_fail(QL_ENOMEM, "no memory to count skipped rows") : QL_OK;
}

/* One example, or (bfd_split) the pieces of max_length that have something to train on. */
static ql_status store(ql_tokenising *t, const ql_example *e, ql_dataset_writer *w)
{
    size_t whole = e->ids.len, piece = t->o.packing == QL_PACK_BFD_SPLIT ? (size_t)t->o.max_length : whole;
    for (size_t at = 0; at < whole; at += piece) {
        size_t n = whole - at < piece ? whole - at : piece;
        int64_t trained = 0;
        for (size_t k = 1; k < n; k++) trained += e->trained[at + k];
        if (!trained) continue;
        for (size_t k = 0; k < n; k++)
            if (e->ids.data[at + k] > t->top) t->top = e->ids.data[at + k];
        QL_TRY(ql_dataset_add(w, e->ids.data + at, e->trained + at, n));
        t->examples++, t->tokens += (int64_t)n, t->trained += trained;
    }
    return QL_OK;
}

static ql_status do_row(ql_tokenising *t, ql_formatter **f, int64_t i, ql_example *e, ql_dataset_writer *w)
{
    json_t *row = NULL;
    ql_status st = ql_table_get(t->rows, i, &row);
    if (st == QL_EINVAL) return count_skipped(t, "broken row");
    if (st != QL_OK) return st;
    if (!*f && ql_row_is_empty(row, &t->o)) {
        json_decref(row);
        ql_fail(QL_EINVAL, "row %lld: there is nothing in its column", (long long)i + 1);
        return count_skipped(t, "empty");
    }
    if (!*f) { /* the first row with something in it says what all of them are */
        st = ql_formatter_new(t->tok, row, &t->o, f);
        if (st == QL_OK) t->kind = ql_formatter_kind(*f);
    }
    if (st == QL_OK) {
        st = ql_format_row(*f, row, e);
        if (st != QL_OK && e->reason) {
            ql_error_prefix("row %lld: ", (long long)i + 1);
            st = count_skipped(t, e->reason);
        } else if (st == QL_OK) {
            t->truncated += e->truncated, t->odd_prompts += e->prompt_not_prefix;
            st = store(t, e, w);
        }
    }
    json_decref(row);
    return st;
}

static ql_status nothing_left(ql_tokenising *t)
{
    ql_str s = {0};
    const char *reason;
    json_t *n;
    json_object_foreach(t->skipped, reason, n)
        (void)ql_str_printf(&s, "%s%lld x %s (%s)", s.len ? "; " : "", (long long)json_integer_value(n), reason,
                            json_string_value(json_object_get(t->first, reason)));
    if (t->total == 1)
        ql_fail(QL_EINVAL, "the only row cannot be trained on: %.1500s", s.data ? s.data : "");
    else
        ql_fail(QL_EINVAL, "none of the %lld rows can be trained on: %.1500s", (long long)t->total, s.data ? s.data : "");
    ql_str_free(&s);
    return QL_EINVAL;
}

static ql_status tokenise(ql_tokenising *t)
{
    ql_dataset_writer *w = NULL;
    ql_formatter *f = NULL;
    ql_example e = {0};
    json_t *about = NULL;
    ql_status st = QL_OK;
    QL_GO(ql_dataset_create(t->path, &w));
    QL_GO(ql_dataset_reserve(w, (size_t)t->total));
    for (int64_t i = 0; i < t->total; i++) {
        if (atomic_load_explicit(&t->stop, memory_order_relaxed)) {
            st = ql_fail(QL_ESTOP, "tokenising was stopped");
            goto out;
        }
        QL_GO(do_row(t, &f, i, &e, w));
        atomic_store_explicit(&t->done, i + 1, memory_order_relaxed);
    }
    if (!t->examples) QL_GO(nothing_left(t));
    about = json_pack("{s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:s,s:O,s:O}", "rows", (json_int_t)t->total, "examples",
                      (json_int_t)t->examples, "tokens", (json_int_t)t->tokens, "trained_tokens", (json_int_t)t->trained,
                      "truncated", (json_int_t)t->truncated, "prompt_not_prefix", (json_int_t)t->odd_prompts, "not_utf8",
                      (json_int_t)ql_table_not_utf8(t->rows), "largest_id", (json_int_t)t->top, "kind", ql_row_kind_name(t->kind), "skipped", t->skipped,
                      "first", t->first);
    if (!about) st = ql_fail(QL_ENOMEM, "no memory for a data set's description");
    else st = ql_dataset_commit(w, about);
out:
    ql_dataset_writer_close(w), ql_formatter_free(f), ql_example_free(&e);
    json_decref(about);
    return st;
}

static void *thread_main(void *arg)
{
    ql_tokenising *t = arg;
    t->status = tokenise(t);
    /* The error text is this thread's own: hand it over. */
    if (t->status != QL_OK) snprintf(t->error, sizeof t->error, "%s", ql_error());
    /* Also after a failure: who polls for the end must reach ql_tokenise_wait. */
    atomic_store(&t->done, t->total);
    return NULL;
}

static bool have_cached(ql_tokenising *t)
{
    ql_dataset *d = NULL;
    if (t->temporary || !ql_path_is_file(t->path)) return false;
    bool good = ql_dataset_open(t->path, QL_PACK_NONE, 0, &d) == QL_OK;
    if (!good) ql_error_clear(); /* a damaged one is made again */
    ql_dataset_close(d);
    return good;
}

ql_status ql_tokenise_start(ql_table *rows, ql_tok *tok, const ql_data_options *o, ql_tokenising **out)
{
    ql_status st = QL_OK;
    ql_tokenising *t = calloc(1, sizeof *t);
    if (!t) QL_FAIL(QL_ENOMEM, "no memory to tokenise");
    if (o->packing != QL_PACK_NONE && o->max_length < 2) {
        free(t);
        QL_FAIL(QL_EINVAL, "packing needs a max_length");
    }
    t->rows = rows, t->tok = tok, t->o = *o, t->total = ql_table_count(rows);
    t->skipped = json_object(), t->first = json_object();
    if (!t->skipped || !t->first) {
        st = ql_fail(QL_ENOMEM, "no memory to tokenise");
        goto out;
    }
    QL_GO(choose_path(t));
    t->cached = have_cached(t);
    if (t->cached) {
        atomic_store(&t->done, t->total);
    } else if (pthread_create(&t->thread, NULL, thread_main, t)) {
        st = ql_fail(QL_ENOMEM, "no thread to tokenise in");
        goto out;
    } else {
        t->started = true;
    }
    *out = t, t = NULL;
out:
    ql_tokenise_free(t);
    return st;
}

void ql_tokenise_progress(const ql_tokenising *t, int64_t *done, int64_t *total)
{
    *done = atomic_load_explicit(&t->done, memory_order_relaxed);
    *total = t->total;
}

void ql_tokenise_stop(ql_tokenising *t)
{
    atomic_store(&t->stop, true);
}

static void join(ql_tokenising *t)
{
    if (t->started && !t->joined) pthread_join(t->thread, NULL);
    t->joined = true;
}

ql_status ql_tokenise_wait(ql_tokenising *t, ql_dataset **out)
{
    join(t);
    if (t->status != QL_OK) return ql_fail(t->status, "%s", t->error);
    return ql_dataset_open(t->path, t->o.packing, t->o.max_length, out);
}

bool ql_tokenise_cached(const ql_tokenising *t)
{
    return t->cached;
}

void ql_tokenise_free(ql_tokenising *t)
{
    if (!t) return;
    ql_tokenise_stop(t);
    join(t);
    if (t->temporary) unlink(t->path); /* whoever has it open keeps its mapping */
    json_decref(t->skipped), json_decref(t->first);
    free(t);
}
