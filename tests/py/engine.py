"""The real engine over its socketpair: commands in, events out."""
import json
import os
import socket
import subprocess
import time

from front_end import BUILD, ROOT

TINY = ROOT / "notebooks" / "tiny"


def job(**settings):
    """A small job on the bundled model; settings as in `config`."""
    return dict({"model": str(TINY), "data": str(TINY / "train.jsonl"), "devices": "cpu:1", "max_steps": 3, "max_length": 64,
                 "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "seed": 7}, **settings)


class Engine:
    def __init__(self, cwd, env=None):
        ours, theirs = socket.socketpair()
        self.log = open(os.path.join(str(cwd), "engine.log"), "w+b")
        # The engine's end is descriptor 3 in the child; whatever was 3 here is moved out of the way first.
        fd = theirs.fileno()
        self.process = subprocess.Popen([os.environ.get("QLORA_ENGINE", str(BUILD / "qlora-engine"))], cwd=str(cwd), pass_fds=(3,), preexec_fn=lambda: os.dup2(fd, 3),
                                        stdout=self.log, stderr=subprocess.STDOUT, env=dict(os.environ, **(env or {})))
        theirs.close()
        ours.settimeout(300)
        self.socket, self.lines, self.id = ours, ours.makefile("r", encoding="utf-8"), 0
        assert self.event()["ev"] == "ready"

    def event(self):
        line = self.lines.readline()
        assert line, "the engine has gone"
        return json.loads(line)

    def send(self, cmd, **fields):
        self.id += 1
        self.socket.sendall((json.dumps(dict(fields, cmd=cmd, id=self.id)) + "\n").encode())

    def wait(self, timeout=120):
        """(events, closing event) of the command that was sent."""
        events, until = [], time.monotonic() + timeout
        while True:
            assert time.monotonic() < until, events[-3:]
            e = self.event()
            events.append(e)
            if e["ev"] in ("done", "error", "stopped") and e.get("id") == self.id:
                return events, e

    def run(self, cmd, **fields):
        self.send(cmd, **fields)
        return self.wait()

    def ask(self, cmd, **fields):
        """The result of a command that must succeed."""
        events, end = self.run(cmd, **fields)
        assert end["ev"] == "done", end
        return end["result"]

    def close(self):
        self.socket.shutdown(socket.SHUT_RDWR)
        self.lines.close()
        self.socket.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self.log.close()
