"""`bench` through the real engine on CPU ranks: it measures, it stops, and leaves the devices free."""
import subprocess
import sys

import pytest
from clock import Clock
from engine import Engine, job
from front_end import BUILD, environment, shell


@pytest.fixture
def engine(tmp_path):
    e = Engine(tmp_path)
    yield e
    e.close()


@pytest.mark.parametrize("world", [1, 2])
def test_rows(engine, world):
    r = engine.ask("bench", job={"devices": f"cpu:{world}"}, seconds=2)
    rows = {x["name"]: x for x in r["rows"]}
    names = ["device copy", "NF4 in one kernel", "NF4 naive", "one kernel over naive", "host to device", "device to host", "matmul"]
    assert set(rows) == set(names) | ({"all-gather"} if world > 1 else set())
    assert all(x["value"] > 0 for x in rows.values())
    assert "same bits as the host's decoder" in rows["NF4 in one kernel"]["text"] and "same bits" in rows["NF4 naive"]["text"]
    assert [s["t"] for s in r["seconds"]] == [1, 2] and all(s["tflops"] > 0 for s in r["seconds"])
    assert all(name in r["text"] for name in rows) and f"{world} × " in r["text"]


def test_stop_and_go_on(engine, tmp_path):
    engine.ask("train", job=job(devices="cpu:2"), run=str(tmp_path / "runs" / "a"))
    engine.send("bench", job={"devices": "cpu:2"}, seconds=60)
    while not (engine.event().get("what") == "matmul"):
        pass
    clock = Clock()
    engine.socket.sendall(b'{"cmd":"stop"}\n')
    assert engine.wait()[1]["ev"] == "stopped" and clock.seconds() < 5
    assert engine.ask("memory")["devices"][0]["arena"] == 0
    engine.ask("train", job=job(devices="cpu:2"), run=str(tmp_path / "runs" / "b"))


def test_the_verb(tmp_path):
    r = shell("config --devices cpu:1\nbench --seconds 1\n", tmp_path, engine=BUILD / "qlora-engine")
    assert r.returncode == 0, r.stderr
    assert "NF4 in one kernel" in r.stdout and "To paste:" in r.stdout and "qlora bench, 1 × " in r.stdout


def test_bitsandbytes_where_it_is(tmp_path):
    """In place of bitsandbytes, whose torch is not in these tests' environment: what its program would print. tests/hf has the real one."""
    code = """
import json, subprocess, sys, types, importlib.machinery
for name in ("bitsandbytes", "torch"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
import qlora
real, seen = subprocess.run, []
def run(args, **options):
    seen.append(args)
    return subprocess.CompletedProcess(args, 0, json.dumps({"version": "0.0.0", "seconds": 0.001, "crc32": answer}), "")
subprocess.run = run
qlora.run("config", devices="cpu:1")
for answer in (1, None):
    if answer is None:
        answer = r["weight"]["crc32"]
    r = qlora.run("bench", seconds=1)
    row = r["rows"][-1]
    print(row["name"], "|", row["text"], "|", row["name"] in r["text"], seen[-1][-3:])
"""
    r = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment(engine=BUILD / "qlora-engine"), capture_output=True, text=True)
    assert r.returncode == 0, r.stderr
    wrong, right = [line for line in r.stdout.splitlines() if line.startswith("NF4 in bitsandbytes | ")]
    assert "1.000 ms on one device, by bitsandbytes 0.0.0; NOT the same bits | True ['1024', '1024', 'cpu']" in wrong
    assert wrong.replace("NOT the same", "same") == right
