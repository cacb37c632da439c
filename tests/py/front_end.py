"""What the tests of the front end share: where things are built, and cells run in a stock ipykernel."""
import json
import os
import pathlib
import re
import subprocess
import sys

from clock import Clock

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("BUILD", ROOT / "build"))
BUILD = BUILD if BUILD.is_absolute() else ROOT / BUILD
FAKE = ROOT / "tests" / "py" / "fake_engine.py"


def step_of(out, most):
    """The highest step that a bar of so many has shown; -1: none yet."""
    return max((int(n) for kind, c in out for n in re.findall(rf"\b(\d+)/{most}\b", json.dumps(c.get("data", {})))), default=-1)


def stopping(kernel, most, step):
    """A Kernel.run's `during` that presses Stop once a bar of so many steps has shown this one, and the clocks that began with it."""
    pressed = []

    def press(out):
        if not pressed and step_of(out, most) >= step:
            pressed.append(Clock())
            kernel.manager.interrupt_kernel()
    return press, pressed


def environment(how="", engine=FAKE):
    return dict(os.environ, QLORA_ENGINE=str(engine), FAKE_ENGINE=how, QLORA_BUNDLED=str(ROOT / "notebooks"), PYTHONPATH=str(BUILD / "python"), PYDEVD_DISABLE_FILE_VALIDATION="1")


def shell(text, cwd, how="", engine=FAKE, timeout=300):
    """build/qlora with these lines on stdin."""
    return subprocess.run([str(BUILD / "qlora")], input=text, cwd=cwd, env=environment(how, engine), capture_output=True, text=True, timeout=timeout)


def python(text, cwd, how="", timeout=300, interpreter=sys.executable):
    return subprocess.run([interpreter, "-c", text], cwd=cwd, env=environment(how), capture_output=True, text=True, timeout=timeout)


class Kernel:
    """A stock Python kernel with the extension loaded; run() gives (reply, outputs). env: in place of the build folder and the fake engine."""

    def __init__(self, cwd, how="", interpreter=sys.executable, env=None):
        from jupyter_client import KernelManager
        from jupyter_client.kernelspec import KernelSpec
        self.manager = KernelManager()
        self.manager._kernel_spec = KernelSpec(argv=[str(interpreter), "-m", "ipykernel_launcher", "-f", "{connection_file}"], language="python")
        self.manager.start_kernel(cwd=str(cwd), env=environment(how) if env is None else dict(os.environ, **env))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=300)
        reply, out = self.run("%load_ext qlora")
        assert reply["status"] == "ok", reply

    def run(self, code, timeout=300, during=None):
        outputs = []

        def hook(message):
            outputs.append((message["header"]["msg_type"], message["content"]))
            if during:
                during(outputs)

        # After an error an old ipykernel drops, for a tenth of a second, what does not say that it shall be run.
        reply = self.client.execute_interactive(code, timeout=timeout, output_hook=hook, store_history=True, stop_on_error=False)
        return reply["content"], outputs

    def value(self, expression):
        reply, out = self.run(f"print(repr(({expression})))")
        assert reply["status"] == "ok", reply
        return eval("".join(c["text"] for t, c in out if t == "stream"))

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
