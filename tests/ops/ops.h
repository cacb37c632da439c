/* The op test: one table of cases, run on any backend through its three tables alone. A case makes
 * tensors, RUNs an op and EXPECTs; the runner (main.c) runs it three times and wants the same bits
 * each time: again at the same addresses, and at shifted ones. */
#ifndef QL_TEST_OPS_H
#define QL_TEST_OPS_H

#include "kernels/comm.h"

typedef enum { IN, OUT, INOUT } role;

/* A tensor of a case. `v` (rows·cols doubles, contiguous) are the values that go in, after rounding
 * to the dtype; `got` those that came out. */
typedef struct {
    const char *name;
    role role;
    ql_tensor t; /* the device's view */
    double *v, *got;
    unsigned char *before, *after; /* the whole block with its guards */
    void *block;                   /* in device memory */
    int64_t bytes, start;          /* of the block; of element (0, 0) in it */
} tens;

typedef struct ctx {
    const ql_backend *b;
    ql_dev *dev;
    ql_queue q;
    ql_event *e0, *e1;
    int64_t shift; /* bytes that addresses are moved by */
    uint64_t rng, hash;
    bool bench, ran, once;
    bool bf16;   /* the device multiplies bfloat16 */
    bool counts; /* the null backend: ops only have to accept, there are no results */
    double ms, flops;
    tens t[64];
    int n;
    char why[1024]; /* the first failure; "" while all is well */
} ctx;

typedef struct op_case {
    const char *name;
    void (*run)(ctx *c, const struct op_case *p);
    ql_dtype a, b;   /* dtypes: of the inputs, of the output where it differs */
    int64_t m, n, k; /* sizes, as the case reads them */
    int pad, how;    /* columns between cols and ld; the case's variant */
    int bench;       /* 0: test; 1: bench on a CPU; 2: bench on a GPU */
} op_case;

extern const op_case op_cases[];
extern const int op_case_count;

/* Uniform in [lo, hi). The next number of the case's own sequence. */
double rnd(ctx *c, double lo, double hi);
/* A tensor with random values in (−1, 1), columns `pad` apart from the next row; OUT starts as NaN.
 */
tens *make(ctx *c, const char *name, role r, ql_dtype dt, int64_t rows, int64_t cols, int64_t pad);
/* Uploads everything, runs, downloads, checks guards and inputs. In a bench it repeats and times.
 */
#define RUN(c, call)                                                                               \
    do {                                                                                           \
        ql_status s_ = run_start(c);                                                               \
        while (s_ == QL_OK && run_again(c)) s_ = (call);                                           \
        run_end(c, s_);                                                                            \
    } while (0)
ql_status run_start(ctx *c);
bool run_again(ctx *c);
void run_end(ctx *c, ql_status s);

/* ‖got − ref‖/‖ref‖ ≤ bar. A NaN in ref: this element must not have been written. Infinities must
 * be equal. */
void expect(ctx *c, const tens *t, const double *ref, double bar);
/* Every value equal (a NaN in ref as above). */
void expect_exact(ctx *c, const tens *t, const double *ref);
void fail(ctx *c, const char *fmt, ...) QL_PRINTF(2, 3);
bool live(const ctx *c); /* references are wanted: not a bench, nothing failed */
/* The bar for results of this dtype: F32 as given, fp16 2e-3, bf16 1e-2. */
double bar_of(ql_dtype t, double f32);
/* A zeroed array that lives as long as the case. */
double *doubles(ctx *c, int64_t n);

/* Which backends this program has (two programs: with the CPU backend, and without). */
void test_start(char **argv);
ql_status test_backend(const char *name, const ql_backend **out);
extern const char *const test_default[]; /* up to NULL: what runs when none is named */

/* Other tests of the same program: they print their own lines and return the number of failures. */
int test_gradients(void);      /* ref.c's gradients against finite differences */
int test_errors(const ctx *c); /* what the wrappers refuse */

#endif
