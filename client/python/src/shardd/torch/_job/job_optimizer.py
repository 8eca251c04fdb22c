"""What a job asks of an optimizer whose steps the daemon makes; ``_daemon_optimizers`` has it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from shardd.torch._torch_optimizers.live_optimizers import optimizers_of

__all__ = ["JobOptimizer", "choose_with", "job_optimizers_of", "steps_in_daemon", "stock_optimizers_of"]

_built: weakref.WeakSet[JobOptimizer] = weakref.WeakSet()
_KEY = "_shardd_steps"  # among an optimizer's attributes, so that what shares them (Lightning's) has it too
_choose: Callable[[set[int], bool], None] | None = None


class JobOptimizer:
    """The daemon's part of an optimizer. The optimizer owns it, and it knows the optimizer weakly: what the program drops is gone.

    ``job`` is the ``TorchJob`` that has the parameters.
    """

    kind = "OPTIMIZER_KIND_NONE"  # shardd.v1.OptimizerKind
    chosen = (
        True  # the program asked for the daemon's; else the class is PyTorch's, and trainers may take the steps back
    )
    in_place_edits: bool
    edits_said: bool  # somebody has said whether parameters are edited in place

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)

    @property
    def optimizer(self) -> Optimizer:
        found = self._optimizer()
        assert found is not None, "the optimizer has ended, and what it owns is used"
        return found

    @property
    def name(self) -> str:
        """What the program calls the optimizer."""
        return type(self.optimizer).__name__

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def note_built(self) -> None:
        """Lets jobs that are made from now on find the optimizer by its parameters."""
        vars(self.optimizer)[_KEY] = self
        _built.add(self)

    def forget_built(self) -> None:
        """The reverse: the optimizer is PyTorch's."""
        vars(self.optimizer).pop(_KEY, None)
        _built.discard(self)

    def allows_edits(self, on_gpu: bool) -> bool:
        raise NotImplementedError

    def needs_momentum(self) -> bool:
        return False

    def adopt_job(self, job: Any, resumed: bool) -> None:
        """Shows the job's optimizer state as ``state``. ``resumed``: an earlier attempt has committed it."""
        raise NotImplementedError

    def write_loaded(self, job: Any, anew: bool = False) -> None:
        """Gives a new job what was loaded before. ``anew``: one that has state, in the place of all of it."""
        raise NotImplementedError

    def fall_back(self, why: str) -> None:
        """Makes the optimizer torch's, with a warning that says why; its jobs are given up with their next forward, or before.

        Only where it was not ``chosen``.
        """
        raise NotImplementedError


def steps_in_daemon(optimizer: Any) -> Any:
    """Returns the ``JobOptimizer`` of an optimizer whose steps the daemon makes, and None of others."""
    return getattr(optimizer, "__dict__", {}).get(_KEY)


def choose_with(choose: Callable[[set[int], bool], None] | None) -> None:
    """``choose`` is called before anybody looks for the optimizers of parameters, with the ids of these, and ``anew``.

    It settles which of PyTorch's optimizers step in the daemon.
    """
    global _choose
    _choose = choose


def job_optimizers_of(params: set[int], anew: bool = False) -> list[JobOptimizer]:
    """Returns the daemon's optimizers of this process that have one of the parameters with these ids.

    ``anew``: the caller gives the parameters' job up, where the choice wants another one.
    """
    if _choose is not None:
        _choose(params, anew)
    return built_with(params)


def built_with(params: set[int]) -> list[JobOptimizer]:
    """As ``job_optimizers_of``, and nothing is settled."""
    return [o for o in _built if any(id(p) in params for g in o.param_groups for p in g["params"])]


def stock_optimizers_of(params: list[Any]) -> list[Optimizer]:
    """Returns torch's own optimizers that have some of these parameters."""
    return optimizers_of(params, but_not=lambda optimizer: steps_in_daemon(optimizer) is not None)
