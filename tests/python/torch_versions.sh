#!/usr/bin/env bash
# Runs tests/python with other versions of torch: the oldest and the newest that client/python/CMakeLists.txt names, or those that
# are given. Each gets a virtual environment of its own in .cache, of up to 6 GB where its build for CPUs cannot be had. The last
# line counts test cases, and as skipped each version that cannot be installed.
# Usage: tests/python/torch_versions.sh <build folder> [version...] [-- pytest arguments]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
build=$(realpath "${1:?usage: tests/python/torch_versions.sh <build folder> [version...] [-- pytest arguments]}")
shift
cd "$root"
versions=()
while (($#)) && [[ $1 != -- ]]; do
  versions+=("$1")
  shift
done
(($#)) && shift
((${#versions[@]})) || mapfile -t versions < <(sed -nE 's/^set\((oldest|newest)_torch (.*)\)$/\2/p' client/python/CMakeLists.txt)
# The extension lies in the source tree, where a build folder takes another torch's for its own: it is made anew each time, and
# the last one is the one that everything else expects.
forget() { rm -f client/python/src/shardd/_C.*.so; }
trap 'forget; tests/python/run.sh "$build" --build-only' EXIT

passed=0 failed=0 skipped=0
for version in "${versions[@]}"; do
  venv=.cache/torch-$version
  log=$build/torch-$version.log
  if ! "$venv/bin/python" -c "import torch, pytest, xdist; assert torch.__version__.split('+')[0] == '$version'" 2>/dev/null; then
    echo "installing torch $version into $venv"
    /usr/bin/python3 -m venv "$venv"
    "$venv/bin/python" -m pip install --extra-index-url https://download.pytorch.org/whl/cpu "torch==$version+cpu" numpy pytest pytest-xdist >"$log" 2>&1 ||
      "$venv/bin/python" -m pip install "torch==$version" numpy pytest pytest-xdist >"$log" 2>&1 || {
      echo "torch $version skipped: $(grep ERROR "$log" | tail -1)"
      skipped=$((skipped + 1))
      continue
    }
  fi
  echo "torch $version"
  forget
  SHARDD_PYTHON=$venv/bin/python SHARDD_PYTHON_BUILD=build/python-$version tests/python/run.sh "$build" "$@" | tee "$log" || true
  counted=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$log" | tail -1)
  [[ -n $counted ]] || counted="0 passed, 1 failed" # it did not come to its end
  read -r p f <<<"$(sed -E 's/^([0-9]+) passed, ([0-9]+) failed.*/\1 \2/' <<<"$counted")"
  passed=$((passed + p)) failed=$((failed + f))
done
echo "$passed passed, $failed failed, $skipped skipped"
((failed == 0))
