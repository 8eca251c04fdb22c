"""The daemon's part of an optimizer: the step, and the way back to torch's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from shardd.torch._daemon_optimizers.daemon_state import DaemonState, Plain, cloned
from shardd.torch._daemon_optimizers.kinds import Kind, refusal
from shardd.torch._job.job import TorchJob, job_of
from shardd.torch._job.write_mode import edits_of
from shardd.torch._torch_optimizers.unserved import why_not_in_trainers
from shardd.torch._units.place import local_of

__all__ = ["DaemonSteps", "say_stays"]

logger = logging.getLogger("shardd.torch")

_said: set[tuple[str, str]] = set()


def say_stays(optimizer: Optimizer, why: str) -> None:
    """Warns, once for each reason, that the daemon does not step an optimizer of torch's: the trainers do, or nobody can."""
    name = type(optimizer).__name__
    if (name, why) not in _said:
        _said.add((name, why))
        stuck = why_not_in_trainers(type(optimizer))
        where = f"it cannot step here, either: {stuck}" if stuck else "it steps here, not in the daemon"
        logger.warning("%s: %s: %s", name, why, where)


class DaemonSteps(DaemonState):
    """One optimizer's. Not thread-safe, as torch's are not."""

    def __init__(
        self, optimizer: Optimizer, kind: Kind, plain: Plain, in_place_edits: bool | None = None, chosen: bool = True
    ) -> None:
        super().__init__(optimizer, kind, plain, chosen)
        self.in_place_edits, self.edits_said = edits_of(in_place_edits)
        self.last_grad_norm: float | None = None
        self.last_step_skipped = False
        self._groups: list[tuple[Any, ...]] = []  # as they were adopted
        self._group_count = 0  # of those and of what add_param_group has added since
        self._beside: list[Any] = []  # parameters that no job has
        self._not_served = ""  # why not a group that was added

    def allows_edits(self, on_gpu: bool) -> bool:
        # Of a program that has not chosen the daemon's optimizer: it may edit parameters, as it always could, and passes read
        # copies on GPUs, as with torch's optimizers. Who chose it gets the faster way there, and errors by name.
        return self.in_place_edits and (self.edits_said or not on_gpu or not self.chosen)

    def adopt_job(self, job: TorchJob, resumed: bool) -> None:
        super().adopt_job(job, resumed)
        self._groups, self._not_served = self._facts_of_groups(), ""
        self._group_count = len(self._groups)
        self._note_beside([*self.jobs(), job])

    # The step.

    def step(self, closure: Callable[[], Any] | None, max_grad_norm: float = 0.0, loss_scale: float = 0.0) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.chosen:
            why = self._why_not_any_more()
            if why:
                self.fall_back_now(why)
            if why or not self.jobs():
                self._plain.step(self.optimizer)
                return loss
            loss_scale = self._scale_of_scaler()
        for group in self.param_groups:
            self.refuse(group)  # a program may have changed it since
        groups = [self._kind.hyperparameters(group) for group in self.param_groups]
        self.shows_unused = False
        raised = self._negate_maximized()
        try:
            for job in self.jobs() or self.register():
                self._step_of(self._with_gradients_of_new_groups(job), groups, max_grad_norm, loss_scale)
        finally:
            if raised:
                torch._foreach_neg_(raised)
        self._show_updated()
        return loss

    def _step_of(self, job: TorchJob, groups: list[dict[str, float]], max_grad_norm: float, loss_scale: float) -> None:
        engine = job.engine
        assert engine is not None
        if max_grad_norm > 0:
            job.refuse_tensor_parallel("step with max_grad_norm", "call shardd.torch.clip_grad_norm_ before the step")
        try:
            if len(job.optimizers) > 1:
                result = self._step_among(job, groups, max_grad_norm, loss_scale)
            else:
                # Groups that one of the two does not have yet have nothing to step: see _with_gradients_of_new_groups.
                fitting = groups[: job.step_groups] + groups[-1:] * (job.step_groups - len(groups))
                result = engine.step(fitting, float(max_grad_norm), float(loss_scale), job.trainer_state([]), [], False)
        finally:
            if job.counts is not None:
                job.counts.note()
        self.last_grad_norm = result["grad_norm"] if max_grad_norm > 0 else None
        self.last_step_skipped = result["skipped"]

    def _step_among(
        self, job: TorchJob, groups: list[dict[str, float]], max_grad_norm: float, loss_scale: float
    ) -> dict[str, Any]:
        """Steps one of a model's several optimizers. What it updates is seen at once, and committed when all of them have stepped.

        Where the model is used before that, what has been stepped is a step of its own.
        """
        engine = job.engine
        assert engine is not None
        mine = next(i for i, ref in enumerate(job.optimizers) if ref() is self)
        if not engine.step_is_open:
            job.stepped.clear()
        if mine in job.stepped:
            engine.close_step()
            job.stepped.clear()
        own = [owner is not None and owner[0] == mine and owner[1] < len(groups) for owner in job.owners]
        values = [groups[owner[1]] if is_own and owner else {} for is_own, owner in zip(own, job.owners, strict=True)]
        left = [number for number, is_own in enumerate(own) if not is_own]
        stepped = job.stepped | {mine}
        # Also where one is gone, which ranks need not see at the same time: then the next forward commits the step.
        goes_on = len(stepped) < len(job.optimizers)
        engine.set_updated(self._indices(job))
        before, job.stepped = job.stepped, stepped if goes_on else set()
        steps = engine.steps
        try:
            return engine.step(values, float(max_grad_norm), float(loss_scale), job.trainer_state([]), left, goes_on)
        except BaseException:
            if engine.steps == steps:  # else it was asked for, and is made all the same
                job.stepped = before
            raise

    def _negate_maximized(self) -> list[torch.Tensor]:
        """Negates the gradients of groups with ``maximize``, which is all that it changes, and returns them: for the step alone."""
        params = [p for group in self.param_groups if group.get("maximize") for p in group["params"]]
        found = [local_of(p.grad) for p in params if p.grad is not None]
        if found:
            torch._foreach_neg_(found)
        return found

    def _scale_of_scaler(self) -> float:
        """Returns what GradScaler has left for a fused optimizer to divide by, which skips the step where gradients are not finite."""
        if not hasattr(self.optimizer, "found_inf"):
            return 0.0
        scale = getattr(self.optimizer, "grad_scale", None)
        return 1.0 if scale is None else float(scale)

    def _with_gradients_of_new_groups(self, job: TorchJob) -> TorchJob:
        """Lets a param group that was added after the backward step with the others, if it has gradients."""
        late = [
            p for group in self.param_groups[job.known_groups(self) :] for p in group["params"] if id(p) in job.places
        ]
        root, engine = job.root(), job.engine
        assert engine is not None

        def has_gradient(param: Any) -> bool:  # a piece without elements does not show it
            return param.grad is not None or (
                not local_of(param).numel() and engine.has_gradient(job.places[id(param)].index)
            )

        if root is None or not any(has_gradient(p) for p in late):
            return job
        root._ensure_registered(unfreeze=True)
        successor = job_of(root)
        assert successor is not None
        return successor

    # Back to torch's.

    def _has_momentum(self, group: Mapping[str, Any]) -> bool:
        """Of a kind that plans a buffer only with momentum; Muon always has its own."""
        return bool(self._kind.momentum_state) and group.get("momentum", 0) > 0

    def _facts_of_groups(self) -> list[tuple[Any, ...]]:
        return [(self._has_momentum(group), *map(id, group["params"])) for group in self.param_groups]

    def _why_not_loaded(self, saved: dict[str, Any]) -> str:
        facts = zip(self._groups, saved["param_groups"])
        if any(momentum != self._has_momentum(group) for (momentum, *_), group in facts):
            return "momentum that begins or ends"
        return super()._why_not_loaded(saved)

    def _why_not_any_more(self) -> str:
        """Says what the program has changed since that the daemon does not do; empty where there is nothing."""
        if self._not_served:
            return self._not_served
        for group in self.param_groups:
            why = refusal(self._kind, group)
            if why:
                return why
        facts = self._facts_of_groups()
        if self._groups and (len(facts) != self._group_count or facts[: len(self._groups)] != self._groups):
            return "its param groups were changed otherwise than by add_param_group"
        if any(p.grad is not None and p.requires_grad for p in self._beside):
            return "a parameter that is not sharded has a gradient"
        return "its state was changed otherwise than by load_state_dict" if self._state_was_changed() else ""

    def fall_back(self, why: str) -> None:
        assert not self.chosen
        say_stays(self.optimizer, why)
        state = self.optimizer.state
        for param in [p for p in self._entries if p in state]:
            entry = state[param]
            entry.update(cloned(entry))  # what is in the daemon's memory
        if self._kind.starts_with_state:
            self._build_state()
        for job in self.jobs():
            assert job.engine is not None
            job.engine.ask_extension()
        self.forget_built()

    def _build_state(self) -> None:
        """Gives parameters without state what torch's Adagrad has been built with, as it takes no step without."""
        for group in self.param_groups:
            for param in group["params"]:
                if not self.optimizer.state.get(param):
                    value = group.get("initial_accumulator_value", 0)
                    self.optimizer.state[param] = {
                        "step": torch.tensor(0.0),
                        "sum": torch.full_like(param.detach(), value, memory_format=torch.preserve_format),
                    }

    def fall_back_now(self, why: str) -> None:
        given_up = self.jobs()
        beside = [other for job in given_up for other in job.live_optimizers() if other is not self]
        falling = list(dict.fromkeys([self, *beside]))
        for its in falling:
            if stuck := why_not_in_trainers(type(its.optimizer)):
                raise NotImplementedError(
                    f"{self.name}: {why}: the daemon does not go on with that, and {its.name} cannot step here: {stuck}; "
                    "take it back, or use another optimizer"
                )
        for its in falling:
            its.fall_back(why)
        for job in given_up:
            job.leave_to_trainers()

    def _note_beside(self, attached: list[TorchJob]) -> None:
        held = {key for job in attached for key in job.places}
        self._beside = [p for p in self.params() if id(p) not in held]

    def group_added(self, why: str) -> None:
        """A param group has been added to an optimizer of torch's. ``why`` the daemon cannot serve it: the next step is torch's."""
        self._not_served = why
        self._group_count = len(self.param_groups)
        attached = self.jobs()
        self._note_beside(attached)
        for job in attached:
            assert job.engine is not None
            job.engine.ask_extension()  # with the next forward
