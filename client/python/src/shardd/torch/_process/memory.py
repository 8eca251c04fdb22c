"""Memory that goes back to the system while a step does not need it: gradients in forward, activations in backward."""

from __future__ import annotations

import logging

from shardd.torch._process import environment
from shardd.torch._process.environment import GIVE_BACK
from shardd.torch._process.extension import _C

# "0": never; "1": always; otherwise where the job's parameters are many: it takes some of each step's processor time.
WORTH_IT_NUMEL = 1 << 25

logger = logging.getLogger("shardd.torch")


def gives_back(trained_numel: int) -> bool:
    given = environment.value(GIVE_BACK)
    if given not in ("", "0", "1"):
        raise ValueError(f"{GIVE_BACK}: out of range (got {given!r}, want 0, 1 or nothing)")
    return given == "1" or (given != "0" and trained_numel >= WORTH_IT_NUMEL)


def give_memory_back(engine: _C.Engine) -> None:
    """Begins to give memory back, for a job that was just attached to. The pool is the process' and stays when the job ends."""
    infos = map(engine.param_info, range(engine.info()["param_count"]))
    if not gives_back(sum(info["numel"] for info in infos if info["requires_grad"])):
        return
    engine.set_gives_gradients_back(True)
    if not _C.use_tensor_pool():
        logger.info("activations stay in malloc's memory: no huge pages here, or another allocator")
