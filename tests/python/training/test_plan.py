"""What memory_plan says before anything runs is what the daemon then reports."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cluster import run_ranks
from models import Case, build, loss_of, shard


def plan_then_train(case: Case, optimizer: str) -> dict[str, Any]:
    from shardd.torch import fully_shard, memory_plan, optim
    from shardd.torch._job.job import jobs

    model = build(case)
    shard(model, case, fully_shard)
    kinds = {"none": None, "daemon": optim.AdamW, "sgd": optim.SGD, "stock": torch.optim.AdamW,
             "adafactor": optim.Adafactor}  # fmt: skip
    kind = kinds[optimizer]
    built = None if kind is None else kind(model.parameters(), lr=1e-3)
    plan = memory_plan(model)
    loss_of(model, 0, 0, dist.get_rank()).backward()
    if built is not None:
        built.step()
    dist.barrier()  # all are attached
    ctl = os.path.join(os.path.dirname(os.environ["SHARDD_DAEMON"]), "shardctl")
    answer = subprocess.run(
        [ctl, "--json", "memory", jobs()[0].name], capture_output=True, text=True, check=True
    ).stdout
    dist.barrier()
    asked = [ctl, "plan", "-", "--json"]
    said = subprocess.run(asked, input=json.dumps(plan.spec), capture_output=True, text=True, check=True).stdout
    found = {"purposes": plan.purposes(), "total": plan.total_bytes, "text": str(plan)}
    return {**found, "daemon": json.loads(answer), "shardctl": json.loads(said)}


@pytest.mark.parametrize("case, optimizer", [
    (Case(), "daemon"),
    (Case(), "sgd"),
    (Case(), "stock"),
    (Case(param_dtype="bf16", reduce_dtype="fp32", freeze=("layers.1",)), "daemon"),
], ids=["adamw", "sgd", "stock", "bf16-frozen"])  # fmt: skip
def test_the_daemon_reports_what_was_planned(case: Case, optimizer: str) -> None:
    for result in run_ranks(plan_then_train, 2, case, optimizer):
        reported = {p["purpose"]: int(p.get("planned_bytes", 0)) for p in result["daemon"]["purposes"]}
        planned = result["purposes"]
        assert {name: size for name, size in planned.items() if name in reported or size} == reported
        assert sum(planned.values()) == result["total"] == int(result["daemon"]["planned_bytes"])
        before = {p["purpose"]: int(p["planned_bytes"]) for p in result["shardctl"]["purposes"]}
        assert before == {name: size for name, size in planned.items() if size}
        for purpose in result["daemon"]["purposes"]:  # and it is what was allocated, in whole pages
            pages = -(-planned[purpose["purpose"]] // 4096)
            if purpose["purpose"] == "snapshot":  # it is made before the first hand-in, or has no shards of its own
                pages = pages - planned["shards"] // 4096 if optimizer == "stock" else 0
            assert pages * 4096 == int(purpose.get("allocated_bytes", 0)), purpose


def test_adafactors_state_takes_memory_for_rows_and_columns() -> None:
    for result in run_ranks(plan_then_train, 2, Case(), "adafactor", environment={"SHARDD_TEST_WIDTH": "256"}):
        reported = {p["purpose"]: p for p in result["daemon"]["purposes"]}
        state, shards = reported["optimizer"], int(reported["shards"]["allocated_bytes"])
        assert int(state["planned_bytes"]) == result["purposes"]["optimizer"]
        assert 0 < int(state["allocated_bytes"]) <= int(state["planned_bytes"]) < shards / 8, state


def test_the_table_names_purposes_and_adds_up() -> None:
    text = run_ranks(plan_then_train, 1, Case(), "daemon")[0]["text"]
    rows = {line[:15].strip(): line[15:].split() for line in text.splitlines()}
    assert {"shards", "gradients", "optimizer", "journal", "session", "total"} <= set(rows)
    sizes = [
        float(values[0])
        for name, values in rows.items()
        if name in ("shards", "gradients", "optimizer", "journal", "session")
    ]
    assert abs(sum(sizes) - float(rows["total"][0])) < 0.3
    assert 'largest group "layers.0"' in text
