#!/usr/bin/env python3
"""Tokens per second of a training step of the bundled model: the engine beside transformers + peft, the same rows, batch,
adapters and number of threads, one after the other in this run.

    build/venv-hf/bin/python tests/hf/bench.py [--threads 1] [--steps 20]
"""
import argparse
import json
import os
import sys
import tempfile
import time

args = argparse.ArgumentParser()
args.add_argument("--threads", type=int, default=1)
args.add_argument("--steps", type=int, default=20)
args = args.parse_args()
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = str(args.threads)
os.environ["HF_HUB_OFFLINE"] = "1"

here = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [here, os.path.join(os.path.dirname(here), "golden")]
import bitsandbytes.functional as bf  # noqa: E402
import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

import models  # noqa: E402
import ref  # noqa: E402
from engine import Engine  # noqa: E402

TINY = os.path.join(here, "..", "..", "notebooks", "tiny")
BATCH, R = 8, 16


def rows():
    tok = transformers.AutoTokenizer.from_pretrained(TINY)
    with open(os.path.join(TINY, "train.jsonl")) as f:
        ids = [tok(json.loads(line)["text"]).input_ids + [tok.eos_token_id] for line in f]
    return [{"input_ids": x, "labels": x} for x in ids][:BATCH * args.steps]


def theirs(data, base):
    """base: "4-bit" (bitsandbytes' own layers) or "dequantised" (NF4 values in plain fp32 layers)."""
    options = {"dtype": torch.float32}
    if base == "4-bit":
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY, **options)
    if base == "dequantised":
        for name, p in model.named_parameters():
            if ref.is_linear(name):
                p.data = bf.dequantize_4bit(*bf.quantize_4bit(p.data, quant_type="nf4", compress_statistics=True))
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=R, lora_alpha=R, target_modules="all-linear",
                                                         task_type="CAUSAL_LM")).train()
    params = [p for p in wrapped.parameters() if p.requires_grad]
    optim = torch.optim.AdamW(params, lr=1e-3)
    seconds, tokens = [], []
    for s in range(args.steps):
        ids, mask, labels = models.pad(data[s * BATCH:(s + 1) * BATCH])
        began = time.perf_counter()
        wrapped(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optim.step()
        optim.zero_grad()
        seconds.append(time.perf_counter() - began)
        tokens.append(int(mask.sum()))
    return speed(tokens, seconds)


def speed(tokens, seconds):
    """Over all but the first three steps."""
    return sum(tokens[3:]) / sum(seconds[3:])


def ours(data):
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "rows.jsonl")
        with open(file, "w") as f:
            f.writelines(json.dumps(r) + "\n" for r in data)
        with Engine(threads=args.threads) as engine:
            out = engine.run("train", run=os.path.join(folder, "run"), job={
                "model": TINY, "data": file, "dtype": "float32", "devices": "cpu:1", "load_in_4bit": True, "r": R,
                "lora_alpha": R, "learning_rate": 1e-3, "max_steps": args.steps, "per_device_train_batch_size": BATCH,
                "train_sampling_strategy": "sequential", "save_strategy": "no", "max_length": 512})
    steps = [e for e in out["events"] if e["ev"] == "step"]
    return speed([sum(len(r["input_ids"]) for r in data[s * BATCH:(s + 1) * BATCH]) for s in range(args.steps)],
                 [e["seconds"] for e in steps])


def main():
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    data = rows()
    mine = ours(data)
    print(f"bundled model, NF4, r {R}, batch {BATCH}, fp32, {args.threads} thread(s), tokens/s of a step")
    print(f"  engine                                  {mine:10.0f}")
    for base in ("dequantised", "4-bit"):
        other = theirs(data, base)
        print(f"  transformers + peft, {base:<18} {other:10.0f}   (engine: {mine / other:.2f} times)")


if __name__ == "__main__":
    main()
