#include "magics/verbs.h"

#include "magics/session.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the table ---------------------------------------------------------------------------------
 */

static const ql_option bench_options[] = {
    {"seconds", QL_ARG_INT, "60", NULL, "how long the matmul runs while clocks and watts are read"},
    {0}};
static const ql_option config_options[] = {
    {"all", QL_ARG_FLAG, NULL, NULL, "every setting, not only what was changed"},
    {"save", QL_ARG_PATH, NULL, NULL, "write the settings to a file"},
    {"load", QL_ARG_PATH, NULL, NULL, "read the settings of such a file"},
    {"reset", QL_ARG_FLAG, NULL, NULL, "back to the defaults first; model and data stay"},
    {0}};
static const ql_option data_options[] = {
    {"show", QL_ARG_INT, "1", NULL, "how many rendered samples are shown, trained parts marked"},
    {0}};
static const ql_option plan_options[] = {
    {"on", QL_ARG_TEXT, NULL, NULL, "devices one does not have: 2xT4, 8xA100-80, 2x15GiB"},
    {"actions", QL_ARG_FLAG, NULL, NULL, "also an optimizer step as each rank runs it, action by action"},
    {0}};
static const ql_option train_options[] = {
    {"every", QL_ARG_INT, NULL, NULL, "where only stdout is kept: one line every N steps"}, {0}};
static const ql_option generate_options[] = {
    {"run", QL_ARG_RUN, NULL, NULL, "whose adapter; default: the last run's, else --adapter's; none: the base model"},
    {"max_new_tokens", QL_ARG_INT, "64", NULL, "longest answer"},
    {"temperature", QL_ARG_FLOAT, "0", NULL, "0 takes the likeliest token"},
    {"top_p", QL_ARG_FLOAT, "1", NULL, "smallest set of tokens that holds this probability"},
    {"top_k", QL_ARG_INT, "0", NULL, "only the k likeliest tokens; 0: all"},
    {"repetition_penalty", QL_ARG_FLOAT, "1", NULL,
     "over 1: what prompt and answer have already is less likely (1.1 is mild)"},
    {"seed", QL_ARG_INT, "0", NULL, "of the sampling"},
    {"system", QL_ARG_TEXT, NULL, NULL, "a system message; makes the prompt a chat"},
    {"chat", QL_ARG_FLAG, NULL, NULL, "wrap the prompt in the model's chat template"},
    {"compare", QL_ARG_FLAG, NULL, NULL, "also without the adapter, side by side"},
    {0}};
static const ql_option plot_options[] = {
    {"metric", QL_ARG_CHOICE, "loss", "loss|grad_norm|learning_rate|tokens_per_second|memory",
     "what is drawn"},
    {"diff", QL_ARG_FLAG, NULL, NULL, "a panel below: each run minus the first (two runs: always)"},
    {"save", QL_ARG_PATH, NULL, NULL,
     "also write the picture: .svg, or .png where matplotlib is there"},
    {0}};
static const ql_option baseline_options[] = {
    {"steps", QL_ARG_INT, "20", NULL, "how many steps of the same schedule"}, {0}};
static const ql_option save_options[] = {
    {"run", QL_ARG_RUN, NULL, NULL, "whose adapter; default: the last run's"},
    {"push_to_hub", QL_ARG_TEXT, NULL, NULL, "also upload it to this repository, which is made where it is missing"},
    {"private", QL_ARG_FLAG, NULL, NULL, "a repository that is made is private"},
    {0}};

static const ql_option merge_options[] = {
    {"run", QL_ARG_RUN, NULL, NULL, "whose adapter; default: the last run's"},
    {"original", QL_ARG_MODEL, NULL, NULL, "the 16-bit model that the 4-bit base was made from"},
    {"dtype", QL_ARG_CHOICE, "auto", "auto|float16|bfloat16", "of the result; auto: the model's own"},
    {"push_to_hub", QL_ARG_TEXT, NULL, NULL, "also upload it to this repository, which is made where it is missing"},
    {"private", QL_ARG_FLAG, NULL, NULL, "a repository that is made is private"},
    {0}};

static const ql_verb table[] = {
    {"info", "", QL_ARG_NONE, 0, 0, QL_BODY_NONE, QL_TAKES_NONE, NULL, ql_verb_info,
     "devices, links, memory, disk, libraries; what is missing and how to get it", NULL,
     "%qlora info"},
    {"bench", "", QL_ARG_NONE, 0, 0, QL_BODY_NONE, QL_TAKES_NONE, bench_options, ql_verb_bench,
     "measure copy, matmul, links and the NF4 kernel on this machine",
     "Beside bitsandbytes, where this notebook's Python has it. Ends in a block that can be pasted into a report.",
     "%qlora bench --seconds 10"},
    {"load", "MODEL", QL_ARG_MODEL, 1, 1, QL_BODY_NONE, QL_TAKES_KEPT, NULL, ql_verb_load,
     "choose the model: a folder, a name on the hub, or `tiny`",
     "Reads configuration and headers only. Weights go to the devices at the first train, eval or "
     "generate, so plan comes before a byte is loaded. `tiny` is the bundled one; a folder of that name here is "
     "./tiny. Another model forgets an --adapter that was set for the one before.",
     "%qlora load tiny\n%qlora load unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit"},
    {"config", "", QL_ARG_NONE, 0, 0, QL_BODY_SETTINGS, QL_TAKES_KEPT, config_options,
     ql_verb_config, "set and show settings; transformers', TRL's and PEFT's own names",
     "Sets what is given and keeps the rest. The cell form takes `key: value` lines or JSON.",
     "%qlora config --fsdp true --max_steps 60\n\n%%qlora config\nr: 64\nlora_alpha: 128\n\n%qlora "
     "config --save my.json"},
    {"data", "[DATA]", QL_ARG_DATA, 0, 1, QL_BODY_NONE, QL_TAKES_KEPT, data_options, ql_verb_data,
     "choose the data: a file, a folder, a hub name or a variable of the notebook",
     "Shows how many rows and tokens are trained on and what was left out. A list of dicts, a "
     "DataFrame or a "
     "datasets.Dataset is written to JSON lines once.",
     "%qlora data train.jsonl --show 2\n%qlora data ds"},
    {"plan", "", QL_ARG_NONE, 0, 0, QL_BODY_NONE, QL_TAKES_ONCE, plan_options, ql_verb_plan,
     "what will rest where, byte for byte, and what else would fit",
     "Needs no device memory and loads nothing. Settings given here are only tried.",
     "%qlora plan\n%qlora plan --on 2xT4 --max_length 4096\n%qlora plan --actions"},
    {"train", "", QL_ARG_NONE, 0, 0, QL_BODY_NONE, QL_TAKES_ONCE, train_options, ql_verb_train,
     "train fresh adapters from the seed, live",
     "Every train is a new run (run-1, run-2 …) under runs/. Settings given here hold for this "
     "run. Stop saves a "
     "checkpoint; resume goes on. --adapter starts from a run's weights, or those of a PEFT folder, with "
     "a fresh optimizer.",
     "%qlora train\nr = %qlora train --max_steps 200 --learning_rate 1e-4\n%qlora train --adapter run-1"},
    {"resume", "[RUN]", QL_ARG_RUN, 0, 1, QL_BODY_NONE, QL_TAKES_ONCE, train_options,
     ql_verb_resume, "go on with a stopped run from its last checkpoint",
     "RUN is a run's name, a variable that holds one, or a checkpoint folder; default: the last run.",
     "%qlora resume\n%qlora resume run-2"},
    {"eval", "[RUN]", QL_ARG_RUN, 0, 1, QL_BODY_NONE, QL_TAKES_ONCE, NULL, ql_verb_eval,
     "loss on the evaluation data",
     "RUN: whose adapter; default: the last run's, else --adapter's; none: the base model.",
     "%qlora eval\n%qlora eval run-1"},
    {"generate", "[PROMPT …]", QL_ARG_TEXT, 0, -1, QL_BODY_TEXT, QL_TAKES_NONE, generate_options,
     ql_verb_generate, "text from the weights being trained",
     "The cell form takes its body as one prompt.",
     "%qlora generate \"The capital of France is\" --compare\n\n%%qlora generate --max_new_tokens "
     "200\nWrite a poem."},
    {"plot", "[RUN …]", QL_ARG_RUN, 0, 12, QL_BODY_NONE, QL_TAKES_NONE, plot_options, ql_verb_plot,
     "curves of runs, overlaid; the difference below",
     "RUN is a run's name, a variable that holds a run, a folder or any trainer_state.json.",
     "%qlora plot\n%qlora plot run-1 run-2\n%qlora plot run-1 --metric memory"},
    {"memory", "[RUN]", QL_ARG_RUN, 0, 1, QL_BODY_NONE, QL_TAKES_NONE, NULL, ql_verb_memory,
     "bytes per device by category: now, or over a run's time", NULL,
     "%qlora memory\n%qlora memory run-1"},
    {"baseline", "[RUN]", QL_ARG_RUN, 0, 1, QL_BODY_NONE, QL_TAKES_NONE, baseline_options,
     ql_verb_baseline, "the same job on one device, compared loss by loss",
     "Accumulation is multiplied so that the samples per step stay. Says whether the losses are "
     "the same bits.",
     "%qlora baseline run-1 --steps 20"},
    {"verify", "[RUN]", QL_ARG_RUN, 0, 1, QL_BODY_NONE, QL_TAKES_NONE, NULL, ql_verb_verify,
     "prove a run: base bytes per device, hashes against the file, the adapter reloaded", NULL,
     "%qlora verify run-1"},
    {"save", "[FOLDER]", QL_ARG_PATH, 0, 1, QL_BODY_NONE, QL_TAKES_NONE, save_options, ql_verb_save,
     "put the adapter where PEFT loads it; on the hub, too",
     "--push_to_hub uploads with Python's huggingface_hub; the token is HF_TOKEN, else the one of `hf auth login`, else Kaggle's secret.",
     "%qlora save my-adapter\n%qlora save my-adapter --run run-1\n%qlora save --push_to_hub you/my-adapter"},
    {"merge", "FOLDER", QL_ARG_PATH, 1, 1, QL_BODY_NONE, QL_TAKES_NONE, merge_options, ql_verb_merge,
     "put the adapter into the model: 16-bit safetensors that need no adapter",
     "Into the 16-bit weights of --original, else into the model's own; those of a 4-bit file are decoded. "
     "Says how far the logits of the result are from those of base and adapter.",
     "%qlora merge my-model\n%qlora merge my-model --run run-1 --dtype bfloat16"},
    {"unload", "", QL_ARG_NONE, 0, 0, QL_BODY_NONE, QL_TAKES_NONE, NULL, ql_verb_unload,
     "free the devices; model, settings and runs stay", NULL, "%qlora unload"},
    {"help", "[VERB or SETTING]", QL_ARG_VERB, 0, 1, QL_BODY_NONE, QL_TAKES_NONE, NULL,
     ql_verb_help, "this list, a verb, or a setting", NULL,
     "%qlora help train\n%qlora help lora_alpha"},
};

const ql_verb *ql_verbs(int *n)
{
    *n = (int)(sizeof table / sizeof *table);
    return table;
}

const ql_verb *ql_verb_find(const char *name)
{
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (strcmp(table[i].name, name) == 0) return &table[i];
    return NULL;
}

const ql_option *ql_option_find(const ql_verb *verb, const char *name)
{
    for (const ql_option *o = verb->options; o && o->name; o++)
        if (strcmp(o->name, name) == 0) return o;
    return NULL;
}

const char *ql_verb_nearest(const char *word, const char *const *names, int n, char *buf,
                            size_t size)
{
    int limit = strlen(word) < 4 ? 1 : strlen(word) < 8 ? 2 : 3, best = limit + 1;
    const char *found = NULL;
    for (int i = 0; i < n; i++) {
        int d = ql_text_distance(word, names[i], limit);
        if (d < best) best = d, found = names[i];
    }
    /* A beginning is as good as a near spelling: `gen` means generate. */
    for (int i = 0; i < n && !found; i++)
        if (strlen(word) >= 2 && strncmp(names[i], word, strlen(word)) == 0) found = names[i];
    if (found)
        snprintf(buf, size, "did you mean '%s'?", found);
    else
        buf[0] = 0;
    return buf;
}

/* The nearest name or alias of a setting that does something: `lora_rnak` is near lora_rank,
 * another name of r. */
static const char *near_setting(const char *word, char *buf, size_t size)
{
    char names[1024][48];
    const char *list[1024];
    const ql_setting *s;
    int n = 0, count = ql_settings(&s);
    for (int i = 0; i < count && n < 1024; i++) {
        if (s[i].refused || s[i].note) continue;
        snprintf(names[n], sizeof names[n], "%s", s[i].name);
        list[n] = names[n];
        n++;
        for (const char *p = s[i].alias; p && *p && n < 1024;) {
            size_t k = strcspn(p, "|");
            snprintf(names[n], sizeof names[n], "%.*s", (int)k, p);
            list[n] = names[n];
            n++;
            p += k + (p[k] == '|');
        }
    }
    ql_verb_nearest(word, list, n, buf, size);
    /* Its help names its keys. */
    const ql_setting *fsdp = ql_setting_find("fsdp_config");
    const char *at = fsdp && strchr(word, '_') ? strstr(fsdp->help, word) : NULL;
    if (!buf[0] && at && (at == fsdp->help || at[-1] == ' ') && strchr(", ", at[strlen(word)]))
        snprintf(buf, size, "it is a key of fsdp_config: {\"%.60s\": …}", word);
    return buf;
}

/* ---- binding -----------------------------------------------------------------------------------
 */

static ql_status unknown_verb(const char *word)
{
    const char *names[sizeof table / sizeof *table];
    char near[96];
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) names[i] = table[i].name;
    ql_verb_nearest(word, names, (int)(sizeof table / sizeof *table), near, sizeof near);
    QL_FAIL(QL_EINVAL, "unknown verb '%s': %s", word,
            near[0] ? near : "%qlora help lists them all");
}

static ql_status unknown_option(const ql_verb *verb, const char *name)
{
    const char *names[64];
    char near[160];
    int n = 0;
    for (const ql_option *o = verb->options; o && o->name && n < 64; o++) names[n++] = o->name;
    ql_verb_nearest(name, names, n, near, sizeof near);
    if (!near[0] && verb->takes != QL_TAKES_NONE) near_setting(name, near, sizeof near);
    if (!near[0] && verb->takes == QL_TAKES_NONE && ql_setting_find(name))
        QL_FAIL(QL_EINVAL, "%s takes no settings; set it first: %%qlora config --%s …", verb->name,
                name);
    if (!near[0] && n > 0 && verb->takes == QL_TAKES_NONE) { /* few enough to name them all */
        ql_buf all = {0};
        for (int i = 0; i < n; i++) ql_buf_printf(&all, "%s--%s", i ? ", " : "", names[i]);
        ql_status st = ql_fail(QL_EINVAL, "%s has no option --%s; it has %s", verb->name, name, ql_buf_str(&all));
        ql_buf_free(&all);
        return st;
    }
    QL_FAIL(QL_EINVAL, "%s has no option --%s: %s%s%s", verb->name, name, near,
            near[0] ? "" : "%qlora help ", near[0] ? "" : verb->name);
}

static int listed(const char *list, const char *word)
{
    size_t n = strlen(word);
    for (const char *p = list; p && n; p = strchr(p, '|')) {
        p += *p == '|';
        if (strncmp(p, word, n) == 0 && (p[n] == '|' || !p[n])) return 1;
    }
    return 0;
}

static ql_status unknown_choice(const ql_option *o, const char *text)
{
    char words[256], near[96];
    const char *names[16];
    ql_buf all = {0};
    int n = 0;
    snprintf(words, sizeof words, "%s", o->choices);
    for (char *save = NULL, *w = strtok_r(words, "|", &save); w && n < 16; w = strtok_r(NULL, "|", &save)) {
        ql_buf_printf(&all, "%s%s", n ? ", " : "", w);
        names[n++] = w;
    }
    ql_verb_nearest(text, names, n, near, sizeof near);
    ql_status st = ql_fail(QL_EINVAL, "--%s: %s%s is one of %s, not '%s'", o->name, near, near[0] ? " It" : "it", ql_buf_str(&all), text);
    ql_buf_free(&all);
    return st;
}

/* A word that says yes or no: 1 or 0; else −1. */
static int truth_word(const char *s)
{
    static const char *const words[] = {"false", "no", "off", "0", "null", "none", "true", "yes", "on", "1"};
    for (int i = 0; i < (int)(sizeof words / sizeof *words); i++)
        if (strcasecmp(s, words[i]) == 0) return i >= 6;
    return -1;
}

static ql_status bind_value(ql_call *c, const ql_option *o, const char *text)
{
    char *end = NULL;
    json_t *v = NULL;
    errno = 0;
    if (strcmp(text, "null") == 0) { /* Python's None: as if it were not given */
        json_object_del(c->options, o->name);
        return QL_OK;
    }
    if (o->type == QL_ARG_INT) {
        long long x = strtoll(text, &end, 10);
        if (!*text || *end || errno || x < 0)
            QL_FAIL(QL_EINVAL, "--%s takes a whole number from 0 on, not '%s'", o->name, text);
        v = json_integer(x);
    } else if (o->type == QL_ARG_FLOAT) {
        double x = strtod(text, &end);
        if (!*text || *end || errno || !(x >= 0 && x <= 1e9))
            QL_FAIL(QL_EINVAL, "--%s takes a number from 0 to 1e9, not '%s'", o->name, text);
        v = json_real(x);
    } else if (o->type == QL_ARG_FLAG) {
        int yes = truth_word(text);
        if (yes < 0) QL_FAIL(QL_EINVAL, "--%s takes true or false, not '%s'", o->name, text);
        v = json_boolean(yes);
    } else {
        if (o->type == QL_ARG_CHOICE) {
            if (!listed(o->choices, text)) return unknown_choice(o, text);
        }
        v = json_string(text);
    }
    if (!v || json_object_set_new(c->options, o->name, v) < 0)
        QL_FAIL(QL_EINVAL, "--%s: not UTF-8", o->name);
    return QL_OK;
}

static ql_status add_setting(ql_call *c, const char *name, const char *text, json_t *value,
                             int line)
{
    size_t i;
    json_t *other;
    json_array_foreach(c->settings, i, other) /* on a line the last one holds, as in a shell; a cell with two is pasted together */
        if (line > 0 && ql_jint(other, "line", 0) > 0 && strcmp(ql_jstr(other, "name", ""), name) == 0)
            QL_FAIL(QL_EINVAL, "line %d: %s is set in line %lld already", line, name, (long long)ql_jint(other, "line", 0));
    json_t *v = value ? json_incref(value) : ql_text_json(text, strlen(text));
    json_t *s =
        json_pack("{s:s, s:o, s:i}", "name", name, value ? "value" : "text", v, "line", line);
    if (!s || json_array_append_new(c->settings, s) < 0)
        QL_FAIL(QL_EINVAL, "'%s' is not UTF-8", name);
    return QL_OK;
}

/* Settings that are on or off, among other things: alone they mean on. */
static int switches(const ql_setting *s)
{
    return s->type == QL_SET_BOOL || listed(s->choices, "true") || strcmp(s->name, "fsdp") == 0;
}

/* Word i is --name, --name=value or --name followed by its value; *used: how many words that took.
 */
static ql_status bind_option(ql_call *c, int i, int *used)
{
    const ql_word *w = &c->line.words[i], *next = i + 1 < c->line.n ? &c->line.words[i + 1] : NULL;
    char name[128];
    size_t n = w->equals >= 0 ? (size_t)w->equals : strlen(w->text);
    if (n - 2 >= sizeof name)
        QL_FAIL(QL_EINVAL, "column %d: no option has so long a name", w->column);
    for (size_t k = 2; k < n; k++) name[k - 2] = w->text[k] == '-' ? '_' : w->text[k];
    name[n - 2] = 0;
    const ql_verb *v = c->verb;
    const ql_option *o = ql_option_find(v, name);
    const ql_setting *s = o || v->takes == QL_TAKES_NONE ? NULL : ql_setting_find(name);
    const char *negated = NULL;
    if (!o && !s && strncmp(name, "no_", 3) == 0 && w->equals < 0) {
        o = ql_option_find(v, name + 3);
        s = o || v->takes == QL_TAKES_NONE ? NULL : ql_setting_find(name + 3);
        if ((o && o->type == QL_ARG_FLAG) || (s && switches(s)))
            negated = "false";
        else
            o = NULL, s = NULL;
    }
    if (!o && !s) return unknown_option(v, name);
    int flag = o ? o->type == QL_ARG_FLAG : switches(s),
        plain = flag && (o || s->type == QL_SET_BOOL);
    const char *value;
    *used = 1;
    if (negated) {
        value = negated;
    } else if (w->equals >= 0) {
        value = w->text + n + 1;
    } else if (plain && !(next && !next->quoted && truth_word(next->text) >= 0)) {
        value = "true"; /* a flag: the next word is its value only if it says yes or no */
    } else if (!next || (!next->quoted && strncmp(next->text, "--", 2) == 0)) {
        if (!flag) QL_FAIL(QL_EINVAL, "--%s needs a value", o ? o->name : s->name);
        value = "true";
    } else {
        value = next->text;
        *used = 2;
    }
    return o ? bind_value(c, o, value) : add_setting(c, s->name, value, NULL, 0);
}

static int is_group(const char *name)
{
    static const char *const theirs[] = {"TrainingArguments", "SFTConfig", "LoraConfig",
                                         "BitsAndBytesConfig", "training"};
    const ql_setting *s;
    int n = ql_settings(&s);
    for (int i = 0; i < n; i++)
        if (strcmp(s[i].group, name) == 0) return 1;
    for (size_t i = 0; i < sizeof theirs / sizeof *theirs; i++)
        if (strcmp(theirs[i], name) == 0) return 1;
    return 0;
}

static ql_status unknown_key(const char *key, int line)
{
    char near[160];
    near_setting(key, near, sizeof near);
    QL_FAIL(QL_EINVAL, "line %d: unknown key '%s'%s%s", line, key,
            near[0] ? ", " : "; %qlora config --all lists the settings", near);
}

/* A JSON object under a section's name holds settings. */
static ql_status bind_object(ql_call *c, const json_t *object, int line)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)object, key, value)
    {
        const ql_setting *s = ql_setting_find(key);
        if (!s) return unknown_key(key, line);
        QL_TRY(add_setting(c, s->name, "", value, line));
    }
    return QL_OK;
}

static ql_status bind_body(ql_call *c, const char *text)
{
    ql_body b;
    ql_status st = QL_OK;
    QL_TRY(ql_body_parse(text, &b));
    for (int i = 0; i < b.n; i++) {
        const ql_entry *e = &b.entries[i];
        const ql_setting *s = e->key ? ql_setting_find(e->key) : NULL;
        json_t *v = NULL;
        /* What stands under a setting is part of its value; what stands under a section is a
         * setting. */
        int inside = 0;
        for (int p = e->parent; p >= 0; p = b.entries[p].parent)
            inside |= !b.entries[p].key || ql_setting_find(b.entries[p].key) != NULL;
        if (inside) continue;
        if (!s && e->key && is_group(e->key) && (e->children > 0 || json_is_object(e->value))) {
            if (e->value) QL_GO(bind_object(c, e->value, e->line));
            continue;
        }
        if (!s) QL_GO(unknown_key(e->key ? e->key : "-", e->line));
        if (e->children > 0) QL_GO(ql_body_value(&b, i, &v));
        st = add_setting(c, s->name, e->text, v ? v : e->value, e->line);
        json_decref(v);
        QL_GO(st);
    }
out:
    ql_body_free(&b);
    return st;
}

/* "config r 8", "save out run-1": what was meant has two dashes. */
static ql_status one_word_too_many(const ql_verb *v, const char *word)
{
    char hint[128] = "", name[64];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(word, "="), word);
    if (v->takes != QL_TAKES_NONE && ql_setting_find(name)) snprintf(hint, sizeof hint, "; settings have two dashes: --%s", name);
    for (const ql_option *o = v->options; !*hint && o && o->name; o++)
        if (o->type == QL_ARG_RUN) snprintf(hint, sizeof hint, "; a run is named by --%s", o->name);
    QL_FAIL(QL_EINVAL, "%s: '%s' is one word too many; usage: %%qlora %s%s%s%s", v->name, word, v->name, *v->args ? " " : "", v->args, hint);
}

static ql_status bind(ql_call *c, const char *body)
{
    const ql_word *w = c->line.words;
    if (c->line.n > 0 && !(c->verb = ql_verb_find(w[0].text))) return unknown_verb(w[0].text);
    int has_body = body && body[strspn(body, " \t\r\n")];
    if (c->line.n == 0 && has_body)
        QL_FAIL(QL_EINVAL, "the verb stands in the first line: %%%%qlora config, %%%%qlora generate; other verbs are lines: %%qlora load tiny");
    if (c->line.n == 0) c->verb = ql_verb_find("help");
    for (int i = 1, used; i < c->line.n; i += used) {
        used = 1;
        if (!w[i].quoted && strncmp(w[i].text, "--", 2) == 0 && w[i].text[2] &&
            w[i].text[2] != '=' && c->verb->arg != QL_ARG_VERB) { /* help --r */
            QL_TRY(bind_option(c, i, &used));
        } else if (!w[i].quoted && w[i].text[0] == '-' && isalpha((unsigned char)w[i].text[1]) &&
                   c->verb->arg != QL_ARG_TEXT) {
            QL_FAIL(QL_EINVAL, "column %d: options have two dashes: -%s", w[i].column, w[i].text);
        } else {
            c->args[c->n_args++] = w[i].text;
        }
    }
    const ql_verb *v = c->verb;
    if (v->max_args >= 0 && c->n_args > v->max_args) return one_word_too_many(v, c->args[v->max_args]);
    if (c->n_args < v->min_args)
        QL_FAIL(QL_EINVAL, "%s needs %s; usage: %%qlora %s %s", v->name, v->args, v->name, v->args);
    if (!has_body) return QL_OK;
    if (v->body == QL_BODY_SETTINGS) return bind_body(c, body);
    if (v->body == QL_BODY_TEXT)
        c->body = body;
    else
        QL_FAIL(QL_EINVAL, "%s takes no cell body; write it as a line: %%qlora %s …", v->name,
                v->name);
    return QL_OK;
}

ql_status ql_call_bind(const char *line, const char *body, ql_call *out)
{
    ql_call c = {0};
    ql_status st = ql_line_parse(line, &c.line);
    if (st == QL_OK) {
        c.args = calloc((size_t)c.line.n + 1, sizeof *c.args);
        c.options = json_object();
        c.settings = json_array();
        st = c.args && c.options && c.settings ? bind(&c, body)
                                               : ql_fail(QL_ENOMEM, "out of memory");
    }
    if (st != QL_OK) {
        ql_call_free(&c);
        return st;
    }
    *out = c;
    return QL_OK;
}

void ql_call_free(ql_call *call)
{
    ql_line_free(&call->line);
    free(call->args);
    json_decref(call->options);
    json_decref(call->settings);
    memset(call, 0, sizeof *call);
}

int64_t ql_call_int(const ql_call *c, const char *name, int64_t def)
{
    const json_t *v = json_object_get(c->options, name);
    return v ? (int64_t)json_integer_value(v) : def;
}

double ql_call_float(const ql_call *c, const char *name, double def)
{
    const json_t *v = json_object_get(c->options, name);
    return v ? json_number_value(v) : def;
}

int ql_call_flag(const ql_call *c, const char *name)
{
    return json_is_true(json_object_get(c->options, name));
}

const char *ql_call_str(const ql_call *c, const char *name, const char *def)
{
    const char *s = json_string_value(json_object_get(c->options, name));
    return s ? s : def;
}

ql_status ql_call_apply(const ql_call *c, ql_job *job)
{
    size_t i;
    json_t *s;
    json_array_foreach(c->settings, i, s)
    {
        const char *name = json_string_value(json_object_get(s, "name"));
        const char *text = json_string_value(json_object_get(s, "text"));
        int line = (int)json_integer_value(json_object_get(s, "line"));
        ql_status st = text ? ql_job_set_text(job, name, text)
                            : ql_job_set(job, name, json_object_get(s, "value"));
        if (st == QL_OK) continue;
        if (line > 0) ql_error_prefix("line %d: ", line);
        return st;
    }
    return QL_OK;
}
