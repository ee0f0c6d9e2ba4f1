"""``--drill``: planned faults happen once each, wherever the training continues, and do not change its result."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from changes import Changes, undisturbed_hash
from harness import Job

DIGITS = str(Path(__file__).parents[2] / "examples" / "digits" / "train.py")


def drill(job: Job, *faults: dict[str, Any]) -> list[str]:
    path = job.directory / "drill.yaml"
    path.write_text(json.dumps({"seed": 3, "faults": faults}))
    return ["--drill", str(path)]


def landed(job: Job) -> list[tuple[int, int]]:
    return [(event["fault"], event["step"]) for event in job.events("fault_landed")]


@pytest.mark.slow
@pytest.mark.parametrize("live", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["live", "restarted"])
def test_each_fault_of_a_drill_happens_once_and_the_result_stays_the_same(job: Job, tmp_path: Path, live: bool) -> None:
    changes = Changes(job, live=live, step_time=0.02)
    faults = drill(
        job,
        {"step": 20, "rank": 1, "do": "kill"},
        {"step": 40, "do": "freeze", "seconds": 1.5},
        {"step": 60, "rank": 0, "do": "exit"},
        {"step": 80, "rank": 1, "do": "slow", "seconds": 0.5},
        {"step": 1000, "rank": 0, "do": "kill"},
    )
    agent = changes.alone("--nproc", "2", *faults)
    assert agent.wait(150) == 0, agent.output
    assert landed(job) == [(0, 20), (1, 40), (2, 60), (3, 80)]
    (ended,) = job.events("drill_ended")
    assert (ended["planned"], ended["missing"]) == (5, [4])
    assert "drill: 4 of 5 faults happened; not fault 4" in agent.output
    assert re.search(r"drill: rank [01] is stopped for 1.5 s after step 40", agent.output)
    assert [event["restarts"] for event in job.events("restart_charged")] == [1, 2]
    (tmp_path / "alone").mkdir()
    result = json.loads((job.work / "result.json").read_text())
    assert result["hash"] == undisturbed_hash(tmp_path / "alone")


@pytest.mark.slow
def test_the_digits_survive_a_killed_rank_and_a_sigterm(job: Job, tmp_path: Path) -> None:
    """The weights are those of a run that nothing disturbs, after the agent was ended and started again, too."""
    flags = ["--standalone", "--nproc", "2"]
    training = [DIGITS, "--exact", "--every", "1000", "--checkpoint", str(tmp_path / "checkpoints")]

    def result(name: str) -> dict[str, Any]:
        return dict(json.loads((tmp_path / name).read_text()))

    alone = job.launch(*flags, name="alone", command=[DIGITS, "--exact", "--result", str(tmp_path / "alone.json")])
    assert alone.wait(150) == 0, alone.output
    faults = drill(job, {"step": 20, "rank": 1, "do": "kill"}, {"step": 40, "rank": 0, "do": "sigterm"})
    agent = job.launch(*flags, *faults, name="disturbed", command=training)
    assert agent.wait(150) == 128 + signal.SIGTERM, agent.output
    assert landed(job) == [(0, 20), (1, 40)]
    again = job.launch(*flags, name="again", command=[*training, "--result", str(tmp_path / "again.json")])
    assert again.wait(150) == 0, again.output
    assert result("again.json")["resumed_step"] >= 40, again.output
    assert result("again.json")["weights_sha256"] == result("alone.json")["weights_sha256"]


@pytest.mark.slow
def test_a_drill_takes_a_node_away_by_sigterm_and_another_by_its_loss(job: Job) -> None:
    changes = Changes(job, step_time=0.05)
    faults = drill(job, {"step": 30, "rank": 1, "do": "sigterm"}, {"step": 60, "rank": 1, "do": "lose"})
    together = ("--join-settle", "100", *faults)  # the round of the first fault has all of them
    a = changes.node("a", *together, rank=0, nnodes="1:3")
    b, c = (changes.node(name, *together, nnodes="1:3") for name in "bc")
    assert {b.wait(100), c.wait(100)} == {143, -signal.SIGKILL}
    changes.finish(a)
    assert landed(job) == [(0, 30), (1, 60)]
    assert "drill: all 2 faults happened" in a.output
    kinds = [(how, kind) for how, _, kind in changes.kinds() if kind != "membership"]
    assert kinds == [("drained", "preemption"), ("broken", "node loss")]


@pytest.mark.slow
def test_a_drill_cuts_a_nodes_link_and_the_node_comes_back(job: Job, tmp_path: Path) -> None:
    changes = Changes(job, step_time=0.2)  # enough is left for a resize to pay
    faults = drill(job, {"step": 20, "rank": 1, "do": "cut_link", "seconds": 6})
    fast = ("--dead-after", "2", "--rdzv-conf", "beat=0.4,join_settle=100", *faults)
    a, b = changes.node("a", *fast, rank=0, nnodes="1:2"), changes.node("b", *fast, nnodes="1:2")
    a.says("node b lost")
    changes.trains(2, after=job.event("node_lost")["broke"])
    result = changes.finish(a, b)
    assert landed(job) == [(0, 20)]
    assert "has its agent cut off from the leader for 6 s" in b.output
    (tmp_path / "alone").mkdir()
    assert result["hash"] == undisturbed_hash(tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.parametrize("live", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["live", "restarted"])
def test_a_drill_closes_a_workers_connections(job: Job, tmp_path: Path, live: bool) -> None:
    changes = Changes(job, live=live, step_time=0.02)
    agent = changes.alone("--nproc", "2", *drill(job, {"step": 20, "rank": 1, "do": "disconnect"}))
    assert agent.wait(150) == 0, agent.output
    assert landed(job) == [(0, 20)]
    assert [(how, number) for how, number, _ in changes.kinds()] == [("broken", 1)]
    assert len(job.started()) == (2 if live else 4)
    (tmp_path / "alone").mkdir()
    result = json.loads((job.work / "result.json").read_text())
    assert result["hash"] == undisturbed_hash(tmp_path / "alone")


@pytest.mark.slow
def test_a_drill_has_copies_to_storage_fail_for_a_while(job: Job) -> None:
    changes = Changes(job, "--checkpoint", str(job.directory / "checkpoints"), "--every", "20", step_time=0.05)
    faults = drill(
        job,
        {"step": 55, "rank": 0, "do": "fail_copies", "seconds": 5},
        {"step": 100, "rank": 0, "do": "cut_link", "seconds": 2},
    )
    agent = changes.alone(*faults)
    assert agent.wait(150) == 0, agent.output
    assert landed(job) == [(0, 55)]
    assert re.search(r"checkpoint of step \d+: Could not write a checkpoint in .*: File too large", agent.output)
    assert "drill: fault 1 does not happen: this node leads the run" in agent.output
    assert "drill: 1 of 2 faults happened; not fault 1" in agent.output
    assert changes.durable()[-1] == 200
    assert not job.events("round_broken")


def test_a_plan_that_cannot_be_carried_out_is_refused(job: Job) -> None:
    for text, message in {
        "[{step: 3, do: melt}]": "cannot have 'do': 'melt'",
        "[{step: 3, do: partition}]": "It would need root. cut_link",
        "[{step: 3, do: tear}]": "A drill damages no checkpoint",
        "[{step: 3, do: cut_link}]": "cannot take 0 s",
        "[]": "A drill is a list of 1 to 1000 faults",
        "{fault: 3}": "A drill has the unknown key 'fault'",
        "{seed: x, faults: [{step: 3}]}": "seed cannot be 'x'",
        "[{step: 3": "not a plan of faults",
        "[{step: 3, when: 4}]": "has the unknown key 'when'",
    }.items():
        path = job.directory / "drill.yaml"
        path.write_text(text)
        agent = job.launch("--standalone", "--drill", str(path), name="refused")
        assert agent.wait(30) == 2
        assert f"--drill {path}: " in agent.output
        assert message in agent.output
    agent = job.launch("--standalone", "--drill", "/nowhere", name="unread")
    assert agent.wait(30) == 2
    assert "--drill /nowhere cannot be read" in agent.output
