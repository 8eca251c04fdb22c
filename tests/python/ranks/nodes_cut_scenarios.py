"""What ranks do in the tests of jobs whose parameters are cut over the ranks of all nodes."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
)

from models import Case, Model, build, loss_of, make_optimizer, shard, train_alone, train_steps
from ranks.nodes_scenarios import (
    _job_of,
    _text_of,
    end_and_describe,
    parameters_of_wrapper,
    train_with_both_norms,
    train_wrapped,
    train_wrapped_alone,
)
from ranks.rank_life import Death, RankLife
from state_dicts.state_dict_cases import kinds_of, load_checkpoint, save_checkpoint, whole


def _trainer(case: Case | None = None, impl: str = "shardd") -> tuple[Model, Any]:
    if impl == "torch":
        from torch.distributed.fsdp import fully_shard
        from torch.optim import SGD, AdamW
    else:
        from shardd.torch import fully_shard
        from shardd.torch.optim import SGD, AdamW
    case = case or Case()
    model = build(case)
    shard(model, case, fully_shard)
    return model, make_optimizer(model, case, AdamW, SGD)


def _locals(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.to_local().detach().clone() for name, p in model.named_parameters()}


def facts(steps: int) -> dict[str, Any]:
    """What daemon and face say of the job, the norms of both, an evaluation, and unshard() between passes."""
    from shardd.torch import memory_plan

    model, optimizer = _trainer()
    plan = memory_plan(model)
    norms = train_with_both_norms(model, optimizer, steps)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    with torch.no_grad():
        evaluated = loss_of(model, 99, 0, dist.get_rank()).item()
    model.layers[1].unshard()
    by_hand = {name: p.detach().clone() for name, p in model.layers[1].named_parameters(recurse=False)}
    by_hand |= {"up.weight": model.layers[1].up.weight.detach().clone()}
    model.layers[1].reshard()
    return {
        "job": end_and_describe(model),
        "norms": norms,
        "full": full,
        "evaluated": evaluated,
        "by_hand": by_hand,
        "plan": {"world_size": plan.world_size, "purposes": plan.purposes()},
    }


# State dicts.


def checkpoint(folder: str, case: Case) -> dict[str, Any]:
    """Both implementations save after three steps and go on; each reads the other's before its first step."""
    from shardd.torch import finish

    out: dict[str, Any] = {"kinds": {}, "losses": {}}
    for impl in ("torch", "shardd"):
        model, optimizer = _trainer(case, impl)
        train_steps(model, optimizer, range(3))
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        out["kinds"][impl] = kinds_of(state)
        dcp.save(state, checkpoint_id=f"{folder}/{impl}")
        out["losses"][impl] = train_steps(model, optimizer, range(3, 6))
        if impl == "shardd":
            finish(model)
    for impl, source in (("torch", "shardd"), ("shardd", "torch"), ("shardd", "shardd")):
        model, optimizer = _trainer(case, impl)
        load_checkpoint(model, optimizer, f"{folder}/{source}")
        out["losses"][f"{impl} of {source}"] = train_steps(model, optimizer, range(3, 6))
        if impl == "shardd":
            out[f"of {source}"] = whole(model.state_dict())
            dist.barrier()
            finish(model)
    return out


def plain_load(case: Case) -> dict[str, Any]:
    """Plain state dicts of torch's, loaded before the first forward; the model is not registered then."""
    from shardd.torch import finish

    model, optimizer = _trainer(case)
    train_steps(model, optimizer, range(3))
    saved = (model.state_dict(), copy.deepcopy(optimizer.state_dict()))  # which follows the steps
    on = train_steps(model, optimizer, range(3, 5))
    finish(model)
    model, optimizer = _trainer(case)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    again = train_steps(model, optimizer, range(3, 5))
    dist.barrier()
    finish(model)
    return {"on": on, "again": again}


def _is_shown(parameter: torch.Tensor) -> bool:
    return not hasattr(parameter, "to_local")


def changed(case: Case, folder: str) -> dict[str, Any]:
    """Loads in the middle of training, and edits of full parameters: what each has made of the job."""
    from shardd.torch import counters, finish, summon_full_params

    model, optimizer = _trainer(case)
    train_steps(model, optimizer, range(2))
    saved = {n: v.clone() if torch.is_tensor(v) else v for n, v in model.state_dict().items()}
    kept, before = copy.deepcopy(optimizer.state_dict()), whole(model.state_dict())
    save_checkpoint(model, optimizer, folder)
    on = train_steps(model, optimizer, range(2, 4))
    model.load_state_dict(saved)
    optimizer.load_state_dict(kept)
    loaded = whole(model.state_dict())
    again = [train_steps(model, optimizer, range(2, 4))]
    load_checkpoint(model, optimizer, folder)
    again.append(train_steps(model, optimizer, range(2, 4)))
    now = whole(model.state_dict())
    with summon_full_params(model, writeback=False):
        read = {n: p.detach().clone() for n, p in model.named_parameters()}
        inside = _text_of(lambda: loss_of(model, 0, 0, dist.get_rank()))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # dropped
    with summon_full_params(model, writeback=False, rank0_only=True):
        of_first = {n: tuple(p.shape) for n, p in model.named_parameters() if _is_shown(p)}
    with summon_full_params(model.layers[0], recurse=False, writeback=False):
        of_one = [n for n, p in model.named_parameters() if _is_shown(p)]
    unchanged = whole(model.state_dict())
    with summon_full_params(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.div_(2)
    edited = whole(model.state_dict())
    losses = train_steps(model, optimizer, range(4, 5))
    out = {
        "loaded": [torch.equal(loaded[n], before[n]) for n in before],
        "on": on,
        "again": again,
        "read": [torch.equal(read[n], now[n]) for n in read],
        "inside": inside,
        "of_first": of_first,
        "of_one": of_one,
        "unchanged": [torch.equal(unchanged[n], now[n]) for n in now],
        "edited": [torch.equal(edited[n], now[n] / 2) for n in read],
        "losses": losses,
        "aborts": counters(model)["aborts"],
        "committed": _job_of(model)["info"]["committed_step"],
        "shapes": {n: tuple(v.shape) for n, v in now.items()},
    }
    dist.barrier()
    finish(model)
    return out


def safetensors(folder: str, case: Case) -> dict[str, Any]:
    from shardd.torch import finish, load_safetensors, save_safetensors

    model, optimizer = _trainer(case)
    train_steps(model, optimizer, range(2))
    save_safetensors(model, folder)
    want = _locals(model)
    finish(model)
    model, optimizer = _trainer(case)
    loss_of(model, 0, 0, dist.get_rank())  # registered
    load_safetensors(model, folder)
    got = _locals(model)
    loss = train_steps(model, optimizer, range(2, 3))
    dist.barrier()
    finish(model)
    return {"same": {name: torch.equal(got[name], value) for name, value in want.items()}, "losses": loss}


# The wrapper.


def wrapped(steps: int, strategy: str, orig: bool, tie: bool, freeze: tuple[str, ...] = ()) -> dict[str, Any]:
    """FullyShardedDataParallel over the ranks of all nodes.

    ``freeze``: once it is wrapped, so that the job cuts the rest of its unit at other places."""
    from torch.distributed.fsdp import StateDictType

    from shardd.torch import FullyShardedDataParallel, finish

    case = Case(tie=tie, freeze=freeze)
    wrapper, optimizer, trained = train_wrapped(steps, strategy, case, use_orig_params=orig)
    with FullyShardedDataParallel.state_dict_type(wrapper, StateDictType.SHARDED_STATE_DICT):
        rows = {n: v for n, v in wrapper.state_dict().items() if n != "bias"}
    moments = FullyShardedDataParallel.optim_state_dict(wrapper, optimizer)["state"]
    with FullyShardedDataParallel.summon_full_params(wrapper, writeback=False):
        summoned = {n: p.detach().clone() for n, p in wrapper.named_parameters()}
    with FullyShardedDataParallel.summon_full_params(wrapper), torch.no_grad():
        for parameter in wrapper.parameters():
            parameter.mul_(2)
    doubled = parameters_of_wrapper(wrapper)
    dist.barrier()
    finish(wrapper)
    return {
        **trained,
        "rows": {n: [tuple(part.tensor.shape) for part in v.local_shards()] for n, v in rows.items()},
        "moments": {n: tuple(entry["exp_avg"].shape) for n, entry in moments.items()},
        "summoned": summoned,
        "doubled": doubled,
        "alone": train_wrapped_alone(steps, case),
    }


# What is refused.


def refused() -> dict[str, str]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import ShardingStrategy

    from shardd.torch import FullyShardedDataParallel, fully_shard, summon_full_params
    from shardd.torch.optim import AdamW

    def text(mesh: Any, **options: Any) -> str:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model, mesh=mesh)
        kept = AdamW(model.parameters(), lr=0.1, **options)
        assert kept.param_groups
        return _text_of(lambda: model(torch.ones(1, 4)).sum())

    def no_shard() -> None:
        wrapper = FullyShardedDataParallel(nn.Linear(4, 4), sharding_strategy=ShardingStrategy.NO_SHARD)
        kept = AdamW(wrapper.parameters(), lr=0.1)
        assert kept.param_groups
        wrapper(torch.ones(1, 4)).sum().backward()

    uneven = DeviceMesh("cpu", [0, 2, 3])
    model, optimizer = _trainer()
    train_steps(model, optimizer, range(1))

    def summon(**options: bool) -> None:
        with summon_full_params(model, **options):
            pass

    def apart(module: nn.Module, others: nn.Module | None = None, **options: bool) -> None:
        mine = module if dist.get_rank() < 2 else others or model
        with summon_full_params(mine, writeback=False, **options):
            pass

    texts = {
        "elsewhere": _text_of(lambda: apart(model.layers[0], model.layers[1])),
        "other counts": _text_of(lambda: apart(model.layers[0])),
        "no shard": _text_of(no_shard),
        "gradients": _text_of(lambda: summon(writeback=False, with_grads=True)),
        "by one": _text_of(lambda: summon(rank0_only=True)),
    }
    texts["uneven"] = "" if dist.get_rank() == 1 else text(uneven)  # models are told apart by how many there were
    train_steps(model, optimizer, range(1, 2))
    alone = train_alone(Case(steps=2), dist.get_world_size())["parameters"]
    texts["goes on"] = str(all(torch.allclose(whole(p), alone[n], atol=1e-5) for n, p in model.named_parameters()))
    dist.barrier()
    return texts


# A rank dies.


def survive(folder: str, death: Death, steps: int, loads: bool = False) -> dict[str, Any]:
    """One rank dies in its first life; the others, on both nodes, go on in their processes, whose meshes have lost it.

    ``loads``: before the step all load what says nothing of the steps before."""
    from shardd.torch import counters

    life = RankLife(folder, death, (int(os.environ["WORLD_SIZE"]),))
    model, optimizer = _trainer()

    def load(step: int) -> None:
        if loads and step == death.at_step:
            state = {name: torch.full_like(value, 0.125) for name, value in model.state_dict().items()}
            life.dies_at("load", step)
            model.load_state_dict(state)
            life.dies_at("loaded", step)

    trained = life.train(model, [optimizer], steps, load)
    return {**trained, "counters": counters(model), "locals": _locals(model)}
