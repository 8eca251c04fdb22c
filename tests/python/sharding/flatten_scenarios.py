"""What ranks do in the tests of shards of flat parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from state_dicts.wrapper_state_cases import face, quiet


def _net() -> nn.Sequential:
    """Pieces are cut inside of parameters, and there is padding between and behind them."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def _step(model: Any, optimizer: Any, step: int) -> None:
    seed = torch.Generator().manual_seed(10 * step + dist.get_rank())
    model(torch.randn(4, 7, generator=seed)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def described() -> dict[str, Any]:
    """By layout: whether metadata says what is in shards, how many elements it names over ranks, and what is padding."""
    from shardd.torch import fully_shard, shard_metadata, summon_full_params
    from shardd.torch.optim import AdamW

    out: dict[str, Any] = {}
    for layout in ("dim0", "flat", "flat parameters"):
        model: Any = _net()
        with quiet():
            if layout == "flat parameters":
                model = face("shardd")(model, use_orig_params=False, device_id=torch.device("cpu"))
            else:
                model = fully_shard(model, layout=layout)
        optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        for step in range(2):
            _step(model, optimizer, step)
        shards = shard_metadata(model)
        assert shards == shard_metadata(model, rank=dist.get_rank()) and {s.module for s in shards} == {"(root)"}
        held = {
            name: getattr(p, "_local_tensor", p).detach().reshape(-1).clone() for name, p in model.named_parameters()
        }
        with summon_full_params(model):
            whole = {name: p.detach().reshape(-1).clone() for name, p in model.named_parameters()}
        facts: dict[str, Any] = {"equal": True, "numel": sum(p.numel() for p in _net().parameters())}
        for shard in shards:
            start = dist.get_rank() * shard.numel
            kept = held.get("_fsdp_wrapped_module._flat_param", held.get("_flat_param"))
            for piece in shard.pieces:
                want = whole[piece.name][piece.first : piece.end]
                if kept is None:
                    got = held[piece.name]
                else:
                    got = kept[piece.offset - start :][: piece.end - piece.first].clone()
                    kept[piece.offset - start :][: piece.end - piece.first] = 0
                facts["equal"] &= torch.equal(got, want) and piece.numel == whole[piece.name].numel()
            if kept is not None:
                facts["zero"] = not kept.any()
        others = [s for rank in range(2) for s in shard_metadata(model, rank=rank)]
        facts["covered"] = sum(p.end - p.first for s in others for p in s.pieces)
        facts["padding"] = sum(s.padding_numel for s in others) > 0
        try:
            shard_metadata(model, rank=2)
        except ValueError as error:
            facts["error"] = str(error)
        out[layout] = facts
    return out


def sharded() -> dict[str, Any]:
    """Whole parameters of a model with a flattened part, trained under every form and alone."""
    from shardd.torch import FlattenParamsWrapper, fully_shard, summon_full_params

    def make() -> Any:
        net = _net()
        return nn.Sequential(FlattenParamsWrapper(net[0]), net[1], FlattenParamsWrapper(net[2]))

    out: dict[str, Any] = {}
    for form in ("dim0", "wrapper", "alone"):
        model = make()
        with quiet():
            if form == "dim0":
                model = fully_shard(model)
            elif form == "wrapper":
                model = face("shardd")(model, use_orig_params=True, device_id=torch.device("cpu"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            if form != "alone":
                _step(model, optimizer, step)
                continue
            for rank in range(2):
                seed = torch.Generator().manual_seed(10 * step + rank)
                (model(torch.randn(4, 7, generator=seed)).square().mean() / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        if form == "alone":
            out[form] = [p.detach().clone() for p in model.parameters()]
        else:
            with summon_full_params(model):
                out[form] = [p.detach().clone() for p in model.parameters()]
    return out
