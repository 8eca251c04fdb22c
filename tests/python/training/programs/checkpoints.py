"""Programs that save themselves, and go on from what they find when they start."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from training.programs.nets import Layer, Net
from training.programs.script import Script, data

__all__ = ["AppState", "latest", "mark", "moving_average", "resume_dcp", "resume_torch_save"]


class AppState(Stateful):
    """As PyTorch's tutorial on distributed checkpoints has it."""

    def __init__(self, model: Any, optimizer: Any = None) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer or ())
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer or (), model_state_dict=state["model"], optim_state_dict=state["optim"]
        )


def mark(folder: Path, step: int) -> None:
    """All ranks have written what belongs to ``step``."""
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "new").write_text(str(step))
        (folder / "new").rename(folder / "latest")


def latest(folder: Path) -> int:
    """The step of the newest whole checkpoint; 0 without one. The same on all ranks."""
    found = torch.zeros((), dtype=torch.long)
    if dist.get_rank() == 0 and (folder / "latest").exists():
        found += int((folder / "latest").read_text())
    dist.broadcast(found, src=0)
    return int(found)


def _step(model: Any, optimizer: torch.optim.Optimizer, step: int) -> float:
    loss = torch.nn.functional.dropout(model(data(step, 4, 5)), 0.2).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def resume_dcp(script: Script) -> list[Any]:
    """Model, optimizer, schedule, random state and what was seen, every other step; the program knows no other way back."""
    model = script.shard(Net(depth=3), Layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-2, weight_decay=0.1)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7)
    torch.manual_seed(dist.get_rank())
    seen: list[Any] = []
    start = latest(script.folder)
    mine = script.folder / f"{dist.get_rank()}.pt"
    if start:
        dcp.load({"app": AppState(model, optimizer)}, checkpoint_id=script.folder / f"step-{start}")
        kept = torch.load(mine, weights_only=True)[start]
        seen = kept["seen"]
        torch.set_rng_state(kept["rng"])
        rate.load_state_dict(kept["rate"])
    files: dict[int, Any] = {}
    for step in range(start, 7):
        seen.append(_step(model, optimizer, step))
        rate.step()
        if step % 2:
            dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=script.folder / f"step-{step + 1}")
            files[step + 1] = {"seen": seen, "rng": torch.get_rng_state(), "rate": rate.state_dict()}
            torch.save(files, mine)
            mark(script.folder, step + 1)
    assert float(next(iter(optimizer.state.values()))["step"]) == 7
    return [*seen, rate.get_last_lr(), *script.parameters(model)]


def resume_torch_save(script: Script) -> list[Any]:
    """One file of rank 0 with all that is whole, read by it alone and broadcast, as with any model that was not sharded."""
    model = script.shard(Net(depth=3), Layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-2)
    file = script.folder / "checkpoint.pt"
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    seen: list[Any] = []
    start = latest(script.folder)
    if start:
        kept: dict[str, Any] = {"model": {}, "optim": {}}
        if dist.get_rank() == 0:
            kept = torch.load(file, weights_only=True, mmap=True)
        spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, kept["model"], options=spread)
        set_optimizer_state_dict(model, optimizer, kept["optim"], options=spread)
        said = [kept.get("seen")]
        dist.broadcast_object_list(said, src=0)
        seen = said[0]
    for step in range(start, 6):
        torch.manual_seed(step)
        loss = torch.tensor(_step(model, optimizer, step))
        dist.all_reduce(loss)
        seen.append(loss.item())
        if step % 2 == 0:
            state = {
                "model": get_model_state_dict(model, options=whole),
                "optim": get_optimizer_state_dict(model, optimizer, options=whole),
                "seen": seen,
            }
            if dist.get_rank() == 0:
                torch.save(state, file.with_suffix(".new"))
                file.with_suffix(".new").rename(file)
            mark(script.folder, step + 1)
    return [*seen, *script.parameters(model)]


def moving_average(script: Script) -> list[Any]:
    """A second model follows the first, is evaluated, and takes its place in the end; both are saved together."""
    net = Net()
    average = script.shard(copy.deepcopy(net).requires_grad_(False), Layer)
    model = script.shard(net, Layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    seen: list[Any] = []
    start = latest(script.folder)
    parts = {"app": AppState(model, optimizer), "average": AppState(average)}
    if start:
        dcp.load(parts, checkpoint_id=script.folder / f"step-{start}")
        seen = torch.load(script.folder / f"{dist.get_rank()}-{start}.pt")
    for step in range(start, 4):
        loss = model(data(step, 4, 5)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters()):
                slow.lerp_(fast, 0.2)
            seen += [loss.item(), average(data(step + 50, 4, 5))]
        getattr(average, "reshard", lambda: None)()  # torch's root stays unsharded after a forward
        if script.form != "plain":
            dcp.save(parts, checkpoint_id=script.folder / f"step-{step + 1}")
            torch.save(seen, script.folder / f"{dist.get_rank()}-{step + 1}.pt")
            mark(script.folder, step + 1)
    model.load_state_dict(average.state_dict())
    with torch.no_grad():
        return [*seen, model(data(7, 4, 5))]
