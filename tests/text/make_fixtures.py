#!/usr/bin/env python3
"""Makes tests/text/data/: three tokenizers trained by the `tokenizers` library on generated text, and what
that library makes of gen.py's strings (a hash for each 1,000).

    python tests/text/make_fixtures.py            # needs tokenizers (0.23)
"""
import json
import os
import struct

from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors,
                        trainers)

import gen

HERE = os.path.dirname(os.path.abspath(__file__))
STRINGS = 60000
PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+")


def text(i):
    return gen.string(i).decode("utf-8", "replace")


def train(digits, normalizer, size, texts=None):
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizer
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN % digits), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  show_progress=False)
    tok.train_from_iterator(texts or (text(10**6 + i) for i in range(20000)), trainer)
    return tok


def special(names):
    return [AddedToken(n, special=True, normalized=False) for n in names]


def llama():
    tok = train("{1,3}", None, 3000)
    tok.add_special_tokens(special(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>",
                                    "<|end_header_id|>"]))
    bos = "<|begin_of_text|>"
    tok.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1",
                                      special_tokens=[(bos, tok.token_to_id(bos))])])
    j = json.loads(tok.to_str())
    j["model"]["ignore_merges"] = True
    return j


def qwen():
    tok = train("", normalizers.NFC(), 2500)
    tok.add_special_tokens(special(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]))
    tok.post_processor = processors.ByteLevel(trim_offsets=False)
    j = json.loads(tok.to_str())
    j["model"]["merges"] = [" ".join(m) for m in j["model"]["merges"]]   # the older spelling
    return j


def flags():
    tok = train("{1,3}", normalizers.NFC(), 1500)
    tok.add_special_tokens(special(["<|endoftext|>", "<|im_start|>"]))
    tok.add_tokens([AddedToken("word", single_word=True, normalized=False),
                    AddedToken("<tool>", lstrip=True, rstrip=True, normalized=False),
                    AddedToken("<tool>x", normalized=False), AddedToken("[LEFT]", lstrip=True, normalized=True),
                    AddedToken("[RIGHT]", rstrip=True, single_word=True, normalized=True),
                    AddedToken("caf\u00e9", normalized=True), AddedToken("\u212b", normalized=True)])
    eos = "<|endoftext|>"
    tok.post_processor = processors.TemplateProcessing(single=f"$A {eos}",
                                                       special_tokens=[(eos, tok.token_to_id(eos))])
    return json.loads(tok.to_str())


CHATML = ("{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' "
          "+ '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
HEADERS = ("{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + "
           "'<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
           "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}")
CONFIG = {"llama": {"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|eot_id|>", "special": True},
                    "chat_template": HEADERS},
          "qwen": {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
                   "chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]}}


def main():
    for name, make in (("llama", llama), ("qwen", qwen), ("flags", flags)):
        folder = os.path.join(HERE, "data", name)
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, "tokenizer.json")
        with open(path, "w", encoding="utf-8") as f:
            json.dump(make(), f, ensure_ascii=False, separators=(",", ":"))
        if name in CONFIG:
            with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf-8") as f:
                json.dump(CONFIG[name], f, indent=1)
        tok = Tokenizer.from_file(path)
        lines, h = [], gen.FNV
        for i in range(STRINGS):
            ids = tok.encode(text(i), add_special_tokens=i % 2 == 1).ids
            back = tok.decode(ids, skip_special_tokens=i % 3 == 0).encode()
            h = gen.fnv(h, struct.pack(f"<{len(ids)}i", *ids) + back)
            if i % 1000 == 999:
                lines.append(f"{h:016x}")
                h = gen.FNV
        with open(os.path.join(folder, "hashes"), "w") as f:
            f.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
