#include "core/verify.h"

#include "core/hash.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void ql_verify_check(ql_verify *v, const char *name, int ok, const char *fmt, ...)
{
    char text[600];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    json_array_append_new(v->checks, json_pack("{s:s,s:b,s:s}", "name", name, "ok", ok, "text", text));
}

ql_status ql_verify_share(ql_verify *v, const void *mine, int64_t bytes, void *all)
{
    ql_rank *r = v->r;
    const ql_dev_table *dev = r->set.be->dev;
    char *x = r->mem->op_work;
    if (r->set.world == 1) {
        memcpy(all, mine, (size_t)bytes);
        return QL_OK;
    }
    if (bytes * r->set.world > QL_WORK_BYTES) QL_FAIL(QL_ENOSUP, "verify: %lld bytes of findings", (long long)bytes);
    ql_tensor own = ql_vec(x + r->set.rank * bytes, QL_U8, bytes);
    QL_TRY(dev->copy(r->compute, own.data, mine, bytes));
    QL_TRY(r->set.be->comm->all_gather(r->comm, r->compute, ql_vec(x, QL_U8, bytes * r->set.world), own));
    QL_TRY(dev->copy(r->compute, all, x, bytes * r->set.world));
    return dev->sync(r->compute);
}

/* ---- bytes of the base per device ---------------------------------------------------------------- */

static const char *gib(double bytes, char *buf, size_t size)
{
    if (bytes >= (1 << 30))
        snprintf(buf, size, "%.3f GiB", bytes / (1 << 30));
    else
        snprintf(buf, size, "%.3f MiB", bytes / (1 << 20));
    return buf;
}

int64_t ql_verify_bytes(const ql_blob_linear *l)
{
    int64_t n = l->rows * l->cols;
    if (!l->nf4) return n * (int64_t)ql_dtype_size(l->dtype);
    int64_t blocks = ql_ceil_div(n, l->block);
    return (n + 1) / 2 + blocks * (l->nested ? 1 : 4) + (l->nested ? ql_ceil_div(blocks, l->nested) * 4 : 0);
}

/* What a device has to hold by the stores of its layers, and how much more padding and cuts may add. */
static void base_expected(const ql_verify *v, int rank, int64_t *whole, double *want, double *slack)
{
    const ql_mem *m = v->r->mem;
    int lo, hi;
    ql_plan_stage(&v->t->spec.choice, rank, &lo, &hi);
    *whole = 0, *want = *slack = 0;
    for (int64_t l = 0; l < v->t->model->cfg.layers; l++) {
        const ql_blob *b = &m->blob[l];
        int64_t bytes = 0, wide = 0;
        double spare = 0;
        for (int i = 0; i < QL_LINEARS; i++) {
            const ql_blob_linear *x = &b->lin[i];
            bytes += ql_verify_bytes(x);
            wide += x->rows * x->cols * (int64_t)ql_dtype_size(v->t->spec.dtype);
            /* A part is whole blocks (and groups of scales), or whole rows; its pieces begin at multiples of 256. */
            double unit = x->nf4 ? (double)x->block * (double)(x->nested ? x->nested : 1) : (double)x->cols * 4;
            spare += unit + QL_VERIFY_PIECES * 256 + 256;
        }
        *whole += bytes;
        if (l < lo || l >= hi) continue;
        *slack += spare;
        switch ((ql_store_kind)v->t->spec.choice.store[l]) {
        case QL_STORE_RESIDENT: *want += (double)bytes; break;
        case QL_STORE_SHARDED: *want += (double)bytes / v->r->set.world; break;
        case QL_STORE_HOST: break;
        default: *want += (double)wide; *slack += (double)wide * 0.25 + (1 << 20); break; /* rows carry adapter columns */
        }
    }
}

static ql_status check_base(ql_verify *v)
{
    char text[480] = "", a[32], b[32], away[64] = "";
    int64_t whole;
    double want = 0, slack;
    int ok = 1, world = v->r->set.world, n = 0, host = 0, layers = (int)v->t->model->cfg.layers;
    int64_t mine, held[QL_MAX_WORLD];
    QL_TRY(ql_rank_measure(v->r));
    mine = v->w->p->shared->rank[v->r->set.rank].bytes[QL_CAT_BASE];
    QL_TRY(ql_verify_share(v, &mine, (int64_t)sizeof mine, held));
    for (int i = 0; i < world; i++) {
        double has = (double)held[i];
        base_expected(v, i, &whole, &want, &slack);
        ok &= has >= want - 1 && has <= want + slack;
        if (n < 400)
            n += snprintf(text + n, sizeof text - (size_t)n, "%s%s (%.1f %%)", n ? " + " : "", gib(has, a, sizeof a), 100 * has / (double)whole);
    }
    base_expected(v, 0, &whole, &want, &slack);
    for (int l = 0; l < layers; l++) host += v->t->spec.choice.store[l] == QL_STORE_HOST;
    if (host) snprintf(away, sizeof away, ", %d of %d layers rest in host memory", host, layers);
    ql_verify_check(v, "base bytes", ok, "%s of %s on %d device%s; the stores ask for %.1f %% %s%s%s", text, gib((double)whole, b, sizeof b), world,
                    world > 1 ? "s" : "", 100 * want / (double)whole, ql_plan_piped(&v->t->spec.choice) ? "on the first stage" : "each", away,
                    (double)mine > 1.05 * want ? ", the rest pads parts to whole groups of 16,384 weights" : "");
    return QL_OK;
}

/* ---- norms, biases and the head -------------------------------------------------------------------- */

/* Ranks that hold the same hold the same bits; the hash is that of the whole, whoever holds which part. */
static ql_status check_rest(ql_verify *v)
{
    int world = v->r->set.world, piped = ql_plan_piped(&v->t->spec.choice), ok = 1;
    ql_verify_rest mine, all[QL_MAX_WORLD];
    uint64_t small = 0, sum = 0, piece[QL_PIECES] = {0};
    int64_t wrong = 0, vectors = 0;
    char size[32];
    const char *name = "";
    QL_TRY(ql_verify_rest_of(v->r, &mine));
    ql_exec_enter(v->r);
    QL_TRY(ql_verify_share(v, &mine, (int64_t)sizeof mine, all));
    for (int i = 0; i < world; i++) {
        if (i == 0 || piped) small += all[i].small, vectors += all[i].vectors;
        ok &= piped || all[i].small == small;
        for (int p = 0; p < QL_PIECES; p++) {
            if (!all[i].has[p]) continue;
            ok &= !piece[p] || piece[p] == all[i].piece[p];
            piece[p] = all[i].piece[p];
        }
        if (all[i].wrong && !wrong) name = all[i].name;
        wrong += all[i].wrong;
    }
    sum = ql_hash64(small, piece, sizeof piece);
    ql_verify_check(v, "head and norms", ok && !wrong, "%lld norms and biases and the head, %s on this device, are the file's values%s%s%s; XXH64 of all %016llx. "
                    "Embedding rows come from the file itself", (long long)vectors, gib((double)mine.bytes, size, sizeof size), wrong ? ": NOT so, first " : "",
                    name, ok || wrong ? "" : ": NOT so, devices differ", (unsigned long long)sum);
    return QL_OK;
}

/* ---- the command --------------------------------------------------------------------------------- */

ql_status ql_verify_run(ql_worker *w, const json_t *command, json_t **out)
{
    ql_verify v = {.w = w, .r = w->rank, .t = w->task, .checks = json_array(), .layers = json_array()};
    ql_status st = QL_OK;
    w->p->shared->rank[w->p->rank].at_stop = 0;
    QL_GO(ql_worker_say(w, "verifying", ""));
    QL_GO(check_base(&v));
    QL_GO(ql_verify_layers(&v));
    QL_GO(check_rest(&v));
    QL_GO(ql_verify_adapters(&v, json_string_value(json_object_get(command, "run"))));
    *out = json_pack("{s:O,s:O}", "checks", v.checks, "layers", v.layers);
    if (!*out) st = ql_fail(QL_ENOMEM, "no memory for the result");
out:
    json_decref(v.checks);
    json_decref(v.layers);
    return st;
}
