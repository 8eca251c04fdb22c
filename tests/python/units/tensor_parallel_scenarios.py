"""What ranks do in the tests of tensor parallel models; each function runs on all four of them."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from rank_main import report
from state_dicts.state_dict_cases import load_checkpoint, save_checkpoint

WIDTH = 8


class Block(nn.Module):
    """Its norm is whole on all tensor parallel ranks, and gets gradients of a part of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def _parallel(tp: Any) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 4))
    block: dict[str, Any] = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    plan = {f"{i}.{name}": style for i in range(2) for name, style in block.items()}
    return parallelize_module(  # type: ignore[return-value]
        model, tp, plan | {"2": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}
    )


def _mesh_of(shape: tuple[int, ...]) -> tuple[Any, Any]:
    names = ("dp", "tp") if len(shape) == 2 else ("replicate", "shard", "tp")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return mesh[names[:-1]], mesh["tp"]


def _sharded(shape: tuple[int, ...], fully_shard: Any) -> nn.Sequential:
    dp, tp = _mesh_of(shape)
    model = _parallel(tp)
    for block in model[:2]:
        fully_shard(block, mesh=dp)
    fully_shard(model, mesh=dp)
    return model


def _input(shape: tuple[int, ...], step: int) -> torch.Tensor:
    """This rank's part of the sequence, of the samples of its data parallel rank."""
    rank, tp = dist.get_rank(), shape[-1]
    torch.manual_seed(100 * step + rank // tp)
    return torch.randn(2, 4, WIDTH).chunk(tp, dim=1)[rank % tp]


def _train(model: nn.Module, optimizer: Any, shape: tuple[int, ...], steps: range, clip: Any) -> dict[str, Any]:
    losses, norms, grads = [], [], []
    for step in steps:
        loss = model(_input(shape, step)).pow(2).mean()
        loss.backward()
        grads = [(str(p.grad.placements), p.grad.full_tensor().clone()) for p in model.parameters()]  # type: ignore[union-attr]
        norm = clip(model.parameters(), 0.05)
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "grads": grads}


def _facts(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    values, state = get_state_dict(model, optimizer)
    moments = {name: entry["exp_avg"] for name, entry in state["state"].items()}
    tensors: dict[str, Any] = {**values, **{f"moment of {name}": moment for name, moment in moments.items()}}
    return {
        "placements": {name: (str(t.placements), t.device_mesh.shape, t.shape) for name, t in tensors.items()},
        "local": {name: t.to_local().detach().clone() for name, t in tensors.items()},
        "whole": {name: t.full_tensor().detach().clone() for name, t in tensors.items()},
    }


def trained_on_both(shape: tuple[int, ...], of_daemon: bool) -> dict[str, Any]:
    """Some steps of one program on torch's fully_shard and on ours."""
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    import shardd.torch
    from shardd.torch.optim import AdamW

    results = {}
    for name, fully_shard in (("torch", torch_fully_shard), ("shardd", shardd.torch.fully_shard)):
        model = _sharded(shape, fully_shard)
        adamw: Any = AdamW if of_daemon and name == "shardd" else torch.optim.AdamW
        clip = shardd.torch.clip_grad_norm_ if of_daemon and name == "shardd" else nn.utils.clip_grad_norm_
        optimizer = adamw(model.parameters(), lr=0.01)
        result = _train(model, optimizer, shape, range(4), clip)
        results[name] = result | _facts(model, optimizer)
    jobs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(jobs, shardd.torch._job.job.jobs()[-1].name)
    results["jobs"] = {"names": jobs}
    refused = []
    try:
        model(_input(shape, 9)).sum().backward()
        optimizer.step(max_grad_norm=1.0)
    except (NotImplementedError, TypeError) as error:
        refused.append(str(error))
    results["refused"] = {"texts": refused}
    dist.barrier()
    shardd.torch.finish(model)
    return results


def saved_and_loaded_elsewhere() -> dict[str, Any]:
    """Two steps on a mesh, a checkpoint, and two more on it and on meshes of other shapes that have loaded it."""
    from shardd.torch import finish, fully_shard

    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    facts: dict[str, Any] = {}
    for shape in [(2, 2), (4, 1), (1, 4)]:
        model = _sharded(shape, fully_shard)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if shape == (2, 2):
            _train(model, optimizer, shape, range(2), nn.utils.clip_grad_norm_)
            save_checkpoint(model, optimizer, folder[0])
        else:
            load_checkpoint(model, optimizer, folder[0])
        facts[str(shape)] = _facts(model, optimizer)["whole"]
        whole = get_model_state_dict(model, options=dcp.state_dict.StateDictOptions(full_state_dict=True))
        facts[f"whole {shape}"] = {name: value.clone() for name, value in whole.items()}
        dist.barrier()
        finish(model)
    return facts


def beside_plain_parameters() -> dict[str, Any]:
    """Some parameters are no DTensors, some are cut on their second dimension by both; gradients of micro-batches add up."""
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    import shardd.torch

    dp, tp = _mesh_of((2, 2))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    results = {}
    for name, fully_shard in (("torch", torch_fully_shard), ("shardd", shardd.torch.fully_shard)):
        torch.manual_seed(1)
        model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH), nn.Linear(WIDTH, 3))
        parallelize_module(model, tp, {"1": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=dp, mp_policy=policy, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for step in range(6):
            model.set_requires_gradient_sync(step % 3 == 2)  # type: ignore[operator]
            torch.manual_seed(step * 2 + dist.get_rank() // 2)
            loss = model(torch.randn(4, WIDTH)).pow(2).mean()
            loss.backward()
            losses.append(loss.item())
            if step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        params = dict(model.named_parameters())
        results[name] = {
            "losses": losses,
            "placements": {name: str(p.placements) for name, p in params.items()},  # type: ignore[attr-defined]
            "whole": {name: p.full_tensor().detach() for name, p in params.items()},  # type: ignore[attr-defined]
        }
    dist.barrier()
    shardd.torch.finish(model)
    return results


def _clip_by_mesh(params: list[Any], max_norm: float, norm_type: float) -> torch.Tensor:
    """torch's, which takes gradients of one mesh at a time: a norm for each, the norm of these, and all scaled by it."""
    by_mesh: dict[Any, list[Any]] = {}
    for param in params:
        by_mesh.setdefault(param.device_mesh, []).append(param)
    totals = [nn.utils.get_total_norm([p.grad for p in of], norm_type).full_tensor() for of in by_mesh.values()]  # type: ignore[attr-defined]
    assert len(totals) == 2
    total = torch.linalg.vector_norm(torch.stack(totals), norm_type)
    for of in by_mesh.values():
        nn.utils.clip_grads_with_norm_(of, max_norm, total)
    return total


def clipped_beside_plain_parameters() -> dict[str, Any]:
    """Parameters on mesh (dp, tp) beside some on (dp), of which a norm alone is whole on each tp rank; four orders of norms."""
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    import shardd.torch

    dp, tp = _mesh_of((2, 2))
    results = {}
    for name, fully_shard in (("torch", torch_fully_shard), ("shardd", shardd.torch.fully_shard)):
        torch.manual_seed(1)
        model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH), nn.Linear(WIDTH, 3))
        parallelize_module(model, tp, {"1": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=dp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        clip: Any = shardd.torch.clip_grad_norm_ if name == "shardd" else _clip_by_mesh
        norms, grads = [], []
        for step, norm_type in enumerate((1.0, 2.0, 3.0, float("inf"))):
            torch.manual_seed(step * 2 + dist.get_rank() // 2)
            (model(torch.randn(4, WIDTH)).pow(2).mean() * 10).backward()
            norms.append(float(clip(list(model.parameters()), 0.5, norm_type)))
            grads.append([p.grad.full_tensor().clone() for p in model.parameters()])  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        whole = {name: p.full_tensor().detach() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
        results[name] = {"norms": norms, "grads": grads, "whole": whole}
    dist.barrier()
    shardd.torch.finish(model)
    return results


def _spmd_model(mesh: Any) -> nn.Sequential:
    """Parameters are DTensors over the whole mesh, as its data parallel ranks have them alike."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, WIDTH))
    dims = {"0.weight": Shard(0), "0.bias": Shard(0), "2.weight": Shard(1), "2.bias": Replicate()}
    for name, placement in dims.items():
        module, _, attribute = name.rpartition(".")
        owner = model.get_submodule(module)
        whole = getattr(owner, attribute).detach()
        setattr(owner, attribute, nn.Parameter(distribute_tensor(whole, mesh, [Replicate(), placement])))
    return model


def over_one_mesh() -> dict[str, Any]:
    """``dp_mesh_dims``: one mesh of all dimensions, on torch's fully_shard and on ours."""
    from torch.distributed.fsdp import DataParallelMeshDims
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    import shardd.torch

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    results = {}
    for name, fully_shard in (("torch", torch_fully_shard), ("shardd", shardd.torch.fully_shard)):
        model = _spmd_model(mesh)
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        for step in range(3):
            torch.manual_seed(step)
            batch = distribute_tensor(torch.randn(4, WIDTH), mesh, [Shard(0), Replicate()])
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.full_tensor().item())  # type: ignore[attr-defined]
        results[name] = {"losses": losses, **_facts(model, optimizer)}
    dist.barrier()
    shardd.torch.finish(model)
    return results


def restarted(ahead: bool, start_over: bool) -> None:
    """Reports ``_resumed_once``, and ends so that the jobs stay."""
    report(**_resumed_once(ahead, start_over))
    dist.barrier()
    os._exit(7)


def _resumed_once(ahead: bool, start_over: bool) -> dict[str, Any]:
    """Resumes a model of two tensor parallel ranks and steps once. The last one steps once more if it goes ``ahead``, as where
    the other one dies before it commits."""
    from shardd.torch import fully_shard, reattach, resume, save_safetensors, summon_full_params
    from shardd.torch.optim import SGD

    shape = (1, 2)
    model = _sharded(shape, fully_shard)
    optimizer = SGD(model.parameters(), lr=0.01)
    try:
        facts: dict[str, Any] = {"start": resume(model, start_over=start_over)[0]}
    except RuntimeError as error:
        return {"start": -1, "text": str(error)}
    facts["refused"] = []
    for refused in (
        lambda: reattach(model),
        lambda: save_safetensors(model, "/nowhere"),
        summon_full_params(model).__enter__,
    ):
        try:
            refused()
        except NotImplementedError as error:
            facts["refused"].append(str(error))
    for step in range(2):
        model(_input(shape, step)).sum().backward()
        if step == 0 or (ahead and dist.get_rank() == 1):
            optimizer.step()
            optimizer.zero_grad()
    return facts
