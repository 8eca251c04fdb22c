#!/usr/bin/env bash
# deploy/nvidia_headers.sh where something is wrong: it ends with status 1, says what, and what was there stays. Without a network.
# Usage: nvidia_headers_test.sh <source> <folder of the headers, with include/>
set -uo pipefail
source=$1 nvidia=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work SHARDD_NVIDIA_DIR=$work/out PIP_RETRIES=0 PIP_CONFIG_FILE=/dev/null
fail() {
  echo "nvidia_headers_test: $*"
  cat "$work"/*.log
  exit 1
}
refuses() { # what is to be said, then variables
  env "${@:2}" "$source/deploy/nvidia_headers.sh" >"$work/refused.log" 2>&1
  local status=$?
  ((status == 1)) || fail "status $status with ${*:2} (want 1)"
  grep -qE -- "$1" "$work/refused.log" || fail "with ${*:2} it does not say \"$1\""
  grep -q 'without these headers shardd is built without GPUs' "$work/refused.log" || fail "it does not say what follows"
  local left
  left=$(find "$work/out" -type f ! -name lock 2>/dev/null | wc -l)
  ((left == files)) || fail "with ${*:2} there are $left files now (want $files)"
  [[ -z $(find "$work" -maxdepth 1 -name 'shardd_nvidia.*') ]] || fail "with ${*:2} it leaves its folder behind"
}
offline=PIP_INDEX_URL=http://127.0.0.1:9/simple

files=0
refuses 'download from PyPI: pip returned an error' $offline
refuses '/proc/none: cannot be written' SHARDD_NVIDIA_DIR=/proc/none
# A package of that name and version, and other bytes.
mkdir "$work/wheels"
: >"$work/wheels/nvidia_cuda_runtime-13.0.96-py3-none-manylinux2014_x86_64.whl"
refuses 'DO NOT MATCH THE HASHES' PIP_NO_INDEX=1 PIP_FIND_LINKS="$work/wheels"
# Headers of an earlier version stay until there are new ones.
mkdir -p "$work/out/include"
echo old >"$work/out/include/nccl.h"
echo old >"$work/out/stamp"
files=2
refuses 'download from PyPI' $offline
grep -q old "$work/out/include/nccl.h" || fail "the headers before are gone"

# Of two that start together the second one finds the work done.
exec 9>>"$work/out/lock"
flock 9
env $offline "$source/deploy/nvidia_headers.sh" >"$work/second.log" 2>&1 9>&- &
second=$!
sleep 0.5
kill -0 $second 2>/dev/null || fail "it does not wait for the one before"
cp "$nvidia/stamp" "$work/out/stamp"
exec 9>&-
wait $second || fail "the second one ended with status $?"
