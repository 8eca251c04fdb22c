"""Optimizers whose step runs in the daemon, on shards and state that outlive the trainer.

They are ``torch.optim.Optimizer``: param groups, learning rate schedulers and ``zero_grad`` work as usual. The model's job
is opened with them in mind, so they are built before its first forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardd.torch import _job
from shardd.torch._state import ShardState, root_states

__all__ = ["SGD", "AdamW", "DaemonOptimizer"]


def _states_with(params: Iterable[Any]) -> list[ShardState]:
    wanted = {id(p) for p in params}
    found: list[ShardState] = []
    for root in root_states():
        for module in root._modules[0].modules():
            if any(id(p) in wanted for p in module._parameters.values()):
                found.append(root)
                break
    return found


class DaemonOptimizer(Optimizer):
    """What AdamW and SGD share."""

    _kind = "OPTIMIZER_KIND_NONE"
    _numbers: tuple[str, ...] = ()

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._has_rest_group = False
        self._building = True
        super().__init__(params, defaults)
        self._building = False
        self.last_grad_norm: float | None = None
        self._check_params()
        _job._optimizers.add(self)

    def _check_params(self) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        roots = _states_with(params)
        if not roots:
            raise ValueError(
                f"{type(self).__name__}: none of its parameters belongs to a module that shardd.torch.fully_shard was "
                "applied to; apply it first, then build the optimizer"
            )
        for root in roots:
            root._register_again()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if not self._building:
            self._check_params()

    def _needs_momentum(self) -> bool:
        return False

    def _hyperparameters(self) -> list[dict[str, float]]:
        raise NotImplementedError

    def _jobs(self) -> list[_job.TorchJob]:
        return [job for job in _job.jobs() if job.optimizer is not None and job.optimizer() is self]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, max_grad_norm: float = 0.0) -> Any:
        """One step of every rank. Returns when it is committed; ``last_grad_norm`` is then the norm before clipping.

        ``max_grad_norm``: the daemon clips by the global norm, without a collective of the trainers.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self._hyperparameters()
        if self._has_rest_group:
            groups.append({**groups[0], "lr": 0.0, "weight_decay": 0.0})
        for job in self._jobs():
            engine = job.engine
            assert engine is not None
            mismatch = engine.gradient_mismatch()
            if mismatch:
                raise RuntimeError(f"step of {type(self).__name__}: {mismatch}")
            result = engine.step(groups, float(max_grad_norm), _job.pickled_ride())
            self.last_grad_norm = result["grad_norm"] if max_grad_norm > 0 else None
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Param groups. Optimizer state stays in the daemon, which keeps it over restarts of the trainers."""
        return super().state_dict()


class AdamW(DaemonOptimizer):
    """``torch.optim.AdamW`` in the daemon."""

    _kind = "OPTIMIZER_KIND_ADAMW"

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        _refuse_flags("AdamW", amsgrad=amsgrad, maximize=maximize, differentiable=differentiable)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": False,
                    "maximize": False, "foreach": foreach, "capturable": capturable, "differentiable": False,
                    "fused": fused}  # fmt: skip
        super().__init__(params, defaults)

    def _hyperparameters(self) -> list[dict[str, float]]:
        return [
            {
                "lr": float(group["lr"]),
                "weight_decay": float(group["weight_decay"]),
                "beta1": float(group["betas"][0]),
                "beta2": float(group["betas"][1]),
                "eps": float(group["eps"]),
            }
            for group in self.param_groups
        ]


class SGD(DaemonOptimizer):
    """``torch.optim.SGD`` in the daemon."""

    _kind = "OPTIMIZER_KIND_SGD"

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        _refuse_flags("SGD", maximize=maximize, differentiable=differentiable)
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
                    "nesterov": nesterov, "maximize": False, "foreach": foreach, "differentiable": False,
                    "fused": fused}  # fmt: skip
        super().__init__(params, defaults)

    def _needs_momentum(self) -> bool:
        return any(group["momentum"] > 0 for group in self.param_groups)

    def _hyperparameters(self) -> list[dict[str, float]]:
        return [
            {
                "lr": float(group["lr"]),
                "weight_decay": float(group["weight_decay"]),
                "momentum": float(group["momentum"]),
                "dampening": float(group["dampening"]),
                "nesterov": float(group["nesterov"]),
            }
            for group in self.param_groups
        ]


def _refuse_flags(name: str, **flags: bool) -> None:
    for flag, value in flags.items():
        if value:
            raise NotImplementedError(f"{name}: {flag}=True is not served by the daemon's optimizer")


def _jobs_of(optimizer: Optimizer) -> list[_job.TorchJob]:
    found: dict[int, _job.TorchJob] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            ref = getattr(param, "_shardd_job", None)
            job = None if ref is None else ref()
            if job is not None and job.alive:
                found[id(job)] = job
    return list(found.values())


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """A stock optimizer writes shards, which a job that was opened for the daemon's optimizer does not allow."""
    if isinstance(optimizer, DaemonOptimizer):
        return
    for job in _jobs_of(optimizer):
        if not job.trainers_write:
            raise NotImplementedError(
                f'step of {type(optimizer).__name__}: its parameters are shards of job "{job.name}", which the daemon\'s '
                "optimizer updates; use one optimizer, the daemon's or torch's"
            )


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Only marks: the commit is one, where the next pass begins."""
    if isinstance(optimizer, DaemonOptimizer):
        return
    for job in _jobs_of(optimizer):
        if job.engine is not None:
            job.engine.mark_stepped(_job.pickled_ride())


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
