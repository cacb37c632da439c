#include "core/schedule.h"

#include <math.h>
#include <string.h>

static const double pi = 3.14159265358979323846;

/* Which of lr_scheduler_kwargs a schedule takes. */
enum { CYCLES = 1, POWER = 2, LR_END = 4, MIN_LR = 8, MIN_RATE = 16, MIN_RATIO = 32, WARM_RATE = 64, TIMESCALE = 128, WSD = 256 };

static const struct {
    const char *name;
    unsigned takes;
} kinds[QL_LR_KINDS] = {
    {"linear", 0},
    {"cosine", CYCLES},
    {"cosine_with_restarts", CYCLES},
    {"polynomial", POWER | LR_END},
    {"constant", 0},
    {"constant_with_warmup", 0},
    {"inverse_sqrt", TIMESCALE},
    {"cosine_with_min_lr", CYCLES | MIN_LR | MIN_RATE},
    {"cosine_warmup_with_min_lr", CYCLES | MIN_LR | MIN_RATE | WARM_RATE},
    {"warmup_stable_decay", CYCLES | MIN_RATIO | WSD},
};

static const struct {
    const char *key;
    unsigned bit;
    double min, max;
} keys[] = {
    {"num_cycles", CYCLES, 0, 1e6},   {"power", POWER, -100, 100},      {"lr_end", LR_END, 0, 1e3},
    {"min_lr", MIN_LR, 0, 1e3},       {"min_lr_rate", MIN_RATE, 0, 1},  {"min_lr_ratio", MIN_RATIO, 0, 1},
    {"warmup_lr_rate", WARM_RATE, 0, 1}, {"timescale", TIMESCALE, 1, 1e12}, {"num_decay_steps", WSD, 0, 1e12},
    {"num_stable_steps", WSD, 0, 1e12},
};

static ql_status number(const char *type, const char *key, const json_t *v, double *out)
{
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        if (strcmp(keys[i].key, key)) continue;
        double x = json_is_number(v) ? json_number_value(v) : NAN;
        if (!(x >= keys[i].min && x <= keys[i].max))
            QL_FAIL(QL_EINVAL, "lr_scheduler_kwargs: '%s' of %s must be a number from %g to %g", key, type, keys[i].min, keys[i].max);
        *out = x;
    }
    return QL_OK;
}

static ql_status ramp(const char *key, const json_t *v, ql_ramp *out)
{
    static const char *const names[] = {"linear", "cosine", "1-sqrt"};
    for (int i = 0; i < 3; i++)
        if (json_is_string(v) && strcmp(json_string_value(v), names[i]) == 0) {
            *out = (ql_ramp)i;
            return QL_OK;
        }
    QL_FAIL(QL_EINVAL, "lr_scheduler_kwargs: '%s' must be one of linear, cosine, 1-sqrt", key);
}

static bool takes(ql_lr_kind kind, const char *key)
{
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (strcmp(keys[i].key, key) == 0) return (kinds[kind].takes & keys[i].bit) != 0;
    return (kinds[kind].takes & WSD) && (strcmp(key, "warmup_type") == 0 || strcmp(key, "decay_type") == 0);
}

/* "num_cycles, min_lr": what a schedule takes, for messages. */
static const char *list_of(ql_lr_kind kind, char *buf, size_t size)
{
    size_t at = 0;
    buf[0] = 0;
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (kinds[kind].takes & keys[i].bit) at += (size_t)snprintf(buf + at, size - at, "%s%s", at ? ", " : "", keys[i].key);
    if (kinds[kind].takes & WSD) snprintf(buf + at, size - at, ", warmup_type, decay_type");
    return buf[0] ? buf : "none";
}

static ql_status read_kwargs(ql_lr *s, const json_t *kwargs)
{
    const char *type = kinds[s->kind].name, *key;
    double min_lr = -1, rate = -1, ratio = 0, decay = -1, stable = -1;
    char known[256];
    json_t *v;
    json_object_foreach((json_t *)kwargs, key, v) {
        if (!takes(s->kind, key))
            QL_FAIL(QL_EINVAL, "lr_scheduler_kwargs: %s has no '%.40s'; it has: %s", type, key, list_of(s->kind, known, sizeof known));
        if (json_is_null(v)) continue;
        if (strcmp(key, "warmup_type") == 0) QL_TRY(ramp(key, v, &s->up));
        if (strcmp(key, "decay_type") == 0) QL_TRY(ramp(key, v, &s->down));
        double *to = strcmp(key, "num_cycles") == 0       ? &s->cycles
                     : strcmp(key, "power") == 0          ? &s->power
                     : strcmp(key, "lr_end") == 0         ? &s->lr_end
                     : strcmp(key, "min_lr") == 0         ? &min_lr
                     : strcmp(key, "min_lr_rate") == 0    ? &rate
                     : strcmp(key, "min_lr_ratio") == 0   ? &ratio
                     : strcmp(key, "warmup_lr_rate") == 0 ? &s->warmup_rate
                     : strcmp(key, "timescale") == 0      ? &s->timescale
                     : strcmp(key, "num_decay_steps") == 0 ? &decay
                                                           : &stable;
        QL_TRY(number(type, key, v, to));
    }
    if (s->kind == QL_LR_COSINE_MIN || s->kind == QL_LR_COSINE_WARMUP_MIN) {
        if ((min_lr >= 0) == (rate >= 0)) QL_FAIL(QL_EINVAL, "lr_scheduler_kwargs: %s needs one of min_lr and min_lr_rate", type);
        s->min_rate = rate >= 0 ? rate : s->lr > 0 ? min_lr / s->lr : 0;
    }
    if (s->kind == QL_LR_STABLE) {
        if (decay < 0) QL_FAIL(QL_EINVAL, "lr_scheduler_kwargs: warmup_stable_decay needs num_decay_steps");
        s->min_rate = ratio, s->decay = (int64_t)decay, s->stable = (int64_t)stable;
    }
    if (s->kind == QL_LR_POLYNOMIAL && s->lr <= s->lr_end)
        QL_FAIL(QL_EINVAL, "lr_scheduler_kwargs: lr_end %g must be below learning_rate %g", s->lr_end, s->lr);
    return QL_OK;
}

ql_status ql_lr_init(const char *type, const json_t *kwargs, double lr, ql_lr *out)
{
    ql_lr s = {.lr = lr, .cycles = 0.5, .power = 1, .lr_end = 1e-7, .warmup_rate = -1, .stable = -1, .up = QL_RAMP_LINEAR,
                     .down = QL_RAMP_COSINE, .total = 1};
    int k = 0;
    while (k < QL_LR_KINDS && strcmp(kinds[k].name, type)) k++;
    if (k == QL_LR_KINDS) QL_FAIL(QL_ENOSUP, "lr_scheduler_type: '%.40s' is not supported", type);
    s.kind = (ql_lr_kind)k;
    if (s.kind == QL_LR_RESTARTS) s.cycles = 1;
    QL_TRY(read_kwargs(&s, kwargs && json_is_object(kwargs) ? kwargs : NULL));
    *out = s;
    return QL_OK;
}

static double at_least_1(int64_t n)
{
    return n > 1 ? (double)n : 1.0;
}

static double cosine(double cycles, double progress)
{
    return 0.5 * (1.0 + cos(pi * cycles * 2.0 * progress));
}

static double stable_decay(const ql_lr *s, int64_t step)
{
    int64_t stable = s->stable >= 0 ? s->stable : s->total - s->warmup - s->decay;
    double p, f;
    if (step < s->warmup) {
        p = (double)step / at_least_1(s->warmup);
        f = s->up == QL_RAMP_LINEAR ? p : s->up == QL_RAMP_COSINE ? 0.5 * (1.0 - cos(pi * p)) : 1.0 - sqrt(1.0 - p);
    } else if (step < s->warmup + stable) {
        return 1.0;
    } else if (step < s->warmup + stable + s->decay) {
        p = (double)(step - s->warmup - stable) / at_least_1(s->decay);
        f = s->down == QL_RAMP_LINEAR ? 1.0 - p : s->down == QL_RAMP_COSINE ? cosine(s->cycles, p) : 1.0 - sqrt(p);
    } else {
        return s->min_rate;
    }
    return fmax(0.0, f * (1.0 - s->min_rate) + s->min_rate);
}

/* transformers counts this one's progress from 1, so that the first step already moves. */
static double cosine_warmup_min(const ql_lr *s, int64_t step)
{
    double f, p;
    if (step < s->warmup) {
        if (s->warmup_rate < 0) return ((double)step + 1.0) / at_least_1(s->warmup);
        return s->warmup_rate + (1.0 - s->warmup_rate) * (double)step / at_least_1(s->warmup - 1);
    }
    p = ((double)(step - s->warmup) + 1.0) / at_least_1(s->total - s->warmup);
    f = cosine(s->cycles, p);
    return fmax(0.0, f * (1.0 - s->min_rate) + s->min_rate);
}

static double polynomial(const ql_lr *s, int64_t step)
{
    double left;
    if (step > s->total) return s->lr_end / s->lr;
    left = 1.0 - (double)(step - s->warmup) / at_least_1(s->total - s->warmup);
    return ((s->lr - s->lr_end) * pow(left, s->power) + s->lr_end) / s->lr;
}

double ql_lr_factor(const ql_lr *s, int64_t step)
{
    int64_t w = s->warmup, n = s->total;
    double p = (double)(step - w) / at_least_1(n - w), scale;
    if (s->kind == QL_LR_CONSTANT) return 1.0; /* has no warm-up */
    if (s->kind == QL_LR_STABLE) return stable_decay(s, step);
    if (s->kind == QL_LR_COSINE_WARMUP_MIN) return cosine_warmup_min(s, step);
    if (step < w) return (double)step / at_least_1(w);
    switch (s->kind) {
    case QL_LR_LINEAR: return fmax(0.0, (double)(n - step) / at_least_1(n - w));
    case QL_LR_COSINE: return fmax(0.0, cosine(s->cycles, p));
    case QL_LR_RESTARTS: return p >= 1.0 ? 0.0 : fmax(0.0, 0.5 * (1.0 + cos(pi * fmod(s->cycles * p, 1.0))));
    case QL_LR_POLYNOMIAL: return polynomial(s, step);
    case QL_LR_INVERSE_SQRT:
        scale = s->timescale > 0 ? s->timescale : w > 0 ? (double)w : 10000.0;
        return 1.0 / sqrt(((double)step + scale - (double)w) / scale);
    case QL_LR_COSINE_MIN: return fmax(0.0, cosine(s->cycles, p) * (1.0 - s->min_rate) + s->min_rate);
    default: return 1.0; /* constant_with_warmup */
    }
}

void ql_lr_table(const ql_lr *s, int64_t n, float *out)
{
    for (int64_t k = 0; k < n; k++) out[k] = (float)(s->lr * ql_lr_factor(s, k));
}
