"""What keeps a program's stores into its shards from those who read them.

On CPUs, with the daemon's optimizers, a store changes a page of this process alone, which the library finds in its page table where
the next pass or step begins. With torch's, on GPUs, and where ``SHARDD_PASS_COPIES=1`` says so or the page table cannot be read,
forward and backward read copies that the daemon takes where a pass begins, and shards may be stored into at any time. The plan
says which (common/plan/config.cc): what is asked for here is what it cannot know.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from shardd.torch._process import environment
from shardd.torch._process.environment import KEEP_EVERY, PASS_COPIES, number

__all__ = ["config_of_writes", "edits_of", "evaluates_alone", "why_no_edits_on_nodes", "why_not_several"]

logger = logging.getLogger("shardd.torch")


def edits_of(given: bool | None) -> tuple[bool, bool]:
    """``in_place_edits`` of an optimizer of the daemon, and whether anybody has said so."""
    said = environment.value(environment.IN_PLACE_EDITS)
    if given is None:
        return said != "0", said != ""
    return given, True


def evaluates_alone(params: list[Any], training: bool, never: bool = False) -> bool:
    """The program has said that a model without an optimizer is not written: passes need no copies of its parameters.

    ``training``: its first forward is with gradients. ``never``: no model is written by the program.
    """
    trained = [param for param in params if param.requires_grad]
    never = never or environment.value(environment.IN_PLACE_EDITS) == "0"
    return never and not (training and trained) and all(param.dtype != torch.float64 for param in trained)


def _shows_pages() -> bool:
    """Whether this process may read its own page table, which some containers hide."""
    try:
        with open("/proc/self/pagemap", "rb"):
            return True
    except OSError:
        return False


def why_not_several(on_gpu: bool, copies: bool | None = None) -> str:
    """Says why the daemon does not step several optimizers of a model; empty where it does. ``copies``: passes read some."""
    if copies is None:
        copies = bool(number(PASS_COPIES, 1)) or not _shows_pages()
    where = "on GPUs" if on_gpu else ""
    if not where and copies:
        where = f"where passes read copies of parameters ({PASS_COPIES})"
    return f"which the daemon does not step {where}; use one with several param groups" if where else ""


def why_no_edits_on_nodes(on_gpu: bool, rows: int) -> str:
    """Says why parameters that the daemon's optimizer steps are not edited in place on several nodes; empty: they may be."""
    if on_gpu:
        return "is served on CPUs alone"
    if rows > 1:
        return f"is not served where a node has several rows of the mesh (got {rows}, want 1)"
    if number(PASS_COPIES, 1):
        return f"is not served where passes read copies of parameters ({PASS_COPIES})"
    return (
        "" if _shows_pages() else "finds edits in the process's page table (/proc/self/pagemap), which is hidden here"
    )


def config_of_writes(never: bool, on_gpu: bool, daemon_updates: bool) -> dict[str, Any]:
    """The fields of JobConfig for a model. ``never``: trainers do not write; ``daemon_updates``: its optimizer does."""
    copies, keep_every = number(PASS_COPIES, 1), number(KEEP_EVERY, 1_000_000)
    if never:
        return {"trainersNeverWrite": True}
    config: dict[str, Any] = {"trainersNeverWrite": False}
    if on_gpu or copies or (daemon_updates and not _shows_pages()):
        config["passCopies"] = True
    if keep_every > 1 and daemon_updates:
        logger.warning(
            "%s=%d says nothing of a job with the daemon's optimizer: each version is kept", KEEP_EVERY, keep_every
        )
    elif keep_every:
        config["keepEvery"] = keep_every
    return config
