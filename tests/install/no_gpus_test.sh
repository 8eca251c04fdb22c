#!/usr/bin/env bash
# A build where NVIDIA's headers are missing, or are others than the source wants, is one for CPUs that says so, and what
# differs in it compiles (.ci/run no_gpus links and runs it).
# Usage: no_gpus_test.sh <source> <C++ compiler> <folder of the headers, with include/>
set -uo pipefail
source=$1 compiler=$2 nvidia=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
  echo "no_gpus_test: $*"
  tail -40 "$work"/*.log
  exit 1
}
configure() { # what is to be said, then arguments of cmake
  CUDA_HOME="" cmake -S "$source" -B "$work/build" -G Ninja -DCMAKE_CXX_COMPILER="$compiler" -DSHARDD_TORCH=OFF -DSHARDD_CUDA=OFF \
    "${@:2}" >"$work/configure.log" 2>&1 || fail "cmake ${*:2}: it ended with an error"
  tr -s ' \n' ' ' <"$work/configure.log" | grep -qE -- "$1" || fail "cmake ${*:2}: it does not say \"$1\""
}

if [[ ! -e /usr/local/cuda/include/nccl.h && ! -e /usr/include/nccl.h ]]; then # else that is found
  configure 'built without GPUs, and without tests, because NVIDIA.s headers were not found' -DSHARDD_NVIDIA_DIR="$work/none"
fi
mkdir -p "$work/other/include"
cp -rs "$nvidia/include/." "$work/other/include/"
rm "$work/other/include/nccl.h"
sed -E 's/(define NCCL_VERSION_CODE) .*/\1 29900/' "$nvidia/include/nccl.h" >"$work/other/include/nccl.h"
configure 'built without GPUs, and without tests, because NVIDIA.s headers do not fit' -DSHARDD_NVIDIA_DIR="$work/other"
grep -q 'nccl.h of the oldest NCCL that is taken' "$work/build/nvidia_headers.log" || fail "the compiler's words are not kept"
# Mended, and the same folder is tried again.
cp "$nvidia/include/nccl.h" "$work/other/include/nccl.h"
touch -d '2001-01-01' "$work/other/include/nccl.h"
configure 'Build files have been written' -DSHARDD_NVIDIA_DIR="$work/other"
! grep -q 'without GPUs' "$work/configure.log" || fail "headers that fit were not taken"

configure 'built without GPUs, and without tests, as SHARDD_GPUS=OFF asks for' -DSHARDD_GPUS=OFF
mapfile -t objects < <(ninja -C "$work/build" -t targets all | grep -oE '^[^:]*/(no_gpus|collectives|core_nodes|devices)\.cc\.o')
((${#objects[@]} >= 5)) || fail "fewer objects than there are sources that differ: ${objects[*]}"
cmake --build "$work/build" -j 2 --target "${objects[@]}" >"$work/build.log" 2>&1 || fail "a build without GPUs does not compile"
