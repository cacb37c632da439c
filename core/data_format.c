/* What a row means, and how it becomes ids with a mask: TRL's SFTTrainer's rules. */
#include "core/data.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct ql_formatter {
    ql_tok *tok;
    ql_chat *chat; /* NULL: there is no template */
    ql_row_kind kind;
    ql_data_options o;
    const char *text_field, *eos;
};

static const char HUMAN[] = "<human>:", BOT[] = "<bot>:";

const char *ql_row_kind_name(ql_row_kind k)
{
    static const char *const names[] = {"unknown",  "text",       "OIG text", "messages",
                                        "ShareGPT", "completion", "Alpaca",   "token ids"};
    return names[k];
}

void ql_example_free(ql_example *e)
{
    ql_ids_free(&e->ids);
    free(e->trained);
    *e = (ql_example){0};
}

static bool is_list_of(const json_t *list, const char *key)
{
    return json_is_array(list) && json_object_get(json_array_get(list, 0), key);
}

static ql_row_kind recognise(const json_t *row, const char *text_field)
{
    const json_t *text = json_object_get(row, text_field), *talk = json_object_get(row, "conversations");
    const json_t *messages = json_object_get(row, "messages");
    const json_t *prompt = json_object_get(row, "prompt"), *completion = json_object_get(row, "completion");
    if (json_is_array(json_object_get(row, "input_ids"))) return QL_ROW_IDS;
    if (json_is_string(prompt) && json_is_string(completion)) return QL_ROW_COMPLETION;
    if (json_is_array(prompt) && json_is_array(completion)) return QL_ROW_COMPLETION;
    if (is_list_of(messages, "from") || is_list_of(talk, "from")) return QL_ROW_SHAREGPT;
    if (json_is_array(messages)) return QL_ROW_MESSAGES;
    /* A text made from other columns (instruction and output, conversations) stands beside them and is what is meant; TRL takes it too. */
    if (!json_is_string(text) && is_list_of(talk, "role")) return QL_ROW_MESSAGES;
    if (prompt && completion) return QL_ROW_COMPLETION; /* the row says what is wrong with it */
    if (!json_is_string(text) && json_is_string(json_object_get(row, "instruction")) && json_object_get(row, "output"))
        return QL_ROW_ALPACA;
    if (!json_is_string(text)) return QL_ROW_UNKNOWN;
    const char *s = json_string_value(text);
    return strncmp(s, HUMAN, sizeof HUMAN - 1) == 0 && strstr(s, BOT) ? QL_ROW_OIG : QL_ROW_TEXT;
}

bool ql_row_is_empty(const json_t *row, const ql_data_options *o)
{
    const char *const names[] = {o->text_field ? o->text_field : "text", "messages", "conversations", "instruction", "output", "input_ids"};
    ql_row_kind kind = recognise(row, names[0]);
    if (kind == QL_ROW_TEXT) return !json_string_length(json_object_get(row, names[0]));
    for (size_t i = 0; kind == QL_ROW_UNKNOWN && i < sizeof names / sizeof *names; i++) {
        const json_t *v = json_object_get(row, names[i]);
        if (json_is_null(v) || (json_is_array(v) && !json_array_size(v))) return true;
    }
    return false;
}

static ql_status unknown_columns(const json_t *row, const char *text_field, bool named)
{
    ql_str names = {0};
    json_t *o = (json_t *)(uintptr_t)row, *v;
    static const char *const types[] = {"an object", "a list", "text", "a whole number", "a number", "true", "false", "null"};
    const char *const wrong[][2] = {{text_field, "text"}, {"messages", "a list of messages"}, {"conversations", "a list of messages"},
                                    {"input_ids", "a list of token ids"}};
    for (int i = 0; i < 4; i++)
        if ((v = json_object_get(o, wrong[i][0])) && !(i == 0 && json_is_string(v)))
            QL_FAIL(QL_EINVAL, "the column '%.60s' must hold %s; in the first row it is %s%s", wrong[i][0], wrong[i][1], types[json_typeof(v)],
                    json_is_object(v) ? " (a table by columns? pandas writes rows with to_json(orient=\"records\"))" : "");
    for (void *it = json_object_iter(o); it && names.len < 500; it = json_object_iter_next(o, it))
        (void)ql_str_printf(&names, "%s'%.60s'", names.len ? ", " : "", json_object_iter_key(it));
    const char *all = names.data ? names.data : "(none)";
    int one = json_object_size(o) == 1;
    if (named)
        ql_fail(QL_EINVAL, "dataset_text_field: there is no column '%.60s'; there %s %s", text_field, one ? "is" : "are", all);
    else if (one && strchr(all, ';'))
        ql_fail(QL_EINVAL, "the only column is %s: are the columns parted by ';'? Read the file with pandas (sep=';') and "
                           "give the variable's name", all);
    else
        ql_fail(QL_EINVAL, "the column%s %s %s none of: text; messages; conversations; prompt and completion; "
                           "instruction and output; input_ids. Name the text's column with --dataset_text_field", one ? "" : "s", all, one ? "is" : "are");
    ql_str_free(&names);
    return QL_EINVAL;
}

ql_status ql_formatter_new(ql_tok *tok, const json_t *first_row, const ql_data_options *o, ql_formatter **out)
{
    const ql_tok_names *names = ql_tok_info(tok);
    ql_status st = QL_OK;
    ql_formatter *f = calloc(1, sizeof *f);
    if (!f) QL_FAIL(QL_ENOMEM, "no memory for data");
    f->tok = tok, f->o = *o;
    f->text_field = o->text_field ? o->text_field : "text";
    f->eos = o->eos_token ? o->eos_token : names->eos_token;
    f->kind = recognise(first_row, f->text_field);
    if (f->kind == QL_ROW_UNKNOWN) QL_GO(unknown_columns(first_row, f->text_field, o->text_field && strcmp(o->text_field, "text") != 0));
    if (!tok && f->kind != QL_ROW_IDS) {
        st = ql_fail(QL_EINVAL, "%s. So the data must be rows of input_ids, made in Python: [{\"input_ids\": tok(t + tok.eos_token).input_ids} for t "
                                "in texts]; these are %s", o->no_tokenizer ? o->no_tokenizer : "there is no tokenizer", ql_row_kind_name(f->kind));
        goto out;
    }
    if (f->kind == QL_ROW_TEXT && o->loss_on == QL_LOSS_RESPONSES) {
        st = ql_fail(QL_EINVAL, "the column '%s' is plain text: there are no responses to train on alone", f->text_field);
        goto out;
    }
    const char *given = o->chat_template, *jinja = given ? ql_chat_builtin(given) : names->chat_template;
    if (given && !jinja) jinja = given;
    /* A template that is not needed must not stand in the way. */
    bool needed = f->kind == QL_ROW_MESSAGES || f->kind == QL_ROW_SHAREGPT || given;
    if (jinja) {
        ql_tok_names n = *names;
        n.eos_token = f->eos;
        st = ql_chat_open(jinja, &n, &f->chat);
        if (st != QL_OK && needed) goto out;
        if (st != QL_OK) ql_error_clear();
        st = QL_OK;
    } else if (needed) {
        st = ql_fail(QL_EINVAL, "the rows are conversations, but the tokenizer has no chat template: set "
                                "chat_template to chatml, llama-3, mistral, alpaca or a template's text");
        goto out;
    }
    *out = f, f = NULL;
out:
    ql_formatter_free(f);
    return st;
}

void ql_formatter_free(ql_formatter *f)
{
    if (!f) return;
    ql_chat_close(f->chat);
    free(f);
}

ql_row_kind ql_formatter_kind(const ql_formatter *f)
{
    return f->kind;
}

/* ---- pieces ------------------------------------------------------------------------------------ */

#define ROW_FAIL(why, ...)                                                                         \
    do {                                                                                           \
        e->reason = (why);                                                                         \
        return ql_fail(QL_EINVAL, __VA_ARGS__);                                                    \
    } while (0)

/* All ids trained on, or none. */
static ql_status mask_all(ql_example *e, uint8_t trained)
{
    if (e->ids.len > e->cap || !e->trained) {
        size_t cap = e->ids.len + e->ids.len / 2 + 64;
        uint8_t *p = realloc(e->trained, cap);
        if (!p) QL_FAIL(QL_ENOMEM, "no memory for an example");
        e->trained = p, e->cap = cap;
    }
    if (e->ids.len) memset(e->trained, trained, e->ids.len);
    return QL_OK;
}

/* Behind a text that does not end with it; of s the text begins at `from`. */
static ql_status add_eos(const ql_formatter *f, ql_str *s, size_t from)
{
    size_t n = f->eos ? strlen(f->eos) : 0;
    if (!n || (s->len >= from + n && memcmp(s->data + s->len - n, f->eos, n) == 0)) return QL_OK;
    return ql_str_add(s, f->eos, n);
}

/* Encodes text and trains on the tokens that touch a span. Text is normalised span by span first, so that
 * token ends are exact. */
static ql_status encode_spans(const ql_formatter *f, const char *text, size_t n, const ql_span *span, size_t n_spans,
                              unsigned flags, ql_example *e)
{
    ql_str s = {0};
    ql_ids ends = {0};
    ql_status st = QL_OK;
    ql_span *own = malloc((n_spans + 1) * sizeof *own);
    size_t done = 0, n_own = 0;
    if (!own) QL_FAIL(QL_ENOMEM, "no memory for an example");
    for (size_t i = 0; i < n_spans; i++) {
        if (span[i].start < done || span[i].end < span[i].start) continue; /* marks inside marks */
        QL_GO(ql_tok_normalize(f->tok, text + done, span[i].start - done, &s));
        own[n_own].start = s.len;
        QL_GO(ql_tok_normalize(f->tok, text + span[i].start, span[i].end - span[i].start, &s));
        own[n_own++].end = s.len;
        done = span[i].end;
    }
    QL_GO(ql_tok_normalize(f->tok, text + done, n - done, &s));
    QL_GO(ql_tok_encode_ends(f->tok, s.data ? s.data : "", s.len, flags, &e->ids, &ends));
    QL_GO(mask_all(e, 0));
    for (size_t i = 0, k = 0, from = 0; i < e->ids.len; i++) {
        size_t end = (size_t)ends.data[i];
        while (k < n_own && own[k].end <= from) k++;
        e->trained[i] = k < n_own && end > own[k].start && end > from;
        from = end;
    }
    /* A space that the tokenizer puts in front of an answer as a token of its own has no text; it is said with what follows. */
    size_t first = flags & QL_TOK_SPECIALS ? ql_tok_prefix(f->tok)->len : 0;
    for (size_t i = e->ids.len; i-- > first;)
        if (i + 1 < e->ids.len && ends.data[i] == (i ? ends.data[i - 1] : 0)) e->trained[i] = e->trained[i + 1];
out:
    ql_str_free(&s), ql_ids_free(&ends), free(own);
    return st;
}

/* ---- kinds of rows ----------------------------------------------------------------------------- */

static ql_status format_text(ql_formatter *f, const json_t *row, ql_example *e)
{
    const json_t *t = json_object_get(row, f->text_field);
    ql_str s = {0};
    ql_span *span = NULL;
    size_t n = 0;
    if (!json_is_string(t)) ROW_FAIL("no text", "column '%s' is missing or not a string", f->text_field);
    if (!json_string_length(t)) ROW_FAIL("empty", "column '%s' is empty", f->text_field);
    ql_status st = ql_str_add(&s, json_string_value(t), json_string_length(t));
    if (st == QL_OK) st = add_eos(f, &s, 0);
    if (st == QL_OK && f->kind == QL_ROW_OIG && f->o.loss_on == QL_LOSS_RESPONSES) {
        span = malloc((s.len / (sizeof BOT - 1) + 1) * sizeof *span);
        if (!span) QL_GO(ql_fail(QL_ENOMEM, "no memory for an example"));
        for (const char *p = s.data, *last = p + s.len; (p = memmem(p, (size_t)(last - p), BOT, sizeof BOT - 1)); n++) {
            p += sizeof BOT - 1;
            const char *end = memmem(p, (size_t)(last - p), HUMAN, sizeof HUMAN - 1);
            if (!end) end = last;
            span[n] = (ql_span){(size_t)(p - s.data), (size_t)(end - s.data)};
            p = end;
        }
        st = encode_spans(f, s.data, s.len, span, n, QL_TOK_SPECIALS, e);
    } else if (st == QL_OK) {
        st = ql_tok_encode(f->tok, s.data, s.len, QL_TOK_SPECIALS, &e->ids);
        if (st == QL_OK) st = mask_all(e, 1);
    }
out:
    ql_str_free(&s), free(span);
    return st;
}

/* Tools and template variables that a row brings along. */
static ql_status row_extras(const json_t *row, const json_t **tools, const json_t **extra, json_t **parsed, ql_example *e)
{
    *tools = json_object_get(row, "tools"), *extra = json_object_get(row, "chat_template_kwargs");
    *parsed = NULL;
    if (json_string_length(*tools)) { /* as data sets with one type a column keep them */
        *parsed = json_loads(json_string_value(*tools), JSON_ALLOW_NUL | JSON_DECODE_ANY, NULL);
        if (!*parsed) ROW_FAIL("broken tools", "the column 'tools' is a text that is not JSON");
        *tools = *parsed;
    }
    if (!json_is_array(*tools)) *tools = NULL;
    if (!json_is_object(*extra)) *extra = NULL;
    return QL_OK;
}

static ql_status render(ql_formatter *f, const json_t *row, const json_t *messages, unsigned flags, ql_chat_text *t,
                        ql_example *e)
{
    const json_t *tools, *extra;
    json_t *parsed;
    QL_TRY(row_extras(row, &tools, &extra, &parsed, e));
    ql_status st = ql_chat_render(f->chat, messages, tools, extra, flags, t);
    json_decref(parsed);
    if (st == QL_ENOSUP) e->reason = "the template hides where the assistant speaks";
    else if (st == QL_EINVAL) e->reason = "the chat template fails";
    return st;
}

static ql_status format_messages(ql_formatter *f, const json_t *row, const json_t *messages, ql_example *e)
{
    bool spans = f->o.loss_on == QL_LOSS_RESPONSES;
    ql_chat_text t = {0};
    ql_status st = QL_OK;
    if (!json_array_size(messages)) ROW_FAIL("empty", "the conversation is empty");
    QL_GO(render(f, row, messages, spans ? QL_CHAT_SPANS : 0, &t, e));
    if (spans) QL_GO(encode_spans(f, t.text.data, t.text.len, t.spans, t.n_spans, 0, e));
    else {
        QL_GO(ql_tok_encode(f->tok, t.text.data, t.text.len, 0, &e->ids));
        QL_GO(mask_all(e, 1));
    }
out:
    ql_chat_text_free(&t);
    return st;
}

static const char *role_of(const char *from)
{
    static const char *const map[][2] = {{"human", "user"},    {"user", "user"},         {"gpt", "assistant"},
                                         {"chatgpt", "assistant"}, {"bard", "assistant"}, {"bing", "assistant"},
                                         {"bot", "assistant"}, {"model", "assistant"},   {"assistant", "assistant"},
                                         {"system", "system"}, {"tool", "tool"},         {"observation", "tool"}};
    for (size_t i = 0; from && i < sizeof map / sizeof *map; i++)
        if (strcmp(from, map[i][0]) == 0) return map[i][1];
    return NULL;
}

static ql_status format_sharegpt(ql_formatter *f, const json_t *row, ql_example *e)
{
    json_t *messages = json_array(), *turn;
    const json_t *list = json_object_get(row, "messages");
    if (!is_list_of(list, "from")) list = json_object_get(row, "conversations");
    ql_status st = messages ? QL_OK : ql_fail(QL_ENOMEM, "no memory for a conversation");
    size_t i;
    json_array_foreach(list, i, turn)
    {
        const char *from = json_string_value(json_object_get(turn, "from")), *role = role_of(from);
        json_t *value = json_object_get(turn, "value");
        if (st != QL_OK) break;
        if (role && !json_is_string(value)) {
            e->reason = "no text";
            st = ql_fail(QL_EINVAL, "turn %zu, from '%.60s', has no text", i + 1, from);
        } else if (!role) {
            e->reason = "an unknown speaker";
            st = ql_fail(QL_EINVAL, "turn %zu is from '%.60s', which is none of human, gpt, system, tool", i + 1,
                         from ? from : "(nobody)");
        } else if (json_array_append_new(messages, json_pack("{s:s,s:O}", "role", role, "content", value))) {
            st = ql_fail(QL_ENOMEM, "no memory for a conversation");
        }
    }
    if (st == QL_OK) st = format_messages(f, row, messages, e);
    json_decref(messages);
    return st;
}

/* The prompt ends where its own tokens and those of the whole part, which TRL 1.16 has too: mostly behind the prompt's last token,
 * earlier where one token reaches over the border or a template renders the prompt alone differently. That is counted. */
static ql_status mask_prompt(ql_formatter *f, const char *prompt, size_t n, unsigned flags, ql_example *e)
{
    ql_ids ids = {0};
    size_t k = 0;
    ql_status st = QL_OK;
    if (flags & QL_TOK_SPECIALS)
        for (size_t i = 0; i < ql_tok_prefix(f->tok)->len; i++)
            QL_GO(ql_ids_push(&ids, ql_tok_prefix(f->tok)->data[i]));
    QL_GO(ql_tok_encode(f->tok, prompt, n, 0, &ids));
    while (k < ids.len && k < e->ids.len && ids.data[k] == e->ids.data[k]) e->trained[k++] = 0;
    e->prompt_not_prefix = k < ids.len;
out:
    ql_ids_free(&ids);
    return st;
}

static ql_status format_strings(ql_formatter *f, const char *prompt, size_t n, const json_t *completion, ql_example *e)
{
    ql_str s = {0};
    ql_status st = QL_OK;
    QL_GO(ql_str_add(&s, prompt, n));
    QL_GO(ql_str_add(&s, json_string_value(completion), json_string_length(completion)));
    QL_GO(add_eos(f, &s, n));
    QL_GO(ql_tok_encode(f->tok, s.data, s.len, QL_TOK_SPECIALS, &e->ids));
    QL_GO(mask_all(e, 1));
    if (f->o.loss_on != QL_LOSS_ALL) QL_GO(mask_prompt(f, prompt, n, QL_TOK_SPECIALS, e));
out:
    ql_str_free(&s);
    return st;
}

static ql_status format_turns(ql_formatter *f, const json_t *row, const json_t *prompt, const json_t *completion,
                              ql_example *e)
{
    json_t *all = json_copy((json_t *)(uintptr_t)prompt);
    ql_chat_text t = {0}, p = {0};
    ql_status st = QL_OK;
    if (!all || json_array_extend(all, (json_t *)(uintptr_t)completion)) {
        st = ql_fail(QL_ENOMEM, "no memory for a conversation");
        goto out;
    }
    /* A completion of several turns has more in it than answers; one answer needs no search where the template has no marks. */
    bool one = json_array_size(completion) == 1 && !ql_chat_has_marks(f->chat), spans = f->o.loss_on == QL_LOSS_RESPONSES && !one;
    QL_GO(render(f, row, all, spans ? QL_CHAT_SPANS : 0, &t, e));
    if (spans) {
        QL_GO(encode_spans(f, t.text.data, t.text.len, t.spans, t.n_spans, 0, e));
    } else {
        QL_GO(ql_tok_encode(f->tok, t.text.data, t.text.len, 0, &e->ids));
        QL_GO(mask_all(e, 1));
    }
    if (f->o.loss_on == QL_LOSS_ALL) goto out;
    QL_GO(render(f, row, prompt, QL_CHAT_PROMPT, &p, e));
    QL_GO(mask_prompt(f, p.text.data, p.text.len, 0, e));
out:
    ql_chat_text_free(&t), ql_chat_text_free(&p);
    json_decref(all);
    return st;
}

static ql_status format_completion(ql_formatter *f, const json_t *row, ql_example *e)
{
    const json_t *p = json_object_get(row, "prompt"), *c = json_object_get(row, "completion");
    if (json_is_string(p) && json_is_string(c))
        return format_strings(f, json_string_value(p), json_string_length(p), c, e);
    if (!json_is_array(p) || !json_is_array(c))
        ROW_FAIL("no text", "prompt and completion must be two strings or two lists of messages");
    if (!f->chat) ROW_FAIL("no chat template", "prompt and completion are messages, but there is no chat template");
    return format_turns(f, row, p, c, e);
}

/* With a chat template: one turn of the user's, one of the assistant's. Without: the text that Stanford's
 * Alpaca was trained on. */
static ql_status format_alpaca(ql_formatter *f, const json_t *row, ql_example *e)
{
    const json_t *output = json_object_get(row, "output");
    const char *q = json_string_value(json_object_get(row, "instruction"));
    const char *input = json_string_value(json_object_get(row, "input"));
    ql_str s = {0};
    ql_status st = QL_OK;
    bool more = input && *input;
    if (!q || !json_is_string(output)) ROW_FAIL("no text", "instruction and output must be strings");
    if (f->chat) {
        QL_GO(ql_str_printf(&s, "%s%s%s", q, more ? "\n\n" : "", more ? input : ""));
        json_t *p = json_pack("[{s:s,s:s}]", "role", "user", "content", s.data);
        json_t *c = json_pack("[{s:s,s:O}]", "role", "assistant", "content", output);
        st = p && c ? format_turns(f, row, p, c, e) : ql_fail(QL_ENOMEM, "no memory for a conversation");
        json_decref(p), json_decref(c);
        goto out;
    }
    QL_GO(ql_str_printf(&s, "Below is an instruction that describes a task%s. Write a response that appropriately "
                            "completes the request.\n\n### Instruction:\n%s\n\n%s%s%s### Response:\n",
                        more ? ", paired with an input that provides further context" : "", q,
                        more ? "### Input:\n" : "", more ? input : "", more ? "\n\n" : ""));
    st = format_strings(f, s.data, s.len, output, e);
out:
    ql_str_free(&s);
    return st;
}

/* An array of n integers in [low, high], or of any length where n is SIZE_MAX. */
static ql_status ints_of(const json_t *list, const char *name, size_t n, json_int_t low, json_int_t high, ql_example *e)
{
    if (!json_is_array(list) || (n != SIZE_MAX && json_array_size(list) != n))
        ROW_FAIL("broken ids", "%s must be a list as long as input_ids", name);
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *v = json_array_get(list, i);
        if (!json_is_integer(v) || json_integer_value(v) < low || json_integer_value(v) > high)
            ROW_FAIL("broken ids", "%s[%zu] must be a whole number from %lld to %lld", name, i, (long long)low, (long long)high);
    }
    return QL_OK;
}

/* Rows that were tokenised elsewhere, taken as they are: no eos, no special tokens. A label is its token or -100; what
 * attention_mask leaves out at the end is padding, and dropped. */
static ql_status format_ids(const json_t *row, ql_example *e)
{
    const json_t *ids = json_object_get(row, "input_ids"), *labels = json_object_get(row, "labels");
    const json_t *mask = json_object_get(row, "attention_mask");
    size_t n = json_array_size(ids);
    QL_TRY(ints_of(ids, "input_ids", SIZE_MAX, 0, INT32_MAX, e));
    if (labels) QL_TRY(ints_of(labels, "labels", n, -100, INT32_MAX, e));
    if (mask) {
        QL_TRY(ints_of(mask, "attention_mask", n, 0, 1, e));
        while (n && !json_integer_value(json_array_get(mask, n - 1))) n--;
        for (size_t i = 0; i < n; i++)
            if (!json_integer_value(json_array_get(mask, i)))
                ROW_FAIL("broken ids", "attention_mask[%zu] is 0 with a 1 behind it: only padding on the right is read", i);
    }
    for (size_t i = 0; i < n; i++) QL_TRY(ql_ids_push(&e->ids, (int32_t)json_integer_value(json_array_get(ids, i))));
    QL_TRY(mask_all(e, 1));
    for (size_t i = 0; labels && i < n; i++) {
        json_int_t want = json_integer_value(json_array_get(labels, i));
        if (want != -100 && want != e->ids.data[i])
            ROW_FAIL("broken ids", "labels[%zu] is %lld: a label is -100 or its own token, here %d", i, (long long)want,
                     (int)e->ids.data[i]);
        e->trained[i] = want != -100;
    }
    return QL_OK;
}

static ql_status format_any(ql_formatter *f, const json_t *row, ql_example *e)
{
    const json_t *messages = json_object_get(row, "messages");
    switch (f->kind) {
    case QL_ROW_MESSAGES:
        if (!messages) messages = json_object_get(row, "conversations");
        if (!json_is_array(messages)) ROW_FAIL("no messages", "the column 'messages' is not a list");
        return format_messages(f, row, messages, e);
    case QL_ROW_SHAREGPT: return format_sharegpt(f, row, e);
    case QL_ROW_COMPLETION: return format_completion(f, row, e);
    case QL_ROW_ALPACA: return format_alpaca(f, row, e);
    case QL_ROW_IDS:
        if (!json_is_array(json_object_get(row, "input_ids"))) ROW_FAIL("broken ids", "the column 'input_ids' is not a list");
        return format_ids(row, e);
    default: return format_text(f, row, e);
    }
}

ql_status ql_format_row(ql_formatter *f, const json_t *row, ql_example *e)
{
    e->ids.len = 0;
    e->truncated = e->prompt_not_prefix = false;
    e->reason = NULL;
    QL_TRY(format_any(f, row, e));
    size_t max = (size_t)f->o.max_length, trained = 0, whole = e->ids.len;
    bool cut = f->o.packing == QL_PACK_NONE || f->o.packing == QL_PACK_BFD;
    if (max && whole > max && cut) e->truncated = true, e->ids.len = max;
    for (size_t i = 1; i < e->ids.len; i++) trained += e->trained[i];
    if (trained) return QL_OK;
    if (e->truncated)
        ROW_FAIL("all labels masked after truncation",
                 "no token to train on is left: what is masked fills max_length %zu (the sample has %zu tokens); "
                 "raise --max_length", max, whole);
    ROW_FAIL("all labels masked", "no token to train on: %s",
             whole < 2 ? "the sample is empty" : "the sample has no response");
}
