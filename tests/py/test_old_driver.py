"""A driver older than the CUDA that the backend was built with (Kaggle's may be): named, with numbers and what to do; never the CPU unasked."""
import os
import subprocess

import pytest
from front_end import BUILD, ROOT

LIBRARY = max((p for p in (BUILD / "libqlora-cuda.so", ROOT / "build-t4" / "libqlora-cuda.so") if p.exists()), key=os.path.getmtime, default=None)


@pytest.mark.skipif(LIBRARY is None, reason="no CUDA backend was built here")
def test_named_with_numbers(tmp_path):
    (tmp_path / "cuda.c").write_text("int cuInit(unsigned f) { return (int)f * 0; }\nint cuDriverGetVersion(int *v) { *v = 11080; return 0; }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", tmp_path / "cuda.c"], check=True)
    env = dict(os.environ, LD_LIBRARY_PATH=str(tmp_path), QLORA_ENGINE=str(LIBRARY.parent / "qlora-engine"))
    program = LIBRARY.parent / "qlora"

    def say(*verbs):
        words = [w for v in verbs for w in ("-c", v)]
        done = subprocess.run([program, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        return done.returncode, " ".join((done.stdout + done.stderr).split())
    code, text = say("info")
    assert code == 0 and "the NVIDIA driver here is too old: it knows CUDA 11.8, this build was made with CUDA 1" in text, text
    assert "needs driver 5" in text and "pip install ./magics" in text
    code, text = say("load tiny", "data tiny", "train --max_steps 2")
    assert code != 0 and "driver here is too old" in text and "`--devices cpu` runs without" in text, text
    code, text = say("load tiny", "data tiny", "train --max_steps 2 --devices cpu")
    assert code == 0 and "step 2/2" in text, text
