/* A setting's value from what is given, JSON or text, to what a job stores: its type, its range, and the checks that are its own. */
#include "core/job.h"
#include "core/json.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { TEXT_MAX = 1 << 20, DEPTH_MAX = 16, SHOW_MAX = 80 };

/* A value as it would be typed, cut for messages. */
static const char *show(const json_t *v, char buf[SHOW_MAX])
{
    char *text = json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT);
    snprintf(buf, SHOW_MAX, "%.*s%s", SHOW_MAX - 8, text ? text : "?", text && strlen(text) > SHOW_MAX - 8 ? " …" : "");
    free(text);
    return buf;
}

static ql_status wrong(const ql_setting *s, const char *expected, const json_t *v)
{
    char buf[SHOW_MAX];
    QL_FAIL(QL_EINVAL, "%s: %s, found %s", s->name, expected, show(v, buf));
}

/* ---- checks of values ----------------------------------------------------------------------------- */

static bool clean_string(const json_t *v)
{
    return json_is_string(v) && strlen(json_string_value(v)) == json_string_length(v) && json_string_length(v) < TEXT_MAX;
}

/* Strings without NUL, finite numbers, no deep nesting. */
static bool clean(const json_t *v, int depth)
{
    const char *key;
    json_t *e;
    size_t i;
    if (depth > DEPTH_MAX) return false;
    if (json_is_string(v)) return clean_string(v);
    if (json_is_real(v)) return isfinite(json_real_value(v));
    json_array_foreach((json_t *)v, i, e) if (!clean(e, depth + 1)) return false;
    json_object_foreach((json_t *)v, key, e) if (!clean(e, depth + 1)) return false;
    return true;
}

static bool strings(const json_t *v)
{
    json_t *e;
    size_t i;
    if (!json_is_array(v) || !json_array_size(v)) return false;
    json_array_foreach((json_t *)v, i, e) if (!json_is_string(e) || !json_string_length(e)) return false;
    return true;
}

static ql_status check_names(const ql_setting *s, json_t *v)
{
    if (strings(v) || (json_is_string(v) && json_string_length(v))) return QL_OK;
    return wrong(s, "must be names such as [\"q_proj\", \"v_proj\"], or one word or regex", v);
}

/* Parts of paths: transformers would read a regex, which is said here instead of matching nothing. */
static ql_status check_skip(const ql_setting *s, json_t *v)
{
    const char *expected = "must be names such as [\"down_proj\", \"model.layers.0.mlp\"], without wildcards";
    json_t *e;
    size_t i;
    if (json_is_array(v) ? json_array_size(v) && !strings(v) : !json_is_string(v)) return wrong(s, expected, v);
    if (json_is_string(v)) return strpbrk(json_string_value(v), "*?+[](){}|\\^$") ? wrong(s, expected, v) : QL_OK;
    json_array_foreach(v, i, e) if (strpbrk(json_string_value(e), "*?+[](){}|\\^$")) return wrong(s, expected, v);
    return QL_OK;
}

static ql_status check_layers(const ql_setting *s, json_t *v)
{
    json_t *e;
    size_t i;
    bool ok = json_is_integer(v) ? json_integer_value(v) >= 0 : json_is_array(v) && json_array_size(v);
    if (json_is_array(v)) json_array_foreach(v, i, e) ok = ok && json_is_integer(e) && json_integer_value(e) >= 0;
    return ok ? QL_OK : wrong(s, "must be a layer's number or a list of them", v);
}

static ql_status check_pattern(const ql_setting *s, json_t *v)
{
    bool rank = strcmp(s->name, "rank_pattern") == 0;
    const char *key;
    json_t *e;
    bool ok = json_is_object(v);
    json_object_foreach(v, key, e) {
        ok = ok && *key && (rank ? json_is_integer(e) : json_is_number(e));
        ok = ok && json_number_value(e) >= (rank ? 1 : 1e-6) && json_number_value(e) <= (rank ? 1024 : 1e6);
    }
    return ok ? QL_OK : wrong(s, rank ? "must be an object of regex → rank (1 to 1024)" : "must be an object of regex → alpha (above 0)", v);
}

static ql_status check_init(const ql_setting *s, json_t *v)
{
    const char *t = json_string_value(v);
    if (json_is_boolean(v) || (t && strcmp(t, "gaussian") == 0)) return QL_OK;
    if (!t) return wrong(s, "must be true, false or \"gaussian\"", v);
    QL_FAIL(QL_ENOSUP, "init_lora_weights: '%.40s' is not supported; true, \"gaussian\" and false are", t);
}

static ql_status check_devices(const ql_setting *s, json_t *v)
{
    ql_devices d;
    (void)s;
    return ql_devices_parse(json_string_value(v), &d);
}

static ql_status check_store(const ql_setting *s, json_t *v)
{
    (void)s;
    return ql_store_parse(v, 0, NULL);
}

static ql_status check_memory(const ql_setting *s, json_t *v)
{
    int64_t n;
    json_t *e;
    size_t i;
    if (!json_is_array(v) || strcmp(s->name, "device_memory")) return ql_bytes_parse(v, s->name, &n);
    if (!json_array_size(v)) return wrong(s, "must be a size such as 15GiB, or a list of them", v);
    json_array_foreach(v, i, e) QL_TRY(ql_bytes_parse(e, s->name, &n));
    return QL_OK;
}

static ql_status check_fsdp(const ql_setting *s, json_t *v)
{
    ql_fsdp f;
    bool config = strcmp(s->name, "fsdp_config") == 0;
    return ql_fsdp_parse(config ? NULL : v, config ? v : NULL, &f, NULL);
}

static ql_status check_object(const ql_setting *s, json_t *v)
{
    return json_is_object(v) ? QL_OK : wrong(s, "must be an object such as {\"num_cycles\": 0.5}", v);
}

static ql_status check_files(const ql_setting *s, json_t *v)
{
    return strings(v) || (json_is_string(v) && json_string_length(v)) ? QL_OK : wrong(s, "must be a file's name or a list of them", v);
}

static ql_status check_resume(const ql_setting *s, json_t *v)
{
    return json_is_boolean(v) || (json_is_string(v) && json_string_length(v)) ? QL_OK
                                                                              : wrong(s, "must be a checkpoint's path, or true for the latest", v);
}

/* logging_steps, eval_steps, save_steps, warmup_steps: a part of all steps below 1, else whole. */
static ql_status check_steps(const ql_setting *s, json_t *v)
{
    double x = json_number_value(v);
    return x < 1 || x == floor(x) ? QL_OK : wrong(s, "must be a whole number of steps, or below 1 a part of all", v);
}

static ql_status check_max_steps(const ql_setting *s, json_t *v)
{
    return json_integer_value(v) ? QL_OK : wrong(s, "must be at least 1, or -1 to go by num_train_epochs", v);
}

static ql_status check_worlds(const ql_setting *s, json_t *v)
{
    int64_t n = json_integer_value(v);
    return n & (n - 1) ? wrong(s, "must be a power of two", v) : QL_OK;
}

static ql_status check_metric(const ql_setting *s, json_t *v)
{
    const char *m = json_string_value(v);
    (void)s;
    if (strcmp(m, "loss") == 0 || strcmp(m, "eval_loss") == 0) return QL_OK;
    QL_FAIL(QL_ENOSUP, "metric_for_best_model: '%.40s' is not computed; eval_loss is", m);
}

/* PEFT's records of task and method: others are other models than this engine trains. */
static ql_status check_only(const ql_setting *s, json_t *v)
{
    const char *only = strcmp(s->name, "task_type") == 0 ? "CAUSAL_LM" : "LORA", *given = json_string_value(v);
    if (strcmp(given, only) == 0) return QL_OK;
    QL_FAIL(QL_ENOSUP, "%s: '%.40s' is not supported; %s is", s->name, given, only);
}

static ql_status check_run_name(const ql_setting *s, json_t *v)
{
    const char *n = json_string_value(v);
    if (*n && *n != '.' && !strchr(n, '/') && strlen(n) < 200) return QL_OK;
    return wrong(s, "must be a folder's name: not empty, without '/', not starting with '.'", v);
}

static const struct {
    const char *name;
    ql_status (*check)(const ql_setting *s, json_t *v);
} checks[] = {
    {"target_modules", check_names},
    {"exclude_modules", check_names},
    {"layers_pattern", check_names},
    {"llm_int8_skip_modules", check_skip},
    {"layers_to_transform", check_layers},
    {"rank_pattern", check_pattern},
    {"alpha_pattern", check_pattern},
    {"init_lora_weights", check_init},
    {"devices", check_devices},
    {"store", check_store},
    {"device_memory", check_memory},
    {"host_memory", check_memory},
    {"fsdp", check_fsdp},
    {"fsdp_config", check_fsdp},
    {"lr_scheduler_kwargs", check_object},
    {"data_files", check_files},
    {"resume_from_checkpoint", check_resume},
    {"logging_steps", check_steps},
    {"eval_steps", check_steps},
    {"save_steps", check_steps},
    {"warmup_steps", check_steps},
    {"max_steps", check_max_steps},
    {"exact_worlds", check_worlds},
    {"metric_for_best_model", check_metric},
    {"task_type", check_only},
    {"peft_type", check_only},
    {"run_name", check_run_name},
};

/* Values that upstream knows and we do not honour. */
static const struct {
    const char *name, *value, *why;
} refusals[] = {
    {"bias", "all", "only adapters are trained, no bias"},
    {"bias", "lora_only", "only adapters are trained, no bias"},
    {"bnb_4bit_quant_type", "fp4", "16-bit weights are quantised to NF4; an FP4 file is read as it is without this setting"},
    {"reduce_dtype", "float16", "gradients are added up in float32 only, so that every world size gives the same bits"},
    {"reduce_dtype", "bfloat16", "gradients are added up in float32 only, so that every world size gives the same bits"},
    {"packing_strategy", "bfd_split", "long samples are cut (bfd), or everything is one stream (wrapped)"},
    {"loss_type", "dft", "only the negative log likelihood is computed"},
    {"train_sampling_strategy", "group_by_length", "the order is the seed's alone; packing avoids padding"},
};

/* ---- from the given value to the stored one -------------------------------------------------------- */

static ql_status ranged(const ql_setting *s, const json_t *v)
{
    char expected[128];
    double x = json_number_value(v);
    const char *kind = s->type == QL_SET_INT ? "a whole number" : "a number";
    if (json_is_number(v) && x >= s->min && x <= s->max) return QL_OK; /* NaN fails */
    if (isinf(s->min) && isinf(s->max)) snprintf(expected, sizeof expected, "must be %s", kind);
    else if (isinf(s->max)) snprintf(expected, sizeof expected, "must be %s of at least %.10g", kind, s->min);
    else snprintf(expected, sizeof expected, "must be %s from %.10g to %.12g", kind, s->min, s->max);
    return wrong(s, expected, v);
}

static ql_status norm_int(const ql_setting *s, json_t *v, json_t **out)
{
    double x = json_number_value(v);
    if (json_is_real(v) && x == floor(x) && fabs(x) < 9e15) {
        json_t *whole = json_integer((json_int_t)x);
        ql_status st = whole ? ranged(s, whole) : ql_fail(QL_ENOMEM, "job: out of memory");
        if (st != QL_OK) json_decref(whole);
        else *out = whole;
        return st;
    }
    if (json_is_real(v)) return wrong(s, "must be a whole number", v);
    QL_TRY(ranged(s, v));
    *out = json_incref(v);
    return QL_OK;
}

static ql_status norm_number(const ql_setting *s, json_t *v, json_t **out)
{
    QL_TRY(ranged(s, v));
    *out = json_incref(v);
    return QL_OK;
}

/* Why this value is refused; NULL. */
static const char *refusal(const ql_setting *s, const char *value)
{
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++)
        if (strcmp(s->name, refusals[i].name) == 0 && strcmp(value, refusals[i].value) == 0) return refusals[i].why;
    return NULL;
}

/* Position of word in "a|b|c", -1. Case does not matter. */
static bool among(const char *list, const char *word)
{
    size_t n = strlen(word);
    for (const char *p = list; n;) {
        size_t len = strcspn(p, "|");
        if (len == n && strncasecmp(p, word, n) == 0) return true;
        if (!p[len]) break;
        p += len + 1;
    }
    return false;
}

/* The spelling of the table for what people write. */
static const char *spelling(const ql_setting *s, const json_t *v)
{
    static const char *const same[][2] = {{"fp16", "float16"},  {"half", "float16"},  {"bf16", "bfloat16"}, {"fp32", "float32"},
                                          {"float", "float32"}, {"none", "no"},       {"off", "no"},        {"no", "off"},
                                          {"none", "off"},      {"false", "off"},     {"false", "no"},      {"true", "recompute_ahead"}};
    const char *w = json_is_boolean(v) ? (json_is_true(v) ? "true" : "false") : json_string_value(v);
    if (!w) return NULL;
    if (strncmp(w, "torch.", 6) == 0) w += 6;
    if (among(s->choices, w)) return w;
    for (size_t i = 0; i < sizeof same / sizeof *same; i++)
        if (strcasecmp(w, same[i][0]) == 0 && among(s->choices, same[i][1])) return same[i][1];
    return NULL;
}

static ql_status wrong_choice(const ql_setting *s, const json_t *v)
{
    char list[512], expected[640], near[160] = "";
    const char *words[32];
    int n = 0;
    char *save = NULL;
    snprintf(list, sizeof list, "%s", s->choices);
    for (char *w = strtok_r(list, "|", &save); w && n < 32; w = strtok_r(NULL, "|", &save))
        if (!refusal(s, w)) words[n++] = w; /* nobody is sent to what is refused */
    if (json_is_string(v)) ql_nearest(json_string_value(v), words, n, near, sizeof near);
    snprintf(expected, sizeof expected, "%s%smust be one of ", near, *near ? " It " : "");
    for (int i = 0; i < n; i++) {
        size_t at = strlen(expected);
        snprintf(expected + at, sizeof expected - at, "%s%s", i ? ", " : "", words[i]);
    }
    return wrong(s, expected, v);
}

static ql_status norm_choice(const ql_setting *s, json_t *v, json_t **out)
{
    char word[64];
    const char *w = spelling(s, v);
    if (!w || strlen(w) >= sizeof word) return wrong_choice(s, v);
    for (size_t i = 0; i <= strlen(w); i++) word[i] = (char)tolower((unsigned char)w[i]);
    if (refusal(s, word)) QL_FAIL(QL_ENOSUP, "%s: '%s' is not supported: %s", s->name, word, refusal(s, word));
    if (strcmp(word, "true") == 0) *out = json_true();
    else if (strcmp(word, "false") == 0) *out = json_false();
    else *out = json_string(word);
    return *out ? QL_OK : ql_fail(QL_ENOMEM, "job: out of memory");
}

static ql_status normalise(const ql_setting *s, json_t *v, json_t **out)
{
    if (!clean(v, 0)) QL_FAIL(QL_EINVAL, "%s: strings with NUL or over 1 MiB, numbers that are not finite, and lists nested deeper than %d are refused", s->name, DEPTH_MAX);
    switch (s->type) {
    case QL_SET_BOOL:
        if (!json_is_boolean(v)) return wrong(s, "must be true or false", v);
        break;
    case QL_SET_INT: return norm_int(s, v, out);
    case QL_SET_FLOAT: return norm_number(s, v, out);
    case QL_SET_STR:
        if (!json_is_string(v)) return wrong(s, "must be text", v);
        break;
    case QL_SET_CHOICE: return norm_choice(s, v, out);
    case QL_SET_JSON: break;
    }
    *out = json_incref(v);
    return QL_OK;
}

/* Where upstream has two forms of a value, the one that is stored; *file owns what was read for it. */
static ql_status one_form(const ql_setting *s, json_t *given, json_t **out, json_t **file)
{
    *out = given;
    /* transformers 5 spells this one no|all|non_padding */
    if (strcmp(s->name, "include_num_input_tokens_seen") == 0 && json_is_string(given))
        *out = strcmp(json_string_value(given), "no") ? json_true() : json_false();
    /* transformers takes a file's name for this one; the job has what was in it. */
    if (strcmp(s->name, "fsdp_config") != 0 || !clean_string(given)) return QL_OK;
    QL_TRY(ql_json_load(json_string_value(given), 1 << 20, file));
    *out = *file;
    return QL_OK;
}

ql_status ql_setting_read(const ql_setting *s, json_t *given, json_t **out)
{
    json_t *v = NULL, *file = NULL;
    ql_status st = QL_OK;
    QL_GO(one_form(s, given, &given, &file));
    QL_GO(normalise(s, given, &v));
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++)
        if (strcmp(checks[i].name, s->name) == 0) QL_GO(checks[i].check(s, v));
    *out = v;
    v = NULL;
out:
    json_decref(v);
    json_decref(file);
    return st;
}

/* ---- from text ------------------------------------------------------------------------------------ */

/* Names or numbers between commas; one identifier is a list of one where lists are usual. NULL: it is none. */
static json_t *text_list(const char *text)
{
    json_t *list = json_array();
    while (list && *text) {
        size_t n = strcspn(text, ","), a = 0, b = n;
        bool number = true;
        while (a < b && text[a] == ' ') a++;
        while (b > a && text[b - 1] == ' ') b--;
        for (size_t i = a; i < b; i++) {
            if (!isalnum((unsigned char)text[i]) && !strchr("_./-", text[i])) b = a; /* a regex */
            number = number && isdigit((unsigned char)text[i]) && b - a < 10;
        }
        if (a == b || json_array_append_new(list, number ? json_integer(strtol(text + a, NULL, 10)) : json_stringn(text + a, b - a))) {
            json_decref(list);
            return NULL;
        }
        text += n + (text[n] == ',');
    }
    return list;
}

/* ['q_proj', 'v_proj'] as Python has it, or [q_proj, v_proj] as YAML does. NULL: neither. */
static json_t *text_bracketed(const char *text)
{
    size_t n = strlen(text);
    char *inside = n > 2 && text[n - 1] == ']' ? strndup(text + 1, n - 2) : NULL;
    for (char *p = inside; p && *p; p++)
        if (*p == '\'' || *p == '"') *p = ' ';
    json_t *v = inside ? text_list(inside) : NULL;
    free(inside);
    return v;
}

static json_t *text_json(const ql_setting *s, const char *text)
{
    static const char *const lists[] = {"target_modules", "exclude_modules", "layers_pattern", "layers_to_transform", "llm_int8_skip_modules",
                                        "data_files", "device_memory"};
    bool list = false, one = strcmp(s->name, "data_files") == 0 || strcmp(s->name, "device_memory") == 0; /* one alone is no list */
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) list |= strcmp(s->name, lists[i]) == 0;
    if (among("true|yes|on", text)) return json_true();
    if (among("false|no|off", text)) return json_false();
    if (*text == '{' || *text == '[' || *text == '"') {
        json_t *v = json_loads(text, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, NULL);
        return v || !list || *text != '[' ? v : text_bracketed(text);
    }
    if (list && *text && strcmp(text, "all-linear") && (!one || strchr(text, ','))) {
        json_t *v = text_list(text);
        if (v) return v;
    }
    return json_string(text);
}

static json_t *text_number(const char *text)
{
    char *end;
    double x;
    if (!isdigit((unsigned char)*text) && !strchr("+-.", *text)) return NULL; /* no inf, nan */
    if (strpbrk(text, "xXpP")) return NULL;
    errno = 0;
    if (!strpbrk(text, ".eE")) {
        long long i = strtoll(text, &end, 10);
        return errno || end == text || *end ? NULL : json_integer(i);
    }
    x = strtod(text, &end);
    return end == text || *end ? NULL : json_real(x); /* NULL for infinities too */
}

ql_status ql_setting_parse(const ql_setting *s, const char *text, json_t **out)
{
    json_t *v = NULL;
    if (strlen(text) >= TEXT_MAX) QL_FAIL(QL_EINVAL, "%s: text over 1 MiB", s->name);
    switch (s->type) {
    case QL_SET_BOOL:
        v = among("true|yes|on|1", text) ? json_true() : among("false|no|off|0", text) ? json_false() : NULL;
        break;
    case QL_SET_INT:
    case QL_SET_FLOAT: v = text_number(text); break;
    case QL_SET_STR:
    case QL_SET_CHOICE: v = json_string(text); break;
    case QL_SET_JSON: v = text_json(s, text); break;
    }
    if (!v) {
        static const char *const kinds[] = {"true or false", "a whole number", "a number", "text in UTF-8", "text in UTF-8", "valid JSON"};
        QL_FAIL(QL_EINVAL, "%s: must be %s, found '%.60s'", s->name, kinds[s->type], text);
    }
    *out = v;
    return QL_OK;
}
