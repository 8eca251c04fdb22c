#!/usr/bin/env bash
# Daemon and trainers as containers have them: each in PID, mount, IPC, network and UTS namespaces of its own, under uids of
# their own without capabilities, with 64 MiB of /dev/shm, and nothing shared but the directory of the socket, which trainers
# see read-only, and between daemon and custodian a directory that is writable for all. Needs no container runtime.
# Usage: containers_test.sh <build folder>
# Status 77, with the reason, where namespaces cannot be made.
set -euo pipefail
build=$(realpath "$1")
daemon_uid=64500 trainer_uid=1000 # those of deploy/docker and deploy/kubernetes
work=$(mktemp -d)
mkdir "$work/bin"
install -d -m 0777 "$work/custody" # an emptyDir
chmod 711 "$work"

# container UID COMMAND...: runs it there, in the place of this shell. Its group is the daemon's, which the socket belongs to.
container() {
  exec unshare --pid --fork --mount --ipc --net --uts bash -c '
    set -e
    mount -t tmpfs -o size=64m,mode=1777 tmpfs /dev/shm
    mount --bind "$1" "$1"
    [[ $2 == "$3" ]] || mount -o remount,ro,bind "$1"
    exec setpriv --reuid "$2" --regid "$2" --groups "$3" --no-new-privs --bounding-set=-all --inh-caps=-all "${@:4}"' \
    container "$work/run" "$1" "$daemon_uid" "${@:2}"
}
containers=() # pids of unshare; the container's first process is its child, with which the container ends
end() { pkill -KILL -P "$1" 2>/dev/null || true; }
finish() {
  local pid
  for pid in "${containers[@]}"; do end "$pid"; done
  wait
  rm -rf "$work"
}
trap finish EXIT
fail() {
  echo "containers_test: $*"
  tail -n 20 "$work"/*.log
  exit 1
}
# await WHAT FILE: until FILE has a line with WHAT.
await() {
  for ((tenths = 0; tenths < 200; ++tenths)); do
    grep -qs "$1" "$2" && return
    sleep 0.1
  done
  fail "nothing like \"$1\" in ${2##*/} after 20 s"
}

# As the manifests' init container makes it, twice: a daemon that is started again finds the directory.
for _ in 1 2; do
  setpriv --no-new-privs --bounding-set=-all,+chown,+fowner --inh-caps=-all \
    install -d -o $daemon_uid -g $daemon_uid -m 0750 "$work/run" || { echo "containers_test skipped: not root" && exit 77; }
done
(container $trainer_uid true) >"$work/reason" 2>&1 || { echo "containers_test skipped: no namespaces: $(<"$work/reason")" && exit 77; }
cp "$build"/bin/{shardd,shardd-custodian,shardctl,linear} "$build"/lib/libshardd.so.0 "$work/bin/"
export SHARDD_ADDRESS=unix:$work/run/shardd.sock WORLD_SIZE=2 LD_LIBRARY_PATH=$work/bin

start_custodian() { # NAME
  container $daemon_uid "$work/bin/shardd-custodian" --listen="unix:$work/custody/pod/custody.sock" 2>"$work/$1.log" &
  containers+=($!)
}
start_daemon() { # NAME
  container $daemon_uid "$work/bin/shardd" --devices=cpu:2 --listen="$SHARDD_ADDRESS" \
    --custodian="unix:$work/custody/pod/custody.sock" 2>"$work/$1.log" &
  containers+=($!)
  await "listens on" "$work/$1.log"
}
start_custodian custodian
custodian=$!
start_daemon daemon
daemon=$!
(container $daemon_uid "$work/bin/shardctl" status --timeout 3) >"$work/probe.log" 2>&1 || fail "the probe of the manifests fails"

start() { # RANK
  RANK=$1 container $trainer_uid "$work/bin/linear" >"$work/rank$1.log" 2>&1 &
  containers+=($!)
}
# It waits for rank 1, which is not there: the container ends in the middle of the job.
start 0
await "rank 0 attach" "$work/daemon.log"
end "${containers[-1]}"
await "rank 0 lost" "$work/daemon.log"

# Rank 0 stops behind its first step, at an output that takes nothing, and the custodian's container is replaced, then the daemon's.
mkfifo "$work/full"
exec 9<>"$work/full"
head -c 65536 /dev/zero >&9 # what a pipe takes
RANK=0 container $trainer_uid stdbuf -o0 "$work/bin/linear" >&9 2>"$work/rank0.log" &
containers+=($!)
stopped=$!
start 1
waiting=$!
for ((tenths = 0; tenths < 200; ++tenths)); do
  (container $trainer_uid "$work/bin/shardctl" jobs) >"$work/jobs.log" 2>&1
  grep -qE '^linear +\S+ +2/2 +1 ' "$work/jobs.log" && break
  sleep 0.1
done
end "$custodian"
start_custodian next_custodian
await "was started anew, and has all jobs again" "$work/daemon.log"
end "$daemon"
start_daemon next_daemon
await "job linear is taken up at step 1," "$work/next_daemon.log"
end "$stopped"
wait "$waiting" || true # this trainer does not attach again by itself

start 0
start 1
for rank in 0 1; do
  wait "${containers[-2 + rank]}" || fail "rank $rank ended with an error"
done
await "step 200 close: all ranks have finished" "$work/next_daemon.log"
for log in daemon next_daemon; do
  grep -c " open: world size 2" "$work/$log.log" | grep -qx 1 || fail "ranks did not find the job of those before them ($log)"
done
# The rank that was killed is two warnings, the custodian is one, and there are no others.
[[ $(grep -E ' [WE] [0-9]+ ' "$work/daemon.log" | grep -oE ' rank 0 lost: | abort: session: rank 0 is lost: | was started anew') == \
  $' rank 0 lost: \n abort: session: rank 0 is lost: \n was started anew' ]] || fail "the daemon does not warn of the killed rank and custodian"
[[ $(cat "$work"/{daemon,next_daemon}.log | grep -cE ' [WE] [0-9]+ ') == 3 ]] || fail "the daemon warns of something else"
echo "containers_test: passed"
