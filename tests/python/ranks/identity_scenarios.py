"""What ranks do in the tests of models that some ranks make and others do not, by torch's FSDP and by shardd's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from state_dicts.wrapper_state_cases import face, quiet


def _net(width: int) -> nn.Module:
    torch.manual_seed(width)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 2))


class Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = _net(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)  # type: ignore[no-any-return]


def _sharded(impl: str, form: str, model: nn.Module, group: Any) -> Any:
    if form == "wrapper":
        return face(impl)(model, process_group=group, device_id=torch.device("cpu"), use_orig_params=True)
    import shardd.torch

    fully_shard: Any = shardd.torch.fully_shard if impl == "shardd" else torch.distributed.fsdp.fully_shard
    return fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))


def _train(model: Any, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss = model(torch.randn(4, 6, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def models_of_some(impl: str, form: str) -> dict[str, list[float]]:
    """On three ranks: one alone, two together, one that rank 0 makes over all and does not use, and then those of all ranks."""
    rank, found = dist.get_rank(), {}
    alone = [dist.new_group([member]) for member in range(3)]
    pairs = [dist.new_group([0, 1]), dist.new_group([0, 2])]
    world = dist.new_group([0, 1, 2])
    with quiet():
        if rank == 0:
            found["teacher"] = _train(_sharded(impl, form, Teacher(), alone[0]), 2)
            found["same"] = _train(_sharded(impl, form, _net(4), alone[0]), 1)
            unused = _sharded(impl, form, Teacher(), world)
        for number, group in enumerate(pairs):
            if rank in (0, number + 1):
                found[f"pair {number}"] = _train(_sharded(impl, form, _net(4), group), 2)
        first = _sharded(impl, form, _net(4), world)
        found["first"] = _train(first, 2)
        found["second"] = _train(_sharded(impl, form, _net(4), world), 2)
        if rank == 0:
            del unused
    return found


def other_ignored_modules(impl: str) -> list[Any]:
    """Ranks with different numbers of ignored modules train what they manage alike; as torch's, by clean name."""
    rank = dist.get_rank()
    model = nn.ModuleDict({"extra": nn.ModuleList([nn.Linear(2, 2) for _ in range(rank)]), "net": _net(4)})

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts["net"](x)  # type: ignore[no-any-return]

    with quiet():
        whole = face(impl)(
            Whole(), device_id=torch.device("cpu"), use_orig_params=True, ignored_modules=list(model["extra"])
        )
        losses = _train(whole, 3)
        norms = [round(float(p.detach().norm()), 4) for n, p in whole.named_parameters() if "extra" in n]
    return [losses, len(norms)]


class Deep(nn.Module):
    """Of ``layers`` layers, which is all that two of them differ in."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(6, 6) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def one_layer_more(form: str) -> tuple[str, float]:
    """What each rank is told, and after how many seconds, where rank 1 has one layer more."""
    import time

    with quiet():
        model = _sharded("shardd", form, Deep(2 + dist.get_rank()), dist.group.WORLD)
        begin = time.monotonic()
        try:
            model(torch.randn(4, 6))
        except RuntimeError as error:
            return str(error), time.monotonic() - begin
    return "", time.monotonic() - begin
