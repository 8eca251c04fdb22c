"""A model trains more than it did: the job that takes its one's place is opened, on all ranks."""

from __future__ import annotations

import json
from dataclasses import replace

from shardd import errors
from shardd.torch._job import spec
from shardd.torch._job.gradient_moves import GradientMoves
from shardd.torch._job.job import TorchJob, job_of
from shardd.torch._job.job_optimizer import JobOptimizer
from shardd.torch._job.opening import Attempt, Opening, optimizers_of, register, settle_grace
from shardd.torch._process.progress import Progress
from shardd.torch._ranks.job_identity import Identity
from shardd.torch._ranks.nodes import opened
from shardd.torch._units.state import ShardState

__all__ = ["unfreeze"]


def unfreeze(root: ShardState) -> TorchJob:
    """Returns the job that trains what is trained now: a new one in the place of the model's, or the same where it does already.

    Values, optimizer state and committed steps stay; gradients that are shown stay with their parameters.
    """
    job = job_of(root)
    assert job is not None
    if job.open_unfrozen is not None:
        return job.open_unfrozen()
    optimizers = optimizers_of(root, anew=True)
    other = _has_other_optimizer(job, optimizers)
    if other or not optimizers or job.on_gpu:
        job.refuse_on_nodes("unfreeze", "do it before the first forward, or on CPUs with the daemon's optimizers")
    gradients = GradientMoves(job.fsdp_params())
    if other:
        root._register_again(state_is_lost=False)  # nothing where the choice has given the job up
        successor = register(root)
        gradients.place()
        return successor
    engine, memory = job.engine, job.memory
    assert engine is not None and memory is not None
    description = spec.describe(root, job.name, job.ranks.local_world, optimizers, job.ranks.addresses)
    settle_grace(description, job.ranks)  # the job's own, which must not change
    with Progress(f'job "{job.name}"', shown=job.ranks.rank == 0) as progress:
        progress.doing("waiting for the other ranks to unfreeze parameters")
        # Where this rank has asked before, and has attached since, its answer was lost.
        answer_was_lost = engine.info()["trains_more"]
        if not answer_was_lost and not engine.extend(json.dumps(description.spec)):
            for optimizer in optimizers:  # its groups have changed
                optimizer.adopt_job(job, False)
            return job
        job.end(finished=False)
        identity = Identity(job.name, resumes=True)
        opening = Opening(root, Attempt(""), identity, description, job.ranks, optimizers, progress, memory)
        successor = _open_unfrozen(job, opening)
        if not answer_was_lost:  # else they are of an attempt that has ended
            try:
                gradients.place()
            except BaseException:
                job.closed = True
                raise
        return successor


def _open_unfrozen(job: TorchJob, opening: Opening) -> TorchJob:
    """Opens the job that takes the place of ``job``, which this rank has left. Where an abort or the daemon's death ends that,
    the model's next use, or ``reattach``, does so again: a job that is registered anew would be without what is committed."""

    def again() -> TorchJob:
        with Progress(f'job "{job.name}"', shown=job.ranks.rank == 0) as progress:
            return _open_unfrozen(job, replace(opening, progress=progress))

    try:
        return opened(job.ranks, opening.open)
    except errors.StepAborted:
        job.open_unfrozen = again
        raise
    except errors.Unavailable as error:
        job.open_unfrozen = again
        if not opening.attached:  # it has waited for a daemon
            raise
        raise errors.StepAborted(str(error)) from error
    except BaseException:
        job.closed = True
        raise


def _has_other_optimizer(job: TorchJob, optimizers: list[JobOptimizer]) -> bool:
    """Whether the job was made for another one of torch's optimizers than the one whose steps the daemon is to make now."""
    if not job.optimizers:
        return bool(optimizers)
    of_job = job.live_optimizers()
    return not job.chosen and (len(of_job) != len(job.optimizers) or {*map(id, of_job)} != {*map(id, optimizers)})
