/* libnvidia-ml.so.1 of machines that are not there, by $FAKE_NVML; with -DOLD a driver's that lacks most
 * functions:
 *   t4      PCIe 3.0 x16 at rest, a host bridge between, no peer access
 *   switch  18 NVLinks of 26.562 GB/s to a switch
 *   pairs   GPUs 2k and 2k + 1 by 4 NVLinks, the rest through the sockets
 *   broken  one that does not start */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    char legacy[16];
    unsigned domain, bus, slot, id, subsystem;
    char text[32];
} pci_info;
typedef struct {
    unsigned field, scope;
    long long timestamp, latency;
    int type, result;
    unsigned long long value;
} field_value;

static int is(const char *how)
{
    const char *e = getenv("FAKE_NVML");
    return e && strcmp(e, how) == 0;
}

int nvmlInit_v2(void)
{
    return is("broken") ? 9 : 0;
}
int nvmlShutdown(void)
{
    return 0;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device)
{
    unsigned bus;
    if (sscanf(id, "00000000:%x:00.0", &bus) != 1) return 2;
    *device = (void *)(size_t)(bus - 4 + 1);
    return 0;
}
#ifndef OLD
static long number(const void *device)
{
    return (long)(size_t)device - 1;
}

int nvmlDeviceGetPciInfo_v3(void *device, pci_info *out)
{
    memset(out, 0, sizeof *out);
    out->bus = (unsigned)number(device) + 4;
    return 0;
}
int nvmlDeviceGetTopologyCommonAncestor(void *a, void *b, int *level)
{
    *level = is("t4") ? 30 : is("pairs") && number(a) / 2 != number(b) / 2 ? 50 : 40;
    return 0;
}
int nvmlDeviceGetP2PStatus(void *a, void *b, int which, int *status)
{
    (void)a, (void)b;
    *status = which == 0 && is("t4") ? 1 : 0;
    return 0;
}
int nvmlDeviceGetNvLinkState(void *device, unsigned link, int *up)
{
    (void)device;
    *up = link < (is("switch") ? 18u : is("pairs") ? 4u : 0u);
    return is("t4") ? 3 : 0;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *type)
{
    (void)device, (void)link;
    *type = is("switch") ? 2 : 0;
    return 0;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, pci_info *out)
{
    (void)link;
    memset(out, 0, sizeof *out);
    out->bus = ((unsigned)number(device) ^ 1u) + 4;
    return 0;
}
int nvmlDeviceGetFieldValues(void *device, int n, field_value *values)
{
    (void)device;
    for (int i = 0; i < n; i++) values[i].result = values[i].field == 90 ? 0 : 3, values[i].value = 26562;
    return 0;
}
int nvmlDeviceGetCurrPcieLinkGeneration(void *device, unsigned *out)
{
    (void)device;
    return *out = 1, 0;
}
int nvmlDeviceGetCurrPcieLinkWidth(void *device, unsigned *out)
{
    return *out = number(device) == 1 && is("t4") ? 8 : 16, 0;
}
int nvmlDeviceGetMaxPcieLinkGeneration(void *device, unsigned *out)
{
    (void)device;
    return *out = is("t4") ? 3 : 5, 0;
}
int nvmlDeviceGetMaxPcieLinkWidth(void *device, unsigned *out)
{
    (void)device;
    return *out = 16, 0;
}
#endif
