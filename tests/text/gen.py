"""The pseudo-random strings of gen.h, read from that header's own tables so that the two agree."""
import os
import re

_HERE = os.path.dirname(os.path.abspath(__file__))
_SRC = open(os.path.join(_HERE, "gen.h"), encoding="utf-8").read()
_M = (1 << 64) - 1


def _body(name):
    return re.search(re.escape(name) + r"(?:\[\d*\])+ *= *\{(.*?)\};", _SRC, re.S).group(1)


def _numbers(name):
    return [int(x, 0) for x in re.findall(r"0x[0-9a-fA-F]+|\d+", _body(name))]


def _pairs(name):
    n = _numbers(name)
    return list(zip(n[::2], n[1::2]))


def _strings(name):
    return [x.encode("ascii").decode("unicode_escape").encode("latin-1")
            for x in re.findall(r'"((?:[^"\\]|\\.)*)"', _body(name))]


SCRIPTS, MARKS, SPACES = _pairs("gen_scripts"), _pairs("gen_marks"), _numbers("gen_spaces")
SUFFIXES, SPECIALS, INVALID = _strings("gen_suffixes"), _strings("gen_specials"), _strings("gen_invalid")
MORE = _strings("gen_more")
PUNCT = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"


class Gen:
    def __init__(self, seed):
        self.s = seed & _M

    def next(self, n):
        self.s = z = (self.s + 0x9e3779b97f4a7c15) & _M
        z = ((z ^ z >> 30) * 0xbf58476d1ce4e5b9) & _M
        z = ((z ^ z >> 27) * 0x94d049bb133111eb) & _M
        z ^= z >> 31
        return (z >> 32) % n

    def range(self, table):
        lo, hi = table[self.next(len(table))]
        return lo + self.next(hi - lo + 1)


def put(c):
    return chr(c).encode("utf-8")


def word(script, k):
    w = Gen(script * 1000003 + k)
    n, (lo, hi) = 1 + w.next(8), SCRIPTS[script]
    return b"".join(put(lo + w.next(hi - lo + 1)) for _ in range(n))


def piece(g):
    kind = g.next(20)
    if kind <= 2:
        return b" " + word(0, g.next(300))
    if kind == 3:
        first = put(65 + g.next(26))
        return first + word(0, g.next(300))
    if kind <= 5:
        n = g.next(len(SCRIPTS))
        return word(n, g.next(40))
    if kind == 6:
        return put(g.range(SCRIPTS))
    if kind == 7:
        c = g.next(0x10f800)
        return put(c if c < 0xd800 else c + 0x800)
    if kind == 8:
        return b"".join(put(48 + g.next(10)) for _ in range(1 + g.next(8)))
    if kind <= 10:
        return b"".join(put(SPACES[g.next(len(SPACES))]) for _ in range(1 + g.next(5)))
    if kind == 11:
        return b"'" + SUFFIXES[g.next(len(SUFFIXES))]
    if kind == 12:
        out = put(0x1f300 + g.next(0x800))
        n = g.next(4)
        if n == 1:
            out += put(0xfe0f)
        if n == 2:
            out += put(0x200d) + put(0x1f300 + g.next(0x800))
        if n == 3:
            out += put(0x1f3fb + g.next(5))
        return out
    if kind == 13:
        c = g.next(65)
        return put(c if c < 32 else c + 95)
    if kind <= 15:
        return SPECIALS[g.next(len(SPECIALS))]
    if kind == 16:
        out = put(97 + g.next(26) if g.next(3) else 0x1100 + g.next(19))
        return out + b"".join(put(g.range(MARKS)) for _ in range(g.next(5)))
    if kind == 17:
        return b"".join(PUNCT[g.next(32)].encode() for _ in range(1 + g.next(4)))
    if kind == 18:
        return INVALID[g.next(len(INVALID))]
    if g.next(8):
        return b""
    c = b"a =\n-1e\t"[g.next(8)]
    return bytes([c]) * (1 + g.next(400))


def string(i):
    """String i as bytes; may be invalid UTF-8."""
    g = Gen((i * 0x2545f4914f6cdd1d + 1) & _M)
    return b"".join(piece(g) for _ in range(1 + g.next(12)))


FNV = 0xcbf29ce484222325


def fnv(h, data):
    for b in data:
        h = ((h ^ b) * 0x100000001b3) & _M
    return h
