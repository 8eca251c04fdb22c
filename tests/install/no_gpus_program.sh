#!/usr/bin/env bash
# The programs of a build without GPUs: they serve CPUs, and say what they lack. The only test of such a build.
# Usage: no_gpus_program.sh <folder of the binaries>
set -uo pipefail
bin=$1
work=$(mktemp -d)
daemon=
trap '[[ -z $daemon ]] || kill -KILL "$daemon" 2>/dev/null; rm -rf "$work"' EXIT
fail() {
  echo "no_gpus_program: $*"
  tail -20 "$work"/*.log
  exit 1
}
refuses() { # what is to be said, then flags of the daemon
  timeout 20 "$bin/shardd" --listen="unix:$work/refused.sock" "${@:2}" >"$work/refused.log" 2>&1 && fail "shardd ${*:2}: it is not refused"
  grep -qF -- "$1" "$work/refused.log" || fail "shardd ${*:2}: it does not say \"$1\""
}

refuses "this build has no code for GPUs, it was made without NVIDIA's headers; run deploy/nvidia_headers.sh" --devices=cuda:all
refuses '--collective: NCCL is for GPUs' --devices=cpu:2 --collective=nccl
refuses 'this build has no code for GPUs' --devices=cpu:2 --collective_trial
"$bin/shardd" --listen="unix:$work/d.sock" --devices=cpu:2 >"$work/daemon.log" 2>&1 &
daemon=$!
for ((tenths = 0; tenths < 200; ++tenths)); do
  "$bin/shardctl" --address="unix:$work/d.sock" status >"$work/status.log" 2>&1 && break
  kill -0 "$daemon" 2>/dev/null || fail "the daemon has ended"
  sleep 0.1
done
grep -qE 'devices +cpu:0 cpu:1' "$work/status.log" || fail "status does not show the devices"
! grep -q 'gradients between GPUs' "$work/status.log" || fail "status speaks of GPUs"
kill -TERM "$daemon"
wait "$daemon" || fail "the daemon ended with status $? (want 0)"
daemon=
