# tests/unit/test_*.c: one program each, linked against everything. tests/run adds up their lines.
UNIT_SRC := $(wildcard tests/unit/test_*.c)
UNIT     := $(UNIT_SRC:tests/unit/%.c=$(BUILD)/tests/%)

$(BUILD)/tests/%: $(BUILD)/tests/unit/%.o $(MAGICS_LIB) $(LIB)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) $^ -o $@ $(LDLIBS)

# The op test: test_ops with the CPU backend, ops_cuda without it and its BLAS.
OPS_OBJ := $(patsubst %.c,$(BUILD)/%.o,$(filter-out %/with_cpu.c %/cuda_only.c,$(wildcard tests/ops/*.c)))

$(BUILD)/tests/test_ops: $(OPS_OBJ) $(BUILD)/tests/ops/with_cpu.o $(LIB)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) $^ -o $@ $(LDLIBS)
$(BUILD)/tests/ops_cuda: $(OPS_OBJ) $(BUILD)/tests/ops/cuda_only.o $(addprefix $(BUILD)/kernels/,err.o ops.o cuda_open.o)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) $^ -o $@ -ldl -lm

UNIT += $(BUILD)/tests/test_ops

unit: setup-system $(UNIT)
	@tests/run $(UNIT)

test: setup-python all $(UNIT)
	@BUILD=$(BUILD) tests/run $(UNIT) $(wildcard tests/py)

# Live transformers, peft and bitsandbytes against the engine. They have their own environment (torch's CPU build
# is enough); HF_VENV=/path takes one that is there, installed from tests/hf/requirements.txt.
HF_VENV ?=
hf-venv: setup-system
	@[ -n "$(HF_VENV)" ] || PYTHON=$(PYTHON) .ci/setup python $(BUILD)/venv-hf tests/hf/requirements.txt

test-hf: hf-venv all
	@BUILD=$(BUILD) VENV=$(or $(HF_VENV),$(BUILD)/venv-hf) tests/run tests/hf

# The checked-in fixtures and the tiny model, made anew (ten minutes; README there).
golden: hf-venv
	$(or $(HF_VENV),$(BUILD)/venv-hf)/bin/python tests/golden/make.py
	$(or $(HF_VENV),$(BUILD)/venv-hf)/bin/python tests/golden/make_randperm.py
tiny: hf-venv
	$(or $(HF_VENV),$(BUILD)/venv-hf)/bin/python notebooks/tiny/make.py

.PHONY: unit test hf-venv test-hf golden tiny

# What a machine with a GPU runs (tests/cuda/run.sh); built here too, so that they always compile.
$(BUILD)/tests/bench_cuda: $(BUILD)/tests/cuda/bench.o $(addprefix $(BUILD)/kernels/,err.o ops.o cuda_open.o)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) $^ -o $@ -ldl -lm
cuda-tests: $(CUDA_LIB) $(BUILD)/tests/ops_cuda $(BUILD)/tests/bench_cuda
.PHONY: cuda-tests
