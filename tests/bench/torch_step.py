#!/usr/bin/env python3
"""Step time of shardd against torch's fully_shard and against the floor, in one run with interleaved repeats.

    python3 tests/bench/torch_step.py --sizes S M X --reps 3           # needs the package on PYTHONPATH
    python3 tests/bench/torch_step.py --hooks                          # overhead per wrapped module

  floor   two processes at once, forward and backward only, no communication
  fsdp2   torch.distributed.fsdp.fully_shard and torch.optim.AdamW
  fsdp2f  the same with AdamW(foreach=True)
  shardd  shardd.torch.fully_shard and the daemon's AdamW; the daemon runs on the same cores

Model, data and clock are the same for all: GPT of 1, 10 or 85 M parameters, vocabulary and context 128, text of the
machine's licence files; the clock covers forward, backward, optimizer step and zero_grad. Each rank has one thread.
Prints one JSON line per repeat and a table of medians; losses of the last step are compared between the implementations.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "client" / "examples" / "torch"))

# layers, width, heads, batch per rank
SIZES = {"S": (5, 128, 4, 8), "M": (6, 384, 6, 8), "X": (12, 768, 12, 2)}
STEPS = {"S": 20, "M": 10, "X": 5}
CONTEXT = 128


def process_memory(pid: int | str = "self") -> dict[str, float]:
    """Proportional set size and its peak resident set, MiB."""
    memory = {}
    for path, names in ((f"/proc/{pid}/smaps_rollup", ("Pss",)), (f"/proc/{pid}/status", ("VmHWM",))):
        with open(path) as file:
            for line in file:
                name, _, rest = line.partition(":")
                if name in names:
                    memory[name] = int(rest.split()[0]) / 1024
    return memory


def shard(model: Any, modules: list[Any], impl: str) -> Any:
    """Applies fully_shard; gives the optimizer of the implementation, None for the floor."""
    if impl == "floor":
        return None
    if impl == "shardd":
        from shardd.torch import fully_shard
        from shardd.torch.optim import AdamW
    else:
        from torch.distributed.fsdp import fully_shard
        from torch.optim import AdamW
    for module in modules:
        fully_shard(module)
    fully_shard(model)
    return AdamW(model.parameters(), lr=3e-4, **({"foreach": True} if impl == "fsdp2f" else {}))


def run_step(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from model import Gpt, batch, load_text

    layers, width, heads, size = SIZES[args.sizes[0]]
    rank = dist.get_rank()
    text = load_text()
    base = process_memory()["Pss"]
    torch.manual_seed(1)
    model = Gpt(width, layers, heads, CONTEXT)
    optimizer = shard(model, list(model.blocks), args.impls[0])
    times: list[float] = []
    parts: dict[str, list[float]] = {"forward": [], "backward": [], "step": []}
    for step in range(args.warmup + args.steps):
        if step == args.warmup:
            dist.barrier()
        data = batch(text, size, CONTEXT, rank, step)
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
        if step >= args.warmup:
            times.append(end - start)
            parts["forward"].append(forward - start)
            parts["backward"].append(backward - forward)
            parts["step"].append(end - backward)
    return {"times": times, "parts": {k: statistics.median(v) for k, v in parts.items()}, "loss": loss.item(),
            "base_pss": base, **process_memory()}  # fmt: skip


def run_hooks(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch import nn

    x = torch.ones(1, 16)

    def measure(model: Any) -> tuple[float, float]:
        forwards, backwards = [], []
        for step in range(60):
            for parameter in model.parameters():
                parameter.grad = None
            dist.barrier()
            start = time.perf_counter()
            y = model(x)
            middle = time.perf_counter()
            y.sum().backward()
            end = time.perf_counter()
            if step >= 10:
                forwards.append((middle - start) * 1e6 / args.modules)
                backwards.append((end - middle) * 1e6 / args.modules)
        return statistics.median(forwards), statistics.median(backwards)

    def stack() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Linear(16, 16) for _ in range(args.modules)])

    plain = measure(stack())
    model = stack()
    shard(model, list(model), args.impls[0])
    sharded = measure(model)
    return {"plain_us": plain, "extra_us": [s - p for s, p in zip(sharded, plain)]}


def rank_main(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = run_hooks(args) if args.hooks else run_step(args)
    with open(os.environ["BENCH_RESULT"] + os.environ["RANK"], "w") as file:
        json.dump(result, file)
    dist.barrier()


def launch(args: argparse.Namespace, impl: str, size: str) -> list[dict[str, Any]]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--impls", impl, "--sizes", size, "--modules", str(args.modules),
                   "--steps", str(args.steps or STEPS[size]), "--warmup", str(args.warmup)]  # fmt: skip
        command += ["--hooks"] if args.hooks else []
        ranks = []
        for rank in range(args.world):
            environment = dict(
                os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(args.world), MASTER_ADDR="127.0.0.1",
                LOCAL_WORLD_SIZE=str(args.world), MASTER_PORT=str(port), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo",
                TORCH_CPP_LOG_LEVEL="ERROR", BENCH_RESULT=f"{folder}/")  # fmt: skip
            ranks.append(subprocess.Popen(command, env=environment))
        if any([rank.wait() for rank in ranks]):
            raise SystemExit(f"{impl} {size}: a rank failed")
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(args.world)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["S"], choices=SIZES)
    parser.add_argument("--impls", nargs="+", default=["floor", "fsdp2", "fsdp2f", "shardd"])
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="timed steps of a repeat; 0: 20, 10, 5 by size")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--hooks", action="store_true", help="overhead per wrapped module instead of steps")
    parser.add_argument("--modules", type=int, default=64)
    args = parser.parse_args()
    if "BENCH_RESULT" in os.environ:
        rank_main(args)
        return
    if args.hooks:
        for impl in args.impls:
            if impl in ("fsdp2", "shardd"):
                results = launch(args, impl, "S")
                print(json.dumps({"bench": "hooks", "impl": impl, "world": args.world, **results[0]}), flush=True)
        return
    for size in args.sizes:
        pooled: dict[str, list[float]] = {impl: [] for impl in args.impls}
        losses: dict[str, float] = {}
        for repeat in range(args.reps):
            for impl in args.impls:
                results = launch(args, impl, size)
                pooled[impl] += results[0]["times"]
                losses[impl] = results[0]["loss"]
                print(json.dumps({"bench": "step", "size": size, "impl": impl, "world": args.world, "repeat": repeat,
                                  "median_s": statistics.median(results[0]["times"]), "parts_s": results[0]["parts"],
                                  "loss": results[0]["loss"],
                                  "pss_mib": round(sum(r["Pss"] for r in results))}), flush=True)  # fmt: skip
        trained = [loss for impl, loss in losses.items() if impl != "floor"]
        if trained and max(trained) - min(trained) > 2e-3 * max(trained):
            raise SystemExit(f"{size}: losses differ between implementations: {losses}")
        floor = statistics.median(pooled["floor"]) if pooled.get("floor") else float("nan")
        stock = statistics.median(pooled["fsdp2"]) if pooled.get("fsdp2") else float("nan")
        print(f"{'size':6}{'impl':8}{'median s':>10}{'min':>9}{'max':>9}{'n':>5}{'x floor':>9}{'of fsdp2':>10}")
        for impl, times in pooled.items():
            median = statistics.median(times)
            print(f"{size:6}{impl:8}{median:10.4f}{min(times):9.4f}{max(times):9.4f}{len(times):5}{median / floor:9.2f}"
                  f"{median / stock:10.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
