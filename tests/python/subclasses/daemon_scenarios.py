"""What ranks do in the tests of a daemon that ends under such weights."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from rank_main import report
from subclasses.low_scenarios import made, train
from subclasses.refused_scenarios import raised
from subclasses.weights import Low


def _await(path: str) -> None:
    """All ranks have done what comes before, and go on when the test has made this file."""
    dist.barrier()
    report(event="waits", path=path)
    while not os.path.exists(path):
        time.sleep(0.01)


def trained_over(folder: str, steps: int, ends: list[int], kept: bool) -> dict[str, Any]:
    """``ends``: steps before which the daemon ends. ``kept``: units are unsharded then."""
    from shardd.torch import fully_shard
    from shardd.torch.optim import AdamW

    model: Any = made(Low, fully_shard)
    model.set_reshard_after_backward(not kept)
    adamw = AdamW(model.parameters(), lr=0.01, in_place_edits=False)
    losses = []
    for step in range(steps):
        if step in ends:
            _await(f"{folder}/{step}")
        losses += train(model, adamw, range(step, step + 1))
    return {"losses": losses, "values": {n: t.full_tensor().clone() for n, t in model.state_dict().items()}}


def ended_in_a_pass(folder: str) -> str:
    """The daemon ends between a forward and its backward."""
    from shardd.torch import fully_shard
    from shardd.torch.optim import AdamW

    model: Any = made(Low, fully_shard)
    adamw = AdamW(model.parameters(), lr=0.01, in_place_edits=False)
    train(model, adamw, range(2))
    loss = model(torch.ones(2, 13)).sum()
    _await(f"{folder}/in")

    def go_on() -> None:
        loss.backward()
        adamw.step()
        train(model, adamw, range(3, 4))

    said = raised(go_on)
    report(event="said", text=said)
    os._exit(0)
