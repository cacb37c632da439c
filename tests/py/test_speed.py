"""How long one waits: for the kernel, for help, for the plan of a large model. Run as a program (make bench) it prints the medians."""
import os

import pytest

from clock import Clock
from kernels import Kernel, build, hosts, root, running

SLOW = float(os.environ.get("QLORA_TEST_SLOW", 1))   # for machines that are busy with something else
os.environ["QLORA_BUNDLED"] = str(root / "notebooks")


def median(times):
    return sorted(times)[len(times) // 2]


def ready(name, n=7):
    """Seconds from the start of the process to the answer of its first request."""
    times = []
    for _ in range(n):
        clock = Clock()
        k = Kernel(name)
        times.append(clock.seconds())
        k.close()
    return median(times)


def cells(kernel, code, n):
    """Seconds of a cell from the request to its last message."""
    times = []
    for _ in range(n):
        clock = Clock()
        reply, _ = kernel.run(code)
        times.append(clock.seconds())
        assert reply["status"] == "ok", reply
    return median(times)


def figures(name, cwd=None):
    os.environ["PYTHONPATH"] = str(build / "python")
    with running(name, cwd=cwd) as k:
        k.run("%load_ext qlora")
        k.run("%qlora help;")
        found = {"help": cells(k, "%qlora help", 21), "help train": cells(k, "%qlora help train", 21)}
        reply, _ = k.run(f"%qlora load {root / 'tests/plan/llama-70b'};")
        assert reply["status"] == "ok", reply
        found["plan of Llama 70B on 2 T4"] = cells(k, "%qlora plan --on 2xT4;", 5)
        found["plan of Llama 70B on 8 A100"] = cells(k, "%qlora plan --on 8xA100-80 --max_length 8192;", 5)
    return found


@pytest.mark.skipif("qlora" not in hosts, reason="the native kernel is not built here: see make info")
def test_ready_in_under_a_second():
    assert ready("qlora") < 1.0 * SLOW


@pytest.mark.parametrize("name", hosts)
def test_help_and_plan_do_not_keep_one_waiting(name, tmp_path):
    bars = {"help": 0.020, "help train": 0.020, "plan of Llama 70B on 2 T4": 1.0, "plan of Llama 70B on 8 A100": 1.0}
    tries = []
    while len(tries) < 3:   # other tests run beside this one: a median may be theirs
        tries.append(figures(name, str(tmp_path)))
        if all(min(t[what] for t in tries) < bar * SLOW for what, bar in bars.items()):
            return
    raise AssertionError(tries)


if __name__ == "__main__":
    for host in hosts:
        print(f"{'native kernel' if host == 'qlora' else 'stock ipykernel'}, median seconds: ready {ready(host):.3f}", end="")
        print("".join(f", {what} {seconds:.3f}" for what, seconds in figures(host).items()), flush=True)
