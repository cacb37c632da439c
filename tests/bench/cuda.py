"""cuda.py BUILD [OUT.md]: what `make bench-cuda` runs once everything is built: ceilings, every op against its own, loading, NCCL's settings,
whole steps, where a step's time goes, and the Hugging Face libraries in the same run, as Markdown. At most LIMIT seconds (480): what no
time was left for is named. With a name the result is written there too, above what is kept there by hand.

Scratch folders lie in $TMPDIR: 9 GB. PARTS="ops steps" runs these alone. PEERS: modes of peer.py."""
import datetime
import glob
import importlib.util
import json
import os
import pathlib
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build").resolve()
LIMIT = float(os.environ.get("LIMIT", 480))
PEERS = os.environ.get("PEERS", "bf16-8b-keep-compile bf16-8b-ckpt-compile bf16-1b-keep-compile").split()
BEGAN = time.monotonic()
BF16 = {"dtype": "bfloat16"}
FOUR, ONE = {"per_device_train_batch_size": 4}, {"per_device_train_batch_size": 1}
BY_HAND = "\n<!-- kept by hand from here on -->"
text = []


def say(line=""):
    print(line, flush=True)
    text.append(line)


def left():
    return LIMIT - (time.monotonic() - BEGAN)


def run(what, command, most, code=False, env=None):
    """The command's lines as they come; a failure or a lack of time is a line too."""
    seconds = min(most, left())
    if seconds < 15:
        say(f"*{what}: no time was left*")
        return False
    if code:
        say("```")
    p = subprocess.Popen([str(c) for c in command], cwd=ROOT, env=dict(os.environ, **(env or {})), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = p.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        p.kill()
        out, err = p.communicate()
        err = f"ended after {seconds:.0f} s"
    for line in out.splitlines():
        say(line)
    if code:
        say("```")
    if p.returncode:
        say(f"*{what}: exit status {p.returncode}: {' '.join(err.strip().splitlines()[-2:])[:400]}*")
    return p.returncode == 0


def libraries():
    """cuBLAS and NCCL as pip installs them."""
    places = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()])
    found = [d for p in places for d in sorted(glob.glob(p + "/nvidia/*/lib"))]
    os.environ["LD_LIBRARY_PATH"] = ":".join([*filter(None, [os.environ.get("LD_LIBRARY_PATH")]), *found])
    os.environ.update(QLORA_ENGINE=str(BUILD / "tests/engine_cuda"), OPENBLAS_NUM_THREADS="1")


def gpus():
    out = subprocess.run(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"], capture_output=True, text=True)
    return out.stdout.strip().splitlines() if out.returncode == 0 else []


def jobs(*list_of):
    return [x for name, job in list_of for x in (name, json.dumps(job))]


def steps(m8, m1, long, count):
    one = {"devices": "cuda:0"}
    train = [sys.executable, "tests/bench/train.py"]
    say("\n## Whole steps, one GPU\n")
    run("8B steps", [*train, m8, *jobs(
        ("8B 4×2048 bf16, ≤ 10.5 GiB", {**one, **FOUR, **BF16, "device_memory": "11.1GiB", "bar": 13000}),
        ("8B 4×2048 fp16 + scaler, ≤ 10.5 GiB", {**one, **FOUR, "dtype": "float16", "device_memory": "11.1GiB", "bar": 12500}),
        ("8B 4×2048 bf16, ≤ 40 GiB", {**one, **FOUR, **BF16, "device_memory": "40.7GiB", "bar": 18000}),
        ("8B 1×2048 bf16", {**one, **ONE, **BF16, "bar": 16000}),
        ("8B 1×8192 bf16", {**one, **ONE, **BF16, "train_data": f"{long}/train.data", "bar": 14500}),
        ("8B 4×2048 bf16, all recomputed", {**one, **FOUR, **BF16, "gradient_checkpointing": True, "gradient_accumulation_steps": max(2, count)}))], 150)
    say()
    run("1B steps", [*train, m1, *jobs(("1B 4×2048 bf16", {**one, **FOUR, **BF16, "bar": 80000}), ("1B 1×2048 bf16", {**one, **ONE, **BF16, "bar": 55000}))], 60)
    if count < 2:
        say("\n*One GPU: several were not measured.*")
        return
    two = {**FOUR, **BF16, "devices": "cuda:0,1", "gradient_checkpointing": True}
    say("\n## Whole steps, two GPUs, all recomputed (bars against the one-GPU row above: 1.95×, 1.9×, 1.8×)\n")
    run("steps on two GPUs", [*train, m8, *jobs(("resident", {**two, "fsdp": False}), ("sharded", {**two, "fsdp": True}),
                                                ("sharded 1×2048 each", {**two, **ONE, "fsdp": True}))], 100)
    run("steps on two GPUs without P2P", [*train, m8, *jobs(("sharded, no P2P", {**two, "fsdp": True}))], 60, env={"NCCL_P2P_DISABLE": "1"})


def peers():
    say("\n## The Hugging Face libraries in the same run (transformers + peft + bitsandbytes, tests/bench/peer.py)\n")
    missing = [m for m in ("torch", "transformers", "peft", "bitsandbytes") if importlib.util.find_spec(m) is None]
    if missing:
        say(f"*not measured: Python here lacks {', '.join(missing)}*")
        return
    say("| mode | tokens/s | ms/step | peak GiB |\n|---|---|---|---|")
    for mode in PEERS:
        run(mode, [sys.executable, "tests/bench/peer.py", mode], 150)


def main():
    libraries()
    cards, parts = gpus(), os.environ.get("PARTS", "ops load nccl steps profile peers").split()
    if not cards:
        raise SystemExit("bench-cuda: no GPU answers nvidia-smi")
    t = BUILD / "tests"
    say(f"# Measured on {len(cards)} × {cards[0]}\n\n{datetime.date.today()}, `make bench-cuda`; random weights at real shapes (tests/bench/make_model.c).\n")
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="bench-cuda-"))
    try:
        if "ops" in parts:
            say("## Ceilings, and every op against its own\n")
            run("bench_cuda", [t / "bench_cuda"], 120)
        m8, m1, long = (scratch / n for n in ("8b", "1b", "long"))
        if {"load", "steps", "profile"} & set(parts):
            ok = all(subprocess.run([t / "make_model_cuda", *a], cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0
                     for a in (("8b", m8), ("1b", m1), ("tiny", long, "8192")))
            if not ok:
                say("*no room for the models of random weights: loading and steps are left out*")
                parts = [p for p in parts if p not in ("load", "steps", "profile")]
        if "load" in parts:
            say("\n## Loading the 8B\n\n| what | time | rate | |\n|---|---|---|---|")
            run("loading", [t / "load_cuda", m8, "cuda"], 90)
        if "nccl" in parts:
            say("\n## NCCL\n")
            run("NCCL", [t / "comm_cuda", "--bench"], 90)
        if "steps" in parts:
            steps(m8, m1, long, len(cards))
        if "profile" in parts:
            say("\n## Where a step's time goes: 8B 4×2048 bf16, ≤ 40 GiB; streamed from the host, 1×2048; sharded over two GPUs, 1×2048\n")
            run("profile", [t / "profile_cuda", m8, json.dumps({**FOUR, **BF16, "devices": "cuda:0", "device_memory": "40.7GiB"})], 40, code=True)
            run("profile", [t / "profile_cuda", m8, json.dumps({**ONE, **BF16, "devices": "cuda:0", "store": "host", "gradient_checkpointing": True})], 40, code=True)
            if len(cards) > 1:
                run("profile", [t / "profile_cuda", m8, json.dumps({**ONE, **BF16, "devices": "cuda:0,1", "fsdp": True, "gradient_checkpointing": True})], 40, code=True)
        if "peers" in parts:
            peers()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    say(f"\n{time.monotonic() - BEGAN:.0f} s")
    if len(sys.argv) > 2:
        kept = pathlib.Path(sys.argv[2])
        old = kept.read_text() if kept.exists() else ""
        kept.write_text("\n".join(text) + "\n" + (old[old.index(BY_HAND):] if BY_HAND in old else ""))


main()
