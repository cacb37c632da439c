"""A short run of `make soak`."""
import subprocess, sys

import pytest

from kernels import native, root, why_not


@pytest.mark.skipif(not native, reason=why_not)
def test_soak():
    done = subprocess.run([sys.executable, root / "tests/soak.py", "--interrupts", "40", "--kills", "5"],
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing is left over" in done.stdout
