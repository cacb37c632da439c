// The Jupyter kernel "qlora": xeus 2.4 speaks the protocol, the embedded Python with IPython's shell runs the cells.
// Every xeus type stays in this file. Most of what is unusual here works around something that xeus 2.4.1 does; the
// comment beside it says what.
//
// Threads: the main thread runs the cells and everything else on the shell channel (Python handles signals only
// there); xeus' control thread answers interrupt and shutdown; `Outbox::run` sends collected output and ends the
// kernel when its parent dies. Output may come from any thread.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <ext/stdio_filebuf.h>
#include <fcntl.h>
#include <iostream>
#include <mutex>
#include <pthread.h>
#include <thread>
#include <unistd.h>

#include <xeus/xeus_context.hpp>
#include <xeus/xhistory_manager.hpp>
#include <xeus/xinput.hpp>
#include <xeus/xinterpreter.hpp>
#include <xeus/xkernel.hpp>
#include <xeus/xkernel_configuration.hpp>
#include <xeus/xmiddleware.hpp>
#include <xeus/xserver_shell_main.hpp>
#include <zmq.hpp>

#include "kernel/outbox.hpp"
#include "kernel/signals.hpp"

static_assert(XEUS_VERSION_MAJOR == 2 && XEUS_VERSION_MINOR == 4, "written for xeus 2.4; other versions differ");

namespace
{
using json = nl::json;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// ---- server -------------------------------------------------------------------------------------
// Stands between xeus' server and its kernel core, and mends the messages that pass.

class Server : public xeus::xserver
{
  public:
    static Server *instance;

    explicit Server(std::unique_ptr<xeus::xserver> server) : inner(std::move(server))
    {
        instance = this;
        inner->register_shell_listener([this](xeus::xmessage m) { shell_message(std::move(m)); });
        inner->register_stdin_listener([this](xeus::xmessage m) { notify_stdin_listener(std::move(m)); });
        inner->register_internal_listener([this](json m) { return notify_internal_listener(std::move(m)); });
        // The core answers interrupt_request and tells nobody. Shutdown does not wait for the cell either.
        inner->register_control_listener([this](xeus::xmessage m) {
            std::string type = m.header().value("msg_type", "");
            if (type == "interrupt_request" || type == "shutdown_request") stop_cell();
            notify_control_listener(std::move(m));
        });
    }

    // From any thread, while the core's own publish is tied to the main one. The parent is the last cell, also after its
    // end and after a completion: a front end drops output with any other.
    void send(const std::string &type, json content)
    {
        std::lock_guard<std::mutex> hold(mutex);
        slow_down();
        publish_locked(type, parent, std::move(content));
    }

    int count = 1; // what the next cell is numbered; xeus' own counter also counts cells that store no history
    bool leaving = false;

  private:
    void shell_message(xeus::xmessage message)
    {
        notify_shell_listener(std::move(message));
        while (!postponed.empty()) {
            xeus::xmessage next = std::move(postponed.front());
            postponed.erase(postponed.begin());
            notify_shell_listener(std::move(next));
        }
        if (leaving) { // exit() in a cell: the reply is on its way, let it get there
            std::this_thread::sleep_for(milliseconds(100));
            std::exit(0);
        }
    }

    void publish_impl(xeus::xpub_message m, xeus::channel c) override
    {
        std::string type = m.header().value("msg_type", "");
        if (type == "interrupt" || type == "shutdown") return; // not in the protocol
        std::lock_guard<std::mutex> hold(mutex);
        if (c == xeus::channel::SHELL && type == "status" &&
            m.parent_header().value("msg_type", "") == "execute_request")
            parent = m.parent_header();
        if (type == "execute_input") {
            json content = m.content();
            content["execution_count"] = count;
            publish_locked(type, m.parent_header(), std::move(content));
            return;
        }
        inner->publish(std::move(m), c);
    }

    // Sockets drop what exceeds 1,000 messages under way, and a lost "idle" leaves a front end waiting for ever.
    // 1,000 at once, then 4,000 a second, is more than front ends take and less than sockets lose.
    void slow_down()
    {
        auto now = Clock::now();
        credit = std::min(1000.0, credit + 4000 * std::chrono::duration<double>(now - last).count());
        last = now;
        if (credit < 1) std::this_thread::sleep_for(milliseconds(5));
        credit -= 1;
    }

    void publish_locked(const std::string &type, json header, json content)
    {
        inner->publish(xeus::xpub_message("qlora." + type, xeus::make_header(type, user, session), std::move(header),
                                          json::object(), std::move(content), {}),
                       xeus::channel::SHELL);
    }

    static xeus::xmessage with_content(const xeus::xmessage &m, json content)
    {
        return xeus::xmessage(m.identities(), m.header(), m.parent_header(), m.metadata(), std::move(content), {});
    }

    // After an error the cells that wait are answered "aborted". xeus says "error" and sends no busy and idle, so
    // front ends would show them as waiting. Other requests are answered after this one is finished: its "idle" takes
    // its parent from the last message dispatched.
    void abort_queue_impl(const listener &, long) override
    {
        std::this_thread::sleep_for(milliseconds(20)); // cells that were sent together may still arrive
        inner->abort_queue(
            [this](xeus::xmessage m) {
                if (m.header().value("msg_type", "") != "execute_request") {
                    postponed.push_back(std::move(m));
                    return;
                }
                status("busy", m.header());
                inner->send_shell(xeus::xmessage(m.identities(), xeus::make_header("execute_reply", user, session),
                                                 m.header(), json::object(), {{"status", "aborted"}}, {}));
                status("idle", m.header());
            },
            0);
    }

    void status(const char *state, const json &header)
    {
        std::lock_guard<std::mutex> hold(mutex);
        publish_locked("status", header, {{"execution_state", state}});
    }

    void start_impl(xeus::xpub_message m) override
    {
        session = m.header().value("session", "");
        user = m.header().value("username", "");
        inner->start(std::move(m));
    }

    void send_shell_impl(xeus::xmessage m) override
    {
        json content = m.content();
        if (m.header().value("msg_type", "") != "execute_reply") return inner->send_shell(std::move(m));
        content["execution_count"] = content.value("qlora_count", count);
        content.erase("qlora_count");
        inner->send_shell(with_content(m, std::move(content)));
    }

    void send_control_impl(xeus::xmessage m) override
    {
        json content = m.content();
        if (!content.contains("status")) content["status"] = "ok"; // xeus leaves it out of interrupt's and shutdown's
        inner->send_control(with_content(m, std::move(content)));
    }

    void send_stdin_impl(xeus::xmessage m) override
    {
        json content = m.content();
        if (content.contains("pwd")) { // the protocol's name; a front end would show the password
            content["password"] = content["pwd"];
            content.erase("pwd");
        }
        inner->send_stdin(with_content(m, std::move(content)));
    }

    xeus::xcontrol_messenger &get_control_messenger_impl() override { return inner->get_control_messenger(); }
    void stop_impl() override { inner->stop(); }
    void update_config_impl(xeus::xconfiguration &config) const override { inner->update_config(config); }

    std::unique_ptr<xeus::xserver> inner;
    std::vector<xeus::xmessage> postponed;
    std::mutex mutex;
    json parent = json::object();
    std::string session, user;
    double credit = 1000;
    Clock::time_point last = Clock::now();
};

Server *Server::instance = nullptr;

std::unique_ptr<xeus::xserver> build_server(xeus::xcontext &context, const xeus::xconfiguration &config,
                                            json::error_handler_t on_error)
{
    return std::make_unique<Server>(xeus::make_xserver_shell_main(context, config, on_error));
}

Outbox &outbox() // never destroyed: its thread runs until the process ends
{
    static Outbox *box = new Outbox([](const char *stream, std::string text) {
        Server::instance->send("stream", {{"name", stream}, {"text", std::move(text)}});
    });
    return *box;
}

// ---- Python -------------------------------------------------------------------------------------

class Gil
{
  public:
    Gil() : state(PyGILState_Ensure()) {}
    ~Gil() { PyGILState_Release(state); }

  private:
    PyGILState_STATE state;
};

class NoGil
{
  public:
    NoGil() : state(PyEval_SaveThread()) {}
    ~NoGil() { PyEval_RestoreThread(state); }

  private:
    PyThreadState *state;
};

PyObject *qhost_publish(PyObject *, PyObject *args)
{
    const char *type, *text;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "sy#", &type, &text, &size)) return nullptr;
    bool good = true;
    if (!outbox().forked) {
        NoGil released;
        json content = json::parse(text, text + size, nullptr, false);
        good = !content.is_discarded();
        outbox().flush();
        if (good) Server::instance->send(type, std::move(content));
    }
    if (!good) return PyErr_Format(PyExc_ValueError, "%s: the content is not JSON", type);
    Py_RETURN_NONE;
}

PyObject *qhost_write(PyObject *, PyObject *args)
{
    const char *stream, *text;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "sy#", &stream, &text, &size)) return nullptr;
    {
        NoGil released;
        outbox().write(stream[3] == 'e' ? 1 : 0, text, static_cast<size_t>(size));
    }
    Py_RETURN_NONE;
}

PyObject *qhost_flush(PyObject *, PyObject *)
{
    {
        NoGil released;
        outbox().flush();
    }
    Py_RETURN_NONE;
}

xeus::xinterpreter *interpreter = nullptr;

// A signal ends the wait with zmq::error_t; the handler that xeus registered would then point to a dead frame.
PyObject *qhost_input(PyObject *, PyObject *args)
{
    const char *prompt;
    int password;
    if (!PyArg_ParseTuple(args, "sp", &prompt, &password)) return nullptr;
    for (;;) {
        std::string line;
        enum { ANSWERED, SIGNAL, FAILED } end = FAILED;
        {
            NoGil released;
            outbox().flush();
            try {
                line = xeus::blocking_input_request(prompt, password != 0);
                end = ANSWERED;
            } catch (const zmq::error_t &e) {
                end = e.num() == EINTR ? SIGNAL : FAILED;
            } catch (const std::exception &) {
            }
            interpreter->register_input_handler(nullptr);
        }
        if (end == ANSWERED) return PyUnicode_DecodeUTF8(line.data(), static_cast<Py_ssize_t>(line.size()), "replace");
        if (PyErr_CheckSignals() != 0) return nullptr; // KeyboardInterrupt
        if (end == FAILED) {
            PyErr_SetString(PyExc_EOFError, "the front end did not answer");
            return nullptr;
        }
    }
}

PyMethodDef qhost_functions[] = {
    {"publish", qhost_publish, METH_VARARGS, "publish(type, json): sends an iopub message as part of the running cell."},
    {"write", qhost_write, METH_VARARGS, "write(stream, bytes): collects output."},
    {"flush", qhost_flush, METH_NOARGS, "flush(): sends what was collected."},
    {"input", qhost_input, METH_VARARGS, "input(prompt, password): a line from the front end."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef qhost_module = {PyModuleDef_HEAD_INIT, "_qhost", nullptr, -1, qhost_functions,
                            nullptr,               nullptr,  nullptr, nullptr};

PyObject *qhost_init() { return PyModule_Create(&qhost_module); }

const char host_source[] =
#include "host.inc"
    ;

PyObject *host = nullptr; // the module of host.py

// What is raised as [type, text], and forgotten.
json fetch_error()
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    json error = {"KeyboardInterrupt", ""};
    if (type) error[0] = PyExceptionClass_Check(type) ? PyExceptionClass_Name(type) : "Exception";
    PyObject *text = value ? PyObject_Str(value) : nullptr;
    const char *utf8 = text ? PyUnicode_AsUTF8(text) : nullptr;
    if (utf8) error[1] = utf8;
    PyErr_Clear();
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return error;
}

// A signal that a thread of the user's took while no cell ran, or that came too late for its cell, ends nothing else.
void forget_signals()
{
    if (PyErr_CheckSignals() != 0) PyErr_Clear();
}

// host.py's function with JSON arguments. Throws what Python raises.
json call(const char *function, const json &arguments)
{
    Gil gil;
    forget_signals();
    std::string text = arguments.dump(-1, ' ', false, json::error_handler_t::replace);
    PyObject *bytes = PyObject_CallMethod(host, "call", "ss#", function, text.data(), static_cast<Py_ssize_t>(text.size()));
    if (!bytes) {
        json error = fetch_error();
        throw std::runtime_error(error[0].get<std::string>() + ": " + error[1].get<std::string>());
    }
    json reply = json::parse(PyBytes_AS_STRING(bytes), PyBytes_AS_STRING(bytes) + PyBytes_GET_SIZE(bytes), nullptr, false);
    Py_DECREF(bytes);
    return reply;
}

// ---- interpreter --------------------------------------------------------------------------------

json error_reply(const std::string &ename, const std::string &evalue)
{   // xeus::create_error_reply exchanges the two
    return {{"status", "error"}, {"ename", ename}, {"evalue", evalue}, {"traceback", json::array()}};
}

class Interpreter : public xeus::xinterpreter
{
  public:
    explicit Interpreter(json paths) : extra_path(std::move(paths))
    {
        xeus::register_interpreter(this);
        interpreter = this;
    }

  private:
    void configure_impl() override {}

    // A C++ exception that left here would mean no reply at all, and a front end that waits for ever.
    json execute_request_impl(int, const std::string &code, bool silent, bool store_history, json expressions,
                              bool allow_stdin) override
    {
        json reply;
        try {
            call("before", {code, silent, store_history, std::move(expressions), allow_stdin});
            json raised = run();
            json result = call("after", json::array({raised}));
            reply = std::move(result["reply"]);
            reply["qlora_count"] = Server::instance->count;
            Server::instance->count = result.value("execution_count", 1);
            Server::instance->leaving = result.value("leaving", false);
        } catch (const std::exception &e) {
            reply = error_reply("KernelError", e.what());
        } catch (...) {
            reply = error_reply("KernelError", "unknown");
        }
        outbox().flush();
        return reply;
    }

    // Between two Python calls, so that a Stop meets only the user's code and IPython's, never the reply's.
    static json run()
    {
        Gil gil;
        PyObject *done;
        {
            Interruptible now;
            done = PyObject_CallMethod(host, "run", nullptr);
        }
        json raised;
        if (!done) raised = fetch_error();
        Py_XDECREF(done);
        forget_signals();
        return raised;
    }

    template <class... Args> static json answer(const char *function, Args &&...args)
    {
        try {
            return call(function, json::array({std::forward<Args>(args)...}));
        } catch (const std::exception &e) {
            return error_reply("KernelError", e.what());
        }
    }

    json complete_request_impl(const std::string &code, int cursor) override { return answer("complete", code, cursor); }
    json inspect_request_impl(const std::string &code, int cursor, int detail) override
    {
        return answer("inspect", code, cursor, detail);
    }
    json is_complete_request_impl(const std::string &code) override { return answer("is_complete", code); }
    json kernel_info_request_impl() override
    {
        json info = answer("info");
        info["implementation_version"] = QLORA_VERSION;
        return info;
    }
    void shutdown_request_impl() override {}

    json extra_path;
};

// IPython keeps the history, so that it outlives the kernel; xeus' own sends rows of another shape.
class History : public xeus::xhistory_manager
{
    void configure_impl() override {}
    void store_inputs_impl(int, int, const std::string &, const std::string &) override {}

    static json rows(const char *kind, bool raw, bool output, int n, const std::string &pattern, bool unique,
                     int session, int start, int stop)
    {
        json found = json::array();
        try {
            found = call("history", {kind, raw, output, n, pattern, unique, session, start, stop});
        } catch (const std::exception &) {
        }
        return {{"status", "ok"}, {"history", std::move(found)}};
    }

    json get_tail_impl(int n, bool raw, bool output) const override
    {
        return rows("tail", raw, output, n, "", false, 0, 0, 0);
    }
    json get_range_impl(int session, int start, int stop, bool raw, bool output) const override
    {
        return rows("range", raw, output, 0, "", false, session, start, stop);
    }
    json search_impl(const std::string &pattern, bool raw, bool output, int n, bool unique) const override
    {
        return rows("search", raw, output, n, pattern, unique, 0, 0, 0);
    }
};

// ---- main ---------------------------------------------------------------------------------------

bool check(const PyStatus &status)
{
    if (PyStatus_Exception(status)) std::cerr << "qlora-kernel: Python: " << status.err_msg << "\n";
    return !PyStatus_Exception(status);
}

// Python as `python` would start, so with that environment's packages. host.py in, ready for cells.
bool start_python(const std::string &python, const json &paths)
{
    PyImport_AppendInittab("_qhost", qhost_init);
    PyConfig config;
    PyConfig_InitPythonConfig(&config);
    config.install_signal_handlers = 1;
    bool ok = check(PyConfig_SetBytesString(&config, &config.program_name, python.c_str())) &&
              check(Py_InitializeFromConfig(&config));
    PyConfig_Clear(&config);
    if (!ok) return false;
    PyObject *code = Py_CompileString(host_source, "<qlora kernel host>", Py_file_input);
    host = code ? PyImport_ExecCodeModule("_qlora_host", code) : nullptr;
    Py_XDECREF(code);
    if (!host) {
        bool missing = PyErr_ExceptionMatches(PyExc_ImportError);
        PyErr_Print();
        if (missing)
            std::cerr << "qlora-kernel: " << python << " lacks IPython, or is not Python " << PY_MAJOR_VERSION << "."
                      << PY_MINOR_VERSION << ", for which this kernel was built. Try:\n  " << python
                      << " -m pip install ipython matplotlib-inline\n";
        return false;
    }
    try {
        Server::instance->count = call("start", json::array({paths})).value("execution_count", 1);
    } catch (const std::exception &e) {
        std::cerr << "qlora-kernel: " << e.what() << "\n";
        return false;
    }
    PyEval_SaveThread();
    return true;
}

// xeus ends with exit() on whatever thread; static objects must not be torn down under the others.
void leave()
{
    try {
        call("leave", json::array());
    } catch (const std::exception &) {
    }
    outbox().flush();
    std::this_thread::sleep_for(milliseconds(20));
    _exit(0);
}

// xeus' own messages keep the descriptor that this process was started with.
void keep_log()
{
    static __gnu_cxx::stdio_filebuf<char> log(fcntl(2, F_DUPFD_CLOEXEC, 3), std::ios::out, 1);
    for (std::ostream *stream : {&std::cerr, &std::clog, &std::cout}) stream->rdbuf(&log);
}
} // namespace

int main(int argc, char **argv)
{
    std::string python = QLORA_PYTHON, file;
    json paths = json::array();
    const char *venv = std::getenv("VIRTUAL_ENV");
    if (venv && *venv) python = std::string(venv) + "/bin/python";
    for (int i = 1; i + 1 < argc; i += 2) {
        std::string option = argv[i];
        if (option == "--python") python = argv[i + 1];
        else if (option == "--path") paths.push_back(argv[i + 1]);
        else if (option == "-f") file = argv[i + 1];
    }
    if (file.empty()) {
        std::cerr << "usage: qlora-kernel [--python PYTHON] [--path FOLDER]… -f CONNECTION_FILE\n"
                     "Jupyter starts it; `make install` tells Jupyter about it.\n";
        return 2;
    }
    std::signal(SIGINT, SIG_DFL); // a Jupyter that a script started with & ignores it; Python would take that over, and Stop do nothing
    sigset_t blocked = handled_signals();
    pthread_sigmask(SIG_BLOCK, &blocked, nullptr); // before any thread exists: all inherit it
    main_thread = pthread_self();
    pthread_atfork(nullptr, nullptr, [] { outbox().forked = true; });
    try {
        xeus::xkernel kernel(xeus::load_configuration(file), xeus::get_user_name(), xeus::make_context<zmq::context_t>(),
                             std::make_unique<Interpreter>(paths), build_server, std::make_unique<History>(), nullptr,
                             xeus::make_null_debugger, json::object(), json::error_handler_t::replace);
        if (!start_python(python, paths)) return 1;
        keep_log();
        outbox().open();
        std::atexit(leave);
        kernel.start(); // ends in exit()
    } catch (const std::exception &e) {
        std::cerr << "qlora-kernel: " << e.what() << "\n";
    }
    return 1;
}
