/* Host memory while weights are placed. What is kept on a CPU is the arena, taken and touched before, and the shared copy of host layers.
 * Above that a rank's resident memory, pages of the mapped file among it (the page cache itself does not count, it is nobody's), stays
 * within the largest tensor. The peak is the system's own (VmHWM, set back before loading), so nothing is missed between two looks. */
#include "core/launch.h"
#include "kernels/half.h"
#include "tests/tmp.h"

#include <fcntl.h>
#include <sys/mman.h>

enum { C = 768, F = 6144, V = 512, LAYERS = 3, SLACK = 2 << 20, AROUND = 256 << 10 }; /* the largest linear: 4,718,592 values. Slack: code, tables, small tensors;
 * around: a fault maps 64 KiB of a file at once */
static const int64_t LARGEST = (int64_t)C * F;

typedef struct {
    int ended[4];
    int64_t open[4], peak[4], end[4];
    char why[4][512];
} findings;
static findings *found;

/* ---- a folder ---------------------------------------------------------------------------------- */

static uint64_t seed = 1;
static uint32_t rnd(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33);
}

typedef struct {
    ql_st_decl d[16 * 8 * LAYERS + 8];
    char name[16 * 8 * LAYERS + 8][96];
    int n;
} table;

static void declare(table *t, ql_dtype type, int64_t rows, int64_t cols, const char *fmt, int64_t layer, const char *module, const char *suffix)
{
    snprintf(t->name[t->n], sizeof t->name[0], fmt, (long long)layer, module, suffix);
    t->d[t->n] = (ql_st_decl){t->name[t->n], type, cols ? 2 : 1, {rows, cols}};
    t->n++;
}

static const char state_form[] =
    "{\"quant_type\": \"nf4\", \"blocksize\": 64, \"dtype\": \"float16\", \"shape\": [%lld, %lld], \"nested_blocksize\": 256, "
    "\"nested_dtype\": \"float32\", \"nested_offset\": 0.01}";

static void declare_linear(table *t, int quantised, int64_t l, int w, int64_t n, int64_t k)
{
    const char *module = ql_linear_module((ql_linear)w), *fmt = "model.layers.%lld.%s.weight%s";
    int64_t blocks = ql_ceil_div(n * k, 64);
    char state[256];
    if (!quantised) {
        declare(t, QL_F16, n, k, fmt, l, module, "");
        return;
    }
    declare(t, QL_U8, (n * k + 1) / 2, 1, fmt, l, module, "");
    declare(t, QL_U8, blocks, 0, fmt, l, module, ".absmax");
    declare(t, QL_F32, 16, 0, fmt, l, module, ".quant_map");
    declare(t, QL_F32, ql_ceil_div(blocks, 256), 0, fmt, l, module, ".nested_absmax");
    declare(t, QL_F32, 256, 0, fmt, l, module, ".nested_quant_map");
    declare(t, QL_U8, snprintf(state, sizeof state, state_form, (long long)n, (long long)k), 0, fmt, l, module, ".quant_state.bitsandbytes__nf4");
}

static ql_status fill(ql_st_writer *w, const table *t, int i)
{
    static char buf[1 << 16];
    const ql_st_decl *d = &t->d[i];
    int64_t bytes = d->shape[0] * (d->ndim == 2 ? d->shape[1] : 1) * (int64_t)ql_dtype_size(d->dtype);
    if (strstr(d->name, "quant_state")) {
        long long n, k;
        const char *down = strstr(d->name, "down_proj"), *mlp = strstr(d->name, ".mlp.");
        n = down ? C : mlp ? F : C, k = down ? F : C;
        snprintf(buf, sizeof buf, state_form, n, k);
        return ql_st_put(w, i, buf, bytes);
    }
    for (int64_t at = 0; at < bytes;) {
        int64_t n = ql_min64((int64_t)sizeof buf, bytes - at);
        if (d->dtype == QL_U8)
            for (int64_t k = 0; k < n; k += 4) memcpy(buf + k, &(uint32_t){rnd() * 2654435761u}, 4);
        else
            for (int64_t k = 0, es = (int64_t)ql_dtype_size(d->dtype); k < n / es; k++)
                ql_float_put(buf, d->dtype, k, d->ndim == 2 || d->dtype == QL_F32 ? ((float)(rnd() & 0xffff) / 65536 - 0.5f) * 0.1f : 1.0f);
        QL_TRY(ql_st_put(w, i, buf, n));
        at += n;
    }
    return QL_OK;
}

static ql_status write_model(const char *dir, int quantised)
{
    static table t;
    static const char config[] =
        "{\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\", \"hidden_size\": %d, \"intermediate_size\": %d, \"num_hidden_layers\": %d, "
        "\"num_attention_heads\": 12, \"num_key_value_heads\": 12, \"vocab_size\": %d, \"max_position_embeddings\": 512, \"rms_norm_eps\": 1e-5, "
        "\"rope_theta\": 10000.0, \"tie_word_embeddings\": false, \"torch_dtype\": \"float16\"%s}";
    char text[1024], path[QL_PATH_MAX];
    ql_st_writer *w = NULL;
    ql_status st = QL_OK;
    snprintf(text, sizeof text, config, C, F, LAYERS, V,
             quantised ? ", \"quantization_config\": {\"quant_method\": \"bitsandbytes\", \"load_in_4bit\": true, \"bnb_4bit_quant_type\": \"nf4\", "
                         "\"bnb_4bit_use_double_quant\": true}" : "");
    tmp_text(dir, "config.json", text);
    t.n = 0;
    for (int64_t l = 0; l < LAYERS; l++) {
        for (int i = 0; i < QL_LINEARS; i++)
            declare_linear(&t, quantised, l, i, i == QL_GATE || i == QL_UP ? F : C, i == QL_DOWN ? F : C);
        declare(&t, QL_F16, C, 0, "model.layers.%lld.%s%s", l, "input_layernorm.weight", "");
        declare(&t, QL_F16, C, 0, "model.layers.%lld.%s%s", l, "post_attention_layernorm.weight", "");
    }
    declare(&t, QL_F16, V, C, "%.0lld%s%s", 0, "model.embed_tokens", ".weight");
    declare(&t, QL_F16, V, C, "%.0lld%s%s", 0, "lm_head", ".weight");
    declare(&t, QL_F16, C, 0, "%.0lld%s%s", 0, "model.norm", ".weight");
    QL_TRY(ql_path_join(path, dir, "model.safetensors"));
    QL_TRY(ql_st_create(path, t.d, t.n, NULL, &w));
    for (int i = 0; i < t.n && st == QL_OK; i++) st = fill(w, &t, i);
    if (st == QL_OK) st = ql_st_commit(w);
    ql_st_writer_close(w);
    return st;
}

/* ---- in a rank --------------------------------------------------------------------------------- */

static int64_t figure(const char *key)
{
    char line[256];
    long kib = 0;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, key, strlen(key)) == 0) kib = strtol(line + strlen(key) + 1, NULL, 10);
    if (f) fclose(f);
    return (int64_t)kib * 1024;
}

static int peak_again(void)
{
    int fd = open("/proc/self/clear_refs", O_WRONLY), ok = fd >= 0 && write(fd, "5", 1) == 1;
    if (fd >= 0) close(fd);
    return ok;
}

static const ql_spec *spec;
static ql_status measure(ql_rank_process *p)
{
    ql_rank *r = NULL;
    QL_TRY(ql_rank_open(&p->setup, spec, &r));
    found->open[p->rank] = figure("VmRSS");
    if (!peak_again()) QL_FAIL(QL_ENOSUP, "this system does not set VmHWM back");
    QL_TRY(ql_rank_load(r));
    found->peak[p->rank] = figure("VmHWM");
    found->end[p->rank] = figure("VmRSS");
    ql_rank_close(r);
    return QL_OK;
}

static int body(ql_rank_process *p)
{
    if (measure(p) != QL_OK) snprintf(found->why[p->rank], sizeof found->why[0], "%s", ql_error());
    found->ended[p->rank] = 1;
    return 0;
}

/* Of the rank that took most: bytes above what it has afterwards, while it loaded; and what it has afterwards beyond arena and host layers. */
static ql_status extra(const char *dir, const char *more, int world, int64_t *above, int64_t *left)
{
    int device[4] = {0};
    ql_task *t = NULL;
    ql_ranks *ranks = NULL;
    ql_mem *m = NULL;
    json_t *job = json_loads(more, 0, NULL);
    ql_status st = QL_OK;
    json_object_set_new(job, "model", json_string(dir));
    json_object_set_new(job, "max_length", json_integer(16));
    json_object_set_new(job, "dtype", json_string("bfloat16"));
    ql_task_inputs in = {.job = job, .weights = QL_WEIGHTS_MAPPED,
                         .place = {.world = world, .capacity = (int64_t)8 << 30, .host = (int64_t)8 << 30, .bf16 = 1}};
    if (!found) found = mmap(NULL, sizeof *found, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    memset(found, 0, sizeof *found);
    QL_GO(ql_task_open(&in, &t));
    spec = &t->spec;
    QL_GO(ql_mem_open(spec, 0, &m));
    int64_t shared = ql_mem_host_base(m);
    ql_launch launch = {.be = ql_backend_cpu(), .task = t, .device = device, .timeout_ms = 60000};
    QL_GO(ql_ranks_start(&launch, body, &ranks));
    for (int i = 0; i < world; i++)
        for (int ms = 0; !found->ended[i]; ms++) {
            if (ms > 60000) QL_GO(ql_fail(QL_EPEER, "the ranks hang"));
            usleep(1000);
        }
    *above = *left = 0;
    for (int i = 0; i < world; i++) {
        if (found->why[i][0]) QL_GO(ql_fail(strstr(found->why[i], "VmHWM") ? QL_ENOSUP : QL_EINTERNAL, "%s", found->why[i]));
        *above = ql_max64(*above, found->peak[i] - found->end[i]);
        *left = ql_max64(*left, found->end[i] - found->open[i] - shared);
    }
out:
    ql_ranks_stop(ranks);
    ql_mem_close(m);
    ql_task_close(t);
    json_decref(job);
    return st;
}

static void within(const char *dir, int64_t largest)
{
#ifdef __SANITIZE_ADDRESS__
    SKIP("the sanitizer keeps freed memory");
#endif
    static const struct {
        const char *name, *more;
        int world;
    } k[] = {
        {"resident", "{\"fsdp\": false}", 1},
        {"resident16", "{\"store\": \"resident16\"}", 1},
        {"sharded", "{\"fsdp\": true}", 2},
        {"host", "{\"store\": \"host\"}", 2},
    };
    for (size_t i = 0; i < sizeof k / sizeof *k; i++) {
        int64_t above = 0, left = 0;
        ql_status st = extra(dir, k[i].more, k[i].world, &above, &left);
        if (st == QL_ENOSUP) SKIP("%s", ql_error());
        CHECK_OK(st);
        printf("# %s: at most %.2f MiB above what is kept; the largest tensor has %.2f MiB\n", k[i].name, (double)above / (1 << 20),
               (double)largest / (1 << 20));
        CHECK_MSG(above <= largest + AROUND, "%s: %.2f MiB above what is kept, the largest tensor has %.2f", k[i].name, (double)above / (1 << 20),
                  (double)largest / (1 << 20));
        CHECK_MSG(left <= SLACK, "%s: %.2f MiB are left behind", k[i].name, (double)left / (1 << 20));
    }
}

TEST(sixteen_bits_quantised_on_load)
{
    const char *dir = tmp_dir("plain");
    CHECK_OK(write_model(dir, 0));
    within(dir, LARGEST * 2);
}

TEST(quantised_already)
{
    const char *dir = tmp_dir("nf4");
    CHECK_OK(write_model(dir, 1));
    within(dir, LARGEST / 2 + LARGEST / 64); /* codes, and a byte of scale for 64 of them */
}

TEST_MAIN(T(sixteen_bits_quantised_on_load), T(quantised_already))
