/* Settings whose values have a form of their own: devices, stores, sizes, fsdp; and the nearest-word search. */
#include "core/job.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* ---- nearest words -------------------------------------------------------------------------------- */

enum { WORD_MAX = 48 };

static int least(int a, int b)
{
    return a < b ? a : b;
}

/* Damerau-Levenshtein (adjacent swaps, no substring edited twice), case and '-' ignored. */
static int distance(const char *a, const char *b)
{
    int row[3][WORD_MAX + 1], na = (int)strlen(a), nb = (int)strlen(b);
    int *old = row[0], *last = row[1], *now = row[2];
    if (na > WORD_MAX || nb > WORD_MAX) return WORD_MAX;
    for (int j = 0; j <= nb; j++) old[j] = last[j] = j;
    for (int i = 1; i <= na; i++) {
        now[0] = i;
        for (int j = 1; j <= nb; j++) {
            char x = a[i - 1] == '-' ? '_' : (char)tolower((unsigned char)a[i - 1]);
            char y = (char)tolower((unsigned char)b[j - 1]);
            int best = last[j - 1] + (x != y);
            best = least(best, least(last[j], now[j - 1]) + 1);
            if (i > 1 && j > 1 && x == tolower((unsigned char)b[j - 2]) &&
                tolower((unsigned char)a[i - 2]) == y)
                best = least(best, old[j - 2] + 1);
            now[j] = best;
        }
        int *t = old;
        old = last, last = now, now = t;
    }
    return last[nb];
}

/* How far b is from what was typed; a whole part of a name ("alpha" in lora_alpha) is near. WORD_MAX: too far. */
static int farness(const char *typed, const char *b)
{
    int n = (int)strlen(typed), most = n < 4 ? 1 : n / 3, d;
    if (n >= 3 && n <= WORD_MAX && strcasestr(b, typed)) return 2;
    if (abs(n - (int)strlen(b)) > most) return WORD_MAX; /* at least as far as the lengths */
    d = distance(typed, b);
    return d <= most && d < n ? d : WORD_MAX;
}

const char *ql_nearest(const char *word, const char *const *words, int n, char *buf, size_t size)
{
    int first = -1, second = -1, d1 = WORD_MAX, d2 = WORD_MAX;
    for (int i = 0; i < n; i++) {
        int d = farness(word, words[i]);
        if (d < d1) {
            second = first, d2 = d1;
            first = i, d1 = d;
        } else if (d < d2) {
            second = i, d2 = d;
        }
    }
    if (size) buf[0] = 0;
    if (first >= 0 && second >= 0 && d2 <= d1 + 1)
        snprintf(buf, size, "did you mean '%s' or '%s'?", words[first], words[second]);
    else if (first >= 0)
        snprintf(buf, size, "did you mean '%s'?", words[first]);
    return buf;
}

/* ---- devices -------------------------------------------------------------------------------------- */

static ql_status bad_devices(const char *text)
{
    QL_FAIL(QL_EINVAL, "devices: '%.60s' is none of auto, 0,1 (GPUs), cuda, cuda:0,1, cpu, cpu:N (N up to %d)", text,
            QL_MAX_DEVICES);
}

static ql_status devices_fit(const ql_devices *d)
{
    if (d->count <= QL_MAX_DEVICES) return QL_OK;
    QL_FAIL(QL_ENOSUP, "devices: %d %s, at most %d work together: --devices %s", d->count, d->kind == QL_DEVICES_CPU ? "CPU ranks" : "GPUs", QL_MAX_DEVICES,
            d->kind == QL_DEVICES_CPU ? "cpu:8" : "0,1,2,3,4,5,6,7");
}

/* Digits alone, up to 4 of them. */
static bool small_number(const char **p, int *out)
{
    int v = 0, n = 0;
    for (; n < 5 && isdigit((unsigned char)**p); n++, (*p)++) v = v * 10 + (**p - '0');
    *out = v;
    return n > 0 && n < 5;
}

ql_status ql_devices_parse(const char *text, ql_devices *out)
{
    ql_devices d = {0};
    const char *p = text;
    if (strcmp(text, "auto") == 0) {
        *out = d;
        return QL_OK;
    }
    if (strncmp(p, "cpu", 3) == 0) {
        d.kind = QL_DEVICES_CPU, d.count = 1, p += 3;
        if (*p == ':') {
            p++;
            if (!small_number(&p, &d.count)) return bad_devices(text);
        }
        if (*p || d.count < 1) return bad_devices(text);
        QL_TRY(devices_fit(&d));
        *out = d;
        return QL_OK;
    }
    d.kind = QL_DEVICES_CUDA;
    if (strncmp(p, "cuda", 4) == 0 || strncmp(p, "gpu", 3) == 0) {
        p += *p == 'c' ? 4 : 3;
        if (*p == 0) {
            *out = d;
            return QL_OK;
        }
        if (*p++ != ':') return bad_devices(text);
    }
    for (;;) {
        int i;
        while (*p == ' ') p++;
        if (strncmp(p, "cuda:", 5) == 0) p += 5; /* cuda:0,cuda:1 */
        if (!small_number(&p, &i)) return bad_devices(text);
        for (int k = 0; k < d.count && k < QL_MAX_DEVICES; k++)
            if (d.index[k] == i) QL_FAIL(QL_EINVAL, "devices: GPU %d is named twice in '%.60s'", i, text);
        if (d.count < QL_MAX_DEVICES) d.index[d.count] = i;
        d.count++;
        while (*p == ' ') p++;
        if (*p == 0) break;
        if (*p++ != ',') return bad_devices(text);
    }
    QL_TRY(devices_fit(&d));
    *out = d;
    return QL_OK;
}

/* ---- store ---------------------------------------------------------------------------------------- */

static const char *const store_names[QL_STORES] = {"auto", "resident", "resident16", "sharded", "host"};

const char *ql_store_name(ql_store_kind k)
{
    return (unsigned)k < QL_STORES ? store_names[k] : "?";
}

static ql_status store_kind(const char *s, size_t n, ql_store_kind *out)
{
    for (int k = 0; k < QL_STORES; k++)
        if (strlen(store_names[k]) == n && strncmp(store_names[k], s, n) == 0) {
            *out = (ql_store_kind)k;
            return QL_OK;
        }
    QL_FAIL(QL_EINVAL, "store: '%.*s' is none of auto, resident, resident16, sharded, host", (int)(n < 40 ? n : 40), s);
}

/* "3" or "0-15" (both ends included) = kind. */
static ql_status store_range(const char *range, size_t n, ql_store_kind kind, int64_t layers, ql_store_kind *out)
{
    char text[32];
    const char *p = text;
    int a, b;
    if (n >= sizeof text) goto bad;
    memcpy(text, range, n), text[n] = 0;
    if (!small_number(&p, &a)) goto bad;
    b = a;
    if (*p == '-') {
        p++;
        if (!small_number(&p, &b)) goto bad;
    }
    if (*p || b < a) goto bad;
    if (!out) return QL_OK;
    if (b >= layers)
        QL_FAIL(QL_EINVAL, "store: layer %d of '%s' is not there, the model has layers 0-%lld", b, text,
                (long long)layers - 1);
    for (int l = a; l <= b; l++) out[l] = kind;
    return QL_OK;
bad:
    QL_FAIL(QL_EINVAL, "store: '%.*s' is not a layer or a range of layers such as 0-15", (int)(n < 40 ? n : 40), range);
}

static ql_status store_text(const char *s, int64_t layers, ql_store_kind *out)
{
    ql_store_kind k = QL_STORE_AUTO;
    if (!strchr(s, ':')) {
        QL_TRY(store_kind(s, strlen(s), &k));
        for (int64_t l = 0; out && l < layers; l++) out[l] = k;
        return QL_OK;
    }
    while (*s) {
        size_t n = strcspn(s, ","), colon = strcspn(s, ":");
        while (n && *s == ' ') s++, n--, colon--;
        if (colon >= n) QL_FAIL(QL_EINVAL, "store: '%.*s' lacks a layer or a kind: write 0-15:resident,16-31:host", (int)(n < 40 ? n : 40), s);
        QL_TRY(store_kind(s + colon + 1, n - colon - 1, &k));
        QL_TRY(store_range(s, colon, k, layers, out));
        s += n;
        if (*s == ',') s++;
    }
    return QL_OK;
}

ql_status ql_store_parse(const json_t *value, int64_t layers, ql_store_kind *out)
{
    const char *key;
    json_t *v;
    for (int64_t l = 0; out && l < layers; l++) out[l] = QL_STORE_AUTO;
    if (json_is_string(value)) return store_text(json_string_value(value), layers, out);
    if (!json_is_object(value)) QL_FAIL(QL_EINVAL, "store: give a kind (resident) or kinds by layer (0-15:resident,16-31:host)");
    json_object_foreach((json_t *)value, key, v) {
        ql_store_kind k = QL_STORE_AUTO;
        const char *s = json_string_value(v);
        if (!s) QL_FAIL(QL_EINVAL, "store: the kind of '%.40s' must be a word", key);
        QL_TRY(store_kind(s, strlen(s), &k));
        QL_TRY(store_range(key, strlen(key), k, layers, out));
    }
    return QL_OK;
}

/* ---- sizes ---------------------------------------------------------------------------------------- */

ql_status ql_bytes_parse(const json_t *value, const char *what, int64_t *out)
{
    static const struct {
        const char *name;
        double mul;
    } units[] = {{"b", 1},     {"k", 1024},        {"kb", 1e3},        {"kib", 1024},       {"m", 1048576},
                 {"mb", 1e6},  {"mib", 1048576},   {"g", 1073741824},  {"gb", 1e9},         {"gib", 1073741824},
                 {"t", 1099511627776}, {"tb", 1e12}, {"tib", 1099511627776}};
    double v = -1;
    if (json_is_number(value)) {
        v = json_number_value(value);
    } else if (json_is_string(value)) {
        const char *s = json_string_value(value);
        char *end;
        double x = isdigit((unsigned char)*s) ? strtod(s, &end) : (end = (char *)s, -1.0);
        while (*end == ' ') end++;
        for (size_t i = 0; i < sizeof units / sizeof *units; i++)
            if (strcasecmp(end, units[i].name) == 0) v = x * units[i].mul;
    }
    if (!(v >= 1048576 && v < 1e18)) /* also NaN; less than 1 MiB is a missing unit */
        QL_FAIL(QL_EINVAL, "%s: give a size of at least 1 MiB with its unit, such as 15GiB or 800MiB", what);
    *out = (int64_t)v;
    return QL_OK;
}

/* ---- fsdp ----------------------------------------------------------------------------------------- */

static ql_status fsdp_word(const char *w, size_t n, ql_fsdp *f)
{
    static const char *const words[] = {"full_shard", "shard_grad_op", "no_shard", "offload", "auto_wrap", "hybrid_shard", "hybrid_shard_zero2"};
    int k = -1;
    for (int i = 0; i < 7; i++)
        if (strlen(words[i]) == n && strncmp(words[i], w, n) == 0) k = i;
    if (k >= 5) QL_FAIL(QL_ENOSUP, "fsdp: %s needs several machines; supported: full_shard, shard_grad_op, offload, auto_wrap", words[k]);
    if (k < 0) QL_FAIL(QL_EINVAL, "fsdp: '%.*s' is none of auto, true, false, full_shard, shard_grad_op, no_shard, offload, auto_wrap", (int)(n < 40 ? n : 40), w);
    if (k < 4) f->mode = k == 2 ? QL_FSDP_OFF : QL_FSDP_ON; /* auto_wrap alone says nothing */
    if (k == 1) f->reshard = false;
    if (k == 3) f->offload = true;
    return QL_OK;
}

static ql_status fsdp_words(const char *s, ql_fsdp *f)
{
    if (strcmp(s, "auto") == 0) return QL_OK;
    f->mode = QL_FSDP_OFF; /* "": transformers' way to say no */
    while (*s) {
        size_t n = strcspn(s, " ,");
        if (n) QL_TRY(fsdp_word(s, n, f));
        s += n + (s[n] != 0);
    }
    return QL_OK;
}

static ql_status config_bool(const char *key, const json_t *v, bool *set, bool *out)
{
    if (!json_is_boolean(v)) QL_FAIL(QL_EINVAL, "fsdp_config: '%s' must be true or false", key);
    *set = true;
    *out = json_is_true(v);
    return QL_OK;
}

static ql_status config_backward(const json_t *v, ql_fsdp *f)
{
    const char *s = json_string_value(v);
    if (!s) return config_bool("backward_prefetch", v, &f->backward_set, &f->backward);
    f->backward_set = true;
    f->backward = strcasecmp(s, "backward_pre") == 0;
    if (f->backward || strcasecmp(s, "no_prefetch") == 0) return QL_OK;
    QL_FAIL(QL_ENOSUP, "fsdp_config: backward_prefetch '%.40s' is not supported; backward_pre and no_prefetch are", s);
}

static ql_status config_reshard(const char *key, const json_t *v, ql_fsdp *f)
{
    bool set;
    const char *s = json_string_value(v); /* the older spelling: a sharding strategy */
    if (s && (!strcasecmp(s, "full_shard") || !strcasecmp(s, "shard_grad_op"))) {
        f->reshard = !strcasecmp(s, "full_shard");
        return QL_OK;
    }
    if (json_is_integer(v)) QL_FAIL(QL_ENOSUP, "fsdp_config: reshard_after_forward to a smaller group is not supported; true and false are");
    if (s) QL_FAIL(QL_ENOSUP, "fsdp_config: %s '%.40s' is not supported; FULL_SHARD and SHARD_GRAD_OP are, and fsdp false", key, s);
    return config_bool(key, v, &set, &f->reshard);
}

enum { K_RESHARD, K_STRATEGY, K_OFFLOAD, K_OFFLOAD2, K_CHECKPOINT, K_FORWARD, K_BACKWARD, K_VERSION, K_XLA, K_WITHOUT_EFFECT };

/* From K_WITHOUT_EFFECT on: the note that is given. */
static const char *const config_keys[] = {
    "reshard_after_forward", "sharding_strategy", "cpu_offload", "offload_params", "activation_checkpointing", "forward_prefetch",
    "backward_prefetch", "version", "xla", "state_dict_type", "cpu_ram_efficient_loading", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params", "sync_module_states",
    "use_orig_params", "limit_all_gathers"};
static const char *const config_notes[] = {
    "the adapter is always saved as one PEFT folder", "always so here: each rank reads its own ranges of the file",
    "always by decoder layer", "always by decoder layer", "always by decoder layer", "always so here", "always so here", "always so here"};
enum { CONFIG_KEYS = sizeof config_keys / sizeof *config_keys };

static ql_status note(json_t *notes, const char *key, const char *text)
{
    if (notes && json_array_append_new(notes, json_sprintf("fsdp_config %s: accepted; %s", key, text)))
        QL_FAIL(QL_ENOMEM, "fsdp_config: out of memory");
    return QL_OK;
}

static ql_status config_key(const char *key, const json_t *v, ql_fsdp *f, json_t *notes)
{
    bool set;
    char near[200];
    const char *name = strncmp(key, "fsdp_", 5) == 0 ? key + 5 : key; /* accelerate's spelling */
    int k = 0;
    while (k < CONFIG_KEYS && strcmp(name, config_keys[k])) k++;
    switch (k) {
    case K_RESHARD:
    case K_STRATEGY: return config_reshard(key, v, f);
    case K_OFFLOAD:
    case K_OFFLOAD2: return config_bool(key, v, &set, &f->offload);
    case K_CHECKPOINT: return config_bool(key, v, &f->checkpoint_set, &f->checkpoint);
    case K_FORWARD:
        QL_TRY(config_bool(key, v, &f->forward_set, &f->forward));
        return f->forward ? QL_OK : note(notes, "forward_prefetch", "always on here, it costs no memory");
    case K_BACKWARD:
        QL_TRY(config_backward(v, f));
        return f->backward ? QL_OK : note(notes, "backward_prefetch", "always on here, it costs no memory");
    case K_VERSION:
        if (json_is_integer(v) && (json_integer_value(v) == 1 || json_integer_value(v) == 2)) return QL_OK;
        QL_FAIL(QL_EINVAL, "fsdp_config: 'version' must be 1 or 2");
    case K_XLA:
        if (json_is_false(v)) return QL_OK;
        QL_FAIL(QL_ENOSUP, "fsdp_config: xla is not supported: there is no TPU here");
    default: break;
    }
    if (k == CONFIG_KEYS) {
        if (!*ql_nearest(name, config_keys, CONFIG_KEYS, near, sizeof near))
            snprintf(near, sizeof near, "it takes reshard_after_forward, cpu_offload, activation_checkpointing, forward_prefetch, backward_prefetch; "
                     "dtypes are --param_dtype and --output_dtype");
        QL_FAIL(QL_EINVAL, "fsdp_config: '%.60s' is not known; %s", key, near);
    }
    return note(notes, config_keys[k], config_notes[k - K_WITHOUT_EFFECT]);
}

ql_status ql_fsdp_parse(const json_t *fsdp, const json_t *config, ql_fsdp *out, json_t *notes)
{
    ql_fsdp f = {.reshard = true};
    const char *key;
    json_t *v;
    size_t i;
    if (json_is_string(fsdp)) {
        QL_TRY(fsdp_words(json_string_value(fsdp), &f));
    } else if (json_is_boolean(fsdp)) {
        f.mode = json_is_true(fsdp) ? QL_FSDP_ON : QL_FSDP_OFF;
    } else if (json_is_array(fsdp)) {
        if (!json_array_size(fsdp)) f.mode = QL_FSDP_OFF;
        json_array_foreach((json_t *)fsdp, i, v) {
            if (!json_is_string(v)) QL_FAIL(QL_EINVAL, "fsdp: a list must hold words such as full_shard");
            QL_TRY(fsdp_word(json_string_value(v), json_string_length(v), &f));
        }
    } else if (fsdp && !json_is_null(fsdp)) {
        QL_FAIL(QL_EINVAL, "fsdp: give auto, true, false, or words such as full_shard offload");
    }
    if (config && !json_is_null(config)) {
        if (!json_is_object(config)) QL_FAIL(QL_EINVAL, "fsdp_config: give an object such as {\"cpu_offload\": true}");
        json_object_foreach((json_t *)config, key, v) QL_TRY(config_key(key, v, &f, notes));
    }
    *out = f;
    return QL_OK;
}
