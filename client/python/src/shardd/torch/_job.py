"""One registered model: its job in the daemon."""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import logging
import multiprocessing.util
import os
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from shardd import errors
from shardd.torch import _environment, _spec, _writes
from shardd.torch._agreement import Meeting, check_alike, speaks, tell
from shardd.torch._bind import Place, bind
from shardd.torch._counts import at_end_of_thread, rank_thread
from shardd.torch._extension import _C
from shardd.torch._given import forget_given, given_values
from shardd.torch._gradient_moves import GradientMoves
from shardd.torch._identity import Identity, identify
from shardd.torch._leaving import leave_beside, wait_for_leaving
from shardd.torch._memory import give_memory_back
from shardd.torch._nodes import JobRanks, give_way, opened, ranks_of, refuse_on_nodes
from shardd.torch._optimizer_state import OptimizerMemory
from shardd.torch._progress import Progress

if TYPE_CHECKING:
    from shardd.torch._daemon_optimizer import DaemonOptimizer
    from shardd.torch._state import ShardState

logger = logging.getLogger("shardd.torch")

_jobs: list[TorchJob] = []
_optimizers: weakref.WeakSet[DaemonOptimizer] = weakref.WeakSet()
before_end: list[Callable[[TorchJob], None]] = []  # called with each job before it is given up
_registered = 0
_failed = False  # the process ends with an exception: its job is to be kept
_ridden: Any = None
_aborted: weakref.WeakKeyDictionary[ShardState, Identity] = weakref.WeakKeyDictionary()  # while they were registered
start_over = False  # resume(start_over=True) is under way
_NAMELESS_GRACE_MS = 60_000  # of a job that no other process can find; its ranks attach again at once
RIDE_BYTES = 1 << 20  # what a commit takes of this rank's own (kMaxTrainerStateBytes)


class TorchJob:
    """Attached from construction to ``retire`` or ``close``. Not thread-safe, as the job itself."""

    def __init__(self, root: ShardState, engine: _C.Engine, description: _spec.Description, ranks: JobRanks) -> None:
        self.ranks = ranks
        self.engine: _C.Engine | None = engine
        self._retired: _C.Engine | None = None
        self.name: str = description.spec["name"]
        self.step_groups = 1  # of hyperparameters, in a step of the daemon's optimizer
        self.closed = False
        self.resumed_step = 0
        # Weak, as is the root: the daemon's job lives no longer than the model.
        self._params = [(place.fqn, weakref.ref(place.fsdp_param)) for place in description.params]
        self.places: dict[int, Place] = {}  # by id of the sharded parameter, which lives as long as the job
        # Whether parameters may be written between passes, which ranks then enter together.
        self.passes = not description.spec["config"]["trainersNeverWrite"]
        self.copies: bool = description.spec["config"].get("passCopies", False)  # read in passes: shards are not
        self.memory: OptimizerMemory | None = None  # of torch's optimizers
        self.counts: torch.Tensor | None = None  # updates by the daemon's optimizer
        self._writing: list[int] = []  # who has opened a write, innermost last
        self._root = weakref.ref(root)
        engine.set_root(self._root)  # its calls keep the model while they last
        self._rank_thread = rank_thread()
        self.optimizer: weakref.ref[DaemonOptimizer] | None = None
        unit = root._unit
        assert unit is not None
        self.device: torch.device = unit.device  # what the model computes on

    def root(self) -> ShardState | None:
        return self._root()

    @property
    def alive(self) -> bool:
        return self.engine is not None and bool(self.engine.alive)

    def meeting(self, purpose: str) -> Meeting:
        """Of the ranks of the job."""
        return Meeting(purpose, self.ranks.members, self.ranks.rank, self)

    @classmethod
    def register(cls, root: ShardState) -> TorchJob:
        """Opens or joins the job of the model, on all ranks of its mesh. Waits for them the first time."""
        if root._job is not None and root._job.alive:
            return root._job
        for state in root._state_ctx.all_states:
            assert state._unit is not None
            state._unit.lazy_init()
        unit = root._unit
        assert unit is not None
        ranks = ranks_of(unit.mesh_info)
        # One that an abort has ended is tried again as the same job, as its other ranks do.
        identity = _aborted.pop(root, None) or identify(root._next_registration(), ranks)
        optimizers = _optimizers_of(root)
        description = _spec.describe(root, identity.name, ranks.local_world, optimizers, ranks.addresses)
        tell(identity.name, ranks.rank, root.attributes)
        with Progress(f'job "{identity.name}"', shown=ranks.rank == 0) as progress:
            try:
                job = opened(ranks, lambda: cls._open(root, identity, description, ranks, optimizers, progress))
            except errors.StepAborted:
                _aborted[root] = replace(identity, resumes=True)
                raise
        for before in [other for other in _jobs if other._retired is not None and other.root() is root]:
            before._end(finished=True)  # all ranks have left it: they have given the new one its values
        return job

    def extended(self, root: ShardState) -> TorchJob:
        """The job that takes this one's place, with what is trained now; this one where it does that already.

        Values, optimizer state and committed steps stay; gradients that are shown stay with their parameters.
        """
        refuse_on_nodes(self, "unfreeze parameters", "freeze and unfreeze them before the first forward")
        engine, memory = self.engine, self.memory
        assert engine is not None and memory is not None
        optimizers = _optimizers_of(root)
        gradients = GradientMoves((fqn, ref()) for fqn, ref in self._params)
        description = _spec.describe(root, self.name, self.ranks.local_world, optimizers)
        self._settle_grace(description, self.ranks)  # the job's own, which an extension must not change
        with Progress(f'job "{self.name}"', shown=self.ranks.rank == 0) as progress:
            progress.doing("waiting for the other ranks to unfreeze parameters")
            if not engine.extend(json.dumps(description.spec)):
                for optimizer in optimizers:  # its groups have changed
                    optimizer._adopt_job(self, False)
                return self
            self._end(finished=False)
            identity = Identity(self.name, resumes=True)
            try:
                job = self._open(root, identity, description, self.ranks, optimizers, progress, memory)
                gradients.place()
                return job
            except BaseException:
                self.closed = True  # not to be registered under another name, without what is committed
                raise

    @staticmethod
    def _settle_grace(description: _spec.Description, ranks: JobRanks) -> bool:
        """Writes ``graceMs`` where the library's default does not serve; whether nobody else forms the job's name."""
        alone = not ranks.several and not _environment.given(_environment.JOB)
        if alone and not _environment.of_launcher() and not _environment.given(_environment.GRACE):
            description.spec["config"]["graceMs"] = _NAMELESS_GRACE_MS
        return alone

    @classmethod
    def _open(
        cls,
        root: ShardState,
        identity: Identity,
        description: _spec.Description,
        ranks: JobRanks,
        optimizers: list[DaemonOptimizer],
        progress: Progress,
        memory: OptimizerMemory | None = None,
    ) -> TorchJob:
        """``memory``: of the job whose place it takes, in this process."""
        started = time.monotonic()
        progress.doing("attaching")
        gpu = _spec.gpu_of(root)
        if gpu >= 0 and rank_thread() != 0:
            raise NotImplementedError(
                "register model: it is on a GPU and ranks are threads of this process, whose streams would wait for one "
                "another; make ranks processes"
            )
        alone = cls._settle_grace(description, ranks)
        who = (json.dumps(description.spec), ranks.local_rank, ranks.node, "", identity.resumes,
               _environment.timeout_ms(), gpu, alone)  # fmt: skip
        try:
            engine = _C.Engine.attach(*who)
        except errors.Error as error:
            if error.code != _writes.RESOURCE_EXHAUSTED:
                raise
            gc.collect()  # the memory may be that of models which nobody holds any more
            wait_for_leaving(_writes.DROPPED_S)
            engine = _C.Engine.attach(*who)
        job = cls(root, engine, description, ranks)
        try:
            job._fill(identity, description, optimizers, progress, memory)
        except BaseException:
            job.close(False)  # the model may be registered again
            raise
        _jobs.append(job)
        _note_registration()
        at_end_of_thread(job.drop)  # the other ranks do not wait for one that is gone
        if multiprocessing.parent_process() is not None:
            multiprocessing.util.Finalize(None, _at_exit_of_child, exitpriority=0)
        weakref.finalize(root, job.drop).atexit = False  # a model that is dropped gives its job up
        logger.info('job "%s" registered in %.2f s', identity.name, time.monotonic() - started)
        return job

    def _fill(
        self,
        identity: Identity,
        description: _spec.Description,
        optimizers: list[DaemonOptimizer],
        progress: Progress,
        memory: OptimizerMemory | None,
    ) -> None:
        """Binds the model's parameters; gives their values, or takes those that an earlier attempt committed."""
        from shardd.torch import _stock

        engine = self.engine
        assert engine is not None
        info = engine.info()
        if info["version"] > 0 and not identity.resumes:
            raise RuntimeError(
                f'register model: job "{identity.name}" has parameters already; set SHARDD_JOB to resume one'
            )
        self._bind(description)
        if optimizers:
            self.optimizer = weakref.ref(optimizers[0])
        config = description.spec["config"]["optimizer"]
        states, groups = config.get("trainerStates", 0), len(config.get("groups", []))
        if info["version"] > 0:  # it may have more than this program describes
            its = json.loads(engine.describe())["config"]
            states, groups = int(its["optimizer"]["trainer_states"]), len(its["optimizer"]["groups"])
            self.copies = its.get("pass_copies", self.copies)
        self.step_groups = groups + 1
        self.memory = OptimizerMemory(self, states, info["param_count"])
        if info["version"] == 0:
            if identity.resumes:
                self._tell_lost()
            if optimizers:
                optimizers[0]._write_loaded(self)
            self._write_all(progress)
            if memory is None and speaks():  # all ranks have come
                check_alike(self.name, self.meeting("attributes"))
        else:
            forget_given(description)
        if info["version"] > 0 and memory is not None:
            logger.info('job "%s" goes on with more to train at committed step %d', self.name, info["committed_step"])
        elif info["version"] > 0:
            self.resumed_step = info["committed_step"]
            logger.warning(
                'job "%s" resumed at committed step %d; its parameters replace those that the program gave',
                identity.name,
                info["committed_step"],
            )
        engine.load_memory()
        _C.return_freed_memory()  # the model as it was made, which the allocator would keep
        if not self.on_gpu:
            give_memory_back(engine)
        _writes.begin(self)
        if optimizers:
            optimizers[0]._adopt_job(self, info["version"] > 0 and memory is None)
            return
        # What the job never had is still in this process, and goes into the new one as what is loaded does.
        is_given = info["version"] == 0 or (memory is not None and memory.loses())
        if not is_given:
            self.restore_optimizers()
        for optimizer in self._stock_optimizers():
            _stock.watch_loads(optimizer)
            if is_given and any(self._has(param) for param in optimizer.state):
                _stock.keep_loaded(optimizer, [self])

    def _tell_lost(self) -> None:
        """The job has no parameters. RuntimeError where a restart by torchrun was to go on with those that are lost."""
        assert self.engine is not None
        restarts = _environment.restarts()
        lost = json.loads(self.engine.describe()).get("lost")
        if lost is None:
            if restarts > 0:
                logger.warning(
                    'job "%s" was not found after a restart; starting from the values that the program gave', self.name
                )
        elif restarts == 0 or start_over or _environment.number(_environment.START_OVER, 1):
            logger.warning('job "%s" starts from the values that the program gave: %s', self.name, lost["text"])
        else:
            raise RuntimeError(
                f'register model: job "{self.name}" cannot be resumed by restart {restarts}: {lost["text"]}. A program that '
                "loads a checkpoint of its own then says so with shardd.torch.resume(model, start_over=True), or "
                f"{_environment.START_OVER}=1"
            )

    def _bind(self, description: _spec.Description) -> None:
        engine = self.engine
        assert engine is not None
        self.places.update(bind(engine, description))
        replaced = weakref.WeakMethod(self._take_object)

        def take_object(before: torch.Tensor, now: torch.Tensor) -> None:
            method = replaced()
            if method is not None:
                method(before, now)

        engine.set_replaced(take_object)
        root = self.root()
        if any(len(state._modules) > 1 for state in description.states) and root is not None:
            complete = weakref.WeakMethod(root._complete_partial)

            def complete_partial(output: Any) -> Any:
                method = complete()
                return output if method is None else method(output)

            engine.set_complete_partial(complete_partial)

    def _take_object(self, before: Any, now: Any) -> None:
        """The program has put another parameter in the place of one: it is the sharded one from now on."""
        place = self.places[id(now)] = self.places.pop(id(before))
        place.fsdp_param().become(now)
        logger.warning(
            'parameter "%s" was replaced by another object; optimizers that have the one before do not train it',
            place.fqn,
        )

    def _write_all(self, progress: Progress) -> None:
        engine = self.engine
        assert engine is not None
        given = given_values(((fqn, ref()) for fqn, ref in self._params), self.ranks)
        total = sum(rows.nbytes for _, _, rows in given)
        done = 0
        for fqn, first, rows in given:
            progress.doing("giving the parameters", done, total)
            engine.write(engine.find_param(fqn), rows, first)
            done += rows.nbytes
        progress.doing("waiting for the other ranks' parameters")
        engine.commit()

    @property
    def on_gpu(self) -> bool:
        return self.device.type != "cpu"

    @property
    def trainers_write(self) -> bool:
        """No optimizer of the daemon: the program updates its shards between passes, where it may write them."""
        return self.optimizer is None and self.passes

    # What goes with a commit: the program's own state, and where that of torch's optimizers lies.

    def packed_state(self, optimizers: list[Any]) -> bytes:
        assert self.memory is not None
        memory = self.memory.pack(optimizers) if self.trainers_write else None
        if _ridden is None and memory is None:
            return b""
        data = pickle.dumps((_ridden, memory))
        if len(data) > RIDE_BYTES:
            own = len(pickle.dumps(_ridden))
            raise ValueError(
                f'commit of job "{self.name}": what goes with it is too large (got {own} bytes that shardd.torch.ride was '
                f"given and {len(data) - own} of the optimizer's small values, want at most {RIDE_BYTES} together); give "
                "ride less"
            )
        return data

    def _committed_state(self) -> tuple[Any, Any]:
        assert self.engine is not None
        data = self.engine.trainer_state()
        state: tuple[Any, Any] = pickle.loads(data) if data else (None, None)
        return state

    def ridden(self) -> Any:
        """What this rank gave to ``ride`` before its last committed step."""
        return self._committed_state()[0]

    def index_of(self, fsdp_param: Any) -> int:
        """The daemon's parameter, of one in a FlatParameter too."""
        place = self.places[id(fsdp_param.sharded_param)]
        holder = getattr(fsdp_param, "holder", None)
        return place.index if holder is None else place.members[holder.members.index(fsdp_param)][0]

    def _has(self, param: Any) -> bool:
        return id(param) in self.places

    def _stock_optimizers(self) -> list[torch.optim.Optimizer]:
        return _spec.stock_optimizers([place.fsdp_param().sharded_param for place in self.places.values()])

    def restore_optimizers(self) -> None:
        """torch's optimizers go on from what was committed last."""
        assert self.memory is not None
        self.memory.restore(self._committed_state()[1], self._stock_optimizers())

    def update_counts(self) -> list[int]:
        """By the daemon's parameters: the updates of its optimizer. Empty: none yet. One call to the daemon."""
        assert self.engine is not None
        return [int(count) for count in json.loads(self.engine.describe()).get("update_counts", [])]

    def reattach(self) -> None:
        assert self.engine is not None
        self.ranks.publish()
        self.engine.reattach()
        if self.trainers_write:
            self.restore_optimizers()
        elif self.optimizer is not None and (optimizer := self.optimizer()) is not None:
            optimizer._read_counts(self)

    # Values written by the program after registration.

    def open_write(self, who: object) -> None:
        """Sharded parameters may be written until ``commit_write``, of the same; calls nest."""
        if self.engine is None or not self.engine.alive:
            return
        if self.engine.full_params:
            return  # into what summon_full_params shows, which it writes back
        if give_way(self, "load into a registered model"):
            return
        if id(who) in self._writing:  # an exception ended what it began then
            del self._writing[self._writing.index(id(who)) :]
        if self.passes:
            self.engine.open_window()  # a store would do it as well, in a signal handler
        elif not self._writing:
            root = self.root()
            assert root is not None
            for state in root._state_ctx.all_states:
                state._unit._copy_shards_out()
        self._writing.append(id(who))

    def commit_write(self, who: object) -> None:
        """What was written becomes the next version, on all ranks together: it waits for them."""
        if id(who) not in self._writing:
            return
        del self._writing[self._writing.index(id(who)) :]
        if self._writing or self.engine is None or not self.engine.alive:
            return
        info = self.engine.info()
        if self.passes:  # where the next pass begins
            self._log_load(info["committed_step"])
            return
        with Progress(f'job "{self.name}"', shown=self.ranks.rank == 0) as progress:
            progress.doing("waiting for the other ranks to load")
            self.engine.enter_full_params(True)
            self._write_all(progress)
            self.engine.leave_full_params()
        self.engine.load_memory()
        self._log_load(info["committed_step"])

    def _log_load(self, step: int) -> None:
        logger.warning(
            'job "%s": values that the program loaded replace the parameters of committed step %d', self.name, step
        )

    # The end.

    def retire(self) -> None:
        """Keeps the parameters in this process. The session ends with the next registration or ``close``: this rank does
        not know whether others are still in the middle of what it did before."""
        self.memory = None
        if self.engine is not None:
            self._retired, self.engine = self.engine, None
            self._retired.release()

    def close(self, finished: bool) -> None:
        self.closed = True
        self._end(finished)

    def drop(self) -> None:
        """The model is gone on this rank: the collector has it, wherever the program and other ranks are."""
        self.closed = True
        engine = self._give_up()
        if engine is not None:
            leave_beside(engine)

    def _give_up(self) -> _C.Engine | None:
        if self.alive:
            for look in before_end:
                look(self)
        engine = self.engine or self._retired
        self.engine = self._retired = self.memory = None
        if self in _jobs:
            _jobs.remove(self)
        return engine

    def _end(self, finished: bool) -> None:
        engine = self._give_up()
        if engine is None:
            return
        lost: RuntimeError | None = None
        try:
            if finished:
                engine.wait_for_commit()
        except RuntimeError as error:
            lost = error
        try:
            engine.detach(finished)
        except RuntimeError as error:
            logger.debug('close job "%s": %s', self.name, error)  # it was over already
        if lost is not None:  # no call of the program's has said so
            logger.error('job "%s": its last step was not committed: %s', self.name, lost)
            raise lost


def _optimizers_of(root: ShardState) -> list[DaemonOptimizer]:
    """The daemon's optimizers that have parameters of the model."""
    owned = {id(p.sharded_param) for s in root._state_ctx.all_states for p in s._unit.fsdp_params}
    return [o for o in _optimizers if any(id(p) in owned for g in o.param_groups for p in g["params"])]


def _note_registration() -> None:
    global _registered
    _registered += 1


def jobs() -> list[TorchJob]:
    """The attached jobs of this rank, in the order of their registration."""
    thread = rank_thread()
    return [job for job in _jobs if job.alive and job._rank_thread == thread]


def registered() -> int:
    """How many jobs this process has had."""
    return _registered


def failed() -> bool:
    """The process ends with an exception, or another status than 0."""
    return _failed


def set_ride(state: Any) -> None:
    global _ridden
    _ridden = state


def _note_exception(previous: Any) -> Any:
    def hook(kind: Any, value: Any, traceback: Any) -> None:
        global _failed
        _failed = True
        previous(kind, value, traceback)
        if threading.current_thread() is threading.main_thread():
            _leave_if_process_stays()

    return hook


def _leave_if_process_stays() -> None:
    """The main thread has ended with an exception, and other threads keep the process: ranks that wait for this one are told."""
    alive = threading.enumerate()
    if hasattr(sys, "ps1") or all(thread.daemon or thread is threading.main_thread() for thread in alive):
        return  # the program goes on, or _at_exit is next
    for job in jobs():
        with contextlib.suppress(RuntimeError):
            job.close(finished=False)


def _at_exit() -> None:
    # A process that ends well needs its job no more; one that fails leaves it to the restarted one.
    if _jobs and not _C.end_waits():
        return  # a thread is still in a job
    names = [job.name for job in _jobs]
    for job in list(_jobs):
        if names.count(job.name) > 1 and not _failed:
            job.drop()  # its ranks are threads of this process: none may wait here for another
        else:
            with contextlib.suppress(RuntimeError):  # logged
                job.close(finished=not _failed)
    if not _failed:
        wait_for_leaving()


def _note_exit(previous: Any) -> Any:
    def exit(status: Any = None, /) -> Any:
        global _failed
        _failed = _failed or status not in (None, 0)
        previous(status)

    return exit


def _at_exit_of_child() -> None:
    """multiprocessing ends its children without atexit; an exception on its way out is still seen here."""
    global _failed
    _failed = _failed or sys.exc_info()[0] is not None
    _at_exit()


def _forget_in_child() -> None:
    # The job's memory is not mapped in a forked child, and its session is the parent's.
    for job in _jobs:
        engine = job.engine or job._retired
        job.engine = job._retired = None
        if engine is not None:
            engine.lose_memory()
        job.closed = True
    _jobs.clear()


sys.excepthook = _note_exception(sys.excepthook)
sys.exit = _note_exit(sys.exit)
os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(_at_exit)
