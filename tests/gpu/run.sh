#!/usr/bin/env bash
# The tests that need a GPU, in one command. Usage: tests/gpu/run.sh [gtest arguments]
# Runs the gpu_test that lies beside this script (so that the two can be carried to a machine with a driver and nothing
# else), else that of build/cuda, which it builds first where nvcc and the rest are there. The binary needs glibc and, by
# dlopen, the driver's libcuda.so.1. Likewise what of e2e_test is about GPUs, where it was built; beside it, when carried,
# lie shardd and libshardd.so.0. And PyTorch models (torch/), where python3 has torch for CUDA and the package. Without a GPU every test is skipped, with the reason.
# The last line counts: `N passed, N failed, N skipped`. Status 0: none failed.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
binary=$here/gpu_test e2e=$here/e2e_test
if [[ ! -x $binary ]]; then
  cd "$here/../.." || exit 1
  binary=build/cuda/bin/gpu_test e2e=build/cuda/e2e_test
  log=$(cmake --preset cuda 2>&1 && cmake --build --preset cuda -j "$(nproc)" --target gpu_test e2e_test 2>&1)
  status=$?
  tail -3 <<<"$log"
  ((status == 0)) && [[ -x $binary ]] || { echo "tests/gpu/run.sh: no gpu_test was built"; echo "0 passed, 1 failed, 0 skipped"; exit 1; }
fi
command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version,persistence_mode,compute_mode,clocks.max.mem --format=csv
work=$(mktemp -d)
mps_runs=
trap '[[ -z $mps_runs ]] || echo quit | timeout 20 "$mps"; rm -rf "$work"' EXIT
# NCCL as pip installs it, where python3 finds it; SHARDD_NCCL_LIBRARY names another one.
while [[ -z ${SHARDD_NCCL_LIBRARY:-} ]] && read -r folder; do
  [[ -e $folder/nvidia/nccl/lib/libnccl.so.2 ]] && export SHARDD_NCCL_LIBRARY=$folder/nvidia/nccl/lib/libnccl.so.2
done < <(python3 -c 'import sys; print(*sys.path, sep="\n")' 2>/dev/null)
passed=0 failed=0 skipped=0
count() { grep -oE "^\[  $1 *\] [0-9]+ tests?" "$work/log" | head -1 | tr -dc 0-9; }
# tally STATUS: what $work/log says.
tally() {
  local died=0
  (($1 != 0)) && [[ -z $(count FAILED) ]] && died=1
  ((passed += $(count PASSED || true) + 0, failed += $(count FAILED || true) + died, skipped += $(count SKIPPED || true) + 0))
}
# suite SECONDS ARGUMENTS...: the tests that gtest's arguments name.
suite() {
  timeout -k 10 "$1" "$binary" "${@:2}" 2>&1 | tee "$work/log"
  tally "${PIPESTATUS[0]}"
}
# run_jobs SECONDS ARGUMENTS...: jobs on GPUs, the daemon and its ranks as processes, four at a time. The GPUs are these.
jobs_filter='OnGpus*:*OverGpus*:*SharingOneGpu*:ByStream*:*Offloaded*:OverManyGpus*:ManyPieces*:*ByCopies*:*TrainerSums*:*PassesOnGpus*:*CudaDeath*'
run_jobs() {
  [[ -x $e2e ]] || { echo "jobs: skipped, there is no e2e_test"; ((++skipped)); return; }
  local pids=() i
  for i in 0 1 2 3; do
    GTEST_TOTAL_SHARDS=4 GTEST_SHARD_INDEX=$i SHARDD_TEST_GPU=real \
      timeout -k 10 "$1" "$e2e" --gtest_filter="$jobs_filter" "${@:2}" >"$work/jobs.$i" 2>&1 &
    pids+=($!)
  done
  for i in 0 1 2 3; do
    wait "${pids[i]}"
    local status=$?
    tee "$work/log" <"$work/jobs.$i"
    tally $status
  done
}
# PyTorch models; its last line counts.
run_torch() {
  local package=$here/../../client/python/src bin=$here why status
  [[ -x $bin/shardd ]] || bin=$here/../../build/cuda/bin
  export PYTHONPATH=$package:${PYTHONPATH:-}
  why=$(python3 -c 'import torch, pytest, shardd.torch; assert torch.cuda.is_available(), "torch sees no GPU"' 2>&1) ||
    { echo "PyTorch: skipped: ${why##*$'\n'}"; ((++skipped)); return; }
  SHARDD_BIN=$bin timeout -k 10 280 python3 -m pytest -q "$here/torch" 2>&1 | tee "$work/log"
  status=${PIPESTATUS[0]}
  last() { tail -1 "$work/log" | grep -oE "[0-9]+ $1" | tr -dc 0-9; }
  ((passed += $(last passed || true) + 0, failed += $(last failed || true) + (status > 1), skipped += $(last skipped || true) + 0))
}
# Whatever runs on this machine, MPS is off in a process whose pipes lie where no server is.
export CUDA_MPS_PIPE_DIRECTORY=$work/mps CUDA_MPS_LOG_DIRECTORY=$work/mps SHARDD_GPU_MPS=off
mkdir "$work/mps"
suite 240 "$@"
run_jobs 180 "$@"
run_torch
# And once more where processes share the GPU by MPS, with a server of our own.
mps=$(PATH=$PATH:/usr/local/nvidia/bin command -v nvidia-cuda-mps-control)
if [[ -z $mps ]]; then
  echo "with MPS: skipped, there is no nvidia-cuda-mps-control"
elif ! why=$(timeout 20 "$mps" -d 2>&1); then
  echo "with MPS: skipped, nvidia-cuda-mps-control -d does not start: $why"
else
  mps_runs=1
  echo "with MPS:"
  SHARDD_GPU_MPS=on suite 100 --gtest_filter='*DeviceTest*:*DriverTest*:Collectives*:*HandOff*:*Overlap*:*Killed*:Surroundings*' "$@"
  SHARDD_GPU_MPS=on run_jobs 120 "$@"
fi
if ((passed == 0)) && command -v nvidia-smi >/dev/null && [[ -n $(nvidia-smi -L 2>/dev/null) ]]; then
  echo "tests/gpu/run.sh: there is a GPU, and nothing has run on it"
  failed=1
fi
echo "$passed passed, $failed failed, $skipped skipped"
exit $((failed > 0))
