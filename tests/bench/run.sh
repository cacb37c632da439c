#!/usr/bin/env bash
# make bench: this machine's CPU figures, one after the other. What needs the Hugging Face libraries is left out, with a line, where
# their environment ($HF) is missing: make hf-venv, or HF_VENV=/path. ROWS_MB: size of the JSONL file (1000).
set -euo pipefail
cd "$(dirname "$0")/../.."
build=${BUILD:-build}
hf=${HF:-$build/venv-hf}
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1

title() { printf '\n== %s\n' "$*"; }

title "machine"
grep -m1 'model name' /proc/cpuinfo | cut -d: -f2 | sed 's/^ //' || uname -m
echo "$(nproc) threads, $(awk '/MemTotal/ {printf "%.1f GB", $2 / 1e6}' /proc/meminfo)"

title "the notebook"
if [ -x "$build/venv/bin/python" ]; then
    "$build/venv/bin/python" tests/py/test_speed.py 2>/dev/null
else
    echo "left out: make setup-python"
fi

title "a training step of the bundled model, one thread"
if [ -x "$hf/bin/python" ]; then
    BUILD=$build "$hf/bin/python" tests/hf/bench.py --threads 1 2>"$dir/err" || { tail -5 "$dir/err"; exit 1; }
else
    echo "the engine alone; beside transformers + peft with HF_VENV or make hf-venv:"
    printf 'load tiny\ndata tiny\nconfig --devices cpu:1 --max_steps 20 --per_device_train_batch_size 8 --output_dir %s/run\ntrain\n' "$dir" |
        "$build/qlora" | grep '^done'
fi

title "tokenizer, one thread, MB of text a second"
cat README.md core/*.c kernels/cpu/*.c notebooks/tiny/*.jsonl tests/text/data/*.jsonl 2>/dev/null >"$dir/text"
for model in notebooks/tiny tests/text/data/llama tests/text/data/qwen; do
    [ -f "$model/tokenizer.json" ] || continue
    echo "$model, $(wc -c <"$dir/text") bytes"
    if [ -x "$hf/bin/python" ]; then
        "$hf/bin/python" tests/text/bench_tokenizer.py "$model" "$dir/text" "$build/tests/tokenizer_speed"
    else
        "$build/tests/tokenizer_speed" "$model" "$dir/text"
    fi
done

title "a JSONL file of ${ROWS_MB:-1000} MB as data"
"$build/tests/rows_memory" "$dir/rows.jsonl" "${ROWS_MB:-1000}"

title "ops of the CPU backend, one thread"
"$build/tests/test_ops" --bench cpu
