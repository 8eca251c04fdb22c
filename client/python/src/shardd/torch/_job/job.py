"""One registered model: its job in the daemon, and the list of those that this process is attached to."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.optim import Optimizer

from shardd.errors import StepAborted, Unavailable
from shardd.torch._job import trainer_state
from shardd.torch._job.committed_jobs import Notes
from shardd.torch._job.description import Description
from shardd.torch._job.initial_values import initial_values, write_values
from shardd.torch._job.job_optimizer import JobOptimizer, stock_optimizers_of
from shardd.torch._job.leaving import leave_beside
from shardd.torch._job.refusals import Refusals
from shardd.torch._job.update_counts import UpdateCounts
from shardd.torch._process import environment
from shardd.torch._process.extension import _C
from shardd.torch._process.progress import Progress
from shardd.torch._process.torch_versions import unsharded_spec
from shardd.torch._ranks.agreement import Meeting
from shardd.torch._ranks.nodes import JobRanks
from shardd.torch._ranks.this_rank import rank_thread
from shardd.torch._torch_optimizers.optimizer_state import OptimizerMemory
from shardd.torch._units.place import Place
from shardd.torch._units.placement import rows_of, tensor_parallel
from shardd.torch._units.state import GivenUp, ShardState
from shardd.torch._units.subclasses import inner_of

__all__ = ["TorchJob", "add", "attached", "before_end", "end_retired", "job_of", "jobs", "lose_all", "registered"]

logger = logging.getLogger("shardd.torch")

attached: list[TorchJob] = []  # of all threads, in the order of their registration
before_end: list[Callable[[TorchJob], None]] = []  # called with each job before it is given up
_registered = 0
_END_IS_KNOWN_S = 0.2  # a call whose daemon is gone may fail so long before the session ends


class TorchJob(Refusals):
    """Attached from construction to ``retire`` or ``close``. Not thread-safe, as the job itself."""

    def __init__(self, root: ShardState, engine: _C.Engine, description: Description, ranks: JobRanks) -> None:
        self.ranks = ranks
        self.engine: _C.Engine | None = engine
        self._retired: _C.Engine | None = None
        self.name: str = description.spec["name"]
        self.before = root.given_up
        self.notes = Notes(self.name, self.before, writes=ranks.local_rank == 0 and environment.of_launcher())
        self.told = False  # the program was told by ``resume`` where it is
        self.step_groups = 1  # of hyperparameters, in a step of the daemon's optimizer
        # Of several: by group of hyperparameters, the number in ``optimizers`` and of its param group; None: nobody's.
        self.owners: list[tuple[int, int] | None] = []
        self.stepped: set[int] = set()  # of several: numbers of those that have stepped since the last commit
        self.closed = False
        # Opens the job that takes this one's place, which an abort has ended for now; None: no other job does.
        self.open_unfrozen: Callable[[], TorchJob] | None = None
        self.resumed_step = 0
        self.replaced_step = 0  # committed by an earlier attempt, and replaced by what the program has loaded
        # Weak, as is the root: the daemon's job lives no longer than the model.
        self._params = [(place.fqn, weakref.ref(place.fsdp_param)) for place in description.params]
        self.places: dict[int, Place] = {}  # by id of the sharded parameter, which lives as long as the job
        # Whether parameters may be written between passes, which ranks then enter together.
        self.passes = not description.spec["config"]["trainersNeverWrite"]
        self.copies: bool = engine.info()["pass_copies"]  # read in passes: shards are not
        # What the program stores into parameters is this process's own until it is handed in, with the next pass or before.
        self.hands_in = self.passes and not self.copies
        self.memory: OptimizerMemory | None = None  # of torch's optimizers
        self.counts: UpdateCounts | None = None  # of the daemon's optimizer
        self._writing: list[int] = []  # who has opened a write, innermost last
        self._root = weakref.ref(root)
        engine.set_root(self._root)  # its calls keep the model while they last
        self._rank_thread = rank_thread()
        self.optimizers: list[weakref.ref[JobOptimizer]] = []  # the daemon's parts of those whose steps it makes
        self.chosen = True  # the program asked for the daemon's optimizer
        unit = root._unit
        assert unit is not None
        self.device: torch.device = unit.device  # what the model computes on
        specs = [unsharded_spec(p.fsdp_param) for p in description.params if tensor_parallel(p.fsdp_param)]
        beside = [spec.mesh for spec in specs if not {*spec.mesh.mesh.flatten().tolist()} <= {*ranks.members}]
        # Tensor parallel: that of the ranks whose jobs have the other local tensors of the parameters.
        self.mesh_beside: Any = beside[0] if beside else None
        self.several_meshes = any(rows_of(p.fsdp_param) is not None for p in description.params)
        self._inner = next((p.fqn for p in description.params if inner_of(p.fsdp_param)), None)

    def root(self) -> ShardState | None:
        return self._root()

    @property
    def alive(self) -> bool:
        return self.engine is not None and bool(self.engine.alive)

    def meeting(self, purpose: str) -> Meeting:
        """Returns a meeting of the job's ranks."""
        return Meeting(purpose, self.ranks.members, self.ranks.rank, self)

    def fsdp_params(self) -> Iterator[tuple[str, Any]]:
        """Yields the parameters by name, and None for those that are gone."""
        return ((fqn, ref()) for fqn, ref in self._params)

    @property
    def on_gpu(self) -> bool:
        return self.device.type != "cpu"

    @property
    def trainers_write(self) -> bool:
        """Whether the program updates its shards between passes: it may write them, and no optimizer of the daemon has them."""
        return not self.optimizers and self.passes

    @property
    def steps_in_daemon(self) -> bool:
        return bool(self.optimizers)

    def live_optimizers(self) -> list[JobOptimizer]:
        """Returns the daemon's parts of optimizers that the program has still."""
        return [optimizer for ref in self.optimizers if (optimizer := ref()) is not None]

    def known_groups(self, optimizer: JobOptimizer) -> int:
        """Counts the param groups of one of its optimizers that the job was made for."""
        if len(self.optimizers) == 1:
            return self.step_groups
        mine = [owner[1] for owner in self.owners if owner and self.optimizers[owner[0]]() is optimizer]
        return max(mine, default=-1) + 1

    # Parameters and what optimizers keep for them.

    def take_object(self, before: Any, now: Any) -> None:
        """Makes ``now``, which the program has put in the place of ``before``, the sharded parameter."""
        place = self.places[id(now)] = self.places.pop(id(before))
        place.fsdp_param().become(now)
        logger.warning(
            'parameter "%s" was replaced by another object; optimizers that have the one before do not train it',
            place.fqn,
        )

    def index_of(self, fsdp_param: Any) -> int:
        """Returns the daemon's number of the parameter, of one in a FlatParameter too."""
        place = self.places[id(fsdp_param.sharded_param)]
        holder = getattr(fsdp_param, "holder", None)
        return place.index if holder is None else place.members[holder.members.index(fsdp_param)][0]

    def restore_optimizers(self, stock: list[Optimizer] | None = None) -> None:
        """Gives torch's optimizers the state that was committed last; ``stock`` are they, where that is known."""
        assert self.engine is not None and self.memory is not None
        if stock is None:
            stock = stock_optimizers_of([place.fsdp_param().sharded_param for place in self.places.values()])
        self.memory.restore(trainer_state.unpack(self.engine.trainer_state())[1], stock)

    def trainer_state(self, optimizers: list[Optimizer]) -> bytes:
        """Returns this rank's trainer state for the commit of a step that these optimizers of torch's have made."""
        assert self.memory is not None
        if self.notes.wanted and self.engine is not None and self.engine.info()["committed_step"] > 0:
            self.notes.committed()
        return trainer_state.pack(self.name, self.memory.pack(optimizers) if self.trainers_write else None)

    def program_state(self) -> Any:
        """Returns what this rank gave to ``ride`` before its last committed step."""
        assert self.engine is not None
        return trainer_state.unpack(self.engine.trainer_state())[0]

    def give_to_trainers(self, why: str) -> bool:
        """Lets the trainers update what the daemon has updated for an optimizer of torch's; False where it does not, or was asked to."""
        if not self.optimizers or self.chosen:
            return False
        for optimizer in self.live_optimizers():
            optimizer.fall_back(why)
        self.leave_to_trainers()
        return True

    def leave_to_trainers(self) -> None:
        """Gives the job up, with values and gradients in this process. The next forward makes one for the trainers' optimizer."""
        root = self.root()
        if root is None or self.engine is None:
            return
        if self.engine.in_forward_backward:
            raise NotImplementedError(
                f'give job "{self.name}" to an optimizer in the trainers: its model is between forward and backward; run the '
                "program with --stock-optimizers (install(optimizers=False))"
            )
        root._register_again(state_is_lost=False)

    def read_update_counts(self) -> None:
        """It is one call to the daemon."""
        assert self.engine is not None and self.counts is not None
        self.counts.read(self.engine)

    def reattach(self) -> None:
        assert self.engine is not None
        self.ranks.publish_address()
        self.engine.reattach()
        if self.trainers_write:
            self.restore_optimizers()
        elif self.live_optimizers():
            try:
                self.read_update_counts()
            except Unavailable as error:  # the daemon died behind the attach: one more abort
                time.sleep(_END_IS_KNOWN_S)
                raise StepAborted(str(error)) from error

    def follow(self) -> None:
        """Takes up what the program keeps for the job after its engine has gone on at another daemon, behind a step."""
        if self.trainers_write:
            self.restore_optimizers()

    # Values written by the program after registration.

    def open_write(self, who: object) -> None:
        """Lets the program write sharded parameters until ``commit_write`` of the same caller; calls nest."""
        if self.engine is None or not self.engine.alive:
            return
        if self.engine.full_params:
            return  # into what summon_full_params shows, which it writes back
        if id(who) in self._writing:  # an exception ended what it began then
            del self._writing[self._writing.index(id(who)) :]
        if self.passes:
            self.engine.begin_writing()
        elif not self._writing:
            root = self.root()
            assert root is not None
            for state in root._state_ctx.all_states:
                state._unit._copy_shards_out()
        self._writing.append(id(who))

    def hand_in_written(self, who: object) -> None:
        """Between the two: lets go of the memory that what was written so far takes in this process."""
        # Over nodes all ranks hand in together, and each loads in pieces of its own.
        if id(who) in self._writing and self.hands_in and self.engine is not None and not self.ranks.several:
            self.engine.hand_in()

    def commit_write(self, who: object) -> None:
        """Makes what was written the next version. All ranks call it, and it waits for them."""
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
            write_values(self.engine, initial_values(self.fsdp_params(), self.ranks), progress)
            self.engine.leave_full_params()
        self.engine.load_memory()
        self._log_load(info["committed_step"])

    def _log_load(self, step: int) -> None:
        logger.warning(
            'job "%s": values that the program loaded replace the parameters of committed step %d', self.name, step
        )

    # The end.

    def given_up(self) -> GivenUp | None:
        """Returns what to know of the job where another one of the model takes its place; None: the program has not begun."""
        assert self.engine is not None
        step = self.engine.info()["committed_step"]
        gradients = any(p is not None and p.sharded_param.grad is not None for _, p in self.fsdp_params())
        if not (self.told or gradients or step > 0 or self.engine.steps > 0):
            return self.before
        names, of_before = (self.before.names, self.before.step) if self.before is not None else ((), 0)
        return GivenUp((*names, self.name), of_before + step)

    def retire(self) -> None:
        """Keeps the parameters in this process. The session ends with the next registration or ``close``: this rank does
        not know whether others are still in the middle of what it did before."""
        self.memory = None
        self.notes.forget()
        root = self.root()
        if root is not None and root.given_up is not None:
            self.notes.pass_on(root.given_up)
        if self.engine is not None:
            self._retired, self.engine = self.engine, None
            self._retired.release()

    def close(self, finished: bool) -> None:
        self.closed = True
        self.end(finished)

    def drop(self) -> None:
        """Gives the job up for a model that the garbage collector has found, wherever the program and other ranks are."""
        self.closed = True
        engine = self._give_up()
        if engine is not None:  # else it was left already, perhaps to a restart
            self.notes.forget()
            leave_beside(engine)

    def leave_to_exit(self, awaits_commit: bool) -> None:
        """Gives the job up at the end of the interpreter: with exit status 0 it is finished, with any other kept.

        ``awaits_commit``: waits for the last step's, of which somebody is told here alone.
        """
        self.closed = True
        engine = self._give_up()
        if engine is None:
            return
        try:
            if awaits_commit:
                engine.wait_for_commit()
        except RuntimeError as error:
            logger.error('job "%s": its last step was not committed: %s', self.name, error)
        try:
            engine.leave_to_exit(self.name, self.notes.files())
        except RuntimeError as error:
            logger.debug('close job "%s": %s', self.name, error)  # it was over already

    def _give_up(self) -> _C.Engine | None:
        if self.alive:
            for look in before_end:
                look(self)
        engine = self.engine or self._retired
        self.engine = self._retired = self.memory = None
        if self in attached:
            attached.remove(self)
        return engine

    def end(self, finished: bool) -> None:
        """``finished``: this rank needs the job no more, and has waited for its last commit."""
        engine = self._give_up()
        if engine is None:
            return
        lost: RuntimeError | None = None
        try:
            if finished:
                engine.close_step()
                engine.wait_for_commit()
                self.notes.forget()
        except RuntimeError as error:
            lost = error
        try:
            engine.detach(finished)
        except RuntimeError as error:
            logger.debug('close job "%s": %s', self.name, error)  # it was over already
        if lost is not None:  # no call of the program's has said so
            logger.error('job "%s": its last step was not committed: %s', self.name, lost)
            raise lost


def job_of(state: ShardState) -> TorchJob | None:
    """The job of the model that the state's modules are part of; None before registration."""
    return cast("TorchJob | None", state._job)


def add(job: TorchJob) -> None:
    """Adds a job that is attached and has its values."""
    global _registered
    attached.append(job)
    _registered += 1


def jobs() -> list[TorchJob]:
    """Returns the attached jobs of this rank, in the order of their registration."""
    thread = rank_thread()
    return [job for job in attached if job.alive and job._rank_thread == thread]


def registered() -> int:
    """Counts the jobs that this process has had."""
    return _registered


def end_retired(root: ShardState) -> None:
    """Ends the sessions of the model's jobs before the one that it has now."""
    for before in [job for job in attached if job._retired is not None and job.root() is root]:
        before.end(finished=True)


def lose_all() -> None:
    """Forgets all jobs in a forked child, where their memory is not mapped and the sessions are the parent's."""
    for job in attached:
        engine = job.engine or job._retired
        job.engine = job._retired = None
        if engine is not None:
            engine.lose_memory()
        job.closed = True
    attached.clear()
