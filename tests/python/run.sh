#!/usr/bin/env bash
# Builds the extension of the Python package against a build of the project, and runs tests/python with it. The last lines
# count test cases: `N passed, N failed` or `N passed, N failed, N skipped`.
# Usage: tests/python/run.sh <build folder> [--build-only | pytest arguments]
# Without arguments all cases run, several at a time (pytest-xdist).
# Status 77, with the reason: something that deploy/bootstrap.sh installs is missing.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
build=$(realpath "${1:?usage: tests/python/run.sh <build folder> [--build-only | pytest arguments]}")
shift
cd "$root"
python=${SHARDD_PYTHON:-.venv/bin/python}              # of which torch (torch_versions.sh)
python_build=${SHARDD_PYTHON_BUILD:-build/python}
skip() {
  echo "tests/python skipped: $*; run deploy/bootstrap.sh"
  echo "0 passed, 0 failed, 1 skipped"
  exit 77
}
[[ -x $python ]] || skip "no .venv"
needs=(torch pytest)
[[ ${1:-} != --build-only ]] || needs=(torch)
for module in "${needs[@]}"; do
  "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$module') is None)" || skip "no $module in .venv"
done
for file in bin/shardd bin/shardctl lib/libshardd.so; do
  [[ -e $build/$file ]] || { echo "tests/python: $build/$file is not built" && exit 1; }
done

log=$build/python_extension.log
{ cmake -S client/python -B "$python_build" -G Ninja -DSHARDD_BUILD="$build" -DPython3_EXECUTABLE="$root/$python" &&
  cmake --build "$python_build" -j "$(nproc)"; } >"$log" 2>&1 ||
  { grep -E 'rror|FAILED' -A3 "$log" | head -40 && echo "tests/python: the extension does not build (log: $log)" && exit 1; }
[[ ${1:-} != --build-only ]] || exit 0

export SHARDD_DAEMON=$build/bin/shardd
unset PYTHONDONTWRITEBYTECODE # every rank would compile the package anew
if ((!$#)); then
  set -- tests/python --durations=8
  # Cases wait for each other and for limits most of the time that they do not compute: one more than cores.
  workers=$(($(nproc) + 1))
  "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('xdist') is None)" &&
    set -- "$@" -n "$((workers < 8 ? workers : 8))"
fi
exec "$python" -m pytest -q -o cache_dir="$build/pytest_cache" "$@"
