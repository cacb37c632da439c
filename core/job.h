/* Values of settings. Those that have a form of their own are checked when they are set, and the engine reads them with the same
 * functions. */
#ifndef QL_JOB_H
#define QL_JOB_H

#include "core/qlora.h"

/* ---- from what is given to what a job stores (settings_read.c); new references ---- */
ql_status ql_setting_read(const ql_setting *s, json_t *given, json_t **out) QL_MUST_USE;
/* Text by the setting's type; still to be read. */
ql_status ql_setting_parse(const ql_setting *s, const char *text, json_t **out) QL_MUST_USE;

/* ---- devices: "auto", "0,1", "cuda", "cuda:0,1", "cpu", "cpu:4" ---- */
enum { QL_MAX_DEVICES = 8 }; /* of a job, one rank each */
typedef enum { QL_DEVICES_AUTO, QL_DEVICES_CPU, QL_DEVICES_CUDA } ql_devices_kind;
typedef struct {
    ql_devices_kind kind;
    int count;                 /* AUTO, and CUDA without numbers: 0, all there are */
    int index[QL_MAX_DEVICES]; /* CUDA: as numbered by the driver; distinct */
} ql_devices;
ql_status ql_devices_parse(const char *text, ql_devices *out) QL_MUST_USE;

/* ---- store: where frozen weights rest, by layer ---- */
typedef enum {
    QL_STORE_AUTO,
    QL_STORE_RESIDENT,   /* packed, whole, on each device */
    QL_STORE_RESIDENT16, /* dequantised once */
    QL_STORE_SHARDED,    /* packed bytes cut over the devices */
    QL_STORE_HOST,       /* streamed from one copy in host memory */
    QL_STORES
} ql_store_kind;
const char *ql_store_name(ql_store_kind k);
/* "sharded", or by layer "0-15:resident,16:host,17-31:sharded", or the same as an object
 * {"0-15": "resident"}. Fills out[0 … layers) and leaves unnamed layers AUTO; out NULL: checks the form only. */
ql_status ql_store_parse(const json_t *value, int64_t layers, ql_store_kind *out) QL_MUST_USE;

/* ---- sizes: 123456789 (bytes), "15GiB", "15 GB", "800 MiB" ---- */
ql_status ql_bytes_parse(const json_t *value, const char *what, int64_t *out) QL_MUST_USE;

/* ---- fsdp and fsdp_config, read together ---- */
typedef enum { QL_FSDP_AUTO, QL_FSDP_OFF, QL_FSDP_ON } ql_fsdp_mode;
typedef struct {
    ql_fsdp_mode mode;
    bool reshard;               /* reshard_after_forward; false: gathered once, as resident */
    bool offload;               /* cpu_offload: weights and optimizer state rest in host memory */
    bool checkpoint_set, checkpoint; /* activation_checkpointing */
    bool forward_set, forward;   /* forward_prefetch */
    bool backward_set, backward; /* backward_prefetch */
} ql_fsdp;
/* notes: NULL, or an array that receives a line for each key without effect. */
ql_status ql_fsdp_parse(const json_t *fsdp, const json_t *config, ql_fsdp *out, json_t *notes) QL_MUST_USE;

/* Every setting of a group that is not refused, with its value (the default where unset). New reference. For "lora": what
 * ql_lora_config_parse reads. */
json_t *ql_job_group(const ql_job *job, const char *group);

/* The nearest of n words, up to two: "did you mean 'a' or 'b'?"; "" if none is near. */
const char *ql_nearest(const char *word, const char *const *words, int n, char *buf, size_t size);

#endif
