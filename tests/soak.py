"""What a notebook must survive: Stop pressed at any moment, and an engine that is killed. Counts what is left behind.

    soak.py [--interrupts 1000] [--kills 200] [--seed 0] [--engine PROGRAM]

Ends with status 1 if a kernel was lost, a cell never ended, or a process, descriptor or shared memory is left over. Without the
qlora extension only the interrupts are run, and it says so."""
import argparse, os, random, signal, sys, time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "py"))
from kernels import Kernel, native, root, scratch, text, wait_for, why_not  # noqa: E402

# No child processes: a Stop between fork() and what Python or IPython do next leaves them behind in any kernel.
CELLS = ["while True: pass", "import time; time.sleep(9)", "for i in range(10**9): print(i)", "[i * i for i in range(10**8)]",
         "import asyncio; await asyncio.sleep(9)", "import threading; threading.Event().wait(9)",
         "input('? ')",
         "for i in range(10**6):\n    display(i)\n    time.sleep(.02)", "x = 1", "1 / 0", "def f(n): return f(n + 1)\nf(0)",
         "try:\n    time.sleep(9)\nfinally:\n    x = 2", "raise KeyboardInterrupt"]
TRAIN = "%qlora train --max_steps 100000"


def children(pid):
    out = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        out += [int(p) for p in (task / "children").read_text().split()]
    return out


def descendants(pid):
    out = []
    for child in children(pid):
        try:
            out += [child] + descendants(child)
        except OSError:
            out.append(child)
    return out


def engines(pid):
    return [p for p in children(pid) if "engine" in Path(f"/proc/{p}/cmdline").read_bytes().decode(errors="replace")]


def held(pid):
    """What a kernel holds: descriptors, threads, processes below it, and our named shared memory."""
    files = [os.path.realpath(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    ours = [f for f in files if "/history.sqlite" not in f]   # IPython's data base opens a journal now and then
    return {"descriptors": len(ours), "threads": len(os.listdir(f"/proc/{pid}/task")),
            "processes": len(descendants(pid)), "shared": sum("qlora" in f for f in os.listdir("/dev/shm"))}


def settle(kernel, code, processes):
    """What an idle kernel holds, its devices freed."""
    for _ in range(5):   # an interrupt that is still on its way may hit the first
        reply, _ = kernel.run(code)
        if reply["status"] == "ok":
            break
    assert reply["status"] == "ok", reply
    wait_for(lambda: len(descendants(kernel.pid)) <= processes, 10)
    return held(kernel.pid)


def press_stop(kernel, count, rng, cells):
    """Random cells, each interrupted once at a random moment, sometimes twice."""
    ended = {}
    for _ in range(count):
        code = rng.choice(cells)
        request = kernel.send(code, allow_stdin=True)
        time.sleep(rng.choice((0, rng.random() * 0.02, rng.random() * 0.3)))
        kernel.interrupt()
        if rng.random() < 0.1:
            kernel.interrupt()
        # A Stop that comes before the cell began finds nothing to stop: press again, as a person would.
        for attempt in range(30):
            try:
                reply, _ = kernel.collect(request, 0.5)
                break
            except Exception:
                assert kernel.alive(), f"the kernel died in {code!r}"
                kernel.interrupt()
        else:
            raise AssertionError(f"a cell never ended: {code!r}")
        how = reply.get("ename") or "ok"
        if how == "Error":   # qlora's own
            how += ": " + reply["evalue"]
        ended[how] = ended.get(how, 0) + 1
    return ended


def kill_engines(kernel, count, rng):
    """The engine killed in the middle of training: a red cell, and the next verb works."""
    for _ in range(10):   # the last Stop of the test before may still be on its way: let it hit this
        if kernel.run("1")[0]["status"] == "ok":
            break
        time.sleep(0.2)
    time.sleep(0.5)
    for i in range(count):
        request = kernel.send(TRAIN)
        assert wait_for(lambda: engines(kernel.pid), 20), f"no engine was started: {kernel.collect(request, 1)}"
        time.sleep(rng.random() * 0.5)
        victim = engines(kernel.pid)
        for p in victim:
            os.kill(p, signal.SIGKILL)
        try:
            reply, _ = kernel.collect(request, 30)
        except Exception:
            raise AssertionError(f"kill {i}: the cell did not end in 30 s; killed {victim}, now {engines(kernel.pid)}")
        assert reply["status"] == "error" and reply["ename"] != "KeyboardInterrupt", reply
        assert kernel.alive(), "the kernel died with the engine"
    reply, _ = kernel.run("%qlora train --max_steps 2", 120)
    assert reply["status"] == "ok", f"after {count} kills train says: {reply.get('evalue')}"


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--interrupts", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", help="another engine program, for QLORA_ENGINE")
    args = parser.parse_args(argv)
    if not native:
        print(f"soak: left out: {why_not}")
        return 0
    if args.engine:
        os.environ["QLORA_ENGINE"] = str(Path(args.engine).absolute())
    work = Path(scratch.name, "soak")
    work.mkdir(exist_ok=True)
    rng = random.Random(args.seed)
    kernel = Kernel("qlora", cwd=str(work))
    start, cells, kills = time.monotonic(), list(CELLS), args.kills
    kernel.run("import time, asyncio, threading, subprocess")
    setup = ["%qlora load tiny", "%qlora data tiny", "%qlora config --devices cpu:2 --max_length 64;"]
    replies = [kernel.run(s)[0] for s in setup]
    if all(r["status"] == "ok" for r in replies):
        cells += [TRAIN, "%qlora plan;", TRAIN]
        assert kernel.run("%qlora train --max_steps 2", 120)[0]["status"] == "ok", "%qlora train does not run"
    else:
        kills = 0
        print(f"soak: no engine, only the kernel: {[r.get('evalue') for r in replies if r['status'] != 'ok'][0]}")
    unload = "import gc; gc.collect();" + (" get_ipython().run_line_magic('qlora', 'unload')" if kills else "")
    idle = (unload, 1 if kills else 0)   # the engine's supervisor stays between cells
    for code in CELLS[:9]:   # what the first use of each leaves behind once is no leak
        press_stop(kernel, 1, rng, [code])
    before = settle(kernel, *idle)
    ended = press_stop(kernel, args.interrupts, rng, cells)
    between = settle(kernel, *idle)
    if kills:
        kill_engines(kernel, kills, rng)
    after = settle(kernel, *idle)
    family = descendants(kernel.pid)
    kernel.close()
    orphans = [p for p in family if Path(f"/proc/{p}").exists()]
    print(f"soak: {args.interrupts} interrupts {ended}, {kills} kills in {time.monotonic() - start:.0f} s")
    print(f"soak: before {before}\nsoak: then   {between}\nsoak: after  {after}")
    lost = [k for k in before if after[k] > before[k]]
    if lost or orphans:
        print(f"soak: LEFT OVER: {', '.join(lost)} {orphans or ''}")
        return 1
    print("soak: nothing is left over")
    return 0


if __name__ == "__main__":
    sys.exit(main())
