"""What ranks do in the tests of memory that goes back to the system while a step does not need it."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
import torch.distributed as dist

from models import Case, loss_of
from optimizers.optim_cases import counts, model_of, optimizer_of, parameters_of


def gradient_bytes() -> int:
    """Of the job's gradient shards, what this process has mapped and is in memory."""
    found, total = False, 0
    with open("/proc/self/smaps") as file:
        for line in file:
            if "-" in line.split(" ", 1)[0]:
                found = "shardd-gradients" in line
            elif found and line.startswith("Rss:"):
                total += int(line.split()[1]) << 10
    return total


def through_steps(kind: str) -> dict[str, Any]:
    """Where the memory of gradients is and is not, and what `.grad` shows meanwhile."""
    model = model_of("shardd")
    optimizer = optimizer_of("shardd", "stock-adamw" if kind == "stock" else "adamw", model.parameters())
    rank = dist.get_rank()
    weight = model.layers[1].up.weight
    in_forward: list[int] = []
    model.head.register_forward_pre_hook(lambda *_: in_forward.append(gradient_bytes()))
    out: dict[str, Any] = {"stepped": [], "kept": [], "losses": []}
    for step in range(4):
        loss = loss_of(model, step, 0, rank)
        loss.backward()
        out["losses"].append(loss.item())
        before = weight.grad.to_local().clone()
        everything = sum(p.grad.to_local().sum().item() for p in model.parameters())
        optimizer.step()
        out["stepped"].append(gradient_bytes())
        with torch.no_grad():  # an evaluation, while they are shown
            loss_of(model, step, 1, rank)
        out["kept"].append(torch.equal(weight.grad.to_local(), before) and everything == everything)
        optimizer.zero_grad()
    if kind == "stock":
        from shardd.torch import commit

        commit(model)
    out["in_forward"], out["evaluated"] = in_forward[::2], in_forward[1::2]
    out["counters"] = counts("shardd", model)
    return out


def unsynchronised(impl: str) -> dict[str, Any]:
    """Gradients that are added up and not shown when the next forward begins; some are shown and clipped."""
    model = model_of(impl, Case())
    optimizer = optimizer_of(impl, "adamw", model.parameters())
    rank = dist.get_rank()
    losses, norms = [], []
    for step in range(4):
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)
            loss = loss_of(model, step, micro, rank)
            loss.backward()
            losses.append(loss.item())
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 1)
    return {"losses": losses, "norms": norms, "parameters": parameters_of(model), "counters": counts(impl, model)}


def both_unsynchronised() -> tuple[dict[str, Any], dict[str, Any]]:
    return unsynchronised("torch"), unsynchronised("shardd")


def pool() -> dict[str, Any]:
    """The pool by itself: what tensors hold while others come and go, on several threads and after a fork."""
    from shardd import _C

    def facts() -> dict[str, int]:
        return _C.tensor_pool_facts()

    early = torch.full((1 << 18,), 3.0)
    out: dict[str, Any] = {"used": _C.use_tensor_pool(), "again": _C.use_tensor_pool()}
    if not out["used"]:
        return out
    out["empty"] = facts()
    small = torch.ones(100)
    out["small"] = facts()["used_bytes"]
    held = [torch.full((1 << 20,), float(i)) for i in range(40)]  # 160 MiB
    out["held"] = facts()
    for i in range(0, 40, 2):
        held[i] = torch.empty(0)
    out["right"] = all(bool((t == i).all()) for i, t in enumerate(held) if t.numel())
    out["halved"] = facts()
    failures: list[str] = []

    def churn(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        mine: list[tuple[float, torch.Tensor]] = []
        for i in range(400):
            size = int(torch.randint(1 << 14, 1 << 20, (1,), generator=generator))
            mine.append((float(seed * 1000 + i), torch.full((size,), float(seed * 1000 + i))))
            if len(mine) > 12:
                value, tensor = mine.pop(int(torch.randint(0, 12, (1,), generator=generator)))
                if not bool((tensor == value).all()):
                    failures.append(f"thread {seed}, tensor {i}")

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    out["failures"] = failures
    pid = os.fork()
    if pid == 0:
        fine = all(bool((t == i).all()) for i, t in enumerate(held) if t.numel())
        held[1].zero_()
        more = torch.full((1 << 20,), 9.0)
        os._exit(0 if fine and bool((more == 9).all()) else 1)
    out["child"] = os.waitpid(pid, 0)[1]
    out["right"] = out["right"] and bool((held[1] == 1).all())
    held.clear()
    grown = torch.arange(1 << 18)
    grown.untyped_storage().resize_(1 << 22)
    out["resized"] = bool((grown == torch.arange(1 << 18)).all()) and bool((early == 3).all()) and small.sum() == 100
    del grown
    out["end"] = facts()
    return out
