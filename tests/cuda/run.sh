#!/usr/bin/env bash
# tests/cuda/run.sh [BUILD]: what `make test-cuda` runs once everything is built; nothing is compiled here, so a built tree may be carried
# to the machine with the GPU. BUILD: build (default), or build-t4, which also gets a T4's memory and no peer access. ONLY="exact killed"
# runs these alone. Lines that begin with # say what was not run for want of a second GPU. A skip is a failure. Ends with
# "N passed, N failed, N skipped".
set -u
cd "$(dirname "$0")/../.."
. tests/cuda/env.sh
build=${1:-build}
[ -f "$build/libqlora-cuda.so" ] || { echo "no $build/libqlora-cuda.so: make cuda-tests${build#build}" >&2; exit 1; }
out=${OUT:-$(mktemp -d)}
mkdir -p build/tests # the golden test writes there, whatever the build
name=$(basename "$build")
memory=
case $name in *t4) memory=15095MiB; export NCCL_P2P_DISABLE=1; echo "# as on T4s: $memory a GPU, no peer access" ;; esac
export QLORA_ENGINE=$PWD/$build/tests/engine_cuda
pass=0 fail=0 skip=0
all=$SECONDS

one() {    # name, seconds it may take, command…
    local t=$1 limit=$2 start=$SECONDS log=$out/$1-$name.txt rc p f s
    shift 2
    [ -z "${ONLY:-}" ] || case " $ONLY " in *" $t "*) ;; *) return ;; esac
    timeout -k 5 "$limit" "$@" >"$log" 2>"$out/$t-$name.err"
    rc=$?
    p=$(grep -c '^ok ' "$log") f=$(grep -c '^not ok ' "$log") s=$(grep -c '^skip ' "$log")
    grep -A12 -E '^(not ok|skip) ' "$log" | cut -c1-400 | head -60
    grep '^#' "$log" | grep -v '^#  rows' | cut -c1-200
    # A crash, a time-out or silence is a failure of its own. (Programs end with the number of their failures, at most 99.)
    if [ $rc -ne "$f" ] && ! { [ "$f" -gt 0 ] && [ $rc -gt 0 ] && [ $rc -lt 100 ]; } || [ $((p + f)) -eq 0 ]; then
        f=$((f + 1))
        echo "not ok $t: exit status $rc after $((SECONDS - start)) s"
        tail -n 20 "$out/$t-$name.err"
    fi
    printf '%-14s %5d passed %3d failed %3d skipped %5d s\n' "$t" "$p" "$f" "$s" $((SECONDS - start))
    pass=$((pass + p)) fail=$((fail + f)) skip=$((skip + s))
}

t=$build/tests
one ops 150 "$t/ops_cuda" cuda
one attn 60 "$t/attn_check"
[ ! -x "$t/wgmma_check" ] || one wgmma 30 "$t/wgmma_check"
one comm 120 "$t/comm_cuda"
one bnb 60 "$t/bnb_cuda" --backend=cuda
one golden 90 "$t/golden_cuda" --backend=cuda
one exact 400 "$t/exact_cuda" --backend=cuda
one killed 150 python3 tests/cuda/killed.py $memory
echo "$((SECONDS - all)) s on $(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | sort | uniq -c | sed 's/^ *//' | paste -sd, || true)"
echo "$pass passed, $fail failed, $skip skipped"
[ "$fail" -eq 0 ] && [ "$skip" -eq 0 ]
