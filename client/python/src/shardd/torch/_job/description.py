"""A model as the daemon is to know it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from shardd.torch._units.shard_group import ShardGroup
from shardd.torch._units.state import ShardState

__all__ = ["Description", "ParamPlace"]


@dataclass
class ParamPlace:
    """A parameter that the job manages, under its first name."""

    fsdp_param: Any
    group: ShardGroup
    fqn: str


@dataclass
class Description:
    """What ``describe`` has made of a model."""

    spec: dict[str, Any]  # shardd.v1.JobSpec as JSON
    params: list[ParamPlace]
    states: list[ShardState]
    divide_factor: float
    names: dict[int, str]  # clean FQNs, by id of the module that is fully sharded
    stock: list[Optimizer]  # torch's own of these parameters; finding them takes as long as all objects of the process
