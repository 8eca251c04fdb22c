#!/usr/bin/env bash
# The whole of shardd in one go, on a bare Debian 12 too: builds it, starts a daemon with one CPU device per rank, trains a
# character model with one trainer process per device on the license texts of this machine, kills a trainer with SIGKILL
# half-way, starts its replacement, and at the end compares with the same model trained unsharded on the same data.
#
#   deploy/quickstart.sh [--ranks N] [--steps N] [--bin DIR] [--out DIR] [-- flags of the gpt example]
#
# --bin: takes shardd, shardctl and gpt from there and builds nothing. Leaves loss.svg and the JSON lines in --out
# (build/quickstart), nothing else; Ctrl-C ends everything that it started.
# Status 0: the replacement went on, and the losses are equal within rounding.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
ranks=2
steps=1000
build=1
out=$root/build/quickstart
bin=$root/build/release/bin
# About 0.8 million parameters, so that the text becomes readable in a minute on two cores.
model=(--layers 4 --width 128 --heads 4 --context 64 --batch 8 --lr 1e-3)
while (($#)); do
  case $1 in
    --ranks) ranks=${2:?--ranks: value missing} && shift ;;
    --steps) steps=${2:?--steps: value missing} && shift ;;
    --bin) bin=$(cd "${2:?--bin: value missing}" && pwd) && build=0 && shift ;;
    --out) out=$(realpath -m "${2:?--out: value missing}") && shift ;;
    --) shift && model+=("$@") && break ;;
    *) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" >&2 && exit 2 ;;
  esac
  shift
done
((ranks >= 1 && steps >= 10)) || { echo "quickstart: --ranks must be at least 1 and --steps at least 10" >&2 && exit 2; }

say() { printf '\n== [%3d s] %s\n' $SECONDS "$*"; }
run=
pids=()  # by rank, then the daemon

# Everything this script started ends with it, however it ends.
finish() {
  local status=$?
  trap '' INT TERM HUP
  trap - EXIT
  if ((${#pids[@]})); then
    kill -TERM "${pids[@]}" 2>/dev/null || true
    for ((tenths = 0; tenths < 50; ++tenths)); do
      kill -0 "${pids[@]}" 2>/dev/null || break
      sleep 0.1
    done
    kill -KILL "${pids[@]}" 2>/dev/null || true
    wait "${pids[@]}" 2>/dev/null || true
  fi
  [[ -z $run ]] || rm -rf "$run"
  exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
die() { echo "quickstart: $*" >&2 && exit 1; }

if ((build)); then
  say "dependencies (deploy/bootstrap.sh)"
  deploy/bootstrap.sh
  say "build, preset release"
  mkdir -p build
  cmake --preset release >build/quickstart.log 2>&1 || { tail -20 build/quickstart.log && die "configure: cmake returned an error"; }
  cmake --build --preset release --target shardd shardctl gpt -- -j "$(nproc)" >build/quickstart.log 2>&1 ||
    { grep -E 'error|FAILED' -A3 build/quickstart.log | head -40 && die "build: see build/quickstart.log"; }
fi
[[ -x $bin/gpt && -x $bin/shardd ]] || die "$bin/gpt: not built"

rm -rf "$out"
mkdir -p "$out"
run=$(mktemp -d "${TMPDIR:-/tmp}/shardd-quickstart.XXXXXX") # the socket's
export SHARDD_ADDRESS=unix:$run/socket
export WORLD_SIZE=$ranks OMP_NUM_THREADS=1
plot() { python3 "$root/client/examples/gpt/plot.py" "$@"; }

say "daemon with $ranks CPU devices"
"$bin/shardd" --devices="cpu:$ranks" --listen="$SHARDD_ADDRESS" >"$out/daemon.log" 2>&1 &
daemon=$!
pids[ranks]=$daemon
for ((tenths = 0; tenths < 100; ++tenths)); do
  [[ -S $run/socket ]] && break
  kill -0 $daemon 2>/dev/null || { cat "$out/daemon.log" && die "daemon: ended at once"; }
  sleep 0.1
done
[[ -S $run/socket ]] || die "daemon: does not listen after 10 s"

# start RANK [flags]: rank 0 talks, the others only note.
start() {
  local rank=$1 log_every=0
  shift
  ((rank == 0)) && log_every=$((steps / 12))
  RANK=$rank "$bin/gpt" "${model[@]}" --steps "$steps" --job quickstart --out "$out/rank$rank.jsonl" \
    --log_every "$log_every" "$@" 2>&1 &
  pids[rank]=$!
}
# The last step that some rank has seen committed.
last_step() {
  local step
  step=$(tail -qn 1 "${files[@]}" 2>/dev/null | sed -n 's/.*"step":\([0-9]*\).*/\1/p' | sort -n | tail -n 1) || true
  echo "${step:-0}"
}
# Waits until some rank has committed step $1.
await_step() {
  while (($(last_step) < $1)); do
    kill -0 "${pids[0]}" 2>/dev/null || die "rank 0 ended before step $1"
    sleep 0.2
  done
}
files=()
for ((rank = 0; rank < ranks; ++rank)); do files+=("$out/rank$rank.jsonl"); done

say "$ranks trainers, $steps steps"
training=$SECONDS
for ((rank = 0; rank < ranks; ++rank)); do start $rank --sample 400; done

victim=$((ranks - 1))
await_step $((steps / 2))
say "memory of the job, by purpose (shardctl memory)"
"$bin/shardctl" --address "$SHARDD_ADDRESS" memory quickstart || "$bin/shardctl" --address "$SHARDD_ADDRESS" memory || true
say "SIGKILL to the trainer of rank $victim (pid ${pids[victim]}) at step $(last_step)"
killed=$(date +%s.%N)
kill -KILL "${pids[victim]}"
wait "${pids[victim]}" 2>/dev/null || true
echo "starting its replacement"
start $victim --sample 400
await_step $((steps / 2 + 2))

for ((rank = 0; rank < ranks; ++rank)); do
  wait "${pids[rank]}" || die "rank $rank ended with an error (see above)"
done
echo "training took $((SECONDS - training)) s"
events=$(grep -h '"event"' "${files[@]}" | python3 -c '
import json, sys
for line in sorted(map(json.loads, sys.stdin), key=lambda e: e["time"]):
    print("  rank %d %-10s at committed step %d" % (line["rank"], line["event"], line["committed_step"]))')
echo "$events"
echo "from SIGKILL to the next step committed with the replacement: $(plot recovery "${files[@]}" --after "$killed") s
  (start of a new process, libtorch and model included)"

kill -TERM $daemon
wait $daemon || die "daemon ended with an error; see $out/daemon.log"
unset 'pids[ranks]'

say "the same model unsharded, one process on the data of all ranks"
"$bin/gpt" "${model[@]}" --steps "$steps" --reference --rank 0 --ranks "$ranks" \
  --out "$out/reference.jsonl" --log_every $((steps / 4)) &
pids=($!)
wait "${pids[0]}" || die "the unsharded run ended with an error"
pids=()

say "loss (* sharded, o unsharded)"
joined=$(IFS=, && echo "${files[*]}")
plot chart "$joined" "$out/reference.jsonl" --svg "$out/loss.svg" --label sharded --label unsharded
echo "as SVG: $out/loss.svg"
say "comparison"
plot compare "$joined" --reference "$out/reference.jsonl" --tolerance 1e-4
say "done"
