"""What the library and the daemon refuse, as exceptions."""

from __future__ import annotations

__all__ = ["Error", "StepAborted", "Unavailable", "from_code"]

_ABORTED = 10
_UNAVAILABLE = 14


# What the library and the daemon call by other names than this package. Where it calls them itself, what the program does
# instead; no name is the beginning of another that stands behind it.
_PYTHONS = {
    "shardd_reattach": "shardd.torch.reattach()",
    "shardd_hand_in_edits": "shardd.torch.hand_in_edits()",
    "shardd_await_store": "optimizer.step()",
    "shardd_leave_full_params": "leave summon_full_params",
    "shardd_enter_full_params": "enter summon_full_params",
    "shardd_leave_pass": "finish the backward, or the forward without gradients,",
    "shardd_enter_pass": "run the model's forward",
    "shardd_backward_done": "finish the backward",
    "shardd_commit_parameters": "shardd.torch.commit()",
    "shardd_write_parameter": "load_state_dict()",
    "shardd_unshard": "module.unshard()",
    "shardd_step": "optimizer.step()",
    "SubmitGradients": "gradients",
    "submit it (with an empty presence mask if there is no gradient), or set allow_missing_contribution": (
        "let every rank use it in each forward, or set SHARDD_ALLOW_MISSING_CONTRIBUTION=1, with which it counts as no gradient"
    ),
}
_SPOKEN = ("leave ", "enter ", "finish ", "run ")  # what no one calls


class Error(RuntimeError):
    """A call was refused or failed. ``code`` is google.rpc.Code by number."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


class StepAborted(Error):
    """A rank died, or the step was ended by an error that the text explains.

    Everything since the last committed step is dropped. ``shardd.torch.reattach()`` goes on from there.
    """


class Unavailable(Error):
    """The daemon is gone. ``shardd.torch.reattach()`` waits for its successor."""


def from_code(code: int, message: str) -> Error:
    """The exception for a status of the C library."""
    if "trainers that never write" in message:
        message += "; build the optimizer with in_place_edits=True, or write before the first forward"
    for name, here in _PYTHONS.items():
        if here.startswith(_SPOKEN):
            message = message.replace(f"call {name}", here)
        message = message.replace(name, here)
    kinds: dict[int, type[Error]] = {_ABORTED: StepAborted, _UNAVAILABLE: Unavailable}
    return kinds.get(code, Error)(message, code)
