"""The extension in a stock IPython kernel: magics, results, live updates, stop, death of the engine."""
import json
import time

import pytest
from front_end import BUILD, Kernel, python, step_of, stopping


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    k = Kernel(tmp_path_factory.mktemp("notebook"), "fp16 warn pace=0.02")
    reply, out = k.run("%qlora load tiny;\n%qlora data tiny;\n%qlora config --max_steps 40 --devices 0,1;")
    assert reply["status"] == "ok", reply
    yield k
    k.close()


def shown(out, kind):
    return [c for t, c in out if t == kind]


def test_quick_verbs_are_their_own_view(kernel):
    reply, out = kernel.run("%qlora info")
    (result,) = shown(out, "execute_result")
    assert set(result["data"]) == {"text/plain", "text/html", "application/vnd.qlora.v1+json"}
    assert 'class="dataframe"' in result["data"]["text/html"] and not shown(out, "display_data")
    assert result["data"]["application/vnd.qlora.v1+json"]["devices"][0]["name"] == "Fake T4"
    reply, out = kernel.run("i = %qlora info")
    assert not shown(out, "execute_result") and not shown(out, "display_data")
    assert kernel.value("i['devices'][1]['id']") == "00:05.0"
    assert "Fake T4" in kernel.value("repr(i)")


def test_semicolon_silences(kernel):
    reply, out = kernel.run("x = %qlora config;")
    assert kernel.value("x") is None
    reply, out = kernel.run("%qlora config;")
    assert not shown(out, "execute_result")


def test_live_view(kernel):
    begun = time.time()
    reply, out = kernel.run("r = %qlora train --run_name live --max_steps 120")
    took = time.time() - begun
    assert reply["status"] == "ok"
    first, updates = shown(out, "display_data"), shown(out, "update_display_data")
    assert len(first) == 2 and first[0]["transient"]["display_id"] != first[1]["transient"]["display_id"]
    bars = [u for u in updates if u["transient"] == first[0]["transient"]]
    assert 2 <= len(bars) <= 2 * took + 2
    assert any("<progress" in b["data"]["text/html"] for b in bars[:-1]) and "<meter" in bars[-1]["data"]["text/html"]
    assert "120/120" in bars[-1]["data"]["text/plain"] and "skipped" in json.dumps(bars[-1]["data"])
    assert len(bars[-1]["data"]["application/vnd.qlora.v1+json"]["history"]) == 132
    assert all("history" not in b["data"]["application/vnd.qlora.v1+json"] for b in bars[:-1])
    curves = [u for u in [first[1], *updates] if u["transient"] == first[1]["transient"]]
    assert all("image/png" in c["data"] for c in curves)
    assert curves[-1]["metadata"]["image/png"] == {"width": 720, "height": 280}
    assert not shown(out, "stream"), shown(out, "stream")


def test_run_objects(kernel):
    kernel.run("r = %qlora train --run_name obj --max_steps 12")
    assert kernel.value("len(r.loss), len(r['learning_rate']), r.name, str(r.path)") == (12, 12, "obj", "runs/obj")
    assert kernel.value("r.frame.shape[0], list(r.frame['step'])[:3]") == (13, [1, 2, 3])
    assert kernel.value("r.memory[0]['devices'][1]['name']") == "Fake T4"
    assert "12 steps" in kernel.value("repr(r)") and kernel.value("__import__('qlora').last.name") == "obj"
    reply, out = kernel.run("r")
    assert set(shown(out, "execute_result")[0]["data"]) == {"text/plain"}
    reply, out = kernel.run("r.nothing")
    assert reply["ename"] == "AttributeError"


def test_a_run_is_named_by_its_variable(kernel):
    kernel.run("import qlora\nmine = %qlora train --run_name named --max_steps 12")
    reply, out = kernel.run("a = %qlora plot mine {mine} named\nb = %qlora memory mine\nc = %qlora resume mine --max_steps 14")
    assert reply["status"] == "ok", reply
    assert kernel.value("[len(r['history']) for r in a['runs']], c.name, c['step']") == ([13, 13, 13], "named", 14)
    assert "14 steps, the last 4 in " in kernel.value("repr(c)")
    reply, out = kernel.run("%qlora save there --run mine")
    assert reply["status"] == "ok", reply
    for what in ("nothing", "rows"):   # neither a run nor the variable of one
        reply, out = kernel.run(f"rows = [{{'text': 'a'}}]\n%qlora plot {what}")
        assert reply["status"] == "error" and f"no run '{what}' under runs" in reply["evalue"], reply


def test_plots_leave_matplotlib_alone(kernel):
    code = """
import matplotlib, sys
from matplotlib.figure import Figure
before = dict(matplotlib.rcParams)
ax = r.plot()
own = Figure().add_subplot()
same = r.plot(ax=own, diff="live")
(type(ax).__name__, same is own, before == dict(matplotlib.rcParams), ax.get_title(loc="left"), len(own.figure.axes), "matplotlib.pyplot" in sys.modules)
"""
    reply, out = kernel.run(code)
    assert reply["status"] == "ok", reply
    text = shown(out, "execute_result")[0]["data"]["text/plain"]
    assert text.startswith("('Axes', True, True, 'loss', 2"), text
    assert "image/png" in shown(out, "display_data")[0]["data"]


def test_variables_are_data(kernel):
    reply, out = kernel.run("ds = [{'text': 'a'}, {'text': 'b\\u00e9'}]\nd = %qlora data ds\n"
                            "import pandas, numpy\ndf = pandas.DataFrame({'prompt': ['a', 'b'], 'completion': ['x', 'y'], 'n': numpy.arange(2), 'm': [0.5, None]})\n"
                            "e = %qlora data df\nc = %qlora config")
    assert reply["status"] == "ok", reply
    path = kernel.value("c['data']")
    assert path.startswith("runs/.data/df-") and kernel.value(f"open({path!r}).read()") == \
        '{"prompt": "a", "completion": "x", "n": 0, "m": 0.5}\n{"prompt": "b", "completion": "y", "n": 1, "m": null}\n'
    kernel.run("held = [{'text': 'c'}]\nh = %qlora config --eval_dataset held\n%qlora config --eval_dataset null;")
    assert kernel.value("open(h['eval_dataset']).read()") == '{"text": "c"}\n'
    # A generator is read once; a data set in blocks of its columns, as datasets.Dataset gives them.
    reply, out = kernel.run("g = ({'text': str(i)} for i in range(3))\n%qlora data g;\ntext = open(qlora.run('config')['data']).read()")
    assert kernel.value("text") == '{"text": "0"}\n{"text": "1"}\n{"text": "2"}\n'
    kernel.run("""
class Columns:
    column_names = ['text', 'n']
    def iter(self, batch_size):
        for i in range(0, 2500, batch_size):
            some = range(i, min(i + batch_size, 2500))
            yield {'text': [f'row {k}' for k in some], 'n': list(some)}
blocks = Columns()
%qlora data blocks;
text = open(qlora.run('config')['data']).read().splitlines()""")
    assert kernel.value("len(text), text[0], text[-1]") == (2500, '{"text": "row 0", "n": 0}', '{"text": "row 2499", "n": 2499}')
    # A data set that gives tables, pandas' words for nothing, and bytes.
    kernel.run("""
class Tables(Columns):
    def iter(self, batch_size):
        yield pandas.DataFrame({'text': ['a']})
    def with_format(self, kind):
        return Columns()
tables = Tables()
%qlora data tables;
text = open(qlora.run('config')['data']).read().splitlines()
holes = pandas.DataFrame({'text': ['a', pandas.NA, None], 'when': [pandas.NaT, pandas.NaT, pandas.Timestamp(0)], 'raw': [b'caf\\xc3\\xa9', None, None]})
%qlora data holes;
rows = open(qlora.run('config')['data']).read()""")
    assert kernel.value("len(text), text[0]") == (2500, '{"text": "row 0", "n": 0}')
    assert kernel.value("rows") == ('{"text": "a", "when": null, "raw": "caf\u00e9"}\n{"text": null, "when": null, "raw": null}\n'
                                    '{"text": null, "when": "1970-01-01 00:00:00", "raw": null}\n')
    reply, out = kernel.run("%qlora data df;")
    for code, part in [("ds = [1, 2]", "ds[0] is of type int"), ("ds = []", "ds has no rows"), ("ds = iter([])", "ds has no rows"),
                       ("open('ds', 'w').close()\nds = [{'text': 'a'}]", "also a file here: give one another name (or say ./ds for the file)"),
                       ("import os\nos.remove('ds')\ntiny = [{'text': 'a'}]\n%qlora data tiny;", "tiny is a variable of this notebook and also bundled data")]:
        reply, out = kernel.run(f"{code}\n%qlora data ds")
        assert reply["status"] == "error" and part in reply["evalue"], reply
    # What failed changed nothing, and left no part of a file.
    assert kernel.value("(%s)" % "__import__('qlora').run('config')['data']") == path
    assert kernel.value("__import__('glob').glob('runs/.data/*.part')") == []
    kernel.run("del tiny")
    # A name that is no data is a file's name.
    reply, out = kernel.run("def d(): pass\n%qlora data d;")
    assert reply["status"] == "error" and reply["evalue"].startswith("no data 'd': there is no such file, folder or variable"), reply
    kernel.run("%qlora data tiny;")


def test_expansion(kernel):
    kernel.run("lr = 3e-4\nc = %qlora config --learning_rate {lr}")
    assert kernel.value("c['learning_rate']") == 3e-4
    reply, out = kernel.run("%qlora config --learning_rate {nothing}")
    assert reply["status"] == "error" and "no variable nothing" in reply["evalue"]


def test_errors_are_one_line_and_red(kernel):
    reply, out = kernel.run("%qlora trian")
    assert reply["status"] == "error" and reply["ename"] == "Error" and "did you mean 'train'?" in reply["evalue"]
    (error,) = shown(out, "error")
    assert len(error["traceback"]) == 1
    reply, out = kernel.run("def mine():\n    import qlora\n    qlora.run('trian')\nmine()")
    assert "in mine" in shown(out, "error")[0]["traceback"][0]


def test_python_calls(kernel):
    reply, out = kernel.run("import qlora\nq = qlora.run('train', max_steps=3, run_name='by \"call\"', target_modules=['q_proj'], packing=True)")
    assert reply["status"] == "ok", reply
    assert kernel.value("q.name, q['job']['target_modules'], q['job']['packing']") == ('by "call"', ["q_proj"], True)
    assert kernel.value("len(qlora.run('plot', q, 'live')['runs'])") == 2


def test_completion(kernel):
    def complete(code):
        kernel.client.complete(code, len(code))
        while True:
            m = kernel.client.get_shell_msg(timeout=60)
            if m["msg_type"] == "complete_reply":
                return m["content"]["matches"]
    assert "train" in complete("%qlora tr")
    assert "--max_steps" in complete("%qlora train --max_st")
    assert {"live", "obj"} <= set(complete("%qlora plot "))
    assert "cosine" in complete("%qlora config --lr_scheduler_type cos")
    assert "grad_norm" in complete("%qlora plot --metric gr")
    # Nothing of Python's own is mixed in; values come before options.
    assert complete("%qlora plot --metric=g") == ["--metric=grad_norm"] and complete("r = %qlora trai") == ["train"]
    assert complete("%qlora config --devices ")[:4] == ["0", "1", "auto", "cpu"] and complete("%qlora config --lr_scheduler_type cosine_with_r") == ["cosine_with_restarts"]
    runs = complete("%qlora resume ")
    assert {"live", "obj"} <= set(runs) and "print" not in runs and [r[:2] == "--" for r in runs] == sorted(r[:2] == "--" for r in runs)
    assert complete("%%qlora config\nr: 4\nlr_sched") == ["lr_scheduler_kwargs", "lr_scheduler_type"]
    assert complete("%%qlora config\nlr_scheduler_type: cosine_with_r") == ["cosine_with_restarts"]
    assert "print" in complete("pri") and "print" in complete("%qlora load tiny\npri")


def test_inspection(kernel):
    kernel.client.inspect("%qlora", 6)
    m = kernel.client.get_shell_msg(timeout=60)
    assert m["content"]["found"] and "QLoRA fine-tuning" in m["content"]["data"]["text/plain"]


def test_stop_and_resume(kernel):
    press, pressed = stopping(kernel, 5000, 2)
    reply, out = kernel.run("%qlora train --run_name stopped --max_steps 5000", during=press)
    assert reply["status"] == "error" and reply["ename"] == "KeyboardInterrupt", reply
    assert pressed[0].seconds() < 1.5
    assert "checkpoint runs/stopped/checkpoint-" in reply["evalue"] and "%qlora resume stopped" in reply["evalue"]
    assert kernel.value("qlora.last['state']") == "stopped"
    step = kernel.value("qlora.last['step']")
    reply, out = kernel.run(f"s = %qlora resume --max_steps {step + 20}")
    assert reply["status"] == "ok", reply
    assert kernel.value("s['start']['resumed'], [h['step'] for h in s.history if 'loss' in h] == list(range(1, %d))" % (step + 21)) == (step, True)


def test_engine_death_leaves_the_notebook(kernel):
    def kill(out):
        if step_of(out, 5001) >= 0:
            import os
            import signal
            kernel.killed = True
            pid = kernel.manager.provisioner.pid
            for child in open(f"/proc/{pid}/task/{pid}/children").read().split():
                os.kill(int(child), signal.SIGSEGV)

    reply, out = kernel.run("mine = 42\n%qlora train --run_name dead --max_steps 5001", during=kill)
    assert reply["status"] == "error" and "SIGSEGV" in reply["evalue"] and "fresh engine" in reply["evalue"], reply
    step = kernel.value("qlora.last['step']")
    assert reply["evalue"].endswith(f"\ndead ended at step {step}, without a checkpoint: --save_steps N writes one every N steps" if step < 10 else
                                    f"; last checkpoint runs/dead/checkpoint-{step // 10 * 10}; go on with %qlora resume dead"), reply
    reply, out = kernel.run("%qlora train --run_name after --max_steps 3")
    assert reply["status"] == "ok" and kernel.value("mine") == 42


def test_cells_with_bodies(kernel):
    reply, out = kernel.run("%%qlora config\nlora:\n  r: 32\n")
    assert reply["status"] == "ok" and kernel.value("qlora.run('config')['r']") == 32
    reply, out = kernel.run("%%qlora generate --max_new_tokens 5\nWhat is\nthe capital?\n")
    assert reply["status"] == "ok", reply
    assert "the capital? Paris" in json.dumps(out[-1][1]) or any("the capital?" in json.dumps(c) for t, c in out)
    reply, out = kernel.run("%%qlora config\nlora_rnak: 32\n")
    assert "line 1: unknown key" in reply["evalue"]


def test_an_answer_s_line_is_cut_by_columns(tmp_path):
    r = python("import qlora\nqlora.run('load', 'tiny')\nr = qlora.run('generate', 'a')\nprint(ascii(r._line), r['texts'][0] == 'Да, ' * 20)", tmp_path, "cyrillic")
    assert r.stdout.endswith(ascii("Да, " * 15 + " …") + " True\n"), r.stdout + r.stderr


def test_one_verb_at_a_time(kernel):
    code = """
import _thread, pathlib, threading, time
said = []
def other():
    while not pathlib.Path("runs/threads/events.jsonl").exists(): time.sleep(.01)   # it trains
    try: qlora.run("config")
    except Exception as e: said.append(str(e))
    _thread.interrupt_main()
t = threading.Thread(target=other); t.start()
u = %qlora train --run_name threads --max_steps 100000
"""
    reply, out = kernel.run(code)
    assert reply["ename"] == "KeyboardInterrupt" and "one verb at a time" in kernel.value("said[0]")


def test_without_ipython(tmp_path):
    r = python("import qlora\nqlora.run('load', 'tiny'); qlora.run('data', 'tiny')\nr = qlora.run('train', max_steps=6)\nprint(len(r.loss), r)", tmp_path)
    assert r.returncode == 0 and "step 6/6" in r.stdout and "\n6 run-1: 6 steps" in r.stdout, r.stdout + r.stderr


def test_batch_prints_lines_too(tmp_path, monkeypatch):
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    k = Kernel(tmp_path, "")
    k.run("%qlora load tiny;\n%qlora data tiny;")
    reply, out = k.run("%qlora train --max_steps 10")
    k.close()
    assert "step  5/10" in "".join(c["text"] for c in shown(out, "stream")) and len(shown(out, "display_data")) == 2


def test_stable_abi(tmp_path):
    import subprocess
    from front_end import BUILD
    so = BUILD / "python" / "qlora" / "_core.abi3.so"
    undefined = subprocess.run(["nm", "-D", "--undefined-only", str(so)], capture_output=True, text=True).stdout.split()
    assert not [s for s in undefined if s.startswith("_Py") and s not in ("_Py_Dealloc", "_Py_NoneStruct", "_Py_TrueStruct", "_Py_FalseStruct") and not s.endswith("_SizeT")]
    needed = subprocess.run(["readelf", "-d", str(so)], capture_output=True, text=True).stdout
    assert "libpython" not in needed and "openblas" not in needed


def test_a_callback_that_fails_names_the_checkpoint(tmp_path):
    """The run is stopped for it, which writes one."""
    r = python(f"""
import os
os.environ["QLORA_ENGINE"] = {str(BUILD / "qlora-engine")!r}
import qlora
def follow(text):
    if '"ev":"step"' in text.replace(" ", ""):
        raise ValueError("mine")
qlora.run("load", "tiny"); qlora.run("data", "tiny")
qlora._core.listen(follow)
try:
    qlora.run("train", max_steps=2000, devices="cpu:1")
except ValueError as error:
    print(error)
""", tmp_path)
    saved = [p.name for p in (tmp_path / "runs/run-1").glob("checkpoint-*")]
    assert len(saved) == 1 and r.stdout.splitlines()[-1] == "mine", r.stdout + r.stderr
    assert f"checkpoint runs/run-1/{saved[0]}; go on with" in r.stdout, r.stdout


def test_the_home_folder_in_python(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    r = python("import qlora\nqlora.run('load', 'tiny')\nprint(qlora.run('data', '~/rows.jsonl')['name'])", tmp_path)
    assert r.stdout.strip() == f"{tmp_path}/rows.jsonl", r.stdout + r.stderr


def test_rows_that_cannot_be_written(tmp_path):
    (tmp_path / "runs").write_text("a file")
    text = """
import qlora, resource, signal
qlora.run("load", "tiny")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    qlora.run("data", [{"text": "a" * 1000}] * 1000)
except qlora.Error as error:
    print(error)
def rows():
    raise OSError("their own")
    yield
try:
    qlora.run("data", rows())
except OSError as error:
    print(error)
"""
    r = python(text, tmp_path)
    assert r.stdout.startswith("rows cannot be written in runs/.data: Not a directory: work in a folder"), r.stdout + r.stderr
    (tmp_path / "runs").unlink()
    r = python(text, tmp_path)
    assert "cannot be written in runs/.data: File too large" in r.stdout and r.stdout.endswith("their own\n"), r.stdout + r.stderr
    assert not list((tmp_path / "runs/.data").iterdir())


def test_none_is_as_if_not_given(tmp_path):
    r = python("""
import qlora, json
qlora.run("load", "tiny"); qlora.run("data", "tiny"); qlora.run("config", r=8)
qlora.run("config", save=None, reset=None)
qlora.run("train", max_steps=3, every=None)
qlora.run("generate", "a", run=None, system=None, compare=None, temperature=None)
qlora.run("eval", None)
qlora.run("config", save="c.json")
print(json.load(open("c.json"))["r"])
""", tmp_path)
    assert r.returncode == 0 and r.stdout.splitlines()[-1] == "8", r.stdout + r.stderr


def test_a_prompt_from_python_is_a_text(tmp_path):
    r = python("""
import qlora
qlora.run("load", "tiny")
print(len(qlora.run("generate", *["a", None, "b"])["texts"]))
for odd in (["a", "b"], [1, 2], [{"role": "user", "content": "a"}], 5):
    try:
        print(qlora.run("generate", odd))
    except qlora.Error as e:
        print(e)
""", tmp_path)
    lines = r.stdout.splitlines()[-5:]
    assert lines[0] == "2" and all(f"of type {t}: generate takes texts" in x for t, x in zip(("list", "list", "list", "int"), lines[1:])), r.stdout + r.stderr


def test_rows_are_given_to_plain_python(tmp_path):
    r = python("""
import qlora
rows = [{"text": "hi"}, {"text": "ho"}]
qlora.run("load", "tiny")
d = qlora.run("data", rows, eval_dataset=rows[:1])
print(d["rows"], open(qlora.run("config")["eval_dataset"]).read())
for odd in (5, {"text": ["a"]}, [1], []):
    try:
        qlora.run("data", odd)
    except qlora.Error as e:
        print(e)
""", tmp_path)
    assert r.returncode == 0, r.stderr
    assert r.stdout.splitlines() == ['2 {"text": "hi"}', "", *(f"data of type {t}: give a list of dicts or strings, a DataFrame, a Dataset, or a file's name" for t in ("int", "dict")),
                                     "rows[0] is of type int: rows are dicts (text, messages, prompt and completion) or strings", "rows has no rows"]
