#!/usr/bin/env python3
"""Speed of the tokenizers library beside ours, one thread each, on the same text and tokenizer.

    python tests/text/bench_tokenizer.py FOLDER TEXT PROGRAM      # PROGRAM: build/tests/tokenizer_speed
"""
import os
import subprocess
import sys
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"
from tokenizers import Tokenizer  # noqa: E402

folder, path, program = sys.argv[1:]
tok = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
data = open(path, encoding="utf-8", errors="replace").read()
docs = [data[i:i + 2000] for i in range(0, len(data), 2000)]
best = 1e9
for _ in range(3):
    t = time.perf_counter()
    n = sum(len(tok.encode(d, add_special_tokens=False).ids) for d in docs)
    best = min(best, time.perf_counter() - t)
print(f"tokenizers   {len(data.encode()) / best / 1e6:8.1f} MB/s   {n} tokens")
sys.stdout.flush()
subprocess.run([program, folder, path], check=True)
