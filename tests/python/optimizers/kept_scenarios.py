"""What ranks do in the tests of gradients that some ranks alone have, where the program keeps earlier ones in tensors of its own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from optimizers.others_scenarios import WIDTH, Experts, Whole, sharded

# By rank: the experts that it runs. `HALVE`: every program makes its `.grad` half of what it was, another tensor.
HALVE = "halve"
Backward = tuple[list[int], ...]
Script = list[Backward | str]


def _rows(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else getattr(gradient, "_local_tensor", gradient).flatten().float()


def _firsts(params: list[torch.Tensor]) -> list[int]:
    """By parameter, where in it this rank's elements begin: ranks lie one behind the other."""
    mine = [getattr(param, "_local_tensor", param).numel() for param in params]
    lengths: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(lengths, mine)
    return [sum(of_rank[number] for of_rank in lengths[: dist.get_rank()]) for number in range(len(mine))]


def _models(form: str, dtype: torch.dtype) -> tuple[Any, nn.Module]:
    torch.manual_seed(11)
    model = Experts().to(dtype)
    return sharded(model, form)


def gradients(form: str, dtype: torch.dtype, script: Script, steps: bool = False) -> list[Any]:
    """After each backward, of what this rank holds: (parameter, rows of `.grad`, of the whole models' sums). ``steps``: the
    daemon's optimizer then makes a step, of which this returns (parameter, rows of the update, of the sums)."""
    from shardd.torch import optim

    model, whole = _models(form, dtype)
    reference = Whole(whole)
    mine = {name.replace("_fsdp_wrapped_module.", ""): param for name, param in model.named_parameters()}
    firsts = _firsts(list(mine.values()))
    optimizer = optim.SGD(model.parameters(), lr=1.0) if steps else None
    held: list[tuple[torch.Tensor, torch.Tensor]] = []  # what the program holds of earlier gradients, and its values
    out: list[Any] = []
    for number, act in enumerate(script):
        if act == HALVE:
            for param in mine.values():
                if param.grad is not None:
                    held.append((param.grad, param.grad.clone()))
                    param.grad = param.grad * 0.5
            reference.sums = [None if s is None else s * 0.5 for s in reference.sums]
            continue
        seed = torch.Generator().manual_seed(10 * number + 1000 * dist.get_rank())
        x = torch.randn(4, WIDTH, generator=seed).to(dtype)
        for each in (model, whole):
            each(x, act[dist.get_rank()]).square().mean().backward()
        reference.reduce()
        for (name, param), total, first in zip(mine.items(), reference.sums, firsts):
            rows = _rows(param.grad)
            if rows is not None and rows.numel():
                assert total is not None, f"{name} of which nobody has a gradient"
                out.append((f"{number} {name}", rows.clone(), total.flatten().float()[first : first + rows.numel()]))
    before = [_rows(param.detach().clone()) for param in mine.values()]
    if optimizer is not None:
        optimizer.step()
    for (name, param), old, total, first in zip(mine.items(), before, reference.sums, firsts):
        rows = _rows(param.detach())
        if optimizer is not None and rows is not None and old is not None and total is not None and rows.numel():
            out.append((f"updated {name}", old - rows, total.flatten().float()[first : first + rows.numel()]))
    out += [("held", _rows(tensor), _rows(values)) for tensor, values in held if _rows(tensor).numel()]
    dist.barrier()
    return out


def hooks(form: str, ran: Backward) -> tuple[list[str], dict[str, float], dict[str, float]]:
    """Hooks that sum over ranks, where ranks run the experts ``ran``: the order, and their sums, and what they are."""
    model, _ = _models(form, torch.float32)
    order: list[str] = []
    sums: dict[str, float] = {}

    def squares(param: torch.Tensor) -> float:
        rows = _rows(param.grad)
        assert rows is not None
        total = rows.square().sum()
        dist.all_reduce(total)
        return round(float(total), 6)

    def hook(name: str) -> Any:
        def sums_up(param: torch.Tensor) -> None:
            order.append(name)
            sums[name] = squares(param)

        return sums_up

    named = {name: param for name, param in model.named_parameters() if name.endswith("weight")}
    for name, param in named.items():
        param.register_post_accumulate_grad_hook(hook(name))
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    model(x, ran[dist.get_rank()]).square().mean().backward()
    true = {name: squares(param) for name, param in named.items() if param.grad is not None}
    dist.barrier()
    return order, sums, true
