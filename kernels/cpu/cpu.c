/* The CPU backend: the table of ops, and the backend itself. */
#include "kernels/cpu/cpu.h"

#define OP(name) .name = ql_cpu_##name

const ql_ops ql_cpu_ops = {
    .name = "cpu",
    OP(convert),
    OP(fill),
    OP(add),
    OP(gather_rows),
    OP(scatter_rows),
    OP(check_finite),
    OP(nf4_dequant),
    OP(nf4_matmul),
    OP(nf4_quant),
    OP(scale_quant),
    OP(matmul),
    OP(rmsnorm),
    OP(rmsnorm_dx),
    OP(rope),
    OP(swiglu),
    OP(swiglu_dx),
    OP(dropout),
    OP(dropout_add),
    OP(attention),
    OP(attention_dx),
    OP(ce_stats),
    OP(ce_join),
    OP(ce_loss),
    OP(ce_grad),
    OP(sum),
    OP(norm_parts),
    OP(clip),
    OP(adamw),
    OP(adamw8),
};

const ql_backend *ql_backend_cpu(void)
{
    static const ql_backend backend = {"cpu", &ql_cpu_dev, &ql_cpu_ops, &ql_cpu_comm};
    return &backend;
}
