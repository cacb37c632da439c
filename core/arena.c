#include "core/arena.h"

enum { ALIGN = 256 };

const char *ql_cat_name(ql_cat c)
{
    static const char *const names[QL_CATS] = {"base",      "head",        "gather", "scratch", "adapters",
                                               "gradients", "optimizer",   "activations", "work"};
    return (unsigned)c < QL_CATS ? names[c] : "?";
}

ql_status ql_arena_take(ql_arena *a, ql_cat cat, int64_t bytes, void **out)
{
    if (bytes < 0 || bytes > INT64_MAX / 4) QL_FAIL(QL_EINTERNAL, "arena: %lld bytes asked for", (long long)bytes);
    if (a->used > INT64_MAX / 2) QL_FAIL(QL_ENOMEM, "this job needs more than %lld PiB on each device", (long long)(INT64_MAX / 2 >> 50));
    bytes = ql_round_up(bytes, ALIGN);
    if (a->base && a->used + bytes > a->size)
        QL_FAIL(QL_EINTERNAL, "arena: %s needs %lld bytes at %lld of %lld", ql_cat_name(cat), (long long)bytes,
                (long long)a->used, (long long)a->size);
    *out = a->base ? a->base + a->used : NULL;
    a->used += bytes;
    a->by_cat[cat] += bytes;
    return QL_OK;
}

ql_status ql_arena_mat(ql_arena *a, ql_cat cat, ql_dtype t, int64_t rows, int64_t cols, int64_t ld, ql_tensor *out)
{
    void *p = NULL;
    QL_TRY(ql_arena_take(a, cat, rows * ld * (int64_t)ql_dtype_size(t), &p));
    *out = ql_mat(p, t, rows, cols, ld);
    return QL_OK;
}
