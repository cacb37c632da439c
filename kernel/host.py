"""The Python half of the kernel: IPython's shell, its outputs handed to `_qhost`, which the C++ half provides:
publish(type, json) and write(stream, bytes) may be called from any thread, input(prompt, password) from the cell's."""
import asyncio, base64, builtins, contextlib, getpass, importlib.util, io, json, os, sys

import _qhost
from IPython.core import page, payloadpage
from IPython.core.application import BaseIPythonApplication
from IPython.core.completer import provisionalcompleter, rectify_completions
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.error import StdinNotImplementedError
from IPython.core.interactiveshell import InteractiveShell, InteractiveShellABC
from IPython.core.shellapp import InteractiveShellApp
from IPython.utils.tokenutil import token_at_cursor


def encode(value):
    """JSON as the protocol wants it: image bytes in base64, NaN as null, lone surrogates as '?'."""
    def other(x):
        return base64.b64encode(x).decode() if isinstance(x, bytes) else str(x)
    options = dict(ensure_ascii=False, default=other, skipkeys=True)
    try:
        text = json.dumps(value, allow_nan=False, **options)
    except ValueError:
        no_nan = json.loads(json.dumps(value, **options), parse_constant=lambda _: None)
        text = json.dumps(no_nan, **options)
    return text.encode("utf-8", "replace")


def publish(kind, **content):
    _qhost.publish(kind, encode(content))


class Stream(io.TextIOBase):
    """sys.stdout or sys.stderr; the C++ half collects what is written and sends it 5 times a second."""
    encoding, errors, newlines = "utf-8", "replace", None

    def __init__(self, name, fd):
        self.name, self.fd = name, fd

    def write(self, text):
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        _qhost.write(self.name, text.encode("utf-8", "replace"))
        return len(text)

    def flush(self): _qhost.flush()
    def fileno(self): return self.fd
    def writable(self): return True


class Publisher(DisplayPublisher):
    def publish(self, data, metadata=None, source=None, *, transient=None, update=False, **_):
        publish("update_display_data" if update else "display_data",
                data=data, metadata=metadata or {}, transient=transient or {})

    def clear_output(self, wait=False):
        publish("clear_output", wait=bool(wait))


class Result(DisplayHook):
    """Shows the value of a cell's last expression as an execute_result."""
    message = None

    def start_displayhook(self): self.message = {"data": {}, "metadata": {}}
    def write_output_prompt(self): self.message["execution_count"] = self.prompt_count

    def write_format_data(self, format_dict, md_dict=None):
        self.message["data"], self.message["metadata"] = format_dict, md_dict or {}

    def finish_displayhook(self):
        message, self.message = self.message, None
        if message and message["data"]:
            publish("execute_result", **message)


class Shell(InteractiveShell):
    colors_force = True
    error = None              # what _showtraceback sent for this cell
    leaving = False           # exit() was called
    cancelling = False        # a coroutine that was stopped is being ended

    def enable_gui(self, gui=None): pass
    def init_hooks(self):
        super().init_hooks()
        self.set_hook("show_in_pager", page.as_hook(payloadpage.page), 99)

    def _showtraceback(self, etype, evalue, stb):
        if self.cancelling:   # what a cancelled coroutine dies of is not the cell's error: the Stop is
            return
        self.error = {"ename": str(etype.__name__), "evalue": str(evalue), "traceback": stb}
        publish("error", **self.error)

    def set_next_input(self, s, replace=False):
        self.payload_manager.write_payload(dict(source="set_next_input", text=s, replace=replace))

    def ask_exit(self):
        self.leaving = True
        self.payload_manager.write_payload(dict(source="ask_exit", keepkernel=False))


InteractiveShellABC.register(Shell)


class App(BaseIPythonApplication, InteractiveShellApp):
    """Reads the same profile as the stock kernel: configuration files, startup files, exec_lines."""
    name = "ipython-kernel"
    config_file_name = "ipython_kernel_config.py"

    def initialize(self):
        super().initialize(argv=[])
        self.init_path()
        self.shell = Shell.instance(
            parent=self, profile_dir=self.profile_dir, display_pub_class=Publisher, displayhook_class=Result)
        self.shell.configurables.append(self)
        self.shell.loop_runner = run_coroutine
        self.init_gui_pylab()
        self.init_extensions()
        self.init_code()

    def init_gui_pylab(self):
        if not os.environ.get("MPLBACKEND"):
            os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
        super().init_gui_pylab()


loop = None


def run_coroutine(coro):
    """Top-level await. A coroutine that is stopped is cancelled, else the next await would go on with it."""
    global loop
    if loop is None or loop.is_closed():
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
    task = loop.create_task(coro)
    try:
        return loop.run_until_complete(task)
    except BaseException:
        if not task.done():
            task.cancel()
            Shell.cancelling = True
            try:
                with contextlib.suppress(asyncio.CancelledError):
                    loop.run_until_complete(task)
            finally:
                Shell.cancelling = False
        raise


shell = None
cell = {}
late = ""                     # said in the first cell: before it no front end listens


def ask(prompt, password):
    if not cell.get("allow_stdin"):
        raise StdinNotImplementedError("input was asked for, but this front end cannot answer (allow_stdin is false)")
    return _qhost.input(str(prompt), password)


def package():
    """Where the qlora package is. A mere folder of that name, a clone in the working folder, is none."""
    spec = importlib.util.find_spec("qlora")
    return spec.origin if spec else None


def start(extra_path):
    global shell, late
    for key, value in dict(TERM="xterm-color", CLICOLOR="1", FORCE_COLOR="1", PAGER="cat", GIT_PAGER="cat").items():
        os.environ[key] = value
    sys.argv = [""]
    sys.stdout, sys.stderr = Stream("stdout", 1), Stream("stderr", 2)
    builtins.input = lambda prompt="", /: ask(prompt, False)
    getpass.getpass = lambda prompt="Password: ", stream=None, **_: ask(prompt, True)
    app = App.instance()
    app.initialize()
    shell = app.shell
    if package() is None:
        sys.path += extra_path
    if package() is not None:
        try:
            shell.extension_manager.load_extension("qlora")
        except Exception as e:
            late = f"qlora: %load_ext qlora failed: {type(e).__name__}: {e}\n"
    return {"execution_count": shell.execution_count}


def before(code, silent, store_history, user_expressions, allow_stdin):
    global late
    cell.clear()
    cell.update(code=code, silent=silent, store_history=store_history, expressions=user_expressions,
                allow_stdin=allow_stdin)
    shell.error = shell.displayhook.message = None
    if late and not silent:
        sys.stderr.write(late)
        late = ""


def run():
    """The only part that a Stop can interrupt. It may raise: then the Stop came between IPython's own handlers."""
    try:
        result = shell.run_cell(cell["code"], store_history=cell["store_history"], silent=cell["silent"])
    except BaseException as e:
        stop = e              # an error of IPython's own that the Stop led to
        while stop is not None and not isinstance(stop, KeyboardInterrupt):
            stop = stop.__context__
        raise stop or e
    if result.success:
        cell["expressions"] = shell.user_expressions(cell["expressions"] or {})
    cell["result"] = result


def after(raised):
    """The reply. `raised` is what run() raised, as [ename, evalue], or None."""
    result = cell.get("result")
    failure = None if result is None else result.error_before_exec or result.error_in_exec
    if result is None:
        ename, evalue = raised
        if shell.error is None and not cell["silent"]:
            publish("error", ename=ename, evalue=evalue, traceback=[f"{ename}: {evalue}"])
        failed = {"ename": ename, "evalue": evalue, "traceback": [f"{ename}: {evalue}"]}
    elif failure is not None:
        failed = shell.error or {"ename": type(failure).__name__, "evalue": str(failure), "traceback": []}
    else:
        failed = None
    payload = shell.payload_manager.read_payload()
    shell.payload_manager.clear_payload()
    reply = {"status": "ok", "payload": payload, "user_expressions": cell["expressions"] or {}}
    if failed:
        reply.update(failed, status="error", user_expressions={})
    return {"reply": reply, "execution_count": shell.execution_count, "leaving": shell.leaving}


def complete(code, pos):
    pos = len(code) if pos < 0 else pos
    with provisionalcompleter():
        found = list(rectify_completions(code, shell.Completer.completions(code, pos)))
    start, end = (found[0].start, found[0].end) if found else (pos, pos)
    types = [dict(start=c.start, end=c.end, text=c.text, type=c.type, signature=c.signature) for c in found]
    return {"status": "ok", "matches": [c.text for c in found], "cursor_start": start, "cursor_end": end,
            "metadata": {"_jupyter_types_experimental": types}}


def inspect(code, pos, detail_level):
    try:
        name = token_at_cursor(code, len(code) if pos < 0 else pos)
        data = shell.object_inspect_mime(name, detail_level=detail_level)
        if not shell.enable_html_pager:
            data.pop("text/html", None)
    except KeyError:
        data = {}
    return {"status": "ok", "found": bool(data), "data": data, "metadata": {}}


def is_complete(code):
    status, spaces = shell.input_transformer_manager.check_complete(code)
    return {"status": status, "indent": " " * spaces if status == "incomplete" else ""}


def history(kind, raw, output, n, pattern, unique, session, start, stop):
    manager = shell.history_manager
    if kind == "tail":
        rows = manager.get_tail(n, raw=raw, output=output, include_latest=True)
    elif kind == "range":
        rows = manager.get_range(session, start, stop, raw=raw, output=output)
    else:
        rows = manager.search(pattern, raw=raw, output=output, n=n, unique=unique)
    return [(session or manager.session_number, *rest) for session, *rest in rows]   # 0 is IPython's for "this one"


def info():
    import IPython
    version = sys.version.split()[0]
    return {
        "status": "ok", "implementation": "qlora",
        "language_info": {
            "name": "python", "version": version, "mimetype": "text/x-python", "file_extension": ".py",
            "pygments_lexer": "ipython3", "codemirror_mode": {"name": "ipython", "version": 3},
            "nbconvert_exporter": "python"},
        "banner": f"QLoRA kernel: Python {version}, IPython {IPython.__version__}. `%qlora help` lists the verbs.",
        "debugger": False,
        "help_links": [{"text": "Python", "url": f"https://docs.python.org/{version[:version.rindex('.')]}"},
                       {"text": "IPython", "url": "https://ipython.org/documentation.html"},
                       {"text": "Matplotlib", "url": "https://matplotlib.org/stable/"}]}


def leave():
    """What Python does at its end, without tearing the interpreter down under running threads."""
    import atexit
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    return None


def call(name, arguments):
    return encode(globals()[name](*json.loads(arguments)))
