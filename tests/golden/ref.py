"""The reference side shared by the golden fixtures and the live tests: random tiny models, bitsandbytes
folders, PEFT adapters, and the numbers that transformers, peft and torch give for them in plain fp32."""
import copy
import json
import os

import bitsandbytes.functional as bf
import numpy as np
import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


# ---- random models ------------------------------------------------------------------------------

def build(config, gen):
    """A model whose every part matters: wide logits, attention that is not uniform, norms that are not 1."""
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            r = torch.randn(p.shape, generator=gen)
            if name.endswith("bias"):
                p.copy_(0.3 * r)
            elif p.dim() == 1:
                p.copy_(1 + 0.2 * r)
            elif "embed" in name:
                p.copy_(0.12 * r if config.tie_word_embeddings else r)
            else:
                p.copy_(1.2 * r / p.shape[1] ** 0.5)
    return model


def write_config(config, path, dtype, old_spelling, quantization=None):
    c = config.to_dict()
    c.pop("_name_or_path", None)
    c["architectures"] = [type(config).__name__.replace("Config", "ForCausalLM")]
    if old_spelling:  # what files on the hub look like: transformers before 5
        rope = c.pop("rope_parameters")
        c["rope_theta"] = rope.pop("rope_theta")
        c["rope_scaling"] = None if rope["rope_type"] == "default" else rope
        c["torch_dtype"] = dtype
        c.pop("dtype", None)
        c["transformers_version"] = "4.44.0"
    else:
        c["dtype"] = dtype
    if quantization:
        c["quantization_config"] = quantization
    with open(os.path.join(path, "config.json"), "w") as f:
        json.dump(c, f, indent=2, sort_keys=True)
        f.write("\n")


def write_weights(tensors, path, shards):
    tensors = {k: v.contiguous() for k, v in tensors.items()}
    if shards == 1:
        save_file(tensors, os.path.join(path, "model.safetensors"), {"format": "pt"})
        return
    names, weight_map, total = sorted(tensors), {}, 0
    for i in range(shards):
        part = {k: tensors[k] for k in names[i::shards]}
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file(part, os.path.join(path, file), {"format": "pt"})
        weight_map.update({k: file for k in part})
        total += sum(v.numel() * v.element_size() for v in part.values())
    with open(os.path.join(path, "model.safetensors.index.json"), "w") as f:
        json.dump({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, f, indent=2)
        f.write("\n")


def write_model(model, path, dtype, old_spelling=False, shards=1):
    """A Hugging Face folder in 16 or 32 bits; `model` takes the rounded weights, so that both are the same."""
    os.makedirs(path, exist_ok=True)
    tensors = {}
    for name, p in model.named_parameters():  # a tied head is not among them
        tensors[name] = p.detach().to(DTYPES[dtype])
        p.data = tensors[name].float()
    write_weights(tensors, path, shards)
    write_config(model.config, path, dtype, old_spelling)
    return tensors


# ---- NF4 ----------------------------------------------------------------------------------------

def search_dynamic(y, code):
    """The nearest entry of the 8-bit map as bitsandbytes' CUDA kernel finds it (its CPU table is coarser)."""
    one = np.float32(1)
    out = np.empty(y.shape, np.uint8)
    for i, v in enumerate(y):
        pivot, lower, upper, lp, up, step = 127, -one, one, 0, 255, 64
        val = code[pivot]
        while step:
            if v > val:
                lp, lower, pivot = pivot, val, pivot + step
            else:
                up, upper, pivot = pivot, val, pivot - step
            val, step = code[pivot], step >> 1
        upper = code[255] if up == 255 else upper
        lower = code[0] if lp == 0 else lower
        if v > val:
            out[i] = up if v > np.float32((upper + val) * np.float32(0.5)) else pivot
        else:
            out[i] = lp if v < np.float32((lower + val) * np.float32(0.5)) else pivot
    return out


def quantise(weight, double_quant, quant_type="nf4"):
    """(packed, QuantState). Nibbles and absmax are bitsandbytes'. Of the double quantisation only the map is: its
    CPU search is approximate and the order of its mean is not specified, so the offset is the serial double sum
    rounded once and the codes are the CUDA kernel's search."""
    q, state = bf.quantize_4bit(weight, blocksize=64, compress_statistics=False, quant_type=quant_type)
    if double_quant:
        absmax = state.absmax.numpy()
        total = np.float64(0)
        for a in absmax:
            total += np.float64(a)
        offset = np.float32(total / len(absmax))
        rest = absmax - offset
        code = bf.create_dynamic_map().numpy()
        tops, codes = [], []
        for i in range(0, len(rest), 256):
            block = rest[i:i + 256]
            tops.append(np.abs(block).max())
            scale = np.float32(1) / tops[-1] if tops[-1] > 0 else np.float32(np.nan)
            codes.append(search_dynamic(block * scale, code))
        inner = bf.QuantState(absmax=torch.from_numpy(np.array(tops, np.float32)), code=torch.from_numpy(code),
                              blocksize=256, dtype=torch.float32)
        state = bf.QuantState(absmax=torch.from_numpy(np.concatenate(codes)), shape=state.shape, code=state.code,
                              blocksize=64, quant_type=quant_type, dtype=weight.dtype,
                              offset=torch.tensor(offset), state2=inner)
    return q, state


def dequantise(packed, state):
    """bitsandbytes' values. Its CPU kernel reads the wrong scales where columns are no multiple of 64 (blocks
    straddle rows), so the weight is given to it as one long row."""
    flat = copy.copy(state)
    n = 1
    for d in state.shape:
        n *= d
    flat.shape = torch.Size((1, n))
    return bf.dequantize_4bit(packed, flat).view(state.shape)


def state_tensors(name, packed, state):
    out = {name: packed}
    out.update({f"{name}.{k}": v for k, v in state.as_dict(packed=True).items()})
    return out


def bnb_config(dtype, double_quant, skip):
    return {"quant_method": "bitsandbytes", "_load_in_4bit": True, "_load_in_8bit": False, "load_in_4bit": True,
            "load_in_8bit": False, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": double_quant,
            "bnb_4bit_compute_dtype": dtype, "bnb_4bit_quant_storage": "uint8", "llm_int8_threshold": 6.0,
            "llm_int8_skip_modules": skip, "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False}


def is_linear(name):
    return name.rsplit(".", 2)[-2] in ALL_LINEAR and name.endswith(".weight")


def write_nf4(model, tensors, path, dtype, double_quant, keep=(), old_spelling=False, shards=1):
    """A bitsandbytes folder from the 16-bit tensors; returns the fp32 model with the dequantised weights."""
    os.makedirs(path, exist_ok=True)
    twin = copy.deepcopy(model)
    params = dict(twin.named_parameters())
    out = {}
    for name, w in tensors.items():
        if is_linear(name) and name.removesuffix(".weight") not in keep:
            packed, state = quantise(w, double_quant)
            out.update(state_tensors(name, packed, state))
            params[name].data = dequantise(packed, state).float()
        else:
            out[name] = w
    write_weights(out, path, shards)
    write_config(model.config, path, dtype, old_spelling,
                 bnb_config(dtype, double_quant, ["lm_head", *keep] if keep else None))
    return twin


# ---- adapters -----------------------------------------------------------------------------------

def attach(model, gen, **lora):
    """A PEFT model over a copy of `model`, its B as random as its A."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, bias="none", **lora)
    wrapped = peft.get_peft_model(copy.deepcopy(model), config)
    with torch.no_grad():
        for name, p in wrapped.named_parameters():
            if "lora_A" in name:
                p.copy_(torch.randn(p.shape, generator=gen) / p.shape[1] ** 0.5)
            elif "lora_B" in name:
                p.copy_(0.3 * torch.randn(p.shape, generator=gen) / p.shape[1] ** 0.5)
    return wrapped.train()


def adapter_tensors(wrapped):
    return {k: v.detach().clone().contiguous() for k, v in peft.get_peft_model_state_dict(wrapped).items()}


def adapter_grads(wrapped):
    return {n.replace(".default", ""): p.grad.detach().clone().contiguous()
            for n, p in wrapped.named_parameters() if p.requires_grad}


def save_adapter(wrapped, path):
    wrapped.peft_config["default"].base_model_name_or_path = "tiny"
    wrapped.save_pretrained(path)
    readme = os.path.join(path, "README.md")
    if os.path.exists(readme):
        os.remove(readme)
    file = os.path.join(path, "adapter_config.json")
    with open(file) as f:
        config = json.load(f)
    config["target_modules"].sort()  # a set: its order is not the same in two runs
    with open(file, "w") as f:
        json.dump(config, f, indent=2, sort_keys=True)
        f.write("\n")


# ---- numbers ------------------------------------------------------------------------------------

def make_batches(rng, vocab, steps, g, b, t, distinct=5):
    """(steps, g, b, t) ids, mask, labels: right padding, masked prompts, a row without any label, holes. The
    same `distinct` groups come round again, so that there is something to learn."""
    shape = (min(steps, distinct), g, b, t)
    ids = rng.integers(3, vocab, shape).astype(np.int32)
    mask = np.zeros(shape, np.int32)
    labels = np.full(shape, -100, np.int32)
    for s, i, j in np.ndindex(shape[:3]):
        n = t if (s + i + j) % 3 == 0 else int(rng.integers(t // 3, t))
        start = int(rng.integers(0, n // 2)) if (i + j) % 2 else 0
        mask[s, i, j, :n] = 1
        ids[s, i, j, n:] = 0
        labels[s, i, j, start:n] = ids[s, i, j, start:n]
        if s % 4 == 1 and i == 0 and j == b - 1:
            labels[s, i, j] = -100
        if n > 8:
            labels[s, i, j, n - 4:n - 2] = -100
    order = np.arange(steps) % len(ids)
    return {"input_ids": ids[order], "attention_mask": mask[order], "labels": labels[order]}


def num_items(labels):
    return int((labels[..., 1:] != -100).sum())


def logits_of(model, ids, mask):
    """(unpadded tokens, V): rows in the order of the batch."""
    with torch.no_grad():
        out = model(input_ids=ids.long(), attention_mask=mask.long(), use_cache=False).logits
    return out[mask.bool()]


def group_backward(wrapped, ids, mask, labels):
    """One accumulation group (g, b, t): gradients of the token mean over the whole group; returns the loss."""
    n = num_items(labels)
    total = 0.0
    for i in range(len(ids)):
        loss = wrapped(input_ids=ids[i].long(), attention_mask=mask[i].long(), labels=labels[i].long(),
                       num_items_in_batch=n, use_cache=False).loss
        loss.backward()
        total += loss.item()
    return total


def train(wrapped, batches, lr, warmup, max_grad_norm, weight_decay):
    """len(batches) AdamW steps, linear schedule: losses, gradient norms before clipping, learning rates used."""
    steps = len(batches["input_ids"])
    params = [p for p in wrapped.parameters() if p.requires_grad]
    optim = torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=weight_decay, foreach=False)
    sched = transformers.get_linear_schedule_with_warmup(optim, warmup, steps)
    losses, norms, rates = [], [], []
    for s in range(steps):
        losses.append(group_backward(wrapped, *(torch.from_numpy(batches[k][s])
                                                for k in ("input_ids", "attention_mask", "labels"))))
        norms.append(torch.nn.utils.clip_grad_norm_(params, max_grad_norm).item())
        rates.append(sched.get_last_lr()[0])
        optim.step()
        sched.step()
        optim.zero_grad()
    return losses, norms, rates


def greedy(model, prompt, count):
    """Greedy continuation without a cache, and the smallest lead of the winner over the runner-up."""
    ids, lead = list(prompt), float("inf")
    for _ in range(count):
        with torch.no_grad():
            last = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        top = torch.topk(last, 2)
        lead = min(lead, (top.values[0] - top.values[1]).item())
        ids.append(top.indices[0].item())
    return ids[len(prompt):], lead
