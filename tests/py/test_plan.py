"""`plan` before anything is loaded: devices that are not here, the rows of alternatives, and a step action by action."""
import json
import re

import pytest
from front_end import BUILD, ROOT, python, shell

MODELS = ROOT / "tests" / "plan"


def plan(tmp_path, model, **options):
    """The data of a plan's view."""
    code = f"""
import json, qlora
qlora.run("load", {str(MODELS / model)!r})
print("PLAN" + json.dumps(dict(qlora.run("plan", **{options!r}))))
"""
    r = python(code, tmp_path)
    assert r.returncode == 0, r.stderr
    return json.loads(next(line for line in r.stdout.splitlines() if line.startswith("PLAN"))[4:])


def test_devices_that_are_not_here(tmp_path):
    p = plan(tmp_path, "llama-8b", on="2xT4", devices="cpu:4", fsdp=True, actions=True)
    assert p["fits"] and p["chosen"]["world"] == 2 and p["chosen"]["dtype"] == "float16"
    assert [d["backend"] for d in p["devices"]] == ["cuda", "cuda"]
    assert all(14 << 30 > d["capacity"] > 13 << 30 for d in p["devices"])
    assert all(sum(d["bytes"].values()) == d["total"] for d in p["devices"])
    assert len(p["actions"]) == 2 and all(a.splitlines()[-1] == "STEP" and "GATHER 31 slot" in a for a in p["actions"])
    assert p["longest"] >= 1024 and p["seconds"] > 0 and all(isinstance(w, str) for w in p["why"]) and len(p["why"]) >= 3
    rows = {a["name"]: a for a in p["alternatives"]}
    assert {"resident", "sharded", "sharded + offloaded activations", "cpu_offload"} <= set(rows)
    assert rows["sharded"]["per_device"] < rows["resident"]["per_device"]
    assert all(r["seconds"] > 0 and r["longest"] >= (1024 if r["fits"] else 0) for r in rows.values())


@pytest.mark.parametrize("on,total,left", [("2xT4", 15360, 1050), ("2xH100", 81559, 1900), ("1xH100", 81559, 600), ("2x80GiB", 81920, 1050)])
def test_room_for_what_is_not_ours(tmp_path, on, total, left):
    """GPUs that come joined by NVLink need more of it."""
    assert [d["capacity"] >> 20 for d in plan(tmp_path, "llama-8b", on=on)["devices"]] == [total - left] * int(on[0])


def test_what_is_shown(tmp_path):
    r = shell(f"load {MODELS / 'llama-8b'};\nplan --on 2xT4 --fsdp true --actions true\n", tmp_path)
    assert r.returncode == 0, r.stderr
    for part in ("fits · 2xT4", "longest sequence that fits", "sharded: fsdp, each of 2 devices holds 1/2", "instead", "per device", "step", "longest",
                 "same bits on 1, 2 devices", "rank · 0, one optimizer step", "rank · 1, one optimizer step", "  GATHER 0 slot 0", "  REDUCE\n  STEP"):
        assert part in r.stdout, part
    assert all(len(line) <= 80 for line in r.stdout.splitlines() if str(ROOT) not in line)


def test_what_does_not_fit_says_what_helps(tmp_path):
    r = shell(f"load {MODELS / 'llama-70b'};\nplan --on 2xT4 --host_memory 8GiB\nplan --on 1xT4 --fsdp false --host_memory 80GiB\n", tmp_path)
    assert r.returncode == 0, r.stderr
    two, one = (" ".join(t.split()) for t in r.stdout.split("does not fit · ")[1:])
    assert "of host memory for what is offloaded, 8.00 GiB are there. What helps: more devices" in two and "--host_memory asks about one" in two
    assert re.search(r"this job needs \S+ GiB on each device, \S+ GiB are there. What helps: a shorter --max_length", one)
    assert all(len(line) <= 80 for line in r.stdout.splitlines() if str(ROOT) not in line)


@pytest.mark.parametrize("on", ["9xT4", "0xT4", "2x0GiB", "T5"])
def test_devices_that_are_nowhere(tmp_path, on):
    r = shell(f"load {MODELS / 'llama-8b'};\nplan --on {on}\n", tmp_path)
    assert r.returncode == 1 and "--on" in r.stderr


@pytest.mark.parametrize("on,capability", [("2xP100", "6.0"), ("v100", "7.0"), ("2xV100-16", "7.0")])
def test_devices_that_are_too_old(tmp_path, on, capability):
    """What no run would start on does not fit."""
    r = shell(f"load {MODELS / 'llama-8b'};\nplan --on {on}\n", tmp_path)
    assert r.returncode == 1 and f"has compute capability {capability}; 7.5 is the oldest supported" in r.stderr
    assert "100" not in shell(f"load {MODELS / 'llama-8b'};\nplan --on T5\n", tmp_path).stderr.replace("A100", "").replace("H100", "")


def test_data_that_cannot_be_read(tmp_path):
    """The figures are of full rows then, and that is said."""
    data = tmp_path / "d.jsonl"
    data.write_text('{"text": "hello"}\n')
    (tmp_path / "e.jsonl").write_text('{"a": 1}\n')
    r = shell("load tiny\ndata d.jsonl\nconfig --devices cpu:1 --save s.json\nplan\n", tmp_path, engine=BUILD / "qlora-engine")
    assert r.returncode == 0 and "2,048 tokens a micro-batch" not in " ".join(r.stdout.split()) and "cannot be read" not in r.stdout, r.stderr
    r = shell("config --load s.json --eval_dataset e.jsonl\nplan\n", tmp_path, engine=BUILD / "qlora-engine")
    text = " ".join(r.stdout.split())
    assert r.returncode == 0 and "2,048 tokens a micro-batch" not in text and "evaluation is not counted, as its data cannot be read: " in text, r.stderr
    data.unlink()
    r = shell("config --load s.json\nplan\n", tmp_path, engine=BUILD / "qlora-engine")
    text = " ".join(r.stdout.split())
    assert r.returncode == 0 and "2,048 tokens a micro-batch" in text and "full rows of max_length are counted, as the data cannot be read: " in text, r.stderr
