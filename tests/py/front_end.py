"""What the tests of the front end share: where things are built, and cells run in a stock ipykernel."""
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("BUILD", ROOT / "build"))
BUILD = BUILD if BUILD.is_absolute() else ROOT / BUILD
FAKE = ROOT / "tests" / "py" / "fake_engine.py"


def environment(how="", engine=FAKE):
    return dict(os.environ, QLORA_ENGINE=str(engine), FAKE_ENGINE=how, PYTHONPATH=str(BUILD / "python"), PYDEVD_DISABLE_FILE_VALIDATION="1")


def shell(text, cwd, how="", engine=FAKE, timeout=60):
    """build/qlora with these lines on stdin."""
    return subprocess.run([str(BUILD / "qlora")], input=text, cwd=cwd, env=environment(how, engine), capture_output=True, text=True, timeout=timeout)


def python(text, cwd, how="", timeout=120, interpreter=sys.executable):
    return subprocess.run([interpreter, "-c", text], cwd=cwd, env=environment(how), capture_output=True, text=True, timeout=timeout)


class Kernel:
    """A stock Python kernel with the extension loaded; run() gives (reply, outputs)."""

    def __init__(self, cwd, how=""):
        from jupyter_client.manager import start_new_kernel
        self.manager, self.client = start_new_kernel(kernel_name="python3", cwd=str(cwd), env=environment(how), startup_timeout=60)
        reply, out = self.run("%load_ext qlora")
        assert reply["status"] == "ok", reply

    def run(self, code, timeout=60, during=None):
        outputs = []

        def hook(message):
            outputs.append((message["header"]["msg_type"], message["content"]))
            if during:
                during(outputs)

        reply = self.client.execute_interactive(code, timeout=timeout, output_hook=hook, store_history=True)
        return reply["content"], outputs

    def value(self, expression):
        reply, out = self.run(f"print(repr(({expression})))")
        assert reply["status"] == "ok", reply
        return eval("".join(c["text"] for t, c in out if t == "stream"))

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
