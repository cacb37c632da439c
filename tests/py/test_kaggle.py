"""kaggle/qlora-2xt4.ipynb through papermill in IPython 7.34 with the wheel installed: every cell, on the tiny model and two CPU ranks."""
import json
import os
import shutil
import subprocess

import pytest
from front_end import ROOT
from test_wheel import PYTHON, installed  # noqa: F401: a fixture

PAGE = ROOT / "kaggle" / "qlora-2xt4.ipynb"


def execute(folder, name, **parameters):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("QLORA") and k != "PYTHONPATH"}
    words = [x for k, v in dict(parameters, TINY=True, OUTPUT=str(folder)).items() for x in ("-p", k, str(v))]
    out = subprocess.run([PYTHON.parent / "papermill", PAGE, folder / name, "-k", "python3", "--no-progress-bar", *words], cwd=folder,
                         env=dict(environment, KAGGLE_KERNEL_RUN_TYPE="Batch", HF_TOKEN="hf_not_to_be_shown"), capture_output=True, text=True,
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
    assert "fits" in outputs(page, "%qlora plan")[0] and "5 of 5 checks hold" in "".join(outputs(page, "%qlora verify"))
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
