/* The null backend counts, and hands out memory that does not exist; the CPU device counts what
 * does. */
#include "tests/tmp.h"

#include "kernels/cpu/cpu.h"

TEST(null_runs_what_no_machine_holds)
{
    const ql_backend *b = ql_backend_null();
    ql_dev *d = NULL;
    ql_stream *s = NULL;
    void *w = NULL, *x = NULL;
    int n = 0;
    ql_null_configure(2, (int64_t)640 << 30);
    ql_null_take();
    CHECK_OK(b->dev->count(&n));
    CHECK_INT(n, 2);
    CHECK_FAILS(b->dev->open(2, &d), QL_EINVAL, "no device 2 of 2");
    CHECK_OK(b->dev->open(1, &d));
    CHECK_OK(b->dev->stream_open(d, &s));
    CHECK_OK(b->dev->alloc(d, (int64_t)600 << 30, &w));
    CHECK((uintptr_t)w % 256 == 0);
    CHECK_FAILS(b->dev->alloc(d, (int64_t)41 << 30, &x), QL_ENOMEM, "are free");
    CHECK(x == NULL);

    ql_queue q = {.ops = b->ops, .stream = s};
    const int64_t T = 4096, C = 16384, F = 53248; /* Llama 3.1 405B */
    ql_tensor a = ql_mat(w, QL_BF16, T, C, C),
              g = ql_mat((char *)w + ((int64_t)1 << 32), QL_BF16, F, C, C);
    ql_tensor o = ql_mat((char *)w + ((int64_t)1 << 34), QL_BF16, T, F, F);
    CHECK_OK(ql_matmul(&q, o, a, g, QL_NT, 1, QL_NONE, QL_NONE));
    CHECK_FAILS(ql_matmul(&q, o, a, g, QL_NN, 1, QL_NONE, QL_NONE), QL_EINVAL, "matmul: b is");
    ql_null_counts c = ql_null_take();
    CHECK_INT(c.calls, 1);
    CHECK_INT(c.flops, 2 * T * C * F);
    CHECK_INT(c.bytes, 2 * (T * C + F * C + T * F));
    CHECK_INT(c.allocated, (int64_t)600 << 30);

    /* From the device come zeros, whatever was sent there. */
    float host[4] = {1, 2, 3, 4};
    CHECK_OK(b->dev->copy(s, w, host, sizeof host));
    CHECK_OK(b->dev->copy(s, host, w, sizeof host));
    CHECK(host[0] == 0 && host[3] == 0);
    CHECK_INT(ql_null_take().bytes, 2 * (int64_t)sizeof host);
    b->dev->free(d, w);
    ql_dev_memory m;
    CHECK_OK(b->dev->memory(d, &m));
    CHECK_INT(m.allocated, 0);
    CHECK_INT(m.peak, (int64_t)600 << 30);
    CHECK_INT(m.total, (int64_t)640 << 30);
    b->dev->stream_close(s);
    b->dev->close(d);
    ql_null_configure(8, (int64_t)1 << 40);
}

TEST(null_counts_what_would_be_sent)
{
    const ql_comm_table *t = ql_backend_null()->comm;
    ql_comm_setup setup = {.rank = 1, .world = 4};
    ql_comm *c = NULL;
    int dummy[8];
    CHECK_OK(t->open(NULL, &setup, &c));
    CHECK_OK(t->all_gather(c, NULL, ql_vec(dummy, QL_U8, 4000), ql_vec(dummy, QL_U8, 1000)));
    CHECK_INT(t->bytes_sent(c), 3000);
    CHECK_OK(t->all_to_all(c, NULL, ql_vec(dummy, QL_F32, 400), ql_vec(dummy, QL_F32, 400)));
    CHECK_INT(t->bytes_sent(c), 3000 + 3 * 400);
    t->close(c);
}

TEST(cpu_device_counts_memory)
{
    const ql_dev_table *t = ql_backend_cpu()->dev;
    ql_dev *d = NULL;
    ql_dev_info info;
    ql_dev_memory m;
    void *a = NULL, *b = NULL;
    CHECK_FAILS(t->open(1, &d), QL_EINVAL, "there is no device 1");
    CHECK_OK(t->open(0, &d));
    CHECK_OK(t->info(d, &info));
    CHECK_STR(info.id, "cpu:0");
    CHECK(info.total_bytes > 0 && info.free_bytes > 0 && info.free_bytes <= info.total_bytes &&
          info.sms > 0);
    CHECK_OK(t->alloc(d, 1000, &a));
    CHECK_OK(t->alloc(d, 0, &b));
    CHECK(a && b && (uintptr_t)a % 256 == 0 && (uintptr_t)b % 256 == 0);
    memset(a, 1, 1000);
    t->free(d, a);
    CHECK_OK(t->memory(d, &m));
    CHECK_INT(m.allocated, 0);
    CHECK_INT(m.peak, 1000);
    CHECK(m.process > 0 && m.total == info.total_bytes);
    a = NULL;
    CHECK_FAILS(t->alloc(d, (int64_t)1 << 60, &a), QL_ENOMEM, "bytes asked");
    CHECK_FAILS(t->alloc(d, INT64_MAX, &a), QL_ENOMEM, "bytes asked");
    CHECK_FAILS(t->alloc(d, -1, &a), QL_EINVAL, "-1 bytes");
    CHECK(a == NULL);
    t->free(d, b);
    t->free(d, NULL);
    t->close(d);
}

/* Distance in units of the last place of the exact result. */
static double ulps(float x)
{
    double exact = exp((double)x), ulp = fmax(ldexp(1, ilogb(exact) - 23), 0x1p-149);
    return fabs((double)ql_cpu_exp(x) - exact) / ulp;
}

/* A folder as / with these files in it. */
static const char *host(const char *name, const char *const (*file)[2], int n)
{
    const char *root = tmp_dir(name);
    for (int i = 0; i < n; i++) {
        char dir[QL_PATH_MAX];
        if (ql_path_join(dir, root, file[i][0]) != QL_OK) exit(99);
        char *slash = strrchr(dir, '/');
        *slash = 0;
        if (ql_path_mkdirs(dir) != QL_OK) exit(99);
        tmp_text(dir, slash + 1, file[i][1]);
    }
    return root;
}

TEST(host_memory_is_what_may_be_taken)
{
    static const char *const files[][2] = {
        {"proc/meminfo", "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    800 kB\n"},
        {"sys/fs/cgroup/memory.max", "614400\n"},
        {"sys/fs/cgroup/memory.current", "500000\n"},
        {"sys/fs/cgroup/memory.stat", "anon 100000\nfile 400000\ninactive_anon 7\nactive_anon 8\ninactive_file 300000\nactive_file 50000\n"}};
    static const char *const first[][2] = {
        {"proc/meminfo", "MemTotal:       1000 kB\nMemAvailable:    800 kB\n"},
        {"sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"},
        {"sys/fs/cgroup/memory/memory.usage_in_bytes", "500000\n"}};
    static const char *const unlimited[][2] = {
        {"proc/meminfo", "MemTotal:       1000 kB\nMemAvailable:    800 kB\n"}, {"sys/fs/cgroup/memory.max", "max\n"}, {"sys/fs/cgroup/memory.current", "1\n"}};
    int64_t total, available;
    ql_host_memory(host("alone", files, 1), &total, &available); /* what is free now is no matter: the page cache gives way */
    CHECK_INT(total, 1000 * 1024);
    CHECK_INT(available, 800 * 1024);
    ql_host_memory(host("group", files, 4), &total, &available);
    CHECK_INT(total, 614400);
    CHECK_INT(available, 614400 - 500000 + 350000);
    ql_host_memory(host("first version, no limit", first, 3), &total, &available);
    CHECK_INT(total, 1000 * 1024);
    CHECK_INT(available, 800 * 1024);
    ql_host_memory(host("no limit", unlimited, 3), &total, &available);
    CHECK_INT(available, 800 * 1024);
    CHECK_INT(ql_host_number("/nonexistent", "MemTotal:"), -1);
    CHECK(ql_host_number("/proc/meminfo", "MemTotal:") > 0); /* its size is said to be 0 */
}

TEST(exp_is_within_2_ulp)
{
    double worst = 0;
    /* Every 997th float of the range whose results are finite and not zero, on both sides. */
    for (uint32_t u = 0; u < ql_f32_bits(103.9f); u += 997) {
        float x = ql_f32_from_bits(u);
        worst = fmax(worst, ulps(-x));
        if (x < 88.7f) worst = fmax(worst, ulps(x));
    }
    CHECK_MSG(worst <= 2, "the worst is %.2f ulp", worst);
    CHECK(ql_cpu_exp(0.0f) == 1 && ql_cpu_exp(-INFINITY) == 0 && ql_cpu_exp(-200.0f) == 0);
    CHECK(ql_cpu_exp(INFINITY) == INFINITY && ql_cpu_exp(89.0f) == INFINITY);
    CHECK(isnan(ql_cpu_exp(NAN)));
}

TEST(cuda_says_what_is_missing)
{
    const ql_backend *b = NULL;
    CHECK_FAILS(ql_backend_cuda("/nonexistent/libqlora-cuda.so", &b), QL_ENOSUP, "no CUDA backend");
    CHECK_FAILS(ql_backend_cuda("libjansson.so.4", &b), QL_ENOSUP, "lacks ql_cuda_backend");
    CHECK(b == NULL);
}

TEST_MAIN(T(null_runs_what_no_machine_holds), T(null_counts_what_would_be_sent),
          T(cpu_device_counts_memory), T(host_memory_is_what_may_be_taken), T(exp_is_within_2_ulp), T(cuda_says_what_is_missing))
