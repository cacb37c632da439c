"""Checkpoints by the clock: the ranks agree on the step, and a run resumed from one ends in the same bits."""
import json

from front_end import BUILD, python


def test_by_the_clock_and_resumed(tmp_path):
    engine = {"QLORA_ENGINE": str(BUILD / "qlora-engine")}
    text = f"""
import os; os.environ.update({engine!r})
import json, qlora
qlora.run("load", "tiny"); qlora.run("data", "tiny")
qlora.run("config", devices="cpu:2", fsdp=True, max_length=64, max_steps=150, save_minutes=0.001, lora_dropout=0.1)
a = qlora.run("train", run_name="clock")
steps = sorted(int(p.name.split("-")[1]) for p in a.path.glob("checkpoint-*"))
b = qlora.run("train", run_name="plain", save_minutes=0)
# The last event of a checkpoint is removed with all later ones: what is left is what a killed session leaves.
import shutil
for s in steps[1:]:
    shutil.rmtree(a.path / f"checkpoint-{{s}}")
c = qlora.run("resume", str(a.path))
print("RESULT", json.dumps([steps, a.loss[-1] == b.loss[-1], c.loss[-1] == b.loss[-1], len(list(b.path.glob("checkpoint-*")))]))
"""
    out = python(text, tmp_path)
    lines = [line for line in out.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, out.stdout + out.stderr
    steps, same, resumed, plain = json.loads(lines[0][7:])
    assert len(steps) > 2 and steps[-1] == 150, steps
    assert same and resumed and plain == 1
