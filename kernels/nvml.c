/* How GPUs are joined: PCI Express, NVLink, peer access. NVML belongs to the driver: it is opened at run time, and any of its
 * functions may be missing, whose figures are then unknown. Types and numbers below are those of nvml.h. */
#include "kernels/dev.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

enum { LINKS_MAX = 18, FIELD_NVLINK_MBPS = 90, CAPS_READ = 0, REMOTE_SWITCH = 2 };

typedef void *device;
typedef struct {
    char legacy[16];
    unsigned domain, bus, slot, id, subsystem;
    char text[32];
} pci_info;
typedef struct {
    unsigned field, scope;
    long long timestamp, latency;
    int type, result;
    union {
        double d;
        unsigned u;
        unsigned long long l;
    } value;
} field_value;

struct ql_nvml {
    void *library;
    int (*init)(void);
    int (*shutdown)(void);
    int (*by_bus)(const char *, device *);
    int (*pci)(device, pci_info *);
    int (*ancestor)(device, device, int *);
    int (*p2p)(device, device, int, int *);
    int (*link_state)(device, unsigned, int *);
    int (*link_remote)(device, unsigned, pci_info *);
    int (*link_type)(device, unsigned, int *);
    int (*fields)(device, int, field_value *);
    int (*generation)(device, unsigned *);
    int (*width)(device, unsigned *);
    int (*max_generation)(device, unsigned *);
    int (*max_width)(device, unsigned *);
};

static void symbol(const ql_nvml *n, const char *name, void *function)
{
    void *p = dlsym(n->library, name);
    memcpy(function, &p, sizeof p); /* ISO C has no cast from object to function pointers */
}

ql_status ql_nvml_open(ql_nvml **out)
{
    ql_nvml *n = calloc(1, sizeof *n);
    if (!n) QL_FAIL(QL_ENOMEM, "nvml: no memory");
    n->library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!n->library) {
        free(n);
        QL_FAIL(QL_ENOSUP, "nvml: %s", dlerror());
    }
    symbol(n, "nvmlInit_v2", &n->init);
    symbol(n, "nvmlShutdown", &n->shutdown);
    symbol(n, "nvmlDeviceGetHandleByPciBusId_v2", &n->by_bus);
    symbol(n, "nvmlDeviceGetPciInfo_v3", &n->pci);
    symbol(n, "nvmlDeviceGetTopologyCommonAncestor", &n->ancestor);
    symbol(n, "nvmlDeviceGetP2PStatus", &n->p2p);
    symbol(n, "nvmlDeviceGetNvLinkState", &n->link_state);
    symbol(n, "nvmlDeviceGetNvLinkRemotePciInfo_v2", &n->link_remote);
    symbol(n, "nvmlDeviceGetNvLinkRemoteDeviceType", &n->link_type);
    symbol(n, "nvmlDeviceGetFieldValues", &n->fields);
    symbol(n, "nvmlDeviceGetCurrPcieLinkGeneration", &n->generation);
    symbol(n, "nvmlDeviceGetCurrPcieLinkWidth", &n->width);
    symbol(n, "nvmlDeviceGetMaxPcieLinkGeneration", &n->max_generation);
    symbol(n, "nvmlDeviceGetMaxPcieLinkWidth", &n->max_width);
    int code = n->init && n->by_bus ? n->init() : -1;
    if (code != 0) {
        dlclose(n->library);
        free(n);
        QL_FAIL(QL_ENOSUP, "nvml: the driver does not answer (%d)", code);
    }
    *out = n;
    return QL_OK;
}

void ql_nvml_close(ql_nvml *n)
{
    if (!n) return;
    if (n->shutdown) n->shutdown();
    dlclose(n->library);
    free(n);
}

static ql_status find(const ql_nvml *n, const char *id, device *out)
{
    int code = n->by_bus(id, out);
    if (code != 0) QL_FAIL(QL_ENOSUP, "nvml: no GPU at %s (%d)", id, code);
    return QL_OK;
}

static int number(int (*f)(device, unsigned *), device d)
{
    unsigned v = 0;
    return f && f(d, &v) == 0 && v < 1024 ? (int)v : 0;
}

ql_status ql_nvml_pcie(const ql_nvml *n, const char *id, ql_gpu_pcie *out)
{
    device d = NULL;
    QL_TRY(find(n, id, &d));
    *out = (ql_gpu_pcie){number(n->generation, d), number(n->width, d), number(n->max_generation, d), number(n->max_width, d)};
    return QL_OK;
}

/* Links that are up and end at `to`, or at a switch: NVIDIA's switches join all GPUs behind them. */
static int nvlinks(const ql_nvml *n, device from, const pci_info *to)
{
    int found = 0;
    for (unsigned k = 0; n->link_state && k < LINKS_MAX; k++) {
        pci_info remote = {0};
        int up = 0, type = -1;
        if (n->link_state(from, k, &up) != 0 || !up) continue;
        if (n->link_type && n->link_type(from, k, &type) == 0 && type == REMOTE_SWITCH)
            found++;
        else if (to && n->link_remote && n->link_remote(from, k, &remote) == 0)
            found += remote.domain == to->domain && remote.bus == to->bus && remote.slot == to->slot;
    }
    return found;
}

static int nvlink_speed(const ql_nvml *n, device d)
{
    field_value v = {.field = FIELD_NVLINK_MBPS};
    return n->fields && n->fields(d, 1, &v) == 0 && v.result == 0 && v.value.u < 1000000 ? (int)v.value.u : 0;
}

ql_status ql_nvml_link(const ql_nvml *n, const char *a, const char *b, ql_gpu_link *out)
{
    static const ql_p2p why[] = {QL_P2P_OK, QL_P2P_CHIPSET, QL_P2P_GPU, QL_P2P_TOPOLOGY, QL_P2P_DISABLED, QL_P2P_UNSUPPORTED};
    device x = NULL, y = NULL;
    ql_gpu_link l = {0};
    pci_info to = {0};
    int level = -1, status = -1;
    QL_TRY(find(n, a, &x));
    QL_TRY(find(n, b, &y));
    /* Levels are 0, 10, … 50. */
    if (n->ancestor && n->ancestor(x, y, &level) == 0 && level >= 0 && level <= 50) l.path = (ql_path)(QL_PATH_BOARD + level / 10);
    if (n->p2p && n->p2p(x, y, CAPS_READ, &status) == 0 && status >= 0 && status < (int)(sizeof why / sizeof *why)) l.p2p = why[status];
    l.nvlinks = nvlinks(n, x, n->pci && n->pci(y, &to) == 0 ? &to : NULL);
    if (l.nvlinks) l.nvlink_mbps = nvlink_speed(n, x);
    *out = l;
    return QL_OK;
}
