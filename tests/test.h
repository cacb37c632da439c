/* The C tests' harness: one program per file, one line per test on stdout:
 *   ok NAME · not ok NAME: why · skip NAME: why
 * tests/run adds the lines of all programs up. Use:
 *   TEST(name) { CHECK(x == 1); CHECK_CLOSE(a, b, 1e-6); }
 *   TEST_MAIN(T(name), T(other))
 */
#ifndef QL_TEST_H
#define QL_TEST_H

#include "kernels/comm.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int test_bad;
static const char *test_backend = "cpu"; /* --backend=cuda: tests that run on any backend */
static char test_why[4096];
static char test_skip[512];
static char test_absent[512];

#define TEST(name) static void name(void)

#define CHECK_MSG(cond, ...)                                                                       \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            if (!test_bad++) {                                                                     \
                int n_ = snprintf(test_why, sizeof test_why, "%s:%d: ", __FILE__, __LINE__);       \
                snprintf(test_why + n_, sizeof test_why - (size_t)n_, __VA_ARGS__);                \
            }                                                                                      \
            return;                                                                                \
        }                                                                                          \
    } while (0)
#define CHECK(cond) CHECK_MSG(cond, "%s is false [%s]", #cond, ql_error())
#define CHECK_OK(call)                                                                             \
    do {                                                                                           \
        ql_status s_ = (call);                                                                     \
        CHECK_MSG(s_ == QL_OK, "%s: %s: %s", #call, ql_status_name(s_), ql_error());               \
    } while (0)
/* The call fails with this status and a text that contains `part`; the error is cleared. */
#define CHECK_FAILS(call, code, part)                                                              \
    do {                                                                                           \
        ql_status s_ = (call);                                                                     \
        CHECK_MSG(s_ == (code), "%s: status %s, expected %s: %s", #call, ql_status_name(s_),       \
                  ql_status_name(code), ql_error());                                               \
        CHECK_MSG(strstr(ql_error(), part), "%s: error lacks '%s': %s", #call, part, ql_error());  \
        ql_error_clear();                                                                          \
    } while (0)
#define CHECK_STR(a, b)                                                                            \
    do {                                                                                           \
        const char *a_ = (a), *b_ = (b);                                                           \
        CHECK_MSG(a_ && b_ && strcmp(a_, b_) == 0, "%s is '%s', expected '%s'", #a,                \
                  a_ ? a_ : "(null)", b_ ? b_ : "(null)");                                         \
    } while (0)
#define CHECK_INT(a, b)                                                                            \
    do {                                                                                           \
        long long a_ = (long long)(a), b_ = (long long)(b);                                        \
        CHECK_MSG(a_ == b_, "%s is %lld, expected %lld", #a, a_, b_);                              \
    } while (0)
#define CHECK_CLOSE(a, b, tol)                                                                     \
    do {                                                                                           \
        double a_ = (a), b_ = (b);                                                                 \
        CHECK_MSG(fabs(a_ - b_) <= (tol) * (1.0 + fabs(b_)), "%s is %.9g, expected %.9g", #a, a_,  \
                  b_);                                                                             \
    } while (0)
#define SKIP(...)                                                                                  \
    do {                                                                                           \
        snprintf(test_skip, sizeof test_skip, __VA_ARGS__);                                        \
        return;                                                                                    \
    } while (0)
/* What this machine cannot show, for want of a second GPU say: told, and counted as nothing at all. */
#define NOT_RUN(...)                                                                               \
    do {                                                                                           \
        snprintf(test_absent, sizeof test_absent, __VA_ARGS__);                                    \
        return;                                                                                    \
    } while (0)

typedef struct {
    const char *name;
    void (*run)(void);
} test_entry;

/* `program [--backend=NAME] [TEST…]` runs only the named tests. Returns the number of failures (at most 99). */
static inline int test_run(const test_entry *tests, int n, int argc, char **argv)
{
    int failed = 0, named = 0;
    for (int k = 1; k < argc; k++) {
        if (strncmp(argv[k], "--backend=", 10) == 0)
            test_backend = argv[k] + 10;
        else
            named = 1;
    }
    for (int i = 0; i < n; i++) {
        int wanted = !named;
        for (int k = 1; k < argc; k++) wanted |= strcmp(argv[k], tests[i].name) == 0;
        if (!wanted) continue;
        test_bad = 0, test_skip[0] = test_absent[0] = 0;
        ql_error_clear();
        tests[i].run();
        if (test_bad) {
            printf("not ok %s: %s\n", tests[i].name, test_why);
            failed++;
        } else if (test_skip[0]) {
            printf("skip %s: %s\n", tests[i].name, test_skip);
        } else if (test_absent[0]) {
            printf("# %s: NOT RUN: %s\n", tests[i].name, test_absent);
        } else {
            printf("ok %s\n", tests[i].name);
        }
        fflush(stdout);
    }
    return failed > 99 ? 99 : failed;
}

#define TEST_MAIN(...)                                                                             \
    int main(int argc, char **argv)                                                                \
    {                                                                                              \
        static const test_entry all[] = {__VA_ARGS__};                                             \
        ql_backend_cpu_start(argv);                                                                \
        return test_run(all, (int)(sizeof all / sizeof *all), argc, argv);                         \
    }
/* TEST_MAIN(T(name), T(other)) */
#define T(name) {#name, name}

#endif
