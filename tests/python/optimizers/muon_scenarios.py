"""What ranks do in test_muon.py: Muon for matrices and AdamW for the rest, with torch's optimizers and with the daemon's."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from models import Case, build, loss_of, train_steps
from optimizers.optim_cases import counts, model_of, parameters_of, train_all
from raised import text_of

USUAL: dict[str, Any] = {"lr": 0.02}
OTHER: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.2, "momentum": 0.4, "nesterov": False, "ns_steps": 3, "eps": 1e-5,
                         "ns_coefficients": (2.0, -1.5, 0.5), "adjust_lr_fn": "match_rms_adamw"}  # fmt: skip
STEPS = 20


def _cut(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """Muon's matrices, and the rest, to which the embedding and the head belong."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if name.startswith("layers") and p.ndim == 2]
    return matrices, [p for _, p in named if not any(p is m for m in matrices)]


def _train(
    impl: str, optim: Any, arguments: dict[str, Any], mesh: tuple[int, ...], late_momentum: bool = False
) -> dict[str, Any]:
    """Momentum begins with the fourth step, if so."""
    model = model_of(impl, Case(mesh=mesh))
    matrices, rest = _cut(model)
    optimizers = [optim.Muon(matrices, **arguments), optim.AdamW(rest, lr=1e-2)]
    if late_momentum:
        optimizers[0].param_groups[0]["momentum"] = 0.0

    def begin(step: int) -> None:
        if late_momentum and step == 3:
            optimizers[0].param_groups[0]["momentum"] = 0.95

    seen = train_all(model, optimizers, STEPS, lambda step: loss_of(model, step, 0, dist.get_rank()), begin)
    return {**seen, "counters": counts(impl, model)}


def both(name: str, mesh: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    from shardd.torch import optim

    arguments = USUAL if name == "usual" else OTHER
    return _train("torch", torch.optim, arguments, mesh), _train("shardd", optim, arguments, mesh)


def installed(late_momentum: bool = False, optimizers: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
    """The program is torch's both times. Not `optimizers`: as with --stock-optimizers."""
    import shardd.torch

    theirs = _train("torch", torch.optim, USUAL, (), late_momentum)
    shardd.torch.install(optimizers=optimizers)
    ours = _train("shardd", torch.optim, USUAL, (), late_momentum)
    shardd.torch.uninstall()
    return theirs, ours


def alike(layout: str) -> list[dict[str, torch.Tensor]]:
    """The same gradients on any number of ranks: each has the same batch. Parameters after five steps."""
    from models import build
    from shardd.torch import FullyShardedDataParallel, fully_shard, optim

    model: Any = build(Case())
    if layout == "dim0":
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        sharded = model
    else:
        sharded = FullyShardedDataParallel(model, use_orig_params=True, auto_wrap_policy=lambda module, recurse, **_: (
            recurse or type(module).__name__ == "Block"))  # fmt: skip
    named = list(sharded.named_parameters())
    matrices = [p for name, p in named if "up.weight" in name or "down.weight" in name]
    optimizers = [
        optim.Muon(matrices, lr=0.02),
        optim.SGD([p for _, p in named if not any(p is m for m in matrices)], lr=0.1),
    ]
    for step in range(5):
        loss_of(sharded, step, 0, 0).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if layout == "dim0":
        return [{name: p.clone() for name, p in parameters_of(sharded).items() if "layers" in name}]
    with FullyShardedDataParallel.summon_full_params(sharded):
        return [{n.replace("_fsdp_wrapped_module.", ""): p.detach().clone()
                 for n, p in sharded.named_parameters() if "layers" in n}]  # fmt: skip


def _steps(model: Any, optimizers: list[Any], steps: range) -> None:
    for step in steps:
        loss_of(model, step, 0, dist.get_rank()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def loaded(full: bool) -> dict[str, Any]:
    """A model with both optimizers that goes on from what torch.distributed.checkpoint.state_dict has of another one."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    from shardd.torch import optim

    def program() -> tuple[Any, list[Any]]:
        model = model_of("shardd")
        matrices, rest = _cut(model)
        return model, [optim.Muon(matrices, **USUAL), optim.AdamW(rest, lr=1e-2)]

    options = StateDictOptions(full_state_dict=full)
    first, optimizers = program()
    _steps(first, optimizers, range(3))
    saved = copy.deepcopy(get_state_dict(first, optimizers, options=options))
    names = {name: sorted(entry) for name, entry in saved[1]["state"].items()}
    _steps(first, optimizers, range(3, 6))
    second, others = program()
    set_state_dict(second, others, model_state_dict=saved[0], optim_state_dict=saved[1], options=options)
    _steps(second, others, range(3, 6))
    return {"went on": parameters_of(first), "loaded": parameters_of(second), "names": names}


def flat_state() -> dict[str, dict[str, Any]]:
    """``FullyShardedDataParallel.optim_state_dict`` of Muon over original parameters; loading it changes nothing."""
    from shardd.torch import FullyShardedDataParallel, optim

    model = FullyShardedDataParallel(build(Case()), use_orig_params=True)
    matrices = [p for name, p in model.named_parameters() if "up.weight" in name]
    optimizers = [optim.Muon(matrices, **USUAL)]
    optimizers.append(optim.AdamW([p for p in model.parameters() if not any(p is m for m in matrices)]))  # type: ignore[arg-type]
    _steps(model, optimizers, range(2))
    saved = FullyShardedDataParallel.optim_state_dict(model, optimizers[0])
    optimizers[0].load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, optimizers[0], saved))
    again = FullyShardedDataParallel.optim_state_dict(model, optimizers[0])
    return {"saved": saved["state"], "again": again["state"]}


def refusals() -> dict[str, str]:
    from shardd.torch import optim

    model = model_of("shardd")
    matrices, rest = _cut(model)

    def alone() -> None:  # nobody updates the rest, which has gradients all the same
        optimizer = optim.Muon(matrices)
        loss_of(model, 0, 0, dist.get_rank()).backward()
        optimizer.step()

    return {
        "vector": text_of(lambda: optim.Muon([*matrices, *rest])),
        "steps": text_of(lambda: optim.Muon(matrices, ns_steps=100)),
        "adjust": text_of(lambda: optim.Muon(matrices, adjust_lr_fn="other")),
        "coefficients": text_of(lambda: optim.Muon(matrices, ns_coefficients=(1.0, 2.0))),  # type: ignore[arg-type]
        "alone": text_of(alone),
    }


def placed() -> str:
    """Rows are cut along their last dimension."""
    from shardd.torch import optim

    model = model_of("shardd")
    return text_of(lambda: optim.Muon([p for p in model.parameters() if p.ndim == 2]))


def alone_installed() -> tuple[list[float], list[float]]:
    """Torch's Muon without another optimizer of the model steps in the trainers, as its job would have one kind."""
    import shardd.torch

    def train(impl: str) -> list[float]:
        model = model_of(impl)
        optimizer = torch.optim.Muon(_cut(model)[0], lr=0.02)
        return train_steps(model, optimizer, range(4))

    theirs = train("torch")
    shardd.torch.install()
    ours = train("shardd")
    shardd.torch.uninstall()
    return theirs, ours
