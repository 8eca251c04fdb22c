"""What ranks do in the tests of the wrapper's checkpoints between worlds."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from models import Case, build
from optim_cases import counts, optimizer_of
from optim_state_cases import Saved
from state_dict_cases import train
from wrapper_state_cases import alone, finished, quiet, whole


def dcp_save(folder: str, cases: list[Saved], more: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    out = []
    for number, case in enumerate(cases):
        model = case.model("shardd", **(more or {}))
        optimizer = optimizer_of("shardd", case.kind, model.parameters())
        train(model, optimizer, range(3))
        with quiet():
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
            dcp.save(state, checkpoint_id=f"{folder}/{number}")
        out.append({"alone": alone(case.kind, case.tie, case.freeze), "state": whole(state),
                    "counters": counts("shardd", model)})  # fmt: skip
        finished(model)
    return out


def dcp_load(folder: str, saved_as: list[Saved], cases: list[Saved]) -> list[dict[str, Any]]:
    """Checkpoint by checkpoint into another wrapping; on one rank into a model without one, too."""
    out = []
    for number, case in enumerate(cases):
        for bare in (False, True) if dist.get_world_size() == 1 else (False,):
            impl = "torch" if bare else "shardd"
            model = (
                build(Case(tie=case.tie, freeze=case.freeze)) if bare else case.model("shardd", nested=number % 2 == 0)
            )
            optimizer = optimizer_of(impl, saved_as[number].kind, model.parameters())
            with quiet():
                state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
                dcp.load(state, checkpoint_id=f"{folder}/{number}")
                set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
                again = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
            out.append({"number": number, "state": whole(again), "went on": train(model, optimizer, range(3, 5)),
                        "counters": counts(impl, model)})  # fmt: skip
            if not bare:
                finished(model)
    return out
