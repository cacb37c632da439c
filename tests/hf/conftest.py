import os
import sys

here = os.path.dirname(os.path.abspath(__file__))
root = os.path.dirname(os.path.dirname(here))
sys.path[:0] = [here, os.path.join(root, "tests", "golden")]
# One thread: bitsandbytes' OpenMP and torch's threads wait for each other at length on a busy machine.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
    os.environ[name] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", "ignore")  # the libraries' own deprecations


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=int(os.environ.get("SEED") or 1), help="of the random models")


def pytest_report_header(config):
    return f"random models from seed {config.getoption('--seed')} (make test-hf SEED={config.getoption('--seed')})"


@pytest.fixture
def seed(request):
    """Its own for every test, so that one alone can be run again with the seed printed at the top."""
    return request.config.getoption("--seed") + sum(request.node.nodeid.encode())
