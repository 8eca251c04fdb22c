#!/usr/bin/env python3
"""What a wrapped module costs: 64 linears of 16 x 16, each with fully_shard; microseconds per module above the plain stack.

    python3 tests/bench/torch_modules.py

Forward and backward apart, no optimizer step, at 1 and 2 ranks, in turns; in each rank the plain stack and the sharded one take
turns as well. The compute of such a module is nothing, so this is the price of hooks, storage swaps and communication.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch_fleet
from torch_fleet import Fleet, Turn, shard

# forward, backward
TARGETS = {1: (60, 90), 2: (80, 150)}


def make(implementation: str, args: argparse.Namespace) -> Turn:
    import torch
    import torch.distributed as dist
    from torch import nn

    x = torch.ones(1, 16)

    def stack() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Linear(16, 16) for _ in range(args.modules)])

    plain, model = stack(), stack()
    optimizer = shard(model, list(model), implementation)

    def timed(module: Any, steps: int) -> tuple[float, float]:
        forwards, backwards = [], []
        for _ in range(steps):
            module.zero_grad()
            dist.barrier()
            start = time.perf_counter()
            y = module(x)
            middle = time.perf_counter()
            y.sum().backward()
            end = time.perf_counter()
            forwards.append((middle - start) * 1e6 / args.modules)
            backwards.append((end - middle) * 1e6 / args.modules)
        return statistics.median(forwards), statistics.median(backwards)

    def turn(steps: int) -> dict[str, Any]:
        base = timed(plain, steps)
        sharded = timed(model, steps)
        extra = [s - p for s, p in zip(sharded, base)]
        return {
            "plain": base,
            "extra": extra,
            "optimizer": type(optimizer).__name__,
        }  # it lives as long: part of the job

    return turn


def measure(args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {
        "bench": "torch_modules",
        "world": args.world,
        "modules": args.modules,
        "implementations": {},
    }
    fleets = []
    try:
        for implementation in args.implementations:
            fleets.append(Fleet(implementation, args, modules=args.modules))
        for fleet in fleets:
            fleet.turn(10)
        turns: dict[str, list[Any]] = {fleet.implementation: [] for fleet in fleets}
        for _ in range(args.rounds):
            for fleet in fleets:
                turns[fleet.implementation].append(fleet.turn(args.steps)[0])
    finally:
        for fleet in fleets:
            fleet.__exit__()
    print(f"\n{args.world} ranks, us per module: forward (spread), backward (spread); plain stack")
    for name, answers in turns.items():
        entry = {}
        line = f"{name:10}"
        for index, part in enumerate(("forward", "backward")):
            values = [answer["extra"][index] for answer in answers]
            entry[part] = (statistics.median(values), min(values), max(values))
            line += "{:9.1f} ({:.1f}-{:.1f})".format(*entry[part])
        entry["plain"] = [statistics.median(a["plain"][i] for a in answers) for i in range(2)]
        line += f"   plain {entry['plain'][0]:.1f} and {entry['plain'][1]:.1f}"
        if name.startswith("shardd") and args.world in TARGETS:
            entry["wanted"] = TARGETS[args.world]
            line += f"   wanted: {TARGETS[args.world][0]} and {TARGETS[args.world][1]}"
        result["implementations"][name] = entry
        print(line, flush=True)
    return result


def main() -> None:
    parser = torch_fleet.options(__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--implementations", nargs="+", default=["fsdp2", "shardd", "sharddf"])
    parser.add_argument("--steps", type=int, default=30, help="of a turn")
    parser.add_argument("--modules", type=int, default=64)
    args = parser.parse_args()
    if args.implementation:
        torch_fleet.serve(make, args)
    results = []
    for world in args.worlds:
        args.world = world
        results.append(measure(args))
    torch_fleet.store(args, {"results": results})


if __name__ == "__main__":
    main()
