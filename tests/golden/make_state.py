#!/usr/bin/env python3
"""Writes trainer_state.json's fixtures: what transformers' Trainer recorded, and the numbers it recorded it from.

    python tests/golden/make_state.py       (with transformers and torch) → state.json
"""
import json
import os
import sys
import tempfile

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

ROWS, LENGTH = 22, 9


class Recorder(Trainer):
    """Keeps the loss of every micro-batch."""
    def training_step(self, model, inputs, *args, **kwargs):
        loss = super().training_step(model, inputs, *args, **kwargs)
        if self.state.global_step in self.spoil:
            loss = loss * float("nan")
        self.losses.append((self.state.global_step, float(loss)))
        return loss


class Watch(transformers.TrainerCallback):
    def __init__(self):
        self.norms, self.rates, self.tokens = [], [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **kw):
        self.norms.append(float(torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters()))))
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_step_end(self, args, state, control, **kw):
        self.tokens.append(state.num_input_tokens_seen)


def run(spoil=(), **kwargs):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
                                         num_key_value_heads=1, max_position_embeddings=64))
    ids = torch.randint(0, 32, (ROWS, LENGTH))
    data = [{"input_ids": r, "labels": r.clone()} for r in ids]
    with tempfile.TemporaryDirectory() as tmp:
        os.chdir(tmp)
        args = TrainingArguments(output_dir="out", report_to=[], use_cpu=True, disable_tqdm=True, max_grad_norm=0.0,
                                 per_device_train_batch_size=2, learning_rate=1e-2, **kwargs)
        watch = Watch()
        t = Recorder(model=model, args=args, train_dataset=data, eval_dataset=data[:6], callbacks=[watch])
        t.losses, t.spoil = [], set(spoil)
        t.train()
        states = {n: open(f"out/{n}/trainer_state.json").read() for n in sorted(os.listdir("out"))}
        steps = [[] for _ in watch.rates]
        for s, loss in t.losses:
            steps[s].append(loss)
        job = {k: v for k, v in kwargs.items()}
        return {"job": {"per_device_train_batch_size": 2, "learning_rate": 1e-2, "max_grad_norm": 0.0, **job}, "rows": ROWS,
                "losses": [[None if x != x else x for x in s] for s in steps], "norms": watch.norms, "rates": watch.rates,
                "tokens": watch.tokens, "states": states, "log_history": t.state.log_history}


def main():
    out = {"transformers": transformers.__version__, "runs": [
        run(max_steps=7, logging_steps=2, eval_strategy="steps", eval_steps=3, save_steps=3, load_best_model_at_end=True, warmup_steps=2),
        run(num_train_epochs=1.5, gradient_accumulation_steps=4, logging_steps=1, save_strategy="epoch", eval_strategy="epoch",
            lr_scheduler_type="cosine"),
        run(max_steps=6, logging_steps=3, logging_first_step=True, save_steps=4, include_num_input_tokens_seen=True, spoil=(1, 4)),
    ]}
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "state.json")
    with open(path, "w") as f:
        json.dump(out, f, indent=1)
        f.write("\n")


here = os.path.abspath(__file__)
__file__ = here
main()
