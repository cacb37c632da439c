#include "kernels/base.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { ERR_MAX = 2048 };

static _Thread_local char err_text[ERR_MAX];
static _Thread_local ql_status err_code = QL_OK;

/* Bytes of the UTF-8 character at p; 0: it is none. */
static int character(const unsigned char *p)
{
    int n = p[0] < 0x80 ? 1 : p[0] >= 0xc2 && p[0] <= 0xdf ? 2 : (p[0] & 0xf0) == 0xe0 ? 3 : p[0] >= 0xf0 && p[0] <= 0xf4 ? 4 : 0;
    for (int i = 1; i < n; i++)
        if ((p[i] & 0xc0) != 0x80) return 0;
    bool surrogate = p[0] == 0xed && p[1] >= 0xa0, beyond = p[0] == 0xf4 && p[1] >= 0x90;
    bool overlong = (p[0] == 0xe0 && p[1] < 0xa0) || (p[0] == 0xf0 && p[1] < 0x90);
    return surrogate || beyond || overlong ? 0 : n;
}

/* A text may hold a name cut inside a character, or a file's name in another encoding; it has to go into JSON, which takes neither. */
static void make_utf8(char *text)
{
    for (char *p = text; *p;) {
        int n = character((const unsigned char *)p);
        if (!n) *p = '?';
        p += n ? n : 1;
    }
}

ql_status ql_fail(ql_status code, const char *fmt, ...)
{
    if (err_code == QL_OK) {
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(err_text, sizeof err_text, fmt, ap);
        va_end(ap);
        make_utf8(err_text);
        err_code = code;
    }
    return code;
}

void ql_error_prefix(const char *fmt, ...)
{
    char head[ERR_MAX], all[2 * ERR_MAX];
    va_list ap;
    if (err_code == QL_OK) return;
    va_start(ap, fmt);
    vsnprintf(head, sizeof head, fmt, ap);
    va_end(ap);
    snprintf(all, sizeof all, "%s%s", head, err_text);
    all[ERR_MAX - 1] = 0;
    make_utf8(all);
    memcpy(err_text, all, ERR_MAX);
}

const char *ql_error(void)
{
    return err_text;
}

ql_status ql_error_code(void)
{
    return err_code;
}

void ql_error_clear(void)
{
    err_text[0] = 0;
    err_code = QL_OK;
}

const char *ql_status_name(ql_status s)
{
    static const char *const names[] = {"ok",   "invalid", "out of memory", "io",      "not supported",
                                        "stop", "device",  "peer",          "internal"};
    return (unsigned)s < sizeof names / sizeof *names ? names[s] : "?";
}

size_t ql_dtype_size(ql_dtype t)
{
    static const size_t sizes[QL_DTYPES] = {4, 2, 2, 1, 1, 4, 8, 1};
    return (unsigned)t < QL_DTYPES ? sizes[t] : 0;
}

const char *ql_dtype_name(ql_dtype t)
{
    static const char *const names[QL_DTYPES] = {"float32", "float16", "bfloat16", "uint8",
                                                 "int8",    "int32",   "int64",    "bool"};
    return (unsigned)t < QL_DTYPES ? names[t] : "?";
}

bool ql_dtype_float(ql_dtype t)
{
    return t == QL_F32 || t == QL_F16 || t == QL_BF16;
}
