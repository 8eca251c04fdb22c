"""How many updates the daemon's optimizer has made of each parameter, which optimizers show as ``step``."""

from __future__ import annotations

import json

import torch

from shardd.torch._process.extension import _C

__all__ = ["UpdateCounts"]


class UpdateCounts:
    """Of one job. The engine counts in ``values`` with each step, and the program may store into the views that it is shown."""

    def __init__(self, engine: _C.Engine) -> None:
        self.values = torch.zeros(engine.info()["param_count"])
        engine.set_update_counts(self.values)
        self._own = self.values.clone()

    def read(self, engine: _C.Engine) -> None:
        """Takes the daemon's. It is one call to the daemon."""
        known = [int(count) for count in json.loads(engine.describe()).get("update_counts", [])]  # empty: none yet
        self.values.copy_(torch.tensor(known, dtype=self.values.dtype) if known else torch.zeros_like(self.values))
        self.note()

    def note(self) -> None:
        """What is there now is the engine's."""
        self._own.copy_(self.values)

    def were_edited(self) -> bool:
        return not torch.equal(self._own, self.values)
