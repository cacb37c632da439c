# Sourced by the scripts here: cuBLAS and NCCL as pip installs them, for programs that open them at run time.
libs=$(python3 - <<'PY' 2>/dev/null
import glob, site, sysconfig
places = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")] + site.getsitepackages())
print(":".join(d for p in places for d in sorted(glob.glob(p + "/nvidia/*/lib"))))
PY
)
export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$libs"
export OPENBLAS_NUM_THREADS=1
