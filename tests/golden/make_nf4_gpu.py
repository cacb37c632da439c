#!/usr/bin/env python3
"""NF4 and 8-bit AdamW as bitsandbytes computes them, most of all on a GPU (torch and bitsandbytes are all it needs).

    python tests/golden/make_nf4_gpu.py                     # → nf4_gpu.safetensors, nf4_gpu.json beside this file
    python tests/golden/make_nf4_gpu.py --device cpu        # → nf4_cpu.*: dequantisation only
    python tests/golden/make_nf4_gpu.py --out DIR

README.md says what the tensors are.
"""
import argparse
import json
import os
import struct

import torch
from safetensors.torch import save_file

import bitsandbytes
import bitsandbytes.functional as bf

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
KEPT = [1, 20]
MANTISSA = {"float32": 23, "float16": 10, "bfloat16": 7}
THRESHOLDS = [-0.8480964004993439, -0.6106329262256622, -0.4599952697753906, -0.33967943489551544, -0.23460740596055984,
              -0.13791173323988914, -0.045525018125772476, 0.03979014977812767, 0.1202552504837513, 0.2035212516784668,
              0.2920137718319893, 0.3893125355243683, 0.5016634166240692, 0.6427869200706482, 0.8614784178118011]


def neighbours(x, dtype, step):
    """x moved by `step` representable values away from zero."""
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    return (x.to(dtype).contiguous().view(kind) + step).view(dtype)


def crafted(dtype_name, significands):
    """One block per significand of the absmax: at every threshold the nearest value and its neighbours, where a last
    bit of the reciprocal decides the nibble."""
    dtype, bits = DTYPES[dtype_name], MANTISSA[dtype_name]
    top = 1 + significands.double() / 2 ** bits
    exponent = torch.arange(len(top)) % 9 - 4
    top = (top * 2.0 ** exponent.double())
    t = torch.tensor(THRESHOLDS, dtype=torch.float64)
    near = (top[:, None] * t[None, :]).to(dtype)
    columns = [top[:, None].to(dtype), near]
    columns += [neighbours(near, dtype, k) for k in (-1, 1)]
    columns += [neighbours(near[:, 0:9], dtype, -2), neighbours(near[:, 6:15], dtype, 2)]
    block = torch.cat(columns, 1)  # 1 + 15 + 2 · 15 + 9 + 9 = 64
    assert block.shape[1] == 64 and block.dtype == dtype
    return block


def sources(full):
    gen = torch.Generator().manual_seed(5)
    out = {}
    for name, dtype in DTYPES.items():
        wide = name != "float16"  # exponents beyond fp16's
        out[f"random.{name}"] = (torch.randn(48, 128, generator=gen) / 11).to(dtype)
        out[f"straddle.{name}"] = torch.randn(33, 100, generator=gen).to(dtype)  # blocks cross rows
        out[f"odd.{name}"] = torch.randn(7, 33, generator=gen).to(dtype)         # 231 elements: last byte half used
        out[f"one.{name}"] = torch.randn(1, 1, generator=gen).to(dtype)
        if not full:
            continue
        out[f"constant.{name}"] = torch.full((40, 64), 0.0371, dtype=dtype)
        zero = torch.zeros(4, 64, dtype=dtype)
        zero[2, 5] = -1.5                                                        # three zero blocks, one with a spike
        out[f"zero.{name}"] = zero
        scale = 2.0 ** torch.arange(-148 if wide else -24, 128 if wide else 16).double()
        signs = torch.rand(len(scale), 64, generator=gen).double() * 1.9 - 0.95
        signs[:, 0] = 1.0
        out[f"scales.{name}"] = (scale[:, None] * signs).to(dtype)               # tiny (subnormal) … huge
        bits = MANTISSA[name]
        all_of = torch.arange(2 ** bits) if bits < 23 else torch.randint(0, 2 ** 23, (256,), generator=gen)
        out[f"significands.{name}"] = crafted(name, all_of)
    if full:
        out["nested.bfloat16"] = (torch.randn(300, 130, generator=gen) * torch.rand(300, 1, generator=gen)
                                  ).bfloat16()                                   # 610 blocks: three of the scales
    return out


def flat_dequantise(packed, state):
    """As one long row: bitsandbytes' CPU kernel misreads rows that are no multiple of 64."""
    shape, state.shape = state.shape, torch.Size((1, state.shape.numel()))
    out = bf.dequantize_4bit(packed, state).reshape(shape)
    state.shape = shape
    return out


def nf4(tensors, index, device, full):
    for name, w in sources(full).items():
        w = w.to(device)
        packed, plain = bf.quantize_4bit(w, blocksize=64, compress_statistics=False, quant_type="nf4")
        again, nested = bf.quantize_4bit(w, blocksize=64, compress_statistics=True, quant_type="nf4")
        assert torch.equal(packed, again)
        tensors[f"{name}.source"] = w
        tensors[f"{name}.packed"] = packed.flatten()
        tensors[f"{name}.absmax"] = plain.absmax
        kind = name.split(".")[0]
        if kind != "significands":
            tensors[f"{name}.dequant"] = flat_dequantise(packed, plain)
        if kind not in ("significands", "scales"):
            tensors[f"{name}.absmax8"] = nested.absmax
            tensors[f"{name}.nested_absmax"] = nested.state2.absmax
            tensors[f"{name}.nested_offset"] = nested.offset.reshape(1).float()
            tensors[f"{name}.dequant_nested"] = flat_dequantise(packed, nested)
        index["nf4"].append({"name": name, "dtype": name.split(".")[1], "shape": list(w.shape)})
        if name == "straddle.bfloat16":
            packed, plain = bf.quantize_4bit(w, blocksize=64, compress_statistics=False, quant_type="fp4")
            tensors["fp4.packed"], tensors["fp4.absmax"] = packed.flatten(), plain.absmax
            tensors["fp4.dequant"] = flat_dequantise(packed, plain)
            index["fp4"] = {"dtype": "bfloat16", "shape": list(w.shape)}
    tensors["quant_map"] = plain.code
    tensors["nested_quant_map"] = nested.state2.code


def optimisers(tensors, index, device):
    """20 steps of AdamW8bit and of paged 32-bit AdamW on a tensor of 4100 (8-bit states, last block short) and one
    of 1000 (always 32-bit). The gradient of step s (from 0) is adam.grad.X[s % 4] · 2^(s % 3 - 1)."""
    gen = torch.Generator().manual_seed(6)
    settings = {"lr": 1e-2, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "steps": 20}
    sizes = {"big": 4100, "small": 1000}
    start = {k: torch.randn(n, generator=gen) for k, n in sizes.items()}
    grads = {k: torch.randn(4, n, generator=gen) * 10.0 ** (torch.rand(4, n, generator=gen) * 6 - 5)
             for k, n in sizes.items()}
    for g in grads.values():
        g[:, 256:300] = 0
    grads["big"][:, 512:768] = 0  # a block whose states stay zero
    for k in sizes:
        tensors[f"adam.start.{k}"], tensors[f"adam.grad.{k}"] = start[k], grads[k]
    kinds = {"adamw_8bit": bitsandbytes.optim.AdamW8bit, "paged_adamw_32bit": bitsandbytes.optim.PagedAdamW32bit}
    for kind, make in kinds.items():
        params = {k: torch.nn.Parameter(v.clone().to(device)) for k, v in start.items()}
        optim = make(list(params.values()), lr=settings["lr"], betas=tuple(settings["betas"]), eps=settings["eps"],
                     weight_decay=settings["weight_decay"])
        for s in range(settings["steps"]):
            for group in optim.param_groups:
                group["lr"] = settings["lr"] * (1 - s / settings["steps"])
            for k, p in params.items():
                p.grad = (grads[k][s % 4] * 2.0 ** (s % 3 - 1)).to(device)
            optim.step()
            if s + 1 in KEPT:
                for k, p in params.items():
                    at = f"{kind}.{s + 1}.{k}"
                    tensors[f"{at}.param"] = p.detach().clone()
                    for part, v in optim.state[p].items():
                        if torch.is_tensor(v) and part in ("state1", "state2", "absmax1", "absmax2"):
                            tensors[f"{at}.{part}"] = v.detach().clone()
    index["adam"] = {**settings, "lr_at": "lr · (1 - s/20), s from 0", "sizes": sizes, "kept_after": KEPT}
    tensors["adam.map1"] = bf.create_dynamic_map(signed=True)
    tensors["adam.map2"] = bf.create_dynamic_map(signed=False)


RCP = r"""
extern "C" __global__ void rcp(const float *x, float *y, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y[i]) : "f"(x[i]));
}
"""


def reciprocals(tensors, index):
    """rcp.approx.ftz of 1 + k/1024 (all fp16 significands; bf16's are among them), and over all 2^23 fp32
    significands how often it is not the correctly rounded reciprocal."""
    kernel = torch.cuda._compile_kernel(RCP, "rcp")

    def rcp(x):
        y = torch.empty_like(x)
        kernel(((len(x) + 255) // 256, 1, 1), (256, 1, 1), (x, y, len(x)))
        torch.cuda.synchronize()
        return y

    half = rcp(1 + torch.arange(1024, device="cuda").float() / 1024)
    tensors["rcp"] = half
    x = 1 + torch.arange(2 ** 23, device="cuda").double() / 2 ** 23
    got = rcp(x.float()).view(torch.int32)
    want = (1 / x).float().view(torch.int32)  # 2^-52 wrong at most: rounds as the exact quotient does, near ties apart
    off = (got - want).abs()
    exact = (1 / x[::8192]).float()
    index["rcp"] = {"fp16_not_correctly_rounded": int((half != exact).sum()),
                    "fp32_not_correctly_rounded": int((off != 0).sum()), "fp32_largest_ulp": int(off.max())}


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--device", default="cuda")
    args.add_argument("--out", default=os.path.dirname(os.path.abspath(__file__)))
    args = args.parse_args()
    gpu = args.device != "cpu"
    tensors, index = {}, {"nf4": [], "made_with": {"torch": torch.__version__, "bitsandbytes":
                                                  bitsandbytes.__version__}}
    if gpu:
        index["made_with"]["device"] = torch.cuda.get_device_name()
        index["made_with"]["cuda"] = torch.version.cuda
    nf4(tensors, index, args.device, gpu)
    if gpu:
        optimisers(tensors, index, args.device)
        try:
            reciprocals(tensors, index)
        except Exception as e:  # needs a torch that compiles kernels (2.9); the blocks above stand without it
            index["rcp"] = None
            print(f"no table of reciprocals: {e!r}")
    path = os.path.join(args.out, "nf4_gpu" if gpu else "nf4_cpu")
    save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, path + ".safetensors")
    with open(path + ".json", "w") as f:
        json.dump(index, f, indent=1)
        f.write("\n")
    size = os.path.getsize(path + ".safetensors")
    with open(path + ".safetensors", "rb") as f:
        header = struct.unpack("<Q", f.read(8))[0]
    print(f"{path}.safetensors: {size} bytes, {len(tensors)} tensors, header {header} bytes")
    print(json.dumps({k: v for k, v in index.items() if k != "nf4"}))


if __name__ == "__main__":
    main()
