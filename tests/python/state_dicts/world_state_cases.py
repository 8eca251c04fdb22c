"""What ranks do in the tests of the wrapper's checkpoints between worlds, and of state dicts where ranks are replicas."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, ShardingStrategy

from models import Case, build
from optimizers.optim_cases import counts, optimizer_of
from state_dicts.optim_state_cases import Saved
from state_dicts.state_dict_cases import kinds_of, train
from state_dicts.wrapper_state_cases import FULL, LOCAL, SHARDED, alone, face, finished, quiet, whole, wrapped


def dcp_save(folder: str, cases: list[Saved], more: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    out = []
    for number, case in enumerate(cases):
        model = case.model("shardd", **(more or {}))
        optimizer = optimizer_of("shardd", case.kind, model.parameters())
        train(model, optimizer, range(3))
        with quiet():
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
            dcp.save(state, checkpoint_id=f"{folder}/{number}")
        out.append({"alone": alone(case.kind, case.tie, case.freeze), "state": whole(state),
                    "counters": counts("shardd", model)})  # fmt: skip
        finished(model)
    return out


def dcp_load(folder: str, saved_as: list[Saved], cases: list[Saved]) -> list[dict[str, Any]]:
    """Checkpoint by checkpoint into another wrapping; on one rank into a model without one, too."""
    out = []
    for number, case in enumerate(cases):
        for bare in (False, True) if dist.get_world_size() == 1 else (False,):
            impl = "torch" if bare else "shardd"
            model = (
                build(Case(tie=case.tie, freeze=case.freeze)) if bare else case.model("shardd", nested=number % 2 == 0)
            )
            optimizer = optimizer_of(impl, saved_as[number].kind, model.parameters())
            with quiet():
                state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
                dcp.load(state, checkpoint_id=f"{folder}/{number}")
                set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
                again = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
            out.append({"number": number, "state": whole(again), "went on": train(model, optimizer, range(3, 5)),
                        "counters": counts(impl, model)})  # fmt: skip
            if not bare:
                finished(model)
    return out


def _replicated(impl: str, strategy: str, orig: bool, groups: Any) -> Any:
    more: dict[str, Any] = {"sharding_strategy": ShardingStrategy[strategy]}
    if strategy == "HYBRID_SHARD" and orig:
        more["process_group"] = groups
    elif strategy == "HYBRID_SHARD":
        more["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return wrapped(impl, orig=orig, **more)


def _every_kind(impl: str, model: Any, optimizer: Any) -> dict[str, Any]:
    wrapper = face(impl)
    out: dict[str, Any] = {}
    with quiet():
        for name, kind in (("full", FULL), ("sharded", SHARDED), ("local", LOCAL)):
            if impl == "torch" and kind == LOCAL:
                continue  # its own are of flat parameters
            with wrapper.state_dict_type(model, kind):
                state = model.state_dict()
                optim = wrapper.optim_state_dict(model, optimizer) if kind != LOCAL else None
            out[name] = {"model": whole(state), "optimizer": whole(optim), "kinds": kinds_of([state, optim])}
        if impl == "shardd":
            rank0 = (FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True))
            with wrapper.state_dict_type(model, FULL, *rank0):
                out["rank 0"] = (whole(model.state_dict()), whole(wrapper.optim_state_dict(model, optimizer)))
            with wrapper.state_dict_type(model, LOCAL):
                before = {name: value.clone() for name, value in model.state_dict().items()}
                with torch.no_grad():
                    for param in model.parameters():
                        param.zero_()
                model.load_state_dict(before)
            out["local again"] = whole(model.state_dict())
    return out


REPLICATED = (("HYBRID_SHARD", True), ("HYBRID_SHARD", False), ("NO_SHARD", True), ("NO_SHARD", False))


def replicas(folder: str, kind: str) -> dict[str, Any]:
    """Four ranks, all strategies under which some hold the same; every kind of state dict, and a checkpoint of each."""
    shard = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    replicate = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    groups = (shard[dist.get_rank() // 2], replicate[dist.get_rank() % 2])
    out: dict[str, Any] = {"alone": alone(kind)}
    for number, (strategy, orig) in enumerate(REPLICATED):
        for impl in ("torch", "shardd"):
            model = _replicated(impl, strategy, orig, groups)
            optimizer = optimizer_of(impl, kind, model.parameters())
            train(model, optimizer, range(3))
            found = _every_kind(impl, model, optimizer)
            if impl == "shardd":
                with quiet():
                    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
                    dcp.save(state, checkpoint_id=f"{folder}/{number}")
                found["went on"] = train(model, optimizer, range(3, 5))
                found["counters"] = counts(impl, model)
                finished(model)
            out[f"{strategy} {orig} {impl}"] = found
    return out
