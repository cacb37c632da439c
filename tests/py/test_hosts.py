"""The same cells in the native kernel, in stock ipykernel of today and in Kaggle's (IPython 7.34): the same is seen."""
import json
import os
import re
from pathlib import Path

import pytest

import front_end
from kernels import build, hosts, running

OLD = Path(front_end.BUILD) / "venv-ipython7/bin/python"

CELLS = [
    "%qlora load tiny",
    "%qlora data tiny;",
    "%%qlora config\ndevices: 0,1\nmax_steps: 20   # as few\nr: 8",
    "steps = 12\nr = %qlora train --max_steps {steps}",
    "r",
    "len(r.loss), r.name, r['grad_norm'][0] > 0",
    "import qlora; qlora.last.name",
    "%qlora plot run-1",
    "%qlora memory",
    "m = %qlora memory run-1",
    "%qlora verify;",
    "%qlora eval",
    "%qlora generate \"a b\"",
    "%%qlora generate\na b\nc",
    "%qlora save there",
    "%qlora trian",
    "%qlora train --max_steps many",
    "%qlora config --lora_rnak 4",
    "qlora.run('config', r=4)['r']",
    "%qlora help plan",
    "%qlora unload",
]


def plain(text):
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    text = re.sub(r"\d\d:\d\d", "TIME", text)
    return re.sub(r"[\d.,]+ (it/s|s/it|tokens/s|GiB free)", r"N \1", text)


def told(reply, outputs):
    """What is left on the page after a cell: kinds, and the text of the last state of each."""
    seen, where = [], {}
    for kind, c in outputs:
        if kind in ("display_data", "update_display_data", "execute_result"):
            # Kaggle's test environment has no matplotlib: there pictures are SVG in HTML.
            item = ["shown", plain(c["data"]["text/plain"]), sorted(set(c["data"]) - {"image/png", "text/html"})]
            ident = c.get("transient", {}).get("display_id")
            if ident and ident in where:
                seen[where[ident]] = item
                continue
            if ident:
                where[ident] = len(seen)
            seen.append(item)
        elif kind == "stream":
            if seen and seen[-1][0] == c["name"]:
                seen[-1][1] += plain(c["text"])
            else:
                seen.append([c["name"], plain(c["text"])])
        elif kind == "error":
            seen.append(["error", c["ename"], c["evalue"], [plain(line) for line in c["traceback"]]])
    return [reply["status"], reply.get("ename"), seen]


def story(host, folder):
    folder.mkdir()
    if host == "ipython7":
        k = front_end.Kernel(folder, interpreter=OLD)
        try:
            return [told(*k.run(code)) for code in CELLS]
        finally:
            k.close()
    os.environ.update(front_end.environment())
    with running(host, cwd=str(folder)) as k:
        k.run("%load_ext qlora")   # said again in the native kernel, which has it: nothing changes
        result = []
        for code in CELLS:
            reply, shown = k.run(code)
            result.append(told(reply, [(m["msg_type"], m["content"]) for m in shown]))
        return result


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    folder, before = tmp_path_factory.mktemp("hosts"), dict(os.environ)
    names = hosts + (["ipython7"] if OLD.exists() else [])
    try:
        return {name: story(name, folder / name) for name in names}
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_what_is_told(stories):
    for name, cells in stories.items():
        status = [c[0] for c in cells]
        assert status == ["error" if code in CELLS[15:18] else "ok" for code in CELLS], (name, status)
        assert "12/12" in json.dumps(cells[3]) and "did you mean 'train'?" in json.dumps(cells[15])


@pytest.mark.parametrize("name", ["qlora", "ipython7"])
def test_hosts_show_the_same(stories, name):
    if name not in stories:
        pytest.skip("the native kernel is not built here: see make info" if name == "qlora" else "make build/venv-ipython7/.done")
    for code, mine, theirs in zip(CELLS, stories[name], stories["python3"]):
        assert mine == theirs, code
