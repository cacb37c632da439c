# magics: the `%qlora` library, the shell host, the Python extension.
MAGICS_SRC := $(filter-out %_main.c magics/extension.c,$(wildcard magics/*.c))
MAGICS_LIB := $(BUILD)/libmagics.a
PY_CFLAGS  := $(shell '$(PYTHON)' -c 'import sysconfig; print("-isystem " + sysconfig.get_paths()["include"])' 2>/dev/null)
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

# Kaggle's front end with papermill, for the wheel and the notebook in kaggle/.
$(BUILD)/venv-kaggle/.done: tests/requirements-kaggle.txt
	@PYTHON='$(PYTHON)' .ci/setup python $(BUILD)/venv-kaggle $<
test: $(BUILD)/venv-kaggle/.done wheel

.PHONY: python-package

# ---- the wheel ---------------------------------------------------------------------------------------
# $(BUILD)/dist/qlora-….whl, for any x86-64 Linux with CPython 3.10 or newer: libraries that a bare system lacks are linked in. Where
# one of the archives is missing, all stay shared and the wheel is for this machine alone (its name says so).
WHEEL         := $(BUILD)/wheel
WHEEL_TREE    := $(WHEEL)/tree/qlora
WHEEL_ARCHIVE := $(wildcard $(foreach l,jansson pcre2-8 openblas,$(shell $(CC) -print-file-name=lib$l.a 2>/dev/null)))
WHEEL_SHARED  := $(if $(filter 3,$(words $(WHEEL_ARCHIVE))),,1)
WHEEL_LIBS    := $(if $(WHEEL_SHARED),$(LDLIBS),$(WHEEL)/libjansson.a -Wl,--defsym=ql_no_stdin=0 \
                 $(filter-out %/libjansson.a,$(WHEEL_ARCHIVE)) -lpthread -ldl -lm)
WHEEL_LINK    := $(FRONT_END) -s -Wl,--exclude-libs,libjansson.a:libpcre2-8.a:libopenblas.a

# Distributions build libjansson.a for programs, not for shared objects; the one thing in the way is `stdin`, which only json_loadf's
# error text asks about.
$(WHEEL)/libjansson.a: $(filter %/libjansson.a,$(WHEEL_ARCHIVE))
	@mkdir -p $(@D)
	objcopy --redefine-sym stdin=ql_no_stdin $< $@
WHEEL_JANSSON := $(if $(WHEEL_SHARED),,$(WHEEL)/libjansson.a)

$(WHEEL_TREE)/bin/qlora-engine: $(BUILD)/core/engine_main.o $(LIB) | $(WHEEL_JANSSON)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) $(WHEEL_LINK) $^ -o $@ $(WHEEL_LIBS)
$(WHEEL_TREE)/_core.abi3.so: $(BUILD)/magics/extension.o $(MAGICS_LIB) $(LIB) | $(WHEEL_JANSSON)
	@mkdir -p $(@D)
	$(CC) -shared $(LDFLAGS) $(WHEEL_LINK) -Wl,-Bsymbolic -Wl,--exclude-libs,ALL $^ -o $@ $(WHEEL_LIBS)
$(WHEEL_TREE)/bin/libqlora-cuda.so: $(BUILD)/libqlora-cuda.so
	@mkdir -p $(@D)
	strip --strip-unneeded -o $@ $<
WHEEL_PY   := $(patsubst magics/python/qlora/%,$(WHEEL_TREE)/%,$(wildcard magics/python/qlora/*.py))
WHEEL_TINY := $(patsubst notebooks/tiny/%,$(WHEEL_TREE)/bundled/tiny/%,$(filter-out %.py %/__pycache__,$(wildcard notebooks/tiny/*)))
$(WHEEL_PY): $(WHEEL_TREE)/%: magics/python/qlora/%
$(WHEEL_TINY): $(WHEEL_TREE)/bundled/tiny/%: notebooks/tiny/%
$(WHEEL_TREE)/reference.py: kaggle/reference.py
$(WHEEL_PY) $(WHEEL_TINY) $(WHEEL_TREE)/reference.py:
	@mkdir -p $(@D)
	cp $< $@

# CUDA_LIB is set by kernels/cuda/build.mk, read before this file, where nvcc is found.
wheel-tree: $(WHEEL_TREE)/_core.abi3.so $(WHEEL_TREE)/bin/qlora-engine $(WHEEL_TREE)/reference.py \
            $(if $(CUDA_LIB),$(WHEEL_TREE)/bin/libqlora-cuda.so) \
            $(WHEEL_PY) $(WHEEL_TINY)
	$(if $(CUDA_LIB),,@rm -f $(WHEEL_TREE)/bin/libqlora-cuda.so)

wheel: setup-python wheel-tree
	@w=$$($(BUILD)/venv/bin/python magics/wheel.py pack $(WHEEL)/tree $(BUILD)/dist) && \
	    $(BUILD)/venv/bin/python magics/wheel.py try "$$w"

.PHONY: wheel wheel-tree
