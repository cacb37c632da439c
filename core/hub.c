#include "core/hub.h"

#include "core/hash.h"
#include "core/json.h"
#include "core/unicode.h"

#include <curl/curl.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { API_MAX = 64 << 20, REDIRECTS = 10, HASH_STEP = 16 << 20 };

/* The system's libcurl, opened at the first download: without one everything but downloads works. The header's macros
 * check types of calls to its own functions; these go by the same names through a table. */
static struct {
    CURLcode (*global_init)(long flags);
    CURL *(*init)(void);
    CURLcode (*setopt)(CURL *c, CURLoption option, ...);
    CURLcode (*getinfo)(CURL *c, CURLINFO info, ...);
    CURLcode (*perform)(CURL *c);
    void (*reset)(CURL *c);
    void (*cleanup)(CURL *c);
    const char *(*strerror)(CURLcode code);
} curl;

typedef struct {
    const ql_hub_options *o;
    const char *repo, *endpoint, *revision;
    CURL *curl;
    char root[QL_PATH_MAX]; /* cache_dir/models--org--name */
    char commit[64];
    json_t *info;
    int64_t total, done; /* bytes of all wanted files; of those that are finished */
} hub;

/* One request's answer. */
typedef struct {
    hub *h;
    ql_str *text;     /* into memory, or */
    int fd;           /* into a file */
    const char *name;
    int64_t at, size; /* written so far; the size it must have, −1 unknown */
    long retry_after;
    bool too_long, io_error, stopped;
    int64_t asked_from; /* resumed from here */
    bool checked;
} answer;

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

/* ---- requests ---------------------------------------------------------------------------------- */

static size_t on_header(char *p, size_t one, size_t n, void *user)
{
    answer *a = user;
    static const char name[] = "retry-after:";
    (void)one;
    if (n > sizeof name && strncasecmp(p, name, sizeof name - 1) == 0) {
        char digits[16] = {0};
        size_t k = n - sizeof name + 1 < 15 ? n - sizeof name + 1 : 15;
        memcpy(digits, p + sizeof name - 1, k);
        a->retry_after = strtol(digits, NULL, 10);
    }
    return n;
}

static size_t on_body(char *p, size_t one, size_t n, void *user)
{
    answer *a = user;
    long status = 0;
    (void)one;
    curl.getinfo(a->h->curl, CURLINFO_RESPONSE_CODE, &status);
    if (a->text) {
        if (a->text->len + n > API_MAX || ql_str_add(a->text, p, n) != QL_OK) return 0;
        return n;
    }
    if (status != 200 && status != 206) return n; /* an error's page */
    if (!a->checked && status == 200 && a->asked_from) {
        /* The server does not resume: begin again. */
        a->at = 0;
        if (ftruncate(a->fd, 0)) a->io_error = true;
    }
    a->checked = true;
    if (a->size >= 0 && a->at + (int64_t)n > a->size) return a->too_long = true, 0;
    for (size_t k = 0; k < n && !a->io_error;) {
        ssize_t w = pwrite(a->fd, p + k, n - k, (off_t)a->at);
        if (w < 0 && errno == EINTR) continue;
        if (w <= 0) a->io_error = true;
        else k += (size_t)w, a->at += w;
    }
    return a->io_error ? 0 : n;
}

static int on_progress(void *user, curl_off_t a1, curl_off_t a2, curl_off_t a3, curl_off_t a4)
{
    answer *a = user;
    const ql_hub_options *o = a->h->o;
    (void)a1, (void)a2, (void)a3, (void)a4;
    if (o->progress && o->progress(o->user, a->name, a->h->done + (a->text ? 0 : a->at), a->h->total))
        a->stopped = true;
    return a->stopped;
}

/* No redirect leads from https to plain http. Options by number: libcurl before 7.85 knows only the bit masks, headers after
 * it warn of them, and the library that runs need not be the one compiled with. */
static void allow_protocols(CURL *c, bool secure)
{
    enum { PROTOCOLS = 181, REDIR_PROTOCOLS = 182, PROTOCOLS_STR = 10318, REDIR_PROTOCOLS_STR = 10319 };
    const char *names = secure ? "https" : "http,https";
    long bits = secure ? CURLPROTO_HTTPS : CURLPROTO_HTTP | CURLPROTO_HTTPS;
    if (curl.setopt(c, (CURLoption)PROTOCOLS_STR, names) != CURLE_OK) curl.setopt(c, (CURLoption)PROTOCOLS, bits);
    if (curl.setopt(c, (CURLoption)REDIR_PROTOCOLS_STR, names) != CURLE_OK) curl.setopt(c, (CURLoption)REDIR_PROTOCOLS, bits);
}

static ql_status set_up(hub *h, const char *url, answer *a)
{
    CURL *c = h->curl;
    const ql_hub_options *o = h->o;
    curl.reset(c);
    curl.setopt(c, CURLOPT_URL, url);
    curl.setopt(c, CURLOPT_USERAGENT, "qlora/0.1");
    curl.setopt(c, CURLOPT_NOSIGNAL, 1L);
    curl.setopt(c, CURLOPT_FOLLOWLOCATION, 1L);
    curl.setopt(c, CURLOPT_MAXREDIRS, (long)REDIRECTS);
    curl.setopt(c, CURLOPT_CONNECTTIMEOUT, 15L);
    curl.setopt(c, CURLOPT_LOW_SPEED_LIMIT, 1L);
    curl.setopt(c, CURLOPT_LOW_SPEED_TIME, (long)(o->stall_seconds > 0 ? o->stall_seconds : 30));
    curl.setopt(c, CURLOPT_HEADERFUNCTION, on_header);
    curl.setopt(c, CURLOPT_HEADERDATA, a);
    curl.setopt(c, CURLOPT_WRITEFUNCTION, on_body);
    curl.setopt(c, CURLOPT_WRITEDATA, a);
    curl.setopt(c, CURLOPT_NOPROGRESS, 0L);
    curl.setopt(c, CURLOPT_XFERINFOFUNCTION, on_progress);
    curl.setopt(c, CURLOPT_XFERINFODATA, a);
    allow_protocols(c, strncmp(url, "https:", 6) == 0);
    if (o->token && *o->token) { /* curl drops it when a redirect leads to another host */
        curl.setopt(c, CURLOPT_HTTPAUTH, (long)CURLAUTH_BEARER);
        if (curl.setopt(c, CURLOPT_XOAUTH2_BEARER, o->token) != CURLE_OK)
            QL_FAIL(QL_ENOMEM, "no memory for a request");
    }
    /* Not RESUME_FROM, which makes an error of a server that sends the whole file instead. */
    char range[32];
    snprintf(range, sizeof range, "%lld-", (long long)a->at);
    if (a->at && curl.setopt(c, CURLOPT_RANGE, range) != CURLE_OK) QL_FAIL(QL_ENOMEM, "no memory for a request");
    a->asked_from = a->at, a->checked = false, a->retry_after = -1;
    return QL_OK;
}

static const char *site(const hub *h)
{
    return h->o->kind == QL_HUB_DATASET ? "datasets/" : "";
}

static ql_status refused(const hub *h, long status)
{
    bool token = h->o->token && *h->o->token;
    if (status == 404)
        QL_FAIL(QL_EINVAL, "%s: there is no such repository, or no revision '%s' of it, on %s", h->repo, h->revision,
                h->endpoint);
    if (!token)
        QL_FAIL(QL_EINVAL, "%s: the hub answers %ld: it is gated or private (or does not exist). Open %s/%s%s, sign in and "
                           "click \"Agree and access repository\"; make a token with read rights at %s/settings/tokens "
                           "and give it as HF_TOKEN (on Kaggle: Add-ons, Secrets, HF_TOKEN)",
                h->repo, status, h->endpoint, site(h), h->repo, h->endpoint);
    QL_FAIL(QL_EINVAL, "%s: the hub answers %ld to your token. Open %s/%s%s with the account of that token and click \"Agree "
                       "and access repository\" (some wait for approval); a fine-grained token also needs \"Read access to "
                       "contents of all public gated repos you can access\" at %s/settings/tokens",
            h->repo, status, h->endpoint, site(h), h->repo, h->endpoint);
}

/* Before the next try. A stop is heard while waiting. */
static ql_status pause_before(const hub *h, int attempt, long retry_after)
{
    int64_t ms = (int64_t)(h->o->wait_ms > 0 ? h->o->wait_ms : 1000) << (attempt < 5 ? attempt : 5);
    if (retry_after >= 0) ms = ql_min64(retry_after, 60) * 1000;
    for (int64_t at = 0; at < ms; at += 100) {
        int64_t left = ql_min64(100, ms - at);
        struct timespec t = {0, left * 1000000};
        nanosleep(&t, NULL);
        if (h->o->progress && h->o->progress(h->o->user, h->repo, h->done, h->total))
            QL_FAIL(QL_ESTOP, "the download of %s was stopped; the next one goes on from there", h->repo);
    }
    return QL_OK;
}

/* Asks until there is an answer that trying again would not change. A try that brought bytes is no failure. */
static ql_status fetch(hub *h, const char *url, answer *a)
{
    int tries = h->o->retries > 0 ? h->o->retries : 5;
    int64_t best = a->at;
    for (int failed = 0;;) {
        long status = 0;
        QL_TRY(set_up(h, url, a));
        CURLcode rc = curl.perform(h->curl);
        curl.getinfo(h->curl, CURLINFO_RESPONSE_CODE, &status);
        if (a->stopped) QL_FAIL(QL_ESTOP, "the download of %s was stopped; the next one goes on from there", h->repo);
        if (a->io_error) QL_FAIL(QL_EIO, "%s: cannot be written: %s (is the disk full?)", a->name, strerror(errno));
        if (a->too_long)
            QL_FAIL(QL_EIO, "%s: the server sends more than the %lld bytes that the file has", a->name, (long long)a->size);
        bool good = status == 200 || status == 206, whole = !a->text && a->size >= 0 && a->at == a->size;
        if (good && whole && a->checked) return QL_OK; /* even if more was announced: the checksum decides */
        if (rc == CURLE_OK && (status == 401 || status == 403 || status == 404)) return refused(h, status);
        if (rc == CURLE_OK && good && (a->text || whole)) return QL_OK;
        if (rc == CURLE_OK && status == 416 && !a->text) { /* what is there is no part of the file */
            a->at = 0;
            if (ftruncate(a->fd, 0)) QL_FAIL(QL_EIO, "%s: %s", a->name, strerror(errno));
        } else if (rc == CURLE_OK && status >= 400 && status < 500 && status != 429 && status != 408) {
            QL_FAIL(QL_EIO, "%s: the server answers %ld", a->name, status);
        }
        failed = a->at > best ? 0 : failed + 1;
        best = ql_max64(best, a->at);
        if (failed >= tries) {
            if (rc != CURLE_OK)
                QL_FAIL(QL_EIO, "%s: %s (%d tries; %s). Without a network, set HF_HUB_OFFLINE=1 to use what is cached", a->name,
                        curl.strerror(rc), failed, h->endpoint);
            if (status < 400)
                QL_FAIL(QL_EIO, "%s: the server ends after %lld of %lld bytes (%d tries)", a->name, (long long)a->at,
                        (long long)a->size, failed);
            QL_FAIL(QL_EIO, "%s: the server answers %ld (%d tries)%s", a->name, status, failed,
                    status == 429 ? ": too many requests; a token raises the limit" : "");
        }
        if (a->text) ql_str_clear(a->text);
        QL_TRY(pause_before(h, failed > 0 ? failed - 1 : 0, a->retry_after));
    }
}

/* ---- the cache --------------------------------------------------------------------------------- */

static ql_status add_escaped(ql_str *s, const char *path)
{
    for (; *path; path++) {
        bool plain = (*path >= 'a' && *path <= 'z') || (*path >= 'A' && *path <= 'Z') || (*path >= '0' && *path <= '9') ||
                     strchr("/._-", *path);
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
    QL_GO(add_escaped(&url, h->revision));
    QL_GO(ql_str_puts(&url, "?blobs=true"));
    QL_GO(fetch(h, url.data, &a));
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

/* Another process may be at the same file: it is waited for, and a stop is heard meanwhile. */
static ql_status lock_file(const hub *h, int fd, const char *name)
{
    while (flock(fd, LOCK_EX | LOCK_NB)) {
        struct timespec t = {0, 100000000};
        if (errno != EWOULDBLOCK && errno != EINTR) return QL_OK; /* a file system without locks */
        nanosleep(&t, NULL);
        if (h->o->progress && h->o->progress(h->o->user, name, h->done, h->total))
            QL_FAIL(QL_ESTOP, "the download of %s was stopped; another process is at it still", h->repo);
    }
    return QL_OK;
}

static ql_status download(hub *h, const char *name, const char *hash, int64_t size, const char *blob)
{
    ql_str part = {0}, url = {0};
    answer a = {.h = h, .fd = -1, .name = name, .size = size};
    struct stat st_;
    ql_status st = QL_OK;
    QL_GO(ql_str_printf(&part, "%s.incomplete", blob));
    QL_GO(ql_str_printf(&url, "%s/%s%s/resolve/%s/", h->endpoint, site(h), h->repo, h->commit));
    QL_GO(add_escaped(&url, name));
    a.fd = open(part.data, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (a.fd < 0) {
        st = ql_fail(QL_EIO, "%s: %s", part.data, strerror(errno));
        goto out;
    }
    QL_GO(lock_file(h, a.fd, name));
    if (access(blob, F_OK) == 0) goto out;
    if (fstat(a.fd, &st_) == 0 && st_.st_size <= size) a.at = st_.st_size;
    else if (ftruncate(a.fd, 0)) st = ql_fail(QL_EIO, "%s: %s", name, strerror(errno));
    if (st == QL_OK && (a.at < size || size == 0)) st = fetch(h, url.data, &a);
    if (st == QL_OK) st = check_hash(h, part.data, hash, name);
    if (st == QL_OK && rename(part.data, blob)) st = ql_fail(QL_EIO, "%s: %s", blob, strerror(errno));
out:
    if (a.fd >= 0) close(a.fd);
    ql_str_free(&part), ql_str_free(&url);
    return st;
}

/* snapshots/COMMIT/a/b → ../../../blobs/HASH */
static ql_status link_blob(const hub *h, const char *name, const char *hash)
{
    char path[QL_PATH_MAX], *slash;
    ql_str target = {0};
    ql_status st = QL_OK;
    if ((size_t)snprintf(path, sizeof path, "%s/snapshots/%s/%s", h->root, h->commit, name) >= sizeof path)
        QL_FAIL(QL_EINVAL, "%s: the path is too long", name);
    slash = strrchr(path, '/');
    *slash = 0;
    QL_TRY(ql_path_mkdirs(path));
    *slash = '/';
    QL_GO(ql_str_puts(&target, "../../"));
    for (const char *p = name; *p; p++)
        if (*p == '/') QL_GO(ql_str_puts(&target, "../"));
    QL_GO(ql_str_printf(&target, "blobs/%s", hash));
    if (symlink(target.data, path) && errno != EEXIST) st = ql_fail(QL_EIO, "%s: %s", path, strerror(errno));
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
    char blobs[QL_PATH_MAX], blob[QL_PATH_MAX];
    struct stat s;
    QL_TRY(ql_path_join(blobs, h->root, "blobs"));
    QL_TRY(ql_path_mkdirs(blobs));
    QL_TRY(ql_path_join(blob, blobs, w->hash));
    if (stat(blob, &s) || s.st_size != w->size) {
        unlink(blob); /* of another size: damaged */
        QL_TRY(download(h, w->name, w->hash, w->size, blob));
    }
    h->done += w->size;
    return link_blob(h, w->name, w->hash);
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

static pthread_once_t curl_once = PTHREAD_ONCE_INIT;
static void curl_start(void)
{
    static const char *const names[] = {"global_init", "easy_init", "easy_setopt", "easy_getinfo",
                                        "easy_perform", "easy_reset", "easy_cleanup", "easy_strerror"};
    void *functions[8], *so = dlopen("libcurl.so.4", RTLD_NOW | RTLD_LOCAL);
    if (!so) so = dlopen("libcurl-gnutls.so.4", RTLD_NOW | RTLD_LOCAL);
    for (size_t i = 0; i < 8; i++) {
        char symbol[32];
        snprintf(symbol, sizeof symbol, "curl_%s", names[i]);
        if (!so || !(functions[i] = dlsym(so, symbol))) return;
    }
    _Static_assert(sizeof functions == sizeof curl, "one name for each function, in the table's order");
    memcpy(&curl, functions, sizeof curl);
    curl.global_init(CURL_GLOBAL_DEFAULT);
}

ql_status ql_hub_snapshot(const ql_hub_options *o, const char *repo, const char *const *patterns, size_t n,
                          char folder[QL_PATH_MAX])
{
    hub h = {.o = o, .repo = repo, .endpoint = o->endpoint ? o->endpoint : "https://huggingface.co",
             .revision = o->revision ? o->revision : "main"};
    const char *slash = strchr(repo, '/');
    char name[256];
    ql_status st = QL_OK;
    if (!ql_hub_is_repo(repo)) QL_FAIL(QL_EINVAL, "'%.100s' is no repository's name (organisation/name)", repo);
    if (!safe_path(h.revision)) QL_FAIL(QL_EINVAL, "'%.100s' is no revision's name", h.revision);
    snprintf(name, sizeof name, "%s--%.*s--%s", o->kind == QL_HUB_DATASET ? "datasets" : "models", (int)(slash - repo), repo,
             slash + 1);
    QL_TRY(ql_path_join(h.root, o->cache_dir, name));
    if (o->offline) return offline(&h, folder);
    pthread_once(&curl_once, curl_start);
    if (!curl.init)
        QL_FAIL(QL_ENOSUP, "%s: downloads need libcurl.so.4 (apt-get install libcurl4); a folder that is already here needs nothing", repo);
    h.curl = curl.init();
    if (!h.curl) QL_FAIL(QL_ENOMEM, "no memory for a request");
    st = online(&h, patterns, n, folder);
    curl.cleanup(h.curl);
    json_decref(h.info);
    return st;
}
