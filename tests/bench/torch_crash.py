#!/usr/bin/env python3
"""From SIGKILL of a worker to the next finished step, under torchrun: client/examples/torch/resume.py, again and again.

    .venv/bin/python tests/bench/torch_crash.py --rounds 5

Two workers; rank 1 kills itself between forward and backward. torchrun then restarts both, they find the job in the daemon's
memory and finish the step. What is left after torchrun, the start of Python, the import of torch and the step itself is what
shardd and the program's own set-up take (process group, model, sharding, attach). `lost`: committed steps that were done again.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"S": ("--width=128", "--layers=5", "--heads=4"), "M": ("--width=384", "--layers=6", "--heads=6"),
         "X": ("--width=768", "--layers=12", "--heads=12", "--batch=2")}  # fmt: skip
KILLED_AT = 4


def once(daemon: str, size: str, stock: bool) -> tuple[float, float, float, int]:
    """Seconds in all, until torch was imported again, of the step; steps lost."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        env = dict(os.environ, PYTHONPATH=str(ROOT / "client" / "python" / "src"), SHARDD_DAEMON=daemon, OMP_NUM_THREADS="1",
                   TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", XDG_RUNTIME_DIR=folder)  # fmt: skip
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3",
                   str(ROOT / "client/examples/torch/resume.py"), "--context=128", *SIZES[size], f"--steps={KILLED_AT + 3}",
                   f"--kill-at={KILLED_AT}", *(["--stock"] if stock else [])]  # fmt: skip
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    said = re.search(r"next finished step: ([0-9.]+) s; ([0-9.]+) s of it .* ([0-9.]+) s the step", done.stdout)
    resumed = re.search(r"resumed at step (\d+)", done.stdout)
    if done.returncode or said is None or resumed is None:
        raise SystemExit(f"resume.py ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return float(said[1]), float(said[2]), float(said[3]), KILLED_AT - int(resumed[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["M"], choices=SIZES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bin", default=str(ROOT / "build" / "release" / "bin"), help="folder of the daemon")
    args = parser.parse_args()
    for size in args.sizes:
        for name, stock in (("the daemon's AdamW", False), ("torch.optim.AdamW", True)):
            runs = [once(f"{args.bin}/shardd", size, stock) for _ in range(args.rounds)]
            own = [total - start - step for total, start, step, _ in runs]
            total, start, step = (statistics.median(run[i] for run in runs) for i in range(3))
            print(f"{size}  {name:20} SIGKILL to next step {total:.2f} s = {start:.2f} restart and import of torch + "
                  f"{step:.2f} the step + {statistics.median(own):.2f} ({min(own):.2f} to {max(own):.2f}); "
                  f"lost {max(run[3] for run in runs)}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
