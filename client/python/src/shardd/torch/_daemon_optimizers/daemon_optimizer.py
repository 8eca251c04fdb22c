"""What the daemon's optimizers share: registration, the step, and state that is shown, saved and loaded."""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from shardd.torch._daemon_optimizers.loaded_state import Incoming, ParamState, param_state
from shardd.torch._daemon_optimizers.sharded_params import name_of, roots_with, sharded_ids
from shardd.torch._job.job import TorchJob, job_of, jobs
from shardd.torch._job.job_optimizer import JobOptimizer
from shardd.torch._job.write_mode import edits_of
from shardd.torch._torch_optimizers.optimizer_state import in_form_of
from shardd.torch._units.place import Place, local_of

logger = logging.getLogger("shardd.torch")


def _cloned(entry: dict[str, Any]) -> dict[str, Any]:
    with torch.no_grad():
        return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in entry.items()}


class _State(defaultdict[Any, dict[str, Any]]):
    """``Optimizer.state``, which asks for the job where somebody asks whether there is any.

    torch's ``get_optimizer_state_dict`` does, and makes a step of zeros where there is none. Of a registered model there
    is some, even where it has no tensors (SGD without momentum).
    """

    def __init__(self, optimizer: DaemonOptimizer) -> None:
        super().__init__(dict)
        self._optimizer = weakref.ref(optimizer)  # one that the program drops is gone at once

    def __bool__(self) -> bool:
        optimizer = self._optimizer()
        if optimizer is None:
            return len(self) > 0
        if len(self) == 0 and not optimizer._adopted and torch.distributed.is_initialized():
            optimizer._register()
        optimizer._shows_unused = True
        return len(self) > 0 or optimizer._adopted

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())


class DaemonOptimizer(JobOptimizer):
    """The base class of Adam, AdamW and SGD.

    ``in_place_edits`` (default True; the environment variable ``SHARDD_IN_PLACE_EDITS=0`` makes it False): parameters may
    be written between passes, by anything, as with torch's fully_shard (clamping, averages around an evaluation,
    ``load_state_dict``, ``nn.init``). Ranks then begin each pass together, which costs one exchange of messages a step.
    With False they do not wait for each other in forward, and a write into a parameter is an error with its name;
    ``load_state_dict`` works. For models on GPUs, where True costs a copy of the parameters in each pass and its memory,
    the default is False.
    """

    _state_names: tuple[str, ...] = ()
    _counts_updates = True  # keeps "step"
    _incoming: Incoming | None = None  # inside load_state_dict

    def __init__(self, params: Any, defaults: dict[str, Any], in_place_edits: bool | None) -> None:
        self.in_place_edits, self._edits_said = edits_of(in_place_edits)
        self._building = True
        self._adopted = False  # the state of a job is shown
        self._shows_unused = False  # state that no update has written, in the next state_dict
        self._update_counts: dict[Any, list[torch.Tensor]] = {}  # by parameter: scalars, which follow the steps
        super().__init__(params, defaults)
        self._building = False
        self.state = _State(self)
        self.last_grad_norm: float | None = None
        self.last_step_skipped = False
        self._check_params()
        self._note_built()

    def _allows_edits(self, on_gpu: bool) -> bool:
        return self.in_place_edits and (self._edits_said or not on_gpu)

    def _params(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"]]

    def _check_params(self) -> None:
        roots = roots_with(self._params())
        if not roots:
            raise ValueError(
                f"{type(self).__name__}: none of its parameters belongs to a module that shardd.torch.fully_shard was "
                "applied to; apply it first, then build the optimizer"
            )
        sharded = sharded_ids()
        for param in self._params():
            if param.requires_grad and id(param) not in sharded:
                raise NotImplementedError(
                    f"{type(self).__name__}: parameter {name_of(param)} of shape {tuple(param.shape)} is not sharded "
                    "(ignored, or of a module outside of fully_shard), so the daemon cannot update it; give it to an optimizer of "
                    "torch.optim"
                )
            if param.requires_grad and param.dtype == torch.float64:
                raise NotImplementedError(
                    f"{type(self).__name__}: parameter {name_of(param)} is float64, which the daemon's optimizers do not "
                    "update (they compute in fp32); give it to an optimizer of torch.optim"
                )
        for root in roots:
            job = job_of(root)
            if job is not None and job.engine is not None and job.optimizer is not None and job.optimizer() is self:
                job.engine.ask_extension()  # with the next forward
            else:
                root._register_again()

    def _refuse(self, group: Mapping[str, Any]) -> None:
        """Raises where the daemon's optimizer does not do what a param group asks for."""
        for flag in ("amsgrad", "maximize", "differentiable"):
            if group.get(flag):
                raise NotImplementedError(
                    f"{type(self).__name__}: {flag}=True is not served by the daemon's optimizer; use torch.optim's"
                )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._refuse(param_group)
        super().add_param_group(param_group)
        if not self._building:
            try:
                self._check_params()
            except BaseException:
                self.param_groups.pop()
                raise

    def _hyperparameters(self) -> list[dict[str, float]]:
        raise NotImplementedError

    def _jobs(self) -> list[TorchJob]:
        return [job for job in jobs() if job.optimizer is not None and job.optimizer() is self]

    def _register(self) -> list[TorchJob]:
        for root in roots_with(self._params()):
            root._ensure_registered()
        return self._jobs()

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, max_grad_norm: float = 0.0, loss_scale: float = 0.0
    ) -> Any:
        """Makes one step of every rank and returns when it is committed.

        ``max_grad_norm``: the daemon clips by the global norm, without a collective of the trainers; ``last_grad_norm`` is
        then the norm before clipping. ``loss_scale``: gradients are those of the loss times this, and are divided by it; a
        gradient that is not finite on any rank then skips the update on all, and ``last_step_skipped`` says so.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._refuse(group)  # a program may have changed it since
        groups = self._hyperparameters()
        self._shows_unused = False
        for job in self._jobs() or self._register():
            job = self._with_gradients_of_new_groups(job)
            engine = job.engine
            assert engine is not None
            # Groups that one of the two does not have yet have nothing to step: see above.
            fitting = groups[: job.step_groups] + groups[-1:] * (job.step_groups - len(groups))
            result = engine.step(fitting, float(max_grad_norm), float(loss_scale), job.trainer_state([]))
            self.last_grad_norm = result["grad_norm"] if max_grad_norm > 0 else None
            self.last_step_skipped = result["skipped"]
        return loss

    def _with_gradients_of_new_groups(self, job: TorchJob) -> TorchJob:
        """Lets a param group that was added after the backward step with the others, if it has gradients."""
        late = [p for group in self.param_groups[job.step_groups :] for p in group["params"] if id(p) in job.places]
        root, engine = job.root(), job.engine
        assert engine is not None

        def has_gradient(param: Any) -> bool:  # a piece without elements does not show it
            return param.grad is not None or (
                not local_of(param).numel() and engine.has_gradient(job.places[id(param)].index)
            )

        if root is None or not any(has_gradient(p) for p in late):
            return job
        root._ensure_registered(unfreeze=True)
        successor = job_of(root)
        assert successor is not None
        return successor

    # State: DTensors over the daemon's memory, read-only.

    def _adopt_job(self, job: TorchJob, resumed: bool) -> None:
        """Shows the job's optimizer state as ``state``: moments, and how many updates they have had."""
        engine = job.engine
        assert engine is not None
        counts = torch.zeros(engine.info()["param_count"])
        job.counts = counts
        job.read_update_counts()
        engine.set_update_counts(counts)
        states = self._state_names if self._has_states() else ()
        engine.set_updated([job.places[id(p)].index for p in self._params() if id(p) in job.places])
        replaced = False
        for param in self._params():
            place = job.places.get(id(param))
            if place is None or not place.trainable:
                continue
            replaced = replaced or bool(self.state.get(param))
            entry: dict[str, Any] = {}
            self._update_counts[param] = [counts[index] for index in place.indices()]
            if self._counts_updates:
                entry["step"] = counts[place.index]
            for number, name in enumerate(states):
                rows = torch.empty(local_of(param).shape, dtype=torch.float32, device=local_of(param).device)
                engine.adopt_state(place.index, number, rows, False)
                entry[name] = in_form_of(place.fsdp_param(), rows)
            if entry:
                self.state[param] = entry
        self._adopted = True
        if resumed and replaced:
            logger.warning(
                'job "%s" goes on from its committed optimizer state; what was loaded before the model was registered is '
                "not used",
                job.name,
            )

    def _has_states(self) -> bool:
        return bool(self._state_names)

    def _unused(self, param: Any) -> bool:
        """Whether the job has state for the parameter that no update has written."""
        counts = self._update_counts.get(param)
        return counts is not None and not any(count.item() for count in counts)

    def state_dict(self) -> dict[str, Any]:
        """Returns what torch's does. Moments are copies: a program may load into what this gives, and the daemon's memory is not its own to
        write.

        ``step`` of a ``FlatParameter`` is one for each parameter in it where they differ: the daemon does not update what
        got no gradient.
        """
        result = self._shown_state_dict()
        result["state"] = {number: _cloned(entry) for number, entry in result["state"].items()}
        return result

    def _shown_state_dict(self) -> dict[str, Any]:
        """As ``state_dict``; moments are DTensors over the daemon's memory, to be read alone."""
        for job in self._jobs():
            job.read_update_counts()
        shown = self.state
        # torch's SGD has no entry before the first update, which then is the gradient whatever the dampening. Only
        # get_optimizer_state_dict, which asks for state first, wants one to load into; torch makes it zeros there too.
        if not self._counts_updates and not self._shows_unused:
            self.state = defaultdict(dict, {k: v for k, v in shown.items() if not self._unused(k)})
        self._shows_unused = False
        try:
            result = super().state_dict()
        finally:
            self.state = shown
        for number, param in enumerate(dict.fromkeys(self._params())):
            counts = self._update_counts.get(param, [])
            if self._counts_updates and len({count.item() for count in counts}) > 1 and number in result["state"]:
                result["state"][number] = {**result["state"][number], "step": torch.stack(counts)}
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads as torch's does. Once the model is registered, all ranks call it together, and what is loaded is committed.

        What cannot be loaded raises before anything has changed, and on all ranks where it cannot be on one of them.
        """
        for job in self._jobs():
            job.retire_for_load(f"{type(self).__name__}.load_state_dict")
        meetings = [job.meeting("load") for job in self._jobs()]
        agreed = False

        def check(_: Optimizer, final: dict[str, Any]) -> dict[str, Any]:  # the last of the pre-hooks
            nonlocal agreed
            self._incoming = self._check_loaded(final)
            agreed = True
            for meeting in meetings:
                meeting.agree(f"{type(self).__name__}.load_state_dict")
            return {**final, "state": {}}

        handle = self.register_load_state_dict_pre_hook(check)
        try:
            super().load_state_dict(state_dict)
        except Exception as error:
            if not agreed:
                for meeting in meetings:
                    meeting.agree(f"{type(self).__name__}.load_state_dict", error)
            raise
        finally:
            handle.remove()
            self._incoming = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        incoming = self._incoming
        if incoming is None:
            super().__setstate__(state)
            return
        super().__setstate__({**state, "state": self.state})
        for param in self._params():
            if param not in incoming.taken:
                self.state.pop(param, None)
                self._update_counts.pop(param, None)
        self.state.update(incoming.kept)
        for job, params in incoming.jobs:
            engine = job.engine
            assert engine is not None
            engine.enter_full_params(True)
            self._write(job, params)
            engine.commit()
            engine.leave_full_params()
            job.read_update_counts()

    def _check_loaded(self, saved: dict[str, Any]) -> Incoming:
        """Checks what a state dict has for the jobs, and what is to be kept for models that are not registered yet."""
        for group in saved["param_groups"]:
            self._refuse(group)
        params = dict(zip([i for group in saved["param_groups"] for i in group["params"]], self._params()))
        loaded = {params.get(key, key): entry for key, entry in saved["state"].items()}
        incoming = Incoming()
        for job in self._jobs():
            found = [
                (param, place)
                for param in self._params()
                if (place := job.places.get(id(param))) is not None and place.trainable
            ]
            states = [self._param_state(param, place, loaded.get(param, {})) for param, place in found]
            incoming.jobs.append((job, states))  # zeros for what the state dict does not have
            incoming.taken.update(param for param, _ in found)
        incoming.keep(loaded)
        return incoming

    def _param_state(self, param: Any, place: Place, entry: Any) -> ParamState:
        names = self._state_names if self._has_states() else ()
        return param_state(param, place, entry, names, self._counts_updates)

    def _write_loaded(self, job: TorchJob) -> None:
        """Gives a new job what was loaded before; it is in force with the next commit of parameters."""
        states = [
            self._param_state(param, place, self.state[param])
            for param in self._params()
            if (place := job.places.get(id(param))) is not None
            and place.trainable
            and self.state.get(param)
            and not self._unused(param)
        ]
        self._write(job, states)

    def _write(self, job: TorchJob, states: list[ParamState]) -> None:
        engine = job.engine
        assert engine is not None
        for state in states:
            for number, rows in enumerate(state.rows):
                for index, first, part in state.place.parts(rows):
                    if part.numel():
                        engine.write_optimizer_state(index, number, part, first)
            for index, count in zip(state.place.indices(), state.counts):
                engine.write_update_count(index, count)
