"""The programs of client/examples/libraries: real libraries and torchtitan's pattern, unchanged."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from cluster import ROOT

RUN = ROOT / "client" / "examples" / "libraries" / "run.sh"
# `.ci/run libraries` sets it: those that need what `run.sh --install` installs, too, and all under torchrun.
ALL = os.environ.get("SHARDD_TEST_LIBRARIES") == "1"


def _listed(option: str) -> list[str]:
    return subprocess.run([RUN, option], capture_output=True, text=True, check=True).stdout.split()


# With a launcher each, they would take twice the time, for interpreters that import the same; torchtitan's imports least.
@pytest.mark.parametrize("name", _listed("--list") + (_listed("--list-more") if ALL else []))
def test_program_has_the_same_losses_and_files_as_with_pytorch(name: str) -> None:
    command = [RUN, name] if ALL or name == "torchtitan" else [RUN, "--forked", name]
    result = subprocess.run(command, capture_output=True, text=True, timeout=400)
    if result.returncode == 77:
        pytest.skip(result.stdout.strip())
    assert result.returncode == 0, result.stdout + result.stderr
    # "NAME: N losses and norms within ...; N files, N tensors within ...; the daemon: N models, N commits, N reductions"
    counts = {kind: int(count) for count, kind in re.findall(r"(\d+) (\w+)", result.stdout)}
    assert counts["losses"] >= 9 and counts["tensors"] > 20
    assert counts["commits"] >= 7 and counts["reductions"] >= 27
