"""Ranks of which one dies and is started anew, while the others go on in their processes (the tests' side: deaths.py)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from models import loss_of, mesh_of
from rank_main import report


@dataclass
class Death:
    """Which rank dies in its first life, and when. ``victim``: where it is no rank, nobody dies.

    ``moment``: "forward", "backward" or "step", behind which it dies, or a word that only the scenario knows."""

    victim: int
    at_step: int
    moment: str


class RankLife:
    """One life of this rank, with a process group that the ranks make anew after a death.

    ``folder``: where the ranks meet. ``mesh``: sizes of the device mesh whose groups the others make again together with
    the rank that was started anew; (): none.
    """

    def __init__(self, folder: str, death: Death, mesh: tuple[int, ...] = ()) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._generation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))  # of the group
        self.is_first = self._generation == 0
        self.is_victim = self.is_first and self.rank == death.victim
        self._folder, self._death, self._mesh = folder, death, mesh
        self._make_group()

    def _make_group(self) -> None:
        store = dist.FileStore(f"{self._folder}/store-{self._generation}", self.world)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world)

    def rebuild(self) -> None:
        """For ``shardd.torch.steps``: another group, with the rank that was started anew."""
        self._generation += 1
        dist.destroy_process_group()
        self._make_group()
        if self._mesh:
            mesh_of(*self._mesh)  # who was started anew makes its groups

    @staticmethod
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def dies_at(self, moment: str, step: int) -> None:
        if self.is_victim and (moment, step) == (self._death.moment, self._death.at_step):
            self.die()

    def train(
        self,
        model: nn.Module,
        optimizers: list[Any],
        steps: int,
        begin: Callable[[int], None] = lambda step: None,
        rebuild: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """Trains with ``shardd.torch.steps``; the losses, which ride with the steps, and the steps that it resumed at.

        ``begin``: called where a step begins, also one that is repeated. ``rebuild``: called instead of this one's.
        """
        import shardd.torch

        losses: list[float] = []
        resumed = []
        for step in shardd.torch.steps(steps, rebuild=rebuild or self.rebuild):
            with step:
                if step.resumed:
                    resumed.append(int(step))
                    losses = step.state or []
                report(event="begins", step=step, pid=os.getpid())
                begin(step)
                loss = loss_of(model, step, 0, self.rank)
                self.dies_at("forward", step)
                loss.backward()
                self.dies_at("backward", step)
                shardd.torch.ride([*losses, loss.item()])
                for optimizer in optimizers:
                    optimizer.step()
                self.dies_at("step", step)
                for optimizer in optimizers:
                    optimizer.zero_grad()
                losses = [*losses, loss.item()]
        return {"losses": losses, "resumed": resumed}
