#!/usr/bin/env bash
# Installs what is missing, builds a preset, runs its tests.
# Usage: tests/run.sh [preset] [--targets "target..."] [--build-only] [ctest arguments]
#   tests/run.sh                     preset dev, every test
#   tests/run.sh asan -L unit        one label
#   tests/run.sh dev -R e2e/         tests by name
#   tests/run.sh tsan --targets "shardd e2e_test" -R '^e2e/' builds no more than these; --build-only: ends then
# The last line counts test cases: `N passed, N failed` or `N passed, N failed, N skipped`. Status 0: none failed.
# SHARDD_BOOTSTRAP: arguments for deploy/bootstrap.sh, such as --no-torch. SHARDD_CMAKE: for cmake, such as -DSHARDD_TORCH=OFF.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit
preset=dev
if (($#)) && [[ $1 != -* ]]; then
  preset=$1
  shift
fi
targets=() build_only=
while (($#)); do
  case $1 in
    --targets) read -rd '' -a targets <<<"${2-}"; shift 2 ;;
    --build-only) build_only=1; shift ;;
    *) break ;;
  esac
done
start=$SECONDS
phase() { printf '== [%4d s] %s: %s\n' $((SECONDS - start)) "$preset" "$*"; }
give_up() {
  echo "tests/run.sh: $*"
  echo "0 passed, 1 failed"
  exit 1
}

phase bootstrap
# shellcheck disable=SC2086
deploy/bootstrap.sh ${SHARDD_BOOTSTRAP:-} || give_up "bootstrap ended with an error"
phase configure
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# shellcheck disable=SC2086
cmake --preset "$preset" ${SHARDD_CMAKE:-} >"$log" 2>&1 || { cat "$log"; give_up "configure ended with an error"; }
grep -E '^-- shardd: |Warning' "$log"
if grep -q 'built without GPUs' "$log" && [[ ${SHARDD_CMAKE:-} != *SHARDD_GPUS=OFF* ]]; then
  give_up "without NVIDIA's headers there are no tests (deploy/nvidia_headers.sh; or SHARDD_CMAKE=-DSHARDD_GPUS=OFF for a build for CPUs)"
fi
phase build
cmake --build --preset "$preset" -j "$(nproc)" ${targets[@]+--target "${targets[@]}"} >"$log" 2>&1 || { grep -vE '^\[[0-9]+/[0-9]+\] (Build|Link|Gener)' "$log" | head -80; give_up "build ended with an error"; }
[[ -z $build_only ]] || exit 0
phase test
junit=$root/build/$preset/junit.xml
rm -f "$junit"
workers=$(nproc)
[[ $preset == *san ]] || ((workers += 2)) # cases wait most of the time that they do not compute
ctest --preset "$preset" -j "$workers" --output-junit "$junit" "$@" 2>&1 | grep --line-buffered -vE '^ *Start +[0-9]+:|^ *[0-9]+/[0-9]+ .* Passed '
phase "tests ended"
# A test whose binary is missing counts as failed; ctest calls it "not run", as it calls a skipped one.
python3 - "$junit" <<'PYTHON'
import sys, xml.etree.ElementTree as tree
passed, failed, skipped = 0, [], 0
try:
    cases = tree.parse(sys.argv[1]).getroot().findall("testcase")
except (OSError, tree.ParseError) as error:
    print(f"tests/run.sh: read test results: {error}\n0 passed, 1 failed")
    sys.exit(1)
for case in cases:
    skip = case.find("skipped")
    if case.get("status") == "run":
        passed += 1
    elif skip is not None and "SKIP" in (skip.get("message") or ""):
        skipped += 1
    else:
        failed.append(case.get("name"))
for name in failed:
    print("failed:", name)
if not cases:
    failed.append("no test matched")
print(f"{passed} passed, {len(failed)} failed" + (f", {skipped} skipped" if skipped else ""))
sys.exit(1 if failed else 0)
PYTHON
