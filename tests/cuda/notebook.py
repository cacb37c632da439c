"""kaggle/qlora-2xt4.ipynb as a whole, by hand, on a machine with GPUs and without a network.

    python3 tests/cuda/notebook.py pack build/nb            here: the T4 build's wheel, make_model, and Kaggle's Jupyter as wheels
    python3 tests/cuda/notebook.py run build/nb OUT         there: every cell, with two GPUs as T4s, then a second session that resumes
      --devices cuda:0      one GPU (cpu:2: two processes of the CPU, with --model tiny)
      --model 8b            the shape of make_model; its weights are random
      --memory 15095MiB     what a device may use; none: all it has
      --steps 60            of the reference run
      --reference           also the cell that runs transformers, peft and bitsandbytes beside it

OUT gets qlora-2xt4.ipynb with its outputs, resumed.ipynb, and table.txt, printed too. Exit status 1 where a loss, a check or a
resumed step differs. Only the standard library is needed to run this file."""
import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "kaggle" / "qlora-2xt4.ipynb"


def call(*words, **options):
    return subprocess.run([str(w) for w in words], check=True, **options)


def pack(folder):
    """All that the other machine needs beside this repository."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    call("make", "-C", ROOT, "T4=1", "CUDA=1", "wheel", "build-t4/tests/make_model", stdout=sys.stderr)
    (wheel,) = (ROOT / "build-t4" / "dist").glob("qlora-*.whl")
    shutil.copy(wheel, folder)
    # Linked again, so that it asks for nothing but the C library.
    call("gcc", "-rdynamic", "-s", "-o", folder / "make_model", "build-t4/tests/bench/make_model.o", "build-t4/libqlora.a", "-Wl,--gc-sections",
         "-Wl,-Bstatic", "-ljansson", "-Wl,-Bdynamic", "-lpthread", "-ldl", "-lm", cwd=ROOT)
    places = [x for n in (17, 24, 26, 27, 28, 31, 34) for x in ("--platform", f"manylinux_2_{n}_x86_64")]
    call(ROOT / "build-t4/venv/bin/python", "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--python-version", "3.12", *places,
         "--platform", "manylinux2014_x86_64", "-d", folder / "wheels", "-r", ROOT / "tests/cuda/requirements.txt")
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    print(f"{folder}: {size / 2**20:.1f} MiB. There: python3 tests/cuda/notebook.py run {folder} OUT")


# ---- what the notebook is given ------------------------------------------------------------------------

def environment(folder, work):
    """A venv over this Python: its packages are seen, nothing of it is changed."""
    venv = work / "venv"
    call(sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin" / "python"
    own = call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", capture_output=True, text=True).stdout.strip()
    Path(own, "beneath.pth").write_text("".join(p + "\n" for p in dict.fromkeys(sysconfig.get_path(k) for k in ("purelib", "platlib"))))
    wheels = sorted((folder / "wheels").glob("*.whl")) if sys.version_info[:2] == (3, 12) else []
    if wheels:
        call(python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check", *wheels)
    return python


def make_model(folder, work, shape):
    """Random weights of a real shape, with the bundled tokenizer: it has fewer words than the model has rows, which harms nothing."""
    model = work / "model"
    call(folder / "make_model", shape, model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "notebooks/tiny" / name, model)
    config = json.loads((model / "config.json").read_text())
    tiny = json.loads((ROOT / "notebooks/tiny/config.json").read_text())
    config.update({k: tiny[k] for k in ("bos_token_id", "eos_token_id")})
    (model / "config.json").write_text(json.dumps(config))
    return model


def make_rows(path, rows=8000):
    """Rows in the shape of OIG's chip2: a question, an answer, most of them short."""
    words = [w.strip(".,!?\"") for line in (ROOT / "notebooks/tiny/train.jsonl").read_text().splitlines()[:300]
             for w in json.loads(line)["text"].split()]
    draw = random.Random(3407)

    def talk(low, high):
        return " ".join(draw.choices(words, k=draw.randint(low, high))).capitalize()
    with open(path, "w") as f:
        for _ in range(rows):
            text = f"<human>: {talk(4, 20)}?\n<bot>: {talk(5, 60 if draw.random() < 0.9 else 400)}."
            f.write(json.dumps({"text": text, "metadata": {"source": "unified_chip2"}}) + "\n")


def execute(python, page, out, session, parameters, settings):
    session.mkdir()
    words = ["-y", json.dumps(dict(parameters, SETTINGS=settings))]
    env = {k: v for k, v in os.environ.items() if not k.startswith("QLORA") and k != "PYTHONPATH"}
    env.update(NCCL_P2P_DISABLE="1", KAGGLE_KERNEL_RUN_TYPE="Batch", JUPYTER_PLATFORM_DIRS="1")
    began = time.monotonic()
    done = subprocess.run([str(python), "-m", "papermill", str(page), str(out), "-k", "python3", "--no-progress-bar", "--cwd", str(session), *words],
                          env=env, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr[-6000:])
    return done.returncode, time.monotonic() - began


def until_trained(page, out):
    """The page up to its training: what a second session needs to go on."""
    book = json.loads(page.read_text())
    at = next(i for i, c in enumerate(book["cells"]) if c["cell_type"] == "code" and "".join(c["source"]).startswith("if RESUME"))
    book["cells"] = book["cells"][:at + 1]
    out.write_text(json.dumps(book))
    return out


# ---- what it answered ----------------------------------------------------------------------------------

def outputs(page, start):
    texts = []
    for cell in page["cells"]:
        if cell["cell_type"] == "code" and "".join(cell["source"]).startswith(start):
            for o in cell["outputs"]:
                text = o.get("text") or o.get("data", {}).get("text/plain") or ""
                texts.append("".join(text).rstrip())
    return "\n".join(texts)


def steps(run):
    """{step: bits of its loss} of a run's folder."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return {e["step"]: e.get("loss_bits") for e in events if e["ev"] == "step"}


def optim(run):
    return json.loads((run / "job.json").read_text()).get("optim", "")


def report(out, session, again, seconds):
    page = json.loads((out / "qlora-2xt4.ipynb").read_text())
    lines, bad = [], []

    def say(title, text):
        lines.extend(["", "## " + title, text])
    say("info", outputs(page, "%qlora info"))
    say("bench", outputs(page, "%qlora bench"))
    say("settings that replace the page's", json.dumps(page["metadata"]["papermill"]["parameters"]["SETTINGS"]))
    say("plan", outputs(page, "%qlora plan"))
    trained = outputs(page, "if RESUME").splitlines()
    say("train", "\n".join(trained[:3] + ["…"] + trained[-6:]))
    verdict = outputs(page, "one = qlora.run").splitlines()[-1]
    say("the same on one device", verdict)
    say("every way", outputs(page, "import pandas"))
    checks = outputs(page, "%qlora verify")
    say("verify", checks)
    say("generate --compare", outputs(page, "%qlora generate"))
    say("save", outputs(page, "%qlora save"))
    if any("".join(c["source"]).startswith("if REFERENCE") and c["outputs"] for c in page["cells"]):
        say("transformers beside it", outputs(page, "if REFERENCE"))
    if ": same bits" not in verdict and "the same bits" not in verdict:
        bad.append("one device and several differ")
    ways = [r for r in (session / "runs").glob("run-*") if r.name not in ("run-1", "run-1-baseline") and "paged" not in optim(r)]
    if len({json.dumps(steps(r), sort_keys=True) for r in ways}) != 1:
        bad.append("the ways differ in their bits: " + ", ".join(r.name for r in ways))
    whole, resumed = steps(session / "runs" / "run-1"), steps(again / "runs" / "run-1")
    same = sum(whole[s] == resumed.get(s) for s in whole)
    say("a second session", f"{same}/{len(whole)} losses of the resumed run are those of the run that was not interrupted: "
        f"last {max(whole)}: {whole[max(whole)]}, resumed {resumed.get(max(whole))}")
    if same != len(whole):
        bad.append("the resumed run differs")
    say("seconds", f"the whole page {seconds[0]:.0f}, the second session {seconds[1]:.0f}; its cells of 5 s and more:")
    for cell in page["cells"]:
        took = cell["metadata"].get("papermill", {}).get("duration") or 0
        if took >= 5:
            lines.append(f"{took:7.1f}  {''.join(cell['source']).splitlines()[0][:80]}")
    lines.extend(["", "PASS" if not bad else "FAIL: " + "; ".join(bad)])
    return "\n".join(lines).lstrip() + "\n", bad


def run(args):
    folder, out = args.folder.resolve(), args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="nb-"))
    (wheel,) = folder.glob("qlora-*.whl")
    began = time.monotonic()
    python = environment(folder, work)
    model, rows = make_model(folder, work, args.model), work / "unified_chip2.jsonl"
    make_rows(rows)
    print(f"set-up: {time.monotonic() - began:.0f} s", flush=True)
    settings = {"devices": args.devices, "max_steps": args.steps, "save_steps": max(1, args.steps // 2)}
    if args.memory != "none":
        settings["device_memory"] = args.memory
    if args.devices.count(",") == 0 and not args.devices.endswith(":2"):
        settings["gradient_accumulation_steps"] = 4  # alone it does both shares
    parameters = {"MODEL": str(model), "DATA": str(rows), "WHEEL": str(wheel), "OUTPUT": str(work / "kept"), "REFERENCE": args.reference}
    session, again = work / "session", work / "again"
    rc, first = execute(python, PAGE, out / "qlora-2xt4.ipynb", session, parameters, settings)
    if rc:
        return rc
    shutil.rmtree(session / "runs" / "run-1" / f"checkpoint-{args.steps}")  # as if the session had ended before
    kept = {p.name for p in (session / "runs" / "run-1").glob("checkpoint-*")}
    rc, second = execute(python, until_trained(PAGE, work / "page.ipynb"), out / "resumed.ipynb", again,
                         dict(parameters, RESUME=str(session / "runs" / "run-1")), settings)
    if rc:
        return rc
    text, bad = report(out, session, again, (first, second))
    text += f"resumed from {', '.join(sorted(kept))}; IPython and Python: see info above\n"
    (out / "table.txt").write_text(text)
    print(text)
    shutil.rmtree(work, ignore_errors=True)
    return 1 if bad else 0


def main():
    p = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    sub = p.add_subparsers(required=True, dest="what")
    q = sub.add_parser("pack")
    q.add_argument("folder", type=Path)
    q = sub.add_parser("run")
    q.add_argument("folder", type=Path)
    q.add_argument("out", type=Path)
    q.add_argument("--devices", default="cuda:0,1")
    q.add_argument("--model", default="8b")
    q.add_argument("--memory", default="15095MiB")
    q.add_argument("--steps", type=int, default=60)
    q.add_argument("--reference", action="store_true")
    args = p.parse_args()
    sys.exit(pack(args.folder) if args.what == "pack" else run(args))


if __name__ == "__main__":
    main()
