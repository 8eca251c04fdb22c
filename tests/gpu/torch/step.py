"""Time of a training step on one GPU: shardd, torch's fully_shard and the floor (forward and backward alone), in turns.

    SHARDD_BIN=<folder with shardd> python tests/gpu/torch/step.py [--sizes M X L] [--steps 20] [--rounds 5]

One rank. Parameters are fp32 and computed with in bf16, gradients are reduced in fp32 (MixedPrecisionPolicy), AdamW with
fused=True on torch's side; shardd with its own AdamW, and with torch's (foreach and fused), for which passes read copies of
the parameters. "daemon-sums" is shardd with gradients added by the daemon (SHARDD_TRAINER_SUMS=0); else they are added in
the trainer's own context, unless the GPU is under MPS. Model: GPT with scaled_dot_product_attention, vocabulary 512. Times are of whole turns of steps
between two synchronisations, after a turn that is not counted; the spread is of the rounds' medians.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parents[3]
# layers, width, heads, context, batch
SIZES = {"S": (5, 128, 4, 128, 8), "M": (6, 384, 6, 256, 8), "X": (12, 768, 12, 1024, 8), "L": (24, 1024, 16, 1024, 8)}
IMPLEMENTATIONS = ["floor", "fsdp2", "shardd", "daemon-sums", "shardd-torch-foreach", "shardd-torch-fused"]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, w))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(512, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 512, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Turns:
    def __init__(self, name: str, size: str, precision: str) -> None:
        layers, width, heads, context, batch = SIZES[size]
        torch.manual_seed(1)
        self.model: Any = Gpt(layers, width, heads, context).cuda()
        self.numel = sum(p.numel() for p in self.model.parameters())
        self.optimizer = self._shard(name, precision)
        generator = torch.Generator().manual_seed(2)
        self.data = torch.randint(0, 512, (batch, context + 1), generator=generator).cuda()
        self.cast = torch.autocast("cuda", torch.bfloat16, enabled=name == "floor" and precision == "bf16")
        self.loss = torch.zeros(())

    def _shard(self, name: str, precision: str) -> Any:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        if name == "floor":
            if precision == "bf16":
                self.model.bfloat16()
            return None
        if name == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            make: Any = functools.partial(torch.optim.AdamW, fused=True)
        else:
            from shardd.torch import fully_shard
            from shardd.torch.optim import AdamW as make

            if name.startswith("shardd-torch-"):
                make = functools.partial(torch.optim.AdamW, **{name.removeprefix("shardd-torch-"): True})
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if precision == "bf16" else MixedPrecisionPolicy()
        for block in self.model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(self.model, mp_policy=policy)
        return make(self.model.parameters(), lr=3e-4)

    def turn(self, steps: int) -> float:
        """Seconds of a step. ``host``: of which this thread takes for forward, backward and optimizer, without the GPU."""
        torch.cuda.synchronize()
        self.host = [0.0, 0.0, 0.0]
        start = time.perf_counter()
        for _ in range(steps):
            marks = [time.perf_counter()]
            logits = self.model(self.data[:, :-1])
            self.loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), self.data[:, 1:].flatten())
            marks.append(time.perf_counter())
            self.loss.backward()
            marks.append(time.perf_counter())
            if self.optimizer is None:
                self.model.zero_grad()
            else:
                self.optimizer.step()
                self.optimizer.zero_grad()
            marks.append(time.perf_counter())
            self.host = [total + (end - begin) / steps for total, begin, end in zip(self.host, marks, marks[1:])]
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / steps


def _sums_of(name: str) -> None:
    os.environ.pop("SHARDD_TRAINER_SUMS", None)
    if name == "daemon-sums":
        os.environ["SHARDD_TRAINER_SUMS"] = "0"


def measure(size: str, precision: str, names: list[str], steps: int, rounds: int) -> dict[str, Any]:
    turns = {}
    for name in names:
        _sums_of(name)
        turns[name] = Turns(name, size, precision)
    memory = {}
    for name, one in turns.items():
        _sums_of(name)  # the first step opens the job
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        one.turn(steps)
        memory[name] = (torch.cuda.max_memory_allocated() - before) >> 20
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, one in turns.items():
            times[name].append(one.turn(steps) * 1e3)
    numel = next(iter(turns.values())).numel
    losses = {name: one.loss.item() for name, one in turns.items() if name != "floor"}
    print(
        f"\n{size}, {numel / 1e6:.1f} M parameters, {precision}: ms of a step (spread), x floor, of fsdp2; loss; peak MiB; host ms of forward, backward, step"
    )
    rows = {}
    for name in names:
        median = statistics.median(times[name])
        row: dict[str, Any] = {"ms": median, "low": min(times[name]), "high": max(times[name]),
                               "host_ms": [part * 1e3 for part in turns[name].host]}  # fmt: skip
        for other, key in (("floor", "x_floor"), ("fsdp2", "of_fsdp2")):
            if other in times:
                row[key] = statistics.median(a / b for a, b in zip(times[name], times[other]))
        rows[name] = row
        print(f"| {name} | {median:.2f} ({row['low']:.2f} to {row['high']:.2f}) | {row.get('x_floor', 0):.3f} | "
              f"{row.get('of_fsdp2', 0):.3f} | {losses.get(name, 0):.4f} | {memory[name]} | "
              + ", ".join(f"{part:.1f}" for part in row["host_ms"]) + " |", flush=True)  # fmt: skip
    return {"size": size, "precision": precision, "numel": numel, "rows": rows, "losses": losses}


def profile(size: str, precision: str, names: list[str]) -> None:
    for name in names:
        one = Turns(name, size, precision)
        one.turn(3)
        with torch.profiler.profile() as found:
            one.turn(3)
        print(name, found.key_averages().table(sort_by="self_cpu_time_total", row_limit=22, max_name_column_width=60))
        print(name, found.key_averages().table(sort_by="self_cuda_time_total", row_limit=14, max_name_column_width=60))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["S", "M", "X", "L"], choices=SIZES)
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp32"], choices=["bf16", "fp32"])
    parser.add_argument("--implementations", nargs="+", default=IMPLEMENTATIONS, choices=IMPLEMENTATIONS)
    parser.add_argument("--profile", action="store_true", help="where this process' time goes, of the first size")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("tests/gpu/torch/step.py: no GPU that torch can use is here")
    binary = Path(os.environ.get("SHARDD_BIN", ROOT / "build" / "cuda" / "bin")) / "shardd"
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="shardd-gpu-") as folder:
        os.environ["SHARDD_ADDRESS"] = f"unix:{folder}/shardd.sock"
        with open(f"{folder}/log", "wb") as log:
            daemon = subprocess.Popen([binary, f"--listen=unix:{folder}/shardd.sock", "--devices=cuda:all"],
                                      stdout=log, stderr=log)  # fmt: skip
        try:
            while not os.path.exists(f"{folder}/shardd.sock"):
                if daemon.poll() is not None:
                    sys.exit(Path(folder, "log").read_text())
                time.sleep(0.01)
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29517", rank=0, world_size=1)
            if args.profile:
                profile(args.sizes[0], args.precisions[0], args.implementations)
            results = [measure(size, precision, args.implementations, args.steps, args.rounds)
                       for precision in args.precisions for size in args.sizes]  # fmt: skip
            print(json.dumps(results))
            dist.destroy_process_group()
        finally:
            daemon.terminate()
            daemon.wait(timeout=60)


if __name__ == "__main__":
    main()
