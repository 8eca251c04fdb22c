#!/usr/bin/env python3
"""Memory of all processes together, daemon included, while they train: times the bytes of the parameters.

    python3 tests/bench/torch_memory.py --size X

The largest sum of proportional set sizes seen while steps run (read every 20 ms), above what the processes had when everything
was imported and no model was made. What several processes map is counted once. One implementation after the other.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from typing import Any

import torch_fleet
import torch_step
from torch_fleet import Fleet

TARGET = 4.6  # at 85 M


def measure(args: argparse.Namespace, implementation: str) -> dict[str, Any]:
    with Fleet(implementation, args, size=args.size) as fleet:
        peak = 0.0
        finished = threading.Event()

        def watch() -> None:
            nonlocal peak
            while not finished.is_set():
                peak = max(peak, fleet.memory_mib())
                time.sleep(0.02)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            answers = fleet.turn(args.steps)
        finally:
            finished.set()
            watcher.join()
        return {"peak_mib": peak, "after_mib": fleet.memory_mib(), "step_ms": min(answers[0]["all"]) * 1e3}


def main() -> None:
    parser = torch_fleet.options(__doc__)
    parser.add_argument("--size", default="X", choices=torch_step.SIZES)
    parser.add_argument("--implementations", nargs="+", default=["fsdp2", "shardd", "sharddf"])
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    if args.implementation:
        torch_fleet.serve(torch_step.make, args)
    from model import Gpt

    layers, width, heads, _ = torch_step.SIZES[args.size]
    parameter_mib = sum(p.numel() for p in Gpt(width, layers, heads, torch_step.CONTEXT).parameters()) * 4 / 2**20
    result: dict[str, Any] = {"bench": "torch_memory", "size": args.size, "world": args.world, "implementations": {},
                              "parameter_mib": parameter_mib,
                              "allocator": {k: v for k, v in os.environ.items() if k.startswith("MALLOC_")}}  # fmt: skip
    print(
        f"{args.size}, {args.world} ranks, {parameter_mib:.0f} MiB of parameters: peak and rest in MiB, and times that"
    )
    for implementation in args.implementations:
        entry = measure(args, implementation)
        entry["peak_ratio"] = entry["peak_mib"] / parameter_mib
        line = (f"{implementation:10}{entry['peak_mib']:9.0f}{entry['after_mib']:9.0f}{entry['peak_ratio']:8.2f}"
                f"{entry['after_mib'] / parameter_mib:8.2f}   step {entry['step_ms']:.0f} ms")  # fmt: skip
        print(line + (f"   wanted: {TARGET}" if implementation == "shardd" else ""), flush=True)
        result["implementations"][implementation] = entry
    torch_fleet.store(args, result)


if __name__ == "__main__":
    main()
