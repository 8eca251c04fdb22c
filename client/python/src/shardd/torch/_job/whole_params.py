"""Parameters of the daemon's Muon and Adafactor where parameters are cut over nodes: one rank of one node has all of each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardd.torch._job.description import ParamPlace
from shardd.torch._job.job import job_of
from shardd.torch._job.job_optimizer import JobOptimizer, built_with
from shardd.torch._ranks.nodes import ranks_of
from shardd.torch._units.placement import is_planned_as_trained, why_not_on_one_rank
from shardd.torch._units.state import ShardState, state_of

__all__ = ["check_whole", "refuse_hook", "register_whole"]

_WHOLE = {"OPTIMIZER_KIND_MUON": "Muon", "OPTIMIZER_KIND_ADAFACTOR": "Adafactor"}


class _Wholes:
    """What the daemon updates whole, of a job with these optimizers."""

    def __init__(self, optimizers: list[JobOptimizer]) -> None:
        wholes = [optimizer for optimizer in optimizers if optimizer.kind in _WHOLE]
        # Then it is the kind of all that is trained.
        self._alone = _WHOLE[wholes[0].kind] if wholes and len(optimizers) == 1 else ""
        self._held = {id(p): _WHOLE[o.kind] for o in wholes for group in o.param_groups for p in group["params"]}

    def has(self, fsdp_param: Any) -> str:
        """Returns the name of the optimizer that updates it whole; empty where none does."""
        name = self._held.get(id(fsdp_param.sharded_param), "")
        # Also what is frozen now: the job plans what an optimizer has as trained.
        return (name or self._alone) if is_planned_as_trained(fsdp_param, bool(name)) else ""


def check_whole(params: list[ParamPlace], optimizers: list[JobOptimizer], in_rows: bool) -> None:
    """Raises where the daemon's Muon or Adafactor has what is cut over nodes: the optimizer was built before anybody knew of these.

    ``in_rows``: see ``why_not_on_one_rank``.
    """
    wholes = _Wholes(optimizers)
    for place in params:
        name = wholes.has(place.fsdp_param)
        if name and (why := why_not_on_one_rank(place.fsdp_param, in_rows, name)):
            raise NotImplementedError(f'register parameter "{place.fqn}": it {why}')


def refuse_hook(state: ShardState, units: Iterable[Any]) -> None:
    """Raises, alike on all ranks, where a hook that leaves each rank an equal piece is registered for ``units`` of a job that
    has a matrix of theirs whole on one rank."""
    job = job_of(state)
    if job is None or not job.ranks.cut:
        return
    wholes = _Wholes(job.live_optimizers())
    for param in (param for unit in units for param in unit.fsdp_params):
        if name := wholes.has(param):
            raise NotImplementedError(
                f'register_comm_hook: parameter "{param._name()}" is whole on one rank, as the daemon\'s {name} over several '
                "nodes asks for, and a hook leaves each rank an equal piece; leave the hook out, or give the parameter to "
                "another optimizer"
            )


def register_whole(root: ShardState) -> None:
    """Registers a model in which the daemon's Muon or Adafactor has what is cut over nodes; nothing for other models.

    All ranks call it together, before they cut values that the program loads: registration makes each of their parameters whole on one
    rank, and pieces from before it are others.
    """
    if job_of(root) is not None or root._unit is None:
        return
    states = {s for module in root._modules for below in module.modules() if (s := state_of(below)) is not None}
    params = {id(p.sharded_param) for state in states if state._unit is not None for p in state._unit.fsdp_params}
    if any(optimizer.kind in _WHOLE for optimizer in built_with(params)) and ranks_of(root._unit.mesh_info).cut:
        root._ensure_registered()
