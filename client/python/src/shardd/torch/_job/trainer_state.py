"""Trainer state: what a rank commits with its steps beside its shards.

The program's own object (``shardd.torch.ride``), and where the state of torch's optimizers lies. It is pickled into each
commit of this rank, and a process that takes this one's place reads it back.
"""

from __future__ import annotations

import pickle
from typing import Any

__all__ = ["TRAINER_STATE_BYTES", "pack", "set_program_state", "unpack"]

TRAINER_STATE_BYTES = 1 << 20  # the most that a commit takes of a rank (kMaxTrainerStateBytes)

_program_state: Any = None


def set_program_state(state: Any) -> None:
    """From now on commits of this process carry ``state``."""
    global _program_state
    _program_state = state


def pack(job_name: str, optimizer_memory: dict[str, Any] | None) -> bytes:
    """The trainer state of the next commit; empty where there is none. ValueError, with both sizes, where it is too large."""
    if _program_state is None and optimizer_memory is None:
        return b""
    data = pickle.dumps((_program_state, optimizer_memory))
    if len(data) > TRAINER_STATE_BYTES:
        own = len(pickle.dumps(_program_state))
        raise ValueError(
            f'commit of job "{job_name}": what goes with it is too large (got {own} bytes that shardd.torch.ride was '
            f"given and {len(data) - own} of the optimizer's small values, want at most {TRAINER_STATE_BYTES} together); give "
            "ride less"
        )
    return data


def unpack(data: bytes) -> tuple[Any, Any]:
    """The program's object and the optimizers' part of a committed trainer state; None for what there was not."""
    state: tuple[Any, Any] = pickle.loads(data) if data else (None, None)
    return state
