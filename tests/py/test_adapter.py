"""A run that starts from an adapter: on any number of ranks, resumed, by a run's name, and what the verbs make of it."""
import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest

from engine import Engine, job
from front_end import BUILD, ROOT

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "rank_pattern": {"layers.1.self_attn.q_proj": 3}, "lora_dropout": 0.1}


@pytest.fixture
def engine(tmp_path):
    e = Engine(tmp_path)
    yield e
    e.close()


def losses(events):
    return [e["loss_bits"] for e in events if e["ev"] == "step"]


def train(engine, run, resume=None, **settings):
    settings = dict(dict(learning_rate=1e-3, max_steps=6), **settings)
    events, end = engine.run("train", job=job(**settings), run=str(run), **({"resume": resume} if resume else {}))
    assert end["ev"] == "done", end
    return events


def test_same_bits_everywhere(engine, tmp_path):
    train(engine, tmp_path / "first", **LORA)
    first = str(tmp_path / "first")
    one = train(engine, tmp_path / "one", adapter=first, gradient_accumulation_steps=4)
    start = next(e for e in one if e["ev"] == "start")
    assert f"adapters start from {first}" in start["text"], start
    # The adapter's own settings, not the defaults.
    config = json.loads((tmp_path / "one" / "adapter_config.json").read_text())
    assert config["r"] == 4 and config["lora_alpha"] == 8 and config["rank_pattern"] == LORA["rank_pattern"] and config["lora_dropout"] == 0.1
    two = train(engine, tmp_path / "two", adapter=first, gradient_accumulation_steps=2, devices="cpu:2", fsdp=True)
    assert losses(one) == losses(two) and len(set(losses(one))) == 6
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    fresh = train(engine, tmp_path / "fresh", gradient_accumulation_steps=4, **LORA)
    assert losses(fresh)[0] != losses(one)[0]
    # A learning rate of zero leaves it as it was, a fresh optimizer or not.
    train(engine, tmp_path / "still", adapter=first, learning_rate=0.0, max_steps=2)
    assert (tmp_path / "still" / "adapter_model.safetensors").read_bytes() == (tmp_path / "first" / "adapter_model.safetensors").read_bytes()


def test_resumed_without_what_it_started_from(engine, tmp_path):
    train(engine, tmp_path / "first", **LORA)
    first = str(tmp_path / "first")
    whole = train(engine, tmp_path / "whole", adapter=first, save_steps=3)
    shutil.rmtree(first)
    again = train(engine, tmp_path / "whole", adapter=first, resume=str(tmp_path / "whole" / "checkpoint-3"))
    assert losses(again) == losses(whole)[3:]
    assert not [e for e in again if e["ev"] == "log"], "nothing differs from what the run was given"
    events, end = engine.run("train", job=job(adapter=first), run=str(tmp_path / "none"))
    assert end["ev"] == "error" and first in end["text"] and "not a PEFT adapter" in end["text"], end


def test_refused(engine, tmp_path):
    train(engine, tmp_path / "first", max_steps=1, **LORA)
    events, end = engine.run("train", job=job(adapter=str(tmp_path / "first"), lora_alpha=16), run=str(tmp_path / "no"))
    assert end["ev"] == "error" and "lora_alpha is 16 in the job and 8 in" in end["text"], end
    config = tmp_path / "first" / "adapter_config.json"
    config.write_text(config.read_text().replace('"use_dora": false', '"use_dora": true'))
    events, end = engine.run("train", job=job(adapter=str(tmp_path / "first")), run=str(tmp_path / "no"))
    assert end["ev"] == "error" and "use_dora" in end["text"], end


def test_patterns_keep_their_order(engine, tmp_path):
    """The first pattern that matches holds, in the run's files as in its job; the name that comes first in the alphabet is another."""
    patterns = {"r": 4, "target_modules": ["q_proj", "down_proj"], "rank_pattern": {"self_attn.q_proj": 3, "q_proj": 2},
                "alpha_pattern": {"model.layers.0.mlp.down_proj": 64, "down_proj": 2}}
    whole = train(engine, tmp_path / "run", save_steps=3, **patterns)
    for file in ("adapter_config.json", "job.json"):
        saved = json.loads((tmp_path / "run" / file).read_text())
        for key in ("rank_pattern", "alpha_pattern"):
            assert list(saved[key].items()) == list(patterns[key].items()), file
    again = train(engine, tmp_path / "run", save_steps=3, resume=str(tmp_path / "run" / "checkpoint-3"), **patterns)
    assert losses(again) == losses(whole)[3:]
    engine.ask("generate", job=job(), adapter=str(tmp_path / "run"), prompts=["Mira was a"], max_new_tokens=2)


def test_verbs(tmp_path):
    text = """load tiny
data tiny
config --devices cpu --max_length 64 --max_steps 3 --r 4 --lora_alpha 8 --target_modules q_proj,v_proj --learning_rate 1e-3
train
config --reset
config --devices cpu --max_length 64 --max_steps 3 --adapter run-1
plan
train
train --adapter run-2
verify
eval run-3
config --adapter run-1
load ./other
config --adapter run-2
load tiny --adapter run-1
baseline run-3
config --r 8
"""
    shutil.copytree(ROOT / "notebooks" / "tiny", tmp_path / "other")
    env = dict(os.environ, QLORA_BUNDLED=str(ROOT / "notebooks"))
    env.pop("QLORA_ENGINE", None)
    p = subprocess.run([str(BUILD / "qlora")], input=text, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert p.returncode == 1 and "r is 8 in the job and 4 in runs/run-1" in p.stdout + p.stderr, p.stdout[-3000:] + p.stderr
    jobs = [json.loads((tmp_path / "runs" / f"run-{i}" / "job.json").read_text()) for i in (1, 2, 3)]
    assert "adapter" not in jobs[0] and jobs[1]["adapter"].endswith("runs/run-1") and jobs[2]["adapter"].endswith("runs/run-2")
    assert "r" not in jobs[1]
    configs = [json.loads((tmp_path / "runs" / f"run-{i}" / "adapter_config.json").read_text()) for i in (1, 3)]
    assert configs[0] == configs[1] and configs[1]["r"] == 4
    assert "adapters start from runs/run-2" in p.stdout
    assert re.search(r"3/3 losses: same bits", p.stdout), p.stdout[-3000:]
    assert re.search(r"✓ +first loss again", p.stdout) and "✗" not in p.stdout, p.stdout[-3000:]


def test_generate_takes_it(tmp_path):
    """Before any run of this session the adapter that is set is the one that speaks."""
    env = dict(os.environ, QLORA_BUNDLED=str(ROOT / "notebooks"))
    env.pop("QLORA_ENGINE", None)
    common = "load tiny\nconfig --devices cpu\n"

    def last(text):
        p = subprocess.run([str(BUILD / "qlora")], input=common + text, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
        assert p.returncode == 0, p.stdout + p.stderr
        return p.stdout

    last("data tiny\ntrain --max_steps 40 --learning_rate 2e-2 --max_length 64 --run_name strong")
    ask = 'generate "The" --max_new_tokens 24'
    strong, base, told = last(f"{ask} --run strong"), last(ask), last(f"config --adapter strong\n{ask}")
    tail = lambda s: s[s.rindex("The"):]  # noqa: E731
    assert tail(told) == tail(strong) != tail(base)
