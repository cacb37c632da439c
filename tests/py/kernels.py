"""Kernels over the real protocol: the native one ("qlora") from the build folder and the stock one ("python3")."""
import contextlib, os, sys, tempfile, time
from pathlib import Path

from clock import wait_for  # noqa: F401: for those who import this
from jupyter_client.manager import KernelManager

root = Path(__file__).resolve().parents[2]
build = (root / os.environ.get("BUILD", "build")).resolve()
native = (build / "jupyter/kernels/qlora/kernel.json").exists()
hosts = ["qlora", "python3"] if native else ["python3"]
why_not = "the native kernel is not built here: see make info"

scratch = tempfile.TemporaryDirectory(prefix="qlora-test-")
os.environ["JUPYTER_PATH"] = str(build / "jupyter")
os.environ["IPYTHONDIR"] = scratch.name + "/ipython"
os.environ["JUPYTER_RUNTIME_DIR"] = scratch.name + "/runtime"
os.environ["MPLCONFIGDIR"] = os.environ.get("MPLCONFIGDIR") or str(build / "mplconfig")
os.environ.pop("VIRTUAL_ENV", None)


class Kernel:
    """A running kernel. run() is one cell: its reply and what it showed, in order."""

    def __init__(self, name, **options):
        self.manager = KernelManager(kernel_name=name)
        env = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}   # ipykernel changes under pytest
        self.manager.start_kernel(stderr=sys.__stderr__, env=env, **options)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=300)
        self.pid = self.manager.provisioner.process.pid

    def send(self, code, **options):
        return self.client.execute(code, **options)

    def collect(self, request, timeout=300, on_message=None):
        """Messages of that request up to its idle, then its reply."""
        shown, end = [], time.monotonic() + timeout
        while True:
            m = self.client.get_iopub_msg(timeout=max(0.01, end - time.monotonic()))
            if m["parent_header"].get("msg_id") != request:
                continue
            if m["msg_type"] == "status" and m["content"]["execution_state"] == "idle":
                break
            shown.append(m)
            if on_message:
                on_message(m)
        while True:
            reply = self.client.get_shell_msg(timeout=max(0.01, end - time.monotonic()))
            if reply["parent_header"].get("msg_id") == request:
                return reply["content"], shown

    def run(self, code, timeout=300, on_message=None, **options):
        return self.collect(self.send(code, **options), timeout, on_message)

    def interrupt(self):
        self.manager.interrupt_kernel()

    def wait_for_text(self, part, timeout=300):
        """Until a cell that runs has printed this; what came before is gone then."""
        seen, end = "", time.monotonic() + timeout
        while part not in seen:
            m = self.client.get_iopub_msg(timeout=max(0.01, end - time.monotonic()))
            seen += m["content"]["text"] if m["msg_type"] == "stream" else ""

    def alive(self):
        return self.manager.is_alive()

    def close(self):
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=not self.alive())


@contextlib.contextmanager
def running(name, **options):
    kernel = Kernel(name, **options)
    try:
        yield kernel
    finally:
        kernel.close()


def text(shown, stream="stdout"):
    return "".join(m["content"]["text"] for m in shown if m["msg_type"] == "stream" and m["content"]["name"] == stream)


def kinds(shown):
    """Message types in order, neighbouring streams of one name as one."""
    out = []
    for m in shown:
        kind = m["msg_type"] if m["msg_type"] != "stream" else m["content"]["name"]
        if kind not in ("status", "execute_input") and not (out and out[-1] == kind and m["msg_type"] == "stream"):
            out.append(kind)
    return out
