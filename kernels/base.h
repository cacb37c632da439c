/* What every layer shares: status and error text, dtypes, the tensor view. */
#ifndef QL_BASE_H
#define QL_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    QL_OK = 0,
    QL_EINVAL,    /* bad input: a file, a setting, a shape */
    QL_ENOMEM,    /* host or device memory */
    QL_EIO,       /* a system call on a file or socket failed */
    QL_ENOSUP,    /* understood, but not supported; the text says what is */
    QL_ESTOP,     /* stopped on request (the user, or a peer's failure) */
    QL_EDEVICE,   /* the device or its libraries reported an error */
    QL_EPEER,     /* another rank died or did not make progress */
    QL_EINTERNAL, /* a broken invariant of ours */
} ql_status;

#if defined(__GNUC__)
#define QL_PRINTF(f, a) __attribute__((format(printf, f, a)))
#define QL_MUST_USE     __attribute__((warn_unused_result))
#else
#define QL_PRINTF(f, a)
#define QL_MUST_USE
#endif

/* The error text is thread-local. The first failure wins: later ql_fail calls keep the first text
 * and return their own code, until ql_error_clear. ql_error_prefix puts context in front
 * ("config.json: …") of whatever text stands. The text is UTF-8: other bytes become '?'. */
ql_status ql_fail(ql_status code, const char *fmt, ...) QL_PRINTF(2, 3);
void ql_error_prefix(const char *fmt, ...) QL_PRINTF(1, 2);
const char *ql_error(void); /* "" when nothing failed */
ql_status ql_error_code(void);
void ql_error_clear(void);
const char *ql_status_name(ql_status s);

#define QL_FAIL(code, ...) return ql_fail((code), __VA_ARGS__)
#define QL_TRY(call)                                                                               \
    do {                                                                                           \
        ql_status ql_s_ = (call);                                                                  \
        if (ql_s_ != QL_OK) return ql_s_;                                                          \
    } while (0)
/* In functions that own resources: `ql_status st = QL_OK; … out: free(…); return st;` */
#define QL_GO(call)                                                                                \
    do {                                                                                           \
        st = (call);                                                                               \
        if (st != QL_OK) goto out;                                                                 \
    } while (0)

typedef enum {
    QL_F32 = 0,
    QL_F16,
    QL_BF16,
    QL_U8,
    QL_I8,
    QL_I32,
    QL_I64,
    QL_BOOL,
    QL_DTYPES
} ql_dtype;

size_t ql_dtype_size(ql_dtype t);
const char *ql_dtype_name(ql_dtype t); /* "float32", "float16", "bfloat16", "uint8" … */
bool ql_dtype_float(ql_dtype t);       /* F32, F16, BF16 */

/* A 2-D view, row-major: element (i, j) is at data[i·ld + j]. A vector of n is (1, n, ld n). The
 * memory is the device's; the struct is a value. */
typedef struct {
    void *data;
    int64_t rows, cols, ld; /* ld ≥ cols, in elements */
    ql_dtype dtype;
} ql_tensor;

static inline ql_tensor ql_mat(void *data, ql_dtype dtype, int64_t rows, int64_t cols, int64_t ld)
{
    ql_tensor t = {data, rows, cols, ld, dtype};
    return t;
}
static inline ql_tensor ql_vec(void *data, ql_dtype dtype, int64_t n)
{
    return ql_mat(data, dtype, 1, n, n);
}
/* Columns [c, c+n) and rows [r, r+n) of a view. */
static inline ql_tensor ql_cols(ql_tensor t, int64_t c, int64_t n)
{
    t.data = (char *)t.data + (size_t)c * ql_dtype_size(t.dtype);
    t.cols = n;
    return t;
}
static inline ql_tensor ql_rows(ql_tensor t, int64_t r, int64_t n)
{
    t.data = (char *)t.data + (size_t)(r * t.ld) * ql_dtype_size(t.dtype);
    t.rows = n;
    return t;
}
static inline bool ql_tensor_set(ql_tensor t)
{
    return t.data != NULL;
}

static inline int64_t ql_ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}
static inline int64_t ql_round_up(int64_t a, int64_t b)
{
    return ql_ceil_div(a, b) * b;
}
/* A flag that another thread or process sets: what was written before it is seen with it. */
static inline int ql_flag(const volatile int *flag)
{
    return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
}
static inline int64_t ql_min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}
static inline int64_t ql_max64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

#ifdef __cplusplus
}
#endif
#endif
