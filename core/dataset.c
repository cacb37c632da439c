#include "core/dataset.h"

#include "core/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* The file: this header, tokens (u32 each), offsets (u64 each, documents + 1 of them, in tokens) from the
 * next multiple of 8, the text of `about`. */
typedef struct {
    char magic[8];
    uint64_t docs, tokens, about;
} header;
static const char MAGIC[8] = {'q', 'l', 't', 'o', 'k', '0', '0', '1'};

/* ---- writing ----------------------------------------------------------------------------------- */

enum { BUFFER = 1 << 16 };

struct ql_dataset_writer {
    ql_file *file;
    uint64_t *off; /* (docs + 1) */
    size_t docs, cap, used;
    uint64_t tokens;
    uint32_t buffer[BUFFER];
};

ql_status ql_dataset_create(const char *path, ql_dataset_writer **out)
{
    ql_status st = QL_OK;
    ql_dataset_writer *w = calloc(1, sizeof *w);
    if (!w) QL_FAIL(QL_ENOMEM, "no memory to write a data set");
    w->off = calloc(64, sizeof *w->off);
    w->cap = 64;
    if (!w->off) {
        st = ql_fail(QL_ENOMEM, "no memory to write a data set");
        goto out;
    }
    QL_GO(ql_file_create(path, &w->file));
    *out = w, w = NULL;
out:
    ql_dataset_writer_close(w);
    return st;
}

static ql_status flush(ql_dataset_writer *w)
{
    off_t at = (off_t)(sizeof(header) + (w->tokens - w->used) * sizeof *w->buffer);
    if (w->used) QL_TRY(ql_file_write_at(w->file, w->buffer, w->used * sizeof *w->buffer, at));
    w->used = 0;
    return QL_OK;
}

ql_status ql_dataset_reserve(ql_dataset_writer *w, size_t examples)
{
    if (examples + 2 <= w->cap) return QL_OK;
    uint64_t *p = examples < SIZE_MAX / 16 ? realloc(w->off, (examples + 2) * sizeof *p) : NULL;
    if (!p) QL_FAIL(QL_ENOMEM, "no memory for the index of %zu examples", examples);
    w->off = p, w->cap = examples + 2;
    return QL_OK;
}

ql_status ql_dataset_add(ql_dataset_writer *w, const int32_t *ids, const uint8_t *trained, size_t n)
{
    if (w->docs + 2 > w->cap) {
        size_t cap = w->cap + w->cap / 2; /* near 8 bytes a row, not 16 */
        uint64_t *p = realloc(w->off, cap * sizeof *p);
        if (!p) QL_FAIL(QL_ENOMEM, "no memory for the index of %zu examples", cap);
        w->off = p, w->cap = cap;
    }
    for (size_t i = 0; i < n; i++) {
        if (w->used == BUFFER) QL_TRY(flush(w));
        w->buffer[w->used++] = (uint32_t)ids[i] | (trained[i] ? 0 : QL_MASKED);
        w->tokens++;
    }
    w->off[++w->docs] = w->tokens;
    return QL_OK;
}

ql_status ql_dataset_commit(ql_dataset_writer *w, const json_t *about)
{
    header h = {.docs = w->docs, .tokens = w->tokens};
    char *text = about ? json_dumps(about, JSON_COMPACT) : strdup("{}");
    ql_status st = QL_OK;
    off_t at = (off_t)(sizeof h + (w->tokens * 4 + 7) / 8 * 8);
    if (!text) QL_FAIL(QL_ENOMEM, "no memory for a data set's description");
    memcpy(h.magic, MAGIC, sizeof MAGIC);
    h.about = strlen(text);
    QL_GO(flush(w));
    QL_GO(ql_file_write_at(w->file, w->off, (w->docs + 1) * sizeof *w->off, at));
    QL_GO(ql_file_write_at(w->file, text, h.about, at + (off_t)((w->docs + 1) * sizeof *w->off)));
    QL_GO(ql_file_write_at(w->file, &h, sizeof h, 0));
    QL_GO(ql_file_commit(w->file));
out:
    free(text);
    return st;
}

void ql_dataset_writer_close(ql_dataset_writer *w)
{
    if (!w) return;
    ql_file_close(w->file);
    free(w->off);
    free(w);
}

/* ---- reading ----------------------------------------------------------------------------------- */

struct ql_dataset {
    void *map;
    size_t size;
    const uint32_t *tok;
    const uint64_t *off;
    int64_t docs, tokens, n, max_length, longest;
    ql_packing packing;
    int32_t *order; /* best fit: documents bin by bin */
    int32_t *bin;   /* (n + 1): where each bin begins in order */
    json_t *about;
    char path[4096];
};

static ql_status map_file(const char *path, ql_dataset *d)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat s;
    if (fd < 0) QL_FAIL(QL_EIO, "%s: %s", path, strerror(errno));
    if (fstat(fd, &s) == 0 && s.st_size >= (off_t)sizeof(header)) {
        d->size = (size_t)s.st_size;
        d->map = mmap(NULL, d->size, PROT_READ, MAP_SHARED, fd, 0);
        if (d->map == MAP_FAILED) d->map = NULL;
    }
    close(fd);
    if (!d->map) QL_FAIL(QL_EINVAL, "%s: not a tokenised data set", path);
    return QL_OK;
}

static ql_status check_file(const char *path, ql_dataset *d)
{
    header h;
    json_error_t err;
    memcpy(&h, d->map, sizeof h);
    uint64_t limit = d->size / 4;
    if (memcmp(h.magic, MAGIC, sizeof MAGIC) || h.docs > limit || h.tokens > limit ||
        h.about > d->size || h.docs > INT32_MAX ||
        sizeof h + (h.tokens * 4 + 7) / 8 * 8 + (h.docs + 1) * 8 + h.about != d->size)
        QL_FAIL(QL_EINVAL, "%s: not a tokenised data set, or a damaged one; delete it", path);
    d->docs = (int64_t)h.docs, d->tokens = (int64_t)h.tokens;
    d->tok = (const uint32_t *)((const char *)d->map + sizeof h);
    d->off = (const uint64_t *)((const char *)d->tok + (h.tokens * 4 + 7) / 8 * 8);
    bool good = d->off[0] == 0 && d->off[h.docs] == h.tokens;
    for (uint64_t i = 0; i < h.docs && good; i++) good = d->off[i] <= d->off[i + 1];
    d->about = json_loadb((const char *)(d->off + h.docs + 1), h.about, 0, &err);
    if (!good || !d->about) QL_FAIL(QL_EINVAL, "%s: a damaged data set; delete it", path);
    return QL_OK;
}

static int64_t doc_length(const ql_dataset *d, int64_t i)
{
    return (int64_t)(d->off[i + 1] - d->off[i]);
}

/* Bins of each amount of free space wait in a queue; `free_bits` says which queues have any. */
typedef struct {
    int32_t *head, *tail; /* (max_length + 1) bins, −1 none */
    int32_t *next;        /* (docs) by bin */
    uint64_t *free_bits;
} spaces;

static void space_push(spaces *s, int64_t space, int32_t bin)
{
    s->next[bin] = -1;
    if (s->head[space] < 0) s->head[space] = bin;
    else s->next[s->tail[space]] = bin;
    s->tail[space] = bin;
    s->free_bits[space >> 6] |= (uint64_t)1 << (space & 63);
}

/* Takes the oldest bin of the least space ≥ need; −1: none. */
static int32_t space_take(spaces *s, int64_t need, int64_t max, int64_t *space)
{
    int64_t w = need >> 6;
    uint64_t bits = s->free_bits[w] & ~(uint64_t)0 << (need & 63);
    while (!bits && ++w <= max >> 6) bits = s->free_bits[w];
    if (!bits) return -1;
    *space = w * 64 + __builtin_ctzll(bits);
    int32_t bin = s->head[*space];
    s->head[*space] = s->next[bin];
    if (s->head[*space] < 0) s->free_bits[w] &= ~((uint64_t)1 << (*space & 63));
    return bin;
}

/* Puts documents, longest first (equal ones in file order), each into the fullest bin that has room: what
 * TRL's "bfd" does, but over the whole data set. bin_of (docs) by place in `sorted`. */
static ql_status best_fit(ql_dataset *d, const int32_t *sorted, int32_t *bin_of)
{
    int64_t max = d->max_length;
    spaces s = {malloc((size_t)(max + 1) * 4), malloc((size_t)(max + 1) * 4),
                malloc((size_t)(d->docs + 1) * 4), calloc((size_t)(max >> 6) + 1, 8)};
    ql_status st = QL_OK;
    if (!s.head || !s.tail || !s.next || !s.free_bits) {
        st = ql_fail(QL_ENOMEM, "no memory to pack %lld documents", (long long)d->docs);
        goto out;
    }
    for (int64_t i = 0; i <= max; i++) s.head[i] = -1;
    for (int64_t i = 0; i < d->docs; i++) {
        int64_t len = doc_length(d, sorted[i]), space = max;
        int32_t bin = space_take(&s, len, max, &space);
        if (bin < 0) bin = (int32_t)d->n++, space = max;
        bin_of[i] = bin;
        if (space > len) space_push(&s, space - len, bin);
    }
out:
    free(s.head), free(s.tail), free(s.next), free(s.free_bits);
    return st;
}

static ql_status pack(ql_dataset *d)
{
    size_t max = (size_t)d->max_length, docs = (size_t)d->docs;
    int32_t *sorted = malloc((docs + 1) * 4), *bin_of = malloc((docs + 1) * 4);
    int32_t *count = calloc(max + 2, 4);
    ql_status st = QL_OK;
    d->order = malloc((docs + 1) * 4);
    if (!sorted || !bin_of || !count || !d->order) {
        st = ql_fail(QL_ENOMEM, "no memory to pack %zu documents", docs);
        goto out;
    }
    for (size_t i = 0; i < docs; i++) count[max - (size_t)doc_length(d, (int64_t)i) + 1]++;
    for (size_t i = 1; i <= max; i++) count[i] += count[i - 1];
    for (size_t i = 0; i < docs; i++)
        sorted[count[max - (size_t)doc_length(d, (int64_t)i)]++] = (int32_t)i;
    QL_GO(best_fit(d, sorted, bin_of));
    d->bin = calloc((size_t)d->n + 2, 4);
    if (!d->bin) {
        st = ql_fail(QL_ENOMEM, "no memory to pack %zu documents", docs);
        goto out;
    }
    /* Counting sort by bin keeps the order of insertion; bin[b + 1] runs ahead while filling. */
    for (size_t i = 0; i < docs; i++) d->bin[bin_of[i] + 2]++;
    for (int64_t b = 1; b <= d->n; b++) d->bin[b + 1] += d->bin[b];
    for (size_t i = 0; i < docs; i++) d->order[d->bin[bin_of[i] + 1]++] = sorted[i];
out:
    free(sorted), free(bin_of), free(count);
    return st;
}

ql_status ql_dataset_open(const char *path, ql_packing packing, int64_t max_length, ql_dataset **out)
{
    ql_status st = QL_OK;
    ql_dataset *d = calloc(1, sizeof *d);
    if (!d) QL_FAIL(QL_ENOMEM, "no memory for a data set");
    d->packing = packing == QL_PACK_BFD_SPLIT ? QL_PACK_BFD : packing; /* alike from here on */
    d->max_length = max_length;
    snprintf(d->path, sizeof d->path, "%s", path);
    QL_GO(map_file(path, d));
    QL_GO(check_file(path, d));
    for (int64_t i = 0; i < d->docs; i++) d->longest = ql_max64(d->longest, doc_length(d, i));
    if (packing != QL_PACK_NONE && (max_length < 2 || max_length > 1 << 26)) {
        st = ql_fail(QL_EINVAL, "packing needs a max_length from 2 to %d, not %lld", 1 << 26,
                     (long long)max_length);
        goto out;
    }
    if (packing == QL_PACK_NONE) {
        d->n = d->docs;
    } else if (packing == QL_PACK_WRAPPED) {
        d->n = ql_ceil_div(d->tokens, max_length);
        d->longest = ql_min64(d->tokens, max_length);
        if (d->n > INT32_MAX) st = ql_fail(QL_ENOSUP, "%lld examples are too many", (long long)d->n);
    } else if (d->longest > max_length) {
        st = ql_fail(QL_EINVAL, "a document of %lld tokens does not fit into max_length %lld",
                     (long long)d->longest, (long long)max_length);
    } else {
        QL_GO(pack(d));
    }
    if (st == QL_OK) *out = d, d = NULL;
out:
    ql_dataset_close(d);
    return st;
}

void ql_dataset_close(ql_dataset *d)
{
    if (!d) return;
    if (d->map) munmap(d->map, d->size);
    free(d->order), free(d->bin);
    json_decref(d->about);
    free(d);
}

int64_t ql_dataset_size(const ql_dataset *d)
{
    return d->n;
}
int64_t ql_dataset_documents(const ql_dataset *d)
{
    return d->docs;
}
int64_t ql_dataset_tokens(const ql_dataset *d)
{
    return d->tokens;
}
int64_t ql_dataset_longest(const ql_dataset *d)
{
    return d->longest;
}
const json_t *ql_dataset_about(const ql_dataset *d)
{
    return d->about;
}

const uint32_t *ql_dataset_document(const ql_dataset *d, int64_t i, int64_t *n)
{
    *n = doc_length(d, i);
    return d->tok + d->off[i];
}

int64_t ql_dataset_parts(const ql_dataset *d, int64_t e)
{
    return d->packing == QL_PACK_BFD ? d->bin[e + 1] - d->bin[e] : 1;
}

const uint32_t *ql_dataset_part(const ql_dataset *d, int64_t e, int64_t k, int64_t *n)
{
    if (d->packing == QL_PACK_WRAPPED) {
        *n = ql_min64(d->max_length, d->tokens - e * d->max_length);
        return d->tok + e * d->max_length;
    }
    return ql_dataset_document(d, d->packing == QL_PACK_BFD ? d->order[d->bin[e] + k] : e, n);
}

int64_t ql_dataset_length(const ql_dataset *d, int64_t e)
{
    int64_t sum = 0, n;
    for (int64_t k = 0; k < ql_dataset_parts(d, e); k++) {
        ql_dataset_part(d, e, k, &n);
        sum += n;
    }
    return sum;
}

bool ql_dataset_packed(const ql_dataset *d)
{
    return d->packing != QL_PACK_NONE;
}

const char *ql_dataset_path(const ql_dataset *d)
{
    return d->path;
}
