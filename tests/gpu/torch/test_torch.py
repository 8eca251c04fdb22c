"""PyTorch models on a GPU: daemon and ranks as processes. Skipped, with the reason, where there is none.

    SHARDD_BIN=<folder with shardd> python -m pytest tests/gpu/torch

``SHARDD_TEST_DEVICE=cpu`` runs the same on the CPU, where passes read copies as they do on a GPU.
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
         "written_back"]  # fmt: skip
TOGETHER = ["adamw", "sgd_momentum", "accumulated_and_clipped", "recomputed", "kept_unsharded", "offloaded", "cut_on_columns",
            "hybrid", "synchronised_at_the_last", "another_stream_each_step", "bf16_beside_pytorch", "state_dicts",
            "written_back"]  # fmt: skip
# The program writes its shards: torch's optimizers, edits in place, layout flat, the wrapper.
BOTH = ["stock_adamw", "stock_adamw_foreach", "stock_adamw_fused", "stock_sgd_momentum", "stock_accumulated", "stock_recomputed",
        "stock_kept_unsharded", "stock_offloaded", "stock_clipped", "stock_beside_fully_shard", "stock_on_another_stream", "edited_in_place",
        "edited_beside_the_daemons_optimizer", "stored_inside_a_pass", "stock_state_dicts", "flat",
        "flat_with_the_daemons_optimizer", "wrapped_original_parameters", "wrapped_flat_parameters", "wrapped_not_sharded",
        "wrapped_from_the_host", "wrapped_bf16", "wrapped_state_dicts", "unfrozen_with_gradients", "inputs_from_the_host",
        "optimizer_state_on_the_host", "moved_after_it_was_wrapped", "what_is_refused"]  # fmt: skip
WRITING = {1: [*BOTH, "flat_given_other_storage"], 2: [*BOTH, "stock_hybrid"]}
NEAR = {"bf16_beside_pytorch": 2e-2, "stock_beside_fully_shard": 2e-2, "wrapped_bf16": 2e-2}


@pytest.fixture(scope="session")
def daemon() -> Iterator[str]:
    binary = Path(os.environ.get("SHARDD_BIN", ROOT / "build" / "cuda" / "bin")) / "shardd"
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="shardd-gpu-") as folder:
        address = f"unix:{folder}/shardd.sock"
        devices = "cuda:all" if DEVICE == "cuda" else "cpu:2"
        with open(f"{folder}/log", "wb") as log:
            process = subprocess.Popen([binary, f"--listen={address}", f"--devices={devices}"],
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
                  "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "SHARDD_TIMEOUT_MS": "30000",
                  "SHARDD_PASS_COPIES": "1", "SHARDD_KEEP_EVERY": "1"}  # fmt: skip
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
def results(address: str, world: int, writing: bool) -> list[dict[str, Any]]:
    return run(address, world, WRITING[world] if writing else ALONE if world == 1 else TOGETHER)


def check(name: str, result: dict[str, Any]) -> None:
    assert "error" not in result, result["error"]
    if name == "what_is_refused":
        assert len(result["texts"]) == 2
        assert all("dim0" in text and "CPUOffloadPolicy" in text for text in result["texts"]), result
        return
    if name == "moved_after_it_was_wrapped":
        assert DEVICE == "cpu" or "move the model before it is wrapped" in result["text"], result
        return
    assert result.get("on", ["cpu"]) == ["cpu"], result
    if name in NEAR:
        assert result["losses"] < NEAR[name], result
        return
    assert result.get("losses", 0.0) < 1e-5, result
    assert result.get("params", 0.0) < 1e-4, result
    assert result.get("differs", 0.0) == 0.0, result
    assert result.get("moments", 0.0) == 0.0, result
    assert result.get("by_stream", True), "the host waited in the place of the stream"
    if "devices" in result:
        assert result["devices"] == (["cpu"] if "offloaded" in name else [DEVICE]), result
    if "device" in result:
        assert result["device"] in ("", DEVICE), result


@pytest.mark.parametrize("world,name", [(1, name) for name in ALONE] + [(2, name) for name in TOGETHER])
def test_trains_as_the_reference(daemon: str, world: int, name: str) -> None:
    check_all(results(daemon, world, False), name)


@pytest.mark.parametrize("world,name", [(world, name) for world, names in WRITING.items() for name in names])
def test_a_program_may_write_its_shards(daemon: str, world: int, name: str) -> None:
    if DEVICE == "cpu" and name == "what_is_refused":
        pytest.skip("what is refused on a GPU")
    check_all(results(daemon, world, True), name)


def check_all(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        assert name in rank, f"a rank ended or hung before {name}: it gave {list(rank)}"
        print(name, {k: v for k, v in rank[name].items() if k != "error"})
        check(name, rank[name])


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ["killed_and_resumed", "stock_killed_and_resumed"])
def test_a_killed_trainer_resumes_from_the_memory_of_the_gpu(daemon: str, world: int, name: str) -> None:
    job = f"{name}-{world}"
    assert run(daemon, world, [name], job) == [{}] * world  # all of them die
    for rank in run(daemon, world, [name], job):
        assert name in rank, "the resumed rank hung or ended"
        result = rank[name]
        assert "error" not in result, result["error"]
        assert result["first"] == 5
        assert result["losses"] < 1e-5 and result["params"] < 1e-4, result
