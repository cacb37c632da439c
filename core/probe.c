/* Asks for devices in a process of its own: a driver that crashes, or a context that stays, must not be the asker's. */
#include "core/devices.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static json_t *describe(const ql_backend *be, int index, int count)
{
    ql_dev *d = NULL;
    ql_dev_info i;
    json_t *o = NULL, *peers = json_array();
    if (be->dev->open(index, &d) == QL_OK && be->dev->info(d, &i) == QL_OK) {
        for (int k = 0; k < count; k++) {
            int yes = 0;
            if (k != index && be->dev->peer(index, k, &yes) == QL_OK && yes) json_array_append_new(peers, json_integer(k));
        }
        o = json_pack("{s:s,s:s,s:s,s:i,s:i,s:i,s:b,s:I,s:I,s:s,s:s,s:O}", "name", i.name, "id", i.id, "backend", be->name, "index", index,
                      "arch", i.arch, "cores", i.sms, "bf16", i.bf16, "total", (json_int_t)i.total_bytes, "free",
                      (json_int_t)i.free_bytes, "driver", i.driver, "libs", i.libs, "peers", peers);
    }
    if (d) be->dev->close(d);
    json_decref(peers);
    return o;
}

static int has(const json_t *list, json_int_t value)
{
    for (size_t i = 0; i < json_array_size(list); i++)
        if (json_integer_value(json_array_get(list, i)) == value) return 1;
    return 0;
}

static json_t *link_to(const ql_nvml *n, const json_t *x, const json_t *y)
{
    static const char *const paths[] = {"", "one board", "one PCIe switch", "PCIe switches", "the host bridge", "one NUMA node", "two sockets"};
    static const char *const whys[] = {"", "", "the chipset does not support it", "the GPU does not support it", "not across this way",
                                       "switched off in the driver", "not supported"};
    const char *a = json_string_value(json_object_get(x, "id")), *b = json_string_value(json_object_get(y, "id"));
    json_int_t to = json_integer_value(json_object_get(y, "index"));
    ql_gpu_link l = {0};
    /* CUDA has the last word: a container or a virtual machine may forbid what NVML sees. */
    int peer = has(json_object_get(x, "peers"), to);
    if (n && ql_nvml_link(n, a, b, &l) != QL_OK) ql_error_clear();
    return json_pack("{s:I,s:s,s:i,s:f,s:b,s:s}", "to", to, "path", paths[l.path], "nvlinks", l.nvlinks, "nvlink_gbs", l.nvlink_mbps / 1000.0,
                     "p2p", peer, "why", peer ? "" : whys[l.p2p]);
}

/* Each GPU's PCI Express, and how it is joined to those after it. Without NVML only what CUDA says of peer access is known. */
static void add_links(json_t *gpus)
{
    ql_nvml *n = NULL;
    size_t i, k, count = json_array_size(gpus);
    json_t *x;
    if (count && ql_nvml_open(&n) != QL_OK) ql_error_clear();
    json_array_foreach(gpus, i, x)
    {
        json_t *links = json_array();
        ql_gpu_pcie p;
        if (n && ql_nvml_pcie(n, json_string_value(json_object_get(x, "id")), &p) == QL_OK)
            json_object_set_new(x, "pcie", json_pack("{s:i,s:i,s:i,s:i}", "generation", p.generation, "width", p.width, "max_generation",
                                                     p.max_generation, "max_width", p.max_width));
        ql_error_clear();
        for (k = i + 1; k < count; k++) json_array_append_new(links, link_to(n, x, json_array_get(gpus, k)));
        json_object_set_new(x, "links", links);
    }
    ql_nvml_close(n);
}

/* In a child: the answer is one line on fd, an array or an object with "missing". */
static void answer(int fd, const char *library)
{
    const ql_backend *be = NULL;
    json_t *list = json_array(), *all;
    int n = 0;
    ql_status st = ql_backend_cuda(library, &be);
    if (st == QL_OK) st = be->dev->count(&n);
    for (int i = 0; st == QL_OK && i < n; i++) {
        json_t *o = describe(be, i, n);
        if (o) json_array_append_new(list, o);
    }
    add_links(list);
    all = json_pack("{s:o,s:s}", "devices", list, "missing", st == QL_OK ? (n ? "" : "no CUDA device is visible") : ql_error());
    if (all) json_dumpfd(all, fd, JSON_COMPACT);
    _exit(0);
}

static ql_status ask(const char *library, json_t **out)
{
    int fd[2];
    json_error_t err;
    if (pipe(fd)) QL_FAIL(QL_EIO, "devices: no pipe: %s", strerror(errno));
    fflush(NULL);
    pid_t pid = fork();
    if (pid < 0) {
        close(fd[0]);
        close(fd[1]);
        QL_FAIL(QL_ENOMEM, "devices: no process: %s", strerror(errno));
    }
    if (pid == 0) {
        close(fd[0]);
        answer(fd[1], library);
    }
    close(fd[1]);
    FILE *f = fdopen(fd[0], "r");
    json_t *o = f ? json_loadf(f, JSON_DISABLE_EOF_CHECK, &err) : NULL;
    if (f) fclose(f);
    int status = 0;
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {}
    if (!o)
        o = json_pack("{s:[],s:s}", "devices", "missing", "the CUDA driver ended the process that asked it for devices");
    if (!o) QL_FAIL(QL_ENOMEM, "devices: no memory");
    *out = o;
    return QL_OK;
}

ql_status ql_devices_probe(const char *cuda_library, json_t **out, char *missing, size_t size)
{
    json_t *o = NULL;
    QL_TRY(ask(cuda_library, &o));
    snprintf(missing, size, "%s", json_string_value(json_object_get(o, "missing")));
    json_t *list = json_incref(json_object_get(o, "devices"));
    json_decref(o);
    json_t *cpu = describe(ql_backend_cpu(), 0, 1);
    if (cpu) json_array_append_new(list, cpu);
    *out = list;
    return QL_OK;
}
