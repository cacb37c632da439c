#include "core/hub_http.h"

#include "core/hash.h"
#include "core/json.h"

#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { HASH_STEP = 16 << 20 };

bool ql_hub_is_repo(const char *repo)
{
    size_t slashes = 0, n = strlen(repo);
    if (n < 3 || n > 200 || strstr(repo, "..") || repo[0] == '/' || repo[n - 1] == '/') return false;
    for (size_t i = 0; i < n; i++) {
        char c = repo[i];
        bool fine = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
        slashes += c == '/';
        if (!fine && !strchr("/._-", c)) return false;
        if ((c == '.' || c == '-') && (i == 0 || repo[i - 1] == '/')) return false;
    }
    return slashes == 1;
}

bool ql_hub_name(const char *path, char *repo, size_t size)
{
    const char *at = NULL, *p = path, *cut;
    for (; *p; p++)
        if (strncmp(p, "models--", 8) == 0 || strncmp(p, "datasets--", 10) == 0) at = strstr(p, "--") + 2;
    const char *end = at ? strstr(at, "/snapshots/") : NULL;
    if (!end || !(cut = strstr(at, "--")) || cut > end) return false;
    int n = snprintf(repo, size, "%.*s/%.*s", (int)(cut - at), at, (int)(end - cut - 2), cut + 2);
    return n > 0 && (size_t)n < size && ql_hub_is_repo(repo);
}

static bool is_hex(const char *s, size_t n)
{
    return s && strlen(s) == n && strspn(s, "0123456789abcdef") == n;
}

/* A relative path that stays inside its folder. */
static bool safe_path(const char *s)
{
    size_t n = strlen(s);
    if (!n || n > 1000 || s[0] == '/' || s[n - 1] == '/' || strpbrk(s, "\\\n\r")) return false;
    for (const char *p = s; p; p = strchr(p, '/'), p += p != NULL) {
        size_t k = strcspn(p, "/");
        if (k == 0 || (k == 1 && p[0] == '.') || (k == 2 && p[0] == '.' && p[1] == '.')) return false;
    }
    return true;
}

/* ---- the cache --------------------------------------------------------------------------------- */

/* A slash of a revision's name (refs/pr/1) is no border of folders in the address. */
static ql_status add_escaped(ql_str *s, const char *path, const char *plainly)
{
    for (; *path; path++) {
        bool plain = (*path >= 'a' && *path <= 'z') || (*path >= 'A' && *path <= 'Z') || (*path >= '0' && *path <= '9') ||
                     strchr(plainly, *path);
        if (plain) QL_TRY(ql_str_add(s, path, 1));
        else QL_TRY(ql_str_printf(s, "%%%02X", (unsigned char)*path));
    }
    return QL_OK;
}

/* What the hub says of the revision: the commit, and every file's size and hash. */
static ql_status ask(hub *h)
{
    ql_str url = {0}, text = {0};
    answer a = {.h = h, .text = &text, .name = h->repo, .size = -1};
    ql_status st = QL_OK;
    QL_GO(ql_str_printf(&url, "%s/api/%s/%s/revision/", h->endpoint, h->o->kind == QL_HUB_DATASET ? "datasets" : "models",
                        h->repo));
    QL_GO(add_escaped(&url, h->revision, "._-"));
    QL_GO(ql_str_puts(&url, "?blobs=true"));
    QL_GO(ql_http_get(h, url.data, &a));
    QL_GO(ql_json_parse(text.data ? text.data : "", text.len, "the hub's answer", &h->info));
    const char *sha = json_string_value(json_object_get(h->info, "sha"));
    if (!is_hex(sha, 40) || !json_is_array(json_object_get(h->info, "siblings")))
        st = ql_fail(QL_EIO, "%s: the hub's answer names no commit or no files", h->repo);
    else memcpy(h->commit, sha, 41);
out:
    ql_str_free(&url), ql_str_free(&text);
    return st;
}

static ql_status check_hash(const hub *h, const char *path, const char *want, const char *name)
{
    char hex[65], buffer[1 << 16], git[64];
    bool lfs = strlen(want) == 64, stopped = false;
    ql_sha s;
    struct stat st;
    int64_t at = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st)) QL_FAIL(QL_EIO, "%s: %s", name, strerror(errno));
    ql_sha_begin(&s, lfs ? QL_SHA256 : QL_SHA1);
    /* git's name of a file: sha1 of "blob SIZE\0" and the content. */
    if (!lfs) ql_sha_add(&s, git, (size_t)snprintf(git, sizeof git, "blob %lld", (long long)st.st_size) + 1);
    ssize_t n = 0;
    while (!stopped && (n = read(fd, buffer, sizeof buffer)) > 0) {
        ql_sha_add(&s, buffer, (size_t)n);
        at += n;
        if (h->o->progress && at % HASH_STEP < n) stopped = h->o->progress(h->o->user, name, h->done + st.st_size, h->total) != 0;
    }
    close(fd);
    if (n < 0) QL_FAIL(QL_EIO, "%s: %s", name, strerror(errno));
    if (stopped) QL_FAIL(QL_ESTOP, "the download of %s was stopped; the next one goes on from there", h->repo);
    ql_sha_end(&s, hex);
    if (strcmp(hex, want) != 0) {
        unlink(path);
        QL_FAIL(QL_EIO, "%s: what was downloaded has the checksum %.12s, not %.12s; it was deleted, try again", name, hex, want);
    }
    return QL_OK;
}

/* A stop is heard meanwhile. *fd −1: a file system without locks. */
static ql_status wait_for_lock(const hub *h, const char *name, int *fd)
{
    struct timespec t = {0, 100000000};
    int stop = 0, rc;
    while ((rc = flock(*fd, LOCK_EX | LOCK_NB)) != 0 && (errno == EWOULDBLOCK || errno == EINTR) && !stop) {
        nanosleep(&t, NULL);
        if (h->o->progress) stop = h->o->progress(h->o->user, name, h->done, h->total);
    }
    if (rc == 0) return QL_OK;
    close(*fd), *fd = -1;
    if (stop) QL_FAIL(QL_ESTOP, "the download of %s was stopped; another process is at it still", h->repo);
    return QL_OK;
}

/* Another process may be at the same file: it is waited for. The lock is the one that Python's huggingface_hub takes. */
static ql_status lock_blob(const hub *h, const char *hash, const char *name, int *fd)
{
    char path[QL_PATH_MAX];
    struct stat st;
    const char *repo = strrchr(h->root, '/') + 1;
    *fd = -1;
    if ((size_t)snprintf(path, sizeof path, "%s/.locks/%s", h->o->cache_dir, repo) + 80 >= sizeof path)
        QL_FAIL(QL_EINVAL, "%s: the path is too long", name);
    QL_TRY(ql_path_mkdirs(path));
    sprintf(path + strlen(path), "/%s.lock", hash);
    while ((*fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644)) >= 0) {
        QL_TRY(wait_for_lock(h, name, fd));
        if (*fd < 0 || fstat(*fd, &st) || st.st_nlink) return QL_OK;
        close(*fd); /* deleted between open and lock */
    }
    QL_FAIL(QL_EIO, "%s: %s", path, strerror(errno));
}

static ql_status download(hub *h, const char *name, const char *hash, int64_t size, const char *blob)
{
    ql_str part = {0}, url = {0};
    answer a = {.h = h, .fd = -1, .name = name, .size = size};
    struct stat st_;
    int lock = -1;
    ql_status st = QL_OK;
    QL_GO(ql_str_printf(&part, "%s.incomplete", blob));
    QL_GO(ql_str_printf(&url, "%s/%s%s/resolve/%s/", h->endpoint, ql_hub_site(h), h->repo, h->commit));
    QL_GO(add_escaped(&url, name, "/._-"));
    QL_GO(lock_blob(h, hash, name, &lock));
    if (access(blob, F_OK) == 0) goto out;
    a.fd = open(part.data, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (a.fd < 0) {
        st = ql_fail(QL_EIO, "%s: %s", part.data, strerror(errno));
        goto out;
    }
    if (fstat(a.fd, &st_) == 0 && st_.st_size <= size) a.at = st_.st_size;
    else if (ftruncate(a.fd, 0)) st = ql_fail(QL_EIO, "%s: %s", name, strerror(errno));
    if (st == QL_OK && (a.at < size || size == 0)) st = ql_http_get(h, url.data, &a);
    if (st == QL_OK) st = check_hash(h, part.data, hash, name);
    if (st == QL_OK && rename(part.data, blob)) st = ql_fail(QL_EIO, "%s: %s", blob, strerror(errno));
out:
    if (a.fd >= 0) close(a.fd);
    if (lock >= 0) close(lock);
    ql_str_free(&part), ql_str_free(&url);
    return st;
}

/* snapshots/COMMIT/a/b → ../../../blobs/HASH; the file itself where the file system has no links, as huggingface_hub does it. */
static ql_status link_blob(char *path, const char *name, const char *hash, const char *blob)
{
    char *slash = strrchr(path, '/');
    ql_str target = {0};
    ql_status st = QL_OK;
    *slash = 0;
    QL_TRY(ql_path_mkdirs(path));
    *slash = '/';
    QL_GO(ql_str_puts(&target, "../../"));
    for (const char *p = name; *p; p++)
        if (*p == '/') QL_GO(ql_str_puts(&target, "../"));
    QL_GO(ql_str_printf(&target, "blobs/%s", hash));
    if (symlink(target.data, path) == 0 || errno == EEXIST) goto out;
    if ((errno != EPERM && errno != ENOSYS && errno != EOPNOTSUPP) || rename(blob, path))
        st = ql_fail(QL_EIO, "%s: %s", path, strerror(errno));
out:
    ql_str_free(&target);
    return st;
}

typedef struct {
    const char *name, *hash;
    int64_t size;
} wanted;

/* Entry j of "siblings"; want->name stays NULL where the patterns leave it out. */
static ql_status read_entry(const hub *h, const json_t *j, const char *const *patterns, size_t n, wanted *want)
{
    const char *name = json_string_value(json_object_get(j, "rfilename"));
    const json_t *lfs = json_object_get(j, "lfs");
    bool match = !n;
    *want = (wanted){0};
    if (!name || !safe_path(name)) QL_FAIL(QL_EIO, "%s: the hub names a file '%.60s', which is no safe path", h->repo, name ? name : "");
    for (size_t i = 0; i < n && !match; i++) match = fnmatch(patterns[i], name, 0) == 0;
    if (!match) return QL_OK;
    const char *hash = json_string_value(json_object_get(json_is_object(lfs) ? lfs : j, json_is_object(lfs) ? "sha256" : "blobId"));
    const json_t *size = json_object_get(json_is_object(lfs) ? lfs : j, "size");
    if (!(is_hex(hash, 64) || is_hex(hash, 40)) || !json_is_integer(size) || json_integer_value(size) < 0)
        QL_FAIL(QL_EIO, "%s: the hub gives no size or checksum of %s", h->repo, name);
    *want = (wanted){name, hash, json_integer_value(size)};
    return QL_OK;
}

static ql_status get_one(hub *h, const wanted *w)
{
    char blobs[QL_PATH_MAX], blob[QL_PATH_MAX], path[QL_PATH_MAX];
    struct stat s;
    if ((size_t)snprintf(path, sizeof path, "%s/snapshots/%s/%s", h->root, h->commit, w->name) >= sizeof path)
        QL_FAIL(QL_EINVAL, "%s: the path is too long", w->name);
    h->done += w->size;
    if (lstat(path, &s) == 0 && S_ISREG(s.st_mode) && s.st_size == w->size) return QL_OK; /* from a cache without links */
    h->done -= w->size;
    QL_TRY(ql_path_join(blobs, h->root, "blobs"));
    QL_TRY(ql_path_mkdirs(blobs));
    QL_TRY(ql_path_join(blob, blobs, w->hash));
    if (stat(blob, &s) || s.st_size != w->size) {
        unlink(blob); /* of another size: damaged */
        QL_TRY(download(h, w->name, w->hash, w->size, blob));
    }
    h->done += w->size;
    return link_blob(path, w->name, w->hash, blob);
}

static ql_status get_all(hub *h, const char *const *patterns, size_t n)
{
    json_t *list = json_object_get(h->info, "siblings"), *j;
    wanted w;
    size_t i, found = 0;
    json_array_foreach(list, i, j)
    {
        QL_TRY(read_entry(h, j, patterns, n, &w));
        if (!w.name) continue;
        found++;
        if (w.size > INT64_MAX / 2 - h->total) QL_FAIL(QL_EIO, "%s: impossible sizes", h->repo);
        h->total += w.size;
    }
    if (!found && h->o->kind == QL_HUB_DATASET)
        QL_FAIL(QL_EINVAL, "%s: none of its %zu files is JSON, JSON lines, CSV or text. Other formats come through Python: "
                           "ds = datasets.load_dataset(\"%s\", split=\"train\"), then `data ds`",
                h->repo, json_array_size(list), h->repo);
    if (!found) QL_FAIL(QL_EINVAL, "%s: none of its %zu files is wanted here", h->repo, json_array_size(list));
    json_array_foreach(list, i, j)
    {
        QL_TRY(read_entry(h, j, patterns, n, &w));
        if (w.name) QL_TRY(get_one(h, &w));
    }
    return QL_OK;
}

/* The commit that a revision stands for in the cache; "" where it is not known. */
static ql_status cached_commit(hub *h)
{
    char path[QL_PATH_MAX], *text = NULL;
    size_t n = 0;
    h->commit[0] = 0;
    if (is_hex(h->revision, 40)) {
        memcpy(h->commit, h->revision, 41);
    } else {
        if ((size_t)snprintf(path, sizeof path, "%s/refs/%s", h->root, h->revision) >= sizeof path)
            QL_FAIL(QL_EINVAL, "the revision's name is too long");
        if (!ql_path_is_file(path)) return QL_OK;
        QL_TRY(ql_file_read(path, 100, &text, &n));
        text[strcspn(text, " \r\n")] = 0;
        if (is_hex(text, 40)) memcpy(h->commit, text, 41);
        free(text);
    }
    return QL_OK;
}

static ql_status offline(hub *h, char folder[QL_PATH_MAX])
{
    QL_TRY(cached_commit(h));
    if ((size_t)snprintf(folder, QL_PATH_MAX, "%s/snapshots/%s", h->root, h->commit) >= QL_PATH_MAX)
        QL_FAIL(QL_EINVAL, "the cache's path is too long");
    if (!h->commit[0] || !ql_path_is_dir(folder))
        QL_FAIL(QL_EINVAL, "%s (revision %s) is not in the cache %s, and HF_HUB_OFFLINE forbids to fetch it", h->repo, h->revision,
                h->o->cache_dir);
    return QL_OK;
}

static ql_status online(hub *h, const char *const *patterns, size_t n, char folder[QL_PATH_MAX])
{
    char refs[QL_PATH_MAX], *slash;
    QL_TRY(ask(h));
    QL_TRY(get_all(h, patterns, n));
    if ((size_t)snprintf(folder, QL_PATH_MAX, "%s/snapshots/%s", h->root, h->commit) >= QL_PATH_MAX ||
        (size_t)snprintf(refs, sizeof refs, "%s/refs/%s", h->root, h->revision) >= sizeof refs)
        QL_FAIL(QL_EINVAL, "the cache's path is too long");
    if (is_hex(h->revision, 40)) return QL_OK;
    slash = strrchr(refs, '/');
    *slash = 0;
    QL_TRY(ql_path_mkdirs(refs));
    *slash = '/';
    return ql_file_save(refs, h->commit, 40);
}

/* http://me:secret@host/x → http://host/x */
static void without_password(const char *url, char out[512])
{
    const char *host = strstr(url, "://"), *at;
    host = host ? host + 3 : url;
    size_t n = strcspn(host, "/");
    at = memrchr(host, '@', n);
    memcpy(out, url, (size_t)(host - url));
    strcpy(out + (host - url), at ? at + 1 : host);
}

ql_status ql_hub_snapshot(const ql_hub_options *o, const char *repo, const char *const *patterns, size_t n,
                          char folder[QL_PATH_MAX])
{
    hub h = {.o = o, .repo = repo, .revision = o->revision ? o->revision : "main"};
    const char *slash = strchr(repo, '/'), *endpoint = o->endpoint && *o->endpoint ? o->endpoint : "https://huggingface.co";
    char name[256];
    size_t len = strlen(endpoint);
    if (!ql_hub_is_repo(repo)) QL_FAIL(QL_EINVAL, "'%.100s' is no repository's name (organisation/name)", repo);
    if (!safe_path(h.revision)) QL_FAIL(QL_EINVAL, "'%.100s' is no revision's name", h.revision);
    while (len && endpoint[len - 1] == '/') len--;
    if (len >= sizeof h.endpoint) QL_FAIL(QL_EINVAL, "HF_ENDPOINT is longer than %zu letters", sizeof h.endpoint - 1);
    memcpy(h.endpoint, endpoint, len);
    without_password(h.endpoint, h.site);
    snprintf(name, sizeof name, "%s--%.*s--%s", o->kind == QL_HUB_DATASET ? "datasets" : "models", (int)(slash - repo), repo,
             slash + 1);
    QL_TRY(ql_path_join(h.root, o->cache_dir, name));
    if (o->offline) return offline(&h, folder);
    QL_TRY(ql_http_open(&h));
    ql_status st = online(&h, patterns, n, folder);
    ql_http_close(&h);
    json_decref(h.info);
    return st;
}
