/* _core: `%qlora` for Python, in the stable ABI of 3.10. The host is a Python object with the
 * methods show, print, chart, variable, libraries and hub; bundles and reports cross as JSON text. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "magics/magics.h"
#include "magics/view.h"

#include <string.h>

typedef struct {
    ql_magics *magics;
    PyObject *host;
    PyObject *error,
        *stopped; /* qlora.Error; qlora.KeyboardInterrupt, which IPython knows by its base */
    PyObject *type, *value,
        *traceback; /* raised in a callback; re-raised when the verb has ended */
    PyObject *listener;                    /* what listen() was given: called with every event's text, or NULL */
    int presses;    /* stops that arrived inside a callback */
    int running;
} state;

/* One session per process: the engine, the notebook's settings and the signals are the process's,
 * too. */
static state the;

/* An exception out of a callback: a stop is counted, anything else waits for the verb's end. */
static ql_status keep_exception(const char *what)
{
    if (PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
        PyErr_Clear();
        the.presses++;
        return QL_OK;
    }
    if (the.type)
        PyErr_Clear();
    else
        PyErr_Fetch(&the.type, &the.value, &the.traceback);
    QL_FAIL(QL_EIO, "%s failed in Python", what);
}

static PyObject *json_to_python(const json_t *v)
{
    char *text = v ? json_dumps(v, JSON_COMPACT | JSON_ENCODE_ANY) : NULL;
    if (!text) Py_RETURN_NONE;
    PyObject *s = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
    free(text);
    return s;
}

static json_t *json_from_python(PyObject *s)
{
    Py_ssize_t n;
    const char *text = s && s != Py_None ? PyUnicode_AsUTF8AndSize(s, &n) : NULL;
    return text ? json_loadb(text, (size_t)n, JSON_DECODE_ANY, NULL) : NULL;
}

/* ---- the host's callbacks
 * -------------------------------------------------------------------------- */

/* The host's method with a value's JSON text; NULL where Python raised. */
static PyObject *host_call(const char *method, const json_t *value)
{
    PyObject *text = json_to_python(value), *r = text ? PyObject_CallMethod(the.host, method, "O", text) : NULL;
    Py_XDECREF(text);
    return r;
}

/* Its answer's JSON, NULL where there is none; takes the answer. */
static json_t *host_answer(PyObject *answer)
{
    json_t *v = json_from_python(answer);
    Py_XDECREF(answer);
    PyErr_Clear();
    return v;
}

static ql_status host_show(void *self, const json_t *bundle, const char *id, ql_show_how how)
{
    (void)self;
    PyObject *text = json_to_python(bundle);
    PyObject *r =
        text ? PyObject_CallMethod(the.host, "show", "Ozi", text, id, how == QL_SHOW_UPDATE) : NULL;
    Py_XDECREF(text);
    Py_XDECREF(r);
    return r ? QL_OK : keep_exception("showing an output");
}

static void host_print(void *self, const char *text)
{
    (void)self;
    PyObject *s = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
    PyObject *r = s ? PyObject_CallMethod(the.host, "print", "O", s) : NULL;
    Py_XDECREF(s);
    Py_XDECREF(r);
    if (!r && keep_exception("printing") != QL_OK)
        the.presses++; /* stdout is gone: stop the work */
}

static int host_interrupts(void *self)
{
    (void)self;
    /* KeyboardInterrupt is a stop; what another signal's handler raised stops the work, too. */
    if (PyErr_CheckSignals() != 0 && keep_exception("a signal handler") != QL_OK) the.presses++;
    int n = the.presses;
    the.presses = 0;
    return n;
}

static int host_wait(void *self, struct pollfd *fds, nfds_t n, int timeout_ms)
{
    int r;
    (void)self;
    Py_BEGIN_ALLOW_THREADS r = poll(fds, n, timeout_ms);
    Py_END_ALLOW_THREADS return r;
}

static ql_status host_chart(void *self, const json_t *chart, ql_buf *png)
{
    (void)self;
    PyObject *r = host_call("chart", chart);
    char *data;
    Py_ssize_t n;
    if (!r) return keep_exception("drawing a chart");
    if (r != Py_None && PyBytes_AsStringAndSize(r, &data, &n) == 0)
        ql_buf_add(png, data, (size_t)n);
    Py_DECREF(r);
    PyErr_Clear();
    return QL_OK;
}

static ql_status host_variable(void *self, const char *name, const char *folder, json_t **out)
{
    (void)self;
    PyObject *r = PyObject_CallMethod(the.host, "variable", "ss", name, folder);
    if (!r) {
        QL_TRY(keep_exception("writing a variable as JSON lines"));
        QL_FAIL(QL_ESTOP, "stopped while writing %s", name);
    }
    json_t *v = host_answer(r);
    *out = v ? v : json_null();
    return QL_OK;
}

static ql_status host_push(void *self, const json_t *what, json_t **out)
{
    (void)self;
    PyObject *r = host_call("push", what);
    if (!r) {
        QL_TRY(keep_exception("the upload"));
        QL_FAIL(QL_ESTOP, "stopped while uploading to %s; what is saved in %s stays", ql_jstr(what, "repo", ""), ql_jstr(what, "folder", ""));
    }
    *out = host_answer(r);
    return QL_OK;
}

static json_t *host_libraries(void *self)
{
    (void)self;
    return host_answer(PyObject_CallMethod(the.host, "libraries", NULL));
}

static json_t *host_bitsandbytes(void *self, const json_t *weight)
{
    (void)self;
    return host_answer(host_call("bitsandbytes", weight));
}

static json_t *host_hub(void *self)
{
    (void)self;
    return host_answer(PyObject_CallMethod(the.host, "hub", NULL));
}

/* What a listener answers as true is a press of stop. */
static ql_status host_event(void *self, const json_t *event)
{
    (void)self;
    if (!the.listener) return QL_OK;
    PyObject *listener = Py_NewRef(the.listener), *text = json_to_python(event); /* it may call listen() */
    PyObject *r = text ? PyObject_CallFunctionObjArgs(listener, text, NULL) : NULL;
    Py_XDECREF(text);
    Py_DECREF(listener);
    if (!r) return keep_exception("a callback");
    the.presses += PyObject_IsTrue(r) == 1;
    Py_DECREF(r);
    return QL_OK;
}

/* ---- module functions
 * -------------------------------------------------------------------------------- */

static PyObject *raise(ql_status st)
{
    if (the.type) {
        PyErr_Restore(the.type, the.value, the.traceback);
        the.type = the.value = the.traceback = NULL;
        return NULL;
    }
    const char *text = ql_error();
    PyObject *s = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
    if (s)
        PyErr_SetObject(st == QL_ESTOP    ? the.stopped
                        : st == QL_ENOMEM ? PyExc_MemoryError
                                          : the.error,
                        s);
    Py_XDECREF(s);
    return NULL;
}

/* The engine's out of memory is qlora.Error as well: MemoryError would say that the notebook's own
 * is short. */
static PyObject *raise_verb(ql_status st)
{
    return raise(st == QL_ENOMEM ? QL_EDEVICE : st);
}

/* A path in the system's own bytes, which need not be UTF-8; None is NULL. */
static int path_or_none(PyObject *o, void *out)
{
    if (o && o != Py_None) return PyUnicode_FSConverter(o, out);
    Py_XDECREF(*(PyObject **)out); /* without o: what was converted is not needed */
    *(PyObject **)out = NULL;
    return Py_CLEANUP_SUPPORTED;
}

static const char *path_text(PyObject *path)
{
    return path ? PyBytes_AsString(path) : NULL;
}

static PyObject *open_session(PyObject *host, const ql_magics_options *o)
{
    if (the.running) return PyErr_Format(the.error, "%%qlora is running");
    ql_host h = {.show = host_show,
                 .print = host_print,
                 .interrupts = host_interrupts,
                 .wait = host_wait,
                 .chart = host_chart,
                 .variable = host_variable,
                 .libraries = host_libraries,
                 .bitsandbytes = host_bitsandbytes,
                 .hub = host_hub,
                 .push = host_push,
                 .event = host_event};
    ql_magics *m;
    PyObject *before = the.host;
    ql_error_clear();
    ql_status st = ql_magics_open(o, &h, &m);
    if (st != QL_OK) return raise(st);
    ql_magics_close(the.magics);
    the.magics = m;
    the.host = Py_NewRef(host);
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

static PyObject *core_open(PyObject *module, PyObject *args)
{
    PyObject *host, *engine = NULL, *runs = NULL, *bundled = NULL, *hub = NULL, *r;
    int follow, ready_ms = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO&O&O&O&i|i", &host, path_or_none, &engine, path_or_none, &runs, path_or_none, &bundled,
                          path_or_none, &hub, &follow, &ready_ms))
        return NULL;
    r = open_session(host, &(ql_magics_options){.engine = path_text(engine),
                                                .runs = path_text(runs),
                                                .bundled = path_text(bundled),
                                                .hub = path_text(hub),
                                                .follow = (ql_follow)follow,
                                                .ready_ms = ready_ms});
    Py_XDECREF(engine);
    Py_XDECREF(runs);
    Py_XDECREF(bundled);
    Py_XDECREF(hub);
    return r;
}

static PyObject *core_close(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    if (!the.running) {
        ql_magics_close(the.magics);
        the.magics = NULL;
    }
    Py_RETURN_NONE;
}

static int ready(void)
{
    if (the.running)
        PyErr_SetString(the.error, "%qlora is running already: one verb at a time");
    else if (!the.magics)
        PyErr_SetString(the.error, "qlora is closed");
    else
        return 1;
    return 0;
}

static PyObject *core_run(PyObject *module, PyObject *args)
{
    const char *line, *body = NULL;
    json_t *result = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "s|z", &line, &body) || !ready()) return NULL;
    the.running = 1;
    ql_status st = ql_magics_run(the.magics, line, body, &result);
    the.running = the.presses = 0;
    if (st != QL_OK || the.type) {
        json_decref(result);
        return raise_verb(st);
    }
    PyObject *r = json_to_python(result);
    json_decref(result);
    return r;
}

static PyObject *core_listen(PyObject *module, PyObject *listener)
{
    PyObject *before = the.listener;
    (void)module;
    the.listener = listener == Py_None ? NULL : Py_NewRef(listener);
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

/* The table of settings, for what has to translate other programs' names. */
static PyObject *core_settings(PyObject *module, PyObject *none)
{
    const ql_setting *s;
    int n = ql_settings(&s);
    json_t *list = json_array();
    (void)module, (void)none;
    for (int i = 0; i < n; i++)
        json_array_append_new(list, json_pack("{s:s, s:s?, s:s?, s:s?, s:s?, s:b}", "name", s[i].name, "alias", s[i].alias,
                                              "note", s[i].note, "refused", s[i].refused, "choices", s[i].choices, "text",
                                              s[i].type == QL_SET_STR || s[i].type == QL_SET_CHOICE));
    PyObject *r = json_to_python(list);
    json_decref(list);
    return r;
}

static PyObject *core_press(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    the.presses++;
    Py_RETURN_NONE;
}

static PyObject *core_unpress(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    the.presses = 0;
    Py_RETURN_NONE;
}

/* In the child of a fork: the engine is the parent's, and so is a verb that was running. */
static PyObject *core_forked(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    the.running = 0;
    if (the.magics) ql_magics_forked(the.magics);
    Py_RETURN_NONE;
}

static PyObject *core_last(PyObject *module, PyObject *none)
{
    (void)module, (void)none;
    if (!the.magics) Py_RETURN_NONE;
    return json_to_python(ql_magics_last(the.magics));
}

static PyObject *core_complete(PyObject *module, PyObject *args)
{
    const char *line;
    (void)module;
    if (!PyArg_ParseTuple(args, "s", &line) || !ready()) return NULL;
    json_t *words = ql_magics_complete(the.magics, line);
    PyObject *r = json_to_python(words);
    json_decref(words);
    return r;
}

static PyObject *core_help(PyObject *module, PyObject *args)
{
    const char *topic = NULL;
    ql_buf b = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "|z", &topic)) return NULL;
    ql_status st = ql_magics_help(topic, &b);
    PyObject *r = st == QL_OK ? PyUnicode_DecodeUTF8(ql_buf_str(&b), (Py_ssize_t)b.len, "replace")
                              : raise(st);
    ql_buf_free(&b);
    return r;
}

static PyObject *core_chart(PyObject *module, PyObject *args)
{
    PyObject *text;
    const char *metric;
    int diff;
    (void)module;
    if (!PyArg_ParseTuple(args, "Usp", &text, &metric, &diff)) return NULL;
    json_t *runs = json_from_python(text);
    if (!json_is_array(runs)) {
        json_decref(runs);
        return PyErr_Format(PyExc_ValueError, "chart() takes the JSON text of a list of runs");
    }
    json_t *chart = strcmp(metric, "memory") == 0 ? ql_chart_memory(json_array_get(runs, 0))
                                                  : ql_chart_runs(runs, metric, diff);
    PyObject *r = json_to_python(chart);
    json_decref(chart);
    json_decref(runs);
    return r;
}

static PyMethodDef functions[] = {
    {"open", core_open, METH_VARARGS, "open(host, engine, runs, bundled, hub, follow, ready_ms=0)"},
    {"close", core_close, METH_NOARGS, "close(): ends the engine"},
    {"run", core_run, METH_VARARGS, "run(line, body=None) -> JSON text of the result, or None"},
    {"listen", core_listen, METH_O, "listen(f): f(text of an event) -> true to stop; None: no longer"},
    {"settings", core_settings, METH_NOARGS, "settings() -> JSON list of what can be set"},
    {"press", core_press, METH_NOARGS, "press(): counts a stop; the verb that runs, or begins, ends at its next look"},
    {"unpress", core_unpress, METH_NOARGS, "unpress(): forgets stops that no verb saw"},
    {"forked", core_forked, METH_NOARGS, "forked(): lets go of the parent's engine, in the child of a fork"},
    {"last", core_last, METH_NOARGS, "last() -> JSON text of the last run, or None"},
    {"complete", core_complete, METH_VARARGS, "complete(line) -> JSON list of words"},
    {"help", core_help, METH_VARARGS, "help(topic=None) -> text"},
    {"chart", core_chart, METH_VARARGS, "chart(runs, metric, diff) -> JSON text of a chart"},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_core", "%qlora for Python", -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__core(void)
{
    PyObject *m = PyModule_Create(&definition);
    if (!m) return NULL;
    the.error = PyErr_NewExceptionWithDoc(
        "qlora.Error", "A verb failed; the text says what, where and what to do.",
        PyExc_RuntimeError, NULL);
    the.stopped = PyErr_NewExceptionWithDoc("qlora.KeyboardInterrupt",
                                            "A verb was stopped; the text says what was kept.",
                                            PyExc_KeyboardInterrupt, NULL);
    if (!the.error || !the.stopped || PyModule_AddObjectRef(m, "Error", the.error) < 0 ||
        PyModule_AddObjectRef(m, "Stopped", the.stopped) < 0 ||
        PyModule_AddStringConstant(m, "version", QL_VERSION) < 0) {
        Py_DECREF(m);
        return NULL;
    }
    return m;
}
