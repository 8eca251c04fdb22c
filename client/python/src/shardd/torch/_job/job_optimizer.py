"""What a job asks of an optimizer whose steps the daemon makes; ``shardd.torch.optim`` has them."""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import Optimizer

from shardd.torch._torch_optimizers.live_optimizers import optimizers_of

__all__ = ["JobOptimizer", "job_optimizers_of", "stock_optimizers_of"]

_built: weakref.WeakSet[JobOptimizer] = weakref.WeakSet()


class JobOptimizer(Optimizer):
    """What lower modules see of the daemon's optimizers. ``job`` is the ``TorchJob`` that has the parameters."""

    _kind = "OPTIMIZER_KIND_NONE"  # shardd.v1.OptimizerKind
    in_place_edits: bool
    _edits_said: bool  # somebody has said whether parameters are edited in place

    def _note_built(self) -> None:
        """Lets jobs that are made from now on find the optimizer by its parameters."""
        _built.add(self)

    def _allows_edits(self, on_gpu: bool) -> bool:
        raise NotImplementedError

    def _needs_momentum(self) -> bool:
        return False

    def _adopt_job(self, job: Any, resumed: bool) -> None:
        """Shows the job's optimizer state as ``state``. ``resumed``: an earlier attempt has committed it."""
        raise NotImplementedError

    def _write_loaded(self, job: Any) -> None:
        """Gives a new job what was loaded before."""
        raise NotImplementedError


def job_optimizers_of(params: set[int]) -> list[JobOptimizer]:
    """Returns the daemon's optimizers of this process that have one of the parameters with these ids."""
    return [o for o in _built if any(id(p) in params for g in o.param_groups for p in g["params"])]


def stock_optimizers_of(params: list[Any]) -> list[Optimizer]:
    """Returns torch's own optimizers that have some of these parameters."""
    return optimizers_of(params, but_not=JobOptimizer)
