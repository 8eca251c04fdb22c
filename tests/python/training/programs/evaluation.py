"""Programs that evaluate while they train."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn

from training.programs.checkpoints import AppState
from training.programs.nets import Layer, Net
from training.programs.script import Script, data

__all__ = ["early_stopping", "evaluation_in_between"]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Net(outputs=6, depth=3)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.norm(self.body(x)).relu()))  # type: ignore[no-any-return]


def _metrics(model: Any, number: int) -> list[float]:
    """Sums over all ranks, whose last batches have different sizes."""
    was = model.training
    model.eval()
    totals = torch.zeros(3)
    with torch.no_grad():
        for batch in range(2):
            x = data(900 + 10 * number + batch, 4 if batch == 0 else 1 + dist.get_rank(), 5)
            labels = (x.sum(1) > 0).long()
            logits = model(x)
            totals += torch.stack(
                [
                    F.cross_entropy(logits, labels, reduction="sum"),
                    (logits.argmax(1) == labels).sum(),
                    len(x) + torch.zeros(()),
                ]
            )
    dist.all_reduce(totals)
    model.train(was)
    return (totals[:2] / totals[2]).tolist()


def evaluation_in_between(script: Script) -> list[Any]:
    """Before training, between micro-batches, between a backward and its step, and after it; the rate follows the metric."""
    torch.manual_seed(9)
    net = Classifier()
    model = script.shard(net, Layer)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2, momentum=0.5, eps=1e-3)
    rate = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    start, kept = script.resume(model)
    seen: list[Any] = []
    if kept is None:
        seen += _metrics(model, 0)
    else:
        seen, state, buffers = kept
        for name, buffer in net.named_buffers():
            buffer.copy_(buffers[name])
        rate.load_state_dict(state)
        optimizer.param_groups[0]["lr"] = rate.get_last_lr()[0]
    for step in range(start, 5):
        if step:  # of the step before, which a restarted program evaluates anew
            value = _metrics(model, 3)
            rate.step(value[0])
            seen += [*value, optimizer.param_groups[0]["lr"]]
        torch.manual_seed(100 * step + dist.get_rank())
        for micro in range(2):
            with script.accumulating(model, micro == 1):
                x = data(10 * step + micro, 4, 5)
                loss = F.cross_entropy(model(x), (x.sum(1) > 0).long()) / 2
                loss.backward()
            seen.append(loss.item())
            seen += _metrics(model, 1 + micro)
        script.ride((seen, rate.state_dict(), {name: buffer.clone() for name, buffer in net.named_buffers()}))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        return [*seen, model(data(99, 4, 5)), *script.parameters(model)]


def early_stopping(script: Script) -> list[Any]:
    """One rank sees that it gets worse and tells the others; all go back to the best weights and optimizer state."""
    model = script.shard(Net(), Layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.4)
    start, found = script.resume(model)
    seen: list[Any] = []
    best, at, kept = float("inf"), 0, None
    if found is not None:
        seen, best, at = found
    for step in range(start, 12):
        if step:  # of the step before, which a restarted program evaluates anew
            model.eval()
            with torch.no_grad():
                score = model(data(0, 8, 5, rank=7)).square().mean()
            model.train()
            seen.append(score.item())
            # Rank 1 decides, by what it alone knows.
            said = torch.tensor([float(score < best), float(step > 4 and score > 1.5 * best)])
            dist.broadcast(said, src=1)
            if said[0]:
                best, at = score.item(), step
                kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=script.folder / f"best-{at}")
            if said[1]:
                break
        loss = model(data(step, 4, 5)).square().mean()
        loss.backward()
        seen.append(loss.item())
        script.ride((seen, best, at))
        optimizer.step()
        optimizer.zero_grad()
    if kept is not None:
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
    else:  # a restarted program's memory has none, but the disk has
        dcp.load({"app": AppState(model, optimizer)}, checkpoint_id=script.folder / f"best-{at}")
    for step in (20, 21):
        loss = model(data(step, 4, 5)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return [*seen, at, *script.parameters(model)]
