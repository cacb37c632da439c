"""build/qlora-engine over its socket: what it does when a rank dies, stalls or is stopped, and when its front end goes away."""
import json
import os
import pathlib
import signal
import socket
import subprocess
import time

import pytest

from clock import Clock, children, wait_for

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("BUILD", ROOT / "build"))
BUILD = BUILD if BUILD.is_absolute() else ROOT / BUILD
ENDS = ("done", "error", "stopped")


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


class Engine:
    def __init__(self, cwd, *command):
        self.cwd = cwd
        self.ours, theirs = socket.socketpair()
        env = dict(os.environ, OPENBLAS_NUM_THREADS="1")
        number = theirs.fileno()
        self.process = subprocess.Popen(command or [str(BUILD / "qlora-engine")], cwd=cwd, env=env, stdin=subprocess.DEVNULL, pass_fds=[3],
                                        preexec_fn=lambda: os.dup2(number, 3) if number != 3 else os.set_inheritable(3, True))
        theirs.close()
        self.buffer, self.events, self.id = b"", [], 0
        self.until("ready")

    def event(self, timeout=120):
        end = time.monotonic() + timeout
        while b"\n" not in self.buffer:
            self.ours.settimeout(max(0.01, end - time.monotonic()))
            part = self.ours.recv(65536)
            assert part, f"the engine is gone ({self.process.poll()}): {self.events[-3:]}"
            self.buffer += part
        line, self.buffer = self.buffer.split(b"\n", 1)
        self.events.append(json.loads(line))
        return self.events[-1]

    def until(self, *names, when=lambda e: True, timeout=120):
        while True:
            e = self.event(timeout)
            if e["ev"] in names and when(e):
                return e
            assert e["ev"] not in ENDS or e["ev"] in names, e

    def send(self, cmd, then="", **fields):
        """then: lines that are there as soon as the command is."""
        self.id += 1
        self.ours.sendall((json.dumps(dict(fields, cmd=cmd, id=self.id)) + "\n" + then).encode())
        return self.id

    def train(self, run="runs/a", resume=None, steps=None, then="", **settings):
        job = dict({"model": str(ROOT / "notebooks/tiny"), "data": str(ROOT / "notebooks/tiny/train.jsonl"), "devices": "cpu:2", "max_length": 128,
                    "max_steps": 400, "lora_dropout": 0.05, "gradient_accumulation_steps": 2, "r": 8}, **settings)
        fields = {"job": job, "run": str(self.cwd / run)}
        if resume:
            fields["resume"] = resume
        if steps:
            fields["steps"] = steps
        return self.send("train", then, **fields)

    def ranks(self, n=2):
        pids = wait_for(lambda: children(self.process.pid) if len(children(self.process.pid)) == n else None)
        assert pids, f"{children(self.process.pid)} are not {n} ranks"
        return pids

    def works(self):
        """The next command on fresh ranks."""
        self.train(run="runs/after", max_steps=2)
        assert self.until(*ENDS)["ev"] == "done", self.events[-1]

    def losses(self):
        return {e["step"]: e["loss_bits"] for e in self.events if e["ev"] == "step"}

    def close(self):
        self.ours.close()
        self.process.wait(60)


@pytest.fixture
def engine(tmp_path):
    e = Engine(tmp_path)
    yield e
    pids = children(e.process.pid)
    e.close()
    assert not [p for p in pids if alive(p)], "ranks outlive the engine"
    assert e.process.returncode == 0


def ends_in_error(engine, clock):
    e = engine.until(*ENDS)
    assert e["ev"] == "error", e
    assert clock.seconds() < 6
    return e


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_dies_in_a_step(engine, rank, how):
    engine.train()
    engine.until("step", when=lambda e: e["step"] == 3)
    pids = engine.ranks()
    clock = Clock()
    os.kill(pids[rank], how)
    e = ends_in_error(engine, clock)
    assert e["rank"] == rank and e["step"] >= 3 and f"of step {e['step']}" in e["action"], e
    assert f"signal {int(how)}" in e["text"] and e["action"] in e["text"] and "resume" in e["text"]
    engine.works()
    assert not [p for p in pids if alive(p)]


def test_a_rank_dies_while_the_other_waits_for_it(engine):
    engine.train(fsdp=True)
    engine.until("step", when=lambda e: e["step"] == 2)
    pids = engine.ranks()
    os.kill(pids[1], signal.SIGSTOP)
    time.sleep(0.3)  # rank 0 has come to a collective
    clock = Clock()
    os.kill(pids[1], signal.SIGKILL)
    e = ends_in_error(engine, clock)
    assert e["rank"] == 1 and "signal 9" in e["text"], e
    engine.works()


def test_a_rank_dies_while_loading(engine):
    for _ in range(50):   # on a busy machine it may have loaded before it can be killed: then once more
        engine.train()
        pids = engine.ranks()
        clock = Clock()
        os.kill(pids[0], signal.SIGKILL)
        e = ends_in_error(engine, clock)
        assert e["rank"] == 0 and e["action"], e
        if e["step"] == 0:
            break
    assert e["step"] == 0, e
    engine.works()


def test_a_rank_stalls(engine):
    engine.train(deadline_ms=1500)
    engine.until("step", when=lambda e: e["step"] == 2)
    pids = engine.ranks()
    clock = Clock()
    os.kill(pids[1], signal.SIGSTOP)
    e = ends_in_error(engine, clock)
    assert e["rank"] == 1 and "deadline_ms" in e["text"] and "of step" in e["action"], e
    engine.works()
    assert not [p for p in pids if alive(p)]


@pytest.mark.parametrize("how", [{"store": "resident"}, {"store": "sharded"}, {"pipeline": "1f1b"}, {"pipeline": "recompute_ahead", "store": "host"}])
def test_stop_and_resume(engine, how):
    engine.train(run="runs/part", **how)
    engine.until("step", when=lambda e: e["step"] == 4)
    clock = Clock()
    engine.send("stop")
    e = engine.until(*ENDS)
    assert clock.seconds() < 1
    assert e["ev"] == "stopped" and e["step"] >= 4, e
    assert e["checkpoint"].endswith(f"runs/part/checkpoint-{e['step']}") and pathlib.Path(e["checkpoint"], "adapter_model.safetensors").exists()
    # Another world and store; the loss is the same bits.
    steps = e["step"] + 8
    engine.train(run="runs/part", resume=e["checkpoint"], steps=steps, devices="cpu:1", gradient_accumulation_steps=4)
    assert engine.until(*ENDS)["ev"] == "done"
    part = engine.losses()
    engine.events.clear()
    engine.train(run="runs/whole", steps=steps, **how)
    assert engine.until(*ENDS)["ev"] == "done"
    assert engine.losses() == part and list(part) == list(range(1, steps + 1))
    a, b = ((engine.cwd / "runs" / r / "adapter_model.safetensors").read_bytes() for r in ("whole", "part"))
    assert a == b


@pytest.mark.parametrize("how", [{"fsdp": True}, {"pipeline": "1f1b"}, {"pipeline": "recompute_ahead", "gradient_checkpointing": True}])
@pytest.mark.parametrize("world", [2, 4])
def test_stops_at_any_moment(engine, world, how):
    """Ranks see a stop between different actions, some of them inside a collective: they agree, and nobody waits for ever."""
    for i in range(12):
        engine.train(run=f"runs/{i}", **how, devices=f"cpu:{world}", gradient_accumulation_steps=8 // world, save_only_model=i % 2 == 0)
        engine.until("step", when=lambda e: e["step"] == 1)
        time.sleep(0.013 * i)
        clock = Clock()
        engine.send("stop")
        e = engine.until(*ENDS)
        assert e["ev"] == "stopped" and clock.seconds() < 3, e


def test_stop_before_the_first_step(engine):
    engine.train(then='{"cmd":"stop"}\n')
    e = engine.until(*ENDS)
    assert e["ev"] == "stopped" and e["step"] == 0 and e["checkpoint"] is None, e
    engine.works()


@pytest.mark.parametrize("world", [2, 4])
def test_stops_while_weights_are_placed(engine, world):
    """Some ranks have theirs and wait for the others in a collective, which will never be there: no error for all that."""
    for i in range(12):
        engine.train(run=f"runs/{i}", fsdp=True, devices=f"cpu:{world}", r=4 + i % 2)   # other adapters than before: placed anew, however far that came
        engine.until("state", when=lambda e: e["state"] == "placing")
        time.sleep(0.005 * i)
        engine.send("stop")
        e = engine.until(*ENDS)
        assert e["ev"] == "stopped", e


def test_too_little_memory_is_refused_before_loading(engine):
    engine.train(device_memory="64 MiB")
    e = engine.until(*ENDS)
    assert e["ev"] == "error" and e["status"] == "out of memory" and "--max_length" in e["text"], e
    assert not children(engine.process.pid)
    engine.works()


def test_the_front_end_goes_away(tmp_path):
    e = Engine(tmp_path)
    e.train()
    e.until("step", when=lambda s: s["step"] == 2)
    pids = e.ranks()
    clock = Clock()
    e.ours.close()
    e.process.wait(60)
    assert e.process.returncode == 0 and clock.seconds() < 6
    assert not [p for p in pids if alive(p)]


def test_the_engine_is_killed(tmp_path):
    e = Engine(tmp_path)
    e.train()
    e.until("step", when=lambda s: s["step"] == 2)
    pids = e.ranks()
    e.process.kill()
    e.process.wait(60)
    assert wait_for(lambda: not [p for p in pids if alive(p)]), "ranks outlive the engine"


def test_text_is_the_same_from_a_shared_head_and_from_stages(engine):
    texts = []
    for devices, how in (("cpu:1", {}), ("cpu:2", {"fsdp": True}), ("cpu:4", {"fsdp": True}), ("cpu:2", {"pipeline": "1f1b"}),
                         ("cpu:4", {"pipeline": "recompute_ahead", "store": "host"})):
        job = {"model": str(ROOT / "notebooks/tiny"), "devices": devices, "max_length": 128, **how}
        engine.send("generate", job=job, adapter=None, prompts=["The capital of", "Two and"], max_new_tokens=24, temperature=0.7, seed=3)
        e = engine.until(*ENDS)
        assert e["ev"] == "done", e
        texts.append(e["result"]["texts"])
        engine.send("unload")
        engine.until("done")
    assert all(t == texts[0] for t in texts) and len(texts[0][0]) > 10


def test_the_best_without_a_checkpoint(engine):
    """Evaluated at every step, saved at every second: where the best was not saved, that is said, and the last weights stay."""
    engine.train(devices="cpu:1", max_length=64, max_steps=4, learning_rate=0.5, lora_dropout=0, r=16, seed=7,
                 eval_dataset=str(ROOT / "notebooks/tiny/eval.jsonl"), eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=2,
                 load_best_model_at_end=True)
    e = engine.until(*ENDS)
    losses = {e["step"]: e["eval_loss"] for e in engine.events if e["ev"] == "eval"}
    assert e["ev"] == "done" and len(losses) == 4 and min(losses, key=losses.get) == 1, (e, losses)
    said = [e["text"] for e in engine.events if e["ev"] == "log" and e["level"] == "warning"]
    assert any("the best evaluation was at step 1, whose checkpoint is not there" in t for t in said), said


def test_blas_uses_what_the_processor_has():
    """A BLAS that is older than the processor takes kernels without AVX by itself; a wish of the user's stands."""
    def kernels(**more):
        env = {k: v for k, v in os.environ.items() if k != "OPENBLAS_CORETYPE"}
        out = subprocess.run([str(BUILD / "qlora-engine"), "--devices"], env={**env, **more}, capture_output=True, text=True).stdout
        return next(d for d in json.loads(out)["devices"] if d["id"].startswith("cpu"))["libs"]
    flags = open("/proc/cpuinfo").read().split()
    if "avx2" not in flags or "fma" not in flags or "DYNAMIC_ARCH" not in kernels():
        pytest.skip("no AVX2, or a BLAS for one processor")
    assert "Prescott" not in kernels() and "Barcelona" not in kernels()
    assert "Haswell" in kernels(OPENBLAS_CORETYPE="Haswell")
