"""The daemon's part of an optimizer: state that is shown, saved and loaded.

The classes of ``shardd.torch.optim`` have it from the beginning. An optimizer of torch's gets it where its model is registered
(choice.py), and then the program sees what torch's would show: ``chosen`` is False, and only what has been updated has state.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardd.torch._daemon_optimizers.kinds import Kind, foreign_state, refusal, whole_states
from shardd.torch._daemon_optimizers.loaded_state import Incoming, ParamState, param_state
from shardd.torch._daemon_optimizers.sharded_params import roots_with
from shardd.torch._job.job import TorchJob, jobs
from shardd.torch._job.job_optimizer import JobOptimizer
from shardd.torch._job.update_counts import UpdateCounts
from shardd.torch._torch_optimizers.optimizer_state import in_form_of
from shardd.torch._units.place import Place, local_of

__all__ = ["DaemonState", "Plain", "cloned"]

logger = logging.getLogger("shardd.torch")


@dataclass(frozen=True)
class Plain:
    """What torch's class of the optimizer does itself."""

    step: Callable[[Any], Any]
    state_dict: Callable[[Any], dict[str, Any]]
    load_state_dict: Callable[[Any, dict[str, Any]], None]
    set_state: Callable[[Any, dict[str, Any]], None]


def cloned(entry: dict[str, Any]) -> dict[str, Any]:
    with torch.no_grad():
        return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in entry.items()}


class DaemonState(JobOptimizer):
    """One optimizer's, without what steps it. Not thread-safe, as torch's are not."""

    def __init__(self, optimizer: Optimizer, kind: Kind, plain: Plain, chosen: bool) -> None:
        super().__init__(optimizer)
        self.chosen = chosen
        self.adopted = False  # the state of a job is shown
        self.shows_unused = False  # state that no update has written, in the next state_dict
        self._kind, self._plain = kind, plain
        self.kind = kind.name
        self._incoming: Incoming | None = None  # inside load_state_dict
        self._update_counts: dict[Any, list[torch.Tensor]] = {}  # by parameter: scalars, which follow the steps
        self._entries: dict[Any, dict[str, Any]] = {}  # by parameter: its state, which may not be shown yet
        self._shown: dict[Any, list[tuple[str, Any]]] = {}  # what is in ``state``

    def fall_back_now(self, why: str) -> None:
        """As ``fall_back``; the step or load that is being made is torch's already.

        Raises, and nothing has changed, where torch's optimizer cannot go on, or another one of the model.
        """
        raise NotImplementedError

    def params(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"]]

    def refuse(self, group: Mapping[str, Any]) -> None:
        """Raises where the daemon's optimizer does not do what a param group asks for."""
        why = refusal(self._kind, group)
        if why:
            raise NotImplementedError(f"{self.name}: {why}; use torch.optim's")

    @property
    def of_kind(self) -> Kind:
        return self._kind

    def needs_momentum(self) -> bool:
        return bool(self._kind.momentum_state) and any(group.get("momentum", 0) > 0 for group in self.param_groups)

    def _has_states(self) -> bool:
        return self._kind.counts_updates or bool(self._names())

    def _names(self) -> tuple[str, ...]:
        """Returns the state that each parameter has in the job."""
        momentum = self._kind.momentum_state
        return self._kind.state_names + ((momentum,) if momentum and self.needs_momentum() else ())

    def _whole_states(self, place: Place) -> dict[str, tuple[int, ...]]:
        """Returns what each rank has whole, in memory that all of them read, with its shape."""
        return whole_states(self._kind, place.fsdp_param()._orig_size) if self._kind.updates_whole else {}

    def _has_state_of(self, param: Any) -> bool:
        """Where a rank has no element of a plain tensor, torch's optimizers have no state of it: there is no gradient."""
        return self.chosen or isinstance(param, DTensor) or param.numel() > 0

    def _state_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Returns the state of a param group's parameters: torch's has no momentum buffer in a group without momentum."""
        if not self.chosen and group.get("momentum", 1) == 0:
            return self._kind.state_names
        return self._names()

    def _shows_unused(self) -> bool:
        """Whether state that no update has written is shown, which is zeros in the daemon whatever a first update finds."""
        if any(group.get("initial_accumulator_value", 0) != 0 for group in self.param_groups):
            return False
        return self.chosen or self._kind.starts_with_state

    def _is_initial(self, entry: Mapping[str, Any]) -> bool:
        """Whether state is what torch's optimizer has been built with. Other state of step 0 raises: the first update writes over it."""
        if not self._kind.starts_with_state or float(torch.as_tensor(entry.get("step", 0)).max()) != 0:
            return False
        built = {float(torch.tensor(float(g.get("initial_accumulator_value", 0)))) for g in self.param_groups}  # fp32
        for name in self._kind.state_names:
            values = local_of(entry[name]) if name in entry else torch.empty(0)
            if values.numel() and (float(values.min()) != float(values.max()) or float(values.min()) not in built):
                raise NotImplementedError(
                    f"load optimizer state: {name} of a parameter without a step is not initial_accumulator_value (got "
                    f"{float(values.min())} to {float(values.max())}, want one of {sorted(built)}), and the daemon's first update "
                    "begins with that; load state of steps, or run the program with --stock-optimizers"
                )
        return True

    def jobs(self) -> list[TorchJob]:
        return [job for job in jobs() if any(ref() is self for ref in job.optimizers)]

    def register(self) -> list[TorchJob]:
        for root in roots_with(self.params()):
            root._ensure_registered()
        return self.jobs()

    # State: DTensors over the daemon's memory, read-only.

    def adopt_job(self, job: TorchJob, resumed: bool) -> None:
        engine = job.engine
        assert engine is not None
        if job.counts is None:
            job.counts = UpdateCounts(engine)
        counts = job.counts.values
        job.read_update_counts()
        engine.set_updated(self._indices(job))
        replaced = False
        state = self.optimizer.state
        for group in self.param_groups:
            for param in group["params"]:
                place = job.places.get(id(param))
                if place is None or not place.trainable or not self._has_state_of(param):
                    continue
                replaced = replaced or (bool(state.get(param)) and not self._is_initial(state[param]))
                self._update_counts[param] = [counts[index] for index in place.indices()]
                entry: dict[str, Any] = {"step": counts[place.index]} if self._kind.counts_updates else {}
                wholes = self._whole_states(place)
                for number, (name, shape) in enumerate(wholes.items()):
                    entry[name] = torch.empty(shape, dtype=torch.float32)
                    engine.adopt_state(place.index, number, entry[name], False, True)
                for number, name in enumerate(() if wholes else self._state_names(group)):
                    rows = torch.empty(local_of(param).shape, dtype=torch.float32, device=local_of(param).device)
                    engine.adopt_state(place.index, number, rows, False)
                    entry[name] = in_form_of(place.fsdp_param(), rows)
                order = [name for name in self._kind.shown_order if name in entry]
                entry = {name: entry[name] for name in order} or entry
                self._entries.pop(param, None)
                self._shown.pop(param, None)
                if entry:
                    state.pop(param, None)
                    self._entries[param] = entry
        self.adopted = True
        self._show_updated()
        if resumed and replaced:
            logger.warning(
                'job "%s" goes on from its committed optimizer state; what was loaded before the model was registered is '
                "not used",
                job.name,
            )

    def _indices(self, job: TorchJob) -> list[int]:
        """Returns the daemon's numbers of the optimizer's parameters."""
        return [job.places[id(p)].index for p in self.params() if id(p) in job.places]

    def _state_was_changed(self) -> bool:
        state = self.optimizer.state
        for param, items in self._shown.items():
            now = state.get(param, {})
            if len(now) != len(items) or any(now.get(name) is not value for name, value in items):
                return True
        # Stores into ``step``, which the daemon would not read.
        shows_counts = self._kind.counts_updates
        return shows_counts and any(job.counts is not None and job.counts.were_edited() for job in self.jobs())

    def _show_updated(self) -> None:
        """Puts into ``state`` what belongs there: all of a job, or as torch's own what has been updated."""
        state = self.optimizer.state
        if len(state) < len(self._entries):
            for param, entry in self._entries.items():
                if param not in state and (self._shows_unused() or not self.unused(param)):
                    state[param] = entry
                    self._shown[param] = list(entry.items())

    def unused(self, param: Any) -> bool:
        """Whether the job has state for the parameter that no update has written."""
        counts = self._update_counts.get(param)
        return counts is not None and not any(count.item() for count in counts)

    def state_dict(self) -> dict[str, Any]:
        return self._state_dict(copies=True)

    def shown_state_dict(self) -> dict[str, Any]:
        """As ``state_dict``; moments are DTensors over the daemon's memory, to be read alone."""
        return self._state_dict(copies=False)

    def _state_dict(self, copies: bool) -> dict[str, Any]:
        optimizer = self.optimizer
        changed = not self.chosen and self._state_was_changed()  # with the next step it is torch's

        def complete(
            _: Optimizer, result: dict[str, Any]
        ) -> None:  # the first of the post-hooks, which may change the shape
            entries = result["state"]
            for number, param in enumerate(() if changed else dict.fromkeys(self.params())):
                counts = self._update_counts.get(param, [])
                if self._kind.counts_updates and len({count.item() for count in counts}) > 1 and number in entries:
                    entries[number] = {**entries[number], "step": torch.stack(counts)}
            if copies:
                result["state"] = {
                    k: cloned(entry) if isinstance(entry, dict) else entry for k, entry in entries.items()
                }

        handle = optimizer.register_state_dict_post_hook(complete, prepend=True)
        try:
            return self._plain.state_dict(optimizer) if changed else self._of_followed_state()
        finally:
            handle.remove()

    def _of_followed_state(self) -> dict[str, Any]:
        optimizer = self.optimizer
        for job in self.jobs():
            job.read_update_counts()
        self._show_updated()
        shown = optimizer.state
        # torch's SGD has no entry before the first update, which then is the gradient whatever the dampening. Only
        # get_optimizer_state_dict, which asks for state first, wants one to load into; torch makes it zeros there too.
        if not self._kind.counts_updates and not self.shows_unused:
            optimizer.state = defaultdict(dict, {k: v for k, v in shown.items() if not self.unused(k)})
        self.shows_unused = False
        try:
            return self._plain.state_dict(optimizer)
        finally:
            optimizer.state = shown

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        optimizer, name = self.optimizer, self.name
        meetings = [job.meeting("load") for job in self.jobs()]
        agreed = not self.chosen and not meetings

        def check(_: Optimizer, final: dict[str, Any]) -> dict[str, Any]:  # the last of the pre-hooks
            nonlocal agreed
            if not self.chosen:
                why = self._why_not_loaded(final)
                if why:
                    agreed = True  # alike on all ranks
                    self.fall_back_now(f"a state dict with {why}")
                if why or not meetings:
                    return final
            self._incoming = self._check_loaded(final)
            agreed = True
            for meeting in meetings:
                meeting.agree(f"{name}.load_state_dict")
            return {**final, "state": {}}

        handle = optimizer.register_load_state_dict_pre_hook(check)
        try:
            self._plain.load_state_dict(optimizer, state_dict)
        except Exception as error:
            if not agreed:
                for meeting in meetings:
                    meeting.agree(f"{name}.load_state_dict", error)
            raise
        finally:
            handle.remove()
            self._incoming = None

    def _why_not_loaded(self, saved: dict[str, Any]) -> str:
        """Says what in a state dict the daemon does not go on with; empty where it does with all."""
        for group in saved["param_groups"]:
            if why := refusal(self._kind, group):
                return why
            for number in group["params"]:
                if foreign := foreign_state(self._kind, group, saved["state"].get(number)):
                    return f"state that the daemon's optimizer has not ({foreign})"
        return ""

    def set_state(self, state: dict[str, Any]) -> None:
        """``Optimizer.__setstate__``, which the load calls."""
        incoming, optimizer = self._incoming, self.optimizer
        if incoming is None:
            self._plain.set_state(optimizer, state)
            return
        self._plain.set_state(optimizer, {**state, "state": optimizer.state})
        for param in self.params():
            if param not in incoming.taken:
                optimizer.state.pop(param, None)
                self._update_counts.pop(param, None)
        for param, items in self._shown.items():  # what the program has put in the job's place has been loaded
            optimizer.state[param] = self._entries[param] = dict(items)
        optimizer.state.update(incoming.kept)
        for job, params in incoming.jobs:
            engine = job.engine
            assert engine is not None
            engine.enter_full_params(True)
            self._write(job, params)
            engine.commit()
            engine.leave_full_params()
            job.read_update_counts()
        if not self._shows_unused():
            for param in [p for p in self._entries if self.unused(p)]:
                optimizer.state.pop(param, None)
                self._shown.pop(param, None)
        self._show_updated()

    def _check_loaded(self, saved: dict[str, Any]) -> Incoming:
        """Checks what a state dict has for the jobs, and what is to be kept for models that are not registered yet."""
        for group in saved["param_groups"]:
            self.refuse(group)
        params = dict(zip([i for group in saved["param_groups"] for i in group["params"]], self.params()))
        loaded = {params.get(key, key): entry for key, entry in saved["state"].items()}
        incoming = Incoming()
        for job in self.jobs():
            found = [
                (param, place)
                for param in self.params()
                if (place := job.places.get(id(param))) is not None and place.trainable and self._has_state_of(param)
            ]
            states = [self._param_state(param, place, loaded.get(param, {})) for param, place in found]
            incoming.jobs.append((job, states))  # zeros for what the state dict does not have
            incoming.taken.update(param for param, _ in found)
        incoming.keep(loaded)
        return incoming

    def _param_state(self, param: Any, place: Place, entry: Any) -> ParamState:
        wholes = self._whole_states(place)
        return param_state(param, place, entry, wholes or self._names(), self._kind.counts_updates)

    def write_loaded(self, job: TorchJob, anew: bool = False) -> None:
        state = self.optimizer.state
        states = []
        for param in self.params():
            place = job.places.get(id(param))
            if place is None or not place.trainable:
                continue
            loaded = bool(state.get(param)) and not self._is_initial(state[param]) and not self.unused(param)
            if loaded or (anew and self._has_state_of(param)):
                states.append(self._param_state(param, place, state[param] if loaded else {}))
        self._write(job, states)  # in force with the next commit of parameters

    def _write(self, job: TorchJob, states: list[ParamState]) -> None:
        engine = job.engine
        assert engine is not None
        for state in states:
            for number, rows in enumerate(state.rows):
                parts = state.place.parts(rows)
                if state.whole:  # which all ranks have alike
                    parts = [(state.place.index, 0, rows)] if state.place.first == 0 else []
                for index, first, part in parts:
                    if part.numel():
                        engine.write_optimizer_state(index, number, part, first)
            for index, count in zip(state.place.indices(), state.counts):
                engine.write_update_count(index, count)
