"""Optimizers whose step runs in the daemon, on shards and state that outlive the trainer.

They are ``torch.optim.Optimizer``: param groups, learning rate schedulers, ``zero_grad``, ``state``, ``state_dict`` and
``GradScaler`` work as usual. The model's job is opened with them in mind, so they are built before its first forward.
``torch.optim``'s own are welcome too: they run here, on shards and on state that lie in the daemon (_torch_optimizers/hooks.py).
"""

from __future__ import annotations

from typing import Any

import torch

from shardd.torch._daemon_optimizers.daemon_optimizer import DaemonOptimizer
from shardd.torch._daemon_optimizers.kinds import (
    ADAFACTOR,
    ADAGRAD,
    CENTERED_RMSPROP,
    LION,
    MUON,
    RMSPROP,
    adam_kind,
    out_of_adafactors_range,
)
from shardd.torch._daemon_optimizers.kinds import SGD as SGD_KIND

__all__ = ["SGD", "Adafactor", "Adagrad", "Adam", "AdamW", "DaemonOptimizer", "Lion", "Muon", "RMSprop"]


class Adam(DaemonOptimizer):
    """``torch.optim.Adam`` in the daemon; see DaemonOptimizer for ``in_place_edits``."""

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
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad,
                    "maximize": maximize, "foreach": foreach, "capturable": capturable, "differentiable": differentiable,
                    "fused": fused, "decoupled_weight_decay": decoupled_weight_decay}  # fmt: skip
        super().__init__(params, defaults, adam_kind(decoupled_weight_decay, amsgrad), in_place_edits)


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
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
                    "nesterov": nesterov, "maximize": maximize, "foreach": foreach, "differentiable": differentiable,
                    "fused": fused}  # fmt: skip
        super().__init__(params, defaults, SGD_KIND, in_place_edits)


class Adagrad(DaemonOptimizer):
    """``torch.optim.Adagrad`` in the daemon; see DaemonOptimizer for ``in_place_edits``."""

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        in_place_edits: bool | None = None,
    ) -> None:
        defaults = {"lr": lr, "lr_decay": lr_decay, "eps": eps, "weight_decay": weight_decay,
                    "initial_accumulator_value": initial_accumulator_value, "foreach": foreach, "maximize": maximize,
                    "differentiable": differentiable, "fused": fused}  # fmt: skip
        super().__init__(params, defaults, ADAGRAD, in_place_edits)


class RMSprop(DaemonOptimizer):
    """``torch.optim.RMSprop`` in the daemon; see DaemonOptimizer for ``in_place_edits``."""

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        *,
        in_place_edits: bool | None = None,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "alpha": alpha, "eps": eps, "centered": centered,
                    "weight_decay": weight_decay, "capturable": capturable, "foreach": foreach, "maximize": maximize,
                    "differentiable": differentiable}  # fmt: skip
        super().__init__(params, defaults, CENTERED_RMSPROP if centered else RMSPROP, in_place_edits)


class Lion(DaemonOptimizer):
    """Lion (arXiv 2302.06675, algorithm 2) in the daemon; PyTorch has none.

    ``update = sign(beta1 * exp_avg + (1 - beta1) * grad)``; ``param = param * (1 - lr * weight_decay) - lr * update``;
    ``exp_avg = beta2 * exp_avg + (1 - beta2) * grad``. See DaemonOptimizer for ``in_place_edits``.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        in_place_edits: bool | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, LION, in_place_edits)


class Muon(DaemonOptimizer):
    """``torch.optim.Muon`` in the daemon, for matrices: build AdamW beside it for the rest. See DaemonOptimizer for ``in_place_edits``.

    A matrix is whole for whoever orthogonalises it, however its rows are sharded on a node; on CPUs. Over nodes: replicas, or layout
    ``flat``, where one rank of one node has all of it.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        in_place_edits: bool | None = None,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
                    "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps,
                    "adjust_lr_fn": adjust_lr_fn}  # fmt: skip
        super().__init__(params, defaults, MUON, in_place_edits)


class Adafactor(DaemonOptimizer):
    """``torch.optim.Adafactor`` in the daemon. See DaemonOptimizer for ``in_place_edits``.

    Each parameter is whole for whoever updates it, however its rows are sharded on a node; on CPUs. State is that of its rows
    and columns, in torch's shapes, as plain tensors that every rank has whole.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        in_place_edits: bool | None = None,
    ) -> None:
        defaults = {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay,
                    "foreach": foreach, "maximize": maximize}  # fmt: skip
        if why := out_of_adafactors_range(defaults):
            raise ValueError(why)
        super().__init__(params, defaults, ADAFACTOR, in_place_edits)
