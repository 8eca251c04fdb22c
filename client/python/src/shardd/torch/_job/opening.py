"""Opens or joins a model's job: binds it to the parameters and gives it values, on all ranks."""

from __future__ import annotations

import json
import logging
import time
import weakref
from dataclasses import dataclass, replace

from shardd import errors
from shardd.torch._job import job as attached
from shardd.torch._job import spec
from shardd.torch._job.beside import differing_steps
from shardd.torch._job.binding import bind, weakly
from shardd.torch._job.description import Description
from shardd.torch._job.initial_values import drop_initial_values, initial_values, write_values
from shardd.torch._job.job import TorchJob, job_of
from shardd.torch._job.job_optimizer import JobOptimizer, job_optimizers_of
from shardd.torch._job.leaving import after_dropped_left
from shardd.torch._job.meshes import agree_on_rows
from shardd.torch._job.process_end import watch_end
from shardd.torch._job.resuming import asks_for_committed, starts_over, tell_lost
from shardd.torch._process import environment
from shardd.torch._process.extension import _C
from shardd.torch._process.memory import give_memory_back
from shardd.torch._process.progress import Progress
from shardd.torch._ranks.agreement import check_alike, have_store, publish_attributes
from shardd.torch._ranks.job_identity import Identity, identify
from shardd.torch._ranks.nodes import JobRanks, opened, ranks_of
from shardd.torch._ranks.pending import Pending
from shardd.torch._ranks.this_rank import rank_thread
from shardd.torch._torch_optimizers import hooks
from shardd.torch._torch_optimizers.optimizer_state import OptimizerMemory
from shardd.torch._units.names import WRAPPED_MODULE
from shardd.torch._units.state import ShardState

__all__ = ["Attempt", "Opening", "optimizers_of", "register", "settle_grace"]

logger = logging.getLogger("shardd.torch")

_NAMELESS_GRACE_MS = 60_000  # of a job that no other process can find; its ranks attach again at once


@dataclass(frozen=True)
class Attempt:
    """A registration that is tried again where an abort has ended it, as the same job."""

    index: str  # which one of the model's it is
    identity: Identity | None = None  # None: not settled yet
    of_earlier: bool = False  # the job may be that of an earlier process, as the first attempt has found
    existed: bool = False  # it had values, in whose place this process has none any more


_aborted: weakref.WeakKeyDictionary[ShardState, Attempt] = weakref.WeakKeyDictionary()


def register(root: ShardState) -> TorchJob:
    """Opens or joins the job of the model, on all ranks of its mesh. Waits for them the first time."""
    job = job_of(root)
    if job is not None and job.alive:
        return job
    if job is not None and job.open_unfrozen is not None:
        return job.open_unfrozen()
    for state in root._state_ctx.all_states:
        assert state._unit is not None
        state._unit.lazy_init()
    unit = root._unit
    assert unit is not None
    ranks = ranks_of(unit.mesh_info)
    # One that an abort has ended is tried again as the same job, as its other ranks do.
    attempt = _aborted.pop(root, None) or Attempt(root._next_registration())
    with Pending(attempt.index, ranks.members, ranks.rank, lambda: _names_of(root)) as pending:
        try:
            job = _register_as(root, attempt, ranks)
        except errors.Error as error:
            if pending.difference:
                raise RuntimeError(pending.difference) from error
            raise
    attached.end_retired(root)  # all ranks have left it: they have given the new one its values
    return job


def _names_of(root: ShardState) -> list[str]:
    """Returns what the model's sharded parameters are called, alike in both layouts."""
    of_modules = {id(module): name for name, module in root._modules[0].named_modules()}
    infos = [p._module_info for state in root._state_ctx.all_states if state._unit for p in state._unit.fsdp_params]
    names = [f"{of_modules.get(id(info.module), '')}.{info.param_name}" for info in infos]
    return [name.replace(f"{WRAPPED_MODULE}.", "").lstrip(".") for name in names]


def _register_as(root: ShardState, attempt: Attempt, ranks: JobRanks) -> TorchJob:
    if attempt.identity is None:
        identity = identify(attempt.index, ranks)
        attempt = replace(attempt, identity=identity, of_earlier=identity.resumes)
    else:
        identity = attempt.identity
    optimizers = optimizers_of(root)
    agree_on_rows(root, attempt.index, ranks)
    description = spec.describe(root, identity.name, ranks.local_world, optimizers, ranks.addresses)
    publish_attributes(identity.name, ranks.rank, root.attributes)
    with Progress(f'job "{identity.name}"', shown=ranks.rank == 0) as progress:
        opening = Opening(root, attempt, identity, description, ranks, optimizers, progress)
        try:
            job = opened(ranks, opening.open)
        except errors.StepAborted:
            # Jobs beside it wait for what this one has committed, if it has not told them yet.
            _aborted[root] = replace(attempt, identity=replace(identity, resumes=True), existed=opening.existed)
            raise
    differ = differing_steps(job) if attempt.of_earlier else ""
    if differ and not starts_over():
        job.close(False)
        raise RuntimeError(f"{differ}, or {environment.START_OVER}=1")
    if differ:
        logger.warning("%s", differ)
    return job


def optimizers_of(root: ShardState, anew: bool = False) -> list[JobOptimizer]:
    """Returns the daemon's optimizers that have parameters of the model, by the first of these, as on all ranks."""
    params = [id(p.sharded_param) for s in root._state_ctx.all_states for p in s._unit.fsdp_params]
    places = {param: place for place, param in reversed([*enumerate(params)])}

    def first(optimizer: JobOptimizer) -> int:
        return min(places.get(id(p), len(params)) for group in optimizer.param_groups for p in group["params"])

    return sorted(job_optimizers_of(set(params), anew), key=first)


def settle_grace(description: Description, ranks: JobRanks) -> bool:
    """Writes ``graceMs`` where the library's default does not serve; returns whether nobody else forms the job's name."""
    alone = not ranks.several and not environment.value(environment.JOB)
    if alone and not environment.of_launcher() and not environment.value(environment.GRACE):
        description.spec["config"]["graceMs"] = _NAMELESS_GRACE_MS
    return alone


@dataclass
class Opening:
    """Opens a job as it is described, in one attempt or several. ``memory`` is of the job whose place it takes, in this process."""

    root: ShardState
    attempt: Attempt
    identity: Identity
    description: Description
    ranks: JobRanks
    optimizers: list[JobOptimizer]
    progress: Progress
    memory: OptimizerMemory | None = None
    attached: bool = False  # since the last ``open``
    _found: bool = False  # by this attempt

    @property
    def existed(self) -> bool:
        """Whether what the job was opened for has values in it, and none here."""
        return self._found or self.attempt.existed or self.memory is not None

    def open(self) -> TorchJob:
        started = time.monotonic()
        self.progress.doing("attaching")
        self.attached = False
        job = TorchJob(self.root, self._attach(), self.description, self.ranks)
        self.attached = True
        job.notes.index = self.attempt.index
        try:
            self._fill(job)
        except BaseException:
            job.close(False)  # the model may be registered again
            raise
        for state in self.root._state_ctx.all_states:
            state.loaded = False
        attached.add(job)
        watch_end(job)
        weakref.finalize(self.root, job.drop).atexit = False  # a model that is dropped gives its job up
        logger.info('job "%s" registered in %.2f s', self.identity.name, time.monotonic() - started)
        return job

    def _attach(self) -> _C.Engine:
        gpu = spec.gpu_of(self.root)
        if gpu >= 0 and rank_thread() != 0:
            raise NotImplementedError(
                "register model: it is on a GPU and ranks are threads of this process, whose streams would wait for one "
                "another; make ranks processes"
            )
        alone = settle_grace(self.description, self.ranks)
        who = (json.dumps(self.description.spec), self.ranks.local_rank, self.ranks.node, "", self.identity.resumes,
               environment.timeout_ms(), gpu, alone)  # fmt: skip
        return after_dropped_left(lambda: _C.Engine.attach(*who))  # the memory may be theirs

    def _fill(self, job: TorchJob) -> None:
        """Binds the model's parameters; gives their values, or takes those that an earlier attempt committed."""
        engine = job.engine
        assert engine is not None
        info = engine.info()
        exists = info["version"] > 0
        if exists and not self.identity.resumes:
            raise RuntimeError(
                f'register model: job "{self.identity.name}" has parameters already; set SHARDD_JOB to resume one'
            )
        if self.existed and not exists:
            raise RuntimeError(
                f'register model: job "{self.identity.name}" had committed values and is gone; they went with it, so this '
                "process cannot go on: start all ranks anew (as torchrun does), from a checkpoint"
            )
        replaces = exists and self._replaces(job)
        loaded = exists and (replaces or self._has_loaded(job))
        self._found = exists and not loaded
        self._bind(job)
        if self.optimizers:
            job.optimizers = [weakref.ref(optimizer) for optimizer in self.optimizers]
            job.chosen = self.optimizers[0].chosen
        self._size_optimizer(job, exists)
        if loaded:
            self._write_own(job)
            self._tell_replaced(job, info["committed_step"], trained=replaces)
        elif exists:
            drop_initial_values(self.description)
            self._tell_resumed(job, info["committed_step"])
        else:
            self._write_initial(job)
        engine.load_memory()
        _C.return_freed_memory()  # the model as it was made, which the allocator would keep
        if not job.on_gpu:
            give_memory_back(engine)
        if job.passes:
            engine.use_passes()
        if not job.on_gpu:  # where no store can be caught
            after_dropped_left(engine.watch_writes)
        self._give_optimizers(job, exists and not loaded)

    def _replaces(self, job: TorchJob) -> bool:
        """Whether the program has begun its loop with another job of the model, and what an earlier process has left in this one
        would take it to another place in the middle of that."""
        if job.before is None or not self.attempt.of_earlier or self.memory is not None:
            return False
        if job.ranks.cut:
            raise RuntimeError(
                f'register model: job "{job.name}" has values of an earlier attempt, and the program has begun with job '
                f'"{job.before.names[-1]}", whose values cannot replace those that are cut over nodes; build all optimizers '
                f"before the model's first use, or close the job (shardctl close {job.name})"
            )
        return True

    def _has_loaded(self, job: TorchJob) -> bool:
        """Whether the program, restarted by its launcher, has loaded a checkpoint of its own, and does not ask for what is committed.

        It goes on where that is, so committed parameters and optimizer state of a later step would be of another one. TimeoutError
        where that is true of some ranks alone: it names the others.
        """
        if self.memory is not None or self.identity.restarts == 0 or environment.value(environment.JOB):
            return False
        loaded = self._program_loaded() and not asks_for_committed()
        if (
            loaded and have_store()
        ):  # who comes alone, where others have never ended, has loaded nothing, and waits for nobody
            job.meeting("loaded").agree(f'register model: every rank of job "{job.name}" has loaded values')
        if loaded and job.ranks.cut:
            raise RuntimeError(
                f'register model: job "{job.name}" has committed steps, and the program has loaded other values before its first '
                "use, which cannot replace those that are cut over nodes; call shardd.torch.resume(model) to go on from the "
                "committed ones"
            )
        return loaded

    def _program_loaded(self) -> bool:
        return any(state.loaded for state in self.root._state_ctx.all_states)

    def _bind(self, job: TorchJob) -> None:
        engine = job.engine
        assert engine is not None
        job.places.update(bind(engine, self.description))
        engine.set_replaced(weakly(job.take_object))
        engine.set_followed(weakly(job.follow))
        if any(len(state._modules) > 1 for state in self.description.states):
            engine.set_complete_partial(weakly(self.root._complete_partial))

    def _size_optimizer(self, job: TorchJob, exists: bool) -> None:
        """Sets how many param groups and states the job has; one that exists may have more than this program describes."""
        assert job.engine is not None
        config = self.description.spec["config"]["optimizer"]
        states, groups = config.get("trainerStates", 0), config.get("groups", [])
        if exists:
            its = json.loads(job.engine.describe())["config"]["optimizer"]
            states, groups = int(its["trainer_states"]), its["groups"]
        job.step_groups = len(groups) + 1
        if len(self.optimizers) > 1:
            job.owners = [None, *spec.owners_of(groups, self.description.params, self.optimizers, job.name)]
        job.memory = OptimizerMemory(job.engine, job.places, states, job.engine.info()["param_count"])

    def _write_initial(self, job: TorchJob) -> None:
        assert job.engine is not None
        if self.identity.resumes and job.before is None:
            tell_lost(job, self.identity.restarts, self._program_loaded())
        for optimizer in self.optimizers:
            optimizer.write_loaded(job)
        write_values(job.engine, initial_values(job.fsdp_params(), job.ranks), self.progress)
        if self.memory is None and have_store():  # all ranks have come
            check_alike(job.name, job.meeting("attributes"))

    def _write_own(self, job: TorchJob) -> None:
        """What the program has, trained, loaded or as it was made, replaces what the job has committed."""
        assert job.engine is not None
        values = initial_values(job.fsdp_params(), job.ranks)
        self.progress.doing("waiting for the other ranks to load")
        job.engine.enter_full_params(True)
        for optimizer in self.optimizers:
            optimizer.write_loaded(job, anew=True)
        write_values(job.engine, values, self.progress)
        job.engine.leave_full_params()

    def _tell_replaced(self, job: TorchJob, step: int, trained: bool) -> None:
        what = "parameters and the optimizer state of committed step"
        if trained:
            assert job.before is not None
            text = 'job "%s": what the program has trained as job "%s" replaces the %s %d, of an earlier attempt'
            logger.warning(text, job.name, job.before.names[-1], what, step)
            return
        job.replaced_step = step
        text = (
            'job "%s": values that the program loaded replace the %s %d; shardd.torch.resume(model) before the first use goes '
            "on from those instead"
        )
        logger.warning(text, job.name, what, step)

    def _tell_resumed(self, job: TorchJob, step: int) -> None:
        if self.memory is not None:
            logger.info('job "%s" goes on with unfrozen parameters at committed step %d', job.name, step)
            return
        job.resumed_step = step
        logger.warning(
            'job "%s" resumed at committed step %d; its parameters replace those that the program gave', job.name, step
        )

    def _give_optimizers(self, job: TorchJob, exists: bool) -> None:
        """Gives optimizers the job's state, or the job theirs."""
        if self.optimizers:
            for its in self.optimizers:
                its.adopt_job(job, exists and self.memory is None)
            return
        # What the job never had is still in this process, and goes into the new one as what is loaded does.
        is_given = not exists or (self.memory is not None and self.memory.loses())
        if not is_given:
            job.restore_optimizers(self.description.stock)
        for optimizer in self.description.stock:
            hooks.watch_loads(optimizer)
            if is_given and any(id(param) in job.places for param in optimizer.state):
                hooks.keep_loaded(optimizer, [job])
