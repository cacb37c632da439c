"""QLoRA fine-tuning from notebook cells.

    %load_ext qlora
    %qlora help

From plain Python: qlora.run("load", "tiny"); r = qlora.run("train", max_steps=20); r.loss; r.plot()
"""
import json as _json
import os as _os
import re as _re
import signal as _signal
import sys as _sys
from pathlib import Path as _Path

from . import _core
from ._core import Error

__version__ = _core.version
__all__ = ["Error", "Result", "Run", "SFTTrainer", "from_transformers", "last", "run"]


class Result(dict):
    """What a verb answered: its data as a dict, and its own view in a notebook."""

    def __init__(self, answer):
        super().__init__(answer["data"])
        self.kind, self._line, self._bundle = answer["kind"], answer["repr"], answer["bundle"]

    def __repr__(self):
        return self._bundle["data"]["text/plain"] if self._bundle else self._line

    def _repr_pretty_(self, p, cycle):
        p.text(repr(self))

    def _repr_mimebundle_(self, include=None, exclude=None):
        if self._bundle:
            return self._bundle["data"], self._bundle["metadata"]
        return {"text/plain": self._line}


class Run(Result):
    """A run: .name .path .history .loss .memory .frame .plot(); run["loss"] is .loss."""

    name = property(lambda self: self["name"])
    path = property(lambda self: _Path(self["path"]))
    history = property(lambda self: self["history"])
    memory = property(lambda self: self["memory"])

    @property
    def loss(self):
        """The loss of every step; None where a step was skipped."""
        return self._column("loss")

    def _column(self, key):
        return [r[key] for r in self["history"] if key in r]

    def __format__(self, spec):
        """What {run} in a line of %qlora stands for."""
        return format(str(self.path), spec)

    def __missing__(self, key):
        column = self._column(key)
        if not column:
            raise KeyError(key)
        return column

    @property
    def frame(self):
        """The history as a pandas DataFrame."""
        import pandas
        return pandas.DataFrame(self["history"])

    def plot(self, ax=None, diff=None, metric="loss"):
        """Draws the run and returns matplotlib Axes. diff: another run (or its name), drawn with it, the
        difference below. Without ax a figure is made and shown."""
        from . import plots
        runs = [_brief(diff), _brief(self)] if diff is not None else [_brief(self)]
        chart = _json.loads(_core.chart(_json.dumps(runs), metric, diff is not None))
        if ax is None:
            fig, axes = plots.figure(chart)
            _host.figure(fig, chart)
            return axes[0]
        axes = [ax]
        if len(chart["panels"]) > 1:
            from mpl_toolkits.axes_grid1 import make_axes_locatable
            axes.append(make_axes_locatable(ax).append_axes("bottom", size="45%", pad=0.25, sharex=ax))
            ax.tick_params(labelbottom=False)
        plots.draw(chart, axes)
        return ax


def _brief(r):
    if isinstance(r, (str, _os.PathLike)):
        return run("plot", str(r), metric="loss")["runs"][0]
    return {"name": r.get("name", "run"), "history": r["history"], "memory": r.get("memory", [])}


def _result(text):
    if text is None:
        return None
    answer = _json.loads(text)
    return (Run if answer["kind"] == "run" else Result)(answer)


def _clean(v):
    """A cell of a table as JSON has it: numpy's scalars and arrays, and no NaN."""
    if isinstance(v, float):
        return v if v - v == 0 else None
    if isinstance(v, dict):
        return {str(k): _clean(x) for k, x in v.items()}
    if isinstance(v, (list, tuple)):
        return [_clean(x) for x in v]
    if v is None or isinstance(v, (str, int, bool)):
        return v
    if isinstance(v, (bytes, bytearray)):
        return bytes(v).decode("utf-8", "replace")
    if type(v).__name__ in ("NAType", "NaTType"):   # pandas' other words for nothing
        return None
    if hasattr(v, "tolist"):
        return _clean(v.tolist())
    return str(v)


def _rows(name, value):
    """The rows of a notebook's variable, one dict each; None where it is no data."""
    if hasattr(value, "itertuples") and hasattr(value, "columns"):
        columns = [str(c) for c in value.columns]
        return (dict(zip(columns, row)) for row in value.itertuples(index=False, name=None))
    if isinstance(value, dict) and value and all(hasattr(v, "column_names") for v in value.values()):
        raise Error(f"{name} holds the splits {', '.join(value)}: give one a name of its own, then %qlora data NAME")
    if isinstance(getattr(value, "column_names", None), (list, tuple)) and hasattr(value, "iter"):
        return _blocks(value)
    if hasattr(value, "column_names") or hasattr(value, "__iter__") and not isinstance(value, (str, bytes, dict, type, _Path)):
        return iter(value)
    return None


def _blocks(ds, rows=1000):
    """A datasets.Dataset, many rows at a time: much quicker than one by one, and never all of it in memory."""
    for block in ds.iter(batch_size=rows):
        if not isinstance(block, dict):   # with_format("pandas") and the like
            yield from _blocks(ds.with_format(None), rows)
            return
        for row in zip(*block.values()):
            yield dict(zip(block, row))


class _Written:
    """Where rows are written: what the disk has against it is an error that says so. The rows' own errors stay what they are."""

    def __init__(self, name, folder):
        self.name, self.folder = name, folder

    def __enter__(self):
        pass

    def __exit__(self, kind, error, trace):
        if isinstance(error, OSError):
            raise Error(f"{self.name} cannot be written in {self.folder}: {error.strerror}: "
                        "work in a folder that can be written and has room") from None


def _write_rows(name, rows, folder):
    import hashlib
    import tempfile
    where = _Path(folder) / ".data"
    here = _Written(name, where)
    with here:
        where.mkdir(parents=True, exist_ok=True)
        f = tempfile.NamedTemporaryFile("wb", dir=where, suffix=".part", delete=False)
    digest, n = hashlib.sha256(), 0
    try:
        for row in rows:
            if isinstance(row, str):
                row = {"text": row}
            if not isinstance(row, dict):
                raise Error(f"{name}[{n}] is of type {type(row).__name__}: rows are dicts (text, messages, prompt and completion) or strings")
            line = _json.dumps(_clean(row), ensure_ascii=False, allow_nan=False).encode("utf-8", "replace") + b"\n"
            digest.update(line)
            with here:
                f.write(line)
            n += 1
        with here:
            f.close()
        if n == 0:
            raise Error(f"{name} has no rows")
        path = where / f"{name}-{digest.hexdigest()[:8]}.jsonl"
        with here:
            _os.replace(f.name, path)
    except BaseException:
        try:
            f.close()
        except OSError:   # what was still in its buffer
            pass
        _os.unlink(f.name)
        raise
    return {"path": str(path), "rows": n}


def _hub_home():
    return _os.environ.get("HF_HOME") or _os.path.expanduser("~/.cache/huggingface")


def _hub_cache():
    return _os.environ.get("HF_HUB_CACHE") or _os.path.join(_hub_home(), "hub")


class _Host:
    """What the C side asks of Python; called on the cell's own thread only."""

    ip = None
    in_calls = False         # in others' code (rows of a variable, an upload), which may not end: a Stop is raised there

    def show(self, text, ident, update):
        bundle = _json.loads(text)
        if self.ip is None:
            if not update:
                self.print(bundle["data"].get("text/plain", "") + "\n")
            return
        self.ip.display_pub.publish(data=bundle["data"], metadata=bundle["metadata"],
                                    transient={"display_id": ident} if ident else {}, update=bool(update))

    def print(self, text):
        _sys.stdout.write(text)
        _sys.stdout.flush()

    def chart(self, text):
        from . import plots
        return plots.png(_json.loads(text))

    def figure(self, fig, chart):
        if self.ip is None:
            return
        import base64
        import io
        out = io.BytesIO()
        fig.savefig(out, format="png")
        self.show(_json.dumps({"data": {"text/plain": chart["title"], "image/png": base64.b64encode(out.getvalue()).decode()},
                               "metadata": {"image/png": {"width": chart["width"], "height": chart["height"]}}}), None, False)

    def variable(self, name, folder):
        spaces = [self.ip.user_ns] if self.ip is not None else []
        spaces.append(getattr(_sys.modules.get("__main__"), "__dict__", {}))
        for space in spaces:
            if name in space:
                if isinstance(space[name], Run):
                    return _json.dumps({"run": str(space[name].path)})
                self.in_calls = True
                try:
                    rows = _rows(name, space[name])
                    if rows is None:
                        return None
                    return _json.dumps(_write_rows(name, rows, folder) if folder else {})  # no folder: only whether there are rows
                finally:
                    self.in_calls = False
        return None

    def hub(self):
        """How to reach the hub. The token: HF_TOKEN, then the file that `hf auth login` writes, then Kaggle's secrets."""
        env, home = _os.environ, _hub_home()
        token = env.get("HF_TOKEN") or env.get("HUGGING_FACE_HUB_TOKEN")
        try:
            token = token or (_Path(home) / "token").read_text().strip()
        except OSError:
            pass
        if not token and env.get("KAGGLE_KERNEL_RUN_TYPE"):
            try:
                from kaggle_secrets import UserSecretsClient
                token = UserSecretsClient().get_secret("HF_TOKEN")
            except Exception:  # none is attached to this notebook: public models need none
                pass
        return _json.dumps({"cache": _hub_cache(), "endpoint": env.get("HF_ENDPOINT"),
                            "token": token or None, "offline": env.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")})

    def push(self, text):
        """Uploads a folder with the hub's own client: {"folder", "repo", "private", "files"} → {"url", "commit"}."""
        what, hub = _json.loads(text), _json.loads(self.hub())
        saved = f"{what['folder']} is saved and can be pushed later"
        if hub["offline"]:
            raise Error(f"HF_HUB_OFFLINE is set; {saved}")
        try:
            from huggingface_hub import HfApi
        except ImportError:
            raise Error(f"--push_to_hub uploads with huggingface_hub: pip install huggingface_hub. {saved}") from None
        if not hub["token"]:
            raise Error(f"--push_to_hub needs a token that may write (huggingface.co/settings/tokens) in HF_TOKEN, by `hf auth login`, or in Kaggle's secrets. {saved}")
        self.in_calls = True
        try:
            api = HfApi(endpoint=hub["endpoint"], token=hub["token"])
            repo = api.create_repo(what["repo"], private=what["private"] or None, exist_ok=True)
            info = api.upload_folder(repo_id=repo.repo_id, folder_path=what["folder"], allow_patterns=what["files"],
                                     commit_message="Upload from qlora")
        except Exception as error:
            reason = str(error).replace(hub["token"], "hf_…")  # never shown, whoever's message it is
            raise Error(f"{what['repo']}: {reason}. {saved}") from None
        finally:
            self.in_calls = False
        return _json.dumps({"url": str(repo), "repo": repo.repo_id, "commit": info.oid})

    def bitsandbytes(self, text):
        import importlib.util
        if not (importlib.util.find_spec("bitsandbytes") and importlib.util.find_spec("torch")):
            return None
        import subprocess
        w = _json.loads(text)
        self.in_calls = True
        args = [_sys.executable, str(_Path(__file__).with_name("bnb_bench.py")), str(w["rows"]), str(w["cols"]), w["backend"]]
        try:
            r = subprocess.run(args, capture_output=True, text=True, timeout=120)
        except (OSError, subprocess.TimeoutExpired):
            return None
        finally:
            self.in_calls = False
        return r.stdout.strip().splitlines()[-1] if r.returncode == 0 and r.stdout.strip() else None

    def libraries(self):
        from importlib import metadata
        found = {"Python": ".".join(map(str, _sys.version_info[:3]))}
        for name in ("ipython", "matplotlib", "pandas", "transformers", "peft", "bitsandbytes"):
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                found[name] = None
        return _json.dumps(found)


_host = _Host()


def _first(*paths):
    return next((str(p) for p in paths if p and _Path(p).exists()), None)


def _open():
    """Follow is 0: outputs that change in place, 1: plain lines, 2: both (a notebook run in batch keeps stdout alone)."""
    here, env = _Path(__file__).resolve().parent, _os.environ
    follow = 1
    if _host.ip is not None and "Terminal" not in type(_host.ip).__name__:
        follow = 2 if env.get("KAGGLE_KERNEL_RUN_TYPE") == "Batch" else 0
    # Where cuBLAS and NCCL may be: pip's nvidia packages of this Python, then the toolkit.
    places = env.get("QLORA_LIBRARY_PATH", "").split(":") + [p for p in _sys.path if p and _os.path.isdir(_os.path.join(p, "nvidia"))]
    env["QLORA_LIBRARY_PATH"] = ":".join(dict.fromkeys(p for p in [*places, "/usr/local/cuda"] if p))
    engine = env.get("QLORA_ENGINE") or _first(here / "bin" / "qlora-engine", here.parents[1] / "qlora-engine")
    bundled = env.get("QLORA_BUNDLED") or _first(here / "bundled", here.parents[2] / "notebooks")
    _core.open(_host, engine, env.get("QLORA_RUNS"), bundled, _hub_cache(), follow)


def _word(v):
    """One word of a line, quoted so that the parser gives it back as it is."""
    if isinstance(v, bool) or v is None or isinstance(v, (dict, list, tuple, set)):
        v = _json.dumps(sorted(v) if isinstance(v, set) else v)
    return '"' + str(v).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _stoppable(line, body):
    """Runs a verb while Stop is counted, not raised: a KeyboardInterrupt that happens to be raised in a weak reference's
    callback (matplotlib has many) is printed and lost, and the training would go on."""
    pressed = []

    def stop(signum, frame):
        pressed.append(signum)
        if _host.in_calls:
            raise KeyboardInterrupt
        _core.press()
    for text in (line, body or ""):
        _check(text)
    try:
        before = _signal.signal(_signal.SIGINT, stop)
    except ValueError:      # not the main thread: no Stop arrives here
        return _core.run(line, body)
    try:
        answer = _core.run(line, body)
    finally:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler if before is None else before)
        _core.unpress()
    if pressed:             # too late for the verb, or it looks for no Stop: a loop of such verbs must end all the same
        raise _core.Stopped("the verb had ended when Stop came: what it did stays")
    return answer


def _check(text):
    """Says what no line can hold; a file's name with bytes that are no UTF-8 has lone surrogates in Python."""
    if "\0" in text:
        raise Error("a cell cannot hold the character NUL")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Error(f"{ascii(text)} is no text in UTF-8; if it is a file's name, give the file another one") from None


def _source(value):
    """Rows that are given themselves, as a file; a name or a path as it is."""
    if isinstance(value, (str, _os.PathLike)):
        return value
    rows = _rows("the data", value)
    if rows is None:
        raise Error(f"data of type {type(value).__name__}: give a list of dicts or strings, a DataFrame, a Dataset, or a file's name")
    return _write_rows("rows", rows, _os.environ.get("QLORA_RUNS") or "runs")["path"]


def run(verb, *args, body=None, **options):
    """A verb from plain Python: run("load", "tiny"), run("data", rows), run("train", max_steps=20, learning_rate=1e-4)."""
    if verb == "data":
        args = [_source(a) for a in args]
    if "eval_dataset" in options:
        options["eval_dataset"] = _source(options["eval_dataset"])
    if verb == "generate":
        for a in args:
            if a is not None and not isinstance(a, str):
                raise Error(f"a prompt of type {type(a).__name__}: generate takes texts, one after another: run(\"generate\", *prompts)")
    else:
        args = [_os.path.expanduser(a) if isinstance(a, str) else a for a in args]
    words = [verb] + [_word(getattr(a, "path", a)) for a in args if a is not None] + [f"--{k}={_word(v)}" for k, v in options.items()]
    return _result(_stoppable(" ".join(words), body))


def qlora(line, cell=None):
    return _result(_stoppable(line, cell))


def _complete(ip, event):
    try:
        words, symbol = _json.loads(_core.complete(event.line)), event.symbol or ""
    except (Error, ValueError):   # a verb runs in another thread; no text
        return []
    if not symbol.startswith("-"):  # IPython splits --key=value at the =
        words = [w.split("=", 1)[1] if w.startswith("--") and "=" in w else w for w in words]
    return words


def _matcher(context):
    """Tab where IPython lets a completer speak alone (8.6 on); also after `r = `, and in the body of %%qlora config."""
    from IPython.core.completer import SimpleCompletion
    text = context.text_until_cursor
    begin = _re.match(r"\s*(?:[\w, ]+=\s*)?(?=%%?qlora\s)", text)
    if begin:
        line, word, cut = text[begin.end():], _re.search(r"\S*$", text).group(), 0
    elif context.cursor_line and _re.match(r"%%qlora\s+config\b", context.full_text):
        key, colon, value = (part.strip() for part in text.partition(":"))
        line, word, cut = (f"%qlora config --{key} {value}", value, 0) if colon else (f"%qlora eval --{key}", key, 2)   # eval has no options of its own
    else:
        return {"completions": []}
    try:
        found = _json.loads(_core.complete(line))
    except (Error, ValueError):
        found = []
    if not begin and not cut:
        found = [f for f in found if not f.startswith("--")]
    found.sort(key=lambda f: f.startswith("--"))   # values before options
    return {"completions": [SimpleCompletion(f[cut:]) for f in found], "matched_fragment": word, "suppress": True, "ordered": True}


def _brief_traceback(error):
    """What IPython shows: the message, and only such frames above it as are the person's own functions."""
    lines, tb = [f"\x1b[31m{type(error).__name__}\x1b[0m: {error}"], error.__traceback__
    while tb is not None:
        code = tb.tb_frame.f_code
        ours = "IPython" in code.co_filename or _Path(code.co_filename).parent == _Path(__file__).parent
        if not ours and not code.co_name.startswith("<"):  # <module>, <cell line: 1>
            lines.insert(-1, f"in {code.co_name}, {code.co_filename}:{tb.tb_lineno}")
        tb = tb.tb_next
    return lines


Error._render_traceback_ = _core.Stopped._render_traceback_ = _brief_traceback


def __getattr__(name):
    if name == "last":
        return _result(_core.last())
    if name in ("SFTTrainer", "from_transformers"):
        from . import hf
        return getattr(hf, name)
    raise AttributeError(f"module 'qlora' has no attribute '{name}'")


def load_ipython_extension(ip):
    _host.ip = ip
    _open()
    qlora.__doc__ = _core.help()
    ip.register_magic_function(qlora, "line_cell", "qlora")
    try:
        from IPython.core.completer import context_matcher
        matchers = ip.Completer.custom_matchers
        matchers[:] = [m for m in matchers if m is not _matcher] + [context_matcher()(_matcher)]
    except (ImportError, AttributeError):   # an older one has only hooks, and mixes in names of its own
        for key in ("%qlora", "%%qlora"):
            ip.set_hook("complete_command", _complete, str_key=key)
    ip.user_ns.setdefault("qlora", _sys.modules[__name__])


def unload_ipython_extension(ip):
    ip.magics_manager.magics["line"].pop("qlora", None)
    ip.magics_manager.magics["cell"].pop("qlora", None)
    if _matcher in getattr(ip.Completer, "custom_matchers", []):
        ip.Completer.custom_matchers.remove(_matcher)
    _core.close()


_open()
import atexit as _atexit  # noqa: E402
_atexit.register(_core.close)
_os.register_at_fork(after_in_child=_core.forked)
