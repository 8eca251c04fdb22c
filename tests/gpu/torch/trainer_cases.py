"""Cases of shards that programs write: torch's own optimizers, in-place edits, layout flat and the wrapper class."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as theirs
from cases import (
    STEPS,
    Model,
    _on,
    apart,
    batch,
    case,
    loss_of,
    make,
    mean_loss,
    mesh,
    params_apart,
    parity,
    reference,
    shard,
    train,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.tensor import DTensor

from shardd.torch import FullyShardedDataParallel, fully_shard, resume, summon_full_params
from shardd.torch.optim import AdamW

_adamw = functools.partial(torch.optim.AdamW, lr=3e-3)
_foreach = functools.partial(_adamw, foreach=True)
_fused = functools.partial(_adamw, fused=True)
_sgd = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)

Edit = Callable[[nn.Module], None]


def wrap(model: Model, **options: Any) -> FullyShardedDataParallel:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = FullyShardedDataParallel(block, **options)
    return FullyShardedDataParallel(model, **options)


def run_alone(device: str, make_optimizer: Any, edit: Edit, max_norm: float = 0.0, steps: int = STEPS) -> Any:
    """The unsharded model on every rank's data, edited after each step: mean losses, and the model."""
    model, world = make(device), dist.get_world_size()
    stepper = make_optimizer(model.parameters())
    losses = []
    for step in range(steps):
        total = 0.0
        for rank in range(world):
            loss = loss_of(model, batch(step, rank, 0, device))
            (loss / world).backward()
            total += loss.item() / world
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        stepper.step()
        stepper.zero_grad()
        edit(model)
        losses.append(total)
    return losses, model


def run_sharded(model: nn.Module, stepper: Any, device: str, edit: Edit, clip: Any = None) -> list[float]:
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, batch(step, dist.get_rank(), 0, device))
        loss.backward()
        if clip is not None:
            clip()
        stepper.step()
        stepper.zero_grad()
        edit(model)
        losses.append(mean_loss(loss))
    return losses


@torch.no_grad()
def clamp(model: nn.Module) -> None:
    for param in model.parameters():
        param.clamp_(-0.2, 0.2)


def nothing(model: nn.Module) -> None:
    return


@case
def stock_adamw(device: str) -> dict[str, Any]:
    return parity(device, _adamw, _adamw)


@case
def stock_adamw_foreach(device: str) -> dict[str, Any]:
    return parity(device, _foreach, _foreach)


@case
def stock_adamw_fused(device: str) -> dict[str, Any]:
    """Its step counts are on the GPU."""
    return parity(device, _fused, _fused)


@case
def stock_sgd_momentum(device: str) -> dict[str, Any]:
    return parity(device, _sgd, _sgd)


@case
def stock_accumulated(device: str) -> dict[str, Any]:
    return parity(device, _foreach, _foreach, micros=2)


@case
def stock_recomputed(device: str) -> dict[str, Any]:
    return parity(device, _foreach, _foreach, recomputes=True)


@case
def stock_kept_unsharded(device: str) -> dict[str, Any]:
    return parity(device, _foreach, _foreach, reshard_after_forward=False)


@case
def stock_offloaded(device: str) -> dict[str, Any]:
    """The optimizer runs on the host, where shards, gradients and its state are."""
    return parity(device, _foreach, _adamw, offload_policy=CPUOffloadPolicy())


@case
def stock_hybrid(device: str) -> dict[str, Any]:
    return parity(device, _foreach, _foreach, mesh=mesh(device, dist.get_world_size(), 1))


@case
def stock_clipped(device: str) -> dict[str, Any]:
    want, plain = run_alone(device, _adamw, nothing, max_norm=0.3)
    model = make(device)
    shard(model, mesh=mesh(device))
    stepper = _foreach(model.parameters())
    got = run_sharded(model, stepper, device, nothing, lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.3))
    return {"losses": apart(got, want), "params": params_apart(model, plain)}


@case
def stock_beside_fully_shard(device: str) -> dict[str, Any]:
    """torch's fully_shard with the same optimizer, bf16; on several ranks, which share a GPU here, the fp32 model."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if dist.get_world_size() == 1:
        beside = make(device)
        shard(beside, theirs.fully_shard, mesh=mesh(device), mp_policy=policy)
        want = train(beside, _foreach(beside.parameters()), device)
    else:
        want, _ = reference(device, _adamw)
    model = make(device)
    shard(model, mesh=mesh(device), mp_policy=policy)
    return {"losses": apart(train(model, _foreach(model.parameters()), device), want)}


@case
def stock_on_another_stream(device: str) -> dict[str, Any]:
    """Step and edits run on other streams than forward and backward, which only the job orders with them."""
    want, plain = run_alone(device, _adamw, clamp)
    model = make(device)
    shard(model, mesh=mesh(device))
    stepper = _foreach(model.parameters())
    streams = [None, torch.cuda.Stream(), torch.cuda.Stream()] if device == "cuda" else [None]
    got = []
    for step in range(STEPS):
        loss = loss_of(model, batch(step, dist.get_rank(), 0, device))
        loss.backward()
        with _on(streams[step % len(streams)]):
            stepper.step()
            stepper.zero_grad()
            clamp(model)
        got.append(mean_loss(loss))
    return {"losses": apart(got, want), "params": params_apart(model, plain)}


@case
def edited_in_place(device: str) -> dict[str, Any]:
    want, plain = run_alone(device, _adamw, clamp)
    model = make(device)
    shard(model, mesh=mesh(device))
    got = run_sharded(model, _foreach(model.parameters()), device, clamp)
    return {"losses": apart(got, want), "params": params_apart(model, plain)}


@case
def edited_beside_the_daemons_optimizer(device: str) -> dict[str, Any]:
    want, plain = run_alone(device, _adamw, clamp)
    model = make(device)
    shard(model, mesh=mesh(device))
    stepper = AdamW(model.parameters(), lr=3e-3, in_place_edits=True)
    got = run_sharded(model, stepper, device, clamp)
    return {"losses": apart(got, want), "params": params_apart(model, plain)}


@case
def stored_inside_a_pass(device: str) -> dict[str, Any]:
    """What is stored between a forward and its backward is in the next pass, and not in this one."""
    model = make(device)
    shard(model, mesh=mesh(device))
    stepper = torch.optim.SGD(model.parameters(), lr=0.0)
    data = batch(0, dist.get_rank(), 0, device)
    loss_of(model, data).backward()
    stepper.step()
    sharded = dict(model.named_parameters())  # the root shows others after its forward
    first = {name: param.grad.to_local().clone() for name, param in model.named_parameters()}
    stepper.zero_grad()
    loss = loss_of(model, data)
    with torch.no_grad():
        for param in sharded.values():
            param.mul_(1.5)
    loss.backward()
    same = max((param.grad.to_local() - first[name]).abs().max().item() if first[name].numel() else 0.0
               for name, param in model.named_parameters())  # fmt: skip
    plain = make(device)
    with torch.no_grad():
        for param in plain.parameters():
            param.mul_(1.5)
    return {"differs": same, "losses": apart([loss_of(model, data).item()], [loss_of(plain, data).item()])}


def _values(model: nn.Module, stepper: Any, device: str) -> dict[tuple[str, str], torch.Tensor]:
    """The optimizer's state: whole, or the rank's own where ranks share a GPU, because torch 2.13.0 gathers CUDA DTensors over
    gloo with a segmentation fault, shardd or not."""
    whole = device == "cpu" or dist.get_world_size() == 1
    found = get_optimizer_state_dict(model, stepper, options=StateDictOptions(full_state_dict=whole, cpu_offload=whole))
    local = {(name, key): value.to_local() if isinstance(value, DTensor) else value
             for name, entry in found.get("state", {}).items() for key, value in entry.items()}  # fmt: skip
    return {at: value.clone() for at, value in local.items()}


@case
def stock_state_dicts(device: str) -> dict[str, Any]:
    model = make(device)
    shard(model, mesh=mesh(device))
    stepper = _foreach(model.parameters())
    train(model, stepper, device, steps=3)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    own = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, stepper)}
    dcp.save(own, checkpoint_id=folder[0])
    follow = train(model, stepper, device, first=3, steps=6)
    before = _values(model, stepper, device)
    own = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, stepper)}
    dcp.load(own, checkpoint_id=folder[0])
    model.load_state_dict(own["model"])
    set_optimizer_state_dict(model, stepper, own["optim"])
    repeated = train(model, stepper, device, first=3, steps=6)
    again = _values(model, stepper, device)
    differs = (
        max((value - again[name]).abs().max().item() for name, value in before.items() if value.numel())
        if before
        else 0.0
    )
    return {"losses": apart(repeated, follow), "differs": differs}


@case
def flat(device: str) -> dict[str, Any]:
    return parity(device, _foreach, _adamw, layout="flat")


@case
def flat_with_the_daemons_optimizer(device: str) -> dict[str, Any]:
    return parity(device, functools.partial(AdamW, lr=3e-3), _adamw, layout="flat")


@case
def flat_given_other_storage(device: str) -> dict[str, Any]:
    """``p.data = ...`` between passes, of a whole and of none on some ranks."""

    def double(model: nn.Module) -> None:
        gain = model.gain
        gain.data = gain.data * 1.01

    want, plain = run_alone(device, _adamw, double)
    model = make(device)
    shard(model, mesh=mesh(device), layout="flat")
    got = run_sharded(model, _foreach(model.parameters()), device, double)
    return {"losses": apart(got, want), "params": params_apart(model, plain)}


def _wrapped(device: str, stepper: Any = _foreach, **options: Any) -> dict[str, Any]:
    want, plain = run_alone(device, _adamw, nothing, max_norm=0.3)
    model = wrap(make(device), **options)
    got = run_sharded(model, stepper(model.parameters()), device, nothing, lambda: model.clip_grad_norm_(0.3))
    devices = {p.device.type for p in model.parameters()}
    return {"losses": apart(got, want), "params": params_apart(model, plain), "devices": sorted(devices)}


@case
def wrapped_original_parameters(device: str) -> dict[str, Any]:
    return _wrapped(device, use_orig_params=True)


@case
def wrapped_flat_parameters(device: str) -> dict[str, Any]:
    return _wrapped(device)


@case
def wrapped_not_sharded(device: str) -> dict[str, Any]:
    return _wrapped(device, use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD)


@case
def wrapped_from_the_host(device: str) -> dict[str, Any]:
    """The module is on the host, and device_id says where it goes."""
    want, plain = run_alone(device, _adamw, nothing)
    model = wrap(make("cpu"), use_orig_params=True, device_id=torch.device(device), sync_module_states=True)
    got = run_sharded(model, _fused(model.parameters()), device, nothing)
    return {"losses": apart(got, want), "params": params_apart(model, plain)}


@case
def wrapped_bf16(device: str) -> dict[str, Any]:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    want, _ = reference(device, _adamw)
    model = wrap(make(device), use_orig_params=True, mixed_precision=precision)
    return {"losses": apart(train(model, _foreach(model.parameters()), device), want)}


@case
def wrapped_state_dicts(device: str) -> dict[str, Any]:
    """Of three kinds, with the optimizer's; what was trained after them is undone by loading them."""
    differs, losses = 0.0, 0.0
    where = set()
    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT):
        model = wrap(make(device), use_orig_params=True)
        stepper = _foreach(model.parameters())
        train(model, stepper, device, steps=3)
        with FullyShardedDataParallel.state_dict_type(model, kind):
            saved = {name: value.clone() for name, value in model.state_dict().items()}
        optim = FullyShardedDataParallel.full_optim_state_dict(model, stepper, rank0_only=False)
        if kind == StateDictType.FULL_STATE_DICT:
            where.update(value.device.type for value in saved.values())
            plain = make(device)
            plain.load_state_dict(saved)
            differs = max(differs, params_apart(model, plain))
        follow = train(model, stepper, device, first=3, steps=6)
        with FullyShardedDataParallel.state_dict_type(model, kind):
            model.load_state_dict(saved)
        stepper.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, stepper, optim))
        losses = max(losses, apart(train(model, stepper, device, first=3, steps=6), follow))
        with summon_full_params(model, writeback=True), torch.no_grad():
            model.gain.mul_(2)
            doubled = model.gain.detach().clone()
        with summon_full_params(model, offload_to_cpu=True):
            differs = max(differs, (model.gain.detach().cpu() - doubled.cpu()).abs().max().item())
    return {"differs": differs, "losses": losses, "device": where.pop() if len(where) == 1 else str(where)}


def _unfreezing(model: nn.Module, device: str, ranks: list[int]) -> list[float]:
    """A block is trained from the second of two micro-batches of a step on; a process has the data of ``ranks``."""
    frozen = list(model.get_submodule("blocks.0").parameters())
    for param in frozen:
        param.requires_grad_(False)
    stepper = _foreach([param for param in model.parameters() if param.requires_grad])
    losses = []
    for step in range(4):
        for micro in range(2):
            if (step, micro) == (1, 1):
                for param in frozen:
                    param.requires_grad_(True)
                stepper.add_param_group({"params": frozen})
            total = 0.0
            for rank in ranks:
                loss = loss_of(model, batch(step, rank, micro, device))
                (loss / len(ranks)).backward()
                total += loss.item() / len(ranks)
            losses.append(total)
        stepper.step()
        stepper.zero_grad()
    return losses


@case
def unfrozen_with_gradients(device: str) -> dict[str, Any]:
    """In layout flat, where gradients that are shown move with the pieces."""
    plain = make(device)
    want = _unfreezing(plain, device, list(range(dist.get_world_size())))
    model = make(device)
    shard(model, mesh=mesh(device), layout="flat")
    got = [mean_loss(torch.tensor(loss)) for loss in _unfreezing(model, device, [dist.get_rank()])]
    return {"losses": apart(got, want), "params": params_apart(model, plain)}


@case
def inputs_from_the_host(device: str) -> dict[str, Any]:
    whole, wrapped = make(device), wrap(make(device), use_orig_params=True)
    shard(whole, mesh=mesh(device))
    differs = 0.0
    with torch.no_grad():
        for model in (whole, wrapped):
            near = model(batch(0, dist.get_rank(), 0, device)[0])
            far = model(batch(0, dist.get_rank(), 0, "cpu")[0])
            differs = max(differs, (near - far).abs().max().item())
    return {"differs": differs}


@case
def moved_after_it_was_wrapped(device: str) -> dict[str, Any]:
    model = FullyShardedDataParallel(make("cpu"), use_orig_params=True)
    model.to(device)
    try:
        model(batch(0, dist.get_rank(), 0, device)[0])
    except RuntimeError as error:
        return {"text": str(error)}
    return {"text": ""}


@case
def optimizer_state_on_the_host(device: str) -> dict[str, Any]:
    """As torch's default: full and in rows, gathered or read from the job, ``step`` too."""
    model = wrap(make(device), use_orig_params=True)
    stepper = _fused(model.parameters())
    train(model, stepper, device, steps=2)
    places = set()
    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        with FullyShardedDataParallel.state_dict_type(model, kind):
            state = FullyShardedDataParallel.optim_state_dict(model, stepper)["state"]
        places.update(value.device.type for entry in state.values() for value in entry.values())
    return {"on": sorted(places)}


@case
def what_is_refused(device: str) -> dict[str, Any]:
    texts = []

    def attempt(function: Callable[[], Any]) -> None:
        try:
            function()
            texts.append("")
        except NotImplementedError as error:
            texts.append(str(error))

    attempt(lambda: fully_shard(make(device), mesh=mesh(device), layout="flat", offload_policy=CPUOffloadPolicy()))
    attempt(lambda: FullyShardedDataParallel(make(device), cpu_offload=CPUOffload(offload_params=True)))
    return {"texts": texts}


@case
def stock_killed_and_resumed(device: str) -> dict[str, Any]:
    """As killed_and_resumed, with torch's fused optimizer, whose state is in the job. Every pass is kept."""
    want, plain = reference(device, _adamw, steps=10)
    model = make(device)
    shard(model, mesh=mesh(device))
    stepper = _fused(model.parameters())
    first, _ = resume(model)
    got = train(model, stepper, device, first=first, steps=5 if first == 0 else 10)
    if first == 0:
        loss_of(model, batch(5, dist.get_rank(), 0, device)).backward()
        dist.barrier()
        os.kill(os.getpid(), 9)
    return {"first": first, "losses": apart(got, want[first:]), "params": params_apart(model, plain)}
