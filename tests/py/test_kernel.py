"""The native kernel over the real protocol, and beside the stock one."""
import json, os, queue, re, signal, subprocess, sys, threading, time
from pathlib import Path

import jupyter_client
import jupyter_kernel_test
import nbclient, nbformat
import pytest

from clock import Clock
from kernels import Kernel, build, hosts, kinds, native, root, running, scratch, text, wait_for, why_not

only_native = pytest.mark.skipif(not native, reason=why_not)


@only_native
class TestProtocol(jupyter_kernel_test.KernelTests):
    kernel_name = "qlora"
    language_name = "python"
    file_extension = ".py"
    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('oops', file=sys.stderr)"
    code_page_something = "len?"
    code_generate_error = "1 / 0"
    code_clear_output = "from IPython.display import clear_output; clear_output()"
    code_inspect_sample = "len"
    code_execute_result = [{"code": "6 * 7", "result": "42"}, {"code": "'a' 'b'", "result": "'ab'"}]
    code_display_data = [
        {"code": "from IPython.display import HTML, display; display(HTML('<b>x</b>'))", "mime": "text/html"},
        {"code": "from IPython.display import Math; display(Math('x^2'))", "mime": "text/latex"}]
    completion_samples = [{"text": "zi", "matches": {"zip"}}, {"text": "import tokeni", "matches": {"tokenize"}}]
    complete_code_samples = ["1", "def f(x):\n    return x\n", "%lsmagic", "await f()"]
    incomplete_code_samples = ["def f(x):", "print(", "'''"]
    invalid_code_samples = ["a b c", "import = 7q"]
    supported_history_operations = ("tail", "range", "search")
    code_history_pattern = "6*7"


@pytest.fixture(scope="module", params=hosts)
def kernel(request):
    with running(request.param) as k:
        k.name = request.param
        yield k


def result(shown):
    return [m["content"]["data"]["text/plain"] for m in shown if m["msg_type"] == "execute_result"]


def test_interrupt(kernel):
    """A loop, a sleep, a child process, a lock, an await, input(): each ends in KeyboardInterrupt, the kernel lives."""
    for code in ("while True: pass", "import time; time.sleep(60)", "import subprocess; subprocess.run(['sleep', '60'])",
                 "import threading; threading.Event().wait(60)", "import asyncio; await asyncio.sleep(60)",
                 "input('name? ')"):
        if kernel.name == "python3" and "asyncio" in code:
            continue   # ipykernel 7.4 goes on waiting
        request = kernel.send("print('on', flush=True)\n" + code, allow_stdin=True)
        kernel.wait_for_text("on")
        if "input" in code:
            assert kernel.client.get_stdin_msg(timeout=60)["content"]["prompt"] == "name? "
        time.sleep(0.1)
        clock = Clock()
        kernel.interrupt()
        reply, shown = kernel.collect(request)
        assert clock.seconds() < 1, code
        assert (reply["status"], reply["ename"]) == ("error", "KeyboardInterrupt"), code
        assert "error" in kinds(shown)
        reply, shown = kernel.run("6 * 7")
        assert reply["status"] == "ok" and result(shown) == ["42"], code


@only_native
def test_a_stopped_coroutine_stays_stopped():
    with running("qlora") as k:
        request = k.send("import asyncio\nticks = []\nasync def tick():\n    while True:\n        ticks.append(1)\n"
                         "        if len(ticks) == 6: print('on', flush=True)\n        await asyncio.sleep(.01)\nawait tick()")
        k.wait_for_text("on")
        k.interrupt()
        assert k.collect(request)[0]["ename"] == "KeyboardInterrupt"
        assert result(k.run("n = len(ticks)\nawait asyncio.sleep(.1)\nn > 5, len(ticks) - n")[1]) == ["(True, 0)"]
        for _ in range(8):   # and the cell's error is the Stop alone, not what the coroutine died of
            request = k.send("print('on', flush=True)\nawait asyncio.sleep(60)")
            k.wait_for_text("on")
            k.interrupt()
            reply, shown = k.collect(request)
            assert [m["content"]["ename"] for m in shown if m["msg_type"] == "error"] == [reply["ename"]] == ["KeyboardInterrupt"]


def test_input(kernel):
    def asked(code, answer):
        request = kernel.send(code, allow_stdin=True)
        question = kernel.client.get_stdin_msg(timeout=60)
        kernel.client.input(answer)
        return question["content"], kernel.collect(request)
    question, (reply, shown) = asked("x = input('name? ')\nprint(x)", "Gräfin 🦙")
    assert (question["prompt"], question["password"]) == ("name? ", False)
    assert text(shown) == "Gräfin 🦙\n"
    question, (reply, shown) = asked("import getpass\np = getpass.getpass('key: ')\nlen(p)", "hunter2")
    assert (question["prompt"], question["password"], result(shown)) == ("key: ", True, ["7"])
    reply, shown = kernel.run("input()", allow_stdin=False)
    assert reply["ename"] == "StdinNotImplementedError"


def test_queue_is_aborted_after_an_error(kernel, tmp_path):
    """Three cells at once, the first fails: error, aborted, aborted, each with busy and idle; a question between them is answered."""
    go = tmp_path / "go"
    sent = [kernel.send(f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(.01)\ntime.sleep(.5); 1/0", stop_on_error=True)]
    sent += [kernel.send("print('must not run')", stop_on_error=True) for _ in range(2)]
    asked = kernel.client.kernel_info()
    go.touch()   # they are on their way, and have half a second for it
    states, replies, end = {}, {}, time.monotonic() + 60
    while time.monotonic() < end and (len(replies) < 4 or any(states.get(s, [])[-1:] != ["idle"] for s in sent + [asked])):
        for get, keep in ((kernel.client.get_iopub_msg, states), (kernel.client.get_shell_msg, replies)):
            try:
                m = get(timeout=0.05)
            except Exception:
                continue
            parent = m["parent_header"].get("msg_id")
            if keep is replies:
                replies[parent] = m["content"]["status"]
            elif m["msg_type"] == "status":
                states.setdefault(parent, []).append(m["content"]["execution_state"])
            else:
                assert "must not run" not in str(m["content"]) or m["msg_type"] == "execute_input"
    assert [replies[s] for s in sent] == ["error", "aborted", "aborted"]
    assert replies[asked] == "ok"
    assert all(states[s] == ["busy", "idle"] for s in sent + [asked]), states
    assert kernel.run("1 + 1")[0]["status"] == "ok"


def test_many_prints_end_in_idle(kernel):
    reply, shown = kernel.run("for i in range(20000): print(i)")
    assert reply["status"] == "ok"
    assert text(shown) == "".join(f"{i}\n" for i in range(20000))


@only_native
def test_many_displays_end_in_idle():
    with running("qlora") as k:
        reply, shown = k.run("for i in range(3000): display(i)")
        assert reply["status"] == "ok" and sum(m["msg_type"] == "display_data" for m in shown) == 3000


def test_output_comes_while_the_cell_runs(kernel, tmp_path):
    """The cell ends only when what it printed has been seen."""
    seen = tmp_path / "seen"
    reply, shown = kernel.run(f"import os, time\nprint('a')\nwhile not os.path.exists({str(seen)!r}): time.sleep(.01)\nprint('b')",
                              on_message=lambda m: m["msg_type"] == "stream" and seen.touch())
    assert reply["status"] == "ok" and text(shown) == "a\nb\n"


def test_counts_and_history(kernel):
    _, shown = kernel.run("1")
    first = next(m for m in shown if m["msg_type"] == "execute_input")["content"]["execution_count"]
    reply, shown = kernel.run("2", store_history=False)
    assert next(m for m in shown if m["msg_type"] == "execute_input")["content"]["execution_count"] == first + 1
    reply, shown = kernel.run("3")
    assert reply["execution_count"] == first + 1
    assert next(m for m in shown if m["msg_type"] == "execute_result")["content"]["execution_count"] == first + 1
    reply, shown = kernel.run("hidden = 5; print('silent')", silent=True)
    assert kinds(shown) in ([], ["stdout"])
    reply, _ = kernel.run("4", user_expressions={"good": "hidden", "bad": "1/0"})
    assert reply["execution_count"] == first + 2
    assert reply["user_expressions"]["good"]["data"]["text/plain"] == "5"
    assert reply["user_expressions"]["bad"]["ename"] == "ZeroDivisionError"


# What a cell shows must not depend on the host.
CELLS = [
    "print('a'); import sys; print('b', file=sys.stderr); print('c')",
    "x = 1\nx + 1",
    "x + 1;",
    "1/0",
    "raise SystemExit",
    "def f(:",
    "%nosuchmagic",
    "%%timeit -n1 -r1\npass",
    "!echo from a shell",
    "files = !echo one two\nfiles",
    "import subprocess, time; _ = subprocess.run(['echo', 'from a child']); time.sleep(1)",
    "import os, time; os.write(1, 'from fd 1: é\\n'.encode()); time.sleep(1)",
    "from IPython.display import HTML, display, clear_output\nh = display(HTML('<b>1</b>'), display_id='d')\nh.update(HTML('<b>2</b>'))",
    "clear_output(wait=True); print('after')",
    "class A:\n    def _repr_mimebundle_(self, **k): return {'text/plain': 'A', 'application/x-a+json': {'n': None, 'k': [1]}}\nA()",
    "get_ipython().set_next_input('next')",
    "len?",
    "%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.plot([1, 3, 2]);",
    "fig, ax = plt.subplots(); ax.plot([1, 2]); fig",
    "import asyncio\nawait asyncio.sleep(.01, 'slept')",
    "print('\\udc80')",
    "import multiprocessing as mp\ndef f(i): print('child', i, flush=True); return i\n"
    "with mp.get_context('fork').Pool(1) as p: r = p.map(f, [1])\nimport time; time.sleep(1); print(r)",
    "import threading\nt = threading.Thread(target=lambda: print('thread')); t.start(); t.join()",
    "import pathlib, json; json.dumps({'a': [1, None]})",
    "%who_ls str",
    "assert x == 2, f'x is {x}'",
    "get_ipython().run_cell_magic('capture', 'out', 'print(9)'); out.stdout",
    "try:\n    print('\\rbar 10%', end=''); print('\\rbar 20%')\nfinally: pass",
]


def plain(s):
    s = re.sub(r"\x1b\[[0-9;]*m", "", s)
    s = re.sub(r"<?ipython-input-\d+-\w+>?|\d+\.py(?=, line)|/tmp/ipykernel_\d+/\d+\.py|Cell In\s?\[\d+\]|0x[0-9a-f]+", "CELL", s)
    s = re.sub(r"[\d.]+ (ns|µs|μs|us|ms|s) ± [\d.]+ (ns|µs|μs|us|ms|s)", "TIME", s)
    return s.replace("\r\n", "\n").replace("\ufffd", "?")


def story(name):
    told = []
    with running(name) as k:
        for code in CELLS:
            reply, shown = k.run(code)
            what = [reply["status"], reply.get("ename"), [p.get("source") for p in reply.get("payload", [])]]
            for kind in dict.fromkeys(kinds(shown)):
                if kind in ("stdout", "stderr"):
                    what.append((kind, plain(text(shown, kind))))
                else:
                    for m in (m for m in shown if m["msg_type"] == kind):
                        c = {k: v for k, v in m["content"].items() if k not in ("execution_count", "traceback")}
                        if "image/png" in c.get("data", {}):
                            c["data"] = sorted(c["data"])
                        what.append((kind, plain(json.dumps(c, sort_keys=True))))
            told.append((code, what))
    return told


@only_native
def test_both_hosts_show_the_same():
    for mine, theirs in zip(story("qlora"), story("python3")):
        assert mine == theirs


@only_native
def test_nan_is_sent_as_null():
    with running("qlora") as k:
        _, shown = k.run("display({'application/x-a+json': {'n': float('nan'), 'm': [float('inf')]}}, raw=True)")
        assert shown[-1]["content"]["data"]["application/x-a+json"] == {"n": None, "m": [None]}


@only_native
def test_idle_signals_do_not_kill():
    with running("qlora") as k:
        for s in (signal.SIGINT, signal.SIGUSR1, signal.SIGWINCH):
            if s == signal.SIGUSR1:
                k.run("import signal; signal.signal(signal.SIGUSR1, lambda *a: None)")
            for _ in range(20):
                os.kill(k.pid, s)
                time.sleep(0.01)
        k.client.control_channel.send(k.client.session.msg("interrupt_request", {}))
        assert k.client.get_control_msg(timeout=60)["msg_type"] == "interrupt_reply"   # it came while the kernel was idle
        reply, shown = k.run("import time; time.sleep(.2); 'alive'")
        assert result(shown) == ["'alive'"]
        k.run("signal.setitimer(signal.ITIMER_REAL, .05, .05); signal.signal(signal.SIGALRM, lambda *a: n.append(1)); n = []")
        time.sleep(0.5)
        _, shown = k.run("import time\nwhile len(n) <= 3: time.sleep(.3)\nsignal.setitimer(signal.ITIMER_REAL, 0); len(n) > 3")
        assert result(shown) == ["True"]


@only_native
def test_a_signal_that_a_thread_takes_stops_nothing():
    """A thread of the user's does not block SIGINT; one that arrives while no cell runs is not meant for the next."""
    with running("qlora") as k:
        k.run("import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()")
        for request in ("cell", "complete"):
            os.kill(k.pid, signal.SIGINT)
            time.sleep(0.2)
            if request == "complete":
                k.client.complete("pri", 3)
                assert "print" in k.client.get_shell_msg(timeout=60)["content"]["matches"]
            reply, shown = k.run("time.sleep(.2); 'alive'")
            assert result(shown) == ["'alive'"], reply


@only_native
def test_stop_where_jupyter_ignores_interrupts():
    """As one started from a script with & does, and its kernels after it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with running("qlora") as k:
            request = k.send("print('on', flush=True)\nwhile True: pass")
            k.wait_for_text("on")
            k.interrupt()
            assert k.collect(request)[0]["ename"] == "KeyboardInterrupt"
    finally:
        signal.signal(signal.SIGINT, before)


@only_native
def test_nothing_is_said_before_the_first_cell():
    """Not even by xeus, which reports its version: JupyterLab showed that in the first cell, in red."""
    manager = jupyter_client.KernelManager(kernel_name="qlora")
    manager.start_kernel(stderr=subprocess.DEVNULL)
    client = manager.client()
    client.start_channels()
    try:
        seen, end = [], time.monotonic() + 120
        while time.monotonic() < end:
            try:
                seen.append(client.get_iopub_msg(timeout=0.1))
            except queue.Empty:
                if any(m["parent_header"].get("msg_type") == "kernel_info_request" for m in seen):
                    end = min(end, time.monotonic() + 0.5)   # longer than output is held back
                client.kernel_info()
        assert seen and not [m["content"] for m in seen if m["msg_type"] == "stream"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@only_native
def test_exit_restart_shutdown():
    with running("qlora") as k:
        reply, _ = k.run("import atexit; atexit.register(lambda: open(%r, 'w').write('x'))" % (scratch.name + "/left"))
        reply, _ = k.run("exit()")
        assert reply["payload"][0] == {"source": "ask_exit", "keepkernel": False}
        assert wait_for(lambda: not k.alive())
        assert Path(scratch.name, "left").exists()
    k = Kernel("qlora")
    k.send("print('on', flush=True)\nwhile True: pass")
    k.wait_for_text("on")
    k.manager.restart_kernel()
    k.client.wait_for_ready(timeout=300)
    assert result(k.run("1 + 1")[1]) == ["2"]
    k.send("print('on', flush=True)\nimport time; time.sleep(100)")
    k.wait_for_text("on")
    clock = Clock()
    k.manager.shutdown_kernel()
    assert clock.seconds() < 2
    k.client.stop_channels()


@only_native
def test_killed_front_end_leaves_no_kernel():
    code = ("import sys, time; sys.path.insert(0, %r); from kernels import *\n"
            "k = Kernel('qlora'); print(k.pid, flush=True); time.sleep(100)" % str(Path(__file__).parent))
    front = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(front.stdout.readline())
    front.kill()
    front.wait()

    def gone():
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
        except OSError:
            return True
    assert wait_for(gone)


def test_notebook_run(tmp_path):
    """nbclient: an endless cell is interrupted and the rest goes on; the last state of an updated output is kept."""
    for name in hosts:
        nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(s) for s in (
            "print('start')\nwhile True: pass", "h = display('first', display_id='x')", "h.update('last')",
            "import matplotlib.pyplot as plt\nplt.plot([1, 2]);", "1/0", "'end'")])
        nbclient.NotebookClient(nb, timeout_func=lambda cell: 2 if "while" in cell.source else 300, kernel_name=name, interrupt_on_timeout=True,
                                allow_errors=True).execute()
        out = [c.outputs for c in nb.cells]
        assert out[0][-1].ename == "KeyboardInterrupt"
        assert out[1][0].data["text/plain"] == "'last'"
        assert "image/png" in out[3][0].data
        assert out[4][0].ename == "ZeroDivisionError"
        assert out[5][0].data["text/plain"] == "'end'"
        nbformat.validate(nb)


@only_native
def test_install_into_a_virtual_environment(tmp_path):
    """make install with an environment's Python: named after it, with its packages; make uninstall takes it away."""
    env = tmp_path / "my env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", env], check=True)
    site = next((env / "lib").glob("python*/site-packages"))
    ours = next((build / "venv/lib").glob("python*/site-packages"))
    (site / "tests.pth").write_text(str(ours))
    (site / "only_here.py").write_text("where = 'in the environment'\n")
    data = tmp_path / "data"
    tools = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "PYTHON")}
    make = ["make", "-s", f"BUILD={build}", f"PYTHON={env}/bin/python"]
    compiles = subprocess.run(make + ["-n", "-W", "magics/extension.c", f"{build}/magics/extension.o"], cwd=root, env=tools, capture_output=True, text=True)
    assert "-isystem" in compiles.stdout, "a Python in a folder with a blank is asked for its headers, too"
    out = subprocess.run(make + ["install"], cwd=root, env=dict(tools, JUPYTER_DATA_DIR=str(data)), capture_output=True, text=True)
    assert out.returncode == 0, out.stdout + out.stderr
    spec = data / "kernels/qlora-my-env"
    assert {f.name for f in spec.iterdir()} >= {"kernel.json", "qlora-kernel", "logo-32x32.png", "logo-64x64.png", "logo-svg.svg"}
    assert json.loads((spec / "kernel.json").read_text())["display_name"] == "QLoRA (Python, my env)"
    old = os.environ["JUPYTER_PATH"]
    os.environ["JUPYTER_PATH"] = str(data)
    try:
        with running("qlora-my-env") as k:
            assert result(k.run("import only_here; only_here.where")[1]) == ["'in the environment'"]
            assert str(env) in result(k.run("import sys; sys.executable")[1])[0]
    finally:
        os.environ["JUPYTER_PATH"] = old
    out = subprocess.run(make + ["uninstall"], cwd=root, env=dict(tools, JUPYTER_DATA_DIR=str(data)), capture_output=True, text=True)
    assert out.returncode == 0 and not spec.exists(), out.stdout + out.stderr


@pytest.mark.parametrize("name", hosts)
def test_stop_in_a_callback_that_cannot_raise(name, tmp_path, monkeypatch):
    """An exception in a weak reference's callback is printed and forgotten; a Stop that arrives there must not be."""
    monkeypatch.setenv("QLORA_ENGINE", str(Path(__file__).parent / "fake_engine.py"))
    monkeypatch.setenv("PYTHONPATH", str(build / "python"))
    with running(name, cwd=str(tmp_path)) as k:
        reply, _ = k.run("%load_ext qlora\nimport qlora, signal, weakref\nclass Dying: pass\ndraw = qlora._host.chart\n"
                         "def chart(text):\n    x = Dying()\n"
                         "    r = weakref.ref(x, lambda _: signal.raise_signal(signal.SIGINT))\n    del x\n    return draw(text)\n"
                         "qlora._host.chart = chart\nget_ipython().run_line_magic('qlora', 'load tiny'); None")
        assert reply["status"] == "ok", reply
        k.run("%qlora data tiny;")
        reply, _ = k.run("%qlora train --max_steps 100000")
        assert reply["status"] == "error" and "KeyboardInterrupt" in reply["ename"] and "resume" in reply["evalue"], reply
