"""What ranks do in the tests of torch's own optimizers: their state lies in the job's memory, and outlives the trainer."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from models import loss_of
from optim_cases import counts, full_state, model_of, parameters_of
from rank_main import report

KINDS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "muon": lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=1e-3),
}


def _in_the_jobs_memory(tensor: torch.Tensor) -> bool:
    address = tensor.data_ptr()
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(x, 16) for x in line.split()[0].split("-"))
            if begin <= address < end:
                return "shardd-optimizer" in line
    return False


def train(impl: str, kind: str) -> dict[str, Any]:
    rank = dist.get_rank()
    model = model_of(impl)
    optimizer = KINDS[kind](list(model.parameters()))
    losses = []
    for step in range(6):
        loss = loss_of(model, step, 0, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 3:
            optimizer.load_state_dict(optimizer.state_dict())  # makes new tensors
    homes = []
    for param, state in optimizer.state.items():
        for value in state.values():
            rows = value.to_local() if hasattr(value, "to_local") else value
            if torch.is_tensor(rows) and rows.numel() and rows.shape == param.to_local().shape:
                homes.append(_in_the_jobs_memory(rows))
    result = {"losses": losses, "state": full_state(optimizer), "parameters": parameters_of(model), "homes": homes}
    if impl == "shardd":
        from shardd.torch import commit

        commit(model)
        result["counters"] = counts(impl, model)
    return result


def both(kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return train("torch", kind), train("shardd", kind)


def train_and_be_killed(kind: str, steps: int) -> dict[str, Any]:
    """Goes on where the job is; says where it stands in each step, so that the test can kill it there."""
    from shardd.torch import commit, resume, ride

    rank = dist.get_rank()
    model = model_of("shardd")
    optimizer = KINDS[kind](list(model.parameters()))
    start, state = resume(model)
    losses: list[float] = state or []
    report(event="start", step=start, known=len(losses), states=len(optimizer.state))
    for step in range(start, steps):
        loss = loss_of(model, step, 0, rank)
        report(event="forward", step=step)
        if os.environ.get("HOLD") == f"forward {step}" and rank == 1:
            time.sleep(600)  # until the test kills it
        loss.backward()
        losses = [*losses, loss.item()]
        ride(losses)
        optimizer.step()
        optimizer.zero_grad()
        report(event="stepped", step=step)
        if os.environ.get("HOLD") == f"window {step}" and rank == 1:
            time.sleep(600)
    commit(model)
    return {"losses": losses, "state": full_state(optimizer), "parameters": parameters_of(model),
            "counters": counts("shardd", model)}  # fmt: skip


def steps_without_and_with_optimizer() -> dict[str, Any]:
    """Passes without a step, two optimizers, one of which has state that cannot be kept."""
    rank = dist.get_rank()
    model = model_of("shardd")
    first = torch.optim.AdamW(model.layers.parameters(), lr=1e-2)
    rest = [p for n, p in model.named_parameters() if not n.startswith("layers.")]

    class Listing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            for param in rest:
                self.state[param]["history"] = [p.detach().clone() for p in rest] * 50
            return result

    second = Listing(rest, lr=0.1)
    losses = []
    for step in range(4):
        loss = loss_of(model, step, 0, rank)
        loss.backward()
        losses.append(loss.item())
        if step != 2:  # its gradients add up with the next
            first.step()
            second.step()
            first.zero_grad()
            second.zero_grad()
    from shardd.torch import commit

    commit(model)
    return {"losses": losses, "counters": counts("shardd", model)}
