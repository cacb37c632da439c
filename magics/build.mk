# magics: the `%qlora` library, the shell host, the Python extension.
MAGICS_SRC := $(filter-out %_main.c magics/extension.c,$(wildcard magics/*.c))
MAGICS_LIB := $(BUILD)/libmagics.a

$(MAGICS_LIB): $(MAGICS_SRC:%.c=$(BUILD)/%.o)
	@rm -f $@
	ar rcs $@ $^

# The parser under libFuzzer; without clang the target says so. `make test` runs it for 20 s.
$(BUILD)/fuzz_magics: tests/fuzz/fuzz_magics.c magics/parse.c magics/buf.c kernels/err.c
	@mkdir -p $(@D)
	clang -std=c11 -D_GNU_SOURCE -I. -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover $^ -o $@ -ljansson

fuzz-magics: $(BUILD)/fuzz_magics
	@mkdir -p $(BUILD)/fuzz/magics
	$< -max_total_time=$(or $(SECONDS),20) -max_len=2048 -print_final_stats=0 $(BUILD)/fuzz/magics 2>&1 | tail -n 2

.PHONY: fuzz-magics
