"""`verify` and `memory` through the real engine, on CPU ranks."""
import json
import os
import shutil
import struct

import pytest
from engine import TINY, Engine, job


@pytest.fixture
def engine(tmp_path):
    e = Engine(tmp_path)
    yield e
    e.close()


def checks(result):
    return {c["name"]: c for c in result["checks"]}


SHARDED = {"fsdp": True}
HOST = {"fsdp": True, "fsdp_config": {"cpu_offload": True}}


@pytest.mark.parametrize("devices,settings", [("cpu:1", {}), ("cpu:2", {"store": "resident"}), ("cpu:2", SHARDED), ("cpu:4", SHARDED), ("cpu:2", HOST),
                                              ("cpu:1", {"load_in_4bit": False}), ("cpu:2", {"store": "resident16"})])
def test_a_trained_run(engine, tmp_path, devices, settings):
    j = job(devices=devices, lora_dropout=0.1, **settings)
    run = str(tmp_path / "runs" / "a")
    engine.ask("train", job=j, run=run)
    before = (tmp_path / "runs" / "a" / "events.jsonl").read_bytes()
    r = engine.ask("verify", job=j, run=run)
    c = checks(r)
    assert set(c) == {"base bytes", "layers as gathered", "head and norms", "adapter reloaded", "adapter file", "first loss again", "losses"}
    assert all(x["ok"] for x in c.values()), c
    assert len(r["layers"]) == json.loads((TINY / "config.json").read_text())["num_hidden_layers"]
    assert all(x["ok"] and x["hash"] == x["file"] for x in r["layers"])
    # The record is of training alone, and a run after it begins from the same adapters.
    assert (tmp_path / "runs" / "a" / "events.jsonl").read_bytes() == before
    again = engine.ask("train", job=j, run=str(tmp_path / "runs" / "b"))
    assert [x.get("loss") for x in again["log_history"]] == [x.get("loss") for x in engine.ask("train", job=j, run=str(tmp_path / "runs" / "c"))["log_history"]]


def test_the_hash_is_the_same_for_every_store(engine, tmp_path):
    seen = set()
    for devices, settings in [("cpu:1", {}), ("cpu:2", SHARDED), ("cpu:2", HOST)]:
        r = engine.ask("verify", job=job(devices=devices, **settings), run=None)
        seen.add((*(x["hash"] for x in r["layers"]), checks(r)["head and norms"]["text"].split("XXH64 of all ")[1]))
    assert len(seen) == 1


def test_half_of_the_base(engine):
    text = checks(engine.ask("verify", job=job(devices="cpu:2", **SHARDED), run=None))["base bytes"]
    assert text["ok"] and text["text"].endswith("50.0 % each, the rest pads parts to whole groups of 16,384 weights"), text
    text = checks(engine.ask("verify", job=job(devices="cpu:2", **HOST), run=None))["base bytes"]
    assert text["ok"] and text["text"].endswith("0.0 % each, 4 of 4 layers rest in host memory"), text


def test_a_fresh_engine_and_another_world(engine, tmp_path):
    run = str(tmp_path / "runs" / "a")
    engine.ask("train", job=job(devices="cpu:2", **SHARDED), run=run)
    engine.ask("unload")
    # The same samples a step on one device: the first loss is the same bits, and nothing of the run is on it.
    c = checks(engine.ask("verify", job=job(devices="cpu:1", gradient_accumulation_steps=4), run=run))
    assert all(x["ok"] for x in c.values()), c
    assert "first loss again" in c and "adapter reloaded" not in c


def damage(path, name, value):
    """One element of a safetensors file becomes another."""
    data = bytearray(path.read_bytes())
    n = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + n])
    at = 8 + n + header[name]["data_offsets"][0]
    data[at:at + 4] = struct.pack("<f", value)
    path.write_bytes(data)


def test_a_damaged_adapter_is_found(engine, tmp_path):
    run = tmp_path / "runs" / "a"
    j = job()
    engine.ask("train", job=j, run=str(run))
    file = run / "adapter_model.safetensors"
    n = struct.unpack("<Q", file.read_bytes()[:8])[0]
    name = next(k for k in json.loads(file.read_bytes()[8:8 + n]) if "lora_B" in k)
    damage(file, name, 0.25)
    c = checks(engine.ask("verify", job=j, run=str(run)))
    assert not c["adapter reloaded"]["ok"] and c["first loss again"]["ok"] and c["layers as gathered"]["ok"]


def test_another_record_is_found(engine, tmp_path):
    run = tmp_path / "runs" / "a"
    engine.ask("train", job=job(), run=str(run))
    lines = (run / "events.jsonl").read_text().splitlines()
    changed = [line.replace('"loss_bits":"', '"loss_bits":"0') if '"ev":"step"' in line else line for line in lines]
    assert changed != lines
    (run / "events.jsonl").write_text("\n".join(changed) + "\n")
    c = checks(engine.ask("verify", job=job(), run=str(run)))
    assert not c["first loss again"]["ok"] and c["adapter reloaded"]["ok"]


def rot(path, at, new):
    """Other bytes in place, which the mapping sees; its time stays, so that it is taken for the file that was placed."""
    before = os.stat(path)
    with open(path, "r+b") as f:
        f.seek(at)
        f.write(new)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_file_that_changes_under_the_weights(engine, tmp_path):
    """The devices hold what the file said; the file says something else now: every such layer is named."""
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    j = job(model=str(model))
    run = str(tmp_path / "runs" / "a")
    engine.ask("train", job=j, run=run)
    data = bytearray((model / "model.safetensors").read_bytes())
    n = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + n])
    name = next(k for k in sorted(header) if "layers.1." in k and "gate_proj.weight" in k)
    at = 8 + n + header[name]["data_offsets"][0] + 100
    rot(model / "model.safetensors", at, bytes([data[at] ^ 0xff, data[at + 1] ^ 0x40]))
    r = engine.ask("verify", job=j, run=run)
    assert not checks(r)["layers as gathered"]["ok"]
    assert [x["layer"] for x in r["layers"] if not x["ok"]] == [1]


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.2.input_layernorm.weight", "head"])
def test_another_head_or_norm_is_found(engine, tmp_path, name):
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    j = job(model=str(model), devices="cpu:2", **SHARDED)
    engine.ask("train", job=j, run=str(tmp_path / "runs" / "a"))
    data = (model / "model.safetensors").read_bytes()
    n = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + n])
    if name == "head":
        name = "lm_head.weight" if "lm_head.weight" in header else "model.embed_tokens.weight"
    end = 8 + n + header[name]["data_offsets"][1]
    rot(model / "model.safetensors", end - 1, bytes([data[end - 1] ^ 0x40]))
    c = checks(engine.ask("verify", job=j, run=None))
    assert not c["head and norms"]["ok"] and name in c["head and norms"]["text"] and c["layers as gathered"]["ok"], c


def test_memory(engine, tmp_path):
    empty = engine.ask("memory")
    assert empty["devices"] and empty["devices"][-1]["arena"] == 0 and empty["devices"][-1]["total"] > 0
    engine.ask("train", job=job(devices="cpu:2", **SHARDED), run=str(tmp_path / "runs" / "a"))
    full = engine.ask("memory")
    assert [d["rank"] for d in full["devices"]] == [0, 1]
    for d in full["devices"]:
        assert d["arena"] == sum(v for k, v in d["bytes"].items() if k != "runtime") > 0
        # What is outside our arena is the rest of what the driver counts for the process.
        if d["process"] >= 0:
            assert sum(d["bytes"].values()) == max(d["process"], d["arena"])
    engine.ask("unload")
    assert engine.ask("memory")["devices"][-1]["arena"] == 0


def test_stop_while_verifying(engine, tmp_path):
    j = job(devices="cpu:2", **SHARDED)
    engine.ask("train", job=j, run=str(tmp_path / "runs" / "a"))
    engine.send("verify", job=j, run=str(tmp_path / "runs" / "a"))
    engine.socket.sendall(b'{"cmd":"stop"}\n')
    events, end = engine.wait()
    assert end["ev"] in ("stopped", "done")
    assert engine.ask("verify", job=j, run=str(tmp_path / "runs" / "a"))["checks"]
