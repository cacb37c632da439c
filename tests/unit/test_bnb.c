/* Our ops against what bitsandbytes' CUDA kernels gave (tests/golden/nf4_gpu): NF4 quantising, and 20 steps of its optimizers. */
#include "core/json.h"
#include "core/nf4.h"
#include "core/safetensors.h"
#include "kernels/half.h"
#include "tests/backend.h"

static const ql_st_tensor *get(const ql_st *st, const char *name, const char *suffix)
{
    char full[256];
    snprintf(full, sizeof full, "%s%s", name, suffix);
    return ql_st_find(st, full);
}

static float source_at(const ql_st_tensor *t, int64_t i)
{
    if (t->dtype == QL_F32) {
        float f;
        memcpy(&f, (const char *)t->data + 4 * i, 4);
        return f;
    }
    uint16_t h;
    memcpy(&h, (const char *)t->data + 2 * i, 2);
    return t->dtype == QL_F16 ? ql_f16_to_f32(h) : ql_bf16_to_f32(h);
}

/* Is x/absmax within 2 ulp of a threshold between two codes? There an approximate reciprocal may decide otherwise. */
static int near_threshold(float x, float absmax)
{
    double y = (double)x / (double)absmax;
    for (int c = 0; c < 15; c++) {
        double t = ((double)ql_nf4_map[c] + (double)ql_nf4_map[c + 1]) / 2;
        if (fabs(y - t) <= 2.5 * 0x1p-24 * fmax(fabs(t) * 2, 0x1p-5)) return 1;
    }
    return 0;
}

static void check_quantise(test_dev *d, const ql_st *st, const char *name)
{
    const ql_st_tensor *src = get(st, name, ".source"), *packed = get(st, name, ".packed"), *absmax = get(st, name, ".absmax");
    CHECK_MSG(src && packed && absmax, "%s: incomplete", name);
    ql_tensor x, p, a;
    uint8_t *got = malloc((size_t)packed->count);
    float *scale = malloc((size_t)absmax->count * 4);
    CHECK_OK(dev_vec(d, src->dtype, src->count, src->data, &x));
    CHECK_OK(dev_vec(d, QL_U8, packed->count, NULL, &p));
    CHECK_OK(dev_vec(d, QL_F32, absmax->count, NULL, &a));
    CHECK_OK(ql_nf4_quant(&d->q, p, a, x));
    CHECK_OK(dev_read(d, p, got));
    CHECK_OK(dev_read(d, a, scale));
    CHECK_MSG(memcmp(scale, absmax->data, (size_t)absmax->count * 4) == 0, "%s: scales differ", name);
    int64_t differ = 0, excused = 0;
    for (int64_t i = 0; i < src->count; i++) {
        int shift = i & 1 ? 0 : 4;
        int ours = got[i / 2] >> shift & 15, theirs = ((const uint8_t *)packed->data)[i / 2] >> shift & 15;
        if (ours == theirs) continue;
        differ++;
        excused += src->dtype == QL_F32 && near_threshold(source_at(src, i), scale[i / 64]);
    }
    free(got);
    free(scale);
    dev_free(d);
    /* On the GPU the reciprocal is the same instruction: everything is equal. */
    if (strcmp(test_backend, "cuda") == 0) excused = 0;
    CHECK_MSG(differ == excused, "%s: %lld of %lld codes differ, %lld of them within 2 ulp of a threshold of fp32", name, (long long)differ,
              (long long)src->count, (long long)excused);
}

TEST(nf4_codes_are_bitsandbytes)
{
    ql_st *st = NULL;
    json_t *info = NULL, *o;
    test_dev d;
    size_t i;
    CHECK_OK(ql_json_load("tests/golden/nf4_gpu.json", 1 << 20, &info));
    CHECK_OK(ql_st_open("tests/golden/nf4_gpu.safetensors", &st));
    CHECK_OK(dev_get(&d));
    json_array_foreach(json_object_get(info, "nf4"), i, o)
    {
        check_quantise(&d, st, json_string_value(json_object_get(o, "name")));
        if (test_bad) break;
    }
    CHECK(i == json_array_size(json_object_get(info, "nf4")) || test_bad);
    dev_put(&d);
    ql_st_close(st);
    json_decref(info);
}

typedef struct {
    double param, codes; /* relative error of the parameters; share of codes that differ */
} distance;

static distance compare(const float *p, const ql_st_tensor *want, const uint8_t *c1, const ql_st_tensor *w1, const uint8_t *c2,
                        const ql_st_tensor *w2)
{
    double d = 0, r = 0, off = 0, all = 0;
    for (int64_t i = 0; i < want->count; i++) {
        double x = (double)p[i] - (double)((const float *)want->data)[i], y = (double)((const float *)want->data)[i];
        d += x * x, r += y * y;
    }
    for (int64_t i = 0; c1 && i < w1->count; i++, all += 2)
        off += (c1[i] != ((const uint8_t *)w1->data)[i]) + (c2[i] != ((const uint8_t *)w2->data)[i]);
    return (distance){sqrt(d / r), all > 0 ? off / all : 0};
}

static void trajectory(const ql_st *st, const char *kind, const char *size, int eight)
{
    test_dev d;
    char name[128];
    snprintf(name, sizeof name, "adam.start.%s", size);
    const ql_st_tensor *start = ql_st_find(st, name);
    snprintf(name, sizeof name, "adam.grad.%s", size);
    const ql_st_tensor *grad = ql_st_find(st, name);
    int64_t n = start->count, pad = ql_round_up(n, QL_OPT_BLOCK);
    float *buf = calloc((size_t)pad, 4), map1[256], map2[256];
    uint8_t *c1 = calloc((size_t)pad, 1), *c2 = calloc((size_t)pad, 1);
    ql_tensor p, g, m, v, m8, v8, m2, v2, t1, t2, ctl;
    ql_adam a = {QL_ADAM_BNB, 0.9f, 0.999f, 1e-8f, 0.01f};
    CHECK_OK(dev_get(&d));
    memcpy(buf, start->data, (size_t)n * 4);
    ql_dynamic_map_signed(map1);
    ql_dynamic_map_unsigned(map2);
    CHECK_OK(dev_vec(&d, QL_F32, pad, buf, &p));
    CHECK_OK(dev_vec(&d, QL_F32, pad, NULL, &g));
    CHECK_OK(dev_vec(&d, QL_F32, pad, NULL, &m));
    CHECK_OK(dev_vec(&d, QL_F32, pad, NULL, &v));
    CHECK_OK(dev_vec(&d, QL_U8, pad, NULL, &m8));
    CHECK_OK(dev_vec(&d, QL_U8, pad, NULL, &v8));
    CHECK_OK(dev_vec(&d, QL_F32, pad / 256, NULL, &m2));
    CHECK_OK(dev_vec(&d, QL_F32, pad / 256, NULL, &v2));
    CHECK_OK(dev_vec(&d, QL_F32, 256, map1, &t1));
    CHECK_OK(dev_vec(&d, QL_F32, 256, map2, &t2));
    CHECK_OK(dev_vec(&d, QL_U8, (int64_t)sizeof(ql_ctl), NULL, &ctl));
    for (int s = 0; s < 20; s++) {
        ql_ctl c = {.loss_scale = 1, .mul = 1, .lr = 1e-2f * (1 - (float)s / 20), .steps = s + 1};
        memset(buf, 0, (size_t)pad * 4);
        for (int64_t i = 0; i < n; i++) buf[i] = ((const float *)grad->data)[(s % 4) * n + i] * ldexpf(1, s % 3 - 1);
        CHECK_OK(d.be->dev->copy(d.stream, g.data, buf, pad * 4));
        CHECK_OK(d.be->dev->copy(d.stream, ctl.data, &c, (int64_t)sizeof c));
        CHECK_OK(d.be->dev->sync(d.stream));
        if (eight)
            CHECK_OK(ql_adamw8(&d.q, p, m8, v8, m2, v2, g, t1, t2, ctl.data, &a));
        else
            CHECK_OK(ql_adamw(&d.q, p, m, v, g, ctl.data, &a));
        if (s != 0 && s != 19) continue;
        snprintf(name, sizeof name, "%s.%d.%s", kind, s + 1, size);
        const ql_st_tensor *want = get(st, name, ".param");
        CHECK_OK(dev_read(&d, p, buf));
        if (eight) CHECK_OK(dev_read(&d, m8, c1));
        if (eight) CHECK_OK(dev_read(&d, v8, c2));
        distance e = compare(buf, want, eight ? c1 : NULL, get(st, name, ".state1"), c2, get(st, name, ".state2"));
        CHECK_MSG(e.param < (s ? 5e-5 : 1e-6) && e.codes < 2e-3, "%s: parameters differ by %.2e, %.4f of the codes", name, e.param, e.codes);
    }
    free(buf);
    free(c1);
    free(c2);
    dev_put(&d);
}

TEST(optimizers_are_bitsandbytes)
{
    ql_st *st = NULL;
    CHECK_OK(ql_st_open("tests/golden/nf4_gpu.safetensors", &st));
    trajectory(st, "adamw_8bit", "big", 1);
    if (!test_bad) trajectory(st, "adamw_8bit", "small", 0);
    if (!test_bad) trajectory(st, "paged_adamw_32bit", "big", 0);
    ql_st_close(st);
}

TEST_MAIN(T(nf4_codes_are_bitsandbytes), T(optimizers_are_bitsandbytes))
