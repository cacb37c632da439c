"""Merged models in transformers: they load, and give the logits of PEFT's own base with adapter."""
import json
import os
import shutil

import peft
import pytest
import torch
import transformers

from engine import Engine

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TINY = os.path.join(ROOT, "notebooks", "tiny")
GOLDEN = os.path.join(ROOT, "tests", "golden")


@pytest.mark.parametrize("model", [TINY] + [os.path.join(GOLDEN, f, "model") for f in ("llama", "mistral", "qwen2", "qwen3")])
def test_merged_models_load(tmp_path, model):
    if model != TINY:  # the golden models have no tokenizer; the rows are ids
        model = shutil.copytree(model, str(tmp_path / "model"))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(os.path.join(TINY, name), os.path.join(model, name))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"input_ids": [(7 * i + k) % 100 + 3 for k in range(24)]}) + "\n" for i in range(8)))
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    job = {"model": model, "data": str(rows), "devices": "cpu:1", "max_steps": 3, "max_length": 64, "learning_rate": 1e-2, "load_in_4bit": False, "seed": 3}
    with Engine() as e:
        e.run("train", job=job, run=run)
        e.run("merge", model=model, adapter=run, out=out)
    ids = torch.tensor([[5, 17, 33, 8, 90, 41]])
    merged, info = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    # A tied head is in neither file.
    missing = set(info["missing_keys"]) - ({"lm_head.weight"} if merged.config.tie_word_embeddings else set())
    assert not missing and not info["unexpected_keys"] and not info["mismatched_keys"], info
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        bare = base(ids).logits
        both = peft.PeftModel.from_pretrained(base, run)(ids).logits
        alone = merged(ids).logits
    moved = (both - bare).abs().max()
    assert moved > 0
    # bfloat16 weights keep 8 bits.
    assert (alone - both).abs().max() < 0.02 * both.abs().max() + 1e-3, ((alone - both).abs().max(), moved)
