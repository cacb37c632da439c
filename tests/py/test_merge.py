"""`merge`: the arithmetic against numpy, and the logits of the result against base and adapter, through the verb."""
import json
import shutil
import struct

import numpy as np
import pytest
from engine import TINY, Engine, job
from front_end import BUILD, ROOT, shell

LLAMA = ROOT / "tests" / "golden" / "llama"
ROWS = "".join(json.dumps({"input_ids": [(7 * i + k) % 100 + 3 for k in range(24)]}) + "\n" for i in range(8))


@pytest.fixture
def engine(tmp_path):
    e = Engine(tmp_path)
    yield e
    e.close()


def with_tokenizer(model, folder):
    """The golden models have none; their rows are ids."""
    shutil.copytree(model, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder / name)
    return folder


def tensors(path):
    """{name: (dtype, array)}; 16-bit ones as fp32."""
    data = path.read_bytes()
    n = struct.unpack("<Q", data[:8])[0]
    out = {}
    for name, t in json.loads(data[8:8 + n]).items():
        if name == "__metadata__":
            continue
        raw = data[8 + n + t["data_offsets"][0]:8 + n + t["data_offsets"][1]]
        if t["dtype"] == "BF16":
            x = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
        elif t["dtype"] in ("F16", "F32"):
            x = np.frombuffer(raw, "<f2" if t["dtype"] == "F16" else "<f4").astype(np.float32)
        else:
            x = np.frombuffer(raw, np.uint8)
        out[name] = (t["dtype"], x.reshape(t["shape"]) if x.dtype == np.float32 else x)
    return out


def test_not_over_what_it_is_made_from(engine, tmp_path):
    model, run = shutil.copytree(TINY, tmp_path / "model"), tmp_path / "run"
    engine.ask("train", job=job(model=str(model)), run=str(run))
    before = (model / "model.safetensors").read_bytes()
    for original in (None, str(TINY)):
        _, end = engine.run("merge", model=str(model), adapter=str(run), original=original, out=str(model / "."))
        assert end["ev"] == "error" and "is the model itself" in end["text"], end
        assert (model / "model.safetensors").read_bytes() == before


def test_the_arithmetic(engine, tmp_path):
    run = tmp_path / "run"
    engine.ask("train", job=job(learning_rate=1e-2, lora_alpha=32), run=str(run))
    r = engine.ask("merge", model=str(TINY), adapter=str(run), out=str(tmp_path / "out"))
    assert r["merged"] > 0 and not r["decoded"]
    base, merged, adapter = tensors(TINY / "model.safetensors"), tensors(tmp_path / "out" / "model.safetensors"), tensors(run / "adapter_model.safetensors")
    config = json.loads((run / "adapter_config.json").read_text())
    changed = 0
    for name, (dtype, x) in merged.items():
        assert dtype == {"bfloat16": "BF16", "float16": "F16"}[r["dtype"]]
        want = base[name][1].astype(np.float64)
        module = "base_model.model." + name.removesuffix(".weight")
        if module + ".lora_A.weight" in adapter:
            want = want + config["lora_alpha"] / config["r"] * (adapter[module + ".lora_B.weight"][1].astype(np.float64) @ adapter[module + ".lora_A.weight"][1])
            changed += 1
        # One rounding: half a unit in the last place of the result, and a little for the fp32 sum.
        bits = 8 if dtype == "BF16" else 11
        assert np.all(np.abs(x - want) <= np.maximum(np.abs(want), 2.0**-14) * 2.0**-bits * 1.01), name
    assert changed == r["merged"] and ("lm_head.weight" in merged) == ("lm_head.weight" in base)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == r["dtype"] and (tmp_path / "out" / "tokenizer.json").read_bytes() == (TINY / "tokenizer.json").read_bytes()


def test_a_four_bit_base(engine, tmp_path):
    (tmp_path / "rows.jsonl").write_text(ROWS)
    run = tmp_path / "run"
    nf4 = with_tokenizer(LLAMA / "model-nf4", tmp_path / "nf4")
    engine.ask("train", job=job(model=str(nf4), data=str(tmp_path / "rows.jsonl"), learning_rate=1e-2), run=str(run))
    r = engine.ask("merge", model=str(nf4), adapter=str(run), out=str(tmp_path / "out"))
    assert r["decoded"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert not any("absmax" in k or "quant" in k for k in tensors(tmp_path / "out" / "model.safetensors"))
    # The merged model is as good as base and adapter: the same loss, but for 16-bit rounding.
    e = job(model=str(nf4), eval_dataset=str(tmp_path / "rows.jsonl"), data=None)
    with_adapter = engine.ask("eval", job=e, adapter=str(run))["eval_loss"]
    bare = engine.ask("eval", job=e, adapter=None)["eval_loss"]
    merged = engine.ask("eval", job=dict(e, model=str(tmp_path / "out"), load_in_4bit=False), adapter=None)["eval_loss"]
    assert abs(merged - with_adapter) < 0.02 * abs(bare - with_adapter) + 2e-3, (merged, with_adapter, bare)
    # From the original its own values are taken.
    r = engine.ask("merge", model=str(nf4), adapter=str(run), original=str(LLAMA / "model"), out=str(tmp_path / "out2"))
    assert not r["decoded"]


def test_what_is_refused(engine, tmp_path):
    run = tmp_path / "run"
    engine.ask("train", job=job(), run=str(run))

    def why(**fields):
        end = engine.run("merge", **{**dict(model=str(TINY), adapter=str(run), out=str(tmp_path / "out")), **fields})[1]
        assert end["ev"] == "error"
        return end["text"]

    assert "another model than the base" in why(original=str(LLAMA / "model"))
    assert "the model itself" in why(out=str(TINY))
    assert "no adapter" in why(adapter=None)
    assert "holds an adapter" in why(out=str(run))
    assert "auto, float16 or bfloat16" in why(dtype="float8")
    assert not (tmp_path / "out" / "config.json").exists()


def test_the_verb(tmp_path):
    text = "load tiny\ndata tiny\nconfig --devices cpu:2 --max_steps 3 --max_length 64 --load_in_4bit false\ntrain\nmerge out --dtype float16\n"
    r = shell(text, tmp_path, engine=BUILD / "qlora-engine", timeout=120)
    assert r.returncode == 0, r.stderr
    assert "float16" in r.stdout and "the same next token" in r.stdout and "from_pretrained(\"out\"" in r.stdout
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


def test_model_and_adapter_have_folders_of_their_own(tmp_path):
    """transformers would add the adapter to the merged weights, which have it already."""
    train = "load tiny\ndata tiny\nconfig --devices cpu:1 --max_steps 2 --max_length 64\ntrain\n"
    r = shell(train + "save out\nmerge out\n", tmp_path, engine=BUILD / "qlora-engine", timeout=120)
    assert r.returncode == 1 and "out holds an adapter (adapter_config.json)" in r.stderr, r.stderr
    (tmp_path / "file").write_text("")
    r = shell("save file --run run-1\n", tmp_path, engine=BUILD / "qlora-engine", timeout=120)
    assert r.returncode == 1 and "file: Not a directory" in r.stderr, r.stderr
    r = shell("merge whole --run run-1\nsave whole --run run-1\n", tmp_path, engine=BUILD / "qlora-engine", timeout=120)
    assert r.returncode == 1 and "whole holds a model (config.json)" in r.stderr, r.stderr
    assert not (tmp_path / "whole" / "adapter_config.json").exists() and not (tmp_path / "out" / "config.json").exists()


def test_a_checkpoint_is_of_its_run(tmp_path):
    """Verb by verb the model, the data and the devices of the run that it belongs to, not those of the notebook."""
    train = "load tiny\ndata tiny\nconfig --devices cpu:2 --max_steps 2 --max_length 64\ntrain\n"
    assert shell(train, tmp_path, engine=BUILD / "qlora-engine", timeout=120).returncode == 0
    r = shell("verify run-1/checkpoint-2\nmerge out --run run-1/checkpoint-2/\nbaseline run-1/checkpoint-2 --steps 2\n", tmp_path,
              engine=BUILD / "qlora-engine", timeout=120)
    assert r.returncode == 0, r.stderr
    assert "2 devices; the stores" in " ".join(r.stdout.split()) and "adapter file" in r.stdout
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert "gradient_accumulation_steps 2: the same samples" in r.stdout and "2/2 losses: same bits" in r.stdout
