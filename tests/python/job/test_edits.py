"""In-place edits between passes, with the daemon's optimizer and with torch's: exactly as with torch's fully_shard."""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path

import pytest
import torch

from cluster import Cluster, run_ranks
from job import edit_scenarios


@pytest.mark.parametrize("kind", ["daemon", "adamw", "adamw-foreach", "adamw-fused", "sgd"])
def test_edits_between_passes_are_those_of_torch_while_ranks_drift(kind: str, tmp_path: Path) -> None:
    for stock, ours in run_ranks(edit_scenarios.both_edited, 2, kind, str(tmp_path), limit_s=200):
        torch.testing.assert_close(torch.tensor(ours["losses"]), torch.tensor(stock["losses"]), rtol=1e-6, atol=0)
        for name, value in stock["parameters"].items():
            torch.testing.assert_close(ours["parameters"][name], value, rtol=1e-5, atol=1e-6)
        counters = ours["counters"]
        assert counters["commits"] == 7 and counters["aborts"] == 0 and counters["reductions"] == 4 * 7
        assert counters["passes"] == 7 + 6 + 1  # backwards, and evaluations
        assert kind != "daemon" or counters["hand_ins"] >= 12


def test_a_write_inside_a_pass_is_named_and_reaches_nobody() -> None:
    short = {"SHARDD_TIMEOUT_MS": "4000"}  # the other rank waits for gradients that do not come
    writer, other = run_ranks(edit_scenarios.write_inside_a_pass, 2, environment=short)
    assert 'parameter "layers.2.up.weight": written inside a pass' in writer["error"]
    (seen,) = other["seen"]  # after the write
    assert torch.equal(seen, other["before"]) and other["error"] != ""


@pytest.mark.parametrize("handler", ["", "before", "after"])
def test_stores_where_edits_are_off_end_the_rank_by_name(handler: str) -> None:
    with tempfile.TemporaryDirectory() as folder, Cluster(2, folder) as cluster:
        for rank in range(2):
            cluster.start(edit_scenarios.store_where_edits_are_off, rank, (handler,), {})
        codes = cluster.wait(120)
        log = cluster.log(1)
        assert codes[1] == -signal.SIGSEGV, log
        assert 'shardd: write parameter "layers.1.down.bias"' in log and "in_place_edits=True" in log, log
        assert ("Fatal Python error: Segmentation fault" in log) == (handler != ""), log
        counters = cluster.result(0)["counters"]
        assert counters["passes"] == 0 and counters["commits"] == 2


@pytest.mark.parametrize("form", ["fully_shard", "wrapper", "flat-parameters"])
def test_where_edits_are_off_loads_into_old_state_dicts_work(form: str) -> None:
    for facts in run_ranks(edit_scenarios.dicts_where_edits_are_off, 2, form):
        assert facts == {"unmoved": True, "untouched": True, "loaded": True}


def test_passes_change_no_number_of_a_training_without_edits() -> None:
    on = run_ranks(edit_scenarios.plain_training, 2, True)
    off = run_ranks(edit_scenarios.plain_training, 2, False)
    for with_passes, without in zip(on, off):
        assert with_passes["losses"] == without["losses"]
        assert with_passes["counters"]["passes"] == 5 and without["counters"]["passes"] == 0
        assert with_passes["counters"]["hand_ins"] == 0
        assert with_passes["counters"]["commits"] == without["counters"]["commits"] == 5
