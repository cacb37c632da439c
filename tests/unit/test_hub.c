#include "core/hash.h"
#include "core/hub.h"
#include "core/unicode.h"
#include "tests/test.h"

#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define COMMIT "0123456789abcdef0123456789abcdef01234567"
#define TOKEN  "hf_secretsecret"

/* Instead of libc's: a file system without links. */
static bool no_links;
int symlink(const char *target, const char *path)
{
    if (!no_links) return symlinkat(target, AT_FDCWD, path);
    errno = EPERM;
    return -1;
}

/* ---- a hub on 127.0.0.1 that misbehaves as a file's name asks ------------------------------------ */

enum { BODY = 100000 };
static char body[BODY];
static int port, listener;
static atomic_int requests, body_requests, leaks, mode_429, stop_server;
static char seen_range[64], seen_path[512];
static pthread_t server;

static void send_all(int fd, const char *p, size_t n)
{
    while (n) {
        ssize_t k = send(fd, p, n, MSG_NOSIGNAL);
        if (k <= 0) return;
        p += k, n -= (size_t)k;
    }
}

static void answer(int fd, int status, const char *headers, const char *p, size_t n, size_t announced)
{
    char head[512];
    int k = snprintf(head, sizeof head, "HTTP/1.1 %d X\r\nContent-Length: %zu\r\nConnection: close\r\n%s\r\n", status,
                     announced, headers);
    send_all(fd, head, (size_t)k);
    send_all(fd, p, n);
}

static void sha(ql_sha_kind kind, const char *head, size_t nh, const char *p, size_t n, char hex[65])
{
    ql_sha s;
    ql_sha_begin(&s, kind);
    ql_sha_add(&s, head, nh), ql_sha_add(&s, p, n);
    ql_sha_end(&s, hex);
}

/* The repository org/NAME has config.json and one large file NAME.bin, whose name says what goes wrong. */
static void api(int fd, const char *name)
{
    char json[1024], large[65], small[65];
    sha(QL_SHA256, "", 0, body, BODY, large);
    sha(QL_SHA1, "blob 2\0", 7, "{}", 2, small);
    if (strcmp(name, "badsum") == 0) large[0] = large[0] == 'a' ? 'b' : 'a';
    int n = snprintf(json, sizeof json,
                     "{\"sha\":\"" COMMIT "\",\"siblings\":[{\"rfilename\":\"sub/config.json\",\"size\":2,\"blobId\":\"%s\"},"
                     "{\"rfilename\":\"%s.bin\",\"blobId\":\"x\",\"lfs\":{\"sha256\":\"%s\",\"size\":%d}},"
                     "{\"rfilename\":\"skip.me\",\"size\":1,\"blobId\":\"%s\"}%s]}",
                     small, name, large, BODY, small,
                     strcmp(name, "evil") == 0 ? ",{\"rfilename\":\"../../x\",\"size\":1,\"blobId\":\"00\"}" : "");
    answer(fd, 200, "", json, (size_t)n, (size_t)n);
}

static void file_request(int fd, const char *path, const char *request)
{
    const char *range = strstr(request, "Range: bytes=");
    size_t from = range ? strtoul(range + 13, NULL, 10) : 0, rest = BODY - (from < BODY ? from : BODY);
    int first = atomic_fetch_add(&body_requests, 1) == 0;
    char to[160] = "";
    if (range) snprintf(to, sizeof to, "Content-Range: bytes %zu-%d/%d\r\n", from, BODY - 1, BODY);
    if (range) snprintf(seen_range, sizeof seen_range, "%zu-", from);
    int status = range ? 206 : 200;
    const char *p = body + BODY - rest;
    if (strstr(path, "truncate") && first) answer(fd, status, to, p, rest / 2, rest);
    else if (strstr(path, "noresume")) answer(fd, 200, "", body, first ? BODY / 2 : BODY, BODY);
    else if (strstr(path, "stall") && first) {
        answer(fd, status, to, p, rest / 3, rest);
        struct pollfd pf = {.fd = fd, .events = POLLIN};
        poll(&pf, 1, 60000); /* until the client gives up */
    } else if (strstr(path, "redirect") && !strstr(path, "/cdn/")) {
        snprintf(to, sizeof to, "Location: http://localhost:%d/cdn/redirect.bin\r\n", port);
        answer(fd, 302, to, "", 0, 0);
    } else if (strstr(path, "longer")) answer(fd, 200, "", body, BODY, BODY + 5000);
    else if (strstr(path, "toomuch")) {
        static char more[BODY + 5000];
        answer(fd, 200, "", more, sizeof more, sizeof more);
    } else if (strstr(path, "busy") && atomic_fetch_add(&mode_429, 1) < 3)
        answer(fd, mode_429 % 2 ? 429 : 500, "Retry-After: 0\r\n", "later", 5, 5);
    else if (strstr(path, "shorter")) answer(fd, 200, "", body, BODY - 5000, BODY - 5000);
    else if (strstr(path, "limited") && first) answer(fd, 429, "RateLimit: \"api\";r=0;t=1\r\n", "", 0, 0);
    else if (strstr(path, "later") && first) answer(fd, 503, "Retry-After: Wed, 21 Oct 2015 07:28:00 GMT\r\n", "", 0, 0);
    else if (strstr(path, "broken")) answer(fd, 503, "", "no", 2, 2);
    else answer(fd, status, to, p, rest, rest);
}

static void serve(int fd)
{
    char request[4096], path[512] = "";
    size_t n = 0;
    ssize_t k;
    while (n + 1 < sizeof request && (k = recv(fd, request + n, sizeof request - 1 - n, 0)) > 0) {
        n += (size_t)k;
        request[n] = 0;
        if (strstr(request, "\r\n\r\n")) break;
    }
    request[n] = 0;
    atomic_fetch_add(&requests, 1);
    sscanf(request, "GET %511s", path);
    snprintf(seen_path, sizeof seen_path, "%s", path);
    char *own = strstr(path, "/mirror/hf/"); /* an endpoint with a path, or asked as a proxy */
    if (own) memmove(path, own + 10, strlen(own + 10) + 1);
    else if (strncmp(path, "http://", 7) == 0 && strchr(path + 7, '/')) memmove(path, strchr(path + 7, '/'), strlen(strchr(path + 7, '/')) + 1);
    bool token = strstr(request, "Authorization: Bearer " TOKEN) != NULL;
    char name[128] = "";
    if (strstr(path, "/cdn/") && strstr(request, TOKEN)) atomic_fetch_add(&leaks, 1);
    if (strncmp(path, "/api/models/org/renamed/", 24) == 0) {
        answer(fd, 307, "Location: /api/models/org/plain2/revision/main?blobs=true\r\n", "", 0, 0);
    } else if (strstr(path, "/revision/nowhere")) {
        answer(fd, 404, "X-Error-Code: RevisionNotFound\r\n", "", 0, 0);
    } else if (strcmp(path, "/api/models/org/slash/revision/refs%2Fpr%2F1?blobs=true") == 0) {
        api(fd, "slash");
    } else if (sscanf(path, "/api/models/org/%127[^/]/revision/main", name) == 1) {
        if (strcmp(name, "gated") == 0 && !token) answer(fd, 401, "", "", 0, 0);
        else if (strcmp(name, "gated") == 0) answer(fd, 403, "X-Error-Code: GatedRepo\r\n", "", 0, 0);
        else if (strcmp(name, "expired") == 0) answer(fd, 401, "", "", 0, 0);
        else if (strcmp(name, "disabled") == 0) answer(fd, 403, "X-Error-Code: DisabledRepo\r\n", "", 0, 0);
        else if (strcmp(name, "missing") == 0) answer(fd, 404, "", "", 0, 0);
        else if (strcmp(name, "garbage") == 0) answer(fd, 200, "", "<html>", 6, 6);
        else api(fd, name);
    } else if (strstr(path, "config.json")) {
        answer(fd, 200, "", "{}", 2, 2);
    } else {
        file_request(fd, path, request);
    }
    close(fd);
}

static void *server_main(void *arg)
{
    (void)arg;
    while (!atomic_load(&stop_server)) {
        struct pollfd p = {.fd = listener, .events = POLLIN};
        if (poll(&p, 1, 50) == 1) {
            int fd = accept(listener, NULL, NULL);
            if (fd >= 0) serve(fd);
        }
    }
    return NULL;
}

static char cache[64], endpoint[64];

static bool start(void)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof a;
    if (port) return true;
    for (int i = 0; i < BODY; i++) body[i] = (char)(i * 7 + i / 251);
    listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listener < 0 || bind(listener, (struct sockaddr *)&a, sizeof a) || listen(listener, 16) ||
        getsockname(listener, (struct sockaddr *)&a, &n))
        return false;
    port = ntohs(a.sin_port);
    snprintf(endpoint, sizeof endpoint, "http://127.0.0.1:%d", port);
    snprintf(cache, sizeof cache, "/tmp/qlora-hub-XXXXXX");
    return mkdtemp(cache) && pthread_create(&server, NULL, server_main, NULL) == 0;
}

static int stop_at_half(void *user, const char *file, int64_t done, int64_t total)
{
    (void)file;
    *(int64_t *)user = done;
    return done > total / 4;
}

static ql_hub_options options(void)
{
    atomic_store(&body_requests, 0), atomic_store(&mode_429, 0), atomic_store(&requests, 0);
    seen_range[0] = 0;
    return (ql_hub_options){.cache_dir = cache, .endpoint = endpoint, .wait_ms = 5, .stall_seconds = 60};
}

static const char *const wanted[] = {"*.bin", "*.json"};

static ql_status get(const char *repo, const ql_hub_options *o, char *folder)
{
    return ql_hub_snapshot(o, repo, wanted, 2, folder);
}

/* The snapshot has the file, byte for byte. */
static bool whole(const char *folder, const char *name)
{
    char path[QL_PATH_MAX + 200], *text = NULL;
    size_t n = 0;
    snprintf(path, sizeof path, "%s/%s.bin", folder, name);
    bool same = ql_file_read(path, 1 << 20, &text, &n) == QL_OK && n == BODY && memcmp(text, body, n) == 0;
    free(text);
    return same;
}

TEST(checksums)
{
    char hex[65];
    sha(QL_SHA256, "", 0, "abc", 3, hex);
    CHECK_STR(hex, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    sha(QL_SHA1, "", 0, "abc", 3, hex);
    CHECK_STR(hex, "a9993e364706816aba3e25717850c26c9cd0d89d");
    sha(QL_SHA256, "abcdbcdecdefdefgefghfghighijhijk", 32, "ijkljklmklmnlmnomnopnopq", 24, hex);
    CHECK_STR(hex, "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
}

/* Values of the xxhash library. */
TEST(fast_hash)
{
    unsigned char x[100];
    for (int i = 0; i < 100; i++) x[i] = (unsigned char)i;
    CHECK(ql_hash64(0, "", 0) == 0xef46db3751d8e999u);
    CHECK(ql_hash64(0, "abc", 3) == 0x44bc2cf5ad770999u);
    CHECK(ql_hash64(0, x, 100) == 0x6ac1e58032166597u);
    CHECK(ql_hash64(12345, x, 71) == 0x865c0c8c4dd3da15u);
}

TEST(names_are_checked)
{
    CHECK(ql_hub_is_repo("org/name-1.5_x"));
    char name[64];
    CHECK(ql_hub_name("/c/hub/models--org--a--b/snapshots/0123", name, sizeof name));
    CHECK_STR(name, "org/a--b");
    CHECK(ql_hub_name("datasets--o--d/snapshots/1/x.jsonl", name, sizeof name));
    CHECK_STR(name, "o/d");
    CHECK(!ql_hub_name("/c/hub/models--org/snapshots/0123", name, sizeof name) && !ql_hub_name("/a/models--o--n", name, sizeof name));
    CHECK(!ql_hub_name("models--organisation--name/snapshots/1", name, 8) && !ql_hub_name("", name, sizeof name));
    CHECK(!ql_hub_is_repo("name"));
    CHECK(!ql_hub_is_repo("a/b/c"));
    CHECK(!ql_hub_is_repo("../b"));
    CHECK(!ql_hub_is_repo("a/.b"));
    CHECK(!ql_hub_is_repo("a b/c"));
}

TEST(the_standard_cache_is_filled_and_reused)
{
    char folder[QL_PATH_MAX], path[QL_PATH_MAX + 64], target[256];
    CHECK(start());
    ql_hub_options o = options();
    CHECK_OK(get("org/plain", &o, folder));
    CHECK(whole(folder, "plain"));
    CHECK(strstr(folder, "/models--org--plain/snapshots/" COMMIT));
    snprintf(path, sizeof path, "%s/sub/config.json", folder);
    ssize_t n = readlink(path, target, sizeof target - 1);
    CHECK(n > 0);
    target[n] = 0;
    CHECK(strncmp(target, "../../../blobs/", 15) == 0 && strlen(target) == 15 + 40);
    CHECK(access(path, R_OK) == 0);
    snprintf(path, sizeof path, "%s/skip.me", folder);
    CHECK(access(path, F_OK) != 0);
    int before = atomic_load(&requests);
    CHECK_OK(get("org/plain", &o, folder));
    CHECK_INT(atomic_load(&requests), before + 1); /* only the question what main is */
    o.offline = true;
    CHECK_OK(get("org/plain", &o, folder));
    CHECK_INT(atomic_load(&requests), before + 1);
    CHECK(whole(folder, "plain"));
    CHECK_FAILS(get("org/other", &o, folder), QL_EINVAL, "HF_HUB_OFFLINE");
}

TEST(cut_stalled_and_busy_servers_are_outlasted)
{
    char folder[QL_PATH_MAX];
    static const char *const names[] = {"truncate", "stall", "noresume", "busy", "longer", "redirect"};
    CHECK(start());
    for (int i = 0; i < 6; i++) {
        char repo[64];
        ql_hub_options o = options();
        o.token = TOKEN;
        if (strcmp(names[i], "stall") == 0) o.stall_seconds = 2;
        snprintf(repo, sizeof repo, "org/%s", names[i]);
        ql_status st = get(repo, &o, folder);
        CHECK_MSG(st == QL_OK && whole(folder, names[i]), "%s: %s", names[i], ql_error());
        if (i == 0) CHECK_STR(seen_range, "50000-");
        if (i < 3) CHECK_INT(atomic_load(&body_requests), 2);
    }
    CHECK_INT(atomic_load(&leaks), 0); /* the token stays with the endpoint's host */
}

TEST(lies_are_found)
{
    char folder[QL_PATH_MAX];
    CHECK(start());
    ql_hub_options o = options();
    o.retries = 2;
    CHECK_FAILS(get("org/badsum", &o, folder), QL_EIO, "checksum");
    CHECK_FAILS(get("org/toomuch", &o, folder), QL_EIO, "more than the 100000 bytes");
    CHECK_FAILS(get("org/shorter", &o, folder), QL_EIO, "ends after 95000 of 100000 bytes");
    CHECK_FAILS(get("org/broken", &o, folder), QL_EIO, "answers 503 (2 tries)");
    CHECK_FAILS(get("org/garbage", &o, folder), QL_EINVAL, "the hub's answer");
    CHECK_FAILS(get("org/evil", &o, folder), QL_EIO, "no safe path");
    o.endpoint = "http://127.0.0.1:1";
    CHECK_FAILS(get("org/x", &o, folder), QL_EIO, "HF_HUB_OFFLINE");
}

TEST(gated_models_say_what_to_click)
{
    char folder[QL_PATH_MAX];
    CHECK(start());
    ql_hub_options o = options();
    CHECK_FAILS(get("org/gated", &o, folder), QL_EINVAL, "HF_TOKEN");
    o.token = TOKEN;
    CHECK(get("org/gated", &o, folder) == QL_EINVAL);
    CHECK(strstr(ql_error(), "Agree and access repository") && strstr(ql_error(), "/org/gated"));
    CHECK(!strstr(ql_error(), TOKEN));
    ql_error_clear();
    CHECK_FAILS(get("org/missing", &o, folder), QL_EINVAL, "no such repository");
    CHECK_FAILS(get("org/expired", &o, folder), QL_EINVAL, "does not know your token");
    CHECK_FAILS(get("org/disabled", &o, folder), QL_EINVAL, "has disabled this repository");
    o.revision = "nowhere";
    CHECK_FAILS(get("org/plain", &o, folder), QL_EINVAL, "no revision 'nowhere'");
}

/* Revisions with slashes, renamed repositories, an endpoint with a path, a proxy. */
TEST(addresses)
{
    char folder[QL_PATH_MAX], path[QL_PATH_MAX + 64], mirror[128];
    CHECK(start());
    ql_hub_options o = options();
    o.revision = "refs/pr/1";
    CHECK_OK(get("org/slash", &o, folder));
    CHECK(whole(folder, "slash"));
    snprintf(path, sizeof path, "%s/models--org--slash/refs/refs/pr/1", cache);
    CHECK(access(path, R_OK) == 0);
    o.offline = true;
    CHECK_OK(get("org/slash", &o, folder));
    o = options();
    CHECK_OK(get("org/renamed", &o, folder));
    CHECK(strstr(folder, "models--org--renamed") && whole(folder, "plain2"));
    snprintf(mirror, sizeof mirror, "%s/mirror/hf//", endpoint);
    o.endpoint = mirror;
    CHECK_OK(get("org/mirrored", &o, folder));
    CHECK(whole(folder, "mirrored"));
    CHECK(strncmp(seen_path, "/mirror/hf/org/mirrored/resolve/", 32) == 0);
    o.endpoint = "http://hub.invalid";
    setenv("http_proxy", endpoint, 1);
    CHECK_OK(get("org/proxied", &o, folder));
    unsetenv("http_proxy");
    CHECK(whole(folder, "proxied"));
    CHECK(strncmp(seen_path, "http://hub.invalid/org/proxied/", 31) == 0);
}

static int waits;
static int count_waits(void *user, const char *file, int64_t done, int64_t total)
{
    (void)done, (void)total;
    waits += strcmp(file, user) == 0;
    return 0;
}

/* The hub's own header says for how long; a date in Retry-After is no number of seconds. */
TEST(limits_are_waited_for)
{
    char folder[QL_PATH_MAX], name[] = "org/limited", later[] = "org/later";
    CHECK(start());
    ql_hub_options o = options();
    o.progress = count_waits, o.user = name, waits = 0;
    CHECK_OK(get(name, &o, folder));
    CHECK(waits >= 10); /* looks round ten times a second */
    o = options();
    o.wait_ms = 1000, o.progress = count_waits, o.user = later, waits = 0;
    CHECK_OK(get(later, &o, folder));
    CHECK(waits >= 10);
}

static int held = -1;
static int release_at_third(void *user, const char *file, int64_t done, int64_t total)
{
    int *calls = user;
    (void)done, (void)total;
    if (held >= 0 && strcmp(file, "locked.bin") == 0 && ++*calls == 3) {
        if (atomic_load(&body_requests)) return 1; /* it did not wait */
        close(held), held = -1;
    }
    return 0;
}

/* The lock is where huggingface_hub has it. */
TEST(another_process_is_waited_for)
{
    char folder[QL_PATH_MAX], path[300], hex[65];
    int calls = 0;
    CHECK(start());
    ql_hub_options o = options();
    sha(QL_SHA256, "", 0, body, BODY, hex);
    snprintf(path, sizeof path, "%s/.locks/models--org--locked", cache);
    CHECK_OK(ql_path_mkdirs(path));
    snprintf(path, sizeof path, "%s/.locks/models--org--locked/%s.lock", cache, hex);
    held = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK(held >= 0 && flock(held, LOCK_EX) == 0);
    o.progress = release_at_third, o.user = &calls;
    CHECK_OK(get("org/locked", &o, folder));
    CHECK(calls >= 3 && held < 0);
    CHECK(whole(folder, "locked"));
}

TEST(without_links_the_file_itself_is_there)
{
    char folder[QL_PATH_MAX], path[QL_PATH_MAX + 64];
    struct stat st;
    CHECK(start());
    ql_hub_options o = options();
    no_links = true;
    ql_status got = get("org/unlinked", &o, folder);
    int before = atomic_load(&body_requests);
    if (got == QL_OK) got = get("org/unlinked", &o, folder);
    no_links = false;
    CHECK_OK(got);
    CHECK(whole(folder, "unlinked"));
    snprintf(path, sizeof path, "%s/unlinked.bin", folder);
    CHECK(lstat(path, &st) == 0 && S_ISREG(st.st_mode));
    CHECK_INT(atomic_load(&body_requests), before); /* what is there is not fetched again */
}

/* As on a full disk: what could not be written is said, and the next download goes on behind what could. */
TEST(a_file_that_cannot_be_written)
{
    char folder[QL_PATH_MAX];
    struct rlimit old, low;
    CHECK(start());
    ql_hub_options o = options();
    signal(SIGXFSZ, SIG_IGN);
    CHECK(getrlimit(RLIMIT_FSIZE, &old) == 0);
    low = old, low.rlim_cur = 40000;
    CHECK(setrlimit(RLIMIT_FSIZE, &low) == 0);
    ql_status st = get("org/full", &o, folder);
    CHECK(setrlimit(RLIMIT_FSIZE, &old) == 0);
    CHECK_FAILS(st, QL_EIO, "full.bin: cannot be written: File too large");
    o = options();
    CHECK_OK(get("org/full", &o, folder));
    CHECK_STR(seen_range, "40000-");
    CHECK(whole(folder, "full"));
}

TEST(a_stopped_download_goes_on)
{
    char folder[QL_PATH_MAX];
    int64_t done = 0;
    CHECK(start());
    ql_hub_options o = options();
    o.progress = stop_at_half, o.user = &done;
    ql_status st = get("org/again", &o, folder);
    CHECK_MSG(st == QL_ESTOP, "%s %s", ql_status_name(st), ql_error());
    ql_error_clear();
    CHECK(done > 0);
    o = options();
    CHECK_OK(get("org/again", &o, folder));
    CHECK(whole(folder, "again"));
}

TEST(clean_up)
{
    char cmd[96];
    atomic_store(&stop_server, 1);
    if (port) pthread_join(server, NULL), close(listener);
    snprintf(cmd, sizeof cmd, "rm -rf '%s'", cache);
    CHECK(!cache[0] || system(cmd) == 0);
}

TEST_MAIN(T(checksums), T(fast_hash), T(names_are_checked), T(the_standard_cache_is_filled_and_reused),
          T(cut_stalled_and_busy_servers_are_outlasted), T(lies_are_found), T(gated_models_say_what_to_click), T(addresses), T(limits_are_waited_for),
          T(another_process_is_waited_for), T(without_links_the_file_itself_is_there), T(a_file_that_cannot_be_written),
          T(a_stopped_download_goes_on), T(clean_up))
