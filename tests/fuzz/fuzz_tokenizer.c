/* Input that begins with '{': a tokenizer.json, which is refused or encodes without harm. Anything else: text, which
 * the fixture tokenizers encode; byte-level ones without a normalizer give the repaired text back when they decode. */
#include "core/tokenizer.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { BACK = 1, ENDS = 2 }; /* decoding gives the text back; the last token ends where the text does */

static void encode(ql_tok *t, const char *p, size_t n, int exact)
{
    ql_ids ids = {0}, ends = {0};
    ql_str good = {0}, back = {0};
    if (ql_tok_encode_ends(t, p, n, 0, &ids, &ends) != QL_OK || ids.len != ends.len) abort();
    for (size_t i = 0; i < ids.len; i++)
        if (ids.data[i] < 0 || ids.data[i] >= ql_tok_size(t)) abort();
    if (ql_tok_decode(t, ids.data, ids.len, QL_TOK_SPECIALS, &back) != QL_OK) abort();
    if (ql_utf8_repair(p, n, &good) != QL_OK || ql_utf8_valid(back.data, back.len) != back.len) abort();
    if (exact & BACK && (good.len != back.len || memcmp(good.data ? good.data : "", back.data, back.len) != 0)) abort();
    if (exact & ENDS && ids.len && (size_t)ends.data[ids.len - 1] != good.len) abort();
    ql_ids_free(&ids), ql_ids_free(&ends), ql_str_free(&good), ql_str_free(&back);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const names[] = {"tests/text/data/llama", "tests/text/data/qwen", "tests/text/data/flags",
                                        "tests/text/data/mistral", "tests/text/data/llama2", "tests/text/data/always"};
    static ql_tok *fixed[6];
    const char *p = (const char *)data;
    ql_tok *t = NULL;
    ql_error_clear();
    for (int i = 0; i < 6; i++)
        if (!fixed[i] && ql_tok_open(names[i], &fixed[i]) != QL_OK) abort();
    if (size && p[0] == '{') {
        if (ql_tok_parse(p, size, &t) == QL_OK) encode(t, p, size, 0);
        else if (!ql_error()[0]) abort();
        ql_tok_close(t);
    } else {
        for (int i = 0; i < 6; i++) encode(fixed[i], p, size, i == 0 ? BACK | ENDS : i > 2 ? ENDS : 0);
    }
    return 0;
}
