"""kaggle/reference.py trains as the Trainer's rules say, row for row."""
import json
import os
import sys

import peft
import torch
from safetensors.torch import load_file

import models
import ref

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "kaggle"))
import reference  # noqa: E402


def test_reference(tmp_path, seed):
    case = models.Case(tmp_path, "llama", seed)  # fp32 weights: bitsandbytes' fused forward has no 16-bit step then
    start = ref.attach(case.model_nf4, case.gen, **case.lora)
    ref.save_adapter(start, str(tmp_path / "adapter"))
    out = str(tmp_path / "out")
    reference.main(["--model", case.folder_nf4, "--data", str(tmp_path / "rows.jsonl"), "--output_dir", out, "--adapter",
                    str(tmp_path / "adapter"), "--steps", "4", "--max_steps", "12", "--dtype", "float32",
                    "--learning_rate", "5e-3", "--warmup_steps", "1", "--per_device_train_batch_size", "2",
                    "--gradient_accumulation_steps", "2", "--seed", "3407"])
    losses, norms = models.train(start, case.rows, 3407, 12, 2, 2, 5e-3, 1)
    with open(os.path.join(out, "trainer_state.json")) as f:
        records = [r for r in json.load(f)["log_history"] if "loss" in r]
    assert [r["step"] for r in records] == [1, 2, 3, 4]
    assert models.relative([r["loss"] for r in records], losses[:4]) < 1e-5
    assert models.relative([r["grad_norm"] for r in records], norms[:4]) < 1e-4
    assert records[0]["learning_rate"] == 0
    assert os.path.exists(os.path.join(out, "adapter", "adapter_model.safetensors"))
    with open(os.path.join(out, "reference.json")) as f:
        assert len(json.load(f)["step_seconds"]) == 4


def test_reference_on_text(tmp_path):
    """The bundled model and its text: tokenised, quantised on load, one step."""
    tiny = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "notebooks", "tiny")
    reference.main(["--model", tiny, "--data", os.path.join(tiny, "train.jsonl"), "--output_dir", str(tmp_path),
                    "--steps", "2", "--max_rows", "32", "--dtype", "float32", "--r", "8", "--lora_alpha", "16",
                    "--warmup_steps", "0", "--learning_rate", "5e-3", "--gradient_accumulation_steps", "2"])
    with open(tmp_path / "trainer_state.json") as f:
        losses = [r["loss"] for r in json.load(f)["log_history"] if "loss" in r]
    assert len(losses) == 2 and 1 < losses[0] < 8
    adapter = load_file(str(tmp_path / "adapter" / "adapter_model.safetensors"))
    assert len(adapter) == 4 * 7 * 2 and all(torch.isfinite(v).all() for v in adapter.values())
    assert peft.PeftConfig.from_pretrained(str(tmp_path / "adapter")).r == 8
