"""The CUDA sources without a GPU: what the sm_75 kernels take, and that every launch passes through the one check of a T4's limits."""
import pathlib
import re
import subprocess
import sys

import pytest

from front_end import BUILD, ROOT

sys.path.insert(0, str(ROOT / "tests" / "cuda"))
import resources  # noqa: E402

KERNELS = ROOT / "kernels" / "cuda"


@pytest.mark.skipif(not list(BUILD.glob("kernels/cuda/*.ptxas")), reason="no CUDA build here: make info says why")
def test_kernels_take_what_the_table_says():
    run = subprocess.run([sys.executable, str(ROOT / "tests" / "cuda" / "resources.py"), str(BUILD)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


LINES = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z3oneIfEvPf' for 'sm_75'
ptxas info    : Function properties for _Z3oneIfEvPf
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16 bytes cumulative stack size, 66000 bytes smem, 400 bytes cmem[0]
ptxas info    : Compiling entry function '_Z3oneIfEvPf' for 'sm_90'
ptxas info    : Function properties for _Z3oneIfEvPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers, 360 bytes cmem[0]
"""


def test_changes_are_named():
    kernels = resources.parse(LINES)
    assert kernels == {"_Z3oneIfEvPf": (40, 16, 20, 66000)}
    assert resources.plain(list(kernels)) == {"_Z3oneIfEvPf": "one<float>"}
    kernels = {"one<float>": (40, 16, 20, 66000), "two": (10, 0, 0, 0)}
    assert resources.changed(kernels, {"one<float>": (32, 16, 20, 66000), "three": (1, 0, 0, 0)}) == [
        "two: new, {'registers': 10, 'stack': 0, 'spilled': 0, 'shared': 0}", "three: gone", "one<float>: registers 32 -> 40"]
    text = "\n".join(resources.broken(kernels, {}))
    assert "one<float>: 66000 bytes of shared memory" in text and "20 bytes spilled" in text and "two" not in text
    assert "spilled" not in "\n".join(resources.broken(kernels, {"one<float>": "a reason"}))


def test_every_launch_is_checked():
    """cu_launch asks cu_prepare, which in the T4 build refuses what does not fit; registers fit by __launch_bounds__."""
    for f in [*KERNELS.glob("*.cu"), *KERNELS.glob("*.h")]:
        text = f.read_text()
        assert "<<<" not in text, f"{f.name} launches past cu_launch"
        assert "cudaLaunch" not in text or f.name == "cu.h" or f.stem.endswith("90"), f"{f.name} launches past cu_launch"
        for m in re.finditer(r"__global__ void([^(]*)\(", text):
            assert m[1].strip() == "__launch_bounds__", f"{f.name}: a kernel without __launch_bounds__: {text[m.start():m.start() + 90]}"
    header = (KERNELS / "cu.h").read_text()
    assert header.count("cudaLaunchKernel") == 1 and re.search(r"CU_T4\)\s+QL_TRY\(cu_prepare\(", header)


def test_what_is_launched_early_waits():
    """A kernel that comes while the one ahead is at work touches nothing before cu_ops_ahead; nf4_matmul, only its weights."""
    early = 0
    for f in KERNELS.glob("*.cu"):
        text = f.read_text()
        bodies = {m[1]: m[2] for m in re.finditer(r"__global__ void __launch_bounds__\([^)]*\)\s+(\w+)\([^{;]*\)\s*\{\s*([^\n]*)", text)}
        for m in re.finditer(r'cu_launch_early\(q, "\w+", (\w+)', text):
            names = {m[1]} if m[1] in bodies else set(re.findall(r"\w+", text[text.rindex(f"auto {m[1]} = ", 0, m.start()):m.start()].split(";")[0])) & set(bodies)
            early += len(names)
            for name in names:
                assert bodies[name] == "cu_ops_ahead();", f"{f.name}: {name} begins with {bodies[name]}"
    assert early >= 6
    few = (KERNELS / "nf4_few.cu").read_text()
    assert few.count("cu_launch_early") == 1 and "    cu_ops_ahead();\n    load_x();\n" in few
