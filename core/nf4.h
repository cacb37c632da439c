/* NF4 and FP4 as bitsandbytes defines them: tables and reference functions on the host. The maths
 * is that of its CUDA path (subnormals taken as zero) with an exact reciprocal; every product and
 * sum is rounded once. */
#ifndef QL_NF4_H
#define QL_NF4_H

#include "core/model.h"
#include "core/safetensors.h"
#include "kernels/base.h"

enum { QL_NF4_BLOCK = 64, QL_NESTED_BLOCK = 256 };

extern const float ql_nf4_map[16];
extern const float ql_fp4_map[16];

/* bitsandbytes' dynamic 8-bit map: signed (scales, first moment of 8-bit Adam) and unsigned (second
 * moment). Ascending; bit-equal to torch's. */
void ql_dynamic_map_signed(float out[256]);
void ql_dynamic_map_unsigned(float out[256]);

/* Code of y in a dynamic map: bitsandbytes' binary search, ties stay at the pivot. */
uint8_t ql_dynamic_code(const float map[256], float y);

/* x (n) → packed (ceil(n/2)), absmax (ceil(n/64)). A block of zeros gets code 0 and scale 0. */
void ql_nf4_quantise(const float *x, int64_t n, uint8_t *packed, float *absmax);
/* absmax (n) → codes (n), nested (ceil(n/256)), and their offset, the mean as one serial double
 * sum rounded to fp32. */
void ql_nested_quantise(const float *absmax, int64_t n, const float map[256], uint8_t *codes,
                        float *nested, float *offset);
/* absmax[i] = fl(fl(map[codes[i]] · nested[i / nested_block]) + offset). w is quantised; out has
 * w->blocks values. */
void ql_weight_absmax(const ql_weight *w, float *out);
/* Elements [first, first + n) of a weight of any kind → out of dtype. Quantised: the fp32 product
 * is rounded to quant_state's dtype first, as bitsandbytes does. absmax (w->blocks) from
 * ql_weight_absmax; unused (NULL) for plain ones. */
void ql_weight_read(const ql_weight *w, const float *absmax, int64_t first, int64_t n, void *out,
                    ql_dtype dtype);

/* A weight quantised in memory, with everything bitsandbytes stores for it. */
typedef struct {
    ql_weight w; /* points into the buffers below */
    uint8_t *packed, *codes;
    float *absmax, *nested, *nested_map;
    char state[512]; /* the quant_state JSON */
} ql_nf4_host;

typedef enum { QL_SCALES_F32, QL_SCALES_NESTED } ql_scales;

/* x (N, K) fp32, already rounded to dtype, which quant_state records. */
ql_status ql_nf4_make(const float *x, int64_t rows, int64_t cols, ql_dtype dtype, ql_scales scales,
                      ql_nf4_host *out) QL_MUST_USE;
void ql_nf4_free(ql_nf4_host *q);
enum { QL_NF4_TENSORS = 6 };
/* The tensors that bitsandbytes' files hold for the weight `name`; strings go into names. Returns
 * how many. */
int ql_nf4_decls(const ql_nf4_host *q, const char *name, char names[QL_NF4_TENSORS][256],
                 ql_st_decl decl[QL_NF4_TENSORS], const void *data[QL_NF4_TENSORS]);

#endif
