"""What ranks do in the tests of full parameters: the same program on torch's FSDP and on both forms of shardd's."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from models import Block, Case, Model, build, loss_of, shard


def sharded(impl: str, case: Case | None = None, **arguments: Any) -> tuple[nn.Module, Any]:
    """The model, wrapped or in place, and its ``summon_full_params``."""
    model = build(case or Case())
    if impl == "fully_shard":
        from shardd.torch import fully_shard, summon_full_params

        shard(model, case or Case(), fully_shard)
        return model, summon_full_params
    if impl == "shardd":
        from shardd.torch import FullyShardedDataParallel
    else:
        from torch.distributed.fsdp import FullyShardedDataParallel  # type: ignore[assignment]
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    more = {"use_orig_params": True, "device_id": torch.device("cpu"), "auto_wrap_policy": ModuleWrapPolicy({Block})}
    wrapped = FullyShardedDataParallel(model, **{**more, **arguments})
    return wrapped, FullyShardedDataParallel.summon_full_params


def layer(model: nn.Module, index: int) -> nn.Module:
    return model.layers[index]  # type: ignore[union-attr,index,return-value]


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}


def error_of(call: Any) -> str:
    try:
        call()
    except (AssertionError, RuntimeError, ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _version(model: nn.Module) -> int:
    from shardd.torch._job.job import jobs

    (job,) = jobs()
    assert job.engine is not None
    return int(job.engine.info()["version"])


def _step(model: nn.Module, optimizer: Any, step: int) -> float:
    loss = loss_of(model, step, 0, dist.get_rank())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def summoned(impl: str) -> dict[str, Any]:
    """Reads, edits, gradients, submodules, exceptions, in the middle of training with torch's AdamW."""
    rank = dist.get_rank()
    model, summon = sharded(impl)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    result: dict[str, Any] = {"losses": [_step(model, optimizer, 0)]}
    objects = dict(model.named_parameters())

    with summon(model, writeback=False):
        result["read"] = values(model)
        result["requires_grad"] = all(p.requires_grad for p in model.parameters())
        for p in model.parameters():
            if dist.get_world_size() > 1:
                p.data.fill_(123.0)
            else:  # where nothing is sharded the wrapper class keeps edits, as torch does
                p.data.mul_(1.01)
    with summon(model):
        result["read again"] = values(model)
        with torch.no_grad():
            layer(model, 0).up.weight.mul_(0.5)  # type: ignore[union-attr]
            layer(model, 1).norm.bias.add_(0.25)  # type: ignore[union-attr]
    result["same objects"] = all(p is objects[n] for n, p in model.named_parameters())
    result["losses"].append(_step(model, optimizer, 1))

    # Gradients, between backward and step.
    loss_of(model, 2, 0, rank).backward()
    with summon(model, with_grads=True, writeback=False):
        result["gradients"] = gradients(model)
        for p in model.parameters():
            assert p.grad is not None
            if dist.get_world_size() > 1:
                p.grad.fill_(7.0)
    with summon(model, with_grads=True):
        result["gradients again"] = gradients(model)
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(-2.0)
    optimizer.step()
    with summon(model, writeback=False):
        result["stepped"] = values(model)
    optimizer.zero_grad()

    # Between a forward and its backward.
    loss = loss_of(model, 3, 0, rank)
    with summon(model, writeback=False):
        result["between"] = values(model)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

    # An edit of a body that raises stays, as in torch.
    with contextlib.suppress(KeyError), summon(model):
        with torch.no_grad():
            model.head.weight.mul_(0.9)  # type: ignore[union-attr]
        raise KeyError

    # Submodules.
    with summon(layer(model, 1), recurse=False, writeback=False):
        result["one layer"] = {n: tuple(p.shape) for n, p in layer(model, 1).named_parameters()}
        result["other whole"] = layer(model, 0).up.weight.shape == (21, 10) and impl != "fully_shard"
    with summon(layer(model, 2)), torch.no_grad():
        layer(model, 2).down.bias.fill_(0.125)  # type: ignore[union-attr]
    with summon(model, recurse=False, writeback=False):
        result["root alone"] = sorted(
            n for n, p in model.named_parameters() if _whole(n, p) and not n.startswith("layers")
        )
        result["below"] = [n for n, p in model.named_parameters() if n.startswith("layers") and _whole(n, p)]
    plain = nn.Sequential(nn.Linear(2, 2))
    with summon(plain):
        result["nothing sharded"] = plain[0].weight.shape == (2, 2)

    # The rank that is given them.
    # torch reads freed memory with offload_to_cpu where the device is the CPU.
    with summon(model, writeback=False, rank0_only=True, offload_to_cpu=impl != "torch"):
        result["rank 0 only"] = values(model) if rank == 0 else [n for n, p in model.named_parameters() if _whole(n, p)]
    result["losses"].append(_step(model, optimizer, 4))
    with summon(model, writeback=False):
        result["final"] = values(model)
    if impl != "torch":
        from shardd.torch import counters

        dist.barrier()
        result["counters"] = counters(model)
        result["version"] = _version(model)
        dist.barrier()
    return result


_SHAPES = {n: p.shape for n, p in Model().named_parameters()}


def _whole(name: str, p: torch.Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    name = name.replace("_fsdp_wrapped_module.", "")
    return not isinstance(p, DTensor) and p.shape == _SHAPES[name]


def rank0_edits(impl: str, kind: str) -> dict[str, Any]:
    """What torch refuses: rank 0 edits alone, parameters and gradients, and all ranks go on with it."""
    rank = dist.get_rank()
    model, summon = sharded(impl)
    if kind == "daemon":
        from shardd.torch.optim import SGD

        optimizer: Any = SGD(model.parameters(), lr=0.1)
    elif kind == "locked":
        from shardd.torch.optim import SGD

        optimizer = SGD(model.parameters(), lr=0.1, in_place_edits=False)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _step(model, optimizer, 0)
    loss_of(model, 1, 0, rank).backward()
    with summon(model, writeback=False, with_grads=True):
        before, grads = values(model), gradients(model)
    version = _version(model)
    with summon(model, rank0_only=True, with_grads=True), torch.no_grad():
        if rank == 0:
            for p in model.parameters():
                assert p.grad is not None
                p.mul_(3.0)
                p.grad.add_(1.0)
    facts: dict[str, Any] = {"versions": _version(model) - version}
    with summon(model, writeback=False, with_grads=True):
        after, changed = values(model), gradients(model)
    facts["parameters"] = max(float((after[n] - 3 * v).abs().max()) for n, v in before.items())
    facts["gradients"] = max(float((changed[n] - g - 1).abs().max()) for n, g in grads.items() if g is not None)
    optimizer.step()
    optimizer.zero_grad()
    with summon(model, writeback=False):
        stepped = values(model)
    facts["step"] = max(
        float((stepped[n] - (after[n] - 0.1 * g)).abs().max()) for n, g in changed.items() if g is not None
    )
    facts["loss"] = loss_of(model, 2, 0, 0).item()  # the same batch on all ranks
    return facts


def refused(impl: str) -> dict[str, Any]:
    """Where full parameters may not be had; afterwards the model trains on."""
    rank = dist.get_rank()
    model, summon = sharded(impl)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    facts: dict[str, Any] = {}

    def enter(module: nn.Module) -> None:
        with summon(module):
            facts["entered"] = True

    def inside_forward(module: nn.Module, args: Any) -> None:
        facts["forward"] = error_of(lambda: enter(model))

    def inside_backward(grad: torch.Tensor) -> None:
        facts["backward"] = error_of(lambda: enter(model))

    handle = layer(model, 1).norm.register_forward_pre_hook(inside_forward)  # type: ignore[union-attr]
    layer(model, 2).norm.register_forward_hook(lambda m, a, output: output.register_hook(inside_backward) and None)  # type: ignore[union-attr]
    facts["loss"] = _step(model, optimizer, 0)
    handle.remove()
    with summon(model):
        facts["nested"] = error_of(lambda: enter(model))
        facts["nested module"] = error_of(lambda: enter(layer(model, 0)))
        if impl != "torch":
            facts["run inside"] = error_of(lambda: loss_of(model, 1, 0, rank))
            facts["layer inside"] = error_of(lambda: layer(model, 0)(torch.ones(1, 10)))
    if impl != "torch":

        def leave_other_shape() -> None:
            with summon(model):
                layer(model, 0).up.bias.data = torch.zeros(3)  # type: ignore[union-attr]

        facts["shape"] = error_of(leave_other_shape)
    facts["loss after"] = _step(model, optimizer, 1)
    facts["loss after that"] = _step(model, optimizer, 2)
    return facts


def loads_inside(impl: str) -> dict[str, Any]:
    """load_state_dict of a whole state dict inside the context, before the first forward."""
    model, summon = sharded(impl)
    source = build(Case())
    with torch.no_grad():
        for p in source.parameters():
            p.mul_(0.5)
    with summon(model):
        facts = {"keys": list(model.state_dict())}
        model.load_state_dict(source.state_dict())
    with summon(model, writeback=False):
        facts["loaded"] = all(torch.equal(p, q) for p, q in zip(model.parameters(), source.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    facts["loss"] = [_step(model, optimizer, step) for step in range(2)]
    return facts


def flat_parameters(impl: str) -> dict[str, Any]:
    """Where modules have one FlatParameter: originals inside the context, under their names, with gradients of ours."""
    rank = dist.get_rank()
    model, summon = sharded(impl, use_orig_params=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result: dict[str, Any] = {"losses": [_step(model, optimizer, 0)]}
    result["outside"] = [tuple(n.split(".")[-1:]) for n, _ in model.named_parameters()]
    with summon(model):
        result["inside"] = values(model)
        with torch.no_grad():
            layer(model, 0).up.weight.mul_(0.5)  # type: ignore[union-attr]
            layer(model, 2).norm.bias.add_(0.25)  # type: ignore[union-attr]
    with summon(layer(model, 1), writeback=False):
        result["one layer"] = {n: tuple(p.shape) for n, p in layer(model, 1).named_parameters()}
    result["losses"].append(_step(model, optimizer, 1))
    loss_of(model, 2, 0, rank).backward()
    if impl != "torch":  # which wants use_orig_params for gradients
        with summon(model, with_grads=True):
            for p in model.parameters():
                assert p.grad is not None
                p.grad.mul_(2.0)
    else:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(2.0)
    optimizer.step()
    optimizer.zero_grad()
    with summon(model, writeback=False):
        result["final"] = values(model)
    result["outside again"] = [tuple(n.split(".")[-1:]) for n, _ in model.named_parameters()]
    result["losses"].append(_step(model, optimizer, 3))
    return result


def full_state_dicts(edits: bool) -> dict[str, Any]:
    """``get_model_state_dict`` of DTensors, whole: before there is a job, after edits, and between a forward and its
    backward. What torch's gathering was given is recorded."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    from shardd.torch import counters
    from shardd.torch._state_dicts import checkpoint_face
    from shardd.torch.optim import AdamW

    rank = dist.get_rank()
    model, _ = sharded("fully_shard")
    optimizer = AdamW(model.parameters(), lr=1e-2, in_place_edits=edits)
    theirs: list[list[str]] = []
    original = checkpoint_face._their_gather

    def gather(state_dict: dict[str, Any], **options: Any) -> Any:
        theirs.append([name for name, value in state_dict.items() if hasattr(value, "full_tensor")])
        return original(state_dict, **options)

    checkpoint_face._their_gather = gather

    def full(cpu_offload: bool) -> dict[str, torch.Tensor]:
        options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
        return get_model_state_dict(model, options=options)  # type: ignore[return-value]

    def wanted() -> dict[str, torch.Tensor]:
        return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).clone() for n, p in model.state_dict().items()}

    same = []

    def compare() -> None:
        want, on_all, on_first = wanted(), full(False), full(True)
        same.append(on_all.keys() == want.keys() and all(torch.equal(on_all[n], v) for n, v in want.items()))
        same.append(on_first.keys() == want.keys() if rank == 0 else on_first == {})
        same.append(all(torch.equal(on_first[n], want[n]) for n in on_first))
        for name in on_first.keys() & dict(model.named_parameters()).keys():
            on_first[name].fill_(7)  # a copy of the program's own

    compare()
    before = len(theirs)
    losses = []
    for step in range(3):
        loss = loss_of(model, step, 0, rank)
        if step > 0:
            compare()  # between a forward and its backward
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if edits:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.to_local().add_(0.01 * (1 + rank))  # type: ignore[operator]
            compare()
    return {
        "same": same,
        "gathered by torch": theirs[:before],
        "gathered": theirs[before:],
        "losses": losses,
        "counters": counters(model),
    }
