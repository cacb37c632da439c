#include "magics/parse.h"

#include "magics/buf.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

enum { WORDS_MAX = 4096, ENTRIES_MAX = 4096, DEPTH_MAX = 8 };

static int blank(char c)
{
    return c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\f' || c == '\v';
}

static void *grow(void *items, int n, size_t size)
{
    /* Capacity doubles at powers of two from 8, so no capacity field is kept. */
    if (n != 0 && (n < 8 || (n & (n - 1)) != 0)) return items;
    return realloc(items, (n < 8 ? 8 : (size_t)n * 2) * size);
}

static char *copy(const char *text, size_t n)
{
    char *p = malloc(n + 1);
    if (!p) return NULL;
    memcpy(p, text, n);
    p[n] = 0;
    return p;
}

/* ---- lines -------------------------------------------------------------------------------------
 */

/* {name}, {cfg.lr} or {names[0]}: what IPython expands where it can. JSON's {"a": 1} is not. */
static size_t unexpanded(const char *p)
{
    size_t i = 1;
    if (!isalpha((unsigned char)p[i]) && p[i] != '_') return 0;
    while (isalnum((unsigned char)p[i]) || p[i] == '_' || p[i] == '.' || p[i] == '[' || p[i] == ']')
        i++;
    return p[i] == '}' ? i + 1 : 0;
}

/* "~/models" without quotes, as a shell reads it; "~" alone may begin a prompt. *p stands on the ~ and is left behind it. */
static void home(const char **p, const char *end, ql_buf *word)
{
    const char *folder = end - *p > 1 && **p == '~' && (*p)[1] == '/' ? getenv("HOME") : NULL;
    if (!folder || !*folder) return;
    ql_buf_put(word, folder);
    ++*p;
}

/* A quoted part. *p stands on the quote and is left behind the closing one. */
static ql_status quoted(const char *line, const char **p, ql_buf *word)
{
    char q = **p;
    int column = (int)(*p - line) + 1;
    for (const char *s = *p + 1; *s; s++) {
        if (*s == q) {
            *p = s + 1;
            return QL_OK;
        }
        if (q == '"' && *s == '\\' && s[1]) {
            s++;
            const char *names = "nt", *at = strchr(names, *s);
            if (at)
                ql_buf_add(word, at - names == 0 ? "\n" : "\t", 1);
            else if (*s == '"' || *s == '\\')
                ql_buf_add(word, s, 1);
            else
                ql_buf_add(word, s - 1, 2);
            continue;
        }
        ql_buf_add(word, s, 1);
    }
    QL_FAIL(QL_EINVAL, "column %d: this %c has no closing %c", column, q, q);
}

/* A JSON list or object without quotes round it; kept as it stands. */
static ql_status bracketed(const char *line, const char **p, ql_buf *word)
{
    const char *s = *p;
    int depth = 0;
    char in = 0;
    for (; *s; s++) {
        ql_buf_add(word, s, 1);
        if (in) {
            if (*s == '\\' && in == '"' && s[1])
                ql_buf_add(word, ++s, 1);
            else if (*s == in)
                in = 0;
            continue;
        }
        if (*s == '"' || *s == '\'') in = *s;
        if (*s == '[' || *s == '{') depth++;
        if ((*s == ']' || *s == '}') && --depth == 0) {
            *p = s + 1;
            return QL_OK;
        }
    }
    QL_FAIL(QL_EINVAL, "column %d: this %c is never closed", (int)(*p - line) + 1, **p);
}

static ql_status read_word(const char *line, const char **at, ql_buf *b, ql_word *w)
{
    const char *p = *at;
    memset(w, 0, sizeof *w);
    w->column = (int)(p - line) + 1;
    w->equals = -1;
    while (*p && !blank(*p)) {
        int fresh = p == *at || (w->equals >= 0 && (size_t)w->equals + 1 == b->len);
        if (fresh && *p == '~') home(&p, p + strcspn(p, " \t\n\r\f\v"), b);
        if (!*p || blank(*p)) break;
        size_t n = *p == '{' ? unexpanded(p) : 0;
        if (n > 0)
            QL_FAIL(QL_EINVAL,
                    "column %d: %.*s was not filled in: there is no variable %.*s in this notebook",
                    (int)(p - line) + 1, (int)n, p, (int)n - 2, p + 1);
        if (*p == '"' || (*p == '\'' && fresh)) {
            w->quoted = w->quoted || w->equals < 0;
            QL_TRY(quoted(line, &p, b));
        } else if (fresh && (*p == '[' || *p == '{')) {
            QL_TRY(bracketed(line, &p, b));
        } else {
            if (*p == '=' && w->equals < 0 && !w->quoted) w->equals = (int)b->len;
            ql_buf_add(b, p++, 1);
        }
    }
    if (b->failed || !(w->text = copy(ql_buf_str(b), b->len))) QL_FAIL(QL_ENOMEM, "out of memory");
    *at = p;
    return QL_OK;
}

/* A trailing ; outside quotes silences: it is the last character of the last word. */
static void take_semicolon(ql_line *l, const char *line, const char *end)
{
    if (end == line || end[-1] != ';' || l->n == 0) return;
    ql_word *w = &l->words[l->n - 1];
    size_t n = strlen(w->text);
    if (n == 0 || w->text[n - 1] != ';') return;
    l->silent = 1;
    while (n > 0 && w->text[n - 1] == ';') w->text[--n] = 0;
    if (n == 0 && !w->quoted) {
        free(w->text);
        l->n--;
    }
}

ql_status ql_line_parse(const char *line, ql_line *out)
{
    ql_status st = QL_OK;
    ql_line l = {0};
    ql_buf b = {0};
    const char *p = line, *end = line;
    for (;;) {
        while (blank(*p)) p++;
        if (!*p || *p == '#') break;
        if (l.n == WORDS_MAX)
            QL_GO(ql_fail(QL_EINVAL, "more than %d words in one line", WORDS_MAX));
        ql_word *more = grow(l.words, l.n, sizeof *more);
        if (!more) QL_GO(ql_fail(QL_ENOMEM, "out of memory"));
        l.words = more;
        ql_buf_clear(&b);
        QL_GO(read_word(line, &p, &b, &l.words[l.n]));
        l.n++;
        end = p;
    }
    take_semicolon(&l, line, end);
    if (!(l.raw = copy(line, (size_t)(end - line)))) QL_GO(ql_fail(QL_ENOMEM, "out of memory"));
    *out = l;
    memset(&l, 0, sizeof l);
out:
    ql_line_free(&l);
    ql_buf_free(&b);
    return st;
}

void ql_line_free(ql_line *line)
{
    for (int i = 0; i < line->n; i++) free(line->words[i].text);
    free(line->words);
    free(line->raw);
    memset(line, 0, sizeof *line);
}

/* ---- bodies ------------------------------------------------------------------------------------
 */

static ql_status add_entry(ql_body *b, const char *key, size_t n_key, int line, int parent,
                           ql_entry **out)
{
    if (b->n == ENTRIES_MAX) QL_FAIL(QL_EINVAL, "line %d: more than %d entries", line, ENTRIES_MAX);
    ql_entry *more = grow(b->entries, b->n, sizeof *more);
    if (!more) QL_FAIL(QL_ENOMEM, "out of memory");
    b->entries = more;
    ql_entry *e = &more[b->n];
    memset(e, 0, sizeof *e);
    e->line = line;
    e->parent = parent;
    if (key && !(e->key = copy(key, n_key))) QL_FAIL(QL_ENOMEM, "out of memory");
    b->n++;
    if (parent >= 0) b->entries[parent].children++;
    *out = e;
    return QL_OK;
}

/* Which line a key of a JSON body stands on: jansson keeps no positions, and keys are written once.
 */
static int line_of_key(const char *text, const char *key)
{
    ql_buf b = {0};
    ql_buf_printf(&b, "\"%s\"", key);
    const char *at = strstr(text, ql_buf_str(&b));
    int line = 1;
    for (const char *p = text; at && p < at; p++) line += *p == '\n';
    ql_buf_free(&b);
    return line;
}

static ql_status json_body(const char *text, ql_body *out)
{
    json_error_t err;
    json_t *root = json_loads(text, JSON_REJECT_DUPLICATES, &err), *value;
    const char *key;
    ql_status st = QL_OK;
    if (!root) QL_FAIL(QL_EINVAL, "line %d, column %d: %s", err.line, err.column, err.text);
    json_object_foreach(root, key, value)
    {
        ql_entry *e;
        QL_GO(add_entry(out, key, strlen(key), line_of_key(text, key), -1, &e));
        e->value = json_incref(value);
        if (!(e->text = copy("", 0))) QL_GO(ql_fail(QL_ENOMEM, "out of memory"));
    }
out:
    json_decref(root);
    return st;
}

/* "SFTConfig(" or "[q_proj,": what goes on in the next line. */
static int open_ended(const char *p, const char *end)
{
    int depth = 0;
    if (p == end || !(strchr("[{", *p) || strchr("([{", end[-1]))) return 0;
    for (; p < end; p++) depth += (strchr("([{", *p) != NULL) - (strchr(")]}", *p) != NULL);
    return depth > 0;
}

/* The value of one line: its comment dropped, quotes read; the comma too that stands there in pasted Python. */
static ql_status line_value(const char *p, const char *end, int line, ql_entry *e)
{
    ql_status st = QL_OK;
    ql_buf b = {0};
    while (p < end && blank(*p)) p++;
    if (p < end && (*p == '"' || *p == '\'')) {
        char *part = copy(p, (size_t)(end - p));
        const char *s = part;
        if (!part) QL_FAIL(QL_ENOMEM, "out of memory");
        st = quoted(part, &s, &b);
        while (st == QL_OK && blank(*s)) s++;
        if (st == QL_OK && *s == ',')
            for (s++; blank(*s);) s++;
        if (st != QL_OK)
            ql_error_prefix("line %d: ", line);
        else if (*s && *s != '#')
            st = ql_fail(QL_EINVAL, "line %d: '%.20s' stands behind the closing quote", line, s);
        free(part);
        QL_GO(st);
        if (!(e->value = ql_text_json(ql_buf_str(&b), b.len)))
            QL_GO(ql_fail(QL_ENOMEM, "out of memory"));
    } else {
        const char *stop = p;
        while (stop < end && !(*stop == '#' && (stop == p || blank(stop[-1])))) stop++;
        while (stop > p && blank(stop[-1])) stop--;
        if (stop > p + 1 && stop[-1] == ',') stop--;
        while (stop > p && blank(stop[-1])) stop--;
        home(&p, stop, &b);
        ql_buf_add(&b, p, (size_t)(stop - p));
        if (open_ended(p, stop))
            QL_GO(ql_fail(QL_EINVAL, "line %d: '%.*s' is not closed: a value stands in one line, and pasted arguments without the call around them", line,
                          (int)ql_min64(stop - p, 40), p));
        for (const char *s = p; s < stop; s++) {
            size_t n = *s == '{' ? unexpanded(s) : 0;
            if (n > 0)
                QL_GO(ql_fail(QL_EINVAL,
                              "line %d: %.*s is not filled in inside a %%%%qlora cell; write the "
                              "value, or use a "
                              "%%qlora line or qlora.run(…)",
                              line, (int)n, s));
        }
    }
    if (b.failed || !(e->text = copy(ql_buf_str(&b), b.len)))
        st = ql_fail(QL_ENOMEM, "out of memory");
out:
    ql_buf_free(&b);
    return st;
}

typedef struct {
    int indent, entry;
} level;

/* Which section a line of this indentation stands in. */
static ql_status find_parent(const ql_body *b, level *stack, int *depth, int indent, int line,
                             int *parent)
{
    while (*depth > 0 && stack[*depth - 1].indent > indent) --*depth;
    if (*depth > 0 && stack[*depth - 1].indent == indent) {
        --*depth;
    } else if (b->n > 0) {
        /* Deeper than the line before it: that line must be a section's head. */
        const ql_entry *last = &b->entries[b->n - 1];
        if (*depth == 0 || stack[*depth - 1].entry != b->n - 1 || !last->key || last->value ||
            last->text[0])
            QL_FAIL(QL_EINVAL, "line %d: its indentation fits no line above", line);
    }
    if (*depth == DEPTH_MAX)
        QL_FAIL(QL_EINVAL, "line %d: more than %d levels of sections", line, DEPTH_MAX);
    *parent = *depth > 0 ? stack[*depth - 1].entry : -1;
    return QL_OK;
}

static ql_status lines_body(const char *text, ql_body *out)
{
    level stack[DEPTH_MAX];
    int depth = 0, line = 0;
    for (const char *p = text, *end; *p; p = *end ? end + 1 : end) {
        end = p + strcspn(p, "\n");
        line++;
        const char *s = p;
        while (s < end && blank(*s)) s++;
        if (s == end || *s == '#') continue;
        int parent = -1, indent = (int)(s - p), item = *s == '-' && (s + 1 == end || blank(s[1]));
        QL_TRY(find_parent(out, stack, &depth, indent, line, &parent));
        const char *k = s, *rest = s + 1;
        if (!item) {
            while (k < end && *k != ':' && *k != '=') k++;
            if (k == end)
                QL_FAIL(QL_EINVAL, "line %d: expected `key: value`, found '%.*s'", line,
                        (int)ql_min64(end - s, 40), s);
            rest = k + 1;
            while (k > s && blank(k[-1])) k--;
            if (k > s + 1 && (*s == '"' || *s == '\'') && k[-1] == *s) s++, k--;
            if (k == s)
                QL_FAIL(QL_EINVAL, "line %d: there is no name in front of the '%c'", line,
                        rest[-1]);
        } else if (parent < 0) {
            QL_FAIL(QL_EINVAL, "line %d: a list item that stands under no key", line);
        }
        ql_entry *e;
        QL_TRY(add_entry(out, item ? NULL : s, (size_t)(k - s), line, parent, &e));
        QL_TRY(line_value(rest, end, line, e));
        stack[depth].indent = indent;
        stack[depth++].entry = out->n - 1;
    }
    return QL_OK;
}

ql_status ql_body_parse(const char *text, ql_body *out)
{
    ql_body b = {0};
    const char *p = text;
    while (blank(*p)) p++;
    ql_status st = *p == '{' ? json_body(text, &b) : lines_body(text, &b);
    if (st != QL_OK) {
        ql_body_free(&b);
        return st;
    }
    *out = b;
    return QL_OK;
}

void ql_body_free(ql_body *body)
{
    for (int i = 0; i < body->n; i++) {
        free(body->entries[i].key);
        free(body->entries[i].text);
        json_decref(body->entries[i].value);
    }
    free(body->entries);
    memset(body, 0, sizeof *body);
}

static ql_status children_value(const ql_body *b, int i, json_t **out)
{
    const ql_entry *e = &b->entries[i];
    json_t *all = NULL;
    for (int k = i + 1; k < b->n; k++) {
        const ql_entry *c = &b->entries[k];
        json_t *v;
        if (c->parent != i) continue;
        if (!all) all = c->key ? json_object() : json_array();
        if (!all || json_is_object(all) != (c->key != NULL)) {
            json_decref(all);
            QL_FAIL(QL_EINVAL, "line %d: '%s' mixes list items and keys", c->line,
                    e->key ? e->key : "-");
        }
        ql_status st = ql_body_value(b, k, &v);
        if (st == QL_OK &&
            (c->key ? json_object_set_new(all, c->key, v) : json_array_append_new(all, v)) < 0)
            st = ql_fail(QL_EINVAL, "line %d: this name is not UTF-8", c->line);
        if (st != QL_OK) {
            json_decref(all);
            return st;
        }
    }
    *out = all;
    return QL_OK;
}

ql_status ql_body_value(const ql_body *body, int i, json_t **out)
{
    const ql_entry *e = &body->entries[i];
    if (e->children > 0) return children_value(body, i, out);
    json_t *v = e->value ? json_incref(e->value) : NULL;
    if (!v) v = json_loads(e->text, JSON_DECODE_ANY, NULL);
    if (!v) v = ql_text_json(e->text, strlen(e->text));
    if (!v) QL_FAIL(QL_ENOMEM, "out of memory");
    *out = v;
    return QL_OK;
}
