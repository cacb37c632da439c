#include "core/hub_http.h"

#include <curl/curl.h>
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>
#include <unistd.h>

enum { API_MAX = 64 << 20, REDIRECTS = 10, LONGEST_WAIT = 300 };

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

/* The value of a header line of that name (in small letters, with its colon), without blanks; false: another one. */
static bool header(const char *p, size_t n, const char *name, char *out, size_t size)
{
    size_t k = strlen(name);
    if (n < k || strncasecmp(p, name, k) != 0) return false;
    while (k < n && (p[k] == ' ' || p[k] == '\t')) k++;
    while (n > k && (p[n - 1] == '\r' || p[n - 1] == '\n' || p[n - 1] == ' ')) n--;
    if (n - k >= size) n = k + size - 1;
    memcpy(out, p + k, n - k);
    out[n - k] = 0;
    return true;
}

static long seconds(const char *digits)
{
    return *digits >= '0' && *digits <= '9' ? strtol(digits, NULL, 10) : -1; /* a date is no number */
}

static size_t on_header(char *p, size_t one, size_t n, void *user)
{
    answer *a = user;
    char value[128];
    (void)one;
    if (n > 5 && strncmp(p, "HTTP/", 5) == 0) a->code[0] = 0, a->retry_after = a->limit_reset = -1; /* behind a redirect */
    if (header(p, n, "retry-after:", value, sizeof value)) a->retry_after = seconds(value);
    if (header(p, n, "ratelimit:", value, sizeof value)) { /* "api";r=0;t=55: none left for 55 s */
        const char *t = strstr(value, ";t=");
        a->limit_reset = t ? seconds(t + 3) : -1;
    }
    (void)header(p, n, "x-error-code:", a->code, sizeof a->code);
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
        if (ftruncate(a->fd, 0)) a->io_error = errno;
    }
    a->checked = true;
    if (a->size >= 0 && a->at + (int64_t)n > a->size) return a->too_long = true, 0;
    for (size_t k = 0; k < n && !a->io_error;) {
        ssize_t w = pwrite(a->fd, p + k, n - k, (off_t)a->at);
        if (w < 0 && errno == EINTR) continue;
        if (w <= 0) a->io_error = w < 0 ? errno : EIO;
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
    a->asked_from = a->at, a->checked = false, a->retry_after = a->limit_reset = -1, a->code[0] = 0;
    return QL_OK;
}

const char *ql_hub_site(const hub *h)
{
    return h->o->kind == QL_HUB_DATASET ? "datasets/" : "";
}

static ql_status refused(const hub *h, const answer *a, long status)
{
    bool token = h->o->token && *h->o->token;
    if (strcmp(a->code, "RevisionNotFound") == 0)
        QL_FAIL(QL_EINVAL, "%s: the repository has no revision '%s'", h->repo, h->revision);
    if (strcmp(a->code, "EntryNotFound") == 0)
        QL_FAIL(QL_EINVAL, "%s: the hub has no file %s in revision '%s'", h->repo, a->name, h->revision);
    if (strcmp(a->code, "DisabledRepo") == 0)
        QL_FAIL(QL_EINVAL, "%s: the hub has disabled this repository; %s/%s%s says why", h->repo, h->site, ql_hub_site(h), h->repo);
    if (token && status == 401 && strcmp(a->code, "GatedRepo") != 0)
        QL_FAIL(QL_EINVAL, "%s: the hub answers 401: it does not know your token (mistyped, expired or deleted?), or there is no such "
                           "repository. See %s/settings/tokens, and give the new one as HF_TOKEN", h->repo, h->site);
    if (status == 404)
        QL_FAIL(QL_EINVAL, "%s: there is no such repository, or no revision '%s' of it, on %s", h->repo, h->revision,
                h->site);
    if (!token)
        QL_FAIL(QL_EINVAL, "%s: the hub answers %ld: it is gated or private (or does not exist). Open %s/%s%s, sign in and "
                           "click \"Agree and access repository\"; make a token with read rights at %s/settings/tokens "
                           "and give it as HF_TOKEN (on Kaggle: Add-ons, Secrets, HF_TOKEN)",
                h->repo, status, h->site, ql_hub_site(h), h->repo, h->site);
    QL_FAIL(QL_EINVAL, "%s: the hub answers %ld to your token. Open %s/%s%s with the account of that token and click \"Agree "
                       "and access repository\" (some wait for approval); a fine-grained token also needs \"Read access to "
                       "contents of all public gated repos you can access\" at %s/settings/tokens",
            h->repo, status, h->site, ql_hub_site(h), h->repo, h->site);
}

/* Before the next try. A stop is heard while waiting. */
static ql_status pause_before(const hub *h, int attempt, long retry_after)
{
    int64_t ms = (int64_t)(h->o->wait_ms > 0 ? h->o->wait_ms : 1000) << (attempt < 5 ? attempt : 5);
    if (retry_after >= 0) ms = ql_min64(retry_after, LONGEST_WAIT) * 1000;
    for (int64_t at = 0; at < ms; at += 100) {
        int64_t left = ql_min64(100, ms - at);
        struct timespec t = {0, left * 1000000};
        nanosleep(&t, NULL);
        if (h->o->progress && h->o->progress(h->o->user, h->repo, h->done, h->total))
            QL_FAIL(QL_ESTOP, "the download of %s was stopped; the next one goes on from there", h->repo);
    }
    return QL_OK;
}

ql_status ql_http_get(hub *h, const char *url, answer *a)
{
    int tries = h->o->retries > 0 ? h->o->retries : 5;
    int64_t best = a->at;
    for (int failed = 0;;) {
        long status = 0;
        QL_TRY(set_up(h, url, a));
        CURLcode rc = curl.perform(h->curl);
        curl.getinfo(h->curl, CURLINFO_RESPONSE_CODE, &status);
        if (a->stopped) QL_FAIL(QL_ESTOP, "the download of %s was stopped; the next one goes on from there", h->repo);
        if (a->io_error) {
            bool full = a->io_error == ENOSPC || a->io_error == EDQUOT || a->io_error == EFBIG;
            QL_FAIL(QL_EIO, "%s: cannot be written: %s%s", a->name, strerror(a->io_error),
                    full ? ": make room, or set HF_HOME to a folder with more; what is here already is kept" : "");
        }
        if (a->too_long)
            QL_FAIL(QL_EIO, "%s: the server sends more than the %lld bytes that the file has", a->name, (long long)a->size);
        bool good = status == 200 || status == 206, whole = !a->text && a->size >= 0 && a->at == a->size;
        if (good && whole && a->checked) return QL_OK; /* even if more was announced: the checksum decides */
        if (rc == CURLE_OK && (status == 401 || status == 403 || status == 404)) return refused(h, a, status);
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
                QL_FAIL(QL_EIO, "%s: %s (%d tries; %s). Without a network, give the path of a folder that is there, or set HF_HUB_OFFLINE=1 "
                        "for what is cached", a->name, curl.strerror(rc), failed, h->site);
            if (status < 400)
                QL_FAIL(QL_EIO, "%s: the server ends after %lld of %lld bytes (%d tries)", a->name, (long long)a->at,
                        (long long)a->size, failed);
            QL_FAIL(QL_EIO, "%s: the server answers %ld (%d tries)%s", a->name, status, failed,
                    status == 429 ? ": too many requests; a token raises the limit" : "");
        }
        if (a->text) ql_str_clear(a->text);
        if (status == 429 && a->retry_after < 0) a->retry_after = a->limit_reset;
        QL_TRY(pause_before(h, failed > 0 ? failed - 1 : 0, a->retry_after));
    }
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

ql_status ql_http_open(hub *h)
{
    pthread_once(&curl_once, curl_start);
    if (!curl.init)
        QL_FAIL(QL_ENOSUP, "%s: downloads need libcurl.so.4 (apt-get install libcurl4); a folder that is already here needs nothing", h->repo);
    h->curl = curl.init();
    if (!h->curl) QL_FAIL(QL_ENOMEM, "no memory for a request");
    return QL_OK;
}

void ql_http_close(hub *h)
{
    if (h->curl) curl.cleanup(h->curl);
}
