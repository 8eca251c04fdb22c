"""How models are told apart, alike on all ranks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import nn

from shardd.torch._process import environment
from shardd.torch._ranks.this_rank import next_of
from shardd.torch._units.names import WRAPPED_MODULE, unwrapped

__all__ = ["identity_of"]


def identity_of(modules: Sequence[nn.Module], managed: Mapping[int, Sequence[str]], ranks: Sequence[int]) -> str:
    """Of a model, or a part of one, as it is made: what it is, how many such there were before it over these ranks, and the
    ranks where they are not all. Alike on those ranks, whatever models others have made, whatever else than ``managed``
    parameters they have in it (names by the id of their module), and whether these are held by a ``FlatParameter``.
    """
    names = [
        f"{prefix}.{name}".replace(WRAPPED_MODULE + ".", "")
        for module in modules
        for prefix, inner in module.named_modules(remove_duplicate=False)
        for name in managed.get(id(inner), ())
    ]
    kinds = [type(unwrapped(module)).__name__ for module in modules]
    kind = re.sub(r"[^A-Za-z0-9_]", "_", kinds[0])[:40]
    if not environment.value(
        environment.JOB
    ):  # of a job with that name an edited model is refused, and told what differs
        kind += "-" + hashlib.sha256("\0".join([*kinds, *names]).encode()).hexdigest()[:6]
    group = ""
    if len(ranks) != dist.get_world_size():
        among = hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:6]
        group = f"-r{ranks[0]}" if len(ranks) == 1 else f"-r{ranks[0]}-{among}"
    return f"{kind}-{next_of(f'models/{kind}{group}')}{group}"
