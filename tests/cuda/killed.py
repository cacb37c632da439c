"""killed.py [MEMORY]: ranks that die on GPUs, as a front end sees it. In the middle of a step a rank is killed, stopped or made to fault: the
error event names rank, step and action within 6 s, the devices' memory is back as the driver counts it, and the next command works.
Lines of tests/test.h. QLORA_ENGINE names the engine; MEMORY is --device_memory."""
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import traceback

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "py"))
from engine import Engine, TINY  # noqa: E402

ENGINE = os.environ["QLORA_ENGINE"]
MEMORY = sys.argv[1] if len(sys.argv) > 1 else None
SLACK = 64  # MiB that the driver may keep for itself


def used():
    """MiB taken of each device, all processes."""
    out = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True)
    return [int(x) for x in out.stdout.split()]


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


class Run:
    def __init__(self, cwd, world):
        self.engine, self.world, self.events = Engine(cwd), world, []

    def train(self, **settings):
        job = dict({"model": str(TINY), "data": str(TINY / "train.jsonl"), "devices": "cuda:" + ",".join(map(str, range(self.world))),
                    "max_length": 128, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 8 // self.world, "max_steps": 100000,
                    "save_strategy": "no", "learning_rate": 1e-5, **({"device_memory": MEMORY} if MEMORY else {})}, **settings)
        self.engine.send("train", job=job, run=tempfile.mkdtemp())

    def until(self, *names, when=lambda e: True, seconds=60):
        end = time.monotonic() + seconds
        while True:
            assert time.monotonic() < end, f"no {names} within {seconds} s: {self.events[-2:]}"
            e = self.engine.event()
            self.events.append(e)
            if e["ev"] in names and when(e):
                return e
            assert e["ev"] not in ("done", "error", "stopped"), e

    def ranks(self):
        pid = self.engine.process.pid
        pids = [int(p) for p in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        assert len(pids) == self.world, f"{len(pids)} ranks, not {self.world}"
        return pids


def dies(cwd, world, victim, how, **settings):
    before = used()
    run = Run(cwd, world)
    try:
        run.train(**settings)
        run.until("step", when=lambda e: e["step"] >= 3)
        pids = run.ranks()
        if how == "waited for":  # the other rank stands in a collective by then
            os.kill(pids[victim], signal.SIGSTOP)
            time.sleep(0.3)
        os.kill(pids[victim], signal.SIGSEGV if how == "fault" else signal.SIGKILL)
        since = time.monotonic()
        e = run.until("error", seconds=10)
        took = time.monotonic() - since
        assert took < 6, f"the error came after {took:.1f} s"
        assert e["rank"] == victim and e["step"] >= 3 and f"of step {e['step']}" in e["action"] and e["action"] in e["text"], e
        while any(alive(p) for p in pids) or any(a > b + SLACK for a, b in zip(used(), before)):
            assert time.monotonic() - since < 10, f"MiB used: {used()}, before {before}; ranks alive: {[p for p in pids if alive(p)]}"
            time.sleep(0.2)
        freed = time.monotonic() - since
        run.train(max_steps=2, **settings)
        run.until("done")
        return f"rank {victim} of {world}: told in {took:.1f} s, memory back in {freed:.1f} s, at '{e['action']}'"
    finally:
        run.engine.close()


def leaves(cwd, world):
    """The front end goes away in mid-step: no process and no device memory stays."""
    before = used()
    run = Run(cwd, world)
    run.train()
    run.until("step", when=lambda e: e["step"] >= 2)
    pids = run.ranks()
    since = time.monotonic()
    run.engine.close()
    while any(alive(p) for p in pids) or any(a > b + SLACK for a, b in zip(used(), before)):
        assert time.monotonic() - since < 10, f"MiB used: {used()}, before {before}"
        time.sleep(0.2)
    return f"{world} ranks: gone in {time.monotonic() - since:.1f} s"


def main():
    probe = subprocess.run([ENGINE, "--devices"], capture_output=True, text=True)
    devices = [d for d in json.loads(probe.stdout or '{"devices": []}')["devices"] if d["backend"] == "cuda"]
    if not devices:
        print(f"not ok killed: no GPU: {probe.stdout} {probe.stderr}")
        return 1
    tests = [("a_lone_rank_is_killed", dies, (1, 0, "kill")), ("a_lone_rank_faults", dies, (1, 0, "fault")), ("the_front_end_leaves", leaves, (1,))]
    if len(devices) > 1:
        tests += [("rank_0_of_2_is_killed", dies, (2, 0, "kill")), ("rank_1_of_2_is_killed", dies, (2, 1, "kill")),
                  ("rank_1_is_killed_while_rank_0_waits", dies, (2, 1, "waited for")), ("the_front_end_leaves_two_ranks", leaves, (2,))]
    else:
        print("# one GPU: NO RANK OF TWO WAS KILLED")
    failed = 0
    for name, test, arguments in tests:
        with tempfile.TemporaryDirectory() as cwd:
            try:
                settings = {"fsdp": True} if "waits" in name else {}
                said = test(cwd, *arguments, **settings)
                print(f"ok {name}\n# {name}: {said}", flush=True)
            except Exception:
                failed += 1
                print(f"not ok {name}: {traceback.format_exc().strip().splitlines()[-1]}", flush=True)
                traceback.print_exc()
                log = pathlib.Path(cwd, "engine.log")
                print(log.read_text()[-2000:] if log.exists() else "", file=sys.stderr)
    return failed


sys.exit(main())
