"""What ranks do in the tests of the wrapper's state dicts: the same program on torch's class and on shardd's."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, OptimStateKeyType, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from models import Block, Case, build
from optimizers.optim_cases import counts, optimizer_of
from state_dicts.state_dict_cases import kinds_of, train, whole

FULL, SHARDED, LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT


def face(impl: str) -> Any:
    if impl == "torch":
        return TorchFSDP
    from shardd.torch import FullyShardedDataParallel

    return FullyShardedDataParallel


def wrapped(
    impl: str,
    nested: bool = True,
    checkpointed: bool = False,
    mesh: bool = False,
    tie: bool = False,
    orig: bool = True,
    freeze: tuple[str, ...] = (),
    **more: Any,
) -> Any:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = build(Case(tie=tie, freeze=freeze))
    if checkpointed:
        for index in (0, 2):
            model.layers[index] = checkpoint_wrapper(model.layers[index])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return face(impl)(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}) if nested else None,
            use_orig_params=orig,
            device_id=torch.device("cpu"),
            **({"device_mesh": init_device_mesh("cpu", (dist.get_world_size(),))} if mesh else {}),
            **more,
        )


@contextlib.contextmanager
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _saved(impl: str, model: Any, optimizer: Any) -> dict[str, Any]:
    """Everything that can be saved, whole; and what it was made of."""
    wrapper = face(impl)
    out: dict[str, Any] = {}
    with quiet():
        for name, kind, config, optim_config in (
            ("full", FULL, None, None),
            ("rank 0", FULL, FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
             FullOptimStateDictConfig(rank0_only=True)),
            ("sharded", SHARDED, None, None),
        ):  # fmt: skip
            if impl == "torch" and config is not None:
                continue  # on CPU devices torch's dies of it (signal 11)
            with wrapper.state_dict_type(model, kind, config, optim_config):
                settings = wrapper.get_state_dict_type(model)
                state = model.state_dict()
                optim = wrapper.optim_state_dict(model, optimizer)
            out[name] = {"model": whole(state), "optimizer": whole(optim), "kinds": kinds_of([state, optim]),
                         "settings": (settings.state_dict_type, type(settings.state_dict_config).__name__)}  # fmt: skip
        out["layer"] = whole(model.layers[1].state_dict())
        out["legacy full"] = whole(wrapper.full_optim_state_dict(model, optimizer, rank0_only=False))
        out["legacy sharded"] = whole(wrapper.sharded_optim_state_dict(model, optimizer))
        full = out["legacy full"]
        by_id = wrapper.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, model, optim=optimizer)
        out["by id"] = by_id
        out["by name"] = wrapper.rekey_optim_state_dict(by_id, OptimStateKeyType.PARAM_NAME, model, optim=optimizer)
    return out


def alone(kind: str, tie: bool = False, freeze: tuple[str, ...] = ()) -> dict[str, Any]:
    """One process, nothing sharded: the reference. (On CPU devices what torch's wrapper gathers of an optimizer is wrong:
    every state of a parameter has the last one's values.)"""
    model = build(Case(tie=tie, freeze=freeze))
    optimizer = optimizer_of("torch", kind, model.parameters())
    losses = train(model, optimizer, range(3))
    names = [name for name, _ in model.named_parameters()]
    state = optimizer.state_dict()
    saved = {
        "model": whole(model.state_dict()),
        "optimizer": {names[i]: whole(entry) for i, entry in state["state"].items()},
        "by id": whole(state["state"]),
    }
    return {**saved, "losses": losses, "went on": train(model, optimizer, range(3, 5))}


def save_all(kind: str, mesh: bool) -> dict[str, Any]:
    """Three steps, everything saved, two more."""
    out: dict[str, Any] = {"alone": alone(kind)}
    for impl in ("torch", "shardd"):
        model = wrapped(impl, checkpointed=True, mesh=mesh)
        optimizer = optimizer_of(impl, kind, model.parameters())
        before = whole(model.state_dict())
        train(model, optimizer, range(3))
        out[impl] = {"saved": _saved(impl, model, optimizer), "before": before}
        if impl == "shardd":
            state = model.state_dict()
            buffer = io.BytesIO()
            torch.save({"weight": state["layers.0.up.weight"]}, buffer)
            out["lone"] = (buffer.tell(), state["layers.0.up.weight"].nbytes)
        out[impl]["went on"] = train(model, optimizer, range(3, 5))
        if impl == "shardd":
            out["counters"] = counts(impl, model)
    return out


def finished(model: Any) -> None:
    """Ends its job on all ranks together: left to the garbage collector it may be in the middle of what others do next."""
    from shardd.torch import finish

    dist.barrier()
    finish(model)
    dist.barrier()


def load_all(kind: str, saved: dict[str, Any]) -> dict[str, Any]:
    """``saved`` by name: whole state dicts; into another wrapping, through each of the functions, before training and in it."""
    out: dict[str, Any] = {}
    wrapper = face("shardd")
    model_state, optim_state = saved["model"], saved["optimizer"]
    rank = dist.get_rank()
    for way in ("full", "rank 0", "sharded", "local", "legacy", "scatter"):
        used = way in ("full", "sharded", "legacy")
        model = wrapped("shardd", nested=way in ("full", "local"), checkpointed=way == "rank 0")
        optimizer = optimizer_of("shardd", kind, model.parameters())
        if used:
            train(model, optimizer, range(8, 9))
        with quiet():
            if way == "local":
                source = wrapped("shardd")
                source.load_state_dict(copy.deepcopy(model_state))
                with wrapper.state_dict_type(source, LOCAL):
                    pieces = {n: v.clone() for n, v in source.state_dict().items()}
                with wrapper.state_dict_type(model, LOCAL):
                    model.load_state_dict(pieces)
                out["pieces"] = sum(v.numel() for n, v in pieces.items() if n != "bias")
                converted = wrapper.optim_state_dict_to_load(model, optimizer, copy.deepcopy(optim_state))
            elif way == "sharded":
                source = wrapped("shardd")
                source.load_state_dict(copy.deepcopy(model_state))
                with wrapper.state_dict_type(source, SHARDED), wrapper.state_dict_type(model, SHARDED):
                    model.load_state_dict(source.state_dict())
                converted = wrapper.optim_state_dict_to_load(model, optimizer, copy.deepcopy(optim_state))
            elif way == "rank 0":
                model.load_state_dict(copy.deepcopy(model_state))
                with wrapper.state_dict_type(model, FULL, None, FullOptimStateDictConfig(rank0_only=True)):
                    mine = copy.deepcopy(optim_state) if rank == 0 else {}
                    converted = wrapper.optim_state_dict_to_load(model, optimizer, mine)
            else:
                model.load_state_dict(copy.deepcopy(model_state))
                if way == "full":
                    converted = wrapper.optim_state_dict_to_load(model, optimizer, copy.deepcopy(optim_state))
                elif way == "legacy":
                    converted = wrapper.shard_full_optim_state_dict(copy.deepcopy(optim_state), model, optim=optimizer)
                else:
                    mine = copy.deepcopy(optim_state) if rank == 0 else None
                    converted = wrapper.scatter_full_optim_state_dict(mine, model, optim=optimizer)
            optimizer.load_state_dict(converted)
            out[way] = {
                "model": whole(model.state_dict()),
                "optimizer": whole(wrapper.optim_state_dict(model, optimizer)),
            }
        out[way]["went on"] = train(model, optimizer, range(3, 5))
        out[f"{way} counters"] = counts("shardd", model)
        if way != "scatter":
            finished(model)
    try:
        model.load_state_dict({**model_state, "norm.weight": torch.zeros(3)})
        out["error"] = ""
    except RuntimeError as error:
        out["error"] = str(error)
    missing = model.load_state_dict({n: v for n, v in model_state.items() if n != "layers.1.norm.weight"}, strict=False)
    out["missing"] = list(missing.missing_keys)
    return out


def dcp_save(folder: str, kind: str) -> dict[str, Any]:
    out: dict[str, Any] = {"alone": alone(kind)}
    for impl in ("torch", "shardd"):
        model = wrapped(impl, mesh=True, checkpointed=impl == "shardd")
        optimizer = optimizer_of(impl, kind, model.parameters())
        train(model, optimizer, range(3))
        with quiet():
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
            dcp.save(state, checkpoint_id=f"{folder}/{impl}")
            if impl == "shardd":
                from shardd.torch import save_safetensors

                save_safetensors(model, f"{folder}/safetensors")
            full = get_state_dict(
                model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=impl != "torch")
            )
        out[impl] = {"state": whole(state), "kinds": kinds_of(state), "full": whole(list(full)),
                     "went on": train(model, optimizer, range(3, 5))}  # fmt: skip
    return out


def dcp_load(folder: str, kind: str) -> dict[str, Any]:
    """Into the wrapper of another world; full state from rank 0 too."""
    from shardd.torch import load_safetensors

    out: dict[str, Any] = {"from files": []}
    model = wrapped("shardd", nested=False)
    for steps in (0, 1):  # without a job, and with one
        train(model, optimizer_of("shardd", "stock-adamw", model.parameters()), range(steps))
        load_safetensors(model, f"{folder}/safetensors")
        out["from files"].append(whole(model.state_dict()))
    for source, impl, broadcast in (("shardd", "shardd", False), ("torch", "shardd", False), ("shardd", "torch", False),
                                    ("shardd", "shardd", True)):  # fmt: skip
        model = wrapped(impl, mesh=True)
        optimizer = optimizer_of(impl, kind, model.parameters())
        if broadcast:
            train(model, optimizer, range(7, 8))
        options = StateDictOptions(full_state_dict=broadcast, broadcast_from_rank0=broadcast)
        with quiet():
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
            dcp.load(state, checkpoint_id=f"{folder}/{source}")
            if broadcast:
                state = whole(state)
                if dist.get_rank() != 0:
                    state = {"model": {}, "optimizer": {}}
            if broadcast:  # with nothing to load set_state_dict leaves the model out
                set_model_state_dict(model, state["model"], options=options)
                set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
            else:
                set_state_dict(
                    model,
                    optimizer,
                    model_state_dict=state["model"],
                    optim_state_dict=state["optimizer"],
                    options=options,
                )
            again = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        name = f"{source} in {impl}" + (" from rank 0" if broadcast else "")
        out[name] = {"state": whole(again), "went on": train(model, optimizer, range(3, 5))}
        if impl == "shardd":
            out[f"{name} counters"] = counts(impl, model)
    return out


def composed(by_hand: bool) -> Any:
    """``fully_shard`` in layout flat: with a policy and the older keywords, or module by module with a list and a mesh."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    from shardd.torch import ShardingStrategy, fully_shard

    model: Any = build(Case())
    model.layers[1] = checkpoint_wrapper(model.layers[1])
    if not by_hand:
        return fully_shard(model, policy={Block}, strategy=ShardingStrategy.FULL_SHARD)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model.layers, [model.norm, model.head], model):
        fully_shard(part, layout="flat", mesh=mesh)
    return model


def composable(folder: str, kind: str) -> dict[str, Any]:
    """State dicts of the form without a wrapper, into its other form, the wrapper and back, in every way."""
    wrapper = face("shardd")
    out: dict[str, Any] = {"alone": alone(kind)}
    for by_hand in (False, True):
        model = composed(by_hand)
        optimizer = optimizer_of("shardd", kind, model.parameters())
        got: dict[str, Any] = {"before": whole(model.state_dict())}
        train(model, optimizer, range(3))
        for name, state_type in (("full", FULL), ("sharded", SHARDED), ("local", LOCAL)):
            with quiet(), wrapper.state_dict_type(model, state_type):
                state = model.state_dict()
                got[name] = (kinds_of(state), None if name == "local" else whole(state))
                if name != "local":
                    got[f"{name} optimizer"] = whole(wrapper.optim_state_dict(model, optimizer))
        with wrapper.state_dict_type(model, FULL, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
            got["rank 0"] = len(model.state_dict())
        got["layer"] = whole(model.layers[2].state_dict())
        with quiet():
            dcp.save(
                dict(zip(("model", "optimizer"), get_state_dict(model, optimizer))), checkpoint_id=f"{folder}/{by_hand}"
            )
        # DTensors: of a ShardedTensor that a rank has no row of torch's reader loses the name, with torch's class too.
        others = {"wrapper": wrapped("shardd"), "other form": composed(not by_hand), "dcp": composed(True)}
        for name, other in others.items():
            into = optimizer_of("shardd", kind, other.parameters())
            with quiet():
                if name == "dcp":
                    state = dict(zip(("model", "optimizer"), get_state_dict(other, into)))
                    dcp.load(state, checkpoint_id=f"{folder}/{by_hand}")
                    set_state_dict(other, into, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
                else:
                    other.load_state_dict(copy.deepcopy(got["full"][1]))
                    saved = copy.deepcopy(got["sharded optimizer"])
                    into.load_state_dict(wrapper.optim_state_dict_to_load(other, into, saved))
            got[f"in {name}"] = train(other, into, range(3, 5))
            got[f"in {name} commits"] = counts("shardd", other)["commits"]
        plain = build(Case())
        plain.load_state_dict(got["full"][1])
        got["loss without"] = train(plain, torch.optim.SGD(plain.parameters()), range(3, 4))
        got["went on"] = train(model, optimizer, range(3, 5))
        got["commits"] = counts("shardd", model)["commits"]
        out["by hand" if by_hand else "policy"] = got
    return out
