# magics: the `%qlora` library, the shell host, the Python extension.
MAGICS_SRC := $(filter-out %_main.c magics/extension.c,$(wildcard magics/*.c))
MAGICS_LIB := $(BUILD)/libmagics.a
PY_CFLAGS  := $(shell $(PYTHON) -c 'import sysconfig; print("-isystem " + sysconfig.get_paths()["include"])' 2>/dev/null)
PY_PACKAGE := $(BUILD)/python/qlora

$(MAGICS_LIB): $(MAGICS_SRC:%.c=$(BUILD)/%.o)
	@rm -f $@
	ar rcs $@ $^

# Only what the front end uses is taken out of the core, and only libraries that it uses are named.
FRONT_END := -Wl,--as-needed -Wl,--gc-sections

$(BUILD)/qlora: $(BUILD)/magics/shell_main.o $(MAGICS_LIB) $(LIB)
	$(CC) $(LDFLAGS) $(FRONT_END) $^ -o $@ $(LDLIBS)

# The extension keeps to the stable ABI: one file for every CPython from 3.10.
$(BUILD)/magics/extension.o: CPPFLAGS += -DPy_LIMITED_API=0x030a0000 $(PY_CFLAGS)
$(BUILD)/magics/extension.o: WARN += -Wno-pedantic
$(PY_PACKAGE)/_core.abi3.so: $(BUILD)/magics/extension.o $(MAGICS_LIB) $(LIB)
	@mkdir -p $(@D)
	$(CC) -shared $(LDFLAGS) $(FRONT_END) -Wl,-Bsymbolic -Wl,--exclude-libs,ALL $^ -o $@ $(LDLIBS)

$(PY_PACKAGE)/%.py: magics/python/qlora/%.py
	@mkdir -p $(@D)
	cp $< $@

python-package: $(PY_PACKAGE)/_core.abi3.so $(patsubst magics/python/qlora/%,$(PY_PACKAGE)/%,$(wildcard magics/python/qlora/*.py))

PROGRAMS += $(BUILD)/qlora python-package

# The oldest IPython that is meant, Kaggle's: an environment of its own for tests/py/test_ipython7.py.
$(BUILD)/venv-ipython7/.done: tests/requirements-ipython7.txt
	@PYTHON='$(PYTHON)' .ci/setup python $(BUILD)/venv-ipython7 $<
test: $(BUILD)/venv-ipython7/.done

.PHONY: python-package
