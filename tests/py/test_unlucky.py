"""Stop, fork and strange text where nobody expects them: `qlora.run` in plain Python, the engine a fake one."""
import os
import pathlib
import signal
import socket
import subprocess
import sys

import pytest
from clock import Clock, wait_for
from front_end import BUILD, FAKE, environment, python

SETUP = "import os, signal, sys, qlora\nqlora.run('load', 'tiny'); qlora.run('data', 'tiny'); qlora.run('config', devices='0,1')\n"


def said(code, cwd, how=""):
    r = python(SETUP + code, cwd, how)
    assert r.returncode == 0, r.stderr + r.stdout
    return r.stdout


def test_a_loop_of_quick_verbs_can_be_stopped(tmp_path):
    """A quick verb looks for no Stop: pressed in the middle of one, or just before it began, it ends the loop."""
    out = said("""
for where in ("libraries", "before"):
    n, core, real = 0, qlora._core, qlora._host.libraries
    class Pressed:
        def __getattr__(self, name): return getattr(core, name)
        def run(self, line, body):
            if where == "before" and n == 3: signal.raise_signal(signal.SIGINT)
            return core.run(line, body)
    qlora._core = Pressed()
    def libraries():
        if n == 3: signal.raise_signal(signal.SIGINT)
        return real()
    if where == "libraries": qlora._host.libraries = libraries
    try:
        for n in range(6): qlora.run("info" if where == "libraries" else "help")
    except KeyboardInterrupt as e:
        print(where, n, "|", e)
    qlora._core, qlora._host.libraries = core, real
    qlora.run("train", max_steps=3)   # what was pressed then is not pressed now
    print("trained")
""", tmp_path)
    lines = out.splitlines()
    assert [x.split("|")[0].strip() for x in lines if "|" in x and x.startswith(("lib", "bef"))] == ["libraries 3", "before 3"], out
    assert lines.count("trained") == 2


def test_a_file_of_quick_verbs_can_be_stopped(tmp_path):
    p = subprocess.Popen([str(BUILD / "qlora")], cwd=tmp_path, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    os.set_blocking(p.stdin.fileno(), False)
    p.stdin.write(b"help train\n" * 1000)
    p.stdin.flush()
    p.stdout.readline()
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=300)
    assert p.returncode == 130 and b"stopped after help" in err, (p.returncode, err)


def test_bench_with_bitsandbytes_can_be_stopped(tmp_path):
    """Another program that takes its time must not hold a Stop up."""
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "bitsandbytes.py").write_text("")
    (tmp_path / "slow" / "torch.py").write_text("import os, signal, time\nos.kill(os.getppid(), signal.SIGINT)\ntime.sleep(600)\n")
    out = said("""
import json
sys.path.insert(0, os.getcwd() + "/slow")
os.environ["PYTHONPATH"] += os.pathsep + os.getcwd() + "/slow"
try:
    qlora._host.bitsandbytes(json.dumps({"rows": 8, "cols": 8, "backend": "cpu"}))
except KeyboardInterrupt:
    print("plain")
qlora._core = type("Core", (), dict(vars(qlora._core), run=lambda line, body: qlora._host.bitsandbytes(json.dumps({"rows": 8, "cols": 8, "backend": "cpu"}))))
try:
    qlora.run("bench")
except KeyboardInterrupt:
    print("in a verb")
""", tmp_path)
    assert "plain" in out and "in a verb" in out


def engine_of(pid):
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            words = pathlib.Path(f"/proc/{child}/cmdline").read_bytes()
            if FAKE.name.encode() in words and b"--devices" not in words:
                return int(child)
    return None


def ended(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


FORK = """
qlora.run("train", max_steps=3)
if os.fork() == 0:
    sys.stdout.write(f"child {os.getpid()}\\n"); sys.stdout.flush()
    signal.pause()
"""


@pytest.mark.parametrize("end", ["killed", "closed"])
def test_the_engine_ends_with_the_notebook_though_a_fork_lives(tmp_path, end):
    """A worker of multiprocessing outlives a killed notebook: it must not keep the engine and its devices."""
    code = SETUP + FORK + ("signal.pause()" if end == "killed" else "qlora._core.close()\nprint('closed', flush=True)\nsignal.pause()")
    p = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True)
    child = None
    try:
        line = ""
        while not line.startswith("child"):
            line = p.stdout.readline()
            assert line
        child = int(line.split()[1])
        if end == "killed":
            engine = engine_of(p.pid)
            assert engine
            p.kill()
            p.wait()
            assert wait_for(lambda: ended(engine), 30)
        else:
            assert p.stdout.readline() == "closed\n" and wait_for(lambda: engine_of(p.pid) is None, 30)
        assert not ended(child)
    finally:
        p.kill()
        p.wait()
        if child:
            os.kill(child, signal.SIGKILL)


def test_a_fork_has_verbs_of_its_own(tmp_path):
    """An engine of its own, the parent's stays; also where the fork was made inside a verb."""
    out = said("""
qlora.run("train", max_steps=3)
def forked():
    pid = os.fork()
    if pid == 0:
        try:
            r = qlora.run("train", max_steps=4, run_name=f"child{len(os.listdir('runs'))}")
            os._exit(40 + len(r.loss))
        except BaseException as e:
            print(e, flush=True)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print("outside", forked(), flush=True)
draw = qlora._host.chart
inside = []
def chart(text):
    if not inside: inside.append(forked())
    return draw(text)
qlora._host.chart = chart
qlora.run("plot", "run-1")
print("inside", inside, len(qlora.run("train", max_steps=5).loss))
""", tmp_path)
    assert "outside 44" in out and "inside [44] 5" in out, out


def test_a_loud_engine_takes_no_memory(tmp_path):
    """16 MiB of words: the last ones are kept, in case it dies."""
    out = said("""
qlora.run("train", max_steps=60)
held = [os.stat(f"/proc/self/fd/{fd}").st_blocks * 512 for fd in os.listdir("/proc/self/fd")
        if "qlora-engine" in (os.path.lexists(f"/proc/self/fd/{fd}") and os.readlink(f"/proc/self/fd/{fd}") or "")]
print("held", held[0] >> 20)
""", tmp_path, "loud")
    assert int(out.split("held ")[1]) <= 2, out


def test_completion_while_a_verb_runs(tmp_path):
    """A front end may ask in another thread: there is nothing to offer then, and nothing is raised."""
    out = said("""
import threading
class Event: line, symbol = "%qlora tr", "tr"
found = []
def other(text):
    t = threading.Thread(target=lambda: found.append(qlora._complete(None, Event)))
    t.start(); t.join()
qlora._host.print = other
qlora.run("train", max_steps=3)
qlora._host.print = lambda text: None
print("found", found[0], qlora._complete(None, Event))
Event.line = "%qlora \\udcff"
print("none", qlora._complete(None, Event))
""", tmp_path)
    assert "found [] ['train']" in out and "none []" in out, out


def test_text_that_is_no_text(tmp_path):
    out = said(r"""
for args in (("load", "a\udcff"), ("load", "a\0b"), ("generate", "half a pair \ud83d")):
    try: qlora.run(*args)
    except qlora.Error as e: print("Error:", e)
print(qlora.run("generate", 'a "quoted" \\ {name} # no comment; ünï \n second line')["prompts"])
""", tmp_path)
    assert out.count("Error:") == 3 and "no text in UTF-8" in out and "NUL" in out, out
    assert "{name} # no comment; ünï \\n second line" in out


@pytest.mark.parametrize("folder", ["with blank", "it's \"quoted\"", "{name} # no; comment", "ünïcode", b"no \xff utf-8"])
def test_folders_of_any_name(tmp_path, folder):
    where = os.path.join(os.fsencode(tmp_path), folder if isinstance(folder, bytes) else os.fsencode(folder))
    os.mkdir(where)
    r = subprocess.run([sys.executable, "-c", SETUP + "r = qlora.run('train', max_steps=4)\nprint(len(qlora.run('plot', r)['runs'][0]['history']) > 3, qlora.run('save', 'out dir'))"],
                       cwd=where, env=dict(environment(), HOME=os.fsdecode(where)), capture_output=True)
    assert r.returncode == 0, r.stderr.decode(errors="replace")
    assert b"True" in r.stdout and os.path.exists(os.path.join(where, b"out dir", b"adapter_model.safetensors"))
    r = subprocess.run([str(BUILD / "qlora")], input=b"load tiny\ndata tiny\nconfig --devices 0,1\ntrain --max_steps 4\n", cwd=where, env=dict(environment(), HOME=os.fsdecode(where)),
                       capture_output=True)
    assert r.returncode == 0, r.stderr.decode(errors="replace")


def shell_process(cwd, text, how="", **env):
    p = subprocess.Popen([str(BUILD / "qlora")], cwd=cwd, env=dict(environment(how), **env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    p.stdin.write(text)
    p.stdin.close()
    return p


def test_stop_while_the_engine_starts(tmp_path):
    p = shell_process(tmp_path, "load tiny\ndata tiny\nconfig --devices 0,1\ntrain\n", "deaf")
    engine = wait_for(lambda: engine_of(p.pid))
    assert engine
    clock = Clock()
    p.send_signal(signal.SIGINT)
    assert p.wait(60) == 130 and clock.seconds() < 2
    assert "stopped while the engine was starting" in p.stderr.read() and wait_for(lambda: ended(engine))


def test_stop_while_a_server_says_nothing(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        p = shell_process(tmp_path, "load org/model\n", HF_ENDPOINT=f"http://127.0.0.1:{server.getsockname()[1]}", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="0")
        asked, _ = server.accept()
        with asked:
            assert asked.recv(1) == b"G"
            clock = Clock()
            p.send_signal(signal.SIGINT)
            assert p.wait(60) == 130 and clock.seconds() < 2
            assert "stopped" in p.stderr.read()
