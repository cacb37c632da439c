/* Conversations to text by a model's chat_template (core/jinja.h runs it), and which parts of that text
 * the assistant said. */
#ifndef QL_CHAT_H
#define QL_CHAT_H

#include "core/tokenizer.h"

#include <jansson.h>

typedef struct {
    size_t start, end; /* bytes */
} ql_span;

/* A rendered conversation. */
typedef struct {
    ql_str text;
    ql_span *spans; /* what the assistant said, ascending */
    size_t n_spans, cap;
} ql_chat_text;
void ql_chat_text_free(ql_chat_text *t);

enum {
    QL_CHAT_PROMPT = 1, /* add_generation_prompt: end where the assistant begins */
    QL_CHAT_SPANS = 2,  /* find the spans: {% generation %} markers, else by rendering prefixes */
};

typedef struct ql_chat ql_chat;
/* Compiles a template; the names supply bos_token and so on. Refuses what the Jinja subset lacks. */
ql_status ql_chat_open(const char *jinja, const ql_tok_names *names, ql_chat **out) QL_MUST_USE;
void ql_chat_close(ql_chat *c);
bool ql_chat_has_marks(const ql_chat *c); /* {% generation %} */
/* messages: array of {"role","content",…}; tools: array or NULL; extra: object of further variables
 * (enable_thinking, date_string …) or NULL. Replaces out's content. QL_EINVAL also when the template
 * itself raises; QL_ENOSUP where spans are asked for and rendering is not prefix-stable. */
ql_status ql_chat_render(const ql_chat *c, const json_t *messages, const json_t *tools,
                         const json_t *extra, unsigned flags, ql_chat_text *out) QL_MUST_USE;
/* What a chat_template setting means: a built-in template's name, a template's text, or a file of one. Caller frees. */
ql_status ql_chat_template(const char *given, char **out) QL_MUST_USE;
/* Built-in templates by name: "chatml", "alpaca", "llama-3", "mistral"; NULL: none of that name. */
const char *ql_chat_builtin(const char *name);

#endif
