/* Copies and conversions. */
#include "kernels/cpu/cpu.h"

/* One row piece, float → float: one rounding where the dtypes differ. */
static void convert_row(void *dst, ql_dtype to, const void *src, ql_dtype from, int64_t n)
{
    float tmp[QL_CPU_PIECE];
    size_t to_size = ql_dtype_size(to), from_size = ql_dtype_size(from);
    if (to == from) {
        memcpy(dst, src, (size_t)n * to_size);
    } else if (from == QL_F32) {
        ql_cpu_narrow(dst, to, src, n);
    } else if (to == QL_F32) {
        ql_cpu_widen(dst, src, from, n);
    } else {
        for (int64_t i = 0; i < n; i += QL_CPU_PIECE) {
            int64_t k = ql_min64(QL_CPU_PIECE, n - i);
            ql_cpu_widen(tmp, (const char *)src + (size_t)i * from_size, from, k);
            ql_cpu_narrow((char *)dst + (size_t)i * to_size, to, tmp, k);
        }
    }
}

QL_CPU_OP(convert, const ql_tensor *out, const ql_tensor *in, int n)
{
    (void)q;
    for (int m = 0; m < n; m++)
        for (int64_t i = 0; i < out[m].rows; i++)
            convert_row(ql_cpu_at(out[m], i, 0), out[m].dtype, ql_cpu_at(in[m], i, 0), in[m].dtype,
                        out[m].cols);
    return QL_OK;
}

QL_CPU_OP(fill, ql_tensor out, float value)
{
    (void)q;
    for (int64_t i = 0; i < out.rows; i++)
        for (int64_t j = 0; j < out.cols; j++)
            ql_float_put(ql_cpu_at(out, i, 0), out.dtype, j, value);
    return QL_OK;
}

QL_CPU_OP(add, ql_tensor out, ql_tensor a, ql_tensor b)
{
    (void)q;
    for (int64_t i = 0; i < out.rows; i++) {
        float *o = ql_cpu_at(out, i, 0);
        const float *x = ql_cpu_at(a, i, 0), *y = ql_cpu_at(b, i, 0);
        for (int64_t j = 0; j < out.cols; j++) o[j] = x[j] + y[j];
    }
    return QL_OK;
}

/* An index outside the rows is the host's mistake: the op stops there and says so. */
static ql_status row_of(const char *op, ql_tensor index, int64_t i, int64_t rows, int64_t *out)
{
    int32_t r = ((const int32_t *)index.data)[i];
    if (r < -1 || r >= rows)
        QL_FAIL(QL_EINVAL, "%s: index[%lld] is %d, needed is -1 to %lld", op, (long long)i, (int)r,
                (long long)rows - 1);
    *out = r;
    return QL_OK;
}

QL_CPU_OP(gather_rows, ql_tensor out, ql_tensor in, ql_tensor index)
{
    (void)q;
    for (int64_t i = 0, r = 0; i < out.rows; i++) {
        QL_TRY(row_of("gather_rows", index, i, in.rows, &r));
        if (r < 0)
            memset(ql_cpu_at(out, i, 0), 0, (size_t)out.cols * ql_dtype_size(out.dtype));
        else
            convert_row(ql_cpu_at(out, i, 0), out.dtype, ql_cpu_at(in, r, 0), in.dtype, out.cols);
    }
    return QL_OK;
}

QL_CPU_OP(scatter_rows, ql_tensor out, ql_tensor in, ql_tensor index)
{
    (void)q;
    for (int64_t i = 0, r = 0; i < in.rows; i++) {
        QL_TRY(row_of("scatter_rows", index, i, out.rows, &r));
        if (r >= 0)
            convert_row(ql_cpu_at(out, r, 0), out.dtype, ql_cpu_at(in, i, 0), in.dtype, in.cols);
    }
    return QL_OK;
}

QL_CPU_OP(check_finite, ql_tensor flag, ql_tensor in)
{
    (void)q;
    /* All exponent bits set: NaN or infinite. */
    uint32_t bad = 0, mask = in.dtype == QL_F32   ? 0x7f800000u
                             : in.dtype == QL_F16 ? 0x7c00u
                                                  : 0x7f80u;
    for (int64_t i = 0; i < in.rows; i++) {
        if (in.dtype == QL_F32) {
            const float *x = ql_cpu_at(in, i, 0);
            for (int64_t j = 0; j < in.cols; j++) bad |= (ql_f32_bits(x[j]) & mask) == mask;
        } else {
            const uint16_t *x = ql_cpu_at(in, i, 0);
            for (int64_t j = 0; j < in.cols; j++) bad |= (x[j] & mask) == mask;
        }
    }
    *(int32_t *)flag.data |= (int32_t)bad;
    return QL_OK;
}
