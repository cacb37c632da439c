/* PEFT's LoraConfig: read, checked, written. */
#include "core/json.h"
#include "core/lora.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

static const int64_t RANK_MAX = 65536;
static const size_t LIST_MAX = 100000;

typedef struct {
    const json_t *o;
    const char *what;
    ql_lora_config *c;
} reader;

static bool empty(const json_t *v)
{
    if (!v || json_is_null(v) || json_is_false(v)) return true;
    if (json_is_array(v)) return json_array_size(v) == 0;
    if (json_is_object(v)) return json_object_size(v) == 0;
    return json_is_string(v) && json_string_length(v) == 0;
}

static char *copy(const json_t *v)
{
    return strdup(json_string_value(v));
}

static bool starts(const char *s, const char *with)
{
    return strncmp(s, with, strlen(with)) == 0;
}

static bool ends(const char *s, const char *with)
{
    size_t n = strlen(s), k = strlen(with);
    return n >= k && strcmp(s + n - k, with) == 0;
}

/* What changes the adapter's maths and is not done here, by name. */
static ql_status refuse_others(reader *r)
{
    static const char *const extra[] = {"modules_to_save",         "lora_bias",
                                        "fan_in_fan_out",          "layer_replication",
                                        "trainable_token_indices", "target_parameters",
                                        "alora_invocation_tokens"};
    const char *key, *s = "LORA";
    json_t *v;
    QL_TRY(ql_json_opt_str(r->o, r->what, "peft_type", &s));
    if (strcmp(s, "LORA") != 0)
        QL_FAIL(QL_ENOSUP, "%s: peft_type '%.60s' is not supported; supported: LORA", r->what, s);
    s = "CAUSAL_LM";
    QL_TRY(ql_json_opt_str(r->o, r->what, "task_type", &s));
    if (strcmp(s, "CAUSAL_LM") != 0)
        QL_FAIL(QL_ENOSUP, "%s: task_type '%.60s' is not supported; supported: CAUSAL_LM", r->what,
                s);
    s = "none";
    QL_TRY(ql_json_opt_str(r->o, r->what, "bias", &s));
    if (strcmp(s, "none") != 0)
        QL_FAIL(QL_ENOSUP, "%s: bias '%.60s' is not supported; supported: none", r->what, s);
    json_object_foreach((json_t *)r->o, key, v)
    {
        if (empty(v) || strcmp(key, "use_rslora") == 0 || strcmp(key, "runtime_config") == 0)
            continue;
        bool bad = starts(key, "use_") || ends(key, "_config");
        for (size_t i = 0; i < sizeof extra / sizeof *extra; i++) bad |= strcmp(key, extra[i]) == 0;
        if (bad)
            QL_FAIL(QL_ENOSUP,
                    "%s: '%.60s' (%s) is not supported; supported: plain LoRA on linears, with "
                    "use_rslora, rank_pattern and alpha_pattern",
                    r->what, key, ql_json_show(v));
    }
    return QL_OK;
}

static ql_status read_names(const json_t *list, const char *what, const char *key, char ***names,
                            int *count)
{
    size_t n = json_array_size(list);
    if (n > LIST_MAX) QL_FAIL(QL_EINVAL, "%s: '%s' has %zu entries", what, key, n);
    *names = calloc(n + 1, sizeof **names);
    if (!*names) QL_FAIL(QL_ENOMEM, "no memory for %s", key);
    for (size_t i = 0; i < n; i++) {
        const json_t *v = json_array_get(list, i);
        if (!json_is_string(v) || json_string_length(v) == 0)
            QL_FAIL(QL_EINVAL, "%s: '%s' has %s, which is not a name", what, key, ql_json_show(v));
        (*names)[i] = copy(v);
        if (!(*names)[i]) QL_FAIL(QL_ENOMEM, "no memory for %s", key);
        (*count)++;
    }
    return QL_OK;
}

static ql_status read_modules(reader *r, const char *key, ql_module_set *set)
{
    const json_t *v = json_object_get(r->o, key);
    if (!v || json_is_null(v)) return QL_OK;
    if (json_is_array(v)) return read_names(v, r->what, key, &set->names, &set->count);
    if (!json_is_string(v) || json_string_length(v) == 0)
        QL_FAIL(QL_EINVAL, "%s: '%s' must be a list of names or a string, found %s", r->what, key,
                ql_json_show(v));
    if (set == &r->c->target && strcasecmp(json_string_value(v), "all-linear") == 0) {
        set->all_linear = true;
        return QL_OK;
    }
    set->regex = copy(v);
    if (!set->regex) QL_FAIL(QL_ENOMEM, "no memory for %s", key);
    return QL_OK;
}

static ql_status read_init(reader *r)
{
    const json_t *v = json_object_get(r->o, "init_lora_weights");
    const char *s = json_string_value(v);
    r->c->init = QL_INIT_KAIMING;
    if (!v || json_is_null(v) || json_is_true(v)) return QL_OK;
    if (json_is_false(v))
        r->c->init = QL_INIT_RANDOM;
    else if (s && strcasecmp(s, "gaussian") == 0)
        r->c->init = QL_INIT_GAUSSIAN;
    else
        QL_FAIL(QL_ENOSUP,
                "%s: init_lora_weights %s is not supported; supported: true, false, \"gaussian\"",
                r->what, ql_json_show(v));
    return QL_OK;
}

static ql_status read_layers(reader *r)
{
    ql_lora_config *c = r->c;
    const json_t *v = json_object_get(r->o, "layers_to_transform");
    const json_t *p = json_object_get(r->o, "layers_pattern");
    size_t n = json_is_array(v) ? json_array_size(v) : 1;
    if (!empty(p) && empty(v) && !json_is_integer(v))
        QL_FAIL(QL_EINVAL, "%s: layers_pattern needs layers_to_transform", r->what);
    if (!v || json_is_null(v) || n == 0) return QL_OK;
    if (c->target.regex)
        QL_FAIL(QL_EINVAL, "%s: layers_to_transform needs target_modules as a list of names, or all-linear",
                r->what);
    if (n > LIST_MAX) QL_FAIL(QL_EINVAL, "%s: layers_to_transform has %zu entries", r->what, n);
    c->layers = calloc(n, sizeof *c->layers);
    if (!c->layers) QL_FAIL(QL_ENOMEM, "no memory for layers_to_transform");
    for (size_t i = 0; i < n; i++) {
        const json_t *x = json_is_array(v) ? json_array_get(v, i) : v;
        if (!json_is_integer(x) || json_integer_value(x) < 0)
            QL_FAIL(QL_EINVAL, "%s: layers_to_transform has %s, which is not a layer", r->what,
                    ql_json_show(x));
        c->layers[c->layer_count++] = json_integer_value(x);
    }
    if (empty(p)) return QL_OK;
    if (json_is_array(p))
        return read_names(p, r->what, "layers_pattern", &c->layer_patterns,
                          &c->layer_pattern_count);
    if (!json_is_string(p))
        QL_FAIL(QL_EINVAL, "%s: layers_pattern must be a string or a list, found %s", r->what,
                ql_json_show(p));
    c->layer_patterns = calloc(1, sizeof *c->layer_patterns);
    if (c->layer_patterns) c->layer_patterns[0] = copy(p);
    if (!c->layer_patterns || !c->layer_patterns[0])
        QL_FAIL(QL_ENOMEM, "no memory for layers_pattern");
    c->layer_pattern_count = 1;
    return QL_OK;
}

typedef enum { PATTERN_RANK, PATTERN_ALPHA } pattern_kind;

static ql_status read_patterns(reader *r, pattern_kind kind, ql_pattern **out, int *count)
{
    const char *name = kind == PATTERN_RANK ? "rank_pattern" : "alpha_pattern", *key;
    json_t *o = json_object_get(r->o, name), *v;
    if (empty(o)) return QL_OK;
    if (!json_is_object(o) || json_object_size(o) > LIST_MAX)
        QL_FAIL(QL_EINVAL, "%s: '%s' must be an object, found %s", r->what, name, ql_json_show(o));
    *out = calloc(json_object_size(o), sizeof **out);
    if (!*out) QL_FAIL(QL_ENOMEM, "no memory for %s", name);
    json_object_foreach(o, key, v)
    {
        ql_pattern *p = &(*out)[*count];
        double x = json_number_value(v);
        bool fine = kind == PATTERN_RANK ? json_is_integer(v) && x >= 1 && x <= (double)RANK_MAX
                                         : json_is_number(v) && x >= 1e-6 && x <= 1e6;
        if (!fine)
            QL_FAIL(QL_EINVAL, "%s: '%s': '%.60s' must be %s, found %s", r->what, name, key,
                    kind == PATTERN_RANK ? "an integer from 1 to 65536"
                                         : "a number from 1e-06 to 1e+06",
                    ql_json_show(v));
        p->key = strdup(key);
        p->value = x;
        if (!p->key) QL_FAIL(QL_ENOMEM, "no memory for %s", name);
        (*count)++;
    }
    return QL_OK;
}

/* PEFT's own choice where target_modules is absent, the same for the four families. */
static ql_status default_targets(ql_lora_config *c)
{
    c->target.names = calloc(2, sizeof *c->target.names);
    if (!c->target.names) QL_FAIL(QL_ENOMEM, "no memory for target_modules");
    c->target.names[c->target.count++] = strdup("q_proj");
    c->target.names[c->target.count++] = strdup("v_proj");
    if (!c->target.names[0] || !c->target.names[1])
        QL_FAIL(QL_ENOMEM, "no memory for target_modules");
    return QL_OK;
}

static ql_status read_all(reader *r)
{
    ql_lora_config *c = r->c;
    const char *base = NULL;
    c->r = 8, c->alpha = 8.0, c->dropout = 0.0;
    QL_TRY(refuse_others(r));
    QL_TRY(ql_json_opt_int(r->o, r->what, "r", 1, RANK_MAX, &c->r));
    QL_TRY(ql_json_opt_num(r->o, r->what, "lora_alpha", 1e-6, 1e6, &c->alpha));
    QL_TRY(ql_json_opt_num(r->o, r->what, "lora_dropout", 0.0, 0.999, &c->dropout));
    QL_TRY(ql_json_opt_bool(r->o, r->what, "use_rslora", &c->rslora));
    QL_TRY(read_init(r));
    QL_TRY(read_modules(r, "target_modules", &c->target));
    QL_TRY(read_modules(r, "exclude_modules", &c->exclude));
    if (!c->target.names && !c->target.regex && !c->target.all_linear) QL_TRY(default_targets(c));
    QL_TRY(read_layers(r));
    QL_TRY(read_patterns(r, PATTERN_RANK, &c->ranks, &c->rank_count));
    QL_TRY(read_patterns(r, PATTERN_ALPHA, &c->alphas, &c->alpha_count));
    QL_TRY(ql_json_opt_str(r->o, r->what, "base_model_name_or_path", &base));
    if (base && !(c->base = strdup(base))) QL_FAIL(QL_ENOMEM, "no memory for a name");
    return QL_OK;
}

ql_status ql_lora_config_parse(const json_t *o, const char *what, ql_lora_config *out)
{
    ql_lora_config c = {0};
    reader r = {o, what, &c};
    ql_status st = read_all(&r);
    if (st == QL_OK)
        *out = c;
    else
        ql_lora_config_free(&c);
    return st;
}

static void free_names(char **names, int n)
{
    for (int i = 0; i < n; i++) free(names[i]);
    free(names);
}

void ql_lora_config_free(ql_lora_config *c)
{
    if (!c) return;
    free_names(c->target.names, c->target.count);
    free_names(c->exclude.names, c->exclude.count);
    free_names(c->layer_patterns, c->layer_pattern_count);
    free(c->target.regex);
    free(c->exclude.regex);
    free(c->layers);
    for (int i = 0; i < c->rank_count; i++) free(c->ranks[i].key);
    for (int i = 0; i < c->alpha_count; i++) free(c->alphas[i].key);
    free(c->ranks);
    free(c->alphas);
    free(c->base);
    memset(c, 0, sizeof *c);
}

/* Whole numbers as integers: PEFT declares r and lora_alpha as int. */
static json_t *number(double x)
{
    return x == (double)(int64_t)x ? json_integer((json_int_t)x) : json_real(x);
}

static json_t *names_json(char **names, int n)
{
    json_t *a = json_array();
    for (int i = 0; i < n; i++) (void)json_array_append_new(a, json_string(names[i]));
    return a;
}

static json_t *set_json(const ql_module_set *s)
{
    if (s->regex) return json_string(s->regex);
    return s->names ? names_json(s->names, s->count) : json_null();
}

static json_t *all_linear_json(void)
{
    json_t *a = json_array();
    for (int w = 0; w < QL_LINEARS; w++)
        (void)json_array_append_new(a, json_string(ql_linear_name((ql_linear)w)));
    return a;
}

static json_t *patterns_json(const ql_pattern *p, int n)
{
    json_t *o = json_object();
    for (int i = 0; i < n; i++) (void)json_object_set_new(o, p[i].key, number(p[i].value));
    return o;
}

json_t *ql_lora_config_json(const ql_lora_config *c)
{
    static const char *const nulls[] = {"revision",          "auto_mapping",
                                        "layer_replication", "modules_to_save",
                                        "megatron_config",   "trainable_token_indices"};
    json_t *layers = json_null();
    if (c->layers) {
        layers = json_array();
        for (int i = 0; i < c->layer_count; i++)
            (void)json_array_append_new(layers, json_integer(c->layers[i]));
    }
    json_t *init = c->init == QL_INIT_GAUSSIAN ? json_string("gaussian")
                                               : json_boolean(c->init == QL_INIT_KAIMING);
    json_t *o = json_pack("{s:s, s:s, s:b, s:I, s:o, s:f, s:s, s:b, s:o, s:b, s:b, s:b, s:{}, s:s}",
                          "peft_type", "LORA", "task_type", "CAUSAL_LM", "inference_mode", 1, "r",
                          (json_int_t)c->r, "lora_alpha", number(c->alpha), "lora_dropout",
                          c->dropout, "bias", "none", "fan_in_fan_out", 0, "init_lora_weights",
                          init, "use_rslora", (int)c->rslora, "use_dora", 0, "lora_bias", 0,
                          "loftq_config", "megatron_core", "megatron.core");
    for (size_t i = 0; i < sizeof nulls / sizeof *nulls; i++)
        (void)json_object_set_new(o, nulls[i], json_null());
    (void)json_object_set_new(o, "base_model_name_or_path",
                              c->base ? json_string(c->base) : json_null());
    (void)json_object_set_new(o, "target_modules",
                              c->target.all_linear ? all_linear_json() : set_json(&c->target));
    (void)json_object_set_new(o, "exclude_modules", set_json(&c->exclude));
    (void)json_object_set_new(o, "layers_to_transform", layers);
    (void)json_object_set_new(
        o, "layers_pattern",
        c->layer_patterns ? names_json(c->layer_patterns, c->layer_pattern_count) : json_null());
    (void)json_object_set_new(o, "rank_pattern", patterns_json(c->ranks, c->rank_count));
    (void)json_object_set_new(o, "alpha_pattern", patterns_json(c->alphas, c->alpha_count));
    return o;
}
