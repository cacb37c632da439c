"""The folders we write for both sides are what transformers, peft and bitsandbytes take them for."""
import json
import os

import bitsandbytes as bnb
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

import models
import ref

GOLDEN = os.path.dirname(os.path.abspath(ref.__file__))


def load(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **options).eval()


@pytest.mark.parametrize("name", models.FAMILIES)
def test_golden_base(name):
    """model/ with adapter/ through from_pretrained gives the logits on record."""
    folder = os.path.join(GOLDEN, name)
    want = load_file(os.path.join(folder, "expected-lora.safetensors"))
    batch = load_file(os.path.join(folder, "batches.safetensors"))
    t = batch["input_ids"].shape[-1]
    ids, mask = (batch[k][0].view(-1, t) for k in ("input_ids", "attention_mask"))
    model = load(os.path.join(folder, "model"), dtype=torch.float32)
    assert models.relative(ref.logits_of(model, ids, mask), want["logits.base"]) < 1e-6
    model = peft.PeftModel.from_pretrained(model, os.path.join(folder, "adapter"))
    assert models.relative(ref.logits_of(model, ids, mask), want["logits"]) < 1e-6


@pytest.mark.parametrize("name", models.FAMILIES)
def test_golden_nf4(name):
    """model-nf4/ loads as 4-bit layers whose values are those behind the logits on record."""
    folder = os.path.join(GOLDEN, name)
    model = load(os.path.join(folder, "model-nf4"), device_map="cpu")
    with open(os.path.join(folder, "case.json")) as f:
        keep = json.load(f)["keep"]
    layers = {n: m for n, m in model.named_modules() if n.rsplit(".", 1)[-1] in ref.ALL_LINEAR}
    assert sorted(n for n, m in layers.items() if not isinstance(m, bnb.nn.Linear4bit)) == sorted(keep)
    twin = load(os.path.join(folder, "model"), dtype=torch.float32)
    with torch.no_grad():
        for n, m in layers.items():
            if n not in keep:
                twin.get_submodule(n).weight.copy_(ref.dequantise(m.weight.data, m.weight.quant_state).float())
    want = load_file(os.path.join(folder, "expected-nf4.safetensors"))
    batch = load_file(os.path.join(folder, "batches.safetensors"))
    t = batch["input_ids"].shape[-1]
    ids, mask = (batch[k][0].view(-1, t) for k in ("input_ids", "attention_mask"))
    assert models.relative(ref.logits_of(twin, ids, mask), want["logits.base"]) < 1e-6


@pytest.mark.parametrize("family", models.FAMILIES)
def test_random_folder(tmp_path, family, seed):
    case = models.Case(tmp_path, family, seed)
    ids, mask, _ = models.pad(case.rows[:4])
    mine = ref.logits_of(case.model, ids, mask)
    theirs = ref.logits_of(load(case.folder, dtype=torch.float32), ids, mask)
    assert models.relative(theirs, mine) < 1e-6
