#!/usr/bin/env python3
"""Speed of the tokenizers library beside ours, one thread each, on the same text and tokenizer; the ids must be the same.

    python tests/text/bench_tokenizer.py FOLDER TEXT PROGRAM      # PROGRAM: build/tests/tokenizer_speed
"""
import array
import os
import subprocess
import sys
import tempfile
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"
from tokenizers import Tokenizer  # noqa: E402


def memory():
    with open("/proc/self/status") as f:
        return next(int(x.split()[1]) for x in f if x.startswith("RssAnon")) / 1024


folder, path, program = sys.argv[1:]
before, began = memory(), time.perf_counter()
tok = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
opened, grown = time.perf_counter() - began, memory() - before
data = open(path, encoding="utf-8", errors="replace").read()
docs = [data[i:i + 2000] for i in range(0, len(data), 2000)]
best = 1e9
for _ in range(3):
    t = time.perf_counter()
    n = sum(len(tok.encode(d, add_special_tokens=False).ids) for d in docs)
    best = min(best, time.perf_counter() - t)
print(f"tokenizers   {len(data.encode()) / best / 1e6:8.1f} MB/s   {n} tokens, opened in {opened:.2f} s, {grown:.0f} MiB", flush=True)
with tempfile.TemporaryDirectory() as scratch:
    file = os.path.join(scratch, "ids")
    text = os.path.join(scratch, "text")
    with open(text, "w", encoding="utf-8", newline="") as f:
        f.write(data)
    subprocess.run([program, folder, text, file], check=True)
    ours = array.array("i")
    with open(file, "rb") as f:
        ours.frombytes(f.read())
theirs = array.array("i")
for d in docs:
    theirs.extend(tok.encode(d, add_special_tokens=False).ids)
print("the same ids" if ours == theirs else "THE IDS DIFFER")
sys.exit(ours != theirs)
