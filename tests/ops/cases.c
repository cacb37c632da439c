/* THE table. m, n, k, pad and how are explained at the case's function. Sizes are odd on purpose.
 */
#include "tests/ops/runs.h"

#define C(nm, fn, in, out, ...) {.name = nm, .run = run_##fn, .a = in, .b = out, __VA_ARGS__}
/* The same case in each dtype, out in the same one. */
#define EACH(name, fn, ...)                                                                        \
    C(name, fn, QL_F32, QL_F32, __VA_ARGS__), C(name, fn, QL_F16, QL_F16, __VA_ARGS__),            \
        C(name, fn, QL_BF16, QL_BF16, __VA_ARGS__)
/* And in every pair of dtypes. */
#define PAIRS(name, fn, ...)                                                                       \
    EACH(name, fn, __VA_ARGS__), C(name, fn, QL_F32, QL_F16, __VA_ARGS__),                         \
        C(name, fn, QL_F32, QL_BF16, __VA_ARGS__), C(name, fn, QL_F16, QL_F32, __VA_ARGS__),       \
        C(name, fn, QL_BF16, QL_F32, __VA_ARGS__), C(name, fn, QL_F16, QL_BF16, __VA_ARGS__),      \
        C(name, fn, QL_BF16, QL_F16, __VA_ARGS__)
/* Matmul: each dtype, and 16-bit operands with an fp32 result. */
#define MATMUL(...)                                                                                \
    EACH("matmul", matmul, __VA_ARGS__), C("matmul", matmul, QL_F16, QL_F32, __VA_ARGS__),         \
        C("matmul", matmul, QL_BF16, QL_F32, __VA_ARGS__)
#define CPU_BENCH .bench = 1
#define GPU_BENCH .bench = 2

const op_case op_cases[] = {
    PAIRS("convert", convert, 5, 37, 0, 0, 0),
    PAIRS("convert", convert, 3, 2050, 0, 3, 0),
    EACH("convert", convert, 1, 1, 0, 0, 0),
    C("convert_all", convert_all, QL_F32, QL_F32, 3, 95, 0, 0, 0),
    C("convert_all", convert_all, QL_F32, QL_F32, 1, 30, 0, 8, 0), /* some are empty */
    EACH("fill", fill, 7, 33, 0, 5, 0),
    C("add", add, QL_F32, QL_F32, 3, 1031, 0, 0, 0),
    C("add", add, QL_F32, QL_F32, 3, 1031, 0, 7, 1),
    C("add", add, QL_F32, QL_F32, 3, 1031, 0, 7, 2),
    C("add", add, QL_F32, QL_F32, 1, 4096, 0, 0, 3),
    PAIRS("gather_rows", gather, 9, 67, 13, 3, 0),
    EACH("gather_rows", gather, 1, 128, 1, 0, 0),
    PAIRS("scatter_rows", scatter, 9, 67, 13, 3, 0),
    EACH("check_finite", finite, 5, 131, 0, 3, 0),
    EACH("check_finite", finite, 5, 131, 0, 3, 1),
    EACH("check_finite", finite, 5, 131, 0, 3, 2),
    EACH("check_finite", finite, 5, 131, 0, 3, 3),

    /* trans 0 NN, 1 NT, 2 TN; +4 c, +8 c is out, +16 bias, +32 alpha */
    MATMUL(7, 9, 33, 0, 0),
    MATMUL(7, 9, 33, 0, 1),
    MATMUL(7, 9, 33, 0, 2),
    MATMUL(65, 130, 127, 8, 1),
    MATMUL(65, 130, 127, 3, 1 + 4 + 16),
    MATMUL(66, 40, 129, 3, 0 + 8 + 32),
    MATMUL(40, 66, 129, 8, 2 + 8),
    MATMUL(1, 256, 144, 0, 1 + 16 + 32),
    MATMUL(256, 1, 144, 0, 1),
    MATMUL(1, 1, 1, 0, 0 + 4),
    MATMUL(1030, 33, 80, 0, 1 + 4),
    MATMUL(3, 4101, 8, 0, 1),
    MATMUL(3, 5, 70001, 0, 0 + 4 + 16),
    MATMUL(5, 3, 70001, 0, 1),
    MATMUL(70, 65, 1, 0, 2),

    EACH("rmsnorm", rmsnorm, 5, 128, 1, 0, 0),
    PAIRS("rmsnorm", rmsnorm, 3, 67, 2, 5, 0),
    EACH("rmsnorm", rmsnorm, 3, 64, 4, 8, 1),
    EACH("rmsnorm", rmsnorm, 2, 2049, 1, 0, 0),
    EACH("rmsnorm", rmsnorm, 2, 16500, 1, 0, 0),
    C("rmsnorm", rmsnorm, QL_F16, QL_F16, 2600, 64, 16, 0, 1), /* more groups than a GPU holds at once */
    EACH("rmsnorm", rmsnorm, 4, 256, 1, 0, 2),
    C("rmsnorm", rmsnorm, QL_F32, QL_F16, 4, 256, 1, 0, 2),
    C("rmsnorm", rmsnorm, QL_F32, QL_BF16, 4, 256, 1, 0, 2),
    EACH("rmsnorm_dx", rmsnorm_dx, 5, 128, 1, 0, 0),
    PAIRS("rmsnorm_dx", rmsnorm_dx, 3, 67, 2, 5, 1),
    EACH("rmsnorm_dx", rmsnorm_dx, 3, 64, 3, 8, 2),
    EACH("rmsnorm_dx", rmsnorm_dx, 3, 2049, 1, 0, 3),
    EACH("rmsnorm_dx", rmsnorm_dx, 2, 16500, 1, 0, 1),
    EACH("rmsnorm_dx", rmsnorm_dx, 4, 256, 1, 0, 4),
    EACH("rope", rope, 9, 16, 3, 0, 0),
    EACH("rope", rope, 33, 128, 2, 8, 1),
    EACH("rope", rope, 5, 6, 1, 5, 0),
    PAIRS("swiglu", swiglu, 5, 67, 0, 3, 0),
    EACH("swiglu", swiglu, 3, 1032, 0, 8, 0),
    PAIRS("swiglu_dx", swiglu_dx, 5, 67, 0, 3, 0),
    EACH("swiglu_dx", swiglu_dx, 5, 67, 0, 3, 1),
    EACH("swiglu_dx", swiglu_dx, 5, 67, 0, 3, 2),
    EACH("swiglu_dx", swiglu_dx, 3, 1032, 0, 0, 1 + 4),
    EACH("dropout", dropout, 7, 67, 10, 3, 0),
    EACH("dropout", dropout, 7, 1030, 3, 0, 2),
    EACH("dropout", dropout, 7, 64, 0, 0, 0),
    EACH("dropout_add", dropout, 7, 67, 10, 3, 1),

    /* 4-bit: k pieces; how: +1 nested, +2 state fp16, +4 state bf16 */
    EACH("nf4_dequant", dequant, 64, 64, 1, 0, 1 + 4),
    EACH("nf4_dequant", dequant, 33, 100, 1, 3, 0),
    EACH("nf4_dequant", dequant, 130, 512, 2, 8, 1 + 2),
    EACH("nf4_dequant", dequant, 300, 192, 3, 0, 1),
    EACH("nf4_dequant", dequant, 5, 64, 3, 0, 4),
    EACH("nf4_matmul", few, 64, 64, 1, 0, 1 + 4),
    EACH("nf4_matmul", few, 300, 192, 1, 3, 1 + 8 + 32 * 7),
    C("nf4_matmul", few, QL_F16, QL_F32, 33, 100, 1, 8, 16 + 32 * 2),
    C("nf4_matmul", few, QL_BF16, QL_F32, 33, 100, 3, 8, 4 + 8 + 16 + 32),
    EACH("nf4_matmul", few, 130, 512, 2, 8, 1 + 2 + 8 + 16 + 32 * 4),
    EACH("nf4_matmul", few, 48, 320, 1, 8, 1 + 8 + 16 + 32 * 3 + 256),
    EACH("nf4_matmul", few, 21, 64, 2, 0, 32 * 2 + 512),
    /* whole tiles and pairs of blocks: side by side; in pieces that end inside a pair; from 5 rows on; more columns than a GPU's block
     * has registers for, more tiles than it has room for */
    EACH("nf4_matmul", few, 48, 384, 1, 8, 1 + 8 + 16 + 32 * 3 + 256),
    EACH("nf4_matmul", few, 144, 512, 3, 8, 4 + 8 + 32 * 7),
    EACH("nf4_matmul", few, 80, 128, 1, 0, 1),
    C("nf4_matmul", few, QL_F16, QL_F32, 2208, 2176, 2, 0, 1 + 2 + 32 * 2),
    C("nf4_matmul", few, QL_BF16, QL_F32, 48, 10368, 1, 8, 1 + 4 + 8 + 32 * 7 + 256),
    C("nf4_matmul", few, QL_F16, QL_F16, 48, 10368, 2, 8, 1 + 16 + 32 * 3),
    C("nf4_matmul", few, QL_F16, QL_F16, 50000, 128, 1, 0, 1 + 32 * 4),
    /* scales of both kinds, two and three passes, warps without a pair, several meetings */
    EACH("nf4_matmul", few, 64, 1024, 1, 8, 1 + 8 + 16 + 32 * 3 + 256),
    EACH("nf4_matmul", few, 64, 5120, 1, 0, 2 + 8 + 32 * 7),
    C("nf4_matmul", few, QL_BF16, QL_BF16, 80, 9216, 1, 0, 1),
    C("nf4_matmul", few, QL_BF16, QL_F32, 14400, 1024, 1, 0, 1 + 32 * 5),
    C("nf4_matmul", few, QL_F16, QL_F16, 2160, 4224, 1, 0, 1 + 32 * 7),
    /* one of three has codes of its own */
    EACH("nf4_matmul", few, 48, 384, 1, 8, 1 + 8 + 32 * 3 + 512),
    EACH("nf4_quant", quant, 16, 64, 0, 0, 0),
    EACH("nf4_quant", quant, 17, 67, 0, 0, 1),
    EACH("nf4_quant", quant, 1, 1, 0, 0, 0),
    EACH("nf4_quant", quant, 300, 512, 0, 0, 0),
    C("scale_quant", scale_quant, QL_F32, QL_F32, 1, 256, 0, 0, 0),
    C("scale_quant", scale_quant, QL_F32, QL_F32, 1, 5000, 0, 0, 0),
    C("scale_quant", scale_quant, QL_F32, QL_F32, 1, 300, 0, 0, 1),

    /* attention: T, D, layout of the documents, heads and window */
    EACH("attention", attention, 70, 16, 0, 0, 1),
    EACH("attention", attention, 131, 64, 1, 8, 2),
    EACH("attention", attention, 131, 128, 1, 8, 3),
    EACH("attention", attention, 97, 32, 1, 0, 2 + 8),
    EACH("attention", attention, 600, 40, 0, 0, 1),
    EACH("attention", attention, 17, 80, 2, 0, 2),
    EACH("attention", attention, 60, 24, 3, 8, 3),
    EACH("attention", attention, 60, 64, 3, 0, 2 + 8),
    EACH("attention_dx", attention_dx, 70, 16, 0, 0, 1),
    EACH("attention_dx", attention_dx, 131, 64, 1, 8, 2),
    EACH("attention_dx", attention_dx, 131, 128, 1, 8, 3),
    EACH("attention_dx", attention_dx, 97, 32, 1, 0, 2 + 8),
    EACH("attention_dx", attention_dx, 400, 40, 0, 0, 1),

    /* loss: rows, vocabulary, pieces; how 1: smoothing */
    EACH("ce", ce, 5, 37, 1, 0, 0),
    EACH("ce", ce, 13, 4099, 8, 3, 0),
    EACH("ce", ce, 13, 1024, 4, 8, 1),
    EACH("ce_grad", ce_grad, 5, 37, 1, 0, 0),
    EACH("ce_grad", ce_grad, 13, 4099, 8, 3, 0),
    EACH("ce_grad", ce_grad, 13, 1024, 4, 8, 1),
    C("sum", sum, QL_F32, QL_F32, 1, 1, 0, 0, 0),
    C("sum", sum, QL_F32, QL_F32, 1, 3, 0, 0, 0),
    C("sum", sum, QL_F32, QL_F32, 1, 1000, 0, 0, 0),
    C("sum", sum, QL_F32, QL_F32, 1, 70001, 0, 0, 0),

    /* optimizer: n blocks of 4096 */
    C("norm_parts", norm_parts, QL_F32, QL_F32, 1, 5, 0, 0, 0),
    C("clip", clip, QL_F32, QL_F32, 1, 1, 0, 0, 0),
    C("clip", clip, QL_F32, QL_F32, 1, 300, 0, 0, 1),
    C("clip", clip, QL_F32, QL_F32, 1, 7, 0, 0, 2),
    C("clip", clip, QL_F32, QL_F32, 1, 300, 0, 0, 1 + 2 + 4),
    C("clip", clip, QL_F32, QL_F32, 1, 300, 0, 0, 1 + 4),
    C("clip", clip, QL_F32, QL_F32, 1, 5, 0, 0, 2 + 8),
    C("clip", clip, QL_F32, QL_F32, 1, 5, 0, 0, 1 + 16),
    C("clip", clip, QL_F32, QL_F32, 1, 5, 0, 0, 1 + 32),
    C("adamw", adamw, QL_F32, QL_F32, 1, 3, 0, 0, 0),
    C("adamw", adamw, QL_F32, QL_F32, 1, 3, 0, 0, 1),
    C("adamw", adamw, QL_F32, QL_F32, 1, 1, 0, 0, 2),
    C("adamw8", adamw8, QL_F32, QL_F32, 1, 3, 0, 0, 1),
    C("adamw8", adamw8, QL_F32, QL_F32, 1, 1, 0, 0, 3),

    /* Benches: the bundled model's sizes on a CPU (T 1024, C 128, F 352), Llama 3.1 8B's on a GPU
       (T 2048). */
    EACH("matmul", matmul, 1024, 512, 144, 0, 1, CPU_BENCH),
    EACH("matmul", matmul, 1024, 128, 368, 0, 0, CPU_BENCH),
    EACH("rmsnorm", rmsnorm, 1024, 128, 1, 0, 0, CPU_BENCH),
    EACH("rmsnorm_dx", rmsnorm_dx, 1024, 128, 1, 0, 1, CPU_BENCH),
    EACH("rope", rope, 1024, 32, 6, 0, 0, CPU_BENCH),
    EACH("swiglu", swiglu, 1024, 352, 0, 0, 0, CPU_BENCH),
    EACH("swiglu_dx", swiglu_dx, 1024, 352, 0, 0, 0, CPU_BENCH),
    EACH("dropout", dropout, 1024, 128, 10, 0, 0, CPU_BENCH),
    EACH("nf4_dequant", dequant, 704, 128, 1, 0, 1 + 4, CPU_BENCH),
    EACH("nf4_quant", quant, 704, 128, 0, 0, 0, CPU_BENCH),
    EACH("attention", attention, 1024, 32, 1, 0, 2, CPU_BENCH),
    EACH("attention", attention, 512, 32, 0, 0, 2, CPU_BENCH),
    EACH("attention_dx", attention_dx, 1024, 32, 1, 0, 2, CPU_BENCH),
    EACH("attention_dx", attention_dx, 512, 32, 0, 0, 2, CPU_BENCH),
    EACH("ce", ce, 512, 1024, 8, 0, 0, CPU_BENCH),
    EACH("ce_grad", ce_grad, 512, 1024, 8, 0, 0, CPU_BENCH),
    C("norm_parts", norm_parts, QL_F32, QL_F32, 1, 64, 0, 0, 0, CPU_BENCH),
    C("adamw", adamw, QL_F32, QL_F32, 1, 64, 0, 0, 0, CPU_BENCH),
    C("adamw8", adamw8, QL_F32, QL_F32, 1, 64, 0, 0, 1, CPU_BENCH),

    EACH("matmul", matmul, 2048, 28672, 4112, 0, 1, GPU_BENCH),
    EACH("matmul", matmul, 2048, 4096, 14352, 0, 1, GPU_BENCH),
    EACH("matmul", matmul, 2048, 4096, 28672, 0, 0, GPU_BENCH),
    EACH("rmsnorm", rmsnorm, 2048, 4096, 1, 0, 0, GPU_BENCH),
    EACH("rmsnorm_dx", rmsnorm_dx, 2048, 4096, 1, 0, 1, GPU_BENCH),
    EACH("rope", rope, 2048, 128, 40, 0, 0, GPU_BENCH),
    EACH("swiglu", swiglu, 2048, 14336, 0, 0, 0, GPU_BENCH),
    EACH("swiglu_dx", swiglu_dx, 2048, 14336, 0, 0, 0, GPU_BENCH),
    EACH("dropout", dropout, 2048, 4096, 10, 0, 0, GPU_BENCH),
    EACH("nf4_dequant", dequant, 28672, 4096, 1, 16, 1 + 4, GPU_BENCH),
    EACH("nf4_quant", quant, 4096, 4096, 0, 0, 0, GPU_BENCH),
    EACH("attention", attention, 2048, 128, 0, 0, 4, GPU_BENCH),
    EACH("attention_dx", attention_dx, 2048, 128, 0, 0, 4, GPU_BENCH),
    EACH("ce", ce, 512, 128256, 8, 0, 0, GPU_BENCH),
    EACH("ce_grad", ce_grad, 512, 128256, 8, 0, 0, GPU_BENCH),
    C("norm_parts", norm_parts, QL_F32, QL_F32, 1, 10240, 0, 0, 0, GPU_BENCH),
    C("adamw", adamw, QL_F32, QL_F32, 1, 10240, 0, 0, 0, GPU_BENCH),
    C("adamw8", adamw8, QL_F32, QL_F32, 1, 10240, 0, 0, 1, GPU_BENCH),
};
const int op_case_count = (int)(sizeof op_cases / sizeof *op_cases);
