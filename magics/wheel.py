"""The wheel: one file that holds the extension, the engine, the CUDA backend where nvcc is, and the tiny model.

    wheel.py pack TREE FOLDER     packs TREE/qlora (made by `make wheel`) into FOLDER/qlora-….whl
    wheel.py try WHEEL            its size, what it needs, and how long it takes to install without a network

It is also the build backend of pyproject.toml, so `pip install ./magics` builds from source. Only the standard
library is used: neither needs anything from a package index."""
import base64
import hashlib
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
# Libraries that every Linux with glibc has; what needs any other is built for one machine only.
EVERYWHERE = {"libc.so.6", "libm.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0", "libstdc++.so.6", "libgcc_s.so.1",
              "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}


def version():
    return re.search(r'define QL_VERSION +"([^"]+)"', (ROOT / "core/qlora.h").read_text()).group(1)


def binaries(tree):
    return [p for p in sorted(tree.rglob("*")) if p.is_file() and p.open("rb").read(4) == b"\x7fELF"]


def needs(path):
    """(libraries, newest glibc) that a program or library asks for."""
    text = subprocess.run(["objdump", "-p", str(path)], capture_output=True, text=True, check=True).stdout
    glibc = [tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_(\d+\.\d+)", text)]
    return set(re.findall(r"NEEDED +(\S+)", text)), max(glibc, default=(2, 17))


def tag(tree):
    """manylinux_X_Y where nothing but the C and C++ libraries is asked for, X.Y being the newest glibc symbol's."""
    found = [needs(p) for p in binaries(tree)]
    more = set().union(*(libraries for libraries, _ in found)) - EVERYWHERE
    arch = platform.machine()
    if more:
        print(f"qlora: the wheel needs {', '.join(sorted(more))} of this system: it is for this machine alone", file=sys.stderr)
        return f"cp310-abi3-linux_{arch}"
    glibc = max(v for _, v in found)
    return f"cp310-abi3-manylinux_{glibc[0]}_{glibc[1]}_{arch}"


def metadata():
    return (f"Metadata-Version: 2.1\nName: qlora\nVersion: {version()}\n"
            "Summary: QLoRA fine-tuning from notebook cells: %load_ext qlora\nLicense: MIT\nRequires-Python: >=3.10\n"
            "Provides-Extra: notebook\nRequires-Dist: ipython>=7.34; extra == 'notebook'\n"
            "Requires-Dist: matplotlib; extra == 'notebook'\nRequires-Dist: pandas; extra == 'notebook'\n")


def licences():
    """Ours, and those of what is linked in."""
    yield "LICENSE", (ROOT / "LICENSE").read_bytes()
    for package in ("libjansson4", "libpcre2-8-0", "libopenblas0-pthread"):
        path = Path("/usr/share/doc", package, "copyright")
        if path.exists():
            yield package + ".txt", path.read_bytes()


def pack(tree, folder):
    tree, folder = Path(tree), Path(folder)
    name, kind, record = f"qlora-{version()}", tag(tree), []
    info = name + ".dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}-{kind}.whl"
    with zipfile.ZipFile(str(target) + ".part", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as z:
        def add(path, data, mode=0o644):
            entry = zipfile.ZipInfo(path, (2026, 1, 1, 0, 0, 0))  # the same tree gives the same file
            entry.external_attr, entry.compress_type = (0o100000 | mode) << 16, zipfile.ZIP_DEFLATED
            z.writestr(entry, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{path},sha256={digest},{len(data)}\n")
        for p in sorted(tree.rglob("*")):
            if p.is_file() and "__pycache__" not in p.parts:
                add(p.relative_to(tree).as_posix(), p.read_bytes(), 0o755 if p.parent.name == "bin" else 0o644)
        for file, data in licences():
            add(f"{info}/licenses/{file}", data)
        add(info + "/METADATA", metadata().encode())
        add(info + "/WHEEL", f"Wheel-Version: 1.0\nGenerator: qlora\nRoot-Is-Purelib: false\nTag: {kind}\n".encode())
        add(info + "/RECORD", ("".join(record) + f"{info}/RECORD,,\n").encode())
    os.replace(str(target) + ".part", target)
    for old in folder.glob("qlora-*.whl"):
        if old != target:
            old.unlink()
    return target


def attempt(wheel):
    """Installs into an empty environment with no index at hand."""
    wheel = Path(wheel)
    with tempfile.TemporaryDirectory() as d, zipfile.ZipFile(wheel) as z:
        size = sum(i.file_size for i in z.infolist())
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", d + "/venv"], check=True)
        python, begun = d + "/venv/bin/python", time.monotonic()
        subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", "--disable-pip-version-check",
                        str(wheel)], check=True)
        took = time.monotonic() - begun
        subprocess.run([python, "-c", "import qlora; qlora.run('load', 'tiny')"], check=True, cwd=d)
        z.extractall(d + "/x")
        found = [needs(p) for p in binaries(Path(d, "x"))]
        print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB, {size / 2**20:.1f} MiB unpacked; "
              f"installed in {took:.1f} s; needs glibc {max(v for _, v in found)[0]}.{max(v for _, v in found)[1]} and "
              f"{', '.join(sorted(set().union(*(l for l, _ in found))))}")
        if not any(i.filename.endswith("libqlora-cuda.so") for i in z.infolist()):
            print("no CUDA backend inside: there was no nvcc, or CUDA=0")


# ---- the build backend -----------------------------------------------------------------------------

def make(*goals):
    return subprocess.run(["make", "-s", "-C", str(ROOT), f"-j{os.cpu_count() or 1}", f"PYTHON={sys.executable}", *goals],
                          stdout=sys.stderr).returncode


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    build = os.environ.get("BUILD", "build")
    if make("wheel-tree", f"BUILD={build}") != 0:
        make("info", f"BUILD={build}")  # what was found, what is missing, and how to get it
        raise SystemExit("qlora: the build failed; above are its first error and what this machine has")
    return pack(ROOT / build / "wheel/tree", wheel_directory).name


def build_sdist(sdist_directory, config_settings=None):
    raise SystemExit("qlora: the source is the repository itself: pip install ./magics inside a clone of it")


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] == "pack":
        print(pack(sys.argv[2], sys.argv[3]))
    elif len(sys.argv) == 3 and sys.argv[1] == "try":
        attempt(sys.argv[2])
    else:
        sys.exit(__doc__)
