"""What ranks do in the tests of what is around such weights: other meshes and ways to unshard, errors, refusals."""

from __future__ import annotations

import collections
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard

from subclasses.low_scenarios import WIDTH, made, train
from subclasses.refused_scenarios import raised
from subclasses.weights import Low, OldLow, lower
from subclasses.weights_frozen import Adapted


def _values(model: nn.Module) -> list[torch.Tensor]:
    return [getattr(p._local_tensor, "_data", p._local_tensor).clone() for p in model.parameters()]  # type: ignore[attr-defined]


def other_ways_on_both() -> dict[str, Any]:
    """A hybrid mesh; evaluated first; unshard by hand; inference in between."""
    import shardd.torch

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    results: dict[str, Any] = {}
    for name, sharded in (("torch", torch_fully_shard), ("shardd", shardd.torch.fully_shard)):
        model: Any = made(Low, sharded, mesh=mesh)
        adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
        shown = []
        x = torch.ones(3, WIDTH)
        with torch.no_grad():
            shown.append(model(x).clone())
        model.reshard()
        losses = train(model, adamw, range(3))
        with torch.inference_mode():
            shown.append(model(x).clone())
        model.reshard()
        model[0].unshard(async_op=True).wait()
        shown.append(model[0].up.weight.detach().clone())
        model[0].reshard()
        losses += train(model, adamw, range(3, 6))
        results[name] = {"losses": losses, "shown": shown, "values": _values(model)}
    dist.barrier()
    shardd.torch.finish(model)
    return results


def kept_behind_backward(optimizer: str) -> dict[str, Any]:
    """Losses of torch's fully_shard, whose units are resharded behind each backward, and of ours, which stay unsharded over the
    optimizer's step."""
    import shardd.torch
    import shardd.torch.optim

    theirs: Any = made(Low, torch_fully_shard)
    model: Any = made(Low, shardd.torch.fully_shard)
    model.set_reshard_after_backward(False)
    results = {
        "torch": train(theirs, torch.optim.AdamW(theirs.parameters(), lr=0.05), range(5)),
        "kept": [],
        "unsharded": [],
    }
    of: Any = torch.optim if optimizer == "torch" else shardd.torch.optim
    options = {} if optimizer == "torch" else {"in_place_edits": False}
    adamw = of.AdamW(model.parameters(), lr=0.05, **options)
    for step in range(5):
        results["kept"] += train(model, adamw, range(step, step + 1))
        adamw.zero_grad()
        loss = model(torch.ones(2, WIDTH)).sum()  # so that one is known to be unsharded behind a backward
        loss.backward()
        adamw.zero_grad()
        results["unsharded"].append(model[0]._get_fsdp_state()._unit.is_unsharded)
    dist.barrier()
    shardd.torch.finish(model)
    return results


def unfrozen_on_both(optimizer: str) -> dict[str, Any]:
    """Low weights are frozen at first, and trained from the third step on."""
    import shardd.torch
    import shardd.torch.optim

    results: dict[str, Any] = {}
    for name, sharded in (("torch", torch_fully_shard), ("shardd", shardd.torch.fully_shard)):
        model: Any = made(Low, sharded)
        of: Any = torch.optim if name == "torch" or optimizer == "torch" else shardd.torch.optim
        adamw = of.AdamW(model.parameters(), lr=0.01)
        losses = []
        for wanted in (False, True, False):
            for param in model.parameters():
                param.requires_grad_(wanted or not isinstance(param._local_tensor, Low))
            losses += train(model, adamw, range(2))
        results[name] = {"losses": losses, "values": _values(model)}
    dist.barrier()
    shardd.torch.finish(model)
    return results


def uneven_rows(width: int) -> str:
    """Frozen weights of several tensors, whose rows are cut unevenly; and what they send has no padding."""
    from shardd.torch import fully_shard

    model = fully_shard(nn.Sequential(Adapted(width, 13)))
    return raised(lambda: model(torch.ones(2, width)))


class Failing(Low):
    """Raises on one rank when it is told to."""

    fails = False

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        if Failing.fails and dist.get_rank() == 1:
            raise ValueError("out of luck")
        return (self._data.bfloat16(),), (1.0,)


def errors_on_all_ranks() -> dict[str, str]:
    from shardd.torch import finish, fully_shard

    found = {}
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 4))
    lower(model[1], Failing)
    Failing.fails = False
    lowered = nn.Sequential(nn.Linear(4, 4))
    lower(lowered, Failing)
    model[1] = lowered[0]
    fully_shard(model)
    x = torch.ones(2, WIDTH)
    with torch.inference_mode():  # where PyTorch's cannot begin
        before = model(x).clone()
    model(x).sum().backward()
    model.reshard()
    Failing.fails = True
    found["raised"] = raised(lambda: model(x))
    Failing.fails = False
    model.reshard()
    found["after"] = "alike" if torch.equal(model(x), before) else "differs"
    dist.barrier()
    finish(model)
    # Uneven, and not padded: this torch's own gather would mix ranks up.
    uneven: Any = nn.Sequential(nn.Linear(4, 3))
    lower(uneven, OldLow)
    fully_shard(uneven)
    found["uneven"] = raised(lambda: uneven(torch.ones(2, 4)))
    dist.barrier()
    finish(uneven)
    return found


class Bare(Low):
    fsdp_post_all_gather = property()  # type: ignore[assignment]


class Trained(Adapted):
    def __init__(self) -> None:
        super().__init__(WIDTH, 12)
        self.weight.requires_grad_(True)


def _low_linear(inputs: int = WIDTH) -> nn.Module:
    model = nn.Sequential(nn.Linear(inputs, 4))
    lower(model)
    return model


def _of_tensor_parallel() -> None:
    from shardd.torch import fully_shard

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    linear = nn.Linear(4, 4)
    linear.weight = nn.Parameter(DTensor.from_local(Low(torch.ones(2, 4)), mesh["tp"], [Shard(0)], run_check=False))
    fully_shard(linear, mesh=mesh["dp"])


def refusals() -> dict[str, str]:
    import tempfile

    import shardd.torch
    from shardd.torch import FullyShardedDataParallel, fully_shard
    from shardd.torch._units.subclasses import check_subclass

    x = torch.ones(2, WIDTH)
    bare = nn.Linear(4, 4)
    bare.weight = nn.Parameter(Bare(torch.ones(4, 4)))
    low, nested = _low_linear()[0], nn.Linear(4, 4)
    nested.weight = nn.Parameter(Low(Low(torch.ones(4, 4))))
    found = {
        "flat": raised(lambda: fully_shard(_low_linear(), layout="flat")),
        "wrapper": raised(lambda: FullyShardedDataParallel(_low_linear())),
        "one method": raised(lambda: fully_shard(bare)),
        "nested": raised(lambda: fully_shard(nested)),
        "gpu": raised(lambda: check_subclass(low.weight, "fully_shard: a parameter", torch.device("cuda"))),
        "tensor parallel": raised(_of_tensor_parallel),
        "trained rows": raised(lambda: fully_shard(Trained())(x)),
        "columns": raised(lambda: fully_shard(_low_linear(12), shard_placement_fn=lambda p: Shard(p.dim() - 1))),
    }
    model: Any = fully_shard(_low_linear())
    model(x)
    model.reshard()
    with tempfile.TemporaryDirectory() as folder:
        found["safetensors"] = raised(lambda: shardd.torch.save_safetensors(model, folder))
    found["reattach"] = raised(lambda: shardd.torch.reattach(model))

    def summon() -> None:
        with shardd.torch.summon_full_params(model):
            pass

    found["summon"] = raised(summon)
    dist.barrier()
    shardd.torch.finish(model)
    return found


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low = made(Low, lambda module, **_: module)
        self.up, self.again = nn.Linear(4, 5), nn.Linear(4, 5)
        self.again.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.low(x)
        return self.up(low) + self.again(low)


def state_dicts_are_copies_of_now(steps: int) -> list[str]:
    """Names whose value in a state dict is not that of the shard. Values of the state dicts before are kept, their dicts are not;
    and what a looked at weight's storage leaves is used again."""
    import shardd.torch
    import shardd.torch.optim

    model: Any = shardd.torch.fully_shard(_Tied())
    adamw = shardd.torch.optim.AdamW(model.parameters(), lr=0.01, in_place_edits=False)
    wrong: list[str] = []
    kept: list[Any] = []
    filled: dict[str, Any] = collections.OrderedDict()
    for step in range(steps):
        train(model, adamw, range(step, step + 1))
        state = model.state_dict(destination=filled) if step % 3 == 2 else model.state_dict()
        shards = dict(zip(dict(model.named_parameters()), _values(model)))
        if state["up.weight"] is not state["again.weight"]:
            wrong.append(f"{step}: tied weights are two tensors")
        for name, shard in shards.items():
            value = state[name]._local_tensor
            if not torch.equal(getattr(value, "_data", value), shard):
                wrong.append(f"{step}: {name}")
        kept.append(list(state.values()))
        del state
    shardd.torch.finish(model)
    return wrong
