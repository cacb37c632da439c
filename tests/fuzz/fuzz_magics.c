/* The parser of %qlora must take any bytes: the first picks line or body, the rest is the text. */
#include "magics/parse.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0) return 0;
    char *text = malloc(size);
    if (!text) return 0;
    memcpy(text, data + 1, size - 1);
    text[size - 1] = 0;
    ql_error_clear();
    if (data[0] & 1) {
        ql_line line;
        if (ql_line_parse(text, &line) == QL_OK) {
            for (int i = 0; i < line.n; i++)
                if (line.words[i].equals >= (int)strlen(line.words[i].text)) abort();
            ql_line_free(&line);
        } else if (!ql_error()[0]) {
            abort();
        }
    } else {
        ql_body body;
        if (ql_body_parse(text, &body) == QL_OK) {
            for (int i = 0; i < body.n; i++) {
                json_t *value = NULL;
                if (body.entries[i].parent >= i) abort();
                if (body.entries[i].parent < 0 && ql_body_value(&body, i, &value) == QL_OK)
                    json_decref(value);
            }
            ql_body_free(&body);
        } else if (!ql_error()[0]) {
            abort();
        }
    }
    free(text);
    return 0;
}
