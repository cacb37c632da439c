#!/usr/bin/env python3
"""An engine that computes nothing and speaks the protocol of core/qlora.h over fd 3: what the client must live
with. FAKE_ENGINE holds words that say how it misbehaves; what it "trains" is a made-up curve."""
import json
import math
import os
import signal
import socket
import sys
import time

GIB = 1 << 30
how = os.environ.get("FAKE_ENGINE", "").split()
pace = next((float(w[5:]) for w in how if w.startswith("pace=")), 0.01)
X = ' <img src=x onerror=alert(1)>"\'&amp; $\\frac$ \x1b[31m\x07 🦙' if "hostile" in how else ""   # behind every name and text
DEVICES = [{"name": "Fake T4" + X, "id": f"00:0{4 + i}.0", "backend": "cuda", "total": 15 * GIB, "free": 14 * GIB, "arch": "sm_75"} for i in range(2)]

if "--devices" in sys.argv:
    if "devices-fail" in how:
        print("no driver here", file=sys.stderr)
        sys.exit(3)
    print(json.dumps(DEVICES))
    sys.exit(0)
if "deaf" in how:
    time.sleep(60)
if "die-at-start" in how:
    print("libcudart.so.12: cannot open shared object file", file=sys.stderr)
    sys.exit(127)

sock = socket.socket(fileno=3)
start = time.time()
pending = b""


def send(ev, **more):
    sock.sendall(json.dumps({"ev": ev, "t": round(time.time() - start, 4), **more}).encode() + b"\n")


def command(timeout=None):
    """The next command; None when none came in time. End of input ends the engine."""
    global pending
    while b"\n" not in pending:
        sock.settimeout(timeout)
        try:
            part = sock.recv(1 << 16)
        except (TimeoutError, BlockingIOError):
            return None
        finally:
            sock.settimeout(None)
        if not part:
            os._exit(0)
        pending += part
    line, pending = pending.split(b"\n", 1)
    return json.loads(line)


def memory(step, send=send):
    devices = []
    for i in range(2):
        parts = {"base": int(2.9 * GIB), "adapters": 160 << 20, "optimizer": 320 << 20, "activations": int((1.2 + 0.3 * math.sin(step / 7 + i)) * GIB),
                 "scratch": 420 << 20, "runtime": 610 << 20, **({"mine" + X: 1 << 28} if X else {})}
        total = sum(parts.values())
        devices.append({"rank": i, "name": "Fake T4" + X, "bytes": parts, "arena": total - parts["runtime"], "peak": total + (200 << 20), "process": total,
                        "used": total, "total": 15 * GIB, "temperature": 61 + i, "power": 64.5})
    send("memory", devices=devices, host=2 * GIB)


def loss_at(step, seed):
    return 1.1 + 2.2 * math.exp(-step / 18) + 0.09 * math.sin(step * 12.9898 + seed)


def train(c):
    job, path = c["job"], c["run"]
    while "wait-for-go" in how and not os.path.exists("go"):
        time.sleep(0.01)
    os.makedirs(path, exist_ok=True)
    with open(f"{path}/job.json", "w") as f:
        json.dump(job, f)
    most = job.get("max_steps", 30)
    world = 1 if job.get("devices") in ("cpu", "0") else 2
    first = int(c["resume"].rsplit("-", 1)[1]) if "resume" in c else 0
    log = open(f"{path}/events.jsonl", "a")

    def both(ev, **more):
        log.write(json.dumps({"ev": ev, **more}) + "\n")
        log.flush()
        send(ev, **more)

    def checkpoint(step):
        folder = f"{path}/checkpoint-{step}"
        os.makedirs(folder, exist_ok=True)
        for name in ("adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors", "trainer_state.json", "engine_state.json"):
            with open(f"{folder}/{name}", "w") as f:
                f.write("{}")
        both("checkpoint", step=step, path=folder)
        return folder

    send("state", state="placing", text="placing weights" + X)
    for i in range(0, 5):
        send("progress", what="load", done=i * GIB, total=4 * GIB)
        time.sleep(pace)
    both("start", run=path, max_steps=most, epochs=1.0, world=world, backend="cuda", dtype="float16", store="sharded", schedule="loop", resumed=first,
         trainable="trainable params: 41,943,040" + X, samples_per_step=8, devices=[{"rank": i, "name": "Fake T4" + X, "total": 15 * GIB} for i in range(world)],
         text=["sharded (auto: 2.9 GiB of 5.7 GiB per device)" + X])
    send("state", state="training", text="training")
    if "warn" in how:
        send("log", level="warning", text="3 of 120 rows have no trained token" + X)
    history = []
    stop_at = min(most, c.get("steps", most))
    for step in range(first + 1, stop_at + 1):
        time.sleep(pace)
        c2 = command(0.0001)
        if c2 and c2["cmd"] == "stop" and "ignore-stop" not in how:
            where = checkpoint(step - 1) if step - 1 > 0 else None
            send("stopped", id=c["id"], step=step - 1, checkpoint=where)
            return
        if step == 5:
            for w in how:
                if w == "abort":
                    print("CUDA error: an illegal memory access was encountered\nat rank 1, step 5", file=sys.stderr, flush=True)
                    os.abort()
                if w == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if w == "oom":
                    send("error", id=c["id"], status="out of memory", text="needs 1.2 GiB, 0.4 GiB free; --max_length 1024 fits", rank=1, step=5)
                    return
                if w == "hang":
                    while True:
                        time.sleep(60)
                if w == "garbage":
                    sock.sendall(b"hello\n\xff\xfe\n[1,2]\n{\"ev\":5}\n{}\n" + b"x" * 100000 + b"\n")
                if w == "loud":
                    os.write(2, b"words and words\n" * (1 << 20))
                if w == "noise":
                    sock.sendall(b"not an event\n" * 300)
                if w == "huge":
                    send("log", level="info", text="y" * (8 << 20))
                if w == "endless":
                    while True:
                        sock.sendall(b"z" * (1 << 20))
                if w == "flood":
                    for i in range(20000):
                        send("log", level="info", text="one of many")
        skipped = "fp16" in how and step in (2, 3)
        loss = None if "nan" in how and step == 4 else loss_at(step, job.get("seed", 0))
        ev = dict(step=step, loss=loss, grad_norm=None if skipped else 0.4 + 0.2 * math.cos(step), learning_rate=2e-4 * (1 - step / most),
                  epoch=step / most, tokens=4096, tokens_per_second=5210.0 + step, seconds=pace, loss_scale=65536.0, skipped=skipped,
                  loss_bits=("%016x" % hash(loss) if world == 2 or "drift" not in how else "0"))
        both("step", **ev)
        history.append({k: ev[k] for k in ("step", "loss", "grad_norm", "learning_rate", "epoch")})
        if step % 10 == 0:
            both("eval", step=step, eval_loss=loss_at(step, 1) + 0.12, eval_runtime=0.5)
            memory(step, both)
            checkpoint(step)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        with open(f"{path}/{name}", "w") as f:
            f.write("{}")
    send("done", id=c["id"], result={"run": path, "step": stop_at, "train_loss": 1.5, "train_runtime": time.time() - start, "tokens_per_second": 5230.0,
                                     "adapter": path, "log_history": history})


def generate(c):
    prompts = c.get("prompts") or [m[-1]["content"] for m in c["messages"]]
    texts, base = [], []
    for i, p in enumerate(prompts):
        for variant, out in (("adapter", texts), ("base", base)):
            if variant == "base" and not c.get("compare"):
                continue
            words = ["Да, "] * 20 if "cyrillic" in how else [" Paris", ",", " of", " course", "."] if variant == "adapter" else [" the", " the", " the"]
            for w in words:
                send("token", prompt=i, variant=variant, text=w)
                time.sleep(pace)
            out.append("".join(words) + X)
    send("done", id=c["id"], result={"texts": texts, "base": base})


send("ready", version="9.9.9" if "other-version" in how else "0.1.0")
while True:
    c = command()
    if c.get("adapter") and not os.path.exists(c["adapter"] + "/adapter_config.json"):
        send("error", id=c["id"], status="invalid argument", text=f"{c['adapter']} has no adapter_config.json: not a PEFT adapter")
    elif c["cmd"] == "train":
        train(c)
    elif c["cmd"] == "eval":
        send("done", id=c["id"], result={"eval_loss": 1.234, "eval_runtime": 0.7})
    elif c["cmd"] == "generate":
        generate(c)
    elif c["cmd"] == "memory":
        memory(0)
        send("done", id=c["id"], result={})
    elif c["cmd"] == "verify":
        send("done", id=c["id"], result={"checks": [{"name": "base bytes" + X, "ok": True, "text": "2.9 GiB on each of 2 devices, 5.7 GiB in the file" + X},
                                                    {"name": "adapter reloaded", "ok": "bad-adapter" not in how, "text": "loss 1.0450, as at the end of training"}]})
    elif c["cmd"] == "unload":
        send("done", id=c["id"], result={"held": True})
    elif c["cmd"] == "echo-env":
        send("done", id=c["id"], result={"blas": os.environ.get("OPENBLAS_NUM_THREADS")})
    elif c["cmd"] != "stop":
        send("error", id=c["id"], status="not supported", text=f"unknown command '{c['cmd']}'")
