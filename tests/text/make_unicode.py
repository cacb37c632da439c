#!/usr/bin/env python3
"""Writes core/unicode_tables.c: what the tokenizer must know of Unicode.

    python tests/text/make_unicode.py > core/unicode_tables.c

Character classes and normalisation are asked of the `tokenizers` library itself (its regular
expressions and normalisers), so the tables agree with the ids it makes; only the combining classes,
which it does not show, come from `unicodedata2`. Needs: tokenizers, unicodedata2.
"""
import unicodedata2 as ud
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

ALL = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
L, N, S, WORD, NFC_MAYBE = 1, 2, 3, 4, 8   # two bits of class, then flags
flags = [0] * 0x110000


def matches(pattern):
    """The set of code points that match a one-character class."""
    text = "".join(map(chr, ALL))
    rest = pre_tokenizers.Split(Regex(pattern), "removed").pre_tokenize_str(text)
    missing = bytearray(b"\1") * len(ALL)
    for _, (a, b) in rest:
        missing[a:b] = bytes(b - a)
    return {ALL[i] for i, m in enumerate(missing) if m}


def word_characters():
    """Rust's \\w, which decides where a single_word added token may stand."""
    tok = Tokenizer(models.BPE())
    tok.add_tokens([AddedToken("QQ", single_word=True, normalized=False)])
    found = set()
    for at in range(0, len(ALL), 4096):
        part = ALL[at:at + 4096]
        enc = tok.encode("".join("QQ" + chr(c) + " " for c in part))
        alone = {a // 4 for a, _ in enc.offsets}
        found |= {c for i, c in enumerate(part) if i not in alone}
    return found


for bit, chars in ((L, matches(r"\p{L}")), (N, matches(r"\p{N}")), (S, matches(r"\s")), (WORD, word_characters())):
    for c in chars:
        assert bit == WORD or flags[c] & 3 == 0
        flags[c] |= bit

nfc, nfd = normalizers.NFC(), normalizers.NFD()
# The library's tables are of an older Unicode: a mark that it does not move in front of U+0345 (the only one
# of the highest class, 240) has class 0 there.
ccc = {c: ud.combining(chr(c)) for c in ALL if ud.combining(chr(c))
       and (c == 0x345 or nfd.normalize_str("\u0345" + chr(c)) != "\u0345" + chr(c))}
hangul = range(0xAC00, 0xAC00 + 11172)
decomp = {}   # code point -> full canonical decomposition
for c in ALL:
    if c not in hangul:
        d = nfd.normalize_str(chr(c))
        if d != chr(c):
            decomp[c] = [ord(x) for x in d]
pairs = {}    # (first, second) -> primary composite
for c in decomp:
    one_step = [int(x, 16) for x in ud.decomposition(chr(c)).split()]
    if len(one_step) == 2 and nfc.normalize_str(chr(c)) == chr(c):
        pairs[tuple(one_step)] = c
seconds = {b for _, b in pairs} | set(range(0x1161, 0x1176)) | set(range(0x11A8, 0x11C3))
for c in ALL:
    if c in ccc or c in seconds or nfc.normalize_str(chr(c)) != chr(c):
        flags[c] |= NFC_MAYBE

# Two stages: 256 code points a block, two flags a byte.
blocks, index = [], []
for page in range(0x1100):
    f = flags[page * 256:page * 256 + 256]
    b = bytes(f[i] | f[i + 1] << 4 for i in range(0, 256, 2))
    if b not in blocks:
        blocks.append(b)
    index.append(blocks.index(b))
assert len(blocks) < 256


def array(ctype, name, values, width=98):
    lines, line = [], "   "
    for v in values:
        if len(line) + len(v) + 2 > width:
            lines.append(line)
            line = "   "
        line += " " + v + ","
    lines.append(line)
    print(f"const {ctype} {name}[] = {{\n" + "\n".join(lines) + "\n};\n")


print("/* Made by tests/text/make_unicode.py; do not edit. core/unicode.h says what is what. */")
print('#include "core/unicode.h"\n')
print("/* clang-format off */")
array("uint8_t", "ql_uni_page", [str(i) for i in index])
array("uint8_t", "ql_uni_flags", [str(x) for b in blocks for x in b])
ranges = []
for c in sorted(ccc):
    if ranges and ranges[-1][1] == c - 1 and ranges[-1][2] == ccc[c]:
        ranges[-1][1] = c
    else:
        ranges.append([c, c, ccc[c]])
print(f"const int ql_uni_ccc_n = {len(ranges)};")
array("uint32_t", "ql_uni_ccc", [f"0x{a:x},{b - a},{k}" for a, b, k in ranges])
text, rows = [], []
for c in sorted(decomp):
    rows.append(f"0x{c:x},{len(text) << 3 | len(decomp[c])}")
    text += decomp[c]
print(f"const int ql_uni_decomp_n = {len(rows)};")
array("uint32_t", "ql_uni_decomp", rows)
array("uint32_t", "ql_uni_decomp_text", [f"0x{c:x}" for c in text])
print(f"const int ql_uni_comp_n = {len(pairs)};")
array("uint32_t", "ql_uni_comp", [f"0x{a:x},0x{b:x},0x{c:x}" for (a, b), c in sorted(pairs.items())])
print("/* clang-format on */")
