"""Gradual unfreezing: what ranks do in its tests. Each function runs on every rank, in every attempt."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from models import Case, build, error_of_steps, loss_of, shard
from rank_main import report
from training.resume_scenarios import Kills, _Killer, attempt

_FROZEN = ("embed", "layers")
MICROS = 2


class Stage:
    """Parameters with a prefix are trained from a micro-batch of a step on, with a learning rate of their own."""

    def __init__(self, step: int, micro: int, prefix: str, lr: float) -> None:
        self.at, self.prefix, self.lr = (step, micro), prefix, lr

    def begin(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        params = [p for n, p in model.named_parameters() if n.startswith(self.prefix)]
        for param in params:
            param.requires_grad_(True)
        optimizer.add_param_group({"params": params, "lr": self.lr})


# Between steps; with gradients of the others' first micro-batch; between steps again, after backwards with it.
STAGES = (Stage(2, 0, "layers.2", 5e-3), Stage(4, 1, "layers.1.up.weight", 2e-2), Stage(5, 0, "layers.0", 3e-3))


def _memory(name: str) -> dict[str, int]:
    ctl = os.path.join(os.path.dirname(os.environ["SHARDD_DAEMON"]), "shardctl")
    answer = subprocess.run([ctl, "--json", "memory", name], capture_output=True, text=True, check=True).stdout
    return {p["purpose"]: int(p.get("planned_bytes", 0)) for p in json.loads(answer)["purposes"]}


def _whole(value: Any) -> Any:
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def train(impl: str, steps: int, kills: Kills = (), case: Case | None = None) -> dict[str, Any]:
    """``impl``: "torch", or shardd with the daemon's AdamW ("daemon", "fixed": it alone writes) or torch's ("stock")."""
    case = case or Case(freeze=_FROZEN)
    rank = dist.get_rank()
    killer = _Killer(kills)
    if impl == "torch":
        from torch.distributed.fsdp import fully_shard
    else:
        from shardd.torch import fully_shard
    model = build(case)
    shard(model, case, fully_shard)
    trained = [p for p in model.parameters() if p.requires_grad]
    start = 0
    losses: list[float] = []
    if impl in ("daemon", "fixed"):
        from shardd.torch.optim import AdamW

        optimizer: Any = AdamW(trained, lr=1e-2, in_place_edits=impl == "daemon")
    else:
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
    if impl != "torch":
        from shardd.torch import resume, ride

        start, state = resume(model)
        losses = state or []
        report(event="start", step=start, known=len(losses), attempt=attempt())
    memory = []
    for stage in STAGES:
        if stage.at < (start, 0):  # the steps that are committed had it
            stage.begin(model, optimizer)
    for step in range(start, steps):
        for micro in range(MICROS):
            for stage in STAGES:
                if stage.at == (step, micro):
                    if step == 2 and impl != "torch":
                        memory.append(_memory(_name(model)))
                    stage.begin(model, optimizer)
            killer.inside("waiting", step)
            handle = model.layers[1].register_forward_pre_hook(lambda *_, s=step: killer.at("forward", s))
            loss = loss_of(model, step, micro, rank) / MICROS
            handle.remove()
            loss.backward()
            losses = [*losses, loss.item()]
        if impl != "torch":
            ride(losses)
        killer.at("before", step)
        optimizer.step()
        optimizer.zero_grad()
        killer.at("after", step)
    names = {p: n for n, p in model.named_parameters()}
    saved = optimizer.state_dict()
    result: dict[str, Any] = {
        "losses": losses,
        "parameters": {n: _whole(p) for n, p in model.named_parameters()},
        "state": {names[p]: {k: _whole(v) for k, v in s.items()} for p, s in optimizer.state.items()},
        "groups": [
            {k: v for k, v in g.items() if k in ("lr", "params", "weight_decay")} for g in saved["param_groups"]
        ],
        "keys": sorted(saved["state"]),
        "memory": memory,
    }
    if impl != "torch":
        from shardd.torch import commit, counters, finish

        commit(model)  # the stock optimizer's last step
        result["memory"].append(_memory(_name(model)))
        result["counters"] = counters(model)
        dist.barrier()
        finish(model)
    return result


def _name(model: torch.nn.Module) -> str:
    from shardd.torch._job.job import jobs

    dist.barrier()  # the others' parameters are there
    return jobs()[0].name


def compare(steps: int, world: int) -> dict[str, Any]:
    kinds = ("torch", "daemon", "stock") if world > 1 else ("torch", "fixed")
    return {impl: train(impl, steps) for impl in kinds}


def alone(impl: str) -> str:
    """Rank 0 unfreezes a block that rank 1 does not."""
    from shardd.torch import fully_shard
    from shardd.torch.optim import AdamW

    case = Case(freeze=_FROZEN)
    model = build(case)
    shard(model, case, fully_shard)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained) if impl == "stock" else AdamW(trained, in_place_edits=impl == "daemon")

    def begin(step: int) -> None:
        if step == 1 and dist.get_rank() == 0:
            model.layers[2].requires_grad_(True)

    return error_of_steps(model, optimizer, range(3), begin)


def closed_in_between(impl: str) -> str:
    """The job is closed when the daemon has answered all ranks, and before they attach to the one in its place."""
    from shardd.torch import fully_shard
    from shardd.torch._process.extension import _C
    from shardd.torch.optim import AdamW

    extend = _C.Engine.extend

    def extend_and_close(engine: Any, spec: str) -> bool:
        extended = extend(engine, spec)
        dist.barrier()
        if extended and dist.get_rank() == 0:
            ctl = os.path.join(os.path.dirname(os.environ["SHARDD_DAEMON"]), "shardctl")
            subprocess.run([ctl, "close", json.loads(spec)["name"]], check=True, capture_output=True)
        dist.barrier()
        return bool(extended)

    _C.Engine.extend = extend_and_close  # type: ignore[method-assign]
    case = Case(freeze=_FROZEN)
    model = build(case)
    shard(model, case, fully_shard)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained) if impl == "stock" else AdamW(trained)

    def begin(step: int) -> None:
        if step == 2:
            model.layers[2].requires_grad_(True)
            optimizer.add_param_group({"params": list(model.layers[2].parameters())})

    return error_of_steps(model, optimizer, range(4), begin)


def through_deaths(count: int, deaths: int) -> dict[str, Any]:
    """The daemon is killed so often when this rank, the first, has attached to the job that trains more, and does so again."""
    import shardd.torch
    from shardd.torch import fully_shard, ride
    from shardd.torch._job.opening import Opening
    from shardd.torch.optim import AdamW

    fill, left, rank = Opening._fill, [deaths if dist.get_rank() == 0 else 0], dist.get_rank()

    def fill_behind_death(opening: Any, job: Any) -> None:
        if opening.memory is not None and left[0] > 0:
            left[0] -= 1
            pid = int(Path(os.environ["SHARDD_TEST_DAEMON_PID"]).read_text())
            daemon = os.pidfd_open(pid)
            os.kill(pid, signal.SIGKILL)
            select.select([daemon], [], [], 20)
            os.close(daemon)
        fill(opening, job)

    Opening._fill = fill_behind_death  # type: ignore[method-assign]
    case = Case(freeze=_FROZEN)
    model = build(case)
    shard(model, case, fully_shard)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses: list[float] = []
    for step in shardd.torch.steps(count):
        with step:
            if step.resumed:
                losses = step.state or []
            if step == 2 and not model.layers[2].up.weight.requires_grad:
                STAGES[0].begin(model, optimizer)
            loss = loss_of(model, step, 0, rank)
            loss.backward()
            ride([*losses, loss.item()])
            optimizer.step()
            optimizer.zero_grad()
            losses = [*losses, loss.item()]
    return {"losses": losses, "parameters": {n: _whole(p) for n, p in model.named_parameters()}, "left": left[0]}
