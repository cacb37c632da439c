"""One cache for both: what the engine downloads huggingface_hub finds, and the other way round."""
import os
import subprocess
import sys

import pytest

from engine import ROOT

sys.path.append(os.path.join(ROOT, "tests", "py"))
import hub as local_hub  # noqa: E402

TINY = os.path.join(ROOT, "notebooks", "tiny")
BUILD = os.path.join(ROOT, os.environ.get("BUILD", "build"))
NAMES = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]


@pytest.fixture
def hub():
    files = {n: open(os.path.join(TINY, n), "rb").read() for n in NAMES}
    h = local_hub.Hub({"models/org/tiny": files, "datasets/org/rows": {"sub/train.jsonl": b'{"text": "a"}\n'}})
    yield h
    h.close()


def python(code, hub, home, offline):
    env = dict(os.environ, HF_HOME=str(home), HF_ENDPOINT=hub.url, HF_HUB_OFFLINE=offline, HF_HUB_DISABLE_XET="1", TRANSFORMERS_OFFLINE=offline)
    r = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert r.returncode == 0, r.stderr
    return r.stdout.split()


def ours(hub, home, *commands, offline="0"):
    env = dict(os.environ, HF_HOME=str(home), HF_ENDPOINT=hub.url, HF_HUB_OFFLINE=offline, QLORA_BUNDLED=os.path.join(ROOT, "notebooks"))
    r = subprocess.run([os.path.join(BUILD, "qlora"), *(w for c in commands for w in ("-c", c))], env=env, cwd=home, capture_output=True, text=True,
                       timeout=120)
    assert r.returncode == 0, r.stderr
    return r.stdout


def test_python_finds_ours(hub, tmp_path):
    ours(hub, tmp_path, "load org/tiny", "data org/rows")
    (snapshot,) = (tmp_path / "hub" / "models--org--tiny" / "snapshots").iterdir()
    code = """
import huggingface_hub as h, transformers
print(h.snapshot_download("org/tiny", local_files_only=True), h.try_to_load_from_cache("org/tiny", "model.safetensors"))
print(h.snapshot_download("org/rows", repo_type="dataset", local_files_only=True))
m = transformers.AutoModelForCausalLM.from_pretrained("org/tiny")
t = transformers.AutoTokenizer.from_pretrained("org/tiny")
print(type(m).__name__, len(t))
print(*sorted(f"{r.repo_id}:{r.repo_type}:{len(r.refs)}" for r in h.scan_cache_dir().repos), len(h.scan_cache_dir().warnings))
"""
    out = python(code, hub, tmp_path, "1")
    assert out[:2] == [str(snapshot), str(snapshot / "model.safetensors")]
    assert os.path.isfile(os.path.join(out[2], "sub", "train.jsonl"))
    assert out[3:] == ["LlamaForCausalLM", "1024", "org/rows:dataset:1", "org/tiny:model:1", "0"]
    # Asked anew with a network, nothing is fetched again.
    blobs = {p: p.stat().st_mtime_ns for p in (tmp_path / "hub" / "models--org--tiny" / "blobs").iterdir()}
    python("import huggingface_hub as h; h.snapshot_download('org/tiny')", hub, tmp_path, "0")
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "hub" / "models--org--tiny" / "blobs").iterdir()} == blobs


def test_we_find_pythons(hub, tmp_path):
    (folder,) = python("import huggingface_hub as h; print(h.snapshot_download('org/tiny'))", hub, tmp_path, "0")
    python("import huggingface_hub as h; h.snapshot_download('org/rows', repo_type='dataset')", hub, tmp_path, "0")
    asked = len(hub.requests)
    assert "org/tiny" in ours(hub, tmp_path, "load org/tiny", "data org/rows", offline="1") and len(hub.requests) == asked
    assert "org/tiny" in ours(hub, tmp_path, "load org/tiny") and len(hub.requests) == asked
    ours(hub, tmp_path, "load tiny", "data org/rows")  # of data the hub is asked; the file is there
    assert not [p for p, _ in hub.requests[asked:] if "/resolve/" in p]
