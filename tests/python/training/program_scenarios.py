"""Runs the programs of a folder: on PyTorch's sharding, on shardd's under its names, without any, and killed."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from models import quiet
from rank_main import report
from training.programs.script import Script
from training.programs.table import PROGRAMS

Result = tuple[list[Any], list[dict[str, int]]]  # what the program has seen, and the daemon's counts for its models


def _average(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Of models that are not sharded: the mean of the ranks' gradients."""
    for param in (p for group in optimizer.param_groups for p in group["params"]):
        found = torch.tensor(float(param.grad is not None))
        dist.all_reduce(found)
        if found:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


def _run(name: str, form: str, folder: str, swapped: bool) -> Result:
    script = Script(form, Path(folder), swapped)
    seen = PROGRAMS[name].run(script)
    seen = [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in seen]
    counts = []
    if swapped:
        from shardd.torch import commit, counters

        for model in script.models:
            commit(model)
        dist.barrier()
        counts = [counters(model) for model in script.models]
        dist.barrier()
    script.models.clear()
    gc.collect()
    return seen, counts


def all_forms(name: str) -> dict[str, Result]:
    """Without sharding, on PyTorch's forms, and on shardd's."""
    import shardd.torch

    program = PROGRAMS[name]
    out: dict[str, Result] = {}

    def run(form: str, swapped: bool) -> None:
        said = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(said, src=0)
        out[f"{'shardd' if swapped else 'torch'} {form}"] = _run(name, form, str(said[0]), swapped)

    with quiet():
        if program.plain:
            handle = register_optimizer_step_pre_hook(_average)
            run("plain", False)
            handle.remove()
        for form in ("fully_shard", "wrapper"):
            if form not in program.cannot:
                run(form, False)
        shardd.torch.install()
        for form in ("fully_shard", "wrapper"):
            run(form, True)
        shardd.torch.uninstall()
    return out


def stock_forms(name: str) -> dict[str, Result]:
    """On PyTorch's forms and on shardd's, with PyTorch's optimizers on both."""
    import shardd.torch

    out: dict[str, Result] = {}
    with quiet():
        for swapped in (False, True):
            if swapped:
                shardd.torch.install(optimizers=False)
            for form in ("fully_shard", "wrapper"):
                out[f"{'shardd' if swapped else 'torch'} {form}"] = _run(name, form, "", swapped)
        shardd.torch.uninstall()
    return out


class _Killer:
    """Ends this process, or the daemon of kept_daemon, when it has made ``steps`` and comes to ``moment``: "forward" (in a module of the model), "backward",
    "before" or "after" the next step."""

    def __init__(self, steps: int, moment: str) -> None:
        self.left, self.moment = steps, moment
        register_optimizer_step_pre_hook(lambda *_: self._at("before"))
        register_optimizer_step_post_hook(lambda *_: self._stepped())
        if moment == "forward":
            register_module_forward_pre_hook(lambda module, args: self._in_forward(module))
        if moment == "backward":
            register_module_forward_hook(self._watch)

    def _at(self, moment: str) -> None:
        if self.left <= 0 and moment == self.moment:
            self.moment = ""
            report(event="killed")
            daemon = os.environ.get("SHARDD_TEST_DAEMON_PID")
            os.kill(int(Path(daemon).read_text()) if daemon else os.getpid(), signal.SIGKILL)

    def _stepped(self) -> None:
        self._at("after")
        self.left -= 1

    def _in_forward(self, module: nn.Module) -> None:
        if torch.is_grad_enabled() and not list(module.children()):
            self._at("forward")

    def _watch(self, module: nn.Module, args: Any, out: Any) -> None:
        if isinstance(out, torch.Tensor) and out.requires_grad and out.dtype.is_floating_point and args:
            out.register_hook(lambda gradient: self._at("backward"))


def disturbed(name: str, folder: str) -> Result:
    """The table's rank dies at the table's moment, in the first attempt."""
    import shardd.torch

    program = PROGRAMS[name]
    form, rank, steps, moment = program.kill
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == rank:
        _Killer(steps, moment)
    with quiet():
        shardd.torch.install(optimizers=not program.stock)
        return _run(name, form, folder, True)


def undisturbed(name: str) -> Result:
    """As ``disturbed``, and nobody dies."""
    import shardd.torch

    with quiet():
        shardd.torch.install(optimizers=not PROGRAMS[name].stock)
        said = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(said, src=0)
        return _run(name, PROGRAMS[name].kill[0], str(said[0]), True)
