#include "core/lora_job.h"

#include "core/job.h"
#include "core/json.h"

#include <string.h>

/* Settings that an adapter's weights are made for. */
static const char *const kept[] = {"r",            "lora_alpha",    "target_modules",      "exclude_modules", "use_rslora",
                                   "rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern"};

static bool holds(const json_t *list, const json_t *v)
{
    size_t i;
    json_t *e;
    json_array_foreach((json_t *)(uintptr_t)list, i, e) if (json_equal(e, v)) return true;
    return false;
}

/* Equal; lists as sets. */
static bool same(const json_t *a, const json_t *b)
{
    size_t i;
    json_t *e;
    if (!json_is_array(a) || !json_is_array(b)) return json_equal(a, b);
    json_array_foreach((json_t *)(uintptr_t)a, i, e) if (!holds(b, e)) return false;
    json_array_foreach((json_t *)(uintptr_t)b, i, e) if (!holds(a, e)) return false;
    return true;
}

/* Both as adapter_config.json spells them: all-linear is the list of names, 16.0 is 16. */
static ql_status check_given(const ql_job *job, const ql_lora_config *given, const ql_lora_config *file, const char *folder)
{
    json_t *a = ql_lora_config_json(given), *b = ql_lora_config_json(file);
    ql_status st = a && b ? QL_OK : ql_fail(QL_ENOMEM, "no memory for the LoRA settings");
    for (size_t i = 0; st == QL_OK && i < sizeof kept / sizeof *kept; i++) {
        const json_t *x = json_object_get(a, kept[i]), *y = json_object_get(b, kept[i]);
        char text[128];
        if (!ql_job_is_set(job, kept[i]) || same(x, y)) continue;
        snprintf(text, sizeof text, "%.120s", ql_json_show(x));
        st = ql_fail(QL_EINVAL, "%s is %s in the job and %s in %s, the adapter that the run starts from: leave %s out, or the adapter", kept[i], text,
                     ql_json_show(y), folder, kept[i]);
    }
    json_decref(a);
    json_decref(b);
    return st;
}

ql_status ql_lora_of_job(const ql_job *job, const char *folder, const ql_config *m, ql_lora **out)
{
    const char *adapter = ql_job_str(job, "adapter");
    ql_lora_config given = {0};
    ql_lora *l = NULL;
    ql_status st;
    json_t *o = ql_job_group(job, "lora");
    if (!o) QL_FAIL(QL_ENOMEM, "no memory for the LoRA settings");
    st = ql_lora_config_parse(o, "config", &given);
    json_decref(o);
    QL_TRY(st);
    if (!adapter) return ql_lora_build(m, &given, out);
    if (!folder) folder = adapter;
    st = ql_lora_open(folder, m, &l);
    if (st != QL_OK) {
        ql_error_prefix("adapter %s: ", folder);
        goto out;
    }
    QL_GO(check_given(job, &given, &l->cfg, folder));
    if (ql_job_is_set(job, "lora_dropout")) l->cfg.dropout = given.dropout;
    *out = l;
    l = NULL;
out:
    ql_lora_config_free(&given);
    ql_lora_close(l);
    return st;
}

ql_status ql_lora_first(const ql_lora *l, const ql_job *job, float *flat)
{
    const char *adapter = ql_job_str(job, "adapter");
    if (!adapter) {
        ql_lora_init(l, (uint64_t)ql_job_int(job, "seed"), flat);
        return QL_OK;
    }
    ql_status st = ql_lora_read(l, adapter, flat);
    if (st != QL_OK) ql_error_prefix("adapter %s: ", adapter);
    return st;
}
