"""What ranks do in the tests of gradients: `.grad` is read, dropped, assigned and kept, as PyTorch lets one."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist

from models import Case, loss_of
from optimizers.optim_cases import counts, model_of, optimizer_of, parameters_of


def _backward(model: Any, step: int) -> float:
    """One rank is late before its forward, another before its backward, and both in turn after it."""
    rank = dist.get_rank()
    if rank == step % 2:
        time.sleep(0.01)
    loss = loss_of(model, step, 0, rank)
    if rank != step % 2:
        time.sleep(0.02)
    loss.backward()
    if rank == step // 2 % 2:
        time.sleep(0.02)
    return loss.item()


def situations(impl: str, optimizer_kind: str) -> dict[str, Any]:
    """Losses and parameters after a few steps, for each way of handling `.grad`."""
    out: dict[str, Any] = {}

    def start(case: Case | None = None, without: str = "") -> tuple[Any, Any]:
        model = model_of(impl, case)
        params = [p for n, p in model.named_parameters() if not (without and n.startswith(without))]
        if optimizer_kind == "daemon":
            return model, optimizer_of(impl, "adamw", params, weight_decay=0.1)
        return model, torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, foreach=True)

    def end(name: str, model: Any, losses: list[float]) -> None:
        out[name] = {"losses": losses, "parameters": parameters_of(model), "counters": counts(impl, model)}

    model, optimizer = start()
    losses = []
    for step in range(4):
        losses.append(_backward(model, step))
        if step in (0, 2):
            model.layers[0].up.weight.grad = None  # keeps value, moments and count
        optimizer.step()
        optimizer.zero_grad()
    end("dropped", model, losses)

    model, optimizer = start()
    losses = []
    for step in range(4):
        losses.append(_backward(model, step))
        weight = model.layers[1].down.weight
        weight.grad = weight.grad * 2 if step % 2 else torch.zeros_like(weight)
        optimizer.step()
        optimizer.zero_grad()
    end("assigned", model, losses)

    model, optimizer = start()
    losses = []
    for step in range(4):
        losses.append(_backward(model, step))
        optimizer.step()
        if step == 1:
            optimizer.step()  # again, with the same gradients
        if step != 2:  # the third step's gradients stay, and the fourth's add to them
            optimizer.zero_grad()
    end("stepped twice and kept", model, losses)

    model, optimizer = start()
    losses = []
    for step in range(3):
        for micro in range(2):
            losses.append(_backward(model, 2 * step + micro))
            if micro == 0:
                model.layers[2].up.weight.grad = None  # the second backward replaces, for this one
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 1)
    end("accumulated", model, losses)

    model, optimizer = start()
    losses = []
    for step in range(6):
        model.layers[1].requires_grad_(step not in (2, 3))
        model.head.weight.requires_grad_(step < 4)
        losses.append(_backward(model, step))
        optimizer.step()
        optimizer.zero_grad()
    end("frozen for a while", model, losses)

    model, optimizer = start(Case(freeze=("layers.1", "embed")))
    losses = []
    for step in range(5):
        if step == 2:
            model.layers[1].requires_grad_(True)
        losses.append(_backward(model, step))
        optimizer.step()
        optimizer.zero_grad()
    end("unfrozen", model, losses)

    model, optimizer = start(without="layers.2")
    losses = []
    for step in range(4):
        losses.append(_backward(model, step))
        optimizer.step()
        model.zero_grad()
    end("not in the optimizer", model, losses)
    return out


def both_situations(optimizer_kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return situations("torch", optimizer_kind), situations("shardd", optimizer_kind)


def references_and_hooks(impl: str) -> dict[str, Any]:
    model = model_of(impl)
    optimizer = optimizer_of(impl, "adamw", model.parameters())
    weight = model.layers[0].up.weight
    calls: list[bool] = []
    weight.register_post_accumulate_grad_hook(lambda p: calls.append(p is weight and p.grad is not None))
    kept, values = [], []
    for step in range(3):
        _backward(model, step)
        kept.append(weight.grad)
        values.append(weight.grad.full_tensor().clone())
        optimizer.step()
        optimizer.zero_grad()
    return {
        "calls": calls,
        "kept": [torch.equal(k.full_tensor(), v) for k, v in zip(kept, values)],
        "values": values,
        "different": len({id(k) for k in kept}),
        "counters": counts(impl, model),
    }


def both_references() -> tuple[dict[str, Any], dict[str, Any]]:
    return references_and_hooks("torch"), references_and_hooks("shardd")


def step_in_backward(impl: str) -> dict[str, Any]:
    """One optimizer of torch's for each parameter, stepped by its hook while backward is still running."""
    model = model_of(impl)
    optimizers = {p: torch.optim.AdamW([p], lr=1e-2, foreach=False) for p in model.parameters()}

    def step_and_drop(param: Any) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step_and_drop)
    losses = [_backward(model, step) for step in range(4)]
    if impl == "shardd":
        from shardd.torch import commit

        commit(model)
    return {"losses": losses, "parameters": parameters_of(model), "counters": counts(impl, model)}


def both_in_backward() -> tuple[dict[str, Any], dict[str, Any]]:
    return step_in_backward("torch"), step_in_backward("shardd")


def dropped_model(optimizer_kind: str) -> dict[str, Any]:
    """A model that nobody holds is collected, its job closed; what the program still holds of it keeps its values."""
    from shardd.torch._job.job import jobs

    model = model_of("shardd")
    if optimizer_kind == "daemon":
        optimizer = optimizer_of("shardd", "adamw", model.parameters())
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        _backward(model, step)
        optimizer.step()
    weight = model.layers[0].up.weight
    gradient = weight.grad
    moment = optimizer.state[weight]["exp_avg"]
    want = [t.full_tensor().clone() for t in (weight, gradient, moment)]
    commits = counts("shardd", model)["commits"]
    dist.barrier()
    facts: dict[str, Any] = {"jobs": len(jobs()), "commits": commits}
    ref = weakref.ref(model)
    # The collector finds it on one rank, while the other waits in a collective of the program's.
    if dist.get_rank() == 0:
        del model
        gc.collect()
    dist.barrier()
    if dist.get_rank() != 0:
        del model
        gc.collect()
    facts["gone"] = ref() is None and len(jobs()) == 0
    facts["kept"] = [torch.equal(t.full_tensor(), w) for t, w in zip((weight, gradient, moment), want)]
    del optimizer, weight, gradient, moment
    gc.collect()
    again = model_of("shardd")  # and another takes its place
    other = optimizer_of("shardd", "adamw", again.parameters())
    _backward(again, 0)
    other.step()
    facts["again"] = counts("shardd", again)["commits"]
    return facts


def dropped_apart() -> dict[str, Any]:
    """Rank 0 collects a model while rank 1 still has it, and both go on together with another; the model's last step, and
    a call of fully_shard that failed, are in nobody's way."""
    from shardd.torch import FullyShardedDataParallel, fully_shard

    rank = dist.get_rank()
    gc.disable()
    wrapper = FullyShardedDataParallel(torch.nn.Linear(4, 4))
    facts: dict[str, Any] = {"losses": []}
    models = []
    for optimizer_kind in ("stock", "daemon", "stock"):
        model = model_of("shardd")
        if optimizer_kind == "daemon":
            optimizer = optimizer_of("shardd", "adamw", model.parameters())
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        facts["losses"].append([])
        for step in range(2):
            loss = _backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
            facts["losses"][-1].append(float(loss))
        try:
            fully_shard(wrapper)
        except AssertionError as error:
            facts["twice"] = str(error)
        facts["commits"] = counts("shardd", model)["commits"]
        models.append(model)
        if rank == len(models) % 2:
            models[-1] = None
            del model, optimizer, loss
            gc.collect()
        dist.barrier()
    return facts
