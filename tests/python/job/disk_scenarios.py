"""Checkpoints into a disk that is full."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from models import Case, loss_of
from optimizers.optim_cases import counts, model_of, parameters_of


@contextlib.contextmanager
def _full(here: bool) -> Iterator[None]:
    """No file of this process grows beyond a few bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writes fail, as they do on a full disk
    if here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def _raised(save: Callable[[], Any]) -> str:
    """The kinds of the error and of what it names, by rank where it does."""
    try:
        save()
    except BaseException as error:
        failures = getattr(error, "failures", {})
        inner = {rank: type(failure[0]).__name__ for rank, failure in failures.items()}
        return f"{type(error).__name__} {inner}"
    return ""


def saved(impl: str, folder: str, ranks: list[int]) -> dict[str, Any]:
    """Saves where the disks of `ranks` are full, trains on, and saves and loads where they are not."""
    rank = dist.get_rank()
    model = model_of(impl, Case(wrap="blocks"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: dict[str, Any] = {"losses": []}

    def train(step: int) -> None:
        loss = loss_of(model, step, 0, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(loss.item())

    def state() -> dict[str, Any]:
        parts = get_state_dict(model, optimizer)
        return {"model": parts[0], "optimizer": parts[1]}

    train(0)
    with _full(rank in ranks):
        found["raised"] = _raised(lambda: dcp.save(state(), checkpoint_id=f"{folder}/full"))
    train(1)
    found["parameters"] = parameters_of(model)
    dcp.save(state(), checkpoint_id=f"{folder}/there")
    train(2)
    loaded = state()
    dcp.load(loaded, checkpoint_id=f"{folder}/there")
    full = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in loaded["model"].items()
    }
    found["loaded"] = full
    found["counters"] = counts(impl, model)
    return found


def both(folder: str, ranks: list[int]) -> dict[str, Any]:
    return {impl: saved(impl, f"{folder}/{impl}", ranks) for impl in ("torch", "shardd")}


def own_format(folder: str, ranks: list[int]) -> dict[str, Any]:
    """The same with safetensors, which the ranks write together."""
    from shardd.torch import load_safetensors, save_safetensors

    model = model_of("shardd", Case())
    loss_of(model, 0, 0, dist.get_rank()).backward()
    model.zero_grad()
    with _full(dist.get_rank() in ranks):
        try:
            save_safetensors(model, f"{folder}/full")
            raised = ""
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
    loss_of(model, 1, 0, dist.get_rank()).backward()
    before = parameters_of(model)
    save_safetensors(model, f"{folder}/there")
    load_safetensors(model, f"{folder}/there")
    return {"raised": raised, "same": all(torch.equal(v, before[k]) for k, v in parameters_of(model).items())}
