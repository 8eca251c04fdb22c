"""torch's own optimizers on shards: what their hooks do.

Before a step the job gives the optimizer its state. After it, and after a load, what the optimizer has made moves into the
job (optimizer_state.py), and is marked: the commit is one, where the next pass begins.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.fsdp import ShardingStrategy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardd.errors import Error
from shardd.torch._process.extension import _C
from shardd.torch._ranks.nodes import JobRanks
from shardd.torch._torch_optimizers import foreach_chunks
from shardd.torch._torch_optimizers.known_classes import steps_each_alone
from shardd.torch._torch_optimizers.live_optimizers import lists_optimizers
from shardd.torch._torch_optimizers.new_state import make_state
from shardd.torch._torch_optimizers.optimizer_state import OptimizerMemory
from shardd.torch._torch_optimizers.unserved import refuse_step, settles_in_step
from shardd.torch._units.place import Place
from shardd.torch._units.state import ShardState


class OptimizedJob(Protocol):
    """What the hooks know of a job (``_job.job.TorchJob``)."""

    name: str
    ranks: JobRanks
    engine: _C.Engine | None
    memory: OptimizerMemory | None
    places: dict[int, Place]  # by id of the sharded parameter
    passes: bool

    def give_to_trainers(self, why: str) -> bool: ...

    @property
    def steps_in_daemon(self) -> bool: ...
    @property
    def trainers_write(self) -> bool: ...
    def root(self) -> ShardState | None: ...
    def trainer_state(self, optimizers: list[Optimizer]) -> bytes: ...


_watched: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_jobs: Callable[[], Sequence[OptimizedJob]] = list
_but_not: Callable[[Optimizer], bool] = bool


def install(jobs: Callable[[], Sequence[OptimizedJob]], but_not: Callable[[Optimizer], bool]) -> None:
    """Hooks all optimizers of the process except those of which ``but_not`` is true, the daemon's. Called once.

    ``jobs`` returns the attached jobs of the calling rank.
    """
    global _jobs, _but_not
    _jobs, _but_not = jobs, but_not
    foreach_chunks.install()
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def watch_loads(optimizer: Optimizer) -> None:
    """From now on what the optimizer loads goes into its jobs."""
    if optimizer not in _watched:
        _watched.add(optimizer)
        optimizer.register_state_dict_pre_hook(_await_store)
        optimizer.register_load_state_dict_post_hook(keep_loaded)


def _await_store(optimizer: Optimizer) -> None:
    """A checkpoint may be loaded into the tensors of a state dict, which the daemon may still copy into its snapshot."""
    for job in _jobs_of(optimizer):
        if job.engine is not None and job.trainers_write:
            with contextlib.suppress(Error):  # of a job that is over, whose state can still be read
                job.engine.await_store()


def _jobs_of(optimizer: Optimizer) -> list[OptimizedJob]:
    found: list[OptimizedJob] = []
    for job in _jobs():
        if any(id(p) in job.places for group in optimizer.param_groups for p in group["params"]):
            found.append(job)
    return found


def _refuse(optimizer: Optimizer, job: OptimizedJob) -> None:
    if not job.passes and not job.steps_in_daemon:
        raise RuntimeError(
            f'step of {type(optimizer).__name__}: its parameters are shards of job "{job.name}", which was registered for '
            "evaluation alone (got SHARDD_IN_PLACE_EDITS=0 and no optimizer); build the optimizer before the model's first use"
        )
    if not job.trainers_write:
        raise NotImplementedError(
            f'step of {type(optimizer).__name__}: its parameters are shards of job "{job.name}", which the daemon\'s '
            "optimizer updates; use one optimizer, the daemon's or torch's"
        )


def _refuse_own_gradients(optimizer: Optimizer, job: OptimizedJob) -> None:
    """Of NO_SHARD: each rank would update by its own, and the daemon keeps the ranks' copies alike."""
    root = job.root()
    if (
        root is None
        or getattr(root._unit, "strategy", None) != ShardingStrategy.NO_SHARD
        or len(job.ranks.members) == 1
    ):
        return
    for param in (p for group in optimizer.param_groups for p in group["params"]):
        place = job.places.get(id(param))
        if place is None:
            continue
        held = place.fsdp_param()
        if next(iter(getattr(held, "members", [held]))).home._has_own_gradient(place.index):
            raise RuntimeError(
                f'step of {type(optimizer).__name__}: the gradient of "{place.fqn}" is this rank\'s own, of no_sync(), and the '
                "ranks' copies of a NO_SHARD model stay alike; run the last backward outside of no_sync()"
            )


def _makes_state_only(optimizer: Optimizer) -> bool:
    """Whether torch makes this step to have state that it can save or load into: with lr 0, it is none of the program's.

    ``get_optimizer_state_dict`` and ``set_optimizer_state_dict`` do, on an optimizer that has made none.
    """
    if any(float(group.get("lr", 0.0)) != 0 for group in optimizer.param_groups):
        return False
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _init_optim_state.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    foreach_chunks.set_chunked(False)  # a step that raised has left it as it was
    if _but_not(optimizer) or lists_optimizers(optimizer):
        return
    jobs = _jobs_of(optimizer)
    if jobs or not settles_in_step(
        optimizer
    ):  # who steps a model is known when it is registered, which its step may do
        refuse_step(optimizer)
    jobs = [job for job in jobs if not job.give_to_trainers(f"{type(optimizer).__name__} steps its parameters too")]
    for job in jobs:
        _refuse(optimizer, job)
        _refuse_own_gradients(optimizer, job)
    for job in jobs:
        assert job.engine is not None and job.memory is not None
        watch_loads(optimizer)
        job.engine.begin_writing()
        job.engine.begin_step()  # a forward of its closure is followed by stores
        job.memory.give(optimizer)
    if jobs:
        memories = [job.memory for job in jobs if job.memory is not None]
        closure = any(given is not None for given in (*args[1:], *kwargs.values()))  # the first is the optimizer
        if make_state(optimizer, lambda p: any(m.keep_of(optimizer, p) for m in memories), closure, _before_step):
            _C.return_freed_memory()
        fused = any(group.get("fused") for group in optimizer.param_groups)  # holds nothing between operations
        foreach_chunks.set_chunked(steps_each_alone(optimizer) and not fused)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    foreach_chunks.set_chunked(False)
    if _but_not(optimizer) or lists_optimizers(optimizer):
        return
    jobs = _jobs_of(optimizer)
    for job in jobs:
        assert job.engine is not None
        job.engine.end_step()
    if jobs and _makes_state_only(optimizer):
        keep_loaded(optimizer, jobs)
        return
    for job in jobs:
        assert job.engine is not None and job.memory is not None
        job.memory.keep(optimizer)
        job.engine.mark_stepped(job.trainer_state([optimizer]))


def keep_loaded(optimizer: Optimizer, jobs: Sequence[OptimizedJob] | None = None) -> None:
    """State that was loaded is the job's with the next pass, as parameters are that were loaded beside it; no step."""
    for job in _jobs_of(optimizer) if jobs is None else jobs:
        assert job.engine is not None and job.memory is not None
        if job.trainers_write:
            job.engine.begin_writing()
            job.memory.keep(optimizer)
            job.engine.mark_state(job.trainer_state([optimizer]))
