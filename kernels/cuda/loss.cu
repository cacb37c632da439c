/* Cross-entropy over pieces of the vocabulary, and sums by halving. */
#include "kernels/cuda/cu.h"

enum { THREADS = 256 };

/* F32 logits are for parity: exact exponentials. 16-bit ones are as coarse as the fast ones are fine. */
static __device__ __forceinline__ float power(float x, int dtype)
{
    return dtype == QL_F32 ? expf(x) : __expf(x);
}

/* A block per row, one pass: each thread keeps a running maximum and the sum of exponentials below it, and has AHEAD
 * loads under way. DT: the dtype known to the compiler, ANY: told at run time. */
enum { AHEAD = 4, ANY = -1 };

template <int DT>
static __global__ void __launch_bounds__(THREADS)
    stats_rows(float4 *__restrict__ stats, int64_t stats_ld, cu_view logits, const int *__restrict__ target, int n,
               int64_t v0)
{
    __shared__ float part[3][THREADS / 32];
    int64_t row = blockIdx.x, base = row * logits.ld;
    float m = -INFINITY, s = 0, sum = 0;
    if (DT != ANY) logits.dtype = DT;
    for (int j0 = (int)threadIdx.x * 8; j0 < n; j0 += AHEAD * THREADS * 8) {
        cu_raw r[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; a++) r[a] = cu_load(logits, base + j0 + a * THREADS * 8, n - j0 - a * THREADS * 8);
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            float v[8], top = m, add = 0;
            int here = n - j0 - a * THREADS * 8;
            if (here <= 0) break;
            cu_unpack(v, r[a], logits.dtype);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                sum += v[k]; /* what is missing is 0 */
                if (k >= here) v[k] = -INFINITY;
                top = fmaxf(top, v[k]);
            }
            if (top == -INFINITY) continue;
#pragma unroll
            for (int k = 0; k < 8; k++) add += power(v[k] - top, logits.dtype);
            s = (m == -INFINITY ? 0.f : s * power(m - top, logits.dtype)) + add;
            m = top;
        }
    }
    float all = cu_warp_max(m);
    if (threadIdx.x % 32 == 0) part[0][threadIdx.x / 32] = all;
    __syncthreads();
    all = part[0][0];
    for (int i = 1; i < THREADS / 32; i++) all = fmaxf(all, part[0][i]);
    s = cu_warp_sum(m == -INFINITY ? 0.f : s * power(m - all, logits.dtype));
    sum = cu_warp_sum(sum);
    if (threadIdx.x % 32 == 0) part[1][threadIdx.x / 32] = s, part[2][threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x) return;
    s = sum = 0;
    for (int i = 0; i < THREADS / 32; i++) s += part[1][i], sum += part[2][i];
    int64_t at = target[row] == -100 ? -1 : (int64_t)target[row] - v0;
    float hit = at >= 0 && at < n ? cu_get(logits, base + at) : 0.f;
    float *o = (float *)stats + row * stats_ld;
    o[0] = all, o[1] = s, o[2] = hit, o[3] = sum;
}

ql_status cu_ce_stats(const ql_queue *q, ql_tensor stats, ql_tensor logits, ql_tensor target, int64_t v0)
{
    auto kernel = logits.dtype == QL_BF16  ? stats_rows<QL_BF16>
                  : logits.dtype == QL_F16 ? stats_rows<QL_F16>
                                           : stats_rows<ANY>;
    return cu_launch(q, "ce_stats", kernel, (unsigned)logits.rows, THREADS, 0, (float4 *)stats.data, stats.ld,
                     cu_see(logits), (const int *)target.data, (int)logits.cols, v0);
}

static __global__ void __launch_bounds__(THREADS)
    join_rows(float *a, int64_t lda, const float *b, int64_t ldb, int64_t rows)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= rows) return;
    float *x = a + i * lda;
    const float *y = b + i * ldb;
    float m = fmaxf(x[0], y[0]);
    float sx = x[0] == -INFINITY ? 0.f : __fmul_rn(x[1], expf(x[0] - m));
    float sy = y[0] == -INFINITY ? 0.f : __fmul_rn(y[1], expf(y[0] - m));
    x[0] = m, x[1] = __fadd_rn(sx, sy), x[2] += y[2], x[3] += y[3];
}

ql_status cu_ce_join(const ql_queue *q, ql_tensor a, ql_tensor b)
{
    return cu_launch(q, "ce_join", join_rows, cu_blocks(a.rows, THREADS), THREADS, 0, (float *)a.data, a.ld,
                     (const float *)b.data, b.ld, a.rows);
}

static __global__ void __launch_bounds__(THREADS)
    loss_rows(float *nll, float *lse, const float *stats, int64_t ld, const int *__restrict__ target, float smoothing,
              float vocab, int64_t rows)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= rows) return;
    const float *s = stats + i * ld;
    float l = s[0] + logf(s[1]);
    lse[i] = l;
    nll[i] = target[i] == -100 ? 0.f : (1.f - smoothing) * (l - s[2]) + (smoothing > 0 ? smoothing * (l - s[3] / vocab) : 0.f);
}

ql_status cu_ce_loss(const ql_queue *q, ql_tensor nll, ql_tensor lse, ql_tensor stats, ql_tensor target, float smoothing,
                     int64_t vocab)
{
    return cu_launch(q, "ce_loss", loss_rows, cu_blocks(stats.rows, THREADS), THREADS, 0, (float *)nll.data,
                     (float *)lse.data, (const float *)stats.data, stats.ld, (const int *)target.data, smoothing,
                     (float)vocab, stats.rows);
}

static __global__ void __launch_bounds__(THREADS)
    grad_all(cu_view logits, const float *__restrict__ lse, const int *__restrict__ target, int64_t v0, float smoothing,
             float even, const ql_ctl *__restrict__ ctl, cu_chunks cut)
{
    unsigned i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= cut.total) return;
    unsigned row = i / cut.per_row;
    int col = (int)(i - row * cut.per_row) * 8, n = cut.cols - col, t = target[row];
    float v[8], l = lse[row], f = ctl->loss_scale * ctl->inv_items;
    cu_unpack(v, cu_load(logits, row * logits.ld + col, n), logits.dtype);
    int64_t at = (int64_t)t - v0 - col;
#pragma unroll
    for (int k = 0; k < 8; k++)
        v[k] = t == -100 ? 0.f : (power(v[k] - l, logits.dtype) - (k == at ? 1.f - smoothing : 0.f) - even) * f;
    cu_store(logits, row * logits.ld + col, v, n);
}

ql_status cu_ce_grad(const ql_queue *q, ql_tensor logits, ql_tensor lse, ql_tensor target, int64_t v0, float smoothing,
                     int64_t vocab, const ql_ctl *ctl)
{
    cu_chunks cut = {};
    QL_TRY(cu_cut(logits.rows, logits.cols, &cut));
    return cu_launch(q, "ce_grad", grad_all, cu_blocks(cut.total, THREADS), THREADS, 0, cu_see(logits),
                     (const float *)lse.data, (const int *)target.data, v0, smoothing, smoothing / (float)vocab, ctl,
                     cut);
}
