#!/usr/bin/env python3
"""Step time of shardd against torch's fully_shard and against the floor: 1, 10 and 85 M parameters, in turns.

    python3 tests/bench/torch_step.py --sizes S M X
    python3 tests/bench/torch_step.py --implementations fsdp2 fsdp2r shardd sharddn sharddr   # and over two nodes

Model, data and clock are the same for all: GPT, vocabulary and context 128, text of the machine's licence files; the clock
covers forward, backward, optimizer step and zero_grad. Each rank has one thread; the daemon runs on the same cores. The first
step of a turn warms the caches and is not counted. Losses of the last step are compared between the implementations.
`cpu x floor` is processor time of ranks and daemon, that first step included: what the wall time comes to where all cores are
busy, and steadier than it on a machine that does other things.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch_fleet
from torch_fleet import IMPLEMENTATIONS, OVER_NODES, Fleet, Turn, ratio, shard

# layers, width, heads, batch per rank; counted steps of a turn
SIZES = {"S": (5, 128, 4, 8), "M": (6, 384, 6, 8), "X": (12, 768, 12, 2)}
STEPS = {"S": 12, "M": 4, "X": 2}
CONTEXT = 128
# share of fsdp2's step, times the floor
TARGETS = {"S": (0.50, 1.10), "M": (0.70, 1.07), "X": (0.45, 1.17)}
STOCK_ALLOWANCE = 0.15  # with an optimizer of torch's


def make(implementation: str, args: argparse.Namespace) -> Turn:
    import torch
    import torch.distributed as dist

    from model import Gpt, batch, load_text

    layers, width, heads, size = SIZES[args.size]
    text = load_text()
    torch.manual_seed(1)
    model = Gpt(width, layers, heads, CONTEXT)
    optimizer = shard(model, list(model.blocks), implementation)
    rank = dist.get_rank()
    done = 0

    def turn(steps: int) -> dict[str, Any]:
        nonlocal done
        parts: dict[str, list[float]] = {"forward": [], "backward": [], "step": [], "all": []}
        loss = torch.zeros(())
        for index in range(1 + steps):
            data = batch(text, size, CONTEXT, rank, done)
            done += 1
            start = time.perf_counter()
            loss = model(*data)
            forward = time.perf_counter()
            loss.backward()
            backward = time.perf_counter()
            if optimizer is None:
                model.zero_grad()
            else:
                optimizer.step()
                optimizer.zero_grad()
            end = time.perf_counter()
            if index > 0:
                for name, value in zip(parts, (forward - start, backward - forward, end - backward, end - start)):
                    parts[name].append(value)
        return {**parts, "loss": loss.item()}

    return turn


def measure(args: argparse.Namespace, size: str) -> dict[str, Any]:
    steps = args.steps or STEPS[size]
    fleets = []
    try:
        for implementation in args.implementations:
            fleets.append(Fleet(implementation, args, size=size))
        for fleet in fleets:
            fleet.turn(args.warmup)
        turns: dict[str, list[dict[str, Any]]] = {name: [] for name in args.implementations}
        for _ in range(args.rounds):
            for fleet in fleets:
                turns[fleet.implementation].append(fleet.turn(steps)[0])
    finally:
        for fleet in fleets:
            fleet.__exit__()
    losses = {name: answers[-1]["loss"] for name, answers in turns.items() if name != "floor"}
    if losses and max(losses.values()) - min(losses.values()) > 2e-3 * max(losses.values()):
        raise SystemExit(f"{size}: losses differ between implementations: {losses}")
    medians = {name: [statistics.median(a["all"]) for a in answers] for name, answers in turns.items()}
    cpu = {name: [a["cpu_s"] / (steps + 1) for a in answers] for name, answers in turns.items()}
    result: dict[str, Any] = {"bench": "torch_step", "size": size, "world": args.world, "rounds": args.rounds,
                              "losses": losses, "implementations": {}}  # fmt: skip
    print(
        f"\n{size}, {args.world} ranks: {'ms':>14}{'forward':>9}{'backward':>9}{'step':>9}   x floor (spread)     of fsdp2 (spread)       cpu x floor"
    )
    for name, answers in turns.items():
        entry: dict[str, Any] = {part: statistics.median(value for a in answers for value in a[part]) * 1e3
                                 for part in ("all", "forward", "backward", "step")}  # fmt: skip
        line = f"{name:16}{entry['all']:12.2f}{entry['forward']:9.2f}{entry['backward']:9.2f}{entry['step']:9.2f}"
        for key, base in (("x_floor", "floor"), ("of_fsdp2", "fsdp2")):
            if base in medians:
                entry[key] = ratio(medians[name], medians[base])
                line += "   {:.3f} ({:.3f}-{:.3f})".format(*entry[key])
        entry["cpu_ms"] = statistics.median(cpu[name]) * 1e3
        if "floor" in cpu:
            entry["cpu_x_floor"] = ratio(cpu[name], cpu["floor"])
            line += "   cpu {:.3f} ({:.3f}-{:.3f})".format(*entry["cpu_x_floor"])
        if name in ("shardd", "sharddf"):
            more = STOCK_ALLOWANCE if name == "sharddf" else 0.0
            of_fsdp2, x_floor = (target + more for target in TARGETS[size])
            line += f"   wanted: {x_floor:.2f} and {of_fsdp2:.2f}"
            entry["wanted"] = {"x_floor": x_floor, "of_fsdp2": of_fsdp2}
        result["implementations"][name] = entry
        print(line, flush=True)
    return result


def main() -> None:
    parser = torch_fleet.options(__doc__)
    parser.add_argument("--sizes", nargs="+", default=["S", "M", "X"], choices=SIZES)
    parser.add_argument(
        "--implementations", nargs="+", default=list(IMPLEMENTATIONS), choices=IMPLEMENTATIONS + OVER_NODES
    )
    parser.add_argument("--steps", type=int, default=0, help="counted steps of a turn; 0: 12, 4, 2 by size")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the first turn")
    parser.add_argument("--size", default="", help=argparse.SUPPRESS)  # in a rank
    args = parser.parse_args()
    if args.implementation:
        torch_fleet.serve(make, args)
    torch_fleet.store(args, {"results": [measure(args, size) for size in args.sizes]})


if __name__ == "__main__":
    main()
