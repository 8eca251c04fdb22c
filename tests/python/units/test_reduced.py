"""Gradients reduced in bf16 against torch's fully_shard: its bits where two ranks add, nearer to the sum where more do."""

from __future__ import annotations

import pytest
import torch

from cluster import run_ranks
from models import Case
from training.test_parity import check
from units.reduced_scenarios import both


@pytest.mark.parametrize("case", [
    Case(steps=20, reduce_dtype="bf16"),
    Case(steps=20, param_dtype="bf16"),
    Case(steps=20, reduce_dtype="bf16", stored="bf16"),
    Case(steps=20, reduce_dtype="fp32", stored="bf16"),
    Case(steps=20, reduce_dtype="bf16", accumulate=3),
    Case(steps=20, stored="bf16", accumulate=3),
    Case(steps=20, reduce_dtype="bf16", mesh=(2, 1), accumulate=2),
    Case(steps=20, reduce_dtype="bf16", mesh=(1, 2), accumulate=2),
], ids=["reduce", "computed", "stored", "stored-in-fp32", "added", "stored-added", "replicas", "one-replica"])  # fmt: skip
def test_two_ranks_have_the_bits_of_torch(case: Case) -> None:
    results = run_ranks(both, 2, case)
    for result in results:
        for ours, stock in zip(result["shardd"], result["torch"], strict=True):
            assert ours.keys() == stock.keys()
            for name, value in stock.items():
                assert torch.equal(ours[name], value), name
    if case.reduce_dtype == "bf16" and not case.stored:
        sent = [result["own"]["head.weight"].bfloat16().float() for result in results]
        in_fp32 = (sent[0] + sent[1]) / 2
        first = results[0]["shardd"][0]["head.weight"]
        assert torch.equal(first, in_fp32.bfloat16().float())
        assert not torch.equal(first, in_fp32), "a sum in fp32 would pass as well"


@pytest.mark.parametrize(
    "case", [Case(steps=20, reduce_dtype="bf16"), Case(steps=20, reduce_dtype="bf16", mesh=(2, 2))], ids=["1-D", "2-D"]
)
def test_more_ranks_are_nearer_to_the_sum_than_torch(case: Case) -> None:
    results = run_ranks(both, 4, case)
    errors = {"torch": 0.0, "shardd": 0.0}
    for name in results[0]["own"]:
        sent = torch.stack([result["own"][name].bfloat16().double() for result in results])
        for impl in errors:
            got = results[0][impl][0][name]
            assert torch.equal(got, got.bfloat16().float()), f"{impl}: {name} holds numbers that are none of bf16"
            errors[impl] += (got.double() - sent.mean(0)).square().sum().item()
    assert errors["shardd"] < errors["torch"], errors


@pytest.mark.parametrize("case", [
    Case(steps=20, optimizer="adam", stock=True, reduce_dtype="bf16"),
    Case(steps=20, optimizer="adam", stock=True, param_dtype="bf16", accumulate=2),
    Case(steps=20, optimizer="adam", stock=True, reduce_dtype="bf16", mesh=(2, 1), clip=0.5),
    Case(steps=20, optimizer="adam", stock=True, stored="bf16", accumulate=2),
], ids=["reduce", "computed", "replicas", "stored"])  # fmt: skip
def test_twenty_steps_of_adam_have_the_bits_of_torch(case: Case) -> None:
    check(case, 2, tolerance=0, alone=False)


def test_the_daemons_optimizer_steps_parameters_stored_in_bf16() -> None:
    # With moments in fp32, which torch's has in bf16; clipping writes into gradients that are shown as copies.
    check(Case(stored="bf16", steps=6, clip=0.5), 2, tolerance=6e-2, alone=False)
