"""The weight of `bench` through bitsandbytes, in a process of its own, which takes its device's memory with it when it ends.

    bnb_bench.py ROWS COLUMNS cuda|cpu     prints {"version", "seconds", "crc32"}"""
import json
import sys
import time
import zlib


def numbers(np, start, n):
    """The generator of core/bench.c: u = 1664525 u + 1013904223, n numbers after `start`, and the last of them."""
    powers = np.empty(n + 1, np.uint32)
    powers[0], powers[1:] = 1, 1664525
    np.multiply.accumulate(powers, out=powers)
    sums = np.add.accumulate(powers[:-1], dtype=np.uint32)
    u = powers[1:] * np.uint32(start) + sums * np.uint32(1013904223)
    return u, int(u[-1])


def main(rows, cols, device):
    import bitsandbytes as bnb
    import numpy as np
    import torch
    from bitsandbytes import functional as F
    n = rows * cols
    packed, u = numbers(np, 7, n // 2)
    codes, u = numbers(np, u, n // 64)
    nested, u = numbers(np, u, n // 64 // 256)
    nested = np.float32(0.01) + (nested >> 8).astype(np.float32) * np.float32(1e-9)

    def put(x):
        return torch.from_numpy(x).to(device)
    inner = F.QuantState(absmax=put(nested), code=F.create_dynamic_map().to(device), blocksize=256, dtype=torch.float32)
    state = F.QuantState(absmax=put((codes >> 24).astype(np.uint8)), shape=torch.Size((rows, cols)), code=F.get_4bit_type("nf4", device=device),
                         blocksize=64, quant_type="nf4", dtype=torch.float16, offset=torch.tensor(0.03, device=device), state2=inner)
    weight = put((packed >> 24).astype(np.uint8)).reshape(-1, 1)

    def wait():
        if device == "cuda":
            torch.cuda.synchronize()
    out = F.dequantize_4bit(weight, state)
    wait()
    calls, seconds = 1, 0
    while seconds < 0.3:
        start = time.perf_counter()
        for _ in range(calls):
            out = F.dequantize_4bit(weight, state)
        wait()
        seconds, calls = time.perf_counter() - start, calls * 2
    print(json.dumps({"version": bnb.__version__, "seconds": seconds / (calls // 2), "crc32": zlib.crc32(out.contiguous().cpu().numpy().tobytes())}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
