#!/usr/bin/env bash
# `pip install ./client/python` into a fresh environment; then, in an empty directory, two ranks train with a daemon that they
# start themselves. Usage: python_test.sh <source> [<build folder>]
# With a build folder the wheel takes library and programs from it; without, pip builds everything (minutes).
# Nothing is downloaded: the environment sees the packages of .venv, torch above all, through a .pth file, and pip runs
# without an index. Status 77, with the reason, where .venv has no torch or no scikit-build-core.
set -euo pipefail
source=$(realpath "$1")
build=${2:+$(realpath "$2")}
work=$(mktemp -d)
# Ends the daemon of this test, should it be left.
finish() {
  pkill -KILL -f "^$work/venv/.*/shardd/bin/shardd" 2>/dev/null || true
  rm -rf "$work"
}
trap finish EXIT
fail() {
  echo "python_test: $*"
  exit 1
}
base=$source/.venv/bin/python
for module in torch scikit_build_core pip; do
  [[ -x $base ]] && "$base" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$module') is None)" ||
    { echo "python_test skipped: no $module in .venv; run deploy/bootstrap.sh" && exit 77; }
done

packages=$("$base" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$base" -m venv --without-pip "$work/venv"
python=$work/venv/bin/python
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$packages" >"$site/torch_of_the_project.pth"
options=(--no-index --no-build-isolation --no-cache-dir --disable-pip-version-check)
# Folder and compiler as tests/python/run.sh has them, so that the compiler cache has the files.
[[ -z $build ]] || options+=(--config-settings "cmake.define.SHARDD_BUILD=$build" --config-settings "build-dir=$source/build/python_wheel"
  --config-settings "cmake.define.CMAKE_CXX_COMPILER=$(command -v c++)")
"$base" -m pip --python "$python" install "${options[@]}" "$source/client/python" >"$work/pip.log" 2>&1 ||
  { grep -E 'rror|FAILED' -A3 "$work/pip.log" | head -40 || true; tail -5 "$work/pip.log"; fail "pip install ended with an error"; }

for file in py.typed _C.pyi bin/shardd bin/shardctl lib/libshardd.so.0; do
  [[ -e $site/shardd/$file ]] || fail "$file: not in the wheel"
done
foreign=$(readelf -d "$site"/shardd/_C*.so "$site"/shardd/lib/*.so.0 | grep -E 'RPATH|RUNPATH' | grep -F "$source" || true)
[[ -z $foreign ]] || fail "a run path leads into the source tree (got $foreign)"
# As auditwheel asks: programs and library need glibc alone, of Debian 12 at most; the extension also torch, Python and C++'s library.
glibc='ld-linux-x86-64\.so\.2|lib(c|m|dl|rt|pthread)\.so\.[0-9]+'
for file in "$site"/shardd/bin/* "$site"/shardd/lib/*.so.0 "$site"/shardd/_C*.so; do
  allowed="^($glibc)$"
  [[ $file != */_C*.so ]] || allowed="^($glibc|lib(gcc_s|gomp|stdc\+\+)(-[0-9a-f]+)?\.so\.[0-9.]+|lib(c10|torch[a-z_]*|shardd)\.so(\.0)?)$"
  needs=$(readelf -d "$file" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
  [[ -n $needs ]] || fail "${file##*/}: no needs of it can be read"
  foreign=$(grep -vE "$allowed" <<<"$needs" || true)
  [[ -z $foreign ]] || fail "${file##*/} needs what a machine may not have (got ${foreign//$'\n'/, })"
  newest=$(readelf -V "$file" | grep -oE 'GLIBC_[0-9.]+' | sort -uV | tail -1)
  [[ $(printf '%s\nGLIBC_2.36\n' "$newest" | sort -V | tail -1) == GLIBC_2.36 ]] || fail "${file##*/} needs $newest (want GLIBC_2.36 at most)"
done
version=$(sed -n 's/.*kVersion\[\] = "\(.*\)".*/\1/p' "$source/common/version.h")
"$python" -m venv --without-pip "$work/bare"
PYTHONPATH=$site "$work/bare/bin/python" -c 'import shardd' 2>"$work/bare.log" && fail "import without torch works"
grep -q 'ImportError: import shardd: wrong torch (got none, want 2.13.0); install shardd again' "$work/bare.log" ||
  fail "import without torch: $(tail -1 "$work/bare.log")"

# From here on nothing of the source tree, and a home of its own, so that no daemon of this user is met.
unset SHARDD_ADDRESS SHARDD_DAEMON SHARDD_JOB PYTHONPATH
export XDG_RUNTIME_DIR=$work/run TMPDIR=$work PATH=$work/venv/bin:/usr/bin:/bin OMP_NUM_THREADS=1
mkdir -m 700 "$work/run"
cp "$source/tests/install/consumer/train.py" "$work/run/"
cd "$work/run"
[[ $(shardctl --version) == *"$version"* ]] || fail "shardctl --version does not give the version"
[[ $(python -c 'import shardd, importlib.metadata as m; print(shardd.__version__, m.version("shardd"))') == "$version $version" ]] ||
  fail "shardd.__version__ is not the version"
timeout -k 5 200 python -m torch.distributed.run --standalone --nproc-per-node=2 train.py >"$work/train.log" 2>&1 ||
  { tail -40 "$work/train.log"; fail "training ended with an error"; }
grep -q 'rank 0: 12 steps are those of the unsharded model' "$work/train.log" || fail "training: $(tail -3 "$work/train.log")"
daemon=$(sed -n 's/.*daemon: //p' "$work/train.log")
[[ $daemon == "$site/shardd/bin/shardd" ]] || fail "the daemon is not the one of the wheel (got \"$daemon\")"
echo "python_test: passed"
