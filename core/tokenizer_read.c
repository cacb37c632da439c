/* A tokenizer from its files. */
#include "core/tokenizer_parts.h"

#include "core/file.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_IDS = 1 << 24 };

/* ---- reading tokenizer.json -------------------------------------------------------------------- */

static const char *type_of(const json_t *j)
{
    const char *t = json_string_value(json_object_get(j, "type"));
    return t ? t : "(none)";
}

static bool is_blank(const json_t *j) /* absent, null, false, "" */
{
    return !j || json_is_null(j) || json_is_false(j) ||
           (json_is_string(j) && json_string_length(j) == 0);
}

static ql_status read_normalizer(ql_tok *t, const json_t *j)
{
    if (is_blank(j)) return QL_OK;
    if (strcmp(type_of(j), "Sequence") == 0) {
        size_t i;
        json_t *part;
        json_array_foreach(json_object_get(j, "normalizers"), i, part)
            QL_TRY(read_normalizer(t, part));
        return QL_OK;
    }
    if (strcmp(type_of(j), "NFC") != 0)
        QL_FAIL(QL_ENOSUP, "the normalizer %s is not supported: only NFC or none", type_of(j));
    t->nfc = true;
    return QL_OK;
}

/* The two expressions, apart from their digits. */
#define HEAD "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}"
#define TAIL "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

static ql_status read_split(ql_tok *t, const json_t *j)
{
    const char *re = json_string_value(json_object_get(json_object_get(j, "pattern"), "Regex"));
    const char *behavior = json_string_value(json_object_get(j, "behavior"));
    if (re && strcmp(re, HEAD "{1,3}" TAIL) == 0) t->digits = 3;
    else if (re && strcmp(re, HEAD TAIL) == 0) t->digits = 1;
    else
        QL_FAIL(QL_ENOSUP, "the pre-tokenizer's expression is neither Llama-3's nor Qwen's: %.200s",
                re ? re : "(not a Regex)");
    if (!behavior || strcmp(behavior, "Isolated") != 0 || !is_blank(json_object_get(j, "invert")))
        QL_FAIL(QL_ENOSUP, "the pre-tokenizer splits with behavior %s%s; only Isolated is supported",
                behavior ? behavior : "(none)",
                is_blank(json_object_get(j, "invert")) ? "" : ", inverted");
    return QL_OK;
}

static ql_status read_pre_tokenizer(ql_tok *t, const json_t *j)
{
    const json_t *list = json_object_get(j, "pretokenizers");
    if (strcmp(type_of(j), "Sequence") != 0 || json_array_size(list) != 2)
        QL_FAIL(QL_ENOSUP, "the pre-tokenizer %s is not supported: only Split then ByteLevel "
                           "(Llama 3, Qwen 2, 2.5 and 3) is", type_of(j));
    const json_t *split = json_array_get(list, 0), *bytes = json_array_get(list, 1);
    if (strcmp(type_of(split), "Split") != 0 || strcmp(type_of(bytes), "ByteLevel") != 0)
        QL_FAIL(QL_ENOSUP, "the pre-tokenizer %s then %s is not supported: only Split then ByteLevel is",
                type_of(split), type_of(bytes));
    if (!is_blank(json_object_get(bytes, "add_prefix_space")) ||
        !json_is_false(json_object_get(bytes, "use_regex")))
        QL_FAIL(QL_ENOSUP, "the ByteLevel pre-tokenizer must have add_prefix_space and use_regex false");
    return read_split(t, split);
}

static ql_status check_model(const json_t *m)
{
    static const char *const off[] = {"dropout", "continuing_subword_prefix", "end_of_word_suffix"};
    const char *type = json_string_value(json_object_get(m, "type"));
    /* Old files leave the type out. */
    if (type ? strcmp(type, "BPE") != 0 : !json_object_get(m, "merges"))
        QL_FAIL(QL_ENOSUP, "a %s tokenizer is not supported: only BPE is",
                type ? type : "nameless");
    for (size_t i = 0; i < sizeof off / sizeof *off; i++)
        if (!is_blank(json_object_get(m, off[i])))
            QL_FAIL(QL_ENOSUP, "the BPE model sets %s, which is not supported", off[i]);
    if (!json_is_object(json_object_get(m, "vocab")) || !json_is_array(json_object_get(m, "merges")))
        QL_FAIL(QL_EINVAL, "the BPE model has no vocab or no merges");
    return QL_OK;
}

static ql_status check_id(const json_t *id, const char *what)
{
    json_int_t v = json_integer_value(id);
    if (!json_is_integer(id) || v < 0 || v >= MAX_IDS)
        QL_FAIL(QL_EINVAL, "token '%.60s' has an id that is not between 0 and %d", what, MAX_IDS - 1);
    return QL_OK;
}

static ql_status read_merges(ql_tok *t, const json_t *merges)
{
    size_t i;
    json_t *m;
    json_array_foreach(merges, i, m)
    {
        if (json_is_string(m)) {
            const char *s = json_string_value(m), *end = s + json_string_length(m);
            const char *cut = memchr(s, ' ', (size_t)(end - s));
            if (!cut || memchr(cut + 1, ' ', (size_t)(end - cut - 1)))
                QL_FAIL(QL_EINVAL, "merge %zu ('%.60s') is not two parts with one space between", i, s);
            QL_TRY(ql_bpe_add_merge(t->bpe, s, (size_t)(cut - s), cut + 1, (size_t)(end - cut - 1)));
            continue;
        }
        const json_t *l = json_array_get(m, 0), *r = json_array_get(m, 1);
        if (json_array_size(m) != 2 || !json_is_string(l) || !json_is_string(r))
            QL_FAIL(QL_EINVAL, "merge %zu is neither a string nor a pair of strings", i);
        QL_TRY(ql_bpe_add_merge(t->bpe, json_string_value(l), json_string_length(l),
                                json_string_value(r), json_string_length(r)));
    }
    return QL_OK;
}

static ql_status read_model(ql_tok *t, const json_t *m, const json_t *extra)
{
    const json_t *vocab = json_object_get(m, "vocab"), *merges = json_object_get(m, "merges");
    const char *key;
    json_t *id, *tok;
    size_t i, n_tokens = json_object_size(vocab) + json_array_size(extra);
    json_object_foreach((json_t *)(uintptr_t)vocab, key, id)
    {
        QL_TRY(check_id(id, key));
        if (json_integer_value(id) >= t->size) t->size = (int32_t)json_integer_value(id) + 1;
    }
    json_array_foreach(extra, i, tok)
    {
        const char *content = json_string_value(json_object_get(tok, "content"));
        id = json_object_get(tok, "id");
        if (!content || !*content)
            QL_FAIL(QL_EINVAL, "added token %zu has no content", i);
        QL_TRY(check_id(id, content));
        if (json_integer_value(id) >= t->size) t->size = (int32_t)json_integer_value(id) + 1;
    }
    QL_TRY(ql_bpe_new(t->pieces, t->size, n_tokens, json_array_size(merges), &t->bpe));
    void *it = json_object_iter((json_t *)(uintptr_t)vocab);
    for (; it; it = json_object_iter_next((json_t *)(uintptr_t)vocab, it)) {
        key = json_object_iter_key(it);
        QL_TRY(ql_bpe_add_token(t->bpe, key, strlen(key),
                                (int32_t)json_integer_value(json_object_iter_value(it))));
    }
    QL_TRY(ql_bpe_seal(t->bpe, json_is_true(json_object_get(m, "ignore_merges"))));
    return read_merges(t, merges);
}

static int by_text(const void *x, const void *y)
{
    const added *a = *(const added *const *)x, *b = *(const added *const *)y;
    int d = (unsigned char)a->text.data[0] - (unsigned char)b->text.data[0];
    if (d) return d;
    if (a->text.len != b->text.len) return a->text.len > b->text.len ? -1 : 1;
    d = memcmp(a->text.data, b->text.data, a->text.len);
    if (d) return d;
    return a < b ? -1 : a > b; /* the same text after the normalizer: the first in the file */
}

static ql_status build_matcher(const ql_tok *t, bool normalized, matcher *m)
{
    m->list = calloc(t->n_added + 1, sizeof *m->list);
    if (!m->list) QL_FAIL(QL_ENOMEM, "no memory for added tokens");
    for (size_t i = 0; i < t->n_added; i++)
        if (t->added[i].normalized == normalized && t->added[i].text.len)
            m->list[m->n++] = t->added + i;
    qsort(m->list, m->n, sizeof *m->list, by_text);
    size_t at = 0;
    for (unsigned c = 0; c < 256; c++) {
        m->first[c] = (uint32_t)at;
        while (at < m->n && (unsigned char)m->list[at]->text.data[0] == c) at++;
    }
    m->first[256] = (uint32_t)at;
    return QL_OK;
}

static ql_status read_added(ql_tok *t, const json_t *list)
{
    size_t i;
    json_t *j;
    t->added = calloc(json_array_size(list) + 1, sizeof *t->added);
    t->special = calloc((size_t)t->size + 1, 1);
    if (!t->added || !t->special) QL_FAIL(QL_ENOMEM, "no memory for added tokens");
    json_array_foreach(list, i, j)
    {
        added *a = t->added + t->n_added++;
        const json_t *content = json_object_get(j, "content");
        a->id = (int32_t)json_integer_value(json_object_get(j, "id"));
        a->special = json_is_true(json_object_get(j, "special"));
        a->normalized = json_is_true(json_object_get(j, "normalized"));
        a->lstrip = json_is_true(json_object_get(j, "lstrip"));
        a->rstrip = json_is_true(json_object_get(j, "rstrip"));
        a->single_word = json_is_true(json_object_get(j, "single_word"));
        bool prepended;
        QL_TRY(ql_str_add(&a->name, json_string_value(content), json_string_length(content)));
        if (a->normalized && t->nfc) QL_TRY(ql_nfc(a->name.data, a->name.len, &a->text));
        else if (a->normalized && t->normalizes) QL_TRY(ql_pieces_spell(t, a->name.data, a->name.len, true, &a->text, &prepended));
        else QL_TRY(ql_str_add(&a->text, a->name.data, a->name.len));
        /* Decoded by the same inverse alphabet as the rest, which garbles added tokens with letters
         * beyond ASCII; the library does so too. */
        const ql_str *spelled = t->pieces ? &a->name : &a->text;
        t->special[a->id] |= (uint8_t)(a->special | (a->text.len != a->name.len) << 1);
        QL_TRY(ql_bpe_add_token(t->bpe, spelled->data, spelled->len, a->id));
    }
    QL_TRY(build_matcher(t, false, &t->raw));
    return build_matcher(t, true, &t->normal);
}

/* TemplateProcessing's "single": special tokens before and after the one Sequence A. */
static ql_status read_template(ql_tok *t, const json_t *j)
{
    size_t i, k;
    json_t *part, *id;
    bool text_seen = false;
    json_array_foreach(json_object_get(j, "single"), i, part)
    {
        const json_t *special = json_object_get(part, "SpecialToken");
        if (json_object_get(part, "Sequence") && !text_seen) {
            text_seen = true;
            continue;
        }
        const char *name = json_string_value(json_object_get(special, "id"));
        const json_t *ids = json_object_get(
            name ? json_object_get(json_object_get(j, "special_tokens"), name) : NULL, "ids");
        if (!json_is_array(ids))
            QL_FAIL(QL_EINVAL, "the post-processor's template has a part that is neither the text nor "
                               "a known special token");
        json_array_foreach(ids, k, id)
        {
            QL_TRY(check_id(id, name));
            QL_TRY(ql_ids_push(text_seen ? &t->suffix : &t->prefix, (int32_t)json_integer_value(id)));
        }
    }
    if (!text_seen) QL_FAIL(QL_EINVAL, "the post-processor's template leaves the text out");
    return QL_OK;
}

static ql_status read_post_processor(ql_tok *t, const json_t *j)
{
    if (is_blank(j) || strcmp(type_of(j), "ByteLevel") == 0) return QL_OK;
    if (strcmp(type_of(j), "TemplateProcessing") == 0) {
        if (t->prefix.len || t->suffix.len)
            QL_FAIL(QL_ENOSUP, "two TemplateProcessing post-processors are not supported");
        return read_template(t, j);
    }
    if (strcmp(type_of(j), "Sequence") != 0)
        QL_FAIL(QL_ENOSUP, "the post-processor %s is not supported: only ByteLevel and "
                           "TemplateProcessing are", type_of(j));
    size_t i;
    json_t *part;
    json_array_foreach(json_object_get(j, "processors"), i, part)
    {
        if (strcmp(type_of(part), "Sequence") == 0)
            QL_FAIL(QL_ENOSUP, "post-processor sequences inside sequences are not supported");
        QL_TRY(read_post_processor(t, part));
    }
    return QL_OK;
}

static ql_status read_decoder(const json_t *j)
{
    if (strcmp(type_of(j), "ByteLevel") != 0)
        QL_FAIL(QL_ENOSUP, "the decoder %s is not supported: only ByteLevel is", type_of(j));
    return QL_OK;
}

static ql_status new_tok(ql_tok **out)
{
    ql_tok *t = calloc(1, sizeof *t);
    if (!t) QL_FAIL(QL_ENOMEM, "no memory for a tokenizer");
    if (pthread_mutex_init(&t->lock, NULL)) {
        free(t);
        QL_FAIL(QL_ENOMEM, "no mutex for a tokenizer");
    }
    t->names = (ql_tok_names){.bos = -1, .eos = -1, .pad = -1, .unk = -1};
    *out = t;
    return QL_OK;
}

static ql_status parse_root(const json_t *root, ql_tok *t)
{
    const json_t *model = json_object_get(root, "model"), *list = json_object_get(root, "added_tokens");
    if (!json_is_object(model)) QL_FAIL(QL_EINVAL, "there is no \"model\" in it");
    QL_TRY(check_model(model));
    if (is_blank(json_object_get(model, "byte_fallback"))) {
        QL_TRY(read_normalizer(t, json_object_get(root, "normalizer")));
        QL_TRY(read_pre_tokenizer(t, json_object_get(root, "pre_tokenizer")));
        QL_TRY(read_decoder(json_object_get(root, "decoder")));
    } else {
        QL_TRY(ql_pieces_read(t, root));
    }
    QL_TRY(read_model(t, model, list));
    QL_TRY(read_added(t, list));
    return read_post_processor(t, json_object_get(root, "post_processor"));
}

ql_status ql_tok_parse(const char *json, size_t n, ql_tok **out)
{
    json_error_t err;
    json_t *root = json_loadb(json, n, JSON_ALLOW_NUL, &err);
    ql_tok *t = NULL;
    ql_status st = QL_OK;
    if (!root) {
        st = ql_fail(QL_EINVAL, "line %d: %s", err.line, err.text);
        goto out;
    }
    QL_GO(new_tok(&t));
    t->hash = ql_hash(0, json, n);
    QL_GO(parse_root(root, t));
    *out = t, t = NULL;
out:
    if (st != QL_OK) ql_error_prefix("tokenizer.json: ");
    ql_tok_close(t);
    json_decref(root);
    return st;
}

void ql_tok_close(ql_tok *t)
{
    if (!t) return;
    ql_bpe_free(t->bpe);
    for (size_t i = 0; t->added && i < t->n_added; i++) ql_str_free(&t->added[i].name), ql_str_free(&t->added[i].text);
    free(t->added), free(t->raw.list), free(t->normal.list), free(t->special), free(t->jinja);
    ql_ids_free(&t->prefix), ql_ids_free(&t->suffix), ql_ids_free(&t->stops);
    json_decref(t->config);
    pthread_mutex_destroy(&t->lock);
    free(t);
}

/* ---- the folder -------------------------------------------------------------------------------- */

/* Reads a whole file; a missing one leaves out empty (data NULL) and is not an error. */
static ql_status read_file(const char *folder, const char *name, ql_str *out)
{
    enum { LONGEST = 1 << 30 };
    char path[QL_PATH_MAX];
    QL_TRY(ql_path_join(path, folder, name));
    if (access(path, F_OK) && (errno == ENOENT || errno == ENOTDIR)) return QL_OK;
    return ql_file_read(path, LONGEST, &out->data, &out->len);
}

static ql_status read_json(const char *folder, const char *name, json_t **out)
{
    ql_str s = {0};
    ql_status st = read_file(folder, name, &s);
    json_error_t err;
    *out = NULL;
    if (st == QL_OK && s.data) {
        *out = json_loadb(s.data, s.len, JSON_ALLOW_NUL, &err);
        if (!*out)
            st = ql_fail(QL_EINVAL, "%s/%s: line %d: %s", folder, name, err.line, err.text);
    }
    ql_str_free(&s);
    return st;
}

/* A token is named by a string or by an object with "content". */
static void read_name(const ql_tok *t, const json_t *config, const char *key, const char **name,
                      int32_t *id)
{
    const json_t *j = json_object_get(config, key);
    if (json_is_object(j)) j = json_object_get(j, "content");
    if (*name || !json_is_string(j)) return;
    *name = json_string_value(j);
    *id = ql_tok_find(t, *name);
}

static const char *find_template(const json_t *config)
{
    const json_t *j = json_object_get(config, "chat_template");
    size_t i;
    json_t *named;
    if (json_is_string(j)) return json_string_value(j);
    json_array_foreach(j, i, named)
    {
        const char *name = json_string_value(json_object_get(named, "name"));
        if (name && strcmp(name, "default") == 0)
            return json_string_value(json_object_get(named, "template"));
    }
    return NULL;
}

static void read_names(ql_tok *t, const json_t *config)
{
    ql_tok_names *n = &t->names;
    read_name(t, config, "bos_token", &n->bos_token, &n->bos);
    read_name(t, config, "eos_token", &n->eos_token, &n->eos);
    read_name(t, config, "pad_token", &n->pad_token, &n->pad);
    read_name(t, config, "unk_token", &n->unk_token, &n->unk);
}

static ql_status read_config(ql_tok *t, const char *folder)
{
    static const char *const files[] = {"tokenizer_config.json", "special_tokens_map.json"};
    json_t *c[2] = {NULL, NULL};
    ql_tok_names *n = &t->names;
    ql_str jinja = {0};
    t->config = json_array();
    if (!t->config) QL_FAIL(QL_ENOMEM, "no memory for %s", files[0]);
    for (int i = 0; i < 2; i++) {
        QL_TRY(read_json(folder, files[i], &c[i]));
        if (c[i] && json_array_append_new(t->config, c[i])) QL_FAIL(QL_ENOMEM, "no memory for %s", files[i]);
    }
    /* As transformers has it: the map wins over a tokenizer_config.json from before there was added_tokens_decoder. */
    int first = !json_object_get(c[0], "added_tokens_decoder");
    read_names(t, c[first]), read_names(t, c[!first]);
    n->chat_template = find_template(c[0]);
    ql_status st = read_file(folder, "chat_template.jinja", &jinja); /* wins over the config */
    if (jinja.data) n->chat_template = t->jinja = jinja.data;
    return st;
}

static ql_status add_stop(ql_tok *t, json_int_t id)
{
    if (id < 0 || id >= MAX_IDS) return QL_OK;
    for (size_t i = 0; i < t->stops.len; i++)
        if (t->stops.data[i] == id) return QL_OK;
    return ql_ids_push(&t->stops, (int32_t)id);
}

/* Files of the model, not of the tokenizer: what is wrong with them is for others to say. */
static ql_status read_stops(ql_tok *t, const char *folder)
{
    static const char *const files[] = {"config.json", "generation_config.json"};
    QL_TRY(add_stop(t, t->names.eos));
    for (int k = 0; k < 2; k++) {
        json_t *c = NULL, *one;
        size_t i;
        ql_status st = QL_OK;
        if (read_json(folder, files[k], &c) != QL_OK) ql_error_clear();
        const json_t *eos = json_object_get(c, "eos_token_id");
        if (json_is_integer(eos)) st = add_stop(t, json_integer_value(eos));
        json_array_foreach((json_t *)(uintptr_t)eos, i, one)
            if (st == QL_OK && json_is_integer(one)) st = add_stop(t, json_integer_value(one));
        json_decref(c);
        QL_TRY(st);
    }
    return QL_OK;
}

ql_status ql_tok_open(const char *folder, ql_tok **out)
{
    ql_str json = {0};
    ql_tok *t = NULL;
    ql_status st = QL_OK;
    QL_GO(read_file(folder, "tokenizer.json", &json));
    if (!json.data) {
        st = ql_fail(QL_EINVAL, "there is no tokenizer.json; models with only tokenizer.model or "
                                "vocab.json are not supported (save them once with transformers, which "
                                "writes tokenizer.json)");
        goto out;
    }
    QL_GO(ql_tok_parse(json.data, json.len, &t));
    QL_GO(read_config(t, folder));
    QL_GO(read_stops(t, folder));
    *out = t, t = NULL;
out:
    if (st != QL_OK) ql_error_prefix("%s: ", folder);
    ql_tok_close(t);
    ql_str_free(&json);
    return st;
}
