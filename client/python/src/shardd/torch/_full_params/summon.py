"""``summon_full_params``: full parameters and gradients as stored, read and edited by all ranks together.

What a rank sees inside the context are copies, in the parameters' own dtype; other ranks and the job do not see them
change. With ``writeback`` they are committed where the context ends, as one version and journaled: a rank that dies in it
leaves the job with all of the edit or with nothing of it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardd.torch._full_params.forms import FullParam, full_param
from shardd.torch._job.job import TorchJob, job_of
from shardd.torch._ranks.gather import assemble
from shardd.torch._units.state import ShardState, state_of

__all__ = ["summon_full_params"]


def _states_of(module: nn.Module, recurse: bool) -> list[ShardState]:
    modules = module.modules() if recurse else [module]
    states = [state for inner in modules if (state := state_of(inner)) is not None]
    return list(dict.fromkeys(states))


def _refuse_inside(job: TorchJob) -> None:
    assert job.engine is not None
    if job.engine.full_params:
        raise AssertionError(
            f'summon_full_params of job "{job.name}": Cannot manually unshard parameters when already unsharding '
            "parameters; leave the context that is open first"
        )
    if job.engine.in_forward_backward:
        raise AssertionError(
            f'summon_full_params of job "{job.name}": Cannot manually unshard parameters during forward/backward; call '
            "it between passes"
        )


class FullParameters:
    """Full parameters of one job, from ``enter`` to ``leave``. All ranks of the job call both."""

    def __init__(
        self, job: TorchJob, params: list[FullParam], writeback: bool, scope: tuple[int, bool], **flags: bool
    ) -> None:
        assert job.engine is not None
        self._job = job
        self._engine = job.engine
        # No node has whole parameters: they are gathered from what ranks hold, one at a time.
        self._gathers = job.ranks.cut
        self._rank = dist.get_rank(params[0].group) if self._gathers and params else job.engine.info()["rank"]
        self._params = params
        self._writeback = writeback
        self._group, self._recurse = scope
        self._device = job.device
        self._rank0_only = flags["rank0_only"]
        self._offload = flags["offload_to_cpu"]
        # Alike on all ranks: it goes by the plan.
        self._grads = flags["with_grads"] and any(param.trainable for param in params)
        self._had_grad: set[int] = set()

    def _enter(self, writeback: bool) -> None:
        self._engine.enter_full_params(
            writeback,
            group=self._group,
            recurse=self._recurse,
            rank0_only=self._rank0_only,
            offload_to_cpu=self._offload and self._device.type == "cpu",  # a GPU's are copied there here
            with_grads=self._grads,
            of_shards=self._gathers and not writeback,
        )

    @property
    def shows(self) -> bool:
        """This rank's program sees them."""
        return self._rank == 0 or not self._rank0_only

    def _meet(self) -> None:
        """All ranks have come for the same: what they gather is paired by its place. Where one has died, all raise."""
        names = [param.fqn for param in self._params]
        digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
        flags = f"recurse={self._recurse}, rank0_only={self._rank0_only}, writeback={self._writeback}"
        asked = f"{len(names)} parameters from {names[0]} to {names[-1]} ({digest}), group {self._group}, {flags}"
        self._job.meeting("summon").agree("summon_full_params", part=asked)

    def enter(self) -> None:
        if self._gathers:
            self._meet()
        if self._grads:
            self._engine.settle_gradients()
        self._enter(writeback=False)
        shown: list[FullParam] = []
        try:
            values = self._gathered() if self._gathers else self._copied()
            for param, value in zip(self._params, values):  # on ranks that are shown none there are none
                param.show(value, self._copy_grad(param))
                shown.append(param)
        except BaseException:
            for param in shown:
                param.hide()
            self._engine.leave_full_params()
            raise

    def _copied(self) -> Iterator[torch.Tensor]:
        for param in self._params if self.shows else []:
            value = param.empty(torch.device("cpu") if self._offload else self._device)
            if not self._engine.copy_full_parameter(param.index, value):
                raise RuntimeError(f'summon_full_params: "{param.fqn}" is not among what was entered')
            yield value

    def _gathered(self) -> Iterator[torch.Tensor]:
        """Collective. Each rank lets go of what it is not shown before the next one comes."""
        if not self._params:
            return
        group = self._params[0].group
        pieces = [param.piece() for param in self._params]  # as they are before the first is shown
        every: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(every, [(first, held.numel()) for first, held in pieces], group=group)
        only = 0 if self._rank0_only else None
        for number, (param, (_, held)) in enumerate(zip(self._params, pieces)):
            ranges = [of_rank[number] for of_rank in every]
            whole = assemble(held, ranges, [param.shape.numel()], param.dtype, group, only)
            if whole is not None:
                value = param.empty(torch.device("cpu") if self._offload else self._device)
                value.copy_(param.from_job_order(whole))
                yield value

    def _copy_grad(self, param: FullParam) -> torch.Tensor | None:
        if not self._grads or not param.trainable:
            return None
        grad = torch.empty(param.shape, dtype=torch.float32, device="cpu" if self._offload else self._device)
        if not self._engine.copy_full_gradient(param.index, grad):
            return None
        self._had_grad.add(param.index)
        return grad

    def leave(self) -> None:
        left = [(param, *param.hide()) for param in self._params] if self.shows else []
        self._engine.leave_full_params()
        if not self._writeback:
            return
        # What is written shows at once to those who still read, so reading is over everywhere before.
        self._enter(writeback=True)
        wrong: list[str] = []
        for param, value, grad in left:
            self._write(param, value, grad, wrong)
        self._engine.commit()
        self._engine.leave_full_params()
        if self._grads:
            for param, _, grad in left:
                self._settle_grad(param, grad)
        if wrong:
            raise ValueError("; ".join(wrong))

    def _write(self, param: FullParam, value: torch.Tensor, grad: torch.Tensor | None, wrong: list[str]) -> None:
        held = self._engine.shard_range(param.index)
        for tensor, what in ((value, "parameter"), (grad, "gradient")):
            if tensor is None or (what == "gradient" and not self._writes_grad(param)):
                continue
            if tensor.shape != param.shape:
                wrong.append(
                    f'summon_full_params: {what} of "{param.fqn}" was left with another shape (got {tuple(tensor.shape)}, '
                    f"want {tuple(param.shape)}); it is not written back"
                )
                continue
            first, numel = (held["first"], held["numel"]) if what == "parameter" else _gradient_rows(held)
            if self._rank0_only:
                first, numel = 0, param.shape.numel()
            elif held["replica_index"] > 0:
                continue  # a rank of the first replica writes the same
            rows = param.in_job_order(tensor.detach())[first : first + numel]
            if what == "parameter":
                self._engine.write(param.index, rows.to(param.dtype), first)
            else:
                self._engine.write_gradient(param.index, rows, first)

    def _writes_grad(self, param: FullParam) -> bool:
        # On the other ranks nothing says that rank 0 has made one.
        return self._grads and param.trainable and (not self._rank0_only or param.index in self._had_grad)

    def _settle_grad(self, param: FullParam, grad: torch.Tensor | None) -> None:
        if grad is not None and grad.shape == param.shape and self._writes_grad(param):
            self._engine.take_gradient(param.index)
        elif grad is None and param.index in self._had_grad:
            param.drop_grad()


def _gradient_rows(held: dict[str, int]) -> tuple[int, int]:
    return held["gradient_first"], held["gradient_numel"]


def _scope_of(module: nn.Module, job: TorchJob, recurse: bool) -> tuple[int, bool]:
    """Returns the daemon's number of the module's group, and whether groups beneath it are meant too.

    Where no one group is the module's it is the whole model.
    """
    state = state_of(module)
    if state is not None and state._unit is not None and state is not job.root() and len(state._modules) == 1:
        assert job.engine is not None
        group = job.engine.find_group(state._unit._module_fqn or "(root)")
        if group >= 0:
            return group, recurse
    return -1, True


@contextlib.contextmanager
def _marked(states: list[ShardState], shows: bool) -> Iterator[None]:
    """Wrappers say what is under way, and whether this rank's program sees full parameters."""
    modules = [module for state in states for module in state._modules]
    for module in modules:
        module.__dict__["_shows_full_params"] = shows
    try:
        yield
    finally:
        for module in modules:
            module.__dict__.pop("_shows_full_params", None)


@contextlib.contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Inside, the parameters of ``module`` (and of those beneath it, with ``recurse``) are whole, plain and as stored.

    All ranks of the job enter and leave it, outside of forward and backward; a forward inside is an error, and so is
    another call inside. Any module will do; what in it is not sharded is left alone.

    writeback: what a rank leaves in the part of each parameter that is its shard becomes everybody's, edits inside a body
        that raises included. False: edits are dropped. Nodes that are replicas must be left with the same values.
    rank0_only: only rank 0 is given full parameters, the others hold their shards. With ``writeback`` all of what rank 0
        leaves becomes everybody's, which PyTorch refuses.
    offload_to_cpu: copies are in host memory; on CPU devices they are anyway.
    with_grads: ``.grad`` is whole too, as reduced so far, in its dtype (None: there is none), and written back alike. A
        gradient that the program sets to None is dropped; one that it makes where there was none counts, but for
        ``rank0_only``.

    AssertionError: inside forward or backward, or inside another such context of the model. ValueError, after what fits
    was committed: a parameter was left with another shape.
    """
    states = _states_of(module, recurse)
    for state in states:
        with torch.enable_grad():  # no sign that the model is only evaluated
            state._ensure_registered()
    jobs: dict[int, tuple[TorchJob, list[Any]]] = {}
    for state in states:
        job = job_of(state)
        if job is None:
            continue  # a model without parameters
        assert state._unit is not None
        _refuse_inside(job)
        if with_grads:
            job.refuse_where_cut("summon_full_params with_grads", "read .grad of the shards, or its full_tensor()")
        if writeback and (rank0_only or with_grads):
            job.refuse_on_nodes(
                "summon_full_params with writeback and rank0_only or with_grads", "edit on all ranks, and no gradients"
            )
        params = jobs.setdefault(id(job), (job, []))[1]
        params.extend(full_param(job, fsdp_param) for fsdp_param in state._unit.fsdp_params)
    shows = True
    with contextlib.ExitStack() as stack:
        for job, params in jobs.values():
            if not params:
                continue
            full = FullParameters(
                job,
                params,
                writeback,
                _scope_of(module, job, recurse),
                rank0_only=rank0_only,
                offload_to_cpu=offload_to_cpu,
                with_grads=with_grads,
            )
            full.enter()
            stack.callback(full.leave)
            shows = shows and full.shows
        with _marked(states, shows):
            yield
