"""Models and data by their hub names, end to end against a local server; tokens stay where they belong."""
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
from clock import Clock, catches, wait_for
from engine import TINY
from front_end import BUILD, environment
from hub import TOKEN, Hub

MODEL = {n: (TINY / n).read_bytes() for n in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json")}
ROWS = b"".join(json.dumps({"text": f"row {i} of some text"}).encode() + b"\n" for i in range(32))
ENGINE = BUILD / "qlora-engine"
SETTINGS = "--devices cpu:1 --max_steps 2 --max_length 64"


@pytest.fixture
def hub():
    h = Hub({"models/org/tiny": {**MODEL, "consolidated.safetensors": b"twice", "README.md": b"words"}, "models/org/gated": MODEL,
             "datasets/org/rows": {"train.jsonl": ROWS, "README.md": b"words"}, "datasets/org/many": {"a.jsonl": ROWS, "b.jsonl": ROWS}, "datasets/org/parquet": {"a.parquet": b"PAR1"}}, gated={"models/org/gated"})
    yield h
    h.close()


def qlora(hub, tmp_path, *commands, **env):
    e = dict(environment(engine=ENGINE), HF_HOME=str(tmp_path / "home"), HF_ENDPOINT=getattr(hub, "url", hub))
    for k in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE"):
        e.pop(k, None)
    e.update(env)
    words = [w for c in commands for w in ("-c", c)]
    return subprocess.Popen([str(BUILD / "qlora"), *words], cwd=tmp_path, env=e, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(*args, **env):
    p = qlora(*args, **env)
    out, err = p.communicate(timeout=300)
    return p.returncode, out, err


def test_a_model_comes_into_the_standard_cache(hub, tmp_path):
    rc, out, err = run(hub, tmp_path, "load org/tiny")
    assert rc == 0, err
    folder = tmp_path / "home" / "hub" / "models--org--tiny"
    (path,) = (folder / "snapshots").iterdir()
    assert {p.name for p in path.iterdir()} == set(MODEL)
    assert all((path / n).read_bytes() == data for n, data in MODEL.items())
    # What is whole is taken without a question; a snapshot that is not, is completed.
    asked = len(hub.requests)
    assert run(hub, tmp_path, "load org/tiny")[0] == 0 and len(hub.requests) == asked
    (path / "model.safetensors").resolve().unlink()
    (path / "model.safetensors").unlink()
    assert run(hub, tmp_path, "load org/tiny")[0] == 0
    assert (path / "model.safetensors").read_bytes() == MODEL["model.safetensors"]
    assert sum("safetensors" in p for p, _ in hub.requests) == 2
    # And it trains, and the adapter names the model as the hub does.
    rc, out, err = run(hub, tmp_path, "load org/tiny", "data org/rows", f"config {SETTINGS}", "train")
    assert rc == 0, err
    assert json.loads((tmp_path / "runs" / "run-1" / "adapter_config.json").read_text())["base_model_name_or_path"] == "org/tiny"


def test_offline(hub, tmp_path):
    rc, out, err = run(hub, tmp_path, "load org/tiny", HF_HUB_OFFLINE="1")
    assert rc == 1 and "HF_HUB_OFFLINE" in err and not hub.requests
    assert run(hub, tmp_path, "load org/tiny", "data org/rows")[0] == 0
    asked = len(hub.requests)
    assert run(hub, tmp_path, "load org/tiny", "data org/rows", HF_HUB_OFFLINE="1")[0] == 0 and len(hub.requests) == asked
    weights = next((tmp_path / "home").rglob("model.safetensors"))
    weights.resolve().unlink(), weights.unlink()
    rc, out, err = run(hub, tmp_path, "load org/tiny", HF_HUB_OFFLINE="1")
    assert rc == 1 and "org/tiny is in the cache only in part" in err and "HF_HUB_OFFLINE" in err and len(hub.requests) == asked


def test_what_cannot_be_fetched_says_why(hub, tmp_path):
    assert "no such repository" in run(hub, tmp_path, "load org/none")[2]
    assert 'datasets.load_dataset("org/parquet"' in run(hub, tmp_path, "load tiny", "data org/parquet")[2]
    text = run(hub, tmp_path, "load org/gated")[2]
    assert "401" in text and "Agree and access repository" in text and "HF_TOKEN" in text
    text = run(hub, tmp_path, "load org/gated", HF_TOKEN="hf_wrong_token_of_mine")[2]
    assert "403" in text and "your token" in text and "hf_wrong" not in text
    assert run(hub, tmp_path, "load org/gated", HF_TOKEN=TOKEN)[0] == 0


def test_the_variables_are_read_as_python_reads_them(hub, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text(TOKEN + "\n")
    assert run(hub, tmp_path, "load org/gated", HF_TOKEN="", HF_HUB_OFFLINE="false", HF_HUB_CACHE="")[0] == 0
    (tmp_path / "home" / "token").unlink()
    shutil.rmtree(tmp_path / "home" / "hub")
    assert run(hub, tmp_path, "load org/gated", HUGGING_FACE_HUB_TOKEN=TOKEN)[0] == 0
    assert "HF_HUB_OFFLINE" in run(hub, tmp_path, "load org/tiny", HF_HUB_OFFLINE="ON")[2]


def test_a_password_in_the_address_is_not_shown(hub, tmp_path):
    text = run(hub, tmp_path, "load org/none", HF_ENDPOINT=hub.url.replace("://", "://me:hush@"))[2]
    assert f"on {hub.url}" in text and "hush" not in text, text
    text = run(hub, tmp_path, "load org/gated", HF_ENDPOINT=hub.url.replace("://", "://me:hush@"))[2]
    assert f"{hub.url}/org/gated" in text and "hush" not in text, text


def test_data_files_are_what_is_fetched(hub, tmp_path):
    assert run(hub, tmp_path, "load tiny", "data org/many --data_files b.jsonl")[0] == 0
    assert [p for p, _ in hub.requests if "/resolve/" in p and p.endswith("a.jsonl")] == []
    assert [p for p, _ in hub.requests if "/resolve/" in p and p.endswith("b.jsonl")]


def fetching(process, tmp_path):
    """Whether it is at a large file of which there is some, or waits for who is: its lock is open."""
    begun = [f.name.removesuffix(".incomplete") for f in (tmp_path / "home").rglob("*.incomplete") if f.stat().st_size > 1 << 15]
    held = {os.path.basename(os.path.realpath(f)) for f in pathlib.Path(f"/proc/{process.pid}/fd").iterdir()}
    return any(f"{hash}.lock" in held for hash in begun)


def test_stop(hub, tmp_path):
    hub.slow = 0.3
    p = qlora(hub, tmp_path, "load org/tiny")
    assert wait_for(lambda: fetching(p, tmp_path))
    time.sleep(0.5)
    clock = Clock()
    p.send_signal(signal.SIGINT)
    assert p.wait(60) == 130 and "goes on from there" in p.stderr.read()
    assert clock.seconds() < 2
    hub.slow = 0
    assert run(hub, tmp_path, "load org/tiny")[0] == 0


def test_two_processes_fetch_once(hub, tmp_path):
    hub.slow = 0.05
    both = [qlora(hub, tmp_path, "load org/tiny") for _ in range(2)]
    for p in both:
        out, err = p.communicate(timeout=300)
        assert p.returncode == 0, err
    (path,) = (tmp_path / "home" / "hub" / "models--org--tiny" / "snapshots").iterdir()
    assert all((path / n).read_bytes() == data for n, data in MODEL.items())
    assert sum("model.safetensors" in p for p, _ in hub.requests) == 1
    assert not list((tmp_path / "home").rglob("*.incomplete"))


def test_stop_while_another_process_fetches(hub, tmp_path):
    hub.slow = 0.3
    first = qlora(hub, tmp_path, "load org/tiny")
    assert wait_for(lambda: fetching(first, tmp_path))
    second = qlora(hub, tmp_path, "load org/tiny")
    assert wait_for(lambda: fetching(second, tmp_path))
    clock = Clock()
    second.send_signal(signal.SIGINT)
    assert second.wait(60) == 130 and "another process is at it" in second.stderr.read()
    assert clock.seconds() < 2
    hub.slow = 0
    assert first.wait(300) == 0


def test_stop_while_a_server_is_not_there(tmp_path):
    p = qlora("http://127.0.0.1:9", tmp_path, "load org/tiny")
    assert wait_for(lambda: catches(p.pid, signal.SIGINT))
    time.sleep(1)
    assert p.poll() is None
    clock = Clock()
    p.send_signal(signal.SIGINT)
    assert p.wait(60) == 130 and clock.seconds() < 2


def everything(folder):
    return b"".join(p.read_bytes() for p in pathlib.Path(folder).rglob("*") if p.is_file())


def command_lines():
    out = b""
    for p in pathlib.Path("/proc").iterdir():
        if p.name.isdigit():
            try:
                out += (p / "cmdline").read_bytes()
            except OSError:
                pass
    return out



@pytest.mark.parametrize("how", ["environment", "file"])
def test_the_shell_end_to_end(hub, tmp_path, how):
    home = tmp_path / "home"
    home.mkdir()
    env = dict(environment(engine=ENGINE), HF_HOME=str(home), HF_ENDPOINT=hub.url)
    for k in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN_PATH"):
        env.pop(k, None)
    if how == "environment":
        env["HF_TOKEN"] = TOKEN
    else:
        (home / "token").write_text(TOKEN + "\n")
    work = tmp_path / "work"
    work.mkdir()
    text = f"load org/gated\ndata org/rows\nconfig {SETTINGS}\ntrain\nverify\n"
    p = subprocess.Popen([str(BUILD / "qlora")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=work, env=env, text=True)
    p.stdin.write(text)
    p.stdin.close()
    seen = b""
    while p.poll() is None:
        seen += command_lines()
    out, err = p.stdout.read(), p.stderr.read()
    assert p.returncode == 0, err + out
    assert "org/gated" in out and "7 of 7 checks hold" in out
    for where in (out.encode(), err.encode(), everything(work), seen, everything(home / "hub")):
        assert TOKEN.encode() not in where
    assert ("api/models/org/gated/revision/main", f"Bearer {TOKEN}") in hub.requests


def test_python(hub, tmp_path):
    """A token set in a cell counts; a run whose download was cleared away fetches it again."""
    env = dict(environment(engine=ENGINE), HF_HOME=str(tmp_path / "home"), HF_ENDPOINT=hub.url)
    env.pop("HF_TOKEN", None)
    code = f'''
import os, shutil, qlora
try:
    qlora.run("load", "org/gated")
    raise SystemExit("not refused")
except qlora.Error as e:
    assert "Agree and access" in str(e)
os.environ["HF_TOKEN"] = "{TOKEN}"
qlora.run("load", "org/gated")
qlora.run("data", "org/rows")
qlora.run("config", devices="cpu:1", max_steps=2, max_length=64)
r = qlora.run("train")
qlora.run("unload")
shutil.rmtree(os.path.join(os.environ["HF_HOME"], "hub"))
v = qlora.run("verify", r.name)
assert all(c["ok"] for c in v["checks"]), v
assert "{TOKEN}" not in repr(dict(r)) + repr(dict(v))
'''
    r = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert r.returncode == 0, r.stderr + r.stdout
    assert TOKEN not in r.stdout + r.stderr


def test_kaggle_secret(hub, tmp_path):
    (tmp_path / "kaggle_secrets.py").write_text(f'class UserSecretsClient:\n    def get_secret(self, name):\n        assert name == "HF_TOKEN"\n        return "{TOKEN}"\n')
    env = dict(environment(engine=ENGINE), HF_HOME=str(tmp_path / "home"), HF_ENDPOINT=hub.url, KAGGLE_KERNEL_RUN_TYPE="Interactive")
    env.pop("HF_TOKEN", None)
    env["PYTHONPATH"] += os.pathsep + str(tmp_path)
    r = subprocess.run([sys.executable, "-c", 'import qlora; qlora.run("load", "org/gated")'], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert r.returncode == 0, r.stderr


def test_a_full_disk_is_said_with_what_to_do(hub, tmp_path):
    """Played by a limit on a file's size; what came is gone on from."""
    env = dict(environment(engine=ENGINE), HF_HOME=str(tmp_path / "home"), HF_ENDPOINT=hub.url)
    small = len(MODEL["model.safetensors"]) // 2

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)   # else it ends the program, where a disk gives an error
        resource.setrlimit(resource.RLIMIT_FSIZE, (small, small))
    done = subprocess.run([BUILD / "qlora", "-c", "load org/tiny"], cwd=tmp_path, env=env, preexec_fn=limit, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "model.safetensors: cannot be written: " in done.stderr and "set HF_HOME to a folder with more" in done.stderr, done.stderr
    assert run(hub, tmp_path, "load org/tiny")[0] == 0
