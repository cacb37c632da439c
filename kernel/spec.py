"""What make asks of a Python and where the kernel spec goes. Run by the Python that the kernel is for:
    spec.py make                               variables for kernel/build.mk
    spec.py write FOLDER KERNEL BUILD          a spec that uses the build folder and its venv
    spec.py install KERNEL BUILD               a whole copy for this user's Jupyter, named after this Python
    spec.py uninstall
JUPYTER_DATA_DIR says where Jupyter looks, as it does for Jupyter itself."""
import json, os, re, shutil, sys, sysconfig
from pathlib import Path

here = Path(__file__).resolve().parent
logos = here / "logos"


def xeus():
    """Its header. What was built here (kaggle/xeus.sh) goes before the distribution's, as it does for the compiler; Ubuntu has another version."""
    places = os.environ.get("XEUS_PREFIX", "/usr/local:/usr").split(":")
    return next((f for p in places if (f := Path(p, "include", "xeus", "xeus.hpp")).exists()), None)


def missing():
    """Why the kernel cannot be built for this Python, or ''."""
    header = xeus()
    found = dict(re.findall(r"define XEUS_VERSION_(\w+) (\d+)", header.read_text())) if header else {}
    if not found:
        return "xeus 2.4 was not found (Debian 12: apt-get install xeus-dev; not in Ubuntu)"
    if (found["MAJOR"], found["MINOR"]) != ("2", "4"):
        return f"xeus is {found['MAJOR']}.{found['MINOR']}, the kernel needs 2.4 (Debian 12 has it)"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return f"{sys.executable} has no Python.h (apt-get install python3-dev)"
    if not Path(library_dir(), sysconfig.get_config_var("LDLIBRARY")).exists():
        return f"{sys.executable} has no shared libpython, which an embedded Python needs"
    return ""


def library_dir():
    return sysconfig.get_config_var("LIBDIR")


def make():
    include = {sysconfig.get_path("include"), sysconfig.get_path("platinclude")}
    library = re.sub(r"^lib|\.so$", "", sysconfig.get_config_var("LDLIBRARY") or "")
    print(f"KERNEL_WHY := {missing()}")
    print(f"KERNEL_TAG := {sysconfig.get_config_var('SOABI')}-{abs(hash_text(sys.base_prefix)) % 10000:04d}")
    print(f"KERNEL_CFLAGS := {' '.join('-isystem ' + i for i in sorted(include))}")
    beside = f"-L{xeus().parents[2] / 'lib'} " if xeus() and xeus().parents[2] != Path("/usr") else ""  # else the linker looks in /usr/lib first
    print(f"KERNEL_LIBS := {beside}-L{library_dir()} -Wl,-rpath,{library_dir()} -l{library}")


def hash_text(text):
    import zlib
    return zlib.crc32(text.encode())


def name():
    """('qlora-myenv', 'QLoRA (Python, myenv)'); the system's Python is plain 'qlora'."""
    version = "%d.%d" % sys.version_info[:2]
    if sys.prefix != sys.base_prefix or Path(sys.prefix, "conda-meta").exists():
        folder = Path(sys.prefix)
        env = folder.parent.name if folder.name in (".venv", "venv", "env", ".env") else folder.name
        return "qlora-" + (re.sub(r"[^a-z0-9._-]+", "-", env.lower()).strip("-") or version), f"QLoRA (Python, {env})"
    if sys.prefix == "/usr":
        return "qlora", "QLoRA (Python)"
    return "qlora-" + version, f"QLoRA (Python {version})"


def data_dir():
    return Path(os.environ.get("JUPYTER_DATA_DIR") or
                Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "jupyter")


def write(folder, kernel, python, path, display):
    folder.mkdir(parents=True, exist_ok=True)
    spec = {"argv": [str(kernel), "--python", str(python), "--path", str(path), "-f", "{connection_file}"],
            "display_name": display, "language": "python", "interrupt_mode": "message", "env": {},
            "metadata": {"debugger": False}}
    text = json.dumps(spec, indent=1, ensure_ascii=False) + "\n"
    target = folder / "kernel.json"
    if not target.exists() or target.read_text() != text:
        target.write_text(text)
    for logo in logos.iterdir():
        shutil.copyfile(logo, folder / logo.name)


def replace(source, target):
    """A new file, never a changed one: a running kernel keeps what it has."""
    shutil.copy2(source, str(target) + ".new")
    os.replace(str(target) + ".new", target)


def install(kernel, build):
    folder = data_dir() / "kernels" / name()[0]
    write(folder, folder / "qlora-kernel", sys.executable, folder / "lib", name()[1])
    replace(kernel, folder / "qlora-kernel")
    package, target, hide = build / "python" / "qlora", folder / "lib" / "qlora", shutil.ignore_patterns("__pycache__", "*.py")
    shutil.rmtree(folder / "lib", ignore_errors=True)
    if package.is_dir():
        shutil.copytree(package, target, ignore=shutil.ignore_patterns("__pycache__"))
        (target / "bin").mkdir()
        for program in ("qlora-engine", "libqlora-cuda.so"):
            if (build / program).exists():
                shutil.copy2(build / program, target / "bin" / program)
        shutil.copytree(here.parent / "notebooks/tiny", target / "bundled/tiny", ignore=hide)
    print(f"qlora: installed the kernel \"{name()[1]}\" in {folder}")
    import importlib.util
    if importlib.util.find_spec("IPython") is None:
        print(f"qlora: it needs IPython:\n  {sys.executable} -m pip install ipython matplotlib")


def uninstall():
    folder = data_dir() / "kernels" / name()[0]
    if not (folder / "qlora-kernel").exists():
        sys.exit(f"qlora: no kernel in {folder}")
    shutil.rmtree(folder)
    print(f"qlora: removed {folder}")


what, args = sys.argv[1], [Path(a).absolute() for a in sys.argv[2:]]
if what == "make":
    make()
elif what == "write":
    folder, kernel, build = args[:3]
    write(folder, kernel, build / "venv/bin/python", build / "python", "QLoRA (Python)")
elif what == "install":
    install(*args)
elif what == "uninstall":
    uninstall()
