"""Two runs of the same program, with PyTorch's FSDP and with shardd: the same numbers, the same files, the same tensors.

compare.py NAME PYTORCH_FOLDER SHARDD_FOLDER COUNTS: prints a line, and ends with status 1 where they differ.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

NUMBERS = 1e-6  # largest relative difference of losses and norms
TENSORS = 2e-5  # largest difference of a tensor, relative to its largest element
# Where the optimizer begins anew from trained parameters (README): Adam's first step divides each gradient by itself, so
# what is rounding in a small gradient is more than that in its step.
# The same in the first steps of adapters, whose gradients are small.
RESTARTED = {"trainer1": 1e-4, "qlora": 1e-4}


class Differs(Exception):
    pass


def flatten(value: Any, path: str, folder: Path) -> Iterator[tuple[str, Any]]:
    """The tensors, numbers and strings in nested containers, by their place."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flatten(item, f"{path}/{key}".replace(str(folder.resolve()), "FOLDER"), folder)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from flatten(item, f"{path}/{number}", folder)
    elif isinstance(value, str):
        yield path, value.replace(str(folder.resolve()), "FOLDER")
    elif isinstance(value, (torch.Tensor, int, float)) or value is None:
        yield path, value


def contents(path: Path) -> Any:
    """Of a file, or of a folder of a distributed checkpoint. None: not of a kind that holds tensors."""
    if path.is_dir():
        with tempfile.TemporaryDirectory() as folder:
            dcp_to_torch_save(path, f"{folder}/whole")
            return torch.load(f"{folder}/whole", weights_only=False)
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl") and path.name != "training_args.bin":
        return torch.load(path, weights_only=False)
    return None


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def relative(a: float, b: float) -> float:
    return 0.0 if a == b or (math.isnan(a) and math.isnan(b)) else abs(a - b) / max(abs(a), abs(b))


def compare_numbers(ours: Path, theirs: Path) -> tuple[int, float]:
    got, want = (json.loads((folder / "losses.json").read_text()) for folder in (ours, theirs))
    if got.keys() != want.keys() or any(len(got[name]) != len(want[name]) for name in want):
        raise Differs(f"losses.json: other entries (got {sorted(got)}, want {sorted(want)})")
    worst = 0.0
    for name in want:
        for step, (a, b) in enumerate(zip(got[name], want[name])):
            worst = max(worst, relative(a, b))
            if not relative(a, b) <= NUMBERS:
                raise Differs(f"losses.json: {name!r} of step {step} differs (got {a!r}, want {b!r})")
    return sum(map(len, want.values())), worst


def compare_file(name: str, ours: Path, theirs: Path, limit: float) -> tuple[int, float]:
    got, want = (dict(flatten(contents(folder / name), "", folder)) for folder in (ours, theirs))
    if got.keys() != want.keys():
        raise Differs(f"{name}: other keys (only here {sorted(got.keys() - want.keys())}, "
                      f"only PyTorch {sorted(want.keys() - got.keys())})")  # fmt: skip
    tensors, worst = 0, 0.0
    for key, value in want.items():
        other = got[key]
        if isinstance(value, torch.Tensor):
            if not isinstance(other, torch.Tensor) or (other.shape, other.dtype) != (value.shape, value.dtype):
                raise Differs(f"{name}: {key} has another shape or dtype (got {other!r}, want {value!r})")
            tensors += 1
            if not torch.equal(torch.nan_to_num(other), torch.nan_to_num(value)):
                a, b = other.detach().double(), value.detach().double()
                difference = float((a - b).abs().max() / b.abs().max().clamp_min(1e-12))
                worst = max(worst, difference)
                if not difference <= limit:
                    raise Differs(f"{name}: {key} differs by {difference:.2g} of its largest element")
        elif isinstance(value, float) and isinstance(other, float):
            if not relative(other, value) <= NUMBERS and "time" not in key:
                raise Differs(f"{name}: {key} differs (got {other!r}, want {value!r})")
        elif other != value:
            raise Differs(f"{name}: {key} differs (got {other!r}, want {value!r})")
    return tensors, worst


def report(name: str, theirs: Path, ours: Path, counts: Path) -> None:
    """Prints a line on what is alike; exits with status 1 and a line on what is not."""
    if name == "float8":
        import torchao.float8  # noqa: F401  # its checkpoints have its classes
    try:
        if files(ours) != files(theirs):
            raise Differs(f"other files (only here {sorted(set(files(ours)) - set(files(theirs)))}, "
                          f"only PyTorch {sorted(set(files(theirs)) - set(files(ours)))})")  # fmt: skip
        numbers, worst = compare_numbers(ours, theirs)
        tensors, worst_tensor = 0, 0.0
        # A distributed checkpoint is compared as a whole.
        whole = {str(Path(file).parent) for file in files(theirs) if file.endswith(".metadata")}
        for item in sorted(whole | {file for file in files(theirs) if str(Path(file).parent) not in whole}):
            found, difference = compare_file(item, ours, theirs, RESTARTED.get(name, TENSORS))
            tensors, worst_tensor = tensors + found, max(worst_tensor, difference)
        jobs = [json.loads(line) for line in counts.read_text().splitlines()] if counts.exists() else []
        reductions, commits, updated = (
            sum(job.get(key, 0) for job in jobs) for key in ("reductions", "commits", "bytes_updated")
        )
        if not reductions or not commits or not updated:
            raise Differs(
                f"the daemon has not done the work (got {reductions} reductions, {commits} committed steps and {updated} "
                "bytes of shards updated by its optimizer)"
            )
    except Differs as error:
        print(f"{name}: DIFFERS: {error}")
        sys.exit(1)
    print(f"{name}: {numbers} losses and norms within {worst:.1e}; {len(files(theirs))} files, {tensors} tensors within "
          f"{worst_tensor:.1e}; the daemon: {len(jobs)} models, {commits} commits, {reductions} reductions")  # fmt: skip


if __name__ == "__main__":
    report(sys.argv[1], *map(Path, sys.argv[2:5]))
