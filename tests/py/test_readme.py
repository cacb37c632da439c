"""README's first lines, as they stand but for their number of steps, with the real engine on whatever devices are here."""
import re

from front_end import BUILD, ROOT, shell


def test_first_lines(tmp_path):
    block = re.search(r"```\n(%qlora.*?)```", (ROOT / "README.md").read_text(), re.S).group(1)
    lines = [re.sub(r"steps \d+", "steps 12", line.removeprefix("run = ")) for line in block.splitlines()]
    assert len(lines) == 6 and "baseline" in lines[-1]
    out = shell("\n".join(lines) + "\n", tmp_path, engine=BUILD / "qlora-engine", timeout=300)
    assert out.returncode == 0, out.stderr[-2000:]
    assert "step 12/12" in out.stdout and "12/12 losses: same bits" in out.stdout
