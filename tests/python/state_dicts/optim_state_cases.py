"""What ranks do in the tests of the wrapper's optimizer state dicts: every optimizer, original parameters and FlatParameters."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullOptimStateDictConfig, OptimStateKeyType
from torch.distributed.tensor import DTensor

from models import Case, build
from optimizers.optim_cases import counts, optimizer_of
from shardd.torch._ranks.gather import whole_value
from shardd.torch._state_dicts import optim_state_dict_load
from state_dicts.state_dict_cases import kinds_of, train
from state_dicts.wrapper_state_cases import FULL, LOCAL, SHARDED, alone, face, finished, quiet, whole, wrapped


@dataclass(frozen=True)
class Saved:
    """What is wrapped, trained and saved."""

    kind: str
    orig: bool
    mesh: bool = False
    tie: bool = False
    freeze: tuple[str, ...] = ()

    def model(self, impl: str, **more: Any) -> Any:
        given = {"orig": self.orig, "mesh": self.mesh, "tie": self.tie, "freeze": self.freeze, **more}
        return wrapped(impl, **given)

    def reference(self) -> Any:
        """What torch's class does; its FlatParameters want one requires_grad. With original parameters what it gathers of
        optimizers on CPU devices is wrong."""
        kind = self.kind.removeprefix("stock-")
        return None if self.freeze or self.orig else Saved(kind, False, self.mesh, self.tie)


def here(value: Any) -> Any:
    """What this rank holds of it."""
    if isinstance(value, ShardedTensor):
        shards = value.local_shards()
        return shards[0].tensor.clone() if shards else torch.empty(0, *value.size()[1:])
    if isinstance(value, DTensor):
        return value.to_local().clone()
    if isinstance(value, dict):
        return {key: here(item) for key, item in value.items()}
    return [here(item) for item in value] if isinstance(value, list) else value


def rows(value: Any) -> Any:
    """What this rank holds where a whole tensor is cut by rows."""
    if isinstance(value, dict):
        return {key: rows(item) for key, item in value.items()}
    if not torch.is_tensor(value) or value.dim() == 0:
        return value
    chunks = value.chunk(dist.get_world_size())
    return chunks[dist.get_rank()] if dist.get_rank() < len(chunks) else value[:0]


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(item, b[key]) for key, item in a.items())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(alike, a, b))
    return torch.equal(a, b) if torch.is_tensor(a) else a == b


def flattened(state: dict[str, Any]) -> dict[str, Any]:
    """As flatten_optimizer_state_dict wants it."""
    flat = {f"state.{fqn}.{name}": v for fqn, entry in state["state"].items() for name, v in entry.items()}
    for group in state["param_groups"]:
        for fqn in group["params"]:
            flat.update({f"param_groups.{fqn}.{name}": v for name, v in group.items() if name != "params"})
    return flat


def _functions(wrapper: Any, model: Any, optimizer: Any, every: bool) -> dict[str, Any]:
    """What gives an optimizer state dict by name: kinds and values; and which of the functions give another."""
    made: dict[str, Any] = {}
    with mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as sent:
        for name, kind in (("full", FULL), ("sharded", SHARDED)):
            with wrapper.state_dict_type(model, kind):
                made[name] = wrapper.optim_state_dict(model, optimizer)
    out: dict[str, Any] = {name: (kinds_of(state), here(state)) for name, state in made.items()}
    out["broadcasts"] = sent.call_count
    if not every:
        return out
    full, sharded = here(made["full"]), here(made["sharded"])

    def checkpoint(**options: bool) -> Any:
        return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**options))

    by_id = optimizer.state_dict()
    out["alike"] = {
        "sharded": alike(sharded["state"], rows(full["state"])),
        "given": alike(wrapper.optim_state_dict(model, optimizer, by_id), full),
        "older full": alike(wrapper.full_optim_state_dict(model, optimizer, rank0_only=False), full),
        "older rank 0": alike(wrapper.full_optim_state_dict(model, optimizer), {} if dist.get_rank() else full),
        "older sharded": alike(here(wrapper.sharded_optim_state_dict(model, optimizer)), sharded),
        "checkpoint full": alike(checkpoint(full_state_dict=True), full),
        "checkpoint flat": alike(checkpoint(full_state_dict=True, flatten_optimizer_state_dict=True), flattened(full)),
        "checkpoint sharded": alike(here(checkpoint()), sharded),
    }
    return out


def save(case: Saved, impl: str) -> dict[str, Any]:
    """Three steps, everything saved, two more."""
    model = case.model(impl, checkpointed=True)
    optimizer = optimizer_of(impl, case.kind, model.parameters())
    train(model, optimizer, range(3))
    wrapper = face(impl)
    with quiet():
        out: dict[str, Any] = {"functions": _functions(wrapper, model, optimizer, impl == "shardd")}
        out["model"] = {}
        for name, kind in (("full", FULL), ("sharded", SHARDED)):
            with wrapper.state_dict_type(model, kind):
                state = model.state_dict()
                out["model"][name] = (kinds_of(state), list(state), whole(state))
        if impl == "shardd":
            out["without"] = _goes_on_unwrapped(case, out)
    out["went on"] = train(model, optimizer, range(3, 5))
    out["counters"] = counts(impl, model)
    if impl == "shardd":
        finished(model)
    return out


def _goes_on_unwrapped(case: Saved, saved: dict[str, Any]) -> list[float]:
    """One process without a wrapper, from what was saved with one: names to numbers for its own optimizer."""
    model = build(Case(tie=case.tie, freeze=case.freeze))
    optimizer = optimizer_of("torch", case.kind, model.parameters())
    model.load_state_dict(saved["model"]["full"][2])
    by_name = copy.deepcopy(saved["functions"]["full"][1])
    optimizer.load_state_dict(
        face("shardd").rekey_optim_state_dict(by_name, OptimStateKeyType.PARAM_ID, model, optim=optimizer)
    )
    return train(model, optimizer, range(3, 5))


def save_all(cases: list[Saved]) -> list[dict[str, Any]]:
    out = []
    references: dict[Saved, Any] = {}
    for case in cases:
        reference = case.reference()
        if reference is not None and reference not in references:
            references[reference] = save(reference, "torch")
        out.append({
            "alone": alone(case.kind, case.tie, case.freeze),
            "torch": references.get(reference),
            "shardd": save(case, "shardd"),
        })  # fmt: skip
    return out


WAYS = ("plain", "directly", "rank 0", "shard full", "scatter", "sharded", "older sharded", "checkpoint full",
        "checkpoint rank 0", "checkpoint sharded", "checkpoint flat")  # fmt: skip


def load(case: Saved, model_state: Any, optim_state: Any, way: str, number: int) -> dict[str, Any]:
    """By name and whole, of whatever wrapping, into ``case``'s; before its job is there and after a step of it."""
    wrapper, rank = face("shardd"), dist.get_rank()
    model = case.model("shardd", nested=number % 2 == 0, checkpointed=number % 3 == 0)
    optimizer = optimizer_of("shardd", case.kind, model.parameters())
    if number % 2 or "flat" in way:
        train(model, optimizer, range(8, 9))
    gathered = -1  # values that were whole on a rank
    mine = copy.deepcopy(optim_state)
    theirs = mine if rank == 0 else None
    with quiet():
        set_model_state_dict(model, copy.deepcopy(model_state), options=StateDictOptions(full_state_dict=True))
        if way == "directly":
            wrapper.optim_state_dict_to_load(model, optimizer, mine, load_directly=True)
        elif way.startswith("checkpoint"):
            _set(model, optimizer, mine, way)
        else:
            if way == "rank 0":
                with wrapper.state_dict_type(model, FULL, None, FullOptimStateDictConfig(rank0_only=True)):
                    converted = wrapper.optim_state_dict_to_load(model, optimizer, theirs or {})
            elif way == "shard full":
                converted = wrapper.shard_full_optim_state_dict(mine, model, optim=optimizer)
            elif way == "scatter":
                converted = wrapper.scatter_full_optim_state_dict(theirs, model, optim=optimizer)
            elif way in ("sharded", "older sharded"):
                source, older = _source(case, model_state, mine)
                if way == "sharded":
                    with wrapper.state_dict_type(source, SHARDED), wrapper.state_dict_type(model, SHARDED):
                        made = wrapper.optim_state_dict(source, older)
                        with mock.patch.object(optim_state_dict_load, "whole_value", wraps=whole_value) as gathers:
                            converted = wrapper.optim_state_dict_to_load(model, optimizer, made)
                        gathered = sum(isinstance(call.args[0], ShardedTensor) for call in gathers.call_args_list)
                else:
                    made = wrapper.sharded_optim_state_dict(source, older)
                    converted = wrapper.flatten_sharded_optim_state_dict(made, model, optimizer)
            else:
                converted = wrapper.optim_state_dict_to_load(model, optimizer, mine)
            optimizer.load_state_dict(converted)
        state = whole(wrapper.optim_state_dict(model, optimizer))
        again = whole(model.state_dict())
    out = {"state": state, "model": again, "went on": train(model, optimizer, range(3, 5)),
           "counters": counts("shardd", model), "gathered": gathered}  # fmt: skip
    finished(model)
    return out


def _source(case: Saved, model_state: Any, optim_state: Any) -> tuple[Any, Any]:
    """The other form of ``use_orig_params``, with that state, and no job of it."""
    other = Saved(f"stock-{case.kind.removeprefix('stock-')}", not case.orig, case.mesh, case.tie, case.freeze)
    source = other.model("shardd")
    source.load_state_dict(copy.deepcopy(model_state))
    older = optimizer_of("shardd", other.kind, source.parameters())
    older.load_state_dict(face("shardd").optim_state_dict_to_load(source, older, copy.deepcopy(optim_state)))
    return source, older


def _set(model: Any, optimizer: Any, state: Any, way: str) -> None:
    options = StateDictOptions(
        full_state_dict=way != "checkpoint sharded",
        broadcast_from_rank0=way == "checkpoint rank 0",
        flatten_optimizer_state_dict=way == "checkpoint flat",
    )
    if way == "checkpoint rank 0" and dist.get_rank() != 0:
        state = {}
    if way == "checkpoint flat":
        state = flattened(state)
    set_optimizer_state_dict(model, optimizer, state, options=options)


def load_all(cases: list[Saved], saved: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each way into a FlatParameter, of the cases in turn; and each of the other cases once."""
    flat = [i for i, case in enumerate(cases) if not case.orig]
    turns = [(way, flat[number % len(flat)]) for number, way in enumerate(WAYS)]
    turns += zip(WAYS[2::3], (i for i, case in enumerate(cases) if case.orig))
    out: dict[str, dict[str, Any]] = {}
    for number, (way, index) in enumerate(turns):
        state = saved[index]
        out[f"{way} {index}"] = load(cases[index], state["model"], state["optimizer"], way, number)
    return out


def refused(case: Saved, saved: dict[str, Any]) -> dict[str, str]:
    """What a FlatParameter cannot hold, by name; the optimizer is as it was."""
    wrapper = face("shardd")
    model = case.model("shardd")
    optimizer = optimizer_of("shardd", case.kind, model.parameters())
    state = saved["optimizer"]["state"]

    def changed(fqn: str, **more: Any) -> dict[str, Any]:
        return {**saved["optimizer"], "state": {**state, fqn: {**state[fqn], **more}}}

    errors = {}
    fqn = "layers.1.up.weight"
    for name, bad in (
        ("shape", changed(fqn, exp_avg=torch.zeros(3, 2))),
        ("dtype", changed(fqn, exp_avg=torch.zeros(21, 10, dtype=torch.float64))),
        ("names", changed(fqn, more=torch.zeros(21, 10))),
        ("step", changed(fqn, step=torch.tensor(9.0))),
        ("nothing", {"param_groups": []}),
    ):
        try:
            wrapper.optim_state_dict_to_load(model, optimizer, copy.deepcopy(bad))
        except ValueError as error:
            errors[name] = str(error)
    try:
        wrapper.rekey_optim_state_dict(saved["optimizer"], OptimStateKeyType.PARAM_ID, model, optim=optimizer)
    except RuntimeError as error:
        errors["rekey"] = str(error)
    return errors


def _own(value: Any) -> Any:
    return {name: item.clone() if torch.is_tensor(item) else item for name, item in value.items()}


def local_state(case: Saved, saved: dict[str, Any]) -> bool:
    """This rank's pieces, by name, there and back."""
    model, other = case.model("shardd"), case.model("shardd")
    model.load_state_dict(saved["model"])
    with face("shardd").state_dict_type(model, LOCAL), face("shardd").state_dict_type(other, LOCAL):
        other.load_state_dict(_own(model.state_dict()))
    again = other.state_dict()
    return all(torch.equal(again[name], value) for name, value in saved["model"].items())


def run(cases: list[Saved]) -> dict[str, Any]:
    saved = save_all(cases)
    states = [
        {"model": s["shardd"]["model"]["full"][2], "optimizer": s["shardd"]["functions"]["full"][1]} for s in saved
    ]
    flat = next(i for i, case in enumerate(cases) if case.kind == "stock-adamw" and not case.orig)
    return {"saved": saved, "loaded": load_all(cases, states), "refused": refused(cases[flat], states[flat]),
            "local": [local_state(case, state) for case, state in zip(cases, states)]}  # fmt: skip
