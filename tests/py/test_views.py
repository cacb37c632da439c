"""What is left of the outputs where they are read later: nbconvert, a sanitizer, a notebook without matplotlib."""
import base64
import json
import math
import re
import xml.etree.ElementTree as ET

import nbformat
import pytest
from front_end import environment, python

CELLS = ["%load_ext qlora", "%qlora load tiny;\n%qlora data tiny;", "%qlora info", "r = %qlora train --max_steps 30", "%qlora plot", "%qlora memory", "%qlora verify", "%qlora help"]


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    import os
    from nbclient import NotebookClient
    folder = tmp_path_factory.mktemp("views")
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in CELLS],
                                  metadata={"kernelspec": {"name": "python3", "display_name": "Python", "language": "python"}})
    old = dict(os.environ)
    os.environ.update(environment("fp16 warn"))
    try:
        NotebookClient(nb, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()
    finally:
        os.environ.clear()
        os.environ.update(old)
    nbformat.validate(nb)
    return nb


def outputs(nb, source):
    return next(c for c in nb.cells if c.source.startswith(source)).outputs


def test_last_state_is_kept(notebook):
    bar, curve = outputs(notebook, "r = %qlora train")
    assert "30/30" in bar["data"]["text/plain"] and "1.52" in bar["data"]["text/html"]
    assert base64.b64decode(curve["data"]["image/png"])[:8] == b"\x89PNG\r\n\x1a\n"
    assert max(len(line) for line in bar["data"]["text/plain"].splitlines()) <= 80
    assert max(len(line) for line in curve["data"]["text/plain"].splitlines()) <= 80


def test_peak_is_the_most_that_was_in_use(notebook):
    text = outputs(notebook, "r = %qlora train")[0]["data"]["text/plain"]
    shown = re.findall(r"([\d.]+) GiB / 15.0 GiB\s+peak ([\d.]+) GiB", text)
    assert len(shown) == 2, text
    for device, (used, peak) in enumerate(shown):   # what fake_engine.memory says each tenth step
        most = max(2.9 + 1.2 + 0.3 * math.sin(step / 7 + device) + (160 + 320 + 420 + 610) / 1024 for step in (10, 20, 30))
        assert float(used) <= float(peak) == round(most, 2), text


def test_evaluations_stay_in_the_table(tmp_path):
    """At odd steps, too: live the last one, in the end all (of many some) beside the round steps."""
    code = """
import json, qlora
shown = []
class Publisher:
    def publish(self, data, **more): shown.append(data["text/plain"])
class Shell:
    display_pub, user_ns = Publisher(), {}
qlora._host.ip = Shell()
qlora._open()
qlora.run("load", "tiny"); qlora.run("data", "tiny"); qlora.run("train", max_steps=300, run_name="long")
print("SHOWN" + json.dumps([t for t in shown if "grad norm" in t]))
"""
    r = python(code, tmp_path, "pace=0.01")
    assert r.returncode == 0, r.stderr
    tables = [[line.split() for line in re.split("─[─ ]*\n", text)[-1].splitlines() if re.match(r" *\d+ +\d\.\d{4}", line)]
              for text in json.loads(r.stdout.split("SHOWN", 1)[1])]
    live = [t for t in tables[:-1] if int(t[-1][0]) > 10]
    assert len(live) > 2
    for t in live:
        last = int(t[-1][0]) // 10 * 10
        with_eval = [row[0] for row in t if len(row) == 6]
        assert len(t) == 8 and with_eval and int(with_eval[-1]) in (last, last - 10), t   # the evaluation comes behind its step
    with_eval = [int(row[0]) for row in tables[-1] if len(row) == 6]
    assert set(range(20, 301, 20)) <= set(with_eval) and {1, 25, 275} <= {int(row[0]) for row in tables[-1]} and len(tables[-1]) <= 32, tables[-1]


def test_nbconvert_keeps_curve_table_and_memory(notebook):
    from nbconvert import HTMLExporter, MarkdownExporter
    html, _ = HTMLExporter().from_notebook_node(notebook)
    assert "<progress" in html and "image/png;base64" in html and 'class="dataframe"' in html and "5.57 GiB" in html
    markdown, files = MarkdownExporter().from_notebook_node(notebook)
    assert "<progress" in markdown and any(name.endswith(".png") for name in files["outputs"]) and "dataframe" in markdown


def test_html_needs_nothing_that_a_sanitizer_drops(notebook):
    allowed = {"table", "thead", "tbody", "tr", "th", "td", "div", "span", "b", "i", "pre", "progress", "meter", "img"}
    seen = 0
    for cell in notebook.cells:
        for out in cell.outputs:
            html = out.get("data", {}).get("text/html")
            if html is None:
                continue
            seen += 1
            assert set(re.findall(r"<([a-z]+)", html)) <= allowed, html
            assert "flex" not in html and "position:" not in html and "url(" not in html and " on" not in re.sub(r">[^<]*<", "><", html)
            ET.fromstring("<all>" + re.sub(r"<(img[^>]*)>", r"<\1/>", html.replace("&nbsp;", " ")) + "</all>")  # every tag is closed
    assert seen >= 5


def test_svg_without_matplotlib(tmp_path):
    code = """
import sys, json
sys.modules["matplotlib"] = None  # as if it were not installed
import qlora
qlora.run("load", "tiny"); qlora.run("data", "tiny"); qlora.run("train", max_steps=30); qlora.run("train", max_steps=30)
p = qlora.run("plot", "run-1", "run-2")
print(p)
print("HTML" + p._bundle["data"]["text/html"])
"""
    r = python(code, tmp_path, "fp16")
    assert r.returncode == 0, r.stderr
    html = r.stdout.split("HTML", 1)[1]
    svg = base64.b64decode(re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', html).group(1)).decode()
    root = ET.fromstring(svg)
    texts = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"run-1", "run-2", "loss", "step", "30 of 30: no difference"} <= set(texts), texts
    assert texts.count("0") == 1 and not [t for t in texts if t and "e-" in t], texts   # a scale would say less than nothing
    assert re.search(r"\n +0 ┤⠉*\n", r.stdout.split("no difference\n")[1]), r.stdout
    assert sum(1 for _ in root.iter("{http://www.w3.org/2000/svg}path")) >= 3


def test_chart_of_hostile_numbers(tmp_path):
    (tmp_path / "t.json").write_text(json.dumps({"log_history": [
        {"step": 1, "loss": 1e300}, {"step": 2, "loss": None}, {"step": 3, "loss": -1e300}, {"step": 4, "loss": "x"}, {"step": 1e18, "loss": 0},
        {"loss": 3}, 5, None, {"step": -7, "loss": 1e-300}]}))
    r = python("import qlora\nprint(qlora.run('plot', 't.json'))", tmp_path)
    assert r.returncode == 0, r.stderr
    (tmp_path / "e.json").write_text('{"log_history": []}')
    assert python("import qlora\nprint(qlora.run('plot', 'e.json'))", tmp_path).returncode == 0


def test_text_is_escaped(tmp_path):
    code = """
import qlora
qlora.run("config", run_name="<img src=x onerror=alert(1)>")
print(qlora.run("config")._bundle["data"]["text/html"])
"""
    r = python(code, tmp_path)
    assert r.returncode == 0 and "<img" not in r.stdout and "&lt;img" in r.stdout


HOSTILE = """
import sys, qlora
if WITHOUT: sys.modules["matplotlib"] = None
name = "<img src=x onerror=alert(1)>\\"'& $\\\\frac$ \\x1b[31m\\x07 \U0001f999"
pages = []
qlora._host.print = lambda text: None
show = qlora._host.show
class Publisher:
    def publish(self, data, **more): pages.append(data)
class Shell:
    display_pub, user_ns = Publisher(), {}
qlora._host.ip = Shell()
qlora._open()
run = lambda *a, **k: pages.append((qlora.run(*a, **k)._bundle or {"data": {}})["data"])
run("load", "tiny"); run("data", "tiny"); run("info"); run("config", devices="0,1", lr_scheduler_type="linear"); run("config", all=True)
for i in range(2):
    run("train", max_steps=12, run_name=name.replace("/", "") + str(i))
for verb in (("plot", qlora.last, name + "0"), ("memory",), ("memory", qlora.last), ("verify",), ("eval",), ("generate", name), ("save", name), ("help",),
             ("baseline",)):
    run(*verb)
import json
print("PAGES" + json.dumps(pages))
"""


@pytest.mark.parametrize("without", [False, True])
def test_nothing_hostile_gets_into_a_page(tmp_path, without):
    """Names, devices, warnings, answers: shown as they are, in HTML and in SVG, and no chart fails on them."""
    r = python(HOSTILE.replace("WITHOUT", str(without)), tmp_path, "hostile warn fp16")
    assert r.returncode == 0 and not r.stderr, r.stderr
    pages = [p["text/html"] for p in json.loads(r.stdout.split("PAGES", 1)[1]) if "text/html" in p]
    assert sum("&lt;img src=x onerror=alert(1)&gt;&quot;" in p for p in pages) >= 8
    seen = 0
    for page in pages:
        pictures = [base64.b64decode(x).decode() for x in re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)]
        for text in ["<all>" + re.sub(r'<(img [^>]*src="data:[^>]*)>', r"<\1/>", page.replace("&nbsp;", " ")) + "</all>", *pictures]:
            for e in ET.fromstring(text).iter():
                assert e.get("src", "data:image/").startswith("data:image/") and not any(k.startswith("on") for k in e.attrib), text
        seen += len(pictures)
    assert bool(seen) == without
