"""What trainers call beside ``fully_shard`` and the optimizers."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from shardd.errors import Error
from shardd.torch._job import trainer_state
from shardd.torch._job.job import TorchJob, job_of
from shardd.torch._job.resuming import resuming
from shardd.torch._process.progress import Progress
from shardd.torch._units.state import ShardState, root_states, state_of

__all__ = ["commit", "counters", "finish", "hand_in_edits", "reattach", "resume", "ride", "root_of"]


def root_of(module: nn.Module | None) -> ShardState:
    if module is not None:
        state = state_of(module)
        if state is None:
            raise ValueError(f"fully_shard was not applied to this {type(module).__name__}")
        return state._find_root()
    roots = root_states()
    if len(roots) != 1:
        raise ValueError(f"no single fully sharded model in this process (got {len(roots)}, want 1); pass it as module")
    return roots[0]


def registered_job(module: nn.Module | None) -> TorchJob:
    """The job of the model that ``module`` is part of, registered now where it was not; None: of the only model."""
    root = root_of(module)
    root._ensure_registered()
    job = job_of(root)
    assert job is not None
    return job


def resume(module: nn.Module | None = None, *, start_over: bool = False) -> tuple[int, Any]:
    """``(steps committed, state)`` of the job of a model; ``(0, None)`` on a first start.

    Call it after sharding and building the optimizer. Parameters and optimizer state need no loading: they are there.
    ``state`` is what this rank gave to ``ride`` before its last committed step. Waits for the other ranks.

    Where torchrun has restarted the workers too late, and the daemon has freed what they had committed, that is a
    RuntimeError that says what was lost. ``start_over=True``: the program begins from a checkpoint of its own then.
    """
    with resuming(start_over):
        job = registered_job(module)
    assert job.engine is not None
    if job.replaced_step:
        raise RuntimeError(
            f'resume: what the program had loaded has replaced committed step {job.replaced_step} of job "{job.name}", when the model was '
            "first used; call resume before the first forward, full parameters or counters, or go on from what was loaded"
        )
    job.told = True
    return job.engine.info()["committed_step"], job.program_state()


def ride(state: Any) -> None:
    """``state``, this rank's own, is pickled and committed with the next optimizer steps.

    At most 1 MiB. With an optimizer of torch's, where its state lies and its scalars share that: about 12 bytes for each
    parameter tensor of the model, and 8 for each further scalar. A step for which it is too much raises with both sizes.
    """
    trainer_state.set_program_state(state)


def reattach(module: nn.Module | None = None) -> tuple[int, Any]:
    """After ``shardd.StepAborted`` or ``shardd.Unavailable``: attaches again; as ``resume``. Gradients are dropped."""
    before = job_of(root_of(module))
    job = registered_job(module)
    assert job.engine is not None
    job.refuse_tensor_parallel("reattach", "restart all ranks, as torchrun does, and call resume")
    # Their gathers go through the process group, which has lost the rank too.
    job.refuse_subclasses("reattach", "restart all ranks, as torchrun does, and call resume")
    job.refuse_several_meshes("reattach", "restart all ranks, as torchrun does, and call resume")
    if job is not before:  # what was aborted had not attached, and this has
        return resume(module)
    with Progress(f'job "{job.name}"', shown=job.ranks.rank == 0) as progress:
        progress.doing("attaching again, with every rank")
        try:
            job.reattach()
        except Error:
            if not job.engine.info()["trains_more"]:
                raise
            root_of(module)._ensure_registered(unfreeze=True)
    return resume(module)


def lost_nothing(module: nn.Module | None = None) -> bool:
    """Whether the abort is of a daemon that stopped behind this rank's last step: then no rank has died."""
    job = job_of(root_of(module))
    return job is not None and job.engine is not None and bool(job.engine.info()["lost_nothing"])


def commit(module: nn.Module | None = None) -> None:
    """Commits now what was written into the parameters since the last pass, and a step of torch's optimizer with it.

    All ranks call it. Otherwise that happens where the next forward of the root begins. Nothing to do with the daemon's
    optimizers, whose ``step`` commits.
    """
    job = registered_job(module)
    assert job.engine is not None
    if job.passes:
        job.engine.commit_writing()


def hand_in_edits(module: nn.Module | None = None) -> None:
    """Hands in now what this rank has stored into parameters; returns when no rank is inside a pass, and it is the job's.

    The next pass or step does so by itself. Called between a backward (or a forward that gets none) and the next
    forward, on all ranks: a rank whose forward gets no backward is inside its pass until its next forward, its step, or
    this call. Nothing where passes read copies (with torch's optimizers, on GPUs, and with ``SHARDD_PASS_COPIES=1``): what is
    written there at any time is in the next pass. Over several nodes the ranks of all nodes call it, whether they have
    stored anything or not, and it returns when all have: that is one commit. There the next pass does so by itself, and
    a step does not: what is stored between a backward and its step is handed in with this call.
    """
    job = registered_job(module)
    if not job.passes:
        raise RuntimeError(
            f'hand in edits of job "{job.name}": its parameters may not be written, as its optimizer was built with '
            "in_place_edits=False (or SHARDD_IN_PLACE_EDITS=0), or with the default of models on GPUs and on several "
            "nodes; build it with in_place_edits=True"
        )
    assert job.engine is not None
    if not job.copies:
        job.engine.hand_in()


def finish(module: nn.Module | None = None) -> None:
    """Gives up the model's job, which the daemon frees when all ranks have. The exit of the process does it anyway."""
    job = job_of(root_of(module))
    if job is not None:
        job.close(finished=True)


def counters(module: nn.Module | None = None) -> dict[str, int]:
    """Returns the daemon's counts for the job since it was made: unshards, reshards, reductions, commits and others."""
    job = registered_job(module)
    assert job.engine is not None
    description = json.loads(job.engine.describe())
    return {name: int(value) for name, value in description["counters"].items()}
