"""The environment variables that the package reads, and the only place that reads any.

What each means stands in ``client/docs/launching.md``.
"""

from __future__ import annotations

import os

__all__ = [
    "GRACE",
    "JOB",
    "NAMES",
    "START_OVER",
    "count",
    "number",
    "of_launcher",
    "restarts",
    "timeout_ms",
    "timeout_s",
    "value",
]

JOB = "SHARDD_JOB"
NODES = "SHARDD_NODES"  # "host:port,host:port": where the daemons of the mesh's rows are reached by each other
TIMEOUT = "SHARDD_TIMEOUT_MS"
GRACE = "SHARDD_GRACE_MS"
START_OVER = "SHARDD_START_OVER"
TRAINER_SUMS = "SHARDD_TRAINER_SUMS"
ALLOW_MISSING = "SHARDD_ALLOW_MISSING_CONTRIBUTION"
IN_PLACE_EDITS = "SHARDD_IN_PLACE_EDITS"
PASS_COPIES = "SHARDD_PASS_COPIES"
KEEP_EVERY = "SHARDD_KEEP_EVERY"
GIVE_BACK = "SHARDD_GIVE_BACK"
NAMES = frozenset(
    {
        JOB,
        NODES,
        TIMEOUT,
        GRACE,
        START_OVER,
        TRAINER_SUMS,
        ALLOW_MISSING,
        IN_PLACE_EDITS,
        PASS_COPIES,
        KEEP_EVERY,
        GIVE_BACK,
    }
)

# Not shardd's own: torchrun's, PyTorch's and the system's.
RUN = "TORCHELASTIC_RUN_ID"
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
WORLD_SIZE = "WORLD_SIZE"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
GROUP_RANK = "GROUP_RANK"
GROUP_WORLD_SIZE = "GROUP_WORLD_SIZE"
FULL_PRECISION_IN_EVAL = "FSDP_USE_FULL_PREC_IN_EVAL"
RUNTIME_FOLDER = "XDG_RUNTIME_DIR"

_TIMEOUT_MS = 300_000  # the library's own
_MOST_MS = 365 * 24 * 3_600_000


def value(name: str) -> str:
    """Returns the variable's text; empty where it is not set."""
    return os.environ.get(name, "")


def number(name: str, most: int) -> int:
    """Returns the variable's number; 0 where it is not set. ValueError where it is no number from 0 to ``most``."""
    text = value(name) or "0"
    if not text.isascii() or not text.isdigit() or int(text) > most:
        raise ValueError(f"{name}: out of range (got {text!r}, want a number from 0 to {most})")
    return int(text)


def count(name: str) -> int:
    """Returns what a launcher has counted; 0 where it has not, or says what is no number."""
    text = value(name)
    return int(text) if text.isascii() and text.isdigit() else 0


def timeout_ms() -> int:
    """Returns the limit of every wait for other ranks."""
    return number(TIMEOUT, _MOST_MS) or _TIMEOUT_MS


def timeout_s() -> float:
    return timeout_ms() / 1000


def of_launcher() -> bool:
    """Whether torchrun has started this process, or another program of torch.distributed.elastic's."""
    return value(RUN) != ""


def restarts() -> int:
    """Returns how often torchrun has started this rank's workers again."""
    return count(RESTARTS)
