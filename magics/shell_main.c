/* build/qlora: the verbs from a file or stdin, text/plain out.
 *
 *   qlora first.qlora          a verb a line, with or without %qlora; # comments
 *   qlora -c 'load tiny' -c train   the text of such a file
 *   %%qlora config             a body runs to the next blank line or the next line that begins with
 * %
 * In a terminal it asks for each line, and an error does not end it.
 */
#include "magics/magics.h"
#include "magics/view.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

static volatile sig_atomic_t pressed;

static void on_signal(int number)
{
    (void)number;
    pressed = pressed + 1;
}

static ql_status show(void *self, const json_t *bundle, const char *id, ql_show_how how)
{
    (void)self, (void)id;
    /* What is replaced again and again is told in lines (QL_FOLLOW_LINES) instead. */
    if (how == QL_SHOW_NEW)
        printf("%s\n", ql_jstr(json_object_get(bundle, "data"), "text/plain", ""));
    fflush(stdout);
    return QL_OK;
}

static void print(void *self, const char *text)
{
    (void)self;
    fputs(text, stdout);
    fflush(stdout);
}

static int interrupts(void *self)
{
    (void)self;
    int n = pressed;
    pressed = 0;
    return n;
}

static ql_status run(ql_magics *m, const char *line, const char *body)
{
    json_t *result = NULL;
    ql_status st = ql_magics_run(m, line, body, &result);
    if (st == QL_OK && result) {
        const json_t *bundle = json_object_get(result, "bundle");
        if (json_is_object(bundle)) show(NULL, bundle, NULL, QL_SHOW_NEW);
    }
    json_decref(result);
    if (st == QL_OK && interrupts(NULL)) /* too late for the verb, or it looks for no stop: no further one begins */
        st = ql_fail(QL_ESTOP, "stopped after %s", line);
    if (st == QL_OK) return st;
    fflush(stdout);
    fprintf(stderr, "qlora: %s\n", ql_error());
    return st;
}

/* "%qlora train" and "train" are the same; *cell: it was %%qlora. */
static const char *strip(const char *line, int *cell)
{
    line += strspn(line, " \t");
    *cell = strncmp(line, "%%qlora", 7) == 0;
    if (*cell) return line + 7;
    return strncmp(line, "%qlora", 6) == 0 ? line + 6 : line;
}

static void ask(int in_body)
{
    fputs(in_body ? "     > " : "qlora> ", stdout);
    fflush(stdout);
}

static ql_status run_file(ql_magics *m, FILE *f, const char *name)
{
    int terminal = isatty(fileno(f));
    char *text = NULL, *line = NULL;
    size_t cap = 0;
    ssize_t n;
    ql_buf body = {0};
    ql_status st = QL_OK;
    int open = 0;
    if (terminal) puts("%qlora's verbs, one a line; help lists them, Ctrl-D ends");
    for (;;) {
        if (terminal) st = QL_OK, ask(open);
        if (st != QL_OK) break;
        n = getline(&text, &cap, f);
        if (n < 0 && terminal && ferror(f) && errno == EINTR) { /* Ctrl-C drops what was typed, as in a shell */
            clearerr(f);
            interrupts(NULL);
            open = 0;
            puts("");
            continue;
        }
        if (n < 0) break;
        if (n >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0) memmove(text, text + 3, (size_t)(n -= 3) + 1); /* some editors' first bytes */
        int cell, blank = strspn(text, " \t\r\n") == (size_t)n;
        if (open && (blank || text[0] == '%')) {
            st = run(m, line, ql_buf_str(&body));
            open = 0;
        }
        if (open) ql_buf_put(&body, text);
        if (open || blank || st != QL_OK || text[strspn(text, " \t")] == '#') continue;
        while (n > 0 && (text[n - 1] == '\n' || text[n - 1] == '\r')) text[--n] = 0;
        const char *rest = strip(text, &cell);
        if (cell) {
            free(line);
            line = strdup(rest);
            ql_buf_clear(&body);
            open = line != NULL;
        } else {
            st = run(m, rest, NULL);
        }
    }
    if (st == QL_OK && ferror(f)) {
        st = ql_fail(QL_EIO, "%s", strerror(errno));
        fprintf(stderr, "qlora: %s: %s\n", name, ql_error());
    }
    if (open && st == QL_OK) st = run(m, line, ql_buf_str(&body));
    if (terminal) puts("");
    free(text);
    free(line);
    ql_buf_free(&body);
    return st;
}

/* A file beside this program, or up to two folders above it. */
static char *beside(const char *folder, const char *name)
{
    static const char *const up[] = {"", "/..", "/../.."};
    for (int i = 0; i < 3; i++) {
        char *path = NULL;
        if (asprintf(&path, "%s%s/%s", folder, up[i], name) < 0) return NULL;
        char *real = realpath(path, NULL);
        free(path);
        if (real) return real;
    }
    return NULL;
}

/* An empty variable is none, as in Python. */
static const char *variable(const char *name)
{
    const char *v = getenv(name);
    return v && *v ? v : NULL;
}

static int yes(const char *s)
{
    return s && (strcasecmp(s, "1") == 0 || strcasecmp(s, "on") == 0 || strcasecmp(s, "yes") == 0 || strcasecmp(s, "true") == 0);
}

/* Where huggingface_hub would look, in its own order. */
static json_t *hub(void *self)
{
    const char *cache = variable("HF_HUB_CACHE"), *home = variable("HF_HOME"), *user = variable("HOME"), *token = variable("HF_TOKEN");
    char folder[4096], file[4096], line[512] = "";
    (void)self;
    if (!token) token = variable("HUGGING_FACE_HUB_TOKEN");
    if (home) snprintf(folder, sizeof folder, "%s", home);
    else snprintf(folder, sizeof folder, "%s/.cache/huggingface", user ? user : ".");
    snprintf(file, sizeof file, "%.4000s/token", folder);
    FILE *f = token ? NULL : fopen(file, "re");
    if (f && fgets(line, sizeof line, f)) {
        line[strcspn(line, " \r\n")] = 0;
        token = *line ? line : NULL;
    }
    if (f) fclose(f);
    snprintf(file, sizeof file, "%.4000s/hub", folder);
    return json_pack("{s:s, s:s*, s:s*, s:b}", "cache", cache ? cache : file, "endpoint", variable("HF_ENDPOINT"), "token", token, "offline",
                     yes(getenv("HF_HUB_OFFLINE")));
}

static ql_status run_all(ql_magics *m, int argc, char **argv)
{
    ql_status st = QL_OK;
    if (argc < 2) return run_file(m, stdin, "stdin");
    if (strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "--version") == 0) {
        printf("qlora %s: %%qlora's verbs without a notebook\n"
               "  qlora               in a terminal, or from stdin\n"
               "  qlora first.qlora   a verb a line\n"
               "  qlora -c 'load tiny' -c 'data tiny' -c train\n", QL_VERSION);
        return argv[1][2] == 'v' ? QL_OK : run(m, "help", NULL);
    }
    for (int i = 1; i < argc && st == QL_OK; i++) {
        int verbs = strcmp(argv[i], "-c") == 0;
        if (strcmp(argv[i], "-") == 0) {
            st = run_file(m, stdin, "stdin");
            continue;
        }
        if (argv[i][0] == '-' && (!verbs || !argv[i + 1])) {
            fprintf(stderr, verbs ? "qlora: -c needs a verb: -c 'load tiny'\n" : "qlora: there is no option %s: see qlora --help\n", argv[i]);
            return QL_EINVAL;
        }
        if (verbs && !*argv[++i]) continue;
        FILE *f = verbs ? fmemopen(argv[i], strlen(argv[i]), "r") : fopen(argv[i], "re");
        if (!f) {
            fprintf(stderr, "qlora: %s: %s; a verb is given as -c '%s'\n", argv[i], strerror(errno), argv[i]);
            return QL_EIO;
        }
        st = run_file(m, f, argv[i]);
        fclose(f);
    }
    return st;
}

int main(int argc, char **argv)
{
    char self[4096] = ".";
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    if (n > 0) self[n] = 0;
    char *slash = strrchr(self, '/');
    if (slash) *slash = 0;
    struct sigaction act = {.sa_handler = on_signal}; /* no SA_RESTART: a stop must end the wait */
    sigaction(SIGINT, &act, NULL);
    char *engine = beside(self, "qlora-engine"), *bundled = beside(self, "notebooks");
    const char *given = getenv("QLORA_ENGINE"), *runs = getenv("QLORA_RUNS"),
               *folder = getenv("QLORA_BUNDLED");
    ql_host host = {.show = show, .print = print, .interrupts = interrupts, .hub = hub};
    ql_magics_options o = {.engine = given ? given : engine,
                           .runs = runs,
                           .bundled = folder ? folder : bundled,
                           .follow = QL_FOLLOW_LINES};
    ql_magics *m;
    ql_status st = ql_magics_open(&o, &host, &m);
    if (st != QL_OK) {
        fprintf(stderr, "qlora: %s\n", ql_error());
        return 1;
    }
    st = run_all(m, argc, argv);
    ql_magics_close(m);
    free(engine);
    free(bundled);
    return st == QL_OK ? 0 : st == QL_ESTOP ? 130 : 1;
}
