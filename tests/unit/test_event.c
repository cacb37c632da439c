#include "core/event.h"
#include "tests/tmp.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>

static ql_events *writer(int fd, size_t queue, int deadline_ms)
{
    ql_events_setup s = {fd, queue, deadline_ms};
    ql_events *e = NULL;
    if (ql_events_open(&s, &e) != QL_OK) abort();
    return e;
}

static double seconds(void)
{
    struct timeval t;
    gettimeofday(&t, NULL);
    return (double)t.tv_sec + 1e-6 * (double)t.tv_usec;
}

TEST(lines_arrive_whole_and_in_order)
{
    int fd[2];
    ql_lines *r = NULL;
    ql_lines_state state;
    json_t *o = NULL;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fd) == 0);
    ql_events *e = writer(fd[0], 0, 0);
    CHECK_OK(ql_lines_open(fd[1], &r));
    for (int i = 0; i < 50000; i++) { /* far more than the socket holds; nobody reads meanwhile */
        CHECK_OK(ql_events_emit(e, "step", json_pack("{s:i, s:s}", "step", i, "text", "ü\n\"x\"")));
    }
    for (int i = 0; i < 50000; i++) {
        size_t left;
        CHECK_OK(ql_events_flush(e, 0, &left));
        CHECK_OK(ql_lines_next(r, 1000, &state, &o));
        CHECK(state == QL_LINES_ONE);
        CHECK_INT(json_integer_value(json_object_get(o, "step")), i);
        CHECK_STR(json_string_value(json_object_get(o, "text")), "ü\n\"x\"");
        CHECK_STR(json_string_value(json_object_get(o, "ev")), "step");
        CHECK(json_is_real(json_object_get(o, "t")));
        json_decref(o);
    }
    CHECK_OK(ql_lines_next(r, 0, &state, &o));
    CHECK(state == QL_LINES_NONE);
    ql_events_close(e);
    close(fd[0]);
    CHECK_OK(ql_lines_next(r, -1, &state, &o));
    CHECK(state == QL_LINES_END);
    ql_lines_close(r);
    close(fd[1]);
}

TEST(a_dead_reader_does_not_stop_us)
{
    int fd[2];
    ql_status st = QL_OK;
    double t = seconds();
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fd) == 0);
    ql_events *e = writer(fd[0], 4096, 100);
    for (int i = 0; i < 100000 && st == QL_OK; i++) st = ql_events_emit(e, "step", json_pack("{s:i}", "step", i));
    CHECK(st == QL_EIO && strstr(ql_error(), "has read nothing"));
    CHECK(seconds() - t < 20);
    ql_error_clear();
    CHECK_FAILS(ql_events_emit(e, "step", NULL), QL_EIO, "has gone");
    ql_events_close(e);
    close(fd[0]);
    close(fd[1]);

    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fd) == 0);
    e = writer(fd[0], 0, 0);
    close(fd[1]);
    CHECK_FAILS(ql_events_emit(e, "ready", NULL), QL_EIO, "has gone"); /* and no SIGPIPE */
    ql_events_close(e);
    close(fd[0]);
}

TEST(a_slow_reader_gets_everything)
{
    int fd[2], status = 0;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fd) == 0);
    pid_t pid = fork();
    if (pid == 0) { /* counts lines, slowly at first */
        char buf[4096];
        long lines = 0;
        ssize_t k;
        close(fd[0]);
        for (int i = 0; (k = read(fd[1], buf, sizeof buf)) > 0; i++) {
            for (ssize_t j = 0; j < k; j++) lines += buf[j] == '\n';
            if (i < 40) usleep(5000);
        }
        _exit(lines == 20000 ? 0 : 1);
    }
    close(fd[1]);
    ql_events *e = writer(fd[0], 16384, 5000);
    for (int i = 0; i < 20000; i++) CHECK_OK(ql_events_emit(e, "step", json_pack("{s:i}", "step", i)));
    CHECK_OK(ql_events_flush(e, 5000, NULL));
    ql_events_close(e);
    close(fd[0]);
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

TEST(numbers_that_json_lacks)
{
    json_t *o = json_object();
    CHECK_OK(ql_json_set_number(o, "loss", NAN));
    CHECK_OK(ql_json_set_number(o, "a", -INFINITY));
    CHECK_OK(ql_json_set_number(o, "b", 0.5));
    char *s = json_dumps(o, JSON_COMPACT | JSON_SORT_KEYS);
    CHECK_STR(s, "{\"a\":null,\"a_text\":\"-inf\",\"b\":0.5,\"loss\":null,\"loss_text\":\"nan\"}");
    free(s);
    json_decref(o);
}

static ql_status next_of(const char *bytes, size_t n, ql_lines **keep, int *fds)
{
    ql_lines_state state;
    json_t *o = NULL;
    if (pipe(fds) != 0 || write(fds[1], bytes, n) != (ssize_t)n) abort();
    close(fds[1]);
    if (ql_lines_open(fds[0], keep) != QL_OK) abort();
    ql_status st = ql_lines_next(*keep, 1000, &state, &o);
    json_decref(o);
    return st;
}

TEST(bad_lines_are_skipped_with_an_error)
{
    static const struct {
        const char *text;
        size_t n;
        const char *part;
    } bad[] = {
        {"not json\n", 9, "is not JSON"},
        {"[1,2]\n", 6, "no object"},
        {"{\"a\":1,\"a\":2}\n", 14, "duplicate"},
        {"{\"a\":\"x\0y\"}\n", 12, "is not JSON"},
        {"\0\0\0\n", 4, "is not JSON"},
        {"{\"a\":NaN}\n", 10, "is not JSON"},
        {"{\"a\":\"\xff\"}\n", 10, "is not JSON"},
        {"{} {}\n", 6, "is not JSON"},
        {"{\"a\":1", 6, "middle of a line"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char text[128];
        int fd[2];
        ql_lines *r = NULL;
        ql_lines_state state;
        json_t *o = NULL;
        memcpy(text, bad[i].text, bad[i].n);
        memcpy(text + bad[i].n, "\r\n\n{\"ok\":true}\n", 15);
        CHECK_FAILS(next_of(text, i == 8 ? 6 : bad[i].n + 15, &r, fd), QL_EINVAL, bad[i].part);
        CHECK_OK(ql_lines_next(r, 1000, &state, &o));
        CHECK(state == (i == 8 ? QL_LINES_END : QL_LINES_ONE));
        json_decref(o);
        ql_lines_close(r);
        close(fd[0]);
    }
}

TEST(a_line_without_end)
{
    int fd[2], status;
    ql_lines *r = NULL;
    ql_lines_state state = QL_LINES_NONE;
    ql_status st = QL_OK;
    json_t *o = NULL;
    CHECK(pipe(fd) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        char *big = malloc(1 << 20);
        close(fd[0]);
        memset(big, 'x', 1 << 20);
        for (int i = 0; i < 40; i++)
            if (write(fd[1], big, 1 << 20) < 0) _exit(1);
        if (write(fd[1], "\n{\"ok\":1}\n", 10) != 10) _exit(1);
        _exit(0);
    }
    close(fd[1]);
    CHECK_OK(ql_lines_open(fd[0], &r));
    while (st == QL_OK && state == QL_LINES_NONE) st = ql_lines_next(r, 5000, &state, &o);
    CHECK(st == QL_EINVAL && strstr(ql_error(), "longer than"));
    ql_error_clear();
    CHECK_OK(ql_lines_next(r, 20000, &state, &o));
    CHECK(state == QL_LINES_ONE && json_object_get(o, "ok"));
    json_decref(o);
    ql_lines_close(r);
    close(fd[0]);
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

TEST(events_are_kept_in_a_file)
{
    const char *path = tmp_path("events.jsonl");
    char *text = NULL;
    size_t n = 0;
    ql_events *e = writer(-1, 0, 0);
    tmp_write(path, "{\"ev\":\"cut", 10); /* by a crash */
    CHECK_OK(ql_events_log(e, path));
    CHECK_OK(ql_events_emit(e, "state", json_pack("{s:s}", "state", "training")));
    CHECK_OK(ql_events_log(e, NULL));
    CHECK_OK(ql_events_emit(e, "state", NULL));
    ql_events_close(e);
    CHECK_OK(ql_file_read(path, 1 << 20, &text, &n));
    CHECK(strncmp(text, "{\"ev\":\"cut\n{\"ev\":\"state\",\"t\":0.", 31) == 0 && text[n - 1] == '\n');
    CHECK(strstr(text, "\"state\":\"training\"}\n") && strlen(strstr(text, "\"state\":\"training\"}\n")) == 20);
    free(text);
    e = writer(-1, 0, 0);
    CHECK_FAILS(ql_events_log(e, "/nowhere/at/all/events.jsonl"), QL_EIO, "cannot be opened");
    ql_events_close(e);
}

/* A run has one writer; ranks that were forked meanwhile keep nobody out afterwards. */
TEST(a_file_of_events_has_one_writer)
{
    const char *path = tmp_path("locked.jsonl");
    int status, gone[2];
    CHECK(pipe(gone) == 0);
    ql_events *e = writer(-1, 0, 0), *other = writer(-1, 0, 0);
    CHECK_OK(ql_events_log(e, path));
    CHECK_FAILS(ql_events_log(other, path), QL_EINVAL, "another process");
    pid_t pid = fork();
    if (pid == 0) {
        char c;
        close(gone[1]);
        _exit(read(gone[0], &c, 1) != 0);
    }
    CHECK_OK(ql_events_log(e, path)); /* anew */
    CHECK_OK(ql_events_log(e, NULL));
    CHECK_OK(ql_events_log(other, path));
    ql_events_close(other);
    ql_events_close(e);
    close(gone[0]);
    close(gone[1]);
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status));
}

/* A full disk ends the file, not the run: the reader gets a warning and every further event. */
TEST(a_full_disk_is_a_warning)
{
    const char *path = tmp_path("full.jsonl");
    int fd[2], status;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fd) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        struct rlimit lim = {2000, 2000};
        signal(SIGXFSZ, SIG_IGN);
        setrlimit(RLIMIT_FSIZE, &lim);
        ql_events *e = writer(fd[0], 0, 0);
        int bad = ql_events_log(e, path) != QL_OK;
        for (int i = 0; i < 200; i++) bad |= ql_events_emit(e, "step", json_pack("{s:i}", "step", i)) != QL_OK;
        ql_events_close(e);
        _exit(bad);
    }
    close(fd[0]);
    ql_lines *r = NULL;
    ql_lines_state state = QL_LINES_NONE;
    int steps = 0, warnings = 0;
    CHECK_OK(ql_lines_open(fd[1], &r));
    while (state != QL_LINES_END) {
        json_t *o = NULL;
        CHECK_OK(ql_lines_next(r, 5000, &state, &o));
        if (state != QL_LINES_ONE) continue;
        const char *ev = json_string_value(json_object_get(o, "ev"));
        steps += strcmp(ev, "step") == 0;
        warnings += strcmp(ev, "log") == 0 && strstr(json_string_value(json_object_get(o, "text")), "File too large");
        json_decref(o);
    }
    ql_lines_close(r);
    close(fd[1]);
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    CHECK_INT(steps, 200);
    CHECK_INT(warnings, 1);
}

TEST_MAIN(T(lines_arrive_whole_and_in_order), T(a_dead_reader_does_not_stop_us), T(a_slow_reader_gets_everything), T(numbers_that_json_lacks),
          T(bad_lines_are_skipped_with_an_error), T(a_line_without_end), T(events_are_kept_in_a_file), T(a_file_of_events_has_one_writer),
          T(a_full_disk_is_a_warning))
