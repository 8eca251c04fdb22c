"""Ranks of several implementations at once, of which one at a time works: turns, so that all meet the same machine.

A script gives ``run`` what a rank does: ``make(implementation, arguments)`` prepares it and returns ``turn(steps)``. The parent
starts a Fleet for each implementation and asks them in turn. Ranks that are not asked wait in a read and cost nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "client" / "examples" / "torch"))

Turn = Callable[[int], dict[str, Any]]

# floor    as many processes with forward and backward only, nothing shared
# fsdp2    torch.distributed.fsdp.fully_shard, torch.optim.AdamW; fsdp2f: the same with foreach=True
# shardd   shardd.torch.fully_shard, the daemon's AdamW; sharddf: torch.optim.AdamW(foreach=True)
# Two nodes on this machine, half of the ranks each, and for shardd a daemon each, which are linked by sockets:
# sharddn  cut over all ranks, as fsdp2 is; sharddr: a replica on each node; fsdp2r: the same of torch (HSDP)
IMPLEMENTATIONS = ("floor", "fsdp2", "fsdp2f", "shardd", "sharddf")
OVER_NODES = ("sharddn", "sharddr", "fsdp2r")
NODES = 2


def shard(model: Any, modules: list[Any], implementation: str) -> Any:
    """Applies fully_shard; gives the optimizer of the implementation, None for the floor."""
    if implementation == "floor":
        return None
    if implementation.startswith("shardd"):
        from shardd.torch import fully_shard
    else:
        from torch.distributed.fsdp import fully_shard
    mesh = None
    if implementation.endswith("r"):
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (NODES, dist.get_world_size() // NODES), mesh_dim_names=("replicate", "shard"))
    for module in modules:
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if implementation in ("shardd", "sharddn", "sharddr"):
        from shardd.torch.optim import AdamW

        return AdamW(model.parameters(), lr=3e-4)
    from torch.optim import AdamW as StockAdamW

    return StockAdamW(model.parameters(), lr=3e-4, foreach=implementation.endswith("f") or None)


def sets_mib(pid: int | str = "self") -> tuple[float, float]:
    """Proportional set size, in which what is shared is counted once over all processes, and what of it is shared memory.

    0 for one that has ended.
    """
    sizes = {"Pss:": 0.0, "Pss_Shmem:": 0.0}
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            for line in file:
                if (words := line.split())[0] in sizes:
                    sizes[words[0]] = int(words[1]) / 1024
    except OSError:
        pass
    return sizes["Pss:"], sizes["Pss_Shmem:"]


def memory_mib(pid: int | str = "self") -> float:
    return sets_mib(pid)[0]


def shared_files_mib(pid: int) -> float:
    """What lies in the process' open files of shared memory, whether or not anybody has mapped it."""
    blocks = {}
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{fd}"
            if os.readlink(path).startswith(("/memfd:", "/dev/shm/")):
                facts = os.stat(path)
                blocks[facts.st_dev, facts.st_ino] = facts.st_blocks
    except OSError:
        pass  # closed meanwhile
    return sum(blocks.values()) / 2048


def processor_s(pid: int) -> float:
    """Processor time of all threads that live, in seconds."""
    times = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        times += int(path.read_text().split()[0])
    return times / 1e9


def serve(make: Callable[[str, argparse.Namespace], Turn], args: argparse.Namespace) -> None:
    """One rank: answers each number on stdin with a line of JSON."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    dist.init_process_group("gloo")
    if args.implementation.startswith("shardd"):
        import shardd.torch  # noqa: F401  (an import, as torch's own are by now)
    import torch._dynamo

    dist.barrier()
    base = memory_mib()
    dist.barrier()
    turn = make(args.implementation, args)
    print(json.dumps({"base_mib": base}), file=answers, flush=True)
    for line in sys.stdin:
        dist.barrier()
        print(json.dumps({**turn(int(line)), "pss_mib": memory_mib()}), file=answers, flush=True)
    os._exit(0)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Fleet:
    """The ranks of one implementation, and its daemons. Use as a context."""

    def __init__(self, implementation: str, args: argparse.Namespace, **options: Any) -> None:
        self.implementation = implementation
        self._folder = tempfile.TemporaryDirectory(dir="/dev/shm", prefix="shardd-bench-")
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.daemon_base_mib = 0.0
        environment = dict(os.environ)
        nodes = NODES if implementation in OVER_NODES else 1
        local_world = args.world // nodes
        addresses = [""] * nodes
        if implementation.startswith("shardd"):
            addresses = [self._start_daemon(Path(args.bin), local_world, node, nodes) for node in range(nodes)]
            path = [str(ROOT / "client" / "python" / "src"), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
        environment.update(WORLD_SIZE=str(args.world), LOCAL_WORLD_SIZE=str(local_world), MASTER_ADDR="127.0.0.1",
                           MASTER_PORT=str(free_port()), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo",
                           TORCH_CPP_LOG_LEVEL="ERROR", GROUP_WORLD_SIZE=str(nodes))  # fmt: skip
        command = [sys.executable, sys.argv[0], "--world", str(args.world), "--implementation", implementation]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        self.ranks = [
            subprocess.Popen(command, env=dict(environment, RANK=str(rank), LOCAL_RANK=str(rank % local_world),
                                               GROUP_RANK=str(rank // local_world),
                                               **({"SHARDD_ADDRESS": at} if (at := addresses[rank // local_world]) else {})),
                             text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for rank in range(args.world)]  # fmt: skip
        self.base_mib = [answer["base_mib"] for answer in self._answers()]

    def _start_daemon(self, binaries: Path, world: int, node: int, nodes: int) -> str:
        address = f"unix:{self._folder.name}/socket-{node}"
        peers = [f"--peer_listen=127.0.0.1:{free_port()}", "--peer_insecure"] if nodes > 1 else []
        daemon = subprocess.Popen(
            [str(binaries / "shardd"), f"--devices=cpu:{world}", f"--listen={address}",
             "--log_level=error", *peers])  # fmt: skip
        self.daemons.append(daemon)
        deadline = time.monotonic() + 20
        while not os.path.exists(address.removeprefix("unix:")):
            if daemon.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{binaries / 'shardd'}: does not listen on {address}")
            time.sleep(0.01)
        self.daemon_base_mib += memory_mib(daemon.pid)
        return address

    def ask(self, steps: int) -> None:
        for rank in self.ranks:
            assert rank.stdin is not None
            print(steps, file=rank.stdin, flush=True)

    def _answers(self) -> list[dict[str, Any]]:
        answers = []
        for number, rank in enumerate(self.ranks):
            assert rank.stdout is not None
            line = rank.stdout.readline()
            if not line:
                raise SystemExit(f"{self.implementation}: rank {number} ended with status {rank.wait()}")
            answers.append(json.loads(line))
        return answers

    def turn(self, steps: int) -> list[dict[str, Any]]:
        """What ``turn(steps)`` gives on each rank, and ``cpu_s``: processor time of all processes together."""
        pids = [process.pid for process in [*self.ranks, *self.daemons]]
        before = sum(map(processor_s, pids))
        self.ask(steps)
        answers = self._answers()
        return [{**answer, "cpu_s": sum(map(processor_s, pids)) - before} for answer in answers]

    def memory_mib(self) -> float:
        """Of all processes together, above what they had before there was a model. Read it while they work."""
        sets = [sets_mib(process.pid) for process in [*self.ranks, *self.daemons]]
        total = sum(whole for whole, _ in sets) - sum(self.base_mib)
        if not self.daemons:
            return total
        # Pages that were written through a file are in nobody's set before they are read.
        mapped = sum(shared for _, shared in sets)
        return (
            total
            - self.daemon_base_mib
            + max(0.0, sum(shared_files_mib(daemon.pid) for daemon in self.daemons) - mapped)
        )

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()
        for daemon in self.daemons:
            daemon.terminate()
            daemon.wait()
        self._folder.cleanup()


def options(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each implementation")
    parser.add_argument("--bin", default=str(ROOT / "build" / "release" / "bin"), help="folder of the daemon")
    parser.add_argument("--json", default="", help="file for the result")
    parser.add_argument("--implementation", default="", help=argparse.SUPPRESS)  # in a rank
    return parser


def ratio(values: list[float], base: list[float]) -> tuple[float, float, float]:
    """Median, smallest and largest of the ratios of turns that followed each other."""
    ratios = [value / other for value, other in zip(values, base, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def store(args: argparse.Namespace, result: dict[str, Any]) -> None:
    print(json.dumps(result), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
