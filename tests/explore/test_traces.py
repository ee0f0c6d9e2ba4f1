"""What real agents do is replayed into the machines and the explorer's invariants; drifts between both are found."""

from __future__ import annotations

import os
import signal
from dataclasses import replace as replaced

import pytest
from harness import SCRIPTS, Job, free_port, wait_for
from harness import read_lines as lines_of

from elastic_agents import policy
from elastic_agents import policy_types as v
from elastic_launch import contract as c
from elastic_launch.rendezvous.leader.machine import LeaderMachine
from elastic_launch.rendezvous.wire import messages as m
from explore.recorder import TRACES, Line, recorded
from explore.traces import Drift, replay

LIVE = str(SCRIPTS / "live.py")

TIMING = ["--rdzv-conf", "dead_after=3,beat=0.3"]


@pytest.mark.slow
def test_what_agents_do_as_a_worker_and_the_leader_are_killed_is_what_the_machines_do(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = job.directory / "traces"
    where = ",".join(f"127.0.0.1:{free_port()}" for _ in range(3))
    for name in "abc":
        flags = [*TIMING, "--rdzv-id", "run", "--nnodes", "1:3"]
        env = {"NODE": name, TRACES: str(traces)}
        job.node(name, *flags, endpoint=where, command=[LIVE, str(job.work)], env=env)
    first = _begun(job, 1, 3)
    os.kill(first[0], signal.SIGKILL)
    _begun(job, 2, 3)
    leader = job.events("leader_elected")[-1]["node"]
    next(agent for agent in job.agents if agent.name == leader).kill()
    _begun(job, 3, 2)
    job.finish()
    assert [agent.wait() for agent in job.agents if agent.name != leader] == [0, 0]
    lines = recorded(traces)
    assert len(replay(lines).checks.rounds) == 3
    for drift, why in DRIFTS.values():
        with monkeypatch.context() as patch, pytest.raises(Drift, match=why):
            replay(drift(lines, patch))


# Drifts: the processes do something else than the machines, or than the explored worlds let them do.


def _agents_decide_otherwise(lines: list[Line], patch: pytest.MonkeyPatch) -> list[Line]:
    exited = policy._exited
    patch.setattr(policy, "_exited", lambda view, event: exited(view, replaced(event, exit_code=0)))
    return lines


def _the_leader_decides_by_something_else(lines: list[Line], patch: pytest.MonkeyPatch) -> list[Line]:
    """As if it had read a clock of its own."""
    turn = LeaderMachine.turn
    patch.setattr(LeaderMachine, "turn", lambda self, now: turn(self, now + 2.5))
    return lines


def _an_order_is_lost_on_its_link(lines: list[Line], patch: pytest.MonkeyPatch) -> list[Line]:
    first = next(x for x in lines if x.method == "obey" and isinstance(x.arguments[0], m.Break))
    return [x for x in lines if x is not first]


def _orders_are_sent_before_the_record_is_written(lines: list[Line], patch: pytest.MonkeyPatch) -> list[Line]:
    last = max(i for i, x in enumerate(lines) if x.method == "obey" and isinstance(x.arguments[0], m.Form))
    writes = [x for x in lines[:last] if x.machine == "store"]
    rest = [x for x in lines if x is not writes[-1]]
    place = rest.index(lines[last]) + 1
    return [*rest[:place], writes[-1]._replace(at=lines[last].at), *rest[place:]]


def _workers_go_on_in_the_last_round(lines: list[Line], patch: pytest.MonkeyPatch) -> list[Line]:
    """As if a suspended worker had never said so."""
    first = next(x for x in lines if x.machine == "policy" and _says_suspended(x.arguments[1]))
    return [x for x in lines if x is not first]


def _says_suspended(event: object) -> bool:
    return isinstance(event, v.Reported) and isinstance(event.report, c.Suspended)


DRIFTS = {
    "an agent decides otherwise": (_agents_decide_otherwise, "policy.decide returned"),
    "a leader decides by something else": (_the_leader_decides_by_something_else, "leader.turn returned"),
    "an order is lost": (_an_order_is_lost_on_its_link, "another order"),
    "orders precede the record": (_orders_are_sent_before_the_record_is_written, "before the record had it"),
    "workers go on": (_workers_go_on_in_the_last_round, "returned|still trains"),
}


def _begun(job: Job, number: int, workers: int) -> dict[int, int]:
    def probe() -> dict[int, int]:
        notes = lines_of(job.work / "live.jsonl")
        found = {x["rank"]: x["pid"] for x in notes if x["what"] == "begins" and x["round"] == number}
        return found if len(found) == workers else {}

    return wait_for(f"round {number}", probe, 60)
