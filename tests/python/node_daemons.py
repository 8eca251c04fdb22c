"""Two nodes on one machine: a daemon with a socket of its own for each, and ranks as torchrun's."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cluster import Cluster, RankFailed, free_port, rank_environment
from tcp_proxy import TcpProxy


class Nodes:
    """Daemons that reach each other through the loopback. ``peers=False``: they serve no other nodes; ``proxied``: there is
    a middlebox before each."""

    def __init__(self, folder: str, count: int, peers: bool = True, proxied: bool = False) -> None:
        self.folder, self.count, self.peers = folder, count, peers
        self.ports = [free_port() for _ in range(count)]
        self.proxies = [TcpProxy(port) for port in self.ports] if proxied else []
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def address(self, node: int) -> str:
        return f"unix:{self.folder}/{node}.sock"

    def start(self, node: int) -> None:
        arguments = [f"--listen={self.address(node)}", "--devices=cpu:2"]
        if self.peers:
            arguments += [f"--peer_listen=127.0.0.1:{self.ports[node]}", "--peer_insecure"]
        if self.proxies:
            arguments.append(f"--peer_address=127.0.0.1:{self.proxies[node].port}")
        with open(f"{self.folder}/{node}.log", "ab") as log:
            self.processes[node] = subprocess.Popen(
                [os.environ["SHARDD_DAEMON"], *arguments], stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)  # fmt: skip
        deadline = time.monotonic() + 20
        while not os.path.exists(f"{self.folder}/{node}.sock"):
            if self.processes[node].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the daemon of node {node} did not start: {self.log(node)}")
            time.sleep(0.01)

    def replace(self, node: int) -> None:
        """Kills the node's daemon, and starts one that knows nothing of its jobs, as on another machine."""
        self.processes[node].kill()
        self.processes[node].wait(timeout=20)
        Path(f"{self.folder}/{node}.sock").unlink(missing_ok=True)
        self.start(node)

    def hold(self, node: int, held: bool = True) -> None:
        """Of two nodes with middleboxes: what ``node`` says to the other one stays in those, until it is no longer held."""
        for passes in (self.proxies[1 - node].callers_pass, self.proxies[node].targets_pass):
            passes.clear() if held else passes.set()

    def log(self, node: int) -> str:
        return f"--- daemon {node}\n{Path(f'{self.folder}/{node}.log').read_text(errors='replace')[-4000:]}"

    def end(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait(timeout=20)
        for proxy in self.proxies:
            proxy.close()


@contextlib.contextmanager
def nodes(count: int = 2, peers: bool = True, proxied: bool = False) -> Iterator[Nodes]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="shardd-nodes-") as folder:
        made = Nodes(folder, count, peers, proxied)
        try:
            for node in range(count):
                made.start(node)
            yield made
        finally:
            made.end()


class NodesCluster(Cluster):
    """Ranks of ``local`` to a node, in the environment that torchrun gives them."""

    def __init__(self, over: Nodes, local: int, folder: str, environment: dict[str, str] | None = None) -> None:
        super().__init__(over.count * local, folder, environment)
        self.over, self.local = over, local

    def start(
        self,
        function: Callable[..., Any],
        rank: int,
        arguments: tuple[Any, ...],
        environment: dict[str, str] | None = None,
    ) -> None:
        node = rank // self.local
        of_node = {
            "LOCAL_RANK": str(rank % self.local),
            "LOCAL_WORLD_SIZE": str(self.local),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(self.over.count),
            "SHARDD_ADDRESS": self.over.address(node),
        }
        super().start(function, rank, arguments, of_node | (environment or {}))

    def logs(self) -> str:
        ranks = [self.log(rank) for rank in self.processes]
        return "\n".join([*ranks, *(self.over.log(node) for node in range(self.over.count))])


def torchrun_on_nodes(
    over: Nodes,
    function: Callable[..., Any],
    *arguments: Any,
    local: int = 2,
    restarts: int = 0,
    limit_s: float = 200,
    through: tuple[str, ...] = (),
) -> dict[int, Any]:
    """``function(*arguments)`` on every rank, under a torchrun for each node; its results by rank.

    ``through``: what torchrun runs the ranks' program with, as ``-m shardd.torch``.
    """
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(over.count * local):
            packed = pickle.dumps((function.__module__, function.__qualname__, arguments))
            Path(f"{folder}/{rank}.args").write_bytes(packed)
        port = free_port()
        agents = []
        for node in range(over.count):
            env = rank_environment() | {
                "SHARDD_ADDRESS": over.address(node),
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else restarted workers may find the dead ones' addresses
            }
            command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={over.count}", f"--nproc-per-node={local}",
                       f"--max-restarts={restarts}", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}",
                       f"--rdzv-id=nodes-{port}", *through, str(Path(__file__).with_name("rank_main.py")), folder]  # fmt: skip
            with open(f"{folder}/agent-{node}.log", "wb") as log:
                agents.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT,
                                               stdin=subprocess.DEVNULL, start_new_session=True))  # fmt: skip
        deadline = time.monotonic() + limit_s
        try:
            codes = [agent.wait(timeout=max(0.1, deadline - time.monotonic())) for agent in agents]
        except subprocess.TimeoutExpired:
            codes = [agent.poll() for agent in agents]
        finally:
            for agent in agents:
                if agent.poll() is None:
                    os.killpg(agent.pid, signal.SIGINT)  # it ends its workers
                    try:
                        agent.wait(timeout=10)
                    except subprocess.TimeoutExpired:
                        os.killpg(agent.pid, signal.SIGKILL)
                        agent.wait()
        if any(code != 0 for code in codes):
            logs = [
                Path(f"{folder}/agent-{node}.log").read_text(errors="replace")[-6000:] for node in range(over.count)
            ]
            raise RankFailed("\n".join([f"torchruns ended with {codes}", *logs, *map(over.log, range(over.count))]))
        return {int(path.stem): pickle.loads(path.read_bytes()) for path in Path(folder).glob("*.result")}


def run_on_nodes(
    over: Nodes,
    function: Callable[..., Any],
    *arguments: Any,
    local: int = 2,
    limit_s: float = 120,
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """``function(*arguments)`` on every rank of every node; its results by rank."""
    with tempfile.TemporaryDirectory() as folder, NodesCluster(over, local, folder, environment) as cluster:
        for rank in range(cluster.world):
            cluster.start(function, rank, arguments)
        try:
            codes = cluster.wait(limit_s)
        except RankFailed as failed:
            raise RankFailed(f"{failed}\n{cluster.logs()}") from None
        if any(codes.values()):
            raise RankFailed(f"exit statuses {codes}\n{cluster.logs()}")
        return [cluster.result(rank) for rank in range(cluster.world)]
