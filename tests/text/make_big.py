#!/usr/bin/env python3
"""Trains a tokenizer of Llama 3's size and pattern (128,000 tokens and 256 special ones) on text of this machine, for measurements; its
tokenizer.json goes to FOLDER, and text that it was not trained on to FOLDER/text. A minute or two.

    python tests/text/make_big.py FOLDER [MB of text to learn from, default 120]
"""
import json
import os
import random
import sys
import sysconfig

import make_fixtures

ENDS = (".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp", ".c", ".js", ".json", ".html", ".po", ".pl", ".pm", ".svg", ".tex", "copyright")
ROOTS = ["/usr/share", "/usr/include", "/usr/lib", os.path.dirname(sysconfig.get_path("stdlib")), sysconfig.get_path("purelib")]


def files():
    found = set()
    for root in ROOTS:
        for folder, _, names in os.walk(root):
            found.update(os.path.join(folder, n) for n in names if n.endswith(ENDS) and not os.path.islink(os.path.join(folder, n)))
    found = sorted(found)
    random.Random(1).shuffle(found)
    return found


def read(names, size):
    """Their texts, the first 64 KiB of each, up to so many bytes; and how many files they were."""
    texts, n, used = [], 0, 0
    for name in names:
        used += 1
        try:
            with open(name, encoding="utf-8", errors="strict") as f:
                text = f.read(65536)
        except (OSError, UnicodeDecodeError):
            continue
        texts.append(text)
        n += len(text)
        if n > size:
            break
    return texts, used


def main():
    folder, size = sys.argv[1], int(sys.argv[2] if len(sys.argv) > 2 else 120) * 1_000_000
    os.makedirs(folder, exist_ok=True)
    names = files()
    held, used = read(names, 8_000_000)
    with open(os.path.join(folder, "text"), "w", encoding="utf-8", newline="") as f:
        f.write("".join(held))
    texts, _ = read(names[used:], size)
    tok = make_fixtures.train("{1,3}", None, 128000, texts)
    tok.add_special_tokens(make_fixtures.special(["<|begin_of_text|>", "<|end_of_text|>"] + [f"<|reserved_special_token_{i}|>" for i in range(254)]))
    j = json.loads(tok.to_str())
    j["model"]["ignore_merges"] = True
    with open(os.path.join(folder, "tokenizer.json"), "w", encoding="utf-8") as f:
        json.dump(j, f, ensure_ascii=False, indent=2)
    print(f"{sum(map(len, texts)) / 1e6:.0f} MB of text, {tok.get_vocab_size()} tokens, {os.path.getsize(os.path.join(folder, 'tokenizer.json')) / 1e6:.1f} MB")


main()
