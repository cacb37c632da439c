"""cuda12.py BUILD [NVCC]: do the CUDA sources build where Kaggle builds them, with CUDA 12.8 and gcc 11? pip has no nvcc 12, but its parts: NVRTC 12.8
holds the whole device compiler (front end, optimiser, assembler), and there are the headers. So:

1. every file with kernels goes, host functions and all, through NVRTC 12.8 to sm_75 machine code (files for sm_90a to that), against CUDA
   12.8's headers; what its assembler says of registers and shared memory stays within a T4's limits, and what it spills is told;
2. every file goes through g++-11 against CUDA 12.8's headers, cuBLAS 12.8's and NCCL 2.25's, split into host and device by the nvcc here;
3. all that Kaggle builds, for sm_75 alone, is built from nothing by gcc 11 and the nvcc here in at most 360 s of processor time: three
   minutes on two cores.

What this does not show: nvcc 12.8's own splitter (cudafe++), which pip does not have. Wheels are kept in BUILD/cuda12."""
import concurrent.futures
import ctypes
import os
import pathlib
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile

import resources

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(sys.argv[1])
NVCC = sys.argv[2] if len(sys.argv) > 2 else "nvcc"
GXX = "g++-11"
WHEELS = {"nvidia-cuda-nvcc-cu12==12.8.93": "include/", "nvidia-cuda-runtime-cu12==12.8.90": "include/", "nvidia-cuda-cccl-cu12==12.8.90": "include/",
          "nvidia-cublas-cu12==12.8.4.1": "include/", "nvidia-nvml-dev-cu12==12.8.90": "include/", "nvidia-cuda-nvrtc-cu12==12.8.93": "lib/"}

# What NVRTC has not: the C library's names that host functions call, and two of the runtime's host functions.
SHIM = {
    "stdbool.h": "",
    "limits.h": "",
    "stddef.h": "typedef unsigned long size_t; typedef long ptrdiff_t;\n#ifndef NULL\n#define NULL 0\n#endif\n",
    "stdint.h": "typedef signed char int8_t; typedef unsigned char uint8_t; typedef short int16_t; typedef unsigned short uint16_t;\n"
                "typedef int int32_t; typedef unsigned uint32_t; typedef long int64_t; typedef unsigned long uint64_t;\n"
                "typedef long intptr_t; typedef unsigned long uintptr_t;\n#define INT32_MAX 2147483647\n#define INT64_MAX 9223372036854775807L\n",
    "stdio.h": "#include <stddef.h>\ntypedef struct file FILE;\nint snprintf(char *, size_t, const char *, ...);\n",
    "stdlib.h": "#include <stddef.h>\n",
    "string.h": "#include <stddef.h>\nint memcmp(const void *, const void *, size_t); int strcmp(const char *, const char *); size_t strlen(const char *);\n",
    "before.h": "#define INFINITY __int_as_float(0x7f800000)\n#define __ATOMIC_ACQUIRE 0\n#define __atomic_load_n(p, order) (*(p))\nvoid *calloc(unsigned long, unsigned long);\n",
    "launch.h": "#include <cuda_runtime.h>\ntemplate <class K> cudaError_t cudaOccupancyMaxActiveClusters(int *, K, const cudaLaunchConfig_t *);\n"
                 "template <class K, class... A> cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *c, K k, A... a)\n"
                 "{\n    k<<<c->gridDim, c->blockDim>>>(a...);\n    return cudaSuccess;\n}\n",
}


def fetch(top):
    for wheel, part in WHEELS.items():
        mark = top / wheel.replace("==", "-")
        if mark.exists():
            continue
        with tempfile.TemporaryDirectory() as tmp:
            subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check", "-d", tmp, wheel], check=True,
                           stderr=subprocess.DEVNULL)
            for f in pathlib.Path(tmp).glob("*.whl"):
                with zipfile.ZipFile(f) as z:
                    z.extractall(top, [n for n in z.namelist() if re.match(r"nvidia/\w+/" + part, n)])
        mark.touch()


def device(top, shim, f):
    """f through NVRTC; the kernels' figures."""
    sys.setrecursionlimit(10000)
    rtc = ctypes.CDLL(str(top / "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"))
    arch = "sm_90a" if f.stem.endswith("90") else "sm_75"
    options = ["--gpu-architecture=" + arch, "--std=c++17", "-default-device", "--relocatable-device-code=true", "--ptxas-options=-v", f"-I{shim}", f"-I{ROOT}",
               *(f"-I{top}/nvidia/{p}/include" for p in ("cuda_runtime", "cuda_nvcc", "cuda_cccl", "cublas")), f"--pre-include={shim}/before.h",
               f"--pre-include={shim}/launch.h"]
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    rtc.nvrtcCreateProgram(ctypes.byref(program), f.read_bytes(), str(f).encode(), 0, None, None)
    status = rtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*(o.encode() for o in options)))
    rtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    rtc.nvrtcGetProgramLog(program, log)
    log = log.value.decode()
    rtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    if status or size.value < 1000:
        raise RuntimeError(f"{f.name} is not compiled by NVRTC 12.8 for {arch}:\n" + "\n".join(x for x in log.splitlines() if "ptxas info" not in x)[:3000])
    return arch, size.value, resources.parse(log)


def host(top, front, f, out):
    """f through g++-11 against the headers of CUDA 12.8. The device half is compiled as fast as it goes, and is not looked at."""
    arch = "90a" if f.stem.endswith("90") else "75"
    run = subprocess.run([NVCC, "-std=c++17", "-Xcicc", "-O0", "-Xptxas", "-O0", "-ccbin", GXX, f"-I{ROOT}", f"-I{front}",
                          *(f"-I{top}/nvidia/{p}/include" for p in ("cuda_nvcc", "cuda_runtime", "cuda_cccl", "cublas", "nvml_dev")),
                          f"-I{ROOT}/build/cuda-headers", "-gencode", f"arch=compute_{arch},code=sm_{arch}", "-Xcompiler", "-fPIC,-O2,-Wall,-Wextra,-Werror",
                          "-Werror", "all-warnings", "-c", str(f), "-o", str(out / (f.stem + ".o"))], capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{f.name} is not compiled by {GXX} against CUDA 12.8's headers:\n" + (run.stdout + run.stderr)[:3000])
    seen = subprocess.run([GXX, "-E", "-dM", "-x", "c++", f"-I{top}/nvidia/cuda_nvcc/include", f"-I{top}/nvidia/cuda_runtime/include", "-include",
                           "cuda_runtime_api.h", "/dev/null"], capture_output=True, text=True).stdout
    assert "#define CUDART_VERSION 12080" in seen, "not CUDA 12.8's headers"


def whole(folder):
    """Seconds of processor time of a build from nothing."""
    shutil.rmtree(folder, ignore_errors=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    run = subprocess.run(["make", "-s", f"-j{os.cpu_count()}", f"BUILD={folder}", "T4=", "CUDA=1", f"NVCC={NVCC}", "CUDA_ARCH=75", "CC=gcc-11", f"CXX={GXX}",
                          "WERROR=1", "all"], cwd=ROOT, env=dict(env, NVCCFLAGS=f"-ccbin {GXX}"), capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if run.returncode:
        raise RuntimeError("it does not build: " + (run.stdout + run.stderr)[-3000:])
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main():
    if not shutil.which(GXX):
        print(f"not ok {GXX}: not found: apt-get install g++-11")
        return 1
    top = (BUILD / "cuda12").resolve()
    top.mkdir(parents=True, exist_ok=True)
    fetch(top)
    failed, began, files = 0, time.time(), sorted((ROOT / "kernels/cuda").glob("*.cu"))
    # The splitter writes calls of its own version's crt/host_runtime.h: that one header is of the nvcc here.
    home = pathlib.Path(subprocess.run([NVCC, "--dryrun", "-x", "cu", "/dev/null"], capture_output=True, text=True).stderr.split("TOP=")[1].split("\n")[0].strip())
    with tempfile.TemporaryDirectory() as tmp, concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        shim, front, out = (pathlib.Path(tmp, n) for n in ("shim", "front", "out"))
        for d in (shim, front / "crt", out):
            d.mkdir(parents=True)
        for name, text in SHIM.items():
            (shim / name).write_text("#pragma once\n" + text)
        crt = next(p for p in (home / "include/crt", home / "targets/x86_64-linux/include/crt") if p.is_dir())
        for name in ("host_runtime.h", "storage_class.h"):
            shutil.copy(crt / name, front / "crt")
        kernels = {}
        jobs = {pool.submit(device, top, shim, f): ("device", f) for f in files if "__global__" in f.read_text()}
        jobs |= {pool.submit(host, top, front, f, out): ("host", f) for f in files}
        for job in concurrent.futures.as_completed(jobs):
            what, f = jobs[job]
            try:
                got = job.result()
                if what == "device":
                    kernels.update(got[2])
                print(f"ok {what}.{f.stem}" + (f": {got[0]}, {got[1]} bytes" if got else ""), flush=True)
            except Exception as e:
                failed += 1
                print(f"not ok {what}.{f.stem}: {e}", flush=True)
    names = resources.plain(list(kernels))
    told = resources.broken({names[n]: v for n, v in kernels.items()}, resources.table()[1])
    problems = [p for p in told if "spilled" not in p]
    for p in told:
        print(f"{'not ok limits:' if p in problems else '# 12.8 spills where 13.0 does not:'} {p}")
    if not problems and kernels:
        print(f"ok limits: {len(kernels)} kernels of sm_75 by the assembler of 12.8 are within a T4's")
    total = len(jobs) + 2
    failed += bool(problems)
    try:
        seconds = whole(BUILD / "kaggle")
        failed += seconds > 360
        print(f"{'ok' if seconds <= 360 else 'not ok'} kaggle_build: sm_75 by gcc 11 in {seconds:.0f} s of processor time, 360 allowed")
    except RuntimeError as e:
        failed += 1
        print(f"not ok kaggle_build: {e}")
    print(f"CUDA 12.8 (NVRTC whole; headers under {GXX}; nvcc 12.8's own splitter is not among pip's packages): {time.time() - began:.0f} s")
    print(f"{total - failed} passed, {failed} failed, 0 skipped")
    return 1 if failed else 0


sys.exit(main())
