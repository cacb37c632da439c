# tests/unit/test_*.c: one program each, linked against everything. tests/run adds up their lines.
UNIT_SRC := $(wildcard tests/unit/test_*.c)
UNIT     := $(UNIT_SRC:tests/unit/%.c=$(BUILD)/tests/%)

$(BUILD)/tests/%: $(BUILD)/tests/unit/%.o $(MAGICS_LIB) $(LIB)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) $^ -o $@ $(LDLIBS)

unit: setup-system $(UNIT)
	@tests/run $(UNIT)

test: setup-python all $(UNIT)
	@BUILD=$(BUILD) tests/run $(UNIT) $(wildcard tests/py)

.PHONY: unit test
