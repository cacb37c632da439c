# The CUDA backend, build/libqlora-cuda.so, where nvcc is found. CUDA=0: not at all; CUDA=1: must be there.
CUDA      ?= auto
NVCC      ?= $(firstword $(shell command -v nvcc 2>/dev/null) $(wildcard /usr/local/cuda/bin/nvcc))
ifneq ($(CUDA),0)
ifneq ($(NVCC),)
# The folder of the toolkit; a wrapper script or link may stand in the path.
CUDA_HOME ?= $(shell $(NVCC) --dryrun -x cu /dev/null 2>&1 | sed -n 's/^\#\$$ TOP=//p')
# Machine code for each of these, and PTX of the last one for what comes after.
CUDA_ARCH ?= 75 80 90
ifdef T4
CUDA_GEN  := -gencode arch=compute_75,code=compute_75 -DQL_T4
else
CUDA_GEN  := $(foreach a,$(CUDA_ARCH),-gencode arch=compute_$(a),code=sm_$(a)) \
             -gencode arch=compute_$(lastword $(CUDA_ARCH)),code=compute_$(lastword $(CUDA_ARCH))
endif
CUDA_HEADERS := build/cuda-headers
CUDA_LIB     := $(BUILD)/libqlora-cuda.so
CUDA_SRC     := $(filter-out %90.cu,$(wildcard kernels/cuda/*.cu))
ifneq ($(filter 90,$(if $(T4),,$(CUDA_ARCH))),)
# Warpgroup products exist on sm_90a alone: files of their own, chosen at run time on exactly that card.
CUDA_SRC90   := $(wildcard kernels/cuda/*90.cu)
CUDA_SRC     += $(CUDA_SRC90)
$(CUDA_SRC90:%.cu=$(BUILD)/%.o) $(CUDA_SRC90:%.cu=$(BUILD)/%.ptxas): CUDA_GEN := -gencode arch=compute_90a,code=sm_90a
$(BUILD)/kernels/cuda/attn.o $(BUILD)/kernels/cuda/attn.ptxas: CUDA_GEN += -DQL_SM90A
endif
CUDA_OBJ     := $(CUDA_SRC:%.cu=$(BUILD)/%.o)
NVCCFLAGS    += -std=c++17 -O3 -I. -I$(CUDA_HEADERS) -lineinfo -cudart static \
                -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-Wextra$(if $(WERROR),$(comma)-Werror) $(if $(WERROR),-Werror all-warnings)
comma := ,

$(CUDA_HEADERS)/.done: kernels/cuda/headers
	@kernels/cuda/headers $(CUDA_HEADERS) $(CUDA_HOME) $(PYTHON)

# One run makes both: the object, and what the assembler says of each kernel (registers, spills, shared memory), which
# tests/cuda/resources.py holds against its table.
$(BUILD)/%.o $(BUILD)/%.ptxas: %.cu $(CUDA_HEADERS)/.done
	@mkdir -p $(@D)
	$(NVCC) $(NVCCFLAGS) -Xptxas -v $(CUDA_GEN) -MMD -MP -MT $(BUILD)/$*.o -MF $(BUILD)/$*.d -c $< -o $(BUILD)/$*.o 2>$(BUILD)/$*.log || \
	    { grep -vE '^ptxas info|^ +[0-9]+ bytes stack|^$$' $(BUILD)/$*.log >&2; exit 1; }
	@grep -vE '^ptxas info|^ +[0-9]+ bytes stack|^$$' $(BUILD)/$*.log >&2 || true
	@mv $(BUILD)/$*.log $(BUILD)/$*.ptxas

$(CUDA_LIB): $(CUDA_OBJ) $(CUDA_OBJ:.o=.ptxas)
	$(NVCC) -shared -cudart static -Xlinker -soname,libqlora-cuda.so,-Bsymbolic,--exclude-libs,ALL $(CUDA_OBJ) -o $@ -ldl -lpthread -lrt

PROGRAMS += $(CUDA_LIB)
cuda: $(CUDA_LIB)
.PHONY: cuda
else ifeq ($(CUDA),1)
$(error CUDA=1, but there is no nvcc: set NVCC=/path/to/nvcc, or leave CUDA=auto)
endif
endif
