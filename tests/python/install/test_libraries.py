"""The programs of client/examples/libraries: accelerate, transformers, Lightning and torchtitan's pattern, unchanged."""

from __future__ import annotations

import re
import subprocess

import pytest

from cluster import ROOT

RUN = ROOT / "client" / "examples" / "libraries" / "run.sh"
NAMES = subprocess.run([RUN, "--list"], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize("name", NAMES)
def test_program_has_the_same_losses_and_files_as_with_pytorch(name: str) -> None:
    result = subprocess.run([RUN, name], capture_output=True, text=True, timeout=400)
    if result.returncode == 77:
        pytest.skip(result.stdout.strip())
    assert result.returncode == 0, result.stdout + result.stderr
    # "NAME: N losses and norms within ...; N files, N tensors within ...; the daemon: N models, N commits, N reductions"
    counts = {kind: int(count) for count, kind in re.findall(r"(\d+) (\w+)", result.stdout)}
    assert counts["losses"] >= 9 and counts["tensors"] > 20
    assert counts["commits"] >= 7 and counts["reductions"] >= 27
