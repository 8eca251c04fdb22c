"""What models on a GPU get where programs cannot write the job's memory, tried on CPUs: the job is told that it is there."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from shardd.torch import FullyShardedDataParallel, fully_shard
from shardd.torch._job import spec
from shardd.torch._job.job import TorchJob
from shardd.torch._process import extension
from shardd.torch._sharding.flat_options import OlderKeywords, older_options
from shardd.torch._state_dicts import full_state_dict
from shardd.torch._units.state import state_of
from shardd.torch.optim import AdamW


def state_dicts_are_copies() -> dict[str, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 3))
    plain = {name: value.detach().clone() for name, value in model.state_dict().items()}
    fully_shard(model[0])
    fully_shard(model)
    optimizer = AdamW(model.parameters(), lr=0.0, weight_decay=0.0, in_place_edits=False)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    gathered: list[list[str]] = []
    theirs = full_state_dict.gather

    def gather(their: Any, state_dict: dict[str, Any], **options: Any) -> dict[str, Any]:
        def count(rest: dict[str, Any], **more: Any) -> dict[str, Any]:
            gathered.append([name for name, value in rest.items() if isinstance(value, torch.Tensor)])
            return their(rest, **more)

        return theirs(count, state_dict, **options)

    full_state_dict.gather = gather  # type: ignore[assignment]
    on_gpu = TorchJob.on_gpu
    TorchJob.on_gpu = property(lambda self: True)  # type: ignore[assignment,method-assign]
    try:
        given = model.state_dict()
        moments = optimizer.state_dict()["state"][0]["exp_avg"]
        shares = [name for name, value in given.items() if value.to_local().numel()
                  and value.to_local().data_ptr() == model.get_parameter(name).to_local().data_ptr()]  # fmt: skip
        with torch.no_grad():
            for value in [*given.values(), moments]:
                value.to_local().fill_(7)  # of the job's memory this is an error
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    finally:
        TorchJob.on_gpu = on_gpu  # type: ignore[method-assign]
        full_state_dict.gather = theirs
    return {
        "shares": shares,
        "gathered": gathered,
        "same": all(torch.equal(whole[name], value) for name, value in plain.items()),
        "moments": int((optimizer.state[model[0].weight]["exp_avg"].to_local() == 7).sum().item()),
        "rank": dist.get_rank(),
    }


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


def tied_copies() -> dict[str, Any]:
    model = _Tied()
    fully_shard(model)
    optimizer = AdamW(model.parameters(), lr=0.0, in_place_edits=False)
    model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
    optimizer.step()
    on_gpu = TorchJob.on_gpu
    TorchJob.on_gpu = property(lambda self: True)  # type: ignore[assignment,method-assign]
    try:
        first, second = model.state_dict(), model.state_dict()
        kept = model.state_dict(keep_vars=True)
    finally:
        TorchJob.on_gpu = on_gpu  # type: ignore[method-assign]

    def place(state_dict: dict[str, Any], name: str) -> int:
        return int(state_dict[name].to_local().data_ptr())

    return {
        "tied": place(first, "embed.weight") == place(first, "head.weight"),
        "apart": place(first, "embed.weight") != place(second, "embed.weight"),
        "kept": kept["embed.weight"] is model.embed.weight,
    }


def moved_after_it_was_wrapped() -> dict[str, str]:
    """As ``.cuda()`` does: unit and parameters are on different devices."""
    texts = {}
    for name, shard in {
        "rows": fully_shard,
        "flat": functools.partial(fully_shard, layout="flat"),
        "pieces": functools.partial(FullyShardedDataParallel, use_orig_params=True),
        "wrapper": FullyShardedDataParallel,
    }.items():
        model = shard(nn.Linear(4, 4))
        state = state_of(model)
        assert state is not None and state._unit is not None
        state._unit.device = torch.device("cuda", 0)
        try:
            model(torch.ones(1, 4))
        except RuntimeError as error:
            texts[name] = str(error)
    return texts


class _OnGpu(nn.Parameter):
    """Says that it is on a GPU."""

    device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]


def device_of_what_is_not_ignored() -> str:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = _OnGpu(torch.ones(2, 2))
    options = older_options(OlderKeywords(ignored_modules=[model[1]]), (model,), may_choose=False)
    return str(options.mesh_info.mesh.device_type)


def inputs_of_a_root() -> dict[str, Any]:
    """On a CPU they are the program's own objects; what is done with them elsewhere is tried with the meta device."""
    model = nn.Sequential(nn.Identity())
    model.register_parameter("unused", nn.Parameter(torch.ones(4)))
    fully_shard(model)
    seen: list[Any] = []
    model[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    given = {"x": [torch.ones(2)]}
    with torch.no_grad():
        model(given)
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    device = torch.device("meta")
    args, kwargs = extension._move_inputs(([torch.ones(2), 3], packed), {"mask": torch.ones(1)}, device)
    return {
        "same": seen[0] is given,
        "devices": [args[0][0].device.type, args[1].data.device.type, kwargs["mask"].device.type],
        "other": (args[0][1], args[1].batch_sizes.device.type),
        "nothing": extension._move_inputs((), {}, device),
        "by name": extension._move_inputs((), {"x": 1}, device),
    }


def daemon_without_gpus() -> str:
    model = nn.Linear(4, 4)
    fully_shard(model)
    optimizer = AdamW(model.parameters())
    gpu_of = spec.gpu_of
    spec.gpu_of = lambda root: 0
    try:
        model(torch.ones(1, 4))
    except RuntimeError as error:
        return str(error)
    finally:
        spec.gpu_of = gpu_of
    return f"nothing was refused to {optimizer}"
