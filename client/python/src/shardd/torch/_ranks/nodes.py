"""Ranks are on nodes, and each node's daemon has numbers of its own for them.

A daemon serves the ranks of its node, numbered from 0 there; jobs that span nodes have a daemon on each. Everything that
is said to a daemon is in its numbers (``JobRanks.local_rank``, ``local_world``, ``node``), everything that a program sees
in those of torch's groups and meshes. This is where one becomes the other.
"""

from __future__ import annotations

import itertools
import json
import logging
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

from shardd.errors import StepAborted
from shardd.torch._process import environment
from shardd.torch._process.environment import NODES
from shardd.torch._process.extension import _C
from shardd.torch._ranks.agreement import have_store
from shardd.torch._ranks.mesh import Members, members_of
from shardd.torch._ranks.pending import raise_if_they_differ
from shardd.torch._ranks.this_rank import rank_thread, threads_prefix

__all__ = [
    "NODES",
    "JobRanks",
    "cuts_over_nodes",
    "opened",
    "planned_ranks",
    "ranks_of",
]

logger = logging.getLogger("shardd.torch")

_Job = TypeVar("_Job")

_POLL_S = 0.01
_OPENS = 3
_REMEDY = (
    "give the mesh rows of ranks of one node, as many rows on each: init_device_mesh(device, (nodes, ranks of a node), "
    "mesh_dim_names=...), rows of all ranks of some neighbouring nodes each, or one dimension over the ranks of all nodes"
)


@dataclass(frozen=True)
class JobRanks:
    """The ranks of a job, over one node or several."""

    members: list[int]  # of the default group, by node and rank there
    rank: int  # of this process among them
    local_rank: int  # as its daemon knows it
    local_world: int  # ranks that the daemon serves
    node: int = 0  # of the job's nodes
    addresses: tuple[str, ...] = ()  # of the nodes' daemons; empty: one node
    row: int = 0  # of a mesh of replicas, among those of its daemon
    cut: bool = False  # the nodes of a row of the mesh have one copy of the parameters between them; else each has one
    published: dict[str, str] = field(default_factory=dict)  # to the others

    @property
    def several(self) -> bool:
        """Nodes."""
        return bool(self.addresses)

    def across(self, key: str, own: str) -> str:
        """Returns what every node published last under ``key``, this one ``own``; ``?`` for nodes that have not yet."""
        if not self.several:
            return own
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{key}/node/{self.node}", own)
        keys = [f"{key}/node/{node}" for node in range(len(self.addresses))]
        return "|".join(bytes(store.get(k)).decode() if store.check([k]) else "?" for k in keys)

    def agree(self, index: str, name: str, restarts: int) -> tuple[str, int]:
        """Returns the first rank's name for the registration ``index``, and the most restarts of any node: a launcher counts those
        of its own workers' failures only, and restarts them with another node's as well."""
        self.published.update(
            {f"restarts {index}": str(restarts)} | ({f"name {index}": name} if self.rank == 0 else {})
        )
        _publish(self.members[self.rank], self.published)
        firsts = self.members[:: self.local_world]
        of_nodes = list(_wait_for_fact(firsts, f"restarts {index}", "said how often it was restarted"))
        return of_nodes[0][f"name {index}"], max(int(facts[f"restarts {index}"]) for facts in of_nodes)

    def tell(self, fact: str, value: str, what: str) -> list[str]:
        """Returns what each rank says under ``fact``, this one ``value``; ``what`` it is, for the error that names a late one."""
        self.published[fact] = value
        _publish(self.members[self.rank], self.published)
        return [facts[fact] for facts in _wait_for_fact(self.members, fact, what)]

    def publish_address(self) -> None:
        """Publishes this node's address again, for a process that takes another's place where the program has made its groups anew."""
        if self.several and have_store():
            _publish(self.members[self.rank], {**self.published, "peer": self.addresses[self.node]})


def ranks_of(mesh_info: FSDPMeshInfo) -> JobRanks:
    """Returns the ranks of a model that is about to be registered.

    On several nodes it waits for the others to publish where their daemons are.

    NotImplementedError, alike on all ranks, where the mesh does not go with the nodes.
    """
    members = members_of(mesh_info)
    nodes = _nodes_of(members.ranks, waits=True, hybrid=isinstance(mesh_info, HSDPMeshInfo))
    return _split(mesh_info, nodes, _addresses_of)


def planned_ranks(mesh_info: FSDPMeshInfo) -> JobRanks:
    """Returns the same for a plan: nobody is asked and waited for, so addresses are stand-ins. Where the launcher says nothing, all
    ranks are taken to be on one node until they have told each other, as they do when a model is registered."""
    nodes = _nodes_of(members_of(mesh_info).ranks, waits=False, hybrid=isinstance(mesh_info, HSDPMeshInfo))
    return _split(mesh_info, nodes, lambda rows, _: tuple(f"node{i}:1" for i in range(len(rows))))


def cuts_over_nodes(mesh_info: FSDPMeshInfo) -> bool:
    """Whether the ranks of all nodes have one copy of the parameters between them."""
    return not isinstance(mesh_info, HSDPMeshInfo) or mesh_info.replicate_mesh_size == 1


def opened(ranks: JobRanks, open_job: Callable[[], _Job]) -> _Job:
    """``open_job()``; on several nodes a few times where it is aborted: the daemon may be a new one, which another node's
    gives the job's state first. What ends each of them, such as initial values that differ, is raised."""
    for left in reversed(range(_OPENS if ranks.several else 1)):
        try:
            return open_job()
        except StepAborted as error:
            if left == 0:
                raise
            logger.warning("register model: %s; attaching again", error)
    raise AssertionError("unreachable")


def _split(mesh_info: FSDPMeshInfo, nodes: list[str], addresses_of: Any) -> JobRanks:
    """``nodes``: by member of the mesh, row by row, what is alike for those of one node; empty: all are on one."""
    members = members_of(mesh_info)
    if len(set(nodes)) < 2:
        row = members.rank // mesh_info.shard_mesh_size if isinstance(mesh_info, HSDPMeshInfo) else 0
        return JobRanks(members.ranks, members.rank, members.rank, len(members.ranks), row=row)
    if cuts_over_nodes(mesh_info):
        return _split_copy(members, nodes, addresses_of)
    assert isinstance(mesh_info, HSDPMeshInfo)
    if _rows_are_nodes(nodes, mesh_info.shard_mesh_size):
        return _split_copy(members, nodes, addresses_of)
    return _split_replicas(members, nodes, mesh_info.shard_mesh_size, addresses_of)


def _rows_are_nodes(nodes: list[str], size: int) -> bool:
    """Whether each row of the mesh has all ranks of some nodes, of several at least."""
    rows = [set(nodes[first : first + size]) for first in range(0, len(nodes), size)]
    return min(map(len, rows)) > 1 and sum(map(len, rows)) == len(set(nodes))


def _split_replicas(members: Members, nodes: list[str], size: int, addresses_of: Any) -> JobRanks:
    """A copy of the parameters for each row of the mesh; each node has as many."""
    of_nodes: dict[str, list[int]] = {}  # ranks, row by row
    for first in range(0, len(nodes), size):
        row, on = members.ranks[first : first + size], sorted(set(nodes[first : first + size]))
        if len(on) > 1:
            raise NotImplementedError(
                f"register model: a row of its mesh crosses nodes (got ranks {row} on {len(on)} nodes, want ranks of one "
                f"node); {_REMEDY}"
            )
        of_nodes.setdefault(on[0], []).extend(row)
    ranks = list(of_nodes.values())
    local = len(ranks[0])
    if uneven := [of_node for of_node in ranks if len(of_node) != local]:
        raise NotImplementedError(
            f"register model: nodes have different numbers of rows of its mesh (got ranks {ranks[0]} and {uneven[0]}); {_REMEDY}"
        )
    own = members.ranks[members.rank]
    node, of_node = next((node, of_node) for node, of_node in enumerate(ranks) if own in of_node)
    place = of_node.index(own)
    addresses = addresses_of(ranks, node)
    return JobRanks(
        [rank for of in ranks for rank in of], node * local + place, place, local, node, addresses, row=place // size
    )


def _split_copy(members: Members, nodes: list[str], addresses_of: Any) -> JobRanks:
    """One copy of the parameters for each row of the mesh, cut over the ranks of its nodes, node by node."""
    rows = [[rank for _, rank in run] for _, run in itertools.groupby(zip(nodes, members.ranks), lambda item: item[0])]
    local, count = len(rows[0]), len(set(nodes))
    if len(rows) != count or any(len(row) != local for row in rows):
        raise NotImplementedError(
            f"register model: the ranks of its mesh do not follow each other node by node, as many on each (got "
            f"{' and '.join(map(str, rows))} of neighbours on one node, {count} nodes, want a run of the same length on "
            "each); give the mesh the ranks in the launcher's order"
        )
    node, local_rank = divmod(members.rank, local)
    return JobRanks(members.ranks, members.rank, local_rank, local, node, addresses_of(rows, node), cut=True)


def _nodes_of(ranks: Sequence[int], *, waits: bool, hybrid: bool) -> list[str]:
    """Returns by rank what is alike for ranks of one node; empty where they are taken to be on one.

    As the launcher says (LOCAL_WORLD_SIZE), else as the hosts are; those are told where a job may span several.
    """
    if rank_thread() != 0 or len(ranks) == 1:
        return []
    world, local = dist.get_world_size(), environment.count(environment.LOCAL_WORLD_SIZE)
    if local == world or (local and environment.count(environment.GROUP_WORLD_SIZE) == 1):
        return []
    group_rank = environment.value(environment.GROUP_RANK)
    if local and group_rank and local * environment.count(environment.GROUP_WORLD_SIZE) == world:
        return [str(rank // local) for rank in ranks]
    if not (hybrid or environment.value(NODES)) or not have_store():
        return []
    if not waits:
        known = [_facts_of(rank).get("host", "") for rank in ranks]
        return known if all(known) else []
    own = dist.get_rank()
    _publish(own, {"host": group_rank + _host()})
    return [facts["host"] for facts in _wait_for_fact(ranks, "host", "said which node it is on")]


def _addresses_of(rows: list[list[int]], node: int) -> tuple[str, ...]:
    """Returns where daemons reach those of the other nodes, by row."""
    given = environment.value(NODES)
    if given:
        addresses = tuple(part.strip() for part in given.split(","))
        if len(addresses) != len(rows):
            raise ValueError(
                f"{NODES}: not an address for each node (got {len(addresses)} in {given!r}, want {len(rows)})"
            )
        return addresses
    if not have_store():
        raise RuntimeError(
            f"register model: ranks of several nodes cannot tell each other where their daemons are (backend "
            f'"{dist.get_backend()}"); use backend "gloo" or "nccl", or set {NODES}'
        )
    own = dist.get_rank()
    try:
        _publish(own, {"peer": _own_address(), "error": ""})
    except Exception as error:
        _publish(own, {"peer": "", "error": str(error)})
        raise
    firsts = list(_wait_for_fact([row[0] for row in rows], "peer", "said where its daemon is"))
    for number, facts in enumerate(firsts):
        if not facts["peer"]:
            raise RuntimeError(
                f"register model: the daemon of node {number} (rank {rows[number][0]}) serves no other nodes "
                f"({facts.get('error') or 'its peer address is empty'}); start it with --peer_listen=HOST:PORT, or set {NODES}"
            )
    addresses = tuple(facts["peer"] for facts in firsts)
    for number, address in enumerate(addresses):
        if address in addresses[:number]:
            raise RuntimeError(
                f"register model: nodes {addresses.index(address)} and {number} have one daemon (got {address} twice); start "
                "one on each node, and give the ranks there its SHARDD_ADDRESS"
            )
    mine = _facts_of(own)["peer"]
    if mine != addresses[node]:
        raise RuntimeError(
            f"register model: ranks of node {node} have several daemons (got {mine or 'none for other nodes'} on rank {own} "
            f"and {addresses[node]} on rank {rows[node][0]}); give all of them one SHARDD_ADDRESS"
        )
    return addresses


def _own_address() -> str:
    return str(json.loads(_C.describe_daemon(environment.timeout_ms())).get("peer_address", ""))


def _host() -> str:
    """Returns what is alike for processes of one machine and no other; containers with names of their own are nodes of their own."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}/{boot}"


# What ranks tell each other, through the default group's store: a process that takes another's place waits for nobody.


def _key(rank: int) -> str:
    return f"shardd/rank/{threads_prefix()}{rank}"


def _publish(rank: int, facts: dict[str, str]) -> None:
    dist.distributed_c10d._get_default_store().set(_key(rank), json.dumps({**_facts_of(rank), **facts}))


def _facts_of(rank: int) -> dict[str, str]:
    store = dist.distributed_c10d._get_default_store()
    facts: dict[str, str] = json.loads(bytes(store.get(_key(rank))).decode()) if store.check([_key(rank)]) else {}
    return facts


def _wait_for_fact(ranks: Iterable[int], fact: str, what: str) -> Iterable[dict[str, str]]:
    """Yields what each rank has published, once ``fact`` is among it."""
    limit_s = environment.timeout_s()
    deadline = time.monotonic() + limit_s
    for rank in ranks:
        while fact not in (facts := _facts_of(rank)):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"register model: rank {rank} has not {what} after {limit_s:.0f} s "
                    f"(rank={dist.get_rank()}); every rank must use its model"
                )
            raise_if_they_differ()
            time.sleep(_POLL_S)
        yield facts
