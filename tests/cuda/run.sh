#!/usr/bin/env bash
# tests/cuda/run.sh [BUILD…]: on a machine with a GPU, the checks, the op test and the micro-benchmarks of each build folder (default:
# build, and build-t4 where there is one). Nothing is compiled. Ends with a short table; exit status 1 if anything failed.
# ONLY=ops or ONLY=bench runs one half; BENCH=nf4 one part of the benchmarks.
set -u
cd "$(dirname "$0")/../.."
# cuBLAS and NCCL as pip installs them
libs=$(python3 - <<'PY' 2>/dev/null
import glob, site, sysconfig
places = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")] + site.getsitepackages())
print(":".join(d for p in places for d in sorted(glob.glob(p + "/nvidia/*/lib"))))
PY
)
export LD_LIBRARY_PATH="$libs${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
out=${OUT:-$(mktemp -d)}
builds=("$@")
[ ${#builds[@]} -gt 0 ] || for b in build build-t4; do [ -f "$b/libqlora-cuda.so" ] && builds+=("$b"); done
bad=0
summary=()
for b in "${builds[@]}"; do
    name=$(basename "$b")
    if [ "${ONLY:-ops}" = ops ]; then
        start=$SECONDS
        timeout 150 "$b/tests/ops_cuda" cuda >"$out/ops-$name.txt" 2>"$out/ops-$name.err"
        rc=$?
        p=$(grep -c '^ok ' "$out/ops-$name.txt") f=$(grep -c '^not ok ' "$out/ops-$name.txt")
        # the T4 build has no bf16 products: those cases are not failures of it
        if [ "$name" = build-t4 ]; then
            n=$(grep '^not ok ' "$out/ops-$name.txt" | grep -c 'bfloat16 matmul needs compute capability')
            f=$((f - n)) extra=" ($n bf16 products refused, as on a T4)"
        else
            extra=""
        fi
        [ $rc -ge 100 ] && f=$((f + 1))
        grep '^not ok ' "$out/ops-$name.txt" | grep -v 'bfloat16 matmul needs' | cut -c1-220 | head -40
        [ "$f" -gt 0 ] && tail -5 "$out/ops-$name.err"
        [ "$f" -eq 0 ] && [ "$p" -gt 0 ] && verdict=PASS || { verdict=FAIL; bad=1; }
        summary+=("$verdict ops $name: $p passed, $f failed, exit $rc, $((SECONDS - start)) s$extra")
    fi
    for t in wgmma_check attn_check bnb_cuda golden_cuda; do
        [ "${ONLY:-ops}" = ops ] && [ -x "$b/tests/$t" ] || continue
        timeout 90 "$b/tests/$t" --backend=cuda >"$out/$t-$name.txt" 2>&1
        rc=$?
        p=$(grep -c '^ok ' "$out/$t-$name.txt") f=$(grep -c '^not ok ' "$out/$t-$name.txt")
        grep -A12 '^not ok ' "$out/$t-$name.txt" | cut -c1-220 | head -60
        [ "$f" -eq 0 ] && [ $rc -eq 0 ] && [ "$p" -gt 0 ] && verdict=PASS || { verdict=FAIL; bad=1; }
        summary+=("$verdict $t $name: $p passed, $f failed, exit $rc")
    done
    if [ "${ONLY:-bench}" = bench ] && { [ "$name" != build-t4 ] || [ -n "${BENCH:-}" ]; }; then
        timeout 180 "$b/tests/bench_cuda" ${BENCH:-} >"$out/bench-$name.txt" 2>&1
        rc=$?
        cat "$out/bench-$name.txt"
        [ $rc -eq 0 ] && ! grep -q ' FAIL$' "$out/bench-$name.txt" && verdict=PASS || { verdict=FAIL; bad=1; }
        summary+=("$verdict bench $name: exit $rc, $(grep -c ' FAIL$' "$out/bench-$name.txt") below their bars")
    fi
done
printf '%s\n' "${summary[@]}"
exit $bad
