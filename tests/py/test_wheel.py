"""The wheel in an environment of its own (IPython 7.34, as on Kaggle), driven through ipykernel; nothing of the build folder is in reach."""
import json
import os
import pathlib
import re
import subprocess
import zipfile

import pytest
from front_end import BUILD, Kernel

PYTHON = BUILD / "venv-kaggle" / "bin" / "python"


@pytest.fixture(scope="session")
def installed():
    """The Python with the wheel; pip says what the installation changed."""
    (wheel,) = (BUILD / "dist").glob("qlora-*.whl")
    before = freeze()
    subprocess.run([PYTHON, "-m", "pip", "install", "-q", "--no-index", "--force-reinstall", "--disable-pip-version-check", wheel], check=True)
    after = freeze()
    assert {p for p in before ^ after if not p.startswith("qlora")} == set(), "another package was touched"
    return wheel


def freeze():
    text = subprocess.run([PYTHON, "-m", "pip", "freeze", "--disable-pip-version-check"], capture_output=True, text=True, check=True).stdout
    return set(text.split("\n")) - {""}


def test_what_it_needs(installed, tmp_path):
    with zipfile.ZipFile(installed) as z:
        z.extractall(tmp_path)
        names = z.namelist()
    binaries = [n for n in names if n.endswith((".so", "qlora-engine"))]
    assert {pathlib.Path(n).name for n in binaries} >= {"_core.abi3.so", "qlora-engine"}
    for name in binaries:
        text = subprocess.run(["objdump", "-p", tmp_path / name], capture_output=True, text=True, check=True).stdout
        glibc = max((tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_(\d+\.\d+)", text)), default=(0, 0))
        assert glibc <= (2, 35), f"{name} needs glibc {glibc}: Ubuntu 22.04 has 2.35"
        libraries = set(re.findall(r"NEEDED +(\S+)", text))
        assert libraries <= {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2", "libstdc++.so.6", "libgcc_s.so.1"}, (name, libraries)
    assert not any("/tests/" in n or n.endswith(".pyc") for n in names)
    assert "manylinux" in installed.name and "cp310-abi3" in installed.name


@pytest.fixture(scope="module")
def kernel(installed, tmp_path_factory):
    kept = {k: os.environ.pop(k) for k in list(os.environ) if k.startswith("QLORA") or k == "PYTHONPATH"}
    k = Kernel(tmp_path_factory.mktemp("wheel"), interpreter=PYTHON, env={"KAGGLE_KERNEL_RUN_TYPE": "Batch"})
    os.environ.update(kept)
    yield k
    k.close()


def test_trains_on_two_ranks(kernel):
    assert "site-packages/qlora" in kernel.value("__import__('qlora').__file__")
    reply, out = kernel.run("%qlora load tiny;\n%qlora data tiny;\n%qlora config --devices cpu:2 --fsdp true --max_length 128;\n"
                            "r = %qlora train --max_steps 6")
    assert reply["status"] == "ok", reply
    assert kernel.value("len(r.loss)") == 6
    # In a batch the log keeps stdout alone.
    assert "step 6/6" in "".join(c["text"] for t, c in out if t == "stream")
    reply, out = kernel.run("b = %qlora baseline --steps 6\nb['baseline']")
    assert reply["status"] == "ok" and kernel.value("b['baseline']['same'], b['baseline']['shared']") == (6, 6)


def test_reference_comes_along(installed):
    alone = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("QLORA")}
    out = subprocess.run([PYTHON, "-m", "qlora.reference", "--help"], env=alone, capture_output=True, text=True)
    assert out.returncode == 0 and "--adapter" in out.stdout
