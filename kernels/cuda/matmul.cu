/* Matrix products through cuBLASLt. A plan (descriptors and one algorithm) is made once per key and kept; the key
 * and what is claimed about alignment come from shapes, strides and dtypes alone, so that one job's products are the
 * same bits wherever its tensors lie and however many ranks there are. */
#include "kernels/cuda/cu.h"

#include <cublasLt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LT_FUNCTIONS(X)                                                                                               \
    X(cublasLtCreate)                                                                                                 \
    X(cublasLtDestroy)                                                                                                \
    X(cublasLtGetVersion)                                                                                             \
    X(cublasLtMatmul)                                                                                                 \
    X(cublasLtMatmulAlgoGetHeuristic)                                                                                 \
    X(cublasLtMatmulDescCreate)                                                                                       \
    X(cublasLtMatmulDescDestroy)                                                                                      \
    X(cublasLtMatmulDescSetAttribute)                                                                                 \
    X(cublasLtMatrixLayoutCreate)                                                                                     \
    X(cublasLtMatrixLayoutDestroy)                                                                                    \
    X(cublasLtMatmulPreferenceCreate)                                                                                 \
    X(cublasLtMatmulPreferenceDestroy)                                                                                \
    X(cublasLtMatmulPreferenceSetAttribute)

static struct {
    bool open;
#define DECLARE(f) decltype(&f) f##_;
    LT_FUNCTIONS(DECLARE)
#undef DECLARE
} lt;

/* The library of our own CUDA version first: both speak the same interface. */
static ql_status lt_open(void)
{
    void *lib = NULL;
    if (lt.open) return QL_OK;
#if CUDART_VERSION >= 13000
    QL_TRY(cu_library("libcublasLt.so.13:libcublasLt.so.12", &lib));
#else
    QL_TRY(cu_library("libcublasLt.so.12:libcublasLt.so.13", &lib));
#endif
#define LOAD(f) QL_TRY(cu_symbol(lib, #f, &lt.f##_));
    LT_FUNCTIONS(LOAD)
#undef LOAD
    lt.open = true;
    return QL_OK;
}

ql_status cu_matmul_version(char *text, size_t bytes)
{
    QL_TRY(lt_open());
    size_t v = lt.cublasLtGetVersion_();
    snprintf(text, bytes, "cuBLAS %zu.%zu.%zu", v / 10000, v / 100 % 100, v % 100);
    return QL_OK;
}

struct mm_key {
    int m, n, k, lda, ldb, ldo, ldc; /* ldc 0: no c */
    int type, out, trans, bias;
};
struct mm_plan {
    mm_key key;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, c, out;
    cublasLtMatmulAlgo_t algo;
};
struct cu_matmul {
    cublasLtHandle_t handle;
    mm_plan **slots; /* open addressing; size a power of two */
    size_t size, used;
};

static void plan_free(mm_plan *p)
{
    if (!p) return;
    if (p->desc) lt.cublasLtMatmulDescDestroy_(p->desc);
    if (p->a) lt.cublasLtMatrixLayoutDestroy_(p->a);
    if (p->b) lt.cublasLtMatrixLayoutDestroy_(p->b);
    if (p->c) lt.cublasLtMatrixLayoutDestroy_(p->c);
    if (p->out) lt.cublasLtMatrixLayoutDestroy_(p->out);
    free(p);
}

void cu_matmul_close(cu_matmul *m)
{
    if (!m) return;
    for (size_t i = 0; i < m->size; i++) plan_free(m->slots[i]);
    if (m->handle) lt.cublasLtDestroy_(m->handle);
    free(m->slots);
    free(m);
}

static ql_status lt_check(cublasStatus_t s, const char *what, const mm_key *k)
{
    if (s == CUBLAS_STATUS_SUCCESS) return QL_OK;
    return ql_fail(s == CUBLAS_STATUS_NOT_SUPPORTED ? QL_ENOSUP : QL_EDEVICE,
                   "cuda: matmul of %d×%d×%d (%s → %s, strides %d, %d, %d): %s: cuBLASLt status %d", k->m, k->n, k->k,
                   ql_dtype_name((ql_dtype)k->type), ql_dtype_name((ql_dtype)k->out), k->lda, k->ldb, k->ldo, what,
                   (int)s);
}

static cudaDataType_t cuda_type(int t)
{
    return t == QL_F16 ? CUDA_R_16F : t == QL_BF16 ? CUDA_R_16BF : CUDA_R_32F;
}

/* What a row stride lets one claim, at most the 16 bytes that every tensor's start has. */
static unsigned alignment(int ld, int type)
{
    unsigned bytes = (unsigned)ld * (unsigned)ql_dtype_size((ql_dtype)type), a = 16;
    while (bytes % a) a /= 2;
    return a;
}

/* Row-major out = op(a) op(b) is column-major outᵀ = op(b)ᵀ op(a)ᵀ: cuBLAS' first operand is our b. */
static ql_status plan_make(const cu_matmul *mm, const mm_key *k, mm_plan **out)
{
    ql_status st = QL_OK;
    cublasLtMatmulPreference_t pref = NULL;
    cublasLtMatmulHeuristicResult_t found = {};
    cublasOperation_t t = CUBLAS_OP_T;
    int n_found = 0, ldc = k->ldc ? k->ldc : k->ldo;
    mm_plan *p = (mm_plan *)calloc(1, sizeof *p);
    if (!p) QL_FAIL(QL_ENOMEM, "cuda: out of host memory");
    p->key = *k;
#define LT(call) QL_GO(lt_check(lt.call, #call, k))
    LT(cublasLtMatmulDescCreate_(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    if (k->trans == QL_NT) LT(cublasLtMatmulDescSetAttribute_(p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &t, sizeof t));
    if (k->trans == QL_TN) LT(cublasLtMatmulDescSetAttribute_(p->desc, CUBLASLT_MATMUL_DESC_TRANSB, &t, sizeof t));
    if (k->bias) {
        cublasLtEpilogue_t e = CUBLASLT_EPILOGUE_BIAS;
        cudaDataType_t type = cuda_type(k->type);
        const void *placeholder = (const void *)16;
        LT(cublasLtMatmulDescSetAttribute_(p->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &e, sizeof e));
        LT(cublasLtMatmulDescSetAttribute_(p->desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type, sizeof type));
        LT(cublasLtMatmulDescSetAttribute_(p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &placeholder,
                                           sizeof placeholder));
    }
    LT(cublasLtMatrixLayoutCreate_(&p->b, cuda_type(k->type), (uint64_t)(k->trans == QL_NT ? k->k : k->n),
                                   (uint64_t)(k->trans == QL_NT ? k->n : k->k), k->ldb));
    LT(cublasLtMatrixLayoutCreate_(&p->a, cuda_type(k->type), (uint64_t)(k->trans == QL_TN ? k->m : k->k),
                                   (uint64_t)(k->trans == QL_TN ? k->k : k->m), k->lda));
    LT(cublasLtMatrixLayoutCreate_(&p->c, cuda_type(k->out), (uint64_t)k->n, (uint64_t)k->m, ldc));
    LT(cublasLtMatrixLayoutCreate_(&p->out, cuda_type(k->out), (uint64_t)k->n, (uint64_t)k->m, k->ldo));
    LT(cublasLtMatmulPreferenceCreate_(&pref));
    {
        size_t work = QL_WORK_BYTES;
        /* split-K adds its pieces in fp32, never in the 16-bit output */
        uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
        uint32_t first = alignment(k->ldb, k->type), second = alignment(k->lda, k->type);
        uint32_t third = alignment(ldc, k->out), fourth = alignment(k->ldo, k->out);
#define PREFER(name, v) LT(cublasLtMatmulPreferenceSetAttribute_(pref, CUBLASLT_MATMUL_PREF_##name, &v, sizeof v))
        PREFER(MAX_WORKSPACE_BYTES, work);
        PREFER(REDUCTION_SCHEME_MASK, schemes);
        PREFER(MIN_ALIGNMENT_A_BYTES, first);
        PREFER(MIN_ALIGNMENT_B_BYTES, second);
        PREFER(MIN_ALIGNMENT_C_BYTES, third);
        PREFER(MIN_ALIGNMENT_D_BYTES, fourth);
#undef PREFER
    }
    LT(cublasLtMatmulAlgoGetHeuristic_(mm->handle, p->desc, p->b, p->a, p->c, p->out, pref, 1, &found, &n_found));
    QL_GO(lt_check(n_found > 0 ? found.state : CUBLAS_STATUS_NOT_SUPPORTED, "no algorithm", k));
#undef LT
    p->algo = found.algo;
    *out = p;
    p = NULL;
out:
    if (pref) lt.cublasLtMatmulPreferenceDestroy_(pref);
    plan_free(p);
    return st;
}

static size_t hash(const mm_key *k)
{
    const unsigned char *b = (const unsigned char *)k;
    uint64_t h = 1469598103934665603u;
    for (size_t i = 0; i < sizeof *k; i++) h = (h ^ b[i]) * 1099511628211u;
    return (size_t)(h ^ h >> 32);
}

static mm_plan **slot_of(mm_plan **slots, size_t size, const mm_key *k)
{
    size_t i = hash(k) & (size - 1);
    while (slots[i] && memcmp(&slots[i]->key, k, sizeof *k) != 0) i = (i + 1) & (size - 1);
    return &slots[i];
}

static ql_status plan_get(ql_dev *d, const mm_key *k, mm_plan **out)
{
    cu_matmul *m = d->matmul;
    if (!m) {
        QL_TRY(lt_open());
        m = (cu_matmul *)calloc(1, sizeof *m);
        if (m) m->slots = (mm_plan **)calloc(m->size = 256, sizeof *m->slots);
        if (!m || !m->slots) {
            free(m);
            QL_FAIL(QL_ENOMEM, "cuda: out of host memory");
        }
        d->matmul = m;
    }
    if (!m->handle) QL_TRY(lt_check(lt.cublasLtCreate_(&m->handle), "cublasLtCreate", k));
    mm_plan **slot = slot_of(m->slots, m->size, k);
    if (!*slot) {
        if (2 * m->used >= m->size) {
            mm_plan **more = (mm_plan **)calloc(2 * m->size, sizeof *more);
            if (!more) QL_FAIL(QL_ENOMEM, "cuda: out of host memory");
            for (size_t i = 0; i < m->size; i++)
                if (m->slots[i]) *slot_of(more, 2 * m->size, &m->slots[i]->key) = m->slots[i];
            free(m->slots);
            m->slots = more, m->size *= 2;
            slot = slot_of(m->slots, m->size, k);
        }
        QL_TRY(plan_make(m, k, slot));
        m->used++;
    }
    *out = *slot;
    return QL_OK;
}

/* out += bias by rows: for an F32 out of 16-bit factors, which cuBLASLt's epilogue does not know. */
static __global__ void __launch_bounds__(256) add_bias(cu_view out, cu_view bias, cu_chunks cut)
{
    unsigned i = blockIdx.x * 256 + threadIdx.x;
    if (i >= cut.total) return;
    unsigned row = i / cut.per_row;
    int col = (int)(i - row * cut.per_row) * 8, n = cut.cols - col;
    float x[8], b[8];
    cu_unpack(x, cu_load(out, row * out.ld + col, n), out.dtype), cu_unpack(b, cu_load(bias, col, n), bias.dtype);
#pragma unroll
    for (int e = 0; e < 8; e++) x[e] += b[e];
    cu_store(out, row * out.ld + col, x, n);
}

static ql_status aligned(const char *name, ql_tensor t)
{
    if ((uintptr_t)t.data % alignment((int)t.ld, t.dtype))
        QL_FAIL(QL_EINVAL, "cuda: matmul: %s starts at %p, needed is a multiple of %u bytes, as its row stride is", name,
                t.data, alignment((int)t.ld, t.dtype));
    return QL_OK;
}

ql_status cu_matmul_op(const ql_queue *q, ql_tensor out, ql_tensor a, ql_tensor b, ql_trans trans, float alpha,
                       ql_tensor c, ql_tensor bias)
{
    mm_key k;
    mm_plan *p = NULL;
    bool with_c = ql_tensor_set(c), with_bias = ql_tensor_set(bias), late = with_bias && out.dtype != a.dtype;
    float beta = with_c ? 1.f : 0.f;
    memset(&k, 0, sizeof k);
    k.m = (int)out.rows, k.n = (int)out.cols, k.k = (int)(trans == QL_TN ? a.rows : a.cols);
    k.lda = (int)a.ld, k.ldb = (int)b.ld, k.ldo = (int)out.ld, k.ldc = with_c ? (int)c.ld : 0;
    k.type = (int)a.dtype, k.out = (int)out.dtype, k.trans = (int)trans, k.bias = with_bias && !late;
    if (k.type == QL_BF16 && q->stream->dev->arch < 80)
        QL_FAIL(QL_ENOSUP, "cuda: a bfloat16 matmul needs compute capability 8.0; this device has %d.%d: use float16",
                q->stream->dev->arch / 10, q->stream->dev->arch % 10);
    QL_TRY(aligned("a", a));
    QL_TRY(aligned("b", b));
    QL_TRY(aligned("out", out));
    if (with_c) QL_TRY(aligned("c", c));
    QL_TRY(cu_use(q->stream->dev));
    QL_TRY(plan_get(q->stream->dev, &k, &p));
    if (k.bias)
        QL_TRY(lt_check(lt.cublasLtMatmulDescSetAttribute_(p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias.data,
                                                           sizeof bias.data), "bias", &k));
    QL_TRY(lt_check(lt.cublasLtMatmul_(q->stream->dev->matmul->handle, p->desc, &alpha, b.data, p->b, a.data, p->a,
                                       &beta, with_c ? c.data : out.data, p->c, out.data, p->out, &p->algo, q->work,
                                       QL_WORK_BYTES, q->stream->s), "launch", &k));
    if (!late) return QL_OK;
    cu_chunks cut = {};
    QL_TRY(cu_cut(out.rows, out.cols, &cut));
    return cu_launch(q, "matmul's bias", add_bias, cu_blocks(cut.total, 256), 256, 0, cu_see(out), cu_see(bias), cut);
}
