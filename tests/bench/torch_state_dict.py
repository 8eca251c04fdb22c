#!/usr/bin/env python3
"""State dicts of shardd against torch's: the whole on rank 0, and torch.distributed.checkpoint, in turns.

    python3 tests/bench/torch_state_dict.py --size X

What is asked of each, in one run on the same model:
  full    the full state dict on rank 0: ``get_model_state_dict`` (full_state_dict, cpu_offload) of fully_shard, and of the
          wrapper (FULL_STATE_DICT with rank0_only and offload); beside the time, by how much the other ranks' own memory
          grows meanwhile
  save    ``dcp.save`` of model and optimizer, into a folder in memory
  load    ``dcp.load`` of the same and ``set_state_dict``
Times are the slowest rank's. One turn of an implementation after the other; ratios are of turns that followed each other.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from typing import Any

import torch_fleet
import torch_step
from torch_fleet import Fleet, Turn, ratio

IMPLEMENTATIONS = ("fsdp2", "shardd", "fsdp1", "shardd1")
_BASE = {"shardd": "fsdp2", "shardd1": "fsdp1"}
_PARTS = ("full", "save", "load")


def _model(implementation: str, size: str) -> tuple[Any, Any]:
    import torch

    from model import Gpt

    layers, width, heads, _ = torch_step.SIZES[size]
    torch.manual_seed(1)
    model: Any = Gpt(width, layers, heads, torch_step.CONTEXT)
    if not implementation.endswith("1"):
        return model, torch_fleet.shard(model, list(model.blocks), implementation)
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    if implementation == "shardd1":
        from shardd.torch import FullyShardedDataParallel
        from shardd.torch.optim import AdamW
    else:
        from torch.distributed.fsdp import FullyShardedDataParallel  # type: ignore[assignment]
        from torch.optim import AdamW  # type: ignore[assignment]
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(model.blocks[0])}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
        device_mesh=torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),)),
    )
    return model, AdamW(model.parameters(), lr=3e-4)


class _Peak:
    """The most that this process holds for itself alone, above what it held before; read every few milliseconds."""

    def __enter__(self) -> _Peak:
        self._over = threading.Event()
        self._before = self.mib = self._own_mib()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    @staticmethod
    def _own_mib() -> float:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) / 1024 for line in file if line.startswith("RssAnon:"))

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            self.mib = max(self.mib, self._own_mib())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.mib = max(self.mib, self._own_mib()) - self._before


def make(implementation: str, args: argparse.Namespace) -> Turn:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_state_dict,
        set_state_dict,
    )

    from model import batch, load_text

    warnings.filterwarnings("ignore")
    model, optimizer = _model(implementation, args.size)
    text = load_text()
    rank = dist.get_rank()
    batch_size = torch_step.SIZES[args.size][3]
    for step in range(2):
        model(*batch(text, batch_size, torch_step.CONTEXT, rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    names: list[Any] = [tempfile.mkdtemp(dir="/dev/shm", prefix="shardd-bench-") if rank == 0 else None]
    dist.broadcast_object_list(names)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)

    def clocked(work: Any) -> float:
        dist.barrier()
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def full() -> None:
        state = get_model_state_dict(model, options=options)
        assert bool(state) == (rank == 0)

    def save() -> None:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=names[0])

    def load() -> None:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=names[0])
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def turn(count: int) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        with _Peak() as peak:
            answer["full"] = clocked(full)
        answer["grown_mib"] = peak.mib
        answer["save"] = clocked(save)
        answer["load"] = clocked(load)
        model(*batch(text, batch_size, torch_step.CONTEXT, rank, count))  # what was loaded is used
        if rank == 0:
            shutil.rmtree(names[0])
        dist.barrier()
        return answer

    return turn


def main() -> None:
    parser = torch_fleet.options(__doc__)
    parser.add_argument("--size", default="X", choices=torch_step.SIZES)
    parser.add_argument("--implementations", nargs="+", default=list(IMPLEMENTATIONS), choices=IMPLEMENTATIONS)
    args = parser.parse_args()
    if args.implementation:
        torch_fleet.serve(make, args)
    fleets: list[Fleet] = []
    turns: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in args.implementations}
    try:
        for implementation in args.implementations:
            fleets.append(Fleet(implementation, args, size=args.size))
        for number in range(args.rounds):
            for fleet in fleets:
                turns[fleet.implementation].append(fleet.turn(number))
    finally:
        for fleet in fleets:
            fleet.__exit__()
    result: dict[str, Any] = {"bench": "torch_state_dict", "size": args.size, "world": args.world,
                              "rounds": args.rounds, "implementations": {}}  # fmt: skip
    print(
        f"{args.size}, {args.world} ranks: ms" + "".join(f"{part:>26}" for part in _PARTS) + "   other ranks grow, MiB"
    )
    slowest = {
        name: {part: [max(answer[part] for answer in ranks) for ranks in rounds] for part in _PARTS}
        for name, rounds in turns.items()
    }
    for name, rounds in turns.items():
        entry: dict[str, Any] = {}
        line = f"{name:18}"
        for part in _PARTS:
            entry[part] = statistics.median(slowest[name][part]) * 1e3
            line += f"{entry[part]:10.1f}"
            if _BASE.get(name) in slowest:
                entry[f"{part}_of_torch"] = ratio(slowest[name][part], slowest[_BASE[name]][part])
                line += " {:.2f} ({:.2f}-{:.2f})".format(*entry[f"{part}_of_torch"])
            else:
                line += " " * 16
        entry["others_grow_mib"] = max(answer["grown_mib"] for ranks in rounds for answer in ranks[1:])
        print(line + f"{entry['others_grow_mib']:10.1f}", flush=True)
        result["implementations"][name] = entry
    torch_fleet.store(args, result)


if __name__ == "__main__":
    main()
