"""Notebook 01 in JupyterLab, in a headless browser, by clicks. Run by `make test-lab` in its own environment (build/venv-lab).

Prints a line for each thing that was seen, keeps screenshots in build/screens, ends with "N passed, N failed, N skipped"."""
import json, os, re, shutil, signal, socket, subprocess, sys, tempfile, time, urllib.request
from pathlib import Path

import nbformat
from playwright.sync_api import sync_playwright

root = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(root / "tests/py"))
from clock import Clock  # noqa: E402
build = (root / os.environ.get("BUILD", "build")).resolve()
screens = build / "screens"
STEPS = 500                                          # Stop comes before the end also where the browser gets little of the machine
slow = float(os.environ.get("QLORA_TEST_SLOW", 1))   # for machines that are busy with something else
seen = {"passed": 0, "failed": 0, "skipped": 0}


def check(what, ok, detail=""):
    seen["passed" if ok else "failed"] += 1
    print(f"{'ok' if ok else 'not ok'} {what}" + ("" if ok else f": {detail}"), flush=True)


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    return None


class Server:
    """JupyterLab with our kernel, on a free port, in a folder of its own."""

    def __init__(self, folder):
        settings = folder / "settings"
        for name, value in {"apputils-extension/notification": {"checkForUpdates": False, "fetchNews": "false"},
                            "notebook-extension/tracker": {"windowingMode": "none"}}.items():
            file = settings / "@jupyterlab" / (name + ".jupyterlab-settings")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(value))
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        env = dict(os.environ, JUPYTER_PATH=str(build / "jupyter"), JUPYTERLAB_SETTINGS_DIR=str(settings),
                   JUPYTER_CONFIG_DIR=str(folder / "config"), IPYTHONDIR=str(folder / "ipython"), JUPYTERLAB_WORKSPACES_DIR=str(folder / "ws"),
                   JUPYTER_RUNTIME_DIR=str(folder / "runtime"))
        self.log = open(screens / "server.log", "w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}", "--IdentityProvider.token=",
             f"--ServerApp.root_dir={folder / 'work'}", "--LabApp.news_url=", "--ServerApp.port_retries=0"],
            env=env, stdout=self.log, stderr=self.log, cwd=folder)
        self.url = f"http://127.0.0.1:{port}"

        def up():
            try:
                return urllib.request.urlopen(self.url + "/api/status", timeout=2).status == 200
            except OSError:
                return self.process.poll() is not None
        if not wait_for(up, 300) or self.process.poll() is not None:
            sys.exit(f"JupyterLab did not start: {screens / 'server.log'}")

    def close(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.log.close()


class Notebook:
    """A notebook in the browser. Cells are numbered as in the file."""

    def __init__(self, page, url, name, folder=None):
        self.page, self.url, self.folder, self.shots = page, url, folder, 0
        page.goto(f"{url}/lab/tree/{name}?reset")
        page.wait_for_selector(".jp-Notebook .jp-Cell")
        # Without a kernel the page says "idle", too, and asks for one where a cell is run.
        name = page.locator(".jp-NotebookPanel-toolbar .jp-KernelName, .jp-NotebookPanel-toolbar .jp-Toolbar-kernelName")
        wait_for(lambda: name.count() and "No Kernel" not in name.first.inner_text(), 300)
        self.idle(300)

    def shot(self, name):
        self.shots += 1
        self.page.screenshot(path=screens / f"{self.shots:02d}-{name}.png")

    def cell(self, i):
        return self.page.locator(".jp-Notebook .jp-Cell").nth(i)

    def count(self):
        return self.page.locator(".jp-Notebook .jp-Cell").count()

    def idle(self, seconds=60):
        return wait_for(lambda: self.page.locator('.jp-Toolbar-kernelStatus[data-status="idle"], .jp-Notebook-ExecutionIndicator[data-status="idle"]').count() > 0, seconds)

    def button(self, command):
        self.page.locator(f'.jp-NotebookPanel-toolbar [data-command="{command}"]').first.click()

    def select(self, i):
        cell = self.cell(i)
        cell.scroll_into_view_if_needed()
        cell.locator(".jp-InputPrompt").first.click()
        return cell

    def start(self, i):
        """Runs a cell by the toolbar's button; again where the page was not ready for the first click."""
        before = self.prompt(i)
        for _ in range(5):
            cell = self.select(i)
            self.button("notebook:run-cell-and-select-next")
            if wait_for(lambda: self.prompt(i) != before, 4):
                break
        return cell

    def prompt(self, i):
        return self.cell(i).locator(".jp-InputPrompt").first.inner_text().strip()

    def finish(self, i, seconds=120):
        ended = wait_for(lambda: re.fullmatch(r"\[\d+\]:?", self.prompt(i)), seconds)
        time.sleep(0.3)
        return ended

    def run(self, i, seconds=120):
        self.start(i)
        return self.finish(i, seconds)

    def output(self, i):
        area = self.cell(i).locator(".jp-OutputArea")
        return area.inner_text() if area.count() else ""

    def red(self, i):
        """Whether a cell ended in an error."""
        said = self.cell(i).locator('[data-mime-type="application/vnd.jupyter.stderr"], [data-mime-type="application/vnd.jupyter.error"]')
        return any(re.search(r"^\w*(Error|Interrupt)\b", t, re.M) for t in said.all_inner_texts())

    def complete(self, found):
        """Tab until something is offered: the first may come before the page listens."""
        for _ in range(4):
            self.page.keyboard.press("Tab")
            if wait_for(found, 4):
                return True
        return False

    def add(self, source):
        """A cell at the end, typed."""
        self.select(self.count() - 1)
        n = self.count()
        self.button("notebook:insert-cell-below")
        wait_for(lambda: self.count() == n + 1)
        self.cell(n).locator(".cm-content").click()
        self.page.keyboard.insert_text(source)
        return n


def general(nb):
    """What any Python notebook does."""
    page = nb.page
    i = nb.add("import itertools, time\nh = display(0, display_id=True)\nfor n in itertools.count():\n    h.update(n); time.sleep(.1)")
    nb.start(i)
    values = set()
    wait_for(lambda: values.add(nb.output(i)) or len(values) >= 4)
    check("an output changes while its cell runs", len(values) >= 4, values)
    clock = Clock()
    nb.button("notebook:interrupt-kernel")
    nb.finish(i)
    check("Stop ends the cell in under a second or so", clock.seconds() < 2.5 * slow and "KeyboardInterrupt" in nb.output(i), nb.output(i))
    i = nb.add("import mat")
    done = nb.complete(lambda: any("math" in t for t in page.locator(".jp-Completer-item").all_inner_texts()))
    check("Tab completes Python", done, page.locator(".jp-Completer-item").all_inner_texts())
    page.keyboard.press("Escape")
    i = nb.add("len?")
    nb.run(i)
    check("`?` shows help", wait_for(lambda: "Return the number of items" in nb.output(i)), nb.output(i))
    i = nb.add("name = input('Who? ')")
    nb.start(i)
    box = page.locator(".jp-Stdin-input")
    box.wait_for()
    box.fill("Ada")
    box.press("Enter")
    check("input() asks and goes on", nb.finish(i), nb.prompt(i))
    i = nb.add("import matplotlib.pyplot as plt\nplt.plot([1, 3, 2]);")
    nb.run(i)
    check("matplotlib draws inline", wait_for(lambda: nb.cell(i).locator("img[src^='data:image/png']").count() == 1), nb.output(i))
    nb.select(i).scroll_into_view_if_needed()
    nb.shot("python")


def first_run(nb):
    """Notebook 01, cell by cell."""
    source = [c["source"] for c in json.loads((root / "notebooks/01-first-run.ipynb").read_text())["cells"]]
    source = ["".join(s) for s in source]

    def at(beginning):
        return next(i for i, s in enumerate(source) if s.startswith(beginning))

    def cell(beginning, seconds=120, error=False):
        i = at(beginning)
        done = nb.run(i, seconds)
        red = nb.red(i)
        check(f"`{beginning}` runs", bool(done) and red == error, f"{nb.prompt(i)} {nb.output(i)[-600:]}")
        check(f"`{beginning}` shows no JSON tree", nb.cell(i).locator(".jp-RenderedJSON").count() == 0)
        nb.select(i)
        nb.shot(re.sub(r"\W+", "-", beginning).strip("-"))
        return i

    def pictures(i):
        return nb.cell(i).locator(".jp-OutputArea-output img").count()

    i = cell("%qlora info")
    check("info is an HTML table", nb.cell(i).locator(".jp-RenderedHTMLCommon table").count() > 0)
    for verb in ("%qlora load", "%qlora data", "%%qlora config", "%qlora plan"):
        cell(verb)
    nb.run(nb.add(f"%qlora config --max_steps {STEPS}"))
    i = at("%qlora train")
    nb.start(i)
    bars, begin = set(), time.monotonic()
    while time.monotonic() - begin < 60 and len(bars) < 4 and "done" not in nb.output(i):
        bar = nb.cell(i).locator("progress")
        if bar.count():
            bars.add(bar.first.get_attribute("value"))
        time.sleep(0.1)
    check("the progress bar moves while training", len(bars) >= 3, bars)
    check("a live table", nb.cell(i).locator(".jp-RenderedHTMLCommon table tr").count() > 2)
    wait_for(lambda: pictures(i) > 0)
    check("a live curve", pictures(i) > 0)
    nb.shot("training")
    clock = Clock()
    nb.button("notebook:interrupt-kernel")
    nb.finish(i)
    took = clock.seconds()
    check("Stop answers in about a second", took < 2.5 * slow, f"{took:.1f} s")
    check("Stop turns the cell red", nb.red(i), nb.output(i)[-600:])
    check("Stop names the checkpoint and resume", "checkpoint" in nb.output(i) and "%qlora resume" in nb.output(i), nb.output(i)[-600:])
    nb.select(i)
    nb.shot("stopped")
    i = cell("run = %qlora resume", 300)
    check("resume draws the curve", pictures(i) > 0)
    i = cell("import matplotlib")
    check("the run feeds matplotlib", pictures(i) == 1)
    i = cell("%qlora baseline", 300)
    check("baseline: the same bits", "same bits" in nb.output(i) and pictures(i) > 0, nb.output(i)[-600:])
    i = cell("%qlora memory")
    bars = nb.cell(i).locator('.jp-RenderedHTMLCommon [style*="background"], .jp-RenderedHTMLCommon meter, img').count()
    check("memory is drawn", bars > 0)
    cell("%qlora generate")
    cell("%qlora save")
    i = nb.add("%qlora tr")
    check("Tab completes a verb", nb.complete(lambda: "train" in nb.cell(i).inner_text() + " ".join(nb.page.locator(".jp-Completer-item").all_inner_texts())))
    nb.page.keyboard.press("Escape")
    i = nb.add("%qlora?")
    nb.run(i)
    check("`%qlora?` explains", wait_for(lambda: "train" in nb.output(i)), nb.output(i)[:600])
    nb.select(i)
    nb.shot("help")


def reopened(nb):
    """The saved notebook: untrusted in another tab, as HTML, as Markdown. Table, curve and memory are still there."""
    nb.button("docmanager:save")
    file = nb.folder / "01-first-run.ipynb"

    def saved():
        try:
            book = nbformat.read(file, as_version=4)
        except (OSError, ValueError):   # it is being written
            return None
        last = next(c for c in book.cells if c.source.startswith("%qlora save"))   # Lab saves by itself, too: perhaps before the end
        return book if last.outputs else None
    book = wait_for(saved)
    if not book:
        check("the notebook is saved with its outputs", False)
        return
    book.cells[0].source += "\n\nFrom somebody else."   # another content: Jupyter trusts it no more
    nbformat.write(book, nb.folder / "untrusted.ipynb")
    tab = nb.page.context.browser.new_page(viewport=nb.page.viewport_size)
    tab.set_default_timeout(120000)
    other = Notebook(tab, nb.url, "untrusted.ipynb")
    for verb, what in {"%qlora train": "table", "run = %qlora resume": "table", "%qlora plan": "table"}.items():
        i = next(i for i, c in enumerate(book.cells) if c.source.startswith(verb))
        tables = other.cell(i).locator(".jp-OutputArea table")
        check(f"reopened untrusted, `{verb}` has its {what}", wait_for(lambda: tables.count() > 0), other.output(i)[:300])
    for verb in ("%qlora train", "run = %qlora resume", "%qlora baseline", "%qlora memory"):
        i = next(i for i, c in enumerate(book.cells) if c.source.startswith(verb))
        images = other.cell(i).locator(".jp-OutputArea img")
        check(f"reopened untrusted, `{verb}` has its picture",
              wait_for(lambda: images.count() > 0 and images.first.evaluate("e => e.naturalWidth > 100")), other.output(i)[:300])
    other.shots = nb.shots
    other.select(next(i for i, c in enumerate(book.cells) if c.source.startswith("run = %qlora resume")))
    other.shot("untrusted")
    nb.shots = other.shots
    tab.close()
    from nbconvert import HTMLExporter, MarkdownExporter
    html, _ = HTMLExporter().from_notebook_node(book)
    markdown, files = MarkdownExporter().from_notebook_node(book)
    check("nbconvert to HTML keeps tables, curves and the last state",
          html.count("<table") >= 5 and html.count("data:image/png") >= 4 and f"{STEPS}/{STEPS}" in html)
    check("nbconvert to Markdown keeps them too", len(files["outputs"]) >= 4 and f"{STEPS}/{STEPS}" in markdown)


def restart(nb):
    nb.button("notebook:restart-kernel")
    nb.page.locator(".jp-Dialog .jp-mod-accept").click()
    time.sleep(0.5)
    nb.idle()
    i = nb.add("'name' in globals(), 6 * 7")
    for _ in range(10):   # the old kernel may be the one that is idle: what it is sent is lost, or answered from its variables
        nb.run(i, 15)
        if "(False, 42)" in nb.output(i):
            break
    check("the kernel restarts, empty", "(False, 42)" in nb.output(i), nb.output(i))
    nb.shot("restarted")


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))   # a time limit must not leave the server behind
    shutil.rmtree(screens, ignore_errors=True)
    screens.mkdir(parents=True)
    browser_program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not browser_program:
        sys.exit("make test-lab needs chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory(prefix="qlora-lab-") as folder:
        folder = Path(folder)
        (folder / "work").mkdir()
        book = nbformat.read(root / "notebooks/01-first-run.ipynb", as_version=4)
        for cell in book.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        nbformat.write(book, folder / "work/01-first-run.ipynb")
        server = Server(folder)
        try:
            with sync_playwright() as p:
                browser = p.chromium.launch(executable_path=browser_program, args=["--no-sandbox"])
                page = browser.new_page(viewport={"width": 1280, "height": 1000})
                page.context.set_default_timeout(120000)
                nb = Notebook(page, server.url, "01-first-run.ipynb", folder / "work")
                nb.shot("opened")
                for part in (first_run, reopened, general, restart):
                    try:
                        part(nb)
                    except Exception as e:
                        check(part.__name__, False, f"{type(e).__name__}: {e}")
                        nb.shot("failed-" + part.__name__)
                browser.close()
        finally:
            server.close()
    print("%(passed)d passed, %(failed)d failed, %(skipped)d skipped" % seen)
    return seen["failed"] > 0


if __name__ == "__main__":
    sys.exit(main())
