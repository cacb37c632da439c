/* Any bytes as a chat template: refused, or rendered in bounded time and memory to valid UTF-8. */
#include "core/chat.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static json_t *messages, *tools;
    ql_tok_names names = {.bos_token = "<s>", .eos_token = "</s>"};
    ql_chat *c = NULL;
    ql_chat_text t = {0};
    char *text = malloc(size + 1);
    if (!text) return 0;
    for (size_t i = 0; i < size; i++) text[i] = data[i] ? (char)data[i] : ' ';
    text[size] = 0;
    if (!messages)
        messages = json_loads("[{\"role\":\"system\",\"content\":\"s \\u00e9\"},{\"role\":\"user\",\"content\":\" u\\n\"},"
                              "{\"role\":\"assistant\",\"content\":\"<think>\\nx\\n</think>a\",\"n\":[1,2.5,null,true]},"
                              "{\"role\":\"user\",\"content\":\"v\"},{\"role\":\"assistant\",\"content\":\"b\"}]", 0, NULL);
    if (!tools) tools = json_loads("[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{\"a\":[]}}}]", 0, NULL);
    ql_error_clear();
    if (ql_chat_open(text, &names, &c) == QL_OK &&
        ql_chat_render(c, messages, tools, NULL, QL_CHAT_SPANS | QL_CHAT_PROMPT, &t) == QL_OK) {
        if (ql_utf8_valid(t.text.data, t.text.len) != t.text.len) abort();
        for (size_t i = 0; i < t.n_spans; i++)
            if (t.spans[i].start > t.spans[i].end || t.spans[i].end > t.text.len) abort();
    } else if (!ql_error()[0]) {
        abort();
    }
    ql_chat_text_free(&t), ql_chat_close(c), free(text);
    return 0;
}
