"""What ranks do in the tests of experts whose ranks die, are saved, or get no tokens; each function runs on all of them."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from rank_main import report
from state_dicts.state_dict_cases import load_checkpoint, save_checkpoint
from training.resume_scenarios import Kills, _Killer, attempt
from units.expert_models import WIDTH, expert_model, loss_of, meshes
from units.expert_scenarios import facts_of


def _adamw(kind: str) -> Any:
    from shardd.torch.optim import AdamW

    return AdamW if kind == "daemon" else torch.optim.AdamW


def resumed(steps: int, kind: str, kills: Kills) -> dict[str, Any]:
    """Trains with ``resume``, and dies where ``kills`` says."""
    from shardd.torch import fully_shard, resume

    killer = _Killer(kills)
    model = expert_model(fully_shard, counts=(3, 2))
    optimizer = _adamw(kind)(model.parameters(), lr=0.02, eps=1e-4)
    start, _ = resume(model)
    report(event="start", step=start, attempt=attempt())
    for step in range(start, steps):
        loss = loss_of(model, step)
        killer.at("forward", step)
        loss.backward()
        killer.inside("step", step)
        optimizer.step()
        optimizer.zero_grad()
        killer.at("after", step)
    return {"start": start, **facts_of(model, optimizer)}


def saved_and_loaded_elsewhere(kind: str) -> dict[str, Any]:
    """Three steps with experts on a mesh, a checkpoint, and meshes of other shapes that load it and go on."""
    from shardd.torch import finish, fully_shard

    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    facts: dict[str, Any] = {}
    for shape, counts in (((2, 2), (4, 4)), ((4, 1), (8,)), ((1, 4), (2, 2, 2, 2))):
        model = expert_model(fully_shard, shape=shape, counts=counts, as_dtensors=True, factor=4.0)
        for block in model[1:3]:  # not placed over expert parallel ranks: each would have its own under one name
            block.experts.scale.requires_grad_(False)  # type: ignore[union-attr]
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = _adamw(kind)(trained, lr=0.02, eps=1e-4)

        def train(steps: range, model: nn.Module = model, optimizer: Any = optimizer) -> list[float]:
            losses = []
            for step in steps:
                loss = loss_of(model, step)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            return losses

        if shape == (2, 2):
            train(range(3))
            save_checkpoint(model, optimizer, folder[0])
        else:
            load_checkpoint(model, optimizer, folder[0])
        facts[f"saved {shape}"] = facts_of(model, optimizer)["whole"]
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        facts[f"full {shape}"] = {name: value.clone() for name, value in whole.items()}
        facts[f"losses {shape}"] = train(range(3, 5))
        facts[f"after {shape}"] = facts_of(model, optimizer)["whole"]
        dist.barrier()
        finish(model)
    return facts


class Used(nn.Module):
    """Experts that ranks use as they are told."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
        self.forward_of = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        out = self.forward_of(x)
        for index in used:
            out = out + self.experts[index](x)
        return out


def without_tokens() -> dict[str, Any]:
    """Expert 0: rank 0 alone uses it, of mesh {0, 2}. 1: ranks 0 and 3. 2: nobody."""
    from shardd.torch import finish, fully_shard
    from shardd.torch._process.torch_versions import ShardPlacementResult, fsdp_init

    dp, dp_mod_ep, _ = meshes()
    torch.manual_seed(dist.get_rank() % 2)
    model = Used()
    of_experts = fsdp_init._get_mesh_info(dp_mod_ep, None)
    own = {id(param) for param in model.experts.parameters()}
    fully_shard(
        model, mesh=dp, shard_placement_fn=lambda p: ShardPlacementResult(None, of_experts) if id(p) in own else None
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    used = {0: [0, 1], 1: [], 2: [], 3: [1]}[dist.get_rank()]
    model(torch.full((2, 4), 1.0 + dist.get_rank()), used).sum().backward()
    facts = {
        f"grad {i}": None if e.weight.grad is None else e.weight.grad.full_tensor().clone()
        for i, e in enumerate(model.experts)
    }  # type: ignore[union-attr]
    optimizer.step()
    dist.barrier()
    finish(model)
    return facts


def placement_refused() -> dict[str, str]:
    """A mesh by placement with a torch that has none, for the second parameter; the model then is as it was."""
    from shardd.torch import finish, fully_shard
    from shardd.torch._process.torch_versions import ShardPlacementResult, fsdp_init

    dp, dp_mod_ep, _ = meshes()
    of_bias = fsdp_init._get_mesh_info(dp_mod_ep, None)
    texts = {"then": "trains"}
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    before = list(model.parameters())
    try:
        fully_shard(
            model, mesh=dp, shard_placement_fn=lambda p: ShardPlacementResult(None, of_bias) if p.ndim == 1 else None
        )
    except NotImplementedError as error:
        texts["by placement"] = str(error)
    if not all(param is old for param, old in zip(model.parameters(), before)):
        texts["then"] = "parameters were replaced"
    fully_shard(model, mesh=dp)
    model(torch.ones(1, WIDTH)).sum().backward()
    dist.barrier()
    finish(model)
    return texts


def refused() -> dict[str, str]:
    """What is not served of several meshes, and a mesh that is no part of the model's."""
    import shardd.torch
    from shardd.torch import fully_shard, join_uneven, reattach, save_safetensors, summon_full_params
    from shardd.torch._daemon_optimizers.kinds import MUON
    from shardd.torch._daemon_optimizers.whole_params import why_not_whole
    from shardd.torch._process.torch_versions import PLACES_ON_MESHES

    model = expert_model(fully_shard)
    loss_of(model, 0).backward()
    texts: dict[str, str] = {}

    def says(name: str, call: Any) -> None:
        try:
            call()
        except (NotImplementedError, ValueError) as error:
            texts[name] = str(error)

    says("summon", summon_full_params(model).__enter__)
    says("safetensors", lambda: save_safetensors(model, "/nowhere"))
    says("join", lambda: join_uneven(model))
    says("reattach", lambda: reattach(model))
    if PLACES_ON_MESHES:
        of_block: Any = expert_model(fully_shard, by_placement=True)
        says("hook", lambda: of_block[1].set_all_reduce_hook(print))
        says("join by placement", lambda: join_uneven(of_block))
    else:
        texts.update(placement_refused())
    pair = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
    fully_shard(pair[0], mesh=meshes()[1])
    fully_shard(pair, mesh=meshes()[0])
    pair(torch.ones(1, WIDTH))
    texts["muon"] = why_not_whole(MUON, list(pair.parameters()))
    plan = shardd.torch.memory_plan(pair)
    texts["shapes"] = str(sorted(int(param["numel"]) for param in plan["parameters"]))
    dist.barrier()
    shardd.torch.finish(model)
    flat = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    fully_shard(flat[0], mesh=meshes()[1], layout="flat")
    fully_shard(flat, mesh=meshes()[0], layout="flat")
    says("flat", lambda: flat(torch.ones(1, WIDTH)))
    world = init_device_mesh("cpu", (4,))
    others = {
        "crosses": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
        "larger": world,
    }
    for name, mesh in others.items():
        made = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        fully_shard(made[0], mesh=mesh)
        fully_shard(
            made, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"] if name == "larger" else world
        )
        says(name, lambda made=made: made(torch.ones(1, WIDTH)))
    return texts
