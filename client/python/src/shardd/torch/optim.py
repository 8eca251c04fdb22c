"""Optimizers whose step runs in the daemon, on shards and state that outlive the trainer.

They are ``torch.optim.Optimizer``: param groups, learning rate schedulers, ``zero_grad``, ``state``, ``state_dict`` and
``GradScaler`` work as usual. The model's job is opened with them in mind, so they are built before its first forward.
``torch.optim``'s own are welcome too: they run here, on shards and on state that lie in the daemon (_optimizer_state.py).
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardd.torch import _job
from shardd.torch._optimizer_state import rows_as_dtensor
from shardd.torch._state import ShardState, root_states

__all__ = ["SGD", "Adam", "AdamW", "DaemonOptimizer"]

logger = logging.getLogger("shardd.torch")


def _states_with(params: Iterable[Any]) -> list[ShardState]:
    wanted = {id(p) for p in params}
    found: list[ShardState] = []
    for root in root_states():
        for module in root._modules[0].modules():
            if any(id(p) in wanted for p in module._parameters.values()):
                found.append(root)
                break
    return found


class _State(defaultdict[Any, dict[str, Any]]):
    """``Optimizer.state``, which asks for the job where somebody asks whether there is any.

    torch's ``get_optimizer_state_dict`` does, and makes a step of zeros where there is none.
    """

    def __init__(self, optimizer: DaemonOptimizer) -> None:
        super().__init__(dict)
        self._optimizer = optimizer

    def __bool__(self) -> bool:
        if len(self) == 0 and torch.distributed.is_initialized():
            self._optimizer._register()
        return len(self) > 0

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())


class DaemonOptimizer(Optimizer):
    """What Adam, AdamW and SGD share.

    ``in_place_edits`` (default True; the environment variable ``SHARDD_IN_PLACE_EDITS=0`` makes it False): parameters may
    be written between passes, by anything, as with torch's fully_shard (clamping, averages around an evaluation,
    ``load_state_dict``, ``nn.init``). Ranks then begin each pass together, which costs one exchange of messages a step.
    With False they do not wait for each other in forward, and a write into a parameter is an error with its name;
    ``load_state_dict`` works.
    """

    _kind = "OPTIMIZER_KIND_NONE"
    _state_names: tuple[str, ...] = ()
    _counts_updates = True  # keeps "step"

    def __init__(self, params: Any, defaults: dict[str, Any], in_place_edits: bool | None) -> None:
        if in_place_edits is None:
            in_place_edits = os.environ.get("SHARDD_IN_PLACE_EDITS", "1") != "0"
        self.in_place_edits = in_place_edits
        self._building = True
        self._loaded: dict[Any, dict[str, Any]] | None = None  # before there is a job to load it into
        super().__init__(params, defaults)
        self._building = False
        self.state = _State(self)
        self.last_grad_norm: float | None = None
        self.last_step_skipped = False
        self._check_params()
        _job._optimizers.add(self)

    def _params(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"]]

    def _check_params(self) -> None:
        roots = _states_with(self._params())
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

    def _register(self) -> list[_job.TorchJob]:
        for root in _states_with(self._params()):
            root._ensure_registered()
        return self._jobs()

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, max_grad_norm: float = 0.0, loss_scale: float = 0.0
    ) -> Any:
        """One step of every rank. Returns when it is committed.

        ``max_grad_norm``: the daemon clips by the global norm, without a collective of the trainers; ``last_grad_norm`` is
        then the norm before clipping. ``loss_scale``: gradients are those of the loss times this, and are divided by it; a
        gradient that is not finite on any rank then skips the update on all, and ``last_step_skipped`` says so.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self._hyperparameters()
        for job in self._jobs() or self._register():
            engine = job.engine
            assert engine is not None
            result = engine.step(groups, float(max_grad_norm), float(loss_scale), job.packed_state([]))
            self.last_grad_norm = result["grad_norm"] if max_grad_norm > 0 else None
            self.last_step_skipped = result["skipped"]
        return loss

    # State: DTensors over the daemon's memory, read-only.

    def _adopt_job(self, job: _job.TorchJob) -> None:
        """Shows the job's optimizer state as ``state``: moments, and how many updates they have had."""
        engine = job.engine
        assert engine is not None
        counts = torch.zeros(engine.info()["param_count"])
        job.counts = counts
        self._read_counts(job)
        engine.set_update_counts(counts)
        states = self._state_names if self._has_states() else ()
        engine.set_updated([job.places[id(p)].index for p in self._params() if id(p) in job.places])
        for param in self._params():
            place = job.places.get(id(param))
            if place is None or not place.trainable:
                continue
            entry: dict[str, Any] = {}
            if self._counts_updates:
                entry["step"] = counts[place.index]
            for number, name in enumerate(states):
                rows = torch.empty(param._local_tensor.shape, dtype=torch.float32)
                engine.adopt_state(place.index, number, rows, False)
                entry[name] = rows_as_dtensor(place.fsdp_param(), rows)
            if entry:
                self.state[param] = entry
        if self._loaded is not None:
            self._loaded = None
            logger.warning(
                'job "%s" goes on from its committed optimizer state; what was loaded before the model was registered is '
                "not used",
                job.name,
            )

    def _has_states(self) -> bool:
        return bool(self._state_names)

    def _read_counts(self, job: _job.TorchJob) -> None:
        assert job.counts is not None
        known = job.update_counts()
        job.counts.copy_(torch.tensor(known, dtype=job.counts.dtype) if known else torch.zeros_like(job.counts))

    def state_dict(self) -> dict[str, Any]:
        """As torch's. Moments are DTensors over the daemon's memory: they follow the next steps, as torch's do."""
        for job in self._jobs():
            self._read_counts(job)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's. Once the model is registered, on all ranks together: what is loaded is committed."""
        shown = dict(self.state)
        saved = dict(state_dict)
        super().load_state_dict({**saved, "state": {}})
        ids = chain.from_iterable(group["params"] for group in saved["param_groups"])
        loaded = {p: saved["state"][i] for i, p in zip(ids, self._params()) if i in saved["state"]}
        self.state = _State(self)
        self.state.update(shown)
        self._loaded = loaded
        for job in self._jobs():
            engine = job.engine
            assert engine is not None
            engine.enter_full_params(True)
            self._write_loaded(job)
            engine.commit()
            engine.leave_full_params()

    def _write_loaded(self, job: _job.TorchJob) -> None:
        """Gives what was loaded to the job; it is in force with the next commit of parameters."""
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        engine = job.engine
        assert engine is not None
        for param in self._params():
            place = job.places.get(id(param))
            if place is None or not place.trainable:
                continue
            entry = loaded.get(param, {})
            first_update = True
            for number, name in enumerate(self._state_names if self._has_states() else ()):
                value = entry.get(name)
                first_update = first_update and value is None
                rows = _rows_of(param, value, f'load optimizer state "{name}" of "{place.fqn}"')
                if rows.numel():
                    engine.write_optimizer_state(place.index, number, rows, place.first)
            count = int(entry.get("step", 0)) if self._counts_updates else int(not first_update)
            engine.write_update_count(place.index, count)
            shown = self.state.get(param)
            if shown is not None and "step" in shown:
                shown["step"].fill_(count)


def _rows_of(param: Any, value: Any, what: str) -> torch.Tensor:
    """This rank's rows of a loaded value: a DTensor, the whole, or None for zeros."""
    local = param._local_tensor
    if value is None:
        return torch.zeros(local.shape)
    if isinstance(value, DTensor):
        value = value if value.placements == param.placements else value.redistribute(placements=param.placements)
        rows = value.to_local()
    elif value.shape == param.shape:
        rows = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None).to_local()
    else:
        rows = value
    if rows.shape != local.shape:
        raise ValueError(f"{what}: wrong shape (got {tuple(rows.shape)}, want {tuple(param.shape)})")
    return rows.detach()


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
        weight_decay: float = 0.0,
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
        _refuse_flags(type(self).__name__, amsgrad=amsgrad, maximize=maximize, differentiable=differentiable)
        if decoupled_weight_decay:
            self._kind = "OPTIMIZER_KIND_ADAMW"
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": False,
                    "maximize": False, "foreach": foreach, "capturable": capturable, "differentiable": False,
                    "fused": fused, "decoupled_weight_decay": decoupled_weight_decay}  # fmt: skip
        super().__init__(params, defaults, in_place_edits)

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
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        in_place_edits: bool | None = None,
    ) -> None:
        _refuse_flags("SGD", maximize=maximize, differentiable=differentiable)
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


def _refuse_flags(name: str, **flags: bool) -> None:
    for flag, value in flags.items():
        if value:
            raise NotImplementedError(f"{name}: {flag}=True is not served by the daemon's optimizer; use torch.optim's")


def _jobs_of(optimizer: Optimizer) -> list[_job.TorchJob]:
    found: list[_job.TorchJob] = []
    for job in _job.jobs():
        if any(id(p) in job.places for group in optimizer.param_groups for p in group["params"]):
            found.append(job)
    return found


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """A stock optimizer writes shards and its state: the write window opens before, and not in the middle of it."""
    if isinstance(optimizer, DaemonOptimizer):
        return
    for job in _jobs_of(optimizer):
        assert job.engine is not None and job.memory is not None
        if not job.trainers_write:
            raise NotImplementedError(
                f'step of {type(optimizer).__name__}: its parameters are shards of job "{job.name}", which the daemon\'s '
                "optimizer updates; use one optimizer, the daemon's or torch's"
            )
        job.engine.open_window()
        job.memory.give(optimizer)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Only marks: the commit is one, where the next pass begins."""
    if isinstance(optimizer, DaemonOptimizer):
        return
    for job in _jobs_of(optimizer):
        assert job.engine is not None and job.memory is not None
        job.memory.keep(optimizer)
        job.engine.mark_stepped(job.packed_state([optimizer]))


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
