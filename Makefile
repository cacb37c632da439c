# qlora: `make` builds what the machine allows, `make info` says what was found,
# `make test` runs all tests, `make demo` runs the main job. Both do their own set-up.

# make T4=1: a second build whose GPU code is compute_75 PTX alone and obeys a T4's limits on any card.
BUILD  ?= $(if $(T4),build-t4,build)
PYTHON ?= /usr/bin/python3
ifeq ($(origin CC),default)
CC     := gcc
endif
ifeq ($(origin CXX),default)
CXX    := g++
endif
OPT    ?= -O3 -g
# Runs on any x86-64 of the last ten years (AVX2 + FMA + F16C); make ARCH= for anything else.
ARCH   ?= $(if $(filter x86_64,$(shell uname -m)),-march=haswell)
WARN   := -Wall -Wextra -Wpedantic -Wshadow -Wconversion $(if $(WERROR),-Werror)
CFLAGS   += -std=c11 $(OPT) $(ARCH) -fPIC -ffp-contract=off -fno-math-errno -fno-trapping-math $(WARN) -D_GNU_SOURCE
CXXFLAGS += -std=c++17 $(OPT) -fPIC -Wall -Wextra $(if $(WERROR),-Werror)
CPPFLAGS += -I. -MMD -MP
# The CUDA backend, opened at run time, takes ql_fail and its neighbours from the program.
LDFLAGS  += -rdynamic
LDLIBS   += -ljansson -lpcre2-8 -lopenblas -lpthread -ldl -lm

# Packages that are missing come first: what is looked for below must be there when make reads it.
ifeq ($(MAKELEVEL)$(filter info clean,$(MAKECMDGOALS)),0)
ifneq ($(shell .ci/setup system >&2 && echo done),done)
$(error the build needs these packages)
endif
# As many jobs as cores, where nobody says otherwise.
ifeq ($(filter -j% --jobs%,$(MAKEFLAGS)),)
MAKEFLAGS += -j$(shell nproc)
endif
endif

# Without make's own rules: their search for ways to make the dependency files below takes half a minute.
MAKEFLAGS += --no-builtin-rules
.SUFFIXES:
%.d: ;

.DEFAULT_GOAL := all
.SECONDARY:
.DELETE_ON_ERROR:

# Everything the engine is made of, in one archive; programs are thin mains beside it.
LIB_SRC := $(wildcard kernels/*.c kernels/cpu/*.c kernels/null/*.c) \
           $(filter-out %_main.c,$(wildcard core/*.c))
LIB     := $(BUILD)/libqlora.a
LIB_OBJ := $(LIB_SRC:%.c=$(BUILD)/%.o)

$(BUILD)/%.o: %.c
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(CFLAGS) -c $< -o $@

$(LIB): $(LIB_OBJ)
	@rm -f $@
	ar rcs $@ $^

PROGRAMS := $(BUILD)/qlora-engine

$(BUILD)/qlora-engine: $(BUILD)/core/engine_main.o $(LIB)
	$(CC) $(LDFLAGS) $^ -o $@ $(LDLIBS)

include $(wildcard kernels/cuda/build.mk magics/build.mk kernel/build.mk tests/build.mk)

all: $(LIB) $(PROGRAMS)

# Python tools from one pinned list.
setup-python:
	@PYTHON='$(PYTHON)' .ci/setup python $(BUILD)/venv

# What was found on this machine, and what is missing, why, and how to get it.
info:
	@CC='$(CC)' CXX='$(CXX)' PYTHON='$(PYTHON)' BUILD='$(BUILD)' NVCC='$(NVCC)' CUDA='$(CUDA)' KERNEL_WHY='$(KERNEL_WHY)' \
	    .ci/info

clean:
	rm -rf $(BUILD) build-asan build-tsan

-include $(shell find $(BUILD) -name 'venv*' -prune -o -type f -name '*.d' -print 2>/dev/null)
.PHONY: all info setup-python clean
