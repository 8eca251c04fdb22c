"""PyTorch models on a GPU: daemon and ranks as processes. Skipped, with the reason, where there is none.

    SHARDD_BIN=<folder with shardd> python -m pytest tests/gpu/torch

``SHARDD_TEST_DEVICE=cpu`` runs the same on the CPU.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
DEVICE = os.environ.get("SHARDD_TEST_DEVICE", "cuda")
LIMIT_S = 240

pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="no GPU that torch can use is here"
)

# By number of ranks; those of two share the GPU.
ALONE = ["adamw", "sgd_momentum", "accumulated_and_clipped", "recomputed", "kept_unsharded", "offloaded",
         "synchronised_at_the_last", "clipped_by_torch", "another_stream_each_step", "bf16_beside_pytorch", "state_dicts",
         "written_back", "what_is_refused"]  # fmt: skip
TOGETHER = ["adamw", "sgd_momentum", "accumulated_and_clipped", "recomputed", "kept_unsharded", "offloaded", "cut_on_columns",
            "hybrid", "synchronised_at_the_last", "another_stream_each_step", "bf16_beside_pytorch", "state_dicts",
            "written_back"]  # fmt: skip


@pytest.fixture(scope="session")
def daemon() -> Iterator[str]:
    binary = Path(os.environ.get("SHARDD_BIN", ROOT / "build" / "cuda" / "bin")) / "shardd"
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="shardd-gpu-") as folder:
        address = f"unix:{folder}/shardd.sock"
        devices = "cuda:all" if DEVICE == "cuda" else "cpu:2"
        with open(f"{folder}/log", "wb") as log:
            process = subprocess.Popen([binary, f"--listen={address}", f"--devices={devices}", f"--state_dir={folder}/state"],
                                       stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)  # fmt: skip
        deadline = time.monotonic() + 60
        while not os.path.exists(f"{folder}/shardd.sock"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the daemon did not start: {Path(folder, 'log').read_text()}")
            time.sleep(0.01)
        try:
            yield address
        finally:
            process.terminate()
            process.wait(timeout=60)
            print(Path(folder, "log").read_text()[-6000:])


def run(address: str, world: int, names: list[str], job: str = "") -> list[dict[str, Any]]:
    """What each rank gave, by case; ``{}`` of one that ended before."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join(filter(None, [str(ROOT / "client" / "python" / "src"), os.environ.get("PYTHONPATH")]))
        common = {**os.environ, "PYTHONPATH": path, "SHARDD_ADDRESS": address, "WORLD_SIZE": str(world),
                  "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "SHARDD_TIMEOUT_MS": "30000"}  # fmt: skip
        if job:
            common["SHARDD_JOB"] = job
        command = [sys.executable, str(HERE / "rank.py"), DEVICE, folder, *names]
        ranks = []
        for rank in range(world):
            with open(f"{folder}/rank{rank}.log", "wb") as log:
                ranks.append(subprocess.Popen(command, env={**common, "RANK": str(rank)}, stdout=log, stderr=log))
        deadline = time.monotonic() + LIMIT_S
        try:
            for process in ranks:
                process.wait(timeout=max(1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process in ranks:
                process.kill()
                process.wait()
            for rank in range(world):
                print(Path(folder, f"rank{rank}.log").read_text()[-3000:])
        files = [Path(folder, f"rank{rank}.json") for rank in range(world)]
        return [json.loads(file.read_text()) if file.exists() else {} for file in files]


@functools.cache
def results(address: str, world: int) -> list[dict[str, Any]]:
    return run(address, world, ALONE if world == 1 else TOGETHER)


def check(name: str, result: dict[str, Any]) -> None:
    assert "error" not in result, result["error"]
    if name == "what_is_refused":
        assert len(result["texts"]) == 2, result
        assert "shardd.torch.optim" in result["texts"][0]
        assert "dim0" in result["texts"][1]
        return
    if name == "bf16_beside_pytorch":
        assert result["losses"] < 2e-2, result
        return
    assert result.get("losses", 0.0) < 1e-5, result
    assert result.get("params", 0.0) < 1e-4, result
    assert result.get("differs", 0.0) == 0.0, result
    assert result.get("moments", 0.0) == 0.0, result
    assert result.get("by_stream", True), "the host waited in the place of the stream"
    if "devices" in result:
        assert result["devices"] == (["cpu"] if name == "offloaded" else [DEVICE]), result
    if "device" in result:
        assert result["device"] in ("", DEVICE), result


@pytest.mark.parametrize("world,name", [(1, name) for name in ALONE] + [(2, name) for name in TOGETHER])
def test_trains_as_the_reference(daemon: str, world: int, name: str) -> None:
    if DEVICE == "cpu" and name == "what_is_refused":
        pytest.skip("what is refused on a GPU")
    ranks = results(daemon, world)
    for rank in ranks:
        assert name in rank, f"a rank ended or hung before {name}: it gave {list(rank)}"
        print(name, {k: v for k, v in rank[name].items() if k != "error"})
        check(name, rank[name])


@pytest.mark.parametrize("world", [1, 2])
def test_a_killed_trainer_resumes_from_the_memory_of_the_gpu(daemon: str, world: int) -> None:
    job = f"resumed-{world}"
    assert run(daemon, world, ["killed_and_resumed"], job) == [{}] * world  # all of them die
    for rank in run(daemon, world, ["killed_and_resumed"], job):
        assert "killed_and_resumed" in rank, "the resumed rank hung or ended"
        result = rank["killed_and_resumed"]
        assert "error" not in result, result["error"]
        assert result["first"] == 5
        assert result["losses"] < 1e-5 and result["params"] < 1e-4, result
