#!/usr/bin/env python3
"""State dicts of shardd against torch's: the whole model on rank 0, and torch.distributed.checkpoint, in turns.

    python3 tests/bench/torch_state_dict.py --size X

A rank is written for PyTorch; for shardd the names are swapped (shardd.torch.install). What is asked of each, on the same model:
  full    the full state dict on rank 0, offloaded: get_model_state_dict of fully_shard, and of the wrapper FULL_STATE_DICT with
          rank0_only; beside the time, how far the peak of each other rank (VmHWM, all that it maps) is above what it held before
  save    get_state_dict of model and optimizer, and dcp.save of that into a folder in memory
  load    get_state_dict, dcp.load into that, and set_state_dict
Times are the slowest rank's. The implementations of a face take turns; a ratio is of turns that followed each other. `cpu` is
processor time of ranks and daemon, steadier where the machine does other things. What rank 0 gets is compared, names and
values, before and after the load.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch_fleet
import torch_step
from torch_fleet import Fleet, Turn, ratio

# 1: FullyShardedDataParallel, else fully_shard; f: torch.optim.AdamW with shardd, which else takes the daemon's
IMPLEMENTATIONS = ("fsdp2", "shardd", "sharddf", "fsdp1", "shardd1", "shardd1f")
PARTS = ("full", "save", "load")


def _base(implementation: str) -> str:
    return "fsdp1" if "1" in implementation else "fsdp2"


def _sharded(implementation: str, size: str) -> tuple[Any, Any]:
    import torch
    import torch.distributed as dist

    from model import Gpt

    if implementation.startswith("shardd"):
        import shardd.torch

        shardd.torch.install(optimizers=not implementation.endswith("f"))
    layers, width, heads, _ = torch_step.SIZES[size]
    torch.manual_seed(1)
    model: Any = Gpt(width, layers, heads, torch_step.CONTEXT)
    if _base(implementation) == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        policy = ModuleWrapPolicy({type(model.blocks[0])})
        cpu = torch.device("cpu")
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=cpu, device_mesh=mesh
        )
    else:
        from torch.distributed.fsdp import fully_shard

        for module in [*model.blocks, model]:
            fully_shard(module)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4)


def _full_state_dict(model: Any, implementation: str) -> dict[str, Any]:
    if _base(implementation) == "fsdp2":
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    import torch.distributed.fsdp as fsdp

    # PyTorch's offload_to_cpu wants an accelerator; on a CPU rank0_only alone is the same.
    config = fsdp.FullStateDictConfig(rank0_only=True, offload_to_cpu=False)
    with fsdp.FullyShardedDataParallel.state_dict_type(model, fsdp.StateDictType.FULL_STATE_DICT, config):
        found: dict[str, Any] = model.state_dict()
    return found


def _reset_peak() -> float:
    """What this process holds from now on is its peak; gives what it holds, in MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_mib("VmRSS:")


def _status_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def make(implementation: str, args: argparse.Namespace) -> Turn:
    import warnings

    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    model, optimizer = _sharded(implementation, args.size)
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    from model import batch, load_text

    warnings.filterwarnings("ignore")
    text = load_text()
    rank = dist.get_rank()
    for step in range(2):
        model(*batch(text, torch_step.SIZES[args.size][3], torch_step.CONTEXT, rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = f"{args.folder}/{implementation}"

    def full() -> dict[str, Any]:
        return _full_state_dict(model, implementation)

    def both() -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state}

    def load() -> None:
        state = both()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def clocked(work: Any) -> tuple[float, Any]:
        dist.barrier()
        start = time.perf_counter()
        result = work()
        return time.perf_counter() - start, result

    def turn(part: int) -> dict[str, Any]:
        if PARTS[part] == "full":
            before = _reset_peak()
            wall_s, state = clocked(full)
            grown_mib = _status_mib("VmHWM:") - before
            assert bool(state) == (rank == 0), f"rank {rank} has {len(state)} tensors"
            norms = {name: float(torch.linalg.vector_norm(value)) for name, value in state.items()}
            return {"wall_s": wall_s, "grown_mib": grown_mib, "norms": norms}
        if PARTS[part] == "save":
            return {"wall_s": clocked(lambda: dcp.save(both(), checkpoint_id=folder))[0]}
        return {"wall_s": clocked(load)[0]}

    return turn


def _compare(implementation: str, norms: dict[str, float], want: dict[str, float]) -> None:
    """Trained apart, in another order of sums: alike to 1e-3."""
    if norms.keys() != want.keys():
        raise SystemExit(f"{implementation}: other names (got {sorted(norms)[:3]}.., want {sorted(want)[:3]}..)")
    for name, value in want.items():
        if abs(norms[name] - value) > 1e-3 * abs(value) + 1e-6:
            raise SystemExit(f"{implementation}: norm of {name} differs (got {norms[name]}, want {value})")


Rounds = list[dict[str, list[dict[str, Any]]]]  # of one implementation: by part, the ranks' answers


def _measure(args: argparse.Namespace, implementations: list[str]) -> dict[str, Rounds]:
    """Of implementations with the same base, the base first. The first round warms up and is left out."""
    fleets: list[Fleet] = []
    rounds: dict[str, Rounds] = {name: [] for name in implementations}
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="shardd-bench-") as folder:
        try:
            for implementation in implementations:
                fleets.append(Fleet(implementation, args, size=args.size, folder=folder))
            for _ in range(1 + args.rounds):
                for fleet in fleets:
                    rounds[fleet.implementation].append({PARTS[0]: fleet.turn(0)})
                for fleet in fleets:
                    for number in 1, 2:
                        rounds[fleet.implementation][-1][PARTS[number]] = fleet.turn(number)
                    shutil.rmtree(f"{folder}/{fleet.implementation}")
            for fleet in fleets:  # what the last load left
                rounds[fleet.implementation][-1]["after"] = fleet.turn(0)
        finally:
            for fleet in fleets:
                fleet.__exit__()
    want = rounds[implementations[0]][0]["full"][0]["norms"]
    for name, answers in rounds.items():
        for answer in answers[-1]["full"][0], answers[-1]["after"][0]:
            _compare(name, answer["norms"], want)
    return {name: answers[1:] for name, answers in rounds.items()}


def main() -> None:
    parser = torch_fleet.options(__doc__)
    parser.add_argument("--size", default="X", choices=torch_step.SIZES)
    parser.add_argument("--implementations", nargs="+", default=list(IMPLEMENTATIONS), choices=IMPLEMENTATIONS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)  # in a rank
    args = parser.parse_args()
    if args.implementation:
        torch_fleet.serve(make, args)
    rounds: dict[str, Rounds] = {}
    for base in "fsdp2", "fsdp1":  # one after the other: at 85 M each family takes some 8 GiB
        family = [name for name in IMPLEMENTATIONS if name in args.implementations and _base(name) == base]
        rounds.update(_measure(args, family) if family else {})
    result: dict[str, Any] = {"bench": "torch_state_dict", "size": args.size, "world": args.world,
                              "rounds": args.rounds, "implementations": {}}  # fmt: skip
    print(f"{args.size}, {args.world} ranks: ms, x torch's (spread), cpu x torch's; other ranks grow, MiB")
    for name, answers in rounds.items():
        entry: dict[str, Any] = {}
        base = rounds.get(_base(name), [])
        for part in PARTS:
            wall_s, base_wall_s = ([max(rank["wall_s"] for rank in a[part]) for a in who] for who in (answers, base))
            cpu_s, base_cpu_s = ([a[part][0]["cpu_s"] for a in who] for who in (answers, base))
            entry[part] = {"ms": statistics.median(wall_s) * 1e3, "cpu_ms": statistics.median(cpu_s) * 1e3}
            line = f"{name:10}{part:5}{entry[part]['ms']:9.1f}"
            if base:
                entry[part]["of_torch"] = ratio(wall_s, base_wall_s)
                entry[part]["cpu_of_torch"] = ratio(cpu_s, base_cpu_s)
                line += "   {:.2f} ({:.2f}-{:.2f})".format(*entry[part]["of_torch"])
                line += "   cpu {:.2f}".format(entry[part]["cpu_of_torch"][0])
            if part == "full":
                entry["others_grow_mib"] = max(rank["grown_mib"] for a in answers for rank in a["full"][1:])
                line += f"   others +{entry['others_grow_mib']:.1f} MiB"
            print(line, flush=True)
        result["implementations"][name] = entry
    torch_fleet.store(args, result)


if __name__ == "__main__":
    main()
