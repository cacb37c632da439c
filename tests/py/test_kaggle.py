"""kaggle/qlora-2xt4.ipynb through papermill in IPython 7.34 with the wheel installed: every cell, on the tiny model and two CPU ranks."""
import hashlib
import json
import os
import re
import shutil
import subprocess
import types

import pytest
from front_end import BUILD, ROOT
from test_wheel import PYTHON, installed  # noqa: F401: a fixture

XEUS = (BUILD / "jupyter").exists()   # the native kernel can be built here
PAGE = ROOT / "kaggle" / "qlora-2xt4.ipynb"


def execute(folder, name, source=PAGE, **parameters):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("QLORA") and k != "PYTHONPATH"}
    words = [x for k, v in dict(parameters, TINY=True, OUTPUT=str(folder)).items() for x in ("-p", k, str(v))]
    out = subprocess.run([PYTHON.parent / "papermill", source, folder / name, "-k", "python3", "--no-progress-bar", *words], cwd=folder,
                         env=dict(environment, JUPYTER_DATA_DIR=str(folder / "jupyter"), KAGGLE_KERNEL_RUN_TYPE="Batch", HF_TOKEN="hf_not_to_be_shown"), capture_output=True, text=True,
                         timeout=600)
    assert out.returncode == 0, out.stderr[-4000:]
    text = (folder / name).read_text()
    assert "hf_not_to_be_shown" not in text
    return json.loads(text)


def outputs(page, start):
    """The texts of the code cell whose source has `start`."""
    (cell,) = [c for c in page["cells"] if c["cell_type"] == "code" and start in "".join(c["source"])]
    return ["".join(o.get("text") or o.get("data", {}).get("text/plain", "")) for o in cell["outputs"]]


def last_bits(run):
    steps = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines() if '"ev":"step"' in line.replace(" ", "")]
    return steps[-1]["step"], steps[-1]["loss_bits"]


@pytest.fixture(scope="module")
def page(installed, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("kaggle")
    return folder, execute(folder, "out.ipynb")


def test_every_cell(page):
    folder, page = page
    assert all(c["execution_count"] for c in page["cells"] if c["cell_type"] == "code")
    assert "6/6 losses: same bits" in "".join(outputs(page, "verdict"))
    assert "7.34.0" in "".join(outputs(page, "%qlora info"))
    assert "fits" in outputs(page, "%qlora plan")[0] and re.search(r"(\d) of \1 checks hold", "".join(outputs(page, "%qlora verify")))
    assert {p.name for p in (folder / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


def test_every_way_gives_the_same_bits(page):
    folder, page = page
    runs = [p for p in (folder / "runs").glob("run-*") if p.name not in ("run-1", "run-1-baseline")]
    paged = [r for r in runs if "paged" in json.loads((r / "job.json").read_text()).get("optim", "")]
    exact = [r for r in runs if r not in paged]
    table = outputs(page, "import pandas as pd")[-1]
    refused = [line for line in table.splitlines() if "not supported" in line]
    assert all(line.startswith("pipeline, ") for line in refused), table
    assert len(paged) == 1 and len(exact) == 9 - len(refused)
    assert len({last_bits(r) for r in exact}) == 1 and last_bits(exact[0])[0] == 3


@pytest.mark.skipif(not XEUS, reason="no xeus here")
def test_native_kernel(installed, tmp_path):  # noqa: F811
    """The page's last cell, after those that it needs."""
    page = json.loads(PAGE.read_text())
    page["cells"] = [c for c in page["cells"] if "".join(c["source"]).startswith(("MODEL", "import glob", "%load_ext", "if NATIVE"))]
    (tmp_path / "page.ipynb").write_text(json.dumps(page))
    folder, page = tmp_path, execute(tmp_path, "out.ipynb", tmp_path / "page.ipynb", NATIVE=True, SOURCE=str(ROOT))
    said = "".join(outputs(page, "if NATIVE"))
    assert "notebook 01 on it: " in said and "did not work" not in said, said
    book = json.loads((folder / "native.ipynb").read_text())
    assert all(c["execution_count"] for c in book["cells"] if c["cell_type"] == "code")
    assert "losses: same bits" in json.dumps(book)


def install_cell(folder, **parameters):
    """The page's first cell in an environment of its own: what it said, and whether qlora is there then."""
    subprocess.run([PYTHON, "-m", "venv", folder / "venv"], check=True)
    (cell,) = [c for c in json.loads(PAGE.read_text())["cells"] if "def install():" in "".join(c["source"])]
    given = "TINY = False\n" + "".join(f"{k} = {str(v)!r}\n" for k, v in dict({"INPUT": folder / "none", "WHEEL": "", "SOURCE": ""}, **parameters).items())
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "BUILD") and not k.startswith("QLORA")}
    out = subprocess.run([folder / "venv" / "bin" / "python", "-c", given + "".join(cell["source"]) + "\nimport qlora; print(qlora.run('load', 'tiny')['name'])"],
                         cwd=folder, env=dict(environment, CUDA="0"), capture_output=True, text=True, timeout=900)
    return out.returncode, out.stdout + out.stderr


def test_installs_what_is_attached(installed, tmp_path):  # noqa: F811
    attached = tmp_path / "input" / "some-data-set" / installed.name
    attached.parent.mkdir(parents=True)
    shutil.copy(installed, attached)
    code, said = install_cell(tmp_path, INPUT=tmp_path / "input", WHEEL="/no/such.whl")
    assert code == 0 and f"attached wheel {attached}: " in said and "/no/such.whl" not in said, said


def test_installs_from_source_where_there_is_no_wheel(tmp_path):
    """A clone, built by pip without an index: the CPU's engine."""
    if subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{ROOT}", tmp_path / "clone"]).returncode:
        pytest.skip("this tree is no git checkout")
    code, said = install_cell(tmp_path, WHEEL="/no/such.whl", SOURCE=tmp_path / "clone")
    assert code == 0 and "wheel /no/such.whl: did not work: " in said and "built from source: " in said, said


def cells(*starts):
    sources = ["".join(c["source"]) for c in json.loads(PAGE.read_text())["cells"] if c["cell_type"] == "code"]
    return [next(source for source in sources if s in source) for s in starts]


@pytest.mark.parametrize("gpus, what", [([], "GPU T4 x2.*no driver"), ([("Tesla P100", 60)], "GPU T4 x2"), ([("Tesla T4", 75)], "One GPU: "), ([("Tesla T4", 75)] * 2, "")])
def test_says_which_accelerator(gpus, what, capsys):
    devices = [{"name": n, "arch": a, "backend": "cuda"} for n, a in gpus] + [{"name": "processor", "arch": 0, "backend": "cpu"}]
    (source,) = cells('gpus = [d["name"]')
    names = {"TINY": False, "qlora": types.SimpleNamespace(run=lambda verb: {"devices": devices, "missing": ["no driver"] * (not gpus)})}
    if "GPU T4 x2" in what:
        with pytest.raises(RuntimeError, match=what):
            exec(source, names)
        names["TINY"] = True
    exec(source, names)
    said = capsys.readouterr().out
    assert said.startswith("One GPU: ") if what.startswith("One") else said == ""


OLD = "the NVIDIA driver here is too old: it knows CUDA 12.6, this build was made with CUDA 13.0"


def test_a_wheel_for_a_newer_driver_leads_to_source(tmp_path, monkeypatch, capsys):
    """pip and the engine are played; what the page does then is its own."""
    (source,) = cells("def install():")
    for at, name in ((0, "some/qlora-1-py3-none-any.whl"), (1, "qlora/notes.txt")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("")
    ran, names = [], {"WHEEL": "", "INPUT": str(tmp_path), "SOURCE": "", "TINY": False}

    def run(command, **_):
        ran.append(command)
        return types.SimpleNamespace(returncode=0, stderr="", stdout="" if "-c" not in command or "--force-reinstall" in sum(ran, []) else OLD + "\n")
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.chdir(tmp_path)   # a folder named qlora lies here: it is not the package
    monkeypatch.setattr("importlib.util.find_spec", lambda name: types.SimpleNamespace(origin=None))
    with pytest.raises(RuntimeError, match="wheel is for a newer driver than Kaggle's: set SOURCE"):
        exec(source, names)
    assert OLD in capsys.readouterr().out
    exec(source, dict(names, SOURCE=str(tmp_path)))
    assert ran[-1][-2:] == ["--force-reinstall", f"{tmp_path}/magics"] and "built from source: " in capsys.readouterr().out
    ran.clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: types.SimpleNamespace(origin="/there/qlora/__init__.py"))
    exec(source, dict(names, SOURCE=str(tmp_path)))   # the cell again, with the old wheel installed
    assert ran[-1][-2:] == ["--force-reinstall", f"{tmp_path}/magics"]
    exec(source, dict(names))
    assert "qlora is installed already" in capsys.readouterr().out


def test_resume_where_the_run_is_here_already(tmp_path, monkeypatch):
    """A kernel that was restarted in mid-session, or the cell run again: what lies in runs/ is gone on with, not written over."""
    (source,) = cells("if RESUME:")
    source = source.partition("else:")[0]
    here, attached = tmp_path / "runs" / "run-1", tmp_path / "input" / "run-1"
    for folder, text in ((here, "later"), (attached, "earlier")):
        folder.mkdir(parents=True)
        (folder / "events.jsonl").write_text(text)
    monkeypatch.chdir(tmp_path)
    resumed = []
    names = {"qlora": types.SimpleNamespace(run=lambda verb, run: resumed.append((verb, (run / "events.jsonl").read_text())))}
    for given in ("runs/run-1", str(attached)):
        exec(source, dict(names, RESUME=given))
    shutil.rmtree(here)
    exec(source, dict(names, RESUME=str(attached)))
    assert resumed == [("resume", "later"), ("resume", "later"), ("resume", "earlier")]


def test_release_is_drafted(tmp_path):
    """release.sh with programs that record what they are asked for."""
    for name, text in {"kaggle/release.sh": (ROOT / "kaggle" / "release.sh").read_text(), "core/qlora.h": '#define QL_VERSION "1.2.3"\n',
                       "build/dist/qlora-1.2.3-cp310-abi3-manylinux_2_34_x86_64.whl": "wheel", "bin/git": "#!/bin/sh\necho 0123abc\n",
                       "bin/make": '#!/bin/sh\necho make "$@" >> "$LOG"\n', "bin/nvcc": "#!/bin/sh\necho release $TOOLKIT, V\n",
                       "bin/gh": '#!/bin/sh\necho gh "$@" >> "$LOG"\nwhile [ "$1" != --notes-file ]; do shift; done\ncat "$2" >> "$LOG"\n'}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    log = tmp_path / "log"

    def release(toolkit, *words):
        log.write_text("")
        env = dict(os.environ, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}", LOG=str(log), TOOLKIT=toolkit, NVCC=str(tmp_path / "bin" / "nvcc"))
        return subprocess.run(["bash", tmp_path / "kaggle" / "release.sh", *words], env=env, capture_output=True, text=True), log.read_text()

    done, asked = release("12.8")
    wheel = "build/dist/qlora-1.2.3-cp310-abi3-manylinux_2_34_x86_64.whl"
    assert done.returncode == 0 and asked.startswith(f"make -s wheel NVCC={tmp_path}/bin/nvcc\ngh release create v1.2.3 {wheel} --draft --title qlora 1.2.3 "), asked
    assert "built with CUDA 12.8" in asked and "built from commit 0123abc" in asked and hashlib.sha256(b"wheel").hexdigest() in asked
    done, asked = release("13.0")
    assert done.returncode == 1 and asked == "" and "the toolkit here is 13.0; Kaggle needs CUDA 12" in done.stderr
    assert "built with CUDA 13.0" in release("13.0", "--any-cuda")[1]
    (tmp_path / "bin" / "gh").unlink()
    if not shutil.which("gh"):
        done, asked = release("12.8")
        assert done.returncode == 0 and "There is no `gh` here" in done.stdout and wheel in done.stdout and "gh" not in asked


def test_says_what_to_set(tmp_path):
    code, said = install_cell(tmp_path)
    assert code != 0 and "attach a data set that holds its wheel, or set WHEEL or SOURCE" in said


def test_next_session(page, tmp_path):
    """What an ended session leaves, attached and resumed elsewhere, ends in the same bits."""
    earlier = tmp_path / "input" / "run-1"
    shutil.copytree(page[0] / "runs" / "run-1", earlier)
    shutil.rmtree(earlier / "checkpoint-12")
    execute(tmp_path, "again.ipynb", RESUME=str(earlier))
    assert last_bits(tmp_path / "runs" / "run-1") == last_bits(page[0] / "runs" / "run-1")
    assert last_bits(earlier)[0] == 12, "the attached folder stays as it was"


def test_shipped_clean():
    page = json.loads(PAGE.read_text())
    assert not any(c.get("outputs") or c.get("execution_count") for c in page["cells"])
    (parameters,) = [c for c in page["cells"] if "parameters" in c["metadata"].get("tags", [])]
    assert "TINY = False" in "".join(parameters["source"])
    metadata = json.loads((ROOT / "kaggle" / "kernel-metadata.json").read_text())
    assert metadata["machine_shape"] == "NvidiaTeslaT4" and metadata["code_file"] == PAGE.name and metadata["enable_internet"]


def test_xeus_that_was_built_here_goes_first(tmp_path):
    """Ubuntu's own, another version, may lie beside it."""
    def asked(*prefixes):
        return subprocess.run([PYTHON, ROOT / "kernel" / "spec.py", "make"], capture_output=True, text=True, check=True,
                              env=dict(os.environ, XEUS_PREFIX=":".join(str(tmp_path / p) for p in prefixes))).stdout

    for place, major, minor in (("built", 2, 4), ("ubuntu", 1, 0)):
        (tmp_path / place / "include" / "xeus").mkdir(parents=True)
        (tmp_path / place / "include" / "xeus" / "xeus.hpp").write_text(f"#define XEUS_VERSION_MAJOR {major}\n#define XEUS_VERSION_MINOR {minor}\n")
    assert "KERNEL_WHY := xeus is 1.0" in asked("none", "ubuntu")
    assert "xeus is" not in asked("built", "ubuntu") and f"KERNEL_LIBS := -L{tmp_path / 'built' / 'lib'} " in asked("built", "ubuntu")
    assert "xeus is 1.0" in asked("ubuntu", "built"), "the first is what the compiler takes"
