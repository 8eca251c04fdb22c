"""Matrices of the daemon's Muon where parameters are cut over nodes: one rank of one node has all of each."""

from __future__ import annotations

from shardd.torch._job.description import ParamPlace
from shardd.torch._job.job_optimizer import JobOptimizer
from shardd.torch._units.placement import is_planned_as_trained, why_not_on_one_rank

__all__ = ["check_matrices"]


def check_matrices(params: list[ParamPlace], optimizers: list[JobOptimizer]) -> None:
    """Raises where the daemon's Muon has what is cut over nodes: the optimizer was built before anybody knew of these."""
    muons = [optimizer for optimizer in optimizers if optimizer.kind == "OPTIMIZER_KIND_MUON"]
    alone = bool(muons) and len(optimizers) == 1  # then it is the kind of all that is trained
    matrices = {id(p) for optimizer in muons for group in optimizer.param_groups for p in group["params"]}
    for place in params:
        held = id(place.fsdp_param.sharded_param) in matrices
        # Also what is frozen now: the job plans what an optimizer has as trained.
        is_matrix = (held or alone) and is_planned_as_trained(place.fsdp_param, held)
        if is_matrix and (why := why_not_on_one_rank(place.fsdp_param)):
            raise NotImplementedError(f'register parameter "{place.fqn}": it {why}')
