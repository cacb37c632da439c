"""The extension in IPython 7.34 with ipykernel 6.17, as Kaggle has them; without matplotlib, so that curves are SVG."""
import pytest
from front_end import BUILD, Kernel, stopping

PYTHON = BUILD / "venv-ipython7" / "bin" / "python"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    if not PYTHON.exists():
        pytest.fail(f"{PYTHON} is missing: make {PYTHON.parents[1]}/.done")
    k = Kernel(tmp_path_factory.mktemp("ipython7"), "fp16 pace=0.02", interpreter=PYTHON)
    reply, out = k.run("%qlora load tiny;\n%qlora data tiny;\n%qlora config --max_steps 12 --devices 0,1;\nimport IPython")
    assert reply["status"] == "ok", reply
    assert k.value("IPython.__version__") == "7.34.0"
    yield k
    k.close()


def test_train(kernel):
    reply, out = kernel.run("r = %qlora train")
    assert reply["status"] == "ok", reply
    shown = [c for t, c in out if t in ("display_data", "update_display_data")]
    ids = [c["transient"]["display_id"] for t, c in out if t == "display_data"]
    assert len(ids) == 2
    bar, curve = ([c for c in shown if c["transient"]["display_id"] == i][-1] for i in ids)
    assert "<progress" in bar["data"]["text/html"] and "data:image/svg+xml;base64," in curve["data"]["text/html"]
    assert kernel.value("len(r.loss)") == 12
    reply, out = kernel.run("r")
    assert set([c for t, c in out if t == "execute_result"][0]["data"]) == {"text/plain"}


def test_expansion_errors_and_silence(kernel):
    reply, out = kernel.run("lr = 3e-4\nc = %qlora config --learning_rate {lr}\nc['learning_rate']")
    assert [c for t, c in out if t == "execute_result"][0]["data"]["text/plain"] == "0.0003"
    reply, out = kernel.run("%qlora trian")
    (error,) = [c for t, c in out if t == "error"]
    assert reply["status"] == "error" and len(error["traceback"]) == 1 and "did you mean 'train'?" in error["evalue"]
    reply, out = kernel.run("%qlora config;")
    assert not [c for t, c in out if t == "execute_result"]


def test_stop(kernel):
    press, pressed = stopping(kernel, 4000, 1)
    reply, out = kernel.run("%qlora train --run_name stopped --max_steps 4000", during=press)
    assert reply["ename"] == "KeyboardInterrupt" and "%qlora resume stopped" in reply["evalue"]
    assert pressed[0].seconds() < 1.5
