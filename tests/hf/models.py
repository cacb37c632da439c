"""Fresh random models of every family, as folders that both sides read."""
import json
import os

import numpy as np
import torch
import transformers

import ref

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]


def random_config(family, rng):
    heads = int(rng.choice([2, 4, 6]))
    kv = int(rng.choice([k for k in (1, 2, 3) if heads % k == 0]))
    hidden = 64 * int(rng.integers(1, 3)) * (3 if heads == 6 else 1)
    common = dict(vocab_size=int(rng.integers(260, 420)), hidden_size=hidden,
                  intermediate_size=64 * int(rng.integers(1, hidden // 64 + 4)), num_hidden_layers=int(rng.integers(1, 4)),
                  num_attention_heads=heads, num_key_value_heads=kv, max_position_embeddings=256,
                  rms_norm_eps=float(rng.choice([1e-5, 1e-6])), tie_word_embeddings=bool(rng.integers(2)),
                  bos_token_id=1, eos_token_id=2,
                  rope_parameters={"rope_type": "default", "rope_theta": float(rng.choice([1e4, 5e5]))})
    if family == "llama":
        scaling = str(rng.choice(["default", "llama3", "linear", "yarn"]))
        rope = common["rope_parameters"]
        rope["rope_type"] = scaling
        if scaling != "default":
            rope["factor"] = 4.0
        if scaling == "llama3":
            rope.update(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
        if scaling == "yarn":
            rope.update(original_max_position_embeddings=64)
        return transformers.LlamaConfig(attention_bias=bool(rng.integers(2)), mlp_bias=bool(rng.integers(2)), **common)
    if family == "mistral":
        return transformers.MistralConfig(sliding_window=int(rng.integers(4, 20)),
                                          head_dim=int(rng.choice([16, 32])), **common)
    if rng.integers(2):  # the upper layers look back over a window
        common.update(use_sliding_window=True, sliding_window=int(rng.integers(4, 20)),
                      max_window_layers=int(rng.integers(0, common["num_hidden_layers"] + 1)))
    if family == "qwen2":
        return transformers.Qwen2Config(**common)
    return transformers.Qwen3Config(head_dim=int(rng.choice([16, 32, 64])), attention_bias=bool(rng.integers(2)),
                                    **common)


def random_lora(rng):
    lora = dict(r=int(rng.integers(1, 17)), lora_alpha=int(rng.integers(1, 33)), use_rslora=bool(rng.integers(2)))
    count = int(rng.integers(1, len(ref.ALL_LINEAR) + 1))
    lora["target_modules"] = sorted(rng.choice(ref.ALL_LINEAR, count, replace=False).tolist())
    return lora


class Case:
    """model/ and model-nf4/ under `path`, their fp32 twins in torch, and rows.jsonl."""

    def __init__(self, path, family, seed, dtype="float32", rows=40, sixteen=False):
        self.path, self.rng = str(path), np.random.default_rng(seed)
        self.gen = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self.config = random_config(family, self.rng)
        self.model = ref.build(self.config, self.gen)
        for p in self.model.parameters() if sixteen else ():
            p.data = p.data.bfloat16().float()
        self.dtype, self.double_quant = dtype, bool(self.rng.integers(2))
        spelling, shards = bool(self.rng.integers(2)), int(self.rng.integers(1, 4))
        self.folder, self.folder_nf4 = os.path.join(self.path, "model"), os.path.join(self.path, "model-nf4")
        tensors = ref.write_model(self.model, self.folder, dtype, spelling, shards)
        self.model_nf4 = ref.write_nf4(self.model, tensors, self.folder_nf4, dtype, self.double_quant, (), spelling,
                                       shards)
        self.rows = self.write_rows(os.path.join(self.path, "rows.jsonl"), rows)
        self.eval_rows = self.write_rows(os.path.join(self.path, "eval.jsonl"), 11)
        self.lora = random_lora(self.rng)

    def write_rows(self, file, count):
        rows = []
        with open(file, "w") as f:
            for _ in range(count):
                n = int(self.rng.integers(3, 33))
                ids = self.rng.integers(3, self.config.vocab_size, n).tolist()
                masked = int(self.rng.integers(0, n - 1)) if self.rng.integers(2) else 0
                rows.append({"input_ids": ids, "labels": [-100] * masked + ids[masked:]})
                f.write(json.dumps(rows[-1]) + "\n")
        return rows


def pad(rows):
    """Rows of ids and labels as one micro-batch (input_ids, attention_mask, labels)."""
    n = max(len(r["input_ids"]) for r in rows)
    out = [[], [], []]
    for r in rows:
        k = n - len(r["input_ids"])
        out[0].append(r["input_ids"] + [0] * k)
        out[1].append([1] * (n - k) + [0] * k)
        out[2].append(r["labels"] + [-100] * k)
    return [torch.tensor(x) for x in out]


def sampler_order(n, seed, epochs):
    order = []
    for e in range(epochs):
        order += torch.randperm(n, generator=torch.Generator().manual_seed(seed + e)).tolist()
    return order


def train(wrapped, rows, seed, steps, batch, accumulation, lr, warmup, max_grad_norm=1.0, weight_decay=0.0):
    """As the Trainer does it, written out: (losses, grad norms). Rows divide evenly into steps' groups."""
    per_step = batch * accumulation
    assert len(rows) % per_step == 0
    order = sampler_order(len(rows), seed, 1 + steps * per_step // len(rows))
    params = [p for p in wrapped.parameters() if p.requires_grad]
    optim = torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=weight_decay, foreach=False)
    sched = transformers.get_linear_schedule_with_warmup(optim, warmup, steps)
    losses, norms = [], []
    for s in range(steps):
        group = [rows[i] for i in order[s * per_step:(s + 1) * per_step]]
        micro = [pad(group[k:k + batch]) for k in range(0, per_step, batch)]
        items = sum(ref.num_items(m[2]) for m in micro)
        total = 0.0
        for ids, mask, labels in micro:
            loss = wrapped(input_ids=ids, attention_mask=mask, labels=labels, num_items_in_batch=items,
                           use_cache=False).loss
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(torch.nn.utils.clip_grad_norm_(params, max_grad_norm).item())
        optim.step()
        sched.step()
        optim.zero_grad()
    return losses, norms


def eval_loss(model, rows, batch):
    """transformers' eval_loss: the mean of each batch, weighted by its rows."""
    total = 0.0
    with torch.no_grad():
        for k in range(0, len(rows), batch):
            part = rows[k:k + batch]
            ids, mask, labels = pad(part)
            total += len(part) * model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss.item()
    return total / len(rows)


def relative(a, b):
    a, b = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    return ((a - b).norm() / b.norm()).item()
