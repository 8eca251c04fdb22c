"""What ranks do in the tests of small things that torch's wrapper does, by torch's and by shardd's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from state_dicts.wrapper_state_cases import face, quiet


def _net() -> nn.Sequential:
    torch.manual_seed(9)
    return nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4))


def _wrapped(impl: str, **more: Any) -> Any:
    return face(impl)(_net(), device_id=torch.device("cpu"), **more)


def _said(call: Callable[[], Any]) -> list[str]:
    """The warnings' classes, and the error's, with the words that tell which."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
            error = []
        except Exception as raised:
            error = [f"{type(raised).__name__}: {raised}"]
    return [f"{w.category.__name__}: optim_input" for w in caught if "optim_input" in str(w.message)] + error


def state_dicts(impl: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    with quiet():
        model = _wrapped(impl, use_orig_params=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        with face(impl).state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
            given = {"state": optimizer.state_dict()["state"]}
            made = face(impl).optim_state_dict(model, optimizer, given)
            out["keys"] = sorted(made)
            out["names"] = {name: sorted(entry) for name, entry in made["state"].items()}
            if impl == "shardd":  # what torch gathers of an optimizer on CPU devices is wrong
                whole = face(impl).optim_state_dict(model, optimizer)["state"]
                out["same"] = all(torch.equal(v, whole[n][k]) for n, e in made["state"].items() for k, v in e.items())

    def older() -> None:
        face(impl).full_optim_state_dict(model, optimizer, optim_input=model.parameters(), rank0_only=False)

    if impl == "shardd":  # torch's own does not take original parameters by optim_input
        out["full"] = _said(older)
    out["ignored"] = _said(lambda: _wrapped(impl, ignored_modules=[torch.ones(2)]))
    return out


def flat_parameter(impl: str) -> dict[str, Any]:
    """Inside ``summon_full_params`` a FlatParameter is all of it, and what it shows are its parameters."""
    out: dict[str, Any] = {}
    with quiet():
        model = _wrapped(impl, use_orig_params=False)
        model(torch.ones(2, 8)).sum().backward()
        flat = model.params[0]
        before = flat.detach().clone()
        grad = flat.grad.detach().clone()
        with face(impl).summon_full_params(model, writeback=True):
            out["whole"] = model.params[0].detach().clone()
            out["weight"] = model.module[0].weight.detach().clone()
            with torch.no_grad():
                model.module[0].weight.mul_(2)
            out["aliases"] = torch.equal(model.params[0].detach()[:32].view(4, 8), model.module[0].weight.detach())
        out["after"] = [model.params[0] is flat, flat.shape == before.shape, torch.equal(flat.grad, grad)]
        with face(impl).summon_full_params(model, writeback=False):
            out["again"] = model.params[0].detach().clone()
    return out


def unmatched(form: str) -> list[str]:
    """Policies that name what the model has not, or select nothing."""
    import functools

    from shardd.torch import FullyShardedDataParallel, fully_shard
    from shardd.torch.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    texts = []
    for policy in (
        ModuleWrapPolicy({nn.Linear, nn.TransformerEncoderLayer}),
        functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerDecoderLayer}),
        functools.partial(size_based_auto_wrap_policy, min_num_params=10**6),
        ModuleWrapPolicy({nn.Linear}),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if form == "wrapper":
                FullyShardedDataParallel(_net(), device_id=torch.device("cpu"), auto_wrap_policy=policy)
            else:
                fully_shard(_net(), policy=policy)
        texts.append("; ".join(str(w.message) for w in caught if "wrap policy" in str(w.message)))
    return texts


def first_step_of_lbfgs() -> list[Any]:
    """The model is not registered before the closure's forward."""
    from shardd.torch import fully_shard

    model: Any = fully_shard(_net())
    optimizer = torch.optim.LBFGS(model.parameters())
    called = []

    def closure() -> torch.Tensor:
        called.append(1)
        return model(torch.ones(2, 8)).sum()  # type: ignore[no-any-return]

    return [_said(lambda: optimizer.step(closure)), len(called)]


def printed_plan() -> str:
    import contextlib
    import io

    from shardd.torch import fully_shard, memory_plan

    model = _net()
    fully_shard(model)
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        print(memory_plan(model))
    dist.barrier()
    return text.getvalue()
