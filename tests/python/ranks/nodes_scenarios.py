"""What ranks do in the tests of several nodes. Each function runs on every rank of every node."""

from __future__ import annotations

import copy
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from models import Case, Model, build, error_of_steps, loss_of, mesh_of, shard, train_alone, train_steps
from raised import text_of as _text_of
from ranks.rank_life import Death, RankLife

MESH = Case(mesh=(2, 2))


def _trainer(case: Case = MESH) -> tuple[Model, Any]:
    from shardd.torch import fully_shard
    from shardd.torch.optim import AdamW

    model = build(case)
    shard(model, case, fully_shard)
    return model, AdamW(model.parameters(), lr=1e-2)


def unchanged(steps: int) -> dict[str, Any]:
    """A program that knows PyTorch alone: a mesh with a row for each node, and ``torch.optim``."""
    from torch.distributed.fsdp import fully_shard

    model = build(MESH)
    shard(model, MESH, fully_shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        loss = loss_of(model, step, 0, dist.get_rank())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    parameters = {n: p.full_tensor().detach().clone() for n, p in model.named_parameters()}
    kinds = [type(optimizer) is torch.optim.AdamW, *(kind.__module__ for kind in type(model).__mro__)]
    return {"losses": losses, "parameters": parameters, "kinds": kinds}


def _job_of(model: nn.Module) -> dict[str, Any]:
    from shardd.torch._units.state import state_of

    state = state_of(model)
    assert state is not None and state._job is not None and state._job.engine is not None
    described: dict[str, Any] = json.loads(state._job.engine.describe())
    return {**described, "info": state._job.engine.info()}


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """From the daemon: no collective of torch's."""
    from shardd.torch import summon_full_params

    with summon_full_params(model, writeback=False):
        return {n: p.detach().clone() for n, p in model.named_parameters()}


def end_and_describe(model: nn.Module) -> dict[str, Any]:
    """What the daemon says of the model's job, which all ranks end."""
    from shardd.torch import finish

    described = _job_of(model)
    dist.barrier()
    finish(model)
    return described


def train_with_both_norms(model: nn.Module, optimizer: Any, steps: int) -> list[tuple[float, float]]:
    """Of each step the gradients' norm, by ``clip_grad_norm_`` and by the daemon, which clips by it."""
    from shardd.torch import clip_grad_norm_

    norms = []
    for step in range(steps):
        loss_of(model, step, 0, dist.get_rank()).backward()
        norm = clip_grad_norm_(model.parameters(), 1e9).item()
        optimizer.step(max_grad_norm=1e9)
        optimizer.zero_grad()
        norms.append((norm, optimizer.last_grad_norm))
    return norms


def facts(steps: int) -> dict[str, Any]:
    """What daemon and face say of the job, and the norm that the daemon clips by."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    from shardd.torch import memory_plan

    model, optimizer = _trainer()
    plan = memory_plan(model)
    norms = train_with_both_norms(model, optimizer, steps)
    summoned = _whole(model)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {
        "job": end_and_describe(model),
        "norms": norms,
        "summoned": summoned,
        "whole": whole,
        "plan": {"world_size": plan.world_size, "replicas": plan["replicas"]},
    }


def train_wrapped(steps: int, strategy: str, case: Case, **options: Any) -> tuple[Any, Any, dict[str, Any]]:
    """A FullyShardedDataParallel and its optimizer behind ``steps``, two passes each; losses, norms and parameters.

    Only rank 0 begins with the right values. What ``case`` freezes is frozen once it is wrapped."""
    from torch.distributed.fsdp import ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    from models import Block
    from shardd.torch import FullyShardedDataParallel
    from shardd.torch.optim import AdamW

    rank = dist.get_rank()
    model = build(Case(tie=case.tie))
    if rank != 0:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    wrapper = FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sync_module_states=True,
        **options,
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(name.startswith(prefix) for prefix in case.freeze))
    optimizer = AdamW([p for p in wrapper.parameters() if p.requires_grad], lr=1e-2)
    losses, norms = [], []
    for step in range(steps):
        with wrapper.no_sync():
            (loss_of(wrapper, step, 0, rank) / 2).backward()
        loss = loss_of(wrapper, step, 1, rank) / 2
        loss.backward()
        norms.append(float(wrapper.clip_grad_norm_(0.1)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return wrapper, optimizer, {"losses": losses, "norms": norms, "parameters": parameters_of_wrapper(wrapper)}


def parameters_of_wrapper(wrapper: Any) -> dict[str, torch.Tensor]:
    return {n: v.detach().clone() for n, v in wrapper.state_dict().items() if n != "bias"}


def train_wrapped_alone(steps: int, case: Case) -> dict[str, Any] | None:
    """What ``train_wrapped`` is to give, from one process; on rank 0 alone."""
    case = Case(steps=steps, accumulate=2, clip=0.1, tie=case.tie, freeze=case.freeze)
    return train_alone(case, dist.get_world_size()) if dist.get_rank() == 0 else None


def wrapped(steps: int) -> dict[str, Any]:
    """FullyShardedDataParallel over the nodes that the launcher tells of."""
    from shardd.torch import finish

    wrapper, _, trained = train_wrapped(steps, "HYBRID_SHARD", Case())
    dist.barrier()
    finish(wrapper)
    return {**trained, "alone": train_wrapped_alone(steps, Case())}


# What is refused.


def refused_meshes() -> dict[str, str]:
    """Models that are not registered: each raises on all ranks, without a daemon's help."""
    from torch.distributed.device_mesh import DeviceMesh

    from shardd.torch import fully_shard
    from shardd.torch.optim import AdamW

    def text(mesh: Any, optimizer: Any = AdamW, **options: Any) -> str:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model, mesh=mesh)
        kept = None if optimizer is None else optimizer(model.parameters(), lr=0.1, **options)
        assert (kept is None) == (optimizer is None)
        return _text_of(lambda: model(torch.ones(1, 4)).sum())

    dims = ("replicate", "shard")
    crossing = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=dims)
    return {
        "crossing": text(crossing),
        "rows": text(mesh_of(4, 1), torch.optim.AdamW),
        "none": text(mesh_of(2, 2), None),
    }


def rows_in_turns() -> dict[str, Any]:
    """A mesh whose rows are on one node and on the other in turns, and whose ranks have different data."""
    from torch.distributed.device_mesh import DeviceMesh

    from shardd.torch import finish, fully_shard
    from shardd.torch.optim import SGD

    rank = dist.get_rank()
    model = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.fill_(rank in (0, 2))  # those of each node's first row, whose values count
    mesh = DeviceMesh("cpu", [[2], [0], [3], [1]], mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    optimizer = SGD(model.parameters(), lr=1.0)
    model(torch.full((1, 3), float(rank))).sum().backward()
    gradient = model.weight.grad.to_local().clone()
    optimizer.step()
    with torch.no_grad():
        after = model(torch.eye(3))
    finish(model)
    return {"gradient": gradient, "after": after}


def one_mesh() -> str:
    """The first use of a model on a (2, 2) mesh."""
    model, optimizer = _trainer()
    assert optimizer.param_groups  # whom nobody holds is gone
    return _text_of(lambda: loss_of(model, 0, 0, dist.get_rank()))


def refused_calls() -> dict[str, str]:
    """Of a registered model, whose training goes on afterwards."""
    from shardd.torch import summon_full_params

    model, optimizer = _trainer()
    losses = train_steps(model, optimizer, range(1))

    def summon(**options: bool) -> None:
        with summon_full_params(model, **options):
            pass

    texts = {
        "summon": _text_of(lambda: summon(rank0_only=True)),
        "gradients": _text_of(lambda: summon(with_grads=True)),
    }
    losses += train_steps(model, optimizer, range(1, 2))
    alone = train_alone(Case(steps=2), dist.get_world_size())["losses"][dist.get_rank()]
    texts["losses"] = str([abs(a - b) < 1e-6 for a, b in zip(losses, alone)])
    return texts


def changed() -> dict[str, Any]:
    """Loads in the middle of training, and an edit of full parameters: what each has made of the job."""
    from shardd.torch import counters, summon_full_params

    model, optimizer = _trainer()
    train_steps(model, optimizer, range(2))
    saved = {n: v.clone() if torch.is_tensor(v) else v for n, v in model.state_dict().items()}
    kept, before = copy.deepcopy(optimizer.state_dict()), _whole(model)
    on = train_steps(model, optimizer, range(2, 4))
    model.load_state_dict(saved)
    optimizer.load_state_dict(kept)
    loaded = _whole(model)
    again = train_steps(model, optimizer, range(2, 4))
    with summon_full_params(model, writeback=False):
        want = {n: p.detach() / 2 for n, p in model.named_parameters()}
    with summon_full_params(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.div_(2)
    edited = _whole(model)
    train_steps(model, optimizer, range(4, 5))
    return {
        "loaded": [torch.equal(loaded[n], before[n]) for n in before],
        "on": on,
        "again": again,
        "edited": [torch.equal(edited[n], want[n]) for n in want],
        "parameters": _whole(model),
        "aborts": counters(model)["aborts"],
        "committed": _job_of(model)["info"]["committed_step"],
    }


def other_edits() -> str:
    """Node 1 writes another value back into one parameter."""
    from shardd.torch import summon_full_params

    model, optimizer = _trainer()
    loss_of(model, 0, 0, dist.get_rank()).backward()
    optimizer.step()

    def edit() -> None:
        with summon_full_params(model), torch.no_grad():
            model.layers[1].up.weight.add_(1 + dist.get_rank() // 2)

    return _text_of(edit)


def other_values() -> str:
    """Node 1 begins with another value in one parameter."""
    from shardd.torch import fully_shard
    from shardd.torch.optim import AdamW

    model = build(MESH)
    if dist.get_rank() >= 2:
        with torch.no_grad():
            model.layers[1].up.weight[3, 2] += 1.0
    shard(model, MESH, fully_shard)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    text = _text_of(lambda: loss_of(model, 0, 0, dist.get_rank()))
    del optimizer
    return text


# A rank dies.


def survive(folder: str, death: Death, steps: int) -> dict[str, Any]:
    """One rank dies in its first life; the others, on both nodes, go on in their processes, whose meshes have lost it."""
    from shardd.torch import counters

    life = RankLife(folder, death, (2, 2))
    model, optimizer = _trainer()
    trained = life.train(model, [optimizer], steps)
    return {**trained, "counters": counters(model), "parameters": _whole(model)}


def restarted(steps: int, folder: str, victim: int, at_step: int, daemon: int = 0) -> dict[str, Any]:
    """Under torchrun: a rank is killed once, or the process ``daemon``; all ranks of all nodes are started again."""
    from shardd.torch import counters, finish, resume, ride

    rank, mark = dist.get_rank(), f"{folder}/killed"
    model, optimizer = _trainer()
    first, losses = resume(model)
    losses = losses or []
    for step in range(first, steps):
        loss = loss_of(model, step, 0, rank)
        loss.backward()
        ride([*losses, loss.item()])
        if (rank, step) == (victim, at_step) and not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(daemon or os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        losses = [*losses, loss.item()]
    counts, parameters = counters(model), _whole(model)
    dist.barrier()
    finish(model)
    return {
        "first": first,
        "losses": losses,
        "commits": counts["commits"],
        "parameters": parameters,
        "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        "node": int(os.environ["GROUP_RANK"]),
    }


# Parameters by the step from which they are trained, with a learning rate of their own.
_UNFROZEN = ((3, "layers.2", 5e-3), (5, "layers.1.up.weight", 2e-2))
_FROZEN = ("embed", "layers")


def _thaw(model: nn.Module, optimizer: Any, stages: Any) -> None:
    for _, prefix, lr in stages:
        params = [p for n, p in model.named_parameters() if n.startswith(prefix)]
        for param in params:
            param.requires_grad_(True)
        optimizer.add_param_group({"params": params, "lr": lr})


def unfreeze(steps: int, impl: str, mesh: tuple[int, ...]) -> dict[str, Any]:
    """Trains more from a step on, twice. ``impl``: "torch" (FSDP2), or "shardd" with the daemon's AdamW."""
    case = Case(freeze=_FROZEN, mesh=mesh)
    model = build(case)
    if impl == "torch":
        from torch.distributed.fsdp import fully_shard
    else:
        from shardd.torch import fully_shard
    shard(model, case, fully_shard)
    trained = [p for p in model.parameters() if p.requires_grad]
    if impl == "torch":
        optimizer: Any = torch.optim.AdamW(trained, lr=1e-2)
    else:
        from shardd.torch.optim import AdamW

        optimizer = AdamW(trained, lr=1e-2)
    losses = []
    for step in range(steps):
        _thaw(model, optimizer, [stage for stage in _UNFROZEN if stage[0] == step])
        loss = loss_of(model, step, 0, dist.get_rank())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    result: dict[str, Any] = {
        "losses": losses,
        "parameters": {n: p.full_tensor().detach().clone() for n, p in model.named_parameters()},
    }
    if impl != "torch":
        from shardd.torch import counters, finish

        result["counters"] = counters(model)
        result["trained"] = _job_of(model)["info"]
        dist.barrier()
        finish(model)
    return result


def unfreeze_both(steps: int, mesh: tuple[int, ...]) -> dict[str, Any]:
    return {impl: unfreeze(steps, impl, mesh) for impl in ("torch", "shardd")}


def unfreeze_in_steps(steps: int, mesh: tuple[int, ...], gate: str) -> dict[str, Any]:
    """A layer is frozen before step 2; then each rank makes the file GATE.RANK, and awaits GATE. What is aborted is repeated,
    as ``shardd.torch.steps`` does."""
    from shardd.torch import counters, fully_shard
    from shardd.torch import steps as steps_of
    from shardd.torch.optim import AdamW

    torch.manual_seed(0)
    layers = [nn.Linear(2048, 2048) for _ in range(3)]
    model = nn.Sequential(*layers)
    layers[0].requires_grad_(False)
    over = mesh_of(*mesh) if mesh else None
    for module in (*layers, model):
        fully_shard(module, mesh=over)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses: dict[int, float] = {}
    aborted = 0
    for step in steps_of(steps, model):
        with step:
            aborted += step.resumed
            if step == 2 and not next(layers[0].parameters()).requires_grad:
                Path(f"{gate}.{dist.get_rank()}").touch()
                while not os.path.exists(gate):
                    time.sleep(0.01)
                layers[0].requires_grad_(True)
                optimizer.add_param_group({"params": list(layers[0].parameters())})
            batch = torch.randn(4, 2048, generator=torch.Generator().manual_seed(step * 8 + dist.get_rank()))
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[int(step)] = loss.item()
    parameters = {n: p.full_tensor().detach().clone() for n, p in model.named_parameters()}
    return {"losses": losses, "parameters": parameters, "aborted": aborted, "commits": counters(model)["commits"]}


def unfreeze_alone(mesh: tuple[int, ...], alone: str) -> str:
    """Ranks 0 and 1 (a node; ``alone`` "node") or rank 0 alone (``alone`` "rank") unfreeze a block that the others do not."""
    case = Case(freeze=_FROZEN, mesh=mesh)
    from shardd.torch import fully_shard
    from shardd.torch.optim import AdamW

    model = build(case)
    shard(model, case, fully_shard)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def begin(step: int) -> None:
        if step == 1 and dist.get_rank() < (2 if alone == "node" else 1):
            _thaw(model, optimizer, _UNFROZEN[:1])

    return error_of_steps(model, optimizer, range(3), begin)


def unfreeze_refused() -> dict[str, str]:
    """With an optimizer that steps in the trainers, beside edits, and in the middle of a step."""
    from shardd.torch import fully_shard
    from shardd.torch.optim import AdamW

    texts = {}
    for name in ("trainers", "edits", "midway"):
        model = build(Case(freeze=_FROZEN, mesh=(2, 2)))
        shard(model, Case(freeze=_FROZEN, mesh=(2, 2)), fully_shard)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer: Any = torch.optim.AdamW(trained, lr=1e-2)
        if name != "trainers":
            optimizer = AdamW(trained, lr=1e-2, in_place_edits=name == "edits" or None)
        loss_of(model, 0, 0, dist.get_rank()).backward()
        if name != "midway":
            optimizer.step()
            optimizer.zero_grad()
        _thaw(model, optimizer, _UNFROZEN[:1])
        texts[name] = _text_of(lambda m=model: loss_of(m, 0, 1, dist.get_rank()))
        dist.barrier()
    return texts
