/* The device table: memory, streams, events, copies. First of the three tables of a backend. */
#ifndef QL_DEV_H
#define QL_DEV_H

#include "kernels/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ql_dev ql_dev;
typedef struct ql_stream ql_stream;
typedef struct ql_event ql_event;

typedef struct {
    char name[96];          /* "Tesla T4", "Intel(R) Xeon(R) …" */
    char id[48];            /* PCI bus id or GPU uuid; "cpu:0" */
    int arch;               /* CUDA compute capability × 10 (75, 90); 0 on a CPU */
    int sms;                /* multiprocessors, cores on a CPU */
    int bf16;               /* 1: bf16 matmul in hardware (always 1 on cpu) */
    int64_t total_bytes;    /* what the device has */
    int64_t free_bytes;     /* free when asked */
    char driver[32], libs[160]; /* "580.159", "cuBLAS 13.0.0 · NCCL 2.28.3": for `info` */
} ql_dev_info;

typedef struct {
    int64_t allocated, peak; /* through this table, by this process */
    int64_t process;         /* all this process holds on the device, as the driver counts; −1 unknown */
    int64_t used, total;     /* the whole device, all processes, as the driver counts; of a CPU rank: this process, the machine */
    int temperature_c, power_w, utilisation, clock_mhz; /* −1 unknown */
} ql_dev_memory;

typedef struct {
    /* Devices this process may use (CUDA_VISIBLE_DEVICES is honoured by the driver). Forked ranks call
     * it after fork only. */
    ql_status (*count)(int *n);
    ql_status (*open)(int index, ql_dev **out);
    void (*close)(ql_dev *d);
    ql_status (*info)(ql_dev *d, ql_dev_info *out);
    ql_status (*memory)(ql_dev *d, ql_dev_memory *out);
    /* *out = 1 if device a can read device b's memory directly. */
    ql_status (*peer)(int a, int b, int *out);

    /* Device memory, 256-byte aligned. QL_ENOMEM says what was asked and what is free. */
    ql_status (*alloc)(ql_dev *d, int64_t bytes, void **out);
    void (*free)(ql_dev *d, void *p);
    /* Page-locked host memory that the device may also read in place; and pinning of memory that exists
     * (a shared mapping). pin answers QL_ENOSUP where the system refuses. */
    ql_status (*host_alloc)(ql_dev *d, int64_t bytes, void **out);
    void (*host_free)(ql_dev *d, void *p);
    ql_status (*pin)(ql_dev *d, void *p, int64_t bytes);
    void (*unpin)(ql_dev *d, void *p);

    ql_status (*stream_open)(ql_dev *d, ql_stream **out);
    void (*stream_close)(ql_stream *s);
    ql_status (*sync)(ql_stream *s); /* host waits; reports errors of everything queued before */
    ql_status (*event_open)(ql_dev *d, ql_event **out);
    void (*event_close)(ql_event *e);
    ql_status (*record)(ql_stream *s, ql_event *e);
    ql_status (*wait)(ql_stream *s, ql_event *e);           /* s waits; the host does not */
    ql_status (*done)(ql_event *e, int *out);               /* never waits */
    ql_status (*elapsed)(ql_event *a, ql_event *b, double *ms);

    /* Asynchronous; any mix of host (pinned, else it may wait) and device addresses. */
    ql_status (*copy)(ql_stream *s, void *dst, const void *src, int64_t bytes);
    ql_status (*copy2d)(ql_stream *s, void *dst, int64_t dst_pitch, const void *src, int64_t src_pitch,
                        int64_t width_bytes, int64_t rows);
    ql_status (*set)(ql_stream *s, void *dst, int byte, int64_t bytes);

    int lazy; /* 1: a kernel, and a library's plan for a shape, comes to the device when it is first called for */
} ql_dev_table;

/* ---- the host (host.c) --------------------------------------------------------------------------- */

/* Bytes of the machine, and those that may still be taken: where a control group limits this process, the group's. root: "", or a
 * folder that stands for / (tests). */
void ql_host_memory(const char *root, int64_t *total, int64_t *available);
/* The number after `key` at the beginning of a line ("MemTotal:", "" the first line's); -1: none. */
int64_t ql_host_number(const char *path, const char *key);

/* ---- how GPUs are joined, as NVML tells (nvml.c); apart from the table: no context is made ---- */

/* What the way from one GPU to another goes through, the nearest first. */
typedef enum {
    QL_PATH_UNKNOWN, QL_PATH_BOARD, QL_PATH_SWITCH, QL_PATH_SWITCHES, QL_PATH_HOST_BRIDGE, QL_PATH_NODE, QL_PATH_SOCKETS
} ql_path;
typedef enum { QL_P2P_UNKNOWN, QL_P2P_OK, QL_P2P_CHIPSET, QL_P2P_GPU, QL_P2P_TOPOLOGY, QL_P2P_DISABLED, QL_P2P_UNSUPPORTED } ql_p2p;

typedef struct {
    ql_path path;
    ql_p2p p2p;     /* one may read the other's memory, or why not */
    int nvlinks;    /* active NVLinks that lead there, through a switch too */
    int nvlink_mbps; /* of each, one way; 0 unknown */
} ql_gpu_link;
/* PCI Express: as it is now (a GPU at rest slows its link down), and the most that card and slot can; 0 unknown. */
typedef struct {
    int generation, width, max_generation, max_width;
} ql_gpu_pcie;

typedef struct ql_nvml ql_nvml;
/* The driver's libnvidia-ml.so.1; QL_ENOSUP where it is not there or answers nothing. */
ql_status ql_nvml_open(ql_nvml **out);
void ql_nvml_close(ql_nvml *n);
/* By PCI bus ids, as ql_dev_info.id. What NVML does not know is left unknown. */
ql_status ql_nvml_pcie(const ql_nvml *n, const char *id, ql_gpu_pcie *out);
ql_status ql_nvml_link(const ql_nvml *n, const char *a, const char *b, ql_gpu_link *out);

#ifdef __cplusplus
}
#endif
#endif
