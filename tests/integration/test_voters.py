"""A run whose record three hosts keep together: real agents, of which any may be lost."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
from dataclasses import replace
from typing import Any

import pytest
from changes import Changes, ctl
from harness import LOOP, Agent, Job, free_port, round_of, tree, wait_for

from elastic_launch.rendezvous.voters.messages import (
    MESSAGES,
    Prepare,
    ReadValue,
    VoterAnswer,
    VoterRequest,
    group_of,
)

pytestmark = pytest.mark.timeout(600)

TIMING = ["--rdzv-conf", "dead_after=3,beat=0.3"]


class Run:
    """Nodes of one run, of which the first ones are voters."""

    def __init__(self, job: Job, voters: int = 3, command: list[str] | None = None) -> None:
        self.job = job
        self.changes = Changes(job, live=True)
        self.command = command or self.changes.command
        self.endpoints = [f"127.0.0.1:{free_port()}" for _ in range(voters)]
        self.agents: dict[str, Agent] = {}

    def start(self, *names: str, nnodes: str = "1:3", flags: tuple[str, ...] = ()) -> None:
        for name in names:
            several = ["--nnodes", nnodes, "--nproc", "1", "--node-id", name, "--rdzv-id", "run", *TIMING, *flags]
            where = ["--rdzv-endpoint", ",".join(self.endpoints)]
            env = {"NODE": name}
            self.agents[name] = self.job.launch(*several, *where, name=name, command=self.command, env=env)

    def leader(self, term: int = 1) -> str:
        """The node that was elected last, in this term or a later one."""

        def found() -> list[dict[str, Any]]:
            return [event for event in self.job.events("leader_elected") if event["term"] >= term]

        return str(max(wait_for(f"a leader of term {term}", found), key=lambda event: event["term"])["node"])

    def kill(self, name: str) -> None:
        """Kill all processes of a node, as when its host loses power."""
        agent = self.agents.pop(name)
        for pid in tree(agent.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.process.wait()

    def finish(self, undisturbed: str) -> None:
        assert self.changes.finish(*self.agents.values())["hash"] == undisturbed
        assert not self.job.events("restart_charged")
        left = self.job.logs.glob("run/voter-*.json")  # of killed agents
        assert not [path for path in left if any(_of(agent, path.name) for agent in self.agents.values())]


@pytest.fixture
def run(job: Job) -> Run:
    return Run(job)


@pytest.mark.slow
def test_training_goes_on_without_the_leaders_host_and_takes_it_in_again(run: Run, undisturbed: str) -> None:
    run.start("a", "b", "c")
    before = run.changes.trains(3, steps=5)
    leader = run.leader()
    found = ctl("status", "--rdzv-endpoint", ",".join(run.endpoints), "--rdzv-id", "run")
    assert f"leader {leader}" in found.stdout, found
    run.kill(leader)
    after = run.changes.trains(2, after=before, steps=5)
    second = run.leader(2)
    assert second != leader
    assert ctl("status", "--log-dir", str(run.job.logs)).returncode == 0
    run.start(leader)
    run.changes.trains(3, after=after)
    run.finish(undisturbed)


@pytest.mark.soak
@pytest.mark.parametrize("line", ["is voter", "the first round forms", "round 1 formed in", "a new round forms"])
def test_the_leaders_host_is_lost_as_a_round_forms(run: Run, undisturbed: str, line: str) -> None:
    run.start("a", "b", "c", nnodes="2:3")
    leader = run.leader()
    if line == "a new round forms":
        run.changes.trains(3, steps=3)
        run.kill(next(name for name in "abc" if name != leader))
        run.agents[leader].says(line)
        run.kill(leader)
        run.start(*(name for name in "abc" if name not in run.agents))
    else:
        run.agents[leader].says(line)
        run.kill(leader)
    run.changes.trains(2 if line != "a new round forms" else 3, after=0)
    run.leader(2)
    run.finish(undisturbed)


@pytest.mark.slow
def test_a_frozen_leader_is_succeeded_and_comes_back_as_a_new_node(run: Run, undisturbed: str) -> None:
    dead_after = 8
    run.start("a", "b", "c", flags=("--rdzv-conf", f"dead_after={dead_after}"))
    number = run.changes.trains(3, steps=3)
    leader = run.leader()
    frozen = run.agents[leader].freeze()
    number = run.changes.trains(2, after=number)
    assert run.leader(2) != leader
    # Not always term 2: a candidate whose write gets no answer in time raises the term again.
    elected = max(run.job.events("leader_elected"), key=lambda event: event["term"])
    (formed,) = wait_for(
        "the round's event", lambda: [x for x in run.job.events("round_formed") if x["round"] == number]
    )
    assert formed["clock"] - elected["clock"] < dead_after, "it was waited for a second time"
    run.agents[leader].thaw(frozen)
    run.changes.trains(3, after=number)
    run.finish(undisturbed)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("its file is there", marks=pytest.mark.soak),
        pytest.param("its file is lost", marks=pytest.mark.slow),
    ],
)
def test_without_a_majority_the_last_node_parks_until_one_comes_back(run: Run, undisturbed: str, how: str) -> None:
    run.start("a", "b", "c")
    number = run.changes.trains(3, steps=3)
    leader = run.leader()
    first, second = (name for name in "abc" if name != leader)
    run.kill(first)
    number = run.changes.trains(2, after=number)
    run.kill(second)
    last = run.agents[leader]
    last.says("2 of 3 voters lost")
    if how == "its file is lost":
        lost = [path for path in run.job.logs.glob("run/voter-*.json") if not _of(last, path.name)]
        lost[0].unlink()
        run.start(first)
        run.start(second)
    else:
        run.start(first)
    run.changes.trains(3 if how == "its file is lost" else 2, after=number)
    run.finish(undisturbed)


def _of(agent: Agent, file: str) -> bool:
    """Whether a voter's file is that of this agent."""
    found = re.search(r"this node is voter ([\d.]+):(\d+)", agent.output)
    return found is not None and file == f"voter-{found[1]}_{found[2]}.json"


def _asked(agent: Agent, request: VoterRequest) -> VoterAnswer:
    """An agent's answer as a voter."""
    found = re.search(r"this node is voter ([\d.]+):(\d+)", agent.output)
    assert found is not None
    with socket.create_connection((found[1], int(found[2])), timeout=20) as link:
        link.sendall(MESSAGES.pack(request))
        answer = MESSAGES.unpack(link.makefile("rb").readline())
    assert isinstance(answer, VoterAnswer)
    return answer


@pytest.mark.slow
def test_the_loss_of_a_spare_does_not_end_a_leader_that_another_voter_refused(job: Job) -> None:
    """The other one had promised a higher ballot to a candidate that came to nothing, as itself in a race."""
    run = Run(job, command=[LOOP, str(job.work)])
    run.start("a", "b", "c", nnodes="1:2")
    trains = {worker["env"]["NODE"] for worker in job.world(2)}
    leader = run.leader()
    lost, refuses = sorted({*"abc"} - {leader}, key=lambda name: (name in trains, name))
    group = group_of("run", run.endpoints)
    held = _asked(run.agents[leader], ReadValue(1, group))
    ballot = replace(held.promised, number=held.promised.number + 1)
    assert _asked(run.agents[refuses], Prepare(2, group, ballot, held.life)).granted
    run.kill(lost)

    def follows() -> bool:
        assert len(job.events("leader_elected")) == 1
        promised = [_asked(run.agents[name], ReadValue(3, group)).promised for name in (leader, refuses)]
        return promised[0] == promised[1] > ballot

    wait_for("one ballot", follows)
    job.finish()
    assert [agent.wait() for agent in run.agents.values()] == [0, 0], [x.output for x in run.agents.values()]
    assert len(job.events("leader_elected")) == 1


@pytest.mark.soak
def test_a_node_that_is_no_voter_trains_and_never_leads(run: Run, undisturbed: str) -> None:
    run.start("a", "b", "c", nnodes="1:4")
    run.leader()
    run.changes.trains(3)
    run.start("d", nnodes="1:4")
    number = run.changes.trains(4)
    run.agents["d"].says("not one of the 3 hosts that keep the run's record together, so it never leads")
    run.kill(run.leader())
    run.changes.trains(3, after=number)
    assert run.leader(2) != "d"
    run.finish(undisturbed)


@pytest.mark.soak
def test_an_orderly_leave_of_the_leader_is_not_waited_for(run: Run, undisturbed: str) -> None:
    run.start("a", "b", "c")
    number = run.changes.trains(3, steps=3)
    leader = run.leader()
    agent = run.agents.pop(leader)
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 143, agent.output
    run.changes.trains(2, after=number)
    assert f"leader {leader} left" in run.job.events("leader_elected")[-1]["cause"]
    run.finish(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "phase",
    [
        "running",
        "broken",
        *(pytest.param(x, marks=pytest.mark.soak) for x in ("gathering", "draining", "ending", "ended")),
    ],
)
def test_the_leaders_host_is_lost_in_each_phase(job: Job, phase: str) -> None:
    """Its workers need no torch, except for a drain: that takes workers which stop after the same step."""
    drains = Changes(job, step_time=1.5, live=True).command
    stays = [LOOP, str(job.work), "--ignore-term"]  # so that the phases in which a node stops its workers last
    run = Run(job, command=drains if phase == "draining" else stays)
    most = "1" if phase != "ending" else "0"
    run.start("a", "b", "c", nnodes="2:3", flags=("--shutdown-timeout", "4", "--max-restarts", most))
    name = run.leader()
    leader, others = run.agents[name], [run.agents[other] for other in "abc" if other != name]
    if phase == "gathering":
        leader.says("the first round forms")
        run.kill(name)
    elif phase == "draining":
        number = run.changes.trains(3)
        others[0].signal(signal.SIGTERM)
        leader.says(f"round {number} drains")
        run.kill(name)
        assert others[0].wait() == 143
        run.start(others.pop(0).name)
        run.changes.trains(2, after=number)
        assert job.events("leader_elected")[-1]["term"] > 1
        run.changes.hurry()
    else:
        workers = job.world(3)
        lost = next(worker for worker in workers if worker["env"]["NODE"] != name)
        if phase in ("broken", "ending"):
            job.tell(f"exit-{lost['env']['RANK']}", "7")
            leader.says(f"round {round_of(lost)} broken after")
        elif phase == "ended":
            job.finish()
            leader.says("done: all workers finished")
        run.kill(name)
    if phase in ("gathering", "running", "broken", "ending"):
        job.world(2, after=round_of(job.started()[-1]) if job.started() else 0)
        run.leader(2)
        job.finish()
    assert [agent.wait(60) for agent in run.agents.values()] == [0] * len(run.agents), [x.output for x in others]
    assert not job.events("restart_charged")


@pytest.mark.slow
def test_of_five_voters_two_may_be_lost(job: Job) -> None:
    run = Run(job, 5, [LOOP, str(job.work)])
    run.start(*"abcde", nnodes="1:5")
    number = round_of(job.world(5)[0])
    leader = run.leader()
    first, second, *rest = [leader, *(name for name in "abcde" if name != leader)]
    run.kill(first)
    run.kill(second)
    number = round_of(job.world(3, after=number)[0])
    leads = run.leader(2)
    third = next(name for name in rest if name != leads)
    run.kill(third)
    for agent in run.agents.values():
        agent.says("3 of 5 voters lost")
    run.start(third, nnodes="1:5")
    number = round_of(job.world(3, after=number)[0])
    run.start(first, second, nnodes="1:5")
    job.world(5, after=number)
    job.finish()
    assert [agent.wait() for agent in run.agents.values()] == [0] * 5, [x.output for x in run.agents.values()]
    assert not job.events("restart_charged")


@pytest.mark.slow
def test_an_end_that_only_one_voter_has_reaches_all_that_come_back(job: Job) -> None:
    """The node that trains cannot write the end, since the others are gone; they come back, and none waits alone."""
    run = Run(job, command=[LOOP, str(job.work)])
    token = job.directory / "token"
    token.write_text("correct-horse-battery-staple")
    token.chmod(0o600)
    flags = ("--rdzv-conf", "dead_after=10,beat=1", "--token-file", str(token))
    run.start("a", "b", "c", nnodes="1:1", flags=flags)
    (worker,) = job.world(1)
    last = worker["env"]["NODE"]
    others = [name for name in "abc" if name != last]
    run.leader()
    for name in others:
        run.kill(name)
    job.finish()
    run.agents[last].says("2 of 3 voters lost")
    run.start(*others, nnodes="1:1", flags=flags)
    assert [agent.wait() for agent in run.agents.values()] == [0] * 3, [x.output for x in run.agents.values()]
