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

.PHONY: unit test
