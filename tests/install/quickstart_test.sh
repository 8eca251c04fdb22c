#!/usr/bin/env bash
# deploy/quickstart.sh as a newcomer runs it, smaller: to its end, and with Ctrl-C half-way.
# Usage: quickstart_test.sh <source> <folder of the binaries>
set -uo pipefail
set -m # jobs get groups of their own and do not ignore SIGINT, as from a terminal
source=$1 bin=$2
work=$(mktemp -d)
group=
trap '[[ -z $group ]] || kill -KILL -- "-$group" 2>/dev/null; rm -rf "$work"' EXIT
fail() {
  echo "quickstart_test: $*"
  tail -40 "$work"/*.log
  exit 1
}
model=(--layers 2 --width 64 --heads 2 --context 32 --batch 4)
leftovers() { ls -d "${TMPDIR:-/tmp}"/shardd-quickstart.* 2>/dev/null; }
before=$(leftovers)

"$source/deploy/quickstart.sh" --bin "$bin" --steps 1000 --out "$work/out" -- "${model[@]}" >"$work/whole.log" 2>&1 &
group=$!
wait $group || fail "it ended with status $? (want 0: the replacement went on and the losses are equal)"
grep -q 'SIGKILL to the trainer of rank 1' "$work/whole.log" || fail "no trainer was killed"
grep -Eq 'from SIGKILL to the next step committed with the replacement: [0-9.]+ s' "$work/whole.log" || fail "no time of recovery"
grep -q '<svg' "$work/out/loss.svg" || fail "no loss curve in loss.svg"
grep -q '"step":1000' "$work/out/rank1.jsonl" || fail "rank 1 did not come to step 1000"
grep -q '"step":1000' "$work/out/reference.jsonl" || fail "the unsharded run did not come to step 1000"
[[ -z $(pgrep -g $group) ]] || fail "processes are left: $(pgrep -lg $group)"

"$source/deploy/quickstart.sh" --bin "$bin" --steps 100000 --out "$work/interrupted" -- "${model[@]}" >"$work/interrupted.log" 2>&1 &
group=$!
for ((tenths = 0; tenths < 600; ++tenths)); do
  [[ -s $work/interrupted/rank1.jsonl ]] && break
  sleep 0.1
done
[[ -s $work/interrupted/rank1.jsonl ]] || fail "no step within 60 s"
kill -INT -- "-$group" # what a terminal does: the whole group
wait $group
status=$?
((status == 130)) || fail "after Ctrl-C: wrong status (got $status, want 130)"
for ((tenths = 0; tenths < 100; ++tenths)); do
  [[ -z $(pgrep -g $group) ]] && break
  sleep 0.1
done
[[ -z $(pgrep -g $group) ]] || fail "after Ctrl-C: processes are left: $(pgrep -lg $group)"
[[ $(leftovers) == "$before" ]] || fail "shared memory is left: $(leftovers)"
group=
echo "quickstart_test: passed"
