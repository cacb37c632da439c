#include "core/dataset.h"

#include <stdlib.h>
#include <string.h>

static ql_status grow(ql_batch *b, int64_t T, int64_t docs)
{
    if (T > b->cap) {
        size_t n = (size_t)T;
        int32_t **small[] = {&b->ids, &b->labels, &b->target, &b->position};
        for (int i = 0; i < 4; i++) {
            int32_t *p = realloc(*small[i], n * sizeof *p);
            if (!p) QL_FAIL(QL_ENOMEM, "no memory for a batch of %lld tokens", (long long)T);
            *small[i] = p;
        }
        int64_t *p = realloc(b->token, n * sizeof *p);
        if (!p) QL_FAIL(QL_ENOMEM, "no memory for a batch of %lld tokens", (long long)T);
        b->token = p, b->cap = T;
    }
    if (docs > b->doc_cap) {
        int32_t **small[] = {&b->doc_start, &b->doc_len};
        for (int i = 0; i < 2; i++) {
            int32_t *p = realloc(*small[i], (size_t)docs * sizeof *p);
            if (!p) QL_FAIL(QL_ENOMEM, "no memory for a batch of %lld documents", (long long)docs);
            *small[i] = p;
        }
        b->doc_cap = docs;
    }
    return QL_OK;
}

void ql_batch_free(ql_batch *b)
{
    free(b->ids), free(b->labels), free(b->target), free(b->position), free(b->token);
    free(b->doc_start), free(b->doc_len);
    *b = (ql_batch){0};
}

void ql_batch_measure(const ql_dataset *d, const int32_t *e, int64_t n, int64_t multiple, int64_t *T,
                      int64_t *targets)
{
    int64_t longest = 0, sum = 0, len;
    *targets = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t total = 0;
        for (int64_t k = 0; k < ql_dataset_parts(d, e[i]); k++) {
            const uint32_t *tok = ql_dataset_part(d, e[i], k, &len);
            for (int64_t t = 1; t < len; t++) *targets += !(tok[t] & QL_MASKED);
            total += len;
        }
        longest = ql_max64(longest, total), sum += total;
    }
    *T = ql_dataset_packed(d) ? ql_round_up(sum, multiple) : n * ql_round_up(longest, multiple);
}

/* Padding: positions run on (unpacked) or restart (packed); nothing reads what attention makes of it. */
static void pad(ql_batch *b, int64_t from, int64_t to, int64_t row, int64_t position, int32_t pad_id)
{
    for (int64_t t = from; t < to; t++, position++) {
        b->ids[t] = pad_id;
        b->labels[t] = b->target[t] = -100;
        b->position[t] = (int32_t)position;
        b->token[t] = row << 32 | position;
    }
}

/* One document at t. `in_row` is its first token's place in its row, which numbers the dropout masks (a
 * packed row has several documents). */
static void put(ql_batch *b, const uint32_t *tok, int64_t n, int64_t t, int64_t row, int64_t in_row)
{
    for (int64_t i = 0; i < n; i++) {
        int32_t id = (int32_t)(tok[i] & ~QL_MASKED);
        b->ids[t + i] = id;
        b->labels[t + i] = tok[i] & QL_MASKED ? -100 : id;
        b->position[t + i] = (int32_t)i;
        b->token[t + i] = row << 32 | (in_row + i);
        b->target[t + i] = -100;
        if (i && !(tok[i] & QL_MASKED)) b->target[t + i - 1] = id, b->targets++;
    }
    b->doc_start[b->docs] = (int32_t)t, b->doc_len[b->docs++] = (int32_t)n;
    b->doc_max = ql_max64(b->doc_max, n), b->tokens += n;
}

ql_status ql_batch_fill(ql_batch *b, const ql_dataset *d, const int32_t *e, int64_t n,
                        int64_t first_row, int32_t pad_id, int64_t multiple)
{
    int64_t T, docs = 0, at = 0, targets, len;
    bool packed = ql_dataset_packed(d);
    for (int64_t i = 0; i < n; i++) {
        if (e[i] < 0 || e[i] >= ql_dataset_size(d))
            QL_FAIL(QL_EINTERNAL, "example %d of %lld asked for", e[i], (long long)ql_dataset_size(d));
        docs += ql_dataset_parts(d, e[i]);
    }
    if (n < 1 || multiple < 1) QL_FAIL(QL_EINTERNAL, "a batch of %lld examples", (long long)n);
    ql_batch_measure(d, e, n, multiple, &T, &targets);
    if (T > INT32_MAX) QL_FAIL(QL_ENOSUP, "a batch of %lld tokens, at most %d go: a smaller per_device_train_batch_size or max_length", (long long)T, INT32_MAX);
    QL_TRY(grow(b, T, docs));
    b->T = T, b->rows = packed ? 1 : n;
    b->docs = b->targets = b->tokens = b->doc_max = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t start = at, row = first_row + i;
        for (int64_t k = 0; k < ql_dataset_parts(d, e[i]); k++) {
            const uint32_t *tok = ql_dataset_part(d, e[i], k, &len);
            put(b, tok, len, at, row, at - start);
            /* Hugging Face masks the label at each position 0 of a packed row. */
            if (packed && len) b->labels[at] = -100;
            at += len;
        }
        if (packed) continue;
        pad(b, at, start + T / n, row, at - start, pad_id);
        at = start + T / n;
    }
    /* The tail of a packed row belongs to no example: a row number of its own. */
    if (packed) pad(b, at, T, first_row + n, 0, pad_id);
    return QL_OK;
}
