"""FlattenParamsWrapper as its users know it, and which elements of what shards have."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from cluster import run_ranks
from shardd.torch import FlattenParamsWrapper
from sharding import flatten_scenarios


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.rnn = nn.LSTM(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.answer = 42

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.rnn(self.embed(x))[0].flatten(0, 1)))  # type: ignore[no-any-return]


def _tied() -> Tied:
    torch.manual_seed(0)
    return Tied()


def _train(model: nn.Module) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    outputs = []
    for step in range(3):
        outputs.append(model(torch.arange(6).view(2, 3) % (5 - step)))
        outputs[-1].square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return outputs


def test_a_flattened_model_trains_as_the_plain_one() -> None:
    plain, flat = _tied(), FlattenParamsWrapper(_tied())
    assert [name for name, _ in flat.named_parameters()] == ["flat_param"]
    assert flat.flat_param.numel() == sum(p.numel() for p in plain.parameters())
    names, shapes, numels = flat.metadata()
    assert names == [name for name, _ in plain.named_parameters()] and sum(numels) == flat.flat_param.numel()
    assert shapes == [p.shape for p in plain.parameters()]
    for got, want in zip(_train(flat), _train(plain), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert flat.answer == 42 and flat.head.weight is flat.embed.weight and flat.module.rnn is flat.rnn
    mine, theirs = flat.state_dict(), plain.state_dict()
    assert list(mine) == list(theirs)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    layers = FlattenParamsWrapper(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    assert len(layers) == 2 and isinstance(layers[1], nn.Tanh)


def test_unflattened_parameters_are_the_same_memory() -> None:
    flat = FlattenParamsWrapper(_tied())
    before = flat.flat_param
    flat(torch.arange(4).view(2, 2)).sum().backward()
    with pytest.raises(KeyError), flat.unflatten_params(), flat.unflatten_params():
        assert not flat.is_flattened and "flat_param" not in dict(flat.named_parameters())
        assert flat.head.weight is flat.embed.weight and flat.embed.weight.grad is not None
        with torch.no_grad():
            flat.embed.weight.fill_(3)
            flat.rnn.weight_hh_l0.grad.zero_()
        flat.norm.weight = nn.Parameter(torch.full((4,), 7.0))  # another object
        raise KeyError
    assert flat.is_flattened and flat.flat_param is before
    views = dict(zip(flat.metadata()[0], flat.get_param_views()))
    assert (views["embed.weight"] == 3).all() and (views["norm.weight"] == 7).all()
    grads = dict(zip(flat.metadata()[0], flat.get_param_views(before.grad)))
    assert not grads["rnn.weight_hh_l0"].any() and grads["rnn.weight_ih_l0"].any()


def test_state_dicts_go_between_flat_and_plain_models() -> None:
    outer: Any = nn.Sequential(FlattenParamsWrapper(_tied()), nn.Linear(5, 2))
    plain: Any = nn.Sequential(_tied(), nn.Linear(5, 2))
    assert list(outer.state_dict()) == list(plain.state_dict())
    changed = {name: value + 1 for name, value in plain.state_dict().items()}
    outer.load_state_dict(changed)
    assert outer[0].is_flattened
    torch.testing.assert_close(outer.state_dict(), changed)
    plain.load_state_dict(outer.state_dict())
    changed.pop("0.norm.bias")
    missing = outer.load_state_dict({**changed, "0.extra": torch.ones(1)}, strict=False)
    assert missing.missing_keys == ["0.norm.bias"] and missing.unexpected_keys == ["0.extra"]
    flat = outer[0].flat_state_dict()
    assert "flat_param" in flat and "norm.running_mean" in flat and "embed.weight" not in flat
    fresh = FlattenParamsWrapper(_tied())
    fresh.load_state_dict(flat)
    assert torch.equal(fresh.flat_param, outer[0].flat_param)


def test_copies_and_pickles_are_flat_and_tied() -> None:
    flat = FlattenParamsWrapper(_tied()).eval()
    x = torch.arange(4).view(2, 2)
    for other in (copy.deepcopy(flat), pickle.loads(pickle.dumps(flat))):
        assert other.is_flattened and not other.training and other.head.weight is other.embed.weight
        assert other.flat_param is not flat.flat_param and torch.equal(other(x), flat(x))
    assert FlattenParamsWrapper(nn.Linear(2, 2)).to(torch.float64)(torch.ones(2, dtype=torch.float64)).sum().isfinite()


def test_kinds_of_parameters_get_flat_parameters_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2).to(torch.float64))
    model[0].bias.requires_grad_(False)
    flat = FlattenParamsWrapper(model)
    assert [name for name, _ in flat.named_parameters()] == ["flat_param", "flat_param_1", "flat_param_2"]
    assert [p.requires_grad for p in flat.flat_params] == [True, False, True]
    part = FlattenParamsWrapper(nn.Linear(2, 3), params=[])
    assert part.flat_params == [] and len(list(part.parameters())) == 2
    inner = FlattenParamsWrapper(nn.Linear(2, 3))
    outer = FlattenParamsWrapper(nn.Sequential(inner, nn.Linear(3, 1)))
    assert outer.flat_param.numel() == 4 and inner.flat_param.numel() == 9
    assert outer(torch.ones(2)).shape == (1,)


def test_what_cannot_be_flattened_or_cut_is_named() -> None:
    linear = nn.Linear(2, 3)
    inner = FlattenParamsWrapper(nn.Linear(2, 2))
    for params, kind, text in (
        ([torch.ones(1)], TypeError, "not an nn.Parameter (got Tensor)"),
        ([inner.flat_param], ValueError, "a flat parameter already"),
        ([nn.Parameter(torch.ones(1))], ValueError, "does not have 1 of them"),
    ):
        with pytest.raises(kind, match=text.replace("(", r"\(").replace(")", r"\)")):
            FlattenParamsWrapper(linear, params=params)
    flat = FlattenParamsWrapper(linear)
    with pytest.raises(ValueError, match="got 8, want 9"):
        flat.get_param_views(torch.ones(8))
    for first, end in ((3, 3), (-1, 2), (9, 12), (5, 4)):
        with pytest.raises(ValueError, match="invalid range"):
            flat.shard_metadata(first, end)
    cut = flat.shard_metadata(5, 10)
    assert [(p.name, p.first, p.end, p.offset) for p in cut.pieces] == [("weight", 5, 6, 5), ("bias", 0, 3, 6)]
    assert cut.padding_numel == 1 and cut.numel == 5


def test_shards_are_what_their_metadata_says() -> None:
    for result in run_ranks(flatten_scenarios.described, 2):
        for layout, facts in result.items():
            assert facts["equal"] and facts["covered"] == facts["numel"], layout
            assert facts["padding"] == (layout != "dim0"), layout
            assert "no such rank (got 2, want 0 to 1)" in facts["error"]
        assert result["flat parameters"]["zero"]


def test_a_flattened_module_trains_inside_of_torchs_forms() -> None:
    for result in run_ranks(flatten_scenarios.sharded, 2):
        for form, values in result.items():
            torch.testing.assert_close(values, result["alone"], rtol=1e-4, atol=1e-5, msg=form)
