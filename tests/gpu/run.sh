#!/usr/bin/env bash
# The tests that need a GPU, in one command. Usage: tests/gpu/run.sh [gtest arguments]
# Runs the gpu_test that lies beside this script (so that the two can be carried to a machine with a driver and nothing
# else), else that of build/cuda, which it builds first where nvcc and the rest are there. The binary needs glibc and, by
# dlopen, the driver's libcuda.so.1. Without a GPU every test is skipped, with the reason.
# The last line counts: `N passed, N failed, N skipped`. Status 0: none failed.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
binary=$here/gpu_test
if [[ ! -x $binary ]]; then
  cd "$here/../.." || exit 1
  binary=build/cuda/bin/gpu_test
  cmake --preset cuda >/dev/null && cmake --build --preset cuda -j "$(nproc)" --target gpu_test | tail -3
  [[ -x $binary ]] || { echo "tests/gpu/run.sh: no gpu_test was built"; echo "0 passed, 1 failed, 0 skipped"; exit 1; }
fi
command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version,persistence_mode,compute_mode,clocks.max.mem --format=csv
log=$(mktemp)
trap 'rm -f "$log"' EXIT
timeout -k 10 540 "$binary" "$@" 2>&1 | tee "$log"
status=${PIPESTATUS[0]}
count() { grep -oE "^\[  $1 *\] [0-9]+ tests?" "$log" | head -1 | tr -dc 0-9; }
passed=$(count PASSED) failed=$(count FAILED) skipped=$(count SKIPPED)
((status != 0 && ${failed:-0} == 0)) && failed=1 # it died
echo "${passed:-0} passed, ${failed:-0} failed, ${skipped:-0} skipped"
exit "$status"
