#include "core/devices.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What the driver, cuBLAS and NCCL take outside the arena. Measured as `runtime` once a run is on; this is the room left for it. */
static int64_t runtime_bytes(int world, int direct)
{
    /* Measured on H200s: 0.51 GiB for one rank, 0.97 with NCCL through host memory, 1.8 where GPUs read each other's. */
    return (int64_t)(world == 1 ? 600 : direct ? 1900 : 1050) << 20;
}

int64_t ql_host_free(void)
{
    int64_t total, available;
    ql_host_memory("", &total, &available);
    return available;
}

/* ---- picking ---------------------------------------------------------------------------------- */

static const json_t *find(const json_t *probe, const char *backend, int index)
{
    size_t i;
    json_t *o;
    json_array_foreach(probe, i, o)
    {
        const char *b = json_string_value(json_object_get(o, "backend"));
        if (b && strcmp(b, backend) == 0 && json_integer_value(json_object_get(o, "index")) == index) return o;
    }
    return NULL;
}

static int count(const json_t *probe, const char *backend)
{
    int n = 0;
    while (find(probe, backend, n)) n++;
    return n;
}

/* Does any of these GPUs read another's memory? Between them NCCL then keeps more buffers, unless it is told not to. */
static int joined(const json_t *probe, const int *device, int n)
{
    const char *off = getenv("NCCL_P2P_DISABLE");
    size_t i;
    json_t *peer;
    if (off && strtol(off, NULL, 0) != 0) return 0;
    for (int a = 0; a < n; a++)
        json_array_foreach(json_object_get(find(probe, "cuda", device[a]), "peers"), i, peer)
            for (int b = 0; b < n; b++)
                if (b != a && json_integer_value(peer) == device[b]) return 1;
    return 0;
}

static ql_status pick_cuda(const ql_args *a, const json_t *probe, ql_place *p, int *device)
{
    int all = count(probe, "cuda");
    p->world = a->devices.count ? a->devices.count : all;
    if (p->world > QL_MAX_WORLD) QL_FAIL(QL_ENOSUP, "devices: there are %d GPUs, at most %d work together: name some, as in --devices 0,1", p->world, (int)QL_MAX_WORLD);
    p->capacity = INT64_MAX, p->arch = INT32_MAX, p->bf16 = 1;
    for (int i = 0; i < p->world; i++) {
        device[i] = a->devices.count ? a->devices.index[i] : i;
        if (!find(probe, "cuda", device[i])) QL_FAIL(QL_EINVAL, "devices: there is no CUDA device %d (there are %d, numbered from 0)", device[i], all);
    }
    int64_t runtime = runtime_bytes(p->world, joined(probe, device, p->world));
    for (int i = 0; i < p->world; i++) {
        const json_t *d = find(probe, "cuda", device[i]);
        int64_t room = json_integer_value(json_object_get(d, "free"));
        if (a->device_memory[i]) room = ql_min64(room, a->device_memory[i]);
        p->capacity = ql_min64(p->capacity, ql_max64(0, room - runtime));
        p->arch = (int)ql_min64(p->arch, json_integer_value(json_object_get(d, "arch")));
        p->bf16 &= json_is_true(json_object_get(d, "bf16"));
    }
    return QL_OK;
}

ql_status ql_devices_pick(const ql_args *a, const json_t *probe, const char *missing, ql_place *place, char backend[16],
                          int device[QL_MAX_WORLD])
{
    ql_place p = {0};
    int cuda = count(probe, "cuda");
    /* GPUs behind a driver that is too old are no reason to train on the processor unasked. */
    if (!cuda && (a->devices.kind == QL_DEVICES_CUDA || (a->devices.kind == QL_DEVICES_AUTO && strstr(missing, "driver here"))))
        QL_FAIL(QL_ENOSUP, "devices: no CUDA device here: %s. `--devices cpu` runs without", missing);
    p.host = a->host_memory ? a->host_memory : ql_host_free() * 9 / 10;
    if (a->devices.kind == QL_DEVICES_CUDA || (a->devices.kind == QL_DEVICES_AUTO && cuda)) {
        QL_TRY(pick_cuda(a, probe, &p, device));
        strcpy(backend, "cuda");
    } else {
        p.world = a->devices.kind == QL_DEVICES_CPU && a->devices.count ? a->devices.count : 1;
        p.capacity = a->device_memory[0] ? a->device_memory[0] : ql_host_free() * 8 / 10 / p.world;
        p.bf16 = 1;
        for (int i = 0; i < p.world; i++) device[i] = 0;
        strcpy(backend, "cpu");
    }
    *place = p;
    return QL_OK;
}
