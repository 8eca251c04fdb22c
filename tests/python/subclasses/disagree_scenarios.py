"""What ranks do in the tests of what they exchange: they disagree, or one of them dies."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rank_main import report
from subclasses.refused_scenarios import raised
from subclasses.weights import Low, lower

WIDTH = 6


class Moody(Low):
    """Sends what it is told to on rank 1, or on all ranks."""

    mood = ""
    post_fails = False

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        low = self._data.half()
        mood = Moody.mood if dist.get_rank() == 1 or Moody.mood.endswith("all") else ""
        if mood == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        sent = {
            "shape": (low.view(low.shape[1], low.shape[0]),),
            "dtype": (low.bfloat16(),),
            "count": (low, low),
            "none": (),
            "no tensor": 3,
            "subclass": (self,),
            "later dtype on all": (low.bfloat16(),),
            "later size on all": (low[:1],),
        }
        return sent.get(mood, (low,)), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        if Moody.post_fails:
            raise ValueError("post is out of luck")
        return super().fsdp_post_all_gather([o.float() for o in outputs], (1.0,), param_dtype, out=out)


def _model(rows: int = 4) -> Any:
    from shardd.torch import fully_shard

    torch.manual_seed(3)
    Moody.mood = ""
    model = nn.Sequential(nn.Linear(WIDTH, rows, bias=False))
    lower(model, Moody)
    return fully_shard(model)


def _held_bytes(model: Any) -> int:
    """What is unsharded still."""
    params = model._get_fsdp_state()._unit.fsdp_params
    tensors = [t for p in params for t in (*p.all_gather_outputs, *p._unsharded_inner_tensors)]
    return sum(t.untyped_storage().nbytes() for t in tensors)


def disagree(moods: list[str]) -> dict[str, Any]:
    """Each is raised, and the next pass is as one before; in the first unshard of a model, too."""
    from shardd.torch import finish

    found: dict[str, Any] = {"first": {}, "later": {}, "after": {}}
    x = torch.ones(2, WIDTH)
    for mood in moods:
        model = _model()
        if not mood.startswith("later"):
            Moody.mood = mood
            found["first"][mood] = raised(lambda: model(x))  # noqa: B023
            Moody.mood = ""
        before = model(x).detach().clone()
        model.reshard()
        Moody.mood = mood
        found["later"][mood] = raised(lambda: model(x))  # noqa: B023
        Moody.mood = ""
        held = _held_bytes(model)
        found["after"][mood] = held, torch.equal(model(x), before)
        model.reshard()
        dist.barrier()
        finish(model)
    return found


def memory() -> dict[str, int]:
    """Bytes that are held behind a method that raised, and behind the end of a job whose model was unsharded."""
    from shardd.torch import finish

    found = {}
    x = torch.ones(2, WIDTH)
    for first in (True, False):
        model = _model()
        if not first:
            model(x)
            model.reshard()
        Moody.post_fails = True
        found[f"raised {first}"] = 0 if "post is out of luck" in raised(lambda: model(x)) else -1  # noqa: B023
        found[f"raised {first}"] += _held_bytes(model)
        Moody.post_fails = False
        model.unshard()
        dist.barrier()
        found[f"unsharded {first}"] = _held_bytes(model)
        finish(model)
        found[f"ended {first}"] = _held_bytes(model)
    return found


def dies() -> None:
    """Rank 1 dies within a gather, for which the others wait."""
    model = _model(rows=6)
    x = torch.ones(2, WIDTH)
    model(x).sum().backward()
    Moody.mood = "dies"
    report(event="waits")
    report(event="raised", text=raised(lambda: model(x)))
    os._exit(0)


class Early(Low):
    """Raises on rank 1 before its collective, in which the others are."""

    fails = False

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> Any:
        if Early.fails and dist.get_rank() == 1:
            raise ValueError("early")
        return super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)


def raises_before_its_collective(heard: str) -> None:
    """``heard``: a file that is there when the other rank has heard of it, until which this one does not end."""
    from shardd.torch import fully_shard
    from shardd.torch._units import extension

    extension.PATIENCE = timedelta(seconds=3)
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Linear(WIDTH, 4))
    lower(model, Early)
    fully_shard(model)
    x = torch.ones(2, WIDTH)
    model(x).sum().backward()
    Early.fails = True
    report(event="fails")
    try:
        model(x)
    except Exception as error:
        report(event="raised", text=f"{type(error).__name__}: {error}")
        while not os.path.exists(heard):
            time.sleep(0.01)
        raise
