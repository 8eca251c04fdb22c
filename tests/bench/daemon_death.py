#!/usr/bin/env python3
"""The pause of the example where its daemon ends and another one goes on, with a custodian: the longest time between two
committed steps from then on, beside a step of the same run that nobody disturbs, and the bytes that outlive the daemon.

  daemon_death.py --bin build/release/bin [--how kill] [--ranks 2] [--kills 5] [-- flags of gpt]

--how kill: SIGKILL, and a daemon that is started at once; from the signal to the next step. stop: the same with SIGTERM, as
`systemctl restart` does. handover: `shardctl handover`, as `systemctl reload` does.

Sizes: `--layers 8 --width 512` has 0.4 GiB, `--layers 10 --width 1536` 4.3 GiB, both with `--context 8 --batch 1`.
"""

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time

LIMIT_S = 120
WARM_UP_STEPS = 3


def steps_of(path):
    """(step, time) of every committed step that the rank has noted."""
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file if line.endswith("\n")]
        return [(line["step"], line["time"]) for line in lines if "step" in line]
    return []


def await_steps(path, count, trainers):
    deadline = time.monotonic() + LIMIT_S
    while len(steps := steps_of(path)) < count:
        if time.monotonic() > deadline or any(trainer.poll() is not None for trainer in trainers):
            sys.exit(f"daemon_death.py: rank 0 did not come to {count} steps (got {len(steps)})")
        time.sleep(0.005)
    return steps


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", required=True)
    parser.add_argument("--how", choices=["kill", "stop", "handover"], default="kill")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("flags", nargs="*", default=[])
    options = parser.parse_args()
    bin_folder = os.path.abspath(options.bin)
    with tempfile.TemporaryDirectory(prefix="daemon-death-") as folder, contextlib.ExitStack() as processes:

        def start(*command, **environment):
            process = subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.DEVNULL)
            processes.callback(process.wait)
            processes.callback(process.kill)
            return process

        def start_daemon():
            return start(
                f"{bin_folder}/shardd",
                f"--listen=unix:{folder}/shardd.sock",
                f"--devices=cpu:{options.ranks}",
                f"--custodian=unix:{folder}/custody.sock",
            )

        start(f"{bin_folder}/shardd-custodian", f"--listen=unix:{folder}/custody.sock")
        daemon = start_daemon()
        while not os.path.exists(f"{folder}/shardd.sock"):
            time.sleep(0.005)
        noted = f"{folder}/rank0.jsonl"
        trainers = [
            start(
                f"{bin_folder}/gpt",
                *("--steps", "1000000", "--log_every", "0", "--out", f"{folder}/rank{rank}.jsonl"),
                *options.flags,
                SHARDD_ADDRESS=f"unix:{folder}/shardd.sock",
                RANK=str(rank),
                WORLD_SIZE=str(options.ranks),
                OMP_NUM_THREADS="1",
            )
            for rank in range(options.ranks)
        ]

        def shardctl(*command):
            called = [f"{bin_folder}/shardctl", "--address", f"unix:{folder}/shardd.sock", *command]
            return subprocess.run(called, capture_output=True, check=True, text=True).stdout

        if options.how == "handover":  # who takes the place of another is nobody's child
            processes.callback(lambda: os.kill(int(json.loads(shardctl("status", "--json"))["pid"]), signal.SIGKILL))
        gaps, undisturbed = [], []
        for _ in range(options.kills):
            count = len(steps_of(noted)) + WARM_UP_STEPS + 3
            steps = await_steps(noted, count, trainers)[-3:]
            undisturbed += [after[1] - before[1] for before, after in itertools.pairwise(steps)]
            memory = json.loads(shardctl("memory", "--json"))
            ended, last = time.time(), steps_of(noted)[-1][0]
            if options.how == "handover":
                shardctl("handover")
            else:
                daemon.send_signal(signal.SIGKILL if options.how == "kill" else signal.SIGTERM)
                daemon.wait()
                daemon = start_daemon()
            over, before = time.time(), len(steps_of(noted))
            count = before + (1 if options.how == "kill" else 3)  # steps that came before it are no end of the pause
            while (steps := await_steps(noted, count, trainers))[-1][0] <= last:
                count = len(steps) + 1
            times = [at for step, at in steps if step > last]
            if options.how == "kill":
                gaps.append(times[0] - ended)
            else:
                gaps.append(max(after - at for at, after in itertools.pairwise([ended, *times]) if at <= over + 1))
        kept = sum(
            int(purpose.get("allocated_bytes", 0))
            for purpose in memory["purposes"]
            if purpose["purpose"] in ("shards", "parameters", "gradients", "optimizer", "snapshot")
        )
        step_s = statistics.median(undisturbed)
        gap_s = statistics.median(gaps)
        print(f"{kept / 2**30:.2f} GiB outlive the daemon; a step takes {step_s:.3f} s")
        what = "from SIGKILL to the next committed step" if options.how == "kill" else f"longest pause ({options.how})"
        print(f"{what}: {gap_s:.3f} s ({min(gaps):.3f} to {max(gaps):.3f})")
        print(f"beside a step: {gap_s - step_s:.3f} s, ratio {gap_s / step_s:.2f}")


if __name__ == "__main__":
    main()
