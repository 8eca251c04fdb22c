#!/usr/bin/env python3
"""What a step costs with shardd, as a ratio to the floor: as many trainer processes at the same time, forward and backward
only, nothing shared. The daemon runs on the same cores. Several rounds in turns, medians. The ratio of CPU time (trainers
and daemon) is the steadier one where the machine has other work, but it does not see waiting. Ranks that train together
wait for the slowest of them in each step, whatever moves their data: "in step" is the ratio to a floor that counts the
slowest rank of each step, so the two ratios lie apart by what the machine's own unevenness costs.

  gpt_overhead.py --bin build/release/bin [--ranks 2] [--steps 12] [--rounds 3] [-- flags of gpt]
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

WARM_UP_STEPS = 3
DAEMON_LIMIT_S = 10


def daemon_cpu_s(pid):
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(options, directory, name, extra, env):
    """Median seconds of a step over all ranks, of the slowest rank's step, and the trainers' CPU seconds of a step together."""
    outs = [f"{directory}/{name}.{rank}" for rank in range(options.ranks)]
    trainers = [
        subprocess.Popen(
            [f"{options.bin}/gpt", "--steps", str(options.steps), "--log_every", "0", "--out", out, "--job", name]
            + extra
            + options.flags,
            env=dict(env, RANK=str(rank), WORLD_SIZE=str(options.ranks)),
        )
        for rank, out in enumerate(outs)
    ]
    if any([trainer.wait() for trainer in trainers]):
        sys.exit(f"gpt_overhead.py: {name}: a trainer ended with an error")
    seconds, cpu = [], 0
    for out in outs:
        with open(out, encoding="utf-8") as file:
            lines = [line for line in map(json.loads, file) if "step" in line][WARM_UP_STEPS:]
        seconds.append([b["time"] - a["time"] for a, b in itertools.pairwise(lines)])
        cpu += (lines[-1]["cpu_s"] - lines[0]["cpu_s"]) / (len(lines) - 1)
    slowest = statistics.median(max(step) for step in zip(*seconds, strict=True))
    return statistics.median(itertools.chain(*seconds)), slowest, cpu


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("flags", nargs="*")
    options = parser.parse_args()
    directory = tempfile.mkdtemp(prefix="shardd-overhead-", dir="/dev/shm")
    socket = f"{directory}/socket"
    env = dict(os.environ, SHARDD_ADDRESS=f"unix:{socket}", OMP_NUM_THREADS="1")
    daemon = subprocess.Popen(
        [
            f"{options.bin}/shardd",
            f"--devices=cpu:{options.ranks}",
            f"--listen=unix:{socket}",
            "--log_level=error",
        ]
    )
    try:
        end = time.monotonic() + DAEMON_LIMIT_S
        while not os.path.exists(socket) and daemon.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        ratios, in_step_ratios, cpu_ratios = [], [], []
        for number in range(options.rounds):
            floor, floor_slowest, floor_cpu = run(options, directory, f"floor{number}", ["--floor"], env)
            before = daemon_cpu_s(daemon.pid)
            shardd, shardd_slowest, trainer_cpu = run(options, directory, f"shardd{number}", [], env)
            daemon_cpu = (daemon_cpu_s(daemon.pid) - before) / options.steps
            ratios.append(shardd / floor)
            in_step_ratios.append(shardd_slowest / floor_slowest)
            cpu_ratios.append((trainer_cpu + daemon_cpu) / floor_cpu)
            print(
                f"round {number}: a step {floor * 1e3:.1f} ms floor, {shardd * 1e3:.1f} ms shardd, ratio {ratios[-1]:.3f}, in "
                f"step {in_step_ratios[-1]:.3f}; CPU {floor_cpu * 1e3:.1f} ms floor, {trainer_cpu * 1e3:.1f} + {daemon_cpu * 1e3:.1f} ms (trainers + "
                f"daemon), ratio {cpu_ratios[-1]:.3f}",
                flush=True,
            )
        print(
            f"step overhead, {options.ranks} ranks: ratio {statistics.median(ratios):.3f} (spread {min(ratios):.3f} to "
            f"{max(ratios):.3f}), in step {statistics.median(in_step_ratios):.3f}, of CPU time {statistics.median(cpu_ratios):.3f}"
        )
    finally:
        daemon.terminate()
        daemon.wait()
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
