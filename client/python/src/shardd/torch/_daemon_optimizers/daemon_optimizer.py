"""The base class of the optimizers in ``shardd.torch.optim``."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from shardd.torch._daemon_optimizers.daemon_state import Plain
from shardd.torch._daemon_optimizers.daemon_steps import DaemonSteps
from shardd.torch._daemon_optimizers.kinds import Kind, refusal
from shardd.torch._daemon_optimizers.sharded_params import name_of, roots_with, sharded_ids
from shardd.torch._daemon_optimizers.whole_params import why_not_whole
from shardd.torch._job.job import job_of

_PLAIN = Plain(Optimizer.step, Optimizer.state_dict, Optimizer.load_state_dict, Optimizer.__setstate__)


class _State(defaultdict[Any, dict[str, Any]]):
    """``Optimizer.state``, which asks for the job where somebody asks whether there is any.

    torch's ``get_optimizer_state_dict`` does, and makes a step of zeros where there is none. Of a registered model there
    is some, even where it has no tensors (SGD without momentum).
    """

    def __init__(self, steps: DaemonSteps) -> None:
        super().__init__(dict)
        self._steps = weakref.ref(steps)  # an optimizer that the program drops is gone at once

    def __bool__(self) -> bool:
        steps = self._steps()
        if steps is None:
            return len(self) > 0
        if len(self) == 0 and not steps.adopted and torch.distributed.is_initialized():
            steps.register()
        steps.shows_unused = True
        return len(self) > 0 or steps.adopted

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())


class DaemonOptimizer(Optimizer):
    """The base class of Adafactor, Adagrad, Adam, AdamW, Lion, Muon, RMSprop and SGD.

    ``in_place_edits`` (default True; the environment variable ``SHARDD_IN_PLACE_EDITS=0`` makes it False): parameters may
    be written between passes, by anything, as with torch's fully_shard (clamping, averages around an evaluation,
    ``load_state_dict``, ``nn.init``). Ranks then begin each pass together, which costs one exchange of messages a step.
    With False they do not wait for each other in forward, and a write into a parameter is an error with its name;
    ``load_state_dict`` works. For models on GPUs, where True costs a copy of the parameters in each pass and its memory,
    and over several nodes, the default is False. Over nodes all ranks of all nodes edit between the same passes, and call
    ``hand_in_edits`` before a step where they have edited between its backward and it.
    """

    _steps: DaemonSteps | None = None  # None while it is built

    def __init__(self, params: Any, defaults: dict[str, Any], kind: Kind, in_place_edits: bool | None) -> None:
        why = refusal(kind, defaults)
        if why:
            raise NotImplementedError(f"{type(self).__name__}: {why}; use torch.optim's")
        super().__init__(params, defaults)
        steps = DaemonSteps(self, kind, _PLAIN, in_place_edits)
        for group in self.param_groups:
            steps.refuse(group)
        self.state = _State(steps)
        _check_params(self, steps)
        self._steps = steps
        steps.note_built()

    @property
    def _daemon(self) -> DaemonSteps:
        if self._steps is None:
            raise RuntimeError(
                f"use of a copy of {type(self).__name__}: the daemon steps the optimizer that was built; give its state_dict "
                "to one that is built for the copied parameters"
            )
        return self._steps

    @property
    def in_place_edits(self) -> bool:
        return self._daemon.in_place_edits

    @property
    def last_grad_norm(self) -> float | None:
        """The norm before clipping of the last step with ``max_grad_norm``."""
        return self._daemon.last_grad_norm

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last step with ``loss_scale`` found a gradient that is not finite."""
        return self._daemon.last_step_skipped

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._steps is not None:
            self._steps.refuse(param_group)
        super().add_param_group(param_group)
        if self._steps is not None:
            try:
                _check_params(self, self._steps)
            except BaseException:
                self.param_groups.pop()
                raise

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, max_grad_norm: float = 0.0, loss_scale: float = 0.0
    ) -> Any:
        """Makes one step of every rank and returns when it is committed.

        ``max_grad_norm``: the daemon clips by the global norm, without a collective of the trainers; ``last_grad_norm`` is
        then the norm before clipping. ``loss_scale``: gradients are those of the loss times this, and are divided by it; a
        gradient that is not finite on any rank then skips the update on all, and ``last_step_skipped`` says so.
        """
        return self._daemon.step(closure, max_grad_norm, loss_scale)

    def state_dict(self) -> dict[str, Any]:
        """Returns what torch's does. Moments are copies: a program may load into what this gives, and the daemon's memory is not its own to
        write.

        ``step`` of a ``FlatParameter`` is one for each parameter in it where they differ: the daemon does not update what
        got no gradient.
        """
        return self._daemon.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads as torch's does. Once the model is registered, all ranks call it together, and what is loaded is committed.

        What cannot be loaded raises before anything has changed, and on all ranks where it cannot be on one of them.
        """
        self._daemon.load_state_dict(state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        if self._steps is None:  # it is being copied
            super().__setstate__(state)
        else:
            self._steps.set_state(state)


def _check_params(optimizer: Optimizer, steps: DaemonSteps) -> None:
    name, params = type(optimizer).__name__, steps.params()
    roots = roots_with(params)
    if not roots:
        raise ValueError(
            f"{name}: none of its parameters belongs to a module that shardd.torch.fully_shard was applied to; apply it first, "
            "then build the optimizer"
        )
    sharded = sharded_ids()
    for param in params:
        if param.requires_grad and id(param) not in sharded:
            raise NotImplementedError(
                f"{name}: parameter {name_of(param)} of shape {tuple(param.shape)} is not sharded "
                "(ignored, or of a module outside of fully_shard), so the daemon cannot update it; give it to an optimizer of "
                "torch.optim"
            )
        if param.requires_grad and param.dtype == torch.float64:
            raise NotImplementedError(
                f"{name}: parameter {name_of(param)} is float64, which the daemon's optimizers do not update (they compute in "
                "fp32); give it to an optimizer of torch.optim"
            )
    if why := why_not_whole(steps.of_kind, params):
        raise NotImplementedError(
            f"{name}: {why}; give it to another optimizer (shardd.torch.optim has AdamW, which steps beside {steps.of_kind.title})"
        )
    for root in roots:
        job = job_of(root)
        if job is not None and job.engine is not None and any(o is steps for o in job.live_optimizers()):
            job.engine.ask_extension()  # with the next forward
        else:
            root._register_again()
