/* Rows of JSONL, JSON, CSV and text files: mapped, found once, parsed when asked for. */
#include "core/data.h"
#include "core/data_files.h"

#include "core/file.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* A file. In the table's numbering of bytes it covers base … base + size. */
typedef struct {
    char *path;
    int fd;
    char *map;
    size_t size, mapped;
    uint64_t base;
    ql_data_format format;
    json_t *columns; /* CSV: array of names */
} source;

struct ql_table {
    source *src;
    size_t n_src;
    uint64_t *row; /* where each begins, in the table's numbering */
    size_t n, cap;
    size_t first, count; /* after --split */
    int64_t not_utf8;    /* rows read so far that were not */
};

static ql_status add_row(ql_table *r, uint64_t at)
{
    if (r->n == r->cap) {
        size_t cap = r->cap ? r->cap + r->cap / 2 : 1024;
        uint64_t *p = realloc(r->row, cap * sizeof *p);
        if (!p) QL_FAIL(QL_ENOMEM, "no memory for the index of %zu rows", cap);
        r->row = p, r->cap = cap;
    }
    r->row[r->n++] = at;
    return QL_OK;
}

/* ---- finding rows ------------------------------------------------------------------------------ */

/* sep: of a table whose empty fields it shows; 0: none. */
static bool blank_line(const char *p, const char *end, char sep)
{
    while (p < end && *p != sep && (*p == ' ' || *p == '\t' || *p == '\r')) p++;
    return p == end;
}

/* Where the text begins: behind the mark that Windows' editors write. */
static const char *behind_mark(const source *s)
{
    return s->map + (s->size >= 3 && memcmp(s->map, "\xef\xbb\xbf", 3) == 0 ? 3 : 0);
}

static ql_status index_lines(ql_table *r, const source *s)
{
    const char *p = behind_mark(s), *end = s->map + s->size;
    while (p < end) {
        const char *e = memchr(p, '\n', (size_t)(end - p));
        if (!e) e = end;
        if (!blank_line(p, e, 0)) QL_TRY(add_row(r, s->base + (uint64_t)(p - s->map)));
        p = e + 1;
    }
    return QL_OK;
}

/* The end of the JSON value at p, by brackets and strings alone; parsing it comes later. */
static const char *skip_value(const char *p, const char *end)
{
    int64_t depth = 0;
    for (; p < end; p++) {
        if (*p == '"') {
            for (p++; p < end && *p != '"'; p++) p += *p == '\\';
            if (p >= end) return end;
        } else if (*p == '[' || *p == '{') {
            depth++;
        } else if ((*p == ']' || *p == '}') && --depth < 0) {
            return p;
        } else if (*p == ',' && !depth) {
            return p;
        }
    }
    return end;
}

static const char *skip_space(const char *p, const char *end)
{
    while (p < end && (*p == ' ' || (*p >= '\t' && *p <= '\r'))) p++;
    return p;
}

/* whole: the array is all there is in the file. */
static ql_status index_array(ql_table *r, const source *s, const char *p, bool whole)
{
    const char *end = s->map + s->size;
    size_t before = r->n;
    p = skip_space(p + 1, end);
    while (p < end && *p != ']') {
        QL_TRY(add_row(r, s->base + (uint64_t)(p - s->map)));
        p = skip_value(p, end);
        if (p < end && *p == ',') p = skip_space(p + 1, end);
        else if (p < end && *p != ']')
            QL_FAIL(QL_EINVAL, "%s: a '%c' too many behind row %zu", ql_base_name(s->path), *p, r->n);
    }
    if (p >= end) QL_FAIL(QL_EINVAL, "%s: its array has no end; is the file cut off?", ql_base_name(s->path));
    if (whole && skip_space(p + 1, end) < end)
        QL_FAIL(QL_EINVAL, "%s: there is more behind its array of %zu rows; arrays line by line are not read", ql_base_name(s->path), r->n - before);
    return QL_OK;
}

static bool fits_64_bits(const char *p, const char *end)
{
    char digits[24];
    size_t n = (size_t)(end - p);
    if (n >= sizeof digits) return false;
    memcpy(digits, p, n), digits[n] = 0, errno = 0;
    (void)strtoll(digits, NULL, 10);
    return !errno;
}

/* Behind the string or number at p. *too_long: an integer beyond 64 bits. */
static const char *skip_scalar(const char *p, const char *end, bool *too_long)
{
    const char *q = p + 1;
    bool number = *p == '-' || (*p >= '0' && *p <= '9'), whole = true;
    if (*p == '"') {
        for (; q < end && *q != '"'; q++) q += *q == '\\';
        return q < end ? q + 1 : end;
    }
    for (; number && q < end && ((*q >= '0' && *q <= '9') || memchr(".eE+-", *q, 5)); q++) whole &= *q >= '0' && *q <= '9';
    *too_long = number && whole && !fits_64_bits(p, q);
    return q;
}

/* What Python writes and JSON does not have here: NaN and Infinity become null, integers beyond 64 bits reals. */
static ql_status plain_json(const char *p, size_t n, ql_str *out)
{
    static const char *const words[] = {"NaN", "-Infinity", "Infinity"};
    const char *end = p + n, *from = p, *next;
    for (; p < end; p = next) {
        bool too_long = false, word = false;
        for (int k = 0; k < 3 && !word; k++) {
            size_t len = strlen(words[k]);
            word = (size_t)(end - p) >= len && memcmp(p, words[k], len) == 0;
            next = p + len;
        }
        if (!word) next = skip_scalar(p, end, &too_long);
        if (!word && !too_long) continue;
        const char *stop = word ? p : next;
        QL_TRY(ql_str_add(out, from, (size_t)(stop - from)));
        QL_TRY(ql_str_puts(out, word ? "null" : ".0"));
        from = next;
    }
    return from < end ? ql_str_add(out, from, (size_t)(end - from)) : QL_OK;
}

static ql_status parse_row(const source *s, size_t number, const char *p, const char *end, json_t **out)
{
    json_error_t err;
    ql_str good = {0}, plain = {0};
    size_t n = (size_t)(end - p), flags = JSON_ALLOW_NUL | JSON_DECODE_ANY;
    ql_status st = QL_OK;
    if (ql_utf8_valid(p, n) < n) {
        QL_GO(ql_utf8_repair(p, n, &good));
        p = good.data, n = good.len;
    }
    json_t *v = json_loadb(p, n, flags, &err);
    if (!v && (json_error_code(&err) == json_error_numeric_overflow || json_error_code(&err) == json_error_invalid_syntax)) {
        QL_GO(plain_json(p, n, &plain));
        if (plain.len) v = json_loadb(plain.data, plain.len, flags, &err);
    }
    if (!v) QL_GO(ql_fail(QL_EINVAL, "%s, row %zu: %s", ql_base_name(s->path), number, err.text));
    if (json_is_string(v)) v = json_pack("{s:o}", "text", v); /* as in a list of Python's */
    if (json_is_object(v)) *out = v;
    else json_decref(v), st = ql_fail(QL_EINVAL, "%s, row %zu: not an object", ql_base_name(s->path), number);
out:
    ql_str_free(&good), ql_str_free(&plain);
    return st;
}

static const char *const row_keys[] = {"data", "train", "rows"};

/* An object that is no row itself: the rows are in it. */
static bool holds_rows(const json_t *v)
{
    bool found = false;
    for (int k = 0; k < 3; k++) {
        const json_t *one = json_array_get(json_object_get(v, row_keys[k]), 0);
        found |= json_is_object(one) || json_is_string(one);
    }
    return found;
}

/* A .json file: an array of rows, one of them under "data", "train" or "rows", or lines after all. */
static ql_status index_json(ql_table *r, source *s)
{
    const char *end = s->map + s->size, *p = skip_space(behind_mark(s), end);
    if (p < end && *p == '[') return index_array(r, s, p, true);
    const char *line = memchr(p, '\n', (size_t)(end - p));
    json_t *first = NULL;
    if (parse_row(s, 1, p, line ? line : end, &first) != QL_OK) ql_error_clear();
    bool rows = first && ((line && skip_space(line, end) < end) || !holds_rows(first));
    json_decref(first);
    if (rows) {
        s->format = QL_FILE_JSONL;
        return index_lines(r, s);
    }
    for (const char *q = p < end ? skip_space(p + 1, end) : end; q < end && *q == '"';) {
        const char *e = skip_value(q, end), *colon = NULL;
        for (int k = 0; k < 3; k++) {
            size_t n = strlen(row_keys[k]);
            if ((size_t)(end - q) > n + 2 && memcmp(q + 1, row_keys[k], n) == 0 && q[n + 1] == '"') colon = skip_space(q + n + 2, end);
        }
        if (colon && colon < end && *colon == ':') {
            colon = skip_space(colon + 1, end);
            if (colon < end && *colon == '[') return index_array(r, s, colon, false);
        }
        q = e < end && *e == ',' ? skip_space(e + 1, end) : end;
    }
    QL_FAIL(QL_EINVAL, "%s: neither an array of rows, nor an object with one under \"data\", nor a row a line",
            ql_base_name(s->path));
}

/* The end of the CSV record at p (behind its line end, which may be an old Mac's); NULL: a quote is never closed. */
static const char *skip_record(const char *p, const char *end, char sep)
{
    bool start = true; /* of a field: only there do quotes open */
    for (; p < end; p++) {
        if (*p == '"' && start) {
            for (p++; p < end; p++) {
                if (*p != '"') continue;
                if (p + 1 < end && p[1] == '"') p++;
                else break;
            }
            if (p >= end) return NULL;
            start = false;
        } else if (*p == '\n' || (*p == '\r' && p + 1 < end && p[1] != '\n')) {
            return p + 1;
        } else {
            start = *p == sep;
        }
    }
    return end;
}

/* The fields of the record at p … end, as strings. */
static ql_status csv_fields(const char *p, const char *end, char sep, json_t *out)
{
    ql_str f = {0}, good = {0};
    ql_status st = QL_OK;
    while (end > p && (end[-1] == '\n' || end[-1] == '\r')) end--;
    for (bool more = true; more;) {
        ql_str_clear(&f), ql_str_clear(&good);
        QL_GO(ql_str_reserve(&good, 0));
        if (p < end && *p == '"') {
            for (p++; p < end; p++) {
                if (*p == '"' && !(p + 1 < end && p[1] == '"')) break;
                p += *p == '"';
                QL_GO(ql_str_add(&f, p, 1));
            }
            p += p < end;
        }
        const char *e = p < end ? memchr(p, sep, (size_t)(end - p)) : NULL;
        more = e != NULL;
        if (!e) e = end;
        if (e > p) QL_GO(ql_str_add(&f, p, (size_t)(e - p)));
        p = more ? e + 1 : e;
        QL_GO(ql_utf8_repair(f.data, f.len, &good));
        if (json_array_append_new(out, json_stringn(good.data, good.len)))
            st = ql_fail(QL_ENOMEM, "no memory for a row");
        if (st != QL_OK) break;
    }
out:
    ql_str_free(&f), ql_str_free(&good);
    return st;
}

static ql_status index_csv(ql_table *r, source *s)
{
    const char *p = behind_mark(s), *end = s->map + s->size;
    char sep = s->format == QL_FILE_CSV ? ',' : '\t';
    const char *e = skip_record(p, end, sep);
    size_t before = r->n;
    s->columns = json_array();
    if (!s->columns) QL_FAIL(QL_ENOMEM, "no memory for %s", ql_base_name(s->path));
    if (e) QL_TRY(csv_fields(p, e, sep, s->columns));
    for (p = e; e && p < end; p = e) {
        e = skip_record(p, end, sep);
        if (e && !blank_line(p, e - (e > p && e[-1] == '\n'), sep)) QL_TRY(add_row(r, s->base + (uint64_t)(p - s->map)));
    }
    if (!e)
        QL_FAIL(QL_EINVAL, "%s: a quote that opens a field of row %zu is never closed and would take all that follows with it. Close it; or, where "
                           "quotes are plain letters, read the file with pandas (quoting=3) and give the variable's name",
                ql_base_name(s->path), r->n - before + 1);
    return QL_OK;
}

static ql_status index_source(ql_table *r, source *s)
{
    if (s->size >= 2 && (memcmp(s->map, "\xff\xfe", 2) == 0 || memcmp(s->map, "\xfe\xff", 2) == 0))
        QL_FAIL(QL_ENOSUP, "%s: it is UTF-16; save it as UTF-8 (iconv -f UTF-16 -t UTF-8)", ql_base_name(s->path));
    switch (s->format) {
    case QL_FILE_JSON: return index_json(r, s);
    case QL_FILE_CSV:
    case QL_FILE_TSV: return index_csv(r, s);
    default: return index_lines(r, s);
    }
}

/* ---- files ------------------------------------------------------------------------------------- */

static ql_status map_source(source *s)
{
    static char empty[1];
    if (!s->size) s->map = empty;
    if (s->mapped == s->size) return QL_OK;
    if (s->mapped) munmap(s->map, s->mapped);
    s->mapped = 0;
    s->map = mmap(NULL, s->size, PROT_READ, MAP_SHARED, s->fd, 0);
    if (s->map == MAP_FAILED) {
        s->map = NULL;
        QL_FAIL(QL_EIO, "%s: cannot be mapped: %s", ql_base_name(s->path), strerror(errno));
    }
    s->mapped = s->size;
    return QL_OK;
}

static ql_status add_source(ql_table *r, const char *path, int fd, ql_data_format f)
{
    struct stat st;
    source *p = realloc(r->src, (r->n_src + 1) * sizeof *p);
    if (!p) {
        close(fd);
        QL_FAIL(QL_ENOMEM, "no memory for %s", ql_base_name(path));
    }
    r->src = p;
    p += r->n_src;
    *p = (source){.path = strdup(path), .fd = fd, .format = f};
    if (r->n_src) p->base = p[-1].base + p[-1].size;
    r->n_src++;
    if (!p->path) QL_FAIL(QL_ENOMEM, "no memory for %s", ql_base_name(path));
    if (fstat(fd, &st) || !S_ISREG(st.st_mode)) QL_FAIL(QL_EINVAL, "%s: not a file", path);
    p->size = (size_t)st.st_size;
    return map_source(p);
}

static ql_status add_file(ql_table *r, const char *path)
{
    ql_data_format f;
    QL_TRY(ql_data_format_of(path, &f));
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) QL_FAIL(QL_EIO, "%s: %s", path, strerror(errno));
    QL_TRY(add_source(r, path, fd, f));
    return index_source(r, r->src + r->n_src - 1);
}

static ql_status add_path(ql_table *r, const char *path, const char *split)
{
    ql_data_names l = {0};
    ql_status st = ql_data_list(path, split, &l);
    for (size_t i = 0; i < l.n && st == QL_OK; i++) st = add_file(r, l.name[i]);
    ql_data_names_free(&l);
    return st;
}

/* ---- split: name[from:to], rows or percent, as the datasets library has it ------------------------- */

static ql_status bound(const char *p, const char *end, size_t n, size_t none, size_t *out)
{
    char *stop;
    if (p == end) return *out = none, QL_OK;
    double v = strtod(p, &stop);
    bool percent = stop < end && *stop == '%';
    if (stop + percent != end || !(fabs(v) < 1e15) || (percent && fabs(v) > 100) || (!percent && v != trunc(v)))
        QL_FAIL(QL_EINVAL, "split: '%.*s' is neither a number of rows nor a percentage", (int)(end - p), p);
    if (percent) v = nearbyint(v * (double)n / 100.0); /* to even, as Python rounds */
    if (v < 0) v += (double)n;
    *out = v < 0 ? 0 : v > (double)n ? n : (size_t)v;
    return QL_OK;
}

static ql_status apply_split(ql_table *r, const char *split)
{
    const char *open = split ? strchr(split, '[') : NULL;
    r->first = 0, r->count = r->n;
    if (!open) return QL_OK;
    const char *colon = strchr(open, ':'), *close = split + strlen(split) - 1;
    size_t to;
    if (strchr(open, '+'))
        QL_FAIL(QL_ENOSUP, "split '%s': only one part is read; several come through Python: "
                           "ds = datasets.load_dataset(…, split=\"%s\"), then the variable's name", split, split);
    if (*close != ']' || !colon) QL_FAIL(QL_EINVAL, "split '%s': expected train[from:to], e.g. train[:10%%]", split);
    QL_TRY(bound(open + 1, colon, r->n, 0, &r->first));
    QL_TRY(bound(colon + 1, close, r->n, r->n, &to));
    r->count = to > r->first ? to - r->first : 0;
    if (!r->count) QL_FAIL(QL_EINVAL, "split '%s' of %zu rows is empty", split, r->n);
    return QL_OK;
}

ql_status ql_table_open(const char *const *files, size_t n, const char *split, ql_table **out)
{
    ql_status st = QL_OK;
    char name[64] = "train";
    size_t len = split ? strcspn(split, "[") : 0;
    ql_table *r = calloc(1, sizeof *r);
    if (!r) QL_FAIL(QL_ENOMEM, "no memory for data");
    if (len >= sizeof name) {
        st = ql_fail(QL_EINVAL, "split '%s': the name is too long", split);
        goto out;
    }
    if (len) memcpy(name, split, len), name[len] = 0;
    for (size_t i = 0; i < n; i++) QL_GO(add_path(r, files[i], name));
    if (!r->n) {
        st = ql_fail(QL_EINVAL, "%s: there are no rows in it", n ? files[0] : "data");
        goto out;
    }
    uint64_t *fit = realloc(r->row, r->n * sizeof *fit);
    if (fit) r->row = fit, r->cap = r->n;
    QL_GO(apply_split(r, split));
    *out = r, r = NULL;
out:
    ql_table_close(r);
    return st;
}

void ql_table_close(ql_table *r)
{
    if (!r) return;
    for (size_t i = 0; i < r->n_src; i++) {
        source *s = r->src + i;
        if (s->mapped) munmap(s->map, s->mapped);
        close(s->fd);
        free(s->path);
        json_decref(s->columns);
    }
    free(r->src), free(r->row), free(r);
}

/* ---- rows from a front end --------------------------------------------------------------------- */

ql_status ql_table_new(const char *spool, ql_table **out)
{
    char temp[] = "/tmp/qlora-rows-XXXXXX";
    ql_table *r = calloc(1, sizeof *r);
    if (!r) QL_FAIL(QL_ENOMEM, "no memory for data");
    int fd = spool ? open(spool, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600) : mkostemp(temp, O_CLOEXEC);
    if (fd < 0) {
        free(r);
        QL_FAIL(QL_EIO, "%s: %s", spool ? spool : temp, strerror(errno));
    }
    if (!spool) unlink(temp);
    ql_status st = add_source(r, spool ? spool : "rows", fd, QL_FILE_JSONL);
    if (st == QL_OK) *out = r;
    else ql_table_close(r);
    return st;
}

ql_status ql_table_push_lines(ql_table *r, const char *lines, size_t n)
{
    source *s = r->src;
    if (r->n_src != 1 || s->columns || s->format != QL_FILE_JSONL) QL_FAIL(QL_EINTERNAL, "rows pushed into a file");
    for (size_t done = 0; done < n;) {
        ssize_t k = pwrite(s->fd, lines + done, n - done, (off_t)(s->size + done));
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) QL_FAIL(QL_EIO, "%s: %s", s->path, strerror(errno));
        done += (size_t)k;
    }
    for (const char *p = lines, *end = lines + n; p < end;) {
        const char *e = memchr(p, '\n', (size_t)(end - p));
        if (!e) e = end;
        if (!blank_line(p, e, 0)) QL_TRY(add_row(r, s->size + (uint64_t)(p - lines)));
        p = e + 1;
    }
    s->size += n;
    r->count = r->n;
    return QL_OK;
}

ql_status ql_table_push(ql_table *r, const json_t *row)
{
    char *text = json_dumps(row, JSON_COMPACT);
    if (!text) QL_FAIL(QL_EINVAL, "a row could not be written as JSON");
    size_t n = strlen(text);
    text[n] = '\n'; /* in place of the NUL */
    ql_status st = ql_table_push_lines(r, text, n + 1);
    free(text);
    return st;
}

/* ---- reading rows ------------------------------------------------------------------------------ */

int64_t ql_table_count(const ql_table *r)
{
    return (int64_t)r->count;
}

size_t ql_table_memory(const ql_table *r)
{
    return r->cap * sizeof *r->row;
}

static ql_status csv_row(const source *s, size_t number, const char *p, const char *end, json_t **out)
{
    json_t *fields = json_array(), *row = json_object();
    ql_status st = fields && row ? QL_OK : ql_fail(QL_ENOMEM, "no memory for a row");
    QL_GO(st);
    QL_GO(csv_fields(p, end, s->format == QL_FILE_CSV ? ',' : '\t', fields));
    if (json_array_size(fields) != json_array_size(s->columns)) {
        st = ql_fail(QL_EINVAL, "%s, row %zu: %zu fields, but %zu columns", ql_base_name(s->path), number,
                     json_array_size(fields), json_array_size(s->columns));
        goto out;
    }
    for (size_t i = 0; i < json_array_size(fields); i++)
        if (json_object_set(row, json_string_value(json_array_get(s->columns, i)), json_array_get(fields, i)))
            st = ql_fail(QL_ENOMEM, "no memory for a row");
    if (st == QL_OK) *out = row, row = NULL;
out:
    json_decref(fields), json_decref(row);
    return st;
}

static ql_status text_row(const char *p, const char *end, json_t **out)
{
    ql_str good = {0};
    if (end > p && end[-1] == '\r') end--;
    QL_TRY(ql_utf8_repair(p, (size_t)(end - p), &good));
    *out = json_pack("{s:s%}", "text", good.data ? good.data : "", good.len);
    ql_str_free(&good);
    return *out ? QL_OK : ql_fail(QL_ENOMEM, "no memory for a row");
}

ql_status ql_table_get(ql_table *r, int64_t i, json_t **out)
{
    if (i < 0 || (size_t)i >= r->count) QL_FAIL(QL_EINTERNAL, "row %lld of %zu", (long long)i, r->count);
    size_t k = r->first + (size_t)i;
    uint64_t at = r->row[k];
    source *s = r->src;
    while (s + 1 < r->src + r->n_src && at >= s[1].base) s++;
    QL_TRY(map_source(s));
    const char *p = s->map + (at - s->base), *end = s->map + s->size;
    if (s->format == QL_FILE_JSONL || s->format == QL_FILE_TEXT) {
        const char *e = memchr(p, '\n', (size_t)(end - p));
        if (e) end = e;
    } else if (s->format == QL_FILE_JSON) {
        end = skip_value(p, end);
    } else {
        const char *e = skip_record(p, end, s->format == QL_FILE_CSV ? ',' : '\t');
        if (e) end = e;
    }
    r->not_utf8 += ql_utf8_valid(p, (size_t)(end - p)) < (size_t)(end - p);
    if (s->format == QL_FILE_TEXT) return text_row(p, end, out);
    return s->format == QL_FILE_CSV || s->format == QL_FILE_TSV ? csv_row(s, k + 1, p, end, out) : parse_row(s, k + 1, p, end, out);
}

int64_t ql_table_not_utf8(const ql_table *r)
{
    return r->not_utf8;
}

ql_status ql_table_hash(ql_table *r, uint64_t out[2])
{
    out[0] = ql_hash(1, &r->first, sizeof r->first);
    out[1] = ql_hash(2, &r->count, sizeof r->count);
    for (size_t i = 0; i < r->n_src; i++) {
        source *s = r->src + i;
        if (s->size) QL_TRY(map_source(s));
        for (int k = 0; k < 2; k++) {
            out[k] = ql_hash(out[k], &s->format, sizeof s->format);
            out[k] = ql_hash(out[k] + (uint64_t)k, s->map, s->size);
        }
    }
    return QL_OK;
}
