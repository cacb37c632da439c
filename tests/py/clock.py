"""A clock for what must be quick, also where the machine has other things to do; and waiting for what comes at its own pace."""
import os
import pathlib
import time


def children(pid):
    """Of all its threads; none when it has gone."""
    found = []
    try:
        for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
            found += [int(p) for p in (task / "children").read_text().split()]
    except OSError:
        pass
    return found


def family(pid):
    found = [pid]
    for child in children(pid):
        found += family(child)
    return found


def delays(pids):
    """Nanoseconds that each thread of these processes was ready to run and had no processor."""
    found = {}
    for pid in pids:
        try:
            for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
                found[task.name] = int((task / "schedstat").read_text().split()[1])
        except OSError:
            pass
    return found


class Clock:
    """Seconds since it was made, without those that this process and all below it stood in line for a processor."""

    def __init__(self):
        self.before, self.start = delays(family(os.getpid())), time.monotonic()

    def seconds(self):
        now = time.monotonic()
        delay = sum(ns - self.before.get(task, 0) for task, ns in delays(family(os.getpid())).items())
        return max(0.0, now - self.start - delay * 1e-9)


def wait_for(condition, seconds=60):
    """The condition's value once it holds; else what it was at the end. The time is for a test that fails: nothing depends on it."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value or time.monotonic() > end:
            return value
        time.sleep(0.01)


def catches(pid, signum):
    """Whether that process has a handler for the signal by now."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    mask = int(next(line for line in status.splitlines() if line.startswith("SigCgt:")).split()[1], 16)
    return bool(mask >> (signum - 1) & 1)
