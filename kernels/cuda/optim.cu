/* Sums by halving, the gradient's norm and clip, AdamW in 32 and 8 bits, all over flat vectors. */
#include "kernels/cuda/cu.h"

enum { THREADS = 256, WIDE = 1024, BLOCK = QL_OPT_BLOCK };

/* ---- sums by halving: over the power of two at or above n, x[i] += x[i + half] until one is left ---- */

/* One block; work holds half of the power of two. Every thread gets the sum. */
static __device__ float halving_sum(const float *__restrict__ in, int64_t n, float *work)
{
    __shared__ float last[WIDE];
    int64_t half = 1;
    int t = (int)threadIdx.x;
    while (half * 2 < n) half *= 2;
    for (int64_t i = t; i < half; i += WIDE) {
        float a = i < n ? in[i] : 0.f, b = i + half < n ? in[i + half] : 0.f;
        float s = __fadd_rn(a, b);
        if (half <= WIDE)
            last[i] = s;
        else
            work[i] = s;
    }
    __syncthreads();
    while (half > WIDE) {
        half /= 2;
        for (int64_t i = t; i < half; i += WIDE) {
            float s = __fadd_rn(work[i], work[i + half]);
            if (half <= WIDE)
                last[i] = s;
            else
                work[i] = s;
        }
        __syncthreads();
    }
    while (half > 1) {
        half /= 2;
        if (t < half) last[t] = __fadd_rn(last[t], last[t + half]);
        __syncthreads();
    }
    return last[0];
}

static __global__ void __launch_bounds__(WIDE) sum_all(float *out, const float *in, int64_t n, float *work)
{
    float s = halving_sum(in, n, work);
    if (threadIdx.x == 0) *out = s;
}

ql_status cu_sum(const ql_queue *q, ql_tensor out, ql_tensor in)
{
    return cu_launch(q, "sum", sum_all, 1, WIDE, 0, (float *)out.data, (const float *)in.data, in.rows * in.cols,
                     (float *)q->work);
}

/* A block per 4096 elements; thread t holds t, t + 256, …: the upper halvings are inside a thread. */
static __global__ void __launch_bounds__(THREADS) square_sums(float *part, const float *__restrict__ g)
{
    __shared__ float last[THREADS];
    enum { N = BLOCK / THREADS };
    int t = (int)threadIdx.x;
    float v[N];
#pragma unroll
    for (int k = 0; k < N; k++) v[k] = g[(int64_t)blockIdx.x * BLOCK + k * THREADS + t];
#pragma unroll
    for (int k = 0; k < N; k++) v[k] = __fmul_rn(v[k], v[k]);
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2)
#pragma unroll
        for (int k = 0; k < half; k++) v[k] = __fadd_rn(v[k], v[k + half]);
    last[t] = v[0];
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (t < half) last[t] = __fadd_rn(last[t], last[t + half]);
        __syncthreads();
    }
    if (t == 0) part[blockIdx.x] = last[0];
}

ql_status cu_norm_parts(const ql_queue *q, ql_tensor part, ql_tensor g)
{
    return cu_launch(q, "norm_parts", square_sums, cu_blocks(g.rows * g.cols, BLOCK), THREADS, 0, (float *)part.data,
                     (const float *)g.data);
}

static __global__ void __launch_bounds__(WIDE)
    clip_step(ql_ctl *ctl, const float *part, int64_t n, const ql_clip c, float *work)
{
    float s = halving_sum(part, n, work);
    if (threadIdx.x) return;
    float scale = ctl->loss_scale, norm = __fdiv_rn(__fsqrt_rn(s), scale);
    int skipped = c.scaling && !isfinite(norm);
    float coef = c.max_norm > 0 ? fminf(1.f, __fdiv_rn(c.max_norm, norm + 1e-6f)) : 1.f;
    if (c.max_norm > 0 && isnan(norm)) coef = norm; /* torch's min keeps a NaN */
    ctl->norm = norm;
    ctl->skipped = skipped;
    ctl->mul = __fdiv_rn(coef, scale);
    ctl->lr = c.lr[ctl->steps < c.n_lr ? ctl->steps : c.n_lr - 1]; /* of a skipped step too: it is shown */
    if (skipped)
        ctl->skips++;
    else
        ctl->steps++;
    if (!c.scaling) return;
    if (skipped) {
        ctl->loss_scale = scale * c.backoff_factor;
        ctl->growth = 0;
    } else if (++ctl->growth >= c.growth_interval) {
        float grown = scale * c.growth_factor;
        if (isfinite(grown)) ctl->loss_scale = grown;
        ctl->growth = 0;
    }
}

ql_status cu_clip(const ql_queue *q, ql_ctl *ctl, ql_tensor part, const ql_clip *c)
{
    return cu_launch(q, "clip", clip_step, 1, WIDE, 0, ctl, (const float *)part.data, part.rows * part.cols, *c,
                     (float *)q->work);
}

/* ---- AdamW ---- */

/* The step's scalars, in double as torch and bitsandbytes compute them on the host. */
struct adam_step {
    float mul, lr, size, root2, decay; /* size: step size; root2: √(1 − β2ᵗ) */
};

static __device__ __forceinline__ adam_step step_of(const ql_ctl *ctl, const ql_adam &a)
{
    double c1 = 1 - pow((double)a.beta1, ctl->steps), c2 = sqrt(1 - pow((double)a.beta2, ctl->steps));
    adam_step s;
    s.mul = ctl->mul, s.lr = ctl->lr;
    s.root2 = (float)c2;
    s.size = (float)(a.kind == QL_ADAM_TORCH ? s.lr / c1 : s.lr * c2 / c1);
    s.decay = (float)(1 - (double)s.lr * a.weight_decay);
    return s;
}

static __device__ __forceinline__ void adam_one(float &p, float &m, float &v, float g, const adam_step &s,
                                                const ql_adam &a)
{
    if (a.kind == QL_ADAM_TORCH) {
        p = p * s.decay;
        m = m + (g - m) * (1.f - a.beta1);
        v = v * a.beta2 + (1.f - a.beta2) * g * g;
        p = p - s.size * (m / (sqrtf(v) / s.root2 + a.eps));
    } else {
        m = m * a.beta1 + (1.f - a.beta1) * g;
        v = v * a.beta2 + (1.f - a.beta2) * g * g;
        p = p - s.size * (m / (sqrtf(v) + a.eps * s.root2));
        if (a.weight_decay > 0) p = p * s.decay;
    }
}

static __global__ void __launch_bounds__(THREADS)
    adamw32(float4 *p, float4 *m, float4 *v, const float4 *__restrict__ g, const ql_ctl *ctl, const ql_adam a)
{
    __shared__ adam_step s;
    if (ctl->skipped) return;
    if (threadIdx.x == 0) s = step_of(ctl, a);
    __syncthreads();
#pragma unroll 2
    for (int k = 0; k < BLOCK / THREADS / 4; k++) {
        int64_t i = (int64_t)blockIdx.x * (BLOCK / 4) + k * THREADS + threadIdx.x;
        float4 pp = p[i], mm = m[i], vv = v[i], gg = g[i];
        adam_one(pp.x, mm.x, vv.x, gg.x * s.mul, s, a), adam_one(pp.y, mm.y, vv.y, gg.y * s.mul, s, a);
        adam_one(pp.z, mm.z, vv.z, gg.z * s.mul, s, a), adam_one(pp.w, mm.w, vv.w, gg.w * s.mul, s, a);
        p[i] = pp, m[i] = mm, v[i] = vv;
    }
}

ql_status cu_adamw(const ql_queue *q, ql_tensor p, ql_tensor m, ql_tensor v, ql_tensor g, const ql_ctl *ctl,
                   const ql_adam *a)
{
    return cu_launch(q, "adamw", adamw32, cu_blocks(p.rows * p.cols, BLOCK), THREADS, 0, (float4 *)p.data,
                     (float4 *)m.data, (float4 *)v.data, (const float4 *)g.data, ctl, *a);
}

/* Tables of 256 in shared memory with R copies side by side: lane l reads copy l % R, so that 32 lanes that look up
 * different entries meet in few banks (R = 32: in none). */
template <int R>
static __device__ __forceinline__ float entry(const float *table, int i)
{
    return table[i * R + (int)threadIdx.x % R];
}

/* bitsandbytes' walk through a table of 256: the nearest entry, ties at the pivot. lowest: what lies below entry 0. */
template <int R>
static __device__ __forceinline__ int walk(const float *code, float x, float lowest)
{
    int pivot = 127, upper_at = 255, lower_at = 0;
    float lower = lowest, upper = 1.f, v = entry<R>(code, 127);
#pragma unroll
    for (int step = 64; step > 0; step >>= 1) {
        if (x > v)
            lower_at = pivot, lower = v, pivot += step;
        else
            upper_at = pivot, upper = v, pivot -= step;
        v = entry<R>(code, pivot);
    }
    if (x > v) return x > (upper + v) * 0.5f ? upper_at : pivot;
    return x < (lower + v) * 0.5f ? lower_at : pivot;
}

/* A warp a block of 256 elements, 8 a lane: dequantise, update, find the new maxima, quantise. An element whose
 * gradient is not finite is left alone and its states become 0. The tables are filled once for many blocks. */
template <int R>
static __global__ void __launch_bounds__(WIDE)
    adamw8_blocks(float *p, uint8_t *m8, uint8_t *v8, float *m2, float *v2, const float *__restrict__ g,
                  const float *__restrict__ code1, const float *__restrict__ code2, const ql_ctl *ctl, const ql_adam a,
                  int64_t blocks)
{
    extern __shared__ float tables[]; /* (256, R) of code1, (256, R) of code2, then the step's scalars */
    float *c1 = tables, *c2 = tables + 256 * R;
    adam_step *shared_step = (adam_step *)(tables + 512 * R);
    if (ctl->skipped) return;
    for (int i = (int)threadIdx.x; i < 256 * R; i += WIDE) c1[i] = code1[i / R], c2[i] = code2[i / R];
    if (threadIdx.x == 0) *shared_step = step_of(ctl, a);
    __syncthreads();
    const adam_step s = *shared_step;
    const cu_view gt = {(void *)g, 0, QL_F32, 1}, pt = {p, 0, QL_F32, 1};
    for (int64_t block = (int64_t)blockIdx.x * (WIDE / 32) + threadIdx.x / 32; block < blocks;
         block += (int64_t)gridDim.x * (WIDE / 32)) {
        int64_t i = block * 256 + threadIdx.x % 32 * 8;
        float gg[8], pp[8], m[8], v[8], top1 = 0, top2 = 0, old1 = m2[block], old2 = v2[block];
        uint2 qm = *(const uint2 *)(m8 + i), qv = *(const uint2 *)(v8 + i);
        cu_unpack(gg, cu_load(gt, i, 8), QL_F32), cu_unpack(pp, cu_load(pt, i, 8), QL_F32);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            unsigned im = (k < 4 ? qm.x : qm.y) >> (k % 4 * 8) & 255, iv = (k < 4 ? qv.x : qv.y) >> (k % 4 * 8) & 255;
            m[k] = entry<R>(c1, (int)im) * old1, v[k] = entry<R>(c2, (int)iv) * old2;
            if (isfinite(gg[k])) {
                adam_one(pp[k], m[k], v[k], gg[k] * s.mul, s, a);
            } else {
                m[k] = v[k] = 0.f;
            }
            top1 = fmaxf(top1, fabsf(m[k])), top2 = fmaxf(top2, fabsf(v[k]));
        }
        cu_store(pt, i, pp, 8);
        top1 = cu_warp_max(top1), top2 = cu_warp_max(top2);
        qm = qv = make_uint2(0, 0);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            int im = walk<R>(c1, m[k] / top1, -1.f), iv = walk<R>(c2, v[k] / top2, 0.f);
            /* The first moment keeps its sign through quantisation; an all-zero block wraps round to 255, as it does in
             * bitsandbytes. */
            if (signbit(entry<R>(c1, im)) != signbit(m[k])) im += m[k] > 0 ? 1 : -1;
            (k < 4 ? qm.x : qm.y) |= ((unsigned)im & 255) << (k % 4 * 8);
            (k < 4 ? qv.x : qv.y) |= (unsigned)iv << (k % 4 * 8);
        }
        *(uint2 *)(m8 + i) = qm, *(uint2 *)(v8 + i) = qv;
        if (threadIdx.x % 32 == 0) m2[block] = top1, v2[block] = top2;
    }
}

/* One block of 1024 threads an SM; 64 KB of tables where that leaves room. */
template <int R>
static ql_status run_adamw8(const ql_queue *q, ql_tensor p, ql_tensor m8, ql_tensor v8, ql_tensor m2, ql_tensor v2,
                            ql_tensor g, ql_tensor code1, ql_tensor code2, const ql_ctl *ctl, const ql_adam *a)
{
    int64_t blocks = p.rows * p.cols / 256;
    unsigned grid = (unsigned)ql_min64(ql_ceil_div(blocks, WIDE / 32), q->stream->dev->sms);
    return cu_launch(q, "adamw8", adamw8_blocks<R>, grid, WIDE, 512 * R * sizeof(float) + sizeof(adam_step),
                     (float *)p.data, (uint8_t *)m8.data, (uint8_t *)v8.data, (float *)m2.data, (float *)v2.data,
                     (const float *)g.data, (const float *)code1.data, (const float *)code2.data, ctl, *a, blocks);
}

ql_status cu_adamw8(const ql_queue *q, ql_tensor p, ql_tensor m8, ql_tensor v8, ql_tensor m2, ql_tensor v2, ql_tensor g,
                    ql_tensor code1, ql_tensor code2, const ql_ctl *ctl, const ql_adam *a)
{
    return q->stream->dev->arch >= 80 ? run_adamw8<32>(q, p, m8, v8, m2, v2, g, code1, code2, ctl, a)
                                      : run_adamw8<8>(q, p, m8, v8, m2, v2, g, code1, code2, ctl, a);
}
