#!/usr/bin/env bash
# xeus 2.4 into /usr/local where the distribution has another or none (Kaggle's Ubuntu 22.04 has 1.0): what `make install` builds the
# native kernel with. Needs root and internet; half a minute on two cores. kaggle/xeus.sh [SOURCE FOLDER]
set -euo pipefail
version=2.4.1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
apt-get update -qq
apt-get install -y -qq --no-install-recommends cmake make g++ git libzmq3-dev cppzmq-dev nlohmann-json3-dev xtl-dev uuid-dev libssl-dev python3-dev >/dev/null
from=${1:-$work/xeus}
[ -d "$from" ] || git clone -q --depth 1 --branch "$version" https://github.com/jupyter-xeus/xeus "$from"
cmake -S "$from" -B "$work/build" -DCMAKE_BUILD_TYPE=Release -DXEUS_BUILD_TESTS=OFF -DCMAKE_INSTALL_PREFIX=/usr/local -DCMAKE_INSTALL_LIBDIR=lib >/dev/null
make -s -C "$work/build" -j"$(nproc)" install >/dev/null
ldconfig
