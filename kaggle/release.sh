#!/usr/bin/env bash
# Drafts the GitHub release that hosts the wheel. With GitHub's `gh` it makes the draft; without, it prints what to do.
#   kaggle/release.sh [--any-cuda]
# The wheel is built here. Kaggle's driver may be older than CUDA 13 asks for (580), so a wheel for it is built with a
# CUDA 12 toolkit (make NVCC=/usr/local/cuda-12.8/bin/nvcc); --any-cuda takes what is there, or none.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(sed -n 's/.*define QL_VERSION *"\(.*\)"/\1/p' core/qlora.h)
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
toolkit=$("$nvcc" --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\),.*/\1/p' || true)
if [ "${1:-}" != --any-cuda ] && [ "${toolkit%%.*}" != 12 ]; then
    echo "release: the toolkit here is ${toolkit:-missing}; Kaggle needs CUDA 12 (NVCC=…), or say --any-cuda" >&2
    exit 1
fi
make -s wheel ${toolkit:+NVCC="$nvcc"}
wheel=$(ls build/dist/qlora-"$version"-*.whl)
notes=$(mktemp)
trap 'rm -f "$notes"' EXIT
{
    echo "One file for any x86-64 Linux with Python 3.10 or newer: \`pip install $(basename "$wheel")\`, then \`%load_ext qlora\`."
    echo
    echo "- size: $(du -h "$wheel" | cut -f1); sha256: \`$(sha256sum "$wheel" | cut -d' ' -f1)\`"
    if [ -n "$toolkit" ]; then echo "- CUDA backend: built with CUDA $toolkit; cuBLAS and NCCL come from the system or from pip"; else echo "- no CUDA backend: the CPU alone"; fi
    echo "- built from commit $(git rev-parse HEAD)"
} > "$notes"
if command -v gh >/dev/null; then
    gh release create "v$version" "$wheel" --draft --title "qlora $version" --notes-file "$notes"
else
    echo "There is no \`gh\` here. Make a release v$version on GitHub with the file"
    echo "  $wheel"
    echo "and these notes:"
    echo
    cat "$notes"
fi
