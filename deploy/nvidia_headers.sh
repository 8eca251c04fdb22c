#!/usr/bin/env bash
# Puts NVIDIA's headers that shardd is compiled with into .cache/nvidia/include (or $SHARDD_NVIDIA_DIR/include): cuda.h with
# what it needs, and nccl.h. They are taken out of NVIDIA's packages on PyPI, of pinned versions with checked sums; the
# libraries in these are left out, as shardd finds the machine's own at run time. One package is 197 MB for one header.
#
# Needs no root. Idempotent; returns at once when up to date. Nothing of the packages is run. Status 1: a package is not to be
# had, or the folder cannot be written, and nothing is changed; CMake then builds without GPUs, and says so
# (deploy/cmake/nvidia.cmake). A build that runs meanwhile sees the headers before, none, or the new ones, never half of them.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=${SHARDD_NVIDIA_DIR:-$root/.cache/nvidia}
# The oldest NCCL that shardd takes: what is declared, every later library has. The sums are those of the wheels for x86-64;
# the headers are the same for every processor.
packages="\
nvidia-cuda-runtime==13.0.96 --hash=sha256:7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548
nvidia-cuda-crt==13.0.88 --hash=sha256:2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4
nvidia-cuda-cccl==13.0.85 --hash=sha256:e0da7ad981f3a8aff08241b5bfc1af868742a63e2762f53a5171c492ef242649
nvidia-nccl-cu13==2.28.9 --hash=sha256:e4553a30f34195f3fa1da02a6da3d6337d28f2003943aa0a3d247bbc25fefc42"
is_there() { [[ -s $out/include/nccl.h && -f $out/stamp && $(<"$out/stamp") == "$packages" ]]; }
is_there && exit 0

fail() { echo "nvidia_headers: $*; without these headers shardd is built without GPUs" >&2 && exit 1; }
if ! { mkdir -p "$out" && : >>"$out/lock"; } 2>/dev/null; then fail "$out: cannot be written"; fi
exec 9>>"$out/lock"
flock 9 # two builds that start together: the second one finds the work done
is_there && exit 0
work=$(mktemp -d "${TMPDIR:-/tmp}/shardd_nvidia.XXXXXX")
trap 'rm -rf "$work" "$out/new"' EXIT
python=
for candidate in "$root/.venv/bin/python" "${SHARDD_PYTHON:-python3}" /usr/bin/python3; do
  if "$candidate" -m pip --version >/dev/null 2>&1; then python=$candidate; break; fi
done
if [[ -z $python ]]; then # Debian's own interpreter has none
  /usr/bin/python3 -m venv "$work/venv" || fail "no pip was found (looked in .venv and for python3 -m pip)"
  python=$work/venv/bin/python
fi
echo "nvidia_headers: taking $(cut -d " " -f 1 <<<"$packages" | paste -sd " ")"
echo "$packages" >"$work/requirements"
if ! "$python" -m pip --disable-pip-version-check --no-input download --no-deps --require-hashes --only-binary :all: \
  --no-cache-dir --platform manylinux2014_x86_64 --platform manylinux_2_18_x86_64 --dest "$work/wheels" -r "$work/requirements" \
  >"$work/log" 2>&1; then
  tail -5 "$work/log" >&2
  fail "download from PyPI: pip returned an error (above)"
fi
rm -rf "$out/new" # of one that was killed
"$python" - "$out/new" "$work"/wheels/*.whl <<'PYTHON'
import pathlib, re, sys, zipfile

wanted = re.compile(r"nvidia/(?:cu13|nccl)/include/((?:crt/)?\w+\.(?:h|hpp)|nv/[\w/]+)")
for wheel in sys.argv[2:]:
    with zipfile.ZipFile(wheel) as packed:
        for name in packed.namelist():
            if found := wanted.fullmatch(name):
                path = pathlib.Path(sys.argv[1], found[1])
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(packed.read(name))
PYTHON
for header in cuda.h cudaTypedefs.h cuda_runtime.h crt/host_config.h nv/target nccl.h; do
  [[ -s $out/new/$header ]] || fail "$header is in none of the packages"
done
rm -rf "$out/stamp" "$out/include"
mv "$out/new" "$out/include" # of one file system, so as a whole
echo "$packages" >"$out/stamp"
