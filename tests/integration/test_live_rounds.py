"""Workers that can be suspended keep their processes when a round ends: real agents, workers without torch."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from etcd_servers import cluster, endpoints
from harness import SCRIPTS, Agent, Job, alive, read_lines, wait_for

LIVE = str(SCRIPTS / "live.py")


def noted(job: Job, what: str, number: int | None = None) -> list[dict[str, Any]]:
    """What workers noted, of one round."""
    found = read_lines(job.work / "live.jsonl")
    return [note for note in found if note["what"] == what and number in (None, note["round"])]


def begun(job: Job, number: int, workers: int = 2) -> dict[int, int]:
    """Wait until a round's workers have begun; return their pids by rank."""

    def probe() -> bool:
        return len(noted(job, "begins", number)) == workers

    try:
        wait_for(f"round {number}", probe, 40)
    except AssertionError as error:
        raise AssertionError(f"{error}\n" + "\n".join(agent.output for agent in job.agents)) from None
    return {note["rank"]: note["pid"] for note in noted(job, "begins", number)}


def launch(job: Job, *flags: str, script: str = "", nproc: int = 2) -> Agent:
    command = [LIVE, str(job.work), *filter(None, [script])]
    return job.launch("--standalone", "--nproc", str(nproc), *flags, command=command)


def test_the_worker_beside_a_killed_one_keeps_its_process(job: Job) -> None:
    agent = launch(job)
    first = begun(job, 1)
    os.kill(first[0], signal.SIGKILL)
    second = begun(job, 2)
    assert second[1] == first[1]
    assert second[0] != first[0]
    assert "signal 9" in noted(job, "begins", 2)[0]["reason"]
    job.finish()
    assert agent.wait() == 0
    assert "round 2: 1 worker kept, 1 started" in agent.output
    assert [(e["round"], e["local_rank"], e["pid"]) for e in job.events("worker_kept")] == [(2, 1, first[1])]
    starts = [(event["round"], event["local_rank"]) for event in job.events("worker_started")]
    assert starts == [(1, 0), (1, 1), (2, 0)]
    exits = [(event["round"], event["local_rank"], event["exit_code"]) for event in job.events("worker_exited")]
    assert sorted(exits) == [(1, 0, -9), (2, 0, 0), (2, 1, 0)]
    assert [event["restarts"] for event in job.events("restart_charged")] == [1]
    assert [path.parent.parent.name for path in job.logged("round_*/1/stdout.log")] == ["round_1"]


def test_a_broken_connection_ends_the_round_and_no_process(job: Job) -> None:
    agent = launch(job)
    first = begun(job, 1)
    job.tell("disconnect-1")
    assert begun(job, 2) == first
    job.finish()
    assert agent.wait() == 0
    assert "round 2: 2 workers kept, 0 started" in agent.output
    assert "RuntimeError: Connection closed by peer" in job.event("round_broken")["cause"]


def test_a_broken_connection_is_not_the_cause_if_a_worker_was_killed(job: Job) -> None:
    """The report on the broken connection may come first."""
    agent = launch(job, "--max-restarts", "0")
    first = begun(job, 1)
    job.tell("disconnect-0")
    os.kill(first[1], signal.SIGKILL)
    assert agent.wait() == 137
    assert "cause: rank 1 " in agent.output
    assert not alive(first[0])


def test_the_exception_of_a_kept_worker_is_in_the_files_of_the_round_in_which_it_was_started(job: Job) -> None:
    agent = launch(job, "--max-restarts", "1")
    os.kill(begun(job, 1)[0], signal.SIGKILL)
    begun(job, 2)
    job.tell("fail-1")
    assert agent.wait() == 91
    assert "ValueError: told to fail" in agent.output
    (errors,) = job.logged("round_*/1/error.json")
    assert errors.parent.parent.name == "round_1"
    assert str(errors.parent) in agent.output


def test_a_worker_that_does_not_leave_the_round_in_time_is_killed(job: Job) -> None:
    agent = launch(job, script="--deaf")
    first = begun(job, 1)
    os.kill(first[1], signal.SIGKILL)
    second = begun(job, 2)
    assert not {*first.values()} & {*second.values()}
    job.finish()
    assert agent.wait() == 0
    assert "the workers of local rank 0 have not left the round in time; they are killed" in agent.output
    assert len(noted(job, "suspends", 1)) == 1
    assert "had failed" not in agent.output


def test_no_live_starts_all_workers_anew(job: Job) -> None:
    agent = launch(job, "--no-live")
    first = begun(job, 1)
    os.kill(first[1], signal.SIGKILL)
    second = begun(job, 2)
    assert not {*first.values()} & {*second.values()}
    job.finish()
    assert agent.wait() == 0
    assert not noted(job, "suspends")
    assert {note["patience_s"] for note in noted(job, "connects")} == {0.0}


def parked(job: Job) -> tuple[Agent, int]:
    """Two nodes of a worker each, of which the second is then lost; return the first and the pid of its worker."""
    options = ["--rdzv-conf", "dead_after=15"]
    first = job.node("a", *options, nnodes="2", command=[LIVE, str(job.work)])
    first.says("hosts the run")
    second = job.node("b", *options, "--node-rank", "1", nnodes="2", command=[LIVE, str(job.work)])
    pids = begun(job, 1)
    before = first.output.count("parked with 1 node")  # as it waited for the second
    second.kill()
    wait_for("the other worker to be told", lambda: noted(job, "suspends", 1))
    first.says("parked with 1 node", times=before + 1)
    return first, pids[0]


def test_a_suspended_worker_waits_as_long_as_its_node(job: Job) -> None:
    agent, pid = parked(job)
    second = job.node("b", nnodes="2", command=[LIVE, str(job.work)])
    assert pid in begun(job, 2).values()
    job.finish()
    assert (agent.wait(), second.wait()) == (0, 0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "told to leave"])
def test_no_suspended_worker_outlives_its_agent(job: Job, number: int) -> None:
    agent, pid = parked(job)
    agent.signal(number)
    agent.wait()
    wait_for("its end", lambda: not alive(pid), 20)


def test_a_suspended_worker_that_dies_is_started_with_the_next_round(job: Job) -> None:
    agent, pid = parked(job)
    os.kill(pid, signal.SIGKILL)
    agent.says("which was suspended, ended with signal 9")
    second = job.node("b", nnodes="2", command=[LIVE, str(job.work)])
    assert pid not in begun(job, 2).values()
    job.finish()
    assert (agent.wait(), second.wait()) == (0, 0)
    assert not job.events("restart_charged")


def test_a_node_that_leaves_has_its_drained_workers_exit_and_the_others_keep_theirs(job: Job) -> None:
    options = ["--join-settle", "60"]
    first = job.node("a", *options, nnodes="1:2", command=[LIVE, str(job.work)])
    first.says("hosts the run")
    second = job.node("b", *options, "--node-rank", "1", nnodes="1:2", command=[LIVE, str(job.work)])
    pids = begun(job, 1)
    second.signal(signal.SIGTERM)
    assert second.wait() == 143
    assert [note["pid"] for note in noted(job, "exits")] == [pids[1]]
    assert begun(job, 2, workers=1) == {0: pids[0]}
    job.finish()
    assert first.wait() == 0
    assert job.events("round_drained")[-1]["step"] == 7


@pytest.mark.slow
def test_suspended_workers_get_their_places_from_the_next_leader(job: Job, tmp_path: Path) -> None:
    """The leader's own workers die with it; those of the others are parked until one of them leads."""
    directory = tmp_path / "etcd"
    directory.mkdir()
    with cluster(directory) as servers:
        where = ["--rdzv-backend", "etcd", "--rdzv-endpoint", endpoints(servers), "--rdzv-id", "run"]
        flags = ["--nnodes", "1:3", "--join-settle", "60", "--dead-after", "15", *where]
        agents = [job.launch(*flags, "--node-id", name, name=name, command=[LIVE, str(job.work)]) for name in "abc"]
        first = begun(job, 1, workers=3)
        leader = str(job.events("leader_elected")[-1]["node"])
        agents["abc".index(leader)].kill()
        second = begun(job, 2, workers=2)
        assert {*second.values()} < {*first.values()}
        job.finish()
        assert [agent.wait() for agent in agents if agent.name != leader] == [0, 0]
    assert not job.events("restart_charged")
