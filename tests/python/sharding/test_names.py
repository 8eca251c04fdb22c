"""client/python/docs/names.md names everything public, once, and what it says of a name is so."""

from __future__ import annotations

import inspect
import re

import pytest
import torch.distributed.fsdp as fsdp
from torch.distributed.fsdp import wrap

import shardd.torch
from cluster import ROOT, run_ranks
from shardd.torch import optim
from sharding import names_scenarios

TEXT = (ROOT / "client" / "python" / "docs" / "names.md").read_text()
LATER = "## Of torch 2.15\n"  # of these there are those that this torch has
ROWS = [
    row
    for number, part in enumerate(TEXT.split(LATER))
    for row in re.findall(r"^\| `([^`]+)` \| (works|no effect|refused|missing) \|", part, re.MULTILINE)
    if number == 0 or hasattr(fsdp, row[0]) or hasattr(fsdp.FSDPModule, row[0].removeprefix("FSDPModule."))
]
STATES = dict(ROWS)

pytestmark = pytest.mark.skipif(
    not hasattr(fsdp, "DataParallelMeshDims"), reason="names.md lists what torch 2.13 has; this one has less"
)


def _public(kind: type) -> list[str]:
    return [name for name in vars(kind) if not name.startswith("_")]


def _arguments(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_every_public_name_is_listed_once() -> None:
    want = {
        *fsdp.__all__,
        *(f"wrap.{name}" for name in wrap.__all__),
        *(f"fully_shard({name})" for name in _arguments(fsdp.fully_shard) + _arguments(shardd.torch.fully_shard)),
        *(f"FullyShardedDataParallel({name})" for name in _arguments(fsdp.FullyShardedDataParallel)),
        *(f"FSDPModule.{name}" for name in _public(fsdp.FSDPModule)),
        *(f"FullyShardedDataParallel.{name}" for name in _public(fsdp.FullyShardedDataParallel)),
        *(f"shardd.torch.{name}" for name in shardd.torch.__all__ if name not in fsdp.__all__),
        *(f"shardd.torch.optim.{name}" for name in optim.__all__),
    }
    assert set(STATES) == want
    there = {name for name in fsdp.__all__ if STATES[name] != "missing"}
    assert there <= set(shardd.torch.__all__) and wrap.__all__ == sorted(
        shardd.torch.wrap.__all__, key=wrap.__all__.index
    )
    assert len(ROWS) == len(STATES), "a name is listed twice"


def test_arguments_are_those_of_pytorch() -> None:
    ours, theirs = _arguments(shardd.torch.fully_shard), _arguments(fsdp.fully_shard)
    assert ours[: len(theirs)] == theirs
    assert _arguments(shardd.torch.FullyShardedDataParallel) == _arguments(fsdp.FullyShardedDataParallel)


def test_what_works_is_there_and_what_is_missing_is_not() -> None:
    for name, state in STATES.items():
        if name.startswith("shardd.torch."):
            place: object = shardd.torch
            for part in name.removeprefix("shardd.torch.").split("."):
                place = getattr(place, part)
        elif name.startswith("FullyShardedDataParallel."):
            # Its own, or a module's: not what it finds in the module that it wraps.
            there = hasattr(shardd.torch.FullyShardedDataParallel, name.partition(".")[2])
            assert there == (state != "missing"), f"{name}: names.md says {state!r}"
        elif name.startswith("FSDPModule."):
            assert callable(getattr(shardd.torch.FSDPModule, name.partition(".")[2]))
        elif name.startswith("wrap."):
            assert getattr(shardd.torch.wrap, name.removeprefix("wrap.")) is getattr(wrap, name.removeprefix("wrap."))
        elif name in fsdp.__all__ and state != "missing":  # an import is swapped by the name of its package
            own = name in ("fully_shard", "FSDPModule", "FullyShardedDataParallel")
            assert (getattr(shardd.torch, name) is getattr(fsdp, name)) != own
    # Configurations are of use with the functions that take them.
    for name in fsdp.__all__:
        if "StateDict" in name or name == "OptimStateKeyType":
            function = "rekey_optim_state_dict" if "Key" in name else "state_dict_type"
            assert STATES[name] == STATES[f"FullyShardedDataParallel.{function}"], name


def test_what_is_refused_or_has_no_effect_is_so() -> None:
    for result in run_ranks(names_scenarios.try_all, 2):
        stated = {state: {name for name in STATES if STATES[name] == state} for state in ("refused", "no effect")}
        assert set(result["refused"]) == stated["refused"]
        assert all(len(text.split()) > 8 for text in result["refused"].values())  # it says what to do instead
        assert set(result["no effect"]) == stated["no effect"]
        for name, values in result["no effect"].items():
            flat = "FullyShardedDataParallel" in name or name in ("CPUOffload", "BackwardPrefetch")
            assert values == result["plain wrapped" if flat else "plain"], name
        assert {name for name in STATES if name.startswith("FSDPModule.") and STATES[name] == "works"} == set(
            result["works"]
        )
        divided = {"FSDPModule.set_gradient_divide_factor", "FSDPModule.set_reduce_scatter_divide_factor"}
        for name, values in result["works"].items():
            assert (values == result["plain"]) == (name not in divided), name
        assert result["reductions"] == 4
