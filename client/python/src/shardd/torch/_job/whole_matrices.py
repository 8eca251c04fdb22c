"""Matrices of the daemon's Muon where parameters are cut over nodes: one rank of one node has all of each."""

from __future__ import annotations

from shardd.torch._job.description import ParamPlace
from shardd.torch._job.job import job_of
from shardd.torch._job.job_optimizer import JobOptimizer, built_with
from shardd.torch._ranks.nodes import ranks_of
from shardd.torch._units.placement import is_planned_as_trained, why_not_on_one_rank
from shardd.torch._units.state import ShardState, state_of

__all__ = ["check_matrices", "register_matrices"]

_MUON = "OPTIMIZER_KIND_MUON"


def check_matrices(params: list[ParamPlace], optimizers: list[JobOptimizer]) -> None:
    """Raises where the daemon's Muon has what is cut over nodes: the optimizer was built before anybody knew of these."""
    muons = [optimizer for optimizer in optimizers if optimizer.kind == _MUON]
    alone = bool(muons) and len(optimizers) == 1  # then it is the kind of all that is trained
    matrices = {id(p) for optimizer in muons for group in optimizer.param_groups for p in group["params"]}
    for place in params:
        held = id(place.fsdp_param.sharded_param) in matrices
        # Also what is frozen now: the job plans what an optimizer has as trained.
        is_matrix = (held or alone) and is_planned_as_trained(place.fsdp_param, held)
        if is_matrix and (why := why_not_on_one_rank(place.fsdp_param)):
            raise NotImplementedError(f'register parameter "{place.fqn}": it {why}')


def register_matrices(root: ShardState) -> None:
    """Registers a model in which the daemon's Muon has what is cut over nodes; nothing for other models.

    All ranks call it together, before they cut values that the program loads: registration makes each matrix whole on one
    rank, and pieces from before it are others.
    """
    if job_of(root) is not None or root._unit is None:
        return
    states = {s for module in root._modules for below in module.modules() if (s := state_of(below)) is not None}
    params = {id(p.sharded_param) for state in states if state._unit is not None for p in state._unit.fsdp_params}
    if any(optimizer.kind == _MUON for optimizer in built_with(params)) and ranks_of(root._unit.mesh_info).cut:
        root._ensure_registered()
