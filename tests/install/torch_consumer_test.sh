#!/usr/bin/env bash
# find_package(shardd COMPONENTS torch) as a libtorch trainer's project meets it: installs a build into a fresh prefix, builds
# the adaptor from its installed sources against the libtorch of .venv, trains. Status 77: no libtorch to build against.
# Usage: torch_consumer_test.sh <source> <build folder> <c++ compiler>
set -euo pipefail
source=$1 build=$2 cxx=$3
skip() {
  echo "SKIP: $*"
  exit 77
}
torch=$(compgen -G "$source/.venv/lib/python3*/site-packages/torch" | head -1) || skip "no torch in $source/.venv (deploy/bootstrap.sh installs it)"
[[ -e $torch/share/cmake/Torch/TorchConfig.cmake ]] || skip "$torch has no CMake package"
# The package file of a CUDA wheel stops the configuration of any project without the CUDA toolkit.
! grep -Eq '^cuda[^=]*= *.[0-9]' "$torch/version.py" || command -v nvcc >/dev/null || skip "$torch is built for CUDA and there is no nvcc"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
  echo "torch_consumer_test: $*"
  exit 1
}
cmake --install "$build" --prefix "$work/prefix" >"$work/log" || { cat "$work/log"; fail "cmake --install ended with an error"; }
launcher=()
! command -v ccache >/dev/null || launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
export CCACHE_BASEDIR=$work CCACHE_NOHASHDIR=1 CCACHE_SLOPPINESS=time_macros # the folder has another name each time
cmake -G Ninja -S "$source/client/examples/first_torch" -B "$work/build" -DCMAKE_PREFIX_PATH="$work/prefix;$torch" \
  -DCMAKE_CXX_COMPILER="$cxx" "${launcher[@]}" >"$work/log" 2>&1 && cmake --build "$work/build" -j 2 >>"$work/log" 2>&1 ||
  { cat "$work/log"; fail "a project with find_package(shardd COMPONENTS torch) does not build"; }
# A home of its own, so that no daemon of this user is met.
export XDG_RUNTIME_DIR=$work/run TMPDIR=$work
unset SHARDD_ADDRESS
mkdir -m 700 "$work/run"
export WORLD_SIZE=2 OMP_NUM_THREADS=1
RANK=1 timeout 60 "$work/build/trainer" >"$work/rank1" 2>&1 &
RANK=0 timeout 60 "$work/build/trainer" >"$work/rank0" || fail "rank 0 of the trainer ended with an error"
wait $! || { cat "$work/rank1"; fail "rank 1 of the trainer ended with an error"; }
awk '/^step/ {last = $4; if (!n++) first = $4} END {exit !(n == 5 && last < first / 2)}' "$work/rank0" ||
  { cat "$work/rank0"; fail "the loss did not fall to half"; }
echo "torch_consumer_test: passed"
