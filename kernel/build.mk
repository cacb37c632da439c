# kernel: the Jupyter kernel, for the Python that $(PYTHON) is. Needs xeus 2.4 (Debian 12); elsewhere it is left out
# and the same notebooks run on the stock kernel with %load_ext qlora.
#   make install [PYTHON=…] [JUPYTER_DATA_DIR=…]   make uninstall [PYTHON=…]
# Both take an active virtual environment where PYTHON is not given.
ifneq ($(filter install uninstall,$(MAKECMDGOALS)),)
ifeq ($(origin PYTHON)$(if $(VIRTUAL_ENV),.),file.)
PYTHON := $(VIRTUAL_ENV)/bin/python
endif
endif

KERNEL_WHY := $(PYTHON) does not run
$(shell mkdir -p $(BUILD)/kernel; '$(PYTHON)' kernel/spec.py make > $(BUILD)/kernel/python.mk 2>/dev/null)
include $(BUILD)/kernel/python.mk

ifeq ($(KERNEL_WHY),)
KERNEL_DIR := $(BUILD)/kernel/$(KERNEL_TAG)
KERNEL     := $(KERNEL_DIR)/qlora-kernel
PROGRAMS   += $(KERNEL) $(if $(filter install,$(MAKECMDGOALS)),,kernelspec)

KERNEL_DEFS := -DGUID_LIBUUID -DQLORA_PYTHON='"$(PYTHON)"' \
               -DQLORA_VERSION='$(shell sed -n 's/^.define QL_VERSION  *//p' core/qlora.h)'

$(KERNEL_DIR)/host.inc: kernel/host.py
	@mkdir -p $(@D)
	{ printf 'R"~~~('; cat $<; printf ')~~~"\n'; } > $@

$(KERNEL_DIR)/xkernel.o: kernel/xkernel.cpp $(KERNEL_DIR)/host.inc
	$(CXX) $(CPPFLAGS) -I$(KERNEL_DIR) $(KERNEL_CFLAGS) $(KERNEL_DEFS) $(CXXFLAGS) -O1 -c $< -o $@

$(KERNEL): $(KERNEL_DIR)/xkernel.o
	$(CXX) $(LDFLAGS) $< -o $@ -lxeus -lzmq $(KERNEL_LIBS) -lpthread

# For the tests, the demo and `JUPYTER_PATH=build/jupyter jupyter lab`: a spec that points into the build folder.
kernelspec: $(KERNEL)
	@'$(PYTHON)' kernel/spec.py write $(BUILD)/jupyter/kernels/qlora $(KERNEL) $(BUILD)

install: all
	@'$(PYTHON)' kernel/spec.py install $(KERNEL) $(BUILD)
else
install: all
	@echo "qlora: the kernel is not installed: $(KERNEL_WHY)"; exit 1
endif

uninstall:
	@'$(PYTHON)' kernel/spec.py uninstall

# The main job: the first notebook, executed. Leaves $(BUILD)/demo.ipynb and demo.html.
JUPYTER_ENV := JUPYTER_PATH=$(abspath $(BUILD))/jupyter PYTHONPATH=$(abspath $(BUILD))/python

demo: setup-python all
	@$(JUPYTER_ENV) $(BUILD)/venv/bin/python notebooks/execute.py notebooks/01-first-run.ipynb $(BUILD) \
	    --kernel $(if $(KERNEL_WHY),python3,qlora)

# 1,000 interrupts and 200 kills of the engine: nothing may be lost or left behind. A short run is in `make test`.
soak: setup-python all
	@$(JUPYTER_ENV) BUILD=$(BUILD) $(BUILD)/venv/bin/python tests/soak.py

# Notebook 01 by clicks in JupyterLab and a headless Chromium; screenshots in $(BUILD)/screens.
test-lab: setup-python all
ifeq ($(KERNEL_WHY),)
	@.ci/setup packages chromium
	@PYTHON='$(PYTHON)' .ci/setup python $(BUILD)/venv-lab tests/requirements-lab.txt
	@BUILD=$(BUILD) $(BUILD)/venv-lab/bin/python tests/lab.py
else
	@echo "test-lab: left out: $(KERNEL_WHY)"
endif

.PHONY: kernelspec install uninstall demo soak test-lab
