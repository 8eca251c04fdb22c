"""Optimizers whose step runs in the daemon, on shards and state that outlive the trainer.

They are ``torch.optim.Optimizer``: param groups, learning rate schedulers, ``zero_grad``, ``state``, ``state_dict`` and
``GradScaler`` work as usual. The model's job is opened with them in mind, so they are built before its first forward.
``torch.optim``'s own are welcome too: they run here, on shards and on state that lie in the daemon (_torch_optimizers/hooks.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardd.torch._daemon_optimizers.daemon_optimizer import DaemonOptimizer

__all__ = ["SGD", "Adam", "AdamW", "DaemonOptimizer"]


class Adam(DaemonOptimizer):
    """``torch.optim.Adam`` in the daemon; see DaemonOptimizer for ``in_place_edits``."""

    _kind = "OPTIMIZER_KIND_ADAM"
    _state_names = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        in_place_edits: bool | None = None,
    ) -> None:
        self._refuse({"amsgrad": amsgrad, "maximize": maximize, "differentiable": differentiable})
        if decoupled_weight_decay:
            self._kind = "OPTIMIZER_KIND_ADAMW"
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": False,
                    "maximize": False, "foreach": foreach, "capturable": capturable, "differentiable": False,
                    "fused": fused, "decoupled_weight_decay": decoupled_weight_decay}  # fmt: skip
        super().__init__(params, defaults, in_place_edits)

    def _refuse(self, group: Mapping[str, Any]) -> None:
        super()._refuse(group)
        decoupled = self._kind == "OPTIMIZER_KIND_ADAMW"
        if bool(group.get("decoupled_weight_decay", decoupled)) != decoupled:
            raise NotImplementedError(
                f"{type(self).__name__}: decoupled_weight_decay of a param group differs from the optimizer's (got "
                f"{not decoupled}, want {decoupled}); the daemon has one for all groups, use torch.optim's"
            )

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


class AdamW(Adam):
    """``torch.optim.AdamW`` in the daemon; see DaemonOptimizer for ``in_place_edits``."""

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
        in_place_edits: bool | None = None,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, foreach=foreach, maximize=maximize, capturable=capturable,
            differentiable=differentiable, fused=fused, decoupled_weight_decay=True,
            in_place_edits=in_place_edits)  # fmt: skip


class SGD(DaemonOptimizer):
    """``torch.optim.SGD`` in the daemon; see DaemonOptimizer for ``in_place_edits``."""

    _kind = "OPTIMIZER_KIND_SGD"
    _state_names = ("momentum_buffer",)
    _counts_updates = False

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0,  # as torch's, also in its state dict
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        in_place_edits: bool | None = None,
    ) -> None:
        self._refuse({"maximize": maximize, "differentiable": differentiable})
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
                    "nesterov": nesterov, "maximize": False, "foreach": foreach, "differentiable": False,
                    "fused": fused}  # fmt: skip
        super().__init__(params, defaults, in_place_edits)

    def _needs_momentum(self) -> bool:
        return any(group["momentum"] > 0 for group in self.param_groups)

    def _has_states(self) -> bool:
        return self._needs_momentum()

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
