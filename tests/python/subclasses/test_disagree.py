"""Ranks that have different things to exchange, or one of which has died, raise by name: no hang, no mixed values."""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path

from cluster import Cluster, run_ranks
from subclasses.disagree_scenarios import dies, disagree, memory, raises_before_its_collective

_OTHER = (
    'RuntimeError: unshard "0.weight": rank {other} sends something else (got {got}, want that of this rank: {want})'
)
_HALF = '"0.weight": torch.float16 of shape (2, 6)'


def _other(rank: int, of_rank_1: str) -> str:
    texts = (of_rank_1, _HALF) if rank == 0 else (_HALF, of_rank_1)
    return _OTHER.format(other=1 - rank, got=texts[0], want=texts[1])


def test_ranks_that_disagree_raise_on_all() -> None:
    moods = {
        "shape": '"0.weight": torch.float16 of shape (6, 2)',
        "dtype": '"0.weight": torch.bfloat16 of shape (2, 6)',
        "count": f"{_HALF}, torch.float16 of shape (2, 6)",
        "none": '"0.weight": no tensors',
    }
    changed = (
        'RuntimeError: unshard "0.weight": fsdp_pre_all_gather has raised on rank 1 (got RuntimeError',
        'RuntimeError: unshard "0.weight": fsdp_pre_all_gather of Moody returns other tensors than in the first unshard',
    )
    for rank, found in enumerate(run_ranks(disagree, 2, list(moods))):
        for mood, text in moods.items():
            want = _other(rank, text)
            assert found["first"][mood].startswith(want), found["first"][mood]
            # A size or dtype of its own is another than before, too.
            later = want if mood == "shape" else changed[rank]
            assert found["later"][mood].startswith(later), found["later"][mood]
            assert found["after"][mood] == (0, True), (mood, found["after"][mood])


def test_what_cannot_be_gathered_raises_on_all() -> None:
    begins = {
        "no tensor": ("RuntimeError: unshard \"0.weight\": fsdp_pre_all_gather has raised on rank 1 (got TypeError", "TypeError: "),
        "subclass": (
            'RuntimeError: unshard "0.weight": fsdp_pre_all_gather has raised on rank 1 (got TypeError',
            'TypeError: unshard "0.weight": fsdp_pre_all_gather of Moody returns a tensor that cannot be gathered (got a Moody on cpu',
        ),
        "later dtype on all": ('RuntimeError: unshard "0.weight": fsdp_pre_all_gather of Moody returns other tensors than in the first',) * 2,
        "later size on all": ('RuntimeError: unshard "0.weight": fsdp_pre_all_gather of Moody returns other tensors than in the first',) * 2,
    }  # fmt: skip
    for rank, found in enumerate(run_ranks(disagree, 2, list(begins))):
        for mood, begin in begins.items():
            assert found["later"][mood].startswith(begin[rank]), (mood, found["later"][mood])
            assert found["first"].get(mood, begin[rank]).startswith(begin[rank])
            assert found["after"][mood] == (0, True), (mood, found["after"][mood])


def test_unsharded_memory_is_freed_behind_errors_and_ends() -> None:
    for found in run_ranks(memory, 2):
        for first in (True, False):
            assert found[f"raised {first}"] == 0 and found[f"ended {first}"] == 0, found
            assert found[f"unsharded {first}"] > 0


def test_a_rank_that_dies_in_a_gather_ends_the_others_wait() -> None:
    with tempfile.TemporaryDirectory() as folder, Cluster(3, folder) as cluster:
        for rank in range(3):
            cluster.start(dies, rank, ())
        for rank in (0, 2):
            cluster.wait_for_event(rank, 120, event="waits")
            text = cluster.wait_for_event(rank, 20, event="raised")["text"]
            assert text.startswith('RuntimeError: unshard "0.weight": the process group has failed ('), text
        assert cluster.wait(20) == {0: 0, 1: -signal.SIGKILL, 2: 0}


def test_a_method_that_raises_before_its_collective_hangs_nobody() -> None:
    environment = {
        "SHARDD_TEST_WHOLE_END": "1"
    }  # ranks end as any process, which nothing that goes on may keep from it
    with tempfile.TemporaryDirectory() as folder, Cluster(2, folder, environment) as cluster:
        for rank in range(2):
            cluster.start(raises_before_its_collective, rank, (f"{folder}/heard",))
        cluster.wait_for_event(1, 120, event="fails")
        assert cluster.wait_for_event(1, 20, event="raised")["text"] == "ValueError: early"
        text = cluster.wait_for_event(0, 40, event="raised")["text"]
        assert text.startswith('RuntimeError: unshard "0.weight": the process group has failed ('), text
        Path(folder, "heard").touch()
        assert set(cluster.wait(40).values()) == {1}
