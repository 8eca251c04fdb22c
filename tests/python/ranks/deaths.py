"""Kills one rank of a job over nodes and starts it anew, while the others go on in their processes (the ranks' side: rank_life.py)."""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
from collections.abc import Callable
from typing import Any

from node_daemons import Nodes, NodesCluster
from ranks.rank_life import Death

_jobs = itertools.count()


def run_with_a_death(
    over: Nodes,
    function: Callable[..., Any],
    death: Death,
    *arguments: Any,
    local: int = 2,
    behind: Callable[[], None] = lambda: None,
) -> list[Any]:
    """``function(folder, death, *arguments)`` on every rank of every node, which makes a RankLife; its results by rank.

    ``behind``: called when the victim is dead, and before it is started anew."""
    name = f"death-{next(_jobs)}-{os.getpid()}"

    def life(restarts: int) -> dict[str, str]:
        return {"SHARDD_JOB": name, "TORCHELASTIC_RESTART_COUNT": str(restarts)}

    with (
        tempfile.TemporaryDirectory() as folder,
        NodesCluster(over, local, folder, {"SHARDD_TEST_NO_GROUP": "1"}) as cluster,
    ):
        ranks, victim = range(cluster.world), death.victim
        for rank in ranks:
            cluster.start(function, rank, (folder, death, *arguments), life(0))
        if victim in ranks:
            assert cluster.wait(120, [victim]) == {victim: -signal.SIGKILL}, cluster.logs()
            behind()
            cluster.start(function, victim, (folder, death, *arguments), life(1))
        assert set(cluster.wait(120).values()) == {0}, cluster.logs()
        for rank in set(ranks) - {victim}:
            begins = [event for event in cluster.events(rank) if event["event"] == "begins"]
            assert len({event["pid"] for event in begins}) == 1, "it goes on in its process"
        return [cluster.result(rank) for rank in ranks]
