"""Drives build/qlora-engine the way a front end does: JSON lines over a socket on fd 3 (core/qlora.h)."""
import json
import os
import socket
import struct
import subprocess

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PROGRAM = os.path.join(os.environ.get("BUILD", os.path.join(ROOT, "build")), "qlora-engine")
if not os.path.isabs(PROGRAM):
    PROGRAM = os.path.join(ROOT, PROGRAM)


class EngineError(Exception):
    pass


class Engine:
    """One engine process; `with Engine() as e: e.run("train", job={…}, run=path)`."""

    def __init__(self, timeout=300, threads=1):
        ours, theirs = socket.socketpair()
        fd = theirs.fileno()
        move = f'exec "$0" 3<&{fd} {fd}<&-' if fd != 3 else 'exec "$0"'
        self.process = subprocess.Popen(
            ["bash", "-c", move, PROGRAM], pass_fds=[fd], cwd=ROOT, stdin=subprocess.DEVNULL,
            env={**os.environ, "OPENBLAS_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)})
        theirs.close()
        ours.settimeout(timeout)
        self.socket, self.lines, self.id = ours, ours.makefile("r", encoding="utf-8"), 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.lines.close()
        self.socket.close()  # end of its input ends the engine
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def run(self, cmd, **fields):
        """The command's result, with its events under "events"."""
        self.id += 1
        self.socket.sendall((json.dumps({"cmd": cmd, "id": self.id, **fields}) + "\n").encode())
        events = []
        for line in self.lines:
            event = json.loads(line)
            events.append(event)
            if event["ev"] == "error":
                raise EngineError(event["text"])
            if event["ev"] in ("done", "stopped") and event["id"] == self.id:
                return {**event.get("result", {}), "events": events}
        raise EngineError(f"the engine ended (status {self.process.wait(20)}) after {events[-1:]}")


def loss_of(event):
    """The fp32 loss of a step event, from its bits."""
    return struct.unpack("<f", struct.pack("<I", int(event["loss_bits"], 16)))[0]
