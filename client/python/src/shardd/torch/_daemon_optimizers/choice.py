"""Which of torch's optimizers step in the daemon: settled where a model is registered, and again where its optimizers change.

Until a model is registered its optimizer is torch's in every respect. The daemon steps all optimizers of a model, over
parameters that are sharded and stored in fp32, or none: with anything else all of them step in the trainers.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from shardd.torch._daemon_optimizers.daemon_state import Plain
from shardd.torch._daemon_optimizers.daemon_steps import DaemonSteps, say_stays
from shardd.torch._daemon_optimizers.kinds import foreign_state, kind_of, refusal
from shardd.torch._daemon_optimizers.sharded_params import name_of, sharded_ids
from shardd.torch._daemon_optimizers.whole_params import why_not_whole
from shardd.torch._job.job import TorchJob, job_of
from shardd.torch._job.job_optimizer import JobOptimizer, built_with, choose_with, steps_in_daemon
from shardd.torch._job.write_mode import why_not_several
from shardd.torch._torch_optimizers.live_optimizers import optimizers_with
from shardd.torch._torch_optimizers.unserved import refuse_step, settle_in_step, why_not_in_trainers
from shardd.torch._units.state import ShardState, root_states, state_of

__all__ = ["made", "settled", "start", "stop", "why_not"]

_plain: dict[type, Plain] = {}  # by the classes whose optimizers may step in the daemon


def start(plain: Mapping[type, Plain]) -> None:
    """From now on optimizers of exactly these classes may step in the daemon. ``plain``: what the classes do themselves."""
    _plain.update(plain)
    settle_in_step(_plain)
    choose_with(_choose)


def stop() -> None:
    """From now on torch's optimizers step in the trainers; those that step in the daemon go on."""
    _plain.clear()
    settle_in_step(())
    choose_with(None)


def _params_of(optimizer: Optimizer) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _sharded_params(root: ShardState) -> list[Any]:
    """Returns a model's sharded parameters, whatever its modules have in their place now."""
    states = dict.fromkeys(s for m in root._modules for below in m.modules() if (s := state_of(below)) is not None)
    return [p.sharded_param for state in states if state._unit is not None for p in state._unit.fsdp_params]


def _roots_with(wanted: set[int]) -> list[ShardState]:
    return [root for root in root_states() if any(id(p) in wanted for p in _sharded_params(root))]


def why_not(optimizer: Optimizer) -> str:
    """Says why the daemon cannot step an optimizer of torch's; empty where it can."""
    kind = kind_of(type(optimizer), optimizer.param_groups)
    for group in optimizer.param_groups:
        why = refusal(kind, group)
        if why:
            return why
        if group.get("capturable"):
            return "capturable=True keeps the count of steps on the GPU"
        if kind.counts_updates or kind.state_names or group["momentum"] > 0:  # else what is there stays
            for param in group["params"]:
                if foreign := foreign_state(kind, group, optimizer.state.get(param)):
                    return f"state has names that the daemon's optimizer has not ({foreign})"
    sharded = sharded_ids()
    for param in _params_of(optimizer):
        if param.requires_grad and id(param) not in sharded:
            return f"parameter {name_of(param)} of shape {tuple(param.shape)} is not sharded"
        if param.device.type != "cpu" and len(kind.state_names) + bool(kind.momentum_state) > 2:
            return f"its state has three tensors for each parameter, which the daemon does not serve on GPUs ({name_of(param)})"
        if param.dtype != torch.float32:
            return f"parameter {name_of(param)} is {param.dtype}, and the daemon keeps state in fp32"
    return why_not_whole(kind, _params_of(optimizer))


def _any(_: Optimizer) -> bool:
    return False


def _wanted_with(params: set[int]) -> tuple[list[ShardState], set[int]]:
    """Returns the models of these parameters, and of what else their optimizers have, and the ids of all their parameters."""
    first = [o for o in optimizers_with(params, but_not=_any) if type(o) in _plain]
    roots = _roots_with(params | {id(p) for optimizer in first for p in _params_of(optimizer)})
    return roots, params | {id(p) for root in roots for p in _sharded_params(root)}


def _optimizers_with(wanted: set[int]) -> list[Optimizer]:
    """Returns optimizers that the program has: one that it has dropped may be held by its scheduler, which it holds itself."""
    if len(optimizers_with(wanted, but_not=_any)) > 1:
        gc.collect()
    return optimizers_with(wanted, but_not=_any)


def _choose(params: set[int], anew: bool) -> None:
    """Settles how the optimizers of a model step, whose sharded parameters have these ids. ``anew``: see job_optimizers_of."""
    roots, wanted = _wanted_with(params)
    everyone = _optimizers_with(wanted)
    swapped = [o for o in everyone if type(o) in _plain]
    if not swapped or any(steps.chosen for steps in built_with(wanted)):
        return  # the program has the daemon's beside torch's, and is told by name that it needs one
    jobs = [job for root in roots if (job := job_of(root)) is not None and job.engine is not None]
    if any(not job.optimizers and not (anew and _is_unused(job)) for job in jobs):
        return  # the trainers update it already
    why = next((why for optimizer in swapped if (why := why_not(optimizer))), "")
    if len(everyone) == 1:
        # The job has one kind of optimizer then, also for what nobody updates.
        kind = kind_of(type(swapped[0]), swapped[0].param_groups)
        why = why or why_not_whole(kind, (p for root in roots for p in _sharded_params(root) if p.requires_grad))
    if len(everyone) > 1:
        why = why or _why_not_together(everyone, len(swapped) < len(everyone), roots)
    for optimizer in swapped:
        steps: JobOptimizer | None = steps_in_daemon(optimizer)
        if steps is not None and why:
            steps.fall_back(why)
        elif why:
            say_stays(optimizer, why)
        elif steps is None:
            kind = kind_of(type(optimizer), optimizer.param_groups)
            DaemonSteps(optimizer, kind, _plain[type(optimizer)], chosen=False).note_built()


def _why_not_together(optimizers: list[Optimizer], some_are_not_served: bool, roots: list[ShardState]) -> str:
    """Says why the daemon cannot step all of these; empty where it can."""
    names = " and ".join(sorted(type(o).__name__ for o in optimizers))
    if some_are_not_served:
        return (
            f"the parameters of one model are updated by {names}, and the daemon serves all of its optimizers or none"
        )
    params = [param for optimizer in optimizers for param in _params_of(optimizer)]
    if any(getattr(p, "_post_accumulate_grad_hooks", None) or hasattr(p, "_in_backward_optimizers") for p in params):
        return f"{names} update the parameters of one model, and a hook may step them inside of a backward"
    if len({id(param) for param in params}) < len(params):
        return f"a parameter is in two optimizers ({names})"
    on_gpu = any(root._unit is not None and root._unit.device.type != "cpu" for root in roots)
    why = why_not_several(on_gpu)
    return f"the parameters of one model are updated by {names}, {why}" if why else ""


def settled(optimizer: Optimizer) -> Any:
    """Returns the daemon's part of an optimizer that steps there or nowhere, and None of others.

    A model that has not been used, as before torch loads an optimizer's state, is registered, which all ranks do together.
    Raises where the daemon does not step its optimizer.
    """
    if type(optimizer) not in _plain or not why_not_in_trainers(type(optimizer)):
        return None
    for root in _roots_with({id(p) for p in _params_of(optimizer)}):
        root._ensure_registered()
    steps = steps_in_daemon(optimizer)
    if steps is None:
        refuse_step(optimizer)
    return steps


def made(optimizer: Optimizer) -> None:
    """A program has built one of torch's. Models that are registered already get it with their next forward."""
    for root in _roots_with({id(p) for p in _params_of(optimizer)}):
        job = job_of(root)
        if job is None or job.engine is None or not job.alive:
            continue
        if _is_unused(job) if not job.optimizers else not job.chosen:
            job.engine.ask_extension()


def _is_unused(job: TorchJob) -> bool:
    """Whether no optimizer has made a step of it."""
    return job.engine is not None and not job.ranks.several and job.engine.info()["committed_step"] == 0
