"""Bits that flip without an error: verified steps find them, and the result is that of an undisturbed run."""

from __future__ import annotations

import re
from typing import Any

import pytest
from changes import Changes, pids
from harness import Job

from elastic_launch.faults import FaultPlan

pytestmark = pytest.mark.slow


def flip(rank: int, step: int, of: str = "gradient", **how: Any) -> FaultPlan:
    return FaultPlan.fail_at(rank, step, do="flip", of=of, **how)


def verified(job: Job, verify: str, *options: str) -> Changes:
    return Changes(job, "--verify", verify, "--no-compare", *options, live=True, step_time=0.05)


def trained(job: Job, world: int, plan: FaultPlan, verify: str, *options: str) -> tuple[Changes, dict[str, Any]]:
    changes = verified(job, verify, *options)
    agent = changes.alone("--nproc", str(world), plan=plan)
    return changes, changes.finish(agent)


def test_a_flip_in_a_verified_step_costs_no_step(job: Job, undisturbed: str) -> None:
    """With four ranks each has one micro-batch, so all are verified."""
    changes, result = trained(job, 4, flip(2, 20), "100%")
    (found,) = job.events("corruption_found")
    assert (found["step"], found["ranks"], found["suspect"]) == (21, [2], 0)
    assert changes.done_again() == 0
    before, after = pids(job, 1), pids(job, 2)
    assert {before[rank] for rank in (0, 1, 3)} <= {*after.values()}
    assert before[2] not in after.values()
    assert result["hash"] == undisturbed


def test_what_a_rank_has_spoiled_since_the_last_agreement_is_undone(job: Job, undisturbed: str) -> None:
    changes, result = trained(job, 3, flip(1, 18, every=True), "20%")
    (found,) = job.events("corruption_found")
    # Of the steps with the seed 1 these are verified: 10, 16, 27, 46, ...
    assert (found["step"], found["ranks"], found["suspect"]) == (27, [1], 11)
    assert changes.resumed(2) <= 15
    assert changes.done_again() >= 10
    assert result["hash"] == undisturbed


def test_checkpoints_since_the_last_agreement_are_removed(job: Job, undisturbed: str) -> None:
    """No process stays that knows of it, so a newer one in storage would be restored."""
    options = ("--verify", "20%", "--no-compare", "--checkpoint", str(job.directory / "saved"), "--every", "4")
    changes = Changes(job, *options, step_time=0.8)
    agent = changes.alone("--nproc", "3", plan=flip(1, 18, every=True))
    changes.trains(3, after=1)
    result = changes.finish(agent)
    # On a busy machine none of them may have been saved in time.
    wrong = [event["step"] for event in job.events("checkpoint_saved") if event["round"] == 1 and event["step"] > 15]
    removed = re.search(r"since they may be wrong: the checkpoints of steps ([\d, ]+)", agent.output)
    assert not wrong or (removed is not None and str(wrong[-1]) in removed[1].split(", "))
    assert changes.resumed(2) <= 15
    assert result["hash"] == undisturbed


def test_a_run_that_ends_does_not_name_a_checkpoint_that_was_removed(job: Job) -> None:
    saved = job.directory / "saved"
    options = ("--verify", "20%", "--no-compare", "--checkpoint", str(saved), "--every", "4")
    changes = Changes(job, *options, step_time=0.3)
    agent = changes.alone("--nproc", "3", "--max-restarts", "0", plan=flip(1, 18, every=True))
    assert agent.wait(200) != 0, agent.output
    assert "since they may be wrong: the checkpoints of steps" in agent.output
    found = max(int(path.name.split(".")[0].removeprefix("step-")) for path in saved.glob("step-*"))
    # If a later copy was under way as its state was dropped, the end says of this one that it was not saved.
    said = rf" step {found} (is saved|was the last to be saved); \d+ steps since then lost$"
    assert re.search(said, agent.output, re.MULTILINE), agent.output


def test_the_update_of_the_last_verified_step_is_undone(job: Job, undisturbed: str) -> None:
    """The rank that computes it wrong writes the newest snapshot."""
    _, result = trained(job, 3, flip(0, 15, "sums"), "20%", "--due-until", "5", "--due-at", "15")
    (found,) = job.events("corruption_found")
    assert (found["step"], found["ranks"], found["suspect"]) == (27, [0], 11)
    assert result["hash"] == undisturbed


def test_verified_steps_compare_the_optimizers_states(job: Job, undisturbed: str) -> None:
    changes, result = trained(job, 3, flip(1, 26, "optimizer"), "20%")
    text = "After step 26 the ranks do not have the same optimizer's momentum_buffer of "
    assert re.search(f"{text}.*: rank 1 differs from ranks 0, 2", job.agents[0].output), job.agents[0].output
    assert "After step 15 they were the same." in job.agents[0].output
    assert changes.resumed(2) <= 15
    assert result["hash"] == undisturbed


def test_of_two_ranks_the_one_is_named_that_does_not_repeat_its_result(job: Job, undisturbed: str) -> None:
    """In step 21 with the seed 1, the first of a rank's two micro-batches is verified."""
    changes, result = trained(job, 2, flip(0, 20), "100%")
    (found,) = job.events("corruption_found")
    assert (found["step"], found["ranks"], found["suspect"]) == (21, [0], 0)
    assert changes.done_again() == 0
    assert result["hash"] == undisturbed


@pytest.mark.parametrize(("of", "verify"), [("gradient", "100%"), ("parameter", "20%")])
def test_two_ranks_that_both_repeat_their_results_go_back(job: Job, undisturbed: str, of: str, verify: str) -> None:
    changes, result = trained(job, 2, flip(1, 20, of, every=of == "gradient"), verify)
    (found,) = job.events("corruption_found")
    step, agreed = (21, 19) if verify == "100%" else (27, 15)
    assert (found["step"], found["ranks"], found["nodes"], found["suspect"]) == (step, [], [], step - 1 - agreed)
    assert "it is not known which one is right" in job.agents[0].output
    assert changes.resumed(2) <= agreed
    assert changes.done_again() >= step - 1 - agreed
    assert pids(job, 1) == pids(job, 2)
    assert not job.events("node_excluded")
    assert result["hash"] == undisturbed


def test_machines_that_differ_from_the_start_are_refused_by_name(job: Job) -> None:
    changes = verified(job, "1%")
    agent = changes.alone("--nproc", "3", plan=flip(1, 0, every=True))
    assert agent.wait(100) == 93, agent.output
    assert "verify=: step 1: as the round began, all ranks computed the same micro-batch" in agent.output
    assert re.search(r"ranks 0, 2: (torch|\d)[^;]+; rank 1: ", agent.output), agent.output
    assert not changes.steps()
    assert not job.events("node_excluded")


def test_a_node_that_differs_as_it_joins_is_left_out(job: Job, undisturbed: str) -> None:
    changes = verified(job, "1%")
    first = changes.node("a")
    changes.trains(1, steps=3)
    plan = FaultPlan.fail_at(1, do="flip", of="gradient", every=True, round=2)
    second = changes.node("b", plan=plan)
    assert second.wait(100) != 0, second.output
    assert "all ranks computed the same micro-batch, with different results" in second.output
    (left,) = job.events("newcomer_left_out")
    assert left["node"] == "b"
    result = changes.finish(first)
    assert changes.done_again() == 0
    assert len({*pids(job, 1).values(), *pids(job, 3).values()}) == 1
    assert result["hash"] == undisturbed


def test_other_samples_accuse_the_data_and_no_node(job: Job) -> None:
    changes = verified(job, "100%", "--odd-data", "1")
    agent = changes.alone("--nproc", "3", "--max-restarts", "0")
    assert agent.wait(100) != 0
    assert "step 1, micro-batch 0: the loaders of two ranks gave different samples" in agent.output
    assert "The dataset must return the same sample for an index on all nodes" in agent.output
    assert not changes.steps()
    assert not job.events("corruption_found")
    assert not job.events("node_excluded")


@pytest.mark.parametrize(("liar", "excluded"), [("a", True), ("b", True), ("b", False)])
def test_of_two_nodes_the_one_that_computes_wrong_is_left_out(
    job: Job, undisturbed: str, liar: str, excluded: bool
) -> None:
    """The node ``a`` hosts the run."""
    changes = verified(job, "100%")
    flags = ["--rdzv-conf", "join_settle=300"] + (["--no-exclude-corrupt"] if not excluded else [])
    plan = flip("ab".index(liar) * 2, 20, every=True)
    nodes = [changes.node(x, *flags, nnodes="1:2", nproc=2, rank="ab".index(x), plan=plan) for x in "ab"]
    result = changes.finish(*nodes)
    (found,) = job.events("corruption_found")
    assert (found["step"], found["ranks"], found["nodes"], found["suspect"]) == (21, [plan.faults[0].rank], [liar], 0)
    left_out = [(each["node"], each["seconds"]) for each in job.events("node_excluded")]
    assert left_out == ([(liar, 7200)] if excluded else [])
    others = "ab".replace(liar, "")
    last = job.events("round_formed")[-1]
    assert [*last["nodes"]] == ([others] if excluded else ["a", "b"])
    assert changes.done_again() == 0
    assert result["hash"] == undisturbed
