"""`bench` beside bitsandbytes: the same weight, the same bits."""
import os
import subprocess
import sys

from engine import PROGRAM


def test_bitsandbytes_decodes_the_same_bits(tmp_path):
    code = "import qlora\nqlora.run('config', devices='cpu:1')\nprint(qlora.run('bench', seconds=1)['rows'][-1]['text'])"
    env = dict(os.environ, PYTHONPATH=os.path.join(os.path.dirname(os.path.abspath(PROGRAM)), "python"), QLORA_ENGINE=os.path.abspath(PROGRAM))
    r = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert r.returncode == 0, r.stderr
    assert "by bitsandbytes " in r.stdout and r.stdout.rstrip().endswith("; same bits"), r.stdout
