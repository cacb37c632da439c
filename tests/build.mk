# tests/unit/test_*.c: one program each, linked against everything. tests/run adds up their lines.
UNIT_SRC := $(wildcard tests/unit/test_*.c)
UNIT     := $(UNIT_SRC:tests/unit/%.c=$(BUILD)/tests/%)

# Tests are compiled more often than run.
$(UNIT_SRC:%.c=$(BUILD)/%.o): OPT := -O1 -g
$(BUILD)/tests/%: $(BUILD)/tests/unit/%.o $(MAGICS_LIB) $(LIB)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) $^ -o $@ $(LDLIBS)

# What needs forked ranks and takes longer: part of `make test`. `make exact` runs every way to run a job, an hour and more of
# processor time, shared by all cores; `make exact EVERY=37` each 37th of them.
EVERY ?= 1
RANKS_TESTS := $(patsubst tests/exact/%.c,$(BUILD)/tests/%,$(wildcard tests/exact/test_*.c))

$(BUILD)/tests/%: $(BUILD)/tests/exact/%.o $(LIB)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) $^ -o $@ $(LDLIBS)

# The engine with faults, for tests/py/test_ranks.py.
$(BUILD)/tests/faulty_engine: $(BUILD)/tests/exact/faulty_engine.o $(LIB)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) -Wl,--wrap=ql_backend_cpu,--wrap=fsync,--wrap=rename $^ -o $@ $(LDLIBS)

exact: $(BUILD)/tests/test_exact
	@n=$$(nproc); for k in $$(seq 0 $$((n - 1))); do echo $$((n * $(EVERY))) $$((k * $(EVERY))); done | xargs -P $$n -L 1 $(BUILD)/tests/test_exact product

# What a pipeline's stages wait: on paper, and by the clock of CPU ranks.
bubble: $(BUILD)/tests/bubble $(BUILD)/tests/make_model
	@$(BUILD)/tests/make_model stages $(BUILD)/tests/stages 96
	@$(BUILD)/tests/bubble $(BUILD)/tests/stages
.PHONY: bubble

# The op test: test_ops with the CPU backend, ops_cuda without it and its BLAS.
OPS_OBJ := $(patsubst %.c,$(BUILD)/%.o,$(filter-out %/with_cpu.c %/cuda_only.c,$(wildcard tests/ops/*.c)))

$(BUILD)/tests/test_ops: $(OPS_OBJ) $(BUILD)/tests/ops/with_cpu.o $(LIB)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) $^ -o $@ $(LDLIBS)
$(BUILD)/tests/ops_cuda: $(OPS_OBJ) $(BUILD)/tests/ops/cuda_only.o $(addprefix $(BUILD)/kernels/,err.o ops.o cuda_open.o)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) $^ -o $@ -ldl -lm

UNIT += $(BUILD)/tests/test_ops

# Models of real shapes with random values, for benchmarks on machines without a hub.
$(BUILD)/tests/make_model $(BUILD)/tests/profile $(BUILD)/tests/load $(BUILD)/tests/tokenizer_speed $(BUILD)/tests/rows_memory: $(BUILD)/tests/%: $(BUILD)/tests/bench/%.o $(LIB)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) $^ -o $@ $(LDLIBS)

# Everything once more under the address and undefined-behaviour sanitizers, with the unit tests and those of ranks.
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
asan:
	@$(MAKE) --no-print-directory BUILD=build-asan OPT="-O1 -g $(SANITIZE)" LDFLAGS="$(SANITIZE)" asan-programs
asan-programs: $(UNIT) $(RANKS_TESTS)
	@TEST_TIMEOUT=$${TEST_TIMEOUT:-1800} tests/run $^

# What threads share, under the thread sanitizer: ranks as threads (runs really fork them), and what is threaded by itself.
TSAN := test_threads test_comm test_data test_event test_hub
tsan:
	@$(MAKE) --no-print-directory BUILD=build-tsan OPT="-O1 -g -fsanitize=thread -fno-omit-frame-pointer" LDFLAGS="-fsanitize=thread" \
	    tsan-programs
tsan-programs: $(TSAN:%=$(BUILD)/tests/%)
	@TEST_TIMEOUT=$${TEST_TIMEOUT:-1800} OPENBLAS_NUM_THREADS=1 TSAN_OPTIONS="halt_on_error=1 suppressions=tests/tsan.supp $(TSAN_OPTIONS)" tests/run $(TSAN:%=$(BUILD)/tests/%)
.PHONY: tsan tsan-programs

# tests/fuzz/fuzz_*.c under libFuzzer: `make fuzz FUZZ_TIME=600`, `make fuzz FUZZ=fuzz_config`. Without clang and its
# fuzzer library they are left out, with one line that says so. `make test` runs each for FUZZ_TEST_TIME seconds.
FUZZ_TIME      ?= 20
FUZZ_TEST_TIME ?= 20
FUZZ           ?= $(patsubst tests/fuzz/%.c,%,$(wildcard tests/fuzz/fuzz_*.c))
CLANG          ?= $(firstword $(foreach c,clang clang-18 clang-17 clang-16 clang-15 clang-14,$(shell command -v $(c))))
FUZZ_BUILD     := $(BUILD)/fuzz
FUZZ_CFLAGS    := -std=c11 -D_GNU_SOURCE -g -O1 $(ARCH) -ffp-contract=off $(SANITIZE)
# Parsers and what they need: what computes, places, runs and shows is not fuzzed, and not compiled once more for it.
FUZZ_WITHOUT   := kernels/cpu/% kernels/null/% kernels/ops.c magics/verb_% magics/view% magics/live.c magics/client.c magics/complete.c \
                  $(patsubst %,core/%.c,bench choose ckpt% cost decode exec generate head launch layer loss memory merge nf4 optim pipe plan% rank \
                  report save session shape store task train verify worker)
FUZZ_LIB_OBJ   := $(patsubst %.c,$(FUZZ_BUILD)/%.o,$(filter-out $(FUZZ_WITHOUT),$(LIB_SRC) $(MAGICS_SRC)))
HAVE_FUZZER    := $(if $(CLANG),$(shell echo 'int LLVMFuzzerTestOneInput(const char *d, long n) { return d && n < 0; }' | \
                    $(CLANG) -x c - -fsanitize=fuzzer,address -o /dev/null 2>/dev/null && echo 1))
FUZZERS        := $(if $(HAVE_FUZZER),$(FUZZ:%=$(FUZZ_BUILD)/%))

$(FUZZ_BUILD)/%.o: %.c
	@mkdir -p $(@D)
	$(CLANG) $(CPPFLAGS) $(FUZZ_CFLAGS) -fsanitize=fuzzer-no-link -c $< -o $@
$(FUZZ_BUILD)/libfuzz.a: $(FUZZ_LIB_OBJ)
	@rm -f $@
	ar rcs $@ $^
$(FUZZ_BUILD)/fuzz_%: tests/fuzz/fuzz_%.c $(FUZZ_BUILD)/libfuzz.a
	$(CLANG) $(CPPFLAGS) $(FUZZ_CFLAGS) -fsanitize=fuzzer $< $(FUZZ_BUILD)/libfuzz.a -o $@ $(LDLIBS)

fuzz: $(FUZZERS)
	@BUILD=$(BUILD) FUZZERS='$(FUZZERS)' FUZZ_TIME=$(FUZZ_TIME) tests/run tests/fuzz/run_fuzz

unit: $(UNIT)
	@tests/run $(UNIT)

test: setup-python all $(UNIT) $(RANKS_TESTS) $(BUILD)/tests/faulty_engine $(FUZZERS)
	@BUILD=$(BUILD) FUZZERS='$(FUZZERS)' FUZZ_TIME=$(FUZZ_TEST_TIME) tests/run $(UNIT) $(RANKS_TESTS) tests/fuzz/run_fuzz $(wildcard tests/py)

# Live transformers, peft and bitsandbytes against the engine. They have their own environment (torch's CPU build
# is enough); HF_VENV=/path takes one that is there, installed from tests/hf/requirements.txt. Models and data are random: `make test-hf
# SEED=7` makes others than CI sees.
HF_VENV ?=
SEED    ?=
hf-venv:
	@[ -n "$(HF_VENV)" ] || PYTHON='$(PYTHON)' .ci/setup python $(BUILD)/venv-hf tests/hf/requirements.txt

test-hf: hf-venv all
	@BUILD=$(BUILD) SEED=$(SEED) VENV=$(or $(HF_VENV),$(BUILD)/venv-hf) tests/run tests/hf

# CPU figures of this machine: a training step and the tokenizer beside the Hugging Face libraries (where hf-venv or HF_VENV is there),
# memory of a large data set, the op table.
bench: all $(BUILD)/tests/tokenizer_speed $(BUILD)/tests/rows_memory $(BUILD)/tests/test_ops
	@BUILD=$(BUILD) HF=$(or $(HF_VENV),$(BUILD)/venv-hf) tests/bench/run.sh
.PHONY: bench

# The checked-in fixtures and the tiny model, made anew (ten minutes; README there).
golden: hf-venv
	$(or $(HF_VENV),$(BUILD)/venv-hf)/bin/python tests/golden/make.py
	$(or $(HF_VENV),$(BUILD)/venv-hf)/bin/python tests/golden/make_randperm.py
	$(or $(HF_VENV),$(BUILD)/venv-hf)/bin/python tests/golden/make_generate.py
tiny: hf-venv
	$(or $(HF_VENV),$(BUILD)/venv-hf)/bin/python notebooks/tiny/make.py

.PHONY: unit exact asan asan-programs fuzz test hf-venv test-hf golden tiny

# ---- on machines with a GPU: make test-cuda, sanitize, bench-cuda -----------------------------------------------
# A built tree can be carried to a machine without compilers or these libraries' headers: there tests/cuda/run.sh alone runs it. So
# programs that link the engine have jansson and PCRE inside, and no BLAS, which the CPU backend alone calls.
CUDA_PROG  := $(BUILD)/kernels/err.o $(BUILD)/kernels/ops.o $(BUILD)/kernels/cuda_open.o
CARRY_LIBS := -Wl,-Bstatic -ljansson -lpcre2-8 -Wl,-Bdynamic -lpthread -ldl -lm
CARRY_LINK  = @mkdir -p $(@D); $(CC) $(LDFLAGS) -s $(filter %.o %.a,$^) -o $@ $(CARRY_LIBS)
CUDA_TESTS := $(addprefix $(BUILD)/tests/,ops_cuda attn_check comm_cuda bnb_cuda golden_cuda exact_cuda engine_cuda)
CUDA_BENCH := $(addprefix $(BUILD)/tests/,bench_cuda profile_cuda make_model_cuda load_cuda)

$(BUILD)/tests/bnb_cuda $(BUILD)/tests/golden_cuda: $(BUILD)/tests/%_cuda: $(BUILD)/tests/unit/test_%.o $(BUILD)/tests/cuda/no_blas.o $(LIB)
	$(CARRY_LINK)
$(BUILD)/tests/exact_cuda: $(BUILD)/tests/exact/test_exact.o $(BUILD)/tests/cuda/no_blas.o $(LIB)
	$(CARRY_LINK)
$(BUILD)/tests/engine_cuda: $(BUILD)/core/engine_main.o $(BUILD)/tests/cuda/no_blas.o $(LIB)
	$(CARRY_LINK)
$(BUILD)/tests/profile_cuda $(BUILD)/tests/make_model_cuda $(BUILD)/tests/load_cuda: $(BUILD)/tests/%_cuda: $(BUILD)/tests/bench/%.o $(BUILD)/tests/cuda/no_blas.o $(LIB)
	$(CARRY_LINK)
$(BUILD)/tests/bench_cuda $(BUILD)/tests/comm_cuda: $(BUILD)/tests/%_cuda: $(BUILD)/tests/cuda/%.o $(CUDA_PROG)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) $^ -o $@ -ldl -lm
$(BUILD)/tests/%: $(BUILD)/tests/cuda/%.o $(CUDA_PROG)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) $^ -o $@ -ldl -lpthread -lm
# Kernels alone on a card, without the backend.
$(BUILD)/tests/wgmma_check: $(BUILD)/tests/%: tests/cuda/%.cu $(wildcard kernels/cuda/*.h)
	@mkdir -p $(@D)
	$(NVCC) $(NVCCFLAGS) -gencode arch=compute_90a,code=sm_90a $< -o $@

need-nvcc:
	@[ -n '$(CUDA_LIB)' ] || { echo "no CUDA build here: make info says why" >&2; exit 1; }
cuda-tests: need-nvcc $(CUDA_LIB) $(CUDA_TESTS) $(CUDA_BENCH) $(if $(T4),,$(BUILD)/tests/wgmma_check)
# At most 8 minutes on one GPU; a skip is a failure. T4=1: as on a T4, from PTX of compute_75 alone.
test-cuda: cuda-tests
	@tests/cuda/run.sh $(BUILD)
# At most 8 minutes: ceilings, ops, loading, steps, peers as one Markdown table; OUT=tests/bench/h200.md writes it there too.
bench-cuda: cuda-tests
	@python3 tests/bench/cuda.py $(BUILD) $(OUT)
sanitize: cuda-tests
	@tests/cuda/sanitize.sh $(BUILD)
# The table of what the sm_75 kernels take, after a change that is meant (make test compares).
resources: need-nvcc $(CUDA_LIB)
	@python3 tests/cuda/resources.py $(BUILD) --write
# Kaggle has CUDA 12.8 and gcc 11: the sources through those of its parts that pip has, and a whole build for a T4 with gcc 11, which may
# take three minutes on two cores (counted as processor time, so that a busy machine does not matter).
check-cuda12: need-nvcc
	@python3 tests/cuda/cuda12.py $(BUILD) $(NVCC)
.PHONY: need-nvcc cuda-tests test-cuda bench-cuda sanitize resources check-cuda12
