#!/usr/bin/env python3
"""What a short-lived model costs: made, wrapped, trained a step or not at all, dropped; milliseconds of a model's life.

    python3 tests/bench/torch_short.py --bin build/release/bin

torch's and shardd's take turns. `wrap`: fully_shard or the wrapper; `first`: forward, backward and step, in which the job is
opened; `second`: another step, what a step costs once the job is there; `drop`: the last reference goes, and the collector
runs. The life is all of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch_fleet
from torch_fleet import Fleet, Turn

PARTS = ("wrap", "first", "second", "drop")


def make(implementation: str, args: argparse.Namespace) -> Turn:
    import gc

    import torch
    import torch.distributed as dist
    from torch import nn

    x = torch.ones(4, args.width)

    def turn(models: int) -> dict[str, Any]:
        parts: dict[str, list[float]] = {part: [] for part in (*PARTS, "life")}
        for _ in range(models):
            gc.collect()
            gc.disable()
            dist.barrier()
            at = [time.perf_counter()]
            model = nn.Sequential(*[nn.Linear(args.width, args.width) for _ in range(args.modules)])
            optimizer = torch_fleet.shard(model, list(model), implementation)
            at.append(time.perf_counter())
            for _ in range(2):
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                at.append(time.perf_counter())
            del model, optimizer
            gc.enable()
            gc.collect()
            at.append(time.perf_counter())
            for part, begin, end in zip(PARTS, at, at[1:]):
                parts[part].append(1e3 * (end - begin))
            parts["life"].append(1e3 * (at[-1] - at[0]))
        return {part: statistics.median(values) for part, values in parts.items()}

    return turn


def main() -> None:
    parser = torch_fleet.options(__doc__)
    parser.add_argument("--implementations", nargs="+", default=["fsdp2", "shardd", "sharddf"])
    parser.add_argument("--models", type=int, default=5, help="of a turn")
    parser.add_argument("--modules", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args()
    if args.implementation:
        torch_fleet.serve(make, args)
    fleets = []
    turns: dict[str, list[Any]] = {}
    try:
        for implementation in args.implementations:
            fleets.append(Fleet(implementation, args, modules=args.modules, width=args.width))
        for fleet in fleets:
            fleet.turn(1)
        for _ in range(args.rounds):
            for fleet in fleets:
                turns.setdefault(fleet.implementation, []).append(fleet.turn(args.models)[0])
    finally:
        for fleet in fleets:
            fleet.__exit__()
    print(f"{args.world} ranks, {args.modules} modules of {args.width}, ms of a model (spread of {args.rounds} rounds)")
    found: dict[str, Any] = {}
    for name, answers in turns.items():
        line = f"{name:10}"
        found[name] = {}
        for part in (*PARTS, "life"):
            values = [answer[part] for answer in answers]
            found[name][part] = (statistics.median(values), min(values), max(values))
            line += f"  {part} {statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})"
        print(line, flush=True)
    torch_fleet.store(args, {"bench": "torch_short", "world": args.world, "implementations": found})


if __name__ == "__main__":
    main()
