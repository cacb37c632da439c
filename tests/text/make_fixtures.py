#!/usr/bin/env python3
"""Makes tests/text/data/: tokenizers trained by the `tokenizers` library on generated text, what that library makes of
gen.py's strings (a hash for each 1,000), and Mistral's chats as ids.

    python tests/text/make_fixtures.py [NAME …]   # needs tokenizers (0.23) and transformers (5.23)
"""
import json
import os
import struct
import sys

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


SPACE = "\u2581"


def pieces(size, norm, pre, decoder, added=(), first=()):
    """BPE over characters, with a token for each byte: the form that SentencePiece's models have as a tokenizer.json.
    The tokens in `first` are merged before all others."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = metaspace("always", True)
    names = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=names, limit_alphabet=400, show_progress=False)
    tok.train_from_iterator((text(10**6 + i).replace("\0", "") for i in range(20000)), trainer)
    tok.normalizer, tok.pre_tokenizer, tok.decoder = norm, pre, decoder
    j = json.loads(tok.to_str())
    j["added_tokens"] = [dict(a, normalized=False) for a in j["added_tokens"][:3]]
    vocab = j["model"]["vocab"]
    vocab.update({t: len(vocab) + i for i, t in enumerate(first)})
    # All ways to cut a token, as transformers writes down SentencePiece's.
    cuts = [(t[:i], t[i:]) for t in vocab for i in range(1, len(t)) if t[:i] in vocab and t[i:] in vocab]
    j["model"]["merges"] = [list(c) for c in sorted(cuts, key=lambda c: (c[0] + c[1] not in first, vocab[c[0] + c[1]], len(c[0])))]
    j["model"].update(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tok = Tokenizer.from_str(json.dumps(j))
    tok.add_special_tokens(special(["[INST]", "[/INST]", "<|im_end|>"]))
    tok.add_tokens(list(added))
    return tok


def template(tok, single, name):
    tok.post_processor = processors.TemplateProcessing(single=single, special_tokens=[(name, tok.token_to_id(name))])
    return json.loads(tok.to_str())


def metaspace(scheme, split):
    return pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=split)


def spaces(strip):
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence(parts + ([decoders.Strip(" ", 1, 0)] if strip else []))


NORMALIZER = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
FLAGS = [AddedToken("word", single_word=True, normalized=False), AddedToken("<tool>", lstrip=True, rstrip=True, normalized=False),
         AddedToken("<tool>x", normalized=False), AddedToken("[LEFT]", lstrip=True, normalized=True),
         AddedToken("[RIGHT]", rstrip=True, single_word=True, normalized=True), AddedToken("caf\u00e9", normalized=True),
         AddedToken("'s a", normalized=True)]


def mistral():
    """Mistral 7B v0.3: no normalizer."""
    return template(pieces(2000, None, metaspace("first", False), spaces(True)), "<s> $A", "<s>")


def llama2():
    """Llama 2, Mistral 7B v0.1 and v0.2, TinyLlama, Zephyr: the normalizer makes the ▁. Some merges reach over words, so that
    no part of a text can be taken alone."""
    over = [a + SPACE for a in "aeiou.=n"] + [SPACE * 2] + [a + SPACE + b for a in "aeioun" for b in "abcdefgh"]
    j = template(pieces(1500, NORMALIZER, None, spaces(True), FLAGS, over), "<s> $A", "<s>")
    j["model"]["merges"] = [" ".join(m) for m in j["model"]["merges"]]
    return j


def always():
    return template(pieces(1200, None, metaspace("always", True), decoders.Metaspace(SPACE, "always", True), FLAGS), "$A </s>", "</s>")


def never():
    return json.loads(pieces(1200, None, metaspace("never", False), spaces(False), FLAGS).to_str())


CHATML = ("{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' "
          "+ '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
HEADERS = ("{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + "
           "'<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
           "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}")
CONFIG = {"llama": {"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|eot_id|>", "special": True},
                    "chat_template": HEADERS},
          "qwen": {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
                   "chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]},
          **dict.fromkeys(("mistral", "llama2"), {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})}
CHATS = [[{"role": "user", "content": "  Hello w\u00f6rld "}, {"role": "assistant", "content": "\u65e5\u672c\u8a9e it's <s> 42."},
          {"role": "user", "content": "and\nthen\t?"}],
         [{"role": "system", "content": "short"}, {"role": "user", "content": "a [INST] b"}]]


def more(i):
    """String i for tokenizers over pieces."""
    return (gen.string(i) + gen.MORE[i % len(gen.MORE)] + gen.string(i + 7)).decode("utf-8", "replace")


def chats(tok, folder):
    """Mistral 7B v0.3's template on CHATS, and the ids."""
    from transformers.utils.chat_template_utils import _compile_jinja_template
    jinja = open(os.path.join(HERE, "templates", "mistral_v2v3.jinja"), encoding="utf-8", newline="").read()
    with open(os.path.join(folder, "chats.json"), "w", encoding="utf-8") as f:
        out = []
        for c in CHATS:
            s = _compile_jinja_template(jinja).render(messages=c, bos_token="<s>", eos_token="</s>", add_generation_prompt=True)
            out.append({"messages": c, "ids": tok.encode(s, add_special_tokens=False).ids})
        json.dump(out, f)


def main():
    for make in (llama, qwen, flags, mistral, llama2, always, never):
        name, over_pieces = make.__name__, make in (mistral, llama2, always, never)
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        folder = os.path.join(HERE, "data", name)
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, "tokenizer.json")
        with open(path, "w", encoding="utf-8") as f:
            json.dump(make(), f, ensure_ascii=False, separators=(",", ":"))
        if name in CONFIG:
            with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf-8") as f:
                json.dump(CONFIG[name], f, indent=1)
        tok = Tokenizer.from_file(path)
        if name == "mistral":
            chats(tok, folder)
        lines, h = [], gen.FNV
        for i in range(STRINGS):
            ids = tok.encode(more(i) if over_pieces else text(i), add_special_tokens=i % 2 == 1).ids
            back = tok.decode(ids, skip_special_tokens=i % 3 == 0).encode()
            if over_pieces:   # bytes that are no text
                back += tok.decode(ids[::-1], skip_special_tokens=i % 3 == 0).encode()
            h = gen.fnv(h, struct.pack(f"<{len(ids)}i", *ids) + back)
            if i % 1000 == 999:
                lines.append(f"{h:016x}")
                h = gen.FNV
        with open(os.path.join(folder, "hashes"), "w") as f:
            f.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
