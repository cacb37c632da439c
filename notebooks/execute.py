"""Runs a notebook and keeps it with its outputs, showing in the terminal what happens.

    execute.py NOTEBOOK FOLDER [--kernel NAME] [--name NAME] [--timeout SECONDS]

leaves FOLDER/NAME.ipynb and FOLDER/NAME.html. The notebook works in a fresh folder of its own, so its runs start at run-1. A cell whose
metadata says {"qlora": {"stop_at": 0.5}} is stopped, as with the stop button, when that part of its steps is done."""
import argparse, asyncio, os, shutil, sys, time
from pathlib import Path

import nbclient, nbformat
from nbconvert import HTMLExporter

QLORA = "application/vnd.qlora.v1+json"
tty = sys.stdout.isatty()


class Runner(nbclient.NotebookClient):
    """Follows the outputs while nbclient collects them."""
    cell = None
    stopped = False
    said = 0.0
    history = []             # of the longest training: [{"step", "loss", …}]

    def line(self, text, keep=True):
        """A line of the terminal; one that will be replaced where that is possible, else at most every 2 s."""
        if tty:
            print("\r\x1b[K" + text, end="\n" if keep else "", flush=True)
        elif keep or time.monotonic() - self.said > 2:
            print(text, flush=True)
            self.said = time.monotonic()

    def begin(self, cell, cell_index):
        self.cell, self.stopped = cell, False
        if cell.cell_type == "code":
            code = sum(c.cell_type == "code" for c in self.nb.cells)
            number = sum(c.cell_type == "code" for c in self.nb.cells[:cell_index + 1])
            self.line(f"[{number}/{code}] " + next(iter(cell.source.splitlines()), ""))

    def process_message(self, msg, cell, cell_index):
        data = msg["content"].get("data", {}) if msg["msg_type"] in ("display_data", "update_display_data", "execute_result") else {}
        training = data.get(QLORA, {})
        if training.get("kind") == "training":
            bar = [t for t in data.get("text/plain", "").splitlines() if t.startswith("[")]
            if bar:
                self.line("      " + bar[0], keep="history" in training)
            if len(training.get("history", [])) >= len(self.history):   # a baseline is shorter than its run
                self.history = training.get("history", [])
            part = cell.metadata.get("qlora", {}).get("stop_at")
            if part and not self.stopped and training.get("step", 0) >= part * training.get("max_steps", 1) > 0:
                self.stopped = True
                self.line(f"      Stop at step {training['step']}")
                asyncio.ensure_future(self.km.interrupt_kernel())
        elif msg["msg_type"] == "error" and "raises-exception" not in cell.metadata.get("tags", []):
            self.line("\n".join(msg["content"]["traceback"]))
        return super().process_message(msg, cell, cell_index)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("notebook", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kernel", help="another kernel than the notebook names")
    parser.add_argument("--name", default="demo")
    parser.add_argument("--timeout", type=int, default=1800, help="seconds for one cell")
    args = parser.parse_args()
    work = args.folder / (args.name + "-work")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    nb = nbformat.read(args.notebook, as_version=4)
    kernel = args.kernel or nb.metadata.kernelspec.name
    runner = Runner(nb, kernel_name=kernel, timeout=args.timeout, resources={"metadata": {"path": str(work)}},
                    record_timing=False)
    if kernel != "qlora":   # the native kernel has the extension loaded
        runner.extra_arguments = ["--IPKernelApp.extra_extensions=qlora"]
    runner.on_cell_start = runner.begin
    start, failed = time.monotonic(), None
    try:
        runner.execute()
    except nbclient.exceptions.CellExecutionError as e:
        failed = f"{e.ename}: {e.evalue}"
    nbformat.write(nb, args.folder / (args.name + ".ipynb"))
    html, _ = HTMLExporter().from_notebook_node(nb)
    page = args.folder / (args.name + ".html")
    page.write_text(html)
    if failed:
        sys.exit(f"qlora: {args.notebook.name} failed: {failed}\nSee {page}")
    losses = [r["loss"] for r in runner.history if r.get("loss") is not None]
    if losses:
        k = max(1, len(losses) // 20)
        print(f"loss {sum(losses[:k]) / k:.3f} -> {sum(losses[-k:]) / k:.3f} in {runner.history[-1]['step']} steps")
    print(f"{args.notebook.name} ran in {time.monotonic() - start:.0f} s on '{kernel}': {page}")


if __name__ == "__main__":
    main()
