"""What the library and the daemon refuse, as exceptions."""

from __future__ import annotations

__all__ = ["Error", "StepAborted", "Unavailable", "from_code"]

_ABORTED = 10
_UNAVAILABLE = 14


# What the library and the daemon call by other names than this package.
_PYTHONS = {
    "shardd_reattach": "shardd.torch.reattach()",
}


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
        message = message.replace(name, here)
    kinds: dict[int, type[Error]] = {_ABORTED: StepAborted, _UNAVAILABLE: Unavailable}
    return kinds.get(code, Error)(message, code)
