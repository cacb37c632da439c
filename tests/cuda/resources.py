"""resources.py BUILD [--write]: what the sm_75 kernels of a build take, from the assembler's words (BUILD/kernels/cuda/*.ptxas), against
resources.txt: registers, bytes of stack, bytes spilled (stores + loads), static shared memory. Names what changed. --write: make resources.

Limits, whatever the table says: no more than 64 KB of shared memory and 255 registers, and nothing spilled or on the stack but where
the table's line ends in a reason (kept by --write)."""
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
TABLE = HERE / "resources.txt"
ARCH, SHARED = "sm_75", 64 * 1024
HEAD = """# Kernels of the sm_75 build as ptxas {version} reports them: make resources writes this, tests/cuda/resources.py compares.
# registers stack spilled shared kernel [# why it may spill or use the stack]
"""
FIELDS = ("registers", "stack", "spilled", "shared")


def parse(text):
    """{mangled: (registers, stack, spilled, shared)} of the kernels for ARCH."""
    kernels, name, stack, spilled = {}, None, 0, 0
    for line in text.splitlines():
        if m := re.search(r"Compiling entry function '(\S+)' for '(\S+)'", line):
            name, stack, spilled = m[1] if m[2] == ARCH else None, 0, 0
        elif name and (m := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line)):
            stack, spilled = int(m[1]), int(m[2]) + int(m[3])
        elif name and (m := re.search(r"Used (\d+) registers", line)):
            shared = re.search(r"(\d+) bytes smem", line)
            kernels[name] = (int(m[1]), stack, spilled, int(shared[1]) if shared else 0)
            name = None
    return kernels


def plain(names):
    """Without parameter lists: a kernel's template arguments tell it apart."""
    out = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout.splitlines()
    return {n: re.sub(r"\((?!anonymous)[^()]*(\([^()]*\)[^()]*)*\)$", "", o.replace("(anonymous namespace)::", "")).removeprefix("void ") for n, o in zip(names, out)}


def built(build):
    kernels, files = {}, sorted(pathlib.Path(build, "kernels/cuda").glob("*.ptxas"))
    for f in files:
        kernels.update(parse(f.read_text()))
    if not kernels:
        raise SystemExit(f"{build} has no kernels for {ARCH}: make CUDA=1 (with 75 in CUDA_ARCH)")
    names = plain(list(kernels))
    if len(set(names.values())) != len(names):
        raise SystemExit("two kernels have one name")
    return {names[n]: v for n, v in kernels.items()}


def table():
    rows, why = {}, {}
    for line in TABLE.read_text().splitlines() if TABLE.exists() else ():
        if line.startswith("#") or not line.strip():
            continue
        *numbers, rest = line.split(maxsplit=4)
        name, _, reason = rest.strip().partition("  # ")
        rows[name] = tuple(int(x) for x in numbers)
        if reason:
            why[name] = reason
    return rows, why


def ptxas(nvcc="nvcc"):
    m = re.search(r"release (\S+),", subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout)
    return m[1] if m else "?"


def broken(kernels, why):
    out = []
    for name, (registers, stack, spilled, shared) in kernels.items():
        if shared > SHARED:
            out.append(f"{name}: {shared} bytes of shared memory; a T4 has {SHARED}")
        if registers > 255:
            out.append(f"{name}: {registers} registers")
        if (spilled or stack) and name not in why:
            out.append(f"{name}: {spilled} bytes spilled, {stack} on the stack, and the table has no reason for it")
    return out


def changed(kernels, rows):
    out = [f"{n}: new, {dict(zip(FIELDS, v))}" for n, v in kernels.items() if n not in rows]
    out += [f"{n}: gone" for n in rows if n not in kernels]
    for n, v in kernels.items():
        out += [f"{n}: {f} {b} -> {a}" for f, a, b in zip(FIELDS, v, rows.get(n, v)) if a != b]
    return out


def main():
    kernels = built(sys.argv[1])
    rows, why = table()
    if "--write" in sys.argv:
        lines = ["%3d %4d %4d %6d  %s%s\n" % (*v, n, f"  # {why[n]}" if n in why else "") for n, v in sorted(kernels.items())]
        TABLE.write_text(HEAD.format(version=ptxas()) + "".join(lines))
        print(f"{len(kernels)} kernels")
        rows, why = table()
    problems = broken(kernels, why)
    written_by = re.search(r"ptxas (\S+)", TABLE.read_text())[1]
    if ptxas() == written_by:
        problems += changed(kernels, rows)
    else:
        print(f"the table is of ptxas {written_by}, here is {ptxas()}: limits alone were checked")
    for p in problems:
        print(p)
    print(f"{len(kernels)} kernels for {ARCH}: " + ("as the table says, within a T4's limits" if not problems else
          f"{len(problems)} differences. If they are meant: make resources"))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
