#include "core/schedule.h"
#include "tests/test.h"

TEST(as_transformers)
{
    json_t *f = json_load_file("tests/golden/schedules.json", 0, NULL), *c, *v;
    size_t i, k;
    CHECK(json_array_size(json_object_get(f, "cases")) > 20);
    json_array_foreach(json_object_get(f, "cases"), i, c) {
        const char *type = json_string_value(json_object_get(c, "type"));
        double lr = json_number_value(json_object_get(c, "lr"));
        ql_lr s;
        float table[64];
        CHECK_OK(ql_lr_init(type, json_object_get(c, "kwargs"), lr, &s));
        s.warmup = json_integer_value(json_object_get(c, "warmup"));
        s.total = json_integer_value(json_object_get(c, "total"));
        ql_lr_table(&s, 64, table);
        json_array_foreach(json_object_get(c, "rates"), k, v) {
            double want = json_number_value(v), got = lr * ql_lr_factor(&s, (int64_t)k);
            CHECK_MSG(fabs(got - want) <= 1e-15 * lr + 1e-14 * fabs(want), "case %zu (%s) step %zu: %.17g, expected %.17g", i, type, k, got,
                      want);
            CHECK(table[k] == (float)got);
        }
    }
    json_decref(f);
}

TEST(options_are_checked)
{
    static const struct {
        const char *type, *kwargs, *part;
        ql_status code;
    } bad[] = {
        {"greedy", "{}", "'greedy' is not supported", QL_ENOSUP},
        {"linear", "{\"num_cycles\": 1}", "linear has no 'num_cycles'; it has: none", QL_EINVAL},
        {"cosine", "{\"num_cycle\": 1}", "it has: num_cycles", QL_EINVAL},
        {"cosine", "{\"num_cycles\": \"2\"}", "must be a number", QL_EINVAL},
        {"cosine", "{\"num_cycles\": -1}", "must be a number", QL_EINVAL},
        {"cosine_with_min_lr", "{}", "one of min_lr and min_lr_rate", QL_EINVAL},
        {"cosine_with_min_lr", "{\"min_lr\": 1e-6, \"min_lr_rate\": 0.1}", "one of min_lr and min_lr_rate", QL_EINVAL},
        {"warmup_stable_decay", "{}", "needs num_decay_steps", QL_EINVAL},
        {"warmup_stable_decay", "{\"num_decay_steps\": 3, \"decay_type\": \"step\"}", "1-sqrt", QL_EINVAL},
        {"polynomial", "{\"lr_end\": 1}", "below learning_rate", QL_EINVAL},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        json_t *k = json_loads(bad[i].kwargs, 0, NULL);
        ql_lr s;
        CHECK_FAILS(ql_lr_init(bad[i].type, k, 2e-4, &s), bad[i].code, bad[i].part);
        json_decref(k);
    }
}

/* Every schedule is finite everywhere, also where warm-up is longer than training. */
TEST(odd_lengths_are_finite)
{
    static const char *const types[] = {"linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup",
                                        "inverse_sqrt", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay"};
    for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
        json_t *k = t == 9 ? json_pack("{s:i}", "num_decay_steps", 50) : t >= 7 ? json_pack("{s:f}", "min_lr_rate", 0.1) : json_object();
        for (int64_t w = 0; w < 6; w++)
            for (int64_t n = 1; n < 6; n++) {
                ql_lr s;
                CHECK_OK(ql_lr_init(types[t], k, 1e-3, &s));
                s.warmup = w, s.total = n;
                for (int64_t i = 0; i < 10; i++) CHECK(isfinite(ql_lr_factor(&s, i)) && ql_lr_factor(&s, i) >= 0);
            }
        json_decref(k);
    }
}

TEST_MAIN(T(as_transformers), T(options_are_checked), T(odd_lengths_are_finite))
