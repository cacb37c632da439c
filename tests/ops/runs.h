/* The cases' functions, for the table. */
#ifndef QL_TEST_RUNS_H
#define QL_TEST_RUNS_H

#include "tests/ops/ops.h"
#include "tests/ops/ref.h"

void dynamic_map(double *code, bool is_signed); /* bitsandbytes' map: 256 values, ascending */

#define R(name) void run_##name(ctx *c, const op_case *p)
R(convert);
R(convert_all);
R(fill);
R(add);
R(gather);
R(scatter);
R(finite);
R(dequant);
R(few);
R(quant);
R(scale_quant);
R(matmul);
R(rmsnorm);
R(rmsnorm_dx);
R(rope);
R(swiglu);
R(swiglu_dx);
R(dropout);
R(attention);
R(attention_dx);
R(ce);
R(ce_grad);
R(sum);
R(norm_parts);
R(clip);
R(adamw);
R(adamw8);
#undef R

#endif
