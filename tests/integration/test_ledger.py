"""The ledger of a real run: a drain for a new node, and a worker that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from harness import SCRIPTS, Job, wait_for

from elastic_launch.observe.ledger import PARTS

DIGITS = str(SCRIPTS.parents[1] / "examples" / "digits" / "train.py")


def observed(job: Job, *options: str) -> str:
    command = [sys.executable, "-m", "elastic_launch.observe", str(job.logs), *options]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=180).stdout


def steps_of(job: Job, number: int, nodes: int = 1) -> int:
    """Wait until so many nodes have done a round's first step; return it."""

    def probe() -> list[int]:
        steps = [event["step"] for event in job.events("first_step") if event["round"] == number]
        return steps if len(steps) >= nodes else []

    return wait_for(f"the first step of round {number}", probe, 90)[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_drain_and_a_killed_worker_are_reported_with_their_costs(job: Job) -> None:
    gate = job.directory / "hurry"
    saving = ["--checkpoint", str(job.directory / "checkpoints"), "--every", "100000", "--step-time", "0.5"]
    command = [str(SCRIPTS / "paced.py"), str(gate), DIGITS, *saving]
    fixed = ["--rdzv-id", "ledger"]
    host = job.node("a", *fixed, command=command)
    assert steps_of(job, 1) == 1
    guest = job.node("b", *fixed, command=command)
    resumed = steps_of(job, 2, nodes=2)
    wait_for("a drain", lambda: job.events("round_drained"))
    victims = [event for event in job.events("worker_started") if event["round"] == 2 and event["rank"] == 1]
    os.kill(victims[0]["pid"], signal.SIGKILL)
    steps_of(job, 3)
    gate.touch()
    assert host.wait(120) == 0, host.output
    assert guest.wait(30) == 0, guest.output

    ledger = json.loads(observed(job, "--json"))
    assert ledger["node"] == "a", "the leader knows most"
    drain, crash = ledger["incidents"]
    assert (drain["kind"], drain["drained"], drain["lost_steps"]) == ("membership", True, 0)
    assert (crash["kind"], crash["drained"]) == ("crash", False)
    (drained,) = job.events("round_drained")
    assert resumed == drained["step"] + 1, "the drain cost no step"
    (path,) = job.logged("events-a.jsonl")
    events = [json.loads(line) for line in path.read_text().splitlines()]
    counts = {event["round"]: (event["first"], event["last"]) for event in events if event["event"] == "round_steps"}
    assert counts[1] == (0, drained["step"])
    assert counts[2][0] == drained["step"]
    assert crash["lost_steps"] == counts[2][1] - counts[3][0], "what was done since the last snapshot"
    for incident in (drain, crash):
        parts = [incident[name] for name in PARTS]
        assert all(part is not None and part >= 0 for part in parts), incident
        assert incident["still_s"] == pytest.approx(sum(parts), abs=1e-4)
    assert ledger["steps"] == counts[3][1]
    assert 0 < ledger["goodput"] < 1

    for number, word in [(1, "membership, drained"), (2, "crash")]:
        assert host.output.count(f"incident {number}: {word} (") == 1, host.output
        assert f"round {number} -> {number + 1}: detected" in host.output
    assert "2 incidents (1 crash, 1 membership)" in host.output
    assert "restarts 1 of 3" in host.output
    assert "incident 1" not in guest.output, "who leads tells it"
    assert "goodput" not in guest.output
    assert "1 -> 2" in observed(job)


def test_a_plain_script_gets_a_summary_without_steps(job: Job) -> None:
    agent = job.launch("--standalone", "--rdzv-id", "plain")
    job.world(1)
    job.tell("exit-0", "3")
    job.world(1, after=1)
    job.finish()
    assert agent.wait() == 0
    assert "s; 1 incident (1 crash); restarts 1 of 3" in agent.output
    assert "goodput" not in agent.output
    (incident,) = json.loads(observed(job, "--json"))["incidents"]
    assert (incident["restore_s"], incident["first_step_s"], incident["lost_steps"]) == (None, None, None)
    assert incident["recovered"]


@pytest.mark.slow
def test_a_node_that_comes_before_the_end_waits_when_a_resize_would_not_pay(job: Job) -> None:
    """Its last steps take much longer than the earlier ones, so the rest seems short whenever the node comes."""
    gate = job.directory / "go-on"
    # More than the interval of two estimates, so that there is one.
    conf = ["--rdzv-conf", "resize_delay=12", "--rdzv-id", "late"]
    command = [str(SCRIPTS / "halted.py"), "20", str(gate), DIGITS, "--epochs", "1", "--step-time", "0.05"]
    host = job.node("a", *conf, command=command)
    host.says("step 20 ", timeout=90)
    guest = job.node("b", *conf, command=command)
    wait_for("the word that it waits in vain", lambda: job.events("resize_skipped"), 60)
    gate.touch()
    assert host.wait(60) == 0, host.output
    assert guest.wait(30) == 0, guest.output
    assert [event["round"] for event in job.events("round_formed")] == [1]
    (skipped,) = job.events("resize_skipped")
    assert skipped["nodes"] == ["b"]
    assert skipped["saved_s"] <= skipped["cost_s"] == 1.0, "the workers are live"
    assert skipped["saved_s"] == pytest.approx(skipped["remaining_s"] / 2, abs=0.01)
    assert "no resize for node b" in host.output
    assert "no resize for node b" in guest.output, "who waits in vain is told"
