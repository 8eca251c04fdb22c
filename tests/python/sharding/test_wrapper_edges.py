"""Corners of FullyShardedDataParallel that PyTorch's own tests reach, against torch's class where that can run them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster import run_ranks
from sharding import wrapper_edges
from state_dicts.test_state_dict import same

_found: list[dict[str, Any]] = []


@pytest.fixture
def found() -> list[dict[str, Any]]:
    """By rank; one run for all tests."""
    if not _found:
        _found.extend(run_ranks(wrapper_edges.edges, 2, limit_s=200))
    return _found


def test_unused_parameters_of_a_used_unit_have_zero_gradients(found: list[dict[str, Any]]) -> None:
    for facts in found:
        want, _ = facts["unused"]["torch True"]
        start = wrapper_edges._Partly().idle.weight
        assert not torch.allclose(want["0.idle.weight"], start), "weight decay moves it"
        for name in ("stock True", "stock False", "daemon True", "daemon False"):
            got, shown = facts["unused"][name]
            same(got, want, name, 2e-6)
            assert shown
            assert facts["unused"][f"{name} commits"] == 2


def test_a_state_dict_loads_inside_summoned_full_parameters(found: list[dict[str, Any]]) -> None:
    for facts in found:
        for orig in (True, False):
            out = facts[f"loads {orig}"]
            assert "matched" in out["nothing missing"] and out["shown"] and out["not the others"]
            for what in ("everything", "a module", "rank 0"):
                same(*out[what], what)
            assert "load norm.weight: full parameters of other modules are summoned" in out["more than summoned"]
            assert out["versions"] == 2, "one for each context that writes back"
            assert out["loss"][0] == pytest.approx(out["loss"][1], rel=1e-6)


def test_missing_keys_are_named_in_flat_parameters_too(found: list[dict[str, Any]]) -> None:
    gone = ["head.weight", "layers.1.up.weight"]
    for facts in found:
        for orig in (True, False):
            out = facts[f"missing {orig}"]
            assert all(name in out["strict"] for name in (*gone, "another")), out["strict"]
            assert out["found"] == (gone, ["another"]) and out["rest"]
            assert out["by torch's function"] == gone and out["rest again"]


def test_a_used_up_gradient_is_not_shown_again(found: list[dict[str, Any]]) -> None:
    for facts in found:
        assert facts["gradients"] == {"none": True, "commits": 1}


def test_full_parameters_show_what_one_rank_alone_contributed(
    found: list[dict[str, Any]],
) -> None:
    for facts in found:
        unseen, seen = facts["of one rank"]["values"]
        assert facts["of one rank"]["moved"]
        same(seen, unseen)


def test_flattened_optimizer_state_loads_where_a_rank_has_no_element(found: list[dict[str, Any]]) -> None:
    assert any(facts["flattened"]["empty"] for facts in found)
    for facts in found:
        saved, loaded = facts["flattened"]["states"]
        same(loaded, saved)
