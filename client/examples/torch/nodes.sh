#!/usr/bin/env bash
# Two nodes on this machine: two daemons that reach each other through the loopback, and for each a torchrun with two workers.
# Usage: client/examples/torch/nodes.sh [arguments of nodes.py, such as --kill-at=20]
# SHARDD_DAEMON: the daemon; by default build/dev/bin/shardd. PYTHON: by default .venv/bin/python.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
daemon=${SHARDD_DAEMON:-$root/build/dev/bin/shardd}
python=${PYTHON:-$root/.venv/bin/python}
folder=$(mktemp -d "${TMPDIR:-/tmp}/shardd-nodes.XXXXXX")
daemons=()
agents=()
finish() {
  for pid in "${agents[@]}" "${daemons[@]}"; do
    kill "$pid" 2>/dev/null || true
  done
  wait
  rm -rf "$folder"
}
trap finish EXIT

port() { "$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
rendezvous=127.0.0.1:$(port)
for node in 0 1; do
  # Between machines --peer_cert, --peer_key and --peer_ca instead of --peer_insecure.
  "$daemon" --listen="unix:$folder/$node.sock" --devices=cpu:2 \
    --peer_listen="127.0.0.1:$(port)" --peer_insecure 2>"$folder/daemon-$node.log" &
  daemons+=($!)
done
for node in 0 1; do
  for _ in $(seq 200); do
    [[ -S $folder/$node.sock ]] && break
    sleep 0.05
  done
  [[ -S $folder/$node.sock ]] || { cat "$folder/daemon-$node.log" && exit 1; }
done
for node in 0 1; do
  # TORCH_DISABLE_SHARE_RDZV_TCP_STORE keeps restarted workers from finding the dead ones' gloo addresses.
  SHARDD_ADDRESS=unix:$folder/$node.sock TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 OMP_NUM_THREADS=1 \
    PYTHONPATH="$root/client/python/src${PYTHONPATH:+:$PYTHONPATH}" \
    "$python" -m torch.distributed.run --nnodes=2 --nproc-per-node=2 --max-restarts=3 --rdzv-backend=c10d \
    --rdzv-endpoint="$rendezvous" --rdzv-id=nodes "$root/client/examples/torch/nodes.py" "$@" &
  agents+=($!)
done
status=0
for pid in "${agents[@]}"; do
  wait "$pid" || status=$?
done
exit "$status"
