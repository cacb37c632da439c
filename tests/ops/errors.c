/* What the checked wrappers refuse. The backend is never reached, so any one serves. */
#include "tests/ops/ops.h"

#include <stdio.h>
#include <string.h>

static int failed;

static void wants(const char *what, ql_status s, const char *part)
{
    if (s == QL_EINVAL && strstr(ql_error(), part)) {
        printf("ok refuses.%s\n", what);
    } else {
        printf("not ok refuses.%s: %s '%s' lacks '%s'\n", what, ql_status_name(s), ql_error(),
               part);
        failed++;
    }
    ql_error_clear();
}

int test_errors(const ctx *c)
{
    static _Alignas(64) float memory[65536];
    const ql_queue *q = &c->q;
    float *x = memory, *y = memory + 16384, *z = memory + 32768;
    ql_tensor a = ql_mat(x, QL_F32, 4, 8, 8), b = ql_mat(y, QL_F32, 4, 8, 8),
              o = ql_mat(z, QL_F32, 4, 8, 8), bad;
    failed = 0;

    wants("convert.shape", ql_convert(q, o, ql_mat(x, QL_F32, 4, 9, 9)),
          "in is (4, 9), needed is (4, 8)");
    wants("convert.dtype", ql_convert(q, ql_mat(z, QL_U8, 4, 8, 8), a),
          "out is uint8, needed is float32 or float16 or bfloat16");
    wants("convert.alias", ql_convert(q, o, o), "out overlaps in");
    wants("convert.memory", ql_convert(q, ql_mat(NULL, QL_F32, 4, 8, 8), a),
          "out (4, 8) has no memory");
    wants("convert.stride", ql_convert(q, o, ql_mat(x, QL_F32, 4, 8, 7)), "row stride of 7");
    wants("convert.align", ql_convert(q, o, ql_mat((char *)x + 2, QL_F32, 4, 8, 8)), "not aligned");
    wants("convert.count", ql_convert_all(q, &o, &a, QL_MAX_CONVERT + 1), "at most 16 go in one call");
    wants("convert.outs", ql_convert_all(q, (ql_tensor[]){o, o}, (ql_tensor[]){a, b}, 2),
          "out overlaps another out");
    wants("convert.chain", ql_convert_all(q, (ql_tensor[]){o, b}, (ql_tensor[]){a, o}, 2),
          "out overlaps in");
    wants("add.shift", ql_add(q, o, ql_mat(z + 1, QL_F32, 4, 8, 8), b), "out overlaps a in part");
    wants("gather.index", ql_gather_rows(q, o, a, ql_vec(y, QL_I32, 5)),
          "index is (1, 5), needed is (1, 4)");
    wants("gather.dtype", ql_gather_rows(q, o, a, ql_vec(y, QL_F32, 4)),
          "index is float32, needed is int32");
    wants("matmul.inner", ql_matmul(q, o, a, b, QL_NN, 1, QL_NONE, QL_NONE),
          "b is (4, 8), needed is (8, -1)");
    wants("matmul.out", ql_matmul(q, o, a, b, QL_NT, 1, QL_NONE, QL_NONE),
          "out is (4, 8), needed is (4, 4)");
    bad = ql_mat(z, QL_F32, 4, 4, 4);
    wants("matmul.dtype",
          ql_matmul(q, bad, a, ql_mat(y, QL_F16, 4, 8, 8), QL_NT, 1, QL_NONE, QL_NONE),
          "b is float16");
    wants("matmul.bias", ql_matmul(q, bad, a, b, QL_NT, 1, QL_NONE, ql_vec(y, QL_F32, 8)),
          "bias is (1, 8), needed is (1, 4)");
    wants("matmul.alias",
          ql_matmul(q, ql_mat(x, QL_F32, 4, 4, 4), a, b, QL_NT, 1, QL_NONE, QL_NONE),
          "out overlaps a");
    wants("rmsnorm.groups", ql_rmsnorm(q, o, a, ql_vec(y, QL_F32, 3), 1e-5f), "multiple of w's 3");
    wants("rope.head", ql_rope(q, a, 3, ql_vec(y, QL_I32, 4), ql_vec(z, QL_F32, 1), 1, 1),
          "even head size, not 3");
    wants("rope.sign", ql_rope(q, a, 8, ql_vec(y, QL_I32, 4), ql_vec(z, QL_F32, 4), 1, 0),
          "sign is 0");
    wants("swiglu.columns", ql_swiglu(q, o, a), "gu is (4, 8), needed is (4, 16)");
    ql_drop drop = {.p = 1.0f, .token = (const int64_t *)(const void *)y};
    wants("dropout.p", ql_dropout(q, o, a, &drop), "p is 1");
    ql_attn at = {.heads = 3, .kv_heads = 2, .head_dim = 8};
    wants("attention.heads", ql_attention(q, o, a, a, a, a, &at), "3 query heads");
    at = (ql_attn){.heads = 1, .kv_heads = 1, .head_dim = 12};
    wants("attention.size", ql_attention(q, o, a, a, a, a, &at), "head size is 12");
    at = (ql_attn){.heads = 1, .kv_heads = 1, .head_dim = 8, .docs = 1};
    wants("attention.docs", ql_attention(q, o, a, a, a, a, &at), "without their starts");
    at.docs = 0;
    wants("attention.lse", ql_attention(q, o, a, a, b, b, &at), "lse is (4, 8), needed is (4, 1)");
    wants("ce_stats.stats", ql_ce_stats(q, o, a, ql_vec(y, QL_I32, 4), 0),
          "stats is (4, 8), needed is (4, 4)");
    ql_ctl ctl = {0};
    wants("ce_grad.range",
          ql_ce_grad(q, a, ql_vec(y, QL_F32, 4), ql_vec(z, QL_I32, 4), 5, 0, 12, &ctl),
          "columns 5 to 13");
    wants("sum.none", ql_sum(q, ql_vec(x, QL_F32, 1), ql_vec(y, QL_F32, 0)), "in has 0 numbers");
    wants("norm_parts.block", ql_norm_parts(q, ql_vec(x, QL_F32, 1), ql_vec(y, QL_F32, 4095)),
          "multiple of 4096");
    ql_clip clip = {0};
    wants("clip.lr", ql_clip_step(q, &ctl, ql_vec(y, QL_F32, 1), &clip), "learning rates is empty");
    ql_nf4 w = {.rows = 4, .cols = 8, .block = 48, .parts = 1, .part = 64, .code = x};
    wants("nf4_dequant.block", ql_nf4_dequant(q, &o, &w, 1), "blocks of 48");
    w.block = 64, w.part = 96;
    wants("nf4_dequant.part", ql_nf4_dequant(q, &o, &w, 1), "pieces of 96 weights");
    w.part = 64;
    wants("nf4_dequant.data", ql_nf4_dequant(q, &o, &w, 1), "lacks the data of piece 0");
    wants("nf4_matmul.data", ql_nf4_matmul(q, o, o, &w, 1, QL_NONE, QL_NONE), "lacks the data of piece 0");
    wants("nf4_dequant.many", ql_nf4_dequant(q, &o, &w, 9), "9 matrices");
    wants("nf4_quant.flat",
          ql_nf4_quant(q, ql_vec(y, QL_U8, 16), ql_vec(z, QL_F32, 1), ql_mat(x, QL_F32, 4, 8, 9)),
          "contiguous");
    return failed;
}
