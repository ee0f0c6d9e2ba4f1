"""Nodes that cannot do what a run's nodes do join it: they are left out, and it goes on."""

from __future__ import annotations

from harness import SCRIPTS, Agent, Job, wait_for

SCRIPT = str(SCRIPTS / "newcomer.py")
CONF = ("--rdzv-conf", "join_settle=0.5,resize_delay=0.1,beat=0.5,dead_after=5")


def node(job: Job, name: str, *flags: str, cannot: str = "") -> Agent:
    env = {"CANNOT": cannot} if cannot else None
    return job.node(name, *CONF, *flags, nnodes="1:3", command=[SCRIPT, str(job.work)], env=env)


def trains(job: Job, *flags: str) -> Agent:
    first = node(job, "a", *flags)
    wait_for("a step", (job.work / "trained").exists, 60)
    return first


def refused(job: Job, name: str, code: int, text: str, *flags: str, cannot: str) -> None:
    """A node joins that cannot do something: it ends with its own code, and says why."""
    agent = node(job, name, *flags, cannot=cannot)
    assert agent.wait(60) == code, agent.output
    assert "the run goes on without this node" in agent.output
    assert text in agent.output


def ends(job: Job, first: Agent, *names: str) -> None:
    """The run ends well, at no cost, and has said why it has left nodes out."""
    (job.work / "over").touch()
    assert first.wait(60) in (0, 143), first.output
    for name in names:
        assert f"node {name} is left out, at no cost to the run: " in first.output
    assert "restarts 0 of 3" in first.output
    assert not job.events("restart_charged")


def test_newcomers_that_cannot_begin_do_not_disturb_a_live_run(job: Job) -> None:
    ahead = "--rdzv-conf", "start_wait=0"
    first = trains(job, *ahead)
    refused(job, "b", 90, "No module named 'module_that_this_node_lacks'", *ahead, cannot="import")
    refused(job, "c", 93, "it has seed 8, the run has seed 7", *ahead, cannot="seed")
    assert {event["round"] for event in job.events("round_formed")} == {1}
    assert "root cause: local rank 0 on node b" in job.agents[1].output
    ends(job, first, "b", "c")


def test_newcomers_that_fail_in_a_live_round_cost_nothing(job: Job) -> None:
    first = trains(job)
    refused(job, "b", 93, "The ranks were given different arguments", cannot="seed, late")
    refused(job, "e", 93, "has sample 63 (as a hash; see compare_samples) ", cannot="content")
    refused(job, "c", 1, "this node cannot do a step", cannot="step")
    refused(job, "d", 93, "does not fit this script's restored", cannot="restore")
    wait_for("a line", lambda: "no further nodes take part" in first.output, 20)
    assert len({event["pid"] for event in job.events("worker_started") if event["rank"] == 0}) == 1, "node a's"
    ends(job, first, "b", "c", "d", "e")


def test_newcomers_that_fail_in_a_round_of_new_workers_cost_nothing(job: Job) -> None:
    first = trains(job, "--no-live")
    refused(job, "b", 90, "No module named 'module_that_this_node_lacks'", "--no-live", cannot="import")
    refused(job, "c", 93, "The ranks were given different arguments", "--no-live", cannot="seed")
    ends(job, first, "b", "c")


def test_the_same_failure_on_two_hosts_stops_admission(job: Job) -> None:
    first = trains(job, "--no-live")
    refused(job, "b", 1, "this node cannot do a step", "--no-live", cannot="step")
    refused(job, "c", 1, "this node cannot do a step", "--no-live", cannot="step")
    wait_for("a line", lambda: "no further nodes take part" in first.output, 20)
    spare = node(job, "d", "--no-live")
    wait_for("its line", lambda: "no further nodes take part" in spare.output, 40)
    rounds = len(job.events("round_formed"))
    ends(job, first, "b", "c")
    assert len(job.events("round_formed")) == rounds
