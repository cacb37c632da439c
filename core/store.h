/* Where frozen layers rest, and how they become a dequantised scratch.
 *
 * A layer's seven linears are one run of bytes, the blob, cut into `parts` equal parts. Resident and host layers have one
 * part; a sharded layer has one per rank, and one all-gather puts them side by side. Cuts fall on 64·256 weights (nested
 * scales), so that every part has whole blocks and whole groups of scales, and the dequantise op reads all parts in place:
 * the scratch it writes is the same bits for any number of parts. Packed bytes only ever move as bytes. */
#ifndef QL_STORE_H
#define QL_STORE_H

#include "core/job.h"
#include "core/layer.h"
#include "kernels/comm.h"

/* How plain 16- or 32-bit weights are kept. */
typedef struct {
    int quantise;      /* load_in_4bit: plain linears become NF4 on load, except those the model skips */
    int nested;        /* double quantisation */
    int direct;        /* dequant_via direct: no rounding to the state dtype first */
} ql_quant;

typedef struct {
    int nf4;                             /* else plain */
    int from_plain;                      /* nf4 made on load */
    ql_dtype dtype;                      /* plain: stored dtype; nf4: state dtype */
    int64_t rows, cols, part;            /* N, K; weights per part */
    int64_t block, nested;               /* 64; 256 or 0 */
    int64_t at_packed, at_absmax, at_nested; /* byte offsets inside a part; packed or plain values, scales, scales of scales */
} ql_blob_linear;

typedef struct {
    int parts;
    int64_t part_bytes;                  /* multiple of 256, the same for all parts */
    ql_blob_linear lin[QL_LINEARS];
} ql_blob;

ql_status ql_blob_init(ql_blob *b, const ql_block *block, const ql_quant *quant, ql_dtype model_dtype, int parts);

/* The values of the codes, in device memory, and the offset of nested scales. */
typedef struct {
    float *code[QL_LINEARS], *code2[QL_LINEARS];
    int code_of[QL_LINEARS]; /* the first linear of the layer with the same codes: one table then serves several in an op */
    float offset[QL_LINEARS];
} ql_tables;

ql_status ql_tables_carve(const ql_blob *b, ql_arena *a, ql_tables *out);

/* What loading needs: a device queue, device memory that nobody uses yet, and the model's mapped files. */
typedef struct {
    const ql_backend *be;
    const ql_queue *q;
    const ql_model *model;
    const ql_quant *quant;
    char *temp;          /* device memory for quantising: ql_store_temp_bytes */
    int64_t temp_bytes;
} ql_loader;

/* Device memory that loading this layer needs for quantisation; 0 where all is quantised already. */
int64_t ql_store_temp_bytes(const ql_blob *b);
/* Fills parts [part, part + n) of layer l at dst, part_bytes each (device or host memory), and the tables. Waits for its copies. */
ql_status ql_store_load(const ql_loader *ld, int64_t l, const ql_blob *b, int part, int n, void *dst, ql_tables *t);

/* How a layer's linears rest, for products that read them as they are. 0: some are not 4-bit. */
int ql_store_views(const ql_shape *s, const ql_blob *b, const ql_tables *t, void *const *parts, const ql_quant *quant, ql_nf4 out[QL_LINEARS]);
/* base of every linear in scratch ← the blob's parts at parts[0 … b->parts). */
ql_status ql_store_dequant(const ql_shape *s, const ql_queue *q, const ql_blob *b, const ql_tables *t, void *const *parts,
                           const ql_quant *quant, ql_scratch *w, int64_t layer);

#endif
