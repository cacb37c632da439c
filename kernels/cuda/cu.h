/* What the CUDA files share: the device's structs, one way to launch, 8-element loads of any float dtype. */
#ifndef QL_CU_H
#define QL_CU_H

#include "kernels/comm.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

struct cu_matmul; /* matmul.cu: the handle and its plans */

struct cu_alloc {
    void *p;
    int64_t bytes;
    cu_alloc *next;
};

struct ql_dev {
    int index, arch, sms;
    int64_t allocated, peak;
    cu_alloc *allocs;
    void *nvml; /* nvmlDevice; NULL where NVML is missing */
    cu_matmul *matmul;
    cudaDeviceProp prop;
};
struct ql_stream {
    cudaStream_t s;
    ql_dev *dev;
};
struct ql_event {
    cudaEvent_t e;
    ql_dev *dev;
};

/* ---- errors and libraries (lib.cu) ---- */
ql_status cu_check(cudaError_t e, const char *what);
ql_status cu_use(const ql_dev *d); /* makes d this thread's device */
/* Opens the first of `names` (colon-separated sonames) that loads: from the directories main gave, then the
 * system's search. The text of a failure names what was tried. Handles stay open. */
ql_status cu_library(const char *names, void **out);
ql_status cu_symbol(void *library, const char *name, void *out);

extern const ql_dev_table cu_dev_table;
extern const ql_ops cu_ops_table;
extern const ql_comm_table cu_comm_table;
void cu_matmul_close(cu_matmul *m);
ql_status cu_matmul_version(char *text, size_t bytes); /* "cuBLAS 13.0.2"; says what is missing */
ql_status cu_comm_version(char *text, size_t bytes);   /* "NCCL 2.28.3" */

/* ---- ops, one declaration per table entry ---- */
ql_status cu_convert(const ql_queue *q, const ql_tensor *out, const ql_tensor *in, int n);
ql_status cu_fill(const ql_queue *q, ql_tensor out, float value);
ql_status cu_add(const ql_queue *q, ql_tensor out, ql_tensor a, ql_tensor b);
ql_status cu_gather_rows(const ql_queue *q, ql_tensor out, ql_tensor in, ql_tensor index);
ql_status cu_scatter_rows(const ql_queue *q, ql_tensor out, ql_tensor in, ql_tensor index);
ql_status cu_check_finite(const ql_queue *q, ql_tensor flag, ql_tensor in);
ql_status cu_nf4_dequant(const ql_queue *q, const ql_tensor *out, const ql_nf4 *w, int n);
ql_status cu_nf4_matmul(const ql_queue *q, ql_tensor out, ql_tensor a, const ql_nf4 *w, int n, ql_tensor c, ql_tensor bias);
ql_status cu_nf4_quant(const ql_queue *q, ql_tensor packed, ql_tensor absmax, ql_tensor in);
ql_status cu_scale_quant(const ql_queue *q, ql_tensor code, ql_tensor absmax2, ql_tensor absmax, ql_tensor code2,
                         float offset);
ql_status cu_matmul_op(const ql_queue *q, ql_tensor out, ql_tensor a, ql_tensor b, ql_trans trans, float alpha,
                       ql_tensor c, ql_tensor bias);
ql_status cu_rmsnorm(const ql_queue *q, ql_tensor y, ql_tensor x, ql_tensor w, float eps);
ql_status cu_rmsnorm_dx(const ql_queue *q, ql_tensor dx, ql_tensor dy, ql_tensor x, ql_tensor w, float eps,
                        ql_tensor dres);
ql_status cu_rope(const ql_queue *q, ql_tensor x, int64_t head_dim, ql_tensor pos, ql_tensor freq, float scale,
                  int sign);
ql_status cu_swiglu(const ql_queue *q, ql_tensor h, ql_tensor gu);
ql_status cu_swiglu_dx(const ql_queue *q, ql_tensor dgu, ql_tensor dh, ql_tensor gu, ql_tensor h);
ql_status cu_dropout(const ql_queue *q, ql_tensor out, ql_tensor in, const ql_drop *d);
ql_status cu_dropout_add(const ql_queue *q, ql_tensor out, ql_tensor in, const ql_drop *d);
ql_status cu_attention(const ql_queue *q, ql_tensor o, ql_tensor lse, ql_tensor qt, ql_tensor k, ql_tensor v,
                       const ql_attn *a);
ql_status cu_attention_dx(const ql_queue *q, ql_tensor dq, ql_tensor dk, ql_tensor dv, ql_tensor dout, ql_tensor o,
                          ql_tensor lse, ql_tensor delta, ql_tensor qt, ql_tensor k, ql_tensor v, const ql_attn *a);
/* The plain versions of the two, any float dtype and any alignment (attn_plain.cu). */
ql_status cu_attention_plain(const ql_queue *q, ql_tensor o, ql_tensor lse, ql_tensor qt, ql_tensor k, ql_tensor v,
                             const ql_attn *a);
ql_status cu_attention_plain_dx(const ql_queue *q, ql_tensor dq, ql_tensor dk, ql_tensor dv, ql_tensor dout,
                                ql_tensor lse, ql_tensor delta, ql_tensor qt, ql_tensor k, ql_tensor v,
                                const ql_attn *a);
/* delta (Tq, H) = Σ over D of dout∘o. */
ql_status cu_attention_delta(const ql_queue *q, ql_tensor delta, ql_tensor dout, ql_tensor o, const ql_attn *a);
ql_status cu_ce_stats(const ql_queue *q, ql_tensor stats, ql_tensor logits, ql_tensor target, int64_t v0);
ql_status cu_ce_join(const ql_queue *q, ql_tensor a, ql_tensor b);
ql_status cu_ce_loss(const ql_queue *q, ql_tensor nll, ql_tensor lse, ql_tensor stats, ql_tensor target, float smoothing,
                     int64_t vocab);
ql_status cu_ce_grad(const ql_queue *q, ql_tensor logits, ql_tensor lse, ql_tensor target, int64_t v0, float smoothing,
                     int64_t vocab, const ql_ctl *ctl);
ql_status cu_sum(const ql_queue *q, ql_tensor out, ql_tensor in);
ql_status cu_norm_parts(const ql_queue *q, ql_tensor part, ql_tensor g);
ql_status cu_clip(const ql_queue *q, ql_ctl *ctl, ql_tensor part, const ql_clip *c);
ql_status cu_adamw(const ql_queue *q, ql_tensor p, ql_tensor m, ql_tensor v, ql_tensor g, const ql_ctl *ctl,
                   const ql_adam *a);
ql_status cu_adamw8(const ql_queue *q, ql_tensor p, ql_tensor m8, ql_tensor v8, ql_tensor m2, ql_tensor v2, ql_tensor g,
                    ql_tensor code1, ql_tensor code2, const ql_ctl *ctl, const ql_adam *a);

/* ---- launching ---- */

/* The T4 build runs on any card but obeys a T4: this decides which code path is chosen and what a launch may ask. */
#ifdef QL_T4
enum { CU_T4 = 1 };
#else
enum { CU_T4 = 0 };
#endif

/* Shared memory over 48 KB has to be asked for, once per kernel and device; the T4 build checks its limits. */
ql_status cu_prepare(const ql_dev *d, const void *kernel, const char *name, unsigned threads, size_t smem);

/* A kernel whose attributes tell what code this build has for a device. */
const void *cu_any_kernel(void);

/* How many blocks of a kernel without dynamic shared memory an SM holds at once: for grids that stay. */
ql_status cu_resident(const ql_dev *d, const void *kernel, unsigned threads, int *out);

template <typename... P, typename... A>
static ql_status cu_launch_as(bool early, const ql_queue *q, const char *name, void (*kernel)(P...), dim3 grid, unsigned threads, size_t smem, A... args)
{
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return QL_OK;
    QL_TRY(cu_use(q->stream->dev));
    if (smem > 48 * 1024 || CU_T4)
        QL_TRY(cu_prepare(q->stream->dev, (const void *)kernel, name, threads, smem));
    cudaLaunchAttribute serial = {};
    serial.id = cudaLaunchAttributeProgrammaticStreamSerialization, serial.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t c = {};
    c.gridDim = grid, c.blockDim = dim3(threads), c.dynamicSmemBytes = smem, c.stream = q->stream->s, c.attrs = &serial, c.numAttrs = early ? 1 : 0;
    return cu_check(cudaLaunchKernelEx(&c, kernel, args...), name);
}
template <typename... P, typename... A>
static ql_status cu_launch(const ql_queue *q, const char *name, void (*kernel)(P...), dim3 grid, unsigned threads, size_t smem, A... args)
{
    return cu_launch_as(false, q, name, kernel, grid, threads, smem, args...);
}
/* For kernels that text is made with, short ones: on sm_90+ such a one may come while the kernel ahead of it in the queue is at work, once all blocks
 * of that one have called cu_ops_ahead or ended. Until it calls that itself it may touch only what the op ahead does not write. */
template <typename... P, typename... A>
static ql_status cu_launch_early(const ql_queue *q, const char *name, void (*kernel)(P...), dim3 grid, unsigned threads, size_t smem, A... args)
{
    return cu_launch_as(q->stream->dev->arch >= 90 && !CU_T4, q, name, kernel, grid, threads, smem, args...);
}
/* Waits until all ops ahead are over and what they wrote is there; then lets the next kernel come. */
static __device__ __forceinline__ void cu_ops_ahead(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* The least l with 2^l ≥ x. */
static inline int cu_log2(int64_t x)
{
    int l = 0;
    while (((int64_t)1 << l) < x) l++;
    return l;
}

static inline unsigned cu_blocks(int64_t n, int64_t per_block)
{
    return (unsigned)ql_ceil_div(n, per_block);
}

/* ---- 8 elements at a time, the dtype at run time ---- */

/* A tensor as kernels see it. vec: every row starts at a 16-byte boundary, so 16-byte accesses are legal. Which
 * thread handles which element never depends on it, so neither does any result. */
struct cu_view {
    void *p;
    int64_t ld;
    int dtype, vec;
};

static inline cu_view cu_see(ql_tensor t)
{
    cu_view v = {t.data, t.ld, (int)t.dtype, 0};
    v.vec = ((uintptr_t)t.data % 16 == 0) && (t.rows == 1 || (size_t)t.ld * ql_dtype_size(t.dtype) % 16 == 0);
    return v;
}

/* Raw bits of 8 elements: 16-bit ones are in a, F32 ones in a and b. Loading and converting are separate so that
 * several loads can be in flight. */
struct cu_raw {
    uint4 a, b;
};

static __device__ __forceinline__ unsigned short cu_bits16(float f, int dtype)
{
    return dtype == QL_F16 ? __half_as_ushort(__float2half_rn(f)) : __bfloat16_as_ushort(__float2bfloat16_rn(f));
}
static __device__ __forceinline__ float cu_float16(unsigned short b, int dtype)
{
    return dtype == QL_F16 ? __half2float(__ushort_as_half(b)) : __uint_as_float((unsigned)b << 16);
}
/* f rounded to dtype and back. */
static __device__ __forceinline__ float cu_round(float f, int dtype)
{
    return dtype == QL_F32 ? f : cu_float16(cu_bits16(f, dtype), dtype);
}
static __device__ __forceinline__ float cu_get(const cu_view &t, int64_t i)
{
    return t.dtype == QL_F32 ? ((const float *)t.p)[i] : cu_float16(((const unsigned short *)t.p)[i], t.dtype);
}
static __device__ __forceinline__ void cu_put(const cu_view &t, int64_t i, float f)
{
    if (t.dtype == QL_F32)
        ((float *)t.p)[i] = f;
    else
        ((unsigned short *)t.p)[i] = cu_bits16(f, t.dtype);
}

/* Elements i … i+7 of t, of which n are there (the others read as 0). */
static __device__ __forceinline__ cu_raw cu_load(const cu_view &t, int64_t i, int n)
{
    cu_raw r;
    r.a = r.b = make_uint4(0, 0, 0, 0);
    if (t.vec && n >= 8) {
        if (t.dtype == QL_F32) {
            const uint4 *p = (const uint4 *)((const float *)t.p + i);
            r.a = p[0], r.b = p[1];
        } else {
            r.a = *(const uint4 *)((const unsigned short *)t.p + i);
        }
    } else if (t.dtype == QL_F32) {
        const unsigned *p = (const unsigned *)t.p + i;
        unsigned e[8];
#pragma unroll
        for (int k = 0; k < 8; k++) e[k] = k < n ? p[k] : 0;
        r.a = make_uint4(e[0], e[1], e[2], e[3]), r.b = make_uint4(e[4], e[5], e[6], e[7]);
    } else {
        const unsigned short *p = (const unsigned short *)t.p + i;
        unsigned e[8];
#pragma unroll
        for (int k = 0; k < 8; k++) e[k] = k < n ? p[k] : 0;
        r.a = make_uint4(e[0] | e[1] << 16, e[2] | e[3] << 16, e[4] | e[5] << 16, e[6] | e[7] << 16);
    }
    return r;
}
static __device__ __forceinline__ void cu_unpack(float v[8], const cu_raw &r, int dtype)
{
    const unsigned w[8] = {r.a.x, r.a.y, r.a.z, r.a.w, r.b.x, r.b.y, r.b.z, r.b.w};
    if (dtype == QL_F32) {
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = __uint_as_float(w[k]);
    } else if (dtype == QL_BF16) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            v[2 * k] = __uint_as_float(w[k] << 16);
            v[2 * k + 1] = __uint_as_float(w[k] & 0xffff0000u);
        }
    } else {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            v[2 * k] = __half2float(__ushort_as_half((unsigned short)(w[k] & 0xffffu)));
            v[2 * k + 1] = __half2float(__ushort_as_half((unsigned short)(w[k] >> 16)));
        }
    }
}
static __device__ __forceinline__ unsigned cu_pair(float lo, float hi, int dtype)
{
    if (dtype == QL_F16) {
        __half2 h = __floats2half2_rn(lo, hi);
        return *(unsigned *)&h;
    }
    __nv_bfloat162 h = __floats2bfloat162_rn(lo, hi);
    return *(unsigned *)&h;
}
static __device__ __forceinline__ void cu_store(const cu_view &t, int64_t i, const float v[8], int n)
{
    if (t.vec && n >= 8) {
        if (t.dtype == QL_F32) {
            float4 *p = (float4 *)((float *)t.p + i);
            p[0] = make_float4(v[0], v[1], v[2], v[3]), p[1] = make_float4(v[4], v[5], v[6], v[7]);
        } else {
            *(uint4 *)((unsigned short *)t.p + i) =
                make_uint4(cu_pair(v[0], v[1], t.dtype), cu_pair(v[2], v[3], t.dtype),
                           cu_pair(v[4], v[5], t.dtype), cu_pair(v[6], v[7], t.dtype));
        }
    } else {
#pragma unroll
        for (int k = 0; k < 8; k++)
            if (k < n) cu_put(t, i + k, v[k]);
    }
}

/* A matrix cut into chunks of 8 columns, one per thread. */
struct cu_chunks {
    unsigned per_row, total;
    int cols;
};
static inline ql_status cu_cut(int64_t rows, int64_t cols, cu_chunks *out)
{
    int64_t per = ql_ceil_div(cols, 8);
    if (rows * per >= (int64_t)1 << 31 || cols >= (int64_t)1 << 31)
        QL_FAIL(QL_EINVAL, "cuda: a tensor of %lld × %lld elements is too large for one op", (long long)rows,
                (long long)cols);
    out->per_row = (unsigned)per, out->total = (unsigned)(rows * per), out->cols = (int)cols;
    return QL_OK;
}

/* ---- reductions inside a block: the same order on every call ---- */

static __device__ __forceinline__ float cu_warp_sum(float v)
{
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
    return v;
}
static __device__ __forceinline__ float cu_warp_max(float v)
{
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, o));
    return v;
}

#endif
