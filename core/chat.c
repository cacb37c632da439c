#include "core/chat.h"

#include "core/file.h"
#include "core/jinja.h"

#include <stdlib.h>
#include <string.h>

struct ql_chat {
    ql_jinja *jinja;
    json_t *tokens; /* bos_token … */
};

void ql_chat_text_free(ql_chat_text *t)
{
    ql_str_free(&t->text);
    free(t->spans);
    *t = (ql_chat_text){0};
}

ql_status ql_chat_open(const char *jinja, const ql_tok_names *names, ql_chat **out)
{
    const char *const keys[] = {"bos_token", "eos_token", "pad_token", "unk_token"};
    const char *const values[] = {names ? names->bos_token : NULL, names ? names->eos_token : NULL,
                                  names ? names->pad_token : NULL, names ? names->unk_token : NULL};
    ql_status st = QL_OK;
    ql_chat *c = calloc(1, sizeof *c);
    if (!c) QL_FAIL(QL_ENOMEM, "no memory for a chat template");
    QL_GO(ql_jinja_compile(jinja, strlen(jinja), &c->jinja));
    c->tokens = json_object();
    for (int i = 0; i < 4; i++)
        if (values[i] && json_object_set_new(c->tokens, keys[i], json_string(values[i])))
            st = ql_fail(QL_ENOMEM, "no memory for a chat template");
    if (!c->tokens) st = ql_fail(QL_ENOMEM, "no memory for a chat template");
    if (st == QL_OK) *out = c, c = NULL;
out:
    ql_chat_close(c);
    return st;
}

void ql_chat_close(ql_chat *c)
{
    if (!c) return;
    ql_jinja_free(c->jinja);
    json_decref(c->tokens);
    free(c);
}

bool ql_chat_has_marks(const ql_chat *c)
{
    return ql_jinja_has_generation(c->jinja);
}

static ql_status add_span(void *user, size_t start, size_t end)
{
    ql_chat_text *t = user;
    if (t->n_spans == t->cap) {
        size_t cap = t->cap ? 2 * t->cap : 8;
        ql_span *p = realloc(t->spans, cap * sizeof *p);
        if (!p) QL_FAIL(QL_ENOMEM, "no memory for a conversation");
        t->spans = p, t->cap = cap;
    }
    t->spans[t->n_spans++] = (ql_span){start, end};
    return QL_OK;
}

static json_t *context_of(const ql_chat *c, const json_t *messages, const json_t *tools, const json_t *extra,
                          unsigned flags)
{
    json_t *o = json_copy(c->tokens);
    bool bad = !o;
    bad |= json_object_set(o, "messages", (json_t *)(uintptr_t)messages) != 0;
    if (tools) bad |= json_object_set(o, "tools", (json_t *)(uintptr_t)tools) != 0;
    else bad |= json_object_set_new(o, "tools", json_null()) != 0;
    bad |= json_object_set_new(o, "documents", json_null()) != 0;
    bad |= json_object_set_new(o, "add_generation_prompt", json_boolean(flags & QL_CHAT_PROMPT)) != 0;
    if (extra) bad |= json_object_update(o, (json_t *)(uintptr_t)extra) != 0;
    if (!bad) return o;
    json_decref(o);
    return NULL;
}

static ql_status render(const ql_chat *c, const json_t *messages, const json_t *tools, const json_t *extra,
                        unsigned flags, ql_jinja_span *span, ql_chat_text *out)
{
    json_t *context = context_of(c, messages, tools, extra, flags);
    if (!context) QL_FAIL(QL_ENOMEM, "no memory for a conversation");
    ql_str_clear(&out->text);
    out->n_spans = 0;
    ql_status st = ql_jinja_render(c->jinja, context, span, out, &out->text);
    json_decref(context);
    return st;
}

static bool begins(const ql_str *full, const ql_str *part)
{
    return part->len <= full->len && memcmp(full->data, part->data, part->len) == 0;
}

enum { ALL = -1 };

/* Renders the first n messages without number `skip`. */
static ql_status render_some(const ql_chat *c, const json_t *messages, size_t n, int64_t skip, const json_t *tools, const json_t *extra,
                             unsigned flags, ql_chat_text *out)
{
    json_t *some = json_array();
    bool bad = !some;
    for (size_t i = 0; i < n; i++)
        if ((int64_t)i != skip) bad |= json_array_append(some, json_array_get(messages, i)) != 0;
    ql_status st = bad ? ql_fail(QL_ENOMEM, "no memory for a conversation") : render(c, some, tools, extra, flags, NULL, out);
    json_decref(some);
    return st;
}

/* Renders the first n messages, which must be how `full` begins; *end is where they end. */
static ql_status prefix(const ql_chat *c, const json_t *messages, size_t n, const json_t *tools,
                        const json_t *extra, unsigned flags, const ql_str *full, size_t *end)
{
    ql_chat_text part = {0};
    ql_status st = render_some(c, messages, n, ALL, tools, extra, flags, &part);
    if (st == QL_OK && !begins(full, &part.text))
        st = ql_fail(QL_ENOSUP, "what the assistant says cannot be told apart: the chat template renders the first "
                                "%zu messages alone differently than in the whole conversation. Use a template with "
                                "{%% generation %%} marks (chat_template=\"chatml\" is one)", n);
    *end = part.text.len;
    ql_chat_text_free(&part);
    return st;
}

/* Where message k ends, of a template that renders it differently when it is the last one (Qwen3 then shows what was thought): before
 * all that message k + 1 adds, which is what it adds to the messages before k alone. */
static ql_status end_by_next(const ql_chat *c, const json_t *messages, size_t k, const json_t *tools, const json_t *extra, const ql_str *full,
                             size_t *end)
{
    ql_chat_text before = {0}, without = {0};
    size_t with;
    ql_status st = QL_OK;
    QL_GO(prefix(c, messages, k + 2, tools, extra, 0, full, &with));
    QL_GO(render_some(c, messages, k, ALL, tools, extra, 0, &before));
    QL_GO(render_some(c, messages, k + 2, (int64_t)k, tools, extra, 0, &without));
    size_t adds = without.text.len - before.text.len;
    if (!begins(&without.text, &before.text) || !adds || adds > with || memcmp(full->data + with - adds, without.text.data + before.text.len, adds) != 0)
        st = QL_ENOSUP;
    *end = with - adds;
out:
    ql_chat_text_free(&before), ql_chat_text_free(&without);
    return st;
}

/* Without {% generation %} marks: message k is what rendering k + 1 messages adds to rendering k of them and
 * the generation prompt. */
static ql_status spans_by_prefixes(const ql_chat *c, const json_t *messages, const json_t *tools,
                                   const json_t *extra, ql_chat_text *out)
{
    size_t n = json_array_size(messages);
    for (size_t k = 0; k < n; k++) {
        const char *role = json_string_value(json_object_get(json_array_get(messages, k), "role"));
        size_t start, end = out->text.len;
        if (!role || strcmp(role, "assistant") != 0) continue;
        /* Templates that look at messages[0] cannot render none. */
        if (k == 0)
            QL_FAIL(QL_ENOSUP, "what the assistant says cannot be told apart: the conversation begins with it");
        QL_TRY(prefix(c, messages, k, tools, extra, QL_CHAT_PROMPT, &out->text, &start));
        ql_status st = k + 1 < n ? prefix(c, messages, k + 1, tools, extra, 0, &out->text, &end) : QL_OK;
        if (st == QL_ENOSUP && end_by_next(c, messages, k, tools, extra, &out->text, &end) == QL_OK) ql_error_clear(), st = QL_OK;
        QL_TRY(st);
        if (end > start) QL_TRY(add_span(out, start, end));
    }
    return QL_OK;
}

ql_status ql_chat_render(const ql_chat *c, const json_t *messages, const json_t *tools, const json_t *extra,
                         unsigned flags, ql_chat_text *out)
{
    if (!json_is_array(messages)) QL_FAIL(QL_EINVAL, "a conversation must be a list of messages");
    bool marks = ql_chat_has_marks(c);
    QL_TRY(render(c, messages, tools, extra, flags, marks ? add_span : NULL, out));
    if (flags & QL_CHAT_SPANS && !marks) QL_TRY(spans_by_prefixes(c, messages, tools, extra, out));
    return QL_OK;
}

/* ---- templates of our own, for models that bring none -------------------------------------------- */

#define REPLY "{% generation %}{{ m.content + "
static const char chatml[] =
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}" REPLY "'<|im_end|>\\n' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";
static const char alpaca[] =
    "{{ bos_token | default('') }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content + '\\n\\n' }}"
    "{% elif m.role == 'user' %}{{ '### Instruction:\\n' + m.content + '\\n\\n' }}"
    "{% elif m.role == 'assistant' %}{{ '### Response:\\n' }}" REPLY "eos_token + '\\n\\n' }}{% endgeneration %}"
    "{% else %}{{ raise_exception('alpaca knows system, user and assistant, not ' + m.role) }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}";
static const char llama3[] =
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}";
static const char mistral[] =
    "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content + '\\n\\n' %}"
    "{% elif m.role == 'user' %}{{ '[INST] ' + ns.system + m.content + ' [/INST]' }}{% set ns.system = '' %}"
    "{% elif m.role == 'assistant' %}{% generation %}{{ ' ' + m.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ raise_exception('mistral knows system, user and assistant, not ' + m.role) }}{% endif %}"
    "{% endfor %}";

const char *ql_chat_builtin(const char *name)
{
    static const struct {
        const char *name, *text;
    } all[] = {{"chatml", chatml}, {"alpaca", alpaca}, {"llama-3", llama3}, {"mistral", mistral}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (strcmp(name, all[i].name) == 0) return all[i].text;
    return NULL;
}

ql_status ql_chat_template(const char *given, char **out)
{
    const char *built = ql_chat_builtin(given);
    char *text = NULL;
    size_t n = 0;
    if (!built && !strpbrk(given, "{\n")) { /* no template writes the same for every conversation */
        if (!ql_path_is_file(given))
            QL_FAIL(QL_EINVAL, "chat_template: '%.200s' is no template, no file, and none of chatml, alpaca, llama-3, mistral", given);
        QL_TRY(ql_file_read(given, 1 << 20, &text, &n));
        if (memchr(text, 0, n)) {
            free(text);
            QL_FAIL(QL_EINVAL, "chat_template: %.200s is not a text file", given);
        }
    } else if (!(text = strdup(built ? built : given))) {
        QL_FAIL(QL_ENOMEM, "no memory for a chat template");
    }
    *out = text;
    return QL_OK;
}
