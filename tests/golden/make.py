#!/usr/bin/env python3
"""Makes tests/golden/<case>/ (see README.md there). Imports only transformers, peft, bitsandbytes, torch, numpy and
safetensors, pinned in tests/hf/requirements.txt. Same bytes on every run of one version of them.

    python tests/golden/make.py [case…]
"""
import json
import os
import shutil
import sys

import bitsandbytes
import numpy as np
import peft
import torch
import transformers
from safetensors.torch import save_file

here = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, here)
import ref  # noqa: E402

TRAIN = {"learning_rate": 5e-3, "lr_scheduler_type": "linear", "warmup_steps": 2, "max_grad_norm": 1.0,
         "weight_decay": 0.01, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "max_steps": 20,
         "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "loss_denominator": "shifted"}

LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 32}

CASES = {
    "llama": dict(
        config=lambda: transformers.LlamaConfig(
            vocab_size=320, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5, rope_parameters=dict(LLAMA3),
            bos_token_id=1, eos_token_id=2),
        dtype="bfloat16", old_spelling=True, double_quant=True, t=24,
        lora=dict(r=8, lora_alpha=16, target_modules=list(ref.ALL_LINEAR))),
    "mistral": dict(
        config=lambda: transformers.MistralConfig(
            vocab_size=259, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=1, max_position_embeddings=256, rms_norm_eps=1e-5, sliding_window=7,
            bos_token_id=1, eos_token_id=2, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
        dtype="float16", old_spelling=True, double_quant=False, t=26, max_grad_norm=2.3,
        lora=dict(r=4, lora_alpha=12, target_modules=["q_proj", "v_proj", "down_proj"])),
    "qwen2": dict(
        config=lambda: transformers.Qwen2Config(
            vocab_size=384, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-6, tie_word_embeddings=True,
            bos_token_id=1, eos_token_id=2, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}),
        dtype="bfloat16", old_spelling=False, double_quant=True, shards=3, t=22,
        lora=dict(r=8, lora_alpha=8, use_rslora=True, target_modules=list(ref.ALL_LINEAR))),
    "qwen3": dict(
        config=lambda: transformers.Qwen3Config(
            vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=256, rms_norm_eps=1e-6,
            tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}),
        dtype="float32", old_spelling=False, double_quant=True, keep=["model.layers.1.mlp.down_proj"], t=24,
        lora=dict(r=4, lora_alpha=6, target_modules=list(ref.ALL_LINEAR),
                  rank_pattern={"layers.0.self_attn.q_proj": 7, "down_proj": 2},
                  alpha_pattern={"layers.0.self_attn.q_proj": 3, "o_proj": 16})),
}


def write_json(path, value):
    with open(path, "w") as f:
        json.dump(value, f, indent=1)
        f.write("\n")


def expected(model, out, variant, case, batches, seed, settings):
    """The numbers of one base (as it is, or dequantised NF4) under the case's adapter."""
    gen = torch.Generator().manual_seed(seed + 1)
    wrapped = ref.attach(model, gen, **case["lora"])
    ref.save_adapter(wrapped, os.path.join(out, "adapter"))
    first = {k: torch.from_numpy(v[0]) for k, v in batches.items()}
    t = first["input_ids"].shape[-1]
    tensors = {"logits": ref.logits_of(wrapped, first["input_ids"].view(-1, t), first["attention_mask"].view(-1, t)),
               "logits.base": ref.logits_of(model, first["input_ids"].view(-1, t),
                                            first["attention_mask"].view(-1, t))}
    loss = ref.group_backward(wrapped, first["input_ids"], first["attention_mask"], first["labels"])
    for name, g in ref.adapter_grads(wrapped).items():
        tensors["grad." + name] = g
    wrapped.zero_grad()
    prompt = batches["input_ids"][0, 0, 0, :6].tolist()
    answer, lead = ref.greedy(wrapped, prompt, 24)
    losses, norms, rates = ref.train(wrapped, batches, settings["learning_rate"], settings["warmup_steps"],
                                     settings["max_grad_norm"], settings["weight_decay"])
    for name, w in ref.adapter_tensors(wrapped).items():
        tensors["final." + name] = w
    save_file(tensors, os.path.join(out, f"expected-{variant}.safetensors"))
    trainable, total = wrapped.get_nb_trainable_parameters()
    return {"loss": loss, "losses": losses, "grad_norms": norms, "learning_rates": rates,
            "trainable_params": trainable, "all_params": total,
            "greedy": {"prompt": prompt, "tokens": answer, "smallest_lead": lead}}


def make(name):
    case = CASES[name]
    seed = 1000 + 10 * sorted(CASES).index(name)
    out = os.path.join(here, name)
    shutil.rmtree(out, ignore_errors=True)
    os.makedirs(out)
    torch.manual_seed(seed)
    gen = torch.Generator().manual_seed(seed)
    config = case["config"]()
    shards = case.get("shards", 1)
    model = ref.build(config, gen)
    tensors = ref.write_model(model, os.path.join(out, "model"), case["dtype"], case["old_spelling"], shards)
    nf4 = ref.write_nf4(model, tensors, os.path.join(out, "model-nf4"), case["dtype"], case["double_quant"],
                        case.get("keep", ()), case["old_spelling"], shards)
    settings = {**TRAIN, "max_grad_norm": case.get("max_grad_norm", 1.0)}
    batches = ref.make_batches(np.random.default_rng(seed), config.vocab_size, TRAIN["max_steps"],
                               TRAIN["gradient_accumulation_steps"], TRAIN["per_device_train_batch_size"], case["t"])
    save_file({k: torch.from_numpy(v) for k, v in batches.items()}, os.path.join(out, "batches.safetensors"))
    write_json(os.path.join(out, "case.json"), {
        "dtype": case["dtype"], "double_quant": case["double_quant"], "keep": list(case.get("keep", [])),
        "train": settings, "num_items": [ref.num_items(x) for x in batches["labels"]],
        "lora": expected(model, out, "lora", case, batches, seed, settings),
        "nf4": expected(nf4, out, "nf4", case, batches, seed, settings),
        "made_with": {"torch": torch.__version__, "transformers": transformers.__version__,
                      "peft": peft.__version__, "bitsandbytes": bitsandbytes.__version__}})


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity_error()
    for name in sys.argv[1:] or list(CASES):
        make(name)
        print(name, "done")


if __name__ == "__main__":
    main()
