"""Writes schedules.json: what transformers' learning-rate schedules give, step by step.

    python tests/golden/make_schedules.py        (with transformers and torch)
"""
import json
import os
import sys

import torch
import transformers
from transformers.optimization import get_scheduler

CASES = [
    ("linear", None, 0, 10), ("linear", None, 3, 10), ("linear", None, 10, 10), ("linear", None, 1, 1),
    ("cosine", None, 0, 10), ("cosine", {"num_cycles": 1.5}, 2, 12),
    ("cosine_with_restarts", None, 2, 12), ("cosine_with_restarts", {"num_cycles": 3}, 2, 17),
    ("polynomial", None, 2, 12), ("polynomial", {"power": 2.5, "lr_end": 1e-5}, 0, 9),
    ("constant", None, 4, 6), ("constant_with_warmup", None, 4, 8),
    ("inverse_sqrt", None, 4, 12), ("inverse_sqrt", None, 0, 6), ("inverse_sqrt", {"timescale": 7}, 3, 12),
    ("cosine_with_min_lr", {"min_lr": 1e-5}, 3, 12), ("cosine_with_min_lr", {"min_lr_rate": 0.25, "num_cycles": 1}, 0, 12),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1}, 3, 12),
    ("cosine_warmup_with_min_lr", {"min_lr": 2e-5, "warmup_lr_rate": 0.2}, 4, 12),
    ("warmup_stable_decay", {"num_decay_steps": 4}, 3, 12),
    ("warmup_stable_decay", {"num_decay_steps": 5, "min_lr_ratio": 0.1, "warmup_type": "cosine", "decay_type": "linear"}, 3, 12),
    ("warmup_stable_decay", {"num_decay_steps": 3, "num_stable_steps": 2, "warmup_type": "1-sqrt", "decay_type": "1-sqrt"}, 3, 12),
]


def rates(kind, kwargs, warmup, total, lr):
    opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    sched = get_scheduler(kind, opt, warmup, total, kwargs)
    out = []
    for _ in range(total + 3):  # three steps past the end
        out.append(sched.get_last_lr()[0])
        opt.step()
        try:
            sched.step()
        except ZeroDivisionError:
            break
    return out


def main():
    lr = 2e-4
    cases = [{"type": k, "kwargs": kw, "warmup": w, "total": n, "lr": lr, "rates": rates(k, kw, w, n, lr)} for k, kw, w, n in CASES]
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "schedules.json")
    with open(path, "w") as f:
        json.dump({"transformers": transformers.__version__, "cases": cases}, f, indent=1)
        f.write("\n")
    print(path, len(cases), file=sys.stderr)


main()
