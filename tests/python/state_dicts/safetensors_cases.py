"""What ranks do in the tests of safetensors directories."""

from __future__ import annotations

import os
import resource
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from models import Case
from optimizers.optim_cases import counts, optimizer_of
from rank_main import report
from state_dicts.state_dict_cases import sharded, train, whole
from training.resume_scenarios import attempt


def save(folder: str) -> dict[str, Any]:
    """Tied parameters, a wrapper in the tree, several files, another dtype; over files of an earlier save."""
    from shardd.torch import save_safetensors

    model = sharded("shardd", Case(tie=True, mesh=(2, 2)), checkpointed=True)
    optimizer = optimizer_of("shardd", "adamw", model.parameters())
    train(model, optimizer, range(2))
    with torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.long))  # the root stays unsharded
    state = {n: v.detach().clone() for n, v in whole(model.state_dict()).items()}
    for max_shard_bytes in (1000, 3000):
        save_safetensors(model, f"{folder}/fp32", max_shard_bytes=max_shard_bytes)
    save_safetensors(model, f"{folder}/bf16", dtype=torch.bfloat16)
    return {"state": state, "went on": train(model, optimizer, range(2, 4)), "counters": counts("shardd", model)}


def load(folder: str, edits: bool) -> dict[str, Any]:
    """Into a model without a job, into one that trains, with other dtypes; what cannot be loaded changes nothing."""
    from shardd.torch import load_safetensors

    out: dict[str, Any] = {"errors": {}}
    for when in ("fresh", "used"):
        model = sharded("shardd", Case(tie=True))
        optimizer = optimizer_of("shardd", "adamw", model.parameters(), in_place_edits=edits)
        if when == "used":
            train(model, optimizer, range(9, 10))
        before = whole(model.state_dict())
        for name, path in (("shape", "wrong"), ("names", "less"), ("file", "nothing")):
            try:
                load_safetensors(model, f"{folder}/{path}")
            except (ValueError, RuntimeError, FileNotFoundError) as error:
                out["errors"][name] = f"{type(error).__name__}: {error}"
        after = whole(model.state_dict())
        out[f"{when} unchanged"] = all(torch.equal(after[n], v) for n, v in before.items())
        keys = load_safetensors(model, f"{folder}/less", strict=False)
        out["missing"] = list(keys.missing_keys)
        keys = load_safetensors(model, f"{folder}/fp32")
        out["all"] = keys.missing_keys == keys.unexpected_keys == []
        out[when] = whole(model.state_dict())
        loss = train(model, optimizer, range(2, 3))  # reads what was loaded
        load_safetensors(model, f"{folder}/bf16")
        out[f"{when} bf16"] = whole(model.state_dict())
        out[f"{when} loss"] = loss
        out[f"{when} counters"] = counts("shardd", model)
    return out


def load_only(folder: str, edits: bool) -> dict[str, Any]:
    """What ``save`` has written, into a model that trains."""
    from shardd.torch import load_safetensors

    model = sharded("shardd", Case(tie=True))
    optimizer = optimizer_of("shardd", "adamw", model.parameters(), in_place_edits=edits)
    train(model, optimizer, range(9, 10))
    load_safetensors(model, f"{folder}/fp32")
    out: dict[str, Any] = {"state": whole(model.state_dict())}
    load_safetensors(model, f"{folder}/bf16")
    out["bf16"] = whole(model.state_dict())
    out["counters"] = counts("shardd", model)
    return out


def torn_save(folder: str) -> dict[str, Any]:
    """A save that ends at every rename of its files, over an earlier one of as many files; then one that does not end."""
    from shardd.torch import save_safetensors
    from shardd.torch._state_dicts import safetensors

    model = sharded("shardd", Case(tie=True))
    optimizer = optimizer_of("shardd", "adamw", model.parameters())
    train(model, optimizer, range(1))
    save_safetensors(model, folder, max_shard_bytes=3000)
    out: dict[str, Any] = {"first": whole(model.state_dict()), "files": [sorted(os.listdir(folder))], "read": []}
    dist.barrier()
    train(model, optimizer, range(1, 2))
    theirs = os.replace
    for renames in range(len(out["files"][0])):
        safetensors.os.replace = _Renames(renames)  # type: ignore[attr-defined]
        try:
            save_safetensors(model, folder, max_shard_bytes=3000)
            out["read"].append("it did not raise")
        except (OSError, RuntimeError):
            pass
        finally:
            safetensors.os.replace = theirs  # type: ignore[attr-defined]
        out["read"].append(read_whole(folder))
    for _ in range(2):
        save_safetensors(model, folder, max_shard_bytes=3000)
        out["files"].append(sorted(os.listdir(folder)))
        dist.barrier()  # the next save makes files
    out["last"] = whole(model.state_dict())
    out["read"].append(read_whole(folder))
    out["counters"] = counts("shardd", model)
    return out


class _Renames:
    def __init__(self, left: int) -> None:
        self._left = left

    def __call__(self, source: str, target: str) -> None:
        if self._left == 0:
            raise OSError("no more renames")
        self._left -= 1
        os.rename(source, target)


def read_whole(folder: str) -> dict[str, torch.Tensor]:
    """Into a model without a job."""
    from shardd.torch import load_safetensors

    model = sharded("shardd", Case(tie=True))
    load_safetensors(model, folder)
    return whole(model.state_dict())


def torn_load(folder: str, edits: bool) -> dict[str, Any]:
    """First attempt: one rank cannot read its third piece, and the program ends. Second: it is resumed."""
    from shardd.torch import load_safetensors, resume, save_safetensors
    from shardd.torch._state_dicts import safetensors

    model = sharded("shardd", Case(tie=True))
    optimizer = optimizer_of("shardd", "adamw", model.parameters(), in_place_edits=edits)
    step, _ = resume(model)
    if attempt() == 1:
        out: dict[str, Any] = {"step": step, "state": whole(model.state_dict())}
        load_safetensors(model, folder)
        out["loaded"] = whole(model.state_dict())
        train(model, optimizer, range(2, 3))
        out["counters"] = counts("shardd", model)
        return out
    train(model, optimizer, range(1))
    save_safetensors(model, folder)
    saved = whole(model.state_dict())
    train(model, optimizer, range(1, 2))
    before = whole(model.state_dict())
    if dist.get_rank() == 0:
        torch.save({"before": before, "saved": saved}, f"{folder}/want.pt")
    theirs, reads = safetensors._read, 0

    def read(fd: int, data: memoryview, offset: int, path: str) -> None:
        nonlocal reads
        reads += 1
        if reads == 3 and dist.get_rank() == 1:
            raise OSError("the disk is gone")
        theirs(fd, data, offset, path)

    safetensors._read = read
    try:
        load_safetensors(model, folder)
    except (OSError, RuntimeError) as error:
        report(event="failed", error=str(error))
    dist.barrier()
    sys.exit(3)


class Stack(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _private_bytes() -> int:
    """Of this process, without what it shares with the daemon and page cache."""
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith(("Private_Dirty", "Private_Clean")))


def memory(folder: str) -> dict[str, Any]:
    """16 layers of 4 MiB: how much more this process has held at most while it saved and loaded."""
    from shardd.torch import fully_shard, load_safetensors, save_safetensors
    from shardd.torch.optim import SGD

    model = Stack(16, 1024)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    want = [p.to_local().clone().sum() for p in model.parameters()]
    dist.barrier()
    before = _private_bytes()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    os.write(os.open("/proc/self/clear_refs", os.O_WRONLY), b"5")  # the peak begins anew
    save_safetensors(model, folder)
    load_safetensors(model, folder)
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    high = int(lines["VmHWM"].split()[0]) << 10
    now = int(lines["VmRSS"].split()[0]) << 10
    got = [p.to_local().sum() for p in model.parameters()]
    return {"grown": _private_bytes() - before, "peak": high - now, "same": got == want, "largest": 4 << 20,
            "model": 64 << 20, "before": peak, "counters": counts("shardd", model)}  # fmt: skip
