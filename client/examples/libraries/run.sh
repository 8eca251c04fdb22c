#!/usr/bin/env bash
# Runs programs of this folder under torchrun twice, on PyTorch's FSDP and, unchanged, on shardd, and compares losses and files.
# Usage: client/examples/libraries/run.sh [--forked] [--keep FOLDER] [name...]    names: --list; without: all of these
#        client/examples/libraries/run.sh --install    what the names of --list-more need, into .cache/libraries
# --forked: those of --list without torchrun, by ranks that are forked where the libraries have been imported once: half of the time.
# Needs what deploy/bootstrap.sh installs, and shardd installed or built (tests/python/run.sh build/dev --build-only).
# Status 0: all are alike. 1: one differs or failed. 77: a library is not installed, and nothing failed.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../../.." && pwd)
python=$root/.venv/bin/python
[[ -x $python ]] || python=python3
declare -A programs=(
  [accelerate]="with_accelerate.py --version 2"
  [trainer]="with_trainer.py --version 2"
  [lightning]="with_lightning.py --strategy model_parallel"
  [torchtitan]="torchtitan_way.py"
  # The same with FullyShardedDataParallel.
  [accelerate1]="with_accelerate.py --version 1"
  [trainer1]="with_trainer.py --version 1"
  [lightning1]="with_lightning.py --strategy fsdp"
  # Run where they are named: deploy/bootstrap.sh does not install what these need, --install does.
  [peft]="with_peft.py --version 2"
  [peft1]="with_peft.py --version 1"
  [trl]="with_trl.py"
  [trl_lora]="with_trl.py --lora"
  [torchtune]="with_torchtune.py"
  [float8]="with_torchao.py"
  [qlora]="with_torchao.py --qlora"
  [titan]="with_torchtitan.py"
)
declare -A needs=([accelerate]="accelerate transformers" [trainer]="accelerate transformers" [lightning]="lightning transformers" [torchtitan]="torch"
  [peft]="peft accelerate transformers" [trl]="trl peft datasets" [trl_lora]="trl peft datasets" [torchtune]="torchtune torchao"
  [float8]="torchao" [qlora]="torchao" [titan]="torchtitan triton datasets")
usual=(torchtitan accelerate trainer lightning accelerate1 trainer1 lightning1)
more=(peft peft1 trl trl_lora torchtune float8 qlora titan)
order=("${usual[@]}")
# Beside .venv, whose packages they use and do not change. The folder's last name is how dill knows what not to pickle by value.
extra=$root/.cache/libraries/site-packages
extra_torchtune=$root/.cache/libraries/torchtune/site-packages
extra_torchao=$root/.cache/libraries/torchao/site-packages
extra_torchtitan=$root/.cache/libraries/torchtitan/site-packages
install() {
  rm -rf "$extra" "$extra_torchtune" "$extra_torchao" "$extra_torchtitan"
  "$python" -m pip install --no-deps --target "$extra" -r "$here/requirements_more.txt" &&
    "$python" -m pip install --no-deps --target "$extra_torchtune" -r "$here/requirements_torchtune.txt" &&
    "$python" -m pip install --no-deps --target "$extra_torchao" -r "$here/requirements_torchao.txt" &&
    "$python" -m pip install --no-deps --target "$extra_torchtitan" -r "$here/requirements_torchtitan.txt"
}

keep='' forked=''
while [[ ${1:-} == --* ]]; do
  case $1 in
    --forked) forked=1 && shift ;;
    --keep) keep=$2 && shift 2 ;;
    --list) printf '%s\n' "${usual[@]}" && exit 0 ;;
    --list-more) printf '%s\n' "${more[@]}" && exit 0 ;;
    --install) install && exit 0 || exit 1 ;;
    *) echo "usage: run.sh [--list|--list-more|--install] [--forked] [--keep FOLDER] [name...]" >&2 && exit 2 ;;
  esac
done
(($#)) && order=("$@")
"$python" -c 'import shardd' 2>/dev/null || export PYTHONPATH=$root/client/python/src${PYTHONPATH:+:$PYTHONPATH}
path=${PYTHONPATH:-}
work=${keep:-$(mktemp -d)}
mkdir -p "$work"
[[ -n $keep ]] || trap 'rm -rf "$work"' EXIT
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 TORCH_CPP_LOG_LEVEL=ERROR PYTHONWARNINGS=ignore
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}

# run folder log [-m shardd.torch ...] program...: in a folder of its own, so that paths in files are alike.
run() {
  local folder=$1 log=$2
  shift 2
  rm -rf "$folder" && mkdir -p "$folder"
  (cd "$here" && exec timeout -k 10 300 "$python" -m torch.distributed.run --standalone --nproc-per-node=2 "$@" --out "$folder") >"$log" 2>&1 ||
    { grep -vE '^[WE][0-9]{4}' "$log" | tail -40 && return 1; }
}
failed=0 skipped=0
for name in "${order[@]}"; do
  [[ -n ${programs[$name]:-} ]] || { echo "run.sh: no such program: $name" >&2 && exit 2; }
  export PYTHONPATH=$path
  if [[ " ${more[*]} " == *" $name "* ]]; then
    PYTHONPATH=$extra${path:+:$path}
    [[ $name != torchtune ]] || PYTHONPATH=$extra_torchtune:$PYTHONPATH
    [[ $name != float8 && $name != qlora ]] || PYTHONPATH=$extra_torchao:$PYTHONPATH
    [[ $name != titan ]] || PYTHONPATH=$extra_torchtitan:$PYTHONPATH
  fi
  missing=
  for module in ${needs[${name%1}]}; do
    "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$module') is None)" || missing+=" $module"
  done
  [[ -z $missing ]] || { echo "$name: skipped, not installed:$missing; run deploy/bootstrap.sh, or run.sh --install for those of --list-more" && skipped=1 && continue; }
  read -ra program <<<"${programs[$name]}"
  if [[ -n $forked && " ${usual[*]} " == *" $name "* ]]; then
    (cd "$here" && exec "$python" forked.py "$name" "$work" "${program[@]}") || failed=1
    continue
  fi
  rm -f "$work/$name.counts"
  run "$work/$name.pytorch" "$work/$name.pytorch.log" "${program[@]}" &&
    run "$work/$name.shardd" "$work/$name.shardd.log" -m shardd.torch --counts "$work/$name.counts" "${program[@]}" &&
    "$python" "$here/compare.py" "$name" "$work/$name.pytorch" "$work/$name.shardd" "$work/$name.counts" || failed=1
done
((failed)) && exit 1
((skipped)) && exit 77
exit 0
