"""Plans what memory a model will need, before anything runs."""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist
from torch import nn

from shardd.torch._job.job_optimizer import job_optimizers_of
from shardd.torch._job.registration import begin_model
from shardd.torch._job.spec import describe
from shardd.torch._process.extension import _C
from shardd.torch._ranks.nodes import planned_ranks
from shardd.torch._units.state import ShardState, state_of

__all__ = ["MemoryPlan", "memory_plan"]

# The daemon's names of the purposes (shardctl memory), by their key in the plan's JSON, and what each holds.
_PURPOSES = (
    ("shards", "shards", "parameters, each rank its rows"),
    ("parameters", "parameters", "their copy in param_dtype"),
    ("gradients", "gradients", "reduced gradients, fp32, each rank its rows"),
    ("optimizer", "optimizer", "state of the daemon's optimizer"),
    ("unsharded_pool", "unsharded pool", "slots of groups in use"),
    ("snapshot", "snapshot", "to go back to when a rank dies while it writes"),
    ("journal", "journal", "the step being committed"),
)


class MemoryPlan(dict[str, Any]):
    """The plan's JSON: ``bytes`` by purpose, ``groups``, ``parameters``. ``str()`` is the table.

    ``spec``: what it was made from, which ``shardctl plan`` takes as JSON.
    """

    spec: dict[str, Any]

    def purposes(self) -> dict[str, int]:
        """Returns bytes on the node with all ranks attached, named as ``shardctl memory`` does; they add up to the total."""
        found = {name: int(self["bytes"][key]) for key, name, _ in _PURPOSES}
        found["session"] = int(self["bytes"]["session_per_rank"]) * self.world_size
        return found

    @property
    def world_size(self) -> int:
        return int(self["world_size"])

    @property
    def total_bytes(self) -> int:
        return int(self["bytes"]["total"])

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        notes = {name: note for _, name, note in _PURPOSES}
        notes["session"] = (
            f"{_mib(self['bytes']['gradient_slots_per_rank']).strip()} of each rank's are its gradient slots"
        )
        numel = sum(p["numel"] for p in self["parameters"])
        lines = [
            f"{numel:,} parameters in {len(self['groups'])} groups, {self.world_size} ranks, {self['strategy']}, MiB",
            f"{'purpose':15}{'node':>10}{'per rank':>10}",
        ]
        for name, size in self.purposes().items():
            if size:
                lines.append(f"{name:15}{_mib(size)}{_mib(size / self.world_size)}  {notes[name]}")
        lines.append(f"{'total':15}{_mib(self.total_bytes)}{_mib(self.total_bytes / self.world_size)}")
        largest = max(self["groups"], key=lambda group: int(group["unsharded_bytes"]))
        lines.append(
            f'largest group "{largest["name"] or "(root)"}": {_mib(largest["unsharded_bytes"]).strip()} MiB unsharded. '
            "Activations and PyTorch itself come on top."
        )
        return "\n".join(lines)


def _mib(size: float) -> str:
    return f"{size / 2**20:10.1f}"


def memory_plan(module: nn.Module, world_size: int | None = None) -> MemoryPlan:
    """Returns what a model that ``fully_shard`` was applied to needs on a node, by purpose; ``print`` shows the table. Of nodes that
    need unlike amounts it is the one that needs most (``plan["node"]``).

    ``world_size``: number of ranks on it; by default that of its mesh. Nothing is allocated and nobody is waited for. These are
    the numbers that the daemon reports; to admit the job it wants as much as the shards beside them free, for the undo of a
    writeback of full parameters. Build the optimizer first: its state is part of the plan.
    """
    state = state_of(module)
    if state is None:
        raise ValueError(f"memory_plan: fully_shard was not applied to this {type(module).__name__}")
    root = state._find_root()
    begin_model(root)
    for inner in root._state_ctx.all_states:
        assert isinstance(inner, ShardState) and inner._unit is not None
        inner._unit.lazy_init()
    nodes: tuple[str, ...] = ()
    if world_size is None:
        assert root._unit is not None
        ranks = planned_ranks(root._unit.mesh_info) if root._unit.fsdp_params else None
        world_size = dist.get_world_size() if ranks is None else ranks.local_world
        nodes = () if ranks is None else ranks.addresses
    owned = {id(p.sharded_param) for s in root._state_ctx.all_states for p in s._unit.fsdp_params}
    description = describe(root, "memory_plan", world_size, job_optimizers_of(owned), nodes)
    plan = MemoryPlan(json.loads(_C.plan_json(json.dumps(description.spec))))
    plan.spec = description.spec
    return plan
