"""What ranks do in test_nodes_muon.py: Muon of the daemon's for matrices and AdamW for the rest, over nodes or on one."""

from __future__ import annotations

import copy
import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from models import Block, Case, build, loss_of, shard
from optimizers.optim_cases import parameters_of
from ranks.nodes_scenarios import _text_of
from ranks.rank_life import Death, RankLife

STEPS = 6
HOOKED = ("before the optimizer", "before the first forward", "opened")


def _program(form: str) -> tuple[Any, list[Any]]:
    """``form``: "replicas" (a mesh with a row for each node), "flat" (a wrapper over all ranks), "hybrid" (a wrapper)."""
    from torch.distributed.fsdp import ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    from shardd.torch import FullyShardedDataParallel, fully_shard, optim

    case = Case(mesh=(2, dist.get_world_size() // 2)) if form == "replicas" else Case()
    model: Any = build(case)
    matrices = {name for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("layers")}
    if form == "replicas":
        shard(model, case, fully_shard)
    else:
        strategy = ShardingStrategy.HYBRID_SHARD if form == "hybrid" else ShardingStrategy.FULL_SHARD
        model = FullyShardedDataParallel(
            model, sharding_strategy=strategy, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True
        )
    named = {name.replace("_fsdp_wrapped_module.", ""): p for name, p in model.named_parameters()}
    return model, [
        optim.Muon([named[name] for name in sorted(matrices)], lr=0.02),
        optim.AdamW([p for name, p in named.items() if name not in matrices], lr=1e-2),
    ]


def _steps(model: Any, optimizers: list[Any], steps: range, clip: float = 0.0) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, step, 0, dist.get_rank())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step(**({"max_grad_norm": clip} if clip else {}))
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _whole(model: Any, form: str) -> dict[str, torch.Tensor]:
    if form == "replicas":
        return parameters_of(model)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _states(model: Any, optimizers: list[Any], full: bool = True) -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    return get_state_dict(model, optimizers, options=StateDictOptions(full_state_dict=full))


def trained(form: str, clip: float = 0.0) -> dict[str, Any]:
    from shardd.torch import finish

    model, optimizers = _program(form)
    losses = _steps(model, optimizers, range(STEPS), clip)
    parameters = _whole(model, form)
    states = _states(model, optimizers)[1]["state"]
    buffers = {name: entry["momentum_buffer"].clone() for name, entry in states.items() if "momentum_buffer" in entry}
    held = [p.numel() for p in optimizers[0].param_groups[0]["params"]] if form == "flat" else []
    dist.barrier()
    finish(model)
    return {"losses": losses, "parameters": parameters, "buffers": buffers, "held": held}


def loaded(form: str, full: bool) -> dict[str, Any]:
    """A model that goes on from what ``get_state_dict`` has of another one, by ``set_state_dict``."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    from shardd.torch import finish

    first, optimizers = _program(form)
    _steps(first, optimizers, range(3))
    saved = copy.deepcopy(_states(first, optimizers, full))
    _steps(first, optimizers, range(3, STEPS))
    went_on = _whole(first, form)
    dist.barrier()
    finish(first)
    second, others = _program(form)
    options = StateDictOptions(full_state_dict=full)
    set_state_dict(second, others, model_state_dict=saved[0], optim_state_dict=saved[1], options=options)
    _steps(second, others, range(3, STEPS))
    result = {"went on": went_on, "loaded": _whole(second, form)}
    dist.barrier()
    finish(second)
    return result


def resumed(kind: str) -> dict[str, Any]:
    """As PyTorch's programs of the first FSDP resume: a model of the same program loads before its first forward.

    ``kind``: of the state dicts ("full" or "sharded"; "local": of the model's alone, as PyTorch's optimizers have none).
    """
    from torch.distributed.fsdp import StateDictType

    from shardd.torch import FullyShardedDataParallel, finish

    types = {
        "full": StateDictType.FULL_STATE_DICT,
        "sharded": StateDictType.SHARDED_STATE_DICT,
        "local": StateDictType.LOCAL_STATE_DICT,
    }
    first, optimizers = _program("flat")
    _steps(first, optimizers, range(3))
    with FullyShardedDataParallel.state_dict_type(first, types[kind]):
        values = copy.deepcopy(first.state_dict())
    with FullyShardedDataParallel.state_dict_type(first, types["full" if kind == "local" else kind]):
        states = [FullyShardedDataParallel.optim_state_dict(first, optimizer) for optimizer in optimizers]
    _steps(first, optimizers, range(3, STEPS))
    went_on = _whole(first, "flat")
    dist.barrier()
    finish(first)
    second, others = _program("flat")
    with FullyShardedDataParallel.state_dict_type(second, types[kind]):
        second.load_state_dict(values)
    with FullyShardedDataParallel.state_dict_type(second, types["full" if kind == "local" else kind]):
        for optimizer, state in zip(others, states):
            fitting = FullyShardedDataParallel.optim_state_dict_to_load(second, optimizer, state)
            optimizer.load_state_dict(fitting)
    _steps(second, others, range(3, STEPS))
    result = {"went on": went_on, "loaded": _whole(second, "flat")}
    dist.barrier()
    finish(second)
    return result


def survive(folder: str, death: Death, form: str) -> dict[str, Any]:
    """One rank dies in the backward of a step, in its first life; the others go on in their processes."""
    life = RankLife(folder, death, (2, int(os.environ["WORLD_SIZE"]) // 2) if form == "replicas" else ())
    model, optimizers = _program(form)
    losses = life.train(model, optimizers, STEPS)["losses"]
    held = {name: p.detach().clone() for name, p in model.named_parameters()}
    if form == "replicas":
        held = {name: p.to_local().clone() for name, p in model.named_parameters()}
    return {"losses": losses, "held": held}


def refused() -> dict[str, str]:
    """What is cut over nodes so that no rank could have a whole matrix."""
    from shardd.torch import FullyShardedDataParallel, fully_shard, optim

    def rows() -> None:
        model = build(Case())
        shard(model, Case(), fully_shard)
        optim.Muon([p for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("layers")])

    def flat_parameters() -> None:
        model = FullyShardedDataParallel(torch.nn.Linear(8, 8, bias=False), use_orig_params=False)
        optim.Muon(model.parameters())

    def hooked(when: str) -> None:
        from torch.distributed.algorithms._comm_hooks.default_hooks import reduce_scatter_hook

        model, optimizers = _program("flat")
        if when == "opened":
            loss_of(model, 0, 0, dist.get_rank())
        model.register_comm_hook(None, reduce_scatter_hook)
        if when == "before the optimizer":
            optim.Muon(optimizers[0].param_groups[0]["params"])
        loss_of(model, 0, 0, dist.get_rank())

    def frozen() -> None:
        model = build(Case())
        for name, param in model.named_parameters():
            param.requires_grad_(not name.startswith("layers"))
        shard(model, Case(), fully_shard)
        optim.Muon([p for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("layers")])

    texts = {
        "rows": _text_of(rows),
        "flat parameters": _text_of(flat_parameters),
        "frozen": _text_of(frozen),
        **{f"hook {when}": _text_of(partial(hooked, when)) for when in HOOKED},
    }
    dist.barrier()
    return texts


def refused_rows(addresses: str) -> dict[str, str]:
    """Meshes of two rows that are two nodes each, where the launcher says what nodes there are, and where nobody does."""
    from shardd.torch import fully_shard, optim

    case = Case(mesh=(2, 2))

    def made(layout: str) -> tuple[Any, Any]:
        model = build(case)
        matrices = {name for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("layers")}
        shard(model, case, partial(fully_shard, layout=layout))
        return model, optim.Muon([p for name, p in model.named_parameters() if name in matrices])

    texts = {layout: _text_of(partial(made, layout)) for layout in ("dim0", "flat")}
    _say_nothing_of_nodes(addresses)
    model, muon = made("dim0")
    others = optim.AdamW([p for p in model.parameters() if not any(p is q for q in muon.param_groups[0]["params"])])
    texts["registered"] = _text_of(lambda: loss_of(model, 0, 0, dist.get_rank()))
    assert others.param_groups
    return texts


def _say_nothing_of_nodes(addresses: str) -> None:
    """As a launcher that is not torchrun. GROUP_RANK alone keeps the ranks of one machine apart, as hosts would be."""
    del os.environ["LOCAL_WORLD_SIZE"], os.environ["GROUP_WORLD_SIZE"]
    os.environ["SHARDD_NODES"] = addresses


def built_too_early(addresses: str) -> str:
    """Nobody knows of nodes when the optimizer is built."""
    from shardd.torch import fully_shard, optim

    _say_nothing_of_nodes(addresses)
    model = build(Case())
    shard(model, Case(), fully_shard)
    named = dict(model.named_parameters())
    matrices = [name for name, p in named.items() if p.ndim == 2 and name.startswith("layers")]
    for name in matrices:
        named[name].requires_grad_(False)  # the job plans what an optimizer has as trained
    kept = [
        optim.Muon([named[name] for name in matrices]),
        optim.AdamW([p for name, p in named.items() if name not in matrices]),
    ]
    text = _text_of(lambda: loss_of(model, 0, 0, dist.get_rank()))
    assert len(kept) == 2
    return text


def installed(frozen: bool = False, addresses: str = "", mesh: tuple[int, ...] | None = None) -> dict[str, Any]:
    """A program that knows PyTorch alone, whose DTensors are cut over all ranks: its Muon and AdamW step in the trainers.

    ``frozen``: so are all matrices that its Muon has. ``addresses``: of the nodes' daemons; the launcher says nothing of
    nodes. ``mesh``: of replicas and the ranks that a copy is cut over; None: of all ranks.
    """
    import shardd.torch

    if addresses:
        _say_nothing_of_nodes(addresses)
    shardd.torch.install()
    from torch.distributed.fsdp import fully_shard

    case = Case() if mesh is None else Case(mesh=mesh)
    model = build(case)
    for name, param in model.named_parameters():
        param.requires_grad_(not (frozen and param.ndim == 2 and name.startswith("layers")))
    shard(model, case, fully_shard)
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if p.ndim == 2 and name.startswith("layers")]
    rest = [p for p in named.values() if not any(p is matrix for matrix in matrices)]
    losses = _steps(model, [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-2)], range(STEPS))
    counts = shardd.torch.counters(model)
    dist.barrier()
    shardd.torch.finish(model)
    return {"losses": losses, "updated": counts["bytes_updated"]}
