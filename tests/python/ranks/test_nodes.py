"""Jobs over two nodes: two daemons on the loopback, two ranks each, as torchrun starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading

import pytest
import torch

from cluster import ROOT
from comparing import close
from models import Case, compare, train_alone
from node_daemons import Nodes, NodesCluster, nodes, run_on_nodes, torchrun_on_nodes
from ranks import nodes_scenarios
from ranks.deaths import run_with_a_death
from ranks.rank_life import Death
from training.test_parity import check_results

_STEPS = 12


@pytest.mark.parametrize("case", [
    Case(mesh=(2, 2), steps=_STEPS, accumulate=2, clip=0.1),
    Case(mesh=(2, 2), steps=_STEPS, accumulate=3, sync=False, clip=0.1),
    Case(mesh=(2, 2), steps=_STEPS, reshard=False, tie=True, optimizer="groups"),
    Case(mesh=(2, 2), steps=_STEPS, freeze=("layers.0.up.weight",), skip_grad=(1,)),
    Case(mesh=(2, 2), steps=_STEPS, divide=3.0, optimizer="sgd"),
], ids=["each", "no-sync", "tied-groups", "frozen-unused", "divide"])  # fmt: skip
def test_two_nodes_train_as_torchs_hybrid_shard_does(two: Nodes, case: Case) -> None:
    results = run_on_nodes(two, compare, case)
    counts = [result["shardd"]["counters"] for result in results]
    # Each daemon counts its own: unshards and bytes of its ranks, whose halves make up one copy.
    assert counts[0]["commits"] == counts[3]["commits"] == case.steps
    assert counts[0]["aborts"] == counts[3]["aborts"] == 0
    for result in results:  # check_results counts all ranks at one daemon
        result["shardd"]["counters"] = {
            **counts[0],
            "unshards": counts[0]["unshards"] + counts[3]["unshards"],
            "bytes_reduced": counts[0]["bytes_reduced"] + counts[3]["bytes_reduced"],
        }
    check_results(case, results)
    for result in results[1:]:  # bit for bit: the nodes' copies never differ
        for name, value in results[0]["shardd"]["parameters"].items():
            assert torch.equal(result["shardd"]["parameters"][name], value), name


@pytest.mark.parametrize("case, local", [
    (Case(mesh=(4, 1), steps=_STEPS, accumulate=2, clip=0.1), 2),
    (Case(mesh=(4, 2), steps=6, accumulate=2, clip=0.1, optimizer="groups"), 4),
], ids=["of-one", "of-two"])  # fmt: skip
def test_rows_that_share_a_node_train_as_torchs_do(two: Nodes, case: Case, local: int) -> None:
    results = run_on_nodes(two, compare, case, local=local)
    for result in results:
        ours, stock = result["shardd"], result["torch"]
        for name in ("losses", "norms"):
            close(ours[name], stock[name])
        assert (ours["keys"], ours["local_shapes"]) == (stock["keys"], stock["local_shapes"])
        assert (ours["placements"], ours["counters"]["commits"]) == (stock["placements"], case.steps)
        for name, value in stock["parameters"].items():
            close(ours["parameters"][name], value)
            assert torch.equal(ours["parameters"][name], results[0]["shardd"]["parameters"][name]), name


def test_rows_in_any_order_of_nodes_have_one_gradient(two: Nodes) -> None:
    results = run_on_nodes(two, nodes_scenarios.rows_in_turns)
    for result in results:
        assert torch.equal(result["gradient"], torch.full((2, 3), 1.5))
        assert torch.equal(result["after"], torch.full((3, 2), 1 - 1.5))


def test_an_unchanged_program_trains_over_two_nodes(two: Nodes) -> None:
    results = torchrun_on_nodes(two, nodes_scenarios.unchanged, _STEPS, through=("-m", "shardd.torch"))
    alone = train_alone(Case(steps=_STEPS), 4)
    for rank in range(4):
        kinds = results[rank]["kinds"]
        assert kinds[0] and "shardd.torch._sharding.fully_shard" in kinds
        close(results[rank]["losses"], alone["losses"][rank], 2e-6)
        for name, value in alone["parameters"].items():
            close(results[rank]["parameters"][name], value, 2e-6)


def test_bf16_over_two_nodes(two: Nodes) -> None:
    case = Case(mesh=(2, 2), steps=_STEPS, param_dtype="bf16", reduce_dtype="fp32")
    results = run_on_nodes(two, compare, case)
    for result in results:
        close(result["shardd"]["losses"], result["torch"]["losses"], 5e-3)


def test_gradient_memory_that_is_given_back_between_steps(two: Nodes) -> None:
    case = Case(mesh=(2, 2), steps=4)
    results = run_on_nodes(two, compare, case, environment={"SHARDD_GIVE_BACK": "1"})
    for result in results:
        close(result["shardd"]["losses"], result["torch"]["losses"])


def test_job_facts_are_global_and_daemon_facts_are_per_node(two: Nodes) -> None:
    results = run_on_nodes(two, nodes_scenarios.facts, 3)
    addresses = [f"127.0.0.1:{port}" for port in two.ports]
    for rank, result in enumerate(results):
        job, info = result["job"], result["job"]["info"]
        assert job["config"]["nodes"]["addresses"] == addresses
        assert job["config"]["gradient_divide_factor"] == 4 and job["world_size"] == 2
        assert (info["rank"], info["world_size"]) == (rank % 2, 2)
        assert [node["address"] for node in job["nodes"]] == addresses
        assert [node["here"] for node in job["nodes"]] == [rank < 2, rank >= 2]
        assert [node["state"] for node in job["nodes"]] == ["up", "up"]
        assert result["plan"] == {"world_size": 2, "replicas": 1}
        for norm, daemons in result["norms"]:
            assert norm == pytest.approx(daemons, rel=1e-5)
        assert result["norms"] == results[0]["norms"]
        alone = train_alone(Case(steps=3), 4)["parameters"]
        for name, value in alone.items():
            close(result["summoned"][name], value)
            assert torch.equal(result["summoned"][name], result["whole"][name])


def test_bytes_between_nodes_are_counted(two: Nodes) -> None:
    for rank, result in enumerate(run_on_nodes(two, nodes_scenarios.facts, 3)):
        here, other = result["job"]["nodes"][rank // 2], result["job"]["nodes"][1 - rank // 2]
        assert int(other["bytes_sent"]) > 0 and int(other["bytes_received"]) > 0
        assert int(here["bytes_sent"]) == int(here["bytes_received"]) == 0


def test_the_wrapper_takes_its_rows_from_the_launcher(two: Nodes) -> None:
    results = run_on_nodes(two, nodes_scenarios.wrapped, _STEPS)
    alone = results[0]["alone"]
    for rank, result in enumerate(results):
        close(result["losses"], alone["losses"][rank][1::2])
        close(result["norms"], alone["norms"])
        for name, value in alone["parameters"].items():
            close(result["parameters"][name], value)


def test_addresses_can_be_given(two: Nodes) -> None:
    given = ",".join(f"127.0.0.1:{port}" for port in two.ports)
    assert run_on_nodes(two, nodes_scenarios.one_mesh, environment={"SHARDD_NODES": given}) == [""] * 4
    for text in run_on_nodes(two, nodes_scenarios.one_mesh, environment={"SHARDD_NODES": "127.0.0.1:1"}):
        assert text.startswith("ValueError: SHARDD_NODES") and "got 1" in text and "want 2" in text


def test_hosts_tell_nodes_apart_where_no_launcher_does(two: Nodes) -> None:
    """Ranks that know nothing of nodes are on one machine here: the (2, 2) mesh is one daemon's."""
    one = {"SHARDD_ADDRESS": two.address(0), "LOCAL_WORLD_SIZE": "", "GROUP_RANK": "", "GROUP_WORLD_SIZE": ""}
    with tempfile.TemporaryDirectory() as folder, NodesCluster(two, 2, folder) as cluster:
        for rank in range(4):
            cluster.start(nodes_scenarios.one_mesh, rank, (), one)
        assert set(cluster.wait(120).values()) == {0}, cluster.logs()
        assert [cluster.result(rank) for rank in range(4)] == [""] * 4


# What is refused.


def test_unsupported_meshes_and_optimizers_over_nodes_are_refused_by_name(two: Nodes) -> None:
    wants = {
        "crossing": "a row of its mesh crosses nodes (got ranks [0, 2] on 2 nodes",
        "rows": "torch.optim.AdamW steps in the trainers, and each of 2 nodes has 2 rows",
        "none": "trained on several nodes without an optimizer",
    }
    for texts in run_on_nodes(two, nodes_scenarios.refused_meshes):
        assert texts.keys() == wants.keys()
        for name, want in wants.items():
            assert texts[name].startswith("NotImplementedError") and want in texts[name], (name, texts[name])
            assert name != "crossing" or "init_device_mesh(device, (nodes" in texts[name]


def test_changes_to_a_job_over_nodes_are_harmlessly_refused(two: Nodes) -> None:
    for texts in run_on_nodes(two, nodes_scenarios.refused_calls):
        assert texts.pop("losses") == "[True, True]"
        for name, text in texts.items():
            assert text.startswith("NotImplementedError") and "spans 2 nodes" in text, (name, text)


def test_loads_and_edits_are_the_same_on_all_nodes(two: Nodes) -> None:
    results = run_on_nodes(two, nodes_scenarios.changed)
    for result in results:
        assert all(result["loaded"]) and all(result["edited"])
        assert result["on"] == result["again"]
        assert (result["aborts"], result["committed"]) == (0, 7)
        for name, value in results[0]["parameters"].items():
            assert torch.equal(result["parameters"][name], value), name


def test_edits_that_differ_between_nodes_are_named(two: Nodes) -> None:
    for text in run_on_nodes(two, nodes_scenarios.other_edits):
        assert "layers.1.up.weight" in text and "initial" not in text, text


def test_a_daemon_that_serves_no_other_nodes_is_named() -> None:
    with nodes(peers=False) as alone:
        for text in run_on_nodes(alone, nodes_scenarios.one_mesh):
            assert text.startswith("RuntimeError") and "the daemon of node 0 (rank 0) serves no other nodes" in text
            assert "--peer_listen" in text


def test_one_daemon_for_both_nodes_is_named(two: Nodes) -> None:
    with tempfile.TemporaryDirectory() as folder, NodesCluster(two, 2, folder) as cluster:
        for rank in range(4):
            cluster.start(nodes_scenarios.one_mesh, rank, (), {"SHARDD_ADDRESS": two.address(0)})
        assert set(cluster.wait(120).values()) == {0}, cluster.logs()
        for rank in range(4):
            assert "nodes 0 and 1 have one daemon" in cluster.result(rank)


def test_initial_values_that_differ_between_nodes_are_named(two: Nodes) -> None:
    for text in run_on_nodes(two, nodes_scenarios.other_values):
        assert "layers.1.up.weight" in text, text


# A rank dies.


@pytest.mark.parametrize(("victim", "moment"), [(3, "forward"), (3, "backward"), (0, "backward"), (2, "step")])
def test_a_ranks_death_on_one_node_costs_no_step_anywhere(two: Nodes, victim: int, moment: str) -> None:
    expected = train_alone(Case(steps=_STEPS), 4)
    results = run_with_a_death(two, nodes_scenarios.survive, Death(victim, 5, moment), _STEPS)
    begins = 6 if moment == "step" else 5
    for rank, result in enumerate(results):
        assert result["resumed"] == [begins], (rank, result["resumed"])
        close(result["losses"], expected["losses"][rank])
        for name, value in expected["parameters"].items():
            close(result["parameters"][name], value)
            assert torch.equal(result["parameters"][name], results[0]["parameters"][name]), name
        aborts = (0, 1) if moment == "step" else (1,)  # none where nobody had begun the next step
        assert result["counters"]["commits"] == _STEPS and result["counters"]["aborts"] in aborts


def test_torchrun_restarts_a_killed_rank_into_the_two_node_job(two: Nodes) -> None:
    expected = train_alone(Case(steps=_STEPS), 4)["losses"]
    with tempfile.TemporaryDirectory() as folder:
        results = torchrun_on_nodes(two, nodes_scenarios.restarted, _STEPS, folder, 3, 5, restarts=2)
    assert sorted(results) == [0, 1, 2, 3]
    # A torchrun counts its own workers' failures only, so where the other node's has not failed first: both resume all the same.
    assert max(result["restarts"] for result in results.values()) == 1
    for rank, result in results.items():
        assert result["first"] == 5 and result["commits"] == _STEPS and result["node"] == rank // 2
        close(result["losses"], expected[rank])


def test_a_killed_daemons_node_gets_the_state_from_another() -> None:
    expected = train_alone(Case(steps=_STEPS), 4)
    with nodes() as own, tempfile.TemporaryDirectory() as folder:
        killed = own.processes[1]

        def start_again() -> None:
            killed.wait()
            own.start(1)

        starter = threading.Thread(target=start_again)
        starter.start()
        results = torchrun_on_nodes(own, nodes_scenarios.restarted, _STEPS, folder, 3, 5, killed.pid, restarts=2)
        starter.join()
    node = next(result["node"] for rank, result in results.items() if result["commits"] < _STEPS)
    for rank, result in results.items():
        assert result["first"] == 5
        # The new daemon has not counted what the dead one did; ranks there ride with the state of node 0's.
        assert result["commits"] == (_STEPS - 5 if rank // 2 == node else _STEPS)
        close(result["losses"][5:], expected["losses"][rank][5:])
        for name, value in expected["parameters"].items():
            close(result["parameters"][name], value)


@pytest.mark.parametrize("more", [(), ("--cut",)], ids=["replicas", "cut"])
def test_the_example_goes_on_after_a_kill(more: tuple[str, ...]) -> None:
    example = ROOT / "client" / "examples" / "torch" / "nodes.sh"
    small = ("--width=32", "--layers=2", "--heads=2", "--context=16", "--batch=2", "--steps=11", "--kill-at=4")
    run = subprocess.Popen([example, *small, *more], env=dict(os.environ, PYTHON=sys.executable), stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, text=True, start_new_session=True)  # fmt: skip
    try:
        said = run.communicate(timeout=400)[0]
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGTERM)  # daemons and launchers, too: these would restart their workers for ever
            run.wait()
    assert run.returncode == 0, said
    assert [said.count(f"rank {rank}: resumed at step 4") for rank in range(4)] == [1] * 4, said
    assert "step   10  loss" in said
