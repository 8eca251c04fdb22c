"""The process-wide swap: complete, reversible, and programs that know nothing of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import PACKAGE, free_port, run_ranks
from install import install_scenarios
from torchrun import torchrun

PROGRAM = str(Path(__file__).parent / "install_programs.py")


def test_every_listed_name_is_swapped_and_back_whenever_imported() -> None:
    # In an interpreter of its own: no module that is imported later may be there already.
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); import install_scenarios as s; "
        "print(json.dumps(s.swap_and_back()))"
    )
    environment = dict(os.environ, PYTHONPATH=str(PACKAGE))
    folder = str(Path(__file__).parent)
    output = subprocess.run([sys.executable, "-c", code, folder], env=environment, capture_output=True, text=True)
    assert output.returncode == 0, output.stderr
    result = json.loads(output.stdout)
    assert result.pop("checked") >= 12  # 13 up to torch 2.14
    assert all(result.values()), result


def test_an_unchanged_script_trains_alike_in_the_daemon_under_torchrun(tmp_path: Path) -> None:
    counts = tmp_path / "counts"
    results = {}
    for kind, program in {"stock": (), "swapped": ("-m", "shardd.torch", "--counts", str(counts))}.items():
        out = tmp_path / kind
        out.mkdir()
        run = torchrun(None, 2, program=(*program, PROGRAM, str(out)))
        assert run.code == 0, run.log
        results[kind] = [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]
    for stock, swapped in zip(results["stock"], results["swapped"]):
        assert not stock["shardd"] and swapped["shardd"]
        assert stock["is_fsdp"] and swapped["is_fsdp"]
        assert len(swapped["argv"]) == 1  # its own arguments, and none of the launcher's
        assert all(abs(a - b) <= 1e-6 * abs(a) for a, b in zip(stock["losses"], swapped["losses"], strict=True))
    assert results["swapped"][0]["main"] == PROGRAM
    (line,) = counts.read_text().splitlines()
    count = json.loads(line)
    assert count["passes"] == 4 and count["commits"] == 4 and count["reductions"] == 8
    assert count["bytes_updated"] > 0


@pytest.mark.parametrize("options", [(), ("--stock-optimizers",)], ids=["", "stock"])
def test_ranks_that_a_script_spawns_are_swapped_too(tmp_path: Path, options: tuple[str, ...]) -> None:
    environment = dict(os.environ, PYTHONPATH=str(PACKAGE), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    command = [sys.executable, "-m", "shardd.torch", *options, PROGRAM, str(tmp_path)]
    output = subprocess.run([*command, str(free_port())], env=environment, capture_output=True, text=True, timeout=300)
    assert output.returncode == 0, output.stderr
    for rank in range(2):
        result = json.loads((tmp_path / f"{rank}.json").read_text())
        assert result["shardd"] and result["optimizer"] == "torch.optim.adamw"
        assert ("shardd" in result["methods"]) == (not options)


def test_the_daemon_steps_torchs_optimizers_where_it_can() -> None:
    for result in run_ranks(install_scenarios.optimizers, 2):
        assert result["class"] and result["group"] == 0.1 and result["plain"] == 2 and result["back"]
        assert all(result["daemon"].values()), result["daemon"]
        assert not any(result["trainers"].values()), result["trainers"]
        assert result["steps"] == 1
        assert result["bias"] == run_ranks(install_scenarios.optimizers, 1)[0]["bias"]


def test_optimizers_that_stand_for_others_are_counted_once() -> None:
    for result in run_ranks(install_scenarios.shells, 2):
        assert result["Shell"] == result["Sharing"] == result["Copying"]
        assert result["Shell"]["found"] == [True] and result["Shell"]["commits"] == 2


def test_writes_count_after_a_library_has_put_signal_handlers_back() -> None:
    for result in run_ranks(install_scenarios.handlers_put_back, 2):
        # 3, then a step of 0.5 with a gradient of 2 for each of the batch's rows
        assert result["bias"] == [2.0] * 4


def test_a_script_that_is_not_there_is_named() -> None:
    from shardd.torch.__main__ import _run_script

    with pytest.raises(
        SystemExit, match=r"^python -m shardd.torch: read script 'no/such.py': No such file or directory$"
    ):
        _run_script("no/such.py")
