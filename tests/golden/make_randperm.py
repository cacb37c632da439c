#!/usr/bin/env python3
"""Makes randperm.json: torch.randperm(n) under manual_seed(seed), and the order of accelerate's SeedableRandomSampler
(what Trainer iterates) in epochs 0, 1, 2. The sampler restarts its generator with seed + epoch.

    python tests/golden/make_randperm.py
"""
import json
import os

import torch
from accelerate.data_loader import SeedableRandomSampler

SIZES = [1, 2, 5, 10, 100, 1000]
SEEDS = [0, 42, 3407, 2 ** 31]


def randperm(n, seed):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()


def epochs(n, seed):
    sampler = SeedableRandomSampler(range(n), generator=torch.Generator(), data_seed=seed)
    return [list(sampler) for _ in range(3)]  # iterating moves it to the next epoch


out = {"randperm": [{"n": n, "seed": s, "order": randperm(n, s)} for n in SIZES for s in SEEDS],
       "sampler": [{"n": n, "seed": s, "epochs": epochs(n, s)} for n in (1, 5, 100) for s in SEEDS]}
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "randperm.json"), "w") as f:
    f.write('{"randperm": [\n')
    f.write(",\n".join(json.dumps(r) for r in out["randperm"]))
    f.write('\n], "sampler": [\n')
    f.write(",\n".join(json.dumps(r) for r in out["sampler"]))
    f.write("\n]}\n")
