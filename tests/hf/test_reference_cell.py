"""The optional cell of kaggle/qlora-2xt4.ipynb, without its notebook: the same rows from the same adapter, here and in transformers."""
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / os.environ.get("BUILD", "build")
sys.path.insert(0, str(BUILD / "python"))
import qlora  # noqa: E402


def test_overlay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = json.loads((ROOT / "kaggle" / "qlora-2xt4.ipynb").read_text())
    (cell,) = [c for c in page["cells"] if "REFERENCE:" in "".join(c["source"])]
    qlora.run("load", str(ROOT / "notebooks" / "tiny"))
    rows = [{"text": f"How many cats sit on {i} mats? {i} cats sit on {i} mats."} for i in range(64)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    qlora.run("data", "rows.jsonl")
    qlora.run("config", reset=True, load_in_4bit=False, devices="cpu", dtype="float32", r=8, lora_alpha=16, max_length=128, max_steps=12, warmup_steps=1, seed=3407,
              learning_rate=2e-3, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    one = qlora.run("train", run_name="one")
    source = "".join(cell["source"]).replace('"qlora.reference"', "'reference'")
    source = source.replace('"--steps", "3"', '"--steps", "3", "--load_in_4bit", "0"')
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "kaggle"))
    names = {"REFERENCE": True, "TINY": True, "MODEL": "", "qlora": qlora, "one": one, "sys": sys, "subprocess": subprocess}
    source = source.replace('os.path.join(os.path.dirname(qlora.__file__), "bundled", "tiny")', repr(str(ROOT / "notebooks" / "tiny")))
    source = "\n".join(line for line in source.splitlines() if "plot" not in line)  # matplotlib is not in this environment
    exec(source, names)
    theirs = [r["loss"] for r in json.loads((tmp_path / "reference" / "trainer_state.json").read_text())["log_history"] if "loss" in r]
    assert len(theirs) == 3
    for a, b in zip(one.loss, theirs):
        assert abs(a - b) < 2e-3 * b, (one.loss[:3], theirs)
